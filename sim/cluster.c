/* cluster.c - see cluster.h.
 *
 * Invariants (checked at the end of a run with `check`): (1) a request ends once; (2) blocks held
 * on a worker are those of its legs, none after the last; (3) no action names a worker of which the
 * router was told that it is gone; (4) tokens reach the client in order, without gap; (5) the
 * core's ledger is empty when nothing is live.
 *
 * A leg is one call of the router to a worker:
 *   decode    SCHEDULED, waiting -> IMPORT (ticket sent) -> SCHEDULED, running -> over
 *             local or preempted: SCHEDULED, waiting -> SCHEDULED, running
 *   prefill   SCHEDULED, waiting -> SCHEDULED, running (chunks) -> SENDING -> over
 * Messages to a busy worker wait in its mail until its step ends. */
#include "sim/cluster.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim/cache.h"
#include "sim/heap.h"
#include "sim/rng.h"
#include "common/base/prefix_hash.h"
#include "common/engine/scheduler.h"

#define NONE TD_SIM_NONE
#define MAX_STEP_REPORTS 64

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
    uint32_t slot, attempt, worker, epoch, leg, next;
    uint64_t id, key, a, b, c;
    bool flag;
};

/* SCHEDULED: the worker's scheduler has it, waiting or running. */
enum leg_state { LEG_FREE = 0, LEG_SCHEDULED, LEG_IMPORT, LEG_SENDING };

struct leg {
    struct td_sched_seq sched; /* first */
    enum leg_state state;
    bool decode, local; /* local: of a prefill leg, no hand-over */
    uint32_t index, gen;
    uint64_t id;
    uint32_t slot, attempt, worker, req;
    uint32_t slot_next; /* legs of one slot; of free ones: the next, plus 1 */
    int32_t n_total;
    int32_t n_sent, n_skip; /* prefill: tokens whose KV was handed to the link; that
                               the decode worker has already */
    uint32_t dest, dest_leg, dest_gen;
    uint64_t told_ns; /* when the last message of its stream reaches the router */
    bool flow_on, flow_final;
    double flow_left, flow_rate, flow_bytes;
    /* flow_event_ns: of its event in the heap that counts, UINT64_MAX = none */
    uint64_t flow_settled_ns, flow_start_ns, flow_event_ns;
    uint32_t flow_version;
};

struct nic {
    double rate;
    uint32_t *flows, n, capacity; /* prefill legs */
};

struct worker {
    struct cluster *cluster;
    const struct td_sim_group *group;
    struct td_perf perf;
    bool decode, up, told_gone, draining, silent, busy;
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
    uint64_t snap_seq, snap_sent_ns, calls_taken, busy_ns, step_start_ns;
    bool changed;
    struct td_port_step reports[MAX_STEP_REPORTS], now_report;
    uint32_t n_reports;
    uint64_t *added, *evicted;
    uint32_t n_added, n_evicted, added_capacity, evicted_capacity;
};

