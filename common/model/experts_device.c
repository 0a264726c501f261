/* experts_device.c - a mixture of experts on a device: experts.c's steps as entries of its table
 * (kernels/device.h), issued without waiting for what the router chose.
 *
 *   choose | sort by expert | prepare | gate,up | silu | down | sum
 *
 * Experts of a layer have one plain format and lie at one distance from one another (weights.c), so
 * a product of all of them is one launch. Rows are taken SLAB_ROWS at a time. A slab reads the
 * weights of all its experts once: with fewer rows, prefill would wait for memory. */
#include "common/model/model_internal.h"
#include "kernels/device.h"

#define SLAB_ROWS 4096
#define ALIGN_BYTES ((size_t)256)

static void *take(uint8_t *base, size_t *at, size_t n, size_t elem)
{
    void *p = base ? base + *at : NULL;
    *at += (n * elem + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
    return p;
}

/* Bytes from one expert's matrix to that of another one, of the same kind. */
static int64_t stride_of(const struct td_matrix *first, const struct td_matrix *second)
{
    return (const uint8_t *)second->pieces[0].data - (const uint8_t *)first->pieces[0].data;
}

/* That all experts of a layer lie at one distance, as the products take them. */
static void check_strides(const struct td_model *m)
{
    for (int32_t i = 0; i < m->config.n_layers; i++) {
        const struct td_expert *first = m->layers[i].experts;
        for (int32_t e = 1; first && e < m->config.experts.n; e++) {
            TD_ASSERT(stride_of(&first->gate_up, &first[e].gate_up) ==
                      e * stride_of(&first->gate_up, &first[1].gate_up));
            TD_ASSERT(stride_of(&first->down, &first[e].down) ==
                      e * stride_of(&first->down, &first[1].down));
        }
    }
}

size_t td_mixture_device_place(const struct td_model *m, int32_t max_rows, uint8_t *base,
                               struct td_mixture *ret)
{
    const struct td_experts_config *e = &m->config.experts;
    int32_t slab = max_rows < SLAB_ROWS ? max_rows : SLAB_ROWS, pairs = slab * e->n_used,
            mid = e->intermediate, hidden = m->config.hidden;
    size_t rows = (size_t)max_rows, used = (size_t)e->n_used, n = (size_t)pairs, at = 0,
           wide = m->ops->gemm_scratch_bytes(pairs, hidden > mid ? hidden : mid);
    check_strides(m);
    *ret = (struct td_mixture){
        .logits = take(base, &at, rows * (size_t)e->n, 4),
        .ids = take(base, &at, rows * used, 4),
        .weights = take(base, &at, rows * used, 4),
        .shared_gate = take(base, &at, rows, 4),
        .row_of = take(base, &at, n, 4),
        .at = take(base, &at, n, 4),
        .tiles = take(base, &at, m->ops->device->experts->tile_ints(slab, e->n_used, e->n), 4),
        .rows = take(base, &at, n * (size_t)hidden, 4),
        .gate_up = take(base, &at, n * 2 * (size_t)mid, 4),
        .scratch = take(base, &at, wide, 1),
        .scratch_bytes = wide};
    return at;
}

/* Rows [row0, row0 + n) of a forward. */
static void slab_issue(const struct td_workspace *ws, int32_t layer, float *x, int32_t row0,
                       int32_t n)
{
    const struct td_model *m = ws->model;
    const struct td_device_experts *ex = m->ops->device->experts;
    const struct td_experts_config *e = &m->config.experts;
    const struct td_expert *experts = m->layers[layer].experts, *second = experts + (e->n > 1);
    const struct td_mixture *mix = &ws->mixture;
    int32_t mid = e->intermediate, hidden = m->config.hidden, at = row0 * e->n_used;
    int64_t wide = 2 * (int64_t)mid;
    const struct td_device_experts_order order = {.n_rows = n,
                                                  .n_used = e->n_used,
                                                  .n_experts = e->n,
                                                  .row_of = mix->row_of,
                                                  .at = mix->at,
                                                  .tiles = mix->tiles};
    const struct td_device_experts_gemm_args gate_up = {
        .order = &order,
        .w = experts->gate_up.pieces,
        .w_stride = stride_of(&experts->gate_up, &second->gate_up),
        .x = ws->h + (int64_t)row0 * hidden,
        .y = mix->gate_up,
        .scratch = mix->scratch,
        .x_stride = hidden,
        .y_stride = wide};
    const struct td_device_experts_gemm_args down = {.order = &order,
                                                     .w = experts->down.pieces,
                                                     .w_stride =
                                                         stride_of(&experts->down, &second->down),
                                                     .y = mix->rows,
                                                     .scratch = mix->scratch,
                                                     .y_stride = hidden};
    const struct td_gemm_args into = {
        .w = down.w, .scratch = mix->scratch, .n_rows = n * e->n_used};
    const struct td_experts_sum_args sum = {.x = x + (int64_t)row0 * hidden,
                                            .w = mix->weights + at,
                                            .y = mix->rows,
                                            .at = mix->at,
                                            .n_rows = n,
                                            .n_used = e->n_used,
                                            .dim = hidden};
    ex->sort(mix->ids + at, &order);
    ex->prepare(&gate_up);
    ex->gemm(&gate_up);
    m->ops->silu_mul_prepare(mix->gate_up, mix->gate_up + mid, wide, wide, &into, 0, 1);
    ex->gemm(&down);
    ex->sum(&sum);
}

void td_mixture_device_issue(const struct td_workspace *ws, int32_t layer, float *x,
                             const int32_t *positions, int32_t n_rows)
{
    const struct td_model *m = ws->model;
    const struct td_experts_choose_args choose = td_mixture_choice(ws, layer, n_rows);
    m->ops->device->experts->choose(&choose, positions);
    for (int32_t row0 = 0; row0 < n_rows; row0 += SLAB_ROWS)
        slab_issue(ws, layer, x, row0, n_rows - row0 < SLAB_ROWS ? n_rows - row0 : SLAB_ROWS);
}
