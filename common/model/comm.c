/* comm.c - rounds, barriers and the detection of dead ranks, in shared memory. Ranks without it
 * (td_comm_open_channels) are comm_channels.c's, to which every call here passes on.
 *
 * The segment is a head, then two data buffers for each rank. A call runs in rounds of at most a
 * buffer; round k uses the buffers of parity k % 2:
 *
 *     write own buffer | barrier | read (and sum) others' buffers | [barrier | read sums]
 *
 * Invariant: a rank writes a buffer of parity p only after it has passed a barrier of the round
 * before, and every rank arrives at that barrier only when it has finished the round before that,
 * which is the last one of parity p. So one barrier between writing and reading is enough, and none
 * is needed after reading.
 *
 * all_reduce_sum is reduce-scatter, then all-gather. Rank r sums the r-th slice of all buffers, in
 * the order of ranks, into its own buffer (no other rank reads that slice of it). After a second
 * barrier every rank collects the slices.
 *
 * Barrier: the last to arrive resets n_arrived and increments `phase`. The others wait for that:
 * they spin for spin_us, then sleep on a futex. The one that increments reads the number of
 * sleepers afterwards; a sleeper counts itself before it looks for the last time; both are
 * sequentially consistent, so no wake-up is lost.
 *
 * Death: a sleeper wakes every LOOK_MS and polls the pidfds of the other ranks. A pidfd stands for
 * the process, not for its number, and is readable from the process's end on, reaped or not. The
 * first rank that sees a death writes the reason (state 0 -> 1 -> 2), and all others see it at
 * their next look. A phase that has changed wins over a death: a rank that arrived at the last
 * barrier and then ended is not a loss. */
#include "common/model/comm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/model/comm_channels.h"

#define MAGIC 0x74646370u
#define VERSION 1u
#define BUFFER_BYTES ((size_t)1 << 20)
#define BUFFER_BYTES_MAX ((size_t)256 << 20)
#define TIMEOUT_MS 60000
#define LOOK_MS 50
#define SUM_FLOATS 256
/* below this size a barrier of the threads costs more than they save */
#define TEAM_FLOATS ((size_t)16384)

enum kind { BARRIER = 1, REDUCE, GATHER, COLUMNS, BROADCAST, PARTS };

struct member {
    alignas(64) _Atomic int32_t pid; /* 0: not started */
    _Atomic uint64_t n_arrivals;     /* shows which ranks a late barrier is waiting for */
    struct {
        uint32_t kind;
        uint64_t bytes;
    } says[2]; /* by parity, like the buffers: the call that this rank is in */
};

struct shared {
    uint32_t magic, version;
    int32_t n_ranks;
    uint64_t buffer_bytes;
    _Atomic uint32_t state; /* 0 = no failure, 1 = a reason is being written, 2 = failed */
    char reason[TD_COMM_REASON_MAX];
    alignas(64) _Atomic uint32_t phase;
    _Atomic uint32_t n_sleepers;
    alignas(64) _Atomic uint32_t n_arrived;
    struct member members[TD_COMM_MAX_RANKS];
};

#define HEAD_BYTES ((sizeof(struct shared) + 4095) / 4096 * 4096)

struct td_comm {
    struct comm_channels *channels; /* NULL: a segment. Else of what follows rank, n_ranks,
                                       team_status alone */
    struct td_comm_segment *segment;
    struct shared *shared;
    int32_t rank, n_ranks;
    size_t buffer_bytes;
    uint64_t timeout_ns, spin_ns, n_rounds, n_arrivals;
    int pidfds[TD_COMM_MAX_RANKS];
    /* the result of a team's call: part 0 writes it before a meeting, all read it after */
    td_status team_status;
};

/* ---- the segment ----------------------------------------------------------------------------- */

void td_comm_segment_close(struct td_comm_segment *s)
{
    if (!s->base) return;
    munmap(s->base, s->bytes);
    close(s->memfd);
    for (int32_t r = 0; r < s->n_ranks; r++)
        for (int end = 0; end < 2; end++)
            if (s->sockets[r][end] >= 0) close(s->sockets[r][end]);
    *s = (struct td_comm_segment){0};
}

static void no_sockets(struct td_comm_segment *s)
{
    for (int32_t r = 0; r < TD_COMM_MAX_RANKS; r++) s->sockets[r][0] = s->sockets[r][1] = -1;
}

