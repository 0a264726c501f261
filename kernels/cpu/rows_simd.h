/* rows_simd.h - norm, rotary embedding, storing K and V, SwiGLU and embedding, written in the
 * vector operations of vec_*.h.
 *
 * All of these are bound by memory, or too small to matter. Lane i of a row must see the same
 * operations wherever the row stands (I1): that is why tails use masked vectors and not scalar
 * code. */
#ifndef TD_KERNELS_ROWS_SIMD_H
#define TD_KERNELS_ROWS_SIMD_H

#include <math.h>
#include <stdbool.h>

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/exp_simd.h"
#include "kernels/part.h"

void TD_SIMD(rmsnorm)(const struct td_rmsnorm_args *a, int part, int n_parts)
{
    int64_t lo, hi;
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        const float *x = a->x + r * a->x_stride;
        float *out = a->out + r * a->out_stride;
        vec s0 = v_zero(), s1 = v_zero(), s2 = v_zero(), s3 = v_zero();
        int32_t i = 0;
        for (; i + 4 * VW <= a->dim; i += 4 * VW) {
            vec x0 = v_load(x + i), x1 = v_load(x + i + VW), x2 = v_load(x + i + 2 * VW),
                x3 = v_load(x + i + 3 * VW);
            s0 = v_fma(x0, x0, s0), s1 = v_fma(x1, x1, s1), s2 = v_fma(x2, x2, s2),
            s3 = v_fma(x3, x3, s3);
        }
        for (; i < a->dim; i += VW) {
            vec xi = v_load_n(x + i, a->dim - i < VW ? a->dim - i : VW);
            s0 = v_fma(xi, xi, s0);
        }
        float sum = v_sum(v_add(v_add(s0, s1), v_add(s2, s3)));
        vec inv = v_set1(1.0f / sqrtf(sum / (float)a->dim + a->eps));
        for (i = 0; i < a->dim; i += VW) {
            int n = a->dim - i < VW ? a->dim - i : VW;
            v_store_n(out + i, v_mul(v_mul(v_load_n(x + i, n), inv), v_load_n(a->w + i, n)), n);
        }
    }
}

void TD_SIMD(rope)(const struct td_rope_args *a, int part, int n_parts)
{
    int32_t half = a->head_dim / 2;
    int64_t lo, hi;
    td_part_range((int64_t)a->n_rows * a->n_heads, 1, part, n_parts, &lo, &hi);
    for (int64_t rh = lo; rh < hi; rh++) {
        int64_t r = rh / a->n_heads;
        float *x = a->x + r * a->x_stride + (rh % a->n_heads) * a->head_dim;
        const float *c = a->cos_sin + (int64_t)a->positions[r] * a->head_dim, *s = c + half;
        for (int32_t i = 0; i < half; i += VW) {
            int n = half - i < VW ? half - i : VW;
            vec x0 = v_load_n(x + i, n), x1 = v_load_n(x + i + half, n), ci = v_load_n(c + i, n),
                si = v_load_n(s + i, n);
            v_store_n(x + i, v_fnma(x1, si, v_mul(x0, ci)), n);
            v_store_n(x + i + half, v_fma(x0, si, v_mul(x1, ci)), n);
        }
    }
}

/* One row of K or of V into the cache. */
TD_INLINE void store_row(const struct td_kv_view *kv, uint8_t *head, int32_t t, const float *src,
                         int32_t dim)
{
    uint8_t *to = head + t * (dim * (int64_t)td_dtype_bytes(kv->dtype));
    if (td_dtype_is_coded(kv->dtype)) {
        *td_kv_view_scale(kv, head, t) = td_kv_encode(kv->dtype, to, src, dim);
        return;
    }
    if (kv->dtype == TD_F32) {
        memcpy(to, src, (size_t)dim * sizeof(float));
        return;
    }
    for (int32_t i = 0; i < dim; i += VW) {
        int n = dim - i < VW ? dim - i : VW;
        v_store_bf16_n((uint16_t *)(void *)to + i, v_load_n(src + i, n), n);
    }
}

void TD_SIMD(kv_store)(const struct td_kv_store_args *a, int part, int n_parts)
{
    const struct td_kv_view *kv = &a->kv;
    int32_t v_dim = td_kv_view_v_dim(kv);
    int64_t head_bytes = td_kv_view_head_bytes(kv), v_head_bytes = td_kv_view_v_head_bytes(kv),
            v_at = td_kv_view_v_at(kv), lo, hi;
    td_part_range((int64_t)a->n_rows * kv->n_kv_heads, 1, part, n_parts, &lo, &hi);
    for (int64_t rh = lo; rh < hi; rh++) {
        int64_t r = rh / kv->n_kv_heads, h = rh % kv->n_kv_heads;
        int32_t p = a->positions[r], t = p % kv->block_size;
        uint8_t *block =
            kv->base + a->block_tables[a->row_seq[r]][p / kv->block_size] * kv->block_bytes;
        store_row(kv, block + h * head_bytes, t, a->k + r * a->k_stride + h * kv->head_dim,
                  kv->head_dim);
        if (!kv->v_in_k)
            store_row(kv, block + v_at + h * v_head_bytes, t, a->v + r * a->v_stride + h * v_dim,
                      v_dim);
    }
}

void TD_SIMD(silu_mul)(float *out, const float *gate, const float *up, int32_t n_rows, int32_t dim,
                       int64_t out_stride, int64_t gate_stride, int64_t up_stride, int part,
                       int n_parts)
{
    int64_t r0 = 0, r1 = n_rows, i0 = 0, i1 = dim;
    if (n_rows >= n_parts)
        td_part_range(n_rows, 1, part, n_parts, &r0, &r1);
    else
        td_part_range(dim, 64, part, n_parts, &i0, &i1);
    vec one = v_set1(1.0f);
    for (int64_t r = r0; r < r1; r++)
        for (int64_t i = i0; i < i1; i += VW) {
            int n = i1 - i < VW ? (int)(i1 - i) : VW;
            vec g = v_load_n(gate + r * gate_stride + i, n),
                u = v_load_n(up + r * up_stride + i, n);
            vec silu = v_div(g, v_add(one, v_exp_neg(g)));
            v_store_n(out + r * out_stride + i, v_mul(silu, u), n);
        }
}

void TD_SIMD(embed)(float *out, const void *table, enum td_dtype dtype, const int32_t *ids,
                    int32_t n_rows, int32_t dim, int part, int n_parts)
{
    int64_t lo, hi;
    td_part_range(n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        int64_t first = (int64_t)ids[r] * dim;
        float *to = out + r * dim;
        if (dtype == TD_F32) {
            memcpy(to, (const float *)table + first, (size_t)dim * sizeof *to);
            continue;
        }
        const uint16_t *from = (const uint16_t *)table + first;
        for (int32_t i = 0; i < dim; i += VW) {
            int n = dim - i < VW ? dim - i : VW;
            v_store_n(to + i,
                      dtype == TD_BF16 ? v_load_bf16_n(from + i, n) : v_load_f16_n(from + i, n), n);
        }
    }
}

#endif
