/* server.c - a server: listening, new calls, stopping.
 *
 * One request for a new call is always posted (a generic request_call with our own table, so that
 * unknown methods get an answer). Each call starts RECV_CLOSE at once, which reports its end, and
 * RECV_MESSAGE when its handler wants a message.
 *
 * Stop, on a thread that is not the loop's:
 *   1. post drain_begin: health goes off, watchers are told, new calls are refused;
 *   2. wait until n_live == 0 or the drain time is over;
 *   3. post builtin_end: watches end; wait up to TD_RPC_STOP_BUILTIN_MS for them;
 *   4. wait up to TD_RPC_STOP_FLUSH_MS, so that the last statuses leave the kernel. Core closes a
 *      connection at once when its last stream ends after GOAWAY, and a close with the peer's
 *      frames unread makes TCP reset it: bytes in the send queue would be lost (seen: 4 of 600
 *      drains);
 *   5. post shutdown_and_notify (stops listening; the request comes back) and cancel_all_calls
 *      (closes connections without calls: their peers may be frozen);
 *   6. wait for the shutdown event and n_calls == 0; post: timer off; then destroy.
 *
 * A drain that lasts calls td_rpc_server_goaway before: shutdown_and_notify of step 5 comes first,
 * so clients open new calls elsewhere while their live ones end here. What step 4 avoids cannot
 * happen then: such a connection lingers (linger.h), and stop waits for those that do.
 *
 * From shutdown_and_notify on core ends with CANCELLED each call that it has read and not yet given
 * to us, and each that it reads until its client knows. Clients repeat only what core has not seen.
 * So goaway goes in two steps:
 *   1. the guard hides new streams from core (accept.h);
 *   2. when all calls that core has read before are here, shutdown_and_notify. They are all here
 *      when as many came as core saw streams begin. Core may have ended some streams itself (a
 *      client took its call back before we saw it); then we wait until no call has come for
 *      AWAY_QUIET_TICKS turns of a timer, AWAY_MAX_TICKS in all. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "common/rpc/linger.h"
#include "common/rpc/rpc_internal.h"

/* server->stopping: each step refuses more. */
enum { STOP_NOT, STOP_DRAIN, STOP_BUILTIN, STOP_SHUTDOWN };

enum { AWAY_TICK_MS = 10, AWAY_QUIET_TICKS = 10, AWAY_MAX_TICKS = 100 };

static void on_close(struct td_rpc_event *event, bool ok);

static void post_slot(struct td_rpc_server *server)
{
    pthread_mutex_lock(&server->mu_stop);
    server->n_calls++;
    pthread_mutex_unlock(&server->mu_stop);
    grpc_call_details_init(&server->incoming.details);
    grpc_metadata_array_init(&server->incoming.metadata);
    td_rpc_tag_release(&server->incoming.event);
    grpc_call_error e = grpc_server_request_call(
        server->server, &server->incoming.call, &server->incoming.details,
        &server->incoming.metadata, server->loop->cq, server->loop->cq, &server->incoming.event);
    TD_ASSERT(e == GRPC_CALL_OK);
}

void td_rpc_server_release(struct td_rpc_server *server)
{
    pthread_mutex_lock(&server->mu_stop);
    server->n_calls--;
    pthread_cond_signal(&server->cond_stop);
    pthread_mutex_unlock(&server->mu_stop);
}

static const struct td_rpc_route *find_route(const struct td_rpc_server *server, grpc_slice path)
{
    size_t n = GRPC_SLICE_LENGTH(path);
    const void *at = GRPC_SLICE_START_PTR(path);
    for (size_t i = 0; i < server->routes.n; i++) {
        const char *known = server->routes.v[i].method->path;
        if (strlen(known) == n && memcmp(known, at, n) == 0) return &server->routes.v[i];
    }
    return NULL;
}

/* Counts the call for the caller's address. False: the address has as many calls as one may
 * have. */
static bool count_peer(struct td_rpc_server *server, struct td_rpc_call *call)
{
    uint64_t key;
    if (!server->limits.max_peer_calls || !td_rpc_peer_key_parse(td_rpc_call_peer(call), &key))
        return true;
    const struct td_rpc_peer *peer = td_rpc_peers_find(&server->peers, key);
    if (peer && peer->n >= server->limits.max_peer_calls) return false;
    call->as_server.of_peer = td_rpc_peers_add(&server->peers, key);
    return true;
}

