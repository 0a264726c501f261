/* faults.c - workers that crash, fall silent, become slow, drain, tell late, or lose their link. */
#include "sim/cluster_parts.h"

static void tell_routers(struct cluster *c, enum msg_kind kind, const struct worker *w,
                         uint64_t delay_ns)
{
    for (uint32_t r = 0; r < c->n_routers; r++) {
        uint32_t m = sim_msg_new(c);
        c->msgs[m] = (struct msg){.kind = kind, .router = r, .worker = w->index, .next = NONE};
        sim_to_router_at(c, m, delay_ns);
    }
}

/* All that it held is gone; whoever sends to it or is sent to by it sees its connection break. */
static void worker_dies(struct cluster *c, struct worker *w)
{
    w->up = w->busy = false;
    w->epoch++;
    for (uint32_t i = 0; i < w->n_mail; i++) sim_msg_free(c, w->mail[i]);
    w->n_mail = 0;
    for (uint32_t l = 0; l < c->n_legs; l++) {
        struct leg *g = c->legs[l];
        if (g->state == LEG_FREE) continue;
        if (g->worker == w->index) {
            uint32_t d = g->decode ? NONE : g->dest_leg;
            if (d != NONE && c->legs[d]->gen == g->dest_gen && c->legs[d]->state == LEG_IMPORT &&
                c->legs[d]->worker != w->index && !w->silent)
                sim_leg_end(c, d, TD_CODE_UNAVAILABLE); /* its import fails */
            sim_leg_over(c, l);
        } else if (!g->decode && g->dest == w->index && !w->silent &&
                   (g->state == LEG_SENDING ||
                    (g->sched.list == TD_SCHED_RUNNING && !c->workers[g->worker].busy))) {
            sim_leg_end(c, l,
                        TD_CODE_UNAVAILABLE); /* its push fails; one in a running step finds out
                                                 when it submits: the router cancels it before */
        }
    }
    td_sim_cache_free(&w->cache);
    w->n_anon = w->n_ref = w->n_items = 0;
    w->told.n_steps = w->told.n_added = w->told.n_evicted = 0;
}

static void worker_starts(struct cluster *c, struct worker *w)
{
    w->up = true;
    w->silent = w->draining = false;
    w->told.seq = 0;
    for (uint32_t i = 0; i < c->n_routers; i++) w->streams[i].calls_taken = 0;
    w->told.changed = true;
    tell_routers(c, M_JOIN, w, c->cfg->rpc_ns);
}

void sim_on_fault(struct cluster *c, uint32_t i, bool over)
{
    const struct td_sim_fault *f = &c->cfg->faults[i];
    if (f->worker >= c->n_workers) return;
    struct worker *w = &c->workers[f->worker];
    if (!over && f->until_s > f->at_s)
        td_sim_heap_push(&c->heap, sim_ns_of(f->until_s), EV_FAULT_END, i, 0);
    switch (f->kind) {
    case TD_FAULT_CRASH:
    case TD_FAULT_SILENT:
        if (!over && w->up) {
            w->silent = f->kind == TD_FAULT_SILENT;
            worker_dies(c, w);
            if (!w->silent) tell_routers(c, M_GONE, w, c->cfg->rpc_ns);
        } else if (over && !w->up) {
            /* its old stream ends when it comes back */
            if (w->silent) tell_routers(c, M_GONE, w, 0);
            worker_starts(c, w);
        }
        break;
    case TD_FAULT_SLOW:
        w->slow = over ? (w->group->slow > 0 ? w->group->slow : 1) : w->slow * f->factor;
        break;
    case TD_FAULT_DRAIN:
        if (!over && w->up) {
            w->draining = true;
            tell_routers(c, M_DRAIN, w, c->cfg->rpc_ns);
        } else if (over && w->up) { /* drained, or out of time, and started again */
            tell_routers(c, M_GONE, w, c->cfg->rpc_ns);
            worker_dies(c, w);
            worker_starts(c, w);
        }
        break;
    case TD_FAULT_LATE:
        w->late_s = over ? 0 : f->factor;
        break;
    case TD_FAULT_LINK:
        w->nic.rate = over ? w->group->nic_bytes_per_s : w->nic.rate * f->factor;
        sim_nic_pace(c, &w->nic);
        break;
    }
}
