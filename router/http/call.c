/* call.c - see call.h: a call's life, the client as inference.c sees it, its body, its answer. */
#include "router/http/call.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "router/http/first_write.h"
#include "router/http/origins.h"

enum {
    MAX_BODY_BYTES = 64 << 20, /* of a whole answer */
    CHUNK_HEAD_BYTES = 10,     /* a length of up to eight hexadecimal digits, and a line's end */
    /* Tokens of so many streams wait until the loop has looked for more, at most so many turns. A
     * look costs less than one send. */
    MANY_STREAMS = 16,
    MAX_TURNS = 4,
    /* A client that takes nothing of a chunk for so long is cut off, as the library does with those
     * that wait for it. */
    STALL_S = 30,
};

/* ---- a call's life --------------------------------------------------------------------------- */

static void call_drop(struct http_call *c)
{
    if (atomic_fetch_sub(&c->n_holders, 1) > 1) return;
    openai_request_free(c->parsed);
    kserve_http_free(c->kserve);
    http_peer_drop(c->certificate);
    openai_answer_free(&c->answer);
    text_free(&c->out);
    text_free(&c->tail);
    free(c->body);
    free(c);
}

/* http->lock is held. */
static void wake(struct http_call *c)
{
    if (!c->is_suspended || (c->tail.n && !c->is_cut)) return;
    c->is_suspended = c->is_between = false;
    http_library_resume(c->http, c->mhd);
}

static void cancel_on_loop(void *arg)
{
    struct http_call *c = arg;
    if (c->work) inference_cancel(c->http->router, c->work);
    call_drop(c);
}

/* http->lock is held. The connection is of no use any more: the request need not go on. */
void http_call_cut(struct http_call *c)
{
    if (c->is_cut) return;
    c->is_cut = c->is_done = c->has_head = true;
    if (c->connection) shutdown(c->connection->fd, SHUT_RDWR);
    atomic_fetch_add(&c->n_holders, 1);
    td_rpc_loop_post(c->http->router->loop, cancel_on_loop, c);
    wake(c);
}

/* ---- past the library: loop thread, http->lock is held --------------------------------------- *
 *
 * A stream's events come one at a time, to a connection that sleeps until the next. To give an
 * event to the library's thread costs an eventfd's write, two switches of threads, and two changes
 * of its epoll set, besides the send. So the loop sends the event itself, as a chunk of the chunked
 * body that the library has begun. Between two chunks (read_out has suspended the connection) the
 * library does not touch the socket. The first event, the end, TLS, and what a slow client does not
 * take at once are the library's. */

/* What of the answer no one has taken. */
static size_t n_unsent(const struct http_call *c) { return c->out.n - c->n_sent; }

/* The rest of a chunk; nothing else may come before it. */
static void send_tail(struct http_call *c, uint64_t now_ns)
{
    ssize_t n = send(c->connection->fd, c->tail.bytes + c->n_tail_sent, c->tail.n - c->n_tail_sent,
                     MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) {
        c->n_tail_sent += (size_t)n;
        if (c->n_tail_sent == c->tail.n) c->n_tail_sent = c->tail.n = 0;
        c->tail_ns = now_ns;
    } else if (n < 0 && errno != EAGAIN && errno != EINTR) {
        http_call_cut(c);
    }
}

/* The head of a chunk of n bytes, right before its first byte; returns the head's length. */
static size_t put_chunk_head(char *first, size_t n)
{
    char *at = first - 2;
    memcpy(at, "\r\n", 2);
    do {
        *--at = "0123456789abcdef"[n & 15];
    } while (n >>= 4);
    return (size_t)(first - at);
}

/* All that is unsent as one chunk. The bytes before it have room for its head (http_send). */
static void send_chunk(struct http_call *c)
{
    size_t n = n_unsent(c);
    TD_ASSERT(c->n_sent >= CHUNK_HEAD_BYTES && n < (size_t)1 << 4 * (CHUNK_HEAD_BYTES - 2));
    text_adds(&c->out, "\r\n");
    if (c->out.failed) {
        http_call_cut(c);
        return;
    }
    size_t n_head = put_chunk_head(c->out.bytes + c->n_sent, n);
    const char *chunk = c->out.bytes + c->n_sent - n_head;
    n += n_head + 2;
    ssize_t sent = send(c->connection->fd, chunk, n, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
        c->out.n -= 2;
        wake(c); /* the library waits for the socket */
        return;
    }
    if (sent < 0) {
        http_call_cut(c);
        return;
    }
    text_add(&c->tail, chunk + sent, n - (size_t)sent);
    if (c->tail.failed) http_call_cut(c);
    if (c->tail.n) c->tail_ns = td_now_ns();
    c->out.n = c->n_sent = 0;
}

