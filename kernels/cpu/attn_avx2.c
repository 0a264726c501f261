/* attn_avx2.c - attention for AVX2 + FMA + F16C. The code is attn_simd.h, the ladder in
 * attn_avx512.c.
 *
 * Same machine and method; floor: multiply-add 94 GFLOP/s. Prefill 2048: 62 GFLOP/s (66 %), 512:
 * 56 (60 %). Decode of 2048: 478 us at 8:1, 718 us at 1:1. */
#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/attn_simd.h"
