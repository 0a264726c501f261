/* metrics.c - a fixed table of series and its rendering as Prometheus text.
 *
 * One thread appends series at boot, and raises n_series with release order once a series is
 * complete, so a renderer on another thread sees complete ones only. Updates are relaxed atomics: a
 * scrape may see a histogram's bucket before its sum, but never a torn value. A double is kept as
 * its bits in a uint64_t, because adding to an atomic double is a compare-and-swap loop anyway. */
#include "common/base/metrics.h"

#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/status.h"

#define MAX_SERIES 8192 /* a router of 32 models, 16 classes and vLLM's names has 3,900 */
#define MAX_BOUNDS 32

enum metric_type { COUNTER, GAUGE, HISTOGRAM, TOTAL };

struct td_metric {
    char *name, *labels, *help;
    enum metric_type type;
    const struct td_metric *of; /* whose values it tells: an alias' original, or itself */
    bool is_first;              /* of its name */
    _Atomic int next;           /* index of the next one of its name; -1 = none */
    _Atomic uint64_t bits; /* counter: the count; gauge: bits of the value; histogram: bits of
                              the sum */
    const double *bounds;
    int n_bounds;
    _Atomic uint64_t buckets[MAX_BOUNDS + 1]; /* not cumulative; the last is +Inf */
};

static struct td_metric g_series[MAX_SERIES];
static _Atomic int g_n_series;
static void (*_Atomic g_on_render)(void);

const double td_seconds_bounds[] = {0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005,
                                    0.01,   0.025,   0.05,   0.1,   0.25,   0.5,
                                    1.0,    2.5,     5.0,    10.0,  30.0,   60.0};
const int td_n_seconds_bounds = (int)(sizeof td_seconds_bounds / sizeof *td_seconds_bounds);
const double td_tokens_bounds[] = {1,    2,    5,   10,  20,  50,  100, 200, 500, 1000,
                                   2000, 5000, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6};
const int td_n_tokens_bounds = (int)(sizeof td_tokens_bounds / sizeof *td_tokens_bounds);

