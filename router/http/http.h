/* http.h - the HTTP door: OpenAI's API over libmicrohttpd, in front of the same requests that gRPC
 * makes (inference.c).
 *
 *   libmicrohttpd's thread          the router's loop thread
 *   reads head and body
 *   parses JSON, suspends ------->  inference_generate(client = this call)
 *   wakes, sends the bytes <------  send, finish: bytes into the call's buffer
 *   "the client is gone"   ------>  inference_cancel: both legs end at once
 *
 * Bounds. Connections: max_connections and max_connections_per_peer. A head has 32 KiB at most, a
 * body max_message_bytes, all bodies together max_calls_bytes; none is kept of a client without the
 * key or certificate that it needs, which is answered when its head is there. A connection that has
 * not ended its request (or not begun the next) request_ms after the last one is closed. A client
 * that is 8 MiB behind is cut off. A suspended connection is not watched by the library, so the
 * router's tick looks every 100 ms or less whether clients have closed. The events of a stream
 * after the first go to the socket from the loop's thread, as long as the client takes them
 * (call.c).
 *
 * A request that comes while none is live, as the one before it did, is begun on the library's
 * thread (td_rpc_loop_run), and while it is the only call the loop's thread runs the library
 * (library.c): a lone client's answer does not wait for another thread to wake.
 *
 * Threads: start, tick and stop on the router's; the rest is inside. */
#ifndef TD_ROUTER_HTTP_HTTP_H
#define TD_ROUTER_HTTP_HTTP_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

struct router;
struct router_http;

struct router_http_config {
    const char *listen;             /* host:port, port 0 = any */
    const char *tls_cert, *tls_key; /* files (PEM); "" = no TLS */
    const char *tls_ca;             /* clients must show a certificate of it; "" = not asked */
    const char *cors_origins;       /* of pages that may read answers: "*", or a list; "" = none */
    uint64_t request_ms; /* from a connection's start, or its last answer, to a request's end */
    uint64_t max_connections, max_connections_per_peer, max_body_bytes, max_bodies_bytes;
    size_t behind_bytes; /* of a stream, not yet taken by its client, who is cut off above it */
    int send_bytes;             /* SO_SNDBUF of connections; 0 = the kernel's choice */
    bool page; /* GET / answers with the page */
    bool (*healthy)(void *ctx); /* on the library's thread, for GET /health */
    void *ctx;
};

/* r must outlive the server, and its loop must run. */
td_status router_http_start(struct router *r, const struct router_http_config *config,
                            struct router_http **ret_http, struct td_err *err);
int router_http_port(const struct router_http *http);
/* Between hold and release events of streams are kept, so that a client gets all that came in one
 * message of a worker by one send. Where many streams have some, release sends them a few turns of
 * the loop later, and with them what comes until then (call.c). Loop thread; NULL is fine. */
void router_http_hold(struct router_http *http);
void router_http_release(struct router_http *http);
void router_http_tick(struct router_http *http, uint64_t now_ns); /* loop thread; NULL is fine */
/* Closes the port; connections that are there are served, and each answer while the router drains
 * ends its connection. Not on the loop's thread; router_http_stop follows. NULL is fine. */
void router_http_quiesce(struct router_http *http);
/* No call is there: each has its answer, or its client has gone. [any] NULL is idle. */
bool router_http_is_idle(struct router_http *http);
/* No new connections; those that wait for an answer are let go, and the loop cancels their
 * requests. Before the loop ends. NULL is fine. */
void router_http_stop(struct router_http *http);
/* After the loop has ended. NULL is fine. */
void router_http_free(struct router_http *http);

#endif
