/* sweep.c - tandem bench sweep: many runs at many rates, on one cluster or on several that it
 * starts itself, and what they say together.
 *
 *   grid       --rates 1,2,4 (or --profile kind=sweep: one at a time, all at once, and rates
 *              between), --seeds each
 *   search     --find-goodput: search.h
 *
 * No two runs of a cluster have prompts in common (each has a seed of its own, the same ones for
 * every configuration), so that no run is served from the prefix cache of another; prompts that
 * come from a file are the exception. Files are written after every run, so that an interrupted
 * sweep has what it measured. Exit status: 0; 1 a run failed or nothing was measured; 2 options;
 * 130 interrupted. */
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "bench/plot/plot.h"
#include "bench/serve/serve_options.h"
#include "bench/sweep/cluster.h"
#include "bench/sweep/search.h"
#include "bench/sweep/sweep.h"
#include "common/base/clock.h"
#include "common/base/say.h"

int td_bench_sweep(int argc, char **argv);

#define MAX_RATES 64
#define RUN_SECONDS 30    /* of a run that says neither how long nor how many */
#define SEED_STEP 1000003 /* between the seeds of two runs of one cluster */
#define MAX_RETRIES 1     /* of a run in which the generator was late */

struct options {
    struct bench_serve_options serve;
    const char *rates, *profile, *tolerance, *slo_scale, *stop_on, *modes, *pd, *cluster_model,
        *cpus, *up_args, *title;
    bool find_goodput, plots, save_requests;
    double attainment, start_rate, min_rate, max_rate;
    uint64_t seeds, verify, max_runs, max_failures, min_requests, threads, start_timeout_ms;
};

#define OFF(f) offsetof(struct options, f)
// clang-format off
static const struct td_option table[] = {
    BENCH_SERVE_OPTIONS(struct options, serve, "random"),
    {"rates", TD_OPT_STR, "", 0, 0, NULL, OFF(rates), "requests/s to run, such as 1,2,4"},
    {"profile", TD_OPT_STR, "", 0, 0, NULL, OFF(profile),
     "kind=sweep,sweep_size=10: one request at a time, all at once, and evenly spaced rates "
     "between"},
    {"find_goodput", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(find_goodput),
     "search the highest rate that meets the attainment; default without --rates and --profile"},
    {"attainment", TD_OPT_F64, "0", 0, 1, NULL, OFF(attainment),
     "share of requests within their objectives; 0 = the preset's, else 0.9"},
    {"tolerance", TD_OPT_STR, "2%", 0, 0, NULL, OFF(tolerance), "of the rate that is searched"},
    {"start_rate", TD_OPT_F64, "1", 1e-3, 1e6, NULL, OFF(start_rate), "where the search starts"},
    {"min_rate", TD_OPT_F64, "0.05", 1e-3, 1e6, NULL, OFF(min_rate), "where it gives up"},
    {"max_rate", TD_OPT_F64, "10000", 1e-3, 1e6, NULL, OFF(max_rate), "and where it has enough"},
    {"seeds", TD_OPT_U64, "1", 1, 1000, NULL, OFF(seeds), "runs of each rate of a grid"},
    {"verify", TD_OPT_U64, "5", 0, 100, NULL, OFF(verify),
     "runs with other seeds at the rate that was found; 0 = none"},
    {"max_runs", TD_OPT_U64, "60", 1, 10000, NULL, OFF(max_runs), "of one search"},
    {"min_requests", TD_OPT_U64, "0", 0, BENCH_MAX_REQUESTS, NULL, OFF(min_requests),
     "of a run, however low its rate; 0 = what the interval needs, three times over"},
    {"slo_scale", TD_OPT_STR, "", 0, 0, NULL, OFF(slo_scale),
     "0.4:1.6:0.2: judge each run by scaled objectives, too"},
    {"stop_on", TD_OPT_ENUM, "none", 0, 0, "none|over_saturation", OFF(stop_on),
     "end a grid's climb at the first rate that is more than is served: queues grow, or a tenth "
     "is turned away"},
    {"max_failures", TD_OPT_U64, "0", 0, BENCH_MAX_REQUESTS, NULL, OFF(max_failures),
     "leave a configuration after a run with more failed requests; 0 = never"},
    {"modes", TD_OPT_STR, "", 0, 0, NULL, OFF(modes),
     "start clusters of these modes: pd,colocated,hybrid"},
    {"pd", TD_OPT_STR, "", 0, 0, NULL, OFF(pd),
     "start clusters of these shapes, prefill:decode workers: 1:1,2:1; colocated has as many "
     "workers, all decode"},
    {"cluster_model", TD_OPT_STR, "", 0, 0, NULL, OFF(cluster_model),
     "model directory for the clusters that are started"},
    {"threads", TD_OPT_U64, "1", 1, 1024, NULL, OFF(threads), "of each worker that is started"},
    {"cpus", TD_OPT_STR, "", 0, 0, NULL, OFF(cpus),
     "pin the started workers' threads to these CPUs, such as 0-3"},
    {"up_args", TD_OPT_STR, "", 0, 0, NULL, OFF(up_args),
     "more options for tandem up: --up-args='--kv-memory 1GiB --policy least_token'"},
    {"start_timeout_ms", TD_OPT_U64, "120000", 1000, 3600000, NULL, OFF(start_timeout_ms),
     "longest wait for a started cluster"},
    {"title", TD_OPT_STR, "", 0, 0, NULL, OFF(title), "of the report"},
    {"save_requests", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(save_requests),
     "a CSV of each run's requests: when they were to be sent, lengths, what became of them; "
     "tandem sim --trace reads it"},
    {"plots", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(plots),
     "write plots and report.html beside the CSV"},
    {0},
};
// clang-format on

