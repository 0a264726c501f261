/* connect.c - how a connection comes to stand: which path an op takes, who is dialled for it, who
 * is let in, HELLO and SETUP.
 *
 *   op WAIT_CONN --xfer_path_attach--> a READY connection of the best path left: attached
 *                                      else one is dialled: waits for it --xfer_path_ready-->
 *                                      attached
 *                                           --xfer_path_failed--> the next path, aloud
 *                                               (kv_path_failed); none is left: the op fails
 *
 * The states of a connection are drawn in endpoint.c, which has everything after READY and every
 * way to the end. */
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
#include "common/transfer/transfer_internal.h"

/* --- paths ------------------------------------------------------------------------------------ */

static const char *const path_names[TD_XFER_N_PATHS] = {"auto", "tcp",      "shm",
                                                        "rdma", "cuda-ipc", "shm-staged"};

const char *td_xfer_path_name(enum td_xfer_path path)
{
    return path < TD_XFER_N_PATHS ? path_names[path] : "unknown";
}

/* For td_xfer_poll_path: the oldest is lost when nobody polls. */
static void tell(struct td_xfer *x, struct xfer_news news)
{
    uint32_t max = sizeof x->news / sizeof x->news[0];
    if (x->n_news == max) memmove(x->news, x->news + 1, --x->n_news * sizeof x->news[0]);
    x->news[x->n_news++] = news;
}

void xfer_path_tell(struct td_xfer *x, enum td_xfer_path path, td_status status, const char *text)
{
    struct xfer_news news = {.kind = TD_XFER_PATH_CHOSEN, .path = path, .status = status};
    xfer_say(news.text, "%s", text);
    tell(x, news);
}

/* The other end's address; for a unix socket its process. */
static void name_end(char to[64], int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } a = {0};
    socklen_t n = sizeof a;
    char host[INET6_ADDRSTRLEN] = "?";
    struct ucred cred;
    if (getpeername(fd, &a.any, &n))
        snprintf(to, 64, "an address that is gone");
    else if (a.any.sa_family == AF_INET)
        snprintf(to, 64, "%s:%u", inet_ntop(AF_INET, &a.v4.sin_addr, host, sizeof host),
                 ntohs(a.v4.sin_port));
    else if (a.any.sa_family == AF_INET6)
        snprintf(to, 64, "[%s]:%u", inet_ntop(AF_INET6, &a.v6.sin6_addr, host, sizeof host),
                 ntohs(a.v6.sin6_port));
    else if (n = sizeof cred, getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &n))
        snprintf(to, 64, "this host");
    else
        snprintf(to, 64, "this host, pid %d, uid %u", (int)cred.pid, cred.uid);
}

void xfer_path_tell_refusal(struct td_xfer *x, int fd, enum td_xfer_path path,
                            const struct td_xfer_conn *c, const char *reason)
{
    struct xfer_news news = {
        .kind = TD_XFER_PEER_REFUSED, .path = path, .status = TD_ERR_PEER, .n_others = x->n_untold};
    uint64_t now = xfer_now(x);
    char end[64];
    if (x->told_refusal_ns && now < x->told_refusal_ns + TD_NS_PER_S) {
        /* whoever floods the port does not flood the log */
        x->n_untold++;
        return;
    }
    x->told_refusal_ns = now;
    x->n_untold = 0;
    name_end(end, fd);
    xfer_say(news.text, "peer %.40s at %s: %.100s",
             c && c->peer_instance[0] ? c->peer_instance : "without a name", end, reason);
    tell(x, news);
}

void xfer_path_refused(struct td_xfer *x, const struct td_xfer_conn *c, const char *reason)
{
    x->n_refused_peers++;
    xfer_path_tell_refusal(x, c->fd, c->path, c, reason);
}

bool xfer_path_allows(enum td_xfer_path named, enum td_xfer_path path)
{
    return named == TD_XFER_PATH_AUTO || named == path ||
           (named == TD_XFER_PATH_SHM && path == TD_XFER_PATH_SHM_STAGED);
}

/* Path choice. AUTO: on one host shm, or cuda-ipc where both pools are in device memory, when
 * the socket of the grant answers; rdma when both sides have it and its probes come through;
 * from device memory on one host through a ring (shm-staged); else tcp. A side that names a path
 * allows no other. */
