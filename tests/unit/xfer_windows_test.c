/* xfer_windows_test.c - memory windows: what a writer cannot do with the keys of a grant,
 * however late or wrong it writes. Both ends in this process, over the provider in memory;
 * between the sender's engine and its provider stands this test, which makes one WRITE of it a
 * wrong one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <poll.h>
#include <stdatomic.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "tests/fake/verbs_fake.h"
#include "common/transfer/protocol.h"
#include "common/transfer/wire.h"
#include "tests/unit/xfer_node.h"

#define BLOCK_BYTES 4096
#define N_BLOCKS 1024
/* an eighth of it: what a writer that does not answer has, and what an attempt after a broken
   link has to come in */
#define TIMEOUT_MS 6000
#define WAIT_MS 20000
#define POISON 0x5eed

/* --- between the engine and its provider ------------------------------------------------------ */

enum wrong { RIGHT = 0, OUTSIDE, OTHER_RUN, POOL_KEY, OLD_KEY, OTHER_QP, OTHER_SOURCE, N_WRONGS };

static const struct td_verbs *fake; /* the table that is stood before; one for both fabrics */
static _Atomic int wrong;           /* what the next WRITE of a block becomes */
static struct {
    uint64_t addr;
    uint32_t rkey;
    struct td_vb_qp *qp;
} seen[4096]; /* WRITEs of blocks, as the engine posted them: by the
                 sender's thread, read when it rests */
static _Atomic uint32_t n_seen;
static uint32_t pool_rkey; /* the receiver's */
static unsigned pool_access;

static int post_wrong(struct td_vb_qp *qp, struct td_vb_send *wrs, uint32_t n,
                      uint32_t *ret_n_posted)
{
    for (uint32_t i = 0; i < n; i++) {
        struct td_vb_send *w = &wrs[i];
        if (w->op != TD_VB_WRITE || w->sge[0].bytes < BLOCK_BYTES) continue;
        uint32_t at = atomic_load(&n_seen), what = (uint32_t)atomic_load(&wrong);
        bool fits = what != RIGHT;
        switch (what) {
        case OUTSIDE:
            w->remote_addr += BLOCK_BYTES;
            break;
        case POOL_KEY:
            w->rkey = pool_rkey;
            break;
        case OTHER_SOURCE:
            w->sge[0].addr += BLOCK_BYTES;
            break;
        case OTHER_RUN: /* a place of this grant, by the key of another one */
            fits = at > 0 && seen[at - 1].rkey != w->rkey && seen[at - 1].qp == qp;
            if (fits) w->remote_addr = seen[at - 1].addr;
            break;
        case OTHER_QP: /* the right key and place, from another queue pair */
            fits = at > 0 && seen[at - 1].qp != qp;
            if (fits) {
                w->rkey = seen[at - 1].rkey;
                w->remote_addr = seen[at - 1].addr;
            }
            break;
        case OLD_KEY: /* that of the first WRITE that ever was */
            w->rkey = seen[0].rkey;
            w->remote_addr = seen[0].addr;
            break;
        default:
            break;
        }
        if (fits) atomic_store(&wrong, RIGHT);
        assert_true(at < sizeof seen / sizeof seen[0]);
        seen[at].addr = w->remote_addr;
        seen[at].rkey = w->rkey;
        seen[at].qp = qp;
        atomic_store(&n_seen, at + 1);
    }
    return fake->post_send(qp, wrs, n, ret_n_posted);
}

static int reg_seen(struct td_vb_device *d, void *addr, uint64_t bytes, unsigned access,
                    struct td_vb_mr **ret_mr)
{
    int e = fake->reg(d, addr, bytes, access, ret_mr);
    if (!e && bytes == (uint64_t)N_BLOCKS * BLOCK_BYTES) {
        pool_rkey = (*ret_mr)->rkey;
        pool_access = access;
    }
    return e;
}

/* --- two ends --------------------------------------------------------------------------------- */

struct end {
    struct td_fake_fabric *fabric;
    struct td_verbs verbs;
    struct td_arena arena;
    struct td_xfer *x;
};

struct pair {
    struct end p, d; /* sender, receiver */
    char path[64];
};

struct transfer {
    int32_t n, dst[N_BLOCKS], src[N_BLOCKS];
    uint64_t seed;
    uint32_t slot, op;
    uint8_t blob[sizeof(struct td_xfer_grant_blob)];
};

