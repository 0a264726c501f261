/* report.c - a result as console block, JSON, JSONL; and a result file read back. See result.h. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/serve/result.h"
#include "common/base/json.h"

#define MAX_RESULT_BYTES ((size_t)1 << 30)

static bool wanted(const char *metrics, const char *name)
{
    size_t n = strlen(name);
    for (const char *at = metrics; *at; at += strcspn(at, ",")) {
        at += strspn(at, ", ");
        if (strcspn(at, ", ") == n && !memcmp(at, name, n)) return true;
    }
    return false;
}

static bool any_slo(const struct bench_result *r)
{
    bool any = false;
    for (size_t c = 0; c < r->n_classes; c++) any |= bench_slo_any(&r->classes[c].of.slo);
    return any;
}

/* "99", "99.9": as vLLM writes it into keys and labels. */
static const char *pct_name(double pct, char buf[24])
{
    snprintf(buf, 24, "%g", pct);
    return buf;
}

/* --- console ---------------------------------------------------------------------------------- */

#define WIDTH 50

static void rule(FILE *out, char fill, const char *title)
{
    int n = (int)strlen(title), left = (WIDTH - n) / 2;
    for (int i = 0; i < left; i++) fputc(fill, out);
    fputs(title, out);
    for (int i = 0; i < WIDTH - n - left; i++) fputc(fill, out);
    fputc('\n', out);
}

static void line_u(FILE *out, const char *label, uint64_t v)
{
    fprintf(out, "%-40s %-10" PRIu64 "\n", label, v);
}
static void line_f(FILE *out, const char *label, double v)
{
    fprintf(out, "%-40s %-10.2f\n", label, v);
}

static void print_metric(const struct bench_result *r, enum bench_metric_id id, FILE *out)
{
    static const char *const titles[] = {"Time to First Token",
                                         "Time per Output Token (excl. 1st token)",
                                         "Inter-token Latency", "End-to-end Latency"};
    static const char *const shorts[] = {"TTFT", "TPOT", "ITL", "E2EL"};
    const struct bench_metric *m = &r->metric[id];
    char label[64], pct[24];
    rule(out, '-', titles[id]);
    snprintf(label, sizeof label, "Mean %s (ms):", shorts[id]);
    line_f(out, label, m->mean);
    snprintf(label, sizeof label, "Median %s (ms):", shorts[id]);
    line_f(out, label, m->median);
    for (size_t i = 0; i < r->n_pcts; i++) {
        snprintf(label, sizeof label, "P%s %s (ms):", pct_name(r->pcts[i], pct), shorts[id]);
        line_f(out, label, m->pct[i]);
    }
}

static void print_objective(FILE *out, const char *name, double limit_ms,
                            const struct bench_share *s)
{
    if (limit_ms <= 0) return;
    char label[64];
    snprintf(label, sizeof label, "Missed %s <= %g ms:", name, limit_ms);
    fprintf(out, "%-40s %" PRIu64 " of %" PRIu64 "\n", label, s->n - s->k, s->n);
}

static void print_slo(const struct bench_result *r, FILE *out)
{
    rule(out, '-', "Objectives (clock: scheduled send time)");
    char label[64];
    fprintf(out, "%-40s %.2f [%.2f, %.2f]\n",
            "SLO attainment (%) [95% CI]:", 100 * r->steady.joint.value, 100 * r->steady.ci95.lo,
            100 * r->steady.ci95.hi);
    snprintf(label, sizeof label, "Measured span (s), requests:");
    fprintf(out, "%-40s %.2f to %.2f, %" PRIu64 "\n", label, r->steady.t0_s, r->steady.t1_s,
            r->steady.joint.n);
    line_f(out, "Steady offered rate (req/s):", r->steady.offered_rate);
    line_f(out, "Steady goodput (req/s):", r->steady.goodput);
    if (r->steady.saturated)
        fprintf(out, "%-40s %s\n", "Saturated:", "yes, queues grew to the end of the span");
    if (r->setup.gpus)
        fprintf(out, "%-40s %-10.3f (%u %s)\n",
                "Goodput per GPU (req/s):", r->steady.per_gpu_goodput, r->setup.gpus,
                r->setup.gpus_given ? "GPUs" : "workers");
    if (r->n_classes == 1) {
        const struct bench_slo *s = &r->classes[0].of.slo;
        print_objective(out, "TTFT", s->ttft_ms, &r->steady.ttft);
        print_objective(out, "TPOT", s->tpot_ms, &r->steady.tpot);
        print_objective(out, "E2EL", s->e2el_ms, &r->steady.e2el);
        print_objective(out, "TBT", s->tbt_ms, &r->steady.tbt);
    } else {
        for (size_t i = 0; i < r->n_classes; i++) {
            const struct bench_class_result *c = &r->classes[i];
            snprintf(label, sizeof label, "Class %.32s (%%) [95%% CI]:", c->of.name);
            fprintf(out, "%-40s %.2f [%.2f, %.2f] of %" PRIu64 "\n", label, 100 * c->joint.value,
                    100 * c->ci95.lo, 100 * c->ci95.hi, c->joint.n);
        }
    }
    if (!isnan(r->steady.token_deadline_share))
        line_f(out, "Tokens by their deadline (%):", 100 * r->steady.token_deadline_share);
    if (r->total.n_one_token)
        line_u(out, "One-token outputs (TPOT met vacuously):", r->total.n_one_token);
    if (!isnan(r->jain_index))
        fprintf(out, "%-40s %-10.3f\n", "Jain index over tenants:", r->jain_index);
}

