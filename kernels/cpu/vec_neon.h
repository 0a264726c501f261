/* vec_neon.h - the vector operations of vec_avx512.h for aarch64: a vector is two registers of 4
 * lanes, so that shapes, the order of every sum and therefore the bits are those of vec_avx2.h. All
 * of it is in the first version of the architecture, so every aarch64 CPU runs it. */
#ifndef TD_KERNELS_VEC_NEON_H
#define TD_KERNELS_VEC_NEON_H

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* A file that is compiled for an extension of the instruction set names its functions itself. */
#ifndef TD_SIMD
#define TD_SIMD(name) td_neon_##name
#endif
#define TD_INLINE static inline __attribute__((always_inline))

struct neon_f32x8 {
    float32x4_t lo, hi;
};
#define vec struct neon_f32x8

enum {
    VW = 8,
    TILE_ROWS = 6, /* x 2 vectors: 24 registers of sums + 4 of B + 1 broadcast of 32 */
};
#define TD_EACH_TILE_ROWS(X, ...)                                                                  \
    X(1, __VA_ARGS__)                                                                              \
    X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__) X(5, __VA_ARGS__) X(6, __VA_ARGS__)

#define FEW_ROWS 2
enum { FEW_PANELS_1 = 4, FEW_PANELS_2 = 2 };

/* The names under which the shared templates prefetch: a level is the locality of the builtin. */
enum { _MM_HINT_T0 = 3, _MM_HINT_T1 = 2 };
#define _mm_prefetch(p, level) __builtin_prefetch((p), 0, (level))

/* Subnormal operands and results count as zero until v_flush_end gets what this returns. */
TD_INLINE unsigned v_flush_begin(void)
{
    enum { FLUSH_TO_ZERO = 1 << 24 };
    uint64_t was;
    __asm__ volatile("mrs %0, fpcr" : "=r"(was));
    __asm__ volatile("msr fpcr, %0" : : "r"(was | FLUSH_TO_ZERO));
    return (unsigned)was;
}
TD_INLINE void v_flush_end(unsigned was)
{
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)was));
}

TD_INLINE vec v_of(float32x4_t lo, float32x4_t hi) { return (vec){lo, hi}; }
TD_INLINE vec v_of_bits(uint32x4_t lo, uint32x4_t hi)
{
    return v_of(vreinterpretq_f32_u32(lo), vreinterpretq_f32_u32(hi));
}
TD_INLINE uint32x4_t bits_lo(vec a) { return vreinterpretq_u32_f32(a.lo); }
TD_INLINE uint32x4_t bits_hi(vec a) { return vreinterpretq_u32_f32(a.hi); }

TD_INLINE vec v_zero(void) { return v_of(vdupq_n_f32(0), vdupq_n_f32(0)); }
TD_INLINE vec v_set1(float f) { return v_of(vdupq_n_f32(f), vdupq_n_f32(f)); }
TD_INLINE vec v_load(const float *p) { return v_of(vld1q_f32(p), vld1q_f32(p + 4)); }
TD_INLINE void v_store(float *p, vec a)
{
    vst1q_f32(p, a.lo);
    vst1q_f32(p + 4, a.hi);
}
TD_INLINE vec v_load_n(const float *p, int n)
{
    float lanes[VW] = {0};
    if (n == VW) return v_load(p);
    memcpy(lanes, p, (size_t)n * sizeof lanes[0]);
    return v_load(lanes);
}
TD_INLINE void v_store_n(float *p, vec a, int n)
{
    float lanes[VW];
    if (n == VW) {
        v_store(p, a);
        return;
    }
    v_store(lanes, a);
    memcpy(p, lanes, (size_t)n * sizeof lanes[0]);
}

