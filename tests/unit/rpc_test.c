/* rpc_test.c - common/rpc against itself over loopback: one process, a server loop and a client
 * loop.
 *
 * The messages are project messages used as boxes: Ticket {slot, grant, cached_tokens, queue_us}
 * for numbers and bytes, AbortRequest for text. What other implementations see is tested in
 * rpc_interop_test.py. */
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <grpc/grpc.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/rpc/rpc.h"
#include "common/rpc/scan.h"
#include "common/rpc/unpack.h"
#include "grpc/health/v1/health.pb-c.h"
#include "grpc/reflection/v1/reflection.pb-c.h"
#include "tandem/v1/inference.pb-c.h"
#include "tandem/v1/worker.pb-c.h"

typedef Tandem__V1__Ticket ticket_t;
#define TICKET_INIT TANDEM__V1__TICKET__INIT
#define TICKET &tandem__v1__ticket__descriptor

enum { WAIT_S = 30 };

/* ---- a gate: a count that a test waits for --------------------------------------------------- */

struct gate {
    pthread_mutex_t mu;
    pthread_cond_t cond;
    int count;
};
#define GATE_INIT                                                                                  \
    {                                                                                              \
        PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0                                     \
    }

static void gate_add(struct gate *g, int n)
{
    pthread_mutex_lock(&g->mu);
    g->count += n;
    pthread_cond_broadcast(&g->cond);
    pthread_mutex_unlock(&g->mu);
}

static bool gate_wait(struct gate *g, int at_least)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += WAIT_S;
    pthread_mutex_lock(&g->mu);
    int rc = 0;
    while (g->count < at_least && rc == 0) rc = pthread_cond_timedwait(&g->cond, &g->mu, &until);
    bool reached = g->count >= at_least;
    pthread_mutex_unlock(&g->mu);
    return reached;
}

static int gate_count(struct gate *g)
{
    pthread_mutex_lock(&g->mu);
    int n = g->count;
    pthread_mutex_unlock(&g->mu);
    return n;
}

/* ---- the server under test ------------------------------------------------------------------- */

struct fixture {
    struct td_rpc_loop *server_loop, *client_loop;
    struct td_rpc_server *server;
    struct td_rpc_channel *channel;
    struct gate opened, ended, cancelled, blocked, release, flood_over;
    atomic_int flood_status;
    atomic_uint_least64_t remaining_ms;
    char seen_peer[64], seen_metadata[64];
    struct td_rpc_call *held; /* of the call that threads send on */
    atomic_uint n_merged_messages, n_merged_calls; /* of Merge; its calls came in order */
    atomic_bool merged_in_order;
};

static void on_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)call;
    struct fixture *f = ctx;
    if (cancelled) gate_add(&f->cancelled, 1);
    gate_add(&f->ended, 1);
}

static void on_echo(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)ctx;
    td_rpc_call_send(call, msg);
    td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
    td_rpc_call_finish(call, TD_CODE_INTERNAL, "the second finish is ignored", NULL, 0);
    assert_int_equal(td_rpc_call_send(call, msg), TD_ERR_CANCELLED);
}

static void on_count(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)ctx;
    uint32_t n = ((const ticket_t *)(const void *)msg)->slot;
    for (uint32_t i = 0; i < n; i++) {
        ticket_t t = TICKET_INIT;
        t.slot = i;
        assert_int_equal(td_rpc_call_send(call, &t.base), TD_OK);
    }
    struct td_rpc_metadata trailing = {"tandem-ledger", "a=1,b=2"};
    td_rpc_call_finish(call, TD_CODE_OK, NULL, &trailing, 1);
}

static void on_chat(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)ctx;
    if (msg)
        td_rpc_call_send(call, msg);
    else
        td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
}

static void on_hang_open(struct td_rpc_call *call, void *ctx)
{
    struct fixture *f = ctx;
    snprintf(f->seen_peer, sizeof f->seen_peer, "%s", td_rpc_call_peer(call));
    const char *value = td_rpc_call_metadata(call, "x-test");
    snprintf(f->seen_metadata, sizeof f->seen_metadata, "%s", value ? value : "(none)");
    atomic_store(&f->remaining_ms, td_rpc_call_remaining_ms(call));
    assert_null(td_rpc_call_metadata(call, "x-absent"));
    gate_add(&f->opened, 1);
}

static void on_hang(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)call;
    (void)msg;
    (void)ctx;
}

/* slot = status code; text in Greek, and metadata of which one pair is not legal and must be
 * dropped */
static void on_fail(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)ctx;
    struct td_rpc_metadata trailing[] = {
        {"retry-delay-ms", "250"}, {"Bad Key", "x"}, {"x-last", "one"}};
    td_rpc_call_finish(call, (enum td_code)((const ticket_t *)(const void *)msg)->slot,
                       "\xce\xb1\xce\xb2\xce\xb3: limit 100%", trailing, 3);
}

static void on_server_cancel(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)msg;
    (void)ctx;
    td_rpc_call_cancel(call);
}

static void on_block(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)call;
    (void)msg;
    struct fixture *f = ctx;
    gate_add(&f->blocked, 1);
    assert_true(gate_wait(&f->release, 1));
}

/* A producer that never waits: 64 KiB messages until send refuses. slot = at most so many. */
static void *flood_main(void *arg)
{
    struct fixture *f = arg;
    static uint8_t bytes[65536];
    ticket_t t = TICKET_INIT;
    t.grant = (ProtobufCBinaryData){sizeof bytes, bytes};
    td_status status = TD_OK;
    for (int i = 0; i < 20000 && status == TD_OK; i++) status = td_rpc_call_send(f->held, &t.base);
    atomic_store(&f->flood_status, status);
    td_rpc_call_unref(f->held);
    gate_add(&f->flood_over, 1);
    return NULL;
}

/* Counts the messages and the calls in them; answers when our peer has sent all. */
static void on_merge(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    struct fixture *f = ctx;
    const Tandem__V1__MultiplexUp *up = (const void *)msg;
    if (!up) {
        td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
        return;
    }
    f->n_merged_messages++;
    for (size_t i = 0; i < up->n_calls; i++)
        if (up->calls[i]->id != f->n_merged_calls++) f->merged_in_order = false;
}

static void on_flood(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    struct fixture *f = ctx;
    static uint8_t bytes[65536];
    uint32_t n = ((const ticket_t *)(const void *)msg)->slot;
    if (n == 0) {
        td_rpc_call_ref(call);
        f->held = call;
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, flood_main, f), 0);
        pthread_detach(thread);
        return;
    }
    ticket_t t = TICKET_INIT;
    t.grant = (ProtobufCBinaryData){sizeof bytes, bytes};
    for (uint32_t i = 0; i < n; i++) assert_int_equal(td_rpc_call_send(call, &t.base), TD_OK);
    td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
}

/* Four threads send on one call; the last one finishes it. slot = messages per thread, queue_us
 * = which thread. */
struct senders {
    struct td_rpc_call *call;
    uint32_t n;
    atomic_int left;
};

static void *sender_main(void *arg)
{
    struct senders *s = arg;
    static atomic_uint next;
    uint32_t who = atomic_fetch_add(&next, 1);
    for (uint32_t i = 0; i < s->n; i++) {
        ticket_t t = TICKET_INIT;
        t.slot = i;
        t.queue_us = who % 4;
        td_rpc_call_send(s->call, &t.base);
    }
    bool last = atomic_fetch_sub(&s->left, 1) == 1;
    if (last) td_rpc_call_finish(s->call, TD_CODE_OK, NULL, NULL, 0);
    td_rpc_call_unref(s->call);
    if (last) free(s);
    return NULL;
}

