/* tenants_test.c - the file of tenants, who a caller is by it, and the salts of prefix caches. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "router/tenant_rates.h"
#include "router/tenants.h"

static const struct td_core_config classes = {
    .n_classes = 3, .classes = {{.name = "default"}, {.name = "gold"}, {.name = "bulk"}}};

/* SHA-256 of "key-of-acme-0123456789", "second-key-of-acme-01234" and "key-of-beta-0123456789",
 * by sha256sum. */
#define ACME "sha256:20f03f9b9b50f0e4d02549f151bcfdf21f6122673088163251b9be2792f0efb9"
#define ACME2 "sha256:041c2af89a099e4d70cd080050ccc19cd2b5e63900354b545e3d70d6f05b2612"
#define BETA "sha256:709d52fb63a8a567f02f3abc98f026a9d4b2983be451972d934275a68bf8e91c"

static struct router_tenants *parse(const char *text)
{
    struct router_tenants *t = NULL;
    struct td_err err = {0};
    if (router_tenants_parse(text, strlen(text), "file", &classes, &t, &err))
        fail_msg("%s", err.msg);
    return t;
}

/* A certificate with one DNS name, as the text in arg. */
static bool dns_is(void *arg, const struct td_peer_names *names)
{
    return td_peer_names_match(names, TD_PEER_NAME_DNS, arg, strlen(arg));
}

static const struct {
    const char *authorization, *dns, *claimed;
    enum router_tenant_verdict verdict;
    const char *says; /* the tenant, or part of the message */
} callers[] = {
    {"Bearer key-of-acme-0123456789", NULL, "", ROUTER_TENANT_OK, "acme"},
    {"bearer   second-key-of-acme-01234 ", NULL, "acme", ROUTER_TENANT_OK, "acme"},
    {"Bearer key-of-acme-0123456789", NULL, "beta", ROUTER_TENANT_DENIED,
     "tenant is \"beta\"; the caller is tenant \"acme\""},
    {"Bearer key-of-acme-0123456788", NULL, "", ROUTER_TENANT_UNKNOWN, "is no tenant's"},
    {"Bearer key-of-acme-012345678", NULL, "acme", ROUTER_TENANT_UNKNOWN, "is no tenant's"},
    {"Bearer short", NULL, "", ROUTER_TENANT_UNKNOWN, "has 5 bytes; keys have 16..512"},
    {"Bearer ", NULL, "", ROUTER_TENANT_UNKNOWN, "has 0 bytes"},
    {"Basic key-of-acme-0123456789", NULL, "", ROUTER_TENANT_UNKNOWN, "must be \"Bearer KEY\""},
    {"key-of-acme-0123456789", NULL, "", ROUTER_TENANT_UNKNOWN, "must be \"Bearer KEY\""},
    {"", NULL, "", ROUTER_TENANT_UNKNOWN, "must be \"Bearer KEY\""},
    /* who reads the file has no key */
    {"Bearer " ACME, NULL, "", ROUTER_TENANT_UNKNOWN, "is no tenant's"},
    {NULL, NULL, "", ROUTER_TENANT_UNKNOWN, "send a key"},
    {NULL, NULL, "acme", ROUTER_TENANT_UNKNOWN, "send a key"},
    {NULL, "a.beta.example", "", ROUTER_TENANT_OK, "beta"},
    {NULL, "a.gamma.example", "gamma", ROUTER_TENANT_OK, "gamma"},
    {NULL, "a.gamma.example", "beta", ROUTER_TENANT_DENIED, "the caller is tenant \"gamma\""},
    {NULL, "beta.example", "", ROUTER_TENANT_UNKNOWN, "no name of the caller's certificate"},
    {NULL, "both.beta.example", "", ROUTER_TENANT_OK, "beta"}, /* the first in the file */
    {"Bearer key-of-beta-0123456789", "a.beta.example", "beta", ROUTER_TENANT_OK, "beta"},
    /* a certificate that is nobody's */
    {"Bearer key-of-beta-0123456789", "other.example", "", ROUTER_TENANT_OK, "beta"},
    {"Bearer key-of-acme-0123456789", "a.beta.example", "", ROUTER_TENANT_DENIED,
     "the key is tenant \"acme\"'s and the certificate"},
    {"Bearer nobodys-key-0123456789", "a.beta.example", "", ROUTER_TENANT_UNKNOWN,
     "is no tenant's"},
};

