/* bench_sweep_test.c - the search against simulated clusters whose knee is known, settling,
 * verdict, and files read back. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/plot/figures.h"
#include "bench/plot/html.h"
#include "bench/plot/plot.h"
#include "bench/sweep/search.h"
#include "bench/sweep/sweep.h"
#include "common/base/random.h"

/* --- the search ------------------------------------------------------------------------------- */

/* A cluster that serves all up to its knee and then less and less: attainment(rate) = 1 / (1 +
 * (rate / knee)^steep / 9), which is 0.9 at the knee. */
struct model {
    double knee, steep;
    uint64_t n;         /* requests a run; 0: no chance, the bound is the share itself */
    double flaky_above; /* 0 = no: verification (seeds above 0) fails above this rate */
    uint32_t n_runs, n_verify, fail_run;
    double rates[256];
};

static td_status run(void *ctx, const char *phase, double rate, uint64_t seed, uint32_t left,
                     struct sweep_probe *ret, struct td_err *err)
{
    struct model *m = ctx;
    (void)left;
    assert_true(m->n_runs < 256);
    m->rates[m->n_runs++] = rate;
    m->n_verify += !strcmp(phase, "verify");
    if (m->n_runs == m->fail_run) return td_fail(err, TD_ERR_PEER, "gone");
    double share = 1 / (1 + pow(rate / m->knee, m->steep) / 9);
    if (m->flaky_above > 0 && seed > 0 && rate > m->flaky_above) share = 0.5;
    ret->n = m->n ? m->n : 1000000;
    if (m->n) {
        struct td_keyed rng = td_keyed_at(seed + 17, (uint32_t)(rate * 1000), 3);
        ret->n_good = 0;
        for (uint64_t i = 0; i < m->n; i++) ret->n_good += td_keyed_unit(&rng) < share;
        ret->lower = td_stats_wilson(ret->n_good, ret->n).lo;
    } else {
        ret->n_good = (uint64_t)(share * 1e6 + 0.5);
        ret->lower = share;
    }
    return TD_OK;
}

static const struct sweep_search_config usual = {.start_rate = 1,
                                                 .min_rate = 0.05,
                                                 .max_rate = 10000,
                                                 .tolerance = 0.02,
                                                 .attainment = 0.9,
                                                 .n_verify = 3,
                                                 .max_runs = 60};

static void finds_the_knee(void **state)
{
    (void)state;
    for (double knee = 0.07; knee < 5000; knee *= 3.1) {
        struct model m = {.knee = knee, .steep = 6};
        struct sweep_found f;
        assert_int_equal(sweep_search(&usual, run, &m, &f, NULL), TD_OK);
        if (f.rate > knee * (1 + 1e-6) || f.rate < knee / 1.0201)
            fail_msg("knee %g: found %g", knee, f.rate);
        assert_true(f.verified && f.n_steps_down == 0);
        assert_true(f.failed_rate > knee && f.failed_rate <= f.rate * 1.0201);
        /* doublings, bisections of a factor of 2 to 2 %, and the verification */
        assert_true(f.n_runs == m.n_runs && f.n_runs <= ceil(fabs(log2(knee))) + 2 + 6 + 3);
    }
}

/* With chance among 400 requests a run the bound is below the share: the found rate is on the
 * safe side, never above the knee by more than the tolerance. */
static void chance_is_on_the_safe_side(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 20; seed++) {
        struct model m = {.knee = 12, .steep = 6, .n = 400};
        struct sweep_search_config c = usual;
        struct sweep_found f;
        c.seed = seed * 100;
        assert_int_equal(sweep_search(&c, run, &m, &f, NULL), TD_OK);
        if (!(f.rate > 8 && f.rate <= 12 * 1.02))
            fail_msg("seed %llu: found %g", (unsigned long long)seed, f.rate);
    }
}

static void steps_down(void **state)
{
    (void)state;
    struct model m = {.knee = 40, .steep = 8, .flaky_above = 33};
    struct sweep_found f;
    assert_int_equal(sweep_search(&usual, run, &m, &f, NULL), TD_OK);
    assert_true(f.verified && f.n_steps_down >= 2);
    assert_true(f.rate <= 33 && f.rate > 33 * 0.8);
    assert_true(f.failed_rate > f.rate && f.failed_rate < 40);
}

