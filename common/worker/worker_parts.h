/* worker_parts.h - what the files of common/worker say to one another. Not for daemons: they
 * include worker.h. */
#ifndef TD_WORKER_PARTS_H
#define TD_WORKER_PARTS_H

#include "common/worker/worker.h"

/* ---- callers.c ---- */

/* [rpc thread] Whether the call's proof, if one is needed, is for this request and attempt; else
 * it has ended the call. */
bool td_worker_is_proved(struct td_worker *w, struct td_rpc_call *call, uint64_t request,
                         uint32_t attempt);
/* [rpc thread] The router whose Join the call's proof is of; NULL without one. */
struct td_worker_router *td_worker_router_of(struct td_worker *w, struct td_rpc_call *call);
/* [any] The number of the router that has this session; -1: none. An older router says session 0:
 * that is the one router that has joined, and -1 if several have. */
int td_worker_router_at(const struct td_worker *w, uint64_t session);

/* [rpc thread] on_open of every method: ends calls of those who have not proved to be the router,
 * before their message is read. */
void td_worker_on_open(struct td_rpc_call *call, void *ctx);
/* method Prove */
void td_worker_on_prove(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx);

/* ---- requests.c ---- */

extern const struct td_rpc_method td_worker_methods[];
void td_worker_on_guided(void *worker, void *req); /* [thread of grammars] a job of req ended */
void td_worker_take_mail(struct td_worker *w); /* [engine thread] what the rpc thread has posted */
/* [rpc thread] */
void td_worker_post(struct td_worker *w, struct td_mail *m);
/* A call for the role, or its refusal. */
void td_worker_take_decode(struct td_worker *w, const struct td_caller *caller,
                           const Tandem__V1__DecodeRequest *in);
void td_worker_take_prefill(struct td_worker *w, const struct td_caller *caller,
                            const Tandem__V1__PrefillRequest *in);

/* ---- multiplex.c: many calls in one stream ---- */

/* [rpc thread] method Multiplex */
void td_multiplex_on_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx);
void td_multiplex_on_end(struct td_rpc_call *call, bool cancelled, void *ctx);
/* [rpc thread] Sends the end of a call that becomes no request. */
void td_multiplex_turn_away(const struct td_caller *caller, enum td_code code, const char *details);
/* [rpc thread] The worker stops: ends the streams after what was sent. */
void td_multiplex_end_all(void *worker);

/* [engine thread] enter: a request of the stream begins. leave: it is freed. */
void td_multiplex_enter(struct td_multiplex *m);
void td_multiplex_leave(struct td_multiplex *m);
/* [engine thread] The stream is over: freed when its last request is. */
void td_multiplex_over(struct td_multiplex *m);
/* [engine thread] Adds an event, or the end, of a call to the rows that flush will send. */
void td_multiplex_event(const struct td_caller *caller, const ProtobufCMessage *event);
void td_multiplex_finish(const struct td_caller *caller, enum td_code code, const char *details);
/* [engine thread] Sends the rows of all streams, then takes the requests that were freed meanwhile
 * off w->n_live. */
void td_multiplex_flush(struct td_worker *w);

/* ---- step_loop.c ---- */

uint64_t td_worker_kv_bytes_per_token(const struct td_worker *w); /* scales and padding included */

void *td_worker_engine_main(void *worker);           /* the engine thread */
void td_worker_update_snapshot(struct td_worker *w); /* [engine thread, or before it is started] */

/* ---- worker_metrics.c ---- */

/* What the metrics are made of. Totals only grow. */
struct td_worker_numbers {
    double kv_usage; /* KV blocks held by live requests over all blocks */
    uint32_t n_running, n_waiting;
    uint64_t n_preemptions, prefill_tokens, decode_tokens, steps, kv_bytes_per_token;
    struct td_kv_pool_stats kv;
    struct td_xfer_stats xfer;
    struct td_expert_counts experts;
    struct td_expert_memory expert_memory;
};
void td_worker_metrics_open(void);
void td_worker_metrics_update(const struct td_worker_numbers *n);

/* ---- kv_open.c ---- */

td_status td_worker_check_kv_port(struct td_worker *w, struct td_err *err); /* before the weights */
td_status td_worker_open_xfer(struct td_worker *w, struct td_err *err);

#endif
