/* figures.c - see figures.h. A configuration has the same colour and the same marker in every
 * picture. */
#include "bench/plot/figures.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/plot/gnuplot.h"

#define MAX_POOLS 256
#define MAX_LOST 64
#define MAX_PANELS 12 /* pictures of single configurations */
/* A phone is 390 pixels wide: letters of 12 are 9 there. */
#define WIDTH 480
#define HEIGHT 340
#define KEY_ROW 20 /* pixels of one row of names below a picture */

#define TEXT "#1c1f24"
#define MUTED "#5a6069"
#define GRID "#dfe2e6"
#define LIMIT "#8a2b2b"

/* Okabe and Ito's colours, which people with colour-blindness tell apart; no picture relies on
 * them alone. */
static const char *const colours[] = {"#0072b2", "#d55e00", "#007f5f", "#a8528a",
                                      "#b07c00", "#3d8fc4", "#6b6f76"};
/* Characters, because gnuplot's own marks are links to definitions, and a page of several
 * pictures would have each definition more than once. */
static const char *const markers[] = {"●", "■", "▲", "◆"};
#define N_COLOURS (sizeof colours / sizeof *colours)
#define N_MARKERS (sizeof markers / sizeof *markers)

struct pages {
    const struct sweep *s;
    struct figure *figures;
    size_t n;
    struct sweep_pool (*pools)[MAX_POOLS]; /* of each configuration, by rate */
    size_t *n_pools;
    struct sweep_lost (*lost)[MAX_LOST]; /* rates that were run and not measured */
    size_t *n_lost;
};

/* A figure under work: its script and its CSV. */
struct draft {
    struct figure *f;
    FILE *gp, *csv;
    size_t script_bytes, csv_bytes;
    int n_plots;
};

struct axis {
    const char *label; /* with its unit */
    double min, max;   /* log: both > 0 */
    bool log, percent; /* percent: of shares */
};

void figure_free(struct figure *f)
{
    free(f->script);
    free(f->csv);
    free(f->marks);
    *f = (struct figure){0};
}

static bool draft_open(struct pages *p, struct draft *d, int height, const char *id,
                       const char *title)
{
    if (p->n == FIGURES_MAX) return false;
    *d = (struct draft){.f = &p->figures[p->n]};
    *d->f = (struct figure){.width = WIDTH, .height = height};
    snprintf(d->f->id, sizeof d->f->id, "%s", id);
    snprintf(d->f->title, sizeof d->f->title, "%s", title);
    d->gp = open_memstream(&d->f->script, &d->script_bytes);
    d->csv = open_memstream(&d->f->csv, &d->csv_bytes);
    if (d->gp && d->csv) return true;
    if (d->gp) fclose(d->gp);
    if (d->csv) fclose(d->csv);
    figure_free(d->f);
    return false;
}

static void draft_close(struct pages *p, struct draft *d)
{
    fputc('\n', d->gp);
    int failed = fclose(d->gp);
    failed |= fclose(d->csv);
    if (failed)
        figure_free(d->f); /* no memory for the numbers: no figure */
    else
        p->n++;
}

static const char *name_of(const struct pages *p, uint32_t c) { return p->s->configs[c].name; }
static double workers(const struct pages *p, uint32_t c)
{
    return p->s->configs[c].gpus ? p->s->configs[c].gpus : 1;
}
static const char *colour_of(uint32_t c) { return colours[c % N_COLOURS]; }

/* Rows that n names take below a picture: as many in a row as the longest allows. */
static int key_height(size_t n, size_t longest)
{
    size_t each = 60 + 8 * longest, columns = each < WIDTH ? WIDTH / each : 1;
    return KEY_ROW * (int)((n + columns - 1) / columns);
}

static int names_height(const struct pages *p)
{
    size_t longest = 0;
    for (uint32_t c = 0; c < p->s->n_configs; c++)
        if (strlen(name_of(p, c)) > longest) longest = strlen(name_of(p, c));
    return key_height(p->s->n_configs, longest);
}

static void slo_text(const struct sweep *s, char *text, size_t bytes)
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

/* From the least value of what is drawn to the greatest. Nothing yet: RANGE_NONE. */
struct range {
    double least, most;
};
#define RANGE_NONE ((struct range){INFINITY, -INFINITY})

static void range_add(struct range *range, double v)
{
    if (!isfinite(v)) return;
    range->least = fmin(range->least, v);
    range->most = fmax(range->most, v);
}

/* --- gnuplot's input -------------------------------------------------------------------------- */

/* 1, 2 or 5 times a power of ten, at least v. */
static double nice_above(double v)
{
    double base = pow(10, floor(log10(v))), m = v / base * (1 - 1e-9);
    return m <= 1 ? base : m <= 2 ? 2 * base : m <= 5 ? 5 * base : 10 * base;
}

/* From 0 to the next tick above max. */
static struct axis axis_linear(const char *label, double max)
{
    if (!(max > 0) || !isfinite(max)) max = 1;
    double step = nice_above(max / 6);
    return (struct axis){.label = label, .max = ceil(max / step - 1e-9) * step};
}

/* Where the curves are: from 0 only when they come near to it. */
static struct axis axis_fitted(const char *label, struct range range)
{
    if (!(range.least > 0.35 * range.most)) return axis_linear(label, range.most);
    double room = fmax(range.most - range.least, 0.1 * range.most), step = nice_above(room / 5);
    return (struct axis){.label = label,
                         .min = fmax(0, floor((range.least - 0.05 * room) / step) * step),
                         .max = ceil((range.most + 0.05 * room) / step) * step};
}