static void bounds(void **state)
{
    (void)state;
    struct sweep_found f;
    struct model never = {.knee = 0.001, .steep = 6};
    assert_int_equal(sweep_search(&usual, run, &never, &f, NULL), TD_OK);
    assert_true(f.rate == 0 && !f.verified && f.n_runs <= 7 &&
                never.rates[f.n_runs - 1] == usual.min_rate);
    struct model always = {.knee = 1e9, .steep = 6};
    struct sweep_search_config c = usual;
    c.max_rate = 100;
    assert_int_equal(sweep_search(&c, run, &always, &f, NULL), TD_OK);
    assert_true(f.rate == 100 && f.failed_rate == 0 && f.verified && f.n_runs == 8 + 3);
    struct model m = {.knee = 700, .steep = 6};
    for (uint32_t budget = 1; budget < 24; budget++) {
        c = usual;
        c.max_runs = budget;
        m.n_runs = 0;
        assert_int_equal(sweep_search(&c, run, &m, &f, NULL), TD_OK);
        assert_true(m.n_runs <= budget && f.n_runs == m.n_runs);
        assert_true(f.rate <= 700);
        assert_true(!f.verified || m.n_runs >= 3);
    }
    struct model breaks = {.knee = 10, .steep = 6, .fail_run = 6};
    struct td_err err = {0};
    assert_int_equal(sweep_search(&usual, run, &breaks, &f, &err), TD_ERR_PEER);
    assert_string_equal(err.msg, "gone");
    assert_true(f.n_runs == 6 && f.rate == 8 && !f.verified);
}

/* --- rows, verdict, files --------------------------------------------------------------------- */

static void add(struct sweep *s, uint32_t config, const char *phase, double rate, double n,
                double good, double ttft, double tpot)
{
    struct sweep_row *r = sweep_row_add(s);
    assert_non_null(r);
    r->config = config;
    snprintf(r->phase, sizeof r->phase, "%s", phase);
    struct td_stats_interval w = td_stats_wilson((uint64_t)good, (uint64_t)n);
    r->rate = r->steady.offered_rate = rate, r->seed = 1,
    r->count.offered = r->count.completed = r->steady.n = n, r->steady.n_good = good,
    r->steady.attainment = good / n;
    r->steady.ci95_lo = w.lo, r->steady.ci95_hi = w.hi, r->steady.attainment_ttft = ttft,
    r->steady.attainment_tpot = tpot, r->steady.goodput = rate * good / n,
    r->steady.per_gpu_goodput = r->steady.goodput / 2;
    r->ttft.p50_ms = 20, r->ttft.p90_ms = 45, r->ttft.p99_ms = 80, r->tpot.p50_ms = 4,
    r->tpot.p90_ms = 6, r->tpot.p99_ms = 30, r->itl.p50_ms = 4, r->itl.p99_ms = 60;
    r->count.rejected = r->count.failed = r->count.timed_out = r->count.unfinished = 0,
    r->steady.saturated = 0, r->run.valid = 1;
    for (int k = 0; k < BENCH_N_STAGES; k++) r->stages_ms[k] = k == BENCH_PREFILL_QUEUE ? 30 : 1;
}

static struct sweep two_configs(void)
{
    struct sweep s = {.title = "a <title> & more",
                      .date = "2026-01-01",
                      .model = "m",
                      .attainment = 0.9,
                      .slo = {.ttft_ms = 100, .tpot_ms = 10},
                      .n_configs = 2,
                      .n_scales = 2,
                      .scales = {0.5, 1},
                      .grid = true};
    s.configs[0] = (struct sweep_config){
        .name = "pd 1:1", .mode = "pd", .prefill = 1, .decode = 1, .gpus = 2, .goodput = NAN};
    s.configs[1] = (struct sweep_config){
        .name = "colocated 0:2", .mode = "colocated", .decode = 2, .gpus = 2, .goodput = NAN};
    add(&s, 0, "grid", 2, 1000, 1000, 1, 1);
    add(&s, 0, "grid", 4, 1000, 950, 0.96, 0.99);
    add(&s, 0, "grid", 8, 1000, 300, 0.3, 0.99);
    add(&s, 1, "grid", 2, 1000, 990, 1, 0.99);
    add(&s, 1, "grid", 4, 1000, 500, 0.99, 0.5);
    return s;
}

