/* rdma_pair.c - see the header. */
#include "tests/rdma/rdma_pair.h"

#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/random.h"

extern char **environ;

const struct td_verbs *vb;
struct td_vb_device *device_a, *device_b;
const char *name_a = "rxe0", *name_b = "rxe1";

int rdma_main(int argc, char **argv, int (*all_tests)(void))
{
    struct td_err err = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 1) name_a = argv[1];
    if (argc > 2) name_b = argv[2];
    if (td_verbs_load(&vb, &err)) {
        printf("skipped: %s\n", err.msg);
        return 77;
    }
    int rc = vb->open(vb, name_a, &device_a);
    if (rc == ENOSYS || rc == ENODEV) {
        printf("skipped: cannot open %s: %s\n", name_a, strerror(rc));
        return 77;
    }
    if (rc == 0) rc = vb->open(vb, name_b, &device_b);
    if (rc) {
        printf("cannot open %s or %s: %s\n", name_a, name_b, strerror(rc));
        vb->close(device_a);
        return 1;
    }
    int n_failed = all_tests();
    vb->close(device_b);
    vb->close(device_a);
    return n_failed ? 1 : 0;
}

static void end_open(struct rdma_end *e, struct td_vb_device *device,
                     const struct rdma_pair_options *o, bool use_srq)
{
    *e = (struct rdma_end){.device = device};
    assert_int_equal(vb->cq_create(device, 2048, &e->cq), 0);
    if (use_srq) assert_int_equal(vb->srq.create(device, 64, &e->srq), 0);
    e->caps = (struct td_vb_qp_caps){.send_wr = o->send_wr ? o->send_wr : 64,
                                     .recv_wr = o->recv_wr ? o->recv_wr : 64,
                                     .send_sge = o->send_sge ? o->send_sge : 1,
                                     .inline_bytes = o->inline_bytes,
                                     .srq = e->srq};
    struct td_vb_qp_caps asked = e->caps;
    assert_int_equal(vb->qp_create(device, e->cq, &e->caps, &e->qp), 0);
    assert_true(e->caps.send_wr >= asked.send_wr && e->caps.send_sge >= asked.send_sge &&
                e->caps.inline_bytes >= asked.inline_bytes);
    e->mem = aligned_alloc(4096, PAIR_BYTES);
    assert_non_null(e->mem);
    memset(e->mem, 0, PAIR_BYTES);
    unsigned access = TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE | TD_VB_REMOTE_READ;
    struct td_vb_limits limits;
    assert_int_equal(vb->query(device, &limits), 0);
    if (limits.mw_type2) access |= TD_VB_MW_BIND;
    assert_int_equal(vb->reg(device, e->mem, PAIR_BYTES, access, &e->mr), 0);
    assert_int_equal(vb->qp_init(e->qp, 1, 0, TD_VB_REMOTE_WRITE | TD_VB_REMOTE_READ), 0);
}

void end_connect(struct rdma_end *e, const struct rdma_end *peer, uint32_t mtu_bytes,
                 const struct rdma_pair_options *o)
{
    struct td_vb_gid gid;
    assert_int_equal(vb->query_gid(peer->device, 1, GID_INDEX, &gid), 0);
    struct td_vb_route r = {.port = 1,
                            .hop_limit = 64,
                            .gid_index = GID_INDEX,
                            .ethernet = true,
                            .mtu_bytes = mtu_bytes ? mtu_bytes : 4096,
                            .remote_qp = peer->qp->num,
                            .remote_psn = peer->qp->num & 0xffff,
                            .local_psn = e->qp->num & 0xffff,
                            .timeout = o->timeout ? o->timeout : 14,
                            .retry = o->retry ? o->retry : 7,
                            .rnr_retry = 0,
                            .min_rnr_timer = 12,
                            .rd_atomic_in = 4,
                            .rd_atomic_out = 4};
    memcpy(r.remote_gid, gid.raw, sizeof r.remote_gid);
    assert_int_equal(vb->qp_rtr(e->qp, &r), 0);
    assert_int_equal(vb->qp_rts(e->qp, &r), 0);
}

