/* nodes.c - see nodes.h. Node 0 is one loop over poll(2): its listener, the guests that have not
 * proved themselves, and the ranks that have joined, which may leave while others are awaited.
 *
 *   guest:  TLS --handshake--> HELLO --challenge sent--> PROOF --welcome sent--> READY --> a rank
 *           any of them --deadline, end, refusal--> closed */
#include "common/worker/nodes.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "common/base/address.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/rpc/identity.h"

enum { GUESTS_MAX = 32, GUEST_MS = 5000, JOIN_MS = 600000, DIAL_MS = 200, SAY_MS = 10000 };
#define MAGIC "tdranks"
#define VERSION 2u

struct hello {
    char magic[8];
    uint32_t version, rank, n_ranks, zero;
    char role[16];
    uint8_t nonce[TD_CLUSTER_NONCE_BYTES];
};
struct welcome {
    uint32_t answer;
    char reason[124]; /* of a refusal */
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
};
_Static_assert(sizeof(struct hello) == 72 && sizeof(struct welcome) == 160, "nodes on the wire");
enum { LET_IN = 0, NOT_NOW = 1, NEVER = 2 }; /* welcome.answer */

static const char *const LABELS[] = {"tandem ranks v1 follower", "tandem ranks v1 leader"};
enum { FOLLOWER = 0, LEADER = 1 };

enum guest_state { TLS, HELLO, PROOF, READY };

struct end { /* of a connection that is no channel yet; fd -1: none */
    int fd;
    struct td_xfer_tls_conn *tls;
    char name[64];
    enum guest_state state;
    bool shakes; /* the TLS handshake is not over */
    short events;
    uint64_t deadline_ns;
    size_t n_read; /* of the message that is awaited */
    struct hello hello;
    uint8_t nonce[TD_CLUSTER_NONCE_BYTES], mac[TD_CLUSTER_MAC_BYTES];
};

struct lead {
    const struct td_nodes_config *c;
    struct end guests[GUESTS_MAX], ranks[TD_COMM_MAX_RANKS];
    int listener;
    int32_t n_joined;
    struct td_log_pace pace;
};

/* ---- bytes ----------------------------------------------------------------------------------- */

static void end_close(struct end *e)
{
    if (e->fd < 0) return;
    td_tls_conn_close(e->tls);
    close(e->fd);
    *e = (struct end){.fd = -1};
}

static td_status end_open(struct end *e, int fd, const char *name, struct td_xfer_tls *tls,
                          bool dials, struct td_err *err)
{
    *e = (struct end){.fd = fd,
                      .shakes = tls != NULL,
                      .state = tls ? TLS : HELLO,
                      .events = POLLIN,
                      .deadline_ns = td_deadline_after_ms(td_now_ns(), GUEST_MS)};
    snprintf(e->name, sizeof e->name, "%s", name);
    td_status s = tls ? td_tls_conn_open(tls, fd, dials, &e->tls, err) : TD_OK;
    if (s) end_close(e);
    return s;
}

/* One step of the handshake: TD_INPROGRESS says in e->events what it waits for. */
static td_status shake(struct end *e, struct td_err *err)
{
    bool want_read, want_write;
    uint8_t scrap[4096];
    if (!e->shakes) return TD_OK;
    td_status s = td_tls_handshake(e->tls, &want_read, &want_write, err);
    e->events = (short)((want_read ? POLLIN : 0) | (want_write ? POLLOUT : 0));
    e->shakes = s != TD_OK;
    /* else close() is a reset that overtakes the alert */
    for (int i = 0; s < 0 && i < 16 && recv(e->fd, scrap, sizeof scrap, MSG_DONTWAIT) > 0; i++) {
    }
    if (!s) e->events = POLLIN;
    return s;
}

