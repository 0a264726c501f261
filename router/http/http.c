/* http.c - see http.h.
 *
 * A call has two holders, the library's connection and the loop; each drops its reference when it
 * will not look again, the last frees. What both touch is under `lock`: out, n_sent, is_suspended,
 * has_head, is_done, is_gone, is_cut. `request` is the loop thread's alone.
 *
 *   READING --body complete--> WAITING (suspended) --head known--> SENDING --all sent--> over
 *      any state --connection closed--> is_gone: the loop cancels the request */
#include "router/http/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/mem.h"
#include "common/base/metrics.h"
#include "router/http/openai_answer.h"
#include "router/router.h"

enum {
    HEAD_BYTES = 32 << 10,
    MAX_BEHIND_BYTES = 8 << 20, /* not yet taken by the client */
    REQUEST_S = 30, /* from a connection's start, or its last answer, to the end of its request */
    MAX_CERTIFICATE_BYTES = 1 << 20,
};

enum route {
    ROUTE_NONE,
    ROUTE_COMPLETIONS,
    ROUTE_CHAT,
    ROUTE_MODELS,
    ROUTE_TOKENIZE,
    ROUTE_HEALTH,
    ROUTE_VERSION,
    ROUTE_METRICS,
};

static const struct {
    const char *path, *method;
    enum route route;
    bool on_loop; /* answered by the router's loop thread */
} routes[] = {
    {"/v1/completions", "POST", ROUTE_COMPLETIONS, true},
    {"/v1/chat/completions", "POST", ROUTE_CHAT, true},
    {"/v1/models", "GET", ROUTE_MODELS, true},
    {"/tokenize", "POST", ROUTE_TOKENIZE, true},
    {"/health", "GET", ROUTE_HEALTH, false},
    {"/ping", "GET", ROUTE_HEALTH, false},
    {"/version", "GET", ROUTE_VERSION, false},
    {"/metrics", "GET", ROUTE_METRICS, false},
};

struct connection {
    struct connection *next, *prev;
    int fd;
    uint64_t since_ns; /* it began, or its last answer ended */
    bool is_busy;      /* its request is complete */
};

struct http_call {
    struct router_http *http;
    struct MHD_Connection *mhd;
    struct connection *connection; /* NULL: there was no memory for one */
    struct http_call *next, *prev; /* of http->calls */
    atomic_int n_holders;
    char peer[96], request_id[160], authorization[512];

    enum route route; /* library's thread, until it is given to the loop */
    bool on_loop, is_given;
    char *body;
    size_t n_body, body_capacity;
    unsigned refused; /* HTTP status, before the body is complete; 0 = not */
    char refused_why[256], param[64];
    struct openai_request *parsed;

    struct request_state *request; /* loop thread */
    struct openai_answer answer;

    struct text_buffer out; /* under http->lock */
    size_t n_sent;
    unsigned status, retry_s;
    bool is_stream, is_suspended, has_head, is_done, is_gone, is_cut;
};

struct router_http {
    struct router *router;
    struct router_http_config config;
    struct MHD_Daemon *daemon;
    char *cert, *key;
    pthread_mutex_t lock;
    struct connection connections; /* ring heads */
    struct http_call calls;
    size_t n_bodies_bytes;
    bool is_stopping;
};

/* ---- a call's life --------------------------------------------------------------------------- */

static void call_drop(struct http_call *c)
{
    if (atomic_fetch_sub(&c->n_holders, 1) > 1) return;
    openai_request_free(c->parsed);
    openai_answer_free(&c->answer);
    text_free(&c->out);
    free(c->body);
    free(c);
}

/* http->lock is held. */
static void wake(struct http_call *c)
{
    if (!c->is_suspended) return;
    c->is_suspended = false;
    MHD_resume_connection(c->mhd);
}

static void cancel_on_loop(void *arg)
{
    struct http_call *c = arg;
    if (c->request) inference_cancel(c->http->router, c->request);
    call_drop(c);
}

