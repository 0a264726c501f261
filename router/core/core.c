/* core.c - see core.h.
 *
 * Invariants: (1) a slot is FREE, or it has exactly one live id, and ends with exactly one
 * COMPLETE, FAIL, or (the client's own) CANCEL;
 * (2) a worker's account equals the legs of live requests on it (account.h); (3) at most one decode
 *     leg and one prefill leg of one attempt are open;
 * (4) the queue's order is a function of the requests alone (queue.h): one that fails over keeps
 *     its place;
 * (5) time never goes back: an event from before the last one counts as that moment.
 *
 * A request's pair is chosen when it leaves the queue; its prefill leg is planned (account.h)
 * until the ticket comes. */
#include "router/core/core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "router/core/core_state.h"

/* what the order assumes for a request without a TTFT objective */
#define NO_DEADLINE_NS (10000 * NS_PER_MS)
#define STEP_REFRESH_TOKENS 32
#define MAX_RETRY_MS 60000
#define FINISH_WAIT_MS 500 /* see finish() */
/* How long the first token may come behind the word that it was the last. Both left one worker
 * at the same moment, by two ways: one that is so far behind on the busiest machine is lost. */
#define SENDER_WAIT_MS 5000
#define MAX_OBJECTIVE_MS 1e9
/* of the fleet's fullness, for ranks behind others; from there it follows what the others attain */
#define CEILING_START 0.8
#define CEILING_MIN 0.6
#define CEILING_MAX 1.1 /* above 1: none */
/* up with each request of a rank before that was good */
#define CEILING_STEP 0.002
/* up in a second: what is kept for a rank that does not come is given back */
#define CEILING_DRIFT 0.005
/* Of the share of steps that carry a prompt. A sequence feels the mean of some hundred steps: a
 * rate that follows each prompt would take the worker for full after one, and for empty soon after
 * it. */
#define MIX_SHARE_RATE 0.02
/* Over so many arrivals their mean cost is taken: some ten seconds of a busy fleet. */
#define MEAN_COST_REQUESTS 200
/* Of a worker's snapshots: five hours of them at one each 20 ms. A worker that was silent for so
 * long has been lost long ago. */
#define MAX_SEQ_JUMP (1u << 20)
/* Of what workers report: more is an error of theirs, and nothing is learned from it. */
#define MAX_STEP_TOKENS (1u << 20)
#define MAX_KV_BYTES_PER_TOKEN (1u << 30)
#define MAX_REPORTED_US 600000000
#define MAX_SENT_BYTES (1ull << 50)
/* Of how many prefill rows a step with decode rows had: the mean of some five such steps. */
#define MIX_ROWS_RATE 0.2

static td_status check_classes(const struct td_core_config *g, struct td_err *err)
{
    if (g->n_classes > TD_CORE_MAX_CLASSES)
        return td_fail(err, TD_ERR_LIMIT, "slo_class: %u classes, limit %d", g->n_classes,
                       TD_CORE_MAX_CLASSES);
    for (uint32_t i = 0; i < g->n_classes; i++) {
        const struct td_core_class *k = &g->classes[i];
        if (!k->name[0]) return td_fail(err, TD_ERR_INVALID, "slo_class: class %u has no name", i);
        if (!(k->ttft_ms >= 0 && k->ttft_ms <= MAX_OBJECTIVE_MS))
            return td_fail(err, TD_ERR_INVALID,
                           "slo_class %s: ttft is %g ms, must be 0 (none) or up to 1e9", k->name,
                           k->ttft_ms);
        if (!(k->tpot_ms >= 0 && k->tpot_ms <= MAX_OBJECTIVE_MS))
            return td_fail(err, TD_ERR_INVALID,
                           "slo_class %s: tpot is %g ms, must be 0 (none) or up to 1e9", k->name,
                           k->tpot_ms);
        if (!(k->weight > 0 && k->weight <= 1e6))
            return td_fail(err, TD_ERR_INVALID,
                           "slo_class %s: weight is %g, must be above 0 and up to 1e6", k->name,
                           k->weight);
        for (uint32_t j = 0; j < i; j++)
            if (!strcmp(g->classes[j].name, k->name))
                return td_fail(err, TD_ERR_INVALID, "slo_class: %s is given twice", k->name);
    }
    return TD_OK;
}

/* Does class a stand before class b? Equal weights are equal for the router, whatever their
 * order; among them the workers' queues, which go by deadlines, give the tighter TTFT its turn
 * first. */
static bool heavier(const struct td_core_class *a, const struct td_core_class *b)
{
    return a->weight > b->weight;
}
static bool sooner(const struct td_core_class *a, const struct td_core_class *b)
{
    double a_ms = a->ttft_ms > 0 ? a->ttft_ms : INFINITY,
           b_ms = b->ttft_ms > 0 ? b->ttft_ms : INFINITY;
    return heavier(a, b) || (!heavier(b, a) && a_ms < b_ms);
}

/* Places among the different ones before it, so that they have no gaps. */
static uint32_t place_of(const struct td_core_config *g, uint32_t i,
                         bool (*before)(const struct td_core_class *a,
                                        const struct td_core_class *b))
{
    uint32_t place = 0;
    for (uint32_t j = 0; j < g->n_classes; j++) {
        bool counted = false; /* another that is its equal was */
        for (uint32_t k = 0; k < j; k++)
            counted |=
                !before(&g->classes[j], &g->classes[k]) && !before(&g->classes[k], &g->classes[j]);
        place += before(&g->classes[j], &g->classes[i]) && !counted;
    }
    return place;
}

static void rank_classes(struct td_core *c)
{
    c->n_ranks = 1;
    for (uint32_t i = 0; i < c->cfg.n_classes; i++) {
        c->ranks[i] = place_of(&c->cfg, i, heavier);
        c->turns[i] = place_of(&c->cfg, i, sooner);
        if (c->ranks[i] >= c->n_ranks) c->n_ranks = c->ranks[i] + 1;
        c->ceilings[i] = CEILING_START;
        c->guard_tpot_s[i] = INFINITY;
    }
    for (uint32_t i = 0; i < c->cfg.n_classes; i++)
        for (uint32_t rank = c->ranks[i] + 1; rank < c->n_ranks && c->cfg.classes[i].tpot_ms > 0;
             rank++)
            c->guard_tpot_s[rank] = fmin(c->guard_tpot_s[rank], c->cfg.classes[i].tpot_ms * 1e-3);
}

/* A request of a rank met its objectives, or missed them or was refused: those behind it may
 * take more of the fleet, or less. Steps are so that a ceiling would rest half-way between the
 * attainment that is asked for and 1; the drift takes it a little higher. */