static volatile sig_atomic_t g_stop;

static void on_signal(int number)
{
    (void)number;
    g_stop = 1;
}

struct state {
    const struct options *o;
    struct bench_run_config base;
    struct sweep sweep;
    char dir[512], csv[600], json[600];
    double rates[MAX_RATES];
    size_t n_rates;
    uint32_t profile_size; /* 0 = no profile */
    double started_s;
    uint32_t config;     /* under test */
    uint64_t n_runs;     /* of it */
    char target[256];    /* its address */
    bool give_up;        /* of this configuration, by max_failures */
    uint32_t left_after; /* grid: runs of later configurations */
};

static double now_s(void) { return (double)td_now_ns() / 1e9; }

/* --- options to a plan ------------------------------------------------------------------------ */

static td_status parse_number(const char *option, const char *text, double min, double max,
                              double *ret, struct td_err *err)
{
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !(v >= min && v <= max))
        return td_fail(err, TD_ERR_INVALID, "--%s: \"%.40s\" must be a number in %g..%g", option,
                       text, min, max);
    *ret = v;
    return TD_OK;
}

static int ascending(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

static td_status parse_rates(const char *text, struct state *st, struct td_err *err)
{
    char copy[1024];
    td_status s = TD_OK;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *rest = copy, *item; !s && text[0] && (item = strsep(&rest, ","));) {
        if (st->n_rates == MAX_RATES)
            return td_fail(err, TD_ERR_INVALID, "--rates has more than %d rates", MAX_RATES);
        s = parse_number("rates", item, 1e-3, 1e6, &st->rates[st->n_rates], err);
        if (!s) st->n_rates++;
    }
    qsort(st->rates, st->n_rates, sizeof *st->rates, ascending);
    return s;
}

static td_status parse_profile(const char *text, struct state *st, struct td_err *err)
{
    char copy[256];
    bool kind = false;
    double size = 10;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *rest = copy, *item; text[0] && (item = strsep(&rest, ","));) {
        if (!strcmp(item, "kind=sweep") || !strcmp(item, "sweep"))
            kind = true;
        else if (strncmp(item, "sweep_size=", 11) != 0)
            return td_fail(err, TD_ERR_INVALID,
                           "--profile: \"%.40s\" is unknown; use kind=sweep,sweep_size=N", item);
        else if (parse_number("profile", item + 11, 3, MAX_RATES, &size, err))
            return err->code;
    }
    if (text[0] && !kind)
        return td_fail(err, TD_ERR_INVALID,
                       "--profile is \"%.60s\", must be kind=sweep[,sweep_size=N]", text);
    if (text[0] && size != floor(size))
        return td_fail(err, TD_ERR_INVALID, "--profile: sweep_size is %g, must be a whole number",
                       size);
    st->profile_size = text[0] ? (uint32_t)size : 0;
    return TD_OK;
}

static td_status parse_scales(const char *text, struct sweep *s, struct td_err *err)
{
    char copy[128], *rest = copy;
    double v[3];
    if (!text[0]) text = "0.4:1.6:0.2";
    snprintf(copy, sizeof copy, "%s", text);
    for (int i = 0; i < 3; i++) {
        const char *item = strsep(&rest, ":");
        if (!item)
            return td_fail(err, TD_ERR_INVALID, "--slo-scale is \"%.60s\", must be FIRST:LAST:STEP",
                           text);
        td_status st = parse_number("slo-scale", item, 1e-3, 1e3, &v[i], err);
        if (st) return st;
    }
    if (rest || v[1] < v[0])
        return td_fail(err, TD_ERR_INVALID,
                       "--slo-scale is \"%.60s\", must be FIRST:LAST:STEP with FIRST <= LAST",
                       text);
    for (int i = 0; v[0] + i * v[2] <= v[1] * (1 + 1e-9); i++) {
        if (s->n_scales == SWEEP_MAX_SCALES)
            return td_fail(err, TD_ERR_INVALID, "--slo-scale \"%.60s\" has more than %d steps",
                           text, SWEEP_MAX_SCALES);
        s->scales[s->n_scales++] = v[0] + i * v[2];
    }
    return TD_OK;
}

