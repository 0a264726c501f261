/* policy_goodput.c - predict, reserve, admit: place a request only where both of its objectives and
 * those promised to others will be met.
 *
 *  1. Candidates: the few prefill workers that would finish it first and the few decode workers
 *     with the shortest next step, by one scan over the accounts; every worker that holds a part of
 *     its prefix; in hybrid mode also decode workers that prefill it themselves. With N routers
 *     over the fleet the scan of decode workers looks at an N-th of them, beginning at random, and
 *     at all when none of those will do: else all routers, which see the same workers idle at the
 *     same moment, would fill the same few until the next snapshots (Mitzenmacher 2001).
 *  2. A pair is feasible when predicted TTFT * q_T <= what is left of the objective, predicted TPOT
 *     * q_D <= the objective, the KV that it is expected to need fits at its end, and the decode
 *     worker's step with it keeps the tightest objective among those who are there. q are learned
 *     margins (latency.h), wider for a worker that is silent for too long (policy.h).
 *  3. Among feasible pairs, those first that are sure: TTFT holds by the whole margin, which counts
 *     by its price otherwise, and TPOT holds with the mean wait for the batch, which a pair spends
 *     between two steps of its decode worker. Then least TTFT + gap; within 5 % of that the least
 *     TPOT; within 5 % of both, at random: equal nodes share, nobody is herded. Prefix hits act
 *     through the uncomputed work alone: they need no weight.
 *  4. None: reject when no worker could keep the TPOT objective even alone; else hold while there
 *     is slack; reject when even now TTFT * q_T with the queue ahead is over what is left, before
 *     any prefill is spent. With several routers a pair's TTFT is judged again at the ticket, by
 *     what the others have sent meanwhile (core_too_late). One request in 128 that would be held or
 *     rejected is placed all the same where there is room, else the margins would only learn from
 *     those that were expected to be good. Where both of its workers are idle, and the prediction
 *     is no more than IDLE_FACTOR times the objective, it is one in EXPLORE_IDLE: nobody suffers
 *     there, and a fleet that thought itself slow would refuse everything and never see that it is
 *     not.
 *
 * A local prefill on a decode worker (deflection) is judged as one of a colocated worker is: by
 * the mean of the steps, prefill rows mixed in as often as lately. The objective is a mean over
 * the sequence: a chunk's stall is spread over all of its tokens, and need not fit into one. Short
 * prompts with short outputs are better off there, and cost the others little (cheap_local).
 * Source: reference notes on goodput, C3; DistServe; Mooncake. */
#include <math.h>

#include "common/base/random.h"
#include "router/core/policy.h"

#define N_BEST 4
#define FULL_KEY 1e12 /* of decode workers without KV for it: after all others */
#define MAX_CANDIDATES (N_BEST + 8)
#define TIE 1.05
#define TIE_S 1e-4 /* two predictions closer than this are one */
#define KV_DEFLECT 0.90
#define EXPLORE 128
#define EXPLORE_IDLE 4
/* predictions may have been learned in a slow hour; not by more than this */
#define IDLE_FACTOR 8.0
#define NEVER_S 60.0   /* wait of what no worker of this fleet can do */
#define PRICE_FROM 0.5 /* utilisation from which, and up to which, margins come into force */
#define PRICE_TO 0.9
#define FULL_PRESSURE 0.1
#define ROOM_TTFT 1.25 /* a tenant above its share leaves a fifth of the TTFT, */
#define ROOM_TPOT 1.04 /* and 4 % of each step: beside 45 sequences the room for three. */
/* Of each step, left by requests twice as costly as the mean while steps are scarce. */
#define ROOM_SMALLER 0.03
/* Of a mean request's cost to decode steps. At 0.75 and more hybrid lost up to 1.5 points beyond
 * what 2 + 4 workers can serve, since such prompts took the steps of others. */
#define CHEAP 0.5

