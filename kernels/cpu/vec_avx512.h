/* vec_avx512.h - the vector operations in which the fast kernels are written, for AVX-512 (F, BW,
 * DQ, VL): 16 lanes of f32. vec_avx2.h and vec_neon.h define the same operations with 8 lanes. A
 * .c file includes one of the three and then the *_simd.h files that use them. */
#ifndef TD_KERNELS_VEC_AVX512_H
#define TD_KERNELS_VEC_AVX512_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#ifndef TD_SIMD
#define TD_SIMD(name) td_avx512_##name
#endif
#define TD_INLINE static inline __attribute__((always_inline))
#define vec __m512

enum {
    VW = 16,        /* lanes */
    TILE_ROWS = 12, /* x 2 vectors: 24 accumulators + 2 of B + 1 broadcast fit the 32 registers */
};
#define TD_EACH_TILE_ROWS(X, ...)                                                                  \
    X(1, __VA_ARGS__)                                                                              \
    X(2, __VA_ARGS__)                                                                              \
    X(3, __VA_ARGS__)                                                                              \
    X(4, __VA_ARGS__)                                                                              \
    X(5, __VA_ARGS__)                                                                              \
    X(6, __VA_ARGS__)                                                                              \
    X(7, __VA_ARGS__)                                                                              \
    X(8, __VA_ARGS__) X(9, __VA_ARGS__) X(10, __VA_ARGS__) X(11, __VA_ARGS__) X(12, __VA_ARGS__)

/* Up to FEW_ROWS rows take several panels at once: FEW_PANELS_n panels with n rows. */
#define FEW_ROWS 5
enum { FEW_PANELS_1 = 4, FEW_PANELS_2 = 4, FEW_PANELS_3 = 2, FEW_PANELS_4 = 2, FEW_PANELS_5 = 2 };

/* Subnormal operands and results count as zero until v_flush_end gets what this returns. */
TD_INLINE unsigned v_flush_begin(void)
{
    unsigned was = _mm_getcsr();
    _mm_setcsr(was | 0x8040);
    return was;
}
TD_INLINE void v_flush_end(unsigned was) { _mm_setcsr(was); }

TD_INLINE __mmask16 v_first(int n) { return (__mmask16)((1u << n) - 1u); }

TD_INLINE vec v_zero(void) { return _mm512_setzero_ps(); }
TD_INLINE vec v_set1(float f) { return _mm512_set1_ps(f); }
TD_INLINE vec v_load(const float *p) { return _mm512_loadu_ps(p); }
TD_INLINE vec v_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(v_first(n), p); }
TD_INLINE void v_store(float *p, vec a) { _mm512_storeu_ps(p, a); }
TD_INLINE void v_store_n(float *p, vec a, int n) { _mm512_mask_storeu_ps(p, v_first(n), a); }
TD_INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
TD_INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
TD_INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
TD_INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
TD_INLINE vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); } /* b when either is NaN */
TD_INLINE vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
TD_INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }   /* a*b + c */
TD_INLINE vec v_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); } /* c - a*b */
#ifdef __AVX512BF16__
/* Each lane: c + a_high * b_high, then + a_low * b_low, where high and low are the lane's two bf16.
 * Each addition is fused and rounded to nearest; subnormal operands and results count as zero. */
TD_INLINE vec v_dot_bf16(vec a, vec b, vec c)
{
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
}
/* The two bf16 of each lane change places. */
TD_INLINE vec v_swap_halves(vec a)
{
    return _mm512_castsi512_ps(_mm512_rol_epi32(_mm512_castps_si512(a), 16));
}
/* Pairs of bf16 of the first n lanes of lo and hi, the earlier one high; half a pair has -0 low. */
TD_INLINE vec v_pairs(vec lo, vec hi, int n)
{
    __m512i pairs = _mm512_rol_epi32((__m512i)_mm512_cvtne2ps_pbh(hi, lo), 16);
    if (n % 2)
        pairs =
            _mm512_mask_or_epi32(pairs, (__mmask16)(1u << n / 2), pairs, _mm512_set1_epi32(0x8000));
    return _mm512_castsi512_ps(pairs);
}
#endif
TD_INLINE vec v_round(vec a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
TD_INLINE vec v_scale2(vec a, vec n)
{
    return _mm512_scalef_ps(a, n);
} /* a * 2^n, n a whole number in [-126, 127] */
TD_INLINE vec v_keep_ge(vec a, vec t, vec limit)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(t, limit, _CMP_GE_OQ), a);
}
/* lanes lo <= i < hi of a, the rest from b */
TD_INLINE vec v_keep_lanes(vec a, int lo, int hi, vec b)
{
    return _mm512_mask_mov_ps(b, (__mmask16)(v_first(hi) & ~v_first(lo)), a);
}

/* The sum of all lanes, always by the same tree: halves, quarters and so on. */
TD_INLINE float v_sum(vec a)
{
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

TD_INLINE float v_lane0(vec a) { return _mm512_cvtss_f32(a); }

TD_INLINE float v_max_lane(vec a)
{
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

TD_INLINE int v_all_finite(vec a)
{
    __m512i e = _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7f800000));
    return _mm512_cmpeq_epi32_mask(e, _mm512_set1_epi32(0x7f800000)) == 0;
}

/* f32 rounded to bf16, nearest even, as bits in the low half of each lane; NaN stays NaN. The
 * hardware's conversion is not used: it flushes subnormals. */
