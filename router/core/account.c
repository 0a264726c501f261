/* account.c - see account.h. */
#include "router/core/account.h"

#include <math.h>
#include <string.h>

#define MAX_FREE_S 9e9 /* in ns that still fits 64 bits; three centuries */

void td_account_scan(const struct td_core_worker *w, struct td_core_scan *s)
{
    *s = (struct td_core_scan){.room_tokens = w->state == TD_WORKER_READY && !w->shunned &&
                                                      !w->kept && w->assigned < w->foreign.seqs_max
                                                  ? w->kv_tokens
                                                  : 0};
    if (w->role == TD_ROLE_PREFILL) {
        s->prefill.busy_s = fmax(w->prefill.free_at_s, w->prefill.link_free_at_s);
        s->prefill.pending = (double)w->prefill.pending_tokens * w->correction * 1e-3;
        s->prefill.assigned = (double)w->assigned * 1e-6;
    } else {
        s->decode.key =
            w->decode.step_s * 1e6 + (double)w->decode.promised_tokens * w->correction * 1e-3;
        s->decode.promised = (double)w->decode.promised_tokens;
        s->decode.kv_limit = td_worker_kv_limit(w);
    }
}

void td_account_part(const struct td_core_worker *w, struct td_load_part *p)
{
    memset(p, 0, sizeof *p); /* parts are compared byte by byte */
    if (w->state != TD_WORKER_READY) return;
    if (w->role == TD_ROLE_PREFILL) {
        p->kind = TD_LOAD_PREFILL;
        p->free_ns = w->prefill.free_at_s >= MAX_FREE_S ? (uint64_t)(MAX_FREE_S * 1e9)
                     : w->prefill.free_at_s > 0         ? (uint64_t)(w->prefill.free_at_s * 1e9)
                                                        : 0;
        return;
    }
    p->kind = TD_LOAD_DECODE;
    p->assigned = w->assigned + w->foreign.n_seqs;
    p->max_seqs = w->max_seqs;
    p->promised_tokens = w->decode.promised_tokens + (uint64_t)w->foreign.promised;
    p->kv_tokens = w->kv_tokens;
    p->step_share = (uint64_t)(w->decode.step_share * (double)TD_LOAD_SHARE_ONE);
}

void td_account_changed(struct td_core_worker *w)
{
    if (w->scan) td_account_scan(w, w->scan);
    if (!w->fullness) return;
    struct td_load_part part;
    td_account_part(w, &part);
    td_load_put(w->fullness, w->at, &part);
}

void td_account_join(struct td_core_worker *w, const struct td_ev_join *e, uint64_t now_ns)
{
    struct td_core_scan *scan = w->scan;
    struct td_load *fullness = w->fullness;
    uint32_t at = w->at;
    *w = (struct td_core_worker){.state = TD_WORKER_READY,
                                 .role = e->role,
                                 .kv_tokens = e->kv_tokens,
                                 .max_seqs = (uint32_t)e->max_seqs,
                                 .node_class = (uint32_t)e->node_class,
                                 .max_step_tokens = (uint32_t)e->max_step_tokens,
                                 .kv_bytes_per_token = e->kv_bytes_per_token,
                                 .snapshot_ns = now_ns,
                                 .correction = 1,
                                 .prefill = {.one_token = e->one_token},
                                 .decode = {.min_tpot_s = INFINITY},
                                 .foreign = {.seqs_max = (uint32_t)e->max_seqs},
                                 .scan = scan,
                                 .fullness = fullness,
                                 .at = at};
    td_account_changed(w);
}

static void learn_mean(double *mean, double own)
{
    *mean = *mean > 0 ? *mean + 0.05 * (own - *mean) : own;
}

