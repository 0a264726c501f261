/* verbs_real_test.c - every function of the verbs table over libibverbs and two devices
 * (Soft-RoCE in scripts/rdma-vm; any two RoCE devices that reach each other will do:
 * verbs_real_test DEVICE DEVICE). */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/rdma/rdma_pair.h"

static bool is_readable(int fd, int timeout_ms)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, timeout_ms) == 1;
}

static void devices_are_listed(void **state)
{
    (void)state;
    char names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX];
    uint32_t n = 0, n_found = 0;
    struct td_vb_device *d = NULL;
    const struct td_verbs *again = NULL;
    assert_int_equal(vb->list(vb, names, &n), 0);
    for (uint32_t i = 0; i < n; i++)
        n_found += strcmp(names[i], name_a) == 0 || strcmp(names[i], name_b) == 0;
    assert_int_equal(n_found, 2);
    assert_int_equal(vb->open(vb, "no_such_device", &d), ENODEV);
    assert_null(d);
    assert_int_equal(td_verbs_load(&again, NULL), TD_OK);
    assert_ptr_equal(again, vb);
}

static void limits_are_told(void **state)
{
    (void)state;
    struct td_vb_limits l;
    assert_int_equal(vb->query(device_a, &l), 0);
    printf("%s: qp %u, wr %u, sge %u, cqe %u, srq %u, mw %u%s, rd_atomic in %u out %u, mr %llu, "
           "relaxed ordering %s\n",
           name_a, l.max_qp, l.max_qp_wr, l.max_sge, l.max_cqe, l.max_srq, l.max_mw,
           l.mw_type2 ? " type 2" : "", l.max_rd_atomic_in, l.max_rd_atomic_out,
           (unsigned long long)l.max_mr_bytes, l.relaxed_ordering ? "may be asked" : "no");
    assert_true(l.max_qp >= 64 && l.max_qp_wr >= 256 && l.max_sge >= 4 && l.max_cqe >= 1024 &&
                l.max_mr_bytes >= 1u << 30);
    assert_true(l.max_rd_atomic_in >= 1 && l.max_rd_atomic_out >= 1);
    assert_true(l.n_ports >= 1);
}

static void port_is_told(void **state)
{
    (void)state;
    struct td_vb_port p;
    assert_int_equal(vb->query_port(device_a, 1, &p), 0);
    printf("%s: active %d, ethernet %d, mtu %u, %llu Mbit/s, %u gids\n", name_a, p.active,
           p.ethernet, p.mtu_bytes, (unsigned long long)(p.bits_per_s / 1000000), p.n_gids);
    assert_true(p.active && p.ethernet);
    assert_true(p.mtu_bytes >= 1024 && p.mtu_bytes <= 4096 &&
                (p.mtu_bytes & (p.mtu_bytes - 1)) == 0);
    assert_true(p.bits_per_s > 0 && p.n_gids > GID_INDEX);
    assert_int_not_equal(vb->query_port(device_a, 99, &p), 0);
}

static void gids_are_told(void **state)
{
    (void)state;
    static const uint8_t ipv4_mapped[12] = {[10] = 0xff, [11] = 0xff};
    struct td_vb_gid g = {0}, other = {0}, empty = {.index = 7777};
    struct td_vb_port p;
    assert_int_equal(vb->query_gid(device_a, 1, GID_INDEX, &g), 0);
    assert_int_equal(vb->query_gid(device_b, 1, GID_INDEX, &other), 0);
    printf("%s: gid %u type %d netdev %s %s\n", name_a, g.index, g.type, g.netdev,
           g.netdev_up ? "up" : "down");
    assert_int_equal(g.index, GID_INDEX);
    assert_int_equal(g.type, TD_VB_GID_ROCE_V2);
    assert_memory_equal(g.raw, ipv4_mapped, sizeof ipv4_mapped);
    assert_memory_not_equal(g.raw, other.raw, sizeof g.raw);
    assert_string_not_equal(g.netdev, "");
    assert_true(g.netdev_up);
    assert_int_equal(vb->query_port(device_a, 1, &p), 0);
    assert_int_equal(vb->query_gid(device_a, 1, p.n_gids - 1, &empty), ENODATA);
    assert_int_equal(empty.index, 7777); /* outputs are untouched on failure */
    assert_int_not_equal(vb->query_gid(device_a, 1, 1u << 20, &empty), 0);
}