/* http->lock is held. The connection is of no use any more: the request need not go on. */
static void cut(struct http_call *c)
{
    if (c->is_cut) return;
    c->is_cut = c->is_done = c->has_head = true;
    if (c->connection) shutdown(c->connection->fd, SHUT_RDWR);
    atomic_fetch_add(&c->n_holders, 1);
    td_rpc_loop_post(c->http->router->loop, cancel_on_loop, c);
    wake(c);
}

/* ---- the client as inference.c sees it: loop thread ------------------------------------------ */

static void http_send(void *call, const ProtobufCMessage *message)
{
    struct http_call *c = call;
    pthread_mutex_lock(&c->http->lock);
    if (!c->is_gone && !c->is_cut) {
        openai_answer_add(&c->answer, (const Tandem__V1__GenerateResponse *)message, &c->out);
        if (c->out.failed || c->out.n - c->n_sent > MAX_BEHIND_BYTES) {
            cut(c);
        } else if (c->is_stream && c->out.n) {
            c->status = MHD_HTTP_OK;
            c->has_head = true;
            wake(c);
        }
    }
    pthread_mutex_unlock(&c->http->lock);
}

static void fail_call(struct http_call *c, unsigned status, const char *message, const char *param)
{
    if (c->is_stream && c->has_head) { /* the head said 200: the error is an event */
        text_addf(&c->out, "data: ");
        openai_error(&c->out, status, message, param);
        text_addf(&c->out, "\n\ndata: [DONE]\n\n");
        return;
    }
    c->is_stream = false;
    c->out.n = c->n_sent = 0;
    c->status = status;
    openai_error(&c->out, status, message, param);
}

static void http_finish(void *call, enum td_code code, const char *details,
                        const struct td_rpc_metadata *trailing, size_t n_trailing)
{
    struct http_call *c = call;
    char param[64] = "";
    pthread_mutex_lock(&c->http->lock);
    if (code != TD_CODE_OK) {
        if (code == TD_CODE_INVALID_ARGUMENT && details) openai_error_param(details, param);
        for (size_t i = 0; i < n_trailing; i++)
            if (!strcmp(trailing[i].key, "retry-delay-ms"))
                c->retry_s = (unsigned)(strtoul(trailing[i].value, NULL, 10) + 999) / 1000;
        if (!c->retry_s && (code == TD_CODE_RESOURCE_EXHAUSTED || code == TD_CODE_UNAVAILABLE))
            c->retry_s = 1;
        fail_call(c, openai_http_status(code), details ? details : "", param);
    } else if (!c->has_head) {
        c->status = MHD_HTTP_OK;
    }
    c->has_head = c->is_done = true;
    wake(c);
    pthread_mutex_unlock(&c->http->lock);
}

static const char *http_metadata(void *call, const char *name)
{
    const struct http_call *c = call;
    return !strcmp(name, "authorization") && c->authorization[0] ? c->authorization : NULL;
}

static const char *http_peer(void *call) { return ((struct http_call *)call)->peer; }

static uint64_t http_remaining_ms(void *call)
{
    (void)call;
    return UINT64_MAX; /* HTTP has no deadline: a client that has waited enough closes */
}

static void http_attach(void *call, struct request_state *q)
{
    struct http_call *c = call;
    c->request = q;
    if (q)
        atomic_fetch_add(&c->n_holders, 1);
    else
        call_drop(c);
}

static const struct router_client_ops http_ops = {.send = http_send,
                                                  .finish = http_finish,
                                                  .metadata = http_metadata,
                                                  .peer = http_peer,
                                                  .remaining_ms = http_remaining_ms,
                                                  .attach = http_attach};

/* ---- what the loop thread answers ------------------------------------------------------------ */