static void on_threads(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)ctx;
    struct senders *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->call = call;
    s->n = ((const ticket_t *)(const void *)msg)->slot;
    atomic_init(&s->left, 4);
    for (int i = 0; i < 4; i++) {
        pthread_t thread;
        td_rpc_call_ref(call);
        assert_int_equal(pthread_create(&thread, NULL, sender_main, s), 0);
        pthread_detach(thread);
    }
}

#define METHOD(name, type, streams, message, open)                                                 \
    {                                                                                              \
        .path = "/test.Rpc/" name, .request = type, .client_streaming = streams,                   \
        .on_message = message, .on_end = on_end, .on_open = open,                                  \
    }
static const struct td_rpc_method test_methods[] = {
    METHOD("Echo", TICKET, false, on_echo, NULL),
    METHOD("Count", TICKET, false, on_count, NULL),
    METHOD("Chat", TICKET, true, on_chat, NULL),
    METHOD("Hang", TICKET, false, on_hang, on_hang_open),
    METHOD("HangChat", TICKET, true, on_hang, on_hang_open),
    METHOD("Fail", TICKET, false, on_fail, NULL),
    METHOD("ServerCancel", TICKET, false, on_server_cancel, NULL),
    METHOD("Block", TICKET, false, on_block, NULL),
    METHOD("Flood", TICKET, false, on_flood, NULL),
    METHOD("Threads", TICKET, false, on_threads, NULL),
    METHOD("Merge", &tandem__v1__multiplex_up__descriptor, true, on_merge, NULL),
    METHOD("Text", &tandem__v1__abort_request__descriptor, false, on_echo, NULL),
    METHOD("Workers", &tandem__v1__status_response__descriptor, false, on_echo, NULL),
    {0},
};
static const struct td_rpc_method *const test_services[] = {test_methods, NULL};

static struct fixture *start_with(struct td_rpc_limits limits, const char *address,
                                  uint32_t keepalive_ms)
{
    struct fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    struct gate zero = GATE_INIT;
    f->opened = f->ended = f->cancelled = f->blocked = f->release = f->flood_over = zero;
    struct td_err err = {0};
    assert_int_equal(td_rpc_loop_create("server", &f->server_loop, &err), TD_OK);
    assert_int_equal(td_rpc_loop_create("client", &f->client_loop, &err), TD_OK);
    struct td_rpc_server_config sc = {.loop = f->server_loop,
                                      .address = address,
                                      .services = test_services,
                                      .limits = limits,
                                      .reflection = true,
                                      .keepalive_ms = keepalive_ms,
                                      .ctx = f};
    assert_int_equal(td_rpc_server_start(&sc, &f->server, &err), TD_OK);
    char target[64];
    snprintf(target, sizeof target, "127.0.0.1:%d", td_rpc_server_port(f->server));
    struct td_rpc_channel_config cc = {.loop = f->client_loop,
                                       .target = strncmp(address, "unix:", 5) ? target : address,
                                       .keepalive_ms = keepalive_ms};
    assert_int_equal(td_rpc_channel_create(&cc, &f->channel, &err), TD_OK);
    return f;
}

static struct fixture *start(void)
{
    return start_with((struct td_rpc_limits){0}, "127.0.0.1:0", 0);
}

static void stop(struct fixture *f)
{
    td_rpc_channel_destroy(f->channel);
    td_rpc_server_stop(f->server, 0);
    td_rpc_loop_destroy(f->client_loop);
    td_rpc_loop_destroy(f->server_loop);
    free(f);
}

/* ---- a client call whose outcome is kept ----------------------------------------------------- */

struct outcome {
    struct gate messages, done;
    uint32_t next_slot[4]; /* per thread of Threads; [0] for the others */
    bool in_order;
    struct gate *hold; /* on_message waits here first */
    uint8_t *bytes;    /* of the last message's grant */
    size_t n_bytes;
    atomic_int last_status; /* health */
    enum td_code code;
    char details[4096];
    char trailing[2][64];
    size_t n_trailing;
    atomic_int n_done;
};

static void outcome_init(struct outcome *o)
{
    struct gate zero = GATE_INIT;
    memset(o, 0, sizeof *o);
    o->messages = o->done = zero;
    o->in_order = true;
}

static void keep_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    struct outcome *o = user;
    assert_ptr_equal(td_rpc_call_user(call), user);
    if (o->hold) gate_wait(o->hold, 1);
    if (msg->descriptor == &tandem__v1__ticket__descriptor) {
        const ticket_t *t = (const void *)msg;
        if (t->slot != o->next_slot[t->queue_us % 4]++) o->in_order = false;
        free(o->bytes);
        o->bytes = malloc(t->grant.len + 1);
        assert_non_null(o->bytes);
        if (t->grant.len) memcpy(o->bytes, t->grant.data, t->grant.len);
        o->n_bytes = t->grant.len;
    } else if (msg->descriptor == &grpc__health__v1__health_check_response__descriptor) {
        o->last_status = ((const Grpc__Health__V1__HealthCheckResponse *)(const void *)msg)->status;
    }
    gate_add(&o->messages, 1);
}

static void keep_result(struct td_rpc_call *call, const struct td_rpc_result *result, void *user)
{
    (void)call;
    struct outcome *o = user;
    assert_int_equal(atomic_fetch_add(&o->n_done, 1), 0);
    o->code = result->code;
    snprintf(o->details, sizeof o->details, "%s", result->details);
    o->n_trailing = 0;
    for (size_t i = 0; i < result->n_trailing; i++) {
        const struct td_rpc_metadata *m = &result->trailing[i];
        if (strcmp(m->key, "tandem-ledger") == 0 || strcmp(m->key, "retry-delay-ms") == 0 ||
            strcmp(m->key, "x-last") == 0)
            if (o->n_trailing < 2)
                snprintf(o->trailing[o->n_trailing++], sizeof o->trailing[0], "%.30s=%.30s", m->key,
                         m->value);
    }
    gate_add(&o->done, 1);
}

static const struct td_rpc_handler keep = {keep_message, keep_result};

static void check_done(struct outcome *o, enum td_code code)
{
    assert_true(gate_wait(&o->done, 1));
    if (o->code != code)
        print_error("status %d \"%s\" after %d messages, expected %d\n", o->code, o->details,
                    gate_count(&o->messages), code);
    assert_int_equal(o->code, code);
}

static void outcome_free(struct outcome *o)
{
    free(o->bytes);
    o->bytes = NULL;
}

static void call(struct fixture *f, const char *path, uint32_t slot, uint64_t deadline_ms,
                 struct outcome *o)
{
    struct td_rpc_client_method m = {path, TICKET, false};
    ticket_t t = TICKET_INIT;
    t.slot = slot;
    outcome_init(o);
    struct td_rpc_call *c =
        td_rpc_call_start_ref(f->channel, &m, &t.base, deadline_ms, false, NULL, 0, &keep, o);
    /* the method struct is on the stack: wait here unless the caller holds the call itself */
    gate_wait(&o->done, 1);
    td_rpc_call_unref(c);
}

static const struct td_rpc_client_method hang_method = {"/test.Rpc/Hang", TICKET, false};
static const struct td_rpc_client_method hang_chat_method = {"/test.Rpc/HangChat", TICKET, true};
static const struct td_rpc_client_method chat_method = {"/test.Rpc/Chat", TICKET, true};
static const struct td_rpc_client_method echo_method = {"/test.Rpc/Echo", TICKET, false};
static const struct td_rpc_client_method flood_method = {"/test.Rpc/Flood", TICKET, false};

