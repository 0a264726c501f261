/* router.c - opens, drains and closes the router; carries out what the core decides. */
#include "router/http/http.h"
#include "router/router.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/descriptors.h"
#include "common/base/give_back.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/base/signals.h"
#include "common/base/metrics_http.h"

#define OFF(f) offsetof(struct router_config, f)
#define TICK_MS 50
#define LATE_MS 200 /* the core is told of a tick that comes later than this */

// clang-format off
const struct td_option router_options[] = {
    {"model", TD_OPT_STR, NULL, 0, 0, NULL, OFF(model),
     "Hugging Face model directory (tokenizer, config and chat template; no weights are read)"},
    {"served_model_name", TD_OPT_STR, "", 0, 0, NULL, OFF(served_model_name),
     "name clients use; default the directory's name"},
    {"listen", TD_OPT_STR, "127.0.0.1:7600", 0, 0, NULL, OFF(listen),
     "address for clients, and workers without worker_listen; port 0 = any"},
    {"http_listen", TD_OPT_STR, "", 0, 0, NULL, OFF(http_listen),
     "host:port of the OpenAI-compatible HTTP API; port 0 = any; empty = off"},
    {"worker_listen", TD_OPT_STR, "", 0, 0, NULL, OFF(worker_listen),
     "address for workers, on which clients are not served: a firewall can then part the two; "
     "empty = workers join at listen"},
    {"mode", TD_OPT_ENUM, "pd", 0, 0, "pd|colocated|hybrid", OFF(mode),
     "who prefills: prefill workers, decode workers, or by prompt length"},
    {"policy", TD_OPT_ENUM, "goodput", 0, 0, TD_CORE_POLICIES, OFF(policy),
     "which workers get the next request, and when none should"},
    {"policy", TD_OPT_ELSEWHERE, "", 0, 0, TD_CORE_POLICIES_ELSEWHERE, 0,
     "`tandem sim` has that one, to compare"},
    {"slo_class", TD_OPT_STR, "", 0, 0, NULL, OFF(slo_class),
     "classes of requests: \"gold:ttft=450,tpot=40,weight=4 "
     "bulk:preset=mlperf-llama2-70b,best_effort\"; ms; the first, or \"default\", is what "
     "unnamed ones get"},
    {"tenants", TD_OPT_STR, "", 0, 0, NULL, OFF(tenants),
     "JSON file of tenants: their keys (as hashes) or certificate names, weights and classes "
     "(docs/tenants.md); read again when it changes; then who is none of them is refused. Empty "
     "= a tenant is what the client says"},
    {"attainment", TD_OPT_F64, "0.9", 0.5, 0.999, NULL, OFF(attainment),
     "share of placed requests that must meet their objectives: what the learned margins aim "
     "at, 0.5..0.999"},
    {"latency_table", TD_OPT_STR, "", 0, 0, NULL, OFF(latency_table),
     "prior of the latency model by node class, as `tandem bench calibrate` writes it; empty = "
     "learn from nothing"},
    {"prefix_entries", TD_OPT_U64, "1048576", 0, 1 << 28, NULL, OFF(prefix_entries),
     "(block, worker) pairs the prefix index can hold; 0 = place without looking at prefixes"},
    {"test_hybrid_local_tokens", TD_OPT_U64, "64", 0, 1 << 30, NULL, OFF(hybrid_local_tokens),
     "hybrid, other policies than goodput: shorter prompts are prefilled on the decode worker"},
    TD_OPTION_DECIDED("hybrid_local_tokens", "mode hybrid prefills on the decode worker by policy "
                                             "goodput's forecast, or prompts under 64 tokens with "
                                             "another policy"),
    {"max_requests", TD_OPT_I64, "1024", 1, TD_CORE_MAX_REQUESTS, NULL, OFF(max_requests),
     "live requests; more are refused with a retry delay"},
    {"max_queued", TD_OPT_I64, "512", 0, TD_CORE_MAX_REQUESTS, NULL, OFF(max_queued),
     "requests waiting for a worker; more are refused"},
    {"max_model_len", TD_OPT_I64, "0", 0, 16777216, NULL, OFF(max_model_len),
     "longest sequence in tokens; 0 = what model and workers allow"},
    {"worker_timeout_ms", TD_OPT_U64, "2000", 100, 600000, NULL, OFF(worker_timeout_ms),
     "a worker silent for so long loses its requests to others"},
    {"queue_timeout_ms", TD_OPT_U64, "30000", 1, 3600000, NULL, OFF(queue_timeout_ms),
     "longest wait for a worker"},
    {"stall_ms", TD_OPT_U64, "120000", 100, 3600000, NULL, OFF(stall_ms),
     "a request in which nothing moves for so long fails over"},
    {"max_failovers", TD_OPT_U64, "8", 0, 1000, NULL, OFF(max_failovers),
     "per request; then the client sees UNAVAILABLE"},
    {"max_message_bytes", TD_OPT_SIZE, "0", 0, 1 << 30, NULL, OFF(max_message_bytes),
     "largest message taken from anybody; 0 = what max_model_len tokens of this tokenizer can "
     "need, 4MiB..32MiB"},
    {"max_calls_bytes", TD_OPT_SIZE, "256MiB", 1 << 20, 1ll << 40, NULL, OFF(max_calls_bytes),
     "of all messages that are coming in at once; calls beyond are refused; at least two of "
     "max_message_bytes"},
    TD_PORT_OPTIONS(struct router_config, port, "0"),
    {"port_check_ms", TD_OPT_U64, "1000", 50, 60000, NULL, OFF(port_check_ms),
     "dial the own port so often; 3 failed checks: health is not serving; 10: the process ends "
     "with status 1"},
    {"decision_log", TD_OPT_STR, "", 0, 0, NULL, OFF(decision_log),
     "file for the core's events and actions; replays to the same decisions"},
    {"drain_timeout_ms", TD_OPT_U64, "30000", 0, 3600000, NULL, OFF(drain_timeout_ms),
     "SIGTERM: finish for so long, then cancel"},
    {"log_level", TD_OPT_ENUM, "info", 0, 0, "debug|info|warn|error", OFF(log_level),
     "least level logged"},
    {"metrics_listen", TD_OPT_STR, "", 0, 0, NULL, OFF(metrics_listen),
     "HTTP host:port of /metrics and /healthz; empty = off"},
    {"tls_cert", TD_OPT_STR, "", 0, 0, NULL, OFF(tls_cert),
     "certificate chain (PEM); with tls_key turns TLS on"},
    {"tls_key", TD_OPT_STR, "", 0, 0, NULL, OFF(tls_key), "private key (PEM)"},
    {"tls_ca", TD_OPT_STR, "", 0, 0, NULL, OFF(tls_ca),
     "CA that workers, and clients, must be signed by (mutual TLS)"},
    {"tls_server_name", TD_OPT_STR, "", 0, 0, NULL, OFF(tls_server_name),
     "name that workers' certificates must hold; empty = the host each advertises"},
    TD_OPTION_DECIDED("tls_client_auth", "with tls_ca callers must show a certificate of it, "
                                         "without they are not asked for one"),
    TD_IDENTITY_OPTIONS(struct router_config, identity),
    {"tls_operator_names", TD_OPT_STR, "", 0, 0, NULL, OFF(tls_operator_names),
     "names of certificates that Status tells all of each worker, besides workers' and "
     "routers'; others hear its role and state"},
    {0},
};
// clang-format on

