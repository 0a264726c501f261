/* trace_export.c - a ring of records under one lock, and a thread that takes them out in batches.
 *
 * libcurl is loaded only where an endpoint is given. The thread drives its multi interface, because
 * a wait there can be cut short: stop wakes it, and brings nearer the end of the POST that is in
 * flight.
 * A POST that fails is not tried again: traces are samples, and a queue behind a receiver that is
 * away would only grow. */
#include "router/trace_export.h"

#include <jansson.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/clock.h"
#include "common/base/curl.h"
#include "common/base/entropy.h"
#include "common/base/log.h"
#include "common/base/metrics.h"

enum {
    LINGER_MS = 500,      /* for a batch to fill: a receiver's view is this late */
    CONNECT_MS = 1000,    /* of a POST, and */
    POST_MS = 3000,       /* in all: a receiver that takes longer loses what it was sent */
    LAST_POST_MS = 1000,  /* of a POST while the router stops, also of what is left of one, */
    STOP_MS = 2000,       /* which has ended the last of them by then */
    MAX_ANSWER = 1 << 16, /* bytes that are read of an answer, and dropped */
};

/* ---- JSON ------------------------------------------------------------------------------------ */

/* A value that is not UTF-8 cannot be told: a proto3 string must be. */
static json_t *text_of(const char *text)
{
    json_t *v = json_string(text);
    return v ? v : json_string("(not UTF-8)");
}

static json_t *number_of(uint64_t n) /* protobuf's JSON has 64-bit numbers as strings */
{
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)n);
    return json_string(text);
}

static json_t *hex_of(const uint8_t *bytes, size_t n)
{
    char text[33];
    for (size_t i = 0; i < n; i++) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    return json_string(text);
}

static void add(json_t *list, const char *key, const char *type, json_t *value)
{
    json_array_append_new(list, json_pack("{s:s, s:{s:o}}", "key", key, "value", type, value));
}

static void add_text(json_t *list, const char *key, const char *text)
{
    if (text[0]) add(list, key, "stringValue", text_of(text));
}

static void add_number(json_t *list, const char *key, uint64_t n)
{
    add(list, key, "intValue", number_of(n));
}

static json_t *attributes_of(const struct trace_record *r)
{
    json_t *list = json_array();
    add_text(list, "tandem.request_id", r->request_id);
    add_text(list, "gen_ai.request.model", r->model);
    add_number(list, "gen_ai.usage.input_tokens", r->n_prompt);
    add_number(list, "gen_ai.usage.output_tokens", r->n_output);
    add_text(list, "tandem.slo_class", r->slo_class);
    add_text(list, "tandem.prefill_worker", r->prefill_worker);
    add_text(list, "tandem.decode_worker", r->decode_worker);
    add_number(list, "rpc.grpc.status_code", r->code);
    if (!r->has_stages) return list;
    add_text(list, "tandem.transfer_path", r->transfer_path);
    add_number(list, "tandem.transfer_us", r->transfer_us);
    add_number(list, "tandem.transfer_exposed_us", r->transfer_exposed_us);
    add_number(list, "tandem.transfer_bytes", r->transfer_bytes);
    add_number(list, "tandem.decode_queue_us", r->decode_queue_us);
    add_number(list, "tandem.first_step_us", r->first_step_us);
    add_number(list, "tandem.failovers", r->failovers);
    add_number(list, "tandem.preemptions", r->preemptions);
    return list;
}

static void fill_id(uint8_t id[8])
{
    uint64_t n;
    do n = td_random_u64();
    while (!n); /* all zeros is no id */
    memcpy(id, &n, sizeof n);
}

/* Appends a span; parent NULL: it begins a trace. kind: SPAN_KIND_INTERNAL 1, SERVER 2. */
static json_t *add_span(json_t *spans, const struct trace_record *r, const uint8_t id[8],
                        const uint8_t *parent, const char *name, int kind, uint64_t begin_ns,
                        uint64_t us)
{
    json_t *span = json_pack("{s:o, s:o, s:s, s:i, s:o, s:o}", "traceId",
                             hex_of(r->at.trace_id, sizeof r->at.trace_id), "spanId", hex_of(id, 8),
                             "name", name, "kind", kind, "startTimeUnixNano", number_of(begin_ns),
                             "endTimeUnixNano", number_of(begin_ns + us * TD_NS_PER_US));
    if (parent) json_object_set_new(span, "parentSpanId", hex_of(parent, 8));
    json_array_append_new(spans, span);
    return span;
}