static void send_out(struct http_call *c)
{
    if (c->tail.n && c->is_suspended && c->connection) send_tail(c, td_now_ns());
    if (c->is_between && c->is_chunked && c->connection && !c->is_done && !c->tail.n && n_unsent(c))
        send_chunk(c);
    else
        wake(c);
}

void http_call_look(struct http_call *c, uint64_t now_ns)
{
    if (!c->tail.n) return;
    send_tail(c, now_ns);
    if (c->tail.n && now_ns - c->tail_ns > STALL_S * TD_NS_PER_S) http_call_cut(c);
    if (!c->tail.n && (n_unsent(c) || c->is_done)) wake(c);
}

/* A router that is behind has the next step's tokens before it has sent those of this one. A send
 * costs several times what the router does for a token, so two tokens of a stream in one send
 * nearly halve the work, and it catches up. Whether more is there is seen by a turn of the loop: a
 * post that posts itself runs after the loop has looked at its sockets and taken one event. */
static void send_unsent(struct router_http *h)
{
    while (h->unsent) {
        struct http_call *c = h->unsent;
        h->unsent = c->next_unsent;
        c->is_unsent = false;
        pthread_mutex_lock(&h->lock);
        if (!c->is_gone && !c->is_cut) send_out(c);
        http_unlock(h);
        call_drop(c);
    }
    h->n_unsent = 0;
}

static void look_for_more(void *arg)
{
    struct router_http *h = arg;
    if (h->has_more && h->n_turns++ < MAX_TURNS) {
        h->has_more = false;
        td_rpc_loop_post(h->router->loop, look_for_more, h);
        return;
    }
    h->is_waiting = false;
    send_unsent(h);
}

void router_http_hold(struct router_http *h)
{
    if (h) h->is_held = true;
}

void router_http_release(struct router_http *h)
{
    if (!h) return;
    h->is_held = false;
    h->has_more = true;
    if (h->is_waiting) return;
    if (h->n_unsent < MANY_STREAMS) {
        send_unsent(h);
        return;
    }
    h->is_waiting = true;
    h->n_turns = 0;
    td_rpc_loop_post(h->router->loop, look_for_more, h);
}

/* ---- the client as inference.c sees it: loop thread ------------------------------------------ */

/* Now, or with the others when the step's tokens are all there. */
static void send_soon(struct http_call *c)
{
    struct router_http *h = c->http;
    if (!h->is_held && !c->is_unsent) {
        send_out(c);
    } else if (!c->is_unsent) {
        h->n_unsent++;
        c->is_unsent = true;
        c->next_unsent = h->unsent;
        h->unsent = c;
        atomic_fetch_add(&c->n_holders, 1);
    }
}

static void write_error(const struct http_call *c, struct text_buffer *out, unsigned status,
                        const char *message, const char *param)
{
    if (c->kserve)
        kserve_http_error(out, message);
    else
        openai_error(out, status, message, param);
}

static void fail_call(struct http_call *c, unsigned status, const char *message, const char *param)
{
    if (c->is_stream && c->has_head) { /* the head said 200: the error is an event */
        text_addf(&c->out, "data: ");
        write_error(c, &c->out, status, message, param);
        text_addf(&c->out, c->kserve ? "\n\n" : "\n\ndata: [DONE]\n\n");
        return;
    }
    c->is_stream = false;
    c->out.n = c->n_sent = 0;
    c->status = status;
    write_error(c, &c->out, status, message, param);
}

/* What its client has is not what is computed here. http->lock is held. */
static void refuse_resumed(struct http_call *c)
{
    fail_call(c, MHD_HTTP_CONFLICT,
              "Last-Event-ID is of another answer than this cluster computes (another model or "
              "dtype?); the request can only be begun anew",
              "Last-Event-ID");
    c->has_head = c->is_done = true;
    atomic_fetch_add(&c->n_holders, 1);
    td_rpc_loop_post(c->http->router->loop, cancel_on_loop, c);
    wake(c);
}