td_status td_comm_segment_create(int32_t n_ranks, size_t buffer_bytes,
                                 struct td_comm_segment *ret_segment, struct td_err *err)
{
    if (n_ranks < 1 || n_ranks > TD_COMM_MAX_RANKS)
        return td_fail(err, TD_ERR_INVALID, "ranks: %d, must be 1..%d", n_ranks, TD_COMM_MAX_RANKS);
    if (buffer_bytes == 0) buffer_bytes = BUFFER_BYTES;
    if (buffer_bytes % 64 || buffer_bytes > BUFFER_BYTES_MAX)
        return td_fail(err, TD_ERR_INVALID,
                       "buffer_bytes is %zu, must be a multiple of 64 up to %zu", buffer_bytes,
                       BUFFER_BYTES_MAX);
    struct td_comm_segment s = {.n_ranks = n_ranks,
                                .bytes = HEAD_BYTES + 2 * (size_t)n_ranks * buffer_bytes};
    no_sockets(&s);
    s.memfd = memfd_create("tandem-ranks", MFD_CLOEXEC);
    if (s.memfd < 0) return td_fail(err, TD_ERR_IO, "ranks: memfd_create: %s", strerror(errno));
    /* fails now instead of by SIGBUS in the middle of a step */
    int e = posix_fallocate(s.memfd, 0, (off_t)s.bytes);
    s.base = e ? MAP_FAILED : mmap(NULL, s.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s.memfd, 0);
    if (s.base == MAP_FAILED) {
        if (!e) e = errno;
        close(s.memfd);
        return td_fail(err, TD_ERR_NOMEM, "ranks: cannot share %zu bytes: %s", s.bytes,
                       strerror(e));
    }
    for (int32_t r = 1; r < n_ranks; r++)
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, s.sockets[r])) {
            e = errno;
            s.sockets[r][0] = s.sockets[r][1] = -1;
            td_comm_segment_close(&s);
            return td_fail(err, TD_ERR_IO, "ranks: socketpair: %s", strerror(e));
        }
    struct shared *h = s.base;
    h->magic = MAGIC;
    h->version = VERSION;
    h->n_ranks = n_ranks;
    h->buffer_bytes = buffer_bytes;
    *ret_segment = s;
    return TD_OK;
}

