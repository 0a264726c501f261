/* distserve.c - see distserve.h. Times are doubles in ms beside the heap's ns, so that no sum is
 * rounded: an event carries its exact time in times[].
 */
#include "tests/sim/distserve.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim/heap.h"

enum { WAKE, PREFILL_END, DECODE_END, ARRIVE };
enum { MAX_STAGES = 16 };

struct queue {
    uint32_t *items, head, n, capacity;
};

static void put(struct queue *q, uint32_t item)
{
    if (q->n == q->capacity) { /* unroll into twice the room */
        uint32_t *bigger = td_sim_grow(NULL, q->capacity ? q->capacity * 2ull : 64, sizeof *bigger);
        for (uint32_t i = 0; i < q->n; i++) bigger[i] = q->items[(q->head + i) % q->capacity];
        free(q->items);
        q->items = bigger;
        q->capacity = q->capacity ? q->capacity * 2 : 64;
        q->head = 0;
    }
    q->items[(q->head + q->n++) % q->capacity] = item;
}

static uint32_t take(struct queue *q)
{
    uint32_t item = q->items[q->head];
    q->head = (q->head + 1) % q->capacity;
    q->n--;
    return item;
}

struct stage {
    struct queue prefill, decode, batch; /* batch: in its running step */
    bool busy, waking;
};

struct run {
    const struct td_distserve *d;
    const struct td_sim_trace *t;
    struct td_sim_heap heap;
    double now, *first, *ttft, *tpot;
    int32_t *done, *batch_of; /* decode steps done; number of the prefill batch a
                                 request is in */
    int32_t n_batches;
    struct stage stages[2 * MAX_STAGES];
    int n_prefill, n_decode, decode_at; /* stages; index of the first decode stage */
};

static void push(struct run *r, double at, uint32_t kind, uint32_t a)
{
    uint64_t bits;
    memcpy(&bits, &at, sizeof bits); /* of non-negative doubles: ordered as integers, so the
                                        heap's order is exact */
    td_sim_heap_push(&r->heap, bits, kind, a, 0);
}

static void wake(struct run *r, int i)
{
    struct stage *s = &r->stages[i];
    if (s->busy || s->waking) return;
    s->waking = true;
    push(r, r->now, WAKE, (uint32_t)i);
}

static double step_ms(const struct td_perf *p, double rows, double work, double seqs,
                      double context, int pp)
{
    struct td_perf_batch b = {.prefill_rows = (int64_t)rows,
                              .attention_work = work,
                              .decode_rows = (int64_t)seqs,
                              .context_tokens = context};
    return td_perf_step_s(p, &b) * 1e3 / pp;
}

static void start(struct run *r, int i)
{
    struct stage *s = &r->stages[i];
    const struct td_distserve *d = r->d;
    bool is_first = i == 0 || i == r->decode_at;
    double context = 0, ms;
    if (s->prefill.n > 0) {
        double rows = 0, work = 0;
        int64_t left = d->max_tokens;
        if (i == 0) r->n_batches++;
        int32_t number = i == 0 ? r->n_batches : r->batch_of[s->prefill.items[s->prefill.head]];
        while (s->prefill.n > 0) {
            uint32_t q = s->prefill.items[s->prefill.head];
            int32_t len = r->t->requests[q].n_prompt;
            if (i == 0 ? len > left : r->batch_of[q] != number) break;
            put(&s->batch, take(&s->prefill));
            r->batch_of[q] = number;
            left -= len;
            rows += len;
            work += (double)len * len / 2;
        }
        context = rows;
        ms = step_ms(d->prefill, rows, work, 0, 0, d->pp_prefill) + d->pp_ms * d->pp_prefill;
        s->busy = true;
        push(r, r->now + ms + (is_first ? d->base_ms + d->per_token_ms * context : 0), PREFILL_END,
             (uint32_t)i);
        return;
    }
    if (s->decode.n == 0) return;
    double tokens = 0;
    int64_t left = d->decode_cap;
    for (uint32_t n = s->decode.n; n > 0; n--) {
        uint32_t q = s->decode.items[s->decode.head];
        int64_t len = r->t->requests[q].n_prompt + r->done[q];
        if (len + 1 > left) break;
        left -= len + 1;
        put(&s->batch, take(&s->decode));
        tokens += (double)(len + 1);
        context += (double)len;
    }
    ms = step_ms(d->colocated ? d->prefill : d->decode, 0, 0, s->batch.n, tokens,
                 d->colocated ? d->pp_prefill : d->pp_decode);
    s->busy = true;
    push(r, r->now + ms + (is_first ? d->base_ms + d->per_token_ms * context : 0), DECODE_END,
         (uint32_t)i);
}

