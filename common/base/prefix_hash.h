/* prefix_hash.h - chain hashes of the whole blocks of a token sequence: the names under which
 * workers report prefix blocks and the router looks for them.
 *
 *   hash[0] = H(tokens of block 0, seed)
 *   hash[i] = H(tokens of block i, hash[i - 1])
 *
 * H is XXH3-64 over the tokens as little-endian int32, keyed by its second argument. So hash[i]
 * stands for every token of blocks 0..i, and nobody without the seed can construct a prompt with a
 * chosen hash. Both sides must use the same seed (Welcome.prefix_seed) and block size. A hash of 64
 * bits only finds candidates: the worker that serves a block compares its tokens (I2).
 *
 * A salt separates the prompts of one owner from those of everybody else. It stands before the
 * first block of a chain, so equal tokens under different salts have different names, and the pool
 * never takes one for the other (kv_pool.h). All zero means no salt: such prompts share one name
 * space.
 *
 * Pure; any thread. */
#ifndef TD_BASE_PREFIX_HASH_H
#define TD_BASE_PREFIX_HASH_H

#include <stddef.h>
#include <stdint.h>

#define TD_PREFIX_SALT_BYTES 16 /* bytes on the wire: lo, then hi, little-endian */
struct td_prefix_salt {
    uint64_t lo, hi;
};

/* The seed of the chains under this salt; without one it is `seed` itself. */
uint64_t td_prefix_seed(uint64_t seed, struct td_prefix_salt salt);

/* Writes the hashes of the leading whole blocks of tokens[0..n_tokens), at most `max`; returns
 * how many. block_size in tokens, >= 1. */
size_t td_prefix_hashes(const int32_t *tokens, size_t n_tokens, uint32_t block_size, uint64_t seed,
                        uint64_t *ret_hashes, size_t max);

#endif
