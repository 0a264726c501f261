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

/* The mean of a row. */
static float row_mean(const float *x, int32_t dim)
{
    vec s = v_zero();
    for (int32_t i = 0; i < dim; i += VW)
        s = v_add(s, v_load_n(x + i, dim - i < VW ? dim - i : VW));
    return v_sum(s) / (float)dim;
}

static void centred_norm(const struct td_rmsnorm_args *a, const float *x, float *out)
{
    vec mean = v_set1(row_mean(x, a->dim)), s = v_zero();
    for (int32_t i = 0; i < a->dim; i += VW) {
        int n = a->dim - i < VW ? a->dim - i : VW;
        /* lanes past the end are 0, not -mean */
        vec d = v_keep_lanes(v_sub(v_load_n(x + i, n), mean), 0, n, v_zero());
        s = v_fma(d, d, s);
    }
    vec inv = v_set1(1.0f / sqrtf(v_sum(s) / (float)a->dim + a->eps));
    for (int32_t i = 0; i < a->dim; i += VW) {
        int n = a->dim - i < VW ? a->dim - i : VW;
        vec d = v_sub(v_load_n(x + i, n), mean);
        v_store_n(out + i, v_mul(v_mul(d, inv), v_load_n(a->w + i, n)), n);
    }
}

void TD_SIMD(rmsnorm)(const struct td_rmsnorm_args *a, int part, int n_parts)
{
    int64_t lo, hi;
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        const float *x = a->x + r * a->x_stride;
        float *out = a->out + r * a->out_stride;
        if (a->centre) {
            centred_norm(a, x, out);
            continue;
        }
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
        *td_kv_view_scale(kv, head, t) =
            kv->v_in_k ? td_kv_encode_latent(kv->dtype, to, src, td_kv_view_v_dim(kv), dim)
                       : td_kv_encode(kv->dtype, to, src, dim);
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

TD_INLINE vec gated(enum td_act act, vec g, vec u)
{
    vec one = v_set1(1.0f);
    if (act == TD_ACT_GELU) {
        /* (1 + tanh y) / 2 = 1 / (1 + e^-2y) */
        vec cubic = v_mul(v_mul(g, g), v_mul(g, v_set1(0.044715f)));
        vec y2 = v_mul(v_add(g, cubic), v_set1(1.5957691216057308f));
        return v_mul(v_div(g, v_add(one, v_exp_neg(y2))), u);
    }
    if (act == TD_ACT_SWIGLU_7) {
        vec seven = v_set1(7.0f);
        g = v_min(seven, g), u = v_max(v_set1(-7.0f), v_min(seven, u));
        vec e = v_exp_neg(v_mul(g, v_set1(1.702f)));
        return v_mul(v_div(g, v_add(one, e)), v_add(u, one));
    }
    return v_mul(v_div(g, v_add(one, v_exp_neg(g))), u);
}

/* Rows [*r0, *r1) and columns [*i0, *i1) of a part. */
static void part_of_rows(int32_t n_rows, int32_t dim, int part, int n_parts, int64_t *r0,
                         int64_t *r1, int64_t *i0, int64_t *i1)
{
    *r0 = 0, *r1 = n_rows, *i0 = 0, *i1 = dim;
    if (n_rows >= n_parts)
        td_part_range(n_rows, 1, part, n_parts, r0, r1);
    else
        td_part_range(dim, 64, part, n_parts, i0, i1);
}

void TD_SIMD(act_mul)(const struct td_act_args *a, int part, int n_parts)
{
    int64_t r0, r1, i0, i1;
    part_of_rows(a->n_rows, a->dim, part, n_parts, &r0, &r1, &i0, &i1);
    for (int64_t r = r0; r < r1; r++)
        for (int64_t i = i0; i < i1; i += VW) {
            int n = i1 - i < VW ? (int)(i1 - i) : VW;
            vec g = v_load_n(a->gate + r * a->gate_stride + i, n),
                u = v_load_n(a->up + r * a->up_stride + i, n);
            v_store_n(a->out + r * a->out_stride + i, gated(a->act, g, u), n);
        }
}

void TD_SIMD(silu_mul)(float *out, const float *gate, const float *up, int32_t n_rows, int32_t dim,
                       int64_t out_stride, int64_t gate_stride, int64_t up_stride, int part,
                       int n_parts)
{
    struct td_act_args a = {.act = TD_ACT_SILU,
                            .out = out,
                            .gate = gate,
                            .up = up,
                            .n_rows = n_rows,
                            .dim = dim,
                            .out_stride = out_stride,
                            .gate_stride = gate_stride,
                            .up_stride = up_stride};
    TD_SIMD(act_mul)(&a, part, n_parts);
}

void TD_SIMD(scale_cap)(const struct td_scale_args *a, int part, int n_parts)
{
    int64_t r0, r1, i0, i1;
    bool caps = a->cap > 0;
    vec scale = v_set1(caps ? a->scale / a->cap : a->scale), cap = v_set1(a->cap);
    part_of_rows(a->n_rows, a->dim, part, n_parts, &r0, &r1, &i0, &i1);
    for (int64_t r = r0; r < r1; r++)
        for (int64_t i = i0; i < i1; i += VW) {
            int n = i1 - i < VW ? (int)(i1 - i) : VW;
            float *x = a->x + r * a->stride + i;
            vec y = v_mul(v_load_n(x, n), scale);
            v_store_n(x, caps ? v_mul(v_tanh(y), cap) : y, n);
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