static struct axis axis_log(const char *label, double min, double max)
{
    if (!(min > 0) || !isfinite(max) || max < min) min = 1, max = 10;
    double lo = 1 / nice_above(1 / min), hi = nice_above(max);
    return (struct axis){.label = label, .min = lo, .max = hi > lo ? hi : lo * 10, .log = true};
}

/* Shares up to 100 %, with room above it for the marks of what lies there, from a tick below the
 * least. */
static struct axis axis_share(const char *label, double least)
{
    double step = nice_above((1 - fmin(fmax(least, 0), 0.98)) / 5),
           min = least > 0.25 ? fmax(0, floor((least - step / 4) / step) * step) : 0;
    return (struct axis){.label = label, .min = min, .max = 1 + 0.03 * (1 - min), .percent = true};
}

static void axis_write(struct draft *d, char name, const struct axis *a)
{
    double unit = a->percent ? 100 : 1;
    fprintf(d->gp, "set %crange [%.9g:%.9g]\nset %clabel ", name, a->min * unit, a->max * unit,
            name);
    gnuplot_quote(a->label, d->gp);
    fprintf(d->gp, " textcolor rgb '" TEXT "'%s\nset format %c '%s'\n",
            name == 'x' ? " offset 0,0.4" : "", name, a->percent ? "%g %%" : "%g");
    if (a->log && a->max / a->min < 300) /* too few powers of ten to read by: name 2 and 5, too */
        for (double v = a->min; v <= a->max * 1.000001;) {
            double m = round(v / pow(10, floor(log10(v) + 1e-9)));
            fprintf(d->gp, "set %ctics %s ('%.4g' %.9g)\n", name, v == a->min ? "" : "add", v, v);
            v *= m == 2 ? 2.5 : 2;
        }
    if (a->log) fprintf(d->gp, "set logscale %c\n", name);
}

/* Where the plane lies: below two lines of title, above its own tics and label and the rows of
 * names. */
static void margins(struct draft *d, int names_height)
{
    fprintf(d->gp, "set tmargin at screen %g\nset bmargin at screen %g\n", 1 - 62.0 / d->f->height,
            (60.0 + names_height) / d->f->height);
}

static void titles(struct draft *d, const char *subtitle, int names_height)
{
    margins(d, names_height);
    fputs("set border 3 linecolor rgb '" MUTED "'\nset tics nomirror textcolor rgb '" MUTED
          "'\nset grid "
          "linecolor rgb '" GRID "' linetype 1\n"
          "set key below left Left reverse samplen 2 textcolor rgb '" TEXT "'\nset label ",
          d->gp);
    gnuplot_quote(d->f->title, d->gp);
    fputs(" at screen 0.02,graph 1 offset 0,2.6 font '" GNUPLOT_FONT ",15' textcolor rgb '" TEXT
          "'\n",
          d->gp);
    if (!subtitle[0]) return;
    fputs("set label ", d->gp);
    gnuplot_quote(subtitle, d->gp);
    fputs(" at screen 0.02,graph 1 offset 0,1.2 font '" GNUPLOT_FONT ",11' textcolor rgb '" MUTED
          "'\n",
          d->gp);
}

/* The height beyond HEIGHT is for the rows of names. */
static void chart(struct draft *d, const char *subtitle, struct axis x, struct axis y)
{
    titles(d, subtitle, d->f->height - HEIGHT);
    axis_write(d, 'x', &x);
    axis_write(d, 'y', &y);
}

/* A limit: a dashed line across, named at its right end (y) or at its foot (x). */
static void limit(struct draft *d, char axis, double v, const char *name)
{
    if (!(v > 0)) return;
    if (axis == 'y')
        fprintf(d->gp, "set arrow from graph 0,first %.9g to graph 1,first %.9g", v, v);
    else
        fprintf(d->gp, "set arrow from first %.9g,graph 0 to first %.9g,graph 1", v, v);
    fputs(" nohead dashtype (8,5) linecolor rgb '" LIMIT "'\nset label ", d->gp);
    gnuplot_quote(name, d->gp);
    fprintf(d->gp,
            axis == 'y' ? " at graph 1,first %.9g offset -0.5,-0.7 right"
                        : " at first %.9g,graph 0 offset 0.5,0.7",
            v);
    fputs(" textcolor rgb '" LIMIT "'\n", d->gp);
}

/* Points as the data block $dN of the script. A blank line breaks the line of the picture: gnuplot
 * draws on over a missing value. */
static void data(struct draft *d, uint32_t block, const double *const columns[], size_t n_columns,
                 size_t n)
{
    fprintf(d->gp, "$d%u << EOD\n", block);
    for (size_t i = 0; i < n; i++) {
        bool known = true;
        for (size_t k = 0; k < n_columns; k++) known &= isfinite(columns[k][i]) != 0;
        for (size_t k = 0; known && k < n_columns; k++) fprintf(d->gp, "%.9g ", columns[k][i]);
        fputc('\n', d->gp);
    }
    fputs("EOD\n", d->gp);
}

/* Begins one more thing to draw, `name` NULL: without a name below the picture. */
static void plot(struct draft *d, const char *what, uint32_t block, const char *using,
                 const char *name)
{
    fputs(d->n_plots++ ? ", \\\n  " : "plot ", d->gp);
    if (what)
        fputs(what, d->gp);
    else
        fprintf(d->gp, "$d%u using %s", block, using);
    fputs(name ? " title " : " notitle", d->gp);
    if (name) gnuplot_quote(name, d->gp);
}

static void style_line(struct draft *d, const char *colour, double width, const char *dashes)
{
    fprintf(d->gp, " with lines linecolor rgb '%s' linewidth %g dashtype %s", colour, width,
            dashes);
}