void bench_result_print(const struct bench_result *r, const char *metrics, FILE *out)
{
    bool slo = any_slo(r);
    rule(out, '=', " Serving Benchmark Result ");
    line_u(out, "Successful requests:", r->total.n_outcome[BENCH_COMPLETED]);
    line_u(out, "Failed requests:", r->total.n_offered - r->total.n_outcome[BENCH_COMPLETED]);
    if (r->total.n_offered != r->total.n_outcome[BENCH_COMPLETED]) {
        line_u(out,
               r->setup.plain_server ? "  rejected (HTTP 429, 503):"
                                     : "  rejected (RESOURCE_EXHAUSTED):",
               r->total.n_outcome[BENCH_REJECTED]);
        line_u(out, "  deadline exceeded:", r->total.n_outcome[BENCH_TIMED_OUT]);
        line_u(out, "  other errors:", r->total.n_outcome[BENCH_FAILED]);
        line_u(out, "  unfinished at the end of the grace:", r->total.n_outcome[BENCH_UNFINISHED]);
    }
    if (r->load.max_concurrency)
        line_u(out, "Maximum request concurrency:", r->load.max_concurrency);
    if (isfinite(r->load.request_rate))
        line_f(out, "Request rate configured (RPS):", r->load.request_rate);
    line_f(out, "Benchmark duration (s):", r->rates.duration_s);
    if (!r->total.input_unknown) line_u(out, "Total input tokens:", r->total.input_tokens);
    line_u(out, "Total generated tokens:", r->total.output_tokens);
    line_f(out, "Request throughput (req/s):", r->rates.request_throughput);
    if (slo) line_f(out, "Request goodput (req/s):", r->rates.request_goodput);
    line_f(out, "Output token throughput (tok/s):", r->rates.output_throughput);
    line_f(out, "Peak output token throughput (tok/s):", r->rates.max_output_tokens_per_s);
    line_u(out, "Peak concurrent requests:", r->total.max_concurrent_requests);
    if (!r->total.input_unknown)
        line_f(out, "Total token throughput (tok/s):", r->rates.total_token_throughput);
    for (int m = 0; m < BENCH_N_METRICS; m++)
        if (wanted(metrics, bench_metric_names[m])) print_metric(r, (enum bench_metric_id)m, out);
    if (slo) print_slo(r, out);
    if (r->stages[BENCH_PREFILL].n) {
        rule(out, '-', "Stages, as the router tells them (ms)");
        fprintf(out, "%-20s %9s %9s %9s\n", "", "mean", "median", "max");
        for (int k = 0; k < BENCH_N_STAGES; k++)
            fprintf(out, "%-20s %9.2f %9.2f %9.2f\n", bench_stage_names[k], r->stages[k].mean,
                    r->stages[k].median, r->stages[k].max);
    }
    rule(out, '-', "The load generator");
    fprintf(out, "%-40s %.3f / %.3f / %.3f\n",
            "Schedule lag p50/p99/max (ms):", r->generator.lag_p50_ms, r->generator.lag_p99_ms,
            r->generator.lag_max_ms);
    fprintf(out, "%-40s %.2f (%.1f %% of one)\n", "CPU time (s):", r->generator.cpu_s,
            r->rates.duration_s > 0 ? 100 * r->generator.cpu_s / r->rates.duration_s : 0);
    if (!r->valid) fprintf(out, "NOT VALID: %s\n", r->invalid_reason);
    rule(out, '=', "");
}

/* --- JSON ------------------------------------------------------------------------------------- */

static json_t *real(double v) { return isfinite(v) ? json_real(v) : json_null(); }
/* A rate: vLLM writes "inf" as text. */
static json_t *rate_json(double v) { return isinf(v) ? json_string("inf") : real(v); }
static void put(json_t *o, const char *key, json_t *v)
{
    json_object_set_new(o, key, v ? v : json_null());
}
static void put_u(json_t *o, const char *key, uint64_t v)
{
    put(o, key, json_integer((json_int_t)v));
}
static void put_f(json_t *o, const char *key, double v) { put(o, key, real(v)); }
/* known: else null, which is not 0. */
static void put_known(json_t *o, const char *key, bool known, uint64_t v)
{
    put(o, key, known ? json_integer((json_int_t)v) : NULL);
}
static void put_s(json_t *o, const char *key, const char *v)
{
    put(o, key, v[0] ? json_string(v) : json_null());
}

static json_t *interval_json(struct td_stats_interval i)
{
    json_t *a = json_array();
    json_array_append_new(a, real(i.lo)); /* null: not bounded */
    json_array_append_new(a, real(i.hi));
    return a;
}

static json_t *slo_json(const struct bench_slo *s)
{
    json_t *o = json_object();
    if (s->ttft_ms > 0) put_f(o, "ttft_ms", s->ttft_ms);
    if (s->tpot_ms > 0) put_f(o, "tpot_ms", s->tpot_ms);
    if (s->e2el_ms > 0) put_f(o, "e2el_ms", s->e2el_ms);
    if (s->tbt_ms > 0) put_f(o, "tbt_ms", s->tbt_ms);
    return o;
}

static void put_metric(json_t *o, const struct bench_result *r, const char *name,
                       const struct bench_metric *m)
{
    char key[64], pct[24];
    struct {
        const char *prefix;
        double v;
    } values[] = {{"mean", m->mean}, {"median", m->median}, {"std", m->std}};
    for (size_t i = 0; i < 3; i++) {
        snprintf(key, sizeof key, "%s_%s_ms", values[i].prefix, name);
        put_f(o, key, values[i].v);
    }
    for (size_t i = 0; i < r->n_pcts; i++) {
        snprintf(key, sizeof key, "p%s_%s_ms", pct_name(r->pcts[i], pct), name);
        put_f(o, key, m->pct[i]);
    }
}

static json_t *definitions(const struct bench_result *r)
{
    json_t *o = json_object();
    put_s(
        o, "ttft",
        "first message with tokens - request sent, ms, at the client; completed requests (vLLM's)");
    put_s(o, "tpot",
          "(last token - first token) / (output tokens - 1), ms; requests with one token are left "
          "out of its statistics (vLLM's)");
    put_s(o, "itl",
          "gaps between messages with tokens, ms, of all completed requests together (vLLM's)");
    put_s(o, "e2el", "last message with tokens - request sent, ms");
    put_s(o, "percentile", "linear between neighbours; std over n");
    put_s(o, "percentile_ci95_ms",
          "order statistics (binomial), as if requests were independent; null: too few to bound "
          "that side");
    put_s(o, "good", "completed, and TTFT, TPOT, E2EL and TBT within every objective of its class");
    put_s(o, "slo_clock",
          r->load.closed_loop
              ? "TTFT and E2EL of objectives count from the moment a place was free (closed loop)"
              : "TTFT and E2EL of objectives count from the scheduled send time");
    put_s(o, "tbt", "mean of the longest tenth of a request's gaps, ms (Mooncake's)");
    put_s(o, "one_token",
          "TPOT is met vacuously by one token (vLLM's rule; AIPerf calls such a request bad)");
    put_s(o, "attainment",
          "good / offered, of the requests that arrived in [t0, t1]; rejected, failed and "
          "unfinished ones are misses");
    put_s(o, "ci95", "the wider of Wilson's interval and that of 20 batch means");
    put_s(o, "request_goodput", "good / duration, drain included (vLLM's)");
    put_s(o, "steady_request_goodput", "good arrivals in [t0, t1] / (t1 - t0)");
    put_s(o, "saturated",
          "in the measured span requests in flight and TTFT both rose (t-test over 20 batches, 95 "
          "%) to "
          "twice their start or more");
    put_s(o, "token_deadlines",
          "share of tokens that came by scheduled + TTFT + i * TPOT; what a failed request did not "
          "send is late");
    put_s(o, "sched_lag",
          "sent - max(scheduled, a place within --max-concurrency was free), ms: the generator's "
          "own delay");
    put_s(o, "wasted_prefill_tokens",
          "input tokens of requests that got a first token and did not complete");
    put_s(o, "deflected",
          "requests prefilled on their decode worker though the cluster is not colocated");
    put_s(o, "jain_index", "(sum x)^2 / (n sum x^2) over the tenants' attainment");
    if (r->setup.plain_server)
        put_s(o, "rejected",
              "429: HTTP status 429 or 503; error: other statuses, broken streams, no connection");
    put_s(o, "failed", "all offered requests that did not complete, the rejected included");
    return o;
}

