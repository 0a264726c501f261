/* dispatch.c - who is placed now, and where: the walk through the queue, what the policy is asked
 * about each request, and what its answer does to the workers' accounts.
 *
 * Runs after every event that may have made room: a request came, a leg ended, a worker joined, a
 * tick. One walk tries, passes over and refuses a bounded number of requests, and the next event
 * goes on where it stopped. */
#include <math.h>
#include <string.h>

#include "router/core/core_state.h"

/* Requests that one walk asks the policy about. It bounds the time of an event while the queue is
 * long. */
#define MAX_TRIES 16
#define MAX_PASSED 512               /* and passed over */
#define MAX_REJECTED 256             /* and refused; the next event goes on with the rest */
#define GUARD_NS (10000 * NS_PER_MS) /* room is kept for a rank that asked within so long */
/* A request that is predicted to need this many times what is left of its TTFT is refused at its
 * ticket: with less, some of what other routers have on the way may still come behind it. Before
 * prefill workers gave prompts back, too, it was 1.3, and at 1.2 four routers refused 1.5 % more of
 * all requests for no more good ones. */
#define SURELY_LATE 1.5
/* A prefill worker gives a prompt back that needs more than this many times what is left of its
 * TTFT. It knows what is there, but adds up what each prompt would take alone, which is more than
 * what they take together. */
#define LATE_THERE 1.1
#define PRESSURE_STEP 0.01  /* of the EWMA over decisions */
#define MAX_PREDICTED_S 1e9 /* what an action may say */

static void set_kept(struct td_core_worker *w, bool kept)
{
    w->kept = kept;
    td_account_changed(w);
}

bool core_any_worker(const struct td_core *c, enum td_core_role role)
{
    for (uint32_t i = 0; i < c->n_by_role[role]; i++)
        if (c->workers[c->by_role[role][i]].state == TD_WORKER_READY) return true;
    return false;
}

bool core_wants_local(const struct td_core *c, const struct request *r)
{
    if (c->cfg.mode == TD_MODE_COLOCATED) return true;
    if (c->cfg.mode == TD_MODE_HYBRID)
        return (c->policy != td_policy_goodput && r->n_tokens < c->cfg.hybrid_local_tokens) ||
               !core_any_worker(c, TD_ROLE_PREFILL);
    return false;
}

/* During an upgrade some prefill workers may not be able to: then none is asked to. */
bool core_wants_prefill_only(const struct td_core *c, const struct request *r)
{
    if (r->max_tokens != r->n_tokens - r->n_prompt + 1 || core_wants_local(c, r)) return false;
    bool any = false;
    for (uint32_t i = 0; i < c->n_by_role[TD_ROLE_PREFILL]; i++) {
        const struct td_core_worker *w = &c->workers[c->by_role[TD_ROLE_PREFILL][i]];
        if (w->state != TD_WORKER_READY) continue;
        if (!w->prefill.one_token) return false;
        any = true;
    }
    return any;
}

struct td_policy_view core_view_of(struct td_core *c)
{
    return (struct td_policy_view){
        .workers = c->workers,
        .n_workers = c->n_workers,
        .scans = c->scans,
        .by_role = {c->by_role[0], c->by_role[1]},
        .n_by_role = {c->n_by_role[0], c->n_by_role[1]},
        .cursor = c->cursor,
        .random = &c->random,
        .now_s = c->now_s,
        .utilisation = {c->trend.utilisation[0], c->trend.utilisation[1]},
        .decode_pressure = c->trend.decode_pressure,
        .latency = c->latency,
        .index = c->index,
        .hit_tokens = c->hit_tokens,
        .foreign_on_way = c->foreign_on_way > 0 ? (double)c->foreign_on_way : 0,
        .start_s = c->start.s,
        .stages = &c->stages};
}

/* The TPOT for which a request of this rank leaves room on decode workers: the tightest of the
 * ranks before it, while requests of those ranks come. */
static double guard_of(const struct td_core *c, uint32_t rank)
{
    for (uint32_t i = 0; i < rank; i++)
        if (c->classes.asked_ns[i] && c->now_ns - c->classes.asked_ns[i] < GUARD_NS)
            return c->classes.guard_tpot_s[rank];
    return INFINITY;
}

