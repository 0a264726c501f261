/* account.h - the account of one worker: what the router gave it, corrected by what the worker's
 * snapshots say. Only account.c writes the sums of struct td_core_worker.
 *
 * Prefill. A job is pending from its placement to its first token. It is planned until its call is
 * made, which waits for the decode worker's ticket. free_at_s is when the worker would begin a new
 * job, and an assignment moves it at once. A first token computes it anew from what is left, and so
 * does a snapshot that has seen all of the router's calls (calls_seen >= calls_sent): the account
 * neither waits for a poll nor drifts. A worker does not know of planned jobs, so a snapshot leaves
 * them as they are.
 *
 * Decode. A leg is reserved from its placement to its first decode token, then active.
 *
 * Each leg remembers its own amounts, so what was added is what is taken away (conservation). Pure,
 * one thread. */
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

/* Brings w->scan and w's part of w->fullness up to date. Whoever writes to *w calls it afterwards;
 * the functions below do so themselves. */
void td_account_changed(struct td_core_worker *w);
/* What w->scan should be. */
void td_account_scan(const struct td_core_worker *w, struct td_core_scan *ret_scan);
/* What the worker adds to the fleet's fullness. */
void td_account_part(const struct td_core_worker *w, struct td_load_part *ret_part);

/* *w is zeroed, or has the account of a worker that had this index before. */
void td_account_join(struct td_core_worker *w, const struct td_ev_join *join, uint64_t now_ns);
void td_account_prefill_open(struct td_core_worker *w, struct td_leg *leg, uint32_t worker,
                             uint32_t turn, uint64_t n_tokens, double work_s, double now_s);
/* The leg's KV takes link_s on the link, and its first chunk can leave at from_s. Once for each
 * leg. */
void td_account_link_open(struct td_core_worker *w, struct td_leg *leg, double link_s,
                          double from_s);
/* The leg's call is made now. */
void td_account_prefill_tell(struct td_core_worker *w, struct td_leg *leg);
/* The leg's first token was seen. */
void td_account_prefill_done(struct td_core_worker *w, struct td_leg *leg, double now_s);
void td_account_decode_open(struct td_core_worker *w, struct td_leg *leg, uint32_t worker,
                            bool local, uint64_t n_tokens, uint64_t n_promised, uint64_t n_local,
                            double tpot_s);
/* The leg's first decode token was seen. */
void td_account_decode_active(struct td_core_worker *w, struct td_leg *leg);
void td_account_decode_grow(struct td_core_worker *w, struct td_leg *leg, uint64_t n_more);
/* Ends either kind of leg; leg->worker is TD_NO_WORKER after it. */
void td_account_close(struct td_core_worker *w, struct td_leg *leg, double now_s);
/* The leg's call probably did not reach its worker (it ended UNAVAILABLE before any answer), so no
 * snapshot will count it. Called before td_account_close. */
void td_account_call_failed(struct td_core_worker *w, const struct td_leg *leg);
/* What other routers have there; promised_tokens: theirs. Sets this router's share of what is
 * free. */
void td_account_foreign(struct td_core_worker *w, const struct td_ev_foreign *foreign,
                        double promised_tokens);
void td_account_snapshot(struct td_core_worker *w, const struct td_ev_snapshot *snapshot,
                         double now_s);

#endif
