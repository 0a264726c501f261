/* rdma.c - RDMA: the writer's NIC puts blocks where the receiver's grant says. Over verbs.h's
 * table, so libibverbs or the fake.
 *
 * A rail is one port of one NIC of this side, with the pool registered on it and one completion
 * queue. A set (struct qp_set) is what an rdma connection has beside its socket: n_qps RC queue
 * pairs on each rail that both sides have. The socket carries the frames (README.md); queue pairs
 * carry payload.
 *
 *   initiator   creates queue pairs (INIT), RDMA_OFFER --> acceptor creates its own, RTR, RTS,
 *               RDMA_ACCEPT with its keys --> initiator RTR, RTS
 *   probe       the initiator WRITEs 64 bytes that only this connection's tag gives into a cell of
 *               the acceptor, then WRITE_WITH_IMM, on every queue pair; the acceptor compares,
 *               answers WRITE_WITH_IMM on every queue pair and is READY; when all have come, so is
 *               the initiator. So a queue pair that cannot carry bytes fails the set-up, not a
 *               request.
 *   data        WRITE chains of at most CHAIN requests and CHAIN_BYTES under one doorbell, the last
 *               of each signalled; blocks that lie side by side at the receiver are gathered into
 *               one request of at most WR_BYTES. Queue pairs take turns per chain, rail by rail;
 *               ops take turns per request. A transfer of at most CHAIN_BYTES goes by one queue
 *               pair, which needs one last word. bytes_in_flight bounds each queue pair.
 *   pull        blocks that the sender has before it computes anything (prefix hits) it may only
 *               name (REF); the receiver READs them with the keys of RDMA_OFFER
 *   end         a WRITE_WITH_IMM without data on every queue pair that carried some. RC delivers in
 *               order, so its completion at the receiver proves the bytes before it. FINAL on the
 *               socket says which queue pairs to count.
 *   receives    each such word takes one; a writer has at most the receiver's recv_wr words under
 *               way on a queue pair, so RNR cannot happen. With many peers a shared receive queue
 *               per rail takes their place.
 *
 * Who waits for the device. Changing queue pairs takes it milliseconds, and the lock is dropped
 * meanwhile; RTR also asks the kernel for the peer's address, which takes a second where nobody
 * answers, so a thread per set does RTR and RTS (struct joining). A set whose connection ends
 * before that thread does is let go: nothing was on it yet, and rdma_poll ends it when the thread
 * is over.
 *
 * Retirement. README.md, "When are blocks free?", says what ends each hold. The fence: this side's
 * queue pairs go to ERR (from then on the NIC drops what arrives for them), every flushed
 * completion is taken, they are destroyed, and the slots' blocks stay in quarantine for four local
 * ACK time-outs, because DMA that the NIC had accepted may still be on its way through the host.
 *
 * Windows (config.windows, receiver's side). The pool is then registered for binding and for local
 * access alone; ACCEPT carries zeros. When an attempt is bound, the runs of the granted blocks get
 * a memory window of type 2 each, on every queue pair of the set (a window works on the one that
 * bound it and on no other), and TARGETS goes out with their keys when all binds have completed. A
 * set has WINDOWS of them per queue pair. A grant may take half of those that are free; one of more
 * runs gets one window per registration, from its first block there to its last (counted:
 * n_wide_windows). None free: its TARGETS wait for the end of another.
 *
 *   when they end   LOCAL_INV, on the queue pair that bound them, as soon as the writer has
 *                   retired; or when a slot failed or was revoked and its writer, told FAIL, does
 *                   not say ABORT within the grace of an orphan. SLOT_FREE waits for the
 *                   completions, and not for that writer any more.
 *   why not before  RC knows no small errors: a write through a window that has ended is answered
 *                   REM_ACCESS, and both queue pairs are in ERR. A writer that does not answer
 *                   breaks the set if it does write on; an op that had ended by then is no bug, so
 *                   the others on the set get another attempt (is_late).
 *   is it a fence?  The completion of LOCAL_INV is written by the device after the data that it had
 *                   accepted, and a completion passes no data on PCIe. Seen on the fake and on
 *                   Soft-RoCE; on hardware it is to be tried.
 *
 * Errors. Any failed completion ends the set: fence, then the core gives its ops another attempt.
 * RETRY_EXC, RNR, flush, fatal: the way was bad. Access, protection, length: the bug of the one op
 * (or slot, for READs) whose request failed: that one fails for good, and its other end is told by
 * ABORT with UNRETIRED, so that the fence and not this word frees its blocks. A side that sees only
 * that its queue pairs have failed waits DOOM_NS for the other, who may know why. The rail that
 * erred is avoided by new sets: 1 s, then doubling to 300 s while errors go on, unless every rail
 * is.
 *
 * Which rails there are, and how they come back: rails.c. Source: the InfiniBand Architecture
 * Specification, volume 1, for what queue pairs and completions promise. */
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/fault.h"
#include "common/transfer/rdma/rdma.h"
#include "common/transfer/tcp/tcp.h"

#define CHAIN TD_RDMA_CHAIN
/* after so many the next queue pair has its turn; a smaller transfer has one for itself */
#define CHAIN_BYTES (2u << 20)
#define WR_BYTES (1u << 20)
/* a set that failed for a reason not known here waits so long for who knows it */
#define DOOM_NS (50 * TD_NS_PER_MS)
#define FENCE_NS (200 * TD_NS_PER_MS)
#define SPIN_MAX_NS 50000

/* --- sets of queue pairs ---------------------------------------------------------------------- */

static void qp_set_goes(struct qp_set *set, enum qp_set_state state)
{
    if (state > set->end.state) set->end.state = state;
}

static bool qp_set_is_over(const struct qp_set *set) { return set->end.state >= QP_SET_BROKEN; }

/* It is to be ended. True: nothing had broken it before, so the reason is the caller's to say. */
static bool qp_set_breaks(struct qp_set *set)
{
    bool is_first = !qp_set_is_over(set);
    qp_set_goes(set, QP_SET_BROKEN);
    return is_first;
}

/* Both sides have a rail that the set lacks, and it is time to try; sets the next time. */
static bool rdma_wants_better(struct td_xfer *x, struct td_xfer_conn *c, uint64_t now)
{
    struct xfer_rdma *r = x->rdma;
    struct qp_set *set = xfer_qp_set_of(c);
    uint32_t have = 0, could = 0;
    for (uint32_t q = 0; q < set->n_qps; q++) have |= 1u << set->qp[q].rail;
    for (uint32_t i = 0; i < r->n_rails; i++)
        if (xfer_rail_is_usable(&r->rail[i]) && now >= r->rail[i].avoid_until_ns) could |= 1u << i;
    if (!(could & set->more.peer_rails & ~have)) return false;
    if (set->more.n_ups != r->n_ups) { /* one has come back here: no reason to wait */
        set->more.n_ups = r->n_ups;
        set->more.at_ns = now;
        set->more.wait_ns = 0;
    }
    if (now < set->more.at_ns) return false;
    set->more.wait_ns = xfer_next_wait(set->more.wait_ns, REOPEN_NS, REOPEN_MAX_NS);
    set->more.at_ns = now + set->more.wait_ns;
    return true;
}

/* Queue pairs in turn, and neighbours in the row are of different rails. */
static uint32_t qp_of_turn(const struct qp_set *set, uint32_t turn)
{
    return turn % set->n_rails * set->per_rail + turn / set->n_rails % set->per_rail;
}

/* A small op has one queue pair for its data, and rails take turns. */
static void rdma_attached(struct td_xfer *x, struct td_xfer_conn *c, uint32_t op)
{
    struct qp_set *set = xfer_qp_set_of(c);
    uint64_t n_bytes = (uint64_t)x->core.ops[op].grant.n_blocks * x->pool.block_bytes;
    uint32_t home =
        n_bytes > CHAIN_BYTES ? 0 : 1u << qp_of_turn(set, set->next_home++ % set->n_qps);
    td_xfer_core_op_limit(&x->core, op, home);
}

static bool rdma_is_better(const struct td_xfer_conn *c, const struct td_xfer_conn *old)
{
    const struct qp_set *set = xfer_qp_set_of(old);
    return !set || xfer_qp_set_of(c)->n_rails > set->n_rails;
}

/* c's, from here on; NULL with the reason. */
static struct qp_set *qp_set_new(struct xfer_rdma *r, struct td_xfer_conn *c,
                                 char reason[TD_XFER_REASON_MAX])
{
    uint32_t at = 0;
    while (at < MAX_QP_SETS && r->qp_set[at]) at++;
    struct qp_set *set = at < MAX_QP_SETS ? calloc(1, sizeof *set) : NULL;
    ((struct xfer_rdma_conn *)c->own)->set = set;
    if (!set) {
        xfer_say(reason, "rdma: all %d sets of queue pairs are in use", MAX_QP_SETS);
        return NULL;
    }
    set->index = at;
    set->conn = c->id;
    set->end.fault.id = NO_ID;
    r->qp_set[at] = set;
    r->n_qp_sets++;
    memset(xfer_rdma_cell(r, 0, at, 0), 0, (size_t)TD_XFER_QPS_MAX * CELL);
    return set;
}

/* What a queue pair has. Without the lock. */
static void pair_free(struct xfer_rdma *r, struct queue_pair *pair)
{
    struct rail *rail = &r->rail[pair->rail];
    rail->cq_used -= rail->plan.send_depth + pair->recv_posted;
    /* bound or not; while bound they hold their queue pair */
    for (uint32_t k = 0; k < WINDOWS; k++) r->vb->mw.free(pair->mw[k]);
    r->vb->qp_destroy(pair->qp);
    free(pair->ring);
}

