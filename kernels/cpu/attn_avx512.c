/* attn_avx512.c - attention for AVX-512. The code is attn_simd.h; this table says what each idea
 * bought.
 *
 * Machine and method as in gemm_avx512.c; head_dim 64, bf16 cache, scattered blocks of 16 tokens.
 * Decode is in microseconds, with a context of 2048: 32 heads over 4 kv heads (8:1) and 12 over 12
 * (1:1), for one sequence and for sixteen, which do not fit L2. Prefill is in GFLOP/s.
 *
 *                                                   decode 8:1      decode 1:1     prefill
 *                                                   one   sixteen   one   sixteen
 *   plain C in double (ref)                                         7414   124617
 *   transposed K, 12x2 tiles, prefetch of a tile
 *     at once                                       273   4941                         123
 *   sums spread over lanes, unrolled softmax,
 *     steps of 4 tiles                              the same within noise              124
 *   no test per key; prefetch in pieces             251   4260       511    10364
 *   few queries: V straight from the cache          206   4379       398     8942
 *   prefetch line by line in the loops that
 *     will need it                                  194   3407       387     8157
 *
 * Roofline. Decode 1:1 reads 2 bytes per multiply-add and reaches 100 % of 16.3 GB/s when the cache
 * fits L2, 76 % when it does not. Decode 8:1 reaches 66 % and 61 %: transposing K (64 shuffles per
 * 16 keys x 32 dims, on one port) and the multiply-adds of 8 queries cost as much as the memory.
 * A latent cache (16 heads over one row of 576), 2 vCPU Sapphire-Rapids class Xeon, CPU time of the
 * thread, best of 5 calls, medians of 5 interleaved rounds at load 17: decode over 2048 keys turned
 * K slab by slab and read V from the cache in 664 us (605..893) where it took 785 (757..912), for
 * sixteen sequences 11564 (11352..16255) where it took 14528 (13477..15931): 107 and 99 GFLOP/s of
 * 172. Prefill of 512, 117 GFLOP/s, is as it was.
 * Prefill reaches 70 % of the multiply-add peak at 2048, and 60 to 64 % at 512, where the diagonal
 * tiles weigh more; exponentials take about a fifth. Not done yet: walking all kv heads of a block
 * together (longer runs of memory), splitting one long row over parts. */
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/attn_simd.h"
