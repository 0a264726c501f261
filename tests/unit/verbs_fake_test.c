/* verbs_fake_test.c - the provider in memory behaves as reliable queue pairs do, keeps its
 * faults' promises, and outlives a killed peer. */
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
#include <stdatomic.h>
#include <stdio.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "tests/fake/verbs_fake.h"

#define PATIENCE_NS (20 * TD_NS_PER_S) /* for what must come: only a broken provider waits it out */
#define BUFFER_BYTES (1u << 20)
#define WAIT_WHILE(condition)                                                                      \
    for (uint64_t deadline_ns = td_now_ns() + PATIENCE_NS; condition; sched_yield()) {             \
        if (td_now_ns() > deadline_ns) fail_msg("after 20 s it is still so: %s", #condition);      \
    }

extern char **environ;
static const char *program;

/* ---- one end of a connection ---- */

struct info { /* what ends tell each other */
    uint8_t gid[16];
    uint16_t lid;
    uint32_t qp_num, psn, rkey, node;
    uint64_t addr;
};

struct end_options {
    uint32_t send_wr, recv_wr, cq_depth, srq_wr, device;
    unsigned access; /* of the memory; 0: everything */
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
    e->memory =
        mmap(NULL, BUFFER_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(e->memory, MAP_FAILED);
    unsigned all = TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE | TD_VB_REMOTE_READ;
    struct td_vb_limits limits;
    assert_int_equal(vb->query(e->device, &limits), 0);
    if (limits.max_mw) all |= TD_VB_MW_BIND;
    assert_int_equal(vb->reg(e->device, e->memory, BUFFER_BYTES, o.access ? o.access : all, &e->mr),
                     0);
    assert_int_equal(vb->cq_create(e->device, o.cq_depth ? o.cq_depth : 1024, &e->cq), 0);
    if (o.srq_wr) assert_int_equal(vb->srq.create(e->device, o.srq_wr, &e->srq), 0);
    struct td_vb_qp_caps caps = {.send_wr = o.send_wr               ? o.send_wr
                                            : limits.max_qp_wr < 64 ? limits.max_qp_wr
                                                                    : 64,
                                 .recv_wr = o.recv_wr               ? o.recv_wr
                                            : limits.max_qp_wr < 64 ? limits.max_qp_wr
                                                                    : 64,
                                 .send_sge = limits.max_sge,
                                 .inline_bytes = 64,
                                 .srq = e->srq};
    assert_int_equal(vb->qp_create(e->device, e->cq, &caps, &e->qp), 0);
    struct td_vb_gid gid;
    uint32_t gid_index = e->infiniband ? 0 : 4;
    assert_int_equal(vb->query_gid(e->device, 1, gid_index, &gid), 0);
    e->info = (struct info){.lid = port.lid,
                            .qp_num = e->qp->num,
                            .psn = (e->qp->num * 7919 + 0xfffff0) & 0xffffff,
                            .rkey = e->mr->rkey,
                            .addr = e->mr->addr,
                            .node = td_fake_node(td_fake_fabric_of(vb))};
    memcpy(e->info.gid, gid.raw, 16);
    e->route = (struct td_vb_route){
        .port = 1,
        .gid_index = gid_index,
        .hop_limit = 64,
        .ethernet = port.ethernet,
        .mtu_bytes = 1024,
        .local_psn = e->info.psn,
        .timeout = 14,
        .retry = 7,
        .rnr_retry = 7,
        .min_rnr_timer = 1,
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
    e->vb->srq.destroy(e->srq);
    e->vb->cq_destroy(e->cq);
    assert_int_equal(e->vb->dereg(e->mr), 0);
    e->vb->close(e->device);
    munmap(e->memory, BUFFER_BYTES);
    *e = (struct end){0};
}

struct pair {
    struct td_fake_fabric *f;
    struct end a, b;
};

static void pair_open_with(struct pair *p, const struct td_fake_options *o,
                           const struct end_options *a, const struct end_options *b)
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

static struct td_vb_send write_of(const struct end *e, uint64_t id, uint64_t from, uint64_t to,
                                  uint32_t bytes)
{
    return (struct td_vb_send){.id = id,
                               .op = TD_VB_WRITE,
                               .signaled = true,
                               .n_sge = 1,
                               .sge = {{e->mr->addr + from, bytes, e->mr->lkey}},
                               .remote_addr = e->peer.addr + to,
                               .rkey = e->peer.rkey};
}

static struct td_vb_send imm_of(uint64_t id, uint32_t imm)
{
    return (struct td_vb_send){.id = id, .op = TD_VB_WRITE_IMM, .signaled = true, .imm = imm};
}

static struct td_vb_send read_of(const struct end *e, uint64_t id, uint64_t to, uint64_t from,
                                 uint32_t bytes)
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
        fail_msg("completion %" PRIu64 " is %s, not %" PRIu64 " %s", wc.id,
                 td_vb_wc_status_name(wc.status), id, td_vb_wc_status_name(status));
    assert_int_equal(wc.qp_num, e->info.qp_num);
}

static void expect_none(struct end *e)
{
    struct td_vb_wc wc;
    assert_int_equal(e->vb->poll(e->cq, &wc, 1), 0);
}

static void expect_imm(struct end *e, uint32_t imm)
{
    struct td_vb_wc wc = poll_one(e);
    assert_true(wc.status == TD_VB_WC_SUCCESS && wc.op == TD_VB_RECV_IMM && wc.imm == imm);
}

static struct td_vb_async expect_async(struct end *e, enum td_vb_async_kind kind)
{
    struct pollfd p = {.fd = e->vb->async_fd(e->device), .events = POLLIN};
    struct td_vb_async event = {0};
    assert_int_equal(poll(&p, 1, (int)(PATIENCE_NS / TD_NS_PER_MS)), 1);
    assert_true(e->vb->async_get(e->device, &event));
    assert_int_equal(event.kind, kind);
    return event;
}

static void expect_no_async(struct end *e)
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
    for (uint64_t i = 0; i < bytes; i++)
        to[i] = (uint8_t)((i + seed * 131) * 0x9e3779b97f4a7c15ull >> 56);
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
        struct td_vb_send wrs[3] = {write_of(&p.a, 1, 0, 100, 5000),
                                    write_of(&p.a, 2, 5000, 5100, 300000), imm_of(3, 0xabcd1234)};
        wrs[0].signaled = false;
        post(&p.a, wrs, 3);
        struct td_vb_wc wc = poll_one(&p.b);
        assert_int_equal(wc.id, 77);
        assert_int_equal(wc.status, TD_VB_WC_SUCCESS);
        assert_int_equal(wc.op, TD_VB_RECV_IMM);
        assert_int_equal(wc.imm, 0xabcd1234);
        assert_int_equal(wc.qp_num, p.b.qp->num);
        assert_true(is_filled(p.b.memory + 100, 305000, 3));
        assert_true(is_zero(p.b.memory, 100) &&
                    is_zero(p.b.memory + 305100, BUFFER_BYTES - 305100));
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

static void a_read_fetches_and_fences(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p);
    fill(p.b.memory, 70000, 5);
    struct td_vb_send wrs[3] = {read_of(&p.a, 1, 200, 0, 70000),
                                write_of(&p.a, 2, 200, 100000, 70000),
                                read_of(&p.a, 3, 300000, 100000, 70000)};
    wrs[1].fence = true; /* or it might send what the READ has not fetched yet */
    post(&p.a, wrs, 3);
    for (uint64_t id = 1; id <= 3; id++) expect_wc(&p.a, id, TD_VB_WC_SUCCESS);
    assert_true(is_filled(p.a.memory + 200, 70000, 5));
    assert_true(is_filled(p.b.memory + 100000, 70000, 5));
    assert_true(is_filled(p.a.memory + 300000, 70000, 5));
    assert_int_equal(counters(p.f).reads_served, 2);
    /* A queue pair may also talk to itself. */
    struct end self;
    end_open(&self, td_fake_verbs(p.f), NULL);
    end_connect(&self, &self.info);
    fill(self.memory, 1000, 8);
    struct td_vb_send mine[2] = {write_of(&self, 1, 0, 5000, 1000),
                                 read_of(&self, 2, 9000, 5000, 1000)};
    post(&self, mine, 2);
    expect_wc(&self, 1, TD_VB_WC_SUCCESS);
    expect_wc(&self, 2, TD_VB_WC_SUCCESS);
    assert_true(is_filled(self.memory + 9000, 1000, 8));
    end_close(&self);
    pair_close(&p);
}

static void pieces_gather_and_scatter(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p);
    struct td_vb_send w = write_of(&p.a, 1, 0, 50, 0), r = read_of(&p.a, 2, 0, 50, 0);
    fill(p.a.memory, BUFFER_BYTES, 6);
    uint8_t expected[16 * 300];
    uint32_t n = 0;
    for (uint32_t i = 0; i < 16; i++) {
        uint32_t bytes = 17 * i; /* the first is empty */
        w.sge[i] = (struct td_vb_sge){p.a.mr->addr + 9000 * i, bytes, p.a.mr->lkey};
        r.sge[i] = (struct td_vb_sge){p.a.mr->addr + 500000 + 9000 * i, bytes, p.a.mr->lkey};
        memcpy(expected + n, p.a.memory + 9000 * i, bytes);
        n += bytes;
    }
    w.n_sge = r.n_sge = 16;
    post_one(&p.a, w);
    expect_wc(&p.a, 1, TD_VB_WC_SUCCESS);
    assert_memory_equal(p.b.memory + 50, expected, n);
    assert_true(is_zero(p.b.memory, 50) && is_zero(p.b.memory + 50 + n, 1000));
    post_one(&p.a, r);
    expect_wc(&p.a, 2, TD_VB_WC_SUCCESS);
    for (uint32_t i = 0; i < 16; i++)
        assert_memory_equal(p.a.memory + 500000 + 9000 * i, p.a.memory + 9000 * i, 17 * i);
    struct td_vb_send bad = w;
    uint32_t posted = 9;
    bad.n_sge = 17;
    assert_int_equal(p.a.vb->post_send(p.a.qp, &bad, 1, &posted), EINVAL);
    assert_int_equal(posted, 0);
    pair_close(&p);
}

static bool fd_is_readable(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 0) == 1;
}

static void an_armed_queue_wakes_once(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p);
    const struct td_verbs *vb = p.a.vb;
    int fd = vb->cq_fd(p.b.cq);
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    assert_int_equal(vb->post_recv(p.b.qp, 1, 8), 0);
    post_one(&p.a, imm_of(1, 10)); /* not armed: no event */
    expect_imm(&p.b, 10);
    assert_false(fd_is_readable(fd));
    assert_int_equal(vb->cq_arm(p.b.cq), 0);
    post_one(&p.a, imm_of(2, 11));
    assert_int_equal(poll(&wait, 1, (int)(PATIENCE_NS / TD_NS_PER_MS)), 1);
    vb->cq_clear(p.b.cq);
    assert_false(fd_is_readable(fd));
    post_one(&p.a, imm_of(3, 12)); /* armed once: one event */
    expect_imm(&p.b, 11);
    expect_imm(&p.b, 12);
    assert_false(fd_is_readable(fd));
    post_one(&p.a, imm_of(4, 13));
    expect_wc(&p.a, 1, TD_VB_WC_SUCCESS);
    for (uint64_t id = 2; id <= 4; id++) expect_wc(&p.a, id, TD_VB_WC_SUCCESS);
    vb->cq_arm(p.b.cq); /* what came before arming makes no event, so the caller polls once more */
    assert_false(fd_is_readable(fd));
    expect_imm(&p.b, 13);
    vb->cq_clear(p.b.cq); /* nothing there: does not block */
    pair_close(&p);
}

