/* client.c - channels, and the client's part of a call (call.c has the rest).
 *
 * Any thread makes a call as a request in a queue. The loop thread creates the grpc_call, starts
 * {RECV_STATUS} and {RECV_INITIAL_METADATA, RECV_MESSAGE}, and then reads until the end of the
 * stream. on_done runs when the status and every other tag are back, so all messages come before
 * it. */
#include <grpc/support/alloc.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/rpc/rpc_internal.h"

struct td_rpc_channel {
    struct td_rpc_loop *loop;
    grpc_channel *channel; /* loop thread, once made */
    atomic_uint n_refs;    /* one for the owner and one per call */
    char *target, *server_name;
    int max_message_bytes, keepalive_ms;
    struct td_rpc_tls_files *tls; /* loop thread; NULL = plaintext */
    struct td_rpc_timer *tls_timer;
};

enum {
    CONNECT_MS = 5000,
    BACKOFF_FIRST_MS = 100,
    BACKOFF_MAX_MS = 1000,
    TLS_LOOK_MS = 1000,
    AHEAD_BYTES = 256 << 10, /* of one stream, not taken yet */
};

/* Makes a core channel and takes over creds. */
static grpc_channel *make_channel(const struct td_rpc_channel *c, grpc_channel_credentials *creds)
{
    const struct {
        const char *key;
        int value;
    } ints[] = {
        {GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, c->max_message_bytes},
        {GRPC_ARG_MAX_METADATA_SIZE, TD_RPC_MAX_METADATA_BYTES},
        {"grpc.compression_enabled_algorithms_bitset", 1},
        {GRPC_ARG_ENABLE_HTTP_PROXY, 0},
        {GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1},
        {GRPC_ARG_ENABLE_RETRIES, 0},
        {GRPC_ARG_ENABLE_CHANNELZ, 0},
        /* one channel = one connection, so that control calls do not queue behind streams */
        {GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1},
        {GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, BACKOFF_FIRST_MS},
        /* in gRPC core 1.51 this is the time that one connect and handshake may take */
        {GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, CONNECT_MS},
        {GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, BACKOFF_MAX_MS},
        {GRPC_ARG_KEEPALIVE_TIME_MS, c->keepalive_ms},
        {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, c->keepalive_ms},
        {GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1},
        {GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0},
        /* Core would let a peer send megabytes ahead, and reads sockets (keepalive's answers among
         * them) only when all that it has read is taken. A loop that is behind would look dead. */
        {GRPC_ARG_HTTP2_BDP_PROBE, 0},
        {GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, AHEAD_BYTES},
    };
    enum { N_INTS = sizeof ints / sizeof *ints };
    grpc_arg args[N_INTS + 1];
    size_t n = 0;
    for (; n < N_INTS; n++)
        args[n] = (grpc_arg){
            .type = GRPC_ARG_INTEGER, .key = (char *)ints[n].key, .value.integer = ints[n].value};
    if (c->server_name)
        args[n++] = (grpc_arg){.type = GRPC_ARG_STRING,
                               .key = (char *)GRPC_SSL_TARGET_NAME_OVERRIDE_ARG,
                               .value.string = c->server_name};
    grpc_channel_args channel_args = {n, args};
    grpc_channel *channel = grpc_channel_create(c->target, creds, &channel_args);
    grpc_channel_credentials_release(creds);
    return channel;
}

/* Calls in progress keep the old core channel alive; its connection closes after the last of
 * them. */
static void look_at_files(void *arg)
{
    struct td_rpc_channel *channel = arg;
    grpc_channel_credentials *creds = td_rpc_tls_client_changed(channel->tls);
    if (!creds) return;
    grpc_channel *fresh = make_channel(channel, creds);
    if (!fresh) return;
    grpc_channel_destroy(channel->channel);
    channel->channel = fresh;
}

static void free_channel(struct td_rpc_channel *channel)
{
    if (channel->channel) grpc_channel_destroy(channel->channel);
    td_rpc_tls_files_destroy(channel->tls);
    free(channel->target);
    free(channel->server_name);
    free(channel);
}

td_status td_rpc_channel_create(const struct td_rpc_channel_config *config,
                                struct td_rpc_channel **ret_channel, struct td_err *err)
{
    struct td_rpc_channel *c = td_rpc_alloc(sizeof *c);
    grpc_channel_credentials *creds;
    c->loop = config->loop;
    c->target = td_rpc_strdup(config->target);
    c->max_message_bytes =
        (int)(config->max_message_bytes ? config->max_message_bytes : TD_RPC_DEFAULT_MESSAGE_BYTES);
    c->keepalive_ms =
        (int)(config->keepalive_ms ? config->keepalive_ms : TD_RPC_CHANNEL_KEEPALIVE_MS);
    atomic_init(&c->n_refs, 1);
    if (config->tls) {
        if (config->tls->server_name) c->server_name = td_rpc_strdup(config->tls->server_name);
        td_status status = td_rpc_tls_client(config->tls, &c->tls, &creds, err);
        if (status) {
            free_channel(c);
            return status;
        }
    } else {
        creds = grpc_insecure_credentials_create();
    }
    c->channel = make_channel(c, creds);
    if (!c->channel) {
        free_channel(c);
        return td_fail(err, TD_ERR_INVALID, "rpc channel: target \"%s\" is not usable",
                       config->target);
    }
    atomic_fetch_add(&c->loop->n_objects, 1);
    if (c->tls) c->tls_timer = td_rpc_timer_start(c->loop, TLS_LOOK_MS, look_at_files, c);
    *ret_channel = c;
    return TD_OK;
}

