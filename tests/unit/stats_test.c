/* stats_test.c - the report's arithmetic against values worked out by hand (or, where said, from
 * published tables). */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>

#include "common/base/random.h"
#include "common/base/stats.h"

static void assert_near(double got, double want, double tolerance, const char *what)
{
    if (!(fabs(got - want) <= tolerance)) fail_msg("%s: %.9g, expected %.9g", what, got, want);
}

static void percentiles(void **state)
{
    (void)state;
    double x[] = {4, 1, 3, 2};
    td_stats_sort(x, 4);
    assert_near(td_stats_percentile(x, 4, 0), 1, 0, "p0");
    assert_near(td_stats_percentile(x, 4, 25), 1.75, 1e-12, "p25");
    assert_near(td_stats_percentile(x, 4, 50), 2.5, 1e-12, "p50");
    assert_near(td_stats_percentile(x, 4, 90), 3.7, 1e-12, "p90");
    assert_near(td_stats_percentile(x, 4, 100), 4, 0, "p100");
    assert_near(td_stats_percentile(x, 1, 99), 1, 0, "one value");
    assert_true(isnan(td_stats_percentile(x, 0, 50)));
    double y[101];
    for (int i = 0; i <= 100; i++) y[i] = i;
    for (int p = 0; p <= 100; p++)
        assert_near(td_stats_percentile(y, 101, p), p, 1e-12, "the ramp");
}

static void moments(void **state)
{
    (void)state;
    const double x[] = {2, 4, 4, 4, 5, 5, 7, 9};
    assert_near(td_stats_mean(x, 8), 5, 0, "mean");
    assert_near(td_stats_std(x, 8), 2, 1e-12, "population deviation");
    assert_true(isnan(td_stats_mean(x, 0)) && isnan(td_stats_std(x, 0)));
    assert_near(td_stats_std(x, 1), 0, 0, "of one value");
}

