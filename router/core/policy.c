/* policy.c - the daemon's policies but goodput (policy_goodput.c), and what all policies share: the
 * prediction of what a pair of workers would do. See policy.h.
 *
 * A plain policy is a score for prefill workers and one for decode workers: the least score wins,
 * and ties go to the lowest index.
 *
 *   name         prefill score                               decode score   source
 *   round_robin  turn                                        turn
 *   least_token  tokens to compute                           tokens held
 *   cache_aware  the longest prefix if it is over half the   requests       SGLang gateway
 *                prompt, unless loads differ too much */
#include "router/core/policy.h"

#include <math.h>
#include <string.h>

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
        if (best == TD_NO_WORKER || w->decode.promised_tokens < b->decode.promised_tokens ||
            (w->decode.promised_tokens == b->decode.promised_tokens && w->assigned < b->assigned))
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
        if (best == TD_NO_WORKER || w->prefill.free_at_s < v->workers[best].prefill.free_at_s ||
            (!(w->prefill.free_at_s > v->workers[best].prefill.free_at_s) &&
             w->assigned_tokens < v->workers[best].assigned_tokens))
            best = at;
    }
    return best;
}

double td_worker_kv_limit(const struct td_core_worker *w)
{
    const struct td_foreign *f = &w->foreign;
    uint64_t promised = w->decode.promised_tokens;
    if (promised == 0 && f->n_seqs == 0) return INFINITY;
    if (f->n_routers <= 1) return TD_POLICY_KV_CEILING * (double)w->kv_tokens;
    return (double)f->promised_then +
           (promised <= f->promised_then ? f->free_tokens : f->share_tokens);
}

double td_worker_foreign_s(const struct td_core_worker *w)
{
    return (double)w->foreign.queued_tokens * w->prefill.s_per_token;
}

/* ---- scores: least wins ---------------------------------------------------------------------- */

double td_policy_requests(const struct td_policy_view *v, const struct td_policy_ask *a,
                          uint32_t at)
{
    (void)a;
    return v->workers[at].assigned;
}
double td_policy_tokens(const struct td_policy_view *v, const struct td_policy_ask *a, uint32_t at)
{
    (void)a;
    return (double)v->workers[at].assigned_tokens;
}
double td_worker_step_s(const struct td_latency *l, uint32_t at, const struct td_core_worker *w,
                        double n_seqs, double context_tokens)
{
    double alone = td_latency_step(l, at, n_seqs, context_tokens, 0, 0);
    if (w->decode.mix_share < 1e-3) return alone;
    return alone +
           w->decode.mix_share *
               (td_latency_step(l, at, n_seqs, context_tokens, w->decode.mix_rows, 0) - alone);
}

double td_policy_step_s(const struct td_policy_view *v, const struct td_policy_ask *a, uint32_t at)
{
    const struct td_core_worker *w = &v->workers[at];
    return td_worker_step_s(v->latency, at, w,
                            w->decode.n_active + w->n_pending + w->foreign.n_seqs + 1.0,
                            (double)(w->decode.active_tokens + w->decode.reserved_tokens +
                                     w->foreign.tokens + a->n_tokens) +
                                a->n_out / 2);
}

uint32_t td_policy_least(const struct td_policy_view *v, const struct td_policy_ask *a,
                         enum td_core_role role, td_score_fn score)
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

