/* result.h - one run: what happened to each request, and what a report says about them.
 *
 * bench_result_summarise is pure arithmetic over the requests; the file format is vLLM's
 * benchmark JSON with everything else under "pd" (docs in bench/README.md). A result that was
 * read back has the numbers of the file and no requests. Zeroed = empty; bench_result_free
 * accepts that. One thread. */
#ifndef BENCH_SERVE_RESULT_H
#define BENCH_SERVE_RESULT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "bench/serve/slo.h"
#include "common/base/stats.h"
#include "common/base/status.h"

#define BENCH_MAX_PCTS 16

enum bench_metric_id { BENCH_TTFT, BENCH_TPOT, BENCH_ITL, BENCH_E2EL, BENCH_N_METRICS };
extern const char *const bench_metric_names[BENCH_N_METRICS]; /* "ttft", ... */

enum bench_stage {
    /* these add up to the router's TTFT */
    BENCH_ROUTER_QUEUE,
    BENCH_RESERVE,
    BENCH_PREFILL_QUEUE,
    BENCH_PREFILL,
    BENCH_RPC,
    BENCH_TRANSFER,
    BENCH_TRANSFER_EXPOSED,
    BENCH_DECODE_QUEUE,
    BENCH_FIRST_STEP,
    BENCH_DECODE,
    BENCH_N_STAGES
};
extern const char *const bench_stage_names[BENCH_N_STAGES]; /* "router_queue", ... */

enum bench_outcome {
    BENCH_UNSENT, /* the run was interrupted before it: not offered */
    BENCH_COMPLETED,
    BENCH_REJECTED,   /* RESOURCE_EXHAUSTED; HTTP 429, 503 */
    BENCH_TIMED_OUT,  /* DEADLINE_EXCEEDED */
    BENCH_FAILED,     /* every other status */
    BENCH_UNFINISHED, /* still running when the grace period ended; cancelled */
    BENCH_N_OUTCOMES
};
extern const char *const bench_outcome_names[BENCH_N_OUTCOMES];

struct bench_verdict {                 /* each true when there is no such objective */
    bool ttft, tpot, e2el, tbt, joint; /* joint: completed, and all four */
};

struct bench_request { /* times in seconds after the start of the run; NAN = did not happen */
    uint32_t class_index, tenant;
    enum bench_outcome outcome;
    int code;               /* gRPC status; of a plain server HTTP's, 0 = no answer */
    char *error;            /* its details; NULL = none. Owned */
    int64_t retry_delay_ms; /* what a rejection advises; -1 = nothing */
    double scheduled_s;     /* when it was to be sent; closed loop: when its turn
                               came */
    double ready_s;         /* scheduled, or later when --max-concurrency held it
                               back */
    double sent_s, first_s, last_s, end_s;                  /* first, last: token; end: status */
    int32_t input_len, output_len, cached_tokens, want_len; /* want_len: output tokens asked for */
    bool input_unknown, has_cached; /* of a plain server: a text whose tokens it did not
                                       tell; it told cached_tokens */
    uint32_t n_messages;            /* with tokens */
    double *gaps_s;                 /* n_messages - 1 of them. Owned */
    bool has_ledger;
    uint64_t stages_us[BENCH_N_STAGES], predicted_ttft_us, predicted_tpot_us;
    uint32_t failovers, preemptions;
    uint32_t n_resumes; /* times that its router was lost, and it went on at another one */
    char prefill_node[BENCH_MAX_NAME], decode_node[BENCH_MAX_NAME], mode[16];
    struct bench_verdict ok; /* filled by bench_result_summarise */
};

struct bench_metric { /* ms */
    uint64_t n;
    double mean, median, std, min, max, pct[BENCH_MAX_PCTS];
    struct td_stats_interval pct_ci95[BENCH_MAX_PCTS]; /* by order statistics; NAN: the sample is
                                                          too small to bound that side */
};

struct bench_share {
    double value; /* NAN: of nothing */
    uint64_t k, n;
};

struct bench_class_result {
    struct bench_class of;
    struct bench_share joint; /* in the measured span */
    struct td_stats_interval ci95;
    double request_goodput, ttft_p50_ms, ttft_p99_ms, tpot_p50_ms, tpot_p99_ms;
};

/* What was run, against what. */
struct bench_setup {
    char date[32], label[128], model_id[256], dataset[24], dataset_path[256];
    char build[32]; /* of the bench */
    uint64_t start_wall_ns;
    char *metadata; /* "K=V K=V" or NULL. Owned */
    char backend[16], target[256], server_build[64];
    bool plain_server; /* OpenAI's API: no ledger, no topology. What only a router tells
                                    is null in the files, not 0 */
    char topology_mode[24], policy[32];
    uint32_t n_prefill, n_decode;
    uint32_t gpus;   /* what goodput is divided by */
    bool gpus_given; /* by the option; else these are the workers */
};

