/* kernels_experts_test.c - which experts a row goes to, and the sum of what they return: against
 * sorting and exp() of libm, ties and NaN by hand, any cut into parts with the same bits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/random.h"
#include "kernels/experts.h"

#define ROWS 9
#define EXPERTS_MAX 67
#define USED_MAX 8
#define DIM 131

static uint64_t state_of_random;

static float uniform(void)
{
    return (float)(int32_t)(td_random_step(&state_of_random) >> 32) * 0x1p-31f;
}

/* Whether the group of expert e is among those that the row chooses from. */
static bool is_allowed(const struct td_experts_rule *rule, const double *values, int32_t n,
                       int32_t e)
{
    if (rule->n_groups < 2) return true;
    int32_t size = n / rule->n_groups, before = 0;
    double scores[EXPERTS_MAX];
    for (int32_t g = 0; g < rule->n_groups; g++) {
        double best = -INFINITY, second = -INFINITY;
        for (int32_t k = g * size; k < (g + 1) * size; k++) {
            if (values[k] > best)
                second = best, best = values[k];
            else if (values[k] > second)
                second = values[k];
        }
        scores[g] = rule->groups_by_two ? best + second : best;
    }
    for (int32_t g = 0; g < rule->n_groups; g++)
        before += scores[g] > scores[e / size] || (scores[g] == scores[e / size] && g < e / size);
    return before < rule->n_groups_used;
}

/* A row's weights by the definition; 0: not chosen. */
static void plain_choice(const float *logits, const float *bias, int32_t n, int32_t n_used,
                         const struct td_experts_rule *rule, double *w)
{
    double sum = 0, chosen = 0, scores[EXPERTS_MAX], values[EXPERTS_MAX];
    for (int32_t e = 0; e < n; e++) sum += exp((double)logits[e]);
    for (int32_t e = 0; e < n; e++) {
        scores[e] =
            rule->sigmoid ? 1 / (1 + exp(-(double)logits[e])) : exp((double)logits[e]) / sum;
        /* sigmoids are compared in f32, as the reference does */
        values[e] =
            rule->sigmoid ? (double)((float)scores[e] + (bias ? bias[e] : 0)) : (double)logits[e];
    }
    for (int32_t e = 0; e < n; e++)
        if (!is_allowed(rule, values, n, e)) scores[e] = 0;
    for (int32_t e = 0; e < n; e++) {
        int32_t before = 0;
        for (int32_t k = 0; k < n; k++)
            before += is_allowed(rule, values, n, k) &&
                      (values[k] > values[e] || (values[k] == values[e] && k < e));
        w[e] = is_allowed(rule, values, n, e) && before < n_used ? scores[e] : 0;
        chosen += w[e];
    }
    for (int32_t e = 0; e < n; e++) {
        if (rule->normalise) w[e] /= chosen;
        if (rule->scale != 0) w[e] *= (double)rule->scale;
    }
}

static void check_choice(int32_t n, int32_t n_used, const struct td_experts_rule *rule,
                         const float *bias, bool ties)
{
    float logits[ROWS * EXPERTS_MAX], weights[ROWS * USED_MAX], again[ROWS * USED_MAX];
    int32_t ids[ROWS * USED_MAX];
    for (int32_t i = 0; i < ROWS * n; i++) logits[i] = ties ? floorf(uniform() * 3) : uniform() * 6;
    struct td_experts_choose_args a = {logits, ROWS, n, n_used, *rule, ids, weights, bias};
    td_experts_choose(&a, 0, 1);
    for (int32_t r = 0; r < ROWS; r++) {
        double want[EXPERTS_MAX];
        plain_choice(logits + r * n, bias, n, n_used, rule, want);
        for (int32_t i = 0; i < n_used; i++) {
            int32_t e = ids[r * n_used + i];
            double w = (double)weights[r * n_used + i];
            assert_true(e >= 0 && e < n && (i == 0 || e > ids[r * n_used + i - 1]));
            if (!(want[e] > 0 && fabs(w - want[e]) <= 1e-7 * want[e] + 1e-12))
                fail_msg("%d of %d experts, row %d: expert %d has weight %.9g, must be %.9g",
                         n_used, n, r, e, w, want[e]);
        }
    }
    int32_t parts_ids[ROWS * USED_MAX];
    a.ids = parts_ids, a.weights = again;
    for (int part = 0; part < 4; part++) td_experts_choose(&a, part, 4);
    assert_memory_equal(ids, parts_ids, sizeof(int32_t) * (size_t)(ROWS * n_used));
    assert_memory_equal(weights, again, sizeof(float) * (size_t)(ROWS * n_used));
}

static void chooses_by_value_then_id(void **state)
{
    (void)state;
    static const int32_t sizes[][2] = {{1, 1}, {2, 2}, {8, 2}, {60, 4}, {67, 8}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int k = 0; k < 4; k++)
            check_choice(sizes[i][0], sizes[i][1],
                         &(struct td_experts_rule){.normalise = (k & 1) != 0}, NULL, (k & 2) != 0);
}

