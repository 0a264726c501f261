/* serve.c - tandem bench serve, tandem bench replay: one run, its report, its files.
 *
 * Exit status: 0; 1 the run failed or is not valid (generator too late, nothing completed); 2
 * bad options; 130 interrupted. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/serve/serve_options.h"
#include "common/base/say.h"

int td_bench_serve(int argc, char **argv);
int td_bench_replay(int argc, char **argv);

struct options {
    struct bench_serve_options serve;
};
static const struct td_option serve_table[] = {BENCH_SERVE_OPTIONS(struct options, serve, "random"),
                                               {0}};
static const struct td_option replay_table[] = {BENCH_SERVE_OPTIONS(struct options, serve, "auto"),
                                                {0}};

static volatile sig_atomic_t g_stop;

static void on_signal(int number)
{
    (void)number;
    g_stop = 1;
}

/* What went wrong, each message once with its count, the most frequent first. */
static void print_errors(const struct bench_result *r)
{
    enum { MAX_KINDS = 5 };
    struct {
        const struct bench_request *q;
        uint64_t n;
    } kinds[64];
    size_t n_kinds = 0;
    for (size_t i = 0; i < r->n_requests; i++) {
        const struct bench_request *q = &r->requests[i];
        if (!q->error) continue;
        size_t k = 0;
        while (k < n_kinds &&
               (kinds[k].q->code != q->code || strcmp(kinds[k].q->error, q->error) != 0))
            k++;
        if (k == sizeof kinds / sizeof *kinds) continue;
        if (k == n_kinds) kinds[n_kinds].n = 0, kinds[n_kinds++].q = q;
        kinds[k].n++;
    }
    for (size_t shown = 0; shown < n_kinds && shown < MAX_KINDS; shown++) {
        size_t most = 0;
        for (size_t k = 0; k < n_kinds; k++)
            if (kinds[k].n > kinds[most].n) most = k;
        td_say(stderr, 2, "%llu x %s: %s status %d: %s\n", (unsigned long long)kinds[most].n,
               bench_outcome_names[kinds[most].q->outcome], r->setup.plain_server ? "HTTP" : "gRPC",
               kinds[most].q->code, kinds[most].q->error);
        kinds[most].n = 0;
    }
}

static int finish(const char *program, const struct bench_serve_options *o,
                  const struct bench_result *r)
{
    struct td_err err = {0};
    struct td_said said;
    bench_result_print(r, o->report.percentile_metrics, td_said_open(&said, stdout, 4));
    td_said_close(&said);
    print_errors(r);
    if (bench_serve_save(o, r, stdout, &err)) return td_die(program, &err);
    fflush(stdout);
    if (r->interrupted) return 130;
    if (!r->valid)
        return td_say(stderr, 2, "%s: the run is not valid: %s\n", program, r->invalid_reason), 1;
    if (r->total.n_outcome[BENCH_COMPLETED] == 0)
        return td_say(stderr, 2, "%s: no request completed\n", program), 1;
    return 0;
}

enum {
    GENTLE_CONCURRENCY = 4,
    GENTLE_PROMPTS = 100
}; /* what nobody minds who did not say how much */

/* Whoever gives neither a rate nor a concurrency gets a small load: a server may be somebody's, and
 * the default names one. */
static void be_gentle(const struct bench_serve_options *o, struct bench_run_config *c)
{
    bool is_open = c->arrivals.kind == BENCH_TRACE || c->arrivals.ramp || c->max_concurrency;
    if (strcmp(o->load.request_rate, "auto") != 0 || is_open) return;
    c->max_concurrency = GENTLE_CONCURRENCY;
    bool is_made = c->dataset.kind == BENCH_RANDOM ||
                   c->dataset.kind == BENCH_PREFIX; /* a file says how many it has */
    if (is_made && c->dataset.n_requests == 0 && c->duration_s <= 0)
        c->dataset.n_requests = GENTLE_PROMPTS;
}

static void say_target(const char *program, const struct bench_run_config *c)
{
    char pace[64] = "", bound[64] = "";
    if (c->arrivals.kind == BENCH_TRACE)
        snprintf(pace, sizeof pace, ", at the trace's times");
    else if (c->arrivals.ramp)
        snprintf(pace, sizeof pace, ", at a growing rate");
    else if (isfinite(c->arrivals.rate))
        snprintf(pace, sizeof pace, ", %g requests/s", c->arrivals.rate);
    else if (!c->max_concurrency)
        snprintf(pace, sizeof pace, ", all at once");
    if (c->max_concurrency)
        snprintf(bound, sizeof bound, ", at most %llu at a time",
                 (unsigned long long)c->max_concurrency);
    td_say(stderr, 2, "%s: target %s%s%s%s\n", program, c->target, c->method, pace, bound);
}

static int serve(int argc, char **argv, const struct td_option *table, const char *program,
                 const char *summary)
{
    struct options o = {0};
    struct bench_args args = {0};
    struct bench_run_config c = {0};
    struct bench_result r = {0};
    struct td_err err = {0};
    /* a second one ends the program */
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    int rc;
    if (bench_args_open(argc, argv, &args, &err) ||
        td_options_load(table, &o, program, summary, args.argc, args.argv, NULL, 0, NULL, &err) ||
        bench_serve_config(&o.serve, &c, &err)) {
        rc = td_die(program, &err);
    } else {
        sigaction(SIGINT, &action, NULL);
        sigaction(SIGTERM, &action, NULL);
        c.stop = &g_stop;
        be_gentle(&o.serve, &c);
        say_target(program, &c);
        rc = bench_run(&c, &r, &err) ? td_die(program, &err) : finish(program, &o.serve, &r);
    }
    bench_result_free(&r);
    bench_run_config_free(&c);
    bench_args_close(&args);
    return rc;
}

int td_bench_serve(int argc, char **argv)
{
    return serve(argc, argv, serve_table, "tandem bench serve",
                 "Sends requests to a cluster at a rate, open loop, and reports latency, "
                 "throughput, goodput and SLO attainment.");
}

int td_bench_replay(int argc, char **argv)
{
    return serve(argc, argv, replay_table, "tandem bench replay",
                 "Replays a trace (Mooncake JSONL, Azure CSV, timed JSONL) against a cluster: "
                 "tandem bench replay --trace FILE [options]");
}