/* Not of ITL: gaps of one request are anything but independent. */
static const enum bench_metric_id g_bounded[] = {BENCH_TTFT, BENCH_TPOT, BENCH_E2EL};

static json_t *percentile_ci_json(const struct bench_result *r)
{
    json_t *o = json_object();
    for (size_t m = 0; m < sizeof g_bounded / sizeof *g_bounded; m++) {
        json_t *of = json_object();
        for (size_t i = 0; i < r->n_pcts; i++) {
            char key[32], pct[24];
            snprintf(key, sizeof key, "p%s", pct_name(r->pcts[i], pct));
            put(of, key, interval_json(r->metric[g_bounded[m]].pct_ci95[i]));
        }
        put(o, bench_metric_names[g_bounded[m]], of);
    }
    return o;
}

static json_t *class_json(const struct bench_class_result *c)
{
    json_t *o = json_object();
    put(o, "slo", slo_json(&c->of.slo));
    put_f(o, "weight", c->of.weight);
    put_u(o, "n", c->joint.n);
    put_u(o, "n_good", c->joint.k);
    put_f(o, "attainment", c->joint.value);
    put(o, "ci95", interval_json(c->ci95));
    put_f(o, "request_goodput", c->request_goodput);
    put_f(o, "ttft_p50_ms", c->ttft_p50_ms);
    put_f(o, "ttft_p99_ms", c->ttft_p99_ms);
    put_f(o, "tpot_p50_ms", c->tpot_p50_ms);
    put_f(o, "tpot_p99_ms", c->tpot_p99_ms);
    return o;
}

static json_t *attainment_json(const struct bench_result *r)
{
    json_t *o = json_object();
    put_f(o, "joint", r->steady.joint.value);
    put_f(o, "ttft", r->steady.ttft.value);
    put_f(o, "tpot", r->steady.tpot.value);
    put_f(o, "e2el", r->steady.e2el.value);
    put_f(o, "tbt", r->steady.tbt.value);
    put_u(o, "n", r->steady.joint.n);
    put_u(o, "n_good", r->steady.joint.k);
    put(o, "ci95", interval_json(r->steady.ci95));
    put(o, "ci95_wilson", interval_json(r->steady.ci95_wilson));
    put(o, "ci95_batch_means", r->steady.has_batch ? interval_json(r->steady.ci95_batch) : NULL);
    put_f(o, "target", r->target_attainment > 0 ? r->target_attainment : NAN);
    return o;
}

static json_t *arrival_json(const struct bench_result *r)
{
    json_t *o = json_object();
    put_s(o, "process", r->load.arrival);
    put(o, "request_rate", rate_json(r->load.request_rate));
    put(o, "burstiness", rate_json(r->load.burstiness));
    put(o, "rescaled", json_boolean(r->load.rescaled));
    put_s(o, "ramp", r->load.ramp);
    put_f(o, "ramp_up_start_rps", r->load.ramp_start > 0 ? r->load.ramp_start : NAN);
    put_f(o, "ramp_up_end_rps", r->load.ramp_end > 0 ? r->load.ramp_end : NAN);
    put_f(o, "time_scale", r->load.time_scale);
    put_f(o, "length_scale", r->load.length_scale);
    put(o, "trace_block_tokens",
        r->load.block_tokens ? json_integer((json_int_t)r->load.block_tokens) : NULL);
    put_u(o, "cut", r->load.n_cut);
    return o;
}

static json_t *steady_json(const struct bench_result *r)
{
    json_t *o = json_object();
    put_f(o, "t0", r->steady.t0_s);
    put_f(o, "t1", r->steady.t1_s);
    put_f(o, "offered_rate", r->steady.offered_rate);
    put_f(o, "request_goodput", r->steady.goodput);
    put_f(o, "per_gpu_goodput", r->steady.per_gpu_goodput);
    put(o, "saturated", r->steady.has_trend ? json_boolean(r->steady.saturated) : NULL);
    put_known(o, "gpus", !r->setup.plain_server || r->setup.gpus, r->setup.gpus);
    put_s(o, "gpus_from", r->setup.gpus_given ? "option" : r->setup.plain_server ? "" : "workers");
    put_f(o, "warmup", r->load.warmup);
    put_f(o, "cooldown", r->load.cooldown);
    put_f(o, "grace_s", r->load.grace_s);
    put_metric(o, r, "ttft", &r->steady.slo_ttft);
    return o;
}

static void put_counts(json_t *pd, const struct bench_result *r)
{
    json_t *o = json_object();
    put_u(pd, "offered", r->total.n_offered);
    put(pd, "rejected", o);
    put_u(o, "429", r->total.n_outcome[BENCH_REJECTED]);
    put_u(o, "deadline", r->total.n_outcome[BENCH_TIMED_OUT]);
    put_u(o, "error", r->total.n_outcome[BENCH_FAILED]);
    put_u(o, "unfinished", r->total.n_outcome[BENCH_UNFINISHED]);
    put_u(pd, "one_token", r->total.n_one_token);
    put_u(pd, "no_token", r->total.n_no_token);
    put_f(pd, "token_deadlines", r->steady.token_deadline_share);
    put_known(pd, "deflected", !r->setup.plain_server, r->total.n_deflected);
    put_known(pd, "wasted_prefill_tokens", !r->setup.plain_server, r->total.wasted_prefill_tokens);
    put_known(pd, "cached_tokens", !r->setup.plain_server || r->total.has_cached,
              r->total.cached_tokens);
    put_known(pd, "failovers", !r->setup.plain_server, r->total.n_failovers);
    put_known(pd, "resumes", !r->setup.plain_server, r->total.n_resumes);
    put_known(pd, "preemptions", !r->setup.plain_server, r->total.n_preemptions);
}

