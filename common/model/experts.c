/* experts.c - a mixture of experts in place of an MLP: each row goes to the few experts that its
 * expert router chose (kernels/experts.h), and adds what they return.
 *
 *   choose | sort by expert | gather | prepare | gate,up | silu | prepare | down | sum
 *
 * The rows of one expert are a product of their own, by the entries that any other product takes,
 * so a row's bits do not depend on who else chose the expert (I1). Between two barriers the
 * products of all experts run, each cut into parts: their number costs no barriers. A matrix whose
 * pieces want their rows prepared in different ways has them prepared in each. Rows are taken
 * SLAB_ROWS at a time, which bounds the buffers and changes no bit. An expert that nobody chose is
 * not read; packed lazily (lazy_experts.h) it is packed before the first row that chose it is
 * gathered.
 *
 * What the experts return is summed in the order of their ids, whatever the order of the rows.
 *
 * Ranks (expert parallelism, after Lepikhin et al. 2021, GShard): each has some experts of every
 * layer, whole ones whose ids follow each other. All have the rows and route them alike, so nothing
 * is sent out and every rank knows what the others will return. That is gathered, expert by expert
 * and not as sums of a rank's experts: so all ranks add the same numbers in the order of ids, and
 * the bits of a mixture are those of one rank, whatever the number of ranks.
 *
 * Ranks that share experts have a share of the rows of gate and up and, where other systems cut
 * columns and sum, of the rows of down too. So what they computed of either is gathered, and no
 * element is a sum of theirs: the same bits again. It is gathered by all ranks, since a
 * communicator has no groups. */
#include <string.h>

#include "common/model/lazy_experts.h"
#include "common/model/model_internal.h"
#include "kernels/part.h"
#include "kernels/experts.h"

#define SLAB_ROWS 1024
#define ALIGN_BYTES ((size_t)64)

