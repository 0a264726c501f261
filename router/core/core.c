/* core.c - see core.h.
 *
 * Invariants: (1) a slot is FREE, or it has exactly one live id, and ends with exactly one COMPLETE, FAIL, or (the client's own) CANCEL;
 * (2) a worker's assigned counts equal the legs of live requests on it; (3) at most one decode leg and one prefill leg of one attempt are open;
 * (4) the queue is in arrival order: a request that fails over keeps its place. */
#include "router/core/core.h"

#include <stdlib.h>
#include <string.h>

#include "router/core/policy.h"

#define NS_PER_MS 1000000ull
#define NIL UINT32_MAX

/* gRPC codes, so that the core needs no gRPC header */
enum { G_OK = 0, G_CANCELLED = 1, G_INVALID = 3, G_DEADLINE = 4, G_NOT_FOUND = 5, G_EXHAUSTED = 8, G_PRECONDITION = 9, G_RANGE = 11, G_UNIMPLEMENTED = 12,
       G_UNAVAILABLE = 14 };

enum phase { FREE = 0, QUEUED, RESERVING, PREFILLING, DECODING };

struct request {
    enum phase phase;
    uint64_t id;
    uint32_t attempt, failovers;
    uint64_t n_prompt, n_tokens, max_tokens; /* n_tokens: prompt + output known to the client's stream */
    uint64_t arrived_ns, queued_ns, moved_ns;
    uint32_t prefill, decode; /* worker of the open leg, NIL = closed */
    uint64_t prefill_tokens, decode_tokens; /* what the ledger holds for each leg */
    bool refused;             /* a worker called the request invalid */
    bool decode_flows;        /* a decode token of this attempt was seen: the KV is there */
    bool output_done;         /* the client has its last token: whatever is lost now, nothing is left to compute */
    uint32_t prev, next;      /* queue */
};

struct td_core {
    struct td_core_config cfg;
    td_policy_fn policy;
    struct td_core_worker workers[TD_CORE_MAX_WORKERS];
    uint32_t n_workers;
    uint64_t cursor[2];
    struct request *requests;
    uint32_t queue_head, queue_tail, n_queued, n_live;
    uint64_t finished, failed, cancelled, failovers;
    /* of the event being applied */
    uint64_t now_ns;
    struct td_core_action *out;
    size_t n_out;
};

td_status td_core_create(const struct td_core_config *config, struct td_core **ret_core, struct td_err *err)
{
    if (config->max_requests < 1 || config->max_requests > TD_CORE_MAX_REQUESTS)
        return td_fail(err, TD_ERR_INVALID, "max_requests is %u, must be 1..%u", config->max_requests, TD_CORE_MAX_REQUESTS);
    td_policy_fn policy = td_policy_by_name(config->policy);
    if (!policy) return td_fail(err, TD_ERR_INVALID, "policy is \"%s\", must be one of %s", config->policy, td_policy_names());
    struct td_core *c = calloc(1, sizeof *c);
    if (c) c->requests = calloc(config->max_requests, sizeof *c->requests);
    if (!c || !c->requests) {
        td_core_destroy(c);
        return td_fail(err, TD_ERR_NOMEM, "router core: no memory for %u requests", config->max_requests);
    }
    c->cfg = *config;
    c->policy = policy;
    c->queue_head = c->queue_tail = NIL;
    *ret_core = c;
    return TD_OK;
}

void td_core_destroy(struct td_core *c)
{
    if (!c) return;
    free(c->requests);
    free(c);
}

/* ---- actions --------------------------------------------------------------------------------------------------------------------------- */

static struct td_core_action *emit(struct td_core *c, enum td_core_action_kind kind, const struct request *r)
{
    TD_ASSERT(c->n_out < TD_CORE_MAX_ACTIONS_PER_EVENT);
    struct td_core_action *a = &c->out[c->n_out++];
    *a = (struct td_core_action){.kind = kind, .slot = (uint32_t)(r - c->requests), .id = r->id, .attempt = r->attempt, .reason = ""};
    return a;
}

/* ---- queue ----------------------------------------------------------------------------------------------------------------------------- */

