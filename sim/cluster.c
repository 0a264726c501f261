/* cluster.c - see cluster.h: a run from its first event to its last.
 *
 * Invariants (checked at the end of a run with `check`): (1) a request ends once; (2) blocks held
 * on a worker are those of its legs, none after the last; (3) no action names a worker of which the
 * router was told that it is gone; (4) tokens reach the client in order, without gap; (5) the
 * core's accounts are empty when nothing is live. */
#include "sim/cluster_parts.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

void sim_violate(struct cluster *c, const char *what, uint64_t id)
{
    if (c->out->n_violations++ == 0)
        snprintf(c->out->violation, sizeof c->out->violation, "at %.6f s, request %llu: %s",
                 (double)c->now / 1e9, (unsigned long long)id, what);
}

bool sim_mistake_now(struct cluster *c, enum td_sim_mistake mistake)
{
    bool is_now = c->cfg->mistake == mistake && !c->mistaken;
    c->mistaken |= is_now;
    return is_now;
}

static void handle(struct cluster *c, const struct td_sim_event *e)
{
    switch ((enum event_kind)e->kind) {
    case EV_ARRIVAL:
        sim_on_arrival(c, e->a);
        break;
    case EV_TO_WORKER:
        sim_on_to_worker(c, (uint32_t)e->b);
        break;
    case EV_TO_ROUTER:
        for (uint32_t m = (uint32_t)e->b, next; m != NONE; m = next) {
            next = c->msgs[m].next;
            sim_router_take(c, m);
        }
        break;
    case EV_STEP_END:
        sim_on_step_end(c, &c->workers[e->a], e->b);
        break;
    case EV_FLOW:
        sim_on_flow(c, e->a, e->b);
        break;
    case EV_SNAPSHOT:
        sim_on_snapshot(c, &c->workers[e->a]);
        break;
    case EV_LATE:
        sim_on_late(c, e);
        break;
    case EV_TICK:
        for (uint32_t i = 0; i < c->n_routers; i++) td_port_tick(c->ports[i], c->now);
        td_sim_heap_push(&c->heap, c->now + c->cfg->tick_ns, EV_TICK, 0, 0);
        break;
    case EV_FAULT:
        sim_on_fault(c, e->a, false);
        break;
    case EV_FAULT_END:
        sim_on_fault(c, e->a, true);
        break;
    case EV_CLIENT_LEAVES:
        sim_on_client_leaves(c, e->a, e->b);
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
        sim_violate(c, what, g->id);
    }
    for (uint32_t i = 0; i < c->n_workers; i++) {
        const struct worker *w = &c->workers[i];
        if (w->n_live || w->sched.n_running || w->sched.n_waiting)
            sim_violate(c, "a worker counts legs that are not there", i);
        if (w->n_anon || w->n_ref) sim_violate(c, "KV blocks are held for nobody", i);
        if (w->nic.n) sim_violate(c, "a transfer runs for nobody", i);
    }
    for (uint32_t i = 0; i < c->n_routers; i++) {
        struct td_port_residue residue;
        td_port_residue(c->ports[i], c->n_workers, &residue);
        if (residue.live || residue.queued)
            sim_violate(c, "the core holds a request that has ended", residue.live);
        if (residue.assigned || residue.assigned_tokens)
            sim_violate(c, "a core's account is not empty", residue.assigned);
    }
}

static uint64_t group_kv_tokens(const struct td_sim_group *g)
{
    return g->kv_tokens ? g->kv_tokens : g->perf.kv_tokens;
}

static td_status check_group(const struct td_sim_config *f, const struct td_sim_group *g,
                             struct td_err *err)
{
    if (g->max_batch < 1 || g->max_step_tokens < 1 || g->max_seqs < 1)
        return td_fail(err, TD_ERR_INVALID,
                       "max_batch, max_step_tokens and max_seqs of a worker must be at least 1");
    if (!group_kv_tokens(g))
        return td_fail(err, TD_ERR_INVALID,
                       "latency %s does not say how many KV tokens a worker holds: give kv_tokens",
                       g->perf.name);
    if (group_kv_tokens(g) / (uint64_t)f->block_size > INT32_MAX / 2)
        return td_fail(err, TD_ERR_LIMIT, "kv_tokens is %llu, limit %llu with blocks of %d",
                       (unsigned long long)group_kv_tokens(g),
                       (unsigned long long)INT32_MAX / 2 * (uint64_t)f->block_size, f->block_size);
    return TD_OK;
}

