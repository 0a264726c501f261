/* tandem-bench xfer-core: what the protocol costs a sender per RDMA work request, without a device:
 * for a whole prompt, op_start, the receiver's TARGETS, submit, every td_xfer_core_wr_next in turn
 * over two queue pairs, and every completion. Both cores are in this process.
 *
 *   plan   the core: all of that up to the last work request, in chains of 32
 *   post   each chain made into verbs requests, as rdma.c makes them, and given to the provider in
 *          memory by post_send: queue pairs deep enough for a whole prompt, which the engine would
 *          hand over in the course of the transfer. The provider checks every request and moves no
 *          payload
 *   done   the core, once per completion
 *
 * tandem-bench xfer-core [--repeats 31]: one CSV row per shape and order of blocks; medians (least,
 * greatest) of the repeats. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "bench/bench.h"
#include "common/base/clock.h"
#include "common/base/options.h"
#include "common/base/random.h"
#include "tests/fake/verbs_fake.h"
#include "common/transfer/protocol.h"

#define MAX_REPEATS 1001
#define MAX_WRS (1u << 17)
#define WR_BYTES (1u << 20)
#define CHAIN 32
#define N_QPS 2
#define PIECES 16
#define SPIN_US 20000
#define WAIT_MS 60000

struct side {
    struct td_xfer_core core;
    uint64_t rng;
    struct td_xfer_frame sent; /* the last one */
};

#define MAX_QUEUED 8192 /* requests of a prompt on one queue pair */

static struct td_xfer_wr wrs[MAX_WRS];
static uint64_t n_queued;

static void need(bool ok, const char *what)
{
    if (ok) return;
    fprintf(stderr, "tandem-bench xfer-core: %s failed\n", what);
    exit(1);
}

static uint64_t random_u64(void *ctx)
{
    struct side *s = ctx;
    return td_random_step(&s->rng);
}

static void keep_frame(void *ctx, uint64_t conn, const struct td_xfer_frame *frame,
                       const void *payload)
{
    (void)conn, (void)payload;
    ((struct side *)ctx)->sent = *frame;
}

static void no_handle(void *ctx, uint32_t op, uint64_t handle)
{
    (void)ctx, (void)op, (void)handle;
}

static void side_open(struct side *s, uint64_t block_bytes, int32_t n_pool)
{
    struct td_xfer_core_hooks hooks = {
        .ctx = s, .random_u64 = random_u64, .send = keep_frame, .op_handle = no_handle};
    need(td_xfer_core_create(&s->core, 4, 4, TD_NS_PER_S, 0, &hooks, NULL) == TD_OK, "create");
    td_xfer_core_mem(&s->core, block_bytes, n_pool);
}

static void fill_ids(int32_t *ids, int32_t n, bool shuffled, struct side *s)
{
    for (int32_t i = 0; i < n; i++) ids[i] = i;
    for (int32_t i = n - 1; shuffled && i > 0; i--) {
        int32_t k = (int32_t)(random_u64(s) >> 33) % (i + 1), t = ids[i];
        ids[i] = ids[k];
        ids[k] = t;
    }
}

/* --- the provider ----------------------------------------------------------------------------- */

struct port { /* one side's device */
    struct td_vb_device *device;
    struct td_vb_cq *cq;
    struct td_vb_mr *mr;
    struct td_vb_qp *qp[N_QPS];
    uint8_t *pool; /* never touched */
};

struct nic {
    struct td_fake_fabric *fabric;
    const struct td_verbs *vb;
    struct port p, d;
};