static void test_who_a_caller_is(void **state)
{
    (void)state;
    struct router_tenants *t = parse(
        "{\"tenants\": [{\"name\": \"acme\", \"keys\": [\"" ACME "\", \"" ACME2
        "\"], \"weight\": 2.5, \"classes\": [\"bulk\", \"gold\"]},"
        "{\"name\": \"beta\", \"keys\": [\"" BETA
        "\"], \"certificates\": [\"*.beta.example\", \"URI:spiffe://x/beta\"]},"
        "{\"name\": \"gamma\", \"certificates\": [\"*.gamma.example\", \"both.beta.example\"]}]}");
    assert_int_equal(router_tenants_n(t), 3);
    assert_true(router_tenants_have_keys(t));
    for (size_t i = 0; i < sizeof callers / sizeof *callers; i++) {
        struct router_caller c = {.authorization = callers[i].authorization,
                                  .claimed = callers[i].claimed,
                                  .certificate_is = callers[i].dns ? dns_is : NULL,
                                  .arg = (void *)(uintptr_t)callers[i].dns};
        const struct router_tenant *who = NULL;
        struct td_err err = {0};
        enum router_tenant_verdict v = router_tenant_of(t, &c, &who, &err);
        const char *said = who ? who->name : err.msg;
        if (v != callers[i].verdict || !strstr(said, callers[i].says))
            fail_msg("row %zu: %d \"%s\"", i, v, said);
        if (strstr(err.msg, "0123456789")) fail_msg("row %zu tells a key: %s", i, err.msg);
        if (!who || strcmp(who->name, "acme")) continue;
        assert_true(who->weight == 2.5 && who->classes == 6 && who->first_class == 2);
    }
    router_tenants_free(t);
    t = parse("{\"tenants\": []}");
    struct router_caller c = {.authorization = "Bearer key-of-acme-0123456789", .claimed = ""};
    const struct router_tenant *who = NULL;
    struct td_err err;
    assert_int_equal(router_tenant_of(t, &c, &who, &err), ROUTER_TENANT_UNKNOWN);
    router_tenants_free(t);
}

