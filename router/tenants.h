/* tenants.h - whose a request is, and what keeps the prefix caches of different owners apart.
 *
 * Why the salt: a prefix cache that all share answers sooner for a prompt that somebody else has
 * sent, and `cached_tokens` says so outright: with it one client can test word by word what another
 * one asks. So every request that has a tenant or a cache_salt gets a salt of its own, which parts
 * its chain of prefix blocks from all others' (common/base/prefix_hash.h); requests with neither
 * share one cache. A salt never changes a token (I1).
 *
 * Why the file: without one the tenant is what the client says. With one it is who the client
 * proves to be, by a key or by a name in its certificate, and what it says may not contradict that.
 * docs/tenants.md has the format.
 *
 * A table is unchanging once it is loaded, but for `use`: any thread may read the rest. It knows
 * nothing of gRPC: the HTTP door asks the same questions with its own headers. */
#ifndef TD_ROUTER_TENANTS_H
#define TD_ROUTER_TENANTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/peer_names.h"
#include "common/base/status.h"
#include "common/base/prefix_hash.h"
#include "router/core/core.h"

#define ROUTER_MAX_TENANT_BYTES 64
#define ROUTER_MAX_CACHE_SALT_BYTES 128
#define ROUTER_MAX_TENANTS 4096
#define ROUTER_MAX_KEYS 16 /* of one tenant: old and new ones while they are changed */
#define ROUTER_MAX_KEY_BYTES 512
#define ROUTER_MIN_KEY_BYTES 16 /* 128 random bits have 22 letters in base64 */
#define ROUTER_MAX_TENANT_WEIGHT 1000
#define ROUTER_MAX_TENANT_RATE 1e9 /* requests or tokens a second */

/* The first 16 bytes of SHA-256 over both texts and their lengths, so ("ab", "c") and ("a",
 * "bc") differ, and nobody finds two that meet; {0, 0} when both are empty. The same on every
 * router, and after a restart. Texts are at most the limits above. */
struct td_prefix_salt router_cache_salt(const char *tenant, const char *cache_salt);

struct router_tenants;
/* A tenant; or, as its caller is known by a key with limits of its own, the tenant within these. */
struct router_tenant {
    char name[ROUTER_MAX_TENANT_BYTES + 1];
    double weight;        /* of its share beside the others', > 0 */
    uint32_t classes;     /* bit i: it may use class i of the router's table */
    bool is_operator;     /* it is told names, addresses and loads of workers */
    uint32_t first_class; /* what a request of it without a class gets */
    double requests_per_s, tokens_per_s; /* 0 = as many as it likes */
    uint64_t key;                        /* of its key's digest; 0: the tenant */
    struct tenant_use *use;              /* what is left of these; NULL: no rate. tenant_rates.h */
};

/* Reads the file; `classes` has the SLO classes that it may name. TD_ERR_INVALID, TD_ERR_LIMIT,
 * TD_ERR_IO name the file, the tenant, the field and what it must be. */
td_status router_tenants_load(const char *path, const struct td_core_config *classes,
                              struct router_tenants **ret_tenants, struct td_err *err);
/* The same of a text; `what` names it in errors. */
td_status router_tenants_parse(const char *text, size_t n_bytes, const char *what,
                               const struct td_core_config *classes,
                               struct router_tenants **ret_tenants, struct td_err *err);
void router_tenants_free(struct router_tenants *tenants); /* NULL is allowed */
size_t router_tenants_n(const struct router_tenants *tenants);
struct router_tenant *router_tenants_at(struct router_tenants *tenants, size_t i);
/* The keys with limits of their own, and the tenant that key i is of. */
size_t router_tenants_n_limited(const struct router_tenants *tenants);
struct router_tenant *router_tenants_limited_at(struct router_tenants *tenants, size_t i,
                                                struct router_tenant **ret_tenant);
/* keys should not go over a wire without TLS */
bool router_tenants_have_keys(const struct router_tenants *tenants);

/* What a caller shows of itself. */
struct router_caller {
    const char *authorization; /* the header's or metadata's value, "Bearer KEY"; NULL =
                                  none */
    const char *claimed;       /* the request's own tenant field; "" = none */
    /* Does a verified certificate of the caller hold a name that matches? NULL = the caller has
       no certificate. */
    bool (*certificate_is)(void *arg, const struct td_peer_names *names);
    void *arg;
};
/* Why a caller is nobody: gRPC says UNAUTHENTICATED and PERMISSION_DENIED, HTTP 401 and 403. */
enum router_tenant_verdict { ROUTER_TENANT_OK, ROUTER_TENANT_UNKNOWN, ROUTER_TENANT_DENIED };
/* A key decides before a certificate; both are looked at, and must not be of different tenants.
 * *ret_tenant is borrowed from the table. err says what was wrong, never a key. */
enum router_tenant_verdict router_tenant_of(const struct router_tenants *tenants,
                                            const struct router_caller *caller,
                                            const struct router_tenant **ret_tenant,
                                            struct td_err *err);

#endif
