/* xfer_rdma_test.c - the RDMA path under every fault, on the provider in memory. Both ends live in
 * this process, so that a test can stand between the engine and its device: it counts and spoils
 * what is posted, hides events, and holds requests in the network.
 *
 * After every fault the same is asked: the bytes are right or the slot was never ready; what
 * lies outside the grant still holds the poison; each slot and op had one end; nothing is left
 * in the statistics; and the next transfer of the same pair works. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/wakeup.h"
#include "common/base/entropy.h"
#include "common/base/sanitizers.h"
#include "common/transfer/rdma/select.h"
#include "common/transfer/wire.h"
#include "tests/unit/xfer_node.h"

#define N_BLOCKS 48
#define BLOCK_BYTES 24576
#ifdef TD_WITH_TSAN
/* times what a peer has for its set-up: nothing below counts on these time-outs running out */
#define SLOW 2
#else
#define SLOW 1
#endif
/* peer_timeout, a quarter of which a slot waits for another attempt; every wait below is bounded
   by WAIT_MS */
#define TIMEOUT_MS (8000 * SLOW)
#define WAIT_MS (15000 * SLOW)
#define POISON 0xdeadull
#define MAX_QPS 1024
#define IB_TIMEOUT 10 /* a quarantine is 4 x 4.2 ms then */

/* --- ends ------------------------------------------------------------------------------------- */

struct qp_seen {
    struct td_vb_qp *qp; /* NULL: destroyed */
    struct td_vb_cq *cq;
    uint32_t num, device;
    bool shared;               /* receives come from an SRQ */
    struct td_vb_qp_caps caps; /* asked */
    struct td_vb_route route;
};

enum gate { GATE_NONE = 0, GATE_CREATE, GATE_INIT, GATE_RTR, GATE_RTS, GATE_ERROR, GATE_DESTROY };
#define GATE_S 10

struct end {
    struct td_verbs vb; /* the fake's, with some calls passing by here first */
    const struct td_verbs *real;
    atomic_uint n_turns; /* of its progress thread, which asks each device once */
    struct td_fake_fabric *f;
    bool own_fabric;
    struct td_xfer *x;
    struct td_arena arena;
    struct td_wakeup *wakeup;
    struct td_xfer_event path; /* the last PATH_CHOSEN that was no success */
    uint32_t n_chosen, n_not_had;
    pthread_mutex_t lock; /* of what follows */
    struct td_vb_device *device[TD_FAKE_DEVICES_MAX];
    struct qp_seen qp[MAX_QPS];
    uint32_t n_qps, n_reg;
    uint32_t fail_data_posts; /* so many calls with data are refused by the device */
    uint32_t wrong_data;      /* so many requests with data carry other bytes than they should */
    uint64_t wrong_addr;      /* these */
    uint32_t n_changes;       /* after so many calls with data the source changes, when the
                                 bytes have landed, to */
    uint64_t change_seed;     /* this content, */
    uint8_t *change_at;       /* in this block of change_bytes */
    uint64_t change_bytes;
    uint64_t bad_key_of; /* what is sent from this address goes by a key that the receiver
                            never gave */
    uint32_t n_data, n_words;
    uint64_t data_bytes[TD_FAKE_DEVICES_MAX]; /* posted */
    bool hide_events;
    enum gate gate;                /* these calls wait until it is another */
    uint32_t n_at_gate, n_expired; /* now; that waited for GATE_S */
    pthread_cond_t gate_moved;
    uint32_t mtu_bytes;    /* what ports say; 0: the truth */
    uint16_t lid_more;     /* a multiple of SPY_LIDS: what ports say is more than the truth
                              by this much, until a peer dials it */
    uint32_t refuse_opens; /* so many opens of a device fail */
    uint32_t n_refused_opens;
};

#define MAX_ENDS 160
static struct end *ends[MAX_ENDS];
static pthread_mutex_t ends_lock = PTHREAD_MUTEX_INITIALIZER;

static struct end *end_of(const struct td_vb_device *d, uint32_t *ret_device)
{
    struct end *found = NULL;
    pthread_mutex_lock(&ends_lock);
    for (int i = 0; i < MAX_ENDS && !found; i++)
        for (uint32_t k = 0; ends[i] && k < TD_FAKE_DEVICES_MAX && !found; k++)
            if (ends[i]->device[k] == d) found = ends[i], *ret_device = k;
    pthread_mutex_unlock(&ends_lock);
    TD_ASSERT(found);
    return found;
}

/* A device that takes its time. */
static void pass(struct end *e, enum gate call)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += GATE_S;
    pthread_mutex_lock(&e->lock);
    e->n_at_gate += e->gate == call;
    for (int error = 0; e->gate == call && !error;) {
        error = pthread_cond_timedwait(&e->gate_moved, &e->lock, &until);
        e->n_expired += error != 0;
    }
    pthread_mutex_unlock(&e->lock);
}

static void set_gate(struct end *e, enum gate gate)
{
    pthread_mutex_lock(&e->lock);
    e->gate = gate;
    e->n_at_gate = 0;
    pthread_cond_broadcast(&e->gate_moved);
    pthread_mutex_unlock(&e->lock);
}

/* Somebody waits at it, and nobody has waited too long. */
static bool at_gate(struct end *e)
{
    pthread_mutex_lock(&e->lock);
    bool waits = e->n_at_gate > 0 && e->n_expired == 0;
    pthread_mutex_unlock(&e->lock);
    return waits;
}

#define SPY_LIDS 1024        /* LIDs of the fake are below */
static uint32_t spy_max_reg; /* so many registrations succeed; 0: all */

static int spy_open(const struct td_verbs *vb, const char *name, struct td_vb_device **ret_device)
{
    struct end *e = (struct end *)(uintptr_t)vb;        /* its first member */
    uint32_t i = (uint32_t)strtoul(name + 4, NULL, 10); /* "fake7" */
    pthread_mutex_lock(&e->lock);
    bool refuse = e->refuse_opens > 0;
    e->refuse_opens -= refuse;
    e->n_refused_opens += refuse;
    pthread_mutex_unlock(&e->lock);
    if (refuse) return EIO;
    int error = e->real->open(vb, name, ret_device);
    pthread_mutex_lock(&ends_lock);
    if (!error) e->device[i] = *ret_device;
    pthread_mutex_unlock(&ends_lock);
    return error;
}

static void spy_close(struct td_vb_device *d)
{
    uint32_t i;
    struct end *e = end_of(d, &i);
    pthread_mutex_lock(&ends_lock);
    e->device[i] = NULL; /* its address may be another's soon */
    pthread_mutex_unlock(&ends_lock);
    e->real->close(d);
}

static int spy_reg(struct td_vb_device *d, void *addr, uint64_t bytes, unsigned access,
                   struct td_vb_mr **ret_mr)
{
    uint32_t i;
    struct end *e = end_of(d, &i);
    if (spy_max_reg && e->n_reg == spy_max_reg) return ENOMEM;
    e->n_reg++;
    return e->real->reg(d, addr, bytes, access, ret_mr);
}

static atomic_int spy_arm_error; /* what every cq_arm says */
/* the same for every end; set by each that opens, called by the threads of those that stand */
static int (*_Atomic spy_real_arm)(struct td_vb_cq *cq);

static int spy_cq_arm(struct td_vb_cq *cq)
{
    int error = atomic_load(&spy_arm_error);
    return error ? error : atomic_load(&spy_real_arm)(cq);
}

static int spy_qp_create(struct td_vb_device *d, struct td_vb_cq *cq, struct td_vb_qp_caps *caps,
                         struct td_vb_qp **ret_qp)
{
    uint32_t i;
    struct end *e = end_of(d, &i);
    bool shared = caps->srq;
    struct td_vb_qp_caps asked = *caps;
    pass(e, GATE_CREATE);
    int error = e->real->qp_create(d, cq, caps, ret_qp);
    pthread_mutex_lock(&e->lock);
    TD_ASSERT(e->n_qps < MAX_QPS);
    if (!error)
        e->qp[e->n_qps++] = (struct qp_seen){.qp = *ret_qp,
                                             .cq = cq,
                                             .num = (*ret_qp)->num,
                                             .device = i,
                                             .shared = shared,
                                             .caps = asked};
    pthread_mutex_unlock(&e->lock);
    return error;
}

static void spy_qp_destroy(struct td_vb_qp *qp)
{
    uint32_t i;
    if (!qp) return;
    struct end *e = end_of(qp->device, &i);
    pthread_mutex_lock(&e->lock);
    for (uint32_t k = 0; k < e->n_qps; k++)
        if (e->qp[k].qp == qp) e->qp[k].qp = NULL;
    pthread_mutex_unlock(&e->lock);
    pass(e, GATE_DESTROY);
    e->real->qp_destroy(qp);
}

static int spy_qp_init(struct td_vb_qp *qp, uint8_t port, uint16_t pkey_index, unsigned access)
{
    uint32_t i;
    struct end *e = end_of(qp->device, &i);
    pass(e, GATE_INIT);
    return e->real->qp_init(qp, port, pkey_index, access);
}

static int spy_qp_rtr(struct td_vb_qp *qp, const struct td_vb_route *route)
{
    uint32_t i;
    struct end *e = end_of(qp->device, &i);
    pass(e, GATE_RTR);
    pthread_mutex_lock(&e->lock);
    for (uint32_t k = 0; k < e->n_qps; k++)
        if (e->qp[k].qp == qp) e->qp[k].route = *route;
    pthread_mutex_unlock(&e->lock);
    struct td_vb_route told = *route;
    told.remote_lid %= SPY_LIDS;
    return e->real->qp_rtr(qp, &told);
}

static int spy_query_port(struct td_vb_device *d, uint8_t port, struct td_vb_port *ret_port)
{
    uint32_t i;
    struct end *e = end_of(d, &i);
    int error = e->real->query_port(d, port, ret_port);
    pthread_mutex_lock(&e->lock);
    if (!error && e->mtu_bytes) ret_port->mtu_bytes = e->mtu_bytes;
    if (!error) ret_port->lid = (uint16_t)(ret_port->lid + e->lid_more);
    pthread_mutex_unlock(&e->lock);
    return error;
}

static int spy_qp_rts(struct td_vb_qp *qp, const struct td_vb_route *route)
{
    uint32_t i;
    struct end *e = end_of(qp->device, &i);
    pass(e, GATE_RTS);
    return e->real->qp_rts(qp, route);
}

static int spy_qp_error(struct td_vb_qp *qp)
{
    uint32_t i;
    struct end *e = end_of(qp->device, &i);
    pass(e, GATE_ERROR);
    return e->real->qp_error(qp);
}

static int spy_post_send(struct td_vb_qp *qp, struct td_vb_send *wrs, uint32_t n,
                         uint32_t *ret_n_posted)
{
    uint32_t d;
    struct end *e = end_of(qp->device, &d);
    bool refuse = false;
    uint32_t n_data = 0;
    pthread_mutex_lock(&e->lock);
    for (uint32_t i = 0; i < n; i++) {
        bool data = wrs[i].op == TD_VB_WRITE && wrs[i].sge[0].bytes > 64; /* no probe */
        if (wrs[i].op == TD_VB_WRITE_IMM && (wrs[i].imm & 0xf) == TD_XFER_IMM_FINAL) e->n_words++;
        if (!data) continue;
        e->n_data++;
        n_data++;
        for (uint32_t k = 0; k < wrs[i].n_sge; k++) e->data_bytes[d] += wrs[i].sge[k].bytes;
        if (e->fail_data_posts) refuse = true;
        for (uint32_t k = 0; k < wrs[i].n_sge && e->bad_key_of; k++)
            if (e->bad_key_of - wrs[i].sge[k].addr < wrs[i].sge[k].bytes) wrs[i].rkey ^= 0x5a5a00;
        if (e->wrong_data) {
            e->wrong_data--;
            wrs[i].sge[0].addr = e->wrong_addr; /* of the same registration */
        }
    }
    if (refuse) e->fail_data_posts--;
    bool change = !refuse && n_data && e->n_changes;
    e->n_changes -= change;
    pthread_mutex_unlock(&e->lock);
    if (change) { /* the writer of these blocks is not done with them, whatever it said */
        struct td_fake_counters before, now;
        uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
        td_fake_counters_get(e->f, TD_FAKE_ALL, &before);
        int error = e->real->post_send(qp, wrs, n, ret_n_posted);
        do td_fake_counters_get(e->f, TD_FAKE_ALL, &now);
        while (now.writes_landed < before.writes_landed + n_data && td_now_ns() < until);
        node_fill_bytes(e->change_at, e->change_bytes, e->change_seed);
        return error;
    }
    if (!refuse) return e->real->post_send(qp, wrs, n, ret_n_posted);
    *ret_n_posted = 0;
    return EIO;
}

static bool spy_async_get(struct td_vb_device *d, struct td_vb_async *ret_event)
{
    uint32_t i;
    struct end *e = end_of(d, &i);
    atomic_fetch_add(&e->n_turns, 1);
    for (;;) {
        if (!e->real->async_get(d, ret_event)) return false;
        pthread_mutex_lock(&e->lock);
        bool hide = e->hide_events;
        pthread_mutex_unlock(&e->lock);
        if (!hide) return true;
    }
}

struct side {
    const char *fake; /* more options of the fabric */
    enum td_xfer_path path;
    const char *devices;
    bool shareable;
    bool down; /* the port of its device 1 is down when it opens */
};

struct setup {
    struct side side[2]; /* sender, receiver */
    uint32_t timeout_ms, digest_every, srq_peers, max_slots;
    uint8_t qps, ib_timeout;
    bool rnr_waits, expect_failure, pull;
    uint64_t block_bytes, bytes_in_flight;
    int32_t n_blocks;
};

struct transfer;
static char fabric_path[64]; /* of each test anew */
#define MAX_TRANSFERS 64
static struct transfer *by_user[MAX_TRANSFERS]; /* those that are under way */
static uint32_t n_ready;

static void ring(void *ctx) { td_wakeup_signal(ctx); }

/* The end's fabric, shared (f) or its own, and the table of it in which the spies stand. */
static td_status end_open_fabric(struct end *e, const struct side *side, struct td_fake_fabric *f,
                                 struct td_err *err)
{
    struct td_fake_options o;
    char text[256], path[256];
    snprintf(text, sizeof text, "path=%s,retry_ms=20%s%s", fabric_path, side->fake ? "," : "",
             side->fake ? side->fake : "");
    td_status status = td_fake_options_parse(text, &o, path, err);
    if (!status && !f) {
        o.path = path;
        e->own_fabric = true;
        status = td_fake_fabric_open(&o, &e->f, err);
    } else {
        e->f = f;
    }
    if (status) return status;
    e->real = td_fake_verbs(e->f);
    e->vb = *e->real;
    e->vb.open = spy_open;
    e->vb.close = spy_close;
    e->vb.reg = spy_reg;
    e->vb.qp_create = spy_qp_create;
    atomic_store(&spy_real_arm, e->vb.cq_arm);
    e->vb.cq_arm = spy_cq_arm;
    e->vb.qp_destroy = spy_qp_destroy;
    e->vb.qp_init = spy_qp_init;
    e->vb.qp_rtr = spy_qp_rtr;
    e->vb.query_port = spy_query_port;
    e->vb.qp_rts = spy_qp_rts;
    e->vb.qp_error = spy_qp_error;
    e->vb.post_send = spy_post_send;
    e->vb.async_get = spy_async_get;
    return TD_OK;
}

static td_status end_open(struct end *e, const struct setup *s, const struct side *side,
                          struct td_fake_fabric *f, struct td_wakeup *wakeup, struct td_err *err)
{
    memset(e, 0, sizeof *e);
    e->wakeup = wakeup;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->gate_moved, NULL);
    pthread_mutex_lock(&ends_lock);
    int at = 0;
    while (ends[at]) at++;
    ends[at] = e;
    pthread_mutex_unlock(&ends_lock);
    td_status status = end_open_fabric(e, side, f, err);
    if (status) return status;
    struct td_xfer_rdma_config rdma = {.verbs = &e->vb,
                                       .gid_index = -1,
                                       .timeout = s->ib_timeout ? s->ib_timeout : IB_TIMEOUT,
                                       .retry = 3,
                                       .rnr_retry = s->rnr_waits ? 0 : 1,
                                       .qps_per_rail = s->qps,
                                       .srq_peers = s->srq_peers,
                                       .devices = side->devices,
                                       .bytes_in_flight = s->bytes_in_flight,
                                       .pull = s->pull};
    struct td_xfer_config config = {
        .instance = s->side == side ? "sender" : "receiver",
        .incarnation = td_random_u64(),
        .layout_hash = 0x1a70,
        .listen_host = "127.0.0.1",
        .path = side->path,
        .max_slots = s->max_slots ? s->max_slots : 16,
        .max_ops = s->max_slots ? s->max_slots : 16,
        .peer_timeout_ms = s->timeout_ms ? s->timeout_ms : TIMEOUT_MS,
        .digest_every = s->digest_every,
        .rdma = &rdma,
        .hooks = {.wake = ring, .ctx = wakeup},
    };
    if (side->down) TD_ASSERT(td_fake_port_set(e->f, td_fake_node(e->f), 1, 1, false));
    status = td_arena_create(s->block_bytes * (uint64_t)s->n_blocks, side->shareable,
                             "xfer-rdma-test", &e->arena, err);
    if (!status) status = td_xfer_open(&config, &e->x, err);
    if (!status) status = td_xfer_mem_add(e->x, &e->arena, s->block_bytes, s->n_blocks, err);
    return status;
}