td_status td_comm_segment_join(int memfd, int socket, int32_t rank,
                               struct td_comm_segment *ret_segment, struct td_err *err)
{
    struct stat st;
    if (fstat(memfd, &st))
        return td_fail(err, TD_ERR_IO, "ranks: descriptor %d: %s", memfd, strerror(errno));
    if ((size_t)st.st_size < HEAD_BYTES)
        return td_fail(err, TD_ERR_CORRUPT, "ranks: the segment has %lld bytes, need %zu",
                       (long long)st.st_size, HEAD_BYTES);
    struct td_comm_segment s = {.memfd = memfd, .bytes = (size_t)st.st_size};
    no_sockets(&s);
    s.base = mmap(NULL, s.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    if (s.base == MAP_FAILED)
        return td_fail(err, TD_ERR_NOMEM, "ranks: cannot map %zu bytes: %s", s.bytes,
                       strerror(errno));
    const struct shared *h = s.base;
    if (h->magic != MAGIC || h->version != VERSION || h->n_ranks < 1 ||
        h->n_ranks > TD_COMM_MAX_RANKS || rank < 1 || rank >= h->n_ranks ||
        HEAD_BYTES + 2 * (uint64_t)h->n_ranks * h->buffer_bytes != s.bytes) {
        munmap(s.base, s.bytes);
        return td_fail(err, TD_ERR_CORRUPT, "ranks: descriptor %d is no segment with a rank %d",
                       memfd, rank);
    }
    s.n_ranks = h->n_ranks;
    s.sockets[rank][1] = socket;
    *ret_segment = s;
    return TD_OK;
}

void td_comm_segment_expect(struct td_comm_segment *segment, int32_t rank, int pid)
{
    struct shared *h = segment->base;
    atomic_store(&h->members[rank].pid, pid);
}

td_status td_comm_open(struct td_comm_segment *segment, int32_t rank,
                       const struct td_comm_config *config, struct td_comm **ret_comm,
                       struct td_err *err)
{
    if (rank < 0 || rank >= segment->n_ranks)
        return td_fail(err, TD_ERR_INVALID, "rank is %d, must be 0..%d", rank,
                       segment->n_ranks - 1);
    struct td_comm *c = calloc(1, sizeof *c);
    if (!c) return td_fail(err, TD_ERR_NOMEM, "ranks: no memory");
    c->segment = segment;
    c->shared = segment->base;
    c->rank = rank;
    c->n_ranks = segment->n_ranks;
    c->buffer_bytes = (size_t)c->shared->buffer_bytes;
    c->timeout_ns = (uint64_t)(config->timeout_ms ? config->timeout_ms : TIMEOUT_MS) * TD_NS_PER_MS;
    c->spin_ns = (uint64_t)config->spin_us * TD_NS_PER_US;
    for (int32_t r = 0; r < TD_COMM_MAX_RANKS; r++) c->pidfds[r] = -1;
    td_comm_segment_expect(segment, rank, (int)getpid());
    *ret_comm = c;
    return TD_OK;
}

td_status td_comm_open_channels(const struct td_comm_channel *channels, int32_t n_ranks,
                                int32_t rank, const struct td_comm_config *config,
                                struct td_comm **ret_comm, struct td_err *err)
{
    if (n_ranks < 2 || n_ranks > TD_COMM_MAX_RANKS || rank < 0 || rank >= n_ranks)
        return td_fail(err, TD_ERR_INVALID, "rank is %d of %d, must be below them, and they 2..%d",
                       rank, n_ranks, TD_COMM_MAX_RANKS);
    struct td_comm *c = calloc(1, sizeof *c);
    if (!c) return td_fail(err, TD_ERR_NOMEM, "ranks: no memory");
    c->rank = rank;
    c->n_ranks = n_ranks;
    for (int32_t r = 0; r < TD_COMM_MAX_RANKS; r++) c->pidfds[r] = -1;
    td_status s = comm_channels_open(channels, n_ranks, rank, &c->channels, err);
    if (s) {
        free(c);
        return s;
    }
    td_comm_set_timeout(c, config->timeout_ms);
    *ret_comm = c;
    return TD_OK;
}

bool td_comm_is_remote(const struct td_comm *c) { return c && c->channels; }

void td_comm_set_timeout(struct td_comm *c, uint32_t timeout_ms)
{
    if (!c) return;
    c->timeout_ns = (uint64_t)(timeout_ms ? timeout_ms : TIMEOUT_MS) * TD_NS_PER_MS;
    if (c->channels) comm_channels_set_timeout(c->channels, c->timeout_ns);
}

td_status td_comm_again(const struct td_comm *comm, struct td_comm **ret_comm, struct td_err *err)
{
    struct td_comm_config config = {0};
    if (comm->channels)
        return td_fail(err, TD_ERR_UNSUPPORTED, "ranks: those of several hosts have one handle");
    return td_comm_open(comm->segment, comm->rank, &config, ret_comm, err);
}

void td_comm_close(struct td_comm *c)
{
    if (!c) return;
    for (int32_t r = 0; r < TD_COMM_MAX_RANKS; r++)
        if (c->pidfds[r] >= 0) close(c->pidfds[r]);
    comm_channels_close(c->channels);
    free(c);
}

int32_t td_comm_rank(const struct td_comm *c) { return c ? c->rank : 0; }

int32_t td_comm_n_ranks(const struct td_comm *c) { return c ? c->n_ranks : 1; }

/* ---- failure --------------------------------------------------------------------------------- */

static void futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void td_comm_abort(struct td_comm *c, const char *reason)
{
    if (!c) return;
    if (c->channels) {
        comm_channels_abort(c->channels, reason);
        return;
    }
    uint32_t fine = 0;
    if (!atomic_compare_exchange_strong(&c->shared->state, &fine, 1)) return;
    snprintf(c->shared->reason, sizeof c->shared->reason, "%s", reason);
    atomic_store(&c->shared->state, 2);
    futex_wake(&c->shared->phase);
}

const char *td_comm_reason(struct td_comm *c, char *buf)
{
    buf[0] = 0;
    if (c && c->channels) return comm_channels_reason(c->channels, buf);
    /* the writer of the reason finishes as soon as it runs, unless it was killed there */
    uint64_t until = td_now_ns() + (uint64_t)LOOK_MS * TD_NS_PER_MS;
    while (c && atomic_load(&c->shared->state) == 1 && td_now_ns() < until) sched_yield();
    if (c && atomic_load(&c->shared->state) == 2) {
        memcpy(buf, c->shared->reason, TD_COMM_REASON_MAX);
        buf[TD_COMM_REASON_MAX - 1] = 0;
    } else if (c && atomic_load(&c->shared->state) == 1) {
        snprintf(buf, TD_COMM_REASON_MAX, "a rank died while it said why it gave up");
    }
    return buf;
}

/* Aborts when another rank's process has ended. */
static void look_at_ranks(struct td_comm *c)
{
    struct pollfd fds[TD_COMM_MAX_RANKS];
    int32_t who[TD_COMM_MAX_RANKS];
    nfds_t n = 0;
    for (int32_t r = 0; r < c->n_ranks; r++) {
        int pid = atomic_load(&c->shared->members[r].pid);
        if (r == c->rank || pid == 0) continue;
        bool dead = false;
        if (c->pidfds[r] < 0) {
            c->pidfds[r] = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
            dead = c->pidfds[r] < 0 && errno == ESRCH;
        }
        if (!dead && c->pidfds[r] >= 0) {
            fds[n] = (struct pollfd){.fd = c->pidfds[r], .events = POLLIN};
            who[n++] = r;
        }
        if (dead) {
            char why[TD_COMM_REASON_MAX];
            snprintf(why, sizeof why, "rank %d (pid %d) is dead", r, pid);
            td_comm_abort(c, why);
        }
    }
    if (n == 0 || poll(fds, n, 0) <= 0) return;
    for (nfds_t i = 0; i < n; i++)
        if (fds[i].revents & POLLIN) {
            char why[TD_COMM_REASON_MAX];
            snprintf(why, sizeof why, "rank %d (pid %d) is dead", who[i],
                     atomic_load(&c->shared->members[who[i]].pid));
            td_comm_abort(c, why);
            return;
        }
}

td_status td_comm_check(struct td_comm *c)
{
    if (!c || c->n_ranks == 1) return TD_OK;
    if (c->channels) return comm_channels_check(c->channels);
    if (!atomic_load(&c->shared->state)) look_at_ranks(c);
    return atomic_load(&c->shared->state) ? TD_ERR_PEER : TD_OK;
}

static void give_up_late(struct td_comm *c)
{
    char why[TD_COMM_REASON_MAX];
    size_t n = (size_t)snprintf(why, sizeof why, "after %llu ms rank %d still waits for",
                                (unsigned long long)(c->timeout_ns / TD_NS_PER_MS), c->rank);
    for (int32_t r = 0; r < c->n_ranks && n < sizeof why; r++)
        if (atomic_load(&c->shared->members[r].n_arrivals) < c->n_arrivals)
            n += (size_t)snprintf(why + n, sizeof why - n, " rank %d (pid %d)", r,
                                  atomic_load(&c->shared->members[r].pid));
    td_comm_abort(c, why);
}

/* ---- the barrier ----------------------------------------------------------------------------- */

static inline void cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static td_status wait_phase(struct td_comm *c, uint32_t old, bool idle)
{
    struct shared *h = c->shared;
    uint64_t start = td_now_ns(), now = start;
    while (c->spin_ns && now - start < c->spin_ns) {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(&h->phase, memory_order_acquire) != old) return TD_OK;
            cpu_pause();
        }
        now = td_now_ns();
    }
    for (;;) {
        atomic_fetch_add(&h->n_sleepers, 1);
        uint32_t phase = atomic_load(&h->phase), state = atomic_load(&h->state);
        if (phase == old && !state) {
            struct timespec look = {.tv_nsec = LOOK_MS * (long)TD_NS_PER_MS};
            syscall(SYS_futex, (uint32_t *)&h->phase, FUTEX_WAIT, old, &look, NULL, 0);
        }
        atomic_fetch_sub(&h->n_sleepers, 1);
        if (atomic_load(&h->phase) != old) return TD_OK;
        if (atomic_load(&h->state)) return TD_ERR_PEER;
        /* an early wake */
        if ((now = td_now_ns()) - start < (uint64_t)LOOK_MS * TD_NS_PER_MS) continue;
        look_at_ranks(c);
        if (!idle && now - start > c->timeout_ns) give_up_late(c);
    }
}

