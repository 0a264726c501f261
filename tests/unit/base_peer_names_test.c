/* base_peer_names_test.c - tables of names that a list of patterns takes and leaves, and of
 * patterns that are refused.
 */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/peer_names.h"

static void names_are_taken_and_left(void **state)
{
    (void)state;
    static const struct {
        const char *patterns;
        enum td_peer_name_kind kind;
        const char *name;
        bool match;
    } cases[] = {
        {"worker-1.example.org", TD_PEER_NAME_DNS, "worker-1.example.org", true},
        {"worker-1.example.org", TD_PEER_NAME_DNS, "WORKER-1.Example.org", true},
        {"worker-1.example.org", TD_PEER_NAME_DNS, "worker-1.example.org.evil.net", false},
        {"worker-1.example.org", TD_PEER_NAME_DNS, "xworker-1.example.org", false},
        {"worker-1.example.org", TD_PEER_NAME_DNS, "*.example.org", false},
        {"worker-1.example.org", TD_PEER_NAME_URI, "worker-1.example.org", false},
        {"*.workers.org", TD_PEER_NAME_DNS, "a.workers.org", true},
        {"*.workers.org", TD_PEER_NAME_DNS, "b.a.workers.org", false},
        {"*.workers.org", TD_PEER_NAME_DNS, "workers.org", false},
        {"*.workers.org", TD_PEER_NAME_DNS, ".workers.org", false},
        {"*.workers.org", TD_PEER_NAME_DNS, "aworkers.org", false},
        {"*.workers.org", TD_PEER_NAME_DNS, "*.workers.org", false},
        {"x, *.workers.org ,y", TD_PEER_NAME_DNS, "y", true},
        {"x, *.workers.org ,y", TD_PEER_NAME_DNS, "a.workers.org", true},
        {"x, *.workers.org ,y", TD_PEER_NAME_DNS, "z", false},
        {"10.0.0.7", TD_PEER_NAME_IP, "10.0.0.7", true},
        {"10.0.0.7", TD_PEER_NAME_IP, "10.0.0.70", false},
        {"10.0.0.7", TD_PEER_NAME_DNS, "10.0.0.7", false},
        {"fd00::7", TD_PEER_NAME_IP, "fd00:0:0::0007", true},
        {"fd00::7", TD_PEER_NAME_IP, "fd00::8", false},
        {"URI:spiffe://prod/sa/worker", TD_PEER_NAME_URI, "spiffe://prod/sa/worker", true},
        {"URI:spiffe://prod/sa/worker", TD_PEER_NAME_URI, "spiffe://prod/sa/worker2", false},
        {"URI:spiffe://prod/sa/worker", TD_PEER_NAME_URI, "spiffe://prod/sa/Worker", false},
        {"URI:spiffe://prod/sa/worker", TD_PEER_NAME_DNS, "spiffe", false},
        {"URI:spiffe://prod/sa/*", TD_PEER_NAME_URI, "spiffe://prod/sa/worker", true},
        {"URI:spiffe://prod/sa/*", TD_PEER_NAME_URI, "spiffe://prod/ns/worker", false},
        {"URI:spiffe://prod/*", TD_PEER_NAME_URI, "spiffe://prod.evil/sa/worker", false},
        {"URI:urn:tandem:worker:*", TD_PEER_NAME_URI, "urn:tandem:worker:7", true},
        {"URI:urn:tandem:worker:*", TD_PEER_NAME_URI, "urn:tandem:client:7", false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct td_peer_names *names = NULL;
        struct td_err err = {0};
        if (td_peer_names_parse("--tls-worker-names", cases[i].patterns, &names, &err))
            fail_msg("case %zu: %s", i, err.msg);
        if (td_peer_names_match(names, cases[i].kind, cases[i].name, strlen(cases[i].name)) !=
            cases[i].match)
            fail_msg("case %zu: \"%s\" %s \"%s\"", i, cases[i].patterns,
                     cases[i].match ? "leaves" : "takes", cases[i].name);
        td_peer_names_destroy(names);
    }
    /* A NUL in a certificate's name hides what follows from C: such a name is nobody's. */
    struct td_peer_names *names = NULL;
    assert_int_equal(td_peer_names_parse("x", "a.org,URI:urn:x:*", &names, NULL), TD_OK);
    assert_false(td_peer_names_match(names, TD_PEER_NAME_DNS, "a.org\0.evil", 11));
    assert_false(td_peer_names_match(names, TD_PEER_NAME_URI, "urn:x:\0", 7));
    td_peer_names_destroy(names);
}

static void bad_patterns_are_refused_by_name(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",
        " ",
        "a,",
        ",a",
        "a,,b",
        "*",
        "*.",
        "**.org",
        "a.*.org",
        "*a.org",
        "a..org",
        ".org",
        "org.",
        "a b",
        "URI:",
        "URI:worker",
        "URI:*",
        "URI:spiffe:",
        "URI:spiffe:*x",
        "URI:spiffe://*",
        "URI:spiffe://prod*",
        "URI:spiffe:///*",
        "URI:spiffe://prod/wor*",
        "URI:a://b/*/c",
        "URI:1x:y",
        "10.0.0.0/8",
        "a/b",
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct td_peer_names *names = NULL;
        struct td_err err = {0};
        if (td_peer_names_parse("--tls-worker-names", bad[i], &names, &err) != TD_ERR_INVALID)
            fail_msg("\"%s\" is taken", bad[i]);
        assert_null(names);
        assert_non_null(strstr(err.msg, "--tls-worker-names"));
    }
    char many[2 * 65];
    for (int i = 0; i < 65; i++) memcpy(many + 2 * i, i < 64 ? "a," : "a", 2);
    struct td_peer_names *names = NULL;
    assert_int_equal(td_peer_names_parse("x", many, &names, NULL), TD_ERR_LIMIT);
    char long_one[600];
    memset(long_one, 'a', sizeof long_one - 1);
    long_one[sizeof long_one - 1] = '\0';
    assert_int_equal(td_peer_names_parse("x", long_one, &names, NULL), TD_ERR_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_are_taken_and_left),
        cmocka_unit_test(bad_patterns_are_refused_by_name),
    };
    return cmocka_run_group_tests_name("base_peer_names", tests, NULL, NULL);
}