static void end_close(struct end *e)
{
    td_xfer_close(e->x);
    e->x = NULL;
    if (e->arena.base) td_arena_destroy(&e->arena);
    e->arena.base = NULL;
    if (e->own_fabric) td_fake_fabric_close(e->f);
    e->f = NULL;
    pthread_mutex_lock(&ends_lock);
    for (int i = 0; i < MAX_ENDS; i++)
        if (ends[i] == e) ends[i] = NULL;
    pthread_mutex_unlock(&ends_lock);
}

struct pair {
    struct setup s;
    struct end p, d;
    struct td_wakeup wakeup;
    uint64_t seed;
};

static uint8_t *block(const struct pair *t, const struct end *e, int32_t i)
{
    return (uint8_t *)e->arena.base + (uint64_t)i * t->s.block_bytes;
}

static void poison(struct pair *t, int32_t i)
{
    node_fill_bytes(block(t, &t->d, i), t->s.block_bytes, POISON + (uint64_t)i);
}

static int n_fabrics;

static void fabric_new(void)
{
    snprintf(fabric_path, sizeof fabric_path, "/dev/shm/tandem-xfer-rdma-%d-%d", (int)getpid(),
             n_fabrics++);
}

static void setup_complete(struct setup *s)
{
    if (!s->block_bytes) s->block_bytes = BLOCK_BYTES;
    if (!s->n_blocks) s->n_blocks = N_BLOCKS;
    for (int i = 0; i < 2; i++)
        if (!s->side[i].path) s->side[i].path = TD_XFER_PATH_RDMA;
}

static const struct setup plain = {0};
#define RAIL_BYTES (128u << 10)
static const struct setup two_rails = {.side = {{.fake = "devices=2"}, {.fake = "devices=2"}},
                                       .qps = 1,
                                       .block_bytes = RAIL_BYTES,
                                       .bytes_in_flight = 8 * RAIL_BYTES};
static const enum td_xfer_path AUTO = TD_XFER_N_PATHS; /* in a setup: 0 is rdma there */

/* On the heap, because a test that fails leaves its threads behind. */
static struct pair *pair_open(const struct setup *setup)
{
    struct td_err err = {0};
    struct pair *t = calloc(1, sizeof *t);
    assert_non_null(t);
    memset(by_user, 0, sizeof by_user);
    t->s = *setup;
    setup_complete(&t->s);
    for (int i = 0; i < 2; i++)
        if (t->s.side[i].path == AUTO) t->s.side[i].path = TD_XFER_PATH_AUTO;
    t->seed = 77;
    fabric_new();
    assert_int_equal(td_wakeup_open(&t->wakeup, &err), TD_OK);
    if (end_open(&t->d, &t->s, &t->s.side[1], NULL, &t->wakeup, &err))
        fail_msg("receiver: %s", err.msg);
    if (end_open(&t->p, &t->s, &t->s.side[0], NULL, &t->wakeup, &err))
        fail_msg("sender: %s", err.msg);
    for (int32_t i = 0; i < t->s.n_blocks; i++) poison(t, i);
    return t;
}

static void pair_close(struct pair *t)
{
    end_close(&t->p);
    end_close(&t->d);
    td_wakeup_close(&t->wakeup);
    unlink(fabric_path);
    free(t);
}

static struct td_xfer_stats stats(const struct end *e)
{
    struct td_xfer_stats s;
    td_xfer_stats(e->x, &s);
    return s;
}

static struct td_fake_counters counters(const struct end *e)
{
    struct td_fake_counters c;
    td_fake_counters_get(e->f, td_fake_node(e->f), &c);
    return c;
}

#define WAIT_FOR(what)                                                                             \
    do {                                                                                           \
        uint64_t until_ = td_deadline_after_ms(td_now_ns(), WAIT_MS);                              \
        while (!(what)) {                                                                          \
            if (td_now_ns() > until_)                                                              \
                fail_msg("%s:%d: not within %d ms: %s", __FILE__, __LINE__, WAIT_MS, #what);       \
            poll(NULL, 0, 1);                                                                      \
        }                                                                                          \
    } while (0)

/* --- transfers -------------------------------------------------------------------------------- */

struct transfer {
    int32_t n;
    int32_t src[N_BLOCKS], dst[N_BLOCKS];
    uint64_t seed;
    uint32_t slot, op;
    uint8_t blob[512];
    size_t blob_bytes;
    /* what was told */
    bool ready, slot_failed, slot_free, done, op_failed;
    uint32_t ready_order;                  /* among all that became ready */
    struct td_xfer_event slot_end, op_end; /* READY or FAILED; DONE or FAILED */
    uint64_t free_ns;
};

/* A grant of m->dst. */
static void grant_blocks(struct pair *t, struct transfer *m, int32_t n, uint64_t ms)
{
    struct td_err err = {0};
    static uint8_t blob[TD_XFER_BLOB_MAX];
    uint32_t user = 0;
    m->n = n;
    m->seed = t->seed += 1000;
    while (by_user[user]) user++;
    by_user[user] = m;
    if (td_xfer_grant(t->d.x, m->dst, n, td_deadline_after_ms(td_now_ns(), ms), user, &m->slot,
                      blob, &m->blob_bytes, &err))
        fail_msg("grant: %s", err.msg);
    memcpy(m->blob, blob, m->blob_bytes);
}

/* n blocks: 5, 12, 19, ... mod n_blocks, so that neighbours in the grant are none in the pool. */
static void grant(struct pair *t, struct transfer *m, int32_t n, uint64_t ms)
{
    memset(m, 0, sizeof *m);
    for (int32_t i = 0; i < n; i++) {
        m->dst[i] = (5 + 7 * i) % t->s.n_blocks;
        m->src[i] = (11 + 13 * i) % t->s.n_blocks;
    }
    grant_blocks(t, m, n, ms);
}

/* Neighbours on both sides, from block `first` on. */
static void grant_run(struct pair *t, struct transfer *m, int32_t first, int32_t n, uint64_t ms)
{
    memset(m, 0, sizeof *m);
    for (int32_t i = 0; i < n; i++) m->dst[i] = m->src[i] = first + i;
    grant_blocks(t, m, n, ms);
}

static void fill_source(struct pair *t, const struct transfer *m)
{
    for (int32_t i = 0; i < m->n; i++)
        node_fill_bytes(block(t, &t->p, m->src[i]), t->s.block_bytes, m->seed + (uint64_t)i);
}

static td_status try_op(struct pair *t, struct transfer *m, uint64_t ms, struct td_err *err)
{
    int32_t n;
    uint32_t user = 0;
    while (by_user[user] != m) user++;
    fill_source(t, m);
    td_status status =
        td_xfer_op_start(t->p.x, m->blob, m->blob_bytes, td_deadline_after_ms(td_now_ns(), ms),
                         user, &m->op, &n, err);
    if (!status) assert_int_equal(n, m->n);
    return status;
}

static void op(struct pair *t, struct transfer *m, uint64_t ms)
{
    struct td_err err = {0};
    if (try_op(t, m, ms, &err)) fail_msg("op: %s", err.msg);
}

static td_status submit(struct pair *t, struct transfer *m, int32_t first, int32_t n, bool final)
{
    return td_xfer_submit(t->p.x, m->op, first, m->src + first, n, final, final ? &m->seed : NULL,
                          final ? sizeof m->seed : 0);
}

static bool next_event(struct end *e, struct td_xfer_event *ret_event)
{
    return td_xfer_poll(e->x, ret_event, 1) == 1;
}

/* What was told about paths since the last call. */
static void take_path_news(struct end *e)
{
    struct td_xfer_event news;
    e->n_chosen = e->n_not_had = 0;
    while (td_xfer_poll_path(e->x, &news)) {
        if (news.kind != TD_XFER_PATH_CHOSEN) continue;
        if (news.status)
            e->n_not_had++;
        else
            e->n_chosen++;
        if (news.status) e->path = news;
    }
}

static void check_content(struct pair *t, const struct transfer *m)
{
    for (int32_t i = 0; i < m->n; i++)
        if (!node_check_bytes(block(t, &t->d, m->dst[i]), t->s.block_bytes, m->seed + (uint64_t)i))
            fail_msg("ready, and grant block %d is wrong", i);
}

/* All blocks that no transfer on `by_user` still owns hold the poison. */
static void check_poison(struct pair *t)
{
    for (int32_t i = 0; i < t->s.n_blocks; i++) {
        bool owned = false;
        for (int k = 0; k < MAX_TRANSFERS; k++)
            for (int32_t j = 0; by_user[k] && j < by_user[k]->n; j++)
                if (by_user[k]->dst[j] == i && !by_user[k]->slot_free) owned = true;
        if (!owned && !node_check_bytes(block(t, &t->d, i), t->s.block_bytes, POISON + (uint64_t)i))
            fail_msg("block %d was written and is nobody's", i);
    }
}

/* Takes what is there. READY is compared; SLOT_FREE gives its blocks to the poison. `keep`:
 * revoke nothing. */
static bool take_events(struct pair *t, bool keep)
{
    struct td_xfer_event e;
    bool any = false;
    while (t->d.x && next_event(&t->d, &e)) {
        struct transfer *m = by_user[e.user];
        any = true;
        assert_non_null(m);
        assert_int_equal(e.id, m->slot);
        assert_false(m->slot_free);
        switch (e.kind) {
        case TD_XFER_SLOT_READY:
            assert_false(m->ready || m->slot_failed);
            m->ready = true;
            m->ready_order = ++n_ready;
            m->slot_end = e;
            assert_int_equal(e.bytes, (uint64_t)m->n * t->s.block_bytes);
            assert_int_equal(e.note_bytes, sizeof m->seed);
            assert_memory_equal(e.note, &m->seed, sizeof m->seed);
            check_content(t, m);
            if (!keep) td_xfer_revoke(t->d.x, m->slot, "given back by the test");
            break;
        case TD_XFER_SLOT_FAILED:
            assert_false(m->ready || m->slot_failed);
            m->slot_failed = true;
            m->slot_end = e;
            assert_true(e.status < 0 && e.reason[0]);
            if (!keep) td_xfer_revoke(t->d.x, m->slot, "given back by the test");
            break;
        case TD_XFER_SLOT_FREE:
            m->slot_free = true;
            m->free_ns = td_now_ns();
            /* somebody else's from now on */
            for (int32_t i = 0; i < m->n; i++) poison(t, m->dst[i]);
            break;
        default:
            fail_msg("event %d at the receiver", (int)e.kind);
        }
    }
    while (t->p.x && next_event(&t->p, &e)) {
        struct transfer *m = by_user[e.user];
        any = true;
        assert_non_null(m);
        assert_int_equal(e.id, m->op);
        assert_false(m->done || m->op_failed);
        m->op_end = e;
        if (e.kind == TD_XFER_OP_DONE)
            m->done = true;
        else if (e.kind == TD_XFER_OP_FAILED)
            m->op_failed = true;
        else
            fail_msg("event %d at the sender", (int)e.kind);
        assert_true(m->done || (e.status < 0 && e.reason[0]));
        /* reused at once */
        for (int32_t i = 0; i < m->n; i++)
            memset(block(t, &t->p, m->src[i]), 0xee, t->s.block_bytes);
    }
    return any;
}

/* Until `what` holds, with events taken as they come. */
#define TAKE_UNTIL(t, keep, what)                                                                  \
    do {                                                                                           \
        uint64_t until_ = td_deadline_after_ms(td_now_ns(), WAIT_MS);                              \
        take_events(t, keep);                                                                      \
        while (!(what)) {                                                                          \
            if (td_now_ns() > until_)                                                              \
                fail_msg("%s:%d: not within %d ms: %s", __FILE__, __LINE__, WAIT_MS, #what);       \
            td_wakeup_wait(&(t)->wakeup, td_deadline_after_ms(td_now_ns(), 2));                    \
            take_events(t, keep);                                                                  \
        }                                                                                          \
    } while (0)

static void forget(struct transfer *m)
{
    for (int i = 0; i < MAX_TRANSFERS; i++)
        if (by_user[i] == m) by_user[i] = NULL;
}

/* Both ends of it, the pool, and nothing left. `op_live` false: there was no op. */
static void finish(struct pair *t, struct transfer *m, bool op_live)
{
    TAKE_UNTIL(t, false, m->slot_free && (!op_live || m->done || m->op_failed));
    forget(m);
    check_poison(t);
    assert_int_equal(stats(&t->d).n_slots_used, 0);
    if (t->p.x) assert_int_equal(stats(&t->p).n_ops_used, 0);
}

/* One transfer that goes well. */
static void whole(struct pair *t, int32_t n)
{
    struct transfer m;
    grant(t, &m, n, WAIT_MS);
    op(t, &m, WAIT_MS);
    assert_int_equal(submit(t, &m, 0, n / 2, false), TD_OK);
    assert_int_equal(submit(t, &m, n / 2, n - n / 2, true), TD_OK);
    TAKE_UNTIL(t, false, m.done || m.op_failed);
    /* at once: a slot that nobody opened waits for its deadline */
    if (!m.done) fail_msg("op: status %d: %s", (int)m.op_end.status, m.op_end.reason);
    finish(t, &m, true);
    if (!m.ready) fail_msg("slot: status %d: %s", (int)m.slot_end.status, m.slot_end.reason);
    if (!m.done) fail_msg("op: status %d: %s", (int)m.op_end.status, m.op_end.reason);
    assert_int_equal(m.slot_end.path, TD_XFER_PATH_RDMA);
}

static void rule(struct end *e, enum td_fake_fault fault, uint64_t nth, enum td_vb_wc_status status,
                 int error)
{
    struct td_fake_rule r = {
        .fault = fault, .device = TD_FAKE_ALL, .nth = nth, .status = status, .error = error};
    assert_true(td_fake_rule_add(e->f, &r));
}

/* Queue pairs that stand, newest first. */
static struct qp_seen live_qp(struct end *e, uint32_t device, uint32_t nth)
{
    struct qp_seen found = {0};
    pthread_mutex_lock(&e->lock);
    for (uint32_t i = e->n_qps; i-- > 0;)
        if (e->qp[i].qp && e->qp[i].device == device && nth-- == 0) {
            found = e->qp[i];
            break;
        }
    pthread_mutex_unlock(&e->lock);
    assert_non_null(found.qp);
    return found;
}

static void fail_posts(struct end *e, uint32_t n)
{
    pthread_mutex_lock(&e->lock);
    e->fail_data_posts = n;
    pthread_mutex_unlock(&e->lock);
}

static void hide_events(struct end *e, bool hide)
{
    pthread_mutex_lock(&e->lock);
    e->hide_events = hide;
    pthread_mutex_unlock(&e->lock);
}

#define expect_text(text, part)                                                                    \
    do {                                                                                           \
        if (!strstr(text, part))                                                                   \
            fail_msg("%s:%d: \"%s\" is not in \"%s\"", __FILE__, __LINE__, part, text);            \
    } while (0)

/* --- 1: completions that fail ----------------------------------------------------------------- */

#define N_DATA 12 /* blocks of a transfer, each its own request, on one queue pair */
static const struct setup one_qp = {.qps = 1};

static bool fails_for_good(enum td_vb_wc_status s)
{
    return s == TD_VB_WC_LOC_LEN || s == TD_VB_WC_LOC_QP_OP || s == TD_VB_WC_LOC_PROT ||
           s == TD_VB_WC_MW_BIND || s == TD_VB_WC_BAD_RESP || s == TD_VB_WC_LOC_ACCESS ||
           s == TD_VB_WC_REM_INV_REQ || s == TD_VB_WC_REM_ACCESS || s == TD_VB_WC_REM_OP;
}

/* The nth request of a transfer of N_DATA blocks fails: 1 .. N_DATA are data, N_DATA + 1 the
 * final word. */
static void one_failure(struct pair *t, enum td_fake_fault fault, uint64_t nth,
                        enum td_vb_wc_status status)
{
    struct transfer m;
    bool retryable = !fails_for_good(status);
    uint32_t conns = stats(&t->p).conns_by_path[TD_XFER_PATH_RDMA];
    assert_int_equal(conns, 1); /* so that requests are counted from the transfer's first */
    grant(t, &m, N_DATA, WAIT_MS);
    rule(&t->p, fault, nth, status, 0);
    op(t, &m, WAIT_MS);
    assert_int_equal(submit(t, &m, 0, N_DATA, true), TD_OK);
    finish(t, &m, true);
    if (retryable) {
        if (!m.ready || !m.done)
            fail_msg("%s at %u: slot %s, op %s", td_vb_wc_status_name(status), (unsigned)nth,
                     m.slot_end.reason, m.op_end.reason);
    } else if (fault == TD_FAKE_FAIL_AFTER) {
        assert_true(m.ready || m.op_failed); /* everything may have come before the sender knew */
    } else {
        if (!m.op_failed || !m.slot_failed)
            fail_msg("%s at %u: it went on", td_vb_wc_status_name(status), (unsigned)nth);
        assert_int_equal(m.op_end.status, TD_ERR_PEER);
        if (!strstr(m.op_end.reason, "fake0") ||
            !strstr(m.op_end.reason, td_vb_wc_status_name(status)))
            fail_msg("%s: the reason is \"%s\"", td_vb_wc_status_name(status), m.op_end.reason);
    }
    td_fake_rules_clear(t->p.f);
    whole(t, 5);
}

/* Short form (sanitizers): the first, one in the middle, the last with data, and what follows. */
static bool is_left_out(uint64_t nth)
{
    return getenv("TANDEM_TEST_SHORT") && nth != 1 && nth != N_DATA / 2 && nth < N_DATA;
}

static void every_status_at_every_position(void **state)
{
    (void)state;
    struct pair *t = pair_open(&one_qp);
    whole(t, 3);
    for (enum td_vb_wc_status s = TD_VB_WC_SUCCESS + 1; s < TD_VB_WC_N_STATUSES; s++)
        for (uint64_t nth = 1; nth <= N_DATA + 1; nth++) {
            if (is_left_out(nth)) continue;
            one_failure(t, TD_FAKE_FAIL_BEFORE, nth, s);
            /* the other end has it, and this one does not know */
            if (s == TD_VB_WC_RETRY_EXC || (nth == N_DATA / 2 && s == TD_VB_WC_REM_OP))
                one_failure(t, TD_FAKE_FAIL_AFTER, nth, s);
        }
    pair_close(t);
}

/* The nth of the receiver's N_DATA READs fails. */
static void one_pull_failure(struct pair *t, enum td_fake_fault fault, uint64_t nth,
                             enum td_vb_wc_status status)
{
    struct transfer m;
    uint64_t pulled = stats(&t->d).bytes_pulled;
    assert_int_equal(stats(&t->p).conns_by_path[TD_XFER_PATH_RDMA], 1);
    grant(t, &m, N_DATA, WAIT_MS);
    rule(&t->d, fault, nth, status, 0);
    op(t, &m, WAIT_MS);
    assert_int_equal(td_xfer_submit_pull(t->p.x, m.op, 0, m.src, N_DATA), TD_OK);
    td_status submitted = submit(t, &m, 0, 0, true);
    /* it may have been told already */
    assert_true(submitted == TD_OK || (submitted == TD_ERR_PEER && fails_for_good(status)));
    finish(t, &m, true);
    if (!fails_for_good(status)) {
        if (!m.ready || !m.done)
            fail_msg("%s at READ %u: slot %s, op %s", td_vb_wc_status_name(status), (unsigned)nth,
                     m.slot_end.reason, m.op_end.reason);
        assert_true(stats(&t->d).bytes_pulled >= pulled + N_DATA * t->s.block_bytes);
    } else {
        if (!m.op_failed || !m.slot_failed)
            fail_msg("%s at READ %u: it went on", td_vb_wc_status_name(status), (unsigned)nth);
        assert_int_equal(m.slot_end.status, TD_ERR_PEER);
        if (!strstr(m.slot_end.reason, "fake0") ||
            !strstr(m.slot_end.reason, td_vb_wc_status_name(status)))
            fail_msg("%s: the reason is \"%s\"", td_vb_wc_status_name(status), m.slot_end.reason);
    }
    td_fake_rules_clear(t->d.f);
    whole(t, 5);
}

/* Blocks that the sender had before are READ by the receiver: there the failures are its own,
 * and the slot's reason names them. */
static void every_status_of_a_pull(void **state)
{
    static const struct setup pulls = {.qps = 1, .pull = true};
    (void)state;
    struct pair *t = pair_open(&pulls);
    whole(t, 3);
    for (enum td_vb_wc_status s = TD_VB_WC_SUCCESS + 1; s < TD_VB_WC_N_STATUSES; s++)
        for (uint64_t nth = 1; nth <= N_DATA; nth++) {
            if (is_left_out(nth)) continue;
            one_pull_failure(t, TD_FAKE_FAIL_BEFORE, nth, s);
            /* the bytes are here, and nobody knows */
            if (s == TD_VB_WC_RETRY_EXC) one_pull_failure(t, TD_FAKE_FAIL_AFTER, nth, s);
        }
    pair_close(t);
}

/* Three transfers share a link, and a request of one of them meets a key that was never given:
 * real, and no fault of the way. That one ends with the reason, on both sides; the other two get
 * another attempt, over the other rail where there is one, and arrive. */
static void a_bug_costs_its_own_transfer(void **state)
{
    static const struct setup setups[] = {
        {.qps = 1},
        {.side = {{.fake = "devices=2"}, {.fake = "devices=2"}}},
        {.qps = 1, .side = {{.path = AUTO}, {.path = AUTO}}},
    };
    (void)state;
    for (size_t k = 0; k < sizeof setups / sizeof setups[0]; k++) {
        struct transfer m[3];
        struct pair *t = pair_open(&setups[k]);
        whole(t, 3);
        uint64_t n_violations = counters(&t->d).rkey_violations;
        for (int i = 0; i < 3; i++) {
            grant_run(t, &m[i], 15 * i, 12, WAIT_MS);
            op(t, &m[i], WAIT_MS);
            assert_int_equal(submit(t, &m[i], 0, 6, false), TD_OK);
        }
        WAIT_FOR(stats(&t->p).bytes_sent == (3 + 18) * t->s.block_bytes);
        pthread_mutex_lock(&t->p.lock);
        t->p.bad_key_of = (uint64_t)(uintptr_t)block(t, &t->p, m[1].src[8]);
        pthread_mutex_unlock(&t->p.lock);
        /* the first may be told already */
        for (int i = 0; i < 3; i++) assert_true(submit(t, &m[i], 6, 6, true) == TD_OK || i > 1);
        for (int i = 0; i < 3; i++)
            TAKE_UNTIL(t, false, m[i].slot_free && (m[i].done || m[i].op_failed));
        pthread_mutex_lock(&t->p.lock);
        t->p.bad_key_of = 0;
        pthread_mutex_unlock(&t->p.lock);
        /* more than one when the receiver said first that the link is over */
        uint64_t n_bad = counters(&t->d).rkey_violations - n_violations;
        assert_true(n_bad >= 1 && n_bad <= 3);
        assert_true(m[1].op_failed && m[1].slot_failed);
        assert_int_equal(m[1].op_end.status, TD_ERR_PEER);
        expect_text(m[1].op_end.reason, "remote access error");
        for (int i = 0; i < 3; i += 2)
            if (!m[i].ready || !m[i].done)
                fail_msg("setup %zu, transfer %d: %s, %s", k, i, m[i].slot_end.reason,
                         m[i].op_end.reason);
        for (int i = 0; i < 3; i++) forget(&m[i]);
        check_poison(t);
        assert_int_equal(stats(&t->d).n_slots_used, 0);
        assert_int_equal(stats(&t->p).n_ops_used, 0);
        whole(t, 9);
        pair_close(t);
    }
}

/* The receiver sees flushes, the connection breaks, and a third break is one too many. */
static void attempts_are_bounded(void **state)
{
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&one_qp);
    whole(t, 3);
    for (uint32_t n = 1; n <= 3; n++) {
        grant(t, &m, N_DATA, WAIT_MS);
        fail_posts(&t->p, n);
        op(t, &m, WAIT_MS);
        assert_int_equal(submit(t, &m, 0, N_DATA, true), TD_OK);
        finish(t, &m, true);
        if (n < 3) {
            if (!m.ready || !m.done)
                fail_msg("%u breaks: %s, %s", n, m.slot_end.reason, m.op_end.reason);
        } else {
            assert_true(m.slot_failed && m.op_failed);
            expect_text(m.op_end.reason, "fake0");
            expect_text(m.op_end.reason, strerror(EIO));
        }
        whole(t, 5);
    }
    pair_close(t);
}

static void a_partial_post_is_another_attempt(void **state)
{
    (void)state;
    struct pair *t = pair_open(&one_qp);
    whole(t, 3);
    for (uint64_t nth = 1; nth <= N_DATA + 1; nth += 4) { /* 1, 5, 9, 13: the word */
        struct transfer m;
        grant(t, &m, N_DATA, WAIT_MS);
        rule(&t->p, TD_FAKE_POST_PARTIAL, nth, 0, nth == 5 ? ENOMEM : EINVAL);
        op(t, &m, WAIT_MS);
        assert_int_equal(submit(t, &m, 0, N_DATA, true), TD_OK);
        finish(t, &m, true);
        if (!m.ready || !m.done)
            fail_msg("at %u: %s, %s", (unsigned)nth, m.slot_end.reason, m.op_end.reason);
        td_fake_rules_clear(t->p.f);
        whole(t, 5);
    }
    pair_close(t);
}

/* Half of the blocks are at the receiver, and the rest is not submitted yet. */
static void go_half(struct pair *t, struct transfer *m, int32_t n, uint64_t ms)
{
    uint64_t sent = stats(&t->p).bytes_sent;
    grant(t, m, n, ms);
    op(t, m, ms);
    assert_int_equal(submit(t, m, 0, n / 2, false), TD_OK);
    WAIT_FOR(stats(&t->p).bytes_sent == sent + (uint64_t)(n / 2) * t->s.block_bytes);
}

static void the_rest(struct pair *t, struct transfer *m)
{
    td_status status = submit(t, m, m->n / 2, m->n - m->n / 2, true);
    if (status && status != TD_ERR_PEER && status != TD_ERR_DEADLINE &&
        status != TD_ERR_UNSUPPORTED)
        fail_msg("submit: %d", (int)status);
}

static void a_queue_pair_breaks_on_one_side(void **state)
{
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&plain);
    whole(t, 3);
    for (int round = 0; round < 8; round++) { /* which side; with an event or without; before or
                                                 after the rest is submitted */
        struct end *e = round & 1 ? &t->d : &t->p;
        go_half(t, &m, N_DATA, WAIT_MS);
        uint32_t num = live_qp(e, 0, (uint32_t)round / 2 % 2).num;
        if (round & 4) the_rest(t, &m);
        /* in the second case it may be over */
        assert_true(td_fake_qp_break(e->f, num, round & 2) || round & 4);
        if (!(round & 4)) the_rest(t, &m);
        finish(t, &m, true);
        if (!m.ready || !m.done)
            fail_msg("round %d: %s, %s", round, m.slot_end.reason, m.op_end.reason);
        whole(t, 5);
    }
    assert_true(stats(&t->p).n_async_events > 0 && stats(&t->d).n_async_events > 0);
    pair_close(t);
}

