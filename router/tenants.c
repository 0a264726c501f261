/* tenants.c - see tenants.h. Keys are found by their SHA-256, sorted: the file holds no key, and
 * how long a search takes says something of a digest, nothing of the key behind it. */
#include "router/tenants.h"

#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/base/json.h"

#define FILE_MAX_BYTES ((size_t)8 << 20)
#define DIGEST_BYTES 32

struct td_prefix_salt router_cache_salt(const char *tenant, const char *cache_salt)
{
    static const char use[] = "tandem prefix salt 1"; /* parts this use of the hash from every
                                                         other; its NUL is hashed, too */
    uint8_t text[sizeof use + 2 + ROUTER_MAX_TENANT_BYTES + ROUTER_MAX_CACHE_SALT_BYTES],
        digest[32];
    size_t n_tenant = strlen(tenant), n_salt = strlen(cache_salt);
    if (!n_tenant && !n_salt) return (struct td_prefix_salt){0};
    TD_ASSERT(n_tenant <= ROUTER_MAX_TENANT_BYTES && n_salt <= ROUTER_MAX_CACHE_SALT_BYTES);
    _Static_assert(ROUTER_MAX_TENANT_BYTES < 256 && ROUTER_MAX_CACHE_SALT_BYTES < 256,
                   "a length is one byte");
    size_t n = sizeof use;
    memcpy(text, use, n);
    text[n++] = (uint8_t)n_tenant;
    memcpy(text + n, tenant, n_tenant);
    n += n_tenant;
    text[n++] = (uint8_t)n_salt;
    memcpy(text + n, cache_salt, n_salt);
    n += n_salt;
    TD_ASSERT(EVP_Digest(text, n, digest, NULL, EVP_sha256(), NULL) == 1);
    struct td_prefix_salt salt;
    _Static_assert(sizeof salt == TD_PREFIX_SALT_BYTES, "two words");
    memcpy(&salt, digest, sizeof salt);
    return salt;
}

/* ---- the table ------------------------------------------------------------------------------- */

struct key {
    uint8_t digest[DIGEST_BYTES];
    uint32_t tenant;
    uint32_t limited; /* 1 + its place there; 0: it has no limits of its own */
};
struct limited_key {
    struct router_tenant within; /* the tenant, with the key's limits */
    uint32_t tenant;
};
struct router_tenants {
    struct router_tenant *v;
    struct td_peer_names **certificates; /* [n]; NULL = none */
    struct key *keys;                    /* sorted by digest */
    struct limited_key *limited;
    size_t n, n_keys, n_limited;
};

static int compare_keys(const void *a, const void *b)
{
    return memcmp(((const struct key *)a)->digest, ((const struct key *)b)->digest, DIGEST_BYTES);
}

struct router_tenant *router_tenants_at(struct router_tenants *t, size_t i) { return &t->v[i]; }
size_t router_tenants_n(const struct router_tenants *t) { return t->n; }
size_t router_tenants_n_limited(const struct router_tenants *t) { return t->n_limited; }
bool router_tenants_have_keys(const struct router_tenants *t) { return t->n_keys > 0; }

struct router_tenant *router_tenants_limited_at(struct router_tenants *t, size_t i,
                                                struct router_tenant **ret_tenant)
{
    *ret_tenant = &t->v[t->limited[i].tenant];
    return &t->limited[i].within;
}

void router_tenants_free(struct router_tenants *t)
{
    if (!t) return;
    for (size_t i = 0; t->certificates && i < t->n; i++) td_peer_names_destroy(t->certificates[i]);
    free(t->certificates);
    free(t->keys);
    free(t->limited);
    free(t->v);
    free(t);
}

static td_status only_keys(const json_t *o, const char *what, const char *const *known,
                           struct td_err *err)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)o, key, value)
    {
        size_t i = 0;
        while (known[i] && strcmp(known[i], key)) i++;
        if (!known[i])
            return td_fail(err, TD_ERR_INVALID, "%s: \"%.60s\" is no field of a tenant", what, key);
    }
    return TD_OK;
}

