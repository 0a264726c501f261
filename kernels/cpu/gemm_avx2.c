#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/gemm_simd.h"
