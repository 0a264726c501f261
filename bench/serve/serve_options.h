/* serve_options.h - the options of `tandem bench serve` and `replay`, as a table that other kinds
 * of bench can take over and add to.
 *
 *   struct my_options { struct bench_serve_options serve; ... };
 *   static const struct td_option table[] = {BENCH_SERVE_OPTIONS(struct my_options, serve,
 *       "random"), {"rates", ...}, {0}};
 *   struct bench_args args;  bench_args_open(argc, argv, &args);  td_options_load(table, &o, ...,
 *       args.argc, args.argv, ...);
 *   struct bench_run_config c;  bench_serve_config(&o.serve, &c, &err);  bench_run(&c, &result,
 *       &err);
 *
 * vLLM's names, AIPerf's as aliases. Options of several values (--goodput ttft:200 tpot:50) are
 * joined by bench_args_open. */
#ifndef BENCH_SERVE_SERVE_OPTIONS_H
#define BENCH_SERVE_SERVE_OPTIONS_H

#include "bench/serve/run.h"
#include "common/base/options.h"

/* Where requests go, and what each has beside its prompt. */
struct bench_server_options {
    const char *backend, *address, *tls_ca, *tls_cert, *tls_key, *api_key_file, *endpoint, *model,
        *extra_body;
    uint64_t vocab_size, resume_ms;
};

/* What is sent. */
struct bench_data_options {
    const char *dataset_name, *dataset_path;
    uint64_t input_len, output_len, random_prefix_len, num_prompts, prefix_len, suffix_len,
        num_prefixes, trace_block_tokens, max_input_len, max_output_len;
    double random_range_ratio, time_scale, rate_scale, length_scale;
    bool spread_groups, shuffle;
};

/* When it is sent, and what is measured of it. */
struct bench_load_options {
    const char *request_rate, *burstiness, *arrival, *ramp_up_strategy;
    uint64_t seed, max_concurrency, num_warmups, tenants;
    double arrival_cv, ramp_up_start_rps, ramp_up_end_rps, benchmark_duration,
        benchmark_grace_period, warmup, cooldown, max_sched_lag_ms;
    bool rescale_arrivals, realtime, progress;
};

struct bench_sampling_options {
    double temperature, top_p;
    bool ignore_eos;
};

/* What counts as good. */
struct bench_slo_options {
    const char *goodput, *preset, *classes;
    uint64_t gpus; /* what goodput is divided by */
    bool send;
};

struct bench_report_options {
    const char *percentile_metrics, *metric_percentiles, *result_dir, *result_filename,
        *profile_export_file, *metadata, *label;
    bool save_result, save_detailed;
};

struct bench_serve_options {
    struct bench_server_options server;
    struct bench_data_options data;
    struct bench_load_options load;
    struct bench_sampling_options sampling;
    struct bench_slo_options slo;
    struct bench_report_options report;
};

