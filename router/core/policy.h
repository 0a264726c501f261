/* policy.h - where the next request goes: a function of what the core knows, chosen by name at
 * start. All policies see the same inputs, so they can be compared.
 *
 * A policy answers PLACE with a pair of workers (or with one decode worker that prefills, too),
 * HOLD (ask again when something has changed) or REJECT. Of the daemon's policies only `goodput`
 * rejects. The table of policy.c says what each minimises. Policies of other systems, to compare
 * with, are in sim/baselines.c. */
#ifndef TD_ROUTER_POLICY_H
#define TD_ROUTER_POLICY_H

#include <stdint.h>

#include "router/core/core.h"
#include "router/core/load.h"
#include "router/core/prefix_index.h"

#define TD_NO_WORKER UINT32_MAX

#define TD_POLICY_KV_CEILING 0.95 /* share of a decode worker's KV that promises may fill */

/* What a scan over all workers reads of one, half a cache line: always what td_account_changed
 * would make of the worker now. */
struct td_core_scan {
    uint64_t room_tokens; /* longest sequence it can take now: 0 when it can take none */
    union {
        /* busy until; two terms that break ties */
        struct {
            double busy_s, pending, assigned;
        } prefill;
        /* kv_limit: of promised tokens; INFINITY while it is empty */
        struct {
            double key, promised, kv_limit;
        } decode;
    };
};

/* A stage that no model predicts, learned as it is seen: its mean over the last requests, to be
 * added to what is predicted. */
struct td_stage {
    double s, last_s; /* the mean; when it was seen last, on the core's clock */
    uint32_t n;
};
void td_stage_learn(struct td_stage *stage, double now_s, double seen_s);

/* A decode worker's stages; those of all decode workers together have the same struct. */
struct td_decode_stages {
    /* From the router's call to the ticket, which comes between two steps. */
    struct td_stage reserve;
    /* From the end of a prompt's transfer to the batch, which it joins between two steps. */
    struct td_stage join;
    /* What the first token of a prompt that is prefilled there takes beside the prefill: calls,
     * streams, and the step that runs. */
    struct td_stage start;
};
/* One worker's mean beside that of all: the longer it has not been seen at this worker, the less
 * its own counts. A worker that was slow once, as in its first seconds, would else get no request
 * that could show that it is not. */
double td_stage_s(const struct td_stage *own, const struct td_stage *all, double now_s);

/* What the account of a prefill worker has besides. A job is a request's prefill: pending from its
 * placement to its first token, planned until the worker is told of it. */
struct td_prefill_account {
    bool one_token; /* the worker answers requests with one token left alone */

    double free_at_s; /* when it would start a new prompt, on the core's clock; past = now */
    double pending_s; /* sum of the pending jobs' predicted times */
    /* The same by the turn of their classes: a job of a later turn is overtaken. */
    struct {
        uint32_t n;
        double s;
    } pending_by_turn[TD_CORE_MAX_CLASSES];
    uint64_t pending_tokens; /* sum of their uncomputed tokens */
    double s_per_token;      /* EWMA over jobs: predicted time for each uncomputed token */
    double s_per_job;        /* the same: for all of a job's */
    double planned_s;        /* of pending_s, what is only planned */
    uint64_t planned_tokens; /* of pending_tokens, likewise */
    uint32_t n_told;         /* of the pending jobs, those that the worker was told of */
    /* Of n_told, those longer than a step: the KV of their first chunks leaves while later chunks
     * are computed. */
    uint32_t n_chunked;

    /* With several routers: when the step that runs there began, as far as is known; a step's end
     * was reported since the last snapshot; its end was seen before, by a first token. */
    double step_from_s;
    bool stepped, end_seen;

    double link_free_at_s; /* when its link has sent what is on the way */
    /* Sum of the predicted transfers of all jobs that are there: the link is never free later than
     * this long after the computing. */
    double link_s;
    /* The same by turn: jobs of later turns get every other transfer at most. */
    double link_by_turn_s[TD_CORE_MAX_CLASSES];
    uint32_t n_sending; /* legs that are computed and still open: their KV is on its way */
    /* Since n_sending was 0, one leg's KV was on the link beside another's, or may have been. */
    bool crowded;
};

/* What the account of a decode worker has besides. */
struct td_decode_account {
    uint64_t promised_tokens; /* sum over its requests of max(tokens now, prompt + expected) */
    double step_s;            /* the next step, refreshed as its batch changes */
    /* How much of what the TPOT of a guarded class leaves that step takes, 0..1; 0 where there is
     * one class alone. */
    double step_share;

