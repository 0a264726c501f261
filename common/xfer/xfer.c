/* xfer.c - one transfer endpoint: the public calls, the progress thread, connections and their frames.
 *
 * Connection, on both backends (initiator = the side that sends blocks):
 *
 *   initiator   CONNECTING --connected: HELLO--> HELLO --HELLO_ACK fits--> READY (shm: MEM first) --> OPEN, DATA | REF, FINAL, ABORT, PING
 *   acceptor                                     HELLO --HELLO fits, HELLO_ACK--> READY           --> DONE, FAIL, PING
 *   either      any --error, EOF, timeout, foreign or malformed frame--> closed; the core decides what that means for slots and ops
 *
 * HELLO must name the same layout, HELLO_ACK the incarnation that the grant named: another process on the same address is refused. Until a
 * connection has shown the key of a grant it is unproven: at most XFER_MAX_UNPROVEN of them stand, the oldest goes first, each for two peer
 * time-outs. A connection's memory is fixed, so garbage costs nothing but itself.
 *
 * The progress thread's turn: events of epoll (deadlines first: what is late is late even if its bytes lie in the socket), then connections for waiting
 * ops, then sending, then one piece of copying for shm, then connection timers. A turn that comes much too late means that this process was
 * stopped: it owes its peers the time to be heard, so their silence is counted from now.
 *
 * Fairness: frames are at most 1 MiB and ops of a connection take turns per frame; connections take turns per XFER_TURN_BYTES. */
#include "common/xfer/xfer.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/hash.h"
#include "common/xfer/xfer_internal.h"

enum { KEY_BELL = 1, KEY_TCP, KEY_SHM };   /* epoll keys below every connection id */

uint64_t xfer_now(const struct td_xfer *x)
{
    return x->hooks.now_ns ? x->hooks.now_ns(x->hooks.ctx) : td_now_ns();
}

uint64_t xfer_random(void *ctx)
{
    struct td_xfer *x = ctx;
    return x->hooks.random_u64 ? x->hooks.random_u64(x->hooks.ctx) : td_random_u64();
}

/* A reason for people; truncation is fine. */
__attribute__((format(printf, 2, 3))) static void say(char to[TD_XFER_REASON_MAX], const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    vsnprintf(to, TD_XFER_REASON_MAX, fmt, args);
    va_end(args);
}

/* now - then, for a `now` that was taken at the start of the turn. */
static uint64_t since(uint64_t now_ns, uint64_t then_ns)
{
    return now_ns > then_ns ? now_ns - then_ns : 0;
}

/* Every public call and every turn ends here: unlock, and ring if events were queued. */
static void unlock_and_wake(struct td_xfer *x)
{
    bool wake = x->n_woken != x->core.n_emitted;
    x->n_woken = x->core.n_emitted;
    pthread_mutex_unlock(&x->lock);
    if (wake && x->hooks.wake) x->hooks.wake(x->hooks.ctx);
}

/* --- connections ---------------------------------------------------------------------------------------------------------------- */

struct td_xfer_conn *xfer_conn_by_id(struct td_xfer *x, uint64_t id)
{
    struct td_xfer_conn *c = &x->conns[id & 0xffff];
    return (id & 0xffff) < XFER_MAX_CONNS && c->state != XFER_CONN_FREE && c->id == id ? c : NULL;
}

static bool watch(struct td_xfer *x, struct td_xfer_conn *c, int op, bool out)
{
    struct epoll_event e = {.events = EPOLLIN | (out ? EPOLLOUT : 0u), .data.u64 = c->id};
    c->want_out = out;
    return epoll_ctl(x->epoll_fd, op, c->fd, &e) == 0;
}

struct td_xfer_conn *xfer_conn_new(struct td_xfer *x, int fd, enum td_xfer_path path, bool initiator)
{
    struct td_xfer_conn *c = NULL;
    if (!initiator && x->n_conns >= XFER_MAX_CONNS - XFER_RESERVED_CONNS) return NULL;
    for (uint32_t i = 0; i < XFER_MAX_CONNS && !c; i++)
        if (x->conns[i].state == XFER_CONN_FREE) c = &x->conns[i];
    if (!c) return NULL;
    memset(c, 0, sizeof *c);
    c->id = ++x->n_conn_serials << 16 | (uint64_t)(c - x->conns);
    c->fd = fd;
    c->path = path;
    c->initiator = initiator;
    do c->nonce = xfer_random(x);
    while (c->nonce == 0);
    c->born_ns = c->last_rx_ns = c->last_tx_ns = c->last_use_ns = xfer_now(x);
    c->state = XFER_CONN_HELLO;
    if (!watch(x, c, EPOLL_CTL_ADD, false)) {
        c->state = XFER_CONN_FREE;
        return NULL;
    }
    x->n_conns++;
    if (!initiator) x->n_unproven++;
    return c;
}

static void fail_waiting_ops(struct td_xfer *x, uint64_t id, bool was_shm, td_status status, const char *reason)
{
    for (uint32_t i = 0; i < x->core.max_ops; i++) {
        const struct td_xfer_op *op = &x->core.ops[i];
        if (x->op_aux[i].waits_for != id) continue;
        x->op_aux[i].waits_for = 0;
        if (op->state != TD_OP_WAIT_CONN) continue;
        if (was_shm && status != TD_ERR_STALE && x->path == TD_XFER_PATH_AUTO && op->grant.path == TD_XFER_PATH_AUTO && op->grant.port)
            x->op_aux[i].no_shm = true; /* the probe failed: the other way, announced by the event's path */
        else
            td_xfer_core_op_fail(&x->core, xfer_now(x), i, status, reason);
    }
    x->attach_due = true;
}

