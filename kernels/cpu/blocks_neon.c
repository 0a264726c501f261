/* blocks_neon.c - products with block formats for every aarch64 CPU. */
#define TD_SIMD(name) td_neon_##name
#include "kernels/cpu/blocks_neon_simd.h"
