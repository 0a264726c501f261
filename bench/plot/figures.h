/* figures.h - the pictures of a sweep: what is on each as a gnuplot script, and its numbers as
 * CSV. Pure: nothing is drawn here. */
#ifndef BENCH_PLOT_FIGURES_H
#define BENCH_PLOT_FIGURES_H

#include "bench/sweep/sweep.h"

#define FIGURES_MAX 32

struct figure {
    char id[80], title[128], caption[900]; /* id: of its files */
    int width, height;                     /* pixels */
    char *script;                          /* for gnuplot_draw; owned */
    char *csv;                             /* owned */
    char *marks;                           /* of gnuplot_read_marks; NULL = not drawn; owned */
};

/* As many as the sweep has numbers for, at most FIGURES_MAX. Each is freed by figure_free. */
size_t figures_make(const struct sweep *s, struct figure *ret_figures);
void figure_free(struct figure *f);

#endif
