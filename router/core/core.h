/* core.h - the router's decisions as a pure function of an event log (I5).
 *
 * Events go in, actions come out. There is no I/O, no clock and no thread here, and nothing is
 * allocated after create. The daemon (router/) feeds events in and carries out the actions. The
 * simulator runs the same object code under a virtual clock. A recorded log of events replays to
 * the same actions.
 *
 * The core decides by its own account of what it gave to each worker (requests, tokens, predicted
 * time), which sequence-numbered snapshots of the workers correct. It never waits for a polled
 * metric.
 *
 * Life of a request:
 *
 *   state       event -> action                                        next state
 *   QUEUED      a pair of workers has room -> START_DECODE             RESERVING
 *   RESERVING   TICKET -> START_PREFILL                                PREFILLING
 *   PREFILLING  FIRST_TOKEN                                            DECODING
 *   DECODING    DECODE_END with OK -> COMPLETE                         gone
 *
 *   colocated mode, or a choice in hybrid mode: the decode worker prefills, too
 *   QUEUED      a decode worker has room -> START_DECODE (local)       DECODING
 *
 *   one token is left: the prefill worker needs no decode worker
 *   QUEUED      a prefill worker has room -> START_PREFILL (local)     PREFILLING
 *   PREFILLING  FIRST_TOKEN (last) -> COMPLETE                         gone
 *
 *   the first token ends the request, and the decode worker hears of that before the token is here
 *   PREFILLING  DECODE_END (sender_finished)                           PREFILLING, no decode leg
 *
 * A leg fails, its worker is lost, or nothing moves for stall_ms: the other leg is cancelled, and
 * the request is QUEUED again with attempt + 1, in its old place. Events of an older attempt change
 * nothing. CANCEL and STOP cancel the legs. A request FAILs when its failovers or its time in the
 * queue are used up, or when it is the client's fault.
 *
 * Threads: one at a time. */
#ifndef TD_ROUTER_CORE_H
#define TD_ROUTER_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/status.h"
#include "router/core/scaling.h"
#include "router/core/latency.h"

/* The daemon's policies. Others, to compare with, are the simulator's: sim/baselines.h. */
#define TD_CORE_POLICIES "goodput|round_robin|least_token|cache_aware"
#define TD_CORE_POLICIES_ELSEWHERE "least_request|power_of_two|lmetric|kv_cost|conductor"
#define TD_CORE_MAX_WORKERS 1024
#define TD_CORE_MAX_REQUESTS 16384
#define TD_CORE_MAX_CLASSES 16 /* SLO classes */
#define TD_CORE_MAX_NODE_CLASSES 16
/* of one request, and of one worker's KV: a greater number is an error of who said it */
#define TD_CORE_MAX_TOKENS (1ull << 32)
#define TD_CORE_MAX_SEQS (1u << 20) /* of one worker */
#define TD_CORE_MAX_ROUTERS 64      /* of one worker */
/* Block hashes of one prompt: of a longer prompt every second, third ... block's hash is given. */
#define TD_CORE_MAX_HASHES 512

_Static_assert(TD_CORE_MAX_NODE_CLASSES <= TD_LAT_MAX_CLASSES &&
                   TD_CORE_MAX_WORKERS <= TD_LAT_MAX_NODES &&
                   TD_CORE_MAX_CLASSES <= TD_LAT_MAX_SLO_CLASSES,
               "the latency model has a place for each");
/* What td_core_step may write: an event makes each live request emit 8 actions at most. */
#define TD_CORE_MAX_ACTIONS_PER_EVENT (8 * TD_CORE_MAX_REQUESTS)

struct td_policy;
enum td_core_mode { TD_MODE_PD, TD_MODE_COLOCATED, TD_MODE_HYBRID };
enum td_core_role { TD_ROLE_PREFILL, TD_ROLE_DECODE };

/* A class of requests: its objectives (0 = none) and its weight among the classes. Requests of a
 * greater weight go first, and those of a lesser weight wait while the fleet is nearly full
 * (queue.h). A request that names no class is of class 0. */