static void style_marked(struct draft *d, uint32_t c, const char *style)
{
    fprintf(d->gp, " with %s linecolor rgb '%s' linewidth 2 pointtype '%s' pointsize 1", style,
            colour_of(c), markers[c % N_MARKERS]);
}

/* An interval as a band in the line's colour, so thin that several can lie upon one another. */
static void plot_band(struct draft *d, uint32_t block, const char *using, const char *colour)
{
    plot(d, NULL, block, using, NULL);
    fprintf(d->gp, " with filledcurves linecolor rgb '#d8%s'", colour + 1);
}

/* An interval as a bar from column lo to column hi. */
static void plot_bars(struct draft *d, uint32_t block, const char *using, const char *colour)
{
    plot(d, NULL, block, using, NULL);
    fprintf(d->gp, " with vectors nohead linecolor rgb '%s' linewidth 1", colour);
}

static struct axis axis_rate(struct range range)
{
    return axis_fitted("offered rate per worker (requests/s)", range);
}

/* --- attainment over rate --------------------------------------------------------------------- */

/* A line's points by rate; where a rate was run and not measured all but x is NAN, which breaks
 * the line there. */
#define MAX_POINTS (MAX_POOLS + MAX_LOST)
struct columns {
    size_t n;
    double x[MAX_POINTS], offered[MAX_POINTS], joint[MAX_POINTS], lo[MAX_POINTS], hi[MAX_POINTS],
        ttft[MAX_POINTS], ttft_lo[MAX_POINTS], ttft_hi[MAX_POINTS], tpot[MAX_POINTS],
        tpot_lo[MAX_POINTS], tpot_hi[MAX_POINTS], good[MAX_POINTS], good_lo[MAX_POINTS],
        good_hi[MAX_POINTS];
};

static struct td_stats_interval wilson_of(double share, double n)
{
    if (!(share >= 0 && share <= 1 && n >= 1)) return (struct td_stats_interval){NAN, NAN};
    return td_stats_wilson((uint64_t)round(share * n), (uint64_t)n);
}

static void columns_add(struct columns *k, double n_workers, double rate,
                        const struct sweep_pool *q)
{
    static const struct sweep_pool none = {.offered_rate = NAN,
                                           .goodput = NAN,
                                           .joint = NAN,
                                           .ttft = NAN,
                                           .tpot = NAN,
                                           .lo = NAN,
                                           .hi = NAN,
                                           .n = NAN};
    size_t i = k->n++;
    if (!q) q = &none;
    struct td_stats_interval ttft = wilson_of(q->ttft, q->n), tpot = wilson_of(q->tpot, q->n);
    k->x[i] = rate / n_workers;
    k->offered[i] = q->offered_rate / n_workers;
    k->joint[i] = q->joint, k->lo[i] = q->lo, k->hi[i] = q->hi;
    k->ttft[i] = q->ttft, k->ttft_lo[i] = ttft.lo, k->ttft_hi[i] = ttft.hi;
    k->tpot[i] = q->tpot, k->tpot_lo[i] = tpot.lo, k->tpot_hi[i] = tpot.hi;
    k->good[i] = q->goodput / n_workers;
    k->good_lo[i] = q->lo * q->offered_rate / n_workers;
    k->good_hi[i] = q->hi * q->offered_rate / n_workers;
}

static void columns_of(const struct pages *p, uint32_t c, struct columns *k)
{
    size_t lost = 0;
    k->n = 0;
    for (size_t i = 0; i < p->n_pools[c]; i++) {
        for (; lost < p->n_lost[c] && p->lost[c][lost].rate < p->pools[c][i].rate; lost++)
            columns_add(k, workers(p, c), p->lost[c][lost].rate, NULL);
        columns_add(k, workers(p, c), p->pools[c][i].rate, &p->pools[c][i]);
    }
    for (; lost < p->n_lost[c]; lost++) columns_add(k, workers(p, c), p->lost[c][lost].rate, NULL);
}

/* Rates that were run and not measured, as crosses at the foot of the picture. */
static void plot_lost(struct draft *d, const struct pages *p, uint32_t first, uint32_t end)
{
    bool any = false;
    for (uint32_t c = first; c < end; c++)
        for (size_t i = 0; i < p->n_lost[c]; i++, any = true)
            fprintf(d->gp,
                    "set label '×' at first %.9g,graph 0.04 center font '" GNUPLOT_FONT
                    ",14' textcolor rgb '%s'\n",
                    p->lost[c][i].rate / workers(p, c), end - first > 1 ? colour_of(c) : TEXT);
    if (!any) return;
    size_t n = strlen(d->f->caption);
    snprintf(d->f->caption + n, sizeof d->f->caption - n,
             " × at the foot: run, but not measured; the verdict says why.");
}

static void target_line(struct draft *d, const struct sweep *s)
{
    char text[40];
    snprintf(text, sizeof text, "target %.4g %%", 100 * s->attainment);
    limit(d, 'y', 100 * s->attainment, text);
}