void xfer_conn_close(struct td_xfer *x, struct td_xfer_conn *c, td_status status, const char *reason, bool retry)
{
    if (c->state == XFER_CONN_FREE) return;
    uint64_t id = c->id;
    bool was_ready = c->state == XFER_CONN_READY, was_shm = c->path == TD_XFER_PATH_SHM;
    char text[TD_XFER_REASON_MAX];
    if (c->initiator) say(text, "peer %.40s at %.40s:%u (%s): %.60s", c->peer_instance, c->host, c->port, was_shm ? "shm" : "tcp", reason);
    else say(text, "peer %.40s (%s): %.80s", c->peer_instance, was_shm ? "shm" : "tcp", reason);
    close(c->fd); /* leaves the epoll set by itself */
    xfer_shm_conn_clear(c);
    if (!c->initiator && !c->proven) x->n_unproven--;
    c->state = XFER_CONN_FREE;
    x->n_conns--;
    if (was_ready) td_xfer_core_conn_lost(&x->core, xfer_now(x), id, status, text, retry);
    if (c->initiator) fail_waiting_ops(x, id, was_shm, status, text);
}

/* Frames that break the protocol: counted, and the connection ends. */
static void refuse(struct td_xfer *x, struct td_xfer_conn *c, const char *reason)
{
    x->n_bad_frames++;
    if (!c->initiator && !c->proven) x->n_refused_peers++;
    xfer_conn_close(x, c, TD_ERR_PEER, reason, false);
}

bool xfer_conn_queue(struct td_xfer *x, struct td_xfer_conn *c, struct td_xfer_frame *f, const void *payload)
{
    uint32_t n = 64 + f->length;
    (void)x;
    if (c->out_at && c->out_at + c->out_used + n > sizeof c->out) {
        memmove(c->out, c->out + c->out_at, c->out_used);
        c->out_at = 0;
    }
    if (c->out_at + c->out_used + n > sizeof c->out) {
        c->overflow = true; /* a peer that asks and does not read */
        return false;
    }
    f->conn = c->state == XFER_CONN_READY ? c->tag : 0;
    uint8_t *to = c->out + c->out_at + c->out_used;
    td_xfer_frame_encode(f, to);
    if (f->length) memcpy(to + 64, payload, f->length);
    c->out_used += n;
    c->tx_ready = true;
    return true;
}

/* The core's hook: any thread, under the lock. */
static void core_send(void *ctx, uint64_t id, const struct td_xfer_frame *frame, const void *payload)
{
    struct td_xfer *x = ctx;
    struct td_xfer_conn *c = xfer_conn_by_id(x, id);
    struct td_xfer_frame f = *frame;
    if (c && c->state == XFER_CONN_READY) xfer_conn_queue(x, c, &f, payload);
}

static void core_op_handle(void *ctx, uint32_t op, uint64_t handle)
{
    xfer_shm_op_handle(ctx, op, handle);
}

void xfer_conn_say_hello(struct td_xfer *x, struct td_xfer_conn *c, enum td_xfer_frame_type type)
{
    struct td_xfer_hello hello = {.incarnation = x->incarnation, .layout_hash = x->layout_hash, .block_bytes = x->block_bytes, .nonce = c->nonce};
    struct td_xfer_frame f = {.type = (uint8_t)type, .length = sizeof hello};
    memcpy(hello.instance, x->instance, sizeof hello.instance);
    if (type == TD_XFER_HELLO_ACK && c->path == TD_XFER_PATH_SHM) memcpy(hello.proof, x->proof, sizeof hello.proof);
    xfer_conn_queue(x, c, &f, &hello);
}

static void evict_oldest_unproven(struct td_xfer *x)
{
    struct td_xfer_conn *oldest = NULL;
    for (uint32_t i = 0; i < XFER_MAX_CONNS; i++) {
        struct td_xfer_conn *c = &x->conns[i];
        if (c->state != XFER_CONN_FREE && !c->initiator && !c->proven && (!oldest || c->id >> 16 < oldest->id >> 16)) oldest = c;
    }
    if (!oldest) return;
    x->n_refused_peers++;
    xfer_conn_close(x, oldest, TD_ERR_PEER, "too many connections without a key", false);
}

static void pause_accept(struct td_xfer *x, bool pause)
{
    struct epoll_event e = {.events = pause ? 0u : EPOLLIN};
    x->accept_paused = pause;
    e.data.u64 = KEY_TCP;
    if (x->tcp_fd >= 0) epoll_ctl(x->epoll_fd, EPOLL_CTL_MOD, x->tcp_fd, &e);
    e.data.u64 = KEY_SHM;
    if (x->shm_fd >= 0) epoll_ctl(x->epoll_fd, EPOLL_CTL_MOD, x->shm_fd, &e);
}

static void accept_some(struct td_xfer *x, int listen_fd, enum td_xfer_path path)
{
    for (int i = 0; i < 16; i++) {
        int fd = accept4(listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
                evict_oldest_unproven(x);
                pause_accept(x, true); /* until the next check of timers */
            }
            return;
        }
        if (path == TD_XFER_PATH_SHM ? !xfer_shm_peer_allowed(fd) : false) {
            x->n_refused_peers++;
            close(fd);
            continue;
        }
        if (path == TD_XFER_PATH_TCP) xfer_tcp_tune(x, fd);
        if (x->n_unproven >= XFER_MAX_UNPROVEN || x->n_conns >= XFER_MAX_CONNS - XFER_RESERVED_CONNS) evict_oldest_unproven(x);
        if (!xfer_conn_new(x, fd, path, false)) {
            x->n_refused_peers++;
            close(fd);
        }
    }
}

/* --- connections for ops -------------------------------------------------------------------------------------------------------- */

static struct td_xfer_conn *find_conn(struct td_xfer *x, const struct td_xfer_grant_blob *g, enum td_xfer_path path)
{
    for (uint32_t i = 0; i < XFER_MAX_CONNS; i++) {
        struct td_xfer_conn *c = &x->conns[i];
        if (c->state != XFER_CONN_FREE && c->initiator && c->path == path && c->peer_incarnation == g->incarnation && c->port == g->port &&
            strcmp(c->host, g->host) == 0)
            return c;
    }
    return NULL;
}

