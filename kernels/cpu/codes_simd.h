/* codes_simd.h - widens the codes of a KV cache (kernels/kv_codes.h) to f32, exactly and without
 * their scales, in the vectors of the vec_*.h that was included before.
 *
 * fp8 (e4m3): the seven bits below the sign, moved to the top of an f32's fraction and to its
 * exponent, are 2^-120 of the value, subnormals included; one multiplication sets that right. The
 * code of NaN is never stored (a peer's would read as 480). */
#ifndef TD_KERNELS_CODES_SIMD_H
#define TD_KERNELS_CODES_SIMD_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "kernels/kv_codes.h"

/* v_load_codes: VW codes that follow each other. v_lane_code: code b (0..3) of each lane of 32
 * bits. */
#if defined(__AVX512BW__)

TD_INLINE vec v_fp8_of(__m512i u) /* the low byte of each lane */
{
    __m512i rest = _mm512_slli_epi32(_mm512_and_si512(u, _mm512_set1_epi32(0x7f)), 20),
            sign = _mm512_slli_epi32(_mm512_and_si512(u, _mm512_set1_epi32(0x80)), 24);
    return v_mul(_mm512_castsi512_ps(_mm512_or_si512(rest, sign)), v_set1(0x1p120f));
}
TD_INLINE vec v_load_codes(bool fp8, const uint8_t *p)
{
    __m128i c = _mm_loadu_si128((const __m128i *)(const void *)p);
    return fp8 ? v_fp8_of(_mm512_cvtepu8_epi32(c)) : _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(c));
}
TD_INLINE vec v_lane_code(bool fp8, vec a, int b)
{
    __m512i u = _mm512_castps_si512(a);
    if (fp8) return v_fp8_of(_mm512_srli_epi32(u, (unsigned)(8 * b)));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(u, (unsigned)(24 - 8 * b)), 24));
}

#elif defined(__AVX2__)

TD_INLINE vec v_fp8_of(__m256i u)
{
    __m256i rest = _mm256_slli_epi32(_mm256_and_si256(u, _mm256_set1_epi32(0x7f)), 20),
            sign = _mm256_slli_epi32(_mm256_and_si256(u, _mm256_set1_epi32(0x80)), 24);
    return v_mul(_mm256_castsi256_ps(_mm256_or_si256(rest, sign)), v_set1(0x1p120f));
}
TD_INLINE vec v_load_codes(bool fp8, const uint8_t *p)
{
    __m128i c = _mm_loadl_epi64((const __m128i *)(const void *)p);
    return fp8 ? v_fp8_of(_mm256_cvtepu8_epi32(c)) : _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(c));
}
TD_INLINE vec v_lane_code(bool fp8, vec a, int b)
{
    __m256i u = _mm256_castps_si256(a);
    if (fp8) return v_fp8_of(_mm256_srli_epi32(u, 8 * b));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(u, 24 - 8 * b), 24));
}

#elif defined(__ARM_NEON)

TD_INLINE float32x4_t fp8_of4(uint32x4_t u)
{
    uint32x4_t rest = vshlq_n_u32(vandq_u32(u, vdupq_n_u32(0x7f)), 20),
               sign = vshlq_n_u32(vandq_u32(u, vdupq_n_u32(0x80)), 24);
    return vmulq_n_f32(vreinterpretq_f32_u32(vorrq_u32(rest, sign)), 0x1p120f);
}
TD_INLINE vec v_load_codes(bool fp8, const uint8_t *p)
{
    uint8x8_t c = vld1_u8(p);
    if (fp8) {
        uint16x8_t w = vmovl_u8(c);
        return v_of(fp8_of4(vmovl_u16(vget_low_u16(w))), fp8_of4(vmovl_u16(vget_high_u16(w))));
    }
    int16x8_t w = vmovl_s8(vreinterpret_s8_u8(c));
    return v_of(vcvtq_f32_s32(vmovl_s16(vget_low_s16(w))),
                vcvtq_f32_s32(vmovl_s16(vget_high_s16(w))));
}
TD_INLINE float32x4_t lane_code4(bool fp8, uint32x4_t u, int b)
{
    if (fp8) return fp8_of4(u >> (uint32_t)(8 * b));
    return vcvtq_f32_s32(vreinterpretq_s32_u32(u << (uint32_t)(24 - 8 * b)) >> 24);
}
TD_INLINE vec v_lane_code(bool fp8, vec a, int b)
{
    return v_of(lane_code4(fp8, bits_lo(a), b), lane_code4(fp8, bits_hi(a), b));
}

#else /* any vectors of f32: one code at a time */

TD_INLINE vec v_codes_one_by_one(bool fp8, const uint8_t *p, ptrdiff_t step)
{
    float f[VW];
    for (int i = 0; i < VW; i++)
        f[i] = fp8 ? td_fp8_to_f32(p[i * step]) : (float)(int8_t)p[i * step];
    return v_load(f);
}
TD_INLINE vec v_load_codes(bool fp8, const uint8_t *p) { return v_codes_one_by_one(fp8, p, 1); }
TD_INLINE vec v_lane_code(bool fp8, vec a, int b)
{
    float lanes[VW]; /* little endian, as the KV layout is */
    v_store(lanes, a);
    return v_codes_one_by_one(fp8, (const uint8_t *)(const void *)lanes + b, 4);
}

#endif

#endif
