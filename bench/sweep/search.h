/* search.h - the highest rate that still meets an attainment, found with few runs. Pure but for the
 * runs, which its caller makes.
 *
 *   bracket   double from start_rate until a run fails (or halve until one passes)
 *   bisect    at the geometric middle until hi / lo <= 1 + tolerance; a run passes when the lower
 *             bound of its interval reaches the attainment
 *   verify    n_verify runs with seeds of their own at the rate that passed: each must reach the
 *             attainment itself, and all of them together with the lower bound of Wilson's
 *             interval. When not, step down by tolerance, 2 tolerance, 4 tolerance ... and verify
 *             again.
 *
 * Why verify: near the knee attainment falls steeply and one run's luck decides the last
 * bisections (MLPerf LoadGen repeats for the same reason). */
#ifndef BENCH_SWEEP_SEARCH_H
#define BENCH_SWEEP_SEARCH_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

struct sweep_search_config {
    double start_rate, min_rate, max_rate; /* requests/s, 0 < min_rate <= start_rate <= max_rate */
    double tolerance;                      /* 0.02 */
    double attainment;                     /* 0.9 */
    uint32_t n_verify;
    uint32_t max_runs; /* in all: the search ends with what it has */
    uint64_t seed;     /* of the bracket and the bisection; verification has
                          seed + 1, seed + 2, ... */
};

struct sweep_probe {
    uint64_t n_good, n;
    double lower; /* bound of the run's 95 % interval of n_good / n */
};

/* One run. left: how many may follow it, roughly. Another status than TD_OK ends the search. */
typedef td_status (*sweep_probe_fn)(void *ctx, const char *phase, double rate, uint64_t seed,
                                    uint32_t left, struct sweep_probe *ret_probe,
                                    struct td_err *err);

struct sweep_found {
    double rate;        /* 0: not even min_rate passes */
    double failed_rate; /* the lowest that was seen to fail above it; 0: none, max_rate passes */
    bool verified;
    uint32_t n_runs, n_steps_down;
};

/* *ret_found is filled as far as the search came also when a run's error ended it. */
td_status sweep_search(const struct sweep_search_config *config, sweep_probe_fn probe, void *ctx,
                       struct sweep_found *ret_found, struct td_err *err);

#endif
