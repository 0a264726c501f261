/* The simulator against numbers that are known: closed forms, laws, and the outputs of other
 * simulators that were run once (their rules stand in sim/distserve.h; splitwise-sim's in the
 * test). Everything is seeded, so each number either comes out or does not. Tests that need the
 * public traces read TANDEM_DATA and say so when it is not there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/stats.h"
#include "sim/closed_form.h"
#include "sim/cluster.h"
#include "tests/sim/distserve.h"
#include "sim/report.h"

static struct td_perf perf_of(const char *spec)
{
    struct td_perf p;
    struct td_err err = {0};
    if (td_perf_load(spec, &p, &err)) print_message("%s\n", err.msg);
    assert_int_equal(err.code, TD_OK);
    return p;
}

static struct td_sim_trace load_of(enum td_sim_arrival arrival, double rate, uint32_t n,
                                   int32_t isl, int32_t osl, uint64_t seed)
{
    struct td_sim_load l = {.arrival = arrival,
                            .rate = rate,
                            .cv = 1,
                            .n_requests = n,
                            .isl = {TD_LENGTH_FIXED, isl, 0},
                            .osl = {TD_LENGTH_FIXED, osl, 0},
                            .seed = seed};
    struct td_sim_trace t;
    struct td_err err = {0};
    assert_int_equal(td_sim_trace_make(&l, NULL, &t, &err), TD_OK);
    return t;
}

/* `want` is how the number was written down, with `digits` decimals: ours must round to it. */
static void check_digits(const char *what, double got, double want, int digits)
{
    char a[32], b[32];
    snprintf(a, sizeof a, "%.*f", digits, got);
    snprintf(b, sizeof b, "%.*f", digits, want);
    if (strcmp(a, b)) print_message("%s: got %s (%.9g), want %s\n", what, a, got, b);
    assert_string_equal(a, b);
}

static double quantile(double *v, uint32_t n, double p)
{
    td_stats_sort(v, n);
    return td_stats_percentile(v, n, p);
}

/* ---- DistServe's simulator ------------------------------------------------------------------- */

static void test_distserve_constant(void **state)
{
    (void)state;
    static const double rates[] = {1, 2, 4, 5, 6, 8, 10},
                        tpot[] = {22.809, 23.400, 24.863, 25.647, 26.478, 28.305, 30.377};
    struct td_perf p = perf_of("opt-13b");
    struct td_distserve d;
    td_distserve_init(&d, &p, &p);
    for (int i = 0; i < 7; i++) {
        struct td_sim_trace t = load_of(TD_ARRIVAL_CONSTANT, rates[i], 300, 512, 64, 1);
        double a[300], b[300];
        td_distserve_run(&d, &t, a, b);
        for (int k = 0; k < 300; k++)
            check_digits("ttft", a[k],
                         18.1025 + 0.101912 * 512 + 7.12226e-6 * 512 * 512 + 1 + 2 + 0.0512, 3);
        check_digits("ttft", a[0], 75.200, 3);
        check_digits("mean tpot", td_stats_mean(b, 300), tpot[i], 3);
        td_sim_trace_free(&t);
    }
}

