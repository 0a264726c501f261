/* run.c - see run.h.
 *
 *   pacer (caller's thread)                          loop thread
 *   makes request i+1's message                      flight_start: stamps sent_s, starts the call
 *   sleeps to its time (absolute)      --post-->     on_message: stamps tokens, copies ledger and usage
 *   takes a place (max_concurrency)    <--cond--     on_done: outcome, gives the place back
 *
 * Ownership: a bench_request belongs to the pacer until flight_start is posted, then to the loop thread until on_done has given the place
 * back under the mutex. struct flight: the same, and it is freed by on_done. `live` is the loop thread's.
 * Invariants: (1) n_active counts flights posted and not done; (2) a request is sent once, when posted; (3) sent_s - ready_s is the
 * generator's own lag: the pacer's wake-up, the hand-over and the loop's backlog are all in it. */
#include "bench/serve/run.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include "bench/serve/rng.h"
#include "common/base/clock.h"
#include "common/base/json.h"
#include "common/base/progress.h"
#include "common/rpc/rpc.h"
#include "tandem/v1/inference.pb-c.h"

#define CONNECT_MS 10000
#define SLICE_NS (100 * TD_NS_PER_MS) /* how late progress and an interrupt may be noticed */
#define CANCEL_S 30.0                 /* a cancelled call ends at once; longer is our bug */
#define KEEPALIVE_MS 10000            /* an overloaded server is measured, not given up */
#define DEFAULT_PROMPTS 1000          /* vLLM's */
#define CLOSED_PROMPTS 100000         /* a closed loop that ends by time: more than it will send */
#define WARMUP_AT_ONCE 16
#define WARMUP_TEXT_TOKENS 64         /* for datasets of texts */

#ifndef TD_VERSION
#define TD_VERSION "0.0.0"
#endif

enum { WHAT_CLASS = 32, WHAT_TENANT, WHAT_SAMPLING, WHAT_WARMUP };

struct extra { /* of --extra-body */
    bool has_top_k, has_min_p, has_repetition_penalty, has_seed, has_priority;
    int64_t top_k, priority, seed;
    double min_p, repetition_penalty, presence_penalty, frequency_penalty;
};

struct run {
    const struct bench_run_config *config;
    struct extra extra;
    struct td_rpc_loop *loop;
    struct td_rpc_channel *channel;
    struct td_rpc_client_method generate;
    char model[128];
    uint32_t vocab, max_model_len;
    struct bench_dataset *dataset;
    struct bench_result result;
    uint64_t t0_ns;
    uint64_t max_active;         /* 0 = no limit */

    pthread_mutex_t mu;
    pthread_cond_t cond;
    uint64_t n_active, n_done;   /* mu */
    double *free_at_s;           /* mu: ring of max_active times at which places came free, next to be taken first */
    uint64_t free_head, n_free;  /* mu */

    struct flight *live;         /* loop thread */
};

struct flight { /* one request on its way */
    struct run *run;
    struct bench_request *q;
    struct td_rpc_call *call;
    struct flight *next, **prev;
    uint32_t gaps_capacity;
    bool cancelled, finished;
    Tandem__V1__GenerateRequest m;
    Tandem__V1__Sampling sampling;
    Tandem__V1__StopConditions stop;
    Tandem__V1__Objectives objectives;
    Tandem__V1__TokenIds ids;
    char id[48], tenant[24];
};

void bench_run_config_init(struct bench_run_config *c)
{
    *c = (struct bench_run_config){.target = "127.0.0.1:7600", .tls_ca = "", .tls_cert = "", .tls_key = "", .model = "", .slo_preset = "", .label = "",
                                   .metadata = "", .method = "/tandem.v1.Inference/Generate", .grace_s = 30, .warmup = 0.1, .temperature = 0, .top_p = -1,
                                   .send_slo = true, .pcts = {50, 90, 95, 99}, .n_pcts = 4};
    c->dataset = (struct bench_dataset_config){.kind = BENCH_RANDOM, .path = "", .input_len = 1024, .output_len = 128, .n_prefixes = 10, .shuffle = true,
                                               .time_scale = 1, .length_scale = 1, .spread = true};
    c->arrivals = (struct bench_arrivals_config){.kind = BENCH_POISSON, .rate = INFINITY, .burstiness = 1, .rescale = true};
}

void bench_run_config_free(struct bench_run_config *c)
{
    json_decref(c->extra_body);
    c->extra_body = NULL;
}

static td_status no_memory(struct td_err *err) { return td_fail(err, TD_ERR_NOMEM, "bench: out of memory"); }
static double since_s(const struct run *r, uint64_t ns) { return ns >= r->t0_ns ? (double)(ns - r->t0_ns) / 1e9 : -(double)(r->t0_ns - ns) / 1e9; }
static bool stopped(const struct run *r) { return r->config->stop && *r->config->stop; }

/* --- calls that are waited for -------------------------------------------------------------------------------------------------------- */

struct answer {
    pthread_mutex_t mu;
    pthread_cond_t cond;
    size_t n_left;
    grpc_status_code code;       /* of the first that failed */
    char details[256];
    void (*on_message)(const ProtobufCMessage *msg, void *ctx);
};
struct asked {
    struct answer *answer;
    void *ctx;
};

static void asked_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    struct asked *a = user;
    a->answer->on_message(msg, a->ctx);
}