static void http_send(void *call, const ProtobufCMessage *message)
{
    struct http_call *c = call;
    pthread_mutex_lock(&c->http->lock);
    if (!c->is_gone && !c->is_done) {
        const Tandem__V1__GenerateResponse *m = (const Tandem__V1__GenerateResponse *)message;
        if (c->is_stream && c->out.n == 0) {  /* room for the head of a chunk */
            text_adds(&c->out, "          "); /* CHUNK_HEAD_BYTES */
            c->n_sent = c->out.n;
        }
        if (c->kserve)
            kserve_http_add(c->kserve, m, &c->out);
        else
            openai_answer_add(&c->answer, m, &c->out);
        size_t behind = n_unsent(c) + c->tail.n - c->n_tail_sent;
        size_t max = c->is_stream ? c->http->config.behind_bytes : MAX_BODY_BYTES;
        bool is_too_large = !c->is_stream && c->answer.n_collected > MAX_BODY_BYTES;
        if (c->out.failed || behind > max || is_too_large) {
            http_call_cut(c);
        } else if (c->answer.differs) {
            refuse_resumed(c);
        } else if (c->is_stream && n_unsent(c)) {
            c->status = MHD_HTTP_OK;
            c->has_head = true;
            send_soon(c);
        }
    }
    http_unlock(c->http);
}

