/* verbs_fake_test.c - the provider in memory behaves as reliable queue pairs do, keeps its faults' promises, and outlives a killed peer. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/xfer/verbs_fake.h"

#define PATIENCE_NS (20 * TD_NS_PER_S) /* for what must come: only a broken provider waits it out */
#define BUFFER_BYTES (1u << 20)

extern char **environ;
static const char *program;

/* ---- one end of a connection ---- */

struct info {            /* what ends tell each other */
    uint8_t gid[16];
    uint16_t lid;
    uint32_t qp_num, psn, rkey, node;
    uint64_t addr;
};

struct end_options {
    uint32_t send_wr, recv_wr, cq_depth, srq_wr, device;
    unsigned access;     /* of the memory; 0: everything */
};

struct end {
    const struct td_verbs *vb;
    struct td_vb_device *device;
    struct td_vb_cq *cq;
    struct td_vb_srq *srq;
    struct td_vb_mr *mr;
    struct td_vb_qp *qp;
    uint8_t *memory;
    bool infiniband;
    struct info info, peer;
    struct td_vb_route route;
};

static struct td_fake_fabric *fabric_with(const struct td_fake_options *o)
{
    struct td_fake_fabric *f;
    struct td_err err = {0};
    td_status status = td_fake_fabric_open(o, &f, &err);
    if (status) fail_msg("fabric: %s", err.msg);
    return f;
}

static struct td_fake_options options(void)
{
    struct td_fake_options o;
    td_fake_options_default(&o);
    o.seed = 1;
    return o;
}

static struct td_fake_fabric *fabric(void)
{
    struct td_fake_options o = options();
    return fabric_with(&o);
}