static void errors_are_told(void **state)
{
    (void)state;
    struct td_vb_mr *mr = NULL;
    struct td_vb_cq *cq = NULL;
    struct td_vb_qp *qp = NULL;
    void *gone = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(gone, MAP_FAILED);
    munmap(gone, 8192);
    int rc = vb->reg(device_a, gone, 8192, TD_VB_LOCAL_WRITE, &mr);
    assert_true(rc == EFAULT || rc == ENOMEM);
    rc = vb->reg_dmabuf(device_a, 0, 4096, 0, -1, TD_VB_LOCAL_WRITE, &mr);
    printf("reg_dmabuf of fd -1: %s\n", strerror(rc));
    assert_true(rc == EBADF || rc == EOPNOTSUPP || rc == EPROTONOSUPPORT);
    assert_int_equal(vb->cq_create(device_a, 0, &cq), EINVAL);
    assert_int_equal(vb->cq_create(device_a, UINT32_MAX, &cq), EINVAL);
    assert_int_not_equal(vb->cq_create(device_a, INT32_MAX, &cq), 0);
    assert_null(mr);
    assert_null(cq);

    assert_int_equal(vb->cq_create(device_a, 16, &cq), 0);
    struct td_vb_qp_caps caps = {.send_wr = 1u << 30, .recv_wr = 1, .send_sge = 1};
    assert_int_not_equal(vb->qp_create(device_a, cq, &caps, &qp), 0);
    caps = (struct td_vb_qp_caps){.send_wr = 1, .recv_wr = 1, .send_sge = TD_VB_SGE_MAX + 1};
    assert_int_equal(vb->qp_create(device_a, cq, &caps, &qp), EINVAL);
    assert_null(qp);
    caps = (struct td_vb_qp_caps){.send_wr = 1, .recv_wr = 1, .send_sge = 1};
    assert_int_equal(vb->qp_create(device_a, cq, &caps, &qp), 0);
    struct td_vb_route r = {.port = 1, .gid_index = GID_INDEX, .ethernet = true, .mtu_bytes = 1500};
    assert_int_equal(vb->qp_rtr(qp, &r), EINVAL); /* no such MTU */
    assert_int_not_equal(vb->qp_rts(qp, &r), 0);  /* RESET has no arrow to RTS */
    assert_int_not_equal(vb->qp_init(qp, 99, 0, 0), 0);
    vb->qp_destroy(qp);
    vb->cq_destroy(cq);

    vb->close(NULL);
    vb->cq_destroy(NULL);
    vb->srq.destroy(NULL);
    vb->qp_destroy(NULL);
    assert_int_equal(vb->dereg(NULL), 0);
    assert_int_equal(vb->mw.free(NULL), 0);
}

static void relaxed_ordering_registers(void **state)
{
    (void)state;
    struct td_vb_limits l;
    struct td_vb_mr *mr = NULL;
    uint8_t *mem = aligned_alloc(4096, 8192);
    assert_non_null(mem);
    assert_int_equal(vb->query(device_a, &l), 0);
    int rc = vb->reg(device_a, mem, 8192,
                     TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE | TD_VB_RELAXED_ORDERING, &mr);
    assert_int_equal(rc, l.relaxed_ordering ? 0 : EOPNOTSUPP);
    if (mr) {
        assert_int_equal(mr->addr, (uintptr_t)mem);
        assert_int_equal(mr->bytes, 8192);
        assert_ptr_equal(mr->device, device_a);
        assert_int_equal(vb->dereg(mr), 0);
    }
    free(mem);
}

static void chain_of_writes_one_signalled(void **state)
{
    (void)state;
    enum { N = 32, BYTES = 32768 };
    struct rdma_pair p;
    struct td_vb_send wrs[N];
    pair_open(&p, NULL);
    fill(p.a.mem, N * BYTES, 1);
    for (uint32_t i = 0; i < N; i++) {
        wrs[i] = write_of(&p, i, i * BYTES, BYTES);
        wrs[i].signaled = i == N - 1;
    }
    post(p.a.qp, wrs, N);
    expect_wc(p.a.cq, N - 1, TD_VB_WC_SUCCESS);
    expect_none(p.a.cq);
    assert_memory_equal(p.a.mem, p.b.mem, N * BYTES);
    assert_int_equal(p.b.mem[N * BYTES], 0);
    expect_none(p.b.cq); /* a WRITE says nothing to its target */
    pair_close(&p);
}

