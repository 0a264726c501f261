/* model_metrics.c - the metrics of one model: a table, and what makes them.
 *
 * A router that serves one model alone tells them without a label of the model, as ever. One that
 * may serve several (model given more than once, or model_dir) gives each the label model_name,
 * from the first model on, so that a series never changes its name. */
#include <stdio.h>
#include <string.h>

#include "common/base/metrics.h"
#include "router/router.h"

enum kind { COUNTS, GAUGES, HISTOGRAMS };

struct row {
    const char *name, *labels;
    enum kind kind;
    size_t offset; /* of its struct td_metric * */
    const char *help;
};

#define AT(f) offsetof(struct served_model_metrics, f)
#define COUNTER(name, labels, f, help)                                                             \
    {                                                                                              \
        name, labels, COUNTS, AT(f), help                                                          \
    }
#define GAUGE(name, labels, f, help)                                                               \
    {                                                                                              \
        name, labels, GAUGES, AT(f), help                                                          \
    }
#define HISTOGRAM(name, labels, f, help)                                                           \
    {                                                                                              \
        name, labels, HISTOGRAMS, AT(f), help                                                      \
    }

// clang-format off
static const struct row rows[] = {
    HISTOGRAM("td_time_to_first_token_seconds", "", ttft,
        "Request received to first token sent"),
    HISTOGRAM("td_time_per_output_token_seconds", "", tpot,
        "(Last - first token) / (tokens - 1), per request"),
    HISTOGRAM("td_e2e_request_latency_seconds", "", e2e,
        "Request received to stream ended"),
    HISTOGRAM("td_stage_seconds", "stage=\"router_queue\"", queue,
        "Stages of TTFT; they add up"),
    HISTOGRAM("td_stage_seconds", "stage=\"reserve\"", reserve,
        "Stages of TTFT; they add up"),
    HISTOGRAM("td_stage_seconds", "stage=\"prefill_queue\"", prefill_queue,
        "Stages of TTFT; they add up"),
    HISTOGRAM("td_stage_seconds", "stage=\"prefill\"", prefill,
        "Stages of TTFT; they add up"),
    HISTOGRAM("td_stage_seconds", "stage=\"rpc\"", rpc,
        "Stages of TTFT; they add up"),
    HISTOGRAM("td_kv_transfer_seconds", "", transfer,
        "KV hand-over of one request"),
    GAUGE("td_num_requests_running", "", running,
        "Requests placed on workers"),
    GAUGE("td_num_requests_waiting", "", waiting,
        "Requests waiting for a worker"),
    COUNTER("td_request_success_total", "", finished,
        "Requests finished"),
    COUNTER("td_request_failure_total", "", failed,
        "Requests refused or failed"),
    COUNTER("td_request_cancelled_total", "", cancelled,
        "Requests the client left"),
    COUNTER("td_request_failovers_total", "", failovers,
        "Attempts moved to other workers"),
    COUNTER("td_request_resumed_total", "", resumed,
        "Requests that go on with a stream that was cut, here or at another router"),
    COUNTER("td_prompt_tokens_total", "", prompt_tokens,
        "Prompt tokens accepted"),
    COUNTER("td_generation_tokens_total", "", output_tokens,
        "Output tokens sent"),
    COUNTER("td_request_refused_total", "", refused,
        "Requests refused because objectives or queues had no room (in "
        "td_request_failure_total too)"),
    COUNTER("td_request_deflected_total", "", deflected,
        "Requests prefilled on a decode worker by choice"),
    COUNTER("td_wasted_prefill_tokens_total", "", wasted,
        "Prompt tokens computed for attempts that were lost"),
    COUNTER("td_slo_requests_total", "outcome=\"good\"", good,
        "Finished requests with objectives, by outcome; one that misses both counts in both"),
    COUNTER("td_slo_requests_total", "outcome=\"missed_ttft\"", missed_ttft,
        "Finished requests with objectives, by outcome; one that misses both counts in both"),
    COUNTER("td_slo_requests_total", "outcome=\"missed_tpot\"", missed_tpot,
        "Finished requests with objectives, by outcome; one that misses both counts in both"),
    COUNTER("td_prefix_hit_tokens_total", "source=\"predicted\"", hit_predicted,
        "Prompt tokens that the index expected, or the worker found, in its prefix cache"),
    COUNTER("td_prefix_hit_tokens_total", "source=\"found\"", hit_real,
        "Prompt tokens that the index expected, or the worker found, in its prefix cache"),
    GAUGE("td_recommended_workers", "role=\"prefill\"", wanted[0],
        "Workers that the offered load asks for, with hysteresis; 0 = too early to say"),
    GAUGE("td_recommended_workers", "role=\"decode\"", wanted[1],
        "Workers that the offered load asks for, with hysteresis; 0 = too early to say"),
    GAUGE("td_needed_workers", "role=\"prefill\"", needed[0],
        "The same before rounding and hysteresis"),
    GAUGE("td_needed_workers", "role=\"decode\"", needed[1],
        "The same before rounding and hysteresis"),
    GAUGE("td_worker_utilisation", "role=\"prefill\"", utilisation[0],
        "Share of time the role's workers spend in steps, EWMA"),
    GAUGE("td_worker_utilisation", "role=\"decode\"", utilisation[1],
        "Share of time the role's workers spend in steps, EWMA"),
    GAUGE("td_goodput_bound", "by=\"none\"", bound[TD_BOUND_NONE],
        "1 = this bounds goodput now"),
    GAUGE("td_goodput_bound", "by=\"prefill\"", bound[TD_BOUND_PREFILL],
        "1 = this bounds goodput now"),
    GAUGE("td_goodput_bound", "by=\"transfer\"", bound[TD_BOUND_TRANSFER],
        "1 = this bounds goodput now"),
    GAUGE("td_goodput_bound", "by=\"decode\"", bound[TD_BOUND_DECODE],
        "1 = this bounds goodput now"),
    GAUGE("td_goodput_bound", "by=\"router\"", bound[TD_BOUND_ROUTER],
        "1 = this bounds goodput now"),
    GAUGE("td_request_arrival_rate", "", arrival_rate,
        "Requests per second, half-life 5 s"),
    GAUGE("td_prediction_coverage", "objective=\"ttft\"", coverage[0],
        "Share of the last 512 placed requests within prediction times margin; aims at "
        "attainment"),
    GAUGE("td_prediction_coverage", "objective=\"tpot\"", coverage[1],
        "Share of the last 512 placed requests within prediction times margin; aims at "
        "attainment"),
    GAUGE("td_prediction_mape", "objective=\"ttft\"", mape[0],
        "Mean absolute error of predictions over the last 512, relative to what was observed"),
    GAUGE("td_prediction_mape", "objective=\"tpot\"", mape[1],
        "Mean absolute error of predictions over the last 512, relative to what was observed"),
    COUNTER("td_token_mismatch_total", "", mismatches,
        "A worker contradicted a token already sent (must stay 0)"),
    /* by these names endpoint pickers (Gateway API Inference Extension) choose a router */
    GAUGE("vllm:num_requests_waiting", "", picker_waiting,
        "td_num_requests_waiting, for endpoint pickers"),
    GAUGE("vllm:num_requests_running", "", picker_running,
        "td_num_requests_running, for endpoint pickers"),
    GAUGE("vllm:kv_cache_usage_perc", "", picker_kv,
        "Share of the decode workers' KV blocks that live requests hold, 0 to 1, for endpoint "
        "pickers"),
};
// clang-format on

/* Appends the label's pair; in its value what would end it is escaped. */
static void put_label(const char *name, char *text, size_t text_bytes)
{
    size_t used = (size_t)snprintf(text, text_bytes, "model_name=\"");
    for (const char *p = name; *p && used + 4 < text_bytes; p++) {
        if (*p == '"' || *p == '\\') text[used++] = '\\';
        text[used++] = *p;
    }
    snprintf(text + used, text_bytes - used, "\"");
}

void served_model_metrics_make(struct served_model *m)
{
    char model[2 * ROUTER_MODEL_NAME + 16] = "", labels[sizeof model + 64];
    if (m->router->may_serve_several) put_label(served_model_name(m), model, sizeof model);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct row *w = &rows[i];
        snprintf(labels, sizeof labels, "%s%s%s", w->labels, w->labels[0] && model[0] ? "," : "",
                 model);
        struct td_metric *made =
            w->kind == COUNTS ? td_counter(w->name, labels, w->help)
            : w->kind == GAUGES
                ? td_gauge(w->name, labels, w->help)
                : td_histogram(w->name, labels, w->help, td_seconds_bounds, td_n_seconds_bounds);
        memcpy((char *)&m->metrics + w->offset, &made, sizeof made);
    }
}
