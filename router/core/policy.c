/* policy.c - see policy.h. The baselines: each a score for prefill workers and one for decode
 * workers, least first; ties go to the lowest index.
 *
 * name            prefill score                                          decode score
 *                 source
 * round_robin     turn                                                   turn
 * least_request   requests                                               requests
 *                 vLLM production-stack
 * least_token     tokens to compute                                      tokens held
 * power_of_two    of two random ones the fewer tokens                    same
 *                 Mitzenmacher 2001; SGLang gateway
 * cache_aware     longest prefix if > 0.5, unless loads differ too much  requests
 *                 SGLang gateway
 * lmetric         (uncached tokens + 1) * (requests + 1)                 tokens held
 *                 arXiv 2603.15202
 * kv_cost         blocks to compute - blocks cached                      blocks held - blocks
 *                 cached       Dynamo's KV router
 * conductor       predicted TTFT; rejects when TTFT or TPOT > objective  predicted TPOT
 *                 Mooncake (FAST'25), algorithm 1
 * goodput         policy_goodput.c */
#include "router/core/policy.h"

#include <math.h>
#include <string.h>

#define KV_COST_BLOCK 16.0

uint32_t td_policy_keep(const struct td_policy_view *v, const struct td_policy_ask *a,
                        enum td_core_role role)
{
    uint32_t best = TD_NO_WORKER;
    for (uint32_t i = 0; i < v->n_by_role[role]; i++) {
        uint32_t at = v->by_role[role][i];
        const struct td_core_worker *w = &v->workers[at],
                                    *b = best == TD_NO_WORKER ? w : &v->workers[best];
        if (w->state != TD_WORKER_READY || w->kept || a->n_tokens + 1 > w->kv_tokens) continue;
        if (role == TD_ROLE_DECODE && a->tpot_s < INFINITY &&
            td_latency_step(v->latency, at, 1, (double)a->n_tokens, 0, 0) > a->tpot_s)
            continue;
        if (best == TD_NO_WORKER || w->promised_tokens < b->promised_tokens ||
            (w->promised_tokens == b->promised_tokens && w->assigned < b->assigned))
            best = at;
    }
    return best;
}

uint32_t td_policy_prefill_again(const struct td_policy_view *v, uint64_t n_tokens)
{
    uint32_t best = TD_NO_WORKER;
    for (uint32_t i = 0; i < v->n_by_role[TD_ROLE_PREFILL]; i++) {
        uint32_t at = v->by_role[TD_ROLE_PREFILL][i];
        const struct td_core_worker *w = &v->workers[at];
        if (!td_worker_can_take(w, n_tokens)) continue;
        if (best == TD_NO_WORKER || w->free_at_s < v->workers[best].free_at_s ||
            (!(w->free_at_s > v->workers[best].free_at_s) &&
             w->assigned_tokens < v->workers[best].assigned_tokens))
            best = at;
    }
    return best;
}

static uint32_t random_below(const struct td_policy_view *v, uint32_t n)
{
    *v->random = *v->random * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)((*v->random >> 33) % n);
}

/* ---- scores: least wins ---------------------------------------------------------------------- */

typedef double (*score_fn)(const struct td_policy_view *v, const struct td_policy_ask *a,
                           uint32_t worker);

static double requests(const struct td_policy_view *v, const struct td_policy_ask *a, uint32_t at)
{
    (void)a;
    return v->workers[at].assigned;
}
static double tokens(const struct td_policy_view *v, const struct td_policy_ask *a, uint32_t at)
{
    (void)a;
    return (double)v->workers[at].assigned_tokens;
}
static double lmetric(const struct td_policy_view *v, const struct td_policy_ask *a, uint32_t at)
{
    return ((double)(a->n_tokens - v->hit_tokens[at]) + 1) * ((double)v->workers[at].assigned + 1);
}
static double kv_cost(const struct td_policy_view *v, const struct td_policy_ask *a, uint32_t at)
{
    const struct td_core_worker *w = &v->workers[at];
    /* a decode worker computes nothing for it */
    double coming = w->role == TD_ROLE_PREFILL ? (double)a->n_tokens : 0;
    return fmax(0, ((double)w->assigned_tokens + coming) / KV_COST_BLOCK -
                       v->hit_tokens[at] / KV_COST_BLOCK);
}

