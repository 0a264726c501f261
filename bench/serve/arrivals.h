/* arrivals.h - when each request is sent: a schedule computed before the run (open loop), so that a
 * slow server does not slow the load.
 *
 * vLLM's arithmetic, so that a rate and a burstiness mean what they mean there: gaps from a
 * gamma distribution of shape `burstiness` and mean 1/rate (CV = 1/sqrt(burstiness)), the first
 * request one gap after the start, and the whole stretched so that the last one arrives at
 * n/rate. A ramp is not stretched. Pure, and the same from one seed on every machine up to the
 * last bits of libm. */
#ifndef BENCH_SERVE_ARRIVALS_H
#define BENCH_SERVE_ARRIVALS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

enum bench_arrival { BENCH_POISSON, BENCH_GAMMA, BENCH_CONSTANT, BENCH_TRACE };
enum bench_ramp { BENCH_RAMP_NONE, BENCH_RAMP_LINEAR, BENCH_RAMP_EXPONENTIAL };

struct bench_arrivals_config {
    enum bench_arrival kind;
    double rate;       /* requests/s; INFINITY: all at once */
    double burstiness; /* gamma: > 0 */
    bool rescale;
    enum bench_ramp ramp; /* from ramp_start to ramp_end requests/s, by share of the
                             requests; replaces rate */
    double ramp_start, ramp_end;
    uint64_t seed;
};

const char *bench_arrival_name(enum bench_arrival kind);

/* ret_at_s[n]: seconds after the start, ascending. TD_ERR_INVALID names the field. Not for
 * BENCH_TRACE, whose times come with the data. */
td_status bench_arrivals_make(const struct bench_arrivals_config *config, size_t n,
                              double *ret_at_s, struct td_err *err);

#endif
