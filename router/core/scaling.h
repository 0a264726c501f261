/* scaling.h - how many workers of each role the load asks for, and what bounds goodput now: for the
 * autoscaler and the operator. No placement asks it.
 *
 * Offered work counts every arrival, also those that were refused: a fleet that refuses half of its
 * load would else look well sized.
 *   prefill  need = predicted prefill seconds offered per second / TARGET
 *   decode   need = output tokens offered per second / (B / step(B, B * context)), B = the largest
 *            batch whose step keeps the TPOT objective asked for (mean of the arrivals that have
 *            one) with its margin, and whose KV and max_seqs fit
 *   colocated: no prefill worker is asked for; the prefill seconds are the decode workers' too.
 * Hysteresis: a count goes up when its need has been above it for UP_S, down by one when one fewer
 * would still have been within the target for DOWN_S. The first advice about a role is given after
 * LEARN_ARRIVALS.
 *
 * Sources: Dynamo's planner; AIConfigurator (rate matching).
 *
 * The verdict names one bound: prefill (busy, or TTFT objectives refused while decode has room),
 * decode (no worker keeps a TPOT objective or has KV), transfer (links of prefill workers busy),
 * router (its thread busy), or none. Pure, one thread, no allocation. */
#ifndef TD_ROUTER_CORE_SCALING_H
#define TD_ROUTER_CORE_SCALING_H

#include <stdbool.h>
#include <stdint.h>

#include "router/core/latency.h"

enum td_bound {
    TD_BOUND_NONE,
    TD_BOUND_PREFILL,
    TD_BOUND_TRANSFER,
    TD_BOUND_DECODE,
    TD_BOUND_ROUTER,
    TD_BOUND_N
};
const char *td_bound_name(enum td_bound bound); /* "none", "prefill", ... */

struct td_scaling {
    double offered_prefill_s, offered_transfer_s; /* seconds of one worker's time, asked for
                                                     per second (EWMA) */
    double offered_tokens, offered_requests;      /* output tokens, requests per second */
    double context, tpot_s;                       /* means over arrivals; tpot of those that
                                                     have one, 0 = none has */
    double updated_s;
    uint64_t n_arrivals;
    double need[2];                            /* by td_core_role */
    uint32_t want[2];                          /* 0 = too early to say */
    double above_since_s[2], below_since_s[2]; /* 0 = is not */
};

/* One arrival: its predicted prefill and transfer seconds, expected output, context in the
 * middle of its life, TPOT objective (INFINITY = none). */
void td_scaling_arrival(struct td_scaling *a, double now_s, double prefill_s, double transfer_s,
                        double n_out, double context, double tpot_s);

/* What the fleet is like, for an update. */
struct td_scaling_fleet {
    uint32_t n[2];  /* ready workers by role */
    bool colocated; /* decode workers prefill for themselves:
                       there is no other role */
    /* refused: of recent decisions, for the TTFT objective */
    double utilisation[2], decode_pressure, refused_share;
    double router_busy;   /* of its thread, 0..1 */
    uint32_t decode_node; /* one of them, to ask the latency model
                             about; only when n[decode] > 0 */
    uint64_t kv_tokens;
    uint32_t max_seqs;
    double margin; /* of TPOT */
};
enum td_bound td_scaling_update(struct td_scaling *a, double now_s,
                                const struct td_scaling_fleet *fleet,
                                const struct td_latency *latency);

#endif
