/* base_pool_test.c - objects go out once, come back once, and misuse aborts. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "common/base/pool.h"
#include "tests/unit/capture.h"

static struct td_pool *make_pool(size_t object_bytes, uint32_t n)
{
    struct td_pool *pool;
    assert_int_equal(td_pool_create(object_bytes, n, &pool, NULL), TD_OK);
    return pool;
}

static void objects_are_distinct_zeroed_and_indexed(void **state)
{
    (void)state;
    enum { N = 7, BYTES = 100 };
    struct td_pool *pool = make_pool(BYTES, N);
    for (int round = 0; round < 3; round++) {
        unsigned char *objects[N];
        int seen[N] = {0};
        for (int i = 0; i < N; i++) {
            objects[i] = td_pool_get(pool);
            assert_non_null(objects[i]);
            assert_int_equal((uintptr_t)objects[i] % 64, 0);
            for (int k = 0; k < BYTES; k++) assert_int_equal(objects[i][k], 0);
            memset(objects[i], 0xa5, BYTES);
            uint32_t index = td_pool_index(pool, objects[i]);
            assert_in_range(index, 0, N - 1);
            assert_int_equal(seen[index]++, 0);
            assert_int_equal(td_pool_n_used(pool), i + 1);
        }
        assert_null(td_pool_get(pool));
        for (int i = 0; i < N; i++) { /* nobody wrote into a neighbour */
            for (int k = 0; k < BYTES; k++) assert_int_equal(objects[i][k], 0xa5);
        }
        for (int i = 0; i < N; i++) td_pool_put(pool, objects[(i * 3 + round) % N]);
        assert_int_equal(td_pool_n_used(pool), 0);
    }
    td_pool_destroy(pool);
    td_pool_destroy(NULL);
}

static void shapes_are_checked(void **state)
{
    (void)state;
    struct td_pool *pool = NULL;
    struct td_err err;
    assert_int_equal(td_pool_create(0, 1, &pool, &err), TD_ERR_INVALID);
    assert_int_equal(td_pool_create(1, 0, &pool, &err), TD_ERR_INVALID);
    assert_int_equal(td_pool_create(SIZE_MAX / 2, 2, &pool, &err), TD_ERR_LIMIT);
    assert_int_equal(td_pool_create(SIZE_MAX, 1, &pool, &err), TD_ERR_LIMIT);
    assert_int_equal(td_pool_create(SIZE_MAX / 4, UINT32_MAX, &pool, &err), TD_ERR_LIMIT);
    assert_null(pool);
}

static void put_twice(void *arg)
{
    struct td_pool *pool = arg;
    void *object = td_pool_get(pool);
    td_pool_put(pool, object);
    td_pool_put(pool, object);
}

static void put_inside(void *arg) { td_pool_put(arg, (char *)td_pool_get(arg) + 8); }

static void put_foreign(void *arg)
{
    long mine = 0;
    td_pool_put(arg, &mine);
}

static void put_null(void *arg) { td_pool_put(arg, NULL); }

static void destroy_while_out(void *arg)
{
    td_pool_get(arg);
    td_pool_destroy(arg);
}

static void misuse_aborts(void **state)
{
    (void)state;
    static void (*const wrongs[])(void *) = {put_twice, put_inside, put_foreign, put_null,
                                             destroy_while_out};
    for (size_t i = 0; i < sizeof wrongs / sizeof *wrongs; i++) {
        struct td_pool *pool = make_pool(24, 2);
        struct capture c;
        capture_run(&c, wrongs[i], pool);
        if (!capture_aborted(&c) || !strstr(c.text, "pool.c"))
            fail_msg("misuse %zu went through: %s", i, c.text);
        td_pool_destroy(pool);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(objects_are_distinct_zeroed_and_indexed),
        cmocka_unit_test(shapes_are_checked),
        cmocka_unit_test(misuse_aborts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