/* Most of TTFT's margin where core_too_late looks again at the ticket, and the prefill worker does
 * before it begins: both know more, and a request that is refused here has no second chance. Four
 * routers on 2 + 4 workers at 30/s had 1.2 points fewer good requests at 0.9. */
#define SHARED_MARGIN 0.7

struct candidate {
    uint32_t at;
    double key;
};
struct side {
    struct candidate c[MAX_CANDIDATES];
    uint32_t n;
};

static inline void keep_best(struct side *s, uint32_t at, double key)
{
    if (s->n == N_BEST && key >= s->c[N_BEST - 1].key) return;
    uint32_t i = s->n < N_BEST ? s->n++ : N_BEST - 1;
    for (; i > 0 && s->c[i - 1].key > key; i--) s->c[i] = s->c[i - 1];
    s->c[i] = (struct candidate){at, key};
}

static void add_holder(struct side *s, uint32_t at)
{
    for (uint32_t i = 0; i < s->n; i++)
        if (s->c[i].at == at) return;
    if (s->n < MAX_CANDIDATES) s->c[s->n++] = (struct candidate){at, 0};
}

static bool kv_fits(const struct td_core_worker *w, const struct td_policy_ask *a, double ceiling)
{
    return (double)w->decode.promised_tokens + (double)a->n_tokens + a->n_out <=
           td_worker_kv_limit(w) * (ceiling / TD_POLICY_KV_CEILING);
}

static uint32_t n_routers(const struct td_policy_view *v, enum td_core_role role)
{
    return v->n_by_role[role] ? v->workers[v->by_role[role][0]].foreign.n_routers : 0;
}

/* Scans begin at another worker each time: of many that are equal, idle ones say, not always the
 * first few are candidates. */
static uint32_t scan_from(const struct td_policy_view *v, enum td_core_role role)
{
    uint32_t n = v->n_by_role[role];
    if (n_routers(v, role) > 1) /* in turn, all routers would begin at the same */
        return td_random_index(v->random, n);
    return n ? (uint32_t)(v->cursor[role]++ % n) : 0;
}

static void prefill_candidates(const struct td_policy_view *v, const struct td_policy_ask *a,
                               struct side *s)
{
    uint32_t n = v->n_by_role[TD_ROLE_PREFILL], i = scan_from(v, TD_ROLE_PREFILL);
    const uint32_t *workers = v->by_role[TD_ROLE_PREFILL];
    for (uint32_t left = n; left > 0; left--, i = i + 1 < n ? i + 1 : 0) {
        const struct td_core_scan *w = &v->scans[workers[i]];
        if (a->n_tokens >= w->room_tokens) continue;
        /* Equal prompts cost the same on equal nodes: the backlog decides, of work or of the
         * link; tokens break the tie while nothing is known of times. */
        double wait_s = w->prefill.busy_s > v->now_s ? w->prefill.busy_s - v->now_s : 0;
        keep_best(s, workers[i], wait_s * 1e6 + w->prefill.pending + w->prefill.assigned);
    }
}

/* all: of all workers, not only of this router's share. Two at least: a choice of two does most of
 * what a choice of all would. */
static void decode_candidates(const struct td_policy_view *v, const struct td_policy_ask *a,
                              bool all, struct side *s)
{
    uint32_t n = v->n_by_role[TD_ROLE_DECODE], i = scan_from(v, TD_ROLE_DECODE),
             share = all ? n : n / n_routers(v, TD_ROLE_DECODE);
    const uint32_t *workers = v->by_role[TD_ROLE_DECODE];
    double n_tokens = (double)a->n_tokens;
    if (share < 2) share = 2;
    for (uint32_t left = n; left > 0 && share > 0; left--, i = i + 1 < n ? i + 1 : 0) {
        const struct td_core_scan *w = &v->scans[workers[i]];
        if (a->n_tokens >= w->room_tokens) continue;
        share--;
        keep_best(s, workers[i],
                  w->decode.promised + n_tokens + a->n_out <= w->decode.kv_limit
                      ? w->decode.key
                      : FULL_KEY + w->decode.key);
    }
}