TD_INLINE vec v_add(vec a, vec b) { return v_of(vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)); }
TD_INLINE vec v_sub(vec a, vec b) { return v_of(vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)); }
TD_INLINE vec v_mul(vec a, vec b) { return v_of(vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)); }
TD_INLINE vec v_div(vec a, vec b) { return v_of(vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)); }
/* b when either is NaN, as x86 has it; vmaxq and vminq would give NaN */
TD_INLINE float32x4_t max4(float32x4_t a, float32x4_t b)
{
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
TD_INLINE float32x4_t min4(float32x4_t a, float32x4_t b)
{
    return vbslq_f32(vcltq_f32(a, b), a, b);
}
TD_INLINE vec v_max(vec a, vec b) { return v_of(max4(a.lo, b.lo), max4(a.hi, b.hi)); }
TD_INLINE vec v_min(vec a, vec b) { return v_of(min4(a.lo, b.lo), min4(a.hi, b.hi)); }
TD_INLINE vec v_fma(vec a, vec b, vec c)
{
    return v_of(vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi));
}
TD_INLINE vec v_fnma(vec a, vec b, vec c)
{
    return v_of(vfmsq_f32(c.lo, a.lo, b.lo), vfmsq_f32(c.hi, a.hi, b.hi));
}
TD_INLINE vec v_round(vec a) { return v_of(vrndnq_f32(a.lo), vrndnq_f32(a.hi)); }
TD_INLINE float32x4_t power4(float32x4_t n)
{
    int32x4_t e = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
    return vreinterpretq_f32_s32(vshlq_n_s32(e, 23));
}
TD_INLINE vec v_scale2(vec a, vec n) { return v_mul(a, v_of(power4(n.lo), power4(n.hi))); }
TD_INLINE vec v_keep_ge(vec a, vec t, vec limit)
{
    return v_of_bits(vandq_u32(bits_lo(a), vcgeq_f32(t.lo, limit.lo)),
                     vandq_u32(bits_hi(a), vcgeq_f32(t.hi, limit.hi)));
}
/* Whether lanes [at, at + 4) are in [lo, hi). */
TD_INLINE uint32x4_t lanes_in(int at, int lo, int hi)
{
    static const int32_t first[4] = {0, 1, 2, 3};
    int32x4_t lane = vaddq_s32(vld1q_s32(first), vdupq_n_s32(at));
    return vandq_u32(vcgeq_s32(lane, vdupq_n_s32(lo)), vcltq_s32(lane, vdupq_n_s32(hi)));
}
TD_INLINE vec v_keep_lanes(vec a, int lo, int hi, vec b)
{
    return v_of(vbslq_f32(lanes_in(0, lo, hi), a.lo, b.lo),
                vbslq_f32(lanes_in(4, lo, hi), a.hi, b.hi));
}

TD_INLINE float v_sum(vec a)
{
    float32x4_t q = vaddq_f32(a.lo, a.hi);
    float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
    return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}

TD_INLINE float v_lane0(vec a) { return vgetq_lane_f32(a.lo, 0); }

TD_INLINE float v_max_lane(vec a)
{
    float32x4_t q = max4(a.lo, a.hi);
    q = max4(q, vextq_f32(q, q, 2));
    return vgetq_lane_f32(max4(q, vextq_f32(q, q, 1)), 0);
}

TD_INLINE int v_all_finite(vec a)
{
    uint32x4_t infinity = vdupq_n_u32(0x7f800000);
    uint32x4_t most = vmaxq_u32(vandq_u32(bits_lo(a), infinity), vandq_u32(bits_hi(a), infinity));
    return vmaxvq_u32(most) < 0x7f800000;
}

