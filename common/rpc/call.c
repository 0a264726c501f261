/* call.c - what both sides of an RPC share: the queue of messages, sending, reading, and the end.
 *
 *   any thread                       loop thread
 *   send/finish/close/cancel  -->    drain -> td_rpc_call_pump: at most one send batch in flight,
 *     append under mu, mark            {[SEND_INITIAL_METADATA] [SEND_MESSAGE]
 *     dirty, ring once                  [SEND_STATUS | SEND_CLOSE]}
 *                                    ev_send:  the next batch
 *                                    ev_recv:  unpack, callback, the next RECV_MESSAGE
 *                                    ev_close: RECV_CLOSE_ON_SERVER or RECV_STATUS_ON_CLIENT
 *                                              -> closed
 *                                    closed and n_tags == 0
 *                                              -> ended: last callback, grpc_call_unref
 *
 * All start_batch calls are made on the loop thread, so no lock is held around core. mu is the
 * loop's mutex, held for a few lines at a time.
 *
 * Invariants: (1) a batch that core refuses is our bug (asserted), because metadata is checked
 * before; (2) queued_bytes counts queued and in-flight messages; (3) after `ended` nothing touches
 * call->call. */
#include <grpc/byte_buffer_reader.h>
#include <grpc/support/alloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/rpc/rpc_internal.h"
#include "common/rpc/scan.h"

