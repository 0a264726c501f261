/* base_thread_pool_test.c - runs, barriers, sleeping and spinning members; meant to run under
 * TSan too. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <sched.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/thread_pool.h"

enum { MAX_PARTS = 8 };

/* Plain, unsynchronised memory: what makes it safe is the pool, and TSan would say if it were
 * not. */
struct work {
    struct td_thread_pool *pool;
    uint64_t calls[MAX_PARTS], seen_parts[MAX_PARTS], shared, values[2][MAX_PARTS];
    int n_barriers, n_wrong;
    int wrong[MAX_PARTS];
};

static void count_call(void *ctx, int part, int n_parts)
{
    struct work *w = ctx;
    w->calls[part]++;
    w->seen_parts[part] = (uint64_t)n_parts;
}

/* In each step every member publishes a number, and after the barrier checks the numbers of all
 * others. Two rows in turn, so that one barrier per step is enough. */
static void meet(void *ctx, int part, int n_parts)
{
    struct work *w = ctx;
    for (int step = 0; step < w->n_barriers; step++) {
        uint64_t *row = w->values[step & 1];
        row[part] = (uint64_t)step * 100 + (uint64_t)part;
        td_thread_pool_barrier(w->pool);
        for (int i = 0; i < n_parts; i++)
            w->wrong[part] += row[i] != (uint64_t)step * 100 + (uint64_t)i;
    }
}

struct shape {
    int n_threads;
    unsigned spin_us;
};
static const struct shape shapes[] = {{1, 50}, {2, 0}, {2, 50}, {2, 2000},
                                      {3, 50}, {4, 0}, {8, 50}};

static void every_part_runs_once_per_run(void **state)
{
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        struct work w = {0};
        struct td_err err;
        assert_int_equal(
            td_thread_pool_create(shapes[s].n_threads, NULL, shapes[s].spin_us, &w.pool, &err),
            TD_OK);
        assert_int_equal(td_thread_pool_size(w.pool), shapes[s].n_threads);
        enum { N_RUNS = 500 };
        for (uint64_t run = 1; run <= N_RUNS; run++) {
            td_thread_pool_run(w.pool, count_call, &w);
            for (int i = 0; i < MAX_PARTS; i++) {
                assert_int_equal(w.calls[i], i < shapes[s].n_threads ? run : 0);
                assert_int_equal(w.seen_parts[i],
                                 i < shapes[s].n_threads ? shapes[s].n_threads : 0);
            }
        }
        td_thread_pool_destroy(w.pool);
    }
}

static void barriers_separate_steps(void **state)
{
    (void)state;
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        struct work w = {.n_barriers = 300};
        struct td_err err;
        assert_int_equal(
            td_thread_pool_create(shapes[s].n_threads, NULL, shapes[s].spin_us, &w.pool, &err),
            TD_OK);
        for (int run = 0; run < 5; run++) {
            td_thread_pool_run(w.pool, meet, &w);
            for (int i = 0; i < MAX_PARTS; i++) assert_int_equal(w.wrong[i], 0);
        }
        td_thread_pool_destroy(w.pool);
    }
}

static void sleeping_members_wake(void **state)
{
    (void)state;
    struct work w = {0};
    struct td_err err;
    assert_int_equal(td_thread_pool_create(2, NULL, 1, &w.pool, &err), TD_OK);
    for (uint64_t run = 1; run <= 20; run++) {
        /* long after the member's spin has ended */
        uint64_t end_ns = td_now_ns() + 2 * TD_NS_PER_MS;
        while (td_now_ns() < end_ns) sched_yield();
        td_thread_pool_run(w.pool, count_call, &w);
        assert_int_equal(w.calls[1], run);
    }
    td_thread_pool_destroy(w.pool);
}

static void create_and_destroy_without_a_run(void **state)
{
    (void)state;
    td_thread_pool_destroy(NULL);
    for (int i = 0; i < 20; i++) {
        struct td_thread_pool *pool;
        struct td_err err;
        assert_int_equal(td_thread_pool_create(1 + i % 4, NULL, 0, &pool, &err), TD_OK);
        td_thread_pool_destroy(pool);
    }
}

