/* scaled_avx2.c - products with scaled formats in 256 bits, for AVX2 and, with INTS_VNNI
 * (scaled_avxvnni.c), for a CPU whose vectors of 256 bits have a dot of bytes. */
#include "kernels/cpu/ints_avx2.h"

#ifdef INTS_VNNI
enum { I8_ROWS = 6 }; /* x 2 vectors: 12 sums, 2 of weights, 1 broadcast */
#define I8_EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
#else
enum { I8_ROWS = 3 }; /* x 2 vectors: 6 sums, 2 of weights, 2 of their sizes */
#define I8_EACH_ROWS(X) X(1) X(2) X(3)
#endif
enum { ROWS_FEW = 2 }; /* up to which rows are multiplied while widening */
#define FEW_EACH_ROWS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__)
#define I8_FLIP (CODE_FLIP & 0xffu)
#define I8_OFFSET (-CODE_OFFSET)

/* table[code] */
TD_INLINE vec v_lookup(const float *table, ivec codes)
{
    __m256 low = _mm256_permutevar8x32_ps(v_load(table), codes),
           high = _mm256_permutevar8x32_ps(v_load(table + 8), codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}
/* td_e4m3_to_f32, as in scaled_avx512.c. Read as if they had an exponent, the codes m < 8 give v =
 * 2^-7 * (1 + m / 8), and stand for 2^-6 * m / 8 = 2 v - 2^-6. That is less than v exactly where v
 * is below 2^-6, so the smaller of both is the number. */
TD_INLINE vec v_from_e4m3(ivec c)
{
    __m256i size = _mm256_slli_epi32(_mm256_and_si256(c, i_set1(0x7f)), 20);
    vec v = _mm256_castsi256_ps(_mm256_add_epi32(size, i_set1(120 << 23))),
        sign = _mm256_castsi256_ps(_mm256_slli_epi32(c, 24));
    v = v_min(v, v_fma(v, v_set1(2), v_set1(-0x1p-6f)));
    return _mm256_or_ps(v, _mm256_and_ps(sign, v_set1(-0.0f)));
}
TD_INLINE uint16_t f16_bits(float f) { return _cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT); }

#include "kernels/cpu/scaled_simd.h"