static void add_request(json_t *spans, const struct trace_record *r)
{
    static const char *const names[TRACE_N_STAGES] = {"router_queue", "reserve", "prefill_queue",
                                                      "prefill",      "rpc",     "decode"};
    uint8_t id[8], stage_id[8];
    fill_id(id);
    json_t *request = add_span(spans, r, id, r->has_parent ? r->at.parent_id : NULL, "request", 2,
                               r->begin_ns, r->e2e_us);
    json_object_set_new(request, "attributes", attributes_of(r));
    if (r->code) /* STATUS_CODE_ERROR */
        json_object_set_new(request, "status", json_pack("{s:i}", "code", 2));
    uint64_t begin_ns = r->begin_ns;
    for (int i = 0; r->has_stages && i < TRACE_N_STAGES; i++) {
        fill_id(stage_id);
        json_t *stage = add_span(spans, r, stage_id, id, names[i], 1, begin_ns, r->stage_us[i]);
        json_t *list = json_array();
        if (i == 2 || i == 3) add_text(list, "tandem.worker", r->prefill_worker);
        if (i == 1 || i == 5) add_text(list, "tandem.worker", r->decode_worker);
        json_object_set_new(stage, "attributes", list);
        begin_ns += r->stage_us[i] * TD_NS_PER_US;
    }
}

char *trace_export_body(const struct trace_record *records, size_t n)
{
    json_t *spans = json_array(), *resource = json_array();
    for (size_t i = 0; i < n; i++) add_request(spans, &records[i]);
    add_text(resource, "service.name", "tandem-router");
    add_text(resource, "service.version", TD_VERSION);
    json_t *body =
        json_pack("{s:[{s:{s:o}, s:[{s:{s:s}, s:o}]}]}", "resourceSpans", "resource", "attributes",
                  resource, "scopeSpans", "scope", "name", "tandem", "spans", spans);
    char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
    json_decref(body);
    return text;
}

/* ---- the queue and its thread ---------------------------------------------------------------- */

#ifdef TD_HAVE_CURL
static const struct td_curl *curl; /* written by start, before there is a thread */

struct trace_export {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct trace_record *ring, *batch; /* [TRACE_QUEUE], under lock; [TRACE_BATCH], the thread's */
    size_t first, n;                   /* under lock */
    bool stop;                         /* under lock */
    uint64_t stop_ns;                  /* when it was asked to; 0 = not. Under lock */
    CURLM *multi;                      /* the thread's, but for its wake-up */
    CURL *easy;                        /* the thread's */
    struct curl_slist *headers;
    size_t n_answer;
    char error[CURL_ERROR_SIZE];
    struct td_metric *sent, *dropped_full, *dropped_failed;
};

static size_t on_answer(char *bytes, size_t size, size_t n_bytes, void *ctx)
{
    struct trace_export *x = ctx;
    (void)bytes;
    (void)size; /* always 1 */
    x->n_answer += n_bytes;
    return x->n_answer <= MAX_ANSWER ? n_bytes : 0; /* 0: the transfer fails */
}

static uint64_t stop_time(struct trace_export *x)
{
    pthread_mutex_lock(&x->lock);
    uint64_t ns = x->stop ? x->stop_ns : 0;
    pthread_mutex_unlock(&x->lock);
    return ns;
}

/* When a POST that began then has to be over. */
static uint64_t end_of_post(struct trace_export *x, uint64_t begin_ns)
{
    uint64_t stop_ns = stop_time(x), most_ns = begin_ns + POST_MS * TD_NS_PER_MS;
    if (!stop_ns) return most_ns;
    uint64_t last_ns = (begin_ns > stop_ns ? begin_ns : stop_ns) + LAST_POST_MS * TD_NS_PER_MS;
    return last_ns < most_ns ? last_ns : most_ns;
}

/* The POST that x->easy describes, to its end. */
static CURLcode run_post(struct trace_export *x)
{
    CURLcode rc = CURLE_OPERATION_TIMEDOUT;
    uint64_t begin_ns = td_now_ns();
    if (curl->p_curl_multi_add_handle(x->multi, x->easy)) return CURLE_OUT_OF_MEMORY;
    for (int n_running = 1, n_left;;) {
        CURLMcode failed = curl->p_curl_multi_perform(x->multi, &n_running);
        CURLMsg *m = curl->p_curl_multi_info_read(x->multi, &n_left);
        if (m || failed) rc = m ? m->data.result : CURLE_OUT_OF_MEMORY;
        uint64_t now_ns = td_now_ns(), end_ns = end_of_post(x, begin_ns);
        if (m || failed || now_ns >= end_ns) break;
        curl->p_curl_multi_poll(x->multi, NULL, 0, (int)((end_ns - now_ns) / TD_NS_PER_MS) + 1,
                                NULL);
    }
    curl->p_curl_multi_remove_handle(x->multi, x->easy);
    return rc;
}

