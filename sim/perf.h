/* perf.h - how long a step takes on one kind of node: what the simulator has instead of a GPU.
 *
 * Two forms:
 *   coefficients   time = max(a0 if prefill, b0 if decode) + a1*P + a2*W + b1*B + b2*K
 *                  seconds (measured ones, with b3 and b4 beside decode rows: b0 + b1*B + b2*K +
 *                  b3*P + b4*W) P prefill rows, W = sum over chunks of u*(h + u/2) (u rows on top
 *                  of h tokens that are there), B decode rows, K their context tokens; from `split`
 *                  decode rows on, a second set of b (DistServe fits two). The intercepts are the
 *                  weights being read and the launches, which prefill and decode rows of one step
 *                  share.
 *   table          measured points (batch tokens -> prefill time; batch tokens -> decode step),
 *                  linear between medians and beyond the ends; a step that mixes both takes `mixed`
 *                  times the prefill time of all its rows (how splitwise-sim reads its own
 *                  measurements).
 *
 * Names: "opt-13b", "opt-13b:tp2", "opt-66b:tp4", "llama-8b-h200", ... (td_perf_names);
 * "gpu:h100:tp4:CONFIG.json", derived (gpu.h); "splitwise:FILE:MODEL:HARDWARE:TP"; else "FILE"
 * or "FILE:NODE_CLASS", a latency table as the router reads it and `tandem bench calibrate`
 * writes it (router/objectives.h); without a class its first line. */
#ifndef TD_SIM_PERF_H
#define TD_SIM_PERF_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/status.h"

#define TD_PERF_MAX_POINTS 64

struct td_perf {
    char name[96];
    double a[3], b[3], b_large[3];
    double mixed_a[2]; /* b3, b4; both 0 = a1, a2 */
    int32_t split;     /* decode rows from which b_large counts; 0 = never */
    double pp_scale;   /* 1 / pipeline stages, on the whole sum */
    uint32_t n_prefill_points, n_decode_points; /* > 0: a table */
    double prefill_x[TD_PERF_MAX_POINTS], prefill_s[TD_PERF_MAX_POINTS],
        decode_x[TD_PERF_MAX_POINTS], decode_s[TD_PERF_MAX_POINTS];
    double mixed;
    uint64_t kv_tokens; /* one worker's pool; 0 = not known */
    double kv_bytes_per_token;
    uint32_t gpus;              /* of one worker */
    const char *estimated_from; /* the card whose constants were scaled (gpu.h); NULL =
                                   measured */
    int32_t max_context;        /* tokens of the model's longest sequence; 0 = not known */
};

struct td_perf_batch {
    int64_t prefill_rows, decode_rows;
    double attention_work, context_tokens;
};

double td_perf_step_s(const struct td_perf *perf, const struct td_perf_batch *batch);
/* A whole prompt of u tokens on top of h, alone, in chunks of at most `chunk` rows. */
double td_perf_prefill_s(const struct td_perf *perf, int64_t u, int64_t h, int64_t chunk);

td_status td_perf_load(const char *spec, struct td_perf *ret_perf, struct td_err *err);
/* Built-in name i, NULL at the end; base model and parallelism of it, for the planner. */
const char *td_perf_name(uint32_t i);

#endif
