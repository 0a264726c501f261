/* plot.h - pictures of a sweep: each as NAME.svg, NAME.png (where cairo was there to build with)
 * and NAME.csv, and all of them in one report.html that needs nothing beside it. */
#ifndef BENCH_PLOT_PLOT_H
#define BENCH_PLOT_PLOT_H

#include <stdio.h>

#include "bench/sweep/sweep.h"

/* Into a folder, which is made when missing; says on `out` (may be NULL) where the report is.
 * TD_ERR_IO. */
td_status plot_all(const struct sweep *s, const char *dir, FILE *out, struct td_err *err);

#endif
