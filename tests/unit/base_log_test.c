/* base_log_test.c - shape of log lines, quoting, cutting, and lines of many threads. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <string.h>

#include "common/base/log.h"
#include "tests/unit/capture.h"

static void quoting(void **state)
{
    (void)state;
    static const struct {
        const char *value, *expected;
        size_t buf_bytes;
    } cases[] = {
        {"plain", "plain", 64},
        {"prefill-2:7000/x", "prefill-2:7000/x", 64},
        {"", "\"\"", 64},
        {"two words", "\"two words\"", 64},
        {"a=b", "\"a=b\"", 64},
        {"say \"hi\"", "\"say \\\"hi\\\"\"", 64},
        {"back\\slash", "\"back\\\\slash\"", 64},
        {"line\nbreak", "\"line\\nbreak\"", 64},
        {"bell\a", "\"bell\\x07\"", 64},
        {"del\x7f", "\"del\\x7f\"", 64},
        {"gr\xc3\xbc\xc3\x9f", "gr\xc3\xbc\xc3\x9f", 64},
        {"abcdef", "abc", 4},      /* cut */
        {"ab cdef", "\"ab \"", 6}, /* the closing quote keeps its place */
        {"ab\"c", "\"ab\"", 6},    /* an escape is never cut in half */
        {"ab\xc3\xbc", "ab", 4},   /* nor is a character */
        {"ab\xc3\xbc", "ab\xc3\xbc", 5},
        {"\xc3", "\xc3", 8}, /* broken UTF-8 at the end: no read past the NUL */
        {"\xf0\x9f", "\xf0\x9f", 8},
        {"a b", "", 2},
        {"a b", "\"\"", 3},
        {"abc", "", 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *buf = malloc(cases[i].buf_bytes); /* exact, so that a sanitizer sees one byte too
                                                   many */
        assert_ptr_equal(td_log_quote(buf, cases[i].buf_bytes, cases[i].value), buf);
        if (strcmp(buf, cases[i].expected) != 0)
            fail_msg("quote(%s) is %s, expected %s", cases[i].value, buf, cases[i].expected);
        free(buf);
    }
    char untouched = 'x';
    td_log_quote(&untouched, 0, "abc");
    assert_int_equal(untouched, 'x');
}

/* A burst, then a steady rate, on a clock of the test's own; what was left out is told once. */
static void limits(void **state)
{
    (void)state;
    static struct td_log_limit l;
    unsigned long long now = 1000000000ull, second = 1000000000ull;
    unsigned suppressed = 99;
    for (int i = 0; i < TD_LOG_BURST; i++) {
        assert_true(td_log_limit_take(&l, "flood", now, &suppressed));
        assert_int_equal(suppressed, 0);
    }
    for (int i = 0; i < 1000; i++) assert_false(td_log_limit_take(&l, "flood", now, &suppressed));
    int passed = 0;
    for (int i = 1; i <= 1000; i++) { /* ten seconds, a line every 10 ms */
        unsigned before = 0;
        if (!td_log_limit_take(&l, "flood", now + (unsigned)i * second / 100, &before)) continue;
        assert_int_equal(before, passed ? 19 : 1019);
        passed++;
    }
    assert_int_equal(passed, 10 * TD_LOG_PER_S);
    now += 3600 * second; /* a quiet hour saves up one burst, not more */
    passed = 0;
    for (int i = 0; i < 1000; i++) passed += td_log_limit_take(&l, "flood", now, &suppressed);
    assert_int_equal(passed, TD_LOG_BURST);
}

static void flood_and_tell(void *arg)
{
    (void)arg;
    for (int i = 0; i < 200; i++) td_warn_limited("flooded", "i=%d", i);
    td_log_tell_suppressed(); /* too early: it may still go on */
}

static void a_flood_of_lines_is_cut(void **state)
{
    (void)state;
    struct capture c;
    capture_run(&c, flood_and_tell, NULL);
    int n = 0;
    for (const char *at = c.text; (at = strstr(at, "ev=flooded")); at++) n++;
    /* should it take ten seconds */
    assert_in_range(n, TD_LOG_BURST, TD_LOG_BURST + 10 * TD_LOG_PER_S);
    assert_null(strstr(c.text, "ev=lines_suppressed event=flooded"));
}

static void levels_parse(void **state)
{
    (void)state;
    enum td_log_level level = TD_LOG_ERROR;
    assert_int_equal(td_log_level_parse("debug", &level), 0);
    assert_int_equal(level, TD_LOG_DEBUG);
    assert_int_equal(td_log_level_parse("warn", &level), 0);
    assert_int_equal(level, TD_LOG_WARN);
    assert_int_equal(td_log_level_parse("loud", &level), -1);
    assert_int_equal(td_log_level_parse("", &level), -1);
    assert_int_equal(level, TD_LOG_WARN);
}

