/* canvas.c - see canvas.h. */
#include "bench/plot/canvas.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#ifdef TD_HAVE_CAIRO
#include <cairo.h>
#endif

#define FONT "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"

enum mark_kind { MARK_POLYLINE, MARK_RECT, MARK_MARKER, MARK_TEXT };

struct mark {
    enum mark_kind kind;
    int ink, shape;
    double x, y, w, h; /* text: w is its size */
    double width, opacity;
    enum canvas_dash dash;
    enum canvas_anchor anchor;
    bool bold, up;
    double *points; /* x and y in turns; owned */
    size_t n_points;
    char *text; /* owned */
};

struct canvas {
    int width, height;
    struct mark *marks;
    size_t n, room;
    bool broken; /* out of memory */
};

/* Light, dark. */
static const char *const inks[INK_SERIES + CANVAS_N_SERIES][2] = {
    [INK_TEXT] = {"#1c1f24", "#e8e8e6"},       [INK_MUTED] = {"#5a6069", "#a5abb3"},
    [INK_GRID] = {"#dfe2e6", "#3a3f46"},       [INK_PAPER] = {"#ffffff", "#17191c"},
    [INK_LIMIT] = {"#8a2b2b", "#ff9d8a"},      [INK_SERIES + 0] = {"#0072b2", "#4aa8e0"},
    [INK_SERIES + 1] = {"#d55e00", "#f0803c"}, [INK_SERIES + 2] = {"#007f5f", "#2fbf93"},
    [INK_SERIES + 3] = {"#a8528a", "#dd8fbf"}, [INK_SERIES + 4] = {"#b07c00", "#e6b43c"},
    [INK_SERIES + 5] = {"#3d8fc4", "#8ccbf2"}, [INK_SERIES + 6] = {"#6b6f76", "#b4b8be"},
};

static int ink_of(int ink)
{
    return ink < INK_SERIES ? ink : INK_SERIES + (ink - INK_SERIES) % CANVAS_N_SERIES;
}

struct canvas *canvas_create(int width, int height)
{
    struct canvas *c = calloc(1, sizeof *c);
    if (c) c->width = width, c->height = height;
    return c;
}

void canvas_destroy(struct canvas *c)
{
    if (!c) return;
    for (size_t i = 0; i < c->n; i++) {
        free(c->marks[i].points);
        free(c->marks[i].text);
    }
    free(c->marks);
    free(c);
}

static struct mark *add(struct canvas *c, enum mark_kind kind, int ink)
{
    static struct mark nowhere;
    if (c->n == c->room) {
        size_t room = c->room ? c->room * 2 : 64;
        struct mark *marks = realloc(c->marks, room * sizeof *marks);
        if (!marks) {
            c->broken = true;
            return &nowhere;
        }
        c->marks = marks;
        c->room = room;
    }
    struct mark *m = &c->marks[c->n++];
    *m = (struct mark){.kind = kind, .ink = ink_of(ink), .opacity = 1};
    return m;
}

void canvas_polyline(struct canvas *c, const double *x, const double *y, size_t n, int ink,
                     double width, enum canvas_dash dash)
{
    if (n < 2) return;
    double *points = malloc(2 * n * sizeof *points);
    if (!points) {
        c->broken = true;
        return;
    }
    for (size_t i = 0; i < n; i++) points[2 * i] = x[i], points[2 * i + 1] = y[i];
    struct mark *m = add(c, MARK_POLYLINE, ink);
    if (c->broken) {
        free(points);
        return;
    }
    m->points = points;
    m->n_points = n;
    m->width = width;
    m->dash = dash;
}

void canvas_line(struct canvas *c, double x0, double y0, double x1, double y1, int ink,
                 double width, enum canvas_dash dash)
{
    canvas_polyline(c, (double[]){x0, x1}, (double[]){y0, y1}, 2, ink, width, dash);
}

void canvas_rect(struct canvas *c, double x, double y, double w, double h, int ink, double opacity)
{
    struct mark *m = add(c, MARK_RECT, ink);
    m->x = x, m->y = y, m->w = w, m->h = h, m->opacity = opacity;
}

void canvas_marker(struct canvas *c, int shape, double x, double y, double radius, int ink,
                   double opacity)
{
    struct mark *m = add(c, MARK_MARKER, ink);
    m->shape = shape % CANVAS_N_SHAPES, m->x = x, m->y = y, m->w = radius, m->opacity = opacity;
}

void canvas_text(struct canvas *c, double x, double y, enum canvas_anchor anchor, double size,
                 bool bold, int ink, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    struct mark *m = add(c, MARK_TEXT, ink);
    if (c->broken) return;
    m->x = x, m->y = y, m->w = size, m->anchor = anchor, m->bold = bold, m->text = strdup(text);
    if (!m->text) c->broken = true, c->n--;
}

void canvas_text_up(struct canvas *c, double x, double y, double size, int ink, const char *text)
{
    canvas_text(c, x, y, ANCHOR_MIDDLE, size, false, ink, "%s", text);
    if (!c->broken) c->marks[c->n - 1].up = true;
}

