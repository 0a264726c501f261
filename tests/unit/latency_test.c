/* latency_test.c - the latency model: it recovers what made the samples, stays monotone and
 * finite whatever it is fed, sees a slow node, keeps its coverage, and gives the same bits for
 * the same calls. Every random number comes from a seeded generator; noise is uniform. Includes
 * latency.c to reach the solver. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/random.h"
#include "router/core/latency.c"

static uint64_t rng;

/* The digest of same_calls_same_bits is of these numbers. */
static uint64_t random_u64(void)
{
    td_random_step(&rng);
    uint64_t x = rng ^ rng >> 32;
    return (x * 0x9e3779b97f4a7c15ull) ^ x >> 29;
}

static uint32_t below(uint32_t n) { return (uint32_t)((random_u64() >> 32) % n); }
static double uniform(double lo, double hi)
{
    return lo + (hi - lo) * ((double)(random_u64() >> 11) * 0x1p-53);
}

static struct td_latency *make(double attainment)
{
    struct td_lat_config config = {.attainment = attainment, .eta = 0.02, .forgetting = 0.999};
    struct td_latency *l = NULL;
    assert_int_equal(td_latency_create(&config, &l, NULL), TD_OK);
    return l;
}

#define CLOSE(got, want, part) close_to(got, want, part, #got, __LINE__)
static void close_to(double got, double want, double part, const char *what, int line)
{
    if (fabs(got - want) <= part * fabs(want)) return;
    print_error("line %d: %s is %.9g, want %.9g within %g of it\n", line, what, got, want, part);
    fail();
}

/* An 8B model on a GPU, roughly: seconds. */
static const struct td_lat_theta truth = {.prefill = {4e-3, 40e-6, 2e-9},
                                          .decode = {9e-3, 30e-6, 25e-9, 45e-6, 2.5e-9},
                                          .link_tau = 200e-6,
                                          .link_bytes_per_s = 12e9,
                                          .known = true};

static double true_prefill(double u, double work)
{
    return truth.prefill[0] + truth.prefill[1] * u + truth.prefill[2] * work;
}
static double true_decode(double b, double k, double u, double work)
{
    return truth.decode[0] + truth.decode[1] * b + truth.decode[2] * k + truth.decode[3] * u +
           truth.decode[4] * work;
}

/* Times are whole microseconds, with multiplicative noise of +-noise. */
static void feed_prefill(struct td_latency *l, uint32_t node, double factor, double noise)
{
    uint32_t u = 16 + below(2032), h = below(4) * 2048;
    uint64_t work = (uint64_t)u * (h + u / 2);
    double us = 1e6 * factor * true_prefill(u, (double)work) * uniform(1 - noise, 1 + noise);
    td_latency_observe_step(l, node,
                            &(struct td_lat_step){.prefill_tokens = u,
                                                  .attention_work = work,
                                                  .wall_us = (uint32_t)us});
}

static void feed_decode(struct td_latency *l, uint32_t node, uint32_t b, uint64_t k, uint32_t u,
                        uint64_t work, double factor, double noise)
{
    double us =
        1e6 * factor * true_decode(b, (double)k, u, (double)work) * uniform(1 - noise, 1 + noise);
    td_latency_observe_step(l, node,
                            &(struct td_lat_step){.prefill_tokens = u,
                                                  .attention_work = work,
                                                  .decode_seqs = b,
                                                  .context_tokens = k,
                                                  .wall_us = (uint32_t)us});
}

static void feed_any_decode(struct td_latency *l, uint32_t node, double factor, double noise)
{
    uint32_t b = 1 + below(128), u = below(3) == 0 ? 64 + below(448) : 0,
             context = 100 + below(4000), h = below(2) * 4096;
    feed_decode(l, node, b, (uint64_t)b * context, u, (uint64_t)u * (u / 2 + h), factor, noise);
}

static void check_theta(const struct td_latency *l, uint32_t node_class)
{
    struct td_lat_theta t;
    td_latency_theta(l, node_class, &t);
    for (int i = 0; i < TD_LAT_N_PREFILL; i++)
        assert_true(isfinite(t.prefill[i]) && t.prefill[i] >= 0);
    for (int i = 0; i < TD_LAT_N_DECODE; i++)
        assert_true(isfinite(t.decode[i]) && t.decode[i] >= 0);
    assert_true(isfinite(t.link_tau) && t.link_tau >= 0 && isfinite(t.link_bytes_per_s) &&
                t.link_bytes_per_s >= 0);
}

static void check_predictions(const struct td_latency *l, uint32_t node, double part)
{
    static const struct {
        double b, k, u, work;
    } steps[] = {
        {1, 200, 0, 0},     {1, 4000, 0, 0},    {16, 16e3, 0, 0},        {64, 200e3, 0, 0},
        {128, 128e3, 0, 0}, {128, 400e3, 0, 0}, {64, 100e3, 256, 32768}, {8, 8e3, 512, 2.2e6},
    };
    static const struct {
        uint64_t u, h;
    } prompts[] = {{64, 0}, {512, 0}, {2048, 0}, {2048, 4096}, {8192, 0}, {5000, 2048}};
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        CLOSE(td_latency_step(l, node, steps[i].b, steps[i].k, steps[i].u, steps[i].work),
              true_decode(steps[i].b, steps[i].k, steps[i].u, steps[i].work), part);
    }
    for (size_t i = 0; i < sizeof prompts / sizeof prompts[0]; i++) {
        double want = 0;
        for (uint64_t at = 0; at < prompts[i].u; at += 2048) {
            uint64_t c = prompts[i].u - at < 2048 ? prompts[i].u - at : 2048;
            want +=
                true_prefill((double)c, (double)c * ((double)(prompts[i].h + at) + (double)c / 2));
        }
        CLOSE(td_latency_prefill(l, node, prompts[i].u, prompts[i].h, 2048), want, part);
    }
}

