/* plot.c - tandem bench plot: the files of plot.h from what a sweep wrote. */
#include "bench/plot/plot.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "bench/plot/gnuplot.h"
#include "bench/plot/html.h"
#include "common/base/options.h"
#include "common/base/say.h"

int td_bench_plot(int argc, char **argv);

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

/* NAME.csv, and what gnuplot draws of it. */
static td_status figure_write(struct figure *g, const char *dir, struct td_err *err)
{
    char path[1024], png[1024];
    FILE *f;
    td_status s = open_file(dir, g->id, ".csv", path, sizeof path, &f, err);
    if (s) return s;
    fputs(g->csv, f);
    if ((s = close_file(f, path, err))) return s;
    snprintf(path, sizeof path, "%s/%s.svg", dir, g->id);
    snprintf(png, sizeof png, "%s/%s.png", dir, g->id);
    s = gnuplot_draw(g->script, g->width, g->height, path, png, err);
    if (!s) s = gnuplot_read_marks(path, &g->marks, err);
    return s && s != TD_ERR_UNSUPPORTED ? td_err_prefix(err, "picture %s", g->id) : s;
}

td_status plot_all(const struct sweep *s, const char *dir, FILE *out, struct td_err *err)
{
    static struct figure figures[FIGURES_MAX];
    char path[1024];
    FILE *f;
    struct td_err failed = {0}, later = {0}; /* the first picture that could not be drawn; the
                                                others follow it */
    bool has_gnuplot = true;
    if (mkdir(dir, 0755) && errno != EEXIST)
        return td_fail(err, TD_ERR_IO, "%s: %s", dir, strerror(errno));
    size_t n = figures_make(s, figures);
    for (size_t i = 0; i < n; i++) {
        td_status st = figure_write(&figures[i], dir, failed.code ? &later : &failed);
        if (st != TD_ERR_UNSUPPORTED) continue;
        has_gnuplot = false;
        failed = (struct td_err){0};
    }
    td_status st = open_file(dir, "report", ".html", path, sizeof path, &f, err);
    if (!st) {
        html_write(s, figures, n, f);
        st = close_file(f, path, err);
    }
    for (size_t i = 0; i < n; i++) figure_free(&figures[i]);
    if (!st && out) td_say(out, 2, "report: %s\n", path);
    if (!st && out && has_gnuplot)
        td_say(out, 2, "plots: %zu in %s, each as SVG, PNG and CSV\n", n, dir);
    if (!st && out && !has_gnuplot)
        td_say(out, 2,
               "plots: %zu in %s as CSV alone: gnuplot is not installed (package gnuplot-nox)\n", n,
               dir);
    if (!st && failed.code) st = td_fail(err, failed.code, "%s", failed.msg);
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