/* f32 rounded to bf16, nearest even, in the low half of each lane; NaN stays NaN. */
TD_INLINE uint32x4_t bf16_bits4(float32x4_t a)
{
    uint32x4_t u = vreinterpretq_u32_f32(a), high = vshrq_n_u32(u, 16);
    uint32x4_t half = vaddq_u32(vdupq_n_u32(0x7fff), vandq_u32(high, vdupq_n_u32(1)));
    uint32x4_t r = vshrq_n_u32(vaddq_u32(u, half), 16), quiet = vorrq_u32(high, vdupq_n_u32(0x40));
    return vbslq_u32(vceqq_f32(a, a), r, quiet);
}
TD_INLINE uint16x8_t v_bf16(vec a)
{
    return vcombine_u16(vmovn_u32(bf16_bits4(a.lo)), vmovn_u32(bf16_bits4(a.hi)));
}
TD_INLINE vec v_round_bf16(vec a)
{
    return v_of_bits(vshlq_n_u32(bf16_bits4(a.lo), 16), vshlq_n_u32(bf16_bits4(a.hi), 16));
}
TD_INLINE void v_store_bf16(uint16_t *p, vec a) { vst1q_u16(p, v_bf16(a)); }
TD_INLINE void v_store_bf16_n(uint16_t *p, vec a, int n)
{
    uint16_t lanes[VW];
    v_store_bf16(lanes, a);
    memcpy(p, lanes, (size_t)n * sizeof lanes[0]);
}

TD_INLINE uint16x8_t v_load_half_n(const uint16_t *p, int n)
{
    uint16_t lanes[VW] = {0};
    memcpy(lanes, p, (size_t)n * sizeof lanes[0]);
    return vld1q_u16(lanes);
}
TD_INLINE vec v_widen_bf16(uint16x8_t h)
{
    return v_of_bits(vshll_n_u16(vget_low_u16(h), 16), vshll_n_u16(vget_high_u16(h), 16));
}
TD_INLINE vec v_load_bf16(const uint16_t *p) { return v_widen_bf16(vld1q_u16(p)); }
TD_INLINE vec v_load_bf16_n(const uint16_t *p, int n) { return v_widen_bf16(v_load_half_n(p, n)); }
TD_INLINE vec v_widen_f16(uint16x8_t h)
{
    return v_of(vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(h))),
                vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(h))));
}
TD_INLINE vec v_load_f16(const uint16_t *p) { return v_widen_f16(vld1q_u16(p)); }
TD_INLINE vec v_load_f16_n(const uint16_t *p, int n) { return v_widen_f16(v_load_half_n(p, n)); }

TD_INLINE vec v_pair_lo(vec a)
{
    return v_of_bits(vshlq_n_u32(bits_lo(a), 16), vshlq_n_u32(bits_hi(a), 16));
}
TD_INLINE vec v_pair_hi(vec a)
{
    uint32x4_t high = vdupq_n_u32(0xffff0000u);
    return v_of_bits(vandq_u32(bits_lo(a), high), vandq_u32(bits_hi(a), high));
}

/* r[i][j] <-> r[j][i] of 4 x 4 lanes */
TD_INLINE void transpose4(float32x4_t r[4])
{
    float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(r[0], r[1])),
                b = vreinterpretq_f64_f32(vtrn2q_f32(r[0], r[1])),
                c = vreinterpretq_f64_f32(vtrn1q_f32(r[2], r[3])),
                d = vreinterpretq_f64_f32(vtrn2q_f32(r[2], r[3]));
    r[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
    r[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
    r[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
    r[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
}

TD_INLINE void v_store_cols4(float *dst, ptrdiff_t stride, vec r0, vec r1, vec r2, vec r3)
{
    float32x4_t lo[4] = {r0.lo, r1.lo, r2.lo, r3.lo}, hi[4] = {r0.hi, r1.hi, r2.hi, r3.hi};
    transpose4(lo);
    transpose4(hi);
    for (int i = 0; i < 4; i++) {
        vst1q_f32(dst + i * stride, lo[i]);
        vst1q_f32(dst + (4 + i) * stride, hi[i]);
    }
}

TD_INLINE void v_transpose(vec r[VW])
{
    float32x4_t q[2][2][4]; /* the quarters */
    for (int i = 0; i < VW; i++) q[i / 4][0][i % 4] = r[i].lo, q[i / 4][1][i % 4] = r[i].hi;
    for (int i = 0; i < 4; i++) transpose4(q[i / 2][i % 2]);
    for (int i = 0; i < VW; i++) r[i] = v_of(q[0][i / 4][i % 4], q[1][i / 4][i % 4]);
}

#endif