static td_status meet(struct td_comm *c, bool idle)
{
    struct shared *h = c->shared;
    if (atomic_load_explicit(&h->state, memory_order_relaxed)) return TD_ERR_PEER;
    uint32_t phase = atomic_load(&h->phase);
    atomic_store_explicit(&h->members[c->rank].n_arrivals, ++c->n_arrivals, memory_order_relaxed);
    if (atomic_fetch_add(&h->n_arrived, 1) + 1 < (uint32_t)c->n_ranks)
        return wait_phase(c, phase, idle);
    atomic_store(&h->n_arrived, 0);
    atomic_store(&h->phase, phase + 1);
    if (atomic_load(&h->n_sleepers)) futex_wake(&h->phase);
    return TD_OK;
}

/* ---- rounds ---------------------------------------------------------------------------------- */

/* Checked before a buffer is written, because a rank that was slow to see the end may still be
 * reading it. */
static bool is_over(const struct td_comm *c) { return atomic_load(&c->shared->state) != 0; }

static uint8_t *buffer_of(const struct td_comm *c, int32_t rank)
{
    size_t parity = c->n_rounds & 1;
    return (uint8_t *)c->segment->base + HEAD_BYTES + ((size_t)rank * 2 + parity) * c->buffer_bytes;
}

/* The barrier after the own buffer was written. Checks that all ranks are in the same call; bytes:
 * what is left of it. */
