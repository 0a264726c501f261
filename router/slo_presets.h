/* slo_presets.h - latency objectives that have a public name: MLPerf's server and interactive
 * scenarios (each at the 99th percentile) and DistServe's (90 %). One table for the router,
 * which keeps them, and the benches, which judge by them. */
#ifndef TD_ROUTER_SLO_PRESETS_H
#define TD_ROUTER_SLO_PRESETS_H

#include <stddef.h>

#include "common/base/status.h"

struct td_slo_preset {
    const char *name;
    double ttft_ms, tpot_ms;
    double attainment; /* share of requests that must meet both */
};

/* TD_ERR_INVALID lists the names. */
td_status td_slo_preset_find(const char *name, const struct td_slo_preset **ret_preset,
                             struct td_err *err);

#endif