static bool may_path(const struct td_xfer *x, uint32_t op, enum td_xfer_path path)
{
    const struct td_xfer_grant_blob *g = &x->core.ops[op].grant;
    if (!xfer_path_allows(x->path, path) || !xfer_path_allows((enum td_xfer_path)g->path, path))
        return false;
    if (x->op_aux[op].tried & 1u << path) return false;
    switch (path) {
    case TD_XFER_PATH_SHM:
        return g->shm_name[0] && x->words && !x->device && !g->device;
    case TD_XFER_PATH_CUDA_IPC:
        return g->shm_name[0] && g->device && xfer_ipc_may_offer(x) &&
               !xfer_ipc_was_refused(x, g->incarnation);
    case TD_XFER_PATH_RDMA:
        return g->port && g->has_rdma && x->rdma && xfer_rdma_usable(x);
    case TD_XFER_PATH_SHM_STAGED:
        return g->shm_name[0] && xfer_ring_may_lend(x);
    case TD_XFER_PATH_TCP:
        return g->port != 0;
    case TD_XFER_PATH_AUTO:
    case TD_XFER_N_PATHS:
        break;
    }
    return false;
}

static const enum td_xfer_path path_order[] = {TD_XFER_PATH_CUDA_IPC, TD_XFER_PATH_SHM,
                                               TD_XFER_PATH_RDMA, TD_XFER_PATH_SHM_STAGED,
                                               TD_XFER_PATH_TCP};

/* The connection that these ops waited for did not come to stand. Where another path is left
 * they take that, loudly. in_setup: the peer is there and its queue pairs were not up (a lost
 * ARP packet is enough): with no other path that is worth another try. */
void xfer_path_failed(struct td_xfer *x, uint64_t id, enum td_xfer_path path, td_status status,
                      const char *reason, bool in_setup)
{
    bool fell_back = false;
    for (uint32_t i = 0; i < x->core.max_ops; i++) {
        const struct td_xfer_op *op = &x->core.ops[i];
        if (x->op_aux[i].waits_for != id) continue;
        x->op_aux[i].waits_for = 0;
        if (op->state != TD_OP_WAIT_CONN) continue;
        x->op_aux[i].tried |= 1u << path;
        bool has_other = may_path(x, i, TD_XFER_PATH_RDMA) ||
                         may_path(x, i, TD_XFER_PATH_SHM_STAGED) ||
                         may_path(x, i, TD_XFER_PATH_TCP);
        if (status != TD_ERR_STALE && has_other)
            fell_back = true;
        else if (in_setup && status == TD_ERR_PEER &&
                 ++x->op_aux[i].n_setups < TD_XFER_ATTEMPTS_MAX)
            x->op_aux[i].tried &= ~(1u << path);
        else
            td_xfer_core_op_fail(&x->core, xfer_now(x), i, status, reason);
    }
    if (fell_back) {
        x->n_fallbacks++;
        xfer_path_tell(x, path, status, reason);
    }
    x->attach_due = true;
}

/* --- dialling --------------------------------------------------------------------------------- */

static struct td_xfer_conn *find_conn(struct td_xfer *x, const struct td_xfer_grant_blob *g,
                                      enum td_xfer_path path)
{
    for (uint32_t i = 0; i < x->n_conns; i++) {
        struct td_xfer_conn *c = x->live[i];
        if (c->initiator && c->lane == 0 && c->path == path && !c->retiring && !c->instead_of &&
            c->peer_incarnation == g->incarnation && c->port == g->port &&
            strcmp(c->host, g->host) == 0)
            return c;
    }
    return NULL;
}

/* Closes an idle connection of ours to make room. May drop the lock. */
static void evict_idle(struct td_xfer *x)
{
    for (uint32_t i = x->n_conns; i-- > 0;) {
        struct td_xfer_conn *idle = x->live[i];
        bool busy = idle->state != XFER_CONN_READY || !idle->initiator || idle->lane;
        for (uint32_t k = 0; k < x->core.max_ops && !busy; k++)
            busy = td_xfer_core_op_is_on(&x->core, k, idle->id);
        if (busy) continue;
        xfer_conn_close(x, idle, TD_ERR_PEER, "closed for another peer", true);
        return;
    }
}

/* A new socket to a peer; NULL with the reason when there can be none. The caller starts it by
 * dial_go. */
static struct td_xfer_conn *dial_socket(struct td_xfer *x, const char *shm_name, const char *host,
                                        uint16_t port, enum td_xfer_path path, const char *instance,
                                        bool *ret_connected, char reason[TD_XFER_REASON_MAX])
{
    *ret_connected = true;
    int fd = xfer_path_is_local(path) ? xfer_shm_dial(shm_name)
                                      : xfer_tcp_dial(x, host, port, ret_connected);
    if (fd < 0) {
        xfer_say(reason, "peer %.40s at %.40s:%u (%s): connect: %s", instance, host, port,
                 td_xfer_path_name(path), strerror(errno));
        return NULL;
    }
    struct td_xfer_conn *c = xfer_conn_new(x, fd, path, true);
    if (!c) {
        close(fd);
        if (x->n_conns < XFER_MAX_CONNS)
            xfer_say(reason, "peer %.40s: no memory for another connection", instance);
        else
            xfer_say(reason, "peer %.40s: all %d connections are in use", instance, XFER_MAX_CONNS);
        return NULL;
    }
    c->port = port;
    snprintf(c->host, sizeof c->host, "%s", host);
    snprintf(c->peer_instance, sizeof c->peer_instance, "%s", instance);
    return c;
}

