/* serve_options.c - see serve_options.h. */
#include "bench/serve/serve_options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"
#include "common/base/say.h"

static const char *const lists[3] = {"goodput", "slo_class", "metadata"};

/* Which list a flag belongs to, and the value after its '='. -1: none. */
static int list_of(const char *arg, const char **ret_value)
{
    if (strncmp(arg, "--", 2) != 0) return -1;
    for (int k = 0; k < 3; k++) {
        const char *a = arg + 2, *b = lists[k];
        while (*b && (*a == *b || (*a == '-' && *b == '_'))) a++, b++;
        if (*b || (*a && *a != '=')) continue;
        *ret_value = *a ? a + 1 : NULL;
        return k;
    }
    return -1;
}

static td_status join(struct bench_args *args, int k, const char *value, struct td_err *err)
{
    if (!args->joined[k]) {
        size_t bytes = strlen(lists[k]) + strlen(value) + 4;
        if (!(args->joined[k] = malloc(bytes))) return td_fail(err, TD_ERR_NOMEM, "out of memory");
        snprintf(args->joined[k], bytes, "--%s=%s", lists[k], value);
        return TD_OK;
    }
    size_t before = strlen(args->joined[k]), bytes = before + strlen(value) + 2;
    char *grown = realloc(args->joined[k], bytes);
    if (!grown) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    args->joined[k] = grown;
    snprintf(grown + before, bytes - before, " %s", value);
    return TD_OK;
}

td_status bench_args_open(int argc, char **argv, struct bench_args *ret_args, struct td_err *err)
{
    struct bench_args args = {.argv = calloc((size_t)argc + 4, sizeof(char *))};
    if (!args.argv) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    td_status s = TD_OK;
    for (int i = 0; i < argc && !s; i++) {
        const char *value = NULL;
        int k = i ? list_of(argv[i], &value) : -1;
        if (k < 0) {
            args.argv[args.argc++] = argv[i];
            continue;
        }
        int n = 0;
        if (value) s = join(&args, k, value, err), n++;
        for (; !value && !s && i + 1 < argc && argv[i + 1][0] != '-'; n++)
            s = join(&args, k, argv[++i], err);
        if (!s && n == 0) s = td_fail(err, TD_ERR_INVALID, "%s needs a value", argv[i]);
    }
    for (int k = 0; k < 3; k++)
        if (args.joined[k]) args.argv[args.argc++] = args.joined[k];
    if (s)
        bench_args_close(&args);
    else
        *ret_args = args;
    return s;
}

void bench_args_close(struct bench_args *args)
{
    for (int k = 0; k < 3; k++) free(args->joined[k]);
    free(args->argv);
    memset(args, 0, sizeof *args);
}

/* > 0, or "inf". */
static td_status parse_rate(const char *option, const char *text, double *ret, struct td_err *err)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || isspace((unsigned char)text[0]) || !(v > 0))
        return td_fail(err, TD_ERR_INVALID, "--%s is '%.40s', must be a number > 0 or inf", option,
                       text);
    *ret = v;
    return TD_OK;
}

static td_status parse_percentiles(const char *text, struct bench_run_config *c, struct td_err *err)
{
    c->n_pcts = 0;
    for (const char *at = text; *at;) {
        char *end;
        double v = strtod(at, &end);
        if (end == at || (*end && *end != ',') || !(v >= 0 && v <= 100))
            return td_fail(
                err, TD_ERR_INVALID,
                "--metric-percentiles is '%.60s', must be numbers in 0..100 with commas between",
                text);
        if (c->n_pcts == BENCH_MAX_PCTS)
            return td_fail(err, TD_ERR_INVALID, "--metric-percentiles: more than %d",
                           BENCH_MAX_PCTS);
        c->pcts[c->n_pcts++] = v;
        at = *end ? end + 1 : end;
    }
    return TD_OK;
}

static td_status check_metrics(const char *text, struct td_err *err)
{
    for (const char *at = text; *at;) {
        size_t n = strcspn(at, ",");
        bool known = false;
        for (int m = 0; m < BENCH_N_METRICS; m++)
            known |= strlen(bench_metric_names[m]) == n && !memcmp(at, bench_metric_names[m], n);
        if (!known)
            return td_fail(
                err, TD_ERR_INVALID,
                "--percentile-metrics: '%.*s' is unknown; known are ttft, tpot, itl, e2el", (int)n,
                at);
        at += n + (at[n] == ',');
    }
    return TD_OK;
}

