/* tandem-xfer-core-bench: what the protocol costs a sender per RDMA work request, without a device: for a whole prompt, op_start, the receiver's
 * TARGETS, submit, every td_xfer_core_wr_next in turn over two queue pairs, and every completion. Both cores are in this process; nothing is sent.
 *
 * tandem-xfer-core-bench [REPEATS]    one CSV row per shape and order of blocks; medians (least..greatest) of REPEATS, default 31 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/xfer/xfer_core.h"

#define MAX_REPEATS 1001
#define MAX_WRS (1u << 17)
#define WR_BYTES (1u << 20)

struct side {
    struct td_xfer_core core;
    uint64_t rng;
    struct td_xfer_frame sent; /* the last one */
};

static struct td_xfer_wr wrs[MAX_WRS];

static void need(bool ok, const char *what)
{
    if (ok) return;
    fprintf(stderr, "tandem-xfer-core-bench: %s failed\n", what);
    exit(1);
}

static uint64_t random_u64(void *ctx)
{
    struct side *s = ctx;
    return s->rng = s->rng * 6364136223846793005ull + 1442695040888963407ull;
}

static void keep_frame(void *ctx, uint64_t conn, const struct td_xfer_frame *frame, const void *payload)
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
    struct td_xfer_core_hooks hooks = {.ctx = s, .random_u64 = random_u64, .send = keep_frame, .op_handle = no_handle};
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

struct figures {
    double plan_us, done_us;
    uint32_t n_wr;
};

/* One prompt. `at`: how often before, so that connections and times do not repeat. */
static struct figures one(struct side *p, struct side *d, const int32_t *src, const int32_t *dst, int32_t n, uint64_t at)
{
    struct td_xfer_grant_blob g = {.n_blocks = n, .block_bytes = p->core.block_bytes};
    struct td_xfer_wr_limits limits = {.max_bytes = WR_BYTES, .max_pieces = 16, .src_region = n, .dst_region = n};
    struct td_xfer_tx tx;
    uint32_t slot, op, cursor = 0, wr_cursor = 0, n_wr = 0;
    uint64_t conn = at + 1, now = td_now_ns(), spent = 0, t;
    need(td_xfer_core_grant(&d->core, dst, n, TD_NEVER_NS, 0, &slot, NULL) == TD_OK, "grant");
    g.slot = slot;
    g.generation = d->core.slots[slot].generation;
    memcpy(g.key, d->core.slots[slot].key, sizeof g.key);

