/* html.h - the report of a sweep as one page that needs nothing beside it: no script, no font,
 * no picture from elsewhere. */
#ifndef BENCH_PLOT_HTML_H
#define BENCH_PLOT_HTML_H

#include "bench/plot/figures.h"

/* A figure without marks is left out of the page. */
void html_write(const struct sweep *s, const struct figure *figures, size_t n_figures, FILE *out);

#endif
