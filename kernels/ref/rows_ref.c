/* rows_ref.c - what happens to single rows between the products: norm, rotary embedding, storing
 * K and V, SwiGLU, embedding. */
#include <math.h>

#include "kernels/part.h"
#include "kernels/ref/ref.h"

void td_ref_rmsnorm(const struct td_rmsnorm_args *a, int part, int n_parts)
{
    int64_t lo, hi;
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        const float *x = a->x + r * a->x_stride;
        float *out = a->out + r * a->out_stride;
        double sum = 0, mean = 0;
        for (int32_t i = 0; i < a->dim && a->centre; i++) mean += (double)x[i] / a->dim;
        for (int32_t i = 0; i < a->dim; i++) sum += ((double)x[i] - mean) * ((double)x[i] - mean);
        double inv = 1.0 / sqrt(sum / a->dim + (double)a->eps);
        for (int32_t i = 0; i < a->dim; i++)
            out[i] = (float)(((double)x[i] - mean) * inv * (double)a->w[i]);
    }
}

void td_ref_rope(const struct td_rope_args *a, int part, int n_parts)
{
    int32_t half = a->head_dim / 2;
    int64_t lo, hi;
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        const float *c = a->cos_sin + (int64_t)a->positions[r] * a->head_dim, *s = c + half;
        for (int32_t h = 0; h < a->n_heads; h++) {
            float *x = a->x + r * a->x_stride + (int64_t)h * a->head_dim;
            for (int32_t i = 0; i < half; i++) {
                double x0 = (double)x[i], x1 = (double)x[i + half];
                x[i] = (float)(x0 * (double)c[i] - x1 * (double)s[i]);
                x[i + half] = (float)(x1 * (double)c[i] + x0 * (double)s[i]);
            }
        }
    }
}

void td_ref_kv_store(const struct td_kv_store_args *a, int part, int n_parts)
{
    const struct td_kv_view *kv = &a->kv;
    int64_t lo, hi;
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        int32_t p = a->positions[r], t = p % kv->block_size;
        uint8_t *block =
            kv->base + a->block_tables[a->row_seq[r]][p / kv->block_size] * kv->block_bytes;
        for (int32_t h = 0; h < kv->n_kv_heads; h++) {
            for (int is_v = 0; is_v < (kv->v_in_k ? 1 : 2); is_v++) {
                int32_t dim = is_v ? td_kv_view_v_dim(kv) : kv->head_dim;
                const float *src =
                    (is_v ? a->v + r * a->v_stride : a->k + r * a->k_stride) + (int64_t)h * dim;
                uint8_t *head =
                            block + (is_v ? td_kv_view_v_at(kv) + h * td_kv_view_v_head_bytes(kv)
                                          : h * td_kv_view_head_bytes(kv)),
                        *dst = head + t * (dim * (int64_t)td_dtype_bytes(kv->dtype));
                if (td_dtype_is_coded(kv->dtype)) {
                    *td_kv_view_scale(kv, head, t) =
                        kv->v_in_k
                            ? td_kv_encode_latent(kv->dtype, dst, src, td_kv_view_v_dim(kv), dim)
                            : td_kv_encode(kv->dtype, dst, src, dim);
                    continue;
                }
                for (int32_t i = 0; i < dim; i++) {
                    if (kv->dtype == TD_F32)
                        ((float *)dst)[i] = src[i];
                    else
                        ((uint16_t *)dst)[i] = td_f32_to_bf16(src[i]);
                }
            }
        }
    }
}

void td_ref_silu_mul(float *out, const float *gate, const float *up, int32_t n_rows, int32_t dim,
                     int64_t out_stride, int64_t gate_stride, int64_t up_stride, int part,
                     int n_parts)
{
    int64_t lo, hi;
    td_part_range(n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++)
        for (int32_t i = 0; i < dim; i++) {
            double g = (double)gate[r * gate_stride + i];
            out[r * out_stride + i] = (float)(g / (1.0 + exp(-g)) * (double)up[r * up_stride + i]);
        }
}

static double act(enum td_act kind, double g, double u)
{
    if (kind == TD_ACT_GELU)
        return g / 2 * (1 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u;
    if (kind != TD_ACT_SWIGLU_7) return g / (1.0 + exp(-g)) * u;
    if (g > 7) g = 7;
    if (u > 7) u = 7;
    if (u < -7) u = -7;
    return g / (1.0 + exp(-1.702 * g)) * (u + 1);
}

void td_ref_act_mul(const struct td_act_args *a, int part, int n_parts)
{
    int64_t lo, hi;
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++)
        for (int32_t i = 0; i < a->dim; i++)
            a->out[r * a->out_stride + i] =
                (float)act(a->act, (double)a->gate[r * a->gate_stride + i],
                           (double)a->up[r * a->up_stride + i]);
}

void td_ref_scale_cap(const struct td_scale_args *a, int part, int n_parts)
{
    int64_t lo, hi;
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++)
        for (int32_t i = 0; i < a->dim; i++) {
            float *x = a->x + r * a->stride + i;
            double y = (double)*x * (double)a->scale, c = (double)a->cap;
            *x = (float)(c > 0 ? c * tanh(y / c) : y);
        }
}

void td_ref_embed(float *out, const void *table, enum td_dtype dtype, const int32_t *ids,
                  int32_t n_rows, int32_t dim, int part, int n_parts)
{
    int64_t lo, hi;
    td_part_range(n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++)
        for (int32_t i = 0; i < dim; i++)
            out[r * dim + i] = td_widen(table, dtype, (int64_t)ids[r] * dim + i);
}