static void port_open(struct nic *v, struct port *o, const char *name, uint64_t bytes)
{
    o->pool = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    need(o->pool != MAP_FAILED, "mapping the pool");
    need(!v->vb->open(v->vb, name, &o->device), "opening the device");
    need(!v->vb->reg(o->device, o->pool, bytes, TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE, &o->mr),
         "registering the pool");
    need(!v->vb->cq_create(o->device, 4 * MAX_QUEUED, &o->cq), "a completion queue");
    for (int q = 0; q < N_QPS; q++) {
        struct td_vb_qp_caps caps = {.send_wr = MAX_QUEUED, .recv_wr = 16, .send_sge = PIECES};
        need(!v->vb->qp_create(o->device, o->cq, &caps, &o->qp[q]) &&
                 !v->vb->qp_init(o->qp[q], 1, 0, TD_VB_REMOTE_WRITE),
             "a queue pair");
    }
}

static void port_connect(struct nic *v, struct port *o, const struct port *peer)
{
    struct td_vb_port port;
    struct td_vb_gid gid;
    need(!v->vb->query_port(peer->device, 1, &port), "the port");
    uint32_t at = 0;
    while (at < port.n_gids &&
           (v->vb->query_gid(peer->device, 1, at, &gid) || gid.type != TD_VB_GID_ROCE_V2))
        at++;
    need(at < port.n_gids, "an address");
    struct td_vb_route route = {.port = 1,
                                .hop_limit = 64,
                                .gid_index = at,
                                .ethernet = true,
                                .mtu_bytes = port.mtu_bytes,
                                .local_psn = 1,
                                .remote_psn = 1,
                                .timeout = 16,
                                .retry = 7,
                                .rnr_retry = 7,
                                .min_rnr_timer = 12,
                                .rd_atomic_in = 1,
                                .rd_atomic_out = 1};
    memcpy(route.remote_gid, gid.raw, sizeof route.remote_gid);
    for (int q = 0; q < N_QPS; q++) {
        route.remote_qp = peer->qp[q]->num;
        need(!v->vb->qp_rtr(o->qp[q], &route) && !v->vb->qp_rts(o->qp[q], &route), "connecting");
    }
}

static void nic_open(struct nic *v, uint64_t bytes)
{
    struct td_fake_options o;
    td_fake_options_default(&o);
    o.devices = 2;
    o.no_copy = true;
    o.spin_us = SPIN_US; /* a NIC does not sleep: else most doorbells were a system call that
                            wakes its thread */
    need(td_fake_fabric_open(&o, &v->fabric, NULL) == TD_OK, "the provider");
    v->vb = td_fake_verbs(v->fabric);
    port_open(v, &v->p, "fake0", bytes);
    port_open(v, &v->d, "fake1", bytes);
    port_connect(v, &v->p, &v->d);
    port_connect(v, &v->d, &v->p);
}

static void port_close(struct nic *v, struct port *o, uint64_t bytes)
{
    for (int q = 0; q < N_QPS; q++) v->vb->qp_destroy(o->qp[q]);
    v->vb->cq_destroy(o->cq);
    v->vb->dereg(o->mr);
    v->vb->close(o->device);
    munmap(o->pool, bytes);
}

static void nic_close(struct nic *v, uint64_t bytes)
{
    port_close(v, &v->p, bytes);
    port_close(v, &v->d, bytes);
    td_fake_fabric_close(v->fabric);
}

/* As rdma.c does it, with one registration a side. */
static void fill(const struct nic *v, const struct td_xfer_core *core, const struct td_xfer_wr *wr,
                 struct td_vb_send *to)
{
    const struct td_xfer_op *op = &core->ops[wr->op];
    uint64_t left = wr->n_bytes;
    to->op = wr->is_imm ? TD_VB_WRITE_IMM : TD_VB_WRITE;
    to->imm = wr->imm;
    to->n_sge = 0;
    to->fence = to->signaled = false;
    to->remote_addr =
        v->d.mr->addr + (wr->is_imm ? 0 : (uint64_t)wr->dst_block * core->block_bytes + wr->offset);
    to->rkey = v->d.mr->rkey;
    for (int32_t i = 0; i < wr->n_blocks; i++) {
        uint64_t at = v->p.mr->addr +
                      (uint64_t)op->src[op->order[wr->order_at + i]] * core->block_bytes +
                      wr->offset;
        uint64_t n = core->block_bytes - wr->offset < left ? core->block_bytes - wr->offset : left;
        struct td_vb_sge *last = to->n_sge ? &to->sge[to->n_sge - 1] : NULL;
        if (last && last->addr + last->bytes == at)
            last->bytes += (uint32_t)n;
        else
            to->sge[to->n_sge++] =
                (struct td_vb_sge){.addr = at, .bytes = (uint32_t)n, .lkey = v->p.mr->lkey};
        left -= n;
    }
}