static void http_finish(void *call, enum td_code code, const char *details,
                        const struct td_rpc_metadata *trailing, size_t n_trailing)
{
    struct http_call *c = call;
    char param[64] = "";
    pthread_mutex_lock(&c->http->lock);
    if (c->is_done) { /* it is over for the client: nobody waits for this end */
        http_unlock(c->http);
        return;
    }
    if (code != TD_CODE_OK) {
        if (code == TD_CODE_INVALID_ARGUMENT && details)
            openai_error_param(&c->answer.options, details, param);
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
    http_unlock(c->http);
}

static const char *http_metadata(void *call, const char *name)
{
    const struct http_call *c = call;
    const char *value = !strcmp(name, "authorization") ? c->authorization
                        : !strcmp(name, "traceparent") ? c->traceparent
                                                       : "";
    return value[0] ? value : NULL;
}

static const char *http_peer_name(void *call) { return ((struct http_call *)call)->peer; }

static uint64_t http_remaining_ms(void *call)
{
    (void)call;
    return UINT64_MAX; /* HTTP has no deadline: a client that has waited enough closes */
}

static void http_attach(void *call, struct client_work *w)
{
    struct http_call *c = call;
    c->work = w;
    if (w)
        atomic_fetch_add(&c->n_holders, 1);
    else
        call_drop(c);
}

static bool http_certificate_is(void *call, const struct td_peer_names *names)
{
    return http_peer_is(((struct http_call *)call)->certificate, names);
}

#define HTTP_OPS(certificate)                                                                      \
    {                                                                                              \
        .send = http_send, .finish = http_finish, .metadata = http_metadata,                       \
        .peer = http_peer_name, .certificate_is = certificate, .remaining_ms = http_remaining_ms,  \
        .attach = http_attach, .takes_all = true, .drops_ledger = true,                            \
    }
const struct router_client_ops http_ops = HTTP_OPS(NULL);

struct router_client http_call_client(struct http_call *c)
{
    static const struct router_client_ops verified = HTTP_OPS(http_certificate_is);
    return (struct router_client){c->certificate ? &verified : &http_ops, c};
}

void http_call_finish_json(struct http_call *c, struct text_buffer *json)
{
    pthread_mutex_lock(&c->http->lock);
    text_free(&c->out);
    c->out = *json;
    *json = (struct text_buffer){0};
    if (c->out.n > MAX_BODY_BYTES) http_call_cut(c);
    http_unlock(c->http);
    http_finish(c, TD_CODE_OK, NULL, NULL, 0);
}

/* ---- the library's thread: answers ----------------------------------------------------------- */

static void cork(struct http_call *c, bool is_corked)
{
    if (c->is_corked == is_corked || !c->connection || c->http->tls) return;
    c->is_corked = is_corked;
    first_write_cork(c->connection->fd, is_corked);
}

static ssize_t read_out(void *ctx, uint64_t at, char *to, size_t max)
{
    struct http_call *c = ctx;
    (void)at;
    pthread_mutex_lock(&c->http->lock);
    ssize_t n = 0;
    size_t left = n_unsent(c);
    if (c->is_cut && c->connection && max > 0) {
        /* After END_WITH_ERROR libmicrohttpd 0.9.75 sleeps on without having closed the connection,
         * until it is the one that has been silent longest. An error of the socket it handles: this
         * byte meets one, and goes nowhere. */
        shutdown(c->connection->fd, SHUT_RDWR);
        *to = ' ';
        n = 1;
    } else if (c->is_cut) {
        n = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (left > 0) {
        n = (ssize_t)(left < max ? left : max);
        if (c->is_done) cork(c, true); /* the body's end follows */
        memcpy(to, c->out.bytes + c->n_sent, (size_t)n);
        c->n_sent += (size_t)n;
        if (c->n_sent == c->out.n) c->n_sent = c->out.n = 0;
    } else if (c->is_done) {
        n = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        cork(c, false);
        c->is_suspended = c->is_between = true;
        MHD_suspend_connection(c->mhd);
    }
    http_unlock(c->http);
    return n;
}

/* Letters, digits and marks alone: the id goes into headers and the log as it is. */
static bool is_plain(const char *s)
{
    for (; *s; s++)
        if (*s <= ' ' || *s > '~' || *s == '"' || *s == '\\') return false;
    return true;
}

static bool is_list_of_names(const char *s)
{
    return strlen(s) < 2048 &&
           !s[strspn(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_, ")];
}

/* Lets a page of the call's origin read the answer. */
static void add_cors(const struct http_call *c, struct MHD_Response *response)
{
    if (!c->origin[0]) return;
    MHD_add_response_header(response, "Access-Control-Allow-Origin", c->origin);
    MHD_add_response_header(response, "Access-Control-Expose-Headers", "x-request-id, Retry-After");
    MHD_add_response_header(response, "Vary", "Origin");
}

/* A browser asks before a request that a form could not send. */
enum MHD_Result http_call_answer_preflight(struct http_call *c)
{
    struct MHD_Response *r = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    const char *asked =
        MHD_lookup_connection_value(c->mhd, MHD_HEADER_KIND, "access-control-request-headers");
    if (!r) return MHD_NO;
    add_cors(c, r);
    MHD_add_response_header(r, "Access-Control-Allow-Methods", "GET, POST");
    if (asked && is_list_of_names(asked))
        MHD_add_response_header(r, "Access-Control-Allow-Headers", asked);
    MHD_add_response_header(r, "Access-Control-Max-Age", "600");
    enum MHD_Result res = MHD_queue_response(c->mhd, MHD_HTTP_NO_CONTENT, r);
    MHD_destroy_response(r);
    return res;
}

static enum MHD_Result queue(struct http_call *c, struct MHD_Response *response, unsigned status,
                             const char *type)
{
    if (!response) return MHD_NO;
    char retry[16];
    MHD_add_response_header(response, "Content-Type", type);
    MHD_add_response_header(response, "x-request-id", c->request_id);
    if (c->is_stream && c->is_chunked) /* the library's choice too; said, it is certain */
        MHD_add_response_header(response, "Transfer-Encoding", "chunked");
    if (c->retry_s) {
        snprintf(retry, sizeof retry, "%u", c->retry_s);
        MHD_add_response_header(response, "Retry-After", retry);
    }
    if (atomic_load(&c->http->router->draining))
        MHD_add_response_header(response, "Connection", "close");
    add_cors(c, response);
    if (status == MHD_HTTP_METHOD_NOT_ALLOWED && c->allowed)
        MHD_add_response_header(response, "Allow", c->allowed);
    if (status == MHD_HTTP_UNAUTHORIZED)
        MHD_add_response_header(response, "WWW-Authenticate", "Bearer");
    enum MHD_Result res = MHD_queue_response(c->mhd, status, response);
    MHD_destroy_response(response);
    return res;
}

enum MHD_Result http_call_answer(struct http_call *c, struct text_buffer *text, unsigned status,
                                 const char *type)
{
    if (text->failed) return MHD_NO;
    struct MHD_Response *r =
        MHD_create_response_from_buffer(text->n, text->bytes, MHD_RESPMEM_MUST_FREE);
    if (r) *text = (struct text_buffer){0};
    return queue(c, r, status, type);
}

enum MHD_Result http_call_answer_page(struct http_call *c, struct text_buffer *text,
                                      const char *policy)
{
    if (text->failed) return MHD_NO;
    struct MHD_Response *r =
        MHD_create_response_from_buffer(text->n, text->bytes, MHD_RESPMEM_MUST_FREE);
    if (!r) return MHD_NO;
    *text = (struct text_buffer){0};
    MHD_add_response_header(r, "Content-Security-Policy", policy);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(r, "Referrer-Policy", "no-referrer");
    MHD_add_response_header(r, "Cache-Control", "no-store");
    return queue(c, r, MHD_HTTP_OK, "text/html; charset=utf-8");
}

enum MHD_Result http_call_answer_error(struct http_call *c, unsigned status, const char *why,
                                       const char *param)
{
    struct text_buffer text = {0};
    write_error(c, &text, status, why, param);
    enum MHD_Result res = http_call_answer(c, &text, status, "application/json");
    text_free(&text);
    return res;
}

/* ---- to the loop, and the answer back -------------------------------------------------------- */

/* What came in is not looked at any more: the bound on all bodies is of those that are coming in,
 * and not of requests that live for long. Loop thread. */
static void forget_body(struct http_call *c)
{
    openai_request_free(c->parsed);
    c->parsed = NULL;
    kserve_http_forget_request(c->kserve);
    pthread_mutex_lock(&c->http->lock);
    char *body = c->body;
    c->http->n_bodies_bytes -= c->body_capacity;
    c->body = NULL;
    c->body_capacity = c->n_body = 0;
    http_unlock(c->http);
    free(body);
}

static void answer_on_loop(void *arg)
{
    struct http_call *c = arg;
    pthread_mutex_lock(&c->http->lock);
    bool is_gone = c->is_gone || c->is_cut;
    http_unlock(c->http);
    if (!is_gone) c->route->on_loop(c);
    forget_body(c);
    call_drop(c);
}

enum MHD_Result http_call_give_to_loop(struct http_call *c)
{
    struct router_http *h = c->http;
    struct td_err err = {0};
    td_status s = c->route->read ? c->route->read(c, &err) : TD_OK;
    if (s) return http_call_answer_error(c, openai_http_status(td_rpc_code(s)), err.msg, c->param);
    pthread_mutex_lock(&h->lock);
    if (h->is_stopping) {
        http_unlock(h);
        return http_call_answer_error(c, MHD_HTTP_SERVICE_UNAVAILABLE, "this router is draining",
                                      "");
    }
    c->is_given = c->is_suspended = true;
    MHD_suspend_connection(c->mhd);
    atomic_fetch_add(&c->n_holders, 1);
    /* live: none, or the one before, which is freed when its client has its answer */
    bool is_alone = h->n_calls == 1 && atomic_load(&h->router->n_live) <= 1;
    http_unlock(h);
    /* One client gets its answer sooner when this thread does what the loop's would have to be
     * woken for. Of many at once that one takes several in a turn, which costs less. The loop's
     * thread itself may be here: http_unlock. */
    h->n_alone = is_alone ? h->n_alone + 1 : 0;
    if (h->n_alone > 1 && !td_rpc_loop_is_current(h->router->loop)) {
        first_write_library(false); /* gRPC may connect here, and sets TCP_NODELAY then */
        td_rpc_loop_run(h->router->loop, answer_on_loop, c);
        first_write_library(!h->tls);
    } else {
        td_rpc_loop_post(h->router->loop, answer_on_loop, c);
    }
    return MHD_YES;
}

/* The loop has said how the answer begins. */
enum MHD_Result http_call_begin_answer(struct http_call *c)
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
    if (is_stream && !is_cut && n_unsent(c)) cork(c, true); /* the first event follows */
    http_unlock(c->http);
    enum MHD_Result res = MHD_NO;
    if (is_cut)
        ;
    else if (is_stream)
        res = queue(
            c, MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16 << 10, read_out, c, NULL),
            status, "text/event-stream; charset=utf-8");
    else
        res = http_call_answer(c, &body, status, "application/json");
    text_free(&body);
    return res;
}

/* ---- the library's thread: heads and bodies -------------------------------------------------- */

const char *http_call_too_large(struct http_call *c)
{
    snprintf(c->refused_why, sizeof c->refused_why, "the body has more than %llu bytes",
             (unsigned long long)c->http->config.max_body_bytes);
    return c->refused_why;
}

void http_call_take_body(struct http_call *c, const char *bytes, size_t n)
{
    struct router_http *h = c->http;
    /* read and thrown away, so that the client hears its answer */
    if (c->refused || !c->route->read) return;
    size_t want = c->n_body + n;
    if (want > h->config.max_body_bytes) {
        c->refused = MHD_HTTP_CONTENT_TOO_LARGE;
        http_call_too_large(c);
        return;
    }
    if (want > c->body_capacity) {
        size_t capacity = c->body_capacity ? c->body_capacity : 4096;
        while (capacity < want) capacity *= 2;
        pthread_mutex_lock(&h->lock);
        bool fits = h->n_bodies_bytes + capacity - c->body_capacity <= h->config.max_bodies_bytes;
        if (fits) h->n_bodies_bytes += capacity - c->body_capacity;
        http_unlock(h);
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
                http_unlock(h);
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
    struct connection *k = c->connection;
    if (k && k->address[0]) {
        memcpy(c->peer, k->address, sizeof c->peer);
        return;
    }
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(c->mhd, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    char host[64] = "?", port[8] = "?";
    if (info && info->client_addr)
        getnameinfo(info->client_addr,
                    info->client_addr->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                                             : sizeof(struct sockaddr_in),
                    host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(c->peer, sizeof c->peer, "http:%s:%s", host, port);
    if (k) memcpy(k->address, c->peer, sizeof k->address);
}

void http_call_name(struct http_call *c, const char *id)
{
    if (id[0] && strlen(id) < ROUTER_REQUEST_ID_BYTES && is_plain(id))
        router_copy_text(c->request_id, sizeof c->request_id, id);
}

static void name_at_random(struct http_call *c)
{
    uint64_t x = td_random_u64();
    for (int i = 0; i < 16; i++) c->request_id[i] = "0123456789abcdef"[x >> (60 - 4 * i) & 15];
    c->request_id[16] = 0;
}

struct http_call *http_call_begin(struct router_http *h, struct MHD_Connection *mhd,
                                  const char *url, const char *method, const char *version)
{
    struct http_call *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->http = h;
    c->is_chunked = !h->tls && !strcmp(version, "HTTP/1.1");
    c->mhd = mhd;
    atomic_store(&c->n_holders, 1);
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    c->connection = info ? info->socket_context : NULL;
    name_peer(c);
    const char *id = MHD_lookup_connection_value(mhd, MHD_HEADER_KIND, "x-request-id");
    http_call_name(c, id ? id : "");
    if (!c->request_id[0]) name_at_random(c);
    const char *key = MHD_lookup_connection_value(mhd, MHD_HEADER_KIND, "authorization");
    if (key && strlen(key) < sizeof c->authorization)
        router_copy_text(c->authorization, sizeof c->authorization, key);
    const char *trace = MHD_lookup_connection_value(mhd, MHD_HEADER_KIND, "traceparent");
    if (trace && strlen(trace) < sizeof c->traceparent) /* a longer one would be cut */
        snprintf(c->traceparent, sizeof c->traceparent, "%s", trace);
    const char *origin = MHD_lookup_connection_value(mhd, MHD_HEADER_KIND, "origin");
    if (origin && strlen(origin) < sizeof c->origin && is_plain(origin) &&
        http_origins_have(h->config.cors_origins, origin))
        snprintf(c->origin, sizeof c->origin, "%s", origin);
    /* The library leaves the body of an answer to HEAD out. */
    const char *known_method = strcmp(method, MHD_HTTP_METHOD_HEAD) ? method : MHD_HTTP_METHOD_GET;
    if (kserve_http_has(url))
        c->route = kserve_http_find(url, known_method, &c->kserve, &c->refused, &c->allowed);
    else
        c->route = http_route_find(url, known_method, c->model, &c->refused, &c->allowed);
    if (c->route)
        c->refused = 0;
    else
        snprintf(c->refused_why, sizeof c->refused_why, "%.20s %.100s is not served here%s%s",
                 method, url, c->allowed ? ": use " : "", c->allowed ? c->allowed : "");
    pthread_mutex_lock(&h->lock);
    c->next = &h->calls;
    c->prev = h->calls.prev;
    c->prev->next = c->next->prev = c;
    h->n_calls++;
    http_unlock(h);
    return c;
}

void http_call_end(struct http_call *c)
{
    struct router_http *h = c->http;
    if (!c) return;
    pthread_mutex_lock(&h->lock);
    c->prev->next = c->next;
    c->next->prev = c->prev;
    h->n_calls--;
    h->n_bodies_bytes -= c->body_capacity;
    c->body_capacity = 0; /* the loop may not have come to forget_body */
    c->is_gone = true;
    c->is_suspended = false;
    cork(c, false);
    if (c->connection) {
        c->connection->is_busy = false;
        c->connection->since_ns = td_now_ns();
    }
    c->connection = NULL;
    bool tell = c->is_given && !c->is_done && !h->is_stopping;
    http_unlock(h);
    if (tell) { /* the client has left before the end: http_finish was not called */
        atomic_fetch_add(&c->n_holders, 1);
        td_rpc_loop_post(h->router->loop, cancel_on_loop, c);
    }
    call_drop(c);
}
