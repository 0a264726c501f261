/* endpoint.c - one transfer endpoint: the public calls, the progress thread, connections and their
 * frames. How connections come to stand: connect.c.
 *
 * Connection (initiator = the side that sends blocks). What lies in brackets depends on the path
 * and the configuration:
 *
 *   initiator  CONNECTING -> [TLS] -> HELLO --HELLO_ACK fits--> [SETUP] -> READY --> OPEN, DATA |
 *                                                                  REF, FINAL, ABORT, PING
 *   acceptor                 [TLS] -> HELLO --HELLO fits------> [SETUP] -> READY --> DONE, FAIL,
 *                                                                  PING
 *   either     any --error, EOF, timeout, foreign or malformed frame--> closed; the core decides
 *              what that means for slots and ops
 *
 *   TLS        the handshake, on the data port; every byte from the first on goes by the channel
 *   HELLO      with a cluster secret CHALLENGE and PROOF come before HELLO_ACK (connect_proof.c)
 *   SETUP      the backend's own frames (has_setup), until it calls xfer_path_ready
 *   lanes      a READY connection of the initiator dials more sockets, whose HELLO names its tag;
 *              they carry DATA and FINAL alone and live and die with lane 0
 *
 * HELLO must name the same layout, HELLO_ACK the incarnation that the grant named. Until a
 * connection has shown the key of a grant it is unproven: at most XFER_MAX_UNPROVEN of them stand,
 * the oldest goes first, each for two peer time-outs. A connection's memory is fixed.
 *
 * The progress thread's turn: events of epoll (deadlines first: what is late is late even if its
 * bytes lie in the socket), then connections for waiting ops, then 1 MiB of copying for shm (up to
 * 2 while transfers end), then sending (what the copy completed, too), then connection timers. A
 * turn that comes much too late means that this process was stopped: it owes its peers the time to
 * be heard, so their silence is counted from now. Fairness: frames are at most 1 MiB and ops of a
 * connection take turns per frame, every other one by the requests' ordering key (struct
 * td_xfer_turns); connections take turns per XFER_TURN_BYTES. */
#include "common/transfer/transfer.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/base/entropy.h"
#include "common/base/hash.h"
#include "common/base/min.h"
#include "common/base/table.h"
#include "common/transfer/backend.h"
#include "common/transfer/endpoint.h"

uint64_t xfer_now(const struct td_xfer *x)
{
    return x->hooks.now_ns ? x->hooks.now_ns(x->hooks.ctx) : td_now_ns();
}

uint64_t xfer_random(void *ctx)
{
    struct td_xfer *x = ctx;
    if (x->hooks.random_u64) return x->hooks.random_u64(x->hooks.ctx);
    if (!x->random.n) {
        td_random_fill(x->random.value, sizeof x->random.value);
        x->random.n = sizeof x->random.value / sizeof x->random.value[0];
    }
    uint64_t v = x->random.value[--x->random.n];
    x->random.value[x->random.n] = 0; /* keys come from here: none stays behind */
    return v;
}

/* A reason for people; truncation is fine. */
void xfer_say(char to[TD_XFER_REASON_MAX], const char *fmt, ...)
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

/* Public calls begin here. */
static void enter(struct td_xfer *x)
{
    atomic_fetch_add(&x->loop.n_callers, 1);
    pthread_mutex_lock(&x->lock);
    atomic_fetch_sub(&x->loop.n_callers, 1);
}

/* Every public call and every turn ends here: unlock, and ring if events were queued. */
static void unlock_and_wake(struct td_xfer *x)
{
    bool wake = x->loop.n_woken != x->core.n_emitted;
    x->loop.n_woken = x->core.n_emitted;
    pthread_mutex_unlock(&x->lock);
    if (wake && x->hooks.wake) x->hooks.wake(x->hooks.ctx);
}

/* There is something for the progress thread. While it is awake that costs no system call: it
 * looks at `rung` before it sleeps, and says that it sleeps before it looks. */
void xfer_ring(struct td_xfer *x)
{
    atomic_store(&x->loop.rung, true);
    if (atomic_load(&x->loop.sleeps)) td_wakeup_signal(&x->loop.wakeup);
}

/* --- connections ------------------------------------------------------------------------------ */

struct td_xfer_conn *xfer_conn_by_id(struct td_xfer *x, uint64_t id)
{
    struct td_xfer_conn *c = &x->conns[id & 0xffff];
    return (id & 0xffff) < XFER_MAX_CONNS && c->state != XFER_CONN_FREE && c->id == id ? c : NULL;
}

bool xfer_conn_is_used(const struct td_xfer *x, const struct td_xfer_conn *c)
{
    bool used = !c->initiator || c->lane;
    for (uint32_t i = 0; i < x->core.max_ops && !used; i++)
        used = td_xfer_core_op_is_on(&x->core, i, c->id);
    return used;
}

bool xfer_watch_fd(struct td_xfer *x, int fd, uint64_t key)
{
    struct epoll_event e = {.events = EPOLLIN, .data.u64 = key};
    return fd < 0 || epoll_ctl(x->loop.epoll_fd, EPOLL_CTL_ADD, fd, &e) == 0;
}

bool xfer_conn_watch(struct td_xfer *x, struct td_xfer_conn *c, int op, bool out)
{
    struct epoll_event e = {.events = EPOLLIN | (out ? EPOLLOUT : 0u), .data.u64 = c->id};
    c->tx.want_out = out;
    return epoll_ctl(x->loop.epoll_fd, op, c->fd, &e) == 0;
}

void xfer_conn_be(struct td_xfer_conn *c, const struct td_transfer_backend *b)
{
    c->backend = b;
    if (b->conn.init) b->conn.init(c);
}

struct td_xfer_conn *xfer_conn_new(struct td_xfer *x, int fd, const struct td_transfer_backend *b,
                                   bool initiator)
{
    struct td_xfer_conn *c = NULL;
    if (!initiator && x->n_conns >= XFER_MAX_CONNS - XFER_RESERVED_CONNS) return NULL;
    for (uint32_t i = 0; i < XFER_MAX_CONNS && !c; i++)
        if (x->conns[i].state == XFER_CONN_FREE) c = &x->conns[i];
    if (!c) return NULL;
    memset(c, 0, sizeof *c);
    c->own = x->own + (size_t)(c - x->conns) * x->own_bytes;
    memset(c->own, 0, x->own_bytes);
    c->id = c->conn_id = ++x->n_conn_serials << 16 | (uint64_t)(c - x->conns);
    c->fd = fd;
    c->initiator = initiator;
    xfer_conn_be(c, b);
    do c->nonce = xfer_random(x);
    while (c->nonce == 0);
    c->born_ns = c->last_rx_ns = c->last_tx_ns = c->last_use_ns = xfer_now(x);
    bool encrypted = x->tls && !b->local;
    if (encrypted && td_tls_conn_open(x->tls, fd, initiator, &c->tls, NULL)) return NULL;
    c->state = encrypted ? XFER_CONN_TLS : XFER_CONN_HELLO;
    if (!xfer_conn_watch(x, c, EPOLL_CTL_ADD, false)) {
        td_tls_conn_close(c->tls);
        c->state = XFER_CONN_FREE;
        return NULL;
    }
    c->live_at = x->n_conns;
    x->live[x->n_conns++] = c;
    if (!initiator) x->n_unproven++;
    return c;
}

/* Ends what the connection has: the backend's part, its channel, its socket. */
static void conn_end(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (c->tls) {
        /* so that the peer knows an end from a cut; lost if it does not fit */
        if (c->state > XFER_CONN_TLS) td_tls_shutdown(c->tls);
        td_tls_conn_close(c->tls);
    }
    if (c->backend->conn.close) c->backend->conn.close(x, c);
    close(c->fd); /* leaves the epoll set by itself */
}

/* And gives the entry back. */
static void conn_free(struct td_xfer *x, struct td_xfer_conn *c)
{
    conn_end(x, c);
    if (!c->initiator && !c->proven) x->n_unproven--;
    c->state = XFER_CONN_FREE;
    x->live[c->live_at] = x->live[--x->n_conns];
    x->live[c->live_at]->live_at = c->live_at;
}

/* A courtesy: why. What can not go out at once is lost. Never inside a DATA frame. */
void xfer_conn_say_last(struct td_xfer *x, struct td_xfer_conn *c, enum td_xfer_frame_type type,
                        td_status status, const char *reason)
{
    struct td_xfer_frame f = {
        .type = (uint8_t)type, .status = (int16_t)status, .length = (uint32_t)strlen(reason)};
    if (c->tx.header_left || c->tx.left || c->tx.overflow || f.length > TD_XFER_REASON_MAX ||
        !xfer_conn_queue(x, c, &f, reason))
        return;
    xfer_conn_send(c, c->tx.out + c->tx.at, c->tx.used);
}