/* Do requests of ranks behind this one come, too? */
static bool before_others(const struct td_core *c, uint32_t rank)
{
    for (uint32_t i = rank + 1; i < c->classes.n_ranks; i++)
        if (c->classes.asked_ns[i] && c->now_ns - c->classes.asked_ns[i] < GUARD_NS) return true;
    return false;
}

static struct td_policy_ask ask_of(const struct td_core *c, const struct request *r)
{
    uint64_t sent = r->n_tokens - r->n_prompt,
             left = r->max_tokens > sent ? r->max_tokens - sent : 1;
    double expected =
        td_latency_output(c->latency, r->slo_class, 0.5, r->max_tokens) - (double)sent;
    bool local = core_wants_local(c, r), prefill_only = core_wants_prefill_only(c, r);
    const struct td_core_class *k = &c->cfg.classes[r->slo_class];
    struct td_policy_ask a = {.id = r->id,
                              .n_tokens = r->n_tokens,
                              .max_tokens = left,
                              .n_out = fmin(fmax(expected, 1), (double)left),
                              .slo_class = r->slo_class,
                              .turn = c->classes.turn[r->slo_class],
                              .ttft_s = r->ttft_s,
                              .tpot_s = r->tpot_s,
                              .best_effort = k->best_effort,
                              .size = c->trend.cost_s > 0 ? r->decode_cost_s / c->trend.cost_s : 1,
                              .mean_cost_s = c->trend.cost_s,
                              .guard_tpot_s = guard_of(c, c->classes.rank[r->slo_class]),
                              .above_share = td_queue_above_share(c->order, r->tenant, c->now_ns),
                              .favoured = td_queue_below_share(c->order, r->tenant, c->now_ns) ||
                                          before_others(c, c->classes.rank[r->slo_class]),
                              .started = r->first_ns != 0,
                              .force_local = local,
                              .allow_deflect = c->cfg.mode == TD_MODE_HYBRID && !local,
                              .prefill_only = prefill_only,
                              .hashes = r->hashes,
                              .n_hashes = c->index ? r->n_hashes : 0,
                              .hash_tokens = r->hash_tokens};
    if (a.started)
        a.ttft_s = INFINITY;
    else if (r->ttft_s < INFINITY)
        a.ttft_s = r->ttft_s - (double)(c->now_ns - r->arrived_ns) * 1e-9;
    return a;
}

/* Is a request that was placed looked at again, for whether its TTFT will be missed? With several
 * routers the placement knew nothing of what the others had sent since, and computing a prompt that
 * is late makes those behind it late, too. One router knows all. A request that was placed although
 * it was expected to be late is left alone: margins are learned from it. */
static bool judged_again(const struct td_core *c, const struct request *r,
                         const struct td_policy_ask *a)
{
    const struct td_core_worker *w = &c->workers[r->prefill.worker];
    double had_s = r->ttft_s - (double)(r->placed_ns - r->arrived_ns) * 1e-9;
    return w->foreign.n_routers > 1 && c->policy == td_policy_goodput && !a->best_effort &&
           a->ttft_s < INFINITY && r->choice.ttft_s <= had_s * SURELY_LATE;
}

/* For the look at its prefill worker, between two steps there (td_scheduler_late). */
double core_finish_within_s(struct td_core *c, const struct request *r)
{
    struct td_policy_ask a = ask_of(c, r);
    if (!judged_again(c, r, &a)) return INFINITY;
    return fmax(0, a.ttft_s * LATE_THERE - c->start.s);
}

/* The look when its decode worker's ticket has come, before its prefill worker is told. */
bool core_too_late(struct td_core *c, const struct request *r)
{
    struct td_policy_view v = core_view_of(c);
    struct td_policy_ask a = ask_of(c, r);
    if (!judged_again(c, r, &a)) return false;
    /* its own is in the queue */
    double wait_s = td_policy_prefill_wait(&v, &a, r->prefill.worker) - r->prefill.work_s;
    return fmax(0, wait_s) + r->prefill.work_s + c->start.s > a.ttft_s * SURELY_LATE;
}

static uint64_t us_of(double s) { return (uint64_t)(fmin(s, MAX_PREDICTED_S) * 1e6); }

