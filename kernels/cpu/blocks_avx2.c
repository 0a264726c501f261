/* blocks_avx2.c - products with block formats in 256 bits, for AVX2 and, with INTS_VNNI
 * (blocks_avxvnni.c), for a CPU whose vectors of 256 bits have a dot of bytes. */
#include "kernels/cpu/ints_avx2.h"

#include "kernels/blocks.h"

#ifdef INTS_VNNI
enum {
    QUANT_ROWS = 3, /* x 2 vectors: 6 sums, 6 outputs, 2 of weights, 1 broadcast */
    QUANT_ROWS_HALVES = 2,
};
#define QUANT_EACH_ROWS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__)
#else
enum {
    QUANT_ROWS = 2, /* x 2 vectors: 4 sums, 4 outputs, 2 of weights and their sizes */
    QUANT_ROWS_HALVES = 2,
};
#define QUANT_EACH_ROWS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__)
#endif

/* 2^(e - 128): of e below 2 a subnormal number */
TD_INLINE vec v_load_e8m0(const uint8_t *p)
{
    __m256i e = i_load_u8(p), one = _mm256_set1_epi32(1);
    __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e),
            normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(tiny, normal, _mm256_cmpgt_epi32(e, one)));
}

TD_INLINE void group_x_make(const float *x, struct td_group_x *ret) { td_group_x_make(x, ret); }

#include "kernels/cpu/blocks_simd.h"
