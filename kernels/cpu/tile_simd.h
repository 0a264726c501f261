/* tile_simd.h - the register tile that GEMM and attention share, written in the vector operations
 * of vec_*.h.
 *
 *   c[r][0..PW) (+)= sum over k of a[k * a_k + r * a_r] * line(b, k)[0..PW)
 *   for r < R <= TILE_ROWS, where PW is 2 vectors
 *
 * Every output is ONE chain of fused multiply-adds along ascending k, whatever R is. This makes the
 * bits of a row independent of its neighbours. Cutting k into several calls that reload c leaves
 * the chain as it is. */
#ifndef TD_KERNELS_TILE_SIMD_H
#define TD_KERNELS_TILE_SIMD_H

#include <math.h>
#include <stdbool.h>

#include "kernels/cpu/cpu.h"

/* A line of a packed panel: PW weights of one k. BF16: 32-bit lane i holds column i low and
 * column VW + i high, so that widening is a shift and a mask. F16 and F32: the columns in order.
 * PAIR: bf16 of two k, the columns in order; a lane of 32 bits holds the first k high and the
 * second low, because the dot instruction adds the high product first. The activations that meet
 * such a line are pairs in one f32's place. */
enum line_kind { LINE_F32, LINE_F16, LINE_BF16, LINE_PAIR };
enum { PW = 2 * VW, NEAR_BYTES = 2048 };

TD_INLINE ptrdiff_t line_bytes(enum line_kind kind)
{
    return kind == LINE_F32 || kind == LINE_PAIR ? 4 * PW : 2 * PW;
}
/* Lines of a row of n_in weights. */
TD_INLINE int32_t line_count(enum line_kind kind, int32_t n_in)
{
    return kind == LINE_PAIR ? (n_in + 1) / 2 : n_in;
}

/* c + a * b, for a pair c + a_high * b_high + a_low * b_low, each addition fused and rounded. */
TD_INLINE vec line_fma(enum line_kind kind, vec a, vec b, vec c)
{
#ifdef __AVX512BF16__
    if (kind == LINE_PAIR) return v_dot_bf16(a, b, c);
#endif
    (void)kind;
    return v_fma(a, b, c);
}

TD_INLINE void line_load(enum line_kind kind, const uint8_t *b, vec *b0, vec *b1)
{
    if (kind == LINE_F32 || kind == LINE_PAIR) {
        *b0 = v_load((const float *)b);
        *b1 = v_load((const float *)b + VW);
    } else if (kind == LINE_F16) {
        *b0 = v_load_f16((const uint16_t *)b);
        *b1 = v_load_f16((const uint16_t *)b + VW);
    } else {
        vec pairs = v_load((const float *)b);
        *b0 = v_pair_lo(pairs);
        *b1 = v_pair_hi(pairs);
    }
}

/* With `fetch`, b comes from memory, and line k prefetches the address ahead + k * ahead_step,
 * which is far enough ahead that the next call finds it in L2. */
TD_INLINE void tile_body(enum line_kind kind, int n_rows, bool fetch, float *c, ptrdiff_t c_stride,
                         const float *a, ptrdiff_t a_k, ptrdiff_t a_r, const uint8_t *b, int n_k,
                         bool from_zero, const uint8_t *ahead, ptrdiff_t ahead_step)
{
    vec acc[TILE_ROWS][2];
    TD_UNROLL
    for (int r = 0; r < n_rows; r++) {
        acc[r][0] = from_zero ? v_zero() : v_load(c + r * c_stride);
        acc[r][1] = from_zero ? v_zero() : v_load(c + r * c_stride + VW);
    }
    for (int k = 0; k < n_k; k++) {
        vec b0, b1;
        if (fetch) {
            _mm_prefetch((const char *)ahead, _MM_HINT_T1);
            if (line_bytes(kind) > 64) _mm_prefetch((const char *)ahead + 64, _MM_HINT_T1);
            _mm_prefetch((const char *)b + NEAR_BYTES, _MM_HINT_T0);
            ahead += ahead_step;
        }
        line_load(kind, b, &b0, &b1);
        TD_UNROLL
        for (int r = 0; r < n_rows; r++) {
            vec ar = v_set1(a[r * a_r]);
            acc[r][0] = line_fma(kind, ar, b0, acc[r][0]);
            acc[r][1] = line_fma(kind, ar, b1, acc[r][1]);
        }
        a += a_k;
        b += line_bytes(kind);
    }
    TD_UNROLL
    for (int r = 0; r < n_rows; r++) {
        v_store(c + r * c_stride, acc[r][0]);
        v_store(c + r * c_stride + VW, acc[r][1]);
    }
}

/* One function per number of rows, name[n] for n rows, so that the accumulators are registers. The
 * strides are constants, except ld (a_k of the products). */
typedef void (*tile_fn)(float *c, const float *a, ptrdiff_t ld, const uint8_t *b, int n_k,
                        bool from_zero, const uint8_t *ahead, ptrdiff_t ahead_step);
