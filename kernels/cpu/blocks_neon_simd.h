/* blocks_neon_simd.h - the integer operations of blocks_simd.h for aarch64. Three files compile
 * them, for three generations of CPUs, and give the same bits because the sums are exact:
 *   blocks_neon.c       every CPU: products widened to 16 bits, added in pairs
 *   blocks_neon_dot.c   SDOT: 4 products and their sum in each lane (NEON_DOT)
 *   blocks_neon_i8mm.c  SMMLA besides: 2 rows x 2 outputs x 8 codes (NEON_I8MM)
 * All of them multiply signed bytes by signed bytes. */
#ifndef TD_KERNELS_BLOCKS_NEON_SIMD_H
#define TD_KERNELS_BLOCKS_NEON_SIMD_H

#include "kernels/cpu/vec_neon.h"

#include "kernels/blocks.h"

struct neon_i32x8 {
    int32x4_t lo, hi;
};
#define ivec struct neon_i32x8
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
#define CODE_FLIP 0u
#define CODE_OFFSET 0

TD_INLINE ivec i_of(int32x4_t lo, int32x4_t hi) { return (ivec){lo, hi}; }
TD_INLINE ivec i_set1(int32_t v) { return i_of(vdupq_n_s32(v), vdupq_n_s32(v)); }
TD_INLINE ivec i_zero(void) { return i_set1(0); }
TD_INLINE int32x4_t i_load4(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
TD_INLINE ivec i_load(const void *p)
{
    return i_of(i_load4((const uint8_t *)p), i_load4((const uint8_t *)p + 16));
}
TD_INLINE ivec i_and(ivec a, ivec b) { return i_of(vandq_s32(a.lo, b.lo), vandq_s32(a.hi, b.hi)); }
TD_INLINE ivec i_or(ivec a, ivec b) { return i_of(vorrq_s32(a.lo, b.lo), vorrq_s32(a.hi, b.hi)); }
TD_INLINE ivec i_add(ivec a, ivec b) { return i_of(vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)); }
TD_INLINE ivec i_mul(ivec a, ivec b) { return i_of(vmulq_s32(a.lo, b.lo), vmulq_s32(a.hi, b.hi)); }
TD_INLINE int32x4_t i_srli4(int32x4_t a, int n)
{
    return vreinterpretq_s32_u32(vreinterpretq_u32_s32(a) >> (uint32_t)n);
}
TD_INLINE ivec i_srli(ivec a, int n) { return i_of(i_srli4(a.lo, n), i_srli4(a.hi, n)); }
TD_INLINE int32x4_t i_slli4(int32x4_t a, int n)
{
    return vreinterpretq_s32_u32(vreinterpretq_u32_s32(a) << (uint32_t)n);
}
TD_INLINE ivec i_slli(ivec a, int n) { return i_of(i_slli4(a.lo, n), i_slli4(a.hi, n)); }
TD_INLINE ivec i_load_u8(const uint8_t *p)
{
    uint16x8_t w = vmovl_u8(vld1_u8(p));
    return i_of(vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(w))),
                vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(w))));
}
TD_INLINE ivec i_load_i8(const uint8_t *p)
{
    int16x8_t w = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
    return i_of(vmovl_s16(vget_low_s16(w)), vmovl_s16(vget_high_s16(w)));
}
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
TD_INLINE vec i_to_f32(ivec a) { return v_of(vcvtq_f32_s32(a.lo), vcvtq_f32_s32(a.hi)); }

/* sum + the 4 products of each lane; |w| is at most 128 and |x| at most 127. */
TD_INLINE int32x4_t i_dot4(int32x4_t sum, int32x4_t w, int32x4_t x)
{
    int8x16_t a = vreinterpretq_s8_s32(w), b = vreinterpretq_s8_s32(x);
#ifdef NEON_DOT
    return vdotq_s32(sum, a, b);
#else
    int16x8_t lo = vmull_s8(vget_low_s8(a), vget_low_s8(b)), hi = vmull_high_s8(a, b);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(lo), vpaddlq_s16(hi)));
#endif
}
TD_INLINE ivec i_dot(int is_wide, ivec sum, ivec w, ivec x)
{
    (void)is_wide;
    return i_of(i_dot4(sum.lo, w.lo, x.lo), i_dot4(sum.hi, w.hi, x.hi));
}

#ifdef NEON_I8MM
#define BLOCKS_PAIRS
/* Sums of two rows x 8 outputs: register i has those of outputs 2i and 2i + 1, row by row. */
struct neon_pairs {
    int32x4_t of[4];
};
#define ipairs struct neon_pairs

TD_INLINE ipairs i_pairs_zero(void)
{
    int32x4_t zero = vdupq_n_s32(0);
    return (ipairs){{zero, zero, zero, zero}};
}

/* Adds the products of codes [at, at + 8) of two rows with two lines of 4 codes of 8 outputs. */
TD_INLINE ipairs i_dot_pairs(ipairs s, ivec w0, ivec w1, const int8_t *x0, const int8_t *x1, int at)
{
    int8x16_t x = vcombine_s8(vld1_s8(x0 + at), vld1_s8(x1 + at));
    int32x4_t w[4] = {vzip1q_s32(w0.lo, w1.lo), vzip2q_s32(w0.lo, w1.lo), vzip1q_s32(w0.hi, w1.hi),
                      vzip2q_s32(w0.hi, w1.hi)};
    for (int i = 0; i < 4; i++) s.of[i] = vmmlaq_s32(s.of[i], x, vreinterpretq_s8_s32(w[i]));
    return s;
}

/* The 8 sums of one of the two rows. */
TD_INLINE int32x4_t pairs_of_row(int32x4_t a, int32x4_t b, int row)
{
    int64x2_t p = vreinterpretq_s64_s32(a), q = vreinterpretq_s64_s32(b);
    return vreinterpretq_s32_s64(row ? vzip2q_s64(p, q) : vzip1q_s64(p, q));
}
TD_INLINE ivec i_of_pairs(ipairs s, int row)
{
    return i_of(pairs_of_row(s.of[0], s.of[1], row), pairs_of_row(s.of[2], s.of[3], row));
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
