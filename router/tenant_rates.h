/* tenant_rates.h - how many requests and tokens a second a tenant may have, and what is left of it.
 * A key may have rates of its own: its requests count for both.
 *
 * A bucket for each of them: it fills at the rate, up to one second's worth (and to one request at
 * least). A request takes one from the bucket of requests, and needs a balance of tokens above
 * zero. Its prompt and each token of its output are then taken off as they come. The balance may go
 * below zero; until it is above zero no new request begins. So the length of an answer need not be
 * known before.
 *
 * A rate that a file does not have counts nothing: when a later file sets it, the bucket is as it
 * was. Kept by the tenant's name and the key's digest for as long as the router runs, so that a new
 * file of tenants gives nobody a full bucket.
 *
 * Threads: the router's loop counts. Any thread may ask tenant_use_look, by which a request is
 * refused before its body is read; a lock of the caller keeps tenant_uses_follow away from it. */
#ifndef TD_ROUTER_TENANT_RATES_H
#define TD_ROUTER_TENANT_RATES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "router/tenants.h"

struct tenant_use {
    struct tenant_use *next;
    struct tenant_use *tenants; /* a key's: the use of its tenant, NULL if that has no rate; a
                                   tenant's: NULL */
    char name[ROUTER_MAX_TENANT_BYTES + 1];
    uint64_t key;                        /* router_tenant.key */
    double requests_per_s, tokens_per_s; /* 0 = as many as it likes */
    double requests, tokens;             /* left */
    uint64_t at_ns;                      /* when they were counted */
    /* Until then it was told to wait, and nothing can have changed; 0: it may ask. The lowest bit
     * says for which rate: 1 = tokens_per_s. */
    _Atomic uint64_t waits_until_ns;
};

/* Gives each tenant and each key that has a rate its use: one that *uses has, or a new, full one
 * there. */
td_status tenant_uses_follow(struct tenant_use **uses, struct router_tenants *tenants,
                             uint64_t now_ns, struct td_err *err);
void tenant_uses_free(struct tenant_use *uses);
/* Takes n requests. TD_ERR_AGAIN: not now; err says which rate, and *ret_wait_ms when to ask
 * again. */
td_status tenant_use_take(struct tenant_use *u, uint32_t n, uint64_t now_ns, uint32_t *ret_wait_ms,
                          struct td_err *err);
/* Whether somebody was told to wait, and the wait is not over: the same error again. Takes nothing.
 * u may be NULL: no rate. [any thread] */
td_status tenant_use_look(struct tenant_use *u, uint64_t now_ns, uint32_t *ret_wait_ms,
                          struct td_err *err);
/* n tokens of its were computed or read. u may be NULL: no rate. */
static inline void tenant_use_pay(struct tenant_use *u, uint32_t n)
{
    for (; u; u = u->tenants)
        if (u->tokens_per_s > 0) u->tokens -= n;
}
/* Gives back requests that were taken and tokens that were paid for what was then refused. u may be
 * NULL. */
static inline void tenant_use_give_back(struct tenant_use *u, uint32_t n_requests,
                                        uint32_t n_tokens)
{
    for (; u; u = u->tenants) {
        if (u->requests_per_s > 0) u->requests += n_requests;
        if (u->tokens_per_s > 0) u->tokens += n_tokens;
        atomic_store(&u->waits_until_ns, 0);
    }
}

#endif