/* Element i of an array of texts; NULL when it is none, or holds a NUL. */
static const char *text_at(const json_t *array, size_t i)
{
    const json_t *v = json_array_get(array, i);
    const char *text = json_string_value(v);
    return text && strlen(text) == json_string_length(v) ? text : NULL;
}

/* A list of 1..max entries, in *ret; NULL: it is not there. */
static td_status any_list_of(const json_t *o, const char *what, const char *field, size_t max,
                             const json_t **ret, struct td_err *err)
{
    *ret = json_object_get(o, field);
    if (!*ret) return TD_OK;
    if (!json_is_array(*ret))
        return td_fail(err, TD_ERR_INVALID, "%s: %s is not a list", what, field);
    size_t n = json_array_size(*ret);
    if (n < 1 || n > max)
        return td_fail(err, TD_ERR_INVALID, "%s: %s has %zu entries, must have 1..%zu", what, field,
                       n, max);
    return TD_OK;
}

/* The same, of texts. */
static td_status list_of(const json_t *o, const char *what, const char *field, size_t max,
                         const json_t **ret, struct td_err *err)
{
    td_status s = any_list_of(o, what, field, max, ret, err);
    for (size_t i = 0; !s && *ret && i < json_array_size(*ret); i++)
        if (!text_at(*ret, i))
            s = td_fail(err, TD_ERR_INVALID, "%s: %s[%zu] is not a text", what, field, i);
    return s;
}

/* "sha256:" and 64 hexadecimal digits. */
static bool parse_digest(const char *text, uint8_t ret[DIGEST_BYTES])
{
    if (strncmp(text, "sha256:", 7) || strlen(text) != 7 + 2 * DIGEST_BYTES) return false;
    for (size_t i = 0; i < 2 * DIGEST_BYTES; i++) {
        char c = text[7 + i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) return false;
        ret[i / 2] = (uint8_t)(i % 2 ? ret[i / 2] | digit : digit << 4);
    }
    return true;
}

static td_status parse_certificates(struct router_tenants *t, uint32_t at, const json_t *o,
                                    const char *what, struct td_err *err)
{
    const json_t *list;
    td_status s = list_of(o, what, "certificates", 64, &list, err);
    if (s || !list) return s;
    char text[64 * 514], option[160];
    size_t n = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *pattern = text_at(list, i);
        if (!pattern[0] || strchr(pattern, ',') || strlen(pattern) > 512)
            return td_fail(
                err, TD_ERR_INVALID,
                "%s: certificates[%zu] must be one pattern of 1..512 bytes, without a comma", what,
                i);
        n += (size_t)snprintf(text + n, sizeof text - n, "%s%s", i ? "," : "", pattern);
    }
    snprintf(option, sizeof option, "%s: certificates", what);
    return td_peer_names_parse(option, text, &t->certificates[at], err);
}

/* Of the classes that v has, those that o names, or all. */
static td_status parse_classes(struct router_tenant *v, const json_t *o, const char *what,
                               const struct td_core_config *config, struct td_err *err)
{
    const json_t *list;
    uint32_t n_classes = config->n_classes ? config->n_classes : 1, may = v->classes;
    td_status s = list_of(o, what, "classes", TD_CORE_MAX_CLASSES, &list, err);
    if (s || !list) return s;
    v->classes = 0;
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = text_at(list, i);
        uint32_t c = 0;
        while (c < n_classes && (strcmp(config->classes[c].name, name) || !name[0])) c++;
        if (c == n_classes)
            return td_fail(err, TD_ERR_INVALID,
                           "%s: classes[%zu] is \"%.40s\", which is no class of slo_class", what, i,
                           name);
        if (!(may >> c & 1))
            return td_fail(err, TD_ERR_INVALID,
                           "%s: classes[%zu] is \"%.40s\", which its tenant may not use", what, i,
                           name);
        if (!i) v->first_class = c;
        v->classes |= 1u << c;
    }
    if (v->classes & 1) v->first_class = 0; /* as for everybody, where it may */
    return TD_OK;
}

