/* xfer_bench_ends.c - the two ends of the transfer bench, and the timed runs that need both.
 *
 * The receiver is a fork of this process that obeys commands on a socket. Nothing of the harness
 * passes between the two while the clock runs:
 *
 *   sender                                   receiver
 *   ARM(case, serial)  ------------------->  poisons the destination, makes all grants of the
 *                                            batch, reads its CPU clock
 *                      <-------------------  grants
 *   clock on; op_start + submit, `depth` in flight, until every OP_DONE; clock off
 *                                            takes SLOT_READY of each; reads its CPU clock after
 *                                            the last
 *   FINISH             ------------------->  verifies every byte, revokes, waits for SLOT_FREE
 *                      <-------------------  status, CPU seconds
 *
 * Content: the sender's pool holds in every 8 bytes a number that depends on their place, so the
 * receiver can tell which block it has got. Before a batch the first and the last 8 bytes of
 * every destination block are overwritten, so what lay there before never passes for what should
 * come. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench/xfer_bench.h"
#include "common/base/random.h"
#include "kernels/device.h"
#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "common/transfer/rdma/verbs.h"

#define LAYOUT 0x7866657262656e63ull /* any number: both ends are this program */

struct command {
    enum bench_verb verb;
    enum bench_way way;
    uint64_t serial;
    struct bench_case c;
};

struct reply {
    td_status status;
    double seconds, cpu_s;
    uint64_t n_verified;
    char msg[TD_ERR_MSG_MAX];
};

struct grant {
    uint32_t slot;
    uint32_t n_bytes;
    uint8_t blob[TD_XFER_BLOB_MAX];
};

