/* windows_cost.c - what memory windows cost a grant, printed as CSV: on Soft-RoCE devices, or on
 * the provider in memory, where the wire costs nothing and so all else shows.
 *
 *   windows_cost fake [REPEATS]             windows_cost DEVICE_A DEVICE_B [REPEATS]
 *
 * what=bind, end: one queue pair binds that many windows in one chain and waits, or ends them
 * and waits. what=ready, free: the engine, both ends in this process, a grant of so many runs of
 * one block: from op_start to SLOT_READY, and from the revoke after it to SLOT_FREE; with and
 * without windows in turns. Medians and 90th percentiles, in us. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/wakeup.h"
#include "common/base/entropy.h"
#include "tests/fake/verbs_fake.h"
#include "common/transfer/transfer.h"
#include "tests/rdma/rdma_pair.h"

#define BLOCK_BYTES 16384
#define N_BLOCKS 192
#define MAX_REPEATS 10000

static const int32_t run_counts[] = {1, 8, 64};
static int n_repeats = 300;
static const char *provider;
static struct td_fake_fabric *fabrics[3]; /* fake: sender, receiver, the raw pair */
static double samples[4][MAX_REPEATS];

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *what, int32_t n_runs, const char *windows, double *us)
{
    qsort(us, (size_t)n_repeats, sizeof *us, by_value);
    printf("%s,%s,%d,%s,%.1f,%.1f,%d\n", provider, what, n_runs, windows, us[n_repeats / 2],
           us[n_repeats * 9 / 10], n_repeats);
}

static double us_since(uint64_t begin_ns) { return (double)(td_now_ns() - begin_ns) / 1e3; }

static void chain(struct td_vb_qp *qp, struct td_vb_cq *cq, struct td_vb_send *wrs, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) wrs[i].signaled = i + 1 == n;
    post(qp, wrs, n);
    assert_int_equal(wait_wc(cq).status, TD_VB_WC_SUCCESS);
}

static void verbs_alone(void **state)
{
    (void)state;
    struct rdma_pair p;
    struct rdma_pair_options o = {.send_wr = 128};
    struct td_vb_mw *mw[64];
    pair_open(&p, &o);
    for (int i = 0; i < 64; i++) assert_int_equal(vb->mw.alloc(p.b.device, &mw[i]), 0);
    for (size_t k = 0; k < sizeof run_counts / sizeof run_counts[0]; k++) {
        uint32_t n = (uint32_t)run_counts[k];
        for (int r = 0; r < n_repeats; r++) {
            struct td_vb_send wrs[64] = {0};
            for (uint32_t i = 0; i < n; i++)
                wrs[i] = (struct td_vb_send){.op = TD_VB_BIND_MW,
                                             .mw = mw[i],
                                             .bind_mr = p.b.mr,
                                             .bind_addr = p.b.mr->addr + 2 * i * BLOCK_BYTES,
                                             .bind_bytes = BLOCK_BYTES};
            uint64_t begin = td_now_ns();
            chain(p.b.qp, p.b.cq, wrs, n);
            samples[0][r] = us_since(begin);
            for (uint32_t i = 0; i < n; i++)
                wrs[i] = (struct td_vb_send){.op = TD_VB_LOCAL_INV, .rkey = mw[i]->rkey};
            begin = td_now_ns();
            chain(p.b.qp, p.b.cq, wrs, n);
            samples[1][r] = us_since(begin);
        }
        report("bind", (int32_t)n, "yes", samples[0]);
        report("end", (int32_t)n, "yes", samples[1]);
    }
    for (int i = 0; i < 64; i++) assert_int_equal(vb->mw.free(mw[i]), 0);
    pair_close(&p);
}

struct end {
    struct td_arena arena;
    struct td_wakeup wakeup;
    struct td_xfer *x;
};

static void ring(void *ctx) { td_wakeup_signal(ctx); }

static void end_start(struct end *e, int side, bool windows)
{
    struct td_err err = {0};
    struct td_xfer_rdma_config rdma = {.verbs = fabrics[side] ? td_fake_verbs(fabrics[side]) : vb,
                                       .devices = fabrics[side] ? ""
                                                  : side        ? name_b
                                                                : name_a,
                                       .gid_index = -1,
                                       .windows = windows};
    struct td_xfer_config c = {.instance = side ? "d" : "p",
                               .incarnation = td_random_u64(),
                               .layout_hash = 1,
                               .listen_host = "127.0.0.1",
                               .path = TD_XFER_PATH_RDMA,
                               .max_slots = 4,
                               .max_ops = 4,
                               .peer_timeout_ms = 20000,
                               .rdma = &rdma,
                               .hooks = {.wake = ring, .ctx = &e->wakeup}};
    if (td_wakeup_open(&e->wakeup, &err) ||
        td_arena_create((size_t)N_BLOCKS * BLOCK_BYTES, false, "windows-cost", &e->arena, &err) ||
        td_xfer_open(&c, &e->x, &err) ||
        td_xfer_mem_add(e->x, &e->arena, BLOCK_BYTES, N_BLOCKS, &err))
        fail_msg("%s", err.msg);
}