/* Newcombe 1998, table I (score intervals): 81/263, 15/148, 0/20, 1/29. */
static void wilson(void **state)
{
    (void)state;
    static const struct {
        uint64_t k, n;
        double lo, hi;
    } cases[] = {
        {81, 263, 0.2553, 0.3662}, {15, 148, 0.0624, 0.1605}, {0, 20, 0, 0.1611},
        {1, 29, 0.0061, 0.1718},   {20, 20, 0.8389, 1},       {0, 0, 0, 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_stats_interval w = td_stats_wilson(cases[i].k, cases[i].n);
        assert_near(w.lo, cases[i].lo, 5e-5, "lo");
        assert_near(w.hi, cases[i].hi, 5e-5, "hi");
    }
    /* 864 samples at 90 % are known to 2 points either way. */
    struct td_stats_interval w = td_stats_wilson(778, 864);
    assert_near((w.hi - w.lo) / 2, 0.02, 3e-4, "half width at n = 864");
}

static void batch_means(void **state)
{
    (void)state;
    /* Three values that do not fit, then twenty pairs, alternately (1, 1) and (0, 0): sample
       deviation of the means sqrt(20 * 0.25 / 19). */
    double x[43] = {9, 9, 9};
    for (int b = 0; b < 20; b++) x[3 + 2 * b] = x[4 + 2 * b] = b % 2;
    struct td_stats_interval ci = {-7, -7};
    assert_true(td_stats_batch_means(x, 43, &ci));
    double half = 2.093024054408263 * sqrt(20 * 0.25 / 19) / sqrt(20);
    assert_near(ci.lo, 0.5 - half, 1e-12, "lo");
    assert_near(ci.hi, 0.5 + half, 1e-12, "hi");
    struct td_stats_interval same = {-7, -7};
    assert_false(td_stats_batch_means(x, 39, &same));
    assert_near(same.lo, -7, 0, "untouched");
    /* Correlated values: the batches see that 400 of them are only twenty. */
    double runs[400];
    for (int i = 0; i < 400; i++) runs[i] = i / 20 % 2;
    assert_true(td_stats_batch_means(runs, 400, &ci));
    struct td_stats_interval w = td_stats_wilson(200, 400);
    assert_true(ci.hi - ci.lo > 4 * (w.hi - w.lo));
}

static void rising(void **state)
{
    (void)state;
    double up[400], slight[400], flat[400], down[400], waves[400], late[30];
    struct td_keyed r = td_keyed_at(5, 0, 0);
    for (int i = 0; i < 400; i++) {
        double noise = td_keyed_unit(&r) - 0.5;
        up[i] = 1 + i / 100.0 + noise;      /* 1 to 5 */
        slight[i] = 10 + i / 100.0 + noise; /* 10 to 14: certain, and not twice */
        flat[i] = 3 + noise;
        down[i] = 5 - i / 100.0 + noise;
        waves[i] = 3 + 2 * sin(i / 400.0 * 4 * 3.14159265) + noise;
    }
    for (int i = 0; i < 30; i++) late[i] = i;
    assert_true(td_stats_rises(up, 400, 0));
    assert_false(td_stats_rises(up, 400, 3)); /* from below the floor to 5 is not twice 3 */
    assert_false(td_stats_rises(slight, 400, 0));
    assert_false(td_stats_rises(flat, 400, 0));
    assert_false(td_stats_rises(down, 400, 0));
    assert_false(td_stats_rises(waves, 400, 0));
    assert_false(td_stats_rises(late, 30, 0));                       /* too few */
    for (int i = 0; i < 400; i++) flat[i] = i / 20 == 10 ? 1000 : 1; /* one burst in the middle */
    assert_false(td_stats_rises(flat, 400, 0));
}

static void percentile_ranks(void **state)
{
    (void)state;
    static const struct {
        size_t n;
        double p;
        size_t lo, hi;
    } cases[] = {
        {1000, 90, 881, 919}, /* the design note's example */
        {10, 50, 2, 9},       /* the sign test's: P(X <= 1) = 11/1024 */
        {5, 50, 0, 6},        /* 1/32 > 2.5 %: five values bound nothing */
        {6, 50, 1, 6},        /* 1/64: six do */
        {100, 99, 97, 101},   /* P(X <= 96) = 1.8 %; the largest of 100 may lie below the p99 */
        {1, 50, 0, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t lo = 99, hi = 99;
        td_stats_percentile_ranks(cases[i].n, cases[i].p, &lo, &hi);
        if (lo != cases[i].lo || hi != cases[i].hi)
            fail_msg("n %zu p %g: ranks %zu..%zu, expected %zu..%zu", cases[i].n, cases[i].p, lo,
                     hi, cases[i].lo, cases[i].hi);
    }
    /* Coverage seen: uniform samples, true p90 = 0.9. */
    int covered = 0;
    for (uint64_t run = 0; run < 1000; run++) {
        double x[50];
        struct td_keyed r = td_keyed_at(1, 2, run);
        for (int i = 0; i < 50; i++) x[i] = td_keyed_unit(&r);
        td_stats_sort(x, 50);
        size_t lo, hi;
        td_stats_percentile_ranks(50, 90, &lo, &hi);
        covered += (lo == 0 || x[lo - 1] <= 0.9) && (hi == 51 || x[hi - 1] >= 0.9);
    }
    if (covered < 950) fail_msg("covered in %d of 1000 runs", covered);
}

static void jain(void **state)
{
    (void)state;
    const double same[] = {3, 3, 3}, one[] = {1, 0, 0, 0}, some[] = {1, 2, 3}, none[] = {0, 0};
    assert_near(td_stats_jain(same, 3), 1, 1e-12, "equal");
    assert_near(td_stats_jain(one, 4), 0.25, 1e-12, "one has all");
    assert_near(td_stats_jain(some, 3), 36.0 / 42, 1e-12, "1, 2, 3");
    assert_near(td_stats_jain(none, 2), 1, 0, "zeros");
    assert_near(td_stats_jain(NULL, 0), 1, 0, "nobody");
}

static void worst_tenth(void **state)
{
    (void)state;
    double x[20];
    for (int i = 0; i < 20; i++) x[i] = (i * 7) % 20 + 1; /* 1..20 in disorder */
    assert_near(td_stats_worst_tenth(x, 20), 19.5, 1e-12, "two of 20");
    double y[11] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 3};
    assert_near(td_stats_worst_tenth(y, 11), 2, 1e-12, "two of 11: rounded up");
    double z[1] = {5};
    assert_near(td_stats_worst_tenth(z, 1), 5, 0, "one of one");
    assert_true(isnan(td_stats_worst_tenth(z, 0)));
}

/* The generator's values are part of what makes a run repeatable: SplitMix64's published
 * sequence for the seed 1234567. */
static void generator(void **state)
{
    (void)state;
    struct td_keyed r = {1234567};
    static const uint64_t want[] = {6457827717110365317ull, 3203168211198807973ull,
                                    9817491932198370423ull, 4593380528125082431ull,
                                    16408922859458223821ull};
    for (size_t i = 0; i < 5; i++) assert_true(td_keyed_u64(&r) == want[i]);
    uint64_t counts[7] = {0};
    double sum = 0;
    for (int i = 0; i < 70000; i++) counts[td_keyed_below(&r, 7)]++, sum += td_keyed_unit(&r);
    for (int k = 0; k < 7; k++) assert_near((double)counts[k], 10000, 500, "below(7)");
    assert_near(sum / 70000, 0.5, 0.005, "mean of unit");
    struct td_keyed a = td_keyed_at(1, 2, 3), b = td_keyed_at(1, 2, 4), c = td_keyed_at(1, 3, 3),
                    d = td_keyed_at(2, 2, 3);
    assert_true(a.state != b.state && a.state != c.state && a.state != d.state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(percentiles), cmocka_unit_test(moments),
        cmocka_unit_test(wilson),      cmocka_unit_test(batch_means),
        cmocka_unit_test(rising),      cmocka_unit_test(percentile_ranks),
        cmocka_unit_test(jain),        cmocka_unit_test(worst_tenth),
        cmocka_unit_test(generator),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
