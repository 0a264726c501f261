/* bf16_chain.h - the plain form of a product of bf16 rows as the fast tables compute it, bit for
 * bit: from 0, one fused multiply-add after the other along ascending k, in f32. Subnormal operands
 * count as zero, and a sum that rounds to a subnormal number becomes zero of its sign.
 *
 * gemm_ref.c, which adds in double, says what the result should be; this says what it is. The chain
 * is what a dot instruction of bf16 pairs does, and what widening and multiply-adds do in the
 * processor's mode for it. */
#ifndef TD_KERNELS_REF_BF16_CHAIN_H
#define TD_KERNELS_REF_BF16_CHAIN_H

#include <math.h>
#include <stdint.h>

#include "common/base/dtype.h"

/* Zero of the same sign for a subnormal number. */
static inline float td_flush(float f) { return fabsf(f) < 0x1p-126f ? copysignf(0, f) : f; }

/* a * b + c, rounded once. A product of two bf16 is exact in double; where the sum is this small it
 * is exact, too, and below the bound it would round, with enough exponents, to less than the
 * smallest normal number. */
static inline float td_flushed_fma(float a, float b, float c)
{
    a = td_flush(a), b = td_flush(b), c = td_flush(c);
    double sum = (double)a * (double)b + (double)c;
    if (sum != 0 && fabs(sum) < 0x1p-126 * (1 - 0x1p-25)) return (float)copysign(0, sum);
    return fmaf(a, b, c);
}

static inline float td_bf16_chain(const uint16_t *x, const uint16_t *w, int64_t n)
{
    float sum = 0;
    for (int64_t k = 0; k < n; k++)
        sum = td_flushed_fma(td_bf16_to_f32(x[k]), td_bf16_to_f32(w[k]), sum);
    return sum;
}

#endif