static bool is_ending(struct td_rpc_call *call)
{
    pthread_mutex_lock(&call->loop->mu);
    bool ending = call->asked.end_wanted || call->asked.cancel_wanted;
    pthread_mutex_unlock(&call->loop->mu);
    return ending;
}

/* Sets the call's deadline from what core tells, and enters the call in the server's list. */
static void enter_call(struct td_rpc_server *server, struct td_rpc_call *call,
                       gpr_timespec deadline)
{
    call->as_server.began_ns = td_now_ns();
    if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) != 0) {
        gpr_timespec left = gpr_time_sub(deadline, gpr_now(GPR_CLOCK_MONOTONIC));
        int64_t left_ns = left.tv_sec < 0            ? 0
                          : left.tv_sec > 1000000000 ? 1000000000ll * 1000000000
                                                     : left.tv_sec * 1000000000ll + left.tv_nsec;
        call->deadline_ns = td_now_ns() + (uint64_t)left_ns;
    }
    call->as_server.prev_live = &server->live;
    call->as_server.next_live = server->live;
    if (server->live) server->live->as_server.prev_live = &call->as_server.next_live;
    server->live = call;
}

/* Counts the call among the live ones, opens it and reads its first message. */
static void admit_call(struct td_rpc_server *server, struct td_rpc_call *call,
                       const struct td_rpc_route *route)
{
    call->as_server.method = route->method;
    call->as_server.builtin = route->builtin;
    call->as_server.ctx = route->builtin ? server : server->ctx;
    if (route->builtin) {
        atomic_fetch_add(&server->n_builtin, 1);
    } else {
        call->as_server.counted = true;
        atomic_fetch_add(&server->n_live, 1);
    }
    if (call->as_server.method->on_open) {
        call->as_server.opened = true;
        call->as_server.method->on_open(call, call->as_server.ctx);
    }
    if (!is_ending(call)) td_rpc_call_read(call);
}

static void on_new(struct td_rpc_event *event, bool ok)
{
    struct td_rpc_server *server = td_rpc_container(event, struct td_rpc_server, incoming.event);
    grpc_call_details details = server->incoming.details;
    grpc_metadata_array metadata = server->incoming.metadata;
    grpc_call *core_call = server->incoming.call;
    if (!ok) { /* shutting down */
        grpc_call_details_destroy(&details);
        grpc_metadata_array_destroy(&metadata);
        td_rpc_server_release(server);
        return;
    }
    /* The count of the posted request becomes the count of the call. */
    server->incoming.call = NULL;
    server->incoming.n_taken++;
    if (!server->goaway.is_done) post_slot(server);

    struct td_rpc_call *call = td_rpc_call_new(server->loop, true, server->limits.max_queued_bytes);
    call->as_server.server = server;
    call->call = core_call;
    call->as_server.request_metadata = metadata;
    call->ev_close.fn = on_close;
    enter_call(server, call, details.deadline);

    grpc_op op;
    memset(&op, 0, sizeof op);
    op.op = GRPC_OP_RECV_CLOSE_ON_SERVER;
    op.data.recv_close_on_server.cancelled = &call->as_server.recv_cancelled;
    td_rpc_call_batch(call, &op, 1, &call->ev_close);

    char why[300];
    const struct td_rpc_route *route = find_route(server, details.method);
    if (!route) {
        char *path = td_rpc_slice_string(details.method);
        snprintf(why, sizeof why, "unknown method %.200s", path);
        free(path);
        td_rpc_call_finish(call, TD_CODE_UNIMPLEMENTED, why, NULL, 0);
    } else if (server->stopping > (route->builtin ? STOP_DRAIN : STOP_NOT)) {
        td_rpc_call_finish(call, TD_CODE_UNAVAILABLE, "the server is stopping", NULL, 0);
    } else if (route->builtin ? atomic_load(&server->n_builtin) >= TD_RPC_MAX_BUILTIN_CALLS
                              : atomic_load(&server->n_live) >= server->limits.max_live_calls) {
        snprintf(why, sizeof why, "too many live calls: the limit is %u",
                 route->builtin ? (unsigned)TD_RPC_MAX_BUILTIN_CALLS
                                : server->limits.max_live_calls);
        td_rpc_call_finish(call, TD_CODE_RESOURCE_EXHAUSTED, why, NULL, 0);
    } else if (!route->builtin && !count_peer(server, call)) {
        snprintf(why, sizeof why, "too many live calls from your address: the limit is %u",
                 server->limits.max_peer_calls);
        td_rpc_call_finish(call, TD_CODE_RESOURCE_EXHAUSTED, why, NULL, 0);
    } else {
        admit_call(server, call, route);
    }
    grpc_call_details_destroy(&details);
}

