/* xfer_device_test.c - pools in device memory, what xfer_test's suite (which runs over them,
 * too) does not reach: copies that are under way when something else happens, how paths are
 * chosen, devices that fail, rings that are full. The device is fake_device's: a load or a store
 * of its memory by this program is a SIGSEGV, and what is read before a copy is known to be
 * complete is garbage. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/transfer/wire.h"
#include "tests/fake/fake_device.h"
#include "tests/fake/verbs_fake.h"
#include "tests/unit/xfer_ask.h"

#define N_BLOCKS 64
#define BLOCK_BYTES 12288
/* for what hangs. Five peers with four lanes each, under ThreadSanitizer with 45 others ready to
 * run on two processors, took more than 45 s. */
#define WAIT_MS 180000

static const char *program;

struct end { /* how one side is opened */
    enum td_xfer_path path;
    const char *device; /* "": the host's memory */
    bool child;
    uint32_t lanes, n_blocks, block_bytes, timeout_ms;
    bool small_sockets;
    const char *fabric; /* NULL: no RDMA; else more options of the fake */
    enum td_xfer_gpu_flush flush;
};

static char fabric_path[64];

static void set_rdma(struct node_command *c, const struct end *e)
{
    if (!e->fabric) return;
    snprintf(c->fabric, sizeof c->fabric, "path=%s,retry_ms=20,device_late=1%s", fabric_path,
             e->fabric);
    c->ib_timeout = 12;
    c->ib_retry = 3;
    c->rnr_never_waits = true;
    c->gpu_flush = e->flush;
}

static struct node *open_end(const struct end *e)
{
    struct node *n = e->child ? node_spawn(program) : node_local();
    struct node_command c = {.verb = NODE_OPEN,
                             .path = e->path,
                             .shareable = true,
                             .max_slots = 8,
                             .max_ops = 8,
                             .timeout_ms = e->timeout_ms ? e->timeout_ms : 2000,
                             .block_bytes = e->block_bytes ? e->block_bytes : BLOCK_BYTES,
                             .layout_hash = 0x1a70,
                             .n_blocks = e->n_blocks ? (int32_t)e->n_blocks : N_BLOCKS,
                             .lanes = e->lanes ? e->lanes : 1,
                             .small_sockets = e->small_sockets};
    snprintf(c.device, sizeof c.device, "%s", e->device);
    set_rdma(&c, e);
    struct node_reply r = ask(n, &c);
    if (r.status) fail_msg("open: %s", r.msg);
    return n;
}

struct transfer {
    struct node *p, *d;
    int32_t n;
    int32_t src[NODE_MAX_IDS], dst[NODE_MAX_IDS];
    uint32_t slot, op;
    uint64_t seed;
    uint8_t blob[512];
    uint32_t blob_bytes;
};

static void grant(struct transfer *t, struct node *p, struct node *d, int32_t first, int32_t n)
{
    static uint64_t seed = 500;
    struct node_command c = {.verb = NODE_GRANT, .n = n, .deadline_ms = 4 * WAIT_MS};
    *t = (struct transfer){.p = p, .d = d, .n = n, .seed = seed += 10000};
    for (int32_t i = 0; i < n; i++) {
        t->dst[i] = c.ids[i] = first + i;
        t->src[i] = first + n - 1 - i; /* no two that lie side by side at both ends */
    }
    struct node_reply r = ask(d, &c);
    if (r.status) fail_msg("grant: %s", r.msg);
    t->slot = r.id;
    t->blob_bytes = r.blob_bytes;
    memcpy(t->blob, r.blob, r.blob_bytes);
}

static void fill_source(const struct transfer *t)
{
    struct node_command fill = {.verb = NODE_FILL, .seed = t->seed, .n = t->n};
    memcpy(fill.ids, t->src, sizeof fill.ids);
    ask(t->p, &fill);
}

static struct node_reply start_filled(struct transfer *t)
{
    struct node_command c = {
        .verb = NODE_OP, .deadline_ms = 4 * WAIT_MS, .blob_bytes = t->blob_bytes};
    memcpy(c.blob, t->blob, t->blob_bytes);
    struct node_reply r = ask(t->p, &c);
    t->op = r.id;
    return r;
}

static struct node_reply start(struct transfer *t)
{
    fill_source(t);
    return start_filled(t);
}

static td_status try_submit(struct transfer *t, int32_t first, int32_t n, bool final)
{
    struct node_command c = {
        .verb = NODE_SUBMIT, .id = t->op, .first = first, .n = n, .final = final};
    memcpy(c.ids, t->src + first, (size_t)n * sizeof c.ids[0]);
    return ask(t->p, &c).status;
}

static void submit(struct transfer *t, int32_t first, int32_t n, bool final)
{
    assert_int_equal(try_submit(t, first, n, final), TD_OK);
}

static void expect_none(struct node *n)
{
    bool any;
    struct td_xfer_event e = event_within(n, 100, &any);
    if (any) fail_msg("event %d (%s), and copies are under way", (int)e.kind, e.reason);
}

