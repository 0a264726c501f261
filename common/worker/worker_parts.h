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

/* ---- requests.c ---- */

void td_worker_take_mail(struct td_worker *w); /* [engine thread] what the rpc thread has posted */

/* ---- step_loop.c ---- */

void *td_worker_engine_main(void *worker);           /* the engine thread */
void td_worker_update_snapshot(struct td_worker *w); /* [engine thread, or before it is started] */

/* ---- worker_metrics.c ---- */

/* What the metrics are made of. Totals only grow. */
struct td_worker_numbers {
    double kv_usage; /* KV blocks held by live requests over all blocks */
    uint32_t n_running, n_waiting;
    uint64_t n_preemptions, prefill_tokens, decode_tokens, steps;
    struct td_kv_pool_stats kv;
    struct td_xfer_stats xfer;
};
void td_worker_metrics_open(void);
void td_worker_metrics_update(const struct td_worker_numbers *n);

/* ---- kv_open.c ---- */

td_status td_worker_check_kv_port(struct td_worker *w, struct td_err *err); /* before the weights */
td_status td_worker_open_xfer(struct td_worker *w, struct td_err *err);

#endif