static void chain_longer_than_a_doorbell(void **state)
{
    (void)state;
    enum { N = 300, BYTES = 64 };
    struct rdma_pair p;
    static struct td_vb_send wrs[N];
    pair_open(&p, &(struct rdma_pair_options){.send_wr = N});
    fill(p.a.mem, N * BYTES, 2);
    for (uint32_t i = 0; i < N; i++) wrs[i] = write_of(&p, i, i * BYTES, BYTES);
    post(p.a.qp, wrs, N);
    for (uint32_t i = 0; i < N; i++) {
        struct td_vb_wc wc = wait_wc(p.a.cq);
        assert_int_equal(wc.status, TD_VB_WC_SUCCESS);
        assert_int_equal(wc.id, i);
        assert_int_equal(wc.op, TD_VB_WRITE);
        assert_int_equal(wc.qp_num, p.a.qp->num);
    }
    assert_memory_equal(p.a.mem, p.b.mem, N * BYTES);
    pair_close(&p);
}

static void many_completions_in_one_poll(void **state)
{
    (void)state;
    enum { N = 200 };
    struct rdma_pair p;
    static struct td_vb_send wrs[N];
    static struct td_vb_wc wcs[N + 1];
    pair_open(&p, &(struct rdma_pair_options){.send_wr = N});
    for (uint32_t i = 0; i < N; i++) {
        wrs[i] = write_of(&p, i, i * 8, 8);
        wrs[i].signaled = true;
    }
    post(p.a.qp, wrs, N);
    int n = 0;
    for (int tries = 0; n < N && tries < 10000000; tries++) {
        /* more than the provider's own batch of 64 may lie there */
        int m = vb->poll(p.a.cq, wcs + n, N + 1 - n);
        assert_in_range(m, 0, N - n);
        n += m;
    }
    for (int i = 0; i < N; i++) assert_int_equal(wcs[i].id, i);
    pair_close(&p);
}

static void gather_of_pieces(void **state)
{
    (void)state;
    enum { N = 4, BYTES = 1000 };
    struct rdma_pair p;
    pair_open(&p, &(struct rdma_pair_options){.send_sge = N});
    fill(p.a.mem, 65536, 3);
    struct td_vb_send wr = write_of(&p, 1, 0, BYTES);
    wr.n_sge = N;
    for (uint32_t i = 0; i < N; i++)
        wr.sge[i] = (struct td_vb_sge){
            .addr = (uintptr_t)p.a.mem + (N - i) * 10000, .bytes = BYTES + i, .lkey = p.a.mr->lkey};
    post(p.a.qp, &wr, 1);
    expect_wc(p.a.cq, 1, TD_VB_WC_SUCCESS);
    uint32_t at = 0;
    for (uint32_t i = 0; i < N; at += BYTES + i, i++)
        assert_memory_equal(p.b.mem + at, p.a.mem + (N - i) * 10000, BYTES + i);
    assert_int_equal(p.b.mem[at], 0);
    pair_close(&p);
}

static void inline_needs_no_key(void **state)
{
    (void)state;
    struct rdma_pair p;
    pair_open(&p, &(struct rdma_pair_options){.inline_bytes = 64});
    fill(p.a.mem, 4096, 4);
    struct td_vb_send wr = write_of(&p, 1, 0, 64);
    wr.sge[0].lkey = 0xdead;
    post(p.a.qp, &wr, 1);
    memset(p.a.mem, 0, 32); /* the CPU has copied them */
    expect_wc(p.a.cq, 1, TD_VB_WC_SUCCESS);
    fill(p.a.mem, 4096, 4);
    assert_memory_equal(p.b.mem, p.a.mem, 64);
    pair_close(&p);

    pair_open(&p, NULL); /* not asked for: the key counts, however short */
    assert_int_equal(p.a.caps.inline_bytes, 0);
    wr = write_of(&p, 1, 0, 64);
    wr.sge[0].lkey = 0xdead;
    post(p.a.qp, &wr, 1);
    struct td_vb_wc wc = wait_wc(p.a.cq);
    /* the latter is Soft-RoCE's word for it */
    assert_true(wc.status == TD_VB_WC_LOC_PROT || wc.status == TD_VB_WC_LOC_QP_OP);
    pair_close(&p);
}

