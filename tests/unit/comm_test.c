/* common/model/comm: sums in the order of ranks bit for bit, every call against plain loops, and
 * no wait that outlives a rank: killed anywhere, stopped, never started, or in another call.
 * Ranks are threads where the bytes are tested (so that TSan sees them) and processes where
 * deaths are. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/random.h"
#include "common/model/comm.h"
#include "common/base/thread_pool.h"

static uint64_t mix(uint64_t z) { return td_keyed_step(&z); }

/* Of very different sizes, so that another order of the sum gives other bits. */
static float value(uint64_t seed, int32_t rank, size_t i)
{
    uint64_t z = mix(seed * 1000003 + (uint64_t)rank * 7919 + i * 31);
    float v = (float)(int32_t)(z >> 32) * 0x1p-31f;
    return v * (float)(1 << (z & 15));
}

/* ---- bytes: ranks are threads ---------------------------------------------------------------- */

struct team {
    struct td_comm_segment segment;
    int sockets[TD_COMM_MAX_RANKS][2]; /* on channels: rank 0's end, rank r's */
    bool on_channels;
    int32_t n_ranks, n_calls;
    size_t max_floats;
    _Atomic int n_wrong;
};

struct thread_rank {
    struct team *team;
    int32_t rank;
};

enum { MAX_FLOATS = 3000, X_BYTES = MAX_FLOATS * 4 };

static int gather_parts(const struct team *t, struct td_comm *c, int32_t rank, uint64_t seed,
                        float *all)
{
    size_t first[TD_COMM_MAX_RANKS + 1] = {0}, room = t->max_floats + 1;
    for (int32_t r = 0; r < t->n_ranks; r++) { /* nothing, too */
        uint64_t z = mix(seed + (uint64_t)r + 1);
        first[r + 1] = first[r] + (z & 3 ? (z >> 8) % room : 0);
    }
    memset(all, 0xff, first[t->n_ranks] * sizeof(float));
    for (size_t i = first[rank]; i < first[rank + 1]; i++) all[i] = value(seed, rank, i);
    int wrong = td_comm_gather_parts(c, NULL, all, first) != TD_OK;
    for (int32_t r = 0; r < t->n_ranks; r++)
        for (size_t i = first[r]; i < first[r + 1]; i++) wrong += all[i] != value(seed, r, i);
    return wrong;
}

static void one_call(struct team *t, struct td_comm *c, int32_t rank, uint64_t seed, float *x,
                     float *all)
{
    uint64_t z = mix(seed);
    size_t n = 1 + (z >> 8) % t->max_floats;
    int wrong = 0;
    switch (z & 3) {
    case 0:
        for (size_t i = 0; i < n; i++) x[i] = value(seed, rank, i);
        wrong += td_comm_all_reduce_sum(c, NULL, x, n) != TD_OK;
        for (size_t i = 0; i < n; i++) {
            float sum = value(seed, 0, i);
            for (int32_t r = 1; r < t->n_ranks; r++) sum += value(seed, r, i);
            wrong += memcmp(&sum, &x[i], sizeof sum) != 0;
        }
        break;
    case 1:
        wrong += gather_parts(t, c, rank, seed, all);
        break;
    case 2:
        for (size_t i = 0; i < n; i++) x[i] = value(seed, rank, i);
        wrong += td_comm_all_gather(c, x, n * sizeof(float), all) != TD_OK;
        for (int32_t r = 0; r < t->n_ranks; r++)
            for (size_t i = 0; i < n; i++) wrong += all[(size_t)r * n + i] != value(seed, r, i);
        break;
    case 3: {
        int32_t first[TD_COMM_MAX_RANKS + 1] = {0}, n_rows = 1 + (int32_t)(z >> 40) % 5;
        /* none, too */
        for (int32_t r = 0; r < t->n_ranks; r++)
            first[r + 1] = first[r] + (int32_t)(mix(seed + (uint64_t)r + 1) % 70);
        int32_t width = first[rank + 1] - first[rank], total = first[t->n_ranks];
        for (int32_t i = 0; i < n_rows * width; i++) x[i] = value(seed, rank, (size_t)i);
        memset(all, 0xff, (size_t)(n_rows * total) * sizeof(float));
        bool in_place = rank == 0 && (z & 16);
        for (int32_t i = 0; in_place && i < n_rows * width; i++)
            all[i / (width ? width : 1) * total + i % (width ? width : 1)] = x[i];
        wrong += td_comm_gather_columns(c, in_place ? NULL : x, n_rows, first,
                                        rank == 0 ? all : NULL) != TD_OK;
        for (int32_t r = 0; rank == 0 && r < t->n_ranks; r++)
            for (int32_t i = 0; i < n_rows * (first[r + 1] - first[r]); i++) {
                int32_t w = first[r + 1] - first[r];
                wrong += all[i / w * total + first[r] + i % w] != value(seed, r, (size_t)i);
            }
        break;
    }
    }
    size_t bytes = rank == 0 ? (z >> 20) % X_BYTES : X_BYTES;
    uint8_t *b = (uint8_t *)x;
    for (size_t i = 0; rank == 0 && i < bytes; i++) b[i] = (uint8_t)mix(seed + i);
    wrong += td_comm_broadcast(c, x, &bytes, z & 32) != TD_OK;
    wrong += bytes != (z >> 20) % X_BYTES;
    for (size_t i = 0; i < bytes; i++) wrong += b[i] != (uint8_t)mix(seed + i);
    t->n_wrong += wrong;
}