/* Drops the lock. */
static void qp_set_free(struct td_xfer *x, struct qp_set *set)
{
    struct xfer_rdma *r = x->rdma;
    r->qp_set[set->index] = NULL;
    r->n_qp_sets--;
    pthread_mutex_unlock(&x->lock);
    for (uint32_t q = 0; q < TD_XFER_QPS_MAX; q++)
        if (set->qp[q].qp) pair_free(r, &set->qp[q]);
    free(set);
    pthread_mutex_lock(&x->lock);
}

/* A queue pair in INIT with its receives posted. Without the lock. */
static bool qp_open(struct xfer_rdma *r, struct queue_pair *pair, uint32_t rail_at,
                    char reason[TD_XFER_REASON_MAX])
{
    struct rail *rail = &r->rail[rail_at];
    bool shared = rail->srq && r->n_qp_sets >= r->config.srq_peers;
    struct td_vb_qp_caps caps = {.send_wr = rail->plan.send_depth,
                                 .recv_wr = shared ? 0 : rail->plan.recv_depth,
                                 .send_sge = rail->plan.n_sge,
                                 .srq = shared ? rail->srq : NULL};
    uint32_t need = rail->plan.send_depth + (shared ? 0 : rail->plan.recv_depth);
    int e;
    if (rail->cq_used + need > rail->plan.cq_depth) {
        xfer_say(reason, "rdma: %s: its completion queue of %u holds no more queue pairs",
                 rail->name, rail->plan.cq_depth);
        return false;
    }
    if ((e = r->vb->qp_create(rail->device, rail->cq, &caps, &pair->qp))) {
        xfer_say(reason, "rdma: %s: creating a queue pair: %s", rail->name, strerror(e));
        return false;
    }
    pair->rail = (uint8_t)rail_at;
    pair->recv_posted = shared ? 0 : rail->plan.recv_depth;
    rail->cq_used += need;
    pair->ring = calloc(rail->plan.send_depth, sizeof *pair->ring);
    if (!pair->ring) {
        xfer_say(reason, "rdma: out of memory");
        return false;
    }
    if ((e = r->vb->qp_init(pair->qp, r->config.port, 0,
                            TD_VB_REMOTE_WRITE | (r->config.pull ? TD_VB_REMOTE_READ : 0))) ||
        (!shared && (e = r->vb->post_recv(pair->qp, RECV_ID, rail->plan.recv_depth)))) {
        xfer_say(reason, "rdma: %s: setting up a queue pair: %s", rail->name, strerror(e));
        return false;
    }
    pair->recv_left = pair->recv_posted;
    return true;
}

/* The way to the peer's queue pair, as the next that the set's thread takes. */
static bool join_add(const struct xfer_rdma *r, struct joining *j, const struct queue_pair *pair,
                     const struct td_xfer_rdma_setup *mine, const struct td_xfer_rail *my_rail,
                     const struct td_xfer_rdma_setup *theirs, const struct td_xfer_rail *peer,
                     uint32_t k, char reason[TD_XFER_REASON_MAX])
{
    const struct rail *rail = &r->rail[pair->rail];
    const struct td_xfer_rdma_config *c = &r->config;
    struct td_vb_route *route = &j->at[j->n].route;
    struct td_rdma_side ours = {rail->port.ethernet, my_rail->mtu_bytes, mine->rd_atomic_in,
                                mine->rd_atomic_out};
    struct td_rdma_side other = {peer->ethernet, peer->mtu_bytes, theirs->rd_atomic_in,
                                 theirs->rd_atomic_out};
    struct td_err err;
    *route = xfer_rail_route(r, rail);
    route->remote_lid = peer->lid;
    route->traffic_class =
        td_rdma_traffic_class("", rail->name, c->port, c->traffic_class, rail->gid.type);
    route->remote_qp = peer->qpn[k];
    route->remote_psn = peer->psn[k];
    route->local_psn = my_rail->psn[k];
    memcpy(route->remote_gid, peer->gid, sizeof route->remote_gid);
    if (td_rdma_settle(&ours, &other, route, &err)) {
        xfer_say(reason, "rdma: rail %u: %.120s", my_rail->index, err.msg);
        return false;
    }
    j->at[j->n++].qp = pair->qp;
    return true;
}

static void *join_main(void *arg)
{
    struct joining *j = arg;
    for (; j->n_joined < j->n && !atomic_load(&j->unwanted); j->n_joined++) {
        j->error = j->vb->qp_rtr(j->at[j->n_joined].qp, &j->at[j->n_joined].route);
        td_fault_point("xfer_rtr");
        if (!j->error) j->error = j->vb->qp_rts(j->at[j->n_joined].qp, &j->at[j->n_joined].route);
        td_fault_point("xfer_rts");
        if (j->error) break;
    }
    struct td_xfer *x = j->x; /* after `over` j is the progress thread's */
    atomic_store(&j->over, true);
    xfer_ring(x);
    return NULL;
}

static struct joining *join_new(char reason[TD_XFER_REASON_MAX])
{
    struct joining *j = calloc(1, sizeof *j);
    if (!j) xfer_say(reason, "rdma: out of memory");
    return j;
}

/* Takes j (or NULL), whatever comes of it. fits: else it is not started, for the reason. */
static bool join_start(struct td_xfer *x, struct qp_set *set, struct joining *j, bool fits,
                       char reason[TD_XFER_REASON_MAX])
{
    int e = 0;
    if (fits) {
        j->vb = x->rdma->vb;
        j->x = x;
        /* with the progress thread's mask: no signals */
        e = pthread_create(&j->thread, NULL, join_main, j);
    }
    if (e) xfer_say(reason, "rdma: a thread to connect queue pairs: %s", strerror(e));
    if (!fits || e)
        free(j);
    else
        set->joining = j;
    return fits && !e;
}

/* This side's part of a setup for these rails; creates the queue pairs. */
static bool qp_set_describe(struct td_xfer *x, struct qp_set *set, const uint8_t *rails,
                            uint32_t n_rails, uint32_t n_qps, struct td_xfer_rdma_setup *s,
                            char reason[TD_XFER_REASON_MAX])
{
    struct xfer_rdma *r = x->rdma;
    uint8_t in = UINT8_MAX, out = UINT8_MAX;
    *s = (struct td_xfer_rdma_setup){.n_rails = (uint8_t)n_rails,
                                     .n_qps = (uint8_t)n_qps,
                                     .base = (uint64_t)(uintptr_t)x->pool.base,
                                     .region_bytes = r->region_bytes,
                                     .n_regions = r->n_regions,
                                     .probe =
                                         (uint64_t)(uintptr_t)xfer_rdma_cell(r, 0, set->index, 0),
                                     .recv_wr = UINT32_MAX};
    set->n_rails = n_rails;
    set->per_rail = n_qps;
    set->n_qps = n_rails * n_qps;
    for (uint32_t i = 0; i < n_rails; i++) {
        struct rail *rail = &r->rail[rails[i]];
        struct td_xfer_rail *to = &s->rail[i];
        struct td_vb_port port;
        pthread_mutex_unlock(&x->lock);
        int e = r->vb->query_port(rail->device, r->config.port, &port);
        pthread_mutex_lock(&x->lock);
        /* no event tells of another MTU */
        if (!e && port.active) rail->plan.mtu_bytes = port.mtu_bytes;
        *to = (struct td_xfer_rail){.lid = rail->port.lid,
                                    .ethernet = rail->port.ethernet,
                                    .index = rails[i],
                                    .mtu_bytes = rail->plan.mtu_bytes};
        memcpy(to->gid, rail->gid.raw, sizeof to->gid);
        s->probe_rkey[i] = rail->probe_mr->rkey;
        if (rail->plan.words < s->recv_wr) s->recv_wr = rail->plan.words;
        if (rail->plan.rd_atomic_in < in) in = rail->plan.rd_atomic_in;
        if (rail->plan.rd_atomic_out < out) out = rail->plan.rd_atomic_out;
        for (uint32_t k = 0; k < n_qps; k++) {
            struct queue_pair *pair = &set->qp[i * n_qps + k];
            pthread_mutex_unlock(&x->lock);
            bool opened = qp_open(r, pair, rails[i], reason);
            pthread_mutex_lock(&x->lock);
            if (!opened) return false;
            set->key_at[i * n_qps + k] = (uint8_t)i;
            to->qpn[k] = pair->qp->num;
            to->psn[k] = (uint32_t)xfer_random(x) & 0xffffff;
        }
    }
    s->rd_atomic_in = in;
    s->rd_atomic_out = out;
    return true;
}

static void qp_set_keys(const struct xfer_rdma *r, const uint8_t *rails,
                        struct td_xfer_rdma_setup *s)
{
    for (uint32_t g = 0; g < r->n_regions; g++)
        for (uint32_t i = 0; i < s->n_rails; i++)
            s->rkey[g * s->n_rails + i] = r->rail[rails[i]].mr[g]->rkey;
}

static void say_setup(struct td_xfer *x, struct td_xfer_conn *c, enum td_xfer_frame_type type,
                      const struct td_xfer_rdma_setup *s)
{
    uint32_t n = TD_XFER_RDMA_SETUP_BYTES + 4 * s->n_regions * s->n_rails;
    struct td_xfer_frame f = {.type = (uint8_t)type, .length = n};
    xfer_conn_queue(x, c, &f, s);
}

/* Queue pairs on each of these rails, if the peer wants as many. */
static uint32_t qps_wanted(const struct xfer_rdma *r, const uint8_t *rails, uint32_t n)
{
    uint32_t want = r->config.qps_per_rail;
    for (uint32_t i = 0; i < n && !r->config.qps_per_rail; i++)
        if (r->rail[rails[i]].plan.n_qps > want) want = r->rail[rails[i]].plan.n_qps;
    return want;
}