static const struct {
    const char *what;
    size_t offset;
    uint32_t bytes, value;
    int error;
} bad_rtr[] = {
#define CASE(field, value, error)                                                                  \
    {                                                                                              \
#field " " #value, offsetof(struct td_vb_route, field),                                    \
            sizeof((struct td_vb_route *)0)->field, value, error                                   \
    }
    CASE(port, 2, EINVAL),
    CASE(mtu_bytes, 4096, EINVAL),
    CASE(mtu_bytes, 1500, EINVAL),
    CASE(mtu_bytes, 0, EINVAL),
    CASE(remote_qp, 0, EINVAL),
    CASE(remote_qp, 0x1000000, EINVAL),
    CASE(remote_psn, 0x1000000, EINVAL),
    CASE(rd_atomic_in, 17, EINVAL),
    CASE(min_rnr_timer, 32, EINVAL),
    CASE(gid_index, 2, EINVAL),
    CASE(gid_index, 99, EINVAL),
    CASE(ethernet, 0, EINVAL),
    CASE(sl, 16, EINVAL),
    CASE(remote_gid[0], 0xff, ETIMEDOUT)};

static const struct {
    const char *what;
    size_t offset;
    uint32_t bytes, value;
    int error;
} bad_rts[] = {CASE(local_psn, 0x1000000, EINVAL), CASE(timeout, 32, EINVAL),
               CASE(retry, 8, EINVAL), CASE(rnr_retry, 8, EINVAL), CASE(rd_atomic_out, 17, EINVAL)};

static void states_and_attributes_are_checked(void **state)
{
    (void)state;
    struct td_fake_options o = options();
    o.mtu_bytes = 2048;
    o.ports = 2;
    struct td_fake_fabric *f = fabric_with(&o);
    struct end a, b;
    end_open(&a, td_fake_verbs(f), NULL);
    end_open(&b, td_fake_verbs(f), NULL);
    const struct td_verbs *vb = a.vb;
    end_route(&a, &b.info);
    struct td_vb_send w = write_of(&a, 1, 0, 0, 8);
    uint32_t posted;
    /* RESET */
    assert_int_equal(vb->post_send(a.qp, &w, 1, &posted), EINVAL);
    assert_int_equal(vb->post_recv(a.qp, 1, 1), EINVAL);
    assert_int_equal(vb->qp_error(a.qp), EINVAL);
    assert_int_equal(vb->qp_rtr(a.qp, &a.route), EINVAL);
    assert_int_equal(vb->qp_rts(a.qp, &a.route), EINVAL);
    assert_int_equal(vb->qp_init(a.qp, 0, 0, 0), EINVAL);
    assert_int_equal(vb->qp_init(a.qp, 3, 0, 0), EINVAL);
    assert_int_equal(vb->qp_init(a.qp, 1, 1, 0), EINVAL);
    assert_int_equal(vb->qp_init(a.qp, 1, 0, TD_VB_MW_BIND), EINVAL);
    assert_int_equal(vb->qp_init(a.qp, 1, 0, TD_VB_REMOTE_WRITE), 0);
    /* INIT */
    assert_int_equal(vb->post_send(a.qp, &w, 1, &posted), EINVAL);
    assert_int_equal(vb->post_recv(a.qp, 1, 1), 0);
    assert_int_equal(vb->qp_rts(a.qp, &a.route), EINVAL);
#undef CASE
    for (size_t i = 0; i < sizeof bad_rtr / sizeof *bad_rtr; i++) {
        struct td_vb_route r = a.route;
        memcpy((char *)&r + bad_rtr[i].offset, &bad_rtr[i].value,
               bad_rtr[i].bytes); /* little-endian */
        int e = vb->qp_rtr(a.qp, &r);
        if (e != bad_rtr[i].error)
            fail_msg("qp_rtr with %s: %d, not %d", bad_rtr[i].what, e, bad_rtr[i].error);
    }
    struct td_vb_route zero = a.route;
    memset(zero.remote_gid, 0, 16);
    assert_int_equal(vb->qp_rtr(a.qp, &zero), EINVAL);
    assert_int_equal(vb->qp_rtr(a.qp, &a.route), 0);
    /* RTR */
    assert_int_equal(vb->post_send(a.qp, &w, 1, &posted), EINVAL);
    assert_int_equal(vb->qp_rtr(a.qp, &a.route), EINVAL);
    for (size_t i = 0; i < sizeof bad_rts / sizeof *bad_rts; i++) {
        struct td_vb_route r = a.route;
        memcpy((char *)&r + bad_rts[i].offset, &bad_rts[i].value, bad_rts[i].bytes);
        int e = vb->qp_rts(a.qp, &r);
        if (e != bad_rts[i].error)
            fail_msg("qp_rts with %s: %d, not %d", bad_rts[i].what, e, bad_rts[i].error);
    }
    assert_int_equal(vb->qp_rts(a.qp, &a.route), 0);
    assert_int_equal(vb->qp_rts(a.qp, &a.route), EINVAL);
    assert_int_equal(vb->qp_error(a.qp), 0);
    assert_int_equal(vb->qp_error(a.qp), 0);
    assert_int_equal(vb->qp_init(a.qp, 1, 0, 0), EINVAL);
    end_close(&a);
    end_close(&b);
    td_fake_fabric_close(f);
}

static void objects_are_checked_against_limits(void **state)
{
    (void)state;
    struct td_fake_options o = options();
    td_fake_options_tiny(&o);
    o.limits.max_cqe = 100;
    o.limits.max_qp = 2;
    struct td_fake_fabric *f = fabric_with(&o);
    const struct td_verbs *vb = td_fake_verbs(f);
    struct td_vb_device *d;
    struct td_vb_limits l;
    struct td_vb_cq *cq;
    struct td_vb_srq *srq;
    struct td_vb_mw *mw;
    struct td_vb_mr *mr;
    struct td_vb_qp *qps[3];
    uint8_t *memory = calloc(1, (1u << 20) + 1);
    assert_int_equal(vb->open(vb, "fake1", &d), ENODEV);
    assert_int_equal(vb->open(vb, "fake0", &d), 0);
    assert_int_equal(vb->query(d, &l), 0);
    assert_true(l.max_qp_wr == 4 && l.max_rd_atomic_in == 1 && l.max_rd_atomic_out == 1 &&
                l.max_mr_bytes == 1u << 20 && l.max_sge == 1 && !l.max_srq && !l.max_mw);
    assert_int_equal(vb->cq_create(d, 101, &cq), EINVAL);
    assert_int_equal(vb->cq_create(d, 0, &cq), EINVAL);
    assert_int_equal(vb->cq_create(d, 100, &cq), 0);
    assert_int_equal(vb->srq.create(d, 1, &srq), EOPNOTSUPP);
    assert_int_equal(vb->mw.alloc(d, &mw), EOPNOTSUPP);
    assert_int_equal(vb->reg(d, memory, (1u << 20) + 1, 0, &mr), EINVAL);
    assert_int_equal(vb->reg(d, memory, 0, 0, &mr), EINVAL);
    /* remote without local */
    assert_int_equal(vb->reg(d, memory, 10, TD_VB_REMOTE_WRITE, &mr), EINVAL);
    assert_int_equal(vb->reg(d, memory, 10, TD_VB_LOCAL_WRITE | TD_VB_MW_BIND, &mr), EINVAL);
    assert_int_equal(vb->reg(d, (void *)4096, 10, 0, &mr), EFAULT);
    assert_int_equal(vb->reg(d, memory, 1u << 20, 0, &mr), 0);
    assert_int_equal(vb->dereg(mr), 0);
    static const struct {
        uint32_t send_wr, recv_wr, sge;
        int error;
    } caps[] = {{5, 4, 1, EINVAL}, {4, 5, 1, EINVAL}, {4, 4, 2, EINVAL}, {0, 4, 1, EINVAL},
                {4, 4, 1, 0},      {4, 4, 1, 0},      {4, 4, 1, ENOMEM}};
    uint32_t n = 0;
    for (size_t i = 0; i < sizeof caps / sizeof *caps; i++) {
        struct td_vb_qp_caps c = {
            .send_wr = caps[i].send_wr, .recv_wr = caps[i].recv_wr, .send_sge = caps[i].sge};
        int e = vb->qp_create(d, cq, &c, &qps[n]);
        if (e != caps[i].error) fail_msg("qp_create, case %zu: %d, not %d", i, e, caps[i].error);
        n += !e;
    }
    vb->qp_destroy(qps[0]);
    vb->qp_destroy(qps[1]);
    vb->qp_destroy(NULL);
    vb->cq_destroy(cq);
    vb->cq_destroy(NULL);
    vb->srq.destroy(NULL);
    assert_int_equal(vb->dereg(NULL), 0);
    vb->close(d);
    vb->close(NULL);
    td_fake_fabric_close(f);
    free(memory);
}

static void depths_are_kept(void **state)
{
    (void)state;
    struct pair p;
    struct td_fake_options o = options();
    pair_open_with(&p, &o, &(struct end_options){.send_wr = 5},
                   &(struct end_options){.recv_wr = 3});
    const struct td_verbs *vb = p.a.vb;
    struct td_vb_send wrs[7];
    uint32_t posted;
    for (uint32_t i = 0; i < 7; i++) {
        wrs[i] = write_of(&p.a, i, 0, 0, 8);
        wrs[i].signaled = i == 3;
    }
    assert_int_equal(vb->post_send(p.a.qp, wrs, 7, &posted), ENOMEM);
    assert_int_equal(posted, 5);
    WAIT_WHILE(counters(p.f).writes_landed < 5);
    /* Done, but not polled: their places are not free. */
    assert_int_equal(vb->post_send(p.a.qp, wrs, 1, &posted), ENOMEM);
    assert_int_equal(posted, 0);
    expect_wc(&p.a, 3, TD_VB_WC_SUCCESS); /* gives back 0 to 3, not 4 */
    assert_int_equal(vb->post_send(p.a.qp, wrs, 7, &posted), ENOMEM);
    assert_int_equal(posted, 4);
    expect_wc(&p.a, 3, TD_VB_WC_SUCCESS);
    /* Without a signalled request the queue never moves again: the classic trap. */
    wrs[3].signaled = false;
    assert_int_equal(vb->post_send(p.a.qp, wrs, 7, &posted), ENOMEM);
    assert_int_equal(posted, 5);
    WAIT_WHILE(counters(p.f).writes_landed < 14);
    expect_none(&p.a);
    assert_int_equal(vb->post_send(p.a.qp, wrs, 1, &posted), ENOMEM);

    assert_int_equal(vb->post_recv(p.b.qp, 1, 4), ENOMEM);
    assert_int_equal(vb->post_recv(p.b.qp, 1, 3), 0);
    assert_int_equal(vb->post_recv(p.b.qp, 1, 1), ENOMEM);
    pair_close(&p);
}

static void an_error_flushes_everything(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p);
    const struct td_verbs *vb = p.a.vb;
    struct td_vb_send wrs[6];
    struct td_vb_wc wcs[16];
    for (uint32_t i = 0; i < 6; i++) {
        wrs[i] = write_of(&p.a, 10 + i, 0, i * 8, 8);
        wrs[i].signaled = i == 5;
    }
    assert_int_equal(vb->post_recv(p.a.qp, 50, 3), 0);
    td_fake_hold(p.f, TD_FAKE_ALL);
    post(&p.a, wrs, 6);
    assert_int_equal(vb->qp_error(p.a.qp), 0);
    assert_int_equal(poll_n(&p.a, wcs, 9), 9); /* six sends, signalled or not, and three receives */
    for (uint32_t i = 0; i < 9; i++) {
        assert_int_equal(wcs[i].status, TD_VB_WC_WR_FLUSH);
        assert_int_equal(wcs[i].id, i < 6 ? 10 + i : 50);
    }
    /* What is posted from now on comes back too. */
    post(&p.a, wrs, 2);
    assert_int_equal(vb->post_recv(p.a.qp, 51, 1), 0);
    assert_int_equal(poll_n(&p.a, wcs, 3), 3);
    for (uint32_t i = 0; i < 3; i++) assert_int_equal(wcs[i].status, TD_VB_WC_WR_FLUSH);
    expect_none(&p.a);
    /* The other end knows nothing of it until it asks. */
    expect_none(&p.b);
    expect_no_async(&p.b);
    td_fake_hold(p.f, 0);
    post_one(&p.b, write_of(&p.b, 1, 0, 0, 8));
    expect_wc(&p.b, 1, TD_VB_WC_RETRY_EXC);
    pair_close(&p);
}

