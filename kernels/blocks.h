/* blocks.h - products with weights in block formats: the arithmetic that every table shares, so
 * that all tables give the same bits. Included inside kernels/ only.
 *
 *   1. td_blocks_prepare rounds the activations of a row to 8 bits, 32 at a time:
 *        s = max |x| / 127, code = round to nearest even (x * (127 / max |x|)).
 *   2. Of each group the products of codes' values are summed in int32, and where the halves have
 *      scales of their own, sum = sum over halves (scale * sum of products), which is below 2^24 in
 *      size. All of that is exact, so it may be done in any order, also in f32, and any codes that
 *      represent the same values may be used. Likewise low = sum over halves (min * sum of
 *      activation codes).
 *   3. An output is one chain along ascending groups, in f32, each operation rounded, from y = 0:
 *        y = fma(f32(sum), w * s, y), where w is d, 2^(d - 128), or d times the scale of the whole
 *        group, which is exact;
 *        then, with a minimum, y = fma(m, s * f32(sum of activation codes), y) (F16_MIN), the same
 *        with -(m * min) for m (U8_MIN), or y = fma(-f32(low), m * s, y) (U4_MIN_HALVES).
 *      Then the bias, then the residual, as in ops.h.
 *
 * What enters depends on the row alone, and M only chooses how the loops are nested (I1). A group
 * with an infinite or NaN activation gives NaN. One whose largest activation is below 2^-100 counts
 * as zero: the reciprocal stays finite. */
#ifndef TD_KERNELS_BLOCKS_H
#define TD_KERNELS_BLOCKS_H

#include <math.h>

#include "kernels/ops.h"

/* 32 activations. */
struct td_group_x {
    int8_t codes[TD_GROUP];
    float s;
    int32_t sum, sum_hi; /* of the codes, of all and of the last 16 */
    float s_sum;         /* s * sum */
};

/* What follows from the largest size and the sums of the halves. */
static inline void td_group_x_end(float max, int32_t sum_lo, int32_t sum_hi, struct td_group_x *ret)
{
    ret->s = max / 127.0f;
    ret->sum = sum_lo + sum_hi;
    ret->sum_hi = sum_hi;
    ret->s_sum = ret->s * (float)ret->sum;
}

static inline void td_group_x_make(const float *x, struct td_group_x *ret)
{
    uint32_t u[TD_GROUP], most = 0;
    memcpy(u, x, sizeof u);
    for (int i = 0; i < TD_GROUP; i++) {
        uint32_t size = u[i] & 0x7fffffffu; /* ordered as |x| is; NaN is above infinity */
        most = size > most ? size : most;
    }
    const uint32_t infinity = 0x7f800000u, tiny = (127u - 100u) << 23;
    if (most >= infinity || most < tiny) {
        memset(ret, 0, sizeof *ret);
        if (most >= infinity) ret->s = ret->s_sum = NAN;
        return;
    }
    float max, inverse;
    memcpy(&max, &most, sizeof max);
    inverse = 127.0f / max;
    int32_t sum[2] = {0, 0};
    for (int i = 0; i < TD_GROUP; i++) {
        int32_t code = (int32_t)rintf(x[i] * inverse);
        ret->codes[i] = (int8_t)code;
        sum[i / (TD_GROUP / 2)] += code;
    }
    td_group_x_end(max, sum[0], sum[1], ret);
}

static inline size_t td_blocks_scratch_bytes(int32_t n_rows, int32_t n_in)
{
    size_t bytes = (size_t)n_rows * (size_t)(n_in / TD_GROUP) * sizeof(struct td_group_x);
    return (bytes + 63) & ~(size_t)63;
}

/* The prepared rows, one behind the other. */
static inline const struct td_group_x *td_blocks_row(const struct td_gemm_args *a, int64_t row)
{
    return (const struct td_group_x *)a->scratch + row * (a->w->n_in / TD_GROUP);
}

#endif
