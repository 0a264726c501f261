/* stats.h - the numbers of a benchmark report: percentiles, intervals, fairness. Pure; no
 * allocation except where said; thread-safe.
 *
 * Sources: Wilson 1927 (score interval); Law and Kelton, Simulation Modeling and Analysis (batch
 * means); Jain, Chiu, Hawe 1984 (fairness). */
#ifndef TD_BASE_STATS_H
#define TD_BASE_STATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TD_STATS_Z95 1.959963984540054 /* the normal distribution's 97.5 % point */
#define TD_STATS_N_BATCHES 20
#define TD_STATS_T95_18_UP 1.734063606617536 /* one-sided 95 %, TD_STATS_N_BATCHES - 2 degrees */
/* Student's, for TD_STATS_N_BATCHES - 1 degrees of freedom */
#define TD_STATS_T95_19 2.093024054408263

struct td_stats_interval {
    double lo, hi;
};

/* Ascending, NaN is not allowed. */
void td_stats_sort(double *x, size_t n);
/* p in 0..100 of n ascending values, linear between neighbours (rank p/100 * (n-1)), as numpy
 * and vLLM do. NaN for n = 0. */
double td_stats_percentile(const double *sorted, size_t n, double p);
double td_stats_mean(const double *x, size_t n); /* NaN for n = 0 */
/* the standard deviation of the population (over n), as in vLLM; NaN for n = 0 */
double td_stats_std(const double *x, size_t n);

/* 95 % interval of a share: k of n, within [0, 1]. {0, 1} for n = 0. */
struct td_stats_interval td_stats_wilson(uint64_t k, uint64_t n);

/* The 95 % interval of the mean of values in order of time, which may be correlated:
 * TD_STATS_N_BATCHES batches of neighbouring values, of equal length (the first n mod
 * TD_STATS_N_BATCHES values are left out). False, with *ret untouched, when a batch has fewer than
 * two values. */
bool td_stats_batch_means(const double *x, size_t n, struct td_stats_interval *ret);

/* Whether the values rise with time. Takes the means of TD_STATS_N_BATCHES batches as above, so
 * that correlated neighbours do not count as a rise, and fits a line. True when its slope is
 * positive at 95 % (one-sided t-test) and its end is at least twice its start; a start below
 * `floor` counts as floor. */
bool td_stats_rises(const double *x, size_t n, double floor);

/* The ranks (1..n) of the order statistics that enclose the p-th percentile (0 < p < 100) with at
 * least 95 %: the exact binomial interval, with at most 2.5 % outside on either side. Rank 0 or n +
 * 1: no value of the sample bounds that side. */
void td_stats_percentile_ranks(size_t n, double p, size_t *ret_lo, size_t *ret_hi);

/* (sum x)^2 / (n sum x^2): 1 when all are equal, 1/n when one has everything. 1 for none or all
 * zero. */
double td_stats_jain(const double *x, size_t n);

/* Mean of the longest tenth, rounded up (Mooncake's TBT); NaN for n = 0. Sorts x. */
double td_stats_worst_tenth(double *x, size_t n);

#endif