static void refuse_opens(struct end *e, uint32_t n)
{
    pthread_mutex_lock(&e->lock);
    e->refuse_opens = n;
    e->n_refused_opens = 0;
    pthread_mutex_unlock(&e->lock);
}

static uint32_t n_live_on(struct end *e, uint32_t device)
{
    uint32_t n = 0;
    pthread_mutex_lock(&e->lock);
    for (uint32_t i = 0; i < e->n_qps; i++) n += e->qp[i].qp && e->qp[i].device == device;
    pthread_mutex_unlock(&e->lock);
    return n;
}

/* The completion queue, the shared receive queue or the device of one rail of two dies, with
 * word of it. The other rail does it all from then on. */
static void a_dead_rail_is_left(void **state)
{
    /* an eighth: for the next attempt, on a busy machine */
    static const struct setup two = {.side = {{.fake = "devices=2"}, {.fake = "devices=2"}},
                                     .timeout_ms = 30000};
    (void)state;
    for (int round = 0; round < 6; round++) {
        struct transfer m;
        struct setup s = two;
        s.srq_peers = round >= 4; /* from the first peer on */
        struct pair *t = pair_open(&s);
        whole(t, 9);
        struct end *e = round & 1 ? &t->d : &t->p;
        refuse_opens(e, UINT32_MAX);
        go_half(t, &m, N_DATA, WAIT_MS);
        assert_int_equal(live_qp(e, 0, 0).shared, round >= 4);
        if (round >= 4)
            td_fake_async(e->f, 0, &(struct td_vb_async){.kind = TD_VB_ASYNC_SRQ_ERR});
        else if (round & 2)
            td_fake_cq_break(e->f, live_qp(e, 0, 0).cq);
        else
            td_fake_async(e->f, 0, &(struct td_vb_async){.kind = TD_VB_ASYNC_DEVICE_FATAL});
        the_rest(t, &m);
        finish(t, &m, true);
        if (!m.ready || !m.done)
            fail_msg("round %d: %s, %s", round, m.slot_end.reason, m.op_end.reason);
        whole(t, 9);
        assert_int_equal(n_live_on(e, 0), 0);
        pair_close(t);
    }
}

/* The only device dies: what is under way ends with the reason, and what comes later is refused
 * with it. */
static void the_last_rail_dies(void **state)
{
    (void)state;
    for (int round = 0; round < 4; round++) {
        struct transfer m;
        struct td_err err = {0};
        struct pair *t = pair_open(&plain);
        whole(t, 9);
        struct end *e = round & 1 ? &t->d : &t->p;
        refuse_opens(e, UINT32_MAX); /* it does not come back while we look */
        go_half(t, &m, N_DATA, WAIT_MS);
        if (round & 2)
            td_fake_cq_break(e->f, live_qp(e, 0, 0).cq);
        else
            td_fake_async(e->f, 0, &(struct td_vb_async){.kind = TD_VB_ASYNC_DEVICE_FATAL});
        the_rest(t, &m);
        finish(t, &m, true);
        assert_true(m.slot_failed && m.op_failed);
        assert_int_equal(m.op_end.status, e == &t->p ? TD_ERR_PEER : TD_ERR_UNSUPPORTED);
        expect_text(m.op_end.reason, "no usable RDMA device");
        grant(t, &m, 3, WAIT_MS);
        td_status status = try_op(t, &m, WAIT_MS, &err);
        if (e == &t->d) {
            assert_int_equal(status, TD_ERR_UNSUPPORTED);
            expect_text(err.msg, "it has no usable RDMA device");
        } else {
            TAKE_UNTIL(t, false, m.op_failed);
            expect_text(m.op_end.reason, "this side has no usable RDMA device");
        }
        td_xfer_revoke(t->d.x, m.slot, "never used");
        finish(t, &m, false);
        refuse_opens(e, 0); /* and when the device can be opened again, all is well */
        do {
            bool ready = false;
            grant(t, &m, 3, WAIT_MS);
            if (try_op(t, &m, WAIT_MS, &err) == TD_OK) {
                submit(t, &m, 0, 3, true);
                TAKE_UNTIL(t, false, m.done || m.op_failed);
                ready = m.done;
            }
            td_xfer_revoke(t->d.x, m.slot, "");
            finish(t, &m, false);
            if (ready) break;
            poll(NULL, 0, 10);
        } while (td_now_ns() < td_deadline_after_ms(m.free_ns, WAIT_MS));
        assert_true(m.done);
        whole(t, 9);
        pair_close(t);
    }
}

/* The completion queue dies and nobody is told: no completion, no event. Deadlines end the
 * transfer, and then its blocks come back all the same. */
static void silent_death_is_bounded(void **state)
{
    static const struct setup impatient = {.timeout_ms = 600};
    (void)state;
    for (int round = 0; round < 2; round++) {
        struct transfer m;
        struct pair *t = pair_open(&impatient);
        whole(t, 9);
        struct end *e = round & 1 ? &t->d : &t->p;
        hide_events(e, true);
        uint64_t began = td_now_ns();
        go_half(t, &m, N_DATA, 300);
        td_fake_cq_break(e->f, live_qp(e, 0, 0).cq);
        the_rest(t, &m);
        finish(t, &m, true);
        assert_true(m.slot_failed && m.op_failed);
        assert_true(m.free_ns - began < 5 * TD_NS_PER_S);
        pair_close(t);
    }
}

