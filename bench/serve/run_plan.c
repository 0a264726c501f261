/* run_plan.c - see run_flight.h: everything that is decided before the first request is sent. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bench/serve/run_flight.h"
#include "common/base/random.h"

#define DEFAULT_PROMPTS 1000  /* vLLM's */
#define CLOSED_PROMPTS 100000 /* a closed loop that ends by time: more than it will send */

#ifndef TD_VERSION
#define TD_VERSION "0.0.0"
#endif

td_status run_check(const struct bench_run_config *c, struct td_err *err)
{
    struct {
        const char *name;
        double v;
    } shares[] = {{"warmup", c->warmup},
                  {"cooldown", c->cooldown},
                  {"benchmark_grace_period", c->grace_s},
                  {"benchmark_duration", c->duration_s},
                  {"max_sched_lag_ms", c->max_sched_lag_ms}};
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++)
        if (!(shares[i].v >= 0 && isfinite(shares[i].v)))
            return td_fail(err, TD_ERR_INVALID, "%s is %g, must be >= 0", shares[i].name,
                           shares[i].v);
    const struct bench_slo *s = &c->slo;
    if (!(s->ttft_ms >= 0 && s->tpot_ms >= 0 && s->e2el_ms >= 0 && s->tbt_ms >= 0))
        return td_fail(err, TD_ERR_INVALID, "an objective is negative or no number");
    if (c->n_pcts > BENCH_MAX_PCTS || c->n_classes > BENCH_MAX_CLASSES)
        return td_fail(err, TD_ERR_INTERNAL, "more percentiles or classes than there is room for");
    for (size_t i = 0; i < c->n_pcts; i++)
        if (!(c->pcts[i] >= 0 && c->pcts[i] <= 100))
            return td_fail(err, TD_ERR_INVALID, "metric_percentiles: %g must be in 0..100",
                           c->pcts[i]);
    if (c->arrivals.kind == BENCH_TRACE && !bench_dataset_is_trace(c->dataset.kind))
        return td_fail(err, TD_ERR_INVALID,
                       "arrival is trace, but the dataset has no time stamps: it must be "
                       "timed_trace, mooncake or azure");
    if (c->max_concurrency > 1000000)
        return td_fail(err, TD_ERR_INVALID, "max_concurrency is %llu, must be <= 1000000",
                       (unsigned long long)c->max_concurrency);
    return TD_OK;
}

static bool run_is_closed(const struct bench_run_config *c)
{
    return c->arrivals.kind != BENCH_TRACE && c->arrivals.ramp == BENCH_RAMP_NONE &&
           isinf(c->arrivals.rate) && c->max_concurrency;
}

td_status run_open_dataset(struct run *r, struct td_err *err)
{
    const struct bench_run_config *c = r->config;
    struct bench_dataset_config d = c->dataset;
    bool trace = bench_dataset_is_trace(d.kind);
    if (d.n_requests == 0 && !trace) {
        double rate = c->arrivals.ramp ? fmax(c->arrivals.ramp_start, c->arrivals.ramp_end)
                                       : c->arrivals.rate;
        if (c->duration_s > 0 && run_is_closed(c))
            d.n_requests = CLOSED_PROMPTS;
        else if (c->duration_s > 0 && isfinite(rate))
            d.n_requests = (uint64_t)fmin(BENCH_MAX_REQUESTS, fmax(1, ceil(rate * c->duration_s)));
        else if (d.kind != BENCH_CUSTOM && d.kind != BENCH_SHAREGPT)
            d.n_requests = DEFAULT_PROMPTS;
    }
    d.seed = c->seed;
    d.vocab = r->vocab;
    d.count_tokens = r->backend->count_tokens;
    d.count_ctx = r;
    td_status s = bench_dataset_open(&d, &r->dataset, err);
    for (size_t i = 0; !s && i < bench_dataset_size(r->dataset); i++) {
        const struct bench_item *it = bench_dataset_item(r->dataset, i);
        if ((uint64_t)it->input_len + (uint64_t)it->output_len > r->max_model_len)
            s = td_fail(err, TD_ERR_INVALID,
                        "request %zu has %d input and %d output tokens, model %s takes %u "
                        "together: use --input-len, --output-len, --length-scale, "
                        "--max-input-len or --max-output-len",
                        i, it->input_len, it->output_len, r->model, r->max_model_len);
    }
    return s;
}

static uint32_t draw_class(const struct bench_run_config *c, size_t i)
{
    double total = 0;
    for (size_t k = 0; k < c->n_classes; k++) total += c->classes[k].weight;
    struct td_keyed rng = td_keyed_at(c->seed, WHAT_CLASS, i);
    double at = td_keyed_unit(&rng) * total;
    for (size_t k = 0; k + 1 < c->n_classes; k++)
        if ((at -= c->classes[k].weight) < 0) return (uint32_t)k;
    return c->n_classes ? (uint32_t)c->n_classes - 1 : 0;
}

/* The requests with their times, classes and tenants; those after --benchmark-duration are cut
 * off. */
