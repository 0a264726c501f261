/* compare.c - tandem bench compare A.json B.json: what differs, by how much, and whether repeats of
 * one run would differ as much.
 *
 * A side is one result of bench serve (or of vLLM's benchmark), several repeats of it with commas
 * between, or a sweep.json.
 *   shares     interval of the difference from the two intervals (Newcombe 1998)
 *   percentiles of single runs whose files have their intervals: the same, and above --spread:
 *   requests of one run do not tell how runs differ
 *   the rest   with 2 or more repeats on both sides Welch's t interval of the means; else only a
 *              rule of thumb: --spread, what repeats of whole benchmarks have been seen to
 *              differ by */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/sweep/sweep.h"
#include "common/base/options.h"
#include "common/base/say.h"

int td_bench_compare(int argc, char **argv);

#define MAX_REPEATS 64

struct options {
    double spread;
};
// clang-format off
static const struct td_option table[] = {
    {"spread", TD_OPT_F64, "15", 0, 1000, NULL, offsetof(struct options, spread),
     "percent: what repeats of one run differ by, where the files do not tell"},
    {0},
};
// clang-format on

struct side {
    char name[64];
    struct bench_result results[MAX_REPEATS];
    size_t n;
    struct sweep sweep;
    bool is_sweep;
};

static void side_free(struct side *s)
{
    for (size_t i = 0; i < s->n; i++) bench_result_free(&s->results[i]);
    sweep_free(&s->sweep);
}

static bool looks_like_sweep(const char *path)
{
    char head[256] = "";
    FILE *f = fopen(path, "re");
    if (!f) return false;
    size_t n = fread(head, 1, sizeof head - 1, f);
    fclose(f);
    head[n] = 0;
    return strstr(head, "\"sweep\"") || !strncmp(head, "config,", 7);
}

static td_status side_read(const char *files, const char *name, struct side *s, struct td_err *err)
{
    char copy[4096];
    if (strlen(files) >= sizeof copy)
        return td_fail(err, TD_ERR_LIMIT, "%s: more than %zu bytes of file names", name,
                       sizeof copy - 1);
    snprintf(copy, sizeof copy, "%s", files);
    snprintf(s->name, sizeof s->name, "%s", name);
    if (looks_like_sweep(files)) {
        s->is_sweep = true;
        return sweep_read(files, &s->sweep, err);
    }
    td_status st = TD_OK;
    for (char *rest = copy, *path; !st && (path = strsep(&rest, ","));) {
        if (s->n == MAX_REPEATS)
            return td_fail(err, TD_ERR_LIMIT, "%s: more than %d repeats", name, MAX_REPEATS);
        st = bench_result_read(path, &s->results[s->n], err);
        if (!st) s->n++;
    }
    return st;
}

/* --- the arithmetic --------------------------------------------------------------------------- */

static double student95(double df)
{
    static const double t[] = {12.706, 4.303, 3.182, 2.776, 2.571,
                               2.447,  2.365, 2.306, 2.262, 2.228};
    /* rounded down: wider */
    return df < 1 ? t[0] : df < 10 ? t[(int)df - 1] : df < 30 ? 2.228 : 2.042;
}

/* 95 % interval of mean(b) - mean(a), unequal variances; false with fewer than two values on a
 * side. */
static bool welch(const double *a, size_t na, const double *b, size_t nb,
                  struct td_stats_interval *ret)
{
    if (na < 2 || nb < 2) return false;
    /* of the means */
    double sa = td_stats_std(a, na), sb = td_stats_std(b, nb), va = sa * sa / (double)(na - 1),
           vb = sb * sb / (double)(nb - 1);
    double df = va + vb > 0 ? (va + vb) * (va + vb) /
                                  (va * va / (double)(na - 1) + vb * vb / (double)(nb - 1))
                            : 1e9,
           d = td_stats_mean(b, nb) - td_stats_mean(a, na);
    double half = student95(df) * sqrt(va + vb);
    *ret = (struct td_stats_interval){d - half, d + half};
    return true;
}