static td_status meet_as(struct td_comm *c, enum kind kind, uint64_t bytes, bool idle)
{
    struct member *m = c->shared->members;
    size_t parity = c->n_rounds & 1;
    if (is_over(c)) return TD_ERR_PEER;
    m[c->rank].says[parity].kind = kind;
    m[c->rank].says[parity].bytes = bytes;
    td_status s = meet(c, idle);
    if (s) return s;
    for (int32_t r = 0; r < c->n_ranks; r++) {
        if (m[r].says[parity].kind == kind &&
            (m[r].says[parity].bytes == bytes || kind == BROADCAST))
            continue;
        char why[TD_COMM_REASON_MAX];
        snprintf(why, sizeof why,
                 "rank %d is in call %u with %llu bytes, rank %d in call %d with %llu", r,
                 m[r].says[parity].kind, (unsigned long long)m[r].says[parity].bytes, c->rank,
                 (int)kind, (unsigned long long)bytes);
        td_comm_abort(c, why);
        return TD_ERR_INTERNAL;
    }
    return TD_OK;
}

static size_t min_size(size_t a, size_t b) { return a < b ? a : b; }

/* The elements [*ret_from, *ret_to) of a round of n that belong to rank r. Slices begin on cache
 * lines. */
static void slice_of(size_t n, int32_t r, int32_t n_ranks, size_t *ret_from, size_t *ret_to)
{
    size_t each = (n / (size_t)n_ranks + 16) / 16 * 16; /* n_ranks of them cover n */
    *ret_from = min_size(each * (size_t)r, n);
    *ret_to = min_size(each * ((size_t)r + 1), n);
}

/* Sums slice [from, to) of all buffers, in the order of ranks, into the own buffer. */
static void sum_slice(struct td_comm *c, size_t from, size_t to)
{
    float *mine = (float *)(void *)buffer_of(c, c->rank), sum[SUM_FLOATS];
    for (size_t at = from; at < to; at += SUM_FLOATS) {
        size_t n = min_size(SUM_FLOATS, to - at);
        memcpy(sum, (float *)(void *)buffer_of(c, 0) + at, n * sizeof(float));
        for (int32_t r = 1; r < c->n_ranks; r++) {
            const float *other = (const float *)(const void *)buffer_of(c, r) + at;
            for (size_t i = 0; i < n; i++) sum[i] += other[i];
        }
        memcpy(mine + at, sum, n * sizeof(float));
    }
}

/* This part's share of [from, to). */
static void share_of(const struct td_comm_team *t, size_t from, size_t to, size_t *ret_from,
                     size_t *ret_to)
{
    slice_of(to - from, t->part, t->n_parts, ret_from, ret_to);
    *ret_from += from;
    *ret_to += from;
}

/* Part 0 alone communicates with the other ranks; the rest of its team gets the result at a
 * meeting. */
static td_status team_outcome(struct td_comm *c, const struct td_comm_team *t, td_status mine)
{
    if (t->part == 0) c->team_status = mine;
    t->meet(t->ctx);
    return c->team_status;
}