static void post(struct nic *v, const struct td_xfer_core *core, uint32_t qp,
                 const struct td_xfer_wr *chain, uint32_t n)
{
    struct td_vb_send sends[CHAIN];
    uint32_t n_posted;
    for (uint32_t i = 0; i < n; i++) {
        fill(v, core, &chain[i], &sends[i]);
        sends[i].id = n_queued++;
    }
    sends[n - 1].signaled = true;
    need(!v->vb->post_send(v->p.qp[qp], sends, n, &n_posted), "post_send");
}

/* Takes n completions of one side, all of them good. */
static void take(struct nic *v, struct port *o, uint32_t n)
{
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    struct td_vb_wc wc[64];
    while (n && td_now_ns() < until) {
        int k = v->vb->poll(o->cq, wc, 64);
        need(k >= 0 && (uint32_t)k <= n, "polling");
        for (int i = 0; i < k; i++)
            need(wc[i].status == TD_VB_WC_SUCCESS, td_vb_wc_status_name(wc[i].status));
        n -= (uint32_t)k;
    }
    need(n == 0, "waiting for completions");
}

/* --- one prompt ------------------------------------------------------------------------------- */

struct figures {
    double plan_us, post_us, done_us;
    uint32_t n_wr;
};

/* A grant of dst on d, and an op of it on p over a connection of its own. Adds what the sender's
 * protocol took to *spent, in ns. */
static void one_open(struct side *p, struct side *d, const int32_t *dst, int32_t n, uint64_t conn,
                     uint32_t *ret_slot, uint32_t *ret_op, uint64_t *spent)
{
    struct td_xfer_grant_blob g = {.n_blocks = n, .block_bytes = p->core.block_bytes};
    struct td_xfer_tx tx;
    uint32_t slot, op;
    need(td_xfer_core_grant(&d->core, dst, n, TD_NEVER_NS, 0, &slot, NULL) == TD_OK, "grant");
    g.slot = slot;
    g.generation = d->core.slots[slot].generation;
    memcpy(g.key, d->core.slots[slot].key, sizeof g.key);

    uint64_t t = td_now_ns();
    need(td_xfer_core_op_start(&p->core, &g, TD_NEVER_NS, 0, &op, NULL) == TD_OK, "op_start");
    td_xfer_core_op_attach(&p->core, op, conn, TD_XFER_PATH_RDMA, false);
    *spent += td_now_ns() - t;
    need(td_xfer_core_rx_open(&d->core, conn, TD_XFER_PATH_RDMA, &p->sent, g.key) == TD_OK, "open");
    while (td_xfer_core_targets_of(&d->core, slot, TD_XFER_RUNS_MAX, 0, &tx)) {
        struct td_xfer_run runs[TD_XFER_RUNS_MAX];
        memcpy(runs, tx.payload, tx.frame.length);
        t = td_now_ns();
        need(td_xfer_core_rx_targets(&p->core, conn, &tx.frame, runs,
                                     (int32_t)(tx.frame.length / sizeof runs[0]), n,
                                     false) == TD_OK,
             "targets");
        *spent += td_now_ns() - t;
    }
    *ret_slot = slot;
    *ret_op = op;
}

/* Plans and posts all work requests of conn, a chain at a time from each queue pair in turn, into
 * wrs. Returns how many; the ns that posting took go to *ret_posted. */
