/* connect.c - how a connection comes to stand: which path an op takes, who is dialled for it, who
 * is let in, HELLO and SETUP.
 *
 *   op WAIT_CONN --xfer_path_attach--> a READY connection of the best path left: attached
 *                                      else one is dialled, and the op waits for it:
 *       --xfer_path_ready--> attached
 *       --xfer_path_failed--> the next path, aloud (kv_path_failed); none is left: the op fails
 *
 * The states of a connection are drawn in endpoint.c, which has all that follows READY. */
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/transfer/transfer.h"
#include "common/transfer/endpoint.h"

/* --- paths ------------------------------------------------------------------------------------ */

/* For td_xfer_poll_path: the oldest is lost when nobody polls. */
static void tell(struct td_xfer *x, struct xfer_news news)
{
    uint32_t max = sizeof x->told.news / sizeof x->told.news[0];
    if (x->told.n_news == max)
        memmove(x->told.news, x->told.news + 1, --x->told.n_news * sizeof x->told.news[0]);
    x->told.news[x->told.n_news++] = news;
}

void xfer_path_tell(struct td_xfer *x, enum td_xfer_path path, td_status status, const char *text)
{
    struct xfer_news news = {.kind = TD_XFER_PATH_CHOSEN, .path = path, .status = status};
    xfer_say(news.text, "%s", text);
    tell(x, news);
}

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

static bool other_end(int fd, union address *ret_address)
{
    socklen_t n = sizeof *ret_address;
    return getpeername(fd, &ret_address->any, &n) == 0;
}

/* The other end's address; for a unix socket its process. */
static void name_end(char to[64], int fd)
{
    union address a = {0};
    char host[INET6_ADDRSTRLEN] = "?";
    struct ucred cred;
    socklen_t n = sizeof cred;
    if (!other_end(fd, &a))
        snprintf(to, 64, "an address that is gone");
    else if (a.any.sa_family == AF_INET)
        snprintf(to, 64, "%s:%u", inet_ntop(AF_INET, &a.v4.sin_addr, host, sizeof host),
                 ntohs(a.v4.sin_port));
    else if (a.any.sa_family == AF_INET6)
        snprintf(to, 64, "[%s]:%u", inet_ntop(AF_INET6, &a.v6.sin6_addr, host, sizeof host),
                 ntohs(a.v6.sin6_port));
    else if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &n))
        snprintf(to, 64, "this host");
    else
        snprintf(to, 64, "this host, pid %d, uid %u", (int)cred.pid, cred.uid);
}

void xfer_path_tell_refusal(struct td_xfer *x, int fd, enum td_xfer_path path,
                            const struct td_xfer_conn *c, const char *reason)
{
    struct xfer_news news = {.kind = TD_XFER_PEER_REFUSED,
                             .path = path,
                             .status = TD_ERR_PEER,
                             .n_others = x->told.n_untold};
    uint64_t now = xfer_now(x);
    char end[64];
    if (x->told.refusal_ns && now < x->told.refusal_ns + TD_NS_PER_S) {
        /* whoever floods the port does not flood the log */
        x->told.n_untold++;
        return;
    }
    x->told.refusal_ns = now;
    x->told.n_untold = 0;
    name_end(end, fd);
    xfer_say(news.text, "peer %.40s at %s: %.100s",
             c && c->peer.instance[0] ? c->peer.instance : "without a name", end, reason);
    tell(x, news);
}

void xfer_path_refused(struct td_xfer *x, const struct td_xfer_conn *c, const char *reason)
{
    x->told.n_refused_peers++;
    xfer_path_tell_refusal(x, c->fd, c->backend->path, c, reason);
}

void xfer_path_turn_away(struct td_xfer *x, struct td_xfer_conn *c, const char *reason)
{
    if (!c->initiator && !c->proven) xfer_path_refused(x, c, reason);
    xfer_conn_close(x, c, TD_ERR_PEER, reason, false);
}

bool xfer_path_allows(enum td_xfer_path named, enum td_xfer_path path)
{
    const struct td_transfer_backend *b = td_transfer_backend_of(path);
    return named == TD_XFER_PATH_AUTO || named == path || (b && b->also == named);
}

/* Path choice: the first backend (backends.c) that both sides allow, that was not tried in vain and
 * that offers itself; each is proved before it is used. why: of one that does not. */
