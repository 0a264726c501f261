/* rows_neon.c - the row-wise entries for every aarch64 CPU. The code is rows_simd.h. */
#include "kernels/cpu/vec_neon.h"

#include "kernels/cpu/rows_simd.h"
