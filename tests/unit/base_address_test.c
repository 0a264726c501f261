/* base_address_test.c - hosts and ports to one text and back out of brackets; what is neither is
 * refused by name. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <netdb.h>
#include <netinet/in.h>
#include <string.h>

#include "common/base/address.h"

static void joins(void **state)
{
    (void)state;
    static const struct {
        const char *host;
        uint16_t port;
        const char *address, *bare;
    } cases[] = {
        {"localhost", 80, "localhost:80", "localhost"},
        {"worker-0.tandem-workers", 65535, "worker-0.tandem-workers:65535",
         "worker-0.tandem-workers"},
        {"under_score", 1, "under_score:1", "under_score"},
        {"10.0.0.1", 7610, "10.0.0.1:7610", "10.0.0.1"},
        {"0.0.0.0", 0, "0.0.0.0:0", "0.0.0.0"},
        {"::1", 7610, "[::1]:7610", "::1"},
        {"[::1]", 7610, "[::1]:7610", "::1"},
        {"::", 7610, "[::]:7610", "::"},
        {"fd00:0:0:0:0:0:0:2", 9, "[fd00:0:0:0:0:0:0:2]:9", "fd00:0:0:0:0:0:0:2"},
        {"::ffff:10.0.0.1", 9, "[::ffff:10.0.0.1]:9", "::ffff:10.0.0.1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[64] = "", host[64] = "";
        struct td_err err = {0};
        if (td_address_join(cases[i].host, cases[i].port, text, sizeof text, &err))
            fail_msg("%s: %s", cases[i].host, err.msg);
        assert_string_equal(text, cases[i].address);
        assert_int_equal(td_address_host(cases[i].host, host, sizeof host, &err), TD_OK);
        assert_string_equal(host, cases[i].bare);
        /* what came out of brackets goes in again */
        assert_int_equal(td_address_join(host, cases[i].port, text, sizeof text, &err), TD_OK);
        assert_string_equal(text, cases[i].address);
    }
}

static void refuses(void **state)
{
    (void)state;
    static const struct {
        const char *host, *says;
    } cases[] = {
        {"", "empty"},
        {"host:80", "no port"},
        {"10.0.0.1:80", "no port"},
        {"[::1]:80", "no port"},
        {"1:2:3", "no port"},
        {"[host]", "brackets"},
        {"[10.0.0.1]", "brackets"},
        {"[]", "brackets"},
        {"[::1", "neither"},
        {"::1]", "neither"},
        {"fe80::1%lo", "zone"},
        {"[fe80::1%lo]", "brackets"},
        {"a b", "0x20"},
        {"a\nb", "0x0a"},
        {"h\xc3\xb6st", "0xc3"},
        {"a/b", "0x2f"},
        {"a[b", "0x5b"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[64] = "untouched", host[64] = "untouched";
        struct td_err err = {0};
        if (td_address_join(cases[i].host, 80, text, sizeof text, &err) != TD_ERR_INVALID)
            fail_msg("\"%s\" gave \"%s\"", cases[i].host, text);
        if (!strstr(err.msg, cases[i].says))
            fail_msg("\"%s\": \"%s\" does not say \"%s\"", cases[i].host, err.msg, cases[i].says);
        assert_int_equal(td_address_host(cases[i].host, host, sizeof host, NULL), TD_ERR_INVALID);
        assert_string_equal(text, "untouched");
        assert_string_equal(host, "untouched");
    }
}

static void room_is_counted_to_the_byte(void **state)
{
    (void)state;
    static const struct {
        const char *host;
        size_t join_bytes, host_bytes; /* the terminating zero included */
    } cases[] = {{"::1", 9, 4}, {"[::1]", 9, 4}, {"localhost", 13, 10}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[32], host[32];
        assert_int_equal(td_address_join(cases[i].host, 123, text, cases[i].join_bytes + 1, NULL),
                         TD_OK);
        assert_int_equal(strlen(text) + 1, cases[i].join_bytes + 1);
        assert_int_equal(td_address_join(cases[i].host, 123, text, cases[i].join_bytes, NULL),
                         TD_ERR_INVALID);
        assert_int_equal(td_address_host(cases[i].host, host, cases[i].host_bytes, NULL), TD_OK);
        assert_int_equal(td_address_host(cases[i].host, host, cases[i].host_bytes - 1, NULL),
                         TD_ERR_INVALID);
    }
    char name[600], out[700];
    for (size_t n = 250; n < sizeof name; n++) {
        memset(name, 'a', n);
        name[n] = 0;
        struct td_err err = {0};
        td_status s = td_address_join(name, 1, out, sizeof out, &err);
        if (s != (n <= 255 ? TD_OK : TD_ERR_INVALID))
            fail_msg("a name of %zu bytes: %d %s", n, s, err.msg);
    }
}

static void resolves(void **state)
{
    (void)state;
    static const struct {
        const char *address;
        bool listening;
        int family; /* 0: refused */
        const char *says;
    } cases[] = {
        {"127.0.0.1:80", true, AF_INET, NULL},
        {"127.0.0.1:0", true, AF_INET, NULL},
        {"[::1]:8080", true, AF_INET6, NULL},
        {"[::1]:8080", false, AF_INET6, NULL},
        {"::1:80", true, AF_INET6, NULL}, /* the last colon is the port's */
        {"127.0.0.1", true, 0, "t is \"127.0.0.1\", must be host:port"},
        {"", true, 0, "must be host:port"},
        {"127.0.0.1:", true, 0, "the port must be 0..65535"},
        {"127.0.0.1:65536", true, 0, "the port must be 0..65535"},
        {"127.0.0.1:+80", true, 0, "the port must be 0..65535"},
        {"127.0.0.1: 80", true, 0, "the port must be 0..65535"},
        {"127.0.0.1:80x", true, 0, "the port must be 0..65535"},
        {"127.0.0.1:http", true, 0, "the port must be 0..65535"},
        {"[]:80", true, 0, "t \"[]:80\""},
        {"[::1:80", true, 0, "t \"[::1:80\""},
        {"no host:80", true, 0, "t \"no host:80\""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct addrinfo *list = NULL;
        struct td_err err = {0};
        td_status s = td_address_resolve("t", cases[i].address, cases[i].listening, &list, &err);
        if (!cases[i].family) {
            if (s != TD_ERR_INVALID || !strstr(err.msg, cases[i].says))
                fail_msg("\"%s\" gave %d \"%s\"", cases[i].address, s, err.msg);
            continue;
        }
        if (s || list->ai_family != cases[i].family)
            fail_msg("\"%s\" gave %d \"%s\"", cases[i].address, s, err.msg);
        freeaddrinfo(list);
    }
    struct addrinfo *any, *own; /* no host: everything to listen on, loopback to dial */
    assert_int_equal(td_address_resolve("t", ":80", true, &any, NULL), TD_OK);
    assert_int_equal(td_address_resolve("t", "0.0.0.0:80", true, &own, NULL), TD_OK);
    if (any->ai_family == AF_INET)
        assert_memory_equal(any->ai_addr, own->ai_addr, sizeof(struct sockaddr_in));
    freeaddrinfo(any);
    freeaddrinfo(own);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(joins), cmocka_unit_test(refuses),
                                       cmocka_unit_test(room_is_counted_to_the_byte),
                                       cmocka_unit_test(resolves)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
