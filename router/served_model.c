/* served_model.c - see served_model.h. Everything that is decided, counted or logged for one model
 * passes here, on the loop thread. */
#include "router/served_model.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "router/router.h"

/* ---- the core -------------------------------------------------------------------------------- */

static void log_event(struct served_model *m, const struct td_core_event *e,
                      const struct td_core_action *a, size_t n)
{
    char line[TD_CORE_LINE_MAX];
    td_core_event_format(e, line, sizeof line);
    fputs(line, m->log);
    for (uint32_t i = 0; td_core_hashes_format(e, i, line, sizeof line) > 0; i++)
        fputs(line, m->log);
    for (size_t i = 0; i < n; i++) {
        td_core_action_format(&a[i], line, sizeof line);
        fputs(line, m->log);
    }
}

static void carry_out(struct router *r, const struct td_core_action *a)
{
    struct request_state *q = &r->requests[a->request_at];
    if (!q->live || q->id != a->id) return; /* its client has cancelled it */
    switch (a->kind) {
    case TD_ACT_START_DECODE:
        leg_start_decode(r, q, a);
        break;
    case TD_ACT_START_PREFILL:
        leg_start_prefill(r, q, a);
        break;
    case TD_ACT_CANCEL_DECODE:
        leg_cancel(&q->decode.leg);
        break;
    case TD_ACT_CANCEL_PREFILL:
        leg_cancel(&q->prefill.leg);
        break;
    case TD_ACT_COMPLETE:
        request_complete(r, q);
        break;
    case TD_ACT_FAIL:
        request_fail(r, q, a);
        break;
    }
}

/* Carrying out an action never applies another event (results of calls arrive later), so one
 * actions array serves. */
void served_model_event(struct served_model *m, struct td_core_event e)
{
    struct router *r = m->router;
    e.now_ns = td_now_ns();
    size_t n = td_core_step(m->core, &e, r->actions);
    if (m->log) log_event(m, &e, r->actions, n);
    for (size_t i = 0; i < n; i++) carry_out(r, &r->actions[i]);
}

uint32_t served_model_max_len(const struct served_model *m) { return m->max_len; }

void served_model_update_max_len(struct served_model *m)
{
    const struct router *r = m->router;
    uint32_t len = (uint32_t)m->config.max_positions;
    if (r->cfg.max_model_len && (uint32_t)r->cfg.max_model_len < len)
        len = (uint32_t)r->cfg.max_model_len;
    for (size_t i = 0; i < TD_CORE_MAX_WORKERS; i++) {
        const struct worker_conn *w = &r->workers[i];
        if (w->used && !w->gone && w->model == m && w->max_model_len < len) len = w->max_model_len;
    }
    m->max_len = len;
    inference_update_limits(r);
}

/* ---- what the metrics are told --------------------------------------------------------------- */

/* Adds to the metrics what the core has counted since the last tick. */
static void follow_core(struct served_model *m)
{
    struct served_model_metrics *to = &m->metrics;
    struct td_core_stats now, *told = &m->told.stats;
    td_core_stats(m->core, &now);
    td_metric_set(to->waiting, now.queued);
    td_metric_set(to->running, now.live - now.queued);
    td_metric_add(to->failovers, now.failovers - told->failovers);
    td_metric_add(to->refused, now.refused - told->refused);
    td_metric_add(to->deflected, now.deflected - told->deflected);
    td_metric_add(to->wasted, now.wasted_prefill_tokens - told->wasted_prefill_tokens);
    td_metric_add(to->good, now.good - told->good);
    td_metric_add(to->missed_ttft, now.missed_ttft - told->missed_ttft);
    td_metric_add(to->missed_tpot, now.missed_tpot - told->missed_tpot);
    td_metric_add(to->hit_predicted, now.predicted_hit_tokens - told->predicted_hit_tokens);
    td_metric_add(to->hit_real, now.real_hit_tokens - told->real_hit_tokens);
    td_metric_set(to->arrival_rate, now.arrival_rate);
    *told = now;
    for (int i = 0; i < 2; i++) {
        struct td_lat_quality q;
        td_latency_quality(td_core_latency(m->core), i ? TD_LAT_TPOT : TD_LAT_TTFT, &q);
        td_metric_set(to->coverage[i], q.coverage);
        td_metric_set(to->mape[i], q.mape);
    }
}

