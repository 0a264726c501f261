/* blocks_avx512.c - products with block formats for AVX-512 with VNNI: one vpdpbusd multiplies a
 * line of 16 x 4 codes by 4 activations. Its first operand is unsigned, so that is where the
 * weights are: 8-bit codes are stored with 128 added, which the start of the sum takes away. */
#include "kernels/cpu/vec_avx512.h"

#include "kernels/blocks.h"

#define ivec __m512i
enum {
    QUANT_ROWS = 6,        /* x 2 vectors: 12 sums, 12 outputs, 2 of weights, 2 of scales */
    QUANT_ROWS_HALVES = 4, /* 8 sums, 8 of the first half, 8 outputs */
};
#define QUANT_EACH_ROWS(X, ...)                                                                    \
    X(1, __VA_ARGS__)                                                                              \
    X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__) X(5, __VA_ARGS__) X(6, __VA_ARGS__)
#define CODE_FLIP 0x80808080u
#define CODE_OFFSET 128

TD_INLINE ivec i_zero(void) { return _mm512_setzero_si512(); }
TD_INLINE ivec i_set1(int32_t v) { return _mm512_set1_epi32(v); }
TD_INLINE ivec i_load(const void *p) { return _mm512_loadu_si512(p); }
TD_INLINE ivec i_and(ivec a, ivec b) { return _mm512_and_si512(a, b); }
TD_INLINE ivec i_or(ivec a, ivec b) { return _mm512_or_si512(a, b); }
TD_INLINE ivec i_srli(ivec a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
TD_INLINE ivec i_slli(ivec a, int n) { return _mm512_slli_epi32(a, (unsigned)n); }
TD_INLINE ivec i_load_u8(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}
TD_INLINE ivec i_load_i8(const uint8_t *p)
{
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}
/* values[code] + 128 */
TD_INLINE ivec i_lookup(const int8_t *values, ivec codes)
{
    __m128i t = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(const void *)values),
                              _mm_set1_epi8((char)0x80));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), codes);
}
/* 2^(e - 128): of e below 2 a subnormal number */
TD_INLINE vec v_load_e8m0(const uint8_t *p)
{
    __m512i e = i_load_u8(p), one = _mm512_set1_epi32(1);
    __m512i tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e),
            normal = _mm512_slli_epi32(_mm512_sub_epi32(e, one), 23);
    return _mm512_castsi512_ps(
        _mm512_mask_mov_epi32(normal, _mm512_cmple_epi32_mask(e, one), tiny));
}
TD_INLINE vec i_to_f32(ivec a) { return _mm512_cvtepi32_ps(a); }
TD_INLINE ivec i_dot(int is_wide, ivec sum, ivec w, ivec x)
{
    (void)is_wide;
    return _mm512_dpbusd_epi32(sum, w, x);
}

/* td_group_x_make, 16 values at a time. */
TD_INLINE void group_x_make(const float *x, struct td_group_x *ret)
{
    const __m512i size_bits = _mm512_set1_epi32(0x7fffffff);
    vec a = v_load(x), b = v_load(x + VW);
    __m512i sizes = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a), size_bits),
                                     _mm512_and_si512(_mm512_castps_si512(b), size_bits));
    uint32_t most = _mm512_reduce_max_epu32(sizes);
    if (most >= 0x7f800000u || most < (127u - 100u) << 23) {
        td_group_x_make(x, ret);
        return;
    }
    float max;
    memcpy(&max, &most, sizeof max);
    vec inverse = v_set1(127.0f / max);
    __m512i ca = _mm512_cvtps_epi32(v_mul(a, inverse)), cb = _mm512_cvtps_epi32(v_mul(b, inverse));
    _mm_storeu_si128((__m128i *)(void *)ret->codes, _mm512_cvtepi32_epi8(ca));
    _mm_storeu_si128((__m128i *)(void *)(ret->codes + VW), _mm512_cvtepi32_epi8(cb));
    td_group_x_end(max, _mm512_reduce_add_epi32(ca), _mm512_reduce_add_epi32(cb), ret);
}

#include "kernels/cpu/blocks_simd.h"