td_status run_plan(struct run *r, struct td_err *err)
{
    const struct bench_run_config *c = r->config;
    struct bench_result *res = &r->result;
    size_t n = bench_dataset_size(r->dataset);
    double *at_s = malloc((n ? n : 1) * sizeof *at_s);
    res->requests = calloc(n ? n : 1, sizeof *res->requests);
    if (!at_s || !res->requests) {
        free(at_s);
        return run_no_memory(err);
    }
    td_status s = TD_OK;
    struct bench_arrivals_config a = c->arrivals;
    a.seed = c->seed;
    if (a.kind == BENCH_TRACE)
        for (size_t i = 0; i < n; i++) at_s[i] = bench_dataset_item(r->dataset, i)->at_s;
    else
        s = bench_arrivals_make(&a, n, at_s, err);
    for (size_t i = 0; !s && i < n; i++) {
        if (c->duration_s > 0 && at_s[i] >= c->duration_s) break;
        const struct bench_item *it = bench_dataset_item(r->dataset, i);
        struct td_keyed rng = td_keyed_at(c->seed, WHAT_TENANT, i);
        res->requests[res->n_requests++] = (struct bench_request){
            .class_index = draw_class(c, i),
            .tenant = c->n_tenants ? (uint32_t)td_keyed_below(&rng, c->n_tenants) : 0,
            .scheduled_s = at_s[i],
            .ready_s = at_s[i],
            .sent_s = NAN,
            .first_s = NAN,
            .last_s = NAN,
            .end_s = NAN,
            .retry_delay_ms = -1,
            .input_len = it->input_len,
            .want_len = it->output_len};
    }
    free(at_s);
    if (!s && res->n_requests == 0)
        s = td_fail(err, TD_ERR_INVALID, "benchmark_duration is %g s: no request arrives in it",
                    c->duration_s);
    return s;
}

void run_describe(struct run *r)
{
    const struct bench_run_config *c = r->config;
    static const char *const datasets[BENCH_N_DATASETS] = {
        "random", "prefix_repetition", "sharegpt", "custom", "timed_trace", "mooncake", "azure"};
    static const char *const ramps[] = {"", "linear", "exponential"};
    struct bench_result *res = &r->result;
    time_t now = (time_t)(td_wall_ns() / TD_NS_PER_S);
    struct tm tm;
    localtime_r(&now, &tm);
    strftime(res->setup.date, sizeof res->setup.date, "%Y%m%d-%H%M%S", &tm);
    snprintf(res->setup.backend, sizeof res->setup.backend, "%s", r->backend->name);
    snprintf(res->setup.label, sizeof res->setup.label, "%s", c->label);
    snprintf(res->setup.model_id, sizeof res->setup.model_id, "%s", r->model);
    snprintf(res->setup.target, sizeof res->setup.target, "%s", c->target);
    snprintf(res->setup.dataset, sizeof res->setup.dataset, "%s", datasets[c->dataset.kind]);
    snprintf(res->setup.dataset_path, sizeof res->setup.dataset_path, "%s", c->dataset.path);
    res->load.closed_loop = run_is_closed(c);
    snprintf(res->load.arrival, sizeof res->load.arrival, "%s",
             res->load.closed_loop ? "closed_loop" : bench_arrival_name(c->arrivals.kind));
    snprintf(res->load.ramp, sizeof res->load.ramp, "%s", ramps[c->arrivals.ramp]);
    if (c->arrivals.ramp)
        res->load.ramp_start = c->arrivals.ramp_start, res->load.ramp_end = c->arrivals.ramp_end;
    res->load.request_rate =
        c->arrivals.kind == BENCH_TRACE || c->arrivals.ramp ? NAN : c->arrivals.rate;
    res->load.burstiness = c->arrivals.kind == BENCH_TRACE      ? NAN
                           : c->arrivals.kind == BENCH_GAMMA    ? c->arrivals.burstiness
                           : c->arrivals.kind == BENCH_CONSTANT ? INFINITY
                                                                : 1;
    res->load.rescaled = c->arrivals.rescale && isfinite(res->load.request_rate);
    res->load.seed = c->seed;
    res->load.max_concurrency = c->max_concurrency;
    res->load.n_cut = bench_dataset_n_cut(r->dataset);
    res->load.time_scale = bench_dataset_is_trace(c->dataset.kind) ? c->dataset.time_scale : 1;
    res->load.length_scale = bench_dataset_is_trace(c->dataset.kind) ? c->dataset.length_scale : 1;
    res->load.block_tokens =
        c->dataset.kind == BENCH_MOONCAKE ? bench_dataset_block_tokens(r->dataset) : 0;
    res->load.warmup = c->warmup;
    res->load.cooldown = c->cooldown;
    res->load.grace_s = c->grace_s;
    res->slo = c->slo;
    res->slo_sent = c->send_slo;
    res->setup.plain_server = c->openai;
    snprintf(res->slo_preset, sizeof res->slo_preset, "%s", c->slo_preset);
    res->target_attainment = c->target_attainment;
    res->load.n_tenants = c->n_tenants;
    res->setup.gpus_given = c->gpus > 0;
    res->setup.gpus = c->gpus ? c->gpus : res->setup.n_prefill + res->setup.n_decode;
    snprintf(res->setup.build, sizeof res->setup.build, "%s", TD_VERSION);
    memcpy(res->pcts, c->pcts, sizeof res->pcts);
    res->n_pcts = c->n_pcts;
    res->generator.max_sched_lag_ms = c->max_sched_lag_ms;
    if (c->metadata[0]) res->setup.metadata = strdup(c->metadata);
}

void run_describe_classes(struct run *r)
{
    const struct bench_run_config *c = r->config;
    r->result.n_classes = c->n_classes ? c->n_classes : 1;
    for (size_t i = 0; i < c->n_classes; i++) r->result.classes[i].of = c->classes[i];
    if (c->n_classes == 0)
        r->result.classes[0].of = (struct bench_class){.slo = c->slo, .weight = 1};
}