static void attainment(struct pages *p)
{
    struct draft d;
    struct columns k;
    struct range x = RANGE_NONE, y = RANGE_NONE;
    char slo[128], subtitle[200];
    if (!bench_slo_any(&p->s->slo) ||
        !draft_open(p, &d, HEIGHT + names_height(p), "attainment", "SLO attainment over rate"))
        return;
    slo_text(p->s, slo, sizeof slo);
    snprintf(subtitle, sizeof subtitle, "requests that met %s; bars: 95 %% interval", slo);
    snprintf(d.f->caption, sizeof d.f->caption,
             "Share of offered requests that met every objective, over the offered rate per "
             "worker. Goodput is where a "
             "line crosses the target; the bars are 95 %% intervals.");
    range_add(&y, p->s->attainment);
    for (uint32_t c = 0; c < p->s->n_configs; c++) {
        columns_of(p, c, &k);
        for (size_t i = 0; i < k.n; i++) range_add(&x, k.x[i]), range_add(&y, k.lo[i]);
    }
    chart(&d, subtitle, axis_rate(x), axis_share("requests within objectives", y.least));
    target_line(&d, p->s);
    plot_lost(&d, p, 0, p->s->n_configs);
    fprintf(d.csv, "config,rate,rate_per_worker,runs,attainment,ci95_lo,ci95_hi,attainment_ttft,"
                   "attainment_tpot,"
                   "least,greatest\n");
    for (uint32_t c = 0; c < p->s->n_configs; c++) {
        columns_of(p, c, &k);
        data(&d, c, (const double *const[]){k.x, k.joint, k.lo, k.hi}, 4, k.n);
        for (size_t i = 0; i < p->n_pools[c]; i++) {
            const struct sweep_pool *q = &p->pools[c][i];
            fprintf(d.csv, "%s,%.9g,%.9g,%u,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g,%.6g\n", name_of(p, c),
                    q->rate, q->rate / workers(p, c), q->n_runs, q->joint, q->lo, q->hi, q->ttft,
                    q->tpot, q->least, q->greatest);
        }
        for (size_t i = 0; i < p->n_lost[c]; i++)
            fprintf(d.csv, "%s,%.9g,%.9g,0,nan,nan,nan,nan,nan,nan,nan\n", name_of(p, c),
                    p->lost[c][i].rate, p->lost[c][i].rate / workers(p, c));
    }
    plot(&d, "NaN", 0, NULL, NULL);
    for (uint32_t c = 0; c < p->s->n_configs; c++) {
        if (p->n_pools[c] == 0 && p->n_lost[c]) { /* the name of its crosses */
            plot(&d, "NaN", 0, NULL, name_of(p, c));
            fprintf(d.gp, " with points linecolor rgb '%s' pointtype '×' pointsize 1",
                    colour_of(c));
        }
        if (p->n_pools[c] == 0) continue;
        plot_bars(&d, c, "1:($3*100):(0):(($4-$3)*100)", colour_of(c));
        plot(&d, NULL, c, "1:($2*100)", name_of(p, c));
        style_marked(&d, c, "linespoints");
    }
    draft_close(p, &d);
}

static void attainment_parts(struct pages *p, uint32_t c)
{
    struct draft d;
    struct columns k;
    struct range x = RANGE_NONE, y = RANGE_NONE;
    char id[80], title[128], subtitle[160];
    const struct bench_slo *slo = &p->s->slo;
    snprintf(id, sizeof id, "attainment-%s", name_of(p, c));
    for (char *q = id; *q; q++)
        if (!isalnum((unsigned char)*q)) *q = '-';
    snprintf(title, sizeof title, "%s: which objective is missed", name_of(p, c));
    if (p->n_pools[c] == 0 || !bench_slo_any(slo) ||
        !draft_open(p, &d, HEIGHT + KEY_ROW, id, title))
        return;
    slo_text(p->s, subtitle, sizeof subtitle);
    size_t used = strlen(subtitle);
    snprintf(subtitle + used, sizeof subtitle - used, "; bars and bands: 95 %% intervals");
    snprintf(d.f->caption, sizeof d.f->caption,
             "%s: both objectives, and each alone. The line that falls first is the objective that "
             "limits this configuration; what was turned away misses both. The axes are its own.",
             name_of(p, c));
    columns_of(p, c, &k);
    range_add(&y, p->s->attainment);
    for (size_t i = 0; i < k.n; i++) {
        range_add(&x, k.x[i]);
        range_add(&y, k.lo[i]), range_add(&y, k.ttft_lo[i]), range_add(&y, k.tpot_lo[i]);
    }
    chart(&d, subtitle, axis_rate(x), axis_share("requests within objectives", y.least));
    target_line(&d, p->s);
    plot_lost(&d, p, c, c + 1);
    data(&d, 0, (const double *const[]){k.x, k.joint, k.lo, k.hi}, 4, k.n);
    data(&d, 1, (const double *const[]){k.x, k.ttft, k.ttft_lo, k.ttft_hi}, 4, k.n);
    data(&d, 2, (const double *const[]){k.x, k.tpot, k.tpot_lo, k.tpot_hi}, 4, k.n);
    plot(&d, "NaN", 0, NULL, NULL);
    if (slo->ttft_ms > 0) plot_band(&d, 1, "1:($3*100):($4*100)", colours[0]);
    if (slo->tpot_ms > 0) plot_band(&d, 2, "1:($3*100):($4*100)", colours[1]);
    if (slo->ttft_ms > 0)
        plot(&d, NULL, 1, "1:($2*100)", "TTFT"), style_line(&d, colours[0], 5, "solid");
    if (slo->tpot_ms > 0)
        plot(&d, NULL, 2, "1:($2*100)", "TPOT"), style_line(&d, colours[1], 3, "(10,6)");
    plot_bars(&d, 0, "1:($3*100):(0):(($4-$3)*100)", TEXT);
    /* Thin and last, above the others: where all are the same all three show. */
    plot(&d, NULL, 0, "1:($2*100)", "joint");
    fprintf(d.gp, " with linespoints linecolor rgb '" TEXT "' linewidth 1.6"
                  " pointtype '●' pointsize 0.8");
    fprintf(d.csv, "config,rate,rate_per_worker,joint,ttft,tpot,ci95_lo,ci95_hi\n");
    for (size_t i = 0; i < p->n_pools[c]; i++) {
        const struct sweep_pool *q = &p->pools[c][i];
        fprintf(d.csv, "%s,%.9g,%.9g,%.6g,%.6g,%.6g,%.6g,%.6g\n", name_of(p, c), q->rate,
                q->rate / workers(p, c), q->joint, q->ttft, q->tpot, q->lo, q->hi);
    }
    draft_close(p, &d);
}

