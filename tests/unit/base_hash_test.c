/* base_hash_test.c - published vectors of CRC32C, both of its versions against each other, and
 * the keyed hashes. Includes hash.c to reach the version that this CPU does not choose. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(crc32c_matches_published_vectors),
        cmocka_unit_test(every_version_is_the_same_function),
        cmocka_unit_test(hashes_are_keyed_and_depend_on_every_byte),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