static void a_full_completion_queue_dies(void **state)
{
    (void)state;
    struct pair p;
    struct td_fake_options o = options();
    pair_open_with(&p, &o, &(struct end_options){.cq_depth = 3}, NULL);
    for (uint32_t i = 0; i < 4; i++) post_one(&p.a, write_of(&p.a, i, 0, 0, 8));
    expect_async(&p.a, TD_VB_ASYNC_CQ_ERR);
    assert_int_equal(expect_async(&p.a, TD_VB_ASYNC_QP_FATAL).qp_num, p.a.qp->num);
    /* what it held; nothing follows, not even flushes */
    for (uint32_t i = 0; i < 3; i++) expect_wc(&p.a, i, TD_VB_WC_SUCCESS);
    post_one(&p.a, write_of(&p.a, 9, 0, 0, 8));
    post_one(&p.b, write_of(&p.b, 1, 0, 0, 8));
    expect_wc(&p.b, 1, TD_VB_WC_RETRY_EXC); /* its queue pair is in ERR */
    expect_none(&p.a);
    assert_int_equal(counters(p.f).cq_overruns, 1);
    pair_close(&p);
}

static void shared_receives_serve_all(void **state)
{
    (void)state;
    struct pair p;
    struct td_fake_options o = options();
    pair_open_with(&p, &o, NULL, &(struct end_options){.srq_wr = 4});
    const struct td_verbs *vb = p.a.vb;
    assert_int_equal(vb->post_recv(p.b.qp, 1, 1), EINVAL); /* it has none of its own */
    assert_int_equal(vb->srq.post(p.b.srq, 60, 5), ENOMEM);
    assert_int_equal(vb->srq.post(p.b.srq, 60, 4), 0);
    for (uint32_t i = 0; i < 4; i++) post_one(&p.a, imm_of(i, 100 + i));
    for (uint32_t i = 0; i < 4; i++) expect_imm(&p.b, 100 + i);
    assert_int_equal(vb->srq.post(p.b.srq, 61, 2), 0);
    assert_int_equal(vb->qp_error(p.b.qp), 0);
    expect_none(&p.b); /* shared receives stay for the others */
    pair_close(&p);
}

static void completions_go_with_their_queue_pair(void **state)
{
    (void)state;
    struct pair p;
    struct td_fake_options o = options();
    pair_open_with(&p, &o, NULL, &(struct end_options){.srq_wr = 2});
    const struct td_verbs *vb = p.a.vb;
    assert_int_equal(vb->srq.post(p.b.srq, 1, 2), 0);
    post_one(&p.a, imm_of(1, 1));
    post_one(&p.a, imm_of(2, 2));
    WAIT_WHILE(counters(p.f).writes_landed < 2);
    vb->qp_destroy(p.a.qp);
    vb->qp_destroy(p.b.qp);
    p.a.qp = p.b.qp = NULL;
    expect_none(&p.a);
    assert_int_equal(vb->srq.post(p.b.srq, 1, 1), ENOMEM); /* until somebody polls past them */
    expect_none(&p.b);
    assert_int_equal(vb->srq.post(p.b.srq, 1, 2), 0);
    pair_close(&p);
}

/* ---- errors of requests ---- */

enum {
    BAD_RKEY = 1,
    LKEY_AS_RKEY,
    BELOW,
    ABOVE,
    OVER_END,
    WRAP,
    NOT_WRITABLE,
    DEREGISTERED,
    OTHER_DOMAIN
};

static void remote_keys_are_checked(void **state)
{
    (void)state;
    for (int bad = BAD_RKEY; bad <= OTHER_DOMAIN; bad++) {
        struct pair p;
        struct td_fake_options o = options();
        struct end_options b = {
            .access = bad == NOT_WRITABLE ? TD_VB_LOCAL_WRITE | TD_VB_REMOTE_READ : 0};
        pair_open_with(&p, &o, NULL, &b);
        struct end other = {0};
        struct td_vb_mr *extra = NULL;
        assert_int_equal(p.b.vb->post_recv(p.b.qp, 70, 1), 0);
        struct td_vb_send wrs[3] = {write_of(&p.a, 1, 0, 0, 8), write_of(&p.a, 2, 0, 0, 4096),
                                    write_of(&p.a, 3, 0, 8192, 8)};
        if (bad == NOT_WRITABLE) wrs[0] = read_of(&p.a, 1, 0, 0, 8); /* reading is allowed */
        wrs[1].signaled = wrs[2].signaled = false;
        if (bad == BAD_RKEY) wrs[1].rkey ^= 0x10000;
        if (bad == LKEY_AS_RKEY) wrs[1].rkey = p.b.mr->lkey;
        if (bad == BELOW) wrs[1].remote_addr -= 1;
        if (bad == ABOVE) wrs[1].remote_addr += BUFFER_BYTES;
        if (bad == OVER_END) wrs[1].remote_addr += BUFFER_BYTES - 4095;
        if (bad == WRAP) wrs[1].remote_addr = UINT64_MAX - 100;
        if (bad == DEREGISTERED) {
            assert_int_equal(p.b.vb->reg(p.b.device, p.b.memory, 4096,
                                         TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE, &extra),
                             0);
            wrs[1].rkey = extra->rkey;
            assert_int_equal(p.b.vb->dereg(extra), 0);
        }
        if (bad == OTHER_DOMAIN) {
            end_open(&other, p.b.vb, NULL);
            wrs[1].rkey = other.mr->rkey;
            wrs[1].remote_addr = other.mr->addr;
        }
        fill(p.a.memory, 4096, 9);
        post(&p.a, wrs, 3);
        expect_wc(&p.a, 1, TD_VB_WC_SUCCESS);
        struct td_vb_wc wc = poll_one(&p.a);
        if (wc.id != 2 || wc.status != TD_VB_WC_REM_ACCESS)
            fail_msg("case %d: %" PRIu64 " %s", bad, wc.id, td_vb_wc_status_name(wc.status));
        expect_wc(&p.a, 3, TD_VB_WC_WR_FLUSH);
        /* The target's queue pair is in error as well, and its receives come back. */
        assert_int_equal(expect_async(&p.b, TD_VB_ASYNC_QP_FATAL).qp_num, p.b.qp->num);
        expect_wc(&p.b, 70, TD_VB_WC_WR_FLUSH);
        assert_int_equal(counters(p.f).rkey_violations, 1);
        assert_true(is_zero(p.b.memory + 8, BUFFER_BYTES - 8));
        end_close(&other);
        pair_close(&p);
    }
}

static void local_keys_are_checked(void **state)
{
    (void)state;
    for (int bad = 0; bad < 5; bad++) {
        struct pair p;
        struct td_fake_options o = options();
        struct end_options a = {.access = bad == 4 ? TD_VB_REMOTE_READ : 0};
        pair_open_with(&p, &o, &a, NULL);
        struct td_vb_send wrs[3] = {write_of(&p.a, 1, 0, 0, 8), write_of(&p.a, 2, 0, 0, 4096),
                                    write_of(&p.a, 3, 0, 8, 8)};
        wrs[1].signaled = false;
        if (bad == 0) wrs[1].sge[0].lkey ^= 0x10000;
        if (bad == 1) wrs[1].sge[0].lkey = p.a.mr->rkey;
        if (bad == 2) wrs[1].sge[0].addr -= 1;
        if (bad == 3) wrs[1].sge[0].addr += BUFFER_BYTES - 4095;
        if (bad == 4) wrs[1] = read_of(&p.a, 2, 0, 0, 8); /* into memory without local write */
        post(&p.a, wrs, 3);
        expect_wc(&p.a, 1, TD_VB_WC_SUCCESS);
        expect_wc(&p.a, 2, TD_VB_WC_LOC_PROT);
        expect_wc(&p.a, 3, TD_VB_WC_WR_FLUSH);
        expect_no_async(&p.b); /* nothing was sent */
        pair_close(&p);
    }
}

static void a_receiver_that_is_not_ready(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p); /* rnr_retry 7: for ever */
    post_one(&p.a, imm_of(1, 5));
    WAIT_WHILE(counters(p.f).rnr < 20);
    expect_none(&p.a);
    assert_int_equal(p.b.vb->post_recv(p.b.qp, 1, 1), 0);
    expect_imm(&p.b, 5);
    expect_wc(&p.a, 1, TD_VB_WC_SUCCESS);
    pair_close(&p);

    for (uint8_t retries = 0; retries <= 2; retries += 2) {
        p.f = fabric();
        end_open(&p.a, td_fake_verbs(p.f), NULL);
        end_open(&p.b, td_fake_verbs(p.f), NULL);
        p.a.route.rnr_retry = retries;
        end_connect(&p.a, &p.b.info);
        end_connect(&p.b, &p.a.info);
        struct td_vb_send wrs[3] = {write_of(&p.a, 1, 0, 0, 8), imm_of(2, 5),
                                    write_of(&p.a, 3, 0, 0, 8)};
        post(&p.a, wrs, 3);
        expect_wc(&p.a, 1, TD_VB_WC_SUCCESS);
        expect_wc(&p.a, 2, TD_VB_WC_RNR_RETRY_EXC);
        expect_wc(&p.a, 3, TD_VB_WC_WR_FLUSH);
        assert_int_equal(counters(p.f).rnr, retries + 1u);
        pair_close(&p);
    }
}

enum {
    NO_PEER,
    PEER_IN_ERR,
    PEER_NOT_YET,
    BAD_PSN,
    BAD_QPN,
    BAD_GID_TYPE,
    PORT_DOWN_HERE,
    N_LOSSES
};

static void requests_nobody_takes_end_in_time(void **state)
{
    (void)state;
    for (int loss = 0; loss < N_LOSSES; loss++) {
        struct pair p = {.f = fabric()};
        end_open(&p.a, td_fake_verbs(p.f), NULL);
        end_open(&p.b, td_fake_verbs(p.f), NULL);
        if (loss == BAD_GID_TYPE) p.a.route.gid_index = 3; /* version 1 and 2 with the same bytes */
        if (loss == BAD_PSN) p.a.route.local_psn ^= 1;
        struct info to = p.b.info;
        if (loss == BAD_QPN) to.qp_num ^= 0x800;
        end_connect(&p.a, &to);
        if (loss != PEER_NOT_YET) end_connect(&p.b, &p.a.info);
        if (loss == NO_PEER) end_close(&p.b);
        if (loss == PEER_IN_ERR) assert_int_equal(p.b.vb->qp_error(p.b.qp), 0);
        if (loss == PORT_DOWN_HERE) assert_true(td_fake_port_set(p.f, 0, 0, 1, false));
        struct td_vb_send wrs[2] = {write_of(&p.a, 1, 0, 0, 8), write_of(&p.a, 2, 0, 0, 8)};
        uint64_t begin_ns = td_now_ns();
        post(&p.a, wrs, 2);
        if (loss == PEER_NOT_YET) { /* the retries bridge a late handshake */
            WAIT_WHILE(!counters(p.f).retransmits);
            end_connect(&p.b, &p.a.info);
            struct td_vb_wc wc = poll_one(&p.a);
            assert_int_equal(wc.status, TD_VB_WC_SUCCESS);
        } else {
            expect_wc(&p.a, 1, TD_VB_WC_RETRY_EXC);
            expect_wc(&p.a, 2, TD_VB_WC_WR_FLUSH);
            assert_true(td_now_ns() - begin_ns >= 40 * TD_NS_PER_MS);
        }
        if (p.b.vb) assert_true(loss == PEER_NOT_YET || is_zero(p.b.memory, 8));
        pair_close(&p);
    }
}

