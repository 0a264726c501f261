/* router_port.c - see router_port.h. */
#include "sim/router_port.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sim/baselines.h"

#define PREFIX_ENTRIES (4u << 20)

struct td_port {
    struct td_core *core;
    struct td_core_action *actions;
    void (*on_action)(void *ctx, const struct td_core_action *action);
    void *ctx;
    FILE *log;
    uint64_t n_steps;
    bool prefix_index;
};

/* Steps of the simulated workers are exact in their coefficients, so these are the best a
 * latency table could say; NULL = unknown, to be learned. */
static struct td_lat_theta theta_of(const struct td_perf *p, double link_tau_s,
                                    double link_bytes_per_s)
{
    if (!p || p->n_prefill_points) return (struct td_lat_theta){.known = false};
    bool measured = p->mixed_a[0] + p->mixed_a[1] > 0;
    return (struct td_lat_theta){.prefill = {p->a[0], p->a[1], p->a[2]},
                                 .decode = {p->b[0], p->b[1], p->b[2],
                                            measured ? p->mixed_a[0] : p->a[1],
                                            measured ? p->mixed_a[1] : p->a[2]},
                                 .link_tau = link_tau_s,
                                 .link_bytes_per_s = link_bytes_per_s,
                                 .known = true};
}

static td_status mode_of(const char *name, enum td_core_mode *ret_mode, struct td_err *err)
{
    static const char *const names[] = {"pd", "colocated", "hybrid"};
    for (int i = 0; i < 3; i++)
        if (!strcmp(name, names[i])) {
            *ret_mode = (enum td_core_mode)i;
            return TD_OK;
        }
    return td_fail(err, TD_ERR_INVALID, "mode is \"%s\", must be pd, colocated or hybrid", name);
}

td_status td_port_create(const struct td_port_config *c,
                         void (*on_action)(void *ctx, const struct td_core_action *action),
                         void *ctx, struct td_port **ret_port, struct td_err *err)
{
    struct td_core_config k = {.policy = c->policy,
                               .policies = td_sim_policies,
                               .max_requests = c->max_requests,
                               .max_queued = c->max_queued,
                               .hybrid_local_tokens = c->hybrid_local_tokens,
                               .worker_timeout_ms = c->worker_timeout_ms,
                               .queue_timeout_ms = c->queue_timeout_ms,
                               .stall_ms = c->stall_ms,
                               .max_failovers = c->max_failovers,
                               .attainment = c->attainment,
                               .seed = c->seed,
                               .max_prefix_entries = c->prefix_index ? PREFIX_ENTRIES : 0,
                               .n_classes = c->n_classes,
                               .n_thetas = c->n_priors};
    memcpy(k.classes, c->classes, sizeof k.classes);
    for (uint32_t i = 0; i < c->n_priors; i++)
        k.thetas[i] = theta_of(c->priors[i], c->link_tau_s, c->link_bytes_per_s);
    td_status s = mode_of(c->mode, &k.mode, err);
    if (s) return s;
    struct td_port *p = calloc(1, sizeof *p);
    if (!p) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    p->on_action = on_action;
    p->ctx = ctx;
    p->log = c->decision_log;
    p->prefix_index = c->prefix_index;
    p->actions = malloc(TD_CORE_MAX_ACTIONS_PER_EVENT * sizeof *p->actions);
    s = p->actions ? td_core_create(&k, &p->core, err)
                   : td_fail(err, TD_ERR_NOMEM, "out of memory");
    if (s) {
        td_port_destroy(p);
        return s;
    }
    if (p->log) {
        char line[TD_CORE_LINE_MAX];
        for (uint32_t i = 0; td_core_config_format(&k, i, line, sizeof line) > 0; i++)
            fputs(line, p->log);
    }
    *ret_port = p;
    return TD_OK;
}

void td_port_destroy(struct td_port *p)
{
    if (!p) return;
    td_core_destroy(p->core);
    free(p->actions);
    free(p);
}

