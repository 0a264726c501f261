/* router/core/scaling: worker counts against the closed forms they come from, hysteresis in both
 * directions, and each verdict. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "router/core/scaling.h"

static struct td_latency *model(void)
{
    struct td_lat_config c = {.attainment = 0.9, .eta = 0.02, .forgetting = 0.999};
    struct td_latency *l = NULL;
    struct td_err err;
    assert_int_equal(td_latency_create(&c, &l, &err), TD_OK);
    struct td_lat_theta t = {.prefill = {0, 1e-3, 0},
                             .decode = {10e-3, 1e-4, 0, 0, 0},
                             .link_tau = 0,
                             .link_bytes_per_s = 1e9,
                             .known = true};
    td_latency_set_theta(l, 0, &t);
    td_latency_node_join(l, 0, 0);
    return l;
}

static const struct td_scaling_fleet fleet = {
    .n = {2, 2}, .decode_node = 0, .kv_tokens = 1000000, .max_seqs = 1000, .margin = 1};

/* 10 requests/s of 200 ms of prefill and 100 tokens each, for `seconds` from *now on; an update
 * each 50 ms. */
static enum td_bound load(struct td_scaling *a, const struct td_latency *l,
                          const struct td_scaling_fleet *f, double *now, double seconds,
                          double rate, double tpot_s)
{
    enum td_bound b = TD_BOUND_NONE;
    double end = *now + seconds, next = *now;
    for (; *now < end; *now += 0.05) {
        for (; rate > 0 && next <= *now; next += 1 / rate)
            td_scaling_arrival(a, next, 0.2, 0.01, 100, 500, tpot_s);
        b = td_scaling_update(a, *now, f, l);
    }
    return b;
}

static void test_counts(void **state)
{
    (void)state;
    struct td_latency *l = model();
    struct td_scaling a = {0};
    double now = 1;
    td_scaling_update(&a, now, &fleet, l);
    assert_int_equal(a.want[0], 0); /* too early to say */
    load(&a, l, &fleet, &now, 300, 10, 0.030);
    /* prefill: 10 * 0.2 s/s / 0.85 = 2.35. decode: the largest B with 10 ms + 0.1 ms * B <= 30
     * ms is 200; 1,000 tokens/s * 30 ms / 200 / 0.85 = 0.176 */
    assert_true(fabs(a.need[0] - 2.353) < 0.1);
    assert_true(fabs(a.need[1] - 0.176) < 0.02);
    assert_int_equal(a.want[0], 3);
    assert_int_equal(a.want[1], 1);
    /* a tight objective: B = 1 and 10.1 ms a token; 1,000 * 10.1e-3 / 0.85 = 11.9 workers */
    load(&a, l, &fleet, &now, 600, 10, 0.0101);
    assert_true(fabs(a.need[1] - 11.9) < 0.8);
    assert_int_equal(a.want[1], 12);
    td_latency_destroy(l);
}

static void test_hysteresis(void **state)
{
    (void)state;
    struct td_latency *l = model();
    struct td_scaling a = {0};
    double now = 1;
    load(&a, l, &fleet, &now, 300, 10, INFINITY);
    assert_int_equal(a.want[0], 3);
    load(&a, l, &fleet, &now, 2, 100, INFINITY); /* a burst of 2 s: need may pass 3, not for UP_S */
    assert_int_equal(a.want[0], 3);
    load(&a, l, &fleet, &now, 60, 40, INFINITY);
    assert_in_range(a.want[0], 8, 11);
    uint32_t high = a.want[0];
    load(&a, l, &fleet, &now, 90, 1, INFINITY); /* the load is gone: down, but one at a time and
                                                   no sooner than each minute */
    assert_in_range(a.want[0], high - 2, high);
    load(&a, l, &fleet, &now, 3600, 1, INFINITY);
    assert_int_equal(a.want[0], 1);
    /* a need that wobbles around a whole number moves nothing */
    load(&a, l, &fleet, &now, 600, 8.3, INFINITY);
    uint32_t at = a.want[0], moves = 0;
    for (int i = 0; i < 100; i++) {
        load(&a, l, &fleet, &now, 10, i % 2 ? 8.6 : 8.4, INFINITY);
        moves += a.want[0] != at;
        at = a.want[0];
    }
    assert_true(moves <= 1);
    td_latency_destroy(l);
}

static void test_verdicts(void **state)
{
    (void)state;
    struct td_latency *l = model();
    const struct {
        struct td_scaling_fleet f;
        double transfer_s;
        enum td_bound want;
    } cases[] = {
        {{.n = {1, 1}, .utilisation = {0.5, 1}}, 0.01, TD_BOUND_NONE},
        {{.n = {1, 1}, .utilisation = {0.95, 1}}, 0.01, TD_BOUND_PREFILL},
        {{.n = {1, 1}, .utilisation = {0.5, 1}, .refused_share = 0.2}, 0.01, TD_BOUND_PREFILL},
        {{.n = {1, 1}, .utilisation = {0.95, 1}, .decode_pressure = 0.2, .refused_share = 0.2},
         0.01,
         TD_BOUND_DECODE},
        {{.n = {1, 1}, .utilisation = {0.5, 1}}, 1.5, TD_BOUND_TRANSFER},
        {{.n = {1, 1}, .utilisation = {0.95, 1}, .router_busy = 0.97}, 1.5, TD_BOUND_ROUTER},
        {{.n = {0, 0}}, 0.01, TD_BOUND_NONE}, /* nobody there: nothing to say, and no division by
                                                 it */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_scaling a = {0};
        double now = 1;
        enum td_bound b = TD_BOUND_NONE;
        for (int k = 0; k < 2000; k++, now += 0.1) {
            td_scaling_arrival(&a, now, 0.05, cases[i].transfer_s / 10, 10, 100, INFINITY);
            b = td_scaling_update(&a, now, &cases[i].f, l);
        }
        print_message("case %zu: %s\n", i, td_bound_name(b));
        assert_int_equal(b, cases[i].want);
    }
    td_latency_destroy(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_counts),
                                       cmocka_unit_test(test_hysteresis),
                                       cmocka_unit_test(test_verdicts)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
