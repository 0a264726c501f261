/* address.c - splits and joins "host:port" with inet_pton and string checks; only
 * td_address_resolve asks the resolver. */
#include "common/base/address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { HOST_MAX = 256 }; /* a DNS name has at most 253 bytes */

td_status td_address_host(const char *text, char *ret_host, size_t host_bytes, struct td_err *err)
{
    char host[HOST_MAX];
    uint8_t raw[16];
    size_t n = strlen(text);
    bool bracket = n >= 2 && text[0] == '[' && text[n - 1] == ']';
    if (n == 0) return td_fail(err, TD_ERR_INVALID, "host is empty");
    if (n >= sizeof host + 2)
        return td_fail(err, TD_ERR_INVALID, "host \"%.40s...\" has %zu bytes, limit %d", text, n,
                       HOST_MAX - 1);
    int wrote = snprintf(host, sizeof host, "%.*s", (int)(n - (bracket ? 2 : 0)), text + bracket);
    if ((size_t)wrote >= sizeof host || (size_t)wrote >= host_bytes)
        return td_fail(err, TD_ERR_INVALID, "host \"%.40s...\" has %d bytes, limit %zu", text,
                       wrote, (host_bytes < sizeof host ? host_bytes : sizeof host) - 1);
    bool six = inet_pton(AF_INET6, host, raw) == 1;
    if (bracket && !six)
        return td_fail(err, TD_ERR_INVALID,
                       "host \"%s\": no IPv6 address stands between the brackets", text);
    if (!six && strchr(host, ':'))
        return td_fail(
            err, TD_ERR_INVALID,
            "host \"%s\" is neither a name nor an address: no port, and no zone, may stand here",
            text);
    for (const char *p = host; *p; p++)
        if ((unsigned char)*p <= ' ' || (unsigned char)*p >= 0x7f || strchr("[]/%@\"", *p))
            return td_fail(err, TD_ERR_INVALID, "host has the byte 0x%02x, which no host has",
                           (unsigned char)*p);
    memcpy(ret_host, host, (size_t)wrote + 1);
    return TD_OK;
}

td_status td_address_join(const char *host, uint16_t port, char *ret_address, size_t address_bytes,
                          struct td_err *err)
{
    char bare[HOST_MAX], text[HOST_MAX + 16];
    td_status s = td_address_host(host, bare, sizeof bare, err);
    if (s) return s;
    int n = snprintf(text, sizeof text, strchr(bare, ':') ? "[%s]:%u" : "%s:%u", bare, port);
    if ((size_t)n >= address_bytes)
        return td_fail(err, TD_ERR_INVALID, "address \"%.40s...\" has %d bytes, limit %zu", text, n,
                       address_bytes - 1);
    memcpy(ret_address, text, (size_t)n + 1);
    return TD_OK;
}

td_status td_address_resolve(const char *field, const char *address, bool listening,
                             struct addrinfo **ret_list, struct td_err *err)
{
    char host[HOST_MAX];
    const char *colon = strrchr(address, ':');
    size_t n = colon ? (size_t)(colon - address) : sizeof host;
    if (n >= sizeof host)
        return td_fail(err, TD_ERR_INVALID, "%s is \"%.100s\", must be host:port", field, address);
    char *end;
    /* checked here, because getaddrinfo takes 65536 + 80 for 80 */
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (colon[1] < '0' || colon[1] > '9' || *end || port > 65535)
        return td_fail(err, TD_ERR_INVALID, "%s is \"%.100s\": the port must be 0..65535", field,
                       address);
    bool bracketed = n > 2 && address[0] == '[' && colon[-1] == ']';
    snprintf(host, sizeof host, "%.*s", (int)(bracketed ? n - 2 : n), address + bracketed);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICSERV | (listening ? AI_PASSIVE : 0)};
    int e = getaddrinfo(host[0] ? host : NULL, colon + 1, &hints, ret_list);
    if (e)
        return td_fail(err, TD_ERR_INVALID, "%s \"%.100s\": %s", field, address, gai_strerror(e));
    return TD_OK;
}

bool td_address_is_loopback(const char *address)
{
    static const char *const prefixes[] = {"ipv4:", "ipv6:", "dns:///", "dns:"};
    char host[HOST_MAX];
    uint8_t raw[16];
    static const uint8_t six[16] = {[15] = 1}, mapped[13] = {[10] = 0xff, [11] = 0xff, [12] = 127};
    if (!strncmp(address, "unix:", 5) || !strncmp(address, "unix-abstract:", 14)) return true;
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (!strncmp(address, prefixes[i], strlen(prefixes[i]))) {
            address += strlen(prefixes[i]);
            break;
        }
    const char *colon = strrchr(address, ':');
    size_t n = colon ? (size_t)(colon - address) : strlen(address);
    if (n >= 2 && address[0] == '[' && address[n - 1] == ']') {
        address++;
        n -= 2;
    }
    if (n == 0 || n >= sizeof host) return false;
    memcpy(host, address, n);
    host[n] = 0;
    if (inet_pton(AF_INET, host, raw) == 1) return raw[0] == 127;
    if (inet_pton(AF_INET6, host, raw) == 1)
        return !memcmp(raw, six, sizeof six) || !memcmp(raw, mapped, sizeof mapped);
    return !strcasecmp(host, "localhost");
}