#define T(fields) "{\"tenants\": [{" fields "}]}"
#define KEY "\"keys\": [\"" ACME "\"]"
static const struct {
    const char *text, *says;
} bad_files[] = {
    {"", "file"},
    {"[]", "must be {\"tenants\": [...]}"},
    {"{\"tenants\": {}}", "must be"},
    {"{\"tenants\": [], \"x\": 1}", "nothing else"},
    {"{\"tenants\": [1]}", "tenants[0] is not an object"},
    {T(KEY), "tenants[0]: name must have 1..64 bytes"},
    {T("\"name\": \"\", " KEY), "name must have"},
    {T("\"name\": 7, " KEY), "name"},
    {T("\"name\": \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\", " KEY),
     "name must have 1..64 bytes"},
    {T("\"name\": \"a\\nb\", " KEY), "control character"},
    {T("\"name\": \"a\""), "\"a\" has neither keys nor certificates"},
    {T("\"name\": \"a\", " KEY ", \"wieght\": 1"), "\"wieght\" is no field"},
    {T("\"name\": \"a\", " KEY ", \"weight\": 0"), "weight is 0"},
    {T("\"name\": \"a\", " KEY ", \"weight\": \"2\""), "weight"},
    {T("\"name\": \"a\", " KEY ", \"weight\": 1e9"), "weight"},
    {T("\"name\": \"a\", \"keys\": []"), "keys has 0 entries, must have 1..16"},
    {T("\"name\": \"a\", \"keys\": \"k\""), "keys is not a list"},
    {T("\"name\": \"a\", \"keys\": [1]"), "keys[0] is not a text"},
    {T("\"name\": \"a\", \"keys\": [\"my-secret-key-in-clear\"]"), "keys[0] is not \"sha256:\""},
    {T("\"name\": \"a\", \"keys\": [\"" ACME "0\"]"), "64 hexadecimal digits"},
    {T("\"name\": \"a\", \"certificates\": [\"a,b\"]"), "without a comma"},
    {T("\"name\": \"a\", \"certificates\": [\"a.*.b\"]"), "certificates"},
    {T("\"name\": \"a\", " KEY ", \"classes\": [\"silver\"]"), "classes[0] is \"silver\""},
    {T("\"name\": \"a\", " KEY ", \"classes\": []"), "classes has 0"},
    {T("\"name\": \"a\", \"keys\": [{}]"), "keys[0].key is not \"sha256:\""},
    {T("\"name\": \"a\", \"keys\": [{\"key\": \"my-secret\"}]"), "keys[0].key is not"},
    {T("\"name\": \"a\", \"keys\": [{\"key\": \"" ACME "\", \"weight\": 2}]"),
     "keys[0]: \"weight\" is no field"},
    {T("\"name\": \"a\", \"keys\": [{\"key\": \"" ACME "\", \"requests_per_s\": 0}]"),
     "keys[0]: requests_per_s is 0"},
    {T("\"name\": \"a\", \"classes\": [\"bulk\"], \"keys\": [{\"key\": \"" ACME
       "\", \"classes\": [\"gold\"]}]"),
     "keys[0]: classes[0] is \"gold\", which its tenant may not use"},
    {"{\"tenants\": [{\"name\": \"a\", " KEY "}, {\"name\": \"a\", " KEY "}]}",
     "tenant \"a\" is there twice"},
    {"{\"tenants\": [{\"name\": \"a\", " KEY "}, {\"name\": \"b\", " KEY "}]}",
     "have the same key"},
};

static void test_bad_files(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_files / sizeof *bad_files; i++) {
        struct router_tenants *t = NULL;
        struct td_err err = {0};
        td_status s = router_tenants_parse(bad_files[i].text, strlen(bad_files[i].text), "file",
                                           &classes, &t, &err);
        if (s == TD_OK || t || !strstr(err.msg, bad_files[i].says))
            fail_msg("%s: %s \"%s\"", bad_files[i].text, td_status_name(s), err.msg);
        if (strstr(err.msg, "my-secret")) fail_msg("tells a key: %s", err.msg);
    }
    struct router_tenants *t = NULL;
    struct td_err err = {0};
    assert_int_not_equal(router_tenants_load("/no/such/file", &classes, &t, &err), TD_OK);
    assert_non_null(strstr(err.msg, "/no/such/file"));
}

#define S 1000000000ull

