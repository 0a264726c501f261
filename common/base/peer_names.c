/* peer_names.c - parses patterns of names and matches them. A pattern is kept as its kind, its
 * text, and whether it has a star. */
#include "common/base/peer_names.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { MAX_PATTERNS = 64, MAX_PATTERN_CHARS = 512, MAX_ADDRESS_CHARS = 64 };

struct pattern {
    enum td_peer_name_kind kind;
    bool star;  /* DNS: one label stands before text; URI: anything follows it */
    int family; /* IP */
    uint8_t address[16];
    size_t n;
    char text[MAX_PATTERN_CHARS + 1]; /* DNS: with a star it begins at the dot */
};

struct td_peer_names {
    size_t n;
    struct pattern patterns[];
};

static bool is_label_char(char c) { return isalnum((unsigned char)c) || c == '-' || c == '_'; }

/* A DNS name: labels of letters, digits, - and _, none empty. */
static bool is_dns_name(const char *s, size_t n)
{
    size_t in_label = 0;
    for (size_t i = 0; i < n; i++) {
        if (s[i] == '.' && in_label == 0) return false;
        if (s[i] != '.' && !is_label_char(s[i])) return false;
        in_label = s[i] == '.' ? 0 : in_label + 1;
    }
    return n > 0 && n < 254 && in_label > 0;
}

/* The address family, or 0 when the text is not an address. */
static int parse_address(const char *text, uint8_t *ret_address)
{
    if (inet_pton(AF_INET, text, ret_address) == 1) return AF_INET;
    return inet_pton(AF_INET6, text, ret_address) == 1 ? AF_INET6 : 0;
}

/* NULL, or a text that says what is wrong with the pattern. */
static const char *parse_uri(struct pattern *p)
{
    const char *colon = strchr(p->text, ':');
    if (!colon || !isalpha((unsigned char)p->text[0]))
        return "holds no scheme (URI:spiffe://..., URI:urn:...)";
    for (const char *c = p->text; c < colon; c++)
        if (!isalnum((unsigned char)*c) && !strchr("+-.", *c))
            return "holds no scheme (URI:spiffe://..., URI:urn:...)";
    for (const char *c = p->text; *c; c++)
        if (*c <= ' ' || *c > '~') return "holds a character that no URI has";
    char *star = strchr(p->text, '*');
    if (!star) return colon[1] ? NULL : "holds nothing behind its scheme";
    if (star[1]) return "may hold a * at its end only";
    /* Behind "//" comes the authority; a star within it would admit other authorities. */
    bool has_authority = !strncmp(colon + 1, "//", 2);
    const char *behind = has_authority ? strchr(colon + 3, '/') : colon + 1;
    if (!behind || behind >= star || (star[-1] != '/' && star[-1] != ':') ||
        (has_authority && behind == colon + 3))
        return "may hold a * behind a / or : only, and behind the authority (URI:spiffe://prod/*)";
    p->star = true;
    *star = '\0';
    p->n--;
    return NULL;
}

static const char *parse_pattern(const char *text, size_t n, struct pattern *p)
{
    bool is_uri = n > 4 && !strncmp(text, "URI:", 4);
    if (is_uri) text += 4, n -= 4;
    memcpy(p->text, text, n);
    p->text[n] = '\0';
    p->n = n;
    if (is_uri) {
        p->kind = TD_PEER_NAME_URI;
        return parse_uri(p);
    }
    p->family = parse_address(p->text, p->address);
    p->kind = p->family ? TD_PEER_NAME_IP : TD_PEER_NAME_DNS;
    if (p->family) return NULL;
    if (n > 2 && p->text[0] == '*' && p->text[1] == '.') {
        p->star = true;
        memmove(p->text, p->text + 1, n);
        p->n = n - 1;
    }
    if (is_dns_name(p->text + p->star, p->n - p->star)) return NULL;
    return "must be a DNS name, *. before one (exactly one label), an address, or URI: and a URI";
}

td_status td_peer_names_parse(const char *option, const char *text,
                              struct td_peer_names **ret_names, struct td_err *err)
{
    size_t n_max = 1;
    for (const char *c = text; *c; c++) n_max += *c == ',';
    if (n_max > MAX_PATTERNS)
        return td_fail(err, TD_ERR_LIMIT, "%s holds %zu patterns, may hold %d", option, n_max,
                       MAX_PATTERNS);
    struct td_peer_names *names = calloc(1, sizeof *names + n_max * sizeof names->patterns[0]);
    if (!names) return td_fail(err, TD_ERR_NOMEM, "%s: no memory", option);
    for (const char *at = text;;) {
        const char *end = at + strcspn(at, ","), *next = *end ? end + 1 : NULL;
        while (at < end && isspace((unsigned char)*at)) at++;
        while (end > at && isspace((unsigned char)end[-1])) end--;
        size_t n = (size_t)(end - at);
        const char *wrong = n == 0 ? "is empty"
                            : n > MAX_PATTERN_CHARS
                                ? "is longer than 512 characters"
                                : parse_pattern(at, n, &names->patterns[names->n]);
        if (wrong) {
            td_status status = td_fail(err, TD_ERR_INVALID, "%s: pattern %zu, \"%.*s\", %s", option,
                                       names->n + 1, (int)(n < 80 ? n : 80), at, wrong);
            td_peer_names_destroy(names);
            return status;
        }
        names->n++;
        if (!next) break;
        at = next;
    }
    *ret_names = names;
    return TD_OK;
}

void td_peer_names_destroy(struct td_peer_names *names) { free(names); }

static bool dns_matches(const struct pattern *p, const char *value, size_t n)
{
    if (!p->star) return n == p->n && !strncasecmp(value, p->text, n);
    if (n <= p->n || strncasecmp(value + n - p->n, p->text, p->n)) return false;
    return memchr(value, '.', n - p->n) == NULL; /* one label */
}

static bool address_matches(const struct pattern *p, const char *value, size_t n)
{
    char text[MAX_ADDRESS_CHARS];
    uint8_t address[16];
    if (n >= sizeof text) return false;
    memcpy(text, value, n);
    text[n] = '\0';
    return parse_address(text, address) == p->family &&
           !memcmp(address, p->address, p->family == AF_INET ? 4 : 16);
}

bool td_peer_names_match(const struct td_peer_names *names, enum td_peer_name_kind kind,
                         const char *value, size_t n_bytes)
{
    if (memchr(value, '\0', n_bytes)) return false;
    if (kind == TD_PEER_NAME_DNS && !is_dns_name(value, n_bytes)) return false;
    for (size_t i = 0; i < names->n; i++) {
        const struct pattern *p = &names->patterns[i];
        if (p->kind != kind) continue;
        if (kind == TD_PEER_NAME_DNS && dns_matches(p, value, n_bytes)) return true;
        if (kind == TD_PEER_NAME_IP && address_matches(p, value, n_bytes)) return true;
        if (kind == TD_PEER_NAME_URI && n_bytes >= p->n && (p->star || n_bytes == p->n) &&
            !memcmp(value, p->text, p->n))
            return true;
    }
    return false;
}