void xfer_conn_close(struct td_xfer *x, struct td_xfer_conn *c, td_status status,
                     const char *reason, bool retry)
{
    if (c->state == XFER_CONN_FREE) return;
    uint64_t id = c->conn_id;
    char text[TD_XFER_REASON_MAX];
    bool is_cut = c->is_cut;
    if (c->lane) { /* the connection goes as a whole, but for a lane that never came to be one */
        struct td_xfer_conn *first = xfer_conn_by_id(x, id);
        bool was_part = c->state == XFER_CONN_READY;
        conn_free(x, c);
        if (first && was_part) {
            first->is_cut |= is_cut;
            xfer_conn_close(x, first, status, reason, retry);
        }
        return;
    }
    const struct td_transfer_backend *b = c->backend;
    bool was_ready = c->state == XFER_CONN_READY, initiator = c->initiator;
    enum xfer_path_stage stage =
        c->state == XFER_CONN_SETUP                                            ? XFER_PATH_SETUP
        : is_cut && (c->state == XFER_CONN_TLS || c->state == XFER_CONN_HELLO) ? XFER_PATH_CUT
                                                                               : XFER_PATH_REFUSED;
    if (initiator)
        xfer_say(text, "peer %.40s at %.40s:%u (%s): %.120s", c->peer.instance, c->peer.host,
                 c->peer.port, b->name, reason);
    else
        xfer_say(text, "peer %.40s (%s): %.80s", c->peer.instance, b->name, reason);
    if (was_ready) xfer_conn_say_last(x, c, TD_XFER_BYE, retry ? TD_ERR_AGAIN : status, reason);
    if (b->conn.fence) b->conn.fence(x, c); /* first: the core may give blocks away next */
    if (was_ready) x->conns_by_path[b->path]--;
    conn_free(x, c);
    for (uint32_t i = x->n_conns; i-- > 0;)
        if (x->live[i]->conn_id == id) conn_free(x, x->live[i]);
    if (was_ready)
        td_xfer_core_conn_lost(&x->core, xfer_now(x), id, status, text,
                               !retry   ? TD_XFER_LOST
                               : is_cut ? TD_XFER_CUT
                                        : TD_XFER_PARTED);
    if (initiator) xfer_path_failed(x, id, b->path, status, text, stage);
}

void xfer_conn_refuse(struct td_xfer *x, struct td_xfer_conn *c, const char *reason)
{
    x->told.n_bad_frames++;
    if (!c->initiator && !c->proven) x->told.n_refused_peers++;
    xfer_path_tell_refusal(x, c->fd, c->backend->path, c, reason);
    xfer_conn_close(x, c, TD_ERR_PEER, reason, false);
}

/* Frames of a connection that has no tag yet, even where a lane's HELLO has named one. */
static bool is_before_tag(uint8_t type)
{
    return type == TD_XFER_CHALLENGE || type == TD_XFER_PROOF;
}

bool xfer_conn_queue(struct td_xfer *x, struct td_xfer_conn *c, struct td_xfer_frame *f,
                     const void *payload)
{
    uint32_t n = 64 + f->length;
    if (c->tx.at && c->tx.at + c->tx.used + n > sizeof c->tx.out) {
        memmove(c->tx.out, c->tx.out + c->tx.at, c->tx.used);
        c->tx.at = 0;
    }
    if (c->tx.at + c->tx.used + n > sizeof c->tx.out) {
        c->tx.overflow = true; /* a peer that asks and does not read */
        return false;
    }
    f->conn = is_before_tag(f->type) ? 0 : c->tag;
    if (f->type == TD_XFER_HELLO || f->type == TD_XFER_OPEN || f->type == TD_XFER_PING)
        f->clock_us = (uint32_t)(xfer_now(x) / TD_NS_PER_US);
    uint8_t *to = c->tx.out + c->tx.at + c->tx.used;
    td_xfer_frame_encode(f, to);
    if (f->length) memcpy(to + 64, payload, f->length);
    c->tx.used += n;
    c->tx.ready = true;
    return true;
}

/* Many transfers that end in one turn have more answers than `out` holds: the socket takes those
 * that wait. Only by the progress thread, whose sends alone may be under way, and never inside a
 * DATA frame. */
static void make_room(struct td_xfer *x, struct td_xfer_conn *c, uint32_t n)
{
    if (c->tx.used + n <= sizeof c->tx.out || c->tx.header_left || c->tx.left ||
        !pthread_equal(pthread_self(), x->loop.thread))
        return;
    ssize_t k = xfer_conn_send(c, c->tx.out + c->tx.at, c->tx.used);
    if (k > 0) xfer_conn_sent(x, c, (size_t)k);
}

/* The core's hook: any thread, under the lock. */
static void core_send(void *ctx, uint64_t id, const struct td_xfer_frame *frame,
                      const void *payload)
{
    struct td_xfer *x = ctx;
    struct td_xfer_conn *c = xfer_conn_by_id(x, id);
    struct td_xfer_frame f = *frame;
    if (!c || c->state != XFER_CONN_READY) return;
    make_room(x, c, 64 + f.length);
    xfer_conn_queue(x, c, &f, payload);
}

static void core_op_handle(void *ctx, uint32_t op, uint64_t handle)
{
    struct td_xfer *x = ctx;
    TD_EACH_BACKEND (b)
        if (b->side.op_handle) b->side.op_handle(x, op, handle);
}

ssize_t xfer_conn_recv(struct td_xfer_conn *c, void *to, size_t n)
{
    return c->tls ? td_tls_recv(c->tls, to, n) : recv(c->fd, to, n, MSG_DONTWAIT);
}

ssize_t xfer_conn_send(struct td_xfer_conn *c, const void *from, size_t n)
{
    return c->tls ? td_tls_send(c->tls, from, n)
                  : send(c->fd, from, n, MSG_DONTWAIT | MSG_NOSIGNAL);
}

const char *xfer_conn_why(const struct td_xfer_conn *c)
{
    return c->tls && td_tls_reason(c->tls)[0] ? td_tls_reason(c->tls) : strerror(errno);
}

/* --- frames that came ------------------------------------------------------------------------- */

void xfer_conn_take_reason(char to[TD_XFER_REASON_MAX], const struct td_xfer_conn *c)
{
    uint32_t n = td_min_u32(c->rx.frame.length, TD_XFER_REASON_MAX - 1);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t byte = c->rx.payload[i];
        to[i] = (char)(byte >= 0x20 && byte < 0x7f ? byte : '?');
    }
    to[n] = 0;
}

static void on_open(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct td_transfer_backend *b = c->backend;
    if (b->conn.may_open && !b->conn.may_open(c, c->rx.frame.op)) {
        xfer_conn_refuse(x, c, "open without memory");
        return;
    }
    td_status status =
        td_xfer_core_rx_open(&x->core, c->conn_id, b->path, &c->rx.frame, c->rx.payload);
    if (status == TD_ERR_PEER) {
        x->told.n_refused_peers += c->proven;
        xfer_conn_refuse(x, c, "open with a wrong key");
        return;
    }
    if (status == TD_OK && !c->proven) {
        c->proven = true;
        x->n_unproven--;
    }
    c->last_use_ns = c->last_rx_ns;
}

static void on_ref(struct td_xfer *x, struct td_xfer_conn *c)
{
    uint32_t first;
    int32_t ids[TD_XFER_REF_MAX], n = (int32_t)(c->rx.frame.length / 4 - 1);
    memcpy(&first, c->rx.payload, 4);
    memcpy(ids, c->rx.payload + 4, (size_t)n * 4);
    int32_t n_source = c->backend->conn.n_source_blocks(x, c);
    if (td_xfer_core_rx_ref(&x->core, c->conn_id, &c->rx.frame, first, ids, n, n_source) ==
        TD_ERR_CORRUPT)
        xfer_conn_refuse(x, c, "ref names blocks that are not in the grant, or twice");
    else
        c->tx.ready = true;
}

/* The peer's clock against ours, by frames that it stamped when it made them: the one that came
 * fastest tells best. Clocks drift apart, so an old one is believed 100 us less each second. */