static void both_ends_agree_or_the_request_is_invalid(void **state)
{
    (void)state;
    for (int bad = 0; bad < 4; bad++) {
        struct pair p = {.f = fabric()};
        end_open(&p.a, td_fake_verbs(p.f), NULL);
        end_open(&p.b, td_fake_verbs(p.f), NULL);
        if (bad == 0) p.a.route.mtu_bytes = 2048;
        if (bad == 1) p.b.route.rd_atomic_in = 2;
        end_connect(&p.a, &p.b.info);
        end_route(&p.b, &p.a.info);
        unsigned access = (bad == 2 ? 0 : TD_VB_REMOTE_WRITE) | (bad == 3 ? 0 : TD_VB_REMOTE_READ);
        assert_int_equal(p.b.vb->qp_init(p.b.qp, 1, 0, access), 0);
        assert_int_equal(p.b.vb->qp_rtr(p.b.qp, &p.b.route), 0);
        struct td_vb_send wrs[8];
        uint32_t n = bad == 1 ? 8 : 1;
        for (uint32_t i = 0; i < n; i++)
            wrs[i] =
                bad == 1 || bad == 3 ? read_of(&p.a, i, 0, 0, 8) : write_of(&p.a, i, 0, 0, 1025);
        if (bad == 0) { /* one packet fits both */
            post_one(&p.a, write_of(&p.a, 99, 0, 0, 1024));
            expect_wc(&p.a, 99, TD_VB_WC_SUCCESS);
        }
        post(&p.a, wrs, n);
        struct td_vb_wc wcs[8];
        assert_int_equal(poll_n(&p.a, wcs, (int)n), n);
        uint32_t at = bad == 1 ? 2 : 0; /* two READs are in time, the third is one too many */
        for (uint32_t i = 0; i < n; i++)
            assert_int_equal(wcs[i].status, i < at    ? TD_VB_WC_SUCCESS
                                            : i == at ? TD_VB_WC_REM_INV_REQ
                                                      : TD_VB_WC_WR_FLUSH);
        expect_async(&p.b, TD_VB_ASYNC_QP_FATAL);
        pair_close(&p);
    }
}

/* ---- windows and device memory ---- */

static void windows_open_and_close(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p);
    const struct td_verbs *vb = p.b.vb;
    struct td_vb_mw *mw;
    assert_int_equal(vb->mw.alloc(p.b.device, &mw), 0);
    struct td_vb_send bind = {.id = 1,
                              .op = TD_VB_BIND_MW,
                              .signaled = true,
                              .mw = mw,
                              .bind_mr = p.b.mr,
                              .bind_addr = p.b.mr->addr + 4096,
                              .bind_bytes = 4096};
    uint32_t before = mw->rkey;
    post_one(&p.b, bind);
    expect_wc(&p.b, 1, TD_VB_WC_SUCCESS);
    uint32_t first = mw->rkey;
    assert_int_not_equal(first, before);
    assert_int_equal(vb->dereg(p.b.mr), EBUSY);
    struct td_vb_send w = write_of(&p.a, 1, 0, 4096, 4096);
    w.rkey = first;
    fill(p.a.memory, 8192, 4);
    post_one(&p.a, w);
    expect_wc(&p.a, 1, TD_VB_WC_SUCCESS);
    assert_true(is_filled(p.b.memory + 4096, 4096, 4));
    /* End it, bind it anew: another key, and the old one opens nothing. */
    struct td_vb_send end = {.id = 2, .op = TD_VB_LOCAL_INV, .signaled = true, .rkey = first};
    post_one(&p.b, end);
    expect_wc(&p.b, 2, TD_VB_WC_SUCCESS);
    post_one(&p.b, bind);
    expect_wc(&p.b, 1, TD_VB_WC_SUCCESS);
    assert_int_not_equal(mw->rkey, first);
    w.rkey = mw->rkey;
    post_one(&p.a, w);
    expect_wc(&p.a, 1, TD_VB_WC_SUCCESS);
    w.rkey = first;
    post_one(&p.a, w);
    expect_wc(&p.a, 1, TD_VB_WC_REM_ACCESS);
    assert_int_equal(vb->mw.free(mw), 0);
    assert_int_equal(vb->mw.free(NULL), 0);
    pair_close(&p);
}

enum {
    BEFORE_WINDOW = 1,
    PAST_WINDOW,
    READ_WINDOW,
    WRONG_QP,
    BOUND_TWICE,
    BEYOND_REGION,
    NO_BIND_RIGHT,
    END_UNBOUND,
    END_OLD_KEY,
    N_WINDOW_CASES
};

/* A write or read through the window that it must refuse. c, d: ends of another connection, opened
 * when the case needs it. */
static void access_is_refused(struct pair *p, struct end *c, struct end *d, struct td_vb_mw *mw,
                              int bad)
{
    struct end *from = &p->a;
    if (bad == WRONG_QP) { /* another connection of the same two devices, whose target
                              end shares the protection domain */
        end_open(c, p->a.vb, NULL);
        end_open(d, p->a.vb, NULL);
        struct td_vb_qp_caps caps = {.send_wr = 4, .recv_wr = 4, .send_sge = 1};
        p->b.vb->qp_destroy(d->qp); /* its own device; make one on b's instead */
        assert_int_equal(p->b.vb->qp_create(p->b.device, p->b.cq, &caps, &d->qp), 0);
        d->info.qp_num = d->qp->num;
        end_connect(c, &d->info);
        end_connect(d, &c->info);
        from = c;
    }
    struct td_vb_send w = write_of(from, 3, 0, 0, 64);
    w.op = bad == READ_WINDOW ? TD_VB_READ : TD_VB_WRITE;
    w.rkey = mw->rkey;
    w.remote_addr = p->b.mr->addr + (bad == BEFORE_WINDOW ? 63 : bad == PAST_WINDOW ? 65 : 64);
    post_one(from, w);
    expect_wc(from, 3, TD_VB_WC_REM_ACCESS);
}

static void windows_are_checked(void **state)
{
    (void)state;
    for (int bad = BEFORE_WINDOW; bad < N_WINDOW_CASES; bad++) {
        struct pair p;
        struct td_fake_options o = options();
        struct end_options eo = {
            .access = bad == NO_BIND_RIGHT ? TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE : 0};
        pair_open_with(&p, &o, NULL, &eo);
        struct end c = {0}, d = {0};
        struct td_vb_mw *mw;
        assert_int_equal(p.b.vb->mw.alloc(p.b.device, &mw), 0);
        struct td_vb_send bind = {.id = 1,
                                  .op = TD_VB_BIND_MW,
                                  .signaled = true,
                                  .mw = mw,
                                  .bind_mr = p.b.mr,
                                  .bind_addr = p.b.mr->addr + 64,
                                  .bind_bytes = 64};
        if (bad == BEYOND_REGION) bind.bind_bytes = BUFFER_BYTES;
        post_one(&p.b, bind);
        bool binds = bad != BEYOND_REGION && bad != NO_BIND_RIGHT;
        expect_wc(&p.b, 1, binds ? TD_VB_WC_SUCCESS : TD_VB_WC_MW_BIND);
        struct td_vb_send inv = {
            .id = 2, .op = TD_VB_LOCAL_INV, .signaled = true, .rkey = mw->rkey};
        if (bad == BOUND_TWICE) {
            post_one(&p.b, bind);
            expect_wc(&p.b, 1, TD_VB_WC_MW_BIND);
        } else if (bad == END_OLD_KEY || bad == END_UNBOUND) {
            if (bad == END_OLD_KEY) inv.rkey--;
            post_one(&p.b, inv);
            if (bad == END_UNBOUND) {
                expect_wc(&p.b, 2, TD_VB_WC_SUCCESS);
                post_one(&p.b, inv);
            }
            expect_wc(&p.b, 2, TD_VB_WC_LOC_QP_OP);
        } else if (binds) {
            access_is_refused(&p, &c, &d, mw, bad);
        }
        assert_int_equal(p.b.vb->mw.free(mw), 0);
        end_close(&d);
        end_close(&c);
        pair_close(&p);
    }
}

static void a_memfd_passes_for_a_dma_buf(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p);
    int fd = memfd_create("dma", MFD_CLOEXEC);
    assert_int_equal(ftruncate(fd, 65536), 0);
    uint8_t *view = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    struct td_vb_mr *mr;
    unsigned access = TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE;
    /* past its end */
    assert_int_equal(p.b.vb->reg_dmabuf(p.b.device, 8192, 65536, 0x7000000000, fd, access, &mr),
                     EINVAL);
    assert_int_equal(p.b.vb->reg_dmabuf(p.b.device, 8192, 4096, 0x7000000001, fd, access, &mr),
                     EINVAL);
    assert_int_equal(p.b.vb->reg_dmabuf(p.b.device, 8192, 4096, 0x7000000000, fd, access, &mr), 0);
    fill(p.a.memory, 4096, 2);
    struct td_vb_send w = write_of(&p.a, 1, 0, 0, 4000);
    w.remote_addr = 0x7000000000 + 96;
    w.rkey = mr->rkey;
    post_one(&p.a, w);
    expect_wc(&p.a, 1, TD_VB_WC_SUCCESS);
    assert_true(is_filled(view + 8192 + 96, 4000, 2));
    assert_int_equal(p.b.vb->dereg(mr), 0);
    munmap(view, 65536);
    close(fd);
    pair_close(&p);
}

/* ---- faults ---- */

static void any_status_at_any_position(void **state)
{
    (void)state;
    struct pair p = {.f = fabric()};
    for (int after = 0; after < 2; after++) {
        for (enum td_vb_wc_status status = TD_VB_WC_LOC_LEN; status < TD_VB_WC_N_STATUSES;
             status++) {
            for (uint32_t at = 1; at <= 5; at++) {
                end_open(&p.a, td_fake_verbs(p.f), &(struct end_options){.cq_depth = 16});
                end_open(&p.b, td_fake_verbs(p.f), &(struct end_options){.cq_depth = 16});
                end_connect(&p.a, &p.b.info);
                end_connect(&p.b, &p.a.info);
                struct td_fake_rule rule = {.fault =
                                                after ? TD_FAKE_FAIL_AFTER : TD_FAKE_FAIL_BEFORE,
                                            .device = TD_FAKE_ALL,
                                            .qp_num = p.a.qp->num,
                                            .nth = at,
                                            .status = status};
                assert_true(td_fake_rule_add(p.f, &rule));
                assert_int_equal(p.b.vb->post_recv(p.b.qp, 1, 1), 0);
                struct td_vb_send wrs[5];
                for (uint32_t i = 0; i < 5; i++) {
                    wrs[i] = i == 4 ? imm_of(i, 7) : write_of(&p.a, i, 0, i * 64, 64);
                    wrs[i].signaled = i % 2;
                }
                fill(p.a.memory, 64, 1);
                post(&p.a, wrs, 5);
                for (uint32_t i = 0; i < 5; i++) {
                    if (i + 1 < at && !wrs[i].signaled) continue;
                    expect_wc(&p.a, i,
                              i + 1 < at    ? TD_VB_WC_SUCCESS
                              : i + 1 == at ? status
                                            : TD_VB_WC_WR_FLUSH);
                }
                expect_none(&p.a);
                uint32_t sure = after ? at : at - 1; /* landed for sure; what was sent behind it
                                                        may have */
                for (uint32_t i = 0; i < 4; i++) {
                    if (i < sure)
                        assert_true(is_filled(p.b.memory + 64 * i, 64, 1));
                    else if (!after)
                        assert_true(is_zero(p.b.memory + 64 * i, 64));
                }
                /* the acknowledgement got lost, not the request */
                if (after && at == 5) expect_imm(&p.b, 7);
                expect_no_async(&p.b);
                end_close(&p.a);
                end_close(&p.b);
            }
        }
    }
    td_fake_fabric_close(p.f);
}