static void nothing_is_known_at_first(void **state)
{
    (void)state;
    struct td_latency *l = make(0.9);
    struct td_lat_theta t;
    td_latency_theta(l, 3, &t);
    assert_false(t.known);
    assert_true(td_latency_prefill(l, 0, 1000, 0, 256) == 0 &&
                td_latency_step(l, 0, 8, 8000, 0, 0) == 0);
    assert_true(td_latency_transfer(l, 0, 0, 1e6) == 0 && td_latency_correction(l, 0) == 1);
    assert_true(td_latency_margin(l, TD_LAT_TTFT, 0, 0) == 1.2);
    feed_prefill(l, 0, 1, 0);
    td_latency_theta(l, 0, &t);
    assert_true(t.known && td_latency_prefill(l, 0, 1000, 0, 256) > 0);
    td_latency_destroy(l);
    td_latency_destroy(NULL);
}

static void coefficients_come_out_of_noise(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        rng = seed;
        struct td_latency *l = make(0.9);
        td_latency_node_join(l, 5, 2);
        for (int i = 0; i < 40; i++) feed_prefill(l, 5, 1, 0.1), feed_any_decode(l, 5, 1, 0.1);
        check_predictions(l, 5, 0.25);
        for (int i = 0; i < 2000; i++) feed_prefill(l, 5, 1, 0.1), feed_any_decode(l, 5, 1, 0.1);
        check_predictions(l, 5, 0.06); /* 20 seeds * 14 points, each a median of 64 with a
                                          deviation of 1.2 % */
        struct td_lat_theta t;
        td_latency_theta(l, 2, &t);
        for (int i = 0; i < TD_LAT_N_PREFILL; i++) CLOSE(t.prefill[i], truth.prefill[i], 0.1);
        /* b1*B is a tenth of a step at most */
        for (int i = 0; i < TD_LAT_N_DECODE; i++)
            CLOSE(t.decode[i], truth.decode[i], i == 1 ? 0.5 : 0.15);
        for (int i = 0; i < 200; i++) {
            uint64_t bytes = (1 + below(400)) * 1000000ull;
            td_latency_observe_transfer(
                l, 2, bytes,
                (uint64_t)(1e6 * uniform(0.9, 1.1) *
                           (truth.link_tau + (double)bytes / truth.link_bytes_per_s)));
        }
        CLOSE(td_latency_transfer(l, 2, 0, 200e6), 200e-6 + 200e6 / 12e9, 0.04);
        CLOSE(td_latency_transfer(l, 2, 300e6, 200e6), 200e-6 + 500e6 / 12e9, 0.04);
        assert_true(td_latency_transfer(l, 1, 0, 200e6) == 0); /* another class */
        check_theta(l, 2);
        td_latency_destroy(l);
    }
}

/* K is 700 tokens a sequence give or take 2 %: one direction of B and K is hardly seen. What is
 * seen must come out, and no coefficient below 0. */
static void collinear_features_do_no_harm(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        rng = seed;
        struct td_latency *l = make(0.9);
        for (int i = 0; i < 3000; i++) {
            uint32_t b = 1 + below(96);
            feed_decode(l, 0, b, (uint64_t)(b * uniform(686, 714)), 0, 0, 1, 0.1);
            if (i % 500 != 499) continue;
            check_theta(l, 0);
            for (uint32_t n = 1; n <= 96; n += 19)
                CLOSE(td_latency_step(l, 0, n, n * 700, 0, 0), true_decode(n, n * 700, 0, 0), 0.04);
        }
        td_latency_destroy(l);
    }
}

/* The solution is the best under theta >= 0, not a clamped one: no slope along what is positive,
 * none upwards along what is 0. */
static void the_solver_finds_the_constrained_optimum(void **state)
{
    (void)state;
    int n_zero = 0;
    for (uint64_t seed = 1; seed <= 2000; seed++) {
        rng = seed;
        struct fit f = {.k = 2 + (int)below(MAX_K - 1)};
        for (uint32_t rows = below(4) + (uint32_t)f.k; rows > 0; rows--) {
            double row[MAX_K], shared = uniform(0, 1), y = uniform(0, 1);
            /* nearly collinear, positive like features */
            for (int i = 0; i < f.k; i++) row[i] = shared + uniform(0, 0.5) * uniform(0, 1);
            memory_add(&f.near, f.k, row, y, 1);
        }
        /* the last answer */
        for (int i = 0; i < f.k; i++) f.theta[i] = below(2) ? uniform(0, 2) : 0;
        fit_solve(&f);
        for (int i = 0; i < f.k; i++) {
            double slope = f.near.b[i] - dot(f.k, f.near.a[i], f.theta),
                   tolerance = 1e-6 * f.near.b[i];
            assert_true(f.theta[i] >= 0 && slope < tolerance &&
                        (f.theta[i] == 0 || slope > -tolerance));
            n_zero += f.theta[i] == 0;
        }
    }
    assert_true(n_zero > 1000);
}

