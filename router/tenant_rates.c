/* tenant_rates.c - see tenant_rates.h. */
#include "router/tenant_rates.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double most(double per_s) { return per_s > 1 ? per_s : 1; }

static struct tenant_use *find(struct tenant_use **uses, const struct router_tenant *v,
                               uint64_t now_ns)
{
    for (struct tenant_use *u = *uses; u; u = u->next)
        if (u->key == v->key && !strcmp(u->name, v->name)) return u;
    struct tenant_use *u = calloc(1, sizeof *u);
    if (!u) return NULL;
    snprintf(u->name, sizeof u->name, "%s", v->name);
    u->key = v->key;
    u->requests = most(v->requests_per_s);
    u->tokens = most(v->tokens_per_s);
    u->at_ns = now_ns;
    u->next = *uses;
    *uses = u;
    return u;
}

static td_status follow(struct tenant_use **uses, struct router_tenant *v,
                        struct tenant_use *tenants, uint64_t now_ns, struct td_err *err)
{
    v->use = tenants;
    if (!(v->requests_per_s > 0) && !(v->tokens_per_s > 0)) return TD_OK;
    v->use = find(uses, v, now_ns);
    if (!v->use) return td_fail(err, TD_ERR_NOMEM, "no memory for the tenants' rates");
    v->use->tenants = tenants;
    v->use->requests_per_s = v->requests_per_s;
    v->use->tokens_per_s = v->tokens_per_s;
    atomic_store(&v->use->waits_until_ns, 0); /* of the rates before */
    return TD_OK;
}

td_status tenant_uses_follow(struct tenant_use **uses, struct router_tenants *t, uint64_t now_ns,
                             struct td_err *err)
{
    td_status s = TD_OK;
    for (size_t i = 0; i < router_tenants_n(t) && !s; i++)
        s = follow(uses, router_tenants_at(t, i), NULL, now_ns, err);
    for (size_t i = 0; i < router_tenants_n_limited(t) && !s; i++) {
        struct router_tenant *tenant, *v = router_tenants_limited_at(t, i, &tenant);
        s = follow(uses, v, tenant->use, now_ns, err);
    }
    return s;
}

void tenant_uses_free(struct tenant_use *u)
{
    while (u) {
        struct tenant_use *next = u->next;
        free(u);
        u = next;
    }
}

static void fill(struct tenant_use *u, uint64_t now_ns)
{
    double s = now_ns > u->at_ns ? (double)(now_ns - u->at_ns) / 1e9 : 0;
    if (u->requests_per_s > 0)
        u->requests = fmin(u->requests + s * u->requests_per_s, most(u->requests_per_s));
    if (u->tokens_per_s > 0)
        u->tokens = fmin(u->tokens + s * u->tokens_per_s, most(u->tokens_per_s));
    u->at_ns = now_ns;
}

static td_status tell(const struct tenant_use *u, bool of_requests, uint32_t wait_ms,
                      struct td_err *err)
{
    return td_fail(err, TD_ERR_AGAIN, "%stenant \"%s\" is above its %s, %g: ask again in %u ms",
                   u->key ? "this key of " : "", u->name,
                   of_requests ? "requests_per_s" : "tokens_per_s",
                   of_requests ? u->requests_per_s : u->tokens_per_s, wait_ms);
}

static td_status wait_for(struct tenant_use *u, bool of_requests, double missing, uint64_t now_ns,
                          uint32_t *ret_wait_ms, struct td_err *err)
{
    double ms = ceil(missing / (of_requests ? u->requests_per_s : u->tokens_per_s) * 1000);
    *ret_wait_ms = ms < 1 ? 1 : ms > 3.6e6 ? 3600000 : (uint32_t)ms;
    uint64_t until_ns = now_ns + *ret_wait_ms * UINT64_C(1000000);
    atomic_store(&u->waits_until_ns, of_requests ? until_ns & ~UINT64_C(1) : (until_ns - 1) | 1);
    return tell(u, of_requests, *ret_wait_ms, err);
}

/* Whether a request may begin. */
static td_status look(struct tenant_use *u, uint64_t now_ns, uint32_t *ret_wait_ms,
                      struct td_err *err)
{
    fill(u, now_ns);
    if (u->tokens_per_s > 0 && !(u->tokens > 0))
        return wait_for(u, false, 1 - u->tokens, now_ns, ret_wait_ms, err);
    if (u->requests_per_s > 0 && u->requests < 1)
        return wait_for(u, true, 1 - u->requests, now_ns, ret_wait_ms, err);
    return TD_OK;
}

td_status tenant_use_take(struct tenant_use *u, uint32_t n, uint64_t now_ns, uint32_t *ret_wait_ms,
                          struct td_err *err)
{
    td_status s = look(u, now_ns, ret_wait_ms, err);
    if (!s && u->tenants) s = look(u->tenants, now_ns, ret_wait_ms, err);
    if (s) return s;
    for (; u; u = u->tenants)
        if (u->requests_per_s > 0) u->requests -= n;
    return TD_OK;
}

td_status tenant_use_look(struct tenant_use *u, uint64_t now_ns, uint32_t *ret_wait_ms,
                          struct td_err *err)
{
    for (; u; u = u->tenants) {
        uint64_t until_ns = atomic_load(&u->waits_until_ns);
        if (until_ns <= now_ns) continue;
        *ret_wait_ms = (uint32_t)((until_ns - now_ns + 999999) / 1000000);
        return tell(u, !(until_ns & 1), *ret_wait_ms, err);
    }
    return TD_OK;
}