static void test_distserve_poisson(void **state)
{
    (void)state;
    static const struct {
        const char *prefill, *decode;
        int pp_decode;
        bool colocated;
        double rate, ttft[3], tpot[2]; /* p50, p90, p99; p50, p90 (0: not known) */
    } cases[] = {
        {"opt-13b", "opt-13b", 1, false, 4, {75.20, 144.75, 208.75}, {25.34, 26.60}},
        {"opt-13b", "opt-13b", 1, false, 8, {100.15, 211.56, 310.22}, {28.80, 31.06}},
        {"opt-13b", "opt-13b", 1, false, 12, {187.62, 387.73, 508.15}, {33.36, 36.94}},
        {"opt-13b:tp2", "opt-13b", 1, false, 8, {53.55, 123.57, 171.22}, {0, 0}},
        {"opt-66b:tp4", "opt-66b:tp2", 2, false, 4, {112.17, 268.15, 390.05}, {58.64, 61.11}},
        {"opt-13b-vllm", "opt-13b-vllm", 1, true, 2, {115.95, 179.62, 252.05}, {34.78, 42.14}},
    };
    static double a[1000], b[1000];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_perf p = perf_of(cases[i].prefill), q = perf_of(cases[i].decode);
        struct td_distserve d;
        td_distserve_init(&d, &p, &q);
        d.pp_decode = cases[i].pp_decode;
        d.colocated = cases[i].colocated;
        struct td_sim_trace t = load_of(TD_ARRIVAL_POISSON, cases[i].rate, 1000, 512, 64, 1);
        td_distserve_run(&d, &t, a, b);
        static const double ps[] = {50, 90, 99};
        for (int k = 0; k < 3; k++)
            check_digits("ttft", quantile(a, 1000, ps[k]), cases[i].ttft[k], 2);
        for (int k = 0; k < 2; k++)
            if (cases[i].tpot[k] > 0)
                check_digits("tpot", quantile(b, 1000, ps[k]), cases[i].tpot[k], 2);
        td_sim_trace_free(&t);
    }
}

/* Rates at which 90 % meet both objectives, N = 2000, seeds 1 and 2: it holds at the known rate
 * and not 2 % above it. The best layout for each GPU changes with the objectives. */
static double distserve_attainment(const char *prefill, const char *decode, bool colocated,
                                   double rate, double ttft_ms, double tpot_ms)
{
    static double a[2000], b[2000];
    struct td_perf p = perf_of(prefill), q = perf_of(decode);
    struct td_distserve d;
    td_distserve_init(&d, &p, &q);
    d.colocated = colocated;
    double good = 0;
    for (uint64_t seed = 1; seed <= 2; seed++) {
        struct td_sim_trace t = load_of(TD_ARRIVAL_POISSON, rate, 2000, 512, 64, seed);
        td_distserve_run(&d, &t, a, b);
        for (int i = 0; i < 2000; i++) good += a[i] <= ttft_ms && b[i] <= tpot_ms;
        td_sim_trace_free(&t);
    }
    return good / 4000;
}

static void test_distserve_goodput(void **state)
{
    (void)state;
    static const struct {
        const char *prefill, *decode;
        bool colocated;
        int gpus;
        double rate[2];
    } layouts[] = {
        {"opt-13b-vllm", "opt-13b-vllm", true, 1, {1.73, 3.31}},
        {"opt-13b", "opt-13b", false, 2, {11.86, 7.41}},
        {"opt-13b:tp2", "opt-13b", false, 3, {13.50, 14.70}},
    };
    static const double slo[2][2] = {{400, 40}, {200, 100}};
    int best[2] = {0, 0};
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 3; i++) {
            double at =
                distserve_attainment(layouts[i].prefill, layouts[i].decode, layouts[i].colocated,
                                     layouts[i].rate[k], slo[k][0], slo[k][1]);
            double above =
                distserve_attainment(layouts[i].prefill, layouts[i].decode, layouts[i].colocated,
                                     layouts[i].rate[k] * 1.02, slo[k][0], slo[k][1]);
            if (at < 0.9 || above >= 0.9)
                print_message("%s %g/%g: %.4f at %.2f, %.4f 2%% above\n", layouts[i].prefill,
                              slo[k][0], slo[k][1], at, layouts[i].rate[k], above);
            assert_true(at >= 0.9);
            assert_true(above < 0.9);
            if (layouts[i].rate[k] / layouts[i].gpus >
                layouts[best[k]].rate[k] / layouts[best[k]].gpus)
                best[k] = i;
        }
    assert_int_equal(best[0], 1);
    assert_int_equal(best[1], 2);
}

/* ---- laws, on tandem's own cluster ----------------------------------------------------------- */