/* TD_OK: all n bytes of the awaited message are in buf; TD_INPROGRESS: not yet. */
static td_status fill(struct end *e, void *buf, size_t n, struct td_err *err)
{
    while (e->n_read < n) {
        uint8_t *at = (uint8_t *)buf + e->n_read;
        ssize_t k = e->tls ? td_tls_recv(e->tls, at, n - e->n_read)
                           : recv(e->fd, at, n - e->n_read, MSG_DONTWAIT);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return TD_INPROGRESS;
        if (k <= 0) {
            const char *tls = e->tls ? td_tls_reason(e->tls) : "";
            return td_fail(err, TD_ERR_PEER, "%s",
                           tls[0]   ? tls
                           : k == 0 ? "the connection ended"
                                    : strerror(errno));
        }
        e->n_read += (size_t)k;
    }
    e->n_read = 0;
    return TD_OK;
}

/* What goes out here is small, and the first that the socket takes. */
static td_status say(struct end *e, const void *data, size_t n, struct td_err *err)
{
    ssize_t k =
        e->tls ? td_tls_send(e->tls, data, n) : send(e->fd, data, n, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (k == (ssize_t)n && (!e->tls || !td_tls_flush(e->tls))) return TD_OK;
    return td_fail(err, TD_ERR_PEER, "it takes no %zu bytes: %s", n,
                   k < 0 ? strerror(errno) : "its buffers are full");
}

/* ---- proofs ---------------------------------------------------------------------------------- */

struct proof_fields {
    struct td_secret_field f[5];
    size_t n;
};

static struct proof_fields fields_of(const struct td_nodes_config *c, const struct hello *h,
                                     const uint8_t *nonce, const struct welcome *w)
{
    struct proof_fields p = {{{nonce, TD_CLUSTER_NONCE_BYTES},
                              {h, sizeof *h}, /* the follower's nonce is in it */
                              {c->master_addr, strlen(c->master_addr)}},
                             3};
    if (w) {
        p.f[p.n++] = (struct td_secret_field){&w->answer, sizeof w->answer};
        p.f[p.n++] = (struct td_secret_field){w->reason, sizeof w->reason};
    }
    return p;
}

static td_status prove(const struct td_nodes_config *c, const struct hello *h, const uint8_t *nonce,
                       const struct welcome *w, uint8_t ret_mac[TD_CLUSTER_MAC_BYTES])
{
    struct proof_fields p = fields_of(c, h, nonce, w);
    memset(ret_mac, 0, TD_CLUSTER_MAC_BYTES);
    if (!c->secret) return TD_OK;
    return td_cluster_secret_prove(c->secret, LABELS[w ? LEADER : FOLLOWER], p.f, p.n, ret_mac);
}

static bool proves(const struct td_nodes_config *c, const struct hello *h, const uint8_t *nonce,
                   const struct welcome *w, const uint8_t mac[TD_CLUSTER_MAC_BYTES])
{
    struct proof_fields p = fields_of(c, h, nonce, w);
    return !c->secret ||
           td_cluster_secret_verify(c->secret, LABELS[w ? LEADER : FOLLOWER], p.f, p.n, mac);
}

/* ---- channels -------------------------------------------------------------------------------- */

struct tls_channel {
    int fd;
    struct td_xfer_tls_conn *tls;
};

static ssize_t channel_recv(void *ctx, void *buf, size_t n)
{
    return td_tls_recv(((struct tls_channel *)ctx)->tls, buf, n);
}
static ssize_t channel_sendv(void *ctx, const struct iovec *iov, int n_iov)
{
    return td_tls_sendv(((struct tls_channel *)ctx)->tls, iov, n_iov);
}
static bool channel_pending(void *ctx) { return td_tls_pending(((struct tls_channel *)ctx)->tls); }
static size_t channel_unsent(void *ctx) { return td_tls_unsent(((struct tls_channel *)ctx)->tls); }
static int channel_flush(void *ctx) { return td_tls_flush(((struct tls_channel *)ctx)->tls); }
static void channel_close(void *ctx)
{
    struct tls_channel *t = ctx;
    td_tls_shutdown(t->tls);
    td_tls_conn_close(t->tls);
    close(t->fd);
    free(t);
}

/* Takes the connection over, in every case. */
static td_status channel_of(struct end *e, struct td_comm_channel *ret, struct td_err *err)
{
    struct td_comm_channel c = {.fd = e->fd};
    snprintf(c.name, sizeof c.name, "%s", e->name);
    if (e->tls) {
        struct tls_channel *t = malloc(sizeof *t);
        if (!t) {
            end_close(e);
            return td_fail(err, TD_ERR_NOMEM, "ranks: no memory");
        }
        *t = (struct tls_channel){.fd = e->fd, .tls = e->tls};
        c.ctx = t;
        c.recv = channel_recv, c.sendv = channel_sendv, c.pending = channel_pending;
        c.unsent = channel_unsent, c.flush = channel_flush, c.close = channel_close;
    }
    *e = (struct end){.fd = -1};
    *ret = c;
    return TD_OK;
}

static td_status open_comm(const struct td_nodes_config *c, struct end *ends, int32_t n_ends,
                           struct td_comm **ret_comm, struct td_err *err)
{
    struct td_comm_channel channels[TD_COMM_MAX_RANKS];
    for (int i = 0; i < TD_COMM_MAX_RANKS; i++) channels[i].fd = -1;
    struct td_comm_config cc = {.timeout_ms = JOIN_MS}; /* of loading; the engine shortens it */
    td_status s = TD_OK;
    int32_t n = 0;
    for (; n < n_ends && !s; n++)
        if (ends[n].fd >= 0) s = channel_of(&ends[n], &channels[n], err);
    if (!s) s = td_comm_open_channels(channels, c->n_nodes, c->node, &cc, ret_comm, err);
    for (int i = 0; s && i < TD_COMM_MAX_RANKS; i++) {
        if (channels[i].fd < 0) continue;
        if (channels[i].close)
            channels[i].close(channels[i].ctx);
        else
            close(channels[i].fd);
    }
    return s;
}

/* ---- node 0 ---------------------------------------------------------------------------------- */

static void name_of(const struct sockaddr_storage *a, socklen_t n, char ret_name[64])
{
    char host[48] = "?", port[8] = "?";
    getnameinfo((const struct sockaddr *)a, n, host, sizeof host, port, sizeof port,
                NI_NUMERICHOST | NI_NUMERICSERV);
    snprintf(ret_name, 64, strchr(host, ':') ? "[%s]:%s" : "%s:%s", host, port);
}

static void refused(struct lead *l, struct end *e, const char *reason)
{
    char q[300];
    uint32_t n_dropped;
    if (td_log_pace_due(&l->pace, &n_dropped))
        td_warn("rank_refused", "at=%s reason=%s others=%u", e->name,
                td_log_quote(q, sizeof q, reason), n_dropped);
    end_close(e);
}

/* Who has proved to be of the cluster is told why it cannot be a rank. */
static uint32_t judge(const struct lead *l, const struct end *e, char *reason, size_t bytes)
{
    const struct hello *h = &e->hello;
    reason[0] = 0;
    if (h->version != VERSION)
        snprintf(reason, bytes, "its protocol is %u, this one's is %u", h->version, VERSION);
    else if (strncmp(h->role, l->c->role, sizeof h->role) != 0)
        snprintf(reason, bytes, "it is a %.15s worker, this is a %s worker", h->role, l->c->role);
    else if (h->n_ranks != (uint32_t)l->c->n_nodes)
        snprintf(reason, bytes, "its nnodes is %u, node 0's is %d", h->n_ranks, l->c->n_nodes);
    else if (h->rank < 1 || h->rank >= (uint32_t)l->c->n_nodes)
        snprintf(reason, bytes, "its node_rank is %u, must be 1..%d", h->rank, l->c->n_nodes - 1);
    if (reason[0]) return NEVER;
    if (l->ranks[h->rank].fd < 0) return LET_IN;
    snprintf(reason, bytes, "node_rank %u has joined from %s", h->rank, l->ranks[h->rank].name);
    return NOT_NOW;
}

static td_status welcome(struct lead *l, struct end *e, struct td_err *err)
{
    struct welcome w = {0};
    if (!proves(l->c, &e->hello, e->nonce, NULL, e->mac))
        return td_fail(err, TD_ERR_PEER,
                       "it does not know the cluster secret, or its master_addr is not \"%s\"",
                       l->c->master_addr);
    w.answer = judge(l, e, w.reason, sizeof w.reason);
    td_status s = prove(l->c, &e->hello, e->nonce, &w, w.mac);
    if (!s) s = say(e, &w, sizeof w, err);
    if (s || w.answer == LET_IN) return s;
    return td_fail(err, TD_ERR_PEER, "%s", w.reason);
}

/* As far as its bytes go. TD_OK: it is a rank now. */
static td_status guest_step(struct lead *l, struct end *e, struct td_err *err)
{
    td_status s = shake(e, err);
    if (s) return s;
    if (e->state == TLS) e->state = HELLO;
    if (e->state == HELLO) {
        if ((s = fill(e, &e->hello, sizeof e->hello, err))) return s;
        if (memcmp(e->hello.magic, MAGIC, sizeof e->hello.magic) != 0)
            return td_fail(err, TD_ERR_PEER, "its first bytes are not a rank's");
        td_cluster_nonce(e->nonce);
        if ((s = say(e, e->nonce, sizeof e->nonce, err))) return s;
        e->state = PROOF;
    }
    if (e->state == PROOF) {
        if ((s = fill(e, e->mac, sizeof e->mac, err)) || (s = welcome(l, e, err))) return s;
        e->state = READY;
    }
    if ((s = fill(e, e->mac, 1, err))) return s;
    if (l->ranks[e->hello.rank].fd >= 0)
        return td_fail(err, TD_ERR_PEER, "node_rank %u has joined from %s", e->hello.rank,
                       l->ranks[e->hello.rank].name);
    td_info("rank_joined", "rank=%u at=%s tls=%s", e->hello.rank, e->name, e->tls ? "yes" : "no");
    l->ranks[e->hello.rank] = *e;
    l->n_joined++;
    *e = (struct end){.fd = -1};
    return TD_OK;
}

static void take_guest(struct lead *l)
{
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    char name[64];
    struct td_err err = {0};
    int fd = accept4(l->listener, (struct sockaddr *)&a, &n, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return;
    td_comm_watch_host(fd); /* it may join and vanish before the others have come */
    name_of(&a, n, name);
    for (int i = 0; i < GUESTS_MAX; i++)
        if (l->guests[i].fd < 0) {
            end_open(&l->guests[i], fd, name, l->c->tls, false, &err);
            return;
        }
    close(fd);
}

/* One wait and what it brings. */
static void lead_once(struct lead *l)
{
    struct pollfd fds[1 + GUESTS_MAX + TD_COMM_MAX_RANKS];
    struct end *whose[1 + GUESTS_MAX + TD_COMM_MAX_RANKS];
    nfds_t n = 0;
    int n_guests = 0;
    for (int i = 0; i < GUESTS_MAX; i++) {
        if (l->guests[i].fd < 0) continue;
        fds[n] = (struct pollfd){.fd = l->guests[i].fd, .events = l->guests[i].events};
        whose[n++] = &l->guests[i];
        n_guests++;
    }
    for (int32_t r = 1; r < l->c->n_nodes; r++) {
        if (l->ranks[r].fd < 0) continue;
        fds[n] = (struct pollfd){.fd = l->ranks[r].fd, .events = POLLRDHUP};
        whose[n++] = &l->ranks[r];
    }
    nfds_t n_ends = n;
    if (n_guests < GUESTS_MAX) fds[n++] = (struct pollfd){.fd = l->listener, .events = POLLIN};
    if (poll(fds, n, DIAL_MS) < 0) return;
    uint64_t now = td_now_ns();
    for (nfds_t i = 0; i < n_ends; i++) {
        struct end *e = whose[i];
        struct td_err err = {0};
        bool joined = i >= (nfds_t)n_guests;
        if (joined && (fds[i].revents & (POLLRDHUP | POLLHUP | POLLERR))) {
            td_warn("rank_left", "rank=%u at=%s action=wait_for_another", e->hello.rank, e->name);
            end_close(e);
            l->n_joined--;
        } else if (!joined && fds[i].revents && guest_step(l, e, &err) < 0) {
            refused(l, e, err.msg);
        } else if (!joined && e->fd >= 0 && now > e->deadline_ns) {
            refused(l, e, "it did not join within 5 s of its connection");
        }
    }
    if (n > n_ends && fds[n_ends].revents & POLLIN) take_guest(l);
}

/* The port of "host:port", with the colon. */
static const char *port_of(const char *address)
{
    const char *colon = strrchr(address, ':');
    return colon ? colon : ":0";
}

static td_status listen_on(const struct td_nodes_config *c, int *ret_fd, struct td_err *err)
{
    char address[300];
    int one = 1, fd = -1, e = 0;
    struct addrinfo *list = NULL;
    const char *colon = strrchr(c->listen, ':');
    snprintf(address, sizeof address, "%.*s%s", (int)(colon ? colon - c->listen : 0), c->listen,
             port_of(c->master_addr));
    td_status s = td_address_resolve("master_addr", address, true, &list, err);
    if (s) return s;
    fd = socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) ||
        bind(fd, list->ai_addr, list->ai_addrlen) || listen(fd, 64))
        e = errno;
    freeaddrinfo(list);
    if (e) {
        if (fd >= 0) close(fd);
        return td_fail(err, TD_ERR_IO, "master_addr: node 0 cannot listen on %s: %s", address,
                       strerror(e));
    }
    td_info("ranks_awaited", "n=%d listen=%s", c->n_nodes - 1, address);
    *ret_fd = fd;
    return TD_OK;
}