void td_rpc_channel_unref(struct td_rpc_channel *channel)
{
    if (atomic_fetch_sub(&channel->n_refs, 1) != 1) return;
    atomic_fetch_sub(&channel->loop->n_objects, 1);
    free_channel(channel);
}

static void close_tls_channel(void *arg)
{
    struct td_rpc_channel *channel = arg;
    td_rpc_timer_cancel(channel->tls_timer);
    td_rpc_channel_unref(channel);
}

void td_rpc_channel_destroy(struct td_rpc_channel *channel)
{
    if (!channel) return;
    if (channel->tls) /* the timer is the loop's */
        td_rpc_loop_post(channel->loop, close_tls_channel, channel);
    else
        td_rpc_channel_unref(channel);
}

static void on_status(struct td_rpc_event *event, bool ok)
{
    (void)ok; /* always true: failures come as a status */
    struct td_rpc_call *call = td_rpc_container(event, struct td_rpc_call, ev_close);
    call->n_tags--;
    call->closed = true;
    pthread_mutex_lock(&call->loop->mu);
    atomic_store(&call->over, true);
    pthread_mutex_unlock(&call->loop->mu);
    td_rpc_call_check_end(call);
}

void td_rpc_client_begin(struct td_rpc_call *call)
{
    call->as_client.started = true;
    gpr_timespec deadline = gpr_inf_future(GPR_CLOCK_MONOTONIC);
    if (call->deadline_ns != TD_NEVER_NS) {
        uint64_t now = td_now_ns(), left = call->deadline_ns > now ? call->deadline_ns - now : 0;
        deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                gpr_time_from_nanos((int64_t)left, GPR_TIMESPAN));
    }
    grpc_slice path = grpc_slice_from_copied_string(call->as_client.method->path);
    call->call =
        grpc_channel_create_call(call->as_client.channel->channel, NULL, GRPC_PROPAGATE_DEFAULTS,
                                 call->loop->cq, path, NULL, deadline, NULL);
    grpc_slice_unref(path);
    grpc_op op;
    memset(&op, 0, sizeof op);
    op.op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    op.data.recv_status_on_client.trailing_metadata = &call->as_client.recv_trailing;
    op.data.recv_status_on_client.status = &call->as_client.status;
    op.data.recv_status_on_client.status_details = &call->as_client.status_details;
    td_rpc_call_batch(call, &op, 1, &call->ev_close);
    td_rpc_call_read(call);
}

void td_rpc_client_bad_message(struct td_rpc_call *call, const struct td_err *err)
{
    if (call->as_client.failure) return;
    call->as_client.failure = td_rpc_strdup(err->msg);
    td_rpc_call_cancel_with(call, TD_CODE_INTERNAL, err->msg);
}

void td_rpc_client_end(struct td_rpc_call *call)
{
    size_t n = call->as_client.recv_trailing.count;
    struct td_rpc_metadata *trailing = n ? td_rpc_alloc(n * sizeof *trailing) : NULL;
    for (size_t i = 0; i < n; i++) {
        trailing[i].key = td_rpc_slice_string(call->as_client.recv_trailing.metadata[i].key);
        trailing[i].value = td_rpc_slice_string(call->as_client.recv_trailing.metadata[i].value);
    }
    char *details = td_rpc_slice_string(call->as_client.status_details);
    struct td_rpc_result result = {(enum td_code)call->as_client.status, details, trailing, n};
    if (call->as_client.failure) {
        result.code = TD_CODE_INTERNAL;
        result.details = call->as_client.failure;
    }
    call->as_client.handler->on_done(call, &result, call->user);
    free(details);
    for (size_t i = 0; i < n; i++) {
        free((char *)trailing[i].key);
        free((char *)trailing[i].value);
    }
    free(trailing);
}

struct td_rpc_call *td_rpc_call_start_ref(struct td_rpc_channel *channel,
                                          const struct td_rpc_client_method *method,
                                          const ProtobufCMessage *request, uint64_t deadline_ms,
                                          bool wait_for_ready,
                                          const struct td_rpc_metadata *metadata, size_t n_metadata,
                                          const struct td_rpc_handler *handler, void *user)
{
    TD_ASSERT(request || method->client_streaming);
    struct td_rpc_call *call = td_rpc_call_new(channel->loop, false, TD_RPC_DEFAULT_QUEUED_BYTES);
    atomic_fetch_add(&channel->n_refs, 1);
    call->as_client.channel = channel;
    call->as_client.method = method;
    call->as_client.handler = handler;
    call->user = user;
    call->as_client.wait_for_ready = wait_for_ready;
    if (deadline_ms) call->deadline_ns = td_deadline_after_ms(td_now_ns(), deadline_ms);
    call->as_client.initial =
        td_rpc_metadata_copy(metadata, n_metadata, &call->as_client.n_initial);
    call->ev_close.fn = on_status;
    td_rpc_call_ref(call);
    td_rpc_call_open(call, request, !method->client_streaming);
    return call;
}

struct td_rpc_call *td_rpc_call_start(struct td_rpc_channel *channel,
                                      const struct td_rpc_client_method *method,
                                      const ProtobufCMessage *request, uint64_t deadline_ms,
                                      bool wait_for_ready, const struct td_rpc_metadata *metadata,
                                      size_t n_metadata, const struct td_rpc_handler *handler,
                                      void *user)
{
    struct td_rpc_call *call = td_rpc_call_start_ref(
        channel, method, request, deadline_ms, wait_for_ready, metadata, n_metadata, handler, user);
    td_rpc_call_unref(call);
    return call;
}
