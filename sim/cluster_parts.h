/* cluster_parts.h - what the files of one simulated fleet share: its state, and what they ask of
 * one another. For cluster.c, messages.c, blocks.c, links.c, worker.c, router_side.c and faults.c
 * alone.
 *
 * Legs, requests and messages are named by their index; a leg's generation says whether it is still
 * the one that was meant. */
#ifndef TD_SIM_CLUSTER_PARTS_H
#define TD_SIM_CLUSTER_PARTS_H

#include <math.h>

#include "common/base/random.h"
#include "sim/cache.h"
#include "sim/cluster.h"
#include "sim/heap.h"
#include "common/engine/scheduler.h"

#define NONE TD_SIM_NONE
#define MAX_STEP_REPORTS 64
#define SIM_RESEND_NS 200000000ull /* TCP's least time-out on Linux */

enum event_kind {
    EV_ARRIVAL,
    EV_TO_WORKER,
    EV_TO_ROUTER,
    EV_STEP_END,
    EV_FLOW,
    EV_SNAPSHOT,
    EV_LATE,
    EV_TICK,
    EV_FAULT,
    EV_FAULT_END,
    EV_CLIENT_LEAVES
};

/* to a worker */
enum msg_kind {
    M_START_DECODE,
    M_START_PREFILL,
    M_CANCEL,
    M_SLOT_READY,
    M_OP_DONE,
    M_SENDER_FINISHED,
    /* to the router */
    M_TICKET,
    M_FIRST_TOKEN,
    M_TOKEN,
    M_PREFILL_END,
    M_DECODE_END,
    M_GONE,
    M_JOIN,
    M_DRAIN
};

struct msg {
    enum msg_kind kind;
    uint32_t router; /* from it or to it */
    uint32_t request_at, attempt, worker, epoch, leg, next;
    uint64_t id, key, a, b, c;
    uint64_t work_us, finish_within_us, came_ns; /* of M_START_PREFILL; when it came */
    bool flag;
};

/* SCHEDULED: the worker's scheduler has it, waiting or running. */
enum leg_state { LEG_FREE = 0, LEG_SCHEDULED, LEG_IMPORT, LEG_SENDING };

/* The KV of a leg on its way. */
struct sim_flow {
    bool on, final;
    double left, rate, bytes;
    uint64_t settled_ns, start_ns, event_ns; /* event_ns: of its event in the heap that counts,
                                                UINT64_MAX = none */
    uint32_t version;
};

struct leg {
    struct td_sched_seq sched; /* first */
    enum leg_state state;
    bool decode, local; /* local: of a prefill leg, no hand-over */
    uint32_t index, gen;
    uint64_t id;
    uint32_t router; /* whose it is */
    uint32_t request_at, attempt, worker, req;
    uint32_t request_next; /* legs of one request; of free ones: the next, plus 1 */
    int32_t n_total;
    int32_t n_sent, n_skip; /* prefill: tokens whose KV was handed to the link; that
                               the decode worker has already */
    uint32_t dest, dest_leg, dest_gen;
    uint64_t told_ns;     /* when the last message of its stream reaches the router */
    struct sim_flow flow; /* prefill */
};

struct nic {
    double rate;
    uint32_t *flows, n, capacity; /* prefill legs */
};

/* A worker and one router. */
struct stream {
    bool told_gone; /* the router */
    /* When the last message from the router, to it, and the last snapshot arrive: with loss. */
    uint64_t down_ns, up_ns, told_ns;
    uint64_t calls_taken;
};

/* What a worker's next snapshot tells every router. */
struct told {
    bool changed;
    uint64_t seq, sent_ns; /* of the last one */
    struct td_port_step steps[MAX_STEP_REPORTS];
    uint32_t n_steps;
    uint64_t *added, *evicted;
    uint32_t n_added, n_evicted, added_capacity, evicted_capacity;
};

struct worker {
    struct cluster *cluster;
    const struct td_sim_group *group;
    struct td_perf perf;
    bool decode, up, draining, silent, busy;
    struct stream streams[TD_SIM_MAX_ROUTERS];
    uint32_t index, epoch;
    double slow, late_s;
    int32_t n_blocks, n_anon, n_ref; /* of the pool; held without a hash; held with one */
    struct td_sim_cache cache;
    struct td_scheduler sched;
    int32_t n_live;
    uint32_t *mail, n_mail, mail_capacity;
    struct td_sched_item *items; /* [max_batch] */
    int32_t n_items;
    struct nic nic;
    uint64_t busy_ns, step_start_ns;
    struct td_port_step step; /* under way */
    struct told told;
};

struct request_state {
    bool live;
    uint64_t id;
    uint32_t router, req, legs;
    int32_t n_tokens;                         /* known to the client's stream */
    uint32_t attempt_cached;                  /* tokens that the decode worker of this attempt has
                                                 already */
    uint32_t call_worker[2], call_attempt[2]; /* [decode]: where the last call of that kind went */
    bool call_open[2];                        /* what a cancelled call still says reaches nobody */
};