/* The communicator has both ends' descriptors from here on. */
static struct td_comm_channel channel_of(int fd, const char *name)
{
    struct td_comm_channel c = {.fd = fd};
    snprintf(c.name, sizeof c.name, "%s", name);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return c;
}

static td_status open_rank(struct team *t, int32_t rank, const struct td_comm_config *cfg,
                           struct td_comm **ret_comm)
{
    struct td_comm_channel channels[TD_COMM_MAX_RANKS];
    if (!t->on_channels) return td_comm_open(&t->segment, rank, cfg, ret_comm, NULL);
    channels[0] = channel_of(t->sockets[rank][1], "the leader");
    for (int32_t r = 1; r < t->n_ranks && rank == 0; r++)
        channels[r] = channel_of(t->sockets[r][0], "a follower");
    return td_comm_open_channels(channels, t->n_ranks, rank, cfg, ret_comm, NULL);
}

/* What rank 0 has of the others, and they of it. */
static int collect_and_deal(struct td_comm *c, int32_t rank, int32_t n_ranks)
{
    uint8_t mine[300], room[TD_COMM_MAX_RANKS][300], *at[TD_COMM_MAX_RANKS];
    size_t bytes[TD_COMM_MAX_RANKS];
    int wrong = 0;
    for (int32_t r = 0; r < n_ranks; r++) {
        at[r] = room[r];
        bytes[r] = (size_t)(r * 37 % 300); /* none, too */
    }
    for (size_t i = 0; i < bytes[rank]; i++) mine[i] = (uint8_t)mix((uint64_t)rank * 1000 + i);
    wrong += td_comm_collect(c, mine, bytes, at) != TD_OK;
    for (int32_t r = 1; rank == 0 && r < n_ranks; r++)
        for (size_t i = 0; i < bytes[r]; i++) {
            wrong += room[r][i] != (uint8_t)mix((uint64_t)r * 1000 + i);
            room[r][i] ^= 0x55;
        }
    wrong += td_comm_deal(c, (const uint8_t *const *)at, bytes, mine) != TD_OK;
    for (size_t i = 0; rank > 0 && i < bytes[rank]; i++)
        wrong += mine[i] != (uint8_t)(mix((uint64_t)rank * 1000 + i) ^ 0x55);
    return wrong;
}

/* Columns of two rounds, of which rank 1 alone has enough for the second. The border of the rounds
 * is in the middle of a row. */
static int wide_columns(struct td_comm *c, int32_t rank, int32_t n_ranks)
{
    enum { ROWS = 3, WIDE = 100001 };
    int wrong = 0;
    int32_t first[TD_COMM_MAX_RANKS + 1] = {0};
    for (int32_t r = 0; r < n_ranks; r++) first[r + 1] = first[r] + (r == 1 ? WIDE : r * 7);
    size_t total = (size_t)first[n_ranks], n = (size_t)(first[rank + 1] - first[rank]) * ROWS;
    float *mine = calloc(n + 1, sizeof *mine),
          *all = rank ? NULL : calloc(ROWS * total, sizeof *all);
    for (size_t i = 0; i < n; i++) mine[i] = value(77, rank, i);
    wrong += td_comm_gather_columns(c, mine, ROWS, first, all) != TD_OK;
    for (int32_t r = 0; rank == 0 && r < n_ranks; r++) {
        size_t w = (size_t)(first[r + 1] - first[r]);
        for (size_t i = 0; i < w * ROWS; i++)
            wrong += all[i / w * total + (size_t)first[r] + i % w] != value(77, r, i);
    }
    free(mine);
    free(all);
    return wrong;
}

