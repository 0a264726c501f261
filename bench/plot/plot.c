/* plot.c - tandem bench plot: the files of plot.h from what a sweep wrote. */
#include "bench/plot/plot.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "bench/plot/html.h"
#include "common/base/options.h"

int td_bench_plot(int argc, char **argv);

#define PNG_SCALE 2.0

static td_status open_file(const char *dir, const char *name, const char *suffix, char *path,
                           size_t path_bytes, FILE **ret, struct td_err *err)
{
    snprintf(path, path_bytes, "%s/%s%s", dir, name, suffix);
    *ret = fopen(path, "we");
    return *ret ? TD_OK : td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(errno));
}

static td_status close_file(FILE *f, const char *path, struct td_err *err)
{
    bool failed = ferror(f);
    int saved = errno;
    if (fclose(f) && !failed) failed = true, saved = errno;
    return failed ? td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(saved)) : TD_OK;
}

static td_status figure_write(const struct figure *g, const char *dir, struct td_err *err)
{
    char path[1024];
    FILE *f;
    td_status s = open_file(dir, g->id, ".svg", path, sizeof path, &f, err);
    if (s) return s;
    canvas_write_svg(g->canvas, g->title, true, f);
    if ((s = close_file(f, path, err)) ||
        (s = open_file(dir, g->id, ".csv", path, sizeof path, &f, err)))
        return s;
    fputs(g->csv, f);
    if ((s = close_file(f, path, err)) || !canvas_has_png()) return s;
    snprintf(path, sizeof path, "%s/%s.png", dir, g->id);
    return canvas_write_png(g->canvas, PNG_SCALE, path, err);
}

td_status plot_all(const struct sweep *s, const char *dir, FILE *out, struct td_err *err)
{
    static struct figure figures[FIGURES_MAX];
    char path[1024];
    FILE *f;
    if (mkdir(dir, 0755) && errno != EEXIST)
        return td_fail(err, TD_ERR_IO, "%s: %s", dir, strerror(errno));
    size_t n = figures_make(s, figures);
    td_status st = TD_OK;
    for (size_t i = 0; i < n && !st; i++) st = figure_write(&figures[i], dir, err);
    if (!st) st = open_file(dir, "report", ".html", path, sizeof path, &f, err);
    if (!st) {
        html_write(s, figures, n, f);
        st = close_file(f, path, err);
    }
    for (size_t i = 0; i < n; i++) figure_free(&figures[i]);
    if (!st && out)
        fprintf(out, "report: %s\nplots: %zu in %s, each as SVG, CSV%s\n", path, n, dir,
                canvas_has_png() ? " and PNG" : "; no PNG: built without cairo (libcairo2-dev)");
    return st;
}

struct options {
    const char *out;
};
// clang-format off
static const struct td_option table[] = {
    {"out", TD_OPT_STR, "plots", 0, 0, NULL, offsetof(struct options, out), "folder for the files"},
    {0},
};
// clang-format on

int td_bench_plot(int argc, char **argv)
{
    struct options o = {0};
    struct td_err err = {0};
    struct sweep s = {0};
    const char *files[1];
    size_t n = 0;
    td_status st = td_options_load(table, &o, "tandem bench plot",
                                   "Plots and a report of a sweep: tandem bench plot sweep.json "
                                   "--out DIR (a sweep.csv gives what it has)",
                                   argc, argv, files, 1, &n, &err);
    if (!st && n != 1) st = td_fail(&err, TD_ERR_INVALID, "give one sweep.json or sweep.csv");
    if (!st) st = sweep_read(files[0], &s, &err);
    if (!st) st = plot_all(&s, o.out, stdout, &err);
    sweep_free(&s);
    return st ? td_die("tandem bench plot", &err) : 0;
}
