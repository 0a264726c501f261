/* schedule.h - what a worker decides about its queue, its batch and its KV blocks: the rules, as
 * pure functions of counts.
 *
 * The scheduler (scheduler.h) applies them. No model, no pool, no clock, no allocation, no state.
 *
 * The rules:
 *   order       smaller priority key first, then the older request (smaller router number). The
 *               waiting list and the running list are both kept in this order.
 *   admission   the head of the waiting list or nobody: a later one never overtakes. All blocks of
 *               the tokens known at admission are needed at once, less those found in the prefix
 *               cache; `headroom` blocks stay free beside it (decode: one for each running
 *               sequence).
 *   batch       every decode row first, then prefill chunks in order within the token budget:
 *               decodes never wait for a prefill (stall-free batching), and what is left over is
 *               filled with prefill.
 *   preemption  when a decode token has no block, the last of the order gives all of its blocks
 *               back and waits; it may be the one that asks.
 *
 * Sources: Kwon et al. 2023 (preemption by recompute), Yu et al. 2022 (continuous batching),
 * Agrawal et al. 2024 (stall-free batching). */
#ifndef TD_ENGINE_SCHEDULE_H
#define TD_ENGINE_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

/* True when request a comes before request b. Total for distinct requests. */
static inline bool td_schedule_before(uint64_t a_priority, uint64_t a_request, uint64_t b_priority,
                                      uint64_t b_request)
{
    return a_priority != b_priority ? a_priority < b_priority : a_request < b_request;
}

static inline int32_t td_schedule_blocks(int32_t n_tokens, int32_t block_size)
{
    return (n_tokens + block_size - 1) / block_size;
}
/* Most leading blocks that may come from the prefix cache: one token at least is left to
 * compute, or there would be no logits. */
static inline int32_t td_schedule_max_hit(int32_t n_tokens, int32_t block_size)
{
    return (n_tokens - 1) / block_size;
}

struct td_schedule_room {
    int32_t n_blocks;    /* of the pool */
    int32_t n_held;      /* by live sequences, before the hits of this one were held */
    int32_t n_available; /* free, or cached and evictable, while the hits of this one are held */
};
/* May a sequence that needs `need` blocks, `hit` of them found in the prefix cache, have the
 * rest now? TD_OK; TD_ERR_AGAIN: not now, ask again after a release; TD_ERR_LIMIT: never, the
 * pool is too small. */
td_status td_schedule_admit(const struct td_schedule_room *room, int32_t need, int32_t hit,
                            int32_t headroom);

/* Row counts of the next batch for candidates in priority order. remaining[i]: tokens not yet
 * computed (1 for a decode step); is_decode[i]. At most max_items rows of sequences and
 * max_tokens tokens. ret_n_new[i] = 0 when i is not in this batch. Returns how many are. */
int32_t td_batch_choose(const int32_t *remaining, const bool *is_decode, int32_t n,
                        int32_t max_items, int32_t max_tokens, int32_t *ret_n_new);

#endif
