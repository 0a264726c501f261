#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/rows_simd.h"