static td_status end_open(struct end *e, const char *options, bool windows, bool is_receiver,
                          uint32_t timeout_ms, struct td_err *err)
{
    struct td_fake_options o;
    char path[256];
    struct td_xfer_rdma_config rdma = {
        .gid_index = -1, .timeout = 12, .retry = 3, .rnr_retry = 1, .windows = windows};
    struct td_xfer_config c = {.instance = is_receiver ? "d" : "p",
                               .incarnation = td_random_u64(),
                               .layout_hash = 1,
                               .listen_host = "127.0.0.1",
                               .path = TD_XFER_PATH_RDMA,
                               .max_slots = 64,
                               .max_ops = 64,
                               .peer_timeout_ms = timeout_ms,
                               .digest_every = 1,
                               .rdma = &rdma};
    assert_int_equal(td_fake_options_parse(options, &o, path, err), TD_OK);
    o.path = path;
    assert_int_equal(td_fake_fabric_open(&o, &e->fabric, err), TD_OK);
    fake = td_fake_verbs(e->fabric);
    e->verbs = *fake;
    if (is_receiver)
        e->verbs.reg = reg_seen;
    else
        e->verbs.post_send = post_wrong;
    rdma.verbs = &e->verbs;
    assert_int_equal(
        td_arena_create((size_t)N_BLOCKS * BLOCK_BYTES, false, "windows-test", &e->arena, err),
        TD_OK);
    td_status status = td_xfer_open(&c, &e->x, err);
    if (!status) status = td_xfer_mem_add(e->x, &e->arena, BLOCK_BYTES, N_BLOCKS, err);
    return status;
}

static void end_close(struct end *e)
{
    td_xfer_close(e->x);
    td_arena_destroy(&e->arena);
    td_fake_fabric_close(e->fabric);
}

static uint8_t *block(const struct end *e, int32_t id)
{
    return (uint8_t *)e->arena.base + (size_t)id * BLOCK_BYTES;
}

static void poison(const struct pair *t)
{
    for (int32_t i = 0; i < N_BLOCKS; i++)
        node_fill_bytes(block(&t->d, i), BLOCK_BYTES, POISON + (uint64_t)i);
}

static void pair_open_patient(struct pair *t, const char *more, bool windows, uint32_t timeout_ms)
{
    static int n_pairs;
    char options[160];
    struct td_err err = {0};
    memset(t, 0, sizeof *t);
    snprintf(t->path, sizeof t->path, "/dev/shm/tandem-windows-test-%d-%d", (int)getpid(),
             n_pairs++);
    snprintf(options, sizeof options, "path=%s,retry_ms=20%s", t->path, more);
    atomic_store(&wrong, RIGHT);
    atomic_store(&n_seen, 0);
    if (end_open(&t->d, options, windows, true, timeout_ms, &err) ||
        end_open(&t->p, options, false, false, timeout_ms, &err))
        fail_msg("%s", err.msg);
    poison(t);
}

static void pair_open(struct pair *t, const char *more, bool windows)
{
    pair_open_patient(t, more, windows, TIMEOUT_MS);
}

static void pair_close(struct pair *t)
{
    end_close(&t->p);
    end_close(&t->d);
    unlink(t->path);
}