static struct td_rpc_call *begin(struct fixture *f, const struct td_rpc_client_method *m,
                                 uint64_t deadline_ms, struct outcome *o)
{
    ticket_t t = TICKET_INIT;
    outcome_init(o);
    return td_rpc_call_start_ref(f->channel, m, m->client_streaming ? NULL : &t.base, deadline_ms,
                                 false, NULL, 0, &keep, o);
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void test_unary(void **state)
{
    (void)state;
    struct fixture *f = start();
    for (size_t n = 0; n <= 1 << 20; n = n ? n * 4 : 1) {
        struct outcome o;
        ticket_t t = TICKET_INIT;
        uint8_t *bytes = malloc(n + 1);
        for (size_t i = 0; i < n; i++) bytes[i] = (uint8_t)(i * 31 + n);
        t.grant = (ProtobufCBinaryData){n, bytes};
        outcome_init(&o);
        td_rpc_call_start(f->channel, &echo_method, &t.base, 10000, false, NULL, 0, &keep, &o);
        check_done(&o, TD_CODE_OK);
        assert_int_equal(gate_count(&o.messages), 1);
        assert_int_equal(o.n_bytes, n);
        assert_memory_equal(o.bytes, bytes, n);
        free(bytes);
        outcome_free(&o);
    }
    assert_int_equal(gate_count(&f->cancelled), 0);
    stop(f);
}

static void test_server_streaming(void **state)
{
    (void)state;
    struct fixture *f = start();
    const uint32_t counts[] = {0, 1, 2, 1000};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        struct outcome o;
        call(f, "/test.Rpc/Count", counts[i], 10000, &o);
        check_done(&o, TD_CODE_OK);
        assert_int_equal(gate_count(&o.messages), counts[i]);
        assert_true(o.in_order);
        assert_int_equal(o.n_trailing, 1);
        assert_string_equal(o.trailing[0], "tandem-ledger=a=1,b=2");
        outcome_free(&o);
    }
    stop(f);
}

static void test_bidi(void **state)
{
    (void)state;
    struct fixture *f = start();
    struct outcome o;
    struct td_rpc_call *c = begin(f, &chat_method, 0, &o);
    for (uint32_t i = 0; i < 100; i++) {
        ticket_t t = TICKET_INIT;
        t.slot = i;
        assert_int_equal(td_rpc_call_send(c, &t.base), TD_OK);
        /* ping-pong as well as bursts */
        if (i % 10 == 0) assert_true(gate_wait(&o.messages, (int)i + 1));
    }
    assert_true(gate_wait(&o.messages, 100));
    assert_int_equal(gate_count(&o.done), 0);
    td_rpc_call_close_send(c);
    check_done(&o, TD_CODE_OK);
    assert_true(o.in_order);
    ticket_t t = TICKET_INIT;
    assert_int_equal(td_rpc_call_send(c, &t.base), TD_ERR_CANCELLED);
    td_rpc_call_unref(c);
    outcome_free(&o);
    stop(f);
}

static void test_status_and_metadata(void **state)
{
    (void)state;
    struct fixture *f = start();
    struct outcome o;
    call(f, "/test.Rpc/Fail", TD_CODE_RESOURCE_EXHAUSTED, 0, &o);
    check_done(&o, TD_CODE_RESOURCE_EXHAUSTED);
    assert_string_equal(o.details, "\xce\xb1\xce\xb2\xce\xb3: limit 100%");
    assert_int_equal(o.n_trailing, 2);
    assert_string_equal(o.trailing[0], "retry-delay-ms=250");
    assert_string_equal(o.trailing[1], "x-last=one");
    assert_int_equal(gate_count(&o.messages), 0);

    call(f, "/test.Rpc/Nothing", 0, 0, &o);
    check_done(&o, TD_CODE_UNIMPLEMENTED);
    assert_string_equal(o.details, "unknown method /test.Rpc/Nothing");

    /* request metadata, peer, deadline as the server sees them */
    ticket_t t = TICKET_INIT;
    struct td_rpc_metadata md = {"x-test", "a value that is longer than an inline slice"};
    outcome_init(&o);
    struct td_rpc_call *c =
        td_rpc_call_start_ref(f->channel, &hang_method, &t.base, 20000, false, &md, 1, &keep, &o);
    assert_true(gate_wait(&f->opened, 1));
    assert_string_equal(f->seen_metadata, md.value);
    assert_memory_equal(f->seen_peer, "ipv4:127.0.0.1:", 15);
    uint64_t left = atomic_load(&f->remaining_ms);
    assert_in_range(left, 10000, 21000); /* the header rounds up */
    td_rpc_call_cancel(c);
    check_done(&o, TD_CODE_CANCELLED);
    td_rpc_call_unref(c);
    stop(f);
}

static void test_cancel_by_client(void **state)
{
    (void)state;
    struct fixture *f = start();
    const struct td_rpc_client_method *methods[] = {&hang_method, &hang_chat_method};
    for (int i = 0; i < 2; i++) {
        struct outcome o;
        struct td_rpc_call *c = begin(f, methods[i], 0, &o);
        assert_true(gate_wait(&f->opened, i + 1));
        td_rpc_call_cancel(c);
        check_done(&o, TD_CODE_CANCELLED);
        assert_true(gate_wait(&f->cancelled, i + 1));
        td_rpc_call_cancel(c); /* ignored */
        td_rpc_call_close_send(c);
        td_rpc_call_unref(c);
    }
    assert_int_equal(td_rpc_server_live_calls(f->server), 0);
    /* cancelled before it began */
    for (int i = 0; i < 50; i++) {
        struct outcome o;
        struct td_rpc_call *c = begin(f, &hang_method, 0, &o);
        td_rpc_call_cancel(c);
        check_done(&o, TD_CODE_CANCELLED);
        td_rpc_call_unref(c);
    }
    stop(f);
}

static void test_cancel_by_server(void **state)
{
    (void)state;
    struct fixture *f = start();
    struct outcome o;
    call(f, "/test.Rpc/ServerCancel", 0, 0, &o);
    check_done(&o, TD_CODE_CANCELLED);
    assert_string_equal(o.details, "cancelled by the server");
    assert_true(gate_wait(&f->cancelled, 1));
    stop(f);
}

static void test_deadline(void **state)
{
    (void)state;
    struct fixture *f = start();
    struct outcome o;
    uint64_t start_ns = td_now_ns();
    call(f, "/test.Rpc/Hang", 0, 100, &o);
    check_done(&o, TD_CODE_DEADLINE_EXCEEDED);
    uint64_t took_ms = (td_now_ns() - start_ns) / TD_NS_PER_MS;
    assert_in_range(took_ms, 95, 10000);
    assert_true(gate_wait(&f->cancelled, 1)); /* the server is told too */
    stop(f);
}

static void test_wait_for_ready(void **state)
{
    (void)state;
    struct fixture *f = start();
    int port = td_rpc_server_port(f->server);
    td_rpc_server_stop(f->server, 0);
    struct outcome fast, patient;
    call(f, "/test.Rpc/Echo", 0, 10000, &fast);
    check_done(&fast, TD_CODE_UNAVAILABLE);
    ticket_t t = TICKET_INIT;
    outcome_init(&patient);
    td_rpc_call_start(f->channel, &echo_method, &t.base, 30000, true, NULL, 0, &keep, &patient);
    char address[64];
    snprintf(address, sizeof address, "127.0.0.1:%d", port);
    struct td_rpc_server_config sc = {
        .loop = f->server_loop, .address = address, .services = test_services, .ctx = f};
    struct td_err err = {0};
    assert_int_equal(td_rpc_server_start(&sc, &f->server, &err), TD_OK);
    check_done(&patient, TD_CODE_OK);
    assert_int_equal(gate_count(&patient.messages), 1);

    /* the port is taken now: a second server must not share it */
    struct td_rpc_server *second = NULL;
    assert_int_equal(td_rpc_server_start(&sc, &second, &err), TD_ERR_IO);
    assert_non_null(strstr(err.msg, address));
    assert_null(second);
    outcome_free(&patient);
    stop(f);
}