static double predicted_prefill(const struct td_policy_view *v, const struct td_policy_ask *a,
                                uint32_t at)
{
    const struct td_core_worker *w = &v->workers[at];
    uint64_t hit = v->hit_tokens[at];
    return fmax(0, w->free_at_s - v->now_s) +
           td_latency_prefill(v->latency, at, a->n_tokens - hit, hit, w->max_step_tokens);
}
double td_worker_step_s(const struct td_latency *l, uint32_t at, const struct td_core_worker *w,
                        double n_seqs, double context_tokens)
{
    double alone = td_latency_step(l, at, n_seqs, context_tokens, 0, 0);
    if (w->mix_share < 1e-3) return alone;
    return alone +
           w->mix_share * (td_latency_step(l, at, n_seqs, context_tokens, w->mix_rows, 0) - alone);
}

static double predicted_step(const struct td_policy_view *v, const struct td_policy_ask *a,
                             uint32_t at)
{
    const struct td_core_worker *w = &v->workers[at];
    return td_worker_step_s(v->latency, at, w, w->n_active + w->n_pending + 1.0,
                            (double)(w->active_tokens + w->reserved_tokens + a->n_tokens) +
                                a->n_out / 2);
}

static uint32_t least(const struct td_policy_view *v, const struct td_policy_ask *a,
                      enum td_core_role role, score_fn score)
{
    uint32_t best = TD_NO_WORKER;
    double best_score = INFINITY;
    for (uint32_t i = 0; i < v->n_by_role[role]; i++) {
        uint32_t at = v->by_role[role][i];
        if (!td_worker_can_take(&v->workers[at], a->n_tokens + 1)) continue;
        double s = score(v, a, at);
        if (best == TD_NO_WORKER || s < best_score) {
            best = at;
            best_score = s;
        }
    }
    return best;
}

/* ---- picks that are no plain scores ---------------------------------------------------------- */

typedef uint32_t (*pick_fn)(const struct td_policy_view *v, const struct td_policy_ask *a,
                            enum td_core_role role);

static uint32_t pick_round_robin(const struct td_policy_view *v, const struct td_policy_ask *a,
                                 enum td_core_role role)
{
    uint32_t n = v->n_by_role[role];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t turn = (uint32_t)((v->cursor[role] + i) % n), at = v->by_role[role][turn];
        if (!td_worker_can_take(&v->workers[at], a->n_tokens + 1)) continue;
        v->cursor[role] = turn + 1;
        return at;
    }
    return TD_NO_WORKER;
}

static uint32_t pick_two(const struct td_policy_view *v, const struct td_policy_ask *a,
                         enum td_core_role role)
{
    uint32_t n = v->n_by_role[role];
    if (n == 0) return TD_NO_WORKER;
    uint32_t x = v->by_role[role][random_below(v, n)], y = v->by_role[role][random_below(v, n)];
    bool ok_x = td_worker_can_take(&v->workers[x], a->n_tokens + 1),
         ok_y = td_worker_can_take(&v->workers[y], a->n_tokens + 1);
    if (ok_x && ok_y) return v->workers[y].assigned_tokens < v->workers[x].assigned_tokens ? y : x;
    if (ok_x || ok_y) return ok_x ? x : y;
    return least(v, a, role, tokens); /* both full: somebody else may have room */
}