static void clock_seen(struct td_xfer_conn *c, uint64_t now, uint32_t said_us)
{
    uint32_t behind = (uint32_t)(now / TD_NS_PER_US) - said_us,
             drift = (uint32_t)(since(now, c->clock.as_of_ns) / (10000 * TD_NS_PER_US));
    if (c->clock.as_of_ns && (int32_t)(behind - c->clock.behind_us - drift) >= 0) return;
    c->clock.behind_us = behind;
    c->clock.as_of_ns = now;
}

static void clock_heard(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct td_xfer_frame *f = &c->rx.frame;
    if (c->initiator || c->lane ||
        (f->type != TD_XFER_HELLO && f->type != TD_XFER_OPEN && f->type != TD_XFER_PING))
        return;
    clock_seen(c, xfer_now(x), f->clock_us);
}

/* FINAL is no older than the last submit that it tells of: without that, one that was faster than
 * every frame before it (they had waited for a core or a lock) would end a transfer before its last
 * submit. */
static td_status on_final(struct td_xfer *x, struct td_xfer_conn *c)
{
    uint64_t now = xfer_now(x);
    struct td_xfer_conn *first = xfer_conn_by_id(x, c->conn_id); /* which has heard the clock */
    TD_ASSERT(first);
    clock_seen(first, now, c->rx.frame.last_us);
    return td_xfer_core_rx_final(&x->core, now,
                                 (uint32_t)(now / TD_NS_PER_US) - first->clock.behind_us,
                                 c->conn_id, &c->rx.frame, c->rx.payload);
}

void xfer_conn_begin_data(struct td_xfer *x, struct td_xfer_conn *c)
{
    td_status status = td_xfer_core_rx_data(&x->core, c->conn_id, &c->rx.frame);
    c->last_use_ns = c->last_rx_ns;
    if (status == TD_ERR_CORRUPT)
        xfer_conn_refuse(x, c, "data outside the grant, or twice");
    else
        c->rx.drop = status == TD_ERR_STALE;
}

static void on_digest(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_digest digests[TD_XFER_DIGESTS_MAX];
    int32_t n = (int32_t)(c->rx.frame.length / sizeof digests[0]);
    memcpy(digests, c->rx.payload, c->rx.frame.length);
    if (td_xfer_core_rx_digest(&x->core, c->conn_id, &c->rx.frame, digests, n) == TD_ERR_CORRUPT)
        xfer_conn_refuse(x, c, "digests of blocks that are not in the grant, or too many");
}

/* An acceptor's word does not keep the initiator from trying again. */
static void on_bye(struct td_xfer *x, struct td_xfer_conn *c)
{
    td_status status = (td_status)c->rx.frame.status;
    bool retry = c->initiator || status == TD_ERR_AGAIN;
    char reason[TD_XFER_REASON_MAX], theirs[TD_XFER_REASON_MAX];
    xfer_conn_take_reason(theirs, c);
    xfer_say(reason, "closed by peer: %.140s", theirs);
    xfer_conn_close(x, c, retry || !status ? TD_ERR_PEER : status, reason, retry);
}

/* A whole frame other than DATA, which frame_expected has let in. May close the connection. */
static void on_frame(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct td_xfer_frame *f = &c->rx.frame;
    char reason[TD_XFER_REASON_MAX];
    clock_heard(x, c);
    if (c->state == XFER_CONN_HELLO) {
        xfer_path_on_hello(x, c);
        return;
    }
    enum td_xfer_frame_type type = (enum td_xfer_frame_type)f->type;
    bool to_backend = c->state == XFER_CONN_SETUP && type != TD_XFER_BYE && type != TD_XFER_PING;
    if (to_backend) type = TD_XFER_N_TYPES;
    switch (type) {
    case TD_XFER_OPEN:
        on_open(x, c);
        break;
    case TD_XFER_REF:
        on_ref(x, c);
        break;
    case TD_XFER_FINAL:
        if (on_final(x, c) == TD_ERR_CORRUPT) xfer_conn_refuse(x, c, "final before the last byte");
        break;
    case TD_XFER_ABORT:
        xfer_conn_take_reason(reason, c);
        td_xfer_core_rx_abort(&x->core, c->conn_id, f, reason);
        break;
    case TD_XFER_DONE:
        td_xfer_core_rx_done(&x->core, xfer_now(x), c->conn_id, f);
        break;
    case TD_XFER_FAIL:
        xfer_conn_take_reason(reason, c);
        td_xfer_core_rx_fail(&x->core, xfer_now(x), c->conn_id, f, reason);
        break;
    case TD_XFER_PING:
        break;
    case TD_XFER_BYE:
        on_bye(x, c);
        break;
    case TD_XFER_DIGEST:
        on_digest(x, c);
        break;
    default: /* the backend's own */
        TD_ASSERT(c->backend->conn.on_frame);
        c->backend->conn.on_frame(x, c);
    }
}

/* Which frames may come in this state and role. */
static bool frame_expected(const struct td_xfer *x, const struct td_xfer_conn *c, uint8_t type)
{
    if (c->state == XFER_CONN_HELLO && c->initiator && type == TD_XFER_CHALLENGE)
        return x->secret && !c->proof.challenged;
    if (c->state == XFER_CONN_HELLO && !c->initiator && c->proof.challenged)
        return type == TD_XFER_PROOF;
    if (c->state == XFER_CONN_HELLO)
        return type == (c->initiator ? TD_XFER_HELLO_ACK : TD_XFER_HELLO);
    /* An acceptor is READY before its initiator, and may end then. */
    bool may_end = c->lane == 0 &&
                   (c->state == XFER_CONN_READY || (c->state == XFER_CONN_SETUP && c->initiator));
    if (type == TD_XFER_PING || (type == TD_XFER_BYE && may_end)) return true;
    const struct td_transfer_backend *b = c->backend;
    if (b->conn.expects && c->lane == 0 && b->conn.expects(c, type)) return true;
    if (c->state == XFER_CONN_SETUP) return false;
    if (c->lane)
        return !c->initiator &&
               (type == TD_XFER_DATA || type == TD_XFER_OPEN || type == TD_XFER_FINAL);
    if (c->initiator) return type == TD_XFER_DONE || type == TD_XFER_FAIL;
    switch (type) {
    case TD_XFER_OPEN:
    case TD_XFER_FINAL:
    case TD_XFER_ABORT:
    case TD_XFER_DIGEST:
        return true;
    case TD_XFER_REF:
        return b->way != TD_XFER_BY_DATA;
    default:
        return false;
    }
}

/* A whole header. May close the connection. */
static void on_header(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_err err;
    if (td_xfer_frame_decode(c->rx.header, &c->rx.frame, &err)) {
        err.msg[TD_XFER_REASON_MAX - 1] = 0;
        xfer_conn_refuse(x, c, err.msg);
        return;
    }
    const struct td_xfer_frame *f = &c->rx.frame;
    uint64_t tag = is_before_tag(f->type) ? 0 : c->tag;
    if (!frame_expected(x, c, f->type) ||
        (f->conn != tag && !(f->type == TD_XFER_HELLO && f->op))) {
        /* a lane's HELLO names its connection */
        xfer_conn_refuse(x, c, "frame of another connection or out of turn");
        return;
    }
    c->rx.n_payload = 0;
    c->rx.drop = false;
    if (f->type == TD_XFER_DATA) xfer_conn_begin_data(x, c);
}

static void conn_read(struct td_xfer *x, struct td_xfer_conn *c);

/* The socket came to its end or failed. What the peer said on lane 0 comes first: it may have
 * bound. */
static void conn_ended(struct td_xfer *x, struct td_xfer_conn *c, const char *why)
{
    uint64_t id = c->id;
    char reason[TD_XFER_REASON_MAX];
    struct td_xfer_conn *first =
        c->lane && c->state == XFER_CONN_READY ? xfer_conn_by_id(x, c->conn_id) : NULL;
    xfer_say(reason, "%s", why);
    if (first && first->state == XFER_CONN_READY) conn_read(x, first);
    if (!xfer_conn_by_id(x, id)) return;
    c->is_cut = true;
    xfer_conn_close(x, c, TD_ERR_PEER, reason, c->state == XFER_CONN_READY);
}

/* The next bytes of the stream, read ahead as far as they are there. */
static ssize_t conn_take(struct td_xfer_conn *c, void *to, size_t n)
{
    if (!c->rx.used) {
        const struct td_backend_bytes *b = &c->backend->bytes;
        size_t room = b->receive ? XFER_IN_DATA_BYTES : sizeof c->rx.ahead;
        if (c->rx.drained) {
            errno = EAGAIN;
            return -1;
        }
        ssize_t k = b->read ? b->read(c, c->rx.ahead, room) : xfer_conn_recv(c, c->rx.ahead, room);
        if (k <= 0) return k;
        c->rx.at = 0;
        c->rx.used = (uint32_t)k;
        c->rx.drained = (size_t)k < room;
    }
    return xfer_conn_in(c, to, n);
}

