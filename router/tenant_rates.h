/* tenant_rates.h - how many requests and tokens a second a tenant may have, and what is left of it.
 *
 * A bucket each: it fills at the rate, up to one second's worth (and to one request at least). A
 * request needs one request and any token above zero; its prompt and each token of its output are
 * taken off as they come, below zero if need be, and until they are paid nothing begins. So the
 * length of an answer need not be known before.
 *
 * Kept by the tenant's name for as long as the router runs, so that a new file of tenants gives
 * nobody a full bucket. Threads: the router's loop alone. */
#ifndef TD_ROUTER_TENANT_RATES_H
#define TD_ROUTER_TENANT_RATES_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "router/tenants.h"

struct tenant_use {
    struct tenant_use *next;
    char name[ROUTER_MAX_TENANT_BYTES + 1];
    double requests_per_s, tokens_per_s; /* 0 = as many as it likes */
    double requests, tokens;             /* left */
    uint64_t at_ns;                      /* when they were counted */
};

/* Gives each tenant that has a rate its use: one that *uses has, or a new, full one there. */
td_status tenant_uses_follow(struct tenant_use **uses, struct router_tenants *tenants,
                             uint64_t now_ns, struct td_err *err);
void tenant_uses_free(struct tenant_use *uses);
/* Takes n requests. TD_ERR_AGAIN: not now; err says which rate, and *ret_wait_ms when to ask
 * again. */
td_status tenant_use_take(struct tenant_use *u, uint32_t n, uint64_t now_ns, uint32_t *ret_wait_ms,
                          struct td_err *err);

#endif