static void queue_insert(struct td_core *c, struct request *r)
{
    uint32_t self = (uint32_t)(r - c->requests), after = c->queue_tail;
    while (after != NIL && c->requests[after].id > r->id) after = c->requests[after].prev; /* ids grow with arrival (4) */
    r->prev = after;
    r->next = after == NIL ? c->queue_head : c->requests[after].next;
    if (r->next == NIL) c->queue_tail = self;
    else c->requests[r->next].prev = self;
    if (after == NIL) c->queue_head = self;
    else c->requests[after].next = self;
    r->phase = QUEUED;
    c->n_queued++;
}

static void queue_remove(struct td_core *c, struct request *r)
{
    if (r->prev == NIL) c->queue_head = r->next;
    else c->requests[r->prev].next = r->next;
    if (r->next == NIL) c->queue_tail = r->prev;
    else c->requests[r->next].prev = r->prev;
    c->n_queued--;
}

/* ---- legs and their ledger --------------------------------------------------------------------------------------------------------------- */

static void leg_open(struct td_core *c, uint32_t *leg, uint64_t *leg_tokens, uint32_t worker, uint64_t tokens)
{
    *leg = worker;
    *leg_tokens = tokens;
    c->workers[worker].assigned++;
    c->workers[worker].assigned_tokens += tokens;
}

static void leg_close(struct td_core *c, uint32_t *leg, uint64_t *leg_tokens)
{
    if (*leg == NIL) return;
    c->workers[*leg].assigned--;
    c->workers[*leg].assigned_tokens -= *leg_tokens;
    *leg = NIL;
    *leg_tokens = 0;
}

static void cancel_legs(struct td_core *c, struct request *r)
{
    if (r->prefill != NIL) emit(c, TD_ACT_CANCEL_PREFILL, r);
    if (r->decode != NIL) emit(c, TD_ACT_CANCEL_DECODE, r);
    leg_close(c, &r->prefill, &r->prefill_tokens);
    leg_close(c, &r->decode, &r->decode_tokens);
}

static void forget(struct td_core *c, struct request *r)
{
    if (r->phase == QUEUED) queue_remove(c, r);
    r->phase = FREE;
    c->n_live--;
}

static void fail(struct td_core *c, struct request *r, uint32_t code, const char *reason, uint32_t retry_ms)
{
    cancel_legs(c, r);
    struct td_core_action *a = emit(c, TD_ACT_FAIL, r);
    a->code = code;
    a->reason = reason;
    a->retry_ms = retry_ms;
    c->failed++;
    forget(c, r);
}

static void complete(struct td_core *c, struct request *r)
{
    /* A prefill leg may still be open (its "done" is on the way): it ends by itself. A decode leg that is open has nothing left to say. */
    if (r->decode != NIL) emit(c, TD_ACT_CANCEL_DECODE, r);
    leg_close(c, &r->prefill, &r->prefill_tokens);
    leg_close(c, &r->decode, &r->decode_tokens);
    emit(c, TD_ACT_COMPLETE, r);
    c->finished++;
    forget(c, r);
}

/* Back to the queue as a new attempt; nobody is blamed (a worker was merely full). The clock of queue_timeout_ms starts again with `waits_anew`:
 * a request that workers send back again and again has been waiting all the time. */
static void requeue(struct td_core *c, struct request *r, bool waits_anew)
{
    cancel_legs(c, r);
    r->attempt++;
    r->decode_flows = false;
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
        fail(c, r, G_UNAVAILABLE, reason, 0);
        return;
    }
    r->failovers++;
    c->failovers++;
    requeue(c, r, true);
}

/* ---- placement ----------------------------------------------------------------------------------------------------------------------------- */

static bool any_worker(const struct td_core *c, enum td_core_role role)
{
    for (uint32_t i = 0; i < c->n_workers; i++)
        if (c->workers[i].role == role && (c->workers[i].state == TD_WORKER_READY)) return true;
    return false;
}

static bool wants_local(const struct td_core *c, const struct request *r)
{
    if (c->cfg.mode == TD_MODE_COLOCATED) return true;
    if (c->cfg.mode == TD_MODE_HYBRID) return r->n_tokens < c->cfg.hybrid_local_tokens || !any_worker(c, TD_ROLE_PREFILL);
    return false;
}

/* Tries to give r to a pair. The decode side reserves first (DESIGN section 2); the prefill worker is chosen when the ticket arrives, but a
 * request does not reserve while there is nobody to prefill it. */