struct td_core_class {
    char name[32];
    double ttft_ms, tpot_ms;
    double weight;    /* > 0 */
    bool best_effort; /* served late rather than refused when its objectives cannot
                         be met */
};

struct td_core_config {
    enum td_core_mode mode;
    const char *policy;               /* a name of the next */
    const struct td_policy *policies; /* to choose from, borrowed; NULL = td_policies (policy.h) */
    uint32_t max_requests;            /* live at once, queued ones included:
                                         request_at is 0..max_requests-1 */
    uint32_t max_queued;
    uint32_t hybrid_local_tokens; /* hybrid, other policies than goodput: prompts with fewer
                                     uncomputed tokens are prefilled on the decode worker */
    uint32_t worker_timeout_ms;   /* a worker without a snapshot for so long is suspect:
                                     nothing new, its requests fail over */
    uint32_t queue_timeout_ms;    /* longest wait for a worker */
    uint32_t stall_ms;            /* an attempt in which nothing happened for so long fails
                                     over */
    uint32_t max_failovers;
    uint64_t max_prefix_entries; /* of the prefix index; 0 = no index */
    double attainment;           /* what the learned margins aim at, 0.5..0.999; 0 = 0.9 */
    uint64_t seed;               /* of ties and exploration */
    struct td_core_class classes[TD_CORE_MAX_CLASSES];
    uint32_t n_classes;                                   /* 0 = one class without objectives */
    struct td_lat_theta thetas[TD_CORE_MAX_NODE_CLASSES]; /* priors of node classes 0..n_thetas-1 */
    uint32_t n_thetas;
};

/* ---- events: what the core is told, one struct for each kind ---- */

/* The kinds' numbers stand in decision logs: a new kind goes to the end. The name of the event's
 * member in struct td_core_event follows each. */
enum td_core_event_kind {
    TD_EV_TICK = 1,        /* tick */
    TD_EV_WORKER_JOIN,     /* join */
    TD_EV_WORKER_SNAPSHOT, /* snapshot */
    TD_EV_WORKER_DRAIN,    /* drain: it takes no new requests and finishes those it has */
    TD_EV_WORKER_GONE,     /* gone: its registry stream ended */
    TD_EV_WORKER_STEP,     /* step */
    TD_EV_BLOCK_ADD,       /* block_add: the worker's prefix cache now has this block */
    TD_EV_BLOCK_EVICT,     /* block_evict */
    TD_EV_BLOCKS_RESET,    /* blocks_reset: all blocks of the worker's prefix cache are
                              forgotten */
    TD_EV_REQUEST,         /* request */
    TD_EV_TICKET,          /* ticket */
    TD_EV_FIRST_TOKEN,     /* first_token */
    TD_EV_TOKEN,           /* token */
    TD_EV_PREFILL_END,     /* prefill_end */
    TD_EV_DECODE_END,      /* decode_end */
    TD_EV_STOP,            /* stop: the output is complete (a stop string): both legs end */
    TD_EV_CANCEL,          /* cancel: the client has gone */
    TD_EV_FOREIGN,         /* foreign: what other routers have placed at a worker */
};
#define TD_EV_N_KINDS (TD_EV_FOREIGN + 1)

/* Time has passed. The daemon sends one every 50 ms. */
struct td_ev_tick {
    uint64_t busy_permille; /* share of the time since the last tick that the router's
                               thread computed */
    uint64_t late_ms;       /* the router did not run for this long: workers' silence does
                               not count */
};

/* A worker joined. Its index is the caller's choice, below TD_CORE_MAX_WORKERS. */
struct td_ev_join {
    uint32_t worker;
    enum td_core_role role;
    bool one_token;     /* prefill: answers requests with one token left without a
                           decode worker */
    uint64_t kv_tokens; /* that its KV cache can hold */
    uint64_t max_seqs;
    uint64_t node_class;      /* which latency coefficients are its own */
    uint64_t max_step_tokens; /* rows of one step; 0 = unknown */
    uint64_t kv_bytes_per_token;
};