static void *run_rank(void *arg)
{
    struct thread_rank *me = arg;
    struct team *t = me->team;
    struct td_comm *c = NULL;
    struct td_comm_config cfg = {.spin_us = me->rank % 2 ? 5 : 0};
    if (open_rank(t, me->rank, &cfg, &c)) {
        t->n_wrong += 1;
        return NULL;
    }
    t->n_wrong += td_comm_rank(c) != me->rank || td_comm_n_ranks(c) != t->n_ranks;
    float *x = calloc(MAX_FLOATS, sizeof(float)),
          *all = calloc((size_t)MAX_FLOATS * TD_COMM_MAX_RANKS, sizeof(float));
    for (int32_t i = 0; i < t->n_calls; i++) one_call(t, c, me->rank, (uint64_t)i + 1, x, all);
    free(x);
    free(all);
    int null = open("/dev/null", O_RDONLY), fd = -1;
    t->n_wrong += td_comm_is_remote(c) != t->on_channels;
    if (t->on_channels)
        t->n_wrong +=
            collect_and_deal(c, me->rank, t->n_ranks) + wide_columns(c, me->rank, t->n_ranks);
    t->n_wrong += td_comm_share_fd(c, null, &fd) != (t->on_channels ? TD_ERR_UNSUPPORTED : TD_OK);
    if (t->n_ranks > 1 && me->rank > 0 && !t->on_channels) {
        char byte;
        t->n_wrong += fd < 0 || read(fd, &byte, 1) != 0;
        close(fd);
    }
    t->n_wrong += td_comm_check(c) != TD_OK || td_comm_barrier(c) != TD_OK;
    close(null);
    td_comm_close(c);
    return NULL;
}

static void every_call_against_loops(void **state)
{
    (void)state;
    static const struct {
        int32_t n_ranks, n_calls;
        size_t buffer_bytes;
        bool on_channels;
    } cases[] = {{1, 50, 0, false},     {2, 1500, 0, false},   {2, 300, 192, false},
                 {3, 600, 1024, false}, {4, 600, 5120, false}, {16, 60, 4096, false},
                 {2, 600, 0, true},     {3, 400, 0, true},     {16, 40, 0, true}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct team t = {.n_ranks = cases[k].n_ranks,
                         .n_calls = cases[k].n_calls / (getenv("TANDEM_TEST_SHORT") ? 4 : 1),
                         .on_channels = cases[k].on_channels,
                         .max_floats = MAX_FLOATS};
        struct td_err err = {0};
        for (int32_t r = 1; r < t.n_ranks && t.on_channels; r++)
            assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, t.sockets[r]), 0);
        struct thread_rank ranks[TD_COMM_MAX_RANKS];
        pthread_t threads[TD_COMM_MAX_RANKS];
        if (td_comm_segment_create(t.n_ranks, cases[k].buffer_bytes, &t.segment, &err))
            fail_msg("%s", err.msg);
        for (int32_t r = 0; r < t.n_ranks; r++) {
            ranks[r] = (struct thread_rank){&t, r};
            assert_int_equal(pthread_create(&threads[r], NULL, run_rank, &ranks[r]), 0);
        }
        for (int32_t r = 0; r < t.n_ranks; r++) pthread_join(threads[r], NULL);
        assert_int_equal(t.n_wrong, 0);
        td_comm_segment_close(&t.segment);
    }
}

/* ---- a rank of several threads --------------------------------------------------------------- */

struct team_rank {
    struct td_comm_segment *segment; /* NULL: channels, of which `socket` is this end */
    int socket;
    struct td_thread_pool *pool;
    struct td_comm *comm;
    int32_t rank, n_ranks, n_threads;
    float *x;
    size_t n;
    size_t first[4]; /* of each rank's part of x */
    bool gathers;
    td_status statuses[4];
    int wrong;
};

static void meet_pool(void *pool) { td_thread_pool_barrier(pool); }

static void team_part(void *ctx, int part, int n_parts)
{
    struct team_rank *me = ctx;
    struct td_comm_team team = {
        .part = part, .n_parts = n_parts, .meet = meet_pool, .ctx = me->pool};
    me->statuses[part] = me->gathers ? td_comm_gather_parts(me->comm, &team, me->x, me->first)
                                     : td_comm_all_reduce_sum(me->comm, &team, me->x, me->n);
}

