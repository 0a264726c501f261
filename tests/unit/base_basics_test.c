/* base_basics_test.c - status and errors, clock, element types. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/dtype.h"
#include "common/base/status.h"
#include "tests/unit/capture.h"

static void fail_fills_and_returns(void **state)
{
    (void)state;
    struct td_err err = {0};
    assert_int_equal(td_fail(&err, TD_ERR_LIMIT, "n is %d, must be <= %d", 9, 8), TD_ERR_LIMIT);
    assert_int_equal(err.code, TD_ERR_LIMIT);
    assert_string_equal(err.msg, "n is 9, must be <= 8");
    assert_int_equal(td_err_prefix(&err, "file %s", "a.json"), TD_ERR_LIMIT);
    assert_string_equal(err.msg, "file a.json: n is 9, must be <= 8");
    assert_int_equal(td_fail(NULL, TD_ERR_IO, "nobody listens"), TD_ERR_IO);
}

static void fail_may_quote_its_own_message(void **state)
{
    (void)state;
    struct td_err err = {0};
    td_fail(&err, TD_ERR_IO, "cause");
    td_fail(&err, TD_ERR_PEER, "peer: %s", err.msg);
    assert_string_equal(err.msg, "peer: cause");
}

static void long_messages_are_cut(void **state)
{
    (void)state;
    char big[2 * TD_ERR_MSG_MAX];
    memset(big, 'x', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    struct td_err err = {0};
    td_fail(&err, TD_ERR_IO, "%s", big);
    assert_int_equal(strlen(err.msg), TD_ERR_MSG_MAX - 1);
    td_err_prefix(&err, "p");
    assert_int_equal(strlen(err.msg), TD_ERR_MSG_MAX - 1);
    assert_memory_equal(err.msg, "p: xxx", 6);
    td_err_prefix(&err, "%s", big);
    assert_int_equal(strlen(err.msg), TD_ERR_MSG_MAX - 1);
}

static void every_status_has_its_own_name(void **state)
{
    (void)state;
    static const td_status all[] = {
        TD_OK,          TD_INPROGRESS,      TD_ERR_AGAIN,     TD_ERR_INVALID,  TD_ERR_NOT_FOUND,
        TD_ERR_LIMIT,   TD_ERR_UNSUPPORTED, TD_ERR_CANCELLED, TD_ERR_DEADLINE, TD_ERR_CORRUPT,
        TD_ERR_STALE,   TD_ERR_PEER,        TD_ERR_IO,        TD_ERR_NOMEM,    TD_ERR_DEVICE,
        TD_ERR_INTERNAL};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        assert_string_not_equal(td_status_name(all[i]), "unknown");
        for (size_t j = 0; j < i; j++)
            assert_string_not_equal(td_status_name(all[i]), td_status_name(all[j]));
    }
    assert_string_equal(td_status_name((td_status)-99), "unknown");
}

static void broken_promise(void *arg) { TD_ASSERT(*(int *)arg == 2); }

static void assert_aborts_and_names_the_place(void **state)
{
    (void)state;
    struct capture c;
    int three = 3, two = 2;
    capture_run(&c, broken_promise, &three);
    assert_true(capture_aborted(&c));
    assert_non_null(strstr(c.text, "base_basics_test.c:"));
    assert_non_null(strstr(c.text, "broken_promise"));
    assert_non_null(strstr(c.text, "*(int *)arg == 2"));
    capture_run(&c, broken_promise, &two);
    assert_int_equal(capture_exit(&c), 0);
}

static void clock_goes_forward_and_deadlines_saturate(void **state)
{
    (void)state;
    uint64_t a = td_now_ns(), b = td_now_ns();
    assert_true(a > 0 && b >= a);
    assert_true(td_wall_ns() > 1700000000ull * TD_NS_PER_S);
    assert_true(td_deadline_after_ms(5, 2) == 5 + 2 * TD_NS_PER_MS);
    assert_true(td_deadline_after_ms(5, UINT64_MAX) == TD_NEVER_NS);
    assert_true(td_deadline_after_ms(5, UINT64_MAX / TD_NS_PER_MS) ==
                5 + UINT64_MAX / TD_NS_PER_MS * TD_NS_PER_MS);
    assert_true(td_deadline_after_ms(UINT64_MAX - 1, 1) == TD_NEVER_NS);
    assert_true(td_deadline_after_ms(TD_NEVER_NS, 0) == TD_NEVER_NS);
}

static void bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    static const struct {
        uint32_t f32;
        uint16_t bf16;
    } cases[] = {
        {0x3f800000, 0x3f80}, /* 1                                        */
        {0x3f808000, 0x3f80}, /* halfway between 0x3f80 and 0x3f81: even  */
        {0x3f818000, 0x3f82}, /* halfway between 0x3f81 and 0x3f82: even  */
        {0x3f808001, 0x3f81}, /* just above halfway                       */
        {0x7f7fffff, 0x7f80}, /* largest float rounds to infinity         */
        {0x80000000, 0x8000}, /* -0                                       */
        {0xff800000, 0xff80}, /* -infinity                                */
        {0x7f800001, 0x7fc0}, /* a signalling NaN stays NaN, quiet        */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float f;
        memcpy(&f, &cases[i].f32, sizeof f);
        assert_int_equal(td_f32_to_bf16(f), cases[i].bf16);
    }
    for (uint32_t h = 0; h < 65536; h++) { /* every bf16 value survives the round trip */
        float f = td_bf16_to_f32((uint16_t)h);
        if (isnan(f))
            assert_true(isnan(td_bf16_to_f32(td_f32_to_bf16(f))));
        else
            assert_int_equal(td_f32_to_bf16(f), h);
    }
    assert_int_equal(td_dtype_bytes(TD_F32), 4);
    assert_int_equal(td_dtype_bytes(TD_BF16), 2);
    assert_string_equal(td_dtype_name(TD_F16), "f16");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fail_fills_and_returns),
        cmocka_unit_test(fail_may_quote_its_own_message),
        cmocka_unit_test(long_messages_are_cut),
        cmocka_unit_test(every_status_has_its_own_name),
        cmocka_unit_test(assert_aborts_and_names_the_place),
        cmocka_unit_test(clock_goes_forward_and_deadlines_saturate),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