ssize_t xfer_conn_in(struct td_xfer_conn *c, void *to, size_t n)
{
    if (n > c->rx.used) n = c->rx.used;
    if (to) memcpy(to, c->rx.ahead + c->rx.at, n);
    c->rx.at += (uint32_t)n;
    c->rx.used -= (uint32_t)n;
    return (ssize_t)n;
}

/* Reads until the socket is empty or the turn is over. May close the connection. */
static void read_turn(struct td_xfer *x, struct td_xfer_conn *c)
{
    uint64_t id = c->id, now = xfer_now(x); /* one look: there may be many frames */
    c->rx.more = c->rx.drained = c->rx.starved = false;
    for (size_t turn = 0; turn < XFER_TURN_BYTES || c->rx.used;) {
        ssize_t k;
        if (c->rx.n_header < 64) {
            k = conn_take(c, c->rx.header + c->rx.n_header, 64 - c->rx.n_header);
            if (k > 0 && (c->rx.n_header += (uint32_t)k) == 64) on_header(x, c);
        } else if (c->rx.frame.type == TD_XFER_DATA) {
            k = c->backend->bytes.receive(x, c);
        } else {
            k = conn_take(c, c->rx.payload + c->rx.n_payload, c->rx.frame.length - c->rx.n_payload);
            if (k > 0) c->rx.n_payload += (uint32_t)k;
        }
        if (k == 0) {
            conn_ended(x, c, "closed by peer");
            return;
        }
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) {
                conn_ended(x, c, xfer_conn_why(c));
                return;
            }
            /* an answer that TLS itself owes */
            if (c->tls && td_tls_unsent(c->tls)) c->tx.ready = true;
            break;
        }
        if (!xfer_conn_by_id(x, id)) return;
        turn += (size_t)k;
        c->last_rx_ns = now;
        if (c->rx.n_header == 64 && c->rx.n_payload == c->rx.frame.length) {
            c->rx.n_header = 0;
            if (c->rx.frame.type != TD_XFER_DATA) on_frame(x, c);
            if (!xfer_conn_by_id(x, id)) return;
            c->rx.n_payload = 0;
        }
    }
    c->rx.more = c->tls && td_tls_pending(c->tls);
}

static void conn_read(struct td_xfer *x, struct td_xfer_conn *c)
{
    read_turn(x, c);
    if (x->staging) x->staging->landed(x); /* before anything else happens to its blocks */
}

/* --- sending ---------------------------------------------------------------------------------- */

/* Every socket of a connection looks for work in the next turn. */
static void wake_conn(struct td_xfer *x, uint64_t id)
{
    for (uint32_t i = 0; i < x->n_conns; i++)
        if (x->live[i]->conn_id == id && !x->live[i]->tx.want_out) x->live[i]->tx.ready = true;
}

/* The CRC32C of a block of the pool; false: it could not be read. The lock is not held. */
static bool pool_crc(struct td_xfer *x, int32_t block, uint32_t *ret_crc)
{
    if (x->staging) return x->staging->crc(x, block, ret_crc);
    *ret_crc = td_crc32c(0, xfer_block(x, block), x->pool.block_bytes);
    return true;
}

/* Computes and queues digests of one batch of blocks; false: none is due. Drops the lock. */
static bool send_digests(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_digest_work w;
    if (!td_xfer_core_digest_next(&x->core, c->conn_id, XFER_TURN_BYTES, &w)) return false;
    pthread_mutex_unlock(&x->lock);
    bool read = true;
    for (int32_t i = 0; i < w.n && read; i++) read = pool_crc(x, w.src[i], &w.digest[i].crc);
    pthread_mutex_lock(&x->lock);
    if (!read)
        td_xfer_core_op_fail(&x->core, w.op, TD_ERR_DEVICE,
                             "device: the blocks cannot be read for their digests");
    td_xfer_core_digest_end(&x->core, &w);
    return true;
}

/* Compares one batch of digests; false: none is due. */
static bool verify_digests(struct td_xfer *x)
{
    struct td_xfer_verify v;
    if (!td_xfer_core_verify_next(&x->core, &x->loop.verify_cursor, XFER_TURN_BYTES, &v))
        return false;
    const struct td_xfer_slot *s = &x->core.slots[v.slot]; /* its lists stand still while io */
    int32_t bad = -1;
    pthread_mutex_unlock(&x->lock);
    for (int32_t i = v.first; i < v.first + v.n && bad < 0; i++) {
        uint32_t crc;
        if (!pool_crc(x, s->dst[s->check.digest[i].block], &crc) || crc != s->check.digest[i].crc)
            bad = i;
    }
    pthread_mutex_lock(&x->lock);
    td_xfer_core_verify_end(&x->core, xfer_now(x), &v, bad);
    return true;
}

/* One step of TLS's handshake; a refused certificate ends the connection. */
static void conn_handshake(struct td_xfer *x, struct td_xfer_conn *c)
{
    bool want_read, want_write;
    struct td_err err;
    td_fault_point("xfer_tls");
    pthread_mutex_unlock(&x->lock); /* signatures take their time */
    td_status status = td_tls_handshake(c->tls, &want_read, &want_write, &err);
    /* else close() is a reset that overtakes the alert */
    for (int i = 0;
         status < 0 && i < 16 && recv(c->fd, x->scrap, sizeof x->scrap, MSG_DONTWAIT) > 0; i++) {
    }
    pthread_mutex_lock(&x->lock);
    c->tx.ready = false;
    if (status < 0) {
        char none; /* asks for the errno: the socket's end, or TLS's refusal (EPROTO) */
        err.msg[TD_XFER_REASON_MAX - 1] = 0;
        c->is_cut = td_tls_recv(c->tls, &none, 1) < 0 && errno == ECONNRESET;
        xfer_path_turn_away(x, c, err.msg);
        return;
    }
    if (want_write != c->tx.want_out) xfer_conn_watch(x, c, EPOLL_CTL_MOD, want_write);
    if (status == TD_INPROGRESS) return;
    c->state = XFER_CONN_HELLO;
    c->last_rx_ns = xfer_now(x);
    if (c->initiator) xfer_path_say_hello(x, c, TD_XFER_HELLO);
    conn_read(x, c); /* HELLO may have come with the handshake's last bytes, unseen by epoll */
}

/* The socket is full: EPOLLOUT brings conn_write back. */
static void wait_writable(struct td_xfer *x, struct td_xfer_conn *c)
{
    c->tx.ready = false;
    if (!c->tx.want_out) xfer_conn_watch(x, c, EPOLL_CTL_MOD, true);
}

/* The core's next frames, and a DATA frame behind them, for one system call. False: closed. */
static bool conn_fill(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct td_backend_bytes *b = &c->backend->bytes;
    struct td_xfer_tx tx;
    uint64_t id = c->id;
    bool digests = false; /* one batch per send: it reads up to 4 MiB */
    bool room = c->state == XFER_CONN_READY && (!c->initiator || !b->room || b->room(x, c));
    while (room && c->state == XFER_CONN_READY && c->tx.used < XFER_OUT_BATCH &&
           !c->tx.header_left && !c->tx.left) {
        if (!digests && c->initiator && c->lane == 0 && (digests = send_digests(x, c))) {
            if (!b->post) continue;
            b->post(x, c); /* what was submitted while the lock was dropped */
            if (!xfer_conn_by_id(x, id)) return false;
            continue;
        }
        if (!(c->initiator ? td_xfer_core_tx_next(&x->core, c->conn_id, c->lane, &c->tx.turns,
                                                  XFER_MAX_IOV, &tx)
                           : b->answer && b->answer(x, c, &tx))) {
            if (c->initiator && b->go && b->go(x, c)) return true;
            if (!digests || c->tx.used) return true;
            /* that op is over: another's may be due, and nothing else brings us back */
            digests = false;
            continue;
        }
        c->last_use_ns = xfer_now(x);
        if (tx.frame.type == TD_XFER_DATA) {
            tx.frame.conn = c->tag;
            room = b->add(x, c, &tx);
        } else {
            xfer_conn_queue(x, c, &tx.frame, tx.payload);
        }
    }
    if (c->initiator && b->go) b->go(x, c);
    return true;
}

void xfer_conn_load(struct td_xfer_conn *c, struct td_xfer_frame *frame, uint32_t op)
{
    td_xfer_frame_encode(frame, c->tx.header);
    c->tx.header_left = 64;
    c->tx.left = frame->length;
    c->tx.op = op;
    c->tx.handle = frame->handle;
    c->tx.offset = frame->offset;
}

