/* bench_fit_test.c - the fit of the step models: planted coefficients come back, none is ever
 * negative. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "bench/calibrate/fit.h"
#include "common/base/random.h"

static void assert_ratio(double got, double want, double tolerance, const char *what)
{
    if (!(fabs(got / want - 1) <= tolerance)) fail_msg("%s: %.9g, expected %.9g", what, got, want);
}

/* A grid like calibrate's, with the coefficients of a real model's order of magnitude. noise: of
 * each time, relative. */
static size_t prefill_grid(struct fit_sample *f, const double *a, double noise)
{
    static const double us[] = {16, 64, 128, 256, 512}, hs[] = {0, 128, 512, 1024};
    struct td_keyed rng = td_keyed_at(7, 1, 1);
    size_t n = 0;
    for (size_t i = 0; i < 5; i++)
        for (size_t k = 0; k < 4; k++, n++) {
            f[n] = (struct fit_sample){{1, us[i], us[i] * (hs[k] + us[i] / 2)}, 0};
            f[n].y = fit_predict(a, &f[n], 3) * (1 + noise * (2 * td_keyed_unit(&rng) - 1));
        }
    return n;
}

static void planted_prefill(void **state)
{
    (void)state;
    const double a[] = {1.2e-3, 3.5e-5, 4e-9};
    struct fit_sample f[64];
    double got[FIT_MAX];
    size_t n = prefill_grid(f, a, 0);
    assert_int_equal(fit_non_negative(f, n, 3, got, NULL), TD_OK);
    for (int i = 0; i < 3; i++) assert_ratio(got[i], a[i], 1e-6, "exact times");
    n = prefill_grid(f, a, 0.05);
    assert_int_equal(fit_non_negative(f, n, 3, got, NULL), TD_OK);
    for (int i = 0; i < 3; i++) assert_ratio(got[i], a[i], 0.15, "times 5 % off");
    for (size_t i = 0; i < n; i++)
        assert_ratio(fit_predict(got, &f[i], 3), f[i].y, 0.1, "predicted");
}

static void planted_decode(void **state)
{
    (void)state;
    const double b[] = {8e-4, 2e-5, 3e-9, 3.4e-5, 4e-9};
    struct fit_sample f[200];
    double got[FIT_MAX];
    size_t n = 0;
    for (double batch = 1; batch <= 64; batch *= 2)
        for (double context = 16; context <= 2048; context *= 4)
            for (int c = 0; c < 3; c++, n++) {
                double chunk = c * 128, over = c == 2 ? 512 : 0;
                f[n] = (struct fit_sample){
                    {1, batch, batch * context, chunk, chunk * (over + chunk / 2)}, 0};
                f[n].y = fit_predict(b, &f[n], 5);
            }
    assert_int_equal(fit_non_negative(f, n, 5, got, NULL), TD_OK);
    for (int i = 0; i < 5; i++) assert_ratio(got[i], b[i], 1e-6, "exact times");
}

/* The unconstrained fit of these would be negative in one coefficient. */
static void never_negative(void **state)
{
    (void)state;
    const double planted[] = {1e-3, 2e-5, -1.5e-9};
    struct fit_sample f[64];
    double got[FIT_MAX];
    size_t n = prefill_grid(f, planted, 0);
    for (size_t i = 0; i < n; i++) assert_true(f[i].y > 0);
    assert_int_equal(fit_non_negative(f, n, 3, got, NULL), TD_OK);
    assert_true(got[0] > 0 && got[1] > 0);
    assert_true(got[2] == 0);
}

static void unknown_stays_zero(void **state)
{
    (void)state;
    /* nothing mixed was run */
    struct fit_sample f[3] = {{{1, 1, 0, 0, 0}, 2}, {{1, 2, 0, 0, 0}, 3}, {{1, 3, 0, 0, 0}, 4}};
    double got[FIT_MAX];
    assert_int_equal(fit_non_negative(f, 3, 5, got, NULL), TD_OK);
    assert_ratio(got[0], 1, 1e-9, "constant");
    assert_ratio(got[1], 1, 1e-9, "slope");
    assert_true(got[2] == 0 && got[3] == 0 && got[4] == 0);
}

static void refused(void **state)
{
    (void)state;
    struct td_err err = {0};
    struct fit_sample f[2] = {{{1, 1}, 1}, {{1, 2}, 0}};
    double got[FIT_MAX] = {5};
    assert_int_equal(fit_non_negative(f, 0, 2, got, &err), TD_ERR_INVALID);
    assert_int_equal(fit_non_negative(f, 2, 2, got, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "sample 1 took 0 s, must be > 0");
    assert_true(got[0] == 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(planted_prefill), cmocka_unit_test(planted_decode),
        cmocka_unit_test(never_negative),  cmocka_unit_test(unknown_stays_zero),
        cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
