/* worker.c - a simulated worker: takes its mail between steps, runs the engine's scheduler, and
 * lets a step take as long as perf.h says.
 *
 * A leg is one call of the router to a worker:
 *   decode    SCHEDULED, waiting -> IMPORT (ticket sent) -> SCHEDULED, running -> over
 *             local or preempted: SCHEDULED, waiting -> SCHEDULED, running
 *   prefill   SCHEDULED, waiting -> SCHEDULED, running (chunks) -> SENDING -> over
 * Messages to a busy worker wait in its mail until its step ends. */
#include "sim/cluster_parts.h"

#include <math.h>

/* ---- legs ------------------------------------------------------------------------------------ */

static void set_running(struct worker *w, struct leg *g)
{
    td_scheduler_run(&w->sched, &g->sched);
    g->state = LEG_SCHEDULED;
}

/* The leg holds nothing any more and is forgotten. The worker is between steps, or has crashed. */
void sim_leg_over(struct cluster *c, uint32_t l)
{
    struct leg *g = c->legs[l];
    struct worker *w = &c->workers[g->worker];
    if (g->flow.on) sim_flow_switch(c, l, false);
    td_scheduler_detach(&w->sched, &g->sched);
    if (g->decode && sim_mistake_now(c, TD_SIM_LEAKED_LEG)) g->sched.n_blocks = sim_n_shared(c, g);
    td_scheduler_release(&w->sched, &g->sched);
    w->told.changed = true;
    w->n_live--;
    sim_leg_forget(c, l);
}

static uint32_t find_leg(const struct cluster *c, uint32_t request_at, uint64_t id,
                         uint32_t attempt, bool decode)
{
    for (uint32_t l = c->requests[request_at].legs; l != NONE; l = c->legs[l]->request_next)
        if (c->legs[l]->id == id && c->legs[l]->attempt == attempt && c->legs[l]->decode == decode)
            return l;
    return NONE;
}

static void accept(struct cluster *c, struct worker *w, const struct msg *m)
{
    bool decode = m->kind == M_START_DECODE;
    w->streams[m->router].calls_taken++;
    struct leg refusal = {.decode = decode,
                          .router = m->router,
                          .request_at = m->request_at,
                          .attempt = m->attempt,
                          .id = m->id,
                          .worker = w->index};
    if (w->draining) {
        sim_send_end(c, &refusal, TD_CODE_UNAVAILABLE);
        return;
    }
    if (w->n_live >= w->group->max_seqs) {
        sim_send_end(c, &refusal, TD_CODE_RESOURCE_EXHAUSTED);
        return;
    }
    uint32_t dest = NONE;
    if (!decode && !m->flag) {
        dest = find_leg(c, m->request_at, m->id, m->attempt, true);
        if (dest == NONE || c->legs[dest]->state != LEG_IMPORT) { /* the grant's owner is gone */
            sim_send_end(c, &refusal, TD_CODE_UNAVAILABLE);
            return;
        }
    }
    uint32_t l = sim_leg_new(c);
    struct leg *g = c->legs[l];
    const struct request_state *s = &c->requests[m->request_at];
    /* of a START: the request's index */
    const struct td_sim_request *r = &c->trace->requests[m->leg];
    g->decode = decode;
    g->local = m->flag;
    g->router = m->router;
    g->id = m->id;
    g->sched.priority = m->key;
    g->sched.order = m->id;
    g->request_at = m->request_at;
    g->attempt = m->attempt;
    g->worker = w->index;
    g->req = m->leg;
    g->n_total = r->n_prompt + r->n_output;
    g->sched.n_tokens = (int32_t)m->a;
    if (m->finish_within_us) {
        g->sched.work_ns = m->work_us * 1000;
        g->sched.finish_by_ns = m->came_ns + m->finish_within_us * 1000;
    }
    g->n_skip = g->n_sent = (int32_t)m->b;
    if (dest != NONE) {
        g->dest = c->legs[dest]->worker;
        g->dest_leg = dest;
        g->dest_gen = c->legs[dest]->gen;
    }
    g->request_next = s->legs;
    c->requests[m->request_at].legs = l;
    w->n_live++;
    td_scheduler_wait(&w->sched, &g->sched);
    g->state = LEG_SCHEDULED;
    w->told.changed = true;
}