/* What a worker said of itself. */
struct td_ev_snapshot {
    uint32_t worker;
    uint64_t seq;           /* counts its snapshots: one that is not above the last is
                               dropped */
    uint64_t held_tokens;   /* of its KV cache */
    uint64_t queued_tokens; /* prompt tokens that it has still to compute */
    uint64_t n_seqs;        /* running and waiting; for the log's reader */
    uint64_t calls_taken;   /* of the router's calls, so far */
};

/* What requests of other routers are and hold at a worker, by its own account. It comes before the
 * snapshot of the same moment, and never where the worker has one router. */
struct td_ev_foreign {
    uint32_t worker;
    uint64_t n_routers;     /* that the worker has joined, this one included */
    uint64_t n_seqs;        /* live */
    uint64_t n_running;     /* of them, in the batch */
    uint64_t tokens;        /* that they have */
    uint64_t queued_tokens; /* of them, prompt tokens still to be computed */
};

struct td_ev_worker {
    uint32_t worker;
};

/* One step that a worker computed, for the latency model. */
struct td_ev_step {
    uint32_t worker;
    uint64_t prefill_tokens;
    uint64_t attention_work; /* of the prefill rows: the sum of their positions (latency.h) */
    uint64_t decode_seqs;
    uint64_t context_tokens; /* of the decode rows */
    uint64_t wall_us;
};

/* hash: chain hash of a prompt's blocks up to and with this one. */
struct td_ev_block {
    uint32_t worker;
    uint64_t hash;
};

/* A client asks. request_at, its place in the table, is the caller's choice among those that are
 * free: best the lowest, since a tick looks at all up to the highest that was ever taken. id is
 * never used twice. */
struct td_ev_request {
    uint32_t request_at;
    uint64_t id;
    uint64_t n_prompt, max_tokens;
    uint64_t slo_class;
    uint64_t tenant;           /* a hash of its name; 0 = none */
    uint64_t ttft_us, tpot_us; /* its own objectives; 0 = the class's */
    int32_t priority;          /* -100..100, higher first within its class */
    uint32_t tenant_weight;    /* of its tenant's share, in 1/1000; 0 = 1000, what a tenant
                                  without a weight has */
    /* [n_hashes], borrowed for the call: hashes[i] is the chain hash of the first
     * (i + 1) * hash_tokens tokens. */
    const uint64_t *hashes;
    uint32_t n_hashes, hash_tokens;
};

/* One attempt of one request: what every word of a leg (a call to a worker) speaks of. A place is
 * used again by other ids, and an id has a new attempt after each failover: what an old one says
 * changes nothing. */
struct td_attempt {
    uint32_t request_at, attempt;
    uint64_t id;
};

/* The decode worker has reserved a place: prefill may start. */
struct td_ev_ticket {
    struct td_attempt of;
    uint64_t cached_tokens; /* prompt tokens that the decode worker holds already; for the
                               log's reader */
};

/* The prefill leg's token. */
struct td_ev_first_token {
    struct td_attempt of;
    bool last;              /* it is also the last one */
    uint64_t n_tokens;      /* prompt and output, with this one */
    uint64_t cached_tokens; /* of the prompt, found in the prefill worker's cache */
};

/* One or several tokens of the decode leg. */
struct td_ev_token {
    struct td_attempt of;
    bool last;
    uint64_t n_tokens; /* prompt and output, with these */
};

struct td_ev_prefill_end {
    struct td_attempt of;
    enum td_code code;
    uint64_t sent_bytes, sent_us; /* the transfer's size and how long it took */
};

struct td_ev_decode_end {
    struct td_attempt of;
    enum td_code code;
    bool sender_finished; /* it ended because the prefill worker finished the request with
                             its first token */
};

/* The end of a request that does not come from a leg: any attempt of it. */
struct td_ev_end {
    uint32_t request_at;
    uint64_t id;
};