static void prefill_end(struct run *r, int i)
{
    struct stage *s = &r->stages[i];
    s->busy = false;
    bool is_last = i == r->n_prefill - 1;
    int next = is_last ? r->decode_at : i + 1;
    while (s->batch.n > 0) {
        uint32_t q = take(&s->batch);
        if (!is_last) {
            put(&r->stages[next].prefill, q);
            continue;
        }
        r->first[q] = r->now;
        r->ttft[q] = r->now - (double)r->t->requests[q].at_ns / 1e6;
        put(&r->stages[next].decode, q);
    }
    wake(r, next);
    start(r, i);
}

static void decode_end(struct run *r, int i)
{
    struct stage *s = &r->stages[i];
    s->busy = false;
    bool is_last = i == r->decode_at + r->n_decode - 1;
    int next = is_last ? r->decode_at : i + 1;
    while (s->batch.n > 0) {
        uint32_t q = take(&s->batch);
        if (is_last && ++r->done[q] >= r->t->requests[q].n_output)
            r->tpot[q] = (r->now - r->first[q]) / r->t->requests[q].n_output;
        else
            put(&r->stages[next].decode, q);
    }
    if (next != i) wake(r, next);
    start(r, i);
}

void td_distserve_init(struct td_distserve *d, const struct td_perf *prefill,
                       const struct td_perf *decode)
{
    *d = (struct td_distserve){.prefill = prefill,
                               .decode = decode,
                               .pp_prefill = 1,
                               .pp_decode = 1,
                               .base_ms = 2,
                               .per_token_ms = 1e-4,
                               .pp_ms = 1,
                               .max_tokens = (int64_t)prefill->kv_tokens,
                               .decode_cap = 50000};
}

void td_distserve_run(const struct td_distserve *d, const struct td_sim_trace *t,
                      double *ret_ttft_ms, double *ret_tpot_ms)
{
    struct run r = {.d = d,
                    .t = t,
                    .ttft = ret_ttft_ms,
                    .tpot = ret_tpot_ms,
                    .n_prefill = d->pp_prefill,
                    .n_decode = d->colocated ? d->pp_prefill : d->pp_decode,
                    .decode_at = d->colocated ? 0 : d->pp_prefill};
    TD_ASSERT(d->pp_prefill >= 1 && d->pp_prefill <= MAX_STAGES && d->pp_decode >= 1 &&
              d->pp_decode <= MAX_STAGES);
    r.first = td_sim_grow(NULL, t->n, sizeof *r.first);
    r.done = calloc(t->n, sizeof *r.done);
    r.batch_of = calloc(t->n, sizeof *r.batch_of);
    TD_ASSERT(r.done && r.batch_of);
    for (uint32_t i = 0; i < t->n; i++) push(&r, (double)t->requests[i].at_ns / 1e6, ARRIVE, i);
    for (struct td_sim_event e; td_sim_heap_pop(&r.heap, &e);) {
        memcpy(&r.now, &e.at_ns, sizeof r.now);
        int i = (int)e.a;
        switch (e.kind) {
        case ARRIVE:
            put(&r.stages[0].prefill, e.a);
            wake(&r, 0);
            break;
        case WAKE:
            r.stages[i].waking = false;
            if (!r.stages[i].busy) start(&r, i);
            break;
        case PREFILL_END:
            prefill_end(&r, i);
            break;
        case DECODE_END:
            decode_end(&r, i);
            break;
        }
    }
    for (int i = 0; i < 2 * MAX_STAGES; i++) {
        free(r.stages[i].prefill.items);
        free(r.stages[i].decode.items);
        free(r.stages[i].batch.items);
    }
    free(r.first);
    free(r.done);
    free(r.batch_of);
    td_sim_heap_free(&r.heap);
}
