/* search.c - see search.h. */
#include "bench/sweep/search.h"

#include <math.h>

#include "common/base/stats.h"

struct search {
    const struct sweep_search_config *config;
    sweep_probe_fn probe;
    void *ctx;
    struct sweep_found *found;
    struct td_err *err;
};

static uint32_t bisections(double lo, double hi, double tolerance)
{
    return hi > lo * (1 + tolerance) ? (uint32_t)ceil(log2(log(hi / lo) / log1p(tolerance))) : 0;
}

static td_status run(struct search *s, const char *phase, double rate, uint64_t seed, uint32_t left,
                     struct sweep_probe *ret_probe)
{
    s->found->n_runs++;
    return s->probe(s->ctx, phase, rate, seed, left, ret_probe, s->err);
}

/* The bound decides, not the share: a few lucky requests are no evidence. */
static bool passes(const struct search *s, const struct sweep_probe *p)
{
    return p->n > 0 && p->lower >= s->config->attainment;
}

static bool spent(const struct search *s) { return s->found->n_runs >= s->config->max_runs; }

static td_status bracket(struct search *s, double *ret_lo, double *ret_hi)
{
    const struct sweep_search_config *c = s->config;
    double rate = c->start_rate;
    *ret_lo = *ret_hi = 0;
    while (!spent(s)) {
        struct sweep_probe p = {0};
        td_status st =
            run(s, "bracket", rate, c->seed, bisections(1, 2, c->tolerance) + 2 + c->n_verify, &p);
        if (st) return st;
        if (passes(s, &p))
            *ret_lo = rate;
        else
            *ret_hi = rate;
        if (*ret_lo > 0 && (*ret_hi > 0 || rate >= c->max_rate)) return TD_OK;
        if (*ret_lo == 0 && rate <= c->min_rate) return TD_OK;
        rate = *ret_lo > 0 ? fmin(rate * 2, c->max_rate) : fmax(rate / 2, c->min_rate);
    }
    return TD_OK;
}

/* *ret_good: whether all runs at the rate hold; undecided runs out of the budget count as not. */
static td_status verify(struct search *s, double rate, bool *ret_good)
{
    const struct sweep_search_config *c = s->config;
    struct sweep_probe sum = {0};
    *ret_good = false;
    for (uint32_t i = 0; i < c->n_verify; i++) {
        if (spent(s)) return TD_OK;
        struct sweep_probe p = {0};
        td_status st = run(s, "verify", rate, c->seed + 1 + i, c->n_verify - 1 - i, &p);
        if (st) return st;
        if (p.n == 0 || (double)p.n_good < c->attainment * (double)p.n) return TD_OK;
        sum.n += p.n;
        sum.n_good += p.n_good;
    }
    *ret_good = c->n_verify == 0 || td_stats_wilson(sum.n_good, sum.n).lo >= c->attainment;
    return TD_OK;
}

td_status sweep_search(const struct sweep_search_config *config, sweep_probe_fn probe, void *ctx,
                       struct sweep_found *ret_found, struct td_err *err)
{
    struct search s = {config, probe, ctx, ret_found, err};
    double lo, hi, step = config->tolerance;
    *ret_found = (struct sweep_found){0};
    td_status st = bracket(&s, &lo, &hi);
    while (!st && lo > 0 && bisections(lo, hi, config->tolerance) > 0 && !spent(&s)) {
        double mid = sqrt(lo * hi);
        struct sweep_probe p = {0};
        st = run(&s, "bisect", mid, config->seed,
                 bisections(lo, hi, config->tolerance) - 1 + config->n_verify, &p);
        if (st) break;
        if (passes(&s, &p))
            lo = mid;
        else
            hi = mid;
    }
    ret_found->rate = lo;
    ret_found->failed_rate = hi;
    while (!st && lo > 0 && config->n_verify > 0 && !spent(&s)) {
        st = verify(&s, lo, &ret_found->verified);
        if (st || ret_found->verified || spent(&s)) break;
        ret_found->failed_rate = lo;
        ret_found->n_steps_down++;
        lo = lo * (1 - step) >= config->min_rate ? lo * (1 - step) : 0;
        step = fmin(step * 2, 0.5);
        ret_found->rate = lo;
    }
    return st;
}
