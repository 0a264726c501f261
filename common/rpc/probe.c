/* probe.c - checks a server's port as a client sees it: a thread connects to it and waits for the
 * server's first bytes.
 *
 * That a process runs says nothing about a listener that accepts no more, or about a loop that is
 * stuck. Without TLS the probe sends HTTP/2's preface and waits for core's SETTINGS. With TLS it
 * sends a ClientHello and waits for the answer; it needs no certificate that the server would
 * accept, and ends the handshake there. A connection that the server closes counts as an answer,
 * because the server has accepted it (it may be one above the limit).
 *
 * Time is counted in turns of poll, not by the clock: a process that was stopped (SIGSTOP, a
 * suspended VM) has made few turns when it continues, so its port does not count as dead.
 *
 * Only the probe's thread writes `failed`. It posts to the loop when watchers of health must be
 * told. */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#ifdef TD_HAVE_OPENSSL
#include <openssl/ssl.h>
#endif

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/rpc/rpc_internal.h"

struct td_rpc_probe {
    struct td_rpc_server *server;
    struct sockaddr_storage to;
    socklen_t n_to;
    uint32_t period_ms;
    /* the bytes to send; a ClientHello with post-quantum key shares (OpenSSL 3.5) has 1,542 */
    uint8_t hello[8192];
    size_t n_hello;
    atomic_uint failed; /* in a row */
    char why[96];
    pthread_t thread;
    pthread_mutex_t mu;
    pthread_cond_t cond;
    bool stopping; /* mu */
};

uint32_t td_rpc_probe_failed(const struct td_rpc_probe *probe)
{
    return probe ? atomic_load(&probe->failed) : 0;
}

/* Waits ms; returns true, earlier, when the probe is stopped. */
static bool wait_stop(struct td_rpc_probe *p, uint32_t ms)
{
    uint64_t at = td_now_ns() + ms * TD_NS_PER_MS;
    struct timespec until = {(time_t)(at / TD_NS_PER_S), (long)(at % TD_NS_PER_S)};
    pthread_mutex_lock(&p->mu);
    while (!p->stopping && pthread_cond_timedwait(&p->cond, &p->mu, &until) != ETIMEDOUT) {
    }
    bool stopping = p->stopping;
    pthread_mutex_unlock(&p->mu);
    return stopping;
}

/* Polls fd for events for one turn; < 0 = an error, 0 = nothing yet. */
static int turn(struct td_rpc_probe *p, int fd, short events)
{
    struct pollfd pfd = {.fd = fd, .events = events};
    int turn_ms = (int)(p->period_ms / 10 ? p->period_ms / 10 : 1);
    return poll(&pfd, 1, turn_ms);
}

static bool is_stopping(struct td_rpc_probe *p)
{
    pthread_mutex_lock(&p->mu);
    bool stopping = p->stopping;
    pthread_mutex_unlock(&p->mu);
    return stopping;
}

/* True = the port answered; else p->why says what happened. */
static bool ask(struct td_rpc_probe *p)
{
    int fd = socket(p->to.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) { /* a failure of ours, which says nothing about the port */
        bool starved = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
        snprintf(p->why, sizeof p->why, "socket: %s", strerror(errno));
        return starved;
    }
    bool answered = false, connected = false;
    int rc = connect(fd, (const struct sockaddr *)&p->to, p->n_to);
    if (rc != 0 && errno != EINPROGRESS) {
        snprintf(p->why, sizeof p->why, "connect: %s", strerror(errno));
        close(fd);
        return false;
    }
    snprintf(p->why, sizeof p->why, "nobody took the connection");
    for (int i = 0; i < TD_RPC_PROBE_TURNS && !answered && !is_stopping(p); i++) {
        if (turn(p, fd, connected ? POLLIN : POLLOUT) <= 0) continue;
        if (!connected) {
            int e = 0;
            socklen_t n = sizeof e;
            getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n);
            if (e) {
                snprintf(p->why, sizeof p->why, "connect: %s", strerror(e));
                break;
            }
            connected = true;
            ssize_t sent = send(fd, p->hello, p->n_hello, MSG_NOSIGNAL);
            if (sent >= 0) snprintf(p->why, sizeof p->why, "connected, and no answer");
            /* not sent, because the connection was closed already: the next turn notices */
            continue;
        }
        uint8_t byte;
        ssize_t got = recv(fd, &byte, 1, 0);
        answered = got >= 0 || errno == ECONNRESET;
    }
    close(fd);
    return answered;
}

static void tell_health(void *arg)
{
    struct td_rpc_server *server = arg;
    if (!server->stopping) td_rpc_health_changed(server);
}

static void *probe_main(void *arg)
{
    struct td_rpc_probe *p = arg;
    pthread_setname_np(pthread_self(), "port-check");
    while (!wait_stop(p, p->period_ms)) {
        unsigned was = atomic_load(&p->failed);
        bool answered = ask(p);
        if (is_stopping(p)) break;
        unsigned now = answered ? 0 : was + 1;
        atomic_store(&p->failed, now);
        if ((was >= TD_RPC_PROBE_UNHEALTHY) == (now >= TD_RPC_PROBE_UNHEALTHY)) continue;
        char text[160];
        if (answered)
            td_info("port_answers", "port=%d after_failed=%u action=health_serving",
                    p->server->port, was);
        else
            td_error("port_silent", "port=%d failed=%u why=%s action=health_not_serving",
                     p->server->port, now, td_log_quote(text, sizeof text, p->why));
        td_rpc_loop_post(p->server->loop, tell_health, p->server);
    }
    return NULL;
}