static void a_post_may_take_a_part(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p);
    const struct td_verbs *vb = p.a.vb;
    for (uint64_t nth = 1; nth <= 4; nth++) {
        struct td_fake_rule rule = {
            .fault = TD_FAKE_POST_PARTIAL, .device = 0, .nth = nth, .error = EIO};
        assert_true(td_fake_rule_add(p.f, &rule));
        struct td_vb_send wrs[4];
        uint32_t posted;
        for (uint32_t i = 0; i < 4; i++) wrs[i] = write_of(&p.a, i, 0, 0, 8);
        assert_int_equal(vb->post_send(p.a.qp, wrs, 4, &posted), EIO);
        assert_int_equal(posted, nth - 1);
        for (uint32_t i = 0; i + 1 < nth; i++) expect_wc(&p.a, i, TD_VB_WC_SUCCESS);
        post(&p.a, wrs, 1); /* struck once */
        expect_wc(&p.a, 0, TD_VB_WC_SUCCESS);
    }
    expect_none(&p.a);
    pair_close(&p);
}

static void a_stalled_queue_says_nothing(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p);
    assert_true(td_fake_rule_add(
        p.f, &(struct td_fake_rule){
                 .fault = TD_FAKE_STALL, .device = TD_FAKE_ALL, .qp_num = p.a.qp->num, .nth = 2}));
    struct td_vb_send wrs[3] = {write_of(&p.a, 1, 0, 0, 8), write_of(&p.a, 2, 0, 8, 8),
                                write_of(&p.a, 3, 0, 16, 8)};
    fill(p.a.memory, 8, 1);
    post(&p.a, wrs, 3);
    expect_wc(&p.a, 1, TD_VB_WC_SUCCESS);
    post_one(&p.b, write_of(&p.b, 1, 0, 0, 8)); /* the other direction goes on */
    expect_wc(&p.b, 1, TD_VB_WC_SUCCESS);
    expect_none(&p.a);
    assert_int_equal(p.a.vb->qp_error(p.a.qp), 0);
    expect_wc(&p.a, 2, TD_VB_WC_WR_FLUSH);
    expect_wc(&p.a, 3, TD_VB_WC_WR_FLUSH);
    assert_true(is_zero(p.b.memory + 8, 16));
    pair_close(&p);
}

static void one_end_breaks_alone(void **state)
{
    (void)state;
    for (int event = 0; event < 2; event++) {
        struct pair p;
        pair_open(&p);
        assert_int_equal(p.b.vb->post_recv(p.b.qp, 5, 1), 0);
        assert_false(td_fake_qp_break(p.f, 1, true));
        assert_true(td_fake_qp_break(p.f, p.b.qp->num, event));
        expect_wc(&p.b, 5, TD_VB_WC_WR_FLUSH);
        if (event)
            assert_int_equal(expect_async(&p.b, TD_VB_ASYNC_QP_FATAL).qp_num, p.b.qp->num);
        else
            expect_no_async(&p.b);
        expect_none(&p.a); /* it learns when it sends */
        post_one(&p.a, imm_of(1, 1));
        expect_wc(&p.a, 1, TD_VB_WC_RETRY_EXC);
        pair_close(&p);
    }
}

static void ports_go_down_and_come_back(void **state)
{
    (void)state;
    struct pair p;
    struct td_fake_options o = options();
    o.devices = 2;
    pair_open_with(&p, &o, NULL, &(struct end_options){.device = 1});
    struct td_vb_port port;
    assert_false(td_fake_port_set(p.f, 5, 0, 1, false));
    assert_true(td_fake_port_set(p.f, 0, 1, 1, false));
    assert_int_equal(expect_async(&p.b, TD_VB_ASYNC_PORT_ERR).port, 1);
    expect_no_async(&p.a);
    assert_int_equal(p.b.vb->query_port(p.b.device, 1, &port), 0);
    assert_false(port.active);
    post_one(&p.a, write_of(&p.a, 1, 0, 0, 8));
    expect_wc(&p.a, 1, TD_VB_WC_RETRY_EXC);
    assert_true(td_fake_port_set(p.f, 0, 1, 1, true));
    assert_int_equal(expect_async(&p.b, TD_VB_ASYNC_PORT_ACTIVE).port, 1);
    assert_int_equal(p.b.vb->query_port(p.b.device, 1, &port), 0);
    assert_true(port.active);
    expect_none(&p.b); /* the queue pair at this end never noticed */
    pair_close(&p);

    /* Down for less than the retries last: nothing is lost. */
    o.retry_ms = 10000;
    pair_open_with(&p, &o, NULL, NULL);
    p.a.vb->post_recv(p.b.qp, 1, 1);
    td_fake_port_set(p.f, 0, 0, 1, false);
    post_one(&p.a, imm_of(1, 3));
    expect_async(&p.b, TD_VB_ASYNC_PORT_ERR);
    expect_none(&p.a);
    td_fake_port_set(p.f, 0, 0, 1, true);
    struct td_vb_wc wcs[2];
    bool timeout_is_short = (4096ull << p.a.route.timeout) * 8 < 600 * TD_NS_PER_MS;
    assert_true(timeout_is_short);
    if (poll_n(&p.a, wcs, 1) == 1 && wcs[0].status == TD_VB_WC_SUCCESS)
        expect_imm(&p.b, 3);
    else
        assert_int_equal(wcs[0].status,
                         TD_VB_WC_RETRY_EXC); /* a machine that was away for half a second */
    pair_close(&p);
}

static void a_completion_queue_dies_in_silence(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p);
    p.a.vb->cq_arm(p.a.cq);
    assert_int_equal(p.a.vb->post_recv(p.a.qp, 1, 4), 0);
    td_fake_cq_break(p.f, p.a.cq);
    expect_async(&p.a, TD_VB_ASYNC_CQ_ERR);
    expect_async(&p.a, TD_VB_ASYNC_QP_FATAL);
    post_one(&p.a, write_of(&p.a, 1, 0, 0, 8));
    post_one(&p.b, write_of(&p.b, 1, 0, 0, 8));
    expect_wc(&p.b, 1, TD_VB_WC_RETRY_EXC);
    expect_none(&p.a);
    assert_false(fd_is_readable(p.a.vb->cq_fd(p.a.cq)));
    pair_close(&p);
}

static void events_come_on_demand(void **state)
{
    (void)state;
    struct pair p;
    pair_open(&p);
    expect_no_async(&p.a);
    for (enum td_vb_async_kind kind = TD_VB_ASYNC_OTHER; kind < TD_VB_ASYNC_N_KINDS; kind++) {
        struct td_vb_async event = {.kind = kind, .port = 1, .qp_num = 5};
        assert_true(td_fake_async(p.f, 0, &event));
        assert_false(td_fake_async(p.f, 3, &event));
    }
    for (enum td_vb_async_kind kind = TD_VB_ASYNC_OTHER; kind < TD_VB_ASYNC_N_KINDS; kind++) {
        assert_int_equal(expect_async(&p.a, kind).qp_num, 5);
        expect_async(&p.b, kind);
    }
    expect_no_async(&p.a);
    struct td_vb_gid gid;
    assert_int_equal(p.a.vb->query_gid(p.a.device, 1, 2, &gid), ENODATA);
    assert_int_equal(p.a.vb->query_gid(p.a.device, 1, TD_FAKE_GIDS, &gid), EINVAL);
    assert_int_equal(p.a.vb->query_gid(p.a.device, 2, 0, &gid), EINVAL);
    assert_true(td_fake_gid_set(p.f, 0, 1, 2, TD_FAKE_GID_V6, TD_VB_GID_ROCE_V2, false));
    assert_int_equal(expect_async(&p.a, TD_VB_ASYNC_GID_CHANGE).port, 1);
    assert_int_equal(p.a.vb->query_gid(p.a.device, 1, 2, &gid), 0);
    assert_true(gid.type == TD_VB_GID_ROCE_V2 && !gid.netdev_up && gid.raw[0] == 0x20 &&
                gid.netdev[0] && gid.index == 2);
    pair_close(&p);
}

static void unordered_writes_obey_completions_only(void **state)
{
    (void)state;
    bool last_came_last = false, last_came_earlier = false;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        struct pair p;
        struct td_fake_options o = options();
        o.unordered = true;
        o.seed = seed;
        pair_open_with(&p, &o, NULL, NULL);
        assert_int_equal(p.b.vb->post_recv(p.b.qp, 1, 4), 0);
        for (uint32_t i = 0; i < 8; i++) p.a.memory[i] = (uint8_t)(i + 1);
        struct td_vb_send wrs[9];
        for (uint32_t i = 0; i < 8; i++) { /* all to one byte, and each to a place of its own */
            struct td_vb_send w = write_of(&p.a, i, i, 0, 1);
            w.signaled = false;
            wrs[i] = w;
        }
        wrs[8] = imm_of(8, 1);
        post(&p.a, wrs, 9);
        expect_imm(&p.b, 1);
        assert_true(p.b.memory[0] >= 1 && p.b.memory[0] <= 8); /* all of them have landed */
        assert_int_equal(counters(p.f).writes_landed, 9);
        if (p.b.memory[0] == 8)
            last_came_last = true;
        else
            last_came_earlier = true;
        /* After a completion nothing that was before it may land any more. */
        struct td_vb_send more[3] = {write_of(&p.a, 20, 0, 4000, 1), write_of(&p.a, 21, 1, 4000, 1),
                                     imm_of(22, 2)};
        post(&p.a, more, 3);
        expect_wc(&p.a, 8, TD_VB_WC_SUCCESS);
        expect_wc(&p.a, 20, TD_VB_WC_SUCCESS);
        expect_wc(&p.a, 21, TD_VB_WC_SUCCESS);
        expect_wc(&p.a, 22, TD_VB_WC_SUCCESS);
        assert_int_equal(p.b.memory[4000], 2);
        /* Unsignalled ones land without being asked for, at some time. */
        struct td_vb_send quiet = write_of(&p.a, 30, 2, 5000, 1);
        quiet.signaled = false;
        post_one(&p.a, quiet);
        WAIT_WHILE(counters(p.f).writes_landed < 13);
        pair_close(&p);
    }
    assert_true(last_came_last && last_came_earlier);
}

static void relaxed_bytes_all_land(void **state)
{
    (void)state;
    struct pair p;
    struct td_fake_options o = options();
    o.relaxed = true;
    pair_open_with(&p, &o, NULL, NULL);
    fill(p.a.memory, BUFFER_BYTES, 7);
    static const uint32_t bytes[] = {1, 63, 64, 65, 127, 4096, 70001, 500000};
    for (uint32_t i = 0; i < sizeof bytes / sizeof *bytes; i++) {
        for (uint32_t to = 1000; to < 1064; to += 21) {
            memset(p.b.memory, 0, BUFFER_BYTES);
            post_one(&p.a, write_of(&p.a, i, 3, to, bytes[i]));
            expect_wc(&p.a, i, TD_VB_WC_SUCCESS);
            assert_memory_equal(p.b.memory + to, p.a.memory + 3, bytes[i]);
            assert_true(is_zero(p.b.memory, to) && is_zero(p.b.memory + to + bytes[i], 1000));
        }
    }
    pair_close(&p);
}