void xfer_conn_sent(struct td_xfer *x, struct td_xfer_conn *c, size_t n)
{
    c->tx.used -= (uint32_t)n;
    c->tx.at = c->tx.used ? c->tx.at + (uint32_t)n : 0;
    if (!c->tx.ops_wait || c->tx.used >= XFER_OUT_BATCH) return;
    c->tx.ops_wait = false;
    x->loop.attach_due = true;
}

/* Sends until the socket is full, nothing is left or the turn is over. May close the connection. */
static void conn_write(struct td_xfer *x, struct td_xfer_conn *c)
{
    uint64_t id = c->id;
    if (c->state == XFER_CONN_TLS) {
        conn_handshake(x, c);
        return;
    }
    const struct td_backend_bytes *b = &c->backend->bytes;
    if (b->post && c->state == XFER_CONN_READY) {
        b->post(x, c);
        if (!xfer_conn_by_id(x, id)) return;
    }
    for (size_t turn = 0; turn < XFER_TURN_BYTES;) {
        ssize_t k;
        if (!conn_fill(x, c)) return;
        if (c->tx.overflow) {
            xfer_conn_refuse(x, c, "asks and does not read the answers");
            return;
        }
        if (c->tx.header_left || c->tx.left) {
            k = b->send(x, c);
            /* FINAL may have waited for this frame */
            if (!c->tx.header_left && !c->tx.left && c->lane && x->core.digest_every)
                wake_conn(x, c->conn_id);
        } else if (c->tx.used) {
            k = xfer_conn_send(c, c->tx.out + c->tx.at, c->tx.used);
            if (k > 0) xfer_conn_sent(x, c, (size_t)k);
        } else {
            if (c->tls && td_tls_unsent(c->tls) && td_tls_flush(c->tls)) {
                /* sealed, and the socket does not take it yet */
                if (errno == EAGAIN)
                    wait_writable(x, c);
                else
                    conn_ended(x, c, xfer_conn_why(c));
                return;
            }
            c->tx.ready = false;
            if (c->tx.want_out) xfer_conn_watch(x, c, EPOLL_CTL_MOD, false);
            return;
        }
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) {
            if (errno == EINPROGRESS)
                c->tx.ready = false; /* until its bytes are here */
            else if (errno == EAGAIN || errno == EWOULDBLOCK)
                wait_writable(x, c);
            else
                conn_ended(x, c, xfer_conn_why(c));
            return;
        }
        c->last_tx_ns = xfer_now(x);
        turn += (size_t)k;
    }
}

/* What was just submitted, sent by the submitter: no wake of the progress thread in between. Only
 * on one host, where all that goes out is small, and only while that thread has nothing to do or
 * there is one op alone: else it gathers. True: nothing is left to it. Any thread. */
static bool send_now(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (!c->backend->local || c->backend->bytes.add || !c->initiator ||
        c->state != XFER_CONN_READY || c->tx.want_out || c->tx.overflow || x->core.digest_every)
        return false;
    if (!atomic_load(&x->loop.idle) && x->core.n_ops_used > 1) return false;
    conn_fill(x, c);
    if (c->tx.overflow || c->tx.used >= XFER_OUT_BATCH) return false;
    if (c->tx.used) {
        ssize_t k = xfer_conn_send(c, c->tx.out + c->tx.at, c->tx.used);
        if (k > 0) {
            xfer_conn_sent(x, c, (size_t)k);
            c->last_tx_ns = xfer_now(x);
        }
    }
    c->tx.ready = c->tx.used > 0;
    return !c->tx.ready && !x->loop.attach_due;
}

/* --- the progress thread ---------------------------------------------------------------------- */

/* Silence, heartbeats, handshakes that take too long, idle connections. */
static void check_conns(struct td_xfer *x, uint64_t now)
{
    if (x->listen.paused) xfer_path_pause_accept(x, false);
    for (uint32_t i = x->n_conns; i-- > 0;) {
        struct td_xfer_conn *c = x->live[i];
        const struct td_backend_conn *b = &c->backend->conn;
        if (b->wants_better && c->initiator && c->state == XFER_CONN_READY && !c->retiring &&
            b->wants_better(x, c, now))
            xfer_path_replace(x, c);
    }
    for (uint32_t i = x->n_conns; i-- > 0;) {
        if (i >= x->n_conns) continue; /* a connection went with its lanes */
        struct td_xfer_conn *c = x->live[i];
        bool handshake = c->state == XFER_CONN_TLS;
        if (c->state == XFER_CONN_SETUP &&
            since(now, c->setup_ns) > (c->initiator ? 1 : 2) * x->peer_timeout_ns) {
            /* Before its silence, which says less; the initiator first: it learns why. */
            xfer_conn_close(x, c, TD_ERR_PEER, c->backend->conn.late(x, c), false);
        } else if (since(now, c->last_rx_ns) >
                   (handshake || c->state == XFER_CONN_SETUP ? 2 : 1) * x->peer_timeout_ns) {
            const char *why = c->state == XFER_CONN_CONNECTING ? "no answer to connect"
                              : handshake ? "tls: the handshake was not over in time"
                                          : "silent for too long";
            xfer_path_turn_away(x, c, why);
        } else if (!c->initiator && !c->proven && since(now, c->born_ns) > 2 * x->peer_timeout_ns) {
            xfer_path_turn_away(x, c, "showed no key");
        } else if (c->state == XFER_CONN_READY) {
            bool is_new = !c->retiring && since(now, c->last_use_ns) < XFER_IDLE_NS;
            if (!is_new && !xfer_conn_is_used(x, c)) {
                xfer_conn_close(x, c, TD_ERR_PEER, c->retiring ? "replaced" : "idle", true);
            } else if (since(now, c->last_tx_ns) >= x->peer_timeout_ns / 4 && !c->tx.used &&
                       !c->tx.left) {
                struct td_xfer_frame ping = {.type = TD_XFER_PING};
                xfer_conn_queue(x, c, &ping, NULL);
            }
        }
    }
}

static void on_event(struct td_xfer *x, const struct epoll_event *e)
{
    if (e->data.u64 == XFER_KEY_BELL) {
        td_wakeup_clear(&x->loop.wakeup);
    } else if (e->data.u64 == XFER_KEY_TCP) {
        xfer_path_accept(x, x->listen.tcp_fd, TD_XFER_PATH_TCP);
    } else if (e->data.u64 == XFER_KEY_SHM) {
        xfer_path_accept(x, x->listen.shm_fd, TD_XFER_PATH_SHM);
    } else if (e->data.u64 < XFER_KEY_END) {
        /* a backend's poll has looked */
    } else {
        struct td_xfer_conn *c = xfer_conn_by_id(x, e->data.u64);
        if (!c) return; /* closed earlier in this turn */
        if (c->state == XFER_CONN_CONNECTING) {
            xfer_path_connected(x, c);
            return;
        }
        if (c->state == XFER_CONN_TLS) {
            conn_handshake(x, c);
            return;
        }
        if (e->events & EPOLLERR && c->backend->bytes.reap) c->backend->bytes.reap(x, c);
        if (e->events & EPOLLOUT) c->tx.ready = true;
        if (e->events & (EPOLLIN | EPOLLHUP | EPOLLERR)) conn_read(x, c);
    }
}

/* epoll_wait that looks for a moment before it sleeps: between two processes under load the next
 * frame is microseconds away. Waking a thread on another core takes its waker 8 to 12 us in a
 * virtual machine, and it runs 16 to 27 us later. Only while waits prove short, and not on a
 * crowded core, where each yield may cost a time slice. */
static int wait_events(struct td_xfer *x, struct epoll_event *events, int max, int timeout_ms)
{
    if (!timeout_ms) return epoll_wait(x->loop.epoll_fd, events, max, 0);
    uint64_t start = td_now_ns(), now = start, before = start;
    uint64_t linger_ns = start < x->loop.crowded_until_ns ? 0 : x->loop.linger_ns;
    int n = 0;
    atomic_store(&x->loop.idle, true);
    for (; now - start < linger_ns && !n && !atomic_load(&x->loop.rung); before = now) {
        n = epoll_wait(x->loop.epoll_fd, events, max, 0);
        if (!n) sched_yield();
        now = td_now_ns();
        if (now - before < XFER_CROWDED_NS) continue;
        x->loop.crowded_until_ns = now + XFER_CROWDED_FOR_NS;
        linger_ns = 0;
    }
    if (!n) { /* also when rung: late bytes in the socket must not pass for the peer's silence */
        atomic_store(&x->loop.sleeps, true);
        n = epoll_wait(x->loop.epoll_fd, events, max, atomic_load(&x->loop.rung) ? 0 : timeout_ms);
        atomic_store(&x->loop.sleeps, false);
        x->loop.linger_ns =
            td_now_ns() - start < XFER_LINGER_NS ? XFER_LINGER_NS : x->loop.linger_ns / 2;
    }
    atomic_store(&x->loop.idle, false);
    return n;
}

