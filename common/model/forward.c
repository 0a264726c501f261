/* forward.c - runs one ragged batch through the layers. It is written once against td_ops and the
 * list of layers that the model's family gives (family.h); a device's steps (forward_device.c) and
 * all ranks walk the same list.
 *
 * On the host there is one td_thread_pool_run per call. Every member walks the same list of
 * entries, computes its part of each, and meets the others at a barrier. Between two entries
 * without a barrier, no part reads what another writes.
 *
 *   embed
 *   per layer    norm | prepare | qkv | (q/k norm |) rope | store | attn | prepare | o +=
 *                norm | prepare | gate,up | silu | prepare | down +=      (or experts.c)
 *   at the end   norm of the wanted rows | prepare | lm_head
 *
 * Ranks: each computes its heads and its part of the MLP. What o and down add to the residual
 * stream is summed over ranks (rank 0's term includes the stream itself and the bias), so the
 * stream is the same on all. Where q and k are normed over all heads, squares are summed, too. Of a
 * mixture each computes some experts, whole ones (experts.c). Each computes its part of the logits,
 * and rank 0 gathers them. A failure between ranks ends the walk.
 *
 * After the K and V of the last layer are stored, rows whose logits are not wanted are dropped: a
 * prefill chunk that is not the last one ends there. A row's bits do not depend on which other rows
 * are there (I1), so this changes nothing but the time. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/model_internal.h"
#include "kernels/device.h"
#include "kernels/experts.h"
#include "kernels/part.h"
#include "kernels/scaled.h"

#define ROWS_MAX (1 << 20)
/* a multiple of a cache line on host and device, and the alignment that a device's copies prefer */
#define ALIGN_BYTES ((size_t)256)

static size_t reserve(size_t *total, size_t n, size_t elem)
{
    size_t at = *total;
    *total += (n * elem + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
    return at;
}

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }

/* The most that one product takes. */
static size_t gemm_scratch_bytes(const struct td_model *m, int32_t max_rows)
{
    const struct td_ops *ops = m->ops;
    size_t n = ops->gemm_scratch_bytes(max_rows, m->shard.hidden);
    for (int32_t i = -1; i < m->shard.n_layers; i++) {
        const struct td_layer *y = i < 0 ? NULL : &m->layers[i];
        /* those that a layer does not have are of no piece */
        const struct td_matrix *of[7] = {&m->lm_head};
        if (y) of[0] = &y->qkv, of[1] = &y->o, of[2] = &y->gate_up, of[3] = &y->down;
        if (y) of[4] = &y->expert_router, of[5] = &y->shared_gate, of[6] = &y->q_b;
        for (int k = 0; k < 7 && of[k]; k++)
            for (int32_t p = 0; p < of[k]->n_pieces; p++) {
                const struct td_weight *w = &of[k]->pieces[p];
                n = max_size(n, w->format->dtype ? ops->gemm_scratch_bytes(max_rows, w->n_in)
                                                 : td_ops_blocks(ops, w->format)
                                                       ->gemm_scratch_bytes(max_rows, w->n_in));
            }
    }
    return n;
}

/* Whether what o and down return is added to x only behind a norm, a scale or the other half. */
static bool attn_has_branch(const struct td_layer *y)
{
    return y->attn_out_norm || y->spec.residual_scale != 1 || y->spec.parallel;
}

static bool mlp_has_branch(const struct td_layer *y)
{
    return y->mlp_out_norm || y->spec.residual_scale != 1 || y->spec.parallel;
}

static bool has_branch(const struct td_model *m)
{
    bool any = false;
    for (int32_t i = 0; i < m->shard.n_layers; i++)
        any |= attn_has_branch(&m->layers[i]) || mlp_has_branch(&m->layers[i]);
    return any;
}

static td_status check_rows(int32_t max_rows, int32_t max_logit_rows, struct td_err *err)
{
    if (max_rows < 1 || max_rows > ROWS_MAX)
        return td_fail(err, TD_ERR_INVALID, "workspace: max_rows is %d, must be in 1..%d", max_rows,
                       ROWS_MAX);
    if (max_logit_rows < 1 || max_logit_rows > max_rows)
        return td_fail(err, TD_ERR_INVALID,
                       "workspace: max_logit_rows is %d, must be in 1..%d (max_rows)",
                       max_logit_rows, max_rows);
    return TD_OK;
}

/* Rows of the product that q, k and v come from. In latent attention these are not what a cache of
 * so many heads would have, but far fewer. */
static size_t qkv_width(const struct td_model *m)
{
    const struct td_model_config *c = &m->shard;
    size_t n = c->latent.kv_rank
                   ? 0
                   : ((size_t)c->n_heads + 2 * (size_t)c->n_kv_heads) * (size_t)c->head_dim;
    for (int32_t i = 0; i < m->shard.n_layers; i++) n = max_size(n, (size_t)m->layers[i].qkv.n_out);
    return n;
}