/* A trace's kind by its first line. */
static td_status detect(const char *path, enum bench_dataset_kind *ret, struct td_err *err)
{
    char start[65536];
    if (!path[0]) return td_fail(err, TD_ERR_INVALID, "--trace is empty: name a trace file");
    FILE *f = fopen(path, "re");
    if (!f) return td_fail(err, TD_ERR_INVALID, "--trace %s: %s", path, strerror(errno));
    size_t n = fread(start, 1, sizeof start - 1, f);
    fclose(f);
    start[n] = 0;
    start[strcspn(start, "\n")] = 0;
    if (!strncmp(start, "TIMESTAMP,", 10))
        *ret = BENCH_AZURE;
    else if (start[0] != '{')
        return td_fail(
            err, TD_ERR_INVALID,
            "--trace %s line 1: neither a JSON object nor TIMESTAMP,ContextTokens,GeneratedTokens",
            path);
    else
        *ret = strstr(start, "\"hash_ids\"") ? BENCH_MOONCAKE : BENCH_TIMED;
    return TD_OK;
}

static td_status dataset(const struct bench_serve_options *o, struct bench_dataset_config *d,
                         struct td_err *err)
{
    static const char *const names[] = {"random",      "prefix_repetition", "sharegpt", "custom",
                                        "timed_trace", "mooncake",          "azure"};
    d->path = o->data.dataset_path;
    if (!strcmp(o->data.dataset_name, "auto")) {
        td_status s = detect(d->path, &d->kind, err);
        if (s) return s;
    }
    for (int k = 0; k < BENCH_N_DATASETS; k++)
        if (!strcmp(o->data.dataset_name, names[k])) d->kind = (enum bench_dataset_kind)k;
    bool made = d->kind == BENCH_RANDOM || d->kind == BENCH_PREFIX;
    if (made && o->data.dataset_path[0])
        return td_fail(err, TD_ERR_INVALID,
                       "--dataset-path is set, but dataset %s is made from the seed",
                       o->data.dataset_name);
    d->n_requests = o->data.num_prompts;
    d->input_len = d->kind == BENCH_PREFIX ? o->data.suffix_len : o->data.input_len;
    d->prefix_len = d->kind == BENCH_PREFIX ? o->data.prefix_len : o->data.random_prefix_len;
    d->output_len = o->data.output_len || !made ? o->data.output_len : 128;
    d->range_ratio = d->kind == BENCH_RANDOM ? o->data.random_range_ratio : 0;
    d->n_prefixes = o->data.num_prefixes;
    d->shuffle = o->data.shuffle;
    if (o->data.time_scale <= 0)
        return td_fail(err, TD_ERR_INVALID, "--time-scale is %g, must be > 0", o->data.time_scale);
    if (o->data.rate_scale <= 0)
        return td_fail(err, TD_ERR_INVALID, "--rate-scale is %g, must be > 0", o->data.rate_scale);
    if (o->data.time_scale != 1 && o->data.rate_scale != 1)
        return td_fail(err, TD_ERR_INVALID, "--time-scale and --rate-scale say the same: give one");
    d->time_scale = o->data.time_scale / o->data.rate_scale;
    d->length_scale = o->data.length_scale;
    d->block_tokens = o->data.trace_block_tokens;
    d->spread = o->data.spread_groups;
    d->max_input_len = o->data.max_input_len;
    d->max_output_len = o->data.max_output_len;
    return TD_OK;
}

static td_status arrivals(const struct bench_serve_options *o, bool trace,
                          struct bench_arrivals_config *a, struct td_err *err)
{
    bool is_auto = !strcmp(o->load.request_rate, "auto");
    td_status s = parse_rate("request-rate", is_auto ? "inf" : o->load.request_rate, &a->rate, err);
    if (!s) s = parse_rate("burstiness", o->load.burstiness, &a->burstiness, err);
    if (s) return s;
    if (o->load.arrival_cv > 0) {
        if (a->burstiness != 1)
            return td_fail(err, TD_ERR_INVALID,
                           "--burstiness and --arrival-cv say the same: give one");
        a->burstiness = 1 / (o->load.arrival_cv * o->load.arrival_cv);
    }
    a->rescale = o->load.rescale_arrivals;
    a->ramp = !strcmp(o->load.ramp_up_strategy, "linear")        ? BENCH_RAMP_LINEAR
              : !strcmp(o->load.ramp_up_strategy, "exponential") ? BENCH_RAMP_EXPONENTIAL
                                                                 : BENCH_RAMP_NONE;
    a->ramp_start = o->load.ramp_up_start_rps;
    a->ramp_end = o->load.ramp_up_end_rps;
    if (a->ramp && isfinite(a->rate))
        return td_fail(err, TD_ERR_INVALID,
                       "--ramp-up-strategy and --request-rate exclude each other");
    if (!a->ramp && (o->load.ramp_up_start_rps > 0 || o->load.ramp_up_end_rps > 0))
        return td_fail(err, TD_ERR_INVALID,
                       "--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy");