static void move_ceilings(struct td_core *c, uint32_t rank, bool good)
{
    if (rank + 1 >= c->n_ranks) return;
    double target = (1 + c->cfg.attainment) / 2,
           by = good ? CEILING_STEP : -CEILING_STEP * target / (1 - target);
    for (uint32_t i = rank + 1; i < c->n_ranks; i++) {
        c->ceilings[i] = fmin(CEILING_MAX, fmax(CEILING_MIN, c->ceilings[i] + by));
        td_queue_set_ceiling(c->order, i, c->ceilings[i]);
    }
}

static td_status open_parts(struct td_core *c, struct td_err *err)
{
    const struct td_core_config *g = &c->cfg;
    const uint32_t *ranks = c->ranks;
    rank_classes(c);
    c->guarded_ttft_s = c->guarded_tpot_s = INFINITY;
    for (uint32_t i = 0; i < g->n_classes; i++) {
        if (ranks[i] == c->n_ranks - 1) continue; /* nobody is behind it */
        if (g->classes[i].ttft_ms > 0)
            c->guarded_ttft_s = fmin(c->guarded_ttft_s, g->classes[i].ttft_ms * 1e-3);
        if (!(g->classes[i].tpot_ms > 0) || g->classes[i].tpot_ms * 1e-3 >= c->guarded_tpot_s)
            continue;
        c->guarded_tpot_s = g->classes[i].tpot_ms * 1e-3;
        c->guarded_tpot_class = i;
    }
    td_load_init(&c->fullness, c->guarded_ttft_s);
    td_status s = td_queue_create(g->max_requests, g->n_classes, ranks, &c->order, err);
    struct td_lat_config lc = {.attainment = g->attainment, .eta = 0.02, .forgetting = 0.999};
    if (!s) s = td_latency_create(&lc, &c->latency, err);
    for (uint32_t i = 1; !s && i < c->n_ranks; i++)
        td_queue_set_ceiling(c->order, i, c->ceilings[i]);
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
    td_policy_fn policy = td_policy_by_name(config->policy);
    if (!policy)
        return td_fail(err, TD_ERR_INVALID, "policy is \"%s\", must be one of %s", config->policy,
                       td_policy_names());
    double attainment = config->attainment > 0 ? config->attainment : 0.9;
    if (!(attainment >= 0.5 && attainment <= 0.999))
        return td_fail(err, TD_ERR_INVALID, "attainment is %g, must be 0.5..0.999",
                       config->attainment);
    if (config->n_thetas > TD_CORE_MAX_NODE_CLASSES)
        return td_fail(err, TD_ERR_LIMIT, "latency table: %u node classes, limit %d",
                       config->n_thetas, TD_CORE_MAX_NODE_CLASSES);
    td_status s = check_classes(config, err);
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

/* ---- actions --------------------------------------------------------------------------------- */

struct td_core_action *core_emit(struct td_core *c, enum td_core_action_kind kind,
                                 const struct request *r)
{
    TD_ASSERT(c->n_out < TD_CORE_MAX_ACTIONS_PER_EVENT);
    struct td_core_action *a = &c->out[c->n_out++];
    *a = (struct td_core_action){.kind = kind,
                                 .slot = (uint32_t)(r - c->requests),
                                 .id = r->id,
                                 .attempt = r->attempt,
                                 .reason = ""};
    return a;
}

/* ---- queue ----------------------------------------------------------------------------------- */

struct td_queue_key core_key_of(const struct td_core *c, const struct request *r)
{
    bool bound = r->ttft_s < INFINITY, started = r->first_ns != 0;
    uint64_t deadline = r->arrived_ns + (started ? 0
                                         : bound ? (uint64_t)(r->ttft_s * 1e9)
                                                 : NO_DEADLINE_NS);
    return (struct td_queue_key){.slo_class = r->slo_class,
                                 .tenant = r->tenant,
                                 .priority = r->priority,
                                 .deadline_ns = deadline,
                                 .id = r->id,
                                 .bound = bound && !started,
                                 .hopeless = bound && !started && c->now_ns > deadline};
}

static void queue_insert(struct td_core *c, struct request *r)
{
    struct td_queue_key key = core_key_of(c, r);
    td_queue_insert(c->order, (uint32_t)(r - c->requests), &key, r->work_s, c->now_ns);
    r->phase = QUEUED;
}

void core_queue_remove(struct td_core *c, struct request *r)
{
    td_queue_remove(c->order, (uint32_t)(r - c->requests));
}

/* ---- legs and their account ------------------------------------------------------------------ */

/* Of the time between a step of one sequence and the guarded TPOT, how much the worker's next
 * step takes. 0 where even that step is too long: there is no room to keep. */
static double step_share(const struct td_core *c, uint32_t worker)
{
    const struct td_core_worker *w = &c->workers[worker];
    if (c->guarded_tpot_s >= INFINITY) return 0;
    double q =
        td_latency_margin(c->latency, TD_LAT_TPOT, c->guarded_tpot_class, TD_LAT_LIMIT_BUCKET);
    double one_s = td_latency_step(c->latency, worker, 1, 0, 0, 0),
           room_s = c->guarded_tpot_s / q - one_s;
    return room_s > 0 ? fmin(1, fmax(0, w->step_s - one_s) / room_s) : 0;
}

/* The decode worker's next step, for the scans of policies. */
void core_refresh_step(struct td_core *c, uint32_t worker)
{
    struct td_core_worker *w = &c->workers[worker];
    if (w->role != TD_ROLE_DECODE) return;
    w->step_s = td_worker_step_s(c->latency, worker, w, w->n_active + w->n_pending + 1.0,
                                 (double)(w->active_tokens + w->reserved_tokens));
    if (c->cfg.n_classes > 1) w->step_share = step_share(c, worker);
    td_account_changed(w);
}

static void shun(struct td_core *c, uint32_t worker)
{
    c->workers[worker].shunned = true;
    td_account_changed(&c->workers[worker]);
}

static void set_state(struct td_core_worker *w, enum td_worker_state state)
{
    w->state = state;
    td_account_changed(w);
}

/* The last request with the tightest objective there went: look for the next. Rare: most
 * requests of a worker share a class. */
static void refresh_min_tpot(struct td_core *c, uint32_t worker)
{
    struct td_core_worker *w = &c->workers[worker];
    w->min_tpot_s = INFINITY;
    w->n_min_tpot = 0;
    for (uint32_t i = 0; i < c->cfg.max_requests; i++) {
        const struct request *r = &c->requests[i];
        if (r->phase == FREE || r->decode.worker != worker || r->decode.tpot_s > w->min_tpot_s)
            continue;
        w->n_min_tpot = r->decode.tpot_s < w->min_tpot_s ? 1 : w->n_min_tpot + 1;
        w->min_tpot_s = r->decode.tpot_s;
    }
}

static void leg_close(struct td_core *c, struct td_leg *leg)
{
    if (leg->worker == TD_NO_WORKER) return;
    uint32_t worker = leg->worker;
    struct td_core_worker *w = &c->workers[worker];
    td_account_close(w, leg, c->now_s);
    c->room_changed = true;
    if (w->role != TD_ROLE_DECODE) return;
    if (w->state == TD_WORKER_SUSPECT)
        return; /* all of its legs end now (worker_lost), and none
                   comes before it is back */
    if (w->assigned > 0 && w->n_min_tpot == 0) refresh_min_tpot(c, worker);
    core_refresh_step(c, worker);
}

static bool prefill_told(const struct request *r)
{
    return r->prefill.worker != TD_NO_WORKER && !r->prefill.planned;
}

static void cancel_legs(struct td_core *c, struct request *r)
{
    if (prefill_told(r)) core_emit(c, TD_ACT_CANCEL_PREFILL, r);
    if (r->decode.worker != TD_NO_WORKER) core_emit(c, TD_ACT_CANCEL_DECODE, r);
    leg_close(c, &r->prefill);
    leg_close(c, &r->decode);
}

static void forget(struct td_core *c, struct request *r)
{
    if (r->phase == QUEUED) core_queue_remove(c, r);
    r->phase = FREE;
    c->n_live--;
}

void core_fail(struct td_core *c, struct request *r, enum td_code code, const char *reason,
               double retry_s)
{
    cancel_legs(c, r);
    struct td_core_action *a = core_emit(c, TD_ACT_FAIL, r);
    a->code = code;
    a->reason = reason;
    double ms = ceil(retry_s * 1000);
    a->retry_ms = code != TD_CODE_RESOURCE_EXHAUSTED ? 0
                  : !(ms >= 1)                       ? 1
                  : ms > MAX_RETRY_MS                ? MAX_RETRY_MS
                                                     : (uint32_t)ms;
    c->stats.failed++;
    c->stats.wasted_prefill_tokens += r->decode_flows ? 0 : r->computed_tokens;
    if (code == TD_CODE_RESOURCE_EXHAUSTED) {
        c->stats.refused++;
        move_ceilings(c, c->ranks[r->slo_class], false);
    }
    forget(c, r);
}

/* What the request's life says about the predictions and the objectives. */
static void learn_from(struct td_core *c, const struct request *r)
{
    uint64_t n_out = r->n_tokens - r->n_prompt;
    td_latency_observe_output(c->latency, r->slo_class,
                              (uint32_t)(n_out > UINT32_MAX ? UINT32_MAX : n_out));
    td_queue_charge(c->order, r->tenant, 2.0 * (double)n_out, c->now_ns);
    if (r->first_ns == 0) return;
    double ttft = (double)(r->first_ns - r->arrived_ns) * 1e-9,
           tpot = n_out > 1 ? (double)(r->last_ns - r->first_ns) * 1e-9 / (double)(n_out - 1) : 0;
    if (n_out > 1 && r->failovers == 0 && r->choice.tpot_s > 0)
        td_latency_observe_ratio(c->latency, TD_LAT_TPOT, r->slo_class, r->choice.tpot_bucket,
                                 r->choice.tpot_s, tpot);
    if (r->ttft_s >= INFINITY && r->tpot_s >= INFINITY) return;
    bool late = ttft > r->ttft_s, slow = tpot > r->tpot_s;
    c->stats.judged++;
    c->stats.missed_ttft += late;
    c->stats.missed_tpot += slow;
    c->stats.good += !late && !slow;
    move_ceilings(c, c->ranks[r->slo_class], !late && !slow);
}

static void complete(struct td_core *c, struct request *r)
{
    /* A prefill leg may still be open (its "done" is on the way): it ends by itself. A decode
       leg that is open has nothing left to say. */
    if (r->decode.worker != TD_NO_WORKER) core_emit(c, TD_ACT_CANCEL_DECODE, r);
    leg_close(c, &r->prefill);
    leg_close(c, &r->decode);
    core_emit(c, TD_ACT_COMPLETE, r);
    c->stats.finished++;
    learn_from(c, r);
    forget(c, r);
}

/* Decode has ended, or the output is complete. On a busy machine its last token can overtake the
 * prefill worker's first-token event, which says what that worker found in its cache and how
 * long it took: the client's last message waits for it, but not for long (on_tick). */
static void finish(struct td_core *c, struct request *r)
{
    if (!r->prefill.pending || !r->decode_flows) {
        complete(c, r);
        return;
    }
    if (r->decode.worker != TD_NO_WORKER) core_emit(c, TD_ACT_CANCEL_DECODE, r);
    leg_close(c, &r->decode);
    r->output_done = true;
    r->finished_ns = c->now_ns;
}

/* Back to the queue as a new attempt; nobody is blamed (a worker was merely full). The clock of
 * queue_timeout_ms starts again with `waits_anew`: a request that workers send back again and
 * again has been waiting all the time. */
static void requeue(struct td_core *c, struct request *r, bool waits_anew)
{
    cancel_legs(c, r);
    c->stats.wasted_prefill_tokens += r->computed_tokens;
    r->computed_tokens = 0;
    r->attempt++;
    r->decode_flows = r->sender_finished = false;
    if (waits_anew) r->queued_ns = c->now_ns;
    queue_insert(c, r);
}

static void fail_over(struct td_core *c, struct request *r, const char *reason)
{
    if (r->output_done) { /* only the times of the last leg are lost */
        complete(c, r);
        return;
    }
    if (r->failovers >= c->cfg.max_failovers) {
        core_fail(c, r, TD_CODE_UNAVAILABLE, reason, 0);
        return;
    }
    r->failovers++;
    c->stats.failovers++;
    requeue(c, r, true);
}

/* ---- workers --------------------------------------------------------------------------------- */

/* Moves every request off a worker that cannot be counted on. */
static void worker_lost(struct td_core *c, uint32_t worker, const char *reason)
{
    for (uint32_t i = 0; i < c->cfg.max_requests; i++) {
        struct request *r = &c->requests[i];
        if (r->phase == FREE || r->phase == QUEUED) continue;
        bool on_decode = r->decode.worker == worker, on_prefill = r->prefill.worker == worker;
        if (on_prefill && (r->prefill.planned || r->decode_flows)) {
            /* it was not told yet: another is found with the ticket; or its work is done */
            if (prefill_told(r)) core_emit(c, TD_ACT_CANCEL_PREFILL, r);
            leg_close(c, &r->prefill);
            on_prefill = false;
            if (r->finished_ns) complete(c, r);
        }
        if (on_decode || on_prefill) fail_over(c, r, reason);
    }
}

static struct td_core_worker *known_worker(struct td_core *c, uint32_t worker)
{
    if (worker >= TD_CORE_MAX_WORKERS || c->workers[worker].state == TD_WORKER_ABSENT) return NULL;
    return &c->workers[worker];
}

static void roster_remove(struct td_core *c, uint32_t worker)
{
    for (int role = 0; role < 2; role++)
        for (uint32_t i = 0; i < c->n_by_role[role]; i++)
            if (c->by_role[role][i] == worker) {
                memmove(&c->by_role[role][i], &c->by_role[role][i + 1],
                        (c->n_by_role[role] - i - 1) * sizeof c->by_role[role][0]);
                c->n_by_role[role]--;
                break;
            }
}

/* by index, so that round robin has an order */
static void roster_insert(struct td_core *c, uint32_t worker, enum td_core_role role)
{
    uint32_t i = c->n_by_role[role]++;
    for (; i > 0 && c->by_role[role][i - 1] > worker; i--)
        c->by_role[role][i] = c->by_role[role][i - 1];
    c->by_role[role][i] = worker;
}

static void on_gone(struct td_core *c, uint32_t worker)
{
    if (!known_worker(c, worker)) return;
    roster_remove(c, worker);
    set_state(&c->workers[worker], TD_WORKER_SUSPECT); /* nothing is placed there while its
                                                          requests move */
    worker_lost(c, worker, "the worker left");
    set_state(&c->workers[worker], TD_WORKER_ABSENT);
    if (c->index) td_prefix_index_reset(c->index, worker);
}

static void on_join(struct td_core *c, const struct td_ev_join *e)
{
    if (e->worker >= TD_CORE_MAX_WORKERS || e->role > TD_ROLE_DECODE) return;
    if (e->kv_tokens == 0 || e->kv_tokens > TD_CORE_MAX_TOKENS) return;
    if (e->max_seqs == 0 || e->max_seqs > TD_CORE_MAX_SEQS) return;
    on_gone(c, e->worker); /* a former holder of this index that nobody saw leave */
    struct td_ev_join join = *e;
    if (join.node_class >= TD_CORE_MAX_NODE_CLASSES) join.node_class = TD_CORE_MAX_NODE_CLASSES - 1;
    if (join.max_step_tokens > MAX_STEP_TOKENS) join.max_step_tokens = MAX_STEP_TOKENS;
    if (join.kv_bytes_per_token > MAX_KV_BYTES_PER_TOKEN)
        join.kv_bytes_per_token = MAX_KV_BYTES_PER_TOKEN;
    td_account_join(&c->workers[e->worker], &join, c->now_ns);
    td_latency_node_join(c->latency, e->worker, (uint32_t)join.node_class);
    roster_insert(c, e->worker, e->role);
    if (e->worker >= c->n_workers) c->n_workers = e->worker + 1;
    core_refresh_step(c, e->worker);
    c->room_changed = true;
}

static void on_snapshot(struct td_core *c, const struct td_ev_snapshot *e)
{
    struct td_core_worker *w = known_worker(c, e->worker);
    if (!w || e->seq <= w->snapshot_seq) return; /* an old one */
    /* A sequence number this far ahead would make every later snapshot look old: drop it. */
    if (e->seq - w->snapshot_seq > MAX_SEQ_JUMP) return;
    /* its margins are what they were */
    if (td_worker_doubt(w, c->now_s) > 1) c->room_changed = true;
    td_account_snapshot(w, e, c->now_s);
    w->snapshot_ns = c->now_ns;
    if (w->shunned || w->state == TD_WORKER_SUSPECT) c->room_changed = true;
    w->shunned = false;
    set_state(w, w->state != TD_WORKER_SUSPECT ? w->state
                 : w->draining                 ? TD_WORKER_DRAINING
                                               : TD_WORKER_READY);
}

/* Larger numbers than any step has. */
static bool absurd(const struct td_ev_step *e)
{
    return e->wall_us == 0 || e->wall_us > MAX_REPORTED_US || e->prefill_tokens > MAX_STEP_TOKENS ||
           e->decode_seqs > TD_CORE_MAX_SEQS || e->attention_work > 1ull << 50 ||
           e->context_tokens > 1ull << 40;
}

static void on_step(struct td_core *c, const struct td_ev_step *e)
{
    struct td_core_worker *w = known_worker(c, e->worker);
    if (!w || absurd(e)) return;
    struct td_lat_step s = {.prefill_tokens = (uint32_t)e->prefill_tokens,
                            .decode_seqs = (uint32_t)e->decode_seqs,
                            .wall_us = (uint32_t)e->wall_us,
                            .attention_work = e->attention_work,
                            .context_tokens = e->context_tokens};
    td_latency_observe_step(c->latency, e->worker, &s);
    w->busy_us += e->wall_us;
    if (e->decode_seqs) { /* prefill steps without decode rows disturb nobody */
        w->mix_share += MIX_SHARE_RATE * ((e->prefill_tokens ? 1 : 0) - w->mix_share);
        if (e->prefill_tokens)
            w->mix_rows += MIX_ROWS_RATE * ((double)e->prefill_tokens - w->mix_rows);
    }
    w->correction = td_latency_correction(c->latency, e->worker);
    td_account_changed(w);
    if (e->decode_seqs) core_refresh_step(c, e->worker);
}

/* ---- requests -------------------------------------------------------------------------------- */

static double objective_s(uint64_t own_us, double class_ms)
{
    double ms = own_us ? (double)own_us * 1e-3 : class_ms;
    return ms > 0 ? fmin(ms, MAX_OBJECTIVE_MS) * 1e-3 : INFINITY;
}

static void count_arrival(struct td_core *c)
{
    double dt = c->now_s - c->rate_s, keep = exp2(-dt / 5.0); /* half-life 5 s */
    /* the area under one arrival is one */
    c->stats.arrival_rate = c->stats.arrival_rate * keep + M_LN2 / 5.0;
    c->rate_s = c->now_s;
}

/* What the request adds to a decode worker's steps, and the mean of that over recent arrivals. */
static void count_cost(struct td_core *c, struct request *r, double n_out)
{
    if (c->n_by_role[TD_ROLE_DECODE] == 0) return;
    uint32_t at = c->by_role[TD_ROLE_DECODE][0];
    double context = (double)r->n_tokens + n_out / 2;
    double with_s = td_latency_step(c->latency, at, 2, context, 0, 0);
    double without_s = td_latency_step(c->latency, at, 1, 0, 0, 0);
    r->decode_cost_s = n_out * fmax(0, with_s - without_s);
    if (c->n_costs < MEAN_COST_REQUESTS) c->n_costs++;
    c->mean_cost_s += (r->decode_cost_s - c->mean_cost_s) / c->n_costs;
}

/* Fills the request's slot from the event; what is out of range is clamped. */
static void take_in(struct td_core *c, struct request *r, const struct td_ev_request *e,
                    uint32_t slo_class)
{
    const struct td_core_class *k = &c->cfg.classes[slo_class];
    uint64_t max_tokens = e->max_tokens < 1 ? 1 : e->max_tokens;
    *r = (struct request){.id = e->id,
                          .n_prompt = e->n_prompt,
                          .n_tokens = e->n_prompt,
                          .max_tokens =
                              max_tokens < TD_CORE_MAX_TOKENS ? max_tokens : TD_CORE_MAX_TOKENS,
                          .slo_class = slo_class,
                          .tenant = e->tenant,
                          .ttft_s = objective_s(e->ttft_us, k->ttft_ms),
                          .tpot_s = objective_s(e->tpot_us, k->tpot_ms),
                          .priority = e->priority < -100  ? -100
                                      : e->priority > 100 ? 100
                                                          : e->priority,
                          .arrived_ns = c->now_ns,
                          .moved_ns = c->now_ns,
                          .queued_ns = c->now_ns,
                          .prefill = {.worker = TD_NO_WORKER},
                          .decode = {.worker = TD_NO_WORKER},
                          .hashes = r->hashes,
                          .hash_tokens = e->hash_tokens};
    if (!r->hashes || e->hash_tokens == 0) return;
    r->n_hashes = e->n_hashes < TD_CORE_MAX_HASHES ? e->n_hashes : TD_CORE_MAX_HASHES;
    if ((uint64_t)r->n_hashes * r->hash_tokens > r->n_prompt)
        r->n_hashes = (uint32_t)(r->n_prompt / r->hash_tokens);
    memcpy(r->hashes, e->hashes, r->n_hashes * sizeof *r->hashes);
}

static void on_request(struct td_core *c, const struct td_ev_request *e)
{
    if (e->slot >= c->cfg.max_requests || c->requests[e->slot].phase != FREE) return;
    if (e->n_prompt == 0 || e->n_prompt > TD_CORE_MAX_TOKENS) return;
    struct request *r = &c->requests[e->slot];
    uint32_t slo_class = e->slo_class < c->cfg.n_classes ? (uint32_t)e->slo_class : 0;
    const struct td_core_class *k = &c->cfg.classes[slo_class];
    take_in(c, r, e, slo_class);
    c->n_live++;
    count_arrival(c);
    c->asked_ns[c->ranks[slo_class]] = c->now_ns > 0 ? c->now_ns : 1;
    td_queue_ask(c->order, r->tenant, (e->tenant_weight ? e->tenant_weight : 1000) * 1e-3,
                 c->now_ns);
    uint32_t n_p = c->n_by_role[TD_ROLE_PREFILL], any = n_p ? c->by_role[TD_ROLE_PREFILL][0]
                                                        : c->n_by_role[TD_ROLE_DECODE]
                                                            ? c->by_role[TD_ROLE_DECODE][0]
                                                            : 0;
    r->work_s =
        td_latency_prefill(c->latency, any, r->n_tokens, 0, c->workers[any].max_step_tokens);
    double n_out = td_latency_output(c->latency, slo_class, 0.5, r->max_tokens);
    td_scaling_arrival(
        &c->advice, c->now_s, r->work_s,
        td_latency_transfer(c->latency, c->workers[any].node_class, 0,
                            (double)(r->n_tokens * c->workers[any].kv_bytes_per_token)),
        n_out, (double)r->n_tokens + n_out / 2, r->tpot_s);
    count_cost(c, r, n_out);
    queue_insert(c, r);
    /* With others waiting it takes its place behind them (dispatch goes by order); refused at
     * once when even so its objective is out of reach. Who is below its share goes before those
     * who are above theirs: what waits says little of when its turn comes. */
    bool behind = !td_queue_below_share(c->order, r->tenant, c->now_ns);
    if (behind && td_queue_n(c->order) > 1 && c->policy == td_policy_goodput &&
        r->ttft_s < INFINITY) {
        uint32_t n_d = c->n_by_role[TD_ROLE_DECODE];
        double ahead = fmax(0, td_queue_work_s(c->order, slo_class) - r->work_s) / (n_p   ? n_p
                                                                                    : n_d ? n_d
                                                                                          : 1);
        if (ahead > r->ttft_s && !k->best_effort) {
            core_fail(c, r, TD_CODE_RESOURCE_EXHAUSTED, "the TTFT objective cannot be met now",
                      ahead - r->ttft_s);
            return;
        }
    }
    core_dispatch(c); /* max_queued bounds those who wait, not those who can be placed at once */
    if (r->phase == QUEUED && r->id == e->id && td_queue_n(c->order) > c->cfg.max_queued)
        core_fail(c, r, TD_CODE_RESOURCE_EXHAUSTED, "the router's queue is full", 1);
}

/* The live request of this id in this slot; NULL when that request has ended. */
static struct request *live(struct td_core *c, uint32_t slot, uint64_t id)
{
    if (slot >= c->cfg.max_requests) return NULL;
    struct request *r = &c->requests[slot];
    return r->phase == FREE || r->id != id ? NULL : r;
}

/* The live request whose current attempt this is, which has moved now; NULL when it is an old
 * one. */
static struct request *current(struct td_core *c, const struct td_attempt *of)
{
    struct request *r = live(c, of->slot, of->id);
    if (!r || r->attempt != of->attempt || r->phase == QUEUED) return NULL;
    r->moved_ns = c->now_ns;
    return r;
}

void core_prefill_tell(struct td_core *c, struct request *r)
{
    struct td_core_worker *w = &c->workers[r->prefill.worker];
    td_account_prefill_tell(w, &r->prefill);
    r->told_ns = c->now_ns;
    r->next = w->n_told == 1;
}

static void on_ticket(struct td_core *c, const struct td_ev_ticket *e)
{
    struct request *r = current(c, &e->of);
    if (!r || r->phase != RESERVING) return;
    struct td_policy_view v = core_view_of(c);
    uint32_t planned = r->prefill.worker;
    /* The planned one may have left, failed or drained meanwhile; that it is full now is counted
       already. */
    bool keep = planned != TD_NO_WORKER && c->workers[planned].state == TD_WORKER_READY &&
                !c->workers[planned].shunned;
    if (!keep) {
        leg_close(c, &r->prefill);
        uint32_t p = td_policy_prefill_again(&v, r->n_tokens + 1);
        if (p == TD_NO_WORKER) {
            requeue(c, r, false); /* give the reservation back, wait in the queue */
            return;
        }
        double work_s =
            td_latency_prefill(c->latency, p, r->n_tokens, 0, c->workers[p].max_step_tokens);
        td_account_prefill_open(&c->workers[p], &r->prefill, p, c->turns[r->slo_class], r->n_tokens,
                                work_s, c->now_s);
        r->choice.ttft_s = 0; /* it was predicted of another: nothing is learned from it */
    }
    td_stage_learn(&c->workers[r->decode.worker].reserve,
                   (double)(c->now_ns - r->placed_ns) * 1e-9);
    r->phase = PREFILLING;
    core_prefill_tell(c, r);
    struct td_queue_key key = core_key_of(c, r);
    struct td_core_action *a = core_emit(c, TD_ACT_START_PREFILL, r);
    a->worker = r->prefill.worker;
    a->key = td_queue_wire_key(c->order, &key);
}

/* The client's first token, by whichever leg. */
static void first_seen(struct td_core *c, struct request *r)
{
    if (r->first_ns) return;
    r->first_ns = c->now_ns;
    if (r->choice.ttft_s > 0 && r->failovers == 0)
        td_latency_observe_ratio(c->latency, TD_LAT_TTFT, r->slo_class, r->choice.ttft_bucket,
                                 r->choice.ttft_s, (double)(c->now_ns - r->placed_ns) * 1e-9);
}

static void grow(struct td_core *c, struct request *r, uint64_t n_tokens)
{
    if (n_tokens <= r->n_tokens || n_tokens > TD_CORE_MAX_TOKENS) return;
    uint32_t worker = r->decode.worker;
    if (worker != TD_NO_WORKER) {
        td_account_decode_grow(&c->workers[worker], &r->decode, n_tokens - r->n_tokens);
        if (n_tokens / STEP_REFRESH_TOKENS != r->n_tokens / STEP_REFRESH_TOKENS)
            core_refresh_step(c, worker);
    }
    r->n_tokens = n_tokens;
    r->last_ns = c->now_ns;
}

static void on_first_token(struct td_core *c, const struct td_ev_first_token *e)
{
    struct request *r = current(c, &e->of);
    if (!r || r->phase == RESERVING) return;
    if (r->phase == PREFILLING) r->phase = DECODING;
    if (r->prefill.pending) { /* the computing is over: the account lets go of its tokens, the
                                 leg stays for the hand-over */
        r->computed_tokens = r->prefill.tokens;
        if (r->next && r->choice.ttft_s > 0 && r->choice.hit_tokens == e->cached_tokens)
            td_stage_learn(&c->start,
                           (double)(c->now_ns - r->told_ns) * 1e-9 - r->choice.prefill_s);
        td_account_prefill_done(&c->workers[r->prefill.worker], &r->prefill, c->now_s);
        c->stats.real_hit_tokens += e->cached_tokens < r->n_tokens ? e->cached_tokens : 0;
        c->room_changed = true;
    }
    grow(c, r, e->n_tokens);
    first_seen(c, r);
    if (e->last || r->finished_ns) complete(c, r);
}

static void on_token(struct td_core *c, const struct td_ev_token *e)
{
    struct request *r = current(c, &e->of);
    /* before its prefill was even told, or of a leg that has ended: not of this world */
    if (!r || r->phase == RESERVING || r->decode.worker == TD_NO_WORKER) return;
    r->decode_flows = true;
    r->phase = DECODING;
    if (e->last) r->output_done = true;
    if (r->decode.worker != TD_NO_WORKER && r->decode.pending) {
        td_account_decode_active(&c->workers[r->decode.worker], &r->decode);
        if (r->choice.local) {
            c->room_changed = true;
            td_stage_learn(&c->workers[r->decode.worker].start,
                           (double)(c->now_ns - r->placed_ns) * 1e-9 - r->choice.prefill_s);
        }
    }
    grow(c, r, e->n_tokens);
    first_seen(c, r);
}

/* A leg ended with this code: whose fault was it? */
static void leg_failed(struct td_core *c, struct request *r, uint32_t worker, enum td_code code,
                       const char *what)
{
    if (r->output_done) {
        complete(c, r);
        return;
    }
    switch (code) {
    case TD_CODE_INVALID_ARGUMENT:
    case TD_CODE_NOT_FOUND:
    case TD_CODE_OUT_OF_RANGE:
    case TD_CODE_UNIMPLEMENTED: /* the router has checked the request: it may be this worker that
                                   is too small, too old or mistaken. One second opinion */
        if (r->refused) {
            core_fail(c, r, code, what, 0);
            return;
        }
        r->refused = true;
        shun(c, worker);
        /* the prefill worker refused: perhaps the grant */
        if (r->decode.worker != TD_NO_WORKER) shun(c, r->decode.worker);
        fail_over(c, r, what);
        return;
    case TD_CODE_RESOURCE_EXHAUSTED:
        shun(c, worker);
        requeue(c, r, false);
        return;
    /* the client's own: the worker did no wrong */
    case TD_CODE_DEADLINE_EXCEEDED:
        core_fail(c, r, code, "the request's deadline has passed", 0);
        return;
    default: /* perhaps it is dead and its stream does not know yet: do not spend the failovers
                on it */
        shun(c, worker);
        fail_over(c, r, what);
        return;
    }
}

/* The link's speed shows in a transfer that had it for itself and did not wait for later chunks
 * to be computed. Any other was no faster than the link: it says something only where it took
 * less time than the link is thought to need. */
static void learn_link(struct td_core *c, const struct request *r,
                       const struct td_ev_prefill_end *e)
{
    const struct td_core_worker *w = &c->workers[r->prefill.worker];
    if (e->code != TD_CODE_OK || e->sent_bytes == 0 || e->sent_us == 0) return;
    if (e->sent_bytes >= MAX_SENT_BYTES || e->sent_us >= MAX_REPORTED_US) return;
    bool in_one_step = w->max_step_tokens == 0 || r->computed_tokens <= w->max_step_tokens;
    bool alone = !w->crowded && w->n_chunked == 0 && in_one_step;
    double thought_s = td_latency_transfer(c->latency, w->node_class, 0, (double)e->sent_bytes);
    if (alone || thought_s <= 0 || (double)e->sent_us * 1e-6 < thought_s)
        td_latency_observe_transfer(c->latency, w->node_class, e->sent_bytes, e->sent_us);
}

static void on_prefill_end(struct td_core *c, const struct td_ev_prefill_end *e)
{
    struct request *r = current(c, &e->of);
    if (!r || !prefill_told(r)) return;
    uint32_t worker = r->prefill.worker;
    if (e->code == TD_CODE_UNAVAILABLE) td_account_call_failed(&c->workers[worker], &r->prefill);
    learn_link(c, r, e);
    leg_close(c, &r->prefill);
    if (r->finished_ns) {
        complete(c, r);
        return;
    }
    bool decodes = r->decode.worker != TD_NO_WORKER;
    /* delivered */
    if (decodes && (r->decode_flows || (e->code == TD_CODE_OK && r->phase != PREFILLING))) return;
    leg_failed(c, r, worker, e->code,
               e->code == TD_CODE_OK ? "the prefill worker ended without a first token"
                                     : "the prefill worker failed");
}

static void on_decode_end(struct td_core *c, const struct td_ev_decode_end *e)
{
    struct request *r = current(c, &e->of);
    if (!r || r->decode.worker == TD_NO_WORKER) return;
    uint32_t worker = r->decode.worker;
    if (e->code == TD_CODE_UNAVAILABLE && !e->sender_finished)
        td_account_call_failed(&c->workers[worker], &r->decode);
    if (r->prefill.planned)
        leg_close(c, &r->prefill); /* no ticket was seen: the prefill worker
                                      was never told */
    leg_close(c, &r->decode);
    if (e->sender_finished && e->code != TD_CODE_OK && r->prefill.pending && !r->decode_flows) {
        /* The first token is on its way and was the last; on_tick bounds the wait. */
        r->sender_finished = true;
        return;
    }
    if (e->code == TD_CODE_OK)
        finish(c, r);
    else
        leg_failed(c, r, worker, e->code, "the decode worker failed");
}

static void update_utilisation(struct td_core *c)
{
    double dt = c->now_s - c->utilisation_s, keep = exp2(-dt / 5.0); /* half-life 5 s */
    if (dt < 1e-3) return;
    for (int role = 0; role < 2; role++) {
        double busy_s = 0, n = 0;
        for (uint32_t i = 0; i < c->n_by_role[role]; i++) {
            struct td_core_worker *w = &c->workers[c->by_role[role][i]];
            busy_s += (double)w->busy_us * 1e-6;
            n += w->state == TD_WORKER_READY;
            w->busy_us = 0;
        }
        double now = n > 0 ? fmin(1, busy_s / (n * dt)) : 0;
        c->utilisation[role] = c->utilisation[role] * keep + now * (1 - keep);
    }
    double forget = exp2(-dt / 30.0); /* when no decisions come, what the last ones said fades */
    c->decode_pressure *= forget;
    c->refused_share *= forget;
    for (uint32_t i = 1; i < c->n_ranks; i++) { /* while nobody of the ranks above comes, nothing
                                                   is kept for them */
        c->ceilings[i] = fmin(CEILING_MAX, c->ceilings[i] + CEILING_DRIFT * dt);
        td_queue_set_ceiling(c->order, i, c->ceilings[i]);
    }
    c->utilisation_s = c->now_s;
}

static void update_advice(struct td_core *c, uint64_t busy_permille)
{
    struct td_scaling_fleet f = {.utilisation = {c->utilisation[0], c->utilisation[1]},
                                 .decode_pressure = c->decode_pressure,
                                 .refused_share = c->refused_share,
                                 .colocated = c->cfg.mode == TD_MODE_COLOCATED,
                                 .router_busy =
                                     (double)(busy_permille < 1000 ? busy_permille : 1000) / 1000};
    for (int role = 0; role < 2; role++)
        for (uint32_t i = 0; i < c->n_by_role[role]; i++) {
            const struct td_core_worker *w = &c->workers[c->by_role[role][i]];
            if (w->state != TD_WORKER_READY) continue;
            f.n[role]++;
            if (role != TD_ROLE_DECODE) continue;
            f.decode_node = c->by_role[role][i];
            f.kv_tokens = w->kv_tokens;
            f.max_seqs = w->max_seqs;
        }
    f.margin = td_latency_margin(c->latency, TD_LAT_TPOT, 0, TD_LAT_LIMIT_BUCKET);
    c->bound = td_scaling_update(&c->advice, c->now_s, &f, c->latency);
}

static uint64_t later(uint64_t at_ns, uint64_t by_ns, uint64_t now_ns)
{
    return now_ns - at_ns < by_ns ? now_ns : at_ns + by_ns;
}

/* late_ms: the router itself did not run for so long (stopped, starved of CPU, the machine
 * asleep). Whatever workers said then still lies in its sockets: their silence, and that of a
 * request's legs, does not count. A client's wait does. */
static void forgive(struct td_core *c, uint64_t late_ms)
{
    uint64_t late_ns = late_ms < 86400000 ? late_ms * NS_PER_MS : c->now_ns;
    for (uint32_t i = 0; i < c->n_workers; i++)
        c->workers[i].snapshot_ns = later(c->workers[i].snapshot_ns, late_ns, c->now_ns);
    for (uint32_t i = 0; i < c->cfg.max_requests; i++)
        if (c->requests[i].phase != FREE)
            c->requests[i].moved_ns = later(c->requests[i].moved_ns, late_ns, c->now_ns);
}

static void on_tick(struct td_core *c, const struct td_ev_tick *e)
{
    if (e->late_ms) forgive(c, e->late_ms);
    update_utilisation(c);
    update_advice(c, e->busy_permille);
    for (uint32_t i = 0; i < c->n_workers; i++) {
        struct td_core_worker *w = &c->workers[i];
        if ((w->state == TD_WORKER_READY || w->state == TD_WORKER_DRAINING) &&
            c->now_ns - w->snapshot_ns > c->cfg.worker_timeout_ms * NS_PER_MS) {
            set_state(w, TD_WORKER_SUSPECT);
            worker_lost(c, i, "the worker stopped answering");
        }
    }
    for (uint32_t i = 0; i < c->cfg.max_requests; i++) {
        struct request *r = &c->requests[i];
        if (r->phase == FREE) continue;
        if (r->phase == QUEUED) {
            if (c->now_ns - r->queued_ns <= c->cfg.queue_timeout_ms * NS_PER_MS) continue;
            bool have = core_wants_prefill_only(c, r) ||
                        (core_any_worker(c, TD_ROLE_DECODE) &&
                         (core_wants_local(c, r) || core_any_worker(c, TD_ROLE_PREFILL)));
            if (have)
                core_fail(c, r, TD_CODE_RESOURCE_EXHAUSTED,
                          "no worker had room within the queue time",
                          c->cfg.queue_timeout_ms * 1e-3);
            else
                core_fail(c, r, TD_CODE_UNAVAILABLE, "no worker of the needed role is connected",
                          0);
        } else if (r->finished_ns && c->now_ns - r->finished_ns > FINISH_WAIT_MS * NS_PER_MS) {
            complete(c, r);
        } else if (r->sender_finished && c->now_ns - r->moved_ns > SENDER_WAIT_MS * NS_PER_MS) {
            fail_over(c, r,
                      "the prefill worker has finished the request, and its token did not come");
        } else if (c->now_ns - r->moved_ns > c->cfg.stall_ms * NS_PER_MS) {
            fail_over(c, r, "nothing happened for too long");
        }
    }
    c->room_changed = true; /* slack has run down: some may have become hopeless */
}

static void on_drain(struct td_core *c, uint32_t worker)
{
    struct td_core_worker *w = known_worker(c, worker);
    if (!w) return;
    w->draining = true;
    if (w->state == TD_WORKER_READY) set_state(w, TD_WORKER_DRAINING);
}

static void on_stop(struct td_core *c, const struct td_ev_end *e)
{
    struct request *r = live(c, e->slot, e->id);
    if (!r) return;
    r->moved_ns = c->now_ns;
    if (prefill_told(r) && !(r->prefill.pending && r->decode_flows))
        core_emit(c, TD_ACT_CANCEL_PREFILL, r);
    finish(c, r);
}

static void on_cancel(struct td_core *c, const struct td_ev_end *e)
{
    struct request *r = live(c, e->slot, e->id);
    if (!r) return;
    cancel_legs(c, r);
    c->stats.cancelled++;
    c->stats.wasted_prefill_tokens += r->decode_flows ? 0 : r->computed_tokens;
    forget(c, r);
}

/* The worker's prefix index, when there is one and the worker is known; else NULL. */
static struct td_prefix_index *index_of(struct td_core *c, uint32_t worker)
{
    return known_worker(c, worker) ? c->index : NULL;
}

static void on_block_add(struct td_core *c, const struct td_ev_block *e)
{
    if (index_of(c, e->worker)) td_prefix_index_add(c->index, e->worker, e->hash);
}

static void on_block_evict(struct td_core *c, const struct td_ev_block *e)
{
    if (index_of(c, e->worker)) td_prefix_index_evict(c->index, e->worker, e->hash);
}

static void on_blocks_reset(struct td_core *c, uint32_t worker)
{
    if (index_of(c, worker)) td_prefix_index_reset(c->index, worker);
}

size_t td_core_step(struct td_core *c, const struct td_core_event *e,
                    struct td_core_action *ret_actions)
{
    if (e->now_ns > c->now_ns) c->now_ns = e->now_ns; /* (5) */
    c->now_s = (double)c->now_ns * 1e-9;
    c->out = ret_actions;
    c->n_out = 0;
    switch (e->kind) {
    case TD_EV_TICK:
        on_tick(c, &e->tick);
        break;
    case TD_EV_WORKER_JOIN:
        on_join(c, &e->join);
        break;
    case TD_EV_WORKER_SNAPSHOT:
        on_snapshot(c, &e->snapshot);
        break;
    case TD_EV_WORKER_DRAIN:
        on_drain(c, e->drain.worker);
        break;
    case TD_EV_WORKER_GONE:
        on_gone(c, e->gone.worker);
        break;
    case TD_EV_WORKER_STEP:
        on_step(c, &e->step);
        break;
    case TD_EV_BLOCK_ADD:
        on_block_add(c, &e->block_add);
        break;
    case TD_EV_BLOCK_EVICT:
        on_block_evict(c, &e->block_evict);
        break;
    case TD_EV_BLOCKS_RESET:
        on_blocks_reset(c, e->blocks_reset.worker);
        break;
    case TD_EV_REQUEST:
        on_request(c, &e->request);
        break;
    case TD_EV_TICKET:
        on_ticket(c, &e->ticket);
        break;
    case TD_EV_FIRST_TOKEN:
        on_first_token(c, &e->first_token);
        break;
    case TD_EV_TOKEN:
        on_token(c, &e->token);
        break;
    case TD_EV_PREFILL_END:
        on_prefill_end(c, &e->prefill_end);
        break;
    case TD_EV_DECODE_END:
        on_decode_end(c, &e->decode_end);
        break;
    case TD_EV_STOP:
        on_stop(c, &e->stop);
        break;
    case TD_EV_CANCEL:
        on_cancel(c, &e->cancel);
        break;
    }
    if (c->room_changed) core_dispatch(c);
    return c->n_out;
}

/* ---- views ----------------------------------------------------------------------------------- */

void td_core_worker_view(const struct td_core *c, uint32_t worker,
                         struct td_core_worker_view *ret_view)
{
    *ret_view = (struct td_core_worker_view){0};
    if (worker >= TD_CORE_MAX_WORKERS) return;
    const struct td_core_worker *w = &c->workers[worker];
    uint64_t unseen = w->calls_sent > w->calls_seen ? w->calls_sent - w->calls_seen : 0;
    *ret_view = (struct td_core_worker_view){.state = w->state,
                                             .role = w->role,
                                             .assigned = w->assigned,
                                             .assigned_tokens = w->assigned_tokens,
                                             .calls_unseen = (uint32_t)unseen,
                                             .snapshot_ns = w->snapshot_ns,
                                             .backlog_s = fmax(0, w->free_at_s - c->now_s),
                                             .step_s = w->step_s,
                                             .correction = w->correction};
}

void td_core_account(const struct td_core *c, uint32_t worker, struct td_core_account *ret_account)
{
    *ret_account = (struct td_core_account){0};
    if (worker >= TD_CORE_MAX_WORKERS) return;
    const struct td_core_worker *w = &c->workers[worker];
    *ret_account = (struct td_core_account){.assigned = w->assigned,
                                            .n_pending = w->n_pending,
                                            .n_active = w->n_active,
                                            .n_min_tpot = w->n_min_tpot,
                                            .assigned_tokens = w->assigned_tokens,
                                            .promised_tokens = w->promised_tokens,
                                            .pending_tokens = w->pending_tokens,
                                            .planned_tokens = w->planned_tokens,
                                            .active_tokens = w->active_tokens,
                                            .reserved_tokens = w->reserved_tokens,
                                            .local_tokens = w->local_tokens,
                                            .pending_s = w->pending_s,
                                            .min_tpot_s = w->min_tpot_s,
                                            .kept = w->kept};
    struct td_core_scan want;
    td_account_scan(w, &want);
    struct td_load_part part;
    td_account_part(w, &part);
    ret_account->stale = memcmp(&want, w->scan, sizeof want) != 0 ||
                         memcmp(&part, &c->fullness.parts[worker], sizeof part) != 0;
}

void td_core_stats(const struct td_core *c, struct td_core_stats *ret_stats)
{
    *ret_stats = c->stats;
    ret_stats->queued = td_queue_n(c->order);
    ret_stats->live = c->n_live;
    ret_stats->arrival_rate = c->stats.arrival_rate * exp2(-(c->now_s - c->rate_s) / 5.0);
}

uint32_t td_core_failovers(const struct td_core *c, uint32_t slot)
{
    return slot < c->cfg.max_requests ? c->requests[slot].failovers : 0;
}
void td_core_advice(const struct td_core *c, struct td_core_advice *ret)
{
    *ret = (struct td_core_advice){.bound = c->bound,
                                   .want = {c->advice.want[0], c->advice.want[1]},
                                   .need = {c->advice.need[0], c->advice.need[1]},
                                   .utilisation = {c->utilisation[0], c->utilisation[1]}};
}

const struct td_latency *td_core_latency(const struct td_core *c) { return c->latency; }

struct td_core_memory td_core_memory(uint64_t max_prefix_entries)
{
    size_t hashes = max_prefix_entries ? TD_CORE_MAX_HASHES * sizeof(uint64_t) : 0;
    struct td_core_memory m = {
        .per_request = sizeof(struct request) + td_queue_slot_bytes() + hashes,
        .fixed = sizeof(struct td_core) + TD_CORE_MAX_WORKERS * sizeof(uint32_t)};
    return m;
}
