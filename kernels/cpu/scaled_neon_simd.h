/* scaled_neon_simd.h - the product with scaled formats for aarch64: scaled_neon.c compiles it for
 * every CPU, scaled_neon_dot.c and scaled_neon_i8mm.c for those with SDOT and SMMLA (ints_neon.h),
 * which multiply integers (kind I8). All else is the same in the three: codes of 4 bits and FP8 are
 * widened to f32. BFDOT and BFMMLA round otherwise than scaled.h has it, and so have no part here.
 * How fast that is has not been measured: it has run under emulation only. */
#ifndef TD_KERNELS_SCALED_NEON_SIMD_H
#define TD_KERNELS_SCALED_NEON_SIMD_H

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/ints_neon.h"

#ifdef NEON_DOT
enum { I8_ROWS = 6 }; /* x 16 outputs: 24 registers of sums, 4 of weights, 1 broadcast */
#define I8_EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
enum { I8_ROWS = 4 }; /* 16 registers of sums, 4 of weights, 1 broadcast, 4 of products */
#define I8_EACH_ROWS(X) X(1) X(2) X(3) X(4)
#endif
enum { ROWS_FEW = 2 }; /* up to which rows are multiplied while widening */
#define FEW_EACH_ROWS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__)
#define I8_FLIP (CODE_FLIP & 0xffu)
#define I8_OFFSET (-CODE_OFFSET)

/* table[code], where a code is the low 4 bits of a lane: bytes 4 * code to 4 * code + 3. */
TD_INLINE float32x4_t lookup4(uint8x16x4_t table, int32x4_t codes)
{
    uint32x4_t c = vandq_u32(vreinterpretq_u32_s32(codes), vdupq_n_u32(15)),
               at = vmlaq_n_u32(vdupq_n_u32(0x03020100), c, 0x04040404);
    return vreinterpretq_f32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u32(at)));
}
TD_INLINE vec v_lookup(const float *table, ivec codes)
{
    uint8x16x4_t t = vld1q_u8_x4((const uint8_t *)(const void *)table);
    return v_of(lookup4(t, codes.lo), lookup4(t, codes.hi));
}
/* td_e4m3_to_f32: moved to the top of a lane and 4 bits down again, a code is 2^-120 of its number,
 * once the copies of the sign are gone. */
TD_INLINE float32x4_t e4m3_to_f32(int32x4_t c)
{
    int32x4_t spread = vshrq_n_s32(vshlq_n_s32(c, 24), 4),
              f = vandq_s32(spread, vdupq_n_s32((int32_t)0x87f00000u));
    return vmulq_n_f32(vreinterpretq_f32_s32(f), 0x1p120f);
}
TD_INLINE vec v_from_e4m3(ivec c) { return v_of(e4m3_to_f32(c.lo), e4m3_to_f32(c.hi)); }
TD_INLINE uint16_t f16_bits(float f)
{
    return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(f))), 0);
}

#ifdef NEON_I8MM
#define SCALED_I8_PAIRS
/* Adds the products of n_k codes of n_rows rows, `stride` apart, with those lines of a panel: an
 * instruction multiplies 8 k of two rows by those of two outputs. A last odd row is paired with
 * itself. */
TD_INLINE void i8_sums(int n_rows, const int8_t *x, size_t stride, size_t n_k, const uint8_t *line,
                       ivec sum[][2])
{
    enum { PAIRS = (I8_ROWS + 1) / 2, AHEAD = 4096 /* bytes, prefetched into L1 */ };
    int n = (n_rows + 1) / 2;
    ipairs pairs[PAIRS][2];
    TD_UNROLL
    for (int i = 0; i < n; i++) pairs[i][0] = pairs[i][1] = i_pairs_zero();
    for (size_t k = 0; k < n_k; k += 8, line += 16 * VW) {
        int8x16_t two[PAIRS];
        __builtin_prefetch(line + AHEAD);
        __builtin_prefetch(line + AHEAD + 64);
        TD_UNROLL
        for (int i = 0; i < n; i++) {
            const int8_t *first = x + (size_t)(2 * i) * stride + k,
                         *second = 2 * i + 1 < n_rows ? first + stride : first;
            two[i] = vcombine_s8(vld1_s8(first), vld1_s8(second));
        }
        TD_UNROLL
        for (int j = 0; j < 8; j++) {
            int8x16_t w = vreinterpretq_s8_s32(i_load4(line + 16 * j));
            TD_UNROLL
            for (int i = 0; i < n; i++) {
                int32x4_t *to = &pairs[i][j / 4].of[j % 4];
                *to = vmmlaq_s32(*to, two[i], w);
            }
        }
    }
    TD_UNROLL
    for (int r = 0; r < n_rows; r++)
        for (int v = 0; v < 2; v++)
            sum[r][v] = i_add(sum[r][v], i_of_pairs(pairs[r / 2][v], r % 2));
}
#endif

#include "kernels/cpu/scaled_simd.h"

#endif