void xfer_path_say_hello(struct td_xfer *x, struct td_xfer_conn *c, enum td_xfer_frame_type type)
{
    struct td_xfer_hello hello = {.incarnation = x->incarnation,
                                  .layout_hash = x->layout_hash,
                                  .block_bytes = x->block_bytes,
                                  .nonce = c->nonce};
    struct td_xfer_frame f = {
        .type = (uint8_t)type, .length = sizeof hello, .slot = c->path, .op = c->lane};
    td_fault_point("xfer_hello");
    memcpy(hello.instance, x->instance, sizeof hello.instance);
    if (type == TD_XFER_HELLO_ACK && xfer_path_is_local(c->path))
        memcpy(hello.proof, x->proof, sizeof hello.proof);
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
        c->overflow = true; /* no memory for a MAC: the connection ends */
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
        c->tx_ready = true; /* conn_write takes the first step */
    else
        xfer_path_say_hello(x, c, TD_XFER_HELLO);
}

static void dial_go(struct td_xfer *x, struct td_xfer_conn *c, bool connected)
{
    if (connected) {
        connected_now(x, c);
    } else {
        c->state = XFER_CONN_CONNECTING;
        xfer_conn_watch(x, c, EPOLL_CTL_MOD, true);
    }
}

/* A connection under way to the grant's author over this path; NULL with the reason when there
 * can be none. */
static struct td_xfer_conn *dial(struct td_xfer *x, const struct td_xfer_grant_blob *g,
                                 enum td_xfer_path path, char reason[TD_XFER_REASON_MAX])
{
    bool connected;
    struct td_xfer_conn *c =
        dial_socket(x, g->shm_name, g->host, g->port, path, g->instance, &connected, reason);
    if (!c) return NULL;
    c->peer_incarnation = g->incarnation;
    memcpy(c->peer_proof, g->proof, sizeof c->peer_proof);
    dial_go(x, c, connected);
    return c;
}

void xfer_path_more_rails(struct td_xfer *x, struct td_xfer_conn *old)
{
    char reason[TD_XFER_REASON_MAX];
    bool connected;
    for (uint32_t i = 0; i < x->n_conns; i++)
        if (x->live[i]->instead_of == old->id) return; /* it is still at it */
    struct td_xfer_conn *c = dial_socket(x, NULL, old->host, old->port, TD_XFER_PATH_RDMA,
                                         old->peer_instance, &connected, reason);
    if (!c) return; /* nothing is lost; there is a next time */
    c->peer_incarnation = old->peer_incarnation;
    c->instead_of = old->id;
    dial_go(x, c, connected);
}