static bool place(struct td_core *c, struct request *r)
{
    struct td_policy_view v = {c->workers, c->n_workers, c->cursor};
    bool local = wants_local(c, r);
    if (!local && !td_policy_has_room(&v, TD_ROLE_PREFILL, r->n_tokens + 1)) return false;
    uint32_t d = c->policy(&v, TD_ROLE_DECODE, r->n_tokens + 1);
    if (d == TD_NO_WORKER) return false;
    queue_remove(c, r);
    leg_open(c, &r->decode, &r->decode_tokens, d, r->n_tokens);
    r->phase = local ? DECODING : RESERVING;
    r->moved_ns = c->now_ns;
    struct td_core_action *a = emit(c, TD_ACT_START_DECODE, r);
    a->worker = d;
    a->local = local;
    return true;
}

static void dispatch(struct td_core *c)
{
    for (uint32_t i = c->queue_head, next; i != NIL; i = next) {
        struct request *r = &c->requests[i];
        next = r->next;
        if (!place(c, r)) return; /* in order: a later one must not overtake */
    }
}

/* ---- workers ---------------------------------------------------------------------------------------------------------------------------------- */

/* Moves every request off a worker that cannot be counted on. */
static void worker_lost(struct td_core *c, uint32_t worker, const char *reason)
{
    for (uint32_t i = 0; i < c->cfg.max_requests; i++) {
        struct request *r = &c->requests[i];
        if (r->phase == FREE || r->phase == QUEUED) continue;
        bool on_decode = r->decode == worker, on_prefill = r->prefill == worker;
        if (on_prefill && r->decode_flows) { /* its work is done */
            emit(c, TD_ACT_CANCEL_PREFILL, r);
            leg_close(c, &r->prefill, &r->prefill_tokens);
            on_prefill = false;
        }
        if (on_decode || on_prefill) fail_over(c, r, reason);
    }
}

static struct td_core_worker *known_worker(struct td_core *c, uint32_t worker)
{
    if (worker >= TD_CORE_MAX_WORKERS || c->workers[worker].state == TD_WORKER_ABSENT) return NULL;
    return &c->workers[worker];
}

static void on_join(struct td_core *c, const struct td_core_event *e)
{
    if (e->worker >= TD_CORE_MAX_WORKERS) return;
    struct td_core_worker *w = &c->workers[e->worker];
    uint32_t assigned = w->assigned; /* legs of a former holder of this index, if any, are still in the ledger (2) */
    uint64_t tokens = w->assigned_tokens;
    *w = (struct td_core_worker){.state = TD_WORKER_READY, .role = e->role, .kv_tokens = e->a, .max_seqs = (uint32_t)e->b, .snapshot_ns = c->now_ns,
                                 .assigned = assigned, .assigned_tokens = tokens};
    if (e->worker >= c->n_workers) c->n_workers = e->worker + 1;
}

static void on_snapshot(struct td_core *c, const struct td_core_event *e)
{
    struct td_core_worker *w = known_worker(c, e->worker);
    if (!w || e->a <= w->snapshot_seq) return; /* an old one */
    w->snapshot_seq = e->a;
    w->snapshot_ns = c->now_ns;
    w->held_tokens = e->b;
    w->queued_tokens = e->c;
    w->n_busy = (uint32_t)e->d;
    w->shunned = false;
    if (w->state == TD_WORKER_SUSPECT) w->state = w->draining ? TD_WORKER_DRAINING : TD_WORKER_READY;
}

/* ---- requests ----------------------------------------------------------------------------------------------------------------------------------- */

static void on_request(struct td_core *c, const struct td_core_event *e)
{
    if (e->slot >= c->cfg.max_requests || c->requests[e->slot].phase != FREE) return;
    struct request *r = &c->requests[e->slot];
    *r = (struct request){.id = e->id, .n_prompt = e->a, .n_tokens = e->a, .max_tokens = e->b, .arrived_ns = c->now_ns, .moved_ns = c->now_ns,
                          .queued_ns = c->now_ns, .prefill = NIL, .decode = NIL};
    c->n_live++;
    queue_insert(c, r);
    dispatch(c); /* max_queued bounds those who wait, not those who can be placed at once */
    if (r->phase == QUEUED && c->n_queued > c->cfg.max_queued) fail(c, r, G_EXHAUSTED, "the router's queue is full", 1000);
}

