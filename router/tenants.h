/* tenants.h - whose a request is, and what keeps the prefix caches of different owners apart.
 *
 * Why here: a prefix cache that all share answers sooner for a prompt that somebody else has sent, and `cached_tokens` says so outright: with it one
 * client can test word by word what another one asks. So every request that has a tenant or a cache_salt gets a salt of its own, which parts its
 * chain of prefix blocks from all others' (common/kv/prefix_hash.h); requests with neither share one cache. A salt never changes a token (I1).
 *
 * Pure; any thread. */
#ifndef TD_ROUTER_TENANTS_H
#define TD_ROUTER_TENANTS_H

#include "common/kv/prefix_hash.h"

#define ROUTER_MAX_TENANT_BYTES 64
#define ROUTER_MAX_CACHE_SALT_BYTES 128

/* The first 16 bytes of SHA-256 over both texts and their lengths, so ("ab", "c") and ("a", "bc") differ, and nobody finds two that meet; {0, 0} when
 * both are empty. The same on every router, and after a restart. Texts are at most the limits above. */
struct td_prefix_salt router_cache_salt(const char *tenant, const char *cache_salt);

#endif