void td_rpc_server_message(struct td_rpc_call *call, const ProtobufCMessage *msg)
{
    if (is_ending(call)) return;
    if (!msg && !call->as_server.method->client_streaming) {
        if (!call->as_server.got_message)
            td_rpc_call_finish(call, TD_CODE_INTERNAL, "the request has no message", NULL, 0);
        return;
    }
    call->as_server.got_message = true;
    call->as_server.opened = true;
    call->as_server.method->on_message(call, msg, call->as_server.ctx);
}

void td_rpc_server_caught_up(struct td_rpc_call *call)
{
    if (!call->is_server || !call->as_server.opened || is_ending(call)) return;
    const struct td_rpc_method *method = call->as_server.method;
    if (method->on_caught_up) method->on_caught_up(call, call->as_server.ctx);
}

void td_rpc_server_bad_message(struct td_rpc_call *call, const struct td_err *err)
{
    td_rpc_call_finish(
        call, err->code == TD_ERR_LIMIT ? TD_CODE_RESOURCE_EXHAUSTED : TD_CODE_INVALID_ARGUMENT,
        err->msg, NULL, 0);
}

static void on_close(struct td_rpc_event *event, bool ok)
{
    (void)ok; /* always true */
    struct td_rpc_call *call = td_rpc_container(event, struct td_rpc_call, ev_close);
    call->n_tags--;
    call->closed = true;
    call->peer_cancelled = call->as_server.recv_cancelled != 0;
    pthread_mutex_lock(&call->loop->mu);
    atomic_store(&call->over, true);
    pthread_mutex_unlock(&call->loop->mu);
    td_rpc_call_check_end(call);
}

void td_rpc_server_end(struct td_rpc_call *call)
{
    *call->as_server.prev_live = call->as_server.next_live;
    if (call->as_server.next_live)
        call->as_server.next_live->as_server.prev_live = call->as_server.prev_live;
    if (call->as_server.builtin) atomic_fetch_sub(&call->as_server.server->n_builtin, 1);
    td_rpc_peers_drop(&call->as_server.server->peers, call->as_server.of_peer);
    call->as_server.of_peer = NULL;
    atomic_store(&call->as_server.server->last_end_ns, td_now_ns());
    /* before on_end, which may read the count */
    if (call->as_server.counted) atomic_fetch_sub(&call->as_server.server->n_live, 1);
    if (call->as_server.opened)
        call->as_server.method->on_end(call, call->peer_cancelled, call->as_server.ctx);
    for (size_t i = 0; call->as_server.metadata && i < call->as_server.request_metadata.count;
         i++) {
        free((char *)call->as_server.metadata[i].key);
        free((char *)call->as_server.metadata[i].value);
    }
    free(call->as_server.metadata);
    call->as_server.metadata = NULL;
}

const char *td_rpc_call_metadata(const struct td_rpc_call *call, const char *key)
{
    struct td_rpc_call *c = (struct td_rpc_call *)call; /* a cache filled on the loop thread */
    if (!c->call) return NULL;
    size_t n = c->as_server.request_metadata.count;
    if (!c->as_server.metadata && n) {
        c->as_server.metadata = td_rpc_alloc(n * sizeof *c->as_server.metadata);
        for (size_t i = 0; i < n; i++) {
            c->as_server.metadata[i].key =
                td_rpc_slice_string(c->as_server.request_metadata.metadata[i].key);
            c->as_server.metadata[i].value =
                td_rpc_slice_string(c->as_server.request_metadata.metadata[i].value);
        }
    }
    for (size_t i = 0; i < n; i++)
        if (strcmp(c->as_server.metadata[i].key, key) == 0) return c->as_server.metadata[i].value;
    return NULL;
}

