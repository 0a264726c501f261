/* bench_result_test.c - from requests to verdicts and shares, objectives as text, and result
 * files written and read back. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/serve/result.h"
#include "common/base/json.h"

#define METRICS "ttft,tpot,itl,e2el"

static void near(double got, double want, const char *what)
{
    if (!(fabs(got - want) <= 1e-9 * fmax(1, fabs(want))))
        fail_msg("%s: %.12g, expected %.12g", what, got, want);
}

static void result_init(struct bench_result *r, size_t capacity)
{
    *r = (struct bench_result){.setup.gpus = 2,
                               .setup.n_prefill = 1,
                               .setup.n_decode = 1,
                               .load.warmup = 0.1,
                               .load.grace_s = 30,
                               .n_pcts = 2,
                               .pcts = {50, 99},
                               .n_classes = 1,
                               .load.request_rate = 1,
                               .load.burstiness = 1,
                               .load.rescaled = true,
                               .load.seed = 7,
                               .load.time_scale = 1,
                               .load.length_scale = 1,
                               .generator.max_sched_lag_ms = 1000,
                               .setup.date = "20260101-000000",
                               .setup.backend = "grpc",
                               .setup.model_id = "m",
                               .load.arrival = "poisson",
                               .setup.dataset = "random",
                               .setup.topology_mode = "pd",
                               .setup.policy = "least_token",
                               .setup.build = "1",
                               .setup.server_build = "1",
                               .setup.target = "h:1"};
    r->slo = r->classes[0].of.slo = (struct bench_slo){.ttft_ms = 100, .tpot_ms = 10};
    r->classes[0].of.weight = 1;
    r->requests = calloc(capacity, sizeof *r->requests);
    assert_non_null(r->requests);
}

/* Sent lag_ms after at_s; the first of n_tokens ttft_ms later, the others gap_ms apart; ended 1
 * ms after the last. */
static struct bench_request *add(struct bench_result *r, double at_s, double lag_ms, double ttft_ms,
                                 int n_tokens, double gap_ms, enum bench_outcome outcome)
{
    struct bench_request *q = &r->requests[r->n_requests++];
    *q = (struct bench_request){.outcome = outcome,
                                .scheduled_s = at_s,
                                .ready_s = at_s,
                                .sent_s = at_s + lag_ms / 1e3,
                                .first_s = NAN,
                                .last_s = NAN,
                                .input_len = 32,
                                .output_len = n_tokens,
                                .want_len = 5,
                                .n_messages = (uint32_t)n_tokens,
                                .retry_delay_ms = -1};
    q->end_s = q->sent_s + ttft_ms / 1e3;
    if (n_tokens) {
        q->first_s = q->end_s;
        q->gaps_s = calloc((size_t)n_tokens, sizeof *q->gaps_s);
        assert_non_null(q->gaps_s);
        for (int i = 0; i + 1 < n_tokens; i++) q->gaps_s[i] = gap_ms / 1e3;
        q->last_s = q->first_s + (n_tokens - 1) * gap_ms / 1e3;
        q->end_s = q->last_s + 0.001;
    }
    if (outcome != BENCH_COMPLETED) q->code = 13, q->error = strdup("why");
    return q;
}

/* One of each kind, a second apart; all but the first arrive in the window. */
static void one_of_each(struct bench_result *r)
{
    result_init(r, 16);
    add(r, 0, 0, 50, 5, 4, BENCH_COMPLETED);
    add(r, 1, 0, 50, 5, 4, BENCH_COMPLETED);  /* good */
    add(r, 2, 60, 50, 5, 4, BENCH_COMPLETED); /* sent late: 50 ms for vLLM, 110 ms for its
                                                 objective */
    add(r, 3, 0, 50, 5, 20, BENCH_COMPLETED); /* TPOT 20 */
    add(r, 4, 0, 50, 1, 0, BENCH_COMPLETED);  /* one token: good */
    add(r, 5, 0, 5, 0, 0, BENCH_REJECTED);
    add(r, 6, 0, 50, 1, 0, BENCH_FAILED); /* after its first token */
    add(r, 7, 0, 900, 0, 0, BENCH_UNFINISHED);
    add(r, 8, 0, 900, 0, 0, BENCH_TIMED_OUT);
    add(r, 9, 0, 30, 0, 0, BENCH_COMPLETED);  /* no token, ended at once: good */
    add(r, 10, 0, 50, 5, 4, BENCH_COMPLETED); /* good */
}