#define SAME_CODE(name)                                                                            \
    _Static_assert((int)TD_CODE_##name == (int)GRPC_STATUS_##name, "td_code has gRPC's numbers")
SAME_CODE(OK);
SAME_CODE(CANCELLED);
SAME_CODE(UNKNOWN);
SAME_CODE(INVALID_ARGUMENT);
SAME_CODE(DEADLINE_EXCEEDED);
SAME_CODE(NOT_FOUND);
SAME_CODE(ALREADY_EXISTS);
SAME_CODE(PERMISSION_DENIED);
SAME_CODE(RESOURCE_EXHAUSTED);
SAME_CODE(FAILED_PRECONDITION);
SAME_CODE(ABORTED);
SAME_CODE(OUT_OF_RANGE);
SAME_CODE(UNIMPLEMENTED);
SAME_CODE(INTERNAL);
SAME_CODE(UNAVAILABLE);
SAME_CODE(DATA_LOSS);
SAME_CODE(UNAUTHENTICATED);

/* counted for each message, so that a queue of empty messages is bounded too */
enum { OUT_OVERHEAD_BYTES = 64 };

static void on_send(struct td_rpc_event *event, bool ok);
static void on_recv(struct td_rpc_event *event, bool ok);

struct td_rpc_call *td_rpc_call_new(struct td_rpc_loop *loop, bool is_server,
                                    uint32_t max_queued_bytes)
{
    struct td_rpc_call *call = td_rpc_alloc(sizeof *call);
    call->loop = loop;
    call->is_server = is_server;
    call->max_queued_bytes = max_queued_bytes;
    call->deadline_ns = TD_NEVER_NS;
    atomic_init(&call->n_refs, 1);
    call->asked.out_tail = &call->asked.out_head;
    call->ev_send.fn = on_send;
    call->ev_recv.fn = on_recv;
    grpc_metadata_array_init(&call->as_server.request_metadata);
    grpc_metadata_array_init(&call->as_client.recv_initial);
    grpc_metadata_array_init(&call->as_client.recv_trailing);
    call->as_client.status_details = grpc_empty_slice();
    atomic_fetch_add(&loop->n_objects, 1);
    return call;
}

static void free_outs(struct td_rpc_out *outs)
{
    while (outs) {
        struct td_rpc_out *out = outs;
        outs = out->next;
        grpc_slice_unref(out->slice);
        free(out);
    }
}

void td_rpc_call_ref(struct td_rpc_call *call) { atomic_fetch_add(&call->n_refs, 1); }

void td_rpc_call_unref(struct td_rpc_call *call)
{
    if (!call || atomic_fetch_sub(&call->n_refs, 1) != 1) return;
    TD_ASSERT(!call->asked.out_head && !call->call);
    free(call->asked.cancel_details);
    free(call->asked.end_details);
    free(call->peer);
    free(call->as_client.failure);
    free(call);
}

/* mu is held; true = the caller rings after it has released mu. */
static bool mark_dirty(struct td_rpc_call *call)
{
    if (call->asked.dirty) return false;
    struct td_rpc_loop *loop = call->loop;
    call->asked.dirty = true;
    td_rpc_call_ref(call);
    *loop->dirty_tail = call;
    loop->dirty_tail = &call->asked.next_dirty;
    return true;
}

void td_rpc_call_set_user(struct td_rpc_call *call, void *user) { call->user = user; }

void *td_rpc_call_user(const struct td_rpc_call *call) { return call->user; }

uint64_t td_rpc_call_remaining_ms(const struct td_rpc_call *call)
{
    if (call->deadline_ns == TD_NEVER_NS) return UINT64_MAX;
    uint64_t now = td_now_ns();
    return now >= call->deadline_ns ? 0 : (call->deadline_ns - now) / TD_NS_PER_MS;
}

const char *td_rpc_call_peer(const struct td_rpc_call *call)
{
    struct td_rpc_call *c = (struct td_rpc_call *)call; /* a cache filled on the loop thread */
    if (!c->peer) {
        if (!c->call) return "";
        char *peer = grpc_call_get_peer(c->call);
        c->peer = td_rpc_strdup(peer);
        gpr_free(peer);
    }
    return c->peer;
}

char *td_rpc_slice_string(grpc_slice slice)
{
    size_t n = GRPC_SLICE_LENGTH(slice);
    char *text = td_rpc_alloc(n + 1);
    memcpy(text, GRPC_SLICE_START_PTR(slice), n);
    return text;
}

grpc_metadata *td_rpc_metadata_copy(const struct td_rpc_metadata *pairs, size_t n_pairs,
                                    size_t *ret_n)
{
    *ret_n = 0;
    if (!n_pairs) return NULL;
    grpc_metadata *copy = td_rpc_alloc(n_pairs * sizeof *copy);
    size_t n = 0;
    for (size_t i = 0; i < n_pairs; i++) {
        grpc_slice key = grpc_slice_from_copied_string(pairs[i].key),
                   value = grpc_slice_from_copied_string(pairs[i].value);
        if (grpc_header_key_is_legal(key) &&
            (grpc_is_binary_header(key) || grpc_header_nonbin_value_is_legal(value))) {
            copy[n].key = key;
            copy[n++].value = value;
        } else {
            char text[128];
            td_warn_limited("rpc_metadata_dropped", "key=%s",
                            td_log_quote(text, sizeof text, pairs[i].key));
            grpc_slice_unref(key);
            grpc_slice_unref(value);
        }
    }
    *ret_n = n;
    return copy;
}

void td_rpc_metadata_free(grpc_metadata *pairs, size_t n_pairs)
{
    for (size_t i = 0; i < n_pairs; i++) {
        grpc_slice_unref(pairs[i].key);
        grpc_slice_unref(pairs[i].value);
    }
    free(pairs);
}

/* A status message that a peer can read: valid UTF-8, cut so that it fits the peer's metadata
 * limit. */
static char *copy_details(const char *details)
{
    char *copy = td_rpc_strdup(details ? details : "");
    size_t n = strlen(copy);
    if (n > TD_RPC_MAX_DETAILS_BYTES) {
        n = TD_RPC_MAX_DETAILS_BYTES;
        while (n && ((unsigned char)copy[n] & 0xc0) == 0x80) n--;
        copy[n] = 0;
    }
    if (!td_rpc_utf8_valid(copy, n))
        for (size_t i = 0; i < n; i++)
            if ((unsigned char)copy[i] >= 0x80) copy[i] = '?';
    return copy;
}

/* ---- any thread ------------------------------------------------------------------------------ */

/* mu held. */
static bool want_cancel(struct td_rpc_call *call, enum td_code code, const char *details)
{
    if (atomic_load(&call->over) || call->asked.cancel_wanted) return false;
    call->asked.cancel_wanted = true;
    call->asked.cancel_code = code;
    call->asked.cancel_details = copy_details(details);
    return mark_dirty(call);
}

void td_rpc_call_cancel_with(struct td_rpc_call *call, enum td_code code, const char *details)
{
    if (atomic_load(&call->over)) return;
    pthread_mutex_lock(&call->loop->mu);
    bool ring = want_cancel(call, code, details);
    pthread_mutex_unlock(&call->loop->mu);
    if (ring) td_rpc_loop_ring(call->loop);
}

void td_rpc_call_cancel(struct td_rpc_call *call)
{
    td_rpc_call_cancel_with(call, TD_CODE_CANCELLED,
                            call->is_server ? "cancelled by the server"
                                            : "cancelled by the client");
}

static struct td_rpc_out *new_out(size_t n_bytes)
{
    struct td_rpc_out *out = td_rpc_alloc(sizeof *out);
    out->slice = grpc_slice_malloc(n_bytes);
    out->bytes = n_bytes + OUT_OVERHEAD_BYTES;
    return out;
}

static struct td_rpc_out *pack(const ProtobufCMessage *msg)
{
    size_t n_bytes = protobuf_c_message_get_packed_size(msg);
    struct td_rpc_out *out = new_out(n_bytes);
    size_t packed = protobuf_c_message_pack(msg, GRPC_SLICE_START_PTR(out->slice));
    TD_ASSERT(packed == n_bytes);
    return out;
}

/* mu held. */
static void append(struct td_rpc_call *call, struct td_rpc_out *out)
{
    *call->asked.out_tail = out;
    call->asked.out_tail = &out->next;
    call->asked.queued_bytes += out->bytes;
}

void td_rpc_call_open(struct td_rpc_call *call, const ProtobufCMessage *request, bool last)
{
    struct td_rpc_out *out = request ? pack(request) : NULL;
    pthread_mutex_lock(&call->loop->mu);
    if (out) append(call, out);
    call->asked.end_wanted = last;
    mark_dirty(call);
    pthread_mutex_unlock(&call->loop->mu);
    td_rpc_loop_ring(call->loop);
}

/* Takes out over. */
static td_status send_out(struct td_rpc_call *call, struct td_rpc_out *out)
{
    td_status status = TD_OK;
    bool ring = false;
    pthread_mutex_lock(&call->loop->mu);
    if (atomic_load(&call->over) || call->asked.end_wanted || call->asked.cancel_wanted) {
        status = TD_ERR_CANCELLED;
    } else if (call->asked.queued_bytes &&
               call->asked.queued_bytes + out->bytes > call->max_queued_bytes) {
        char why[160];
        snprintf(why, sizeof why,
                 "the peer reads too slowly: %zu bytes are queued, the limit is %u",
                 call->asked.queued_bytes, call->max_queued_bytes);
        status = TD_ERR_LIMIT;
        ring = want_cancel(call, TD_CODE_RESOURCE_EXHAUSTED, why);
    } else {
        append(call, out);
        ring = mark_dirty(call);
        out = NULL;
    }
    pthread_mutex_unlock(&call->loop->mu);
    free_outs(out);
    if (ring) td_rpc_loop_ring(call->loop);
    return status;
}

td_status td_rpc_call_send(struct td_rpc_call *call, const ProtobufCMessage *msg)
{
    return atomic_load(&call->over) ? TD_ERR_CANCELLED : send_out(call, pack(msg));
}

td_status td_rpc_call_send_packed(struct td_rpc_call *call, const void *bytes, size_t n_bytes)
{
    if (atomic_load(&call->over)) return TD_ERR_CANCELLED;
    struct td_rpc_out *out = new_out(n_bytes);
    if (n_bytes) memcpy(GRPC_SLICE_START_PTR(out->slice), bytes, n_bytes);
    return send_out(call, out);
}

bool td_rpc_call_is_behind(struct td_rpc_call *call)
{
    pthread_mutex_lock(&call->loop->mu);
    bool is_behind = call->asked.queued_bytes > 0;
    pthread_mutex_unlock(&call->loop->mu);
    return is_behind;
}

void td_rpc_call_set_merged(struct td_rpc_call *call) { call->merged = true; }

void td_rpc_call_finish(struct td_rpc_call *call, enum td_code code, const char *details,
                        const struct td_rpc_metadata *trailing, size_t n_trailing)
{
    TD_ASSERT(call->is_server);
    if (atomic_load(&call->over)) return;
    size_t n;
    grpc_metadata *pairs = td_rpc_metadata_copy(trailing, n_trailing, &n);
    char *text = copy_details(details);
    bool ring = false;
    pthread_mutex_lock(&call->loop->mu);
    if (!atomic_load(&call->over) && !call->asked.end_wanted && !call->asked.cancel_wanted) {
        call->asked.end_wanted = true;
        call->asked.end_code = code;
        call->asked.end_details = text;
        call->asked.trailing = pairs;
        call->asked.n_trailing = n;
        text = NULL;
        pairs = NULL;
        ring = mark_dirty(call);
    }
    pthread_mutex_unlock(&call->loop->mu);
    free(text);
    if (pairs) td_rpc_metadata_free(pairs, n);
    if (ring) td_rpc_loop_ring(call->loop);
}

void td_rpc_call_close_send(struct td_rpc_call *call)
{
    TD_ASSERT(!call->is_server);
    if (atomic_load(&call->over)) return;
    pthread_mutex_lock(&call->loop->mu);
    bool ring = false;
    if (!call->asked.end_wanted) {
        call->asked.end_wanted = true;
        ring = mark_dirty(call);
    }
    pthread_mutex_unlock(&call->loop->mu);
    if (ring) td_rpc_loop_ring(call->loop);
}

/* ---- loop thread ----------------------------------------------------------------------------- */

void td_rpc_call_batch(struct td_rpc_call *call, const grpc_op *ops, size_t n_ops,
                       struct td_rpc_event *event)
{
    call->n_tags++;
    td_rpc_tag_release(event);
    grpc_call_error e = grpc_call_start_batch(call->call, ops, n_ops, event, NULL);
    TD_ASSERT(e == GRPC_CALL_OK);
}

/* mu is held. The whole queue. */
static struct td_rpc_out *take_all(struct td_rpc_call *call)
{
    struct td_rpc_out *all = call->asked.out_head;
    call->asked.out_head = NULL;
    call->asked.out_tail = &call->asked.out_head;
    return all;
}

/* mu is held. The messages to be sent next as one: the queue's first, or NULL, and those that may
 * be merged with it. *ret_end: our side ends after them. */
static struct td_rpc_out *take_next(struct td_rpc_call *call, bool *ret_end)
{
    struct td_rpc_out *first = call->asked.out_head, *last = first;
    if (first) {
        size_t n = 1, n_bytes = first->bytes;
        while (call->merged && last->next && n < TD_RPC_MAX_MERGED &&
               n_bytes + last->next->bytes <= TD_RPC_MAX_MERGED_BYTES) {
            last = last->next;
            n_bytes += last->bytes;
            n++;
        }
        call->asked.out_head = last->next;
        if (!last->next) call->asked.out_tail = &call->asked.out_head;
        last->next = NULL;
    }
    *ret_end = call->asked.end_wanted && !call->asked.out_head;
    return first;
}

static grpc_byte_buffer *buffer_of(const struct td_rpc_out *outs, size_t *ret_bytes)
{
    grpc_slice slices[TD_RPC_MAX_MERGED];
    size_t n = 0;
    *ret_bytes = 0;
    for (const struct td_rpc_out *o = outs; o; o = o->next) {
        slices[n++] = o->slice;
        *ret_bytes += o->bytes;
    }
    return grpc_raw_byte_buffer_create(slices, n);
}

/* The operation that ends our side: the status (server) or the half-close (client). *ret_details is
 * the status text, to be unreferenced after the batch was started. */
static void fill_end(struct td_rpc_call *call, grpc_op *op, grpc_slice *ret_details)
{
    call->end_sent = true;
    if (!call->is_server) {
        op->op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
        return;
    }
    *ret_details = grpc_slice_from_copied_string(call->asked.end_details);
    op->op = GRPC_OP_SEND_STATUS_FROM_SERVER;
    op->data.send_status_from_server.status = (grpc_status_code)call->asked.end_code;
    op->data.send_status_from_server.status_details = ret_details;
    op->data.send_status_from_server.trailing_metadata_count = call->asked.n_trailing;
    op->data.send_status_from_server.trailing_metadata = call->asked.trailing;
}

void td_rpc_call_pump(struct td_rpc_call *call)
{
    if (call->ended) return;
    if (!call->is_server && !call->as_client.started) td_rpc_client_begin(call);

    struct td_rpc_loop *loop = call->loop;
    struct td_rpc_out *out = NULL, *dropped = NULL;
    bool end = false;
    pthread_mutex_lock(&loop->mu);
    bool cancel = call->asked.cancel_wanted && !call->cancel_done && !call->closed;
    if (call->asked.cancel_wanted || call->closed)
        dropped = take_all(call);
    else if (!call->send_busy && !call->end_sent)
        out = take_next(call, &end);
    bool cancelled = call->asked.cancel_wanted;
    pthread_mutex_unlock(&loop->mu);
    free_outs(dropped);
    if (cancel) {
        call->cancel_done = true;
        grpc_call_cancel_with_status(call->call, (grpc_status_code)call->asked.cancel_code,
                                     call->asked.cancel_details, NULL);
    }
    if (cancelled || call->closed || call->send_busy || call->end_sent) return;
    if (!out && !end && (call->is_server || call->initial_sent)) return;

    grpc_op ops[3];
    memset(ops, 0, sizeof ops);
    size_t n = 0;
    if (!call->initial_sent) {
        call->initial_sent = true;
        ops[n].op = GRPC_OP_SEND_INITIAL_METADATA;
        ops[n].data.send_initial_metadata.count = call->as_client.n_initial;
        ops[n].data.send_initial_metadata.metadata = call->as_client.initial;
        if (call->as_client.wait_for_ready)
            ops[n].flags = GRPC_INITIAL_METADATA_WAIT_FOR_READY |
                           GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET;
        n++;
    }
    grpc_byte_buffer *buffer = NULL;
    if (out) {
        buffer = buffer_of(out, &call->inflight_bytes);
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        ops[n++].data.send_message.send_message = buffer;
    }
    grpc_slice details = grpc_empty_slice();
    if (end) fill_end(call, &ops[n++], &details);
    call->send_busy = true;
    call->send_started_ns = td_now_ns();
    td_rpc_call_batch(call, ops, n, &call->ev_send);
    if (buffer) grpc_byte_buffer_destroy(buffer);
    grpc_slice_unref(details);
    free_outs(out);
}

static void on_send(struct td_rpc_event *event, bool ok)
{
    struct td_rpc_call *call = td_rpc_container(event, struct td_rpc_call, ev_send);
    call->n_tags--;
    call->send_busy = false;
    if (!ok) call->end_sent = true; /* the call is dead; ev_close brings the reason */
    pthread_mutex_lock(&call->loop->mu);
    call->asked.queued_bytes -= call->inflight_bytes;
    bool caught_up = ok && call->asked.queued_bytes == 0 && call->inflight_bytes;
    pthread_mutex_unlock(&call->loop->mu);
    call->inflight_bytes = 0;
    if (caught_up) td_rpc_server_caught_up(call);
    td_rpc_call_pump(call);
    td_rpc_call_check_end(call);
}

void td_rpc_call_read(struct td_rpc_call *call)
{
    grpc_op ops[2];
    memset(ops, 0, sizeof ops);
    size_t n = 0;
    if (!call->is_server && !call->as_client.initial_received) {
        call->as_client.initial_received = true;
        ops[n].op = GRPC_OP_RECV_INITIAL_METADATA;
        ops[n++].data.recv_initial_metadata.recv_initial_metadata = &call->as_client.recv_initial;
    }
    ops[n].op = GRPC_OP_RECV_MESSAGE;
    ops[n++].data.recv_message.recv_message = &call->recv_buffer;
    td_rpc_call_batch(call, ops, n, &call->ev_recv);
}

static td_status scan_and_unpack(struct td_rpc_call *call, const ProtobufCMessageDescriptor *type,
                                 grpc_slice slice, size_t max, const ProtobufCMessage **ret_msg,
                                 struct td_err *err)
{
    const uint8_t *bytes = GRPC_SLICE_START_PTR(slice);
    size_t n_bytes = GRPC_SLICE_LENGTH(slice);
    td_status status = call->is_server ? td_rpc_scan(type, call->as_server.method->field_limits,
                                                     bytes, n_bytes, err)
                                       : TD_OK;
    return status ? status
                  : td_rpc_unpack(&call->loop->unpacker, type, bytes, n_bytes, max, ret_msg, err);
}

static td_status unpack(struct td_rpc_call *call, grpc_byte_buffer *buffer,
                        const ProtobufCMessage **ret_msg, struct td_err *err)
{
    const ProtobufCMessageDescriptor *type =
        call->is_server ? call->as_server.method->request : call->as_client.method->response;
    size_t max =
        call->is_server ? call->as_server.server->limits.max_unpack_bytes : (size_t)1 << 30;
    if (buffer->type == GRPC_BB_RAW && buffer->data.raw.compression == GRPC_COMPRESS_NONE &&
        buffer->data.raw.slice_buffer.count == 1) {
        return scan_and_unpack(call, type, buffer->data.raw.slice_buffer.slices[0], max, ret_msg,
                               err);
    }
    grpc_byte_buffer_reader reader;
    if (!grpc_byte_buffer_reader_init(&reader, buffer))
        return td_fail(err, TD_ERR_INVALID, "%s: unreadable message", type->name);
    grpc_slice slice = grpc_byte_buffer_reader_readall(&reader);
    td_status status = scan_and_unpack(call, type, slice, max, ret_msg, err);
    grpc_slice_unref(slice);
    grpc_byte_buffer_reader_destroy(&reader);
    return status;
}

static bool wants_more(struct td_rpc_call *call)
{
    if (!call->is_server) return true; /* a NULL message is the end of the stream */
    if (call->closed || !call->as_server.method->client_streaming) return false;
    pthread_mutex_lock(&call->loop->mu);
    bool ending = call->asked.end_wanted || call->asked.cancel_wanted;
    pthread_mutex_unlock(&call->loop->mu);
    return !ending;
}

static void on_recv(struct td_rpc_event *event, bool ok)
{
    struct td_rpc_call *call = td_rpc_container(event, struct td_rpc_call, ev_recv);
    grpc_byte_buffer *buffer = call->recv_buffer;
    call->recv_buffer = NULL;
    call->n_tags--;
    if (!buffer) {
        if (call->is_server && !call->closed) {
            if (!ok) /* core has normally failed the call already; if it has not, this does */
                td_rpc_call_finish(call, TD_CODE_RESOURCE_EXHAUSTED,
                                   "message over the server's limit", NULL, 0);
            else if (!grpc_call_failed_before_recv_message(call->call))
                td_rpc_server_message(call, NULL);
        }
        td_rpc_call_check_end(call);
        return;
    }
    const ProtobufCMessage *msg;
    struct td_err err = {0};
    bool wanted = !call->is_server || !call->closed; /* a cancelled request is not begun */
    if (wanted) {
        if (unpack(call, buffer, &msg, &err) == TD_OK) {
            if (call->is_server)
                td_rpc_server_message(call, msg);
            else if (call->as_client.handler->on_message && !call->as_client.failure)
                call->as_client.handler->on_message(call, msg, call->user);
            td_rpc_unpack_reset(&call->loop->unpacker);
        } else if (call->is_server) {
            td_rpc_server_bad_message(call, &err);
        } else {
            td_rpc_client_bad_message(call, &err);
        }
    }
    grpc_byte_buffer_destroy(buffer);
    if (wants_more(call)) td_rpc_call_read(call);
    td_rpc_call_check_end(call);
}

void td_rpc_call_check_end(struct td_rpc_call *call)
{
    if (call->ended || !call->closed || call->n_tags) return;
    call->ended = true;
    struct td_rpc_server *server = call->as_server.server;
    struct td_rpc_channel *channel = call->as_client.channel;
    struct td_rpc_loop *loop = call->loop;
    pthread_mutex_lock(&loop->mu);
    struct td_rpc_out *dropped = call->asked.out_head;
    call->asked.out_head = NULL;
    call->asked.out_tail = &call->asked.out_head;
    pthread_mutex_unlock(&loop->mu);
    free_outs(dropped);

    if (call->is_server)
        td_rpc_server_end(call);
    else
        td_rpc_client_end(call);

    grpc_call_unref(call->call);
    call->call = NULL;
    grpc_metadata_array_destroy(&call->as_server.request_metadata);
    grpc_metadata_array_destroy(&call->as_client.recv_initial);
    grpc_metadata_array_destroy(&call->as_client.recv_trailing);
    grpc_slice_unref(call->as_client.status_details);
    td_rpc_metadata_free(call->asked.trailing, call->asked.n_trailing);
    td_rpc_metadata_free(call->as_client.initial, call->as_client.n_initial);
    atomic_fetch_sub(&loop->n_objects, 1);
    td_rpc_call_unref(call);
    if (server) td_rpc_server_release(server);
    if (channel) td_rpc_channel_unref(channel);
}
