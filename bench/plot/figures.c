/* figures.c - see figures.h. A configuration has the same colour and the same marker in every
 * picture. */
#include "bench/plot/figures.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/plot/chart.h"

#define MAX_POOLS 256
#define MAX_PANELS 12 /* of single configurations */

struct pages {
    const struct sweep *s;
    struct figure *figures;
    size_t n;
    struct sweep_pool (*pools)[MAX_POOLS]; /* of each configuration, by rate */
    size_t *n_pools;
};

/* A figure under work: its canvas and its CSV. */
struct draft {
    struct figure *f;
    FILE *csv;
    size_t csv_bytes;
};

void figure_free(struct figure *f)
{
    canvas_destroy(f->canvas);
    free(f->csv);
    *f = (struct figure){0};
}

static bool draft_open(struct pages *p, struct draft *d, int height, const char *id,
                       const char *title)
{
    if (p->n == FIGURES_MAX) return false;
    d->f = &p->figures[p->n];
    *d->f = (struct figure){.canvas = canvas_create(CHART_WIDTH, height)};
    snprintf(d->f->id, sizeof d->f->id, "%s", id);
    snprintf(d->f->title, sizeof d->f->title, "%s", title);
    d->csv = open_memstream(&d->f->csv, &d->csv_bytes);
    if (d->f->canvas && d->csv) return true;
    if (d->csv) fclose(d->csv);
    figure_free(d->f);
    return false;
}

static void draft_close(struct pages *p, struct draft *d)
{
    if (fclose(d->csv))
        figure_free(d->f); /* no memory for the numbers: no figure */
    else
        p->n++;
}

static const char *name_of(const struct pages *p, uint32_t c) { return p->s->configs[c].name; }
static double workers(const struct pages *p, uint32_t c)
{
    return p->s->configs[c].gpus ? p->s->configs[c].gpus : 1;
}
static int ink_of(uint32_t c) { return INK_SERIES + (int)c; }

static double margin(const struct pages *p, double least)
{
    for (uint32_t c = 0; c < p->s->n_configs; c++)
        least = fmax(least, canvas_text_width(name_of(p, c), 12) * 1.08 + 18);
    return fmin(least, 190);
}

static void slo_words(const struct sweep *s, char *text, size_t bytes)
{
    size_t n = 0;
    text[0] = 0;
    if (s->slo.ttft_ms > 0)
        n += (size_t)snprintf(text + n, bytes - n, "TTFT %.4g ms", s->slo.ttft_ms);
    if (s->slo.tpot_ms > 0)
        n += (size_t)snprintf(text + n, bytes - n, "%sTPOT %.4g ms", n ? ", " : "", s->slo.tpot_ms);
    if (s->slo.e2el_ms > 0)
        n += (size_t)snprintf(text + n, bytes - n, "%sE2EL %.4g ms", n ? ", " : "", s->slo.e2el_ms);
    if (s->slo.tbt_ms > 0)
        snprintf(text + n, bytes - n, "%sTBT %.4g ms", n ? ", " : "", s->slo.tbt_ms);
}

static double greatest_rate(const struct pages *p)
{
    double v = 0;
    for (uint32_t c = 0; c < p->s->n_configs; c++)
        if (p->n_pools[c]) v = fmax(v, p->pools[c][p->n_pools[c] - 1].rate / workers(p, c));
    return v;
}

static struct chart_axis share_axis(const char *label)
{
    return (struct chart_axis){.label = label, .min = 0, .max = 1, .percent = true};
}

/* --- attainment over rate --------------------------------------------------------------------- */

struct columns {
    double x[MAX_POOLS], offered[MAX_POOLS], joint[MAX_POOLS], ttft[MAX_POOLS], tpot[MAX_POOLS],
        lo[MAX_POOLS], hi[MAX_POOLS], good[MAX_POOLS];
};

static void columns_of(const struct pages *p, uint32_t c, struct columns *k)
{
    for (size_t i = 0; i < p->n_pools[c]; i++) {
        const struct sweep_pool *q = &p->pools[c][i];
        k->x[i] = q->rate / workers(p, c);
        k->offered[i] = q->offered_rate / workers(p, c);
        k->joint[i] = q->joint, k->ttft[i] = q->ttft, k->tpot[i] = q->tpot;
        k->lo[i] = q->lo, k->hi[i] = q->hi;
        k->good[i] = q->goodput / workers(p, c);
    }
}