/* One prefill and one decode worker, messages that take no time, one prompt in a step. */
static void plain_config(struct td_sim_config *c, const char *spec)
{
    td_sim_config_init(c);
    struct td_sim_group g = {.count = 1,
                             .perf = perf_of(spec),
                             .kv_tokens = 1u << 28,
                             .max_batch = 4096,
                             .max_step_tokens = 1 << 20,
                             .max_seqs = 4096};
    c->groups[0] = c->groups[1] = g;
    c->groups[0].max_batch = 1;
    c->groups[1].decode = true;
    c->n_groups = 2;
    c->rpc_ns = c->link_tau_ns = 0;
    c->snapshot_ns = 100000000;
    c->tick_ns = 1000000000;
    c->router.max_requests = 1024;
    c->grace_s = 1000;
}

static struct td_sim_result run(const struct td_sim_config *c, const struct td_sim_trace *t)
{
    struct td_sim_result r;
    struct td_err err = {0};
    if (td_sim_run(c, t, NULL, NULL, &r, &err)) print_message("%s\n", err.msg);
    assert_int_equal(err.code, TD_OK);
    if (r.n_violations) print_message("%u violations, the first %s\n", r.n_violations, r.violation);
    return r;
}

/* Prompts of one length, one output token: the prefill worker is an M/D/1 queue. */
static void test_md1(void **state)
{
    (void)state;
    struct td_sim_config c;
    plain_config(&c, "opt-13b");
    double service = td_perf_prefill_s(&c.groups[0].perf, 512, 0, 1 << 20);
    check_digits("service ms", service * 1e3, 18.1025 + 0.101912 * 512 + 7.12226e-6 * 512 * 512, 3);
    /* Waits are correlated: at load rho some 1 / (1 - rho)^2 neighbours count as one, so the
       mean of 30,000 is good to a few per cent only. */
    static const double loads[] = {0.3, 0.6, 0.8}, within[] = {0.02, 0.05, 0.10};
    for (int i = 0; i < 3; i++) {
        double rate = loads[i] / service;
        struct td_sim_trace t = load_of(TD_ARRIVAL_POISSON, rate, 30000, 512, 1, 1);
        struct td_sim_result r = run(&c, &t);
        double *times = malloc(r.n * sizeof *times), sum = 0, lindley = 0;
        assert_non_null(times);
        for (uint32_t k = 0; k < r.n; k++) {
            assert_int_equal(r.outcomes[k].status, TD_SIM_OK);
            times[k] = (double)(r.outcomes[k].first_ns - r.outcomes[k].at_ns) / 1e9;
            sum += times[k] - service;
            if (k > 0)
                lindley =
                    fmax(0, lindley + service -
                                (double)(r.outcomes[k].at_ns - r.outcomes[k - 1].at_ns) / 1e9);
            if (fabs(times[k] - service - lindley) > 1e-4)
                print_message("load %g, request %u: waited %.9f, Lindley says %.9f\n", loads[i], k,
                              times[k] - service, lindley);
            /* exact on these arrivals, up to nanoseconds that add up in a busy period */
            assert_true(fabs(times[k] - service - lindley) < 1e-4);
        }
        double mean = sum / r.n, want = td_md1_wait_s(rate, service),
               p99 = quantile(times, r.n, 99), want99 = td_md1_quantile_s(rate, service, 0.99);
        if (fabs(mean / want - 1) > within[i] || fabs(p99 / want99 - 1) > within[i])
            print_message("load %g: wait %.6f want %.6f, p99 %.6f want %.6f\n", loads[i], mean,
                          want, p99, want99);
        assert_true(fabs(mean / want - 1) <= within[i]);
        assert_true(fabs(p99 / want99 - 1) <= within[i]);
        assert_int_equal(r.prefill_tokens, 30000 * 512);
        free(times);
        td_sim_result_free(&r);
        td_sim_trace_free(&t);
    }
}