double canvas_text_width(const char *text, double size)
{
    double w = 0;
    for (; *text; text++)
        w += ((unsigned char)*text & 0xc0) == 0x80 ? 0
             : strchr("ijl.,:;|!'()[] ft1", *text) ? 0.40
             : strchr("mwMW@%", *text)             ? 0.92
                                                   : 0.62;
    return w * size;
}

/* --- SVG -------------------------------------------------------------------------------------- */

void canvas_escape(const char *text, FILE *out)
{
    for (; *text; text++) {
        if (*text == '<')
            fputs("&lt;", out);
        else if (*text == '>')
            fputs("&gt;", out);
        else if (*text == '&')
            fputs("&amp;", out);
        else if (*text == '"')
            fputs("&quot;", out);
        else if ((unsigned char)*text < 0x20 && *text != '\n' && *text != '\t')
            fputc('?', out); /* XML has no place for them */
        else
            fputc(*text, out);
    }
}

static void inks_as_classes(int dark, FILE *out)
{
    for (int i = 0; i < INK_SERIES + CANVAS_N_SERIES; i++)
        fprintf(out, ".l%d{stroke:%s}.f%d{fill:%s}", i, inks[i][dark], i, inks[i][dark]);
}

void canvas_style(FILE *out)
{
    fputs("svg.plot{font-family:" FONT
          "}svg.plot .l{fill:none;stroke-linejoin:round;stroke-linecap:round}",
          out);
    inks_as_classes(0, out);
    fputs("@media (prefers-color-scheme:dark){", out);
    inks_as_classes(1, out);
    fputs("}@media print{", out);
    inks_as_classes(0, out);
    fputs("}", out);
}

static void svg_points(const double *p, size_t n, FILE *out)
{
    for (size_t i = 0; i < n; i++)
        fprintf(out, "%s%.2f,%.2f", i ? " " : "", p[2 * i], p[2 * i + 1]);
}

/* Corners of a marker; 0: it is a circle. */
static size_t corners(const struct mark *m, double p[8])
{
    double r = m->w;
    switch (m->shape) {
    case 1:
        memcpy(p,
               (double[]){m->x - r * .9, m->y - r * .9, m->x + r * .9, m->y - r * .9, m->x + r * .9,
                          m->y + r * .9, m->x - r * .9, m->y + r * .9},
               8 * sizeof *p);
        return 4;
    case 2:
        memcpy(p,
               (double[]){m->x, m->y - r * 1.2, m->x + r * 1.1, m->y + r * .8, m->x - r * 1.1,
                          m->y + r * .8},
               6 * sizeof *p);
        return 3;
    case 3:
        memcpy(p,
               (double[]){m->x, m->y - r * 1.25, m->x + r * 1.25, m->y, m->x, m->y + r * 1.25,
                          m->x - r * 1.25, m->y},
               8 * sizeof *p);
        return 4;
    default:
        return 0;
    }
}

static void svg_mark(const struct mark *m, FILE *out)
{
    static const char *const anchors[] = {"start", "middle", "end"},
                             *const dashes[] = {"", " stroke-dasharray=\"7 4\"",
                                                " stroke-dasharray=\"2 4\""};
    char opacity[32] = "";
    double p[8];
    size_t n;
    if (m->opacity < 1) snprintf(opacity, sizeof opacity, " fill-opacity=\"%.2f\"", m->opacity);
    switch (m->kind) {
    case MARK_POLYLINE:
        fprintf(out, "<polyline class=\"l l%d\" stroke-width=\"%.2f\"%s points=\"", m->ink,
                m->width, dashes[m->dash]);
        svg_points(m->points, m->n_points, out);
        fputs("\"/>\n", out);
        break;
    case MARK_RECT:
        fprintf(out,
                "<rect class=\"f%d\"%s x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\"/>\n",
                m->ink, opacity, m->x, m->y, fmax(0, m->w), fmax(0, m->h));
        break;
    case MARK_MARKER:
        n = corners(m, p);
        if (n == 0) {
            fprintf(out, "<circle class=\"f%d\"%s cx=\"%.2f\" cy=\"%.2f\" r=\"%.2f\"/>\n", m->ink,
                    opacity, m->x, m->y, m->w);
            break;
        }
        fprintf(out, "<polygon class=\"f%d\"%s points=\"", m->ink, opacity);
        svg_points(p, n, out);
        fputs("\"/>\n", out);
        break;
    case MARK_TEXT:
        fprintf(out,
                "<text class=\"f%d\" x=\"%.2f\" y=\"%.2f\" font-size=\"%.1f\" text-anchor=\"%s\"",
                m->ink, m->x, m->y, m->w, anchors[m->anchor]);
        if (m->bold) fputs(" font-weight=\"bold\"", out);
        if (m->up) fprintf(out, " transform=\"rotate(-90 %.2f %.2f)\"", m->x, m->y);
        fputc('>', out);
        canvas_escape(m->text, out);
        fputs("</text>\n", out);
        break;
    }
}