/* How well the load generator kept its schedule, and what it took from the machine. */
static void put_generator(json_t *pd, const struct bench_result *r)
{
    json_t *o = json_object();
    put(pd, "sched_lag_ms", o);
    put_f(o, "p50", r->generator.lag_p50_ms);
    put_f(o, "p99", r->generator.lag_p99_ms);
    put_f(o, "max", r->generator.lag_max_ms);
    put_f(pd, "generator_cpu_s", r->generator.cpu_s);
    put(pd, "generator_realtime", json_boolean(r->generator.realtime));
}

static json_t *stages_json(const struct bench_result *r)
{
    json_t *o = json_object();
    for (int k = 0; k < BENCH_N_STAGES; k++) {
        const struct bench_metric *m = &r->stages[k];
        json_t *s = json_object();
        put_f(s, "mean", m->mean);
        put_f(s, "median", m->median);
        put_f(s, "max", m->max);
        char key[32], pct[24];
        for (size_t i = 0; i < r->n_pcts; i++) {
            snprintf(key, sizeof key, "p%s", pct_name(r->pcts[i], pct));
            put_f(s, key, m->pct[i]);
        }
        put(o, bench_stage_names[k], s);
    }
    return o;
}

static json_t *topology_json(const struct bench_result *r)
{
    json_t *o = json_object();
    put_s(o, "mode", r->setup.topology_mode);
    put_s(o, "policy", r->setup.policy);
    put_known(o, "prefill", !r->setup.plain_server, r->setup.n_prefill);
    put_known(o, "decode", !r->setup.plain_server, r->setup.n_decode);
    put_known(o, "gpus", !r->setup.plain_server || r->setup.gpus, r->setup.gpus);
    return o;
}

/* The keys stand in the order in which they are put. */
static json_t *pd_json(const struct bench_result *r)
{
    json_t *pd = json_object(), *o;
    put(pd, "definitions", definitions(r));
    put(pd, "valid", json_boolean(r->valid));
    put_s(pd, "invalid_reason", r->invalid_reason);
    o = slo_json(&r->slo);
    put_s(o, "preset", r->slo_preset);
    put(o, "sent", json_boolean(r->slo_sent));
    put(pd, "slo", o);
    put(pd, "attainment", attainment_json(r));
    put(pd, "steady", steady_json(r));
    put(pd, "percentile_ci95_ms", percentile_ci_json(r));
    put_counts(pd, r);
    put_generator(pd, r);
    put(pd, "stages_ms", stages_json(r));
    put(pd, "predicted_ttft", o = json_object());
    put_f(o, "mape", r->predicted_ttft_mape);
    put_f(o, "coverage", r->predicted_ttft_coverage);
    put(pd, "per_class", o = json_object());
    for (size_t i = 0; i < r->n_classes; i++)
        put(o, r->classes[i].of.name[0] ? r->classes[i].of.name : "default",
            class_json(&r->classes[i]));
    put_f(pd, "jain_index", r->jain_index);
    put_u(pd, "tenants", r->load.n_tenants);
    put(pd, "seed", r->load.seed <= INT64_MAX ? json_integer((json_int_t)r->load.seed) : NULL);
    put(pd, "arrival", arrival_json(r));
    put_s(pd, "dataset", r->setup.dataset);
    put_s(pd, "dataset_path", r->setup.dataset_path);
    put_s(pd, "server", r->setup.target);
    put(pd, "topology", topology_json(r));
    put(pd, "build", o = json_object());
    put_s(o, "bench", r->setup.build);
    put_s(o, "server", r->setup.server_build);
    return pd;
}

/* Per request, in the order of the schedule; all offered ones, so that the arrays of a file line
 * up. */
static void put_detailed(json_t *o, const struct bench_result *r)
{
    json_t *input = json_array(), *output = json_array(), *ttfts = json_array(),
           *itls = json_array(), *latencies = json_array(), *starts = json_array(),
           *queues = json_array(), *errors = json_array();
    for (size_t i = 0; i < r->n_requests; i++) {
        const struct bench_request *q = &r->requests[i];
        if (q->outcome == BENCH_UNSENT) continue;
        json_array_append_new(input, q->input_unknown ? json_null() : json_integer(q->input_len));
        json_array_append_new(output, json_integer(q->output_len));
        json_array_append_new(ttfts, real(q->first_s - q->sent_s));
        json_array_append_new(latencies, real(q->last_s - q->sent_s));
        json_array_append_new(starts, real(q->sent_s));
        json_array_append_new(queues, real(q->sent_s - q->scheduled_s));
        json_array_append_new(errors, json_string(q->error ? q->error : ""));
        json_t *gaps = json_array();
        for (uint32_t k = 0; k + 1 < q->n_messages; k++)
            json_array_append_new(gaps, json_real(q->gaps_s[k]));
        json_array_append_new(itls, gaps);
    }
    put(o, "input_lens", input);
    put(o, "output_lens", output);
    put(o, "ttfts", ttfts);
    put(o, "itls", itls);
    put(o, "latencies", latencies);
    put(o, "start_times", starts);
    put(o, "queue_times", queues);
    put(o, "errors", errors);
}