/* Of one part, whatever the size of a block. */
static size_t attn_scratch_bytes(const struct td_model *m)
{
    const struct td_model_config *c = &m->shard;
    size_t n = 0;
    for (int32_t b = 8; b <= 256; b *= 2)
        n = max_size(n, m->ops->attn_scratch_bytes(c->n_heads, c->n_kv_heads, c->head_dim, b));
    return (n + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

td_status td_workspace_create(const struct td_model *model, int32_t max_rows,
                              int32_t max_logit_rows, struct td_workspace **ret_ws,
                              struct td_err *err)
{
    const struct td_model_config *c = &model->shard;
    const struct td_ops *ops = model->ops;
    td_status s = check_rows(max_rows, max_logit_rows, err);
    if (s) return s;
    struct td_workspace *ws = calloc(1, sizeof *ws);
    if (!ws) return td_fail(err, TD_ERR_NOMEM, "workspace: no memory");
    ws->model = model;
    ws->max_rows = max_rows;
    ws->max_logit_rows = max_logit_rows;
    ws->arena.memfd = -1;

    size_t rows = (size_t)max_rows, logit_rows = (size_t)max_logit_rows, hidden = (size_t)c->hidden,
           q = (size_t)c->n_heads * (size_t)c->head_dim,
           kv = (size_t)c->n_kv_heads * (size_t)c->head_dim, total = 0,
           gemm = gemm_scratch_bytes(model, max_rows);
    ws->attn_scratch_bytes = attn_scratch_bytes(model);

    size_t x = reserve(&total, rows * hidden, 4), h = reserve(&total, rows * hidden, 4),
           qkv = reserve(&total, rows * qkv_width(model), 4), attn = reserve(&total, rows * q, 4),
           mlp = reserve(
               &total, rows * 2 * max_size((size_t)c->intermediate, (size_t)c->experts.shared), 4),
           x_last = reserve(&total, logit_rows * hidden, 4),
           branch = reserve(&total, has_branch(model) ? rows * hidden : 0, 4),
           q_last = reserve(&total, logit_rows * (ops->device ? q + 2 * kv : q), 4),
           p_last = reserve(&total, logit_rows, 4), s_last = reserve(&total, logit_rows, 4),
           logits = reserve(&total, logit_rows * (size_t)c->vocab, 4), g = reserve(&total, gemm, 1),
           a = reserve(&total, ws->attn_scratch_bytes,
                       ops->device ? 1 : (size_t)td_thread_pool_size(model->threads)),
           sh = reserve(&total, sizeof(struct td_share),
                        ops->device ? 1 : (size_t)td_thread_pool_size(model->threads)),
           e = reserve(&total, td_mixture_bytes(model, max_rows), 1),
           l = reserve(&total, td_latent_bytes(model, max_rows), 1);
    uint8_t *base = NULL;
    s = ops->device ? td_forward_device_create(ws, total, &base, err)
                    : td_arena_create(total, 0, "workspace", &ws->arena, err);
    if (s) {
        td_workspace_destroy(ws);
        return s;
    }
    if (!base) base = ws->arena.base;
    ws->x = (float *)(void *)(base + x);
    ws->h = (float *)(void *)(base + h);
    ws->qkv = (float *)(void *)(base + qkv);
    ws->attn = (float *)(void *)(base + attn);
    ws->mlp = (float *)(void *)(base + mlp);
    ws->x_last = (float *)(void *)(base + x_last);
    ws->branch = has_branch(model) ? (float *)(void *)(base + branch) : NULL;
    ws->q_last = (float *)(void *)(base + q_last);
    ws->position_last = (int32_t *)(void *)(base + p_last);
    ws->seq_last = (int32_t *)(void *)(base + s_last);
    ws->logits = (float *)(void *)(base + logits);
    ws->gemm_scratch = base + g;
    ws->attn_scratch = base + a;
    ws->shares = (struct td_share *)(void *)(base + sh);
    td_mixture_place(model, max_rows, base + e, &ws->mixture);
    td_latent_place(model, max_rows, base + l, &ws->latent);
    *ret_ws = ws;
    return TD_OK;
}

void td_workspace_destroy(struct td_workspace *ws)
{
    if (!ws) return;
    td_forward_device_destroy(ws);
    td_arena_destroy(&ws->arena);
    free(ws);
}

/* One member's view of one forward. */
struct step {
    struct td_model *m;
    struct td_workspace *ws;
    const struct td_batch *batch;
    int part, n_parts;
};

/* The rows that an entry works on: all rows, or in the last layer's second half the wanted ones. */
struct rows {
    float *x;
    const float *q;
    int64_t q_stride;
    const int32_t *positions, *row_seq;
    const void *plan;
    void *device_plan;
    int32_t n;
};

/* A device runs its entries in the order in which one thread issues them. */
static void meet(const struct step *s)
{
    if (!s->m->ops->device) td_thread_pool_barrier(s->m->threads);
}

static struct td_gemm_args gemm_args(const struct step *s, const struct td_matrix *w,
                                     const float *x, int64_t x_stride, float *y, const float *bias,
                                     int32_t n_rows, bool accumulate)
{
    return (struct td_gemm_args){.w = &w->pieces[0],
                                 .x = x,
                                 .y = y,
                                 .bias = bias,
                                 .scratch = s->ws->gemm_scratch,
                                 .n_rows = n_rows,
                                 .x_stride = x_stride,
                                 .y_stride = w == &s->m->lm_head && td_comm_rank(s->m->comm) == 0
                                                 ? s->m->config.vocab
                                                 : w->n_out,
                                 .accumulate = accumulate};
}

bool td_prepared_alike(const struct td_weight *a, const struct td_weight *b)
{
    if (a->format->dtype != b->format->dtype || !a->format->scaled.kind != !b->format->scaled.kind)
        return false;
    return !a->format->scaled.kind || td_scaled_prepared_alike(a->format, b->format);
}

enum {
    SHARE_CHUNKS = 8,     /* of each part */
    SHARED_ROWS_MAX = 32, /* more rows: chunks would read the rows again from memory */
};

/* The next chunk of a share for product number `product`, or -1: there is none left. A part may be
 * in the next product already, and only when all chunks of this one are taken. */
static int take_chunk(struct td_share *share, uint64_t product)
{
    uint64_t taken = atomic_load(&share->taken);
    for (;;) {
        if (taken >> 16 > product) return -1;
        uint64_t n = taken >> 16 == product ? taken & 0xffff : 0;
        if (n >= SHARE_CHUNKS) return -1;
        if (atomic_compare_exchange_weak(&share->taken, &taken, product << 16 | (n + 1)))
            return (int)n;
    }
}

typedef void (*gemm_fn)(const struct td_gemm_args *args, int part, int n_parts);

/* A product by all parts. With few rows it takes as long as its weights are read, by each part its
 * own; whoever is done first helps the others. */
static void multiply_shared(const struct step *s, gemm_fn fn, const struct td_gemm_args *a)
{
    if (s->n_parts == 1 || s->m->ops->device || a->n_rows > SHARED_ROWS_MAX) {
        fn(a, s->part, s->n_parts);
        return;
    }
    struct td_share *shares = s->ws->shares;
    uint64_t product = ++shares[s->part].product;
    for (int i = 0; i < s->n_parts; i++) {
        int of = (s->part + i) % s->n_parts;
        for (int chunk; (chunk = take_chunk(&shares[of], product)) >= 0;)
            fn(a, of * SHARE_CHUNKS + chunk, s->n_parts * SHARE_CHUNKS);
    }
}

/* The products of pieces of `w` with prepared rows, the first piece's being `a`; of each piece that
 * wants other rows than the one before, they are prepared first. */
static void multiply(const struct step *s, const struct td_matrix *w, struct td_gemm_args a)
{
    const struct td_ops *ops = s->m->ops;
    for (int32_t i = 0; i < w->n_pieces; i++) {
        a.w = &w->pieces[i];
        const struct td_block_ops *blocks = td_ops_blocks(ops, a.w->format);
        bool is_plain = a.w->format->dtype != 0;
        if (i > 0 && !td_prepared_alike(a.w, &w->pieces[i - 1])) {
            meet(s); /* the others still read what was prepared before */
            (is_plain ? ops->gemm_prepare : blocks->gemm_prepare)(&a, s->part, s->n_parts);
            meet(s);
        }
        multiply_shared(s, is_plain ? ops->gemm : blocks->gemm, &a);
        a.y += a.w->n_out;
        if (a.bias) a.bias += a.w->n_out;
    }
    meet(s);
}

/* Whether rows that are prepared for the first piece serve all of them, and are not rounded by
 * their largest value, so that an entry which prepares what it computes may be used. */
static bool is_prepared_once(const struct td_matrix *w)
{
    const struct td_scaled *f = &w->pieces[0].format->scaled;
    bool alike = !f->kind || f->x == TD_SCALED_X_F32;
    for (int32_t i = 1; i < w->n_pieces; i++)
        alike &= td_prepared_alike(&w->pieces[i], &w->pieces[i - 1]);
    return alike;
}

static void gemm(const struct step *s, const struct td_matrix *w, const float *x, int64_t x_stride,
                 float *y, const float *bias, int32_t n_rows, bool accumulate)
{
    const struct td_ops *ops = s->m->ops;
    struct td_gemm_args a = gemm_args(s, w, x, x_stride, y, bias, n_rows, accumulate);
    const struct td_format *f = a.w->format;
    (f->dtype ? ops->gemm_prepare : td_ops_blocks(ops, f)->gemm_prepare)(&a, s->part, s->n_parts);
    meet(s);
    multiply(s, w, a);
}

/* Marks that K and V of the layer are stored, by all parts (a barrier lies between) and, with
 * several ranks, by all of them (a sum lies between). On a device they will be stored when
 * everything issued so far is done. */
static void layer_stored(const struct step *s, int32_t layer)
{
    const struct td_forward_layers *l = s->batch->layers;
    int32_t n = layer + 1;
    if (!l || s->part != 0 || (n % l->every != 0 && n != s->m->shard.n_layers)) return;
    if (s->m->ops->device)
        s->m->ops->device->mark();
    else
        l->done(l->ctx, n);
}

/* For gemm_args of a matrix whose columns are split over ranks: only rank 0 adds to what is
 * there. */
static bool adds(const struct step *s) { return td_comm_rank(s->m->comm) == 0; }

static void meet_threads(void *threads) { td_thread_pool_barrier(threads); }

/* Replaces the n_values of x of all ranks by their sum. False: the group is lost. */
static bool sum_values(const struct step *s, float *x, size_t n_values)
{
    if (td_comm_n_ranks(s->m->comm) == 1) return true;
    if (s->m->ops->device) { /* issued like an entry; errors show at the end of the step */
        s->m->ops->device->ranks->all_reduce_sum(x, n_values);
        return true;
    }
    const struct td_comm_team team = {
        .part = s->part, .n_parts = s->n_parts, .meet = meet_threads, .ctx = s->m->threads};
    td_status status = td_comm_all_reduce_sum(s->m->comm, &team, x, n_values);
    if (s->part == 0) s->ws->comm_status = status;
    return status == TD_OK;
}

/* Called after it: the same of rows x [n, hidden]. */
static bool sum_ranks(const struct step *s, float *x, int32_t n)
{
    return sum_values(s, x, (size_t)n * (size_t)s->m->shard.hidden);
}

static struct td_rmsnorm_args norm_args(const struct step *s, const float *x, const float *w,
                                        float *out, int32_t n_rows)
{
    int32_t dim = s->m->shard.hidden;
    return (struct td_rmsnorm_args){.x = x,
                                    .w = w,
                                    .out = out,
                                    .n_rows = n_rows,
                                    .dim = dim,
                                    .x_stride = dim,
                                    .out_stride = dim,
                                    .eps = s->m->shard.rms_eps,
                                    .centre = s->m->shard.norm_centres};
}

/* x += scale * norm(branch), which is computed by all ranks alike; w NULL: without a norm. */
static void add_branch(const struct step *s, const struct rows *r, const float *w, float scale)
{
    int64_t dim = s->m->shard.hidden, lo, hi;
    float *b = s->ws->branch;
    if (w) {
        struct td_rmsnorm_args n = norm_args(s, b, w, b, r->n);
        s->m->ops->rmsnorm(&n, s->part, s->n_parts);
        meet(s);
    }
    td_part_range((int64_t)r->n * dim, 16, s->part, s->n_parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) r->x[i] += scale * b[i];
    meet(s);
}

/* y = norm(x) . W^T; norm NULL: x . W^T. input: its number for whoever looks at normed inputs; -1:
 * the last norm. */
static void norm_gemm(const struct step *s, const struct rows *r, int32_t input, const float *norm,
                      const struct td_matrix *w, float *y, const float *bias)
{
    const struct td_ops *ops = s->m->ops;
    int32_t dim = s->m->shard.hidden;
    float *h = norm ? s->ws->h : r->x;
    struct td_rmsnorm_args n = norm_args(s, r->x, norm, h, r->n);
    if (!norm || !ops->rmsnorm_prepare || !is_prepared_once(w)) {
        if (norm) {
            ops->rmsnorm(&n, s->part, s->n_parts);
            meet(s);
        }
        /* nobody writes h before all parts have met again, behind the product */
        const struct td_forward_inputs *look = s->batch->inputs;
        if (look && input >= 0 && s->part == 0) look->observe(look->ctx, input, h, r->n, dim);
        gemm(s, w, h, dim, y, bias, r->n, false);
        return;
    }
    struct td_gemm_args g = gemm_args(s, w, h, dim, y, bias, r->n, false);
    ops->rmsnorm_prepare(&n, &g, s->part, s->n_parts);
    meet(s);
    multiply(s, w, g);
}

/* Qwen3 norms every head of q and of k by itself. Heads of one row lie head_dim apart, rows a whole
 * qkv apart; one call covers either the rows of a head or the heads of a row, whichever run is
 * longer, or the rows of a head that has weights of its own. */
static void norm_heads(const struct step *s, enum td_qk_norm kind, float *x, const float *w,
                       int32_t n_heads, int32_t n_rows, int64_t row_stride)
{
    int32_t dim = s->m->shard.head_dim;
    if (kind == TD_QK_NORM_ROWS) dim *= n_heads, n_heads = 1; /* one head of all */
    bool along_rows = n_rows >= n_heads || kind == TD_QK_NORM_OWN;
    struct td_rmsnorm_args a = {.w = w,
                                .n_rows = along_rows ? n_rows : n_heads,
                                .dim = dim,
                                .x_stride = along_rows ? row_stride : dim,
                                .out_stride = along_rows ? row_stride : dim,
                                .eps = s->m->shard.rms_eps,
                                .centre = s->m->shard.norm_centres};
    int32_t n_calls = along_rows ? n_heads : n_rows;
    for (int32_t i = 0; i < n_calls; i++) {
        a.out = x + (along_rows ? dim : row_stride) * i;
        if (kind == TD_QK_NORM_OWN) a.w = w + (int64_t)dim * i;
        a.x = a.out;
        s->m->ops->rmsnorm(&a, s->part, s->n_parts);
    }
}

static float sum_of_squares(const float *x, int32_t n)
{
    double sum = 0;
    for (int32_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return (float)sum;
}

static void scale_row(float *x, const float *w, int32_t n, double squares, double dim, float eps)
{
    float scale = (float)(1 / sqrt(squares / dim + (double)eps));
    for (int32_t i = 0; i < n; i++) x[i] = x[i] * scale * w[i];
}

/* q and k of a row normed over all heads, of which this rank has some: ranks add up their sums of
 * squares. A head of k that several ranks have counts once. False: the group of ranks is lost. */
static bool norm_rows_of_ranks(const struct step *s, const struct td_layer *y, float *qkv,
                               int32_t n_rows, int64_t stride)
{
    const struct td_model_config *c = &s->m->shard, *whole = &s->m->config;
    int32_t q = c->n_heads * c->head_dim, k = c->n_kv_heads * c->head_dim,
            n_ranks = td_comm_n_ranks(s->m->comm),
            sharers = n_ranks > whole->n_kv_heads ? n_ranks / whole->n_kv_heads : 1;
    bool counts = td_comm_rank(s->m->comm) % sharers == 0;
    float *sums = s->ws->attn; /* [n_rows, 2]: attention writes there later */
    int64_t lo, hi;
    td_part_range(n_rows, 1, s->part, s->n_parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        sums[2 * i] = sum_of_squares(qkv + i * stride, q);
        sums[2 * i + 1] = counts ? sum_of_squares(qkv + i * stride + q, k) : 0;
    }
    meet(s);
    if (!sum_values(s, sums, 2 * (size_t)n_rows)) return false;
    for (int64_t i = lo; i < hi; i++) {
        scale_row(qkv + i * stride, y->q_norm, q, (double)sums[2 * i],
                  (double)whole->n_heads * whole->head_dim, c->rms_eps);
        scale_row(qkv + i * stride + q, y->k_norm, k, (double)sums[2 * i + 1],
                  (double)whole->n_kv_heads * whole->head_dim, c->rms_eps);
    }
    return true;
}

/* Norms of q and k, if the layer has them. False: the group of ranks is lost. */
static bool norm_q_and_k(const struct step *s, const struct td_layer *y, float *qkv,
                         const struct rows *r, int64_t stride)
{
    const struct td_model_config *c = &s->m->shard;
    enum td_qk_norm kind = y->spec.qk_norm;
    if (!kind) return true;
    if (kind == TD_QK_NORM_ROWS && td_comm_n_ranks(s->m->comm) > 1) {
        if (!norm_rows_of_ranks(s, y, qkv, r->n, stride)) return false;
    } else {
        norm_heads(s, kind, qkv, y->q_norm, c->n_heads, r->n, stride);
        norm_heads(s, kind, qkv + (int64_t)c->n_heads * c->head_dim, y->k_norm, c->n_kv_heads, r->n,
                   stride);
    }
    meet(s);
    return true;
}

/* Norm, the product for q, k and v, rotation, and storing K and V in the cache. False: the group of
 * ranks is lost. */
static bool attend_prepare(const struct step *s, int32_t layer, const struct rows *r,
                           const struct td_kv_view *kv)
{
    const struct td_model_config *c = &s->m->shard;
    const struct td_layer *y = &s->m->layers[layer];
    const struct td_ops *ops = s->m->ops;
    int32_t q = c->n_heads * c->head_dim, n_kv = c->n_kv_heads * c->head_dim;
    int64_t stride = q + 2 * (int64_t)n_kv;
    float *qkv = s->ws->qkv;

    norm_gemm(s, r, 2 * layer, y->attn_norm, &y->qkv, qkv, y->qkv_bias);
    if (y->spec.is_latent) {
        struct td_latent_rows rows = {.products = qkv,
                                      .stride = y->qkv.n_out,
                                      .cos_sin = s->m->cos_sin[y->spec.rope],
                                      .positions = r->positions,
                                      .row_seq = r->row_seq,
                                      .block_tables = s->batch->block_tables,
                                      .n = r->n};
        td_latent_prepare(s->ws, layer, &rows, kv, s->part, s->n_parts);
        return true;
    }
    /* k's heads follow q's in the row, so one call rotates both. */
    struct td_rope_args rope = {.x = qkv,
                                .cos_sin = s->m->cos_sin[y->spec.rope],
                                .positions = r->positions,
                                .n_rows = r->n,
                                .n_heads = c->n_heads + c->n_kv_heads,
                                .head_dim = c->head_dim,
                                .x_stride = stride};
    struct td_kv_store_args store = {.kv = *kv,
                                     .k = qkv + q,
                                     .v = qkv + q + n_kv,
                                     .k_stride = stride,
                                     .v_stride = stride,
                                     .positions = r->positions,
                                     .row_seq = r->row_seq,
                                     .block_tables = s->batch->block_tables,
                                     .n_rows = r->n};
    if (ops->rope_store) {
        enum td_qk_norm qk_norm = y->spec.qk_norm;
        struct td_rmsnorm_args q_norm = {.w = y->q_norm, .eps = c->rms_eps},
                               k_norm = {.w = y->k_norm, .eps = c->rms_eps};
        ops->rope_store(qk_norm ? &q_norm : NULL, qk_norm ? &k_norm : NULL, &rope, &store, s->part,
                        s->n_parts);
        meet(s);
        return true;
    }
    if (!norm_q_and_k(s, y, qkv, r, stride)) return false;
    ops->rope(&rope, s->part, s->n_parts);
    meet(s);
    ops->kv_store(&store, s->part, s->n_parts);
    meet(s);
    return true;
}

/* Attention and its output projection, which adds to x, or is the branch of a layer whose halves
 * stand side by side. False: the group of ranks is lost. */
static bool attend(const struct step *s, int32_t layer, const struct rows *r,
                   const struct td_kv_view *kv)
{
    const struct td_model_config *c = &s->m->shard;
    const struct td_layer *y = &s->m->layers[layer];
    struct td_workspace *ws = s->ws;
    bool latent = y->spec.is_latent;
    int32_t q = c->n_heads * (latent ? c->latent.kv_rank : c->head_dim);

    struct td_attn_args attn = {.kv = *kv,
                                .q = r->q,
                                .out = ws->attn,
                                .q_stride = r->q_stride,
                                .out_stride = q,
                                .positions = r->positions,
                                .row_seq = r->row_seq,
                                .block_tables = s->batch->block_tables,
                                .n_rows = r->n,
                                .n_heads = c->n_heads,
                                .scale = y->spec.attn_scale,
                                .cap = y->spec.attn_cap,
                                .slopes = y->spec.alibi ? s->m->slopes : NULL,
                                .sinks = y->sinks,
                                .sliding_window = y->spec.window,
                                .scratch = ws->attn_scratch,
                                .scratch_bytes_per_part = ws->attn_scratch_bytes,
                                .plan = r->plan,
                                .device_plan = r->device_plan};
    s->m->ops->attn(&attn, s->part, s->n_parts);
    meet(s);
    if (latent) td_latent_expand(ws, layer, r->n, s->part, s->n_parts);
    bool apart = attn_has_branch(y);
    float *to = apart ? ws->branch : r->x;
    gemm(s, &y->o, latent ? ws->latent.out : ws->attn, latent ? c->n_heads * c->latent.v : q, to,
         adds(s) ? y->o_bias : NULL, r->n, !apart && adds(s));
    if (y->spec.parallel) return true;
    if (!sum_ranks(s, to, r->n)) return false;
    /* the others computed their terms of this sum after their stores */
    if (td_comm_n_ranks(s->m->comm) > 1) layer_stored(s, layer);
    if (apart) add_branch(s, r, y->attn_out_norm, y->spec.residual_scale);
    return true;
}

/* Sums what down returned over ranks, and adds it to x where it was not added yet. False: the group
 * of ranks is lost. */
static bool mlp_end(const struct step *s, int32_t layer, const struct rows *r)
{
    const struct td_layer *y = &s->m->layers[layer];
    bool apart = mlp_has_branch(y);
    if (!sum_ranks(s, apart ? s->ws->branch : r->x, r->n)) return false;
    if (y->spec.parallel && td_comm_n_ranks(s->m->comm) > 1) layer_stored(s, layer);
    if (apart) add_branch(s, r, y->mlp_out_norm, y->spec.residual_scale);
    return true;
}

/* Norm, gate and up, down, which adds to x. False: the group of ranks is lost. */
static bool mlp(const struct step *s, int32_t layer, const struct rows *r)
{
    const struct td_layer *y = &s->m->layers[layer];
    float *gate = s->ws->mlp;
    int32_t n = s->m->shard.intermediate;
    int64_t wide = 2 * (int64_t)n;
    const float *bias = adds(s) ? y->down_bias : NULL;
    bool apart = mlp_has_branch(y), adds_to = apart ? y->spec.parallel : adds(s);
    float *to = apart ? s->ws->branch : r->x;

    norm_gemm(s, r, 2 * layer + 1, y->spec.parallel ? y->attn_norm : y->mlp_norm, &y->gate_up, gate,
              y->gate_up_bias);
    if (s->m->ops->silu_mul_prepare && is_prepared_once(&y->down)) {
        struct td_gemm_args down = gemm_args(s, &y->down, gate, wide, to, bias, r->n, adds_to);
        s->m->ops->silu_mul_prepare(gate, gate + n, wide, wide, &down, s->part, s->n_parts);
        meet(s);
        multiply(s, &y->down, down);
        return mlp_end(s, layer, r);
    }
    if (y->spec.act == TD_ACT_SILU) {
        s->m->ops->silu_mul(gate, gate, gate + n, r->n, n, wide, wide, wide, s->part, s->n_parts);
    } else {
        struct td_act_args act = {.act = y->spec.act,
                                  .out = gate,
                                  .gate = gate,
                                  .up = gate + n,
                                  .n_rows = r->n,
                                  .dim = n,
                                  .out_stride = wide,
                                  .gate_stride = wide,
                                  .up_stride = wide};
        s->m->ops->act_mul(&act, s->part, s->n_parts);
    }
    meet(s);
    gemm(s, &y->down, gate, wide, to, bias, r->n, adds_to);
    return mlp_end(s, layer, r);
}

/* The MLP that all rows of a mixture have, of rows normed into ws->h: adds to x. Ranks: as an MLP.
 * False: the group of ranks is lost. */
static bool shared_experts(const struct step *s, int32_t layer, const struct rows *r)
{
    const struct td_layer *y = &s->m->layers[layer];
    int32_t n = s->m->shard.experts.shared;
    int64_t wide = 2 * (int64_t)n;
    float *gate = s->ws->mlp;
    gemm(s, &y->gate_up, s->ws->h, s->m->shard.hidden, gate, NULL, r->n, false);
    s->m->ops->silu_mul(gate, gate, gate + n, r->n, n, wide, wide, wide, s->part, s->n_parts);
    meet(s);
    if (y->shared_gate
            .n_pieces) { /* down is linear: what goes in may be scaled for what comes out */
        if (s->m->ops->device)
            s->m->ops->device->experts->gate(gate, s->ws->mixture.shared_gate, r->n, n, wide);
        else
            td_experts_gate(gate, s->ws->mixture.shared_gate, r->n, n, wide, s->part, s->n_parts);
        meet(s);
    }
    gemm(s, &y->down, gate, wide, r->x, NULL, r->n, adds(s));
    return sum_ranks(s, r->x, r->n);
}

/* Norm, expert router, and the experts of each row, whose weighted sum is added to x; then shared
 * experts. All ranks route all rows, which they have alike. False: the group of ranks is lost. */
static bool mixture(const struct step *s, int32_t layer, const struct rows *r)
{
    const struct td_layer *y = &s->m->layers[layer];
    int32_t dim = s->m->shard.hidden;
    struct td_rmsnorm_args n = norm_args(s, r->x, y->mlp_norm, s->ws->h, r->n);
    s->m->ops->rmsnorm(&n, s->part, s->n_parts);
    meet(s);
    gemm(s, &y->expert_router, s->ws->h, dim, s->ws->mixture.logits, y->expert_router_bias, r->n,
         false);
    if (y->shared_gate.n_pieces)
        gemm(s, &y->shared_gate, s->ws->h, dim, s->ws->mixture.shared_gate, NULL, r->n, false);
    if (s->m->ops->device)
        td_mixture_device_issue(s->ws, layer, r->x, r->positions, r->n);
    else if (!td_mixture_forward(s->ws, layer, r->x, r->n, s->part, s->n_parts))
        return false;
    return y->gate_up.n_pieces ? shared_experts(s, layer, r) : true;
}

/* Copies the wanted rows; the others end here. */
static void keep_wanted(const struct step *s, struct rows *r)
{
    const struct td_batch *b = s->batch;
    struct td_workspace *ws = s->ws;
    size_t hidden = (size_t)s->m->shard.hidden,
           q = (size_t)s->m->shard.n_heads * (size_t)s->m->shard.head_dim;
    if (s->m->ops->device) { /* whole rows of qkv: embed picks rows that lie without gaps */
        s->m->ops->embed(ws->x_last, r->x, TD_F32, b->logit_rows, b->n_logit_rows, (int32_t)hidden,
                         s->part, s->n_parts);
        s->m->ops->embed(ws->q_last, r->q, TD_F32, b->logit_rows, b->n_logit_rows,
                         (int32_t)r->q_stride, s->part, s->n_parts);
        *r = (struct rows){.x = ws->x_last,
                           .q = ws->q_last,
                           .q_stride = r->q_stride,
                           .positions = b->position_last,
                           .row_seq = b->seq_last,
                           .plan = b->plan_last,
                           .device_plan = b->device_plan_last,
                           .n = b->n_logit_rows};
        return;
    }
    for (int32_t i = s->part; i < b->n_logit_rows; i += s->n_parts) {
        size_t from = (size_t)b->logit_rows[i], to = (size_t)i;
        memcpy(ws->x_last + to * hidden, r->x + from * hidden, hidden * sizeof(float));
        memcpy(ws->q_last + to * q, r->q + from * (size_t)r->q_stride, q * sizeof(float));
        ws->position_last[i] = b->positions[from];
        ws->seq_last[i] = b->row_seq[from];
    }
    *r = (struct rows){.x = ws->x_last,
                       .q = ws->q_last,
                       .q_stride = (int64_t)q,
                       .positions = ws->position_last,
                       .row_seq = ws->seq_last,
                       .n = b->n_logit_rows};
    meet(s);
}

/* Embeddings in blocks: the rows of a packed matrix. */
static void embed_packed(const struct step *s)
{
    const struct td_model *m = s->m;
    const struct td_weight *w = m->embed_rows.n_pieces ? m->embed_rows.pieces : m->lm_head.pieces;
    const struct td_block_ops *blocks = td_ops_blocks(m->ops, w->format);
    const struct td_batch *b = s->batch;
    if (m->ops->device) {
        blocks->embed(w, b->tokens, b->n_rows, s->ws->x);
        return;
    }
    for (int32_t r = s->part; r < b->n_rows; r += s->n_parts)
        blocks->read_row(w, b->tokens[r], s->ws->x + (int64_t)r * w->n_in);
}

/* Embeddings as the family has them in the residual stream. */
static void scale_embeddings(const struct step *s, const struct rows *r)
{
    const struct td_model_config *c = &s->m->shard;
    struct td_scale_args a = {
        .x = r->x, .n_rows = r->n, .dim = c->hidden, .stride = c->hidden, .scale = c->embed_scale};
    if (c->embed_root) { /* a number of the compute type, as in training */
        float root = sqrtf((float)c->hidden);
        a.scale *= s->m->dtype == TD_BF16 ? td_bf16_to_f32(td_f32_to_bf16(root)) : root;
    }
    if (a.scale == 1) return;
    s->m->ops->scale_cap(&a, s->part, s->n_parts);
    meet(s);
}

/* This rank's logits, scaled and capped. */
static void finish_logits(const struct step *s, int32_t n_rows)
{
    const struct td_model_config *c = &s->m->config;
    int32_t rank = td_comm_rank(s->m->comm), n = s->m->lm_head.n_out;
    struct td_scale_args a = {.x = s->ws->logits,
                              .n_rows = n_rows,
                              .dim = n,
                              .stride = rank == 0 ? c->vocab : n,
                              .scale = c->logit_scale,
                              .cap = c->logit_cap};
    if (a.scale == 1 && a.cap == 0) return;
    s->m->ops->scale_cap(&a, s->part, s->n_parts);
    meet(s);
}

void td_forward_walk(struct td_model *model, struct td_workspace *ws, const struct td_batch *b,
                     int part, int n_parts)
{
    const struct step s = {.m = model, .ws = ws, .batch = b, .part = part, .n_parts = n_parts};
    const struct td_model_config *c = &model->shard;
    int32_t q = c->n_heads * c->head_dim, n_kv = c->n_kv_heads * c->head_dim;
    struct rows r = {.x = ws->x,
                     .q = c->latent.kv_rank ? ws->latent.absorbed : ws->qkv,
                     .q_stride = c->latent.kv_rank ? q : q + 2 * (int64_t)n_kv,
                     .positions = b->positions,
                     .row_seq = b->row_seq,
                     .plan = b->plan,
                     .device_plan = b->device_plan,
                     .n = b->n_rows};

    if (!model->embed)
        embed_packed(&s);
    else if (model->embed_format->dtype)
        model->ops->embed(r.x, model->embed, model->embed_format->dtype, b->tokens, r.n, c->hidden,
                          part, n_parts);
    else
        td_format_embed(model->embed_format, model->embed, b->tokens, r.n, c->hidden, part, n_parts,
                        r.x);
    meet(&s);
    scale_embeddings(&s, &r);
    for (int32_t layer = 0; layer < c->n_layers; layer++) {
        struct td_kv_view kv = {.base = b->kv_base + (size_t)layer * b->kv->layer_bytes,
                                .block_bytes =
                                    (int64_t)(b->kv_stride ? b->kv_stride : b->kv->block_bytes),
                                .n_kv_heads = c->n_kv_heads,
                                .block_size = b->kv->block_size,
                                .head_dim = c->head_dim,
                                .v_dim = c->latent.kv_rank,
                                .v_in_k = c->latent.kv_rank > 0,
                                .dtype = b->kv->dtype};
        if (!attend_prepare(&s, layer, &r, &kv)) return;
        if (td_comm_n_ranks(model->comm) == 1) layer_stored(&s, layer);
        if (layer == c->n_layers - 1) {
            /* No logits are gathered, so wait here: the other ranks' last K and V must be stored,
             * too, before they are sent on. */
            if (b->n_logit_rows == 0) {
                if (part == 0 && !model->ops->device && td_comm_n_ranks(model->comm) > 1 &&
                    !(ws->comm_status = td_comm_barrier(model->comm)))
                    layer_stored(&s, layer);
                return;
            }
            if (b->n_logit_rows < b->n_rows) keep_wanted(&s, &r);
        }
        bool is_mixture = model->layers[layer].experts != NULL;
        if (!attend(&s, layer, &r, &kv) || !(is_mixture ? mixture : mlp)(&s, layer, &r)) return;
    }
    norm_gemm(&s, &r, -1, model->final_norm, &model->lm_head, ws->logits, NULL);
    finish_logits(&s, r.n);
    if (td_comm_n_ranks(model->comm) > 1 && model->ops->device)
        model->ops->device->ranks->gather_columns(td_comm_rank(model->comm) == 0 ? NULL
                                                                                 : ws->logits,
                                                  r.n, model->logit_first, ws->logits);
    else if (part == 0 && td_comm_n_ranks(model->comm) > 1)
        ws->comm_status =
            td_comm_gather_columns(model->comm, td_comm_rank(model->comm) == 0 ? NULL : ws->logits,
                                   r.n, model->logit_first, ws->logits);
}

struct call {
    struct td_model *m;
    struct td_workspace *ws;
    struct td_batch batch;
};

static void forward_part(void *ctx, int part, int n_parts)
{
    const struct call *c = ctx;
    td_forward_walk(c->m, c->ws, &c->batch, part, n_parts);
}

td_status td_model_forward(struct td_model *model, struct td_workspace *ws,
                           const struct td_forward_args *args, float **ret_logits)
{
    const struct td_model_config *c = &model->shard;
    const struct td_kv_layout *kv = args->kv;
    if (ws->model != model || args->n_rows < 1 || args->n_rows > ws->max_rows ||
        args->n_logit_rows < 0 || args->n_logit_rows > ws->max_logit_rows ||
        args->n_logit_rows > args->n_rows)
        return TD_ERR_INVALID;
    if (kv->n_layers != c->n_layers || kv->n_kv_heads != c->n_kv_heads ||
        kv->head_dim != c->head_dim || kv->dtype != model->kv_dtype ||
        (kv->v_dim == TD_KV_V_IN_K) != (c->latent.kv_rank > 0))
        return TD_ERR_INVALID;
    if (args->layers && args->layers->every < 1) return TD_ERR_INVALID;
    if (model->ops->device) return td_forward_device(model, ws, args, ret_logits);
    struct call call = {.m = model,
                        .ws = ws,
                        .batch = {.tokens = args->tokens,
                                  .positions = args->positions,
                                  .row_seq = args->row_seq,
                                  .block_tables = args->block_tables,
                                  .n_rows = args->n_rows,
                                  .n_logit_rows = args->n_logit_rows,
                                  .kv_base = args->kv_base,
                                  .kv = kv,
                                  .kv_stride = args->kv_stride,
                                  .logit_rows = args->logit_rows,
                                  .layers = args->layers,
                                  .inputs = args->inputs}};
    ws->comm_status = TD_OK;
    td_thread_pool_run(model->threads, forward_part, &call);
    if (ws->comm_status) {
        char why[TD_COMM_REASON_MAX];
        return td_fail(args->err, ws->comm_status, "ranks: %s", td_comm_reason(model->comm, why));
    }
    *ret_logits = ws->logits;
    return TD_OK;
}