static bool rdma_open_conn(struct td_xfer *x, struct td_xfer_conn *c,
                           char reason[TD_XFER_REASON_MAX])
{
    struct xfer_rdma *r = x->rdma;
    uint8_t rails[TD_XFER_RAILS_MAX];
    uint32_t n = 0;
    uint64_t now = xfer_now(x);
    for (bool avoid = true;; avoid = false) {
        for (uint32_t i = 0; i < r->n_rails; i++)
            if (xfer_rail_is_usable(&r->rail[i]) && (!avoid || now >= r->rail[i].avoid_until_ns))
                rails[n++] = (uint8_t)i;
        if (n || !avoid) break; /* all have erred lately: any of them is better than none */
    }
    if (!n) {
        xfer_say(reason, "rdma: no device has an active port");
        return false;
    }
    uint32_t n_qps = qps_wanted(r, rails, n);
    while (n * n_qps > TD_XFER_QPS_MAX) n_qps--;
    struct qp_set *set = qp_set_new(r, c, reason);
    struct td_xfer_rdma_setup s;
    if (!set || !qp_set_describe(x, set, rails, n, n_qps, &s, reason)) return false;
    if (r->config.pull)
        qp_set_keys(r, rails, &s);
    else
        s.n_regions = 0;
    say_setup(x, c, TD_XFER_RDMA_OFFER, &s);
    memcpy(set->offer, &s, sizeof set->offer);
    return true;
}

/* What a peer's cell must hold: only who knows the connection's tag can say it. */
static void probe_bytes(uint64_t tag, uint32_t qp, uint8_t to[CELL])
{
    uint64_t v = tag ^ (qp + 1) * 0x9e3779b97f4a7c15ull;
    for (int i = 0; i < CELL; i += 8) {
        v = (v ^ v >> 29) * 0xbf58476d1ce4e5b9ull;
        memcpy(to + i, &v, 8);
    }
}

static void pending_over(struct td_xfer *x, const struct pending *p, bool ok)
{
    uint64_t now = xfer_now(x), n_bytes = ok ? p->n_bytes : 0;
    if (p->id == NO_ID) return;
    if (p->is_read)
        td_xfer_core_rd_done(&x->core, now, p->id, n_bytes, ok);
    else
        td_xfer_core_wr_done(&x->core, p->id, n_bytes, ok);
}

/* Gives n requests to a queue pair; the last is signalled. False: the set is broken. */
static bool qp_post(struct td_xfer *x, struct qp_set *set, uint32_t q, struct td_vb_send *wrs,
                    const struct pending *what, uint32_t n)
{
    struct xfer_rdma *r = x->rdma;
    struct queue_pair *pair = &set->qp[q];
    const struct rail *rail = &r->rail[pair->rail];
    uint32_t n_posted = 0;
    for (uint32_t i = 0; i < n; i++) {
        wrs[i].id =
            (uint64_t)set->index << 56 | (uint64_t)q << 48 | ((pair->head + i) & 0xffffffffffff);
        wrs[i].signaled = i + 1 == n;
        pair->ring[(pair->head + i) % rail->plan.send_depth] = what[i];
        pair->in_flight += what[i].n_bytes;
    }
    pair->head += n;
    r->n_wr += n;
    r->n_doorbells++;
    int e = r->vb->post_send(pair->qp, wrs, n, &n_posted);
    if (!e) return true;
    /* The rest was never the device's; what it took comes back flushed with the fence. */
    for (uint32_t i = n_posted; i < n; i++) {
        pair->head--;
        pair->in_flight -= what[i].n_bytes;
        pending_over(x, &what[i], false);
    }
    if (qp_set_breaks(set))
        xfer_say(set->end.reason, "rdma: %s: posting: %s", rail->name, strerror(e));
    xfer_rail_erred(x, pair->rail);
    return false;
}

static void probe(struct td_xfer *x, const struct td_xfer_conn *c, struct qp_set *set,
                  const struct td_xfer_rdma_setup *theirs)
{
    struct xfer_rdma *r = x->rdma;
    for (uint32_t q = 0; q < set->n_qps && !qp_set_is_over(set); q++) {
        struct td_vb_send wr[2] = {0};
        struct pending what[2] = {{.id = NO_ID}, {.id = NO_ID}};
        uint32_t n = 0;
        if (theirs) { /* the initiator's comes with bytes */
            uint8_t *from = xfer_rdma_cell(r, 1, set->index, q);
            probe_bytes(c->tag, q, from);
            wr[n].op = TD_VB_WRITE;
            wr[n].n_sge = 1;
            wr[n].sge[0] = (struct td_vb_sge){.addr = (uint64_t)(uintptr_t)from,
                                              .bytes = CELL,
                                              .lkey = r->rail[set->qp[q].rail].probe_mr->lkey};
            wr[n].remote_addr = theirs->probe + (uint64_t)q * CELL;
            wr[n++].rkey = theirs->probe_rkey[set->key_at[q]];
        }
        wr[n].op = TD_VB_WRITE_IMM;
        wr[n++].imm = td_xfer_imm(0, 0, 0, TD_XFER_IMM_PROBE);
        qp_post(x, set, q, wr, what, n);
        td_fault_point("xfer_probe");
    }
}

/* As many windows as the devices give, at least enough for any grant's wide ones. */
static bool windows_make(struct td_xfer *x, struct qp_set *set, char reason[TD_XFER_REASON_MAX])
{
    const struct xfer_rdma *r = x->rdma;
    uint32_t n = 0;
    int e = 0;
    pthread_mutex_unlock(&x->lock);
    for (; n < WINDOWS && !e; n += !e)
        for (uint32_t q = 0; q < set->n_qps && !e; q++)
            e = r->vb->mw.alloc(r->rail[set->qp[q].rail].device, &set->qp[q].mw[n]);
    pthread_mutex_lock(&x->lock);
    if (n < r->n_regions) {
        xfer_say(reason,
                 "rdma: %u memory windows for each of %u queue pairs, and the pool has %u "
                 "registrations: %s",
                 n, set->n_qps, r->n_regions, e ? strerror(e) : "too large a pool");
        return false;
    }
    for (uint32_t k = n; k-- > 0;) set->free_window[set->n_free++] = k;
    set->windows = true;
    return true;
}

/* The peer's set-up breaks the protocol: counted. False. */
static bool bad_setup(struct td_xfer *x, char reason[TD_XFER_REASON_MAX], const char *why)
{
    x->told.n_bad_frames++;
    xfer_say(reason, "%.150s", why);
    return false;
}

/* Where the peer's blocks are, and their keys. */
static void take_keys(struct qp_set *set, const struct td_xfer_rdma_setup *theirs)
{
    set->base = theirs->base;
    set->region_bytes = theirs->region_bytes;
    set->n_regions = theirs->n_regions;
    set->n_keys = theirs->n_rails;
    memcpy(set->rkey, theirs->rkey, sizeof set->rkey);
}

/* The acceptor's queue pairs, on rails[], which are the offer's from[], and their thread. */
static td_status accept_offer(struct td_xfer *x, struct qp_set *set,
                              const struct td_xfer_rdma_setup *theirs, const uint8_t *rails,
                              const uint8_t *from, uint32_t n, char reason[TD_XFER_REASON_MAX])
{
    struct xfer_rdma *r = x->rdma;
    struct td_xfer_rdma_setup mine;
    uint32_t n_qps = qps_wanted(r, rails, n);
    if (theirs->n_qps < n_qps) n_qps = theirs->n_qps;
    if (!qp_set_describe(x, set, rails, n, n_qps, &mine, reason) ||
        (r->config.windows && !windows_make(x, set, reason)))
        return TD_ERR_UNSUPPORTED;
    mine.windows = set->windows;
    for (uint32_t i = 0; i < r->n_rails; i++)
        if (!r->rail[i].refused) mine.rails |= (uint16_t)(1u << i);
    if (!set->windows) qp_set_keys(r, rails, &mine);
    if (theirs->n_regions && theirs->region_bytes % x->pool.block_bytes == 0) { /* we may READ */
        take_keys(set, theirs);
        for (uint32_t q = 0; q < set->n_qps; q++) set->key_at[q] = from[q / n_qps];
    }
    struct joining *j = join_new(reason);
    bool fits = j != NULL;
    for (uint32_t q = 0; q < set->n_qps && fits; q++)
        fits = join_add(r, j, &set->qp[q], &mine, &mine.rail[q / n_qps], theirs,
                        &theirs->rail[from[q / n_qps]], q % n_qps, reason);
    if (fits) j->setup = mine;
    return join_start(x, set, j, fits, reason) ? TD_OK : TD_ERR_UNSUPPORTED;
}

static td_status on_offer(struct td_xfer *x, struct td_xfer_conn *c,
                          char reason[TD_XFER_REASON_MAX])
{
    struct xfer_rdma *r = x->rdma;
    struct td_xfer_rdma_setup theirs;
    struct td_err err;
    uint8_t rails[TD_XFER_RAILS_MAX], from[TD_XFER_RAILS_MAX];
    uint32_t n = 0;
    if (xfer_qp_set_of(c)) {
        xfer_say(reason, "rdma setup: a second offer");
        return TD_ERR_UNSUPPORTED;
    }
    if (td_xfer_rdma_setup_decode(c->rx.payload, c->rx.frame.length, false, &theirs, &err))
        return bad_setup(x, reason, err.msg), TD_ERR_UNSUPPORTED;
    for (uint32_t i = 0; i < theirs.n_rails; i++) {
        uint32_t at = theirs.rail[i].index;
        if (at >= r->n_rails || !xfer_rail_is_usable(&r->rail[at])) continue;
        from[n] = (uint8_t)i;
        rails[n++] = (uint8_t)at;
    }
    if (!n) {
        xfer_say(reason, "rdma: none of the %u offered rails has an active device here",
                 theirs.n_rails);
        return TD_ERR_PEER; /* other rails, or a later time, may do */
    }
    struct qp_set *set = qp_set_new(r, c, reason);
    return set ? accept_offer(x, set, &theirs, rails, from, n, reason) : TD_ERR_UNSUPPORTED;
}

