/* gemm_avx2.c - the product for AVX2 + FMA + F16C. The code is gemm_simd.h, the ladder in
 * gemm_avx512.c; tile 6x2 of 8 lanes.
 *
 * Same machine and method, shape 2048x2048 bf16; floors: multiply-add 94 GFLOP/s, widening +
 * multiply-add 83, memory 16.2 GB/s.
 *   m=1 15.8 GB/s (98 %)   m=4 13.3 GB/s (82 %)   m=16 80 GFLOP/s (95 %)   m=512 76 (92 %)
 * Widening once pays from 9 tiles on here too: m=16 had 60 when 3 tiles did it. */
#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/gemm_simd.h"