/* Little: the mean number in decode = arrival rate * mean time in decode. The left side is the
 * integral of the batch over steps, the right side comes from the clients' clocks; they differ
 * by the wait for the step that runs when a sequence becomes ready, which is bounded by one step
 * each. */
static void test_little(void **state)
{
    (void)state;
    struct td_sim_config c;
    plain_config(&c, "opt-13b");
    for (int i = 0; i < 2; i++) {
        struct td_sim_trace t = load_of(TD_ARRIVAL_POISSON, i ? 10 : 3, 4000, 256, 65, 7);
        struct td_sim_result r = run(&c, &t);
        double in_decode = 0, longest_step = 0;
        for (uint32_t k = 0; k < r.n; k++) {
            assert_int_equal(r.outcomes[k].status, TD_SIM_OK);
            in_decode += (double)(r.outcomes[k].end_ns - r.outcomes[k].first_ns) / 1e9;
        }
        struct td_perf_batch most = {.decode_rows = 94, .context_tokens = 94 * 321.0};
        longest_step = td_perf_step_s(&c.groups[1].perf, &most);
        if (!(r.decode_row_s <= in_decode && in_decode - r.decode_row_s <= r.n * longest_step))
            print_message("rows x time %.3f, clients %.3f, %u steps of %.4f\n", r.decode_row_s,
                          in_decode, r.n, longest_step);
        assert_true(r.decode_row_s <= in_decode);
        assert_true(in_decode - r.decode_row_s <= r.n * longest_step);
        assert_int_equal(r.decode_tokens, 4000 * 64); /* nothing is computed twice or left out */
        td_sim_result_free(&r);
        td_sim_trace_free(&t);
    }
}

/* What more load, longer prompts, slower links and slower nodes do goes one way only. */
static struct td_sim_summary summary_of(struct td_sim_config *c, double rate, int32_t isl)
{
    struct td_sim_trace t = load_of(TD_ARRIVAL_POISSON, rate, 1500, isl, 65, 3);
    struct td_sim_result r = run(c, &t);
    struct td_sim_summary s;
    td_sim_summarise(c, &r, &s);
    td_sim_result_free(&r);
    td_sim_trace_free(&t);
    return s;
}

static void test_monotone(void **state)
{
    (void)state;
    struct td_sim_config c;
    plain_config(&c, "opt-13b");
    c.groups[0].count = c.groups[1].count = 2;
    c.groups[0].nic_bytes_per_s = c.groups[1].nic_bytes_per_s = 12.5e9;
    c.ttft_s = 0.4;
    c.tpot_s = 0.04;
    double before = 2;
    for (double rate = 6; rate <= 38; rate += 8) {
        struct td_sim_summary s = summary_of(&c, rate, 512);
        assert_true(s.attainment <= before + 0.005); /* the same seed, so the same order of
                                                        arrivals: equal up to a request or two at
                                                        the edges */
        before = s.attainment;
    }
    assert_true(before < 0.5);
    double ttft = 0;
    for (int32_t isl = 128; isl <= 2048; isl *= 2) {
        struct td_sim_summary s = summary_of(&c, 4, isl);
        assert_true(s.ttft_ms.mean > ttft);
        ttft = s.ttft_ms.mean;
    }
    struct td_sim_summary fast = summary_of(&c, 10, 512);
    c.groups[1].nic_bytes_per_s = 3e9;
    struct td_sim_summary thin = summary_of(&c, 10, 512);
    if (!(thin.tpot_ms.mean > fast.tpot_ms.mean * 1.1))
        print_message("tpot %.3f with a thin link, %.3f with a fast one\n", thin.tpot_ms.mean,
                      fast.tpot_ms.mean);
    /* 0.42 GB each: the hand-over shows in TPOT ... */
    assert_true(thin.tpot_ms.mean > fast.tpot_ms.mean * 1.1);
    if (fabs(thin.ttft_ms.mean - fast.ttft_ms.mean) > 3)
        print_message("ttft %.3f with a thin link, %.3f with a fast one\n", thin.ttft_ms.mean,
                      fast.ttft_ms.mean);
    /* ms: ... and not in TTFT, but for the step that a reservation waits for */
    assert_true(fabs(thin.ttft_ms.mean - fast.ttft_ms.mean) <= 3);
    c.groups[1].nic_bytes_per_s = 12.5e9;
    c.groups[1].slow = 2;
    struct td_sim_summary slow = summary_of(&c, 10, 512);
    assert_true(slow.tpot_ms.mean > fast.tpot_ms.mean * 1.9);
}