static td_status parse_rates(struct router_tenant *v, const json_t *o, const char *what,
                             struct td_err *err)
{
    td_status s = td_json_f64(o, what, "requests_per_s", 0.001, ROUTER_MAX_TENANT_RATE,
                              &v->requests_per_s, NULL, err);
    return s ? s
             : td_json_f64(o, what, "tokens_per_s", 0.001, ROUTER_MAX_TENANT_RATE, &v->tokens_per_s,
                           NULL, err);
}

/* The limits of a key that is written as an object. */
static td_status parse_limits(struct router_tenants *t, struct key *k, const json_t *o,
                              const char *what, const struct td_core_config *config,
                              struct td_err *err)
{
    static const char *const known[] = {"key", "classes", "requests_per_s", "tokens_per_s", NULL};
    struct limited_key *l = &t->limited[t->n_limited++];
    k->limited = (uint32_t)t->n_limited;
    *l = (struct limited_key){.within = t->v[k->tenant], .tenant = k->tenant};
    l->within.requests_per_s = l->within.tokens_per_s = 0; /* those of the tenant hold beside */
    memcpy(&l->within.key, k->digest, sizeof l->within.key);
    if (!l->within.key) l->within.key = 1;
    td_status s = only_keys(o, what, known, err);
    if (!s) s = parse_rates(&l->within, o, what, err);
    return s ? s : parse_classes(&l->within, o, what, config, err);
}

/* After the tenant's classes. Never tells the text: it may be the key itself. */
static td_status parse_keys(struct router_tenants *t, uint32_t at, const json_t *o,
                            const char *what, const struct td_core_config *config,
                            struct td_err *err)
{
    const json_t *list;
    char which[240];
    td_status s = any_list_of(o, what, "keys", ROUTER_MAX_KEYS, &list, err);
    for (size_t i = 0; !s && list && i < json_array_size(list); i++) {
        struct key *k = &t->keys[t->n_keys++];
        const json_t *v = json_array_get(list, i);
        bool has_limits = json_is_object(v);
        const char *digest =
            has_limits ? json_string_value(json_object_get(v, "key")) : text_at(list, i);
        k->tenant = at;
        snprintf(which, sizeof which, "%s: keys[%zu]", what, i);
        if (!digest && !has_limits)
            return td_fail(err, TD_ERR_INVALID, "%s is not a text, or an object", which);
        if (!digest || !parse_digest(digest, k->digest))
            return td_fail(err, TD_ERR_INVALID,
                           "%s%s is not \"sha256:\" and 64 hexadecimal digits (printf %%s KEY | "
                           "sha256sum)",
                           which, has_limits ? ".key" : "");
        if (has_limits) s = parse_limits(t, k, v, which, config, err);
    }
    return s;
}

