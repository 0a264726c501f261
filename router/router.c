/* router.c - opens, drains and closes the router. */
#include "router/http/http.h"
#include "router/kserve/kserve.h"
#include "router/router.h"
#include "router/trace_export.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/descriptors.h"
#include "common/base/give_back.h"
#include "common/base/entropy.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/base/signals.h"
#include "common/base/metrics_http.h"
#include "common/base/process_metrics.h"

#define OFF(f) offsetof(struct router_config, f)
#define TICK_MS 50
#define HAND_OVER_MS 1000 /* for the ends of streams that go on elsewhere to be taken */
#define LAST_BYTES_MS 100 /* for what has just been sent to leave, before connections close */
#define LATE_MS 200       /* the core is told of a tick that comes later than this */

// clang-format off
const struct td_option router_options[] = {
    {"model", TD_OPT_LIST, "", 0, 0, NULL, OFF(models.specs),
     "Hugging Face model directory or GGUF file (tokenizer, config and chat template; no weights "
     "are read), or NAME[,ALIAS...]=DIR; again for each further model"},
    {"model_dir", TD_OPT_STR, "", 0, 0, NULL, OFF(models.dir),
     "directory of models: a worker that says model NAME brings NAME of these into service; empty "
     "= --model alone"},
    {"served_model_name", TD_OPT_STR, "", 0, 0, NULL, OFF(models.served_name),
     "NAME[,ALIAS...]: names that clients use for the first model; default the directory's name"},
    {"listen", TD_OPT_STR, "127.0.0.1:7600", 0, 0, NULL, OFF(listen),
     "address for clients, and workers without worker_listen; port 0 = any"},
    {"http_listen", TD_OPT_STR, "", 0, 0, NULL, OFF(http.listen),
     "host:port of the OpenAI-compatible HTTP API; port 0 = any; empty = off"},
    {"page", TD_OPT_ENUM, "on", 0, 0, "on|off", OFF(http.page),
     "a page at / of the HTTP port: a playground, and the cluster as it is"},
    {"http_cors_origins", TD_OPT_STR, "", 0, 0, NULL, OFF(http.cors_origins),
     "origins whose pages may call the HTTP API from a browser: \"https://a.example, "
     "http://localhost:3000\", or \"*\" = any; empty = none"},
    {"test_http_request_ms", TD_OPT_U64, "30000", 100, 600000, NULL, OFF(http.request_ms),
     "HTTP: a connection that has not sent its request by then is closed"},
    {"test_http_behind_bytes", TD_OPT_U64, "8388608", 65536, 1 << 30, NULL, OFF(http.behind_bytes),
     "HTTP: a client that is further behind its stream is cut off"},
    {"test_client_stall_ms", TD_OPT_U64, "60000", 100, 600000, NULL, OFF(client_stall_ms),
     "gRPC: a client that takes nothing for so long is cut off"},
    {"worker_listen", TD_OPT_STR, "", 0, 0, NULL, OFF(worker_listen),
     "address for workers, on which clients are not served: a firewall can then part the two; "
     "empty = workers join at listen"},
    {"mode", TD_OPT_ENUM, "pd", 0, 0, "pd|colocated|hybrid", OFF(core.mode),
     "who prefills: prefill workers, decode workers, or whichever the policy chooses"},
    {"policy", TD_OPT_ENUM, "goodput", 0, 0, TD_CORE_POLICIES, OFF(core.policy),
     "which workers get the next request, and when none should"},
    {"policy", TD_OPT_ELSEWHERE, "", 0, 0, TD_CORE_POLICIES_ELSEWHERE, 0,
     "`tandem sim` has that one, to compare"},
    {"slo_class", TD_OPT_STR, "", 0, 0, NULL, OFF(core.slo_class),
     "classes of requests: \"gold:ttft=450,tpot=40,weight=4 "
     "bulk:preset=mlperf-llama2-70b,best_effort\"; ms; the first, or \"default\", is what "
     "unnamed ones get"},
    {"tenants", TD_OPT_STR, "", 0, 0, NULL, OFF(tenants),
     "JSON file of API keys (as hashes) and certificate names: whose they are, which classes and "
     "rates these have (docs/tenants.md); read again when it changes. Callers that are not in it "
     "are refused. Empty = a tenant is what the client says"},
    TD_OPTION_ALIAS("api_keys", "tenants"),
    {"attainment", TD_OPT_F64, "0.9", 0.5, 0.999, NULL, OFF(core.attainment),
     "share of placed requests that must meet their objectives: what the learned margins aim "
     "at, 0.5..0.999"},
    {"latency_table", TD_OPT_LIST, "", 0, 0, NULL, OFF(models.latency_table),
     "prior of the latency model by node class, as `tandem bench calibrate` writes it: FILE, or "
     "again NAME=FILE for a model that has its own; empty = learn from nothing"},
    {"prefix_entries", TD_OPT_U64, "1048576", 0, 1 << 28, NULL, OFF(core.prefix_entries),
     "(block, worker) pairs the prefix index of a model can hold; 0 = place without looking at "
     "prefixes"},
    {"test_hybrid_local_tokens", TD_OPT_U64, "64", 0, 1 << 30, NULL, OFF(core.hybrid_local_tokens),
     "hybrid, other policies than goodput: shorter prompts are prefilled on the decode worker"},
    TD_OPTION_DECIDED("hybrid_local_tokens", "mode hybrid prefills on the decode worker by policy "
                                             "goodput's forecast, or prompts under 64 tokens with "
                                             "another policy"),
    {"test_drain_linger_ms", TD_OPT_U64, "1000", 0, 60000, NULL, OFF(drain_linger_ms),
     "a draining router waits so long for a moment without requests before it tells clients to go"},
    {"test_http_send_bytes", TD_OPT_U64, "0", 0, 1 << 30, NULL, OFF(http.send_bytes),
     "what the kernel keeps of an HTTP connection's answer; 0 = what it chooses"},
    {"test_guide_gate", TD_OPT_STR, "", 0, 0, NULL, OFF(guides.gate),
     "no grammar is compiled before this file is there"},
    {"test_guide_wait_ms", TD_OPT_U64, "10000", 1, 600000, NULL, OFF(guides.wait_ms),
     "a request whose grammar is not compiled by then is refused"},
    {"test_multiplex", TD_OPT_ENUM, "on", 0, 0, "on|off", OFF(multiplex),
     "all calls to a worker go in one stream if it takes such; off: each is a call of its own"},
    {"max_requests", TD_OPT_I64, "1024", 1, TD_CORE_MAX_REQUESTS, NULL, OFF(core.max_requests),
     "live requests; more are refused with a retry delay"},
    {"max_queued", TD_OPT_I64, "512", 0, TD_CORE_MAX_REQUESTS, NULL, OFF(core.max_queued),
     "requests waiting for a worker of one model; more are refused"},
    {"max_model_len", TD_OPT_I64, "0", 0, 16777216, NULL, OFF(models.max_len),
     "longest sequence in tokens; 0 = what model and workers allow"},
    {"worker_timeout_ms", TD_OPT_U64, "2000", 100, 600000, NULL, OFF(core.worker_timeout_ms),
     "a worker silent for so long loses its requests to others"},
    {"queue_timeout_ms", TD_OPT_U64, "30000", 1, 3600000, NULL, OFF(core.queue_timeout_ms),
     "longest wait for a worker"},
    {"stall_ms", TD_OPT_U64, "120000", 100, 3600000, NULL, OFF(core.stall_ms),
     "a request in which nothing moves for so long fails over"},
    {"max_failovers", TD_OPT_U64, "8", 0, 1000, NULL, OFF(core.max_failovers),
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
    {"decision_log", TD_OPT_STR, "", 0, 0, NULL, OFF(observe.decision_log),
     "file for the core's events and actions; replays to the same decisions; of a further model "
     "FILE.NAME"},
    {"drain_timeout_ms", TD_OPT_U64, "30000", 0, 3600000, NULL, OFF(drain_timeout_ms),
     "SIGTERM: finish for so long, then cancel"},
    {"log_level", TD_OPT_ENUM, "info", 0, 0, "debug|info|warn|error", OFF(observe.log_level),
     "least level logged"},
    {"log_format", TD_OPT_ENUM, "logfmt", 0, 0, "logfmt|json", OFF(observe.log_format),
     "json: each line is an object with the keys of logfmt"},
    {"metrics_listen", TD_OPT_STR, "", 0, 0, NULL, OFF(observe.metrics_listen),
     "HTTP host:port of /metrics and /healthz; empty = off"},
    {"metrics_alias", TD_OPT_ENUM, "none", 0, 0, "none|vllm", OFF(observe.metrics_alias),
     "tell metrics under vLLM's names too, for dashboards made for it"},
    {"otlp_endpoint", TD_OPT_STR, "", 0, 0, NULL, OFF(observe.otlp_endpoint),
     "http://HOST:PORT/v1/traces of an OpenTelemetry receiver, to which spans of requests go; "
     "empty = what OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT says, or "
     "none"},
    {"trace_sample", TD_OPT_U64, "1", 0, 1000000000, NULL, OFF(observe.trace_sample),
     "one in N of the requests that come without a traceparent is traced; 0 = none of them"},
    {"tls_cert", TD_OPT_STR, "", 0, 0, NULL, OFF(tls.cert),
     "certificate chain (PEM); with tls_key turns TLS on"},
    {"tls_key", TD_OPT_STR, "", 0, 0, NULL, OFF(tls.key), "private key (PEM)"},
    {"tls_ca", TD_OPT_STR, "", 0, 0, NULL, OFF(tls.ca),
     "CA that workers, and clients, must be signed by (mutual TLS)"},
    {"tls_server_name", TD_OPT_STR, "", 0, 0, NULL, OFF(tls.server_name),
     "name that workers' certificates must hold; empty = the host each advertises"},
    TD_OPTION_DECIDED("tls_client_auth", "with tls_ca callers must show a certificate of it, "
                                         "without they are not asked for one"),
    TD_IDENTITY_OPTIONS(struct router_config, identity),
    {"tls_operator_names", TD_OPT_STR, "", 0, 0, NULL, OFF(tls.operator_names),
     "names of certificates to which Status shows workers' names, addresses and loads, as to "
     "workers and routers; others see role and state"},
    {0},
};
// clang-format on

/* Reads the tenants again when their file looks different: once a second at most. A file that is
 * wrong leaves those in force. */
static void follow_tenants(struct router *r, uint64_t now_ns)
{
    if (!r->cfg.tenants[0] || now_ns - r->tenancy.seen_ns < TD_NS_PER_S) return;
    r->tenancy.seen_ns = now_ns;
    struct td_file_stamp stamp;
    td_file_stamps_take(&r->cfg.tenants, 1, &stamp);
    if (td_file_stamps_equal(&stamp, &r->tenancy.stamp, 1)) return;
    r->tenancy.stamp = stamp;
    struct router_tenants *fresh = NULL;
    struct td_err err = {0};
    char quoted[1100];
    td_status s = router_tenants_load(r->cfg.tenants, &r->core_cfg, &fresh, &err);
    pthread_mutex_lock(&r->tenancy.lock); /* from who asks for rates before a body is read */
    if (!s) s = tenant_uses_follow(&r->tenancy.uses, fresh, now_ns, &err);
    pthread_mutex_unlock(&r->tenancy.lock);
    if (s) {
        router_tenants_free(fresh);
        td_warn("tenants_refused", "action=keep_old err=%s",
                td_log_quote(quoted, sizeof quoted, err.msg));
        return;
    }
    pthread_mutex_lock(&r->tenancy.lock);
    router_tenants_free(r->tenancy.known); /* requests hold nothing of it */
    r->tenancy.known = fresh;
    pthread_mutex_unlock(&r->tenancy.lock);
    td_info("tenants_loaded", "n=%zu", router_tenants_n(fresh));
}

/* How busy this thread was since the last tick, and by how much that one was late: less than
 * LATE_MS is nothing. */
static uint64_t busy_permille(struct router *r, uint64_t *ret_late_ms)
{
    uint64_t now = td_now_ns(), cpu = td_thread_cpu_ns(), busy = 0, gap_ms = 0;
    if (r->tick.at_ns && now > r->tick.at_ns) {
        busy = (cpu - r->tick.cpu_ns) * 1000 / (now - r->tick.at_ns);
        gap_ms = (now - r->tick.at_ns) / TD_NS_PER_MS;
    }
    *ret_late_ms = gap_ms >= TICK_MS + LATE_MS ? gap_ms - TICK_MS : 0;
    r->tick.at_ns = now;
    r->tick.cpu_ns = cpu;
    return busy < 1000 ? busy : 1000;
}

/* Whether clients should come: there is a model with workers of each role that its mode needs. */
static void see_readiness(struct router *r)
{
    bool ready = kserve_server_is_ready(r);
    if (ready == atomic_load(&r->ready)) return;
    atomic_store(&r->ready, ready);
    td_rpc_server_set_ready(r->server, ready);
}

static bool is_ready(void *ctx)
{
    struct router *r = ctx;
    return atomic_load(&r->ready) && !atomic_load(&r->draining);
}

static void on_tick(void *arg)
{
    struct router *r = arg;
    uint64_t late_ms, busy = busy_permille(r, &late_ms);
    if (late_ms >= r->cfg.core.worker_timeout_ms / 2)
        td_warn("router_was_away",
                "ms=%llu action=forgive_silence hint=\"the process was stopped or had no CPU\"",
                (unsigned long long)late_ms);
    for (uint32_t i = 0; i < r->n_models; i++)
        served_model_tick(r->models[i],
                          (struct td_ev_tick){.busy_permille = busy, .late_ms = late_ms});
    join_tick(r, td_now_ns());
    see_readiness(r);
    router_guides_tick(r, td_now_ns());
    router_http_tick(r->http, td_now_ns());
    follow_tenants(r, td_now_ns());
    td_identity_look_at_file(&r->id, td_now_ns());
    if (td_port_follow(&r->port_seen, r->server, td_now_ns())) td_log_tell_suppressed();
}

/* ---- open ------------------------------------------------------------------------------------ */

static void metrics_make(struct router_metrics *m)
{
    static const char *const refusal_help = "Requests of callers that are no tenant of the file "
                                            "(unknown), or not the one they name (denied)";
    m->tenants_unknown = td_counter("td_tenant_refusals_total", "reason=\"unknown\"", refusal_help);
    m->tenants_denied = td_counter("td_tenant_refusals_total", "reason=\"denied\"", refusal_help);
    m->failed = td_counter("td_request_failure_total", "", "Requests refused or failed");
}

/* The longest text that max_len tokens can be, or as many ids of at most five bytes; what else
 * is in a request is bounded by counts (stop strings, biases, messages' heads) and is below 1
 * MiB. The bounds: a message of gRPC's own default always fits, and 32 MiB are more text than
 * the tokenizer takes in a second. */
static uint64_t derived_message_bytes(const struct router *r)
{
    uint64_t bytes = 4u << 20, most = 32u << 20;
    if (r->cfg.models.dir[0]) return most; /* what comes is not known yet */
    for (uint32_t i = 0; i < r->n_models; i++) {
        const struct served_model *m = r->models[i];
        uint64_t per_token = m->longest_token_bytes > 5 ? m->longest_token_bytes : 5,
                 needed = per_token * served_model_max_len(m) + (1u << 20);
        if (needed > bytes) bytes = needed;
    }
    return bytes < most ? bytes : most;
}

/* What the cores of all models are told alike. */
static td_status configure_cores(struct router *r, struct td_err *err)
{
    const struct router_config *g = &r->cfg;
    r->core_cfg =
        (struct td_core_config){.mode = !strcmp(g->core.mode, "pd")          ? TD_MODE_PD
                                        : !strcmp(g->core.mode, "colocated") ? TD_MODE_COLOCATED
                                                                             : TD_MODE_HYBRID,
                                .policy = g->core.policy,
                                .max_requests = (uint32_t)g->core.max_requests,
                                .max_queued = (uint32_t)g->core.max_queued,
                                .hybrid_local_tokens = (uint32_t)g->core.hybrid_local_tokens,
                                .worker_timeout_ms = (uint32_t)g->core.worker_timeout_ms,
                                .queue_timeout_ms = (uint32_t)g->core.queue_timeout_ms,
                                .stall_ms = (uint32_t)g->core.stall_ms,
                                .max_failovers = (uint32_t)g->core.max_failovers,
                                .attainment = g->core.attainment,
                                .max_prefix_entries = g->core.prefix_entries,
                                .seed = r->incarnation};
    return router_classes_parse(g->core.slo_class, &r->core_cfg, err);
}

static td_status open_tenants(struct router *r, struct td_err *err)
{
    const struct router_config *g = &r->cfg;
    pthread_mutex_init(&r->tenancy.lock, NULL);
    if (!g->tenants[0]) return TD_OK;
    /* before it is read: a change meanwhile is seen at the next look */
    td_file_stamps_take(&g->tenants, 1, &r->tenancy.stamp);
    td_status s = router_tenants_load(g->tenants, &r->core_cfg, &r->tenancy.known, err);
    if (!s) s = tenant_uses_follow(&r->tenancy.uses, r->tenancy.known, td_now_ns(), err);
    if (s) return td_err_prefix(err, "tenants");
    td_info("tenants_loaded", "n=%zu", router_tenants_n(r->tenancy.known));
    if (router_tenants_have_keys(r->tenancy.known) && !g->tls.cert[0])
        td_warn("keys_in_clear",
                "listen=%s hint=\"tenants' keys travel in clear text: give tls_cert and tls_key\"",
                g->listen);
    return TD_OK;
}

static td_status open_requests(struct router *r, struct td_err *err)
{
    size_t n = (size_t)r->cfg.core.max_requests;
    r->pool.shares.n_requests = (uint32_t)n;
    r->actions = calloc(TD_CORE_MAX_ACTIONS_PER_EVENT, sizeof *r->actions);
    r->pool.at = calloc(n, sizeof *r->pool.at);
    r->pool.free = calloc(n, sizeof *r->pool.free);
    if (!r->actions || !r->pool.at || !r->pool.free)
        return td_fail(err, TD_ERR_NOMEM, "no memory for max_requests %zu", n);
    for (size_t i = 0; i < n; i++) {
        r->pool.at[i].request_at = (uint32_t)i;
        r->pool.free[r->pool.n_free++] = (uint32_t)(n - 1 - i);
    }
    return TD_OK;
}

/* Who may join, and the rule for the port at which they do. */
static td_status open_identity(struct router *r, struct td_err *err)
{
    const struct router_config *g = &r->cfg;
    bool own_port = g->worker_listen[0] != 0;
    td_status s = td_identity_open(&g->identity, r->use_tls && g->tls.ca[0], &r->id, err);
    if (s) return s;
    td_random_fill(r->status_key, sizeof r->status_key);
    if (g->tls.operator_names[0] && (!r->use_tls || !g->tls.ca[0]))
        return td_fail(err, TD_ERR_INVALID,
                       "tls_operator_names is given, and tls_cert, tls_key and tls_ca are not all: "
                       "only a certificate of a CA proves a name");
    if (g->tls.operator_names[0] &&
        (s = td_peer_names_parse("tls_operator_names", g->tls.operator_names, &r->operators, err)))
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
    r->use_tls = r->cfg.tls.cert[0] != 0;
    if (r->use_tls != (r->cfg.tls.key[0] != 0))
        return td_fail(err, TD_ERR_INVALID, "tls_cert and tls_key must be given together");
    r->tls = (struct td_rpc_tls){
        .cert_file = r->cfg.tls.cert,
        .key_file = r->cfg.tls.key,
        .ca_file = r->cfg.tls.ca[0] ? r->cfg.tls.ca : NULL,
        .server_name = r->cfg.tls.server_name[0] ? r->cfg.tls.server_name : NULL,
        .peer_names =
            r->cfg.identity.tls_worker_names[0] ? r->cfg.identity.tls_worker_names : NULL};
    r->joining.end = &r->joining.first;
    td_status s = open_identity(r, err);
    if (!s) s = td_rpc_loop_create("router", &r->loop, err);
    if (s) return s;
    bool own_port = r->cfg.worker_listen[0] != 0;
    const struct td_rpc_method *services[] = {inference_methods, kserve_methods,
                                              own_port ? NULL : registry_methods, NULL};
    uint32_t max_calls = (uint32_t)r->cfg.core.max_requests * 2 + TD_CORE_MAX_WORKERS;
    struct td_rpc_server_config c = {
        .loop = r->loop,
        .address = r->cfg.listen,
        .tls = r->use_tls ? &r->tls : NULL,
        .services = services,
        .limits = {.max_message_bytes = (uint32_t)r->cfg.max_message_bytes,
                   .max_calls_bytes = r->cfg.max_calls_bytes,
                   .max_stall_ms = (uint32_t)r->cfg.client_stall_ms},
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
    uint64_t connections = g->port.max_connections ? g->port.max_connections : 16384,
             per_peer = g->port.max_connections_per_peer ? g->port.max_connections_per_peer
                                                         : (connections + 1) / 2;
    struct router_http_config c = {.listen = g->http.listen,
                                   .tls_cert = g->tls.cert,
                                   .tls_key = g->tls.key,
                                   .tls_ca = g->tls.ca,
                                   .request_ms = g->http.request_ms,
                                   .cors_origins = g->http.cors_origins,
                                   .max_connections = connections,
                                   .max_connections_per_peer = per_peer,
                                   .max_body_bytes = g->max_message_bytes,
                                   .max_bodies_bytes = g->max_calls_bytes,
                                   .send_bytes = (int)g->http.send_bytes,
                                   .behind_bytes = g->http.behind_bytes,
                                   .page = !strcmp(g->http.page, "on"),
                                   .healthy = port_answers,
                                   .ctx = r};
    td_status s = router_http_start(r, &c, &r->http, err);
    if (!s)
        td_info("http_ready", "address=%s port=%d tls=%d", g->http.listen,
                router_http_port(r->http), g->tls.cert[0] != 0);
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
    r->prefixes.seed = td_random_u64();
    td_process_metrics_open("");
    metrics_make(&r->metrics);
    td_status s = configure_cores(r, err);
    if (!s) s = open_tenants(r, err);
    if (!s) s = router_models_open(r, err);
    if (!s && r->cfg.max_message_bytes && r->cfg.max_message_bytes < 65536)
        s = td_fail(err, TD_ERR_INVALID, "--max-message-bytes is %llu, must be 0 or at least 65536",
                    (unsigned long long)r->cfg.max_message_bytes);
    if (!s && !r->cfg.max_message_bytes) r->cfg.max_message_bytes = derived_message_bytes(r);
    if (!s) s = open_requests(r, err);
    if (!s) s = router_guides_open(r, err);
    if (!s) s = trace_open(r, err);
    const char *first = r->n_models ? served_model_name(r->models[0]) : "-";
    uint32_t n_models = r->n_models; /* the loop's, once clients and workers come */
    if (!s) s = open_server(r, err);
    if (!s && config->observe.metrics_listen[0])
        s = td_metrics_http_start(config->observe.metrics_listen, port_answers, r, &r->metrics_http,
                                  err);
    if (!s && r->metrics_http) td_metrics_http_set_ready(r->metrics_http, is_ready);
    if (!s && config->http.listen[0]) s = open_http(r, err);
    if (s) return s;
    r->tick.timer = td_rpc_timer_start(r->loop, TICK_MS, on_tick, r);
    td_give_back();                            /* what it has now is what it needs */
    td_rpc_server_set_ready(r->server, false); /* no worker is there */
    set_serving(r, true);
    td_info("ready", "model=%s models=%u worker_port=%d port=%d mode=%s policy=%s pid=%d", first,
            n_models, td_rpc_server_port(r->worker_server ? r->worker_server : r->server),
            td_rpc_server_port(r->server), r->cfg.core.mode, r->cfg.core.policy, (int)getpid());
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

/* 10 ms. A second signal ends the process. */
static void nap(struct router *r)
{
    if (!td_stop_signal_wait(10)) return;
    td_warn("second_signal", "live=%u action=exit", atomic_load(&r->n_live));
    _exit(1);
}

/* Until no request is live, at most until deadline_ns. */
static void wait_idle(struct router *r, uint64_t deadline_ns)
{
    while (atomic_load(&r->n_live) > 0 && td_now_ns() < deadline_ns) nap(r);
}

/* Nobody is refused while it drains. Clients are told by GOAWAY to go elsewhere, and over HTTP each
 * answer ends its connection; before, it waits for a moment without requests, which comes soon if
 * all of them are short. What has no time to finish is handed over: its end says so, behind all
 * that was made, and its client goes on at another router. */
void router_drain(struct router *r)
{
    atomic_store(&r->draining, true);
    set_serving(r, false);
    uint64_t deadline = td_deadline_after_ms(td_now_ns(), r->cfg.drain_timeout_ms);
    uint64_t linger = td_deadline_after_ms(td_now_ns(), r->cfg.drain_linger_ms);
    unsigned live = atomic_load(&r->n_live);
    wait_idle(r, linger < deadline ? linger : deadline);
    if (td_now_ns() < deadline) {
        td_rpc_server_goaway(r->server);
        router_http_quiesce(r->http);
        while (!td_rpc_server_is_away(r->server) && td_now_ns() < deadline) nap(r);
        wait_idle(r, deadline);
    }
    unsigned left = atomic_load(&r->n_live);
    if (left) td_rpc_loop_post(r->loop, inference_hand_over, r);
    deadline = td_deadline_after_ms(td_now_ns(), HAND_OVER_MS);
    while ((atomic_load(&r->n_live) > 0 || !router_http_is_idle(r->http)) && td_now_ns() < deadline)
        if (td_stop_signal_wait(10)) break;
    td_info("drained", "live_at_start=%u left=%u", live, left);
}

static void stop_tick(void *arg)
{
    struct router *r = arg;
    td_rpc_timer_cancel(r->tick.timer);
}

void router_close(struct router *r)
{
    if (r->tick.timer) td_rpc_loop_post(r->loop, stop_tick, r);
    router_http_stop(r->http);             /* what waits there is cancelled by the loop */
    td_metrics_http_stop(r->metrics_http); /* it asks the server how it is */
    if (r->worker_server) td_rpc_server_stop(r->worker_server, 0);
    if (r->server) /* cancels what is left; workers' streams end, their conns and channels with
                      them */
        td_rpc_server_stop(r->server, atomic_load(&r->draining) ? LAST_BYTES_MS : 0);
    if (r->loop) router_models_stop(r);
    router_guides_stop(r);
    if (r->loop) td_rpc_loop_destroy(r->loop);
    trace_export_stop(r->trace_export);
    router_http_free(r->http);
    td_identity_close(&r->id);
    td_peer_names_destroy(r->operators);
    router_models_close(r);
    free(r->actions);
    free(r->prefixes.all);
    router_tenants_free(r->tenancy.known);
    pthread_mutex_destroy(&r->tenancy.lock);
    tenant_uses_free(r->tenancy.uses);
    free(r->pool.at);
    free(r->pool.free);
    router_guides_free(r);
}
