/* shares.h - how many of --max-requests each model may hold, where a router serves several.
 *
 * A model's part is max_requests divided by the number of models. Room that nobody uses is for
 * whoever asks, so one busy model may hold far more than its part, but not what is kept:
 *   (1) for each model an eighth of its part, at least one request where the part is two: the first
 *       requests of a quiet model find room, however flooded another one is;
 *   (2) for a model that was refused within the last SHARE_SHORT_MS its whole part: room that
 *       others' requests free goes to it, and to no model above its own part, until it has that.
 * A router of one model keeps nothing. Nobody's request is ended to make room.
 *
 * Pure: the caller's clock, no memory of its own. Threads: the router's loop thread alone. */
#ifndef TD_ROUTER_SHARES_H
#define TD_ROUTER_SHARES_H

#include <stdbool.h>
#include <stdint.h>

#include "router/model_names.h"

/* Twice the delay that a refused client is told: it has asked again by then. */
enum { SHARE_SHORT_MS = 2000 };

struct router_share {
    uint32_t n_live;         /* requests that it holds */
    uint64_t short_until_ns; /* it was refused: its whole part is kept until then */
};

struct router_shares {
    uint32_t n_requests; /* that there may be: max_requests */
    uint32_t n_models;   /* the models' places are 0..n_models - 1 */
    struct router_share of[ROUTER_MAX_MODELS];
};

/* n_requests / n_models, at least 1. */
uint32_t router_share_part(const struct router_shares *s);
/* Whether the model may have n more requests now. True: the caller adds them to n_live, each when
 * it begins. False: the model counts as refused now. */
bool router_share_may_take(struct router_shares *s, uint32_t model, uint32_t n, uint64_t now_ns);

#endif
