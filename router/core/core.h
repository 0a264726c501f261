/* core.h - the router's decisions as a pure function of an event log (I5).
 *
 * No I/O, no clock, no threads, no allocation after create: events in, actions out. The daemon (router/) feeds it and carries out what
 * it answers; the simulator can run the same object code under a virtual clock; a recorded log replays to the same actions.
 *
 * What it knows: its own ledger of assignments (tokens and requests it gave to each worker), corrected by sequence-numbered snapshots. It never
 * waits for a polled metric.
 *
 * Life of a request here (attempt grows with each failover; an event of an older attempt changes nothing):
 *
 *   QUEUED --pair found: START_DECODE--> RESERVING --TICKET: START_PREFILL--> PREFILLING --FIRST_TOKEN--> DECODING --DECODE_END ok: COMPLETE--> gone
 *   QUEUED --colocated or short prompt: START_DECODE(local)--------------------------> DECODING
 *   any leg fails, its worker is lost, or nothing moves for stall_ms: other leg cancelled, attempt + 1, back to QUEUED (front: arrival order)
 *   CANCEL, STOP: legs cancelled, gone.      failovers or queue time used up, client's fault: FAIL, gone.
 *
 * Threads: one at a time. */
#ifndef TD_ROUTER_CORE_H
#define TD_ROUTER_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "common/base/status.h"

#define TD_CORE_MAX_WORKERS 1024
#define TD_CORE_MAX_REQUESTS 8192
#define TD_CORE_MAX_ACTIONS_PER_EVENT (8 * TD_CORE_MAX_REQUESTS) /* ret_actions has room for so many: a request emits at most 8 per event */

enum td_core_mode { TD_MODE_PD, TD_MODE_COLOCATED, TD_MODE_HYBRID };
enum td_core_role { TD_ROLE_PREFILL, TD_ROLE_DECODE };

struct td_core_config {
    enum td_core_mode mode;
    const char *policy;             /* "round_robin", "least_token" */
    uint32_t max_requests;          /* live at once, queued ones included: slots 0..max_requests-1 */
    uint32_t max_queued;
    uint32_t hybrid_local_tokens;   /* hybrid: prompts with fewer uncomputed tokens are prefilled on the decode worker */
    uint32_t worker_timeout_ms;     /* a worker without a snapshot for so long is suspect: nothing new, its requests fail over */
    uint32_t queue_timeout_ms;      /* longest wait for a worker */
    uint32_t stall_ms;              /* an attempt in which nothing happened for so long fails over */
    uint32_t max_failovers;
};

enum td_core_event_kind {
    TD_EV_TICK = 1,
    TD_EV_WORKER_JOIN,      /* worker, role, a = kv tokens it can hold, b = max_seqs */
    TD_EV_WORKER_SNAPSHOT,  /* worker, a = seq, b = kv tokens held, c = tokens queued, d = running + waiting */
    TD_EV_WORKER_DRAIN,     /* worker */
    TD_EV_WORKER_GONE,      /* worker: its registry stream ended */
    TD_EV_REQUEST,          /* slot, id, a = prompt tokens, b = max output tokens */
    TD_EV_TICKET,           /* slot, id, attempt, a = cached tokens */
    TD_EV_FIRST_TOKEN,      /* slot, id, attempt: the prefill leg's; a = 1 when it is also the last; b = sequence length now */
    TD_EV_TOKEN,            /* slot, id, attempt: the decode leg's; a = sequence length now; b = 1 when it is the last */
    TD_EV_PREFILL_END,      /* slot, id, attempt, a = gRPC code */
    TD_EV_DECODE_END,       /* slot, id, attempt, a = gRPC code */
    TD_EV_STOP,             /* slot, id: the output is complete (stop string): end both legs */
    TD_EV_CANCEL,           /* slot, id: the client has gone */
};

struct td_core_event {
    enum td_core_event_kind kind;
    uint64_t now_ns;
    uint32_t worker, slot, attempt;
    enum td_core_role role;
    uint64_t id;
    uint64_t a, b, c, d;
};

enum td_core_action_kind {
    TD_ACT_START_DECODE = 1,  /* slot, id, attempt, worker; local: prefill there too */
    TD_ACT_START_PREFILL,     /* slot, id, attempt, worker */
    TD_ACT_CANCEL_DECODE,     /* slot, id, attempt */
    TD_ACT_CANCEL_PREFILL,
    TD_ACT_COMPLETE,          /* slot, id: tell the client OK; the slot is free */
    TD_ACT_FAIL,              /* slot, id, code, reason, retry_ms: tell the client; the slot is free */
};

struct td_core_action {
    enum td_core_action_kind kind;
    uint32_t slot, attempt, worker;
    uint64_t id;
    bool local;
    uint32_t code;            /* gRPC status */
    uint32_t retry_ms;        /* with RESOURCE_EXHAUSTED */
    const char *reason;       /* static text */
};

struct td_core;

td_status td_core_create(const struct td_core_config *config, struct td_core **ret_core, struct td_err *err);
void td_core_destroy(struct td_core *core);

/* Applies one event; writes its actions in the order they must be carried out; returns how many. */
size_t td_core_step(struct td_core *core, const struct td_core_event *event, struct td_core_action *ret_actions);

/* What the status page shows. */
enum td_worker_state { TD_WORKER_ABSENT, TD_WORKER_READY, TD_WORKER_SUSPECT, TD_WORKER_DRAINING };
struct td_core_worker_view {
    enum td_worker_state state;
    enum td_core_role role;
    uint32_t assigned;        /* requests with a leg there, by our ledger */
    uint64_t assigned_tokens;
    uint64_t snapshot_ns;
};
void td_core_worker_view(const struct td_core *core, uint32_t worker, struct td_core_worker_view *ret_view);
struct td_core_stats {
    uint32_t queued, live;
    uint64_t finished, failed, cancelled, failovers;
};
void td_core_stats(const struct td_core *core, struct td_core_stats *ret_stats);
uint32_t td_core_failovers(const struct td_core *core, uint32_t slot);

/* --- decision log: text, one line an event ("e ...") or an action ("a ..."), fields as key=value; the first line is the config. Pure formatting
 * and parsing over buffers; the daemon does the writing. ---------------------------------------------------------------------------------- */
#define TD_CORE_LINE_MAX 512
int td_core_config_format(const struct td_core_config *c, char *line, size_t line_bytes);
int td_core_event_format(const struct td_core_event *e, char *line, size_t line_bytes);
int td_core_action_format(const struct td_core_action *a, char *line, size_t line_bytes);
/* policy is written into policy_buf (32 bytes), which config->policy then points at. */
td_status td_core_config_parse(const char *line, struct td_core_config *ret_config, char *policy_buf, struct td_err *err);
td_status td_core_event_parse(const char *line, struct td_core_event *ret_event, struct td_err *err);

#endif