/* Ends calls of a peer that neither reads nor disconnects: its flow-control window stays shut while
 * keepalive pings are answered. */
static void check_stalls(void *arg)
{
    struct td_rpc_server *server = arg;
    uint64_t now = td_now_ns();
    td_rpc_tls_look_at_expiry(server->tls);
    for (struct td_rpc_call *call = server->live; call; call = call->as_server.next_live) {
        if (!call->as_server.got_message && !call->as_server.builtin && !call->closed &&
            now - call->as_server.began_ns > server->limits.max_request_ms * TD_NS_PER_MS) {
            char late[120];
            snprintf(late, sizeof late, "the request has not come whole within %u ms",
                     server->limits.max_request_ms);
            td_rpc_call_cancel_with(call, TD_CODE_RESOURCE_EXHAUSTED, late);
        }
        if (!call->send_busy ||
            now - call->send_started_ns < server->limits.max_stall_ms * TD_NS_PER_MS)
            continue;
        char why[120];
        snprintf(why, sizeof why, "the peer has not read for more than %u ms",
                 server->limits.max_stall_ms);
        td_rpc_call_cancel_with(call, TD_CODE_RESOURCE_EXHAUSTED, why);
    }
}

/* ---- start and stop -------------------------------------------------------------------------- */

static bool add_service(struct td_rpc_server *server, const char *path)
{
    const char *slash = path[0] == '/' ? strchr(path + 1, '/') : NULL;
    if (!slash) return false;
    size_t n = (size_t)(slash - path - 1);
    for (size_t i = 0; i < server->routes.n_services; i++)
        if (strlen(server->routes.services[i]) == n &&
            memcmp(server->routes.services[i], path + 1, n) == 0)
            return true;
    char **grown =
        realloc(server->routes.services, (server->routes.n_services + 1) * sizeof *grown);
    TD_ASSERT(grown != NULL);
    server->routes.services = grown;
    char *name = td_rpc_alloc(n + 1);
    memcpy(name, path + 1, n);
    server->routes.services[server->routes.n_services++] = name;
    return true;
}

static td_status add_routes(struct td_rpc_server *server, const struct td_rpc_method *methods,
                            bool builtin, struct td_err *err)
{
    for (const struct td_rpc_method *m = methods; m->path; m++) {
        if (!m->request || !m->on_message || !m->on_end || !add_service(server, m->path))
            return td_fail(
                err, TD_ERR_INVALID,
                "rpc server: method %s needs a path /service/name, request, on_message and on_end",
                m->path);
        struct td_rpc_route *grown =
            realloc(server->routes.v, (server->routes.n + 1) * sizeof *grown);
        TD_ASSERT(grown != NULL);
        server->routes.v = grown;
        server->routes.v[server->routes.n++] = (struct td_rpc_route){m, builtin};
    }
    return TD_OK;
}

/* Core would unlink a live server's socket and take its path. A lock file beside the socket shows
 * that a server is alive. */