/* A connection under way to the grant's author over this path; NULL with the reason when there can be none. */
static struct td_xfer_conn *dial(struct td_xfer *x, const struct td_xfer_grant_blob *g, enum td_xfer_path path, char reason[TD_XFER_REASON_MAX])
{
    bool connected = true;
    int fd = path == TD_XFER_PATH_SHM ? xfer_shm_dial(g->shm_name) : xfer_tcp_dial(x, g->host, g->port, &connected);
    if (fd < 0) {
        say(reason, "peer %.40s at %.40s:%u (%s): connect: %s", g->instance, g->host, g->port,
                 path == TD_XFER_PATH_SHM ? "shm" : "tcp", strerror(errno));
        return NULL;
    }
    struct td_xfer_conn *c = xfer_conn_new(x, fd, path, true);
    if (!c) { /* make room: an idle connection of ours goes */
        for (uint32_t i = 0; i < XFER_MAX_CONNS && !c; i++) {
            struct td_xfer_conn *idle = &x->conns[i];
            bool busy = idle->state != XFER_CONN_READY || !idle->initiator;
            for (uint32_t k = 0; k < x->core.max_ops && !busy; k++) busy = x->core.ops[k].conn == idle->id;
            if (busy) continue;
            xfer_conn_close(x, idle, TD_ERR_PEER, "closed for another peer", true);
            c = xfer_conn_new(x, fd, path, true);
        }
    }
    if (!c) {
        close(fd);
        say(reason, "peer %.40s: all %d connections are in use", g->instance, XFER_MAX_CONNS);
        return NULL;
    }
    c->peer_incarnation = g->incarnation;
    c->port = g->port;
    memcpy(c->host, g->host, sizeof c->host);
    memcpy(c->peer_instance, g->instance, sizeof c->peer_instance);
    memcpy(c->peer_proof, g->proof, sizeof c->peer_proof);
    if (connected) {
        xfer_conn_say_hello(x, c, TD_XFER_HELLO);
    } else {
        c->state = XFER_CONN_CONNECTING;
        watch(x, c, EPOLL_CTL_MOD, true);
    }
    return c;
}

static void op_attach(struct td_xfer *x, uint32_t id, struct td_xfer_conn *c)
{
    x->op_aux[id].waits_for = 0;
    td_xfer_core_op_attach(&x->core, id, c->id, c->path);
    c->tx_ready = true;
    c->last_use_ns = xfer_now(x);
}

/* Path choice. AUTO: shm when both sides offer it and the socket of the grant answers, else tcp. */
static bool may_shm(const struct td_xfer *x, uint32_t op)
{
    const struct td_xfer_grant_blob *g = &x->core.ops[op].grant;
    return g->shm_name[0] && x->words && x->path != TD_XFER_PATH_TCP && g->path != TD_XFER_PATH_TCP && !x->op_aux[op].no_shm;
}

static bool may_tcp(const struct td_xfer *x, uint32_t op)
{
    const struct td_xfer_grant_blob *g = &x->core.ops[op].grant;
    return g->port && x->path != TD_XFER_PATH_SHM && g->path != TD_XFER_PATH_SHM;
}

/* A new op on a connection that stands already: no turn of the progress thread in between. Any thread. */
static void attach_warm(struct td_xfer *x, uint32_t id)
{
    struct td_xfer_conn *c = find_conn(x, &x->core.ops[id].grant, may_shm(x, id) ? TD_XFER_PATH_SHM : TD_XFER_PATH_TCP);
    if (c && c->state == XFER_CONN_READY) op_attach(x, id, c);
    else x->attach_due = true;
}

static void attach_ops(struct td_xfer *x)
{
    x->attach_due = false;
    for (uint32_t i = 0; i < x->core.max_ops; i++) {
        struct td_xfer_op *op = &x->core.ops[i];
        if (op->state != TD_OP_WAIT_CONN || x->op_aux[i].waits_for) continue;
        const struct td_xfer_grant_blob *g = &op->grant;
        char reason[TD_XFER_REASON_MAX] = "no common path";
        struct td_xfer_conn *c = NULL;
        if (may_shm(x, i)) {
            c = find_conn(x, g, TD_XFER_PATH_SHM);
            if (!c) c = dial(x, g, TD_XFER_PATH_SHM, reason);
        }
        if (!c && may_tcp(x, i)) {
            c = find_conn(x, g, TD_XFER_PATH_TCP);
            if (!c) c = dial(x, g, TD_XFER_PATH_TCP, reason);
        }
        if (!c) td_xfer_core_op_fail(&x->core, xfer_now(x), i, TD_ERR_PEER, reason);
        else if (c->state == XFER_CONN_READY) op_attach(x, i, c);
        else x->op_aux[i].waits_for = c->id;
    }
}

static void conn_ready(struct td_xfer *x, struct td_xfer_conn *c)
{
    for (uint32_t i = 0; i < x->core.max_ops; i++) {
        if (x->op_aux[i].waits_for != c->id) continue;
        x->op_aux[i].waits_for = 0;
        if (x->core.ops[i].state == TD_OP_WAIT_CONN) op_attach(x, i, c);
    }
}

/* --- frames that came ----------------------------------------------------------------------------------------------------------- */

static void take_reason(char to[TD_XFER_REASON_MAX], const struct td_xfer_conn *c)
{
    uint32_t n = c->rx_frame.length < TD_XFER_REASON_MAX ? c->rx_frame.length : TD_XFER_REASON_MAX - 1;
    for (uint32_t i = 0; i < n; i++) to[i] = (char)(c->rx_payload[i] >= 0x20 && c->rx_payload[i] < 0x7f ? c->rx_payload[i] : '?');
    to[n] = 0;
}

