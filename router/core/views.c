/* views.c - what the core tells of itself: to the status page, to metrics, to tests. */
#include <math.h>
#include <string.h>

#include "router/core/core_state.h"

void td_core_worker_view(const struct td_core *c, uint32_t worker,
                         struct td_core_worker_view *ret_view)
{
    *ret_view = (struct td_core_worker_view){0};
    if (worker >= TD_CORE_MAX_WORKERS) return;
    const struct td_core_worker *w = &c->workers[worker];
    uint64_t unseen = w->calls_sent > w->calls_seen ? w->calls_sent - w->calls_seen : 0;
    *ret_view = (struct td_core_worker_view){.state = w->state,
                                             .role = w->role,
                                             .assigned = w->assigned,
                                             .assigned_tokens = w->assigned_tokens,
                                             .calls_unseen = (uint32_t)unseen,
                                             .snapshot_ns = w->snapshot_ns,
                                             .backlog_s = fmax(0, w->prefill.free_at_s - c->now_s),
                                             .step_s = w->decode.step_s,
                                             .correction = w->correction};
}

void td_core_account(const struct td_core *c, uint32_t worker, struct td_core_account *ret_account)
{
    *ret_account = (struct td_core_account){0};
    if (worker >= TD_CORE_MAX_WORKERS) return;
    const struct td_core_worker *w = &c->workers[worker];
    *ret_account = (struct td_core_account){.assigned = w->assigned,
                                            .n_pending = w->n_pending,
                                            .n_active = w->decode.n_active,
                                            .n_min_tpot = w->decode.n_min_tpot,
                                            .assigned_tokens = w->assigned_tokens,
                                            .promised_tokens = w->decode.promised_tokens,
                                            .pending_tokens = w->prefill.pending_tokens,
                                            .planned_tokens = w->prefill.planned_tokens,
                                            .active_tokens = w->decode.active_tokens,
                                            .reserved_tokens = w->decode.reserved_tokens,
                                            .local_tokens = w->decode.local_tokens,
                                            .pending_s = w->prefill.pending_s,
                                            .min_tpot_s = w->decode.min_tpot_s,
                                            .kept = w->kept};
    struct td_core_scan want;
    td_account_scan(w, &want);
    struct td_load_part part;
    td_account_part(w, &part);
    ret_account->stale = memcmp(&want, w->scan, sizeof want) != 0 ||
                         memcmp(&part, &c->fullness.parts[worker], sizeof part) != 0;
}

void td_core_stats(const struct td_core *c, struct td_core_stats *ret_stats)
{
    *ret_stats = c->stats;
    ret_stats->queued = td_queue_n(c->order);
    ret_stats->live = c->n_live;
    ret_stats->arrival_rate = c->stats.arrival_rate * exp2(-(c->now_s - c->trend.rate_s) / 5.0);
}

uint32_t td_core_failovers(const struct td_core *c, uint32_t request_at)
{
    return request_at < c->cfg.max_requests ? c->requests[request_at].failovers : 0;
}
void td_core_advice(const struct td_core *c, struct td_core_advice *ret)
{
    *ret =
        (struct td_core_advice){.bound = c->bound,
                                .want = {c->advice.want[0], c->advice.want[1]},
                                .need = {c->advice.need[0], c->advice.need[1]},
                                .utilisation = {c->trend.utilisation[0], c->trend.utilisation[1]}};
}

const struct td_latency *td_core_latency(const struct td_core *c) { return c->latency; }

struct td_core_memory td_core_memory(uint64_t max_prefix_entries)
{
    size_t hashes = max_prefix_entries ? TD_CORE_MAX_HASHES * sizeof(uint64_t) : 0;
    struct td_core_memory m = {
        .per_request = sizeof(struct request) + td_queue_request_bytes() + hashes,
        .fixed = sizeof(struct td_core) + TD_CORE_MAX_WORKERS * sizeof(uint32_t)};
    return m;
}