/* Both sides number the queue pairs of the rails that both have, in the offer's order. Ours that
 * found no partner go. False: they cannot be connected so. */
static bool match_rails(struct td_xfer *x, struct qp_set *set,
                        const struct td_xfer_rdma_setup *offer,
                        const struct td_xfer_rdma_setup *theirs, struct joining *j,
                        char reason[TD_XFER_REASON_MAX])
{
    struct queue_pair had[TD_XFER_QPS_MAX];
    uint32_t n = 0;
    bool fits = true;
    memcpy(had, set->qp, sizeof had);
    memset(set->qp, 0, sizeof set->qp);
    for (uint32_t i = 0, at = 0; i < offer->n_rails; i++) {
        bool taken = at < theirs->n_rails && theirs->rail[at].index == offer->rail[i].index;
        for (uint32_t k = 0; k < offer->n_qps; k++) {
            struct queue_pair *pair = &had[i * offer->n_qps + k];
            if (!taken || k >= theirs->n_qps) {
                /* RESET or INIT: nothing was sent, and its receives die with it */
                pthread_mutex_unlock(&x->lock);
                pair_free(x->rdma, pair);
                pthread_mutex_lock(&x->lock);
                continue;
            }
            set->qp[n] = *pair;
            set->key_at[n++] = (uint8_t)at;
            fits = fits && join_add(x->rdma, j, pair, offer, &offer->rail[i], theirs,
                                    &theirs->rail[at], k, reason);
        }
        at += taken;
    }
    set->n_qps = n;
    set->n_rails = theirs->n_rails;
    set->per_rail = theirs->n_qps;
    if (fits && n != (uint32_t)theirs->n_rails * theirs->n_qps)
        return bad_setup(x, reason, "rdma setup: rails were accepted that were not offered");
    return fits;
}

static bool on_accept(struct td_xfer *x, struct td_xfer_conn *c, char reason[TD_XFER_REASON_MAX])
{
    struct xfer_rdma *r = x->rdma;
    struct qp_set *set = xfer_qp_set_of(c);
    struct td_xfer_rdma_setup theirs, offer = {0};
    struct td_err err;
    memcpy(&offer, set->offer, sizeof set->offer);
    if (set->n_keys) return bad_setup(x, reason, "rdma setup: a second answer");
    if (td_xfer_rdma_setup_decode(c->rx.payload, c->rx.frame.length, true, &theirs, &err))
        return bad_setup(x, reason, err.msg);
    if (theirs.region_bytes % x->pool.block_bytes ||
        theirs.region_bytes / x->pool.block_bytes > INT32_MAX || theirs.n_qps > offer.n_qps) {
        x->told.n_bad_frames++;
        xfer_say(reason,
                 "rdma setup: regions of %" PRIu64
                 " bytes or %u queue pairs are not what was offered",
                 theirs.region_bytes, theirs.n_qps);
        return false;
    }
    struct joining *j = join_new(reason);
    if (!j) return false;
    bool fits = match_rails(x, set, &offer, &theirs, j, reason);
    if (fits) {
        set->windows = theirs.windows;
        set->more.peer_rails = theirs.rails;
        set->more.n_ups = r->n_ups;
        set->more.at_ns = xfer_now(x) + REOPEN_NS;
        set->may_pull = r->config.pull && theirs.rd_atomic_out && offer.rd_atomic_in;
        set->peer_recv_wr = theirs.recv_wr;
        take_keys(set, &theirs);
        j->setup = theirs;
    }
    return join_start(x, set, j, fits, reason);
}

static bool rdma_may_pull(const struct td_xfer_conn *c) { return xfer_qp_set_of(c)->may_pull; }

static int32_t rdma_n_source_blocks(const struct td_xfer *x, const struct td_xfer_conn *c)
{
    const struct qp_set *set = xfer_qp_set_of(c);
    uint64_t n = set ? set->region_bytes / x->pool.block_bytes * set->n_regions : 0;
    return (int32_t)td_min_u64(n, INT32_MAX);
}

/* Takes the completions of every rail; true when there were any. Sets that broke are marked. */
static bool take_completions(struct td_xfer *x);

/* Until a completion comes, or a while; callers of the engine get the lock meanwhile. */
static void wait_completion(struct td_xfer *x)
{
    struct xfer_rdma *r = x->rdma;
    struct pollfd fds[TD_XFER_RAILS_MAX];
    for (uint32_t i = 0; i < r->n_rails; i++) {
        fds[i] =
            (struct pollfd){.fd = xfer_rail_tells(&r->rail[i]) ? r->vb->cq_fd(r->rail[i].cq) : -1,
                            .events = POLLIN};
        if (!xfer_rail_tells(&r->rail[i])) continue;
        r->vb->cq_clear(r->rail[i].cq);
        (void)r->vb->cq_arm(r->rail[i].cq); /* polled again in 1 ms anyway */
    }
    if (take_completions(x)) return;
    pthread_mutex_unlock(&x->lock);
    poll(fds, r->n_rails, 1);
    pthread_mutex_lock(&x->lock);
}

/* Its own request is at fault: that one ends, before the core hears of the connection's loss. */
static void blame(struct td_xfer *x, struct qp_set *set)
{
    const struct td_xfer_conn *c = xfer_conn_by_id(x, set->conn);
    char text[TD_XFER_REASON_MAX];
    if (set->end.fault.id == NO_ID) return;
    xfer_say(text, "peer %.40s (rdma): %.110s", c ? c->peer.instance : "", set->end.reason);
    if (set->end.fault.is_read)
        td_xfer_core_slot_give_up(&x->core, set->end.fault.id, TD_ERR_PEER, text);
    else
        td_xfer_core_op_give_up(&x->core, set->end.fault.id, TD_ERR_PEER, text);
    set->end.fault.id = NO_ID;
}

/* Kills a set: after it nothing of it reads or lands. Drops the lock. */
static void qp_set_close(struct td_xfer *x, struct qp_set *set)
{
    struct xfer_rdma *r = x->rdma;
    uint64_t conn = set->conn;
    pthread_mutex_unlock(&x->lock);
    for (uint32_t q = 0; q < TD_XFER_QPS_MAX; q++)
        if (set->qp[q].qp) r->vb->qp_error(set->qp[q].qp);
    td_fault_point("xfer_fencing");
    pthread_mutex_lock(&x->lock);
    /* Every request and receive comes back, but from a dead device: destroying must do. */
    uint64_t until = td_now_ns() + FENCE_NS;
    for (bool left = true; left && td_now_ns() < until;) {
        left = false;
        for (uint32_t q = 0; q < TD_XFER_QPS_MAX; q++) {
            const struct queue_pair *pair = &set->qp[q];
            if (pair->qp && !r->rail[pair->rail].dead &&
                (pair->flushed < pair->head || pair->recv_left))
                left = true;
        }
        if (left && !take_completions(x)) wait_completion(x);
    }
    blame(x, set); /* the completion that says why may have come after the peer's word */
    for (uint32_t q = 0; q < TD_XFER_QPS_MAX; q++) {
        struct queue_pair *pair = &set->qp[q];
        for (; pair->qp && pair->tail < pair->head; pair->tail++) {
            pending_over(x, &pair->ring[pair->tail % r->rail[pair->rail].plan.send_depth], false);
        }
    }
    for (uint32_t i = 0; r->grant && i < x->core.max_slots; i++)
        if (r->grant[i].set == set) r->grant[i] = (struct grant_windows){0};
    for (uint32_t i = 0; i < x->core.max_ops; i++)
        if (x->op_aux[i].conn_id == conn) x->op_aux[i].words = 0;
    qp_set_free(x, set);
    td_xfer_core_conn_fenced(&x->core, conn, xfer_now(x) + r->quarantine_ns);
}

static void rdma_fence(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct qp_set *set = xfer_qp_set_of(c);
    if (!set) return;
    c->state = XFER_CONN_ENDING; /* for callers, while the lock is dropped */
    qp_set_goes(set, QP_SET_FENCED);
    *(struct xfer_rdma_conn *)c->own = (struct xfer_rdma_conn){0};
    /* still in SETUP: no slot or op was on it; xfer_rdma_poll ends it */
    if (set->joining)
        atomic_store(&set->joining->unwanted, true);
    else
        qp_set_close(x, set);
}

/* The set's thread is over: the set-up goes on, unless its connection has ended meanwhile. */
static void joined(struct td_xfer *x, struct qp_set *set)
{
    struct joining *j = set->joining;
    struct td_xfer_conn *c = xfer_conn_by_id(x, set->conn);
    pthread_join(j->thread, NULL);
    set->joining = NULL;
    if (set->end.state == QP_SET_FENCED) {
        qp_set_close(x, set);
    } else if (j->error) {
        const struct rail *rail = &x->rdma->rail[set->qp[j->n_joined].rail];
        char reason[TD_XFER_REASON_MAX];
        xfer_say(
            reason,
            "rdma: %s GID %u: connecting a queue pair: %s (a GID without a route to the peer's?)",
            rail->name, rail->gid.index, strerror(j->error));
        if (c->initiator)
            xfer_conn_close(x, c, TD_ERR_PEER, reason, false);
        else
            xfer_path_refuse_offer(x, c, TD_XFER_RDMA_ACCEPT, TD_ERR_UNSUPPORTED, reason);
    } else if (c->initiator) {
        probe(x, c, set, &j->setup);
    } else {
        say_setup(x, c, TD_XFER_RDMA_ACCEPT, &j->setup);
    }
    free(j);
}