/* --- goodput over load ------------------------------------------------------------------------ */

static void goodput(struct pages *p)
{
    struct draft d;
    struct columns k;
    struct range x = RANGE_NONE, y = RANGE_NONE;
    if (!bench_slo_any(&p->s->slo) || !draft_open(p, &d, HEIGHT + names_height(p) + KEY_ROW,
                                                  "goodput", "Goodput over offered load"))
        return;
    for (uint32_t c = 0; c < p->s->n_configs; c++) {
        columns_of(p, c, &k);
        for (size_t i = 0; i < k.n; i++) {
            range_add(&x, isnan(k.offered[i]) ? k.x[i] : k.offered[i]);
            range_add(&y, k.good_lo[i]), range_add(&y, k.good_hi[i]);
        }
    }
    snprintf(d.f->caption, sizeof d.f->caption,
             "Good requests per second and worker over what was offered. On the dotted line every "
             "request is good; a "
             "line that bends down loses requests that it had promised to serve.");
    chart(&d, "good: completed within every objective; bars: 95 % interval", axis_rate(x),
          axis_fitted("good requests/s per worker", y));
    plot_lost(&d, p, 0, p->s->n_configs);
    fprintf(d.csv, "config,rate,offered_per_worker,goodput_per_worker,saturated,ci95_lo,ci95_hi\n");
    for (uint32_t c = 0; c < p->s->n_configs; c++) {
        columns_of(p, c, &k);
        data(&d, c, (const double *const[]){k.offered, k.good, k.good_lo, k.good_hi}, 4, k.n);
        for (size_t i = 0; i < p->n_pools[c]; i++) {
            const struct sweep_pool *q = &p->pools[c][i];
            double n = workers(p, c);
            fprintf(d.csv, "%s,%.9g,%.9g,%.9g,%d,%.9g,%.9g\n", name_of(p, c), q->rate,
                    q->offered_rate / n, q->goodput / n, q->saturated, q->lo * q->offered_rate / n,
                    q->hi * q->offered_rate / n);
        }
    }
    plot(&d, "x", 0, NULL, "every request good");
    style_line(&d, MUTED, 1, "(2,4)");
    for (uint32_t c = 0; c < p->s->n_configs; c++) {
        if (p->n_pools[c] == 0) continue;
        plot_bars(&d, c, "1:3:(0):($4-$3)", colour_of(c));
        plot(&d, NULL, c, "1:2", name_of(p, c));
        style_marked(&d, c, "linespoints");
    }
    draft_close(p, &d);
}

/* --- at the reference rate -------------------------------------------------------------------- */

/* Names the configurations that have no place in a comparison at one load. */
static void caption_absent(const struct pages *p, struct figure *f)
{
    const char *before = " Not measured at this load: ";
    size_t n = strlen(f->caption), begin = n;
    for (uint32_t c = 0; c < p->s->n_configs && n < sizeof f->caption - 1; c++) {
        if (sweep_reference_row(p->s, c)) continue;
        n += (size_t)snprintf(f->caption + n, sizeof f->caption - n, "%s%s", before, name_of(p, c));
        before = ", ";
    }
    if (n > begin && n < sizeof f->caption - 1) snprintf(f->caption + n, 2, ".");
}

static void slo_scale(struct pages *p)
{
    struct draft d;
    const struct sweep *s = p->s;
    char subtitle[128];
    bool any = false;
    for (uint32_t c = 0; c < s->n_configs; c++)
        any |= sweep_reference_row(s, c) && sweep_reference_row(s, c)->scale_joint;
    if (!any || s->n_scales < 2 || !bench_slo_any(&s->slo) ||
        !draft_open(p, &d, HEIGHT + names_height(p), "slo-scale", "Attainment over SLO scale"))
        return;
    snprintf(subtitle, sizeof subtitle,
             "at %.3g requests/s per worker; 1 = the objectives as given; bars: 95 %% interval",
             sweep_reference_rate(s));
    snprintf(
        d.f->caption, sizeof d.f->caption,
        "The same requests judged by all objectives times a factor: further left is stricter.%s",
        s->slo_sent ? " The router was told factor 1 and placed and admitted by it." : "");
    caption_absent(p, d.f);
    struct range y = RANGE_NONE;
    range_add(&y, s->attainment);
    struct axis x = {
        .label = "objectives times", .min = s->scales[0], .max = s->scales[s->n_scales - 1]};
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        for (uint32_t i = 0; r && r->scale_joint && i < s->n_scales; i++)
            range_add(&y, wilson_of(r->scale_joint[i], r->steady.n).lo);
    }
    chart(&d, subtitle, x, axis_share("requests within objectives", y.least));
    target_line(&d, s);
    fprintf(d.csv, "config,rate,scale,attainment,ci95_lo,ci95_hi\n");
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        double lo[SWEEP_MAX_SCALES], hi[SWEEP_MAX_SCALES];
        if (!r || !r->scale_joint) continue;
        for (uint32_t i = 0; i < s->n_scales; i++) {
            struct td_stats_interval w = wilson_of(r->scale_joint[i], r->steady.n);
            lo[i] = w.lo, hi[i] = w.hi;
            fprintf(d.csv, "%s,%.9g,%.6g,%.6g,%.6g,%.6g\n", name_of(p, c), r->rate, s->scales[i],
                    r->scale_joint[i], lo[i], hi[i]);
        }
        data(&d, c, (const double *const[]){s->scales, r->scale_joint, lo, hi}, 4, s->n_scales);
    }
    plot(&d, "NaN", 0, NULL, NULL);
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        if (!r || !r->scale_joint) continue;
        plot_bars(&d, c, "1:($3*100):(0):(($4-$3)*100)", colour_of(c));
        plot(&d, NULL, c, "1:($2*100)", name_of(p, c));
        style_marked(&d, c, "linespoints");
    }
    draft_close(p, &d);
}

