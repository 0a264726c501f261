/* prefix_index.h - which worker holds which prefix blocks, as far as the router was told: a set of
 * (chain hash, worker).
 *
 * A chain hash identifies all tokens up to and including one full block (td_prefix_hashes,
 * common/base/prefix_hash.h), so depth i of a request is held when hash i is. Workers evict the
 * leaves of a chain before its root, so what a worker holds of a chain is a run from the start.
 * Where a lost report breaks this, a lookup may say too much or too little: the index is a hint,
 * workers decide by comparing tokens (I2), and mispredictions are counted.
 *
 * Bounded: max_entries pairs; when full, additions are dropped and counted (a worker's reset
 * frees its entries). No allocation after create. Pure, one thread. Errors: none but create's. */
#ifndef TD_ROUTER_PREFIX_INDEX_H
#define TD_ROUTER_PREFIX_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_prefix_index;

td_status td_prefix_index_create(uint32_t max_workers, uint64_t max_entries,
                                 struct td_prefix_index **ret_index, struct td_err *err);
void td_prefix_index_destroy(struct td_prefix_index *index);

/* again: no effect */
void td_prefix_index_add(struct td_prefix_index *index, uint32_t worker, uint64_t hash);
/* not there: no effect */
void td_prefix_index_evict(struct td_prefix_index *index, uint32_t worker, uint64_t hash);
/* O(entries of that worker) */
void td_prefix_index_reset(struct td_prefix_index *index, uint32_t worker);

/* For each worker that holds at least hashes[0]: how many leading hashes it holds. Writes at
 * most max_matches pairs, longest first; returns how many. Cost: O(log n_hashes) probes for each
 * worker that shares the prefix, not O(n_hashes). */
struct td_prefix_match {
    uint32_t worker, n_blocks;
};
size_t td_prefix_index_match(const struct td_prefix_index *index, const uint64_t *hashes,
                             size_t n_hashes, struct td_prefix_match *ret_matches,
                             size_t max_matches);
/* How many leading hashes one worker holds. */
uint32_t td_prefix_index_depth(const struct td_prefix_index *index, uint32_t worker,
                               const uint64_t *hashes, size_t n_hashes);

struct td_prefix_stats {
    uint64_t n_entries, n_dropped;
};
void td_prefix_index_stats(const struct td_prefix_index *index, struct td_prefix_stats *ret_stats);

#endif
