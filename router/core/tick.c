/* tick.c - what time alone brings: silent workers, waits that are over, the mean load, advice to
 * scale. */
#include <math.h>

#include "router/core/core_state.h"

/* How long a request whose output is complete waits for the first-token event: see core_finish. */
#define FINISH_WAIT_MS 500
/* How long the first token may come after the decode worker said that the request had ended with
 * it. Both messages left the prefill worker at the same moment, by two ways: a token that is
 * this late on the busiest machine is lost. */
#define SENDER_WAIT_MS 5000

static void update_utilisation(struct td_core *c)
{
    double dt = c->now_s - c->trend.utilisation_s, keep = exp2(-dt / 5.0); /* half-life 5 s */
    if (dt < 1e-3) return;
    for (int role = 0; role < 2; role++) {
        double busy_s = 0, n = 0;
        for (uint32_t i = 0; i < c->n_by_role[role]; i++) {
            struct td_core_worker *w = &c->workers[c->by_role[role][i]];
            busy_s += (double)w->busy_us * 1e-6;
            n += w->state == TD_WORKER_READY;
            w->busy_us = 0;
        }
        double now = n > 0 ? fmin(1, busy_s / (n * dt)) : 0;
        c->trend.utilisation[role] = c->trend.utilisation[role] * keep + now * (1 - keep);
    }
    double forget = exp2(-dt / 30.0); /* half-life 30 s: old decisions fade while none come */
    c->trend.decode_pressure *= forget;
    c->trend.refused_share *= forget;
    core_drift_ceilings(c, dt);
    c->trend.utilisation_s = c->now_s;
}

static void update_advice(struct td_core *c, uint64_t busy_permille)
{
    struct td_scaling_fleet f = {.utilisation = {c->trend.utilisation[0], c->trend.utilisation[1]},
                                 .decode_pressure = c->trend.decode_pressure,
                                 .refused_share = c->trend.refused_share,
                                 .colocated = c->cfg.mode == TD_MODE_COLOCATED,
                                 .router_busy =
                                     (double)(busy_permille < 1000 ? busy_permille : 1000) / 1000};
    for (int role = 0; role < 2; role++)
        for (uint32_t i = 0; i < c->n_by_role[role]; i++) {
            const struct td_core_worker *w = &c->workers[c->by_role[role][i]];
            if (w->state != TD_WORKER_READY) continue;
            f.n[role]++;
            if (role != TD_ROLE_DECODE) continue;
            f.decode_node = c->by_role[role][i];
            f.kv_tokens = w->kv_tokens;
            f.max_seqs = w->max_seqs;
        }
    f.margin = td_latency_margin(c->latency, TD_LAT_TPOT, 0, TD_LAT_LIMIT_BUCKET);
    c->bound = td_scaling_update(&c->advice, c->now_s, &f, c->latency);
}

static uint64_t later(uint64_t at_ns, uint64_t by_ns, uint64_t now_ns)
{
    return now_ns - at_ns < by_ns ? now_ns : at_ns + by_ns;
}

/* The router itself did not run for late_ms: it was stopped, starved of CPU, or the machine slept.
 * What workers said meanwhile still lies in its sockets, so their silence and that of the legs does
 * not count. The time that a client waited does. */
static void forgive(struct td_core *c, uint64_t late_ms)
{
    uint64_t late_ns = late_ms < 86400000 ? late_ms * NS_PER_MS : c->now_ns;
    for (uint32_t i = 0; i < c->n_workers; i++)
        c->workers[i].snapshot_ns = later(c->workers[i].snapshot_ns, late_ns, c->now_ns);
    for (uint32_t i = 0; i < c->requests_end; i++)
        if (c->requests[i].phase != FREE)
            c->requests[i].moved_ns = later(c->requests[i].moved_ns, late_ns, c->now_ns);
}

/* Workers that were silent for worker_timeout_ms. */
static void suspect_silent(struct td_core *c)
{
    uint64_t timeout_ns = c->cfg.worker_timeout_ms * NS_PER_MS;
    for (uint32_t i = 0; i < c->n_workers; i++) {
        struct td_core_worker *w = &c->workers[i];
        bool counted_on = w->state == TD_WORKER_READY || w->state == TD_WORKER_DRAINING;
        if (!counted_on || c->now_ns - w->snapshot_ns <= timeout_ns) continue;
        core_set_state(w, TD_WORKER_SUSPECT);
        core_worker_lost(c, i, "the worker stopped answering");
    }
}

/* The request waited in the queue for queue_timeout_ms. */
static void give_up(struct td_core *c, struct request *r)
{
    bool pair = core_any_worker(c, TD_ROLE_DECODE) &&
                (core_wants_local(c, r) || core_any_worker(c, TD_ROLE_PREFILL));
    if (pair || core_wants_prefill_only(c, r))
        core_fail(c, r, TD_CODE_RESOURCE_EXHAUSTED, "no worker had room within the queue time",
                  c->cfg.queue_timeout_ms * 1e-3);
    else
        core_fail(c, r, TD_CODE_UNAVAILABLE, "no worker of the needed role is connected", 0);
}

static void look_at(struct td_core *c, struct request *r)
{
    uint64_t still_ns = c->now_ns - r->moved_ns;
    if (r->phase == QUEUED) {
        if (c->now_ns - r->queued_ns > c->cfg.queue_timeout_ms * NS_PER_MS) give_up(c, r);
    } else if (r->finished_ns && c->now_ns - r->finished_ns > FINISH_WAIT_MS * NS_PER_MS) {
        core_complete(c, r);
    } else if (r->sender_finished && still_ns > SENDER_WAIT_MS * NS_PER_MS) {
        core_fail_over(c, r,
                       "the prefill worker has finished the request, and its token did not come");
    } else if (still_ns > c->cfg.stall_ms * NS_PER_MS) {
        core_fail_over(c, r, "nothing happened for too long");
    }
}

void core_on_tick(struct td_core *c, const struct td_ev_tick *e)
{
    if (e->late_ms) forgive(c, e->late_ms);
    update_utilisation(c);
    update_advice(c, e->busy_permille);
    suspect_silent(c);
    for (uint32_t i = 0; i < c->requests_end; i++)
        if (c->requests[i].phase != FREE) look_at(c, &c->requests[i]);
    c->room_changed = true; /* time has passed: some requests may have become hopeless */
}