static td_status sum_together(struct td_comm *c, const struct td_comm_team *t, float *x, size_t n)
{
    for (size_t at = 0; at < n;) {
        size_t m = min_size(n - at, c->buffer_bytes / sizeof(float)), from, to, lo, hi;
        td_status s = team_outcome(c, t, t->part == 0 && is_over(c) ? TD_ERR_PEER : TD_OK);
        if (s) return s;
        share_of(t, 0, m, &lo, &hi);
        memcpy((float *)(void *)buffer_of(c, c->rank) + lo, x + at + lo, (hi - lo) * sizeof(float));
        t->meet(t->ctx);
        if ((s = team_outcome(
                 c, t, t->part == 0 ? meet_as(c, REDUCE, (n - at) * sizeof(float), false) : TD_OK)))
            return s;
        slice_of(m, c->rank, c->n_ranks, &from, &to);
        share_of(t, from, to, &lo, &hi);
        sum_slice(c, lo, hi);
        t->meet(t->ctx);
        if ((s = team_outcome(c, t, t->part == 0 ? meet(c, false) : TD_OK))) return s;
        for (int32_t r = 0; r < c->n_ranks; r++) {
            slice_of(m, r, c->n_ranks, &from, &to);
            share_of(t, from, to, &lo, &hi);
            memcpy(x + at + lo, (const float *)(const void *)buffer_of(c, r) + lo,
                   (hi - lo) * sizeof(float));
        }
        t->meet(t->ctx); /* nobody reads the buffers of this round any more */
        if (t->part == 0) c->n_rounds++;
        at += m;
    }
    return TD_OK;
}

static td_status sum_alone(struct td_comm *c, float *x, size_t n)
{
    for (size_t at = 0; at < n; c->n_rounds++) {
        size_t m = min_size(n - at, c->buffer_bytes / sizeof(float)), from, to;
        if (is_over(c)) return TD_ERR_PEER;
        memcpy(buffer_of(c, c->rank), x + at, m * sizeof(float));
        td_status s = meet_as(c, REDUCE, (n - at) * sizeof(float), false);
        if (s) return s;
        slice_of(m, c->rank, c->n_ranks, &from, &to);
        sum_slice(c, from, to);
        if ((s = meet(c, false))) return s;
        for (int32_t r = 0; r < c->n_ranks; r++) {
            slice_of(m, r, c->n_ranks, &from, &to);
            memcpy(x + at + from, (const float *)(const void *)buffer_of(c, r) + from,
                   (to - from) * sizeof(float));
        }
        at += m;
    }
    return TD_OK;
}

td_status td_comm_all_reduce_sum(struct td_comm *c, const struct td_comm_team *team, float *x,
                                 size_t n)
{
    if (td_comm_n_ranks(c) == 1) return TD_OK;
    if (c->channels) {
        bool talks = !team || team->part == 0;
        td_status s = talks ? comm_channels_sum(c->channels, x, n) : TD_OK;
        return team && team->n_parts > 1 ? team_outcome(c, team, s) : s;
    }
    if (!team || team->n_parts == 1) return sum_alone(c, x, n);
    if (n < TEAM_FLOATS) return team_outcome(c, team, team->part == 0 ? sum_alone(c, x, n) : TD_OK);
    return sum_together(c, team, x, n);
}

td_status td_comm_all_gather(struct td_comm *c, const void *mine, size_t bytes, void *all)
{
    if (td_comm_n_ranks(c) == 1) {
        memcpy(all, mine, bytes);
        return TD_OK;
    }
    if (c->channels) return comm_channels_all_gather(c->channels, mine, bytes, all);
    for (size_t at = 0; at < bytes; c->n_rounds++) {
        size_t m = min_size(bytes - at, c->buffer_bytes);
        if (is_over(c)) return TD_ERR_PEER;
        memcpy(buffer_of(c, c->rank), (const uint8_t *)mine + at, m);
        td_status s = meet_as(c, GATHER, bytes - at, false);
        if (s) return s;
        for (int32_t r = 0; r < c->n_ranks; r++)
            memcpy((uint8_t *)all + (size_t)r * bytes + at, buffer_of(c, r), m);
        at += m;
    }
    return TD_OK;
}

static void meet_nobody(void *ctx) { (void)ctx; }

/* In rounds of what a buffer holds of each rank's part. A rank that has less is silent in the last
 * rounds. */
