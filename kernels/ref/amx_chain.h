/* amx_chain.h - the plain form of a product of bf16 rows as the tiles of AMX compute it, bit for
 * bit. TDPBF16PS multiplies 32 values of k: those at even k are one chain of fused multiply-adds
 * from 0 along ascending k, those at odd k another; the two sums are added, and their sum to what
 * was there. All in f32, rounded to nearest even, whatever the mode of the thread; subnormal
 * operands and results count as zero. The last 32 of a row are filled up with zeros.
 *
 * Source: the operation of TDPBF16PS in Intel's Software Developer's Manual, volume 2. A Sapphire
 * Rapids does exactly that (kernels_gemm_test). For NaN inputs only a NaN is promised, not its
 * bits. gemm_ref.c, which adds in double, says what a product should be; this says what it is. */
#ifndef TD_KERNELS_REF_AMX_CHAIN_H
#define TD_KERNELS_REF_AMX_CHAIN_H

#include "kernels/ref/bf16_chain.h"

enum { TD_AMX_K = 32 }; /* values of k that one instruction multiplies */

/* A sum of two f32 that is subnormal is exact, so it may be rounded first. */
static inline float td_flushed_add(float a, float b) { return td_flush(td_flush(a) + td_flush(b)); }

static inline float td_amx_chain(const uint16_t *x, const uint16_t *w, int64_t n)
{
    float sum = 0;
    for (int64_t k0 = 0; k0 < n; k0 += TD_AMX_K) {
        float halves[2] = {0, 0};
        for (int64_t k = k0; k < k0 + TD_AMX_K; k++)
            halves[k % 2] = td_flushed_fma(k < n ? td_bf16_to_f32(x[k]) : 0,
                                           k < n ? td_bf16_to_f32(w[k]) : 0, halves[k % 2]);
        sum = td_flushed_add(sum, td_flushed_add(halves[0], halves[1]));
    }
    return sum;
}

#endif
