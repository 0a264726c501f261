/* policy.h - which worker gets the next request: a pure function of what the core knows, chosen by name at start. */
#ifndef TD_ROUTER_POLICY_H
#define TD_ROUTER_POLICY_H

#include <stdint.h>

#include "router/core/core.h"

#define TD_NO_WORKER UINT32_MAX

struct td_core_worker {
    enum td_worker_state state;
    enum td_core_role role;
    bool draining;              /* it said so: stays true while the worker is suspect */
    bool shunned;               /* a call to it just failed or it was full: nothing more until its next snapshot shows that it lives */
    uint64_t kv_tokens;         /* capacity */
    uint32_t max_seqs;
    uint32_t assigned;          /* our ledger */
    uint64_t assigned_tokens;
    uint64_t snapshot_seq, snapshot_ns, held_tokens, queued_tokens;
    uint32_t n_busy;
};

struct td_policy_view {
    const struct td_core_worker *workers;   /* [n_workers] */
    uint32_t n_workers;
    uint64_t *cursor;                       /* round robin's memory, one per role: cursor[role] */
};

/* A worker of `role` that may take `n_tokens` more (ready, not full, below max_seqs, big enough), or TD_NO_WORKER. */
typedef uint32_t (*td_policy_fn)(const struct td_policy_view *view, enum td_core_role role, uint64_t n_tokens);

/* True when some worker of the role may take n_tokens now. */
bool td_policy_has_room(const struct td_policy_view *view, enum td_core_role role, uint64_t n_tokens);

td_policy_fn td_policy_by_name(const char *name); /* NULL when unknown */
const char *td_policy_names(void);                /* "round_robin|least_token" */

#endif