static void a_prior_is_used_and_refined(void **state)
{
    (void)state;
    rng = 7;
    struct td_latency *l = make(0.9);
    td_latency_set_theta(l, 0, &truth);
    check_predictions(l, 0, 1e-9);
    CLOSE(td_latency_transfer(l, 0, 0, 1e9), 200e-6 + 1e9 / 12e9, 1e-9);
    for (int i = 0; i < 500; i++) feed_prefill(l, 0, 1, 0.1), feed_any_decode(l, 0, 1, 0.1);
    check_predictions(l, 0, 0.05);
    struct td_lat_theta wrong = truth, t; /* twice the fixed costs, half the context's */
    wrong.prefill[0] *= 2, wrong.decode[0] *= 2, wrong.decode[2] /= 2;
    td_latency_set_theta(l, 0, &wrong);
    td_latency_theta(l, 0, &t);
    CLOSE(t.decode[0], wrong.decode[0], 1e-9);
    for (int i = 0; i < 500; i++) feed_prefill(l, 0, 1, 0.1), feed_any_decode(l, 0, 1, 0.1);
    check_predictions(l, 0, 0.06);
    for (int away = 0; away < 2; away++) { /* the table of a machine 50 times as slow, or as fast */
        double factor = away ? 50 : 0.02;
        struct td_lat_theta other = truth;
        for (int i = 0; i < TD_LAT_N_PREFILL; i++) other.prefill[i] *= factor;
        for (int i = 0; i < TD_LAT_N_DECODE; i++) other.decode[i] *= factor;
        td_latency_set_theta(l, 0, &other);
        for (int i = 0; i < 10; i++) feed_prefill(l, 0, 1, 0.1), feed_any_decode(l, 0, 1, 0.1);
        check_predictions(l, 0, 0.25);
        for (int i = 0; i < 500; i++) feed_prefill(l, 0, 1, 0.1), feed_any_decode(l, 0, 1, 0.1);
        check_predictions(l, 0, 0.06);
    }
    td_latency_destroy(l);
}

static void an_idle_hour_forgets_nothing(void **state)
{
    (void)state;
    rng = 3;
    struct td_latency *l = make(0.9);
    for (int i = 0; i < 2000; i++) feed_any_decode(l, 0, 1, 0.1), feed_prefill(l, 0, 1, 0.1);
    for (int i = 0; i < 100000; i++) feed_decode(l, 0, 1, 200 + below(2000), 0, 0, 1, 0.1);
    check_predictions(l, 0, 0.06);
    check_theta(l, 0);
    td_latency_destroy(l);
}

static void stalls_do_not_teach(void **state)
{
    (void)state;
    rng = 4;
    struct td_latency *l = make(0.9);
    for (int i = 0; i < 3000; i++) {
        bool stall = below(50) == 0;
        feed_any_decode(l, 0, stall ? 30 : 1, 0.1);
        feed_prefill(l, 0, stall ? 30 : 1, 0.1);
    }
    check_predictions(l, 0, 0.06);
    td_latency_destroy(l);
}

/* What is no measurement changes nothing, to the bit. */
static void nonsense_is_ignored(void **state)
{
    (void)state;
    rng = 5;
    struct td_latency *l = make(0.9);
    for (int i = 0; i < 100; i++) feed_any_decode(l, 0, 1, 0.1), feed_prefill(l, 0, 1, 0.1);
    td_latency_observe_transfer(l, 0, 1 << 20, 500);
    struct td_lat_theta before, after;
    struct td_lat_quality quality;
    memset(&before, 0, sizeof before), memset(&after, 0, sizeof after);
    td_latency_theta(l, 0, &before);
    static const struct td_lat_step steps[] = {
        {0},
        {.wall_us = 1000},
        {.prefill_tokens = 10, .attention_work = 50},
        {.decode_seqs = 4, .context_tokens = 100},
        {.prefill_tokens = UINT32_MAX, .wall_us = 1000},
        {.decode_seqs = UINT32_MAX, .wall_us = 1000},
        {.prefill_tokens = 1, .attention_work = UINT64_MAX, .wall_us = 1000},
        {.decode_seqs = 1, .context_tokens = UINT64_MAX, .wall_us = 1000},
        {.decode_seqs = 1, .attention_work = 1, .wall_us = 1000},
        {.prefill_tokens = 1, .context_tokens = 1, .wall_us = 1000},
    };
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++)
        td_latency_observe_step(l, 0, &steps[i]);
    td_latency_observe_transfer(l, 0, 0, 100);
    td_latency_observe_transfer(l, 0, 100, 0);
    td_latency_observe_transfer(l, 0, UINT64_MAX, 100);
    td_latency_observe_transfer(l, 0, 100, UINT64_MAX);
    td_latency_observe_output(l, 0, 0);
    static const double bad[][2] = {{0, 1},   {1, 0},        {-1, 1},       {1, -1}, {NAN, 1},
                                    {1, NAN}, {INFINITY, 1}, {1, INFINITY}, {-1, -1}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        td_latency_observe_ratio(l, TD_LAT_TTFT, 0, 0, bad[i][0], bad[i][1]);
    td_latency_theta(l, 0, &after);
    td_latency_quality(l, TD_LAT_TTFT, &quality);
    assert_memory_equal(&before, &after, sizeof before);
    assert_true(quality.n == 0 && td_latency_margin(l, TD_LAT_TTFT, 0, 0) == 1.2);
    assert_true(td_latency_output(l, 0, 0.5, UINT64_MAX) == 256);
    assert_true(td_latency_transfer(l, 0, NAN, -5) == td_latency_transfer(l, 0, 0, 0));
    assert_true(td_latency_step(l, 0, NAN, 0, -1, NAN) == 0);
    struct td_lat_theta nonsense = {.prefill = {NAN, -1, INFINITY},
                                    .decode = {-1, NAN, 1e-9, 1e300, 0},
                                    .link_tau = NAN,
                                    .known = true};
    td_latency_set_theta(l, 1, &nonsense);
    check_theta(l, 1);
    td_latency_destroy(l);
}

/* --- monotone, finite, whatever comes --------------------------------------------------------- */

static uint64_t log_uniform(uint64_t max)
{
    uint64_t x = random_u64();
    x >>= below(64);
    return x > max ? max : x;
}

