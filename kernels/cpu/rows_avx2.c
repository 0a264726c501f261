/* rows_avx2.c - the row-wise entries for AVX2. The code is rows_simd.h; it is memory-bound or tiny,
 * so there is no table of ideas. */
#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/rows_simd.h"
