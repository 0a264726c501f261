/* vec_avx2.h - the vector operations of vec_avx512.h for AVX2 + FMA + F16C: 8 lanes of f32. */
#ifndef TD_KERNELS_VEC_AVX2_H
#define TD_KERNELS_VEC_AVX2_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef TD_SIMD
#define TD_SIMD(name) td_avx2_##name
#endif
#define TD_INLINE static inline __attribute__((always_inline))
#define vec __m256

enum {
    VW = 8,
    TILE_ROWS = 6, /* x 2 vectors: 12 accumulators + 2 of B + 1 broadcast fit the 16 registers */
};
#define TD_EACH_TILE_ROWS(X, ...)                                                                  \
    X(1, __VA_ARGS__)                                                                              \
    X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__) X(5, __VA_ARGS__) X(6, __VA_ARGS__)

#define FEW_ROWS 2
enum { FEW_PANELS_1 = 4, FEW_PANELS_2 = 2 };

/* Subnormal operands and results count as zero until v_flush_end gets what this returns. */
TD_INLINE unsigned v_flush_begin(void)
{
    unsigned was = _mm_getcsr();
    _mm_setcsr(was | 0x8040);
    return was;
}
TD_INLINE void v_flush_end(unsigned was) { _mm_setcsr(was); }

TD_INLINE __m256i v_first(int n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

TD_INLINE vec v_zero(void) { return _mm256_setzero_ps(); }
TD_INLINE vec v_set1(float f) { return _mm256_set1_ps(f); }
TD_INLINE vec v_load(const float *p) { return _mm256_loadu_ps(p); }
TD_INLINE vec v_load_n(const float *p, int n) { return _mm256_maskload_ps(p, v_first(n)); }
TD_INLINE void v_store(float *p, vec a) { _mm256_storeu_ps(p, a); }
TD_INLINE void v_store_n(float *p, vec a, int n) { _mm256_maskstore_ps(p, v_first(n), a); }
TD_INLINE vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
TD_INLINE vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
TD_INLINE vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
TD_INLINE vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
TD_INLINE vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); }
TD_INLINE vec v_min(vec a, vec b) { return _mm256_min_ps(a, b); }
TD_INLINE vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
TD_INLINE vec v_fnma(vec a, vec b, vec c) { return _mm256_fnmadd_ps(a, b, c); }
TD_INLINE vec v_round(vec a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
TD_INLINE vec v_scale2(vec a, vec n)
{
    __m256i e =
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}
TD_INLINE vec v_keep_ge(vec a, vec t, vec limit)
{
    return _mm256_and_ps(a, _mm256_cmp_ps(t, limit, _CMP_GE_OQ));
}
TD_INLINE vec v_keep_lanes(vec a, int lo, int hi, vec b)
{
    return _mm256_blendv_ps(b, a,
                            _mm256_castsi256_ps(_mm256_andnot_si256(v_first(lo), v_first(hi))));
}

TD_INLINE float v_sum(vec a)
{
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

TD_INLINE float v_lane0(vec a) { return _mm256_cvtss_f32(a); }

TD_INLINE float v_max_lane(vec a)
{
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

TD_INLINE int v_all_finite(vec a)
{
    __m256i inf = _mm256_set1_epi32(0x7f800000);
    __m256i e = _mm256_and_si256(_mm256_castps_si256(a), inf);
    return _mm256_testz_si256(_mm256_cmpeq_epi32(e, inf), _mm256_set1_epi32(-1));
}

TD_INLINE __m256i v_bf16_bits(vec a)
{
    __m256i u = _mm256_castps_si256(a);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(
        _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
TD_INLINE vec v_round_bf16(vec a)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(v_bf16_bits(a), 16));
}
TD_INLINE __m128i v_narrow_bits(__m256i u)
{
    return _mm_packus_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
}
TD_INLINE void v_store_bf16(uint16_t *p, vec a)
{
    _mm_storeu_si128((__m128i *)p, v_narrow_bits(v_bf16_bits(a)));
}
TD_INLINE void v_store_bf16_n(uint16_t *p, vec a, int n)
{
    uint16_t lanes[8];
    v_store_bf16(lanes, a);
    memcpy(p, lanes, (size_t)n * sizeof lanes[0]);
}

TD_INLINE __m128i v_load_half_n(const uint16_t *p, int n)
{
    uint16_t lanes[8] = {0};
    memcpy(lanes, p, (size_t)n * sizeof lanes[0]);
    return _mm_loadu_si128((const __m128i *)lanes);
}
TD_INLINE vec v_widen_bf16(__m128i h)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
TD_INLINE vec v_load_bf16(const uint16_t *p)
{
    return v_widen_bf16(_mm_loadu_si128((const __m128i *)p));
}
TD_INLINE vec v_load_bf16_n(const uint16_t *p, int n) { return v_widen_bf16(v_load_half_n(p, n)); }
TD_INLINE vec v_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
TD_INLINE vec v_load_f16_n(const uint16_t *p, int n)
{
    return _mm256_cvtph_ps(v_load_half_n(p, n));
}

TD_INLINE vec v_pair_lo(vec a)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 16));
}
TD_INLINE vec v_pair_hi(vec a)
{
    return _mm256_castsi256_ps(
        _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32((int)0xffff0000u)));
}

TD_INLINE vec v_lo_pd(vec a, vec b)
{
    return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}
TD_INLINE vec v_hi_pd(vec a, vec b)
{
    return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
}

TD_INLINE void v_store_cols4(float *dst, ptrdiff_t stride, vec r0, vec r1, vec r2, vec r3)
{
    vec a = _mm256_unpacklo_ps(r0, r1), b = _mm256_unpackhi_ps(r0, r1),
        c = _mm256_unpacklo_ps(r2, r3), d = _mm256_unpackhi_ps(r2, r3);
    vec t[4] = {v_lo_pd(a, c), v_hi_pd(a, c), v_lo_pd(b, d), v_hi_pd(b, d)};
    for (int i = 0; i < 4; i++) {
        _mm_storeu_ps(dst + (0 + i) * stride, _mm256_castps256_ps128(t[i]));
        _mm_storeu_ps(dst + (4 + i) * stride, _mm256_extractf128_ps(t[i], 1));
    }
}

TD_INLINE void v_transpose(vec r[VW])
{
    vec t[8];
    for (int i = 0; i < 8; i += 2)
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]), t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4) {
        r[i] = v_lo_pd(t[i], t[i + 2]), r[i + 1] = v_hi_pd(t[i], t[i + 2]);
        r[i + 2] = v_lo_pd(t[i + 1], t[i + 3]), r[i + 3] = v_hi_pd(t[i + 1], t[i + 3]);
    }
    /* now half q of r[4g + c] holds column 4q + c of rows 4g..4g+3 */
    for (int c = 0; c < 4; c++) t[c] = r[c], t[4 + c] = r[4 + c];
    for (int c = 0; c < 4; c++) {
        r[c] = _mm256_permute2f128_ps(t[c], t[4 + c], 0x20);
        r[4 + c] = _mm256_permute2f128_ps(t[c], t[4 + c], 0x31);
    }
}

#endif