/* When requests arrived, and how many at once. */
struct bench_load {
    char arrival[24];
    uint64_t seed, max_concurrency;
    double request_rate, burstiness; /* INFINITY: all at once; NAN: a ramp or a trace */
    double ramp_start, ramp_end;     /* 0 = no ramp */
    char ramp[16];
    bool rescaled, closed_loop;
    double time_scale, length_scale; /* of a trace, as the next two */
    uint64_t block_tokens, n_cut;
    double warmup, cooldown, grace_s;
    uint32_t n_tenants;
};

/* The load generator's own part. */
struct bench_generator {
    bool realtime;           /* its threads ran before all others */
    double cpu_s;            /* of this process, while the load ran: what it took from a server on
                                the same machine */
    double max_sched_lag_ms; /* the run is not valid when the p99 lies above it; 0 = 5 ms, or 1 % of
                                the least TTFT objective */
    double lag_p50_ms, lag_p99_ms, lag_max_ms;
};

/* How many, of the whole run. */
struct bench_totals {
    uint64_t n_offered, n_outcome[BENCH_N_OUTCOMES];
    uint64_t input_tokens, output_tokens, cached_tokens;
    bool input_unknown, has_cached; /* plain_server: of any completed request */
    uint64_t n_one_token, n_no_token, n_deflected, wasted_prefill_tokens, n_failovers,
        n_preemptions, n_resumes;
    uint64_t max_concurrent_requests;
};

/* vLLM's rates, which count the whole run with its drain. */
struct bench_rates {
    double duration_s, request_throughput, request_goodput, output_throughput,
        total_token_throughput, max_output_tokens_per_s;
};

/* Of the requests that arrived in the measured span. Rates: NAN when the span has no length. */
struct bench_steady {
    double t0_s, t1_s, offered_rate, goodput, per_gpu_goodput;
    struct bench_share joint, ttft, tpot, e2el, tbt;
    struct td_stats_interval ci95, ci95_wilson, ci95_batch; /* of joint; ci95 is the wider one */
    bool has_batch;
    struct bench_metric slo_ttft; /* from the scheduled time, of the requests that got a token */
    bool has_trend, saturated;    /* both the requests in flight and TTFT rose: the rate is more
                                     than is served */
    double token_deadline_share;  /* of the tokens due in the span: came by scheduled + TTFT + i *
                                     TPOT; NAN without both objectives */
};

struct bench_result {
    /* --- how it was run: filled by the run */
    struct bench_setup setup;
    struct bench_load load;
    struct bench_slo slo;
    char slo_preset[BENCH_MAX_NAME];
    bool slo_sent;
    double target_attainment; /* of the preset; 0 = none */
    size_t n_pcts, n_classes;
    double pcts[BENCH_MAX_PCTS];
    struct bench_class_result classes[BENCH_MAX_CLASSES]; /* at least one */
    struct bench_generator generator; /* lags: filled by bench_result_summarise */
    bool interrupted;

    struct bench_request *requests; /* owned; NULL when read back */
    size_t n_requests;

    /* --- what came of it: filled by bench_result_summarise */
    bool valid;
    char invalid_reason[256];
    struct bench_totals total;
    struct bench_rates rates;
    struct bench_metric metric[BENCH_N_METRICS];
    struct bench_steady steady;
    struct bench_metric stages[BENCH_N_STAGES];
    double jain_index; /* of the tenants' attainment; NAN with one tenant */
    /* of the router's predictions; NAN without them */
    double predicted_ttft_mape, predicted_ttft_coverage;
};

/* Computes the second half from the first. warmup, cooldown: below 1 a share of the span of
 * arrivals, else seconds. */
void bench_result_summarise(struct bench_result *r);
void bench_result_free(struct bench_result *r);

/* Console block: vLLM's labels, then what is ours. metrics: "ttft,tpot,itl,e2el". */
void bench_result_print(const struct bench_result *r, const char *metrics, FILE *out);

/* detailed: with the arrays of single requests. Caller json_decref()s; NULL = no memory. */
json_t *bench_result_to_json(const struct bench_result *r, const char *metrics, bool detailed);
td_status bench_result_write(const struct bench_result *r, const char *metrics, bool detailed,
                             const char *path, struct td_err *err);
/* One JSON object a line, in the layout of AIPerf's profile_export.jsonl. */
td_status bench_result_export(const struct bench_result *r, const char *path, struct td_err *err);

/* A result file's numbers. TD_ERR_INVALID names file and field. vLLM's own files (no "pd") give
 * what they have: the rest is 0 or NAN. */
td_status bench_result_read(const char *path, struct bench_result *ret, struct td_err *err);

#endif