const char *td_port_policies(void) { return TD_SIM_POLICIES; }
bool td_port_wants_blocks(const struct td_port *p) { return p->prefix_index; }

static void step(struct td_port *p, struct td_core_event e)
{
    p->n_steps++;
    size_t n = td_core_step(p->core, &e, p->actions);
    if (p->log) {
        char line[TD_CORE_LINE_MAX];
        td_core_event_format(&e, line, sizeof line);
        fputs(line, p->log);
        for (uint32_t i = 0; td_core_hashes_format(&e, i, line, sizeof line) > 0; i++)
            fputs(line, p->log);
        for (size_t i = 0; i < n; i++) {
            td_core_action_format(&p->actions[i], line, sizeof line);
            fputs(line, p->log);
        }
    }
    for (size_t i = 0; i < n; i++) p->on_action(p->ctx, &p->actions[i]);
}

void td_port_tick(struct td_port *p, uint64_t now)
{
    step(p, (struct td_core_event){.kind = TD_EV_TICK, .now_ns = now});
}

void td_port_join(struct td_port *p, uint64_t now, const struct td_port_worker *w)
{
    step(p, (struct td_core_event){.kind = TD_EV_WORKER_JOIN,
                                   .now_ns = now,
                                   .join = {.worker = w->index,
                                            .role = w->decode ? TD_ROLE_DECODE : TD_ROLE_PREFILL,
                                            .kv_tokens = w->kv_tokens,
                                            .max_seqs = w->max_seqs,
                                            .node_class = w->node_class,
                                            .max_step_tokens = w->max_step_tokens,
                                            .kv_bytes_per_token = (uint64_t)w->kv_bytes_per_token,
                                            .one_token = !w->decode}});
}

void td_port_drain(struct td_port *p, uint64_t now, uint32_t worker)
{
    step(p, (struct td_core_event){
                .kind = TD_EV_WORKER_DRAIN, .now_ns = now, .drain = {.worker = worker}});
}

void td_port_gone(struct td_port *p, uint64_t now, uint32_t worker)
{
    step(p, (struct td_core_event){
                .kind = TD_EV_WORKER_GONE, .now_ns = now, .gone = {.worker = worker}});
}

void td_port_foreign_add(struct td_port_foreign *sum, const struct td_port_foreign *part, int sign)
{
    uint64_t by = (uint64_t)(int64_t)sign; /* modulo 2^64 */
    sum->n_seqs += by * part->n_seqs;
    sum->n_running += by * part->n_running;
    sum->tokens += by * part->tokens;
    sum->queued_tokens += by * part->queued_tokens;
}

void td_port_snapshot(struct td_port *p, uint64_t now, const struct td_port_snapshot *s)
{
    for (uint32_t i = 0; p->prefix_index && i < s->n_evicted; i++)
        step(p,
             (struct td_core_event){.kind = TD_EV_BLOCK_EVICT,
                                    .now_ns = now,
                                    .block_evict = {.worker = s->worker, .hash = s->evicted[i]}});
    for (uint32_t i = 0; p->prefix_index && i < s->n_added; i++)
        step(p, (struct td_core_event){.kind = TD_EV_BLOCK_ADD,
                                       .now_ns = now,
                                       .block_add = {.worker = s->worker, .hash = s->added[i]}});
    for (uint32_t i = 0; i < s->n_steps; i++)
        step(p, (struct td_core_event){.kind = TD_EV_WORKER_STEP,
                                       .now_ns = now,
                                       .step = {.worker = s->worker,
                                                .prefill_tokens = s->steps[i].prefill_rows,
                                                .attention_work = s->steps[i].attention_work,
                                                .decode_seqs = s->steps[i].decode_rows,
                                                .context_tokens = s->steps[i].context_tokens,
                                                .wall_us = s->steps[i].wall_us}});
    if (s->foreign.n_routers > 1)
        step(p, (struct td_core_event){.kind = TD_EV_FOREIGN,
                                       .now_ns = now,
                                       .foreign = {.worker = s->worker,
                                                   .n_routers = s->foreign.n_routers,
                                                   .n_seqs = s->foreign.n_seqs,
                                                   .n_running = s->foreign.n_running,
                                                   .tokens = s->foreign.tokens,
                                                   .queued_tokens = s->foreign.queued_tokens}});
    step(p, (struct td_core_event){.kind = TD_EV_WORKER_SNAPSHOT,
                                   .now_ns = now,
                                   .snapshot = {.worker = s->worker,
                                                .seq = s->seq,
                                                .held_tokens = s->held_tokens,
                                                .queued_tokens = s->queued_tokens,
                                                .n_seqs = s->busy,
                                                .calls_taken = s->calls_taken}});
}

