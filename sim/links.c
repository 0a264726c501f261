/* links.c - transfers between workers: each has one NIC, and a transfer moves at the lesser of
 * its two ends' shares. */
#include "sim/cluster_parts.h"

#include <math.h>

static void flow_settle(struct cluster *c, struct leg *g)
{
    g->flow.left -= g->flow.rate * (double)(c->now - g->flow.settled_ns) / 1e9;
    if (g->flow.left < 0) g->flow.left = 0;
    g->flow.settled_ns = c->now;
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
    g->flow.rate =
        fmin(fmin(share_of(&c->workers[g->worker].nic), share_of(&c->workers[g->dest].nic)), 1e18);
    uint64_t end_ns = c->now + (uint64_t)ceil(g->flow.left / g->flow.rate * 1e9);
    if (end_ns >= g->flow.event_ns) return;
    g->flow.event_ns = end_ns;
    td_sim_heap_push(&c->heap, end_ns, EV_FLOW, l, ((uint64_t)g->gen << 32) | ++g->flow.version);
}

void sim_nic_pace(struct cluster *c, const struct nic *n)
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

void sim_flow_switch(struct cluster *c, uint32_t l, bool on)
{
    struct leg *g = c->legs[l];
    if (g->flow.on == on) return;
    g->flow.on = on;
    struct nic *from = &c->workers[g->worker].nic, *to = &c->workers[g->dest].nic;
    if (on) {
        g->flow.settled_ns = c->now;
        g->flow.rate = 0;
        nic_add(from, l);
        nic_add(to, l);
    } else {
        flow_settle(c, g);
        g->flow.event_ns = UINT64_MAX;
        nic_remove(from, l);
        nic_remove(to, l);
    }
    sim_nic_pace(c, from);
    sim_nic_pace(c, to);
}

static void flow_done(struct cluster *c, uint32_t l)
{
    struct leg *g = c->legs[l];
    uint32_t m = sim_msg_new(c);
    c->msgs[m] = (struct msg){.kind = M_SLOT_READY,
                              .worker = g->dest,
                              .leg = g->dest_leg,
                              .a = g->dest_gen,
                              .next = NONE};
    sim_to_worker_at(c, m, c->cfg->link_tau_ns);
    m = sim_msg_new(c);
    c->msgs[m] =
        (struct msg){.kind = M_OP_DONE, .worker = g->worker, .leg = l, .a = g->gen, .next = NONE};
    sim_to_worker_at(c, m, c->cfg->link_tau_ns);
}

/* KV of all tokens up to `upto` is there to be sent (the last call: everything). */
void sim_flow_submit(struct cluster *c, uint32_t l, int32_t upto, bool final)
{
    struct leg *g = c->legs[l];
    int32_t bs = c->cfg->block_size;
    upto = final ? (upto + bs - 1) / bs * bs : upto / bs * bs;
    if (!final && (!c->cfg->overlap || upto <= g->n_sent)) return;
    if (upto > g->n_sent) {
        double bytes = (double)(upto - g->n_sent) * c->kv_bytes_per_token;
        g->n_sent = upto;
        if (g->flow.on) flow_settle(c, g);
        if (!g->flow.start_ns) g->flow.start_ns = c->now;
        g->flow.left += bytes;
        g->flow.bytes += bytes;
        c->out->transfer_bytes += (uint64_t)bytes;
    }
    g->flow.final = final;
    if (g->flow.left > 0) {
        if (g->flow.on)
            flow_pace(c, l);
        else
            sim_flow_switch(c, l, true);
    } else if (final) {
        flow_done(c, l);
    }
}

void sim_on_flow(struct cluster *c, uint32_t l, uint64_t version)
{
    struct leg *g = c->legs[l];
    if (g->state == LEG_FREE || (((uint64_t)g->gen << 32) | g->flow.version) != version ||
        !g->flow.on || g->flow.event_ns != c->now)
        return;
    flow_settle(c, g);
    g->flow.event_ns = UINT64_MAX;
    if (g->flow.left > g->flow.rate * 1e-9) { /* it became slower on the way; a nanosecond's
                                                 worth is rounding */
        flow_pace(c, l);
        return;
    }
    g->flow.left = 0;
    sim_flow_switch(c, l, false);
    if (g->flow.final) flow_done(c, l);
}
