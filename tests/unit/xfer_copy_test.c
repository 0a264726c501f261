/* xfer_copy_test.c - every version of the copy against memcpy: lengths around each edge, every
 * alignment of a line, nothing written outside. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <sys/mman.h>
#include <unistd.h>

#include "common/base/random.h"
#include "common/transfer/copy.h"

#define ROOM (1u << 17)

static uint8_t from[ROOM], to[ROOM], wanted[ROOM];

static void check(td_xfer_copy_fn copy, size_t to_at, size_t from_at, size_t n)
{
    memset(to, 0xa5, sizeof to);
    memset(wanted, 0xa5, sizeof wanted);
    memcpy(wanted + to_at, from + from_at, n);
    copy(to + to_at, from + from_at, n);
    for (size_t i = 0; i < ROOM; i++)
        if (to[i] != wanted[i])
            fail_msg("%zu bytes from +%zu to +%zu: byte %zd is %02x, wanted %02x", n, from_at,
                     to_at, (ssize_t)(i - to_at), to[i], wanted[i]);
}

static void every_version_copies_what_memcpy_does(void **state)
{
    (void)state;
    uint64_t r = 1;
    for (size_t i = 0; i < ROOM; i++) from[i] = (uint8_t)((td_random_step(&r)) >> 56);
    static const size_t lengths[] = {0,
                                     1,
                                     63,
                                     64,
                                     4095,
                                     TD_XFER_COPY_STREAM_MIN - 1,
                                     TD_XFER_COPY_STREAM_MIN,
                                     TD_XFER_COPY_STREAM_MIN + 1,
                                     TD_XFER_COPY_STREAM_MIN + 127,
                                     TD_XFER_COPY_STREAM_MIN + 128,
                                     65536,
                                     65536 + 191,
                                     100001};
    size_t n_versions = 0;
    for (td_xfer_copy_fn copy; (copy = td_xfer_copy_version(n_versions)); n_versions++) {
        for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; k++)
            for (size_t at = 0; at<64; at += lengths[k]> 1 && at > 1 ? 7 : 1) {
                check(copy, 64 + at, 64, lengths[k]);
                check(copy, 64, 64 + at, lengths[k]);
                check(copy, 64 + at, 64 + 63 - at, lengths[k]);
            }
    }
    assert_in_range(n_versions, 1, 8);
    print_message("%zu versions\n", n_versions);
}

/* Source and destination end at pages that are not there. */
static void no_version_touches_what_lies_behind(void **state)
{
    (void)state;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), n = 16 * page;
    uint8_t *map =
        mmap(NULL, 2 * (n + page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(map, MAP_FAILED);
    assert_int_equal(mprotect(map + n, page, PROT_NONE), 0);
    assert_int_equal(mprotect(map + n + page + n, page, PROT_NONE), 0);
    uint8_t *source = map, *target = map + n + page;
    memset(source, 7, n);
    for (size_t i = 0; td_xfer_copy_version(i); i++) {
        memset(target, 0, n);
        td_xfer_copy_version(i)(target, source, n);
        assert_memory_equal(target, source, n);
        td_xfer_copy_version(i)(target + 5, source + 5, n - 5);
        assert_memory_equal(target, source, n);
    }
    munmap(map, 2 * (n + page));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_version_copies_what_memcpy_does),
        cmocka_unit_test(no_version_touches_what_lies_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