static void bytes_are_limited(struct fixture *f)
{
    struct outcome o;
    uint8_t *bytes = calloc(1, 200000);
    ticket_t t = TICKET_INIT;
    t.grant = (ProtobufCBinaryData){200000, bytes};
    outcome_init(&o);
    td_rpc_call_start(f->channel, &echo_method, &t.base, 0, false, NULL, 0, &keep, &o);
    check_done(&o, TD_CODE_RESOURCE_EXHAUSTED);
    t.grant.len = 50000; /* fits the wire, not the heap */
    outcome_init(&o);
    td_rpc_call_start(f->channel, &echo_method, &t.base, 0, false, NULL, 0, &keep, &o);
    check_done(&o, TD_CODE_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(o.details, "more than 20000 bytes of memory"));
    free(bytes);
}

/* 4 KB of empty sub-messages would be 300 KB of structs */
static void small_messages_are_limited(struct fixture *f)
{
    struct outcome o;
    Tandem__V1__StatusResponse many = TANDEM__V1__STATUS_RESPONSE__INIT;
    Tandem__V1__WorkerStatus empty = TANDEM__V1__WORKER_STATUS__INIT, *workers[2000];
    for (size_t i = 0; i < 2000; i++) workers[i] = &empty;
    many.workers = workers;
    many.n_workers = 2000;
    const struct td_rpc_client_method workers_method = {
        "/test.Rpc/Workers", &tandem__v1__status_response__descriptor, false};
    outcome_init(&o);
    td_rpc_call_start(f->channel, &workers_method, &many.base, 0, false, NULL, 0, &keep, &o);
    check_done(&o, TD_CODE_RESOURCE_EXHAUSTED);
}

/* bytes that are not the message; text that is not UTF-8, named */
static void bad_bytes_are_refused(struct fixture *f)
{
    struct outcome o;
    ticket_t t = TICKET_INIT;
    const struct td_rpc_client_method text_method = {"/test.Rpc/Text",
                                                     &tandem__v1__abort_request__descriptor, false};
    t.cached_tokens = 7;
    outcome_init(&o);
    td_rpc_call_start(f->channel, &text_method, &t.base, 0, false, NULL, 0, &keep, &o);
    check_done(&o, TD_CODE_INVALID_ARGUMENT);
    Tandem__V1__AbortRequest a = TANDEM__V1__ABORT_REQUEST__INIT;
    a.reason = (char *)"caf\xe9";
    outcome_init(&o);
    td_rpc_call_start(f->channel, &text_method, &a.base, 0, false, NULL, 0, &keep, &o);
    check_done(&o, TD_CODE_INVALID_ARGUMENT);
    assert_non_null(strstr(o.details, "field reason is not valid UTF-8"));
    a.reason = (char *)"caf\xc3\xa9";
    outcome_init(&o);
    td_rpc_call_start(f->channel, &text_method, &a.base, 0, false, NULL, 0, &keep, &o);
    check_done(&o, TD_CODE_OK);
}

/* live calls: two hang, the third is refused, health is not */
static void live_calls_are_limited(struct fixture *f)
{
    struct outcome o;
    struct outcome h[2];
    struct td_rpc_call *c[2];
    int opened = gate_count(&f->opened);
    for (int i = 0; i < 2; i++) c[i] = begin(f, &hang_method, 0, &h[i]);
    assert_true(gate_wait(&f->opened, opened + 2));
    call(f, "/test.Rpc/Echo", 0, 0, &o);
    check_done(&o, TD_CODE_RESOURCE_EXHAUSTED);
    assert_string_equal(o.details, "too many live calls: the limit is 2");
    Grpc__Health__V1__HealthCheckRequest check = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    const struct td_rpc_client_method health_method = {
        "/grpc.health.v1.Health/Check", &grpc__health__v1__health_check_response__descriptor,
        false};
    outcome_init(&o);
    td_rpc_call_start(f->channel, &health_method, &check.base, 0, false, NULL, 0, &keep, &o);
    check_done(&o, TD_CODE_OK);
    for (int i = 0; i < 2; i++) {
        td_rpc_call_cancel(c[i]);
        check_done(&h[i], TD_CODE_CANCELLED);
        td_rpc_call_unref(c[i]);
    }
}

static void test_limits(void **state)
{
    (void)state;
    struct fixture *f = start_with((struct td_rpc_limits){.max_message_bytes = 100000,
                                                          .max_unpack_bytes = 20000,
                                                          .max_live_calls = 2},
                                   "127.0.0.1:0", 0);
    bytes_are_limited(f);
    small_messages_are_limited(f);
    bad_bytes_are_refused(f);
    live_calls_are_limited(f);
    stop(f);
}

static void test_response_that_does_not_parse(void **state)
{
    (void)state;
    struct fixture *f = start();
    struct outcome o;
    ticket_t t = TICKET_INIT;
    uint8_t bytes[3] = {1, 2, 3};
    t.grant = (ProtobufCBinaryData){3, bytes};
    const struct td_rpc_client_method wrong_echo = {"/test.Rpc/Echo",
                                                    &tandem__v1__abort_request__descriptor, false};
    outcome_init(&o);
    td_rpc_call_start(f->channel, &wrong_echo, &t.base, 0, false, NULL, 0, &keep, &o);
    check_done(&o, TD_CODE_INTERNAL);
    assert_non_null(strstr(o.details, "AbortRequest"));
    assert_int_equal(gate_count(&o.messages), 0);
    stop(f);
}

/* The client's loop stands still: the kernel's and HTTP/2's buffers fill, then the call's queue. */
static void test_slow_reader(void **state)
{
    (void)state;
    struct fixture *f =
        start_with((struct td_rpc_limits){.max_queued_bytes = 1 << 20}, "127.0.0.1:0", 60000);
    struct outcome o;
    struct gate hold = GATE_INIT;
    ticket_t t = TICKET_INIT;
    outcome_init(&o);
    o.hold = &hold;
    td_rpc_call_start(f->channel, &flood_method, &t.base, 0, false, NULL, 0, &keep, &o);
    assert_true(gate_wait(&f->flood_over, 1));
    assert_int_equal(atomic_load(&f->flood_status), TD_ERR_LIMIT);
    assert_true(gate_wait(&f->cancelled, 1));
    gate_add(&hold, 1);
    check_done(&o, TD_CODE_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(o.details, "the limit is 1048576"));
    outcome_free(&o);
    stop(f);
}

static void test_stalled_reader(void **state)
{
    (void)state;
    struct fixture *f =
        start_with((struct td_rpc_limits){.max_queued_bytes = 1 << 30, .max_stall_ms = 200},
                   "127.0.0.1:0", 60000);
    struct outcome o;
    struct gate hold = GATE_INIT;
    ticket_t t = TICKET_INIT;
    t.slot = 1000; /* 64 MiB: more than any window */
    outcome_init(&o);
    o.hold = &hold;
    td_rpc_call_start(f->channel, &flood_method, &t.base, 0, false, NULL, 0, &keep, &o);
    assert_true(gate_wait(&f->cancelled, 1)); /* although the handler has finished the
                                                 call */
    gate_add(&hold, 1);
    check_done(&o, TD_CODE_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(o.details, "not read for more than 200 ms"));
    outcome_free(&o);
    stop(f);
}