static td_status open_team_rank(struct team_rank *me, const struct td_comm_config *cfg,
                                struct td_err *err)
{
    if (me->segment) return td_comm_open(me->segment, me->rank, cfg, &me->comm, err);
    struct td_comm_channel channels[2];
    channels[me->rank == 0 ? 1 : 0] = channel_of(me->socket, "the other one");
    return td_comm_open_channels(channels, 2, me->rank, cfg, &me->comm, err);
}

enum { TEAM_FLOATS_MAX = 270000 }; /* two rounds of a sum on channels */

static void *run_team_rank(void *arg)
{
    static const size_t sizes[] = {1, 16383, 16384, 16385, 40001, 100000};
    struct team_rank *me = arg;
    struct td_comm_config cfg = {0};
    struct td_err err = {0};
    if (td_thread_pool_create(me->n_threads, NULL, 0, &me->pool, &err) ||
        open_team_rank(me, &cfg, &err)) {
        me->wrong = 1;
        return NULL;
    }
    me->x = malloc(TEAM_FLOATS_MAX * sizeof(float));
    for (uint64_t k = 0; k < 6 * 5; k++) {
        me->n = !me->segment && k == 5 ? TEAM_FLOATS_MAX : sizes[k % 6];
        for (size_t i = 0; i < me->n; i++) me->x[i] = value(k, me->rank, i);
        td_thread_pool_run(me->pool, team_part, me);
        for (int p = 0; p < me->n_threads; p++) me->wrong += me->statuses[p] != TD_OK;
        for (size_t i = 0; i < me->n; i++) {
            float sum = value(k, 0, i);
            for (int32_t r = 1; r < me->n_ranks; r++) sum += value(k, r, i);
            me->wrong += memcmp(&sum, &me->x[i], sizeof sum) != 0;
        }
        /* rank 0 has much, and in some rounds all */
        for (int32_t r = 1; r <= me->n_ranks; r++)
            me->first[r] = r == me->n_ranks ? me->n : me->n - me->n * (k % 3) / (4 * (size_t)r);
        memset(me->x, 0xff, me->n * sizeof *me->x);
        for (size_t i = me->first[me->rank]; i < me->first[me->rank + 1]; i++)
            me->x[i] = value(k, 9, i);
        me->gathers = true;
        td_thread_pool_run(me->pool, team_part, me);
        me->gathers = false;
        for (int p = 0; p < me->n_threads; p++) me->wrong += me->statuses[p] != TD_OK;
        for (size_t i = 0; i < me->n; i++) me->wrong += me->x[i] != value(k, 9, i);
    }
    /* The group ends: every thread of the team hears of it. */
    if (me->rank == 0) td_comm_abort(me->comm, "the test is over");
    td_thread_pool_run(me->pool, team_part, me);
    for (int p = 0; p < me->n_threads; p++) me->wrong += me->statuses[p] != TD_ERR_PEER;
    me->gathers = true;
    td_thread_pool_run(me->pool, team_part, me);
    for (int p = 0; p < me->n_threads; p++) me->wrong += me->statuses[p] != TD_ERR_PEER;
    free(me->x);
    td_comm_close(me->comm);
    td_thread_pool_destroy(me->pool);
    return NULL;
}

static void teams_of_threads(void **state)
{
    (void)state;
    for (int k = 0; k < 4; k++) {
        struct td_comm_segment segment;
        struct team_rank ranks[3];
        int sockets[2];
        pthread_t threads[3];
        int32_t n_ranks = k == 2 ? 3 : 2;
        /* one round, and several */
        assert_int_equal(td_comm_segment_create(n_ranks, k == 1 ? 65536 : 0, &segment, NULL),
                         TD_OK);
        if (k == 3) assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
        for (int32_t r = 0; r < n_ranks; r++) {
            ranks[r] = (struct team_rank){
                .segment = &segment, .rank = r, .n_ranks = n_ranks, .n_threads = r == 1 ? 3 : 2};
            if (k == 3) ranks[r].segment = NULL, ranks[r].socket = sockets[r];
            assert_int_equal(pthread_create(&threads[r], NULL, run_team_rank, &ranks[r]), 0);
        }
        for (int32_t r = 0; r < n_ranks; r++) pthread_join(threads[r], NULL);
        for (int32_t r = 0; r < n_ranks; r++) assert_int_equal(ranks[r].wrong, 0);
        td_comm_segment_close(&segment);
    }
}

