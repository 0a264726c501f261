/* leg_events.c - what the calls to workers say of a request: ticket, tokens, ends; and what its
 * client says.
 *
 * The pair of workers is chosen when the request leaves the queue. Its prefill leg is planned
 * (account.h) until the decode worker's ticket comes; then the prefill worker is told. */
#include <math.h>

#include "router/core/core_state.h"

#define STEP_REFRESH_TOKENS 32
#define MAX_SENT_BYTES (1ull << 50)
#define MAX_WITHIN_S 1e6 /* a longer time is as good as none */

/* The live request of this id at this place of the table; NULL when that request has ended. */
static struct request *live(struct td_core *c, uint32_t request_at, uint64_t id)
{
    if (request_at >= c->cfg.max_requests) return NULL;
    struct request *r = &c->requests[request_at];
    return r->phase == FREE || r->id != id ? NULL : r;
}

/* The live request whose current attempt this is; NULL when the attempt is an old one. Notes that
 * the request has moved. */
static struct request *current(struct td_core *c, const struct td_attempt *of)
{
    struct request *r = live(c, of->request_at, of->id);
    if (!r || r->attempt != of->attempt || r->phase == QUEUED) return NULL;
    r->moved_ns = c->now_ns;
    return r;
}

void core_prefill_tell(struct td_core *c, struct request *r)
{
    struct td_core_worker *w = &c->workers[r->prefill.worker];
    td_account_prefill_tell(w, &r->prefill);
    r->told_ns = c->now_ns;
    r->next = w->prefill.n_told == 1;
}

void core_on_ticket(struct td_core *c, const struct td_ev_ticket *e)
{
    struct request *r = current(c, &e->of);
    if (!r || r->phase != RESERVING) return;
    struct td_policy_view v = core_view_of(c);
    uint32_t planned = r->prefill.worker;
    /* The planned worker may have left, failed or begun to drain. That it is full now is no reason:
     * this leg is counted there. */
    bool keep = planned != TD_NO_WORKER && c->workers[planned].state == TD_WORKER_READY &&
                !c->workers[planned].shunned;
    if (!keep) {
        core_leg_close(c, &r->prefill);
        uint32_t p = td_policy_prefill_again(&v, r->n_tokens + 1);
        if (p == TD_NO_WORKER) {
            core_requeue(c, r, false); /* gives the reservation back */
            return;
        }
        double work_s =
            td_latency_prefill(c->latency, p, r->n_tokens, 0, c->workers[p].max_step_tokens);
        td_account_prefill_open(&c->workers[p], &r->prefill, p, c->classes.turn[r->slo_class],
                                r->n_tokens, work_s, c->now_s);
        r->choice.ttft_s = 0; /* predicted of another worker: nothing is learned from it */
    }
    if (keep && core_too_late(c, r)) {
        core_fail(c, r, TD_CODE_RESOURCE_EXHAUSTED, "the TTFT objective cannot be met now", 0);
        return;
    }
    double reserve_s = (double)(c->now_ns - r->placed_ns) * 1e-9;
    td_stage_learn(&c->workers[r->decode.worker].decode.stages.reserve, c->now_s, reserve_s);
    td_stage_learn(&c->stages.reserve, c->now_s, reserve_s);
    r->phase = PREFILLING;
    core_prefill_tell(c, r);
    struct td_queue_key key = core_key_of(c, r);
    struct td_core_action *a = core_emit(c, TD_ACT_START_PREFILL, r);
    a->start.worker = r->prefill.worker;
    a->start.key = td_queue_wire_key(c->order, &key);
    double within_s = core_finish_within_s(c, r);
    r->timed = within_s < INFINITY;
    if (!r->timed) return;
    a->start.work_us = (uint64_t)(fmin(r->prefill.work_s, MAX_WITHIN_S) * 1e6);
    a->start.finish_within_us = 1 + (uint64_t)(fmin(within_s, MAX_WITHIN_S) * 1e6);
}

/* The client's first token, by whichever leg. */
static void first_seen(struct td_core *c, struct request *r)
{
    if (r->first_ns) return;
    r->first_ns = c->now_ns;
    if (r->choice.ttft_s > 0 && r->failovers == 0)
        td_latency_observe_ratio(c->latency, TD_LAT_TTFT, r->slo_class, r->choice.ttft_bucket,
                                 r->choice.ttft_s, (double)(c->now_ns - r->placed_ns) * 1e-9);
}

