/* gnuplot.h - pictures drawn by gnuplot, the distribution's program (package gnuplot-nox).
 *
 * A picture is a script: the caller writes axes and data, and this file chooses the terminals,
 * starts gnuplot and reads back what it drew. One thread. */
#ifndef BENCH_PLOT_GNUPLOT_H
#define BENCH_PLOT_GNUPLOT_H

#include <stdio.h>

#include "common/base/status.h"

#define GNUPLOT_FONT "sans-serif"

/* Writes text as a gnuplot string between single quotes, in which gnuplot neither expands
 * variables nor starts commands. A control character becomes '?': a newline would end the
 * string. */
void gnuplot_quote(const char *text, FILE *out);

/* Draws one script twice: width x height pixels as SVG, and twice as many each way as PNG.
 * Starts gnuplot and waits for its end, at most 30 s (a picture takes 0.1 s; a machine that is
 * 300 times slower is taken for one that hangs). TD_ERR_UNSUPPORTED: gnuplot is not installed.
 * TD_ERR_DEADLINE. TD_ERR_IO: what gnuplot said, its first line. */
td_status gnuplot_draw(const char *script, int width, int height, const char *svg_path,
                       const char *png_path, struct td_err *err);

/* The marks of an SVG file that gnuplot_draw made, without the head: an element to stand inside
 * <svg> on a page of several pictures, with no id and no link. The caller frees it. TD_ERR_IO,
 * TD_ERR_INVALID, TD_ERR_NOMEM. */
td_status gnuplot_read_marks(const char *svg_path, char **ret_marks, struct td_err *err);

#endif