static void answer_models(struct http_call *c)
{
    const struct router *r = c->http->router;
    pthread_mutex_lock(&c->http->lock);
    text_addf(&c->out, "{\"object\":\"list\",\"data\":[{\"id\":");
    text_add_json(&c->out, r->model_name, strlen(r->model_name));
    text_addf(&c->out,
              ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"tandem\",\"root\":null,"
              "\"parent\":null,\"max_model_len\":%u}]}",
              (long long)(time(NULL) - (time_t)((td_now_ns() - r->started_ns) / TD_NS_PER_S)),
              router_max_len(r));
    pthread_mutex_unlock(&c->http->lock);
    http_finish(c, TD_CODE_OK, NULL, NULL, 0);
}

static void answer_tokenize(struct http_call *c)
{
    struct router *r = c->http->router;
    Tandem__V1__GenerateRequest *in = openai_request_message(c->parsed);
    Tandem__V1__TokenizeRequest ask = TANDEM__V1__TOKENIZE_REQUEST__INIT;
    ask.model = in->model;
    ask.no_special_tokens = in->no_special_tokens;
    if (in->input_case == TANDEM__V1__GENERATE_REQUEST__INPUT_CHAT) {
        ask.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_CHAT;
        ask.chat = in->chat;
    } else if (in->input_case == TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT) {
        ask.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_PROMPT;
        ask.prompt = in->prompt;
    }
    struct td_token_list list = {0};
    struct td_err err = {0};
    td_status s = inference_tokenize(r, &ask, &list, &err);
    if (s) {
        http_finish(c, td_rpc_code(s), err.msg, NULL, 0);
    } else {
        pthread_mutex_lock(&c->http->lock);
        text_addf(&c->out, "{\"count\":%zu,\"max_model_len\":%u,\"tokens\":[", list.n,
                  router_max_len(r));
        for (size_t i = 0; i < list.n; i++) text_addf(&c->out, i ? ",%d" : "%d", list.ids[i]);
        text_addf(&c->out, "]}");
        pthread_mutex_unlock(&c->http->lock);
        http_finish(c, TD_CODE_OK, NULL, NULL, 0);
    }
    td_token_list_free(&list);
}

static void answer_generate(struct http_call *c, struct router_client client)
{
    struct router *r = c->http->router;
    Tandem__V1__GenerateRequest *in = openai_request_message(c->parsed);
    struct openai_answer *a = &c->answer;
    a->options = *openai_request_options(c->parsed);
    a->tokenizer = r->tokenizer;
    a->created_s = (int64_t)time(NULL);
    snprintf(a->model, sizeof a->model, "%s", r->model_name);
    snprintf(a->id, sizeof a->id, "%s-%s", a->options.is_chat ? "chatcmpl" : "cmpl", c->request_id);
    if (!in->request_id[0]) in->request_id = c->request_id;
    inference_generate(r, client, in);
}

static void answer_on_loop(void *arg)
{
    struct http_call *c = arg;
    struct router_client client = {&http_ops, c};
    pthread_mutex_lock(&c->http->lock);
    bool is_gone = c->is_gone || c->is_cut;
    pthread_mutex_unlock(&c->http->lock);
    if (is_gone)
        ;
    else if (c->route == ROUTE_COMPLETIONS || c->route == ROUTE_CHAT)
        answer_generate(c, client);
    else if (!inference_may_call(c->http->router, client))
        ;
    else if (c->route == ROUTE_MODELS)
        answer_models(c);
    else
        answer_tokenize(c);
    call_drop(c);
}

/* ---- the library's thread -------------------------------------------------------------------- */

