/* attn_avx512bf16.c - attention for AVX-512 over a bf16 cache, scores by the dot of pairs: K of a
 * tile is transposed as it lies, two dims in a lane, and is not widened. The code is attn_simd.h;
 * caches of other types are those of attn_avx512.c. Probabilities stay f32, so p . V is as there.
 *
 * Machine and method as in gemm_avx512bf16.c (load 25), head_dim 64, blocks of 16 tokens; best of 4
 * to 30 calls. f32 multiply-add 110 GFLOP/s in the same hour.
 *                                                     attn_avx512.c     this file
 *   prefill 512 of 512, 32 heads over 4, GFLOP/s      66                84
 *   prefill 512 of 2048                               78                97
 *   decode, context 2048, 32 over 4, one, us          269               218
 *     sixteen                                         5724              4463
 *   decode 12 over 12, one                            401               337
 *     sixteen, which memory bounds                    7993              8212 (median 9414, 8688) */
#define TD_SIMD(name) td_avx512bf16_##name
#define ATTN_PAIRS
#define ATTN_OTHER_TYPES(entry) td_avx512_##entry
#include "kernels/cpu/vec_avx512.h"

#include "kernels/cpu/attn_simd.h"
