/* run_flight.c - see run_flight.h: what a request on its way is, whoever carries it.
 *
 *   made (pacer) --post--> started: sent_s --tokens--> first_s, gaps, last_s --end--> end_s,
 *       outcome, place given back, freed
 *                             '--run_cancel_live--> cancelled --end--> UNFINISHED */
#include <stdlib.h>
#include <string.h>

#include "bench/serve/run_flight.h"
#include "common/base/random.h"

void run_flight_free(struct flight *f)
{
    if (f->run->backend->forget) f->run->backend->forget(f);
    free(f->ids);
    free(f);
}

/* Request q with a text, or a prompt of n_ids tokens, which the caller fills. */
struct flight *run_flight_make(struct run *r, struct bench_request *q, size_t index,
                               const char *text, int32_t n_ids)
{
    struct flight *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    struct td_keyed rng = td_keyed_at(r->config->seed, WHAT_SAMPLING, index);
    f->run = r;
    f->q = q;
    f->index = index;
    f->text = text;
    f->seed = td_keyed_u64(&rng);
    if (text) return f;
    f->n_ids = n_ids;
    f->ids = malloc(((size_t)n_ids + 1) * sizeof *f->ids);
    if (f->ids) return f;
    free(f);
    return NULL;
}

static void add_gap(struct flight *f, double gap_s)
{
    struct bench_request *q = f->q;
    uint32_t n = q->n_messages - 1; /* gaps so far */
    if (n == f->gaps_capacity) {
        f->gaps_capacity = f->gaps_capacity ? 2 * f->gaps_capacity : 32;
        q->gaps_s = realloc(q->gaps_s, f->gaps_capacity * sizeof *q->gaps_s);
        TD_ASSERT(q->gaps_s);
    }
    q->gaps_s[n] = gap_s;
}

void run_flight_tokens(struct flight *f, double now_s, int32_t n)
{
    struct bench_request *q = f->q;
    if (q->n_messages == 0)
        q->first_s = now_s;
    else
        add_gap(f, now_s - q->last_s);
    q->last_s = now_s;
    q->n_messages++;
    q->output_len += n;
}

void run_flight_end(struct flight *f, enum bench_outcome outcome, int code, const char *error,
                    int64_t retry_ms)
{
    struct run *r = f->run;
    struct bench_request *q = f->q;
    q->end_s = run_since_s(r, td_now_ns());
    q->code = code;
    q->outcome = outcome;
    if (error) q->error = strdup(error);
    q->retry_delay_ms = retry_ms;
    if (f->next) f->next->prev = f->prev;
    *f->prev = f->next;
    run_flight_free(f);

    pthread_mutex_lock(&r->mu);
    if (r->max_active) r->free_at_s[(r->free_head + r->n_free++) % r->max_active] = q->end_s;
    r->n_active--;
    r->n_done++;
    pthread_cond_signal(&r->cond);
    pthread_mutex_unlock(&r->mu);
}

void run_flight_start(void *arg)
{
    struct flight *f = arg;
    struct run *r = f->run;
    f->next = r->live;
    f->prev = &r->live;
    if (f->next) f->next->prev = &f->next;
    r->live = f;
    f->q->sent_s = run_since_s(r, td_now_ns());
    r->backend->send(f);
}

void run_cancel_live(void *arg)
{
    struct run *r = arg;
    for (struct flight *f = r->live, *next; f; f = next) {
        next = f->next;
        f->cancelled = true;
        r->backend->cancel(f);
    }
}
