/* scaled_avx512bf16.c - products with scaled formats for AVX-512 with the dot of bf16 pairs, by
 * which E4M3 is multiplied; the other formats are those of scaled_avx512.c. */
#define TD_SIMD(name) td_avx512bf16_##name
#define SCALED_PAIRS
#include "kernels/cpu/scaled_avx512.c"