static ssize_t read_out(void *ctx, uint64_t at, char *to, size_t max)
{
    struct http_call *c = ctx;
    (void)at;
    pthread_mutex_lock(&c->http->lock);
    ssize_t n = 0;
    size_t left = c->out.n - c->n_sent;
    if (c->is_cut) {
        n = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (left > 0) {
        n = (ssize_t)(left < max ? left : max);
        memcpy(to, c->out.bytes + c->n_sent, (size_t)n);
        c->n_sent += (size_t)n;
        if (c->n_sent == c->out.n) c->n_sent = c->out.n = 0;
    } else if (c->is_done) {
        n = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        c->is_suspended = true;
        MHD_suspend_connection(c->mhd);
    }
    pthread_mutex_unlock(&c->http->lock);
    return n;
}

static enum MHD_Result queue(struct http_call *c, struct MHD_Response *response, unsigned status,
                             const char *type)
{
    if (!response) return MHD_NO;
    char retry[16];
    MHD_add_response_header(response, "Content-Type", type);
    MHD_add_response_header(response, "x-request-id", c->request_id);
    if (c->retry_s) {
        snprintf(retry, sizeof retry, "%u", c->retry_s);
        MHD_add_response_header(response, "Retry-After", retry);
    }
    if (status == MHD_HTTP_UNAUTHORIZED)
        MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    enum MHD_Result res = MHD_queue_response(c->mhd, status, response);
    MHD_destroy_response(response);
    return res;
}

static enum MHD_Result queue_text(struct http_call *c, struct text_buffer *text, unsigned status,
                                  const char *type)
{
    if (text->failed) return MHD_NO;
    struct MHD_Response *r =
        MHD_create_response_from_buffer(text->n, text->bytes, MHD_RESPMEM_MUST_FREE);
    if (r) *text = (struct text_buffer){0};
    return queue(c, r, status, type);
}

static enum MHD_Result queue_error(struct http_call *c, unsigned status, const char *why,
                                   const char *param)
{
    struct text_buffer text = {0};
    openai_error(&text, status, why, param);
    enum MHD_Result res = queue_text(c, &text, status, "application/json");
    text_free(&text);
    return res;
}

/* The loop has said how the answer begins. */
static enum MHD_Result begin_answer(struct http_call *c)
{
    pthread_mutex_lock(&c->http->lock);
    bool is_stream = c->is_stream;
    unsigned status = c->status;
    struct text_buffer body = {0};
    if (!is_stream) {
        body = c->out;
        c->out = (struct text_buffer){0};
    }
    bool is_cut = c->is_cut;
    pthread_mutex_unlock(&c->http->lock);
    enum MHD_Result res = MHD_NO;
    if (is_cut)
        ;
    else if (is_stream)
        res = queue(
            c, MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16 << 10, read_out, c, NULL),
            status, "text/event-stream; charset=utf-8");
    else
        res = queue_text(c, &body, status, "application/json");
    text_free(&body);
    return res;
}

static enum MHD_Result answer_here(struct http_call *c)
{
    struct router_http *h = c->http;
    struct text_buffer text = {0};
    if (c->route == ROUTE_METRICS) {
        size_t n = 0;
        text.bytes = td_metrics_render(&n);
        text.n = n;
        if (!text.bytes) return MHD_NO;
        return queue_text(c, &text, MHD_HTTP_OK, "text/plain; version=0.0.4");
    }
    if (c->route == ROUTE_VERSION) {
        text_addf(&text, "{\"version\":\"" TD_VERSION "\"}");
    } else if (!h->config.healthy(h->config.ctx)) {
        return queue_error(c, MHD_HTTP_SERVICE_UNAVAILABLE, "the gRPC port does not answer", "");
    } else {
        text_addf(&text, "{\"status\":\"ok\"}");
    }
    return queue_text(c, &text, MHD_HTTP_OK, "application/json");
}

static td_status read_headers(struct http_call *c, struct td_err *err)
{
    static const struct {
        const char *name;
        bool is_ttft;
    } objectives[] = {{"x-slo-ttft-ms", true}, {"x-slo-tpot-ms", false}};
    for (size_t i = 0; i < 2; i++) {
        const char *v = MHD_lookup_connection_value(c->mhd, MHD_HEADER_KIND, objectives[i].name);
        td_status s =
            v ? openai_request_objective(c->parsed, objectives[i].is_ttft, v, err) : TD_OK;
        if (s) return s;
    }
    return TD_OK;
}