static void write_imm_of_nothing(void **state)
{
    (void)state;
    struct rdma_pair p;
    pair_open(&p, NULL);
    assert_int_equal(vb->post_recv(p.b.qp, 77, 2), 0);
    fill(p.a.mem, 4096, 5);
    struct td_vb_send wrs[2] = {
        write_of(&p, 1, 0, 4096),
        {.id = 2, .op = TD_VB_WRITE_IMM, .signaled = true, .imm = 0x01020304}};
    wrs[0].signaled = false;
    wrs[1].remote_addr = p.b.mr->addr;
    wrs[1].rkey = p.b.mr->rkey;
    post(p.a.qp, wrs, 2);
    struct td_vb_wc wc = wait_wc(p.b.cq);
    assert_memory_equal(p.a.mem, p.b.mem, 4096); /* what was written before has arrived before */
    assert_int_equal(wc.status, TD_VB_WC_SUCCESS);
    assert_int_equal(wc.op, TD_VB_RECV_IMM);
    assert_int_equal(wc.id, 77);
    assert_int_equal(wc.imm, 0x01020304);
    assert_int_equal(wc.qp_num, p.b.qp->num);
    expect_wc(p.a.cq, 2, TD_VB_WC_SUCCESS);
    /* With bytes, too. */
    struct td_vb_send wr = write_of(&p, 3, 8192, 100);
    fill(p.a.mem + 8192, 100, 6);
    wr.op = TD_VB_WRITE_IMM;
    wr.imm = UINT32_MAX;
    post(p.a.qp, &wr, 1);
    wc = wait_wc(p.b.cq);
    assert_int_equal(wc.op, TD_VB_RECV_IMM);
    assert_int_equal(wc.imm, UINT32_MAX);
    assert_memory_equal(p.a.mem + 8192, p.b.mem + 8192, 100);
    expect_wc(p.a.cq, 3, TD_VB_WC_SUCCESS);
    /* No receive left, and rnr_retry 0: loud at once. */
    wr.id = 4;
    post(p.a.qp, &wr, 1);
    expect_wc(p.a.cq, 4, TD_VB_WC_RNR_RETRY_EXC);
    pair_close(&p);
}

static void reads_bring_bytes(void **state)
{
    (void)state;
    enum { BYTES = 200000 };
    struct rdma_pair p;
    pair_open(&p, NULL);
    fill(p.b.mem, BYTES, 7);
    struct td_vb_send wr = write_of(&p, 9, 0, BYTES);
    wr.op = TD_VB_READ;
    post(p.a.qp, &wr, 1);
    struct td_vb_wc wc = wait_wc(p.a.cq);
    assert_int_equal(wc.status, TD_VB_WC_SUCCESS);
    assert_int_equal(wc.op, TD_VB_READ);
    assert_memory_equal(p.a.mem, p.b.mem, BYTES);
    /* A fenced WRITE waits for the READ before it: what comes back is what was there. */
    fill(p.b.mem + 300000, 65536, 8);
    struct td_vb_send wrs[2] = {write_of(&p, 10, 300000, 65536), write_of(&p, 11, 300000, 65536)};
    wrs[0].op = TD_VB_READ;
    wrs[1].fence = true;
    wrs[1].sge[0].addr = (uintptr_t)p.a.mem + 400000;
    uint8_t *expected = malloc(65536);
    assert_non_null(expected);
    memcpy(expected, p.b.mem + 300000, 65536);
    post(p.a.qp, wrs, 2);
    expect_wc(p.a.cq, 10, TD_VB_WC_SUCCESS);
    expect_wc(p.a.cq, 11, TD_VB_WC_SUCCESS);
    assert_memory_equal(p.a.mem + 300000, expected, 65536);
    assert_memory_equal(p.b.mem + 300000, p.a.mem + 400000, 65536);
    free(expected);
    pair_close(&p);
}