// clang-format off
#define BENCH_SERVE_OPTIONS(S, M, DATASET)                                                         \
    {"server", TD_OPT_STR, "127.0.0.1:7600", 0, 0, NULL, offsetof(S, M.server.address),            \
     "its address; several routers, parted by commas, get the requests in turn; openai: "          \
     "http://HOST:PORT"},                                                                          \
    TD_OPTION_ALIAS("base_url", "server"), TD_OPTION_ALIAS("url", "server"),                       \
    {"backend", TD_OPT_ENUM, "grpc", 0, 0, "grpc|openai", offsetof(S, M.server.backend),           \
     "grpc: the router's API; openai: an HTTP server's /v1/completions, to measure vLLM, "         \
     "SGLang, llama.cpp, TensorRT-LLM"},                                                           \
    {"endpoint", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.server.endpoint),                       \
     "path; default /tandem.v1.Inference/Generate, openai: /v1/completions"},                      \
    {"vocab_size", TD_OPT_U64, "0", 0, INT32_MAX, NULL, offsetof(S, M.server.vocab_size),          \
     "openai: token ids are below it; 0 = what the server tells"},                                 \
    {"tls_ca", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.server.tls_ca),                           \
     "CA of the server's certificate; turns TLS on"},                                              \
    {"tls_cert", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.server.tls_cert),                       \
     "own certificate, for mutual TLS"},                                                           \
    {"tls_key", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.server.tls_key),                         \
     "own key, for mutual TLS"},                                                                   \
    {"resume_ms", TD_OPT_U64, "0", 0, 600000, NULL, offsetof(S, M.server.resume_ms),               \
     "gRPC: a request whose router is lost goes on at the next address of the list, or at the "    \
     "same one, for so long without a new token; 0 = it has failed"},                              \
    {"api_key_file", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.server.api_key_file),               \
     "file with the key of a tenant, for routers with --tenants; openai: sent as "                 \
     "Authorization: Bearer"},                                                                     \
    {"model", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.server.model),                             \
     "name or alias of a served model; default the only one"},                                     \
    {"label", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.report.label),                             \
     "for the result and its file name"},                                                          \
    {"dataset_name", TD_OPT_ENUM, DATASET, 0, 0, "auto|" BENCH_DATASET_NAMES,                      \
     offsetof(S, M.data.dataset_name),                                                             \
     "what is sent; auto: a trace, its kind told by its first line"},                              \
    {"dataset_path", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.data.dataset_path),                 \
     "its file: sharegpt JSON; custom, timed_trace, mooncake JSONL; azure CSV"},                   \
    TD_OPTION_ALIAS("trace", "dataset_path"), TD_OPTION_ALIAS("input_file", "dataset_path"),       \
    {"input_len", TD_OPT_U64, "1024", 1, BENCH_MAX_TOKENS, NULL, offsetof(S, M.data.input_len),    \
     "random: prompt tokens"},                                                                     \
    TD_OPTION_ALIAS("isl", "input_len"), TD_OPTION_ALIAS("random_input_len", "input_len"),         \
    {"output_len", TD_OPT_U64, "0", 0, BENCH_MAX_TOKENS, NULL, offsetof(S, M.data.output_len),     \
     "output tokens; 0 = what the file says, else 128"},                                           \
    TD_OPTION_ALIAS("osl", "output_len"), TD_OPTION_ALIAS("random_output_len", "output_len"),      \
    TD_OPTION_ALIAS("sharegpt_output_len", "output_len"),                                          \
    TD_OPTION_ALIAS("custom_output_len", "output_len"),                                            \
    {"random_range_ratio", TD_OPT_F64, "0", 0, 1, NULL, offsetof(S, M.data.random_range_ratio),    \
     "random: lengths uniform in len * (1 -+ ratio), below 1"},                                    \
    {"random_prefix_len", TD_OPT_U64, "0", 0, BENCH_MAX_TOKENS, NULL,                              \
     offsetof(S, M.data.random_prefix_len),                                                        \
     "random: tokens before each prompt that all share"},                                          \
    {"prefix_repetition_prefix_len", TD_OPT_U64, "256", 0, BENCH_MAX_TOKENS, NULL,                 \
     offsetof(S, M.data.prefix_len),                                                               \
     "prefix_repetition: tokens of a prefix"},                                                     \
    {"prefix_repetition_suffix_len", TD_OPT_U64, "256", 1, BENCH_MAX_TOKENS, NULL,                 \
     offsetof(S, M.data.suffix_len),                                                               \
     "prefix_repetition: tokens after it"},                                                        \
    {"prefix_repetition_num_prefixes", TD_OPT_U64, "10", 1, BENCH_MAX_REQUESTS, NULL,              \
     offsetof(S, M.data.num_prefixes),                                                             \
     "prefix_repetition: how many"},                                                               \
    TD_OPTION_ALIAS("prefix_repetition_output_len", "output_len"),                                 \
    {"shuffle", TD_OPT_BOOL, "true", 0, 0, NULL, offsetof(S, M.data.shuffle),                      \
     "sharegpt, custom: take the rows in an order drawn from the seed"},                           \
    {"num_prompts", TD_OPT_U64, "0", 0, BENCH_MAX_REQUESTS, NULL, offsetof(S, M.data.num_prompts), \
     "requests; 0 = rate x duration, or the whole file, or 1000; 100 when no rate, "               \
     "concurrency or duration is given"},                                                          \
    TD_OPTION_ALIAS("request_count", "num_prompts"),                                               \
    {"seed", TD_OPT_U64, "0", 0, 9e18, NULL, offsetof(S, M.load.seed),                             \
     "of prompts, lengths, arrivals, classes and sampling"},                                       \
    TD_OPTION_ALIAS("random_seed", "seed"),                                                        \
    {"request_rate", TD_OPT_STR, "auto", 0, 0, NULL, offsetof(S, M.load.request_rate),             \
     "requests/s; inf: all at once, or with --max-concurrency a closed loop; auto: inf, but "      \
     "with neither 4 at a time"},                                                                  \
    {"burstiness", TD_OPT_STR, "1", 0, 0, NULL, offsetof(S, M.load.burstiness),                    \
     "shape of gamma arrivals: 1 = Poisson, below 1 = bursty, inf = constant"},                    \
    {"arrival_cv", TD_OPT_F64, "0", 0, 1000, NULL, offsetof(S, M.load.arrival_cv),                 \
     "the same as burstiness 1/cv^2; 0 = by --burstiness"},                                        \
    {"arrival", TD_OPT_ENUM, "auto", 0, 0, "auto|poisson|gamma|constant|trace",                    \
     offsetof(S, M.load.arrival),                                                                  \
     "auto: a trace's own times, unless --request-rate is given; else by --burstiness"},           \
    {"rescale_arrivals", TD_OPT_BOOL, "true", 0, 0, NULL, offsetof(S, M.load.rescale_arrivals),    \
     "stretch the schedule so that the last request arrives at n/rate"},                           \
    {"ramp_up_strategy", TD_OPT_ENUM, "none", 0, 0, "none|linear|exponential",                     \
     offsetof(S, M.load.ramp_up_strategy),                                                         \
     "rate grows over the run"},                                                                   \
    {"ramp_up_start_rps", TD_OPT_F64, "0", 0, 1e9, NULL, offsetof(S, M.load.ramp_up_start_rps),    \
     "from this rate"},                                                                            \
    {"ramp_up_end_rps", TD_OPT_F64, "0", 0, 1e9, NULL, offsetof(S, M.load.ramp_up_end_rps),        \
     "to this one"},                                                                               \
    {"max_concurrency", TD_OPT_U64, "0", 0, 1000000, NULL, offsetof(S, M.load.max_concurrency),    \
     "at most so many at once; 0 = no limit"},                                                     \
    TD_OPTION_ALIAS("concurrency", "max_concurrency"),                                             \
    {"benchmark_duration", TD_OPT_F64, "0", 0, 1e7, NULL, offsetof(S, M.load.benchmark_duration),  \
     "nothing is sent after so many seconds; 0 = until all are"},                                  \
    {"benchmark_grace_period", TD_OPT_F64, "30", 0, 1e7, NULL,                                     \
     offsetof(S, M.load.benchmark_grace_period),                                                   \
     "seconds after the last arrival; what runs then is cancelled and a miss"},                    \
    {"num_warmups", TD_OPT_U64, "0", 0, BENCH_MAX_REQUESTS, NULL, offsetof(S, M.load.num_warmups), \
     "requests before the run, not measured, with prompts of their own; a rule: twice the "        \
     "concurrency"},                                                                               \
    TD_OPTION_ALIAS("warmup_request_count", "num_warmups"),                                        \
    {"warmup", TD_OPT_F64, "0.1", 0, 1e7, NULL, offsetof(S, M.load.warmup),                        \
     "arrivals left out of the measured span at its start: below 1 a share, else seconds"},        \
    {"cooldown", TD_OPT_F64, "0", 0, 1e7, NULL, offsetof(S, M.load.cooldown),                      \
     "the same at its end"},                                                                       \
    {"goodput", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.slo.goodput),                            \
     "objectives in ms: ttft:200 tpot:50 e2el:2000 tbt:100 (tbt: mean of the longest tenth of "    \
     "gaps)"},                                                                                     \
    {"slo_preset", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.slo.preset),                          \
     "a named pair of objectives, such as mlperf-llama2-70b-interactive"},                         \
    {"slo_class", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.slo.classes),                          \
     "classes of requests: gold:ttft=450,tpot=40,weight=4 free:weight=1"},                         \
    {"send_slo", TD_OPT_BOOL, "true", 0, 0, NULL, offsetof(S, M.slo.send),                         \
     "tell the router class and objectives with each request"},                                    \
    {"tenants", TD_OPT_U64, "0", 0, 1000000, NULL, offsetof(S, M.load.tenants),                    \
     "name so many tenants in turns; 0 = none"},                                                   \
    {"percentile_metrics", TD_OPT_STR, "ttft,tpot,itl,e2el", 0, 0, NULL,                           \
     offsetof(S, M.report.percentile_metrics),                                                     \
     "what is reported"},                                                                          \
    {"metric_percentiles", TD_OPT_STR, "50,90,95,99", 0, 0, NULL,                                  \
     offsetof(S, M.report.metric_percentiles),                                                     \
     "and at which percentiles"},                                                                  \
    {"save_result", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(S, M.report.save_result),           \
     "write a JSON file"},                                                                         \
    {"save_detailed", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(S, M.report.save_detailed),       \
     "with every request's numbers, and profile_export.jsonl beside it"},                          \
    {"result_dir", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.report.result_dir),                   \
     "where to; default here"},                                                                    \
    {"result_filename", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.report.result_filename),         \
     "default made of label, rate, model and date"},                                               \
    {"profile_export_file", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.report.profile_export_file), \
     "one JSON object a request; default with --save-detailed: profile_export.jsonl"},             \
    {"metadata", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.report.metadata),                       \
     "K=V K=V ... for the result file"},                                                           \
    {"ignore_eos", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(S, M.sampling.ignore_eos),           \
     "outputs of exactly the length asked for"},                                                   \
    {"temperature", TD_OPT_F64, "0", -1, 100, NULL, offsetof(S, M.sampling.temperature),           \
     "0 = greedy; -1 = the model's default"},                                                      \
    {"top_p", TD_OPT_F64, "-1", -1, 1, NULL, offsetof(S, M.sampling.top_p),                        \
     "-1 = the model's default"},                                                                  \
    {"extra_body", TD_OPT_STR, "", 0, 0, NULL, offsetof(S, M.server.extra_body),                   \
     "JSON object with more sampling fields"},                                                     \
    {"time_scale", TD_OPT_F64, "1", 0, 1e6, NULL, offsetof(S, M.data.time_scale),                  \
     "traces: time stamps times this (0.5 = twice as fast)"},                                      \
    {"rate_scale", TD_OPT_F64, "1", 0, 1e6, NULL, offsetof(S, M.data.rate_scale),                  \
     "traces: the same the other way round (2 = twice as fast)"},                                  \
    {"length_scale", TD_OPT_F64, "1", 0, 1000, NULL, offsetof(S, M.data.length_scale),             \
     "traces: lengths times this, for machines that cannot serve them"},                           \
    {"trace_block_tokens", TD_OPT_U64, "0", 0, BENCH_MAX_TOKENS, NULL,                             \
     offsetof(S, M.data.trace_block_tokens),                                                       \
     "mooncake: tokens of one hash id; 0 = 512 x length scale. A multiple of the server's "        \
     "block keeps all prefix hits"},                                                               \
    {"spread_groups", TD_OPT_BOOL, "true", 0, 0, NULL, offsetof(S, M.data.spread_groups),          \
     "mooncake: requests of one time stamp are spread up to the next"},                            \
    {"max_input_len", TD_OPT_U64, "0", 0, BENCH_MAX_TOKENS, NULL,                                  \
     offsetof(S, M.data.max_input_len),                                                            \
     "cut longer prompts of token ids; 0 = not"},                                                  \
    {"max_output_len", TD_OPT_U64, "0", 0, BENCH_MAX_TOKENS, NULL,                                 \
     offsetof(S, M.data.max_output_len),                                                           \
     "cut longer outputs; 0 = not"},                                                               \
    {"gpus", TD_OPT_U64, "0", 0, 1000000, NULL, offsetof(S, M.slo.gpus),                           \
     "what goodput is divided by; 0 = the workers"},                                               \
    {"max_sched_lag_ms", TD_OPT_F64, "0", 0, 1e6, NULL, offsetof(S, M.load.max_sched_lag_ms),      \
     "the run fails when the generator's own p99 lag is above it; 0 = 5 ms, or 1 % of the "        \
     "TTFT objective"},                                                                            \
    {"realtime", TD_OPT_BOOL, "true", 0, 0, NULL, offsetof(S, M.load.realtime),                    \
     "run the generator's threads before all others where the system permits, so that a busy "     \
     "machine does not make it late"},                                                             \
    {"progress", TD_OPT_BOOL, "true", 0, 0, NULL, offsetof(S, M.load.progress), "on stderr"}
// clang-format on

/* argv with the values of --goodput, --slo-class and --metadata, wherever they stand, joined
 * into one option each. */
struct bench_args {
    int argc;
    char **argv; /* owned; its strings are main's but for the joined ones */
    char *joined[3];
};
td_status bench_args_open(int argc, char **argv, struct bench_args *ret_args, struct td_err *err);
void bench_args_close(struct bench_args *args);

/* Checks what the table cannot, and translates. Strings are borrowed from the options; caller
 * frees with bench_run_config_free. */
td_status bench_serve_config(const struct bench_serve_options *o,
                             struct bench_run_config *ret_config, struct td_err *err);

/* Writes what --save-result, --save-detailed and --profile-export-file ask for; says on `out`
 * where. */
td_status bench_serve_save(const struct bench_serve_options *o, const struct bench_result *r,
                           FILE *out, struct td_err *err);

#endif