static td_status lead_late(const struct lead *l, struct td_err *err)
{
    char missing[128] = "";
    size_t n = 0;
    for (int32_t r = 1; r < l->c->n_nodes && n < sizeof missing; r++)
        if (l->ranks[r].fd < 0) n += (size_t)snprintf(missing + n, sizeof missing - n, " %d", r);
    return td_fail(err, TD_ERR_DEADLINE, "nnodes is %d: nodes%s have not joined within %u ms",
                   l->c->n_nodes, missing, l->c->join_ms ? l->c->join_ms : JOIN_MS);
}

td_status td_nodes_lead(const struct td_nodes_config *c, struct td_comm **ret_comm,
                        struct td_err *err)
{
    uint64_t until = td_deadline_after_ms(td_now_ns(), c->join_ms ? c->join_ms : JOIN_MS);
    struct lead *l = calloc(1, sizeof *l);
    if (!l) return td_fail(err, TD_ERR_NOMEM, "ranks: no memory");
    l->c = c;
    for (int i = 0; i < GUESTS_MAX; i++) l->guests[i].fd = -1;
    for (int i = 0; i < TD_COMM_MAX_RANKS; i++) l->ranks[i].fd = -1;
    td_status s = listen_on(c, &l->listener, err);
    if (s) {
        free(l);
        return s;
    }
    while (l->n_joined < c->n_nodes - 1 && td_now_ns() < until) lead_once(l);
    if (l->n_joined < c->n_nodes - 1)
        s = lead_late(l, err);
    else
        s = open_comm(c, l->ranks, c->n_nodes, ret_comm, err);
    for (int i = 0; i < GUESTS_MAX; i++) end_close(&l->guests[i]);
    for (int i = 0; i < TD_COMM_MAX_RANKS; i++) end_close(&l->ranks[i]);
    close(l->listener);
    free(l);
    return s;
}