static void random_step(struct td_lat_step *s)
{
    *s = (struct td_lat_step){.wall_us = (uint32_t)log_uniform(UINT32_MAX)};
    if (below(2))
        s->prefill_tokens = (uint32_t)log_uniform(UINT32_MAX),
        s->attention_work = log_uniform(UINT64_MAX);
    if (below(2))
        s->decode_seqs = (uint32_t)log_uniform(UINT32_MAX),
        s->context_tokens = log_uniform(UINT64_MAX);
}

static void random_theta(struct td_lat_theta *t)
{
    *t = (struct td_lat_theta){.known = below(4) != 0};
    t->link_tau = (double)log_uniform(UINT64_MAX) * 1e-12;
    t->link_bytes_per_s = (double)log_uniform(UINT64_MAX);
    for (int i = 0; i < TD_LAT_N_PREFILL; i++)
        t->prefill[i] = below(3) ? (double)log_uniform(UINT64_MAX) * 1e-15 : 0;
    for (int i = 0; i < TD_LAT_N_DECODE; i++)
        t->decode[i] = below(3) ? (double)log_uniform(UINT64_MAX) * 1e-15 : 0;
}

/* hi >= lo, but for the rounding of a sum. */
static void ascends(double lo, double hi, const char *what)
{
    if (isfinite(lo) && isfinite(hi) && lo >= 0 && hi >= lo * (1 - 1e-12)) return;
    print_error("%s: %.17g, then %.17g with more\n", what, lo, hi);
    fail();
}

static void check_monotone(const struct td_latency *l, uint32_t node, uint32_t node_class)
{
    double b = below(4) ? below(200) : 0, k = (double)log_uniform(1 << 24),
           u = below(3) ? (double)log_uniform(8192) : 0;
    double work = (double)log_uniform(1 << 30);
    double step = td_latency_step(l, node, b, k, u, work);
    ascends(step, td_latency_step(l, node, b + uniform(0, 3), k, u, work), "step in B");
    ascends(step, td_latency_step(l, node, b, k + uniform(0, k + 10), u, work), "step in K");
    ascends(step, td_latency_step(l, node, b, k, u + uniform(0, u + 10), work),
            "step in prefill tokens");
    ascends(step, td_latency_step(l, node, b, k, u, work * uniform(1, 3)),
            "step in attention work");
    uint64_t n = log_uniform(1 << 20), h = log_uniform(1 << 20),
             more = below(3) ? 1 : 1 + log_uniform(1 << 12);
    uint32_t chunk = below(8) ? 1 + (uint32_t)log_uniform(4096) : 0;
    double prefill = td_latency_prefill(l, node, n, h, chunk);
    ascends(prefill, td_latency_prefill(l, node, n + more, h, chunk), "prefill in u");
    ascends(prefill, td_latency_prefill(l, node, n, h + more, chunk), "prefill in h");
    uint64_t edge = chunk * (1 + n / (chunk + 1ull)); /* a chunk more begins */
    ascends(td_latency_prefill(l, node, edge, h, chunk),
            td_latency_prefill(l, node, edge + 1, h, chunk), "prefill over the edge of a chunk");
    double bytes = (double)log_uniform(1ull << 40), backlog = (double)log_uniform(1ull << 40);
    double transfer = td_latency_transfer(l, node_class, backlog, bytes);
    ascends(transfer, td_latency_transfer(l, node_class, backlog, bytes * 1.5 + 1),
            "transfer in bytes");
    ascends(transfer, td_latency_transfer(l, node_class, backlog * 1.5 + 1, bytes),
            "transfer in backlog");
    double c = td_latency_correction(l, node);
    assert_true(c >= 0.5 && c <= 2);
}

static void monotone_after_any_samples(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 60; seed++) {
        rng = seed;
        struct td_latency *l = make(0.9);
        uint32_t nonsense = seed % 3 == 0 ? 0 : seed % 3 == 1 ? 5 : 90, classes[4] = {0};
        for (int i = 0; i < 1500; i++) {
            uint32_t node = below(4);
            /* ratios that jump: knots that would descend */
            double factor = node == 3 ? 1.7 : uniform(0.3, 2.5);
            if (below(100) < nonsense) {
                struct td_lat_step s;
                random_step(&s);
                td_latency_observe_step(l, node, &s);
                uint64_t bytes = log_uniform(UINT64_MAX);
                td_latency_observe_transfer(l, classes[node], bytes, log_uniform(UINT64_MAX));
            } else if (below(2)) {
                feed_prefill(l, node, factor, 0.2);
            } else {
                feed_any_decode(l, node, factor, 0.2);
            }
            if (below(400) == 0) {
                struct td_lat_theta t;
                random_theta(&t);
                td_latency_set_theta(l, below(2), &t);
            }
            if (below(300) == 0) td_latency_node_join(l, node, classes[node] = below(2));
            for (uint32_t w = 0; w < 4 && i % 10 == 0; w++) check_monotone(l, w, classes[w]);
            if (i % 10 == 0) check_theta(l, 0), check_theta(l, 1);
        }
        td_latency_destroy(l);
    }
}

static void good_samples_win_over_past_nonsense(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 10; seed++) {
        rng = seed;
        struct td_latency *l = make(0.9);
        for (int i = 0; i < 300; i++) { /* any step, any time */
            uint32_t b = below(200), u = below(2000), us = (uint32_t)log_uniform(60000000),
                     h = below(30000), context = below(30000);
            td_latency_observe_step(l, 0,
                                    &(struct td_lat_step){.prefill_tokens = u,
                                                          .attention_work = (uint64_t)u * h,
                                                          .decode_seqs = b,
                                                          .context_tokens = (uint64_t)b * context,
                                                          .wall_us = us});
        }
        /* six times 1 / (1 - forgetting) */
        for (int i = 0; i < 6000; i++) feed_prefill(l, 0, 1, 0.1), feed_any_decode(l, 0, 1, 0.1);
        check_predictions(l, 0, 0.08);
        td_latency_destroy(l);
    }
}

