/* load.h - how full the fleet is, 0..1: in sequences, in KV, in what decode steps may still take,
 * or in how long prompts may still wait, whichever is nearest to its limit.
 *
 * Without this, a class with loose objectives would fill decode steps and prefill queues up to its
 * own limits, and classes with tighter objectives would find no room in which theirs can be kept.
 *
 * Why sums: the walk through the queue asks before it begins and after each placement, and a look
 * at 1,000 workers costs more than a placement. So sums are kept, in whole numbers (a share is
 * counted in 2^-40, a time in ns). Adding and taking away leaves no rounding behind, so the sums
 * are what a scan would find, in whatever order the changes came (load_test compares the two).
 *
 * A prefill worker's backlog runs down by itself. What counts of it is min(T, max(0, free - now)),
 * with T the guarded TTFT, which is max(0, free - now) - max(0, free - (now + T)). A sum of
 * max(0, free - x) needs only the number and the sum of those workers whose free is after x. x only
 * grows, so two heaps hold them: one for x = now, one for x = now + T. Sums are modulo 2^64; their
 * difference is at most T for each worker, which fits.
 *
 * No allocation. Pure, one thread. */
#ifndef TD_ROUTER_CORE_LOAD_H
#define TD_ROUTER_CORE_LOAD_H

#include <stdint.h>

#define TD_LOAD_MAX_WORKERS 1024
#define TD_LOAD_SHARE_ONE ((uint64_t)1 << 40) /* a share of 1 */

enum td_load_kind { TD_LOAD_NONE, TD_LOAD_PREFILL, TD_LOAD_DECODE };

/* What one worker adds; NONE (not ready): nothing. prefill: free_ns alone; decode: the others. */
struct td_load_part {
    enum td_load_kind kind;
    uint32_t assigned, max_seqs;
    uint64_t promised_tokens, kv_tokens;
    uint64_t step_share; /* 0..TD_LOAD_SHARE_ONE */
    uint64_t free_ns;    /* when it would start a new prompt */
};

struct td_load_after { /* of the prefill workers: those with free_ns > x */
    uint64_t x, sum;
    uint32_t n;
    uint16_t heap[TD_LOAD_MAX_WORKERS];  /* least free_ns first */
    uint16_t place[TD_LOAD_MAX_WORKERS]; /* in the heap, + 1; 0 = not there */
};

struct td_load {
    uint64_t guarded_ns; /* T; 0 = no TTFT is guarded, backlogs do not count */
    uint32_t n[3];       /* workers of each kind */
    uint64_t assigned, max_seqs, promised_tokens, kv_tokens, step_share;
    struct td_load_after now, later;
    struct td_load_part parts[TD_LOAD_MAX_WORKERS];
};

/* guarded_ttft_s: the tightest TTFT of those for whom room is kept; INFINITY = none. *f was all
 * zero. */
void td_load_init(struct td_load *f, double guarded_ttft_s);
/* Replaces what the worker adds. */
void td_load_put(struct td_load *f, uint32_t worker, const struct td_load_part *part);
/* 1 without a decode worker. now_ns never goes back. */
double td_load_value(struct td_load *f, uint64_t now_ns);

#endif