static void follow_advice(struct served_model *m, uint64_t now_ns)
{
    struct served_model_metrics *to = &m->metrics;
    struct served_model_told *told = &m->told;
    struct td_core_advice a;
    td_core_advice(m->core, &a);
    for (int i = 0; i < 2; i++) {
        td_metric_set(to->wanted[i], a.want[i]);
        td_metric_set(to->needed[i], a.need[i]);
        td_metric_set(to->utilisation[i], a.utilisation[i]);
    }
    for (int i = 0; i < TD_BOUND_N; i++) td_metric_set(to->bound[i], (int)a.bound == i);
    if (a.bound == told->bound || told->stats.arrival_rate <= 0.1 ||
        now_ns - told->bound_ns <= 10 * TD_NS_PER_S)
        return;
    told->bound_ns = now_ns;
    td_info("goodput_bound",
            "by=%s was=%s prefill_util=%.2f decode_util=%.2f want_prefill=%u want_decode=%u",
            td_bound_name(a.bound), td_bound_name(told->bound), a.utilisation[0], a.utilisation[1],
            a.want[0], a.want[1]);
    told->bound = a.bound;
}

void served_model_tick(struct served_model *m, struct td_ev_tick tick)
{
    served_model_event(m, (struct td_core_event){.kind = TD_EV_TICK, .tick = tick});
    if (m->log && (fflush(m->log) || ferror(m->log))) {
        td_error("decision_log_failed", "file=%s error=\"%s\" action=close",
                 m->router->cfg.decision_log, strerror(errno));
        fclose(m->log);
        m->log = NULL; /* what was written replays up to its end */
    }
    follow_core(m);
    follow_advice(m, td_now_ns());
}

/* ---- open ------------------------------------------------------------------------------------ */

static void metrics_make(struct served_model_metrics *m)
{
    const double *b = td_seconds_bounds;
    int n = td_n_seconds_bounds;
    m->ttft = td_histogram("td_time_to_first_token_seconds", "",
                           "Request received to first token sent", b, n);
    m->tpot = td_histogram("td_time_per_output_token_seconds", "",
                           "(Last - first token) / (tokens - 1), per request", b, n);
    m->e2e = td_histogram("td_e2e_request_latency_seconds", "", "Request received to stream ended",
                          b, n);
    m->queue = td_histogram("td_stage_seconds", "stage=\"router_queue\"",
                            "Stages of TTFT; they add up", b, n);
    m->reserve =
        td_histogram("td_stage_seconds", "stage=\"reserve\"", "Stages of TTFT; they add up", b, n);
    m->prefill_queue = td_histogram("td_stage_seconds", "stage=\"prefill_queue\"",
                                    "Stages of TTFT; they add up", b, n);
    m->prefill =
        td_histogram("td_stage_seconds", "stage=\"prefill\"", "Stages of TTFT; they add up", b, n);
    m->rpc = td_histogram("td_stage_seconds", "stage=\"rpc\"", "Stages of TTFT; they add up", b, n);
    m->transfer = td_histogram("td_kv_transfer_seconds", "", "KV hand-over of one request", b, n);
    m->running = td_gauge("td_num_requests_running", "", "Requests placed on workers");
    m->waiting = td_gauge("td_num_requests_waiting", "", "Requests waiting for a worker");
    m->finished = td_counter("td_request_success_total", "", "Requests finished");
    m->failed = td_counter("td_request_failure_total", "", "Requests refused or failed");
    m->cancelled = td_counter("td_request_cancelled_total", "", "Requests the client left");
    m->failovers = td_counter("td_request_failovers_total", "", "Attempts moved to other workers");
    m->prompt_tokens = td_counter("td_prompt_tokens_total", "", "Prompt tokens accepted");
    m->output_tokens = td_counter("td_generation_tokens_total", "", "Output tokens sent");
    m->refused = td_counter("td_request_refused_total", "",
                            "Requests refused because objectives or queues had no room (in "
                            "td_request_failure_total too)");
    m->deflected = td_counter("td_request_deflected_total", "",
                              "Requests prefilled on a decode worker by choice");
    m->wasted = td_counter("td_wasted_prefill_tokens_total", "",
                           "Prompt tokens computed for attempts that were lost");
    m->good = td_counter(
        "td_slo_requests_total", "outcome=\"good\"",
        "Finished requests with objectives, by outcome; one that misses both counts in both");
    m->missed_ttft = td_counter(
        "td_slo_requests_total", "outcome=\"missed_ttft\"",
        "Finished requests with objectives, by outcome; one that misses both counts in both");
    m->missed_tpot = td_counter(
        "td_slo_requests_total", "outcome=\"missed_tpot\"",
        "Finished requests with objectives, by outcome; one that misses both counts in both");
    m->hit_predicted = td_counter(
        "td_prefix_hit_tokens_total", "source=\"predicted\"",
        "Prompt tokens that the index expected, or the worker found, in its prefix cache");
    m->hit_real = td_counter(
        "td_prefix_hit_tokens_total", "source=\"found\"",
        "Prompt tokens that the index expected, or the worker found, in its prefix cache");
    static const char *const role_label[2] = {"role=\"prefill\"", "role=\"decode\""};
    static const char *const bound_label[TD_BOUND_N] = {
        "by=\"none\"", "by=\"prefill\"", "by=\"transfer\"", "by=\"decode\"", "by=\"router\""};
    for (int i = 0; i < 2; i++) {
        m->wanted[i] = td_gauge(
            "td_recommended_workers", role_label[i],
            "Workers that the offered load asks for, with hysteresis; 0 = too early to say");
        m->needed[i] =
            td_gauge("td_needed_workers", role_label[i], "The same before rounding and hysteresis");
        m->utilisation[i] = td_gauge("td_worker_utilisation", role_label[i],
                                     "Share of time the role's workers spend in steps, EWMA");
    }
    for (int i = 0; i < TD_BOUND_N; i++)
        m->bound[i] = td_gauge("td_goodput_bound", bound_label[i], "1 = this bounds goodput now");
    m->arrival_rate = td_gauge("td_request_arrival_rate", "", "Requests per second, half-life 5 s");
    m->coverage[0] = td_gauge(
        "td_prediction_coverage", "objective=\"ttft\"",
        "Share of the last 512 placed requests within prediction times margin; aims at attainment");
    m->coverage[1] = td_gauge(
        "td_prediction_coverage", "objective=\"tpot\"",
        "Share of the last 512 placed requests within prediction times margin; aims at attainment");
    m->mape[0] = td_gauge(
        "td_prediction_mape", "objective=\"ttft\"",
        "Mean absolute error of predictions over the last 512, relative to what was observed");
    m->mape[1] = td_gauge(
        "td_prediction_mape", "objective=\"tpot\"",
        "Mean absolute error of predictions over the last 512, relative to what was observed");
    m->mismatches = td_counter("td_token_mismatch_total", "",
                               "A worker contradicted a token already sent (must stay 0)");
}