/* A completion channel that cannot be armed wakes nobody: its links end at once, and nobody
 * sleeps on them. Before, the result was not looked at. */
static void a_channel_that_cannot_be_armed_ends_its_links(void **state)
{
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&plain);
    whole(t, 3);
    go_half(t, &m, N_DATA, WAIT_MS);
    uint64_t began = td_now_ns();
    atomic_store(&spy_arm_error, EIO); /* both sides are idle in mid-transfer: whoever looks at
                                          its timers next cannot go back to sleep */
    WAIT_FOR(stats(&t->p).conns_by_path[TD_XFER_PATH_RDMA] == 0);
    the_rest(t, &m);
    finish(t, &m, true);
    atomic_store(&spy_arm_error, 0);
    assert_true(m.slot_failed && m.op_failed);
    assert_true(td_now_ns() - began < WAIT_MS * TD_NS_PER_MS / 2); /* and not by the deadline */
    pair_close(t);
}

static void ports_go_down_and_up(void **state)
{
    struct transfer m;
    struct td_err err = {0};
    (void)state;
    struct pair *t = pair_open(&plain);
    whole(t, 3);
    for (int round = 0; round < 2; round++) {
        struct end *e = round ? &t->d : &t->p;
        go_half(t, &m, N_DATA, WAIT_MS);
        assert_true(td_fake_port_set(e->f, td_fake_node(e->f), 0, 1, false));
        the_rest(t, &m);
        finish(t, &m, true);
        assert_true(m.slot_failed && m.op_failed);
        expect_text(m.op_end.reason, "no usable RDMA device");
        if (round) {
            grant(t, &m, 3, WAIT_MS);
            assert_int_equal(try_op(t, &m, WAIT_MS, &err), TD_ERR_UNSUPPORTED);
            td_xfer_revoke(t->d.x, m.slot, "never used");
            finish(t, &m, false);
        }
        uint64_t n = stats(e).n_async_events;
        assert_true(td_fake_port_set(e->f, td_fake_node(e->f), 0, 1, true));
        WAIT_FOR(stats(e).n_async_events > n);
        whole(t, 9);
    }
    pair_close(t);
}

/* Another address becomes the best one: links on the old one end, and the transfer goes on over
 * new ones. */
static void an_address_changes(void **state)
{
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&plain);
    whole(t, 3);
    for (int round = 0; round < 4; round++) {
        struct end *e = round & 1 ? &t->d : &t->p;
        go_half(t, &m, N_DATA, WAIT_MS);
        assert_true(td_fake_gid_set(e->f, 0, 1, 5, round & 2 ? TD_FAKE_GID_EMPTY : TD_FAKE_GID_V4,
                                    TD_VB_GID_ROCE_V2, true));
        the_rest(t, &m);
        finish(t, &m, true);
        if (!m.ready || !m.done)
            fail_msg("round %d: %s, %s", round, m.slot_end.reason, m.op_end.reason);
        whole(t, 5);
    }
    pair_close(t);
}

/* InfiniBand: the subnet manager gives a port another LID. Peers send to the old one until they
 * are told, so its links end and the next set-up tells them. */
static void a_lid_changes(void **state)
{
    static const struct setup ib = {.side = {{.fake = "infiniband=1"}, {.fake = "infiniband=1"}},
                                    .qps = 1};
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&ib);
    whole(t, 3);
    for (int round = 0; round < 4; round++) {
        struct end *e = round & 1 ? &t->d : &t->p, *peer = round & 1 ? &t->p : &t->d;
        uint16_t before = live_qp(peer, 0, 0).route.remote_lid;
        go_half(t, &m, N_DATA, WAIT_MS);
        pthread_mutex_lock(&e->lock);
        if (round < 2) e->lid_more += SPY_LIDS; /* else an event without a change: nothing ends */
        uint16_t more = e->lid_more;
        pthread_mutex_unlock(&e->lock);
        uint32_t n_events = (uint32_t)stats(e).n_async_events;
        assert_true(td_fake_async(
            e->f, 0, &(struct td_vb_async){.kind = TD_VB_ASYNC_LID_CHANGE, .port = 1}));
        WAIT_FOR(stats(e).n_async_events > n_events);
        the_rest(t, &m);
        finish(t, &m, true);
        if (!m.ready || !m.done)
            fail_msg("round %d: %s, %s", round, m.slot_end.reason, m.op_end.reason);
        whole(t, 5);
        assert_int_equal(live_qp(peer, 0, 0).route.remote_lid, before % SPY_LIDS + more);
        if (round >= 2) assert_int_equal(live_qp(peer, 0, 0).route.remote_lid, before);
    }
    uint32_t n_qps = t->p.n_qps;
    whole(t, 5);
    assert_int_equal(t->p.n_qps, n_qps);
    assert_int_equal(n_qps, 3); /* the first, and one for each change */
    pair_close(t);
}

/* --- 2: bytes that land late ------------------------------------------------------------------ */

static uint32_t n_live_qps(struct end *e)
{
    uint32_t n = 0;
    pthread_mutex_lock(&e->lock);
    for (uint32_t i = 0; i < e->n_qps; i++) n += e->qp[i].qp != NULL;
    pthread_mutex_unlock(&e->lock);
    return n;
}

/* No event comes for a while. That is no proof, but a broken engine answers within microseconds. */
static void expect_silence(struct pair *t, uint64_t ms)
{
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), ms); td_now_ns() < until;) {
        if (take_events(t, false)) fail_msg("an event before the writer was retired or fenced");
        poll(NULL, 0, 1);
    }
}

/* All requests of a transfer are in the network, none of them at the receiver. */
static void go_held(struct pair *t, struct transfer *m)
{
    grant(t, m, N_DATA, WAIT_MS);
    op(t, m, WAIT_MS);
    td_fake_hold(t->p.f, TD_FAKE_ALL);
    assert_int_equal(submit(t, m, 0, N_DATA, true), TD_OK);
    WAIT_FOR(counters(&t->d).held == N_DATA + 1);
}

/* Releases what is held; none of it may land. */
static void release_late(struct pair *t)
{
    struct td_fake_counters before = counters(&t->d);
    td_fake_hold(t->d.f, 0);
    WAIT_FOR(counters(&t->d).held == 0);
    struct td_fake_counters after = counters(&t->d);
    assert_int_equal(after.writes_dropped_late - before.writes_dropped_late, before.held);
    assert_int_equal(after.bytes_landed, before.bytes_landed);
    check_poison(t);
}

static void a_dead_writers_bytes_land_nowhere(void **state)
{
    struct transfer m;
    struct td_err err = {0};
    (void)state;
    struct pair *t = pair_open(&one_qp);
    for (int round = 0; round < 2; round++) { /* the slot is revoked before its writer dies, or
                                                 after */
        whole(t, 3);
        go_held(t, &m);
        if (round) {
            td_xfer_revoke(t->d.x, m.slot, "changed its mind");
            expect_silence(t, 30);
        }
        uint64_t n_fenced = stats(&t->d).n_fenced, died = td_now_ns();
        end_close(&t->p);
        TAKE_UNTIL(t, false, m.slot_free);
        assert_true(m.free_ns - died >= 4 * (UINT64_C(4096) << IB_TIMEOUT)); /* the quarantine */
        assert_true(m.free_ns - died < 5 * TD_NS_PER_S);
        assert_int_equal(n_live_qps(&t->d), 0);
        assert_int_equal(stats(&t->d).n_fenced, n_fenced + 1);
        assert_int_equal(stats(&t->d).n_slots_used, 0);
        forget(&m);
        /* the next owner has the blocks */
        struct transfer next;
        grant(t, &next, N_DATA, WAIT_MS);
        release_late(t);
        td_xfer_revoke(t->d.x, next.slot, "");
        finish(t, &next, false);
        if (end_open(&t->p, &t->s, &t->s.side[0], NULL, &t->wakeup, &err))
            fail_msg("sender: %s", err.msg);
    }
    whole(t, 12);
    pair_close(t);
}

/* The sender lives and its requests do not move: no event until they have ended, one way or the
 * other. */
static void a_stuck_writer_is_waited_for_or_fenced(void **state)
{
    static const struct setup impatient = {.qps = 1, .timeout_ms = 1000};
    struct transfer m;
    (void)state;
    for (int round = 0; round < 6; round++) { /* who ends it; the network moves again, or never;
                                                 or the queue pair itself is stuck */
        struct pair *t = pair_open(&impatient);
        bool cancel = round & 1, moves = round < 2, stalls = round >= 4;
        whole(t, 3);
        if (stalls) {
            rule(&t->p, TD_FAKE_STALL, N_DATA / 2, 0, 0);
            grant(t, &m, N_DATA, WAIT_MS);
            op(t, &m, WAIT_MS);
            uint64_t landed = counters(&t->d).writes_landed;
            assert_int_equal(submit(t, &m, 0, N_DATA, true), TD_OK);
            WAIT_FOR(counters(&t->d).writes_landed == landed + N_DATA / 2 - 1);
        } else {
            go_held(t, &m);
        }
        uint64_t ended = td_now_ns(), n_fenced = stats(&t->d).n_fenced;
        if (cancel)
            td_xfer_cancel(t->p.x, m.op, "not wanted any more");
        else
            td_xfer_revoke(t->d.x, m.slot, "given to another");
        expect_silence(t, 100);
        assert_int_equal(n_live_qps(&t->d), 1);
        if (moves) {
            td_fake_hold(t->d.f, 0);
            finish(t, &m, true);
            assert_int_equal(stats(&t->d).n_fenced, n_fenced); /* the writer retired by itself */
            assert_int_equal(stats(&t->p).conns_by_path[TD_XFER_PATH_RDMA], 1);
        } else {
            TAKE_UNTIL(t, false, m.slot_free && m.op_failed);
            assert_int_equal(n_live_qps(&t->d), 0);
            assert_int_equal(stats(&t->d).n_fenced, n_fenced + 1);
            assert_true(m.free_ns - ended >= TD_NS_PER_S && m.free_ns - ended < 8 * TD_NS_PER_S);
            finish(t, &m, true);
            release_late(t);
        }
        assert_true(m.op_failed);
        expect_text(m.op_end.reason, cancel ? "not wanted any more" : "given to another");
        /* else all of it may come after the cancel, and be right */
        if (cancel && !moves) assert_true(m.slot_failed);
        whole(t, 12);
        pair_close(t);
    }
}

/* A writer that was fenced is in its quarantine although a later attempt has filled the slot: it
 * is neither ready nor free before that is over. */
static void a_quarantine_outlives_the_next_attempt(void **state)
{
    static const struct setup slow = {.qps = 1, .ib_timeout = 15}; /* 4 x 134 ms */
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&slow);
    whole(t, 3);
    go_half(t, &m, N_DATA, WAIT_MS);
    uint64_t broke = td_now_ns();
    assert_true(td_fake_qp_break(t->p.f, live_qp(&t->p, 0, 0).num, true));
    the_rest(t, &m);
    /* all of the second attempt is there */
    WAIT_FOR(stats(&t->p).bytes_sent >= (3 + N_DATA / 2 + N_DATA) * t->s.block_bytes);
    TAKE_UNTIL(t, false, m.ready);
    assert_true(td_now_ns() - broke >= 4 * (UINT64_C(4096) << 15));
    finish(t, &m, true);
    assert_true(m.ready && m.done);
    whole(t, 3);
    pair_close(t);
}

/* --- 3: what devices allow -------------------------------------------------------------------- */

/* Small transfers, `depth` of them under way at any time. */
static void many(struct pair *t, int n_total, int depth)
{
    struct transfer *m = calloc((size_t)depth, sizeof *m);
    bool live[MAX_TRANSFERS] = {0};
    int n_started = 0, n_ended = 0;
    uint64_t until = td_deadline_after_ms(td_now_ns(), 8 * WAIT_MS);
    assert_non_null(m);
    while (n_ended < n_total) {
        if (td_now_ns() > until) fail_msg("%d of %d ended", n_ended, n_total);
        for (int i = 0; i < depth && n_started < n_total; i++) {
            if (live[i]) continue;
            grant_run(t, &m[i], i, 1, 8 * WAIT_MS);
            op(t, &m[i], 8 * WAIT_MS);
            assert_int_equal(submit(t, &m[i], 0, 1, true), TD_OK);
            live[i] = true;
            n_started++;
        }
        if (!take_events(t, false))
            td_wakeup_wait(&t->wakeup, td_deadline_after_ms(td_now_ns(), 2));
        for (int i = 0; i < depth; i++) {
            if (!live[i] || !m[i].slot_free || !(m[i].done || m[i].op_failed)) continue;
            if (!m[i].ready || !m[i].done)
                fail_msg("%d: %s, %s", n_ended, m[i].slot_end.reason, m[i].op_end.reason);
            forget(&m[i]);
            live[i] = false;
            n_ended++;
        }
    }
    free(m);
    check_poison(t);
    assert_int_equal(stats(&t->d).n_slots_used, 0);
    assert_int_equal(stats(&t->p).n_ops_used, 0);
}

/* RNR is an error here (rnr_retry 0): a word that found no receive would break the connection. */
static void small_transfers_at_full_depth(void **state)
{
    static const struct setup setups[] = {
        {.max_slots = 40, .block_bytes = 512, .rnr_waits = false},
        {.max_slots = 40, .block_bytes = 512, .srq_peers = 1},
        {.max_slots = 40,
         .block_bytes = 512,
         .side = {{.fake = "tiny=1"}, {.fake = "tiny=1,unordered=1"}}},
        {.max_slots = 40,
         .block_bytes = 512,
         .side = {{.fake = "max_qp_wr=16"}, {.fake = "max_srq_wr=8"}},
         .srq_peers = 1,
         .rnr_waits = true},
    };
    (void)state;
    for (size_t i = 0; i < sizeof setups / sizeof setups[0]; i++) {
        struct pair *t = pair_open(&setups[i]);
        many(t, i == 0 ? 2000 : 400, 40);
        if (!setups[i].rnr_waits) assert_int_equal(counters(&t->d).rnr, 0);
        assert_int_equal(counters(&t->d).cq_overruns + counters(&t->p).cq_overruns, 0);
        assert_int_equal(stats(&t->p).n_rail_errors + stats(&t->d).n_rail_errors, 0);
        for (uint32_t k = 0; k < t->d.n_qps; k++)
            assert_int_equal(t->d.qp[k].shared, setups[i].srq_peers == 1);
        pair_close(t);
    }
}

static void tiny_devices_carry_large_transfers(void **state)
{
    static const struct setup setups[] = {
        {.side = {{.fake = "tiny=1"}, {.fake = "tiny=1"}}, .qps = 4},
        {.side = {{.fake = "tiny=1,unordered=1"}, {.fake = "unordered=1,relaxed=1"}}},
        {.side = {{.fake = "relaxed=1"}, {.fake = "tiny=1,unordered=1,relaxed=1"}},
         .digest_every = 1},
        {.side = {{.fake = "infiniband=1"}, {.fake = "infiniband=1"}}, .qps = 3},
        {.side = {{.fake = "mtu=256,max_sge=3"}, {.fake = "mtu=1024,max_qp_wr=8"}},
         .bytes_in_flight = 1},
    };
    (void)state;
    for (size_t i = 0; i < sizeof setups / sizeof setups[0]; i++) {
        struct pair *t = pair_open(&setups[i]);
        struct transfer m;
        for (int k = 0; k < 5; k++) whole(t, 1 + 9 * k);
        grant_run(t, &m, 3, 40, WAIT_MS); /* one run over the border of two registrations */
        op(t, &m, WAIT_MS);
        assert_int_equal(submit(t, &m, 0, 40, true), TD_OK);
        finish(t, &m, true);
        assert_true(m.ready && m.done);
        assert_int_equal(stats(&t->p).n_rail_errors + stats(&t->d).n_rail_errors, 0);
        pair_close(t);
    }
}

static const struct {
    struct setup s;
    uint32_t max_reg;
    td_status status;
    const char *text[3];
} limits[] = {
    {{.side[0].fake = "tiny=1", .block_bytes = 2u << 20},
     0,
     TD_ERR_UNSUPPORTED,
     {"a block has 2097152 bytes", "at most 1048576", ""}},
    {{.side[0].fake = "max_mr_bytes=524288,devices=8", .block_bytes = 512u << 10, .n_blocks = 97},
     0,
     TD_ERR_UNSUPPORTED,
     {"needs 97 registrations", "8 devices", "more than 768"}},
    {{.side[0].fake = "max_mr_bytes=524288", .block_bytes = 256u << 10, .n_blocks = 20},
     7,
     TD_ERR_DEVICE,
     {"device fake0", "Cannot allocate memory", "locked-memory limit"}},
    {{.side[0].fake = "max_cqe=100"},
     0,
     TD_ERR_UNSUPPORTED,
     {"device fake0", "100 completions (max_cqe)", "too few"}},
    {{.side[0].fake = "max_qp_wr=1"},
     0,
     TD_ERR_UNSUPPORTED,
     {"device fake0", "1 work requests (max_qp_wr)", "too few"}},
    {{.side[0].devices = "fake0,mlx5_9"},
     0,
     TD_ERR_DEVICE,
     {"device mlx5_9", "No such device", ""}},
    {{.side[0].devices = ",fake0"}, 0, TD_ERR_INVALID, {"separated by commas", "", ""}},
    {{.qps = 5}, 0, TD_ERR_INVALID, {"qps_per_rail 5", "", ""}},
};