json_t *bench_result_to_json(const struct bench_result *r, const char *metrics, bool detailed)
{
    json_t *o = json_object();
    if (!o) return NULL;
    put_s(o, "date", r->setup.date);
    put_s(o, "backend", r->setup.backend);
    put_s(o, "label", r->setup.label);
    put_s(o, "model_id", r->setup.model_id);
    put_s(o, "tokenizer_id", r->setup.model_id); /* the router's: the client has none */
    put_u(o, "num_prompts", r->n_requests);
    put(o, "request_rate", rate_json(r->load.request_rate));
    put(o, "burstiness", rate_json(r->load.burstiness));
    put(o, "max_concurrency",
        r->load.max_concurrency ? json_integer((json_int_t)r->load.max_concurrency) : NULL);
    put_f(o, "duration", r->rates.duration_s);
    put_u(o, "completed", r->total.n_outcome[BENCH_COMPLETED]);
    put_u(o, "failed", r->total.n_offered - r->total.n_outcome[BENCH_COMPLETED]);
    put_known(o, "total_input_tokens", !r->total.input_unknown, r->total.input_tokens);
    put_u(o, "total_output_tokens", r->total.output_tokens);
    put_f(o, "request_throughput", r->rates.request_throughput);
    put(o, "request_goodput", any_slo(r) ? real(r->rates.request_goodput) : NULL);
    put_f(o, "output_throughput", r->rates.output_throughput);
    put_f(o, "total_token_throughput",
          r->total.input_unknown ? NAN : r->rates.total_token_throughput);
    put_f(o, "max_output_tokens_per_s", r->rates.max_output_tokens_per_s);
    put_u(o, "max_concurrent_requests", r->total.max_concurrent_requests);
    for (int m = 0; m < BENCH_N_METRICS; m++)
        if (wanted(metrics, bench_metric_names[m]))
            put_metric(o, r, bench_metric_names[m], &r->metric[m]);
    if (detailed && r->requests) put_detailed(o, r);
    char *copy = r->setup.metadata ? strdup(r->setup.metadata) : NULL, *rest = copy;
    for (char *pair; rest && (pair = strsep(&rest, " "));) {
        /* vLLM puts --metadata among the other keys; ours are not replaced */
        char *equals = strchr(pair, '=');
        if (!equals) continue;
        *equals = 0;
        if (!json_object_get(o, pair)) put(o, pair, json_string(equals + 1));
    }
    free(copy);
    put(o, "pd", pd_json(r));
    return o;
}

td_status bench_result_write(const struct bench_result *r, const char *metrics, bool detailed,
                             const char *path, struct td_err *err)
{
    json_t *o = bench_result_to_json(r, metrics, detailed);
    if (!o) return td_fail(err, TD_ERR_NOMEM, "%s: out of memory", path);
    errno = 0;
    int rc =
        json_dump_file(o, path, JSON_INDENT(2) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(12));
    json_decref(o);
    return rc ? td_fail(err, TD_ERR_IO, "%s: %s", path,
                        errno ? strerror(errno) : "could not be written")
              : TD_OK;
}

/* --- profile_export.jsonl --------------------------------------------------------------------- */

static json_t *unit(json_t *value, const char *name)
{
    json_t *o = json_object();
    put(o, "value", value);
    put_s(o, "unit", name);
    return o;
}

static json_t *ns(const struct bench_result *r, double at_s)
{
    return isfinite(at_s)
               ? json_integer((json_int_t)r->setup.start_wall_ns + (json_int_t)llround(at_s * 1e9))
               : json_null();
}

static json_t *slo_ok_json(const struct bench_request *q)
{
    json_t *o = json_object();
    put(o, "ttft", json_boolean(q->ok.ttft));
    put(o, "tpot", json_boolean(q->ok.tpot));
    put(o, "e2el", json_boolean(q->ok.e2el));
    put(o, "tbt", json_boolean(q->ok.tbt));
    put(o, "joint", json_boolean(q->ok.joint));
    return o;
}

static json_t *request_metadata_json(const struct bench_result *r, size_t index)
{
    const struct bench_request *q = &r->requests[index];
    json_t *meta = json_object(), *k;
    put_u(meta, "session_num", index);
    put_s(meta, "outcome", bench_outcome_names[q->outcome]);
    put(meta, "scheduled_ns", ns(r, q->scheduled_s));
    put(meta, "request_start_ns", ns(r, q->sent_s));
    put(meta, "first_token_ns", ns(r, q->first_s));
    put(meta, "request_end_ns", ns(r, q->end_s));
    put_s(meta, "benchmark_phase", "profiling");
    put(meta, "in_window",
        json_boolean(q->scheduled_s >= r->steady.t0_s && q->scheduled_s <= r->steady.t1_s));
    put_s(meta, "prefill_node", q->prefill_node);
    put_s(meta, "decode_node", q->decode_node);
    put_s(meta, "mode", !q->has_ledger ? "" : !strcmp(q->mode, "colocated") ? "local" : q->mode);
    put_s(meta, "class", r->classes[q->class_index].of.name);
    if (r->load.n_tenants) {
        char tenant[32];
        snprintf(tenant, sizeof tenant, "tenant-%u", q->tenant);
        put_s(meta, "tenant", tenant);
    } else {
        put(meta, "tenant", NULL);
    }
    put(meta, "slo_ok", slo_ok_json(q));
    put(meta, "predicted", k = json_object());
    put_f(k, "ttft", q->predicted_ttft_us ? (double)q->predicted_ttft_us / 1e3 : NAN);
    put_f(k, "tpot", q->predicted_tpot_us ? (double)q->predicted_tpot_us / 1e3 : NAN);
    put_known(meta, "cached_tokens", !r->setup.plain_server || q->has_cached,
              (uint64_t)q->cached_tokens);
    put_known(meta, "failovers", !r->setup.plain_server, q->failovers);
    put(meta, "stages_ns", k = json_object());
    for (int s = 0; q->has_ledger && s < BENCH_N_STAGES; s++)
        put_u(k, bench_stage_names[s], q->stages_us[s] * 1000);
    return meta;
}

static json_t *request_metrics_json(const struct bench_request *q)
{
    json_t *metrics = json_object();
    if (q->n_messages) {
        put(metrics, "time_to_first_token", unit(real((q->first_s - q->sent_s) * 1e3), "ms"));
        put(metrics, "request_latency", unit(real((q->last_s - q->sent_s) * 1e3), "ms"));
        if (q->output_len > 1)
            put(metrics, "inter_token_latency",
                unit(real((q->last_s - q->first_s) / (q->output_len - 1) * 1e3), "ms"));
        json_t *gaps = json_array();
        for (uint32_t g = 0; g + 1 < q->n_messages; g++)
            json_array_append_new(gaps, json_real(q->gaps_s[g] * 1e3));
        put(metrics, "inter_chunk_latency", unit(gaps, "ms"));
    }
    put(metrics, "input_sequence_length",
        unit(q->input_unknown ? json_null() : json_integer(q->input_len), "tokens"));
    put(metrics, "output_sequence_length", unit(json_integer(q->output_len), "tokens"));
    put(metrics, "client_queue_time", unit(real((q->sent_s - q->scheduled_s) * 1e3), "ms"));
    return metrics;
}

