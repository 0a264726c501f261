/* write.h - what the formats' write sides share: each file of a format that can be written has a
 * function that rounds one block. Included inside kernels/ only. */
#ifndef TD_KERNELS_FORMATS_WRITE_H
#define TD_KERNELS_FORMATS_WRITE_H

#include <math.h>

#include "kernels/formats/formats.h"

/* X(function prefix): the formats with a write side. The values are finite; a scale that leaves the
 * range of f16 becomes infinite, which td_format_write then refuses. */
#define TD_EACH_WRITTEN_FORMAT(X)                                                                  \
    X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q4_k) X(q5_k) X(q6_k) X(iq4_nl) X(mxfp4)

#define TD_FORMAT_WRITE_DECLARE(fn) void td_##fn##_write(const float *values, uint8_t *ret_block);
TD_EACH_WRITTEN_FORMAT(TD_FORMAT_WRITE_DECLARE)
#undef TD_FORMAT_WRITE_DECLARE

/* To nearest, ties to even; too large a number becomes infinite. */
static inline uint16_t td_f32_to_f16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    uint16_t sign = (uint16_t)(u >> 16 & 0x8000u);
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return sign | 0x7e00u;
    if (u < 0x38800000u) { /* below 2^-14: whole multiples of 2^-24 */
        memcpy(&f, &u, sizeof f);
        return (uint16_t)(sign | (uint32_t)rintf(f * 0x1p24f));
    }
    u += 0xfffu + (u >> 13 & 1u);
    return u >= 0x47800000u ? sign | 0x7c00u : (uint16_t)(sign | (u - 0x38000000u) >> 13);
}

static inline void td_store_f16(uint8_t *p, float f)
{
    uint16_t h = td_f32_to_f16(f);
    memcpy(p, &h, sizeof h);
}

/* The inverse of td_split_nibbles. */
static inline void td_join_nibbles(const uint8_t *codes, uint8_t *ret_bytes)
{
    for (int j = 0; j < 16; j++)
        ret_bytes[j] = (uint8_t)((codes[j] & 15) | (codes[j + 16] & 15) << 4);
}

/* The fifth bits of 32 codes, that of code i in bit i of 4 bytes. */
static inline void td_join_fifth_bits(const uint8_t *codes, uint8_t *ret_bytes)
{
    memset(ret_bytes, 0, 4);
    for (int i = 0; i < 32; i++) ret_bytes[i / 8] |= (uint8_t)((codes[i] >> 4 & 1) << i % 8);
}

/* To nearest, ties to even, for |v| below 2^22; three operations that every vector unit has. */
static inline float td_round(float v) { return v + 12582912.0f - 12582912.0f; }

/* NaN becomes lo. */
static inline float td_clamp(float v, float lo, float hi) { return v > lo ? v < hi ? v : hi : lo; }

/* The value of largest magnitude, with its sign; the first of equal ones. */
static inline float td_largest(const float *x, int n)
{
    float most = x[0];
    for (int i = 1; i < n; i++)
        if (fabsf(x[i]) > fabsf(most)) most = x[i];
    return most;
}

/* 0 for a scale of 0 */
static inline float td_inverse(float d) { return d != 0 ? 1.0f / d : 0; }

/* Codes of Q4_0 and Q5_0: the value of largest magnitude becomes -half, and x * inverse + half is
 * rounded by cutting. One rounding behind the exact product, as ggml's fused multiply-add has
 * it. */
static inline void td_codes_from_largest(const float *x, float half, float *ret_d,
                                         uint8_t *ret_codes)
{
    *ret_d = td_largest(x, TD_GROUP) / -half;
    double inverse = (double)td_inverse(*ret_d);
    for (int i = 0; i < TD_GROUP; i++) {
        float code = (float)((double)x[i] * inverse + (double)half + 0.5);
        ret_codes[i] = (uint8_t)td_clamp(code, 0, 2 * half - 1);
    }
}

/* Codes of Q4_1 and Q5_1: the least value has code 0, the largest `top`. */
static inline void td_codes_from_range(const float *x, float top, float *ret_d, float *ret_min,
                                       uint8_t *ret_codes)
{
    float lo = x[0], hi = x[0];
    for (int i = 1; i < TD_GROUP; i++) {
        lo = x[i] < lo ? x[i] : lo;
        hi = x[i] > hi ? x[i] : hi;
    }
    *ret_d = (hi - lo) / top;
    *ret_min = lo;
    float inverse = td_inverse(*ret_d);
    for (int i = 0; i < TD_GROUP; i++)
        ret_codes[i] = (uint8_t)td_clamp((x[i] - lo) * inverse + 0.5f, 0, top);
}

/* q4_k.c: the first 16 bytes of a block of Q4_K or Q5_K, and its codes in [0, top]. */
void td_k_write(const float *values, float top, uint8_t *ret_head, uint8_t *ret_codes);
/* q4_k.c: the 128 bytes with the low halves of 256 codes. */
void td_k_join_nibbles(const uint8_t *codes, uint8_t *ret_bytes);

#endif
