/* attn_avx512.c - attention for AVX-512. The code is attn_simd.h; here is what each idea bought.
 *
 * Machine and method as in gemm_avx512.c; head_dim 64, bf16 cache, scattered blocks of 16 tokens.
 * Decode in microseconds: a context of 2048, 32 heads over 4 kv heads (8:1) and 12 over 12 (1:1),
 * one sequence and sixteen (these lie outside L2).
 *
 *                                                             8:1 one   8:1 sixteen   1:1 one   1:1
 *                                                                 sixteen    prefill, GFLOP/s
 *   plain C in double (ref)                                                            7414
 *       124617
 *   turned K, 12x2 tiles, prefetch of a tile in one go          273        4941
 *       123
 *   sums spread over lanes, unrolled softmax, steps of 4 tiles  unchanged within noise
 *       124
 *   no questions per key; prefetch in pieces                    251        4260         511
 *       10364
 *   few queries: V straight from the cache                      206        4379         398
 *       8942
 *   prefetch line by line in the loops that will need it        194        3407         387
 *       8157
 *
 * Roofline: decode 1:1 reads 2 bytes per multiply-add: 100 % of 16.3 GB/s when the cache is
 * near, 76 % when it is not; 8:1 66 % and 61 %: turning K (64 shuffles per 16 keys x 32 dims,
 * one port) and 8 queries' multiply-adds cost as much as the memory. Prefill 70 % of the
 * multiply-add peak at 2048 (60-64 % at 512, where the diagonal tiles weigh more): exponentials
 * take about a fifth. Not done yet: walking all kv heads of a block together (longer runs of
 * memory), splitting one long row over parts. */
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/attn_simd.h"
