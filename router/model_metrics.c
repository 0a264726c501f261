/* model_metrics.c - the metrics of one model: a table, and what makes them.
 *
 * A router that serves one model alone tells them without a label of the model, as ever. One that
 * may serve several (model given more than once, or model_dir) gives each the label model_name,
 * from the first model on, so that a series never changes its name. What is younger than that rule
 * has the label always, as vLLM's metrics do: workers, sizes, ends, what is told by class, and the
 * names of vLLM's. */
#include <stdio.h>
#include <string.h>

#include "common/base/metrics.h"
#include "router/router.h"

enum kind { COUNTS, GAUGES, HISTOGRAMS, SIZE_HISTOGRAMS };

struct row {
    const char *name, *labels;
    enum kind kind;
    bool always_named; /* has the label model_name in any router */
    size_t offset;     /* of its struct td_metric * */
    const char *help;
};

#define AT(f) offsetof(struct served_model_metrics, f)
#define ROW(kind, always_named, name, labels, f, help)                                             \
    {                                                                                              \
        name, labels, kind, always_named, AT(f), help                                              \
    }
#define COUNTER(name, labels, f, help) ROW(COUNTS, false, name, labels, f, help)
#define GAUGE(name, labels, f, help) ROW(GAUGES, false, name, labels, f, help)
#define HISTOGRAM(name, labels, f, help) ROW(HISTOGRAMS, false, name, labels, f, help)
#define COUNTER_NAMED(name, labels, f, help) ROW(COUNTS, true, name, labels, f, help)
#define GAUGE_NAMED(name, labels, f, help) ROW(GAUGES, true, name, labels, f, help)
#define SIZES(name, labels, f, help) ROW(SIZE_HISTOGRAMS, true, name, labels, f, help)
#define WORKERS_HELP "Workers that have joined, by role and state"
#define ENDS_HELP "Requests finished, by what ended the output"

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
    HISTOGRAM("td_inter_token_latency_seconds", "", itl,
        "Each gap between two tokens of a request"),
    SIZES("td_request_prompt_tokens", "", prompt_sizes,
        "Prompt tokens of a finished request"),
    SIZES("td_request_generation_tokens", "", output_sizes,
        "Output tokens of a finished request"),
    COUNTER_NAMED("td_request_finished_total", "finished_reason=\"stop\"", ended_by_stop,
        ENDS_HELP),
    COUNTER_NAMED("td_request_finished_total", "finished_reason=\"length\"", ended_by_length,
        ENDS_HELP),
    GAUGE_NAMED("td_workers", "role=\"prefill\",state=\"ready\"", workers[0][0], WORKERS_HELP),
    GAUGE_NAMED("td_workers", "role=\"prefill\",state=\"suspect\"", workers[0][1], WORKERS_HELP),
    GAUGE_NAMED("td_workers", "role=\"prefill\",state=\"draining\"", workers[0][2], WORKERS_HELP),
    GAUGE_NAMED("td_workers", "role=\"decode\",state=\"ready\"", workers[1][0], WORKERS_HELP),
    GAUGE_NAMED("td_workers", "role=\"decode\",state=\"suspect\"", workers[1][1], WORKERS_HELP),
    GAUGE_NAMED("td_workers", "role=\"decode\",state=\"draining\"", workers[1][2], WORKERS_HELP),
    GAUGE("vllm:kv_cache_usage_perc", "", picker_kv,
        "Share of the decode workers' KV blocks that live requests hold, 0 to 1, for endpoint "
        "pickers"),
};

/* What is told under vLLM's names too. By the first rows endpoint pickers (Gateway API Inference
 * Extension) choose a router: they are always there. The others come with metrics_alias vllm. */
#define ALIAS(name, labels, f, always)                                                             \
    {                                                                                              \
        name, labels, always, AT(f)                                                                \
    }