/* What a placement promises. CHANCE: it will meet the objectives if it joins the batch at once,
 * and by a margin of TTFT that counts by its price. SURE: by the whole margins, and with the mean
 * wait for the batch. */
enum prospect { MISSES, CHANCE, SURE };

struct found {
    /* Least cost among those with the best prospect; least cost among all with room. */
    struct td_choice best, fastest;
    enum prospect prospect; /* of best; MISSES: there is none */
    double best_cost, fastest_cost, least_ttft_need;
    uint32_t n_ties;
    bool room;
    bool lacks_decode; /* it needs a decode worker, and none of a fleet could take it */
};

/* A margin above 1 refuses requests that would more likely than not have been good. That is
 * right when what they cost would make others miss, so it counts by how scarce prefill time and
 * room on decode workers are: what lies idle has no price. */
static double price_of(const struct td_policy_view *v, bool local)
{
    double u = v->utilisation[local ? TD_ROLE_DECODE : TD_ROLE_PREFILL];
    return fmin(1, fmax(0, fmax((u - PRICE_FROM) / (PRICE_TO - PRICE_FROM),
                                v->decode_pressure / FULL_PRESSURE)));
}

/* 0..1: how often requests are held or refused for want of decode steps. */
static double decode_scarcity(const struct td_policy_view *v)
{
    return fmin(1, v->decode_pressure / FULL_PRESSURE);
}

/* What its predictions are judged by beside learned margins: the price of what it uses, and how
 * little is known of its workers. */
struct factors {
    double price, doubt_t, doubt_d;
    double most_t; /* the margin of TTFT is no more */
};

static double at_price(double margin, double price)
{
    return margin > 1 ? 1 + (margin - 1) * price : margin;
}

static double tpot_margin(const struct td_policy_view *v, const struct td_policy_ask *a,
                          uint32_t bucket)
{
    return td_latency_margin(v->latency, TD_LAT_TPOT, a->slo_class, bucket);
}

/* While sequences are refused for want of decode steps, one that takes more of them than most
 * leaves some room in each step: the same steps serve several smaller ones, which a rate of good
 * requests counts. */
static double room_for_smaller(const struct td_policy_view *v, const struct td_policy_ask *a)
{
    return 1 + ROOM_SMALLER * decode_scarcity(v) * fmin(1, fmax(0, a->size - 1));
}

static const struct td_core_worker *decode_of(const struct td_policy_view *v,
                                              const struct td_choice *c)
{
    static const struct td_core_worker nobody = {.decode = {.min_tpot_s = INFINITY}};
    return c->decode == TD_NO_WORKER ? &nobody : &v->workers[c->decode];
}

/* A short prompt with a short output, to be prefilled on its decode worker: its whole cost to the
 * sequences there is below CHEAP of what a mean request adds to them by its output alone. */
static bool cheap_local(const struct td_policy_ask *a, const struct td_choice *c)
{
    return c->local && !a->force_local &&
           a->size * a->mean_cost_s + c->stall_s < CHEAP * a->mean_cost_s;
}

/* A local placement's margin is learned mostly from large prompts, in batches that were still
 * growing. It keeps such prompts off a full worker. A cheap one is judged as a pair is: it stalls
 * the others little, and as a pair its hand-over's gap would be spread over few tokens. */
static double placement_tpot_margin(const struct td_policy_view *v, const struct td_policy_ask *a,
                                    const struct td_choice *c)
{
    double q = tpot_margin(v, a, c->tpot_bucket);
    /* waiting would not make it better, and nobody else is there to suffer */
    if (td_worker_is_idle(decode_of(v, c))) q = fmin(q, 1);
    if (cheap_local(a, c)) q = fmin(q, tpot_margin(v, a, td_latency_bucket(c->tpot_s, a->tpot_s)));
    return q;
}

