/* blocks_avxvnni.c - products with block formats for a CPU with AVX2 and AVX-VNNI: the dot of bytes
 * of AVX-512 in vectors of 256 bits, for CPUs that lack AVX-512. */
#define TD_SIMD(name) td_avxvnni_##name
#define INTS_VNNI
#include "kernels/cpu/blocks_avx2.c"