static void asked_done(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    (void)call;
    struct asked *asked = user;
    struct answer *a = asked->answer;
    pthread_mutex_lock(&a->mu);
    if (res->code != GRPC_STATUS_OK && a->code == GRPC_STATUS_OK) {
        a->code = res->code;
        snprintf(a->details, sizeof a->details, "%s", res->details);
    }
    if (--a->n_left == 0) pthread_cond_signal(&a->cond);
    pthread_mutex_unlock(&a->mu);
}

static const char *code_name(int code)
{
    static const char *const names[] = {"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
                                        "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
                                        "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"};
    return (unsigned)code < sizeof names / sizeof *names ? names[code] : "?";
}

/* n unary calls at once; on_message(msg, ctxs[i]) on the loop thread. All carry a deadline, so the wait ends. */
static td_status ask(struct run *r, const char *path, const ProtobufCMessageDescriptor *response, const ProtobufCMessage *const *requests,
                     void *const *ctxs, size_t n, void (*on_message)(const ProtobufCMessage *msg, void *ctx), struct td_err *err)
{
    static const struct td_rpc_handler handler = {asked_message, asked_done};
    struct td_rpc_client_method method = {.path = path, .response = response};
    struct answer a = {.mu = PTHREAD_MUTEX_INITIALIZER, .cond = PTHREAD_COND_INITIALIZER, .n_left = n, .on_message = on_message};
    struct asked *asked = calloc(n, sizeof *asked);
    if (!asked) return no_memory(err);
    for (size_t i = 0; i < n; i++) {
        asked[i] = (struct asked){&a, ctxs[i]};
        td_rpc_call_start(r->channel, &method, requests[i], CONNECT_MS, false, NULL, 0, &handler, &asked[i]);
    }
    pthread_mutex_lock(&a.mu);
    while (a.n_left) pthread_cond_wait(&a.cond, &a.mu);
    pthread_mutex_unlock(&a.mu);
    free(asked);
    if (a.code == GRPC_STATUS_OK) return TD_OK;
    return td_fail(err, TD_ERR_PEER, "router at %s: %s: %s", r->config->target, code_name(a.code), a.details);
}

/* --- what is there to be measured ----------------------------------------------------------------------------------------------------- */

static void on_models(const ProtobufCMessage *msg, void *ctx)
{
    const Tandem__V1__ModelsResponse *m = (const Tandem__V1__ModelsResponse *)msg;
    struct run *r = ctx;
    for (size_t i = 0; i < m->n_models; i++) {
        if (r->config->model[0] && strcmp(m->models[i]->id, r->config->model) != 0) continue;
        snprintf(r->model, sizeof r->model, "%s", m->models[i]->id);
        r->vocab = m->models[i]->vocab;
        r->max_model_len = m->models[i]->max_model_len;
        return;
    }
}

static void on_status(const ProtobufCMessage *msg, void *ctx)
{
    const Tandem__V1__StatusResponse *m = (const Tandem__V1__StatusResponse *)msg;
    struct bench_result *res = &((struct run *)ctx)->result;
    snprintf(res->topology_mode, sizeof res->topology_mode, "%s", m->mode);
    snprintf(res->policy, sizeof res->policy, "%s", m->policy);
    for (size_t i = 0; i < m->n_workers; i++) {
        if (!strcmp(m->workers[i]->role, "prefill")) res->n_prefill++;
        else res->n_decode++;
        snprintf(res->server_build, sizeof res->server_build, "%s", m->workers[i]->version);
    }
}

static td_status discover(struct run *r, struct td_err *err)
{
    Tandem__V1__ModelsRequest models = TANDEM__V1__MODELS_REQUEST__INIT;
    Tandem__V1__StatusRequest status = TANDEM__V1__STATUS_REQUEST__INIT;
    const ProtobufCMessage *m = &models.base, *q = &status.base;
    void *ctx = r;
    td_status s = ask(r, "/tandem.v1.Inference/Models", &tandem__v1__models_response__descriptor, &m, &ctx, 1, on_models, err);
    if (!s && !r->model[0]) s = td_fail(err, TD_ERR_INVALID, "model is '%s': the router at %s does not serve it", r->config->model, r->config->target);
    if (!s) s = ask(r, "/tandem.v1.Inference/Status", &tandem__v1__status_response__descriptor, &q, &ctx, 1, on_status, err);
    return s;
}

static void on_tokenize(const ProtobufCMessage *msg, void *ctx)
{
    *(int32_t *)ctx = (int32_t)((const Tandem__V1__TokenizeResponse *)msg)->n_ids;
}

static td_status count_tokens(void *ctx, const char *const *texts, size_t n, int32_t *counts, struct td_err *err)
{
    Tandem__V1__TokenizeRequest *requests = calloc(n, sizeof *requests);
    const ProtobufCMessage **messages = calloc(n, sizeof *messages);
    void **ctxs = calloc(n, sizeof *ctxs);
    td_status s = requests && messages && ctxs ? TD_OK : no_memory(err);
    for (size_t i = 0; !s && i < n; i++) {
        tandem__v1__tokenize_request__init(&requests[i]);
        requests[i].input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_PROMPT;
        requests[i].prompt = (ProtobufCBinaryData){strlen(texts[i]), (uint8_t *)(uintptr_t)texts[i]};
        messages[i] = &requests[i].base;
        ctxs[i] = &counts[i];
        counts[i] = 0;
    }
    if (!s) s = ask(ctx, "/tandem.v1.Inference/Tokenize", &tandem__v1__tokenize_response__descriptor, messages, ctxs, n, on_tokenize, err);
    free(requests);
    free(messages);
    free(ctxs);
    return s;
}

