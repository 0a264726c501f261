/* scaled_neon_i8mm.c - products with scaled formats for CPUs with SMMLA (FEAT_I8MM), all of which
 * have SDOT. */
#define TD_SIMD(name) td_neon_i8mm_##name
#define NEON_DOT
#define NEON_I8MM
#include "kernels/cpu/scaled_neon_simd.h"