static void test_a_request_that_never_comes(void **state)
{
    (void)state;
    struct fixture *f =
        start_with((struct td_rpc_limits){.max_request_ms = 200}, "127.0.0.1:0", 60000);
    /* keeps its side open, sends nothing */
    const struct td_rpc_client_method silent = {"/test.Rpc/Echo", TICKET, true};
    struct outcome o;
    outcome_init(&o);
    td_rpc_call_start(f->channel, &silent, NULL, 0, false, NULL, 0, &keep, &o);
    check_done(&o, TD_CODE_RESOURCE_EXHAUSTED);
    assert_non_null(strstr(o.details, "not come whole within 200 ms"));
    outcome_free(&o);
    stop(f);
}

/* A wire that freezes: forwards one connection until told to stop, then holds it open in
 * silence. In one process the two loops answer pings for each other (gRPC has one epoll set), so
 * a peer that stands still needs a wire of its own. */
struct wire {
    int listener, port, to_port;
    atomic_bool frozen, over;
    pthread_t thread;
};

static int loopback_socket(void)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    return fd;
}

static struct sockaddr_in loopback(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return at;
}

static void *wire_main(void *arg)
{
    struct wire *w = arg;
    struct sockaddr_in at = loopback(w->to_port);
    int from = accept4(w->listener, NULL, NULL, SOCK_CLOEXEC),
        to = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(to, (struct sockaddr *)&at, sizeof at) != 0) abort();
    while (!atomic_load(&w->over)) {
        struct pollfd fds[2] = {{from, POLLIN, 0}, {to, POLLIN, 0}};
        bool frozen = atomic_load(&w->frozen);
        if (poll(fds, frozen ? 0 : 2, 5) <= 0) continue;
        for (int i = 0; i < 2; i++) {
            char bytes[4096];
            if (!fds[i].revents || atomic_load(&w->frozen)) continue;
            ssize_t n = read(fds[i].fd, bytes, sizeof bytes);
            if (n <= 0 || write(fds[1 - i].fd, bytes, (size_t)n) != n)
                atomic_store(&w->frozen, true);
        }
    }
    close(from);
    close(to);
    return NULL;
}

static void wire_open(struct wire *w, int to_port)
{
    struct sockaddr_in at = loopback(0);
    socklen_t n = sizeof at;
    w->listener = loopback_socket();
    w->to_port = to_port;
    atomic_init(&w->frozen, false);
    atomic_init(&w->over, false);
    assert_int_equal(bind(w->listener, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(w->listener, 1), 0);
    assert_int_equal(getsockname(w->listener, (struct sockaddr *)&at, &n), 0);
    w->port = ntohs(at.sin_port);
    assert_int_equal(pthread_create(&w->thread, NULL, wire_main, w), 0);
}

static void wire_close(struct wire *w)
{
    atomic_store(&w->over, true);
    pthread_join(w->thread, NULL);
    close(w->listener);
}

static void test_keepalive(void **state)
{
    (void)state;
    struct fixture *f = start_with((struct td_rpc_limits){0}, "127.0.0.1:0", 200);
    struct wire w;
    wire_open(&w, td_rpc_server_port(f->server));
    char target[64];
    snprintf(target, sizeof target, "127.0.0.1:%d", w.port);
    struct td_rpc_channel_config cc = {
        .loop = f->client_loop, .target = target, .keepalive_ms = 200};
    struct td_err err = {0};
    td_rpc_channel_destroy(f->channel);
    assert_int_equal(td_rpc_channel_create(&cc, &f->channel, &err), TD_OK);

    struct outcome o;
    struct td_rpc_call *c = begin(f, &hang_method, 0, &o);
    assert_true(gate_wait(&f->opened, 1));
    atomic_store(&w.frozen, true);
    uint64_t start_ns = td_now_ns();
    check_done(&o, TD_CODE_UNAVAILABLE);      /* the client gives the server up ... */
    assert_true(gate_wait(&f->cancelled, 1)); /* ... and the server the client */
    assert_true(td_now_ns() - start_ns < 10 * TD_NS_PER_S);
    td_rpc_call_unref(c);
    stop(f);
    wire_close(&w);
}

static void test_garbage_connection(void **state)
{
    (void)state;
    struct fixture *f = start();
    for (int i = 0; i < 8; i++) {
        struct sockaddr_in at = loopback(td_rpc_server_port(f->server));
        int fd = loopback_socket();
        assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof at), 0);
        uint8_t noise[512];
        for (size_t k = 0; k < sizeof noise; k++) noise[k] = (uint8_t)(k * 73 + (size_t)i * 11);
        if (i % 2) memcpy(noise, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 24);
        assert_int_equal(send(fd, noise, sizeof noise, MSG_NOSIGNAL), sizeof noise);
        char back[4096];
        while (recv(fd, back, sizeof back, 0) > 0) {
        } /* until the server closes */
        close(fd);
    }
    struct outcome o;
    call(f, "/test.Rpc/Echo", 0, 10000, &o);
    check_done(&o, TD_CODE_OK);
    outcome_free(&o);
    stop(f);
}

static void test_health_watch(void **state)
{
    (void)state;
    struct fixture *f = start();
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    static const struct td_rpc_client_method watch = {
        "/grpc.health.v1.Health/Watch", &grpc__health__v1__health_check_response__descriptor,
        false};
    struct outcome own, unknown;
    request.service = (char *)"test.Rpc";
    outcome_init(&own);
    td_rpc_call_start(f->channel, &watch, &request.base, 0, false, NULL, 0, &keep, &own);
    assert_true(gate_wait(&own.messages, 1));
    assert_int_equal(own.last_status,
                     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING);
    request.service = (char *)"test.Other";
    outcome_init(&unknown);
    td_rpc_call_start(f->channel, &watch, &request.base, 0, false, NULL, 0, &keep, &unknown);
    assert_true(gate_wait(&unknown.messages, 1));
    assert_int_equal(unknown.last_status,
                     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN);
    td_rpc_server_set_serving(f->server, true);
    assert_true(gate_wait(&own.messages, 2));
    assert_int_equal(own.last_status,
                     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING);
    td_rpc_server_set_serving(f->server, true); /* no change, no message */
    assert_int_equal(td_rpc_server_live_calls(f->server), 0);
    td_rpc_server_stop(f->server, 10000); /* watches do not hold it up; they end with a reason */
    check_done(&own, TD_CODE_UNAVAILABLE);
    check_done(&unknown, TD_CODE_UNAVAILABLE);
    assert_int_equal(gate_count(&own.messages), 3);
    assert_int_equal(own.last_status,
                     GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING);
    f->server = NULL;
    stop(f);
}

struct poster {
    struct td_rpc_loop *loop;
    struct gate *gate;
    int next, wrong;
    int n;
};

struct posted {
    struct poster *from;
    int number;
};

static void on_posted(void *arg)
{
    struct posted *p = arg;
    if (p->number != p->from->next++ || !td_rpc_loop_is_current(p->from->loop)) p->from->wrong++;
    gate_add(p->from->gate, 1);
    free(p);
}

static void *poster_main(void *arg)
{
    struct poster *from = arg;
    for (int i = 0; i < from->n; i++) {
        struct posted *p = malloc(sizeof *p);
        if (!p) abort();
        *p = (struct posted){from, i};
        (i % 2 ? td_rpc_loop_run : td_rpc_loop_post)(from->loop, on_posted, p);
    }
    return NULL;
}

static void test_posts_from_threads(void **state)
{
    (void)state;
    struct td_rpc_loop *loop;
    struct td_err err = {0};
    assert_int_equal(td_rpc_loop_create("posts", &loop, &err), TD_OK);
    struct gate gate = GATE_INIT;
    struct poster posters[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        posters[i] = (struct poster){loop, &gate, 0, 0, 2000};
        assert_int_equal(pthread_create(&threads[i], NULL, poster_main, &posters[i]), 0);
    }
    for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
    assert_true(gate_wait(&gate, 8000));
    td_rpc_loop_destroy(loop);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(posters[i].next, 2000);
        assert_int_equal(posters[i].wrong, 0);
    }
}