static void refuses_by_name(void **state)
{
    (void)state;
    struct td_err err = {0};
    struct td_comm_segment s = {0};
    struct td_comm *c = NULL;
    struct td_comm_config cfg = {0};
    assert_int_equal(td_comm_segment_create(17, 0, &s, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "ranks: 17, must be 1..16");
    assert_int_equal(td_comm_segment_create(2, 100, &s, &err), TD_ERR_INVALID);
    assert_int_equal(td_comm_segment_create(2, 0, &s, &err), TD_OK);
    assert_int_equal(td_comm_open(&s, 2, &cfg, &c, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "rank is 2, must be 0..1");
    struct td_comm_segment joined = {0};
    assert_int_equal(td_comm_segment_join(s.memfd, s.sockets[1][1], 2, &joined, &err),
                     TD_ERR_CORRUPT);
    int null = open("/dev/null", O_RDONLY);
    assert_int_equal(td_comm_segment_join(null, -1, 1, &joined, &err), TD_ERR_CORRUPT);
    close(null);
    td_comm_segment_close(&s);
    td_comm_segment_close(&s);
    /* no communicator: a group of one */
    float x = 3, y = 0;
    int32_t first[2] = {0, 1};
    size_t n = 1;
    assert_int_equal(td_comm_n_ranks(NULL), 1);
    assert_int_equal(td_comm_all_reduce_sum(NULL, NULL, &x, 1), TD_OK);
    assert_int_equal(td_comm_gather_columns(NULL, &x, 1, first, &y), TD_OK);
    assert_true(x == 3 && y == 3);
    assert_int_equal(td_comm_gather_parts(NULL, NULL, &x, (const size_t[]){0, 1}), TD_OK);
    assert_true(x == 3);
    assert_int_equal(td_comm_broadcast(NULL, &x, &n, true), TD_OK);
    assert_int_equal(td_comm_check(NULL), TD_OK);
}

/* ---- deaths: ranks are processes ------------------------------------------------------------- */

enum { ENDED_BY_PEER = 7, WRONG_REASON = 8, TOO_LATE = 9, GROUP = 4 };

/* Calls for ever, until one fails. */
static int call_until_failure(struct td_comm *c, const char *reason)
{
    static float x[1000], all[1000 * GROUP];
    td_status s = TD_OK;
    while (!s) {
        s = td_comm_all_reduce_sum(c, NULL, x, 1000);
        if (!s) s = td_comm_all_gather(c, x, 1000, all);
        size_t n = td_comm_rank(c) == 0 ? 300 : sizeof x;
        if (!s) s = td_comm_broadcast(c, x, &n, true);
    }
    char buf[TD_COMM_REASON_MAX];
    if (s != TD_ERR_PEER || !strstr(td_comm_reason(c, buf), reason)) {
        fprintf(stderr, "status %d reason %s, expected %s\n", s, td_comm_reason(c, buf), reason);
        return WRONG_REASON;
    }
    return td_comm_all_reduce_sum(c, NULL, x, 1) == TD_ERR_PEER && td_comm_check(c) == TD_ERR_PEER
               ? ENDED_BY_PEER
               : WRONG_REASON;
}

/* The status of a child that must end by then; a child that does not is killed and the test
 * fails. */
static int wait_child(pid_t pid, uint64_t deadline_ns)
{
    int status = 0;
    while (waitpid(pid, &status, WNOHANG) == 0) {
        if (td_now_ns() > deadline_ns) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            return TOO_LATE << 8;
        }
        struct timespec tick = {.tv_nsec = 1000000};
        clock_nanosleep(CLOCK_MONOTONIC, 0, &tick, NULL);
    }
    return status;
}

static pid_t start_rank(struct td_comm_segment *s, int32_t rank, uint32_t timeout_ms,
                        const char *reason)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct td_comm *c = NULL;
        struct td_comm_config cfg = {.timeout_ms = timeout_ms, .spin_us = rank == 1 ? 20 : 0};
        if (td_comm_open(s, rank, &cfg, &c, NULL)) _exit(1);
        _exit(call_until_failure(c, reason));
    }
    td_comm_segment_expect(s, rank, pid);
    return pid;
}

/* Any of the ranks, 0 too, killed at moments spread over the calls; the others see it within 2 s
 * and know whom they lost. */
