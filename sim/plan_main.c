/* plan_main.c - tandem plan: how to split GPUs between prefill and decode. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sim/plan.h"
#include "sim/sim.h"
#include "sim/sim_options.h"
#include "common/base/options.h"
#include "common/base/progress.h"

struct plan_options {
    struct td_sim_request_options req;
    struct td_sim_worker_options worker;
    const char *model, *latency, *gpu, *tp, *kv_dtype, *trace, *price, *policy, *modes, *json, *csv;
    double prefix, attainment, target, cv, tolerance;
    int64_t gpus, top, seeds;
    bool print_latency, closed_form, quiet;
};

#define OFF(f) offsetof(struct plan_options, f)
// clang-format off
static const struct td_option plan_table[] = {
    {"model", TD_OPT_STR, "", 0, 0, NULL, OFF(model),
     "with gpu: a Hugging Face config.json, or the folder that has it; without: a model with "
     "built-in latency tables, or a list of tables as in latency; empty = opt-13b"},
    {"gpu", TD_OPT_STR, "", 0, 0, NULL, OFF(gpu),
     "derive how long the steps of model take on a100, h100, h200, b200 or l40s, or on each of "
     "a list"},
    {"tp", TD_OPT_STR, "", 0, 0, NULL, OFF(tp),
     "with gpu: cards of one worker, of 1, 2, 4, 8, or a list; empty = each that model fits"},
    TD_SIM_KV_DTYPE_ROW(OFF(kv_dtype)),
    {"latency", TD_OPT_STR, "", 0, 0, NULL, OFF(latency),
     "instead of model: latency tables, names and files, one for each parallelism"},
    {"print_latency", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(print_latency),
     "print the latency tables as the router's --latency-table reads them, and end"},
    TD_SIM_REQUEST_ROWS(struct plan_options, req),
    {"trace", TD_OPT_STR, "", 0, 0, NULL, OFF(trace),
     "lengths and prefixes of a file's rows instead of isl, osl: Azure CSV, Mooncake JSONL, "
     "lengths CSV"},
    {"prefix", TD_OPT_F64, "0", 0, 1e8, NULL, OFF(prefix),
     "leading prompt tokens that all requests share"},
    {"attainment", TD_OPT_F64, "0.9", 0.5, 0.999, NULL, OFF(attainment),
     "share of requests that must meet both, in each class"},
    {"price", TD_OPT_STR, "", 0, 0, NULL, OFF(price),
     "of a GPU for an hour: \"2.5\", or for each table \"opt-13b=2 opt-13b:tp2=2.2\"; empty = 1"},
    {"gpus", TD_OPT_I64, "8", 1, 1024, NULL, OFF(gpus), "GPUs at hand"},
    {"target_request_rate", TD_OPT_F64, "0", 0, 1e9, NULL, OFF(target),
     "find the cheapest layout for so many requests/s instead; 0 = use all"},
    {"policy", TD_OPT_STR, "goodput", 0, 0, NULL, OFF(policy), "the router's policy"},
    {"mode", TD_OPT_STR, "pd,colocated", 0, 0, NULL, OFF(modes),
     "layouts to look at: pd, colocated, hybrid, or a list of them"},
    TD_SIM_WORKER_ROWS(struct plan_options, worker),
    {"cv", TD_OPT_F64, "1", 0.01, 100, NULL, OFF(cv),
     "coefficient of variation of the gaps between requests"},
    {"top", TD_OPT_I64, "10", 1, 10000, NULL, OFF(top),
     "layouts to simulate, the best by closed form"},
    {"seeds", TD_OPT_I64, "5", 1, 16, NULL, OFF(seeds),
     "runs of each point; two say little (Student's t is 12.7)"},
    {"tolerance", TD_OPT_F64, "0.02", 0.001, 0.5, NULL, OFF(tolerance), "of the found rate"},
    {"closed_form", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(closed_form),
     "do not simulate: closed forms alone"},
    {"json", TD_OPT_STR, "", 0, 0, NULL, OFF(json), "write the rows to this file as JSON"},
    {"csv", TD_OPT_STR, "", 0, 0, NULL, OFF(csv), "write the rows to this file as CSV"},
    {"quiet", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(quiet), "no progress"},
    {0},
};
// clang-format on

struct plan_meter {
    struct td_progress p;
    bool on;
};

static void plan_progress(void *ctx, uint64_t done, uint64_t total)
{
    struct plan_meter *m = ctx;
    if (!m->on) return;
    m->p.total = total;
    td_progress_update(&m->p, done);
}

static void layout_name(const struct td_plan_row *r, char *text, size_t bytes)
{
    if (r->mode == TD_PLAN_COLOCATED)
        snprintf(text, bytes, "%u x %s", r->n_decode, r->decode);
    else
        snprintf(text, bytes, "%uP %s + %uD %s%s", r->n_prefill, r->prefill, r->n_decode, r->decode,
                 r->mode == TD_PLAN_HYBRID ? " hybrid" : "");
}

static void print_estimates(const struct td_plan_query *q, const char *prefix)
{
    for (uint32_t i = 0; i < q->n_tables; i++)
        if (q->perfs[i].estimated_from)
            printf("%s%s was not measured: its step times are those of %s, scaled by the makers' "
                   "figures\n",
                   prefix, q->tables[i], q->perfs[i].estimated_from);
}

static void print_rows(const struct td_plan_row *rows, uint32_t n, const struct td_plan_query *q)
{
    printf("  %-44s %4s %9s %8s %7s %-15s %8s %8s %8s  %s\n", "layout", "gpus", "req/s", "per cost",
           "attain", "95% interval", "ttft p90", "tpot p90", "estimate", "bound");
    for (uint32_t i = 0; i < n; i++) {
        const struct td_plan_row *r = &rows[i];
        char name[160];
        layout_name(r, name, sizeof name);
        if (!r->simulated && i >= q->top) break;
        if (!r->simulated)
            printf("  %-44s %4u %9s %8.3f %7s %-15s %8s %8s %8.2f\n", name, r->gpus, "",
                   r->estimate / r->cost, "", "", "", "", r->estimate);
        else if (r->at.rate <= 0)
            printf("  %-44s %4u %9s %8s %7s %-15s %8s %8s %8.2f  %s\n", name, r->gpus, "none", "",
                   "", "", "", "", r->estimate, r->bound);
        else
            printf("%c %-44s %4u %9.2f %8.3f %6.1f%% [%5.1f%%,%6.1f%%] %8.1f %8.2f %8.2f  %s\n",
                   r->pareto ? '*' : ' ', name, r->gpus, r->at.rate, r->at.rate / r->cost,
                   r->at.attainment * 100, r->at.ci_low * 100, r->at.ci_high * 100,
                   r->at.ttft_ms.p90, r->at.tpot_ms.p90, r->estimate, r->bound);
    }
    printf("* = no other layout is better in requests/s for its cost, TTFT and TPOT at once\n");
    print_estimates(q, "");
}

static td_status write_rows(const struct plan_options *o, const struct td_plan_row *rows,
                            uint32_t n, struct td_err *err)
{
    FILE *csv = o->csv[0] ? fopen(o->csv, "w") : NULL,
         *json = o->json[0] ? fopen(o->json, "w") : NULL;
    td_status s = TD_OK;
    if (o->csv[0] && !csv) s = td_fail(err, TD_ERR_IO, "%s: %s", o->csv, strerror(errno));
    if (o->json[0] && !json) s = td_fail(err, TD_ERR_IO, "%s: %s", o->json, strerror(errno));
    if (!s && csv)
        fprintf(csv, "mode,prefill,decode,n_prefill,n_decode,gpus,simulated,pareto,request_rate,"
                     "per_gpu,attainment,ci_low,ci_high,ttft_p90,tpot_p90,"
                     "estimate,bound,cost\n");
    if (!s && json)
        fprintf(json,
                "{\"tandem_plan\":1,\"slo\":{\"ttft_ms\":%g,\"tpot_ms\":%g,\"attainment\":%g},"
                "\"rows\":[",
                o->req.ttft, o->req.tpot, o->attainment);
    for (uint32_t i = 0; i < n && !s; i++) {
        const struct td_plan_row *r = &rows[i];
        const char *mode = td_plan_mode_name(r->mode);
        if (csv)
            fprintf(csv,
                    "%s,%s,%s,%u,%u,%u,%d,%d,%.4f,%.4f,%.5f,%.5f,%.5f,%.3f,%.3f,%.4f,%s,%.4f\n",
                    mode, r->prefill, r->decode, r->n_prefill, r->n_decode, r->gpus, r->simulated,
                    r->pareto, r->at.rate, r->at.rate / r->gpus, r->at.attainment, r->at.ci_low,
                    r->at.ci_high, r->at.ttft_ms.p90, r->at.tpot_ms.p90, r->estimate, r->bound,
                    r->cost);
        if (json)
            fprintf(json,
                    "%s\n  "
                    "{\"mode\":\"%s\",\"prefill\":\"%s\",\"decode\":\"%s\",\"n_prefill\":%u,\"n_"
                    "decode\":%u,\"gpus\":%u,\"simulated\":%s,\"pareto\":%s,"
                    "\"request_rate\":%.4f,\"per_gpu_goodput\":%.4f,\"attainment\":%.5f,\"ci95\":[%"
                    ".5f,%.5f],\"p90_ttft_ms\":%.3f,\"p90_tpot_ms\":%.3f,"
                    "\"estimate\":%.4f,\"bound\":\"%s\",\"cost_per_hour\":%.4f}",
                    i ? "," : "", mode, r->prefill, r->decode, r->n_prefill, r->n_decode, r->gpus,
                    r->simulated ? "true" : "false", r->pareto ? "true" : "false", r->at.rate,
                    r->at.rate / r->gpus, r->at.attainment, r->at.ci_low, r->at.ci_high,
                    r->at.ttft_ms.p90, r->at.tpot_ms.p90, r->estimate, r->bound, r->cost);
    }
    if (json && !s) fputs("\n]}\n", json);
    if (csv) fclose(csv);
    if (json) fclose(json);
    return s;
}

static td_status parse_modes(const char *text, struct td_plan_query *q, struct td_err *err)
{
    bool *const wanted[] = {&q->pd, &q->colocated, &q->hybrid};
    for (const char *at = text + strspn(text, " ,"); *at; at += strspn(at, " ,")) {
        size_t n = strcspn(at, " ,");
        uint32_t i = 0;
        while (i < TD_PLAN_N_MODES &&
               (strlen(td_plan_mode_name(i)) != n || strncmp(td_plan_mode_name(i), at, n)))
            i++;
        if (i == TD_PLAN_N_MODES)
            return td_fail(err, TD_ERR_INVALID,
                           "mode is \"%s\", must be pd, colocated, hybrid or a list of them", text);
        *wanted[i] = true;
        at += n;
    }
    bool is_any = q->pd || q->colocated || q->hybrid;
    return is_any ? TD_OK
                  : td_fail(err, TD_ERR_INVALID,
                            "mode is empty, must be pd, colocated, hybrid or a list of them");
}

/* What says how long steps take is said once. */
static td_status check_latency(const struct plan_options *o, struct td_err *err)
{
    if (o->latency[0] && o->gpu[0])
        return td_fail(err, TD_ERR_INVALID,
                       "give gpu or latency, not both: each says how long steps take");
    if (o->latency[0] && o->model[0])
        return td_fail(err, TD_ERR_INVALID,
                       "give model or latency, not both: without gpu each lists latency tables");
    if (o->tp[0] && !o->gpu[0]) /* it may come from the environment of the daemons */
        fprintf(stderr, "tandem plan: tp counts only with gpu: a latency table has its own\n");
    if (strcmp(o->kv_dtype, "auto") && !o->gpu[0])
        fprintf(stderr, "tandem plan: kv_dtype counts only with gpu: a latency table has its "
                        "own kv_bytes\n");
    if (o->gpu[0] && !o->model[0])
        return td_fail(err, TD_ERR_INVALID,
                       "gpu is %.40s without model: give a config.json or its folder", o->gpu);
    return TD_OK;
}