/* On TD_OK the leg is where it goes next; what can never be held is refused. */
static td_status admit(void *ctx, struct td_sched_seq *sched)
{
    struct worker *w = ctx;
    struct cluster *c = w->cluster;
    struct leg *g = sim_leg_of(sched);
    bool import = w->decode && !g->local && sched->n_preemptions == 0;
    td_status s = td_scheduler_admit(&w->sched, sched, import, td_scheduler_headroom(&w->sched));
    /* as decode.c, of requests that say no_wait */
    bool refused = s == TD_ERR_AGAIN && c->n_routers > 1 && w->decode && !sched->n_preemptions;
    if (s == TD_ERR_AGAIN && !refused) return s;
    if (s) {
        c->out->refused_full += refused;
        sim_leg_end(c, g->index, refused ? TD_CODE_RESOURCE_EXHAUSTED : TD_CODE_INVALID_ARGUMENT);
        return TD_ERR_LIMIT;
    }
    c->out->cached_tokens += (uint64_t)sched->n_cached;
    if (import) {
        g->state = LEG_IMPORT;
        uint32_t m = sim_msg_of_leg(c, M_TICKET, g);
        c->msgs[m].a = (uint64_t)sched->n_cached;
        sim_send_of_leg(c, g->index, m);
        return TD_OK;
    }
    set_running(w, g);
    if (!w->decode && !g->local && sched->n_computed > g->n_sent)
        sim_flow_submit(c, g->index, sched->n_computed, false);
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
    if (n_preempted) w->told.changed = true;
    if (w->n_items == 0) return;
    const struct td_perf_batch b = {.prefill_rows = (int64_t)load.prefill_rows,
                                    .decode_rows = (int64_t)load.decode_rows,
                                    .attention_work = (double)load.attention_work_x2 / 2,
                                    .context_tokens = (double)load.context_tokens};
    double s = td_perf_step_s(&w->perf, &b) * w->slow;
    if (c->cfg->step_noise > 0)
        s *= exp(c->cfg->step_noise * td_random_normal(&c->noise) -
                 c->cfg->step_noise * c->cfg->step_noise / 2);
    uint64_t ns = sim_ns_of(s);
    w->busy = true;
    w->step_start_ns = c->now;
    w->step = (struct td_port_step){.prefill_rows = (uint32_t)load.prefill_rows,
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
    uint32_t m = sim_msg_new(c);
    c->msgs[m] = (struct msg){.kind = M_SENDER_FINISHED,
                              .worker = g->dest,
                              .leg = g->dest_leg,
                              .a = g->dest_gen,
                              .next = NONE};
    sim_to_worker_at(c, m, c->cfg->link_tau_ns);
}

/* As decode.c: its stream ends, because of that. */
static void sender_finished(struct cluster *c, uint32_t l, uint32_t gen)
{
    struct leg *g = c->legs[l];
    if (g->gen != gen || g->state != LEG_IMPORT) return; /* cancelled meanwhile */
    uint32_t m = sim_msg_of_leg(c, M_DECODE_END, g);
    c->msgs[m].a = TD_CODE_UNAVAILABLE;
    c->msgs[m].flag = true;
    sim_to_router_at(c, m, sim_stream_delay_ns(c, g));
    sim_leg_over(c, l);
}

/* Streams of one step are told together, one event for many messages, unless each takes its own
 * time. */
static void tell_of_step(struct cluster *c, struct leg *g, uint32_t *head, uint32_t *tail,
                         uint32_t m)
{
    if (c->cfg->rpc_jitter_ns || c->cfg->router_loss > 0)
        sim_to_router_at(c, m, sim_stream_delay_ns(c, g));
    else
        chain(c, head, tail, m);
}

/* One token more of a leg: it is told, and may be the last. */
static void sampled(struct cluster *c, struct worker *w, uint32_t l, uint32_t *head, uint32_t *tail)
{
    struct leg *g = c->legs[l];
    bool last = g->sched.n_tokens >= g->n_total;
    uint32_t m = sim_msg_of_leg(c, w->decode ? M_TOKEN : M_FIRST_TOKEN, g);
    c->msgs[m].a = (uint64_t)g->sched.n_tokens;
    c->msgs[m].b = last;
    c->msgs[m].c = (uint64_t)g->sched.n_cached;
    if (sim_unlucky(c, c->cfg->lose)) {
        sim_msg_free(c, m);
        sim_leg_end(c, l, TD_CODE_UNAVAILABLE);
        return;
    }
    tell_of_step(c, g, head, tail, m);
    sim_maybe_again(c, m, c->cfg->rpc_jitter_ns ? g->told_ns - c->now : c->cfg->rpc_ns);
    if (last) {
        m = sim_msg_of_leg(c, w->decode ? M_DECODE_END : M_PREFILL_END, g);
        c->msgs[m].a = TD_CODE_OK;
        tell_of_step(c, g, head, tail, m);
        tell_finished(c, g);
        sim_leg_over(c, l);
    } else if (!w->decode) {
        td_scheduler_detach(&w->sched, &g->sched);
        g->state = LEG_SENDING;
        sim_flow_submit(c, l, g->sched.n_tokens - 1, true);
    }
}

static void worker_loop(struct cluster *c, struct worker *w);

void sim_on_step_end(struct cluster *c, struct worker *w, uint64_t epoch)
{
    if (!w->up || w->epoch != epoch) return;
    w->busy = false;
    w->told.changed = true;
    w->busy_ns += (c->now < c->last_arrival_ns ? c->now : c->last_arrival_ns) -
                  (w->step_start_ns < c->last_arrival_ns ? w->step_start_ns : c->last_arrival_ns);
    if (w->told.n_steps < MAX_STEP_REPORTS) w->told.steps[w->told.n_steps++] = w->step;
    uint32_t head = NONE, tail = NONE;
    for (int32_t i = 0; i < w->n_items; i++) {
        struct leg *g = sim_leg_of(w->items[i].seq);
        if (td_scheduler_computed(&w->sched, &g->sched, w->items[i].n_new)) {
            td_scheduler_sampled(&g->sched);
            sampled(c, w, g->index, &head, &tail);
        } else if (!w->decode && !g->local) {
            sim_flow_submit(c, g->index, g->sched.n_computed, false);
        }
    }
    w->n_items = 0;
    if (head != NONE) sim_to_router(c, head);
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
    if (head != NONE) sim_to_router(c, head);
}

static void worker_take(struct cluster *c, struct worker *w, uint32_t m)
{
    struct msg x = c->msgs[m];
    sim_msg_free(c, m);
    w->told.changed = true;
    uint32_t l;
    switch (x.kind) {
    case M_START_DECODE:
    case M_START_PREFILL:
        accept(c, w, &x);
        break;
    case M_CANCEL:
        l = find_leg(c, x.request_at, x.id, x.attempt, x.flag);
        if (l != NONE && c->legs[l]->worker == w->index) sim_leg_over(c, l);
        break;
    case M_SLOT_READY:
        slot_ready(c, w, x.leg, (uint32_t)x.a);
        break;
    case M_SENDER_FINISHED:
        sender_finished(c, x.leg, (uint32_t)x.a);
        break;
    case M_OP_DONE:
        if (c->legs[x.leg]->gen == x.a && c->legs[x.leg]->state == LEG_SENDING)
            sim_leg_end(c, x.leg, TD_CODE_OK);
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
    struct td_sched_seq *late;
    while ((late = td_scheduler_late(&w->sched, c->now))) {
        c->out->given_back++;
        sim_leg_end(c, sim_leg_of(late)->index, TD_CODE_OUT_OF_RANGE);
    }
    if (w->sched.n_running > 0) start_step(c, w);
}

void sim_on_to_worker(struct cluster *c, uint32_t m)
{
    struct msg *x = &c->msgs[m];
    struct worker *w = &c->workers[x->worker];
    x->came_ns = c->now;
    if (!w->up || x->epoch != w->epoch) { /* nobody there: a call to it fails, all else is lost */
        if (!w->silent && (x->kind == M_START_DECODE || x->kind == M_START_PREFILL)) {
            struct leg refusal = {.decode = x->kind == M_START_DECODE,
                                  .router = x->router,
                                  .request_at = x->request_at,
                                  .attempt = x->attempt,
                                  .id = x->id,
                                  .worker = x->worker};
            sim_send_end(c, &refusal, TD_CODE_UNAVAILABLE);
        }
        sim_msg_free(c, m);
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
