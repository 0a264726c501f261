/* arrivals.c - see arrivals.h. Gamma by Marsaglia and Tsang 2000, normal by Box and Muller. */
#include "bench/serve/arrivals.h"
#include "common/base/random.h"

#include <math.h>

enum { WHAT_ARRIVALS = 1 };

const char *bench_arrival_name(enum bench_arrival kind)
{
    static const char *const names[] = {"poisson", "gamma", "constant", "trace"};
    return names[kind];
}

static double normal(struct td_keyed *r)
{
    double u = td_keyed_unit(r), v = td_keyed_unit(r);
    return sqrt(-2 * log(u)) * cos(2 * 3.14159265358979323846 * v);
}

/* Mean `shape`. */
static double gamma_of(struct td_keyed *r, double shape)
{
    if (shape < 1) return gamma_of(r, shape + 1) * pow(td_keyed_unit(r), 1 / shape);
    double d = shape - 1.0 / 3, c = 1 / sqrt(9 * d);
    for (;;) {
        double x = normal(r), v = 1 + c * x;
        if (v <= 0) continue;
        v = v * v * v;
        if (log(td_keyed_unit(r)) < 0.5 * x * x + d - d * v + d * log(v)) return d * v;
    }
}

static td_status check(const struct bench_arrivals_config *c, struct td_err *err)
{
    if (c->kind == BENCH_TRACE)
        return td_fail(err, TD_ERR_INTERNAL, "a trace brings its own arrivals");
    if (!(c->rate > 0))
        return td_fail(err, TD_ERR_INVALID, "request_rate is %g, must be > 0 or inf", c->rate);
    if (c->kind == BENCH_GAMMA && !(c->burstiness > 0 && isfinite(c->burstiness)))
        return td_fail(err, TD_ERR_INVALID, "burstiness is %g, must be > 0", c->burstiness);
    if (c->ramp == BENCH_RAMP_NONE) return TD_OK;
    if (!(c->ramp_start > 0 && isfinite(c->ramp_start)))
        return td_fail(err, TD_ERR_INVALID, "ramp_up_start_rps is %g, must be > 0", c->ramp_start);
    if (!(c->ramp_end > 0 && isfinite(c->ramp_end)))
        return td_fail(err, TD_ERR_INVALID, "ramp_up_end_rps is %g, must be > 0", c->ramp_end);
    return TD_OK;
}

td_status bench_arrivals_make(const struct bench_arrivals_config *c, size_t n, double *ret_at_s,
                              struct td_err *err)
{
    td_status s = check(c, err);
    if (s) return s;
    struct td_keyed r = td_keyed_at(c->seed, WHAT_ARRIVALS, 0);
    double shape = c->kind == BENCH_GAMMA ? c->burstiness : 1, at_s = 0;
    for (size_t i = 0; i < n; i++) {
        double rate = c->rate, share = (double)i / (double)n;
        if (c->ramp == BENCH_RAMP_LINEAR)
            rate = c->ramp_start + (c->ramp_end - c->ramp_start) * share;
        if (c->ramp == BENCH_RAMP_EXPONENTIAL)
            rate = c->ramp_start * pow(c->ramp_end / c->ramp_start, share);
        /* A constant schedule adds no rounding errors up. */
        if (c->kind == BENCH_CONSTANT && c->ramp == BENCH_RAMP_NONE)
            at_s = (double)(i + 1) / rate;
        else
            at_s += (c->kind == BENCH_CONSTANT ? 1 : gamma_of(&r, shape) / shape) /
                    rate; /* x / INFINITY = 0 */
        ret_at_s[i] = at_s;
    }
    if (c->rescale && c->ramp == BENCH_RAMP_NONE && isfinite(c->rate) && n && at_s > 0) {
        double stretch = (double)n / c->rate / at_s;
        for (size_t i = 0; i < n; i++) ret_at_s[i] *= stretch;
    }
    return TD_OK;
}