static void log_some(void *arg)
{
    (void)arg;
    td_log_start("decode", TD_LOG_INFO);
    td_debug("hidden", "%s", "");
    td_warn("kv_recv_timeout", "peer=%s waited_ms=%d", "prefill-2", 500);
    td_info("started", "%s", "");
    td_error("broken", "text=%s", "a\nb\tc");
}

static void a_line_has_its_shape(void **state)
{
    (void)state;
    struct capture c;
    capture_run(&c, log_some, NULL);
    assert_int_equal(capture_exit(&c), 0);
    assert_null(strstr(c.text, "hidden"));
    char *lines[3], *rest = c.text;
    for (int i = 0; i < 3; i++) assert_non_null(lines[i] = strsep(&rest, "\n"));
    assert_string_equal(rest, ""); /* three lines, each with its end */
    /* ts=2026-01-02T03:04:05.678Z is 27 bytes */
    static const char pattern[] = "ts=dddd-dd-ddTdd:dd:dd.dddZ ";
    for (int i = 0; i < 3; i++) {
        for (size_t k = 0; k < sizeof pattern - 1; k++) {
            if (pattern[k] == 'd')
                assert_in_range(lines[i][k], '0', '9');
            else
                assert_int_equal(lines[i][k], pattern[k]);
        }
    }
    assert_string_equal(lines[0] + 28,
                        "lvl=warn d=decode ev=kv_recv_timeout peer=prefill-2 waited_ms=500");
    assert_memory_equal(lines[1] + 28, "lvl=info d=decode ev=started", 28);
    assert_string_equal(lines[2] + 28, "lvl=error d=decode ev=broken text=a b c");
}

static void log_long(void *arg)
{
    (void)arg;
    char big[6000];
    memset(big, 'y', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    td_log_start("decode", TD_LOG_INFO);
    td_info("long", "text=%s", big);
}

static void a_long_line_is_cut_and_says_so(void **state)
{
    (void)state;
    struct capture c;
    capture_run(&c, log_long, NULL);
    assert_int_equal(capture_exit(&c), 0);
    assert_true(c.n_bytes <= 4096);
    assert_true(c.n_bytes > 4000);
    assert_string_equal(c.text + c.n_bytes - 13, "yy log_cut=1\n");
    assert_ptr_equal(strchr(c.text, '\n'), c.text + c.n_bytes - 1);
}

enum { N_THREADS = 4, N_LINES = 50 };

static void *log_from_thread(void *arg)
{
    for (int i = 0; i < N_LINES; i++)
        td_info("work", "thread=%c n=%d end=here", *(const char *)arg, i);
    return NULL;
}

static void log_from_threads(void *arg)
{
    (void)arg;
    static const char names[N_THREADS] = {'a', 'b', 'c', 'd'};
    pthread_t threads[N_THREADS];
    td_log_start("t", TD_LOG_INFO);
    for (int i = 0; i < N_THREADS; i++) {
        if (pthread_create(&threads[i], NULL, log_from_thread, (void *)(uintptr_t)&names[i]))
            abort();
    }
    for (int i = 0; i < N_THREADS; i++) pthread_join(threads[i], NULL);
}

static void lines_of_threads_never_mix(void **state)
{
    (void)state;
    static struct capture c;
    capture_run(&c, log_from_threads, NULL);
    assert_int_equal(capture_exit(&c), 0);
    int next[N_THREADS] = {0}, n_lines = 0;
    char *rest = c.text;
    for (char *line; (line = strsep(&rest, "\n")) && *line; n_lines++) {
        char name, end[8];
        int n;
        assert_int_equal(
            sscanf(line, "ts=%*s lvl=info d=t ev=work thread=%c n=%d end=%7s", &name, &n, end), 3);
        assert_string_equal(end, "here");
        assert_int_equal(n, next[name - 'a']++); /* each thread's own lines in order, none lost */
    }
    assert_int_equal(n_lines, N_THREADS * N_LINES);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quoting),
        cmocka_unit_test(limits),
        cmocka_unit_test(a_flood_of_lines_is_cut),
        cmocka_unit_test(levels_parse),
        cmocka_unit_test(a_line_has_its_shape),
        cmocka_unit_test(a_long_line_is_cut_and_says_so),
        cmocka_unit_test(lines_of_threads_never_mix),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
