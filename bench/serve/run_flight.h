/* run_flight.h - a run on its way and the flight of one request: what the files of a run share.
 * Nobody else includes it.
 *
 *   run.c         pacing: sleeps to each request's time, takes a place, waits for the end;
 *                 bench_run
 *   run_plan.c    before: checks, the data set, the schedule, classes and tenants, what is recorded
 *                 of the run
 *   run_flight.c  during: one request on its way, its stamps and its end, whoever carries it
 *   run_ask.c     gRPC, before: the channel, and the calls that are waited for (Models, Status,
 *                 Tokenize)
 *   run_grpc.c    gRPC, during: one request as a call to the router
 *   run_http.c    an OpenAI server: the same, over HTTP */
#ifndef BENCH_SERVE_RUN_FLIGHT_H
#define BENCH_SERVE_RUN_FLIGHT_H

#include <pthread.h>

#include "bench/serve/run.h"
#include "common/base/api_key.h"
#include "common/base/clock.h"
#include "common/base/random.h"
#include "common/rpc/received.h"
#include "common/rpc/rpc.h"

/* What draws from the seed here: see td_keyed_at. */
enum { BENCH_MAX_SERVERS = 16 };
enum { WHAT_CLASS = 32, WHAT_TENANT, WHAT_SAMPLING, WHAT_WARMUP };

struct extra { /* of --extra-body */
    bool has_top_k, has_min_p, has_repetition_penalty, has_seed, has_priority;
    int64_t top_k, priority, seed;
    double min_p, repetition_penalty, presence_penalty, frequency_penalty;
};

struct run;
struct flight;

/* How requests travel. Everything else of a run does not know. */
struct run_backend {
    const char *name; /* as in the result file */
    /* what it cannot do, and --extra-body */
    td_status (*check)(struct run *r, struct td_err *err);
    /* its loop thread takes over the caller's scheduling */
    td_status (*connect)(struct run *r, struct td_err *err);
    /* model, vocabulary, workers. TD_ERR_PEER: nobody there */
    td_status (*discover)(struct run *r, struct td_err *err);
    td_status (*count_tokens)(void *run, const char *const *texts, size_t n, int32_t *counts,
                              struct td_err *err);
    bool (*prepare)(struct flight *f); /* pacer, before its time: what of sending takes long.
                                          May be NULL; false = no memory */
    /* runs fn on the loop thread, in order */
    void (*post)(struct run *r, void (*fn)(void *arg), void *arg);
    void (*send)(struct flight *f);   /* loop thread; run_flight_end follows, perhaps from
                                         within */
    void (*cancel)(struct flight *f); /* loop thread, once; run_flight_end follows, perhaps
                                         from within */
    void (*forget)(struct flight *f); /* what prepare and send made. May be NULL */
    const char *(*code_name)(int code, char buf[24]); /* buf may be used */
    void (*close)(struct run *r);                     /* also a run that was not connected */
};
extern const struct run_backend run_grpc, run_http;

struct run {
    const struct bench_run_config *config;
    const struct run_backend *backend;
    struct extra extra;       /* run_grpc */
    struct td_rpc_loop *loop; /* run_grpc */
    struct td_rpc_channel *channel; /* the first of these, which are asked in turn */
    struct td_rpc_channel *channels[BENCH_MAX_SERVERS];
    uint32_t n_channels;
    struct td_rpc_client_method generate;
    struct http *http;                        /* run_http */
    char authorization[TD_AUTHORIZATION_MAX]; /* "Bearer KEY", or "" */
    char model[256];                          /* as requests name it */
    char served_as[256]; /* run_grpc: the name that Status tells of its workers */
    uint32_t vocab, max_model_len;
    struct bench_dataset *dataset;
    struct bench_result result;
    uint64_t t0_ns;
    uint64_t max_active; /* 0 = no limit */
    double timed_s;      /* > 0: a closed loop that ends then; how many requests there
                            will be is not known */

    pthread_mutex_t mu;
    pthread_cond_t cond;
    uint64_t n_active, n_done;  /* mu */
    double *free_at_s;          /* mu: ring of max_active times at which places came free, next
                                   to be taken first */
    uint64_t free_head, n_free; /* mu */

    struct flight *live; /* loop thread */
};

struct flight { /* one request on its way */
    struct run *run;
    struct bench_request *q;
    struct flight *next, **prev;
    size_t index;
    const char *text;    /* NULL = ids. The data set's */
    int32_t *ids, n_ids; /* owned; run_grpc and run_http free them as soon as they are
                            packed */
    uint64_t seed;       /* of its sampling */
    uint32_t gaps_capacity;
    bool cancelled, finished, warming; /* finished: a finish reason came; warming: not measured,
                                          not to be turned away */
    struct td_rpc_call *call;          /* run_grpc */
    struct td_received *received;      /* run_grpc, these five, with resume_ms: what came so far */
    struct td_retry retry;
    struct td_rpc_timer *timer; /* until the next try; NULL = none is waited for */
    uint64_t try_ns;
    uint32_t n_lost;                   /* servers */
    struct http_call *http;            /* run_http */
};

static inline td_status run_no_memory(struct td_err *err)
{
    return td_fail(err, TD_ERR_NOMEM, "bench: out of memory");
}
static inline bool run_stopped(const struct run *r) { return r->config->stop && *r->config->stop; }
/* Seconds after the run's start; negative before it. */
static inline double run_since_s(const struct run *r, uint64_t ns)
{
    return ns >= r->t0_ns ? (double)(ns - r->t0_ns) / 1e9 : -(double)(r->t0_ns - ns) / 1e9;
}

/* --- run_plan.c: in this order */
td_status run_check(const struct bench_run_config *c, struct td_err *err);
td_status run_open_dataset(struct run *r, struct td_err *err); /* needs the model's vocabulary */
void run_describe_classes(struct run *r);
td_status run_plan(struct run *r, struct td_err *err);
void run_describe(struct run *r);

/* --- run_flight.c */
/* NULL = no memory */
struct flight *run_flight_make(struct run *r, struct bench_request *q, size_t index,
                               const char *text, int32_t n_ids);
void run_flight_free(struct flight *f); /* one that was not posted */
/* posted to the loop; frees itself at its end */
void run_flight_start(void *flight);
void run_cancel_live(void *run); /* posted to the loop */
/* Loop thread, of the backends: a message with n tokens came at now_s; the request ended (f is
 * gone then). error NULL = none; retry_ms -1 = none. */
void run_flight_tokens(struct flight *f, double now_s, int32_t n);
void run_flight_end(struct flight *f, enum bench_outcome outcome, int code, const char *error,
                    int64_t retry_ms);

/* --- run_ask.c: of run_grpc */
td_status run_grpc_connect(struct run *r, struct td_err *err);
td_status run_grpc_discover(struct run *r, struct td_err *err);
td_status run_grpc_count_tokens(void *run, const char *const *texts, size_t n, int32_t *counts,
                                struct td_err *err);
const char *run_grpc_code_name(int code, char buf[24]);

#endif
