/* lifecycle.c - what closes a leg and what ends an attempt or a request.
 *
 * An attempt ends in one of three ways: the request is complete, it fails, or it goes back to the
 * queue as the next attempt (requeue when nobody is to blame, fail_over when a worker is). */
#include <math.h>

#include "router/core/core_state.h"

/* The deadline that the order of the queue assumes for a request without a TTFT objective. */
#define NO_DEADLINE_NS (10000 * NS_PER_MS)
#define MAX_RETRY_MS 60000

struct td_core_action *core_emit(struct td_core *c, enum td_core_action_kind kind,
                                 const struct request *r)
{
    TD_ASSERT(c->n_out < TD_CORE_MAX_ACTIONS_PER_EVENT);
    struct td_core_action *a = &c->out[c->n_out++];
    *a = (struct td_core_action){.kind = kind,
                                 .request_at = (uint32_t)(r - c->requests),
                                 .id = r->id,
                                 .attempt = r->attempt};
    return a;
}

struct td_queue_key core_key_of(const struct td_core *c, const struct request *r)
{
    bool bound = r->ttft_s < INFINITY, started = r->first_ns != 0;
    uint64_t deadline = r->arrived_ns + (started ? 0
                                         : bound ? (uint64_t)(r->ttft_s * 1e9)
                                                 : NO_DEADLINE_NS);
    return (struct td_queue_key){.slo_class = r->slo_class,
                                 .tenant = r->tenant,
                                 .priority = r->priority,
                                 .deadline_ns = deadline,
                                 .id = r->id,
                                 .bound = bound && !started,
                                 .hopeless = bound && !started && c->now_ns > deadline};
}

void core_queue_insert(struct td_core *c, struct request *r)
{
    struct td_queue_key key = core_key_of(c, r);
    td_queue_insert(c->order, (uint32_t)(r - c->requests), &key, r->work_s, c->now_ns);
    r->phase = QUEUED;
}

void core_queue_remove(struct td_core *c, struct request *r)
{
    td_queue_remove(c->order, (uint32_t)(r - c->requests));
}

/* The last request with the worker's tightest TPOT objective has gone: looks for the next tightest.
 * This is rare, since most requests of a worker share a class. */
static void refresh_min_tpot(struct td_core *c, uint32_t worker)
{
    struct td_core_worker *w = &c->workers[worker];
    w->decode.min_tpot_s = INFINITY;
    w->decode.n_min_tpot = 0;
    for (uint32_t i = 0; i < c->requests_end; i++) {
        const struct request *r = &c->requests[i];
        if (r->phase == FREE || r->decode.worker != worker ||
            r->decode.tpot_s > w->decode.min_tpot_s)
            continue;
        w->decode.n_min_tpot =
            r->decode.tpot_s < w->decode.min_tpot_s ? 1 : w->decode.n_min_tpot + 1;
        w->decode.min_tpot_s = r->decode.tpot_s;
    }
}

void core_leg_close(struct td_core *c, struct td_leg *leg)
{
    if (leg->worker == TD_NO_WORKER) return;
    uint32_t worker = leg->worker;
    struct td_core_worker *w = &c->workers[worker];
    td_account_close(w, leg, c->now_s);
    c->room_changed = true;
    if (w->role != TD_ROLE_DECODE) return;
    if (w->state == TD_WORKER_SUSPECT)
        return; /* core_worker_lost ends all of its legs, and none comes before it is back */
    if (w->assigned > 0 && w->decode.n_min_tpot == 0) refresh_min_tpot(c, worker);
    core_refresh_step(c, worker);
}

bool core_prefill_told(const struct request *r)
{
    return r->prefill.worker != TD_NO_WORKER && !r->prefill.planned;
}

void core_cancel_legs(struct td_core *c, struct request *r)
{
    if (core_prefill_told(r)) core_emit(c, TD_ACT_CANCEL_PREFILL, r);
    if (r->decode.worker != TD_NO_WORKER) core_emit(c, TD_ACT_CANCEL_DECODE, r);
    core_leg_close(c, &r->prefill);
    core_leg_close(c, &r->decode);
}

void core_forget(struct td_core *c, struct request *r)
{
    if (r->phase == QUEUED) core_queue_remove(c, r);
    r->phase = FREE;
    c->n_live--;
}