/* The body is complete: to the loop with it. The connection sleeps until the answer begins. */
static enum MHD_Result give_to_loop(struct http_call *c)
{
    struct router_http *h = c->http;
    struct td_err err = {0};
    if (c->route != ROUTE_MODELS) {
        enum openai_kind kind = c->route == ROUTE_CHAT          ? OPENAI_CHAT
                                : c->route == ROUTE_COMPLETIONS ? OPENAI_COMPLETION
                                                                : OPENAI_EITHER;
        td_status s = openai_request_parse(c->body ? c->body : "", c->n_body, kind, &c->parsed,
                                           c->param, &err);
        if (!s) s = read_headers(c, &err);
        if (s) return queue_error(c, openai_http_status(td_rpc_code(s)), err.msg, c->param);
        c->is_stream = openai_request_options(c->parsed)->stream && c->route != ROUTE_TOKENIZE;
    }
    pthread_mutex_lock(&h->lock);
    if (h->is_stopping) {
        pthread_mutex_unlock(&h->lock);
        return queue_error(c, MHD_HTTP_SERVICE_UNAVAILABLE, "this router is draining", "");
    }
    c->is_given = c->is_suspended = true;
    MHD_suspend_connection(c->mhd);
    atomic_fetch_add(&c->n_holders, 1);
    td_rpc_loop_post(h->router->loop, answer_on_loop, c);
    pthread_mutex_unlock(&h->lock);
    return MHD_YES;
}

static void take_body(struct http_call *c, const char *bytes, size_t n)
{
    struct router_http *h = c->http;
    if (c->refused) return; /* read and thrown away, so that the client hears why */
    size_t want = c->n_body + n;
    if (want > h->config.max_body_bytes) {
        c->refused = MHD_HTTP_CONTENT_TOO_LARGE;
        snprintf(c->refused_why, sizeof c->refused_why, "the body has more than %llu bytes",
                 (unsigned long long)h->config.max_body_bytes);
        return;
    }
    if (want > c->body_capacity) {
        size_t capacity = c->body_capacity ? c->body_capacity : 4096;
        while (capacity < want) capacity *= 2;
        pthread_mutex_lock(&h->lock);
        bool fits = h->n_bodies_bytes + capacity - c->body_capacity <= h->config.max_bodies_bytes;
        if (fits) h->n_bodies_bytes += capacity - c->body_capacity;
        pthread_mutex_unlock(&h->lock);
        char *body = fits ? realloc(c->body, capacity) : NULL;
        if (!body) {
            c->refused = MHD_HTTP_SERVICE_UNAVAILABLE;
            c->retry_s = 1;
            snprintf(c->refused_why, sizeof c->refused_why,
                     "all bodies together have more than %llu bytes",
                     (unsigned long long)h->config.max_bodies_bytes);
            if (fits) {
                pthread_mutex_lock(&h->lock);
                h->n_bodies_bytes -= capacity - c->body_capacity;
                pthread_mutex_unlock(&h->lock);
            }
            return;
        }
        c->body = body;
        c->body_capacity = capacity;
    }
    memcpy(c->body + c->n_body, bytes, n);
    c->n_body = want;
}