static uint32_t one_post(struct nic *v, struct side *p, uint64_t conn, int32_t n,
                         uint32_t *ret_chains, uint32_t *ret_imms, uint64_t *ret_posted)
{
    struct td_xfer_wr_limits limits = {
        .max_bytes = WR_BYTES, .max_pieces = PIECES, .src_region = n, .dst_region = n};
    struct td_xfer_turns turns = {0};
    uint32_t n_wr = 0, n_chains = 0, n_imms = 0;
    uint64_t posted = 0;
    for (uint32_t idle = 0, qp = 0; idle < N_QPS; qp ^= 1) {
        uint32_t before = n_wr;
        while (n_wr < MAX_WRS && n_wr - before < CHAIN &&
               td_xfer_core_wr_next(&p->core, conn, qp, 0, &turns, &limits, &wrs[n_wr]))
            n_wr++;
        idle = n_wr > before ? 0 : idle + 1;
        if (idle) continue;
        for (uint32_t i = before; i < n_wr; i++)
            if (wrs[i].is_imm) need(!v->vb->post_recv(v->d.qp[qp], 0, 1), "post_recv"), n_imms++;
        uint64_t t = td_now_ns();
        post(v, &p->core, qp, &wrs[before], n_wr - before);
        posted += td_now_ns() - t;
        n_chains++;
    }
    *ret_chains = n_chains;
    *ret_imms = n_imms;
    *ret_posted = posted;
    return n_wr;
}

/* Ends the op, the slot and the connection on both sides, and drops their events. */
static void one_close(struct side *p, struct side *d, uint32_t slot, uint32_t op, uint64_t conn,
                      uint64_t now)
{
    struct td_xfer_event e;
    td_xfer_core_op_fail(&p->core, op, TD_ERR_CANCELLED, "measured");
    td_xfer_core_conn_fenced(&d->core, conn, 0);
    td_xfer_core_conn_lost(&d->core, now, conn, TD_ERR_PEER, "measured", TD_XFER_LOST);
    td_xfer_core_revoke(&d->core, slot, "measured");
    td_xfer_core_conn_lost(&p->core, now, conn, TD_ERR_PEER, "measured", TD_XFER_LOST);
    td_xfer_core_tick(&d->core, td_now_ns());
    td_xfer_core_tick(&p->core, td_now_ns());
    while (td_xfer_core_poll(&p->core, &e, 1)) {
    }
    while (td_xfer_core_poll(&d->core, &e, 1)) {
    }
}

/* One prompt. `at`: how often before, so that connections and times do not repeat. */
static struct figures one(struct nic *v, struct side *p, struct side *d, const int32_t *src,
                          const int32_t *dst, int32_t n, uint64_t at)
{
    uint32_t slot, op, n_chains, n_imms;
    uint64_t conn = at + 1, now = td_now_ns(), spent = 0, posted = 0;
    one_open(p, d, dst, n, conn, &slot, &op, &spent);
    uint64_t t = td_now_ns();
    need(td_xfer_core_submit(&p->core, now, op, 0, src, n, true, "", 0) == TD_OK, "submit");
    uint32_t n_wr = one_post(v, p, conn, n, &n_chains, &n_imms, &posted);
    struct figures f = {.n_wr = n_wr,
                        .plan_us = (double)(spent + td_now_ns() - t - posted) / 1e3,
                        .post_us = (double)posted / 1e3};
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < n_wr; i++) bytes += wrs[i].n_bytes;
    take(v, &v->p, n_chains);
    take(v, &v->d, n_imms);
    need(bytes == (uint64_t)n * p->core.block_bytes, "planning every byte once");
    t = td_now_ns();
    for (uint32_t i = 0; i < n_wr; i++)
        td_xfer_core_wr_done(&p->core, wrs[i].op, wrs[i].n_bytes, true);
    f.done_us = (double)(td_now_ns() - t) / 1e3;
    one_close(p, d, slot, op, conn, now);
    return f;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

