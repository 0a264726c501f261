/* gemm_avx512bf16.c - the matrix product for AVX-512 with the dot instruction of bf16 pairs: two
 * multiply-adds a lane where gemm_avx512.c has one and widens. The code is gemm_simd.h; weights of
 * other types are those of gemm_avx512.c.
 *
 * The instruction (vdpbf16ps) adds the product of the high halves and then that of the low ones,
 * each addition fused and rounded to nearest, subnormal numbers as zero. A pair holds its first k
 * high, so an output is the same chain along ascending k as in the other tables, with the same
 * bits. kernels_gemm_test compares them, and ref/bf16_chain.h says it in plain C.
 *
 * Machine: one core of an AMD EPYC (Zen 4), 1 MiB L2, beside other work (load 10 to 20); therefore
 * CPU time, best of 7 to 12 calls, weights cycled through 400 to 512 MiB. Floors of the same runs:
 * dot of pairs 220 GFLOP/s, widening + multiply-add 106. Shape 11264x2048; m=1, 2 and 4 in GB/s,
 * the others in GFLOP/s.
 *                                             m=1    m=2    m=4    m=5    m=16   m=512
 *   gemm_avx512.c                             20.8   19.4   19.0   18.9   103     94
 *   this file, panels as there (4, 4, 2)      22.0   18.5   12-21  16-18  212    192-204
 *   one panel at a time                       28.0   21.8   16.2   17.5
 *   from 3 rows on as a tile                                17.5   21
 * m=16 reaches 92 to 96 % of the dot's floor, m=512 87 to 93 %. */
#define TD_SIMD(name) td_avx512bf16_##name
#define GEMM_OTHER_TYPES(entry) td_avx512_##entry
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/gemm_simd.h"
