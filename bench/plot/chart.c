/* chart.c - see chart.h. */
#include "bench/plot/chart.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define SIZE 12.0 /* of text */
#define LABEL_GAP 15.0

/* "0.05", "12", "1.5k". */
static void chart_number(double v, char *text, size_t bytes)
{
    if (fabs(v) >= 10000)
        snprintf(text, bytes, "%.4gk", v / 1000);
    else
        snprintf(text, bytes, "%.4g", v);
}

/* 1, 2 or 5 times a power of ten, at least v. */
static double nice_above(double v)
{
    double base = pow(10, floor(log10(v)));
    return v <= base * (1 + 1e-9)       ? base
           : v <= 2 * base * (1 + 1e-9) ? 2 * base
           : v <= 5 * base * (1 + 1e-9) ? 5 * base
                                        : 10 * base;
}

static double step_of(double span) { return nice_above(span / 6); }

struct chart_axis chart_axis_linear(const char *label, double max)
{
    if (!(max > 0) || !isfinite(max)) max = 1;
    double step = step_of(max);
    return (struct chart_axis){.label = label, .min = 0, .max = ceil(max / step - 1e-9) * step};
}

struct chart_axis chart_axis_log(const char *label, double min, double max)
{
    if (!(min > 0) || !isfinite(max) || max < min) min = 1, max = 10;
    double lo = 1 / nice_above(1 / min), hi = nice_above(max);
    return (struct chart_axis){
        .label = label, .min = lo, .max = hi > lo ? hi : lo * 10, .log = true};
}

static double place(const struct chart_axis *a, double v)
{
    return a->log ? log(v / a->min) / log(a->max / a->min) : (v - a->min) / (a->max - a->min);
}

static double chart_x(const struct chart *ch, double v)
{
    return ch->left + place(&ch->x, v) * (ch->right - ch->left);
}
static double chart_y(const struct chart *ch, double v)
{
    return ch->bottom - place(&ch->y, v) * (ch->bottom - ch->top);
}

static void tick(struct chart *ch, const struct chart_axis *a, double v, bool is_x, bool named)
{
    char text[32];
    if (a->percent)
        snprintf(text, sizeof text, "%.4g %%", v * 100);
    else
        chart_number(v, text, sizeof text);
    if (is_x) {
        double x = chart_x(ch, v);
        canvas_line(ch->canvas, x, ch->top, x, ch->bottom, INK_GRID, named ? 0.8 : 0.4, DASH_NONE);
        if (named)
            canvas_text(ch->canvas, x, ch->bottom + 17, ANCHOR_MIDDLE, SIZE, false, INK_MUTED, "%s",
                        text);
    } else {
        double y = chart_y(ch, v);
        canvas_line(ch->canvas, ch->left, y, ch->right, y, INK_GRID, named ? 0.8 : 0.4, DASH_NONE);
        if (named)
            canvas_text(ch->canvas, ch->left - 7, y + 4, ANCHOR_END, SIZE, false, INK_MUTED, "%s",
                        text);
    }
}

static void ticks(struct chart *ch, const struct chart_axis *a, bool is_x)
{
    if (!a->log) {
        double step = step_of(a->max - a->min);
        for (double v = ceil(a->min / step - 1e-9) * step; v <= a->max + step * 1e-6; v += step)
            tick(ch, a, fabs(v) < step * 1e-9 ? 0 : v, is_x, true);
        return;
    }
    double decades = log10(a->max / a->min);
    for (double base = pow(10, floor(log10(a->min) + 1e-9)); base <= a->max * (1 + 1e-9);
         base *= 10)
        for (int m = 1; m < 10; m++) {
            double v = base * m;
            if (v < a->min * (1 - 1e-9) || v > a->max * (1 + 1e-9)) continue;
            bool named = m == 1 || (decades < 2.6 && (m == 2 || m == 5)) ||
                         (decades < 0.8 && m != 7 && m != 9);
            if (named || decades < 2.6) tick(ch, a, v, is_x, named);
        }
}

