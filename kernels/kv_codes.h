/* kv_codes.h - the one written formula by which a row of K or V (one token, one head) becomes codes
 * and a scale, and back, so that every table stores the same bits.
 *
 *   value = code * scale       code  int8: -127..127, or fp8 e4m3: up to 448
 *                              scale f32 = max |x| of the row / 127 or / 448
 *
 * The bits of a stored row depend on that row alone. That keeps I1: a token's codes are the same
 * whatever chunk, batch or worker wrote them. (Scales over several tokens of a block would change
 * as the block fills, after some rows have been read.) Why a scale per token and head: it costs 4
 * bytes beside head_dim codes and needs no calibration.
 *
 * A row of a latent cache is coded in two parts, what is V, too, and what is rotated, since the
 * latter may be a hundred times as large. Their scales are bf16, the first in the upper half of the
 * f32's place: rounded up, so that no code exceeds its limit.
 *
 * A row of zeros, or of values all below 2^-100, has scale 0 and codes 0. A row with NaN or an
 * infinity has scale NaN and codes 0, so what goes wrong in a model stays visible, as with bf16.
 * The e4m3 code of NaN is never stored. Included inside kernels/ and by tests only. */
#ifndef TD_KERNELS_KV_CODES_H
#define TD_KERNELS_KV_CODES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "common/base/dtype.h"

#ifdef __CUDACC__
#define TD_KV_FN __host__ __device__ static inline
#else
#define TD_KV_FN static inline
#endif

#define TD_INT8_MAX 127.0f
#define TD_FP8_MAX 448.0f

TD_KV_FN uint32_t td_kv_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}
TD_KV_FN float td_kv_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Exact. Four exponent bits of bias 7, three of fraction; subnormals are multiples of 2^-9. */
TD_KV_FN float td_fp8_to_f32(uint8_t c)
{
    uint32_t sign = (uint32_t)(c & 0x80u) << 24, rest = c & 0x7fu;
    float f = rest < 8 ? (float)rest * 0x1p-9f : td_kv_from_bits((rest << 20) + (120u << 23));
    return rest == 0x7f ? td_kv_from_bits(0x7fc00000u) : td_kv_from_bits(td_kv_bits(f) | sign);
}

/* To the nearest, ties to even; |f| above 448 becomes 448. Not for NaN. */
TD_KV_FN uint8_t td_f32_to_fp8(float f)
{
    uint32_t u = td_kv_bits(f), sign = u >> 24 & 0x80u, code;
    u &= 0x7fffffffu;
    if (u < 121u << 23) /* below 2^-6: the product is exact, and 8 is the code of 2^-6 */
        code = (uint32_t)rintf(td_kv_from_bits(u) * 512.0f);
    else
        code = ((u + 0x7ffffu + (u >> 20 & 1u)) >> 20) - (120u << 3);
    return (uint8_t)(sign | (code < 0x7e ? code : 0x7e));
}

/* How a row is scaled. */
struct td_kv_scale {
    float scale, factor; /* what is stored; what values are multiplied by to become codes */
};

/* top: the largest of the row's values as bits without their sign, so that NaN and infinities are
 * above all numbers. */
TD_KV_FN struct td_kv_scale td_kv_scale_of(enum td_dtype t, uint32_t top)
{
    struct td_kv_scale s = {0.0f, 0.0f};
    float most = td_kv_from_bits(top), limit = t == TD_FP8 ? TD_FP8_MAX : TD_INT8_MAX;
    if (top >= 0x7f800000u)
        s.scale = td_kv_from_bits(0x7fc00000u);
    else if (most >= 0x1p-100f)
        s.scale = most / limit, s.factor = limit / most;
    return s;
}

/* Not for NaN or an infinity: factor is 0 when the row has one. */
TD_KV_FN uint8_t td_kv_code(enum td_dtype t, float x, float factor)
{
    if (factor == 0.0f) return 0;
    float y = x * factor; /* at most an ulp above the limit */
    return t == TD_FP8 ? td_f32_to_fp8(y) : (uint8_t)(int8_t)rintf(y);
}

/* The largest of n values as bits without their sign. */
TD_KV_FN uint32_t td_kv_top(const float *x, int32_t n)
{
    uint32_t top = 0;
    for (int32_t i = 0; i < n; i++) {
        uint32_t u = td_kv_bits(x[i]) & 0x7fffffffu;
        top = u > top ? u : top;
    }
    return top;
}

/* Stores n values as codes; returns the scale. */
TD_KV_FN float td_kv_encode(enum td_dtype t, uint8_t *codes, const float *x, int32_t n)
{
    struct td_kv_scale s = td_kv_scale_of(t, td_kv_top(x, n));
    for (int32_t i = 0; i < n; i++) codes[i] = td_kv_code(t, x[i], s.factor);
    return s.scale;
}

/* The same with a scale of bf16, whose bits it returns. */
TD_KV_FN uint32_t td_kv_encode_part(enum td_dtype t, uint8_t *codes, const float *x, int32_t n)
{
    struct td_kv_scale s = td_kv_scale_of(t, td_kv_top(x, n));
    uint32_t u = (td_kv_bits(s.scale) + 0xffffu) >> 16;
    float scale = td_kv_from_bits(u << 16);
    if (s.factor != 0.0f) s.factor = 1.0f / scale;
    for (int32_t i = 0; i < n; i++) codes[i] = td_kv_code(t, x[i], s.factor);
    return u;
}

/* A row of a latent cache: n_first values, and those behind them up to n. Returns both scales. */
TD_KV_FN float td_kv_encode_latent(enum td_dtype t, uint8_t *codes, const float *x, int32_t n_first,
                                   int32_t n)
{
    uint32_t first = td_kv_encode_part(t, codes, x, n_first),
             rest = td_kv_encode_part(t, codes + n_first, x + n_first, n - n_first);
    return td_kv_from_bits(first << 16 | rest);
}
TD_KV_FN float td_kv_scale_first(float both)
{
    return td_kv_from_bits(td_kv_bits(both) & 0xffff0000u);
}
TD_KV_FN float td_kv_scale_rest(float both) { return td_kv_from_bits(td_kv_bits(both) << 16); }

#endif