static void post(struct trace_export *x, size_t n)
{
    char *body = trace_export_body(x->batch, n), quoted[2 * CURL_ERROR_SIZE];
    long status = 0;
    CURLcode rc = CURLE_OUT_OF_MEMORY;
    x->error[0] = '\0';
    x->n_answer = 0;
    if (body) {
        curl->p_curl_easy_setopt(x->easy, CURLOPT_POSTFIELDS, body);
        curl->p_curl_easy_setopt(x->easy, CURLOPT_POSTFIELDSIZE, (long)strlen(body));
        rc = run_post(x);
        curl->p_curl_easy_getinfo(x->easy, CURLINFO_RESPONSE_CODE, &status);
    }
    free(body);
    if (!rc && status / 100 == 2) {
        td_metric_add(x->sent, n);
        return;
    }
    td_metric_add(x->dropped_failed, n);
    const char *why = x->error[0] ? x->error : curl->p_curl_easy_strerror(rc);
    td_warn_limited("trace_dropped", "requests=%zu http=%ld msg=%s", n, status,
                    td_log_quote(quoted, sizeof quoted, rc ? why : "the receiver refused them"));
}

/* Waits for records, and for a batch to fill. Returns how many are in x->batch; 0 = stop. */
static size_t take_batch(struct trace_export *x)
{
    size_t n;
    pthread_mutex_lock(&x->lock);
    while (!x->n && !x->stop) pthread_cond_wait(&x->changed, &x->lock);
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += LINGER_MS * (long)TD_NS_PER_MS;
    until.tv_sec += until.tv_nsec / (long)TD_NS_PER_S;
    until.tv_nsec %= (long)TD_NS_PER_S;
    while (x->n < TRACE_BATCH && !x->stop)
        if (pthread_cond_timedwait(&x->changed, &x->lock, &until)) break;
    n = x->n < TRACE_BATCH ? x->n : TRACE_BATCH;
    for (size_t i = 0; i < n; i++) x->batch[i] = x->ring[(x->first + i) % TRACE_QUEUE];
    x->first = (x->first + n) % TRACE_QUEUE;
    x->n -= n;
    pthread_mutex_unlock(&x->lock);
    return n;
}

static void *send_all(void *arg)
{
    struct trace_export *x = arg;
    for (size_t n; (n = take_batch(x));) {
        uint64_t stop_ns = stop_time(x);
        if (stop_ns && td_now_ns() - stop_ns > (STOP_MS - LAST_POST_MS) * TD_NS_PER_MS)
            td_metric_add(x->dropped_failed, n);
        else
            post(x, n);
    }
    return NULL;
}

static td_status open_curl(struct trace_export *x, const char *url, struct td_err *err)
{
    x->multi = curl->p_curl_multi_init();
    x->easy = curl->p_curl_easy_init();
    x->headers = curl->p_curl_slist_append(NULL, "Content-Type: application/json");
    if (!x->multi || !x->easy || !x->headers)
        return td_fail(err, TD_ERR_NOMEM, "no memory for traces");
    bool ok = !curl->p_curl_easy_setopt(x->easy, CURLOPT_URL, url);
    ok &= !curl->p_curl_easy_setopt(x->easy, CURLOPT_PROTOCOLS_STR, "http,https");
    ok &= !curl->p_curl_easy_setopt(x->easy, CURLOPT_NOSIGNAL, 1L);
    ok &= !curl->p_curl_easy_setopt(x->easy, CURLOPT_NOPROXY, "*"); /* what is named is meant */
    ok &= !curl->p_curl_easy_setopt(x->easy, CURLOPT_CONNECTTIMEOUT_MS, (long)CONNECT_MS);
    /* Who gives up a name leaves libcurl's thread that asks for it: it ends when the resolver gives
     * up, which may take half a minute. */
    curl->p_curl_easy_setopt(x->easy, CURLOPT_QUICK_EXIT, 1L);
    ok &= !curl->p_curl_easy_setopt(x->easy, CURLOPT_HTTPHEADER, x->headers);
    ok &= !curl->p_curl_easy_setopt(x->easy, CURLOPT_WRITEFUNCTION, on_answer);
    ok &= !curl->p_curl_easy_setopt(x->easy, CURLOPT_WRITEDATA, x);
    ok &= !curl->p_curl_easy_setopt(x->easy, CURLOPT_ERRORBUFFER, x->error);
    ok &= !curl->p_curl_easy_setopt(x->easy, CURLOPT_USERAGENT, "tandem-router/" TD_VERSION);
    return ok ? TD_OK : td_fail(err, TD_ERR_UNSUPPORTED, "otlp_endpoint: libcurl is too old");
}

