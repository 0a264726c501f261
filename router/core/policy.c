/* policy.c - see policy.h. */
#include "router/core/policy.h"

#include <string.h>

static bool can_take(const struct td_core_worker *w, enum td_core_role role, uint64_t n_tokens)
{
    return w->state == TD_WORKER_READY && w->role == role && !w->shunned && w->assigned < w->max_seqs && n_tokens <= w->kv_tokens;
}

bool td_policy_has_room(const struct td_policy_view *v, enum td_core_role role, uint64_t n_tokens)
{
    for (uint32_t i = 0; i < v->n_workers; i++)
        if (can_take(&v->workers[i], role, n_tokens)) return true;
    return false;
}

static uint32_t round_robin(const struct td_policy_view *v, enum td_core_role role, uint64_t n_tokens)
{
    for (uint32_t i = 0; i < v->n_workers; i++) {
        uint32_t at = (uint32_t)((v->cursor[role] + i) % v->n_workers);
        if (!can_take(&v->workers[at], role, n_tokens)) continue;
        v->cursor[role] = at + 1;
        return at;
    }
    return TD_NO_WORKER;
}

/* Fewest tokens by our own ledger, which is exact the moment we decide; ties go to the lowest index. */
static uint32_t least_token(const struct td_policy_view *v, enum td_core_role role, uint64_t n_tokens)
{
    uint32_t best = TD_NO_WORKER;
    for (uint32_t i = 0; i < v->n_workers; i++) {
        if (!can_take(&v->workers[i], role, n_tokens)) continue;
        if (best == TD_NO_WORKER || v->workers[i].assigned_tokens < v->workers[best].assigned_tokens) best = i;
    }
    return best;
}

td_policy_fn td_policy_by_name(const char *name)
{
    if (!strcmp(name, "round_robin")) return round_robin;
    if (!strcmp(name, "least_token")) return least_token;
    return NULL;
}

const char *td_policy_names(void) { return "round_robin|least_token"; }