static uint32_t pick_least_request(const struct td_policy_view *v, const struct td_policy_ask *a,
                                   enum td_core_role role)
{
    return least(v, a, role, requests);
}
static uint32_t pick_least_token(const struct td_policy_view *v, const struct td_policy_ask *a,
                                 enum td_core_role role)
{
    return least(v, a, role, tokens);
}
static uint32_t pick_lmetric(const struct td_policy_view *v, const struct td_policy_ask *a,
                             enum td_core_role role)
{
    return least(v, a, role, role == TD_ROLE_PREFILL ? lmetric : tokens);
}
static uint32_t pick_kv_cost(const struct td_policy_view *v, const struct td_policy_ask *a,
                             enum td_core_role role)
{
    return least(v, a, role, kv_cost);
}

static uint32_t pick_cache_aware(const struct td_policy_view *v, const struct td_policy_ask *a,
                                 enum td_core_role role)
{
    uint32_t lo = UINT32_MAX, hi = 0, longest = TD_NO_WORKER, emptiest = TD_NO_WORKER;
    for (uint32_t i = 0; i < v->n_by_role[role]; i++) {
        uint32_t at = v->by_role[role][i];
        const struct td_core_worker *w = &v->workers[at];
        if (!td_worker_can_take(w, a->n_tokens + 1)) continue;
        if (w->assigned < lo) lo = w->assigned;
        if (w->assigned > hi) hi = w->assigned;
        if (longest == TD_NO_WORKER || v->hit_tokens[at] > v->hit_tokens[longest]) longest = at;
        if (emptiest == TD_NO_WORKER || w->held_tokens < v->workers[emptiest].held_tokens)
            emptiest = at;
    }
    if (longest == TD_NO_WORKER) return TD_NO_WORKER;
    /* SGLang's defaults: 32 and 1.1 */
    if (hi - lo > 32 && hi > 1.1 * lo) return least(v, a, role, requests);
    return v->hit_tokens[longest] > a->n_tokens / 2 ? longest
           : role == TD_ROLE_PREFILL                ? emptiest
                                                    : least(v, a, role, requests);
}

static uint32_t pick_conductor(const struct td_policy_view *v, const struct td_policy_ask *a,
                               enum td_core_role role)
{
    return least(v, a, role, role == TD_ROLE_PREFILL ? predicted_prefill : predicted_step);
}

/* ---- baselines: the two sides one after the other -------------------------------------------- */

void td_policy_hits(const struct td_policy_view *v, const struct td_policy_ask *a,
                    struct td_prefix_match *m, size_t *ret_n)
{
    *ret_n = v->index && a->n_hashes
                 ? td_prefix_index_match(v->index, a->hashes, a->n_hashes, m, TD_POLICY_MAX_MATCHES)
                 : 0;
    for (size_t i = 0; i < *ret_n; i++) {
        if (m[i].worker >= v->n_workers) continue;
        uint64_t hit = (uint64_t)m[i].n_blocks * a->hash_tokens;
        /* one token at least is computed */
        v->hit_tokens[m[i].worker] = (uint32_t)(hit < a->n_tokens ? hit : a->n_tokens - 1);
    }
}

void td_policy_hits_clear(const struct td_policy_view *v, const struct td_prefix_match *m, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (m[i].worker < v->n_workers) v->hit_tokens[m[i].worker] = 0;
}

/* The mean of about so many requests: a few seconds of a worker's life. */
#define STAGE_REQUESTS 20
/* A request that also waited for something else says little of the stage: it counts at most this
 * multiple of the mean. */
#define STAGE_OUTLIER 4
#define STAGE_FIRST_S 1.0 /* bounds the first, which has no mean before it */

void td_stage_learn(struct td_stage *g, double seen_s)
{
    double most_s = g->n ? STAGE_OUTLIER * g->s + 1e-3 : STAGE_FIRST_S;
    if (g->n < STAGE_REQUESTS) g->n++;
    g->s += (fmin(fmax(seen_s, 0), most_s) - g->s) / g->n;
}