static void target_line(struct chart *ch, const struct sweep *s)
{
    char text[40];
    snprintf(text, sizeof text, "target %.4g %%", 100 * s->attainment);
    if (s->attainment > 0) chart_limit_y(ch, s->attainment, text);
}

static void attainment(struct pages *p)
{
    struct draft d;
    struct chart ch;
    struct columns k;
    char slo[128], subtitle[200];
    if (!bench_slo_any(&p->s->slo) ||
        !draft_open(p, &d, CHART_HEIGHT, "attainment", "SLO attainment over rate"))
        return;
    slo_words(p->s, slo, sizeof slo);
    snprintf(subtitle, sizeof subtitle, "requests that met %s; bars: 95 %% interval", slo);
    snprintf(d.f->caption, sizeof d.f->caption,
             "Share of offered requests that met every objective, over the offered rate per "
             "worker. Goodput is where a line crosses the target; the "
             "bars are 95 %% intervals.");
    chart_open(&ch, d.f->canvas, "SLO attainment over rate", subtitle,
               chart_axis_linear("offered rate per worker (requests/s)", greatest_rate(p)),
               share_axis("requests within objectives"), margin(p, 92));
    target_line(&ch, p->s);
    fprintf(d.csv, "config,rate,rate_per_worker,runs,attainment,ci95_lo,ci95_hi,attainment_ttft,"
                   "attainment_tpot,least,greatest\n");
    for (uint32_t c = 0; c < p->s->n_configs; c++) {
        size_t n = p->n_pools[c];
        columns_of(p, c, &k);
        chart_bars(&ch, k.x, k.lo, k.hi, n, ink_of(c));
        chart_line(&ch, k.x, k.joint, n, ink_of(c), 2, DASH_NONE);
        chart_points(&ch, k.x, k.joint, n, (int)c, ink_of(c), 3.4, 1);
        if (n) chart_label(&ch, k.x[n - 1], k.joint[n - 1], ink_of(c), "%s", name_of(p, c));
        for (size_t i = 0; i < n; i++) {
            const struct sweep_pool *q = &p->pools[c][i];
            fprintf(d.csv, "%s,%.9g,%.9g,%u,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g\n", name_of(p, c),
                    q->rate, k.x[i], q->n_runs, q->joint, q->lo, q->hi, q->ttft, q->tpot, q->least,
                    q->greatest);
        }
    }
    chart_close(&ch);
    draft_close(p, &d);
}

static void attainment_parts(struct pages *p, uint32_t c)
{
    struct draft d;
    struct chart ch;
    struct columns k;
    char id[80], title[128], slo[128], subtitle[160];
    snprintf(id, sizeof id, "attainment-%s", name_of(p, c));
    for (char *q = id; *q; q++)
        if (!isalnum((unsigned char)*q)) *q = '-';
    snprintf(title, sizeof title, "%s: which objective is missed", name_of(p, c));
    if (p->n_pools[c] == 0 || !bench_slo_any(&p->s->slo) ||
        !draft_open(p, &d, CHART_HEIGHT, id, title))
        return;
    slo_words(p->s, slo, sizeof slo);
    snprintf(subtitle, sizeof subtitle, "%s", slo);
    snprintf(d.f->caption, sizeof d.f->caption,
             "%s: both objectives, and each alone. The line that falls first is the objective that "
             "limits this configuration; what was turned away "
             "misses both.",
             name_of(p, c));
    chart_open(&ch, d.f->canvas, title, subtitle,
               chart_axis_linear("offered rate per worker (requests/s)", greatest_rate(p)),
               share_axis("requests within objectives"), 92);
    target_line(&ch, p->s);
    columns_of(p, c, &k);
    size_t n = p->n_pools[c];
    if (p->s->slo.ttft_ms > 0) chart_line(&ch, k.x, k.ttft, n, INK_SERIES + 0, 4.5, DASH_NONE);
    if (p->s->slo.tpot_ms > 0) chart_line(&ch, k.x, k.tpot, n, INK_SERIES + 1, 3, DASH_LONG);
    chart_bars(&ch, k.x, k.lo, k.hi, n, INK_TEXT);
    /* thin, above the others: where they are the same all show */
    chart_line(&ch, k.x, k.joint, n, INK_TEXT, 1.6, DASH_NONE);
    chart_points(&ch, k.x, k.joint, n, 0, INK_TEXT, 2.8, 1);
    if (p->s->slo.ttft_ms > 0) chart_label(&ch, k.x[n - 1], k.ttft[n - 1], INK_SERIES + 0, "TTFT");
    if (p->s->slo.tpot_ms > 0) chart_label(&ch, k.x[n - 1], k.tpot[n - 1], INK_SERIES + 1, "TPOT");
    chart_label(&ch, k.x[n - 1], k.joint[n - 1], INK_TEXT, "joint");
    chart_close(&ch);
    fprintf(d.csv, "config,rate,rate_per_worker,joint,ttft,tpot,ci95_lo,ci95_hi\n");
    for (size_t i = 0; i < n; i++)
        fprintf(d.csv, "%s,%.9g,%.9g,%.6g,%.6g,%.6g,%.6g,%.6g\n", name_of(p, c),
                p->pools[c][i].rate, k.x[i], k.joint[i], k.ttft[i], k.tpot[i], k.lo[i], k.hi[i]);
    draft_close(p, &d);
}

