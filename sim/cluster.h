/* cluster.h - a whole fleet under a virtual clock: the router's core (through router_port.h)
 * against simulated workers that decide with the daemons' own scheduler
 * (common/engine/scheduler.h). What is simulated is what the daemons do not decide: how long a step
 * takes (perf.h), how links share, what breaks.
 *
 * A worker takes its mail between steps, like step_loop.c, and runs the engine's scheduler over a
 * pool of counts. The pool's prefix cache holds chain hashes of full prompt blocks by reference and
 * evicts from the oldest end. Blocks of outputs are not cached: traces do not say what was said.
 *
 * Links: each worker has one NIC; a transfer from p to d moves at min(p's rate / transfers leaving
 * p, d's rate / transfers reaching d). A chunk's full blocks leave when its step ends, so a
 * transfer hides behind the next chunk; with overlap off all leaves at the end.
 *
 * Control messages take rpc_ns each way and may be lost, doubled or late (faults). A lost message
 * of a stream breaks that stream, as with gRPC; what a worker says may come twice, the second time
 * later; a call is made once. With rpc_jitter_ns messages of different streams overtake one
 * another: so does, for a request that ends with its first token, decode's word that its sender has
 * finished.
 *
 * One thread per run; runs do not share anything. */
#ifndef TD_SIM_CLUSTER_H
#define TD_SIM_CLUSTER_H

#include "sim/router_port.h"
#include "sim/trace.h"

#define TD_SIM_MAX_GROUPS 16

struct td_sim_group { /* equal workers */
    bool decode;
    uint32_t count;
    struct td_perf perf;
    uint64_t kv_tokens; /* of each; 0 = the perf table's */
    int32_t max_batch, max_step_tokens, max_seqs;
    double nic_bytes_per_s; /* 0 = unlimited */
    double slow;            /* factor on every step time; 0 = 1 */
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
    double at_s, until_s; /* until: the worker is back, or as fast as before; 0 = never */
    double factor;        /* SLOW: on step times; LATE: mean delay of its snapshots in
                             s (exponential); LINK: on its NIC's rate */
};

/* Made once in a run, for a checker to find. */
enum td_sim_mistake {
    TD_SIM_NO_MISTAKE,
    TD_SIM_LEAKED_LEG,    /* one decode leg's blocks are never given back */
    TD_SIM_ENDED_TWICE,   /* one request is completed again */
    TD_SIM_SKIPPED_TOKEN, /* one token is lost on the way to the client */
    TD_SIM_DEAF_ROUTER,   /* the core never hears that workers are gone */
    TD_SIM_N_MISTAKES,
};

struct td_sim_config {
    struct td_port_config router;
    struct td_sim_group groups[TD_SIM_MAX_GROUPS];
    uint32_t n_groups;
    int32_t block_size;
    bool prefix_cache, overlap;
    bool admit_at_once; /* a decode worker reserves during a step too; tandem's does
                           between steps */
    uint64_t rpc_ns, link_tau_ns, snapshot_ns, tick_ns;
    uint64_t rpc_jitter_ns;      /* mean of what a worker's message takes beyond rpc_ns
                                    (exponential): one stream overtakes another */
    double kv_bytes_per_token;   /* 0 = the perf table's */
    double step_noise;           /* sigma of a lognormal factor of mean 1 */
    double ttft_s, tpot_s;       /* what counts when the router has no classes (n_classes 0);
                                    <= 0 = none */
    double warmup_s, cooldown_s; /* requests that arrive in the first and last so many seconds
                                    do not count */
    double grace_s;              /* after the last arrival; what is not done then is a miss */
    double lose, duplicate;      /* shares of control messages */
    double cancel;               /* share of clients that leave at a random time */
    int32_t told_max_tokens;     /* the router is told at least so many output tokens, as by clients
                                    that do not know; 0 = the true number */
    struct td_sim_fault *faults;
    uint32_t n_faults;
    uint64_t seed;
    bool check;                  /* run on to quiescence and look for leaks */
    enum td_sim_mistake mistake; /* for the checkers' own test */
};

enum td_sim_status { TD_SIM_PENDING, TD_SIM_OK, TD_SIM_REJECTED, TD_SIM_FAILED, TD_SIM_CANCELLED };
struct td_sim_outcome { /* of one request */
    enum td_sim_status status;
    uint64_t at_ns, first_ns, end_ns;
    uint64_t decided_ns; /* when it was refused or failed */
    int32_t n_prompt, n_output, cached_tokens;
    uint32_t slo_class, tenant; /* as in the trace */
    uint32_t prefill, decode, code;
    const char *reason; /* of a refusal or failure: static text */
};

struct td_sim_result {
    struct td_sim_outcome *outcomes; /* [n], by arrival */
    uint32_t n, n_workers, gpus;
    uint64_t n_events, core_steps, steps, prefill_tokens, decode_tokens, cached_tokens, preemptions,
        failovers, transfer_bytes, deflected;
    uint64_t overtaken;               /* decode's word that the prefill worker has finished
                                         the request came before its first token */
    double end_s;                     /* virtual */
    double decode_row_s;              /* sum over steps of decode rows times step time: the
                                         integral of the batch over time */
    double prefill_busy, decode_busy; /* mean share of time in steps, by role, until the
                                         last arrival */
    uint32_t n_violations;
    char violation[256]; /* the first */
};

/* Runs the trace. progress (may be NULL) is called every now and then with the share done, 0..1. */
td_status td_sim_run(const struct td_sim_config *config, const struct td_sim_trace *trace,
                     void (*progress)(void *ctx, double share), void *ctx,
                     struct td_sim_result *ret_result, struct td_err *err);
void td_sim_result_free(struct td_sim_result *result);

/* Defaults of everything but groups; the caller overrides. */
void td_sim_config_init(struct td_sim_config *config);

#endif
