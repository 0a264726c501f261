/* xfer_soak_storm.c - connections made again very often, and very many at once; in one process,
 * each transfer checked.
 *
 * Again and again: in turn the sender's sockets are cut, and the sender is closed and opened
 * anew (another process, to its peer). Between the 50th round and the last neither descriptors
 * nor memory may grow. At once: every peer's first op starts before any connection stands. */
#include "tests/unit/xfer_soak.h"

#include <inttypes.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "common/base/progress.h"
#include "tests/fake/verbs_fake.h"

enum { N = 4, WAIT_S = 30, POOL = 1024, SLACK = 2 << 20, WARM = 50 };

struct side {
    struct td_wakeup wakeup;
    struct td_xfer *x;
    struct td_arena pool;
    struct td_fake_fabric *fabric;
};

static void ring(void *ctx) { td_wakeup_signal(ctx); }

static bool side_fabric(struct side *s, const char *path)
{
    struct td_fake_options options;
    struct td_err err;
    td_fake_options_default(&options);
    options.path = path;
    options.retry_ms = 20;
    options.spin_us = 1;
    return td_fake_fabric_open(&options, &s->fabric, &err) == TD_OK;
}

/* The endpoint; its fabric, when there is one, is open. */
static bool side_open(struct side *s, enum td_xfer_path path, struct td_fake_fabric *fabric,
                      uint32_t max_slots)
{
    struct td_err err = {0};
    struct td_xfer_rdma_config rdma = {.gid_index = -1,
                                       .timeout = 10,
                                       .retry = 3,
                                       .rnr_retry = 1,
                                       .verbs = fabric ? td_fake_verbs(fabric) : NULL};
    struct td_xfer_config config = {.instance = "storm",
                                    .incarnation = td_random_u64(),
                                    .layout_hash = 1,
                                    .listen_host = "127.0.0.1",
                                    .path = path,
                                    .max_slots = max_slots,
                                    .max_ops = 4,
                                    .peer_timeout_ms = 5000,
                                    .rdma = fabric ? &rdma : NULL,
                                    .hooks = {.wake = ring, .ctx = &s->wakeup}};
    if (!s->pool.base) {
        if (td_arena_create((size_t)POOL * SOAK_BLOCK_BYTES, true, "storm", &s->pool, &err))
            goto fail;
        if (td_wakeup_open(&s->wakeup, &err)) goto fail;
    }
    if (td_xfer_open(&config, &s->x, &err) ||
        td_xfer_mem_add(s->x, &s->pool, SOAK_BLOCK_BYTES, POOL, &err))
        goto fail;
    return true;
fail:
    fprintf(stderr, "violation: open: %s\n", err.msg);
    return false;
}

static void side_close(struct side *s)
{
    td_xfer_close(s->x);
    if (s->pool.base) td_wakeup_close(&s->wakeup);
    if (s->pool.base) td_arena_destroy(&s->pool);
    td_fake_fabric_close(s->fabric);
    *s = (struct side){0};
}

/* The next event but of paths, within the time. */
static bool next_event(struct side *s, uint64_t until, struct td_xfer_event *ret_e)
{
    for (;;) {
        while (td_xfer_poll(s->x, ret_e, 1))
            if (ret_e->kind != TD_XFER_PATH_CHOSEN) return true;
        if (td_now_ns() >= until) return false;
        td_wakeup_wait(&s->wakeup, until);
    }
}

