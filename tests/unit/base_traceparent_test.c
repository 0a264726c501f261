/* base_traceparent_test.c - what is a traceparent, and what is not. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "common/base/traceparent.h"

#define TRACE "4bf92f3577b34da6a3ce929d0e0e4736"
#define PARENT "00f067aa0ba902b7"

static const struct {
    const char *text;
    bool is_valid, is_sampled;
} cases[] = {
    {"00-" TRACE "-" PARENT "-01", true, true},
    {"00-" TRACE "-" PARENT "-00", true, false},
    {"00-" TRACE "-" PARENT "-ff", true, true},
    {"00-" TRACE "-" PARENT "-fe", true, false},
    {"cc-" TRACE "-" PARENT "-01", true, true},
    {"cc-" TRACE "-" PARENT "-01-what-comes", true, true},
    {"01-" TRACE "-" PARENT "-01-", true, true},
    {"00-" TRACE "-" PARENT "-01-", false, false},
    {"00-" TRACE "-" PARENT "-01-x", false, false},
    {"cc-" TRACE "-" PARENT "-01x", false, false},
    {"ff-" TRACE "-" PARENT "-01", false, false},
    {"00-00000000000000000000000000000000-" PARENT "-01", false, false},
    {"00-" TRACE "-0000000000000000-01", false, false},
    {"00-4BF92F3577B34DA6A3CE929D0E0E4736-" PARENT "-01", false, false},
    {"00-4bf92f3577b34da6a3ce929d0e0e473-" PARENT "-01", false, false},
    {"00-4bf92f3577b34da6a3ce929d0e0e47365-" PARENT "-01", false, false},
    {"00-4bf92f3577b34da6a3ce929d0e0e473g-" PARENT "-01", false, false},
    {"00-4bf92f3577b34da6a3ce929d0e0e473\xff-" PARENT "-01", false, false},
    {"00_" TRACE "-" PARENT "-01", false, false},
    {"00-" TRACE "_" PARENT "-01", false, false},
    {"00-" TRACE "-" PARENT "_01", false, false},
    {"00-" TRACE "-" PARENT "-0", false, false},
    {"00-" TRACE "-" PARENT "-", false, false},
    {"0-" TRACE "-" PARENT "-01", false, false},
    {" 00-" TRACE "-" PARENT "-01", false, false},
    {"00-" TRACE "-" PARENT "-01 ", false, false},
    {"00-" TRACE "-" PARENT "-01,00-" TRACE "-" PARENT "-01", false, false},
    {"", false, false},
    {"-", false, false},
    {"00", false, false},
};

static void cases_are_told_apart(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_traceparent t, before;
        memset(&t, 0x5a, sizeof t);
        before = t;
        if (td_traceparent_parse(cases[i].text, &t) != cases[i].is_valid)
            fail_msg("%s is%s valid", cases[i].text, cases[i].is_valid ? "" : " not");
        if (!cases[i].is_valid) {
            assert_memory_equal(&t, &before, sizeof t);
            continue;
        }
        static const uint8_t trace[] = {0x4b, 0xf9, 0x2f, 0x35, 0x77, 0xb3, 0x4d, 0xa6,
                                        0xa3, 0xce, 0x92, 0x9d, 0x0e, 0x0e, 0x47, 0x36},
                             parent[] = {0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7};
        assert_memory_equal(t.trace_id, trace, sizeof trace);
        assert_memory_equal(t.parent_id, parent, sizeof parent);
        assert_int_equal(t.is_sampled, cases[i].is_sampled);
    }
}

/* Each cut of a valid one, and each of its bytes replaced by each other byte: nothing is read
 * behind the end (ASan sees it), and what is taken says what was replaced. */
static void near_misses(void **state)
{
    (void)state;
    static const char good[] = "00-" TRACE "-" PARENT "-01";
    struct td_traceparent t;
    for (size_t n = 0; n < sizeof good - 1; n++) {
        char *text = malloc(n + 1);
        memcpy(text, good, n);
        text[n] = '\0';
        assert_false(td_traceparent_parse(text, &t));
        free(text);
    }
    for (size_t i = 0; i < sizeof good - 1; i++) {
        for (int c = 1; c < 256; c++) {
            char text[sizeof good];
            memcpy(text, good, sizeof good);
            text[i] = (char)c;
            bool is_digit = c < 128 && strchr("0123456789abcdef", c), is_dash = good[i] == '-',
                 expected = is_dash ? c == '-' : is_digit;
            if (td_traceparent_parse(text, &t) != expected) fail_msg("byte %zu as %d", i, c);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(cases_are_told_apart),
                                       cmocka_unit_test(near_misses)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