/* The lanes of a tcp connection that stands. One that does not come about is not missed. */
static void dial_lanes(struct td_xfer *x, struct td_xfer_conn *first)
{
    for (uint32_t lane = 1; lane < x->n_lanes; lane++) {
        char reason[TD_XFER_REASON_MAX];
        bool connected;
        if (x->n_conns >= XFER_MAX_CONNS / 2) return; /* peers before lanes */
        struct td_xfer_conn *c = dial_socket(x, NULL, first->host, first->port, TD_XFER_PATH_TCP,
                                             first->peer_instance, &connected, reason);
        if (!c) return;
        c->peer_incarnation = first->peer_incarnation;
        c->link = first->id;
        c->lane = lane;
        c->tag = first->tag;
        dial_go(x, c, connected);
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
    x->op_aux[id].waits_for = 0;
    x->op_aux[id].link = c->id;
    td_xfer_core_op_attach(&x->core, id, c->id, c->path, xfer_rdma_may_pull(c));
    if (c->rdma)
        td_xfer_core_op_limit(
            &x->core, id,
            xfer_rdma_home(c, (uint64_t)x->core.ops[id].grant.n_blocks * x->block_bytes));
    c->tx_ready = true;
    c->last_use_ns = xfer_now(x);
}

/* A new op on a connection that stands already: no turn of the progress thread in between. Any
 * thread. */
void xfer_path_attach_warm(struct td_xfer *x, uint32_t id)
{
    for (size_t i = 0; i < sizeof path_order / sizeof path_order[0]; i++) {
        if (!may_path(x, id, path_order[i])) continue;
        struct td_xfer_conn *c = find_conn(x, &x->core.ops[id].grant, path_order[i]);
        if (c && c->state == XFER_CONN_READY) {
            op_attach(x, id, c);
            return;
        }
        break;
    }
    x->attach_due = true;
}

/* Both sides would take what is best, one of them at least has RDMA devices, and a tcp
 * connection is dialled without a try at them: said aloud. */
static void tell_no_rdma(struct td_xfer *x, uint32_t op)
{
    const struct td_xfer_grant_blob *g = &x->core.ops[op].grant;
    char text[TD_XFER_REASON_MAX];
    if (x->path != TD_XFER_PATH_AUTO || g->path != TD_XFER_PATH_AUTO ||
        x->op_aux[op].tried & 1u << TD_XFER_PATH_RDMA || (!x->rdma && !g->has_rdma))
        return;
    xfer_say(text, "peer %.60s: %s has no usable RDMA device", g->instance,
             g->has_rdma ? "this side" : "it");
    x->n_fallbacks++;
    xfer_path_tell(x, TD_XFER_PATH_RDMA, TD_ERR_UNSUPPORTED, text);
}

static bool attach_due(const struct td_xfer *x, uint32_t id, uint64_t now_ns)
{
    const struct td_xfer_op *op = &x->core.ops[id];
    return op->state == TD_OP_WAIT_CONN && !x->op_aux[id].waits_for && op->retry_ns <= now_ns;
}

void xfer_path_attach(struct td_xfer *x, uint64_t now_ns)
{
    x->attach_due = x->core.retry_due = false;
    for (uint32_t i = 0; i < x->core.max_ops; i++) {
        struct td_xfer_op *op = &x->core.ops[i];
        /* not later: it may be another op afterwards */
        if (attach_due(x, i, now_ns) && x->n_conns == XFER_MAX_CONNS) evict_idle(x);
        if (!attach_due(x, i, now_ns)) continue;
        op->retry_ns = 0; /* it is tried now: no tick need remind us */
        const struct td_xfer_grant_blob *g = &op->grant;
        char reason[TD_XFER_REASON_MAX];
        struct td_xfer_conn *c = NULL;
        if (g->path == TD_XFER_PATH_RDMA || x->path == TD_XFER_PATH_RDMA)
            xfer_say(reason, "peer %.40s: only rdma is allowed, and %s has no usable RDMA device",
                     g->instance, g->has_rdma ? "this side" : "it");
        else
            xfer_say(reason, "peer %.40s: no path that both sides allow", g->instance);
        for (size_t k = 0; k < sizeof path_order / sizeof path_order[0] && !c; k++) {
            enum td_xfer_path path = path_order[k];
            if (!may_path(x, i, path)) continue;
            c = find_conn(x, g, path);
            if (!c) {
                if (path == TD_XFER_PATH_TCP) tell_no_rdma(x, i);
                c = dial(x, g, path, reason);
            }
            if (!c) x->op_aux[i].tried |= 1u << path;
        }
        if (!c)
            td_xfer_core_op_fail(&x->core, xfer_now(x), i, TD_ERR_PEER, reason);
        else if (c->state == XFER_CONN_READY)
            op_attach(x, i, c);
        else
            x->op_aux[i].waits_for = c->id;
    }
}

/* The rdma link behind it has its queue pairs up, or there is none to wait for. */
void xfer_path_ready(struct td_xfer *x, struct td_xfer_conn *c)
{
    char text[TD_XFER_REASON_MAX];
    c->state = XFER_CONN_READY;
    c->last_use_ns = xfer_now(x);
    c->tx_ready = true;
    if (c->initiator && c->path == TD_XFER_PATH_TCP) xfer_zc_open(x, c);
    if (c->lane) return;
    x->conns_by_path[c->path]++;
    if (c->instead_of) {
        struct td_xfer_conn *old = xfer_conn_by_id(x, c->instead_of);
        c->instead_of = 0;
        /* no gain */
        c->retiring = old && !old->retiring && xfer_rdma_n_rails(c) <= xfer_rdma_n_rails(old);
        if (c->retiring) return;
        if (old) old->retiring = true;
    }
    xfer_say(text, "peer %.60s%s%s", c->peer_instance, c->tls ? ", over TLS" : "",
             x->device && (c->path == TD_XFER_PATH_TCP || c->path == TD_XFER_PATH_SHM_STAGED)
                 ? ", staged through page-locked memory"
                 : "");
    xfer_path_tell(x, c->path, TD_OK, text);
    if (c->initiator && c->path == TD_XFER_PATH_TCP) dial_lanes(x, c);
    for (uint32_t i = 0; i < x->core.max_ops; i++) {
        if (x->op_aux[i].waits_for != c->id) continue;
        x->op_aux[i].waits_for = 0;
        if (x->core.ops[i].state == TD_OP_WAIT_CONN) op_attach(x, i, c);
    }
}

/* --- letting in ------------------------------------------------------------------------------- */

/* The address that a connection comes from: an IPv4 address, an IPv6 network of 64 bits (one
 * host has as many addresses as it likes), or this host. */
static uint64_t source_of(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } a = {0};
    socklen_t n = sizeof a;
    uint64_t network;
    if (getpeername(fd, &a.any, &n)) return 0;
    if (a.any.sa_family == AF_INET) return a.v4.sin_addr.s_addr;
    if (a.any.sa_family != AF_INET6) return 0;
    if (IN6_IS_ADDR_V4MAPPED(&a.v6.sin6_addr)) return a.v6.sin6_addr.s6_addr32[3];
    memcpy(&network, &a.v6.sin6_addr, sizeof network);
    return network;
}

