/* gemm_neon.c - the matrix product for every aarch64 CPU, in tiles of 6 rows x 16 columns of f32
 * multiply-adds. The code is gemm_simd.h, its sizes are those that were measured for AVX2. How fast
 * it is has not been measured: it has run under emulation only. */
#include "kernels/cpu/vec_neon.h"

#include "kernels/cpu/gemm_simd.h"
