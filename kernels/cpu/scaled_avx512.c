/* scaled_avx512.c - products with scaled formats for AVX-512 with VNNI and, with SCALED_PAIRS
 * (scaled_avx512bf16.c), the dot of bf16 pairs. Codes of kind I8 are stored with 128 added, because
 * the first operand of vpdpbusd is unsigned; the start of a sum takes it away. */
#include "kernels/cpu/vec_avx512.h"

#define ivec __m512i
enum { I8_ROWS = 12 }; /* x 2 vectors: 24 sums, 2 of weights, 1 broadcast */
#define I8_EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
enum { ROWS_FEW = 4 }; /* up to which rows are multiplied while widening */
#define FEW_EACH_ROWS(X, ...)                                                                      \
    X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__)
#define I8_FLIP 0x80u
#define I8_OFFSET (-128)

TD_INLINE ivec i_set1(int32_t v) { return _mm512_set1_epi32(v); }
TD_INLINE ivec i_load(const void *p) { return _mm512_loadu_si512(p); }
TD_INLINE ivec i_and(ivec a, ivec b) { return _mm512_and_si512(a, b); }
TD_INLINE ivec i_or(ivec a, ivec b) { return _mm512_or_si512(a, b); }
/* (a & b) | c */
TD_INLINE ivec i_and_or(ivec a, ivec b, ivec c) { return _mm512_ternarylogic_epi32(a, b, c, 0xea); }
TD_INLINE ivec i_srli(ivec a, int n) { return _mm512_srli_epi32(a, (unsigned)n); }
TD_INLINE ivec i_load_u8(const uint8_t *p)
{
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
}
TD_INLINE vec i_to_f32(ivec a) { return _mm512_cvtepi32_ps(a); }
TD_INLINE ivec i_from_f32(vec a) { return _mm512_cvtps_epi32(a); } /* half to even */
TD_INLINE ivec i_add(ivec a, ivec b) { return _mm512_add_epi32(a, b); }
TD_INLINE ivec i_max(ivec a, ivec b) { return _mm512_max_epi32(a, b); }
TD_INLINE ivec i_bits(vec a) { return _mm512_castps_si512(a); }
TD_INLINE vec v_bits(ivec a) { return _mm512_castsi512_ps(a); }
TD_INLINE void i_store(int32_t *p, ivec a) { _mm512_storeu_si512(p, a); }
/* numbers in -128..127 */
TD_INLINE void i_store_i8(int8_t *p, ivec a)
{
    _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(a));
}
TD_INLINE ivec i_dot(int is_wide, ivec sum, ivec w, ivec x)
{
    (void)is_wide;
    return _mm512_dpbusd_epi32(sum, w, x);
}
/* table[code] */
TD_INLINE vec v_lookup(const float *table, ivec codes)
{
    return _mm512_permutexvar_ps(codes, v_load(table));
}
/* td_e4m3_to_f32 */
TD_INLINE vec v_from_e4m3(ivec c)
{
    __m512i size = _mm512_slli_epi32(_mm512_and_si512(c, i_set1(0x7f)), 20),
            sign = _mm512_slli_epi32(_mm512_and_si512(c, i_set1(0x80)), 24);
    vec v = v_mul(_mm512_castsi512_ps(size), v_set1(0x1p120f));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(v), sign));
}
TD_INLINE uint16_t f16_bits(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

#include "kernels/cpu/scaled_simd.h"