static struct node_reply compare_content(const struct transfer *t)
{
    struct node_command c = {.verb = NODE_CHECK, .seed = t->seed, .n = t->n};
    memcpy(c.ids, t->dst, sizeof c.ids);
    return ask(t->d, &c);
}

static void check_content(const struct transfer *t)
{
    struct node_reply r = compare_content(t);
    if (!r.ok) fail_msg("grant block %d differs", r.n);
}

static void give_back(struct transfer *t)
{
    struct node_command c = {.verb = NODE_REVOKE, .id = t->slot};
    ask(t->d, &c);
}

static void finish(struct transfer *t, enum td_xfer_path path)
{
    struct td_xfer_event e = event(t->d);
    if (e.kind != TD_XFER_SLOT_READY) fail_msg("event %d: %s", (int)e.kind, e.reason);
    assert_int_equal(e.path, path);
    check_content(t);
    e = event(t->p);
    if (e.kind != TD_XFER_OP_DONE) fail_msg("event %d: %s", (int)e.kind, e.reason);
    give_back(t);
    expect(t->d, TD_XFER_SLOT_FREE, TD_OK);
}

static void whole(struct node *p, struct node *d, enum td_xfer_path path)
{
    struct transfer t;
    grant(&t, p, d, 0, 40);
    struct node_reply r = start(&t);
    if (r.status) fail_msg("op: %s", r.msg);
    submit(&t, 0, 10, false);
    submit(&t, 10, 30, true);
    finish(&t, path);
}

/* Until so many copies were issued and wait. */
static void until_waiting(struct node *n, uint64_t more_than)
{
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
         fake_device_n_waiting(node_device(n)) <= more_than;) {
        struct node_command c = {.verb = NODE_STATS};
        ask(n, &c);
        if (td_now_ns() > until)
            fail_msg("%d ms, and %d copies wait", WAIT_MS,
                     (int)fake_device_n_waiting(node_device(n)));
    }
}

static const enum td_xfer_path device_paths[] = {TD_XFER_PATH_TCP, TD_XFER_PATH_CUDA_IPC,
                                                 TD_XFER_PATH_SHM_STAGED};
#define N_DEVICE_PATHS (sizeof device_paths / sizeof device_paths[0])

/* A copy that was issued cannot be called back: the blocks are free when it is complete, and not
 * before. */
static void a_revoked_slot_waits_for_its_copies(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_DEVICE_PATHS; k++) {
        struct node *p = open_end(
                        &(struct end){.path = device_paths[k], .device = "device", .child = true}),
                    *d = open_end(&(struct end){.path = device_paths[k], .device = "device"});
        struct transfer t, other;
        whole(p, d, device_paths[k]);
        fake_device_hold(node_device(d), true);
        grant(&t, p, d, 3, 30);
        assert_int_equal(start(&t).status, TD_OK);
        submit(&t, 0, 20, false);
        until_waiting(d, 0);
        give_back(&t);
        expect_none(d);
        fake_device_hold(node_device(d), false);
        expect(d, TD_XFER_SLOT_FREE, TD_ERR_CANCELLED);
        assert_int_equal(fake_device_n_waiting(node_device(d)), 0);
        expect(p, TD_XFER_OP_FAILED, TD_ERR_CANCELLED);
        struct node_command fill = {.verb = NODE_FILL, .seed = 7, .n = 30};
        memcpy(fill.ids, t.dst, sizeof fill.ids);
        ask(d, &fill); /* the new owner's */
        grant(&other, p, d, 40, 20);
        assert_int_equal(start(&other).status, TD_OK);
        submit(&other, 0, 20, true);
        finish(&other, device_paths[k]);
        fill.verb = NODE_CHECK;
        assert_true(ask(d, &fill).ok);
        node_free(p);
        node_free(d);
    }
}

/* The bytes count when they are on the device. */
static void ready_comes_when_the_device_has_the_bytes(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_DEVICE_PATHS; k++) {
        struct node *p = open_end(
                        &(struct end){.path = device_paths[k], .device = "device", .child = true}),
                    *d = open_end(&(struct end){.path = device_paths[k], .device = "device"});
        struct transfer t;
        whole(p, d, device_paths[k]);
        fake_device_hold(node_device(d), true);
        grant(&t, p, d, 0, 40);
        assert_int_equal(start(&t).status, TD_OK);
        submit(&t, 0, 40, true);
        until_waiting(d, 0);
        expect_none(d);
        expect_none(p); /* nor is the sender told that it is done */
        fake_device_hold(node_device(d), false);
        finish(&t, device_paths[k]);
        node_free(p);
        node_free(d);
    }
}