/* Any thread sees that a tenant was told to wait, until the wait is over, or may be. */
static void test_waits_are_seen(void **state)
{
    (void)state;
    struct router_tenants *t = parse("{\"tenants\": [{\"name\": \"a\", \"keys\": [\"" ACME
                                     "\"], \"requests_per_s\": 2, \"tokens_per_s\": 100}]}");
    struct tenant_use *uses = NULL;
    struct td_err err = {0};
    uint32_t wait_ms = 7;
    assert_int_equal(tenant_use_look(NULL, S, &wait_ms, &err), TD_OK);
    assert_int_equal(tenant_uses_follow(&uses, t, S, &err), TD_OK);
    struct tenant_use *u = router_tenants_at(t, 0)->use;
    assert_int_equal(tenant_use_take(u, 2, S, &wait_ms, &err), TD_OK);
    assert_int_equal(tenant_use_look(u, S, &wait_ms, &err), TD_OK); /* nobody was told */
    assert_int_equal(wait_ms, 7);
    assert_int_equal(tenant_use_take(u, 1, S, &wait_ms, &err), TD_ERR_AGAIN);
    assert_int_equal(tenant_use_look(u, S + S / 4, &wait_ms, &err), TD_ERR_AGAIN);
    assert_int_equal(wait_ms, 250);
    assert_string_equal(err.msg,
                        "tenant \"a\" is above its requests_per_s, 2: ask again in 250 ms");
    assert_int_equal(tenant_use_look(u, S + S / 2 + 1, &wait_ms, &err), TD_OK);
    assert_int_equal(tenant_use_take(u, 1, S + S / 2 + 1, &wait_ms, &err), TD_OK);
    /* Of tokens; a key of it waits with it. */
    struct tenant_use key = {.tenants = u};
    tenant_use_pay(u, 250);
    assert_int_equal(tenant_use_take(u, 1, 2 * S, &wait_ms, &err), TD_ERR_AGAIN);
    assert_int_equal(tenant_use_look(&key, 3 * S, &wait_ms, &err), TD_ERR_AGAIN);
    assert_non_null(strstr(err.msg, "tenant \"a\" is above its tokens_per_s, 100: ask again in "));
    /* What is given back, or other rates, may have ended the wait: the loop says. */
    tenant_use_give_back(u, 0, 0);
    assert_int_equal(tenant_use_look(u, 2 * S, &wait_ms, &err), TD_OK);
    assert_int_equal(tenant_use_take(u, 1, 2 * S, &wait_ms, &err), TD_ERR_AGAIN);
    assert_int_equal(tenant_uses_follow(&uses, t, 2 * S, &err), TD_OK);
    assert_int_equal(tenant_use_look(u, 2 * S, &wait_ms, &err), TD_OK);
    router_tenants_free(t);
    tenant_uses_free(uses);
}

static void test_rates(void **state)
{
    (void)state;
    struct router_tenants *t = parse(
        "{\"tenants\": [{\"name\": \"a\", \"keys\": [\"" ACME
        "\"], \"requests_per_s\": 2, \"tokens_per_s\": 100}, {\"name\": \"b\", \"keys\": [\"" BETA
        "\"]}]}");
    struct tenant_use *uses = NULL;
    struct td_err err = {0};
    uint32_t wait_ms = 7;
    assert_int_equal(tenant_uses_follow(&uses, t, S, &err), TD_OK);
    assert_null(router_tenants_at(t, 1)->use); /* no rate */
    struct tenant_use *u = router_tenants_at(t, 0)->use;
    /* One second's worth at once, then two a second. */
    assert_int_equal(tenant_use_take(u, 1, S, &wait_ms, &err), TD_OK);
    assert_int_equal(tenant_use_take(u, 1, S, &wait_ms, &err), TD_OK);
    assert_int_equal(wait_ms, 7); /* untouched */
    assert_int_equal(tenant_use_take(u, 1, S, &wait_ms, &err), TD_ERR_AGAIN);
    assert_int_equal(wait_ms, 500);
    assert_string_equal(err.msg,
                        "tenant \"a\" is above its requests_per_s, 2: ask again in 500 ms");
    assert_int_equal(tenant_use_take(u, 1, S + S / 2, &wait_ms, &err), TD_OK);
    /* Choices count one by one, and may be owed. */
    assert_int_equal(tenant_use_take(u, 6, 10 * S, &wait_ms, &err), TD_OK);
    assert_int_equal(tenant_use_take(u, 1, 10 * S, &wait_ms, &err), TD_ERR_AGAIN);
    assert_int_equal(wait_ms, 2500);
    /* Tokens, too: an answer longer than a second's worth is paid before the next begins. */
    u->tokens -= 350;
    assert_int_equal(tenant_use_take(u, 1, 20 * S, &wait_ms, &err), TD_OK); /* paid by then */
    u->tokens -= 350;
    assert_int_equal(tenant_use_take(u, 1, 21 * S, &wait_ms, &err), TD_ERR_AGAIN);
    assert_string_equal(err.msg,
                        "tenant \"a\" is above its tokens_per_s, 100: ask again in 1510 ms");
    /* A new file gives nobody a full bucket, and its rates count from now on. */
    struct router_tenants *fresh = parse("{\"tenants\": [{\"name\": \"a\", \"keys\": [\"" ACME
                                         "\"], \"tokens_per_s\": 1000}]}");
    assert_int_equal(tenant_uses_follow(&uses, fresh, 21 * S, &err), TD_OK);
    assert_ptr_equal(router_tenants_at(fresh, 0)->use, u);
    router_tenants_free(t);
    assert_int_equal(tenant_use_take(u, 1, 21 * S, &wait_ms, &err), TD_ERR_AGAIN);
    assert_int_equal(wait_ms, 151);
    for (int i = 0; i < 50; i++) /* requests have no rate any more */
        assert_int_equal(tenant_use_take(u, 1, 22 * S, &wait_ms, &err), TD_OK);
    /* What was asked without a rate is not owed when a later file sets one. */
    struct router_tenants *again = parse("{\"tenants\": [{\"name\": \"a\", \"keys\": [\"" ACME
                                         "\"], \"requests_per_s\": 2}]}");
    assert_int_equal(tenant_uses_follow(&uses, again, 24 * S, &err), TD_OK);
    router_tenants_free(fresh);
    assert_int_equal(tenant_use_take(u, 1, 24 * S, &wait_ms, &err), TD_OK);
    tenant_use_pay(u, 100000);
    fresh = parse("{\"tenants\": [{\"name\": \"a\", \"keys\": [\"" ACME
                  "\"], \"requests_per_s\": 2, \"tokens_per_s\": 10}]}");
    assert_int_equal(tenant_uses_follow(&uses, fresh, 25 * S, &err), TD_OK);
    router_tenants_free(again);
    assert_int_equal(tenant_use_take(u, 1, 26 * S, &wait_ms, &err), TD_OK);
    router_tenants_free(fresh);
    tenant_uses_free(uses);
}

