/* messages.c - what workers and the router send one another, and the two pools: of messages and of
 * legs.
 *
 * A stream keeps its order and nothing keeps it between two streams. Messages may be lost, doubled
 * or late; a lost message of a stream breaks that stream, as with gRPC. */
#include "sim/cluster_parts.h"

#include <stdlib.h>

/* ---- pools ----------------------------------------------------------------------------------- */

uint32_t sim_msg_new(struct cluster *c)
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

void sim_msg_free(struct cluster *c, uint32_t m)
{
    c->msgs[m].next = c->free_msg_1;
    c->free_msg_1 = m + 1;
}

uint32_t sim_leg_new(struct cluster *c)
{
    uint32_t l;
    if (c->free_leg_1) {
        l = c->free_leg_1 - 1;
        c->free_leg_1 = c->legs[l]->request_next;
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
                               .request_next = NONE,
                               .dest = NONE,
                               .dest_leg = NONE,
                               .flow = {.event_ns = UINT64_MAX}};
    return l;
}

void sim_leg_forget(struct cluster *c, uint32_t l)
{
    struct leg *g = c->legs[l];
    uint32_t *at = &c->requests[g->request_at].legs;
    while (*at != l) at = &c->legs[*at]->request_next;
    *at = g->request_next;
    g->state = LEG_FREE;
    g->gen++;
    g->request_next = c->free_leg_1;
    c->free_leg_1 = l + 1;
}

/* ---- messages -------------------------------------------------------------------------------- */

bool sim_unlucky(struct cluster *c, double share)
{
    return share > 0 && td_random_uniform(&c->faults) < share;
}

uint64_t sim_path_ns(struct cluster *c, uint64_t delay_ns, uint64_t *last_ns)
{
    uint64_t at = c->now + delay_ns + c->cfg->router_delay_ns;
    if (c->cfg->router_loss <= 0) return at - c->now;
    if (td_random_uniform(&c->network) < c->cfg->router_loss) at += SIM_RESEND_NS;
    if (at > *last_ns) *last_ns = at;
    return *last_ns - c->now;
}

void sim_to_router_at(struct cluster *c, uint32_t m, uint64_t delay_ns)
{
    struct worker *w = &c->workers[c->msgs[m].worker];
    delay_ns = sim_path_ns(c, delay_ns, &w->streams[c->msgs[m].router].up_ns);
    td_sim_heap_push(&c->heap, c->now + delay_ns, EV_TO_ROUTER, 0, m);
}
void sim_to_router(struct cluster *c, uint32_t m) { sim_to_router_at(c, m, c->cfg->rpc_ns); }

/* A stream keeps its order; nothing keeps it between two streams. */
uint64_t sim_stream_delay_ns(struct cluster *c, struct leg *g)
{
    if (!c->cfg->rpc_jitter_ns) return c->cfg->rpc_ns;
    uint64_t at = c->now + c->cfg->rpc_ns +
                  (uint64_t)((double)c->cfg->rpc_jitter_ns * td_random_exponential(&c->jitter));
    if (at > g->told_ns) g->told_ns = at;
    return g->told_ns - c->now;
}

uint32_t sim_msg_of_leg(struct cluster *c, enum msg_kind kind, const struct leg *g)
{
    uint32_t m = sim_msg_new(c);
    struct msg *x = &c->msgs[m];
    x->kind = kind;
    x->router = g->router;
    x->request_at = g->request_at;
    x->attempt = g->attempt;
    x->id = g->id;
    x->worker = g->worker;
    return m;
}

void sim_send_end(struct cluster *c, struct leg *g, enum td_code code)
{
    uint32_t m = sim_msg_of_leg(c, g->decode ? M_DECODE_END : M_PREFILL_END, g);
    c->msgs[m].a = code;
    c->msgs[m].b = (uint64_t)g->flow.bytes;
    c->msgs[m].c = g->flow.start_ns ? (c->now - g->flow.start_ns) / 1000 : 0;
    sim_to_router_at(c, m, sim_stream_delay_ns(c, g));
}

void sim_leg_end(struct cluster *c, uint32_t l, enum td_code code)
{
    sim_send_end(c, c->legs[l], code);
    sim_leg_over(c, l);
}

void sim_maybe_again(struct cluster *c, uint32_t m, uint64_t delay_ns)
{
    if (!sim_unlucky(c, c->cfg->duplicate)) return;
    uint32_t again = sim_msg_new(c);
    c->msgs[again] = c->msgs[m];
    c->msgs[again].next = NONE;
    sim_to_router_at(c, again, delay_ns + sim_ns_of(td_random_uniform(&c->faults) * 0.02));
}

bool sim_send_of_leg(struct cluster *c, uint32_t l, uint32_t m)
{
    if (sim_unlucky(c, c->cfg->lose)) {
        sim_msg_free(c, m);
        sim_leg_end(c, l, TD_CODE_UNAVAILABLE);
        return false;
    }
    uint64_t delay_ns = sim_stream_delay_ns(c, c->legs[l]);
    sim_maybe_again(c, m, delay_ns);
    sim_to_router_at(c, m, delay_ns);
    return true;
}

void sim_to_worker_at(struct cluster *c, uint32_t m, uint64_t delay_ns)
{
    c->msgs[m].epoch = c->workers[c->msgs[m].worker].epoch;
    td_sim_heap_push(&c->heap, c->now + delay_ns, EV_TO_WORKER, 0, m);
}