static td_status lock_unix_path(struct td_rpc_server *server, const char *address,
                                struct td_err *err)
{
    if (strncmp(address, "unix:", 5) != 0) return TD_OK;
    const char *path = address + 5;
    if (strncmp(path, "//", 2) == 0) path += 2;
    size_t n = strlen(path) + sizeof ".lock";
    server->lock_path = td_rpc_alloc(n);
    snprintf(server->lock_path, n, "%s.lock", path);
    server->lock_fd = open(server->lock_path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
    if (server->lock_fd < 0)
        return td_fail(err, TD_ERR_IO, "listen %s: %s: %s", address, server->lock_path,
                       strerror(errno));
    if (flock(server->lock_fd, LOCK_EX | LOCK_NB) != 0)
        return td_fail(err, TD_ERR_IO, "listen %s: another server holds %s", address,
                       server->lock_path);
    return TD_OK;
}

static void free_server(struct td_rpc_server *server)
{
    if (server->server) grpc_server_destroy(server->server);
    td_rpc_guard_close(server->guard);
    td_rpc_probe_free(server->probe);
    td_rpc_tls_files_destroy(server->tls);
    for (size_t i = 0; i < server->routes.n_services; i++) free(server->routes.services[i]);
    free(server->routes.services);
    free(server->routes.v);
    /* the file stays: removing it would race with the next owner */
    if (server->lock_fd >= 0) close(server->lock_fd);
    free(server->lock_path);
    pthread_cond_destroy(&server->cond_stop);
    pthread_mutex_destroy(&server->mu_stop);
    free(server);
}

/* Checked here, because core takes port 65536 + 80 for 80. */
static td_status check_port(const char *address, struct td_err *err)
{
    const char *colon = strrchr(address, ':');
    /* core reports what is wrong with it */
    if (!colon || strncmp(address, "unix", 4) == 0) return TD_OK;
    char *end;
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (colon[1] >= '0' && colon[1] <= '9' && !*end && port <= 65535) return TD_OK;
    return td_fail(err, TD_ERR_INVALID, "listen %s: the port must be 0..65535", address);
}

static td_status listen_on(struct td_rpc_server *server, const struct td_rpc_server_config *config,
                           struct td_err *err)
{
    grpc_server_credentials *creds;
    td_status port_status = check_port(config->address, err);
    if (port_status) return port_status;
    if (config->tls) {
        td_status status = td_rpc_tls_server(config->tls, &server->tls, &creds, err);
        if (status) return status;
    } else {
        creds = grpc_insecure_server_credentials_create();
    }
    server->port = grpc_server_add_http2_port(server->server, config->address, creds);
    grpc_server_credentials_release(creds);
    if (server->port == 0)
        return td_fail(
            err, TD_ERR_IO, "listen %s: cannot bind: in use, or not an address of this host%s",
            config->address, config->tls ? ", or the certificate does not fit its key" : "");
    return TD_OK;
}

/* Replaces limits that are 0 by their defaults, and those that contradict others by the nearest
 * that do not. */
static void complete_limits(struct td_rpc_limits *limits)
{
    if (!limits->max_message_bytes) limits->max_message_bytes = TD_RPC_DEFAULT_MESSAGE_BYTES;
    if (limits->max_message_bytes > 1u << 30) limits->max_message_bytes = 1u << 30;
    if (!limits->max_unpack_bytes)
        limits->max_unpack_bytes =
            limits->max_message_bytes > 1u << 27 ? 1u << 30 : limits->max_message_bytes * 8;
    if (!limits->max_calls_bytes) limits->max_calls_bytes = TD_RPC_DEFAULT_CALLS_BYTES;
    if (limits->max_calls_bytes < 2ull * limits->max_message_bytes)
        limits->max_calls_bytes = 2ull * limits->max_message_bytes;
    if (!limits->max_live_calls) limits->max_live_calls = TD_RPC_DEFAULT_LIVE_CALLS;
    if (!limits->max_queued_bytes) limits->max_queued_bytes = TD_RPC_DEFAULT_QUEUED_BYTES;
    if (!limits->max_stall_ms) limits->max_stall_ms = TD_RPC_DEFAULT_STALL_MS;
    if (!limits->max_handshake_ms) limits->max_handshake_ms = TD_RPC_HANDSHAKE_MS;
    if (!limits->max_request_ms) limits->max_request_ms = TD_RPC_DEFAULT_STALL_MS;
}

/* The routes of the services, of health and of reflection. */
static td_status add_all_routes(struct td_rpc_server *server,
                                const struct td_rpc_server_config *config, struct td_err *err)
{
    td_status status = TD_OK;
    for (const struct td_rpc_method *const *table = config->services; table && *table && !status;
         table++)
        status = add_routes(server, *table, false, err);
    server->routes.n_own_services = server->routes.n_services;
    if (!status) status = add_routes(server, td_rpc_health_methods, true, err);
    if (!status && config->reflection)
        status = add_routes(server, td_rpc_reflection_methods, true, err);
    return status;
}

/* The core server with our bounds as its channel arguments, on the loop's completion queue. */
static void make_core_server(struct td_rpc_server *server, int keepalive, uint32_t n_streams)
{
    const struct td_rpc_limits *limits = &server->limits;
    grpc_arg args[] = {
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
         .value.integer = (int)limits->max_message_bytes},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_MAX_METADATA_SIZE,
         .value.integer = TD_RPC_MAX_METADATA_BYTES},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)"grpc.compression_enabled_algorithms_bitset",
         .value.integer = 1},
        {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_ALLOW_REUSEPORT, .value.integer = 0},
        {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_ENABLE_CHANNELZ, .value.integer = 0},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_MAX_CONCURRENT_STREAMS,
         .value.integer = (int)n_streams},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
         .value.integer = (int)limits->max_handshake_ms},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_KEEPALIVE_TIME_MS,
         .value.integer = keepalive},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
         .value.integer = keepalive},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS,
         .value.integer = 1},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA,
         .value.integer = 0},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
         .value.integer = 100},
        /* Bytes being read are memory of a connection: by default core would take up to 4 MiB at
         * once. */
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE,
         .value.integer = TD_RPC_READ_BYTES},
        {.type = GRPC_ARG_POINTER, .key = (char *)GRPC_ARG_RESOURCE_QUOTA}, /* filled below */
    };
    grpc_resource_quota *quota = grpc_resource_quota_create("calls");
    grpc_resource_quota_resize(quota, limits->max_calls_bytes);
    grpc_arg *quota_arg = &args[sizeof args / sizeof *args - 1];
    quota_arg->value.pointer.p = quota;
    quota_arg->value.pointer.vtable = grpc_resource_quota_arg_vtable();
    grpc_channel_args channel_args = {sizeof args / sizeof *args, args};
    server->server = grpc_server_create(&channel_args, NULL);
    grpc_resource_quota_unref(quota);
    grpc_server_register_completion_queue(server->server, server->loop->cq, NULL);
}

