#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/attn_simd.h"
