/* slo.h - latency objectives as the command line names them, and whether a request met them. Pure.
 *
 * A request is good when it completed within every objective in force. TTFT and E2EL count from
 * the scheduled send time, so that a client or a server that falls behind cannot hide it
 * (coordinated omission); TPOT = (last token - first) / (tokens - 1), vacuously met by one
 * token; TBT is Mooncake's: the mean of the longest tenth of the gaps between tokens. */
#ifndef BENCH_SERVE_SLO_H
#define BENCH_SERVE_SLO_H

#include <stdbool.h>
#include <stddef.h>

#include "common/base/status.h"

#define BENCH_MAX_CLASSES 16
#define BENCH_MAX_NAME 64

struct bench_slo {
    double ttft_ms, tpot_ms, e2el_ms, tbt_ms; /* 0 = no such objective */
};

struct bench_class {
    char name[BENCH_MAX_NAME]; /* "" = the default class */
    struct bench_slo slo;
    double weight; /* of the requests, relative to the other classes' */
};

static inline bool bench_slo_any(const struct bench_slo *s)
{
    return s->ttft_ms > 0 || s->tpot_ms > 0 || s->e2el_ms > 0 || s->tbt_ms > 0;
}

/* "ttft:2000 tpot:200" (blanks between; vLLM's names and AIPerf's: time_to_first_token,
 * inter_token_latency, request_latency). Sets what it names. TD_ERR_INVALID names option, metric
 * and value. */
td_status bench_slo_parse(const char *text, struct bench_slo *slo, struct td_err *err);

/* A named pair: MLPerf's server and interactive scenarios, DistServe's. ret_attainment: the
 * share of requests the pair is meant for. */
td_status bench_slo_preset(const char *name, struct bench_slo *ret_slo, double *ret_attainment,
                           struct td_err *err);

/* "gold:ttft=450,tpot=40,weight=4 free:weight=1": classes; what one leaves out it takes from
 * `base`. */
td_status bench_slo_classes(const char *text, const struct bench_slo *base,
                            struct bench_class classes[BENCH_MAX_CLASSES], size_t *ret_n,
                            struct td_err *err);

#endif
