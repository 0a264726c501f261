/* gemm_avx2.c - the matrix product for AVX2 + FMA + F16C, in tiles of 6 rows x 2 vectors of 8
 * lanes. The code is gemm_simd.h; gemm_avx512.c has the table of what each idea bought.
 *
 * Same machine and method, shape 2048x2048, bf16. Floors: multiply-add 94 GFLOP/s, widening +
 * multiply-add 83 GFLOP/s, memory 16.2 GB/s.
 *   m=1    15.8 GB/s   (98 %)
 *   m=4    13.3 GB/s   (82 %)
 *   m=16   80 GFLOP/s  (95 %)
 *   m=512  76 GFLOP/s  (92 %)
 * Widening once for all tiles pays from 9 tiles on here too: with 3 tiles, m=16 had 60 GFLOP/s. */
#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/gemm_simd.h"
