/* hash.h - XXH3-128 with a random secret seed per process, for prefix chains, and CRC32C for
 * frames. Pure. */
#ifndef TD_BASE_HASH_H
#define TD_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

struct td_hash128 {
    uint64_t lo, hi;
};

struct td_hash128 td_hash128(const void *data, size_t n_bytes, uint64_t seed);
uint64_t td_hash64(const void *data, size_t n_bytes, uint64_t seed);
/* The Castagnoli polynomial; start with crc = 0. Uses SSE4.2 when the CPU has it. */
uint32_t td_crc32c(uint32_t crc, const void *data, size_t n_bytes);

#endif
