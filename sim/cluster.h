/* cluster.h - simulates a whole fleet under a virtual clock: the router's core (through
 * router_port.h) against simulated workers that decide with the daemons' own scheduler
 * (common/engine/scheduler.h). Simulated is what the daemons do not decide: how long a step takes
 * (perf.h), how transfers share the NICs, and what fails.
 *
 * A worker takes its messages between steps, as step_loop.c does, and runs the engine's scheduler
 * over a pool of counts. The pool's prefix cache holds chain hashes of full prompt blocks with
 * reference counts and evicts from the oldest end. Blocks of outputs are not cached, because traces
 * do not contain the text.
 *
 * Transfers: each worker has one NIC. A transfer from p to d moves at min(p's rate / transfers
 * leaving p, d's rate / transfers reaching d). A chunk's full blocks are sent when its step ends,
 * so a transfer hides behind the next chunk; with overlap off everything is sent at the end.
 *
 * Control messages take rpc_ns each way and may be lost, doubled or late (faults). A lost message
 * of a stream breaks that stream, as with gRPC. A message of a worker may come twice, the second
 * time later; a call is made once. With rpc_jitter_ns messages of different streams overtake one
 * another. So, for a request that ends with its first token, decode's message that its sender has
 * finished may overtake that token.
 *
 * Several routers: each has its own core, and of what the others placed it knows what workers'
 * snapshots say. A decode worker refuses at once what it has no blocks for, as the daemon does.
 *
 * One thread per run; runs share nothing. */
#ifndef TD_SIM_CLUSTER_H
#define TD_SIM_CLUSTER_H

#include "sim/router_port.h"
#include "sim/trace.h"

#define TD_SIM_MAX_GROUPS 16
#define TD_SIM_MAX_ROUTERS 8

struct td_sim_group { /* workers that are all alike */
    bool decode;
    uint32_t count;
    struct td_perf perf;
    uint64_t kv_tokens; /* of each worker; 0 = the perf table's */
    int32_t max_batch, max_step_tokens, max_seqs;
    double nic_bytes_per_s; /* 0 = unlimited */
    double slow;            /* factor on the time of every step; 0 = 1 */
};

enum td_sim_fault_kind {
    TD_FAULT_CRASH,
    TD_FAULT_SILENT,
    TD_FAULT_SLOW,
    TD_FAULT_DRAIN,
    TD_FAULT_LATE,
    TD_FAULT_LINK
};
struct td_sim_fault {
    enum td_sim_fault_kind kind;
    uint32_t worker;
    /* until: the time at which the worker is back, or as fast as before; 0 = never */
    double at_s, until_s;
    /* SLOW: factor on step times. LATE: mean delay of its snapshots in s (exponential). LINK:
     * factor on its NIC's rate */
    double factor;
};

/* A mistake that is made once in a run, for a checker to find. */
enum td_sim_mistake {
    TD_SIM_NO_MISTAKE,
    TD_SIM_LEAKED_LEG,    /* the blocks of one decode leg are never freed */
    TD_SIM_ENDED_TWICE,   /* one request is completed twice */
    TD_SIM_SKIPPED_TOKEN, /* one token is lost on the way to the client */
    TD_SIM_DEAF_ROUTER,   /* the core is never told that workers are gone */
    TD_SIM_N_MISTAKES,
};

struct td_sim_config {
    struct td_port_config router;
    /* Routers that are all alike over the one fleet; clients choose one at random. 0 = 1. */
    uint32_t n_routers;
    FILE *decision_logs[TD_SIM_MAX_ROUTERS]; /* of routers 1 and above; router.decision_log: of 0 */
    /* Between routers and workers, beside rpc_ns: one way of each message; and the share of them
     * that TCP has to send again, which takes SIM_RESEND_NS more and holds up those behind. */
    uint64_t router_delay_ns;
    double router_loss;
    struct td_sim_group groups[TD_SIM_MAX_GROUPS];
    uint32_t n_groups;
    int32_t block_size;
    bool prefix_cache, overlap;
    /* a decode worker also reserves during a step; tandem's reserves between steps */
    bool admit_at_once;
    uint64_t rpc_ns, link_tau_ns, snapshot_ns, tick_ns;
    /* mean of the time that a worker's message takes beyond rpc_ns (exponential), so that one
     * stream overtakes another */
    uint64_t rpc_jitter_ns;
    double kv_bytes_per_token; /* 0 = the perf table's */
    double step_noise;         /* sigma of a lognormal factor of mean 1 on the time of each step */
    /* the objectives when the router has no classes (n_classes 0); <= 0 = none */
    double ttft_s, tpot_s;
    /* requests that arrive in the first and last seconds, so many of each, do not count */
    double warmup_s, cooldown_s;
    double grace_s; /* time after the last arrival; requests that are not done then are misses */
    double lose, duplicate; /* shares of control messages that are lost, and that come twice */
    double cancel;          /* share of clients that leave at a random time */
    /* the router is told at least this many output tokens, as by clients that do not know the
     * number; 0 = the true number */
    int32_t told_max_tokens;
    struct td_sim_fault *faults;
    uint32_t n_faults;
    uint64_t seed;
    bool check;                  /* continue until nothing moves and look for leaks */
    enum td_sim_mistake mistake; /* for the checkers' own test */
};

enum td_sim_status { TD_SIM_PENDING, TD_SIM_OK, TD_SIM_REJECTED, TD_SIM_FAILED, TD_SIM_CANCELLED };
struct td_sim_outcome { /* the result of one request */
    enum td_sim_status status;
    uint64_t at_ns, first_ns, end_ns;
    uint64_t decided_ns; /* the time at which it was refused or failed */
    int32_t n_prompt, n_output, cached_tokens;
    uint32_t slo_class, tenant; /* as in the trace */
    uint32_t prefill, decode, code;
    const char *reason; /* the reason of a refusal or failure: static text */
};

struct td_sim_result {
    struct td_sim_outcome *outcomes; /* [n], by arrival */
    uint32_t n, n_workers, gpus;
    uint64_t n_events, core_steps, steps, prefill_tokens, decode_tokens, cached_tokens, preemptions,
        failovers, transfer_bytes, deflected;
    /* requests for which decode's message that the prefill worker has finished came before the
     * first token */
    uint64_t overtaken;
    uint64_t refused_full; /* decode legs refused, since no blocks were free: several routers */
    uint64_t given_back;   /* prompts that their prefill workers gave back: several routers */
    double end_s;          /* in virtual time */
    double decode_row_s;   /* sum over steps of decode rows times step time: the
                                         integral of the batch over time */
    double prefill_busy, decode_busy; /* mean share of time in steps, by role, until the
                                         last arrival */
    uint32_t n_violations;
    char violation[256]; /* the first */
};

/* Runs the trace. progress (may be NULL) is called from time to time with the share that is done,
 * 0..1. */
td_status td_sim_run(const struct td_sim_config *config, const struct td_sim_trace *trace,
                     void (*progress)(void *ctx, double share), void *ctx,
                     struct td_sim_result *ret_result, struct td_err *err);
void td_sim_result_free(struct td_sim_result *result);

/* Sets the defaults of everything but groups; the caller overrides them. */
void td_sim_config_init(struct td_sim_config *config);

#endif