static struct td_stats_interval newcombe(double a, struct td_stats_interval ia, double b,
                                         struct td_stats_interval ib)
{
    double d = b - a;
    return (struct td_stats_interval){d - hypot(b - ib.lo, ia.hi - a),
                                      d + hypot(ib.hi - b, a - ia.lo)};
}

/* --- the table -------------------------------------------------------------------------------- */

struct tally {
    int n_clear, n_within;
};

static const char *judge(struct tally *t, bool clear)
{
    t->n_clear += clear;
    t->n_within += !clear;
    return clear ? "" : "within the spread";
}

static void share_row(const char *name, double a, struct td_stats_interval ia, double b,
                      struct td_stats_interval ib, struct tally *t)
{
    if (isnan(a) || isnan(b)) return;
    char interval[96] = "";
    if (!isnan(ia.lo) && !isnan(ib.lo)) {
        struct td_stats_interval d = newcombe(a, ia, b, ib);
        snprintf(interval, sizeof interval, "  [%+.2f, %+.2f] points  %s", 100 * d.lo, 100 * d.hi,
                 judge(t, d.lo > 0 || d.hi < 0));
    }
    td_say(stdout, 4, "%-34s %9.2f %9.2f %+9.2f%s\n", name, 100 * a, 100 * b, 100 * (b - a),
           interval);
}

static void value_row(const char *name, const double *a, size_t na, const double *b, size_t nb,
                      double spread, struct tally *t)
{
    double ma = td_stats_mean(a, na), mb = td_stats_mean(b, nb),
           percent = ma != 0 ? 100 * (mb - ma) / fabs(ma) : NAN;
    struct td_stats_interval d;
    if (isnan(ma) || isnan(mb)) return;
    char interval[64] = "";
    bool has_interval = welch(a, na, b, nb, &d);
    if (has_interval) snprintf(interval, sizeof interval, "  [%+.3g, %+.3g]", d.lo, d.hi);
    td_say(stdout, 4, "%-34s %9.4g %9.4g %+8.1f%%%s  %s\n", name, ma, mb, percent, interval,
           judge(t, has_interval ? d.lo > 0 || d.hi < 0 : fabs(percent) > spread));
}

static double pct_of(const struct bench_result *r, const struct bench_metric *m, double p)
{
    for (size_t i = 0; i < r->n_pcts; i++)
        if (r->pcts[i] == p) return m->pct[i];
    return NAN;
}

enum what { DURATION, THROUGHPUT, OUT_TOKENS, GOODPUT, STEADY, MEAN, MEDIAN, P99 };

static double value_of(const struct bench_result *r, enum what w, int metric)
{
    switch (w) {
    case DURATION:
        return r->rates.duration_s;
    case THROUGHPUT:
        return r->rates.request_throughput;
    case OUT_TOKENS:
        return r->rates.output_throughput;
    case GOODPUT:
        return r->rates.request_goodput;
    case STEADY:
        return r->steady.goodput;
    case MEAN:
        return r->metric[metric].mean;
    case MEDIAN:
        return r->metric[metric].median;
    case P99:
        return pct_of(r, &r->metric[metric], 99);
    }
    return NAN;
}

/* A percentile of one run on each side, with its intervals by order statistics. */
static bool bounded_row(const char *name, const struct bench_result *a,
                        const struct bench_result *b, int metric, double pct, double spread,
                        struct tally *t)
{
    for (size_t i = 0; i < a->n_pcts; i++)
        for (size_t k = 0; k < b->n_pcts; k++) {
            const struct bench_metric *x = &a->metric[metric], *y = &b->metric[metric];
            struct td_stats_interval ia = x->pct_ci95[i], ib = y->pct_ci95[k];
            if (a->pcts[i] != pct || b->pcts[k] != pct ||
                !isfinite(ia.lo + ia.hi + ib.lo + ib.hi) || !(ia.hi > 0) || !(ib.hi > 0))
                continue;
            struct td_stats_interval d = newcombe(x->pct[i], ia, y->pct[k], ib);
            double percent = 100 * (y->pct[k] / x->pct[i] - 1);
            td_say(stdout, 4, "%-34s %9.4g %9.4g %+8.1f%%  [%+.3g, %+.3g]  %s\n", name, x->pct[i],
                   y->pct[k], percent, d.lo, d.hi,
                   judge(t, (d.lo > 0 || d.hi < 0) && fabs(percent) > spread));
            return true;
        }
    return false;
}