/* The quantiles of the row that configuration c is compared by; NULL: none are known. */
static const double *quantiles_at_reference(const struct sweep *s, uint32_t c, bool is_ttft)
{
    const struct sweep_row *r = sweep_reference_row(s, c);
    return !r ? NULL : is_ttft ? r->ttft_q : r->tpot_q;
}

static void cdf_data(const struct pages *p, struct draft *d, uint32_t c, bool is_ttft)
{
    double share[SWEEP_N_QUANTILES], lo[SWEEP_N_QUANTILES], hi[SWEEP_N_QUANTILES];
    const struct sweep_row *r = sweep_reference_row(p->s, c);
    const double *q = quantiles_at_reference(p->s, c, is_ttft);
    if (!q) return;
    for (int i = 0; i < SWEEP_N_QUANTILES; i++) {
        share[i] = (double)i / (SWEEP_N_QUANTILES - 1);
        struct td_stats_interval w = wilson_of(share[i], r->steady.n);
        lo[i] = w.lo, hi[i] = w.hi;
        if (!isnan(q[i]))
            fprintf(d->csv, "%s,%.9g,%.2f,%.6g\n", name_of(p, c), r->rate, share[i], q[i]);
    }
    data(d, c, (const double *const[]){q + 1, share + 1, lo + 1, hi + 1}, 4, SWEEP_N_QUANTILES - 2);
}

static void cdf(struct pages *p, bool is_ttft)
{
    struct draft d;
    const struct sweep *s = p->s;
    const char *name = is_ttft ? "TTFT" : "TPOT";
    double objective_ms = is_ttft ? s->slo.ttft_ms : s->slo.tpot_ms, least = INFINITY, most = 0;
    char title[64], subtitle[128], label[64], text[64];
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const double *q = quantiles_at_reference(s, c, is_ttft);
        for (int i = 1; q && i < SWEEP_N_QUANTILES; i++)
            if (q[i] > 0)
                least = fmin(least, q[i]),
                most = fmax(most, i < SWEEP_N_QUANTILES - 1 ? q[i] : most);
    }
    snprintf(title, sizeof title, "%s of all requests", name);
    if (!(most > 0) ||
        !draft_open(p, &d, HEIGHT + names_height(p), is_ttft ? "ttft-cdf" : "tpot-cdf", title))
        return;
    if (objective_ms > 0) most = fmax(most, objective_ms * 1.15);
    snprintf(subtitle, sizeof subtitle,
             "at %.3g requests/s per worker; up to the 99th percentile; bands: 95 %% interval",
             sweep_reference_rate(s));
    snprintf(label, sizeof label,
             is_ttft ? "TTFT from the scheduled send time (ms)" : "TPOT (ms per token)");
    snprintf(d.f->caption, sizeof d.f->caption,
             "How many requests had their %s within how long. Where a line crosses the objective "
             "is that objective's "
             "attainment. A line that ends below 100 %% leaves room for the requests that were "
             "turned away or failed.",
             name);
    caption_absent(p, d.f);
    chart(&d, subtitle,
          most > 20 * least ? axis_log(label, least, most)
                            : axis_fitted(label, (struct range){least, most}),
          axis_share("requests", 0));
    snprintf(text, sizeof text, "%.4g ms", objective_ms);
    limit(&d, 'x', objective_ms, text);
    fprintf(d.csv, "config,rate,share,%s_ms\n", is_ttft ? "ttft" : "tpot");
    for (uint32_t c = 0; c < s->n_configs; c++) cdf_data(p, &d, c, is_ttft);
    plot(&d, "NaN", 0, NULL, NULL);
    for (uint32_t c = 0; c < s->n_configs; c++) {
        if (!quantiles_at_reference(s, c, is_ttft)) continue;
        plot_band(&d, c, "1:($3*100):($4*100)", colour_of(c));
        plot(&d, NULL, c, "1:($2*100)", name_of(p, c));
        style_line(&d, colour_of(c), 2, "solid");
    }
    draft_close(p, &d);
}

/* Stages in the order a request goes through them; `transfer` itself runs beside prefill and is
 * told by its exposed part. */
static const struct {
    enum bench_stage of;
    const char *name, *colour;
} bar_stages[] = {
    {BENCH_ROUTER_QUEUE, "router queue", "#a8528a"},
    {BENCH_RESERVE, "reserve", "#6b6f76"},
    {BENCH_PREFILL_QUEUE, "prefill queue", "#b07c00"},
    {BENCH_PREFILL, "prefill", "#0072b2"},
    {BENCH_RPC, "rpc", "#b5b7ba"},
    {BENCH_TRANSFER_EXPOSED, "transfer (exposed)", "#007f5f"},
    {BENCH_DECODE_QUEUE, "decode queue", "#d55e00"},
    {BENCH_FIRST_STEP, "first step", "#3d8fc4"},
};
#define N_BARS (sizeof bar_stages / sizeof *bar_stages)
#define MAX_BARS 16                                 /* configurations */
#define BAR_NAMES (KEY_ROW * (int)(N_BARS + 1) / 2) /* in two columns */

