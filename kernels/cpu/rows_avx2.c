/* rows_avx2.c - the row-wise entries; rows_simd.h. Memory-bound or tiny: no ladder. */
#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/rows_simd.h"
