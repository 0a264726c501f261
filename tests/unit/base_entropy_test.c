/* base_entropy_test.c - numbers that nobody can guess: one thread of one process has each. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/entropy.h"

static void random_numbers_differ(void **state)
{
    (void)state;
    assert_true(td_random_u64() != td_random_u64());
    uint64_t many[64] = {0}, more[64];
    td_random_fill(many, sizeof many); /* more than one getrandom gives without a doubt */
    td_random_fill(more, sizeof more);
    for (size_t i = 0; i < 64; i++) assert_true(many[i] != 0 && many[i] != more[i]);
}

enum { N_THREADS = 4, N_EACH = 100000 };

static void *take_numbers(void *to)
{
    for (int i = 0; i < N_EACH; i++) ((uint64_t *)to)[i] = td_random_u64();
    return NULL;
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void assert_all_differ(uint64_t *numbers, size_t n)
{
    qsort(numbers, n, sizeof *numbers, by_value);
    assert_true(numbers[0] != 0);
    for (size_t i = 1; i < n; i++) assert_true(numbers[i] != numbers[i - 1]);
}

/* 64 bits each: two equal ones would be an accident of 1 in 10^8. */
static void no_number_is_given_to_two_threads(void **state)
{
    (void)state;
    static uint64_t numbers[N_THREADS][N_EACH];
    pthread_t threads[N_THREADS];
    for (int i = 0; i < N_THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, take_numbers, numbers[i]), 0);
    for (int i = 0; i < N_THREADS; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_all_differ(numbers[0], N_THREADS * N_EACH);
}

/* What the parent had ready is not a child's, at any number of those. */
static void no_number_is_given_to_two_processes(void **state)
{
    (void)state;
    for (int round = 0; round < 40; round++) {
        uint64_t numbers[129] = {td_random_u64()};
        int ends[2], status;
        assert_int_equal(pipe(ends), 0);
        pid_t child = fork();
        assert_true(child >= 0);
        if (!child) {
            uint64_t mine[64];
            for (int i = 0; i < 64; i++) mine[i] = td_random_u64();
            _exit(write(ends[1], mine, sizeof mine) != (ssize_t)sizeof mine);
        }
        for (int i = 1; i < 65; i++) numbers[i] = td_random_u64();
        assert_int_equal(waitpid(child, &status, 0), child);
        assert_int_equal(status, 0);
        assert_int_equal(read(ends[0], numbers + 65, 64 * sizeof *numbers), 64 * sizeof *numbers);
        close(ends[0]);
        close(ends[1]);
        assert_all_differ(numbers, 129);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_numbers_differ),
        cmocka_unit_test(no_number_is_given_to_two_threads),
        cmocka_unit_test(no_number_is_given_to_two_processes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
