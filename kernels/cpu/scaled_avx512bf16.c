/* scaled_avx512bf16.c - products with scaled formats for AVX-512 with the dot of bf16 pairs, by
 * which E4M3 is multiplied, and all of X_BF16; the other formats are those of scaled_avx512.c.
 *
 * Machine: one core of an AMD EPYC (Zen 4) beside other work (load 20 to 40); therefore CPU time,
 * best of 7 calls, 11264x2048, in microseconds, m=512 in milliseconds. BF16 weights in the same
 * runs: 1530 to 1710, 2280 to 2350, 3270 to 3380, 112.
 *                                               int4                   FP8 by FP8
 *                                               m=1  m=4  m=16 m=512   m=1  m=4  m=16 m=512
 *   in f32; FP8 widened a piece before its dots 1380 2540 7690 227     1240 1930 4920 123
 *   pairs; the first tile widens for the others 1260 1970 4710 121     1280 2030 5010 117
 *   a line is widened while another multiplies  1210 1830 4450 124     1220 1810 4530 122
 *   64 bytes in lanes, shifts in place of
 *     moves of bytes to wider ones              1020 1580 4410 128     1100 1580 4530 125
 *   equal tiles, sums of groups end in registers 940 1460 4160 123      980 1530 4210 121
 * Widening takes 8 cycles a line of 64 values however many dots there are: both share the units. */
#define TD_SIMD(name) td_avx512bf16_##name
#define SCALED_PAIRS
#include "kernels/cpu/scaled_avx512.c"