static void end_open(struct end *e, const struct td_verbs *vb, const struct end_options *eo)
{
    struct end_options o = eo ? *eo : (struct end_options){0};
    char name[TD_VB_NAME_MAX];
    struct td_vb_port port;
    *e = (struct end){.vb = vb};
    snprintf(name, sizeof name, "fake%" PRIu32, o.device);
    assert_int_equal(vb->open(vb, name, &e->device), 0);
    assert_int_equal(vb->query_port(e->device, 1, &port), 0);
    e->infiniband = !port.ethernet;
    e->memory = mmap(NULL, BUFFER_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(e->memory, MAP_FAILED);
    unsigned all = TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE | TD_VB_REMOTE_READ;
    struct td_vb_limits limits;
    assert_int_equal(vb->query(e->device, &limits), 0);
    if (limits.max_mw) all |= TD_VB_MW_BIND;
    assert_int_equal(vb->reg(e->device, e->memory, BUFFER_BYTES, o.access ? o.access : all, &e->mr), 0);
    assert_int_equal(vb->cq_create(e->device, o.cq_depth ? o.cq_depth : 1024, &e->cq), 0);
    if (o.srq_wr) assert_int_equal(vb->srq_create(e->device, o.srq_wr, &e->srq), 0);
    struct td_vb_qp_caps caps = {.send_wr = o.send_wr ? o.send_wr : limits.max_qp_wr < 64 ? limits.max_qp_wr : 64,
                                 .recv_wr = o.recv_wr ? o.recv_wr : limits.max_qp_wr < 64 ? limits.max_qp_wr : 64,
                                 .send_sge = limits.max_sge, .inline_bytes = 64, .srq = e->srq};
    assert_int_equal(vb->qp_create(e->device, e->cq, &caps, &e->qp), 0);
    struct td_vb_gid gid;
    uint32_t gid_index = e->infiniband ? 0 : 4;
    assert_int_equal(vb->query_gid(e->device, 1, gid_index, &gid), 0);
    e->info = (struct info){.lid = port.lid, .qp_num = e->qp->num, .psn = (e->qp->num * 7919 + 0xfffff0) & 0xffffff, .rkey = e->mr->rkey, .addr = e->mr->addr,
                            .node = td_fake_node(td_fake_fabric_of(vb))};
    memcpy(e->info.gid, gid.raw, 16);
    e->route = (struct td_vb_route){.port = 1, .gid_index = gid_index, .hop_limit = 64, .ethernet = port.ethernet, .mtu_bytes = 1024,
                                    .local_psn = e->info.psn, .timeout = 14, .retry = 7, .rnr_retry = 7, .min_rnr_timer = 1,
                                    .rd_atomic_in = limits.max_rd_atomic_in > 16 ? 16 : (uint8_t)limits.max_rd_atomic_in,
                                    .rd_atomic_out = limits.max_rd_atomic_out > 16 ? 16 : (uint8_t)limits.max_rd_atomic_out};
}

static void end_route(struct end *e, const struct info *peer)
{
    e->peer = *peer;
    memcpy(e->route.remote_gid, peer->gid, 16);
    e->route.remote_lid = peer->lid;
    e->route.remote_qp = peer->qp_num;
    e->route.remote_psn = peer->psn;
}

static void end_connect(struct end *e, const struct info *peer)
{
    end_route(e, peer);
    assert_int_equal(e->vb->qp_init(e->qp, 1, 0, TD_VB_REMOTE_WRITE | TD_VB_REMOTE_READ), 0);
    assert_int_equal(e->vb->qp_rtr(e->qp, &e->route), 0);
    assert_int_equal(e->vb->qp_rts(e->qp, &e->route), 0);
}

static void end_close(struct end *e)
{
    if (!e->vb) return;
    e->vb->qp_destroy(e->qp);
    e->vb->srq_destroy(e->srq);
    e->vb->cq_destroy(e->cq);
    assert_int_equal(e->vb->dereg(e->mr), 0);
    e->vb->close(e->device);
    munmap(e->memory, BUFFER_BYTES);
    *e = (struct end){0};
}

struct pair { struct td_fake_fabric *f; struct end a, b; };

static void pair_open_with(struct pair *p, const struct td_fake_options *o, const struct end_options *a, const struct end_options *b)
{
    p->f = fabric_with(o);
    end_open(&p->a, td_fake_verbs(p->f), a);
    end_open(&p->b, td_fake_verbs(p->f), b);
    end_connect(&p->a, &p->b.info);
    end_connect(&p->b, &p->a.info);
}

static void pair_open(struct pair *p)
{
    struct td_fake_options o = options();
    pair_open_with(p, &o, NULL, NULL);
}

static void pair_close(struct pair *p)
{
    end_close(&p->a);
    end_close(&p->b);
    td_fake_fabric_close(p->f);
}

/* ---- verbs in few words ---- */

static struct td_vb_send write_of(const struct end *e, uint64_t id, uint64_t from, uint64_t to, uint32_t bytes)
{
    return (struct td_vb_send){.id = id, .op = TD_VB_WRITE, .signaled = true, .n_sge = 1, .sge = {{e->mr->addr + from, bytes, e->mr->lkey}},
                               .remote_addr = e->peer.addr + to, .rkey = e->peer.rkey};
}

static struct td_vb_send imm_of(uint64_t id, uint32_t imm) { return (struct td_vb_send){.id = id, .op = TD_VB_WRITE_IMM, .signaled = true, .imm = imm}; }

static struct td_vb_send read_of(const struct end *e, uint64_t id, uint64_t to, uint64_t from, uint32_t bytes)
{
    struct td_vb_send s = write_of(e, id, to, from, bytes);
    s.op = TD_VB_READ;
    return s;
}

static void post(struct end *e, struct td_vb_send *wrs, uint32_t n)
{
    uint32_t posted = 0;
    assert_int_equal(e->vb->post_send(e->qp, wrs, n, &posted), 0);
    assert_int_equal(posted, n);
}

static void post_one(struct end *e, struct td_vb_send wr) { post(e, &wr, 1); }

static int poll_n(struct end *e, struct td_vb_wc *wcs, int n)
{
    uint64_t deadline_ns = td_now_ns() + PATIENCE_NS;
    int have = 0;
    while (have < n && td_now_ns() < deadline_ns) {
        int k = e->vb->poll(e->cq, wcs + have, n - have);
        assert_true(k >= 0);
        have += k;
        if (!k) sched_yield();
    }
    return have;
}

static struct td_vb_wc poll_one(struct end *e)
{
    struct td_vb_wc wc = {.status = TD_VB_WC_N_STATUSES};
    if (poll_n(e, &wc, 1) != 1) fail_msg("no completion came");
    return wc;
}

static void expect_wc(struct end *e, uint64_t id, enum td_vb_wc_status status)
{
    struct td_vb_wc wc = poll_one(e);
    if (wc.id != id || wc.status != status)
        fail_msg("completion %" PRIu64 " is %s, not %" PRIu64 " %s", wc.id, td_vb_wc_status_name(wc.status), id, td_vb_wc_status_name(status));
    assert_int_equal(wc.qp_num, e->info.qp_num);
}

static void expect_none(struct end *e)
{
    struct td_vb_wc wc;
    assert_int_equal(e->vb->poll(e->cq, &wc, 1), 0);
}

static bool expect_imm_or(struct end *e, uint32_t imm)
{
    struct td_vb_wc wc = poll_one(e);
    return wc.status == TD_VB_WC_SUCCESS && wc.op == TD_VB_RECV_IMM && wc.imm == imm;
}

static void expect_imm(struct end *e, uint32_t imm) { assert_true(expect_imm_or(e, imm)); }

__attribute__((unused)) static struct td_vb_async expect_async(struct end *e, enum td_vb_async_kind kind)
{
    struct pollfd p = {.fd = e->vb->async_fd(e->device), .events = POLLIN};
    struct td_vb_async event = {0};
    assert_int_equal(poll(&p, 1, (int)(PATIENCE_NS / TD_NS_PER_MS)), 1);
    assert_true(e->vb->async_get(e->device, &event));
    assert_int_equal(event.kind, kind);
    return event;
}

__attribute__((unused)) static void expect_no_async(struct end *e)
{
    struct td_vb_async event;
    struct pollfd p = {.fd = e->vb->async_fd(e->device), .events = POLLIN};
    assert_int_equal(poll(&p, 1, 0), 0);
    assert_false(e->vb->async_get(e->device, &event));
}

static struct td_fake_counters counters(struct td_fake_fabric *f)
{
    struct td_fake_counters c;
    td_fake_counters_get(f, TD_FAKE_ALL, &c);
    return c;
}

static void fill(uint8_t *to, uint64_t bytes, uint64_t seed)
{
    for (uint64_t i = 0; i < bytes; i++) to[i] = (uint8_t)((i + seed * 131) * 0x9e3779b97f4a7c15ull >> 56);
}

static bool is_filled(const uint8_t *at, uint64_t bytes, uint64_t seed)
{
    for (uint64_t i = 0; i < bytes; i++) {
        if (at[i] != (uint8_t)((i + seed * 131) * 0x9e3779b97f4a7c15ull >> 56)) return false;
    }
    return true;
}

static bool is_zero(const uint8_t *at, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes; i++) {
        if (at[i]) return false;
    }
    return true;
}

