/* base_hash_test.c - published vectors of CRC32C, both of its versions against each other, and
 * the keyed hashes. Includes hash.c to reach the version that this CPU does not choose. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/hash.c"

static void crc32c_matches_published_vectors(void **state)
{
    (void)state;
    unsigned char zeros[32] = {0}, ones[32], up[32], down[32]; /* RFC 3720, B.4 */
    memset(ones, 0xff, sizeof ones);
    for (int i = 0; i < 32; i++) up[i] = (unsigned char)i, down[i] = (unsigned char)(31 - i);
    assert_int_equal(td_crc32c(0, zeros, 32), 0x8a9136aa);
    assert_int_equal(td_crc32c(0, ones, 32), 0x62a8ab43);
    assert_int_equal(td_crc32c(0, up, 32), 0x46dd794e);
    assert_int_equal(td_crc32c(0, down, 32), 0x113fdb5c);
    assert_int_equal(td_crc32c(0, "123456789", 9), 0xe3069283);
    assert_int_equal(td_crc32c(0, NULL, 0), 0);
    assert_int_equal(td_crc32c(td_crc32c(0, "12345", 5), "6789", 4), 0xe3069283); /* in pieces */
}

static uint32_t crc32c_by_bits(uint32_t crc, const uint8_t *p, size_t n)
{
    for (; n > 0; p++, n--) {
        crc ^= *p;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    }
    return crc;
}

static void every_version_is_the_same_function(void **state)
{
    (void)state;
    uint8_t data[300];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)(i * 167 + i / 7);
    td_crc32c(0, data, 1); /* fills the tables */
    for (size_t at = 0; at < 9; at++) {
        for (size_t n = 0; n + at <= sizeof data; n++) {
            uint32_t expected = crc32c_by_bits(0x12345678, data + at, n);
            assert_int_equal(crc32c_table(0x12345678, data + at, n), expected);
            assert_int_equal(g_crc32c(0x12345678, data + at, n), expected);
        }
    }
}

static void hashes_are_keyed_and_depend_on_every_byte(void **state)
{
    (void)state;
    /* XXH3-128 of the empty input with seed 0, as the xxHash project publishes it. */
    struct td_hash128 empty = td_hash128("", 0, 0);
    assert_true(empty.lo == 0x6001c324468d497full && empty.hi == 0x99aa06d3014798d8ull);
    assert_true(td_hash64("", 0, 0) == 0x2d06800538d394c2ull);
    uint8_t data[256] = {0};
    struct td_hash128 base = td_hash128(data, sizeof data, 1);
    struct td_hash128 other_seed = td_hash128(data, sizeof data, 2);
    assert_true(base.lo != other_seed.lo && base.hi != other_seed.hi);
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = 1;
        struct td_hash128 h = td_hash128(data, sizeof data, 1);
        assert_true(h.lo != base.lo && h.hi != base.hi);
        data[i] = 0;
    }
}

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
        cmocka_unit_test(crc32c_matches_published_vectors),
        cmocka_unit_test(every_version_is_the_same_function),
        cmocka_unit_test(hashes_are_keyed_and_depend_on_every_byte),
        cmocka_unit_test(random_numbers_differ),
        cmocka_unit_test(no_number_is_given_to_two_threads),
        cmocka_unit_test(no_number_is_given_to_two_processes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
