/* http.c - see http.h: the library's daemon, its connections, and what it calls back. */
#include "router/http/call.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/address.h"
#include "common/base/clock.h"
#include "common/base/mem.h"
#include "router/http/first_write.h"
#include "router/http/origins.h"

enum {
    HEAD_BYTES = 32 << 10,
    LINGER_MS = 2000,                      /* without a byte */
    MAX_LINGER_READS = HTTP_MAX_LINGERING, /* of all sockets in one tick */
};

/* ---- requests -------------------------------------------------------------------------------- */

struct framing {
    unsigned n_lengths, n_codings;
    uint64_t length; /* bytes */
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
        f->length = strtoull(value, NULL, 10); /* the greatest there is, where it tells more */
    } else if (!strcasecmp(name, "transfer-encoding")) {
        f->n_codings++;
        if (strcasecmp(value, "chunked")) f->is_wrong = true;
    }
    return MHD_YES;
}

/* Whether all readers agree where this request ends, and the length of its body that the head
 * tells, or 0. The library lets pass two lengths, or a length and a coding, and takes one of them.
 * A proxy in front may take the other: then a body that it forwards as one request is two here, and
 * the second has passed none of its checks (RFC 9112, 11.2). */
static bool is_framing_clear(struct MHD_Connection *mhd, uint64_t *ret_length)
{
    struct framing f = {0};
    MHD_get_connection_values(mhd, MHD_HEADER_KIND, see_header, &f);
    *ret_length = f.length;
    return !f.is_wrong && f.n_lengths + f.n_codings <= 1;
}

/* With a CA: NULL, and the call has the certificate; or why the client is a stranger. A connection
 * is looked at once. */
static const char *check_certificate(struct router_http *h, struct http_call *c)
{
    struct connection *k = c->connection;
    if (!h->tls || !http_tls_trust(h->tls)) return NULL;
    if (!k) return "there is no memory to look at the client's certificate";
    if (!k->is_known) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(c->mhd, MHD_CONNECTION_INFO_GNUTLS_SESSION);
        k->is_known = true;
        k->peer_why = "this connection has no TLS";
        if (info) k->peer = http_tls_peer(h->tls, info->tls_session, &k->peer_why);
    }
    c->certificate = http_peer_ref(k->peer);
    return k->peer ? NULL : k->peer_why;
}

/* The library reads nothing more of the connection after such an answer, and ends it. */
static enum MHD_Result answer_early(struct http_call *c, unsigned status, const char *why)
{
    if (c->connection) c->connection->is_early = true;
    return http_call_answer_error(c, status, why, "");
}

/* A tenant above its rates is told so before a body of this size or more is read. A smaller body is
 * read first, because an early answer ends the connection, and a new one costs more. */
enum { LARGE_BODY_BYTES = 64 << 10 };

/* A request's head is there: a client that may not ask, or not now, or not with that much, is told
 * so before its body takes memory. */
static enum MHD_Result see_head(struct router_http *h, struct http_call *c)
{
    const char *stranger = check_certificate(h, c);
    if (stranger) return answer_early(c, MHD_HTTP_FORBIDDEN, stranger);
    uint64_t length;
    if (!is_framing_clear(c->mhd, &length))
        return answer_early(c, MHD_HTTP_BAD_REQUEST,
                            "the body's length must be told once, by a Content-Length of digits or "
                            "by Transfer-Encoding: chunked");
    if (!c->route || !c->route->read) return MHD_YES; /* its body is not kept */
    struct td_err err = {0};
    uint32_t wait_ms;
    bool is_limited = c->route->is_limited && length >= LARGE_BODY_BYTES;
    enum td_code code =
        inference_refuse_early(h->router, http_call_client(c), is_limited, &wait_ms, &err);
    c->retry_s = (wait_ms + 999) / 1000;
    if (code != TD_CODE_OK) return answer_early(c, openai_http_status(code), err.msg);
    if (length <= h->config.max_body_bytes) return MHD_YES;
    return answer_early(c, MHD_HTTP_CONTENT_TOO_LARGE, http_call_too_large(c));
}

static enum MHD_Result on_request(void *ctx, struct MHD_Connection *mhd, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_bytes, void **state)
{
    struct router_http *h = ctx;
    struct http_call *c = *state;
    if (!c) {
        c = *state = http_call_begin(h, mhd, url, method, version);
        return c ? see_head(h, c) : MHD_NO;
    }
    if (*upload_bytes) {
        http_call_take_body(c, upload, *upload_bytes);
        *upload_bytes = 0;
        return MHD_YES;
    }
    if (c->is_given) return http_call_begin_answer(c);
    pthread_mutex_lock(&h->lock);
    if (c->connection) c->connection->is_busy = true;
    http_unlock(h);
    if (c->origin[0] && !strcmp(method, "OPTIONS")) return http_call_answer_preflight(c);
    if (c->refused) return http_call_answer_error(c, c->refused, c->refused_why, "");
    return c->route->on_loop ? http_call_give_to_loop(c) : c->route->answer_here(c);
}

