/* sim_options.h - option rows that `tandem sim` and `tandem plan` share: the requests with their
 * objectives, and a worker's limits. */
#ifndef TD_SIM_SIM_OPTIONS_H
#define TD_SIM_SIM_OPTIONS_H

#include "sim/mix.h"
#include "common/base/options.h"

struct td_sim_request_options {
    const char *isl, *osl, *slo_class, *class_mix, *class_by_length;
    double ttft, tpot;
    int64_t max_prompt, max_output;
};

struct td_sim_worker_options {
    double nic_gbs;
    int64_t max_batch, max_step_tokens;
};

/* clang-format off: it would put each item of a row on a line of its own. */
/* Rows for a struct that holds td_sim_request_options as `at`. */
// clang-format off
#define TD_SIM_REQUEST_ROWS(type, at)                                                           \
    {"isl", TD_OPT_STR, "512", 0, 0, NULL, offsetof(type, at.isl),                              \
     "prompt tokens: N, lognormal:MEAN,CV, uniform:LOW,HIGH"},                                  \
    {"osl", TD_OPT_STR, "128", 0, 0, NULL, offsetof(type, at.osl), "output tokens, likewise"},  \
    {"max_prompt", TD_OPT_I64, "0", 0, 100000000, NULL, offsetof(type, at.max_prompt),          \
     "leave out longer prompts of the trace; 0 = none"},                                        \
    {"max_output", TD_OPT_I64, "0", 0, 100000000, NULL, offsetof(type, at.max_output),          \
     "leave out longer outputs of the trace; 0 = none"},                                        \
    {"ttft", TD_OPT_F64, "400", 0, 1e9, NULL, offsetof(type, at.ttft),                          \
     "TTFT objective in ms; 0 = none"},                                                         \
    {"tpot", TD_OPT_F64, "50", 0, 1e9, NULL, offsetof(type, at.tpot),                           \
     "TPOT objective in ms; 0 = none"},                                                         \
    {"slo_class", TD_OPT_STR, "", 0, 0, NULL, offsetof(type, at.slo_class),                     \
     "classes as the router takes them, instead of ttft and tpot: "                             \
     "\"gold:ttft=450,tpot=40,weight=4 bulk:ttft=5000,best_effort\""},                          \
    {"class_mix", TD_OPT_STR, "", 0, 0, NULL, offsetof(type, at.class_mix),                     \
     "shares of the arrivals: \"gold=1 bulk=3\"; empty = each class the same"},                 \
    {"class_by_length", TD_OPT_STR, "", 0, 0, NULL, offsetof(type, at.class_by_length),         \
     "classes by prompt tokens instead of shares: \"chat:4000 long\" = chat up to 4,000, long " \
     "above"}
// clang-format on

#define TD_SIM_KV_DTYPE_ROW(offset)                                                                \
    {                                                                                              \
        "kv_dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|int8|fp8", offset,                   \
            "with gpu: the workers' --kv-dtype, whose bytes KV takes; auto = bf16"                 \
    }

/* Rows for a struct that holds td_sim_worker_options as `at`. */
// clang-format off
#define TD_SIM_WORKER_ROWS(type, at)                                                              \
    {"nic_gbs", TD_OPT_F64, "12.5", 0, 1e6, NULL, offsetof(type, at.nic_gbs),                     \
     "GB/s of one worker's network card; 0 = without limit"},                                     \
    {"max_batch", TD_OPT_I64, "256", 1, 65536, NULL, offsetof(type, at.max_batch),                \
     "sequences in one step"},                                                                    \
    {"max_step_tokens", TD_OPT_I64, "2048", 1, 1048576, NULL, offsetof(type, at.max_step_tokens), \
     "rows in one step: the prefill chunk"}
// clang-format on

/* clang-format on */

/* Parses classes, objectives and lengths into mix and load; tenants: "" for none. Errors name the
 * option. */
td_status td_sim_requests_parse(const struct td_sim_request_options *o, const char *tenants,
                                struct td_sim_mix *ret_mix, struct td_sim_load *load,
                                struct td_err *err);

#endif
