/* experts.c - see experts.h. */
#include "kernels/experts.h"

#include <math.h>

#include "kernels/part.h"
#include "kernels/sample_math.h"

/* Whether expert a of a row comes before expert b. */
static bool is_before(const float *logits, int32_t a, int32_t b)
{
    float x = logits[a], y = logits[b];
    if (isnan(x) || isnan(y)) return isnan(x) == isnan(y) ? a < b : isnan(y);
    return x > y || (x == y && a < b);
}

/* The first n_used experts in that order, ascending by id, to ids. */
static void choose(const float *logits, int32_t n_experts, int32_t n_used, int32_t *ids)
{
    int32_t best[TD_EXPERTS_USED_MAX], n = 0; /* in order of preference */
    for (int32_t e = 0; e < n_experts; e++) {
        if (n == n_used && !is_before(logits, e, best[n - 1])) continue;
        int32_t at = n < n_used ? n++ : n - 1;
        for (; at > 0 && is_before(logits, e, best[at - 1]); at--) best[at] = best[at - 1];
        best[at] = e;
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t at = i;
        for (; at > 0 && ids[at - 1] > best[i]; at--) ids[at] = ids[at - 1];
        ids[at] = best[i];
    }
}

static void choose_for_row(const struct td_experts_choose_args *a, const float *logits,
                           int32_t *ids, float *weights)
{
    choose(logits, a->n_experts, a->n_used, ids);
    double largest = -INFINITY, sum = 0, chosen = 0;
    for (int32_t e = 0; e < a->n_experts; e++)
        if ((double)logits[e] > largest) largest = (double)logits[e];
    for (int32_t e = 0; e < a->n_experts; e++) sum += td_sample_exp((double)logits[e] - largest);
    for (int32_t i = 0; i < a->n_used; i++)
        chosen += td_sample_exp((double)logits[ids[i]] - largest);
    for (int32_t i = 0; i < a->n_used; i++)
        weights[i] = (float)(td_sample_exp((double)logits[ids[i]] - largest) /
                             (a->normalise ? chosen : sum));
}

void td_experts_choose(const struct td_experts_choose_args *a, int part, int n_parts)
{
    int64_t lo, hi;
    td_part_range(a->n_rows, 1, part, n_parts, &lo, &hi);
    for (int64_t r = lo; r < hi; r++)
        choose_for_row(a, a->logits + r * a->n_experts, a->ids + r * a->n_used,
                       a->weights + r * a->n_used);
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