static void on_completed(void *ctx, struct MHD_Connection *mhd, void **state,
                         enum MHD_RequestTerminationCode why)
{
    (void)ctx;
    (void)mhd;
    (void)why;
    if (*state) http_call_end(*state);
    *state = NULL;
}

/* ---- connections ----------------------------------------------------------------------------- */

static void end_linger(struct lingering *l)
{
    if (l->fd >= 0) close(l->fd);
    l->fd = -1;
}

/* The client of a connection that is closed by an early answer may be sending its body still. The
 * kernel answers what comes to a closed socket by a reset, and that can take the answer from a
 * client that has not read it (RFC 9112, 9.6). So the socket's own end is told now, and what comes
 * is read and thrown away, until nothing does. http->lock is held. */
static void linger(struct router_http *h, int fd)
{
    struct lingering *l = &h->lingering[h->next_lingering++ % HTTP_MAX_LINGERING];
    end_linger(l);
    l->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (l->fd >= 0) shutdown(l->fd, SHUT_WR);
    uint64_t now_ns = td_now_ns();
    l->until_ns = td_deadline_after_ms(now_ns, h->config.request_ms);
    l->quiet_ns = td_deadline_after_ms(now_ns, LINGER_MS);
}

/* http->lock is held. */
static void look_at_lingering(struct router_http *h, uint64_t now_ns)
{
    char away[16 << 10];
    int n_lingering = 0;
    for (int i = 0; i < HTTP_MAX_LINGERING; i++) n_lingering += h->lingering[i].fd >= 0;
    for (struct lingering *l = h->lingering; l < h->lingering + HTTP_MAX_LINGERING; l++) {
        if (l->fd < 0) continue;
        ssize_t n = 1;
        for (int i = 0; n > 0 && i < MAX_LINGER_READS / n_lingering; i++) {
            n = recv(l->fd, away, sizeof away, MSG_DONTWAIT);
            if (n > 0) l->quiet_ns = td_deadline_after_ms(now_ns, LINGER_MS);
        }
        bool is_over = n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
        if (is_over || now_ns > l->quiet_ns || now_ns > l->until_ns) end_linger(l);
    }
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
        if (info && !h->tls) first_write_connection(info->connect_fd);
        if (!k) return;
        k->fd = info->connect_fd;
        k->since_ns = td_now_ns();
        *socket_ctx = k;
        int bytes = h->config.send_bytes;
        if (bytes) setsockopt(k->fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
        struct epoll_event e = {.events = EPOLLRDHUP | EPOLLET, .data.ptr = k};
        epoll_ctl(h->hangups, EPOLL_CTL_ADD, k->fd, &e);
        pthread_mutex_lock(&h->lock);
        k->next = &h->connections;
        k->prev = h->connections.prev;
        k->prev->next = k->next->prev = k;
        http_unlock(h);
    } else if (k) {
        pthread_mutex_lock(&h->lock);
        epoll_ctl(h->hangups, EPOLL_CTL_DEL, k->fd, NULL); /* before another has the number */
        k->prev->next = k->next;
        k->next->prev = k->prev;
        if (k->is_early) linger(h, k->fd);
        http_unlock(h);
        http_peer_drop(k->peer);
        free(k);
        *socket_ctx = NULL;
    }
}

/* ---- the tick -------------------------------------------------------------------------------- */

/* Which clients have gone, or have said that they will send nothing more. http->lock is held. */
static void see_hangups(struct router_http *h)
{
    struct epoll_event events[256];
    int n;
    do {
        n = epoll_wait(h->hangups, events, 256, 0);
        for (int i = 0; i < n; i++) {
            struct connection *k = events[i].data.ptr;
            k->is_hung_up = true;
        }
    } while (n == 256);
}

void router_http_tick(struct router_http *h, uint64_t now_ns)
{
    if (!h) return;
    http_tls_look(h->tls, now_ns);
    pthread_mutex_lock(&h->lock);
    for (struct connection *k = h->connections.next; k != &h->connections; k = k->next)
        if (!k->is_busy && now_ns > k->since_ns &&
            now_ns - k->since_ns > h->config.request_ms * TD_NS_PER_MS)
            shutdown(k->fd, SHUT_RDWR);
    see_hangups(h);
    look_at_lingering(h, now_ns);
    for (struct http_call *c = h->calls.next; c != &h->calls; c = c->next) {
        if (!c->is_suspended || !c->connection) continue;
        if (c->connection->is_hung_up)
            http_call_cut(c);
        else
            http_call_look(c, now_ns);
    }
    http_unlock(h);
}

/* ---- start and stop -------------------------------------------------------------------------- */

static void ignore_log(void *ctx, const char *format, va_list args)
{
    (void)ctx; /* the library prints to stderr what clients did wrong: a flood would fill the log */
    (void)format;
    (void)args;
}