/* A rate that one file does not have: the next finds in its bucket what was left. */
static void test_a_rate_that_comes_back(void **state)
{
    (void)state;
    struct tenant_use *uses = NULL, *u;
    struct td_err err = {0};
    uint32_t wait_ms = 0;
    for (int i = 0; i < 3; i++) {
        struct router_tenants *t =
            parse(i == 1 ? "{\"tenants\": [{\"name\": \"a\", \"keys\": [\"" ACME
                           "\"], \"requests_per_s\": 100}]}"
                         : "{\"tenants\": [{\"name\": \"a\", \"keys\": [\"" ACME
                           "\"], \"requests_per_s\": 100, \"tokens_per_s\": 1000}]}");
        assert_int_equal(tenant_uses_follow(&uses, t, S, &err), TD_OK);
        u = router_tenants_at(t, 0)->use;
        router_tenants_free(t);
        assert_int_equal(tenant_use_take(u, 1, S, &wait_ms, &err), TD_OK);
    }
    tenant_use_pay(u, 900);
    assert_int_equal(tenant_use_take(u, 1, S, &wait_ms, &err), TD_OK);
    tenant_uses_free(uses);
}

/* A key may be one of its tenant's with less. Both rates hold. */
static void test_limits_of_a_key(void **state)
{
    (void)state;
    struct router_tenants *t = parse(
        "{\"tenants\": [{\"name\": \"a\", \"requests_per_s\": 3, \"weight\": 2, \"keys\": [\"" ACME
        "\", {\"key\": \"" ACME2
        "\", \"classes\": [\"bulk\"], \"requests_per_s\": 2, \"tokens_per_s\": 10}]}]}");
    struct tenant_use *uses = NULL;
    struct td_err err = {0};
    uint32_t wait_ms = 0;
    assert_int_equal(tenant_uses_follow(&uses, t, S, &err), TD_OK);
    const struct router_tenant *whole = NULL, *part = NULL;
    struct router_caller c = {.authorization = "Bearer key-of-acme-0123456789", .claimed = "a"};
    assert_int_equal(router_tenant_of(t, &c, &whole, &err), ROUTER_TENANT_OK);
    c.authorization = "Bearer second-key-of-acme-01234";
    assert_int_equal(router_tenant_of(t, &c, &part, &err), ROUTER_TENANT_OK);
    assert_string_equal(whole->name, "a");
    assert_string_equal(part->name, "a");
    assert_true(whole->classes == 7 && whole->first_class == 0 && whole->weight == 2);
    assert_true(part->classes == 4 && part->first_class == 2 && part->weight == 2);
    /* Two by this key, one more by the other: then the tenant's three are used up. */
    assert_int_equal(tenant_use_take(part->use, 2, S, &wait_ms, &err), TD_OK);
    assert_int_equal(tenant_use_take(part->use, 1, S, &wait_ms, &err), TD_ERR_AGAIN);
    assert_string_equal(err.msg, "this key of tenant \"a\" is above its requests_per_s, 2: ask "
                                 "again in 500 ms");
    assert_int_equal(tenant_use_take(whole->use, 1, S, &wait_ms, &err), TD_OK);
    assert_int_equal(tenant_use_take(whole->use, 1, S, &wait_ms, &err), TD_ERR_AGAIN);
    /* Given back to the key: both have one again. */
    tenant_use_give_back(part->use, 1, 0);
    assert_int_equal(tenant_use_take(part->use, 1, S, &wait_ms, &err), TD_OK);
    assert_int_equal(tenant_use_take(whole->use, 1, S, &wait_ms, &err), TD_ERR_AGAIN);
    assert_int_equal(tenant_use_take(part->use, 1, S, &wait_ms, &err), TD_ERR_AGAIN);
    /* The key has one again, and its tenant none. */
    tenant_use_pay(whole->use, 5); /* tokens: the tenant has no rate of them */
    assert_int_equal(tenant_use_take(whole->use, 1, S + S / 2, &wait_ms, &err), TD_OK);
    assert_int_equal(tenant_use_take(part->use, 1, S + S / 2, &wait_ms, &err), TD_ERR_AGAIN);
    assert_memory_equal(err.msg, "tenant \"a\" is above", 19);
    tenant_use_pay(part->use, 30);
    assert_int_equal(tenant_use_take(part->use, 1, 3 * S, &wait_ms, &err), TD_ERR_AGAIN);
    assert_non_null(strstr(err.msg, "this key of tenant \"a\" is above its tokens_per_s, 10"));
    assert_int_equal(tenant_use_take(whole->use, 1, 3 * S, &wait_ms, &err), TD_OK);
    router_tenants_free(t);
    tenant_uses_free(uses);
}