void td_account_prefill_open(struct td_core_worker *w, struct td_leg *leg, uint32_t worker,
                             uint32_t turn, uint64_t n_tokens, double work_s, double now_s)
{
    *leg = (struct td_leg){.worker = worker,
                           .pending = true,
                           .planned = true,
                           .tokens = n_tokens,
                           .work_s = work_s,
                           .turn = turn,
                           .tpot_s = INFINITY};
    w->assigned++;
    w->assigned_tokens += n_tokens;
    w->n_pending++;
    w->prefill.pending_tokens += n_tokens;
    if (n_tokens && work_s > 0) {
        learn_mean(&w->prefill.s_per_token, work_s / (double)n_tokens);
        learn_mean(&w->prefill.s_per_job, work_s);
    }
    w->prefill.pending_s += work_s;
    w->prefill.pending_by_turn[turn].n++;
    w->prefill.pending_by_turn[turn].s += work_s;
    w->prefill.planned_tokens += n_tokens;
    w->prefill.planned_s += work_s;
    w->prefill.free_at_s = fmax(w->prefill.free_at_s, now_s) + work_s;
    td_account_changed(w);
}

void td_account_link_open(struct td_core_worker *w, struct td_leg *leg, double link_s,
                          double from_s)
{
    leg->link_s = link_s;
    w->prefill.link_s += link_s;
    w->prefill.link_by_turn_s[leg->turn] += link_s;
    w->prefill.link_free_at_s = fmax(w->prefill.link_free_at_s, from_s) + link_s;
    td_account_changed(w);
}

/* A leg is over, and its transfer. What the others still have to send is all that the link can
 * be behind the computing: predictions that were too long do not add up. */
static void link_settle(struct td_core_worker *w, const struct td_leg *leg, double now_s)
{
    w->prefill.link_s = w->assigned ? fmax(0, w->prefill.link_s - leg->link_s) : 0;
    w->prefill.link_by_turn_s[leg->turn] =
        fmax(0, w->prefill.link_by_turn_s[leg->turn] - leg->link_s);
    /* exact at rest: no rounding is carried on */
    if (w->assigned == 0) memset(w->prefill.link_by_turn_s, 0, sizeof w->prefill.link_by_turn_s);
    w->prefill.link_free_at_s =
        fmin(w->prefill.link_free_at_s, fmax(now_s, w->prefill.free_at_s) + w->prefill.link_s);
}

/* Longer than what one step computes: its KV leaves in parts. */
static bool chunked(const struct td_core_worker *w, const struct td_leg *leg)
{
    return w->max_step_tokens > 0 && leg->tokens > w->max_step_tokens;
}

static void plan_settle(struct td_core_worker *w, struct td_leg *leg)
{
    if (!leg->planned) return;
    leg->planned = false;
    w->prefill.planned_tokens -= leg->tokens;
    w->prefill.planned_s =
        w->prefill.planned_tokens ? fmax(0, w->prefill.planned_s - leg->work_s) : 0;
}

void td_account_prefill_tell(struct td_core_worker *w, struct td_leg *leg)
{
    if (leg->planned) {
        w->prefill.n_told++;
        w->prefill.n_chunked += chunked(w, leg);
    }
    plan_settle(w, leg);
    w->calls_sent++;
}

static void prefill_settle(struct td_core_worker *w, struct td_leg *leg)
{
    if (!leg->planned) {
        w->prefill.n_told--;
        w->prefill.n_chunked -= chunked(w, leg);
    }
    plan_settle(w, leg);
    leg->pending = false;
    w->n_pending--;
    w->prefill.pending_tokens -= leg->tokens;
    w->assigned_tokens -= leg->tokens;
    /* exact at rest: no rounding is carried on */
    w->prefill.pending_s = w->n_pending ? fmax(0, w->prefill.pending_s - leg->work_s) : 0;
    w->prefill.pending_by_turn[leg->turn].n--;
    w->prefill.pending_by_turn[leg->turn].s =
        w->prefill.pending_by_turn[leg->turn].n
            ? fmax(0, w->prefill.pending_by_turn[leg->turn].s - leg->work_s)
            : 0;
}