static struct MHD_Daemon *open_daemon(struct router_http *h, const struct addrinfo *ai)
{
    const struct router_http_config *g = &h->config;
    const char *trust = h->tls ? http_tls_trust(h->tls) : NULL;
    unsigned flags = MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    if (ai->ai_family == AF_INET6) flags |= MHD_USE_IPv6;
    if (h->tls) flags |= MHD_USE_TLS;
    /* libmicrohttpd 1.0 takes the end of a chunk's line with an extension for the chunk's first
     * byte, and after the last chunk for the end of the request: what comes then would be a request
     * of its own. Where a bare LF ends nothing, such requests are refused. 0.9 reads them. */
    if (MHD_get_version()[0] != '0') flags |= MHD_USE_PEDANTIC_CHECKS;
    struct MHD_OptionItem tls[] = {
        {MHD_OPTION_HTTPS_CERT_CALLBACK2, 0, (void *)(uintptr_t)http_tls_retrieve},
        {MHD_OPTION_HTTPS_MEM_TRUST, 0, (void *)(uintptr_t)trust},
        {MHD_OPTION_END, 0, NULL},
    };
    if (!trust) tls[1] = tls[2];
    if (!h->tls) tls[0] = tls[2];
    return MHD_start_daemon(
        flags, 0, NULL, NULL, on_request, h, MHD_OPTION_EXTERNAL_LOGGER, ignore_log, NULL,
        MHD_OPTION_SOCK_ADDR, ai->ai_addr, MHD_OPTION_CONNECTION_LIMIT,
        (unsigned)g->max_connections, MHD_OPTION_PER_IP_CONNECTION_LIMIT,
        (unsigned)g->max_connections_per_peer, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
        (size_t)HEAD_BYTES, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)((g->request_ms + 999) / 1000),
        /* it is ignored; the library would else not write head and body at once */
        MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1, MHD_OPTION_NOTIFY_COMPLETED, on_completed, h,
        MHD_OPTION_NOTIFY_CONNECTION, on_connection, h, MHD_OPTION_ARRAY, tls, MHD_OPTION_END);
}

td_status router_http_start(struct router *r, const struct router_http_config *config,
                            struct router_http **ret_http, struct td_err *err)
{
    struct router_http *h = calloc(1, sizeof *h);
    if (!h) return td_fail(err, TD_ERR_NOMEM, "no memory for the HTTP port");
    h->hangups = -1;
    h->router = r;
    h->config = *config;
    for (size_t i = 0; i < HTTP_MAX_LINGERING; i++) h->lingering[i].fd = -1;
    h->connections.next = h->connections.prev = &h->connections;
    h->calls.next = h->calls.prev = &h->calls;
    pthread_mutex_init(&h->lock, NULL);
    struct addrinfo *ai = NULL;
    td_status s = http_origins_check(config->cors_origins, err);
    if (!s) s = td_address_resolve("http_listen", config->listen, true, &ai, err);
    if (!s && config->tls_cert[0])
        s = http_tls_open(config->tls_cert, config->tls_key,
                          config->tls_ca[0] ? config->tls_ca : NULL, &h->tls, err);
    if (!s && (h->hangups = epoll_create1(EPOLL_CLOEXEC)) < 0)
        s = td_fail(err, TD_ERR_IO, "http_listen: epoll: %s", strerror(errno));
    struct MHD_Daemon *daemon = s ? NULL : open_daemon(h, ai);
    if (!s && !daemon)
        s = td_fail(err, TD_ERR_IO, "http_listen \"%.100s\": %s", config->listen,
                    errno ? strerror(errno) : "the HTTP library does not start");
    if (ai) freeaddrinfo(ai);
    if (!s) {
        const union MHD_DaemonInfo *info = MHD_get_daemon_info(daemon, MHD_DAEMON_INFO_BIND_PORT);
        h->port = info ? info->port : 0;
        s = http_library_start(h, daemon, err);
        if (s) MHD_stop_daemon(daemon);
    }
    if (s) {
        router_http_free(h);
        return s;
    }
    *ret_http = h;
    return TD_OK;
}

int router_http_port(const struct router_http *h) { return h->port; }

void router_http_quiesce(struct router_http *h)
{
    if (!h) return;
    int fd = http_library_quiesce(h->library);
    if (fd >= 0) close(fd);
}

bool router_http_is_idle(struct router_http *h)
{
    if (!h) return true;
    pthread_mutex_lock(&h->lock);
    bool is_idle = h->n_calls == 0;
    http_unlock(h);
    return is_idle;
}

void router_http_stop(struct router_http *h)
{
    if (!h) return;
    pthread_mutex_lock(&h->lock);
    h->is_stopping = true;
    for (struct http_call *c = h->calls.next; c != &h->calls; c = c->next) http_call_cut(c);
    http_unlock(h);
    http_library_stop(h->library);
}

void router_http_free(struct router_http *h)
{
    if (!h) return;
    http_library_free(h->library);
    for (size_t i = 0; i < HTTP_MAX_LINGERING; i++) end_linger(&h->lingering[i]);
    pthread_mutex_destroy(&h->lock);
    if (h->hangups >= 0) close(h->hangups);
    http_tls_close(h->tls);
    free(h);
}