static void name_peer(struct http_call *c)
{
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(c->mhd, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    char host[64] = "?", port[8] = "?";
    if (info && info->client_addr)
        getnameinfo(info->client_addr,
                    info->client_addr->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                                             : sizeof(struct sockaddr_in),
                    host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(c->peer, sizeof c->peer, "http:%s:%s", host, port);
}

/* Letters, digits and marks alone: the id goes into headers and the log as it is. */
static bool is_plain(const char *s)
{
    for (; *s; s++)
        if (*s <= ' ' || *s > '~' || *s == '"' || *s == '\\') return false;
    return true;
}

static struct http_call *call_begin(struct router_http *h, struct MHD_Connection *mhd,
                                    const char *url, const char *method)
{
    struct http_call *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->http = h;
    c->mhd = mhd;
    atomic_store(&c->n_holders, 1);
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    c->connection = info ? info->socket_context : NULL;
    name_peer(c);
    const char *id = MHD_lookup_connection_value(mhd, MHD_HEADER_KIND, "x-request-id");
    if (id && strlen(id) < sizeof c->request_id && is_plain(id))
        snprintf(c->request_id, sizeof c->request_id, "%s", id);
    else
        snprintf(c->request_id, sizeof c->request_id, "%016llx",
                 (unsigned long long)td_random_u64());
    const char *key = MHD_lookup_connection_value(mhd, MHD_HEADER_KIND, "authorization");
    if (key && strlen(key) < sizeof c->authorization)
        snprintf(c->authorization, sizeof c->authorization, "%s", key);
    c->refused = MHD_HTTP_NOT_FOUND;
    snprintf(c->refused_why, sizeof c->refused_why, "%.20s %.100s is not served here", method, url);
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        if (strcmp(url, routes[i].path)) continue;
        bool fits = !strcmp(method, routes[i].method);
        c->refused = fits ? 0 : MHD_HTTP_METHOD_NOT_ALLOWED;
        if (fits) {
            c->route = routes[i].route;
            c->on_loop = routes[i].on_loop;
        }
    }
    pthread_mutex_lock(&h->lock);
    c->next = &h->calls;
    c->prev = h->calls.prev;
    c->prev->next = c->next->prev = c;
    pthread_mutex_unlock(&h->lock);
    return c;
}

struct framing {
    unsigned n_lengths, n_codings;
    bool is_wrong;
};

static enum MHD_Result see_header(void *ctx, enum MHD_ValueKind kind, const char *name,
                                  const char *value)
{
    struct framing *f = ctx;
    (void)kind;
    if (name[strcspn(name, " \t")]) f->is_wrong = true; /* "Transfer-Encoding : chunked" */
    if (!value) value = "";
    if (!strcasecmp(name, "content-length")) {
        f->n_lengths++;
        if (!value[0] || value[strspn(value, "0123456789")]) f->is_wrong = true;
    } else if (!strcasecmp(name, "transfer-encoding")) {
        f->n_codings++;
        if (strcasecmp(value, "chunked")) f->is_wrong = true;
    }
    return MHD_YES;
}

/* Whether all readers agree where this request ends. The library lets pass two lengths, or a length
 * and a coding, and takes one of them. A proxy in front may take the other: then a body that it
 * forwards as one request is two here, and the second has passed none of its checks (RFC 9112,
 * 11.2). */
static bool is_framing_clear(struct MHD_Connection *mhd)
{
    struct framing f = {0};
    MHD_get_connection_values(mhd, MHD_HEADER_KIND, see_header, &f);
    return !f.is_wrong && f.n_lengths + f.n_codings <= 1;
}

static enum MHD_Result on_request(void *ctx, struct MHD_Connection *mhd, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_bytes, void **state)
{
    struct router_http *h = ctx;
    struct http_call *c = *state;
    (void)version;
    if (!c) {
        c = *state = call_begin(h, mhd, url, method);
        if (!c) return MHD_NO;
        if (is_framing_clear(mhd)) return MHD_YES;
        /* Before the body is read: the library closes the connection after such an answer. */
        return queue_error(c, MHD_HTTP_BAD_REQUEST,
                           "the body's length must be told once, by a Content-Length of digits or "
                           "by Transfer-Encoding: chunked",
                           "");
    }
    if (*upload_bytes) {
        take_body(c, upload, *upload_bytes);
        *upload_bytes = 0;
        return MHD_YES;
    }
    if (c->is_given) return begin_answer(c);
    pthread_mutex_lock(&h->lock);
    if (c->connection) c->connection->is_busy = true;
    pthread_mutex_unlock(&h->lock);
    if (c->refused) return queue_error(c, c->refused, c->refused_why, "");
    return c->on_loop ? give_to_loop(c) : answer_here(c);
}

/* The answer is sent, or the connection is gone. */
static void on_completed(void *ctx, struct MHD_Connection *mhd, void **state,
                         enum MHD_RequestTerminationCode why)
{
    struct router_http *h = ctx;
    struct http_call *c = *state;
    (void)mhd;
    (void)why;
    if (!c) return;
    *state = NULL;
    pthread_mutex_lock(&h->lock);
    c->prev->next = c->next;
    c->next->prev = c->prev;
    h->n_bodies_bytes -= c->body_capacity;
    c->is_gone = true;
    c->is_suspended = false;
    if (c->connection) {
        c->connection->is_busy = false;
        c->connection->since_ns = td_now_ns();
    }
    c->connection = NULL;
    bool tell = c->is_given && !c->is_cut && !h->is_stopping;
    pthread_mutex_unlock(&h->lock);
    if (tell) { /* a request that has ended is detached by then, and nothing happens */
        atomic_fetch_add(&c->n_holders, 1);
        td_rpc_loop_post(h->router->loop, cancel_on_loop, c);
    }
    call_drop(c);
}

static void on_connection(void *ctx, struct MHD_Connection *mhd, void **socket_ctx,
                          enum MHD_ConnectionNotificationCode code)
{
    struct router_http *h = ctx;
    struct connection *k = *socket_ctx;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
        k = info ? calloc(1, sizeof *k) : NULL;
        if (!k) return;
        k->fd = info->connect_fd;
        k->since_ns = td_now_ns();
        *socket_ctx = k;
        pthread_mutex_lock(&h->lock);
        k->next = &h->connections;
        k->prev = h->connections.prev;
        k->prev->next = k->next->prev = k;
        pthread_mutex_unlock(&h->lock);
    } else if (k) {
        pthread_mutex_lock(&h->lock);
        k->prev->next = k->next;
        k->next->prev = k->prev;
        pthread_mutex_unlock(&h->lock);
        free(k);
        *socket_ctx = NULL;
    }
}