/* --- goodput over load ------------------------------------------------------------------------ */

static void goodput(struct pages *p)
{
    struct draft d;
    struct chart ch;
    struct columns k;
    double top = 0, rate = 0;
    if (!bench_slo_any(&p->s->slo) ||
        !draft_open(p, &d, CHART_HEIGHT, "goodput", "Goodput over offered load"))
        return;
    for (uint32_t c = 0; c < p->s->n_configs; c++) {
        columns_of(p, c, &k);
        for (size_t i = 0; i < p->n_pools[c]; i++)
            top = fmax(top, k.good[i]), rate = fmax(rate, k.offered[i]);
    }
    snprintf(d.f->caption, sizeof d.f->caption,
             "Good requests per second and worker over what was offered. On the dotted line every "
             "request is good; a line that bends down loses "
             "requests that it had promised to serve.");
    chart_open(&ch, d.f->canvas, "Goodput over offered load",
               "good requests: completed within every objective",
               chart_axis_linear("offered rate per worker (requests/s)", rate),
               chart_axis_linear("good requests/s per worker", top), margin(p, 92));
    chart_line(&ch, (double[]){0, rate * 2}, (double[]){0, rate * 2}, 2, INK_MUTED, 1, DASH_SHORT);
    fprintf(d.csv, "config,rate,offered_per_worker,goodput_per_worker,saturated\n");
    for (uint32_t c = 0; c < p->s->n_configs; c++) {
        size_t n = p->n_pools[c];
        columns_of(p, c, &k);
        chart_line(&ch, k.offered, k.good, n, ink_of(c), 2, DASH_NONE);
        chart_points(&ch, k.offered, k.good, n, (int)c, ink_of(c), 3.4, 1);
        if (n) chart_label(&ch, k.offered[n - 1], k.good[n - 1], ink_of(c), "%s", name_of(p, c));
        for (size_t i = 0; i < n; i++)
            fprintf(d.csv, "%s,%.9g,%.9g,%.9g,%d\n", name_of(p, c), p->pools[c][i].rate,
                    k.offered[i], k.good[i], p->pools[c][i].saturated);
    }
    chart_close(&ch);
    draft_close(p, &d);
}

/* --- at the reference rate -------------------------------------------------------------------- */

static void slo_scale(struct pages *p)
{
    struct draft d;
    struct chart ch;
    const struct sweep *s = p->s;
    char subtitle[128];
    bool any = false;
    for (uint32_t c = 0; c < s->n_configs; c++)
        any |= sweep_reference_row(s, c) && sweep_reference_row(s, c)->scale_joint;
    if (!any || s->n_scales < 2 || !bench_slo_any(&s->slo) ||
        !draft_open(p, &d, CHART_HEIGHT, "slo-scale",
                    "SLO attainment over the strictness of the objectives"))
        return;
    snprintf(subtitle, sizeof subtitle,
             "at about %.3g requests/s per worker; 1 = the objectives as given",
             sweep_reference_rate(s));
    snprintf(
        d.f->caption, sizeof d.f->caption,
        "The same requests judged by all objectives times a factor: further left is stricter.%s",
        s->slo_sent ? " The router was told factor 1 and placed and admitted by it." : "");
    struct chart_axis x = {
        .label = "objectives times", .min = s->scales[0], .max = s->scales[s->n_scales - 1]};
    chart_open(&ch, d.f->canvas, "Attainment over SLO scale", subtitle, x,
               share_axis("requests within objectives"), margin(p, 92));
    target_line(&ch, s);
    fprintf(d.csv, "config,rate,scale,attainment\n");
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        if (!r || !r->scale_joint) continue;
        chart_line(&ch, s->scales, r->scale_joint, s->n_scales, ink_of(c), 2, DASH_NONE);
        chart_points(&ch, s->scales, r->scale_joint, s->n_scales, (int)c, ink_of(c), 3.4, 1);
        chart_label(&ch, s->scales[s->n_scales - 1], r->scale_joint[s->n_scales - 1], ink_of(c),
                    "%s", name_of(p, c));
        for (uint32_t i = 0; i < s->n_scales; i++)
            fprintf(d.csv, "%s,%.9g,%.6g,%.6g\n", name_of(p, c), r->rate, s->scales[i],
                    r->scale_joint[i]);
    }
    chart_close(&ch);
    draft_close(p, &d);
}