void td_port_arrive(struct td_port *p, uint64_t now, const struct td_port_request *q)
{
    step(p, (struct td_core_event){.kind = TD_EV_REQUEST,
                                   .now_ns = now,
                                   .request = {.request_at = q->request_at,
                                               .id = q->id,
                                               .n_prompt = q->n_prompt,
                                               .max_tokens = q->max_output,
                                               .slo_class = q->slo_class,
                                               .tenant = q->tenant,
                                               .hashes = q->hashes,
                                               .n_hashes = q->n_hashes,
                                               .hash_tokens = q->hash_tokens}});
}

static struct td_attempt attempt_of(const struct td_port_leg *l)
{
    return (struct td_attempt){.request_at = l->request_at, .attempt = l->attempt, .id = l->id};
}

void td_port_ticket(struct td_port *p, uint64_t now, const struct td_port_leg *l,
                    uint64_t cached_tokens)
{
    step(p,
         (struct td_core_event){.kind = TD_EV_TICKET,
                                .now_ns = now,
                                .ticket = {.of = attempt_of(l), .cached_tokens = cached_tokens}});
}

void td_port_first_token(struct td_port *p, uint64_t now, const struct td_port_leg *l, bool last,
                         uint64_t n_tokens, uint64_t cached_tokens)
{
    step(p, (struct td_core_event){.kind = TD_EV_FIRST_TOKEN,
                                   .now_ns = now,
                                   .first_token = {.of = attempt_of(l),
                                                   .last = last,
                                                   .n_tokens = n_tokens,
                                                   .cached_tokens = cached_tokens}});
}

void td_port_token(struct td_port *p, uint64_t now, const struct td_port_leg *l, uint64_t n_tokens,
                   bool last)
{
    step(p, (struct td_core_event){
                .kind = TD_EV_TOKEN,
                .now_ns = now,
                .token = {.of = attempt_of(l), .last = last, .n_tokens = n_tokens}});
}

void td_port_prefill_end(struct td_port *p, uint64_t now, const struct td_port_leg *l,
                         enum td_code code, uint64_t bytes, uint64_t us)
{
    step(p, (struct td_core_event){
                .kind = TD_EV_PREFILL_END,
                .now_ns = now,
                .prefill_end = {
                    .of = attempt_of(l), .code = code, .sent_bytes = bytes, .sent_us = us}});
}

void td_port_decode_end(struct td_port *p, uint64_t now, const struct td_port_leg *l,
                        enum td_code code, bool sender_finished)
{
    step(p, (struct td_core_event){.kind = TD_EV_DECODE_END,
                                   .now_ns = now,
                                   .decode_end = {.of = attempt_of(l),
                                                  .code = code,
                                                  .sender_finished = sender_finished}});
}

void td_port_cancel(struct td_port *p, uint64_t now, uint32_t request_at, uint64_t id)
{
    step(p, (struct td_core_event){.kind = TD_EV_CANCEL,
                                   .now_ns = now,
                                   .cancel = {.request_at = request_at, .id = id}});
}

void td_port_residue(const struct td_port *p, uint32_t n_workers, struct td_port_residue *ret)
{
    struct td_core_stats st;
    td_core_stats(p->core, &st);
    *ret = (struct td_port_residue){.live = st.live,
                                    .queued = st.queued,
                                    .failovers = st.failovers,
                                    .deflected = st.deflected,
                                    .steps = p->n_steps};
    for (uint32_t i = 0; i < n_workers; i++) {
        struct td_core_worker_view v;
        td_core_worker_view(p->core, i, &v);
        ret->assigned += v.assigned;
        ret->assigned_tokens += v.assigned_tokens;
    }
}