static const struct alias {
    const char *name, *labels;
    bool is_always; /* and then named as td_ names are */
    size_t offset;
} aliases[] = {
    ALIAS("vllm:num_requests_waiting", "", waiting, true),
    ALIAS("vllm:num_requests_running", "", running, true),
    ALIAS("vllm:gpu_cache_usage_perc", "", picker_kv, false),
    ALIAS("vllm:time_to_first_token_seconds", "", ttft, false),
    ALIAS("vllm:time_per_output_token_seconds", "", itl, false),
    ALIAS("vllm:inter_token_latency_seconds", "", itl, false),
    ALIAS("vllm:request_time_per_output_token_seconds", "", tpot, false),
    ALIAS("vllm:e2e_request_latency_seconds", "", e2e, false),
    ALIAS("vllm:request_prefill_time_seconds", "", prefill, false),
    ALIAS("vllm:request_prompt_tokens", "", prompt_sizes, false),
    ALIAS("vllm:request_generation_tokens", "", output_sizes, false),
    ALIAS("vllm:prompt_tokens_total", "", prompt_tokens, false),
    ALIAS("vllm:generation_tokens_total", "", output_tokens, false),
    ALIAS("vllm:request_success_total", "finished_reason=\"stop\"", ended_by_stop, false),
    ALIAS("vllm:request_success_total", "finished_reason=\"length\"", ended_by_length, false),
    ALIAS("vllm:request_success_total", "finished_reason=\"abort\"", cancelled, false),
};
// clang-format on

/* labels and a comma, if there are any, then model. */
static void join_labels(const char *labels, const char *model, char *text, size_t text_bytes)
{
    snprintf(text, text_bytes, "%s%s%s", labels, labels[0] && model[0] ? "," : "", model);
}

static void make_aliases(struct served_model *m, const char *model, const char *model_if_several)
{
    char labels[2 * ROUTER_MODEL_NAME + 80];
    bool all = !strcmp(m->router->cfg.observe.metrics_alias, "vllm");
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++) {
        const struct alias *a = &aliases[i];
        const struct td_metric *of;
        if (!a->is_always && !all) continue;
        memcpy(&of, (const char *)&m->metrics + a->offset, sizeof of);
        join_labels(a->labels, a->is_always ? model_if_several : model, labels, sizeof labels);
        td_metric_alias(of, a->name, labels);
    }
}

/* Without classes there is one, whose name is empty. */
static void make_class_metrics(struct served_model *m, const char *model)
{
    static const char queue[] = "Time that a finished request waited: for a worker, and in the "
                                "prefill worker's queue; by class",
                      slo[] = "Finished requests with objectives, by class: good met both";
    char class[2 * ROUTER_MODEL_NAME + 128], labels[sizeof class + 32], label[80];
    const struct td_core_config *c = &m->router->core_cfg;
    for (uint32_t i = 0; i < (c->n_classes ? c->n_classes : 1); i++) {
        snprintf(class, sizeof class, "class=\"%s\",%s",
                 td_metric_label(label, sizeof label, c->classes[i].name), model);
        m->metrics.queue_by_class[i] = td_histogram("td_request_queue_time_seconds", class, queue,
                                                    td_seconds_bounds, td_n_seconds_bounds);
        snprintf(labels, sizeof labels, "%s,outcome=\"good\"", class);
        m->metrics.good_by_class[i] = td_counter("td_slo_class_requests_total", labels, slo);
        snprintf(labels, sizeof labels, "%s,outcome=\"missed\"", class);
        m->metrics.missed_by_class[i] = td_counter("td_slo_class_requests_total", labels, slo);
    }
}

void served_model_metrics_make(struct served_model *m)
{
    char value[2 * ROUTER_MODEL_NAME], model[sizeof value + 16], labels[sizeof model + 64];
    snprintf(model, sizeof model, "model_name=\"%s\"",
             td_metric_label(value, sizeof value, served_model_name(m)));
    const char *model_if_several = m->router->may_serve_several ? model : "";
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct row *w = &rows[i];
        join_labels(w->labels, w->always_named ? model : model_if_several, labels, sizeof labels);
        struct td_metric *made =
            w->kind == COUNTS   ? td_counter(w->name, labels, w->help)
            : w->kind == GAUGES ? td_gauge(w->name, labels, w->help)
            : w->kind == HISTOGRAMS
                ? td_histogram(w->name, labels, w->help, td_seconds_bounds, td_n_seconds_bounds)
                : td_histogram(w->name, labels, w->help, td_tokens_bounds, td_n_tokens_bounds);
        memcpy((char *)&m->metrics + w->offset, &made, sizeof made);
    }
    make_class_metrics(m, model);
    make_aliases(m, model, model_if_several);
}
