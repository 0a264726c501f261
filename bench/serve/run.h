/* run.h - one run of load against a router: `tandem bench serve` without its command line, so that
 * a sweep can call it again and again.
 *
 * Open loop: the schedule is computed first and kept, however far the server falls behind;
 * --max-concurrency holds requests back at the client and their objectives' clock goes on. With
 * an infinite rate and a concurrency the loop is closed: a request's time comes when a place is
 * free. One thread of the caller paces, one loop thread (of common/rpc, or run_http.c's) sends
 * and receives; hundreds of streams at once. */
#ifndef BENCH_SERVE_RUN_H
#define BENCH_SERVE_RUN_H

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>

#include "bench/serve/arrivals.h"
#include "bench/serve/dataset.h"
#include "bench/serve/result.h"
#include "bench/serve/slo.h"

struct bench_run_config {
    bool openai;                             /* an HTTP server with the OpenAI completions API; else
                                                the router's gRPC */
    const char *target;                      /* host:port; openai: http[s]://host:port[/path] */
    const char *tls_ca, *tls_cert, *tls_key; /* "" = none; a CA turns TLS on (openai: https does) */
    const char *api_key_file;                /* "" = no key is sent */
    /* grpc: a request whose router is lost goes on at the next one, for so long without anything
     * new; 0 = it has failed */
    uint64_t resume_ms;
    const char *method;                      /* path of the gRPC method; openai: of the URL */
    uint32_t vocab;                          /* openai: token ids are drawn below it; 0 = what the
                                                server says, if it does */
    const char *model;                       /* "" = the served one */
    struct bench_dataset_config dataset;     /* vocab, seed and count_tokens are filled by the run;
                                                n_requests 0: from rate and duration, or 1000 */
    struct bench_arrivals_config arrivals;   /* seed is filled by the run */
    uint64_t seed;
    uint64_t max_concurrency; /* 0 = no limit */
    double duration_s;        /* nothing is sent after it; 0 = until all are sent */
    double grace_s;           /* how long the last ones may take */
    double warmup, cooldown;  /* see bench_result_summarise */
    uint64_t n_warmups;       /* requests before the run, with prompts of their own */
    struct bench_slo slo;
    const char *slo_preset; /* for the record */
    double target_attainment;
    struct bench_class classes[BENCH_MAX_CLASSES]; /* n_classes 0: one, unnamed, with `slo` */
    size_t n_classes;
    uint32_t n_tenants; /* 0 = no tenant is named; else tenant-0.. in turns drawn
                           from the seed */
    bool send_slo;      /* tell the router class and objectives */
    bool ignore_eos;
    double temperature, top_p;    /* < 0: the model's default */
    json_t *extra_body;           /* more sampling fields; NULL = none. Owned */
    uint32_t gpus;                /* 0 = one a worker */
    const char *label, *metadata; /* "" = none */
    double pcts[BENCH_MAX_PCTS];
    size_t n_pcts;
    double max_sched_lag_ms;           /* 0 = the rule of bench_result */
    bool realtime;                     /* the run's threads before all others (SCHED_RR) where
                                          the system permits it */
    bool progress;                     /* to stderr */
    const volatile sig_atomic_t *stop; /* not 0: stop sending, cancel, report. May be NULL */
};

void bench_run_config_init(struct bench_run_config *config);
void bench_run_config_free(struct bench_run_config *config); /* strings are borrowed */

/* TD_OK with *ret_result filled and summarised (caller frees), whether or not the requests
 * succeeded and the run is valid. Else TD_ERR_INVALID (field named), TD_ERR_PEER (router not
 * there, said with its status), TD_ERR_NOMEM. Blocks for as long as the run takes. */
td_status bench_run(const struct bench_run_config *config, struct bench_result *ret_result,
                    struct td_err *err);

#endif