static char *verdict_of(const struct sweep *s)
{
    char *text = NULL;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    assert_non_null(f);
    sweep_verdict(s, f);
    fclose(f);
    return text;
}

static void assert_says(const char *text, const char *what)
{
    if (!strstr(text, what)) fail_msg("\"%s\" is not in:\n%s", what, text);
}

static void verdicts(void **state)
{
    (void)state;
    struct sweep s = two_configs();
    sweep_settle(&s);
    assert_true(s.configs[0].goodput == 4 && s.configs[0].failed_rate == 8 &&
                s.configs[1].goodput == 2 && s.configs[1].failed_rate == 4);
    assert_int_equal(sweep_leader(&s), 0);
    assert_true(sweep_has_winner(&s));
    char *text = verdict_of(&s);
    assert_says(text, "pd 1:1 sustains 4 requests/s (2 per worker) with at least 90 % of the "
                      "requests within TTFT 100 ms, TPOT 10 ms");
    assert_says(text, "colocated 0:2 stops earlier: at 4 requests/s 50 % met both, TTFT came too "
                      "late for 1 %, TPOT for 50 %. TPOT is what fails");
    assert_says(text, "pd 1:1 itself has its limit here: at 8 requests/s 30 % met both");
    assert_says(
        text, "TTFT is what fails: p90 is 45 ms. Of a mean TTFT of 34 ms, 88 % is prefill_queue.");
    free(text);
    /* colocated was seen to fail where pd passed: that is a difference. */
    assert_says(
        (text = verdict_of(&s)),
        "pd 1:1 won: 2.00 times the goodput per worker of the next, colocated 0:2 (2 requests/s).");
    free(text);
    s.configs[1].failed_rate = 4.5; /* it might have passed at 4, too */
    assert_says((text = verdict_of(&s)), "No clear winner: colocated 0:2 has 1 per worker");
    assert_null(strstr(text, "won"));
    free(text);
    s.configs[1].goodput = 0;
    assert_says((text = verdict_of(&s)), "colocated 0:2 meets no rate that was run");
    assert_null(strstr(text, "winner"));
    free(text);
    sweep_free(&s);
}

/* 30 of 30 requests prove no 90 %: that is said, and not that the configuration missed. */
static void too_few_requests_are_called_that(void **state)
{
    (void)state;
    struct sweep s = two_configs();
    sweep_free(&s);
    s = (struct sweep){
        .attainment = 0.9, .slo = {.ttft_ms = 100, .tpot_ms = 10}, .n_configs = 2, .grid = true};
    s.configs[0] = (struct sweep_config){
        .name = "pd 1:1", .mode = "pd", .prefill = 1, .decode = 1, .gpus = 2, .goodput = NAN};
    s.configs[1] = (struct sweep_config){
        .name = "colocated 0:2", .mode = "colocated", .decode = 2, .gpus = 2, .goodput = NAN};
    add(&s, 0, "grid", 3, 30, 30, 1, 1);
    add(&s, 0, "grid", 6, 30, 20, 0.7, 1);
    add(&s, 1, "grid", 3, 30, 15, 0.5, 1);
    sweep_settle(&s);
    char *text = verdict_of(&s);
    assert_says(text, "No configuration is proven to meet TTFT 100 ms, TPOT 10 ms for 90 % of its "
                      "requests at any rate that was run. Some did in "
                      "what was measured, of too few requests");
    assert_says(text, "pd 1:1 may do more than is proven: at 3 requests/s 100 % met both, of too "
                      "few requests: the 95 % interval begins at 88.6 %.");
    assert_says(text, "pd 1:1 missed here: at 6 requests/s 67 % met both");
    assert_says(text, "colocated 0:2 meets no rate that was run: at 3 requests/s 50 % met both");
    free(text);
    sweep_free(&s);
}

/* A search that found 2 and at 4 had 94 % of too few requests: it did not meet "every rate that
 * was run", nor did it fail one. */
