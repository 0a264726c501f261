/* origins.c - see origins.h. */
#include "router/http/origins.h"

#include <string.h>
#include <strings.h>

/* The next origin at *at, or NULL at the list's end. */
static const char *next_origin(const char **at, size_t *ret_len)
{
    const char *origin = *at + strspn(*at, ", ");
    *ret_len = strcspn(origin, ", ");
    *at = origin + *ret_len;
    return *ret_len ? origin : NULL;
}

static bool all_in(const char *text, size_t n, const char *bytes)
{
    return n > 0 && strspn(text, bytes) >= n;
}

#define LETTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
#define DIGITS "0123456789"

static bool is_origin(const char *text, size_t n)
{
    if (n == 4 && !strncmp(text, "null", 4)) return true;
    const char *end = text + n, *mark = memchr(text, ':', n);
    if (!mark || end - mark <= 3 || strncmp(mark, "://", 3) != 0) return false;
    if (!all_in(text, (size_t)(mark - text), LETTERS DIGITS "+-.")) return false;
    const char *host = mark + 3, *port = memchr(host, ':', (size_t)(end - host));
    if (*host == '[') { /* an IPv6 address has colons of its own */
        const char *close = memchr(host, ']', (size_t)(end - host));
        if (!close || !all_in(host + 1, (size_t)(close - host - 1), DIGITS "abcdefABCDEF:."))
            return false;
        port = close + 1 < end ? close + 1 : NULL;
        if (port && *port != ':') return false;
    } else if (!all_in(host, (size_t)((port ? port : end) - host), LETTERS DIGITS "-._")) {
        return false;
    }
    return !port || (end - port <= 6 && all_in(port + 1, (size_t)(end - port - 1), DIGITS));
}

td_status http_origins_check(const char *list, struct td_err *err)
{
    const char *at = list, *origin;
    size_t n;
    if (!strcmp(list, "*")) return TD_OK;
    while ((origin = next_origin(&at, &n)))
        if (!is_origin(origin, n))
            return td_fail(err, TD_ERR_INVALID,
                           "http_cors_origins: \"%.*s\" is not an origin: must be like "
                           "https://a.example or http://localhost:3000 without a path, or \"*\" "
                           "alone",
                           (int)(n < 100 ? n : 100), origin);
    return TD_OK;
}

bool http_origins_have(const char *list, const char *origin)
{
    const char *at = list, *listed;
    size_t n = strlen(origin), len;
    if (!strcmp(list, "*")) return true;
    while ((listed = next_origin(&at, &len)))
        if (len == n && !strncasecmp(listed, origin, n)) return true;
    return false;
}