static void end_stop(struct end *e)
{
    td_xfer_close(e->x);
    td_arena_destroy(&e->arena);
    td_wakeup_close(&e->wakeup);
}

static void wait_event(struct end *end, enum td_xfer_event_kind kind)
{
    struct td_xfer_event e;
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    while (!td_xfer_poll(end->x, &e, 1))
        if (!td_wakeup_wait(&end->wakeup, until)) fail_msg("no event within %d ms", WAIT_MS);
    if (e.kind != kind) fail_msg("event %d: %s", (int)e.kind, e.reason);
}

static void one_grant(struct end *p, struct end *d, int32_t n, double *ret_ready_us,
                      double *ret_free_us)
{
    struct td_err err = {0};
    static uint8_t blob[TD_XFER_BLOB_MAX];
    size_t bytes;
    uint32_t slot, op;
    int32_t ids[64], n_blocks;
    for (int32_t i = 0; i < n; i++) ids[i] = 2 * i;
    if (td_xfer_grant(d->x, ids, n, TD_NEVER_NS, 0, &slot, blob, &bytes, &err))
        fail_msg("%s", err.msg);
    uint64_t begin = td_now_ns();
    if (td_xfer_op_start(p->x, blob, bytes, TD_NEVER_NS, 0, &op, &n_blocks, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(td_xfer_submit(p->x, op, 0, ids, n, true, "", 0), TD_OK);
    wait_event(d, TD_XFER_SLOT_READY);
    *ret_ready_us = us_since(begin);
    begin = td_now_ns();
    td_xfer_revoke(d->x, slot, "taken");
    wait_event(d, TD_XFER_SLOT_FREE);
    *ret_free_us = us_since(begin);
    wait_event(p, TD_XFER_OP_DONE);
}

static void grants(void **state)
{
    (void)state;
    struct end p, d[2];
    end_start(&p, 0, false);
    for (int w = 0; w < 2; w++) end_start(&d[w], 1, w);
    for (size_t k = 0; k < sizeof run_counts / sizeof run_counts[0]; k++) {
        for (int r = -5; r < n_repeats; r++) /* the first few connect and warm up */
            for (int w = 0; w < 2; w++)
                one_grant(&p, &d[w], run_counts[k], &samples[2 * w][r < 0 ? 0 : r],
                          &samples[2 * w + 1][r < 0 ? 0 : r]);
        for (int w = 0; w < 2; w++) {
            report("ready", run_counts[k], w ? "yes" : "no", samples[2 * w]);
            report("free", run_counts[k], w ? "yes" : "no", samples[2 * w + 1]);
        }
    }
    end_stop(&p);
    for (int w = 0; w < 2; w++) end_stop(&d[w]);
}

static int all_tests(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(verbs_alone), cmocka_unit_test(grants)};
    printf("provider,what,runs,windows,median_us,p90_us,repeats\n");
    return cmocka_run_group_tests(tests, NULL, NULL);
}

int main(int argc, char **argv)
{
    bool fake = argc > 1 && strcmp(argv[1], "fake") == 0;
    int at = fake ? 2 : 3;
    if (argc > at) n_repeats = (int)strtol(argv[at], NULL, 10);
    if (n_repeats < 1 || n_repeats > MAX_REPEATS) return 2;
    provider = fake ? "fake" : "rxe";
    if (!fake) return rdma_main(argc > 3 ? 3 : argc, argv, all_tests);
    char path[64], names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX];
    struct td_err err = {0};
    struct td_fake_options o;
    uint32_t n = 0;
    snprintf(path, sizeof path, "/dev/shm/tandem-windows-cost-%d", (int)getpid());
    td_fake_options_default(&o);
    o.path = path;
    o.devices = 1;
    for (int i = 0; i < 3; i++)
        if (td_fake_fabric_open(&o, &fabrics[i], &err)) {
            fprintf(stderr, "%s\n", err.msg);
            return 1;
        }
    vb = td_fake_verbs(fabrics[2]);
    int failed = vb->list(vb, names, &n) || vb->open(vb, names[0], &device_a);
    device_b = device_a;
    if (!failed) failed = all_tests();
    vb->close(device_a);
    for (int i = 0; i < 3; i++) td_fake_fabric_close(fabrics[i]);
    unlink(path);
    return failed ? 1 : 0;
}