/* NULL for a completed request. */
static json_t *request_error_json(const struct bench_result *r, const struct bench_request *q)
{
    if (q->outcome == BENCH_COMPLETED) return NULL;
    json_t *o = json_object();
    put_known(o, "code", !r->setup.plain_server || q->code, (uint64_t)q->code);
    put_s(o, "type", bench_outcome_names[q->outcome]);
    put_s(o, "message", q->error ? q->error : "");
    if (q->retry_delay_ms >= 0) put_u(o, "retry_delay_ms", (uint64_t)q->retry_delay_ms);
    return o;
}

static json_t *request_json(const struct bench_result *r, size_t index)
{
    const struct bench_request *q = &r->requests[index];
    json_t *o = json_object();
    put(o, "metadata", request_metadata_json(r, index));
    put(o, "metrics", request_metrics_json(q));
    put(o, "error", request_error_json(r, q));
    return o;
}

td_status bench_result_export(const struct bench_result *r, const char *path, struct td_err *err)
{
    FILE *f = fopen(path, "we");
    if (!f) return td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(errno));
    bool failed = false;
    for (size_t i = 0; i < r->n_requests && !failed; i++) {
        if (r->requests[i].outcome == BENCH_UNSENT) continue;
        json_t *o = request_json(r, i);
        failed = json_dumpf(o, f, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9)) ||
                 fputc('\n', f) == EOF;
        json_decref(o);
    }
    int saved = errno;
    if (fclose(f) && !failed) failed = true, saved = errno;
    return failed ? td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(saved)) : TD_OK;
}

/* --- reading a result back -------------------------------------------------------------------- */

struct reader {
    const char *path;
    struct td_err *err;
    td_status s; /* the first error; then nothing more is read */
};

static void get_f(struct reader *d, const json_t *o, const char *key, double *ret)
{
    *ret = NAN;
    const json_t *v = json_object_get(o, key);
    if (v && json_is_string(v) && !strcmp(json_string_value(v), "inf"))
        *ret = INFINITY;
    else if (!d->s)
        d->s = td_json_f64(o, d->path, key, -1e300, 1e300, ret, NULL, d->err);
}

static void get_u(struct reader *d, const json_t *o, const char *key, uint64_t *ret)
{
    int64_t v = 0;
    if (!d->s) d->s = td_json_i64(o, d->path, key, 0, INT64_MAX, &v, NULL, d->err);
    *ret = (uint64_t)v;
}

static void get_u32(struct reader *d, const json_t *o, const char *key, uint32_t *ret)
{
    int64_t v = 0;
    if (!d->s) d->s = td_json_i64(o, d->path, key, 0, UINT32_MAX, &v, NULL, d->err);
    *ret = (uint32_t)v;
}

static void get_b(struct reader *d, const json_t *o, const char *key, bool *ret)
{
    if (!d->s) d->s = td_json_bool(o, d->path, key, ret, NULL, d->err);
}

static void get_s(struct reader *d, const json_t *o, const char *key, char *ret, size_t ret_bytes)
{
    const char *text = NULL;
    if (!d->s) d->s = td_json_str(o, d->path, key, &text, NULL, d->err);
    snprintf(ret, ret_bytes, "%s", text ? text : "");
}

static struct td_stats_interval get_interval(const json_t *o, const char *key)
{
    const json_t *a = json_object_get(o, key);
    const json_t *lo = json_array_get(a, 0), *hi = json_array_get(a, 1);
    return (struct td_stats_interval){json_is_number(lo) ? json_number_value(lo) : NAN,
                                      json_is_number(hi) ? json_number_value(hi) : NAN};
}

/* A share is written as its value; k and n of all of them are those of the joint one. */
static void get_share(struct reader *d, const json_t *o, const char *key, uint64_t n,
                      struct bench_share *ret)
{
    get_f(d, o, key, &ret->value);
    ret->n = n;
    ret->k = isnan(ret->value) ? 0 : (uint64_t)llround(ret->value * (double)n);
}

static void get_slo(struct reader *d, const json_t *o, struct bench_slo *ret)
{
    double *fields[] = {&ret->ttft_ms, &ret->tpot_ms, &ret->e2el_ms, &ret->tbt_ms};
    static const char *const keys[] = {"ttft_ms", "tpot_ms", "e2el_ms", "tbt_ms"};
    for (size_t i = 0; i < 4; i++)
        if (!d->s) d->s = td_json_f64(o, d->path, keys[i], 0, 1e300, fields[i], NULL, d->err);
}

/* The percentiles of a file are what its keys say. */
static void get_pcts(const json_t *root, struct bench_result *r)
{
    for (int m = 0; m < BENCH_N_METRICS && r->n_pcts == 0; m++) {
        const char *key;
        json_t *value;
        json_object_foreach((json_t *)(uintptr_t)root, key, value)
        {
            char suffix[24], *end;
            snprintf(suffix, sizeof suffix, "_%s_ms", bench_metric_names[m]);
            double pct = key[0] == 'p' ? strtod(key + 1, &end) : -1;
            if (pct >= 0 && pct <= 100 && end != key + 1 && !strcmp(end, suffix) &&
                r->n_pcts < BENCH_MAX_PCTS)
                r->pcts[r->n_pcts++] = pct;
        }
        td_stats_sort(r->pcts, r->n_pcts);
    }
}

static void get_metric(struct reader *d, const json_t *o, const struct bench_result *r,
                       const char *name, struct bench_metric *ret)
{
    char key[64], pct[24];
    struct {
        const char *prefix;
        double *v;
    } values[] = {{"mean", &ret->mean}, {"median", &ret->median}, {"std", &ret->std}};
    for (size_t i = 0; i < 3; i++) {
        snprintf(key, sizeof key, "%s_%s_ms", values[i].prefix, name);
        get_f(d, o, key, values[i].v);
    }
    for (size_t i = 0; i < r->n_pcts; i++) {
        snprintf(key, sizeof key, "p%s_%s_ms", pct_name(r->pcts[i], pct), name);
        get_f(d, o, key, &ret->pct[i]);
    }
    ret->min = ret->max = NAN;
}