    bool automatic = !strcmp(o->load.arrival, "auto"), timed = trace && isinf(a->rate) && !a->ramp;
    if (!strcmp(o->load.arrival, "trace") || (automatic && timed))
        a->kind = BENCH_TRACE;
    else if (!strcmp(o->load.arrival, "constant") || isinf(a->burstiness))
        a->kind = BENCH_CONSTANT;
    else if (!strcmp(o->load.arrival, "gamma") || a->burstiness != 1)
        a->kind = BENCH_GAMMA;
    else
        a->kind = BENCH_POISSON;
    if (!automatic && strcmp(o->load.arrival, bench_arrival_name(a->kind)) != 0)
        return td_fail(err, TD_ERR_INVALID, "--arrival is %s, but --burstiness %g means %s",
                       o->load.arrival, a->burstiness, bench_arrival_name(a->kind));
    if (a->kind == BENCH_TRACE && (isfinite(a->rate) || a->ramp))
        return td_fail(
            err, TD_ERR_INVALID,
            "--arrival trace takes the trace's own times: use --rate-scale instead of a rate");
    return TD_OK;
}

static bool starts(const char *text, const char *with)
{
    return !strncmp(text, with, strlen(with));
}

static td_status openai_server(const struct bench_serve_options *o, struct bench_run_config *c,
                               struct td_err *err)
{
    static const char chat[] = "/chat/completions";
    size_t n = strlen(o->server.endpoint);
    bool http = starts(o->server.address, "http://"), https = starts(o->server.address, "https://");
    if (strstr(o->server.address, "://") && !http && !https)
        return td_fail(err, TD_ERR_INVALID,
                       "--base-url is %.80s: with --backend openai it must be http:// or https://",
                       o->server.address);
    if (!o->server.address[0] || !o->server.address[http ? 7 : https ? 8 : 0])
        return td_fail(err, TD_ERR_INVALID, "--base-url is '%s', must be http://HOST:PORT",
                       o->server.address);
    if (!https && (o->server.tls_ca[0] || o->server.tls_cert[0] || o->server.tls_key[0]))
        return td_fail(err, TD_ERR_INVALID,
                       "--%s is set, but --base-url is %.80s: TLS needs https://",
                       o->server.tls_ca[0]     ? "tls-ca"
                       : o->server.tls_cert[0] ? "tls-cert"
                                               : "tls-key",
                       o->server.address);
    if (o->server.endpoint[0] && o->server.endpoint[0] != '/')
        return td_fail(err, TD_ERR_INVALID, "--endpoint is '%.80s', must be a path",
                       o->server.endpoint);
    if (n >= sizeof chat - 1 && !strcmp(o->server.endpoint + n - (sizeof chat - 1), chat))
        return td_fail(err, TD_ERR_INVALID,
                       "--endpoint is %.80s: chats are not measured, only completions",
                       o->server.endpoint);
    if (o->server.resume_ms)
        return td_fail(err, TD_ERR_INVALID,
                       "--resume-ms is for --backend grpc: other servers cannot go on");
    c->openai = true;
    c->target = o->server.address;
    c->method = o->server.endpoint[0] ? o->server.endpoint : "/v1/completions";
    c->vocab = (uint32_t)o->server.vocab_size;
    return TD_OK;
}

static td_status grpc_server(const struct bench_serve_options *o, struct bench_run_config *c,
                             struct td_err *err)
{
    static const char *const schemes[] = {"http://", "https://", "grpc://"};
    c->target = o->server.address;
    if (starts(o->server.address, "https://") && !o->server.tls_ca[0])
        return td_fail(err, TD_ERR_INVALID, "--base-url is %s: TLS needs --tls-ca",
                       o->server.address);
    for (size_t i = 0; i < 3; i++)
        if (starts(c->target, schemes[i])) c->target += strlen(schemes[i]);
    if (!c->target[0])
        return td_fail(err, TD_ERR_INVALID, "--base-url is '%s', must be HOST:PORT",
                       o->server.address);
    if (o->server.endpoint[0] && o->server.endpoint[0] != '/')
        return td_fail(err, TD_ERR_INVALID,
                       "--endpoint is '%.80s', must be the path of a gRPC method",
                       o->server.endpoint);
    if (o->server.endpoint[0]) c->method = o->server.endpoint;
    if (o->server.vocab_size)
        return td_fail(err, TD_ERR_INVALID,
                       "--vocab-size is for --backend openai: the router tells its model's");
    return TD_OK;
}

static td_status server(const struct bench_serve_options *o, struct bench_run_config *c,
                        struct td_err *err)
{
    return !strcmp(o->server.backend, "openai") ? openai_server(o, c, err) : grpc_server(o, c, err);
}