static bool start(struct side *p, struct side *d, int32_t first, uint64_t user, uint32_t *ret_slot)
{
    static uint8_t blob[TD_XFER_BLOB_MAX];
    size_t bytes;
    int32_t ids[N], n;
    uint32_t op;
    struct td_err err = {0};
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_S * 1000);
    for (int32_t i = 0; i < N; i++) {
        ids[i] = first + i;
        memset((uint8_t *)d->pool.base + (size_t)ids[i] * SOAK_BLOCK_BYTES, 0, SOAK_BLOCK_BYTES);
        soak_fill((uint8_t *)p->pool.base + (size_t)i * SOAK_BLOCK_BYTES, soak_content(user, i));
    }
    if (td_xfer_grant(d->x, ids, N, until, user, ret_slot, blob, &bytes, &err) ||
        td_xfer_op_start(p->x, blob, bytes, until, user, &op, &n, &err)) {
        fprintf(stderr, "violation: start: %s\n", err.msg);
        return false;
    }
    for (int32_t i = 0; i < N; i++) ids[i] = i;
    size_t half = user % 2 ? SOAK_BLOCK_BYTES / 2 : 0; /* every other one in two parts */
    if (!half) return td_xfer_submit(p->x, op, 0, ids, N, true, "", 0) == TD_OK;
    for (size_t at = 0; at < SOAK_BLOCK_BYTES; at += half)
        if (td_xfer_submit_part(p->x, op, 0, ids, N, at, half)) return false;
    return td_xfer_submit(p->x, op, N, NULL, 0, true, "", 0) == TD_OK;
}

static bool content(const struct side *d, int32_t first, uint64_t user)
{
    for (int32_t i = 0; i < N; i++)
        if (!soak_check((const uint8_t *)d->pool.base + (size_t)(first + i) * SOAK_BLOCK_BYTES,
                        soak_content(user, i)))
            return false;
    return true;
}

/* One transfer from p to d; both terminal events. */
static bool once(struct side *p, struct side *d, uint64_t user)
{
    struct td_xfer_event e;
    uint32_t slot;
    uint64_t until = td_now_ns() + WAIT_S * TD_NS_PER_S;
    if (!start(p, d, (int32_t)(user % (POOL / N)) * N, user, &slot)) return false;
    if (!next_event(d, until, &e) || e.kind != TD_XFER_SLOT_READY || e.user != user ||
        !content(d, (int32_t)(user % (POOL / N)) * N, user)) {
        fprintf(stderr, "violation: round %" PRIu64 ": receiver: event %d, status %d: %s\n", user,
                (int)e.kind, (int)e.status, e.reason);
        return false;
    }
    if (!next_event(p, until, &e) || e.kind != TD_XFER_OP_DONE || e.user != user) {
        fprintf(stderr, "violation: round %" PRIu64 ": sender: event %d, status %d: %s\n", user,
                (int)e.kind, (int)e.status, e.reason);
        return false;
    }
    td_xfer_revoke(d->x, slot, "done");
    return next_event(d, until, &e) && e.kind == TD_XFER_SLOT_FREE;
}

static int fail(const char *what)
{
    fprintf(stderr, "violation: %s\n", what);
    return 1;
}

int soak_reconnects(enum td_xfer_path path, int n)
{
    struct side p = {0}, d = {0};
    char fabric[64], label[64];
    struct td_progress progress;
    int fds = 0, result = 1;
    int64_t heap = 0, rss = 0;
    snprintf(fabric, sizeof fabric, "/dev/shm/tandem-soak-%d", (int)getpid());
    snprintf(label, sizeof label, "reconnects over %s", td_xfer_path_name(path));
    if (path == TD_XFER_PATH_RDMA && (!side_fabric(&p, fabric) || !side_fabric(&d, fabric)))
        return fail("open: the fabric");
    td_progress_start(&progress, label, "rounds", (uint64_t)n);
    if (!side_open(&p, path, p.fabric, 4) || !side_open(&d, path, d.fabric, 4)) goto out;
    for (int i = 0; i < n; i++) {
        if (!once(&p, &d, (uint64_t)i)) goto out;
        if (i == WARM) {
            fds = soak_count_fds();
            heap = soak_heap_bytes();
            rss = soak_rss_bytes();
        }
        if (i % 2 == 0) {
            soak_cut(UINT_MAX); /* both ends of every connection are in this process */
        } else {
            td_xfer_close(p.x);
            p.x = NULL;
            if (!side_open(&p, path, p.fabric, 4)) goto out;
        }
        td_progress_update(&progress, (uint64_t)i + 1);
    }
    if (!once(&p, &d, 1u << 20)) goto out;
    struct td_xfer_stats s;
    td_xfer_stats(d.x, &s);
    result = 0;
    /* the last two rounds' ends may not be seen yet */
    if (s.n_conns > 4) result = fail("fd leak: connections of senders that are gone stand");
    if (n > WARM && soak_count_fds() > fds + 4 * 8) result = fail("fd leak: descriptors grew");
    if (n > WARM && soak_heap_bytes() > heap + SLACK) result = fail("heap leak: the heap grew");
    if (n > WARM && soak_rss_bytes() > rss + 4 * SLACK)
        result = fail("heap leak: the resident set grew");
    td_progress_end(&progress);
    printf("reconnects over %s: %d, descriptors %+d, heap %+" PRId64 " KiB, resident %+" PRId64
           " KiB\n",
           td_xfer_path_name(path), n, soak_count_fds() - fds, (soak_heap_bytes() - heap) / 1024,
           (soak_rss_bytes() - rss) / 1024);
out:
    side_close(&p);
    side_close(&d);
    unlink(fabric);
    return result;
}