static td_status gather_parts(struct td_comm *c, const struct td_comm_team *t, float *all,
                              const size_t *first, size_t most)
{
    size_t room = c->buffer_bytes / sizeof(float), lo, hi;
    for (size_t at = 0; at < most; at += room) {
        size_t own = first[c->rank + 1] - first[c->rank];
        td_status s = team_outcome(c, t, t->part == 0 && is_over(c) ? TD_ERR_PEER : TD_OK);
        if (s) return s;
        if (at < own) {
            share_of(t, 0, min_size(own - at, room), &lo, &hi);
            memcpy((float *)(void *)buffer_of(c, c->rank) + lo, all + first[c->rank] + at + lo,
                   (hi - lo) * sizeof(float));
        }
        t->meet(t->ctx);
        s = t->part == 0 ? meet_as(c, PARTS, (most - at) * sizeof(float), false) : TD_OK;
        if ((s = team_outcome(c, t, s))) return s;
        for (int32_t r = 0; r < c->n_ranks; r++) {
            size_t n = first[r + 1] - first[r];
            if (r == c->rank || at >= n) continue;
            share_of(t, 0, min_size(n - at, room), &lo, &hi);
            memcpy(all + first[r] + at + lo, (const float *)(const void *)buffer_of(c, r) + lo,
                   (hi - lo) * sizeof(float));
        }
        t->meet(t->ctx);
        /* the next round has the other buffer: a rank is in the one behind that when all have read
         * this one */
        if (t->part == 0) c->n_rounds++;
    }
    return TD_OK;
}

td_status td_comm_gather_parts(struct td_comm *c, const struct td_comm_team *team, float *all,
                               const size_t *first)
{
    static const struct td_comm_team alone = {.n_parts = 1, .meet = meet_nobody};
    int32_t n_ranks = td_comm_n_ranks(c);
    size_t most = 0;
    bool is_team = team && team->n_parts > 1, talks = !is_team || team->part == 0;
    if (n_ranks == 1) return TD_OK;
    for (int32_t r = 0; r < n_ranks; r++)
        if (first[r + 1] - first[r] > most) most = first[r + 1] - first[r];
    if (c->channels) {
        td_status s = talks ? comm_channels_parts(c->channels, all, first) : TD_OK;
        return is_team ? team_outcome(c, team, s) : s;
    }
    if (is_team && first[n_ranks] >= TEAM_FLOATS) return gather_parts(c, team, all, first, most);
    td_status s = talks ? gather_parts(c, &alone, all, first, most) : TD_OK;
    return is_team ? team_outcome(c, team, s) : s;
}

void comm_place_columns(const float *from, size_t at, size_t n, size_t width, float *out,
                        size_t column, size_t stride)
{
    while (n > 0) {
        size_t in_row = at % width, m = min_size(n, width - in_row);
        memcpy(out + at / width * stride + column + in_row, from, m * sizeof(float));
        from += m;
        at += m;
        n -= m;
    }
}

td_status td_comm_gather_columns(struct td_comm *c, const float *mine, int32_t n_rows,
                                 const int32_t *first, float *out)
{
    int32_t n_ranks = td_comm_n_ranks(c), rank = td_comm_rank(c);
    size_t stride = (size_t)first[n_ranks], rows = (size_t)n_rows, most = 0;
    if (rank == 0 && mine)
        comm_place_columns(mine, 0, rows * (size_t)first[1], (size_t)first[1], out, 0, stride);
    for (int32_t r = 1; r < n_ranks; r++) {
        size_t width = (size_t)(first[r + 1] - first[r]);
        if (width * rows > most) most = width * rows;
    }
    if (n_ranks > 1 && c->channels)
        return comm_channels_columns(c->channels, mine, n_rows, first, out);
    size_t own = rank > 0 ? (size_t)(first[rank + 1] - first[rank]) * rows : 0,
           room = n_ranks > 1 ? c->buffer_bytes / sizeof(float) : 0;
    for (size_t at = 0; at < most; at += room, c->n_rounds++) {
        if (is_over(c)) return TD_ERR_PEER;
        if (at < own)
            memcpy(buffer_of(c, rank), mine + at, min_size(own - at, room) * sizeof(float));
        td_status s = meet_as(c, COLUMNS, (most - at) * sizeof(float), false);
        if (s) return s;
        for (int32_t r = 1; rank == 0 && r < n_ranks; r++) {
            size_t width = (size_t)(first[r + 1] - first[r]), n = width * rows;
            if (at < n)
                comm_place_columns((const float *)(const void *)buffer_of(c, r), at,
                                   min_size(n - at, room), width, out, (size_t)first[r], stride);
        }
    }
    return TD_OK;
}

