/* common/engine/schedule: order, admission and preemption, from tables of counts. (Batches:
 * engine_test.c, beside the engine that runs them.) */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>

#include "common/engine/schedule.h"

static void test_order(void **state)
{
    (void)state;
    assert_true(td_schedule_before(1, 9, 2, 1));
    assert_false(td_schedule_before(2, 1, 1, 9));
    assert_true(td_schedule_before(5, 1, 5, 2)); /* the same key: the older request */
    assert_false(td_schedule_before(5, 2, 5, 1));
    assert_false(td_schedule_before(5, 2, 5, 2));
}

static void test_blocks(void **state)
{
    (void)state;
    assert_int_equal(td_schedule_blocks(1, 16), 1);
    assert_int_equal(td_schedule_blocks(16, 16), 1);
    assert_int_equal(td_schedule_blocks(17, 16), 2);
    assert_int_equal(td_schedule_max_hit(16, 16), 0); /* the last token is computed */
    assert_int_equal(td_schedule_max_hit(17, 16), 1);
}

static void test_admit(void **state)
{
    (void)state;
    static const struct {
        struct td_schedule_room room;
        int32_t need, hit, headroom;
        td_status want;
    } cases[] = {
        {{10, 0, 10}, 10, 0, 0, TD_OK},         {{10, 0, 10}, 11, 0, 0, TD_ERR_LIMIT},
        {{10, 0, 10}, 11, 11, 0, TD_ERR_LIMIT}, /* what can never be held is refused though all
                                                   of it is cached now */
        {{10, 0, 10}, 10, 0, 3, TD_OK},         /* alone: no headroom */
        {{10, 4, 6}, 6, 0, 0, TD_OK},           {{10, 4, 6}, 7, 0, 0, TD_ERR_AGAIN},
        {{10, 4, 6}, 6, 0, 1, TD_ERR_AGAIN}, /* others run: one block is theirs */
        {{10, 4, 4}, 6, 2, 0, TD_OK},        /* hits need no block, and are no longer
                                                available to anybody */
        {{10, 4, 3}, 6, 2, 0, TD_ERR_AGAIN},    {{10, 4, 5}, 6, 2, 1, TD_OK},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        td_status got =
            td_schedule_admit(&cases[i].room, cases[i].need, cases[i].hit, cases[i].headroom);
        if (got != cases[i].want) printf("case %zu: got %d\n", i, got);
        assert_int_equal(got, cases[i].want);
    }
}

/* A pool of counts: held[i] blocks of want[i], n_free in the pool; decode[i] says whether i
 * grows. */
struct pool {
    int32_t held[8], want[8], n_free, n_preempted, preempted[8];
    bool decode[8];
};

static bool lacks(void *ctx, int32_t i)
{
    struct pool *p = ctx;
    return p->decode[i] && p->held[i] < p->want[i];
}

static bool grow(void *ctx, int32_t i)
{
    struct pool *p = ctx;
    if (p->n_free == 0) return false;
    p->n_free--;
    p->held[i]++;
    return true;
}

static void preempt(void *ctx, int32_t i)
{
    struct pool *p = ctx;
    p->n_free += p->held[i];
    p->held[i] = 0;
    p->preempted[p->n_preempted++] = i;
}

static const struct td_schedule_ops pool_ops = {lacks, grow, preempt};

static void test_grow(void **state)
{
    (void)state;
    static const struct {
        struct pool p;
        int32_t n, want_left, want_free;
        int32_t want_held[8];
    } cases[] = {
        {{.held = {2, 2}, .want = {2, 2}, .decode = {1, 1}}, 2, 2, 0, {2, 2}}, /* nobody lacks */
        {{.held = {2, 2}, .want = {3, 3}, .decode = {1, 1}, .n_free = 2}, 2, 2, 0, {3, 3}},
        /* the last makes room for both */
        {{.held = {2, 2, 5}, .want = {3, 3, 6}, .decode = {1, 1, 1}}, 3, 2, 3, {3, 3, 0}},
        /* the middle one is the next to go: its own turn */
        {{.held = {2, 1, 1}, .want = {3, 2, 2}, .decode = {1, 1, 1}}, 3, 1, 1, {3, 0, 0}},
        /* a prefill at the back goes as well */
        {{.held = {2, 2, 4}, .want = {3, 2, 9}, .decode = {1, 1, 0}}, 3, 2, 3, {3, 2, 0}},
        /* alone and too big: it waits */
        {{.held = {3}, .want = {4}, .decode = {1}}, 1, 0, 3, {0}},
        /* prefills hold all they need */
        {{.held = {3, 4}, .want = {9, 9}, .decode = {0, 0}}, 2, 2, 0, {3, 4}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct pool p = cases[i].p;
        int32_t left = td_schedule_grow(&pool_ops, &p, cases[i].n);
        if (left != cases[i].want_left || p.n_free != cases[i].want_free)
            printf("case %zu: left %d free %d\n", i, left, p.n_free);
        assert_int_equal(left, cases[i].want_left);
        assert_int_equal(p.n_free, cases[i].want_free);
        assert_int_equal(p.n_preempted, cases[i].n - left);
        /* from the back */
        for (int32_t k = 0; k < p.n_preempted; k++)
            assert_int_equal(p.preempted[k], cases[i].n - 1 - k);
        for (int32_t k = 0; k < cases[i].n; k++) assert_int_equal(p.held[k], cases[i].want_held[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_order), cmocka_unit_test(test_blocks),
                                       cmocka_unit_test(test_admit), cmocka_unit_test(test_grow)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
