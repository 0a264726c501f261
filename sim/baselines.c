/* baselines.c - see baselines.h. Each but conductor is a score for prefill workers and one for
 * decode workers: the least score wins, and ties go to the lowest index.
 *
 * name           prefill score                                     decode score
 *                source
 * least_request  requests                                          requests
 *                vLLM production-stack
 * power_of_two   of two random workers the one with fewer tokens   the same
 *                Mitzenmacher 2001; SGLang gateway
 * lmetric        (uncached tokens + 1) * (requests + 1)            tokens held
 *                arXiv 2603.15202
 * kv_cost        blocks to compute - blocks cached                 blocks held - blocks cached
 *                Dynamo's KV router
 * conductor      predicted TTFT; rejects above an objective        predicted TPOT
 *                Mooncake (FAST'25), algorithm 1 */
#include "sim/baselines.h"

#include <math.h>

#include "common/base/random.h"

#define KV_COST_BLOCK 16.0 /* tokens: the block size of Dynamo's default */

static double lmetric(const struct td_policy_view *v, const struct td_policy_ask *a, uint32_t at)
{
    return ((double)(a->n_tokens - v->hit_tokens[at]) + 1) * ((double)v->workers[at].assigned + 1);
}
static double kv_cost(const struct td_policy_view *v, const struct td_policy_ask *a, uint32_t at)
{
    const struct td_core_worker *w = &v->workers[at];
    /* a decode worker computes nothing for it */
    double coming = w->role == TD_ROLE_PREFILL ? (double)a->n_tokens : 0;
    return fmax(0, ((double)w->assigned_tokens + coming) / KV_COST_BLOCK -
                       v->hit_tokens[at] / KV_COST_BLOCK);
}

static double predicted_prefill(const struct td_policy_view *v, const struct td_policy_ask *a,
                                uint32_t at)
{
    const struct td_core_worker *w = &v->workers[at];
    uint64_t hit = v->hit_tokens[at];
    return fmax(0, w->prefill.free_at_s - v->now_s) +
           td_latency_prefill(v->latency, at, a->n_tokens - hit, hit, w->max_step_tokens);
}
static uint32_t pick_two(const struct td_policy_view *v, const struct td_policy_ask *a,
                         enum td_core_role role)
{
    uint32_t n = v->n_by_role[role];
    if (n == 0) return TD_NO_WORKER;
    uint32_t x = v->by_role[role][td_random_index(v->random, n)],
             y = v->by_role[role][td_random_index(v->random, n)];
    bool ok_x = td_worker_can_take(&v->workers[x], a->n_tokens + 1),
         ok_y = td_worker_can_take(&v->workers[y], a->n_tokens + 1);
    if (ok_x && ok_y) return v->workers[y].assigned_tokens < v->workers[x].assigned_tokens ? y : x;
    if (ok_x || ok_y) return ok_x ? x : y;
    /* both full: somebody else may have room */
    return td_policy_least(v, a, role, td_policy_tokens);
}

static uint32_t pick_least_request(const struct td_policy_view *v, const struct td_policy_ask *a,
                                   enum td_core_role role)
{
    return td_policy_least(v, a, role, td_policy_requests);
}
static uint32_t pick_lmetric(const struct td_policy_view *v, const struct td_policy_ask *a,
                             enum td_core_role role)
{
    return td_policy_least(v, a, role, role == TD_ROLE_PREFILL ? lmetric : td_policy_tokens);
}
static uint32_t pick_kv_cost(const struct td_policy_view *v, const struct td_policy_ask *a,
                             enum td_core_role role)
{
    return td_policy_least(v, a, role, kv_cost);
}

static uint32_t pick_conductor(const struct td_policy_view *v, const struct td_policy_ask *a,
                               enum td_core_role role)
{
    return td_policy_least(v, a, role,
                           role == TD_ROLE_PREFILL ? predicted_prefill : td_policy_step_s);
}

static void least_request(const struct td_policy_view *v, const struct td_policy_ask *a,
                          struct td_choice *c)
{
    td_policy_place_by(v, a, pick_least_request, c);
}
static void power_of_two(const struct td_policy_view *v, const struct td_policy_ask *a,
                         struct td_choice *c)
{
    td_policy_place_by(v, a, pick_two, c);
}
static void lmetric_policy(const struct td_policy_view *v, const struct td_policy_ask *a,
                           struct td_choice *c)
{
    td_policy_place_by(v, a, pick_lmetric, c);
}
static void kv_cost_policy(const struct td_policy_view *v, const struct td_policy_ask *a,
                           struct td_choice *c)
{
    td_policy_place_by(v, a, pick_kv_cost, c);
}

/* Algorithm 1: the pair of least predicted TTFT and TPOT; refused when either is over its
 * objective. No margin: that is its weakness. */
static void conductor(const struct td_policy_view *v, const struct td_policy_ask *a,
                      struct td_choice *c)
{
    td_policy_place_by(v, a, pick_conductor, c);
    if (c->verdict != TD_PLACE || a->started || a->best_effort) return;
    bool late = c->ttft_s > a->ttft_s, slow = c->tpot_s > a->tpot_s;
    if (!late && !slow) return;
    c->verdict = TD_REJECT;
    c->wait_s = late ? c->ttft_s - a->ttft_s : c->tpot_s * a->n_out;
    c->reason =
        late ? "the TTFT objective cannot be met now" : "the TPOT objective cannot be met now";
}

const struct td_policy td_sim_policies[] = {
    {"goodput", td_policy_goodput},   {"round_robin", td_policy_round_robin},
    {"least_request", least_request}, {"least_token", td_policy_least_token},
    {"power_of_two", power_of_two},   {"cache_aware", td_policy_cache_aware},
    {"lmetric", lmetric_policy},      {"kv_cost", kv_cost_policy},
    {"conductor", conductor},         {0}};