static void grow(struct td_core *c, struct request *r, uint64_t n_tokens)
{
    if (n_tokens <= r->n_tokens || n_tokens > TD_CORE_MAX_TOKENS) return;
    uint32_t worker = r->decode.worker;
    if (worker != TD_NO_WORKER) {
        td_account_decode_grow(&c->workers[worker], &r->decode, n_tokens - r->n_tokens);
        if (n_tokens / STEP_REFRESH_TOKENS != r->n_tokens / STEP_REFRESH_TOKENS)
            core_refresh_step(c, worker);
    }
    r->n_tokens = n_tokens;
    r->last_ns = c->now_ns;
}

void core_on_first_token(struct td_core *c, const struct td_ev_first_token *e)
{
    struct request *r = current(c, &e->of);
    if (!r || r->phase == RESERVING) return;
    if (r->phase == PREFILLING) r->phase = DECODING;
    if (r->prefill.pending) { /* computed: the leg stays open for the hand-over of its KV */
        r->computed_tokens = r->prefill.tokens;
        r->computed_ns = c->now_ns;
        if (r->next && r->choice.ttft_s > 0 && r->choice.hit_tokens == e->cached_tokens)
            td_stage_learn(&c->start, c->now_s,
                           (double)(c->now_ns - r->told_ns) * 1e-9 - r->choice.prefill_s);
        td_account_prefill_done(&c->workers[r->prefill.worker], &r->prefill, c->now_s);
        c->stats.real_hit_tokens += e->cached_tokens < r->n_tokens ? e->cached_tokens : 0;
        c->room_changed = true;
    }
    grow(c, r, e->n_tokens);
    first_seen(c, r);
    if (e->last || r->finished_ns) core_complete(c, r);
}

/* Its decode worker has told the request's first token: what did it take beside the prediction?
 * Without one of the prefill nothing is learned: at a cold start the time would be the prefill's.
 */
static void learn_decode_start(struct td_core *c, struct request *r, uint64_t n_tokens)
{
    struct td_decode_stages *own = &c->workers[r->decode.worker].decode.stages;
    if (r->choice.local) {
        c->room_changed = true;
        if (r->choice.prefill_s <= 0) return;
        double start_s = (double)(c->now_ns - r->placed_ns) * 1e-9 - r->choice.prefill_s;
        td_stage_learn(&own->start, c->now_s, start_s);
        td_stage_learn(&c->stages.start, c->now_s, start_s);
    } else if (r->computed_ns && n_tokens == r->n_tokens && r->choice.ttft_s > 0) {
        /* its first token, told again as it joins the batch */
        double join_s =
            (double)(c->now_ns - r->computed_ns) * 1e-9 - (r->choice.gap_s - r->choice.join_s);
        td_stage_learn(&own->join, c->now_s, join_s);
        td_stage_learn(&c->stages.join, c->now_s, join_s);
    }
}

void core_on_token(struct td_core *c, const struct td_ev_token *e)
{
    struct request *r = current(c, &e->of);
    /* A token before the prefill worker was called, or of a leg that has ended, is an error. */
    if (!r || r->phase == RESERVING || r->decode.worker == TD_NO_WORKER) return;
    r->decode_flows = true;
    r->phase = DECODING;
    if (e->last) r->output_done = true;
    if (r->decode.worker != TD_NO_WORKER && r->decode.pending) {
        td_account_decode_active(&c->workers[r->decode.worker], &r->decode);
        learn_decode_start(c, r, e->n_tokens);
    }
    grow(c, r, e->n_tokens);
    first_seen(c, r);
}

/* A leg ended with this code: whose fault was it? */
static void leg_failed(struct td_core *c, struct request *r, uint32_t worker, enum td_code code,
                       const char *what)
{
    if (r->output_done) {
        core_complete(c, r);
        return;
    }
    switch (code) {
    case TD_CODE_INVALID_ARGUMENT:
    case TD_CODE_NOT_FOUND:
    case TD_CODE_OUT_OF_RANGE:
    case TD_CODE_UNIMPLEMENTED:
        /* The router has checked the request, so this worker may be too small, too old or mistaken.
         * One other worker is asked. */
        if (r->refused) {
            core_fail(c, r, code, what, 0);
            return;
        }
        r->refused = true;
        core_shun(c, worker);
        /* The prefill worker refused: perhaps it was the grant, which is the decode worker's. */
        if (r->decode.worker != TD_NO_WORKER) core_shun(c, r->decode.worker);
        core_fail_over(c, r, what);
        return;
    case TD_CODE_RESOURCE_EXHAUSTED:
        core_shun(c, worker);
        core_requeue(c, r, false);
        return;
    /* The deadline is the client's own: the worker did no wrong. */
    case TD_CODE_DEADLINE_EXCEEDED:
        core_fail(c, r, code, "the request's deadline has passed", 0);
        return;
    default:
        /* The worker may be dead while its stream is not known to be: no more failovers are
         * spent on it until its next snapshot. */
        core_shun(c, worker);
        core_fail_over(c, r, what);
        return;
    }
}