static void channel_wakes(void **state)
{
    (void)state;
    struct rdma_pair p;
    pair_open(&p, NULL);
    int fd = vb->cq_fd(p.a.cq);
    assert_true(fcntl(fd, F_GETFL) & O_NONBLOCK);
    assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    struct td_vb_send wr = write_of(&p, 1, 0, 64);
    post(p.a.qp, &wr, 1); /* not armed: completes without an event */
    expect_wc(p.a.cq, 1, TD_VB_WC_SUCCESS);
    assert_false(is_readable(fd, 0));
    for (uint64_t i = 2; i < 6; i++) {
        assert_int_equal(vb->cq_arm(p.a.cq), 0);
        expect_none(p.a.cq);
        wr.id = i;
        post(p.a.qp, &wr, 1);
        assert_true(is_readable(fd, WAIT_MS));
        vb->cq_clear(p.a.cq);
        assert_false(is_readable(fd, 0));
        expect_wc(p.a.cq, i, TD_VB_WC_SUCCESS);
    }
    vb->cq_clear(p.a.cq); /* nothing there: returns */
    /* An event that nobody took does not keep the queue from being destroyed. */
    assert_int_equal(vb->cq_arm(p.a.cq), 0);
    post(p.a.qp, &wr, 1);
    assert_true(is_readable(fd, WAIT_MS));
    pair_close(&p);
}

static void shared_receives(void **state)
{
    (void)state;
    struct rdma_pair p, q;
    struct td_vb_limits l;
    assert_int_equal(vb->query(device_b, &l), 0);
    if (l.max_srq == 0) skip();
    pair_open(&p, &(struct rdma_pair_options){.use_srq = true});
    /* A second queue pair at b that takes from the same shared queue. */
    pair_open(&q, NULL);
    vb->qp_destroy(q.b.qp);
    struct td_vb_qp_caps caps = {.send_wr = 16, .send_sge = 1, .srq = p.b.srq};
    assert_int_equal(vb->qp_create(device_b, p.b.cq, &caps, &q.b.qp), 0);
    assert_int_equal(caps.recv_wr, 0);
    assert_int_equal(vb->qp_init(q.b.qp, 1, 0, TD_VB_REMOTE_WRITE), 0);
    vb->qp_destroy(q.a.qp);
    assert_int_equal(vb->qp_create(device_a, q.a.cq, &q.a.caps, &q.a.qp), 0);
    assert_int_equal(vb->qp_init(q.a.qp, 1, 0, TD_VB_REMOTE_WRITE), 0);
    end_connect(&q.a, &q.b, 0, &(struct rdma_pair_options){0});
    end_connect(&q.b, &q.a, 0, &(struct rdma_pair_options){0});

    assert_int_equal(vb->srq.post(p.b.srq, 55, 4), 0);
    for (uint32_t i = 0; i < 4; i++) {
        struct rdma_pair *from = i % 2 ? &q : &p;
        struct td_vb_send wr = {.id = i,
                                .op = TD_VB_WRITE_IMM,
                                .signaled = true,
                                .imm = i,
                                .remote_addr = from->b.mr->addr,
                                .rkey = from->b.mr->rkey};
        post(from->a.qp, &wr, 1);
        expect_wc(from->a.cq, i, TD_VB_WC_SUCCESS);
        struct td_vb_wc wc = wait_wc(p.b.cq);
        assert_int_equal(wc.status, TD_VB_WC_SUCCESS);
        assert_int_equal(wc.op, TD_VB_RECV_IMM);
        assert_int_equal(wc.id, 55);
        assert_int_equal(wc.imm, i);
        assert_int_equal(wc.qp_num, from->b.qp->num);
    }
    pair_close(&q);
    pair_close(&p);
}

static void bad_keys_are_refused(void **state)
{
    (void)state;
    for (int which = 0; which < 4; which++) {
        struct rdma_pair p;
        struct td_vb_mr *gone = NULL;
        pair_open(&p, NULL);
        fill(p.b.mem, 4096, 9);
        struct td_vb_send wrs[2] = {write_of(&p, 1, 0, 4096), write_of(&p, 2, 0, 64)};
        switch (which) {
        case 0:
            wrs[0].rkey ^= 0x00ff0000;
            break;
        case 1:
            wrs[0].remote_addr += PAIR_BYTES - 2048;
            break; /* half of it stands outside */
        case 2:    /* deregistered */
            assert_int_equal(
                vb->reg(p.b.device, p.b.mem, 8192, TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE, &gone),
                0);
            wrs[0].rkey = gone->rkey;
            assert_int_equal(vb->dereg(gone), 0);
            break;
        case 3: /* registered without remote access */
            assert_int_equal(vb->reg(p.b.device, p.b.mem, 8192, TD_VB_LOCAL_WRITE, &gone), 0);
            wrs[0].rkey = gone->rkey;
            break;
        }
        memset(p.a.mem, 0xee, 4096);
        post(p.a.qp, wrs, 2);
        expect_wc(p.a.cq, 1, TD_VB_WC_REM_ACCESS);
        expect_wc(p.a.cq, 2, TD_VB_WC_WR_FLUSH);
        fill(p.a.mem, 4096, 9);
        assert_memory_equal(p.b.mem, p.a.mem, 4096); /* nothing was written */
        if (which == 3) assert_int_equal(vb->dereg(gone), 0);
        pair_close(&p);
    }
}

