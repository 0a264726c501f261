/* fit.h - non-negative least squares for a handful of coefficients: the step models of
 * router/core/latency.h. Pure; no allocation.
 *
 * Every subset of the coefficients is solved and the best one without a negative is taken:
 * exact, and with at most FIT_MAX coefficients cheap (Lawson and Hanson 1974 need fewer
 * solutions for more). Residuals are relative: a millisecond matters more to a short step. */
#ifndef BENCH_CALIBRATE_FIT_H
#define BENCH_CALIBRATE_FIT_H

#include <stddef.h>

#include "common/base/status.h"

#define FIT_MAX 5

struct fit_sample {
    double x[FIT_MAX]; /* features */
    double y;          /* seconds, > 0 */
};

/* ret_theta[n_features], each >= 0. A feature that no sample has gets 0. TD_ERR_INVALID: no
 * sample, or y not above 0. */
td_status fit_non_negative(const struct fit_sample *samples, size_t n, size_t n_features,
                           double *ret_theta, struct td_err *err);
double fit_predict(const double *theta, const struct fit_sample *sample, size_t n_features);

#endif