static void get_attainment(struct reader *d, const json_t *a, struct bench_result *r)
{
    uint64_t n = 0;
    get_u(d, a, "n", &n);
    get_share(d, a, "joint", n, &r->steady.joint);
    get_share(d, a, "ttft", n, &r->steady.ttft);
    get_share(d, a, "tpot", n, &r->steady.tpot);
    get_share(d, a, "e2el", n, &r->steady.e2el);
    get_share(d, a, "tbt", n, &r->steady.tbt);
    r->steady.ci95 = get_interval(a, "ci95");
    r->steady.ci95_wilson = get_interval(a, "ci95_wilson");
    r->steady.ci95_batch = get_interval(a, "ci95_batch_means");
    r->steady.has_batch = !isnan(r->steady.ci95_batch.lo);
    get_f(d, a, "target", &r->target_attainment);
    if (isnan(r->target_attainment)) r->target_attainment = 0;
}

static void get_steady(struct reader *d, const json_t *steady, struct bench_result *r)
{
    get_f(d, steady, "t0", &r->steady.t0_s);
    get_f(d, steady, "t1", &r->steady.t1_s);
    get_f(d, steady, "offered_rate", &r->steady.offered_rate);
    get_f(d, steady, "request_goodput", &r->steady.goodput);
    get_f(d, steady, "per_gpu_goodput", &r->steady.per_gpu_goodput);
    get_f(d, steady, "warmup", &r->load.warmup);
    get_f(d, steady, "cooldown", &r->load.cooldown);
    get_f(d, steady, "grace_s", &r->load.grace_s);
    get_metric(d, steady, r, "ttft", &r->steady.slo_ttft);
    r->steady.has_trend = json_is_boolean(json_object_get(steady, "saturated"));
    get_b(d, steady, "saturated", &r->steady.saturated);
    get_u32(d, steady, "gpus", &r->setup.gpus);
    char from[16];
    get_s(d, steady, "gpus_from", from, sizeof from);
    r->setup.gpus_given = !strcmp(from, "option");
}

static void get_bounds(const json_t *pd, struct bench_result *r)
{
    for (size_t m = 0; m < sizeof g_bounded / sizeof *g_bounded; m++)
        for (size_t i = 0; i < r->n_pcts; i++) {
            char key[32], pct[24];
            snprintf(key, sizeof key, "p%s", pct_name(r->pcts[i], pct));
            r->metric[g_bounded[m]].pct_ci95[i] =
                get_interval(json_object_get(json_object_get(pd, "percentile_ci95_ms"),
                                             bench_metric_names[g_bounded[m]]),
                             key);
        }
}

static void get_counts(struct reader *d, const json_t *pd, struct bench_result *r)
{
    const json_t *rejected = json_object_get(pd, "rejected"),
                 *lag = json_object_get(pd, "sched_lag_ms");
    get_u(d, pd, "offered", &r->total.n_offered);
    get_u(d, rejected, "429", &r->total.n_outcome[BENCH_REJECTED]);
    get_u(d, rejected, "deadline", &r->total.n_outcome[BENCH_TIMED_OUT]);
    get_u(d, rejected, "error", &r->total.n_outcome[BENCH_FAILED]);
    get_u(d, rejected, "unfinished", &r->total.n_outcome[BENCH_UNFINISHED]);
    get_u(d, pd, "one_token", &r->total.n_one_token);
    get_u(d, pd, "no_token", &r->total.n_no_token);
    get_f(d, pd, "token_deadlines", &r->steady.token_deadline_share);
    get_u(d, pd, "deflected", &r->total.n_deflected);
    get_u(d, pd, "wasted_prefill_tokens", &r->total.wasted_prefill_tokens);
    get_u(d, pd, "cached_tokens", &r->total.cached_tokens);
    get_u(d, pd, "failovers", &r->total.n_failovers);
    get_u(d, pd, "resumes", &r->total.n_resumes);
    get_u(d, pd, "preemptions", &r->total.n_preemptions);
    get_f(d, pd, "generator_cpu_s", &r->generator.cpu_s);
    get_b(d, pd, "generator_realtime", &r->generator.realtime);
    get_f(d, lag, "p50", &r->generator.lag_p50_ms);
    get_f(d, lag, "p99", &r->generator.lag_p99_ms);
    get_f(d, lag, "max", &r->generator.lag_max_ms);
}

static void get_stages(struct reader *d, const json_t *stages, struct bench_result *r)
{
    for (int k = 0; k < BENCH_N_STAGES; k++) {
        const json_t *s = json_object_get(stages, bench_stage_names[k]);
        get_f(d, s, "mean", &r->stages[k].mean);
        get_f(d, s, "median", &r->stages[k].median);
        get_f(d, s, "max", &r->stages[k].max);
        char key[32], pct[24];
        for (size_t i = 0; i < r->n_pcts; i++) {
            snprintf(key, sizeof key, "p%s", pct_name(r->pcts[i], pct));
            get_f(d, s, key, &r->stages[k].pct[i]);
        }
        r->stages[k].n = isnan(r->stages[k].mean) ? 0 : 1; /* how many is not in the file */
    }
}

static void get_classes(struct reader *d, const json_t *of_classes, struct bench_result *r)
{
    const char *name;
    json_t *c;
    json_object_foreach((json_t *)(uintptr_t)of_classes, name, c)
    {
        if (r->n_classes == BENCH_MAX_CLASSES) break;
        struct bench_class_result *k = &r->classes[r->n_classes++];
        uint64_t n_class = 0;
        if (strcmp(name, "default") != 0) snprintf(k->of.name, sizeof k->of.name, "%s", name);
        get_slo(d, json_object_get(c, "slo"), &k->of.slo);
        get_f(d, c, "weight", &k->of.weight);
        get_u(d, c, "n", &n_class);
        get_share(d, c, "attainment", n_class, &k->joint);
        k->ci95 = get_interval(c, "ci95");
        get_f(d, c, "request_goodput", &k->request_goodput);
        get_f(d, c, "ttft_p50_ms", &k->ttft_p50_ms);
        get_f(d, c, "ttft_p99_ms", &k->ttft_p99_ms);
        get_f(d, c, "tpot_p50_ms", &k->tpot_p50_ms);
        get_f(d, c, "tpot_p99_ms", &k->tpot_p99_ms);
    }
}

