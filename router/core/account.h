/* account.h - the account of one worker: what we gave it, corrected by what its snapshots say. The
 * only writer of struct td_core_worker's numbers.
 *
 * A prefill job is pending from its placement to its first token, and planned until its call is
 * made (the ticket comes first); free_at_s is when the worker would begin a new one. Assignments
 * move it at once. A first token, or a snapshot that has seen all our calls (calls_seen >=
 * calls_sent), sets it anew from what is really left, so the account neither waits for a poll
 * nor drifts. A worker knows nothing of planned jobs: no snapshot takes them away. A decode leg
 * is reserved from its placement to its first decode token, then active. What is added is what
 * is taken away (conservation): each leg remembers its own amounts. Pure, one thread. */
#ifndef TD_ROUTER_CORE_ACCOUNT_H
#define TD_ROUTER_CORE_ACCOUNT_H

#include "router/core/policy.h"

/* One leg's amounts in its worker's account. */
struct td_leg {
    uint32_t worker;   /* TD_NO_WORKER = no leg */
    bool pending;      /* prefill: no first token yet; decode: not yet decoding */
    bool planned;      /* prefill: the worker has not been told */
    bool local;        /* decode: prefills for itself */
    uint64_t tokens;   /* prefill: to compute; decode: held now */
    uint64_t promised; /* decode */
    uint64_t local_tokens;
    double work_s; /* prefill: predicted */
    uint32_t turn; /* prefill: of its class */
    double link_s; /* prefill: of its transfer, predicted */
    double tpot_s; /* decode: its objective */
};

/* Makes w->scan and w's part of w->fullness true again: called by everybody who writes to *w,
 *     the functions below included. */
void td_account_changed(struct td_core_worker *w);
/* what it should be */
void td_account_scan(const struct td_core_worker *w, struct td_core_scan *ret_scan);
/* what it adds to the fleet's fullness */
void td_account_part(const struct td_core_worker *w, struct td_load_part *ret_part);

/* *w is zeroed, or a former holder of the place. */
void td_account_join(struct td_core_worker *w, const struct td_ev_join *join, uint64_t now_ns);
void td_account_prefill_open(struct td_core_worker *w, struct td_leg *leg, uint32_t worker,
                             uint32_t turn, uint64_t n_tokens, double work_s, double now_s);
/* Its KV takes link_s on the link, from from_s on at the earliest: with the first chunk. Once
 * for each leg. */
void td_account_link_open(struct td_core_worker *w, struct td_leg *leg, double link_s,
                          double from_s);
/* its call is made now */
void td_account_prefill_tell(struct td_core_worker *w, struct td_leg *leg);
/* its first token was seen */
void td_account_prefill_done(struct td_core_worker *w, struct td_leg *leg, double now_s);
void td_account_decode_open(struct td_core_worker *w, struct td_leg *leg, uint32_t worker,
                            bool local, uint64_t n_tokens, uint64_t n_promised, uint64_t n_local,
                            double tpot_s);
/* its first decode token was seen */
void td_account_decode_active(struct td_core_worker *w, struct td_leg *leg);
void td_account_decode_grow(struct td_core_worker *w, struct td_leg *leg, uint64_t n_more);
/* Ends either kind of leg; leg->worker is TD_NO_WORKER after it. */
void td_account_close(struct td_core_worker *w, struct td_leg *leg, double now_s);
/* The leg's call failed to reach its worker, as far as can be told (UNAVAILABLE before any
 * answer): no snapshot will count it. Before its close. */
void td_account_call_failed(struct td_core_worker *w, const struct td_leg *leg);
void td_account_snapshot(struct td_core_worker *w, const struct td_ev_snapshot *snapshot,
                         double now_s);

#endif
