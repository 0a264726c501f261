/* attn_avx2.c - attention for AVX2 + FMA + F16C. The code is attn_simd.h; attn_avx512.c has the
 * table of what each idea bought.
 *
 * Same machine and method. Floor: multiply-add 94 GFLOP/s. Prefill of 2048: 62 GFLOP/s (66 %), of
 * 512: 56 GFLOP/s (60 %). Decode of 2048: 478 us at 8:1, 718 us at 1:1. */
#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/attn_simd.h"