static void cdf(struct pages *p, bool is_ttft)
{
    struct draft d;
    struct chart ch;
    const struct sweep *s = p->s;
    const char *name = is_ttft ? "TTFT" : "TPOT";
    double limit = is_ttft ? s->slo.ttft_ms : s->slo.tpot_ms, least = INFINITY, most = 0,
           share[SWEEP_N_QUANTILES];
    char title[64], subtitle[128], label[64], text[64];
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        const double *q = r ? is_ttft ? r->ttft_q : r->tpot_q : NULL;
        for (int i = 1; q && i < SWEEP_N_QUANTILES; i++)
            if (q[i] > 0)
                least = fmin(least, q[i]),
                most = fmax(most, i < SWEEP_N_QUANTILES - 1 ? q[i] : most);
    }
    snprintf(title, sizeof title, "%s of all requests", name);
    if (!(most > 0) || !draft_open(p, &d, CHART_HEIGHT, is_ttft ? "ttft-cdf" : "tpot-cdf", title))
        return;
    if (limit > 0) most = fmax(most, limit * 1.15);
    snprintf(subtitle, sizeof subtitle,
             "at about %.3g requests/s per worker; shown up to the 99th percentile",
             sweep_reference_rate(s));
    snprintf(label, sizeof label,
             is_ttft ? "TTFT from the scheduled send time (ms)" : "TPOT (ms per token)");
    snprintf(d.f->caption, sizeof d.f->caption,
             "How many requests had their %s within how long. Where a line crosses the objective "
             "is that objective's attainment. A line that ends "
             "below 100 %% leaves room for the requests that were turned away or failed.",
             name);
    bool is_log = most > 20 * least;
    for (int i = 0; i < SWEEP_N_QUANTILES; i++) share[i] = (double)i / (SWEEP_N_QUANTILES - 1);
    chart_open(&ch, d.f->canvas, title, subtitle,
               is_log ? chart_axis_log(label, least, most) : chart_axis_linear(label, most),
               share_axis("requests"), margin(p, 92));
    snprintf(text, sizeof text, "%.4g ms", limit);
    if (limit > 0) chart_limit_x(&ch, limit, text);
    fprintf(d.csv, "config,rate,share,%s_ms\n", is_ttft ? "ttft" : "tpot");
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        const double *q = r ? is_ttft ? r->ttft_q : r->tpot_q : NULL;
        double last = NAN, last_x = NAN;
        if (!q) continue;
        chart_line(&ch, q + 1, share + 1, SWEEP_N_QUANTILES - 2, ink_of(c), 2, DASH_NONE);
        for (int i = 0; i < SWEEP_N_QUANTILES; i++) {
            if (isnan(q[i])) continue;
            fprintf(d.csv, "%s,%.9g,%.2f,%.6g\n", name_of(p, c), r->rate, share[i], q[i]);
            if (i > 0 && i < SWEEP_N_QUANTILES - 1) last = share[i], last_x = q[i];
        }
        chart_label(&ch, last_x, last, ink_of(c), "%s", name_of(p, c));
    }
    chart_close(&ch);
    draft_close(p, &d);
}

/* Stages in the order a request goes through them; `transfer` itself runs beside prefill and is
 * told by its exposed part. */