/* --- corrections ------------------------------------------------------------------------------ */

static void a_slow_node_is_seen(void **state)
{
    (void)state;
    rng = 21;
    struct td_latency *l = make(0.9);
    td_latency_set_theta(l, 0, &truth);
    for (int i = 0; i < 1000; i++) {
        for (uint32_t node = 0; node < 4; node++) feed_decode(l, node, 32, 32000, 0, 0, 1, 0.1);
    }
    double healthy = true_decode(32, 32000, 0, 0);
    CLOSE(td_latency_correction(l, 2), 1, 0.05);
    int seen = -1;
    for (int i = 0; i < 64; i++) {
        for (uint32_t node = 0; node < 4; node++)
            feed_decode(l, node, 32, 32000, 0, 0, node == 2 ? 2 : 1, 0.1);
        if (seen < 0 && td_latency_correction(l, 2) > 1.6) seen = i + 1;
    }
    assert_in_range(seen, 5, 36); /* half the window */
    CLOSE(td_latency_step(l, 2, 32, 32000, 0, 0), 2 * healthy, 0.1);
    CLOSE(td_latency_step(l, 1, 32, 32000, 0, 0), healthy, 0.1);
    CLOSE(td_latency_correction(l, 2) / td_latency_correction(l, 1), 2, 0.1);
    for (int i = 0; i < 5000; i++) { /* the class learns the mean of its nodes; each prediction
                                        stays */
        for (uint32_t node = 0; node < 4; node++)
            feed_decode(l, node, 32, 32000, 0, 0, node == 2 ? 2 : 1, 0.1);
    }
    CLOSE(td_latency_step(l, 2, 32, 32000, 0, 0), 2 * healthy, 0.1);
    CLOSE(td_latency_step(l, 1, 32, 32000, 0, 0), healthy, 0.1);
    for (int i = 0; i < 64; i++) {
        for (uint32_t node = 0; node < 4; node++) feed_decode(l, node, 32, 32000, 0, 0, 1, 0.1);
    }
    CLOSE(td_latency_step(l, 2, 32, 32000, 0, 0), healthy, 0.1);
    td_latency_node_join(l, 2, 0);
    assert_true(td_latency_correction(l, 2) == 1);
    td_latency_destroy(l);
}

/* Medians of long ago say nothing: a node that was slow at two sizes and has run well at another
 * since. */
static void old_medians_are_left_out(void **state)
{
    (void)state;
    rng = 25;
    struct td_latency *l = make(0.9);
    td_latency_set_theta(l, 0, &truth);
    for (int i = 0; i < 100; i++) {
        feed_decode(l, 0, 1, 1000, 0, 0, 2, 0.05), feed_decode(l, 0, 200, 400000, 0, 0, 2, 0.05);
        for (uint32_t node = 1; node < 9; node++)
            feed_decode(l, node, 1, 1000, 0, 0, 1, 0.05),
                feed_decode(l, node, 200, 400000, 0, 0, 1, 0.05);
    }
    CLOSE(td_latency_correction(l, 0), 1.8, 0.12);
    for (int i = 0; i < 300; i++) feed_decode(l, 0, 400, 800000, 0, 0, 1, 0.05);
    CLOSE(td_latency_correction(l, 0), 1, 0.1);
    double slow = td_latency_step(l, 0, 200, 400000, 0, 0);
    for (int i = 0; i < 1100; i++) feed_decode(l, 0, 400, 800000, 0, 0, 1, 0.05);
    assert_true(td_latency_step(l, 0, 200, 400000, 0, 0) < 0.7 * slow);
    /* new ones, and not the old ones beside them */
    for (int i = 0; i < 6; i++) feed_decode(l, 0, 200, 400000, 0, 0, 1, 0.05);
    CLOSE(td_latency_step(l, 0, 200, 400000, 0, 0), true_decode(200, 400000, 0, 0), 0.1);
    td_latency_destroy(l);
}

static void a_class_that_changes_is_followed(void **state)
{
    (void)state;
    rng = 22;
    static const double factors[] = {1, 1.9, 0.6, 9, 0.5};
    struct td_latency *l = make(0.9);
    for (size_t k = 0; k < sizeof factors / sizeof factors[0]; k++) {
        for (int i = 0; i < 100; i++)
            feed_decode(l, 0, 32, 32000, 0, 0, factors[k], 0.1),
                feed_prefill(l, 0, factors[k], 0.1);
        CLOSE(td_latency_step(l, 0, 32, 32000, 0, 0), factors[k] * true_decode(32, 32000, 0, 0),
              0.15);
        for (int i = 0; i < 3000; i++)
            feed_decode(l, 0, 32, 32000, 0, 0, factors[k], 0.1),
                feed_prefill(l, 0, factors[k], 0.1);
        CLOSE(td_latency_step(l, 0, 32, 32000, 0, 0), factors[k] * true_decode(32, 32000, 0, 0),
              0.06);
        CLOSE(td_latency_prefill(l, 0, 2048, 0, 2048), factors[k] * true_prefill(2048, 2048 * 1024),
              0.06);
    }
    td_latency_destroy(l);
}

/* A node whose long steps are slow: the correction depends on the step's size, and the closed
 * form over chunks equals their sum. */