static void a_search_that_ends_unproven_says_so(void **state)
{
    (void)state;
    struct sweep s = two_configs();
    sweep_free(&s);
    s = (struct sweep){.attainment = 0.9, .slo = {.ttft_ms = 100, .tpot_ms = 10}, .n_configs = 2};
    s.configs[0] = (struct sweep_config){.name = "pd 1:1",
                                         .mode = "pd",
                                         .prefill = 1,
                                         .decode = 1,
                                         .gpus = 2,
                                         .goodput = 2,
                                         .searched = true};
    s.configs[1] = (struct sweep_config){.name = "colocated 0:2",
                                         .mode = "colocated",
                                         .decode = 2,
                                         .gpus = 2,
                                         .goodput = 2,
                                         .searched = true};
    for (uint32_t c = 0; c < 2; c++) add(&s, c, "verify", 2, 1000, 1000, 1, 1);
    add(&s, 0, "bracket", 4, 50, 47, 0.94, 1);
    sweep_settle(&s);
    char *text = verdict_of(&s);
    assert_says(text, "pd 1:1 may do more than is proven: at 4 requests/s 94 % met both");
    assert_null(strstr(text, "pd 1:1 met the objectives at every rate"));
    assert_says(text,
                "colocated 0:2 met the objectives at every rate that was run, up to 2 requests/s.");
    free(text);
    add(&s, 0, "bracket", 5, 1000, 500, 0.5, 1); /* one that failed says more */
    sweep_settle(&s);
    assert_null(strstr((text = verdict_of(&s)), "may do more than is proven"));
    free(text);
    sweep_free(&s);
}

/* Runs of one rate are one point; a run that is not valid is none. */
static void pooling(void **state)
{
    (void)state;
    struct sweep s = two_configs();
    struct sweep_pool p[8];
    add(&s, 0, "verify", 4, 1000, 890, 0.9, 0.99);
    add(&s, 0, "verify", 4, 1000, 0, 0, 0);
    s.rows[s.n_rows - 1].run.valid = 0;
    add(&s, 0, "throughput", 50, 1000, 0, 0, 0);
    assert_int_equal(sweep_pool(&s, 0, p, 8), 3);
    assert_true(p[1].rate == 4 && p[1].n_runs == 2 && fabs(p[1].joint - 0.92) < 1e-12 &&
                p[1].least == 0.89 && p[1].greatest == 0.95);
    assert_true(fabs(p[1].lo - td_stats_wilson(1840, 2000).lo) < 1e-12);
    add(&s, 0, "verify", 4, 1000, 1000, 1, 1); /* three runs further apart than chance: their
                                                  spread is the interval */
    assert_int_equal(sweep_pool(&s, 0, p, 8), 3);
    assert_true(p[1].n_runs == 3 && p[1].lo < td_stats_wilson(2840, 3000).lo - 0.05);
    sweep_free(&s);
}

static void same_sweep(const struct sweep *t, const struct sweep *s, bool is_json)
{
    assert_true(t->n_rows == s->n_rows && t->n_configs == 2 && t->attainment == 0.9 &&
                t->slo.ttft_ms == 100);
    assert_string_equal(t->configs[1].name, "colocated 0:2");
    assert_true(t->configs[0].goodput == 4 && t->configs[1].goodput == 2 &&
                t->configs[0].gpus == 2);
    for (size_t i = 0; i < s->n_rows; i++) {
        assert_true(t->rows[i].config == s->rows[i].config && t->rows[i].rate == s->rows[i].rate &&
                    fabs(t->rows[i].steady.ci95_lo - s->rows[i].steady.ci95_lo) < 1e-8);
        assert_true(t->rows[i].stages_ms[BENCH_PREFILL_QUEUE] == 30 &&
                    isnan(t->rows[i].run.load1) && t->rows[i].run.valid == 1);
        assert_string_equal(t->rows[i].phase, "grid");
    }
    if (is_json) {
        assert_non_null(t->rows[1].ttft_q);
        assert_true(t->rows[1].ttft_q[5] == 6 && isnan(t->rows[1].ttft_q[95]) &&
                    t->rows[1].scale_joint[1] == 0.75 && t->rows[1].n_points == 1 &&
                    t->rows[1].points[0].observed_ms == 3);
        assert_null(t->rows[0].ttft_q);
    }
}

