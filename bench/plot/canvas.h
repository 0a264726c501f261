/* canvas.h - a drawing as a list of marks, written as SVG (text, classes for colours, so that it
 * follows light and dark) or as PNG through cairo.
 *
 * Coordinates are pixels, y down. Colours are roles. The series' colours are Okabe and Ito's,
 * which people with colour-blindness tell apart; no chart relies on them alone. Marks are
 * appended; out of memory is remembered and told by the writers. One thread. */
#ifndef BENCH_PLOT_CANVAS_H
#define BENCH_PLOT_CANVAS_H

#include <stdbool.h>
#include <stdio.h>

#include "common/base/status.h"

/* INK_SERIES + i: series i, in turns */
enum canvas_ink { INK_TEXT, INK_MUTED, INK_GRID, INK_PAPER, INK_LIMIT, INK_SERIES };
#define CANVAS_N_SERIES 7
enum canvas_anchor { ANCHOR_START, ANCHOR_MIDDLE, ANCHOR_END };
enum canvas_dash { DASH_NONE, DASH_LONG, DASH_SHORT };

struct canvas;

struct canvas *canvas_create(int width, int height); /* NULL = no memory */
void canvas_destroy(struct canvas *c);

void canvas_line(struct canvas *c, double x0, double y0, double x1, double y1, int ink,
                 double width, enum canvas_dash dash);
void canvas_polyline(struct canvas *c, const double *x, const double *y, size_t n, int ink,
                     double width, enum canvas_dash dash);
void canvas_rect(struct canvas *c, double x, double y, double w, double h, int ink, double opacity);
/* One of CANVAS_N_SHAPES shapes, in turns, so that series differ without their colours. */
#define CANVAS_N_SHAPES 4
void canvas_marker(struct canvas *c, int shape, double x, double y, double radius, int ink,
                   double opacity);
void canvas_text(struct canvas *c, double x, double y, enum canvas_anchor anchor, double size,
                 bool bold, int ink, const char *format, ...) __attribute__((format(printf, 8, 9)));
/* centred, turned to read upwards */
void canvas_text_up(struct canvas *c, double x, double y, double size, int ink, const char *text);
/* Roughly: SVG does not know its reader's fonts. */
double canvas_text_width(const char *text, double size);

/* alone: a document with its own style sheet; else an element for a page that has canvas_style()
 * in it. `title` is for screen readers. */
void canvas_write_svg(const struct canvas *c, const char *title, bool alone, FILE *out);
void canvas_style(FILE *out);
void canvas_escape(const char *text, FILE *out); /* for XML and HTML */
/* scale: pixels for each of the canvas. TD_ERR_UNSUPPORTED: built without cairo. */
td_status canvas_write_png(const struct canvas *c, double scale, const char *path,
                           struct td_err *err);
bool canvas_has_png(void);

#endif