static void killed_rank_ends_all(void **state)
{
    (void)state;
    for (uint64_t trial = 0; trial < 40; trial++) {
        struct td_comm_segment s;
        struct td_err err = {0};
        pid_t pids[GROUP];
        if (td_comm_segment_create(GROUP, 1024, &s, &err)) fail_msg("%s", err.msg);
        int32_t victim = (int32_t)(trial % GROUP);
        char reason[32];
        snprintf(reason, sizeof reason, "rank %d (pid", victim);
        for (int32_t r = 0; r < GROUP; r++) pids[r] = start_rank(&s, r, 0, reason);
        struct timespec at = {.tv_nsec = (long)(mix(trial) % 3000000)};
        clock_nanosleep(CLOCK_MONOTONIC, 0, &at, NULL); /* not a wait for a state: which one it
                                                           hits is the point */
        kill(pids[victim], SIGKILL);
        uint64_t deadline = td_now_ns() + 2000 * TD_NS_PER_MS;
        /* The victim is reaped last: a zombie is dead, too. */
        for (int32_t r = 0; r < GROUP; r++)
            if (r != victim) {
                int status = wait_child(pids[r], deadline);
                if (!WIFEXITED(status) || WEXITSTATUS(status) != ENDED_BY_PEER)
                    fail_msg("trial %d: rank %d of a group that lost rank %d ended with %#x",
                             (int)trial, r, victim, status);
            }
        waitpid(pids[victim], NULL, 0);
        td_comm_segment_close(&s);
    }
}

static void stopped_rank_is_given_up(void **state)
{
    (void)state;
    struct td_comm_segment s;
    struct td_err err = {0};
    pid_t pids[3];
    if (td_comm_segment_create(3, 1024, &s, &err)) fail_msg("%s", err.msg);
    for (int32_t r = 0; r < 3; r++) {
        pids[r] = start_rank(&s, r, 300, "still waits for rank 2 (pid");
        if (r == 2) kill(pids[r], SIGSTOP);
    }
    uint64_t deadline = td_now_ns() + 5000 * TD_NS_PER_MS;
    for (int32_t r = 0; r < 2; r++)
        assert_int_equal(WEXITSTATUS(wait_child(pids[r], deadline)), ENDED_BY_PEER);
    kill(pids[2], SIGCONT);
    assert_int_equal(WEXITSTATUS(wait_child(pids[2], deadline)), ENDED_BY_PEER);
    td_comm_segment_close(&s);
}

static void rank_that_ends_before_it_opens(void **state)
{
    (void)state;
    struct td_comm_segment s;
    struct td_err err = {0};
    struct td_comm *c = NULL;
    struct td_comm_config cfg = {0};
    if (td_comm_segment_create(2, 0, &s, &err)) fail_msg("%s", err.msg);
    pid_t pid = fork();
    if (pid == 0) _exit(0);
    td_comm_segment_expect(&s, 1, pid);
    assert_int_equal(td_comm_open(&s, 0, &cfg, &c, &err), TD_OK);
    uint64_t start = td_now_ns();
    assert_int_equal(td_comm_barrier(c), TD_ERR_PEER);
    assert_true(td_now_ns() - start < 2000 * TD_NS_PER_MS);
    char buf[TD_COMM_REASON_MAX], want[64];
    snprintf(want, sizeof want, "rank 1 (pid %d) is dead", (int)pid);
    assert_string_equal(td_comm_reason(c, buf), want);
    td_comm_close(c);
    waitpid(pid, NULL, 0);
    td_comm_segment_close(&s);
}

/* ---- channels: what a rank may be sent ------------------------------------------------------- */

struct head {
    uint32_t magic, kind;
    uint64_t call, bytes;
};
enum { RANKS_MAGIC = 0x746b6e72, A_SUM = 1, COLUMNS = 3, AN_ABORT = 8 };

/* Rank 0 of two, whose other end is the test. */
static struct td_comm *rank_of_test(uint32_t timeout_ms, int *ret_end)
{
    int ends[2];
    struct td_comm *c = NULL;
    struct td_comm_channel channels[2];
    struct td_comm_config cfg = {.timeout_ms = timeout_ms};
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    channels[1] = channel_of(ends[0], "10.1.2.3:4");
    assert_int_equal(td_comm_open_channels(channels, 2, 0, &cfg, &c, NULL), TD_OK);
    *ret_end = ends[1];
    return c;
}

/* What a communicator needs of memory it has from when it is made: a sum and columns take none. */
static void calls_take_no_memory(void **state)
{
    (void)state;
    int end;
    enum { N = 1000 };
    float x[N] = {0}, out[2 * N], theirs[N];
    const int32_t first[] = {0, N, 2 * N};
    struct td_comm *c = rank_of_test(0, &end);
    for (int i = 0; i < N; i++) theirs[i] = (float)i;
    static const uint32_t kinds[] = {A_SUM, COLUMNS};
    for (uint64_t call = 0; call < 2; call++) {
        struct head h = {RANKS_MAGIC, kinds[call], call, sizeof theirs};
        assert_int_equal(write(end, &h, sizeof h), sizeof h);
        assert_int_equal(write(end, theirs, sizeof theirs), sizeof theirs);
    }
    struct mallinfo2 before = mallinfo2();
    assert_int_equal(td_comm_all_reduce_sum(c, NULL, x, N), TD_OK);
    assert_int_equal(td_comm_gather_columns(c, NULL, 1, first, out), TD_OK);
    struct mallinfo2 after = mallinfo2();
    assert_int_equal(after.uordblks + after.hblkhd, before.uordblks + before.hblkhd);
    assert_memory_equal(x, theirs, sizeof theirs);
    assert_memory_equal(out + N, theirs, sizeof theirs);
    td_comm_close(c);
    close(end);
}