/* What a device cannot do is refused when the endpoint is opened, with the numbers. */
static void limits_are_refused_by_name(void **state)
{
    struct td_wakeup wakeup;
    (void)state;
    assert_int_equal(td_wakeup_open(&wakeup, NULL), TD_OK);
    for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
        struct end *e = calloc(1, sizeof *e);
        struct td_err err = {0};
        struct setup s = limits[i].s;
        assert_non_null(e);
        setup_complete(&s);
        fabric_new();
        spy_max_reg = limits[i].max_reg;
        td_status status = end_open(e, &s, &s.side[0], NULL, &wakeup, &err);
        spy_max_reg = 0;
        if (status != limits[i].status)
            fail_msg("case %zu: status %d: %s", i, (int)status, err.msg);
        for (int k = 0; k < 3; k++) expect_text(err.msg, limits[i].text[k]);
        end_close(e);
        if (!limits[i].s.side[0].devices && !limits[i].s.qps) {
            /* auto goes on without what cannot serve, and says the same */
            s.side[0].path = TD_XFER_PATH_AUTO;
            spy_max_reg = limits[i].max_reg;
            status = end_open(e, &s, &s.side[0], NULL, &wakeup, &err);
            spy_max_reg = 0;
            if (status) fail_msg("case %zu, auto: %s", i, err.msg);
            take_path_news(e);
            assert_int_equal(e->n_not_had, 1);
            assert_int_equal(e->path.path, TD_XFER_PATH_RDMA);
            assert_int_equal(e->path.status, limits[i].status);
            for (int k = 0; k < 3; k++) expect_text(e->path.reason, limits[i].text[k]);
            end_close(e);
        }
        free(e);
        unlink(fabric_path);
    }
    td_wakeup_close(&wakeup);
}

static bool goes_by_both_rails(struct pair *t, struct transfer *m)
{
    grant(t, m, 5, WAIT_MS);
    op(t, m, WAIT_MS);
    assert_int_equal(submit(t, m, 0, 5, true), TD_OK);
    finish(t, m, true);
    assert_true(m->ready && m->done);
    return m->slot_end.path == TD_XFER_PATH_RDMA && n_live_on(&t->p, 0) && n_live_on(&t->p, 1);
}

/* A pool that cannot be registered (locked memory, mostly) does not keep a worker from starting
 * on auto: without any rail the blocks go by tcp, without one of two by the other; and when it
 * can be registered later, the rail is there. */
static void a_pool_that_cannot_be_registered_leaves_its_rail_out(void **state)
{
    (void)state;
    for (int round = 0; round < 2; round++) {
        struct setup s = two_rails;
        struct transfer m;
        for (int i = 0; i < 2; i++) s.side[i].path = AUTO;
        spy_max_reg = round ? 3 : 2; /* the first two are of probes */
        struct pair *t = pair_open(&s);
        take_path_news(&t->p);
        spy_max_reg = 0;
        if (t->p.n_not_had != (round ? 1 : 2))
            fail_msg("round %d: told %u times: %s", round, t->p.n_not_had, t->p.path.reason);
        expect_text(t->p.path.reason, "registering");
        expect_text(t->p.path.reason, "Cannot allocate memory");
        assert_false(goes_by_both_rails(t, &m));
        assert_int_equal(m.slot_end.path, round ? TD_XFER_PATH_RDMA : TD_XFER_PATH_TCP);
        WAIT_FOR(goes_by_both_rails(t, &m));
        pair_close(t);
    }
}

/* What doctor tells of a device comes from td_rdma_plan and td_rdma_settle: the engine asks the
 * device for that and for nothing else. */
static void a_device_is_asked_for_what_was_planned(void **state)
{
    static const struct setup setups[] = {
        {.qps = 0},
        {.side = {{.fake = "tiny=1"}, {.fake = "mtu=1024,max_qp_wr=8,max_sge=3"}}},
        {.side = {{.fake = "rd_atomic=1,mtu=2048"}, {.fake = "max_cqe=9000,rd_atomic=8"}},
         .qps = 3},
        {.side = {{.fake = "infiniband=1,max_srq_wr=100"}, {.fake = "infiniband=1"}},
         .srq_peers = 1},
    };
    (void)state;
    for (size_t k = 0; k < sizeof setups / sizeof setups[0]; k++) {
        struct pair *t = pair_open(&setups[k]);
        struct end *both[] = {&t->p, &t->d};
        struct td_rdma_plan plan[2];
        whole(t, 7);
        for (int i = 0; i < 2; i++) {
            struct td_vb_limits l;
            struct td_vb_port port;
            assert_int_equal(both[i]->real->query(both[i]->device[0], &l), 0);
            assert_int_equal(both[i]->real->query_port(both[i]->device[0], 1, &port), 0);
            assert_int_equal(td_rdma_plan("fake0", &l, &port, &plan[i], NULL), TD_OK);
        }
        for (int i = 0; i < 2; i++) {
            const struct td_rdma_plan *a = &plan[i], *b = &plan[1 - i];
            struct td_vb_route want = {0};
            struct td_rdma_side ours = {a->ethernet, a->mtu_bytes, a->rd_atomic_in,
                                        a->rd_atomic_out};
            struct td_rdma_side theirs = {b->ethernet, b->mtu_bytes, b->rd_atomic_in,
                                          b->rd_atomic_out};
            assert_int_equal(td_rdma_settle(&ours, &theirs, &want, NULL), TD_OK);
            pthread_mutex_lock(&both[i]->lock);
            assert_int_equal(both[i]->n_qps, setups[k].qps ? setups[k].qps : a->n_qps);
            for (uint32_t q = 0; q < both[i]->n_qps; q++) {
                const struct qp_seen *s = &both[i]->qp[q];
                assert_int_equal(s->caps.send_wr, a->send_depth);
                assert_int_equal(s->caps.recv_wr, s->shared ? 0 : a->recv_depth);
                assert_int_equal(s->caps.send_sge, a->n_sge);
                assert_int_equal(s->route.mtu_bytes, want.mtu_bytes);
                assert_int_equal(s->route.ethernet, want.ethernet);
                assert_int_equal(s->route.rd_atomic_in, want.rd_atomic_in);
                assert_int_equal(s->route.rd_atomic_out, want.rd_atomic_out);
                assert_int_equal(s->route.hop_limit, want.hop_limit);
                assert_int_equal(s->route.min_rnr_timer, want.min_rnr_timer);
            }
            pthread_mutex_unlock(&both[i]->lock);
        }
        pair_close(t);
    }
}

/* The completion queue has room for one queue pair, and two are wanted: that link is refused,
 * with the number, and no other harm is done. */
static void a_full_completion_queue_refuses_links(void **state)
{
    static const struct setup small = {.side = {{.fake = "max_cqe=400"}}};
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&small);
    for (int i = 0; i < 3; i++) {
        grant(t, &m, 3, WAIT_MS);
        op(t, &m, WAIT_MS);
        TAKE_UNTIL(t, false, m.op_failed);
        expect_text(m.op_end.reason, "its completion queue of 400 holds no more");
        assert_int_equal(n_live_qps(&t->p), 0);
        td_xfer_revoke(t->d.x, m.slot, "");
        finish(t, &m, true);
    }
    pair_close(t);
}

/* More peers than SRQ mode starts at. All of them are senders on one node of the fabric. */
static void seventy_peers(void **state)
{
    enum { N = 70 };
    static const struct setup crowd = {.srq_peers = 3,
                                       .max_slots = 4,
                                       .block_bytes = 4096,
                                       .n_blocks = N,
                                       .timeout_ms = 10000 * SLOW * SLOW};
    static struct end extra[N];
    (void)state;
    struct pair *t = pair_open(&crowd);
    struct td_err err = {0};
    struct td_xfer *x = t->p.x;
    struct td_arena arena = t->p.arena;
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < N; i++) {
            if (!round && end_open(&extra[i], &t->s, &t->s.side[0], t->p.f, &t->wakeup, &err))
                fail_msg("sender %d: %s", i, err.msg);
            struct transfer m;
            memset(&m, 0, sizeof m);
            m.dst[0] = (i + round) % N;
            grant_blocks(t, &m, 1, WAIT_MS);
            t->p.x = extra[i].x; /* the helpers drive the pair's sender */
            t->p.arena = extra[i].arena;
            op(t, &m, WAIT_MS);
            assert_int_equal(submit(t, &m, 0, 1, true), TD_OK);
            finish(t, &m, true);
            t->p.x = x;
            t->p.arena = arena;
            if (!m.ready || !m.done)
                fail_msg("sender %d: %s, %s", i, m.slot_end.reason, m.op_end.reason);
        }
    struct td_xfer_stats s = stats(&t->d);
    assert_int_equal(s.conns_by_path[TD_XFER_PATH_RDMA], N);
    uint32_t n_shared = 0;
    for (uint32_t i = 0; i < t->d.n_qps; i++) n_shared += t->d.qp[i].shared;
    assert_int_equal(n_shared, 2 * (N - 2));
    for (int i = 0; i < N; i++) end_close(&extra[i]);
    pair_close(t);
}

/* --- 4: rails --------------------------------------------------------------------------------- */

static void posted(struct end *e, uint64_t ret_bytes[2])
{
    pthread_mutex_lock(&e->lock);
    memcpy(ret_bytes, e->data_bytes, 2 * sizeof *ret_bytes);
    memset(e->data_bytes, 0, sizeof e->data_bytes);
    pthread_mutex_unlock(&e->lock);
}

/* Both rails are used again, by nobody's doing; and what was there in between is gone. */
static void both_rails_return(struct pair *t)
{
    WAIT_FOR(n_live_on(&t->p, 0) && n_live_on(&t->p, 1) && n_live_on(&t->d, 0) &&
             n_live_on(&t->d, 1) && stats(&t->p).n_conns == 1 && stats(&t->d).n_conns == 1);
    assert_int_equal(n_live_qps(&t->p), 2);
    assert_int_equal(n_live_qps(&t->d), 2);
}

static void both_rails_carry(struct pair *t, bool zero, bool one)
{
    uint64_t bytes[2];
    posted(&t->p, bytes);
    whole(t, 48); /* more than one chain */
    posted(&t->p, bytes);
    if ((bytes[0] > 0) != zero || (bytes[1] > 0) != one)
        fail_msg("rail 0 carried %llu bytes, rail 1 %llu", (unsigned long long)bytes[0],
                 (unsigned long long)bytes[1]);
    assert_int_equal(bytes[0] + bytes[1], (uint64_t)48 * t->s.block_bytes);
}

static void a_bad_rail_is_avoided_for_a_while(void **state)
{
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&two_rails);
    both_rails_carry(t, true, true);
    /* a port goes down in the middle of a transfer: on the sender's side, then on the receiver's */
    for (int round = 0; round < 2; round++) {
        struct end *e = round ? &t->d : &t->p;
        go_half(t, &m, 48, WAIT_MS);
        assert_true(td_fake_port_set(e->f, td_fake_node(e->f), 0, 1, false));
        the_rest(t, &m);
        finish(t, &m, true);
        if (!m.ready || !m.done)
            fail_msg("round %d: %s, %s", round, m.slot_end.reason, m.op_end.reason);
        both_rails_carry(t, false, true);
        uint64_t n = stats(e).n_async_events;
        assert_true(td_fake_port_set(e->f, td_fake_node(e->f), 0, 1, true));
        WAIT_FOR(stats(e).n_async_events > n);
        both_rails_return(t);
        both_rails_carry(t, true, true);
    }
    /* completions fail on one rail */
    grant(t, &m, 48, WAIT_MS);
    struct td_fake_rule r = {
        .fault = TD_FAKE_FAIL_BEFORE, .device = 0, .nth = 3, .status = TD_VB_WC_RETRY_EXC};
    assert_true(td_fake_rule_add(t->p.f, &r));
    uint64_t n_errors = stats(&t->p).n_rail_errors;
    op(t, &m, WAIT_MS);
    assert_int_equal(submit(t, &m, 0, 48, true), TD_OK);
    finish(t, &m, true);
    assert_true(m.ready && m.done);
    assert_int_equal(stats(&t->p).n_rail_errors, n_errors + 1);
    assert_int_equal(n_live_on(&t->p, 0), 0);
    assert_int_equal(n_live_on(&t->p, 1), 1);
    both_rails_return(t); /* it is avoided for a second */
    both_rails_carry(t, true, true);
    pair_close(t);
}

/* Small transfers take the rails in turn, one queue pair and one last word each, alone or side
 * by side; a large one goes by all of them. */
static void transfers_spread_over_rails(void **state)
{
    static const struct setup setups[] = {
        {.side = {{.fake = "devices=2"}, {.fake = "devices=2"}}, .block_bytes = RAIL_BYTES},
        {.side = {{.fake = "devices=3"}, {.fake = "devices=2"}},
         .block_bytes = RAIL_BYTES,
         .qps = 3},
    };
    (void)state;
    for (size_t k = 0; k < sizeof setups / sizeof setups[0]; k++) {
        struct pair *t = pair_open(&setups[k]);
        struct transfer m[12];
        uint64_t bytes[2];
        uint32_t n_homes = k ? 6 : 4, n_words;
        for (uint32_t i = 0; i < n_homes; i++) whole(t, 3);
        for (int together = 0; together < 2; together++) {
            posted(&t->p, bytes);
            n_words = t->p.n_words;
            for (int i = 0; i < 12; i++) {
                grant_run(t, &m[i], 4 * i, 3, WAIT_MS);
                op(t, &m[i], WAIT_MS);
                assert_int_equal(submit(t, &m[i], 0, 1, false), TD_OK);
                assert_int_equal(submit(t, &m[i], 1, 2, true), TD_OK);
                if (together) continue;
                TAKE_UNTIL(t, false, m[i].slot_free && m[i].done);
                assert_true(m[i].ready);
            }
            for (int i = 0; i < 12; i++) TAKE_UNTIL(t, false, m[i].slot_free && m[i].done);
            for (int i = 0; i < 12; i++) forget(&m[i]);
            posted(&t->p, bytes);
            assert_int_equal(bytes[0], 18 * RAIL_BYTES);
            assert_int_equal(bytes[1], 18 * RAIL_BYTES);
            assert_int_equal(t->p.n_words - n_words, 12);
        }
        grant_run(t, &m[0], 4, 32, WAIT_MS); /* 4 MiB: two chains */
        op(t, &m[0], WAIT_MS);
        assert_int_equal(submit(t, &m[0], 0, 32, true), TD_OK);
        finish(t, &m[0], true);
        assert_true(m[0].ready && m[0].done);
        posted(&t->p, bytes);
        assert_int_equal(bytes[0], 16 * RAIL_BYTES);
        assert_int_equal(bytes[1], 16 * RAIL_BYTES);
        pair_close(t);
    }
}

/* A port that is down when its side opens; a device that dies and cannot be opened at once. What
 * is under way meanwhile is not disturbed, its deadline stands, and what starts when the rail is
 * back goes over both. */
