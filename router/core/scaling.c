/* scaling.c - see scaling.h. */
#include "router/core/scaling.h"

#include <math.h>

#define TARGET 0.85 /* utilisation of a worker that still leaves room for bursts */
#define HALF_LIFE_S 20.0
#define UP_S 3.0
#define DOWN_S 60.0
#define LEARN_ARRIVALS 20
#define BUSY 0.9
#define PRESSURE 0.05
#define MAX_WANT 4096

const char *td_bound_name(enum td_bound b)
{
    static const char *const names[TD_BOUND_N] = {"none", "prefill", "transfer", "decode",
                                                  "router"};
    return names[b];
}

static void decay(struct td_scaling *a, double now_s)
{
    double keep = exp2(-(now_s - a->updated_s) / HALF_LIFE_S);
    a->offered_prefill_s *= keep;
    a->offered_transfer_s *= keep;
    a->offered_tokens *= keep;
    a->offered_requests *= keep;
    a->updated_s = now_s;
}

void td_scaling_arrival(struct td_scaling *a, double now_s, double prefill_s, double transfer_s,
                        double n_out, double context, double tpot_s)
{
    decay(a, now_s);
    double share = M_LN2 / HALF_LIFE_S; /* the area under one arrival is one */
    a->offered_prefill_s += share * prefill_s;
    a->offered_transfer_s += share * transfer_s;
    a->offered_tokens += share * n_out;
    a->offered_requests += share;
    a->n_arrivals++;
    double step = fmax(0.01, 1.0 / (double)a->n_arrivals);
    a->context += step * (context - a->context);
    if (tpot_s < INFINITY) a->tpot_s += (a->tpot_s > 0 ? step : 1) * (tpot_s - a->tpot_s);
}

static double step_of(const struct td_scaling *a, const struct td_scaling_fleet *f,
                      const struct td_latency *l, double batch)
{
    return td_latency_step(l, f->decode_node, batch, batch * a->context, 0, 0);
}

/* The largest batch within objective, KV and max_seqs; at least 1. */
static double best_batch(const struct td_scaling *a, const struct td_scaling_fleet *f,
                         const struct td_latency *l)
{
    double most =
               fmin(f->max_seqs, a->context > 0 ? (double)f->kv_tokens / a->context : f->max_seqs),
           least = 1;
    if (a->tpot_s <= 0 || step_of(a, f, l, most) * f->margin <= a->tpot_s)
        return fmax(1, floor(most));
    while (most - least > 0.5) {
        double middle = (most + least) / 2;
        if (step_of(a, f, l, middle) * f->margin <= a->tpot_s)
            least = middle;
        else
            most = middle;
    }
    return fmax(1, floor(least));
}

/* Moves want[role] towards need[role]. */
static void follow(struct td_scaling *a, int role, double now_s)
{
    uint32_t up = (uint32_t)fmin(MAX_WANT, fmax(1, ceil(a->need[role])));
    if (a->want[role] == 0) {
        a->want[role] = up;
        return;
    }
    bool above = up > a->want[role],
         below = a->want[role] > 1 && a->need[role] <= a->want[role] - 1.0;
    if (!above)
        a->above_since_s[role] = 0;
    else if (!(a->above_since_s[role] > 0))
        a->above_since_s[role] = now_s;
    else if (now_s - a->above_since_s[role] >= UP_S) {
        a->want[role] = up;
        a->above_since_s[role] = 0;
    }
    if (!below)
        a->below_since_s[role] = 0;
    else if (!(a->below_since_s[role] > 0))
        a->below_since_s[role] = now_s;
    else if (now_s - a->below_since_s[role] >= DOWN_S) {
        a->want[role]--;
        a->below_since_s[role] = now_s;
    }
}

static enum td_bound verdict(const struct td_scaling *a, const struct td_scaling_fleet *f)
{
    double links = f->n[0] && !f->colocated ? a->offered_transfer_s / f->n[0] : 0;
    enum td_bound prefill = f->colocated ? TD_BOUND_DECODE : TD_BOUND_PREFILL;
    if (f->router_busy > BUSY) return TD_BOUND_ROUTER;
    if (f->decode_pressure > PRESSURE) return TD_BOUND_DECODE;
    if (links > BUSY) return TD_BOUND_TRANSFER;
    if (f->n[0] && f->utilisation[0] > BUSY) return prefill;
    /* bursts: not busy on average, yet too slow for them */
    return f->refused_share > PRESSURE ? prefill : TD_BOUND_NONE;
}

enum td_bound td_scaling_update(struct td_scaling *a, double now_s,
                                const struct td_scaling_fleet *f, const struct td_latency *l)
{
    decay(a, now_s);
    double prefill = a->offered_prefill_s / TARGET;
    a->need[0] = f->colocated ? 0 : prefill;
    if (f->n[1]) {
        double batch = best_batch(a, f, l), step = step_of(a, f, l, batch);
        a->need[1] = a->offered_tokens * step / batch / TARGET + (f->colocated ? prefill : 0);
    }
    if (a->n_arrivals >= LEARN_ARRIVALS)
        for (int role = 0; role < 2; role++)
            if (role == 0 ? !f->colocated : f->n[1] > 0) follow(a, role, now_s);
    return verdict(a, f);
}
