/* sample_math.h - the arithmetic that the CPU's sampler and the device's share, so that both give
 * the same bits.
 *
 * Only doubles, + - * / and conversions, each rounded to nearest even by IEEE 754. No contraction
 * into fused operations (-ffp-contract=off, nvcc -fmad=false), no flush to zero, no fast math, no
 * libm, because libms differ. common/model/sampler.c has a second form of td_sample_exp, on
 * vectors, with the same operations in the same order.
 *
 * Sums are integers, so their order does not matter. The weight of a candidate is floor(2^44 e^y),
 * where y <= 0 is its logit less the largest. The sum of all e^y, for logprobs, is finer: it is
 * kept as hi 2^-32 + lo 2^-76, so that beside a token of probability 1 - 1e-9 the other tokens
 * still count to 7 digits. Both sums stay below 2^63 for 2^19 tokens (TD_SAMPLE_MAX_VOCAB). */
#ifndef TD_KERNELS_SAMPLE_MATH_H
#define TD_KERNELS_SAMPLE_MATH_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define TD_SAMPLE_FN __host__ __device__ static inline
#else
#define TD_SAMPLE_FN static inline
#endif

#define TD_SAMPLE_Y_MIN (-100.0)
#define TD_SAMPLE_WEIGHT_ONE 0x1p44
/* At and below this y the weight is 0, because e^-31 < 2^-44 = e^-30.5. */
#define TD_SAMPLE_Y_WEIGHTLESS (-31.0)
/* At and below this y both parts of the sum are 0, because e^-54 < 2^-77 = e^-53.4. */
#define TD_SAMPLE_Y_SUMLESS (-54.0)

TD_SAMPLE_FN double td_sample_from_bits(uint64_t bits)
{
    double d;
    memcpy(&d, &bits, sizeof d);
    return d;
}

TD_SAMPLE_FN uint64_t td_sample_bits(double d)
{
    uint64_t bits;
    memcpy(&bits, &d, sizeof bits);
    return bits;
}

/* e^r by Taylor's series, starting from p = 1/12!. One macro for single numbers here and for
 * vectors in the CPU's sampler, so that both take the same steps. */
#define TD_SAMPLE_TAYLOR(p, r)                                                                     \
    do {                                                                                           \
        (p) = (p) * (r) + 1.0 / 39916800;                                                          \
        (p) = (p) * (r) + 1.0 / 3628800;                                                           \
        (p) = (p) * (r) + 1.0 / 362880;                                                            \
        (p) = (p) * (r) + 1.0 / 40320;                                                             \
        (p) = (p) * (r) + 1.0 / 5040;                                                              \
        (p) = (p) * (r) + 1.0 / 720;                                                               \
        (p) = (p) * (r) + 1.0 / 120;                                                               \
        (p) = (p) * (r) + 1.0 / 24;                                                                \
        (p) = (p) * (r) + 1.0 / 6;                                                                 \
        (p) = (p) * (r) + 0.5;                                                                     \
        (p) = (p) * (r) + 1.0;                                                                     \
        (p) = (p) * (r) + 1.0;                                                                     \
    } while (0)

/* e^y for y <= 0. NaN and values below -100 count as -100. With y = k ln2 + r and |r| <= ln2 / 2,
 * the result is Taylor's series to r^12, whose error is below 2e-16, times 2^k. */
TD_SAMPLE_FN double td_sample_exp(double y)
{
    /* Adding 1.5 * 2^52 rounds to an integer, which then stands in the low bits of the double. */
    const double magic = 0x1.8p52;
    y = y > TD_SAMPLE_Y_MIN ? y : TD_SAMPLE_Y_MIN;
    double km = y * 0x1.71547652b82fep0 + magic, k = km - magic;
    double r = (y - k * 0x1.62e42feep-1) - k * 0x1.a39ef35793c76p-33;
    double p = 1.0 / 479001600;
    TD_SAMPLE_TAYLOR(p, r);
    return p * td_sample_from_bits((td_sample_bits(km) + 1023) << 52);
}

/* ln z for z >= 1: z = m 2^k, m in [0.7, 1.42), ln m = 2 atanh((m - 1) / (m + 1)). */
TD_SAMPLE_FN double td_sample_log(double z)
{
    uint64_t bits = td_sample_bits(z);
    int k = (int)(bits >> 52) - 1023;
    double m = td_sample_from_bits((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull);
    if (m > 0x1.6a09e667f3bcdp0) {
        m *= 0.5;
        k++;
    }
    double s = (m - 1.0) / (m + 1.0), s2 = s * s, sum = 0;
    for (int i = 23; i >= 1; i -= 2) sum = sum * s2 + 1.0 / i;
    return (double)k * 0x1.62e42fefa39efp-1 + 2.0 * s * sum;
}

/* Splits e in [0, 1] into hi, in units of 2^-32, and lo, the rest in units of 2^-76, each rounded
 * to nearest. */
#define TD_SAMPLE_HI_MAGIC 0x1p52
#define TD_SAMPLE_LO_MAGIC 0x1.8p52
TD_SAMPLE_FN void td_sample_parts(double e, uint64_t *ret_hi, int64_t *ret_lo)
{
    double scaled = e * 0x1p32, hi = scaled + TD_SAMPLE_HI_MAGIC;
    double lo = (scaled - (hi - TD_SAMPLE_HI_MAGIC)) * 0x1p44 + TD_SAMPLE_LO_MAGIC;
    *ret_hi = td_sample_bits(hi) - 0x4330000000000000ull;
    *ret_lo = (int64_t)(td_sample_bits(lo) - 0x4338000000000000ull);
}

TD_SAMPLE_FN double td_sample_sum(uint64_t hi, int64_t lo)
{
    return ((double)(int64_t)hi + (double)lo * 0x1p-44) * 0x1p-32;
}

/* Philox4x32-10 (Salmon et al. 2011). */
TD_SAMPLE_FN void td_sample_philox(const uint32_t counter[4], const uint32_t key[2],
                                   uint32_t ret_out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0],
             k1 = key[1];

    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    ret_out[0] = c0;
    ret_out[1] = c1;
    ret_out[2] = c2;
    ret_out[3] = c3;
}

/* The sum of weights, at least 1, that the candidates of top_p must reach: top_p * total, rounded
 * up without libm. */
TD_SAMPLE_FN uint64_t td_sample_top_p_target(float top_p, uint64_t total)
{
    double want = (double)top_p * (double)(int64_t)total;
    uint64_t target = (uint64_t)(int64_t)want;
    target += (double)(int64_t)target < want;
    return target < 1 ? 1 : target;
}

/* A point in [0, total), drawn from (seed, position): the high 64 bits of the 64 by 64 bit product
 * of a random number and total, in 32-bit steps for compilers without 128-bit integers. */
TD_SAMPLE_FN uint64_t td_sample_point(uint64_t seed, uint32_t position, uint64_t total)
{
    uint32_t counter[4] = {position, 0, 0, 0}, key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)},
             out[4];
    td_sample_philox(counter, key, out);
    uint64_t t0 = (uint32_t)total, t1 = total >> 32;
    uint64_t low = (out[0] * t0 >> 32) + (uint32_t)(out[1] * t0), mid = (out[1] * t0 >> 32),
             cross = out[0] * t1;
    low += (uint32_t)cross;
    return out[1] * t1 + mid + (cross >> 32) + (low >> 32);
}

#endif
