/* router_port.h - the router core as the simulator uses it: the one file of sim/ that knows the
 * core's events. It tells the core what the daemon (router/) tells it, and carries out what the
 * daemon carries out, in the same order. So a simulated run and a live one differ in their clocks
 * and workers only. One thread. */
#ifndef TD_SIM_ROUTER_PORT_H
#define TD_SIM_ROUTER_PORT_H

#include <stdio.h>

#include "sim/perf.h"
#include "router/core/core.h"

#define TD_PORT_MAX_PRIORS 8

struct td_port_config {
    const char *mode, *policy; /* pd | colocated | hybrid; a name of
                                  td_port_policies() */
    uint32_t max_requests, max_queued, hybrid_local_tokens, worker_timeout_ms, queue_timeout_ms,
        stall_ms, max_failovers;
    double attainment;
    uint64_t seed;
    struct td_core_class classes[TD_CORE_MAX_CLASSES];
    uint32_t n_classes;
    const struct td_perf *priors[TD_PORT_MAX_PRIORS]; /* node class i's latency prior; NULL =
                                                         unknown */
    double link_bytes_per_s, link_tau_s;
    uint32_t n_priors;
    bool prefix_index;
    FILE *decision_log; /* or NULL */
};

struct td_port_worker {
    uint32_t index;
    bool decode;
    uint64_t kv_tokens;
    uint32_t max_seqs, node_class, max_step_tokens;
    double kv_bytes_per_token;
};
struct td_port_step {
    uint32_t prefill_rows, decode_rows, wall_us;
    uint64_t attention_work, context_tokens;
};
/* What other routers have at the worker. */
struct td_port_foreign {
    uint32_t n_routers; /* that the worker has, this one included; 0 = 1 */
    uint64_t n_seqs, n_running, tokens, queued_tokens;
};
/* sum += sign * part, but for n_routers. */
void td_port_foreign_add(struct td_port_foreign *sum, const struct td_port_foreign *part, int sign);

struct td_port_snapshot {
    uint32_t worker;
    struct td_port_foreign foreign;
    uint64_t seq, held_tokens, queued_tokens, busy, calls_taken;
    const struct td_port_step *steps;
    uint32_t n_steps, n_added, n_evicted;
    const uint64_t *added, *evicted; /* prefix blocks */
};
struct td_port_request {
    uint32_t request_at, slo_class;
    uint64_t tenant, id, n_prompt, max_output;
    const uint64_t *hashes;
    uint32_t n_hashes, hash_tokens;
};
struct td_port_leg {
    uint32_t request_at, attempt;
    uint64_t id;
};

struct td_port;
/* on_action is called for each action of an event, in order, before the call that caused it
 * returns. It must not call the port. */
td_status td_port_create(const struct td_port_config *config,
                         void (*on_action)(void *ctx, const struct td_core_action *action),
                         void *ctx, struct td_port **ret_port, struct td_err *err);
void td_port_destroy(struct td_port *port);
const char *td_port_policies(void); /* "a|b|c" */
bool td_port_wants_blocks(const struct td_port *port);

void td_port_tick(struct td_port *port, uint64_t now_ns);
void td_port_join(struct td_port *port, uint64_t now_ns, const struct td_port_worker *worker);
void td_port_drain(struct td_port *port, uint64_t now_ns, uint32_t worker);
void td_port_gone(struct td_port *port, uint64_t now_ns, uint32_t worker);
void td_port_snapshot(struct td_port *port, uint64_t now_ns,
                      const struct td_port_snapshot *snapshot);
void td_port_arrive(struct td_port *port, uint64_t now_ns, const struct td_port_request *request);
void td_port_ticket(struct td_port *port, uint64_t now_ns, const struct td_port_leg *leg,
                    uint64_t cached_tokens);
void td_port_first_token(struct td_port *port, uint64_t now_ns, const struct td_port_leg *leg,
                         bool last, uint64_t n_tokens, uint64_t cached_tokens);
void td_port_token(struct td_port *port, uint64_t now_ns, const struct td_port_leg *leg,
                   uint64_t n_tokens, bool last);
void td_port_prefill_end(struct td_port *port, uint64_t now_ns, const struct td_port_leg *leg,
                         enum td_code code, uint64_t bytes, uint64_t us);
void td_port_decode_end(struct td_port *port, uint64_t now_ns, const struct td_port_leg *leg,
                        enum td_code code, bool sender_finished);
void td_port_cancel(struct td_port *port, uint64_t now_ns, uint32_t request_at, uint64_t id);

/* What the core still holds, for checkers at the end. */
struct td_port_residue {
    uint32_t live, queued, assigned;
    uint64_t assigned_tokens, failovers, deflected, steps;
};
void td_port_residue(const struct td_port *port, uint32_t n_workers,
                     struct td_port_residue *ret_residue);

/* Runs the events of a decision log through a new core and compares each action with the log's.
 * Calls on_difference for the first line that differs (line number, the log's text, ours).
 * *ret_n_events, *ret_n_actions: how many were compared. TD_OK: all are the same; TD_ERR_CORRUPT:
 * they differ, or the file is not a decision log. */
td_status td_port_replay(const char *path,
                         void (*on_difference)(void *ctx, uint64_t line, const char *logged,
                                               const char *ours),
                         void *ctx, uint64_t *ret_n_events, uint64_t *ret_n_actions,
                         struct td_err *err);

#endif
