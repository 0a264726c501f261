/* blocks_avxvnni_evex.c - blocks_avxvnni.c in the encoding of AVX-512 (VL): for a CPU that has that
 * one alone, and so that this code is tested wherever either is. */
#define TD_SIMD(name) td_avxvnni_evex_##name
#define INTS_VNNI
#include "kernels/cpu/blocks_avx2.c"