static void where_am_i(void *ctx, int part, int n_parts)
{
    (void)n_parts;
    ((int *)ctx)[part] = sched_getcpu();
}

static void members_are_pinned(void **state)
{
    (void)state;
    cpu_set_t before;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    int usable[2], n = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE && n < 2; cpu++) {
        if (CPU_ISSET(cpu, &before)) usable[n++] = cpu;
    }
    if (n < 2) usable[1] = usable[0];
    struct td_thread_pool *pool = NULL;
    struct td_err err;
    int seen[2] = {-1, -1};
    assert_int_equal(td_thread_pool_create(2, usable, 50, &pool, &err), TD_OK);
    for (int i = 0; i < 10; i++) {
        td_thread_pool_run(pool, where_am_i, seen);
        assert_int_equal(seen[0], usable[0]);
        assert_int_equal(seen[1], usable[1]);
    }
    td_thread_pool_destroy(pool);
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);

    int missing[2] = {usable[0], CPU_SETSIZE};
    pool = NULL;
    assert_int_equal(td_thread_pool_create(2, missing, 50, &pool, &err), TD_ERR_INVALID);
    assert_null(pool);
    assert_non_null(strstr(err.msg, "1024"));
    cpu_set_t after; /* the caller was not pinned by the failed try */
    assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
    assert_true(CPU_EQUAL(&before, &after));
}

static void sizes_are_bounded(void **state)
{
    (void)state;
    struct td_thread_pool *pool = NULL;
    struct td_err err;
    assert_int_equal(td_thread_pool_create(0, NULL, 0, &pool, &err), TD_ERR_INVALID);
    assert_int_equal(td_thread_pool_create(-1, NULL, 0, &pool, &err), TD_ERR_INVALID);
    assert_int_equal(td_thread_pool_create(1025, NULL, 0, &pool, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "1025"));
    assert_null(pool);
}

static void cpu_lists(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int n, cpus[6];
    } good[] = {{"0", 1, {0}},   {"0-3,8", 5, {0, 1, 2, 3, 8}},  {"5,2", 2, {5, 2}},
                {"7-7", 1, {7}}, {"0-5", 6, {0, 1, 2, 3, 4, 5}}, {"1023", 1, {1023}}};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        int cpus[6], n = -1;
        assert_int_equal(td_parse_cpu_list(good[i].text, cpus, 6, &n, NULL), TD_OK);
        assert_int_equal(n, good[i].n);
        assert_memory_equal(cpus, good[i].cpus, (size_t)n * sizeof *cpus);
    }
    static const struct {
        const char *text;
        td_status status;
    } bad[] = {{"", TD_ERR_INVALID},
               {",", TD_ERR_INVALID},
               {"0,", TD_ERR_INVALID},
               {"-3", TD_ERR_INVALID},
               {"3-", TD_ERR_INVALID},
               {"3-1", TD_ERR_INVALID},
               {"1024", TD_ERR_INVALID},
               {"0 1", TD_ERR_INVALID},
               {"a", TD_ERR_INVALID},
               {"0-6", TD_ERR_LIMIT},
               {"0-2000000000", TD_ERR_INVALID},
               {"99999999999999999999", TD_ERR_INVALID},
               {"1-2-3", TD_ERR_INVALID}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int cpus[6], n = -1;
        struct td_err err;
        if (td_parse_cpu_list(bad[i].text, cpus, 6, &n, &err) != bad[i].status)
            fail_msg("'%s' gave %s", bad[i].text, err.msg);
        assert_int_equal(n, -1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_part_runs_once_per_run),
        cmocka_unit_test(barriers_separate_steps),
        cmocka_unit_test(sleeping_members_wake),
        cmocka_unit_test(create_and_destroy_without_a_run),
        cmocka_unit_test(members_are_pinned),
        cmocka_unit_test(sizes_are_bounded),
        cmocka_unit_test(cpu_lists),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
