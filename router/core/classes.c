/* classes.c - SLO classes: their ranks by weight, and the ceiling of each rank.
 *
 * Requests of a greater weight go first. A rank behind others takes work only while the fleet is
 * less full than the rank's ceiling. The ceilings follow what the ranks before attain: they sink
 * when one of those misses its objectives, and rise while they meet them or do not come. */
#include <math.h>
#include <string.h>

#include "router/core/core_state.h"

/* How full the fleet may be for a rank behind others to take work, at the start. From there on the
 * ceiling follows what the ranks before it attain. */
#define CEILING_START 0.8
#define CEILING_MIN 0.6
#define CEILING_MAX 1.1 /* above 1 there is no limit */
/* The ceiling rises by this with each good request of a rank before. */
#define CEILING_STEP 0.002
/* It also rises by this in a second, so that what is kept for a rank that does not come is given
 * back. */
#define CEILING_DRIFT 0.005

td_status core_check_classes(const struct td_core_config *g, struct td_err *err)
{
    if (g->n_classes > TD_CORE_MAX_CLASSES)
        return td_fail(err, TD_ERR_LIMIT, "slo_class: %u classes, limit %d", g->n_classes,
                       TD_CORE_MAX_CLASSES);
    for (uint32_t i = 0; i < g->n_classes; i++) {
        const struct td_core_class *k = &g->classes[i];
        if (!k->name[0]) return td_fail(err, TD_ERR_INVALID, "slo_class: class %u has no name", i);
        if (!(k->ttft_ms >= 0 && k->ttft_ms <= MAX_OBJECTIVE_MS))
            return td_fail(err, TD_ERR_INVALID,
                           "slo_class %s: ttft is %g ms, must be 0 (none) or up to 1e9", k->name,
                           k->ttft_ms);
        if (!(k->tpot_ms >= 0 && k->tpot_ms <= MAX_OBJECTIVE_MS))
            return td_fail(err, TD_ERR_INVALID,
                           "slo_class %s: tpot is %g ms, must be 0 (none) or up to 1e9", k->name,
                           k->tpot_ms);
        if (!(k->weight > 0 && k->weight <= 1e6))
            return td_fail(err, TD_ERR_INVALID,
                           "slo_class %s: weight is %g, must be above 0 and up to 1e6", k->name,
                           k->weight);
        for (uint32_t j = 0; j < i; j++)
            if (!strcmp(g->classes[j].name, k->name))
                return td_fail(err, TD_ERR_INVALID, "slo_class: %s is given twice", k->name);
    }
    return TD_OK;
}

/* Does class a stand before class b? Equal weights are equal for the router, whatever their
 * order; among them the workers' queues, which go by deadlines, give the tighter TTFT its turn
 * first. */
static bool heavier(const struct td_core_class *a, const struct td_core_class *b)
{
    return a->weight > b->weight;
}
static bool sooner(const struct td_core_class *a, const struct td_core_class *b)
{
    double a_ms = a->ttft_ms > 0 ? a->ttft_ms : INFINITY,
           b_ms = b->ttft_ms > 0 ? b->ttft_ms : INFINITY;
    return heavier(a, b) || (!heavier(b, a) && a_ms < b_ms);
}

/* Places among the different ones before it, so that they have no gaps. */
static uint32_t place_of(const struct td_core_config *g, uint32_t i,
                         bool (*before)(const struct td_core_class *a,
                                        const struct td_core_class *b))
{
    uint32_t place = 0;
    for (uint32_t j = 0; j < g->n_classes; j++) {
        bool counted = false; /* another that is its equal was */
        for (uint32_t k = 0; k < j; k++)
            counted |=
                !before(&g->classes[j], &g->classes[k]) && !before(&g->classes[k], &g->classes[j]);
        place += before(&g->classes[j], &g->classes[i]) && !counted;
    }
    return place;
}

/* The objectives that lesser ranks leave room for. */
static void guard_classes(const struct td_core_config *g, struct core_classes *k)
{
    k->guarded_ttft_s = k->guarded_tpot_s = INFINITY;
    for (uint32_t i = 0; i < g->n_classes; i++) {
        const struct td_core_class *of = &g->classes[i];
        if (k->rank[i] == k->n_ranks - 1) continue; /* nobody is behind it */
        if (of->ttft_ms > 0) k->guarded_ttft_s = fmin(k->guarded_ttft_s, of->ttft_ms * 1e-3);
        if (!(of->tpot_ms > 0) || of->tpot_ms * 1e-3 >= k->guarded_tpot_s) continue;
        k->guarded_tpot_s = of->tpot_ms * 1e-3;
        k->guarded_tpot_class = i;
    }
}

void core_rank_classes(struct td_core *c)
{
    const struct td_core_config *g = &c->cfg;
    struct core_classes *k = &c->classes;
    k->n_ranks = 1;
    for (uint32_t i = 0; i < g->n_classes; i++) {
        k->rank[i] = place_of(g, i, heavier);
        k->turn[i] = place_of(g, i, sooner);
        if (k->rank[i] >= k->n_ranks) k->n_ranks = k->rank[i] + 1;
        k->ceiling[i] = CEILING_START;
        k->guard_tpot_s[i] = INFINITY;
    }
    for (uint32_t i = 0; i < g->n_classes; i++)
        for (uint32_t rank = k->rank[i] + 1; rank < k->n_ranks && g->classes[i].tpot_ms > 0; rank++)
            k->guard_tpot_s[rank] = fmin(k->guard_tpot_s[rank], g->classes[i].tpot_ms * 1e-3);
    guard_classes(g, k);
}

/* A request of a rank met its objectives, or missed them or was refused: those behind it may
 * take more of the fleet, or less. Steps are so that a ceiling would rest half-way between the
 * attainment that is asked for and 1; the drift takes it a little higher. */
void core_move_ceilings(struct td_core *c, uint32_t rank, bool good)
{
    if (rank + 1 >= c->classes.n_ranks) return;
    double target = (1 + c->cfg.attainment) / 2,
           by = good ? CEILING_STEP : -CEILING_STEP * target / (1 - target);
    for (uint32_t i = rank + 1; i < c->classes.n_ranks; i++) {
        c->classes.ceiling[i] = fmin(CEILING_MAX, fmax(CEILING_MIN, c->classes.ceiling[i] + by));
        td_queue_set_ceiling(c->order, i, c->classes.ceiling[i]);
    }
}

void core_drift_ceilings(struct td_core *c, double dt_s)
{
    for (uint32_t i = 1; i < c->classes.n_ranks; i++) { /* while nobody of the ranks above comes,
                                                           nothing is kept for them */
        c->classes.ceiling[i] = fmin(CEILING_MAX, c->classes.ceiling[i] + CEILING_DRIFT * dt_s);
        td_queue_set_ceiling(c->order, i, c->classes.ceiling[i]);
    }
}
