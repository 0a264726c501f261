/* experts_math.h - the arithmetic of expert routers that CPUs and devices share, so that both make
 * the same choices with the same weights, bit for bit. Doubles and libm as in sample_math.h. */
#ifndef TD_KERNELS_EXPERTS_MATH_H
#define TD_KERNELS_EXPERTS_MATH_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/sample_math.h"

/* Whether expert a of a row comes before expert b: the larger value, of equal ones the lower id,
 * and a NaN last. */
TD_SAMPLE_FN bool td_expert_is_before(const float *values, int32_t a, int32_t b)
{
    float x = values[a], y = values[b];
    bool x_is_nan = x != x, y_is_nan = y != y;
    if (x_is_nan || y_is_nan) return x_is_nan == y_is_nan ? a < b : y_is_nan;
    return x > y || (x == y && a < b);
}

TD_SAMPLE_FN double td_expert_sigmoid(double x)
{
    if (x != x) return x;
    double e = td_sample_exp(x < 0 ? x : -x);
    return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}

/* What a row's scores are divided by. sum: of the chosen ones, in ascending order of ids. */
TD_SAMPLE_FN double td_expert_divisor(bool normalise, bool is_sigmoid, double sum)
{
    /* sigmoids may all be 0 */
    return !normalise ? 1 : is_sigmoid ? sum + 1e-20 : sum;
}

#endif