static td_status add_config(struct sweep *s, const char *mode, uint32_t prefill, uint32_t decode,
                            struct td_err *err)
{
    if (s->n_configs == SWEEP_MAX_CONFIGS)
        return td_fail(err, TD_ERR_INVALID, "more than %d configurations", SWEEP_MAX_CONFIGS);
    struct sweep_config *c = &s->configs[s->n_configs++];
    bool together = !strcmp(mode, "colocated"); /* as many workers, as many threads, nobody
                                                   prefills for another */
    *c = (struct sweep_config){.prefill = together ? 0 : prefill,
                               .decode = together ? prefill + decode : decode,
                               .gpus = prefill + decode,
                               .goodput = NAN};
    snprintf(c->mode, sizeof c->mode, "%s", mode);
    snprintf(c->name, sizeof c->name, "%s %u:%u", mode, c->prefill, c->decode);
    return TD_OK;
}

/* Every mode in every shape. */
static td_status parse_configs(const struct options *o, struct sweep *s, struct td_err *err)
{
    char modes[128], shapes[512];
    if (!o->modes[0] && !o->pd[0]) {
        s->configs[s->n_configs++] = (struct sweep_config){.name = "cluster", .goodput = NAN};
        return TD_OK;
    }
    if (!strcmp(o->serve.server.backend, "openai"))
        return td_fail(err, TD_ERR_INVALID,
                       "--backend is openai, but %s starts clusters of tandem, which speak gRPC",
                       o->modes[0] ? "--modes" : "--pd");
    if (!o->cluster_model[0])
        return td_fail(err, TD_ERR_INVALID,
                       "--modes and --pd start clusters: give --cluster-model DIR");
    snprintf(modes, sizeof modes, "%s", o->modes[0] ? o->modes : "pd");
    for (char *rest = modes, *mode; (mode = strsep(&rest, ","));) {
        if (strcmp(mode, "pd") != 0 && strcmp(mode, "colocated") != 0 &&
            strcmp(mode, "hybrid") != 0)
            return td_fail(err, TD_ERR_INVALID,
                           "--modes: \"%.40s\" must be pd, colocated or hybrid", mode);
        snprintf(shapes, sizeof shapes, "%s", o->pd[0] ? o->pd : "1:1");
        for (char *left = shapes, *shape; (shape = strsep(&left, ","));) {
            char *end, *end2 = NULL;
            unsigned long p = strtoul(shape, &end, 10),
                          d = end != shape && *end == ':' ? strtoul(end + 1, &end2, 10) : 0;
            if (!end2 || *end2 || p < 1 || p > 64 || d < 1 || d > 64)
                return td_fail(err, TD_ERR_INVALID,
                               "--pd: \"%.40s\" must be PREFILL:DECODE, each 1..64", shape);
            bool twice = false; /* 1:2 and 2:1 colocated are the same */
            for (uint32_t i = 0; i < s->n_configs && !strcmp(mode, "colocated"); i++)
                twice |= !strcmp(s->configs[i].mode, mode) && s->configs[i].decode == p + d;
            td_status st = twice ? TD_OK : add_config(s, mode, (uint32_t)p, (uint32_t)d, err);
            if (st) return st;
        }
    }
    return TD_OK;
}

/* Enough that a run which misses a little has its lower bound above the attainment: three times
 * what a flawless one needs. */
static uint64_t least_requests(double attainment)
{
    double n = TD_STATS_Z95 * TD_STATS_Z95 * attainment / (1 - attainment);
    return attainment < 1 ? (uint64_t)fmin(3 * n + 10, BENCH_MAX_REQUESTS) : 1000;
}

