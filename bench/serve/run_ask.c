/* run_ask.c - see run_flight.h: the router's address becomes a channel; what is there is asked
 * once, before the load. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/serve/run_flight.h"
#include "tandem/v1/inference.pb-c.h"

#define CONNECT_MS 10000
#define KEEPALIVE_MS 10000 /* an overloaded server is measured, not given up */

/* One for each address of the list. */
static td_status open_channels(struct run *r, const struct td_rpc_tls *tls, struct td_err *err)
{
    char target[256];
    td_status s = TD_OK;
    for (const char *at = r->config->target; *at && !s;) {
        size_t n = strcspn(at, ",");
        if (!n || n >= sizeof target || r->n_channels == BENCH_MAX_SERVERS)
            return td_fail(err, TD_ERR_INVALID,
                           "address %u of \"%.100s\" has %zu bytes, must be 1..%zu of at most %d",
                           r->n_channels + 1, r->config->target, n, sizeof target - 1,
                           BENCH_MAX_SERVERS);
        snprintf(target, sizeof target, "%.*s", (int)n, at);
        struct td_rpc_channel_config channel = {
            .loop = r->loop, .target = target, .tls = tls, .keepalive_ms = KEEPALIVE_MS};
        s = td_rpc_channel_create(&channel, &r->channels[r->n_channels], err);
        if (!s) r->n_channels++;
        at += n + (at[n] == ',');
    }
    r->channel = r->channels[0];
    return s;
}

td_status run_grpc_connect(struct run *r, struct td_err *err)
{
    const struct bench_run_config *c = r->config;
    r->generate = (struct td_rpc_client_method){
        .path = c->method, .response = &tandem__v1__generate_response__descriptor};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* the loop's threads: signals are the caller's */
    td_status s = td_rpc_loop_create("bench", &r->loop, err);
    struct td_rpc_tls tls = {.ca_file = c->tls_ca,
                             .cert_file = c->tls_cert[0] ? c->tls_cert : NULL,
                             .key_file = c->tls_key[0] ? c->tls_key : NULL};
    if (!s) s = open_channels(r, c->tls_ca[0] ? &tls : NULL, err);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return s;
}

/* --- calls that are waited for ---------------------------------------------------------------- */

struct answer {
    pthread_mutex_t mu;
    pthread_cond_t cond;
    size_t n_left;
    enum td_code code; /* of the first that failed */
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
    if (res->code != TD_CODE_OK && a->code == TD_CODE_OK) {
        a->code = res->code;
        snprintf(a->details, sizeof a->details, "%s", res->details);
    }
    if (--a->n_left == 0) pthread_cond_signal(&a->cond);
    pthread_mutex_unlock(&a->mu);
}

const char *run_grpc_code_name(int code, char buf[24])
{
    (void)buf;
    static const char *const names[] = {"OK",
                                        "CANCELLED",
                                        "UNKNOWN",
                                        "INVALID_ARGUMENT",
                                        "DEADLINE_EXCEEDED",
                                        "NOT_FOUND",
                                        "ALREADY_EXISTS",
                                        "PERMISSION_DENIED",
                                        "RESOURCE_EXHAUSTED",
                                        "FAILED_PRECONDITION",
                                        "ABORTED",
                                        "OUT_OF_RANGE",
                                        "UNIMPLEMENTED",
                                        "INTERNAL",
                                        "UNAVAILABLE",
                                        "DATA_LOSS",
                                        "UNAUTHENTICATED"};
    return (unsigned)code < sizeof names / sizeof *names ? names[code] : "?";
}

/* n unary calls at once; on_message(msg, ctxs[i]) on the loop thread. All carry a deadline, so
 * the wait ends. */
static td_status ask(struct run *r, const char *path, const ProtobufCMessageDescriptor *response,
                     const ProtobufCMessage *const *requests, void *const *ctxs, size_t n,
                     void (*on_message)(const ProtobufCMessage *msg, void *ctx), struct td_err *err)
{
    static const struct td_rpc_handler handler = {asked_message, asked_done};
    struct td_rpc_client_method method = {.path = path, .response = response};
    struct answer a = {.mu = PTHREAD_MUTEX_INITIALIZER,
                       .cond = PTHREAD_COND_INITIALIZER,
                       .n_left = n,
                       .on_message = on_message};
    struct asked *asked = calloc(n, sizeof *asked);
    if (!asked) return run_no_memory(err);
    const struct td_rpc_metadata key = {"authorization", r->authorization};
    for (size_t i = 0; i < n; i++) {
        asked[i] = (struct asked){&a, ctxs[i]};
        td_rpc_call_start(r->channel, &method, requests[i], CONNECT_MS, false, &key,
                          r->authorization[0] ? 1 : 0, &handler, &asked[i]);
    }
    pthread_mutex_lock(&a.mu);
    while (a.n_left) pthread_cond_wait(&a.cond, &a.mu);
    pthread_mutex_unlock(&a.mu);
    free(asked);
    if (a.code == TD_CODE_OK) return TD_OK;
    return td_fail(err, TD_ERR_PEER, "router at %s: %s: %s", r->config->target,
                   run_grpc_code_name(a.code, NULL), a.details);
}