/* Guards the listener (accept.h) before it accepts. */
static void open_guard(struct td_rpc_server *server, const struct td_rpc_server_config *config,
                       uint32_t n_streams)
{
    const struct td_rpc_limits *limits = &server->limits;
    const char *unix_path = strncmp(config->address, "unix:", 5) == 0 ? config->address + 5 : NULL;
    if (unix_path && strncmp(unix_path, "//", 2) == 0) unix_path += 2;
    const struct td_rpc_guard_config guard = {.port = server->port,
                                              .unix_path = unix_path,
                                              .use_tls = config->tls != NULL,
                                              .max_connections = limits->max_connections,
                                              .max_peer_connections = limits->max_peer_connections,
                                              .max_unacked_streams = n_streams,
                                              .max_handshakes = limits->max_handshakes,
                                              .max_handshakes_per_s = limits->max_handshakes_per_s};
    server->guard = td_rpc_guard_open(&guard);
}

td_status td_rpc_server_start(const struct td_rpc_server_config *config,
                              struct td_rpc_server **ret_server, struct td_err *err)
{
    struct td_rpc_server *server = td_rpc_alloc(sizeof *server);
    server->loop = config->loop;
    server->ctx = config->ctx;
    server->lock_fd = -1;
    server->incoming.event.fn = on_new;
    server->peers.seed = td_random_u64();
    pthread_mutex_init(&server->mu_stop, NULL);
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&server->cond_stop, &attr);
    pthread_condattr_destroy(&attr);
    server->ready = true;
    server->limits = config->limits;
    complete_limits(&server->limits);

    td_status status = add_all_routes(server, config, err);
    if (!status) status = lock_unix_path(server, config->address, err);
    if (status) goto err_free;
    int keepalive = (int)(config->keepalive_ms ? config->keepalive_ms : TD_RPC_SERVER_KEEPALIVE_MS);
    uint32_t n_streams = server->limits.max_live_calls < 1u << 20
                             ? server->limits.max_live_calls + TD_RPC_MAX_BUILTIN_CALLS
                             : 1u << 20;
    make_core_server(server, keepalive, n_streams);
    status = listen_on(server, config, err);
    if (status) goto err_free;
    open_guard(server, config, n_streams);
    atomic_fetch_add(&server->loop->n_objects, 1);
    grpc_server_start(server->server);
    server->stall_timer = td_rpc_timer_start(server->loop, 1000, check_stalls, server);
    post_slot(server);
    if (config->port_check_ms)
        status = td_rpc_probe_start(server, config->address, config->tls != NULL,
                                    config->port_check_ms, &server->probe, err);
    if (status) {
        td_rpc_server_stop(server, 0);
        return status;
    }
    *ret_server = server;
    return TD_OK;

err_free:
    free_server(server);
    return status;
}

