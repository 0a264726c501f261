/* experts.h - a mixture of experts: which experts each row goes to, and the sum of what they
 * return.
 *
 * One plain form for all tables of CPUs, in fixed arithmetic (sample_math.h): a row is small beside
 * its experts' products. Every output depends on its own row alone (I1).
 * Source: Shazeer et al. 2017 (sparsely-gated mixtures), softmax and top-k as in Jiang et al. 2024.
 *
 * Parts, pointers and threads as in ops.h: each part computes its share of the rows. */
#ifndef TD_KERNELS_EXPERTS_H
#define TD_KERNELS_EXPERTS_H

#include <stdbool.h>
#include <stdint.h>

#define TD_EXPERTS_MAX 1024    /* of a layer */
#define TD_EXPERTS_USED_MAX 64 /* of a row */

/* Chooses the n_used experts with the largest logits of each row; of equal ones those with the
 * lower ids, and a NaN counts as the smallest. A chosen one's weight is its softmax over all
 * experts, with `normalise` divided by the sum over the chosen. Sums are taken in ascending order
 * of ids, in double.
 *   logits   [n_rows, n_experts]  f32, n_experts <= TD_EXPERTS_MAX
 *   ids      [n_rows, n_used]     ascending in each row, 1 <= n_used <= n_experts, and <=
 *                                 TD_EXPERTS_USED_MAX
 *   weights  [n_rows, n_used]     f32 */
struct td_experts_choose_args {
    const float *logits;
    int32_t n_rows, n_experts, n_used;
    bool normalise;
    int32_t *ids;
    float *weights;
};
void td_experts_choose(const struct td_experts_choose_args *a, int part, int n_parts);

/* x[r,:] += (w[r,0] * y[at[r,0],:] + w[r,1] * y[at[r,1],:]) + ..., each product and sum rounded to
 * f32: in the order of a row's chosen experts, which is that of their ids.
 *   x  [n_rows, dim]  f32, dense      w, at  [n_rows, n_used]
 *   y  [.., dim]      f32, dense: what the experts returned, a row for each (row, expert) */
struct td_experts_sum_args {
    float *x;
    const float *w, *y;
    const int32_t *at;
    int32_t n_rows, n_used, dim;
};
void td_experts_sum(const struct td_experts_sum_args *a, int part, int n_parts);

#endif