/* Opens the request's legs in its workers' accounts. The decode worker reserves first; the prefill
 * leg is planned, since that worker is called when the decode worker's ticket is there. */
static void open_legs(struct td_core *c, struct request *r, const struct td_policy_ask *a)
{
    const struct td_choice *choice = &r->choice;
    uint64_t uncomputed = r->n_tokens - choice->hit_tokens;
    bool alone = choice->decode == TD_NO_WORKER;
    if (!alone) {
        td_account_decode_open(&c->workers[choice->decode], &r->decode, choice->decode,
                               choice->local, r->n_tokens, r->n_tokens + (uint64_t)a->n_out,
                               choice->local ? uncomputed : 0, r->tpot_s);
        c->workers[choice->decode].calls_sent++;
        core_refresh_step(c, choice->decode);
    }
    if (choice->local) return;
    struct td_core_worker *p = &c->workers[choice->prefill];
    td_account_prefill_open(p, &r->prefill, choice->prefill, a->turn, uncomputed, choice->prefill_s,
                            c->now_s);
    if (alone) {
        core_prefill_tell(c, r);
        return;
    }
    double link_s = td_latency_transfer(c->latency, p->node_class, 0,
                                        (double)(choice->send_tokens * p->kv_bytes_per_token));
    td_account_link_open(p, &r->prefill, link_s, c->now_s + choice->ttft_s - choice->prefill_s);
}

static void count_placement(struct td_core *c, const struct request *r,
                            const struct td_policy_ask *a)
{
    /* by choice: in hybrid mode, with prefill workers there */
    if (r->choice.local && !a->force_local) c->stats.deflected++;
    if (r->failovers == 0 && r->attempt == 0)
        td_queue_charge(c->order, r->tenant, (double)r->n_prompt, c->now_ns);
    c->stats.predicted_hit_tokens += r->choice.hit_tokens;
}

/* Takes the request out of the queue and starts its attempt on the chosen workers. */
static void start(struct td_core *c, struct request *r, const struct td_policy_ask *a,
                  const struct td_choice *choice)
{
    if (td_queue_has(c->order, (uint32_t)(r - c->requests))) core_queue_remove(c, r);
    r->choice = *choice;
    open_legs(c, r, a);
    count_placement(c, r, a);
    bool alone =
        choice->decode == TD_NO_WORKER; /* one token is left: the prefill worker makes it */
    r->phase = choice->local ? DECODING : alone ? PREFILLING : RESERVING;
    r->moved_ns = r->placed_ns = c->now_ns;
    r->timed = false;
    struct td_queue_key key = core_key_of(c, r);
    struct td_core_action *act =
        core_emit(c, alone ? TD_ACT_START_PREFILL : TD_ACT_START_DECODE, r);
    act->start.worker = alone ? choice->prefill : choice->decode;
    act->start.local = choice->local || alone;
    act->start.key = td_queue_wire_key(c->order, &key);
    if (choice->ttft_s > 0)
        act->start.ttft_us = us_of(choice->ttft_s + (double)(c->now_ns - r->arrived_ns) * 1e-9);
    act->start.tpot_us = us_of(choice->tpot_s);
}

enum outcome { PLACED, HELD, REJECTED };

/* Asks the policy about the request, and carries out what it says. ret_no_room: it was held, since
 * no workers have the room. */
static enum outcome place(struct td_core *c, struct request *r, const struct td_policy_ask *a,
                          bool *ret_no_room)
{
    struct td_policy_view v = core_view_of(c);
    struct td_choice choice = {
        .verdict = TD_HOLD, .prefill = TD_NO_WORKER, .decode = TD_NO_WORKER, .reason = ""};
    c->policy(&v, a, &choice);
    *ret_no_room = choice.no_room;
    c->trend.decode_pressure +=
        PRESSURE_STEP * ((choice.decode_bound ? 1 : 0) - c->trend.decode_pressure);
    c->trend.refused_share +=
        PRESSURE_STEP * ((choice.verdict == TD_REJECT ? 1 : 0) - c->trend.refused_share);
    if (choice.verdict == TD_HOLD) return HELD;
    if (choice.verdict == TD_REJECT) {
        core_fail(c, r, TD_CODE_RESOURCE_EXHAUSTED, choice.reason, choice.wait_s);
        return REJECTED;
    }
    start(c, r, a, &choice);
    return PLACED;
}