/* Blocks first, first + step, ...: with a step above 1 each is a run of its own. */
static void grant(struct pair *t, struct transfer *m, int32_t first, int32_t step, int32_t n)
{
    static uint64_t seed = 1;
    struct td_err err = {0};
    size_t bytes = 0;
    uint8_t blob[TD_XFER_BLOB_MAX];
    m->n = n;
    m->seed = seed += 5000;
    for (int32_t i = 0; i < n; i++) {
        m->dst[i] = first + i * step;
        m->src[i] = m->dst[i];
        node_fill_bytes(block(&t->p, m->src[i]), BLOCK_BYTES, m->seed + (uint64_t)i);
    }
    if (td_xfer_grant(t->d.x, m->dst, n, td_deadline_after_ms(td_now_ns(), WAIT_MS), 0, &m->slot,
                      blob, &bytes, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(bytes, sizeof m->blob);
    memcpy(m->blob, blob, bytes);
}

static void send_all(struct pair *t, struct transfer *m)
{
    struct td_err err = {0};
    int32_t n;
    if (td_xfer_op_start(t->p.x, m->blob, sizeof m->blob,
                         td_deadline_after_ms(td_now_ns(), WAIT_MS), 0, &m->op, &n, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(td_xfer_submit(t->p.x, m->op, 0, m->src, m->n, true, "note", 4), TD_OK);
}

static bool event_within(struct end *e, uint64_t ms, struct td_xfer_event *ret_event)
{
    uint64_t until = td_deadline_after_ms(td_now_ns(), ms);
    while (!td_xfer_poll(e->x, ret_event, 1)) {
        if (td_now_ns() > until) return false;
        poll(NULL, 0, 1);
    }
    return true;
}

static struct td_xfer_event event(struct end *e)
{
    struct td_xfer_event v;
    if (!event_within(e, WAIT_MS, &v)) fail_msg("no event within %d ms", WAIT_MS);
    return v;
}

static void expect(struct end *e, enum td_xfer_event_kind kind)
{
    struct td_xfer_event v = event(e);
    if (v.kind != kind) fail_msg("event %d (%s), wanted %d", (int)v.kind, v.reason, (int)kind);
}

static struct td_xfer_stats stats(struct end *e)
{
    struct td_xfer_stats s;
    td_xfer_stats(e->x, &s);
    return s;
}

static uint64_t violations(struct pair *t)
{
    struct td_fake_counters c;
    td_fake_counters_get(t->d.fabric, td_fake_node(t->d.fabric), &c);
    return c.rkey_violations;
}

/* Every block holds the poison, but the n that were granted to m. */
static void check_others(struct pair *t, const struct transfer *m)
{
    bool granted[N_BLOCKS] = {0};
    for (int32_t i = 0; m && i < m->n; i++) granted[m->dst[i]] = true;
    for (int32_t i = 0; i < N_BLOCKS; i++)
        if (!granted[i] && !node_check_bytes(block(&t->d, i), BLOCK_BYTES, POISON + (uint64_t)i))
            fail_msg("block %d was written and is not in the grant", i);
}

static void check_content(struct pair *t, const struct transfer *m)
{
    for (int32_t i = 0; i < m->n; i++)
        if (!node_check_bytes(block(&t->d, m->dst[i]), BLOCK_BYTES, m->seed + (uint64_t)i))
            fail_msg("grant block %d differs", i);
}

static void give_back(struct pair *t, struct transfer *m)
{
    td_xfer_revoke(t->d.x, m->slot, "revoked by the test");
    expect(&t->d, TD_XFER_SLOT_FREE);
    for (int32_t i = 0; i < m->n; i++)
        node_fill_bytes(block(&t->d, m->dst[i]), BLOCK_BYTES, POISON + (uint64_t)m->dst[i]);
}

static void whole(struct pair *t, int32_t first, int32_t step, int32_t n)
{
    struct transfer m;
    grant(t, &m, first, step, n);
    send_all(t, &m);
    expect(&t->d, TD_XFER_SLOT_READY);
    expect(&t->p, TD_XFER_OP_DONE);
    check_content(t, &m);
    check_others(t, &m);
    give_back(t, &m);
}

/* --- tests ------------------------------------------------------------------------------------ */

static void grants_have_keys_of_their_own(void **state)
{
    (void)state;
    struct pair t;
    pair_open(&t, "", true);
    assert_int_equal(pool_access & TD_VB_REMOTE_WRITE, 0);
    whole(&t, 10, 1, 32); /* one run */
    assert_int_equal(stats(&t.d).n_windows, 1);
    whole(&t, 10, 2, 32); /* 32 runs */
    assert_int_equal(stats(&t.d).n_windows, 33);
    for (uint32_t i = 0; i < atomic_load(&n_seen); i++)
        assert_int_not_equal(seen[i].rkey, pool_rkey);
    for (int i = 0; i < 20; i++) whole(&t, i, 3, 20); /* windows come back */
    assert_int_equal(stats(&t.d).n_wide_windows, 0);
    assert_int_equal(violations(&t), 0);
    assert_int_equal(stats(&t.d).n_fenced + stats(&t.d).n_evicted, 0);
    pair_close(&t);
}

static void more_runs_than_windows_are_wide(void **state)
{
    (void)state;
    struct pair t;
    pair_open(&t, ",max_mr_bytes=2097152", true); /* two registrations */
    whole(&t, 3, 2, 500);
    assert_int_equal(stats(&t.d).n_wide_windows, 1);
    assert_int_equal(stats(&t.d).n_windows, 2);
    whole(&t, 500, 1, 100); /* one run, which crosses from one registration into the other */
    assert_int_equal(stats(&t.d).n_windows, 4);
    assert_int_equal(stats(&t.d).n_wide_windows, 1);
    pair_close(&t);
}

static void many_grants_share_windows_and_queues(void **state)
{
    /* the last without windows */
    static const char *const devices[] = {"", ",max_mw=5", ",devices=2,max_mw=9", ",max_qp_wr=4",
                                          ",max_qp_wr=4"};
    size_t n_devices = sizeof devices / sizeof devices[0];
    (void)state;
    for (size_t d = 0; d < n_devices; d++) {
        static struct transfer m[48];
        struct pair t;
        int n_ready = 0, n_done = 0, n_free = 0;
        pair_open(&t, devices[d], d + 1 < n_devices);
        for (int i = 0; i < 48; i++) grant(&t, &m[i], i * 20, 2, 10);
        for (int i = 0; i < 48; i++) send_all(&t, &m[i]);
        while (n_free < 48) {
            struct td_xfer_event e = event(&t.d);
            if (e.kind == TD_XFER_SLOT_FREE) {
                n_free++;
                continue;
            }
            if (e.kind != TD_XFER_SLOT_READY)
                fail_msg("device %zu, %d ready: event %d: %s", d, n_ready, (int)e.kind, e.reason);
            for (int i = 0; i < 48; i++)
                if (m[i].slot == e.id) check_content(&t, &m[i]);
            n_ready++;
            td_xfer_revoke(t.d.x, e.id, "taken");
        }
        for (; n_done < 48; n_done++) expect(&t.p, TD_XFER_OP_DONE);
        assert_int_equal(n_ready, 48);
        assert_int_equal(violations(&t), 0);
        pair_close(&t);
    }
}

static void a_wrong_write_ends_in_an_error_and_not_in_data(void **state)
{
    (void)state;
    int n_failed = 0;
    for (enum wrong what = OUTSIDE; what < OTHER_SOURCE; what++) {
        struct pair t;
        struct transfer m;
        pair_open(&t, "", true);
        whole(&t, 900, 2, 4); /* OLD_KEY: of this, which is over */
        grant(&t, &m, 100, 2, 64);
        atomic_store(&wrong, (int)what);
        send_all(&t, &m);
        struct td_xfer_event e = event(&t.p);
        assert_int_equal(atomic_load(&wrong), RIGHT); /* it was posted */
        assert_true(violations(&t) > 0);
        if (e.kind == TD_XFER_OP_FAILED) {
            if (!strstr(e.reason, td_vb_wc_status_name(TD_VB_WC_REM_ACCESS)))
                fail_msg("wrong %d: %s", (int)what, e.reason);
            expect(&t.d, TD_XFER_SLOT_FAILED);
        } else { /* the receiver saw its queue pair break before the sender saw why, and closed:
                    another attempt, with right writes */
            assert_int_equal(e.kind, TD_XFER_OP_DONE);
            expect(&t.d, TD_XFER_SLOT_READY);
            check_content(&t, &m);
        }
        n_failed += e.kind == TD_XFER_OP_FAILED;
        check_others(&t, &m);
        give_back(&t, &m);
        whole(&t, 100, 2, 64); /* and the next connection is a good one */
        pair_close(&t);
    }
    print_message("wrong writes: %d of %d were told to the writer first\n", n_failed,
                  OTHER_SOURCE - OUTSIDE);
}

static void wait_held(struct pair *t)
{
    struct td_fake_counters c;
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    do {
        if (td_now_ns() > until) fail_msg("nothing is held");
        poll(NULL, 0, 1);
        td_fake_counters_get(t->p.fabric, TD_FAKE_ALL, &c);
    } while (c.held < 8);
}

/* The writer's requests are in the network, and stay there: it cannot say that it has retired,
 * and lives. */
static void late_writes_after_revocation(struct pair *t, struct transfer *m)
{
    whole(t, 0, 1, 1); /* the link stands */
    grant(t, m, 200, 2, 8);
    td_fake_hold(t->p.fabric, TD_FAKE_ALL);
    send_all(t, m);
    wait_held(t);
    td_xfer_revoke(t->d.x, m->slot, "revoked by the test");
}

static void a_late_write_after_revocation_ends_in_an_error(void **state)
{
    (void)state;
    struct pair t;
    struct transfer m, other;
    pair_open(&t, "", true);
    late_writes_after_revocation(&t, &m);
    struct td_xfer_event e = event(&t.d);
    assert_int_equal(e.kind, TD_XFER_SLOT_FREE);
    assert_int_equal(stats(&t.d).n_evicted, 1);
    assert_int_equal(stats(&t.d).n_fenced, 0); /* the connection stands all the while */
    assert_int_equal(stats(&t.d).conns_by_path[TD_XFER_PATH_RDMA], 1);
    poison(&t);
    grant(&t, &other, 200, 2, 8); /* the blocks are somebody else's now, on the same link */
    send_all(&t, &other);
    td_fake_hold(t.p.fabric, 0);
    /* The late writes took the link with them, and the other transfer had another attempt. Where
     * the receiver saw its queue pair break first and closed, the revoked one had another too,
     * and was refused: either may be told first. */
    bool failed = false, done = false;
    for (int i = 0; i < 2; i++) {
        e = event(&t.p);
        if (e.kind == TD_XFER_OP_FAILED) {
            assert_int_equal(e.id, m.op);
            failed = true;
        } else {
            assert_int_equal(e.kind, TD_XFER_OP_DONE);
            assert_int_equal(e.id, other.op);
            done = true;
        }
    }
    assert_true(failed && done);
    expect(&t.d, TD_XFER_SLOT_READY);
    assert_true(violations(&t) > 0);
    check_content(&t, &other);
    check_others(&t, &other);
    give_back(&t, &other);
    whole(&t, 0, 2, 64);
    pair_close(&t);
}

/* Without windows the same receiver has to wait for its writer, and the bytes land before the
 * blocks are free. */
static void without_windows_a_revoked_slot_waits_for_its_writer(void **state)
{
    (void)state;
    struct pair t;
    struct transfer m;
    struct td_xfer_event e;
    pair_open(&t, "", false);
    assert_int_not_equal(pool_access & TD_VB_REMOTE_WRITE, 0);
    late_writes_after_revocation(&t, &m);
    assert_false(event_within(&t.d, 2 * TIMEOUT_MS / 8, &e));
    td_fake_hold(t.p.fabric, 0);
    expect(&t.d, TD_XFER_SLOT_FREE);
    expect(&t.p, TD_XFER_OP_FAILED);
    assert_int_equal(violations(&t), 0);
    pair_close(&t);
}

/* A digest that differs is another attempt on the same link: under new keys. */
static void another_attempt_has_other_keys(void **state)
{
    (void)state;
    struct pair t;
    struct transfer m;
    pair_open(&t, "", true);
    grant(&t, &m, 200, 2, 8);
    atomic_store(&wrong, OTHER_SOURCE);
    send_all(&t, &m);
    expect(&t.d, TD_XFER_SLOT_READY);
    expect(&t.p, TD_XFER_OP_DONE);
    check_content(&t, &m);
    check_others(&t, &m);
    assert_int_equal(stats(&t.d).n_digest_mismatches, 1);
    assert_int_equal(stats(&t.d).n_windows, 16);
    for (uint32_t i = 0, n = atomic_load(&n_seen); i < n / 2; i++)
        for (uint32_t k = n / 2; k < n; k++) assert_int_not_equal(seen[i].rkey, seen[k].rkey);
    give_back(&t, &m);
    pair_close(&t);
}

static void a_device_without_windows_is_refused_by_name(void **state)
{
    (void)state;
    static const char *const devices[] = {",tiny=1", ",mw_type2=0", ",max_mw=0"};
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        struct end e = {0};
        struct td_err err = {0};
        char options[160];
        snprintf(options, sizeof options, "path=/dev/shm/tandem-windows-test-%d-none%s",
                 (int)getpid(), devices[i]);
        assert_int_equal(end_open(&e, options, true, true, TIMEOUT_MS, &err), TD_ERR_UNSUPPORTED);
        assert_non_null(strstr(err.msg, "memory windows"));
        end_close(&e);
        snprintf(options, sizeof options, "/dev/shm/tandem-windows-test-%d-none", (int)getpid());
        unlink(options);
    }
}

/* A request of the receiver's own device never completes: a bind, so that the keys are never told,
 * or an invalidation. Its writer has nothing more to say; the link goes, and the slot is free. */
static void a_window_that_hangs_costs_its_link(void **state)
{
    (void)state;
    enum { BINDS = 2 }; /* one run, on each of a link's queue pairs */
    for (uint64_t nth = 1; nth <= BINDS + 1; nth += BINDS) {
        struct pair t;
        struct transfer m;
        struct td_fake_rule stall = {.fault = TD_FAKE_STALL, .device = TD_FAKE_ALL, .nth = nth};
        bool bound = nth > BINDS;
        uint64_t n_windows, until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
        pair_open_patient(&t, "", true, 2000);
        whole(&t, 900, 1, 4);
        n_windows = stats(&t.d).n_windows;
        assert_true(td_fake_rule_add(t.d.fabric, &stall));
        grant(&t, &m, 100, 1, 8);
        send_all(&t, &m);
        while (stats(&t.d).n_windows == n_windows) { /* the slot has its window */
            if (td_now_ns() > until) fail_msg("no window within %d ms", WAIT_MS);
            poll(NULL, 0, 1);
        }
        if (bound) {
            expect(&t.d, TD_XFER_SLOT_READY);
            expect(&t.p, TD_XFER_OP_DONE);
            check_content(&t, &m);
        }
        td_xfer_revoke(t.d.x, m.slot, "revoked by the test");
        expect(&t.d, TD_XFER_SLOT_FREE);
        if (!bound) expect(&t.p, TD_XFER_OP_FAILED);
        if (!bound) check_others(&t, NULL);
        assert_int_equal(stats(&t.d).n_slots_used, 0);
        poison(&t);
        whole(&t, 100, 1, 8); /* on another link */
        pair_close(&t);
    }
}

/* --- the core alone, and the bytes ------------------------------------------------------------ */

static uint64_t random_hook(void *ctx) { return ++*(uint64_t *)ctx * 0x9e3779b97f4a7c15ull; }

static void send_hook(void *ctx, uint64_t conn, const struct td_xfer_frame *f, const void *payload)
{
    (void)ctx, (void)conn, (void)f, (void)payload;
}

static bool is_free(struct td_xfer_core *c)
{
    struct td_xfer_event e;
    while (td_xfer_core_poll(c, &e, 1))
        if (e.kind == TD_XFER_SLOT_FREE) return true;
    return false;
}

/* In any order of what ends a slot: ABORT, time, the connection; and the windows. */
static void slots_wait_for_their_windows(void **state)
{
    (void)state;
    enum { BY_ABORT, BY_TIME, BY_FENCE, BY_DEADLINE, N_WAYS };
    for (int way = 0; way < N_WAYS; way++) {
        uint64_t seed = 0;
        struct td_xfer_core c;
        struct td_xfer_core_hooks hooks = {
            .ctx = &seed, .random_u64 = random_hook, .send = send_hook};
        int32_t ids[2] = {3, 5};
        uint32_t slot;
        assert_int_equal(td_xfer_core_create(&c, 2, 1, 100, 0, &hooks, NULL), TD_OK);
        td_xfer_core_mem(&c, 64, 8);
        assert_int_equal(td_xfer_core_grant(&c, ids, 2, 500, 0, &slot, NULL), TD_OK);
        struct td_xfer_frame f = {
            .slot = slot, .generation = c.slots[slot].generation, .attempt = 1, .handle = 7};
        assert_int_equal(td_xfer_core_rx_open(&c, 1, TD_XFER_PATH_RDMA, &f, c.slots[slot].key),
                         TD_OK);
        td_xfer_core_windows_open(&c, slot);
        assert_false(td_xfer_core_windows_due(&c, 450, slot)); /* while it fills, however long */
        if (way == BY_DEADLINE) td_xfer_core_tick(&c, 500);
        td_xfer_core_revoke(&c, slot, "revoked");
        assert_false(is_free(&c));
        uint64_t now = way == BY_DEADLINE ? 500 : 10;
        td_xfer_core_tick(&c, now);
        assert_false(td_xfer_core_windows_due(&c, now + 99, slot)); /* it may answer yet */
        switch (way) {
        case BY_ABORT:
            td_xfer_core_rx_abort(&c, 1, &f, "stopped");
            assert_false(is_free(&c)); /* the writer has retired, its keys have not */
            assert_true(td_xfer_core_windows_due(&c, now, slot));
            break;
        case BY_TIME:
        case BY_DEADLINE:
            assert_int_equal(td_xfer_core_tick(&c, now + 99), now + 100);
            td_xfer_core_tick(&c, now + 100);
            assert_true(td_xfer_core_windows_due(&c, now + 100, slot));
            assert_false(is_free(&c));
            break;
        default:
            td_xfer_core_conn_fenced(&c, 1, 1000);
            /* they are gone; the quarantine is not over */
            assert_false(td_xfer_core_windows_due(&c, now, slot));
            assert_false(is_free(&c));
            td_xfer_core_tick(&c, 1000);
            assert_true(is_free(&c));
        }
        if (way != BY_FENCE) td_xfer_core_windows_ended(&c, slot);
        if (way != BY_FENCE) assert_true(is_free(&c));
        assert_int_equal(c.stats.n_evicted, way == BY_TIME || way == BY_DEADLINE);
        td_xfer_core_rx_abort(&c, 1, &f, "too late to matter");
        assert_int_equal(c.n_slots_used, 0);
        td_xfer_core_destroy(&c);
    }
}

/* A core with one slot on connection `conn`: bound by rdma, of two blocks of 64 bytes. */
static uint32_t bound_slot(struct td_xfer_core *c, uint64_t conn, struct td_xfer_frame *ret_f)
{
    int32_t ids[2] = {3, 5};
    uint32_t slot;
    assert_int_equal(td_xfer_core_grant(c, ids, 2, 500, 0, &slot, NULL), TD_OK);
    *ret_f = (struct td_xfer_frame){
        .slot = slot, .generation = c->slots[slot].generation, .attempt = 1, .handle = 7 + slot};
    assert_int_equal(td_xfer_core_rx_open(c, conn, TD_XFER_PATH_RDMA, ret_f, c->slots[slot].key),
                     TD_OK);
    return slot;
}

/* One READ of the slot's, which is never heard of again. */
static void begin_read(struct td_xfer_core *c, uint64_t conn, struct td_xfer_frame f)
{
    static const struct td_xfer_wr_limits limits = {
        .max_bytes = 64, .max_pieces = 1, .src_region = 8, .dst_region = 8};
    struct td_xfer_turns turns = {0};
    struct td_xfer_rd rd;
    int32_t ids[2] = {0, 1};
    f.offset = 64;
    assert_int_equal(td_xfer_core_rx_ref(c, conn, &f, 0, ids, 2, 8), TD_OK);
    assert_true(td_xfer_core_rd_next(c, conn, &turns, &limits, &rd));
}

/* The writer has retired, and what this side's own queue pairs were given for the slot does not
 * come back: an invalidation, or a READ. The connection is named, whose end drops it. Two of them
 * on connections of their own are both named, one in each tick. */
static void what_queue_pairs_keep_costs_their_connection(void **state)
{
    (void)state;
    enum { WINDOW = 1, READ = 2 };
    for (int what = WINDOW; what <= (WINDOW | READ); what++) {
        uint64_t seed = 0;
        struct td_xfer_core c;
        struct td_xfer_core_hooks hooks = {
            .ctx = &seed, .random_u64 = random_hook, .send = send_hook};
        struct td_xfer_frame f[2];
        assert_int_equal(td_xfer_core_create(&c, 2, 1, 100, 0, &hooks, NULL), TD_OK);
        td_xfer_core_mem(&c, 64, 8);
        for (uint64_t conn = 1; conn <= 2; conn++) {
            uint32_t slot = bound_slot(&c, conn, &f[conn - 1]);
            if (what & WINDOW) td_xfer_core_windows_open(&c, slot);
            if (what & READ) begin_read(&c, conn, f[conn - 1]);
            td_xfer_core_rx_abort(&c, conn, &f[conn - 1], "stopped");
            td_xfer_core_revoke(&c, slot, "revoked");
        }
        assert_false(is_free(&c));
        uint64_t due = td_xfer_core_tick(&c, 10);
        for (int turn = 0; due < 10000 && !c.stuck_conn && turn < 10; turn++)
            due = td_xfer_core_tick(&c, due);
        assert_true(c.stuck_conn == 1 || c.stuck_conn == 2);
        uint64_t first = c.stuck_conn;
        assert_int_equal(c.next_tick_ns, 1); /* there is another */
        for (uint64_t conn = first;; conn = 3 - first) {
            assert_int_equal(c.stuck_conn, conn);
            assert_false(is_free(&c));
            c.stuck_conn = 0;
            if (what & READ) td_xfer_core_rd_done(&c, 1000, f[conn - 1].slot, 64, false);
            td_xfer_core_conn_fenced(&c, conn, 1100);
            td_xfer_core_conn_lost(&c, 1000, conn, TD_ERR_PEER, "stuck", TD_XFER_PARTED);
            assert_true(is_free(&c));
            if (conn != first) break;
            td_xfer_core_tick(&c, 1000);
        }
        assert_int_equal(td_xfer_core_tick(&c, 2000), TD_NEVER_NS);
        assert_int_equal(c.stuck_conn, 0);
        assert_int_equal(c.n_slots_used, 0);
        td_xfer_core_destroy(&c);
    }
}

/* The sender has another connection while this side still READs over the old one, which it does not
 * know to be dead: the attempt comes too early, and is told so. */
static void an_attempt_beside_a_read_is_told_to_wait(void **state)
{
    (void)state;
    uint64_t seed = 0;
    struct td_xfer_core c;
    struct td_xfer_core_hooks hooks = {.ctx = &seed, .random_u64 = random_hook, .send = send_hook};
    struct td_xfer_frame f, next;
    assert_int_equal(td_xfer_core_create(&c, 2, 1, 100, 0, &hooks, NULL), TD_OK);
    td_xfer_core_mem(&c, 64, 8);
    uint32_t slot = bound_slot(&c, 1, &f);
    begin_read(&c, 1, f);
    next = f;
    next.attempt = 2;
    next.handle = 99;
    assert_int_equal(td_xfer_core_rx_open(&c, 2, TD_XFER_PATH_RDMA, &next, c.slots[slot].key),
                     TD_OK);
    assert_int_equal(c.slots[slot].conn, 1); /* the old attempt has the slot */
    td_xfer_core_rd_done(&c, 10, slot, 64, false);
    td_xfer_core_conn_fenced(&c, 1, 20);
    td_xfer_core_conn_lost(&c, 10, 1, TD_ERR_PEER, "gone", TD_XFER_PARTED);
    assert_int_equal(td_xfer_core_rx_open(&c, 2, TD_XFER_PATH_RDMA, &next, c.slots[slot].key),
                     TD_OK);
    assert_int_equal(c.slots[slot].conn, 2);
    td_xfer_core_destroy(&c);
}

static void targets_are_told_with_their_keys(void **state)
{
    (void)state;
    /* golden: two runs of a link with three queue pairs, byte for byte */
    static const uint8_t golden[40] = {5,    0,    0,    0,    2,    0,    0,    0,    0x11, 0x12,
                                       0x13, 0x14, 0x21, 0x22, 0x23, 0x24, 0x31, 0x32, 0x33, 0x34,
                                       9,    0,    0,    0,    1,    0,    0,    0,    0x41, 0x42,
                                       0x43, 0x44, 0x51, 0x52, 0x53, 0x54, 0x61, 0x62, 0x63, 0x64};
    struct td_xfer_run runs[TD_XFER_RUNS_MAX];
    uint32_t keys[TD_XFER_PAYLOAD_MAX / 4];
    int32_t n = 0;
    assert_int_equal(td_xfer_targets_decode(golden, sizeof golden, 3, runs, keys, &n), TD_OK);
    assert_int_equal(n, 2);
    assert_int_equal(runs[0].block, 5);
    assert_int_equal(runs[0].n, 2);
    assert_int_equal(runs[1].block, 9);
    static const uint32_t want[6] = {0x14131211, 0x24232221, 0x34333231,
                                     0x44434241, 0x54535251, 0x64636261};
    assert_memory_equal(keys, want, sizeof want);
    for (uint32_t bytes = 0; bytes <= sizeof golden; bytes++)
        for (uint32_t n_keys = 0; n_keys <= TD_XFER_QPS_MAX + 1; n_keys++) {
            bool fits = bytes && n_keys <= TD_XFER_QPS_MAX && bytes % (8 + 4 * n_keys) == 0;
            assert_int_equal(td_xfer_targets_decode(golden, bytes, n_keys, runs, keys, &n),
                             fits ? TD_OK : TD_ERR_CORRUPT);
        }
    struct td_xfer_frame f = {.type = TD_XFER_TARGETS}, back;
    uint8_t header[64];
    for (uint32_t bytes = 0; bytes < 5000; bytes++) {
        f.length = bytes;
        td_xfer_frame_encode(&f, header);
        assert_int_equal(td_xfer_frame_decode(header, &back, NULL),
                         bytes >= 8 && bytes <= 4096 && bytes % 4 == 0 ? TD_OK : TD_ERR_CORRUPT);
    }
}

int main(int argc, char **argv)
{
    if (argc == 2) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(targets_are_told_with_their_keys),
        cmocka_unit_test(slots_wait_for_their_windows),
        cmocka_unit_test(what_queue_pairs_keep_costs_their_connection),
        cmocka_unit_test(an_attempt_beside_a_read_is_told_to_wait),
        cmocka_unit_test(a_device_without_windows_is_refused_by_name),
        cmocka_unit_test(grants_have_keys_of_their_own),
        cmocka_unit_test(more_runs_than_windows_are_wide),
        cmocka_unit_test(many_grants_share_windows_and_queues),
        cmocka_unit_test(a_wrong_write_ends_in_an_error_and_not_in_data),
        cmocka_unit_test(a_late_write_after_revocation_ends_in_an_error),
        cmocka_unit_test(without_windows_a_revoked_slot_waits_for_its_writer),
        cmocka_unit_test(another_attempt_has_other_keys),
        cmocka_unit_test(a_window_that_hangs_costs_its_link),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