static bool may_path(const struct td_xfer *x, uint32_t op, const struct td_transfer_backend *b,
                     char why[TD_XFER_REASON_MAX])
{
    const struct td_xfer_grant_blob *g = &x->core.ops[op].grant;
    why[0] = 0;
    if (!xfer_path_allows(x->self.path, b->path) ||
        !xfer_path_allows((enum td_xfer_path)g->path, b->path))
        return false;
    if (x->op_aux[op].tried & 1u << b->path) return false;
    return b->choice.offers(x, g, why);
}

static bool has_path(const struct td_xfer *x, uint32_t op)
{
    char why[TD_XFER_REASON_MAX];
    TD_EACH_BACKEND (b)
        if (may_path(x, op, b, why)) return true;
    return false;
}

/* The connection that these ops waited for did not come to stand. Where another path is left they
 * take that, loudly. in_setup: the peer is there (a lost ARP packet is enough): else that is worth
 * another try. */
/* Many peers that connect at once may be more than a busy receiver keeps without their key
 * (XFER_MAX_UNPROVEN): it closes the oldest without a word. That one calls again, after 5 ms and
 * each time after twice as long: 0.6 s in all. */
#define CALLS_MAX 8

static bool calls_again(struct td_xfer *x, uint32_t op, enum xfer_path_stage stage)
{
    struct xfer_op_aux *aux = &x->op_aux[op];
    if (stage == XFER_PATH_SETUP) return ++aux->n_setups < TD_XFER_ATTEMPTS_MAX;
    if (stage != XFER_PATH_CUT || ++aux->n_cuts >= CALLS_MAX) return false;
    td_xfer_core_op_wait(&x->core, op, xfer_now(x) + (TD_XFER_AGAIN_NS << (aux->n_cuts - 1)));
    return true;
}

void xfer_path_failed(struct td_xfer *x, uint64_t id, enum td_xfer_path path, td_status status,
                      const char *reason, enum xfer_path_stage stage)
{
    bool fell_back = false;
    for (uint32_t i = 0; i < x->core.max_ops; i++) {
        const struct td_xfer_op *op = &x->core.ops[i];
        if (x->op_aux[i].waits_for != id) continue;
        x->op_aux[i].waits_for = 0;
        if (op->state != TD_OP_WAIT_CONN) continue;
        x->op_aux[i].tried |= 1u << path;
        if (status != TD_ERR_STALE && has_path(x, i))
            fell_back = true;
        else if (status == TD_ERR_PEER && calls_again(x, i, stage))
            x->op_aux[i].tried &= ~(1u << path);
        else
            td_xfer_core_op_fail(&x->core, i, status, reason);
    }
    if (fell_back) {
        x->told.n_fallbacks++;
        xfer_path_tell(x, path, status, reason);
    }
    x->loop.attach_due = true;
}

/* --- dialling --------------------------------------------------------------------------------- */

static struct td_xfer_conn *find_conn(struct td_xfer *x, const struct td_xfer_grant_blob *g,
                                      const struct td_transfer_backend *b)
{
    for (uint32_t i = 0; i < x->n_conns; i++) {
        struct td_xfer_conn *c = x->live[i];
        if (c->initiator && c->lane == 0 && c->backend == b && !c->retiring && !c->replaces &&
            c->peer.incarnation == g->incarnation && c->peer.port == g->port &&
            strcmp(c->peer.host, g->host) == 0)
            return c;
    }
    return NULL;
}

/* Closes an idle connection of ours to make room. May drop the lock. */
static void evict_idle(struct td_xfer *x)
{
    for (uint32_t i = x->n_conns; i-- > 0;) {
        struct td_xfer_conn *idle = x->live[i];
        if (idle->state != XFER_CONN_READY || xfer_conn_is_used(x, idle)) continue;
        xfer_conn_close(x, idle, TD_ERR_PEER, "closed for another peer", true);
        return;
    }
}