double td_worker_doubt(const struct td_core_worker *w, double now_s)
{
    double silent_s = now_s - (double)w->snapshot_ns * 1e-9;
    return 1 + 0.5 * fmin(1, fmax(0, (silent_s - TD_WORKER_SILENT_S) /
                                         (TD_WORKER_UNKNOWN_S - TD_WORKER_SILENT_S)));
}

/* TTFT's margins by how many there are before the request. */
static uint32_t waiting_bucket(uint32_t n, uint32_t full)
{
    return n >= full ? TD_LAT_BUCKETS - 1 : n * (TD_LAT_BUCKETS - 1) / (full ? full : 1);
}

/* How long the worker computes what its queue holds before the request: all of it, unless some
 * of that is of lesser classes. Of those only the step that runs is waited for: queue and batch
 * are in the order of the key. */
static double prefill_wait(const struct td_policy_view *v, const struct td_policy_ask *a,
                           uint32_t at)
{
    const struct td_core_worker *w = &v->workers[at];
    double all_s = fmax(0, w->free_at_s - v->now_s), before_s = 0;
    uint32_t n_before = 0;
    for (uint32_t turn = 0; turn <= a->turn; turn++) {
        n_before += w->pending_by_turn[turn].n;
        before_s += w->pending_by_turn[turn].s;
    }
    if (n_before == w->n_pending || w->max_step_tokens == 0) return all_s;
    before_s = fmin(before_s, all_s);
    return before_s + fmin(all_s - before_s, td_latency_prefill(v->latency, at, w->max_step_tokens,
                                                                0, w->max_step_tokens));
}

/* How long the request's KV waits for the link once it is computed: for what the link is behind
 * the computing, since a prompt that overtakes others' computing overtakes their transfers, too.
 * Of that, lesser classes' KV takes every other turn at most: as long as its own takes. */
static double link_wait(const struct td_policy_view *v, const struct td_policy_ask *a, uint32_t at,
                        double own_s)
{
    const struct td_core_worker *w = &v->workers[at];
    double all_s = fmax(0, w->link_free_at_s - v->now_s - fmax(0, w->free_at_s - v->now_s)),
           before_s = 0;
    for (uint32_t turn = 0; turn <= a->turn; turn++) before_s += w->link_by_turn_s[turn];
    before_s = fmin(before_s, all_s);
    return before_s + fmin(all_s - before_s, own_s);
}

void td_policy_predict_prefill(const struct td_policy_view *v, const struct td_policy_ask *a,
                               uint32_t worker, struct td_prefill_part *r)
{
    const struct td_core_worker *w = &v->workers[worker];
    uint64_t hit = v->hit_tokens[worker], u = a->n_tokens - hit,
             rows = w->max_step_tokens ? w->max_step_tokens : u;
    r->worker = worker;
    r->bucket = waiting_bucket(w->n_pending, 16);
    r->hit_tokens = hit;
    r->wait_s = prefill_wait(v, a, worker);
    r->start_s = v->start_s;
    r->prefill_s = td_latency_prefill(v->latency, worker, u, hit, w->max_step_tokens);
    /* The KV leaves chunk by chunk while later chunks are computed: what is exposed is the last
       chunk, or what the link is behind. */
    r->last_tokens = u < rows ? u : u % rows ? u % rows : rows;
    double chunks = u > rows ? (double)((u + rows - 1) / rows) : 1;
    r->hidden_s = r->prefill_s * (1 - 1 / chunks);
    r->all_s = td_latency_transfer(v->latency, w->node_class, 0,
                                   (double)(a->n_tokens * w->kv_bytes_per_token));
    r->link_wait_s = link_wait(v, a, worker, r->all_s);
    r->tail_s = td_latency_transfer(v->latency, w->node_class, 0,
                                    (double)(r->last_tokens * w->kv_bytes_per_token));
}