/* ---- the core -------------------------------------------------------------------------------- */

static void log_event(struct router *r, const struct td_core_event *e,
                      const struct td_core_action *a, size_t n)
{
    char line[TD_CORE_LINE_MAX];
    td_core_event_format(e, line, sizeof line);
    fputs(line, r->log);
    for (uint32_t i = 0; td_core_hashes_format(e, i, line, sizeof line) > 0; i++)
        fputs(line, r->log);
    for (size_t i = 0; i < n; i++) {
        td_core_action_format(&a[i], line, sizeof line);
        fputs(line, r->log);
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
void router_event(struct router *r, struct td_core_event e)
{
    e.now_ns = td_now_ns();
    size_t n = td_core_step(r->core, &e, r->actions);
    if (r->log) log_event(r, &e, r->actions, n);
    for (size_t i = 0; i < n; i++) carry_out(r, &r->actions[i]);
}

uint32_t router_max_len(const struct router *r) { return r->max_len; }

void router_update_max_len(struct router *r)
{
    uint32_t len = (uint32_t)r->model.max_positions;
    if (r->cfg.max_model_len && (uint32_t)r->cfg.max_model_len < len)
        len = (uint32_t)r->cfg.max_model_len;
    for (size_t i = 0; i < TD_CORE_MAX_WORKERS; i++)
        if (r->workers[i].used && !r->workers[i].gone && r->workers[i].max_model_len < len)
            len = r->workers[i].max_model_len;
    r->max_len = len;
    inference_update_limits(r);
}

/* Adds to the metrics what the core has counted since the last tick. */
static void follow_core(struct router *r, const struct td_core_stats *now)
{
    static struct td_core_stats told; /* loop thread */
    struct router_metrics *m = r->m;
    td_metric_add(m->refused, now->refused - told.refused);
    td_metric_add(m->deflected, now->deflected - told.deflected);
    td_metric_add(m->wasted, now->wasted_prefill_tokens - told.wasted_prefill_tokens);
    td_metric_add(m->good, now->good - told.good);
    td_metric_add(m->missed_ttft, now->missed_ttft - told.missed_ttft);
    td_metric_add(m->missed_tpot, now->missed_tpot - told.missed_tpot);
    td_metric_add(m->hit_predicted, now->predicted_hit_tokens - told.predicted_hit_tokens);
    td_metric_add(m->hit_real, now->real_hit_tokens - told.real_hit_tokens);
    td_metric_set(m->arrival_rate, now->arrival_rate);
    told = *now;
    for (int i = 0; i < 2; i++) {
        struct td_lat_quality q;
        td_latency_quality(td_core_latency(r->core), i ? TD_LAT_TPOT : TD_LAT_TTFT, &q);
        td_metric_set(m->coverage[i], q.coverage);
        td_metric_set(m->mape[i], q.mape);
    }
    struct td_core_advice a;
    td_core_advice(r->core, &a);
    for (int i = 0; i < 2; i++) {
        td_metric_set(m->wanted[i], a.want[i]);
        td_metric_set(m->needed[i], a.need[i]);
        td_metric_set(m->utilisation[i], a.utilisation[i]);
    }
    for (int i = 0; i < TD_BOUND_N; i++) td_metric_set(m->bound[i], (int)a.bound == i);
    uint64_t now_ns = td_now_ns();
    if (a.bound != r->told_bound && now->arrival_rate > 0.1 &&
        now_ns - r->told_bound_ns > 10 * TD_NS_PER_S) {
        r->told_bound_ns = now_ns;
        td_info("goodput_bound",
                "by=%s was=%s prefill_util=%.2f decode_util=%.2f want_prefill=%u want_decode=%u",
                td_bound_name(a.bound), td_bound_name(r->told_bound), a.utilisation[0],
                a.utilisation[1], a.want[0], a.want[1]);
        r->told_bound = a.bound;
    }
}

/* Reads the tenants again when their file looks different: once a second at most. A file that is
 * wrong leaves those in force. */
static void follow_tenants(struct router *r, uint64_t now_ns)
{
    if (!r->cfg.tenants[0] || now_ns - r->tenants_seen_ns < TD_NS_PER_S) return;
    r->tenants_seen_ns = now_ns;
    struct td_file_stamp stamp;
    td_file_stamps_take(&r->cfg.tenants, 1, &stamp);
    if (td_file_stamps_equal(&stamp, &r->tenants_stamp, 1)) return;
    r->tenants_stamp = stamp;
    struct router_tenants *fresh = NULL;
    struct td_err err = {0};
    char quoted[1100];
    if (router_tenants_load(r->cfg.tenants, &r->core_cfg, &fresh, &err)) {
        td_warn("tenants_refused", "action=keep_old err=%s",
                td_log_quote(quoted, sizeof quoted, err.msg));
        return;
    }
    router_tenants_free(r->tenants); /* requests hold nothing of it */
    r->tenants = fresh;
    td_info("tenants_loaded", "n=%zu", router_tenants_n(fresh));
}

/* How busy this thread was since the last tick, and by how much that one was late: less than
 * LATE_MS is nothing. */
static uint64_t busy_permille(struct router *r, uint64_t *ret_late_ms)
{
    uint64_t now = td_now_ns(), cpu = td_thread_cpu_ns(), busy = 0, gap_ms = 0;
    if (r->tick_ns && now > r->tick_ns) {
        busy = (cpu - r->tick_cpu_ns) * 1000 / (now - r->tick_ns);
        gap_ms = (now - r->tick_ns) / TD_NS_PER_MS;
    }
    *ret_late_ms = gap_ms >= TICK_MS + LATE_MS ? gap_ms - TICK_MS : 0;
    r->tick_ns = now;
    r->tick_cpu_ns = cpu;
    return busy < 1000 ? busy : 1000;
}

static void on_tick(void *arg)
{
    struct router *r = arg;
    uint64_t late_ms, busy = busy_permille(r, &late_ms);
    if (late_ms >= r->cfg.worker_timeout_ms / 2)
        td_warn("router_was_away",
                "ms=%llu action=forgive_silence hint=\"the process was stopped or had no CPU\"",
                (unsigned long long)late_ms);
    router_event(r, (struct td_core_event){.kind = TD_EV_TICK,
                                           .tick = {.busy_permille = busy, .late_ms = late_ms}});
    join_tick(r, td_now_ns());
    router_http_tick(r->http, td_now_ns());
    follow_tenants(r, td_now_ns());
    td_identity_look_at_file(&r->id, td_now_ns());
    if (r->log && (fflush(r->log) || ferror(r->log))) {
        td_error("decision_log_failed", "file=%s error=\"%s\" action=close", r->cfg.decision_log,
                 strerror(errno));
        fclose(r->log);
        r->log = NULL; /* what was written replays up to its end */
    }
    struct td_core_stats st;
    td_core_stats(r->core, &st);
    td_metric_set(r->m->waiting, st.queued);
    td_metric_set(r->m->running, st.live - st.queued);
    static uint64_t n_told; /* loop thread; the core counts, the metric follows */
    td_metric_add(r->m->failovers, st.failovers - n_told);
    n_told = st.failovers;
    follow_core(r, &st);
    if (td_port_follow(&r->port_seen, r->server, td_now_ns())) td_log_tell_suppressed();
}

/* ---- open ------------------------------------------------------------------------------------ */

static struct router_metrics *metrics_new(void)
{
    static struct router_metrics m;
    const double *b = td_seconds_bounds;
    int n = td_n_seconds_bounds;
    m.ttft = td_histogram("td_time_to_first_token_seconds", "",
                          "Request received to first token sent", b, n);
    m.tpot = td_histogram("td_time_per_output_token_seconds", "",
                          "(Last - first token) / (tokens - 1), per request", b, n);
    m.e2e = td_histogram("td_e2e_request_latency_seconds", "", "Request received to stream ended",
                         b, n);
    m.queue = td_histogram("td_stage_seconds", "stage=\"router_queue\"",
                           "Stages of TTFT; they add up", b, n);
    m.reserve =
        td_histogram("td_stage_seconds", "stage=\"reserve\"", "Stages of TTFT; they add up", b, n);
    m.prefill_queue = td_histogram("td_stage_seconds", "stage=\"prefill_queue\"",
                                   "Stages of TTFT; they add up", b, n);
    m.prefill =
        td_histogram("td_stage_seconds", "stage=\"prefill\"", "Stages of TTFT; they add up", b, n);
    m.rpc = td_histogram("td_stage_seconds", "stage=\"rpc\"", "Stages of TTFT; they add up", b, n);
    m.transfer = td_histogram("td_kv_transfer_seconds", "", "KV hand-over of one request", b, n);
    m.running = td_gauge("td_num_requests_running", "", "Requests placed on workers");
    m.waiting = td_gauge("td_num_requests_waiting", "", "Requests waiting for a worker");
    static const char *const refusal_help = "Requests of callers that are no tenant of the file "
                                            "(unknown), or not the one they name (denied)";
    m.tenants_unknown = td_counter("td_tenant_refusals_total", "reason=\"unknown\"", refusal_help);
    m.tenants_denied = td_counter("td_tenant_refusals_total", "reason=\"denied\"", refusal_help);
    m.finished = td_counter("td_request_success_total", "", "Requests finished");
    m.failed = td_counter("td_request_failure_total", "", "Requests refused or failed");
    m.cancelled = td_counter("td_request_cancelled_total", "", "Requests the client left");
    m.failovers = td_counter("td_request_failovers_total", "", "Attempts moved to other workers");
    m.prompt_tokens = td_counter("td_prompt_tokens_total", "", "Prompt tokens accepted");
    m.output_tokens = td_counter("td_generation_tokens_total", "", "Output tokens sent");
    m.refused = td_counter("td_request_refused_total", "",
                           "Requests refused because objectives or queues had no room (in "
                           "td_request_failure_total too)");
    m.deflected = td_counter("td_request_deflected_total", "",
                             "Requests prefilled on a decode worker by choice");
    m.wasted = td_counter("td_wasted_prefill_tokens_total", "",
                          "Prompt tokens computed for attempts that were lost");
    m.good = td_counter(
        "td_slo_requests_total", "outcome=\"good\"",
        "Finished requests with objectives, by outcome; one that misses both counts in both");
    m.missed_ttft = td_counter(
        "td_slo_requests_total", "outcome=\"missed_ttft\"",
        "Finished requests with objectives, by outcome; one that misses both counts in both");
    m.missed_tpot = td_counter(
        "td_slo_requests_total", "outcome=\"missed_tpot\"",
        "Finished requests with objectives, by outcome; one that misses both counts in both");
    m.hit_predicted = td_counter(
        "td_prefix_hit_tokens_total", "source=\"predicted\"",
        "Prompt tokens that the index expected, or the worker found, in its prefix cache");
    m.hit_real = td_counter(
        "td_prefix_hit_tokens_total", "source=\"found\"",
        "Prompt tokens that the index expected, or the worker found, in its prefix cache");
    static const char *const role_label[2] = {"role=\"prefill\"", "role=\"decode\""};
    static const char *const bound_label[TD_BOUND_N] = {
        "by=\"none\"", "by=\"prefill\"", "by=\"transfer\"", "by=\"decode\"", "by=\"router\""};
    for (int i = 0; i < 2; i++) {
        m.wanted[i] = td_gauge(
            "td_recommended_workers", role_label[i],
            "Workers that the offered load asks for, with hysteresis; 0 = too early to say");
        m.needed[i] =
            td_gauge("td_needed_workers", role_label[i], "The same before rounding and hysteresis");
        m.utilisation[i] = td_gauge("td_worker_utilisation", role_label[i],
                                    "Share of time the role's workers spend in steps, EWMA");
    }
    for (int i = 0; i < TD_BOUND_N; i++)
        m.bound[i] = td_gauge("td_goodput_bound", bound_label[i], "1 = this bounds goodput now");
    m.arrival_rate = td_gauge("td_request_arrival_rate", "", "Requests per second, half-life 5 s");
    m.coverage[0] = td_gauge(
        "td_prediction_coverage", "objective=\"ttft\"",
        "Share of the last 512 placed requests within prediction times margin; aims at attainment");
    m.coverage[1] = td_gauge(
        "td_prediction_coverage", "objective=\"tpot\"",
        "Share of the last 512 placed requests within prediction times margin; aims at attainment");
    m.mape[0] = td_gauge(
        "td_prediction_mape", "objective=\"ttft\"",
        "Mean absolute error of predictions over the last 512, relative to what was observed");
    m.mape[1] = td_gauge(
        "td_prediction_mape", "objective=\"tpot\"",
        "Mean absolute error of predictions over the last 512, relative to what was observed");
    m.mismatches = td_counter("td_token_mismatch_total", "",
                              "A worker contradicted a token already sent (must stay 0)");
    return &m;
}

static td_status open_model(struct router *r, struct td_err *err)
{
    td_status s = td_model_config_load(r->cfg.model, &r->model, err);
    if (!s) s = td_tokenizer_load(r->cfg.model, &r->tokenizer, err);
    if (!s) s = td_chat_template_load(r->cfg.model, &r->chat, err);
    if (s) return s;
    r->longest_token_bytes = 16;
    for (int32_t i = 0; i < td_tokenizer_vocab(r->tokenizer); i++) {
        size_t n = 0;
        if (td_tokenizer_token_text(r->tokenizer, i, &n) && n > r->longest_token_bytes)
            r->longest_token_bytes = n;
    }
    td_chat_template_set_max_bytes(r->chat,
                                   r->longest_token_bytes * (size_t)r->model.max_positions);
    if (r->cfg.served_model_name[0]) {
        snprintf(r->model_name, sizeof r->model_name, "%s", r->cfg.served_model_name);
        return TD_OK;
    }
    char *real = realpath(r->cfg.model, NULL);
    const char *slash = real ? strrchr(real, '/') : NULL;
    snprintf(r->model_name, sizeof r->model_name, "%s", slash ? slash + 1 : r->cfg.model);
    free(real);
    return TD_OK;
}

/* The longest text that max_len tokens can be, or as many ids of at most five bytes; what else
 * is in a request is bounded by counts (stop strings, biases, messages' heads) and is below 1
 * MiB. The bounds: a message of gRPC's own default always fits, and 32 MiB are more text than
 * the tokenizer takes in a second. */
static uint64_t derived_message_bytes(const struct router *r)
{
    uint64_t per_token = r->longest_token_bytes > 5 ? r->longest_token_bytes : 5;
    uint64_t bytes = per_token * router_max_len(r) + (1u << 20);
    return bytes < 4u << 20 ? 4u << 20 : bytes > 32u << 20 ? 32u << 20 : bytes;
}

static td_status open_core(struct router *r, struct td_err *err)
{
    const struct router_config *g = &r->cfg;
    struct td_core_config c = {.mode = !strcmp(g->mode, "pd")          ? TD_MODE_PD
                                       : !strcmp(g->mode, "colocated") ? TD_MODE_COLOCATED
                                                                       : TD_MODE_HYBRID,
                               .policy = g->policy,
                               .max_requests = (uint32_t)g->max_requests,
                               .max_queued = (uint32_t)g->max_queued,
                               .hybrid_local_tokens = (uint32_t)g->hybrid_local_tokens,
                               .worker_timeout_ms = (uint32_t)g->worker_timeout_ms,
                               .queue_timeout_ms = (uint32_t)g->queue_timeout_ms,
                               .stall_ms = (uint32_t)g->stall_ms,
                               .max_failovers = (uint32_t)g->max_failovers,
                               .attainment = g->attainment,
                               .max_prefix_entries = g->prefix_entries,
                               .seed = r->incarnation};
    td_status s = router_classes_parse(g->slo_class, &c, err);
    if (!s && g->latency_table[0])
        s = router_latency_table_load(g->latency_table, &c, r->node_classes, NULL, err);
    if (!s) s = td_core_create(&c, &r->core, err);
    if (s) return s;
    r->core_cfg = c;
    r->n_node_classes = c.n_thetas;
    r->prefix_seed = td_random_u64();
    if (g->tenants[0]) {
        /* before it is read: a change meanwhile is seen at the next look */
        td_file_stamps_take(&g->tenants, 1, &r->tenants_stamp);
        if ((s = router_tenants_load(g->tenants, &c, &r->tenants, err)))
            return td_err_prefix(err, "tenants");
        td_info("tenants_loaded", "n=%zu", router_tenants_n(r->tenants));
        if (router_tenants_have_keys(r->tenants) && !g->tls_cert[0])
            td_warn(
                "keys_in_clear",
                "listen=%s hint=\"tenants' keys travel in clear text: give tls_cert and tls_key\"",
                g->listen);
    }
    size_t n = (size_t)g->max_requests;
    r->actions = calloc(TD_CORE_MAX_ACTIONS_PER_EVENT, sizeof *r->actions);
    r->requests = calloc(n, sizeof *r->requests);
    r->free_requests = calloc(n, sizeof *r->free_requests);
    if (!r->actions || !r->requests || !r->free_requests)
        return td_fail(err, TD_ERR_NOMEM, "no memory for max_requests %zu", n);
    for (size_t i = 0; i < n; i++) {
        r->requests[i].request_at = (uint32_t)i;
        r->free_requests[r->n_free_requests++] = (uint32_t)(n - 1 - i);
    }
    if (g->decision_log[0]) {
        r->log = fopen(g->decision_log, "w");
        if (!r->log)
            return td_fail(err, TD_ERR_IO, "decision_log \"%s\": %s", g->decision_log,
                           strerror(errno));
        char line[TD_CORE_LINE_MAX];
        for (uint32_t i = 0; td_core_config_format(&c, i, line, sizeof line) > 0; i++)
            fputs(line, r->log);
    }
    return TD_OK;
}

/* Who may join, and the rule for the port at which they do. */
static td_status open_identity(struct router *r, struct td_err *err)
{
    const struct router_config *g = &r->cfg;
    bool own_port = g->worker_listen[0] != 0;
    td_status s = td_identity_open(&g->identity, r->use_tls && g->tls_ca[0], &r->id, err);
    if (s) return s;
    td_random_fill(r->status_key, sizeof r->status_key);
    if (g->tls_operator_names[0] && (!r->use_tls || !g->tls_ca[0]))
        return td_fail(err, TD_ERR_INVALID,
                       "tls_operator_names is given, and tls_cert, tls_key and tls_ca are not all: "
                       "only a certificate of a CA proves a name");
    if (g->tls_operator_names[0] &&
        (s = td_peer_names_parse("tls_operator_names", g->tls_operator_names, &r->operators, err)))
        return s;
    return own_port ? td_identity_check_port(&r->id, "worker_listen", g->worker_listen,
                                             "Registry, at which workers join", "tls-worker-names",
                                             r->id.workers != NULL, err)
                    : td_identity_check_port(&r->id, "listen", g->listen,
                                             "Registry, at which workers join (--worker-listen "
                                             "gives them a port of their own)",
                                             "tls-worker-names", r->id.workers != NULL, err);
}

static td_status open_worker_server(struct router *r, struct td_err *err)
{
    const struct td_rpc_method *services[] = {registry_methods, NULL};
    struct td_rpc_server_config c = {
        .loop = r->loop,
        .address = r->cfg.worker_listen,
        .tls = r->use_tls ? &r->tls : NULL,
        .services = services,
        .limits = {.max_message_bytes = (uint32_t)r->cfg.max_message_bytes},
        .port_check_ms = (uint32_t)r->cfg.port_check_ms,
        .reflection = true,
        .ctx = r};
    struct td_port_config port = r->cfg.port;
    port.max_connections_per_peer = port.max_calls_per_peer = 0; /* told of clients */
    td_port_limits(&port, 2 * TD_CORE_MAX_WORKERS, &c.limits);
    return td_rpc_server_start(&c, &r->worker_server, err);
}

static td_status open_server(struct router *r, struct td_err *err)
{
    r->use_tls = r->cfg.tls_cert[0] != 0;
    if (r->use_tls != (r->cfg.tls_key[0] != 0))
        return td_fail(err, TD_ERR_INVALID, "tls_cert and tls_key must be given together");
    r->tls = (struct td_rpc_tls){
        .cert_file = r->cfg.tls_cert,
        .key_file = r->cfg.tls_key,
        .ca_file = r->cfg.tls_ca[0] ? r->cfg.tls_ca : NULL,
        .server_name = r->cfg.tls_server_name[0] ? r->cfg.tls_server_name : NULL,
        .peer_names =
            r->cfg.identity.tls_worker_names[0] ? r->cfg.identity.tls_worker_names : NULL};
    r->joins_tail = &r->joins;
    td_status s = open_identity(r, err);
    if (!s) s = td_rpc_loop_create("router", &r->loop, err);
    if (s) return s;
    bool own_port = r->cfg.worker_listen[0] != 0;
    const struct td_rpc_method *services[] = {inference_methods, own_port ? NULL : registry_methods,
                                              NULL};
    uint32_t max_calls = (uint32_t)r->cfg.max_requests * 2 + TD_CORE_MAX_WORKERS;
    struct td_rpc_server_config c = {
        .loop = r->loop,
        .address = r->cfg.listen,
        .tls = r->use_tls ? &r->tls : NULL,
        .services = services,
        .limits = {.max_message_bytes = (uint32_t)r->cfg.max_message_bytes,
                   .max_calls_bytes = r->cfg.max_calls_bytes},
        .port_check_ms = (uint32_t)r->cfg.port_check_ms,
        .reflection = true,
        .ctx = r};
    td_port_limits(&r->cfg.port, max_calls, &c.limits);
    s = td_rpc_server_start(&c, &r->server, err);
    return !s && own_port ? open_worker_server(r, err) : s;
}

static void set_serving(struct router *r, bool serving)
{
    td_rpc_server_set_serving(r->server, serving);
    if (r->worker_server) td_rpc_server_set_serving(r->worker_server, serving);
}

static bool port_answers(void *ctx)
{
    const struct router *r = ctx;
    return td_rpc_server_answers(r->server) &&
           (!r->worker_server || td_rpc_server_answers(r->worker_server));
}

/* The same bounds as the gRPC port's. The library counts connections itself, so 0 is resolved. */
static td_status open_http(struct router *r, struct td_err *err)
{
    const struct router_config *g = &r->cfg;
    if (g->tls_cert[0] && g->tls_ca[0])
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "http_listen is \"%.100s\" and tls_ca is given: the HTTP port cannot ask "
                       "clients for certificates; leave out one of them",
                       g->http_listen);
    uint64_t connections = g->port.max_connections ? g->port.max_connections : 16384,
             per_peer = g->port.max_connections_per_peer ? g->port.max_connections_per_peer
                                                         : (connections + 1) / 2;
    struct router_http_config c = {.listen = g->http_listen,
                                   .tls_cert = g->tls_cert,
                                   .tls_key = g->tls_key,
                                   .max_connections = connections,
                                   .max_connections_per_peer = per_peer,
                                   .max_body_bytes = g->max_message_bytes,
                                   .max_bodies_bytes = g->max_calls_bytes,
                                   .healthy = port_answers,
                                   .ctx = r};
    td_status s = router_http_start(r, &c, &r->http, err);
    if (!s)
        td_info("http_ready", "address=%s port=%d tls=%d", g->http_listen,
                router_http_port(r->http), g->tls_cert[0] != 0);
    return s;
}

td_status router_open(struct router *r, const struct router_config *config, struct td_err *err)
{
    sigset_t set;
    td_stop_signals(&set);
    sigaddset(&set, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &set, NULL); /* before gRPC: its threads inherit the mask */
    signal(SIGPIPE, SIG_IGN);
    td_descriptors_raise();
    td_give_back_start();
    r->cfg = *config;
    r->incarnation = td_random_u64();
    r->started_ns = td_now_ns();
    r->m = metrics_new();
    td_status s = open_model(r, err);
    if (!s) router_update_max_len(r);
    if (!s && r->cfg.max_message_bytes && r->cfg.max_message_bytes < 65536)
        s = td_fail(err, TD_ERR_INVALID, "--max-message-bytes is %llu, must be 0 or at least 65536",
                    (unsigned long long)r->cfg.max_message_bytes);
    if (!s && !r->cfg.max_message_bytes) r->cfg.max_message_bytes = derived_message_bytes(r);
    if (!s) s = open_core(r, err);
    if (!s) s = open_server(r, err);
    if (!s && config->metrics_listen[0])
        s = td_metrics_http_start(config->metrics_listen, port_answers, r, &r->metrics, err);
    if (!s && config->http_listen[0]) s = open_http(r, err);
    if (s) return s;
    r->tick = td_rpc_timer_start(r->loop, TICK_MS, on_tick, r);
    td_give_back(); /* what it has now is what it needs */
    set_serving(r, true);
    td_info("ready", "model=%s worker_port=%d port=%d mode=%s policy=%s pid=%d", r->model_name,
            td_rpc_server_port(r->worker_server ? r->worker_server : r->server),
            td_rpc_server_port(r->server), r->cfg.mode, r->cfg.policy, (int)getpid());
    return TD_OK;
}

/* ---- run, drain, close ----------------------------------------------------------------------- */

int router_run(struct router *r)
{
    int sig;
    while (!(sig = td_stop_signal_wait((int)r->cfg.port_check_ms))) {
        td_give_back();
        if (td_rpc_server_is_deaf(r->server) ||
            (r->worker_server && td_rpc_server_is_deaf(r->worker_server))) {
            td_error("port_deaf", "port=%d action=exit hint=\"no new client can come in\"",
                     td_rpc_server_port(r->server));
            return 1;
        }
    }
    td_info("signal", "sig=%d action=drain", sig);
    return 0;
}

void router_drain(struct router *r)
{
    atomic_store(&r->draining, true);
    set_serving(r, false);
    uint64_t deadline = td_deadline_after_ms(td_now_ns(), r->cfg.drain_timeout_ms);
    unsigned live = atomic_load(&r->n_live);
    while (atomic_load(&r->n_live) > 0 && td_now_ns() < deadline)
        if (td_stop_signal_wait(10)) {
            td_warn("second_signal", "live=%u action=exit", atomic_load(&r->n_live));
            _exit(1);
        }
    td_info("drained", "live_at_start=%u left=%u", live, atomic_load(&r->n_live));
}

static void stop_tick(void *arg)
{
    struct router *r = arg;
    td_rpc_timer_cancel(r->tick);
}

void router_close(struct router *r)
{
    if (r->tick) td_rpc_loop_post(r->loop, stop_tick, r);
    router_http_stop(r->http);        /* what waits there is cancelled by the loop */
    td_metrics_http_stop(r->metrics); /* it asks the server how it is */
    if (r->worker_server) td_rpc_server_stop(r->worker_server, 0);
    if (r->server)
        td_rpc_server_stop(r->server, 0); /* cancels what is left; workers' streams
                                             end, their conns and channels with them */
    if (r->loop) td_rpc_loop_destroy(r->loop);
    router_http_free(r->http);
    td_identity_close(&r->id);
    td_peer_names_destroy(r->operators);
    if (r->log) fclose(r->log);
    td_core_destroy(r->core);
    free(r->actions);
    free(r->all_hashes);
    router_tenants_free(r->tenants);
    free(r->requests);
    free(r->free_requests);
    td_chat_template_free(r->chat);
    router_guided_free(r);
    td_tokenizer_free(r->tokenizer);
}