/* A new socket to a peer, for dial_go; NULL with the reason when there can be none. */
static struct td_xfer_conn *dial_socket(struct td_xfer *x, const struct td_transfer_backend *b,
                                        const struct td_xfer_address *to, const char *instance,
                                        char reason[TD_XFER_REASON_MAX])
{
    bool connected;
    int fd = b->conn.dial(x, to, &connected);
    if (fd < 0) {
        xfer_say(reason, "peer %.40s at %.40s:%u (%s): connect: %s", instance, to->host, to->port,
                 b->name, strerror(errno));
        return NULL;
    }
    struct td_xfer_conn *c = xfer_conn_new(x, fd, b, true);
    if (!c) {
        close(fd);
        if (x->n_conns < XFER_MAX_CONNS)
            xfer_say(reason, "peer %.40s: no memory for another connection", instance);
        else
            xfer_say(reason, "peer %.40s: all %d connections are in use", instance, XFER_MAX_CONNS);
        return NULL;
    }
    if (!connected) c->state = XFER_CONN_CONNECTING;
    c->peer.port = to->port;
    snprintf(c->peer.host, sizeof c->peer.host, "%s", to->host);
    snprintf(c->peer.instance, sizeof c->peer.instance, "%s", instance);
    return c;
}

void xfer_path_say_hello(struct td_xfer *x, struct td_xfer_conn *c, enum td_xfer_frame_type type)
{
    struct td_xfer_hello hello = {.incarnation = x->self.incarnation,
                                  .layout_hash = x->self.layout_hash,
                                  .block_bytes = x->pool.block_bytes,
                                  .nonce = c->nonce};
    struct td_xfer_frame f = {
        .type = (uint8_t)type, .length = sizeof hello, .slot = c->backend->path, .op = c->lane};
    td_fault_point("xfer_hello");
    memcpy(hello.instance, x->self.instance, sizeof hello.instance);
    if (type == TD_XFER_HELLO_ACK && c->backend->local)
        memcpy(hello.proof, x->self.proof, sizeof hello.proof);
    if (!x->secret) {
        xfer_conn_queue(x, c, &f, &hello);
        return;
    }
    struct td_xfer_secret_hello longer = {.hello = hello};
    f.length = sizeof longer;
    c->proof.hello[!c->initiator] = hello;
    if (c->initiator) {
        xfer_proof_begin(c);
        memcpy(longer.secret, c->proof.nonce[0], sizeof longer.secret);
    } else if (xfer_proof_make(x, c, longer.secret)) {
        c->tx.overflow = true; /* no memory for a MAC: the connection ends */
    }
    xfer_conn_queue(x, c, &f, &longer);
    if (c->initiator) c->proof.frame = f;
}

/* The initiator's side speaks first: HELLO, or the handshake that comes before it. */
static void connected_now(struct td_xfer *x, struct td_xfer_conn *c)
{
    c->state = c->tls ? XFER_CONN_TLS : XFER_CONN_HELLO;
    c->last_rx_ns = xfer_now(x);
    if (c->tls)
        c->tx.ready = true; /* conn_write takes the first step */
    else
        xfer_path_say_hello(x, c, TD_XFER_HELLO);
}

static void dial_go(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (c->state == XFER_CONN_CONNECTING)
        xfer_conn_watch(x, c, EPOLL_CTL_MOD, true);
    else
        connected_now(x, c);
}

/* A connection under way to the grant's author over this path; NULL with the reason. */
static struct td_xfer_conn *dial(struct td_xfer *x, const struct td_xfer_grant_blob *g,
                                 const struct td_transfer_backend *b,
                                 char reason[TD_XFER_REASON_MAX])
{
    struct td_xfer_address to = {.shm_name = g->shm_name, .host = g->host, .port = g->port};
    struct td_xfer_conn *c = dial_socket(x, b, &to, g->instance, reason);
    if (!c) return NULL;
    c->peer.incarnation = g->incarnation;
    memcpy(c->peer.proof, g->proof, sizeof c->peer.proof);
    dial_go(x, c);
    return c;
}

/* Another socket to the peer of a connection that stands, over the same path, for dial_go. */
static struct td_xfer_conn *dial_again(struct td_xfer *x, struct td_xfer_conn *first)
{
    char reason[TD_XFER_REASON_MAX];
    struct td_xfer_address to = {.host = first->peer.host, .port = first->peer.port};
    struct td_xfer_conn *c = dial_socket(x, first->backend, &to, first->peer.instance, reason);
    if (c) c->peer.incarnation = first->peer.incarnation;
    return c;
}

