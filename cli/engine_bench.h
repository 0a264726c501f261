/* engine_bench.h - the cases of `tandem engine-bench` (engine_bench_cases.c): batch and context of
 * each run. */
#ifndef TD_CLI_ENGINE_BENCH_H
#define TD_CLI_ENGINE_BENCH_H

#include "common/engine/engine.h"

#define ENGINE_BENCH_CASES_MAX 64

struct engine_bench_case {
    int32_t batch, prompt_len;
};

struct engine_bench_report {
    const char *model, *csv, *commit, *command; /* csv "": none */
    const char *dtype;                          /* "auto": the one that is computed in */
    double floor_gb_s, floor_tflops;            /* 0: unknown */
    int32_t n_steps;
};

/* The experts that all layers together have read in each of n_steps decode steps of n_rows rows
 * since *before was taken. Where they are not counted, on a device: those of even routing. */
double engine_bench_active_experts(struct td_engine *e, const struct td_expert_counts *before,
                                   int32_t n_rows, int32_t n_steps);
/* Bytes of weights of a decode step that reads so many (of this rank). */
double engine_bench_step_weights(struct td_engine *e, double active);

/* "1x4096,64x4096" */
td_status engine_bench_parse_cases(const char *text, struct engine_bench_case *ret_cases,
                                   int32_t *ret_n, struct td_err *err);
/* Runs the cases and prints a line as each is done; appends two rows for each to the CSV. The
 * engine holds no sequence before and after. */
td_status engine_bench_run_cases(struct td_engine *e, const struct engine_bench_case *cases,
                                 int32_t n_cases, const struct engine_bench_report *report,
                                 struct td_err *err);

#endif