static void chunks_add_up_under_any_correction(void **state)
{
    (void)state;
    rng = 23;
    struct td_latency *l = make(0.9);
    td_latency_set_theta(l, 0, &truth);
    for (int i = 0; i < 4000; i++) {
        uint32_t u = 1 + below(2048), h = below(60000), wave = u / 100 % 3;
        uint64_t work = (uint64_t)u * (h + u / 2);
        double us = 1e6 * true_prefill(u, (double)work) * (wave == 0 ? 0.6 : wave == 1 ? 1.0 : 1.8);
        td_latency_observe_step(l, 0,
                                &(struct td_lat_step){.prefill_tokens = u,
                                                      .attention_work = work,
                                                      .wall_us = (uint32_t)us});
    }
    for (int i = 0; i < 2000; i++) {
        uint32_t chunk = 1 + below(2048);
        uint64_t u = 1 + below(50000), h = below(30000);
        double sum = 0;
        for (uint64_t at = 0; at < u; at += chunk) {
            double c = u - at < chunk ? (double)(u - at) : chunk;
            sum += td_latency_step(l, 0, 0, 0, c, c * ((double)(h + at) + c / 2));
        }
        CLOSE(td_latency_prefill(l, 0, u, h, chunk), sum, 1e-9);
    }
    td_latency_destroy(l);
}

static void mixed_steps_start_from_what_prefill_costs_alone(void **state)
{
    (void)state;
    rng = 24;
    struct td_latency *l = make(0.9);
    for (int i = 0; i < 500; i++) {
        uint32_t b = 1 + below(64);
        feed_prefill(l, 0, 1, 0.05);
        feed_decode(l, 0, b, 500 + below(60000), 0, 0, 1, 0.05);
    }
    double decode = td_latency_step(l, 0, 16, 16000, 0, 0),
           mixed = td_latency_step(l, 0, 16, 16000, 512, 512 * 256);
    CLOSE(mixed - decode, truth.prefill[1] * 512 + truth.prefill[2] * 512 * 256, 0.2);
    double us =
        1e6 * (true_decode(16, 16000, 0, 0) + truth.prefill[1] * 64 + truth.prefill[2] * 64 * 32);
    td_latency_observe_step(l, 0,
                            &(struct td_lat_step){.prefill_tokens = 64,
                                                  .attention_work = 64 * 32,
                                                  .decode_seqs = 16,
                                                  .context_tokens = 16000,
                                                  .wall_us = (uint32_t)us});
    /* the first one agrees: nothing changes */
    CLOSE(td_latency_step(l, 0, 16, 16000, 512, 512 * 256), mixed, 0.05);
    for (int i = 0; i < 100; i++) { /* beside decode rows they cost half here */
        uint32_t u = 128 + below(384);
        us = 1e6 *
             (true_decode(16, 16000, 0, 0) +
              0.5 * (truth.prefill[1] * u + truth.prefill[2] * u * u / 2)) *
             uniform(0.95, 1.05);
        td_latency_observe_step(l, 0,
                                &(struct td_lat_step){.prefill_tokens = u,
                                                      .attention_work = (uint64_t)u * u / 2,
                                                      .decode_seqs = 16,
                                                      .context_tokens = 16000,
                                                      .wall_us = (uint32_t)us});
    }
    double half = 0.5 * (truth.prefill[1] * 512 + truth.prefill[2] * 512 * 256),
           alone = td_latency_step(l, 0, 0, 0, 512, 512 * 256);
    CLOSE(td_latency_step(l, 0, 16, 16000, 512, 512 * 256),
          fmax(alone, true_decode(16, 16000, 0, 0) + half), 0.06);
    td_latency_destroy(l);
    l = make(0.9); /* a decode worker that has never run prefill alone: what mixed steps taught
                      speaks for it */
    for (int i = 0; i < 500; i++) feed_any_decode(l, 0, 1, 0.05);
    CLOSE(td_latency_prefill(l, 0, 512, 0, 512),
          truth.decode[0] + 512 * truth.decode[3] + 512 * 256 * truth.decode[4], 0.1);
    td_latency_destroy(l);
}

/* --- margins, lengths, quality ---------------------------------------------------------------- */

/* Ratios of three shapes around `centre`. */
static double draw_ratio(int shape, double centre)
{
    double x = uniform(0, 1);
    if (shape == 0) return centre * (0.9 + 0.2 * x);
    if (shape == 1) return centre * (0.8 + 0.4 * x * x * x);
    return centre * (below(10) ? 0.95 + 0.1 * x : 1 + 0.5 * x); /* one in ten queues */
}

static double coverage_of(struct td_latency *l, uint32_t load_bucket, int shape, double centre,
                          int n)
{
    int covered = 0;
    for (int i = 0; i < n; i++) {
        double ratio = draw_ratio(shape, centre);
        covered += ratio <= td_latency_margin(l, TD_LAT_TPOT, 1, load_bucket);
        td_latency_observe_ratio(l, TD_LAT_TPOT, 1, load_bucket, 0.04, 0.04 * ratio);
    }
    return (double)covered / n;
}

static void margins_keep_their_coverage(void **state)
{
    (void)state;
    static const double taus[] = {0.9, 0.99, 0.8};
    for (uint64_t seed = 1; seed <= 15; seed++) {
        for (int shape = 0; shape < 3; shape++) {
            rng = seed;
            double tau = taus[seed % 3];
            struct td_latency *l = make(tau);
            coverage_of(l, 3, shape, 1, 500);
            double before = coverage_of(l, 3, shape, 1, 500);
            coverage_of(l, 3, shape, 2, 500); /* everything takes twice as long */
            double after = coverage_of(l, 3, shape, 2, 500);
            if (fabs(before - tau) > 0.05 || fabs(after - tau) > 0.05) {
                print_error("seed %d shape %d: coverage %g, then %g, want %g +- 0.05\n", (int)seed,
                            shape, before, after, tau);
                fail();
            }
            struct td_lat_quality q;
            td_latency_quality(l, TD_LAT_TPOT, &q);
            assert_true(q.n == 512 && fabs(q.coverage - tau) <= 0.05);
            td_latency_destroy(l);
        }
    }
}

