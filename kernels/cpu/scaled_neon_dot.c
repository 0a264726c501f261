/* scaled_neon_dot.c - products with scaled formats for CPUs with SDOT (FEAT_DotProd). */
#define TD_SIMD(name) td_neon_dot_##name
#define NEON_DOT
#include "kernels/cpu/scaled_neon_simd.h"
