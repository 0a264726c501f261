/* arrival.c - a request comes: it is queued, placed at once, or refused at once. */
#include <math.h>
#include <string.h>

#include "router/core/core_state.h"

/* Arrivals of which the mean cost is taken: some ten seconds of a busy fleet. */
#define MEAN_COST_REQUESTS 200

static double objective_s(uint64_t own_us, double class_ms)
{
    double ms = own_us ? (double)own_us * 1e-3 : class_ms;
    return ms > 0 ? fmin(ms, MAX_OBJECTIVE_MS) * 1e-3 : INFINITY;
}

static void count_arrival(struct td_core *c)
{
    double dt = c->now_s - c->trend.rate_s, keep = exp2(-dt / 5.0); /* half-life 5 s */
    /* So that the area under one arrival is 1. */
    c->stats.arrival_rate = c->stats.arrival_rate * keep + M_LN2 / 5.0;
    c->trend.rate_s = c->now_s;
}

/* What the request adds to a decode worker's steps, and the mean of that over recent arrivals. */
static void count_cost(struct td_core *c, struct request *r, double n_out)
{
    if (c->n_by_role[TD_ROLE_DECODE] == 0) return;
    uint32_t at = c->by_role[TD_ROLE_DECODE][0];
    double context = (double)r->n_tokens + n_out / 2;
    double with_s = td_latency_step(c->latency, at, 2, context, 0, 0);
    double without_s = td_latency_step(c->latency, at, 1, 0, 0, 0);
    r->decode_cost_s = n_out * fmax(0, with_s - without_s);
    if (c->trend.n_costs < MEAN_COST_REQUESTS) c->trend.n_costs++;
    c->trend.cost_s += (r->decode_cost_s - c->trend.cost_s) / c->trend.n_costs;
}

/* Fills the request from the event; what is out of range is clamped. */
static void take_in(struct td_core *c, struct request *r, const struct td_ev_request *e,
                    uint32_t slo_class)
{
    const struct td_core_class *k = &c->cfg.classes[slo_class];
    uint64_t max_tokens = e->max_tokens < 1 ? 1 : e->max_tokens;
    *r = (struct request){.id = e->id,
                          .n_prompt = e->n_prompt,
                          .n_tokens = e->n_prompt,
                          .max_tokens =
                              max_tokens < TD_CORE_MAX_TOKENS ? max_tokens : TD_CORE_MAX_TOKENS,
                          .slo_class = slo_class,
                          .tenant = e->tenant,
                          .ttft_s = objective_s(e->ttft_us, k->ttft_ms),
                          .tpot_s = objective_s(e->tpot_us, k->tpot_ms),
                          .priority = e->priority < -100  ? -100
                                      : e->priority > 100 ? 100
                                                          : e->priority,
                          .arrived_ns = c->now_ns,
                          .moved_ns = c->now_ns,
                          .queued_ns = c->now_ns,
                          .prefill = {.worker = TD_NO_WORKER},
                          .decode = {.worker = TD_NO_WORKER},
                          .hashes = r->hashes,
                          .hash_tokens = e->hash_tokens};
    if (!r->hashes || e->hash_tokens == 0) return;
    r->n_hashes = e->n_hashes < TD_CORE_MAX_HASHES ? e->n_hashes : TD_CORE_MAX_HASHES;
    if ((uint64_t)r->n_hashes * r->hash_tokens > r->n_prompt)
        r->n_hashes = (uint32_t)(r->n_prompt / r->hash_tokens);
    memcpy(r->hashes, e->hashes, r->n_hashes * sizeof *r->hashes);
}

void core_on_request(struct td_core *c, const struct td_ev_request *e)
{
    if (e->request_at >= c->cfg.max_requests || c->requests[e->request_at].phase != FREE) return;
    if (e->n_prompt == 0 || e->n_prompt > TD_CORE_MAX_TOKENS) return;
    struct request *r = &c->requests[e->request_at];
    if (e->request_at >= c->requests_end) c->requests_end = e->request_at + 1;
    uint32_t slo_class = e->slo_class < c->cfg.n_classes ? (uint32_t)e->slo_class : 0;
    const struct td_core_class *k = &c->cfg.classes[slo_class];
    take_in(c, r, e, slo_class);
    c->n_live++;
    count_arrival(c);
    c->classes.asked_ns[c->classes.rank[slo_class]] = c->now_ns > 0 ? c->now_ns : 1;
    td_queue_ask(c->order, r->tenant, (e->tenant_weight ? e->tenant_weight : 1000) * 1e-3,
                 c->now_ns);
    uint32_t n_p = c->n_by_role[TD_ROLE_PREFILL], any = n_p ? c->by_role[TD_ROLE_PREFILL][0]
                                                        : c->n_by_role[TD_ROLE_DECODE]
                                                            ? c->by_role[TD_ROLE_DECODE][0]
                                                            : 0;
    r->work_s =
        td_latency_prefill(c->latency, any, r->n_tokens, 0, c->workers[any].max_step_tokens);
    double n_out = td_latency_output(c->latency, slo_class, 0.5, r->max_tokens);
    td_scaling_arrival(
        &c->advice, c->now_s, r->work_s,
        td_latency_transfer(c->latency, c->workers[any].node_class, 0,
                            (double)(r->n_tokens * c->workers[any].kv_bytes_per_token)),
        n_out, (double)r->n_tokens + n_out / 2, r->tpot_s);
    count_cost(c, r, n_out);
    core_queue_insert(c, r);
    /* With others waiting it takes its place behind them (dispatch goes by order); refused at
     * once when even so its objective is out of reach. Who is below its share goes before those
     * who are above theirs: what waits says little of when its turn comes. */
    bool behind = !td_queue_below_share(c->order, r->tenant, c->now_ns);
    if (behind && td_queue_n(c->order) > 1 && c->policy == td_policy_goodput &&
        r->ttft_s < INFINITY) {
        uint32_t n_d = c->n_by_role[TD_ROLE_DECODE];
        double ahead = fmax(0, td_queue_work_s(c->order, slo_class) - r->work_s) / (n_p   ? n_p
                                                                                    : n_d ? n_d
                                                                                          : 1);
        if (ahead > r->ttft_s && !k->best_effort) {
            core_fail(c, r, TD_CODE_RESOURCE_EXHAUSTED, "the TTFT objective cannot be met now",
                      ahead - r->ttft_s);
            return;
        }
    }
    core_dispatch(c); /* max_queued bounds those who wait, not those who can be placed at once */
    if (r->phase == QUEUED && r->id == e->id && td_queue_n(c->order) > c->cfg.max_queued)
        core_fail(c, r, TD_CODE_RESOURCE_EXHAUSTED, "the router's queue is full", 1);
}