/* ---- the tick -------------------------------------------------------------------------------- */

void router_http_tick(struct router_http *h, uint64_t now_ns)
{
    if (!h) return;
    pthread_mutex_lock(&h->lock);
    for (struct connection *k = h->connections.next; k != &h->connections; k = k->next)
        if (!k->is_busy && now_ns > k->since_ns && now_ns - k->since_ns > REQUEST_S * TD_NS_PER_S)
            shutdown(k->fd, SHUT_RDWR);
    for (struct http_call *c = h->calls.next; c != &h->calls; c = c->next) {
        if (!c->is_suspended || !c->connection) continue;
        struct pollfd p = {.fd = c->connection->fd, .events = POLLRDHUP};
        if (poll(&p, 1, 0) > 0 && p.revents & (POLLRDHUP | POLLHUP | POLLERR)) cut(c);
    }
    pthread_mutex_unlock(&h->lock);
}

/* ---- start and stop -------------------------------------------------------------------------- */

static td_status resolve(const char *listen, struct addrinfo **ret, struct td_err *err)
{
    char host[256];
    const char *colon = strrchr(listen, ':');
    size_t n = colon ? (size_t)(colon - listen) : sizeof host;
    if (n >= sizeof host)
        return td_fail(err, TD_ERR_INVALID, "http_listen is \"%.100s\", must be host:port", listen);
    bool bracketed = n > 1 && listen[0] == '[' && colon[-1] == ']';
    snprintf(host, sizeof host, "%.*s", (int)(bracketed ? n - 2 : n), listen + bracketed);
    char *end;
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (colon[1] < '0' || colon[1] > '9' || *end || port > 65535)
        return td_fail(err, TD_ERR_INVALID, "http_listen is \"%.100s\": the port must be 0..65535",
                       listen);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    int e = getaddrinfo(host[0] ? host : NULL, colon + 1, &hints, ret);
    if (e)
        return td_fail(err, TD_ERR_INVALID, "http_listen \"%.100s\": %s", listen, gai_strerror(e));
    return TD_OK;
}