void chart_open(struct chart *ch, struct canvas *canvas, const char *title, const char *subtitle,
                struct chart_axis x, struct chart_axis y, double right_margin)
{
    *ch = (struct chart){.canvas = canvas,
                         .x = x,
                         .y = y,
                         .left = 62,
                         .right = CHART_WIDTH - right_margin,
                         .top = 58,
                         .bottom = CHART_HEIGHT - 46};
    canvas_text(canvas, 12, 22, ANCHOR_START, 15, true, INK_TEXT, "%s", title);
    if (subtitle[0])
        canvas_text(canvas, 12, 40, ANCHOR_START, 11.5, false, INK_MUTED, "%s", subtitle);
    ticks(ch, &ch->x, true);
    ticks(ch, &ch->y, false);
    canvas_line(canvas, ch->left, ch->bottom, ch->right, ch->bottom, INK_MUTED, 1, DASH_NONE);
    canvas_text(canvas, (ch->left + ch->right) / 2, CHART_HEIGHT - 10, ANCHOR_MIDDLE, SIZE, false,
                INK_TEXT, "%s", x.label);
    canvas_text_up(canvas, 14, (ch->top + ch->bottom) / 2, SIZE, INK_TEXT, y.label);
}

/* The part of a segment within [min, max] of one axis, as shares t0..t1 of it. Positions are in
 * pixels. */
static bool cut(double a, double b, double lo, double hi, double *t0, double *t1)
{
    double d = b - a;
    if (d == 0) return a >= lo && a <= hi;
    double in = (lo - a) / d, out = (hi - a) / d;
    if (in > out) {
        double t = in;
        in = out, out = t;
    }
    *t0 = fmax(*t0, in);
    *t1 = fmin(*t1, out);
    return *t0 < *t1;
}

static bool known(const struct chart *ch, double x, double y)
{
    return isfinite(x) && isfinite(y) && (!ch->x.log || x > 0) && (!ch->y.log || y > 0);
}

void chart_line(struct chart *ch, const double *x, const double *y, size_t n, int ink, double width,
                enum canvas_dash dash)
{
    double *px = malloc(2 * (n + 1) * sizeof *px), *py = px + n + 1;
    size_t k = 0;
    if (!px) return;
    for (size_t i = 0; i + 1 < n; i++) {
        double t0 = 0, t1 = 1;
        bool both = known(ch, x[i], y[i]) && known(ch, x[i + 1], y[i + 1]);
        double x0 = 0, y0 = 0, x1 = 0, y1 = 0;
        if (both) {
            x0 = chart_x(ch, x[i]), y0 = chart_y(ch, y[i]), x1 = chart_x(ch, x[i + 1]),
            y1 = chart_y(ch, y[i + 1]);
            both = cut(x0, x1, ch->left - 0.01, ch->right + 0.01, &t0, &t1) &&
                   cut(y0, y1, ch->top - 0.01, ch->bottom + 0.01, &t0, &t1);
        }
        if (!both || t0 > 0) { /* the line so far ends here */
            canvas_polyline(ch->canvas, px, py, k, ink, width, dash);
            k = 0;
        }
        if (!both) continue;
        if (k == 0) px[k] = x0 + t0 * (x1 - x0), py[k++] = y0 + t0 * (y1 - y0);
        px[k] = x0 + t1 * (x1 - x0), py[k++] = y0 + t1 * (y1 - y0);
    }
    canvas_polyline(ch->canvas, px, py, k, ink, width, dash);
    free(px);
}

static bool inside(const struct chart *ch, double x, double y)
{
    if (!known(ch, x, y)) return false;
    double px = chart_x(ch, x), py = chart_y(ch, y);
    return px >= ch->left - 0.5 && px <= ch->right + 0.5 && py >= ch->top - 0.5 &&
           py <= ch->bottom + 0.5;
}