/* Whatever comes in place of rank 1's part of a sum ends the group, with a reason that says what it
 * was, and nothing beyond the sum is written. */
static void strange_frames(void **state)
{
    (void)state;
    static const struct {
        struct head head;
        size_t n_head, n_body;
        td_status status;
        const char *reason;
    } cases[] = {
        {{0x20544547, 1, 0, 16}, 24, 0, TD_ERR_PEER, "sent 20544547 where a frame begins"},
        {{RANKS_MAGIC, A_SUM, 0, 1ull << 60}, 24, 0, TD_ERR_INTERNAL, "of 1152921504606846976 byt"},
        {{RANKS_MAGIC, A_SUM, 0, 15},
         24,
         15,
         TD_ERR_INTERNAL,
         "sum 0 of 15 bytes, rank 0 is in su"},
        {{RANKS_MAGIC, A_SUM, 1, 16}, 24, 16, TD_ERR_INTERNAL, "sent sum 1 of 16 bytes"},
        {{RANKS_MAGIC, 2, 0, 16}, 24, 16, TD_ERR_INTERNAL, "sent all_gather 0 of 16 bytes"},
        {{RANKS_MAGIC, 4711, 0, 16}, 24, 16, TD_ERR_INTERNAL, "sent unknown 0 of 16 bytes"},
        {{RANKS_MAGIC, AN_ABORT, 9, 256}, 24, 256, TD_ERR_PEER, "gave up with 256 bytes of reason"},
        {{RANKS_MAGIC, AN_ABORT, 9, 6}, 24, 6, TD_ERR_PEER, "??????"},
        {{RANKS_MAGIC, A_SUM, 0, 16}, 24, 10, TD_ERR_PEER, "is gone: its connection ended"},
        {{RANKS_MAGIC, A_SUM, 0, 16}, 23, 0, TD_ERR_PEER, "is gone: its connection ended"},
        {{0}, 0, 0, TD_ERR_PEER, "rank 1 (10.1.2.3:4) is gone: its connection ended"},
    };
    static const uint8_t body[256] = {1, 2, 3, 4, 5, 6};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        float x[5] = {1, 2, 3, 4, 5};
        char buf[TD_COMM_REASON_MAX];
        int end;
        struct td_comm *c = rank_of_test(0, &end);
        assert_int_equal(write(end, &cases[k].head, cases[k].n_head), cases[k].n_head);
        assert_int_equal(write(end, body, cases[k].n_body), cases[k].n_body);
        shutdown(end, SHUT_WR);
        assert_int_equal(td_comm_all_reduce_sum(c, NULL, x, 4), cases[k].status);
        if (!strstr(td_comm_reason(c, buf), cases[k].reason)) fail_msg("case %zu: %s", k, buf);
        assert_int_equal(td_comm_barrier(c), TD_ERR_PEER);
        assert_true(x[4] == 5);
        td_comm_close(c);
        close(end);
    }
}

/* Frames that are nearly right, cut and changed at random: none does more than end the group. */
static void random_frames(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 400; seed++) {
        uint8_t bytes[200], all[2 * 32];
        uint64_t z = mix(seed);
        size_t n = z % sizeof bytes, wide = 32;
        int end;
        struct td_comm *c = rank_of_test(0, &end);
        for (size_t i = 0; i < n; i++) bytes[i] = (uint8_t)mix(seed * 777 + i);
        struct head head = {RANKS_MAGIC, (uint32_t)((z >> 8) % 10), (z >> 12) % 2, (z >> 16) % 300};
        if (n >= sizeof head && (z >> 32) % 4) memcpy(bytes, &head, sizeof head);
        assert_int_equal(write(end, bytes, n), n);
        shutdown(end, SHUT_WR);
        td_status s = TD_OK;
        for (int k = 0; k < 9 && !s; k++) {
            s = td_comm_check(c);
            if (!s && (z >> 40) % 2) s = td_comm_barrier(c);
            if (!s) s = td_comm_all_gather(c, bytes, wide, all);
        }
        if (!s) fail_msg("seed %d: %zu bytes made nine calls", (int)seed, n);
        td_comm_close(c);
        close(end);
    }
}