static void describe(struct state *st, int argc, char **argv)
{
    struct sweep *s = &st->sweep;
    const struct options *o = st->o;
    time_t t = time(NULL);
    struct tm tm;
    struct utsname u = {0};
    char line[256], cpu[128] = "unknown CPU";
    gmtime_r(&t, &tm);
    strftime(s->date, sizeof s->date, "%Y-%m-%d %H:%M UTC", &tm);
    snprintf(s->title, sizeof s->title, "%s", o->title[0] ? o->title : "Goodput sweep");
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, "model name", 10) && strchr(line, ':')) {
            line[strcspn(line, "\n")] = 0;
            snprintf(cpu, sizeof cpu, "%s", strchr(line, ':') + 2);
            break;
        }
    if (f) fclose(f);
    uname(&u);
    snprintf(s->machine, sizeof s->machine, "%s, %ld CPUs, %.1f GiB, %s %s", cpu,
             sysconf(_SC_NPROCESSORS_ONLN),
             (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE) / (1 << 30), u.sysname,
             u.release);
    size_t bytes = 1;
    for (int i = 0; i < argc; i++) bytes += strlen(argv[i]) + 3;
    s->command = malloc(bytes + 16);
    if (!s->command) return;
    size_t used = (size_t)snprintf(s->command, bytes + 16, "tandem bench sweep");
    for (int i = 1; i < argc; i++) {
        const char *quote = strpbrk(argv[i], " '\"$&*;<>|") ? "'" : "";
        used += (size_t)snprintf(s->command + used, bytes + 16 - used, " %s%s%s", quote, argv[i],
                                 quote);
    }
}

static double load1(void)
{
    double v = NAN;
    return getloadavg(&v, 1) == 1 ? v : NAN;
}

static td_status parse_tolerance(const char *text, double *ret, struct td_err *err)
{
    char *end;
    double v = strtod(text, &end);
    if (*end == '%') v /= 100, end++;
    if (*end || !(v >= 0.001 && v <= 1))
        return td_fail(err, TD_ERR_INVALID, "--tolerance is \"%.40s\", must be 0.1%% to 100%%",
                       text);
    *ret = v;
    return TD_OK;
}

/* What the options must be to each other. */
static td_status check_plan(const struct state *st, struct td_err *err)
{
    const struct options *o = st->o;
    bool any = bench_slo_any(&st->sweep.slo);
    for (size_t i = 0; i < st->base.n_classes; i++) any |= bench_slo_any(&st->base.classes[i].slo);
    if (!st->sweep.grid && !any)
        return td_fail(
            err, TD_ERR_INVALID,
            "the search needs objectives: --goodput ttft:200 tpot:50, --slo-preset or --slo-class");
    if (!(o->min_rate <= o->start_rate && o->start_rate <= o->max_rate))
        return td_fail(err, TD_ERR_INVALID,
                       "--start-rate is %g, must be within --min-rate %g and --max-rate %g",
                       o->start_rate, o->min_rate, o->max_rate);
    if (isfinite(st->base.arrivals.rate) || st->base.arrivals.ramp)
        return td_fail(err, TD_ERR_INVALID,
                       "a sweep sets the rate: leave --request-rate and --ramp-up-strategy out");
    return TD_OK;
}

/* The load in one line, as the report shows it. */
static void describe_load(const struct state *st, char *text, size_t bytes)
{
    const struct options *o = st->o;
    if (st->base.dataset.kind == BENCH_RANDOM)
        snprintf(text, bytes, "random prompts, %llu tokens in, %llu out%s",
                 (unsigned long long)o->serve.data.input_len,
                 (unsigned long long)(o->serve.data.output_len ? o->serve.data.output_len : 128),
                 o->serve.sampling.ignore_eos ? "" : " at most");
    else
        snprintf(text, bytes, "%s %s", o->serve.data.dataset_name, o->serve.data.dataset_path);
    size_t used = strlen(text);
    if (st->base.n_classes > 1)
        snprintf(text + used, bytes - used,
                 "; %zu classes, each with its objectives: those shown are %s's",
                 st->base.n_classes, st->base.classes[0].name);
}

/* The settings that every run of the sweep has in common. */
static void set_base(struct bench_run_config *base)
{
    static const double pcts[] = {50, 90, 95, 99};
    /* lengths of the trace, rates of ours */
    if (base->arrivals.kind == BENCH_TRACE)
        base->arrivals.kind = base->arrivals.burstiness == 1 ? BENCH_POISSON : BENCH_GAMMA;
    if (base->duration_s == 0 && base->dataset.n_requests == 0) base->duration_s = RUN_SECONDS;
    memcpy(base->pcts, pcts, sizeof pcts);
    base->n_pcts = 4;
    base->progress = false; /* a line for each run instead */
    base->stop = &g_stop;
}

