/* tenants.c - see tenants.h. */
#include "router/tenants.h"

#include <openssl/evp.h>
#include <string.h>

#include "common/base/status.h"

struct td_prefix_salt router_cache_salt(const char *tenant, const char *cache_salt)
{
    static const char use[] = "tandem prefix salt 1"; /* parts this use of the hash from every other; its NUL is hashed, too */
    uint8_t text[sizeof use + 2 + ROUTER_MAX_TENANT_BYTES + ROUTER_MAX_CACHE_SALT_BYTES], digest[32];
    size_t n_tenant = strlen(tenant), n_salt = strlen(cache_salt);
    if (!n_tenant && !n_salt) return (struct td_prefix_salt){0};
    TD_ASSERT(n_tenant <= ROUTER_MAX_TENANT_BYTES && n_salt <= ROUTER_MAX_CACHE_SALT_BYTES);
    _Static_assert(ROUTER_MAX_TENANT_BYTES < 256 && ROUTER_MAX_CACHE_SALT_BYTES < 256, "a length is one byte");
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