/* Ends a set that broke. The connection is gone after it. */
static void close_broken(struct td_xfer *x, struct qp_set *set)
{
    struct td_xfer_conn *c = xfer_conn_by_id(x, set->conn);
    char reason[TD_XFER_REASON_MAX], byte;
    TD_ASSERT(c && xfer_qp_set_of(c) == set);
    memcpy(reason, set->end.reason, sizeof reason);
    /* requests to a dead peer fail, too, and that may be seen first */
    if (recv(c->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0) c->is_cut = true;
    blame(x, set); /* here, so that ABORT goes out yet */
    xfer_conn_close(x, c, TD_ERR_PEER, reason, set->end.verdict != VERDICT_NEVER);
}

/* --- memory windows --------------------------------------------------------------------------- */

static int32_t region_blocks(const struct td_xfer *x)
{
    return (int32_t)(x->rdma->region_bytes / x->pool.block_bytes);
}

/* Chooses the slot's windows. False: not enough of them are free now. */
static bool windows_choose(struct td_xfer *x, struct qp_set *set, const struct td_xfer_slot *s,
                           struct grant_windows *g)
{
    int32_t region = region_blocks(x);
    uint32_t most = (set->n_free + 1) / 2;
    g->n = 0;
    for (int32_t at = 0; at < s->n_blocks && g->n <= most;
         at += td_xfer_run_length(s->dst, s->n_blocks, at, region))
        if (g->n++ < most) {
            g->at[g->n - 1].block = s->dst[at];
            g->at[g->n - 1].n_blocks = td_xfer_run_length(s->dst, s->n_blocks, at, region);
        }
    bool wide = g->n > most;
    if (wide) { /* one in each registration, around all blocks there */
        g->n = 0;
        for (int32_t i = 0; i < s->n_blocks; i++) {
            uint32_t k = 0;
            while (k < g->n && g->at[k].block / region != s->dst[i] / region) k++;
            if (k == set->n_free) return false;
            int32_t end = k < g->n && g->at[k].block + g->at[k].n_blocks > s->dst[i]
                              ? g->at[k].block + g->at[k].n_blocks
                              : s->dst[i] + 1;
            if (k == g->n || s->dst[i] < g->at[k].block) g->at[k].block = s->dst[i];
            if (k == g->n) g->n++;
            g->at[k].n_blocks = end - g->at[k].block;
        }
    }
    for (uint32_t i = 0; i < g->n; i++) g->at[i].window = set->free_window[--set->n_free];
    x->rdma->n_wide += wide;
    x->rdma->n_windows += g->n;
    return true;
}

/* Posts what this state still owes on one queue pair. True: all of it has completed. */
static bool windows_post(struct td_xfer *x, struct grant_windows *g, uint32_t q)
{
    struct xfer_rdma *r = x->rdma;
    struct qp_set *set = g->set;
    struct queue_pair *pair = &set->qp[q];
    const struct rail *rail = &r->rail[pair->rail];
    uint32_t want = g->state == WINDOWS_BINDING ? g->n : g->qp[q].n_bound;
    while (g->qp[q].n_posted < want && !qp_set_is_over(set)) {
        struct td_vb_send wrs[CHAIN] = {0};
        struct pending what[CHAIN];
        uint32_t n = 0, room = rail->plan.send_depth - (uint32_t)(pair->head - pair->tail);
        for (; n < CHAIN && n < room && g->qp[q].n_posted < want; n++) {
            uint32_t i = g->qp[q].n_posted++;
            struct td_vb_mw *mw = pair->mw[g->at[i].window];
            uint64_t at = (uint64_t)g->at[i].block * x->pool.block_bytes;
            if (g->state == WINDOWS_BINDING) {
                wrs[n].op = TD_VB_BIND_MW;
                wrs[n].mw = mw;
                wrs[n].bind_mr = rail->mr[at / r->region_bytes];
                wrs[n].bind_addr = (uint64_t)(uintptr_t)x->pool.base + at;
                wrs[n].bind_bytes = (uint64_t)g->at[i].n_blocks * x->pool.block_bytes;
                g->qp[q].n_bound++;
            } else {
                wrs[n].op = TD_VB_LOCAL_INV;
                wrs[n].rkey = mw->rkey;
            }
            what[n] = (struct pending){.id = NO_ID};
        }
        /* full: completions make room; broken: the fence ends it */
        if (!n || !qp_post(x, set, q, wrs, what, n)) return false;
        g->qp[q].until = pair->head;
    }
    return pair->tail >= g->qp[q].until && g->qp[q].n_posted == want;
}

/* One step of a slot's windows; true when there may be another. */
static bool windows_step(struct td_xfer *x, uint32_t id)
{
    struct grant_windows *g = &x->rdma->grant[id];
    const struct td_xfer_slot *s = &x->core.slots[id];
    if (g->state == WINDOWS_NONE) {
        if (s->state != TD_SLOT_FILLING || s->way != TD_XFER_BY_NIC || !s->n_blocks ||
            s->nic.n_targets)
            return false;
        struct td_xfer_conn *c = xfer_conn_by_id(x, s->conn);
        struct qp_set *set = c ? xfer_qp_set_of(c) : NULL;
        if (!set || set->end.state != QP_SET_STANDS || !windows_choose(x, set, s, g)) return false;
        g->set = set;
        g->state = WINDOWS_BINDING;
        td_xfer_core_windows_open(&x->core, id);
    }
    if (qp_set_is_over(g->set)) return false;
    if (g->state != WINDOWS_ENDING && td_xfer_core_windows_due(&x->core, xfer_now(x), id)) {
        g->state = WINDOWS_ENDING; /* binds that are under way come first in the queue */
        for (uint32_t q = 0; q < g->set->n_qps; q++) g->qp[q].n_posted = 0;
    }
    if (g->state == WINDOWS_OPEN) return false;
    bool over = true;
    for (uint32_t q = 0; q < g->set->n_qps; q++)
        if (!windows_post(x, g, q)) over = false;
    if (!over || qp_set_is_over(g->set)) return qp_set_is_over(g->set);
    if (g->state == WINDOWS_BINDING) {
        struct td_xfer_conn *c = xfer_conn_by_id(x, g->set->conn);
        g->state = WINDOWS_OPEN;
        if (c) c->tx.ready = true; /* TARGETS are due */
        return false;
    }
    for (uint32_t i = 0; i < g->n; i++) g->set->free_window[g->set->n_free++] = g->at[i].window;
    *g = (struct grant_windows){0};
    td_xfer_core_windows_ended(&x->core, id);
    return true; /* another slot may have waited for them */
}

/* Opens and ends what is due; may close connections. */
static void windows_work(struct td_xfer *x)
{
    bool again = x->rdma->grant != NULL;
    while (again) {
        again = false;
        for (uint32_t i = 0; i < x->core.max_slots; i++)
            if (windows_step(x, i)) again = true;
        EACH_QP_SET (x->rdma, set)
            if (set->end.state == QP_SET_BROKEN) close_broken(x, set);
    }
}

/* The next TARGETS of this connection. */
static bool rdma_answer(struct td_xfer *x, struct td_xfer_conn *c, struct td_xfer_tx *tx)
{
    const struct qp_set *set = xfer_qp_set_of(c);
    uint32_t *cursor = &c->tx.turns.next;
    for (uint32_t k = 0; k < x->core.max_slots && set; k++) {
        uint32_t id = (*cursor + k) % x->core.max_slots;
        const struct grant_windows *g = set->windows ? &x->rdma->grant[id] : NULL;
        struct td_xfer_run runs[TD_XFER_RUNS_MAX];
        int32_t max_runs = (int32_t)(TD_XFER_PAYLOAD_MAX / TD_XFER_RUN_BYTES(g ? set->n_qps : 0));
        if (g ? g->state != WINDOWS_OPEN || g->set != set : x->core.slots[id].conn != c->id)
            continue;
        if (!td_xfer_core_targets_of(&x->core, id, max_runs, g ? region_blocks(x) : 0, tx))
            continue;
        *cursor = (id + 1) % x->core.max_slots;
        if (!g) return true;
        uint32_t n = tx->frame.length / (uint32_t)sizeof runs[0];
        uint8_t *to = tx->payload;
        memcpy(runs, tx->payload, tx->frame.length);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t w = 0;
            /* one of them covers it */
            while (runs[i].block < g->at[w].block ||
                   runs[i].block - g->at[w].block >= g->at[w].n_blocks)
                w++;
            memcpy(to, &runs[i], sizeof runs[i]);
            to += sizeof runs[i];
            for (uint32_t q = 0; q < set->n_qps; q++, to += 4)
                memcpy(to, &set->qp[q].mw[g->at[w].window]->rkey, 4);
        }
        tx->frame.length = (uint32_t)(to - tx->payload);
        return true;
    }
    return false;
}

/* CORRUPT, NOMEM: close it. */
static td_status on_targets(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct qp_set *set = xfer_qp_set_of(c);
    const struct td_xfer_frame *f = &c->rx.frame;
    struct td_xfer_run runs[TD_XFER_RUNS_MAX];
    uint32_t keys[TD_XFER_PAYLOAD_MAX / 4], n_keys = set->windows ? set->n_qps : 0;
    int32_t n = 0;
    if (td_xfer_targets_decode(c->rx.payload, f->length, n_keys, runs, keys, &n))
        return TD_ERR_CORRUPT;
    int32_t before = f->op < x->core.max_ops ? x->core.ops[f->op].nic.n_runs : 0;
    td_status status = td_xfer_core_rx_targets(&x->core, c->conn_id, f, runs, n,
                                               rdma_n_source_blocks(x, c), set->windows);
    if (status || !set->windows) return status;
    uint32_t **to = &x->rdma->op_keys[f->op]; /* no more runs than blocks */
    if (!*to) *to = calloc((size_t)TD_XFER_MAX_BLOCKS * TD_XFER_QPS_MAX, 4);
    if (!*to) return TD_ERR_NOMEM;
    memcpy(*to + (size_t)before * n_keys, keys, (size_t)n * n_keys * 4);
    return TD_OK;
}