struct config {
    int64_t repeats;
};
static struct config cfg;

// clang-format off
static const struct td_option options[] = {
    {"repeats", TD_OPT_I64, "31", 1, MAX_REPEATS, NULL, offsetof(struct config, repeats),
     "runs of each shape, whose median is told"},
    {0},
};
// clang-format on

struct core_shape {
    const char *name;
    uint64_t block_bytes;
    int32_t n;
};

static void shape_line(const struct core_shape *shape, bool shuffled, long repeats)
{
    static struct side p, d;
    static struct nic v;
    static double plan[MAX_REPEATS], posts[MAX_REPEATS], both[MAX_REPEATS], done[MAX_REPEATS];
    int32_t n = shape->n;
    uint64_t pool_bytes = shape->block_bytes * (uint64_t)n;
    int32_t *src = calloc((size_t)n, sizeof *src), *dst = calloc((size_t)n, sizeof *dst);
    need(src && dst, "memory");
    p = (struct side){.rng = 1};
    d = (struct side){.rng = 2};
    nic_open(&v, pool_bytes);
    side_open(&p, shape->block_bytes, n);
    side_open(&d, shape->block_bytes, n);
    fill_ids(src, n, shuffled, &p);
    fill_ids(dst, n, shuffled, &d);
    struct figures f = one(&v, &p, &d, src, dst, n, 0); /* first touch */
    for (long i = 0; i < repeats; i++) {
        f = one(&v, &p, &d, src, dst, n, (uint64_t)i + 1);
        plan[i] = f.plan_us;
        posts[i] = f.post_us;
        both[i] = f.plan_us + f.post_us;
        done[i] = f.done_us;
    }
    double *columns[] = {plan, posts, both, done};
    for (int i = 0; i < 4; i++) qsort(columns[i], (size_t)repeats, sizeof plan[0], by_value);
    double mid = plan[repeats / 2], mid_post = posts[repeats / 2];
    long last = repeats - 1;
    printf("%s,%d,%" PRIu64
           ",%s,%u,%.1f,%.1f,%.1f,%.1f,%.1f,%.1f,%.1f,%.1f,%.1f,%.1f,%.1f,%.1f,%ld\n",
           shape->name, n, shape->block_bytes, shuffled ? "shuffled" : "neighbours", f.n_wr, mid,
           plan[0], plan[last], mid * 1e3 / f.n_wr, mid_post, posts[0], posts[last],
           mid_post * 1e3 / f.n_wr, both[repeats / 2], both[0], both[last],
           done[repeats / 2] * 1e3 / f.n_wr, repeats);
    nic_close(&v, pool_bytes);
    td_xfer_core_destroy(&p.core);
    td_xfer_core_destroy(&d.core);
    free(src);
    free(dst);
}

int td_bench_xfer_core(int argc, char **argv)
{
    static const struct core_shape shapes[] = {
        {"llama-8b/32768", 2u << 20, 2048},
        {"64k blocks", 64u << 10, 4096},
        {"4k blocks", 4096, 4096},
    };
    struct td_err err = {0};
    if (td_options_load(options, &cfg, "tandem-bench xfer-core",
                        "what the protocol costs a sender per RDMA work request", argc, argv, NULL,
                        0, NULL, &err))
        return td_die("tandem-bench xfer-core", &err);
    printf("what,blocks,block_bytes,order,work_requests,plan_us,plan_us_least,plan_us_greatest,"
           "plan_ns_per_wr,post_us,post_us_least,post_us_greatest,"
           "post_ns_per_wr,plan_post_us,plan_post_us_least,plan_post_us_greatest,done_ns_per_wr,"
           "repeats\n");
    for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; k++) {
        shape_line(&shapes[k], false, (long)cfg.repeats);
        shape_line(&shapes[k], true, (long)cfg.repeats);
    }
    return 0;
}
