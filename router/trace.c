/* trace.c - which requests are traced, and what is told of one that has ended.
 *
 * A request that came with a traceparent is traced if its caller traces it, as W3C's flag says. Of
 * the others one in trace_sample is, in a trace of its own. Workers are told the trace's id in any
 * case, for their logs. */
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "common/base/log.h"
#include "router/router.h"
#include "router/trace_export.h"

static td_status open_export(struct router *r, struct td_err *err)
{
    char url[1024];
    const char *traces = getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
               *base = getenv("OTEL_EXPORTER_OTLP_ENDPOINT"), *path = "";
    const char *text = r->cfg.observe.otlp_endpoint;
    if (!text[0] && traces) text = traces;
    if (!text[0] && base && base[0]) { /* of all signals: OpenTelemetry puts the path behind it */
        text = base;
        path = base[strlen(base) - 1] == '/' ? "v1/traces" : "/v1/traces";
    }
    if (!text[0]) return TD_OK;
    if ((size_t)snprintf(url, sizeof url, "%s%s", text, path) >= sizeof url)
        return td_fail(err, TD_ERR_INVALID, "otlp_endpoint has %zu bytes, at most %zu",
                       strlen(text), sizeof url - 1 - strlen(path));
    td_status s = trace_export_start(url, &r->trace_export, err);
    if (s) return s;
    /* scheme and host: what stands before @ and behind the path may be a secret */
    char shown[sizeof url], quoted[sizeof url + 8];
    const char *host = strstr(url, "://") + 3;
    size_t scheme = (size_t)(host - url), n = strcspn(host, "/?#");
    for (size_t i = n; i-- > 0;)
        if (host[i] == '@') {
            host += i + 1;
            n -= i + 1;
            break;
        }
    snprintf(shown, sizeof shown, "%.*s%.*s", (int)scheme, url, (int)n, host);
    td_info("traces_on", "endpoint=%s sample=%llu", td_log_quote(quoted, sizeof quoted, shown),
            (unsigned long long)r->cfg.observe.trace_sample);
    return TD_OK;
}

/* OpenTelemetry's variables are set for all programs of a host: what is wrong with them is no
 * reason to serve nobody. */
td_status trace_open(struct router *r, struct td_err *err)
{
    char quoted[2 * sizeof err->msg];
    td_status s = open_export(r, err);
    if (!s || r->cfg.observe.otlp_endpoint[0]) return s;
    td_warn("traces_off", "reason=%s", td_log_quote(quoted, sizeof quoted, err->msg));
    *err = (struct td_err){0};
    return TD_OK;
}

void trace_begin(struct router *r, struct request_state *q)
{
    struct request_trace *t = &q->trace;
    const char *header = q->client.ops->metadata(q->client.call, "traceparent");
    t->has_parent = header && td_traceparent_parse(header, &t->at);
    t->has_id = t->has_parent; /* workers log it, whether or not spans are sent */
    if (!r->trace_export) return;
    if (t->has_parent) {
        t->is_on = t->at.is_sampled;
    } else if (r->cfg.observe.trace_sample && r->n_untraced++ % r->cfg.observe.trace_sample == 0) {
        t->has_id = t->is_on = t->at.is_sampled = true;
        td_random_fill(t->at.trace_id, sizeof t->at.trace_id);
        t->at.trace_id[0] |= 1; /* all zeros is no id */
    }
}

static void fill_stages(struct trace_record *t, const Tandem__V1__Ledger *l)
{
    t->has_stages = true;
    t->e2e_us = l->e2e_us;
    t->stage_us[0] = l->router_queue_us;
    t->stage_us[1] = l->reserve_us;
    t->stage_us[2] = l->prefill_queue_us;
    t->stage_us[3] = l->prefill_us;
    t->stage_us[4] = l->rpc_us;
    t->stage_us[5] = l->e2e_us - l->ttft_us; /* the first five add up to ttft_us */
    t->transfer_us = l->transfer_us;
    t->transfer_exposed_us = l->transfer_exposed_us;
    t->decode_queue_us = l->decode_queue_us;
    t->first_step_us = l->first_step_us;
    t->transfer_bytes = l->transfer_bytes;
    t->failovers = l->failovers;
    t->preemptions = l->preemptions;
    snprintf(t->transfer_path, sizeof t->transfer_path, "%s", l->transfer_path);
}

void trace_end(struct router *r, const struct request_state *q, enum td_code code)
{
    if (!q->trace.is_on) return;
    uint64_t took_ns = td_now_ns() - q->arrived_ns;
    struct trace_record t = {.at = q->trace.at,
                             .has_parent = q->trace.has_parent,
                             .begin_ns = td_wall_ns() - took_ns,
                             .e2e_us = took_ns / TD_NS_PER_US,
                             .n_prompt = q->n_prompt,
                             .n_output = request_n_output(q),
                             .code = (uint32_t)code};
    if (code == TD_CODE_OK) fill_stages(&t, &q->ledger);
    snprintf(t.request_id, sizeof t.request_id, "%s", q->name);
    snprintf(t.model, sizeof t.model, "%s", served_model_name(q->model));
    snprintf(t.slo_class, sizeof t.slo_class, "%s", q->ledger.slo_class);
    snprintf(t.prefill_worker, sizeof t.prefill_worker, "%s", q->prefill.name);
    snprintf(t.decode_worker, sizeof t.decode_worker, "%s", q->decode.name);
    trace_export_push(r->trace_export, &t);
}
