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

/* How the expert routers of a model choose. All zero: the largest logits, weights by softmax. */
struct td_experts_rule {
    bool sigmoid;   /* an expert's score is the sigmoid of its logit; false: its softmax over all */
    bool normalise; /* a row's weights are divided by their sum */
    /* Groups of n_experts / n_groups experts with ids that follow each other, of which a row
     * chooses experts in n_groups_used alone: those with the largest best score, or the largest sum
     * of their two best. 0 or 1: no groups. */
    int32_t n_groups, n_groups_used;
    bool groups_by_two;
    float scale; /* by which weights are multiplied at the end; 0: 1 */
};

/* Chooses the n_used experts with the largest scores of each row; of equal ones those with the
 * lower ids, and a NaN counts as the smallest. With a bias (sigmoid only) scores are compared, also
 * those of groups, with the bias added; it is no part of the weights (Wang et al. 2024,
 * auxiliary-loss-free balancing; groups as in DeepSeek-AI 2024, DeepSeek-V3, 2.1.2). A chosen one's
 * weight is its score; sums are taken in ascending order of ids, in double.
 *   logits   [n_rows, n_experts]  f32, n_experts <= TD_EXPERTS_MAX
 *   bias     [n_experts]          f32, or NULL
 *   ids      [n_rows, n_used]     ascending in each row, 1 <= n_used <= n_experts, and <=
 *                                 TD_EXPERTS_USED_MAX
 *   weights  [n_rows, n_used]     f32 */
struct td_experts_choose_args {
    const float *logits;
    int32_t n_rows, n_experts, n_used;
    struct td_experts_rule rule;
    int32_t *ids;
    float *weights;
    const float *bias;
};
void td_experts_choose(const struct td_experts_choose_args *a, int part, int n_parts);

/* x[r,:] *= sigmoid(logits[r]): the gate of experts that every row has.
 *   x  [n_rows, dim]  f32, row stride in elements */
void td_experts_gate(float *x, const float *logits, int32_t n_rows, int32_t dim, int64_t stride,
                     int part, int n_parts);

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
