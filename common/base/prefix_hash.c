/* prefix_hash.c - one XXH3 call per block, each keyed by the hash of the block before. */
#include "common/base/prefix_hash.h"

#include "common/base/hash.h"
#include "common/base/status.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "chain hashes are defined over little-endian tokens"
#endif

uint64_t td_prefix_seed(uint64_t seed, struct td_prefix_salt salt)
{
    return salt.lo || salt.hi ? td_hash64(&salt, sizeof salt, seed) : seed;
}

size_t td_prefix_hashes(const int32_t *tokens, size_t n_tokens, uint32_t block_size, uint64_t seed,
                        uint64_t *ret_hashes, size_t max)
{
    TD_ASSERT(block_size > 0);
    size_t n = n_tokens / block_size;
    if (n > max) n = max;
    uint64_t key = seed;
    for (size_t i = 0; i < n; i++)
        ret_hashes[i] = key = td_hash64(tokens + i * block_size, block_size * sizeof *tokens, key);
    return n;
}