static void rails_come_back(void **state)
{
    (void)state;
    for (int round = 0; round < 4; round++) {
        struct setup s = two_rails;
        struct transfer m, late;
        bool dies = round & 1;
        s.side[round / 2].down = !dies;
        struct pair *t = pair_open(&s);
        struct end *e = round / 2 ? &t->d : &t->p;
        if (dies) {
            both_rails_carry(t, true, true);
            refuse_opens(e, 1);
            go_half(t, &m, 40, WAIT_MS);
            td_fake_async(e->f, 1, &(struct td_vb_async){.kind = TD_VB_ASYNC_DEVICE_FATAL});
            the_rest(t, &m);
            finish(t, &m, true);
            assert_true(m.ready && m.done);
        }
        both_rails_carry(t, true, false);
        uint64_t n_errors = stats(&t->p).n_rail_errors + stats(&t->d).n_rail_errors,
                 n_fenced = stats(&t->d).n_fenced;
        grant_run(t, &m, 0, 20, 30 * WAIT_MS);
        op(t, &m, 30 * WAIT_MS);
        assert_int_equal(submit(t, &m, 0, 10, false), TD_OK);
        grant_run(t, &late, 30, 3, 300);
        op(t, &late, 300);
        assert_int_equal(submit(t, &late, 0, 1, false), TD_OK); /* the rest never comes */
        if (!dies) assert_true(td_fake_port_set(e->f, td_fake_node(e->f), 1, 1, true));
        uint64_t began = td_now_ns();
        TAKE_UNTIL(t, false, late.slot_free && late.op_failed);
        assert_int_equal(late.slot_end.status, TD_ERR_DEADLINE);
        assert_true(td_now_ns() - began < 2 * TD_NS_PER_S);
        forget(&late);
        /* m keeps the old one */
        WAIT_FOR(n_live_on(&t->p, 1) && n_live_on(&t->d, 1) &&
                 stats(&t->p).conns_by_path[TD_XFER_PATH_RDMA] == 2);
        if (dies) assert_int_equal(e->n_refused_opens, 1);
        assert_int_equal(submit(t, &m, 10, 10, true), TD_OK);
        TAKE_UNTIL(t, false, m.slot_free && m.done);
        assert_true(m.ready);
        forget(&m);
        both_rails_return(t);
        both_rails_carry(t, true, true);
        assert_int_equal(stats(&t->p).n_rail_errors + stats(&t->d).n_rail_errors, n_errors);
        assert_int_equal(stats(&t->d).n_fenced, n_fenced); /* nothing of it was another attempt */
        pair_close(t);
    }
}

/* One rail's packets go nowhere from the start: that set-up fails, and the next link has the
 * other rail alone. */
static void a_rail_without_a_route_is_left_out(void **state)
{
    static const struct setup impatient = {.side = {{.fake = "devices=2"}, {.fake = "devices=2"}},
                                           .qps = 1,
                                           .timeout_ms = 600,
                                           .block_bytes = RAIL_BYTES,
                                           .bytes_in_flight = 8 * RAIL_BYTES};
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&impatient);
    struct td_fake_rule r = {.fault = TD_FAKE_STALL, .device = 0, .nth = 1};
    assert_true(td_fake_rule_add(t->p.f, &r));
    grant(t, &m, 3, WAIT_MS);
    op(t, &m, WAIT_MS);
    assert_int_equal(submit(t, &m, 0, 3, true), TD_OK);
    finish(t, &m, true);
    if (!m.ready || !m.done) fail_msg("%s, %s", m.slot_end.reason, m.op_end.reason);
    assert_int_equal(stats(&t->p).n_rail_errors, 1);
    assert_int_equal(n_live_on(&t->p, 0), 0);
    both_rails_carry(t, false, true);
    pair_close(t);
}

static void sides_may_have_different_rails(void **state)
{
    static const struct setup setups[] = {
        {.side = {{.fake = "devices=1"}, {.fake = "devices=2"}}, .qps = 1},
        {.side = {{.fake = "devices=3"}, {.fake = "devices=1"}}, .qps = 2},
        {.side = {{.fake = "devices=2", .devices = "fake1"}, {.fake = "devices=1"}}, .qps = 2},
        {.side = {{.fake = "devices=2", .devices = "fake1,fake0"}, {.fake = "devices=4"}},
         .qps = 4},
    };
    (void)state;
    for (size_t i = 0; i < sizeof setups / sizeof setups[0]; i++) {
        struct pair *t = pair_open(&setups[i]);
        for (int k = 0; k < 3; k++) whole(t, 40);
        uint32_t want = i == 3 ? 8 : setups[i].qps;
        assert_int_equal(n_live_qps(&t->p), want);
        assert_int_equal(n_live_qps(&t->d), want);
        pair_close(t);
    }
}

/* A port is down: the sender's, the receiver's, or the receiver's from after the grant on. AUTO
 * takes tcp and says why, and takes rdma again as soon as it is there. */
static void fall_back_while_down(int round)
{
    struct setup both = {.side = {{.path = AUTO}, {.path = AUTO}}};
    struct transfer m;
    struct pair *t = pair_open(&both);
    struct end *e = round ? &t->d : &t->p;
    uint64_t n = stats(e).n_async_events;
    if (round == 2) grant(t, &m, 5, WAIT_MS);
    assert_true(td_fake_port_set(e->f, td_fake_node(e->f), 0, 1, false));
    WAIT_FOR(stats(e).n_async_events > n);
    if (round != 2) grant(t, &m, 5, WAIT_MS);
    op(t, &m, WAIT_MS);
    assert_int_equal(submit(t, &m, 0, 5, true), TD_OK);
    finish(t, &m, true);
    assert_true(m.ready && m.done);
    assert_int_equal(m.slot_end.path, TD_XFER_PATH_TCP);
    assert_int_equal(m.op_end.path, TD_XFER_PATH_TCP);
    take_path_news(&t->p);
    assert_int_equal(t->p.n_not_had, 1);
    assert_int_equal(t->p.n_chosen, 1);
    assert_int_equal(t->p.path.path, TD_XFER_PATH_RDMA);
    assert_int_equal(t->p.path.status, TD_ERR_UNSUPPORTED);
    expect_text(t->p.path.reason,
                round ? "it has no usable RDMA device" : "this side has no usable RDMA device");
    assert_int_equal(stats(&t->p).n_fallbacks, 1);
    n = stats(e).n_async_events;
    assert_true(td_fake_port_set(e->f, td_fake_node(e->f), 0, 1, true));
    WAIT_FOR(stats(e).n_async_events > n);
    whole(t, 5);
    pair_close(t);
}

/* A side that names rdma does not go on without. */
static void refuse_while_down(void)
{
    struct setup one = {.side = {{.path = TD_XFER_PATH_RDMA}, {.path = AUTO}}};
    struct transfer m;
    struct td_err err;
    struct pair *t = pair_open(&one);
    uint64_t n = stats(&t->d).n_async_events;
    assert_true(td_fake_port_set(t->d.f, td_fake_node(t->d.f), 0, 1, false));
    WAIT_FOR(stats(&t->d).n_async_events > n);
    grant(t, &m, 5, WAIT_MS);
    assert_int_equal(try_op(t, &m, WAIT_MS, &err), TD_ERR_UNSUPPORTED);
    expect_text(err.msg, "only rdma is allowed, and it has no usable RDMA device");
    td_xfer_revoke(t->d.x, m.slot, "");
    finish(t, &m, false);
    pair_close(t);
}

/* No device at all, or one whose port is down at the start: refused at once. */
static void refuse_without_device(void)
{
    struct td_wakeup wakeup;
    struct td_err err;
    struct end *e = calloc(1, sizeof *e);
    assert_non_null(e);
    assert_int_equal(td_wakeup_open(&wakeup, NULL), TD_OK);
    fabric_new();
    struct setup s = plain;
    setup_complete(&s);
    s.side[0].devices = "fake3";
    assert_int_equal(end_open(e, &s, &s.side[0], NULL, &wakeup, &err), TD_ERR_DEVICE);
    expect_text(err.msg, "fake3");
    end_close(e);
    free(e);
    unlink(fabric_path);
    td_wakeup_close(&wakeup);
}

static void pains_19_the_path_is_refused_or_told(void **state)
{
    (void)state;
    for (int round = 0; round < 3; round++) fall_back_while_down(round);
    refuse_while_down();
    refuse_without_device();
}

/* --- 5: peers made by hand, which say what no engine says ------------------------------------- */

static void say(int fd, struct td_xfer_frame f, const void *payload)
{
    uint8_t bytes[64 + TD_XFER_PAYLOAD_MAX];
    td_xfer_frame_encode(&f, bytes);
    if (f.length) memcpy(bytes + 64, payload, f.length);
    send(fd, bytes, 64 + f.length, MSG_NOSIGNAL);
}

/* The next frame; false when the other end closed. */
static bool hear(int fd, struct td_xfer_frame *ret_frame, void *ret_payload)
{
    uint8_t header[64];
    if (recv(fd, header, sizeof header, MSG_WAITALL) != sizeof header) return false;
    assert_int_equal(td_xfer_frame_decode(header, ret_frame, NULL), TD_OK);
    return !ret_frame->length ||
           recv(fd, ret_payload, ret_frame->length, MSG_WAITALL) == (ssize_t)ret_frame->length;
}

static void limit_waits(int fd)
{
    struct timeval limit = {.tv_sec = WAIT_MS / 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

enum forged {
    TRUNCATED,
    NO_RAILS,
    MORE_RAILS,
    MORE_QPS,
    WIDE_QPN,
    HUGE_REGION,
    ODD_REGION,
    MANY_REGIONS,
    STALE_TAG,
    TWICE,
    BAD_MTU,
    REFUSAL,
    OTHER_RAIL,
    NO_WINDOWS,
    OUT_OF_TURN,
    N_FORGED
};

/* Changes a right setup of one rail; returns its length. */
static uint32_t forge(struct td_xfer_rdma_setup *s, enum forged f, bool keys)
{
    uint32_t n = TD_XFER_RDMA_SETUP_BYTES + (keys ? 4 : 0);
    switch (f) {
    case TRUNCATED:
        return n - 4;
    case NO_RAILS:
        s->n_rails = 0;
        break;
    case MORE_RAILS:
        s->n_rails = 2;
        s->rail[1] = s->rail[0];
        s->rail[1].index = 1;
        n += keys ? 4 : 0;
        break;
    case MORE_QPS:
        s->n_qps = keys ? 3 : 5;
        break;
    case WIDE_QPN:
        s->rail[0].qpn[0] = 1u << 24;
        break;
    case HUGE_REGION:
        s->region_bytes = (uint64_t)BLOCK_BYTES << 32;
        break;
    case ODD_REGION:
        s->region_bytes++;
        break;
    case MANY_REGIONS:
        s->n_regions = 0x40000001;
        break; /* times 4 it is 4 again, in 32 bits */
    case BAD_MTU:
        s->rail[0].mtu_bytes = 100;
        break;
    case OTHER_RAIL:
        s->rail[0].index = 5;
        break;
    case NO_WINDOWS:
        s->windows = 2;
        break;
    case STALE_TAG:
    case TWICE:
    case REFUSAL:
    case OUT_OF_TURN:
    case N_FORGED:
        break;
    }
    return n;
}

static const char *const answer_refused_for[N_FORGED] = {[TRUNCATED] = "does not fit type",
                                                         [NO_RAILS] = "n_rails is 0",
                                                         [MORE_RAILS] = "not offered",
                                                         [MORE_QPS] = "not what was offered",
                                                         [WIDE_QPN] = "queue pair 0",
                                                         [HUGE_REGION] = "rdma setup: regions of",
                                                         [ODD_REGION] = "rdma setup: regions of",
                                                         [MANY_REGIONS] = "regions on 1 rails",
                                                         [STALE_TAG] = "another connection",
                                                         [TWICE] = "a second answer",
                                                         [BAD_MTU] = "mtu 100",
                                                         [REFUSAL] = "refused: not today",
                                                         [OTHER_RAIL] = "not offered",
                                                         [NO_WINDOWS] = "windows is 2",
                                                         [OUT_OF_TURN] = "out of turn"};

static int listen_somewhere(uint16_t *ret_port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n_a = sizeof a;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    limit_waits(listener);
    assert_int_equal(bind(listener, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(listener, 8), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&a, &n_a), 0);
    *ret_port = ntohs(a.sin_port);
    return listener;
}

/* Shakes hands with a sender as the receiver of grant g; the connection's tag, and the set-up that
 * the sender offers. */
static uint64_t hear_offer(int fd, enum forged f, const struct td_xfer_grant_blob *g,
                           struct td_xfer_rdma_setup *ret_offer)
{
    struct td_xfer_frame frame;
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
    struct td_xfer_hello hello;
    assert_true(hear(fd, &frame, payload));
    assert_int_equal(frame.type, TD_XFER_HELLO);
    assert_int_equal(frame.slot, TD_XFER_PATH_RDMA);
    memcpy(&hello, payload, sizeof hello);
    uint64_t tag = hello.nonce ^ (42 + (uint64_t)f);
    hello = (struct td_xfer_hello){.incarnation = g->incarnation,
                                   .layout_hash = g->layout_hash,
                                   .block_bytes = g->block_bytes,
                                   .nonce = 42 + (uint64_t)f,
                                   .instance = "hand"};
    say(fd,
        (struct td_xfer_frame){
            .type = TD_XFER_HELLO_ACK, .length = sizeof hello, .slot = TD_XFER_PATH_RDMA},
        &hello);
    assert_true(hear(fd, &frame, payload));
    assert_int_equal(frame.type, TD_XFER_RDMA_OFFER);
    memset(ret_offer, 0, sizeof *ret_offer);
    memcpy(ret_offer, payload, frame.length);
    return tag;
}

/* Answers an offer with one that is right but for what is forged. */
static void say_forged_answer(int fd, enum forged f, struct td_xfer_rdma_setup s, uint64_t tag,
                              uint64_t last_tag)
{
    s.n_regions = 1; /* a right answer, from the offer itself */
    s.region_bytes = (uint64_t)N_BLOCKS * BLOCK_BYTES;
    s.base = 4096;
    uint32_t n = forge(&s, f, true);
    struct td_xfer_frame frame = {
        .type = TD_XFER_RDMA_ACCEPT, .length = n, .conn = f == STALE_TAG ? last_tag : tag};
    if (f == OUT_OF_TURN) frame = (struct td_xfer_frame){.type = TD_XFER_DONE, .conn = tag};
    if (f == REFUSAL) {
        say(fd,
            (struct td_xfer_frame){.type = TD_XFER_RDMA_ACCEPT,
                                   .status = TD_ERR_UNSUPPORTED,
                                   .length = 9,
                                   .conn = tag},
            "not today");
    } else if (f == TWICE) { /* in one piece, so that the second is read before anything else
                                happens */
        uint8_t bytes[2 * (64 + TD_XFER_RDMA_SETUP_BYTES + 4)];
        for (int k = 0; k < 2; k++) {
            s.n_qps = (uint8_t)(k + 1);
            td_xfer_frame_encode(&frame, bytes + k * (int)(64 + n));
            memcpy(bytes + k * (int)(64 + n) + 64, &s, n);
        }
        assert_int_equal(send(fd, bytes, 2 * (64 + n), MSG_NOSIGNAL), 2 * (64 + n));
    } else {
        say(fd, frame, &s);
    }
}

/* A receiver by hand. The sender's op fails with the reason, its device keeps nothing, and an
 * honest receiver is served. */
static void forged_answers_are_refused(void **state)
{
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&plain);
    uint16_t port;
    int listener = listen_somewhere(&port);
    uint64_t last_tag = 0;
    for (enum forged f = 0; f < N_FORGED; f++) {
        struct td_xfer_grant_blob g;
        grant(t, &m, 5, WAIT_MS);
        assert_int_equal(td_xfer_grant_decode(m.blob, m.blob_bytes, &g, NULL), TD_OK);
        g.port = port;
        td_xfer_grant_encode(&g, m.blob);
        op(t, &m, WAIT_MS);
        assert_int_equal(submit(t, &m, 0, 5, true), TD_OK);
        while (!m.op_failed) { /* set-ups that fail are tried again, a few times */
            struct pollfd p = {.fd = listener, .events = POLLIN};
            take_events(t, false);
            if (m.op_failed || poll(&p, 1, 5) == 0) continue;
            int fd = accept(listener, NULL, NULL);
            assert_true(fd >= 0);
            limit_waits(fd);
            struct td_xfer_rdma_setup offer;
            uint64_t tag = hear_offer(fd, f, &g, &offer);
            say_forged_answer(fd, f, offer, tag, last_tag);
            struct td_xfer_frame frame;
            uint8_t payload[TD_XFER_PAYLOAD_MAX];
            while (hear(fd, &frame, payload)) {
            } /* until the sender has closed it */
            last_tag = tag;
            close(fd);
        }
        expect_text(m.op_end.reason, answer_refused_for[f]);
        if (f != REFUSAL) assert_true(stats(&t->p).n_bad_frames > 0);
        WAIT_FOR(n_live_qps(&t->p) == 0); /* at once, or when the thread that connects them is
                                             over */
        td_xfer_revoke(t->d.x, m.slot, "");
        finish(t, &m, true);
    }
    close(listener);
    whole(t, 12);
    pair_close(t);
}

static const char *const offer_refused_for[N_FORGED] = {
    [NO_RAILS] = "n_rails is 0",  [MORE_QPS] = "n_qps is 5",
    [WIDE_QPN] = "over 24 bits",  [MANY_REGIONS] = "do not fit",
    [BAD_MTU] = "mtu 100",        [OTHER_RAIL] = "none of the 1 offered rails",
    [NO_WINDOWS] = "windows is 2"};

/* A sender by hand, up to its hello's answer; the connection's tag. */
static int greet_receiver(const struct pair *t, uint64_t *ret_tag)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons(td_xfer_port(t->d.x)),
                            .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    limit_waits(fd);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    struct td_xfer_frame frame;
    uint8_t payload[TD_XFER_PAYLOAD_MAX] = {0};
    struct td_xfer_hello hello = {.incarnation = 1,
                                  .layout_hash = 0x1a70,
                                  .block_bytes = BLOCK_BYTES,
                                  .nonce = 42,
                                  .instance = "hand"};
    say(fd,
        (struct td_xfer_frame){
            .type = TD_XFER_HELLO, .length = sizeof hello, .slot = TD_XFER_PATH_RDMA},
        &hello);
    assert_true(hear(fd, &frame, payload));
    assert_int_equal(frame.type, TD_XFER_HELLO_ACK);
    assert_int_equal(frame.status, 0);
    memcpy(&hello, payload, sizeof hello);
    *ret_tag = hello.nonce ^ 42;
    return fd;
}