td_status bench_serve_config(const struct bench_serve_options *o,
                             struct bench_run_config *ret_config, struct td_err *err)
{
    struct bench_run_config c;
    bench_run_config_init(&c);
    td_status s = server(o, &c, err);
    if (s) return s;
    c.tls_ca = o->server.tls_ca;
    c.tls_cert = o->server.tls_cert;
    c.tls_key = o->server.tls_key;
    c.api_key_file = o->server.api_key_file;
    c.resume_ms = o->server.resume_ms;
    c.model = o->server.model;
    c.label = o->report.label;
    c.metadata = o->report.metadata;
    c.seed = o->load.seed;
    c.max_concurrency = o->load.max_concurrency;
    c.duration_s = o->load.benchmark_duration;
    c.grace_s = o->load.benchmark_grace_period;
    c.warmup = o->load.warmup;
    c.cooldown = o->load.cooldown;
    c.n_warmups = o->load.num_warmups;
    c.n_tenants = (uint32_t)o->load.tenants;
    c.send_slo = o->slo.send && !c.openai; /* that API has no place for them */
    c.ignore_eos = o->sampling.ignore_eos;
    c.temperature = o->sampling.temperature;
    c.top_p = o->sampling.top_p;
    c.gpus = (uint32_t)o->slo.gpus;
    c.max_sched_lag_ms = o->load.max_sched_lag_ms;
    c.progress = o->load.progress;
    c.realtime = o->load.realtime;
    c.slo_preset = o->slo.preset;
    if (o->slo.preset[0]) s = bench_slo_preset(o->slo.preset, &c.slo, &c.target_attainment, err);
    if (!s) s = bench_slo_parse(o->slo.goodput, &c.slo, err);
    if (!s) s = bench_slo_classes(o->slo.classes, &c.slo, c.classes, &c.n_classes, err);
    if (!s) s = parse_percentiles(o->report.metric_percentiles, &c, err);
    if (!s) s = check_metrics(o->report.percentile_metrics, err);
    if (!s) s = dataset(o, &c.dataset, err);
    if (!s) s = arrivals(o, bench_dataset_is_trace(c.dataset.kind), &c.arrivals, err);
    if (!s && o->server.extra_body[0])
        s = td_json_load_text(o->server.extra_body, strlen(o->server.extra_body), "--extra-body",
                              &c.extra_body, err);
    if (!s && c.extra_body && !json_is_object(c.extra_body))
        s = td_fail(err, TD_ERR_INVALID, "--extra-body must be a JSON object");
    if (s)
        bench_run_config_free(&c);
    else
        *ret_config = c;
    return s;
}

static void result_path(const struct bench_serve_options *o, const struct bench_result *r,
                        const char *name, char *path, size_t path_bytes)
{
    char made[512], rate[32] = "inf", model[128];
    if (!name[0]) {
        if (isfinite(r->load.request_rate))
            snprintf(rate, sizeof rate, "%g", r->load.request_rate);
        else if (isnan(r->load.request_rate))
            snprintf(rate, sizeof rate, "%s", r->load.ramp[0] ? "ramp" : "trace");
        snprintf(model, sizeof model, "%.127s", r->setup.model_id);
        for (char *p = model; *p; p++)
            if (*p == '/') *p = '-';
        snprintf(made, sizeof made, "%s-%sqps-%s%.0llu%s%s-%s.json",
                 r->setup.label[0] ? r->setup.label : r->setup.backend, rate,
                 r->load.max_concurrency ? "concurrency" : "",
                 (unsigned long long)r->load.max_concurrency, r->load.max_concurrency ? "-" : "",
                 model, r->setup.date);
        name = made;
    }
    bool in_dir = o->report.result_dir[0] && name[0] != '/';
    snprintf(path, path_bytes, "%s%s%s", in_dir ? o->report.result_dir : "", in_dir ? "/" : "",
             name);
}

td_status bench_serve_save(const struct bench_serve_options *o, const struct bench_result *r,
                           FILE *out, struct td_err *err)
{
    char path[4096];
    td_status s = TD_OK;
    if (o->report.save_result || o->report.save_detailed || o->report.result_filename[0]) {
        result_path(o, r, o->report.result_filename, path, sizeof path);
        s = bench_result_write(r, o->report.percentile_metrics, o->report.save_detailed, path, err);
        if (!s) td_say(out, 2, "result: %s\n", path);
    }
    if (!s && (o->report.save_detailed || o->report.profile_export_file[0])) {
        result_path(o, r,
                    o->report.profile_export_file[0] ? o->report.profile_export_file
                                                     : "profile_export.jsonl",
                    path, sizeof path);
        s = bench_result_export(r, path, err);
        if (!s) td_say(out, 2, "requests: %s\n", path);
    }
    return s;
}