/* ---- replay ---------------------------------------------------------------------------------- */

struct replay {
    struct td_core *core;
    struct td_core_reader reader;
    struct td_core_action *actions;
    size_t n_actions, at; /* of the last event; the next one that the log must name */
    uint64_t line_no;
    void (*on_difference)(void *ctx, uint64_t line, const char *logged, const char *ours);
    void *ctx;
};

static td_status differ(struct replay *r, const char *logged, const char *ours, struct td_err *err)
{
    if (r->on_difference) r->on_difference(r->ctx, r->line_no, logged, ours);
    return td_fail(err, TD_ERR_CORRUPT, "line %llu: the log's decision is not the core's",
                   (unsigned long long)r->line_no);
}

/* All actions of the last event were named? */
static td_status event_over(struct replay *r, const char *line, struct td_err *err)
{
    if (r->at == r->n_actions) return TD_OK;
    char ours[TD_CORE_LINE_MAX];
    td_core_action_format(&r->actions[r->at], ours, sizeof ours);
    return differ(r, line, ours, err);
}

static td_status replay_line(struct replay *r, const char *line, uint64_t *n_events,
                             uint64_t *n_actions, struct td_err *err)
{
    char ours[TD_CORE_LINE_MAX];
    enum td_core_read what;
    td_status s = line[0] == 'e' ? event_over(r, line, err) : TD_OK;
    if (!s) s = td_core_read_line(&r->reader, line, &what, err);
    if (s) return s;
    if (what == TD_READ_CONFIG && r->core)
        return td_fail(err, TD_ERR_CORRUPT, "line %llu: a second configuration",
                       (unsigned long long)r->line_no);
    if (what == TD_READ_CONFIG) {
        r->reader.config.policies = td_sim_policies;
        return td_core_create(&r->reader.config, &r->core, err);
    }
    if (what == TD_READ_EVENT) {
        r->n_actions = td_core_step(r->core, &r->reader.event, r->actions);
        r->at = 0;
        ++*n_events;
    }
    if (what != TD_READ_ACTION) return TD_OK;
    if (r->at == r->n_actions) return differ(r, line, "(no further action)", err);
    td_core_action_format(&r->actions[r->at++], ours, sizeof ours);
    ++*n_actions;
    return strcmp(ours, line) ? differ(r, line, ours, err) : TD_OK;
}

td_status td_port_replay(const char *path,
                         void (*on_difference)(void *ctx, uint64_t line, const char *logged,
                                               const char *ours),
                         void *ctx, uint64_t *ret_n_events, uint64_t *ret_n_actions,
                         struct td_err *err)
{
    char line[TD_CORE_LINE_MAX];
    uint64_t hashes[TD_CORE_MAX_HASHES];
    struct replay r = {.on_difference = on_difference, .ctx = ctx, .reader = {.hashes = hashes}};
    *ret_n_events = *ret_n_actions = 0;
    FILE *in = fopen(path, "r");
    if (!in) return td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(errno));
    td_status s = TD_OK;
    if (!(r.actions = malloc(TD_CORE_MAX_ACTIONS_PER_EVENT * sizeof *r.actions)))
        s = td_fail(err, TD_ERR_NOMEM, "out of memory");
    while (!s && fgets(line, sizeof line, in)) {
        r.line_no++;
        if (!strchr(line, '\n'))
            break; /* the writer was killed within this line: it was not
                      carried out */
        if ((s = replay_line(&r, line, ret_n_events, ret_n_actions, err)))
            td_err_prefix(err, "%s", path);
    }
    if (!s && !r.core) s = td_fail(err, TD_ERR_CORRUPT, "%s holds no whole configuration", path);
    free(r.actions);
    td_core_destroy(r.core);
    fclose(in);
    return s;
}