/* Sigmoid with a bias that is mostly negative, so that 0 for a banned expert would win; groups by
 * their best, and by their two best; scales. */
static void chooses_by_sigmoid_and_groups(void **state)
{
    (void)state;
    static const int32_t sizes[][4] = {{7, 3, 0, 0},  {8, 4, 4, 2},  {9, 3, 3, 1},
                                       {64, 8, 8, 4}, {60, 6, 4, 2}, {6, 2, 1, 1}};
    float bias[EXPERTS_MAX];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int k = 0; k < 16; k++) {
            for (int e = 0; e < EXPERTS_MAX; e++) bias[e] = uniform() * 0.5f - 1;
            struct td_experts_rule rule = {.sigmoid = (k & 1) != 0,
                                           .normalise = (k & 2) != 0,
                                           .n_groups = sizes[i][2],
                                           .n_groups_used = sizes[i][3],
                                           .groups_by_two = (k & 1) != 0,
                                           .scale = k & 4 ? 2.5f : 0};
            check_choice(sizes[i][0], sizes[i][1], &rule, rule.sigmoid && k & 8 ? bias : NULL,
                         false);
        }
}

/* The gate of shared experts: each row by its own sigmoid, whatever the parts. */
static void gates_rows(void **state)
{
    (void)state;
    float x[ROWS * DIM], cut[ROWS * DIM], logits[ROWS];
    for (int i = 0; i < ROWS * DIM; i++) x[i] = cut[i] = uniform();
    for (int r = 0; r < ROWS; r++) logits[r] = r == 0 ? -200 : uniform() * 9;
    td_experts_gate(x, logits, ROWS, DIM - 1, DIM, 0, 1);
    for (int part = 0; part < 4; part++) td_experts_gate(cut, logits, ROWS, DIM - 1, DIM, part, 4);
    for (int i = 0; i < ROWS * DIM; i++) assert_memory_equal(&x[i], &cut[i], sizeof(float));
    float one = 0.75f, logit = 1.25f;
    td_experts_gate(&one, &logit, 1, 1, 1, 0, 1);
    assert_true(fabs((double)one - 0.75 / (1 + exp(-1.25))) < 1e-7);
}

/* Nothing that a broken row holds chooses an expert twice, or one that is not there. */
static void odd_logits(void **state)
{
    (void)state;
    const float rows[4][5] = {{NAN, NAN, NAN, NAN, NAN},
                              {INFINITY, 1, INFINITY, NAN, 2},
                              {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY},
                              {NAN, -INFINITY, 3, NAN, 3}};
    const int32_t want[4][3] = {{0, 1, 2}, {0, 2, 4}, {0, 1, 2}, {1, 2, 4}};
    int32_t ids[12];
    float weights[12];
    struct td_experts_choose_args a = {rows[0], 4, 5, 3, {.normalise = true}, ids, weights, NULL};
    td_experts_choose(&a, 0, 1);
    assert_memory_equal(ids, want, sizeof want);
}

static void sums_in_order_of_ids(void **state)
{
    (void)state;
    enum { USED = 3 };
    float x[ROWS * DIM], cut[ROWS * DIM], w[ROWS * USED], y[ROWS * USED * DIM], want[ROWS * DIM];
    int32_t at[ROWS * USED];
    for (int i = 0; i < ROWS * DIM; i++) x[i] = cut[i] = want[i] = uniform();
    for (int i = 0; i < ROWS * USED * DIM; i++) y[i] = uniform();
    for (int i = 0; i < ROWS * USED; i++) w[i] = uniform(), at[i] = (i * 7 + 3) % (ROWS * USED);
    for (int r = 0; r < ROWS; r++)
        for (int d = 0; d < DIM; d++) {
            volatile float term[USED], sum; /* each operation rounded by itself */
            for (int k = 0; k < USED; k++)
                term[k] = w[r * USED + k] * y[at[r * USED + k] * DIM + d];
            sum = term[0] + term[1];
            sum = sum + term[2];
            want[r * DIM + d] += sum;
        }
    struct td_experts_sum_args a = {x, w, y, at, ROWS, USED, DIM};
    td_experts_sum(&a, 0, 1);
    assert_memory_equal(x, want, sizeof want);
    a.x = cut;
    for (int part = 0; part < 5; part++) td_experts_sum(&a, part, 5);
    assert_memory_equal(cut, want, sizeof want);
}

int main(void)
{
    const char *seed = getenv("SEED");
    state_of_random = seed ? strtoull(seed, NULL, 10) : 1;
    printf("SEED=%llu\n", (unsigned long long)state_of_random);
    const struct CMUnitTest tests[] = {cmocka_unit_test(chooses_by_value_then_id),
                                       cmocka_unit_test(chooses_by_sigmoid_and_groups),
                                       cmocka_unit_test(gates_rows), cmocka_unit_test(odd_logits),
                                       cmocka_unit_test(sums_in_order_of_ids)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