/* The live request an event speaks of; NULL when it speaks of the past. */
static struct request *current(struct td_core *c, const struct td_core_event *e, bool any_attempt)
{
    if (e->slot >= c->cfg.max_requests) return NULL;
    struct request *r = &c->requests[e->slot];
    if (r->phase == FREE || r->id != e->id) return NULL;
    if (!any_attempt && (r->attempt != e->attempt || r->phase == QUEUED)) return NULL;
    r->moved_ns = c->now_ns;
    return r;
}

static void on_ticket(struct td_core *c, const struct td_core_event *e)
{
    struct request *r = current(c, e, false);
    if (!r || r->phase != RESERVING) return;
    struct td_policy_view v = {c->workers, c->n_workers, c->cursor};
    uint32_t p = c->policy(&v, TD_ROLE_PREFILL, r->n_tokens + 1);
    if (p == TD_NO_WORKER) {
        requeue(c, r, true); /* it filled up meanwhile: give the reservation back, wait in the queue */
        return;
    }
    leg_open(c, &r->prefill, &r->prefill_tokens, p, r->n_tokens - (e->a < r->n_tokens ? e->a : r->n_tokens));
    r->phase = PREFILLING;
    emit(c, TD_ACT_START_PREFILL, r)->worker = p;
}

static void on_first_token(struct td_core *c, const struct td_core_event *e)
{
    struct request *r = current(c, e, false);
    if (!r) return;
    if (r->phase == PREFILLING) r->phase = DECODING;
    if (r->prefill != NIL) { /* the computing is over: the ledger lets go of its tokens, the leg stays for the hand-over */
        c->workers[r->prefill].assigned_tokens -= r->prefill_tokens;
        r->prefill_tokens = 0;
    }
    if (e->b > r->n_tokens) r->n_tokens = e->b;
    if (e->a) complete(c, r);
}

static void on_token(struct td_core *c, const struct td_core_event *e)
{
    struct request *r = current(c, e, false);
    if (!r) return;
    r->decode_flows = true;
    r->phase = DECODING;
    if (e->b) r->output_done = true;
    if (e->a > r->n_tokens) {
        if (r->decode != NIL) {
            c->workers[r->decode].assigned_tokens += e->a - r->n_tokens;
            r->decode_tokens += e->a - r->n_tokens;
        }
        r->n_tokens = e->a;
    }
}

/* A leg ended with a gRPC code: whose fault was it? */
static void leg_failed(struct td_core *c, struct request *r, uint32_t worker, uint32_t code, const char *what)
{
    if (r->output_done) {
        complete(c, r);
        return;
    }
    switch (code) {
    case G_INVALID:
    case G_NOT_FOUND:
    case G_RANGE:
    case G_UNIMPLEMENTED: /* the router has checked the request: it may be this worker that is too small, too old or mistaken. One second opinion */
        if (r->refused) {
            fail(c, r, code, what, 0);
            return;
        }
        r->refused = true;
        c->workers[worker].shunned = true;
        if (r->decode != NIL) c->workers[r->decode].shunned = true; /* the prefill worker refused: perhaps the grant */
        fail_over(c, r, what);
        return;
    case G_EXHAUSTED:
        c->workers[worker].shunned = true;
        requeue(c, r, false);
        return;
    case G_DEADLINE: fail(c, r, code, "the request's deadline has passed", 0); return; /* the client's own: the worker did no wrong */
    default: /* perhaps it is dead and its stream does not know yet: do not spend the failovers on it */
        c->workers[worker].shunned = true;
        fail_over(c, r, what);
        return;
    }
}

static void on_prefill_end(struct td_core *c, const struct td_core_event *e)
{
    struct request *r = current(c, e, false);
    if (!r || r->prefill == NIL) return;
    uint32_t worker = r->prefill;
    leg_close(c, &r->prefill, &r->prefill_tokens);
    if (r->decode_flows || (e->a == G_OK && r->phase != PREFILLING)) return; /* delivered */
    leg_failed(c, r, worker, (uint32_t)e->a, e->a == G_OK ? "the prefill worker ended without a first token" : "the prefill worker failed");
}

static void on_decode_end(struct td_core *c, const struct td_core_event *e)
{
    struct request *r = current(c, e, false);
    if (!r || r->decode == NIL) return;
    uint32_t worker = r->decode;
    leg_close(c, &r->decode, &r->decode_tokens);
    if (e->a == G_OK) complete(c, r);
    else leg_failed(c, r, worker, (uint32_t)e->a, "the decode worker failed");
}