int td_rpc_server_port(const struct td_rpc_server *server) { return server->port; }

bool td_rpc_server_answers(const struct td_rpc_server *server)
{
    return td_rpc_probe_failed(server->probe) < TD_RPC_PROBE_UNHEALTHY;
}

bool td_rpc_server_is_deaf(const struct td_rpc_server *server)
{
    return td_rpc_probe_failed(server->probe) >= TD_RPC_PROBE_DEAF;
}

void td_rpc_server_stats(const struct td_rpc_server *server, struct td_rpc_server_stats *ret_stats)
{
    struct td_rpc_guard_stats guard;
    td_rpc_guard_stats(server->guard, &guard);
    *ret_stats = (struct td_rpc_server_stats){.connections = guard.open,
                                              .connections_accepted = guard.accepted,
                                              .connections_refused =
                                                  guard.refused_total + guard.refused_peer +
                                                  guard.starved + guard.refused_handshakes,
                                              .handshakes = guard.handshakes,
                                              .connections_ended = guard.ended};
    td_rpc_guard_limits(server->guard, &ret_stats->max_connections,
                        &ret_stats->max_peer_connections);
}

uint32_t td_rpc_server_live_calls(const struct td_rpc_server *server)
{
    return atomic_load(&server->n_live);
}

static void set_serving(void *arg)
{
    struct td_rpc_server *server = arg;
    if (server->stopping) return;
    server->serving = true;
    td_rpc_health_changed(server);
}

static void set_not_serving(void *arg)
{
    struct td_rpc_server *server = arg;
    server->serving = false;
    td_rpc_health_changed(server);
}

void td_rpc_server_set_serving(struct td_rpc_server *server, bool serving)
{
    td_rpc_loop_post(server->loop, serving ? set_serving : set_not_serving, server);
}

static void set_ready(void *arg)
{
    struct td_rpc_server *server = arg;
    server->ready = true;
    td_rpc_health_changed(server);
}

static void set_not_ready(void *arg)
{
    struct td_rpc_server *server = arg;
    server->ready = false;
    td_rpc_health_changed(server);
}

void td_rpc_server_set_ready(struct td_rpc_server *server, bool ready)
{
    td_rpc_loop_post(server->loop, ready ? set_ready : set_not_ready, server);
}

static void on_shutdown(struct td_rpc_event *event, bool ok)
{
    (void)ok;
    struct td_rpc_server *server = td_rpc_container(event, struct td_rpc_server, ev_shutdown);
    pthread_mutex_lock(&server->mu_stop);
    server->shut_down = true;
    pthread_cond_signal(&server->cond_stop);
    pthread_mutex_unlock(&server->mu_stop);
}

static void drain_begin(void *arg)
{
    struct td_rpc_server *server = arg;
    server->serving = false;
    server->stopping = STOP_DRAIN;
    td_rpc_health_changed(server);
    pthread_mutex_lock(&server->mu_stop);
    server->draining = true;
    pthread_cond_signal(&server->cond_stop);
    pthread_mutex_unlock(&server->mu_stop);
}

static void builtin_end(void *arg)
{
    struct td_rpc_server *server = arg;
    server->stopping = STOP_BUILTIN;
    for (struct td_rpc_call *call = server->live; call; call = call->as_server.next_live)
        if (call->as_server.builtin)
            td_rpc_call_finish(call, TD_CODE_UNAVAILABLE, "the server is stopping", NULL, 0);
}

/* Once. Clients get GOAWAY; the port closes. */
static void go_away(struct td_rpc_server *server)
{
    if (server->goaway.is_done) return;
    server->goaway.is_done = true;
    td_rpc_timer_cancel(server->goaway.timer);
    server->goaway.timer = NULL;
    server->ev_shutdown.fn = on_shutdown;
    td_rpc_tag_release(&server->ev_shutdown);
    grpc_server_shutdown_and_notify(server->server, server->loop->cq, &server->ev_shutdown);
}

static void shut_down(void *arg)
{
    struct td_rpc_server *server = arg;
    server->stopping = STOP_SHUTDOWN;
    go_away(server);
    grpc_server_cancel_all_calls(server->server);
}