void td_account_prefill_done(struct td_core_worker *w, struct td_leg *leg, double now_s)
{
    if (leg->worker == TD_NO_WORKER || !leg->pending) return;
    prefill_settle(w, leg);
    leg->tokens = 0;
    /* The step that ended may have computed the first part of whoever is next: that leaves
       together with this one's KV. */
    w->prefill.crowded = w->prefill.n_sending++ > 0 || w->prefill.n_told > 0 || w->prefill.crowded;
    if (w->foreign.n_routers > 1) { /* others' prompts may have ended with it */
        if (!w->prefill.end_seen) w->prefill.step_from_s = now_s;
        w->prefill.end_seen = true;
        w->prefill.free_at_s = fmax(w->prefill.free_at_s, now_s + w->prefill.pending_s);
    } else {
        w->prefill.free_at_s = now_s + w->prefill.pending_s;
    }
    td_account_changed(w);
}

void td_account_decode_open(struct td_core_worker *w, struct td_leg *leg, uint32_t worker,
                            bool local, uint64_t n_tokens, uint64_t n_promised, uint64_t n_local,
                            double tpot_s)
{
    *leg = (struct td_leg){.worker = worker,
                           .pending = true,
                           .local = local,
                           .tokens = n_tokens,
                           .promised = n_promised,
                           .local_tokens = n_local,
                           .tpot_s = tpot_s};
    w->assigned++;
    w->assigned_tokens += n_tokens;
    w->decode.promised_tokens += n_promised;
    w->n_pending++;
    w->decode.reserved_tokens += n_tokens;
    w->decode.local_tokens += n_local;
    if (tpot_s < w->decode.min_tpot_s) {
        w->decode.min_tpot_s = tpot_s;
        w->decode.n_min_tpot = 1;
    } else if (tpot_s <= w->decode.min_tpot_s) {
        w->decode.n_min_tpot++;
    }
    td_account_changed(w);
}

void td_account_decode_active(struct td_core_worker *w, struct td_leg *leg)
{
    if (leg->worker == TD_NO_WORKER || !leg->pending) return;
    leg->pending = false;
    w->n_pending--;
    w->decode.reserved_tokens -= leg->tokens;
    w->decode.local_tokens -= leg->local_tokens;
    leg->local_tokens = 0;
    w->decode.n_active++;
    w->decode.active_tokens += leg->tokens;
    td_account_changed(w);
}

void td_account_decode_grow(struct td_core_worker *w, struct td_leg *leg, uint64_t n_more)
{
    if (leg->worker == TD_NO_WORKER) return;
    leg->tokens += n_more;
    w->assigned_tokens += n_more;
    if (leg->pending)
        w->decode.reserved_tokens += n_more;
    else
        w->decode.active_tokens += n_more;
    if (leg->tokens > leg->promised) {
        w->decode.promised_tokens += leg->tokens - leg->promised;
        leg->promised = leg->tokens;
        td_account_changed(w);
    }
}

void td_account_close(struct td_core_worker *w, struct td_leg *leg, double now_s)
{
    if (leg->worker == TD_NO_WORKER) return;
    w->assigned--;
    if (w->role == TD_ROLE_PREFILL) {
        if (leg->pending) {
            prefill_settle(w, leg);
            w->prefill.free_at_s = fmax(now_s, w->prefill.free_at_s - leg->work_s);
        } else if (--w->prefill.n_sending == 0) {
            w->prefill.crowded = false;
        }
        link_settle(w, leg, now_s);
    } else {
        w->assigned_tokens -= leg->tokens;
        w->decode.promised_tokens -= leg->promised;
        if (leg->tpot_s <= w->decode.min_tpot_s) w->decode.n_min_tpot--;
        if (leg->pending) {
            w->n_pending--;
            w->decode.reserved_tokens -= leg->tokens;
            w->decode.local_tokens -= leg->local_tokens;
        } else {
            w->decode.n_active--;
            w->decode.active_tokens -= leg->tokens;
        }
    }
    if (w->assigned == 0) {
        w->decode.min_tpot_s = INFINITY;
        w->decode.n_min_tpot = 0;
    }
    *leg = (struct td_leg){.worker = TD_NO_WORKER};
    td_account_changed(w);
}

void td_account_call_failed(struct td_core_worker *w, const struct td_leg *leg)
{
    if (leg->worker != TD_NO_WORKER && leg->pending && !leg->planned &&
        w->calls_sent > w->calls_seen)
        w->calls_sent--;
}