/* The oldest of the source that holds most of them: who opens connections by the hundred pushes
 * out his own, and not those of a peer elsewhere. */
static void evict_oldest_unproven(struct td_xfer *x)
{
    struct td_xfer_conn *unproven[XFER_MAX_UNPROVEN], *oldest = NULL;
    uint32_t n = 0, most = 0;
    for (uint32_t i = 0; i < x->n_conns && n < XFER_MAX_UNPROVEN; i++)
        if (!x->live[i]->initiator && !x->live[i]->proven) unproven[n++] = x->live[i];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t of_source = 0;
        for (uint32_t k = 0; k < n; k++)
            of_source += unproven[k]->came_from == unproven[i]->came_from;
        if (of_source < most ||
            (of_source == most && oldest && oldest->id >> 16 < unproven[i]->id >> 16))
            continue;
        most = of_source;
        oldest = unproven[i];
    }
    if (!oldest) return;
    xfer_path_refused(x, oldest, "too many connections without a key");
    xfer_conn_close(x, oldest, TD_ERR_PEER, "too many connections without a key", false);
}

void xfer_path_pause_accept(struct td_xfer *x, bool pause)
{
    struct epoll_event e = {.events = pause ? 0u : EPOLLIN};
    x->accept_paused = pause;
    e.data.u64 = XFER_KEY_TCP;
    if (x->tcp_fd >= 0) epoll_ctl(x->epoll_fd, EPOLL_CTL_MOD, x->tcp_fd, &e);
    e.data.u64 = XFER_KEY_SHM;
    if (x->shm_fd >= 0) epoll_ctl(x->epoll_fd, EPOLL_CTL_MOD, x->shm_fd, &e);
}

void xfer_path_accept(struct td_xfer *x, int listen_fd, enum td_xfer_path path)
{
    for (int i = 0; i < 16; i++) {
        int fd = accept4(listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
                evict_oldest_unproven(x);
                xfer_path_pause_accept(x, true); /* until the next check of timers */
            }
            return;
        }
        if (path == TD_XFER_PATH_SHM && !xfer_shm_peer_allowed(fd)) {
            /* what cuda-ipc comes by, too */
            x->n_refused_peers++;
            xfer_path_tell_refusal(x, fd, path, NULL, "another user's process");
            close(fd);
            continue;
        }
        if (path == TD_XFER_PATH_TCP) xfer_tcp_tune(x, fd);
        if (x->n_unproven >= XFER_MAX_UNPROVEN ||
            x->n_conns >= XFER_MAX_CONNS - XFER_RESERVED_CONNS)
            evict_oldest_unproven(x);
        struct td_xfer_conn *c = xfer_conn_new(x, fd, path, false);
        if (c) {
            c->came_from = source_of(fd);
        } else {
            x->n_refused_peers++;
            xfer_path_tell_refusal(x, fd, path, NULL, "all connections are in use");
            close(fd);
        }
    }
}

/* --- HELLO, SETUP ----------------------------------------------------------------------------- */

static void hello_ack_refuse(struct td_xfer *x, struct td_xfer_conn *c, td_status status,
                             const char *reason)
{
    struct td_xfer_frame f = {
        .type = TD_XFER_HELLO_ACK, .status = (int16_t)status, .length = (uint32_t)strlen(reason)};
    uint8_t bytes[64 + TD_XFER_REASON_MAX];
    td_xfer_frame_encode(&f, bytes);
    memcpy(bytes + 64, reason, f.length);
    xfer_tcp_send(c, bytes, 64 + f.length); /* a courtesy on a fresh socket: lost if it does not
                                               fit */
    xfer_path_refused(x, c, reason);
    xfer_conn_close(x, c, status, reason, false);
}