static td_status parse_tenant(struct router_tenants *t, uint32_t at, const json_t *o,
                              const char *path, const struct td_core_config *config,
                              struct td_err *err)
{
    static const char *const known[] = {"name",         "keys",     "certificates",
                                        "weight",       "classes",  "requests_per_s",
                                        "tokens_per_s", "operator", NULL};
    char what[200];
    struct router_tenant *v = &t->v[at];
    const char *name = NULL;
    snprintf(what, sizeof what, "%.80s: tenants[%u]", path, at);
    if (!json_is_object(o)) return td_fail(err, TD_ERR_INVALID, "%s is not an object", what);
    td_status s = td_json_str(o, what, "name", &name, NULL, err);
    if (s) return s;
    size_t n = name ? strlen(name) : 0;
    if (n < 1 || n > ROUTER_MAX_TENANT_BYTES)
        return td_fail(err, TD_ERR_INVALID, "%s: name must have 1..%d bytes", what,
                       ROUTER_MAX_TENANT_BYTES);
    for (size_t i = 0; i < n; i++)
        if ((uint8_t)name[i] < 0x20 || name[i] == 0x7f)
            return td_fail(err, TD_ERR_INVALID, "%s: name holds a control character", what);
    snprintf(v->name, sizeof v->name, "%s", name);
    snprintf(what, sizeof what, "%.80s: tenant \"%s\"", path, v->name);
    for (uint32_t i = 0; i < at; i++)
        if (!strcmp(t->v[i].name, v->name))
            return td_fail(err, TD_ERR_INVALID, "%s is there twice", what);
    v->weight = 1;
    if (!s) s = only_keys(o, what, known, err);
    if (!s)
        s = td_json_f64(o, what, "weight", 0.001, ROUTER_MAX_TENANT_WEIGHT, &v->weight, NULL, err);
    if (!s) s = td_json_bool(o, what, "operator", &v->is_operator, NULL, err);
    uint32_t n_classes = config->n_classes ? config->n_classes : 1;
    v->classes = (uint32_t)((1ull << n_classes) - 1);
    if (!s) s = parse_rates(v, o, what, err);
    if (!s) s = parse_classes(v, o, what, config, err);
    if (!s) s = parse_keys(t, at, o, what, config, err);
    if (!s) s = parse_certificates(t, at, o, what, err);
    if (!s && !json_object_get(o, "keys") && !json_object_get(o, "certificates"))
        s = td_fail(err, TD_ERR_INVALID, "%s has neither keys nor certificates: nobody could be it",
                    what);
    return s;
}

static td_status parse_file(struct router_tenants *t, const json_t *root, const char *path,
                            const struct td_core_config *config, struct td_err *err)
{
    const json_t *list = json_object_get(root, "tenants");
    if (!json_is_array(list) || json_object_size(root) != 1)
        return td_fail(err, TD_ERR_INVALID, "%.80s must be {\"tenants\": [...]} and nothing else",
                       path);
    size_t n = json_array_size(list);
    if (n > ROUTER_MAX_TENANTS)
        return td_fail(err, TD_ERR_LIMIT, "%.80s: %zu tenants, limit %d", path, n,
                       ROUTER_MAX_TENANTS);
    t->v = calloc(n + 1, sizeof *t->v);
    t->certificates = calloc(n + 1, sizeof(struct td_peer_names *));
    t->keys = calloc(n * ROUTER_MAX_KEYS + 1, sizeof *t->keys);
    t->limited = calloc(n * ROUTER_MAX_KEYS + 1, sizeof *t->limited);
    if (!t->v || !t->certificates || !t->keys || !t->limited)
        return td_fail(err, TD_ERR_NOMEM, "no memory for %zu tenants", n);
    t->n = n;
    td_status s = TD_OK;
    for (uint32_t i = 0; i < n && !s; i++)
        s = parse_tenant(t, i, json_array_get(list, i), path, config, err);
    if (s) return s;
    qsort(t->keys, t->n_keys, sizeof *t->keys, compare_keys);
    for (size_t i = 1; i < t->n_keys; i++)
        if (!compare_keys(&t->keys[i - 1], &t->keys[i]))
            return td_fail(err, TD_ERR_INVALID,
                           "%.80s: tenants \"%s\" and \"%s\" have the same key", path,
                           t->v[t->keys[i - 1].tenant].name, t->v[t->keys[i].tenant].name);
    return TD_OK;
}

/* Takes root. */
static td_status make(json_t *root, const char *path, const struct td_core_config *classes,
                      struct router_tenants **ret_tenants, struct td_err *err)
{
    td_status s;
    struct router_tenants *t = calloc(1, sizeof *t);
    s = t ? parse_file(t, root, path, classes, err)
          : td_fail(err, TD_ERR_NOMEM, "no memory for the tenants of %.80s", path);
    json_decref(root);
    if (s)
        router_tenants_free(t);
    else
        *ret_tenants = t;
    return s;
}

td_status router_tenants_load(const char *path, const struct td_core_config *classes,
                              struct router_tenants **ret_tenants, struct td_err *err)
{
    json_t *root = NULL;
    td_status s = td_json_load_file(path, FILE_MAX_BYTES, &root, err);
    return s ? s : make(root, path, classes, ret_tenants, err);
}