/* As router/objectives.h reads them: prefill's 1, P, W; decode's 1, B, K. */
static td_status print_latency(const struct td_plan_query *q, struct td_err *err)
{
    print_estimates(q, "# ");
    for (uint32_t i = 0; i < q->n_tables; i++) {
        struct td_perf p = q->perfs[i];
        td_status s = p.gpus ? TD_OK : td_perf_load(q->tables[i], &p, err);
        if (s) return s;
        if (p.n_prefill_points || p.split)
            return td_fail(err, TD_ERR_UNSUPPORTED,
                           "print_latency: %s is more than one line can say", q->tables[i]);
        printf("node_class=%s a0=%.6g a1=%.6g a2=%.6g b0=%.6g b1=%.6g b2=%.6g kv_tokens=%llu "
               "kv_bytes=%.0f gpus=%u\n",
               p.name, p.a[0], p.a[1], p.a[2], p.b[0], p.b[1], p.b[2],
               (unsigned long long)p.kv_tokens, p.kv_bytes_per_token, p.gpus);
    }
    return TD_OK;
}

int td_plan_main(int argc, char **argv)
{
    struct plan_options o = {0};
    struct td_err err = {0};
    td_status s = td_options_load(plan_table, &o, "tandem plan",
                                  "Split GPUs between prefill and decode: closed forms rank the "
                                  "layouts, the simulator judges the best.",
                                  argc, argv, NULL, 0, NULL, &err);
    if (s) return td_die("tandem plan", &err);
    struct td_plan_query q = {.prefix = o.prefix,
                              .ttft_ms = o.req.ttft,
                              .tpot_ms = o.req.tpot,
                              .attainment = o.attainment,
                              .gpus = (uint32_t)o.gpus,
                              .target_rate = o.target,
                              .policy = o.policy,
                              .nic_bytes_per_s = o.worker.nic_gbs * 1e9,
                              .max_batch = (int32_t)o.worker.max_batch,
                              .max_step_tokens = (int32_t)o.worker.max_step_tokens,
                              .top = (uint32_t)o.top,
                              .seeds = (uint32_t)o.seeds,
                              .cv = o.cv,
                              .tolerance = o.tolerance,
                              .closed_form_only = o.closed_form};
    struct td_sim_trace file = {0};
    const char *named = o.latency[0] ? o.latency : o.model[0] ? o.model : "opt-13b";
    char *model = strdup(named);
    struct td_plan_row *rows = NULL;
    uint32_t n = 0;
    if (!model) s = td_fail(&err, TD_ERR_NOMEM, "out of memory");
    if (!s) s = parse_modes(o.modes, &q, &err);
    if (!s) s = check_latency(&o, &err);
    if (!s)
        s = o.gpu[0] ? td_plan_gpu_tables(o.gpu, o.tp, o.model, o.kv_dtype, &q, &err)
                     : td_plan_tables(model, &q, &err);
    if (!s && o.print_latency) {
        s = print_latency(&q, &err);
        free(model);
        return s ? td_die("tandem plan", &err) : 0;
    }
    if (!s) s = td_plan_prices(o.price, &q, &err);
    if (!s) s = td_sim_requests_parse(&o.req, "", &q.mix, &q.load, &err);
    q.isl = q.load.isl;
    q.osl = q.load.osl;
    if (!s && o.trace[0]) {
        s = td_sim_trace_read(o.trace, true, &file, &err);
        q.file = &file;
    }
    struct plan_meter m = {.on = !o.quiet};
    if (!s && m.on) td_progress_start(&m.p, "planning", "layouts", q.top);
    if (!s) {
        s = td_plan_search(&q, plan_progress, &m, &rows, &n, &err);
        if (m.on) td_progress_end(&m.p);
    }
    if (!s) print_rows(rows, n, &q);
    if (!s) s = write_rows(&o, rows, n, &err);
    free(rows);
    free(model);
    td_sim_trace_free(&file);
    return s ? td_die("tandem plan", &err) : 0;
}