static td_status plan(struct state *st, struct td_err *err)
{
    const struct options *o = st->o;
    struct sweep *s = &st->sweep;
    td_status status = parse_rates(o->rates, st, err);
    if (!status) status = parse_profile(o->profile, st, err);
    if (!status) status = parse_scales(o->slo_scale, s, err);
    if (!status) status = parse_configs(o, s, err);
    if (status) return status;
    if (!!st->n_rates + !!st->profile_size + o->find_goodput > 1)
        return td_fail(err, TD_ERR_INVALID,
                       "--rates, --profile and --find-goodput exclude each other");
    s->grid = st->n_rates || st->profile_size;
    if ((status = parse_tolerance(o->tolerance, &s->tolerance, err))) return status;
    s->attainment = o->attainment > 0                ? o->attainment
                    : st->base.target_attainment > 0 ? st->base.target_attainment
                                                     : 0.9;
    s->slo = st->base.slo;
    s->slo_sent = st->base.send_slo;
    if ((status = check_plan(st, err))) return status;
    set_base(&st->base);
    /* for the report's text; each request is judged by its own class */
    if (!bench_slo_any(&s->slo) && st->base.n_classes) s->slo = st->base.classes[0].slo;
    describe_load(st, s->load, sizeof s->load);
    return TD_OK;
}

static td_status make_dir(struct state *st, struct td_err *err)
{
    const struct options *o = st->o;
    time_t t = time(NULL);
    struct tm tm;
    gmtime_r(&t, &tm);
    if (o->serve.report.result_dir[0])
        snprintf(st->dir, sizeof st->dir, "%s", o->serve.report.result_dir);
    else
        strftime(st->dir, sizeof st->dir, "sweep-%Y%m%d-%H%M%S", &tm);
    if (mkdir(st->dir, 0755) && errno != EEXIST)
        return td_fail(err, TD_ERR_IO, "--result-dir %s: %s", st->dir, strerror(errno));
    snprintf(st->csv, sizeof st->csv, "%s/sweep.csv", st->dir);
    snprintf(st->json, sizeof st->json, "%s/sweep.json", st->dir);
    return TD_OK;
}

/* --- one run ---------------------------------------------------------------------------------- */

static uint64_t requests_of(const struct state *st, double rate)
{
    uint64_t least =
        st->o->min_requests ? st->o->min_requests : least_requests(st->sweep.attainment);
    double n = st->base.dataset.n_requests ? (double)st->base.dataset.n_requests
                                           : ceil(rate * st->base.duration_s);
    return (uint64_t)fmin(fmax(n, st->base.dataset.n_requests ? 1 : (double)least),
                          BENCH_MAX_REQUESTS);
}

static void took(double seconds, char *text, size_t bytes)
{
    if (seconds < 90)
        snprintf(text, bytes, "%.0f s", seconds);
    else if (seconds < 5400)
        snprintf(text, bytes, "%.0f min", seconds / 60);
    else
        snprintf(text, bytes, "%.1f h", seconds / 3600);
}

static void tell(const struct state *st, const struct sweep_row *row, uint32_t left)
{
    char time_left[24], left_text[64] = "";
    double each = (now_s() - st->started_s) / (double)st->sweep.n_rows;
    took(each * left, time_left, sizeof time_left);
    if (left)
        snprintf(left_text, sizeof left_text, "; %u runs or so to go, about %s", left, time_left);
    td_say(stderr, 4,
           "%-18s %-8s rate %-8.4g attainment %.3f [%.3f, %.3f] goodput %.3g/s, TTFT p90 %.4g ms, "
           "TPOT p90 %.3g ms%s%s%s\n",
           st->sweep.configs[row->config].name, row->phase, row->rate, row->steady.attainment,
           row->steady.ci95_lo, row->steady.ci95_hi, row->steady.goodput, row->ttft.p90_ms,
           row->tpot.p90_ms, row->steady.saturated > 0 ? ", saturated" : "",
           row->run.valid > 0 ? "" : ", not counted", left_text);
}

static td_status save(struct state *st, struct td_err *err)
{
    st->sweep.load1_end = load1();
    td_status s = sweep_csv_write(&st->sweep, st->csv, err);
    return s ? s : sweep_json_write(&st->sweep, st->json, err);
}

