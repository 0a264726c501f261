/* kv_pool.h - the worker's KV blocks: one arena made at boot, blocks with reference counts, and the
 * prefix cache.
 *
 * A block is FREE (on no list), HELD (ref > 0) or CACHED (ref 0, its content published under its
 * chain hash; the least recently used block is evicted first). A block id alone identifies no
 * content: it is valid only for a holder of a reference. Whatever outlives a reference is
 * identified by a number that is never used twice. A prefix cache entry names its parent's
 * publication number (kv_pool.c). A remote writer names the slot and generation of its grant
 * (common/transfer), and the worker keeps its own reference until the writer has retired (I2).
 * Source: Kwon et al. 2023 (PagedAttention) 4.2-4.4; prefix cache by hash chain as in vLLM, plus
 * exact token comparison on a hit.
 *
 * Threads: one owning thread (the engine's) for all functions; the transfer threads only touch the
 * bytes of blocks that the owner granted. */
#ifndef TD_KV_POOL_H
#define TD_KV_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/hash.h"
#include "common/base/mem.h"
#include "common/base/status.h"
#include "common/kv/kv_layout.h"
#include "common/base/prefix_hash.h"

struct td_kv_pool;

struct td_kv_pool_config {
    struct td_kv_layout layout;
    int32_t n_blocks;
    bool shareable;    /* back the arena with a memfd, for the shm path */
    bool show;         /* progress lines on stderr while the pages are touched, when that
                          takes long */
    bool prefix_cache; /* keep published blocks after release */
    /* NULL: the pool makes an arena of its own; else memory for n_blocks blocks, which may be a
     * device's, because the pool never touches the bytes */
    void *borrowed;
    /* The hash of tokens for the prefix index; NULL: td_hash128. A test passes one under which
     * different blocks collide. */
    struct td_hash128 (*hash)(const void *data, size_t n_bytes, uint64_t seed);
    size_t borrowed_bytes; /* its size, when there is more behind the blocks; 0 = no more */
};

td_status td_kv_pool_create(const struct td_kv_pool_config *config, struct td_kv_pool **ret_pool,
                            struct td_err *err);
void td_kv_pool_destroy(struct td_kv_pool *pool);

const struct td_kv_layout *td_kv_pool_layout(const struct td_kv_pool *pool);
/* with borrowed memory only base and bytes are set */
const struct td_arena *td_kv_pool_arena(const struct td_kv_pool *pool);
/* the first byte of a block */
uint8_t *td_kv_pool_block(const struct td_kv_pool *pool, int32_t block_id);

/* Takes n blocks with reference 1 each. Prefers runs of adjacent ids, which make longer transfers,
 * and evicts cached blocks when no free one is left. All or nothing: TD_ERR_AGAIN when fewer than n
 * are free or cached. */
td_status td_kv_pool_alloc(struct td_kv_pool *pool, int32_t n, int32_t *ret_block_ids);
void td_kv_pool_ref(struct td_kv_pool *pool, int32_t block_id);
/* Drops one reference; at zero the block becomes CACHED when it was published, else FREE. */
void td_kv_pool_unref(struct td_kv_pool *pool, int32_t block_id);

/* Prefix cache. A chain hash stands for the salt and all tokens up to and including a full block;
 * its seed is random per process. Blocks published under one salt are found under that salt only
 * (the salt is compared, like the tokens, and not only hashed); {0, 0} is no salt. lookup: finds
 * the longest run of leading full blocks of tokens[0..n) that are present with exactly these
 * tokens, takes a reference on each, writes their ids, and returns how many there are (at most
 * max_blocks). */
int32_t td_kv_prefix_lookup(struct td_kv_pool *pool, struct td_prefix_salt salt,
                            const int32_t *tokens, int32_t n_tokens, int32_t max_blocks,
                            int32_t *ret_block_ids);
/* publish: declares that block_ids[i] holds the finished KV of tokens[i*block_size ..
 * (i+1)*block_size) for i in [first, n_full). Leaves alone blocks that are published already, or
 * whose content another block already publishes. The caller holds references, and uses one salt
 * during a block's life. */
void td_kv_prefix_publish(struct td_kv_pool *pool, struct td_prefix_salt salt,
                          const int32_t *tokens, const int32_t *block_ids, int32_t first,
                          int32_t n_full);
/* drops every cached block */
void td_kv_prefix_clear(struct td_kv_pool *pool);

/* Reports for routers' prefix indices, each under its own seed and in its own time: the chain
 * hashes (prefix_hash.h) of the blocks that a lookup can find. router: 0..TD_KV_MAX_REPORTS-1, the
 * caller's numbers. A block that came and went between two reports is not reported at all; at most
 * n_blocks of each kind are pending. begin: called for a router that knows nothing. Turns its
 * reports on; all blocks will be reported anew, under its seed. O(n_blocks). TD_ERR_NOMEM: the
 * router is told of no block. */
enum { TD_KV_MAX_REPORTS = 8 };
td_status td_kv_report_begin(struct td_kv_pool *pool, int router, uint64_t seed);
/* That router is told nothing more. */
void td_kv_report_end(struct td_kv_pool *pool, int router);
/* Takes the pending changes, at most `max` of each kind. The receiver applies evicted ones before
 * added ones. The rest stays for the next call. */
void td_kv_report_take(struct td_kv_pool *pool, int router, size_t max, uint64_t *ret_added,
                       size_t *ret_n_added, uint64_t *ret_evicted, size_t *ret_n_evicted);

struct td_kv_pool_stats {
    int32_t n_blocks, n_held, n_cached, n_free; /* held + cached + free = n_blocks */
    uint64_t n_allocs, n_evictions, n_prefix_queries_tokens, n_prefix_hit_tokens;
};
void td_kv_pool_stats(const struct td_kv_pool *pool, struct td_kv_pool_stats *ret_stats);

#endif