/* The target of a refused WRITE learns of it, too: its receives come back and its queue pair is
 * of no more use. */
static void target_of_a_bad_key_fails_too(void **state)
{
    (void)state;
    struct rdma_pair p;
    pair_open(&p, NULL);
    assert_int_equal(vb->post_recv(p.b.qp, 70, 3), 0);
    struct td_vb_send wr = write_of(&p, 1, 0, 64);
    wr.rkey ^= 0x00ff0000;
    post(p.a.qp, &wr, 1);
    expect_wc(p.a.cq, 1, TD_VB_WC_REM_ACCESS);
    for (int i = 0; i < 3; i++) expect_wc(p.b.cq, 70, TD_VB_WC_WR_FLUSH);
    pair_close(&p);
}

static void fork_leaves_registered_pages(void **state)
{
    (void)state;
    struct rdma_pair p;
    pair_open(&p, NULL);
    fill(p.a.mem, 65536, 13);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)pause(); /* lives, and shares the pages, until it is killed */
        _exit(0);
    }
    memset(p.b.mem, 1, 65536); /* without care this would move the parent to other pages than the
                                  device knows */
    struct td_vb_send wr = write_of(&p, 1, 0, 65536);
    post(p.a.qp, &wr, 1);
    expect_wc(p.a.cq, 1, TD_VB_WC_SUCCESS);
    assert_memory_equal(p.a.mem, p.b.mem, 65536);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    pair_close(&p);
}

static void dead_peer_is_noticed(void **state)
{
    (void)state;
    struct rdma_pair p;
    pair_open(&p, &(struct rdma_pair_options){.timeout = 10, .retry = 2}); /* 4 ms each */
    struct td_vb_send wrs[2] = {write_of(&p, 1, 0, 4096), write_of(&p, 2, 0, 4096)};
    vb->qp_destroy(p.b.qp);
    p.b.qp = NULL;
    post(p.a.qp, wrs, 2);
    expect_wc(p.a.cq, 1, TD_VB_WC_RETRY_EXC);
    expect_wc(p.a.cq, 2, TD_VB_WC_WR_FLUSH);
    pair_close(&p);
}

static void error_state_flushes_all(void **state)
{
    (void)state;
    enum { N_SENDS = 20, N_RECVS = 30 };
    struct rdma_pair p;
    struct td_vb_send wrs[N_SENDS];
    /* seconds until it would give up by itself */
    pair_open(&p, &(struct rdma_pair_options){.timeout = 20});
    vb->qp_destroy(p.b.qp);
    p.b.qp = NULL;
    assert_int_equal(vb->post_recv(p.a.qp, 1000, N_RECVS), 0);
    for (uint32_t i = 0; i < N_SENDS; i++) {
        wrs[i] = write_of(&p, i, i * 64, 64);
        wrs[i].signaled = i % 4 == 0;
    }
    post(p.a.qp, wrs, N_SENDS);
    assert_int_equal(vb->qp_error(p.a.qp), 0);
    uint32_t n_recvs = 0, next = 0;
    for (uint32_t i = 0; i < N_SENDS + N_RECVS; i++) { /* signalled or not: each comes back once,
                                                          sends in order */
        struct td_vb_wc wc = wait_wc(p.a.cq);
        assert_int_equal(wc.status, TD_VB_WC_WR_FLUSH);
        assert_int_equal(wc.qp_num, p.a.qp->num);
        if (wc.id == 1000)
            n_recvs++;
        else
            assert_int_equal(wc.id, next++);
    }
    assert_int_equal(n_recvs, N_RECVS);
    assert_int_equal(next, N_SENDS);
    expect_none(p.a.cq);
    pair_close(&p);
}

