/* figures.h - the pictures of a sweep: what is on each, and its numbers as CSV. */
#ifndef BENCH_PLOT_FIGURES_H
#define BENCH_PLOT_FIGURES_H

#include "bench/plot/canvas.h"
#include "bench/sweep/sweep.h"

#define FIGURES_MAX 32

struct figure {
    char id[80], title[128], caption[400]; /* id: of its files */
    struct canvas *canvas;
    char *csv;
};

/* As many as the sweep has numbers for, at most FIGURES_MAX. Each is freed by figure_free. */
size_t figures_make(const struct sweep *s, struct figure *ret_figures);
void figure_free(struct figure *f);

#endif
