/* plot.h - pictures of a sweep: each as NAME.svg, NAME.png and NAME.csv, and all of them in one
 * report.html that needs nothing beside it. gnuplot draws them; without it there are the CSV
 * files and a report of tables. */
#ifndef BENCH_PLOT_PLOT_H
#define BENCH_PLOT_PLOT_H

#include <stdio.h>

#include "bench/sweep/sweep.h"

/* Into a folder, which is made when missing. Says on `out` (may be NULL) where the report is,
 * and when gnuplot is missing. TD_ERR_IO, TD_ERR_DEADLINE: a picture could not be drawn; the
 * report has the others. */
td_status plot_all(const struct sweep *s, const char *dir, FILE *out, struct td_err *err);

#endif