void xfer_path_replace(struct td_xfer *x, struct td_xfer_conn *old)
{
    for (uint32_t i = 0; i < x->n_conns; i++)
        if (x->live[i]->replaces == old->id) return; /* it is still at it */
    struct td_xfer_conn *c = dial_again(x, old);
    if (!c) return; /* nothing is lost; there is a next time */
    c->replaces = old->id;
    dial_go(x, c);
}

/* The lanes of a connection that stands. One that does not come about is not missed. */
static void dial_lanes(struct td_xfer *x, struct td_xfer_conn *first)
{
    for (uint32_t lane = 1; lane < x->tcp.n_lanes; lane++) {
        if (x->n_conns >= XFER_MAX_CONNS / 2) return; /* peers before lanes */
        struct td_xfer_conn *c = dial_again(x, first);
        if (!c) return;
        c->conn_id = first->id;
        c->lane = lane;
        c->tag = first->tag;
        dial_go(x, c);
    }
}

void xfer_path_connected(struct td_xfer *x, struct td_xfer_conn *c)
{
    int e = 0;
    socklen_t n = sizeof e;
    if (getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &e, &n)) e = errno;
    if (e) {
        char reason[TD_XFER_REASON_MAX];
        xfer_say(reason, "connect: %s", strerror(e));
        xfer_conn_close(x, c, TD_ERR_PEER, reason, false);
        return;
    }
    xfer_conn_watch(x, c, EPOLL_CTL_MOD, false);
    connected_now(x, c);
}

/* --- ops find their connection ---------------------------------------------------------------- */

static void op_attach(struct td_xfer *x, uint32_t id, struct td_xfer_conn *c)
{
    const struct td_transfer_backend *b = c->backend;
    x->op_aux[id].waits_for = 0;
    x->op_aux[id].conn_id = c->id;
    td_xfer_core_op_attach(&x->core, id, c->id, b->path, b->conn.may_pull && b->conn.may_pull(c));
    if (b->conn.attached) b->conn.attached(x, c, id);
    c->tx.ready = true;
    c->last_use_ns = xfer_now(x);
}

/* Each OPEN takes room in `out`: the ops that find it taken go on when it has been sent. */
static void op_attach_or_wait(struct td_xfer *x, uint32_t id, struct td_xfer_conn *c)
{
    if (c->tx.used < XFER_OUT_BATCH)
        op_attach(x, id, c);
    else
        c->tx.ops_wait = true;
}

/* A new op on a connection that stands: no turn of the progress thread in between. Any thread. */
void xfer_path_attach_warm(struct td_xfer *x, uint32_t id)
{
    char why[TD_XFER_REASON_MAX];
    TD_EACH_BACKEND (b) {
        if (!may_path(x, id, b, why)) continue;
        struct td_xfer_conn *c = find_conn(x, &x->core.ops[id].grant, b);
        if (c && c->state == XFER_CONN_READY && c->tx.used < XFER_OUT_BATCH) {
            op_attach(x, id, c);
            return;
        }
        break;
    }
    x->loop.attach_due = true;
}

/* Both sides would take what is best, and this path was not even tried: said aloud. */
static void tell_missed(struct td_xfer *x, uint32_t op, const struct td_transfer_backend *b,
                        const char *why)
{
    const struct td_xfer_grant_blob *g = &x->core.ops[op].grant;
    char text[TD_XFER_REASON_MAX];
    if (x->self.path != TD_XFER_PATH_AUTO || g->path != TD_XFER_PATH_AUTO) return;
    xfer_say(text, "peer %.60s: %.80s", g->instance, why);
    x->told.n_fallbacks++;
    xfer_path_tell(x, b->path, TD_ERR_UNSUPPORTED, text);
}

static bool attach_due(const struct td_xfer *x, uint32_t id, uint64_t now_ns)
{
    const struct td_xfer_op *op = &x->core.ops[id];
    return op->state == TD_OP_WAIT_CONN && !x->op_aux[id].waits_for && op->tries.retry_ns <= now_ns;
}