static const struct {
    enum bench_stage of;
    const char *name;
    int ink;
    double opacity;
} bar_stages[] = {
    {BENCH_ROUTER_QUEUE, "router queue", INK_SERIES + 3, 1},
    {BENCH_RESERVE, "reserve", INK_SERIES + 6, 1},
    {BENCH_PREFILL_QUEUE, "prefill queue", INK_SERIES + 4, 1},
    {BENCH_PREFILL, "prefill", INK_SERIES + 0, 1},
    {BENCH_RPC, "rpc", INK_SERIES + 6, 0.5},
    {BENCH_TRANSFER_EXPOSED, "transfer (exposed)", INK_SERIES + 2, 1},
    {BENCH_DECODE_QUEUE, "decode queue", INK_SERIES + 1, 1},
    {BENCH_FIRST_STEP, "first step", INK_SERIES + 5, 1},
};
#define N_BARS (sizeof bar_stages / sizeof *bar_stages)

static void stages(struct pages *p)
{
    struct draft d;
    const struct sweep *s = p->s;
    const struct sweep_row *rows[SWEEP_MAX_CONFIGS];
    uint32_t of[SWEEP_MAX_CONFIGS], n = 0;
    double most = 0, sums[SWEEP_MAX_CONFIGS];
    bool used[N_BARS] = {false};
    for (uint32_t c = 0; c < s->n_configs && n < 16; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        double sum = 0;
        for (size_t k = 0; r && k < N_BARS; k++)
            if (r->stages_ms[bar_stages[k].of] > 0) sum += r->stages_ms[bar_stages[k].of];
        if (!(sum > 0)) continue;
        rows[n] = r, of[n] = c, sums[n++] = sum;
        most = fmax(most, sum);
    }
    for (uint32_t i = 0; i < n; i++) /* what nobody would see needs no name */
        for (size_t k = 0; k < N_BARS; k++)
            used[k] |= rows[i]->stages_ms[bar_stages[k].of] > most * 0.004;
    int top = 106, height = top + (int)n * 46 + 8;
    if (!(most > 0) ||
        !draft_open(p, &d, height, "stages", "Where the time to the second token goes"))
        return;
    snprintf(d.f->caption, sizeof d.f->caption,
             "Mean of each stage at about %.3g requests/s per worker. From router queue to rpc it "
             "adds up to TTFT at the router; transfer, decode "
             "queue and first step come after the first token.",
             sweep_reference_rate(s));
    struct canvas *c = d.f->canvas;
    canvas_text(c, 12, 22, ANCHOR_START, 15, true, INK_TEXT,
                "Where the time to the second token goes");
    canvas_text(c, 12, 40, ANCHOR_START, 11.5, false, INK_MUTED,
                "mean of each stage at about %.3g requests/s per worker", sweep_reference_rate(s));
    double x = 12, y = 66, left = 12, right = CHART_WIDTH - 78;
    for (size_t k = 0; k < N_BARS; k++) {
        double w = canvas_text_width(bar_stages[k].name, 11.5) + 30;
        if (!used[k]) continue;
        if (x + w > CHART_WIDTH - 8) x = 12, y += 20;
        canvas_rect(c, x, y - 9, 11, 11, bar_stages[k].ink, bar_stages[k].opacity);
        canvas_text(c, x + 16, y + 1, ANCHOR_START, 11.5, false, INK_TEXT, "%s",
                    bar_stages[k].name);
        x += w;
    }
    struct chart_axis axis = chart_axis_linear("", most);
    fprintf(d.csv, "config,rate,stage,mean_ms\n");
    for (uint32_t i = 0; i < n; i++) {
        double at = left, row = top + i * 46;
        canvas_text(c, left, row + 9, ANCHOR_START, 12, true, INK_TEXT, "%s", name_of(p, of[i]));
        canvas_text(c, CHART_WIDTH - 12, row + 9, ANCHOR_END, 11.5, false, INK_MUTED,
                    "at %.3g requests/s", rows[i]->rate);
        for (size_t k = 0; k < N_BARS; k++) {
            double v = rows[i]->stages_ms[bar_stages[k].of],
                   w = v > 0 ? v / axis.max * (right - left) : 0;
            canvas_rect(c, at, row + 15, w, 18, bar_stages[k].ink, bar_stages[k].opacity);
            if (w > 0.8)
                canvas_line(c, at + w, row + 15, at + w, row + 33, INK_PAPER, 0.8, DASH_NONE);
            at += w;
        }
        canvas_text(c, at + 6, row + 29, ANCHOR_START, 12, false, INK_TEXT, "%.3g ms", sums[i]);
        for (int k = 0; k < BENCH_N_STAGES; k++)
            fprintf(d.csv, "%s,%.9g,%s,%.6g\n", name_of(p, of[i]), rows[i]->rate,
                    bench_stage_names[k], rows[i]->stages_ms[k]);
    }
    draft_close(p, &d);
}