static td_status read_files(struct served_model *m, const char *dir, struct td_err *err)
{
    td_status s = td_model_config_load(dir, &m->config, err);
    if (!s) s = td_tokenizer_load(dir, &m->tokenizer, err);
    if (!s) s = td_chat_template_load(dir, &m->chat, err);
    if (s) return s;
    m->longest_token_bytes = 16;
    for (int32_t i = 0; i < td_tokenizer_vocab(m->tokenizer); i++) {
        size_t n = 0;
        if (td_tokenizer_token_text(m->tokenizer, i, &n) && n > m->longest_token_bytes)
            m->longest_token_bytes = n;
    }
    td_chat_template_set_max_bytes(m->chat,
                                   m->longest_token_bytes * (size_t)m->config.max_positions);
    return TD_OK;
}

static void choose_name(struct served_model *m, const char *dir, const char *served_name)
{
    if (served_name[0]) {
        snprintf(m->name, sizeof m->name, "%s", served_name);
        return;
    }
    char *real = realpath(dir, NULL);
    const char *slash = real ? strrchr(real, '/') : NULL;
    snprintf(m->name, sizeof m->name, "%s", slash ? slash + 1 : dir);
    free(real);
}

static td_status open_core(struct served_model *m, struct td_err *err)
{
    const struct router *r = m->router;
    const struct router_config *g = &r->cfg;
    struct td_core_config c = r->core_cfg;
    td_status s = TD_OK;
    if (g->latency_table[0])
        s = router_latency_table_load(g->latency_table, &c, m->node_classes, NULL, err);
    if (!s) s = td_core_create(&c, &m->core, err);
    if (s) return s;
    m->n_node_classes = c.n_thetas;
    if (!g->decision_log[0]) return TD_OK;
    m->log = fopen(g->decision_log, "w");
    if (!m->log)
        return td_fail(err, TD_ERR_IO, "decision_log \"%s\": %s", g->decision_log, strerror(errno));
    char line[TD_CORE_LINE_MAX];
    for (uint32_t i = 0; td_core_config_format(&c, i, line, sizeof line) > 0; i++)
        fputs(line, m->log);
    return TD_OK;
}

td_status served_model_open(struct router *r, const char *dir, struct served_model **ret_model,
                            struct td_err *err)
{
    struct served_model *m = calloc(1, sizeof *m);
    if (!m) return td_fail(err, TD_ERR_NOMEM, "no memory for model \"%s\"", dir);
    m->router = r;
    metrics_make(&m->metrics);
    td_status s = read_files(m, dir, err);
    if (!s) choose_name(m, dir, r->cfg.served_model_name);
    if (!s) s = open_core(m, err);
    if (s) {
        served_model_close(m);
        return s;
    }
    served_model_update_max_len(m);
    *ret_model = m;
    return TD_OK;
}

void served_model_close(struct served_model *m)
{
    if (!m) return;
    if (m->log) fclose(m->log);
    td_core_destroy(m->core);
    td_chat_template_free(m->chat);
    td_tokenizer_free(m->tokenizer);
    free(m);
}