/* The core trusts no event: one with a worker, request_at, class or time that cannot be is dropped
 * or clamped. Time never goes back: an earlier now_ns counts as the latest seen. */
struct td_core_event {
    enum td_core_event_kind kind;
    uint64_t now_ns;
    union {
        struct td_ev_tick tick;
        struct td_ev_join join;
        struct td_ev_snapshot snapshot;
        struct td_ev_foreign foreign;
        struct td_ev_worker drain, gone, blocks_reset;
        struct td_ev_step step;
        struct td_ev_block block_add, block_evict;
        struct td_ev_request request;
        struct td_ev_ticket ticket;
        struct td_ev_first_token first_token;
        struct td_ev_token token;
        struct td_ev_prefill_end prefill_end;
        struct td_ev_decode_end decode_end;
        struct td_ev_end stop, cancel;
    };
};

/* ---- actions: what the caller must do ---- */

/* Numbers that stand in decision logs, as the events' do. */
enum td_core_action_kind {
    TD_ACT_START_DECODE = 1, /* start: call the decode worker for this attempt */
    TD_ACT_START_PREFILL,    /* start: call the prefill worker for this attempt */
    TD_ACT_CANCEL_DECODE,    /* cancel the attempt's call to its decode worker */
    TD_ACT_CANCEL_PREFILL,   /* cancel the attempt's call to its prefill worker */
    TD_ACT_COMPLETE,         /* tell the client OK; its place is free */
    TD_ACT_FAIL,             /* fail: tell the client; its place is free */
};

struct td_act_start {
    uint32_t worker;
    /* START_DECODE: the decode worker prefills, too. START_PREFILL: one token is left, so there is
     * no decode leg and no hand-over. */
    bool local;
    uint64_t key; /* orders the workers' queues: smaller first */
    /* Predicted; 0 = no model yet. Of the leg that the attempt begins with. */
    uint64_t ttft_us, tpot_us;
    /* START_PREFILL to a worker of several routers: what the prompt is predicted to take, and in
     * what time from the call's arrival it should be computed; it may be given back otherwise
     * (OUT_OF_RANGE). Both 0: it is computed however late. */
    uint64_t work_us, finish_within_us;
};

struct td_act_fail {
    enum td_code code;
    uint32_t retry_ms;  /* with RESOURCE_EXHAUSTED: the predicted wait; else 0 */
    const char *reason; /* static text */
};

struct td_core_action {
    enum td_core_action_kind kind;
    uint32_t request_at, attempt;
    uint64_t id;
    union {
        struct td_act_start start;
        struct td_act_fail fail;
    };
};

struct td_core;

td_status td_core_create(const struct td_core_config *config, struct td_core **ret_core,
                         struct td_err *err);
void td_core_destroy(struct td_core *core);

/* Applies one event; writes its actions in the order they must be carried out; returns how many. */
size_t td_core_step(struct td_core *core, const struct td_core_event *event,
                    struct td_core_action *ret_actions);

/* ---- what the core tells of itself ---- */

/* What the status page shows of a worker. */
enum td_worker_state { TD_WORKER_ABSENT, TD_WORKER_READY, TD_WORKER_SUSPECT, TD_WORKER_DRAINING };
struct td_core_worker_view {
    enum td_worker_state state;
    enum td_core_role role;
    uint32_t assigned;     /* requests with a leg there, by our account */
    uint32_t calls_unseen; /* calls sent there that its last snapshot did not count; a snapshot
                              that comes while no request has a leg there makes it 0 */
    uint64_t assigned_tokens;
    uint64_t snapshot_ns;
    double backlog_s;  /* prefill: predicted time until it would start a new prompt */
    double step_s;     /* decode: predicted next step */
    double correction; /* observed / model: above 1 is a slow node */
};
void td_core_worker_view(const struct td_core *core, uint32_t worker,
                         struct td_core_worker_view *ret_view);
/* A worker's account, for tests and checkers; policy.h says what each number is. Without a request
 * there every number is 0, and min_tpot_s is INFINITY. */
