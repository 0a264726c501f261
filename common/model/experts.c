/* experts.c - a mixture of experts in place of an MLP: each row goes to the few experts that its
 * expert router chose (kernels/experts.h), and adds what they return.
 *
 *   choose | sort by expert | gather | prepare | gate,up | silu | prepare | down | sum
 *
 * The rows of one expert are a product of their own, by the entries that any other product takes,
 * so a row's bits do not depend on who else chose the expert (I1). Between two barriers the
 * products of all experts run, each cut into parts: their number costs no barriers. Rows are taken
 * SLAB_ROWS at a time, which bounds the buffers and changes no bit. An expert that nobody chose is
 * not read.
 *
 * What the experts return is summed in the order of their ids, whatever the order of the rows. */
#include <string.h>

#include "common/model/model_internal.h"
#include "kernels/part.h"
#include "kernels/experts.h"

#define SLAB_ROWS 1024
#define ALIGN_BYTES ((size_t)64)

static size_t round_up(size_t n) { return (n + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES; }

/* Enough for the prepared rows of all experts, however `total` rows are spread over them with at
 * most `slab` on each: what a row takes, and for each expert what its product rounds up. */
static size_t scratch_bytes(const struct td_model *m, int32_t slab, int32_t n_in)
{
    size_t total = (size_t)slab * (size_t)m->config.experts.n_used, slack = 0;
    size_t per_row = (m->ops->gemm_scratch_bytes((int32_t)total, n_in) + total - 1) / total;
    for (int32_t n = 1; n <= slab; n++) {
        size_t bytes = round_up(m->ops->gemm_scratch_bytes(n, n_in)), rows = per_row * (size_t)n;
        if (bytes > rows && bytes - rows > slack) slack = bytes - rows;
    }
    size_t groups = (size_t)m->config.experts.n < total ? (size_t)m->config.experts.n : total;
    return per_row * total + groups * slack;
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
    size_t rows = (size_t)max_rows, used = (size_t)e->n_used, at = 0,
           slab = max_rows < SLAB_ROWS ? rows : SLAB_ROWS, hidden = (size_t)m->config.hidden;
    size_t gate = scratch_bytes(m, (int32_t)slab, m->config.hidden),
           down = scratch_bytes(m, (int32_t)slab, e->intermediate);
    ret->logits = (float *)(void *)take(base, &at, rows * (size_t)e->n, 4);
    ret->ids = (int32_t *)(void *)take(base, &at, rows * used, 4);
    ret->weights = (float *)(void *)take(base, &at, rows * used, 4);
    ret->first = (int32_t *)(void *)take(base, &at, (size_t)e->n + 1, 4);
    ret->row_of = (int32_t *)(void *)take(base, &at, slab * used, 4);
    ret->at = (int32_t *)(void *)take(base, &at, slab * used, 4);
    ret->rows = (float *)(void *)take(base, &at, slab * used * hidden, 4);
    ret->gate_up = (float *)(void *)take(base, &at, slab * used * 2 * (size_t)e->intermediate, 4);
    ret->scratch_bytes = gate > down ? gate : down;
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
    int32_t row0, n;
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

static void gather(const struct slab *s, const float *h)
{
    size_t dim = (size_t)s->m->config.hidden;
    int64_t lo, hi;
    td_part_range((int64_t)s->n * s->m->config.experts.n_used, 1, s->part, s->n_parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++)
        memcpy(s->mix->rows + (size_t)i * dim, h + (size_t)s->mix->row_of[i] * dim,
               dim * sizeof(float));
}

enum product { GATE_UP, DOWN };

/* This part's share of the products of all experts, or of the rows prepared for them. */
static void products(const struct slab *s, enum product which, bool prepare)
{
    const struct td_ops *ops = s->m->ops;
    const struct td_mixture *x = s->mix;
    int64_t hidden = s->m->config.hidden, wide = 2 * (int64_t)s->m->config.experts.intermediate;
    uint8_t *scratch = x->scratch;
    for (int32_t e = 0; e < s->m->config.experts.n; e++) {
        int32_t from = x->first[e], n = x->first[e + 1] - from;
        if (n == 0) continue;
        float *rows = x->rows + from * hidden, *gate_up = x->gate_up + from * wide;
        const struct td_matrix *w = which == DOWN ? &s->experts[e].down : &s->experts[e].gate_up;
        TD_ASSERT(w->n_pieces == 1 && w->pieces[0].format->dtype);
        struct td_gemm_args a = {.w = &w->pieces[0],
                                 .x = which == DOWN ? gate_up : rows,
                                 .y = which == DOWN ? rows : gate_up,
                                 .scratch = scratch,
                                 .n_rows = n,
                                 .x_stride = which == DOWN ? wide : hidden,
                                 .y_stride = which == DOWN ? hidden : wide};
        scratch += round_up(ops->gemm_scratch_bytes(n, a.w->n_in));
        TD_ASSERT((size_t)(scratch - x->scratch) <= x->scratch_bytes);
        (prepare ? ops->gemm_prepare : ops->gemm)(&a, s->part, s->n_parts);
    }
    meet(s);
}

static void slab_forward(const struct slab *s, const float *h, float *x)
{
    const struct td_model_config *c = &s->m->config;
    const struct td_mixture *mix = s->mix;
    int32_t used = c->experts.n_used, mid = c->experts.intermediate;
    int64_t wide = 2 * (int64_t)mid;
    if (s->part == 0) sort_rows(s);
    meet(s);
    gather(s, h);
    meet(s);
    products(s, GATE_UP, true);
    products(s, GATE_UP, false);
    s->m->ops->silu_mul(mix->gate_up, mix->gate_up, mix->gate_up + mid, s->n * used, mid, wide,
                        wide, wide, s->part, s->n_parts);
    meet(s);
    products(s, DOWN, true);
    products(s, DOWN, false);
    struct td_experts_sum_args a = {.x = x + (int64_t)s->row0 * c->hidden,
                                    .w = mix->weights + (int64_t)s->row0 * used,
                                    .y = mix->rows,
                                    .at = mix->at,
                                    .n_rows = s->n,
                                    .n_used = used,
                                    .dim = c->hidden};
    td_experts_sum(&a, s->part, s->n_parts);
    meet(s);
}

void td_mixture_forward(struct td_workspace *ws, int32_t layer, float *x, int32_t n_rows, int part,
                        int n_parts)
{
    const struct td_model *m = ws->model;
    const struct td_experts_config *e = &m->config.experts;
    struct td_experts_choose_args choose = {.logits = ws->mixture.logits,
                                            .n_rows = n_rows,
                                            .n_experts = e->n,
                                            .n_used = e->n_used,
                                            .normalise = e->normalise,
                                            .ids = ws->mixture.ids,
                                            .weights = ws->mixture.weights};
    td_experts_choose(&choose, part, n_parts);
    td_thread_pool_barrier(m->threads);
    for (int32_t row0 = 0; row0 < n_rows; row0 += SLAB_ROWS) {
        int32_t n = n_rows - row0 < SLAB_ROWS ? n_rows - row0 : SLAB_ROWS;
        slab_forward(
            &(struct slab){m, &ws->mixture, m->layers[layer].experts, row0, n, part, n_parts},
            ws->h, x);
    }
}