static void bad_files_are_refused(const char *dir)
{
    char path[64];
    struct sweep t = {0};
    struct td_err err;
    static const struct {
        const char *text, *error;
    } bad[] = {
        {"", "is empty"},
        {"a,b\n1,2\n", "must be config"},
        {"config,rate\npd,1,2\n", "line 2: has 3 cells, the first line 2"},
        {"config,rate\npd,fast\n", "line 2: rate is \"fast\""},
        {"config,rate\npd,0\n", "line 2: rate is 0, must be in"},
        {"config,rate\n", "has no row"},
        {"{}", "must have sweep, configs and rows"},
        {"{", "bad"},
        {"{\"sweep\":{},\"configs\":[],\"rows\":[{\"config\":\"x\",\"rate\":1}]}",
         "\"x\" is not among configs"},
        {"{\"sweep\":{},\"configs\":[{\"name\":\"x\",\"gpus\":-1}],\"rows\":[]}", "gpus"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(path, sizeof path, "%s/bad", dir);
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        fputs(bad[i].text, f);
        fclose(f);
        err = (struct td_err){0};
        assert_true(sweep_read(path, &t, &err) != TD_OK);
        if (strcmp(bad[i].error, "bad") != 0) assert_says(err.msg, bad[i].error);
        assert_says(err.msg, "/bad");
    }
    unlink(path);
}

/* Removes what was drawn into dir, and dir: it must be all there. */
static void all_was_drawn(const char *dir)
{
    char path[64];
    static const char *const plots[] = {"attainment",        "goodput",
                                        "attainment-pd-1-1", "attainment-colocated-0-2",
                                        "attainment-pd-2-1", "stages",
                                        "ttft-cdf",          "slo-scale",
                                        "predicted",         "goodput-shape-pd"},
                             *const ends[] = {"svg", "csv", "png"};
    for (size_t i = 0; i < sizeof plots / sizeof *plots; i++)
        for (size_t k = 0; k < 3; k++) {
            snprintf(path, sizeof path, "%s/%s.%s", dir, plots[i], ends[k]);
            if (unlink(path) && k < 2) fail_msg("%s was not written", path);
        }
    snprintf(path, sizeof path, "%s/report.html", dir);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(dir), 0);
}

static void read_back(void **state)
{
    (void)state;
    char dir[] = "/tmp/bench_sweep_test-XXXXXX", path[64];
    struct td_err err = {0};
    assert_non_null(mkdtemp(dir));
    struct sweep s = two_configs(), t = {0};
    sweep_settle(&s);
    s.rows[1].ttft_q = calloc(SWEEP_N_QUANTILES, sizeof(double));
    s.rows[1].scale_joint = calloc(2, sizeof(double));
    s.rows[1].points = calloc(SWEEP_MAX_POINTS, sizeof(struct sweep_point));
    assert_true(s.rows[1].ttft_q && s.rows[1].scale_joint && s.rows[1].points);
    for (int i = 0; i < SWEEP_N_QUANTILES; i++) s.rows[1].ttft_q[i] = i < 90 ? i + 1 : NAN;
    s.rows[1].scale_joint[1] = 0.75;
    s.rows[1].points[s.rows[1].n_points++] = (struct sweep_point){2, 3};
    static const char *const names[] = {"sweep.json", "sweep.csv"};
    for (int k = 0; k < 2; k++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[k]);
        assert_int_equal(k ? sweep_csv_write(&s, path, &err) : sweep_json_write(&s, path, &err),
                         TD_OK);
        assert_int_equal(sweep_read(path, &t, &err), TD_OK);
        same_sweep(&t, &s, k == 0);
        if (k == 1) { /* a third shape makes goodput over P:D a figure: 2:1 beside 1:1 */
            t.configs[1] = (struct sweep_config){
                .name = "pd 2:1", .mode = "pd", .prefill = 2, .decode = 1, .gpus = 3, .goodput = 6};
        }
        assert_int_equal(plot_all(&t, dir, NULL, &err), TD_OK);
        sweep_free(&t);
        unlink(path);
    }
    sweep_free(&s);
    bad_files_are_refused(dir);
    all_was_drawn(dir);
}

static int count_of(const char *text, const char *what)
{
    int n = 0;
    for (; (text = strstr(text, what)); text += strlen(what)) n++;
    return n;
}

/* A name from a file reaches gnuplot as text: it ends no string, starts no command, and is in
 * the picture as it is. */