/* ---- other nodes ----------------------------------------------------------------------------- */

/* Waits for an event of the connection until its deadline. */
static td_status await(const struct end *e, struct td_err *err)
{
    uint64_t now = td_now_ns();
    struct pollfd p = {.fd = e->fd, .events = e->events};
    if (now >= e->deadline_ns) return td_fail(err, TD_ERR_DEADLINE, "it did not answer within 5 s");
    poll(&p, 1, (int)((e->deadline_ns - now) / TD_NS_PER_MS + 1));
    return TD_OK;
}

static td_status hear(struct end *e, void *buf, size_t n, struct td_err *err)
{
    td_status s;
    while ((s = fill(e, buf, n, err)) == TD_INPROGRESS)
        if ((s = await(e, err))) return s;
    return s;
}

/* Of several addresses of the name, another one at each attempt. */
static td_status dial(const struct td_nodes_config *c, unsigned attempt, struct end *ret_end,
                      struct td_err *err)
{
    struct addrinfo *list = NULL;
    td_status s = td_address_resolve("master_addr", c->master_addr, false, &list, err);
    if (s) return s;
    unsigned n_list = 0;
    const struct addrinfo *to = list;
    for (const struct addrinfo *a = list; a; a = a->ai_next) n_list++;
    for (unsigned i = attempt % n_list; i; i--) to = to->ai_next;
    int fd = socket(to->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), e = 0;
    if (fd < 0 || (connect(fd, to->ai_addr, to->ai_addrlen) && errno != EINPROGRESS)) e = errno;
    freeaddrinfo(list);
    if (e) {
        if (fd >= 0) close(fd);
        return td_fail(err, TD_ERR_PEER, "connect: %s", strerror(e));
    }
    if ((s = end_open(ret_end, fd, c->master_addr, c->tls, true, err))) return s;
    ret_end->events = POLLOUT;
    s = await(ret_end, err);
    ret_end->events = POLLIN;
    socklen_t n = sizeof e;
    if (!s && (getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n) || e))
        s = td_fail(err, TD_ERR_PEER, "connect: %s", strerror(e));
    while (!s && (s = shake(ret_end, err)) == TD_INPROGRESS) s = await(ret_end, err);
    if (s) end_close(ret_end);
    return s;
}

