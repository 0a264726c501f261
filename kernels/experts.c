/* experts.c - see experts.h. */
#include "kernels/experts.h"

#include <math.h>
#include <string.h>

#include "kernels/experts_math.h"
#include "kernels/part.h"

/* The first n_used of n values in the order of td_expert_is_before, ascending by id, to ids. */
static void choose(const float *values, int32_t n, int32_t n_used, int32_t *ids)
{
    int32_t best[TD_EXPERTS_MAX], n_best = 0; /* in order of preference */
    for (int32_t e = 0; e < n; e++) {
        if (n_best == n_used && !td_expert_is_before(values, e, best[n_best - 1])) continue;
        int32_t at = n_best < n_used ? n_best++ : n_best - 1;
        for (; at > 0 && td_expert_is_before(values, e, best[at - 1]); at--)
            best[at] = best[at - 1];
        best[at] = e;
    }
    for (int32_t i = 0; i < n_best; i++) {
        int32_t at = i;
        for (; at > 0 && ids[at - 1] > best[i]; at--) ids[at] = ids[at - 1];
        ids[at] = best[i];
    }
}

/* The values of experts in groups that are not chosen become NaN, which comes last. */
static void ban_groups(const struct td_experts_rule *rule, int32_t n_experts, float *values)
{
    float scores[TD_EXPERTS_MAX];
    int32_t groups[TD_EXPERTS_MAX], size = n_experts / rule->n_groups, next = 0;
    for (int32_t g = 0; g < rule->n_groups; g++) {
        int32_t best[2], n = rule->groups_by_two && size > 1 ? 2 : 1;
        choose(values + g * size, size, n, best);
        scores[g] = values[g * size + best[0]];
        if (n == 2) scores[g] += values[g * size + best[1]];
    }
    choose(scores, rule->n_groups, rule->n_groups_used, groups);
    for (int32_t g = 0; g < rule->n_groups; g++) {
        if (next < rule->n_groups_used && groups[next] == g) {
            next++;
            continue;
        }
        for (int32_t e = g * size; e < (g + 1) * size; e++) values[e] = NAN;
    }
}

/* Fills ids, and the scores of the experts there. */
static void choose_by_sigmoid(const struct td_experts_choose_args *a, const float *logits,
                              int32_t *ids, double *scores)
{
    float values[TD_EXPERTS_MAX];
    for (int32_t e = 0; e < a->n_experts; e++)
        values[e] = (float)td_expert_sigmoid((double)logits[e]) + (a->bias ? a->bias[e] : 0.0f);
    if (a->rule.n_groups > 1) ban_groups(&a->rule, a->n_experts, values);
    choose(values, a->n_experts, a->n_used, ids);
    for (int32_t i = 0; i < a->n_used; i++) scores[i] = td_expert_sigmoid((double)logits[ids[i]]);
}

/* The same by softmax, which has the order of the logits. */
static void choose_by_softmax(const struct td_experts_choose_args *a, const float *logits,
                              int32_t *ids, double *scores)
{
    float values[TD_EXPERTS_MAX];
    if (a->rule.n_groups > 1) {
        memcpy(values, logits, (size_t)a->n_experts * sizeof *values);
        ban_groups(&a->rule, a->n_experts, values);
        choose(values, a->n_experts, a->n_used, ids);
    } else {
        choose(logits, a->n_experts, a->n_used, ids);
    }
    double largest = -INFINITY, sum = 0;
    for (int32_t e = 0; e < a->n_experts; e++)
        if ((double)logits[e] > largest) largest = (double)logits[e];
    for (int32_t e = 0; e < a->n_experts; e++) sum += td_sample_exp((double)logits[e] - largest);
    for (int32_t i = 0; i < a->n_used; i++) {
        double e = td_sample_exp((double)logits[ids[i]] - largest);
        scores[i] = a->rule.normalise ? e : e / sum; /* normalised, the sum would fall out */
    }
}

static void choose_for_row(const struct td_experts_choose_args *a, const float *logits,
                           int32_t *ids, float *weights)
{
    double scores[TD_EXPERTS_USED_MAX], sum = 0;
    (a->rule.sigmoid ? choose_by_sigmoid : choose_by_softmax)(a, logits, ids, scores);
    for (int32_t i = 0; i < a->n_used; i++) sum += scores[i];
    double by = td_expert_divisor(a->rule.normalise, a->rule.sigmoid, sum),
           scale = a->rule.scale != 0 ? (double)a->rule.scale : 1;
    for (int32_t i = 0; i < a->n_used; i++) weights[i] = (float)(scores[i] / by * scale);
}

void td_experts_choose(const struct td_experts_choose_args *a, int part, int n_parts)
{
    int64_t lo, hi;
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++)
        choose_for_row(a, a->logits + r * a->n_experts, a->ids + r * a->n_used,
                       a->weights + r * a->n_used);
}

void td_experts_gate(float *x, const float *logits, int32_t n_rows, int32_t dim, int64_t stride,
                     int part, int n_parts)
{
    int64_t lo, hi;
    td_part_range(n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++) {
        float gate = (float)td_expert_sigmoid((double)logits[r]);
        for (int32_t i = 0; i < dim; i++) x[r * stride + i] *= gate;
    }
}

void td_experts_sum(const struct td_experts_sum_args *a, int part, int n_parts)
{
    enum { RUN = 64 };
    int64_t runs = (a->dim + RUN - 1) / RUN, lo, hi; /* of a row, so that one row has many parts */
    td_part_range(a->n_rows * runs, 1, part, n_parts, &lo, &hi);
    for (int64_t i = lo; i < hi; i++) {
        int64_t r = i / runs, from = i % runs * RUN, n = a->dim - from < RUN ? a->dim - from : RUN;
        const float *w = a->w + r * a->n_used;
        float sum[RUN], *x = a->x + r * a->dim + from;
        for (int32_t k = 0; k < a->n_used; k++) {
            const float *y = a->y + (int64_t)a->at[r * a->n_used + k] * a->dim + from;
            for (int64_t d = 0; d < n; d++) sum[d] = k ? sum[d] + w[k] * y[d] : w[k] * y[d];
        }
        for (int64_t d = 0; d < n; d++) x[d] = x[d] + sum[d];
    }
}