void pair_open(struct rdma_pair *p, const struct rdma_pair_options *options)
{
    static const struct rdma_pair_options none;
    const struct rdma_pair_options *o = options ? options : &none;
    end_open(&p->a, device_a, o, false);
    end_open(&p->b, o->same_device ? device_a : device_b, o, o->use_srq);
    end_connect(&p->a, &p->b, o->mtu_a, o);
    end_connect(&p->b, &p->a, o->mtu_b, o);
}

static void end_close(struct rdma_end *e)
{
    vb->qp_destroy(e->qp);
    assert_int_equal(vb->dereg(e->mr), 0);
    vb->srq.destroy(e->srq);
    vb->cq_destroy(e->cq);
    free(e->mem);
    *e = (struct rdma_end){0};
}

void pair_close(struct rdma_pair *p)
{
    end_close(&p->a);
    end_close(&p->b);
}

struct td_vb_send write_of(const struct rdma_pair *p, uint64_t id, uint32_t offset, uint32_t bytes)
{
    return (struct td_vb_send){
        .id = id,
        .op = TD_VB_WRITE,
        .signaled = true,
        .n_sge = 1,
        .sge = {{.addr = (uintptr_t)p->a.mem + offset, .bytes = bytes, .lkey = p->a.mr->lkey}},
        .remote_addr = p->b.mr->addr + offset,
        .rkey = p->b.mr->rkey};
}

void post(struct td_vb_qp *qp, struct td_vb_send *wrs, uint32_t n)
{
    uint32_t n_posted = 0;
    assert_int_equal(vb->post_send(qp, wrs, n, &n_posted), 0);
    assert_int_equal(n_posted, n);
}

struct td_vb_wc wait_wc(struct td_vb_cq *cq)
{
    struct td_vb_wc wc = {0};
    uint64_t deadline_ms = td_now_ns() / 1000000 + WAIT_MS;
    for (;;) {
        int n = vb->poll(cq, &wc, 1);
        assert_in_range(n, 0, 1);
        if (n == 1) return wc;
        if (td_now_ns() / 1000000 > deadline_ms) fail_msg("no completion within %d ms", WAIT_MS);
        sched_yield(); /* two CPUs, and the device is one of the programs on them */
    }
}

void expect_wc(struct td_vb_cq *cq, uint64_t id, enum td_vb_wc_status status)
{
    struct td_vb_wc wc = wait_wc(cq);
    if (wc.status != status || wc.id != id)
        fail_msg("completion %llu: %s (vendor %u), expected %llu: %s", (unsigned long long)wc.id,
                 td_vb_wc_status_name(wc.status), wc.vendor_error, (unsigned long long)id,
                 td_vb_wc_status_name(status));
}

void expect_none(struct td_vb_cq *cq)
{
    struct td_vb_wc wc;
    assert_int_equal(vb->poll(cq, &wc, 1), 0);
}

void fill(uint8_t *mem, uint32_t bytes, uint32_t seed)
{
    uint64_t state = seed;
    for (uint32_t i = 0; i < bytes; i++) mem[i] = (uint8_t)(td_random_step(&state) >> 56);
}

void run_program(const char *name, ...)
{
    char *argv[24] = {(char *)(uintptr_t)name};
    va_list args;
    va_start(args, name);
    for (int i = 1; i < 23 && (argv[i] = va_arg(args, char *)); i++) {
    }
    va_end(args);
    pid_t pid;
    int status = -1;
    assert_int_equal(posix_spawnp(&pid, name, NULL, NULL, argv, environ), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (status != 0)
        fail_msg("%s %s %s ...: status %d", name, argv[1], argv[2] ? argv[2] : "", status);
}