void td_account_foreign(struct td_core_worker *w, const struct td_ev_foreign *e,
                        double promised_tokens)
{
    struct td_foreign *f = &w->foreign;
    *f = (struct td_foreign){.n_routers = (uint32_t)e->n_routers, .seqs_max = w->max_seqs};
    if (e->n_routers > 1) {
        uint32_t taken = w->assigned + (uint32_t)e->n_seqs,
                 free = taken < w->max_seqs ? w->max_seqs - taken : 0;
        f->n_seqs = (uint32_t)e->n_seqs;
        f->tokens = e->tokens;
        f->queued_tokens = e->queued_tokens;
        f->on_way = w->role == TD_ROLE_PREFILL ? -(int64_t)e->n_seqs
                    : e->n_seqs > e->n_running ? (int64_t)(e->n_seqs - e->n_running)
                                               : 0;
        f->promised = promised_tokens;
        f->seqs_max = w->assigned + (free + f->n_routers - 1) / f->n_routers;
        f->promised_then = w->decode.promised_tokens;
        f->free_tokens = fmax(0, TD_POLICY_KV_CEILING * (double)w->kv_tokens - promised_tokens -
                                     (double)f->promised_then);
        f->share_tokens = f->free_tokens / f->n_routers;
    }
    td_account_changed(w);
}

/* With several routers a worker's queue holds others' prompts, too: it is believed as it stands,
 * and what this router has sent and the worker has not seen comes behind it. A step's prompts are
 * in the queue until it ends: they count from its beginning. was_idle: nothing was queued at the
 * last snapshot. */
static void prefill_resync_shared(struct td_core_worker *w, bool was_idle, double now_s)
{
    uint64_t unseen = w->calls_sent > w->calls_seen ? w->calls_sent - w->calls_seen : 0,
             n_told = w->prefill.n_told;
    double told_s = fmax(0, w->prefill.pending_s - w->prefill.planned_s),
           unseen_s =
               n_told ? told_s * (double)(unseen < n_told ? unseen : n_told) / (double)n_told : 0;
    if (was_idle || (w->prefill.stepped && !w->prefill.end_seen)) w->prefill.step_from_s = now_s;
    w->prefill.stepped = w->prefill.end_seen = false;
    double queue_s = (double)w->queued_tokens * w->prefill.s_per_token;
    w->prefill.free_at_s =
        fmax(now_s, w->prefill.step_from_s + queue_s) + unseen_s + w->prefill.planned_s;
}

void td_account_snapshot(struct td_core_worker *w, const struct td_ev_snapshot *e, double now_s)
{
    bool was_idle = w->queued_tokens == 0;
    w->snapshot_seq = e->seq;
    w->held_tokens = e->held_tokens;
    w->queued_tokens = e->queued_tokens;
    w->calls_seen = e->calls_taken;
    /* at rest nothing is on its way: what was lost, or thought to be, is settled */
    if (w->assigned == 0) w->calls_sent = w->calls_seen;
    uint64_t told = w->prefill.pending_tokens - w->prefill.planned_tokens;
    if (w->role == TD_ROLE_PREFILL && w->foreign.n_routers > 1) {
        prefill_resync_shared(w, was_idle, now_s);
        td_account_changed(w);
        return;
    }
    if (w->role == TD_ROLE_PREFILL && w->calls_seen >= w->calls_sent && told > 0) {
        double left = (double)w->queued_tokens / (double)told;
        /* A worker may hold more than we gave it (older attempts): never believe that. */
        if (left < 1)
            w->prefill.free_at_s =
                fmin(w->prefill.free_at_s,
                     now_s + w->prefill.planned_s +
                         fmax(0, w->prefill.pending_s - w->prefill.planned_s) * left);
        else
            w->prefill.free_at_s = fmax(
                w->prefill.free_at_s,
                now_s +
                    w->prefill.pending_s); /* nothing was computed since: it is behind our plan */
    }
    td_account_changed(w);
}