/* A connection for the op: there already, or dialled; NULL with the reason. */
static struct td_xfer_conn *find_or_dial(struct td_xfer *x, uint32_t id,
                                         char reason[TD_XFER_REASON_MAX])
{
    const struct td_xfer_grant_blob *g = &x->core.ops[id].grant;
    const struct td_transfer_backend *missed = NULL;
    char why[TD_XFER_REASON_MAX], missed_why[TD_XFER_REASON_MAX] = "";
    struct td_xfer_conn *c;
    xfer_say(reason, "peer %.40s: no path that both sides allow", g->instance);
    TD_EACH_BACKEND (b) {
        if (!may_path(x, id, b, why)) {
            if (!why[0]) continue;
            missed = b;
            memcpy(missed_why, why, sizeof why);
            if (b->path == g->path || b->path == x->self.path)
                xfer_say(reason, "peer %.40s: only %s is allowed, and %.80s", g->instance, b->name,
                         why);
            continue;
        }
        c = find_conn(x, g, b);
        if (c) return c;
        if (missed && !b_at[1]) tell_missed(x, id, missed, missed_why);
        c = dial(x, g, b, reason);
        if (c) return c;
        x->op_aux[id].tried |= 1u << b->path;
    }
    return NULL;
}

void xfer_path_attach(struct td_xfer *x, uint64_t now_ns)
{
    x->loop.attach_due = x->core.retry_due = false;
    for (uint32_t i = 0; i < x->core.max_ops; i++) {
        char reason[TD_XFER_REASON_MAX];
        /* not later: it may be another op afterwards */
        if (attach_due(x, i, now_ns) && x->n_conns == XFER_MAX_CONNS) evict_idle(x);
        if (!attach_due(x, i, now_ns)) continue;
        x->core.ops[i].tries.retry_ns = 0; /* it is tried now: no tick need remind us */
        struct td_xfer_conn *c = find_or_dial(x, i, reason);
        if (!c)
            td_xfer_core_op_fail(&x->core, i, TD_ERR_PEER, reason);
        else if (c->state == XFER_CONN_READY)
            op_attach_or_wait(x, i, c);
        else
            x->op_aux[i].waits_for = c->id;
    }
}

void xfer_path_ready(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct td_transfer_backend *b = c->backend;
    char text[TD_XFER_REASON_MAX];
    c->state = XFER_CONN_READY;
    c->last_use_ns = xfer_now(x);
    c->tx.ready = true;
    if (b->conn.ready) b->conn.ready(x, c);
    if (c->lane) return;
    x->conns_by_path[b->path]++;
    if (c->replaces) {
        struct td_xfer_conn *old = xfer_conn_by_id(x, c->replaces);
        c->replaces = 0;
        c->retiring = old && !old->retiring && !b->conn.is_better(c, old);
        if (c->retiring) return;
        if (old) old->retiring = true;
    }
    xfer_say(text, "peer %.60s%s%s", c->peer.instance, c->tls ? ", over TLS" : "",
             x->staging && c->staged ? ", staged through page-locked memory" : "");
    xfer_path_tell(x, b->path, TD_OK, text);
    if (c->initiator && b->lanes) dial_lanes(x, c);
    for (uint32_t i = 0; i < x->core.max_ops; i++) {
        if (x->op_aux[i].waits_for != c->id) continue;
        x->op_aux[i].waits_for = 0;
        if (x->core.ops[i].state == TD_OP_WAIT_CONN) op_attach_or_wait(x, i, c);
    }
}

/* --- letting in ------------------------------------------------------------------------------- */

/* Where a connection comes from: an IPv4 address, an IPv6 network of 64 bits, or this host. */
static uint64_t source_of(int fd)
{
    union address a = {0};
    uint64_t network;
    if (!other_end(fd, &a)) return 0;
    if (a.any.sa_family == AF_INET) return a.v4.sin_addr.s_addr;
    if (a.any.sa_family != AF_INET6) return 0;
    if (IN6_IS_ADDR_V4MAPPED(&a.v6.sin6_addr)) return a.v6.sin6_addr.s6_addr32[3];
    memcpy(&network, &a.v6.sin6_addr, sizeof network);
    return network;
}

/* The oldest of the source that holds most of them: who opens hundreds pushes out his own. */
static void evict_oldest_unproven(struct td_xfer *x)
{
    struct td_xfer_conn *unproven[XFER_MAX_UNPROVEN], *oldest = NULL;
    uint32_t n = 0, most = 0;
    for (uint32_t i = 0; i < x->n_conns && n < XFER_MAX_UNPROVEN; i++)
        if (!x->live[i]->initiator && !x->live[i]->proven) unproven[n++] = x->live[i];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t of_source = 0;
        for (uint32_t k = 0; k < n; k++)
            of_source += unproven[k]->peer.came_from == unproven[i]->peer.came_from;
        if (of_source < most ||
            (of_source == most && oldest && oldest->id >> 16 < unproven[i]->id >> 16))
            continue;
        most = of_source;
        oldest = unproven[i];
    }
    if (!oldest) return;
    xfer_path_turn_away(x, oldest, "too many connections without a key");
}