/* gnuplot takes the name of a tic for a format: a '%' stands twice. */
static void tic_name(struct draft *d, const char *name)
{
    char text[2 * sizeof((struct sweep_config){0}.name)];
    size_t n = 0;
    for (; *name && n < sizeof text - 2; name++) {
        if (*name == '%') text[n++] = '%';
        text[n++] = *name;
    }
    text[n] = 0;
    gnuplot_quote(text, d->gp);
}

/* The bars of the figure of stages: a configuration each. */
struct bars {
    const struct sweep_row *rows[MAX_BARS];
    uint32_t of[MAX_BARS], n; /* of: the configuration */
    double sums[MAX_BARS], most;
};

static void bars_collect(const struct sweep *s, struct bars *ret)
{
    *ret = (struct bars){0};
    for (uint32_t c = 0; c < s->n_configs && ret->n < MAX_BARS; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        double sum = 0;
        for (size_t k = 0; r && k < N_BARS; k++)
            if (r->stages_ms[bar_stages[k].of] > 0) sum += r->stages_ms[bar_stages[k].of];
        if (!(sum > 0) || !isfinite(sum)) continue;
        ret->rows[ret->n] = r, ret->of[ret->n] = c, ret->sums[ret->n++] = sum;
        ret->most = fmax(ret->most, sum);
    }
}

/* One block of data a stage: x, y, x from, x to, y from, y to. */
static void bars_data(const struct bars *b, FILE *gp)
{
    double at[MAX_BARS] = {0};
    for (size_t k = 0; k < N_BARS; k++) {
        fprintf(gp, "$d%zu << EOD\n", k);
        for (uint32_t i = 0; i < b->n; i++) {
            double v = b->rows[i]->stages_ms[bar_stages[k].of], y = b->n - 1 - i;
            if (!(v > 0)) v = 0;
            fprintf(gp, "%.9g %g %.9g %.9g %g %g\n", at[i], y, at[i], at[i] + v, y - 0.3, y + 0.3);
            at[i] += v;
        }
        fputs("EOD\n", gp);
    }
}

/* The sum behind each bar, and the rows of the CSV. */
static void bars_sums(const struct pages *p, const struct bars *b, struct draft *d)
{
    fprintf(d->csv, "config,rate,stage,mean_ms\n");
    for (uint32_t i = 0; i < b->n; i++) {
        fprintf(d->gp,
                "set label '%.4g ms' at first %.9g,first %u offset 0.7,0 textcolor rgb '" TEXT
                "'\n",
                b->sums[i], b->sums[i], b->n - 1 - i);
        for (int k = 0; k < BENCH_N_STAGES; k++)
            fprintf(d->csv, "%s,%.9g,%s,%.6g\n", name_of(p, b->of[i]), b->rows[i]->rate,
                    bench_stage_names[k], b->rows[i]->stages_ms[k]);
    }
}

static void stages(struct pages *p)
{
    struct draft d;
    struct bars b;
    char subtitle[128];
    bars_collect(p->s, &b);
    if (!(b.most > 0) || !draft_open(p, &d, 120 + BAR_NAMES + (int)b.n * 46, "stages",
                                     "Where the time to the second token goes"))
        return;
    snprintf(d.f->caption, sizeof d.f->caption,
             "Mean of each stage at %.3g requests/s per worker. From router queue to rpc it "
             "adds up to TTFT at the "
             "router; transfer, decode queue and first step come after the first token.",
             sweep_reference_rate(p->s));
    caption_absent(p, d.f);
    snprintf(subtitle, sizeof subtitle, "mean of each stage at %.3g requests/s per worker",
             sweep_reference_rate(p->s));
    titles(&d, subtitle, BAR_NAMES);
    fputs("set key maxcols 2\n", d.gp);
    struct axis x = axis_linear("ms", b.most * 1.12); /* room for the sum behind the longest bar */
    axis_write(&d, 'x', &x);
    fprintf(d.gp, "set yrange [-0.6:%g]\nset ytics scale 0 (", b.n - 0.4);
    for (uint32_t i = 0; i < b.n; i++) {
        if (i) fputs(", ", d.gp);
        tic_name(&d, name_of(p, b.of[i]));
        fprintf(d.gp, " %u", b.n - 1 - i);
    }
    fputs(")\nset grid noytics\nset style fill solid 1 noborder\n", d.gp);
    bars_data(&b, d.gp);
    bars_sums(p, &b, &d);
    for (size_t k = 0; k < N_BARS; k++) {
        bool seen = false; /* what nobody would see needs no name */
        for (uint32_t i = 0; i < b.n; i++)
            seen |= b.rows[i]->stages_ms[bar_stages[k].of] > b.most * 0.004;
        if (!seen) continue;
        plot(&d, NULL, (uint32_t)k, "1:2:3:4:5:6", bar_stages[k].name);
        fprintf(d.gp, " with boxxyerror linecolor rgb '%s'", bar_stages[k].colour);
    }
    draft_close(p, &d);
}