struct slot {
    bool live;
    uint64_t id;
    uint32_t req, legs;
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
    struct td_port *port;
    struct td_sim_heap heap;
    uint64_t now;
    struct td_sim_rng noise, faults, jitter;
    struct worker *workers;
    uint32_t n_workers;
    struct slot *slots;
    uint32_t *free_slots, n_free_slots;
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

static void violate(struct cluster *c, const char *what, uint64_t id)
{
    if (c->out->n_violations++ == 0)
        snprintf(c->out->violation, sizeof c->out->violation, "at %.6f s, request %llu: %s",
                 (double)c->now / 1e9, (unsigned long long)id, what);
}

static uint64_t ns_of(double s) { return (uint64_t)llround(s * 1e9); }

/* ---- pools ----------------------------------------------------------------------------------- */

static uint32_t msg_new(struct cluster *c)
{
    uint32_t m;
    if (c->free_msg_1) {
        m = c->free_msg_1 - 1;
        c->free_msg_1 = c->msgs[m].next;
    } else {
        if (c->n_msgs == c->msgs_capacity)
            c->msgs = td_sim_grow(c->msgs,
                                  c->msgs_capacity = c->msgs_capacity ? c->msgs_capacity * 2 : 256,
                                  sizeof *c->msgs);
        m = c->n_msgs++;
    }
    c->msgs[m] = (struct msg){.next = NONE, .leg = NONE};
    return m;
}

static void msg_free(struct cluster *c, uint32_t m)
{
    c->msgs[m].next = c->free_msg_1;
    c->free_msg_1 = m + 1;
}

static uint32_t leg_new(struct cluster *c)
{
    uint32_t l;
    if (c->free_leg_1) {
        l = c->free_leg_1 - 1;
        c->free_leg_1 = c->legs[l]->slot_next;
    } else {
        if (c->n_legs == c->legs_capacity)
            c->legs = td_sim_grow(c->legs,
                                  c->legs_capacity = c->legs_capacity ? c->legs_capacity * 2 : 256,
                                  sizeof(struct leg *));
        l = c->n_legs++;
        c->legs[l] = td_sim_grow(NULL, 1, sizeof(struct leg));
        c->legs[l]->gen = 0;
    }
    *c->legs[l] = (struct leg){.index = l,
                               .gen = c->legs[l]->gen + 1,
                               .slot_next = NONE,
                               .dest = NONE,
                               .dest_leg = NONE,
                               .flow_event_ns = UINT64_MAX};
    return l;
}

static void leg_forget(struct cluster *c, uint32_t l)
{
    struct leg *g = c->legs[l];
    uint32_t *at = &c->slots[g->slot].legs;
    while (*at != l) at = &c->legs[*at]->slot_next;
    *at = g->slot_next;
    g->state = LEG_FREE;
    g->gen++;
    g->slot_next = c->free_leg_1;
    c->free_leg_1 = l + 1;
}

/* ---- messages -------------------------------------------------------------------------------- */

static bool unlucky(struct cluster *c, double share)
{
    return share > 0 && td_sim_rng_uniform(&c->faults) < share;
}

static void to_router_at(struct cluster *c, uint32_t m, uint64_t delay_ns)
{
    td_sim_heap_push(&c->heap, c->now + delay_ns, EV_TO_ROUTER, 0, m);
}
static void to_router(struct cluster *c, uint32_t m) { to_router_at(c, m, c->cfg->rpc_ns); }

/* A stream keeps its order; nothing keeps it between two streams. */
static uint64_t stream_delay_ns(struct cluster *c, struct leg *g)
{
    if (!c->cfg->rpc_jitter_ns) return c->cfg->rpc_ns;
    uint64_t at = c->now + c->cfg->rpc_ns +
                  (uint64_t)((double)c->cfg->rpc_jitter_ns * td_sim_rng_exponential(&c->jitter));
    if (at > g->told_ns) g->told_ns = at;
    return g->told_ns - c->now;
}

static void leg_over(struct cluster *c, uint32_t l);

static uint32_t msg_of_leg(struct cluster *c, enum msg_kind kind, const struct leg *g)
{
    uint32_t m = msg_new(c);
    struct msg *x = &c->msgs[m];
    x->kind = kind;
    x->slot = g->slot;
    x->attempt = g->attempt;
    x->id = g->id;
    x->worker = g->worker;
    return m;
}

static void send_end(struct cluster *c, struct leg *g, enum td_code code)
{
    uint32_t m = msg_of_leg(c, g->decode ? M_DECODE_END : M_PREFILL_END, g);
    c->msgs[m].a = code;
    c->msgs[m].b = (uint64_t)g->flow_bytes;
    c->msgs[m].c = g->flow_start_ns ? (c->now - g->flow_start_ns) / 1000 : 0;
    to_router_at(c, m, stream_delay_ns(c, g));
}

/* Ends a leg at its worker and tells the router. */
static void leg_end(struct cluster *c, uint32_t l, enum td_code code)
{
    send_end(c, c->legs[l], code);
    leg_over(c, l);
}

static void maybe_again(struct cluster *c, uint32_t m, uint64_t delay_ns)
{
    if (!unlucky(c, c->cfg->duplicate)) return;
    uint32_t again = msg_new(c);
    c->msgs[again] = c->msgs[m];
    c->msgs[again].next = NONE;
    to_router_at(c, again, delay_ns + ns_of(td_sim_rng_uniform(&c->faults) * 0.02));
}

/* A message of a leg's stream; false: it was lost, the stream broke, and the leg is over. */
static bool send_of_leg(struct cluster *c, uint32_t l, uint32_t m)
{
    if (unlucky(c, c->cfg->lose)) {
        msg_free(c, m);
        leg_end(c, l, TD_CODE_UNAVAILABLE);
        return false;
    }
    uint64_t delay_ns = stream_delay_ns(c, c->legs[l]);
    maybe_again(c, m, delay_ns);
    to_router_at(c, m, delay_ns);
    return true;
}

/* ---- KV blocks ------------------------------------------------------------------------------- */

static int32_t available(const struct worker *w) { return w->n_blocks - w->n_anon - w->n_ref; }

static void note(uint64_t **list, uint32_t *n, uint32_t *capacity, uint64_t hash)
{
    if (*n == *capacity)
        *list = td_sim_grow(*list, *capacity = *capacity ? *capacity * 2 : 64, sizeof **list);
    (*list)[(*n)++] = hash;
}

/* Leading prompt blocks of a request that have a hash. */
static int32_t n_hashed(const struct cluster *c, uint32_t req)
{
    const struct td_sim_request *r = &c->trace->requests[req];
    if (!c->cfg->prefix_cache || r->n_hashes == 0) return 0;
    int64_t by_hash = (int64_t)r->n_hashes * c->trace->hash_tokens / c->cfg->block_size,
            full = r->n_prompt / c->cfg->block_size;
    return (int32_t)(by_hash < full ? by_hash : full);
}

/* A named tenant's chains are its own, as the router's salt makes them (router/tenants.h). */
static uint64_t block_hash(const struct cluster *c, uint32_t req, int32_t block)
{
    const struct td_sim_request *r = &c->trace->requests[req];
    uint32_t at = (uint32_t)block * (uint32_t)c->cfg->block_size;
    uint64_t hash = c->trace->hashes[r->hash_at + at / c->trace->hash_tokens] * 4096 +
                    at % c->trace->hash_tokens / (uint32_t)c->cfg->block_size + 1;
    return r->tenant ? td_prefix_seed(hash, (struct td_prefix_salt){.lo = r->tenant}) : hash;
}

static void hold(struct worker *w, uint32_t e)
{
    if (w->cache.entries[e].refs++ == 0) {
        td_sim_cache_unlink(&w->cache, e);
        w->n_ref++;
    }
}

static void let_go(struct worker *w, uint32_t e)
{
    if (--w->cache.entries[e].refs == 0) {
        td_sim_cache_link_fresh(&w->cache, e);
        w->n_ref--;
    }
}

static struct leg *leg_of(struct td_sched_seq *sched) { return (struct leg *)(void *)sched; }

/* Of the blocks that a leg holds, the first so many are held by their hash. */
static int32_t n_shared(const struct cluster *c, const struct leg *g)
{
    int32_t hashed = n_hashed(c, g->req);
    return g->sched.n_published < hashed ? g->sched.n_published : hashed;
}

static void blocks_room(void *ctx, struct td_schedule_room *ret_room)
{
    const struct worker *w = ctx;
    *ret_room = (struct td_schedule_room){
        .n_blocks = w->n_blocks, .n_held = w->n_anon + w->n_ref, .n_available = available(w)};
}

static int32_t blocks_lookup(void *ctx, struct td_sched_seq *sched, int32_t max_blocks)
{
    struct worker *w = ctx;
    const struct cluster *c = w->cluster;
    uint32_t req = leg_of(sched)->req, e;
    int32_t hashed = n_hashed(c, req), hit = 0;
    for (; hit < max_blocks && hit < hashed; hit++) {
        if ((e = td_sim_cache_find(&w->cache, block_hash(c, req, hit))) == NONE) break;
        hold(w, e);
    }
    return hit;
}

static bool blocks_alloc(void *ctx, struct td_sched_seq *sched, int32_t n)
{
    (void)sched;
    struct worker *w = ctx;
    if (available(w) < n) return false;
    while (available(w) - (int32_t)w->cache.n_linked < n) {
        uint32_t e = w->cache.oldest;
        if (w->cluster->wants_blocks)
            note(&w->evicted, &w->n_evicted, &w->evicted_capacity, w->cache.entries[e].hash);
        td_sim_cache_remove(&w->cache, e);
    }
    w->n_anon += n;
    return true;
}

static void blocks_publish(void *ctx, struct td_sched_seq *sched, int32_t n_full)
{
    struct worker *w = ctx;
    const struct cluster *c = w->cluster;
    uint32_t req = leg_of(sched)->req;
    int32_t hashed = n_hashed(c, req), n = n_full < hashed ? n_full : hashed;
    for (int32_t i = sched->n_published; i < n; i++) {
        uint64_t hash = block_hash(c, req, i);
        uint32_t e = td_sim_cache_find(&w->cache, hash);
        if (e == NONE) {
            e = td_sim_cache_insert(&w->cache, hash);
            w->cache.entries[e].refs = 1;
            w->n_ref++;
            if (c->wants_blocks) note(&w->added, &w->n_added, &w->added_capacity, hash);
        } else {
            hold(w, e); /* somebody published it meanwhile: one copy is enough */
        }
        w->n_anon--;
    }
}

static void blocks_release(void *ctx, struct td_sched_seq *sched)
{
    struct worker *w = ctx;
    const struct cluster *c = w->cluster;
    const struct leg *g = leg_of(sched);
    int32_t shared = n_shared(c, g);
    w->n_anon -= sched->n_blocks - shared;
    for (int32_t i = shared; i-- > 0;) /* the leaf first: it is evicted first */
        let_go(w, td_sim_cache_find(&w->cache, block_hash(c, g->req, i)));
}

static const struct td_sched_blocks worker_blocks = {.room = blocks_room,
                                                     .lookup = blocks_lookup,
                                                     .alloc = blocks_alloc,
                                                     .publish = blocks_publish,
                                                     .release = blocks_release};

/* ---- links ----------------------------------------------------------------------------------- */

static void flow_settle(struct cluster *c, struct leg *g)
{
    g->flow_left -= g->flow_rate * (double)(c->now - g->flow_settled_ns) / 1e9;
    if (g->flow_left < 0) g->flow_left = 0;
    g->flow_settled_ns = c->now;
}

static double share_of(const struct nic *n)
{
    return n->rate > 0 ? n->rate / (n->n ? n->n : 1) : INFINITY;
}

/* A flow that has become slower keeps its event: when that comes too early, it is set again. So
 * a crowded link does not fill the heap. */
static void flow_pace(struct cluster *c, uint32_t l)
{
    struct leg *g = c->legs[l];
    flow_settle(c, g);
    g->flow_rate =
        fmin(fmin(share_of(&c->workers[g->worker].nic), share_of(&c->workers[g->dest].nic)), 1e18);
    uint64_t end_ns = c->now + (uint64_t)ceil(g->flow_left / g->flow_rate * 1e9);
    if (end_ns >= g->flow_event_ns) return;
    g->flow_event_ns = end_ns;
    td_sim_heap_push(&c->heap, end_ns, EV_FLOW, l, ((uint64_t)g->gen << 32) | ++g->flow_version);
}

static void nic_pace(struct cluster *c, const struct nic *n)
{
    for (uint32_t i = 0; i < n->n; i++) flow_pace(c, n->flows[i]);
}

static void nic_add(struct nic *n, uint32_t l)
{
    if (n->n == n->capacity)
        n->flows = td_sim_grow(n->flows, n->capacity = n->capacity ? n->capacity * 2 : 8,
                               sizeof *n->flows);
    n->flows[n->n++] = l;
}

static void nic_remove(struct nic *n, uint32_t l)
{
    uint32_t i = 0;
    while (n->flows[i] != l) i++;
    n->flows[i] = n->flows[--n->n];
}

static void flow_switch(struct cluster *c, uint32_t l, bool on)
{
    struct leg *g = c->legs[l];
    if (g->flow_on == on) return;
    g->flow_on = on;
    struct nic *from = &c->workers[g->worker].nic, *to = &c->workers[g->dest].nic;
    if (on) {
        g->flow_settled_ns = c->now;
        g->flow_rate = 0;
        nic_add(from, l);
        nic_add(to, l);
    } else {
        flow_settle(c, g);
        g->flow_event_ns = UINT64_MAX;
        nic_remove(from, l);
        nic_remove(to, l);
    }
    nic_pace(c, from);
    nic_pace(c, to);
}

static void to_worker_at(struct cluster *c, uint32_t m, uint64_t delay_ns)
{
    c->msgs[m].epoch = c->workers[c->msgs[m].worker].epoch;
    td_sim_heap_push(&c->heap, c->now + delay_ns, EV_TO_WORKER, 0, m);
}

static void flow_done(struct cluster *c, uint32_t l)
{
    struct leg *g = c->legs[l];
    uint32_t m = msg_new(c);
    c->msgs[m] = (struct msg){.kind = M_SLOT_READY,
                              .worker = g->dest,
                              .leg = g->dest_leg,
                              .a = g->dest_gen,
                              .next = NONE};
    to_worker_at(c, m, c->cfg->link_tau_ns);
    m = msg_new(c);
    c->msgs[m] =
        (struct msg){.kind = M_OP_DONE, .worker = g->worker, .leg = l, .a = g->gen, .next = NONE};
    to_worker_at(c, m, c->cfg->link_tau_ns);
}

/* KV of all tokens up to `upto` is there to be sent (the last call: everything). */
static void flow_submit(struct cluster *c, uint32_t l, int32_t upto, bool final)
{
    struct leg *g = c->legs[l];
    int32_t bs = c->cfg->block_size;
    upto = final ? (upto + bs - 1) / bs * bs : upto / bs * bs;
    if (!final && (!c->cfg->overlap || upto <= g->n_sent)) return;
    if (upto > g->n_sent) {
        double bytes = (double)(upto - g->n_sent) * c->kv_bytes_per_token;
        g->n_sent = upto;
        if (g->flow_on) flow_settle(c, g);
        if (!g->flow_start_ns) g->flow_start_ns = c->now;
        g->flow_left += bytes;
        g->flow_bytes += bytes;
        c->out->transfer_bytes += (uint64_t)bytes;
    }
    g->flow_final = final;
    if (g->flow_left > 0) {
        if (g->flow_on)
            flow_pace(c, l);
        else
            flow_switch(c, l, true);
    } else if (final) {
        flow_done(c, l);
    }
}

static void on_flow(struct cluster *c, uint32_t l, uint64_t version)
{
    struct leg *g = c->legs[l];
    if (g->state == LEG_FREE || (((uint64_t)g->gen << 32) | g->flow_version) != version ||
        !g->flow_on || g->flow_event_ns != c->now)
        return;
    flow_settle(c, g);
    g->flow_event_ns = UINT64_MAX;
    if (g->flow_left > g->flow_rate * 1e-9) { /* it became slower on the way; a nanosecond's
                                                 worth is rounding */
        flow_pace(c, l);
        return;
    }
    g->flow_left = 0;
    flow_switch(c, l, false);
    if (g->flow_final) flow_done(c, l);
}

/* ---- legs on a worker ------------------------------------------------------------------------ */

static void set_running(struct worker *w, struct leg *g)
{
    td_scheduler_run(&w->sched, &g->sched);
    g->state = LEG_SCHEDULED;
}

static bool mistake_now(struct cluster *c, enum td_sim_mistake mistake)
{
    bool is_now = c->cfg->mistake == mistake && !c->mistaken;
    c->mistaken |= is_now;
    return is_now;
}

/* The leg holds nothing any more and is forgotten. The worker is between steps, or has crashed. */
static void leg_over(struct cluster *c, uint32_t l)
{
    struct leg *g = c->legs[l];
    struct worker *w = &c->workers[g->worker];
    if (g->flow_on) flow_switch(c, l, false);
    td_scheduler_detach(&w->sched, &g->sched);
    if (g->decode && mistake_now(c, TD_SIM_LEAKED_LEG)) g->sched.n_blocks = n_shared(c, g);
    td_scheduler_release(&w->sched, &g->sched);
    w->changed = true;
    w->n_live--;
    leg_forget(c, l);
}

static uint32_t find_leg(const struct cluster *c, uint32_t slot, uint64_t id, uint32_t attempt,
                         bool decode)
{
    for (uint32_t l = c->slots[slot].legs; l != NONE; l = c->legs[l]->slot_next)
        if (c->legs[l]->id == id && c->legs[l]->attempt == attempt && c->legs[l]->decode == decode)
            return l;
    return NONE;
}

static void accept(struct cluster *c, struct worker *w, const struct msg *m)
{
    bool decode = m->kind == M_START_DECODE;
    w->calls_taken++;
    struct leg refusal = {
        .decode = decode, .slot = m->slot, .attempt = m->attempt, .id = m->id, .worker = w->index};
    if (w->draining) {
        send_end(c, &refusal, TD_CODE_UNAVAILABLE);
        return;
    }
    if (w->n_live >= w->group->max_seqs) {
        send_end(c, &refusal, TD_CODE_RESOURCE_EXHAUSTED);
        return;
    }
    uint32_t dest = NONE;
    if (!decode && !m->flag) {
        dest = find_leg(c, m->slot, m->id, m->attempt, true);
        if (dest == NONE || c->legs[dest]->state != LEG_IMPORT) { /* the grant's owner is gone */
            send_end(c, &refusal, TD_CODE_UNAVAILABLE);
            return;
        }
    }
    uint32_t l = leg_new(c);
    struct leg *g = c->legs[l];
    const struct slot *s = &c->slots[m->slot];
    /* of a START: the request's index */
    const struct td_sim_request *r = &c->trace->requests[m->leg];
    g->decode = decode;
    g->local = m->flag;
    g->id = m->id;
    g->sched.priority = m->key;
    g->sched.order = m->id;
    g->slot = m->slot;
    g->attempt = m->attempt;
    g->worker = w->index;
    g->req = m->leg;
    g->n_total = r->n_prompt + r->n_output;
    g->sched.n_tokens = (int32_t)m->a;
    g->n_skip = g->n_sent = (int32_t)m->b;
    if (dest != NONE) {
        g->dest = c->legs[dest]->worker;
        g->dest_leg = dest;
        g->dest_gen = c->legs[dest]->gen;
    }
    g->slot_next = s->legs;
    c->slots[m->slot].legs = l;
    w->n_live++;
    td_scheduler_wait(&w->sched, &g->sched);
    g->state = LEG_SCHEDULED;
    w->changed = true;
}

/* On TD_OK the leg is where it goes next; what can never be held is refused. */
static td_status admit(void *ctx, struct td_sched_seq *sched)
{
    struct worker *w = ctx;
    struct cluster *c = w->cluster;
    struct leg *g = leg_of(sched);
    bool import = w->decode && !g->local && sched->n_preemptions == 0;
    td_status s = td_scheduler_admit(&w->sched, sched, import, td_scheduler_headroom(&w->sched));
    if (s == TD_ERR_AGAIN) return s;
    if (s) {
        leg_end(c, g->index, TD_CODE_INVALID_ARGUMENT);
        return s;
    }
    c->out->cached_tokens += (uint64_t)sched->n_cached;
    if (import) {
        g->state = LEG_IMPORT;
        uint32_t m = msg_of_leg(c, M_TICKET, g);
        c->msgs[m].a = (uint64_t)sched->n_cached;
        send_of_leg(c, g->index, m);
        return TD_OK;
    }
    set_running(w, g);
    if (!w->decode && !g->local && sched->n_computed > g->n_sent)
        flow_submit(c, g->index, sched->n_computed, false);
    return TD_OK;
}

static void admit_waiting(struct cluster *c, struct worker *w)
{
    td_scheduler_admit_waiting(&w->sched, c->now, admit, w);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void start_step(struct cluster *c, struct worker *w)
{
    struct td_sched_load load;
    uint64_t n_preempted = w->sched.n_preemptions;
    w->n_items = td_scheduler_batch(&w->sched, w->items, &load);
    n_preempted = w->sched.n_preemptions - n_preempted;
    c->out->preemptions += n_preempted;
    if (n_preempted) w->changed = true;
    if (w->n_items == 0) return;
    const struct td_perf_batch b = {.prefill_rows = (int64_t)load.prefill_rows,
                                    .decode_rows = (int64_t)load.decode_rows,
                                    .attention_work = (double)load.attention_work_x2 / 2,
                                    .context_tokens = (double)load.context_tokens};
    double s = td_perf_step_s(&w->perf, &b) * w->slow;
    if (c->cfg->step_noise > 0)
        s *= exp(c->cfg->step_noise * td_sim_rng_normal(&c->noise) -
                 c->cfg->step_noise * c->cfg->step_noise / 2);
    uint64_t ns = ns_of(s);
    w->busy = true;
    w->step_start_ns = c->now;
    w->now_report = (struct td_port_step){.prefill_rows = (uint32_t)load.prefill_rows,
                                          .decode_rows = (uint32_t)load.decode_rows,
                                          .wall_us = (uint32_t)(ns / 1000),
                                          .attention_work = load.attention_work_x2 / 2,
                                          .context_tokens = load.context_tokens};
    c->out->steps++;
    c->out->prefill_tokens += load.prefill_rows;
    c->out->decode_tokens += load.decode_rows;
    c->out->decode_row_s += (double)load.decode_rows * s;
    td_sim_heap_push(&c->heap, c->now + ns, EV_STEP_END, w->index, w->epoch);
}

static void chain(struct cluster *c, uint32_t *head, uint32_t *tail, uint32_t m)
{
    if (*head == NONE)
        *head = m;
    else
        c->msgs[*tail].next = m;
    *tail = m;
}

/* The prefill leg has ended with its first token: the decode leg that waits for its KV is told
 * over the link. */
static void tell_finished(struct cluster *c, const struct leg *g)
{
    if (g->dest_leg == NONE) return;
    uint32_t m = msg_new(c);
    c->msgs[m] = (struct msg){.kind = M_SENDER_FINISHED,
                              .worker = g->dest,
                              .leg = g->dest_leg,
                              .a = g->dest_gen,
                              .next = NONE};
    to_worker_at(c, m, c->cfg->link_tau_ns);
}

/* As decode.c: its stream ends, because of that. */
static void sender_finished(struct cluster *c, uint32_t l, uint32_t gen)
{
    struct leg *g = c->legs[l];
    if (g->gen != gen || g->state != LEG_IMPORT) return; /* cancelled meanwhile */
    uint32_t m = msg_of_leg(c, M_DECODE_END, g);
    c->msgs[m].a = TD_CODE_UNAVAILABLE;
    c->msgs[m].flag = true;
    to_router_at(c, m, stream_delay_ns(c, g));
    leg_over(c, l);
}

/* Streams of one step are told together, one event for many messages, unless each takes its own
 * time. */
static void tell_of_step(struct cluster *c, struct leg *g, uint32_t *head, uint32_t *tail,
                         uint32_t m)
{
    if (c->cfg->rpc_jitter_ns)
        to_router_at(c, m, stream_delay_ns(c, g));
    else
        chain(c, head, tail, m);
}

/* One token more of a leg: it is told, and may be the last. */
static void sampled(struct cluster *c, struct worker *w, uint32_t l, uint32_t *head, uint32_t *tail)
{
    struct leg *g = c->legs[l];
    bool last = g->sched.n_tokens >= g->n_total;
    uint32_t m = msg_of_leg(c, w->decode ? M_TOKEN : M_FIRST_TOKEN, g);
    c->msgs[m].a = (uint64_t)g->sched.n_tokens;
    c->msgs[m].b = last;
    c->msgs[m].c = (uint64_t)g->sched.n_cached;
    if (unlucky(c, c->cfg->lose)) {
        msg_free(c, m);
        leg_end(c, l, TD_CODE_UNAVAILABLE);
        return;
    }
    tell_of_step(c, g, head, tail, m);
    maybe_again(c, m, c->cfg->rpc_jitter_ns ? g->told_ns - c->now : c->cfg->rpc_ns);
    if (last) {
        m = msg_of_leg(c, w->decode ? M_DECODE_END : M_PREFILL_END, g);
        c->msgs[m].a = TD_CODE_OK;
        tell_of_step(c, g, head, tail, m);
        tell_finished(c, g);
        leg_over(c, l);
    } else if (!w->decode) {
        td_scheduler_detach(&w->sched, &g->sched);
        g->state = LEG_SENDING;
        flow_submit(c, l, g->sched.n_tokens - 1, true);
    }
}

static void worker_loop(struct cluster *c, struct worker *w);

static void on_step_end(struct cluster *c, struct worker *w, uint64_t epoch)
{
    if (!w->up || w->epoch != epoch) return;
    w->busy = false;
    w->changed = true;
    w->busy_ns += (c->now < c->last_arrival_ns ? c->now : c->last_arrival_ns) -
                  (w->step_start_ns < c->last_arrival_ns ? w->step_start_ns : c->last_arrival_ns);
    if (w->n_reports < MAX_STEP_REPORTS) w->reports[w->n_reports++] = w->now_report;
    uint32_t head = NONE, tail = NONE;
    for (int32_t i = 0; i < w->n_items; i++) {
        struct leg *g = leg_of(w->items[i].seq);
        if (td_scheduler_computed(&w->sched, &g->sched, w->items[i].n_new)) {
            td_scheduler_sampled(&g->sched);
            sampled(c, w, g->index, &head, &tail);
        } else if (!w->decode && !g->local) {
            flow_submit(c, g->index, g->sched.n_computed, false);
        }
    }
    w->n_items = 0;
    if (head != NONE) to_router(c, head);
    worker_loop(c, w);
}

static void slot_ready(struct cluster *c, struct worker *w, uint32_t l, uint32_t gen)
{
    struct leg *g = l == NONE ? NULL : c->legs[l];
    if (!g || g->gen != gen || g->state != LEG_IMPORT) return; /* cancelled meanwhile */
    td_scheduler_imported(&w->sched, &g->sched); /* with the prefill worker's first token, which
                                                    is told again */
    set_running(w, g);
    uint32_t head = NONE, tail = NONE;
    sampled(c, w, l, &head, &tail);
    if (head != NONE) to_router(c, head);
}

static void worker_take(struct cluster *c, struct worker *w, uint32_t m)
{
    struct msg x = c->msgs[m];
    msg_free(c, m);
    w->changed = true;
    uint32_t l;
    switch (x.kind) {
    case M_START_DECODE:
    case M_START_PREFILL:
        accept(c, w, &x);
        break;
    case M_CANCEL:
        l = find_leg(c, x.slot, x.id, x.attempt, x.flag);
        if (l != NONE && c->legs[l]->worker == w->index) leg_over(c, l);
        break;
    case M_SLOT_READY:
        slot_ready(c, w, x.leg, (uint32_t)x.a);
        break;
    case M_SENDER_FINISHED:
        sender_finished(c, x.leg, (uint32_t)x.a);
        break;
    case M_OP_DONE:
        if (c->legs[x.leg]->gen == x.a && c->legs[x.leg]->state == LEG_SENDING)
            leg_end(c, x.leg, TD_CODE_OK);
        break;
    default:
        TD_ASSERT(!"a router's message");
    }
}

/* What a worker's step loop does between two steps. */
static void worker_loop(struct cluster *c, struct worker *w)
{
    /* taking mail never posts mail to the same worker at once */
    for (uint32_t i = 0; i < w->n_mail; i++) worker_take(c, w, w->mail[i]);
    w->n_mail = 0;
    admit_waiting(c, w);
    if (w->sched.n_running > 0) start_step(c, w);
}

static void on_to_worker(struct cluster *c, uint32_t m)
{
    struct msg *x = &c->msgs[m];
    struct worker *w = &c->workers[x->worker];
    if (!w->up || x->epoch != w->epoch) { /* nobody there: a call to it fails, all else is lost */
        if (!w->silent && (x->kind == M_START_DECODE || x->kind == M_START_PREFILL)) {
            struct leg refusal = {.decode = x->kind == M_START_DECODE,
                                  .slot = x->slot,
                                  .attempt = x->attempt,
                                  .id = x->id,
                                  .worker = x->worker};
            send_end(c, &refusal, TD_CODE_UNAVAILABLE);
        }
        msg_free(c, m);
        return;
    }
    if (w->busy && !(c->cfg->admit_at_once && x->kind == M_START_DECODE)) {
        if (w->n_mail == w->mail_capacity)
            w->mail = td_sim_grow(w->mail,
                                  w->mail_capacity = w->mail_capacity ? w->mail_capacity * 2 : 16,
                                  sizeof *w->mail);
        w->mail[w->n_mail++] = m;
        return;
    }
    worker_take(c, w, m);
    if (w->busy)
        admit_waiting(c, w);
    else
        worker_loop(c, w);
}

/* ---- the router's side ----------------------------------------------------------------------- */

static void finish(struct cluster *c, uint32_t slot, enum td_sim_status status, enum td_code code,
                   const char *reason)
{
    struct slot *s = &c->slots[slot];
    if (!s->live) {
        violate(c, "ended a second time", s->id);
        return;
    }
    struct td_sim_outcome *o = &c->out->outcomes[s->req];
    if (status == TD_SIM_OK && s->n_tokens != o->n_prompt + o->n_output)
        violate(c, "called complete without its last token", s->id);
    o->status = status;
    o->code = code;
    o->reason = reason;
    o->decided_ns = c->now;
    s->live = false;
    c->free_slots[c->n_free_slots++] = slot;
    c->n_done++;
}

static void send_to_worker(struct cluster *c, uint32_t m)
{
    if (unlucky(c, c->cfg->lose)) {
        const struct msg *x = &c->msgs[m];
        if (x->kind != M_CANCEL) { /* the call could not be made, and the router sees it; a lost
                                      cancel is found by the broken stream */
            struct leg refusal = {.decode = x->kind == M_START_DECODE,
                                  .slot = x->slot,
                                  .attempt = x->attempt,
                                  .id = x->id,
                                  .worker = x->worker};
            send_end(c, &refusal, TD_CODE_UNAVAILABLE);
            msg_free(c, m);
        } else {
            to_worker_at(c, m, c->cfg->rpc_ns + 1000000000ull);
        }
        return;
    }
    to_worker_at(c, m, c->cfg->rpc_ns);
}

static void on_action(void *ctx, const struct td_core_action *a)
{
    struct cluster *c = ctx;
    struct slot *s = &c->slots[a->slot];
    if (!s->live || s->id != a->id) { /* after the client's own cancel this is so; at any other
                                         time it is a mistake of the core */
        if (a->kind == TD_ACT_COMPLETE || a->kind == TD_ACT_FAIL)
            violate(c, "ended though it is not live", a->id);
        return;
    }
    struct td_sim_outcome *o = &c->out->outcomes[s->req];
    bool decode = a->kind == TD_ACT_START_DECODE || a->kind == TD_ACT_CANCEL_DECODE;
    switch (a->kind) {
    case TD_ACT_START_DECODE:
    case TD_ACT_START_PREFILL: {
        if (a->start.worker >= c->n_workers) {
            violate(c, "placed on a worker that does not exist", a->id);
            return;
        }
        const struct worker *w = &c->workers[a->start.worker];
        if (w->told_gone) violate(c, "placed on a worker that is gone", a->id);
        if (w->decode != decode) violate(c, "placed on a worker of the other role", a->id);
        uint32_t m = msg_new(c);
        c->msgs[m] = (struct msg){.kind = decode ? M_START_DECODE : M_START_PREFILL,
                                  .slot = a->slot,
                                  .attempt = a->attempt,
                                  .worker = a->start.worker,
                                  .id = a->id,
                                  .key = a->start.key,
                                  .a = (uint64_t)s->n_tokens,
                                  .b = decode ? 0 : s->attempt_cached,
                                  .flag = a->start.local,
                                  .leg = s->req,
                                  .next = NONE};
        s->call_worker[decode] = a->start.worker;
        s->call_attempt[decode] = a->attempt;
        s->call_open[decode] = true;
        if (decode) o->decode = a->start.worker;
        if (!decode || a->start.local) o->prefill = a->start.worker;
        if (decode && a->start.local) c->out->deflected++;
        send_to_worker(c, m);
        break;
    }
    case TD_ACT_CANCEL_DECODE:
    case TD_ACT_CANCEL_PREFILL: {
        s->call_open[decode] = false;
        uint32_t m = msg_new(c);
        c->msgs[m] = (struct msg){.kind = M_CANCEL,
                                  .slot = a->slot,
                                  .attempt = s->call_attempt[decode],
                                  .worker = s->call_worker[decode],
                                  .id = a->id,
                                  .flag = decode,
                                  .next = NONE};
        s->call_attempt[decode] = UINT32_MAX;
        send_to_worker(c, m);
        break;
    }
    case TD_ACT_COMPLETE:
        finish(c, a->slot, TD_SIM_OK, 0, NULL);
        if (mistake_now(c, TD_SIM_ENDED_TWICE)) finish(c, a->slot, TD_SIM_OK, 0, NULL);
        break;
    case TD_ACT_FAIL:
        finish(c, a->slot,
               a->fail.code == TD_CODE_RESOURCE_EXHAUSTED ? TD_SIM_REJECTED : TD_SIM_FAILED,
               a->fail.code, a->fail.reason);
        break;
    }
}

/* The client's stream has n_tokens now. */
static void deliver(struct cluster *c, struct slot *s, int32_t n_tokens)
{
    struct td_sim_outcome *o = &c->out->outcomes[s->req];
    if (n_tokens <= s->n_tokens) return; /* it has it already */
    /* both sides send the first */
    if (n_tokens > o->n_prompt + 1 && n_tokens < o->n_prompt + o->n_output &&
        mistake_now(c, TD_SIM_SKIPPED_TOKEN))
        return;
    if (n_tokens != s->n_tokens + 1) violate(c, "a token was skipped", s->id);
    s->n_tokens = n_tokens;
    if (!o->first_ns) o->first_ns = c->now;
    if (n_tokens == o->n_prompt + o->n_output) o->end_ns = c->now;
}

static void router_take(struct cluster *c, uint32_t m)
{
    struct msg x = c->msgs[m];
    msg_free(c, m);
    struct td_port_leg leg = {.slot = x.slot, .attempt = x.attempt, .id = x.id};
    struct slot *s = &c->slots[x.slot];
    struct worker *w = &c->workers[x.worker];
    /* As router/legs.c: a leg that was cancelled is detached. */
    bool of_decode = x.kind == M_TICKET || x.kind == M_TOKEN || x.kind == M_DECODE_END;
    bool mine = s->live && s->id == x.id && s->call_open[of_decode] &&
                s->call_attempt[of_decode] == x.attempt;
    switch (x.kind) {
    case M_TICKET:
        if (mine) s->attempt_cached = (uint32_t)x.a;
        td_port_ticket(c->port, c->now, &leg, x.a);
        break;
    case M_FIRST_TOKEN:
        if (mine) {
            c->out->outcomes[s->req].cached_tokens = (int32_t)x.c;
            deliver(c, s, (int32_t)x.a);
        }
        td_port_first_token(c->port, c->now, &leg, x.b, x.a, x.c);
        break;
    case M_TOKEN:
        if (mine) {
            if (x.a == (uint64_t)c->out->outcomes[s->req].n_prompt + 1 &&
                !c->out->outcomes[s->req].first_ns)
                c->out->outcomes[s->req].cached_tokens = (int32_t)x.c;
            deliver(c, s, (int32_t)x.a);
        }
        td_port_token(c->port, c->now, &leg, x.a, x.b);
        break;
    case M_PREFILL_END:
        td_port_prefill_end(c->port, c->now, &leg, (enum td_code)x.a, x.b, x.c);
        break;
    case M_DECODE_END: { /* as router/legs.c: a stream that ends well without the last token did
                            not end well */
        bool whole = mine && s->n_tokens == c->out->outcomes[s->req].n_prompt +
                                                c->out->outcomes[s->req].n_output;
        if (x.flag && mine && s->n_tokens == c->out->outcomes[s->req].n_prompt) c->out->overtaken++;
        bool cut_short = x.a == TD_CODE_OK && mine && !whole;
        td_port_decode_end(c->port, c->now, &leg, cut_short ? TD_CODE_INTERNAL : (enum td_code)x.a,
                           x.flag);
        break;
    }
    case M_GONE:
        w->told_gone = true;
        if (c->cfg->mistake != TD_SIM_DEAF_ROUTER) td_port_gone(c->port, c->now, x.worker);
        break;
    case M_JOIN: {
        struct td_port_worker j = {.index = w->index,
                                   .decode = w->decode,
                                   .kv_tokens =
                                       (uint64_t)w->n_blocks * (uint64_t)c->cfg->block_size,
                                   .max_seqs = (uint32_t)w->group->max_seqs,
                                   .node_class = (uint32_t)(w->group - c->cfg->groups),
                                   .max_step_tokens = (uint32_t)w->group->max_step_tokens,
                                   .kv_bytes_per_token = c->kv_bytes_per_token};
        w->told_gone = false;
        td_port_join(c->port, c->now, &j);
        break;
    }
    case M_DRAIN:
        td_port_drain(c->port, c->now, x.worker);
        break;
    default:
        TD_ASSERT(!"a worker's message");
    }
}

static void on_arrival(struct cluster *c, uint32_t req)
{
    const struct td_sim_request *r = &c->trace->requests[req];
    struct td_sim_outcome *o = &c->out->outcomes[req];
    if (++c->next_arrival < c->trace->n)
        td_sim_heap_push(&c->heap, c->trace->requests[c->next_arrival].at_ns, EV_ARRIVAL,
                         c->next_arrival, 0);
    if (c->n_free_slots == 0) {
        *o = (struct td_sim_outcome){.status = TD_SIM_REJECTED,
                                     .at_ns = o->at_ns,
                                     .decided_ns = c->now,
                                     .code = TD_CODE_RESOURCE_EXHAUSTED,
                                     .n_prompt = o->n_prompt,
                                     .n_output = o->n_output,
                                     .reason = "max_requests are live"};
        c->n_done++;
        return;
    }
    uint32_t slot = c->free_slots[--c->n_free_slots];
    uint32_t legs = c->slots[slot].legs; /* of earlier requests: their last words are still on
                                            the way */
    c->slots[slot] = (struct slot){
        .live = true, .id = ++c->next_id, .req = req, .legs = legs, .n_tokens = r->n_prompt};
    struct td_port_request q = {.slot = slot,
                                .slo_class = r->slo_class,
                                .tenant = r->tenant,
                                .id = c->next_id,
                                .n_prompt = (uint64_t)r->n_prompt,
                                .max_output = (uint64_t)(r->n_output > c->cfg->told_max_tokens
                                                             ? r->n_output
                                                             : c->cfg->told_max_tokens)};
    int32_t n = c->wants_blocks ? n_hashed(c, req) : 0, every = (n + 511) / 512;
    for (int32_t i = every; i > 0 && i <= n; i += every)
        c->hashes[q.n_hashes++] = block_hash(c, req, i - 1);
    q.hashes = c->hashes;
    q.hash_tokens = (uint32_t)(every * c->cfg->block_size);
    if (unlucky(c, c->cfg->cancel))
        td_sim_heap_push(&c->heap, c->now + ns_of(td_sim_rng_uniform(&c->faults) * 5),
                         EV_CLIENT_LEAVES, slot, c->next_id);
    td_port_arrive(c->port, c->now, &q);
}

static void on_client_leaves(struct cluster *c, uint32_t slot, uint64_t id)
{
    struct slot *s = &c->slots[slot];
    if (!s->live || s->id != id) return;
    td_port_cancel(c->port, c->now, slot, id);
    finish(c, slot, TD_SIM_CANCELLED, TD_CODE_CANCELLED, "the client left");
}

/* A snapshot on its slow way, with its lists. Later ones may overtake it: the core goes by their
 * numbers. */
struct late {
    uint32_t epoch; /* a snapshot comes by its registration's stream: after the next registration
                       there is none from before */
    struct td_port_snapshot s;
    struct td_port_step steps[MAX_STEP_REPORTS];
    uint64_t hashes[]; /* added, then evicted */
};

static void send_late(struct cluster *c, const struct worker *w, const struct td_port_snapshot *s)
{
    struct late *l =
        td_sim_grow(NULL, 1, sizeof *l + (s->n_added + s->n_evicted) * sizeof *l->hashes);
    l->s = *s;
    l->epoch = w->epoch;
    if (s->n_steps) memcpy(l->steps, s->steps, s->n_steps * sizeof *l->steps);
    if (s->n_added) memcpy(l->hashes, s->added, s->n_added * sizeof *l->hashes);
    if (s->n_evicted) memcpy(l->hashes + s->n_added, s->evicted, s->n_evicted * sizeof *l->hashes);
    l->s.steps = l->steps;
    l->s.added = l->hashes;
    l->s.evicted = l->hashes + s->n_added;
    td_sim_heap_push(&c->heap, c->now + ns_of(w->late_s * td_sim_rng_exponential(&c->faults)),
                     EV_LATE, w->index, (uint64_t)(uintptr_t)l);
}

static void on_late(struct cluster *c, const struct td_sim_event *e)
{
    struct late *l = (struct late *)(uintptr_t)e->b;
    if (!c->workers[e->a].told_gone && c->workers[e->a].epoch == l->epoch)
        td_port_snapshot(c->port, c->now, &l->s);
    free(l);
}

static void on_snapshot(struct cluster *c, struct worker *w)
{
    if (c->cfg->snapshot_ns)
        td_sim_heap_push(&c->heap, c->now + c->cfg->snapshot_ns, EV_SNAPSHOT, w->index, 0);
    if (!w->up || w->silent || w->told_gone) return;
    /* something new, or a sign of life */
    if (!w->changed && c->now - w->snap_sent_ns < 200000000ull) return;
    struct td_port_snapshot s = {.worker = w->index,
                                 .seq = ++w->snap_seq,
                                 .held_tokens = (uint64_t)(w->n_anon + w->n_ref) *
                                                (uint64_t)c->cfg->block_size,
                                 .queued_tokens = td_scheduler_queued_tokens(&w->sched),
                                 .busy = (uint64_t)(w->sched.n_running + w->sched.n_waiting),
                                 .calls_taken = w->calls_taken,
                                 .steps = w->reports,
                                 .n_steps = w->n_reports,
                                 .added = w->added,
                                 .n_added = w->n_added,
                                 .evicted = w->evicted,
                                 .n_evicted = w->n_evicted};
    if (unlucky(c, c->cfg->lose)) return; /* what it told waits for the next */
    if (w->late_s > 0)
        send_late(c, w, &s);
    else
        td_port_snapshot(c->port, c->now, &s);
    w->snap_sent_ns = c->now;
    w->n_reports = w->n_added = w->n_evicted = 0;
    w->changed = false;
}

/* ---- faults ---------------------------------------------------------------------------------- */

static void tell_router(struct cluster *c, enum msg_kind kind, const struct worker *w,
                        uint64_t delay_ns)
{
    uint32_t m = msg_new(c);
    c->msgs[m] = (struct msg){.kind = kind, .worker = w->index, .next = NONE};
    to_router_at(c, m, delay_ns);
}

/* All that it held is gone; whoever sends to it or is sent to by it sees its connection break. */
static void worker_dies(struct cluster *c, struct worker *w)
{
    w->up = w->busy = false;
    w->epoch++;
    for (uint32_t i = 0; i < w->n_mail; i++) msg_free(c, w->mail[i]);
    w->n_mail = 0;
    for (uint32_t l = 0; l < c->n_legs; l++) {
        struct leg *g = c->legs[l];
        if (g->state == LEG_FREE) continue;
        if (g->worker == w->index) {
            uint32_t d = g->decode ? NONE : g->dest_leg;
            if (d != NONE && c->legs[d]->gen == g->dest_gen && c->legs[d]->state == LEG_IMPORT &&
                c->legs[d]->worker != w->index && !w->silent)
                leg_end(c, d, TD_CODE_UNAVAILABLE); /* its import fails */
            leg_over(c, l);
        } else if (!g->decode && g->dest == w->index && !w->silent &&
                   (g->state == LEG_SENDING ||
                    (g->sched.list == TD_SCHED_RUNNING && !c->workers[g->worker].busy))) {
            leg_end(c, l, TD_CODE_UNAVAILABLE); /* its push fails; one in a running step finds out
                                                when it submits: the router cancels it before */
        }
    }
    td_sim_cache_free(&w->cache);
    w->n_anon = w->n_ref = w->n_items = 0;
    w->n_reports = w->n_added = w->n_evicted = 0;
}

static void worker_starts(struct cluster *c, struct worker *w)
{
    w->up = true;
    w->silent = w->draining = false;
    w->snap_seq = 0;
    w->calls_taken = 0;
    w->changed = true;
    tell_router(c, M_JOIN, w, c->cfg->rpc_ns);
}

static void on_fault(struct cluster *c, uint32_t i, bool over)
{
    const struct td_sim_fault *f = &c->cfg->faults[i];
    if (f->worker >= c->n_workers) return;
    struct worker *w = &c->workers[f->worker];
    if (!over && f->until_s > f->at_s)
        td_sim_heap_push(&c->heap, ns_of(f->until_s), EV_FAULT_END, i, 0);
    switch (f->kind) {
    case TD_FAULT_CRASH:
    case TD_FAULT_SILENT:
        if (!over && w->up) {
            w->silent = f->kind == TD_FAULT_SILENT;
            worker_dies(c, w);
            if (!w->silent) tell_router(c, M_GONE, w, c->cfg->rpc_ns);
        } else if (over && !w->up) {
            /* its old stream ends when it comes back */
            if (w->silent) tell_router(c, M_GONE, w, 0);
            worker_starts(c, w);
        }
        break;
    case TD_FAULT_SLOW:
        w->slow = over ? (w->group->slow > 0 ? w->group->slow : 1) : w->slow * f->factor;
        break;
    case TD_FAULT_DRAIN:
        if (!over && w->up) {
            w->draining = true;
            tell_router(c, M_DRAIN, w, c->cfg->rpc_ns);
        } else if (over && w->up) { /* drained, or out of time, and started again */
            tell_router(c, M_GONE, w, c->cfg->rpc_ns);
            worker_dies(c, w);
            worker_starts(c, w);
        }
        break;
    case TD_FAULT_LATE:
        w->late_s = over ? 0 : f->factor;
        break;
    case TD_FAULT_LINK:
        w->nic.rate = over ? w->group->nic_bytes_per_s : w->nic.rate * f->factor;
        nic_pace(c, &w->nic);
        break;
    }
}

/* ---- the run --------------------------------------------------------------------------------- */

static void handle(struct cluster *c, const struct td_sim_event *e)
{
    switch ((enum event_kind)e->kind) {
    case EV_ARRIVAL:
        on_arrival(c, e->a);
        break;
    case EV_TO_WORKER:
        on_to_worker(c, (uint32_t)e->b);
        break;
    case EV_TO_ROUTER:
        for (uint32_t m = (uint32_t)e->b, next; m != NONE; m = next) {
            next = c->msgs[m].next;
            router_take(c, m);
        }
        break;
    case EV_STEP_END:
        on_step_end(c, &c->workers[e->a], e->b);
        break;
    case EV_FLOW:
        on_flow(c, e->a, e->b);
        break;
    case EV_SNAPSHOT:
        on_snapshot(c, &c->workers[e->a]);
        break;
    case EV_LATE:
        on_late(c, e);
        break;
    case EV_TICK:
        td_port_tick(c->port, c->now);
        td_sim_heap_push(&c->heap, c->now + c->cfg->tick_ns, EV_TICK, 0, 0);
        break;
    case EV_FAULT:
        on_fault(c, e->a, false);
        break;
    case EV_FAULT_END:
        on_fault(c, e->a, true);
        break;
    case EV_CLIENT_LEAVES:
        on_client_leaves(c, e->a, e->b);
        break;
    }
}

static void check_quiet(struct cluster *c)
{
    static const char *const states[] = {"free", "waiting", "importing", "sending"};
    for (uint32_t l = 0; l < c->n_legs; l++) {
        const struct leg *g = c->legs[l];
        if (g->state == LEG_FREE) continue;
        char what[128];
        snprintf(what, sizeof what, "a leg is left on worker %u: %s of attempt %u, %s", g->worker,
                 g->decode ? "decode" : "prefill", g->attempt,
                 g->sched.list == TD_SCHED_RUNNING ? "running" : states[g->state]);
        violate(c, what, g->id);
    }
    for (uint32_t i = 0; i < c->n_workers; i++) {
        const struct worker *w = &c->workers[i];
        if (w->n_live || w->sched.n_running || w->sched.n_waiting)
            violate(c, "a worker counts legs that are not there", i);
        if (w->n_anon || w->n_ref) violate(c, "KV blocks are held for nobody", i);
        if (w->nic.n) violate(c, "a transfer runs for nobody", i);
    }
    struct td_port_residue r;
    td_port_residue(c->port, c->n_workers, &r);
    if (r.live || r.queued) violate(c, "the core holds a request that has ended", r.live);
    if (r.assigned || r.assigned_tokens) violate(c, "the core's ledger is not empty", r.assigned);
}

static td_status cluster_open(struct cluster *c, struct td_err *err)
{
    const struct td_sim_config *f = c->cfg;
    if (f->block_size < 1)
        return td_fail(err, TD_ERR_INVALID, "block_size is %d, must be at least 1", f->block_size);
    if (f->prefix_cache && c->trace->n_hashes && c->trace->hash_tokens % (uint32_t)f->block_size)
        return td_fail(err, TD_ERR_INVALID,
                       "block_size is %d, must divide the trace's blocks of %u tokens",
                       f->block_size, c->trace->hash_tokens);
    for (uint32_t i = 0; i < f->n_groups; i++) {
        const struct td_sim_group *g = &f->groups[i];
        if (g->max_batch < 1 || g->max_step_tokens < 1 || g->max_seqs < 1)
            return td_fail(
                err, TD_ERR_INVALID,
                "max_batch, max_step_tokens and max_seqs of a worker must be at least 1");
        if (!g->kv_tokens && !g->perf.kv_tokens)
            return td_fail(
                err, TD_ERR_INVALID,
                "latency %s does not say how many KV tokens a worker holds: give kv_tokens",
                g->perf.name);
        if ((g->kv_tokens ? g->kv_tokens : g->perf.kv_tokens) / (uint64_t)f->block_size >
            INT32_MAX / 2)
            return td_fail(err, TD_ERR_LIMIT, "kv_tokens is %llu, limit %llu with blocks of %d",
                           (unsigned long long)(g->kv_tokens ? g->kv_tokens : g->perf.kv_tokens),
                           (unsigned long long)INT32_MAX / 2 * (uint64_t)f->block_size,
                           f->block_size);
        c->n_workers += g->count;
        c->out->gpus += g->count * (g->perf.gpus ? g->perf.gpus : 1);
        if (f->kv_bytes_per_token <= 0 && c->kv_bytes_per_token <= 0)
            c->kv_bytes_per_token = g->perf.kv_bytes_per_token;
    }
    if (f->kv_bytes_per_token > 0) c->kv_bytes_per_token = f->kv_bytes_per_token;
    if (c->n_workers == 0 || c->n_workers > TD_CORE_MAX_WORKERS)
        return td_fail(err, TD_ERR_INVALID, "there are %u workers, must be 1..%d", c->n_workers,
                       TD_CORE_MAX_WORKERS);
    if (f->router.max_requests < 1 || f->router.max_requests > TD_CORE_MAX_REQUESTS)
        return td_fail(err, TD_ERR_INVALID, "max_requests is %u, must be 1..%d",
                       f->router.max_requests, TD_CORE_MAX_REQUESTS);
    struct td_port_config router = f->router;
    /* without hashes it would stay empty, and large */
    router.prefix_index = router.prefix_index && f->prefix_cache && c->trace->n_hashes > 0;
    td_status s = td_port_create(&router, on_action, c, &c->port, err);
    if (s) return s;
    c->wants_blocks = f->prefix_cache && c->trace->n_hashes && td_port_wants_blocks(c->port);
    uint32_t n = f->router.max_requests;
    c->slots = td_sim_grow(NULL, n, sizeof *c->slots);
    c->free_slots = td_sim_grow(NULL, n, sizeof *c->free_slots);
    for (uint32_t i = 0; i < n; i++) {
        c->slots[i] = (struct slot){.legs = NONE};
        c->free_slots[i] = n - 1 - i;
    }
    c->n_free_slots = n;
    c->workers = calloc(c->n_workers, sizeof *c->workers);
    if (!c->workers) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    uint32_t at = 0;
    for (uint32_t i = 0; i < f->n_groups; i++)
        for (uint32_t k = 0; k < f->groups[i].count; k++, at++) {
            struct worker *w = &c->workers[at];
            const struct td_sim_group *g = &f->groups[i];
            uint64_t tokens = g->kv_tokens ? g->kv_tokens : g->perf.kv_tokens;
            *w = (struct worker){.cluster = c,
                                 .group = g,
                                 .perf = g->perf,
                                 .decode = g->decode,
                                 .index = at,
                                 .slow = g->slow > 0 ? g->slow : 1,
                                 .told_gone = true,
                                 .nic = {.rate = g->nic_bytes_per_s},
                                 .n_blocks = (int32_t)(tokens / (uint64_t)f->block_size)};
            const struct td_scheduler_config sc = {.blocks = &worker_blocks,
                                                   .ctx = w,
                                                   .block_size = f->block_size,
                                                   .max_seqs = g->max_seqs,
                                                   .max_batch = g->max_batch,
                                                   .max_step_tokens = g->max_step_tokens};
            if ((s = td_scheduler_init(&w->sched, &sc, err))) return s;
            w->sched.grows = g->decode;
            w->items = td_sim_grow(NULL, (uint64_t)g->max_batch, sizeof *w->items);
            w->up = true;
            w->changed = true;
            uint32_t m = msg_new(c);
            c->msgs[m] = (struct msg){.kind = M_JOIN, .worker = at, .next = NONE};
            router_take(c, m); /* the fleet stands when the first request comes */
            if (f->snapshot_ns)
                td_sim_heap_push(&c->heap, f->snapshot_ns * (at + 1) / c->n_workers, EV_SNAPSHOT,
                                 at, 0);
        }
    return TD_OK;
}

static void cluster_close(struct cluster *c)
{
    td_port_destroy(c->port);
    for (uint32_t i = 0; i < c->n_workers && c->workers; i++) {
        struct worker *w = &c->workers[i];
        td_sim_cache_free(&w->cache);
        td_scheduler_free(&w->sched);
        free(w->items);
        free(w->mail);
        free(w->nic.flows);
        free(w->added);
        free(w->evicted);
    }
    free(c->workers);
    free(c->slots);
    free(c->free_slots);
    for (uint32_t l = 0; l < c->n_legs; l++) free(c->legs[l]);
    free(c->legs);
    free(c->msgs);
    for (uint32_t i = 0; i < c->heap.n; i++)
        if (c->heap.events[i].kind == EV_LATE) free((void *)(uintptr_t)c->heap.events[i].b);
    td_sim_heap_free(&c->heap);
}

static void summarise(struct cluster *c)
{
    struct td_sim_result *out = c->out;
    uint32_t n_role[2] = {0, 0};
    double busy[2] = {0, 0};
    for (uint32_t i = 0; i < c->n_workers; i++) {
        n_role[c->workers[i].decode]++;
        busy[c->workers[i].decode] += (double)c->workers[i].busy_ns;
    }
    double span = (double)c->last_arrival_ns > 0 ? (double)c->last_arrival_ns : 1;
    out->prefill_busy = n_role[0] ? busy[0] / span / n_role[0] : 0;
    out->decode_busy = n_role[1] ? busy[1] / span / n_role[1] : 0;
    struct td_port_residue r;
    td_port_residue(c->port, c->n_workers, &r);
    out->failovers = r.failovers;
    out->core_steps = r.steps;
    out->n_workers = c->n_workers;
    out->n_events = c->heap.n_pushed;
    out->end_s = (double)c->now / 1e9;
}

td_status td_sim_run(const struct td_sim_config *config, const struct td_sim_trace *trace,
                     void (*progress)(void *ctx, double share), void *ctx,
                     struct td_sim_result *ret_result, struct td_err *err)
{
    *ret_result = (struct td_sim_result){0};
    struct cluster c = {.cfg = config,
                        .trace = trace,
                        .out = ret_result,
                        .noise = td_sim_rng_stream(config->seed, 2),
                        .faults = td_sim_rng_stream(config->seed, 3),
                        .jitter = td_sim_rng_stream(config->seed, 5)};
    ret_result->outcomes = calloc(trace->n, sizeof *ret_result->outcomes);
    if (!ret_result->outcomes) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    ret_result->n = trace->n;
    for (uint32_t i = 0; i < trace->n; i++)
        ret_result->outcomes[i] = (struct td_sim_outcome){.at_ns = trace->requests[i].at_ns,
                                                          .n_prompt = trace->requests[i].n_prompt,
                                                          .n_output = trace->requests[i].n_output,
                                                          .slo_class = trace->requests[i].slo_class,
                                                          .tenant = trace->requests[i].tenant,
                                                          .prefill = NONE,
                                                          .decode = NONE};
    c.last_arrival_ns = trace->requests[trace->n - 1].at_ns;
    td_status s = cluster_open(&c, err);
    if (!s) {
        td_sim_heap_push(&c.heap, trace->requests[0].at_ns, EV_ARRIVAL, 0, 0);
        if (config->tick_ns) td_sim_heap_push(&c.heap, config->tick_ns, EV_TICK, 0, 0);
        for (uint32_t i = 0; i < config->n_faults; i++)
            td_sim_heap_push(&c.heap, ns_of(config->faults[i].at_s), EV_FAULT, i, 0);
        uint64_t deadline = c.last_arrival_ns + ns_of(config->grace_s), quiet_until = 0, n = 0;
        struct td_sim_event e;
        while (td_sim_heap_pop(&c.heap, &e)) {
            if (e.at_ns > deadline && !quiet_until) break;
            c.now = e.at_ns;
            handle(&c, &e);
            if ((++n & 0xffff) == 0 && progress)
                progress(ctx, c.last_arrival_ns ? fmin(1, (double)c.now / (double)c.last_arrival_ns)
                                                : 1);
            if (c.n_done < trace->n) continue;
            if (!config->check) break;
            /* what is on the way arrives */
            if (!quiet_until) quiet_until = c.now + 5000000000ull + 4 * config->rpc_ns;
            if (c.now > quiet_until) break;
        }
        if (config->check && c.n_done == trace->n) check_quiet(&c);
        if (config->check && c.n_done < trace->n)
            violate(&c, "requests without an end", trace->n - c.n_done);
        summarise(&c);
        if (progress) progress(ctx, 1);
    }
    cluster_close(&c);
    if (s) td_sim_result_free(ret_result);
    return s;
}

void td_sim_result_free(struct td_sim_result *r)
{
    free(r->outcomes);
    *r = (struct td_sim_result){0};
}

void td_sim_config_init(struct td_sim_config *c)
{
    *c = (struct td_sim_config){.router = {.mode = "pd",
                                           .policy = "round_robin",
                                           .max_requests = 4096,
                                           .max_queued = 4096,
                                           .hybrid_local_tokens = 64,
                                           .worker_timeout_ms = 2000,
                                           .queue_timeout_ms = 30000,
                                           .stall_ms = 120000,
                                           .max_failovers = 8,
                                           .attainment = 0.9,
                                           .prefix_index = true},
                                .block_size = 16,
                                .prefix_cache = true,
                                .overlap = true,
                                .rpc_ns = 200000,
                                .link_tau_ns = 20000,
                                .snapshot_ns = 20000000,
                                .tick_ns = 50000000,
                                .grace_s = 120,
                                .seed = 1};
}