/* Checks the configuration, and counts its workers and GPUs. */
static td_status check_config(struct cluster *c, struct td_err *err)
{
    const struct td_sim_config *f = c->cfg;
    if (c->n_routers > TD_SIM_MAX_ROUTERS)
        return td_fail(err, TD_ERR_LIMIT, "there are %u routers, limit %d", c->n_routers,
                       TD_SIM_MAX_ROUTERS);
    if (f->block_size < 1)
        return td_fail(err, TD_ERR_INVALID, "block_size is %d, must be at least 1", f->block_size);
    if (f->prefix_cache && c->trace->n_hashes && c->trace->hash_tokens % (uint32_t)f->block_size)
        return td_fail(err, TD_ERR_INVALID,
                       "block_size is %d, must divide the trace's blocks of %u tokens",
                       f->block_size, c->trace->hash_tokens);
    for (uint32_t i = 0; i < f->n_groups; i++) {
        const struct td_sim_group *g = &f->groups[i];
        td_status s = check_group(f, g, err);
        if (s) return s;
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
    return TD_OK;
}

static td_status worker_open(struct cluster *c, struct worker *w, const struct td_sim_group *g,
                             uint32_t index, struct td_err *err)
{
    const struct td_sim_config *f = c->cfg;
    *w = (struct worker){.cluster = c,
                         .group = g,
                         .perf = g->perf,
                         .decode = g->decode,
                         .index = index,
                         .slow = g->slow > 0 ? g->slow : 1,
                         .nic = {.rate = g->nic_bytes_per_s},
                         .n_blocks = (int32_t)(group_kv_tokens(g) / (uint64_t)f->block_size)};
    const struct td_scheduler_config sc = {.blocks = &sim_worker_blocks,
                                           .ctx = w,
                                           .block_size = f->block_size,
                                           .max_seqs = g->max_seqs,
                                           .max_batch = g->max_batch,
                                           .max_step_tokens = g->max_step_tokens};
    td_status s = td_scheduler_init(&w->sched, &sc, err);
    if (s) return s;
    w->sched.grows = g->decode;
    w->items = td_sim_grow(NULL, (uint64_t)g->max_batch, sizeof *w->items);
    for (uint32_t i = 0; i < c->n_routers; i++) w->streams[i].told_gone = true;
    w->up = true;
    w->told.changed = true;
    return TD_OK;
}

static void worker_join(struct cluster *c, uint32_t index)
{
    for (uint32_t i = 0; i < c->n_routers; i++) {
        uint32_t m = sim_msg_new(c);
        c->msgs[m] = (struct msg){.kind = M_JOIN, .router = i, .worker = index, .next = NONE};
        sim_router_take(c, m); /* the fleet stands when the first request comes */
    }
    if (c->cfg->snapshot_ns)
        td_sim_heap_push(&c->heap, c->cfg->snapshot_ns * (index + 1) / c->n_workers, EV_SNAPSHOT,
                         index, 0);
}

static td_status cluster_open(struct cluster *c, struct td_err *err)
{
    const struct td_sim_config *f = c->cfg;
    td_status s = check_config(c, err);
    if (s) return s;
    struct td_port_config router = f->router;
    /* without hashes it would stay empty, and large */
    router.prefix_index = router.prefix_index && f->prefix_cache && c->trace->n_hashes > 0;
    for (uint32_t i = 0; i < c->n_routers; i++) {
        if (i > 0) router.decision_log = f->decision_logs[i];
        router.seed = f->router.seed + i;
        if ((s = td_port_create(&router, sim_on_action, c, &c->ports[i], err))) return s;
    }
    c->wants_blocks = f->prefix_cache && c->trace->n_hashes && td_port_wants_blocks(c->ports[0]);
    uint32_t n = f->router.max_requests;
    c->requests = td_sim_grow(NULL, n, sizeof *c->requests);
    c->free_requests = td_sim_grow(NULL, n, sizeof *c->free_requests);
    for (uint32_t i = 0; i < n; i++) {
        c->requests[i] = (struct request_state){.legs = NONE};
        c->free_requests[i] = n - 1 - i;
    }
    c->n_free_requests = n;
    c->workers = calloc(c->n_workers, sizeof *c->workers);
    if (!c->workers) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    uint32_t at = 0;
    for (uint32_t i = 0; i < f->n_groups; i++)
        for (uint32_t k = 0; k < f->groups[i].count; k++, at++) {
            if ((s = worker_open(c, &c->workers[at], &f->groups[i], at, err))) return s;
            worker_join(c, at);
        }
    return TD_OK;
}

static void cluster_close(struct cluster *c)
{
    for (uint32_t i = 0; i < c->n_routers; i++) td_port_destroy(c->ports[i]);
    for (uint32_t i = 0; i < c->n_workers && c->workers; i++) {
        struct worker *w = &c->workers[i];
        td_sim_cache_free(&w->cache);
        td_scheduler_free(&w->sched);
        free(w->items);
        free(w->mail);
        free(w->nic.flows);
        free(w->told.added);
        free(w->told.evicted);
    }
    free(c->workers);
    free(c->requests);
    free(c->free_requests);
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
    for (uint32_t i = 0; i < c->n_routers; i++) {
        struct td_port_residue residue;
        td_port_residue(c->ports[i], c->n_workers, &residue);
        out->failovers += residue.failovers;
        out->core_steps += residue.steps;
    }
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
                        .noise = td_random_stream(config->seed, 2),
                        .faults = td_random_stream(config->seed, 3),
                        .jitter = td_random_stream(config->seed, 5),
                        .network = td_random_stream(config->seed, 6),
                        .choice = td_random_stream(config->seed, 7),
                        .n_routers = config->n_routers ? config->n_routers : 1};
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
            td_sim_heap_push(&c.heap, sim_ns_of(config->faults[i].at_s), EV_FAULT, i, 0);
        uint64_t deadline = c.last_arrival_ns + sim_ns_of(config->grace_s), quiet_until = 0, n = 0;
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
            if (!quiet_until)
                quiet_until =
                    c.now + 5000000000ull + 4 * config->rpc_ns + 4 * config->router_delay_ns;
            if (c.now > quiet_until) break;
        }
        if (config->check && c.n_done == trace->n) check_quiet(&c);
        if (config->check && c.n_done < trace->n)
            sim_violate(&c, "requests without an end", trace->n - c.n_done);
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