static void predicted(struct pages *p)
{
    struct draft d;
    const struct sweep *s = p->s;
    double least = INFINITY, most = 0, px[SWEEP_MAX_POINTS], py[SWEEP_MAX_POINTS];
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        for (uint32_t i = 0; r && i < r->n_points; i++) {
            least = fmin(least, fmin(r->points[i].predicted_ms, r->points[i].observed_ms));
            most = fmax(most, fmax(r->points[i].predicted_ms, r->points[i].observed_ms));
        }
    }
    if (!(most > 0) || !draft_open(p, &d, HEIGHT + KEY_ROW * (int)(s->n_configs + 1), "predicted",
                                   "TTFT as the router predicted it, and as it was"))
        return;
    snprintf(
        d.f->caption, sizeof d.f->caption,
        "One point a request. On the diagonal the prediction was exact, above it the request took "
        "longer. Coverage "
        "is the share that came no later than predicted; the error is the mean of all, relative.");
    chart(&d, "one point a request; the diagonal is an exact prediction",
          axis_log("predicted TTFT (ms)", least, most),
          axis_log("observed TTFT at the router (ms)", least, most));
    fputs("set key maxcols 1\n", d.gp);
    fprintf(d.csv, "config,rate,predicted_ms,observed_ms\n");
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        for (uint32_t i = 0; r && i < r->n_points; i++) {
            px[i] = r->points[i].predicted_ms, py[i] = r->points[i].observed_ms;
            fprintf(d.csv, "%s,%.9g,%.6g,%.6g\n", name_of(p, c), r->rate, px[i], py[i]);
        }
        if (r && r->n_points) data(&d, c, (const double *const[]){px, py}, 2, r->n_points);
    }
    plot(&d, "x", 0, NULL, "exact");
    style_line(&d, MUTED, 1.2, "(10,6)");
    for (uint32_t c = 0; c < s->n_configs; c++) {
        const struct sweep_row *r = sweep_reference_row(s, c);
        char name[128];
        if (!r || !r->n_points) continue;
        int k = snprintf(name, sizeof name, "%s", name_of(p, c));
        if (!isnan(r->predicted.coverage))
            k += snprintf(name + k, sizeof name - (size_t)k, ": coverage %.0f %%",
                          100 * r->predicted.coverage);
        if (!isnan(r->predicted.mape))
            snprintf(name + k, sizeof name - (size_t)k, ", error %.0f %%", 100 * r->predicted.mape);
        plot(&d, NULL, c, "1:2", name);
        fprintf(d.gp, " with points linecolor rgb '#60%s' pointtype '%s' pointsize 0.7",
                colour_of(c) + 1, markers[c % N_MARKERS]);
    }
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

/* The tics of one axis of the heat map: a cell for each number of workers. */
static void cells_axis(struct draft *d, char name, const char *label, const uint32_t *values,
                       size_t n)
{
    fprintf(d->gp,
            "set %crange [-0.5:%g]\nset %clabel '%s' textcolor rgb '" TEXT
            "'\nset %ctics scale 0 (",
            name, (double)n - 0.5, name, label, name);
    for (size_t i = 0; i < n; i++) fprintf(d->gp, "%s'%u' %zu", i ? ", " : "", values[i], i);
    fputs(")\n", d->gp);
}

/* Of white and the first series' colour, the share of the latter. */
static unsigned shade(double share)
{
    static const double to[] = {0x00, 0x72, 0xb2};
    unsigned rgb = 0;
    for (int k = 0; k < 3; k++) rgb = rgb << 8 | (unsigned)lround(255 + (to[k] - 255) * share);
    return rgb;
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
    if (!(most > 0) || !isfinite(most) ||
        !draft_open(p, &d, 120 + (int)fmin(56.0 * (double)n_d, 340), id, title))
        return;
    snprintf(d.f->caption, sizeof d.f->caption,
             "Goodput per worker of each shape that was run, requests/s, and in brackets the whole "
             "cluster's. Darker is "
             "more.");
    titles(&d, "requests/s per worker (whole cluster)", 0);
    cells_axis(&d, 'x', "prefill workers", ps, n_p);
    cells_axis(&d, 'y', "decode workers", ds, n_d);
    fputs("unset grid\nunset key\nunset border\n", d.gp);
    fprintf(d.csv, "config,prefill,decode,goodput,goodput_per_worker\n");
    for (uint32_t k = 0; k < s->n_configs; k++) {
        const struct sweep_config *g = &s->configs[k];
        if (strcmp(g->mode, mode) != 0 || !isfinite(g->goodput)) continue;
        size_t x = 0, y = 0;
        while (x < n_p && ps[x] != g->prefill) x++;
        while (y < n_d && ds[y] != g->decode) y++;
        double each = g->goodput / workers(p, k);
        fprintf(
            d.gp,
            "set object rectangle from %g,%g to %g,%g behind fillcolor rgb 0x%06x linewidth 0\n",
            (double)x - 0.48, (double)y - 0.46, (double)x + 0.48, (double)y + 0.46,
            shade(0.06 + 0.5 * each / most));
        fprintf(d.gp, "set label '%.3g%s (%.3g)' at %zu,%zu center textcolor rgb '" TEXT "'\n",
                each, each >= most && sweep_has_winner(s) ? " best" : "", g->goodput, x, y);
        fprintf(d.csv, "%s,%u,%u,%.9g,%.9g\n", g->name, g->prefill, g->decode, g->goodput, each);
    }
    plot(&d, "NaN", 0, NULL, NULL);
    draft_close(p, &d);
}

/* --- all of them ------------------------------------------------------------------------------ */

size_t figures_make(const struct sweep *s, struct figure *ret_figures)
{
    struct pages p = {.s = s,
                      .figures = ret_figures,
                      .pools = calloc(s->n_configs ? s->n_configs : 1, sizeof *p.pools),
                      .n_pools = calloc(s->n_configs + 1, sizeof *p.n_pools),
                      .lost = calloc(s->n_configs + 1, sizeof *p.lost),
                      .n_lost = calloc(s->n_configs + 1, sizeof *p.n_lost)};
    bool has_memory = p.pools && p.n_pools && p.lost && p.n_lost;
    for (uint32_t c = 0; has_memory && c < s->n_configs; c++) {
        p.n_pools[c] = sweep_pool(s, c, p.pools[c], MAX_POOLS);
        p.n_lost[c] = sweep_lost(s, c, p.lost[c], MAX_LOST);
    }
    if (has_memory) {
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
    free(p.lost);
    free(p.n_lost);
    return p.n;
}