/* --- a request's flight --------------------------------------------------------------------------------------------------------------- */

static void flight_free(struct flight *f)
{
    free(f->ids.ids);
    free(f);
}

/* Request q with a prompt of n_ids tokens (filled by the caller) or a text. NULL = no memory. */
static struct flight *flight_make(struct run *r, struct bench_request *q, size_t index, const char *text, int32_t n_ids)
{
    const struct bench_run_config *c = r->config;
    struct flight *f = calloc(1, sizeof *f);
    if (!f) return NULL;
    f->run = r;
    f->q = q;
    tandem__v1__generate_request__init(&f->m);
    tandem__v1__sampling__init(&f->sampling);
    tandem__v1__stop_conditions__init(&f->stop);
    tandem__v1__objectives__init(&f->objectives);
    tandem__v1__token_ids__init(&f->ids);
    f->m.model = r->model;
    f->m.sampling = &f->sampling;
    f->m.stop = &f->stop;
    f->m.return_token_ids = true;
    if (text) {
        f->m.input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT;
        f->m.prompt = (ProtobufCBinaryData){strlen(text), (uint8_t *)(uintptr_t)text};
    } else {
        f->m.input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS;
        f->m.token_ids = &f->ids;
        f->ids.n_ids = (size_t)n_ids;
        f->ids.ids = malloc(((size_t)n_ids + 1) * sizeof(int32_t));
        if (!f->ids.ids) {
            free(f);
            return NULL;
        }
    }
    snprintf(f->id, sizeof f->id, "bench-%llu-%zu", (unsigned long long)c->seed, index);
    f->m.request_id = f->id;
    f->stop.has_max_tokens_case = TANDEM__V1__STOP_CONDITIONS__HAS_MAX_TOKENS_MAX_TOKENS;
    f->stop.max_tokens = q->want_len;
    f->stop.ignore_eos = c->ignore_eos;

    Tandem__V1__Sampling *s = &f->sampling;
    const struct extra *x = &r->extra;
    struct bench_rng rng = bench_rng_at(c->seed, WHAT_SAMPLING, index);
    s->has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED_SEED;
    s->seed = x->has_seed ? (uint64_t)x->seed : bench_rng_u64(&rng);
    if (c->temperature >= 0) s->has_temperature_case = TANDEM__V1__SAMPLING__HAS_TEMPERATURE_TEMPERATURE, s->temperature = (float)c->temperature;
    if (c->top_p >= 0) s->has_top_p_case = TANDEM__V1__SAMPLING__HAS_TOP_P_TOP_P, s->top_p = (float)c->top_p;
    if (x->has_top_k) s->has_top_k_case = TANDEM__V1__SAMPLING__HAS_TOP_K_TOP_K, s->top_k = (int32_t)x->top_k;
    if (x->has_min_p) s->has_min_p_case = TANDEM__V1__SAMPLING__HAS_MIN_P_MIN_P, s->min_p = (float)x->min_p;
    if (x->has_repetition_penalty)
        s->has_repetition_penalty_case = TANDEM__V1__SAMPLING__HAS_REPETITION_PENALTY_REPETITION_PENALTY, s->repetition_penalty = (float)x->repetition_penalty;
    s->presence_penalty = (float)x->presence_penalty;
    s->frequency_penalty = (float)x->frequency_penalty;
    f->m.priority = (int32_t)x->priority;

    if (c->n_tenants) {
        snprintf(f->tenant, sizeof f->tenant, "tenant-%u", q->tenant);
        f->m.tenant = f->tenant;
    }
    const struct bench_class *k = &r->result.classes[q->class_index].of;
    if (c->send_slo) {
        f->m.slo_class = (char *)(uintptr_t)k->name;
        if (k->slo.ttft_ms > 0) f->objectives.has_ttft_ms_case = TANDEM__V1__OBJECTIVES__HAS_TTFT_MS_TTFT_MS, f->objectives.ttft_ms = k->slo.ttft_ms;
        if (k->slo.tpot_ms > 0) f->objectives.has_tpot_ms_case = TANDEM__V1__OBJECTIVES__HAS_TPOT_MS_TPOT_MS, f->objectives.tpot_ms = k->slo.tpot_ms;
        if (k->slo.ttft_ms > 0 || k->slo.tpot_ms > 0) f->m.objectives = &f->objectives;
    }
    return f;
}

static void add_gap(struct flight *f, double gap_s)
{
    struct bench_request *q = f->q;
    uint32_t n = q->n_messages - 1; /* gaps so far */
    if (n == f->gaps_capacity) {
        f->gaps_capacity = f->gaps_capacity ? 2 * f->gaps_capacity : 32;
        q->gaps_s = realloc(q->gaps_s, f->gaps_capacity * sizeof *q->gaps_s);
        TD_ASSERT(q->gaps_s);
    }
    q->gaps_s[n] = gap_s;
}