static void hello_ack_refuse(struct td_xfer *x, struct td_xfer_conn *c, td_status status, const char *reason)
{
    struct td_xfer_frame f = {.type = TD_XFER_HELLO_ACK, .status = (int16_t)status, .length = (uint32_t)strlen(reason)};
    uint8_t bytes[64 + TD_XFER_REASON_MAX];
    td_xfer_frame_encode(&f, bytes);
    memcpy(bytes + 64, reason, f.length);
    send(c->fd, bytes, 64 + f.length, MSG_DONTWAIT | MSG_NOSIGNAL); /* a courtesy on a fresh socket: lost if it does not fit */
    x->n_refused_peers++;
    xfer_conn_close(x, c, status, reason, false);
}

static void on_hello(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_hello hello;
    char reason[TD_XFER_REASON_MAX];
    memcpy(&hello, c->rx_payload, sizeof hello);
    if (hello.instance[sizeof hello.instance - 1] || hello.nonce == 0) {
        refuse(x, c, "hello is malformed");
        return;
    }
    memcpy(c->peer_instance, hello.instance, sizeof c->peer_instance);
    for (char *p = c->peer_instance; *p; p++)
        if (*p < 0x21 || *p > 0x7e) *p = '?';
    if (!x->block_bytes || hello.layout_hash != x->layout_hash || hello.block_bytes != x->block_bytes) {
        say(reason, "layout %016" PRIx64 " with blocks of %" PRIu64 " bytes is not ours, %016" PRIx64 " with %zu", hello.layout_hash,
                 hello.block_bytes, x->layout_hash, x->block_bytes);
        hello_ack_refuse(x, c, TD_ERR_UNSUPPORTED, reason);
        return;
    }
    c->peer_incarnation = hello.incarnation;
    c->tag = c->nonce ^ hello.nonce;
    xfer_conn_say_hello(x, c, TD_XFER_HELLO_ACK);
    c->state = XFER_CONN_READY;
}

static void on_hello_ack(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_hello hello;
    char reason[TD_XFER_REASON_MAX];
    if (c->rx_frame.status) {
        char theirs[TD_XFER_REASON_MAX];
        take_reason(theirs, c);
        say(reason, "refused: %.140s", theirs);
        xfer_conn_close(x, c, (td_status)c->rx_frame.status, reason, false);
        return;
    }
    memcpy(&hello, c->rx_payload, sizeof hello);
    if (c->path == TD_XFER_PATH_SHM && !td_xfer_key_equal(hello.proof, c->peer_proof)) {
        xfer_conn_close(x, c, TD_ERR_PEER, "the socket on this host is not the grant's", false);
    } else if (hello.incarnation != c->peer_incarnation) {
        xfer_conn_close(x, c, TD_ERR_STALE, "another process has the address: the grant is an old one", false);
    } else if (hello.layout_hash != x->layout_hash || hello.block_bytes != x->block_bytes || hello.nonce == 0) {
        xfer_conn_close(x, c, TD_ERR_UNSUPPORTED, "its layout is not ours", false);
    } else {
        c->tag = c->nonce ^ hello.nonce;
        c->state = XFER_CONN_READY;
        if (c->path == TD_XFER_PATH_SHM && !xfer_shm_send_mem(x, c)) {
            c->state = XFER_CONN_HELLO; /* nothing is attached yet: the ops that wait may go another way */
            xfer_conn_close(x, c, TD_ERR_PEER, "could not hand over the pool", false);
            return;
        }
        conn_ready(x, c);
    }
}

static void on_open(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (c->path == TD_XFER_PATH_SHM && (!c->source || c->rx_frame.op >= c->n_words)) {
        refuse(x, c, "open without memory");
        return;
    }
    td_status status = td_xfer_core_rx_open(&x->core, c->id, c->path, &c->rx_frame, c->rx_payload);
    if (status == TD_ERR_PEER) {
        x->n_refused_peers += c->proven;
        refuse(x, c, "open with a wrong key");
        return;
    }
    if (status == TD_OK && !c->proven) {
        c->proven = true;
        x->n_unproven--;
    }
    c->last_use_ns = xfer_now(x);
}

static void on_ref(struct td_xfer *x, struct td_xfer_conn *c)
{
    uint32_t first;
    int32_t ids[TD_XFER_REF_MAX], n = (int32_t)(c->rx_frame.length / 4 - 1);
    memcpy(&first, c->rx_payload, 4);
    memcpy(ids, c->rx_payload + 4, (size_t)n * 4);
    if (td_xfer_core_rx_ref(&x->core, c->id, &c->rx_frame, first, ids, n, c->n_source_blocks) == TD_ERR_CORRUPT)
        refuse(x, c, "ref names blocks that are not in the grant, or twice");
}

/* A whole frame other than DATA. May close the connection. */
static void on_frame(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct td_xfer_frame *f = &c->rx_frame;
    char reason[TD_XFER_REASON_MAX];
    uint64_t now = xfer_now(x);
    if (c->state == XFER_CONN_HELLO) {
        if (c->initiator) on_hello_ack(x, c);
        else on_hello(x, c);
        return;
    }
    switch ((enum td_xfer_frame_type)f->type) {
    case TD_XFER_MEM: {
        struct td_xfer_mem mem;
        memcpy(&mem, c->rx_payload, sizeof mem);
        if (xfer_shm_take_mem(x, c, &mem, reason)) refuse(x, c, reason);
        break;
    }
    case TD_XFER_OPEN: on_open(x, c); break;
    case TD_XFER_REF: on_ref(x, c); break;
    case TD_XFER_FINAL:
        if (td_xfer_core_rx_final(&x->core, now, c->id, f, c->rx_payload) == TD_ERR_CORRUPT) refuse(x, c, "final before the last byte");
        break;
    case TD_XFER_ABORT:
        take_reason(reason, c);
        td_xfer_core_rx_abort(&x->core, c->id, f, reason);
        break;
    case TD_XFER_DONE:
        if (td_xfer_core_rx_done(&x->core, now, c->id, f) == TD_ERR_CORRUPT) refuse(x, c, "done before final");
        break;
    case TD_XFER_FAIL:
        take_reason(reason, c);
        td_xfer_core_rx_fail(&x->core, now, c->id, f, reason);
        break;
    case TD_XFER_PING: break;
    case TD_XFER_HELLO:
    case TD_XFER_HELLO_ACK:
    case TD_XFER_DATA:
    case TD_XFER_N_TYPES: TD_ASSERT(!"on_header lets these pass by here");
    }
}