td_status td_comm_broadcast(struct td_comm *c, void *data, size_t *bytes, bool idle)
{
    if (td_comm_n_ranks(c) == 1) return TD_OK;
    if (c->channels) return comm_channels_broadcast(c->channels, data, bytes, idle);
    size_t total = *bytes, at = 0;
    do {
        if (is_over(c)) return TD_ERR_PEER;
        if (c->rank == 0)
            memcpy(buffer_of(c, 0), (const uint8_t *)data + at,
                   min_size(total - at, c->buffer_bytes));
        td_status s = meet_as(c, BROADCAST, total, idle && at == 0 && c->rank > 0);
        if (s) return s;
        if (at == 0 && c->rank > 0) {
            total = (size_t)c->shared->members[0].says[c->n_rounds & 1].bytes;
            if (total > *bytes) {
                char why[TD_COMM_REASON_MAX];
                snprintf(why, sizeof why, "rank %d has room for %zu bytes, rank 0 tells %zu",
                         c->rank, *bytes, total);
                td_comm_abort(c, why);
                return TD_ERR_INTERNAL;
            }
        }
        size_t m = min_size(total - at, c->buffer_bytes);
        if (c->rank > 0) memcpy((uint8_t *)data + at, buffer_of(c, 0), m);
        at += m;
        c->n_rounds++;
    } while (at < total);
    *bytes = total;
    return TD_OK;
}

td_status td_comm_barrier(struct td_comm *c)
{
    if (td_comm_n_ranks(c) == 1) return TD_OK;
    if (c->channels) return comm_channels_barrier(c->channels);
    td_status s = meet_as(c, BARRIER, 0, false);
    c->n_rounds++;
    return s;
}

td_status td_comm_collect(struct td_comm *c, const void *mine, const size_t *bytes,
                          uint8_t *const *at)
{
    return c->channels ? comm_channels_collect(c->channels, mine, bytes, at) : TD_ERR_UNSUPPORTED;
}

td_status td_comm_deal(struct td_comm *c, const uint8_t *const *at, const size_t *bytes, void *mine)
{
    return c->channels ? comm_channels_deal(c->channels, at, bytes, mine) : TD_ERR_UNSUPPORTED;
}

/* ---- descriptors ----------------------------------------------------------------------------- */

static td_status send_fd(struct td_comm *c, int32_t rank, int fd)
{
    char byte = 1;
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } room = {{0}};
    struct iovec iov = {&byte, 1};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = room.bytes,
                       .msg_controllen = sizeof room.bytes};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(h), &fd, sizeof fd);
    ssize_t n;
    do n = sendmsg(c->segment->sockets[rank][0], &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n == 1) return TD_OK;
    char why[TD_COMM_REASON_MAX];
    snprintf(why, sizeof why, "rank 0 cannot pass a descriptor to rank %d: %s", rank,
             strerror(errno));
    td_comm_abort(c, why);
    return TD_ERR_PEER;
}

static td_status receive_fd(struct td_comm *c, int *ret_fd)
{
    char byte;
    union {
        char bytes[CMSG_SPACE(sizeof(int))];
        struct cmsghdr align;
    } room;
    struct iovec iov = {&byte, 1};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = room.bytes,
                       .msg_controllen = sizeof room.bytes};
    ssize_t n;
    /* it was sent before the barrier */
    do n = recvmsg(c->segment->sockets[c->rank][1], &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    struct cmsghdr *h = n == 1 ? CMSG_FIRSTHDR(&m) : NULL;
    if (h && h->cmsg_type == SCM_RIGHTS && h->cmsg_len == CMSG_LEN(sizeof(int))) {
        memcpy(ret_fd, CMSG_DATA(h), sizeof(int));
        return TD_OK;
    }
    char why[TD_COMM_REASON_MAX];
    snprintf(why, sizeof why, "rank %d got no descriptor: %s", c->rank,
             n < 0 ? strerror(errno) : "the message has none");
    td_comm_abort(c, why);
    return TD_ERR_PEER;
}

td_status td_comm_share_fd(struct td_comm *c, int fd, int *ret_fd)
{
    td_status s = TD_OK;
    if (td_comm_n_ranks(c) == 1) return TD_OK;
    if (c->channels) return TD_ERR_UNSUPPORTED;
    for (int32_t r = 1; r < c->n_ranks && c->rank == 0 && !s; r++) s = send_fd(c, r, fd);
    if (!s) s = td_comm_barrier(c);
    if (!s && c->rank > 0) s = receive_fd(c, ret_fd);
    return s;
}
