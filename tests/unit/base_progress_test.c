/* base_progress_test.c - short work is silent, long work reports; time is moved by setting
 * start_ns back. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "common/base/clock.h"
#include "common/base/progress.h"
#include "tests/unit/capture.h"

static void work(void *arg)
{
    uint64_t age_ns = *(uint64_t *)arg;
    struct td_progress p;
    td_progress_start(&p, "loading weights", "B", 4 << 20);
    p.start_ns -= age_ns;
    td_progress_update(&p, 1 << 20);
    td_progress_update(&p, 2 << 20); /* at once again: no second line */
    td_progress_update(&p, 4 << 20);
    td_progress_end(&p);
}

static int n_lines(const char *text)
{
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n;
}

static void long_work_reports_in_plain_lines(void **state)
{
    (void)state;
    struct capture c;
    uint64_t age_ns = 0;
    capture_run(&c, work, &age_ns);
    assert_string_equal(c.text, "");
    age_ns = TD_NS_PER_S; /* over 0.5 s, under 5 s: only the end */
    capture_run(&c, work, &age_ns);
    assert_int_equal(n_lines(c.text), 1);
    assert_non_null(
        strstr(c.text, "loading weights: 100% (4.0 MiB of 4.0 MiB, 4.0 MiB/s, took 1.0 s)\n"));
    age_ns = 6 * TD_NS_PER_S;
    capture_run(&c, work, &age_ns);
    assert_int_equal(n_lines(c.text), 2);
    assert_memory_equal(c.text, "loading weights:  25% (1.0 MiB of 4.0 MiB, ", 43);
    assert_non_null(strstr(c.text, "18 s left)\n"));
    assert_null(strchr(c.text, '\r')); /* no redrawing into a file */
}

static void count(void *arg)
{
    (void)arg;
    struct td_progress p;
    td_progress_start(&p, "training", "steps", 0); /* total unknown: no division by it */
    p.start_ns -= 6 * TD_NS_PER_S;
    td_progress_update(&p, 0);
    p.drawn_ns -= 6 * TD_NS_PER_S;
    td_progress_update(&p, 12);
    p.is_tty = 1;
    td_progress_end(&p);
}

static void other_units_and_terminals(void **state)
{
    (void)state;
    struct capture c;
    capture_run(&c, count, NULL);
    assert_int_equal(capture_exit(&c), 0);
    assert_non_null(strstr(c.text, "training: 100% (0 steps of 0 steps, 0 steps/s, waiting)\n"));
    assert_non_null(
        strstr(c.text, "\rtraining: 100% (12 steps of 0 steps, 2 steps/s, took 6.0 s)\033[K\n"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(long_work_reports_in_plain_lines),
        cmocka_unit_test(other_units_and_terminals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