/* Only a transfer that had the link for itself, and that did not wait for later chunks to be
 * computed, shows the link's speed. Any other was no faster than the link, so it is counted only
 * where it took less time than the model expects of the link. */
static void learn_link(struct td_core *c, const struct request *r,
                       const struct td_ev_prefill_end *e)
{
    const struct td_core_worker *w = &c->workers[r->prefill.worker];
    if (e->code != TD_CODE_OK || e->sent_bytes == 0 || e->sent_us == 0) return;
    if (e->sent_bytes >= MAX_SENT_BYTES || e->sent_us >= MAX_REPORTED_US) return;
    bool in_one_step = w->max_step_tokens == 0 || r->computed_tokens <= w->max_step_tokens;
    bool alone = !w->prefill.crowded && w->prefill.n_chunked == 0 && in_one_step;
    double thought_s = td_latency_transfer(c->latency, w->node_class, 0, (double)e->sent_bytes);
    if (alone || thought_s <= 0 || (double)e->sent_us * 1e-6 < thought_s)
        td_latency_observe_transfer(c->latency, w->node_class, e->sent_bytes, e->sent_us);
}

void core_on_prefill_end(struct td_core *c, const struct td_ev_prefill_end *e)
{
    struct request *r = current(c, &e->of);
    if (!r || !core_prefill_told(r)) return;
    uint32_t worker = r->prefill.worker;
    if (e->code == TD_CODE_UNAVAILABLE) td_account_call_failed(&c->workers[worker], &r->prefill);
    learn_link(c, r, e);
    core_leg_close(c, &r->prefill);
    if (r->finished_ns) {
        core_complete(c, r);
        return;
    }
    /* Given back, since others' prompts were before it there: no other worker would be in time. A
     * transfer to a worker that has started anew ends with ABORTED, and is a fail-over. */
    if (e->code == TD_CODE_OUT_OF_RANGE && r->timed && r->phase == PREFILLING) {
        core_fail(c, r, TD_CODE_RESOURCE_EXHAUSTED, "the TTFT objective cannot be met now", 0);
        return;
    }
    bool decodes = r->decode.worker != TD_NO_WORKER;
    /* delivered */
    if (decodes && (r->decode_flows || (e->code == TD_CODE_OK && r->phase != PREFILLING))) return;
    leg_failed(c, r, worker, e->code,
               e->code == TD_CODE_OK ? "the prefill worker ended without a first token"
                                     : "the prefill worker failed");
}

void core_on_decode_end(struct td_core *c, const struct td_ev_decode_end *e)
{
    struct request *r = current(c, &e->of);
    if (!r || r->decode.worker == TD_NO_WORKER) return;
    uint32_t worker = r->decode.worker;
    if (e->code == TD_CODE_UNAVAILABLE && !e->sender_finished)
        td_account_call_failed(&c->workers[worker], &r->decode);
    /* no ticket was seen: the prefill worker was never told */
    if (r->prefill.planned) core_leg_close(c, &r->prefill);
    core_leg_close(c, &r->decode);
    if (e->sender_finished && e->code != TD_CODE_OK && r->prefill.pending && !r->decode_flows) {
        /* The first token is on its way and is the last. tick.c bounds the wait for it. */
        r->sender_finished = true;
        return;
    }
    if (e->code == TD_CODE_OK)
        core_finish(c, r);
    else
        leg_failed(c, r, worker, e->code, "the decode worker failed");
}

void core_on_stop(struct td_core *c, const struct td_ev_end *e)
{
    struct request *r = live(c, e->request_at, e->id);
    if (!r) return;
    r->moved_ns = c->now_ns;
    if (core_prefill_told(r) && !(r->prefill.pending && r->decode_flows))
        core_emit(c, TD_ACT_CANCEL_PREFILL, r);
    core_finish(c, r);
}

void core_on_cancel(struct td_core *c, const struct td_ev_end *e)
{
    struct request *r = live(c, e->request_at, e->id);
    if (!r) return;
    core_cancel_legs(c, r);
    c->stats.cancelled++;
    c->stats.wasted_prefill_tokens += r->decode_flows ? 0 : r->computed_tokens;
    core_forget(c, r);
}