    uint32_t n_active;        /* sequences that step */
    uint64_t active_tokens;   /* their context */
    uint64_t reserved_tokens; /* context of those on the way */
    uint64_t local_tokens;    /* prompt tokens that it is to prefill itself */

    double mix_share; /* EWMA share of the steps with decode rows that had prefill rows, too */
    double mix_rows;  /* EWMA of how many prefill rows those had */

    struct td_decode_stages stages;

    double min_tpot_s; /* the tightest objective among its requests; INFINITY = none */
    /* How many have it. 0 while it has requests: lifecycle.c looks for the next tightest. */
    uint32_t n_min_tpot;
};

/* What other routers have at a worker, by what it said last, and this router's share of what was
 * free then: between two snapshots it sees nothing of what the others place. Where they place too
 * much together, the worker refuses (DecodeRequest.no_wait), and the request is placed again.
 * All zero, and seqs_max the worker's own, while it has one router. */
struct td_foreign {
    uint32_t n_routers, n_seqs;
    uint64_t tokens, queued_tokens;
    /* What this worker adds to the core's foreign_on_way. Decode worker: requests of other routers
     * that are here and not in the batch. Prefill worker: minus the number of theirs that are here,
     * which are on the way no longer. */
    int64_t on_way;
    double promised; /* tokens that they have, and are expected to have */
    /* Until the next snapshot: requests assigned here, and tokens promised, may grow to this. Where
     * nothing was promised since the snapshot, one request may take all that was free. */
    uint32_t seqs_max;
    uint64_t promised_then;
    double share_tokens, free_tokens;
};

/* The account of one worker: exact the moment we decide, since we hear of every token. Kept by
 * account.c alone. */
struct td_core_worker {
    enum td_worker_state state;
    enum td_core_role role;
    bool draining; /* it said so: stays true while the worker is suspect */
    bool kept;     /* during a dispatch: its room is for one that has waited long, see dispatch.c */
    /* A call to it just failed, or it was full: nothing more is placed there until its next
     * snapshot shows that it lives. */
    bool shunned;
    uint32_t max_seqs, node_class, max_step_tokens;
    uint64_t kv_tokens; /* capacity */
    uint64_t kv_bytes_per_token;
    double correction;        /* observed / model: above 1 is a slow node */
    uint32_t assigned;        /* requests with a leg here */
    uint64_t assigned_tokens; /* prefill: to compute; decode: held */
    /* prefill: jobs without a first token; decode: legs that are reserved and not yet decoding */
    uint32_t n_pending;
    struct td_prefill_account prefill; /* of a prefill worker; else as it was at the join */
    struct td_decode_account decode;   /* of a decode worker; else as it was at the join */
    struct td_foreign foreign;
    uint64_t busy_us; /* sum of reported step times since the last tick */
    uint64_t snapshot_seq, snapshot_ns, held_tokens, queued_tokens; /* of its last snapshot */
    uint64_t calls_sent, calls_seen; /* to it, by us; by its last snapshot */
    struct td_core_scan *scan;       /* its place in the core's array; NULL = none */
    struct td_load *fullness;        /* of the fleet; NULL = not counted */
    uint32_t at;                     /* its index there */
};

/* What is asked: one request. Times in seconds; INFINITY = no objective. */
struct td_policy_ask {
    uint64_t id;
    uint64_t n_tokens;        /* to have KV for before the first new token */
    uint64_t max_tokens;      /* output still allowed */
    double n_out;             /* output still expected, >= 1 */
    uint32_t slo_class, turn; /* turn: 0 goes first in the workers' queues */
    double ttft_s, tpot_s;    /* what is left of the TTFT objective; the TPOT objective */
    bool best_effort;         /* may not be rejected */
    bool started;             /* its first token was sent: only TPOT counts, and it is never
                                 rejected */
    bool above_share;         /* its tenant has had more than its share: it leaves room for
                                 those who have not */
    bool favoured;            /* it had less, or its class goes before others that come, too:
                                 it pays no price for what is scarce by their doing */
    double mean_cost_s;       /* time that recent arrivals add to decode steps, their mean */
    double size;              /* the time that this one adds, relative to that */
    double guard_tpot_s;      /* of the classes before its own: steps keep it, and room for
                            some more; INFINITY = none */
    bool force_local, allow_deflect;
    bool prefill_only; /* one token is left: a prefill worker needs no decode worker
                          beside it (choice->decode is TD_NO_WORKER then) */
    const uint64_t *hashes;
    uint32_t n_hashes, hash_tokens;
};