/* ---- the plain behaviour ---- */

static void writes_land_and_imm_tells(void **state)
{
    (void)state;
    for (int infiniband = 0; infiniband < 2; infiniband++) {
        struct pair p;
        struct td_fake_options o = options();
        o.infiniband = infiniband;
        o.devices = 2;
        pair_open_with(&p, &o, NULL, &(struct end_options){.device = 1});
        fill(p.a.memory, BUFFER_BYTES, 3);
        assert_int_equal(p.b.vb->post_recv(p.b.qp, 77, 2), 0);
        struct td_vb_send wrs[3] = {write_of(&p.a, 1, 0, 100, 5000), write_of(&p.a, 2, 5000, 5100, 300000), imm_of(3, 0xabcd1234)};
        wrs[0].signaled = false;
        post(&p.a, wrs, 3);
        struct td_vb_wc wc = poll_one(&p.b);
        assert_int_equal(wc.id, 77);
        assert_int_equal(wc.status, TD_VB_WC_SUCCESS);
        assert_int_equal(wc.op, TD_VB_RECV_IMM);
        assert_int_equal(wc.imm, 0xabcd1234);
        assert_int_equal(wc.qp_num, p.b.qp->num);
        assert_true(is_filled(p.b.memory + 100, 305000, 3));
        assert_true(is_zero(p.b.memory, 100) && is_zero(p.b.memory + 305100, BUFFER_BYTES - 305100));
        wc = poll_one(&p.a);
        assert_true(wc.id == 2 && wc.status == TD_VB_WC_SUCCESS && wc.op == TD_VB_WRITE);
        wc = poll_one(&p.a);
        assert_true(wc.id == 3 && wc.status == TD_VB_WC_SUCCESS && wc.op == TD_VB_WRITE_IMM);
        expect_none(&p.a);
        struct td_fake_counters c = counters(p.f);
        assert_int_equal(c.writes_landed, 3);
        assert_int_equal(c.bytes_landed, 305000);
        pair_close(&p);
    }
}

int main(int argc, char **argv)
{
    (void)argc;
    program = argv[0];
    const struct CMUnitTest tests[] = {cmocka_unit_test(writes_land_and_imm_tells)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
