/* exp_simd.h - exponentials of vectors: 2^t = 2^n * 2^f with n = round(t) and |f| <= 1/2. 2^f is a
 * polynomial of degree 6 through the Chebyshev points; its own error is 3e-9, with f32 rounding
 * 8e-8. */
#ifndef TD_KERNELS_EXP_SIMD_H
#define TD_KERNELS_EXP_SIMD_H

TD_INLINE vec v_exp2_fraction(vec f)
{
    vec p = v_set1(0.00015461444854736328f);
    p = v_fma(p, f, v_set1(0.0013400427997112274f));
    p = v_fma(p, f, v_set1(0.009618056938052177f));
    p = v_fma(p, f, v_set1(0.05550327152013779f));
    p = v_fma(p, f, v_set1(0.24022650718688965f));
    p = v_fma(p, f, v_set1(0.6931471824645996f));
    return v_fma(p, f, v_set1(1.0f));
}

/* 2^t for t <= 0, as softmax needs it. Exactly 0 below -100 and for NaN, so that no product with
 * the result is subnormal. */
TD_INLINE vec v_exp2_or_0(vec t)
{
    vec floor_t = v_set1(-100.0f), u = v_max(t, floor_t), n = v_round(u);
    return v_keep_ge(v_scale2(v_exp2_fraction(v_sub(u, n)), n), t, floor_t);
}

/* e^-x for any x, clamped to [2^-126, 2^126]; NaN for NaN. -x * log2(e) - n uses two parts of
 * log2(e), so that large |x| loses no digits. */
TD_INLINE vec v_exp_neg(vec x)
{
    vec hi = v_set1(-1.44269502162933349609375f), lo = v_set1(-1.92596299112661746887e-8f);
    vec u = v_max(v_set1(-87.0f), v_min(v_set1(87.0f), x)), n = v_round(v_mul(u, hi));
    return v_scale2(v_exp2_fraction(v_fma(u, lo, v_fma(u, hi, v_sub(v_zero(), n)))), n);
}

/* tanh x = 1 - 2 / (1 + e^2x), off by at most 2e-7; NaN for NaN. */
TD_INLINE vec v_tanh(vec x)
{
    vec one = v_set1(1.0f), e = v_exp_neg(v_mul(x, v_set1(-2.0f)));
    return v_sub(one, v_div(v_set1(2.0f), v_add(one, e)));
}

#endif
