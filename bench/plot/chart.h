/* chart.h - two axes with ticks people read, a title, lines with their names beside them. Draws
 * on a canvas. */
#ifndef BENCH_PLOT_CHART_H
#define BENCH_PLOT_CHART_H

#include "bench/plot/canvas.h"

#define CHART_WIDTH 560
#define CHART_HEIGHT 360
#define CHART_MAX_LABELS 24

struct chart_axis {
    const char *label; /* with its unit */
    double min, max;   /* log: both > 0 */
    bool log, percent; /* percent: of shares */
};

struct chart {
    struct canvas *canvas; /* borrowed */
    struct chart_axis x, y;
    double left, right, top, bottom; /* of the plane */
    struct chart_name {
        char text[64];
        double y, from_x, from_y;
        int ink;
    } labels[CHART_MAX_LABELS];
    int n_labels;
};

/* Draws on the canvas, which stays its owner's. right_margin: room for names beside the lines. */
void chart_open(struct chart *ch, struct canvas *canvas, const char *title, const char *subtitle,
                struct chart_axis x, struct chart_axis y, double right_margin);
/* Leaves out points that are NAN (the line breaks there) and cuts at the plane's edge. */
void chart_line(struct chart *ch, const double *x, const double *y, size_t n, int ink, double width,
                enum canvas_dash dash);
void chart_points(struct chart *ch, const double *x, const double *y, size_t n, int shape, int ink,
                  double radius, double opacity);
/* intervals */
void chart_bars(struct chart *ch, const double *x, const double *lo, const double *hi, size_t n,
                int ink);
/* A limit: a dashed line across, named at its right like a line (y) or at its foot (x). */
void chart_limit_y(struct chart *ch, double v, const char *name);
void chart_limit_x(struct chart *ch, double v, const char *name);
/* A name at the right for a line that ends at (x, y), with a thin leader when that is far. Those
 * that would cover each other are moved apart by chart_close. */
void chart_label(struct chart *ch, double x, double y, int ink, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
void chart_close(struct chart *ch);

/* The least range of 1, 2, 5 x 10^k that holds [0 or min, max]. */
struct chart_axis chart_axis_linear(const char *label, double max);
struct chart_axis chart_axis_log(const char *label, double min, double max);

#endif