enum td_verdict { TD_HOLD, TD_PLACE, TD_REJECT };
struct td_choice {
    enum td_verdict verdict;
    uint32_t prefill, decode; /* prefill == TD_NO_WORKER: local */
    bool local;
    bool no_room;         /* HOLD: no pair of workers has the room, whatever the objectives */
    bool decode_bound;    /* not placed, and the TTFT objective was not the reason */
    uint64_t hit_tokens;  /* expected in the prefix cache of the worker that prefills */
    uint64_t send_tokens; /* whose KV goes over the link: those that the decode worker is
                             not expected to have */
    double prefill_s, ttft_s, gap_s, tpot_s; /* predicted from now on; gap: prefill's first
                                                token -> decode's first step */
    uint32_t ttft_bucket, tpot_bucket;       /* for the margins: td_latency_bucket */
    double stall_s;   /* local: what the prompt adds to the steps beside it */
    double join_s;    /* of gap_s: the wait for the decode worker's step that runs */
    double reserve_s; /* of ttft_s: how much longer the decode worker's ticket takes than the queue
                         before it */
    double wait_s;    /* REJECT: when to come back */
    const char *reason;
};

struct td_policy_view {
    const struct td_core_worker *workers; /* [n_workers] */
    uint32_t n_workers;
    const struct td_core_scan *scans; /* [n_workers] */
    const uint32_t *by_role[2];       /* worker indices of each role, joined and not gone */
    uint32_t n_by_role[2];
    uint64_t *cursor; /* round robin's memory, one per role: cursor[role] */
    uint64_t *random; /* state of the core's generator */
    double now_s;
    double utilisation[2];  /* of each role's workers, 0..1, EWMA over some 5 s */
    double decode_pressure; /* share of recent decisions in which no decode
                               worker could keep a TPOT objective or had KV */
    const struct td_latency *latency;
    const struct td_prefix_index *index; /* or NULL */
    uint32_t *hit_tokens;                /* [n_workers], all 0 outside a call: scratch */
    /* Prompts of other routers that have a ticket, and that no prefill worker has told of yet. */
    double foreign_on_way;
    double start_s; /* what a first token takes beside its prefill when nothing is before it:
                       calls and streams. One mean for all prefill workers: a worker's own would
                       differ by chance, as after its cold first call, and turn a prompt away
                       from its prefix */
    const struct td_decode_stages *stages; /* of all decode workers together */
};

typedef void (*td_policy_fn)(const struct td_policy_view *view, const struct td_policy_ask *ask,
                             struct td_choice *ret_choice);

/* Ready, not shunned, not kept, below its seqs_max, and big enough ever to hold n_tokens. Here,
 * since every scan asks it of every worker. */
static inline bool td_worker_can_take(const struct td_core_worker *w, uint64_t n_tokens)
{
    return w->state == TD_WORKER_READY && !w->shunned && !w->kept &&
           w->assigned < w->foreign.seqs_max && n_tokens <= w->kv_tokens;
}
/* Nobody has anything there. */
static inline bool td_worker_is_idle(const struct td_core_worker *w)
{
    return w->assigned == 0 && w->foreign.n_seqs == 0;
}
/* Tokens that may be promised there; INFINITY while it is empty, since an empty worker takes
 * whatever it can hold at all. */
double td_worker_kv_limit(const struct td_core_worker *worker);
/* Predicted time of the prompts that other routers have queued there. */
double td_worker_foreign_s(const struct td_core_worker *worker);
/* How long the prefill worker computes what comes before the request there. */
double td_policy_prefill_wait(const struct td_policy_view *view, const struct td_policy_ask *ask,
                              uint32_t worker);
/* A worker that is silent for longer than two of the reports that even an idle one sends
 * (common/worker/registry.c: every 200 ms) is known less and less: by this, 1 to 1.5, its
 * margins widen. After 2 s or --worker-timeout-ms it is suspect, and nothing goes there. */
#define TD_WORKER_SILENT_S 0.5
#define TD_WORKER_UNKNOWN_S 2.0
double td_worker_doubt(const struct td_core_worker *worker, double now_s);
/* The worker of a role that would soonest have room for the request once nothing more is given
 * to it; TD_NO_WORKER when none ever has, or when even alone there it would miss its TPOT
 * objective. */
uint32_t td_policy_keep(const struct td_policy_view *view, const struct td_policy_ask *ask,
                        enum td_core_role role);