void td_policy_predict_decode(const struct td_policy_view *v, const struct td_policy_ask *a,
                              uint32_t worker, struct td_decode_part *r)
{
    *r = (struct td_decode_part){.worker = worker,
                                 .hit_tokens = v->hit_tokens[worker],
                                 .step_s = predicted_step(v, a, worker),
                                 .reserve_s = v->workers[worker].reserve.s};
}

void td_policy_predict_pair(const struct td_policy_view *v, const struct td_policy_ask *a,
                            const struct td_prefill_part *p, const struct td_decode_part *d,
                            struct td_choice *c)
{
    double all = p->all_s, tail = p->tail_s;
    c->send_tokens = a->n_tokens - d->hit_tokens;
    if (d->hit_tokens) { /* it has a part: only the rest is sent */
        const struct td_core_worker *w = &v->workers[p->worker];
        uint64_t send = a->n_tokens - d->hit_tokens;
        all = td_latency_transfer(v->latency, w->node_class, 0,
                                  (double)(send * w->kv_bytes_per_token));
        tail = td_latency_transfer(
            v->latency, w->node_class, 0,
            (double)((p->last_tokens < send ? p->last_tokens : send) * w->kv_bytes_per_token));
    }
    c->prefill = p->worker;
    c->decode = d->worker;
    c->hit_tokens = p->hit_tokens;
    c->prefill_s = p->prefill_s;
    c->reserve_s = fmax(0, d->reserve_s - p->wait_s);
    c->ttft_s = p->wait_s + c->reserve_s + p->prefill_s + p->start_s;
    c->gap_s = fmax(tail, p->link_wait_s + all - p->hidden_s);
    c->tpot_s = a->n_out > 1 ? d->step_s + c->gap_s / (a->n_out - 1) : 0;
    c->ttft_bucket = p->bucket;
    c->tpot_bucket = td_latency_bucket(c->tpot_s, a->tpot_s);
}

void td_policy_predict_alone(const struct td_prefill_part *p, struct td_choice *c)
{
    *c = (struct td_choice){.verdict = c->verdict,
                            .prefill = p->worker,
                            .decode = TD_NO_WORKER,
                            .hit_tokens = p->hit_tokens,
                            .prefill_s = p->prefill_s,
                            .ttft_s = p->wait_s + p->prefill_s + p->start_s,
                            .ttft_bucket = p->bucket,
                            .reason = ""};
}

void td_policy_predict(const struct td_policy_view *v, const struct td_policy_ask *a,
                       struct td_choice *c)
{
    if (a->prefill_only && !c->local) {
        struct td_prefill_part alone;
        td_policy_predict_prefill(v, a, c->prefill, &alone);
        td_policy_predict_alone(&alone, c);
        return;
    }
    struct td_decode_part part;
    td_policy_predict_decode(v, a, c->decode, &part);
    if (!c->local) {
        struct td_prefill_part p;
        td_policy_predict_prefill(v, a, c->prefill, &p);
        td_policy_predict_pair(v, a, &p, &part, c);
        return;
    }
    const struct td_core_worker *d = &v->workers[c->decode];
    uint32_t rows = d->max_step_tokens ? d->max_step_tokens : 512;
    c->hit_tokens = part.hit_tokens;
    double u = (double)(a->n_tokens - c->hit_tokens),
           n_steps = ceil((u + (double)d->local_tokens) / rows);
    double chunk = fmin(rows, u + (double)d->local_tokens);
    c->prefill_s =
        n_steps * td_latency_step(v->latency, c->decode, d->n_active, (double)d->active_tokens,
                                  chunk, chunk * (double)a->n_tokens / 2);
    c->ttft_s = c->prefill_s + d->start.s;
    c->gap_s = 0;
    c->tpot_s = a->n_out > 1 ? part.step_s : 0;
    c->ttft_bucket = TD_LAT_LOCAL + waiting_bucket(d->n_active + d->n_pending, d->max_seqs);
    /* What is mixed into steps comes and goes: a prediction far below the objective says as much
       of the margin as one near it. */
    c->tpot_bucket = TD_LAT_LOCAL + TD_LAT_LIMIT_BUCKET;
}