static const struct bench_verdict verdicts_wanted[11] = {{true, true, true, true, true},
                                                         {true, true, true, true, true},
                                                         {false, true, true, true, false},
                                                         {true, false, true, true, false},
                                                         {true, true, true, true, true},
                                                         {0},
                                                         {0},
                                                         {0},
                                                         {0},
                                                         {true, true, true, true, true},
                                                         {true, true, true, true, true}};

static void verdicts_and_window(void **state)
{
    (void)state;
    struct bench_result r;
    one_of_each(&r);
    bench_result_summarise(&r);
    for (size_t i = 0; i < 11; i++)
        if (memcmp(&r.requests[i].ok, &verdicts_wanted[i], sizeof verdicts_wanted[i]) != 0)
            fail_msg("verdict of request %zu", i);
    assert_int_equal(r.total.n_offered, 11);
    assert_int_equal(r.total.n_outcome[BENCH_COMPLETED], 7);
    assert_int_equal(r.total.n_outcome[BENCH_REJECTED] + r.total.n_outcome[BENCH_TIMED_OUT] +
                         r.total.n_outcome[BENCH_FAILED] + r.total.n_outcome[BENCH_UNFINISHED],
                     4);
    near(r.steady.t0_s, 1, "t0");
    near(r.steady.t1_s, 10, "t1");
    assert_int_equal(r.steady.joint.n, 10);
    assert_int_equal(r.steady.joint.k, 4);
    assert_int_equal(r.steady.ttft.k, 5);
    assert_int_equal(r.steady.tpot.k, 5);
    near(r.steady.joint.value, 0.4, "attainment");
    near(r.steady.offered_rate, 10.0 / 9, "offered");
    near(r.steady.goodput, 4.0 / 9, "goodput");
    near(r.steady.per_gpu_goodput, 2.0 / 9, "per GPU");
    near(r.rates.duration_s, 10.067, "duration");
    near(r.rates.request_goodput, 5 / 10.067, "vLLM's goodput counts the whole run");
    near(r.rates.request_throughput, 7 / 10.067, "throughput");
    assert_false(r.steady.has_batch); /* ten samples make no twenty batches */
    struct td_stats_interval w = td_stats_wilson(4, 10);
    near(r.steady.ci95.lo, w.lo, "ci lo");
    near(r.steady.ci95.hi, w.hi, "ci hi");
    assert_int_equal(r.total.n_one_token, 1);
    assert_int_equal(r.total.n_no_token, 1);
    assert_int_equal(r.total.wasted_prefill_tokens, 32);
    assert_int_equal(r.metric[BENCH_TTFT].n, 7);
    assert_int_equal(r.metric[BENCH_TPOT].n, 5);
    assert_int_equal(r.metric[BENCH_ITL].n, 5 * 4);
    near(r.metric[BENCH_TTFT].max, 50, "vLLM's TTFT is from the send");
    near(r.steady.slo_ttft.max, 110, "that of the objectives from the schedule");
    near(r.metric[BENCH_TPOT].median, 4, "TPOT");
    near(r.metric[BENCH_TPOT].max, 20, "TPOT");
    near(r.metric[BENCH_E2EL].max, 130, "E2EL");
    /* Seven values: the median lies between the first and the last (1/128 outside on either
       side), the p99 has no upper bound. */
    near(r.metric[BENCH_E2EL].pct_ci95[0].lo, r.metric[BENCH_E2EL].min, "median's lower bound");
    near(r.metric[BENCH_E2EL].pct_ci95[0].hi, 130, "median's upper bound");
    assert_true(isnan(r.metric[BENCH_E2EL].pct_ci95[1].hi) &&
                !isnan(r.metric[BENCH_E2EL].pct_ci95[1].lo));
    /* On time: 5 + 3 (110, 114, 118, 122, 126 against 100, 110 ..) + 5 + 1 + 0 + 1 + 0 + 0 + 5,
       of 5 + 5 + 5 + 1 + 5 + 5 + 5 + 5 + 5. */
    near(r.steady.token_deadline_share, 20.0 / 41, "token deadlines");
    bench_result_free(&r);
}