void xfer_path_pause_accept(struct td_xfer *x, bool pause)
{
    struct epoll_event e = {.events = pause ? 0u : EPOLLIN};
    x->listen.paused = pause;
    e.data.u64 = XFER_KEY_TCP;
    if (x->listen.tcp_fd >= 0) epoll_ctl(x->loop.epoll_fd, EPOLL_CTL_MOD, x->listen.tcp_fd, &e);
    e.data.u64 = XFER_KEY_SHM;
    if (x->listen.shm_fd >= 0) epoll_ctl(x->loop.epoll_fd, EPOLL_CTL_MOD, x->listen.shm_fd, &e);
}

void xfer_path_accept(struct td_xfer *x, int listen_fd, enum td_xfer_path path)
{
    /* HELLO may say another that comes by the same listener */
    const struct td_transfer_backend *b = td_transfer_backend_of(path);
    for (int i = 0; i < 16; i++) {
        int fd = accept4(listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
                evict_oldest_unproven(x);
                xfer_path_pause_accept(x, true); /* until the next check of timers */
            }
            return;
        }
        bool allowed = b->conn.accepted(x, fd);
        if (allowed && (x->n_unproven >= XFER_MAX_UNPROVEN ||
                        x->n_conns >= XFER_MAX_CONNS - XFER_RESERVED_CONNS))
            evict_oldest_unproven(x);
        struct td_xfer_conn *c = allowed ? xfer_conn_new(x, fd, b, false) : NULL;
        if (c) {
            c->peer.came_from = source_of(fd);
            continue;
        }
        x->told.n_refused_peers++;
        xfer_path_tell_refusal(x, fd, path, NULL,
                               allowed ? "all connections are in use" : "another user's process");
        close(fd);
    }
}

/* --- HELLO, SETUP ----------------------------------------------------------------------------- */

void xfer_path_refuse_offer(struct td_xfer *x, struct td_xfer_conn *c, enum td_xfer_frame_type type,
                            td_status status, const char *reason)
{
    xfer_conn_say_last(x, c, type, status, reason);
    xfer_path_refused(x, c, reason);
    xfer_conn_close(x, c, status, reason, false);
}

static void hello_ack_refuse(struct td_xfer *x, struct td_xfer_conn *c, td_status status,
                             const char *reason)
{
    xfer_path_refuse_offer(x, c, TD_XFER_HELLO_ACK, status, reason);
}

static void has_proven(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (!c->proven) x->n_unproven--;
    c->proven = true;
}

/* Another socket of a connection that stands, whose tag only the peer knows. */
static void on_lane_hello(struct td_xfer *x, struct td_xfer_conn *c,
                          const struct td_xfer_hello *hello)
{
    const struct td_xfer_conn *first = NULL;
    bool taken = c->rx.frame.op >= TD_XFER_LANES_MAX || !c->backend->lanes;
    for (uint32_t i = 0; i < x->n_conns && c->rx.frame.conn; i++)
        if (!x->live[i]->initiator && x->live[i]->lane == 0 && x->live[i]->tag == c->rx.frame.conn)
            first = x->live[i];
    for (uint32_t i = 0; i < x->n_conns && first; i++)
        if (x->live[i]->conn_id == first->id && x->live[i]->lane == c->rx.frame.op) taken = true;
    if (!first && !taken) { /* it was cut meanwhile */
        xfer_path_refused(x, c, "its connection is gone");
        xfer_conn_close(x, c, TD_ERR_PEER, "its connection is gone", false);
        return;
    }
    if (!first || first->state != XFER_CONN_READY || first->backend != c->backend ||
        first->peer.incarnation != hello->incarnation || taken) {
        xfer_conn_refuse(x, c, "lane of no connection");
        return;
    }
    memcpy(c->peer.instance, first->peer.instance, sizeof c->peer.instance);
    c->peer.incarnation = hello->incarnation;
    c->lane = c->rx.frame.op;
    c->conn_id = first->id;
    c->tag = first->tag;
    has_proven(x, c);
    xfer_path_say_hello(x, c, TD_XFER_HELLO_ACK);
    xfer_path_ready(x, c);
}