/* The calls that core read before the guard hid new ones come. */
static void away_tick(void *arg)
{
    struct td_rpc_server *server = arg;
    server->goaway.ticks++;
    server->goaway.quiet_ticks =
        server->incoming.n_taken == server->goaway.n_seen ? server->goaway.quiet_ticks + 1 : 0;
    server->goaway.n_seen = server->incoming.n_taken;
    if (td_rpc_guard_streams(server->guard) == server->incoming.n_taken ||
        server->goaway.quiet_ticks >= AWAY_QUIET_TICKS || server->goaway.ticks >= AWAY_MAX_TICKS)
        go_away(server);
}

static void look_at_lingering(void *arg)
{
    (void)arg;
    td_rpc_linger_look();
}

static void goaway_begin(void *arg)
{
    struct td_rpc_server *server = arg;
    server->serving = false;
    td_rpc_health_changed(server);
    if (server->goaway.is_done || server->goaway.timer) return;
    td_rpc_guard_hide_streams(server->guard);
    server->goaway.linger =
        td_rpc_timer_start(server->loop, TD_RPC_LINGER_LOOK_MS, look_at_lingering, NULL);
    if (td_rpc_guard_streams(server->guard) == server->incoming.n_taken)
        go_away(server);
    else
        server->goaway.timer = td_rpc_timer_start(server->loop, AWAY_TICK_MS, away_tick, server);
}

void td_rpc_server_goaway(struct td_rpc_server *server)
{
    td_rpc_probe_stop(server->probe); /* the port is closed on purpose */
    td_rpc_loop_post(server->loop, goaway_begin, server);
}

bool td_rpc_server_is_away(const struct td_rpc_server *server)
{
    return atomic_load(&server->goaway.is_done);
}

static void stop_last(void *arg)
{
    struct td_rpc_server *server = arg;
    td_rpc_timer_cancel(server->stall_timer);
    td_rpc_timer_cancel(server->goaway.linger);
    pthread_mutex_lock(&server->mu_stop);
    server->gone = true;
    pthread_cond_signal(&server->cond_stop);
    pthread_mutex_unlock(&server->mu_stop);
}

/* Waits until *n_calls is 0, at most until at_ns. */
static void wait_calls(struct td_rpc_server *server, atomic_uint *n_calls, uint64_t at_ns)
{
    struct timespec until = {(time_t)(at_ns / TD_NS_PER_S), (long)(at_ns % TD_NS_PER_S)};
    pthread_mutex_lock(&server->mu_stop);
    while (!server->draining) pthread_cond_wait(&server->cond_stop, &server->mu_stop);
    while (atomic_load(n_calls) &&
           pthread_cond_timedwait(&server->cond_stop, &server->mu_stop, &until) != ETIMEDOUT) {
    }
    pthread_mutex_unlock(&server->mu_stop);
}

void td_rpc_server_stop(struct td_rpc_server *server, uint32_t drain_ms)
{
    if (!server) return;
    struct td_rpc_loop *loop = server->loop;
    TD_ASSERT(!td_rpc_loop_is_current(loop));
    td_rpc_probe_stop(server->probe);
    td_rpc_loop_post(loop, drain_begin, server);
    wait_calls(server, &server->n_live, td_deadline_after_ms(td_now_ns(), drain_ms));
    td_rpc_loop_post(loop, builtin_end, server);
    wait_calls(server, &server->n_builtin,
               td_deadline_after_ms(td_now_ns(), TD_RPC_STOP_BUILTIN_MS));
    if (drain_ms) {
        atomic_uint never = 1;
        wait_calls(server, &never,
                   atomic_load(&server->last_end_ns) + TD_RPC_STOP_FLUSH_MS * TD_NS_PER_MS);
    }
    td_rpc_loop_post(loop, shut_down, server);
    pthread_mutex_lock(&server->mu_stop);
    while (server->n_calls || !server->shut_down)
        pthread_cond_wait(&server->cond_stop, &server->mu_stop);
    pthread_mutex_unlock(&server->mu_stop);
    td_rpc_loop_post(loop, stop_last, server);
    pthread_mutex_lock(&server->mu_stop);
    while (!server->gone) pthread_cond_wait(&server->cond_stop, &server->mu_stop);
    pthread_mutex_unlock(&server->mu_stop);
    free_server(server);
    td_rpc_linger_wait();
    atomic_fetch_sub(&loop->n_objects, 1);
}