static void copy_ledger(struct bench_request *q, const Tandem__V1__Ledger *l)
{
    q->has_ledger = true;
    q->stages_us[BENCH_ROUTER_QUEUE] = l->router_queue_us;
    q->stages_us[BENCH_RESERVE] = l->reserve_us;
    q->stages_us[BENCH_PREFILL_QUEUE] = l->prefill_queue_us;
    q->stages_us[BENCH_PREFILL] = l->prefill_us;
    q->stages_us[BENCH_RPC] = l->rpc_us;
    q->stages_us[BENCH_TRANSFER] = l->transfer_us;
    q->stages_us[BENCH_TRANSFER_EXPOSED] = l->transfer_exposed_us;
    q->stages_us[BENCH_DECODE_QUEUE] = l->decode_queue_us;
    q->stages_us[BENCH_FIRST_STEP] = l->first_step_us;
    uint64_t before_us = l->ttft_us + l->transfer_exposed_us + l->decode_queue_us;
    q->stages_us[BENCH_DECODE] = l->e2e_us > before_us ? l->e2e_us - before_us : 0;
    q->predicted_ttft_us = l->predicted_ttft_us;
    q->predicted_tpot_us = l->predicted_tpot_us;
    q->preemptions = l->preemptions;
    q->failovers = l->failovers;
    snprintf(q->prefill_node, sizeof q->prefill_node, "%s", l->prefill_worker);
    snprintf(q->decode_node, sizeof q->decode_node, "%s", l->decode_worker);
    snprintf(q->mode, sizeof q->mode, "%s", l->mode);
}

static void on_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    struct flight *f = user;
    struct bench_request *q = f->q;
    const Tandem__V1__GenerateResponse *m = (const Tandem__V1__GenerateResponse *)msg;
    double now_s = since_s(f->run, td_now_ns());
    if (m->n_token_ids) {
        if (q->n_messages == 0) q->first_s = now_s;
        else add_gap(f, now_s - q->last_s);
        q->last_s = now_s;
        q->n_messages++;
        q->output_len += (int32_t)m->n_token_ids;
    }
    if (m->finish_reason == TANDEM__V1__FINISH_REASON__FINISH_NONE) return;
    f->finished = true;
    if (m->usage) {
        q->input_len = (int32_t)m->usage->prompt_tokens;
        q->cached_tokens = (int32_t)m->usage->cached_tokens;
    }
    if (m->ledger) copy_ledger(q, m->ledger);
}

static void on_done(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    (void)call;
    struct flight *f = user;
    struct run *r = f->run;
    struct bench_request *q = f->q;
    q->end_s = since_s(r, td_now_ns());
    q->code = (int)res->code;
    const char *error = res->details;
    if (res->code == GRPC_STATUS_OK && f->finished) q->outcome = BENCH_COMPLETED, error = "";
    else if (res->code == GRPC_STATUS_OK) q->outcome = BENCH_FAILED, error = "the stream ended OK without a finish reason";
    else if (f->cancelled) q->outcome = BENCH_UNFINISHED, error = "still running at the end of the grace period";
    else if (res->code == GRPC_STATUS_RESOURCE_EXHAUSTED) q->outcome = BENCH_REJECTED;
    else if (res->code == GRPC_STATUS_DEADLINE_EXCEEDED) q->outcome = BENCH_TIMED_OUT;
    else q->outcome = BENCH_FAILED;
    if (q->outcome != BENCH_COMPLETED) q->error = strdup(error);
    if (f->next) f->next->prev = f->prev;
    *f->prev = f->next;
    flight_free(f);

    pthread_mutex_lock(&r->mu);
    if (r->max_active) r->free_at_s[(r->free_head + r->n_free++) % r->max_active] = q->end_s;
    r->n_active--;
    r->n_done++;
    pthread_cond_signal(&r->cond);
    pthread_mutex_unlock(&r->mu);
}

static void flight_start(void *arg)
{
    static const struct td_rpc_handler handler = {on_message, on_done};
    struct flight *f = arg;
    struct run *r = f->run;
    f->next = r->live;
    f->prev = &r->live;
    if (f->next) f->next->prev = &f->next;
    r->live = f;
    f->q->sent_s = since_s(r, td_now_ns());
    f->call = td_rpc_call_start(r->channel, &r->generate, &f->m.base, 0, false, NULL, 0, &handler, f);
    free(f->ids.ids); /* packed */
    f->ids.ids = NULL;
}

static void cancel_live(void *arg)
{
    struct run *r = arg;
    for (struct flight *f = r->live; f; f = f->next) {
        f->cancelled = true;
        td_rpc_call_cancel(f->call);
    }
}

/* --- pacing --------------------------------------------------------------------------------------------------------------------------- */

static struct timespec at_ns(uint64_t ns) { return (struct timespec){(time_t)(ns / TD_NS_PER_S), (long)(ns % TD_NS_PER_S)}; }

static void show(struct run *r, struct td_progress *p)
{
    if (!p) return;
    pthread_mutex_lock(&r->mu);
    uint64_t n = r->n_done;
    pthread_mutex_unlock(&r->mu);
    td_progress_update(p, n);
}

/* False when interrupted. */
static bool sleep_until(struct run *r, double at_s, struct td_progress *p)
{
    uint64_t until_ns = r->t0_ns + (uint64_t)(at_s * 1e9);
    for (;;) {
        if (stopped(r)) return false;
        uint64_t now_ns = td_now_ns();
        if (now_ns >= until_ns) return true;
        bool last = until_ns - now_ns <= SLICE_NS;
        if (until_ns - now_ns > TD_NS_PER_MS) show(r, p); /* drawing takes time: not when it is tight */
        struct timespec t = at_ns(last ? until_ns : now_ns + SLICE_NS);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
    }
}