static void names_are_text_to_gnuplot(void **state)
{
    (void)state;
    char dir[] = "/tmp/tandem-plot-XXXXXX", path[200], flag[80];
    assert_non_null(mkdtemp(dir));
    snprintf(flag, sizeof flag, "%s/ran", dir);
    struct sweep s = two_configs();
    struct td_err err = {0};
    snprintf(s.configs[0].name, sizeof s.configs[0].name, "x'`>%s`\"$(>%s)", flag, flag);
    snprintf(s.configs[1].name, sizeof s.configs[1].name, "it's <b> %%d _{2}\n! true");
    sweep_settle(&s);
    if (plot_all(&s, dir, NULL, &err)) fail_msg("%s", err.msg);
    assert_int_equal(access(flag, F_OK), -1);
    snprintf(path, sizeof path, "%s/attainment.svg", dir);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    char text[65536] = "";
    assert_true(fread(text, 1, sizeof text - 1, f) > 1000);
    fclose(f);
    assert_says(text, "it's &lt;b> %d _{2}?! true");
    /* On a dark page the pictures' dark letters stand on paper of their own. */
    snprintf(path, sizeof path, "%s/report.html", dir);
    assert_non_null(f = fopen(path, "r"));
    char *page = NULL;
    size_t room = 0;
    assert_true(getdelim(&page, &room, 0, f) > 1000);
    fclose(f);
    assert_true(count_of(page, "<svg") > 1);
    assert_int_equal(count_of(page, "<svg"),
                     count_of(page, "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>"));
    free(page);
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        snprintf(path, sizeof path, "%s/%.100s", dir, e->d_name);
        if (e->d_name[0] != '.') assert_int_equal(unlink(path), 0);
    }
    closedir(d);
    assert_int_equal(rmdir(dir), 0);
    sweep_free(&s);
}

/* --- what the report says --------------------------------------------------------------------- */

static struct figure *figures_of(const struct sweep *s, size_t *ret_n)
{
    struct figure *f = calloc(FIGURES_MAX, sizeof *f);
    assert_non_null(f);
    *ret_n = figures_make(s, f);
    return f;
}

static void figures_done(struct figure *f, size_t n)
{
    for (size_t i = 0; i < n; i++) figure_free(&f[i]);
    free(f);
}

static const struct figure *figure_named(const struct figure *f, size_t n, const char *id)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(f[i].id, id)) return &f[i];
    fail_msg("there is no figure %s", id);
    return NULL;
}

static char *page_of(const struct sweep *s)
{
    char *text = NULL;
    size_t room, n;
    struct figure *f = figures_of(s, &n);
    FILE *out = open_memstream(&text, &room);
    assert_non_null(out);
    html_write(s, f, n, out);
    fclose(out);
    figures_done(f, n);
    return text;
}

/* A winner is named, and set in bold, when the others were seen to miss at no more load; with no
 * clear winner no row is bold, and that is what the first line says. */
static void bold_is_for_a_clear_winner(void **state)
{
    (void)state;
    struct sweep s = two_configs();
    sweep_settle(&s);
    char *page = page_of(&s);
    assert_int_equal(count_of(page, "<tr class=\"best\">"), 1);
    assert_says(page, "<tr class=\"best\"><td>pd 1:1");
    assert_null(strstr(page, "No clear winner"));
    free(page);
    /* 17 of 20 at the same load: it may have met 90 %. */
    s.rows[4].steady.n = 20, s.rows[4].steady.n_good = 17;
    s.rows[4].steady.attainment = 0.85, s.rows[4].steady.ci95_lo = 0.64;
    s.rows[4].steady.ci95_hi = 0.95;
    assert_false(sweep_has_winner(&s));
    page = page_of(&s);
    assert_int_equal(count_of(page, "class=\"best\""), 0);
    assert_says(page, "aria-label=\"Verdict\">\n<p>No clear winner: colocated 0:2 has 1 per worker "
                      "and pd 1:1 2, and nothing that was run tells the two apart");
    assert_null(strstr(page, " won:"));
    free(page);
    /* All that was run of the other was thrown out. */
    s.rows[3].run.valid = s.rows[4].run.valid = 0;
    s.configs[1].goodput = NAN;
    assert_false(sweep_has_winner(&s));
    page = page_of(&s);
    assert_says(page, "<p>No clear winner: colocated 0:2 was not measured.</p>");
    assert_says(page, "<td>run, not measured</td>");
    assert_int_equal(count_of(page, "class=\"best\""), 0);
    free(page);
    s.n_configs = 1; /* alone it has nobody to win against */
    s.n_rows = 3;
    assert_false(sweep_has_winner(&s));
    sweep_free(&s);
}