/* *ret_final: node 0 has answered for good. */
static td_status join_once(const struct td_nodes_config *c, unsigned attempt, struct end *e,
                           bool *ret_final, struct td_err *err)
{
    struct hello h = {.magic = MAGIC,
                      .version = VERSION,
                      .rank = (uint32_t)c->node,
                      .n_ranks = (uint32_t)c->n_nodes};
    uint8_t nonce[TD_CLUSTER_NONCE_BYTES], mac[TD_CLUSTER_MAC_BYTES];
    struct welcome w;
    snprintf(h.role, sizeof h.role, "%s", c->role);
    td_cluster_nonce(h.nonce);
    td_status s = dial(c, attempt, e, err);
    if (s) return s;
    if (!(s = say(e, &h, sizeof h, err))) s = hear(e, nonce, sizeof nonce, err);
    if (!s) s = prove(c, &h, nonce, NULL, mac);
    if (!s && !(s = say(e, mac, sizeof mac, err))) s = hear(e, &w, sizeof w, err);
    if (s) {
        end_close(e);
        return s;
    }
    bool is_proved = proves(c, &h, nonce, &w, w.mac);
    if (!is_proved)
        s = td_fail(err, TD_ERR_PEER, "it has not proved to know the cluster secret");
    else if (w.answer != LET_IN)
        s = td_fail(err, TD_ERR_PEER, "%.*s", (int)sizeof w.reason, w.reason);
    else
        s = say(e, "!", 1, err);
    *ret_final = is_proved && w.answer == NEVER;
    if (s) end_close(e);
    return s;
}