/* Takes a place: *ret_free_s = since when it was free. False: interrupted, or none came free until deadline_s. */
static bool take_place(struct run *r, double deadline_s, double *ret_free_s, struct td_progress *p)
{
    pthread_mutex_lock(&r->mu);
    bool got = true;
    while (r->max_active && r->n_free == 0) {
        uint64_t now_ns = td_now_ns();
        if (stopped(r) || since_s(r, now_ns) >= deadline_s) {
            got = false;
            break;
        }
        struct timespec t = at_ns(now_ns + SLICE_NS);
        pthread_cond_timedwait(&r->cond, &r->mu, &t);
        if (!p) continue;
        uint64_t n = r->n_done;
        pthread_mutex_unlock(&r->mu);
        td_progress_update(p, n);
        pthread_mutex_lock(&r->mu);
    }
    if (got) {
        *ret_free_s = 0;
        if (r->max_active) {
            *ret_free_s = r->free_at_s[r->free_head];
            r->free_head = (r->free_head + 1) % r->max_active;
            r->n_free--;
        }
        r->n_active++;
    }
    pthread_mutex_unlock(&r->mu);
    return got;
}

/* Waits until nothing is in flight; what is at deadline_s (or after an interrupt) is cancelled. */
static void drain(struct run *r, double deadline_s, struct td_progress *p)
{
    bool cancelled = false;
    pthread_mutex_lock(&r->mu);
    while (r->n_active) {
        uint64_t now_ns = td_now_ns();
        double now_s = since_s(r, now_ns);
        if (!cancelled && (stopped(r) || now_s >= deadline_s)) {
            td_rpc_loop_post(r->loop, cancel_live, r);
            cancelled = true;
            deadline_s = now_s;
        }
        TD_ASSERT(!cancelled || now_s < deadline_s + CANCEL_S);
        struct timespec t = at_ns(now_ns + SLICE_NS);
        pthread_cond_timedwait(&r->cond, &r->mu, &t);
        uint64_t n = r->n_done;
        pthread_mutex_unlock(&r->mu);
        if (p) td_progress_update(p, n);
        pthread_mutex_lock(&r->mu);
    }
    pthread_mutex_unlock(&r->mu);
}

static td_status places_open(struct run *r, uint64_t max_active, struct td_err *err)
{
    free(r->free_at_s);
    r->max_active = max_active;
    r->free_head = 0;
    r->n_free = max_active;
    r->n_done = 0;
    r->free_at_s = calloc(max_active ? max_active : 1, sizeof *r->free_at_s);
    return r->free_at_s ? TD_OK : no_memory(err);
}

static td_status warm_up(struct run *r, struct td_err *err)
{
    const struct bench_run_config *c = r->config;
    if (c->n_warmups == 0) return TD_OK;
    td_status s = places_open(r, c->max_concurrency ? c->max_concurrency : WARMUP_AT_ONCE, err);
    if (s) return s;
    struct bench_request *warm = calloc(c->n_warmups, sizeof *warm);
    if (!warm) return no_memory(err);
    struct td_progress progress;
    td_progress_start(&progress, "warm-up", "requests", c->n_warmups);
    struct td_progress *p = c->progress ? &progress : NULL;
    r->t0_ns = td_now_ns();
    for (uint64_t i = 0; i < c->n_warmups; i++) {
        const struct bench_item *it = bench_dataset_item(r->dataset, i % bench_dataset_size(r->dataset));
        warm[i].want_len = it->output_len;
        int32_t n = it->text ? WARMUP_TEXT_TOKENS : it->input_len;
        struct flight *f = flight_make(r, &warm[i], i, NULL, n);
        if (!f) {
            s = no_memory(err);
            break;
        }
        struct bench_rng rng = bench_rng_at(c->seed, WHAT_WARMUP, i); /* prompts of their own: the measured ones must not be in the cache */
        for (int32_t k = 0; k < n; k++) f->ids.ids[k] = (int32_t)bench_rng_below(&rng, r->vocab);
        double free_s;
        f->m.objectives = NULL; /* warming up is not to be turned away */
        if (!take_place(r, INFINITY, &free_s, p)) {
            flight_free(f);
            break;
        }
        td_rpc_loop_post(r->loop, flight_start, f);
    }
    drain(r, since_s(r, td_now_ns()) + c->grace_s, p);
    if (p) td_progress_end(p);
    uint64_t n_ok = 0;
    for (uint64_t i = 0; i < c->n_warmups; i++) {
        n_ok += warm[i].outcome == BENCH_COMPLETED;
        if (!s && n_ok == 0 && i + 1 == c->n_warmups && !stopped(r))
            s = td_fail(err, TD_ERR_PEER, "router at %s: no warm-up request completed; the last: %s: %s", c->target, code_name(warm[i].code),
                        warm[i].error ? warm[i].error : "");
    }
    for (uint64_t i = 0; i < c->n_warmups; i++) {
        free(warm[i].error);
        free(warm[i].gaps_s);
    }
    free(warm);
    return s;
}

/* --- the plan ------------------------------------------------------------------------------------------------------------------------- */