/* A rate of which no run counts is told as that: in the verdict, among the runs, in the picture. */
static void what_was_thrown_out_is_told(void **state)
{
    (void)state;
    struct sweep s = two_configs();
    struct sweep_lost lost[4];
    size_t n;
    for (int i = 0; i < 2; i++) {
        add(&s, 0, "grid", 80, 1000, 10, 0.1, 0.1);
        s.rows[s.n_rows - 1].run.valid = 0;
        s.rows[s.n_rows - 1].run.late = 1;
        s.rows[s.n_rows - 1].run.sched_lag_p99_ms = 12 + i;
    }
    add(&s, 0, "grid", 6, 1000, 0, 0, 0);
    s.rows[s.n_rows - 1].run.valid = 0, s.rows[s.n_rows - 1].run.late = 0;
    add(&s, 0, "grid", 4, 1000, 0, 0, 0); /* repeated: 4/s is measured */
    s.rows[s.n_rows - 1].run.valid = 0, s.rows[s.n_rows - 1].run.late = 1;
    sweep_settle(&s);
    assert_int_equal(sweep_lost(&s, 0, lost, 4), 2);
    assert_true(lost[0].rate == 6 && lost[0].n_runs == 1 && lost[1].rate == 80 &&
                lost[1].n_runs == 2 && lost[1].lag_ms == 12);
    assert_int_equal(sweep_lost(&s, 0, lost, 1), 1);
    assert_int_equal(sweep_lost(&s, 1, lost, 4), 0);
    char *page = page_of(&s);
    assert_says(page, "<p>pd 1:1 at 6/s: not measured, interrupted; 80/s: not measured, generator "
                      "late (p99 12 ms).</p>");
    assert_says(page, "not counted: generator late (p99 13 ms)");
    assert_says(page, "not counted: interrupted");
    assert_says(page, "4 of 9 runs are not valid");
    free(page);
    struct figure *f = figures_of(&s, &n);
    const struct figure *a = figure_named(f, n, "attainment");
    /* a cross at 40/s and worker; no line passes there; the axis reaches that far */
    for (int i = 0; i < 2; i++) {
        const struct figure *g = i ? figure_named(f, n, "goodput") : a;
        assert_says(g->script, "set label '×' at first 40,graph 0.04");
        assert_says(g->script, "set xrange [0:40]");
        assert_says(g->caption, "run, but not measured");
    }
    assert_says(a->script, " \n\n4 0.3 "); /* a gap where 6/s was not measured */
    assert_says(a->csv, "pd 1:1,80,40,0,nan");
    assert_null(strstr(figure_named(f, n, "attainment-colocated-0-2")->script, "×"));
    figures_done(f, n);
    sweep_free(&s);
}

/* Configurations are compared at one load per worker; one that has no run there is left out, and
 * the page says which. */
static void equal_loads_are_compared(void **state)
{
    (void)state;
    struct sweep s = two_configs();
    s.configs[1].gpus = 4; /* its 2 and 4 are 0.5 and 1 per worker, the other's 1, 2 and 4 */
    sweep_settle(&s);
    assert_true(s.configs[0].goodput == 4);
    /* The leader's goodput is 2 per worker, but both were measured at 1 alone. */
    assert_true(sweep_reference_rate(&s) == 1);
    assert_true(sweep_reference_row(&s, 0)->rate == 2 && sweep_reference_row(&s, 1)->rate == 4);
    s.rows[0].run.valid = 0; /* now no load is that of both */
    assert_true(sweep_reference_rate(&s) == 2);
    assert_true(sweep_reference_row(&s, 0)->rate == 4);
    assert_null(sweep_reference_row(&s, 1));
    size_t n;
    struct figure *f = figures_of(&s, &n);
    const struct figure *stages = figure_named(f, n, "stages");
    assert_says(stages->caption, "Not measured at this load: colocated 0:2.");
    assert_null(strstr(stages->script, "'colocated 0:2'"));
    figures_done(f, n);
    char *text = verdict_of(&s);
    assert_says(text, "at 8 requests/s (4 per worker) 30 % met both");
    free(text);
    s.rows[0].run.valid = 1;
    s.rows[3].rate = 2.1; /* 0.525 beside 0.5 ... */
    s.rows[4].rate = 4.3; /* and 1.075 beside 1 are the same load */
    assert_true(sweep_reference_row(&s, 1) == &s.rows[4]);
    s.rows[4].rate = 4.5;
    assert_null(sweep_reference_row(&s, 1));
    sweep_free(&s);
}

