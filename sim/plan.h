/* plan.h - decides how to split N GPUs: the parallelism, the number of prefill and decode workers,
 * all colocated, or both as the router decides (hybrid).
 *
 * Closed forms (closed_form.h) rank every layout. The best are simulated, each at the highest rate
 * at which the lower end of the interval of attainment still reaches the target (by bisection).
 * With several classes each class must reach it, too, by its own attainment. Or, for a wanted rate:
 * the cheapest layout that reaches it.
 *
 * Cost. GPUs at hand cost money whether a layout uses them or not, so rows rank by requests for the
 * price of all of them; an idle GPU costs as much as the cheapest. For a wanted rate nobody has to
 * buy what is not used, so only used GPUs count. */
#ifndef TD_SIM_PLAN_H
#define TD_SIM_PLAN_H

#include "sim/mix.h"
#include "sim/perf.h"
#include "sim/report.h"

#define TD_PLAN_MAX_TABLES 16

struct td_plan_query {
    /* latency specs of one model, one for each parallelism; or the names of the perfs that are
     * set */
    const char *tables[TD_PLAN_MAX_TABLES];
    struct td_perf perfs[TD_PLAN_MAX_TABLES]; /* gpus 0: not set, the search loads tables[i] */
    uint32_t n_tables;
    /* price of one GPU of that table for an hour, in any currency; 0 = 1 */
    double price[TD_PLAN_MAX_TABLES];
    struct td_sim_length isl, osl;
    const struct td_sim_trace
        *file; /* lengths (and prefixes) come from its rows instead of isl and osl; may be NULL */
    struct td_sim_mix mix; /* n_classes 0: one class of ttft_ms and tpot_ms */
    struct td_sim_load
        load;      /* the classes' shares, and the longest prompt and output taken from file */
    double prefix; /* leading prompt tokens that all requests share (a
                      system prompt) */
    double ttft_ms, tpot_ms, attainment;
    uint32_t gpus;
    double target_rate; /* > 0: the fewest GPUs (at most `gpus`) for this
                           many requests/s */
    const char *policy;
    double nic_bytes_per_s;
    int32_t max_batch, max_step_tokens;
    uint32_t top; /* layouts to simulate */
    uint32_t seeds;
    double cv;        /* coefficient of variation of the gaps between arrivals */
    double tolerance; /* relative precision of the found rate: 0.02 */
    bool pd, colocated, hybrid;
    bool closed_form_only;
};

enum td_plan_mode { TD_PLAN_PD, TD_PLAN_COLOCATED, TD_PLAN_HYBRID, TD_PLAN_N_MODES };
const char *td_plan_mode_name(enum td_plan_mode mode); /* as the router's --mode */

struct td_plan_row {
    enum td_plan_mode mode;
    bool simulated, pareto;
    const char *prefill, *decode;       /* latency specs */
    uint32_t n_prefill, n_decode, gpus; /* gpus: how many are used */
    double cost;     /* cost of an hour: of the used GPUs and, of the GPUs at hand, the idle ones */
    double estimate; /* requests/s by closed form */
    double prefill_estimate, decode_estimate;
    struct td_sim_summary at; /* the result at the found rate; at.rate = that rate */
    char bound[16];           /* what fails first above that rate: prefill, decode, memory */
};

/* Parses "2.5", or a price for each table, "opt-13b=2 opt-13b:tp2=2.2"; "" = 1 for all. Call it
 * after td_plan_tables. */
td_status td_plan_prices(const char *text, struct td_plan_query *query, struct td_err *err);

/* "opt-13b" gives the built-in tables of that model; otherwise text is a list of specs. Strings are
 * borrowed from text and from perf.c. */
td_status td_plan_tables(char *text, struct td_plan_query *query, struct td_err *err);

/* Makes tables for a config.json (gpu.h). gpus: "h100" or "h100,h200". tps: "" (those of 1, 2, 4
 * and 8 into which the model can be split, for which its weights fit and query->gpus suffice) or
 * "2,4" (each must be possible). Their names, "h100", "h100:tp2", lie in query->perfs, so query
 * must not move. */
td_status td_plan_gpu_tables(const char *gpus, const char *tps, const char *model,
                             const char *kv_dtype, struct td_plan_query *query, struct td_err *err);

/* Finds rows, best first (goodput per price; with target_rate: the cheapest). The caller frees
 * *ret_rows. progress: layouts done, of how many. */
td_status td_plan_search(const struct td_plan_query *query,
                         void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
                         struct td_plan_row **ret_rows, uint32_t *ret_n, struct td_err *err);

#endif