/* Which frames may come in this state and role. */
static bool frame_expected(const struct td_xfer_conn *c, uint8_t type)
{
    if (c->state == XFER_CONN_HELLO) return type == (c->initiator ? TD_XFER_HELLO_ACK : TD_XFER_HELLO);
    if (type == TD_XFER_PING) return true;
    if (c->initiator) return type == TD_XFER_DONE || type == TD_XFER_FAIL;
    return type >= TD_XFER_MEM && type <= TD_XFER_ABORT;
}

/* A whole header. May close the connection. */
static void on_header(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_err err;
    if (td_xfer_frame_decode(c->rx_header, &c->rx_frame, &err)) {
        err.msg[TD_XFER_REASON_MAX - 1] = 0;
        refuse(x, c, err.msg);
        return;
    }
    const struct td_xfer_frame *f = &c->rx_frame;
    if (!frame_expected(c, f->type) || f->conn != (c->state == XFER_CONN_READY ? c->tag : 0)) {
        refuse(x, c, "frame of another connection or out of turn");
        return;
    }
    c->n_payload = 0;
    c->rx_drop = false;
    if (f->type == TD_XFER_DATA) {
        td_status status = td_xfer_core_rx_data(&x->core, c->id, f);
        c->last_use_ns = xfer_now(x);
        if (status == TD_ERR_CORRUPT) refuse(x, c, "data outside the grant, or twice");
        else c->rx_drop = status == TD_ERR_STALE;
    }
}

/* Reads until the socket is empty or the turn is over. May close the connection. */
static void conn_read(struct td_xfer *x, struct td_xfer_conn *c)
{
    uint64_t id = c->id;
    for (size_t turn = 0; turn < XFER_TURN_BYTES;) {
        ssize_t k;
        if (c->n_header < 64) {
            k = c->path == TD_XFER_PATH_SHM ? xfer_shm_recv(c, c->rx_header + c->n_header, 64 - c->n_header)
                                            : recv(c->fd, c->rx_header + c->n_header, 64 - c->n_header, MSG_DONTWAIT);
            if (k > 0 && (c->n_header += (uint32_t)k) == 64) on_header(x, c);
        } else if (c->rx_frame.type == TD_XFER_DATA) {
            k = xfer_tcp_data_read(x, c);
        } else {
            k = recv(c->fd, c->rx_payload + c->n_payload, c->rx_frame.length - c->n_payload, MSG_DONTWAIT);
            if (k > 0) c->n_payload += (uint32_t)k;
        }
        if (k == 0) {
            xfer_conn_close(x, c, TD_ERR_PEER, "closed by peer", c->state == XFER_CONN_READY);
            return;
        }
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK)
                xfer_conn_close(x, c, TD_ERR_PEER, strerror(errno), c->state == XFER_CONN_READY);
            return;
        }
        if (!xfer_conn_by_id(x, id)) return;
        turn += (size_t)k;
        c->last_rx_ns = xfer_now(x);
        if (c->n_header == 64 && c->n_payload == c->rx_frame.length) {
            c->n_header = 0;
            if (c->rx_frame.type != TD_XFER_DATA) on_frame(x, c);
            if (!xfer_conn_by_id(x, id)) return;
            c->n_payload = 0;
        }
    }
}

/* --- sending -------------------------------------------------------------------------------------------------------------------- */

/* Sends until the socket is full, nothing is left or the turn is over (tx_ready stays true then). May close the connection. */
static void conn_write(struct td_xfer *x, struct td_xfer_conn *c)
{
    for (size_t turn = 0; turn < XFER_TURN_BYTES;) {
        ssize_t k;
        if (c->overflow) {
            refuse(x, c, "asks and does not read the answers");
            return;
        }
        if (c->tx_header_left || c->tx_left) {
            k = xfer_tcp_data_write(x, c);
        } else if (c->out_used) {
            k = send(c->fd, c->out + c->out_at, c->out_used, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (k > 0) {
                c->out_at += (uint32_t)k;
                c->out_used -= (uint32_t)k;
                if (!c->out_used) c->out_at = 0;
            }
        } else {
            struct td_xfer_tx tx;
            if (!c->initiator || c->state != XFER_CONN_READY || !td_xfer_core_tx_next(&x->core, c->id, &c->tx_cursor, XFER_MAX_IOV, &tx)) {
                c->tx_ready = false;
                if (c->want_out) watch(x, c, EPOLL_CTL_MOD, false);
                return;
            }
            c->last_use_ns = xfer_now(x);
            if (tx.frame.type == TD_XFER_DATA) {
                tx.frame.conn = c->tag;
                td_xfer_frame_encode(&tx.frame, c->tx_header);
                c->tx_header_left = 64;
                c->tx_left = tx.frame.length;
                c->tx_op = tx.op;
                c->tx_handle = tx.frame.handle;
                c->tx_offset = tx.frame.offset;
            } else {
                xfer_conn_queue(x, c, &tx.frame, tx.payload);
            }
            continue;
        }
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                xfer_conn_close(x, c, TD_ERR_PEER, strerror(errno), c->state == XFER_CONN_READY);
                return;
            }
            c->tx_ready = false;
            if (!c->want_out) watch(x, c, EPOLL_CTL_MOD, true);
            return;
        }
        c->last_tx_ns = xfer_now(x);
        turn += (size_t)k;
    }
}

