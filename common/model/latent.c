/* latent.c - latent attention (DeepSeek-AI 2024, DeepSeek-V2, 2.1): K and V of all heads are
 * products of one short row of a token, and the cache holds that row alone, behind it the part of K
 * that is rotated. What a head has of K and V is never computed. With Wk and Wv the head's rows of
 * the matrix that would, and c the latent part of a token's row,
 *
 *     q . (Wk c)        = (Wk^T q) . c              "absorbed": q becomes as long as a row
 *     sum p (Wv c)      = Wv (sum p c)
 *
 * so attention is that of one KV head whose V is the beginning of K. Prefill and decode both do
 * this: computing K and V for a prompt, as other engines do, gives other bits than decode, and then
 * a row's bits would depend on who computed it (I1).
 *
 *   q, kv | norms | (q_b |) rotate | absorb, store || attention || expand
 *
 * Ranks: each has its heads of q, and all of the short rows, whose products all compute alike.
 *
 * The products of all heads run between two barriers, each cut into parts, SLAB_ROWS rows at a
 * time, which bounds their scratch and changes no bit. */
#include <string.h>

#include "common/model/model_internal.h"
#include "kernels/part.h"

#define SLAB_ROWS 64
#define ALIGN_BYTES ((size_t)64)
/* of the norms inside attention, whatever the others have */
#define NORM_EPS 1e-6f

