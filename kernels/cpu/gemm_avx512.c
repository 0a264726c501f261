/* gemm_avx512.c - the matrix product for AVX-512. The code is gemm_simd.h; this table says what
 * each idea bought. The BF16 instructions are not used: on the machine below vdpbf16ps does half of
 * what widening and f32 multiply-adds do.
 *
 * Machine: one core of a Sapphire/Emerald-Rapids-class Xeon, 2 MiB L2, shared with other work;
 * therefore CPU time, best of 7 to 20 calls, weights cycled through 1 GiB. Floors of the same runs:
 * f32 multiply-add 176 GFLOP/s, widening + multiply-add from L1 162 GFLOP/s, reading memory 16.3
 * GB/s. Shape 2048x2048, bf16; m=1 and m=4 in GB/s, the others in GFLOP/s.
 *
 *                                                           m=1    m=4    m=16   m=512
 *   plain C, double accumulators (ref; 768x768)             2.0                  2
 *   panels, 12x2 tiles widened in registers,
 *     prefetch 2 KiB ahead                                        13.0    118    140-146
 *   prefetch 4 KiB ahead                                          13.8    124
 *   prefetch the next panel into L2, its lines
 *     spread over all passes                                      14.5    146
 *   and the present panel 2 KiB ahead into L1                             150
 *     (m=12: 141 to 147)
 *   up to 5 rows: several panels at once
 *     (4 streams for one row)                              16.3   15.2
 *   from 9 tiles on: widen a block once for all tiles                            149-156
 * Tried without gain: blocks of 128, 384 or 512 lines; widening once for fewer tiles (m=32: 116
 * against 157 GFLOP/s); k in the outer loop without widening once (m=512: 140-146 GFLOP/s).
 *
 * Roofline. m=1 reads 2 bytes per multiply-add and reaches 98 to 100 % of memory. m=16 reaches 92 %
 * of the widening floor. m=512 reaches 92 to 96 % of that floor and 88 % of the multiply-add peak:
 * a tile costs 12 broadcasts and 2 loads beside its 24 multiply-adds (about 5 %), and preparing x
 * costs 3 to 4 %. */
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/gemm_simd.h"