static void connect_finished(struct td_xfer *x, struct td_xfer_conn *c)
{
    int e = 0;
    socklen_t n = sizeof e;
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &e, &n)) e = errno;
    if (e) {
        char reason[TD_XFER_REASON_MAX];
        say(reason, "connect: %s", strerror(e));
        xfer_conn_close(x, c, TD_ERR_PEER, reason, false);
        return;
    }
    c->state = XFER_CONN_HELLO;
    c->last_rx_ns = xfer_now(x);
    watch(x, c, EPOLL_CTL_MOD, false);
    xfer_conn_say_hello(x, c, TD_XFER_HELLO);
}

/* --- the progress thread -------------------------------------------------------------------------------------------------------- */

/* Silence, heartbeats, handshakes that take too long, idle connections. */
static void check_conns(struct td_xfer *x, uint64_t now)
{
    if (x->accept_paused) pause_accept(x, false);
    for (uint32_t i = 0; i < XFER_MAX_CONNS; i++) {
        struct td_xfer_conn *c = &x->conns[i];
        if (c->state == XFER_CONN_FREE) continue;
        if (since(now, c->last_rx_ns) > x->peer_timeout_ns) {
            x->n_refused_peers += !c->initiator && !c->proven;
            xfer_conn_close(x, c, TD_ERR_PEER, c->state == XFER_CONN_CONNECTING ? "no answer to connect" : "silent for too long", false);
        } else if (!c->initiator && !c->proven && since(now, c->born_ns) > 2 * x->peer_timeout_ns) {
            x->n_refused_peers++;
            xfer_conn_close(x, c, TD_ERR_PEER, "showed no key", false);
        } else if (c->state == XFER_CONN_READY) {
            bool busy = !c->initiator || since(now, c->last_use_ns) < XFER_IDLE_NS;
            for (uint32_t k = 0; k < x->core.max_ops && !busy; k++) busy = x->core.ops[k].conn == c->id;
            if (!busy) {
                xfer_conn_close(x, c, TD_ERR_PEER, "idle", true);
            } else if (since(now, c->last_tx_ns) >= x->peer_timeout_ns / 4 && !c->out_used && !c->tx_left) {
                struct td_xfer_frame ping = {.type = TD_XFER_PING};
                xfer_conn_queue(x, c, &ping, NULL);
            }
        }
    }
}

static void on_event(struct td_xfer *x, const struct epoll_event *e)
{
    if (e->data.u64 == KEY_BELL) {
        td_doorbell_clear(&x->bell);
    } else if (e->data.u64 == KEY_TCP) {
        accept_some(x, x->tcp_fd, TD_XFER_PATH_TCP);
    } else if (e->data.u64 == KEY_SHM) {
        accept_some(x, x->shm_fd, TD_XFER_PATH_SHM);
    } else {
        struct td_xfer_conn *c = xfer_conn_by_id(x, e->data.u64);
        if (!c) return; /* closed earlier in this turn */
        if (c->state == XFER_CONN_CONNECTING) {
            connect_finished(x, c);
            return;
        }
        if (e->events & EPOLLOUT) c->tx_ready = true;
        if (e->events & (EPOLLIN | EPOLLHUP | EPOLLERR)) conn_read(x, c);
    }
}

static void *progress(void *ctx)
{
    struct td_xfer *x = ctx;
    struct epoll_event events[64];
    int n = 0;
    pthread_mutex_lock(&x->lock);
    x->loop_ns = xfer_now(x);
    uint64_t slept_until = x->loop_ns;
    while (!x->stop) {
        uint64_t now = xfer_now(x), tick;
        if (now > slept_until && now - slept_until > x->peer_timeout_ns / 2) { /* we were stopped */
            for (uint32_t i = 0; i < XFER_MAX_CONNS; i++) x->conns[i].last_rx_ns = now;
        }
        td_xfer_core_tick(&x->core, now);
        for (int i = 0; i < n; i++) on_event(x, &events[i]);
        if (x->attach_due) attach_ops(x);
        bool busy = false;
        for (uint32_t i = 0; i < XFER_MAX_CONNS; i++) {
            struct td_xfer_conn *c = &x->conns[i];
            if ((c->state == XFER_CONN_HELLO || c->state == XFER_CONN_READY) && c->tx_ready) conn_write(x, c);
            if (c->state != XFER_CONN_FREE && c->tx_ready) busy = true;
        }
        if (xfer_shm_copy(x)) busy = true;
        /* Timers go by the start of the turn: if we were stopped in the middle of it, nobody is condemned before the next turn has listened. */
        if (now >= x->next_check_ns) {
            check_conns(x, now);
            x->next_check_ns = now + x->peer_timeout_ns / 16;
            busy = true; /* what it queued goes out in the next turn */
        }
        if (x->attach_due) busy = true;
        tick = td_xfer_core_tick(&x->core, now);
        if (x->n_conns || x->accept_paused) tick = tick < x->next_check_ns ? tick : x->next_check_ns;
        uint64_t wait_ms = tick == TD_NEVER_NS ? UINT64_MAX : tick <= now ? 0 : (tick - now + TD_NS_PER_MS - 1) / TD_NS_PER_MS;
        if (x->hooks.now_ns && wait_ms > 5) wait_ms = 5; /* an injected clock does not wake us */
        int timeout = busy ? 0 : wait_ms > 60000 ? 60000 : (int)wait_ms;
        slept_until = now + (uint64_t)timeout * TD_NS_PER_MS;
        unlock_and_wake(x);
        n = epoll_wait(x->epoll_fd, events, 64, timeout);
        if (n < 0) {
            TD_ASSERT(errno == EINTR);
            n = 0;
        }
        pthread_mutex_lock(&x->lock);
        if (n) slept_until = xfer_now(x) < slept_until ? xfer_now(x) : slept_until;
    }
    pthread_mutex_unlock(&x->lock);
    return NULL;
}

/* --- public --------------------------------------------------------------------------------------------------------------------- */

static bool epoll_add(struct td_xfer *x, int fd, uint64_t key)
{
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = key};
    return fd < 0 || epoll_ctl(x->epoll_fd, EPOLL_CTL_ADD, fd, &e) == 0;
}

