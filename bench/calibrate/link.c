/* link.c - see link.h. One transfer at a time: grant, op, submit of everything, OP_DONE, revoke,
 * SLOT_FREE. The first of each size is not counted: it connects, or touches memory for the first
 * time. */
#include "bench/calibrate/link.h"

#include <string.h>

#include "common/base/stats.h"
#include "common/base/clock.h"
#include "common/base/wakeup.h"

#define WAIT_MS 10000
#define MAX_REPEATS 100

struct link_end {
    struct td_wakeup wakeup;
    struct td_arena arena;
    struct td_xfer *x;
};

static void ring(void *ctx) { td_wakeup_signal(ctx); }

static td_status end_open(struct link_end *e, const char *name, uint64_t incarnation,
                          enum td_xfer_path path, size_t block_bytes, int32_t n_blocks,
                          struct td_err *err)
{
    e->wakeup.fd = -1;
    td_status s = td_wakeup_open(&e->wakeup, err);
    if (!s) s = td_arena_create(block_bytes * (size_t)n_blocks, true, name, &e->arena, err);
    struct td_xfer_config c = {.instance = name,
                               .incarnation = incarnation,
                               .layout_hash = block_bytes,
                               .listen_host = "127.0.0.1",
                               .path = path,
                               .max_slots = 4,
                               .max_ops = 4,
                               .peer_timeout_ms = 2000,
                               .hooks = {.wake = ring, .ctx = &e->wakeup}};
    if (!s) s = td_xfer_open(&c, &e->x, err);
    if (!s) s = td_xfer_mem_add(e->x, &e->arena, block_bytes, n_blocks, err);
    return s;
}

static void end_close(struct link_end *e)
{
    if (e->x) td_xfer_close(e->x);
    td_arena_destroy(&e->arena);
    if (e->wakeup.fd >= 0) td_wakeup_close(&e->wakeup);
}

static td_status await(struct link_end *e, enum td_xfer_event_kind kind, struct td_err *err)
{
    struct td_xfer_event ev;
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    for (;;) {
        if (td_xfer_poll(e->x, &ev, 1)) {
            if (ev.kind == kind) return TD_OK;
            if (ev.status) return td_fail(err, ev.status, "link: a transfer failed: %s", ev.reason);
        } else if (!td_wakeup_wait(&e->wakeup, until)) {
            return td_fail(err, TD_ERR_DEADLINE, "link: a transfer is not over after %d ms",
                           WAIT_MS);
        }
    }
}

static td_status once(struct link_end *p, struct link_end *d, const int32_t *ids, int32_t n,
                      double *ret_s, struct td_err *err)
{
    static uint8_t blob[TD_XFER_BLOB_MAX]; /* one caller */
    size_t blob_bytes = sizeof blob;
    uint32_t slot, op;
    int32_t n_blocks;
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    td_status s = td_xfer_grant(d->x, ids, n, until, 0, &slot, blob, &blob_bytes, err);
    if (!s) s = td_xfer_op_start(p->x, blob, blob_bytes, until, 0, &op, &n_blocks, err);
    if (s) return s;
    uint64_t start = td_now_ns();
    s = td_xfer_submit(p->x, op, 0, ids, n, true, NULL, 0);
    if (s) return td_fail(err, s, "link: submit: %s", td_status_name(s));
    if ((s = await(p, TD_XFER_OP_DONE, err))) return s;
    *ret_s = (double)(td_now_ns() - start) / 1e9;
    if ((s = await(d, TD_XFER_SLOT_READY, err))) return s;
    td_xfer_revoke(d->x, slot, "measured");
    return await(d, TD_XFER_SLOT_FREE, err);
}

td_status link_measure(enum td_xfer_path path, size_t block_bytes, size_t max_bytes, int64_t repeat,
                       struct link_point ret[LINK_MAX_POINTS], size_t *ret_n, struct td_err *err)
{
    static const int32_t sizes[LINK_MAX_POINTS] = {1, 2, 8, 32, 128, 512, 2048, 8192};
    static int32_t ids[TD_XFER_MAX_BLOCKS];
    struct link_end p = {.wakeup.fd = -1}, d = {.wakeup.fd = -1};
    double times[MAX_REPEATS + 1];
    size_t n = 0;
    *ret_n = 0;
    while (n < LINK_MAX_POINTS && (n == 0 || (size_t)sizes[n] * block_bytes <= max_bytes)) n++;
    for (int32_t i = 0; i < TD_XFER_MAX_BLOCKS; i++) ids[i] = i;
    td_status s = repeat < 1 || repeat > MAX_REPEATS
                      ? td_fail(err, TD_ERR_INVALID, "link: %lld repeats, must be 1..%d",
                                (long long)repeat, MAX_REPEATS)
                      : TD_OK;
    if (!s) s = end_open(&d, "calibrate-decode", 2, path, block_bytes, sizes[n - 1], err);
    if (!s) s = end_open(&p, "calibrate-prefill", 1, path, block_bytes, sizes[n - 1], err);
    for (size_t i = 0; !s && i < n; i++) {
        for (int64_t k = 0; !s && k <= repeat; k++) s = once(&p, &d, ids, sizes[i], &times[k], err);
        if (s) break;
        td_stats_sort(times + 1, (size_t)repeat);
        ret[i] = (struct link_point){.n_blocks = sizes[i],
                                     .bytes = (double)sizes[i] * (double)block_bytes,
                                     .median_s = td_stats_percentile(times + 1, (size_t)repeat, 50),
                                     .least_s = times[1],
                                     .greatest_s = times[repeat]};
        *ret_n = i + 1;
    }
    end_close(&p);
    end_close(&d);
    return s;
}