struct judged {
    enum prospect prospect;
    double need_s, cost_s; /* TTFT with its margin; what the least of is chosen */
};

static struct judged judge(const struct td_policy_view *v, const struct td_policy_ask *a,
                           const struct td_choice *c, bool fits, const struct factors *x)
{
    double q_learned = td_latency_margin(v->latency, TD_LAT_TTFT, a->slo_class, c->ttft_bucket),
           q_whole = fmin(q_learned, x->most_t),
           q_t = at_price(q_whole, a->favoured ? 0 : x->price) * x->doubt_t,
           q_d = placement_tpot_margin(v, a, c) * x->doubt_d;
    double ttft_s = c->ttft_s - (a->favoured ? c->reserve_s : 0); /* for it a chance is enough */
    struct judged j = {.need_s = ttft_s * q_t,
                       .cost_s = ttft_s + c->gap_s - c->join_s + x->price * c->prefill_s};
    /* A local prefill stalls the sequences beside it, so while steps are scarce it takes more than
     * its own time. */
    if (c->local && !a->force_local) j.cost_s += decode_scarcity(v) * c->prefill_s;
    double need = j.need_s, n_gaps = fmax(1, a->n_out - 1);
    if (a->above_share) { /* what it leaves is for tenants that are below their shares */
        need *= ROOM_TTFT;
        q_d *= ROOM_TPOT;
    }
    if (!a->favoured) q_d *= room_for_smaller(v, a);
    /* what all who are there will feel */
    double step = a->n_out > 1 ? c->tpot_s - c->gap_s / n_gaps : 0;
    /* a heavier class is to find room on each worker */
    bool guarded = step * q_d * ROOM_TPOT <= a->guard_tpot_s,
         kept = step * q_d <= decode_of(v, c)->decode.min_tpot_s,
         chance = (c->tpot_s - c->join_s / n_gaps) * q_d <= a->tpot_s;
    if (!fits || !guarded || !kept || !chance || need > a->ttft_s) return j;
    bool sure = c->ttft_s * q_whole * x->doubt_t <= a->ttft_s && c->tpot_s * q_d <= a->tpot_s;
    j.prospect = sure ? SURE : CHANCE;
    return j;
}

/* Of two placements with one prospect: is c better than the best so far? As soon as that: the
 * gentler step wins; equal again: at random. */
static bool is_better(const struct td_policy_view *v, const struct td_choice *c, double cost_s,
                      struct found *f)
{
    bool as_soon = cost_s * TIE + TIE_S >= f->best_cost;
    if (cost_s > f->best_cost * TIE + TIE_S) return false;
    if (as_soon && c->tpot_s > f->best.tpot_s * TIE + TIE_S) return false;
    if (!as_soon || c->tpot_s * TIE + TIE_S < f->best.tpot_s) {
        f->n_ties = 1;
        return true;
    }
    return td_random_index(v->random, ++f->n_ties) == 0;
}

/* Is this placement good, and is it better? c holds its predictions. */
static void consider(const struct td_policy_view *v, const struct td_policy_ask *a,
                     const struct td_choice *c, bool fits, const struct factors *x, struct found *f)
{
    struct judged j = judge(v, a, c, fits, x);
    f->least_ttft_need = fmin(f->least_ttft_need, j.need_s);
    if (fits && (!f->room || j.cost_s < f->fastest_cost)) {
        f->room = true;
        f->fastest = *c;
        f->fastest_cost = j.cost_s;
    }
    if (j.prospect == MISSES || j.prospect < f->prospect) return;
    if (j.prospect > f->prospect)
        f->n_ties = 1;
    else if (!is_better(v, c, j.cost_s, f))
        return;
    bool tied = j.prospect == f->prospect && f->n_ties > 1;
    f->prospect = j.prospect;
    f->best = *c;
    f->best_cost = tied ? fmin(f->best_cost, j.cost_s) : j.cost_s;
}