static void full_queue_takes_a_part(void **state)
{
    (void)state;
    enum { N = 400 };
    struct rdma_pair p;
    static struct td_vb_send wrs[N];
    pair_open(&p, &(struct rdma_pair_options){.send_wr = 16, .timeout = 20});
    vb->qp_destroy(p.b.qp); /* nothing completes, so nothing makes room */
    p.b.qp = NULL;
    uint32_t n_posted = UINT32_MAX, room = p.a.caps.send_wr;
    for (uint32_t i = 0; i < N; i++) wrs[i] = write_of(&p, i, 0, 8);
    assert_true(room < N);
    assert_int_equal(vb->post_send(p.a.qp, wrs, N, &n_posted), ENOMEM);
    printf("%u asked for, %u given, %u of %u taken\n", 16u, room, n_posted, (unsigned)N);
    assert_true(n_posted >= 16 && n_posted < N);
    wrs[1].n_sge = TD_VB_SGE_MAX + 1;
    uint32_t n_more = UINT32_MAX;
    assert_int_not_equal(vb->post_send(p.a.qp, wrs, 1, &n_more), 0);
    assert_int_equal(n_more, 0);
    assert_int_equal(vb->qp_error(p.a.qp), 0);
    /* exactly those */
    for (uint32_t i = 0; i < n_posted; i++) expect_wc(p.a.cq, i, TD_VB_WC_WR_FLUSH);
    expect_none(p.a.cq);
    pair_close(&p);
}

static void bad_request_stops_the_chain(void **state)
{
    (void)state;
    struct rdma_pair p;
    pair_open(&p, NULL);
    struct td_vb_send wrs[3] = {write_of(&p, 1, 0, 64), write_of(&p, 2, 64, 64),
                                write_of(&p, 3, 128, 64)};
    uint32_t n_posted = UINT32_MAX;
    fill(p.a.mem, 192, 10);
    wrs[1].n_sge = TD_VB_SGE_MAX + 1;
    assert_int_equal(vb->post_send(p.a.qp, wrs, 3, &n_posted), EINVAL);
    assert_int_equal(n_posted, 1);
    expect_wc(p.a.cq, 1, TD_VB_WC_SUCCESS);
    assert_memory_equal(p.a.mem, p.b.mem, 64);
    assert_int_equal(p.b.mem[128], 0);
    wrs[0].op = TD_VB_RECV_IMM;
    assert_int_equal(vb->post_send(p.a.qp, wrs, 1, &n_posted), EINVAL);
    assert_int_equal(n_posted, 0);
    wrs[0].op = TD_VB_BIND_MW;
    assert_int_equal(vb->post_send(p.a.qp, wrs, 1, &n_posted), EINVAL); /* without a window */
    assert_int_equal(vb->post_send(p.a.qp, wrs, 0, &n_posted), 0);
    assert_int_equal(n_posted, 0);
    expect_none(p.a.cq);
    pair_close(&p);
}

static void bind_window(struct rdma_pair *p, uint64_t id, struct td_vb_mw *mw)
{
    uint32_t old_key = mw->rkey;
    struct td_vb_send bind = {.id = id,
                              .op = TD_VB_BIND_MW,
                              .signaled = true,
                              .mw = mw,
                              .bind_mr = p->b.mr,
                              .bind_addr = p->b.mr->addr + 8192,
                              .bind_bytes = 4096};
    post(p->b.qp, &bind, 1);
    assert_int_not_equal(mw->rkey, old_key);
    struct td_vb_wc wc = wait_wc(p->b.cq);
    assert_int_equal(wc.id, id);
    assert_int_equal(wc.status, TD_VB_WC_SUCCESS);
    assert_int_equal(wc.op, TD_VB_BIND_MW);
}

static void invalidate_window(struct rdma_pair *p, uint64_t id, uint32_t key)
{
    struct td_vb_send inv = {.id = id, .op = TD_VB_LOCAL_INV, .signaled = true, .rkey = key};
    post(p->b.qp, &inv, 1);
    struct td_vb_wc wc = wait_wc(p->b.cq);
    assert_int_equal(wc.status, TD_VB_WC_SUCCESS);
    assert_int_equal(wc.op, TD_VB_LOCAL_INV);
}

/* A write outside of the window and inside of the region; or by the key of a window that is closed,
 * and is open again under another key. It is refused. */