static void result_row(const char *name, const struct side *a, const struct side *b, enum what w,
                       int metric, double spread, struct tally *t)
{
    double x[MAX_REPEATS], y[MAX_REPEATS];
    for (size_t i = 0; i < a->n; i++) x[i] = value_of(&a->results[i], w, metric);
    for (size_t i = 0; i < b->n; i++) y[i] = value_of(&b->results[i], w, metric);
    value_row(name, x, a->n, y, b->n, spread, t);
}

/* All repeats of a side together. */
static double joint_of(const struct side *s, struct td_stats_interval *ret)
{
    uint64_t k = 0, n = 0;
    *ret = s->results[0].steady.ci95;
    for (size_t i = 0; i < s->n; i++)
        k += s->results[i].steady.joint.k, n += s->results[i].steady.joint.n;
    if (s->n > 1) *ret = td_stats_wilson(k, n);
    return n ? (double)k / (double)n : NAN;
}

static void compare_results(const struct side *a, const struct side *b, double spread,
                            struct tally *t)
{
    static const char *const upper[] = {"TTFT", "TPOT", "ITL", "E2EL"};
    struct td_stats_interval ia, ib;
    char name[48];
    const struct bench_result *ra = &a->results[0], *rb = &b->results[0];
    double ja = joint_of(a, &ia), jb = joint_of(b, &ib);
    td_say(stdout, 4, "%-34s %9s %9s %10s  95 %% interval of the difference\n", "", "A", "B",
           "B - A");
    share_row("SLO attainment (%)", ja, ia, jb, ib, t);
    result_row("Steady goodput (req/s)", a, b, STEADY, 0, spread, t);
    result_row("Request goodput (req/s)", a, b, GOODPUT, 0, spread, t);
    result_row("Request throughput (req/s)", a, b, THROUGHPUT, 0, spread, t);
    result_row("Output token throughput (tok/s)", a, b, OUT_TOKENS, 0, spread, t);
    for (int m = 0; m < BENCH_N_METRICS; m++) {
        snprintf(name, sizeof name, "Mean %s (ms)", upper[m]);
        result_row(name, a, b, MEAN, m, spread, t);
        snprintf(name, sizeof name, "Median %s (ms)", upper[m]);
        if (a->n > 1 || b->n > 1 || !bounded_row(name, ra, rb, m, 50, spread, t))
            result_row(name, a, b, MEDIAN, m, spread, t);
        snprintf(name, sizeof name, "P99 %s (ms)", upper[m]);
        if (a->n > 1 || b->n > 1 || !bounded_row(name, ra, rb, m, 99, spread, t))
            result_row(name, a, b, P99, m, spread, t);
    }
    if (strcmp(ra->setup.model_id, rb->setup.model_id) != 0)
        td_say(stdout, 4, "warning: the models differ: A %s, B %s\n", ra->setup.model_id,
               rb->setup.model_id);
    if (!(ra->load.request_rate == rb->load.request_rate) &&
        !(isnan(ra->load.request_rate) && isnan(rb->load.request_rate)))
        td_say(stdout, 4, "warning: the rates differ: A %g, B %g requests/s\n",
               ra->load.request_rate, rb->load.request_rate);
    if (ra->slo.ttft_ms != rb->slo.ttft_ms || ra->slo.tpot_ms != rb->slo.tpot_ms)
        td_say(stdout, 4, "warning: the objectives differ\n");
    for (size_t i = 0; i < a->n; i++)
        if (!a->results[i].valid)
            td_say(stdout, 4, "warning: A, run %zu is not valid: %s\n", i + 1,
                   a->results[i].invalid_reason);
    for (size_t i = 0; i < b->n; i++)
        if (!b->results[i].valid)
            td_say(stdout, 4, "warning: B, run %zu is not valid: %s\n", i + 1,
                   b->results[i].invalid_reason);
}