/* Offers a set-up that is right but for what is forged. */
static void say_forged_offer(const struct pair *t, int fd, enum forged f, uint64_t tag,
                             uint64_t last_tag)
{
    struct td_xfer_rdma_setup s = {
        .n_rails = 1, .n_qps = 2, .rd_atomic_in = 1, .rd_atomic_out = 1, .recv_wr = 4};
    s.rail[0] = (struct td_xfer_rail){.ethernet = 1, .mtu_bytes = 1024, .qpn = {5, 6}};
    struct td_vb_gid gid;
    assert_int_equal(t->p.real->query_gid(t->p.device[0], 1, 4, &gid), 0);
    memcpy(s.rail[0].gid, gid.raw, sizeof gid.raw);
    struct td_xfer_frame frame = {.type = TD_XFER_RDMA_OFFER,
                                  .length = forge(&s, f, false),
                                  .conn = f == STALE_TAG ? last_tag : tag};
    if (f == OUT_OF_TURN)
        frame = (struct td_xfer_frame){
            .type = TD_XFER_OPEN, .length = 16, .attempt = 1, .handle = 9, .conn = tag};
    say(fd, frame, &s);
    if (f != TWICE) return;
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
    assert_true(hear(fd, &frame, payload));
    assert_int_equal(frame.type, TD_XFER_RDMA_ACCEPT);
    assert_int_equal(frame.status, 0);
    say(fd,
        (struct td_xfer_frame){
            .type = TD_XFER_RDMA_OFFER, .length = TD_XFER_RDMA_SETUP_BYTES, .conn = tag},
        &s);
}

/* What the receiver says until it closes the connection: why, where there is something to say. */
static void check_offer_refused(int fd, enum forged f)
{
    struct td_xfer_frame frame;
    uint8_t payload[TD_XFER_PAYLOAD_MAX] = {0};
    bool answered = false;
    const char *says = offer_refused_for[f];
    while (hear(fd, &frame, payload)) {
        if (frame.type != TD_XFER_RDMA_ACCEPT) continue;
        assert_int_equal(frame.status, f == OTHER_RAIL ? TD_ERR_PEER : TD_ERR_UNSUPPORTED);
        payload[frame.length] = 0;
        expect_text((char *)payload, f == TWICE ? "a second offer" : says ? says : "?");
        answered = true;
    }
    assert_int_equal(answered, f == TWICE || says != NULL);
}

/* A sender by hand: refused with the reason, the device keeps nothing, and nothing is written. */
static void forged_offers_are_refused(void **state)
{
    (void)state;
    struct pair *t = pair_open(&plain);
    uint64_t last_tag = 7, tag;
    whole(t, 3);
    for (enum forged f = 0; f < N_FORGED; f++) {
        /* lawful in an offer, or not said by a sender */
        if (f == MORE_RAILS || f == HUGE_REGION || f == ODD_REGION || f == REFUSAL) continue;
        int fd = greet_receiver(t, &tag);
        struct td_xfer_stats before = stats(&t->d);
        say_forged_offer(t, fd, f, tag, last_tag);
        check_offer_refused(fd, f);
        close(fd);
        WAIT_FOR(stats(&t->d).n_conns == 1);
        assert_true(stats(&t->d).n_bad_frames + stats(&t->d).n_refused_peers >
                    before.n_bad_frames + before.n_refused_peers);
        assert_int_equal(n_live_qps(&t->d), 2); /* the honest sender's */
        last_tag = tag;
    }
    check_poison(t);
    whole(t, 12);
    pair_close(t);
}

/* --- 6: digests ------------------------------------------------------------------------------- */

static void wrong_data(struct end *e, uint32_t n, const void *bytes)
{
    pthread_mutex_lock(&e->lock);
    e->wrong_data = n;
    e->wrong_addr = (uint64_t)(uintptr_t)bytes;
    pthread_mutex_unlock(&e->lock);
}

/* The device brings other bytes than the sender has read: one more attempt, and then the end,
 * with the block's name. Without digests nobody would know. */
static void wrong_bytes_are_never_ready(void **state)
{
    static const struct setup checked = {.qps = 1, .digest_every = 1};
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&checked);
    memset(block(t, &t->p, 0), 0x5a, t->s.block_bytes); /* no source of the first 12 */
    whole(t, 3);
    for (uint32_t n = 1; n <= 2; n++) {
        memset(block(t, &t->p, 0), 0x5a, t->s.block_bytes);
        grant(t, &m, N_DATA, WAIT_MS);
        for (int32_t i = 0; i < N_DATA; i++) assert_int_not_equal(m.src[i], 0);
        op(t, &m, WAIT_MS);
        /* all of the first attempt, and the first of the second */
        wrong_data(&t->p, n == 1 ? 1 : N_DATA + 1, block(t, &t->p, 0));
        uint64_t n_bad = stats(&t->d).n_digest_mismatches;
        assert_int_equal(submit(t, &m, 0, N_DATA, true), TD_OK);
        finish(t, &m, true);
        wrong_data(&t->p, 0, NULL);
        assert_int_equal(stats(&t->d).n_digest_mismatches, n_bad + n);
        if (n == 1) {
            if (!m.ready || !m.done) fail_msg("%s, %s", m.slot_end.reason, m.op_end.reason);
        } else {
            assert_true(m.slot_failed && m.op_failed);
            assert_int_equal(m.slot_end.status, TD_ERR_CORRUPT);
            assert_int_equal(m.op_end.status, TD_ERR_CORRUPT);
            expect_text(m.slot_end.reason, "grant block 0 is not what the sender read");
            expect_text(m.op_end.reason, "grant block 0 is not what the sender read");
        }
        whole(t, 5);
    }
    assert_true(stats(&t->d).n_digests >= 3 + 2 * N_DATA);
    pair_close(t);
}

/* The source changes after submit, between the NIC's reading and the digest's: nothing is ready
 * that is not what the sender digested. The second attempt carries what the sender holds now,
 * which happens to be right here; a source that goes on changing ends as above. */
static void source_bytes_that_change_are_caught(void **state)
{
    static const struct setup checked = {.qps = 1, .digest_every = 1};
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&checked);
    whole(t, 3);
    for (int round = 0; round < 3; round++) {
        uint64_t n_bad = stats(&t->d).n_digest_mismatches, sent = stats(&t->p).bytes_sent;
        grant(t, &m, 3, WAIT_MS);
        op(t, &m, WAIT_MS);
        assert_int_equal(submit(t, &m, 0, 1, false), TD_OK);
        /* so that the rest is posted at once, and digested after that */
        WAIT_FOR(stats(&t->p).bytes_sent == sent + t->s.block_bytes);
        node_fill_bytes(block(t, &t->p, m.src[1]), t->s.block_bytes, 1);
        pthread_mutex_lock(&t->p.lock);
        t->p.change_at = block(t, &t->p, m.src[1]);
        t->p.change_bytes = t->s.block_bytes;
        t->p.change_seed = m.seed + 1;
        t->p.n_changes = 1;
        pthread_mutex_unlock(&t->p.lock);
        assert_int_equal(submit(t, &m, 1, 2, true), TD_OK);
        finish(t, &m, true);
        assert_int_equal(t->p.n_changes, 0);
        assert_int_equal(stats(&t->d).n_digest_mismatches, n_bad + 1);
        /* and its content was compared */
        if (!m.ready || !m.done) fail_msg("%s, %s", m.slot_end.reason, m.op_end.reason);
        whole(t, 5);
    }
    pair_close(t);
}

/* --- 7: what users of other systems suffered, by row of that list ----------------------------- */

static void pains_01_a_stale_grant_reads_and_writes_nothing(void **state)
{
    struct transfer old, now;
    (void)state;
    struct pair *t = pair_open(&plain);
    whole(t, 3);
    grant(t, &old, 6, WAIT_MS);
    td_xfer_revoke(t->d.x, old.slot, "given to another");
    TAKE_UNTIL(t, false, old.slot_free);
    do { /* until the slot's number comes round: its blocks are another's now */
        grant(t, &now, 6, WAIT_MS);
        if (now.slot == old.slot) break;
        td_xfer_revoke(t->d.x, now.slot, "");
        TAKE_UNTIL(t, false, now.slot_free);
        forget(&now);
    } while (true);
    op(t, &old, WAIT_MS);
    submit(t, &old, 0, 6, true);
    TAKE_UNTIL(t, false, old.op_failed);
    assert_int_equal(old.op_end.status, TD_ERR_STALE);
    forget(&old);
    assert_true(stats(&t->d).n_stale_frames > 0);
    for (int32_t i = 0; i < 6; i++)
        assert_true(node_check_bytes(block(t, &t->d, now.dst[i]), t->s.block_bytes,
                                     POISON + (uint64_t)now.dst[i]));
    op(t, &now, WAIT_MS);
    assert_int_equal(submit(t, &now, 0, 6, true), TD_OK);
    finish(t, &now, true);
    assert_true(now.ready && now.done);
    pair_close(t);
}

static void pains_02_an_abort_during_writes_frees_nothing_early(void **state)
{
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&one_qp);
    whole(t, 3);
    go_held(t, &m);
    td_xfer_revoke(t->d.x, m.slot, "the client is gone");
    expect_silence(t, 60);
    td_fake_hold(t->d.f, 0); /* the bytes land in blocks that are still the slot's */
    finish(t, &m, true);
    assert_false(m.ready);
    assert_true(m.op_failed);
    whole(t, 12);
    pair_close(t);
}

static void pains_03_what_is_rejected_holds_nothing(void **state)
{
    struct transfer m[10];
    (void)state;
    struct pair *t = pair_open(&plain);
    for (int warm = 0; warm < 2; warm++) {
        for (int i = 0; i < 10; i++) {
            grant_run(t, &m[i], 4 * i, 4, WAIT_MS);
            if (i % 2) op(t, &m[i], WAIT_MS);
            if (i % 4 == 3) submit(t, &m[i], 0, 2, false);
        }
        uint64_t began = td_now_ns();
        for (int i = 0; i < 10; i++) {
            if (i % 2 && i < 5) td_xfer_cancel(t->p.x, m[i].op, "rejected");
            td_xfer_revoke(t->d.x, m[i].slot, "rejected");
        }
        for (int i = 0; i < 10; i++)
            TAKE_UNTIL(t, false, m[i].slot_free && (i % 2 == 0 || m[i].op_failed));
        assert_true(td_now_ns() - began < 5 * TD_NS_PER_S);
        for (int i = 0; i < 10; i++) forget(&m[i]);
        check_poison(t);
        assert_int_equal(stats(&t->d).n_slots_used, 0);
        assert_int_equal(stats(&t->p).n_ops_used, 0);
        whole(t, 7);
    }
    pair_close(t);
}

/* Whatever of a transfer had been done when its sender died, the receiver's blocks are back
 * within seconds. */
static void pains_04_a_dead_sender_leaks_no_blocks(void **state)
{
    static const struct setup impatient = {.timeout_ms = 2000};
    struct td_err err = {0};
    (void)state;
    struct pair *t = pair_open(&impatient);
    for (int point = 0; point < 4; point++) {
        struct transfer m[3];
        whole(t, 3);
        uint64_t sent = stats(&t->p).bytes_sent;
        for (int i = 0; i < 3; i++) {
            grant_run(t, &m[i], 12 * i, 10, point ? WAIT_MS : 300);
            if (point) op(t, &m[i], WAIT_MS);
            if (point > 1) submit(t, &m[i], 0, 5, false);
            if (point > 2) submit(t, &m[i], 5, 5, false);
        }
        if (point > 1)
            WAIT_FOR(stats(&t->p).bytes_sent == sent + (point - 1) * 15ull * t->s.block_bytes);
        uint64_t died = td_now_ns();
        end_close(&t->p);
        for (int i = 0; i < 3; i++)
            TAKE_UNTIL(t, false,
                       m[i].slot_free ||
                           (point == 1 && !m[i].slot_failed && td_now_ns() - died > TD_NS_PER_S));
        for (int i = 0; i < 3; i++) {
            if (!m[i].slot_free) { /* its OPEN was never said, so only the deadline, or the
                                      caller, ends it */
                td_xfer_revoke(t->d.x, m[i].slot, "");
                TAKE_UNTIL(t, false, m[i].slot_free);
            }
            forget(&m[i]);
        }
        assert_true(td_now_ns() - died < 5 * TD_NS_PER_S);
        check_poison(t);
        assert_int_equal(stats(&t->d).n_slots_used, 0);
        if (end_open(&t->p, &t->s, &t->s.side[0], NULL, &t->wakeup, &err))
            fail_msg("sender: %s", err.msg);
    }
    whole(t, 12);
    pair_close(t);
}

/* What a link's end leaves in the completion channel wakes nobody again: an endpoint without a
 * peer takes no CPU. */
static void who_is_left_alone_sleeps(void **state)
{
    enum {
        LOOK_MS = 200,
        TURNS_MAX = 100
    }; /* awake, it would take thousands, and its timers
          take a few */
    struct td_err err = {0};
    (void)state;
    struct pair *t = pair_open(&plain);
    for (int round = 0; round < 2; round++) {
        struct transfer m;
        struct end *dead = round ? &t->d : &t->p, *left = round ? &t->p : &t->d;
        whole(t, 3);
        go_half(t, &m, N_DATA, WAIT_MS);
        end_close(dead);
        if (round)
            td_xfer_cancel(t->p.x, m.op, "nobody is there");
        else
            td_xfer_revoke(t->d.x, m.slot, "nobody is there");
        TAKE_UNTIL(t, false, round ? m.op_failed : m.slot_free);
        forget(&m);
        WAIT_FOR(n_live_qps(left) == 0);
        unsigned before = atomic_load(&left->n_turns);
        poll(NULL, 0, LOOK_MS); /* looked at for so long */
        unsigned n = atomic_load(&left->n_turns) - before;
        if (n > TURNS_MAX) fail_msg("%u turns in %d ms", n, LOOK_MS);
        if (end_open(dead, &t->s, &t->s.side[round], NULL, &t->wakeup, &err))
            fail_msg("%s", err.msg);
        for (int32_t i = 0; i < t->s.n_blocks && round; i++) poison(t, i);
    }
    whole(t, 3);
    pair_close(t);
}

static void pains_05_a_dead_peer_harms_no_other(void **state)
{
    struct transfer dead, alive;
    struct td_err err = {0};
    (void)state;
    struct pair *t = pair_open(&one_qp);
    struct end *second = calloc(1, sizeof *second);
    struct td_xfer *first = t->p.x;
    struct td_arena arena = t->p.arena;
    assert_non_null(second);
    if (end_open(second, &t->s, &t->s.side[0], NULL, &t->wakeup, &err))
        fail_msg("second sender: %s", err.msg);
    whole(t, 3);
    /* the first sender's transfer is half way in the network when it dies; the second sender's
       is under way too */
    grant_run(t, &dead, 0, 10, WAIT_MS);
    op(t, &dead, WAIT_MS);
    td_fake_hold(t->p.f, live_qp(&t->p, 0, 0).num);
    assert_int_equal(submit(t, &dead, 0, 10, true), TD_OK);
    WAIT_FOR(counters(&t->d).held == 2); /* one run, one word */
    t->p.x = second->x;                  /* which the helpers drive from here on */
    t->p.arena = second->arena;
    grant_run(t, &alive, 20, 10, WAIT_MS);
    op(t, &alive, WAIT_MS);
    assert_int_equal(submit(t, &alive, 0, 5, false), TD_OK);
    td_xfer_close(first);
    td_arena_destroy(&arena);
    td_fake_fabric_close(t->p.f);
    t->p.f = NULL;
    assert_int_equal(submit(t, &alive, 5, 5, true), TD_OK);
    TAKE_UNTIL(t, false, alive.slot_free && alive.done);
    assert_true(alive.ready);
    assert_true(alive.slot_end.elapsed_ns < 10 * TD_NS_PER_S);
    forget(&alive);
    assert_int_equal(stats(&t->d).conns_by_path[TD_XFER_PATH_RDMA], 1);
    TAKE_UNTIL(t, false, dead.slot_free);
    assert_false(dead.ready);
    forget(&dead);
    td_fake_hold(t->d.f, 0);
    WAIT_FOR(counters(&t->d).held == 0);
    check_poison(t);
    t->p.x = NULL;
    t->p.arena.base = NULL;
    end_close(second);
    pair_close(t);
    free(second);
}