void canvas_write_svg(const struct canvas *c, const char *title, bool alone, FILE *out)
{
    if (alone) fputs("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n", out);
    fprintf(out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"plot\" role=\"img\" viewBox=\"0 0 "
            "%d %d\"",
            c->width, c->height);
    if (alone) fprintf(out, " width=\"%d\" height=\"%d\"", c->width, c->height);
    fputs(">\n<title>", out);
    canvas_escape(title, out);
    fputs("</title>\n", out);
    if (alone) {
        fputs("<style>", out);
        canvas_style(out);
        fputs("</style>\n", out);
        fprintf(out, "<rect class=\"f%d\" width=\"%d\" height=\"%d\"/>\n", INK_PAPER, c->width,
                c->height);
    }
    for (size_t i = 0; i < c->n; i++) svg_mark(&c->marks[i], out);
    fputs("</svg>\n", out);
}

/* --- PNG -------------------------------------------------------------------------------------- */

#ifdef TD_HAVE_CAIRO
bool canvas_has_png(void) { return true; }

static void set_ink(cairo_t *cr, int ink, double opacity)
{
    unsigned long rgb = strtoul(inks[ink][0] + 1, NULL, 16); /* a picture on its own is on white */
    cairo_set_source_rgba(cr, (double)(rgb >> 16) / 255, (double)(rgb >> 8 & 255) / 255,
                          (double)(rgb & 255) / 255, opacity);
}

static void png_text(cairo_t *cr, const struct mark *m)
{
    cairo_text_extents_t size;
    cairo_select_font_face(cr, "DejaVu Sans", CAIRO_FONT_SLANT_NORMAL,
                           m->bold ? CAIRO_FONT_WEIGHT_BOLD : CAIRO_FONT_WEIGHT_NORMAL);
    cairo_set_font_size(cr, m->w);
    cairo_text_extents(cr, m->text, &size);
    double back = m->anchor == ANCHOR_START    ? 0
                  : m->anchor == ANCHOR_MIDDLE ? size.x_advance / 2
                                               : size.x_advance;
    cairo_save(cr);
    cairo_translate(cr, m->x, m->y);
    if (m->up) cairo_rotate(cr, -M_PI / 2);
    cairo_move_to(cr, -back, 0);
    cairo_show_text(cr, m->text);
    cairo_restore(cr);
}

static void png_mark(cairo_t *cr, const struct mark *m)
{
    static const double dashes[][2] = {{0, 0}, {7, 4}, {2, 4}};
    double corner[8];
    const double *p = m->points;
    size_t n = m->n_points;
    set_ink(cr, m->ink, m->opacity);
    cairo_new_path(cr); /* text leaves a point behind, which the next line would start from */
    switch (m->kind) {
    case MARK_POLYLINE:
        for (size_t i = 0; i < n; i++) cairo_line_to(cr, p[2 * i], p[2 * i + 1]);
        cairo_set_line_width(cr, m->width);
        cairo_set_dash(cr, dashes[m->dash], m->dash ? 2 : 0, 0);
        cairo_stroke(cr);
        break;
    case MARK_RECT:
        cairo_rectangle(cr, m->x, m->y, fmax(0, m->w), fmax(0, m->h));
        cairo_fill(cr);
        break;
    case MARK_MARKER:
        n = corners(m, corner);
        if (n == 0) cairo_arc(cr, m->x, m->y, m->w, 0, 2 * M_PI);
        for (size_t i = 0; i < n; i++) cairo_line_to(cr, corner[2 * i], corner[2 * i + 1]);
        cairo_close_path(cr);
        cairo_fill(cr);
        break;
    case MARK_TEXT:
        png_text(cr, m);
        break;
    }
}

td_status canvas_write_png(const struct canvas *c, double scale, const char *path,
                           struct td_err *err)
{
    if (c->broken) return td_fail(err, TD_ERR_NOMEM, "%s: out of memory", path);
    cairo_surface_t *surface = cairo_image_surface_create(
        CAIRO_FORMAT_RGB24, (int)(c->width * scale), (int)(c->height * scale));
    cairo_t *cr = cairo_create(surface);
    cairo_scale(cr, scale, scale);
    set_ink(cr, INK_PAPER, 1);
    cairo_paint(cr);
    cairo_set_line_join(cr, CAIRO_LINE_JOIN_ROUND);
    cairo_set_line_cap(cr, CAIRO_LINE_CAP_ROUND);
    for (size_t i = 0; i < c->n; i++) png_mark(cr, &c->marks[i]);
    cairo_status_t s = cairo_status(cr);
    if (s == CAIRO_STATUS_SUCCESS) s = cairo_surface_write_to_png(surface, path);
    cairo_destroy(cr);
    cairo_surface_destroy(surface);
    return s == CAIRO_STATUS_SUCCESS
               ? TD_OK
               : td_fail(err, TD_ERR_IO, "%s: %s", path, cairo_status_to_string(s));
}
#else
bool canvas_has_png(void) { return false; }

td_status canvas_write_png(const struct canvas *c, double scale, const char *path,
                           struct td_err *err)
{
    (void)c;
    (void)scale;
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "%s: this tandem was built without cairo (libcairo2-dev), which draws PNG",
                   path);
}
#endif
