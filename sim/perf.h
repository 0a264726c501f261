/* perf.h - the time that a step takes on one kind of node: the simulator's replacement for a GPU.
 *
 * There are two forms.
 *
 * Coefficients give, in seconds,
 *     time = max(a0 if prefill, b0 if decode) + a1*P + a2*W + b1*B + b2*K
 * or, when b3 and b4 were measured and there are decode rows,
 *     time = b0 + b1*B + b2*K + b3*P + b4*W
 * where P is the number of prefill rows, W the sum over chunks of u*(h + u/2) (u rows after h
 * tokens that are cached), B the number of decode rows, and K their context tokens. From `split`
 * decode rows on, a second set of b is used (DistServe fits two). The intercepts are reading the
 * weights and the launches, which prefill and decode rows of one step share.
 *
 * A table has measured points (batch tokens -> prefill time; batch tokens -> decode step), linear
 * between medians and beyond the ends. A step that mixes both takes `mixed` times the prefill time
 * of all its rows (this is how splitwise-sim reads its own measurements).
 *
 * Names: "opt-13b", "opt-13b:tp2", "opt-66b:tp4", "llama-8b-h200" and so on (td_perf_name);
 * "gpu:h100:tp4:CONFIG.json", derived (gpu.h); "splitwise:FILE:MODEL:HARDWARE:TP"; else "FILE" or
 * "FILE:NODE_CLASS", a latency table in the form that the router reads and `tandem bench calibrate`
 * writes (router/objectives.h); without a class its first line. */
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
    int32_t split;     /* from this many decode rows on b_large is used; 0 = never */
    double pp_scale;   /* 1 / pipeline stages, a factor on the whole sum */
    uint32_t n_prefill_points, n_decode_points; /* > 0: a table */
    double prefill_x[TD_PERF_MAX_POINTS], prefill_s[TD_PERF_MAX_POINTS],
        decode_x[TD_PERF_MAX_POINTS], decode_s[TD_PERF_MAX_POINTS];
    double mixed;
    uint64_t kv_tokens; /* one worker's pool; 0 = not known */
    double kv_bytes_per_token;
    uint32_t gpus;              /* of one worker */
    const char *estimated_from; /* the card whose constants were scaled (gpu.h); NULL =
                                   measured */
    int32_t max_context;        /* tokens of the longest sequence of the model; 0 = not known */
};

struct td_perf_batch {
    int64_t prefill_rows, decode_rows;
    double attention_work, context_tokens;
};

double td_perf_step_s(const struct td_perf *perf, const struct td_perf_batch *batch);
/* The time of a whole prompt of u tokens after h cached ones, alone, in chunks of at most `chunk`
 * rows. */
double td_perf_prefill_s(const struct td_perf *perf, int64_t u, int64_t h, int64_t chunk);

td_status td_perf_load(const char *spec, struct td_perf *ret_perf, struct td_err *err);
/* Built-in name i, NULL at the end; its base model and parallelism, for the planner. */
const char *td_perf_name(uint32_t i);

#endif