static void write_against_window(struct rdma_pair *p, struct td_vb_mw *mw, bool is_closed)
{
    struct td_vb_send wr = write_of(p, 3, is_closed ? 8192 : 12288, is_closed ? 4096 : 64);
    wr.rkey = mw->rkey;
    if (is_closed) {
        uint32_t old_key = mw->rkey;
        invalidate_window(p, 4, old_key);
        bind_window(p, 5, mw);
        wr.id = 6;
        wr.rkey = mw->rkey;
        post(p->a.qp, &wr, 1);
        expect_wc(p->a.cq, 6, TD_VB_WC_SUCCESS);
        wr.id = 3;
        wr.rkey = old_key;
    }
    post(p->a.qp, &wr, 1);
    struct td_vb_wc wc = wait_wc(p->a.cq);
    if (!is_closed && wc.status == TD_VB_WC_SUCCESS && strncmp(name_b, "rxe", 3) == 0) {
        printf("%s: a window lets through what stands outside of it: Soft-RoCE looks at the "
               "region's bounds alone\n",
               name_b);
    } else {
        assert_int_equal(wc.status, TD_VB_WC_REM_ACCESS);
        assert_int_equal(p->b.mem[12288], 0);
    }
}

/* The receiver binds a window over a part of its memory, hands its key out, and ends it. */
static void windows_open_and_close(void **state)
{
    (void)state;
    struct td_vb_limits l;
    struct rdma_pair p;
    struct td_vb_mw *mw = NULL;
    assert_int_equal(vb->query(device_b, &l), 0);
    if (!l.mw_type2) {
        printf("%s: no type 2 windows\n", name_b);
        skip();
    }
    for (int is_closed = 0; is_closed < 2; is_closed++) {
        pair_open(&p, NULL);
        assert_int_equal(vb->mw.alloc(p.b.device, &mw), 0);
        bind_window(&p, 1, mw);
        fill(p.a.mem, 16384, 11);
        struct td_vb_send wr = write_of(&p, 2, 8192, 4096);
        wr.rkey = mw->rkey;
        post(p.a.qp, &wr, 1);
        expect_wc(p.a.cq, 2, TD_VB_WC_SUCCESS);
        assert_memory_equal(p.a.mem + 8192, p.b.mem + 8192, 4096);
        write_against_window(&p, mw, is_closed);
        assert_int_equal(vb->mw.free(mw), 0);
        pair_close(&p);
    }
}

static void one_device_with_itself(void **state)
{
    (void)state;
    struct rdma_pair p;
    struct rdma_pair_options o = {.same_device = true};
    pair_open(&p, &o);
    fill(p.a.mem, 65536, 12);
    struct td_vb_send wr = write_of(&p, 1, 0, 65536);
    post(p.a.qp, &wr, 1);
    expect_wc(p.a.cq, 1, TD_VB_WC_SUCCESS);
    assert_memory_equal(p.a.mem, p.b.mem, 65536);
    pair_close(&p);
}

static int all_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(devices_are_listed),
        cmocka_unit_test(limits_are_told),
        cmocka_unit_test(port_is_told),
        cmocka_unit_test(gids_are_told),
        cmocka_unit_test(errors_are_told),
        cmocka_unit_test(relaxed_ordering_registers),
        cmocka_unit_test(chain_of_writes_one_signalled),
        cmocka_unit_test(chain_longer_than_a_doorbell),
        cmocka_unit_test(many_completions_in_one_poll),
        cmocka_unit_test(gather_of_pieces),
        cmocka_unit_test(inline_needs_no_key),
        cmocka_unit_test(write_imm_of_nothing),
        cmocka_unit_test(reads_bring_bytes),
        cmocka_unit_test(channel_wakes),
        cmocka_unit_test(shared_receives),
        cmocka_unit_test(bad_keys_are_refused),
        cmocka_unit_test(target_of_a_bad_key_fails_too),
        cmocka_unit_test(fork_leaves_registered_pages),
        cmocka_unit_test(dead_peer_is_noticed),
        cmocka_unit_test(error_state_flushes_all),
        cmocka_unit_test(full_queue_takes_a_part),
        cmocka_unit_test(bad_request_stops_the_chain),
        cmocka_unit_test(windows_open_and_close),
        cmocka_unit_test(one_device_with_itself),
    };
    return cmocka_run_group_tests_name("verbs_real_test", tests, NULL, NULL);
}

int main(int argc, char **argv) { return rdma_main(argc, argv, all_tests); }
