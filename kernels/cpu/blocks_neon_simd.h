/* blocks_neon_simd.h - the product with block formats for aarch64: blocks_neon.c compiles it for
 * every CPU, blocks_neon_dot.c and blocks_neon_i8mm.c for those with SDOT, and SMMLA besides
 * (ints_neon.h). */
#ifndef TD_KERNELS_BLOCKS_NEON_SIMD_H
#define TD_KERNELS_BLOCKS_NEON_SIMD_H

#include "kernels/cpu/ints_neon.h"

#include "kernels/blocks.h"

enum {
#ifdef NEON_I8MM
    QUANT_ROWS = 4, /* two pairs of rows x 16 outputs: 16 registers of sums */
    QUANT_ROWS_HALVES = 4,
#else
    QUANT_ROWS = 3, /* 12 registers of sums, 12 of outputs, 4 of weights */
    QUANT_ROWS_HALVES = 2,
#endif
};
#ifdef NEON_I8MM
#define QUANT_EACH_ROWS(X, ...)                                                                    \
    X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__)
#else
#define QUANT_EACH_ROWS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__)
#endif
/* values[code], signed */
TD_INLINE int32x4_t i_lookup4(int8x16_t values, int32x4_t codes)
{
    return vreinterpretq_s32_s8(vqtbl1q_s8(values, vreinterpretq_u8_s32(codes)));
}
TD_INLINE ivec i_lookup(const int8_t *values, ivec codes)
{
    int8x16_t t = vld1q_s8(values);
    return i_of(i_lookup4(t, codes.lo), i_lookup4(t, codes.hi));
}
/* 2^(e - 128): of e below 2 a subnormal number */
TD_INLINE float32x4_t e8m0_to_f32(int32x4_t e)
{
    int32x4_t one = vdupq_n_s32(1);
    int32x4_t tiny = vshlq_s32(vdupq_n_s32(0x00200000), e),
              normal = vshlq_n_s32(vsubq_s32(e, one), 23);
    return vreinterpretq_f32_s32(vbslq_s32(vcgtq_s32(e, one), normal, tiny));
}
TD_INLINE vec v_load_e8m0(const uint8_t *p)
{
    ivec e = i_load_u8(p);
    return v_of(e8m0_to_f32(e.lo), e8m0_to_f32(e.hi));
}

#ifdef NEON_I8MM
#define BLOCKS_PAIRS
/* Adds the products of codes [at, at + 8) of two rows with two lines of 4 codes of 8 outputs. */
TD_INLINE ipairs i_dot_pairs(ipairs s, ivec w0, ivec w1, const int8_t *x0, const int8_t *x1, int at)
{
    int8x16_t x = vcombine_s8(vld1_s8(x0 + at), vld1_s8(x1 + at));
    int32x4_t w[4] = {vzip1q_s32(w0.lo, w1.lo), vzip2q_s32(w0.lo, w1.lo), vzip1q_s32(w0.hi, w1.hi),
                      vzip2q_s32(w0.hi, w1.hi)};
    for (int i = 0; i < 4; i++) s.of[i] = vmmlaq_s32(s.of[i], x, vreinterpretq_s8_s32(w[i]));
    return s;
}
#endif

/* td_group_x_make, 16 values at a time. */
TD_INLINE int32x4_t codes4(float32x4_t x, float inverse)
{
    return vcvtnq_s32_f32(vmulq_n_f32(x, inverse));
}
TD_INLINE int32_t codes16(const float *x, float inverse, int8_t *ret_codes)
{
    int32x4_t c[4];
    for (int i = 0; i < 4; i++) c[i] = codes4(vld1q_f32(x + 4 * i), inverse);
    int16x8_t lo = vcombine_s16(vmovn_s32(c[0]), vmovn_s32(c[1])),
              hi = vcombine_s16(vmovn_s32(c[2]), vmovn_s32(c[3]));
    vst1q_s8(ret_codes, vcombine_s8(vmovn_s16(lo), vmovn_s16(hi)));
    return vaddvq_s32(vaddq_s32(vaddq_s32(c[0], c[1]), vaddq_s32(c[2], c[3])));
}
TD_INLINE void group_x_make(const float *x, struct td_group_x *ret)
{
    uint32x4_t sizes = vdupq_n_u32(0), size_bits = vdupq_n_u32(0x7fffffff);
    for (int i = 0; i < TD_GROUP; i += 4)
        sizes = vmaxq_u32(sizes, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), size_bits));
    uint32_t most = vmaxvq_u32(sizes);
    if (most >= 0x7f800000u || most < (127u - 100u) << 23) {
        td_group_x_make(x, ret);
        return;
    }
    float max;
    memcpy(&max, &most, sizeof max);
    int32_t lo = codes16(x, 127.0f / max, ret->codes),
            hi = codes16(x + 16, 127.0f / max, ret->codes + 16);
    td_group_x_end(max, lo, hi, ret);
}

#include "kernels/cpu/blocks_simd.h"

#endif
