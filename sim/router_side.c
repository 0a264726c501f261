/* router_side.c - the router's side of every message: clients that arrive and leave, the core's
 * actions, what workers tell it, snapshots. */
#include "sim/cluster_parts.h"

#include <stdlib.h>
#include <string.h>

static void finish(struct cluster *c, uint32_t request_at, enum td_sim_status status,
                   enum td_code code, const char *reason)
{
    struct request_state *s = &c->requests[request_at];
    if (!s->live) {
        sim_violate(c, "ended a second time", s->id);
        return;
    }
    struct td_sim_outcome *o = &c->out->outcomes[s->req];
    if (status == TD_SIM_OK && s->n_tokens != o->n_prompt + o->n_output)
        sim_violate(c, "called complete without its last token", s->id);
    o->status = status;
    o->code = code;
    o->reason = reason;
    o->decided_ns = c->now;
    s->live = false;
    c->free_requests[c->n_free_requests++] = request_at;
    c->n_done++;
}

/* The router's own messages take the way between it and the worker. */
static void post_to_worker(struct cluster *c, uint32_t m, uint64_t delay_ns)
{
    struct worker *w = &c->workers[c->msgs[m].worker];
    sim_to_worker_at(c, m, sim_path_ns(c, delay_ns, &w->streams[c->msgs[m].router].down_ns));
}

static void send_to_worker(struct cluster *c, uint32_t m)
{
    if (sim_unlucky(c, c->cfg->lose)) {
        const struct msg *x = &c->msgs[m];
        if (x->kind != M_CANCEL) { /* the call could not be made, and the router sees it; a lost
                                      cancel is found by the broken stream */
            struct leg refusal = {.decode = x->kind == M_START_DECODE,
                                  .router = x->router,
                                  .request_at = x->request_at,
                                  .attempt = x->attempt,
                                  .id = x->id,
                                  .worker = x->worker};
            sim_send_end(c, &refusal, TD_CODE_UNAVAILABLE);
            sim_msg_free(c, m);
        } else {
            post_to_worker(c, m, c->cfg->rpc_ns + 1000000000ull);
        }
        return;
    }
    post_to_worker(c, m, c->cfg->rpc_ns);
}