static void test_salts(void **state)
{
    (void)state;
    static const char *const texts[][2] = {{"a", ""},   {"", "a"},   {"ab", "c"}, {"a", "bc"},
                                           {"abc", ""}, {"", "abc"}, {"b", ""},   {"a", "b"}};
    enum { N = sizeof texts / sizeof *texts };
    struct td_prefix_salt s[N], none = router_cache_salt("", "");
    assert_true(none.lo == 0 && none.hi == 0);
    for (int i = 0; i < N; i++) {
        s[i] = router_cache_salt(texts[i][0], texts[i][1]);
        struct td_prefix_salt again = router_cache_salt(texts[i][0], texts[i][1]);
        assert_true(s[i].lo == again.lo && s[i].hi == again.hi && (s[i].lo || s[i].hi));
        for (int k = 0; k < i; k++) assert_true(s[i].lo != s[k].lo && s[i].hi != s[k].hi);
    }
    /* Fixed for ever: workers keep blocks under it while routers of other versions come. printf
       'tandem prefix salt 1\\0\\001a\\0' | sha256sum */
    uint8_t bytes[16], want[16] = {0x4f, 0xbf, 0x1d, 0xe1, 0x1f, 0xba, 0xd0, 0x98,
                                   0x79, 0xa5, 0x5f, 0x32, 0x80, 0x03, 0xc6, 0x4c};
    memcpy(bytes, &s[0], 16);
    assert_memory_equal(bytes, want, 16);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_who_a_caller_is), cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_rates),           cmocka_unit_test(test_waits_are_seen),
        cmocka_unit_test(test_limits_of_a_key), cmocka_unit_test(test_a_rate_that_comes_back),
        cmocka_unit_test(test_salts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
