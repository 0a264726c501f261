/* fit.c - see fit.h. */
#include "bench/calibrate/fit.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

double fit_predict(const double *theta, const struct fit_sample *sample, size_t n_features)
{
    double v = 0;
    for (size_t i = 0; i < n_features; i++) v += theta[i] * sample->x[i];
    return v;
}

/* Gauss with pivots on the normal equations of the features in `set`; false: they are dependent. */
static bool solve(double a[FIT_MAX][FIT_MAX], const double *b, size_t n_features, unsigned set,
                  double *ret)
{
    double m[FIT_MAX][FIT_MAX + 1];
    size_t of[FIT_MAX], n = 0;
    for (size_t i = 0; i < n_features; i++)
        if (set >> i & 1) of[n++] = i;
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < n; k++) m[i][k] = a[of[i]][of[k]];
        m[i][n] = b[of[i]];
    }
    for (size_t c = 0; c < n; c++) {
        size_t p = c;
        for (size_t i = c + 1; i < n; i++)
            if (fabs(m[i][c]) > fabs(m[p][c])) p = i;
        if (fabs(m[p][c]) < 1e-12) return false; /* the diagonal of the scaled equations is 1 */
        for (size_t k = 0; k <= n; k++) {
            double t = m[c][k];
            m[c][k] = m[p][k], m[p][k] = t;
        }
        for (size_t i = 0; i < n; i++) {
            double f = i == c ? 0 : m[i][c] / m[c][c];
            for (size_t k = c; k <= n && f != 0; k++) m[i][k] -= f * m[c][k];
        }
    }
    memset(ret, 0, FIT_MAX * sizeof *ret);
    for (size_t i = 0; i < n; i++) ret[of[i]] = m[i][n] / m[i][i];
    return true;
}

td_status fit_non_negative(const struct fit_sample *samples, size_t n, size_t n_features,
                           double *ret_theta, struct td_err *err)
{
    double a[FIT_MAX][FIT_MAX] = {{0}}, b[FIT_MAX] = {0}, scale[FIT_MAX] = {0}, best[FIT_MAX] = {0},
           least = INFINITY;
    TD_ASSERT(n_features > 0 && n_features <= FIT_MAX);
    if (n == 0) return td_fail(err, TD_ERR_INVALID, "nothing was measured to fit");
    for (size_t s = 0; s < n; s++) {
        if (!(samples[s].y > 0))
            return td_fail(err, TD_ERR_INVALID, "sample %zu took %g s, must be > 0", s,
                           samples[s].y);
        for (size_t i = 0; i < n_features; i++) scale[i] += pow(samples[s].x[i] / samples[s].y, 2);
    }
    for (size_t i = 0; i < n_features; i++) scale[i] = scale[i] > 0 ? sqrt(scale[i]) : 0;
    for (size_t s = 0; s < n; s++) /* rows divided by y, columns by their length: every number is
                                      near 1 */
        for (size_t i = 0; i < n_features; i++) {
            double xi = scale[i] > 0 ? samples[s].x[i] / samples[s].y / scale[i] : 0;
            b[i] += xi;
            for (size_t k = 0; k < n_features; k++)
                a[i][k] += scale[k] > 0 ? xi * samples[s].x[k] / samples[s].y / scale[k] : 0;
        }
    for (unsigned set = 1; set < 1u << n_features; set++) {
        double t[FIT_MAX], rest = 0;
        bool good = solve(a, b, n_features, set, t);
        for (size_t i = 0; i < n_features && good; i++) good = t[i] >= 0;
        if (!good) continue;
        for (size_t i = 0; i < n_features; i++) t[i] = scale[i] > 0 ? t[i] / scale[i] : 0;
        for (size_t s = 0; s < n; s++)
            rest += pow(fit_predict(t, &samples[s], n_features) / samples[s].y - 1, 2);
        if (rest < least) least = rest, memcpy(best, t, sizeof best);
    }
    if (!isfinite(least)) return td_fail(err, TD_ERR_INVALID, "no feature explains the times");
    memcpy(ret_theta, best, n_features * sizeof *best);
    return TD_OK;
}