static void free_export(struct trace_export *x)
{
    if (x->easy) curl->p_curl_easy_cleanup(x->easy);
    if (x->multi) curl->p_curl_multi_cleanup(x->multi);
    if (x->headers) curl->p_curl_slist_free_all(x->headers);
    pthread_cond_destroy(&x->changed);
    pthread_mutex_destroy(&x->lock);
    free(x->ring);
    free(x->batch);
    free(x);
}

static td_status start(const char *url, struct trace_export **ret_export, struct td_err *err)
{
    td_status s = td_curl_load("otlp_endpoint", &curl, err);
    if (s) return s;
    struct trace_export *x = calloc(1, sizeof *x);
    if (!x) return td_fail(err, TD_ERR_NOMEM, "no memory for traces");
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_mutex_init(&x->lock, NULL);
    pthread_cond_init(&x->changed, &attr);
    pthread_condattr_destroy(&attr);
    x->ring = calloc(TRACE_QUEUE, sizeof *x->ring);
    x->batch = calloc(TRACE_BATCH, sizeof *x->batch);
    static const char *const help = "Traced requests whose spans were dropped";
    x->sent = td_counter("td_trace_sent_total", "", "Traced requests whose spans were taken");
    x->dropped_full = td_counter("td_trace_dropped_total", "reason=\"queue_full\"", help);
    x->dropped_failed = td_counter("td_trace_dropped_total", "reason=\"not_taken\"", help);
    if (!x->ring || !x->batch) s = td_fail(err, TD_ERR_NOMEM, "no memory for traces");
    if (!s) s = open_curl(x, url, err);
    if (!s && pthread_create(&x->thread, NULL, send_all, x))
        s = td_fail(err, TD_ERR_IO, "otlp_endpoint: no thread");
    if (s) {
        free_export(x);
        return s;
    }
    *ret_export = x;
    return TD_OK;
}

void trace_export_push(struct trace_export *x, const struct trace_record *record)
{
    pthread_mutex_lock(&x->lock);
    bool is_full = x->n == TRACE_QUEUE;
    if (!is_full) x->ring[(x->first + x->n++) % TRACE_QUEUE] = *record;
    pthread_cond_signal(&x->changed);
    pthread_mutex_unlock(&x->lock);
    if (is_full) td_metric_add(x->dropped_full, 1);
}

void trace_export_stop(struct trace_export *x)
{
    if (!x) return;
    pthread_mutex_lock(&x->lock);
    x->stop = true;
    x->stop_ns = td_now_ns();
    pthread_cond_signal(&x->changed);
    pthread_mutex_unlock(&x->lock);
    curl->p_curl_multi_wakeup(x->multi);
    pthread_join(x->thread, NULL); /* it ends by STOP_MS, see end_of_post */
    free_export(x);
}
#else
static td_status start(const char *url, struct trace_export **ret_export, struct td_err *err)
{
    (void)url;
    (void)ret_export;
    return td_fail(err, TD_ERR_UNSUPPORTED, "otlp_endpoint: built without libcurl's headers");
}
void trace_export_push(struct trace_export *x, const struct trace_record *record)
{
    (void)x;
    (void)record;
}
void trace_export_stop(struct trace_export *x) { (void)x; }
#endif

td_status trace_export_start(const char *url, struct trace_export **ret_export, struct td_err *err)
{
    if (strncmp(url, "http://", 7) != 0 && strncmp(url, "https://", 8) != 0)
        return td_fail(err, TD_ERR_INVALID,
                       "otlp_endpoint must begin with http:// or https://, as in "
                       "http://HOST:PORT/v1/traces");
    return start(url, ret_export, err);
}
