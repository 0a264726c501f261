/* blocks_avx512.c - products with block formats for AVX-512 with VNNI: one vpdpbusd multiplies a
 * line of 16 x 4 codes by 4 activations. Its first operand is unsigned, so that is where the
 * weights are: 8-bit codes are stored with 128 added, which the start of the sum takes away. */
#include "kernels/cpu/vec_avx512.h"

#include "kernels/blocks.h"

#define ivec __m512i
enum { QUANT_ROWS = 6 }; /* x 2 vectors: 12 sums, 12 outputs, 2 of weights, 2 of scales */
#define QUANT_EACH_ROWS(X, ...)                                                                    \
    X(1, __VA_ARGS__)                                                                              \
    X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__) X(5, __VA_ARGS__) X(6, __VA_ARGS__)
#define CODE_FLIP 0x80808080u
#define CODE_OFFSET 128

TD_INLINE ivec i_zero(void) { return _mm512_setzero_si512(); }
TD_INLINE ivec i_set1(int32_t v) { return _mm512_set1_epi32(v); }
TD_INLINE ivec i_load(const void *p) { return _mm512_loadu_si512(p); }
TD_INLINE ivec i_and(ivec a, ivec b) { return _mm512_and_si512(a, b); }
TD_INLINE ivec i_srli(ivec a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
TD_INLINE vec i_to_f32(ivec a) { return _mm512_cvtepi32_ps(a); }
TD_INLINE ivec i_dot(int is_8_bits, ivec sum, ivec w, ivec x)
{
    (void)is_8_bits;
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
    ret->s = max / 127.0f;
    ret->sum = _mm512_reduce_add_epi32(_mm512_add_epi32(ca, cb));
}

#include "kernels/cpu/blocks_simd.h"