static void start_call(struct cluster *c, const struct td_core_action *a, struct request_state *s)
{
    struct td_sim_outcome *o = &c->out->outcomes[s->req];
    bool decode = a->kind == TD_ACT_START_DECODE;
    if (a->start.worker >= c->n_workers) {
        sim_violate(c, "placed on a worker that does not exist", a->id);
        return;
    }
    const struct worker *w = &c->workers[a->start.worker];
    if (w->streams[s->router].told_gone) sim_violate(c, "placed on a worker that is gone", a->id);
    if (w->decode != decode) sim_violate(c, "placed on a worker of the other role", a->id);
    uint32_t m = sim_msg_new(c);
    c->msgs[m] = (struct msg){.kind = decode ? M_START_DECODE : M_START_PREFILL,
                              .router = s->router,
                              .request_at = a->request_at,
                              .attempt = a->attempt,
                              .worker = a->start.worker,
                              .id = a->id,
                              .key = a->start.key,
                              .a = (uint64_t)s->n_tokens,
                              .b = decode ? 0 : s->attempt_cached,
                              .work_us = a->start.work_us,
                              .finish_within_us = a->start.finish_within_us,
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
}

static void cancel_call(struct cluster *c, const struct td_core_action *a, struct request_state *s)
{
    bool decode = a->kind == TD_ACT_CANCEL_DECODE;
    s->call_open[decode] = false;
    uint32_t m = sim_msg_new(c);
    c->msgs[m] = (struct msg){.kind = M_CANCEL,
                              .router = s->router,
                              .request_at = a->request_at,
                              .attempt = s->call_attempt[decode],
                              .worker = s->call_worker[decode],
                              .id = a->id,
                              .flag = decode,
                              .next = NONE};
    s->call_attempt[decode] = UINT32_MAX;
    send_to_worker(c, m);
}

void sim_on_action(void *ctx, const struct td_core_action *a)
{
    struct cluster *c = ctx;
    struct request_state *s = &c->requests[a->request_at];
    if (!s->live || s->id != a->id) { /* after the client's own cancel this is so; at any other
                                         time it is a mistake of the core */
        if (a->kind == TD_ACT_COMPLETE || a->kind == TD_ACT_FAIL)
            sim_violate(c, "ended though it is not live", a->id);
        return;
    }
    switch (a->kind) {
    case TD_ACT_START_DECODE:
    case TD_ACT_START_PREFILL:
        start_call(c, a, s);
        break;
    case TD_ACT_CANCEL_DECODE:
    case TD_ACT_CANCEL_PREFILL:
        cancel_call(c, a, s);
        break;
    case TD_ACT_COMPLETE:
        finish(c, a->request_at, TD_SIM_OK, 0, NULL);
        if (sim_mistake_now(c, TD_SIM_ENDED_TWICE)) finish(c, a->request_at, TD_SIM_OK, 0, NULL);
        break;
    case TD_ACT_FAIL:
        finish(c, a->request_at,
               a->fail.code == TD_CODE_RESOURCE_EXHAUSTED ? TD_SIM_REJECTED : TD_SIM_FAILED,
               a->fail.code, a->fail.reason);
        break;
    }
}

/* The client's stream has n_tokens now. */
static void deliver(struct cluster *c, struct request_state *s, int32_t n_tokens)
{
    struct td_sim_outcome *o = &c->out->outcomes[s->req];
    if (n_tokens <= s->n_tokens) return; /* it has it already */
    /* both sides send the first */
    if (n_tokens > o->n_prompt + 1 && n_tokens < o->n_prompt + o->n_output &&
        sim_mistake_now(c, TD_SIM_SKIPPED_TOKEN))
        return;
    if (n_tokens != s->n_tokens + 1) sim_violate(c, "a token was skipped", s->id);
    s->n_tokens = n_tokens;
    if (!o->first_ns) o->first_ns = c->now;
    if (n_tokens == o->n_prompt + o->n_output) o->end_ns = c->now;
}

/* As router/legs.c: a stream that ends well without the last token did not end well. `mine`: the
 * request, NULL when the leg is not its present one. */
static void take_decode_end(struct cluster *c, const struct msg *x, const struct td_port_leg *leg,
                            const struct request_state *mine)
{
    const struct td_sim_outcome *o = mine ? &c->out->outcomes[mine->req] : NULL;
    bool whole = mine && mine->n_tokens == o->n_prompt + o->n_output;
    if (x->flag && mine && mine->n_tokens == o->n_prompt) c->out->overtaken++;
    bool cut_short = x->a == TD_CODE_OK && mine && !whole;
    td_port_decode_end(c->ports[x->router], c->now, leg,
                       cut_short ? TD_CODE_INTERNAL : (enum td_code)x->a, x->flag);
}

static void take_join(struct cluster *c, struct worker *w, uint32_t router)
{
    struct td_port_worker j = {.index = w->index,
                               .decode = w->decode,
                               .kv_tokens = (uint64_t)w->n_blocks * (uint64_t)c->cfg->block_size,
                               .max_seqs = (uint32_t)w->group->max_seqs,
                               .node_class = (uint32_t)(w->group - c->cfg->groups),
                               .max_step_tokens = (uint32_t)w->group->max_step_tokens,
                               .kv_bytes_per_token = c->kv_bytes_per_token};
    w->streams[router].told_gone = false;
    td_port_join(c->ports[router], c->now, &j);
}

void sim_router_take(struct cluster *c, uint32_t m)
{
    struct msg x = c->msgs[m];
    sim_msg_free(c, m);
    struct td_port_leg leg = {.request_at = x.request_at, .attempt = x.attempt, .id = x.id};
    struct request_state *s = &c->requests[x.request_at];
    struct worker *w = &c->workers[x.worker];
    struct td_port *port = c->ports[x.router];
    /* As router/legs.c: a leg that was cancelled is detached. */
    bool of_decode = x.kind == M_TICKET || x.kind == M_TOKEN || x.kind == M_DECODE_END;
    bool mine = s->live && s->id == x.id && s->call_open[of_decode] &&
                s->call_attempt[of_decode] == x.attempt;
    switch (x.kind) {
    case M_TICKET:
        if (mine) s->attempt_cached = (uint32_t)x.a;
        td_port_ticket(port, c->now, &leg, x.a);
        break;
    case M_FIRST_TOKEN:
        if (mine) {
            c->out->outcomes[s->req].cached_tokens = (int32_t)x.c;
            deliver(c, s, (int32_t)x.a);
        }
        td_port_first_token(port, c->now, &leg, x.b, x.a, x.c);
        break;
    case M_TOKEN:
        if (mine) {
            if (x.a == (uint64_t)c->out->outcomes[s->req].n_prompt + 1 &&
                !c->out->outcomes[s->req].first_ns)
                c->out->outcomes[s->req].cached_tokens = (int32_t)x.c;
            deliver(c, s, (int32_t)x.a);
        }
        td_port_token(port, c->now, &leg, x.a, x.b);
        break;
    case M_PREFILL_END:
        td_port_prefill_end(port, c->now, &leg, (enum td_code)x.a, x.b, x.c);
        break;
    case M_DECODE_END:
        take_decode_end(c, &x, &leg, mine ? s : NULL);
        break;
    case M_GONE:
        w->streams[x.router].told_gone = true;
        if (c->cfg->mistake != TD_SIM_DEAF_ROUTER) td_port_gone(port, c->now, x.worker);
        break;
    case M_JOIN:
        take_join(c, w, x.router);
        break;
    case M_DRAIN:
        td_port_drain(port, c->now, x.worker);
        break;
    default:
        TD_ASSERT(!"a worker's message");
    }
}

void sim_on_arrival(struct cluster *c, uint32_t req)
{
    const struct td_sim_request *asked = &c->trace->requests[req];
    struct td_sim_outcome *o = &c->out->outcomes[req];
    if (++c->next_arrival < c->trace->n)
        td_sim_heap_push(&c->heap, c->trace->requests[c->next_arrival].at_ns, EV_ARRIVAL,
                         c->next_arrival, 0);
    if (c->n_free_requests == 0) {
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
    uint32_t request_at = c->free_requests[--c->n_free_requests];
    uint32_t router =
        c->n_routers > 1 ? (uint32_t)(td_random_uniform(&c->choice) * (double)c->n_routers) : 0;
    uint32_t legs =
        c->requests[request_at].legs; /* of earlier requests: their last words are still on
                                            the way */
    c->requests[request_at] = (struct request_state){.live = true,
                                                     .id = ++c->next_id,
                                                     .router = router,
                                                     .req = req,
                                                     .legs = legs,
                                                     .n_tokens = asked->n_prompt};
    struct td_port_request q = {.request_at = request_at,
                                .slo_class = asked->slo_class,
                                .tenant = asked->tenant,
                                .id = c->next_id,
                                .n_prompt = (uint64_t)asked->n_prompt,
                                .max_output = (uint64_t)(asked->n_output > c->cfg->told_max_tokens
                                                             ? asked->n_output
                                                             : c->cfg->told_max_tokens)};
    int32_t n = c->wants_blocks ? sim_n_hashed(c, req) : 0, every = (n + 511) / 512;
    for (int32_t i = every; i > 0 && i <= n; i += every)
        c->hashes[q.n_hashes++] = sim_block_hash(c, req, i - 1);
    q.hashes = c->hashes;
    q.hash_tokens = (uint32_t)(every * c->cfg->block_size);
    if (sim_unlucky(c, c->cfg->cancel))
        td_sim_heap_push(&c->heap, c->now + sim_ns_of(td_random_uniform(&c->faults) * 5),
                         EV_CLIENT_LEAVES, request_at, c->next_id);
    td_port_arrive(c->ports[router], c->now, &q);
}

void sim_on_client_leaves(struct cluster *c, uint32_t request_at, uint64_t id)
{
    struct request_state *s = &c->requests[request_at];
    if (!s->live || s->id != id) return;
    td_port_cancel(c->ports[s->router], c->now, request_at, id);
    finish(c, request_at, TD_SIM_CANCELLED, TD_CODE_CANCELLED, "the client left");
}

/* A snapshot on its slow way, with its lists. Later ones may overtake it: the core goes by their
 * numbers. */
struct late {
    uint32_t router;
    uint32_t epoch; /* a snapshot comes by its registration's stream: after the next registration
                       there is none from before */
    struct td_port_snapshot s;
    struct td_port_step steps[MAX_STEP_REPORTS];
    uint64_t hashes[]; /* added, then evicted */
};

static void send_late(struct cluster *c, const struct worker *w, uint32_t router,
                      const struct td_port_snapshot *s, uint64_t delay_ns)
{
    struct late *l =
        td_sim_grow(NULL, 1, sizeof *l + (s->n_added + s->n_evicted) * sizeof *l->hashes);
    l->s = *s;
    l->epoch = w->epoch;
    l->router = router;
    if (s->n_steps) memcpy(l->steps, s->steps, s->n_steps * sizeof *l->steps);
    if (s->n_added) memcpy(l->hashes, s->added, s->n_added * sizeof *l->hashes);
    if (s->n_evicted) memcpy(l->hashes + s->n_added, s->evicted, s->n_evicted * sizeof *l->hashes);
    l->s.steps = l->steps;
    l->s.added = l->hashes;
    l->s.evicted = l->hashes + s->n_added;
    td_sim_heap_push(&c->heap, c->now + delay_ns, EV_LATE, w->index, (uint64_t)(uintptr_t)l);
}

void sim_on_late(struct cluster *c, const struct td_sim_event *e)
{
    struct late *l = (struct late *)(uintptr_t)e->b;
    if (!c->workers[e->a].streams[l->router].told_gone && c->workers[e->a].epoch == l->epoch)
        td_port_snapshot(c->ports[l->router], c->now, &l->s);
    free(l);
}

/* What each router is told of the others' requests, as step_loop.c counts them. */
static void count_foreign(const struct cluster *c, const struct worker *w,
                          struct td_port_foreign ret_foreign[TD_SIM_MAX_ROUTERS])
{
    struct td_port_foreign own[TD_SIM_MAX_ROUTERS] = {{0}}, all = {0};
    for (uint32_t l = 0; l < c->n_legs; l++) {
        const struct leg *g = c->legs[l];
        if (g->state == LEG_FREE || g->worker != w->index) continue;
        struct td_port_foreign one = {.n_seqs = 1,
                                      .n_running = g->sched.list == TD_SCHED_RUNNING,
                                      .tokens = (uint64_t)g->sched.n_tokens};
        if (g->sched.list == TD_SCHED_WAITING)
            one.queued_tokens = (uint64_t)g->sched.n_tokens;
        else if (g->sched.list == TD_SCHED_RUNNING && g->sched.phase == TD_SEQ_PREFILL)
            one.queued_tokens = (uint64_t)(g->sched.n_tokens - g->sched.n_computed);
        td_port_foreign_add(&own[g->router], &one, 1);
        td_port_foreign_add(&all, &one, 1);
    }
    for (uint32_t r = 0; r < c->n_routers; r++) {
        ret_foreign[r] = all;
        td_port_foreign_add(&ret_foreign[r], &own[r], -1);
        ret_foreign[r].n_routers = c->n_routers;
    }
}

static void tell_snapshot(struct cluster *c, struct worker *w, struct td_port_snapshot *s)
{
    struct td_port_foreign foreign[TD_SIM_MAX_ROUTERS] = {{0}};
    if (c->n_routers > 1) count_foreign(c, w, foreign);
    uint64_t late_ns = w->late_s > 0 ? sim_ns_of(w->late_s * td_random_exponential(&c->faults)) : 0;
    bool at_once = w->late_s <= 0 && !c->cfg->router_delay_ns && c->cfg->router_loss <= 0;
    for (uint32_t r = 0; r < c->n_routers; r++) {
        if (w->streams[r].told_gone) continue;
        s->calls_taken = w->streams[r].calls_taken;
        s->foreign = foreign[r];
        if (at_once)
            td_port_snapshot(c->ports[r], c->now, s);
        else
            send_late(c, w, r, s, sim_path_ns(c, late_ns, &w->streams[r].told_ns));
    }
}

void sim_on_snapshot(struct cluster *c, struct worker *w)
{
    if (c->cfg->snapshot_ns)
        td_sim_heap_push(&c->heap, c->now + c->cfg->snapshot_ns, EV_SNAPSHOT, w->index, 0);
    bool known = false;
    for (uint32_t r = 0; r < c->n_routers; r++) known |= !w->streams[r].told_gone;
    if (!w->up || w->silent || !known) return;
    /* something new, or a sign of life */
    if (!w->told.changed && c->now - w->told.sent_ns < 200000000ull) return;
    struct td_port_snapshot s = {.worker = w->index,
                                 .seq = ++w->told.seq,
                                 .held_tokens = (uint64_t)(w->n_anon + w->n_ref) *
                                                (uint64_t)c->cfg->block_size,
                                 .queued_tokens = td_scheduler_queued_tokens(&w->sched),
                                 .busy = (uint64_t)(w->sched.n_running + w->sched.n_waiting),
                                 .steps = w->told.steps,
                                 .n_steps = w->told.n_steps,
                                 .added = w->told.added,
                                 .n_added = w->told.n_added,
                                 .evicted = w->told.evicted,
                                 .n_evicted = w->told.n_evicted};
    if (sim_unlucky(c, c->cfg->lose)) return; /* what it told waits for the next */
    tell_snapshot(c, w, &s);
    w->told.sent_ns = c->now;
    w->told.n_steps = w->told.n_added = w->told.n_evicted = 0;
    w->told.changed = false;
}
