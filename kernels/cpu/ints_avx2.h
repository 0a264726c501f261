/* ints_avx2.h - the integer vectors of blocks_simd.h and scaled_simd.h for 256 bits.
 *
 * With INTS_VNNI one vpdpbusd multiplies four bytes of a lane and adds them to its sum. Its first
 * operand is unsigned, so that is where the weights are: signed codes are stored with 128 added,
 * which the start of a sum takes away. The instruction has two encodings, of AVX-VNNI and of
 * AVX-512 (VL), with the same arithmetic.
 *
 * Without it vpmaddubsw multiplies unsigned by signed bytes and adds pairs into 16 bits,
 * saturating. Codes of 6 bits are far from that. A signed code goes in as its size, 128 at most,
 * with its sign moved to the activation: 2 * 128 * 127 fits. */
#ifndef TD_KERNELS_INTS_AVX2_H
#define TD_KERNELS_INTS_AVX2_H

#include "kernels/cpu/vec_avx2.h"

#define ivec __m256i
#ifdef INTS_VNNI
#define CODE_FLIP 0x80808080u /* of four stored codes */
#define CODE_OFFSET 128
#else
#define CODE_FLIP 0u
#define CODE_OFFSET 0
#endif

TD_INLINE ivec i_zero(void) { return _mm256_setzero_si256(); }
TD_INLINE ivec i_set1(int32_t v) { return _mm256_set1_epi32(v); }
TD_INLINE ivec i_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
TD_INLINE void i_store(int32_t *p, ivec a) { _mm256_storeu_si256((__m256i *)(void *)p, a); }
TD_INLINE ivec i_and(ivec a, ivec b) { return _mm256_and_si256(a, b); }
TD_INLINE ivec i_or(ivec a, ivec b) { return _mm256_or_si256(a, b); }
/* (a & b) | c */
TD_INLINE ivec i_and_or(ivec a, ivec b, ivec c) { return i_or(i_and(a, b), c); }
TD_INLINE ivec i_add(ivec a, ivec b) { return _mm256_add_epi32(a, b); }
TD_INLINE ivec i_max(ivec a, ivec b) { return _mm256_max_epi32(a, b); }
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
/* numbers in -128..127 */
TD_INLINE void i_store_i8(int8_t *p, ivec a)
{
    __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i *)(void *)p, _mm_packs_epi16(pairs, pairs));
}
TD_INLINE vec i_to_f32(ivec a) { return _mm256_cvtepi32_ps(a); }
TD_INLINE ivec i_from_f32(vec a) { return _mm256_cvtps_epi32(a); } /* half to even */
TD_INLINE ivec i_bits(vec a) { return _mm256_castps_si256(a); }
TD_INLINE vec v_bits(ivec a) { return _mm256_castsi256_ps(a); }

/* values[code] + CODE_OFFSET */
TD_INLINE ivec i_lookup(const int8_t *values, ivec codes)
{
    __m128i t = _mm_xor_si128(_mm_loadu_si128((const __m128i *)(const void *)values),
                              _mm_set1_epi8((char)CODE_OFFSET));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), codes);
}

/* sum + the four products of each lane. is_wide: w are signed codes, as stored. */
TD_INLINE ivec i_dot(int is_wide, ivec sum, ivec w, ivec x)
{
#if defined(INTS_VNNI) && defined(__AVXVNNI__)
    (void)is_wide;
    return _mm256_dpbusd_avx_epi32(sum, w, x);
#elif defined(INTS_VNNI)
    (void)is_wide;
    return _mm256_dpbusd_epi32(sum, w, x);
#else
    __m256i pairs = is_wide ? _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
                            : _mm256_maddubs_epi16(w, x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

#endif