/* ---- start and stop -------------------------------------------------------------------------- */

static void http2_hello(struct td_rpc_probe *p)
{
    static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    static const uint8_t settings[9] = {0, 0, 0, 4}; /* an empty SETTINGS frame */
    memcpy(p->hello, preface, sizeof preface - 1);
    memcpy(p->hello + sizeof preface - 1, settings, sizeof settings);
    p->n_hello = sizeof preface - 1 + sizeof settings;
}

static td_status tls_hello(struct td_rpc_probe *p, struct td_err *err)
{
#ifdef TD_HAVE_OPENSSL
    static const uint8_t alpn[] = {2, 'h', '2'};
    SSL_CTX *ctx = SSL_CTX_new(TLS_client_method());
    SSL *ssl = ctx ? SSL_new(ctx) : NULL;
    BIO *in = BIO_new(BIO_s_mem()), *out = BIO_new(BIO_s_mem());
    if (ssl && in && out) {
        SSL_set_bio(ssl, in, out); /* owns both */
        SSL_set_alpn_protos(ssl, alpn, sizeof alpn);
        SSL_connect(ssl); /* writes the ClientHello and wants to read */
        int n = BIO_read(out, p->hello, sizeof p->hello);
        p->n_hello = n > 0 && BIO_pending(out) == 0 ? (size_t)n : 0;
    } else {
        BIO_free(in);
        BIO_free(out);
    }
    SSL_free(ssl);
    SSL_CTX_free(ctx);
    return p->n_hello ? TD_OK
                      : td_fail(err, TD_ERR_IO,
                                "port check: OpenSSL made no ClientHello of at most %zu bytes",
                                sizeof p->hello);
#else
    (void)p;
    return td_fail(err, TD_ERR_UNSUPPORTED, "port check with TLS: built without OpenSSL");
#endif
}

/* The address at which a client on this host reaches the server: for a wildcard address it is
 * loopback. */
static td_status resolve(struct td_rpc_probe *p, const char *address, int port, struct td_err *err)
{
    if (strncmp(address, "unix:", 5) == 0) {
        struct sockaddr_un *to = (struct sockaddr_un *)(void *)&p->to;
        const char *path = strncmp(address + 5, "//", 2) == 0 ? address + 7 : address + 5;
        to->sun_family = AF_UNIX;
        snprintf(to->sun_path, sizeof to->sun_path, "%s", path);
        p->n_to = sizeof *to;
        return TD_OK;
    }
    char host[256], service[8];
    const char *colon = strrchr(address, ':');
    size_t n = colon ? (size_t)(colon - address) : strlen(address);
    if (n && address[0] == '[' && address[n - 1] == ']') {
        address++;
        n -= 2;
    }
    snprintf(host, sizeof host, "%.*s", (int)n, address);
    if (!host[0] || !strcmp(host, "0.0.0.0")) snprintf(host, sizeof host, "127.0.0.1");
    if (!strcmp(host, "::")) snprintf(host, sizeof host, "::1");
    snprintf(service, sizeof service, "%d", port);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    int e = getaddrinfo(host, service, &hints, &found);
    if (e) return td_fail(err, TD_ERR_IO, "port check: %s: %s", host, gai_strerror(e));
    memcpy(&p->to, found->ai_addr, found->ai_addrlen);
    p->n_to = found->ai_addrlen;
    freeaddrinfo(found);
    return TD_OK;
}

void td_rpc_probe_free(struct td_rpc_probe *p)
{
    if (!p) return;
    pthread_cond_destroy(&p->cond);
    pthread_mutex_destroy(&p->mu);
    free(p);
}

td_status td_rpc_probe_start(struct td_rpc_server *server, const char *address, bool use_tls,
                             uint32_t period_ms, struct td_rpc_probe **ret_probe,
                             struct td_err *err)
{
    struct td_rpc_probe *p = td_rpc_alloc(sizeof *p);
    p->server = server;
    p->period_ms = period_ms;
    pthread_mutex_init(&p->mu, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&p->cond, &attr);
    pthread_condattr_destroy(&attr);
    td_status status = resolve(p, address, server->port, err);
    if (!status && use_tls)
        status = tls_hello(p, err);
    else if (!status)
        http2_hello(p);
    if (!status) {
        int rc = pthread_create(&p->thread, NULL, probe_main, p);
        if (rc)
            status = td_fail(err, TD_ERR_IO, "port check: cannot start a thread: %s", strerror(rc));
    }
    if (status) {
        td_rpc_probe_free(p);
        return status;
    }
    *ret_probe = p;
    return TD_OK;
}

void td_rpc_probe_stop(struct td_rpc_probe *p)
{
    if (!p) return;
    pthread_mutex_lock(&p->mu);
    bool was_stopping = p->stopping;
    p->stopping = true;
    pthread_cond_signal(&p->cond);
    pthread_mutex_unlock(&p->mu);
    if (!was_stopping) pthread_join(p->thread, NULL);
}