static td_status run_once(struct state *st, const char *phase, double rate, uint64_t seed,
                          uint64_t concurrency, size_t *ret_row, struct bench_result *ret_result,
                          struct td_err *err)
{
    struct bench_run_config c = st->base;
    c.target = st->target;
    c.seed = st->o->serve.load.seed + seed + SEED_STEP * st->n_runs++;
    c.arrivals.rate = rate;
    c.gpus = st->base.gpus;
    if (isfinite(rate)) { /* both bounds together would cut a run of a low rate short */
        c.dataset.n_requests = requests_of(st, rate);
        c.duration_s = 0;
    } else {
        c.max_concurrency = concurrency;
        c.send_slo = false; /* admission would turn most of it away: this asks for throughput */
        if (concurrency > 1) c.dataset.n_requests = requests_of(st, 0), c.duration_s = 0;
    }
    double before = load1();
    td_status s = bench_run(&c, ret_result, err);
    if (s) return s;
    struct sweep_row *row = sweep_row_add(&st->sweep);
    if (!row) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    *ret_row = st->sweep.n_rows - 1;
    row->config = st->config;
    snprintf(row->phase, sizeof row->phase, "%s", phase);
    row->rate = isfinite(rate) ? rate : fmax(ret_result->rates.request_throughput, 1e-3);
    s = sweep_row_fill(&st->sweep, row, ret_result, err);
    row->run.load1 = before;
    struct sweep_config *k = &st->sweep.configs[st->config];
    k->prefill = ret_result->setup.n_prefill;
    k->decode = ret_result->setup.n_decode;
    k->gpus = ret_result->setup.gpus;
    if (!k->mode[0]) snprintf(k->mode, sizeof k->mode, "%s", ret_result->setup.topology_mode);
    if (ret_result->setup.plain_server)
        snprintf(k->name, sizeof k->name, "%s", "openai");
    else if (!strcmp(k->name, "cluster"))
        snprintf(k->name, sizeof k->name, "%s %u:%u", ret_result->setup.topology_mode, k->prefill,
                 k->decode);
    snprintf(st->sweep.model, sizeof st->sweep.model, "%s", ret_result->setup.model_id);
    if (isfinite(rate))
        snprintf(st->sweep.arrival, sizeof st->sweep.arrival, "%s", ret_result->load.arrival);
    snprintf(st->sweep.build, sizeof st->sweep.build, "%s, server %s", ret_result->setup.build,
             ret_result->setup.server_build);
    snprintf(st->sweep.policy, sizeof st->sweep.policy, "%s", ret_result->setup.policy);
    return s;
}

/* requests-CONFIGURATION-RATE-SEED.csv, of the last run of that name. */
static td_status save_requests(const struct state *st, double rate, uint64_t seed,
                               const struct bench_result *result, struct td_err *err)
{
    char path[760];
    snprintf(path, sizeof path, "%s/requests-%s-%g-%llu.csv", st->dir,
             st->sweep.configs[st->config].name, rate, (unsigned long long)seed);
    for (char *q = path + strlen(st->dir) + 1; *q; q++)
        if (*q == ' ' || *q == ':') *q = '-';
    FILE *f = fopen(path, "we");
    if (!f) return td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(errno));
    fprintf(f, "arrived_s,num_prefill_tokens,num_decode_tokens,outcome,ttft_ms,tpot_ms\n");
    for (size_t i = 0; i < result->n_requests; i++) {
        const struct bench_request *q = &result->requests[i];
        int32_t n = q->outcome == BENCH_COMPLETED ? q->output_len : q->want_len;
        double ttft = (q->first_s - q->scheduled_s) * 1e3,
               tpot = q->output_len > 1 ? (q->last_s - q->first_s) * 1e3 / (q->output_len - 1) : 0;
        fprintf(f, "%.9f,%d,%d,%s,%.4f,%.5f\n", q->scheduled_s, q->input_len, n > 1 ? n : 1,
                bench_outcome_names[q->outcome], isfinite(ttft) ? ttft : -1,
                isfinite(tpot) ? tpot : -1);
    }
    return fclose(f) ? td_fail(err, TD_ERR_IO, "%s: %s", path, strerror(errno)) : TD_OK;
}

/* A run that counts: one in which the generator was late is repeated. TD_ERR_CANCELLED:
 * interrupted. */
static td_status run(struct state *st, const char *phase, double rate, uint64_t seed,
                     uint64_t concurrency, uint32_t left, size_t *ret_row, struct td_err *err)
{
    for (int attempt = 0;; attempt++) {
        struct bench_result result = {0};
        td_status s = run_once(st, phase, rate, seed, concurrency, ret_row, &result, err);
        if (s) {
            bench_result_free(&result);
            return s;
        }
        const struct sweep_row *row = &st->sweep.rows[*ret_row];
        bool interrupted = result.interrupted || g_stop, valid = result.valid;
        if (result.total.n_outcome[BENCH_FAILED]) {
            for (size_t i = 0; i < result.n_requests; i++)
                if (result.requests[i].outcome == BENCH_FAILED) {
                    td_say(stderr, 2, "%llu requests failed, such as: %s status %d: %s\n",
                           (unsigned long long)result.total.n_outcome[BENCH_FAILED],
                           result.setup.plain_server ? "HTTP" : "gRPC", result.requests[i].code,
                           result.requests[i].error ? result.requests[i].error : "");
                    break;
                }
            if (st->o->max_failures && result.total.n_outcome[BENCH_FAILED] > st->o->max_failures) {
                st->give_up = true;
                snprintf(st->sweep.configs[st->config].note, sizeof st->sweep.configs[0].note,
                         "left after %llu requests failed in one run (--max-failures %llu)",
                         (unsigned long long)result.total.n_outcome[BENCH_FAILED],
                         (unsigned long long)st->o->max_failures);
            }
        }
        tell(st, row, left);
        if (st->o->save_requests && !interrupted &&
            (s = save_requests(st, isfinite(rate) ? rate : 0, seed, &result, err))) {
            bench_result_free(&result);
            return s;
        }
        if (!valid && !interrupted) td_say(stderr, 4, "  not valid: %s\n", result.invalid_reason);
        bench_result_free(&result);
        if (interrupted) return td_fail(err, TD_ERR_CANCELLED, "interrupted");
        s = save(st, err);
        if (s || valid || attempt == MAX_RETRIES || st->give_up) return s;
    }
}