static td_status parse_extra(const json_t *body, struct extra *x, struct td_err *err)
{
    static const char *const known[] = {"top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "priority"};
    const char *what = "--extra-body", *key;
    json_t *value;
    if (!body) return TD_OK;
    if (!json_is_object(body)) return td_fail(err, TD_ERR_INVALID, "--extra-body must be a JSON object");
    json_object_foreach((json_t *)(uintptr_t)body, key, value) {
        bool is_known = false;
        for (size_t i = 0; i < sizeof known / sizeof *known; i++) is_known |= !strcmp(known[i], key);
        if (!is_known)
            return td_fail(err, TD_ERR_INVALID,
                           "--extra-body: '%.60s' is unknown; known are top_k, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed, priority", key);
    }
    td_status s = td_json_i64(body, what, "top_k", 0, INT32_MAX, &x->top_k, &x->has_top_k, err);
    if (!s) s = td_json_f64(body, what, "min_p", 0, 1, &x->min_p, &x->has_min_p, err);
    if (!s) s = td_json_f64(body, what, "repetition_penalty", 0.01, 100, &x->repetition_penalty, &x->has_repetition_penalty, err);
    if (!s) s = td_json_f64(body, what, "presence_penalty", -2, 2, &x->presence_penalty, NULL, err);
    if (!s) s = td_json_f64(body, what, "frequency_penalty", -2, 2, &x->frequency_penalty, NULL, err);
    if (!s) s = td_json_i64(body, what, "seed", 0, INT64_MAX, &x->seed, &x->has_seed, err);
    if (!s) s = td_json_i64(body, what, "priority", -100, 100, &x->priority, &x->has_priority, err);
    return s;
}

static td_status check(const struct bench_run_config *c, struct td_err *err)
{
    struct { const char *name; double v; } shares[] = {{"warmup", c->warmup}, {"cooldown", c->cooldown}, {"benchmark_grace_period", c->grace_s},
                                                       {"benchmark_duration", c->duration_s}, {"max_sched_lag_ms", c->max_sched_lag_ms}};
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++)
        if (!(shares[i].v >= 0 && isfinite(shares[i].v))) return td_fail(err, TD_ERR_INVALID, "%s is %g, must be >= 0", shares[i].name, shares[i].v);
    const struct bench_slo *s = &c->slo;
    if (!(s->ttft_ms >= 0 && s->tpot_ms >= 0 && s->e2el_ms >= 0 && s->tbt_ms >= 0)) return td_fail(err, TD_ERR_INVALID, "an objective is negative or no number");
    if (c->n_pcts > BENCH_MAX_PCTS || c->n_classes > BENCH_MAX_CLASSES) return td_fail(err, TD_ERR_INTERNAL, "more percentiles or classes than there is room for");
    for (size_t i = 0; i < c->n_pcts; i++)
        if (!(c->pcts[i] >= 0 && c->pcts[i] <= 100)) return td_fail(err, TD_ERR_INVALID, "metric_percentiles: %g must be in 0..100", c->pcts[i]);
    if (c->arrivals.kind == BENCH_TRACE && !bench_dataset_is_trace(c->dataset.kind))
        return td_fail(err, TD_ERR_INVALID, "arrival is trace, but the dataset has no time stamps: it must be timed_trace, mooncake or azure");
    if (c->max_concurrency > 1000000) return td_fail(err, TD_ERR_INVALID, "max_concurrency is %llu, must be <= 1000000", (unsigned long long)c->max_concurrency);
    return TD_OK;
}

static bool is_closed(const struct bench_run_config *c)
{
    return c->arrivals.kind != BENCH_TRACE && c->arrivals.ramp == BENCH_RAMP_NONE && isinf(c->arrivals.rate) && c->max_concurrency;
}

static td_status open_dataset(struct run *r, struct td_err *err)
{
    const struct bench_run_config *c = r->config;
    struct bench_dataset_config d = c->dataset;
    bool trace = bench_dataset_is_trace(d.kind);
    if (d.n_requests == 0 && !trace) {
        double rate = c->arrivals.ramp ? fmax(c->arrivals.ramp_start, c->arrivals.ramp_end) : c->arrivals.rate;
        if (c->duration_s > 0 && is_closed(c)) d.n_requests = CLOSED_PROMPTS;
        else if (c->duration_s > 0 && isfinite(rate)) d.n_requests = (uint64_t)fmin(BENCH_MAX_REQUESTS, fmax(1, ceil(rate * c->duration_s)));
        else if (d.kind != BENCH_CUSTOM && d.kind != BENCH_SHAREGPT) d.n_requests = DEFAULT_PROMPTS;
    }
    d.seed = c->seed;
    d.vocab = r->vocab;
    d.count_tokens = count_tokens;
    d.count_ctx = r;
    td_status s = bench_dataset_open(&d, &r->dataset, err);
    for (size_t i = 0; !s && i < bench_dataset_size(r->dataset); i++) {
        const struct bench_item *it = bench_dataset_item(r->dataset, i);
        if ((uint64_t)it->input_len + (uint64_t)it->output_len > r->max_model_len)
            s = td_fail(err, TD_ERR_INVALID,
                        "request %zu has %d input and %d output tokens, model %s takes %u together: use --input-len, --output-len, --length-scale, "
                        "--max-input-len or --max-output-len",
                        i, it->input_len, it->output_len, r->model, r->max_model_len);
    }
    return s;
}

static uint32_t draw_class(const struct bench_run_config *c, size_t i)
{
    double total = 0;
    for (size_t k = 0; k < c->n_classes; k++) total += c->classes[k].weight;
    struct bench_rng rng = bench_rng_at(c->seed, WHAT_CLASS, i);
    double at = bench_rng_unit(&rng) * total;
    for (size_t k = 0; k + 1 < c->n_classes; k++)
        if ((at -= c->classes[k].weight) < 0) return (uint32_t)k;
    return c->n_classes ? (uint32_t)c->n_classes - 1 : 0;
}