/* --- devices that take their time ------------------------------------------------------------- */

/* What an engine calls between two steps comes back although the device's call does not. */
static void callers_are_not_kept(struct pair *t, struct end *e, struct transfer *extra)
{
    WAIT_FOR(at_gate(e));
    assert_int_equal(stats(e).n_bad_frames, 0);
    take_path_news(e);
    take_events(t, false);
    if (e == &t->d) {
        grant_run(t, extra, 40, 1, WAIT_MS);
        td_xfer_revoke(e->x, extra->slot, "not wanted");
    }
    if (!at_gate(e)) fail_msg("gate %d: the callers waited for the device", (int)e->gate);
}

/* The helpers drive the other one from here on. */
static void swap_sender(struct pair *t, struct end *other)
{
    struct td_xfer *x = t->p.x;
    struct td_arena arena = t->p.arena;
    t->p.x = other->x;
    t->p.arena = other->arena;
    other->x = x;
    other->arena = arena;
}

static void go_run(struct pair *t, struct transfer *m, int32_t first, int32_t n)
{
    grant_run(t, m, first, n, WAIT_MS);
    op(t, m, WAIT_MS);
    assert_int_equal(submit(t, m, 0, n, true), TD_OK);
}

static void slow_set_up_keeps_nobody_waiting(void **state)
{
    (void)state;
    for (int round = 0; round < 2 * (GATE_RTS + 1 - GATE_CREATE); round++) {
        /* which call; at which side */
        enum gate gate = (enum gate)(GATE_CREATE + round / 2);
        struct transfer m, extra, other;
        struct td_err err = {0};
        struct pair *t = pair_open(&plain);
        struct end *e = round & 1 ? &t->d : &t->p, *second = calloc(1, sizeof *second);
        assert_non_null(second);
        if (end_open(second, &t->s, &t->s.side[0], NULL, &t->wakeup, &err))
            fail_msg("second sender: %s", err.msg);
        swap_sender(t, second);
        whole(t, 3);
        swap_sender(t, second);

        set_gate(e, gate);
        go_run(t, &m, 0, 12);
        callers_are_not_kept(t, e, &extra);
        if (e == &t->d && gate >= GATE_RTR) { /* who has a connection is served meanwhile */
            swap_sender(t, second);
            go_run(t, &other, 20, 6);
            TAKE_UNTIL(t, false, other.slot_free && other.done);
            assert_true(other.ready && at_gate(e));
            forget(&other);
            swap_sender(t, second);
        }
        set_gate(e, GATE_NONE);
        if (e == &t->d) {
            TAKE_UNTIL(t, false, extra.slot_free);
            forget(&extra);
        }
        finish(t, &m, true);
        if (!m.ready || !m.done)
            fail_msg("gate %d: %s, %s", (int)gate, m.slot_end.reason, m.op_end.reason);
        end_close(second);
        free(second);
        pair_close(t);
    }
}

static void slow_fences_keep_nobody_waiting(void **state)
{
    (void)state;
    struct pair *t = pair_open(&plain);
    for (int round = 0; round < 4; round++) {
        enum gate gate = round / 2 ? GATE_DESTROY : GATE_ERROR;
        struct end *e = round & 1 ? &t->d : &t->p;
        struct transfer m, extra;
        whole(t, 3);
        set_gate(e, gate);
        assert_true(td_fake_qp_break(e->f, live_qp(e, 0, 0).num, true));
        WAIT_FOR(at_gate(e));
        go_run(t, &m, 0, 12); /* on a connection that is about to end, or on the next */
        callers_are_not_kept(t, e, &extra);
        set_gate(e, GATE_NONE);
        if (e == &t->d) {
            TAKE_UNTIL(t, false, extra.slot_free);
            forget(&extra);
        }
        finish(t, &m, true);
        if (!m.ready || !m.done)
            fail_msg("gate %d: %s, %s", (int)gate, m.slot_end.reason, m.op_end.reason);
    }
    pair_close(t);
}

static void *open_gate_later(void *arg)
{
    poll(NULL, 0, 100); /* so that td_xfer_close is likely to wait already: either order must do */
    set_gate(arg, GATE_NONE);
    return NULL;
}

/* No event tells of it: the port is asked when a link is set up. */
static void an_mtu_changes(void **state)
{
    /* at the sender, at the receiver, from then on */
    static const uint32_t mtus[][2] = {{1024, 4096}, {4096, 1024}, {4096, 4096}};
    (void)state;
    struct pair *t = pair_open(&plain);
    whole(t, 5);
    for (size_t i = 0; i < sizeof mtus / sizeof mtus[0]; i++) {
        for (int k = 0; k < 2; k++) {
            struct end *e = k ? &t->d : &t->p;
            pthread_mutex_lock(&e->lock);
            e->mtu_bytes = mtus[i][k];
            pthread_mutex_unlock(&e->lock);
        }
        assert_true(td_fake_qp_break(t->p.f, live_qp(&t->p, 0, 0).num, true));
        WAIT_FOR(n_live_qps(&t->p) == 0 && n_live_qps(&t->d) == 0);
        whole(t, 12);
        assert_int_equal(live_qp(&t->p, 0, 0).route.mtu_bytes,
                         mtus[i][0] < mtus[i][1] ? mtus[i][0] : mtus[i][1]);
        assert_int_equal(live_qp(&t->d, 0, 0).route.mtu_bytes,
                         mtus[i][0] < mtus[i][1] ? mtus[i][0] : mtus[i][1]);
    }
    pair_close(t);
}

/* The peer goes, or this side, while the device has not answered yet. */
static void a_set_up_that_nobody_wants_any_more_leaves_nothing(void **state)
{
    struct transfer m;
    struct td_err err = {0};
    pthread_t opener;
    (void)state;
    struct pair *t = pair_open(&plain);
    for (int round = 0; round < 4; round++) { /* RTR, RTS; at the receiver, at the sender */
        struct end *e = round & 1 ? &t->p : &t->d;
        set_gate(e, round & 2 ? GATE_RTS : GATE_RTR);
        go_run(t, &m, 0, 12);
        WAIT_FOR(at_gate(e));
        if (e == &t->p) assert_int_equal(pthread_create(&opener, NULL, open_gate_later, e), 0);
        end_close(&t->p);
        if (e == &t->p) {
            pthread_join(opener, NULL);
            assert_int_equal(n_live_qps(e), 0);
        } else {
            WAIT_FOR(stats(e).n_conns == 0);
            assert_true(at_gate(e) && n_live_qps(e) > 0);
            set_gate(e, GATE_NONE);
        }
        WAIT_FOR(n_live_qps(&t->d) == 0);
        td_xfer_revoke(t->d.x, m.slot, "its sender is gone");
        finish(t, &m, false);
        if (end_open(&t->p, &t->s, &t->s.side[0], NULL, &t->wakeup, &err))
            fail_msg("sender: %s", err.msg);
        whole(t, 5);
        end_close(&t->p); /* so that the next round sets up a connection */
        WAIT_FOR(stats(&t->d).n_conns == 0);
        if (end_open(&t->p, &t->s, &t->s.side[0], NULL, &t->wakeup, &err))
            fail_msg("sender: %s", err.msg);
    }
    pair_close(t);
}

/* The first cause is what both sides hear, not what followed from it. */
static void pains_06_the_first_reason_reaches_the_other_side(void **state)
{
    struct transfer m;
    (void)state;
    struct pair *t = pair_open(&one_qp);
    whole(t, 3);
    go_half(t, &m, N_DATA, WAIT_MS);
    uint64_t began = td_now_ns();
    td_xfer_cancel(t->p.x, m.op, "out of KV blocks");
    finish(t, &m, true);
    expect_text(m.slot_end.reason, "out of KV blocks");
    go_half(t, &m, N_DATA, WAIT_MS);
    td_xfer_revoke(t->d.x, m.slot, "the client hung up");
    finish(t, &m, true);
    expect_text(m.op_end.reason, "the client hung up");
    grant(t, &m, N_DATA, WAIT_MS);
    rule(&t->p, TD_FAKE_FAIL_BEFORE, 3, TD_VB_WC_REM_ACCESS, 0);
    op(t, &m, WAIT_MS);
    assert_int_equal(submit(t, &m, 0, N_DATA, true), TD_OK);
    finish(t, &m, true);
    expect_text(m.op_end.reason, "remote access error");
    expect_text(m.slot_end.reason, "remote access error");
    assert_true(td_now_ns() - began < 8 * TD_NS_PER_S);
    pair_close(t);
}

/* A long prompt whose blocks lie side by side: requests of 256 KiB and more, and few doorbells. */
static void pains_11_few_requests_for_a_long_prompt(void **state)
{
    static const struct setup large = {.block_bytes = 32u << 10, .n_blocks = 1024};
    static const uint64_t BYTES = UINT64_C(1024) * (32u << 10);
    (void)state;
    struct pair *t = pair_open(&large);
    uint32_t slot, id;
    uint8_t blob[TD_XFER_BLOB_MAX];
    size_t n_blob;
    int32_t n, dst[1024], src[1024];
    struct td_xfer_event e = {0};
    for (int scattered = 0; scattered < 2; scattered++) { /* there; here too: gathered */
        for (int32_t i = 0; i < 1024; i++) dst[i] = i, src[i] = scattered ? (i * 7 + 3) % 1024 : i;
        for (int32_t i = 0; i < 1024; i++)
            node_fill_bytes(block(t, &t->p, src[i]), t->s.block_bytes, (uint64_t)i);
        struct td_xfer_stats before = stats(&t->p);
        assert_int_equal(
            td_xfer_grant(t->d.x, dst, 1024, TD_NEVER_NS, 0, &slot, blob, &n_blob, NULL), TD_OK);
        assert_int_equal(td_xfer_op_start(t->p.x, blob, n_blob, TD_NEVER_NS, 0, &id, &n, NULL),
                         TD_OK);
        assert_int_equal(td_xfer_submit(t->p.x, id, 0, src, 1024, true, NULL, 0), TD_OK);
        WAIT_FOR(next_event(&t->p, &e));
        assert_int_equal(e.kind, TD_XFER_OP_DONE);
        for (int32_t i = 0; i < 1024; i++)
            assert_true(node_check_bytes(block(t, &t->d, i), t->s.block_bytes, (uint64_t)i));
        struct td_xfer_stats after = stats(&t->p);
        uint64_t n_requests = after.n_work_requests - before.n_work_requests,
                 n_bells = after.n_doorbells - before.n_doorbells;
        print_message("%llu requests, %llu doorbells for %llu MiB\n",
                      (unsigned long long)n_requests, (unsigned long long)n_bells,
                      (unsigned long long)BYTES >> 20);
        assert_true(n_requests <= BYTES / (scattered ? 256u << 10 : 512u << 10));
        assert_true(n_bells < n_requests);
        td_xfer_revoke(t->d.x, slot, "");
        do WAIT_FOR(next_event(&t->d, &e));
        while (e.kind != TD_XFER_SLOT_FREE);
    }
    pair_close(t);
}

/* A small transfer that starts when a large one is under way: its bytes pass by. */
static void pains_13_a_small_transfer_passes_a_large_one(void **state)
{
    static const struct setup large = {.block_bytes = 2u << 20, .n_blocks = 48, .qps = 1};
    struct transfer big, small;
    (void)state;
    struct pair *t = pair_open(&large);
    whole(t, 1);
    grant_run(t, &big, 0, 46, WAIT_MS);
    grant_run(t, &small, 47, 1, WAIT_MS);
    op(t, &big, WAIT_MS);
    op(t, &small, WAIT_MS);
    /* Nothing lands before both are there, however long this thread waits for a core. */
    td_fake_hold(t->p.f, TD_FAKE_ALL);
    assert_int_equal(submit(t, &big, 0, 46, true), TD_OK);
    assert_int_equal(submit(t, &small, 0, 1, true), TD_OK);
    td_fake_hold(t->d.f, 0);
    TAKE_UNTIL(t, false, big.slot_free && big.done && small.slot_free && small.done);
    assert_true(big.ready && small.ready);
    assert_true(small.ready_order < big.ready_order);
    forget(&big);
    forget(&small);
    pair_close(t);
}

static const struct CMUnitTest all_tests[] = {
    cmocka_unit_test(every_status_at_every_position),
    cmocka_unit_test(every_status_of_a_pull),
    cmocka_unit_test(attempts_are_bounded),
    cmocka_unit_test(a_bug_costs_its_own_transfer),
    cmocka_unit_test(a_partial_post_is_another_attempt),
    cmocka_unit_test(a_queue_pair_breaks_on_one_side),
    cmocka_unit_test(a_dead_rail_is_left),
    cmocka_unit_test(the_last_rail_dies),
    cmocka_unit_test(silent_death_is_bounded),
    cmocka_unit_test(a_channel_that_cannot_be_armed_ends_its_links),
    cmocka_unit_test(ports_go_down_and_up),
    cmocka_unit_test(an_address_changes),
    cmocka_unit_test(a_lid_changes),
    cmocka_unit_test(a_dead_writers_bytes_land_nowhere),
    cmocka_unit_test(a_stuck_writer_is_waited_for_or_fenced),
    cmocka_unit_test(a_quarantine_outlives_the_next_attempt),
    cmocka_unit_test(small_transfers_at_full_depth),
    cmocka_unit_test(tiny_devices_carry_large_transfers),
    cmocka_unit_test(limits_are_refused_by_name),
    cmocka_unit_test(a_device_is_asked_for_what_was_planned),
    cmocka_unit_test(a_pool_that_cannot_be_registered_leaves_its_rail_out),
    cmocka_unit_test(a_full_completion_queue_refuses_links),
    cmocka_unit_test(seventy_peers),
    cmocka_unit_test(a_bad_rail_is_avoided_for_a_while),
    cmocka_unit_test(transfers_spread_over_rails),
    cmocka_unit_test(rails_come_back),
    cmocka_unit_test(a_rail_without_a_route_is_left_out),
    cmocka_unit_test(sides_may_have_different_rails),
    cmocka_unit_test(slow_set_up_keeps_nobody_waiting),
    cmocka_unit_test(slow_fences_keep_nobody_waiting),
    cmocka_unit_test(an_mtu_changes),
    cmocka_unit_test(a_set_up_that_nobody_wants_any_more_leaves_nothing),
    cmocka_unit_test(forged_answers_are_refused),
    cmocka_unit_test(forged_offers_are_refused),
    cmocka_unit_test(wrong_bytes_are_never_ready),
    cmocka_unit_test(source_bytes_that_change_are_caught),
    cmocka_unit_test(pains_01_a_stale_grant_reads_and_writes_nothing),
    cmocka_unit_test(pains_02_an_abort_during_writes_frees_nothing_early),
    cmocka_unit_test(pains_03_what_is_rejected_holds_nothing),
    cmocka_unit_test(pains_04_a_dead_sender_leaks_no_blocks),
    cmocka_unit_test(who_is_left_alone_sleeps),
    cmocka_unit_test(pains_05_a_dead_peer_harms_no_other),
    cmocka_unit_test(pains_06_the_first_reason_reaches_the_other_side),
    cmocka_unit_test(pains_11_few_requests_for_a_long_prompt),
    cmocka_unit_test(pains_13_a_small_transfer_passes_a_large_one),
    cmocka_unit_test(pains_19_the_path_is_refused_or_told),
};

/* PATTERN: the tests of such names. K/N: every N-th from the K-th on, so that N programs have
 * them all and wait beside each other. */
int main(int argc, char **argv)
{
    enum { N_ALL = sizeof all_tests / sizeof all_tests[0] };
    struct CMUnitTest tests[N_ALL];
    size_t n = 0, part = 1, n_parts = 1;
    if (argc == 2 && sscanf(argv[1], "%zu/%zu", &part, &n_parts) != 2)
        cmocka_set_test_filter(argv[1]);
    TD_ASSERT(part >= 1 && part <= n_parts && n_parts <= N_ALL);
    for (size_t i = part - 1; i < N_ALL; i += n_parts) tests[n++] = all_tests[i];
    int n_failed = _cmocka_run_group_tests("xfer_rdma", tests, n, NULL, NULL);
    while (n_fabrics) { /* of tests that failed */
        n_fabrics--;
        fabric_new();
        unlink(fabric_path);
        n_fabrics--;
    }
    return n_failed;
}