int soak_storm(enum td_xfer_path path, int n_peers)
{
    struct side d = {0}, *p = calloc((size_t)n_peers, sizeof *p), fabrics = {0};
    char fabric[64];
    int result = 1, n_ready = 0, n_done = 0;
    TD_ASSERT(p);
    snprintf(fabric, sizeof fabric, "/dev/shm/tandem-soak-%d", (int)getpid());
    if (path == TD_XFER_PATH_RDMA && (!side_fabric(&d, fabric) || !side_fabric(&fabrics, fabric)))
        return fail("open: the fabric");
    if (!side_open(&d, path, d.fabric, (uint32_t)n_peers)) goto out;
    for (int i = 0; i < n_peers; i++)
        if (!side_open(&p[i], path, fabrics.fabric, 4)) goto out;
    uint64_t begin = td_now_ns(), until = begin + WAIT_S * TD_NS_PER_S, longest = 0;
    for (int i = 0; i < n_peers; i++) {
        uint32_t slot;
        if (!start(&p[i], &d, i * N, (uint64_t)i, &slot)) goto out;
    }
    struct td_xfer_event e;
    while (n_ready < n_peers) {
        if (!next_event(&d, until, &e) || e.kind != TD_XFER_SLOT_READY) {
            fprintf(stderr, "violation: storm: after %d of %d: event %d, status %d: %s\n", n_ready,
                    n_peers, (int)e.kind, (int)e.status, e.reason);
            for (int i = 0; i < n_peers; i++)
                while (td_xfer_poll(p[i].x, &e, 1))
                    if (e.kind == TD_XFER_OP_FAILED)
                        fprintf(stderr, "violation: storm: peer %d: status %d: %s\n", i,
                                (int)e.status, e.reason);
            goto out;
        }
        if (!content(&d, (int32_t)e.user * N, e.user)) {
            fail("corrupt: READY with other bytes");
            goto out;
        }
        n_ready++;
        longest = td_now_ns() - begin;
    }
    for (; n_done < n_peers; n_done++)
        if (!next_event(&p[n_done], until, &e) || e.kind != TD_XFER_OP_DONE) {
            fprintf(stderr, "violation: storm: peer %d: event %d, status %d: %s\n", n_done,
                    (int)e.kind, (int)e.status, e.reason);
            goto out;
        }
    struct td_xfer_stats s;
    do { /* lanes count as connections until they have said whose they are */
        td_xfer_stats(d.x, &s);
    } while (s.n_conns != (uint32_t)n_peers && td_now_ns() < until && poll(NULL, 0, 1) == 0);
    result = 0;
    if (s.n_conns != (uint32_t)n_peers) result = fail("storm: not one connection per peer");
    if (s.n_bad_frames) result = fail("storm: frames of honest peers were refused");
    printf("storm over %s: %d peers at once, all READY after %.0f ms, %u connections, %u more "
           "lanes, %" PRIu64 " refused\n",
           td_xfer_path_name(path), n_peers, (double)longest / 1e6, s.n_conns, s.n_lanes,
           s.n_refused_peers);
out:
    for (int i = 0; i < n_peers; i++) side_close(&p[i]);
    side_close(&d);
    td_fake_fabric_close(fabrics.fabric);
    unlink(fabric);
    free(p);
    return result;
}
