/* metrics_http.c - libmicrohttpd with its own polling thread; each answer is rendered when it is
 * asked for.
 *
 * libmicrohttpd bounds connections by refusing the newest, so a flood of connections would keep
 * everybody else out. It reports when a connection begins and ends, so this file keeps a list of
 * them, oldest first. When more than SHED_AT are open, it shuts down the socket of the oldest, and
 * the library closes that connection as if its peer had gone. Everything but start and stop runs on
 * the library's thread. */
#include "common/base/metrics_http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <microhttpd.h>
#include <netdb.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "common/base/address.h"
#include "common/base/metrics.h"

enum {
    SHED_AT = 192,
    /* above SHED_AT, because the library accepts a few more before it notices that the oldest are
     * gone */
    MAX_CONNECTIONS = 256,
    TIMEOUT_S = 10,
};

struct client {
    struct client *next, *prev; /* in order of age, head first */
    int fd;
    bool shed;
};

struct td_metrics_http {
    struct MHD_Daemon *daemon;
    bool (*healthy)(void *ctx);
    _Atomic(bool (*)(void *ctx)) ready;
    void *ctx;
    struct client clients; /* the ring's head */
    unsigned n_clients;    /* connections that have not been shed */
};

/* Shuts down the oldest connection when there are too many. */
static void shed(struct td_metrics_http *h)
{
    for (struct client *k = h->clients.next; k != &h->clients && h->n_clients > SHED_AT;
         k = k->next) {
        if (k->shed) continue;
        k->shed = true;
        h->n_clients--;
        shutdown(k->fd, SHUT_RDWR);
    }
}

static void on_connection(void *ctx, struct MHD_Connection *c, void **socket_ctx,
                          enum MHD_ConnectionNotificationCode code)
{
    struct td_metrics_http *h = ctx;
    struct client *k = *socket_ctx;
    if (code == MHD_CONNECTION_NOTIFY_STARTED) {
        const union MHD_ConnectionInfo *info =
            MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD);
        k = info ? calloc(1, sizeof *k) : NULL;
        if (!k) return; /* not in the list, but still bounded by MAX_CONNECTIONS */
        k->fd = info->connect_fd;
        k->next = &h->clients;
        k->prev = h->clients.prev;
        k->prev->next = k->next->prev = k;
        *socket_ctx = k;
        h->n_clients++;
        shed(h);
    } else if (k) {
        k->prev->next = k->next;
        k->next->prev = k->prev;
        if (!k->shed) h->n_clients--;
        free(k);
        *socket_ctx = NULL;
    }
}

static enum MHD_Result answer(void *ctx, struct MHD_Connection *c, const char *url,
                              const char *method, const char *version, const char *upload,
                              size_t *upload_bytes, void **state)
{
    struct td_metrics_http *h = ctx;
    (void)version;
    (void)upload;
    (void)upload_bytes;
    (void)state;
    static char ok[] = "ok\n", missing[] = "not found: use /metrics, /healthz or /readyz\n",
                bad[] = "only GET\n";
    static char ill[] = "the gRPC port does not answer\n",
                unready[] = "it drains, or no worker of a needed role has joined\n";
    bool (*ready)(void *ctx) = atomic_load(&h->ready);
    bool asks_ready = !strcmp(url, "/readyz"), asks_health = !strcmp(url, "/healthz") || asks_ready;
    struct MHD_Response *r;
    unsigned status = MHD_HTTP_OK;
    if (strcmp(method, "GET") != 0) {
        r = MHD_create_response_from_buffer(strlen(bad), bad, MHD_RESPMEM_PERSISTENT);
        status = MHD_HTTP_METHOD_NOT_ALLOWED;
    } else if (!strcmp(url, "/metrics")) {
        size_t n = 0;
        char *text = td_metrics_render(&n);
        r = MHD_create_response_from_buffer(n, text, MHD_RESPMEM_MUST_FREE);
        if (r)
            MHD_add_response_header(r, "Content-Type", "text/plain; version=0.0.4");
        else
            free(text);
    } else if (asks_health && h->healthy && !h->healthy(h->ctx)) {
        r = MHD_create_response_from_buffer(strlen(ill), ill, MHD_RESPMEM_PERSISTENT);
        status = MHD_HTTP_SERVICE_UNAVAILABLE;
    } else if (asks_ready && ready && !ready(h->ctx)) {
        r = MHD_create_response_from_buffer(strlen(unready), unready, MHD_RESPMEM_PERSISTENT);
        status = MHD_HTTP_SERVICE_UNAVAILABLE;
    } else if (asks_health) {
        r = MHD_create_response_from_buffer(strlen(ok), ok, MHD_RESPMEM_PERSISTENT);
    } else {
        r = MHD_create_response_from_buffer(strlen(missing), missing, MHD_RESPMEM_PERSISTENT);
        status = MHD_HTTP_NOT_FOUND;
    }
    if (!r) return MHD_NO;
    enum MHD_Result res = MHD_queue_response(c, status, r);
    MHD_destroy_response(r);
    return res;
}

td_status td_metrics_http_start(const char *address, bool (*healthy)(void *ctx), void *ctx,
                                struct td_metrics_http **ret_http, struct td_err *err)
{
    struct addrinfo *ai = NULL;
    td_status s = td_address_resolve("metrics_listen", address, true, &ai, err);
    if (s) return s;
    struct td_metrics_http *h = calloc(1, sizeof *h);
    /* Polling by anything but select, which cannot handle descriptors above 1,023. */
    unsigned flags =
        MHD_USE_AUTO_INTERNAL_THREAD | (ai->ai_family == AF_INET6 ? (unsigned)MHD_USE_IPv6 : 0u);
    if (h) {
        h->clients.next = h->clients.prev = &h->clients;
        h->healthy = healthy;
        h->ctx = ctx;
        h->daemon = MHD_start_daemon(
            flags, 0, NULL, NULL, answer, h, MHD_OPTION_SOCK_ADDR, ai->ai_addr,
            MHD_OPTION_CONNECTION_LIMIT, (unsigned)MAX_CONNECTIONS, MHD_OPTION_CONNECTION_TIMEOUT,
            (unsigned)TIMEOUT_S, MHD_OPTION_NOTIFY_CONNECTION, on_connection, h, MHD_OPTION_END);
    }
    freeaddrinfo(ai);
    if (!h || !h->daemon) {
        free(h);
        return td_fail(err, TD_ERR_IO, "metrics_listen \"%s\": %s", address, strerror(errno));
    }
    *ret_http = h;
    return TD_OK;
}

void td_metrics_http_set_ready(struct td_metrics_http *h, bool (*ready)(void *ctx))
{
    atomic_store(&h->ready, ready);
}

void td_metrics_http_stop(struct td_metrics_http *h)
{
    if (!h) return;
    MHD_stop_daemon(h->daemon);
    free(h);
}