void chart_points(struct chart *ch, const double *x, const double *y, size_t n, int shape, int ink,
                  double radius, double opacity)
{
    for (size_t i = 0; i < n; i++)
        if (inside(ch, x[i], y[i]))
            canvas_marker(ch->canvas, shape, chart_x(ch, x[i]), chart_y(ch, y[i]), radius, ink,
                          opacity);
}

void chart_bars(struct chart *ch, const double *x, const double *lo, const double *hi, size_t n,
                int ink)
{
    for (size_t i = 0; i < n; i++) {
        if (!known(ch, x[i], lo[i]) || !known(ch, x[i], hi[i])) continue;
        double at = chart_x(ch, x[i]);
        if (at >= ch->left && at <= ch->right)
            canvas_line(ch->canvas, at, fmin(ch->bottom, chart_y(ch, lo[i])), at,
                        fmax(ch->top, chart_y(ch, hi[i])), ink, 1, DASH_NONE);
    }
}

void chart_limit_y(struct chart *ch, double v, const char *name)
{
    if (!inside(ch, ch->x.max, v)) return;
    double y = chart_y(ch, v);
    canvas_line(ch->canvas, ch->left, y, ch->right, y, INK_LIMIT, 1.2, DASH_LONG);
    chart_label(ch, ch->x.max, v, INK_LIMIT, "%s", name);
}

void chart_limit_x(struct chart *ch, double v, const char *name)
{
    if (!inside(ch, v, ch->y.max)) return;
    double x = chart_x(ch, v);
    bool flip = x + 8 + canvas_text_width(name, 11) > ch->right;
    canvas_line(ch->canvas, x, ch->top, x, ch->bottom, INK_LIMIT, 1.2, DASH_LONG);
    canvas_text(ch->canvas, flip ? x - 5 : x + 5, ch->bottom - 8, flip ? ANCHOR_END : ANCHOR_START,
                11, false, INK_LIMIT, "%s", name);
}

void chart_label(struct chart *ch, double x, double y, int ink, const char *format, ...)
{
    if (ch->n_labels == CHART_MAX_LABELS || !known(ch, x, y)) return;
    va_list args;
    va_start(args, format);
    vsnprintf(ch->labels[ch->n_labels].text, sizeof ch->labels[0].text, format, args);
    va_end(args);
    ch->labels[ch->n_labels].from_x = fmin(chart_x(ch, x), ch->right);
    ch->labels[ch->n_labels].from_y = fmin(fmax(chart_y(ch, y), ch->top), ch->bottom);
    ch->labels[ch->n_labels].y = fmin(fmax(chart_y(ch, y), ch->top), ch->bottom);
    ch->labels[ch->n_labels++].ink = ink;
}

void chart_close(struct chart *ch)
{
    for (int i = 1; i < ch->n_labels; i++) /* by height; there are few */
        for (int k = i; k > 0 && ch->labels[k].y < ch->labels[k - 1].y; k--) {
            struct chart_name t = ch->labels[k];
            ch->labels[k] = ch->labels[k - 1];
            ch->labels[k - 1] = t;
        }
    for (int i = 1; i < ch->n_labels; i++)
        ch->labels[i].y = fmax(ch->labels[i].y, ch->labels[i - 1].y + LABEL_GAP);
    double limit = ch->bottom;
    for (int i = ch->n_labels - 1; i >= 0; i--, limit -= LABEL_GAP)
        ch->labels[i].y = fmin(ch->labels[i].y, limit);
    for (int i = 0; i < ch->n_labels; i++) {
        const struct chart_name *l = &ch->labels[i];
        if (l->from_x < ch->right - 12)
            canvas_line(ch->canvas, l->from_x + 6, l->from_y, ch->right + 5, l->y, l->ink, 0.8,
                        DASH_SHORT);
    }
    for (int i = 0; i < ch->n_labels; i++)
        canvas_text(ch->canvas, ch->right + 8, ch->labels[i].y + 4, ANCHOR_START, SIZE, true,
                    ch->labels[i].ink, "%s", ch->labels[i].text);
    ch->n_labels = 0;
}