static void buckets_have_their_own_margin(void **state)
{
    (void)state;
    rng = 31;
    struct td_latency *l = make(0.9);
    for (int i = 0; i < 600; i++) coverage_of(l, 1, 0, 0.8, 1), coverage_of(l, 6, 0, 1.6, 1);
    assert_true(td_latency_margin(l, TD_LAT_TPOT, 1, 1) < 0.95);
    assert_true(td_latency_margin(l, TD_LAT_TPOT, 1, 6) > 1.6);
    double unseen = td_latency_margin(l, TD_LAT_TPOT, 1, 4),
           other_class = td_latency_margin(l, TD_LAT_TPOT, 2, 6);
    assert_true(unseen == 1); /* what was seen far from the objective says nothing of predictions
                                 near it */
    assert_true(other_class > 1.4); /* what all classes together say */
    /* and from there it goes on by itself */
    for (int i = 0; i < CHILD_MIN; i++)
        td_latency_observe_ratio(l, TD_LAT_TPOT, 2, 6, 0.04, 0.04 * 1.6);
    assert_true(fabs(td_latency_margin(l, TD_LAT_TPOT, 2, 6) - other_class) < 0.2);
    assert_true(td_latency_margin(l, TD_LAT_TTFT, 1, 6) == 1.2); /* the other objective */
    assert_true(td_latency_margin(l, TD_LAT_TPOT, 1, 99) ==
                td_latency_margin(l, TD_LAT_TPOT, 1, TD_LAT_BUCKETS - 1));
    for (int i = 0; i < 3000; i++)
        td_latency_observe_ratio(l, TD_LAT_TTFT, 0, 0, 1, i % 2 ? 100 : 1e9);
    assert_true(td_latency_margin(l, TD_LAT_TTFT, 0, 0) == 3);
    for (int i = 0; i < 3000; i++) td_latency_observe_ratio(l, TD_LAT_TTFT, 0, 0, 1, 1e-9);
    assert_true(td_latency_margin(l, TD_LAT_TTFT, 0, 0) == 0.5);
    static const double parts[] = {0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.999, 1.1, 2};
    static const uint32_t want[] = {0, 0, 1, 2, 3, 4, TD_LAT_LIMIT_BUCKET, 6, 7};
    for (int i = 0; i < 9; i++) assert_int_equal(td_latency_bucket(parts[i] * 0.05, 0.05), want[i]);
    assert_int_equal(td_latency_bucket(1, INFINITY), 0);
    assert_int_equal(td_latency_bucket(1, 0), TD_LAT_BUCKETS - 1);
    td_latency_destroy(l);
}

static void quality_is_of_the_last_512(void **state)
{
    (void)state;
    struct td_latency *l = make(0.9);
    struct td_lat_quality q;
    td_latency_quality(l, TD_LAT_TTFT, &q);
    assert_true(q.n == 0 && q.coverage == 0 && q.mape == 0);
    /* predicted 1: errors of 100 % and 99 % */
    for (int i = 0; i < 4; i++)
        td_latency_observe_ratio(l, TD_LAT_TTFT, 0, 0, 1, i < 3 ? 0.5 : 100);
    td_latency_quality(l, TD_LAT_TTFT, &q);
    assert_true(q.n == 4 && q.coverage == 0.75);
    CLOSE(q.mape, (3 * 1.0 + 0.99) / 4, 1e-6);
    for (int i = 0; i < 600; i++) td_latency_observe_ratio(l, TD_LAT_TTFT, 0, 0, 1, 0.25);
    td_latency_quality(l, TD_LAT_TTFT, &q);
    assert_true(q.n == 512 && q.coverage == 1);
    CLOSE(q.mape, 3, 1e-6);
    td_latency_quality(l, TD_LAT_TPOT, &q);
    assert_int_equal(q.n, 0);
    td_latency_destroy(l);
}

static void output_lengths(void **state)
{
    (void)state;
    rng = 41;
    struct td_latency *l = make(0.9);
    assert_true(td_latency_output(l, 0, 0.5, 100000) == 256 &&
                td_latency_output(l, 0, 0.9, 100000) == 512);
    assert_true(td_latency_output(l, 0, 0.9, 64) == 64 && td_latency_output(l, 0, 0.5, 0) == 1);
    /* mean 500, 0.9 quantile 900 */
    for (int i = 0; i < 400; i++) td_latency_observe_output(l, 1, 1 + below(1000));
    CLOSE(td_latency_output(l, 1, 0.5, 100000), 500, 0.15);
    CLOSE(td_latency_output(l, 1, 0.9, 100000), 900, 0.15);
    assert_true(td_latency_output(l, 1, 0.7, 100000) > td_latency_output(l, 1, 0.5, 100000));
    assert_true(td_latency_output(l, 1, 0.1, 100000) == td_latency_output(l, 1, 0.5, 100000));
    assert_true(td_latency_output(l, 1, 0.99, 100000) == td_latency_output(l, 1, 0.9, 100000));
    for (int i = 0; i < 19; i++) td_latency_observe_output(l, 2, 20);
    /* fewer than 20 of its own: of all */
    assert_true(td_latency_output(l, 2, 0.5, 100000) == td_latency_output(l, 3, 0.5, 100000));
    for (int i = 0; i < 100; i++) td_latency_observe_output(l, 2, 20);
    CLOSE(td_latency_output(l, 2, 0.5, 100000), 20, 0.15);
    for (int i = 0; i < 400; i++) td_latency_observe_output(l, 2, 20);
    CLOSE(td_latency_output(l, 2, 0.9, 100000), 20, 0.15);
    for (int i = 0; i < 3000; i++) td_latency_observe_output(l, 2, 1);
    CLOSE(td_latency_output(l, 2, 0.5, 100000), 1, 0.01);
    assert_true(td_latency_output(l, 2, 0.9, 100000) >= 1 &&
                td_latency_output(l, 2, 0.9, 100000) < 1.1);
    for (int i = 0; i < 300; i++) td_latency_observe_output(l, 2, UINT32_MAX);
    assert_true(isfinite(td_latency_output(l, 2, 0.9, UINT64_MAX)) &&
                td_latency_output(l, 2, 0.9, 1000) == 1000);
    td_latency_destroy(l);
}