static uint32_t pick_least_token(const struct td_policy_view *v, const struct td_policy_ask *a,
                                 enum td_core_role role)
{
    return td_policy_least(v, a, role, td_policy_tokens);
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
    if (hi - lo > 32 && hi > 1.1 * lo) return td_policy_least(v, a, role, td_policy_requests);
    return v->hit_tokens[longest] > a->n_tokens / 2 ? longest
           : role == TD_ROLE_PREFILL                ? emptiest
                                     : td_policy_least(v, a, role, td_policy_requests);
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

/* After so long without a request a worker's own mean counts half. */
#define STAGE_HALF_S 10.0

void td_stage_learn(struct td_stage *g, double now_s, double seen_s)
{
    double most_s = g->n ? STAGE_OUTLIER * g->s + 1e-3 : STAGE_FIRST_S;
    if (g->n < STAGE_REQUESTS) g->n++;
    g->s += (fmin(fmax(seen_s, 0), most_s) - g->s) / g->n;
    g->last_s = now_s;
}

double td_stage_s(const struct td_stage *own, const struct td_stage *all, double now_s)
{
    if (own->n == 0) return 0; /* a worker that came is tried */
    return all->s + (own->s - all->s) * (STAGE_HALF_S / (STAGE_HALF_S + (now_s - own->last_s)));
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
static double queue_wait(const struct td_policy_view *v, const struct td_policy_ask *a, uint32_t at)
{
    const struct td_core_worker *w = &v->workers[at];
    double all_s = fmax(0, w->prefill.free_at_s - v->now_s);
    double before_s = td_worker_foreign_s(w); /* other routers' classes are not known */
    uint32_t n_before = 0;
    for (uint32_t turn = 0; turn <= a->turn; turn++) {
        n_before += w->prefill.pending_by_turn[turn].n;
        before_s += w->prefill.pending_by_turn[turn].s;
    }
    if (n_before == w->n_pending || w->max_step_tokens == 0) return all_s;
    before_s = fmin(before_s, all_s);
    return before_s + fmin(all_s - before_s, td_latency_prefill(v->latency, at, w->max_step_tokens,
                                                                0, w->max_step_tokens));
}

/* What others have sent on its way comes before the request, an equal part of it to each prefill
 * worker. */
double td_policy_prefill_wait(const struct td_policy_view *v, const struct td_policy_ask *a,
                              uint32_t at)
{
    const struct td_core_worker *w = &v->workers[at];
    double wait_s = queue_wait(v, a, at);
    if (w->foreign.n_routers <= 1 || v->foreign_on_way <= 0) return wait_s;
    return wait_s + v->foreign_on_way / v->n_by_role[TD_ROLE_PREFILL] * w->prefill.s_per_job;
}

/* How long the request's KV waits for the link once it is computed: for what the link is behind
 * the computing, since a prompt that overtakes others' computing overtakes their transfers, too.
 * Of that, lesser classes' KV takes every other turn at most: as long as its own takes. */
static double link_wait(const struct td_policy_view *v, const struct td_policy_ask *a, uint32_t at,
                        double own_s)
{
    const struct td_core_worker *w = &v->workers[at];
    double all_s = fmax(0, w->prefill.link_free_at_s - v->now_s -
                               fmax(0, w->prefill.free_at_s - v->now_s)),
           before_s = 0;
    for (uint32_t turn = 0; turn <= a->turn; turn++) before_s += w->prefill.link_by_turn_s[turn];
    before_s = fmin(before_s, all_s);
    return before_s + fmin(all_s - before_s, own_s);
}

void td_policy_predict_prefill(const struct td_policy_view *v, const struct td_policy_ask *a,
                               uint32_t worker, struct td_prefill_part *part)
{
    const struct td_core_worker *w = &v->workers[worker];
    uint64_t hit = v->hit_tokens[worker], u = a->n_tokens - hit,
             rows = w->max_step_tokens ? w->max_step_tokens : u;
    part->worker = worker;
    part->bucket = waiting_bucket(w->n_pending + w->foreign.n_seqs, 16);
    part->hit_tokens = hit;
    part->wait_s = td_policy_prefill_wait(v, a, worker);
    part->start_s = v->start_s;
    part->prefill_s = td_latency_prefill(v->latency, worker, u, hit, w->max_step_tokens);
    /* The KV leaves chunk by chunk while later chunks are computed: what is exposed is the last
       chunk, or what the link is behind. */
    part->last_tokens = u < rows ? u : u % rows ? u % rows : rows;
    double chunks = u > rows ? (double)((u + rows - 1) / rows) : 1;
    part->hidden_s = part->prefill_s * (1 - 1 / chunks);
    part->all_s = td_latency_transfer(v->latency, w->node_class, 0,
                                      (double)(a->n_tokens * w->kv_bytes_per_token));
    part->link_wait_s = link_wait(v, a, worker, part->all_s);
    part->tail_s = td_latency_transfer(v->latency, w->node_class, 0,
                                       (double)(part->last_tokens * w->kv_bytes_per_token));
}

void td_policy_predict_decode(const struct td_policy_view *v, const struct td_policy_ask *a,
                              uint32_t worker, struct td_decode_part *part)
{
    const struct td_decode_stages *own = &v->workers[worker].decode.stages;
    *part = (struct td_decode_part){.worker = worker,
                                    .hit_tokens = v->hit_tokens[worker],
                                    .step_s = td_policy_step_s(v, a, worker),
                                    .reserve_s =
                                        td_stage_s(&own->reserve, &v->stages->reserve, v->now_s),
                                    .join_s = td_stage_s(&own->join, &v->stages->join, v->now_s)};
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
    c->join_s = d->join_s;
    c->gap_s = fmax(tail, p->link_wait_s + all - p->hidden_s) + c->join_s;
    c->tpot_s = a->n_out > 1 ? d->step_s + c->gap_s / fmax(1, a->n_out - 1) : 0;
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
           before = (double)(d->decode.local_tokens + d->foreign.queued_tokens),
           n_steps = ceil((u + before) / rows), chunk = fmin(rows, u + before);
    double n_active = (double)d->decode.n_active + d->foreign.n_seqs,
           context = (double)(d->decode.active_tokens + d->foreign.tokens);
    c->prefill_s = n_steps * td_latency_step(v->latency, c->decode, n_active, context, chunk,
                                             chunk * (double)a->n_tokens / 2);
    c->ttft_s = c->prefill_s + td_stage_s(&d->decode.stages.start, &v->stages->start, v->now_s);
    c->stall_s =
        c->prefill_s - n_steps * td_latency_step(v->latency, c->decode, n_active, context, 0, 0);
    c->gap_s = c->join_s = 0;
    c->tpot_s = a->n_out > 1 ? part.step_s : 0;
    c->ttft_bucket =
        TD_LAT_LOCAL +
        waiting_bucket(d->decode.n_active + d->n_pending + d->foreign.n_seqs, d->max_seqs);
    /* What is mixed into steps comes and goes: a prediction far below the objective says as much
       of the margin as one near it. */
    c->tpot_bucket = TD_LAT_LOCAL + TD_LAT_LIMIT_BUCKET;
}

void td_policy_place_by(const struct td_policy_view *v, const struct td_policy_ask *a,
                        td_pick_fn pick, struct td_choice *c)
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

void td_policy_round_robin(const struct td_policy_view *v, const struct td_policy_ask *a,
                           struct td_choice *c)
{
    td_policy_place_by(v, a, pick_round_robin, c);
}
void td_policy_least_token(const struct td_policy_view *v, const struct td_policy_ask *a,
                           struct td_choice *c)
{
    td_policy_place_by(v, a, pick_least_token, c);
}
void td_policy_cache_aware(const struct td_policy_view *v, const struct td_policy_ask *a,
                           struct td_choice *c)
{
    td_policy_place_by(v, a, pick_cache_aware, c);
}

/* ---- names ---- */

const struct td_policy td_policies[] = {{"goodput", td_policy_goodput},
                                        {"round_robin", td_policy_round_robin},
                                        {"least_token", td_policy_least_token},
                                        {"cache_aware", td_policy_cache_aware},
                                        {0}};

td_policy_fn td_policy_find(const struct td_policy *table, const char *name, struct td_err *err)
{
    char names[256] = "";
    size_t n = 0;
    for (const struct td_policy *p = table; p->name; p++) {
        if (!strcmp(name, p->name)) return p->place;
        int more = snprintf(names + n, sizeof names - n, "%s%s", n ? "|" : "", p->name);
        n = more > 0 && n + (size_t)more < sizeof names ? n + (size_t)more : n;
    }
    td_fail(err, TD_ERR_INVALID, "policy is \"%s\", must be one of %s", name, names);
    return NULL;
}
