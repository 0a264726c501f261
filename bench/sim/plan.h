/* plan.h - how to split N GPUs: which parallelism, how many prefill and decode workers, or none of it (colocated).
 *
 * Closed forms (closed_form.h) rank every layout; the best of them are simulated, each at the highest rate at which the lower end of the interval of
 * attainment still reaches the target (bisected). Or, for a wanted rate: the fewest GPUs that reach it. */
#ifndef TD_SIM_PLAN_H
#define TD_SIM_PLAN_H

#include "bench/sim/report.h"

#define TD_PLAN_MAX_TABLES 16

struct td_plan_query {
    const char *tables[TD_PLAN_MAX_TABLES]; /* latency specs of one model, one for each parallelism */
    uint32_t n_tables;
    struct td_sim_length isl, osl;
    double prefix;                          /* leading prompt tokens that all requests share (a system prompt) */
    double ttft_ms, tpot_ms, attainment;
    uint32_t gpus;
    double target_rate;                     /* > 0: the fewest GPUs (at most `gpus`) for this many requests/s */
    const char *policy;
    double nic_bytes_per_s;
    int32_t max_batch, max_step_tokens;
    uint32_t top;                           /* layouts to simulate */
    uint32_t seeds;
    double cv;                              /* of the gaps */
    double tolerance;                       /* of the rate: 0.02 */
    bool pd, colocated;
    bool closed_form_only;
};

struct td_plan_row {
    bool colocated, simulated, pareto;
    const char *prefill, *decode;           /* latency specs */
    uint32_t n_prefill, n_decode, gpus;
    double estimate;                        /* requests/s by closed form */
    double prefill_estimate, decode_estimate;
    struct td_sim_summary at;               /* at the found rate; at.rate = that rate */
    char bound[16];                         /* what fails first above it: prefill, decode, memory */
};

/* "opt-13b" -> the built-in tables of that model; else a list of specs. Strings are borrowed from text and from perf.c. */
td_status td_plan_tables(char *text, struct td_plan_query *query, struct td_err *err);

/* Rows, best first (goodput per GPU; with target_rate: fewest GPUs). Caller frees *ret_rows. progress: layouts done of how many. */
td_status td_plan_search(const struct td_plan_query *query, void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
                         struct td_plan_row **ret_rows, uint32_t *ret_n, struct td_err *err);

#endif