/* --- sending ---------------------------------------------------------------------------------- */

/* A request for n_bytes of n blocks, which lie at the pool blocks ids[order[i]] here, from `offset`
 * in each on, and side by side at remote_at from the peer's block 0. Neighbours are one piece. */
static void fill_request(const struct td_xfer *x, const struct qp_set *set, uint32_t q,
                         enum td_vb_op op, const int32_t *ids, const int32_t *order, int32_t n,
                         uint64_t offset, uint64_t n_bytes, uint64_t remote_at,
                         struct td_vb_send *to)
{
    const struct xfer_rdma *r = x->rdma;
    const struct rail *rail = &r->rail[set->qp[q].rail];
    to->op = op;
    to->imm = 0;
    to->n_sge = 0;
    to->fence = false;
    for (int32_t i = 0; i < n; i++) {
        uint64_t at = (uint64_t)ids[order[i]] * x->pool.block_bytes + offset,
                 addr = (uint64_t)(uintptr_t)x->pool.base + at, room = x->pool.block_bytes - offset;
        uint32_t bytes = (uint32_t)td_min_u64(room, n_bytes),
                 lkey = rail->mr[at / r->region_bytes]->lkey;
        struct td_vb_sge *last = to->n_sge ? &to->sge[to->n_sge - 1] : NULL;
        if (last && last->addr + last->bytes == addr && last->lkey == lkey)
            last->bytes += bytes;
        else
            to->sge[to->n_sge++] = (struct td_vb_sge){.addr = addr, .bytes = bytes, .lkey = lkey};
        n_bytes -= bytes;
    }
    to->remote_addr = set->base + remote_at;
    to->rkey = set->rkey[remote_at / set->region_bytes * set->n_keys + set->key_at[q]];
}

static void fill_write(const struct td_xfer *x, const struct qp_set *set, uint32_t q,
                       const struct td_xfer_wr *wr, struct td_vb_send *to)
{
    const struct td_xfer_op *op = &x->core.ops[wr->op];
    fill_request(x, set, q, TD_VB_WRITE, op->src, op->order + wr->order_at, wr->n_blocks,
                 wr->offset, wr->n_bytes,
                 (uint64_t)wr->dst_block * x->pool.block_bytes + wr->offset, to);
    if (set->windows) to->rkey = x->rdma->op_keys[wr->op][(uint32_t)wr->run * set->n_qps + q];
}

static void fill_read(const struct td_xfer *x, const struct qp_set *set, uint32_t q,
                      const struct td_xfer_rd *rd, struct td_vb_send *to)
{
    const struct td_xfer_slot *s = &x->core.slots[rd->slot];
    fill_request(x, set, q, TD_VB_READ, s->dst, s->fetch.order + rd->order_at, rd->n_blocks,
                 rd->offset, rd->n_bytes,
                 (uint64_t)rd->src_block * x->pool.block_bytes + rd->offset, to);
}

/* One chain for one queue pair. False: there is nothing (more) for it. */
static bool post_chain(struct td_xfer *x, struct qp_set *set, uint32_t q)
{
    struct xfer_rdma *r = x->rdma;
    struct queue_pair *pair = &set->qp[q];
    const struct rail *rail = &r->rail[pair->rail];
    struct td_vb_send wrs[CHAIN];
    struct pending what[CHAIN];
    const struct td_xfer_conn *c = xfer_conn_by_id(x, set->conn);
    int32_t ours = region_blocks(x), theirs = (int32_t)(set->region_bytes / x->pool.block_bytes);
    struct td_xfer_wr_limits limits = {.max_bytes = WR_BYTES,
                                       .max_pieces = (int32_t)rail->plan.n_sge,
                                       .src_region = c->initiator ? ours : theirs,
                                       .dst_region = c->initiator ? theirs : ours};
    uint32_t n = 0, room = rail->plan.send_depth - (uint32_t)(pair->head - pair->tail);
    uint64_t bytes = pair->in_flight,
             end = td_min_u64(bytes + CHAIN_BYTES, r->config.bytes_in_flight);
    while (n < CHAIN && n < room && bytes < end && set->n_keys) {
        struct td_xfer_wr wr;
        uint32_t no_words = 0;
        for (uint32_t k = 0; k < set->n_qps; k++)
            if (set->qp[k].words >= set->peer_recv_wr) no_words |= 1u << k;
        if (!td_xfer_core_wr_next(&x->core, set->conn, q, no_words, &set->op_turns, &limits, &wr))
            break;
        if (wr.is_imm) {
            fill_request(x, set, q, TD_VB_WRITE_IMM, NULL, NULL, 0, 0, 0, 0, &wrs[n]);
            wrs[n].imm = wr.imm;
            uint32_t *words = &x->op_aux[wr.op].words;
            /* all of them with the first */
            for (uint32_t k = 0; k < set->n_qps && !*words; k++)
                set->qp[k].words += x->core.ops[wr.op].nic.qps_used >> k & 1;
            *words = x->core.ops[wr.op].nic.qps_used;
        } else {
            fill_write(x, set, q, &wr, &wrs[n]);
        }
        what[n++] = (struct pending){.id = wr.op, .n_bytes = (uint32_t)wr.n_bytes};
        bytes += wr.n_bytes;
    }
    while (n < CHAIN && n < room && bytes < end && set->n_keys) {
        /* the other direction: what peers let this side READ */
        struct td_xfer_rd rd;
        if (!td_xfer_core_rd_next(&x->core, set->conn, &set->slot_turns, &limits, &rd)) break;
        fill_read(x, set, q, &rd, &wrs[n]);
        what[n++] =
            (struct pending){.id = rd.slot, .n_bytes = (uint32_t)rd.n_bytes, .is_read = true};
        bytes += rd.n_bytes;
    }
    return n && qp_post(x, set, q, wrs, what, n);
}

static void rdma_post(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct qp_set *set = xfer_qp_set_of(c);
    uint32_t idle = 0;
    while (idle < set->n_qps && set->end.state == QP_SET_STANDS) {
        if (post_chain(x, set, qp_of_turn(set, set->next_turn)))
            idle = 0;
        else
            idle++;
        set->next_turn = (set->next_turn + 1) % set->n_qps;
    }
    if (set->end.state == QP_SET_BROKEN) close_broken(x, set);
}

/* Its handle is withdrawn: its last words are taken. */
static void rdma_op_handle(struct td_xfer *x, uint32_t op, uint64_t handle)
{
    if (handle || !x->op_aux[op].words) return;
    struct td_xfer_conn *c = xfer_conn_by_id(x, x->op_aux[op].conn_id);
    struct qp_set *set = c ? xfer_qp_set_of(c) : NULL;
    for (uint32_t q = 0; set && q < set->n_qps; q++)
        if (x->op_aux[op].words & 1u << q) set->qp[q].words--;
    if (c) c->tx.ready = true;
    x->op_aux[op].words = 0;
}

/* --- completions ------------------------------------------------------------------------------ */

static void on_probed(struct td_xfer *x, struct qp_set *set, uint32_t q)
{
    struct td_xfer_conn *c = xfer_conn_by_id(x, set->conn);
    uint8_t want[CELL];
    if (!c || c->state != XFER_CONN_SETUP || set->qp[q].probed) {
        x->core.stats.n_stale_frames++;
        return;
    }
    if (!c->initiator) {
        probe_bytes(c->tag, q, want);
        if (memcmp(want, xfer_rdma_cell(x->rdma, 0, set->index, q), CELL) != 0) {
            xfer_say(set->end.reason,
                     "rdma: the probe on queue pair %u brought other bytes than the peer sent", q);
            set->end.verdict = VERDICT_NEVER;
            qp_set_goes(set, QP_SET_BROKEN);
            return;
        }
    }
    set->qp[q].probed = true;
    for (uint32_t i = 0; i < set->n_qps; i++)
        if (!set->qp[i].probed) return;
    if (!c->initiator) probe(x, c, set, NULL);
    if (!qp_set_is_over(set)) xfer_path_ready(x, c);
}

static bool is_retryable(enum td_vb_wc_status status)
{
    return status == TD_VB_WC_RETRY_EXC || status == TD_VB_WC_RNR_RETRY_EXC ||
           status == TD_VB_WC_WR_FLUSH || status == TD_VB_WC_FATAL ||
           status == TD_VB_WC_RESP_TIMEOUT || status == TD_VB_WC_GENERAL ||
           status == TD_VB_WC_REM_ABORT;
}

/* The number of a completed request; false: it is none of ours that is pending. */
static bool seq_of(const struct queue_pair *pair, const struct td_vb_wc *wc, uint64_t *ret_seq)
{
    *ret_seq = (pair->head & ~UINT64_C(0xffffffffffff)) | (wc->id & 0xffffffffffff);
    return *ret_seq < pair->head && *ret_seq >= pair->tail;
}

/* A write for an op that has ended met a window that the receiver has ended: nobody's bug. */
static bool is_late(const struct td_xfer *x, const struct qp_set *set, const struct pending *p,
                    const struct td_vb_wc *wc)
{
    return wc->status == TD_VB_WC_REM_ACCESS && set->windows && p->id != NO_ID && !p->is_read &&
           x->core.ops[p->id].state == TD_OP_STOPPING;
}