/* What a turn moves: events, connections for ops that wait, copies, frames. True: there is more. */
static bool turn_moves(struct td_xfer *x, uint64_t now, const struct epoll_event *events, int n)
{
    bool busy = false;
    TD_EACH_BACKEND (b)
        if (b->turn.poll && b->turn.poll(x)) busy = true;
    for (int i = 0; i < n; i++) on_event(x, &events[i]);
    for (uint32_t i = x->n_conns; i-- > 0;)
        if (i < x->n_conns && (x->live[i]->rx.more || x->live[i]->rx.starved))
            conn_read(x, x->live[i]);
    if (x->loop.attach_due || x->core.retry_due) xfer_path_attach(x, now);
    TD_EACH_BACKEND (b)
        if (b->turn.work && b->turn.work(x, now)) busy = true;
    if (x->staging && x->staging->poll(x)) busy = true;
    for (uint32_t i = x->n_conns; i-- > 0;)
        if (i < x->n_conns && x->live[i]->tx.ready && x->live[i]->state != XFER_CONN_CONNECTING)
            conn_write(x, x->live[i]);
    for (uint32_t i = 0; i < x->n_conns && !busy; i++)
        busy = x->live[i]->rx.more ||
               (x->live[i]->tx.ready && x->live[i]->state != XFER_CONN_CONNECTING);
    if (verify_digests(x)) busy = true;
    /* copies take microseconds, and nothing wakes us when they are complete */
    if (x->staging && x->staging->busy(x)) busy = true;
    return busy;
}

/* Timers go by the start of the turn: a process that was stopped in it listens before it condemns.
 * True: another turn is due at once. */
static bool turn_timers(struct td_xfer *x, uint64_t now, uint64_t *ret_due_ns)
{
    bool again = false;
    if (now >= x->loop.next_check_ns) {
        check_conns(x, now);
        x->loop.next_check_ns = now + x->peer_timeout_ns / 16;
        again = true; /* what it queued goes out in the next turn */
    }
    if (x->loop.attach_due || x->core.retry_due || x->core.flush_due) again = true;
    *ret_due_ns = td_xfer_core_tick(&x->core, now);
    if (x->core.stuck_conn) {
        struct td_xfer_conn *c = xfer_conn_by_id(x, x->core.stuck_conn);
        x->core.stuck_conn = 0;
        /* its other transfers are not to blame */
        if (c) xfer_conn_close(x, c, TD_ERR_PEER, "what was given up does not retire", true);
        again = true;
    }
    if ((x->n_conns || x->listen.paused) && x->loop.next_check_ns < *ret_due_ns)
        *ret_due_ns = x->loop.next_check_ns;
    TD_EACH_BACKEND (b) {
        uint64_t due = b->turn.due ? b->turn.due(x) : TD_NEVER_NS;
        /* it waits for the queue pairs of what was there before, or is being tried */
        if (due <= now) due = now + x->peer_timeout_ns / 16;
        if (due < *ret_due_ns) *ret_due_ns = due;
    }
    return again;
}

/* How long the thread may sleep, for epoll; at most a minute. */
static int sleep_ms(const struct td_xfer *x, uint64_t now, uint64_t due_ns)
{
    uint64_t ms = due_ns <= now ? 0 : (due_ns - now - 1) / TD_NS_PER_MS + 1;
    /* an injected clock does not wake us */
    return (int)td_min_u64(ms, x->hooks.now_ns ? 5 : 60000);
}

static void *progress(void *ctx)
{
    struct td_xfer *x = ctx;
    struct epoll_event events[64];
    int n = 0;
    pthread_mutex_lock(&x->lock);
    uint64_t slept_until = xfer_now(x);
    while (!x->loop.stop) {
        uint64_t now = xfer_now(x), due_ns;
        if (now > slept_until && now - slept_until > x->peer_timeout_ns / 2) { /* we were stopped */
            for (uint32_t i = 0; i < x->n_conns; i++) x->live[i]->last_rx_ns = now;
        }
        td_xfer_core_tick(&x->core, now);
        bool busy = turn_moves(x, now, events, n);
        if (turn_timers(x, now, &due_ns)) busy = true;
        int timeout = busy ? 0 : sleep_ms(x, now, due_ns);
        TD_EACH_BACKEND (b)
            if (timeout && b->turn.sleep && !b->turn.sleep(x)) timeout = 0;
        slept_until = now + (uint64_t)timeout * TD_NS_PER_MS;
        unlock_and_wake(x);
        n = wait_events(x, events, 64, timeout);
        if (n < 0) {
            TD_ASSERT(errno == EINTR);
            n = 0;
        }
        /* before the turn that does what was rung for */
        bool rung = atomic_exchange(&x->loop.rung, false);
        pthread_mutex_lock(&x->lock);
        /* woken early: what stopped us since must not pass for the peers' silence */
        if (n || rung) slept_until = now;
        bool by_channel =
            n > 0 && events[0].data.u64 >= XFER_KEY_BACKEND && events[0].data.u64 < XFER_KEY_END;
        TD_EACH_BACKEND (b)
            if (timeout && b->turn.woke) b->turn.woke(x, since(xfer_now(x), now), by_channel);
    }
    pthread_mutex_unlock(&x->lock);
    return NULL;
}

/* --- public ----------------------------------------------------------------------------------- */

static td_status check_config(const struct td_xfer_config *config, struct td_err *err)
{
    const char *instance = config->instance ? config->instance : "";
    uint32_t timeout_ms = config->peer_timeout_ms;
    if (strlen(instance) >= TD_XFER_NAME_MAX)
        return td_fail(err, TD_ERR_INVALID, "xfer: instance \"%.80s\" is longer than %d bytes",
                       instance, TD_XFER_NAME_MAX - 1);
    for (const char *p = instance; *p; p++)
        if (*p < 0x21 || *p > 0x7e)
            return td_fail(
                err, TD_ERR_INVALID,
                "xfer: instance \"%s\" has a byte that is not printable ASCII or a space",
                instance);
    if (config->path >= TD_XFER_N_PATHS)
        return td_fail(err, TD_ERR_INVALID, "xfer: path is %d, must be 0..%d", (int)config->path,
                       TD_XFER_N_PATHS - 1);
    if (config->tcp_lanes > TD_XFER_LANES_MAX)
        return td_fail(err, TD_ERR_INVALID, "xfer: tcp_lanes is %u, must be 0..%d",
                       config->tcp_lanes, TD_XFER_LANES_MAX);
    if (config->tls && !td_xfer_path_is_local(config->path) &&
        (!config->tls->cert_file || !config->tls->key_file))
        return td_fail(
            err, TD_ERR_INVALID,
            "xfer: tls: cert_file and key_file must be set: this side accepts connections");
    if (timeout_ms && (timeout_ms < 50 || timeout_ms > 600000))
        return td_fail(err, TD_ERR_INVALID, "xfer: peer_timeout_ms is %u, must be 50..600000",
                       timeout_ms);
    return TD_OK;
}