static uint64_t to_bits(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double from_bits(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static char *copy_text(const char *text)
{
    char *copy = strdup(text);
    TD_ASSERT(copy); /* boot only */
    return copy;
}

static bool is_metric_name(const char *name)
{
    if (!name[0] || (name[0] >= '0' && name[0] <= '9')) return false;
    return strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_:") ==
           strlen(name);
}

static struct td_metric *register_series(const char *name, const char *labels, const char *help,
                                         enum metric_type type, const double *bounds, int n_bounds,
                                         const struct td_metric *of)
{
    TD_ASSERT(is_metric_name(name));
    int n = atomic_load_explicit(&g_n_series, memory_order_relaxed), last = -1;
    for (int i = 0; i < n; i++) {
        if (strcmp(g_series[i].name, name) != 0) continue;
        TD_ASSERT(g_series[i].type == type); /* one name has one type */
        if (strcmp(g_series[i].labels, labels) == 0) return &g_series[i];
        last = i;
    }
    TD_ASSERT(n < MAX_SERIES);
    struct td_metric *m = &g_series[n];
    m->name = copy_text(name);
    m->labels = copy_text(labels);
    m->help = copy_text(help);
    m->type = type;
    m->bounds = bounds;
    m->n_bounds = n_bounds;
    m->of = of ? of : m;
    atomic_store_explicit(&m->next, -1, memory_order_relaxed);
    m->is_first = last < 0;
    if (last >= 0) atomic_store_explicit(&g_series[last].next, n, memory_order_release);
    atomic_store_explicit(&g_n_series, n + 1, memory_order_release);
    return m;
}

struct td_metric *td_counter(const char *name, const char *labels, const char *help)
{
    return register_series(name, labels, help, COUNTER, NULL, 0, NULL);
}

struct td_metric *td_gauge(const char *name, const char *labels, const char *help)
{
    return register_series(name, labels, help, GAUGE, NULL, 0, NULL);
}

struct td_metric *td_histogram(const char *name, const char *labels, const char *help,
                               const double *bounds, int n)
{
    TD_ASSERT(n >= 1 && n <= MAX_BOUNDS);
    for (int i = 1; i < n; i++) TD_ASSERT(bounds[i - 1] < bounds[i]);
    return register_series(name, labels, help, HISTOGRAM, bounds, n, NULL);
}

struct td_metric *td_total(const char *name, const char *labels, const char *help)
{
    return register_series(name, labels, help, TOTAL, NULL, 0, NULL);
}

void td_metric_alias(const struct td_metric *m, const char *name, const char *labels)
{
    register_series(name, labels, m->help, m->type, m->bounds, m->n_bounds, m);
}

void td_metrics_on_render(void (*update)(void)) { atomic_store(&g_on_render, update); }

const char *td_metric_label(char *buf, size_t buf_bytes, const char *value)
{
    size_t n = 0;
    for (const char *p = value; *p; p++) {
        bool escaped = *p == '"' || *p == '\\' || *p == '\n';
        if (n + 2 + escaped > buf_bytes) { /* cut before the sequence that does not fit whole */
            while (n && ((unsigned char)*p & 0xc0) == 0x80) p--, n--;
            break;
        }
        if (escaped) buf[n++] = '\\';
        buf[n++] = *p == '\n' ? 'n' : *p;
    }
    if (buf_bytes) buf[n] = '\0';
    return buf;
}

void td_metric_add(struct td_metric *m, uint64_t n)
{
    TD_ASSERT(m->type == COUNTER);
    atomic_fetch_add_explicit(&m->bits, n, memory_order_relaxed);
}

void td_metric_set(struct td_metric *m, double value)
{
    TD_ASSERT(m->type == GAUGE);
    atomic_store_explicit(&m->bits, to_bits(value), memory_order_relaxed);
}

void td_metric_set_total(struct td_metric *m, double value)
{
    TD_ASSERT(m->type == TOTAL);
    atomic_store_explicit(&m->bits, to_bits(value), memory_order_relaxed);
}

void td_metric_observe(struct td_metric *m, double value)
{
    TD_ASSERT(m->type == HISTOGRAM);
    int i = 0;
    while (i < m->n_bounds && !(value <= m->bounds[i])) i++; /* NaN falls into +Inf */
    atomic_fetch_add_explicit(&m->buckets[i], 1, memory_order_relaxed);
    uint64_t old = atomic_load_explicit(&m->bits, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&m->bits, &old, to_bits(from_bits(old) + value),
                                                  memory_order_relaxed, memory_order_relaxed)) {
    }
}

double td_metric_value(const struct td_metric *m)
{
    uint64_t bits = atomic_load_explicit(&m->bits, memory_order_relaxed);
    return m->type == COUNTER ? (double)bits : from_bits(bits);
}

/* The shortest of two spellings that reads back as the same value. */
static const char *show_value(double value, char *buf, size_t buf_bytes)
{
    if (isnan(value)) return "NaN";
    if (isinf(value)) return value > 0 ? "+Inf" : "-Inf";
    snprintf(buf, buf_bytes, "%.15g", value);
    if (strtod(buf, NULL) != value) snprintf(buf, buf_bytes, "%.17g", value);
    return buf;
}

static void put_help(FILE *out, const struct td_metric *m)
{
    static const char *const type_names[] = {"counter", "gauge", "histogram", "counter"};
    fprintf(out, "# HELP %s ", m->name);
    for (const char *p = m->help; *p; p++) {
        if (*p == '\\')
            fputs("\\\\", out);
        else if (*p == '\n')
            fputs("\\n", out);
        else
            fputc(*p, out);
    }
    fprintf(out, "\n# TYPE %s %s\n", m->name, type_names[m->type]);
}

static void put_series(FILE *out, const struct td_metric *m)
{
    char text[40];
    const char *open = m->labels[0] ? "{" : "", *close = m->labels[0] ? "}" : "",
               *comma = m->labels[0] ? "," : "";
    uint64_t bits = atomic_load_explicit(&m->of->bits, memory_order_relaxed);
    if (m->type == COUNTER) {
        fprintf(out, "%s%s%s%s %" PRIu64 "\n", m->name, open, m->labels, close, bits);
        return;
    }
    if (m->type == GAUGE || m->type == TOTAL) {
        fprintf(out, "%s%s%s%s %s\n", m->name, open, m->labels, close,
                show_value(from_bits(bits), text, sizeof text));
        return;
    }
    uint64_t total = 0;
    for (int i = 0; i <= m->n_bounds; i++) {
        total += atomic_load_explicit(&m->of->buckets[i], memory_order_relaxed);
        const char *le = i < m->n_bounds ? show_value(m->bounds[i], text, sizeof text) : "+Inf";
        fprintf(out, "%s_bucket{%s%sle=\"%s\"} %" PRIu64 "\n", m->name, m->labels, comma, le,
                total);
    }
    fprintf(out, "%s_sum%s%s%s %s\n", m->name, open, m->labels, close,
            show_value(from_bits(bits), text, sizeof text));
    fprintf(out, "%s_count%s%s%s %" PRIu64 "\n", m->name, open, m->labels, close, total);
}

double td_metric_quantile(const struct td_metric *m, double q)
{
    uint64_t counts[MAX_BOUNDS + 1], n = 0;
    TD_ASSERT(m->type == HISTOGRAM);
    for (int i = 0; i <= m->n_bounds; i++)
        n += counts[i] = atomic_load_explicit(&m->buckets[i], memory_order_relaxed);
    if (!n) return 0;
    double rank = q * (double)n, below = 0;
    for (int i = 0; i < m->n_bounds; i++) {
        double from = i ? m->bounds[i - 1] : 0, count = (double)counts[i];
        if (count > 0 && below + count >= rank)
            return from + (m->bounds[i] - from) * (rank - below) / count;
        below += count;
    }
    return m->bounds[m->n_bounds - 1];
}

char *td_metrics_render(size_t *ret_bytes)
{
    char *text = NULL;
    size_t n_bytes = 0;
    FILE *out = open_memstream(&text, &n_bytes);
    TD_ASSERT(out);
    void (*update)(void) = atomic_load(&g_on_render);
    if (update) update();
    int n = atomic_load_explicit(&g_n_series, memory_order_acquire);
    for (int i = 0; i < n; i++) {
        /* All series of a name stand together, below one HELP and TYPE, where the first of them
           was registered. */
        if (!g_series[i].is_first) continue;
        put_help(out, &g_series[i]);
        for (int j = i; j >= 0 && j < n;
             j = atomic_load_explicit(&g_series[j].next, memory_order_acquire))
            put_series(out, &g_series[j]);
    }
    TD_ASSERT(fclose(out) == 0 && text);
    if (ret_bytes) *ret_bytes = n_bytes;
    return text;
}