/* Two transfers at once through one card take twice as long as one; through two cards they do
 * not. */
static void test_links_share(void **state)
{
    (void)state;
    struct td_sim_config c;
    plain_config(&c, "opt-13b");
    c.overlap = false;
    c.groups[0].count = 2; /* two prefill workers, one decode worker: round robin gives each a
                              prompt */
    c.groups[0].nic_bytes_per_s = c.groups[1].nic_bytes_per_s = 1e9;
    c.kv_bytes_per_token = 1e6;
    c.block_size = 1;
    struct td_sim_request two[2] = {{.n_prompt = 500, .n_output = 2},
                                    {.n_prompt = 500, .n_output = 2}};
    struct td_sim_trace t = {.requests = two, .n = 1};
    struct td_sim_result one = run(&c, &t);
    double alone = (double)(one.outcomes[0].end_ns - one.outcomes[0].first_ns) / 1e9;
    t.n = 2;
    struct td_sim_result both = run(&c, &t);
    double shared = (double)(both.outcomes[1].end_ns - both.outcomes[1].first_ns) / 1e9;
    struct td_perf_batch b1 = {.decode_rows = 1, .context_tokens = 501},
                         b2 = {.decode_rows = 2, .context_tokens = 1002};
    assert_true(fabs(alone - (0.5 + td_perf_step_s(&c.groups[1].perf, &b1))) < 1e-6);
    assert_true(fabs(shared - (1.0 + td_perf_step_s(&c.groups[1].perf, &b2))) <
                td_perf_step_s(&c.groups[1].perf, &b1) + 1e-6);
    assert_true(shared >= 1.0);
    td_sim_result_free(&one);
    td_sim_result_free(&both);
    c.groups[1].count = 2; /* a card each */
    struct td_sim_result apart = run(&c, &t);
    for (int i = 0; i < 2; i++)
        assert_true(fabs((double)(apart.outcomes[i].end_ns - apart.outcomes[i].first_ns) / 1e9 -
                         alone) < 1e-6);
    td_sim_result_free(&apart);
}

/* ---- planners -------------------------------------------------------------------------------- */

/* AIConfigurator's README example: 2 prefill workers of 2 GPUs and 1 decode worker of 4 give
 * 684.79 tokens/s/GPU at TTFT 295.71 ms, 500 output tokens. */
static void test_aiconfigurator(void **state)
{
    (void)state;
    double prefill_s = 0.29571 / 1.8;
    check_digits("static prefill ms", prefill_s * 1e3, 164.28, 2);
    check_digits("prefill seq/s", 1 / prefill_s, 6.087, 3);
    /* decode is not the narrow side there */
    double seq_s = td_rate_match(1 / prefill_s, 2, 1e9, 1);
    check_digits("seq/s", seq_s, 10.957, 3);
    check_digits("tokens/s/GPU", seq_s * 500 / 8, 684.8, 1);
    check_digits("decode side", td_rate_match(1e9, 1, 10, 3), 27.6, 1);
}