static void place_by(const struct td_policy_view *v, const struct td_policy_ask *a, pick_fn pick,
                     struct td_choice *c)
{
    struct td_prefix_match m[TD_POLICY_MAX_MATCHES];
    size_t n_matches;
    uint64_t cursor[2] = {v->cursor[0], v->cursor[1]};
    td_policy_hits(v, a, m, &n_matches);
    c->local = a->force_local;
    c->prefill = c->local ? TD_NO_WORKER : pick(v, a, TD_ROLE_PREFILL);
    bool alone = a->prefill_only && c->prefill != TD_NO_WORKER,
         decodes = !a->prefill_only && (c->local || c->prefill != TD_NO_WORKER);
    c->decode = decodes ? pick(v, a, TD_ROLE_DECODE) : TD_NO_WORKER;
    if (alone || c->decode != TD_NO_WORKER) {
        c->verdict = TD_PLACE;
        td_policy_predict(v, a, c);
    } else {
        c->verdict = TD_HOLD;
        c->no_room = true;
        v->cursor[0] = cursor[0]; /* nobody's turn is used up */
        v->cursor[1] = cursor[1];
    }
    td_policy_hits_clear(v, m, n_matches);
}

static void round_robin(const struct td_policy_view *v, const struct td_policy_ask *a,
                        struct td_choice *c)
{
    place_by(v, a, pick_round_robin, c);
}
static void least_request(const struct td_policy_view *v, const struct td_policy_ask *a,
                          struct td_choice *c)
{
    place_by(v, a, pick_least_request, c);
}
static void least_token(const struct td_policy_view *v, const struct td_policy_ask *a,
                        struct td_choice *c)
{
    place_by(v, a, pick_least_token, c);
}
static void power_of_two(const struct td_policy_view *v, const struct td_policy_ask *a,
                         struct td_choice *c)
{
    place_by(v, a, pick_two, c);
}
static void cache_aware(const struct td_policy_view *v, const struct td_policy_ask *a,
                        struct td_choice *c)
{
    place_by(v, a, pick_cache_aware, c);
}
static void lmetric_policy(const struct td_policy_view *v, const struct td_policy_ask *a,
                           struct td_choice *c)
{
    place_by(v, a, pick_lmetric, c);
}
static void kv_cost_policy(const struct td_policy_view *v, const struct td_policy_ask *a,
                           struct td_choice *c)
{
    place_by(v, a, pick_kv_cost, c);
}

/* Algorithm 1: the pair of least predicted TTFT and TPOT; refused when either is over its
 * objective. No margin: that is its weakness. */
static void conductor(const struct td_policy_view *v, const struct td_policy_ask *a,
                      struct td_choice *c)
{
    place_by(v, a, pick_conductor, c);
    if (c->verdict != TD_PLACE || a->started || a->best_effort) return;
    bool late = c->ttft_s > a->ttft_s, slow = c->tpot_s > a->tpot_s;
    if (!late && !slow) return;
    c->verdict = TD_REJECT;
    c->wait_s = late ? c->ttft_s - a->ttft_s : c->tpot_s * a->n_out;
    c->reason =
        late ? "the TTFT objective cannot be met now" : "the TPOT objective cannot be met now";
}

/* ---- names ----------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    td_policy_fn fn;
} policies[] = {
    {"goodput", td_policy_goodput},   {"round_robin", round_robin},
    {"least_request", least_request}, {"least_token", least_token},
    {"power_of_two", power_of_two},   {"cache_aware", cache_aware},
    {"lmetric", lmetric_policy},      {"kv_cost", kv_cost_policy},
    {"conductor", conductor},
};

td_policy_fn td_policy_by_name(const char *name)
{
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++)
        if (!strcmp(name, policies[i].name)) return policies[i].fn;
    return NULL;
}

const char *td_policy_names(void) { return TD_CORE_POLICIES; }