/* Staged, sender: its blocks are read by the device until the copy is complete. */
static void a_cancelled_op_waits_for_its_copies(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_DEVICE_PATHS; k += 2) {
        enum td_xfer_path path = device_paths[k];
        struct node *p = open_end(&(struct end){.path = path, .device = "device"}),
                    *d = open_end(&(struct end){.path = path, .device = "device", .child = true});
        struct transfer t;
        whole(p, d, path);
        fake_device_hold(node_device(p), true);
        grant(&t, p, d, 0, 40);
        assert_int_equal(start(&t).status, TD_OK);
        submit(&t, 0, 40, true);
        until_waiting(p, 0);
        struct node_command c = {.verb = NODE_CANCEL, .id = t.op};
        ask(p, &c);
        expect_none(p);
        fake_device_hold(node_device(p), false);
        expect(p, TD_XFER_OP_FAILED, TD_ERR_CANCELLED);
        assert_int_equal(fake_device_n_waiting(node_device(p)), 0);
        expect(d, TD_XFER_SLOT_FAILED, TD_ERR_CANCELLED);
        give_back(&t);
        expect(d, TD_XFER_SLOT_FREE, TD_ERR_CANCELLED);
        whole(p, d, path);
        node_free(p);
        node_free(d);
    }
}

/* The first attempt's copies would land on top of the second's bytes: the second is bound when
 * they are complete. */
static void another_attempt_waits_for_the_copies_of_the_first(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_DEVICE_PATHS; k++) {
        struct node *d = open_end(
            &(struct end){.path = device_paths[k], .device = "device", .timeout_ms = 8000});
        struct node *p = open_end(&(struct end){.path = device_paths[k],
                                                .device = "device",
                                                .child = true,
                                                .timeout_ms = 8000}),
                    *other;
        struct transfer t, again;
        whole(p, d, device_paths[k]);
        fake_device_hold(node_device(d), true);
        grant(&t, p, d, 0, 40);
        assert_int_equal(start(&t).status, TD_OK);
        submit(&t, 0, 30, false);
        until_waiting(d, 0);
        uint64_t n_waiting = fake_device_n_waiting(node_device(d));
        if (device_paths[k] == TD_XFER_PATH_CUDA_IPC) { /* its memory goes with it: what is
                                                           copied from there is complete before */
            node_kill(p);
            expect(d, TD_XFER_SLOT_FAILED, TD_ERR_PEER);
            assert_int_equal(fake_device_n_waiting(node_device(d)), 0);
            fake_device_hold(node_device(d), false);
        } else {
            node_kill(p);
            other = open_end(&(struct end){
                .path = device_paths[k], .device = "device", .child = true, .timeout_ms = 8000});
            again = t;
            again.p = other;
            again.seed += 7;
            /* attempt 1 of another op: the slot has seen that number */
            assert_int_equal(start(&again).status, TD_OK);
            td_status submitted = try_submit(&again, 0, 40, true);
            /* the refusal may be there already */
            assert_true(submitted == TD_OK || submitted == TD_ERR_STALE);
            expect(d, TD_XFER_SLOT_FAILED, TD_ERR_PEER); /* nobody came with attempt 2 */
            assert_true(fake_device_n_waiting(node_device(d)) >= n_waiting);
            give_back(&t);
            expect_none(d);
            fake_device_hold(node_device(d), false);
            expect(d, TD_XFER_SLOT_FREE, TD_ERR_PEER);
            expect(other, TD_XFER_OP_FAILED, TD_ERR_STALE);
            node_free(other);
        }
        node_free(p);
        node_free(d);
    }
}

/* auto: cuda-ipc on one host; where it cannot be, shm-staged or tcp, aloud. By name: nothing
 * else. */
static void paths_of_device_pools(void **state)
{
    (void)state;
    static const struct {
        const char *p, *d, *why; /* devices; what the log says when it is not cuda-ipc */
        enum td_xfer_path path;
    } rows[] = {
        {"slow", "slow", "peer node", TD_XFER_PATH_CUDA_IPC},
        {"no-ipc", "device", "virtual allocation", TD_XFER_PATH_SHM_STAGED},
        {"device", "blind-ipc", "peer access is not supported", TD_XFER_PATH_SHM_STAGED},
        {"device", "wrong-ipc", "reads other bytes than", TD_XFER_PATH_SHM_STAGED},
        {"no-pin", "blind-ipc", "peer access is not supported", TD_XFER_PATH_TCP},
        /* it is the sender's ring */
        {"device", "blind-ipc,no-pin", "peer access is not supported", TD_XFER_PATH_SHM_STAGED},
        {"device", "", NULL, TD_XFER_PATH_SHM_STAGED}, /* one side's pool is the host's: that is
                                                          no path that failed */
        {"", "slow", NULL, TD_XFER_PATH_TCP},
        /* it is the sender's memory that is opened */
        {"device", "no-ipc", "peer node", TD_XFER_PATH_CUDA_IPC},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct node *p = open_end(&(struct end){.device = rows[i].p, .child = true}),
                    *d = open_end(&(struct end){.device = rows[i].d, .child = true});
        struct transfer t;
        grant(&t, p, d, 0, 20);
        struct node_reply r = start(&t);
        if (r.status) fail_msg("row %zu: %s", i, r.msg);
        struct node_command stats = {.verb = NODE_STATS};
        submit(&t, 0, 20, true);
        finish(&t, rows[i].path);
        uint64_t n_fallbacks = ask(p, &stats).stats.n_fallbacks;
        assert_int_equal(n_fallbacks,
                         rows[i].why && i > 1 && rows[i].path != TD_XFER_PATH_CUDA_IPC ? 1 : 0);
        whole(p, d, rows[i].path);
        /* a peer that has refused is not asked again */
        assert_int_equal(ask(p, &stats).stats.n_fallbacks, n_fallbacks);
        node_free(p);
        node_free(d);
        if (!rows[i].p[0] || !rows[i].d[0] || i == 1 || rows[i].path == TD_XFER_PATH_CUDA_IPC)
            continue;

        p = open_end(
            &(struct end){.path = TD_XFER_PATH_CUDA_IPC, .device = rows[i].p, .child = true});
        d = open_end(
            &(struct end){.path = TD_XFER_PATH_CUDA_IPC, .device = rows[i].d, .child = true});
        grant(&t, p, d, 0, 20);
        assert_int_equal(start(&t).status, TD_OK);
        struct td_xfer_event e = event(p);
        assert_int_equal(e.kind, TD_XFER_OP_FAILED);
        assert_int_equal(e.status, TD_ERR_UNSUPPORTED);
        if (!strstr(e.reason, rows[i].why)) fail_msg("row %zu: %s", i, e.reason);
        node_free(p);
        node_free(d);
    }
}