/* Any other prefill worker for a pair that was chosen before: the least backlog. TD_NO_WORKER
 * when none can. */
uint32_t td_policy_prefill_again(const struct td_policy_view *view, uint64_t n_tokens);

struct td_policy {
    const char *name;
    td_policy_fn place;
};
extern const struct td_policy td_policies[]; /* the daemon's; ends with a NULL name */
/* NULL when the table has no such policy: *err names those it has. */
td_policy_fn td_policy_find(const struct td_policy *table, const char *name, struct td_err *err);
void td_policy_round_robin(const struct td_policy_view *view, const struct td_policy_ask *ask,
                           struct td_choice *ret_choice);
void td_policy_least_token(const struct td_policy_view *view, const struct td_policy_ask *ask,
                           struct td_choice *ret_choice);
void td_policy_cache_aware(const struct td_policy_view *view, const struct td_policy_ask *ask,
                           struct td_choice *ret_choice);

/* For policies that choose one side after the other: how they pick a worker of a role
 * (TD_NO_WORKER when none can take the request), and how a score makes such a pick: the least
 * wins. */
typedef uint32_t (*td_pick_fn)(const struct td_policy_view *view, const struct td_policy_ask *ask,
                               enum td_core_role role);
typedef double (*td_score_fn)(const struct td_policy_view *view, const struct td_policy_ask *ask,
                              uint32_t worker);
uint32_t td_policy_least(const struct td_policy_view *view, const struct td_policy_ask *ask,
                         enum td_core_role role, td_score_fn score);
/* PLACE with what pick chose for both sides, or HOLD. */
void td_policy_place_by(const struct td_policy_view *view, const struct td_policy_ask *ask,
                        td_pick_fn pick, struct td_choice *ret_choice);
/* assigned there */
double td_policy_requests(const struct td_policy_view *view, const struct td_policy_ask *ask,
                          uint32_t worker);
/* assigned there */
double td_policy_tokens(const struct td_policy_view *view, const struct td_policy_ask *ask,
                        uint32_t worker);
/* decode: predicted */
double td_policy_step_s(const struct td_policy_view *view, const struct td_policy_ask *ask,
                        uint32_t worker);

/* For policies: the prefix hits of all workers into view->hit_tokens, and out again; the
 * prediction of a chosen pair. */
#define TD_POLICY_MAX_MATCHES 64
void td_policy_hits(const struct td_policy_view *view, const struct td_policy_ask *ask,
                    struct td_prefix_match *ret_matches, size_t *ret_n);
void td_policy_hits_clear(const struct td_policy_view *view, const struct td_prefix_match *matches,
                          size_t n_matches);
/* The same in its parts, so that k * m pairs cost k + m predictions: what depends on the prefill
 * worker alone, on the decode worker alone, on both. */
struct td_prefill_part {
    uint32_t worker, bucket;
    uint64_t hit_tokens, last_tokens;
    double wait_s, prefill_s, start_s, link_wait_s,
        hidden_s;         /* hidden: of the transfer, behind the prefill's own chunks */
    double all_s, tail_s; /* transfers when the decode worker has
                             nothing of the prompt */
};
struct td_decode_part {
    uint32_t worker;
    uint64_t hit_tokens;
    double step_s, reserve_s, join_s;
};
void td_policy_predict_prefill(const struct td_policy_view *view, const struct td_policy_ask *ask,
                               uint32_t worker, struct td_prefill_part *ret_part);
void td_policy_predict_decode(const struct td_policy_view *view, const struct td_policy_ask *ask,
                              uint32_t worker, struct td_decode_part *ret_part);
void td_policy_predict_pair(const struct td_policy_view *view, const struct td_policy_ask *ask,
                            const struct td_prefill_part *prefill,
                            const struct td_decode_part *decode, struct td_choice *choice);
/* ask->prefill_only: no pair */
void td_policy_predict_alone(const struct td_prefill_part *prefill, struct td_choice *choice);
/* of its workers */
void td_policy_predict(const struct td_policy_view *view, const struct td_policy_ask *ask,
                       struct td_choice *choice);
/* Mean step of a decode worker with so many sequences and context: with prefill rows mixed in as
 * often as it was lately. */
double td_worker_step_s(const struct td_latency *latency, uint32_t at,
                        const struct td_core_worker *worker, double n_seqs, double context_tokens);
/* policy_goodput.c */
void td_policy_goodput(const struct td_policy_view *view, const struct td_policy_ask *ask,
                       struct td_choice *ret_choice);

#endif
