/* stats.c - the formulas of stats.h. */
#include "common/base/stats.h"

#include <math.h>
#include <stdlib.h>

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void td_stats_sort(double *x, size_t n)
{
    if (n > 1) qsort(x, n, sizeof *x, compare);
}

double td_stats_percentile(const double *sorted, size_t n, double p)
{
    if (n == 0) return NAN;
    double rank = p / 100 * (double)(n - 1), whole = floor(rank);
    if (rank <= 0) return sorted[0];
    size_t i = (size_t)whole;
    if (i >= n - 1) return sorted[n - 1];
    return sorted[i] + (sorted[i + 1] - sorted[i]) * (rank - whole);
}

double td_stats_mean(const double *x, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i];
    return n ? sum / (double)n : NAN;
}

double td_stats_std(const double *x, size_t n)
{
    double mean = td_stats_mean(x, n), sum = 0;
    for (size_t i = 0; i < n; i++) sum += (x[i] - mean) * (x[i] - mean);
    return n ? sqrt(sum / (double)n) : NAN;
}

struct td_stats_interval td_stats_wilson(uint64_t k, uint64_t n)
{
    if (n == 0) return (struct td_stats_interval){0, 1};
    double z2 = TD_STATS_Z95 * TD_STATS_Z95, count = (double)n, share = (double)k / count;
    double centre = (share + z2 / (2 * count)) / (1 + z2 / count);
    double half = TD_STATS_Z95 / (1 + z2 / count) *
                  sqrt(share * (1 - share) / count + z2 / (4 * count * count));
    /* At the ends the formula is exact only up to rounding. */
    return (struct td_stats_interval){k == 0 ? 0 : fmax(0, centre - half),
                                      k == n ? 1 : fmin(1, centre + half)};
}

static bool make_batches(const double *x, size_t n, double means[TD_STATS_N_BATCHES])
{
    size_t batch = n / TD_STATS_N_BATCHES;
    if (batch < 2) return false;
    const double *from = x + n % TD_STATS_N_BATCHES;
    for (size_t b = 0; b < TD_STATS_N_BATCHES; b++)
        means[b] = td_stats_mean(from + b * batch, batch);
    return true;
}

bool td_stats_rises(const double *x, size_t n, double floor)
{
    double y[TD_STATS_N_BATCHES], mid = (TD_STATS_N_BATCHES - 1) / 2.0, sxx = 0, sxy = 0, rest = 0;
    if (!make_batches(x, n, y)) return false;
    double mean = td_stats_mean(y, TD_STATS_N_BATCHES);
    for (int b = 0; b < TD_STATS_N_BATCHES; b++)
        sxx += (b - mid) * (b - mid), sxy += (b - mid) * (y[b] - mean);
    double slope = sxy / sxx;
    for (int b = 0; b < TD_STATS_N_BATCHES; b++) rest += pow(y[b] - mean - slope * (b - mid), 2);
    double error = sqrt(rest / (TD_STATS_N_BATCHES - 2) / sxx);
    return slope > TD_STATS_T95_18_UP * error &&
           mean + slope * mid >= 2 * fmax(floor, mean - slope * mid);
}

bool td_stats_batch_means(const double *x, size_t n, struct td_stats_interval *ret)
{
    double means[TD_STATS_N_BATCHES];
    if (!make_batches(x, n, means)) return false;
    double mean = td_stats_mean(means, TD_STATS_N_BATCHES);
    /* the standard error of the mean: sample deviation over sqrt(batches) */
    double error = td_stats_std(means, TD_STATS_N_BATCHES) / sqrt(TD_STATS_N_BATCHES - 1.0);
    *ret =
        (struct td_stats_interval){mean - TD_STATS_T95_19 * error, mean + TD_STATS_T95_19 * error};
    return true;
}

void td_stats_percentile_ranks(size_t n, double p, size_t *ret_lo, size_t *ret_hi)
{
    double q = p / 100, below = 0; /* below = P(X <= k) of the binomial (n, q) */
    size_t lo = 0, hi = n + 1;
    for (size_t k = 0; k <= n; k++) {
        double log_pmf = lgamma((double)n + 1) - lgamma((double)k + 1) -
                         lgamma((double)(n - k) + 1) + (double)k * log(q) +
                         (double)(n - k) * log1p(-q);
        below += exp(log_pmf);
        if (below <= 0.025)
            lo = k + 1; /* P(X < lo) <= 2.5 %: this is how often the percentile lies below x[lo] */
        if (below >= 0.975) {
            hi = k + 1; /* P(X >= hi) <= 2.5 % */
            break;
        }
    }
    *ret_lo = lo > n ? n : lo;
    *ret_hi = hi;
}

double td_stats_jain(const double *x, size_t n)
{
    double sum = 0, squares = 0;
    for (size_t i = 0; i < n; i++) sum += x[i], squares += x[i] * x[i];
    return squares > 0 ? sum * sum / ((double)n * squares) : 1;
}

double td_stats_worst_tenth(double *x, size_t n)
{
    if (n == 0) return NAN;
    td_stats_sort(x, n);
    size_t tail = (n + 9) / 10;
    return td_stats_mean(x + n - tail, tail);
}