static void cooldown_in_seconds(void **state)
{
    (void)state;
    struct bench_result r;
    one_of_each(&r);
    r.load.warmup = 2.5;
    r.load.cooldown = 3;
    bench_result_summarise(&r);
    near(r.steady.t0_s, 2.5, "t0");
    near(r.steady.t1_s, 7, "t1");
    assert_int_equal(r.steady.joint.n, 5);
    assert_int_equal(r.steady.joint.k, 1);
    bench_result_free(&r);
    one_of_each(&r); /* nothing left */
    r.load.warmup = 20;
    bench_result_summarise(&r);
    assert_int_equal(r.steady.joint.n, 0);
    assert_true(isnan(r.steady.joint.value) && isnan(r.steady.goodput));
    near(r.steady.ci95.lo, 0, "ci");
    near(r.steady.ci95.hi, 1, "ci");
    bench_result_free(&r);
}

static void other_objectives(void **state)
{
    (void)state;
    struct bench_result r;
    result_init(&r, 4);
    r.classes[0].of.slo = (struct bench_slo){.e2el_ms = 100, .tbt_ms = 10};
    struct bench_request *q = add(&r, 1, 0, 50, 11, 4, BENCH_COMPLETED); /* 90 ms */
    add(&r, 2, 0, 50, 15, 4, BENCH_COMPLETED);                           /* 106 ms */
    /* one gap of ten is long: the mean of the longest tenth is that gap */
    q = add(&r, 3, 0, 50, 11, 4, BENCH_COMPLETED);
    q->gaps_s[7] = 0.013;
    q->last_s += 0.009;
    r.load.warmup = 0;
    bench_result_summarise(&r);
    assert_true(r.requests[0].ok.joint);
    assert_true(!r.requests[1].ok.e2el && r.requests[1].ok.tbt && r.requests[1].ok.ttft &&
                r.requests[1].ok.tpot);
    assert_true(r.requests[2].ok.e2el && !r.requests[2].ok.tbt && !r.requests[2].ok.joint);
    assert_int_equal(r.steady.tbt.k, 2);
    assert_int_equal(r.steady.e2el.k, 2);
    bench_result_free(&r);
}

static void late_generator_fails_the_run(void **state)
{
    (void)state;
    static const struct {
        double lag_ms, ttft_ms, limit_ms;
        bool valid;
    } cases[] = {
        {4.9, 0, 0, true},    {5.1, 0, 0, false},   /* 5 ms */
        {1.9, 200, 0, true},  {2.1, 200, 0, false}, /* 1 % of the objective */
        {4.9, 2000, 0, true}, {5.1, 2000, 0, false},
        {9, 200, 10, true},   {11, 200, 10, false}, /* as told */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct bench_result r;
        result_init(&r, 4);
        r.classes[0].of.slo = (struct bench_slo){.ttft_ms = cases[i].ttft_ms};
        r.generator.max_sched_lag_ms = cases[i].limit_ms;
        add(&r, 0, cases[i].lag_ms, 5, 1, 0, BENCH_COMPLETED);
        struct bench_request *q = add(&r, 1, cases[i].lag_ms + 100, 5, 1, 0, BENCH_COMPLETED);
        q->ready_s += 0.1; /* held back by the concurrency: not the generator's delay */
        bench_result_summarise(&r);
        if (r.valid != cases[i].valid)
            fail_msg("case %zu: valid %d, p99 %g", i, r.valid, r.generator.lag_p99_ms);
        assert_true(r.valid == !strstr(r.invalid_reason, "sched_lag_ms"));
        bench_result_free(&r);
    }
}

static void closed_loop_clock(void **state)
{
    (void)state;
    struct bench_result r;
    result_init(&r, 4);
    r.load.closed_loop = true;
    struct bench_request *q = add(&r, 0, 200, 50, 1, 0, BENCH_COMPLETED);
    q->ready_s = 0.2; /* a place came free then */
    bench_result_summarise(&r);
    assert_true(r.requests[0].ok.joint);
    near(r.steady.slo_ttft.max, 50, "from the place");
    bench_result_free(&r);
}