td_status router_tenants_parse(const char *text, size_t n_bytes, const char *what,
                               const struct td_core_config *classes,
                               struct router_tenants **ret_tenants, struct td_err *err)
{
    json_t *root = NULL;
    td_status s = td_json_load_text(text, n_bytes, what, &root, err);
    return s ? s : make(root, what, classes, ret_tenants, err);
}

/* ---- who asks -------------------------------------------------------------------------------- */

/* NULL: it is no tenant's. */
static const struct key *find_key(const struct router_tenants *t, const char *key, size_t n)
{
    struct key wanted;
    TD_ASSERT(EVP_Digest(key, n, wanted.digest, NULL, EVP_sha256(), NULL) == 1);
    return t->n_keys ? bsearch(&wanted, t->keys, t->n_keys, sizeof *t->keys, compare_keys) : NULL;
}

static enum router_tenant_verdict denied(struct td_err *err, enum router_tenant_verdict v,
                                         const char *why)
{
    td_fail(err, TD_ERR_INVALID, "%s", why);
    return v;
}

enum router_tenant_verdict router_tenant_of(const struct router_tenants *t,
                                            const struct router_caller *c,
                                            const struct router_tenant **ret_tenant,
                                            struct td_err *err)
{
    int64_t by_key = -1, by_name = -1;
    const struct key *shown = NULL;
    if (c->authorization) {
        const char *key = c->authorization;
        if (strncasecmp(key, "Bearer ", 7))
            return denied(err, ROUTER_TENANT_UNKNOWN, "authorization must be \"Bearer KEY\"");
        for (key += 7; *key == ' ';) key++;
        size_t n = strlen(key);
        while (n && key[n - 1] == ' ') n--;
        if (n < ROUTER_MIN_KEY_BYTES || n > ROUTER_MAX_KEY_BYTES) {
            td_fail(err, TD_ERR_INVALID, "the key in authorization has %zu bytes; keys have %d..%d",
                    n, ROUTER_MIN_KEY_BYTES, ROUTER_MAX_KEY_BYTES);
            return ROUTER_TENANT_UNKNOWN;
        }
        shown = find_key(t, key, n);
        if (!shown)
            return denied(err, ROUTER_TENANT_UNKNOWN, "the key in authorization is no tenant's");
        by_key = shown->tenant;
    }
    for (size_t i = 0; c->certificate_is && i < t->n && by_name < 0; i++)
        if (t->certificates[i] && c->certificate_is(c->arg, t->certificates[i]))
            by_name = (int64_t)i;
    if (by_key < 0 && by_name < 0)
        return denied(
            err, ROUTER_TENANT_UNKNOWN,
            c->certificate_is
                ? "no key in authorization, and no name of the caller's certificate is a tenant's"
                : "this router answers tenants that it knows: send a key as authorization \"Bearer "
                  "KEY\""
                  ", or show a certificate");
    if (by_key >= 0 && by_name >= 0 && by_key != by_name &&
        !(t->certificates[by_key] && c->certificate_is(c->arg, t->certificates[by_key]))) {
        td_fail(err, TD_ERR_INVALID,
                "the key is tenant \"%s\"'s and the certificate tenant \"%s\"'s", t->v[by_key].name,
                t->v[by_name].name);
        return ROUTER_TENANT_DENIED;
    }
    const struct router_tenant *v = &t->v[by_key >= 0 ? by_key : by_name];
    if (c->claimed[0] && strcmp(c->claimed, v->name)) {
        td_fail(err, TD_ERR_INVALID, "tenant is \"%.64s\"; the caller is tenant \"%s\"", c->claimed,
                v->name);
        return ROUTER_TENANT_DENIED;
    }
    *ret_tenant = shown && shown->limited ? &t->limited[shown->limited - 1].within : v;
    return ROUTER_TENANT_OK;
}