/* The requests with their times, classes and tenants; those after --benchmark-duration are cut off. */
static td_status plan(struct run *r, struct td_err *err)
{
    const struct bench_run_config *c = r->config;
    struct bench_result *res = &r->result;
    size_t n = bench_dataset_size(r->dataset);
    double *at_s = malloc((n ? n : 1) * sizeof *at_s);
    res->requests = calloc(n ? n : 1, sizeof *res->requests);
    if (!at_s || !res->requests) {
        free(at_s);
        return no_memory(err);
    }
    td_status s = TD_OK;
    struct bench_arrivals_config a = c->arrivals;
    a.seed = c->seed;
    if (a.kind == BENCH_TRACE)
        for (size_t i = 0; i < n; i++) at_s[i] = bench_dataset_item(r->dataset, i)->at_s;
    else s = bench_arrivals_make(&a, n, at_s, err);
    for (size_t i = 0; !s && i < n; i++) {
        if (c->duration_s > 0 && at_s[i] >= c->duration_s) break;
        const struct bench_item *it = bench_dataset_item(r->dataset, i);
        struct bench_rng rng = bench_rng_at(c->seed, WHAT_TENANT, i);
        res->requests[res->n_requests++] = (struct bench_request){
            .class_index = draw_class(c, i), .tenant = c->n_tenants ? (uint32_t)bench_rng_below(&rng, c->n_tenants) : 0,
            .scheduled_s = at_s[i], .ready_s = at_s[i], .sent_s = NAN, .first_s = NAN, .last_s = NAN, .end_s = NAN,
            .input_len = it->input_len, .want_len = it->output_len};
    }
    free(at_s);
    if (!s && res->n_requests == 0) s = td_fail(err, TD_ERR_INVALID, "benchmark_duration is %g s: no request arrives in it", c->duration_s);
    return s;
}

static void describe(struct run *r)
{
    const struct bench_run_config *c = r->config;
    static const char *const datasets[BENCH_N_DATASETS] = {"random", "prefix_repetition", "sharegpt", "custom", "timed_trace", "mooncake", "azure"};
    static const char *const ramps[] = {"", "linear", "exponential"};
    struct bench_result *res = &r->result;
    time_t now = (time_t)(td_wall_ns() / TD_NS_PER_S);
    struct tm tm;
    localtime_r(&now, &tm);
    strftime(res->date, sizeof res->date, "%Y%m%d-%H%M%S", &tm);
    snprintf(res->backend, sizeof res->backend, "grpc");
    snprintf(res->label, sizeof res->label, "%s", c->label);
    snprintf(res->model_id, sizeof res->model_id, "%s", r->model);
    snprintf(res->target, sizeof res->target, "%s", c->target);
    snprintf(res->dataset, sizeof res->dataset, "%s", datasets[c->dataset.kind]);
    snprintf(res->dataset_path, sizeof res->dataset_path, "%s", c->dataset.path);
    res->closed_loop = is_closed(c);
    snprintf(res->arrival, sizeof res->arrival, "%s", res->closed_loop ? "closed_loop" : bench_arrival_name(c->arrivals.kind));
    snprintf(res->ramp, sizeof res->ramp, "%s", ramps[c->arrivals.ramp]);
    if (c->arrivals.ramp) res->ramp_start = c->arrivals.ramp_start, res->ramp_end = c->arrivals.ramp_end;
    res->request_rate = c->arrivals.kind == BENCH_TRACE || c->arrivals.ramp ? NAN : c->arrivals.rate;
    res->burstiness = c->arrivals.kind == BENCH_TRACE ? NAN : c->arrivals.kind == BENCH_GAMMA ? c->arrivals.burstiness : c->arrivals.kind == BENCH_CONSTANT ? INFINITY : 1;
    res->rescaled = c->arrivals.rescale && isfinite(res->request_rate);
    res->seed = c->seed;
    res->max_concurrency = c->max_concurrency;
    res->n_cut = bench_dataset_n_cut(r->dataset);
    res->time_scale = bench_dataset_is_trace(c->dataset.kind) ? c->dataset.time_scale : 1;
    res->length_scale = bench_dataset_is_trace(c->dataset.kind) ? c->dataset.length_scale : 1;
    res->block_tokens = c->dataset.kind == BENCH_MOONCAKE ? bench_dataset_block_tokens(r->dataset) : 0;
    res->warmup = c->warmup;
    res->cooldown = c->cooldown;
    res->grace_s = c->grace_s;
    res->slo = c->slo;
    res->slo_sent = c->send_slo;
    snprintf(res->slo_preset, sizeof res->slo_preset, "%s", c->slo_preset);
    res->target_attainment = c->target_attainment;
    res->n_tenants = c->n_tenants;
    res->gpus_given = c->gpus > 0;
    res->gpus = c->gpus ? c->gpus : res->n_prefill + res->n_decode;
    snprintf(res->build, sizeof res->build, "%s", TD_VERSION);
    memcpy(res->pcts, c->pcts, sizeof res->pcts);
    res->n_pcts = c->n_pcts;
    res->max_sched_lag_ms = c->max_sched_lag_ms;
    if (c->metadata[0]) res->metadata = strdup(c->metadata);
}

static void describe_classes(struct run *r)
{
    const struct bench_run_config *c = r->config;
    r->result.n_classes = c->n_classes ? c->n_classes : 1;
    for (size_t i = 0; i < c->n_classes; i++) r->result.classes[i].of = c->classes[i];
    if (c->n_classes == 0) r->result.classes[0].of = (struct bench_class){.slo = c->slo, .weight = 1};
}

