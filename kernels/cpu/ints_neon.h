/* ints_neon.h - the integer vectors of blocks_simd.h and scaled_simd.h for aarch64. They are
 * compiled for three generations of CPUs, and give the same bits because the sums are exact:
 *   every CPU   products widened to 16 bits, added in pairs
 *   NEON_DOT    SDOT: 4 products and their sum in each lane (FEAT_DotProd)
 *   NEON_I8MM   SMMLA besides: 2 rows x 2 outputs x 8 codes (FEAT_I8MM)
 * All of them multiply signed bytes by signed bytes. */
#ifndef TD_KERNELS_INTS_NEON_H
#define TD_KERNELS_INTS_NEON_H

#include "kernels/cpu/vec_neon.h"

struct neon_i32x8 {
    int32x4_t lo, hi;
};
#define ivec struct neon_i32x8
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
TD_INLINE void i_store(int32_t *p, ivec a)
{
    vst1q_s32(p, a.lo);
    vst1q_s32(p + 4, a.hi);
}
TD_INLINE ivec i_and(ivec a, ivec b) { return i_of(vandq_s32(a.lo, b.lo), vandq_s32(a.hi, b.hi)); }
TD_INLINE ivec i_or(ivec a, ivec b) { return i_of(vorrq_s32(a.lo, b.lo), vorrq_s32(a.hi, b.hi)); }
/* (a & b) | c, where c has no bit of b */
TD_INLINE ivec i_and_or(ivec a, ivec b, ivec c)
{
    return i_of(vbslq_s32(vreinterpretq_u32_s32(b.lo), a.lo, c.lo),
                vbslq_s32(vreinterpretq_u32_s32(b.hi), a.hi, c.hi));
}
TD_INLINE ivec i_add(ivec a, ivec b) { return i_of(vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)); }
TD_INLINE ivec i_max(ivec a, ivec b) { return i_of(vmaxq_s32(a.lo, b.lo), vmaxq_s32(a.hi, b.hi)); }
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
/* numbers in -128..127 */
TD_INLINE void i_store_i8(int8_t *p, ivec a)
{
    vst1_s8(p, vmovn_s16(vcombine_s16(vmovn_s32(a.lo), vmovn_s32(a.hi))));
}
TD_INLINE vec i_to_f32(ivec a) { return v_of(vcvtq_f32_s32(a.lo), vcvtq_f32_s32(a.hi)); }
/* half to even */
TD_INLINE ivec i_from_f32(vec a) { return i_of(vcvtnq_s32_f32(a.lo), vcvtnq_s32_f32(a.hi)); }
TD_INLINE ivec i_bits(vec a)
{
    return i_of(vreinterpretq_s32_f32(a.lo), vreinterpretq_s32_f32(a.hi));
}
TD_INLINE vec v_bits(ivec a)
{
    return v_of(vreinterpretq_f32_s32(a.lo), vreinterpretq_f32_s32(a.hi));
}

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

#endif
