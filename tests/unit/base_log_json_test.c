/* base_log_json_test.c - lines of the log as JSON: exact cases, cuts at every size, and hostile
 * values that come back as they were. SEED=N repeats the random part. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/log.h"
#include "common/base/log_json.h"
#include "common/base/random.h"
#include "tests/unit/capture.h"

static const struct {
    const char *line, *json;
} cases[] = {
    {"ts=1 lvl=info d=x ev=y", "{\"ts\":\"1\",\"lvl\":\"info\",\"d\":\"x\",\"ev\":\"y\"}"},
    {"ev=y msg=\"a \\\"b\\\" \\\\ \\n\\x07\" n=3",
     "{\"ev\":\"y\",\"msg\":\"a \\\"b\\\" \\\\ \\n\\u0007\",\"n\":\"3\"}"},
    {"msg=\"by \"hand\" here\" n=1", "{\"msg\":\"by \\\"hand\\\" here\",\"n\":\"1\"}"},
    {"msg=two words n=1", "{\"msg\":\"two words\",\"n\":\"1\"}"},
    {"msg=\"one\" two n=1", "{\"msg\":\"\\\"one\\\" two\",\"n\":\"1\"}"},
    {"one two n=1", "{\"more\":\"one two\",\"n\":\"1\"}"},
    {"msg=\"no end", "{\"msg\":\"\\\"no end\"}"},
    {"msg=\"end\\", "{\"msg\":\"\\\"end\\\\\"}"},
    {"a= b=\"\"  c=x=y", "{\"a\":\"\",\"b\":\"\",\"c\":\"x=y\"}"},
    {"a=\xff\xc3\xa4\xed\xa0\x80\xc0\x80", "{\"a\":\"\xef\xbf\xbd\xc3\xa4\xef\xbf\xbd\xef\xbf\xbd"
                                           "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"}"},
    {"", "{}"},
};

static void lines_become_objects(void **state)
{
    (void)state;
    char out[512];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t n = td_log_to_json(cases[i].line, strlen(cases[i].line), out, sizeof out - 1);
        out[n] = '\0';
        assert_string_equal(out, cases[i].json);
    }
}

/* An object, and its members' values are what begins the whole line's. */
static void check_cut(const char *out, size_t n, json_t *whole)
{
    json_error_t e;
    json_t *o = json_loadb(out, n, JSON_REJECT_DUPLICATES, &e);
    if (!o) fail_msg("%.*s: %s", (int)n, out, e.text);
    const char *key;
    json_t *v;
    bool is_cut = false;
    json_object_foreach(o, key, v)
    {
        const char *all = json_string_value(json_object_get(whole, key));
        if (!strcmp(key, "log_cut"))
            is_cut = true;
        else if (!all || strncmp(all, json_string_value(v), json_string_length(v)) != 0)
            fail_msg("%.*s", (int)n, out);
    }
    assert_true(is_cut || json_equal(o, whole));
    json_decref(o);
}

static void cuts_leave_objects(void **state)
{
    (void)state;
    static const char line[] = "ts=2026-01-02T03:04:05.678Z lvl=warn d=router "
                               "name=\"\\\"\\\\\\n\\x01\xe2\x82\xac\xe2\x82\xac\" code=14 last=z";
    char all[512];
    size_t n_all = td_log_to_json(line, sizeof line - 1, all, sizeof all);
    json_t *whole = json_loadb(all, n_all, 0, NULL);
    assert_non_null(whole);
    for (size_t room = 64; room <= n_all + 20; room++) {
        char *out = malloc(room); /* ASan sees a byte too many */
        size_t n = td_log_to_json(line, sizeof line - 1, out, room);
        assert_true(n <= room);
        check_cut(out, n, whole);
        free(out);
    }
    json_decref(whole);
}