td_status td_xfer_open(const struct td_xfer_config *config, struct td_xfer **ret_x, struct td_err *err)
{
    const char *instance = config->instance ? config->instance : "";
    if (strlen(instance) >= TD_XFER_NAME_MAX)
        return td_fail(err, TD_ERR_INVALID, "xfer: instance \"%.80s\" is longer than %d bytes", instance, TD_XFER_NAME_MAX - 1);
    for (const char *p = instance; *p; p++)
        if (*p < 0x21 || *p > 0x7e) return td_fail(err, TD_ERR_INVALID, "xfer: instance \"%s\" has a byte that is not printable ASCII or a space", instance);
    if (config->path > TD_XFER_PATH_SHM) return td_fail(err, TD_ERR_INVALID, "xfer: path is %d, must be 0..2", (int)config->path);
    uint32_t timeout_ms = config->peer_timeout_ms ? config->peer_timeout_ms : 2000;
    if (timeout_ms < 50 || timeout_ms > 600000) return td_fail(err, TD_ERR_INVALID, "xfer: peer_timeout_ms is %u, must be 50..600000", timeout_ms);

    struct td_xfer *x = calloc(1, sizeof *x);
    if (!x) return td_fail(err, TD_ERR_NOMEM, "xfer: out of memory");
    x->epoll_fd = x->tcp_fd = x->shm_fd = x->arena_ro_fd = x->words_fd = x->bell.fd = -1;
    x->hooks = config->hooks;
    x->incarnation = config->incarnation;
    x->layout_hash = config->layout_hash;
    x->path = config->path;
    x->peer_timeout_ns = timeout_ms * TD_NS_PER_MS;
    memcpy(x->instance, instance, strlen(instance));
    pthread_mutex_init(&x->lock, NULL);

    td_status status = TD_ERR_NOMEM;
    struct td_xfer_core_hooks hooks = {.ctx = x, .random_u64 = xfer_random, .send = core_send, .op_handle = core_op_handle};
    x->conns = calloc(XFER_MAX_CONNS, sizeof *x->conns);
    x->op_aux = calloc(config->max_ops ? config->max_ops : 1, sizeof *x->op_aux);
    if (!x->conns || !x->op_aux) {
        td_fail(err, TD_ERR_NOMEM, "xfer: out of memory");
        goto err_close;
    }
    status = td_xfer_core_create(&x->core, config->max_slots, config->max_ops, x->peer_timeout_ns / 8, &hooks, err);
    if (status) goto err_close;
    status = td_doorbell_open(&x->bell, err);
    if (status) goto err_close;
    x->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (x->epoll_fd < 0) {
        status = td_fail(err, TD_ERR_IO, "xfer: epoll: %s", strerror(errno));
        goto err_close;
    }
    if (x->path != TD_XFER_PATH_SHM && (status = xfer_tcp_listen(x, config, err))) goto err_close;
    if (x->path != TD_XFER_PATH_TCP && (status = xfer_shm_listen(x, err))) goto err_close;
    if (!epoll_add(x, x->bell.fd, KEY_BELL) || !epoll_add(x, x->tcp_fd, KEY_TCP) || !epoll_add(x, x->shm_fd, KEY_SHM)) {
        status = td_fail(err, TD_ERR_IO, "xfer: epoll_ctl: %s", strerror(errno));
        goto err_close;
    }
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals are the program's, not this thread's */
    int e = pthread_create(&x->thread, NULL, progress, x);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (e) {
        status = td_fail(err, TD_ERR_IO, "xfer: thread: %s", strerror(e));
        goto err_close;
    }
    x->thread_runs = true;
    pthread_setname_np(x->thread, "td-xfer");
    *ret_x = x;
    return TD_OK;

err_close:
    td_xfer_close(x);
    return status;
}

void td_xfer_close(struct td_xfer *x)
{
    if (!x) return;
    if (x->thread_runs) {
        pthread_mutex_lock(&x->lock);
        x->stop = true;
        pthread_mutex_unlock(&x->lock);
        td_doorbell_ring(&x->bell);
        pthread_join(x->thread, NULL);
    }
    for (uint32_t i = 0; x->words && i < x->core.max_ops; i++) xfer_shm_op_handle(x, i, 0); /* no copy of what comes after us is valid */
    for (uint32_t i = 0; x->conns && i < XFER_MAX_CONNS; i++) {
        if (x->conns[i].state == XFER_CONN_FREE) continue;
        close(x->conns[i].fd);
        xfer_shm_conn_clear(&x->conns[i]);
    }
    if (x->words) munmap(x->words, (size_t)x->core.max_ops * sizeof *x->words);
    int fds[] = {x->epoll_fd, x->tcp_fd, x->shm_fd, x->arena_ro_fd, x->words_fd};
    for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++)
        if (fds[i] >= 0) close(fds[i]);
    td_doorbell_close(&x->bell);
    td_xfer_core_destroy(&x->core);
    pthread_mutex_destroy(&x->lock);
    free(x->conns);
    free(x->op_aux);
    free(x);
}

uint16_t td_xfer_port(const struct td_xfer *x)
{
    return x->port;
}

td_status td_xfer_mem_add(struct td_xfer *x, const struct td_arena *arena, size_t block_bytes, int32_t n_blocks, struct td_err *err)
{
    if (block_bytes < 1 || block_bytes >= (size_t)1 << 30 || n_blocks < 1 || n_blocks > 1 << 28 || (size_t)n_blocks > arena->bytes / block_bytes)
        return td_fail(err, TD_ERR_INVALID, "xfer: %d blocks of %zu bytes do not lie in an arena of %zu bytes", n_blocks, block_bytes, arena->bytes);
    if (x->path == TD_XFER_PATH_SHM && arena->memfd < 0)
        return td_fail(err, TD_ERR_UNSUPPORTED, "xfer: path shm needs a pool in shareable memory");
    td_status status = TD_OK;
    pthread_mutex_lock(&x->lock);
    if (x->block_bytes) status = td_fail(err, TD_ERR_INVALID, "xfer: memory was added already");
    if (!status && arena->memfd >= 0 && x->path != TD_XFER_PATH_TCP) status = xfer_shm_offer(x, arena, err);
    if (!status) {
        x->base = arena->base;
        x->block_bytes = block_bytes;
        x->n_blocks = n_blocks;
        td_xfer_core_mem(&x->core, block_bytes, n_blocks);
    }
    pthread_mutex_unlock(&x->lock);
    return status;
}