static void peaks(void **state)
{
    (void)state;
    struct bench_result r;
    result_init(&r, 8);
    add(&r, 0.0, 0, 100, 11, 95, BENCH_COMPLETED); /* tokens at 0.1 .. 0.955, 1.05 */
    add(&r, 0.5, 0, 100, 3, 10, BENCH_COMPLETED);  /* 0.6 .. 0.62 */
    add(&r, 0.6, 0, 1, 0, 0, BENCH_REJECTED);
    add(&r, 0.7, 0, 500, 1, 0, BENCH_COMPLETED); /* 1.2 */
    bench_result_summarise(&r);
    assert_int_equal(r.total.max_concurrent_requests,
                     3); /* at 0.6: the first two and the rejected */
    near(r.rates.max_output_tokens_per_s, 10 + 3, "tokens in the first second");
    bench_result_free(&r);
}

static void classes_and_tenants(void **state)
{
    (void)state;
    struct bench_result r;
    result_init(&r, 16);
    r.load.warmup = 0;
    r.n_classes = 2;
    r.load.n_tenants = 3;
    r.classes[0].of = (struct bench_class){.name = "gold", .slo = {.ttft_ms = 40}, .weight = 3};
    r.classes[1].of = (struct bench_class){.name = "free", .slo = {.ttft_ms = 400}, .weight = 1};
    for (int i = 0; i < 8; i++) {
        struct bench_request *q = add(&r, i, 0, i == 6 ? 500 : 50, 2, 1, BENCH_COMPLETED);
        q->class_index = i >= 4;
        q->tenant = i >= 4 ? 1 : 0; /* tenant 2 sends nothing and is no part of the index */
    }
    bench_result_summarise(&r);
    near(r.classes[0].joint.value, 0, "gold");
    near(r.classes[1].joint.value, 0.75, "free");
    assert_int_equal(r.classes[1].joint.n, 4);
    near(r.steady.joint.value, 3.0 / 8, "all");
    near(r.classes[1].request_goodput, 3.0 / 7, "goodput of the class");
    near(r.classes[1].ttft_p50_ms, 50, "median of the class");
    near(r.jain_index, 0.5, "one tenant has all");
    bench_result_free(&r);
}

static void batches_widen_the_interval(void **state)
{
    (void)state;
    struct bench_result r;
    result_init(&r, 400);
    r.load.warmup = 0;
    /* good and bad in runs of twenty */
    for (int i = 0; i < 400; i++)
        add(&r, i * 0.01, 0, i / 20 % 2 ? 50 : 500, 1, 0, BENCH_COMPLETED);
    bench_result_summarise(&r);
    assert_true(r.steady.has_batch);
    near(r.steady.ci95.lo, r.steady.ci95_batch.lo, "the wider one");
    near(r.steady.ci95.hi, r.steady.ci95_batch.hi, "the wider one");
    assert_true(r.steady.ci95.hi - r.steady.ci95.lo >
                4 * (r.steady.ci95_wilson.hi - r.steady.ci95_wilson.lo));
    bench_result_free(&r);
}

/* One server, an arrival every 10 ms: at 8 ms a request nobody waits, at 12 ms everybody waits
 * longer than the one before. */
static void saturation(void **state)
{
    (void)state;
    static const struct {
        double service_ms;
        size_t n;
        bool has_trend, saturated;
    } cases[] = {{8, 200, true, false}, {12, 200, true, true}, {12, 30, false, false}};
    for (size_t c = 0; c < 3; c++) {
        struct bench_result r;
        result_init(&r, cases[c].n);
        double free_ms = 0;
        for (size_t i = 0; i < cases[c].n; i++) {
            double at_ms = 10.0 * (double)(i + 1), start_ms = fmax(at_ms, free_ms);
            free_ms = start_ms + cases[c].service_ms;
            add(&r, at_ms / 1e3, 0, free_ms - at_ms, 1, 0, BENCH_COMPLETED);
        }
        bench_result_summarise(&r);
        if (r.steady.has_trend != cases[c].has_trend || r.steady.saturated != cases[c].saturated)
            fail_msg("case %zu: trend %d saturated %d", c, r.steady.has_trend, r.steady.saturated);
        bench_result_free(&r);
    }
}

