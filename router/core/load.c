/* load.c - see load.h.
 *
 * Invariants: (1) every sum is that of parts[]; (2) a prefill worker is in a heap just when its
 * free_ns is after the heap's x. */
#include "router/core/load.h"

#include <math.h>
#include <stdbool.h>

static void set_place(struct td_load_after *a, uint32_t i, uint16_t worker)
{
    a->heap[i] = worker;
    a->place[worker] = (uint16_t)(i + 1);
}

/* The worker at place i has a new time: up or down to where it belongs. */
static void sift(struct td_load_after *a, const struct td_load_part *parts, uint32_t i)
{
    uint16_t worker = a->heap[i];
    uint64_t key = parts[worker].free_ns;
    for (; i > 0 && parts[a->heap[(i - 1) / 2]].free_ns > key; i = (i - 1) / 2)
        set_place(a, i, a->heap[(i - 1) / 2]);
    for (uint32_t child; (child = 2 * i + 1) < a->n; i = child) {
        if (child + 1 < a->n && parts[a->heap[child + 1]].free_ns < parts[a->heap[child]].free_ns)
            child++;
        if (parts[a->heap[child]].free_ns >= key) break;
        set_place(a, i, a->heap[child]);
    }
    set_place(a, i, worker);
}

static void heap_remove(struct td_load_after *a, const struct td_load_part *parts, uint16_t worker)
{
    uint32_t i = a->place[worker] - 1u;
    uint16_t last = a->heap[--a->n];
    a->place[worker] = 0;
    if (last == worker) return;
    set_place(a, i, last);
    sift(a, parts, i);
}

static bool counts(const struct td_load_after *a, const struct td_load_part *p)
{
    return p->kind == TD_LOAD_PREFILL && p->free_ns > a->x;
}

/* parts[worker] is the new one already. */
static void after_replace(struct td_load_after *a, const struct td_load_part *parts,
                          uint16_t worker, const struct td_load_part *old)
{
    bool was = a->place[worker] != 0, is = counts(a, &parts[worker]);
    if (was) a->sum -= old->free_ns;
    if (is) a->sum += parts[worker].free_ns;
    if (was && is) {
        sift(a, parts, a->place[worker] - 1u);
    } else if (was) {
        heap_remove(a, parts, worker);
    } else if (is) {
        set_place(a, a->n++, worker);
        sift(a, parts, a->n - 1);
    }
}

/* Sum of max(0, free_ns - x) over the prefill workers. */
static uint64_t after_advance(struct td_load_after *a, const struct td_load_part *parts, uint64_t x)
{
    if (x > a->x) a->x = x;
    while (a->n > 0 && parts[a->heap[0]].free_ns <= a->x) {
        a->sum -= parts[a->heap[0]].free_ns;
        heap_remove(a, parts, a->heap[0]);
    }
    return a->sum - a->n * a->x;
}

void td_load_init(struct td_load *f, double guarded_ttft_s)
{
    f->guarded_ns = guarded_ttft_s < INFINITY ? (uint64_t)fmax(1, guarded_ttft_s * 1e9) : 0;
}

void td_load_put(struct td_load *f, uint32_t worker, const struct td_load_part *part)
{
    struct td_load_part old = f->parts[worker];
    f->parts[worker] = *part;
    if (old.kind != TD_LOAD_NONE) f->n[old.kind]--;
    if (part->kind != TD_LOAD_NONE) f->n[part->kind]++;
    if (old.kind == TD_LOAD_DECODE) {
        f->assigned -= old.assigned;
        f->max_seqs -= old.max_seqs;
        f->promised_tokens -= old.promised_tokens;
        f->kv_tokens -= old.kv_tokens;
        f->step_share -= old.step_share;
    }
    if (part->kind == TD_LOAD_DECODE) {
        f->assigned += part->assigned;
        f->max_seqs += part->max_seqs;
        f->promised_tokens += part->promised_tokens;
        f->kv_tokens += part->kv_tokens;
        f->step_share += part->step_share;
    }
    if (f->guarded_ns == 0 || (old.kind == part->kind && old.free_ns == part->free_ns)) return;
    after_replace(&f->now, f->parts, (uint16_t)worker, &old);
    after_replace(&f->later, f->parts, (uint16_t)worker, &old);
}

double td_load_value(struct td_load *f, uint64_t now_ns)
{
    if (f->max_seqs == 0) return 1;
    double full = fmax((double)f->assigned / (double)f->max_seqs,
                       (double)f->promised_tokens / (double)f->kv_tokens);
    full = fmax(full, (double)f->step_share / (double)TD_LOAD_SHARE_ONE / f->n[TD_LOAD_DECODE]);
    if (f->guarded_ns > 0 && f->n[TD_LOAD_PREFILL] > 0) {
        uint64_t until = now_ns < UINT64_MAX - f->guarded_ns ? now_ns + f->guarded_ns : UINT64_MAX;
        uint64_t backlog =
            after_advance(&f->now, f->parts, now_ns) - after_advance(&f->later, f->parts, until);
        full = fmax(full, (double)backlog / (double)f->guarded_ns / f->n[TD_LOAD_PREFILL]);
    }
    return fmin(1, full);
}