static td_status open_status(const struct end *e, char msg[256])
{
    struct node *n = node_local();
    struct node_command c = {.verb = NODE_OPEN,
                             .path = e->path,
                             .shareable = true,
                             .max_slots = 4,
                             .max_ops = 4,
                             .block_bytes = BLOCK_BYTES,
                             .n_blocks = 4};
    snprintf(c.device, sizeof c.device, "%s", e->device);
    set_rdma(&c, e);
    struct node_reply r = ask(n, &c);
    memcpy(msg, r.msg, 256);
    node_free(n);
    return r.status;
}

static void what_a_named_path_cannot_have_is_refused_at_open(void **state)
{
    (void)state;
    static const struct {
        struct end end;
        const char *why;
    } rows[] = {
        {{.path = TD_XFER_PATH_SHM, .device = "no-pin"}, "not the driver's"},
        {{.path = TD_XFER_PATH_SHM_STAGED, .device = "no-pin"}, "not the driver's"},
        {{.path = TD_XFER_PATH_CUDA_IPC, .device = ""}, "the host's memory"},
        {{.path = TD_XFER_PATH_CUDA_IPC, .device = "no-ipc"}, "virtual allocation"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char msg[256];
        assert_int_equal(open_status(&rows[i].end, msg), TD_ERR_UNSUPPORTED);
        if (!strstr(msg, rows[i].why)) fail_msg("row %zu: %s", i, msg);
    }
    /* Named on both sides, with pools of different kinds. */
    static const struct {
        struct end p, d;
        const char *why;
    } pairs[] = {
        {{.path = TD_XFER_PATH_CUDA_IPC, .device = "device"},
         {.device = ""},
         "only cuda-ipc is allowed, and the pool of it"},
        {{.path = TD_XFER_PATH_AUTO, .device = ""},
         {.path = TD_XFER_PATH_CUDA_IPC, .device = "device"},
         "only cuda-ipc is allowed, and the pool of this side"},
        {{.path = TD_XFER_PATH_SHM, .device = ""},
         {.device = "device"},
         "only shm is allowed, and its pool"},
        {{.path = TD_XFER_PATH_AUTO, .device = "no-pin"},
         {.path = TD_XFER_PATH_SHM, .device = ""},
         "only shm is allowed, and this side's pool"},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        struct node *p = open_end(&pairs[i].p), *d = open_end(&pairs[i].d);
        struct transfer t;
        grant(&t, p, d, 0, 4);
        struct node_reply r = start(&t);
        assert_int_equal(r.status, TD_ERR_UNSUPPORTED);
        if (!strstr(r.msg, pairs[i].why)) fail_msg("pair %zu: %s", i, r.msg);
        node_free(p);
        node_free(d);
    }
}

/* A launch or a copy that fails takes the device with it: every op and slot ends with that
 * reason, and no new one begins. */
static void a_device_that_fails_ends_everything(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_DEVICE_PATHS; k++)
        for (int receiver = 0; receiver < 2; receiver++) {
            bool ipc_sender = k == 1 && !receiver; /* issues no copies but the probe's */
            if (ipc_sender) continue;
            struct node *p = open_end(&(struct end){.path = device_paths[k],
                                                    .device = receiver ? "slow" : "slow,fails=3",
                                                    .child = true});
            struct node *d = open_end(&(struct end){.path = device_paths[k],
                                                    .device = receiver ? "slow,fails=4" : "slow",
                                                    .child = true});
            struct node *bad = receiver ? d : p, *good = receiver ? p : d;
            struct transfer t;
            bool broke = false;
            for (int i = 0; i < 8 && !broke; i++) {
                grant(&t, p, d, 0, 40);
                if (start(&t).status) fail_msg("op");
                submit(&t, 0, 40, true);
                struct td_xfer_event e = event(d), f = event(p);
                broke = e.kind != TD_XFER_SLOT_READY;
                if (!broke) {
                    check_content(&t);
                } else {
                    assert_int_equal(e.kind, TD_XFER_SLOT_FAILED);
                    assert_int_equal(f.kind, TD_XFER_OP_FAILED);
                    assert_int_equal(e.status, TD_ERR_DEVICE);
                    assert_int_equal(f.status, TD_ERR_DEVICE);
                    if (!strstr(e.reason, "illegal memory access") ||
                        !strstr(f.reason, "illegal memory access"))
                        fail_msg("%s; %s", e.reason, f.reason);
                }
                give_back(&t);
                expect(d, TD_XFER_SLOT_FREE, broke ? TD_ERR_DEVICE : TD_OK);
            }
            assert_true(broke);
            struct node_command c = {.verb = NODE_GRANT, .n = 1};
            struct node_reply r = ask(bad, &c);
            assert_int_equal(r.status, TD_ERR_DEVICE);
            if (!strstr(r.msg, "illegal memory access")) fail_msg("%s", r.msg);
            assert_int_equal(ask(good, &c).status, TD_OK);
            node_free(p);
            node_free(d);
        }
}