/* --- the run -------------------------------------------------------------------------------------------------------------------------- */

/* Sends the flight when its time and its place have come. False: no more are to be sent. */
static bool send_one(struct run *r, struct flight *f, double deadline_s, struct td_progress *p)
{
    const struct bench_run_config *c = r->config;
    struct bench_request *q = f->q;
    bool closed = r->result.closed_loop;
    double free_s;
    if (!closed && !sleep_until(r, q->scheduled_s, p)) return false;
    /* A closed loop has no last arrival: it ends when all places are taken for longer than a last request may take. */
    if (closed) deadline_s = c->duration_s > 0 ? c->duration_s : since_s(r, td_now_ns()) + c->grace_s;
    if (!take_place(r, deadline_s, &free_s, p)) return false;
    if (closed) q->scheduled_s = free_s;
    q->ready_s = free_s > q->scheduled_s ? free_s : q->scheduled_s;
    if (closed && c->duration_s > 0 && q->ready_s >= c->duration_s) {
        pthread_mutex_lock(&r->mu);
        r->n_active--;
        pthread_mutex_unlock(&r->mu);
        return false;
    }
    td_rpc_loop_post(r->loop, flight_start, f);
    return true;
}

static td_status offer_load(struct run *r, struct td_err *err)
{
    const struct bench_run_config *c = r->config;
    struct bench_result *res = &r->result;
    td_status s = places_open(r, c->max_concurrency, err);
    if (s) return s;
    struct td_progress progress;
    struct td_progress *p = c->progress ? &progress : NULL;
    bool timed = res->closed_loop && c->duration_s > 0; /* how many there will be is not known */
    td_progress_start(&progress, "bench", "requests", timed ? 0 : res->n_requests);
    prctl(PR_SET_TIMERSLACK, 1000UL);
    uint64_t head_ns = res->closed_loop ? 0 : 10 * TD_NS_PER_MS; /* an open loop's first request may be due at 0 */
    r->t0_ns = td_now_ns() + head_ns;
    res->start_wall_ns = td_wall_ns() + head_ns;
    double last_s = res->closed_loop ? INFINITY : res->requests[res->n_requests - 1].scheduled_s, deadline_s = last_s + c->grace_s;
    size_t n_sent = 0;
    for (; n_sent < res->n_requests; n_sent++) {
        struct bench_request *q = &res->requests[n_sent];
        const struct bench_item *it = bench_dataset_item(r->dataset, n_sent);
        struct flight *f = flight_make(r, q, n_sent, it->text, it->input_len);
        if (!f) {
            s = no_memory(err);
            break;
        }
        if (!it->text) bench_dataset_tokens(r->dataset, n_sent, f->ids.ids);
        if (!send_one(r, f, deadline_s, p)) {
            flight_free(f);
            break;
        }
    }
    if (res->closed_loop) deadline_s = since_s(r, td_now_ns()) + c->grace_s;
    drain(r, s ? 0 : deadline_s, p);
    if (p) td_progress_end(p);
    res->interrupted = stopped(r);
    if (res->interrupted || s) return s;
    if (res->closed_loop) res->n_requests = n_sent; /* the others were never due */
    /* Open loop: what found no place until the end was offered all the same. */
    for (size_t i = n_sent; i < res->n_requests; i++) {
        res->requests[i].outcome = BENCH_UNFINISHED;
        res->requests[i].error = strdup("no place within --max-concurrency until the end of the grace period");
    }
    return TD_OK;
}

static td_status connect_to(struct run *r, struct td_err *err)
{
    const struct bench_run_config *c = r->config;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* the loop's threads: signals are the caller's */
    td_status s = td_rpc_loop_create("bench", &r->loop, err);
    struct td_rpc_tls tls = {.ca_file = c->tls_ca, .cert_file = c->tls_cert[0] ? c->tls_cert : NULL, .key_file = c->tls_key[0] ? c->tls_key : NULL};
    struct td_rpc_channel_config channel = {.loop = r->loop, .target = c->target, .tls = c->tls_ca[0] ? &tls : NULL, .keepalive_ms = KEEPALIVE_MS};
    if (!s) s = td_rpc_channel_create(&channel, &r->channel, err);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return s;
}

td_status bench_run(const struct bench_run_config *c, struct bench_result *ret_result, struct td_err *err)
{
    struct run r = {.config = c, .generate = {.path = c->method, .response = &tandem__v1__generate_response__descriptor}};
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&r.mu, NULL);
    pthread_cond_init(&r.cond, &attr);
    pthread_condattr_destroy(&attr);

    td_status s = check(c, err);
    if (!s) s = parse_extra(c->extra_body, &r.extra, err);
    if (!s) s = connect_to(&r, err);
    if (!s) s = discover(&r, err);
    if (!s) s = open_dataset(&r, err);
    if (!s) describe_classes(&r);
    if (!s) s = plan(&r, err);
    if (!s) s = warm_up(&r, err);
    if (!s) describe(&r);
    if (!s) s = offer_load(&r, err);
    if (!s) {
        bench_result_summarise(&r.result);
        *ret_result = r.result;
    } else {
        bench_result_free(&r.result);
    }
    bench_dataset_close(r.dataset);
    free(r.free_at_s);
    if (r.channel) td_rpc_channel_destroy(r.channel);
    if (r.loop) td_rpc_loop_destroy(r.loop);
    pthread_cond_destroy(&r.cond);
    pthread_mutex_destroy(&r.mu);
    return s;
}