enum {
    SENDER_FLUSHED,
    SENDER_DESTROYED,
    TARGET_IN_ERR,
    TARGET_DESTROYED,
    MEMORY_GONE,
    NOTHING_HAPPENED,
    N_LATE
};

static void held_writes_land_late_or_never(void **state)
{
    (void)state;
    for (int late = 0; late < N_LATE; late++) {
        struct pair p;
        pair_open(&p);
        struct td_vb_mr *mr;
        unsigned access = TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE;
        assert_int_equal(p.b.vb->reg(p.b.device, p.b.memory, 4096, access, &mr), 0);
        assert_int_equal(p.b.vb->post_recv(p.b.qp, 40, 1), 0);
        fill(p.a.memory, 4096, 3);
        struct td_vb_send wrs[2] = {write_of(&p.a, 1, 0, 0, 4096), imm_of(2, 9)};
        wrs[0].rkey = mr->rkey;
        td_fake_hold(p.f, p.a.qp->num);
        post(&p.a, wrs, 2);
        WAIT_WHILE(counters(p.f).held < 2);
        expect_none(&p.a);
        expect_none(&p.b);
        assert_true(is_zero(p.b.memory, 4096));
        bool flushed = late == SENDER_FLUSHED || late == SENDER_DESTROYED || late == MEMORY_GONE;
        if (flushed) {
            assert_int_equal(p.a.vb->qp_error(p.a.qp), 0);
            expect_wc(&p.a, 1, TD_VB_WC_WR_FLUSH);
            expect_wc(&p.a, 2, TD_VB_WC_WR_FLUSH);
            memset(p.a.memory, 0xee, 4096); /* and used for something else */
        }
        if (late == SENDER_DESTROYED) end_close(&p.a);
        if (late == MEMORY_GONE) assert_int_equal(p.b.vb->dereg(mr), 0);
        if (late == TARGET_IN_ERR) {
            assert_int_equal(p.b.vb->qp_error(p.b.qp), 0);
            expect_wc(&p.b, 40, TD_VB_WC_WR_FLUSH);
        }
        if (late == TARGET_DESTROYED) {
            p.b.vb->qp_destroy(p.b.qp);
            p.b.qp = NULL;
        }
        td_fake_hold(p.f, 0);
        WAIT_WHILE(counters(p.f).held);
        struct td_fake_counters c = counters(p.f);
        if (late == TARGET_IN_ERR || late == TARGET_DESTROYED || late == MEMORY_GONE) {
            assert_true(is_zero(p.b.memory, 4096));
            assert_int_equal(c.writes_landed, 0);
            assert_int_equal(c.writes_dropped_late, 2);
            if (!flushed) expect_wc(&p.a, 1, TD_VB_WC_RETRY_EXC);
        } else { /* the bytes of when it was sent */
            expect_imm(&p.b, 9);
            assert_true(is_filled(p.b.memory, 4096, 3));
            assert_int_equal(c.writes_dropped_late, 0);
            if (late == NOTHING_HAPPENED) {
                expect_wc(&p.a, 1, TD_VB_WC_SUCCESS);
                expect_wc(&p.a, 2, TD_VB_WC_SUCCESS);
            }
        }
        if (late != MEMORY_GONE) assert_int_equal(p.b.vb->dereg(mr), 0);
        pair_close(&p);
    }
}

static void delays_keep_the_order(void **state)
{
    (void)state;
    struct pair p;
    struct td_fake_options o = options();
    o.delay_us = 200;
    pair_open_with(&p, &o, NULL, NULL);
    assert_int_equal(p.b.vb->post_recv(p.b.qp, 1, 60), 0);
    for (uint32_t i = 0; i < 60; i++) {
        struct td_vb_send w = imm_of(i, i);
        w.n_sge = 1;
        w.sge[0] = (struct td_vb_sge){p.a.mr->addr + i, 1, p.a.mr->lkey};
        w.remote_addr = p.b.mr->addr;
        w.rkey = p.b.mr->rkey;
        p.a.memory[i] = (uint8_t)i;
        post_one(&p.a, w);
    }
    for (uint32_t i = 0; i < 60; i++) expect_imm(&p.b, i);
    for (uint32_t i = 0; i < 60; i++) expect_wc(&p.a, i, TD_VB_WC_SUCCESS);
    assert_int_equal(p.b.memory[0], 59);
    pair_close(&p);
}

static void a_rate_of_faults(void **state)
{
    (void)state;
    struct td_fake_options o = options();
    o.fault_ppm = 50000;
    struct td_fake_fabric *f = fabric_with(&o);
    uint32_t failures = 0;
    for (uint32_t round = 0; round < 20; round++) {
        struct end a, b;
        end_open(&a, td_fake_verbs(f), NULL);
        end_open(&b, td_fake_verbs(f), NULL);
        end_connect(&a, &b.info);
        end_connect(&b, &a.info);
        bool broken = false;
        for (uint32_t i = 0; i < 50; i++) { /* exactly one completion each, whatever happens */
            post_one(&a, write_of(&a, i, 0, 0, 8));
            struct td_vb_wc wc = poll_one(&a);
            assert_int_equal(wc.id, i);
            if (broken)
                assert_int_equal(wc.status, TD_VB_WC_WR_FLUSH);
            else if (wc.status)
                failures++, broken = true;
        }
        expect_none(&a);
        end_close(&a);
        end_close(&b);
    }
    assert_true(failures >= 3 && failures <= 20);
    td_fake_fabric_close(f);
}

/* ---- many threads ---- */

/* who is done goes on giving the others receives */
struct poster {
    struct end *e;
    uint32_t n;
    bool ok;
    atomic_uint *n_busy;
};

static void *post_many(void *arg)
{
    struct poster *p = arg;
    uint32_t posted = 0, done = 0;
    struct td_vb_wc wcs[16];
    uint64_t deadline_ns = td_now_ns() + PATIENCE_NS;
    p->ok = true;
    while (atomic_load(p->n_busy) && td_now_ns() < deadline_ns) {
        struct td_vb_send wrs[8];
        uint32_t n = 0, k;
        for (; n < 8 && posted + n < p->n; n++) {
            wrs[n] =
                write_of(p->e, posted + n, (posted + n) % 512 * 64, (posted + n) % 512 * 64, 64);
            if ((posted + n) % 4 == 3)
                wrs[n].op = TD_VB_WRITE_IMM, wrs[n].imm = posted + n;
            else
                wrs[n].signaled = false;
        }
        int e = p->e->vb->post_send(p->e->qp, wrs, n, &k);
        p->ok = !n || e == 0 || e == ENOMEM;
        posted += k;
        int got = p->e->vb->poll(p->e->cq, wcs, 16);
        for (int i = 0; i < got; i++) {
            if (wcs[i].status) p->ok = false;
            if (wcs[i].op == TD_VB_RECV_IMM && p->e->vb->post_recv(p->e->qp, 0, 1)) p->ok = false;
            if (wcs[i].op != TD_VB_WRITE_IMM) continue;
            done = (uint32_t)wcs[i].id + 1;
            if (done == p->n) atomic_fetch_sub(p->n_busy, 1);
        }
        if (!got) sched_yield();
    }
    if (done < p->n) p->ok = false;
    return NULL;
}

static void threads_post_and_poll(void **state)
{
    (void)state;
    for (int mode = 0; mode < 2; mode++) {
        struct pair p, q;
        struct td_fake_options o = options();
        o.unordered = mode;
        pair_open_with(&p, &o, NULL, NULL);
        end_open(&q.a, td_fake_verbs(p.f), NULL);
        end_open(&q.b, td_fake_verbs(p.f), NULL);
        end_connect(&q.a, &q.b.info);
        end_connect(&q.b, &q.a.info);
        atomic_uint n_busy = 4;
        struct poster posters[4] = {{&p.a, 4000, false, &n_busy},
                                    {&p.b, 4000, false, &n_busy},
                                    {&q.a, 4000, false, &n_busy},
                                    {&q.b, 4000, false, &n_busy}};
        pthread_t threads[4];
        for (int i = 0; i < 4; i++)
            assert_int_equal(posters[i].e->vb->post_recv(posters[i].e->qp, 0, 64), 0);
        for (int i = 0; i < 4; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, post_many, &posters[i]), 0);
        for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
        for (int i = 0; i < 4; i++) assert_true(posters[i].ok);
        end_close(&q.a);
        end_close(&q.b);
        pair_close(&p);
    }
}

/* ---- two processes ---- */

enum verb { CONNECT = 1, WRITE, READ, POST_RECV, POLL, FILL, CHECK, BREAK, FLOOD, HOLD, QUIT };

struct command {
    enum verb verb;
    struct info info;
    uint64_t at, to, bytes, seed;
    uint32_t imm, n;
};
struct answer {
    struct info info;
    struct td_vb_wc wcs[16];
    int n;
    bool ok;
};

struct child {
    pid_t pid;
    int fd;
    struct info info;
};

static bool all_read(int fd, void *to, size_t bytes)
{
    for (size_t n = 0; n < bytes;) {
        ssize_t k = read(fd, (char *)to + n, bytes - n);
        if (k <= 0 && !(k < 0 && errno == EINTR)) return false;
        if (k > 0) n += (size_t)k;
    }
    return true;
}

static void child_flood(struct end *e) /* until it is killed */
{
    struct td_vb_wc wcs[16];
    for (uint32_t i = 0;;) {
        struct td_vb_send w[2] = {write_of(e, i, i % 100 * 4096, i % 100 * 4096, 4096 + i % 50000),
                                  read_of(e, i, 700000, i % 100 * 64, 3000)};
        uint32_t posted;
        w[0].signaled = i % 8 == 0;
        if (i % 16 == 5) w[0].op = TD_VB_WRITE_IMM;
        if (e->vb->post_send(e->qp, w, i % 32 == 3 ? 2 : 1, &posted)) sched_yield();
        i += posted != 0; /* or only unsignalled ones might fill the queue */
        e->vb->poll(e->cq, wcs, 16);
    }
}

