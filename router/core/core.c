/* core.c - opens and closes the router's core, and hands each event to the function of its kind.
 *
 * Where an event goes: workers.c (join, snapshot, step, drain, gone, blocks), arrival.c (request),
 * leg_events.c (ticket, tokens, ends, stop, cancel), tick.c (time). Each of them changes the state
 * that core_state.h describes, and the functions of lifecycle.c end or requeue requests. When room
 * may have come free, dispatch.c walks the queue at the end of the event.
 *
 * Invariants, which all of these files keep:
 * (1) a request of the table is FREE, or it has exactly one live id, which ends with exactly one
 *     COMPLETE or FAIL, or with the client's own CANCEL;
 * (2) a worker's account equals the legs of live requests on it (account.h);
 * (3) at most one decode leg and one prefill leg of one attempt are open;
 * (4) the queue's order is a function of the requests alone (queue.h): a request that fails over
 *     keeps its place;
 * (5) time never goes back: an event from before the last one counts as that moment. */
#include "router/core/core.h"

#include <math.h>
#include <stdlib.h>

#include "router/core/core_state.h"

static td_status open_parts(struct td_core *c, struct td_err *err)
{
    const struct td_core_config *g = &c->cfg;
    core_rank_classes(c);
    td_load_init(&c->fullness, c->classes.guarded_ttft_s);
    td_status s = td_queue_create(g->max_requests, g->n_classes, c->classes.rank, &c->order, err);
    struct td_lat_config lc = {.attainment = g->attainment, .eta = 0.02, .forgetting = 0.999};
    if (!s) s = td_latency_create(&lc, &c->latency, err);
    for (uint32_t i = 1; !s && i < c->classes.n_ranks; i++)
        td_queue_set_ceiling(c->order, i, c->classes.ceiling[i]);
    if (!s && g->max_prefix_entries)
        s = td_prefix_index_create(TD_CORE_MAX_WORKERS, g->max_prefix_entries, &c->index, err);
    for (uint32_t i = 0; !s && i < g->n_thetas; i++)
        if (g->thetas[i].known) td_latency_set_theta(c->latency, i, &g->thetas[i]);
    return s;
}

td_status td_core_create(const struct td_core_config *config, struct td_core **ret_core,
                         struct td_err *err)
{
    if (config->max_requests < 1 || config->max_requests > TD_CORE_MAX_REQUESTS)
        return td_fail(err, TD_ERR_INVALID, "max_requests is %u, must be 1..%u",
                       config->max_requests, TD_CORE_MAX_REQUESTS);
    const struct td_policy *policies = config->policies ? config->policies : td_policies;
    td_policy_fn policy = td_policy_find(policies, config->policy, err);
    if (!policy) return TD_ERR_INVALID;
    double attainment = config->attainment > 0 ? config->attainment : 0.9;
    if (!(attainment >= 0.5 && attainment <= 0.999))
        return td_fail(err, TD_ERR_INVALID, "attainment is %g, must be 0.5..0.999",
                       config->attainment);
    if (config->n_thetas > TD_CORE_MAX_NODE_CLASSES)
        return td_fail(err, TD_ERR_LIMIT, "latency table: %u node classes, limit %d",
                       config->n_thetas, TD_CORE_MAX_NODE_CLASSES);
    td_status s = core_check_classes(config, err);
    if (s) return s;
    struct td_core *c = calloc(1, sizeof *c);
    if (c) {
        c->requests = calloc(config->max_requests, sizeof *c->requests);
        c->hit_tokens = calloc(TD_CORE_MAX_WORKERS, sizeof *c->hit_tokens);
        c->hash_store =
            config->max_prefix_entries
                ? malloc((size_t)config->max_requests * TD_CORE_MAX_HASHES * sizeof *c->hash_store)
                : NULL;
    }
    if (!c || !c->requests || !c->hit_tokens || (config->max_prefix_entries && !c->hash_store)) {
        td_core_destroy(c);
        return td_fail(err, TD_ERR_NOMEM, "router core: no memory for %u requests",
                       config->max_requests);
    }
    c->cfg = *config;
    c->cfg.attainment = attainment;
    if (c->cfg.n_classes == 0) {
        c->cfg.n_classes = 1;
        c->cfg.classes[0] = (struct td_core_class){.name = "default", .weight = 1};
    }
    c->policy = policy;
    for (uint32_t i = 0; i < TD_CORE_MAX_WORKERS; i++) {
        c->workers[i].scan = &c->scans[i];
        c->workers[i].fullness = &c->fullness;
        c->workers[i].at = i;
    }
    c->random = config->seed;
    if ((s = open_parts(c, err))) {
        td_core_destroy(c);
        return s;
    }
    for (uint32_t i = 0; c->hash_store && i < config->max_requests; i++)
        c->requests[i].hashes = c->hash_store + (size_t)i * TD_CORE_MAX_HASHES;
    *ret_core = c;
    return TD_OK;
}

void td_core_destroy(struct td_core *c)
{
    if (!c) return;
    td_queue_destroy(c->order);
    td_latency_destroy(c->latency);
    td_prefix_index_destroy(c->index);
    free(c->requests);
    free(c->hit_tokens);
    free(c->hash_store);
    free(c);
}

static void take_event(struct td_core *c, const struct td_core_event *e)
{
    switch (e->kind) {
    case TD_EV_TICK:
        core_on_tick(c, &e->tick);
        break;
    case TD_EV_WORKER_JOIN:
        core_on_join(c, &e->join);
        break;
    case TD_EV_WORKER_SNAPSHOT:
        core_on_snapshot(c, &e->snapshot);
        break;
    case TD_EV_WORKER_DRAIN:
        core_on_drain(c, e->drain.worker);
        break;
    case TD_EV_WORKER_GONE:
        core_on_gone(c, e->gone.worker);
        break;
    case TD_EV_WORKER_STEP:
        core_on_step(c, &e->step);
        break;
    case TD_EV_BLOCK_ADD:
        core_on_block_add(c, &e->block_add);
        break;
    case TD_EV_BLOCK_EVICT:
        core_on_block_evict(c, &e->block_evict);
        break;
    case TD_EV_BLOCKS_RESET:
        core_on_blocks_reset(c, e->blocks_reset.worker);
        break;
    case TD_EV_REQUEST:
        core_on_request(c, &e->request);
        break;
    case TD_EV_TICKET:
        core_on_ticket(c, &e->ticket);
        break;
    case TD_EV_FIRST_TOKEN:
        core_on_first_token(c, &e->first_token);
        break;
    case TD_EV_TOKEN:
        core_on_token(c, &e->token);
        break;
    case TD_EV_PREFILL_END:
        core_on_prefill_end(c, &e->prefill_end);
        break;
    case TD_EV_DECODE_END:
        core_on_decode_end(c, &e->decode_end);
        break;
    case TD_EV_STOP:
        core_on_stop(c, &e->stop);
        break;
    case TD_EV_CANCEL:
        core_on_cancel(c, &e->cancel);
        break;
    case TD_EV_FOREIGN:
        core_on_foreign(c, &e->foreign);
        break;
    }
}

size_t td_core_step(struct td_core *c, const struct td_core_event *e,
                    struct td_core_action *ret_actions)
{
    if (e->now_ns > c->now_ns) c->now_ns = e->now_ns; /* (5) */
    c->now_s = (double)c->now_ns * 1e-9;
    c->out = ret_actions;
    c->n_out = 0;
    take_event(c, e);
    if (c->room_changed) core_dispatch(c);
    return c->n_out;
}
