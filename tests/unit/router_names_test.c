/* router_names_test.c - a name that stands for several addresses is as many routers, and each of
 * them must show a certificate with that name; addresses are looked up nowhere. The resolver is the
 * test's own. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <arpa/inet.h>
#include <netdb.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/worker/router_names.h"

enum { MAX = 8 };

static const struct {
    const char *name, *address;
} known[] = {
    {"registry", "10.0.0.1"}, {"registry", "10.0.0.2"}, {"registry", "10.0.0.1"},
    {"registry", "fd00::3"},  {"alias", "10.0.0.2"},    {"alias", "10.0.0.9"},
};
static atomic_int n_looks, n_literal;

static struct addrinfo *entry(const char *address, uint16_t port)
{
    struct addrinfo *a = calloc(1, sizeof *a + sizeof(struct sockaddr_in6));
    struct sockaddr_in *four = (struct sockaddr_in *)(a + 1);
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)(a + 1);
    a->ai_addr = (struct sockaddr *)(a + 1);
    if (inet_pton(AF_INET, address, &four->sin_addr) == 1) {
        a->ai_family = four->sin_family = AF_INET;
        four->sin_port = htons(port);
        a->ai_addrlen = sizeof *four;
    } else {
        assert_int_equal(inet_pton(AF_INET6, address, &six->sin6_addr), 1);
        a->ai_family = six->sin6_family = AF_INET6;
        six->sin6_port = htons(port);
        a->ai_addrlen = sizeof *six;
    }
    return a;
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                struct addrinfo **ret_list)
{
    (void)hints;
    uint8_t raw[16];
    struct addrinfo **end = ret_list;
    n_looks++;
    n_literal += inet_pton(AF_INET, node, raw) == 1;
    *ret_list = NULL;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, node)) {
            *end = entry(known[i].address, (uint16_t)strtoul(service, NULL, 10));
            end = &(*end)->ai_next;
        }
    return *ret_list ? 0 : EAI_NONAME;
}

void freeaddrinfo(struct addrinfo *list)
{
    while (list) {
        struct addrinfo *next = list->ai_next;
        free(list);
        list = next;
    }
}

/* What is known after the first look. */
static size_t routers_of(const char *list, struct td_router_target *ret_targets)
{
    struct td_router_names *names = NULL;
    struct td_err err = {0};
    uint64_t version = 0, until_ns = td_deadline_after_ms(td_now_ns(), 30000);
    size_t n = 0;
    if (td_router_names_open(list, MAX, &names, &err)) fail_msg("%s: %s", list, err.msg);
    while (!version && td_now_ns() < until_ns)
        n = td_router_names_get(names, &version, ret_targets);
    assert_int_equal(version, 1);
    td_router_names_close(names);
    return n;
}

static void check(const char *list, const char *const want[][2], size_t n_want)
{
    struct td_router_target got[MAX] = {0};
    size_t n = routers_of(list, got);
    for (size_t i = 0; i < n && i < n_want; i++) {
        assert_string_equal(got[i].target, want[i][0]);
        assert_string_equal(got[i].host, want[i][1]);
    }
    assert_int_equal(n, n_want);
}

static void several_addresses(void **state)
{
    (void)state;
    static const char *const one[][2] = {{"10.0.0.1:7601", "registry"},
                                         {"10.0.0.2:7601", "registry"},
                                         {"[fd00::3]:7601", "registry"}};
    check("registry:7601", one, 3);
    /* an address that two names have is one router, by the first name */
    static const char *const two[][2] = {{"10.0.0.1:7601", "registry"},
                                         {"10.0.0.2:7601", "registry"},
                                         {"[fd00::3]:7601", "registry"},
                                         {"10.0.0.9:7601", "alias"}};
    check(" registry:7601 , alias:7601", two, 4);
    static const char *const ports[][2] = {{"10.0.0.2:1", "alias"},
                                           {"10.0.0.9:1", "alias"},
                                           {"10.0.0.2:2", "alias"},
                                           {"10.0.0.9:2", "alias"}};
    check("alias:1,alias:2", ports, 4);
}

static void addresses_are_as_they_are(void **state)
{
    (void)state;
    static const char *const want[][2] = {
        {"10.0.0.7:80", ""}, {"[::1]:80", ""}, {"dns:registry:80", ""}, {"unix:/run/router", ""}};
    int before = n_looks;
    check("10.0.0.7:80,[::1]:80,dns:registry:80,unix:/run/router", want, 4);
    assert_int_equal(n_looks, before);
    static const char *const mixed[][2] = {
        {"10.0.0.7:80", ""}, {"10.0.0.2:5", "alias"}, {"10.0.0.9:5", "alias"}};
    check("10.0.0.7:80,alias:5", mixed, 3);
    check("nobody:5,10.0.0.7:80", mixed, 1);
    assert_int_equal(n_literal, 0);
}

static void no_more_than_fit(void **state)
{
    (void)state;
    struct td_router_target got[MAX];
    assert_int_equal(routers_of("registry:1,registry:2,registry:3,registry:4", got), MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(several_addresses),
        cmocka_unit_test(addresses_are_as_they_are),
        cmocka_unit_test(no_more_than_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