static int child_main(int fd)
{
    const struct td_verbs *vb;
    struct td_err err;
    struct end e;
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that fails leaves nobody behind */
    if (td_verbs_fake_from_env(&vb, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        return 3;
    }
    end_open(&e, vb, NULL);
    struct command c;
    struct answer a = {.info = e.info};
    if (write(fd, &a, sizeof a) != sizeof a) return 4;
    while (all_read(fd, &c, sizeof c)) {
        a = (struct answer){.ok = true};
        if (c.verb == CONNECT) end_connect(&e, &c.info);
        if (c.verb == WRITE || c.verb == READ) {
            struct td_vb_send wrs[2] = {write_of(&e, c.seed, c.at, c.to, (uint32_t)c.bytes),
                                        imm_of(c.seed + 1, c.imm)};
            if (c.verb == READ) wrs[0].op = TD_VB_READ;
            uint32_t posted;
            a.ok = vb->post_send(e.qp, wrs, c.verb == READ ? 1 : 2, &posted) == 0;
        }
        if (c.verb == POST_RECV) a.ok = vb->post_recv(e.qp, c.seed, c.n) == 0;
        if (c.verb == POLL) a.n = poll_n(&e, a.wcs, (int)c.n);
        if (c.verb == FILL) fill(e.memory + c.at, c.bytes, c.seed);
        if (c.verb == CHECK) a.ok = is_filled(e.memory + c.at, c.bytes, c.seed);
        if (c.verb == BREAK) a.ok = vb->qp_error(e.qp) == 0;
        if (write(fd, &a, sizeof a) != sizeof a) return 4;
        if (c.verb == FLOOD) child_flood(&e);
        if (c.verb == QUIT) break;
    }
    end_close(&e);
    return 0;
}

static char fabric_path[64];

static void child_spawn(struct child *c, const char *more)
{
    int fds[2];
    char option[300], number[16];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    snprintf(option, sizeof option, "path=%s,seed=3%s", fabric_path, more);
    assert_int_equal(setenv("TANDEM_VERBS_FAKE", option, 1), 0);
    int theirs = dup(fds[1]); /* without close-on-exec */
    snprintf(number, sizeof number, "%d", theirs);
    char *argv[] = {(char *)(uintptr_t)program, (char *)(uintptr_t) "--child", number, NULL};
    assert_int_equal(posix_spawn(&c->pid, program, NULL, NULL, argv, environ), 0);
    close(theirs);
    close(fds[1]);
    c->fd = fds[0];
    struct answer a;
    assert_true(all_read(c->fd, &a, sizeof a));
    c->info = a.info;
}

static struct answer tell(struct child *c, struct command command)
{
    struct answer a;
    assert_int_equal(write(c->fd, &command, sizeof command), sizeof command);
    assert_true(all_read(c->fd, &a, sizeof a));
    assert_true(a.ok);
    return a;
}

static void child_kill(struct child *c)
{
    int status;
    assert_int_equal(kill(c->pid, SIGKILL), 0);
    assert_int_equal(waitpid(c->pid, &status, 0), c->pid);
    close(c->fd);
}

static void child_quit(struct child *c)
{
    int status;
    tell(c, (struct command){.verb = QUIT});
    assert_int_equal(waitpid(c->pid, &status, 0), c->pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    close(c->fd);
}

static int fabric_fd = -1;

/* A file without a name, which ends with its last user. */
static struct td_fake_fabric *shared_fabric(const struct td_fake_options *base)
{
    struct td_fake_options o = base ? *base : options();
    if (fabric_fd < 0) {
        fabric_fd = memfd_create("fabric", MFD_CLOEXEC);
        assert_true(fabric_fd >= 0);
        snprintf(fabric_path, sizeof fabric_path, "/proc/%d/fd/%d", (int)getpid(), fabric_fd);
    }
    o.path = fabric_path;
    return fabric_with(&o);
}

static void shared_fabric_close(struct td_fake_fabric *f)
{
    td_fake_fabric_close(f);
    close(fabric_fd);
    fabric_fd = -1;
}

static void write_to_it(struct end *e, struct child *c)
{
    fill(e->memory, 700000, 11);
    tell(c, (struct command){.verb = POST_RECV, .n = 2, .seed = 90});
    struct td_vb_send w = imm_of(1, 0x1234);
    w.n_sge = 3;
    w.sge[0] = (struct td_vb_sge){e->mr->addr, 1000, e->mr->lkey};
    w.sge[1] = (struct td_vb_sge){e->mr->addr + 1000, 99000, e->mr->lkey};
    w.sge[2] = (struct td_vb_sge){e->mr->addr + 100000, 600000, e->mr->lkey};
    w.remote_addr = c->info.addr + 33;
    w.rkey = c->info.rkey;
    post_one(e, w);
    struct answer a = tell(c, (struct command){.verb = POLL, .n = 1});
    assert_true(a.n == 1 && a.wcs[0].op == TD_VB_RECV_IMM && a.wcs[0].imm == 0x1234 &&
                a.wcs[0].id == 90 && !a.wcs[0].status);
    tell(c, (struct command){.verb = CHECK, .at = 33, .bytes = 700000, .seed = 11});
    expect_wc(e, 1, TD_VB_WC_SUCCESS);
}

static void write_from_it(struct end *e, struct child *c)
{
    memset(e->memory, 0, BUFFER_BYTES);
    assert_int_equal(e->vb->post_recv(e->qp, 1, 1), 0);
    tell(c, (struct command){
                .verb = WRITE, .at = 33, .to = 7, .bytes = 500000, .seed = 50, .imm = 77});
    expect_imm(e, 77);
    assert_true(is_filled(e->memory + 7, 500000, 11));
    assert_int_equal(tell(c, (struct command){.verb = POLL, .n = 2}).n, 2);
}

static void read_from_it(struct end *e, struct child *c)
{
    tell(c, (struct command){.verb = FILL, .at = 0, .bytes = 300000, .seed = 12});
    post_one(e, read_of(e, 5, 1000, 0, 300000));
    expect_wc(e, 5, TD_VB_WC_SUCCESS);
    assert_true(is_filled(e->memory + 1000, 300000, 12));
}

static void its_errors_arrive(struct td_fake_fabric *f, struct end *e, struct child *c)
{
    struct td_vb_send bad = write_of(e, 6, 0, 0, 8);
    bad.rkey += 256;
    post_one(e, bad);
    expect_wc(e, 6, TD_VB_WC_REM_ACCESS);
    struct td_fake_counters k;
    td_fake_counters_get(f, c->info.node, &k);
    assert_int_equal(k.rkey_violations, 1);
    struct answer a = tell(c, (struct command){.verb = POLL, .n = 1});
    /* the receive that was left */
    assert_true(a.n == 1 && a.wcs[0].status == TD_VB_WC_WR_FLUSH && a.wcs[0].id == 90);
}

static void two_processes_exchange(void **state)
{
    (void)state;
    for (int mode = 0; mode < 4; mode++) {
        struct td_fake_options o = options();
        o.unordered = mode == 1;
        o.relaxed = mode == 2;
        o.delay_us = mode == 3 ? 100 : 0;
        struct td_fake_fabric *f = shared_fabric(&o);
        struct end e;
        struct child c;
        child_spawn(&c, mode == 1   ? ",unordered=1"
                        : mode == 2 ? ",relaxed=1"
                        : mode == 3 ? ",delay_us=100"
                                    : "");
        end_open(&e, td_fake_verbs(f), NULL);
        end_connect(&e, &c.info);
        tell(&c, (struct command){.verb = CONNECT, .info = e.info});
        assert_int_not_equal(c.info.node, e.info.node);
        write_to_it(&e, &c);
        write_from_it(&e, &c);
        read_from_it(&e, &c);
        its_errors_arrive(f, &e, &c);
        child_quit(&c);
        end_close(&e);
        shared_fabric_close(f);
    }
}

static void a_killed_peer_is_a_dead_one(void **state)
{
    (void)state;
    struct td_fake_fabric *f = shared_fabric(NULL);
    uint32_t first_node = 0;
    for (uint32_t round = 0; round < 3; round++) {
        struct end e;
        struct child c;
        child_spawn(&c, "");
        if (!round) first_node = c.info.node;
        assert_int_equal(c.info.node, first_node); /* the same address again */
        end_open(&e, td_fake_verbs(f), NULL);
        end_connect(&e, &c.info);
        tell(&c, (struct command){.verb = CONNECT, .info = e.info});
        if (round == 0) { /* dead before anything is asked of it */
            child_kill(&c);
            post_one(&e, write_of(&e, 1, 0, 0, 4096));
        } else if (round == 1) { /* while a request waits for a receive */
            post_one(&e, imm_of(1, 1));
            struct td_fake_counters k = {0};
            WAIT_WHILE((td_fake_counters_get(f, c.info.node, &k), !k.rnr));
            child_kill(&c);
        } else { /* stopped: slow, not lost; then dead, but not waited for */
            assert_int_equal(kill(c.pid, SIGSTOP), 0);
            int status;
            assert_int_equal(waitpid(c.pid, &status, WUNTRACED), c.pid);
            uint64_t until_ns = td_now_ns() + 120 * TD_NS_PER_MS; /* more than twice retry_ms */
            post_one(&e, write_of(&e, 1, 0, 0, 4096));
            while (td_now_ns() < until_ns) expect_none(&e);
            assert_int_equal(kill(c.pid, SIGKILL), 0);
        }
        expect_wc(&e, 1, TD_VB_WC_RETRY_EXC);
        if (round == 2) {
            assert_int_equal(waitpid(c.pid, NULL, 0), c.pid);
            close(c.fd);
        }
        end_close(&e);
    }
    shared_fabric_close(f);
}

static void a_stopped_peer_holds_nobody(void **state)
{
    (void)state;
    struct td_fake_fabric *f = shared_fabric(NULL);
    for (uint32_t round = 0; round < 4; round++) {
        struct end e;
        struct child c;
        child_spawn(&c, "");
        end_open(&e, td_fake_verbs(f), NULL);
        end_connect(&e, &c.info);
        /* it will soon wait for receives; that is fine */
        assert_int_equal(e.vb->post_recv(e.qp, 0, 8), 0);
        tell(&c, (struct command){.verb = CONNECT, .info = e.info});
        uint64_t landed = counters(f).writes_landed;
        tell(&c, (struct command){.verb = FLOOD});
        WAIT_WHILE(counters(f).writes_landed < landed + 5 + round);
        assert_int_equal(kill(c.pid, SIGSTOP), 0);
        int status;
        assert_int_equal(waitpid(c.pid, &status, WUNTRACED), c.pid);
        uint64_t begin_ns = td_now_ns();
        assert_int_equal(e.vb->qp_error(e.qp), 0); /* the fence */
        assert_int_equal(e.vb->dereg(e.mr), 0);
        assert_true(td_now_ns() - begin_ns < 5 * TD_NS_PER_S);
        memset(e.memory, 0x5a, BUFFER_BYTES);
        struct td_fake_counters before = counters(f), now;
        assert_int_equal(kill(c.pid, SIGCONT), 0);
        /* It sends again, or has seen that this end is gone. */
        WAIT_WHILE((now = counters(f), now.requests_sent == before.requests_sent &&
                                           now.retransmits == before.retransmits &&
                                           now.qps_broken == before.qps_broken));
        for (uint32_t i = 0; i < BUFFER_BYTES; i++) assert_int_equal(e.memory[i], 0x5a);
        child_kill(&c);
        e.mr = NULL;
        end_close(&e);
    }
    shared_fabric_close(f);
}

/* What waits in the network of a stopped target is lost with its sender's queue pair: its source
 * may have been used again. */
static void a_flushed_source_is_not_read(void **state)
{
    (void)state;
    struct td_fake_fabric *f = shared_fabric(NULL);
    struct end e;
    struct child c;
    struct td_fake_counters k;
    child_spawn(&c, "");
    end_open(&e, td_fake_verbs(f), NULL);
    end_connect(&e, &c.info);
    tell(&c, (struct command){.verb = CONNECT, .info = e.info});
    tell(&c, (struct command){.verb = POST_RECV, .n = 1, .seed = 90});
    tell(&c, (struct command){.verb = FILL, .bytes = 4096, .seed = 1});
    int status;
    assert_int_equal(kill(c.pid, SIGSTOP), 0);
    assert_int_equal(waitpid(c.pid, &status, WUNTRACED), c.pid);
    struct td_vb_send wrs[2] = {write_of(&e, 1, 0, 0, 4096), imm_of(2, 2)};
    post(&e, wrs, 2);
    WAIT_WHILE((td_fake_counters_get(f, e.info.node, &k), k.requests_sent < 2));
    assert_int_equal(e.vb->qp_error(e.qp), 0);
    expect_wc(&e, 1, TD_VB_WC_WR_FLUSH);
    expect_wc(&e, 2, TD_VB_WC_WR_FLUSH);
    memset(e.memory, 0xee, 4096);
    assert_int_equal(kill(c.pid, SIGCONT), 0);
    WAIT_WHILE((td_fake_counters_get(f, c.info.node, &k), k.writes_dropped < 2));
    assert_int_equal(k.writes_landed, 0);
    tell(&c, (struct command){.verb = CHECK, .bytes = 4096, .seed = 1});
    tell(&c, (struct command){.verb = BREAK});
    struct answer a = tell(&c, (struct command){.verb = POLL, .n = 1});
    /* the receive was not used */
    assert_true(a.n == 1 && a.wcs[0].status == TD_VB_WC_WR_FLUSH && a.wcs[0].id == 90);
    child_quit(&c);
    end_close(&e);
    shared_fabric_close(f);
}

static void the_network_outlives_a_sender(void **state)
{
    (void)state;
    struct td_fake_fabric *f = shared_fabric(NULL);
    struct end e;
    struct child c;
    child_spawn(&c, "");
    end_open(&e, td_fake_verbs(f), NULL);
    end_connect(&e, &c.info);
    assert_int_equal(e.vb->post_recv(e.qp, 1, 1), 0);
    tell(&c, (struct command){.verb = CONNECT, .info = e.info});
    tell(&c, (struct command){.verb = FILL, .bytes = 60000, .seed = 5});
    td_fake_hold(f, e.qp->num);
    tell(&c, (struct command){.verb = WRITE, .bytes = 60000, .seed = 50, .imm = 6});
    WAIT_WHILE(counters(f).held < 2);
    child_kill(&c);
    expect_none(&e);
    assert_true(is_zero(e.memory, 60000));
    td_fake_hold(f, 0);
    expect_imm(&e, 6);
    assert_true(is_filled(e.memory, 60000, 5));
    end_close(&e);
    shared_fabric_close(f);
}

/* Wherever the kill falls, this node goes on, and others come and go. */
static void kills_in_the_middle(void **state)
{
    (void)state;
    struct td_fake_fabric *f = shared_fabric(NULL);
    struct end x, y; /* a pair that goes on meanwhile */
    end_open(&x, td_fake_verbs(f), NULL);
    end_open(&y, td_fake_verbs(f), NULL);
    end_connect(&x, &y.info);
    end_connect(&y, &x.info);
    for (uint32_t round = 0; round < 8; round++) {
        struct end e;
        struct child c;
        child_spawn(&c, round % 2 ? ",unordered=1" : "");
        end_open(&e, td_fake_verbs(f), NULL);
        end_connect(&e, &c.info);
        assert_int_equal(e.vb->post_recv(e.qp, 0, 64), 0);
        tell(&c, (struct command){.verb = CONNECT, .info = e.info});
        uint64_t landed = counters(f).writes_landed, until = landed + td_random_u64() % 300;
        tell(&c, (struct command){.verb = FLOOD});
        struct td_vb_wc wc;
        uint64_t deadline_ns = td_now_ns() + PATIENCE_NS;
        while (counters(f).writes_landed < until && td_now_ns() < deadline_ns) {
            /* both directions are busy */
            struct td_vb_send w = write_of(&e, 1, 0, 800000, 4096);
            uint32_t k;
            e.vb->post_send(e.qp, &w, 1, &k);
            if (e.vb->poll(e.cq, &wc, 1) == 1 && wc.op == TD_VB_RECV_IMM)
                e.vb->post_recv(e.qp, 0, 1);
        }
        child_kill(&c);
        post_one(&x, write_of(&x, round, 0, 0, 1000));
        expect_wc(&x, round, TD_VB_WC_SUCCESS);
        assert_int_equal(e.vb->qp_error(e.qp), 0);
        end_close(&e);
    }
    end_close(&x);
    end_close(&y);
    shared_fabric_close(f);
}

static void two_nodes_of_one_process(void **state)
{
    (void)state;
    struct td_fake_fabric *f = shared_fabric(NULL), *g = shared_fabric(NULL);
    struct end a, b;
    end_open(&a, td_fake_verbs(f), NULL);
    end_open(&b, td_fake_verbs(g), NULL);
    assert_int_not_equal(a.info.node, b.info.node);
    end_connect(&a, &b.info);
    end_connect(&b, &a.info);
    assert_int_equal(b.vb->post_recv(b.qp, 1, 1), 0);
    fill(a.memory, 100000, 1);
    struct td_vb_send wrs[2] = {write_of(&a, 1, 0, 0, 100000), imm_of(2, 1)};
    post(&a, wrs, 2);
    expect_imm(&b, 1);
    assert_true(is_filled(b.memory, 100000, 1));
    expect_wc(&a, 1, TD_VB_WC_SUCCESS);
    expect_wc(&a, 2, TD_VB_WC_SUCCESS);
    end_close(&b);
    td_fake_fabric_close(g); /* a node that closes is as dead as a killed one */
    post_one(&a, write_of(&a, 3, 0, 0, 8));
    expect_wc(&a, 3, TD_VB_WC_RETRY_EXC);
    struct td_fake_fabric *more[TD_FAKE_NODES_MAX];
    struct td_fake_options o = options();
    o.path = fabric_path;
    for (int i = 1; i < TD_FAKE_NODES_MAX; i++)
        assert_int_equal(td_fake_fabric_open(&o, &more[i], NULL), TD_OK);
    assert_int_equal(td_fake_fabric_open(&o, &more[0], NULL), TD_ERR_LIMIT);
    for (int i = 1; i < TD_FAKE_NODES_MAX; i++) td_fake_fabric_close(more[i]);
    end_close(&a);
    shared_fabric_close(f);
    o.path = "/proc/version"; /* no fabric, and not writable */
    assert_int_equal(td_fake_fabric_open(&o, &more[0], NULL), TD_ERR_IO);
}

/* ---- options ---- */

static void options_are_parsed(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        td_status status;
    } cases[] = {{"", TD_OK},
                 {"seed=18446744073709551615", TD_OK},
                 {"unordered", TD_OK},
                 {"devices=16,ports=2", TD_OK},
                 {"mtu=1024,,tiny=1", TD_OK},
                 {"devices=17", TD_ERR_INVALID},
                 {"ports=3", TD_ERR_INVALID},
                 {"mtu=1500", TD_ERR_INVALID},
                 {"seed=18446744073709551616", TD_ERR_INVALID},
                 {"unordered=2", TD_ERR_INVALID},
                 {"seed=-1", TD_ERR_INVALID},
                 {"seed=", TD_ERR_INVALID},
                 {"seed=1x", TD_ERR_INVALID},
                 {"colour=1", TD_ERR_INVALID},
                 {"fail_nth=3,fail_status=11,fail_after=1", TD_OK},
                 {"fail_nth=3", TD_ERR_INVALID},
                 {"fail_nth=3,fail_status=17", TD_ERR_INVALID},
                 {"max_qp_wr=0", TD_ERR_INVALID},
                 {"max_sge=17", TD_ERR_INVALID},
                 {"rd_atomic=256", TD_ERR_INVALID},
                 {"spin_us=4294967296", TD_ERR_INVALID}};
    struct td_fake_options o;
    struct td_err err;
    char path[256];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_status status = td_fake_options_parse(cases[i].text, &o, path, &err);
        if (status != cases[i].status)
            fail_msg("\"%s\": %s", cases[i].text, td_status_name(status));
    }
    assert_int_equal(
        td_fake_options_parse(
            "path=/x/"
            "y,devices=2,seed=7,relaxed=1,rd_atomic=3,max_mr_bytes=1000,retry_ms=9,no_copy=1",
            &o, path, &err),
        TD_OK);
    assert_string_equal(o.path, "/x/y");
    assert_true(o.devices == 2 && o.seed == 7 && o.relaxed && !o.unordered &&
                o.limits.max_rd_atomic_in == 3 && o.limits.max_rd_atomic_out == 3 &&
                o.limits.max_mr_bytes == 1000 && o.retry_ms == 9 && o.no_copy);
    const struct td_verbs *vb;
    unsetenv("TANDEM_VERBS_FAKE");
    assert_int_equal(td_verbs_fake_from_env(&vb, &err), TD_ERR_NOT_FOUND);
    setenv("TANDEM_VERBS_FAKE", "colour=1", 1);
    assert_int_equal(td_verbs_fake_from_env(&vb, &err), TD_ERR_INVALID);
}