/* What ends a group is told in words on the other side; silence ends at the deadline; the end of an
 * idle rank is seen without a call. */
static void ends_of_channels(void **state)
{
    (void)state;
    char buf[TD_COMM_REASON_MAX], words[64] = "";
    float x[4] = {0};
    struct head head = {0};
    int end;
    struct td_comm *c = rank_of_test(30, &end);
    assert_int_equal(td_comm_check(c), TD_OK);
    assert_int_equal(td_comm_all_reduce_sum(c, NULL, x, 4), TD_ERR_PEER);
    assert_string_equal(td_comm_reason(c, buf),
                        "after 30 ms rank 0 still waits for rank 1 (10.1.2.3:4) in sum 0");
    td_comm_close(c);
    close(end);

    c = rank_of_test(0, &end);
    td_comm_abort(c, "rank 0: no memory");
    td_comm_abort(c, "and another reason");
    assert_int_equal(read(end, &head, sizeof head), sizeof head);
    assert_true(head.magic == RANKS_MAGIC && head.kind == AN_ABORT && head.bytes == 17);
    assert_int_equal(read(end, words, sizeof words), 17);
    assert_string_equal(words, "rank 0: no memory");
    assert_int_equal(read(end, words, 1), 0);
    td_comm_close(c);
    close(end);

    c = rank_of_test(0, &end);
    assert_int_equal(td_comm_check(c), TD_OK);
    close(end);
    assert_int_equal(td_comm_check(c), TD_ERR_PEER);
    assert_non_null(strstr(td_comm_reason(c, buf), "rank 1 (10.1.2.3:4) is gone"));
    td_comm_close(c);
}

/* In one process, with threads: rank 1 gives up with words, or makes another call than rank 0. */
struct other {
    struct td_comm *c;
    bool abort;
    td_status status;
};

static void *other_rank(void *arg)
{
    struct other *o = arg;
    char all[20];
    if (o->abort) td_comm_abort(o->c, "rank 1: no memory");
    o->status = td_comm_all_gather(o->c, "123456789", 10, all);
    return NULL;
}

static void words_and_disagreement(void **state)
{
    (void)state;
    for (int abort = 0; abort < 2; abort++) {
        struct td_comm_segment s;
        struct td_comm_config cfg = {0};
        struct td_comm *c = NULL;
        struct other o = {.abort = abort};
        pthread_t thread;
        float x = 1;
        char buf[TD_COMM_REASON_MAX];
        assert_int_equal(td_comm_segment_create(2, 0, &s, NULL), TD_OK);
        assert_int_equal(td_comm_open(&s, 0, &cfg, &c, NULL), TD_OK);
        assert_int_equal(td_comm_open(&s, 1, &cfg, &o.c, NULL), TD_OK);
        assert_string_equal(td_comm_reason(c, buf), "");
        assert_int_equal(pthread_create(&thread, NULL, other_rank, &o), 0);
        td_status mine = td_comm_all_reduce_sum(c, NULL, &x, 1);
        pthread_join(thread, NULL);
        td_comm_reason(c, buf);
        if (abort) {
            assert_int_equal(mine, TD_ERR_PEER);
            assert_int_equal(o.status, TD_ERR_PEER);
            assert_string_equal(buf, "rank 1: no memory");
            td_comm_abort(c, "another"); /* the first stays */
            assert_string_equal(td_comm_reason(c, buf), "rank 1: no memory");
        } else {
            assert_true(mine == TD_ERR_INTERNAL || o.status == TD_ERR_INTERNAL);
            assert_non_null(strstr(buf, "is in call"));
        }
        td_comm_close(c);
        td_comm_close(o.c);
        td_comm_segment_close(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call_against_loops),
        cmocka_unit_test(teams_of_threads),
        cmocka_unit_test(refuses_by_name),
        cmocka_unit_test(killed_rank_ends_all),
        cmocka_unit_test(stopped_rank_is_given_up),
        cmocka_unit_test(rank_that_ends_before_it_opens),
        cmocka_unit_test(words_and_disagreement),
        cmocka_unit_test(calls_take_no_memory),
        cmocka_unit_test(strange_frames),
        cmocka_unit_test(random_frames),
        cmocka_unit_test(ends_of_channels),
    };
    return cmocka_run_group_tests_name("base_comm", tests, NULL, NULL);
}