static void on_sent(struct td_xfer *x, struct qp_set *set, uint32_t q, const struct td_vb_wc *wc)
{
    struct queue_pair *pair = &set->qp[q];
    uint64_t seq;
    if (!seq_of(pair, wc, &seq)) return; /* a device repeats itself */
    pair->flushed = seq + 1 > pair->flushed ? seq + 1 : pair->flushed;
    if (wc->status != TD_VB_WC_SUCCESS) return; /* the fence ends what is pending */
    for (; pair->tail <= seq; pair->tail++) {
        const struct pending *p =
            &pair->ring[pair->tail % x->rdma->rail[pair->rail].plan.send_depth];
        pair->in_flight -= p->n_bytes;
        pending_over(x, p, true);
    }
    struct td_xfer_conn *c = xfer_conn_by_id(x, set->conn);
    if (c) c->tx.ready = true;
}

static void on_word(struct td_xfer *x, struct qp_set *set, uint32_t q, uint32_t imm)
{
    struct queue_pair *pair = &set->qp[q];
    const struct rail *rail = &x->rdma->rail[pair->rail];
    if (pair->recv_posted && ++pair->recv_spent >= (pair->recv_posted + 1) / 2 &&
        set->end.state != QP_SET_FENCED) {
        /* before the words count: the writer's credit is this room */
        int e = x->rdma->vb->post_recv(pair->qp, RECV_ID, pair->recv_spent);
        if (e) {
            if (qp_set_breaks(set))
                xfer_say(set->end.reason, "rdma: %s: posting receives: %s", rail->name,
                         strerror(e));
        } else {
            pair->recv_left += pair->recv_spent;
        }
        pair->recv_spent = 0;
    }
    if (set->end.state == QP_SET_FENCED) return;
    struct td_xfer_conn *c = xfer_conn_by_id(x, set->conn);
    if (c) c->last_use_ns = xfer_now(x);
    if ((imm & 0xf) == TD_XFER_IMM_PROBE)
        on_probed(x, set, q);
    else if ((imm & 0xf) == TD_XFER_IMM_FINAL)
        td_xfer_core_rx_imm(&x->core, xfer_now(x), set->conn, q, imm);
    else
        x->core.stats.n_stale_frames++;
}

/* The initiator learns which rail was at fault: it is avoided for a while. */
static const char *rdma_late(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct qp_set *set = c->initiator ? xfer_qp_set_of(c) : NULL;
    uint32_t told = 0;
    /* without our probe through; then without an answer */
    for (int way = 0; way < 2 && !told; way++)
        for (uint32_t q = 0; set && q < set->n_qps; q++) {
            const struct queue_pair *pair = &set->qp[q];
            if (!pair->qp || pair->probed || told & 1u << pair->rail ||
                (way == 0 && pair->tail == pair->head))
                continue;
            xfer_rail_erred(x, pair->rail);
            told |= 1u << pair->rail;
        }
    return "rdma: no answer over the queue pairs: no route between the devices, or a wrong GID";
}

/* The set and the index of a completion's queue pair; NULL: it is gone. */
static struct qp_set *find_qp(struct xfer_rdma *r, uint32_t rail, uint32_t qp_num, uint32_t *ret_q)
{
    EACH_QP_SET (r, set)
        for (uint32_t q = 0; q < TD_XFER_QPS_MAX; q++) {
            if (!set->qp[q].qp || set->qp[q].rail != rail || set->qp[q].qp->num != qp_num) continue;
            *ret_q = q;
            return set;
        }
    return NULL;
}

/* Its queue pairs have failed, and why is not known here. The side whose request it was knows: when
 * it comes first, the op at fault ends alone; after this side's BYE all would get another attempt,
 * and meet that request again. what: or NULL, when the set has its reason. */
static void doom(struct td_xfer *x, struct qp_set *set, const struct rail *rail, const char *what)
{
    if (set->end.state != QP_SET_STANDS) return;
    if (what) xfer_say(set->end.reason, "rdma: %s: %s", rail->name, what);
    set->end.at_ns = xfer_now(x) + DOOM_NS;
    qp_set_goes(set, QP_SET_DOOMED);
}

static void on_completion(struct td_xfer *x, uint32_t rail_at, const struct td_vb_wc *wc)
{
    struct xfer_rdma *r = x->rdma;
    struct rail *rail = &r->rail[rail_at];
    uint32_t q = 0;
    struct qp_set *set = find_qp(r, rail_at, wc->qp_num, &q);
    bool is_recv =
        wc->id == RECV_ID || (wc->status == TD_VB_WC_SUCCESS && wc->op == TD_VB_RECV_IMM);
    if (is_recv && rail->srq && wc->status == TD_VB_WC_SUCCESS &&
        (!set || !set->qp[q].recv_posted) &&
        ++rail->srq_spent >= (rail->plan.srq_depth < 128 ? (rail->plan.srq_depth + 1) / 2 : 64)) {
        if (r->vb->srq.post(rail->srq, RECV_ID, rail->srq_spent) == 0) rail->srq_spent = 0;
    }
    if (!set) return;
    struct queue_pair *pair = &set->qp[q];
    if (wc->status == TD_VB_WC_SUCCESS && (is_recv || wc->op == TD_VB_READ)) rail->received = true;
    if (is_recv) {
        if (pair->recv_left) pair->recv_left--;
        if (wc->status == TD_VB_WC_SUCCESS) on_word(x, set, q, wc->imm);
    } else {
        on_sent(x, set, q, wc);
    }
    if (wc->status == TD_VB_WC_SUCCESS) return;
    if (wc->status == TD_VB_WC_WR_FLUSH) {
        doom(x, set, rail,
             is_recv ? "a queue pair went into the error state (a receive was flushed first)"
                     : "a queue pair went into the error state (a request was flushed first)");
        return;
    }
    if (set->end.verdict == VERDICT_OPEN) { /* what really happened; flushes follow it */
        xfer_say(set->end.reason, "rdma: %s: %s (vendor code %u)", rail->name,
                 td_vb_wc_status_name(wc->status), wc->vendor_error);
        struct pending p = {.id = NO_ID};
        uint64_t seq;
        if (!is_recv && seq_of(pair, wc, &seq)) p = pair->ring[seq % rail->plan.send_depth];
        bool late = is_late(x, set, &p, wc);
        if (!late && !is_retryable(wc->status)) set->end.fault = p;
        bool retry = late || is_retryable(wc->status) || p.id != NO_ID;
        set->end.verdict = retry ? VERDICT_RETRY : VERDICT_NEVER;
        /* fenced: the peer may be dead, and the rail is not to blame */
        if (!late && set->end.state != QP_SET_FENCED) xfer_rail_erred(x, rail_at);
    }
    /* No answer: the peer may be dead, and its socket says so soon. */
    if (wc->status == TD_VB_WC_RETRY_EXC)
        doom(x, set, rail, NULL);
    else
        qp_set_goes(set, QP_SET_BROKEN);
}

/* Every set on this rail ends, and it is known why. */
static void break_qp_sets(struct td_xfer *x, uint32_t rail, const char *why)
{
    struct xfer_rdma *r = x->rdma;
    EACH_QP_SET (r, set)
        if (xfer_qp_set_uses(set, rail) && qp_set_breaks(set))
            xfer_say(set->end.reason, "rdma: %s: %s", r->rail[rail].name, why);
}

/* Nothing will be told on this rail any more: its sets end, and their ops try another. */
static void rail_is_deaf(struct td_xfer *x, uint32_t rail, const char *what, int error)
{
    char why[TD_XFER_REASON_MAX];
    xfer_say(why, "its completion queue %s: %s", what, strerror(error));
    x->rdma->rail[rail].dead = true;
    break_qp_sets(x, rail, why);
}

static bool take_completions(struct td_xfer *x)
{
    struct xfer_rdma *r = x->rdma;
    bool any = false;
    for (uint32_t i = 0; i < r->n_rails; i++) {
        struct td_vb_wc wcs[64];
        int n;
        if (!xfer_rail_tells(&r->rail[i])) continue;
        do {
            n = r->vb->poll(r->rail[i].cq, wcs, 64);
            for (int k = 0; k < n; k++) on_completion(x, i, &wcs[k]);
            if (n > 0) any = true;
            if (n < 0) {
                any = true; /* who was about to sleep ends its sets first */
                rail_is_deaf(x, i, "is dead", -n);
            }
        } while (n == 64);
    }
    return any;
}

static void on_async(struct td_xfer *x, uint32_t i, const struct td_vb_async *e)
{
    struct xfer_rdma *r = x->rdma;
    struct rail *rail = &r->rail[i];
    r->n_async++;
    if (e->port && e->port != r->config.port) return; /* another port's */
    const char *broken = NULL;                        /* what every set on this rail ends for */
    struct qp_set *failed;
    uint32_t q;
    struct td_vb_gid gid = rail->gid;
    struct td_vb_port port = rail->port;
    switch (e->kind) {
    case TD_VB_ASYNC_QP_FATAL:
        failed = find_qp(r, i, e->qp_num, &q);
        if (failed) doom(x, failed, rail, "a queue pair failed (asynchronous event)");
        break;
    case TD_VB_ASYNC_CQ_ERR:
    case TD_VB_ASYNC_SRQ_ERR:
    case TD_VB_ASYNC_DEVICE_FATAL:
        rail->dead = true;
        xfer_rail_erred(x, i);
        broken = e->kind == TD_VB_ASYNC_DEVICE_FATAL ? "the device failed"
                                                     : "a completion or receive queue failed";
        break;
    case TD_VB_ASYNC_PORT_ERR:
        rail->port.active = false;
        xfer_rail_erred(x, i);
        broken = "the port went down";
        break;
    case TD_VB_ASYNC_PORT_ACTIVE:
        if (r->vb->query_port(rail->device, r->config.port, &rail->port) == 0 &&
            rail->port.active) {
            xfer_rail_pick_gid(r, rail, NULL); /* none: the old one stands */
            rail->avoid_until_ns = rail->avoid_ns = 0;
            r->n_ups++;
        }
        break;
    case TD_VB_ASYNC_GID_CHANGE:
        if (xfer_rail_pick_gid(r, rail, NULL) == TD_OK &&
            memcmp(gid.raw, rail->gid.raw, sizeof gid.raw) != 0)
            broken = "the device's address changed";
        break;
    case TD_VB_ASYNC_LID_CHANGE:
        /* it stands as it was, or an event says more */
        if (r->vb->query_port(rail->device, r->config.port, &port)) break;
        /* peers still send to the old one: the next attempt's set-up tells them */
        if (port.lid != rail->port.lid) broken = "the port's LID changed";
        rail->port = port;
        break;
    case TD_VB_ASYNC_OTHER:
    case TD_VB_ASYNC_N_KINDS:
        break;
    }
    if (broken) break_qp_sets(x, i, broken);
}

