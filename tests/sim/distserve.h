/* distserve.h - the scheduler that DistServe's own simulator assumes (simdistserve), on our event
 * heap. tandem does not schedule like this. It is a reference whose published and re-derived
 * numbers must come out exactly, which shows that heap, generator and latency tables are right.
 *
 * Its rules. A prefill worker takes its whole queue as one batch of up to max_tokens. Each request
 * then joins the decode worker's queue at once (a transfer costs nothing). A decode worker takes
 * its whole queue up to decode_cap context tokens, one token each. A step of either kind costs
 * base_ms + per_token_ms * context tokens more, and a prefill also pp_ms for each pipeline stage.
 * With pp stages a step's time is divided by pp, and batches go from stage to stage. Colocated: one
 * worker, prefill first. TPOT is (end - first token) / output steps. */
#ifndef TD_TESTS_SIM_DISTSERVE_H
#define TD_TESTS_SIM_DISTSERVE_H

#include "sim/perf.h"
#include "sim/trace.h"

struct td_distserve {
    const struct td_perf *prefill, *decode;
    int pp_prefill, pp_decode; /* 1.. */
    bool colocated;            /* the prefill table and stages serve both */
    double base_ms, per_token_ms, pp_ms;
    int64_t max_tokens, decode_cap;
};
/* its constants: base 2 ms, 0.0001 ms a token, 1 ms a stage; decode_cap 50,000 */
void td_distserve_init(struct td_distserve *d, const struct td_perf *prefill,
                       const struct td_perf *decode);

/* ret_ttft_ms, ret_tpot_ms: [trace->n]. n_output of the trace = decode steps. */
void td_distserve_run(const struct td_distserve *d, const struct td_sim_trace *trace,
                      double *ret_ttft_ms, double *ret_tpot_ms);

#endif