TD_INLINE __m512i v_bf16_bits(vec a)
{
    __m512i u = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(
        _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    return _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
}
TD_INLINE vec v_round_bf16(vec a)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(v_bf16_bits(a), 16));
}
TD_INLINE void v_store_bf16(uint16_t *p, vec a)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(v_bf16_bits(a)));
}
TD_INLINE void v_store_bf16_n(uint16_t *p, vec a, int n)
{
    _mm512_mask_cvtepi32_storeu_epi16(p, v_first(n), v_bf16_bits(a));
}

TD_INLINE vec v_widen_bf16(__m256i h)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
TD_INLINE vec v_load_bf16(const uint16_t *p)
{
    return v_widen_bf16(_mm256_loadu_si256((const __m256i *)p));
}
TD_INLINE vec v_load_bf16_n(const uint16_t *p, int n)
{
    return v_widen_bf16(_mm256_maskz_loadu_epi16(v_first(n), p));
}
TD_INLINE vec v_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
TD_INLINE vec v_load_f16_n(const uint16_t *p, int n)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(v_first(n), p));
}

/* Lanes of 32 bits holding two bf16: the low and the high one, widened. */
TD_INLINE vec v_pair_lo(vec a)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 16));
}
TD_INLINE vec v_pair_hi(vec a)
{
    return _mm512_castsi512_ps(
        _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)0xffff0000u)));
}

/* dst[k * stride + i] = r_i[k] for k < VW, i < 4 */
TD_INLINE void v_store_cols4(float *dst, ptrdiff_t stride, vec r0, vec r1, vec r2, vec r3)
{
    __m512 a = _mm512_unpacklo_ps(r0, r1), b = _mm512_unpackhi_ps(r0, r1);
    __m512 c = _mm512_unpacklo_ps(r2, r3), d = _mm512_unpackhi_ps(r2, r3);
    __m512 t[4];
    t[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
    t[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
    t[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
    t[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
    for (int i = 0; i < 4; i++) {
        _mm_storeu_ps(dst + (0 + i) * stride, _mm512_castps512_ps128(t[i]));
        _mm_storeu_ps(dst + (4 + i) * stride, _mm512_extractf32x4_ps(t[i], 1));
        _mm_storeu_ps(dst + (8 + i) * stride, _mm512_extractf32x4_ps(t[i], 2));
        _mm_storeu_ps(dst + (12 + i) * stride, _mm512_extractf32x4_ps(t[i], 3));
    }
}

/* r[i][j] <-> r[j][i], lanes of 32 bits moved as they are */
TD_INLINE void v_transpose(vec r[VW])
{
    __m512 t[16];
#define TD_PAIR_PS(i)                                                                              \
    t[i] = _mm512_unpacklo_ps(r[i], r[(i) + 1]), t[(i) + 1] = _mm512_unpackhi_ps(r[i], r[(i) + 1])
    TD_PAIR_PS(0), TD_PAIR_PS(2), TD_PAIR_PS(4), TD_PAIR_PS(6), TD_PAIR_PS(8), TD_PAIR_PS(10),
        TD_PAIR_PS(12), TD_PAIR_PS(14);
#undef TD_PAIR_PS
#define TD_LO_PD(a, b)                                                                             \
    _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
#define TD_HI_PD(a, b)                                                                             \
    _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)))
#define TD_QUAD_PD(i)                                                                              \
    r[i] = TD_LO_PD(t[i], t[(i) + 2]), r[(i) + 1] = TD_HI_PD(t[i], t[(i) + 2]),                    \
    r[(i) + 2] = TD_LO_PD(t[(i) + 1], t[(i) + 3]), r[(i) + 3] = TD_HI_PD(t[(i) + 1], t[(i) + 3])
    TD_QUAD_PD(0), TD_QUAD_PD(4), TD_QUAD_PD(8), TD_QUAD_PD(12);
#undef TD_QUAD_PD
#undef TD_LO_PD
#undef TD_HI_PD
    /* now lane-of-128 q of r[4g + c] holds columns 4q + c of rows 4g..4g+3 */
#define TD_OCT(c)                                                                                  \
    t[c] = _mm512_shuffle_f32x4(r[c], r[4 + (c)], 0x88),                                           \
    t[4 + (c)] = _mm512_shuffle_f32x4(r[c], r[4 + (c)], 0xdd),                                     \
    t[8 + (c)] = _mm512_shuffle_f32x4(r[8 + (c)], r[12 + (c)], 0x88),                              \
    t[12 + (c)] = _mm512_shuffle_f32x4(r[8 + (c)], r[12 + (c)], 0xdd)
    TD_OCT(0), TD_OCT(1), TD_OCT(2), TD_OCT(3);
#undef TD_OCT
#define TD_HEX(c)                                                                                  \
    r[c] = _mm512_shuffle_f32x4(t[c], t[8 + (c)], 0x88),                                           \
    r[8 + (c)] = _mm512_shuffle_f32x4(t[c], t[8 + (c)], 0xdd),                                     \
    r[4 + (c)] = _mm512_shuffle_f32x4(t[4 + (c)], t[12 + (c)], 0x88),                              \
    r[12 + (c)] = _mm512_shuffle_f32x4(t[4 + (c)], t[12 + (c)], 0xdd)
    TD_HEX(0), TD_HEX(1), TD_HEX(2), TD_HEX(3);
#undef TD_HEX
}

#endif