/* --- shared by both sides --------------------------------------------------------------------- */

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static double thread_cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static bool all(int fd, void *data, size_t n, bool out)
{
    for (uint8_t *p = data; n;) {
        ssize_t k = out ? send(fd, p, n, MSG_NOSIGNAL) : recv(fd, p, n, 0);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

static uint64_t number_at(uint64_t i) { return (i + 1) * 0x9e3779b97f4a7c15ull ^ i >> 7; }

/* Block ids of a whole batch, transfer after transfer; both sides compute the same. to: the
 * receiver's ids. */
static void batch_ids(const struct bench_case *c, uint64_t serial, bool to, int32_t *ids)
{
    int32_t n = c->n_blocks;
    if (!c->shuffled) { /* neighbours; the two sides go round the footprint at different places */
        uint64_t n_places = (uint64_t)(c->n_pool_blocks / n);
        for (int32_t i = 0; i < c->batch; i++) {
            uint64_t place =
                (serial * (uint64_t)c->batch + (uint64_t)i + (to ? serial * 3 : 0)) % n_places;
            for (int32_t k = 0; k < n; k++) ids[i * n + k] = (int32_t)(place * (uint64_t)n) + k;
        }
        return;
    }
    uint64_t state = serial * 2 + to;
    int32_t wanted = c->batch * n;
    /* ids has room for the whole footprint */
    for (int32_t i = 0; i < c->n_pool_blocks; i++) ids[i] = i;
    for (int32_t i = 0; i < wanted; i++) {
        int32_t k = i + (int32_t)(td_keyed_step(&state) % (uint64_t)(c->n_pool_blocks - i)),
                id = ids[i];
        ids[i] = ids[k];
        ids[k] = id;
    }
}

/* Blocks that lie side by side in both pools: what the floors move with one call. */
static int32_t run_blocks(const struct bench_case *c) { return c->shuffled ? 1 : c->n_blocks; }

/* The floors of tcp: how much of n bytes one call moves. */
static size_t message_bytes(const struct bench_case *c, uint64_t n)
{
    return c->message && c->message < n ? c->message : n;
}

static int32_t *ids_new(const struct bench_case *c)
{
    int32_t batch = c->batch * c->n_blocks;
    return calloc((size_t)(batch > c->n_pool_blocks ? batch : c->n_pool_blocks), sizeof(int32_t));
}

/* --- pools wherever they are ------------------------------------------------------------------ */

static td_status pool_read(const struct bench_ends *e, uint64_t at, void *to, size_t n,
                           struct td_err *err)
{
    const uint8_t *from = (const uint8_t *)e->pool.base + at;
    if (e->on_gpu) return e->ops->device->download(to, from, n, err);
    memcpy(to, from, n);
    return TD_OK;
}

static td_status pool_write(const struct bench_ends *e, uint64_t at, const void *from, size_t n,
                            struct td_err *err)
{
    uint8_t *to = (uint8_t *)e->pool.base + at;
    if (e->on_gpu) return e->ops->device->upload(to, from, n, err);
    memcpy(to, from, n);
    return TD_OK;
}

/* This process's device and its pool in it. After the fork: a process that has used CUDA must
 * not. */
static td_status gpu_open(struct bench_ends *e, struct td_err *err)
{
    struct td_device_config config = {0};
    void *p;
    td_status s = td_device_open(&config, &e->ops, err);
    if (s) return s;
    const struct td_device_memory *m = e->ops->device->memory;
    s = e->ops->device->alloc(e->pool_bytes + TD_XFER_PROBE_BYTES, "bench", &p, err);
    if (s) return s;
    e->pool =
        (struct td_arena){.base = p, .bytes = e->pool_bytes + TD_XFER_PROBE_BYTES, .memfd = -1};
    s = m->alloc_pinned(m->ctx, BENCH_PINNED_BYTES, &p, err);
    if (!s) e->pinned = p;
    return s;
}

static void gpu_close(struct bench_ends *e)
{
    if (!e->ops) return;
    const struct td_device_memory *m = e->ops->device->memory;
    if (e->opened) m->ipc_close(m->ctx, e->opened);
    if (e->pinned) m->release_pinned(m->ctx, e->pinned);
    e->ops->device->release(e->pool.base);
    e->pool.base = NULL;
    td_device_close(e->ops);
}

static void ring(void *wakeup) { td_wakeup_signal(wakeup); }

static td_status endpoint_open(struct bench_ends *e, enum bench_way way, const struct bench_case *c,
                               const char *name, const char *device, struct td_err *err)
{
    struct td_xfer_rdma_config rdma = {.devices = device, .gid_index = -1};
    struct td_xfer_config config = {
        .instance = name,
        .incarnation = td_random_u64(),
        .layout_hash = LAYOUT,
        .listen_host = "127.0.0.1",
        .path = (enum td_xfer_path)bench_ways[way].path,
        .max_slots = (uint32_t)c->batch,
        .max_ops = (uint32_t)c->batch,
        .peer_timeout_ms = BENCH_WAIT_MS,
        .tcp_lanes = (uint32_t)c->streams,
        .digest_every = bench_ways[way].digest_every,
        .hooks = {.wake = ring, .ctx = &e->wakeup},
    };
    td_status s = TD_OK;
    if (e->on_gpu) config.memory = e->ops->device->memory;
    if (way == BENCH_RDMA) {
        s = td_verbs_load(&rdma.verbs, err);
        config.rdma = &rdma;
    }
    if (!s) s = td_xfer_open(&config, &e->x[way], err);
    return s ? s : td_xfer_mem_add(e->x[way], &e->pool, c->block_bytes, c->n_pool_blocks, err);
}

static void endpoint_close(struct bench_ends *e, enum bench_way way)
{
    td_xfer_close(e->x[way]);
    e->x[way] = NULL;
}

/* The path's next events; 0 only when the time is over. */
static size_t next_events(struct bench_ends *e, enum bench_way way, uint64_t until_ns,
                          struct td_xfer_event *events, size_t max)
{
    size_t n = td_xfer_poll(e->x[way], events, max);
    while (!n && td_wakeup_wait(&e->wakeup, until_ns)) n = td_xfer_poll(e->x[way], events, max);
    return n ? n : td_xfer_poll(e->x[way], events, max);
}

/* --- the receiver ----------------------------------------------------------------------------- */

/* Takes events until each of the batch's slots has had `kind`. */
static td_status take_slots(struct bench_ends *e, const struct command *m,
                            enum td_xfer_event_kind kind, struct td_err *err)
{
    static struct td_xfer_event events[16];
    uint64_t until = td_deadline_after_ms(td_now_ns(), BENCH_WAIT_MS);
    for (int32_t n = 0; n < m->c.batch;) {
        size_t k = next_events(e, m->way, until, events, 16);
        if (!k)
            return td_fail(err, TD_ERR_DEADLINE, "%d of %d slots after %d ms", n, m->c.batch,
                           BENCH_WAIT_MS);
        for (size_t i = 0; i < k; i++) {
            if (events[i].kind == TD_XFER_SLOT_FAILED)
                return td_fail(err, events[i].status, "slot failed: %s", events[i].reason);
            if (events[i].kind != kind)
                return td_fail(err, TD_ERR_INTERNAL, "event %d where %d is due",
                               (int)events[i].kind, (int)kind);
        }
        n += (int32_t)k;
    }
    return TD_OK;
}

static td_status verify(const struct bench_ends *e, const struct bench_case *c, const int32_t *src,
                        const int32_t *dst, struct td_err *err)
{
    uint64_t n_numbers = c->block_bytes / 8, *there = e->on_gpu ? malloc(c->block_bytes) : NULL;
    td_status s = e->on_gpu && !there ? td_fail(err, TD_ERR_NOMEM, "out of memory") : TD_OK;
    for (int32_t i = 0; !s && i < c->batch * c->n_blocks; i++) {
        const uint64_t *got =
            (const uint64_t *)((const uint8_t *)e->pool.base + (uint64_t)dst[i] * c->block_bytes);
        uint64_t first = (uint64_t)src[i] * n_numbers;
        if (there &&
            !(s = pool_read(e, (uint64_t)dst[i] * c->block_bytes, there, c->block_bytes, err)))
            got = there;
        for (uint64_t k = 0; !s && k < n_numbers; k++)
            if (got[k] != number_at(first + k))
                s = td_fail(err, TD_ERR_CORRUPT,
                            "transfer %d, block %d (source %d, destination %d) differs at byte "
                            "%llu: %016llx, must be %016llx",
                            i / c->n_blocks, i % c->n_blocks, src[i], dst[i],
                            (unsigned long long)(k * 8), (unsigned long long)got[k],
                            (unsigned long long)number_at(first + k));
    }
    free(there);
    return s;
}

/* The check is first seen to catch a planted mistake. */
static td_status try_verify(const struct bench_ends *e, const struct bench_case *c,
                            const int32_t *src, const int32_t *dst, struct td_err *err)
{
    struct td_err ignored;
    int32_t last = c->batch * c->n_blocks - 1;
    uint64_t at = (uint64_t)dst[last] * c->block_bytes + c->block_bytes / 2;
    uint8_t right, wrong;
    td_status s = pool_read(e, at, &right, 1, err);
    wrong = right ^ 1;
    if (!s) s = pool_write(e, at, &wrong, 1, err);
    if (s) return s;
    s = verify(e, c, src, dst, &ignored);
    td_status back = pool_write(e, at, &right, 1, err);
    if (back) return back;
    return s == TD_ERR_CORRUPT
               ? TD_OK
               : td_fail(err, TD_ERR_INTERNAL,
                         "a spoilt byte was not noticed: the verification is broken");
}

static void poison(const struct bench_ends *e, const struct bench_case *c, const int32_t *dst)
{
    if (e->on_gpu) {
        const struct td_device_memory *m = e->ops->device->memory;
        struct td_device_run runs[512];
        size_t n = 0;
        uint64_t ticket;
        memset(e->pinned, 0x66, 8);
        for (int32_t i = 0; i < 2 * c->batch * c->n_blocks; i++) {
            uint64_t at = (uint64_t)dst[i / 2] * c->block_bytes + (i & 1 ? c->block_bytes - 8 : 0);
            runs[n++] = (struct td_device_run){
                .to = (uint8_t *)e->pool.base + at, .from = e->pinned, .bytes = 8};
            if (n < 512 && i + 1 < 2 * c->batch * c->n_blocks) continue;
            TD_ASSERT(m->copy(m->ctx, TD_COPY_TO_DEVICE, runs, n, &ticket, NULL) == TD_OK &&
                      m->wait(m->ctx, ticket, NULL) == TD_OK);
            n = 0;
        }
        return;
    }
    for (int32_t i = 0; i < c->batch * c->n_blocks; i++) {
        uint64_t *to = (uint64_t *)((uint8_t *)e->pool.base + (uint64_t)dst[i] * c->block_bytes);
        to[0] = to[c->block_bytes / 8 - 1] = 0x6465616462656566ull;
    }
}

/* ARM to FINISH. The answer to FINISH is the caller's to send. */
static td_status receive_engine(struct bench_ends *e, const struct command *m, const int32_t *src,
                                const int32_t *dst, struct reply *r, struct td_err *err)
{
    static struct grant grants[BENCH_MAX_BATCH];
    struct command finish;
    struct td_xfer_stats before, after;
    td_status s = TD_OK;
    td_xfer_stats(e->x[m->way], &before);
    poison(e, &m->c, dst);
    for (int32_t i = 0; !s && i < m->c.batch; i++) {
        size_t n_bytes = 0;
        s = td_xfer_grant(e->x[m->way], dst + i * m->c.n_blocks, m->c.n_blocks, TD_NEVER_NS,
                          (uint64_t)i, &grants[i].slot, grants[i].blob, &n_bytes, err);
        grants[i].n_bytes = (uint32_t)n_bytes;
    }
    double cpu = cpu_seconds();
    r->status = s;
    if (s) return s;
    if (!all(e->control, r, sizeof *r, true)) return TD_ERR_PEER;
    for (int32_t i = 0; i < m->c.batch; i++)
        if (!all(e->control, &grants[i].n_bytes, sizeof grants[i].n_bytes, true) ||
            !all(e->control, grants[i].blob, grants[i].n_bytes, true))
            return TD_ERR_PEER;
    s = take_slots(e, m, TD_XFER_SLOT_READY, err);
    r->cpu_s = cpu_seconds() - cpu;
    if (!all(e->control, &finish, sizeof finish, false)) return TD_ERR_PEER;
    if (!s) s = verify(e, &m->c, src, dst, err);
    static bool tried;
    if (!s && !tried) s = try_verify(e, &m->c, src, dst, err);
    tried = true;
    if (!s) r->n_verified = (uint64_t)m->c.batch * m->c.bytes;
    for (int32_t i = 0; i < m->c.batch; i++)
        td_xfer_revoke(e->x[m->way], grants[i].slot, "the batch is over");
    if (!s) s = take_slots(e, m, TD_XFER_SLOT_FREE, err);
    td_xfer_stats(e->x[m->way], &after);
    if (!s && bench_ways[m->way].digest_every == 1 &&
        after.n_digests - before.n_digests != (uint64_t)(m->c.batch * m->c.n_blocks))
        s = td_fail(err, TD_ERR_INTERNAL, "%llu of %d blocks had a digest",
                    (unsigned long long)(after.n_digests - before.n_digests),
                    m->c.batch * m->c.n_blocks);
    return s;
}

static td_status receive_copy(struct bench_ends *e, const struct command *m, const int32_t *src,
                              const int32_t *dst, struct reply *r, struct td_err *err)
{
    const struct bench_case *c = &m->c;
    int32_t step = run_blocks(c);
    poison(e, c, dst);
    double cpu = cpu_seconds();
    uint64_t t0 = td_now_ns();
    for (int32_t i = 0; i < c->batch * c->n_blocks; i += step)
        memcpy((uint8_t *)e->pool.base + (uint64_t)dst[i] * c->block_bytes,
               e->from + (uint64_t)src[i] * c->block_bytes, c->block_bytes * (uint64_t)step);
    r->seconds = (double)(td_now_ns() - t0) / 1e9;
    r->cpu_s = cpu_seconds() - cpu;
    return verify(e, c, src, dst, err);
}

/* The floors of pools in a GPU's memory: whole runs of blocks in batches as cuda-ipc makes them,
 * or through page-locked memory that is full already. */
static td_status receive_gpu(struct bench_ends *e, const struct command *m, const int32_t *src,
                             const int32_t *dst, struct reply *r, struct td_err *err)
{
    const struct bench_case *c = &m->c;
    const struct td_device_memory *mem = e->ops->device->memory;
    uint64_t step_bytes = c->block_bytes * (uint64_t)run_blocks(c), ticket = 0;
    int32_t step = run_blocks(c);
    bool on_device = m->way == BENCH_DEVICE_COPY;
    static struct td_device_run runs[1024];
    size_t n = 0;
    td_status s = TD_OK;
    poison(e, c, dst);
    double cpu = cpu_seconds();
    uint64_t t0 = td_now_ns();
    for (int32_t i = 0; !s && i < c->batch * c->n_blocks; i += step)
        for (uint64_t at = 0, k; !s && at < step_bytes; at += k) {
            k = on_device || step_bytes - at < BENCH_PINNED_BYTES ? step_bytes - at
                                                                  : BENCH_PINNED_BYTES;
            runs[n++] = (struct td_device_run){
                .to = (uint8_t *)e->pool.base + (uint64_t)dst[i] * c->block_bytes + at,
                .from = on_device ? e->from + (uint64_t)src[i] * c->block_bytes + at : e->pinned,
                .bytes = k};
            bool last = i + step >= c->batch * c->n_blocks && at + k == step_bytes;
            if (n < sizeof runs / sizeof *runs && !last) continue;
            s = mem->copy(mem->ctx, on_device ? TD_COPY_ON_DEVICE : TD_COPY_TO_DEVICE, runs, n,
                          &ticket, err);
            n = 0;
        }
    if (!s) s = mem->wait(mem->ctx, ticket, err);
    r->seconds = (double)(td_now_ns() - t0) / 1e9;
    r->cpu_s = cpu_seconds() - cpu;
    return s || !on_device ? s : verify(e, c, src, dst, err);
}

static td_status receive_bare(struct bench_ends *e, const struct command *m, const int32_t *src,
                              const int32_t *dst, struct reply *r, struct td_err *err)
{
    struct command finish;
    poison(e, &m->c, dst);
    double cpu = cpu_seconds();
    if (!all(e->control, r, sizeof *r, true)) return TD_ERR_PEER;
    const struct bench_case *c = &m->c;
    int32_t step = run_blocks(c);
    for (int32_t i = 0; i < c->batch * c->n_blocks; i += step) {
        uint8_t *to = (uint8_t *)e->pool.base + (uint64_t)dst[i] * c->block_bytes;
        for (uint64_t got = 0; got < c->block_bytes * (uint64_t)step;) {
            ssize_t k = recv(e->bare_fd, to + got,
                             message_bytes(c, c->block_bytes * (uint64_t)step - got), 0);
            if (k <= 0)
                return td_fail(err, TD_ERR_IO, "bare loop: recv: %s",
                               k ? strerror(errno) : "closed");
            got += (uint64_t)k;
        }
        if ((i + step) % c->n_blocks == 0 && send(e->bare_fd, "", 1, MSG_NOSIGNAL) != 1)
            return td_fail(err, TD_ERR_IO, "bare loop: send: %s", strerror(errno));
    }
    r->cpu_s = cpu_seconds() - cpu;
    if (!all(e->control, &finish, sizeof finish, false)) return TD_ERR_PEER;
    return verify(e, &m->c, src, dst, err);
}

static void receiver_main(struct bench_ends *e)
{
    static struct command m;
    struct td_err err;
    while (all(e->control, &m, sizeof m, false)) {
        struct reply r = {0};
        int32_t *src = ids_new(&m.c), *dst = ids_new(&m.c);
        err = (struct td_err){0};
        if (!src || !dst) _exit(1);
        if (m.verb > BENCH_CLOSE) {
            batch_ids(&m.c, m.serial, false, src);
            batch_ids(&m.c, m.serial, true, dst);
        }
        switch (m.verb) {
        case BENCH_OPEN:
            r.status = endpoint_open(e, m.way, &m.c, "receiver", e->peer_device, &err);
            break;
        case BENCH_CLOSE:
            endpoint_close(e, m.way);
            break;
        case BENCH_ARM:
            r.status = receive_engine(e, &m, src, dst, &r, &err);
            break;
        case BENCH_COPY:
            r.status = e->on_gpu ? receive_gpu(e, &m, src, dst, &r, &err)
                                 : receive_copy(e, &m, src, dst, &r, &err);
            break;
        case BENCH_RECEIVE:
            r.status = receive_bare(e, &m, src, dst, &r, &err);
            break;
        case BENCH_FINISH:
            break; /* the sender had failed */
        }
        free(src);
        free(dst);
        memcpy(r.msg, err.msg, sizeof r.msg);
        if (!all(e->control, &r, sizeof r, true)) break;
    }
    for (enum bench_way w = 0; w < BENCH_N_PATHS; w++) endpoint_close(e, w);
}

/* --- the sender ------------------------------------------------------------------------------- */

static td_status get_reply(struct bench_ends *e, struct reply *ret_reply, struct td_err *err)
{
    if (!all(e->control, ret_reply, sizeof *ret_reply, false))
        return td_fail(err, TD_ERR_PEER, "the receiver process has ended");
    if (ret_reply->status)
        return td_fail(err, ret_reply->status, "receiver: %s",
                       ret_reply->msg[0] ? ret_reply->msg : td_status_name(ret_reply->status));
    e->n_verified += ret_reply->n_verified;
    return TD_OK;
}

static td_status ask(struct bench_ends *e, enum bench_verb verb, enum bench_way way,
                     const struct bench_case *c, uint64_t serial, struct reply *ret_reply,
                     struct td_err *err)
{
    struct command m = {.verb = verb, .way = way, .serial = serial};
    if (c) m.c = *c;
    if (!all(e->control, &m, sizeof m, true))
        return td_fail(err, TD_ERR_PEER, "the receiver process has ended");
    return ret_reply ? get_reply(e, ret_reply, err) : TD_OK;
}

static td_status bare_pair(int ret_fds[2], struct td_err *err)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ret_fds[0] = ret_fds[1] = -1;
    if (listener >= 0 && !bind(listener, (struct sockaddr *)&a, sizeof a) && !listen(listener, 1) &&
        !getsockname(listener, (struct sockaddr *)&a, &n)) {
        ret_fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (ret_fds[0] >= 0 && connect(ret_fds[0], (struct sockaddr *)&a, sizeof a) == 0)
            ret_fds[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    }
    td_status s = ret_fds[1] >= 0
                      ? TD_OK
                      : td_fail(err, TD_ERR_IO, "loopback connection: %s", strerror(errno));
    if (listener >= 0) close(listener);
    for (int i = 0; !s && i < 2; i++)
        setsockopt(ret_fds[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return s;
}

/* Both sides of a fork, when pools are in a GPU's memory: the receiver learns how to open the
 * sender's. */
struct gpu_place {
    uint8_t handle[TD_DEVICE_HANDLE_BYTES];
    uint64_t offset;
};

static td_status gpu_sender(struct bench_ends *e, struct td_err *err)
{
    struct gpu_place place;
    td_status s = gpu_open(e, err);
    const struct td_device_memory *m = s ? NULL : e->ops->device->memory;
    uint64_t *numbers = malloc(BENCH_PINNED_BYTES);
    if (!s && !numbers) s = td_fail(err, TD_ERR_NOMEM, "out of memory");
    for (uint64_t at = 0, n; !s && at < e->pool_bytes; at += n) {
        n = e->pool_bytes - at < BENCH_PINNED_BYTES ? e->pool_bytes - at : BENCH_PINNED_BYTES;
        for (uint64_t i = 0; i < (n + 7) / 8; i++) numbers[i] = number_at(at / 8 + i);
        s = pool_write(e, at, numbers, n, err);
    }
    free(numbers);
    if (!s) s = m->ipc_export(m->ctx, e->pool.base, place.handle, &place.offset, err);
    if (!s && !all(e->control, &place, sizeof place, true))
        s = td_fail(err, TD_ERR_PEER, "the receiver process has ended");
    e->from = e->pool.base;
    return s;
}

static td_status gpu_receiver(struct bench_ends *e, struct td_err *err)
{
    struct gpu_place place;
    td_status s = gpu_open(e, err);
    if (!s && !all(e->control, &place, sizeof place, false)) s = TD_ERR_PEER; /* it says why */
    if (!s)
        s = e->ops->device->memory->ipc_open(e->ops->device->memory->ctx, place.handle, &e->opened,
                                             err);
    if (!s) e->from = (const uint8_t *)e->opened + place.offset;
    return s;
}

td_status bench_ends_open(struct bench_ends *e, size_t pool_bytes, const struct bench_options *o,
                          struct td_err *err)
{
    int control[2], bare[2];
    *e = (struct bench_ends){.pool_bytes = pool_bytes,
                             .control = -1,
                             .bare_fd = -1,
                             .wakeup.fd = -1,
                             .device = o->device,
                             .peer_device = o->peer_device,
                             .on_gpu = strcmp(o->device, BENCH_GPU) == 0};
    td_status s = e->on_gpu ? TD_OK : td_arena_create(pool_bytes, 1, "bench-from", &e->pool, err);
    if (s) return s;
    e->from = e->pool.base;
    for (uint64_t i = 0; !e->on_gpu && i < pool_bytes / 8; i++)
        ((uint64_t *)e->pool.base)[i] = number_at(i);
    s = bare_pair(bare, err);
    if (s) return s;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, control))
        return td_fail(err, TD_ERR_IO, "socketpair: %s", strerror(errno));
    pid_t parent = getpid();
    e->receiver = fork();
    if (e->receiver < 0) return td_fail(err, TD_ERR_IO, "fork: %s", strerror(errno));
    bool child = e->receiver == 0;
    e->control = control[child];
    e->bare_fd = bare[child];
    close(control[!child]);
    close(bare[!child]);
    if (child) {
        struct reply r = {0};
        struct td_err child_err = {0};
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        prctl(PR_SET_NAME, "bench-receiver");
        r.status = e->on_gpu ? gpu_receiver(e, &child_err)
                             : td_arena_create(pool_bytes, 1, "bench-to", &e->pool, &child_err);
        if (!r.status) r.status = td_wakeup_open(&e->wakeup, &child_err);
        memcpy(r.msg, child_err.msg, sizeof r.msg);
        for (size_t at = 0; !e->on_gpu && at < pool_bytes; at += 4096)
            (void)*(const volatile uint8_t *)(e->from + at); /* no page faults in the floor */
        if (all(e->control, &r, sizeof r, true) && !r.status) receiver_main(e);
        gpu_close(e);
        _exit(0);
    }
    struct reply r;
    if (e->on_gpu && (s = gpu_sender(e, err))) return s;
    s = get_reply(e, &r, err);
    return s ? s : td_wakeup_open(&e->wakeup, err);
}

void bench_ends_close(struct bench_ends *e)
{
    for (enum bench_way w = 0; w < BENCH_N_PATHS; w++) endpoint_close(e, w);
    if (e->control >= 0) close(e->control); /* the receiver ends */
    if (e->bare_fd >= 0) close(e->bare_fd);
    if (e->receiver > 0) waitpid(e->receiver, NULL, 0);
    td_wakeup_close(&e->wakeup);
    if (e->on_gpu)
        gpu_close(e);
    else
        td_arena_destroy(&e->pool);
}

/* An endpoint writes its probe behind the blocks of its case, which may be in the middle of
 * another's: the pattern that all verify is put back. */
static td_status mend_pattern(struct bench_ends *e, const struct bench_case *c, struct td_err *err)
{
    uint64_t numbers[TD_XFER_PROBE_BYTES / 8 + 1], at = (uint64_t)c->n_pool_blocks * c->block_bytes,
                                                   was = e->probe_at / 8 * 8;
    if (at == e->probe_at) return TD_OK;
    e->probe_at = at;
    if (!was || was + sizeof numbers > e->pool_bytes) return TD_OK;
    for (size_t i = 0; i < sizeof numbers / 8; i++) numbers[i] = number_at(was / 8 + i);
    return pool_write(e, was, numbers, sizeof numbers, err);
}

td_status bench_link_open(struct bench_ends *e, enum bench_way way, const struct bench_case *c,
                          struct td_err *err)
{
    struct reply r;
    td_status s = e->on_gpu ? mend_pattern(e, c, err) : TD_OK;
    if (!s) s = ask(e, BENCH_OPEN, way, c, 0, &r, err);
    return s ? s : endpoint_open(e, way, c, "sender", e->device, err);
}

td_status bench_link_close(struct bench_ends *e, enum bench_way way, struct td_err *err)
{
    struct reply r;
    endpoint_close(e, way);
    return ask(e, BENCH_CLOSE, way, NULL, 0, &r, err);
}

/* All transfers of the batch with `depth` in flight. starts[i]: when transfer i was posted. */
static td_status run_engine(struct bench_ends *e, enum bench_way way, const struct bench_case *c,
                            const struct grant *grants, const int32_t *src, bool clock_posts,
                            struct bench_sample *s, struct td_err *err)
{
    static struct td_xfer_event events[16];
    uint64_t starts[BENCH_MAX_BATCH], until = td_deadline_after_ms(td_now_ns(), BENCH_WAIT_MS);
    for (int32_t n_started = 0, n_done = 0; n_done < c->batch;) {
        for (; n_started < c->batch && n_started - n_done < c->depth; n_started++) {
            const struct grant *g = &grants[n_started];
            struct td_xfer *x = e->x[way];
            uint32_t op;
            int32_t n_blocks;
            double cpu = clock_posts ? thread_cpu_seconds() : 0;
            starts[n_started] = td_now_ns();
            td_status status = td_xfer_op_start(x, g->blob, g->n_bytes, TD_NEVER_NS,
                                                (uint64_t)n_started, &op, &n_blocks, err);
            if (!status)
                status = td_xfer_submit(x, op, 0, src + n_started * c->n_blocks, c->n_blocks, true,
                                        NULL, 0);
            if (status)
                return err->msg[0] ? status
                                   : td_fail(err, status, "submit: %s", td_status_name(status));
            s->post_s += (double)(td_now_ns() - starts[n_started]) / 1e9;
            if (clock_posts) s->post_cpu_s += thread_cpu_seconds() - cpu;
        }
        size_t k = next_events(e, way, until, events, 16);
        if (!k)
            return td_fail(err, TD_ERR_DEADLINE, "%d of %d transfers after %d ms", n_done, c->batch,
                           BENCH_WAIT_MS);
        uint64_t now = td_now_ns();
        for (size_t i = 0; i < k; i++) {
            if (events[i].kind != TD_XFER_OP_DONE)
                return td_fail(err, events[i].status, "transfer failed: %s", events[i].reason);
            if (s->latency_us)
                s->latency_us[s->n_latencies++] = (double)(now - starts[events[i].user]) / 1e3;
        }
        n_done += (int32_t)k;
    }
    return TD_OK;
}

td_status bench_engine_batch(struct bench_ends *e, enum bench_way way, const struct bench_case *c,
                             uint64_t serial, bool clock_posts, struct bench_sample *s,
                             struct td_err *err)
{
    static struct grant grants[BENCH_MAX_BATCH];
    struct reply r;
    int32_t *src = ids_new(c);
    if (!src) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    batch_ids(c, serial, false, src);
    td_status status = ask(e, BENCH_ARM, way, c, serial, &r, err);
    for (int32_t i = 0; !status && i < c->batch; i++)
        if (!all(e->control, &grants[i].n_bytes, sizeof grants[i].n_bytes, false) ||
            grants[i].n_bytes > sizeof grants[i].blob ||
            !all(e->control, grants[i].blob, grants[i].n_bytes, false))
            status = td_fail(err, TD_ERR_PEER, "the receiver process has ended");
    if (!status) {
        struct td_xfer_stats before, after;
        td_xfer_stats(e->x[way], &before);
        double cpu = cpu_seconds();
        uint64_t t0 = td_now_ns();
        status = run_engine(e, way, c, grants, src, clock_posts, s, err);
        s->seconds += (double)(td_now_ns() - t0) / 1e9;
        s->sender_cpu_s += cpu_seconds() - cpu;
        s->n_bytes += (double)c->bytes * c->batch;
        s->n_transfers += c->batch;
        td_xfer_stats(e->x[way], &after);
        s->n_work_requests += after.n_work_requests - before.n_work_requests;
    }
    if (!status) status = ask(e, BENCH_FINISH, way, c, serial, &r, err);
    if (!status) s->receiver_cpu_s += r.cpu_s;
    free(src);
    return status;
}

td_status bench_memcpy_batch(struct bench_ends *e, const struct bench_case *c, uint64_t serial,
                             struct bench_sample *s, struct td_err *err)
{
    struct reply r;
    td_status status = ask(e, BENCH_COPY, BENCH_MEMCPY, c, serial, &r, err);
    if (status) return status;
    s->seconds += r.seconds;
    s->receiver_cpu_s += r.cpu_s;
    s->n_bytes += (double)c->bytes * c->batch;
    s->n_transfers += c->batch;
    return TD_OK;
}

td_status bench_gpu_batch(struct bench_ends *e, enum bench_way way, const struct bench_case *c,
                          uint64_t serial, struct bench_sample *s, struct td_err *err)
{
    struct reply r;
    td_status status = ask(e, BENCH_COPY, way, c, serial, &r, err);
    if (status) return status;
    s->seconds += r.seconds;
    s->receiver_cpu_s += r.cpu_s;
    s->n_bytes += (double)c->bytes * c->batch;
    s->n_transfers += c->batch;
    return TD_OK;
}

static td_status bare_send(struct bench_ends *e, const struct bench_case *c, const int32_t *src,
                           struct td_err *err)
{
    int32_t step = run_blocks(c);
    for (int32_t i = 0; i < c->n_blocks; i += step) {
        const uint8_t *from = e->from + (uint64_t)src[i] * c->block_bytes;
        for (uint64_t sent = 0; sent < c->block_bytes * (uint64_t)step;) {
            ssize_t k =
                send(e->bare_fd, from + sent,
                     message_bytes(c, c->block_bytes * (uint64_t)step - sent), MSG_NOSIGNAL);
            if (k <= 0) return td_fail(err, TD_ERR_IO, "bare loop: send: %s", strerror(errno));
            sent += (uint64_t)k;
        }
    }
    return TD_OK;
}

td_status bench_bare_batch(struct bench_ends *e, const struct bench_case *c, uint64_t serial,
                           struct bench_sample *s, struct td_err *err)
{
    struct reply r;
    int32_t *src = ids_new(c);
    if (!src) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    batch_ids(c, serial, false, src);
    td_status status = ask(e, BENCH_RECEIVE, BENCH_BARE, c, serial, &r, err);
    double cpu = cpu_seconds();
    uint64_t t0 = td_now_ns();
    for (int32_t n_sent = 0, n_acked = 0; !status && n_acked < c->batch;) {
        if (n_sent < c->batch && n_sent - n_acked < c->depth) {
            status = bare_send(e, c, src + n_sent * c->n_blocks, err);
            n_sent++;
            continue;
        }
        char acks[BENCH_MAX_BATCH];
        ssize_t k = recv(e->bare_fd, acks, sizeof acks, 0);
        if (k <= 0)
            status = td_fail(err, TD_ERR_IO, "bare loop: recv: %s", k ? strerror(errno) : "closed");
        else
            n_acked += (int32_t)k;
    }
    s->seconds += (double)(td_now_ns() - t0) / 1e9;
    s->sender_cpu_s += cpu_seconds() - cpu;
    if (!status) status = ask(e, BENCH_FINISH, BENCH_BARE, c, serial, &r, err);
    if (!status) s->receiver_cpu_s += r.cpu_s;
    s->n_bytes += (double)c->bytes * c->batch;
    s->n_transfers += c->batch;
    free(src);
    return status;
}
