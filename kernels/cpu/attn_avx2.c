#include "kernels/cpu/vec_avx2.h"

#include "kernels/cpu/attn_simd.h"