    t = td_now_ns();
    need(td_xfer_core_op_start(&p->core, &g, TD_NEVER_NS, 0, &op, NULL) == TD_OK, "op_start");
    td_xfer_core_op_attach(&p->core, op, conn, TD_XFER_PATH_RDMA, false);
    spent += td_now_ns() - t;
    need(td_xfer_core_rx_open(&d->core, conn, TD_XFER_PATH_RDMA, &p->sent, g.key) == TD_OK, "open");
    while (td_xfer_core_targets_next(&d->core, conn, &cursor, &tx)) {
        struct td_xfer_run runs[TD_XFER_RUNS_MAX];
        memcpy(runs, tx.payload, tx.frame.length);
        t = td_now_ns();
        need(td_xfer_core_rx_targets(&p->core, conn, &tx.frame, runs, (int32_t)(tx.frame.length / sizeof runs[0]), n, false) == TD_OK, "targets");
        spent += td_now_ns() - t;
    }
    t = td_now_ns();
    need(td_xfer_core_submit(&p->core, now, op, 0, src, n, true, "", 0) == TD_OK, "submit");
    for (uint32_t idle = 0, qp = 0; idle < 2; qp ^= 1) {
        uint32_t before = n_wr;
        while (n_wr < MAX_WRS && n_wr - before < 32 && td_xfer_core_wr_next(&p->core, conn, qp, 0, &wr_cursor, &limits, &wrs[n_wr])) n_wr++;
        idle = n_wr > before ? 0 : idle + 1;
    }
    struct figures f = {.n_wr = n_wr, .plan_us = (double)(spent + td_now_ns() - t) / 1e3};
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < n_wr; i++) bytes += wrs[i].n_bytes;
    need(bytes == (uint64_t)n * p->core.block_bytes, "planning every byte once");
    t = td_now_ns();
    for (uint32_t i = 0; i < n_wr; i++) td_xfer_core_wr_done(&p->core, now, wrs[i].op, wrs[i].n_bytes, true);
    f.done_us = (double)(td_now_ns() - t) / 1e3;

    struct td_xfer_event e;
    td_xfer_core_cancel(&p->core, op, "measured");
    td_xfer_core_conn_fenced(&d->core, conn, 0);
    td_xfer_core_conn_lost(&d->core, now, conn, TD_ERR_PEER, "measured", false);
    td_xfer_core_revoke(&d->core, slot, "measured");
    td_xfer_core_conn_lost(&p->core, now, conn, TD_ERR_PEER, "measured", false);
    td_xfer_core_tick(&d->core, td_now_ns());
    td_xfer_core_tick(&p->core, td_now_ns());
    while (td_xfer_core_poll(&p->core, &e, 1)) {}
    while (td_xfer_core_poll(&d->core, &e, 1)) {}
    return f;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv)
{
    static const struct { const char *name; uint64_t block_bytes; int32_t n; } shapes[] = {
        {"llama-8b/32768", 2u << 20, 2048}, {"64k blocks", 64u << 10, 4096}, {"4k blocks", 4096, 4096},
    };
    long repeats = argc > 1 ? strtol(argv[1], NULL, 10) : 31;
    if (repeats < 1 || repeats > MAX_REPEATS) {
        fprintf(stderr, "tandem-xfer-core-bench: repeats must be 1..%d\n", MAX_REPEATS);
        return 2;
    }
    printf("what,blocks,block_bytes,order,work_requests,plan_us,plan_us_least,plan_us_greatest,plan_ns_per_wr,done_ns_per_wr,repeats\n");
    for (size_t k = 0; k < 2 * (sizeof shapes / sizeof shapes[0]); k++) {
        bool shuffled = k % 2;
        int32_t n = shapes[k / 2].n;
        static struct side p, d;
        static double plan[MAX_REPEATS], done[MAX_REPEATS];
        int32_t *src = calloc((size_t)n, sizeof *src), *dst = calloc((size_t)n, sizeof *dst);
        need(src && dst, "memory");
        p = (struct side){.rng = 1};
        d = (struct side){.rng = 2};
        side_open(&p, shapes[k / 2].block_bytes, n);
        side_open(&d, shapes[k / 2].block_bytes, n);
        fill_ids(src, n, shuffled, &p);
        fill_ids(dst, n, shuffled, &d);
        struct figures f = one(&p, &d, src, dst, n, 0); /* first touch */
        for (long i = 0; i < repeats; i++) {
            f = one(&p, &d, src, dst, n, (uint64_t)i + 1);
            plan[i] = f.plan_us;
            done[i] = f.done_us;
        }
        qsort(plan, (size_t)repeats, sizeof plan[0], by_value);
        qsort(done, (size_t)repeats, sizeof done[0], by_value);
        double mid = plan[repeats / 2];
        printf("%s,%d,%" PRIu64 ",%s,%u,%.1f,%.1f,%.1f,%.1f,%.1f,%ld\n", shapes[k / 2].name, n, shapes[k / 2].block_bytes, shuffled ? "shuffled" : "neighbours",
               f.n_wr, mid, plan[0], plan[repeats - 1], mid * 1e3 / f.n_wr, done[repeats / 2] * 1e3 / f.n_wr, repeats);
        td_xfer_core_destroy(&p.core);
        td_xfer_core_destroy(&d.core);
        free(src);
        free(dst);
    }
    return 0;
}
