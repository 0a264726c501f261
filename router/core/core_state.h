/* core_state.h - the state of the router's core, and the functions by which the files that make
 * it up call one another: core.c, classes.c, lifecycle.c, workers.c, arrival.c, leg_events.c,
 * tick.c, views.c and dispatch.c. No other file includes it. */
#ifndef TD_ROUTER_CORE_STATE_H
#define TD_ROUTER_CORE_STATE_H

#include "router/core/core.h"
#include "router/core/load.h"
#include "router/core/account.h"
#include "router/core/queue.h"
#include "router/core/policy.h"
#include "router/core/prefix_index.h"

#define NS_PER_MS 1000000ull
/* Eleven days: a longer objective is as good as none. */
#define MAX_OBJECTIVE_MS 1e9
/* Ten minutes: a worker that reports a longer step or transfer is in error. */
#define MAX_REPORTED_US 600000000

_Static_assert(TD_CORE_MAX_CLASSES <= TD_QUEUE_MAX_CLASSES, "the queue has a place for each class");
_Static_assert(TD_CORE_MAX_WORKERS <= TD_LOAD_MAX_WORKERS, "fullness has a part for each worker");

enum phase { FREE = 0, QUEUED, RESERVING, PREFILLING, DECODING };

struct request {
    enum phase phase;
    uint64_t id;
    uint32_t attempt, failovers, slo_class;
    uint64_t tenant;
    int32_t priority;
    uint64_t n_prompt, n_tokens, max_tokens; /* n_tokens: prompt + output known to the client's
                                                stream */
    double ttft_s, tpot_s;                   /* objectives; INFINITY = none */
    uint64_t arrived_ns, queued_ns, moved_ns, placed_ns, told_ns, first_ns, last_ns;
    uint64_t computed_ns; /* when the prefill leg of this attempt gave its token; 0 = not so far */
    struct td_leg prefill, decode;
    struct td_choice choice;  /* of this attempt: what was predicted */
    double decode_cost_s;     /* time that it adds to the steps of a decode worker, over all of its
                                 output */
    double work_s;            /* predicted prefill, for those behind it in the queue */
    uint64_t computed_tokens; /* by the open prefill leg, as far as we know: wasted if the
                                 attempt is lost */
    bool next;                /* nothing was before it at the prefill worker when that was told */
    bool refused;             /* a worker called the request invalid */
    bool timed;               /* its prefill worker may give the prompt back, see td_act_start */
    bool decode_flows;        /* a decode token of this attempt was seen: the KV is there */
    bool sender_finished;     /* the decode leg ended because the request ends with the prefill
                                 worker's first token, which is still to come and is waited for */
    bool output_done;         /* the client has its last token: whatever is lost now, nothing is
                                 left to compute */
    uint64_t finished_ns;     /* all is done but what the prefill worker says of its part, see
                                 core_finish(); 0 = not so far */
    uint64_t *hashes;         /* [TD_CORE_MAX_HASHES] in the core's store */
    uint32_t n_hashes, hash_tokens;
};

/* What the configuration's classes come to. A class's rank is its place by weight, and rank 0 goes
 * first. */
struct core_classes {
    uint32_t n_ranks;
    uint32_t rank[TD_CORE_MAX_CLASSES];       /* of each class */
    uint32_t turn[TD_CORE_MAX_CLASSES];       /* of each class in the workers' queues: by weight,
                                                 then by TTFT */
    uint64_t asked_ns[TD_CORE_MAX_CLASSES];   /* of each rank: its last request; 0 = none so far */
    double ceiling[TD_CORE_MAX_CLASSES];      /* of each rank but the first: how full the fleet
                                                 may be for it to take work; above 1: no limit */
    double guard_tpot_s[TD_CORE_MAX_CLASSES]; /* of each rank: the tightest TPOT of the ranks
                                                 before it; INFINITY = none */
    /* The tightest objectives of all ranks but the last, for which lesser ones leave room;
     * INFINITY = none. */
    double guarded_ttft_s, guarded_tpot_s;
    uint32_t guarded_tpot_class; /* whose guarded_tpot_s is */
};

/* What the core has seen lately, as moving means. */
struct core_trend {
    double cost_s; /* request.decode_cost_s of recent arrivals */
    uint32_t n_costs;
    double rate_s;          /* when stats.arrival_rate was last brought up to date */
    double utilisation[2];  /* of the workers of each role, 0..1 */
    double utilisation_s;   /* when it was last brought up to date */
    double decode_pressure; /* see struct td_policy_view */
    double refused_share;   /* of recent decisions, those that were REJECT */
};

