/* scaled_neon.c - products with scaled formats for every aarch64 CPU. */
#define TD_SIMD(name) td_neon_##name
#include "kernels/cpu/scaled_neon_simd.h"
