/* gemm_avx512.c - the product for AVX-512 (no BF16 instructions: on the machine below vdpbf16ps
 * does half of what widening and f32 multiply-adds do). The code is gemm_simd.h; here is what each
 * idea bought.
 *
 * Machine: one core of a Sapphire/Emerald-Rapids-class Xeon, 2 MiB L2, shared with other work, so:
 * CPU time, best of 7 to 20 calls, weights cycled through 1 GiB. Floors of the same runs: f32
 * multiply-add 176 GFLOP/s, widening + multiply-add from L1 162 GFLOP/s, reading memory 16.3 GB/s.
 * Shape 2048x2048, bf16.
 *
 *   plain C, double accumulators (ref; 768x768)                              m=1  2.0 GB/s
 *       m=512   2 GFLOP/s
 *   panels, 12x2 tile widening in registers, prefetch 2 KiB ahead            m=4 13.0 GB/s   m=16
 *       118       m=512 140-146
 *   prefetch 4 KiB ahead                                                     m=4 13.8        m=16
 *       124
 *   prefetch the next panel into L2, its lines spread over all passes        m=4 14.5        m=16
 *       146
 *   and the present one 2 KiB ahead into L1                                                  m=16
 *       150       (m=12: 141 to 147)
 *   up to 5 rows: several panels at once (4 streams for one row)   m=1 16.3  m=4 15.2
 *   from 9 tiles on: widen a block once for all tiles
 *       m=512 149-156
 *   tried, no gain: blocks of 128, 384 or 512 lines; widening once for fewer tiles (m=32: 116
 *       against 157); k in the outer loop
 *   without widening once (m=512: 140-146)
 *
 * Roofline: m=1 reads 2 bytes per multiply-add: 98-100 % of memory. m=16: 92 % of the widening
 * floor. m=512: 92-96 % of it; of the pure multiply-add peak 88 %: the tile costs 12 broadcasts
 * and 2 loads beside its 24 multiply-adds (about 5 %), preparing x 3-4 %. */
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/gemm_simd.h"