static void on_tick(struct td_core *c)
{
    for (uint32_t i = 0; i < c->n_workers; i++) {
        struct td_core_worker *w = &c->workers[i];
        if ((w->state == TD_WORKER_READY || w->state == TD_WORKER_DRAINING) && c->now_ns - w->snapshot_ns > c->cfg.worker_timeout_ms * NS_PER_MS) {
            w->state = TD_WORKER_SUSPECT;
            worker_lost(c, i, "the worker stopped answering");
        }
    }
    for (uint32_t i = c->queue_head, next; i != NIL; i = next) { /* all: a failed-over one at the head may have waited less */
        struct request *r = &c->requests[i];
        next = r->next;
        if (c->now_ns - r->queued_ns <= c->cfg.queue_timeout_ms * NS_PER_MS) continue;
        bool have = any_worker(c, TD_ROLE_DECODE) && (wants_local(c, r) || any_worker(c, TD_ROLE_PREFILL));
        if (have) fail(c, r, G_EXHAUSTED, "no worker had room within the queue time", c->cfg.queue_timeout_ms);
        else fail(c, r, G_UNAVAILABLE, "no worker of the needed role is connected", 0);
    }
    for (uint32_t i = 0; i < c->cfg.max_requests; i++) {
        struct request *r = &c->requests[i];
        if (r->phase <= QUEUED || c->now_ns - r->moved_ns <= c->cfg.stall_ms * NS_PER_MS) continue;
        fail_over(c, r, "nothing happened for too long");
    }
}

size_t td_core_step(struct td_core *c, const struct td_core_event *e, struct td_core_action *ret_actions)
{
    c->now_ns = e->now_ns;
    c->out = ret_actions;
    c->n_out = 0;
    struct request *r;
    struct td_core_worker *w;
    switch (e->kind) {
    case TD_EV_TICK: on_tick(c); break;
    case TD_EV_WORKER_JOIN: on_join(c, e); break;
    case TD_EV_WORKER_SNAPSHOT: on_snapshot(c, e); break;
    case TD_EV_WORKER_DRAIN:
        if (!(w = known_worker(c, e->worker))) break;
        w->draining = true;
        if (w->state == TD_WORKER_READY) w->state = TD_WORKER_DRAINING;
        break;
    case TD_EV_WORKER_GONE:
        if ((w = known_worker(c, e->worker))) {
            worker_lost(c, e->worker, "the worker left");
            w->state = TD_WORKER_ABSENT;
        }
        break;
    case TD_EV_REQUEST: on_request(c, e); break;
    case TD_EV_TICKET: on_ticket(c, e); break;
    case TD_EV_FIRST_TOKEN: on_first_token(c, e); break;
    case TD_EV_TOKEN: on_token(c, e); break;
    case TD_EV_PREFILL_END: on_prefill_end(c, e); break;
    case TD_EV_DECODE_END: on_decode_end(c, e); break;
    case TD_EV_STOP:
        if ((r = current(c, e, true))) {
            if (r->prefill != NIL) emit(c, TD_ACT_CANCEL_PREFILL, r);
            complete(c, r);
        }
        break;
    case TD_EV_CANCEL:
        if ((r = current(c, e, true))) {
            cancel_legs(c, r);
            c->cancelled++;
            forget(c, r);
        }
        break;
    }
    dispatch(c);
    return c->n_out;
}

/* ---- views --------------------------------------------------------------------------------------------------------------------------------------- */

void td_core_worker_view(const struct td_core *c, uint32_t worker, struct td_core_worker_view *ret_view)
{
    *ret_view = (struct td_core_worker_view){0};
    if (worker >= TD_CORE_MAX_WORKERS) return;
    const struct td_core_worker *w = &c->workers[worker];
    *ret_view = (struct td_core_worker_view){.state = w->state, .role = w->role, .assigned = w->assigned, .assigned_tokens = w->assigned_tokens,
                                             .snapshot_ns = w->snapshot_ns};
}

void td_core_stats(const struct td_core *c, struct td_core_stats *ret_stats)
{
    *ret_stats = (struct td_core_stats){.queued = c->n_queued, .live = c->n_live, .finished = c->finished, .failed = c->failed,
                                        .cancelled = c->cancelled, .failovers = c->failovers};
}

uint32_t td_core_failovers(const struct td_core *c, uint32_t slot) { return slot < c->cfg.max_requests ? c->requests[slot].failovers : 0; }