/* --- determinism ------------------------------------------------------------------------------ */

static uint64_t digest;

static void digest_put(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    for (int i = 0; i < 8; i++) digest = (digest ^ (bits >> 8 * i & 255)) * 0x100000001b3ull;
}

static uint64_t run_and_digest(uint64_t seed)
{
    rng = seed;
    digest = 0xcbf29ce484222325ull;
    struct td_latency *l = make(0.9);
    td_latency_set_theta(l, 1, &truth);
    for (uint32_t node = 0; node < 6; node++) td_latency_node_join(l, node, node % 2);
    for (int i = 0; i < 3000; i++) {
        uint32_t node = below(6);
        if (below(2))
            feed_prefill(l, node, node == 4 ? 1.6 : 1, 0.2);
        else
            feed_any_decode(l, node, node == 4 ? 1.6 : 1, 0.2);
        uint32_t r[12]; /* one after the other: arguments have no order of their own */
        for (int k = 0; k < 12; k++) r[k] = below(1u << 30);
        td_latency_observe_transfer(l, node % 2, 1 + r[0], 1 + r[1] % 100000);
        td_latency_observe_ratio(l, i % 2 ? TD_LAT_TTFT : TD_LAT_TPOT, r[2] % 3, r[3] % 8, 1,
                                 uniform(0.5, 1.5));
        td_latency_observe_output(l, r[2] % 3, r[4] % 2000);
        digest_put(td_latency_prefill(l, node, 1 + r[5] % 20000, r[6] % 5000, 512));
        digest_put(td_latency_step(l, node, r[7] % 64, r[8] % 100000, r[9] % 512, r[10] % 100000));
        digest_put(td_latency_transfer(l, node % 2, 1e6, r[11]));
        digest_put(td_latency_margin(l, TD_LAT_TPOT, r[11] % 3, r[10] % 8));
        digest_put(td_latency_output(l, r[9] % 3, 0.9, 1000));
        digest_put(td_latency_correction(l, node));
    }
    struct td_lat_quality q;
    td_latency_quality(l, TD_LAT_TTFT, &q);
    digest_put(q.coverage), digest_put(q.mape);
    td_latency_destroy(l);
    return digest;
}

static void same_calls_same_bits(void **state)
{
    (void)state;
    assert_true(run_and_digest(9) == run_and_digest(9));
    assert_true(run_and_digest(9) != run_and_digest(10));
    /* And in every build: a log recorded by one replays in another (I5). Changes with the model. */
    uint64_t got = run_and_digest(1);
    if (got != 0x7b7a0bc826ffa070ull) print_error("digest is 0x%llx\n", (unsigned long long)got);
    assert_true(got == 0x7b7a0bc826ffa070ull);
}

static void create_names_what_is_wrong(void **state)
{
    (void)state;
    static const struct {
        struct td_lat_config config;
        const char *part;
    } cases[] = {
        {{0, 0.02, 0.999}, "attainment is 0"},   {{1, 0.02, 0.999}, "attainment is 1"},
        {{NAN, 0.02, 0.999}, "attainment is"},   {{0.9, 0, 0.999}, "eta is 0"},
        {{0.9, 0.6, 0.999}, "eta is 0.6"},       {{0.9, NAN, 0.999}, "eta is"},
        {{0.9, 0.02, 0.5}, "forgetting is 0.5"}, {{0.9, 0.02, 1.1}, "forgetting is 1.1"},
        {{0.9, 0.02, NAN}, "forgetting is"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct td_latency *l = NULL;
        struct td_err err = {0};
        assert_int_equal(td_latency_create(&cases[i].config, &l, &err), TD_ERR_INVALID);
        assert_null(l);
        assert_non_null(strstr(err.msg, cases[i].part));
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_known_at_first),
        cmocka_unit_test(coefficients_come_out_of_noise),
        cmocka_unit_test(collinear_features_do_no_harm),
        cmocka_unit_test(the_solver_finds_the_constrained_optimum),
        cmocka_unit_test(a_prior_is_used_and_refined),
        cmocka_unit_test(an_idle_hour_forgets_nothing),
        cmocka_unit_test(stalls_do_not_teach),
        cmocka_unit_test(nonsense_is_ignored),
        cmocka_unit_test(monotone_after_any_samples),
        cmocka_unit_test(good_samples_win_over_past_nonsense),
        cmocka_unit_test(a_slow_node_is_seen),
        cmocka_unit_test(old_medians_are_left_out),
        cmocka_unit_test(a_class_that_changes_is_followed),
        cmocka_unit_test(chunks_add_up_under_any_correction),
        cmocka_unit_test(mixed_steps_start_from_what_prefill_costs_alone),
        cmocka_unit_test(margins_keep_their_coverage),
        cmocka_unit_test(buckets_have_their_own_margin),
        cmocka_unit_test(quality_is_of_the_last_512),
        cmocka_unit_test(output_lengths),
        cmocka_unit_test(same_calls_same_bits),
        cmocka_unit_test(create_names_what_is_wrong),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
