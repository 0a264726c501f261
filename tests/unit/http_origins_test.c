/* http_origins_test.c - which lists of origins are taken, and what is in them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "router/http/origins.h"

static void lists_that_are_taken(void **state)
{
    (void)state;
    static const char *const good[] = {
        "",
        "*",
        "null",
        "https://a.example",
        "http://localhost:3000",
        "HTTP://A-b.Example:1, https://x_y.example  null,,",
        "http://[::1]:8080 https://[2001:db8::1]",
        "chrome-extension://abcdefgh",
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        struct td_err err = {0};
        if (http_origins_check(good[i], &err)) fail_msg("%s: %s", good[i], err.msg);
    }
}

static void what_no_browser_sends_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *list, *named;
    } bad[] = {
        {"https://a.example/", "\"https://a.example/\""},
        {"https://a.example, https://b.example/chat", "\"https://b.example/chat\""},
        {"a.example", "\"a.example\""},
        {"http://", "\"http://\""},
        {"http://:80", "\"http://:80\""},
        {"http://a.example:", "\"http://a.example:\""},
        {"http://a.example:http", "\"http://a.example:http\""},
        {"http://a.example:123456", "\"http://a.example:123456\""},
        {"http://[::1", "\"http://[::1\""},
        {"http://[::1]8080", "\"http://[::1]8080\""},
        {"http://user@a.example", "\"http://user@a.example\""},
        {"https://*.example", "\"https://*.example\""},
        {"*, https://a.example", "\"*\""},
        {"://a.example", "\"://a.example\""},
        {"https://a.example;https://b.example", "\"https://a.example;https://b.example\""},
        {"nullify", "\"nullify\""},
        {"http a.example x://y", "\"http\""},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct td_err err = {0};
        assert_int_equal(http_origins_check(bad[i].list, &err), TD_ERR_INVALID);
        if (!strstr(err.msg, bad[i].named)) fail_msg("%s: %s", bad[i].list, err.msg);
        assert_non_null(strstr(err.msg, "http_cors_origins: "));
    }
}

static void an_origin_is_found_as_a_whole(void **state)
{
    (void)state;
    const char *list = "https://a.example, http://localhost:3000";
    assert_true(http_origins_have(list, "https://a.example"));
    assert_true(http_origins_have(list, "HTTPS://A.example"));
    assert_true(http_origins_have(list, "http://localhost:3000"));
    assert_false(http_origins_have(list, "http://localhost:300"));
    assert_false(http_origins_have(list, "https://a.example.evil"));
    assert_false(http_origins_have(list, "null"));
    assert_false(http_origins_have(list, ""));
    assert_false(http_origins_have("", "https://a.example"));
    assert_true(http_origins_have("*", "https://any.example"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_that_are_taken),
        cmocka_unit_test(what_no_browser_sends_is_refused),
        cmocka_unit_test(an_origin_is_found_as_a_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