/* Small blocks share batches: the device is asked a few times, and not once per block. */
static void small_blocks_are_copied_in_batches(void **state)
{
    (void)state;
    for (size_t k = 0; k < N_DEVICE_PATHS; k++) {
        struct end e = {
            .path = device_paths[k], .device = "device", .n_blocks = 1000, .block_bytes = 1024};
        struct node *p = open_end(&e), *d = open_end(&e);
        struct transfer t;
        for (int i = 0; i < 2; i++) { /* the second with the connection there */
            uint64_t before_p = fake_device_n_copies(node_device(p)),
                     before_d = fake_device_n_copies(node_device(d));
            grant(&t, p, d, 0, 1000);
            assert_int_equal(start(&t).status, TD_OK);
            submit(&t, 0, 1000, true);
            finish(&t, device_paths[k]);
            uint64_t n_p = fake_device_n_copies(node_device(p)) - before_p,
                     n_d = fake_device_n_copies(node_device(d)) - before_d;
            if (k != 1)
                assert_in_range(n_p, 1, 2); /* 16 frames of 64 blocks are one buffer */
            else
                assert_int_equal(n_p, 0);
            /* tcp: a batch per turn of reading, as the socket fills; cuda-ipc: one, and its
               probe */
            assert_in_range(n_d, 1, k != 1 ? 40 : 2 + (i == 0));
        }
        node_free(p);
        node_free(d);
    }
}

/* Of this process's TCP connections: so that little lies in sockets. */
static void shrink_send_buffers(void)
{
    for (int fd = 3, bytes = 4096; fd < 1024; fd++) {
        struct sockaddr_in peer;
        socklen_t n = sizeof peer;
        if (getpeername(fd, (struct sockaddr *)&peer, &n) == 0 && peer.sin_family == AF_INET)
            setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    }
}

/* Until the sockets to peers that do not read are full; what went into them. */
static uint64_t send_until_full(struct node *p, uint64_t before)
{
    struct node_command stats = {.verb = NODE_STATS};
    uint64_t sent = 0;
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);;) {
        uint64_t now = ask(p, &stats).stats.bytes_sent;
        bool any;
        event_within(p, 200, &any);
        assert_false(any);
        if (now == sent) return sent - before;
        sent = now;
        if (td_now_ns() > until) fail_msg("sockets that take bytes for ever");
    }
}

/* Peers that do not read hold no staging buffers that another one needs; and their own transfers
 * come through when they read again. */
static void stopped_peers_do_not_hold_the_ring(void **state)
{
    (void)state;
    enum { STOPPED = 5 }; /* with 4 lanes each: more than there are buffers */
    struct end e = {.path = TD_XFER_PATH_TCP,
                    .device = "slow",
                    .lanes = 4,
                    .n_blocks = 48,
                    .block_bytes = 256 << 10,
                    .timeout_ms = 60000};
    struct node *p = open_end(&e), *d[STOPPED + 1];
    struct transfer t[STOPPED + 1];
    e.child = e.small_sockets = true;
    for (int i = 0; i <= STOPPED; i++) {
        d[i] = open_end(&e);
        grant(&t[i], p, d[i], 0, 8); /* so that connections and lanes stand */
        assert_int_equal(start(&t[i]).status, TD_OK);
        submit(&t[i], 0, 8, true);
        finish(&t[i], TD_XFER_PATH_TCP);
    }
    for (int i = 0; i < STOPPED; i++) {
        grant(&t[i], p, d[i], 0, 48);
        kill(node_pid(d[i]), SIGSTOP);
        waitpid(node_pid(d[i]), NULL, WUNTRACED);
    }
    shrink_send_buffers();
    struct node_command stats = {.verb = NODE_STATS};
    uint64_t before = ask(p, &stats).stats.bytes_sent;
    for (int i = 0; i < STOPPED; i++) {
        t[i].seed = 424242; /* they all send the same blocks */
        if (i == 0) fill_source(&t[i]);
        assert_int_equal(start_filled(&t[i]).status, TD_OK);
        submit(&t[i], 0, 48, true);
    }
    /* each lane has a frame that it cannot send */
    assert_true(send_until_full(p, before) / STOPPED < 48ull * e.block_bytes / 2);
    for (int i = 0; i < 2; i++) {
        grant(&t[STOPPED], p, d[STOPPED], 0, 48);
        t[STOPPED].seed = 424242;
        assert_int_equal(start_filled(&t[STOPPED]).status, TD_OK);
        submit(&t[STOPPED], 0, 48, true);
        finish(&t[STOPPED], TD_XFER_PATH_TCP);
    }
    for (int i = 0; i < STOPPED; i++) kill(node_pid(d[i]), SIGCONT);
    for (int i = 0; i < STOPPED; i++) {
        struct td_xfer_event ready = event(d[i]);
        if (ready.kind != TD_XFER_SLOT_READY)
            fail_msg("event %d: %s", (int)ready.kind, ready.reason);
        check_content(&t[i]);
        expect(p, TD_XFER_OP_DONE, TD_OK);
    }
    node_free(p);
    for (int i = 0; i <= STOPPED; i++) node_free(d[i]);
}