/* Text of any character but NUL, which td_log_quote cannot be given; UTF-8. */
static void random_text(uint64_t *random, char *text, size_t room)
{
    static const char *const units[] = {
        "\"",   "\\",  "\n",       " ",   "=",  "\x01",  "\x7f",
        "\\x4", "\\n", "\xc3\xa4", "a=b", "{}", "\",\"", "\xf0\x9f\x98\x80"};
    size_t n = 0;
    for (unsigned k = (unsigned)(td_random_step(random) % 24); k--;) {
        const char *u = units[td_random_step(random) % (sizeof units / sizeof *units)];
        if (n + 8 > room) break; /* the longest unit has 4 bytes */
        for (; *u; u++) text[n++] = *u;
    }
    text[n] = '\0';
}

static void quoted_values_come_back(void **state)
{
    (void)state;
    uint64_t random = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 10) : (uint64_t)time(NULL);
    print_message("SEED=%llu\n", (unsigned long long)random);
    for (int i = 0; i < 20000; i++) {
        char values[2][160], quoted[2][700], line[1600], out[4096];
        for (int k = 0; k < 2; k++) {
            random_text(&random, values[k], sizeof values[k]);
            td_log_quote(quoted[k], sizeof quoted[k], values[k]);
        }
        int n = snprintf(line, sizeof line, "ev=x a=%s n=1 b=%s", quoted[0], quoted[1]);
        size_t size = td_log_to_json(line, (size_t)n, out, sizeof out);
        json_error_t e;
        json_t *o = json_loadb(out, size, JSON_REJECT_DUPLICATES, &e);
        if (!o) fail_msg("%s: %.*s: %s", line, (int)size, out, e.text);
        assert_int_equal(json_object_size(o), 4);
        assert_string_equal(json_string_value(json_object_get(o, "a")), values[0]);
        assert_string_equal(json_string_value(json_object_get(o, "b")), values[1]);
        assert_string_equal(json_string_value(json_object_get(o, "n")), "1");
        json_decref(o);
    }
}

/* Random bytes are an object all the same. */
static void any_line_is_an_object(void **state)
{
    (void)state;
    uint64_t random = getenv("SEED") ? strtoull(getenv("SEED"), NULL, 10) : (uint64_t)time(NULL);
    static const char few[] = "a=\"\\x4n \xc3\xa4\xff";
    for (int i = 0; i < 20000; i++) {
        char line[96], out[700];
        size_t n = td_random_step(&random) % sizeof line, room = 64 + td_random_step(&random) % 600;
        for (size_t k = 0; k < n; k++) {
            uint64_t r = td_random_step(&random);
            line[k] = r & 256 ? few[r % (sizeof few - 1)] : (char)r;
        }
        size_t size = td_log_to_json(line, n, out, room);
        json_error_t e;
        json_t *o = json_loadb(out, size, JSON_ALLOW_NUL, &e);
        if (size > room || !o) fail_msg("%.*s: %s", (int)size, out, e.text);
        json_decref(o);
    }
}

static void log_some(void *arg)
{
    char big[6000], quoted[64];
    (void)arg;
    td_log_start("router", TD_LOG_INFO);
    td_log_set_json(true);
    td_warn("request_failed", "req=%s code=%u", td_log_quote(quoted, sizeof quoted, "a\n\"b"), 14u);
    memset(big, '\x01', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    td_info("long", "text=%s", big);
}

static void daemons_log_objects(void **state)
{
    (void)state;
    static struct capture c;
    capture_run(&c, log_some, NULL);
    assert_int_equal(capture_exit(&c), 0);
    char *rest = c.text, *line;
    for (int i = 0; i < 2; i++) {
        assert_non_null(line = strsep(&rest, "\n"));
        assert_true(strlen(line) < 4096);
        json_t *o = json_loads(line, JSON_REJECT_DUPLICATES, NULL);
        assert_non_null(o);
        assert_string_equal(json_string_value(json_object_get(o, "d")), "router");
        assert_non_null(json_object_get(o, "ts"));
        if (i)
            assert_string_equal(json_string_value(json_object_get(o, "log_cut")), "1");
        else
            assert_string_equal(json_string_value(json_object_get(o, "req")), "a\n\"b");
        json_decref(o);
    }
    assert_string_equal(rest, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lines_become_objects),    cmocka_unit_test(cuts_leave_objects),
        cmocka_unit_test(quoted_values_come_back), cmocka_unit_test(any_line_is_an_object),
        cmocka_unit_test(daemons_log_objects),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