/* --- what is there to be measured ------------------------------------------------------------- */

/* What the router serves, for who asked for something else. */
struct models {
    struct run *run;
    size_t n;
    char names[160]; /* "a, b", as many as have room */
};

static bool is_named(const Tandem__V1__ModelInfo *m, const char *name)
{
    bool is = !strcmp(m->id, name);
    for (size_t i = 0; i < m->n_aliases && !is; i++) is = !strcmp(m->aliases[i], name);
    return is;
}

static void on_models(const ProtobufCMessage *msg, void *ctx)
{
    const Tandem__V1__ModelsResponse *list = (const Tandem__V1__ModelsResponse *)msg;
    struct models *models = ctx;
    struct run *r = models->run;
    size_t used = 0;
    models->n = list->n_models;
    for (size_t i = 0; i < list->n_models; i++) {
        const Tandem__V1__ModelInfo *m = list->models[i];
        if (used < sizeof models->names)
            used += (size_t)snprintf(models->names + used, sizeof models->names - used, "%s%s",
                                     i ? ", " : "", m->id);
        const char *want = r->config->model;
        if (r->model[0] || (want[0] ? !is_named(m, want) : list->n_models > 1)) continue;
        snprintf(r->model, sizeof r->model, "%s", want[0] ? want : m->id);
        snprintf(r->served_as, sizeof r->served_as, "%s", m->id);
        r->vocab = m->vocab;
        r->max_model_len = m->max_model_len;
    }
}

static void on_status(const ProtobufCMessage *msg, void *ctx)
{
    const Tandem__V1__StatusResponse *m = (const Tandem__V1__StatusResponse *)msg;
    const struct run *r = ctx;
    struct bench_result *res = &((struct run *)ctx)->result;
    snprintf(res->setup.topology_mode, sizeof res->setup.topology_mode, "%s", m->mode);
    snprintf(res->setup.policy, sizeof res->setup.policy, "%s", m->policy);
    for (size_t i = 0; i < m->n_workers; i++) {
        const char *serves = m->workers[i]->model; /* "": an older router, or not told */
        if (serves[0] && strcmp(serves, r->served_as) != 0) continue;
        if (!strcmp(m->workers[i]->role, "prefill"))
            res->setup.n_prefill++;
        else
            res->setup.n_decode++;
        snprintf(res->setup.server_build, sizeof res->setup.server_build, "%s",
                 m->workers[i]->version);
    }
}

td_status run_grpc_discover(struct run *r, struct td_err *err)
{
    Tandem__V1__ModelsRequest models = TANDEM__V1__MODELS_REQUEST__INIT;
    Tandem__V1__StatusRequest status = TANDEM__V1__STATUS_REQUEST__INIT;
    const ProtobufCMessage *m = &models.base, *q = &status.base;
    struct models list = {.run = r};
    void *ctx = r, *list_ctx = &list;
    td_status s = ask(r, "/tandem.v1.Inference/Models", &tandem__v1__models_response__descriptor,
                      &m, &list_ctx, 1, on_models, err);
    if (!s && !r->model[0] && !r->config->model[0])
        s = td_fail(err, TD_ERR_INVALID,
                    "--model is not given, and the router at %s serves %zu models%s%s",
                    r->config->target, list.n, list.n ? ": " : "", list.names);
    else if (!s && !r->model[0])
        s = td_fail(err, TD_ERR_INVALID,
                    "model is '%s': the router at %s does not serve it; it serves %s",
                    r->config->model, r->config->target, list.names);
    if (!s)
        s = ask(r, "/tandem.v1.Inference/Status", &tandem__v1__status_response__descriptor, &q,
                &ctx, 1, on_status, err);
    return s;
}

static void on_tokenize(const ProtobufCMessage *msg, void *ctx)
{
    *(int32_t *)ctx = (int32_t)((const Tandem__V1__TokenizeResponse *)msg)->n_ids;
}

td_status run_grpc_count_tokens(void *ctx, const char *const *texts, size_t n, int32_t *counts,
                                struct td_err *err)
{
    struct run *r = ctx;
    Tandem__V1__TokenizeRequest *requests = calloc(n, sizeof *requests);
    const ProtobufCMessage **messages = calloc(n, sizeof *messages);
    void **ctxs = calloc(n, sizeof *ctxs);
    td_status s = requests && messages && ctxs ? TD_OK : run_no_memory(err);
    for (size_t i = 0; !s && i < n; i++) {
        tandem__v1__tokenize_request__init(&requests[i]);
        requests[i].model = r->model;
        requests[i].input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_PROMPT;
        requests[i].prompt =
            (ProtobufCBinaryData){strlen(texts[i]), (uint8_t *)(uintptr_t)texts[i]};
        messages[i] = &requests[i].base;
        ctxs[i] = &counts[i];
        counts[i] = 0;
    }
    if (!s)
        s = ask(r, "/tandem.v1.Inference/Tokenize", &tandem__v1__tokenize_response__descriptor,
                messages, ctxs, n, on_tokenize, err);
    free(requests);
    free(messages);
    free(ctxs);
    return s;
}