struct td_core_account {
    uint32_t assigned, n_pending, n_active, n_min_tpot;
    uint64_t assigned_tokens, promised_tokens, pending_tokens, planned_tokens, active_tokens,
        reserved_tokens, local_tokens;
    double pending_s, min_tpot_s;
    bool kept;
    bool stale; /* what scans read of it is not what the account says */
};
void td_core_account(const struct td_core *core, uint32_t worker,
                     struct td_core_account *ret_account);
struct td_core_stats {
    uint32_t queued, live;
    uint64_t finished, failed, cancelled, failovers;
    uint64_t refused;                                /* of failed: RESOURCE_EXHAUSTED */
    uint64_t deflected;                              /* prefilled on a decode worker by choice */
    uint64_t wasted_prefill_tokens;                  /* computed for an attempt that was lost */
    uint64_t judged, good, missed_ttft, missed_tpot; /* of finished with objectives */
    struct {
        uint64_t judged, good;
    } by_class[TD_CORE_MAX_CLASSES]; /* of its own; they sum to those above */
    uint64_t predicted_hit_tokens, real_hit_tokens;
    double arrival_rate; /* requests/s, EWMA over some 10 s */
};
void td_core_stats(const struct td_core *core, struct td_core_stats *ret_stats);
uint32_t td_core_failovers(const struct td_core *core, uint32_t request_at);
/* What to tell the autoscaler and the operator; workers wanted are 0 until enough was seen. */
struct td_core_advice {
    enum td_bound bound;
    uint32_t want[2]; /* by role */
    double need[2];   /* the same before rounding and hysteresis */
    double utilisation[2];
};
void td_core_advice(const struct td_core *core, struct td_core_advice *ret_advice);
const struct td_latency *td_core_latency(const struct td_core *core); /* for metrics */

/* What create allocates for each of max_requests, and what it allocates once. The latency model and
 * the entries of the prefix index come on top. */
struct td_core_memory {
    size_t per_request, fixed;
};
struct td_core_memory td_core_memory(uint64_t max_prefix_entries);

/* ---- decision log ----
 *
 * Text, with fields as key=value. An event is a line "e ...", an action a line "a ...". The
 * configuration comes first: one line "c ...", a line "k ..." for each class, a line "t ..." for
 * each theta. The hashes of a request follow its event in lines "h ...". These functions format and
 * parse buffers; the daemon writes the file. The reader is fed line by line and says when an event
 * is complete. */
#define TD_CORE_LINE_MAX 1024
#define TD_CORE_HASHES_PER_LINE 48
/* i = 0..: line i of the configuration; 0 when there are no more. */
int td_core_config_format(const struct td_core_config *c, uint32_t i, char *line,
                          size_t line_bytes);
int td_core_event_format(const struct td_core_event *e, char *line, size_t line_bytes);
/* line i of its hashes; 0 = no more */
int td_core_hashes_format(const struct td_core_event *e, uint32_t i, char *line, size_t line_bytes);
int td_core_action_format(const struct td_core_action *a, char *line, size_t line_bytes);

struct td_core_reader {
    struct td_core_config config;
    char policy[32];
    struct td_core_event event;
    uint64_t *hashes; /* [TD_CORE_MAX_HASHES], the caller's */
    uint32_t n_hashes, n_hashes_missing, n_classes_missing, n_thetas_missing;
    bool have_config;
};
/* ret_read: TD_READ_EVENT when reader->event is complete, TD_READ_CONFIG when reader->config is,
 * TD_READ_ACTION for the line of an action, else TD_READ_MORE. TD_ERR_CORRUPT: the line is
 * malformed or out of place, and *err quotes it. TD_ERR_UNSUPPORTED: a log of another version. */
enum td_core_read { TD_READ_MORE, TD_READ_CONFIG, TD_READ_EVENT, TD_READ_ACTION };
td_status td_core_read_line(struct td_core_reader *reader, const char *line,
                            enum td_core_read *ret_read, struct td_err *err);

#endif