static void ignore_log(void *ctx, const char *format, va_list args)
{
    (void)ctx; /* the library prints to stderr what clients did wrong: a flood would fill the log */
    (void)format;
    (void)args;
}

static struct MHD_Daemon *open_daemon(struct router_http *h, const struct addrinfo *ai)
{
    const struct router_http_config *g = &h->config;
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    if (ai->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
    if (h->cert) flags |= MHD_USE_TLS;
    struct MHD_OptionItem tls[] = {
        {MHD_OPTION_HTTPS_MEM_CERT, 0, h->cert},
        {MHD_OPTION_HTTPS_MEM_KEY, 0, h->key},
        {MHD_OPTION_END, 0, NULL},
    };
    if (!h->cert) tls[0] = tls[2];
    return MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, h, MHD_OPTION_EXTERNAL_LOGGER, ignore_log, NULL,
        MHD_OPTION_SOCK_ADDR, ai->ai_addr, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)g->max_connections, MHD_OPTION_PER_IP_CONNECTION_LIMIT,
        (unsigned)g->max_connections_per_peer, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)HEAD_BYTES, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)REQUEST_S,
        MHD_OPTION_NOTIFY_COMPLETED, on_completed, h, MHD_OPTION_NOTIFY_CONNECTION, on_connection,
        h, MHD_OPTION_ARRAY, tls, MHD_OPTION_END);
}

td_status router_http_start(struct router *r, const struct router_http_config *config,
                            struct router_http **ret_http, struct td_err *err)
{
    struct router_http *h = calloc(1, sizeof *h);
    if (!h) return td_fail(err, TD_ERR_NOMEM, "no memory for the HTTP port");
    h->router = r;
    h->config = *config;
    h->connections.next = h->connections.prev = &h->connections;
    h->calls.next = h->calls.prev = &h->calls;
    pthread_mutex_init(&h->lock, NULL);
    struct addrinfo *ai = NULL;
    td_status s = resolve(config->listen, &ai, err);
    size_t n;
    if (!s && config->tls_cert[0])
        s = td_file_read(config->tls_cert, MAX_CERTIFICATE_BYTES, &h->cert, &n, err);
    if (!s && config->tls_cert[0])
        s = td_file_read(config->tls_key, MAX_CERTIFICATE_BYTES, &h->key, &n, err);
    if (!s && !(h->daemon = open_daemon(h, ai)))
        s = td_fail(err, TD_ERR_IO, "http_listen \"%.100s\": %s", config->listen,
                    errno ? strerror(errno) : "the HTTP library does not start");
    if (ai) freeaddrinfo(ai);
    if (s) {
        router_http_free(h);
        return s;
    }
    *ret_http = h;
    return TD_OK;
}

int router_http_port(const struct router_http *h)
{
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(h->daemon, MHD_DAEMON_INFO_BIND_PORT);
    return info ? info->port : 0;
}

void router_http_stop(struct router_http *h)
{
    if (!h) return;
    pthread_mutex_lock(&h->lock);
    h->is_stopping = true;
    for (struct http_call *c = h->calls.next; c != &h->calls; c = c->next) cut(c);
    pthread_mutex_unlock(&h->lock);
    if (h->daemon) MHD_stop_daemon(h->daemon);
    h->daemon = NULL;
}

void router_http_free(struct router_http *h)
{
    if (!h) return;
    pthread_mutex_destroy(&h->lock);
    free(h->cert);
    free(h->key);
    free(h);
}