static void predicted(struct pages *p)
{
    struct draft d;
    struct chart ch;
    const struct sweep *s = p->s;
    double least = INFINITY, most = 0;
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        for (uint32_t i = 0; r && i < r->n_points; i++) {
            least = fmin(least, fmin(r->points[i].predicted_ms, r->points[i].observed_ms));
            most = fmax(most, fmax(r->points[i].predicted_ms, r->points[i].observed_ms));
        }
    }
    if (!(most > 0) ||
        !draft_open(p, &d, CHART_HEIGHT, "predicted", "TTFT as the router predicted it"))
        return;
    snprintf(d.f->caption, sizeof d.f->caption,
             "One point a request. On the diagonal the prediction was exact, above it the request "
             "took longer. Coverage is the share that came no "
             "later than predicted.");
    chart_open(&ch, d.f->canvas, "TTFT as the router predicted it, and as it was",
               "one point a request; the diagonal is an exact prediction",
               chart_axis_log("predicted TTFT (ms)", least, most),
               chart_axis_log("observed TTFT at the router (ms)", least, most),
               fmax(margin(p, 92), 120));
    chart_line(&ch, (double[]){ch.x.min, ch.x.max}, (double[]){ch.x.min, ch.x.max}, 2, INK_MUTED,
               1.2, DASH_LONG);
    fprintf(d.csv, "config,rate,predicted_ms,observed_ms\n");
    double y = ch.top + 14;
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        if (!r || !r->n_points) continue;
        for (uint32_t i = 0; i < r->n_points; i++) {
            double px = r->points[i].predicted_ms, py = r->points[i].observed_ms;
            chart_points(&ch, &px, &py, 1, (int)c, ink_of(c), 2.6, 0.5);
            fprintf(d.csv, "%s,%.9g,%.6g,%.6g\n", name_of(p, c), r->rate, px, py);
        }
        canvas_marker(d.f->canvas, (int)c, ch.right + 14, y - 4, 4, ink_of(c), 1);
        canvas_text(d.f->canvas, ch.right + 23, y, ANCHOR_START, 12, true, ink_of(c), "%s",
                    name_of(p, c));
        if (!isnan(r->predicted_coverage))
            canvas_text(d.f->canvas, ch.right + 23, y + 15, ANCHOR_START, 11, false, INK_MUTED,
                        "coverage %.0f %%", 100 * r->predicted_coverage);
        if (!isnan(r->predicted_mape))
            canvas_text(d.f->canvas, ch.right + 23, y + 29, ANCHOR_START, 11, false, INK_MUTED,
                        "error %.0f %%", 100 * r->predicted_mape);
        y += 50;
    }
    chart_close(&ch);
    draft_close(p, &d);
}

/* --- goodput over P:D ------------------------------------------------------------------------- */

static size_t distinct(const struct sweep *s, const char *mode, bool prefill, uint32_t *values,
                       size_t max)
{
    size_t n = 0;
    for (uint32_t c = 0; c < s->n_configs; c++) {
        uint32_t v = prefill ? s->configs[c].prefill : s->configs[c].decode;
        size_t k = 0;
        if (strcmp(s->configs[c].mode, mode) != 0) continue;
        while (k < n && values[k] != v) k++;
        if (k == n && n < max) values[n++] = v;
    }
    for (size_t i = 1; i < n; i++)
        for (size_t k = i; k > 0 && values[k] < values[k - 1]; k--) {
            uint32_t t = values[k];
            values[k] = values[k - 1], values[k - 1] = t;
        }
    return n;
}