/* What a post costs its thread, which others subtract from their own cost; printed, not judged. */
static void a_post_is_cheap(void **state)
{
    (void)state;
    struct td_fake_options o = options();
    o.no_copy = true;
    o.spin_us = 1000;
    struct pair p;
    pair_open_with(&p, &o, &(struct end_options){.send_wr = 1024}, NULL);
    uint64_t best_ns = UINT64_MAX;
    struct td_vb_send wrs[32];
    for (uint32_t i = 0; i < 32; i++) {
        wrs[i] = write_of(&p.a, i, 0, 0, 65536);
        wrs[i].signaled = i == 31;
    }
    for (uint32_t round = 0; round < 20; round++) {
        for (uint32_t k = 0; k < 16; k++) {
            uint64_t begin_ns = td_now_ns();
            post(&p.a, wrs, 32);
            uint64_t spent_ns = td_now_ns() - begin_ns;
            if (spent_ns < best_ns) best_ns = spent_ns;
            expect_wc(&p.a, 31, TD_VB_WC_SUCCESS);
        }
    }
    print_message("post_send in chains of 32, 1 piece: %.1f ns per request\n",
                  (double)best_ns / 32);
    pair_close(&p);
}

int main(int argc, char **argv)
{
    program = "/proc/self/exe";
    if (argc == 3 && strcmp(argv[1], "--child") == 0)
        return child_main((int)strtol(argv[2], NULL, 10));
    const struct CMUnitTest tests[] = {cmocka_unit_test(writes_land_and_imm_tells),
                                       cmocka_unit_test(a_read_fetches_and_fences),
                                       cmocka_unit_test(pieces_gather_and_scatter),
                                       cmocka_unit_test(an_armed_queue_wakes_once),
                                       cmocka_unit_test(states_and_attributes_are_checked),
                                       cmocka_unit_test(objects_are_checked_against_limits),
                                       cmocka_unit_test(depths_are_kept),
                                       cmocka_unit_test(an_error_flushes_everything),
                                       cmocka_unit_test(a_full_completion_queue_dies),
                                       cmocka_unit_test(shared_receives_serve_all),
                                       cmocka_unit_test(completions_go_with_their_queue_pair),
                                       cmocka_unit_test(remote_keys_are_checked),
                                       cmocka_unit_test(local_keys_are_checked),
                                       cmocka_unit_test(a_receiver_that_is_not_ready),
                                       cmocka_unit_test(requests_nobody_takes_end_in_time),
                                       cmocka_unit_test(both_ends_agree_or_the_request_is_invalid),
                                       cmocka_unit_test(windows_open_and_close),
                                       cmocka_unit_test(windows_are_checked),
                                       cmocka_unit_test(a_memfd_passes_for_a_dma_buf),
                                       cmocka_unit_test(any_status_at_any_position),
                                       cmocka_unit_test(a_post_may_take_a_part),
                                       cmocka_unit_test(a_stalled_queue_says_nothing),
                                       cmocka_unit_test(one_end_breaks_alone),
                                       cmocka_unit_test(ports_go_down_and_come_back),
                                       cmocka_unit_test(a_completion_queue_dies_in_silence),
                                       cmocka_unit_test(events_come_on_demand),
                                       cmocka_unit_test(unordered_writes_obey_completions_only),
                                       cmocka_unit_test(relaxed_bytes_all_land),
                                       cmocka_unit_test(held_writes_land_late_or_never),
                                       cmocka_unit_test(delays_keep_the_order),
                                       cmocka_unit_test(a_rate_of_faults),
                                       cmocka_unit_test(threads_post_and_poll),
                                       cmocka_unit_test(two_processes_exchange),
                                       cmocka_unit_test(a_killed_peer_is_a_dead_one),
                                       cmocka_unit_test(a_stopped_peer_holds_nobody),
                                       cmocka_unit_test(a_flushed_source_is_not_read),
                                       cmocka_unit_test(the_network_outlives_a_sender),
                                       cmocka_unit_test(kills_in_the_middle),
                                       cmocka_unit_test(two_nodes_of_one_process),
                                       cmocka_unit_test(options_are_parsed),
                                       cmocka_unit_test(a_post_is_cheap)};
    if (argc == 2) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