/* --- the two ways through the rates ----------------------------------------------------------- */

static td_status probe(void *ctx, const char *phase, double rate, uint64_t seed, uint32_t left,
                       struct sweep_probe *ret_probe, struct td_err *err)
{
    struct state *st = ctx;
    size_t i;
    td_status s = run(st, phase, rate, seed, 0, left, &i, err);
    if (s) return s;
    if (st->give_up) return td_fail(err, TD_ERR_LIMIT, "%s", st->sweep.configs[st->config].note);
    const struct sweep_row *row = &st->sweep.rows[i];
    if (!(row->run.valid > 0))
        return td_fail(err, TD_ERR_INTERNAL,
                       "the load generator was late twice (sched_lag p99 %.3g ms): use a quieter "
                       "machine, or say what is tolerable with --max-sched-lag-ms",
                       row->run.sched_lag_p99_ms);
    *ret_probe = (struct sweep_probe){(uint64_t)row->steady.n_good, (uint64_t)row->steady.n,
                                      row->steady.ci95_lo};
    return TD_OK;
}

static td_status search(struct state *st, struct td_err *err)
{
    const struct options *o = st->o;
    struct sweep_config *k = &st->sweep.configs[st->config];
    struct sweep_search_config c = {.start_rate = o->start_rate,
                                    .min_rate = o->min_rate,
                                    .max_rate = o->max_rate,
                                    .tolerance = st->sweep.tolerance,
                                    .attainment = st->sweep.attainment,
                                    .n_verify = (uint32_t)o->verify,
                                    .max_runs = (uint32_t)o->max_runs};
    struct sweep_found found;
    td_status s = sweep_search(&c, probe, st, &found, err);
    k->searched = true;
    k->goodput = found.rate;
    k->failed_rate = found.failed_rate;
    k->verified = found.verified;
    if (!s && found.n_runs >= c.max_runs && !found.verified)
        snprintf(k->note, sizeof k->note, "the search ended after --max-runs %u runs", c.max_runs);
    if (s && !k->note[0] && s != TD_ERR_CANCELLED)
        snprintf(k->note, sizeof k->note, "%.150s", err->msg);
    if (st->give_up) s = TD_OK; /* the next configuration has its chance */
    return s;
}

/* guidellm's sweep: the rate of one request at a time, that of all at once, and evenly spaced
 * ones between. */
static td_status profile_rates(struct state *st, struct td_err *err)
{
    size_t one, all;
    td_status s = run(st, "sync", INFINITY, 0, 1, st->profile_size - 1, &one, err);
    if (!s)
        s = run(st, "throughput", INFINITY, 0,
                st->base.max_concurrency ? st->base.max_concurrency : 64, st->profile_size - 2,
                &all, err);
    if (s) return s;
    double lo = st->sweep.rows[one].rate, hi = st->sweep.rows[all].rate;
    st->n_rates = st->profile_size - 2;
    for (size_t i = 0; i < st->n_rates; i++)
        st->rates[i] = fmax(1e-3, lo + (hi - lo) * (double)(i + 1) / (double)st->n_rates);
    qsort(st->rates, st->n_rates, sizeof *st->rates, ascending);
    return TD_OK;
}

/* A router with admission keeps its queue short: then it shows in what it turns away. */
static bool is_too_much(const struct sweep_row *row)
{
    return row->steady.saturated > 0 ||
           (row->count.offered >= 20 &&
            row->count.rejected + row->count.timed_out + row->count.unfinished >
                row->count.offered / 10);
}

static td_status grid(struct state *st, struct td_err *err)
{
    td_status s = st->profile_size ? profile_rates(st, err) : TD_OK;
    uint32_t left = (uint32_t)(st->n_rates * st->o->seeds) + st->left_after;
    for (size_t i = 0; !s && !st->give_up && i < st->n_rates; i++) {
        bool saturated = false;
        for (uint64_t k = 0; !s && !st->give_up && k < st->o->seeds; k++) {
            size_t row;
            s = run(st, "grid", st->rates[i], k, 0, --left, &row, err);
            if (!s) saturated |= is_too_much(&st->sweep.rows[row]);
        }
        if (!s && saturated && !strcmp(st->o->stop_on, "over_saturation") && i + 1 < st->n_rates) {
            snprintf(st->sweep.configs[st->config].note, sizeof st->sweep.configs[0].note,
                     "saturated at %.4g requests/s, where its climb ended", st->rates[i]);
            break;
        }
    }
    return s;
}