/* The easiest request that was held in this walk. One that is no easier to place is not tried, so
 * that many requests that fit nowhere do not use up the tries of those behind them. */
struct held {
    bool any;
    uint64_t n_tokens;
    double n_out, tpot_s;
};

static bool no_easier(const struct held *h, const struct td_policy_ask *a, bool objectives)
{
    /* What was missing may have been a decode worker, and this one needs none. */
    if (!h->any || a->n_tokens < h->n_tokens || a->prefill_only) return false;
    if (!objectives) return (double)a->n_tokens + a->n_out >= (double)h->n_tokens + h->n_out;
    return a->tpot_s <= h->tpot_s && a->n_out <= h->n_out && !a->best_effort && !a->started &&
           a->ttft_s > 0;
}

static void note_held(struct held *h, const struct td_policy_ask *a)
{
    if (a->prefill_only || (h->any && a->n_tokens >= h->n_tokens)) return;
    *h =
        (struct held){.any = true, .n_tokens = a->n_tokens, .n_out = a->n_out, .tpot_s = a->tpot_s};
}

/* The request was held for so long that those behind it would starve it. During this walk, one
 * worker of each role that it needs is kept for it: the one that empties soonest. That is the same
 * worker from walk to walk, since nothing else is placed there. Nothing is kept for a request that
 * would fit nowhere even alone. */
static void keep_room(struct td_core *c, const struct td_policy_ask *a, uint32_t *kept,
                      uint32_t *n_kept)
{
    struct td_policy_view v = core_view_of(c);
    uint32_t d = a->prefill_only ? TD_NO_WORKER : td_policy_keep(&v, a, TD_ROLE_DECODE),
             p = a->force_local ? TD_NO_WORKER : td_policy_keep(&v, a, TD_ROLE_PREFILL);
    if ((d == TD_NO_WORKER && !a->prefill_only) || (p == TD_NO_WORKER && !a->force_local)) return;
    if (d != TD_NO_WORKER) set_kept(&c->workers[kept[(*n_kept)++] = d], true);
    if (p != TD_NO_WORKER && c->workers[p].assigned >= c->workers[p].foreign.seqs_max)
        set_kept(&c->workers[kept[(*n_kept)++] = p], true);
}

/* Walks the queue in its order. A request that is held does not stop those behind it. */
void core_dispatch(struct td_core *c)
{
    c->room_changed = false;
    if (td_queue_n(c->order) == 0) return;
    td_queue_walk(c->order, c->cfg.n_classes > 1 ? td_load_value(&c->fullness, c->now_ns) : 0,
                  c->now_ns);
    struct held no_room = {.any = false}, tight[2][TD_CORE_MAX_CLASSES] = {{{.any = false}}};
    uint32_t kept[2 * MAX_TRIES], n_kept = 0;
    for (int tries = 0, passed = 0, rejected = 0; tries < MAX_TRIES && passed < MAX_PASSED;) {
        if (rejected == MAX_REJECTED) {
            c->room_changed = true;
            break;
        }
        uint32_t request_at = td_queue_next(c->order);
        if (request_at == TD_QUEUE_NONE) break;
        struct request *r = &c->requests[request_at];
        struct td_policy_ask a = ask_of(c, r);
        if (no_easier(&no_room, &a, false) ||
            no_easier(&tight[a.above_share][r->slo_class], &a, true)) {
            passed++;
            continue;
        }
        bool short_of_room;
        uint64_t waited_ns = c->now_ns - r->queued_ns;
        enum outcome o = place(c, r, &a, &short_of_room);
        if (o == REJECTED) {
            rejected++;
            continue;
        }
        tries++;
        if (o == PLACED && c->cfg.n_classes > 1 && td_queue_n(c->order) > 0)
            td_queue_fill(c->order, td_load_value(&c->fullness, c->now_ns));
        if (o != HELD) continue;
        note_held(short_of_room ? &no_room : &tight[a.above_share][r->slo_class], &a);
        if (waited_ns > c->cfg.queue_timeout_ms * NS_PER_MS / 4) keep_room(c, &a, kept, &n_kept);
    }
    while (n_kept > 0) set_kept(&c->workers[kept[--n_kept]], false);
}