static void compare_sweeps(const struct sweep *a, const struct sweep *b, double spread,
                           struct tally *t)
{
    static struct sweep_pool x[256], y[256];
    char name[96];
    size_t n_pairs = 0;
    td_say(stdout, 4, "%-34s %9s %9s %10s  95 %% interval of the difference\n", "", "A", "B",
           "B - A");
    for (uint32_t i = 0; i < a->n_configs; i++)
        for (uint32_t k = 0; k < b->n_configs; k++) {
            if (strcmp(a->configs[i].name, b->configs[k].name) != 0) continue;
            n_pairs++;
            td_say(stdout, 4, "%s\n", a->configs[i].name);
            if (a->configs[i].goodput > 0 || b->configs[k].goodput > 0)
                value_row("  goodput (req/s)", &a->configs[i].goodput, 1, &b->configs[k].goodput, 1,
                          spread, t);
            size_t nx = sweep_pool(a, i, x, 256), ny = sweep_pool(b, k, y, 256);
            for (size_t p = 0; p < nx; p++)
                for (size_t q = 0; q < ny; q++) {
                    if (x[p].rate != y[q].rate) continue;
                    snprintf(name, sizeof name, "  attainment at %.4g/s (%%)", x[p].rate);
                    share_row(name, x[p].joint, (struct td_stats_interval){x[p].lo, x[p].hi},
                              y[q].joint, (struct td_stats_interval){y[q].lo, y[q].hi}, t);
                }
        }
    if (n_pairs == 0) td_say(stdout, 4, "warning: no configuration stands in both files\n");
    if (a->slo.ttft_ms != b->slo.ttft_ms || a->slo.tpot_ms != b->slo.tpot_ms ||
        a->attainment != b->attainment)
        td_say(stdout, 4, "warning: the objectives differ\n");
    if (strcmp(a->machine, b->machine) != 0)
        td_say(stdout, 4, "warning: the machines differ: A %s, B %s\n", a->machine, b->machine);
}

int td_bench_compare(int argc, char **argv)
{
    static struct side a, b; /* large */
    struct options o = {0};
    struct td_err err = {0};
    const char *files[2];
    size_t n = 0;
    struct tally t = {0};
    td_status s = td_options_load(table, &o, "tandem bench compare",
                                  "Two results beside each other: tandem bench compare A.json "
                                  "B.json (A1.json,A2.json for repeats; or two sweep.json)",
                                  argc, argv, files, 2, &n, &err);
    if (!s && n != 2) s = td_fail(&err, TD_ERR_INVALID, "give two files: A.json B.json");
    if (!s) s = side_read(files[0], "A", &a, &err);
    if (!s) s = side_read(files[1], "B", &b, &err);
    if (!s && a.is_sweep != b.is_sweep)
        s = td_fail(&err, TD_ERR_INVALID, "%s is a sweep, the other file is not",
                    a.is_sweep ? files[0] : files[1]);
    if (!s) {
        td_say(stdout, 4, "A: %s\nB: %s\n\n", files[0], files[1]);
        if (a.is_sweep)
            compare_sweeps(&a.sweep, &b.sweep, o.spread, &t);
        else
            compare_results(&a, &b, o.spread, &t);
        if (t.n_within)
            td_say(
                stdout, 4,
                "\nwarning: %d of %d differences are within run-to-run spread: their interval "
                "holds 0%s. Do not read them as better or worse.\n",
                t.n_within, t.n_within + t.n_clear,
                a.n == 1 || b.n == 1 || a.is_sweep
                    ? ", or they are below --spread. Repeats (A1.json,A2.json,A3.json) would tell"
                    : "");
    }
    side_free(&a);
    side_free(&b);
    return s ? td_die("tandem bench compare", &err) : 0;
}