void core_fail(struct td_core *c, struct request *r, enum td_code code, const char *reason,
               double retry_s)
{
    core_cancel_legs(c, r);
    struct td_core_action *a = core_emit(c, TD_ACT_FAIL, r);
    a->fail.code = code;
    a->fail.reason = reason;
    double ms = ceil(retry_s * 1000);
    a->fail.retry_ms = code != TD_CODE_RESOURCE_EXHAUSTED ? 0
                       : !(ms >= 1)                       ? 1
                       : ms > MAX_RETRY_MS                ? MAX_RETRY_MS
                                                          : (uint32_t)ms;
    c->stats.failed++;
    c->stats.wasted_prefill_tokens += r->decode_flows ? 0 : r->computed_tokens;
    if (code == TD_CODE_RESOURCE_EXHAUSTED) {
        c->stats.refused++;
        core_move_ceilings(c, c->classes.rank[r->slo_class], false);
    }
    core_forget(c, r);
}

/* The request is complete: compares it with what was predicted and with its objectives. */
static void learn_from(struct td_core *c, const struct request *r)
{
    uint64_t n_out = r->n_tokens - r->n_prompt;
    td_latency_observe_output(c->latency, r->slo_class,
                              (uint32_t)(n_out > UINT32_MAX ? UINT32_MAX : n_out));
    td_queue_charge(c->order, r->tenant, 2.0 * (double)n_out, c->now_ns);
    if (r->first_ns == 0) return;
    double ttft = (double)(r->first_ns - r->arrived_ns) * 1e-9,
           tpot = n_out > 1 ? (double)(r->last_ns - r->first_ns) * 1e-9 / (double)(n_out - 1) : 0;
    if (n_out > 1 && r->failovers == 0 && r->choice.tpot_s > 0)
        td_latency_observe_ratio(c->latency, TD_LAT_TPOT, r->slo_class, r->choice.tpot_bucket,
                                 r->choice.tpot_s, tpot);
    if (r->ttft_s >= INFINITY && r->tpot_s >= INFINITY) return;
    bool late = ttft > r->ttft_s, slow = tpot > r->tpot_s;
    c->stats.judged++;
    c->stats.missed_ttft += late;
    c->stats.missed_tpot += slow;
    c->stats.good += !late && !slow;
    c->stats.by_class[r->slo_class].judged++;
    c->stats.by_class[r->slo_class].good += !late && !slow;
    core_move_ceilings(c, c->classes.rank[r->slo_class], !late && !slow);
}

void core_complete(struct td_core *c, struct request *r)
{
    /* A prefill leg that is still open ends by itself: its "done" is on the way. An open decode leg
     * has nothing left to say. */
    if (r->decode.worker != TD_NO_WORKER) core_emit(c, TD_ACT_CANCEL_DECODE, r);
    core_leg_close(c, &r->prefill);
    core_leg_close(c, &r->decode);
    core_emit(c, TD_ACT_COMPLETE, r);
    c->stats.finished++;
    learn_from(c, r);
    core_forget(c, r);
}

/* Decode has ended, or the output is complete. On a busy machine the last token can overtake the
 * first-token event, which says what the prefill worker found in its cache and how long it took. So
 * the client's last message waits for that event, FINISH_WAIT_MS at most (tick.c). */
void core_finish(struct td_core *c, struct request *r)
{
    if (!r->prefill.pending || !r->decode_flows) {
        core_complete(c, r);
        return;
    }
    if (r->decode.worker != TD_NO_WORKER) core_emit(c, TD_ACT_CANCEL_DECODE, r);
    core_leg_close(c, &r->decode);
    r->output_done = true;
    r->finished_ns = c->now_ns;
}

/* Back to the queue as a new attempt, with nobody to blame: a worker was merely full. waits_anew:
 * queue_timeout_ms begins again. It does not for a request that workers send back again and again,
 * which has been waiting all the time. */
void core_requeue(struct td_core *c, struct request *r, bool waits_anew)
{
    core_cancel_legs(c, r);
    c->stats.wasted_prefill_tokens += r->computed_tokens;
    r->computed_tokens = 0;
    r->computed_ns = 0;
    r->attempt++;
    r->decode_flows = r->sender_finished = false;
    if (waits_anew) r->queued_ns = c->now_ns;
    core_queue_insert(c, r);
}

void core_fail_over(struct td_core *c, struct request *r, const char *reason)
{
    if (r->output_done) { /* nothing is left to compute; only the leg's times are lost */
        core_complete(c, r);
        return;
    }
    if (r->failovers >= c->cfg.max_failovers) {
        core_fail(c, r, TD_CODE_UNAVAILABLE, reason, 0);
        return;
    }
    r->failovers++;
    c->stats.failovers++;
    core_requeue(c, r, true);
}