static void begin_setup(struct td_xfer *x, struct td_xfer_conn *c)
{
    c->state = XFER_CONN_SETUP;
    c->setup_ns = xfer_now(x);
    td_fault_point("xfer_offer"); /* the offer is about to be made, or waited for */
}

/* TD_OK, and c has the path that it asks for; else why it cannot be let in. */
static td_status why_not_admitted(struct td_xfer *x, struct td_xfer_conn *c,
                                  const struct td_xfer_hello *hello,
                                  char reason[TD_XFER_REASON_MAX])
{
    enum td_xfer_path path = (enum td_xfer_path)c->rx.frame.slot;
    const struct td_transfer_backend *asked = td_transfer_backend_of(path);
    xfer_say(reason, "not ready yet: its pool is being made");
    if (!x->pool.block_bytes) return TD_ERR_PEER;
    xfer_say(reason,
             "layout %016" PRIx64 " with blocks of %" PRIu64 " bytes is not ours, %016" PRIx64
             " with %zu",
             hello->layout_hash, hello->block_bytes, x->self.layout_hash, x->pool.block_bytes);
    if (hello->layout_hash != x->self.layout_hash || hello->block_bytes != x->pool.block_bytes)
        return TD_ERR_UNSUPPORTED;
    bool comes_here = asked && asked->local == c->backend->local; /* by this listener */
    if (comes_here) xfer_conn_be(c, asked);
    xfer_say(reason, "path %s is not to be had here: this side allows %s", td_xfer_path_name(path),
             td_xfer_path_name(x->self.path));
    if (!comes_here || !xfer_path_allows(x->self.path, path)) return TD_ERR_UNSUPPORTED;
    bool admits = !asked->choice.admits || asked->choice.admits(x, reason);
    return admits ? TD_OK : TD_ERR_UNSUPPORTED;
}

/* What the HELLO in rx.frame and *hello wants, from somebody who may want it. */
static void admit(struct td_xfer *x, struct td_xfer_conn *c, const struct td_xfer_hello *hello)
{
    char reason[TD_XFER_REASON_MAX];
    if (c->rx.frame.op) {
        on_lane_hello(x, c, hello);
        return;
    }
    td_status status = why_not_admitted(x, c, hello, reason);
    if (status) {
        hello_ack_refuse(x, c, status, reason);
        return;
    }
    c->peer.incarnation = hello->incarnation;
    xfer_path_say_hello(x, c, TD_XFER_HELLO_ACK);
    c->tag = c->nonce ^ hello->nonce;
    if (c->backend->has_setup)
        begin_setup(x, c);
    else
        xfer_path_ready(x, c);
}

static void on_hello(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_frame challenge = {.type = TD_XFER_CHALLENGE, .length = TD_XFER_SECRET_BYTES};
    struct td_xfer_secret_hello told = {0};
    memcpy(&told, c->rx.payload, c->rx.frame.length);
    if (told.hello.instance[sizeof told.hello.instance - 1] || told.hello.nonce == 0) {
        xfer_conn_refuse(x, c, "hello is malformed");
        return;
    }
    memcpy(c->peer.instance, told.hello.instance, sizeof c->peer.instance);
    for (char *p = c->peer.instance; *p; p++)
        if (*p < 0x21 || *p > 0x7e) *p = '?';
    bool asks = c->rx.frame.length == sizeof told;
    if (asks != (x->secret != NULL)) {
        hello_ack_refuse(
            x, c, TD_ERR_UNSUPPORTED,
            asks ? "this side has no cluster secret: give it the same --cluster-secret-file"
                 : "this side asks for the cluster secret: give yours the same "
                   "--cluster-secret-file");
        return;
    }
    if (!asks) {
        admit(x, c, &told.hello);
        return;
    }
    c->proof.frame = c->rx.frame;
    c->proof.hello[0] = told.hello;
    memcpy(c->proof.nonce[0], told.secret, sizeof told.secret);
    xfer_proof_begin(c);
    c->proof.challenged = true;
    xfer_conn_queue(x, c, &challenge, c->proof.nonce[1]);
}