static size_t round_up(size_t n) { return (n + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES; }

static int32_t min_rows(int32_t a, int32_t b) { return a < b ? a : b; }

static float *take(uint8_t *base, size_t *at, size_t n)
{
    float *p = base ? (float *)(void *)(base + *at) : NULL;
    *at += round_up(n * sizeof(float));
    return p;
}

static size_t place(const struct td_model *m, int32_t max_rows, uint8_t *base,
                    struct td_latent *ret)
{
    const struct td_model_config *c = &m->shard;
    const struct td_latent_config *l = &c->latent;
    *ret = (struct td_latent){0};
    if (!l->kv_rank) return 0;
    size_t rows = (size_t)max_rows, heads = (size_t)c->n_heads, at = 0;
    int32_t slab = min_rows(max_rows, SLAB_ROWS);
    ret->q = take(base, &at, l->q_rank ? rows * heads * (size_t)(l->nope + l->rope) : 0);
    ret->absorbed = take(base, &at, rows * heads * (size_t)c->head_dim);
    ret->out = take(base, &at, rows * heads * (size_t)l->v);
    size_t absorb = round_up(m->ops->gemm_scratch_bytes(slab, l->nope)),
           expand = round_up(m->ops->gemm_scratch_bytes(slab, l->kv_rank));
    ret->head_scratch_bytes = absorb > expand ? absorb : expand;
    ret->scratch = base ? base + at : NULL;
    return at + heads * ret->head_scratch_bytes;
}

size_t td_latent_bytes(const struct td_model *model, int32_t max_rows)
{
    struct td_latent unused;
    return place(model, max_rows, NULL, &unused);
}

void td_latent_place(const struct td_model *model, int32_t max_rows, uint8_t *base,
                     struct td_latent *ret)
{
    place(model, max_rows, base, ret);
}

/* A product for each head: y of head h, y_dim elements, from x of head h, rows of either apart by
 * their strides. */
struct head_products {
    const struct td_matrix *w; /* [n_heads] */
    const float *x;
    float *y;
    int64_t x_stride, y_stride;
    int32_t x_dim, y_dim, n_rows;
};

static void multiply_heads(const struct td_workspace *ws, const struct head_products *p, int part,
                           int n_parts)
{
    const struct td_model *m = ws->model;
    int32_t n_heads = m->shard.n_heads;
    for (int32_t row = 0; row < p->n_rows; row += SLAB_ROWS)
        for (int prepare = 1; prepare >= 0; prepare--) {
            for (int32_t h = 0; h < n_heads; h++) {
                TD_ASSERT(p->w[h].n_pieces == 1 && p->w[h].pieces[0].format->dtype);
                struct td_gemm_args a = {.w = &p->w[h].pieces[0],
                                         .x = p->x + row * p->x_stride + (int64_t)h * p->x_dim,
                                         .y = p->y + row * p->y_stride + (int64_t)h * p->y_dim,
                                         .scratch = ws->latent.scratch +
                                                    (size_t)h * ws->latent.head_scratch_bytes,
                                         .n_rows = min_rows(p->n_rows - row, SLAB_ROWS),
                                         .x_stride = p->x_stride,
                                         .y_stride = p->y_stride};
                /* parts take turns, since a head may have less work than there are parts */
                (prepare ? m->ops->gemm_prepare : m->ops->gemm)(&a, (part + h) % n_parts, n_parts);
            }
            td_thread_pool_barrier(m->threads);
        }
}

static void norm_in_place(const struct td_workspace *ws, const float *w, float *x, int32_t dim,
                          int64_t stride, int32_t n_rows, int part, int n_parts)
{
    struct td_rmsnorm_args a = {.x = x,
                                .w = w,
                                .out = x,
                                .n_rows = n_rows,
                                .dim = dim,
                                .x_stride = stride,
                                .out_stride = stride,
                                .eps = NORM_EPS};
    ws->model->ops->rmsnorm(&a, part, n_parts);
}

/* q of all heads from the short row that it is a product of. */
static void project_q(const struct td_workspace *ws, const struct td_layer *y,
                      const struct td_latent_rows *r, int part, int n_parts)
{
    const struct td_model *m = ws->model;
    struct td_gemm_args a = {.w = &y->q_b.pieces[0],
                             .x = r->products,
                             .y = ws->latent.q,
                             .scratch = ws->gemm_scratch,
                             .n_rows = r->n,
                             .x_stride = r->stride,
                             .y_stride = y->q_b.n_out};
    TD_ASSERT(y->q_b.n_pieces == 1);
    bool is_plain = a.w->format->dtype != 0;
    const struct td_block_ops *blocks = is_plain ? NULL : td_ops_blocks(m->ops, a.w->format);
    (is_plain ? m->ops->gemm_prepare : blocks->gemm_prepare)(&a, part, n_parts);
    td_thread_pool_barrier(m->threads);
    (is_plain ? m->ops->gemm : blocks->gemm)(&a, part, n_parts);
    td_thread_pool_barrier(m->threads);
}

/* Rotates the last part of every head of q, and of the row of K. */
static void rotate(const struct td_workspace *ws, const struct td_latent_rows *r, float *q_rope,
                   int64_t q_stride, float *k_rope, int part, int n_parts)
{
    const struct td_model_config *c = &ws->model->shard;
    struct td_rope_args a = {.x = q_rope,
                             .cos_sin = r->cos_sin,
                             .positions = r->positions,
                             .n_rows = r->n,
                             .n_heads = c->n_heads,
                             .head_dim = c->latent.rope,
                             .x_stride = q_stride};
    ws->model->ops->rope(&a, part, n_parts);
    a.x = k_rope;
    a.n_heads = 1;
    a.x_stride = r->stride;
    ws->model->ops->rope(&a, part, n_parts);
}

/* The rotated parts of q go behind the absorbed ones. */
static void copy_rotated(const struct td_workspace *ws, const struct td_latent_rows *r,
                         const float *q_rope, int64_t q_stride, int part, int n_parts)
{
    const struct td_model_config *c = &ws->model->shard;
    size_t rope = (size_t)c->latent.rope;
    int64_t lo, hi;
    td_part_range((int64_t)r->n * c->n_heads, 1, part, n_parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++)
        memcpy(ws->latent.absorbed + i * c->head_dim + c->latent.kv_rank,
               q_rope + i / c->n_heads * q_stride + (size_t)(i % c->n_heads) * rope,
               rope * sizeof(float));
}

void td_latent_prepare(struct td_workspace *ws, int32_t layer, const struct td_latent_rows *r,
                       const struct td_kv_view *kv, int part, int n_parts)
{
    const struct td_model *m = ws->model;
    const struct td_model_config *c = &m->shard;
    const struct td_latent_config *l = &c->latent;
    const struct td_layer *y = &m->layers[layer];
    int32_t n_q = l->q_rank ? l->q_rank : c->n_heads * (l->nope + l->rope);
    float *row = r->products + n_q; /* of the cache */
    float *q = l->q_rank ? ws->latent.q : r->products;
    int64_t q_stride = l->q_rank ? y->q_b.n_out : r->stride;
    float *q_rope = q + (int64_t)c->n_heads * l->nope;

    if (l->q_rank) norm_in_place(ws, y->q_norm, r->products, n_q, r->stride, r->n, part, n_parts);
    norm_in_place(ws, y->k_norm, row, l->kv_rank, r->stride, r->n, part, n_parts);
    td_thread_pool_barrier(m->threads);
    if (l->q_rank) project_q(ws, y, r, part, n_parts);
    rotate(ws, r, q_rope, q_stride, row + l->kv_rank, part, n_parts);
    td_thread_pool_barrier(m->threads);
    copy_rotated(ws, r, q_rope, q_stride, part, n_parts);
    struct td_kv_store_args store = {.kv = *kv,
                                     .k = row,
                                     .k_stride = r->stride,
                                     .positions = r->positions,
                                     .row_seq = r->row_seq,
                                     .block_tables = r->block_tables,
                                     .n_rows = r->n};
    m->ops->kv_store(&store, part, n_parts);
    struct head_products absorb = {.w = y->k_absorbed,
                                   .x = q,
                                   .y = ws->latent.absorbed,
                                   .x_stride = q_stride,
                                   .y_stride = (int64_t)c->n_heads * c->head_dim,
                                   .x_dim = l->nope,
                                   .y_dim = c->head_dim,
                                   .n_rows = r->n};
    multiply_heads(ws, &absorb, part, n_parts);
}

void td_latent_expand(struct td_workspace *ws, int32_t layer, int32_t n_rows, int part, int n_parts)
{
    const struct td_model_config *c = &ws->model->shard;
    struct head_products expand = {.w = ws->model->layers[layer].v_expanded,
                                   .x = ws->attn,
                                   .y = ws->latent.out,
                                   .x_stride = (int64_t)c->n_heads * c->latent.kv_rank,
                                   .y_stride = (int64_t)c->n_heads * c->latent.v,
                                   .x_dim = c->latent.kv_rank,
                                   .y_dim = c->latent.v,
                                   .n_rows = n_rows};
    multiply_heads(ws, &expand, part, n_parts);
}
