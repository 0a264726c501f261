/* policy.h - where the next request goes: a function of what the core knows, chosen by name at
 * start. All policies see the same inputs, so they can be compared.
 *
 * A policy answers PLACE with a pair (or one decode worker that prefills for itself), HOLD (ask
 * again when something has changed) or REJECT. Of the daemon's only `goodput` rejects. What each
 * of them minimises stands in the table of policy.c; other systems' policies, to compare, are in
 * sim/baselines.c. */
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
    double s;
    uint32_t n;
};
void td_stage_learn(struct td_stage *stage, double seen_s);

/* The account of one worker: exact the moment we decide, since we hear of every token. Kept by
 * account.c alone. */
struct td_core_worker {
    enum td_worker_state state;
    enum td_core_role role;
    bool draining;     /* it said so: stays true while the worker is suspect */
    bool one_token;    /* prefill: answers requests with one token left alone */
    bool kept;         /* during a dispatch: its room is for one that has waited long,
                          see dispatch.c */
    bool shunned;      /* a call to it just failed or it was full: nothing more until
                          its next snapshot shows that it lives */
    uint32_t assigned; /* requests with a leg here */
    uint32_t max_seqs;
    uint64_t kv_tokens;       /* capacity */
    uint64_t promised_tokens; /* decode: sum over its requests of max(tokens now, prompt +
                                 expected output) */
    double free_at_s;         /* prefill: when it would start a new prompt, on the core's
                                 clock; past = now */
    double step_s;            /* decode: the next step, refreshed as its batch changes */
    double step_share;        /* decode: how much of what a guarded class's TPOT leaves that
                                 step takes, 0..1; 0 where there is one class alone */
    double correction;

    uint64_t assigned_tokens; /* prefill: to compute; decode: held */
    uint32_t node_class, max_step_tokens;
    uint64_t kv_bytes_per_token;
    uint32_t n_pending; /* prefill: jobs without a first token; decode: reserved, not yet
                           decoding */
    double pending_s;   /* prefill: sum of their predicted times */
    /* prefill: the same by turn of class: later ones are overtaken */
    struct {
        uint32_t n;
        double s;
    } pending_by_turn[TD_CORE_MAX_CLASSES];
    double link_by_turn_s[TD_CORE_MAX_CLASSES]; /* prefill: link_s by turn of class: later ones
                                                   get every other one of the link at most */
    uint32_t n_told;         /* prefill: of n_pending, those whose call was made */
    uint32_t n_chunked;      /* of n_told, those longer than a step: their first chunks' KV
                                leaves while later ones are computed */
    uint64_t pending_tokens; /* prefill: sum of their uncomputed tokens */
    double planned_s;        /* prefill: of pending_s and pending_tokens, what the worker has
                                not been told of yet */
    uint64_t planned_tokens;
    uint32_t n_active;          /* decode: sequences that step */
    uint64_t active_tokens;     /* decode: their context */
    uint64_t reserved_tokens;   /* decode: context of those on the way */
    uint64_t local_tokens;      /* decode: prompt tokens it is to prefill itself */
    double link_free_at_s;      /* prefill: when its link has sent what is on the way */
    uint32_t n_sending;         /* prefill: legs that are computed and still open: their KV is on
                                   its way */
    bool crowded;               /* prefill: since there were none of these, others' KV was on the
                                   link beside theirs, or may have been */
    double link_s;              /* prefill: sum of the predicted transfers of all who are there:
                                   never later than that after the computing */
    double mix_share, mix_rows; /* decode: EWMA share of the steps with decode rows that had
                                   prefill rows too, and how many those had */
    struct td_stage
        reserve; /* decode: from the router's call to the ticket, which comes between two steps */
    struct td_stage start; /* decode: what the first token of a prompt prefilled there takes beside
                            * the prefill: calls, streams, and the step that runs */
    double min_tpot_s;     /* decode: tightest objective among its requests; INFINITY = none */
    uint32_t n_min_tpot;   /* decode: how many have just that one; 0 with requests left:
                              lifecycle.c looks for the next */
    uint64_t busy_us;      /* sum of reported step times since the last tick */
    uint64_t snapshot_seq, snapshot_ns, held_tokens, queued_tokens, calls_sent, calls_seen;
    struct td_core_scan *scan; /* its place in the core's array; NULL = none */
    struct td_load *fullness;  /* of the fleet; NULL = not counted */
    uint32_t at;               /* its index there */
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
    double size;         /* time it adds to decode steps, relative to the mean of recent arrivals */
    double guard_tpot_s; /* of the classes before its own: steps keep it, and room for
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
    double start_s; /* what a first token takes beside its prefill when nothing is before it:
                       calls and streams. One mean for all prefill workers: a worker's own would
                       differ by chance, as after its cold first call, and turn a prompt away
                       from its prefix */
};

typedef void (*td_policy_fn)(const struct td_policy_view *view, const struct td_policy_ask *ask,
                             struct td_choice *ret_choice);

/* Ready, not shunned, not kept, below max_seqs, and big enough ever to hold n_tokens. Here,
 * since every scan asks it of every worker. */
static inline bool td_worker_can_take(const struct td_core_worker *w, uint64_t n_tokens)
{
    return w->state == TD_WORKER_READY && !w->shunned && !w->kept && w->assigned < w->max_seqs &&
           n_tokens <= w->kv_tokens;
}
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
    double step_s, reserve_s;
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