static td_status configuration(struct state *st, uint32_t i, struct td_err *err)
{
    const struct options *o = st->o;
    struct sweep_config *k = &st->sweep.configs[i];
    struct sweep_cluster cluster = {0};
    td_status s = TD_OK;
    st->config = i;
    st->n_runs = 0;
    st->give_up = false;
    st->left_after = (uint32_t)((st->sweep.n_configs - 1 - i) *
                                (st->profile_size ? st->profile_size : st->n_rates) * o->seeds);
    snprintf(st->target, sizeof st->target, "%s", st->base.target);
    if (o->modes[0] || o->pd[0]) {
        char logs[700];
        snprintf(logs, sizeof logs, "%s/logs-%s", st->dir, k->name);
        for (char *q = logs + strlen(st->dir) + 1; *q; q++)
            if (*q == ' ' || *q == ':') *q = '-';
        if (mkdir(logs, 0755) && errno != EEXIST)
            return td_fail(err, TD_ERR_IO, "%s: %s", logs, strerror(errno));
        struct sweep_cluster_config c = {.log_dir = logs,
                                         .model = o->cluster_model,
                                         .mode = k->mode,
                                         .prefill = k->prefill,
                                         .decode = k->decode,
                                         .threads = (uint32_t)o->threads,
                                         .cpus = o->cpus,
                                         .more_args = o->up_args,
                                         .start_timeout_ms = o->start_timeout_ms,
                                         .stop = &g_stop};
        td_say(stderr, 2, "%s: starting, %u workers with %llu threads each\n", k->name,
               k->prefill + k->decode, (unsigned long long)o->threads);
        s = sweep_cluster_start(&c, &cluster, err);
        snprintf(st->target, sizeof st->target, "%s", cluster.address);
    }
    if (!s) s = st->sweep.grid ? grid(st, err) : search(st, err);
    sweep_cluster_stop(&cluster);
    if (s && s != TD_ERR_CANCELLED && !k->note[0])
        snprintf(k->note, sizeof k->note, "%.150s", err->msg);
    return s;
}

/* --- main ------------------------------------------------------------------------------------- */

static td_status report(struct state *st, struct td_err *err)
{
    sweep_settle(&st->sweep);
    struct td_said said;
    sweep_print(&st->sweep, td_said_open(&said, stdout, 2));
    td_said_close(&said);
    td_status s = save(st, err);
    if (!s && st->o->plots) s = plot_all(&st->sweep, st->dir, stdout, err);
    if (!s) td_say(stdout, 2, "rows: %s\nall of it: %s\n", st->csv, st->json);
    fflush(stdout);
    return s;
}

int td_bench_sweep(int argc, char **argv)
{
    static struct state st; /* large */
    struct options o = {0};
    struct bench_args args = {0};
    struct td_err err = {0}, later = {0};
    /* a second one ends the program */
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    bool planned = false;
    st.o = &o;
    td_status s = bench_args_open(argc, argv, &args, &err);
    if (!s)
        s = td_options_load(table, &o, "tandem bench sweep",
                            "Finds the highest rate that meets the objectives, on one cluster or "
                            "on several it starts: tandem bench sweep --goodput "
                            "ttft:500 tpot:50 --modes pd,colocated --cluster-model DIR",
                            args.argc, args.argv, NULL, 0, NULL, &err);
    if (!s) s = bench_serve_config(&o.serve, &st.base, &err);
    if (!s) s = plan(&st, &err);
    if (!s) s = make_dir(&st, &err);
    if (!s) {
        planned = true;
        describe(&st, argc, argv);
        sigaction(SIGINT, &action, NULL);
        sigaction(SIGTERM, &action, NULL);
        st.started_s = now_s();
        st.sweep.load1_start = load1();
        for (uint32_t i = 0; !s && i < st.sweep.n_configs; i++) s = configuration(&st, i, &err);
    }
    int rc = s == TD_ERR_CANCELLED ? 130 : s ? td_die("tandem bench sweep", &err) : 0;
    if (planned && st.sweep.n_rows) {
        if (report(&st, &later)) rc = td_die("tandem bench sweep", &later);
    } else if (planned && !rc) {
        rc = 1;
    }
    sweep_free(&st.sweep);
    bench_run_config_free(&st.base);
    bench_args_close(&args);
    return rc;
}
