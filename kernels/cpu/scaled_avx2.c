/* scaled_avx2.c - products with scaled formats for AVX2. Codes of kind I8 go into vpmaddubsw as
 * their size, 128 at most, with their sign moved to the activation: 2 * 128 * 127 fits 16 bits. */
#include "kernels/cpu/vec_avx2.h"

#define ivec __m256i
enum { I8_ROWS = 3 }; /* x 2 vectors: 6 sums, 2 of weights, 2 of their sizes */
#define I8_EACH_ROWS(X) X(1) X(2) X(3)
enum { ROWS_FEW = 2 }; /* up to which rows are multiplied while widening */
#define FEW_EACH_ROWS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__)
#define I8_FLIP 0u
#define I8_OFFSET 0

TD_INLINE ivec i_set1(int32_t v) { return _mm256_set1_epi32(v); }
TD_INLINE ivec i_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
TD_INLINE ivec i_and(ivec a, ivec b) { return _mm256_and_si256(a, b); }
TD_INLINE ivec i_sub(ivec a, ivec b) { return _mm256_sub_epi32(a, b); }
TD_INLINE ivec i_srli(ivec a, int n) { return _mm256_srli_epi32(a, n); }
TD_INLINE ivec i_load_u8(const uint8_t *p)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}
TD_INLINE vec i_to_f32(ivec a) { return _mm256_cvtepi32_ps(a); }
TD_INLINE ivec i_from_f32(vec a) { return _mm256_cvtps_epi32(a); } /* half to even */
TD_INLINE ivec i_add(ivec a, ivec b) { return _mm256_add_epi32(a, b); }
TD_INLINE ivec i_max(ivec a, ivec b) { return _mm256_max_epi32(a, b); }
TD_INLINE ivec i_bits(vec a) { return _mm256_castps_si256(a); }
TD_INLINE vec v_bits(ivec a) { return _mm256_castsi256_ps(a); }
TD_INLINE void i_store(int32_t *p, ivec a) { _mm256_storeu_si256((__m256i *)(void *)p, a); }
/* numbers in -128..127 */
TD_INLINE void i_store_i8(int8_t *p, ivec a)
{
    __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packs_epi16(pairs, pairs));
}
TD_INLINE ivec i_dot(ivec sum, ivec w, ivec x)
{
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
/* table[code] */
TD_INLINE vec v_lookup(const float *table, ivec codes)
{
    __m256 low = _mm256_permutevar8x32_ps(v_load(table), codes),
           high = _mm256_permutevar8x32_ps(v_load(table + 8), codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}
/* td_e4m3_to_f32 */
TD_INLINE vec v_from_e4m3(ivec c)
{
    __m256i size = _mm256_slli_epi32(_mm256_and_si256(c, i_set1(0x7f)), 20),
            sign = _mm256_slli_epi32(_mm256_and_si256(c, i_set1(0x80)), 24);
    vec v = v_mul(_mm256_castsi256_ps(size), v_set1(0x1p120f));
    return _mm256_or_ps(v, _mm256_castsi256_ps(sign));
}
TD_INLINE uint16_t f16_bits(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

#include "kernels/cpu/scaled_simd.h"
