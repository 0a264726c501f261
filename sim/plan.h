/* plan.h - how to split N GPUs: which parallelism, how many prefill and decode workers, none of it
 * (colocated), or both as the router sees fit (hybrid).
 *
 * Closed forms (closed_form.h) rank every layout; the best of them are simulated, each at the
 * highest rate at which the lower end of the interval of attainment still reaches the target
 * (bisected). With several classes each class must reach it, too, by its own attainment. Or, for a
 * wanted rate: the cheapest layout that reaches it.
 *
 * Cost. GPUs at hand are paid for whether a layout uses them or not, so rows rank by requests for
 * the price of all of them; an idle GPU costs what the cheapest does. For a wanted rate nobody has
 * to buy what is not used: only what is used counts. */
#ifndef TD_SIM_PLAN_H
#define TD_SIM_PLAN_H

#include "sim/mix.h"
#include "sim/perf.h"
#include "sim/report.h"

#define TD_PLAN_MAX_TABLES 16

struct td_plan_query {
    const char *tables[TD_PLAN_MAX_TABLES]; /* latency specs of one model, one for each parallelism;
                                               names of perfs that are there */
    struct td_perf perfs[TD_PLAN_MAX_TABLES]; /* gpus 0: not there, the search loads tables[i] */
    uint32_t n_tables;
    double price[TD_PLAN_MAX_TABLES]; /* of one GPU of that table for an hour, in any currency; 0 =
                                         1 */
    struct td_sim_length isl, osl;
    const struct td_sim_trace
        *file; /* lengths (and prefixes) are its rows' instead of isl and osl; may be NULL */
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
    double cv;        /* of the gaps */
    double tolerance; /* of the rate: 0.02 */
    bool pd, colocated, hybrid;
    bool closed_form_only;
};

enum td_plan_mode { TD_PLAN_PD, TD_PLAN_COLOCATED, TD_PLAN_HYBRID, TD_PLAN_N_MODES };
const char *td_plan_mode_name(enum td_plan_mode mode); /* as the router's --mode */

struct td_plan_row {
    enum td_plan_mode mode;
    bool simulated, pareto;
    const char *prefill, *decode;       /* latency specs */
    uint32_t n_prefill, n_decode, gpus; /* gpus: used */
    double cost;     /* of an hour: what is used and, of the GPUs at hand, what is idle */
    double estimate; /* requests/s by closed form */
    double prefill_estimate, decode_estimate;
    struct td_sim_summary at; /* at the found rate; at.rate = that rate */
    char bound[16];           /* what fails first above it: prefill, decode, memory */
};

/* "2.5", or a price for each table, "opt-13b=2 opt-13b:tp2=2.2"; "" = 1 for all. After
 * td_plan_tables. */
td_status td_plan_prices(const char *text, struct td_plan_query *query, struct td_err *err);

/* "opt-13b" -> the built-in tables of that model; else a list of specs. Strings are borrowed
 * from text and from perf.c. */
td_status td_plan_tables(char *text, struct td_plan_query *query, struct td_err *err);

/* Tables derived for a config.json (gpu.h): gpus "h100" or "h100,h200", tps "" (1, 2, 4 and 8, as
 * far as the model can be split, its weights fit and query->gpus suffice) or "2,4" (each must do).
 * Named "h100", "h100:tp2"; the names are query->perfs', so query stays where it is. */
td_status td_plan_gpu_tables(const char *gpus, const char *tps, const char *model,
                             struct td_plan_query *query, struct td_err *err);

/* Rows, best first (goodput for the money; with target_rate: the cheapest). Caller frees *ret_rows.
 * progress: layouts done of how many. */
td_status td_plan_search(const struct td_plan_query *query,
                         void (*progress)(void *ctx, uint64_t done, uint64_t total), void *ctx,
                         struct td_plan_row **ret_rows, uint32_t *ret_n, struct td_err *err);

#endif