/* --- objectives as text ----------------------------------------------------------------------- */

static void objectives(void **state)
{
    (void)state;
    struct bench_slo s = {.e2el_ms = 7};
    struct td_err err = {0};
    assert_int_equal(bench_slo_parse("ttft:2000 tpot:200.5", &s, &err), TD_OK);
    near(s.ttft_ms, 2000, "ttft");
    near(s.tpot_ms, 200.5, "tpot");
    near(s.e2el_ms, 7, "kept");
    assert_int_equal(
        bench_slo_parse("time_to_first_token:1 inter_token_latency:2 request_latency:3 tbt:4", &s,
                        &err),
        TD_OK);
    assert_true(s.ttft_ms == 1 && s.tpot_ms == 2 && s.e2el_ms == 3 && s.tbt_ms == 4);
    static const char *const bad[][2] = {{"ttft", "METRIC:MILLISECONDS"},
                                         {"itl:5", "'itl'"},
                                         {"ttft:0", "ttft"},
                                         {"ttft:-5", "'-5'"},
                                         {"tpot:nan", "tpot"},
                                         {"tpot:inf", "tpot"},
                                         {"ttft:", "ttft"},
                                         {"ttft:5ms", "'5ms'"},
                                         {":5", "''"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct bench_slo t = {0};
        assert_int_equal(bench_slo_parse(bad[i][0], &t, &err), TD_ERR_INVALID);
        if (!strstr(err.msg, bad[i][1]) || !strstr(err.msg, "--goodput"))
            fail_msg("%s: '%s'", bad[i][0], err.msg);
    }
    double target = 0;
    assert_int_equal(bench_slo_preset("mlperf-llama2-70b-interactive", &s, &target, &err), TD_OK);
    assert_true(s.ttft_ms == 450 && s.tpot_ms == 40 && target == 0.99);
    assert_int_equal(bench_slo_preset("mlperf", &s, &target, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "distserve-chat-175b")); /* all are named, the last too */
}

static void classes_as_text(void **state)
{
    (void)state;
    const struct bench_slo base = {.ttft_ms = 2000, .tpot_ms = 200};
    struct bench_class c[BENCH_MAX_CLASSES];
    size_t n = 0;
    struct td_err err = {0};
    assert_int_equal(bench_slo_classes("gold:ttft=450,weight=4 free", &base, c, &n, &err), TD_OK);
    assert_int_equal(n, 2);
    assert_string_equal(c[0].name, "gold");
    assert_true(c[0].slo.ttft_ms == 450 && c[0].slo.tpot_ms == 200 && c[0].weight == 4);
    assert_true(c[1].slo.ttft_ms == 2000 && c[1].weight == 1);
    static const char *const bad[][2] = {{"gold:ttft=0", "ttft"},
                                         {"gold:weight=-1", "weight"},
                                         {"gold:size=3", "'size'"},
                                         {"gold gold", "twice"},
                                         {":ttft=3", "name"},
                                         {"gold:ttft", "NAME=VALUE"},
                                         {"a b c d e f g h i j k l m n o p q", "more than 16"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(bench_slo_classes(bad[i][0], &base, c, &n, &err), TD_ERR_INVALID);
        if (!strstr(err.msg, bad[i][1]) || !strstr(err.msg, "--slo-class"))
            fail_msg("%s: '%s'", bad[i][0], err.msg);
    }
}

/* --- files ------------------------------------------------------------------------------------ */

static char *slurp(const char *path)
{
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    char *text = calloc(1, 1 << 20);
    assert_non_null(text);
    assert_true(fread(text, 1, (1 << 20) - 1, f) > 0);
    fclose(f);
    return text;
}

static void temp(char path[64])
{
    snprintf(path, 64, "/tmp/bench-result-XXXXXX");
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
}

/* What was read back writes the same bytes again: nothing of the file is lost or changed on the
 * way. */
static void written_and_read_back(void **state)
{
    (void)state;
    struct bench_result r, back;
    struct td_err err = {0};
    char a[64], b[64];
    temp(a);
    temp(b);
    for (int kind = 0; kind < 5; kind++) {
        one_of_each(&r);
        if (kind >= 3) { /* of a server that tells less, and one that tells what it can */
            snprintf(r.setup.backend, sizeof r.setup.backend, "openai");
            r.setup.plain_server = true;
            r.setup.n_prefill = r.setup.n_decode = r.setup.gpus = 0;
            for (size_t i = 0; i < r.n_requests; i++)
                r.requests[i].has_cached = kind == 4, r.requests[i].input_unknown = kind == 3;
        }
        if (kind == 1)
            r.load.request_rate = NAN, r.load.burstiness = NAN,
            snprintf(r.load.arrival, sizeof r.load.arrival, "trace"), r.load.block_tokens = 16;
        if (kind == 2) {
            r.load.request_rate = INFINITY;
            r.load.max_concurrency = 4;
            r.load.closed_loop = true;
            snprintf(r.load.arrival, sizeof r.load.arrival, "closed_loop");
            r.n_classes = 2;
            snprintf(r.classes[1].of.name, sizeof r.classes[1].of.name, "free");
            r.classes[1].of.weight = 2;
            r.requests[3].class_index = 1;
            r.load.n_tenants = 2;
        }
        r.requests[1].has_ledger = true;
        for (int s = 0; s < BENCH_N_STAGES; s++) r.requests[1].stages_us[s] = 100u + (unsigned)s;
        r.requests[1].predicted_ttft_us = 600;
        bench_result_summarise(&r);
        assert_int_equal(bench_result_write(&r, METRICS, false, a, &err), TD_OK);
        if (bench_result_read(a, &back, &err)) fail_msg("%s", err.msg);
        assert_true(back.total.input_unknown == (kind == 3) &&
                    back.total.has_cached == (kind == 4) && back.setup.plain_server == (kind >= 3));
        near(back.steady.joint.value, r.steady.joint.value, "joint");
        assert_int_equal(back.steady.joint.k, r.steady.joint.k);
        near(back.steady.ci95.lo, r.steady.ci95.lo, "ci");
        near(back.metric[BENCH_ITL].pct[1], r.metric[BENCH_ITL].pct[1], "p99 itl");
        assert_int_equal(back.n_pcts, 2);
        assert_int_equal(back.n_classes, r.n_classes);
        assert_int_equal(bench_result_write(&back, METRICS, false, b, &err), TD_OK);
        char *first = slurp(a), *second = slurp(b);
        assert_string_equal(first, second);
        free(first);
        free(second);
        bench_result_free(&back);
        bench_result_free(&r);
    }
    unlink(a);
    unlink(b);
}

static const char *const vllm_key_names[] = {"date",
                                             "backend",
                                             "label",
                                             "model_id",
                                             "tokenizer_id",
                                             "num_prompts",
                                             "request_rate",
                                             "burstiness",
                                             "max_concurrency",
                                             "duration",
                                             "completed",
                                             "failed",
                                             "total_input_tokens",
                                             "total_output_tokens",
                                             "request_throughput",
                                             "request_goodput",
                                             "output_throughput",
                                             "total_token_throughput",
                                             "max_output_tokens_per_s",
                                             "max_concurrent_requests",
                                             "mean_ttft_ms",
                                             "median_tpot_ms",
                                             "std_itl_ms",
                                             "p99_e2el_ms",
                                             "p50_ttft_ms",
                                             "input_lens",
                                             "output_lens",
                                             "ttfts",
                                             "itls",
                                             "latencies",
                                             "start_times",
                                             "queue_times",
                                             "errors",
                                             "pd",
                                             "team"};

static void vllm_keys(void **state)
{
    (void)state;
    static const char *const ours[] = {"definitions",
                                       "slo",
                                       "attainment",
                                       "steady",
                                       "rejected",
                                       "deflected",
                                       "wasted_prefill_tokens",
                                       "sched_lag_ms",
                                       "stages_ms",
                                       "per_class",
                                       "jain_index",
                                       "seed",
                                       "arrival",
                                       "topology",
                                       "build"};
    struct bench_result r;
    one_of_each(&r);
    for (int i = 0; i < 4; i++) add(&r, 10, 0, 5, 0, 0, i < 3 ? BENCH_REJECTED : BENCH_TIMED_OUT);
    add(&r, 10, 0, 5, 0, 0, BENCH_UNSENT); /* an interrupted run's: not offered, in no array */
    r.setup.metadata = strdup("team=a=b completed=99");
    bench_result_summarise(&r);
    json_t *o = bench_result_to_json(&r, METRICS, true);
    for (size_t i = 0; i < sizeof vllm_key_names / sizeof *vllm_key_names; i++)
        if (!json_object_get(o, vllm_key_names[i])) fail_msg("%s is missing", vllm_key_names[i]);
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        if (!json_object_get(json_object_get(o, "pd"), ours[i]))
            fail_msg("pd.%s is missing", ours[i]);
    assert_string_equal(json_string_value(json_object_get(o, "team")), "a=b");
    /* metadata replaces nothing */
    assert_int_equal(json_integer_value(json_object_get(o, "completed")), 7);
    const json_t *rejected = json_object_get(json_object_get(o, "pd"), "rejected");
    static const struct {
        const char *key;
        int n;
    } reasons[] = {{"429", 4}, {"deadline", 2}, {"error", 1}, {"unfinished", 1}};
    for (size_t i = 0; i < 4; i++)
        assert_int_equal(json_integer_value(json_object_get(rejected, reasons[i].key)),
                         reasons[i].n);
    assert_int_equal(json_integer_value(json_object_get(o, "failed")), 8);
    assert_int_equal(json_array_size(json_object_get(o, "errors")), 15);
    assert_int_equal(json_array_size(json_array_get(json_object_get(o, "itls"), 3)), 4);
    json_decref(o);
    bench_result_free(&r);
}

static void files_of_others(void **state)
{
    (void)state;
    struct bench_result r = {0};
    struct td_err err = {0};
    char path[64];
    temp(path);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs("{\"date\": \"20250101-000000\", \"backend\": \"vllm\", \"request_rate\": \"inf\", "
          "\"completed\": 10, \"failed\": 2, \"num_prompts\": 12, "
          "\"mean_ttft_ms\": 5, \"p99_ttft_ms\": 9.5, "
          "\"p99.9_ttft_ms\": 9.9, \"ttfts\": [0.1]}",
          f);
    fclose(f);
    if (bench_result_read(path, &r, &err)) fail_msg("%s", err.msg);
    assert_true(isinf(r.load.request_rate) && r.total.n_offered == 12 && r.n_pcts == 2 && r.valid);
    near(r.metric[BENCH_TTFT].pct[0], 9.5, "p99");
    near(r.metric[BENCH_TTFT].pct[1], 9.9, "p99.9");
    assert_true(isnan(r.steady.joint.value) && isnan(r.metric[BENCH_TPOT].mean));
    bench_result_free(&r);
    static const char *const bad[][2] = {{"[]", "no JSON object"},
                                         {"{\"duration\": 5}", "completed is missing"},
                                         {"{\"completed\": \"x\"}", "completed"},
                                         {"{\"completed\": -1}", "completed"},
                                         {"{\"completed\": 1, \"pd\": 3}", "pd"},
                                         {"{\"completed\": 1, \"pd\": {\"valid\": 3}}", "valid"},
                                         {"{", "line 1"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        f = fopen(path, "w");
        assert_non_null(f);
        fputs(bad[i][0], f);
        fclose(f);
        assert_int_equal(bench_result_read(path, &r, &err), TD_ERR_INVALID);
        if (!strstr(err.msg, bad[i][1]) || !strstr(err.msg, path))
            fail_msg("%s: '%s'", bad[i][0], err.msg);
    }
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(verdicts_and_window), cmocka_unit_test(cooldown_in_seconds),
        cmocka_unit_test(other_objectives),    cmocka_unit_test(late_generator_fails_the_run),
        cmocka_unit_test(closed_loop_clock),   cmocka_unit_test(peaks),
        cmocka_unit_test(classes_and_tenants), cmocka_unit_test(batches_widen_the_interval),
        cmocka_unit_test(saturation),          cmocka_unit_test(objectives),
        cmocka_unit_test(classes_as_text),     cmocka_unit_test(written_and_read_back),
        cmocka_unit_test(vllm_keys),           cmocka_unit_test(files_of_others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