struct td_core {
    struct td_core_config cfg;
    td_policy_fn policy;
    struct td_core_worker workers[TD_CORE_MAX_WORKERS];
    struct td_core_scan scans[TD_CORE_MAX_WORKERS];
    struct td_load fullness;
    uint32_t n_workers, by_role[2][TD_CORE_MAX_WORKERS], n_by_role[2];
    uint64_t cursor[2], random;
    struct request *requests;
    uint32_t requests_end; /* no slot from here on has held a request */
    uint64_t *hash_store;
    uint32_t *hit_tokens; /* [TD_CORE_MAX_WORKERS] */
    struct td_queue *order;
    struct core_classes classes;
    struct core_trend trend;
    struct td_latency *latency;
    struct td_prefix_index *index;
    uint32_t n_live;
    struct td_core_stats stats;
    struct td_stage start;  /* td_policy_view.start_s */
    int64_t foreign_on_way; /* sum of the workers' foreign.on_way */
    struct td_decode_stages stages;
    struct td_scaling advice;
    enum td_bound bound;
    bool room_changed; /* something ended or came: the queue is worth a walk */
    /* of the event being applied */
    uint64_t now_ns;
    double now_s;
    struct td_core_action *out;
    size_t n_out;
};

/* --- classes.c --- */
td_status core_check_classes(const struct td_core_config *config, struct td_err *err);
void core_rank_classes(struct td_core *c);
/* A request of this rank met its objectives, or missed them or was refused. */
void core_move_ceilings(struct td_core *c, uint32_t rank, bool good);
/* dt_s seconds have passed. */
void core_drift_ceilings(struct td_core *c, double dt_s);

/* --- lifecycle.c --- */
struct td_core_action *core_emit(struct td_core *c, enum td_core_action_kind kind,
                                 const struct request *r);
struct td_queue_key core_key_of(const struct td_core *c, const struct request *r);
void core_queue_insert(struct td_core *c, struct request *r);
void core_queue_remove(struct td_core *c, struct request *r);
void core_leg_close(struct td_core *c, struct td_leg *leg);
/* Has its prefill worker been called? A leg that is only planned has not. */
bool core_prefill_told(const struct request *r);
void core_cancel_legs(struct td_core *c, struct request *r);
/* Frees the request's place in the table. */
void core_forget(struct td_core *c, struct request *r);
/* Ends the request with this code; retry_s counts with TD_CODE_RESOURCE_EXHAUSTED. */
void core_fail(struct td_core *c, struct request *r, enum td_code code, const char *reason,
               double retry_s);
void core_complete(struct td_core *c, struct request *r);
void core_finish(struct td_core *c, struct request *r);
void core_requeue(struct td_core *c, struct request *r, bool waits_anew);
void core_fail_over(struct td_core *c, struct request *r, const char *reason);

/* --- workers.c --- */
void core_on_join(struct td_core *c, const struct td_ev_join *e);
void core_on_snapshot(struct td_core *c, const struct td_ev_snapshot *e);
void core_on_foreign(struct td_core *c, const struct td_ev_foreign *e);
void core_on_drain(struct td_core *c, uint32_t worker);
void core_on_gone(struct td_core *c, uint32_t worker);
void core_on_step(struct td_core *c, const struct td_ev_step *e);
void core_on_block_add(struct td_core *c, const struct td_ev_block *e);
void core_on_block_evict(struct td_core *c, const struct td_ev_block *e);
void core_on_blocks_reset(struct td_core *c, uint32_t worker);
/* The decode worker's next step, for the scans of policies. */
void core_refresh_step(struct td_core *c, uint32_t worker);
/* Nothing is placed there until its next snapshot. */
void core_shun(struct td_core *c, uint32_t worker);
void core_set_state(struct td_core_worker *w, enum td_worker_state state);
void core_worker_lost(struct td_core *c, uint32_t worker, const char *reason);

/* --- arrival.c --- */
void core_on_request(struct td_core *c, const struct td_ev_request *e);

/* --- leg_events.c --- */
void core_on_ticket(struct td_core *c, const struct td_ev_ticket *e);
void core_on_first_token(struct td_core *c, const struct td_ev_first_token *e);
void core_on_token(struct td_core *c, const struct td_ev_token *e);
void core_on_prefill_end(struct td_core *c, const struct td_ev_prefill_end *e);
void core_on_decode_end(struct td_core *c, const struct td_ev_decode_end *e);
void core_on_stop(struct td_core *c, const struct td_ev_end *e);
void core_on_cancel(struct td_core *c, const struct td_ev_end *e);
/* The prefill worker's call is made now. */
void core_prefill_tell(struct td_core *c, struct request *r);

/* --- tick.c --- */
void core_on_tick(struct td_core *c, const struct td_ev_tick *e);

/* --- dispatch.c --- */
bool core_any_worker(const struct td_core *c, enum td_core_role role);
/* Will the decode worker prefill it, whatever a policy says? */
bool core_wants_local(const struct td_core *c, const struct request *r);
/* Is one token left, so that a prefill worker alone can answer? Then no decode worker is needed. */
bool core_wants_prefill_only(const struct td_core *c, const struct request *r);
struct td_policy_view core_view_of(struct td_core *c);
bool core_too_late(struct td_core *c, const struct request *r);
/* In what time, in s, the prefill worker that is told of the request now should compute it;
 * INFINITY = however long. */
double core_finish_within_s(struct td_core *c, const struct request *r);
/* Walks the queue in its order and carries out what the policy says of each. One that is held
 * does not stop those behind it. */
void core_dispatch(struct td_core *c);

#endif