struct cluster {
    const struct td_sim_config *cfg;
    const struct td_sim_trace *trace;
    struct td_sim_result *out;
    struct td_port *ports[TD_SIM_MAX_ROUTERS];
    uint32_t n_routers;
    struct td_sim_heap heap;
    uint64_t now;
    struct td_random noise, faults, jitter, network, choice;
    struct worker *workers;
    uint32_t n_workers;
    struct request_state *requests;
    uint32_t *free_requests, n_free_requests;
    struct leg **legs; /* each where it was made: a worker's scheduler points at
                          them */
    uint32_t n_legs, legs_capacity, free_leg_1;
    struct msg *msgs;
    uint32_t n_msgs, msgs_capacity, free_msg_1;
    uint32_t next_arrival, n_done;
    uint64_t next_id, last_arrival_ns;
    bool wants_blocks, mistaken;
    double kv_bytes_per_token;
    uint64_t hashes[512]; /* of the request that arrives */
};

static inline uint64_t sim_ns_of(double s) { return (uint64_t)llround(s * 1e9); }

static inline struct leg *sim_leg_of(struct td_sched_seq *sched)
{
    return (struct leg *)(void *)sched;
}

/* ---- messages.c ---- */

/* A blank message or leg; the arrays grow, and stop the program when there is no memory. */
uint32_t sim_msg_new(struct cluster *c);
void sim_msg_free(struct cluster *c, uint32_t m);
uint32_t sim_leg_new(struct cluster *c);
/* Back to the pool, off its request's list; it holds nothing any more. */
void sim_leg_forget(struct cluster *c, uint32_t l);
/* True with this probability. A share of 0 draws nothing, so runs without faults stay as they
 * are. */
bool sim_unlucky(struct cluster *c, double share);
/* What a message between a worker and a router takes beside delay_ns. *last_ns: when the one before
 * it in its stream arrives, which it does not overtake. */
uint64_t sim_path_ns(struct cluster *c, uint64_t delay_ns, uint64_t *last_ns);
void sim_to_router_at(struct cluster *c, uint32_t m, uint64_t delay_ns);
void sim_to_router(struct cluster *c, uint32_t m);
/* What the next message of the leg's stream takes: never less than those before it have left. */
uint64_t sim_stream_delay_ns(struct cluster *c, struct leg *g);
uint32_t sim_msg_of_leg(struct cluster *c, enum msg_kind kind, const struct leg *g);
/* The end of a leg's call, told to the router. g may be a call that was refused: no leg of a
 * request. */
void sim_send_end(struct cluster *c, struct leg *g, enum td_code code);
/* The same, and the leg is over at its worker. */
void sim_leg_end(struct cluster *c, uint32_t l, enum td_code code);
/* The same message again a little later, by chance (duplicate). */
void sim_maybe_again(struct cluster *c, uint32_t m, uint64_t delay_ns);
/* A message of a leg's stream. False: it was lost, the stream broke, and the leg is over. */
bool sim_send_of_leg(struct cluster *c, uint32_t l, uint32_t m);
void sim_to_worker_at(struct cluster *c, uint32_t m, uint64_t delay_ns);

/* ---- blocks.c ---- */

extern const struct td_sched_blocks sim_worker_blocks;
/* Leading blocks of a request's prompt that have a hash; the hash of one of them; how many of a
 * leg's blocks are held by it. */
int32_t sim_n_hashed(const struct cluster *c, uint32_t req);
uint64_t sim_block_hash(const struct cluster *c, uint32_t req, int32_t block);
int32_t sim_n_shared(const struct cluster *c, const struct leg *g);

/* ---- links.c ---- */

void sim_nic_pace(struct cluster *c, const struct nic *n);
void sim_flow_switch(struct cluster *c, uint32_t l, bool on);
/* The KV of all tokens up to `upto` may be sent; the last call (final) is for everything. */
void sim_flow_submit(struct cluster *c, uint32_t l, int32_t upto, bool final);
void sim_on_flow(struct cluster *c, uint32_t l, uint64_t version);

/* ---- worker.c ---- */

/* The leg holds nothing any more and is forgotten. Its worker is between steps, or has crashed. */
void sim_leg_over(struct cluster *c, uint32_t l);
void sim_on_step_end(struct cluster *c, struct worker *w, uint64_t epoch);
void sim_on_to_worker(struct cluster *c, uint32_t m);

/* ---- router_side.c ---- */

void sim_on_action(void *ctx, const struct td_core_action *a);
void sim_router_take(struct cluster *c, uint32_t m);
void sim_on_arrival(struct cluster *c, uint32_t req);
void sim_on_client_leaves(struct cluster *c, uint32_t request_at, uint64_t id);
void sim_on_late(struct cluster *c, const struct td_sim_event *e);
void sim_on_snapshot(struct cluster *c, struct worker *w);

/* ---- faults.c ---- */

void sim_on_fault(struct cluster *c, uint32_t i, bool over);

/* ---- cluster.c ---- */

void sim_violate(struct cluster *c, const char *what, uint64_t id);
bool sim_mistake_now(struct cluster *c, enum td_sim_mistake mistake);

#endif
