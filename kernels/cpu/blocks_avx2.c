/* blocks_avx2.c - products with block formats for AVX2: vpmaddubsw multiplies unsigned by signed
 * bytes and adds pairs into 16 bits, saturating. Codes of 6 bits are far from that. A signed code
 * goes in as its size, 128 at most, with its sign moved to the activation: 2 * 128 * 127 fits. */
#include "kernels/cpu/vec_avx2.h"

#include "kernels/blocks.h"

#define ivec __m256i
enum {
    QUANT_ROWS = 2, /* x 2 vectors: 4 sums, 4 outputs, 2 of weights and their sizes */
    QUANT_ROWS_HALVES = 2,
};
#define QUANT_EACH_ROWS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__)
#define CODE_FLIP 0u
#define CODE_OFFSET 0

TD_INLINE ivec i_zero(void) { return _mm256_setzero_si256(); }
TD_INLINE ivec i_set1(int32_t v) { return _mm256_set1_epi32(v); }
TD_INLINE ivec i_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
TD_INLINE ivec i_and(ivec a, ivec b) { return _mm256_and_si256(a, b); }
TD_INLINE ivec i_or(ivec a, ivec b) { return _mm256_or_si256(a, b); }
TD_INLINE ivec i_srli(ivec a, int n) { return _mm256_srli_epi32(a, n); }
TD_INLINE ivec i_slli(ivec a, int n) { return _mm256_slli_epi32(a, n); }
TD_INLINE ivec i_load_u8(const uint8_t *p)
{
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}
TD_INLINE ivec i_load_i8(const uint8_t *p)
{
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}
/* values[code], signed */
TD_INLINE ivec i_lookup(const int8_t *values, ivec codes)
{
    __m128i t = _mm_loadu_si128((const __m128i *)(const void *)values);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), codes);
}
/* 2^(e - 128): of e below 2 a subnormal number */
TD_INLINE vec v_load_e8m0(const uint8_t *p)
{
    __m256i e = i_load_u8(p), one = _mm256_set1_epi32(1);
    __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e),
            normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(tiny, normal, _mm256_cmpgt_epi32(e, one)));
}
TD_INLINE vec i_to_f32(ivec a) { return _mm256_cvtepi32_ps(a); }
TD_INLINE ivec i_dot(int is_wide, ivec sum, ivec w, ivec x)
{
    __m256i pairs = is_wide ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                            : _mm256_maddubs_epi16(w, x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

TD_INLINE void group_x_make(const float *x, struct td_group_x *ret) { td_group_x_make(x, ret); }

#include "kernels/cpu/blocks_simd.h"