static void get_arrival(struct reader *d, const json_t *arrival, struct bench_result *r)
{
    get_s(d, arrival, "process", r->load.arrival, sizeof r->load.arrival);
    r->load.closed_loop = !strcmp(r->load.arrival, "closed_loop");
    get_b(d, arrival, "rescaled", &r->load.rescaled);
    get_s(d, arrival, "ramp", r->load.ramp, sizeof r->load.ramp);
    get_f(d, arrival, "ramp_up_start_rps", &r->load.ramp_start);
    get_f(d, arrival, "ramp_up_end_rps", &r->load.ramp_end);
    if (!r->load.ramp[0]) r->load.ramp_start = r->load.ramp_end = 0;
    get_f(d, arrival, "time_scale", &r->load.time_scale);
    get_f(d, arrival, "length_scale", &r->load.length_scale);
    get_u(d, arrival, "trace_block_tokens", &r->load.block_tokens);
    get_u(d, arrival, "cut", &r->load.n_cut);
}

static void get_pd(struct reader *d, const json_t *pd, struct bench_result *r)
{
    const json_t *slo = json_object_get(pd, "slo"),
                 *predicted = json_object_get(pd, "predicted_ttft"),
                 *topology = json_object_get(pd, "topology"), *build = json_object_get(pd, "build");
    get_b(d, pd, "valid", &r->valid);
    get_s(d, pd, "invalid_reason", r->invalid_reason, sizeof r->invalid_reason);
    get_slo(d, slo, &r->slo);
    get_s(d, slo, "preset", r->slo_preset, sizeof r->slo_preset);
    get_b(d, slo, "sent", &r->slo_sent);
    get_attainment(d, json_object_get(pd, "attainment"), r);
    get_steady(d, json_object_get(pd, "steady"), r);
    get_bounds(pd, r);
    get_counts(d, pd, r);
    get_stages(d, json_object_get(pd, "stages_ms"), r);
    get_f(d, predicted, "mape", &r->predicted_ttft_mape);
    get_f(d, predicted, "coverage", &r->predicted_ttft_coverage);
    get_classes(d, json_object_get(pd, "per_class"), r);
    get_f(d, pd, "jain_index", &r->jain_index);
    get_u32(d, pd, "tenants", &r->load.n_tenants);
    get_u(d, pd, "seed", &r->load.seed);
    get_arrival(d, json_object_get(pd, "arrival"), r);
    get_s(d, pd, "dataset", r->setup.dataset, sizeof r->setup.dataset);
    get_s(d, pd, "dataset_path", r->setup.dataset_path, sizeof r->setup.dataset_path);
    get_s(d, pd, "server", r->setup.target, sizeof r->setup.target);
    get_s(d, topology, "mode", r->setup.topology_mode, sizeof r->setup.topology_mode);
    get_s(d, topology, "policy", r->setup.policy, sizeof r->setup.policy);
    get_u32(d, topology, "prefill", &r->setup.n_prefill);
    get_u32(d, topology, "decode", &r->setup.n_decode);
    get_s(d, build, "bench", r->setup.build, sizeof r->setup.build);
    get_s(d, build, "server", r->setup.server_build, sizeof r->setup.server_build);
}

td_status bench_result_read(const char *path, struct bench_result *ret, struct td_err *err)
{
    json_t *root = NULL;
    struct bench_result r = {.valid = true};
    struct reader d = {.path = path, .err = err};
    d.s = td_json_load_file(path, MAX_RESULT_BYTES, &root, err);
    if (d.s) return d.s;
    const json_t *pd = json_object_get(root, "pd");
    if (!json_is_object(root)) d.s = td_fail(err, TD_ERR_INVALID, "%s: is no JSON object", path);
    if (!d.s && !json_object_get(root, "completed"))
        d.s = td_fail(err, TD_ERR_INVALID,
                      "%s: completed is missing: not the result of a serving benchmark", path);
    if (!d.s && pd && !json_is_object(pd))
        d.s = td_fail(err, TD_ERR_INVALID, "%s: pd must be an object", path);
    if (d.s) goto end;
    uint64_t n_requests = 0, failed = 0;
    get_s(&d, root, "date", r.setup.date, sizeof r.setup.date);
    get_s(&d, root, "backend", r.setup.backend, sizeof r.setup.backend);
    get_s(&d, root, "label", r.setup.label, sizeof r.setup.label);
    get_s(&d, root, "model_id", r.setup.model_id, sizeof r.setup.model_id);
    get_u(&d, root, "num_prompts", &n_requests);
    get_f(&d, root, "request_rate", &r.load.request_rate);
    get_f(&d, root, "burstiness", &r.load.burstiness);
    get_u(&d, root, "max_concurrency", &r.load.max_concurrency);
    get_f(&d, root, "duration", &r.rates.duration_s);
    get_u(&d, root, "completed", &r.total.n_outcome[BENCH_COMPLETED]);
    get_u(&d, root, "failed", &failed);
    get_u(&d, root, "total_input_tokens", &r.total.input_tokens);
    get_u(&d, root, "total_output_tokens", &r.total.output_tokens);
    get_f(&d, root, "request_throughput", &r.rates.request_throughput);
    get_f(&d, root, "request_goodput", &r.rates.request_goodput);
    get_f(&d, root, "output_throughput", &r.rates.output_throughput);
    get_f(&d, root, "total_token_throughput", &r.rates.total_token_throughput);
    get_f(&d, root, "max_output_tokens_per_s", &r.rates.max_output_tokens_per_s);
    get_u(&d, root, "max_concurrent_requests", &r.total.max_concurrent_requests);
    get_pcts(root, &r);
    for (int m = 0; m < BENCH_N_METRICS; m++)
        get_metric(&d, root, &r, bench_metric_names[m], &r.metric[m]);
    r.n_requests = (size_t)n_requests;
    r.total.n_offered = r.total.n_outcome[BENCH_COMPLETED] + failed;
    get_pd(&d, pd, &r);
    /* vLLM's own files say that, too, and have no pd */
    r.setup.plain_server = pd && !strcmp(r.setup.backend, "openai");
    r.total.input_unknown =
        r.setup.plain_server && !json_is_integer(json_object_get(root, "total_input_tokens"));
    r.total.has_cached =
        r.setup.plain_server && json_is_integer(json_object_get(pd, "cached_tokens"));
    if (!pd) r.valid = true, r.total.n_offered = r.total.n_outcome[BENCH_COMPLETED] + failed;
end:
    json_decref(root);
    if (!d.s) *ret = r;
    return d.s;
}