/* Memory, descriptors, backends, the progress thread. After a failure td_xfer_close undoes it. */
static td_status open_parts(struct td_xfer *x, const struct td_xfer_config *config,
                            struct td_err *err)
{
    struct td_xfer_core_hooks hooks = {
        .ctx = x, .random_u64 = xfer_random, .send = core_send, .op_handle = core_op_handle};
    x->conns = td_table_alloc(XFER_MAX_CONNS * sizeof *x->conns);
    x->live = calloc(XFER_MAX_CONNS, sizeof(struct td_xfer_conn *));
    TD_EACH_BACKEND (b)
        if (b->conn_bytes > x->own_bytes) x->own_bytes = (b->conn_bytes + 63) / 64 * 64;
    x->own = td_table_alloc(XFER_MAX_CONNS * x->own_bytes);
    x->op_aux = calloc(config->max_ops ? config->max_ops : 1, sizeof *x->op_aux);
    if (!x->conns || !x->op_aux || !x->live || !x->own)
        return td_fail(err, TD_ERR_NOMEM, "xfer: out of memory");
    td_status status =
        td_xfer_core_create(&x->core, config->max_slots, config->max_ops, x->peer_timeout_ns / 8,
                            config->digest_every, &hooks, err);
    if (!status) status = td_wakeup_open(&x->loop.wakeup, err);
    if (status) return status;
    x->loop.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (x->loop.epoll_fd < 0) return td_fail(err, TD_ERR_IO, "xfer: epoll: %s", strerror(errno));
    if (config->tls && !td_xfer_path_is_local(x->self.path) &&
        (status = td_xfer_tls_open(config->tls, &x->tls, err)))
        return status;
    for (size_t i = TD_TRANSFER_N_BACKENDS; i-- > 0;) {
        const struct td_backend_side *b = &td_transfer_backends[i]->side;
        if (b->open && (status = b->open(x, config, err))) return status;
    }
    if (!xfer_watch_fd(x, x->loop.wakeup.fd, XFER_KEY_BELL) ||
        !xfer_watch_fd(x, x->listen.tcp_fd, XFER_KEY_TCP) ||
        !xfer_watch_fd(x, x->listen.shm_fd, XFER_KEY_SHM))
        return td_fail(err, TD_ERR_IO, "xfer: epoll_ctl: %s", strerror(errno));
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* signals are the program's, not this thread's */
    int e = pthread_create(&x->loop.thread, NULL, progress, x);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (e) return td_fail(err, TD_ERR_IO, "xfer: thread: %s", strerror(e));
    x->loop.runs = true;
    pthread_setname_np(x->loop.thread, "td-xfer");
    return TD_OK;
}

td_status td_xfer_open(const struct td_xfer_config *config, struct td_xfer **ret_x,
                       struct td_err *err)
{
    td_status status = check_config(config, err);
    if (status) return status;
    struct td_xfer *x = calloc(1, sizeof *x);
    if (!x) return td_fail(err, TD_ERR_NOMEM, "xfer: out of memory");
    x->loop.epoll_fd = x->listen.tcp_fd = x->listen.shm_fd = x->loop.wakeup.fd = -1;
    x->hooks = config->hooks;
    x->self.incarnation = config->incarnation;
    x->self.layout_hash = config->layout_hash;
    x->secret = config->secret;
    x->self.path = config->path;
    x->tcp.n_lanes = config->tcp_lanes ? config->tcp_lanes : 4;
    /* staging buffers go round */
    x->tcp.zerocopy = config->memory ? TD_XFER_ZEROCOPY_OFF : config->tcp_zerocopy;
    x->pool.memory = config->memory;
    x->peer_timeout_ns = (config->peer_timeout_ms ? config->peer_timeout_ms : 2000) * TD_NS_PER_MS;
    if (config->instance) memcpy(x->self.instance, config->instance, strlen(config->instance));
    pthread_mutexattr_t adaptive;
    pthread_mutexattr_init(&adaptive);
#if defined(__GLIBC__)
    /* held for a microsecond, mostly: less than a sleep and its wake cost */
    pthread_mutexattr_settype(&adaptive, PTHREAD_MUTEX_ADAPTIVE_NP);
#endif
    pthread_mutex_init(&x->lock, &adaptive);
    pthread_mutexattr_destroy(&adaptive);
    status = open_parts(x, config, err);
    if (status)
        td_xfer_close(x);
    else
        *ret_x = x;
    return status;
}

void td_xfer_close(struct td_xfer *x)
{
    if (!x) return;
    if (x->loop.runs) {
        pthread_mutex_lock(&x->lock);
        x->loop.stop = true;
        pthread_mutex_unlock(&x->lock);
        xfer_ring(x);
        pthread_join(x->loop.thread, NULL);
    }
    pthread_mutex_lock(&x->lock); /* of nobody else; but fences drop it */
    /* no copy of what comes after us is valid */
    for (uint32_t i = 0; i < x->core.max_ops; i++) core_op_handle(x, i, 0);
    for (uint32_t i = 0; i < x->n_conns; i++) {
        struct td_xfer_conn *c = x->live[i];
        if (c->backend->conn.fence) c->backend->conn.fence(x, c);
        conn_end(x, c);
    }
    for (size_t i = TD_TRANSFER_N_BACKENDS; i-- > 0;)
        if (td_transfer_backends[i]->side.close) td_transfer_backends[i]->side.close(x);
    pthread_mutex_unlock(&x->lock);
    int fds[] = {x->loop.epoll_fd, x->listen.tcp_fd, x->listen.shm_fd};
    for (size_t i = 0; i < sizeof fds / sizeof fds[0]; i++)
        if (fds[i] >= 0) close(fds[i]);
    td_xfer_tls_close(x->tls);
    td_wakeup_close(&x->loop.wakeup);
    td_xfer_core_destroy(&x->core);
    pthread_mutex_destroy(&x->lock);
    td_table_free(x->conns, XFER_MAX_CONNS * sizeof *x->conns);
    td_table_free(x->own, XFER_MAX_CONNS * x->own_bytes);
    free(x->live);
    free(x->op_aux);
    free(x);
}

uint16_t td_xfer_port(const struct td_xfer *x) { return x->self.port; }

td_status td_xfer_tls_reload_files(struct td_xfer *x, bool *ret_loaded, struct td_err *err)
{
    *ret_loaded = false;
    return x->tls ? td_xfer_tls_reload(x->tls, true, ret_loaded, err) : TD_OK;
}

td_status td_xfer_mem_add(struct td_xfer *x, const struct td_arena *arena, size_t block_bytes,
                          int32_t n_blocks, struct td_err *err)
{
    if (block_bytes < 1 || block_bytes >= (size_t)1 << 30 || n_blocks < 1 || n_blocks > 1 << 28 ||
        (size_t)n_blocks > arena->bytes / block_bytes)
        return td_fail(err, TD_ERR_INVALID,
                       "xfer: %d blocks of %zu bytes do not lie in an arena of %zu bytes", n_blocks,
                       block_bytes, arena->bytes);
    td_status status = TD_OK;
    pthread_mutex_lock(&x->lock);
    if (x->pool.block_bytes)
        status = td_fail(err, TD_ERR_INVALID, "xfer: memory was added already");
    if (!status) {
        x->pool.base = arena->base;
        x->pool.block_bytes = block_bytes;
        x->pool.n_blocks = n_blocks;
        TD_EACH_BACKEND (b)
            if (b->side.mem_add && !status) status = b->side.mem_add(x, arena, err);
        if (status) x->pool.block_bytes = 0;
    }
    if (!status) td_xfer_core_mem(&x->core, block_bytes, n_blocks);
    pthread_mutex_unlock(&x->lock);
    return status;
}

td_status td_xfer_grant(struct td_xfer *x, const int32_t *block_ids, int32_t n_blocks,
                        uint64_t deadline_ns, uint64_t user, uint32_t *ret_slot, uint8_t *blob,
                        size_t *ret_blob_bytes, struct td_err *err)
{
    uint32_t id;
    enter(x);
    uint64_t tick = x->core.next_tick_ns;
    const char *lost = x->staging ? x->staging->lost(x) : NULL;
    td_status status =
        lost ? td_fail(err, TD_ERR_DEVICE, "grant: %s", lost)
             : td_xfer_core_grant(&x->core, block_ids, n_blocks, deadline_ns, user, &id, err);
    if (!status) {
        const struct td_xfer_slot *s = &x->core.slots[id];
        struct td_xfer_grant_blob g = {.slot = id,
                                       .generation = s->generation,
                                       .n_blocks = n_blocks,
                                       .incarnation = x->self.incarnation,
                                       .layout_hash = x->self.layout_hash,
                                       .block_bytes = x->pool.block_bytes,
                                       .port = x->self.port,
                                       .path = (uint8_t)x->self.path,
                                       .tls = x->tls != NULL,
                                       .device = x->staging != NULL,
                                       .secret = x->secret != NULL};
        TD_EACH_BACKEND (b)
            if (b->side.advertise) b->side.advertise(x, &g);
        memcpy(g.key, s->key, sizeof g.key);
        memcpy(g.proof, x->self.proof, sizeof g.proof);
        memcpy(g.host, x->self.host, sizeof g.host);
        memcpy(g.shm_name, x->self.shm_name, sizeof g.shm_name);
        memcpy(g.instance, x->self.instance, sizeof g.instance);
        td_xfer_grant_encode(&g, blob);
        *ret_blob_bytes = sizeof g;
        *ret_slot = id;
    }
    bool ring = x->core.next_tick_ns < tick; /* the thread sleeps past the new deadline */
    unlock_and_wake(x);
    if (ring) xfer_ring(x);
    return status;
}