struct again {
    struct td_rpc_loop *loop;
    int n_left;
};

static void post_again(void *arg)
{
    struct again *a = arg;
    if (a->n_left-- > 1) td_rpc_loop_post(a->loop, post_again, a);
}

/* The queue is shut down when they have run, and not between two of them. */
static void test_posts_that_post_as_the_loop_ends(void **state)
{
    (void)state;
    for (int i = 0; i < 50; i++) {
        struct td_err err = {0};
        struct again a = {.n_left = 5};
        assert_int_equal(td_rpc_loop_create("again", &a.loop, &err), TD_OK);
        td_rpc_loop_post(a.loop, post_again, &a);
        td_rpc_loop_destroy(a.loop);
        assert_int_equal(a.n_left, 0);
    }
}

static void hold_loop(void *gate) { gate_wait(gate, 1); }

/* What waits for the peer goes as one message where the call merges, up to its limits; the last of
 * these messages is longer than they are, and goes alone. */
static void test_merged_messages(void **state)
{
    (void)state;
    static const struct td_rpc_client_method method = {"/test.Rpc/Merge", TICKET, true};
    enum { N = 200, MOST = 64, LONG_BYTES = 100 << 10 };
    static uint8_t salt[LONG_BYTES];
    for (int merges = 0; merges < 2; merges++) {
        struct fixture *f = start();
        struct outcome o;
        struct gate hold = GATE_INIT;
        f->merged_in_order = true;
        td_rpc_loop_post(f->client_loop, hold_loop, &hold);
        struct td_rpc_call *c = begin(f, &method, 0, &o);
        if (merges) td_rpc_call_set_merged(c);
        for (uint32_t i = 0; i <= N; i++) {
            Tandem__V1__MultiplexUp up = TANDEM__V1__MULTIPLEX_UP__INIT;
            Tandem__V1__MultiplexCall call = TANDEM__V1__MULTIPLEX_CALL__INIT, *calls = &call;
            Tandem__V1__DecodeRequest decode = TANDEM__V1__DECODE_REQUEST__INIT;
            Tandem__V1__Sequence seq = TANDEM__V1__SEQUENCE__INIT;
            call.id = i;
            call.call_case = TANDEM__V1__MULTIPLEX_CALL__CALL_DECODE;
            call.decode = &decode;
            decode.seq = &seq;
            if (i == N) seq.cache_salt = (ProtobufCBinaryData){sizeof salt, salt};
            up.n_calls = 1;
            up.calls = &calls;
            assert_int_equal(td_rpc_call_send(c, &up.base), TD_OK);
        }
        td_rpc_call_close_send(c);
        gate_add(&hold, 1);
        check_done(&o, TD_CODE_OK);
        assert_int_equal(f->n_merged_calls, N + 1);
        assert_true(f->merged_in_order);
        assert_int_equal(f->n_merged_messages, merges ? (N + MOST - 1) / MOST + 1 : N + 1);
        td_rpc_call_unref(c);
        outcome_free(&o);
        stop(f);
    }
}

static void test_sends_from_threads(void **state)
{
    (void)state;
    struct fixture *f = start();
    struct outcome o;
    call(f, "/test.Rpc/Threads", 500, 30000, &o);
    check_done(&o, TD_CODE_OK);
    assert_int_equal(gate_count(&o.messages), 2000);
    assert_true(o.in_order); /* per thread */
    outcome_free(&o);
    stop(f);
}

struct ticking {
    struct td_rpc_timer *self, *other;
    struct gate gate;
    int n, n_other;
};

static void on_other_tick(void *arg) { ((struct ticking *)arg)->n_other++; }

static void on_tick(void *arg)
{
    struct ticking *t = arg;
    if (++t->n == 10) {
        td_rpc_timer_cancel(t->other);
        td_rpc_timer_cancel(t->self); /* from inside itself */
    }
    gate_add(&t->gate, 1);
}

static void start_timers(void *arg)
{
    struct ticking *t = arg;
    struct td_rpc_loop *loop = *(struct td_rpc_loop **)(void *)t->self;
    t->self = td_rpc_timer_start(loop, 2, on_tick, t);
    t->other = td_rpc_timer_start(loop, 1, on_other_tick, t);
}

static void add_to_gate(void *arg) { gate_add(arg, 1); }

static void test_timers(void **state)
{
    (void)state;
    struct td_rpc_loop *loop;
    struct td_err err = {0};
    assert_int_equal(td_rpc_loop_create("timers", &loop, &err), TD_OK);
    struct ticking t = {.gate = GATE_INIT};
    t.self = (struct td_rpc_timer *)(void *)&loop;
    td_rpc_loop_post(loop, start_timers, &t);
    assert_true(gate_wait(&t.gate, 10));
    /* a timer from another thread, still running when the loop goes: it must outlast several
       periods of the cancelled ones */
    struct gate alive = GATE_INIT;
    td_rpc_timer_start(loop, 5, add_to_gate, &alive);
    assert_true(gate_wait(&alive, 5));
    assert_int_equal(gate_count(&t.gate), 10);
    td_rpc_loop_destroy(loop);
    assert_int_equal(t.n, 10);
    assert_true(t.n_other >= 1);
}

struct ran {
    struct gate gate;
    pthread_t by;
};

static void note_thread(void *arg)
{
    struct ran *r = arg;
    r->by = pthread_self();
    gate_add(&r->gate, 1);
}

/* The caller takes a turn where the loop's thread waits; that one learns of a timer begun in it. */
static void test_a_turn_of_the_caller(void **state)
{
    (void)state;
    struct td_rpc_loop *loop;
    struct td_err err = {0};
    assert_int_equal(td_rpc_loop_create("turns", &loop, &err), TD_OK);
    struct ran ran = {.gate = GATE_INIT};
    bool here = false;
    for (int i = 1; i <= 10000 && !here; i++) {
        td_rpc_loop_run(loop, note_thread, &ran);
        assert_true(gate_wait(&ran.gate, i));
        here = pthread_equal(ran.by, pthread_self());
    }
    assert_true(here);
    assert_false(td_rpc_loop_is_current(loop));
    struct ticking t = {.gate = GATE_INIT};
    t.self = (struct td_rpc_timer *)(void *)&loop;
    td_rpc_loop_run(loop, start_timers, &t);
    assert_true(gate_wait(&t.gate, 10));
    td_rpc_loop_destroy(loop);
    assert_int_equal(t.n, 10);
}

static void test_stop_under_load(void **state)
{
    (void)state;
    enum { N = 32 };
    struct fixture *f = start();
    struct outcome *o = calloc(2 * N, sizeof *o);
    struct td_rpc_call *c[2 * N];
    for (int i = 0; i < N; i++) c[i] = begin(f, i % 2 ? &hang_method : &hang_chat_method, 0, &o[i]);
    assert_true(gate_wait(&f->opened, N));
    /* some arrive while stopping */
    for (int i = N; i < 2 * N; i++) c[i] = begin(f, &echo_method, 0, &o[i]);
    td_rpc_server_stop(f->server, 50);
    f->server = NULL;
    for (int i = 0; i < 2 * N; i++) {
        assert_true(gate_wait(&o[i].done, 1));
        if (i < N) assert_true(o[i].code == TD_CODE_UNAVAILABLE || o[i].code == TD_CODE_CANCELLED);
        td_rpc_call_unref(c[i]);
        outcome_free(&o[i]);
    }
    assert_int_equal(gate_count(&f->cancelled), N);
    free(o);
    stop(f);
}