static void test_closed_forms(void **state)
{
    (void)state;
    check_digits("M/D/1 wait", td_md1_wait_s(8, 0.0725) * 1e3, 8 * 72.5 * 0.0725 / (2 * (1 - 0.58)),
                 6);
    assert_true(isinf(td_md1_wait_s(10, 0.1)));
    for (double target = 0.11; target < 1; target *= 2) { /* the rate is the inverse of the wait */
        double rate = td_md1_rate(0.1, target);
        assert_true(fabs(td_md1_wait_s(rate, 0.1) + 0.1 - target) < 1e-9);
    }
    assert_true(td_md1_rate(0.1, 0.1) == 0 && td_md1_rate(0.1, 0.05) == 0);
    struct td_perf p = perf_of("opt-13b");
    int64_t b = td_decode_batch(&p, 512, 64, 0.04, 4096);
    struct td_perf_batch at = {.decode_rows = b, .context_tokens = (double)b * 544},
                         above = {.decode_rows = b + 1, .context_tokens = (double)(b + 1) * 544};
    assert_true(b > 0 && td_perf_step_s(&p, &at) <= 0.04 && td_perf_step_s(&p, &above) > 0.04);
    assert_int_equal(td_decode_batch(&p, 512, 64, 10, 4096), 66144 / 576); /* memory decides */
    assert_int_equal(td_decode_batch(&p, 512, 64, 0.001, 4096), 0);
}

/* ---- public data ----------------------------------------------------------------------------- */

static bool data_path(const char *name, char *path, size_t bytes)
{
    const char *data = getenv("TANDEM_DATA");
    snprintf(path, bytes, "%s/%s", data ? data : "../shared/data", name);
    if (access(path, R_OK) == 0) return true;
    print_message("%s is not there: set TANDEM_DATA\n", path);
    return false;
}

/* One global LRU over the Mooncake conversation trace: the counts of an independent implementation
 * in Python's OrderedDict, and the table of shares.
 */
static void test_prefix_table(void **state)
{
    (void)state;
    char path[1024];
    if (!data_path("mooncake-fast25/conversation_trace.jsonl", path, sizeof path)) skip();
    struct td_sim_trace t;
    struct td_err err = {0};
    assert_int_equal(td_sim_trace_read(path, false, &t, &err), TD_OK);
    assert_int_equal(t.n, 12031);
    assert_int_equal(t.n_hashes, 288500);
    static const struct {
        uint64_t capacity, hits;
        double share;
    } rows[] = {{0, 105710, 36.6},    {100000, 104924, 36.4}, {50000, 102290, 35.5},
                {20000, 82939, 28.8}, {10000, 60921, 21.1},   {5000, 31840, 11.0},
                {1000, 12831, 4.5}};
    uint64_t tokens, prompt = 0;
    for (uint32_t i = 0; i < t.n; i++) prompt += (uint64_t)t.requests[i].n_prompt;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint64_t hits = td_sim_prefix_hits(&t, rows[i].capacity, &tokens);
        if (hits != rows[i].hits)
            print_message("capacity %llu: %llu hits, want %llu\n",
                          (unsigned long long)rows[i].capacity, (unsigned long long)hits,
                          (unsigned long long)rows[i].hits);
        assert_int_equal(hits, rows[i].hits);
        check_digits("blocks hit %", round(100 * 100.0 * (double)hits / 288500) / 100 + 1e-9,
                     rows[i].share, 1); /* the table was rounded to 2 digits, then to 1 */
        if (rows[i].capacity == 0)
            check_digits("tokens hit %", 100.0 * (double)tokens / (double)prompt, 37.4, 1);
    }
    td_sim_trace_free(&t);
}

/* splitwise-sim's test trace (requests at 1, 3 and 4 s; 4096/32, 2048/8, 2048/16 tokens),
 * Bloom-176B on 8 GPUs: one H100 server that does both, then an H100 server that prefills and an
 * A100 server that decodes, 200 GiB/s between them. Its rules, in our cluster: no chunks, no
 * overlap, no message times, reservations that do not wait for a step; its decode steps depend
 * on the number of sequences only, which is what its table says. */