/* Axes begin and end where the curves and their intervals do. */
static void axes_show_where_the_curves_are(void **state)
{
    (void)state;
    struct sweep s = two_configs();
    size_t n;
    s.n_rows = 0;
    for (int i = 0; i < 4; i++) {
        add(&s, 0, "grid", 200 + 10 * i, 1000, 1000 - 10 * i, 1, 1 - 0.01 * i);
        add(&s, 1, "grid", 20 + 10 * i, 1000, 1000 - 300 * i, 1, 1 - 0.3 * i);
    }
    sweep_settle(&s);
    struct figure *f = figures_of(&s, &n);
    const char *both = figure_named(f, n, "attainment")->script,
               *high = figure_named(f, n, "attainment-pd-1-1")->script,
               *low = figure_named(f, n, "attainment-colocated-0-2")->script;
    assert_says(both, "set xrange [0:120]");
    assert_says(both, "set yrange [0:103]");
    assert_says(high, "set xrange [95:120]");    /* 100 to 115 per worker, */
    assert_says(high, "set yrange [88:100.36]"); /* 97 % and more, the target at 90 % */
    assert_says(low, "set xrange [5:30]");
    assert_says(low, "set yrange [0:103]");
    /* Every line of shares and of goodput has its interval. */
    assert_says(both, "($4-$3)*100) notitle with vectors");
    assert_says(high, "$d1 using 1:($3*100):($4*100) notitle with filledcurves");
    assert_says(high, "$d2 using 1:($3*100):($4*100) notitle with filledcurves");
    const struct figure *good = figure_named(f, n, "goodput");
    assert_says(good->script, "1:3:(0):($4-$3) notitle with vectors");
    assert_says(good->csv, "saturated,ci95_lo,ci95_hi\n");
    figures_done(f, n);
    sweep_free(&s);
}

static void distributions_have_intervals(void **state)
{
    (void)state;
    struct sweep s = two_configs();
    size_t n;
    s.rows[1].ttft_q = calloc(SWEEP_N_QUANTILES, sizeof(double));
    s.rows[1].scale_joint = calloc(2, sizeof(double));
    assert_true(s.rows[1].ttft_q && s.rows[1].scale_joint);
    for (int i = 0; i < SWEEP_N_QUANTILES; i++) s.rows[1].ttft_q[i] = i < 90 ? 40 + i : NAN;
    s.rows[1].scale_joint[0] = 0.5, s.rows[1].scale_joint[1] = 0.75;
    s.configs[1].gpus = 1; /* so that 4/s is 2 per worker, and 2/s of the other is, too */
    sweep_settle(&s);
    struct figure *f = figures_of(&s, &n);
    assert_says(figure_named(f, n, "ttft-cdf")->script, "1:($3*100):($4*100) notitle with filled");
    assert_says(figure_named(f, n, "ttft-cdf")->script, "set xrange [0:150]");
    struct td_stats_interval w = td_stats_wilson(500, 1000);
    char want[80];
    snprintf(want, sizeof want, "pd 1:1,4,0.5,0.5,%.6g,%.6g\n", w.lo, w.hi);
    assert_says(figure_named(f, n, "slo-scale")->csv, want);
    figures_done(f, n);
    sweep_free(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_the_knee),
        cmocka_unit_test(chance_is_on_the_safe_side),
        cmocka_unit_test(steps_down),
        cmocka_unit_test(bounds),
        cmocka_unit_test(verdicts),
        cmocka_unit_test(too_few_requests_are_called_that),
        cmocka_unit_test(a_search_that_ends_unproven_says_so),
        cmocka_unit_test(pooling),
        cmocka_unit_test(read_back),
        cmocka_unit_test(names_are_text_to_gnuplot),
        cmocka_unit_test(bold_is_for_a_clear_winner),
        cmocka_unit_test(what_was_thrown_out_is_told),
        cmocka_unit_test(equal_loads_are_compared),
        cmocka_unit_test(axes_show_where_the_curves_are),
        cmocka_unit_test(distributions_have_intervals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