static void consider_pairs(const struct td_policy_view *v, const struct td_policy_ask *a,
                           const struct side *p, const struct side *d, struct found *f)
{
    struct td_decode_part parts[MAX_CANDIDATES];
    double doubt_d[MAX_CANDIDATES];
    bool fits[MAX_CANDIDATES];
    bool asked_again = n_routers(v, TD_ROLE_PREFILL) > 1 && !a->prefill_only;
    struct factors x = {.price = price_of(v, false),
                        .most_t = asked_again ? SHARED_MARGIN : INFINITY};
    for (uint32_t j = 0; j < d->n; j++) {
        td_policy_predict_decode(v, a, d->c[j].at, &parts[j]);
        doubt_d[j] = td_worker_doubt(&v->workers[d->c[j].at], v->now_s);
        fits[j] = kv_fits(&v->workers[d->c[j].at], a, TD_POLICY_KV_CEILING);
    }
    struct td_choice c = {.verdict = TD_PLACE};
    for (uint32_t i = 0; i < p->n; i++) {
        struct td_prefill_part part;
        td_policy_predict_prefill(v, a, p->c[i].at, &part);
        x.doubt_t = td_worker_doubt(&v->workers[p->c[i].at], v->now_s);
        if (a->prefill_only) {
            x.doubt_d = 1;
            td_policy_predict_alone(&part, &c);
            consider(v, a, &c, true, &x, f);
            continue;
        }
        for (uint32_t j = 0; j < d->n; j++) {
            x.doubt_d = doubt_d[j];
            td_policy_predict_pair(v, a, &part, &parts[j], &c);
            consider(v, a, &c, fits[j], &x, f);
        }
    }
}

static void consider_local(const struct td_policy_view *v, const struct td_policy_ask *a,
                           const struct side *d, struct found *f)
{
    double price = price_of(v, true);
    for (uint32_t j = 0; j < d->n; j++) {
        const struct td_core_worker *w = &v->workers[d->c[j].at];
        struct td_choice c = {
            .verdict = TD_PLACE, .prefill = TD_NO_WORKER, .decode = d->c[j].at, .local = true};
        td_policy_predict(v, a, &c);
        bool fits = kv_fits(w, a, a->force_local ? TD_POLICY_KV_CEILING : KV_DEFLECT);
        double doubt = td_worker_doubt(w, v->now_s);
        struct factors x = {.price = price, .doubt_t = doubt, .doubt_d = doubt, .most_t = INFINITY};
        consider(v, a, &c, fits, &x, f);
    }
}

/* Could any worker keep the TPOT objective if it had nothing else to do? While none is ready,
 * perhaps. */
static bool tpot_possible(const struct td_policy_view *v, const struct td_policy_ask *a)
{
    bool ready = false;
    if (a->tpot_s >= INFINITY || a->n_out <= 1) return true;
    for (uint32_t i = 0; i < v->n_by_role[TD_ROLE_DECODE]; i++) {
        uint32_t at = v->by_role[TD_ROLE_DECODE][i];
        if (v->workers[at].state != TD_WORKER_READY || a->n_tokens + 1 > v->workers[at].kv_tokens)
            continue;
        if (td_latency_step(v->latency, at, 1, (double)a->n_tokens, 0, 0) <= a->tpot_s) return true;
        ready = true;
    }
    return !ready;
}

static bool idle(const struct td_policy_view *v, const struct td_choice *c)
{
    return (c->decode == TD_NO_WORKER || td_worker_is_idle(&v->workers[c->decode])) &&
           (c->local || td_worker_is_idle(&v->workers[c->prefill]));
}

/* Is c, which is not expected to be good, tried? By the request's number: the same in a replay,
 * and spread over classes. */