td_status td_xfer_grant(struct td_xfer *x, const int32_t *block_ids, int32_t n_blocks, uint64_t deadline_ns, uint64_t user, uint32_t *ret_slot,
                        uint8_t *blob, size_t *ret_blob_bytes, struct td_err *err)
{
    uint32_t id;
    pthread_mutex_lock(&x->lock);
    uint64_t tick = x->core.next_tick_ns;
    td_status status = td_xfer_core_grant(&x->core, block_ids, n_blocks, deadline_ns, user, &id, err);
    if (!status) {
        const struct td_xfer_slot *s = &x->core.slots[id];
        struct td_xfer_grant_blob g = {.slot = id, .generation = s->generation, .n_blocks = n_blocks, .incarnation = x->incarnation,
                                       .layout_hash = x->layout_hash, .block_bytes = x->block_bytes, .port = x->port, .path = (uint8_t)x->path};
        memcpy(g.key, s->key, sizeof g.key);
        memcpy(g.proof, x->proof, sizeof g.proof);
        memcpy(g.host, x->host, sizeof g.host);
        memcpy(g.shm_name, x->shm_name, sizeof g.shm_name);
        memcpy(g.instance, x->instance, sizeof g.instance);
        td_xfer_grant_encode(&g, blob);
        *ret_blob_bytes = sizeof g;
        *ret_slot = id;
    }
    bool ring = x->core.next_tick_ns < tick; /* the thread sleeps past the new deadline */
    unlock_and_wake(x);
    if (ring) td_doorbell_ring(&x->bell);
    return status;
}

void td_xfer_revoke(struct td_xfer *x, uint32_t slot, const char *reason)
{
    pthread_mutex_lock(&x->lock);
    td_xfer_core_revoke(&x->core, slot, reason);
    unlock_and_wake(x);
    td_doorbell_ring(&x->bell);
}

td_status td_xfer_op_start(struct td_xfer *x, const uint8_t *blob, size_t blob_bytes, uint64_t deadline_ns, uint64_t user, uint32_t *ret_op,
                           int32_t *ret_n_blocks, struct td_err *err)
{
    struct td_xfer_grant_blob g;
    td_status status = td_xfer_grant_decode(blob, blob_bytes, &g, err);
    if (status) return status;
    if (g.layout_hash != x->layout_hash)
        return td_fail(err, TD_ERR_UNSUPPORTED, "grant of %s: layout %016" PRIx64 " is not ours, %016" PRIx64, g.instance, g.layout_hash, x->layout_hash);
    if ((g.path == TD_XFER_PATH_SHM || x->path == TD_XFER_PATH_SHM) && (g.path == TD_XFER_PATH_TCP || x->path == TD_XFER_PATH_TCP))
        return td_fail(err, TD_ERR_UNSUPPORTED, "grant of %s: one side allows only tcp, the other only shm", g.instance);
    pthread_mutex_lock(&x->lock);
    if (!x->words && (g.path == TD_XFER_PATH_SHM || x->path == TD_XFER_PATH_SHM)) {
        status = td_fail(err, TD_ERR_UNSUPPORTED, "grant of %s: only shm is allowed, and this side's pool is not shareable", g.instance);
    } else {
        status = td_xfer_core_op_start(&x->core, &g, deadline_ns, user, ret_op, err);
    }
    if (!status) {
        x->op_aux[*ret_op].waits_for = 0;
        x->op_aux[*ret_op].no_shm = false;
        attach_warm(x, *ret_op);
        *ret_n_blocks = g.n_blocks;
    }
    unlock_and_wake(x);
    if (!status) td_doorbell_ring(&x->bell);
    return status;
}

td_status td_xfer_submit(struct td_xfer *x, uint32_t op, int32_t first, const int32_t *block_ids, int32_t n, bool final, const void *note,
                         size_t note_bytes)
{
    pthread_mutex_lock(&x->lock);
    td_status status = td_xfer_core_submit(&x->core, xfer_now(x), op, first, block_ids, n, final, note, note_bytes);
    if (!status) {
        struct td_xfer_conn *c = xfer_conn_by_id(x, x->core.ops[op].conn);
        if (c && !c->want_out) c->tx_ready = true;
    }
    unlock_and_wake(x);
    if (!status) td_doorbell_ring(&x->bell);
    return status;
}

void td_xfer_cancel(struct td_xfer *x, uint32_t op, const char *reason)
{
    pthread_mutex_lock(&x->lock);
    td_xfer_core_cancel(&x->core, op, reason);
    unlock_and_wake(x);
    td_doorbell_ring(&x->bell);
}

size_t td_xfer_poll(struct td_xfer *x, struct td_xfer_event *events, size_t max)
{
    pthread_mutex_lock(&x->lock);
    size_t n = td_xfer_core_poll(&x->core, events, max);
    pthread_mutex_unlock(&x->lock);
    return n;
}

void td_xfer_stats(struct td_xfer *x, struct td_xfer_stats *ret_stats)
{
    pthread_mutex_lock(&x->lock);
    *ret_stats = x->core.stats;
    ret_stats->n_slots_used = x->core.n_slots_used;
    ret_stats->n_ops_used = x->core.n_ops_used;
    ret_stats->n_conns = x->n_conns;
    ret_stats->n_bad_frames = x->n_bad_frames;
    ret_stats->n_refused_peers = x->n_refused_peers;
    pthread_mutex_unlock(&x->lock);
}