static size_t round_up(size_t n) { return (n + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES; }

/* Bytes of n_rows prepared rows for a product with `w`. */
static size_t prepared_bytes(const struct td_model *m, const struct td_weight *w, int32_t n_rows)
{
    const struct td_ops *ops = m->ops;
    return round_up(w->format->dtype
                        ? ops->gemm_scratch_bytes(n_rows, w->n_in)
                        : td_ops_blocks(ops, w->format)->gemm_scratch_bytes(n_rows, w->n_in));
}

/* Whether piece `i` wants its rows prepared anew, the one before having others. */
static bool is_prepared_anew(const struct td_matrix *w, int32_t i)
{
    return i == 0 || !td_prepared_alike(&w->pieces[i], &w->pieces[i - 1]);
}

/* What rows prepared for a product with `w` take: for each row, and for each expert what its
 * product rounds up, with at most `slab` rows on each. */
struct need {
    size_t row, slack;
};

static struct need need_of(const struct td_model *m, const struct td_weight *w, int32_t slab)
{
    size_t total = (size_t)slab * (size_t)m->config.experts.n_used;
    struct need need = {.row = (prepared_bytes(m, w, (int32_t)total) + total - 1) / total};
    for (int32_t n = 1; n <= slab; n++) {
        size_t bytes = prepared_bytes(m, w, n), rows = need.row * (size_t)n;
        if (bytes > rows && bytes - rows > need.slack) need.slack = bytes - rows;
    }
    return need;
}

/* Enough for the prepared rows of all experts of any layer, however `slab` rows are spread over
 * them. What a row takes depends on its width and on which entries multiply it. */
static size_t scratch_bytes(const struct td_model *m, int32_t slab)
{
    int32_t n_experts = m->config.experts.n;
    struct need seen[2][3] = {{{0}}}, most = {0};
    for (int32_t i = 0; i < m->config.n_layers * n_experts * 2; i++) {
        const struct td_expert *experts = m->layers[i / 2 / n_experts].experts;
        if (!experts) continue;
        const struct td_expert *e = &experts[i / 2 % n_experts];
        const struct td_matrix *w = i % 2 ? &e->down : &e->gate_up;
        struct need sum = {0};
        for (int32_t p = 0; p < w->n_pieces; p++) {
            const struct td_format *f = w->pieces[p].format;
            struct need *need = &seen[i % 2][f->dtype ? 0 : f->scaled.kind ? 1 : 2];
            if (!is_prepared_anew(w, p)) continue;
            if (!need->row) *need = need_of(m, &w->pieces[p], slab);
            sum.row += need->row;
            sum.slack += need->slack;
        }
        if (sum.row > most.row) most.row = sum.row;
        if (sum.slack > most.slack) most.slack = sum.slack;
    }
    size_t total = (size_t)slab * (size_t)m->config.experts.n_used;
    return most.row * total + ((size_t)n_experts < total ? (size_t)n_experts : total) * most.slack;
}

/* How many ranks share each expert. */
static int32_t n_shares(const struct td_model *m)
{
    return td_comm_n_ranks(m->comm) / m->expert_ranks;
}

static uint8_t *take(uint8_t *base, size_t *at, size_t n, size_t elem)
{
    uint8_t *p = base ? base + *at : NULL;
    *at += round_up(n * elem);
    return p;
}

/* Fills *ret for buffers from `base` on (NULL: only counts); returns the bytes. */
static size_t place(const struct td_model *m, int32_t max_rows, uint8_t *base,
                    struct td_mixture *ret)
{
    const struct td_experts_config *e = &m->config.experts;
    *ret = (struct td_mixture){0};
    if (!e->n) return 0;
    if (m->ops->device) return td_mixture_device_place(m, max_rows, base, ret);
    size_t rows = (size_t)max_rows, used = (size_t)e->n_used, at = 0, mid = (size_t)e->intermediate,
           slab = max_rows < SLAB_ROWS ? rows : SLAB_ROWS, hidden = (size_t)m->config.hidden;
    ret->logits = (float *)(void *)take(base, &at, rows * (size_t)e->n, 4);
    ret->ids = (int32_t *)(void *)take(base, &at, rows * used, 4);
    ret->weights = (float *)(void *)take(base, &at, rows * used, 4);
    ret->shared_gate = (float *)(void *)take(base, &at, rows, 4);
    ret->first = (int32_t *)(void *)take(base, &at, (size_t)e->n + 1, 4);
    ret->counts = (struct td_expert_counts *)(void *)take(base, &at, 1, sizeof *ret->counts);
    ret->had = (uint64_t *)(void *)take(base, &at, (size_t)m->config.n_layers * (size_t)e->n, 8);
    ret->of_layer = (struct td_expert_layer *)(void *)take(base, &at, (size_t)m->config.n_layers,
                                                           sizeof *ret->of_layer);
    ret->row_of = (int32_t *)(void *)take(base, &at, slab * used, 4);
    ret->at = (int32_t *)(void *)take(base, &at, slab * used, 4);
    ret->rows = (float *)(void *)take(base, &at, slab * used * hidden, 4);
    ret->gate_up = (float *)(void *)take(base, &at, slab * used * 2 * (size_t)e->intermediate, 4);
    if (n_shares(m) > 1)
        ret->shares =
            (float *)(void *)take(base, &at, slab * used * (hidden > mid ? hidden : mid), 4);
    ret->scratch_bytes = scratch_bytes(m, (int32_t)slab);
    ret->scratch = take(base, &at, ret->scratch_bytes, 1);
    return at;
}

size_t td_mixture_bytes(const struct td_model *model, int32_t max_rows)
{
    struct td_mixture unused;
    return place(model, max_rows, NULL, &unused);
}

void td_mixture_place(const struct td_model *model, int32_t max_rows, uint8_t *base,
                      struct td_mixture *ret)
{
    place(model, max_rows, base, ret);
}

/* Rows [row0, row0 + n) of a forward, as one part sees them. */
struct slab {
    const struct td_model *m;
    const struct td_mixture *mix;
    const struct td_expert *experts;
    enum td_act act;
    int32_t layer, row0, n;
    int32_t expert, expert_end; /* this rank's */
    int32_t n_shares;           /* ranks that share each */
    int part, n_parts;
};

static void meet(const struct slab *s) { td_thread_pool_barrier(s->m->threads); }

/* Counting sort of (row, expert) by expert, stable: fills first, row_of and at. */
static void sort_rows(const struct slab *s)
{
    const struct td_mixture *x = s->mix;
    int32_t n_experts = s->m->config.experts.n, used = s->m->config.experts.n_used;
    const int32_t *ids = x->ids + (int64_t)s->row0 * used;
    memset(x->first, 0, ((size_t)n_experts + 1) * sizeof *x->first);
    for (int32_t i = 0; i < s->n * used; i++) x->first[ids[i] + 1]++;
    for (int32_t e = 0; e < n_experts; e++) x->first[e + 1] += x->first[e];
    for (int32_t i = 0; i < s->n * used; i++) {
        int32_t to = x->first[ids[i]]++;
        x->row_of[to] = s->row0 + i / used;
        x->at[i] = to;
    }
    /* each is now the first of the next expert */
    memmove(x->first + 1, x->first, (size_t)n_experts * sizeof *x->first);
    x->first[0] = 0;
}

/* Adds what sort_rows has found to the counts. One part alone. */
static void count_rows(const struct slab *s)
{
    const struct td_mixture *x = s->mix;
    int32_t n = s->m->config.experts.n, n_parts = s->m->expert_ranks;
    uint64_t *had = x->had + (int64_t)s->layer * n, busiest = 0, busiest_part = 0;
    struct td_expert_layer *layer = &x->of_layer[s->layer];
    for (int32_t e = 0; e < n; e++) {
        uint64_t rows = (uint64_t)(x->first[e + 1] - x->first[e]);
        had[e] += rows;
        if (had[e] > layer->most) layer->most = had[e];
        if (rows > busiest) busiest = rows;
        x->counts->active += rows > 0;
    }
    for (int32_t p = 0; p < n_parts; p++) {
        uint64_t rows = (uint64_t)(x->first[td_expert_first(n, p + 1, n_parts)] -
                                   x->first[td_expert_first(n, p, n_parts)]);
        if (rows > busiest_part) busiest_part = rows;
    }
    layer->rows += (uint64_t)x->first[n];
    x->counts->rows += (uint64_t)x->first[n];
    x->counts->busiest_rows += busiest;
    x->counts->busiest_part_rows += busiest_part;
}

void td_workspace_expert_counts(const struct td_workspace *ws, struct td_expert_counts *ret)
{
    const struct td_mixture *x = &ws->mixture;
    *ret = (struct td_expert_counts){0};
    if (!x->counts) return;
    *ret = *x->counts;
    for (int32_t i = 0; i < ws->model->config.n_layers; i++) {
        const struct td_expert_layer *y = &x->of_layer[i];
        if (!y->rows) continue;
        double share = (double)y->most * ws->model->config.experts.n / (double)y->rows;
        if (share > ret->busiest_share) ret->busiest_share = share;
    }
}

static void gather(const struct slab *s, const float *h)
{
    size_t dim = (size_t)s->m->config.hidden;
    int64_t first = s->mix->first[s->expert], lo, hi;
    td_part_range(s->mix->first[s->expert_end] - first, 1, s->part, s->n_parts, &lo, &hi);
    for (int64_t i = first + lo; i < first + hi; i++)
        memcpy(s->mix->rows + (size_t)i * dim, h + (size_t)s->mix->row_of[i] * dim,
               dim * sizeof(float));
}

/* Where in rows of `width`, sorted by expert, that of rank r begins: rows of its experts of its
 * share of the width, dense, and behind them those of the next share. */
static int64_t share_at(const struct slab *s, int32_t r, int64_t width)
{
    int32_t n = s->m->config.experts.n, n_parts = s->m->expert_ranks, part = r / s->n_shares;
    int64_t from = s->mix->first[td_expert_first(n, part, n_parts)],
            to = part < n_parts ? s->mix->first[td_expert_first(n, part + 1, n_parts)] : from;
    return from * width + r % s->n_shares * (to - from) * (width / s->n_shares);
}

enum product { GATE_UP, DOWN };

/* This part's share of one expert's product, or of its rows' preparation at *scratch, which is then
 * behind them. */
static void product(const struct slab *s, const struct td_matrix *w, struct td_gemm_args a,
                    bool prepare, uint8_t **scratch)
{
    const struct td_ops *ops = s->m->ops;
    for (int32_t i = 0; i < w->n_pieces; i++) {
        bool is_anew = is_prepared_anew(w, i);
        a.w = &w->pieces[i];
        const struct td_block_ops *blocks = td_ops_blocks(ops, a.w->format);
        bool is_plain = a.w->format->dtype != 0;
        if (is_anew) {
            a.scratch = *scratch;
            *scratch += prepared_bytes(s->m, a.w, a.n_rows);
            TD_ASSERT((size_t)(*scratch - s->mix->scratch) <= s->mix->scratch_bytes);
        }
        if (!prepare)
            (is_plain ? ops->gemm : blocks->gemm)(&a, s->part, s->n_parts);
        else if (is_anew)
            (is_plain ? ops->gemm_prepare : blocks->gemm_prepare)(&a, s->part, s->n_parts);
        a.y += a.w->n_out;
        if (a.bias) a.bias += a.w->n_out;
    }
}

/* The products of all experts of this rank, or the rows prepared for them. */
static void products(const struct slab *s, enum product which, bool prepare)
{
    const struct td_mixture *x = s->mix;
    int64_t hidden = s->m->config.hidden, wide = 2 * (int64_t)s->m->config.experts.intermediate;
    uint8_t *scratch = x->scratch;
    for (int32_t e = s->expert; e < s->expert_end; e++) {
        int32_t from = x->first[e], n = x->first[e + 1] - from;
        if (n == 0) continue;
        float *rows = x->rows + from * hidden, *gate_up = x->gate_up + from * wide;
        int64_t down_width = hidden / s->n_shares;
        float *down = rows;
        if (x->shares)
            down = x->shares + share_at(s, td_comm_rank(s->m->comm), hidden) +
                   (from - x->first[s->expert]) * down_width;
        struct td_gemm_args a = {.x = which == DOWN ? gate_up : rows,
                                 .y = which == DOWN ? down : gate_up,
                                 .bias = which == DOWN ? s->experts[e].down_bias
                                                       : s->experts[e].gate_up_bias,
                                 .n_rows = n,
                                 .x_stride = which == DOWN ? wide : hidden,
                                 .y_stride = which == DOWN ? down_width : wide};
        product(s, which == DOWN ? &s->experts[e].down : &s->experts[e].gate_up, a, prepare,
                &scratch);
    }
    meet(s);
}

/* SwiGLU of the rows of this rank's experts, or the family's other gate: in place, or where its
 * share goes. */
static void activate(const struct slab *s)
{
    int32_t whole = s->m->config.experts.intermediate, mid = whole / s->n_shares,
            from = s->mix->first[s->expert], n = s->mix->first[s->expert_end] - from;
    int64_t wide = 2 * (int64_t)whole, out_stride = wide;
    float *gate = s->mix->gate_up + from * wide, *out = gate;
    if (s->mix->shares) {
        out = s->mix->shares + share_at(s, td_comm_rank(s->m->comm), whole);
        out_stride = mid;
    }
    if (s->act == TD_ACT_SILU) {
        s->m->ops->silu_mul(out, gate, gate + mid, n, mid, out_stride, wide, wide, s->part,
                            s->n_parts);
        return;
    }
    struct td_act_args act = {.act = s->act,
                              .out = out,
                              .gate = gate,
                              .up = gate + mid,
                              .n_rows = n,
                              .dim = mid,
                              .out_stride = out_stride,
                              .gate_stride = wide,
                              .up_stride = wide};
    s->m->ops->act_mul(&act, s->part, s->n_parts);
}

static void meet_threads(void *threads) { td_thread_pool_barrier(threads); }

/* What other ranks computed of x, rows of `width`. False: the group of ranks is lost. */
static bool gather_ranks(const struct slab *s, float *x, int64_t width, td_status *ret_status)
{
    struct td_comm *comm = s->m->comm;
    int32_t n_ranks = td_comm_n_ranks(comm);
    size_t first[TD_COMM_MAX_RANKS + 1];
    if (n_ranks == 1) return true;
    for (int32_t r = 0; r < n_ranks; r++) first[r] = (size_t)share_at(s, r, width);
    first[n_ranks] = (size_t)(s->mix->first[s->m->config.experts.n] * width);
    const struct td_comm_team team = {
        .part = s->part, .n_parts = s->n_parts, .meet = meet_threads, .ctx = s->m->threads};
    td_status status = td_comm_gather_parts(comm, &team, x, first);
    if (s->part == 0) *ret_status = status;
    return status == TD_OK;
}

/* The shares of the rows of part `of` of the experts, of `width` together, side by side in `to`. */
static void join_part(const struct slab *s, int32_t of, int64_t width, float *to, int64_t stride)
{
    int32_t n = s->m->config.experts.n, n_parts = s->m->expert_ranks;
    int64_t from = s->mix->first[td_expert_first(n, of, n_parts)],
            end = s->mix->first[td_expert_first(n, of + 1, n_parts)], each = width / s->n_shares,
            lo, hi;
    td_part_range(end - from, 1, s->part, s->n_parts, &lo, &hi);
    for (int32_t k = 0; k < s->n_shares; k++) {
        const float *share = s->mix->shares + share_at(s, of * s->n_shares + k, width);
        for (int64_t i = lo; i < hi; i++)
            memcpy(to + (from + i) * stride + k * each, share + i * each,
                   (size_t)each * sizeof(float));
    }
}

/* Behind the gate: what goes into down, of this rank's experts. False as above. */
static bool join_gate(const struct slab *s, td_status *ret_status)
{
    int64_t mid = s->m->config.experts.intermediate;
    if (!s->mix->shares) return true;
    if (!gather_ranks(s, s->mix->shares, mid, ret_status)) return false;
    join_part(s, td_comm_rank(s->m->comm) / s->n_shares, mid, s->mix->gate_up, 2 * mid);
    meet(s);
    return true;
}

/* Behind down: what all experts returned. False as above. */
static bool join_down(const struct slab *s, td_status *ret_status)
{
    int64_t hidden = s->m->config.hidden;
    if (!s->mix->shares) return gather_ranks(s, s->mix->rows, hidden, ret_status);
    if (!gather_ranks(s, s->mix->shares, hidden, ret_status)) return false;
    for (int32_t of = 0; of < s->m->expert_ranks; of++)
        join_part(s, of, hidden, s->mix->rows, hidden);
    meet(s);
    return true;
}

/* Those of this rank's experts that have rows and are not packed yet. */
static void pack_chosen(const struct slab *s)
{
    const struct td_lazy_team team = {
        .part = s->part, .n_parts = s->n_parts, .meet = meet_threads, .ctx = s->m->threads};
    if (s->m->lazy_experts)
        td_lazy_experts_need(s->m->lazy_experts, &team, s->layer, s->mix->first, s->expert,
                             s->expert_end);
}

static bool slab_forward(const struct slab *s, const float *h, float *x, td_status *ret_status)
{
    const struct td_model_config *c = &s->m->config;
    const struct td_mixture *mix = s->mix;
    int32_t used = c->experts.n_used;
    if (s->part == 0) {
        sort_rows(s);
        count_rows(s);
    }
    meet(s);
    pack_chosen(s);
    gather(s, h);
    meet(s);
    products(s, GATE_UP, true);
    products(s, GATE_UP, false);
    activate(s);
    meet(s);
    if (!join_gate(s, ret_status)) return false;
    products(s, DOWN, true);
    products(s, DOWN, false);
    if (!join_down(s, ret_status)) return false;
    struct td_experts_sum_args a = {.x = x + (int64_t)s->row0 * c->hidden,
                                    .w = mix->weights + (int64_t)s->row0 * used,
                                    .y = mix->rows,
                                    .at = mix->at,
                                    .n_rows = s->n,
                                    .n_used = used,
                                    .dim = c->hidden};
    td_experts_sum(&a, s->part, s->n_parts);
    meet(s);
    return true;
}

struct td_experts_choose_args td_mixture_choice(const struct td_workspace *ws, int32_t layer,
                                                int32_t n_rows)
{
    const struct td_experts_config *e = &ws->model->config.experts;
    return (struct td_experts_choose_args){.logits = ws->mixture.logits,
                                           .n_rows = n_rows,
                                           .n_experts = e->n,
                                           .n_used = e->n_used,
                                           .rule = e->rule,
                                           .bias = ws->model->layers[layer].expert_bias,
                                           .ids = ws->mixture.ids,
                                           .weights = ws->mixture.weights};
}

bool td_mixture_forward(struct td_workspace *ws, int32_t layer, float *x, int32_t n_rows, int part,
                        int n_parts)
{
    const struct td_model *m = ws->model;
    const struct td_experts_config *e = &m->config.experts;
    struct td_experts_choose_args choose = td_mixture_choice(ws, layer, n_rows);
    int32_t shares = n_shares(m), rank = td_comm_rank(m->comm), mine = rank / shares;
    td_experts_choose(&choose, part, n_parts);
    td_thread_pool_barrier(m->threads);
    for (int32_t row0 = 0; row0 < n_rows; row0 += SLAB_ROWS) {
        int32_t n = n_rows - row0 < SLAB_ROWS ? n_rows - row0 : SLAB_ROWS;
        const struct slab slab = {.m = m,
                                  .mix = &ws->mixture,
                                  .experts = m->layers[layer].experts,
                                  .act = m->layers[layer].spec.act,
                                  .layer = layer,
                                  .row0 = row0,
                                  .n = n,
                                  .expert = td_expert_first(e->n, mine, m->expert_ranks),
                                  .expert_end = td_expert_first(e->n, mine + 1, m->expert_ranks),
                                  .n_shares = shares,
                                  .part = part,
                                  .n_parts = n_parts};
        if (!slab_forward(&slab, ws->h, x, &ws->comm_status)) return false;
    }
    return true;
}