/* Calls that end within the drain time lose nothing. */
static void *late_release(void *arg)
{
    struct fixture *f = arg;
    gate_wait(&f->blocked, 1);
    gate_add(&f->release, 1);
    return NULL;
}

static void test_drain(void **state)
{
    (void)state;
    struct fixture *f = start();
    struct outcome o;
    ticket_t t = TICKET_INIT;
    t.slot = 200;
    const struct td_rpc_client_method threads = {"/test.Rpc/Threads", TICKET, false};
    const struct td_rpc_client_method block = {"/test.Rpc/Block", TICKET, false};
    struct outcome b;
    outcome_init(&o);
    outcome_init(&b);
    td_rpc_call_start(f->channel, &threads, &t.base, 0, false, NULL, 0, &keep, &o);
    assert_true(gate_wait(&o.messages, 1));
    struct td_rpc_call *c =
        td_rpc_call_start_ref(f->channel, &block, &t.base, 0, false, NULL, 0, &keep, &b);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, late_release, f), 0);
    assert_true(gate_wait(&f->release, 1));
    td_rpc_call_cancel(c); /* Block never answers: without this the drain would
                              take its whole time */
    td_rpc_server_stop(f->server, 20000);
    f->server = NULL;
    check_done(&o, TD_CODE_OK);
    assert_int_equal(gate_count(&o.messages), 800);
    assert_true(gate_wait(&b.done, 1));
    pthread_join(thread, NULL);
    td_rpc_call_unref(c);
    outcome_free(&o);
    stop(f);
}

static int count_dir(const char *path)
{
    DIR *d = opendir(path);
    assert_non_null(d);
    int n = 0;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

static void test_start_stop_cycles(void **state)
{
    (void)state;
    int n_fds = 0;
    for (int i = 0; i < 20; i++) {
        struct fixture *f = start();
        struct outcome o;
        call(f, "/test.Rpc/Echo", (uint32_t)0, 10000, &o);
        check_done(&o, TD_CODE_OK);
        outcome_free(&o);
        stop(f);
        if (i == 4) n_fds = count_dir("/proc/self/fd");
    }
    /* core's own threads close some a little later */
    uint64_t until_ns = td_now_ns() + WAIT_S * TD_NS_PER_S;
    while (count_dir("/proc/self/fd") > n_fds && td_now_ns() < until_ns) poll(NULL, 0, 10);
    assert_in_range(count_dir("/proc/self/fd"), 3, n_fds);
}

static atomic_uint pause_ms;            /* before a loop is rung */
static struct gate *_Atomic rung_first; /* where the next ring of a loop is told, once */

/* Stands before gRPC core's: a batch without operations is a ring of a loop's bell. */
grpc_call_error grpc_call_start_batch(grpc_call *call, const grpc_op *ops, size_t n_ops, void *tag,
                                      void *reserved)
{
    static grpc_call_error (*core)(grpc_call *, const grpc_op *, size_t, void *, void *);
    if (!core) *(void **)&core = dlsym(RTLD_NEXT, "grpc_call_start_batch");
    if (!n_ops && atomic_load(&pause_ms)) poll(NULL, 0, (int)atomic_load(&pause_ms));
    struct gate *told = n_ops ? NULL : atomic_exchange(&rung_first, NULL);
    if (told) gate_add(told, 1);
    return core(call, ops, n_ops, tag, reserved);
}

static void count_turns(void *arg) { gate_add(arg, 1); }

/* Who destroys a loop tells it to stop and rings. The loop may be awake at that moment by
 * itself, here by a timer, and must not close the queue that the ring is still on its way to. */
static void test_destroy_while_the_loop_turns(void **state)
{
    (void)state;
    struct td_rpc_loop *loop;
    struct td_err err = {0};
    struct gate turns = GATE_INIT;
    assert_int_equal(td_rpc_loop_create("turns", &loop, &err), TD_OK);
    td_rpc_timer_start(loop, 1, count_turns, &turns);
    assert_true(gate_wait(&turns, 2));
    atomic_store(&pause_ms, 50);
    td_rpc_loop_destroy(loop);
    atomic_store(&pause_ms, 0);
}

/* Cancels its call and stays in the handler until somebody destroys the loop. */
static void cancel_and_wait(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)msg;
    struct outcome *o = user;
    if (!gate_count(&o->messages)) {
        td_rpc_call_cancel(call);
        atomic_store(&rung_first, o->hold);
        gate_add(&o->messages, 1);
        assert_true(gate_wait(o->hold, 1));
        return;
    }
    gate_add(&o->messages, 1);
}

/* A router that leaves cancels its calls to workers. Tokens that had come before the cancel are
 * still read while its loop is being destroyed: the loop's queue stays open until the calls are
 * over. */
static void destroy_with_a_cancelled_call(void)
{
    static const struct td_rpc_handler handler = {cancel_and_wait, keep_result};
    static const struct td_rpc_client_method method = {"/test.Rpc/Flood", TICKET, false};
    struct fixture *f = start();
    struct gate hold = GATE_INIT;
    struct outcome o;
    outcome_init(&o);
    o.hold = &hold;
    ticket_t t = TICKET_INIT;
    t.slot = 3;
    td_rpc_call_start(f->channel, &method, &t.base, 0, false, NULL, 0, &handler, &o);
    assert_true(gate_wait(&o.messages, 1));
    assert_true(gate_wait(&f->ended, 1)); /* the other messages are on their way */
    td_rpc_channel_destroy(f->channel);
    td_rpc_loop_destroy(f->client_loop); /* releases the handler */
    assert_int_equal(gate_count(&o.done), 1);
    assert_int_equal(o.code, TD_CODE_CANCELLED);
    td_rpc_server_stop(f->server, 0);
    td_rpc_loop_destroy(f->server_loop);
    free(f);
}

static void test_destroy_with_a_cancelled_call(void **state)
{
    (void)state;
    for (int i = 0; i < 40; i++) destroy_with_a_cancelled_call();
}