static void test_splitwise(void **state)
{
    (void)state;
    char path[1024], spec[1200];
    if (!data_path("splitwise-sim/perf_model.csv", path, sizeof path)) skip();
    static const double ttft[] = {.649598, .251964, .251964},
                        alone[] = {1.744743, .499255, .781873},
                        split[] = {2.199226, .622873, 1.003019};
    struct td_sim_request q[3] = {{.at_ns = 1000000000, .n_prompt = 4096, .n_output = 32},
                                  {.at_ns = 3000000000, .n_prompt = 2048, .n_output = 8},
                                  {.at_ns = 4000000000, .n_prompt = 2048, .n_output = 16}};
    struct td_sim_trace t = {.requests = q, .n = 3};
    struct td_sim_config c;
    plain_config(&c, "opt-13b");
    c.overlap = false;
    c.admit_at_once = true;
    snprintf(spec, sizeof spec, "splitwise:%s:bloom-176b:h100-80gb:8", path);
    c.groups[0].perf = c.groups[1].perf = perf_of(spec);
    c.router.mode = "colocated";
    struct td_sim_result r = run(&c, &t);
    for (int i = 0; i < 3; i++) {
        check_digits("ttft", (double)(r.outcomes[i].first_ns - q[i].at_ns) / 1e9, ttft[i], 6);
        check_digits("response", (double)(r.outcomes[i].end_ns - q[i].at_ns) / 1e9, alone[i], 6);
    }
    td_sim_result_free(&r);
    c.router.mode = "pd";
    snprintf(spec, sizeof spec, "splitwise:%s:bloom-176b:a100-80gb:8", path);
    c.groups[1].perf = perf_of(spec);
    c.groups[0].nic_bytes_per_s = c.groups[1].nic_bytes_per_s = 200.0 * (1 << 30);
    assert_true(c.groups[0].perf.kv_bytes_per_token == 2.0 * 14336 * 70 * 2);
    check_digits("transfer of 4096 tokens",
                 4096 * c.groups[0].perf.kv_bytes_per_token / c.groups[0].nic_bytes_per_s, .0765625,
                 7);
    r = run(&c, &t);
    for (int i = 0; i < 3; i++) {
        check_digits("ttft", (double)(r.outcomes[i].first_ns - q[i].at_ns) / 1e9, ttft[i], 6);
        check_digits("response", (double)(r.outcomes[i].end_ns - q[i].at_ns) / 1e9, split[i], 6);
    }
    td_sim_result_free(&r);
}

/* The kept files, as their statistics say. */
static void test_azure(void **state)
{
    (void)state;
    char path[1024];
    if (!data_path("azure-llm-2023/AzureLLMInferenceTrace_conv.csv", path, sizeof path)) skip();
    struct td_sim_trace t;
    struct td_err err = {0};
    assert_int_equal(td_sim_trace_read(path, false, &t, &err), TD_OK);
    double in = 0, out = 0;
    for (uint32_t i = 0; i < t.n; i++) {
        in += t.requests[i].n_prompt;
        out += t.requests[i].n_output;
    }
    assert_int_equal(t.n, 19366);
    check_digits("duration", (double)t.requests[t.n - 1].at_ns / 1e9, 3502, 0);
    check_digits("mean prompt", in / t.n, 1155, 0);
    check_digits("mean output", out / t.n, 211, 0);
    td_sim_trace_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_distserve_constant),
        cmocka_unit_test(test_distserve_poisson),
        cmocka_unit_test(test_distserve_goodput),
        cmocka_unit_test(test_md1),
        cmocka_unit_test(test_little),
        cmocka_unit_test(test_monotone),
        cmocka_unit_test(test_links_share),
        cmocka_unit_test(test_aiconfigurator),
        cmocka_unit_test(test_closed_forms),
        cmocka_unit_test(test_prefix_table),
        cmocka_unit_test(test_splitwise),
        cmocka_unit_test(test_azure),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