#define TD_TILE_FN(n, name, kind, fetch, c_stride, a_k, a_r)                                       \
    static __attribute__((noinline)) void name##_##n(float *c, const float *a, ptrdiff_t ld,       \
                                                     const uint8_t *b, int n_k, bool from_zero,    \
                                                     const uint8_t *ahead, ptrdiff_t ahead_step)   \
    {                                                                                              \
        (void)ld;                                                                                  \
        tile_body(kind, n, fetch, c, c_stride, a, a_k, a_r, b, n_k, from_zero, ahead, ahead_step); \
    }
#define TD_TILE_NAME(n, name) name##_##n,
#define TD_TILES(name, kind, fetch, c_stride, a_k, a_r)                                            \
    TD_EACH_TILE_ROWS(TD_TILE_FN, name, kind, fetch, c_stride, a_k, a_r)                           \
    static const tile_fn name[TILE_ROWS + 1] = {NULL, TD_EACH_TILE_ROWS(TD_TILE_NAME, name)}

/* dst[i * stride] = lane i of v, for i < n */
TD_INLINE void store_column(float *dst, ptrdiff_t stride, vec v, int n)
{
    float lane[VW];
    v_store(lane, v);
    for (int i = 0; i < n; i++) dst[i * stride] = lane[i];
}

/* a where it is at least `least` in size, else 0; a NaN in either gives 0. */
TD_INLINE vec v_at_least(vec a, float least)
{
    return v_keep_ge(a, v_max(a, v_sub(v_zero(), a)), v_set1(least));
}

/* Packs rows of activations as a tile reads them: dst[k * ld + r] = rows[r][k] for k in [k0, k1),
 * rounded to bf16 when asked. ld >= n_rows. Of row r values below least[r] in size become zero,
 * unless `least` is NULL. */
TD_INLINE void tile_pack_rows(float *dst, ptrdiff_t ld, const float *const *rows, int n_rows,
                              int k0, int k1, bool round_bf16, const float *least)
{
    int r = 0;
    for (; r + 4 <= n_rows; r += 4) {
        int k = k0;
        for (; k + VW <= k1; k += VW) {
            vec q[4];
            for (int i = 0; i < 4; i++) {
                q[i] = v_load(rows[r + i] + k);
                if (least) q[i] = v_at_least(q[i], least[r + i]);
                if (round_bf16) q[i] = v_round_bf16(q[i]);
            }
            v_store_cols4(dst + k * ld + r, ld, q[0], q[1], q[2], q[3]);
        }
        for (; k < k1; k++)
            for (int i = 0; i < 4; i++) {
                float v = rows[r + i][k];
                if (least && !(fabsf(v) >= least[r + i])) v = 0;
                dst[k * ld + r + i] = round_bf16 ? td_bf16_to_f32(td_f32_to_bf16(v)) : v;
            }
    }
    for (; r < n_rows; r++)
        for (int k = k0; k < k1; k += VW) {
            int n = k1 - k < VW ? k1 - k : VW;
            vec v = v_load_n(rows[r] + k, n);
            if (least) v = v_at_least(v, least[r]);
            if (round_bf16) v = v_round_bf16(v);
            if (ld == 1)
                v_store_n(dst + k, v, n);
            else
                store_column(dst + k * ld + r, ld, v, n);
        }
}

#ifdef __AVX512BF16__
/* Of two vectors of consecutive f32 of row r, the first n in all: pairs of bf16, the earlier one
 * high. What a lane lacks is -0, which adds nothing to any sum. */
TD_INLINE vec v_load_pairs(const float *p, int n, const float *least, int r)
{
    vec lo = v_load_n(p, n < VW ? n : VW), hi = n > VW ? v_load_n(p + VW, n - VW) : v_zero();
    if (least) lo = v_at_least(lo, least[r]), hi = v_at_least(hi, least[r]);
    return v_pairs(lo, hi, n);
}

/* The same for lines of pairs: dst[k / 2 * ld + r] = the pair at k of rows[r], for k in [k0, k1),
 * where k0 is even, and k1 is even or the end of the row. */
TD_INLINE void tile_pack_pairs(float *dst, ptrdiff_t ld, const float *const *rows, int n_rows,
                               int k0, int k1, const float *least)
{
    int r = 0;
    for (; r + 4 <= n_rows; r += 4)
        for (int k = k0; k < k1; k += 2 * VW) {
            int n = k1 - k < 2 * VW ? k1 - k : 2 * VW;
            vec q[4];
            for (int i = 0; i < 4; i++) q[i] = v_load_pairs(rows[r + i] + k, n, least, r + i);
            if (n == 2 * VW) {
                v_store_cols4(dst + k / 2 * ld + r, ld, q[0], q[1], q[2], q[3]);
                continue;
            }
            for (int i = 0; i < 4; i++)
                store_column(dst + k / 2 * ld + r + i, ld, q[i], (n + 1) / 2);
        }
    for (; r < n_rows; r++)
        for (int k = k0; k < k1; k += 2 * VW) {
            int n = k1 - k < 2 * VW ? k1 - k : 2 * VW;
            vec q = v_load_pairs(rows[r] + k, n, least, r);
            if (ld == 1)
                v_store_n(dst + k / 2, q, (n + 1) / 2);
            else
                store_column(dst + k / 2 * ld + r, ld, q, (n + 1) / 2);
        }
}
#endif

#endif
