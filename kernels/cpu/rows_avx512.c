/* rows_avx512.c - the row-wise entries; rows_simd.h. Memory-bound or tiny: no ladder. */
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/rows_simd.h"