/* shm-staged: buffers are a receiver's until it has read them. Those that stand still have a
 * few, and another peer's transfers find some; and they read on when they go on. */
static void stopped_receivers_have_a_few_of_the_rings_buffers(void **state)
{
    (void)state;
    enum { STOPPED = 3 }; /* with as many as all receivers may have */
    struct end e = {.path = TD_XFER_PATH_SHM,
                    .device = "slow",
                    .n_blocks = 48,
                    .block_bytes = 256 << 10,
                    .timeout_ms = 60000};
    struct node *p = open_end(&e), *d[STOPPED];
    struct node *other = open_end(
        &(struct end){.device = "", .n_blocks = 48, .block_bytes = 256 << 10, .child = true});
    struct transfer t[STOPPED];
    struct node_command stats = {.verb = NODE_STATS};
    e.child = true;
    for (int i = 0; i < STOPPED; i++) {
        d[i] = open_end(&e);
        whole(p, d[i], TD_XFER_PATH_SHM_STAGED);
    }
    whole(p, other, TD_XFER_PATH_SHM_STAGED); /* from a device to the host's memory */
    for (int i = 0; i < STOPPED; i++) {
        grant(&t[i], p, d[i], 0, 48);
        kill(node_pid(d[i]), SIGSTOP);
        waitpid(node_pid(d[i]), NULL, WUNTRACED);
    }
    uint64_t before = ask(p, &stats).stats.bytes_sent;
    t[0].seed = t[1].seed = t[2].seed = 424242; /* they all send the same blocks */
    fill_source(&t[0]);
    assert_int_equal(start_filled(&t[0]).status, TD_OK);
    submit(&t[0], 0, 48, true);
    assert_int_equal(start_filled(&t[1]).status, TD_OK);
    submit(&t[1], 0, 48, true);
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS), sent = 0;
         sent < 16ull << 20;) {
        /* 4 buffers of 2 MiB each */
        sent = ask(p, &stats).stats.bytes_sent - before;
        if (td_now_ns() > until) fail_msg("%llu bytes were named", (unsigned long long)sent);
    }
    expect_none(p);
    assert_int_equal(ask(p, &stats).stats.bytes_sent - before, 16u << 20); /* and no more */
    struct transfer fresh;
    grant(&fresh, p, other, 0, 48);
    fresh.seed = 424242;
    assert_int_equal(start_filled(&fresh).status, TD_OK);
    submit(&fresh, 0, 48, true);
    finish(&fresh, TD_XFER_PATH_SHM_STAGED);
    assert_int_equal(start_filled(&t[2]).status, TD_OK);
    submit(&t[2], 0, 48, true);
    for (int i = 0; i < STOPPED; i++) kill(node_pid(d[i]), SIGCONT);
    for (int i = 0; i < STOPPED; i++) {
        struct td_xfer_event ready = event(d[i]);
        if (ready.kind != TD_XFER_SLOT_READY)
            fail_msg("event %d: %s", (int)ready.kind, ready.reason);
        check_content(&t[i]);
        expect(p, TD_XFER_OP_DONE, TD_OK);
    }
    node_free(p);
    node_free(other);
    for (int i = 0; i < STOPPED; i++) node_free(d[i]);
}

/* Copies that take their time, more of them than there are buffers: the receiver reads on when
 * one is free. */