static bool explores(const struct td_policy_view *v, const struct td_policy_ask *a,
                     const struct td_choice *c)
{
    bool cheap =
        idle(v, c) && c->ttft_s <= IDLE_FACTOR * a->ttft_s && c->tpot_s <= IDLE_FACTOR * a->tpot_s;
    return (a->id * 0x9e3779b97f4a7c15ull >> 32) % (cheap ? EXPLORE_IDLE : EXPLORE) == 0;
}

/* Placements on the candidates; all: see decode_candidates. */
static void look(const struct td_policy_view *v, const struct td_policy_ask *a,
                 const struct td_prefix_match *m, size_t n_matches, bool all, struct found *f)
{
    struct side p = {.n = 0}, d = {.n = 0};
    if (!a->force_local) prefill_candidates(v, a, &p);
    bool decodes = !a->prefill_only || a->allow_deflect;
    if (decodes) decode_candidates(v, a, all, &d);
    for (size_t i = 0; i < n_matches; i++) {
        if (m[i].worker >= v->n_workers ||
            !td_worker_can_take(&v->workers[m[i].worker], a->n_tokens + 1))
            continue;
        bool is_decode = v->workers[m[i].worker].role == TD_ROLE_DECODE;
        if (is_decode ? !decodes : a->force_local) continue;
        add_holder(is_decode ? &d : &p, m[i].worker);
    }
    f->lacks_decode = !a->prefill_only && d.n == 0 && (p.n > 0 || v->n_by_role[TD_ROLE_DECODE] > 0);
    if (!a->force_local) consider_pairs(v, a, &p, &d, f);
    if (a->force_local || a->allow_deflect) consider_local(v, a, &d, f);
}

void td_policy_goodput(const struct td_policy_view *v, const struct td_policy_ask *a,
                       struct td_choice *ret_choice)
{
    struct td_prefix_match m[TD_POLICY_MAX_MATCHES];
    size_t n_matches;
    struct found f = {.best_cost = INFINITY, .fastest_cost = INFINITY, .least_ttft_need = INFINITY};
    td_policy_hits(v, a, m, &n_matches);
    bool shared = n_routers(v, TD_ROLE_DECODE) > 1;
    if (shared) look(v, a, m, n_matches, false, &f);
    if (f.prospect == MISSES) look(v, a, m, n_matches, true, &f);
    td_policy_hits_clear(v, m, n_matches);

    struct td_choice *c = ret_choice;
    *c = (struct td_choice){
        .verdict = TD_HOLD, .prefill = TD_NO_WORKER, .decode = TD_NO_WORKER, .reason = ""};
    /* it has objectives that can still be met or missed */
    bool bound = !a->started && (a->ttft_s < INFINITY || a->tpot_s < INFINITY);
    if (f.prospect != MISSES) {
        *c = f.best;
    } else if (f.room && (!bound || a->best_effort)) {
        *c = f.fastest;
    } else if (f.room && explores(v, a, &f.fastest)) {
        *c = f.fastest;
    } else if (bound && !a->best_effort &&
               (f.least_ttft_need < INFINITY ? f.least_ttft_need > a->ttft_s : a->ttft_s <= 0)) {
        c->verdict = TD_REJECT; /* with no candidate at all there is slack until the deadline
                                   itself */
        c->reason = "the TTFT objective cannot be met now";
        c->wait_s = (f.least_ttft_need < INFINITY ? f.least_ttft_need : 0) - a->ttft_s;
    }
    if (c->verdict == TD_HOLD && bound && !a->best_effort && f.room && !tpot_possible(v, a)) {
        c->verdict = TD_REJECT; /* waiting would not help */
        c->reason = "the TPOT objective is below what any worker can do";
        c->wait_s = NEVER_S;
    }
    c->no_room = c->verdict == TD_HOLD && !f.room;
    c->decode_bound =
        c->verdict != TD_PLACE &&
        (f.least_ttft_need < INFINITY ? f.least_ttft_need <= a->ttft_s : f.lacks_decode);
}