static void test_unix_socket(void **state)
{
    (void)state;
    char dir[] = "/tmp/td_rpc_test.XXXXXX", address[80], path[80];
    assert_non_null(mkdtemp(dir));
    snprintf(address, sizeof address, "unix:%s/s", dir);
    for (int i = 0; i < 2; i++) { /* the second time over what the first has left */
        struct fixture *f = start_with((struct td_rpc_limits){0}, address, 0);
        struct td_rpc_server_config sc = {
            .loop = f->server_loop, .address = address, .services = test_services, .ctx = f};
        struct td_rpc_server *second = NULL;
        struct td_err err = {0};
        assert_int_equal(td_rpc_server_start(&sc, &second, &err), TD_ERR_IO);
        assert_non_null(strstr(err.msg, "another server"));
        struct outcome o;
        call(f, "/test.Rpc/Echo", 0, 10000, &o);
        check_done(&o, TD_CODE_OK);
        outcome_free(&o);
        stop(f);
    }
    snprintf(path, sizeof path, "%s/s", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/s.lock", dir);
    unlink(path);
    assert_int_equal(rmdir(dir), 0);
}

static void test_utf8(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t n;
        bool valid;
    } cases[] = {
        {"", 0, true},
        {"a\0b", 3, true},
        {"\xc3\xa9", 2, true},
        {"\xe2\x82\xac", 3, true},
        {"\xf0\x9f\x98\x80", 4, true},
        {"\xf4\x8f\xbf\xbf", 4, true},
        {"\xef\xbf\xbf", 3, true},
        {"\x80", 1, false},
        {"\xc3", 1, false},
        {"\xc0\xaf", 2, false},
        {"\xc1\xbf", 2, false},
        {"\xe0\x9f\xbf", 3, false},
        {"\xed\xa0\x80", 3, false},
        {"\xf0\x8f\xbf\xbf", 4, false},
        {"\xf4\x90\x80\x80", 4, false},
        {"\xf5\x80\x80\x80", 4, false},
        {"\xe2\x82", 2, false},
        {"\xe2\x28\xa1", 3, false},
        {"ab\xff", 3, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (td_rpc_utf8_valid(cases[i].text, cases[i].n) != cases[i].valid) fail_msg("case %zu", i);
}

/* protobuf-c has no depth limit: a message that can hold itself would be a way to overflow the
 * stack from outside. */
static void check_depth(const ProtobufCMessageDescriptor *type, int depth)
{
    if (depth > 12) fail_msg("%s is recursive or nested too deeply", type->name);
    for (unsigned i = 0; i < type->n_fields; i++)
        if (type->fields[i].type == PROTOBUF_C_TYPE_MESSAGE)
            check_depth(type->fields[i].descriptor, depth + 1);
}

static void test_no_recursive_messages(void **state)
{
    (void)state;
    const ProtobufCMessageDescriptor *inbound[] = {
        &tandem__v1__generate_request__descriptor,
        &tandem__v1__tokenize_request__descriptor,
        &tandem__v1__models_request__descriptor,
        &tandem__v1__status_request__descriptor,
        &tandem__v1__decode_request__descriptor,
        &tandem__v1__prefill_request__descriptor,
        &tandem__v1__abort_request__descriptor,
        &tandem__v1__worker_message__descriptor,
        &tandem__v1__router_message__descriptor,
        &tandem__v1__decode_event__descriptor,
        &tandem__v1__prefill_event__descriptor,
        &tandem__v1__abort_response__descriptor,
        &tandem__v1__generate_response__descriptor,
        &tandem__v1__tokenize_response__descriptor,
        &tandem__v1__models_response__descriptor,
        &tandem__v1__status_response__descriptor,
        &grpc__health__v1__health_check_request__descriptor,
        &grpc__reflection__v1__server_reflection_request__descriptor,
    };
    for (size_t i = 0; i < sizeof inbound / sizeof *inbound; i++) check_depth(inbound[i], 0);
}

/* User text is bytes in C: a NUL inside survives. */
static void test_as_bytes(void **state)
{
    (void)state;
    Tandem__V1__GenerateRequest r = TANDEM__V1__GENERATE_REQUEST__INIT;
    r.input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT;
    r.prompt = (ProtobufCBinaryData){5, (uint8_t *)"ab\0cd"};
    uint8_t wire[64];
    size_t n = protobuf_c_message_pack(&r.base, wire);
    struct td_rpc_unpacker u;
    td_rpc_unpacker_init(&u);
    const ProtobufCMessage *msg;
    struct td_err err = {0};
    assert_int_equal(td_rpc_unpack(&u, r.base.descriptor, wire, n, 4096, &msg, &err), TD_OK);
    const Tandem__V1__GenerateRequest *back = (const void *)msg;
    assert_int_equal(back->prompt.len, 5);
    assert_memory_equal(back->prompt.data, "ab\0cd", 5);
    td_rpc_unpacker_close(&u);
}

/* ---- elements are counted before a message is unpacked --------------------------------------- */

static td_status scan(const uint8_t *bytes, size_t n, struct td_err *err)
{
    static const struct td_rpc_field_limit limits[] = {
        {&tandem__v1__chat__descriptor, 1, 3, "chat.messages"},
        {&tandem__v1__token_ids__descriptor, 1, 4, "token_ids"},
        {0},
    };
    err->msg[0] = 0;
    return td_rpc_scan(&tandem__v1__generate_request__descriptor, limits, bytes, n, err);
}

static void test_elements_are_counted(void **state)
{
    (void)state;
    static const uint8_t
        /* chat {messages {} x 3} */
        three[] = {0x1a, 6, 0x0a, 0, 0x0a, 0, 0x0a, 0},
        four[] = {0x1a, 8, 0x0a, 0, 0x0a, 0, 0x0a, 0, 0x0a, 0},
        /* merged by protobuf */
        four_in_two[] = {0x1a, 4, 0x0a, 0, 0x0a, 0, 0x1a, 4, 0x0a, 0, 0x0a, 0},
        /* packed: 1 128 3 4 */
        ids[] = {0x22, 7, 0x0a, 5, 1, 0x80, 1, 3, 4},
        ids_many[] = {0x22, 8, 0x0a, 6, 1, 0x80, 1, 3, 4, 5},
        /* not packed */
        ids_plain[] = {0x22, 10, 8, 1, 8, 2, 8, 3, 8, 4, 8, 5},
        ids_negative[] = {0x22, 12,   0x0a, 10,   0xff, 0xff, 0xff,
                          0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1},
        /* unpacking says so */
        cut[] = {0x1a, 100, 0x0a, 0},
        unknown[] = {0xf8, 0x7f, 1, 0xf9, 0x7f, 1, 2, 3, 4, 5, 6, 7, 8, 0xfa, 0x7f, 1, 0, 0x1a, 0};
    struct td_err err = {0};
    assert_int_equal(scan(three, sizeof three, &err), TD_OK);
    assert_int_equal(scan(four, sizeof four, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "chat.messages has 4 elements, limit 3");
    assert_int_equal(scan(four_in_two, sizeof four_in_two, &err), TD_ERR_INVALID);
    assert_int_equal(scan(ids, sizeof ids, &err), TD_OK);
    assert_int_equal(scan(ids_many, sizeof ids_many, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "token_ids has 5 elements, limit 4");
    assert_int_equal(scan(ids_plain, sizeof ids_plain, &err), TD_ERR_INVALID);
    assert_int_equal(scan(ids_negative, sizeof ids_negative, &err), TD_OK);
    assert_int_equal(scan(cut, sizeof cut, &err), TD_OK);
    assert_int_equal(scan(unknown, sizeof unknown, &err), TD_OK);
    assert_int_equal(scan(NULL, 0, &err), TD_OK);
    for (size_t i = 0; i < sizeof four_in_two; i++) { /* every cut, in memory that ends there */
        uint8_t *copy = malloc(i + 1);
        memcpy(copy, four_in_two, i);
        assert_int_equal(scan(copy, i, &err), TD_OK);
        free(copy);
    }
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8),
        cmocka_unit_test(test_no_recursive_messages),
        cmocka_unit_test(test_as_bytes),
        cmocka_unit_test(test_unary),
        cmocka_unit_test(test_server_streaming),
        cmocka_unit_test(test_bidi),
        cmocka_unit_test(test_status_and_metadata),
        cmocka_unit_test(test_cancel_by_client),
        cmocka_unit_test(test_cancel_by_server),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_wait_for_ready),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_response_that_does_not_parse),
        cmocka_unit_test(test_slow_reader),
        cmocka_unit_test(test_stalled_reader),
        cmocka_unit_test(test_a_request_that_never_comes),
        cmocka_unit_test(test_keepalive),
        cmocka_unit_test(test_garbage_connection),
        cmocka_unit_test(test_health_watch),
        cmocka_unit_test(test_posts_from_threads),
        cmocka_unit_test(test_posts_that_post_as_the_loop_ends),
        cmocka_unit_test(test_merged_messages),
        cmocka_unit_test(test_sends_from_threads),
        cmocka_unit_test(test_a_turn_of_the_caller),
        cmocka_unit_test(test_timers),
        cmocka_unit_test(test_stop_under_load),
        cmocka_unit_test(test_drain),
        cmocka_unit_test(test_start_stop_cycles),
        cmocka_unit_test(test_destroy_while_the_loop_turns),
        cmocka_unit_test(test_destroy_with_a_cancelled_call),
        cmocka_unit_test(test_unix_socket),
        cmocka_unit_test(test_elements_are_counted),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("rpc", tests, NULL, NULL);
}