static void a_full_ring_makes_the_receiver_wait(void **state)
{
    (void)state;
    struct end e = {.path = TD_XFER_PATH_TCP,
                    .device = "device",
                    .lanes = 4,
                    .n_blocks = 48,
                    .block_bytes = 1 << 20,
                    .timeout_ms = 60000};
    struct node *d = open_end(&e);
    e.child = true;
    struct node *p = open_end(&e);
    struct transfer t;
    struct node_command stats = {.verb = NODE_STATS};
    fake_device_hold(node_device(d), true);
    grant(&t, p, d, 0, 48);
    assert_int_equal(start(&t).status, TD_OK);
    submit(&t, 0, 48, true);
    until_waiting(d, 15); /* every buffer */
    expect_none(d);
    assert_int_equal(fake_device_n_waiting(node_device(d)), 16);
    assert_int_equal(ask(d, &stats).stats.bytes_received, 0);
    fake_device_hold(node_device(d), false);
    finish(&t, TD_XFER_PATH_TCP);
    node_free(p);
    node_free(d);
}

/* The receiver's process dies while its device copies from the sender's memory, and the sender's
 * while the receiver's does. */
static void a_killed_process_leaves_nothing(void **state)
{
    (void)state;
    for (int receiver = 0; receiver < 2; receiver++) {
        struct node *p =
            open_end(&(struct end){.path = TD_XFER_PATH_CUDA_IPC, .device = "slow", .child = true});
        struct node *d =
            open_end(&(struct end){.path = TD_XFER_PATH_CUDA_IPC, .device = "slow", .child = true});
        struct transfer t;
        whole(p, d, TD_XFER_PATH_CUDA_IPC);
        grant(&t, p, d, 0, 40);
        assert_int_equal(start(&t).status, TD_OK);
        submit(&t, 0, 20, false);
        node_kill(receiver ? d : p);
        if (receiver) {
            expect(p, TD_XFER_OP_FAILED, TD_ERR_PEER);
        } else {
            expect(d, TD_XFER_SLOT_FAILED, TD_ERR_PEER);
            give_back(&t);
            expect(d, TD_XFER_SLOT_FREE, TD_ERR_PEER);
        }
        struct node *fresh =
            open_end(&(struct end){.path = TD_XFER_PATH_CUDA_IPC, .device = "slow", .child = true});
        whole(receiver ? p : fresh, receiver ? fresh : d, TD_XFER_PATH_CUDA_IPC);
        node_free(fresh);
        node_free(p);
        node_free(d);
    }
}

/* What a NIC wrote to a GPU is seen when the same NIC has READ behind it. The fake's writes stay
 * on their way until then: without a flush READY is a lie, which is what the driver's word
 * decides. */