static bool rdma_poll(struct td_xfer *x)
{
    struct xfer_rdma *r = x->rdma;
    bool any = false;
    if (!r) return false;
    for (uint32_t i = 0; i < r->n_rails; i++) {
        struct td_vb_async e;
        while (r->rail[i].device && r->vb->async_get(r->rail[i].device, &e)) {
            on_async(x, i, &e);
            any = true;
        }
    }
    EACH_QP_SET (r, set)
        if (set->joining && atomic_load(&set->joining->over)) {
            joined(x, set);
            any = true;
        }
    if (r->n_qp_sets && take_completions(x)) any = true;
    EACH_QP_SET (r, set) {
        if (set->end.state == QP_SET_DOOMED && xfer_now(x) >= set->end.at_ns)
            qp_set_goes(set, QP_SET_BROKEN);
        if (set->end.state == QP_SET_BROKEN) close_broken(x, set);
    }
    if (x->core.flush_writes && xfer_rdma_flush(x)) any = true;
    return any;
}

void xfer_rdma_close(struct td_xfer *x)
{
    struct xfer_rdma *r = x->rdma;
    if (!r) return;
    EACH_QP_SET (r, set) { /* those with a connection were fenced with it */
        pthread_join(set->joining->thread, NULL);
        free(set->joining);
        set->joining = NULL;
        qp_set_close(x, set);
    }
    xfer_rails_close(r);
    for (uint32_t i = 0; r->op_keys && i < x->core.max_ops; i++) free(r->op_keys[i]);
    free(r->op_keys);
    free(r->grant);
    free(r->cells);
    free(r->flush.cells);
    if (r->flush.dmabuf_fd >= 0) close(r->flush.dmabuf_fd);
    free(r);
    x->rdma = NULL;
}

/* --- progress without spinning ---------------------------------------------------------------- */

/* Polls for spin_ns, which grows while completions come soon after that; then arms the channels. */
static bool rdma_sleep(struct td_xfer *x)
{
    struct xfer_rdma *r = x->rdma;
    if (!r) return true;
    bool may_sleep = true;
    if (r->flush.runs) return false;
    /* what the last set's end told: unread it would wake us for ever */
    for (uint32_t i = 0; i < r->n_rails && !r->n_qp_sets; i++)
        if (xfer_rail_tells(&r->rail[i])) r->vb->cq_clear(r->rail[i].cq);
    if (!r->n_qp_sets) return true;
    uint64_t until = td_now_ns() + r->spin_ns;
    while (r->spin_ns && td_now_ns() < until) {
        if (take_completions(x)) return false;
        /* the lock is held here: a caller must not wait for this */
        if (atomic_load(&x->loop.rung) || atomic_load(&x->loop.n_callers)) return false;
    }
    for (uint32_t i = 0; i < r->n_rails; i++) {
        if (!xfer_rail_tells(&r->rail[i])) continue;
        r->vb->cq_clear(r->rail[i].cq);
        int error = r->vb->cq_arm(r->rail[i].cq);
        if (!error) continue;
        rail_is_deaf(x, i, "cannot be armed", error); /* asleep, nothing would wake it */
        may_sleep = false;
    }
    return !take_completions(x) && may_sleep;
}

static void rdma_woke(struct td_xfer *x, uint64_t slept_ns, bool by_channel)
{
    struct xfer_rdma *r = x->rdma;
    if (!r) return;
    if (by_channel && slept_ns < SPIN_MAX_NS)
        r->spin_ns = xfer_next_wait(r->spin_ns, SPIN_MAX_NS / 8, SPIN_MAX_NS);
    else
        r->spin_ns /= 2;
}

static void rdma_stats(const struct td_xfer *x, struct td_xfer_stats *stats)
{
    if (!x->rdma) return;
    stats->n_work_requests = x->rdma->n_wr;
    stats->n_doorbells = x->rdma->n_doorbells;
    stats->n_gpu_flushes = x->rdma->flush.n_flushes;
    stats->n_rail_errors = x->rdma->n_rail_errors;
    stats->n_async_events = x->rdma->n_async;
    stats->n_windows = x->rdma->n_windows;
    stats->n_wide_windows = x->rdma->n_wide;
}

/* --- the table -------------------------------------------------------------------------------- */

static void rdma_advertise(const struct td_xfer *x, struct td_xfer_grant_blob *grant)
{
    grant->has_rdma = xfer_rdma_usable(x);
}

static td_status rdma_fits(const struct td_xfer *x, const struct td_xfer_grant_blob *g,
                           struct td_err *err)
{
    if ((g->path != TD_XFER_PATH_RDMA || x->rdma) &&
        (x->self.path != TD_XFER_PATH_RDMA || g->has_rdma))
        return TD_OK;
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "grant of %s: only rdma is allowed, and %s has no usable RDMA device",
                   g->instance, x->rdma ? "it" : "this side");
}

static bool rdma_offers(const struct td_xfer *x, const struct td_xfer_grant_blob *g,
                        char why[TD_XFER_REASON_MAX])
{
    if (g->port && g->has_rdma && xfer_rdma_usable(x)) return true;
    if (x->rdma || g->has_rdma)
        xfer_say(why, "%s has no usable RDMA device", g->has_rdma ? "this side" : "it");
    return false;
}

static bool rdma_admits(const struct td_xfer *x, char why[TD_XFER_REASON_MAX])
{
    if (xfer_rdma_usable(x)) return true;
    xfer_say(why, "it has no usable RDMA device");
    return false;
}

static bool rdma_expects(const struct td_xfer_conn *c, uint8_t type)
{
    if (c->state == XFER_CONN_SETUP)
        return type == (c->initiator ? TD_XFER_RDMA_ACCEPT : TD_XFER_RDMA_OFFER);
    return c->initiator && type == TD_XFER_TARGETS;
}

static void on_answer(struct td_xfer *x, struct td_xfer_conn *c)
{
    char reason[TD_XFER_REASON_MAX];
    if (c->rx.frame.status) { /* all rails are offered next time */
        for (uint32_t i = 0; i < x->rdma->n_rails; i++) x->rdma->rail[i].avoid_until_ns = 0;
        xfer_path_offer_refused(x, c);
    } else if (!on_accept(x, c, reason)) {
        xfer_conn_close(x, c, TD_ERR_PEER, reason, false);
    }
}

/* READY comes with the probes. */
static void rdma_on_frame(struct td_xfer *x, struct td_xfer_conn *c)
{
    char reason[TD_XFER_REASON_MAX];
    td_status status;
    switch (c->rx.frame.type) {
    case TD_XFER_RDMA_OFFER:
        status = on_offer(x, c, reason);
        if (status) xfer_path_refuse_offer(x, c, TD_XFER_RDMA_ACCEPT, status, reason);
        break;
    case TD_XFER_RDMA_ACCEPT:
        on_answer(x, c);
        break;
    default: /* TARGETS */
        status = on_targets(x, c);
        if (status == TD_ERR_NOMEM)
            xfer_conn_close(x, c, status, "out of memory for keys", false);
        else if (status == TD_ERR_CORRUPT)
            xfer_conn_refuse(x, c, "targets outside the pool or the grant");
        else
            c->tx.ready = true;
    }
}

static bool rdma_may_open(struct td_xfer_conn *c, uint32_t op)
{
    (void)op;
    c->tx.ready = true; /* TARGETS are due */
    return true;
}

static bool rdma_work(struct td_xfer *x, uint64_t now_ns)
{
    if (!x->rdma) return false;
    windows_work(x);
    xfer_rdma_revive(x, now_ns);
    return false;
}

const struct td_transfer_backend td_transfer_rdma = {
    .path = TD_XFER_PATH_RDMA,
    .name = "rdma",
    .way = TD_XFER_BY_NIC,
    .has_setup = true,
    .needs_verbs = true,
    .conn_bytes = sizeof(struct xfer_rdma_conn),
    .side = {.open = xfer_rdma_open,
             .mem_add = xfer_rdma_mem_add,
             .close = xfer_rdma_close,
             .advertise = rdma_advertise,
             .stats = rdma_stats,
             .op_handle = rdma_op_handle},
    .choice = {.fits = rdma_fits, .offers = rdma_offers, .admits = rdma_admits},
    .conn = {.dial = xfer_tcp_dial,
             .open_conn = rdma_open_conn,
             .expects = rdma_expects,
             .on_frame = rdma_on_frame,
             .wants_better = rdma_wants_better,
             .is_better = rdma_is_better,
             .late = rdma_late,
             .may_pull = rdma_may_pull,
             .attached = rdma_attached,
             .may_open = rdma_may_open,
             .n_source_blocks = rdma_n_source_blocks,
             .fence = rdma_fence},
    .bytes = {.post = rdma_post, .answer = rdma_answer},
    .turn = {.poll = rdma_poll,
             .work = rdma_work,
             .due = xfer_rdma_due,
             .sleep = rdma_sleep,
             .woke = rdma_woke},
};
