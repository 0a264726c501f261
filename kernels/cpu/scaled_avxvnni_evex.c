/* scaled_avxvnni_evex.c - scaled_avxvnni.c in the encoding of AVX-512 (VL), as
 * blocks_avxvnni_evex.c. */
#define TD_SIMD(name) td_avxvnni_evex_##name
#define INTS_VNNI
#include "kernels/cpu/scaled_avx2.c"