td_status td_nodes_join(const struct td_nodes_config *c, struct td_comm **ret_comm,
                        struct td_err *err)
{
    struct end e = {.fd = -1};
    struct td_err why = {0};
    char q[TD_ERR_MSG_MAX + 8];
    uint64_t until = td_deadline_after_ms(td_now_ns(), c->join_ms ? c->join_ms : JOIN_MS), tell = 0;
    for (unsigned attempt = 0;; attempt++) {
        bool final = false;
        td_status s = join_once(c, attempt, &e, &final, &why);
        if (!s) break;
        uint64_t now = td_now_ns();
        if (final) return td_fail(err, s, "node 0 at %s: %s", c->master_addr, why.msg);
        if (now > until)
            return td_fail(err, s, "node 0 at %s: %s (asked again for %u ms, the limit)",
                           c->master_addr, why.msg, c->join_ms ? c->join_ms : JOIN_MS);
        if (now >= tell) {
            td_info("rank_waits", "rank=%d for=%s reason=%s", c->node, c->master_addr,
                    td_log_quote(q, sizeof q, why.msg));
            tell = td_deadline_after_ms(now, SAY_MS);
        }
        struct timespec pause = {.tv_nsec = DIAL_MS * (long)TD_NS_PER_MS};
        clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
    }
    return open_comm(c, &e, 1, ret_comm, err);
}