static void has_proven(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (!c->proven) x->n_unproven--;
    c->proven = true;
}

/* Another socket of a connection that stands. Its tag is known to nobody but the peer (and to
 * who reads the wire, where there is no TLS). */
static void on_lane_hello(struct td_xfer *x, struct td_xfer_conn *c,
                          const struct td_xfer_hello *hello)
{
    const struct td_xfer_conn *first = NULL;
    bool taken = c->rx_frame.op >= TD_XFER_LANES_MAX || c->path != TD_XFER_PATH_TCP;
    for (uint32_t i = 0; i < x->n_conns && c->rx_frame.conn; i++)
        if (!x->live[i]->initiator && x->live[i]->lane == 0 && x->live[i]->tag == c->rx_frame.conn)
            first = x->live[i];
    for (uint32_t i = 0; i < x->n_conns && first; i++)
        if (x->live[i]->link == first->id && x->live[i]->lane == c->rx_frame.op) taken = true;
    if (!first && !taken) { /* it was cut meanwhile */
        xfer_path_refused(x, c, "its connection is gone");
        xfer_conn_close(x, c, TD_ERR_PEER, "its connection is gone", false);
        return;
    }
    if (!first || first->state != XFER_CONN_READY || first->path != TD_XFER_PATH_TCP ||
        first->peer_incarnation != hello->incarnation || taken) {
        xfer_conn_refuse(x, c, "lane of no connection");
        return;
    }
    memcpy(c->peer_instance, first->peer_instance, sizeof c->peer_instance);
    c->peer_incarnation = hello->incarnation;
    c->lane = c->rx_frame.op;
    c->link = first->id;
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

/* What the HELLO in rx_frame and *hello wants, from somebody who may want it. */
static void admit(struct td_xfer *x, struct td_xfer_conn *c, const struct td_xfer_hello *told)
{
    struct td_xfer_hello hello = *told;
    char reason[TD_XFER_REASON_MAX];
    if (c->rx_frame.op) {
        on_lane_hello(x, c, &hello);
        return;
    }
    if (!x->block_bytes) {
        hello_ack_refuse(x, c, TD_ERR_PEER, "not ready yet: its pool is being made");
        return;
    }
    if (hello.layout_hash != x->layout_hash || hello.block_bytes != x->block_bytes) {
        xfer_say(reason,
                 "layout %016" PRIx64 " with blocks of %" PRIu64 " bytes is not ours, %016" PRIx64
                 " with %zu",
                 hello.layout_hash, hello.block_bytes, x->layout_hash, x->block_bytes);
        hello_ack_refuse(x, c, TD_ERR_UNSUPPORTED, reason);
        return;
    }
    if (c->path == TD_XFER_PATH_TCP && c->rx_frame.slot == TD_XFER_PATH_RDMA)
        c->path = TD_XFER_PATH_RDMA;
    if (c->path == TD_XFER_PATH_SHM && c->rx_frame.slot == TD_XFER_PATH_CUDA_IPC)
        c->path = TD_XFER_PATH_CUDA_IPC;
    if (c->path == TD_XFER_PATH_SHM && c->rx_frame.slot == TD_XFER_PATH_SHM_STAGED)
        c->path = TD_XFER_PATH_SHM_STAGED;
    bool allowed = c->rx_frame.slot == (uint32_t)c->path && xfer_path_allows(x->path, c->path);
    bool no_rdma = c->path == TD_XFER_PATH_RDMA && (!x->rdma || !xfer_rdma_usable(x));
    bool wrong_pool = (c->path == TD_XFER_PATH_SHM && x->device) ||
                      (c->path == TD_XFER_PATH_CUDA_IPC && !x->device);
    if (!allowed || no_rdma || wrong_pool) {
        if (allowed && no_rdma)
            xfer_say(reason, "it has no usable RDMA device");
        else if (allowed)
            xfer_say(reason, "path %s: its pool is in %s memory", td_xfer_path_name(c->path),
                     x->device ? "a device's" : "the host's");
        else
            xfer_say(reason, "path %s is not to be had here: this side allows %s",
                     td_xfer_path_name((enum td_xfer_path)c->rx_frame.slot),
                     td_xfer_path_name(x->path));
        hello_ack_refuse(x, c, TD_ERR_UNSUPPORTED, reason);
        return;
    }
    c->peer_incarnation = hello.incarnation;
    xfer_path_say_hello(x, c, TD_XFER_HELLO_ACK);
    c->tag = c->nonce ^ hello.nonce;
    if (c->path == TD_XFER_PATH_RDMA || c->path == TD_XFER_PATH_CUDA_IPC)
        begin_setup(x, c);
    else
        xfer_path_ready(x, c);
}

static void on_hello(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_frame challenge = {.type = TD_XFER_CHALLENGE, .length = TD_XFER_SECRET_BYTES};
    struct td_xfer_secret_hello told = {0};
    memcpy(&told, c->rx_payload, c->rx_frame.length);
    if (told.hello.instance[sizeof told.hello.instance - 1] || told.hello.nonce == 0) {
        xfer_conn_refuse(x, c, "hello is malformed");
        return;
    }
    memcpy(c->peer_instance, told.hello.instance, sizeof c->peer_instance);
    for (char *p = c->peer_instance; *p; p++)
        if (*p < 0x21 || *p > 0x7e) *p = '?';
    bool asks = c->rx_frame.length == sizeof told;
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
    c->proof.frame = c->rx_frame;
    c->proof.hello[0] = told.hello;
    memcpy(c->proof.nonce[0], told.secret, sizeof told.secret);
    xfer_proof_begin(c);
    c->proof.challenged = true;
    xfer_conn_queue(x, c, &challenge, c->proof.nonce[1]);
}

/* Acceptor: PROOF came, of the HELLO that was kept. */
static void on_proof(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (!xfer_proof_check(x, c, c->rx_payload)) {
        hello_ack_refuse(
            x, c, TD_ERR_PEER,
            "the cluster secret was not proved: the two sides' --cluster-secret-file differ");
        return;
    }
    has_proven(x, c);
    c->rx_frame = c->proof.frame;
    admit(x, c, &c->proof.hello[0]);
}

/* Initiator: CHALLENGE came. */
static void on_challenge(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_frame f = {.type = TD_XFER_PROOF, .length = TD_XFER_SECRET_BYTES};
    uint8_t mac[TD_XFER_SECRET_BYTES];
    memcpy(c->proof.nonce[1], c->rx_payload, sizeof c->proof.nonce[1]);
    c->proof.challenged = true;
    if (xfer_proof_make(x, c, mac))
        xfer_conn_close(x, c, TD_ERR_NOMEM, "no memory to prove the cluster secret", false);
    else
        xfer_conn_queue(x, c, &f, mac);
}

/* Initiator: an HELLO_ACK that lets it in has the acceptor's MAC, of this HELLO and this
 * challenge. */
static bool acceptor_proved(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_secret_hello told;
    if (!c->proof.challenged || c->rx_frame.length != sizeof told) return false;
    memcpy(&told, c->rx_payload, sizeof told);
    c->proof.hello[1] = told.hello;
    return xfer_proof_check(x, c, told.secret);
}

static void on_hello_ack(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_hello hello;
    char reason[TD_XFER_REASON_MAX];
    if (c->rx_frame.status) {
        char theirs[TD_XFER_REASON_MAX];
        xfer_conn_take_reason(theirs, c);
        xfer_say(reason, "refused: %.140s", theirs);
        xfer_conn_close(x, c, (td_status)c->rx_frame.status, reason, false);
        return;
    }
    memcpy(&hello, c->rx_payload, sizeof hello);
    if (x->secret && !acceptor_proved(x, c)) {
        xfer_conn_close(x, c, TD_ERR_PEER, "it did not prove the cluster secret", false);
    } else if (!x->secret && c->rx_frame.length != sizeof hello) {
        xfer_conn_close(x, c, TD_ERR_PEER,
                        "its hello is of a cluster secret, which this side has not", false);
    } else if (xfer_path_is_local(c->path) && !td_xfer_key_equal(hello.proof, c->peer_proof)) {
        xfer_conn_close(x, c, TD_ERR_PEER, "the socket on this host is not the grant's", false);
    } else if (hello.incarnation != c->peer_incarnation) {
        xfer_conn_close(x, c, TD_ERR_STALE,
                        "another process has the address: the grant is an old one", false);
    } else if (hello.layout_hash != x->layout_hash || hello.block_bytes != x->block_bytes ||
               hello.nonce == 0) {
        xfer_conn_close(x, c, TD_ERR_UNSUPPORTED, "its layout is not ours", false);
    } else if (c->lane) {
        const struct td_xfer_conn *first = xfer_conn_by_id(x, c->link);
        if (first && first->state == XFER_CONN_READY)
            xfer_path_ready(x, c);
        else
            xfer_conn_close(x, c, TD_ERR_PEER, "its first lane is gone", false);
    } else {
        c->tag = c->nonce ^ hello.nonce;
        if ((c->path == TD_XFER_PATH_SHM || c->path == TD_XFER_PATH_SHM_STAGED) &&
            !xfer_shm_send_mem(x, c)) {
            xfer_conn_close(x, c, TD_ERR_PEER, "could not hand over the pool", false);
        } else if (c->path == TD_XFER_PATH_CUDA_IPC) {
            begin_setup(x, c);
            if (!xfer_ipc_send_offer(x, c))
                xfer_conn_close(x, c, TD_ERR_PEER, "could not hand over the pool", false);
        } else if (c->path == TD_XFER_PATH_RDMA) {
            begin_setup(x, c);
            if (!xfer_rdma_offer(x, c, reason)) xfer_conn_close(x, c, TD_ERR_PEER, reason, false);
        } else {
            xfer_path_ready(x, c);
        }
    }
}

void xfer_path_on_hello(struct td_xfer *x, struct td_xfer_conn *c)
{
    switch (c->rx_frame.type) {
    case TD_XFER_CHALLENGE:
        on_challenge(x, c);
        break;
    case TD_XFER_PROOF:
        on_proof(x, c);
        break;
    case TD_XFER_HELLO:
        on_hello(x, c);
        break;
    default:
        on_hello_ack(x, c);
        break;
    }
}

void xfer_path_refuse_offer(struct td_xfer *x, struct td_xfer_conn *c, td_status status,
                            const char *reason)
{
    uint8_t type = c->path == TD_XFER_PATH_CUDA_IPC ? TD_XFER_DEVICE_ACCEPT : TD_XFER_RDMA_ACCEPT;
    struct td_xfer_frame f = {.type = type,
                              .conn = c->tag,
                              .status = (int16_t)status,
                              .length = (uint32_t)strlen(reason)};
    uint8_t bytes[64 + TD_XFER_REASON_MAX];
    td_xfer_frame_encode(&f, bytes);
    memcpy(bytes + 64, reason, f.length);
    xfer_tcp_send(c, bytes, 64 + f.length); /* a courtesy, as in hello_ack_refuse */
    xfer_path_refused(x, c, reason);
    xfer_conn_close(x, c, status, reason, false);
}

static void on_device_offer(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_frame f = {.type = TD_XFER_DEVICE_ACCEPT};
    struct td_xfer_device_mem mem;
    char reason[TD_XFER_REASON_MAX];
    memcpy(&mem, c->rx_payload, sizeof mem);
    td_status status = xfer_ipc_take_offer(x, c, &mem, c->rx_payload + sizeof mem,
                                           c->rx_frame.length - sizeof mem, reason);
    if (status == TD_ERR_CORRUPT) {
        xfer_conn_refuse(x, c, reason);
    } else if (status) {
        xfer_path_refuse_offer(x, c, status, reason);
    } else {
        xfer_conn_queue(x, c, &f, NULL);
        xfer_path_ready(x, c);
    }
}

/* rdma, cuda-ipc: the frames of SETUP. rdma's READY comes with the probes. */
void xfer_path_on_setup(struct td_xfer *x, struct td_xfer_conn *c)
{
    char reason[TD_XFER_REASON_MAX];
    if (c->rx_frame.type == TD_XFER_DEVICE_OFFER) {
        on_device_offer(x, c);
    } else if (c->rx_frame.type == TD_XFER_DEVICE_ACCEPT && c->rx_frame.status) {
        char theirs[TD_XFER_REASON_MAX];
        xfer_conn_take_reason(theirs, c);
        xfer_say(reason, "refused: %.140s", theirs);
        if (c->rx_frame.status == TD_ERR_UNSUPPORTED) xfer_ipc_refused(x, c->peer_incarnation);
        xfer_conn_close(x, c, (td_status)c->rx_frame.status, reason, false);
    } else if (c->rx_frame.type == TD_XFER_DEVICE_ACCEPT) {
        xfer_path_ready(x, c);
    } else if (c->rx_frame.type == TD_XFER_RDMA_OFFER) {
        td_status status = xfer_rdma_on_offer(x, c, reason);
        if (status) xfer_path_refuse_offer(x, c, status, reason);
    } else if (c->rx_frame.type == TD_XFER_RDMA_ACCEPT) {
        if (c->rx_frame.status) {
            char theirs[TD_XFER_REASON_MAX];
            xfer_conn_take_reason(theirs, c);
            xfer_say(reason, "refused: %.140s", theirs);
            xfer_rdma_refused(x);
            xfer_conn_close(x, c, (td_status)c->rx_frame.status, reason, false);
        } else if (!xfer_rdma_on_accept(x, c, reason)) {
            xfer_conn_close(x, c, TD_ERR_PEER, reason, false);
        }
    }
}
