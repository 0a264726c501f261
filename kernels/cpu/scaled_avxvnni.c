/* scaled_avxvnni.c - products with scaled formats for a CPU with AVX2 and AVX-VNNI. */
#define TD_SIMD(name) td_avxvnni_##name
#define INTS_VNNI
#include "kernels/cpu/scaled_avx2.c"
