/* attn_ref.c - attention in the obvious order: the largest score, then the sum of exponentials and
 * the weighted sum of V, all in double. Each score is computed twice rather than stored, so that no
 * scratch is needed. */
#include <math.h>

#include "kernels/kv_codes.h"
#include "kernels/part.h"
#include "kernels/ref/ref.h"

enum { ROW_MAX = TD_ATTN_ROW_MAX };

size_t td_ref_attn_scratch_bytes(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,
                                 int32_t block_size)
{
    (void)n_heads, (void)n_kv_heads, (void)head_dim, (void)block_size;
    return 64;
}

/* A row of K or V. */
struct row {
    const uint8_t *values;
    double scale; /* 1 unless the type is coded */
    double rest;  /* of the elements behind V, where V is in K */
};

static struct row row_at(const struct td_kv_view *kv, const int32_t *table, int32_t kv_head,
                         int32_t p, bool is_v)
{
    int32_t t = p % kv->block_size;
    uint8_t *head = kv->base + table[p / kv->block_size] * kv->block_bytes +
                    (is_v ? td_kv_view_v_at(kv) + kv_head * td_kv_view_v_head_bytes(kv)
                          : kv_head * td_kv_view_head_bytes(kv));
    int64_t row_bytes =
        is_v ? td_kv_view_v_row_bytes(kv) : kv->head_dim * (int64_t)td_dtype_bytes(kv->dtype);
    struct row r = {head + t * row_bytes, 1, 1};
    if (!td_dtype_is_coded(kv->dtype)) return r;
    float scale = *td_kv_view_scale(kv, head, t);
    r.scale = (double)(kv->v_in_k ? td_kv_scale_first(scale) : scale);
    r.rest = (double)td_kv_scale_rest(scale);
    return r;
}

/* Of a key that lies so far before the query, with head h. */
static double score(const struct td_attn_args *a, struct row key, const float *q, int32_t h,
                    int32_t before)
{
    const struct td_kv_view *kv = &a->kv;
    double dot = 0, rest = 0;
    int32_t n_first = kv->v_in_k ? td_kv_view_v_dim(kv) : kv->head_dim;
    for (int32_t i = 0; i < kv->head_dim; i++) {
        float qi = kv->dtype == TD_BF16 ? td_bf16_to_f32(td_f32_to_bf16(q[i])) : q[i];
        *(i < n_first ? &dot : &rest) += (double)qi * (double)td_widen(key.values, kv->dtype, i);
    }
    dot *= key.scale;
    if (n_first < kv->head_dim) dot += rest * key.rest;
    double s = dot * (double)a->scale, cap = (double)a->cap;
    if (cap > 0) s = cap * tanh(s / cap);
    return a->slopes ? s - (double)a->slopes[h] * before : s;
}

void td_ref_attn(const struct td_attn_args *a, int part, int n_parts)
{
    const struct td_kv_view *kv = &a->kv;
    TD_ASSERT(kv->head_dim <= ROW_MAX && td_kv_view_v_dim(kv) <= kv->head_dim);
    int64_t lo, hi;
    int32_t group = a->n_heads / kv->n_kv_heads, v_dim = td_kv_view_v_dim(kv);
    td_part_range((int64_t)a->n_rows * a->n_heads, 1, part, n_parts, &lo, &hi);
    for (int64_t rh = lo; rh < hi; rh++) {
        int64_t r = rh / a->n_heads;
        int32_t h = (int32_t)(rh % a->n_heads), p = a->positions[r];
        int32_t first =
            a->sliding_window > 0 && p - a->sliding_window + 1 > 0 ? p - a->sliding_window + 1 : 0;
        const int32_t *table = a->block_tables[a->row_seq[r]];
        const float *q = a->q + r * a->q_stride + (int64_t)h * kv->head_dim;
        double max = a->sinks ? (double)a->sinks[h] : -INFINITY, acc[ROW_MAX] = {0};
        for (int32_t j = first; j <= p; j++)
            max = fmax(max, score(a, row_at(kv, table, h / group, j, false), q, h, p - j));
        double sum = a->sinks ? exp((double)a->sinks[h] - max) : 0;
        for (int32_t j = first; j <= p; j++) {
            struct row value = row_at(kv, table, h / group, j, true);
            double e = exp(score(a, row_at(kv, table, h / group, j, false), q, h, p - j) - max);
            sum += e;
            for (int32_t i = 0; i < v_dim; i++)
                acc[i] += e * value.scale * (double)td_widen(value.values, kv->dtype, i);
        }
        for (int32_t i = 0; i < v_dim; i++)
            a->out[r * a->out_stride + (int64_t)h * v_dim + i] = (float)(acc[i] / sum);
    }
}