void td_xfer_revoke(struct td_xfer *x, uint32_t slot, const char *reason)
{
    enter(x);
    const struct td_xfer_slot *s = slot < x->core.max_slots ? &x->core.slots[slot] : NULL;
    /* a READY one's sender has its answer, and nothing holds it but windows */
    bool ring = s && (s->state != TD_SLOT_READY || s->holds.n);
    td_xfer_core_revoke(&x->core, slot, reason);
    unlock_and_wake(x);
    if (ring) xfer_ring(x);
}

td_status td_xfer_op_start(struct td_xfer *x, const uint8_t *blob, size_t blob_bytes,
                           uint64_t deadline_ns, uint64_t user, uint32_t *ret_op,
                           int32_t *ret_n_blocks, struct td_err *err)
{
    struct td_xfer_grant_blob g;
    td_status status = td_xfer_grant_decode(blob, blob_bytes, &g, err);
    if (status) return status;
    if (g.layout_hash != x->self.layout_hash)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "grant of %s: layout %016" PRIx64 " is not ours, %016" PRIx64, g.instance,
                       g.layout_hash, x->self.layout_hash);
    if (!xfer_path_allows(x->self.path, (enum td_xfer_path)g.path) &&
        !xfer_path_allows((enum td_xfer_path)g.path, x->self.path))
        return td_fail(err, TD_ERR_UNSUPPORTED, "grant of %s: it allows only %s, this side only %s",
                       g.instance, td_xfer_path_name((enum td_xfer_path)g.path),
                       td_xfer_path_name(x->self.path));
    if (g.port && !td_xfer_path_is_local(x->self.path) && g.tls != (x->tls != NULL)) {
        if (g.tls)
            return td_fail(err, TD_ERR_UNSUPPORTED,
                           "grant of %s: its KV port speaks TLS and this side does not: give this "
                           "side tls_cert, tls_key and tls_ca",
                           g.instance);
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "grant of %s: its KV port is in the clear and this side speaks TLS: give %s "
                       "tls_cert, tls_key and tls_ca",
                       g.instance, g.instance);
    }
    if (g.secret != (x->secret != NULL))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       g.secret ? "grant of %s: its KV port asks for the cluster secret and this "
                                  "side has none: give this side the same "
                                  "--cluster-secret-file"
                                : "grant of %s: its KV port proves no cluster secret and this side "
                                  "asks for one: give %s the same "
                                  "--cluster-secret-file",
                       g.instance, g.instance);
    enter(x);
    uint64_t tick = x->core.next_tick_ns;
    const char *lost = x->staging ? x->staging->lost(x) : NULL;
    const struct td_transfer_backend *named[] = {td_transfer_backend_of((enum td_xfer_path)g.path),
                                                 td_transfer_backend_of(x->self.path)};
    for (int i = 0; i < 2 && !status; i++)
        if (named[i] && named[i]->choice.fits) status = named[i]->choice.fits(x, &g, err);
    if (!status && lost) status = td_fail(err, TD_ERR_DEVICE, "%s", lost);
    if (!status) status = td_xfer_core_op_start(&x->core, &g, deadline_ns, user, ret_op, err);
    if (!status) {
        x->op_aux[*ret_op] = (struct xfer_op_aux){0};
        xfer_path_attach_warm(x, *ret_op);
        *ret_n_blocks = g.n_blocks;
    }
    /* OPEN can wait for the first submit, or for the thread's timers. rdma's cannot: the receiver
     * answers it with the targets while the first chunk is computed. */
    bool ring = !status && (x->loop.attach_due || x->core.next_tick_ns < tick ||
                            td_xfer_path_way(x->core.ops[*ret_op].path) == TD_XFER_BY_NIC);
    unlock_and_wake(x);
    if (ring) xfer_ring(x);
    return status;
}

static uint64_t set_key(struct td_xfer *x, uint64_t *key, uint64_t value)
{
    uint64_t now = 0;
    enter(x);
    if (key) now = *key = value;
    pthread_mutex_unlock(&x->lock);
    return now;
}

uint64_t td_xfer_op_priority(struct td_xfer *x, uint32_t op, uint64_t priority)
{
    return set_key(x, op < x->core.max_ops ? &x->core.ops[op].priority : NULL, priority);
}

uint64_t td_xfer_slot_priority(struct td_xfer *x, uint32_t slot, uint64_t priority)
{
    return set_key(x, slot < x->core.max_slots ? &x->core.slots[slot].priority : NULL, priority);
}

/* Sends what was submitted, or (wait: the caller computes on) leaves that to the thread. */
static td_status submitted(struct td_xfer *x, uint32_t op, td_status status, bool wait)
{
    bool ring = !status;
    if (!status) {
        struct td_xfer_conn *c = xfer_conn_by_id(x, x->core.ops[op].conn);
        wake_conn(x, x->core.ops[op].conn);
        if (c && !wait && send_now(x, c)) ring = false;
    }
    unlock_and_wake(x);
    if (ring) xfer_ring(x);
    return status;
}

td_status td_xfer_submit(struct td_xfer *x, uint32_t op, int32_t first, const int32_t *block_ids,
                         int32_t n, bool final, const void *note, size_t note_bytes)
{
    enter(x);
    td_status status = td_xfer_core_submit(&x->core, xfer_now(x), op, first, block_ids, n, final,
                                           note, note_bytes);
    return submitted(x, op, status, false);
}

td_status td_xfer_submit_part(struct td_xfer *x, uint32_t op, int32_t first,
                              const int32_t *block_ids, int32_t n, uint64_t offset,
                              uint64_t n_bytes)
{
    enter(x);
    td_status status =
        td_xfer_core_submit_part(&x->core, xfer_now(x), op, first, block_ids, n, offset, n_bytes);
    return submitted(x, op, status, true);
}

td_status td_xfer_submit_pull(struct td_xfer *x, uint32_t op, int32_t first,
                              const int32_t *block_ids, int32_t n)
{
    enter(x);
    td_status status = td_xfer_core_submit_pull(&x->core, xfer_now(x), op, first, block_ids, n);
    return submitted(x, op, status, true);
}

static void stop_op(struct td_xfer *x, uint32_t op, td_status status, const char *reason)
{
    enter(x);
    td_xfer_core_op_fail(&x->core, op, status, reason);
    unlock_and_wake(x);
    xfer_ring(x);
}

void td_xfer_cancel(struct td_xfer *x, uint32_t op, const char *reason)
{
    stop_op(x, op, TD_ERR_CANCELLED, reason);
}

void td_xfer_finished(struct td_xfer *x, uint32_t op)
{
    stop_op(x, op, TD_ERR_FINISHED, "the request is finished");
}

bool td_xfer_poll_path(struct td_xfer *x, struct td_xfer_event *ret_event)
{
    enter(x);
    bool any = x->told.n_news > 0;
    if (any) {
        const struct xfer_news *n = &x->told.news[0];
        *ret_event = (struct td_xfer_event){
            .kind = n->kind, .id = n->n_others, .path = n->path, .status = n->status};
        memcpy(ret_event->reason, n->text, sizeof ret_event->reason);
        memmove(x->told.news, x->told.news + 1, --x->told.n_news * sizeof x->told.news[0]);
    }
    pthread_mutex_unlock(&x->lock);
    return any;
}

size_t td_xfer_poll(struct td_xfer *x, struct td_xfer_event *events, size_t max)
{
    enter(x);
    size_t n = td_xfer_core_poll(&x->core, events, max);
    pthread_mutex_unlock(&x->lock);
    return n;
}

void td_xfer_stats(struct td_xfer *x, struct td_xfer_stats *ret_stats)
{
    enter(x);
    *ret_stats = x->core.stats;
    ret_stats->n_slots_used = x->core.n_slots_used;
    ret_stats->n_ops_used = x->core.n_ops_used;
    for (uint32_t i = 0; i < x->n_conns; i++)
        x->live[i]->lane ? ret_stats->n_lanes++ : ret_stats->n_conns++;
    ret_stats->n_bad_frames = x->told.n_bad_frames;
    ret_stats->n_refused_peers = x->told.n_refused_peers;
    ret_stats->n_fallbacks = x->told.n_fallbacks;
    ret_stats->n_zerocopy = x->tcp.n_zerocopy;
    memcpy(ret_stats->conns_by_path, x->conns_by_path, sizeof ret_stats->conns_by_path);
    TD_EACH_BACKEND (b)
        if (b->side.stats) b->side.stats(x, ret_stats);
    pthread_mutex_unlock(&x->lock);
}
