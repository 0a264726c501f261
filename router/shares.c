/* shares.c - see shares.h. */
#include "router/shares.h"

#include "common/base/clock.h"

enum { KEPT_OF_PART = 8 }; /* this fraction of a part is kept for a model that does not ask */

uint32_t router_share_part(const struct router_shares *s)
{
    uint32_t part = s->n_models ? s->n_requests / s->n_models : s->n_requests;
    return part ? part : 1;
}

/* What is kept for the model, of what it holds and what it does not. */
static uint32_t kept_for(const struct router_shares *s, uint32_t model, uint64_t now_ns)
{
    uint32_t part = router_share_part(s), least = part / KEPT_OF_PART;
    if (s->n_models < 2 || part < 2) return 0;
    if (s->of[model].short_until_ns > now_ns) return part;
    return least ? least : 1;
}

bool router_share_may_take(struct router_shares *s, uint32_t model, uint32_t n, uint64_t now_ns)
{
    uint64_t n_live = 0, n_kept = 0;
    for (uint32_t i = 0; i < s->n_models; i++) {
        uint32_t kept = i == model ? 0 : kept_for(s, i, now_ns), live = s->of[i].n_live;
        n_live += live;
        if (kept > live) n_kept += kept - live;
    }
    uint64_t want = n, mine = s->of[model].n_live + want,
             n_free = n_live < s->n_requests ? s->n_requests - n_live : 0;
    bool fits = want <= n_free && (mine <= kept_for(s, model, now_ns) || want + n_kept <= n_free);
    if (!fits) s->of[model].short_until_ns = td_deadline_after_ms(now_ns, SHARE_SHORT_MS);
    return fits;
}