static void heat(struct pages *p, const char *mode)
{
    struct draft d;
    const struct sweep *s = p->s;
    uint32_t ps[16], ds[16];
    size_t n_p = distinct(s, mode, true, ps, 16), n_d = distinct(s, mode, false, ds, 16);
    char id[80], title[128];
    double most = 0;
    if (n_p * n_d < 2 || !strcmp(mode, "colocated")) return;
    for (uint32_t c = 0; c < s->n_configs; c++)
        if (!strcmp(s->configs[c].mode, mode) && s->configs[c].goodput > 0)
            most = fmax(most, s->configs[c].goodput / workers(p, c));
    snprintf(id, sizeof id, "goodput-shape-%s", mode);
    snprintf(title, sizeof title, "%s: goodput over prefill and decode workers", mode);
    double cell_h = fmin(54, 240.0 / (double)n_d), left = 78, top = 66,
           cell_w = fmin(150, (CHART_WIDTH - left - 20) / (double)n_p);
    int height = (int)(top + cell_h * (double)n_d) + 50;
    if (!(most > 0) || !draft_open(p, &d, height, id, title)) return;
    snprintf(d.f->caption, sizeof d.f->caption,
             "Goodput per worker of each shape that was run, requests/s; below it the whole "
             "cluster's. Darker is more.");
    struct canvas *c = d.f->canvas;
    canvas_text(c, 12, 22, ANCHOR_START, 15, true, INK_TEXT, "%s", title);
    canvas_text(c, 12, 40, ANCHOR_START, 11.5, false, INK_MUTED,
                "requests/s per worker (whole cluster)");
    fprintf(d.csv, "config,prefill,decode,goodput,goodput_per_worker\n");
    for (size_t i = 0; i < n_d; i++)
        canvas_text(c, left - 10, top + cell_h * ((double)(n_d - 1 - i) + 0.5) + 4, ANCHOR_END, 12,
                    false, INK_MUTED, "%u", ds[i]);
    for (size_t i = 0; i < n_p; i++)
        canvas_text(c, left + cell_w * ((double)i + 0.5), top + cell_h * (double)n_d + 18,
                    ANCHOR_MIDDLE, 12, false, INK_MUTED, "%u", ps[i]);
    canvas_text(c, left + cell_w * (double)n_p / 2, height - 10, ANCHOR_MIDDLE, 12, false, INK_TEXT,
                "prefill workers");
    canvas_text_up(c, 22, top + cell_h * (double)n_d / 2, 12, INK_TEXT, "decode workers");
    for (uint32_t k = 0; k < s->n_configs; k++) {
        const struct sweep_config *g = &s->configs[k];
        if (strcmp(g->mode, mode) != 0 || isnan(g->goodput)) continue;
        size_t col = 0, row = 0;
        while (col < n_p && ps[col] != g->prefill) col++;
        while (row < n_d && ds[row] != g->decode) row++;
        double each = g->goodput / workers(p, k), x = left + cell_w * (double)col,
               y = top + cell_h * (double)(n_d - 1 - row);
        bool is_best = each >= most;
        canvas_rect(c, x + 1, y + 1, cell_w - 2, cell_h - 2, INK_SERIES + 0,
                    0.06 + 0.5 * each / most);
        canvas_text(c, x + cell_w / 2, y + cell_h / 2 - (cell_h > 40 ? 1 : -4), ANCHOR_MIDDLE, 13,
                    is_best, INK_TEXT, is_best ? "%.3g best" : "%.3g", each);
        if (cell_h > 40)
            canvas_text(c, x + cell_w / 2, y + cell_h / 2 + 15, ANCHOR_MIDDLE, 11, false, INK_TEXT,
                        "(%.3g)", g->goodput);
        fprintf(d.csv, "%s,%u,%u,%.9g,%.9g\n", g->name, g->prefill, g->decode, g->goodput, each);
    }
    draft_close(p, &d);
}

/* --- all of them ------------------------------------------------------------------------------ */

size_t figures_make(const struct sweep *s, struct figure *ret_figures)
{
    struct pages p = {.s = s,
                      .figures = ret_figures,
                      .pools = calloc(s->n_configs ? s->n_configs : 1, sizeof *p.pools),
                      .n_pools = calloc(s->n_configs + 1, sizeof *p.n_pools)};
    for (uint32_t c = 0; p.pools && p.n_pools && c < s->n_configs; c++)
        p.n_pools[c] = sweep_pool(s, c, p.pools[c], MAX_POOLS);
    if (p.pools && p.n_pools) {
        attainment(&p);
        goodput(&p);
        for (uint32_t c = 0; c < s->n_configs && c < MAX_PANELS; c++) attainment_parts(&p, c);
        heat(&p, "pd");
        heat(&p, "hybrid");
        stages(&p);
        cdf(&p, true);
        cdf(&p, false);
        slo_scale(&p);
        predicted(&p);
    }
    free(p.pools);
    free(p.n_pools);
    return p.n;
}
