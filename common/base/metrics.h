/* metrics.h - counters, gauges and histograms in a fixed registry, rendered as Prometheus text
 * (common/base/metrics_http.h serves it over HTTP). One thread registers at boot; any thread
 * updates (relaxed atomics) and renders at any time. */
#ifndef TD_BASE_METRICS_H
#define TD_BASE_METRICS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct td_metric;

/* name: "td_num_requests_waiting"; labels: "" or "stage=\"prefill\""; both static strings. The same
 * name and labels give the same metric. */
struct td_metric *td_counter(const char *name, const char *labels, const char *help);
struct td_metric *td_gauge(const char *name, const char *labels, const char *help);
/* bounds: n ascending upper bounds, static storage; n <= 32. */
struct td_metric *td_histogram(const char *name, const char *labels, const char *help,
                               const double *bounds, int n);

/* A counter that td_metric_set_total sets from a total kept elsewhere (seconds, for example), so it
 * may have a fraction. */
struct td_metric *td_total(const char *name, const char *labels, const char *help);
/* Renders m under another name, too, and with the labels given. Any type of metric. */
void td_metric_alias(const struct td_metric *m, const char *name, const char *labels);
/* Writes value as it may stand between the quotes of a label: \\, \" and \n escaped; cut to fit, at
 * the begin of a UTF-8 sequence. Returns buf. */
const char *td_metric_label(char *buf, size_t buf_bytes, const char *value);
/* update() is called at the begin of each rendering, by the thread that renders; two at once are
 * possible. One function for the process; boot only. */
void td_metrics_on_render(void (*update)(void));

void td_metric_add(struct td_metric *m, uint64_t n);         /* counter */
void td_metric_set_total(struct td_metric *m, double value); /* total */
void td_metric_set(struct td_metric *m, double value);       /* gauge   */
void td_metric_observe(struct td_metric *m, double value);   /* histogram */
/* counter, total, gauge: value; histogram: sum */
double td_metric_value(const struct td_metric *m);
/* histogram: the value that a share q (0..1) of what was observed does not exceed, interpolated
 * inside its bucket as Prometheus' histogram_quantile does; beyond the last bound, that bound. 0:
 * nothing was observed. */
double td_metric_quantile(const struct td_metric *m, double q);

extern const double td_seconds_bounds[]; /* 0.1 ms .. 60 s, for latencies */
extern const int td_n_seconds_bounds;
extern const double td_tokens_bounds[]; /* 1, 2, 5, 10 .. 1,000,000, for numbers of tokens */
extern const int td_n_tokens_bounds;

/* Prometheus text exposition 0.0.4 into malloc'd memory; caller frees. */
char *td_metrics_render(size_t *ret_bytes);

#endif