static void writes_of_nics_are_flushed(void **state)
{
    (void)state;
    static const struct {
        const char *device, *fabric;
        enum td_xfer_gpu_flush flush;
        int n_flushes; /* for one small transfer, of one rail; -1: any but 0 */
        bool is_right;
    } rows[] = {
        {"slow", "", TD_XFER_GPU_FLUSH_AUTO, 1, true},
        {"slow", "", TD_XFER_GPU_FLUSH_ON, 1, true},
        {"slow", "", TD_XFER_GPU_FLUSH_OFF, 0, false},
        /* it said that writes are visible; here they are not */
        {"slow,owner", "", TD_XFER_GPU_FLUSH_AUTO, 0, false},
        {"slow,owner", "", TD_XFER_GPU_FLUSH_ON, 1, true},
        {"slow,owner", ",devices=2", TD_XFER_GPU_FLUSH_AUTO, -1, true}, /* two rails are two ways */
        {"slow,owner", ",devices=2,unordered=1", TD_XFER_GPU_FLUSH_AUTO, -1, true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct end e = {.path = TD_XFER_PATH_RDMA,
                        .device = rows[i].device,
                        .fabric = rows[i].fabric,
                        .flush = rows[i].flush,
                        .block_bytes = 64 << 10};
        struct node *d = open_end(&e);
        e.child = true;
        struct node *p = open_end(&e);
        struct transfer t;
        struct node_command stats = {.verb = NODE_STATS};
        for (int big = 0; big < 2; big++) { /* one queue pair; all */
            grant(&t, p, d, 0, big ? 64 : 20);
            assert_int_equal(start(&t).status, TD_OK);
            uint64_t before = ask(d, &stats).stats.n_gpu_flushes;
            submit(&t, 0, t.n, true);
            struct td_xfer_event ready = event(d);
            if (ready.kind != TD_XFER_SLOT_READY) fail_msg("row %zu: %s", i, ready.reason);
            assert_int_equal(ready.path, TD_XFER_PATH_RDMA);
            if (compare_content(&t).ok != rows[i].is_right)
                fail_msg("row %zu, big %d: content is %s", i, big,
                         rows[i].is_right ? "wrong" : "right");
            int n = (int)(ask(d, &stats).stats.n_gpu_flushes - before);
            if (rows[i].n_flushes < 0 ? n < 1 + (big && rows[i].fabric[0]) : n != rows[i].n_flushes)
                fail_msg("row %zu, big %d: %d flushes", i, big, n);
            expect(p, TD_XFER_OP_DONE, TD_OK);
            give_back(&t);
            expect(d, TD_XFER_SLOT_FREE, TD_OK);
        }
        node_free(p);
        node_free(d);
        unlink(fabric_path);
    }
}

/* The READ behind the writes never completes: the slot fails by name within a peer time-out, is
 * free when it is given back, and the next flush has another queue pair. */
static void a_flush_that_hangs_fails_its_slot(void **state)
{
    (void)state;
    struct end e = {.path = TD_XFER_PATH_RDMA, .device = "slow", .fabric = "", .timeout_ms = 2000};
    struct node *d = open_end(&e);
    e.child = true;
    struct node *p = open_end(&e);
    struct td_fake_rule stall = {.fault = TD_FAKE_STALL, .device = TD_FAKE_ALL, .nth = 1};
    struct transfer t;
    whole(p, d, TD_XFER_PATH_RDMA);
    assert_true(td_fake_rule_add(node_fabric(d), &stall)); /* flushes are all that d sends */
    grant(&t, p, d, 0, 20);
    assert_int_equal(start(&t).status, TD_OK);
    submit(&t, 0, t.n, true);
    struct td_xfer_event failed = event(d);
    assert_int_equal(failed.kind, TD_XFER_SLOT_FAILED);
    assert_int_equal(failed.status, TD_ERR_PEER);
    assert_non_null(strstr(failed.reason, "writes to the GPU"));
    expect(p, TD_XFER_OP_FAILED, TD_ERR_PEER);
    give_back(&t);
    expect(d, TD_XFER_SLOT_FREE, TD_ERR_PEER);
    whole(p, d, TD_XFER_PATH_RDMA);
    node_free(p);
    node_free(d);
    unlink(fabric_path);
}

/* No dma-buf and no peermem: rdma by name is refused, with both reasons; auto says so and goes
 * on. */
static void memory_that_no_nic_reaches_is_refused(void **state)
{
    (void)state;
    char msg[256];
    struct end e = {.path = TD_XFER_PATH_RDMA, .device = "no-dmabuf", .fabric = ""};
    assert_int_equal(open_status(&e, msg), TD_ERR_UNSUPPORTED);
    static const char *const words[] = {"exports no dma-buf", "nvidia_peermem: Bad address",
                                        "open GPU kernel modules"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (!strstr(msg, words[i])) fail_msg("\"%s\" is not in: %s", words[i], msg);
    e.path = TD_XFER_PATH_AUTO;
    struct node *d = open_end(&e);
    e.child = true;
    struct node *p = open_end(&e);
    struct node_command stats = {.verb = NODE_STATS};
    struct transfer t;
    whole(p, d, TD_XFER_PATH_CUDA_IPC);
    node_free(p);
    e.child = false;
    e.device = "no-dmabuf,no-ipc";
    p = open_end(&e);
    bool any, told = false;
    event_within(p, 0, &any);
    struct td_xfer_event last = ask(p, &stats).event; /* the last that was told of paths */
    told = last.status == TD_ERR_UNSUPPORTED && strstr(last.reason, "cannot reach the memory of");
    if (!told) fail_msg("told: %s", last.reason);
    grant(&t, p, d, 0, 30);
    assert_int_equal(start(&t).status, TD_OK);
    submit(&t, 0, 30, true);
    finish(&t, TD_XFER_PATH_SHM_STAGED);
    node_free(p);
    node_free(d);

    /* No dma-buf, and nvidia_peermem is loaded: the plain registration answers, on both sides
       and for the flush. */
    for (int child = 0; child < 2; child++) {
        e = (struct end){
            .path = TD_XFER_PATH_RDMA, .device = "peermem,slow", .fabric = ",device_late=1"};
        d = open_end(&e);
        e.child = child;
        p = open_end(&e);
        whole(p, d, TD_XFER_PATH_RDMA);
        if (ask(d, &stats).stats.n_gpu_flushes == 0) fail_msg("READY without a flush");
        node_free(p);
        node_free(d);
    }
    unlink(fabric_path);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--node") == 0)
        return node_child_main((int)strtol(argv[2], NULL, 10));
    program = argv[0];
    snprintf(fabric_path, sizeof fabric_path, "/dev/shm/tandem-xfer-device-%d", (int)getpid());
    if (argc == 2) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_revoked_slot_waits_for_its_copies),
        cmocka_unit_test(ready_comes_when_the_device_has_the_bytes),
        cmocka_unit_test(a_cancelled_op_waits_for_its_copies),
        cmocka_unit_test(another_attempt_waits_for_the_copies_of_the_first),
        cmocka_unit_test(paths_of_device_pools),
        cmocka_unit_test(what_a_named_path_cannot_have_is_refused_at_open),
        cmocka_unit_test(a_device_that_fails_ends_everything),
        cmocka_unit_test(small_blocks_are_copied_in_batches),
        cmocka_unit_test(stopped_peers_do_not_hold_the_ring),
        cmocka_unit_test(stopped_receivers_have_a_few_of_the_rings_buffers),
        cmocka_unit_test(a_full_ring_makes_the_receiver_wait),
        cmocka_unit_test(a_killed_process_leaves_nothing),
        cmocka_unit_test(writes_of_nics_are_flushed),
        cmocka_unit_test(a_flush_that_hangs_fails_its_slot),
        cmocka_unit_test(memory_that_no_nic_reaches_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
