/* cache.h - a set of chain hashes with reference counts, and an LRU list of those without a
 * reference: the prefix cache of a simulated worker, and the global cache of the trace statistics.
 * Entries are indices; all operations are O(1). One thread. */
#ifndef TD_SIM_CACHE_H
#define TD_SIM_CACHE_H

#include <stdint.h>

#define TD_SIM_NONE UINT32_MAX

struct td_sim_cache_entry {
    uint64_t hash;
    uint32_t refs;
    uint32_t next;           /* next in its bucket, or in the free list */
    uint32_t older, fresher; /* while linked */
};

struct td_sim_cache {
    struct td_sim_cache_entry *entries;
    uint32_t *buckets;
    /* free_head_1: index + 1, 0 = none, so that a zeroed struct is an empty cache */
    uint32_t n_buckets, capacity, n_used, n_linked, free_head_1;
    uint32_t oldest, freshest; /* valid while n_linked > 0 */
};

/* TD_SIM_NONE when absent */
uint32_t td_sim_cache_find(const struct td_sim_cache *cache, uint64_t hash);
/* the hash must be absent; the new entry is not linked and has 0 references */
uint32_t td_sim_cache_insert(struct td_sim_cache *cache, uint64_t hash);
/* moves the entry to the fresh end of the LRU list */
void td_sim_cache_link_fresh(struct td_sim_cache *cache, uint32_t entry);
void td_sim_cache_unlink(struct td_sim_cache *cache, uint32_t entry);
void td_sim_cache_remove(struct td_sim_cache *cache, uint32_t entry); /* linked or not */
void td_sim_cache_free(struct td_sim_cache *cache);                   /* empty again */

#endif