/* Acceptor: PROOF came, of the HELLO that was kept. */
static void on_proof(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (!xfer_proof_check(x, c, c->rx.payload)) {
        hello_ack_refuse(
            x, c, TD_ERR_PEER,
            "the cluster secret was not proved: the two sides' --cluster-secret-file differ");
        return;
    }
    has_proven(x, c);
    c->rx.frame = c->proof.frame;
    admit(x, c, &c->proof.hello[0]);
}

/* Initiator: CHALLENGE came. */
static void on_challenge(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_frame f = {.type = TD_XFER_PROOF, .length = TD_XFER_SECRET_BYTES};
    uint8_t mac[TD_XFER_SECRET_BYTES];
    memcpy(c->proof.nonce[1], c->rx.payload, sizeof c->proof.nonce[1]);
    c->proof.challenged = true;
    if (xfer_proof_make(x, c, mac))
        xfer_conn_close(x, c, TD_ERR_NOMEM, "no memory to prove the cluster secret", false);
    else
        xfer_conn_queue(x, c, &f, mac);
}

/* Initiator: HELLO_ACK has the acceptor's MAC, of this HELLO and this challenge. */
static bool acceptor_proved(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_secret_hello told;
    if (!c->proof.challenged || c->rx.frame.length != sizeof told) return false;
    memcpy(&told, c->rx.payload, sizeof told);
    c->proof.hello[1] = told.hello;
    return xfer_proof_check(x, c, told.secret);
}

static void on_hello_ack(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_hello hello;
    char reason[TD_XFER_REASON_MAX];
    if (c->rx.frame.status) {
        xfer_path_offer_refused(x, c);
        return;
    }
    memcpy(&hello, c->rx.payload, sizeof hello);
    if (x->secret && !acceptor_proved(x, c)) {
        xfer_conn_close(x, c, TD_ERR_PEER, "it did not prove the cluster secret", false);
    } else if (!x->secret && c->rx.frame.length != sizeof hello) {
        xfer_conn_close(x, c, TD_ERR_PEER,
                        "its hello is of a cluster secret, which this side has not", false);
    } else if (c->backend->local && !td_xfer_key_equal(hello.proof, c->peer.proof)) {
        xfer_conn_close(x, c, TD_ERR_PEER, "the socket on this host is not the grant's", false);
    } else if (hello.incarnation != c->peer.incarnation) {
        xfer_conn_close(x, c, TD_ERR_STALE,
                        "another process has the address: the grant is an old one", false);
    } else if (hello.layout_hash != x->self.layout_hash ||
               hello.block_bytes != x->pool.block_bytes || hello.nonce == 0) {
        xfer_conn_close(x, c, TD_ERR_UNSUPPORTED, "its layout is not ours", false);
    } else if (c->lane) {
        const struct td_xfer_conn *first = xfer_conn_by_id(x, c->conn_id);
        if (first && first->state == XFER_CONN_READY)
            xfer_path_ready(x, c);
        else
            xfer_conn_close(x, c, TD_ERR_PEER, "its first lane is gone", false);
    } else {
        c->tag = c->nonce ^ hello.nonce;
        const struct td_transfer_backend *b = c->backend;
        if (b->has_setup) begin_setup(x, c);
        if (b->conn.open_conn && !b->conn.open_conn(x, c, reason))
            xfer_conn_close(x, c, TD_ERR_PEER, reason, false);
        else if (!b->has_setup)
            xfer_path_ready(x, c);
    }
}

void xfer_path_on_hello(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (c->rx.frame.type == TD_XFER_CHALLENGE)
        on_challenge(x, c);
    else if (c->rx.frame.type == TD_XFER_PROOF)
        on_proof(x, c);
    else if (c->rx.frame.type == TD_XFER_HELLO)
        on_hello(x, c);
    else
        on_hello_ack(x, c);
}

void xfer_path_offer_refused(struct td_xfer *x, struct td_xfer_conn *c)
{
    char reason[TD_XFER_REASON_MAX], theirs[TD_XFER_REASON_MAX];
    xfer_conn_take_reason(theirs, c);
    xfer_say(reason, "refused: %.140s", theirs);
    xfer_conn_close(x, c, (td_status)c->rx.frame.status, reason, false);
}
