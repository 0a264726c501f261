/* calibrate.c - tandem bench calibrate: how long this machine's steps take, as the latency table
 * that tandem-router --latency-table reads.
 *
 * The engine of the workers runs in this process. Measured, each point `repeat` times; --statistic
 * counts:
 *   prefill   u new tokens over h that are there                    a0 + a1 u + a2 u (h + u/2)
 *   decode    B sequences with K tokens of context together         b0 + b1 B + b2 K
 *   mixed     the same with a prefill chunk of c tokens in the step    + b3 c + b4 c (h + c/2)
 * Pure decode fixes b0..b2, mixed steps b3 and b4 together with it.
 *   link      n bytes of KV blocks between two ends on this host    link_tau + n / link_bytes_per_s
 * The link is measured when --link names a path: workers on other hosts have another one, which
 * --link-gb-s tells (tandem bench xfer), or the router learns. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/calibrate/fit.h"
#include "bench/calibrate/link.h"
#include "common/base/random.h"
#include "common/base/stats.h"
#include "common/base/clock.h"
#include "common/base/options.h"
#include "common/base/progress.h"
#include "common/base/say.h"
#include "common/engine/engine.h"
#include "common/model/mix.h"

int td_bench_calibrate(int argc, char **argv);

#define MAX_POINTS 512
#define MAX_REPEATS 100
#define MAX_GRID 16
#define LINK_BYTES (256u << 20) /* largest transfer measured */

struct options {
    const char *model, *random_weights, *dtype, *kv_dtype, *ops, *cpus, *kv_memory, *node_class,
        *out, *csv, *prefill_grid, *context_grid, *batch_grid, *chunk_grid, *statistic, *link;
    int64_t threads, block_size, max_step_tokens, max_batch, repeat;
    double link_tau_us, link_gb_s;
};

#define OFF(f) offsetof(struct options, f)
// clang-format off
static const struct td_option table[] = {
    {"model", TD_OPT_STR, "", 0, 0, NULL, OFF(model), "Hugging Face model directory"},
    {"random_weights", TD_OPT_STR, "", 0, 0, NULL, OFF(random_weights),
     "config.json: measure this shape with random weights"},
    {"dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|" TD_MIX_NAMES, OFF(dtype),
     "as the workers have it"},
    {"kv_dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|int8|fp8", OFF(kv_dtype),
     "as the workers have it"},
    {"ops", TD_OPT_STR, "", 0, 0, NULL, OFF(ops), "kernel table; default the fastest"},
    {"threads", TD_OPT_I64, "1", 0, 1024, NULL, OFF(threads),
     "as the workers have it; 0 = all CPUs"},
    {"cpus", TD_OPT_STR, "", 0, 0, NULL, OFF(cpus), "pin the threads to these CPUs"},
    {"kv_memory", TD_OPT_STR, "60%", 0, 0, NULL, OFF(kv_memory),
     "KV pool: points that do not fit are left out"},
    {"block_size", TD_OPT_I64, "16", 8, 256, NULL, OFF(block_size), "tokens per KV block"},
    {"max_step_tokens", TD_OPT_I64, "512", 1, 1 << 20, NULL, OFF(max_step_tokens),
     "as the workers have it: the longest chunk"},
    {"max_batch", TD_OPT_I64, "64", 1, 4096, NULL, OFF(max_batch), "as the workers have it"},
    {"prefill_grid", TD_OPT_STR, "16,64,128,256,512,1024,2048", 0, 0, NULL, OFF(prefill_grid),
     "new tokens u, up to the longest chunk"},
    {"context_grid", TD_OPT_STR, "0,128,512,1024,4096", 0, 0, NULL, OFF(context_grid),
     "tokens already there: h of a prefill, context of a decode"},
    {"batch_grid", TD_OPT_STR, "1,2,4,8,16,32,64", 0, 0, NULL, OFF(batch_grid),
     "sequences B in a decode step"},
    {"chunk_grid", TD_OPT_STR, "64,256", 0, 0, NULL, OFF(chunk_grid),
     "prefill tokens c in a mixed step"},
    {"repeat", TD_OPT_I64, "5", 1, MAX_REPEATS, NULL, OFF(repeat), "times each point is measured"},
    {"statistic", TD_OPT_ENUM, "median", 0, 0, "median|least", OFF(statistic),
     "of the repeats; least: where foreign work, which only ever adds, cannot be kept away"},
    {"node_class", TD_OPT_STR, "", 0, 0, NULL, OFF(node_class),
     "the workers' --node-class; empty: a line each for prefill and decode, what workers "
     "without one belong to"},
    {"link", TD_OPT_ENUM, "off", 0, 0, "off|auto|shm|tcp", OFF(link),
     "measure KV transfer between two workers of this host on this path; off: as link_tau_us "
     "and link_gb_s say"},
    {"link_tau_us", TD_OPT_F64, "0", 0, 1e9, NULL, OFF(link_tau_us),
     "KV transfer: fixed time, us; 0 = to be learned"},
    {"link_gb_s", TD_OPT_F64, "0", 0, 1e6, NULL, OFF(link_gb_s),
     "KV transfer: 10^9 bytes/s (tandem bench xfer measures it); 0 = to be learned"},
    {"out", TD_OPT_STR, "latency.table", 0, 0, NULL, OFF(out), "the latency table"},
    {"csv", TD_OPT_STR, "", 0, 0, NULL, OFF(csv), "every point, measured and fitted"},
    {0},
};
// clang-format on

enum kind { PREFILL, DECODE, MIXED };
static const char *const kind_names[] = {"prefill", "decode", "mixed"};

struct point {
    enum kind kind;
    int32_t batch, context, new_tokens, prompt_context; /* decode rows and their context each;
                                                           prefill rows and what is before them */
    double s, median_s, least_s, greatest_s; /* s: the one that counts; 0 = did not fit */
};

struct grid {
    int32_t v[MAX_GRID];
    size_t n;
};

static td_status parse_grid(const char *option, const char *text, int32_t max, struct grid *ret,
                            struct td_err *err)
{
    ret->n = 0;
    for (const char *at = text; *at;) {
        char *end;
        long v = strtol(at, &end, 10);
        if (end == at || v < 0 || v > 1 << 24 || (*end && *end != ','))
            return td_fail(err, TD_ERR_INVALID,
                           "--%s: \"%.40s\" must be whole numbers with commas between", option,
                           text);
        if (v <= max && ret->n < MAX_GRID) ret->v[ret->n++] = (int32_t)v;
        at = *end ? end + 1 : end;
    }
    return ret->n ? TD_OK
                  : td_fail(err, TD_ERR_INVALID, "--%s: \"%.60s\" has nothing up to %d", option,
                            text, max);
}

/* --- one measurement -------------------------------------------------------------------------- */

static td_status add_sequence(struct td_engine *e, int32_t n_tokens, uint64_t *random,
                              uint64_t priority, struct td_seq **ret, struct td_err *err)
{
    static const struct td_sampling greedy = {
        .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1};
    int32_t *tokens = calloc((size_t)n_tokens, sizeof *tokens),
            vocab = td_model_config(td_engine_model(e))->vocab;
    if (!tokens) return td_fail(err, TD_ERR_NOMEM, "out of memory");
    for (int32_t i = 0; i < n_tokens; i++)
        tokens[i] = (int32_t)td_random_index(random, (uint32_t)vocab);
    struct td_seq *seq = td_engine_seq_get(e);
    seq->sched.priority = priority;
    td_status s = td_engine_seq_set(e, seq, tokens, n_tokens, n_tokens, &greedy, NULL, 0,
                                    MAX_REPEATS + 8, err);
    if (!s && td_engine_admit(e, seq, false, 0))
        s = td_fail(err, TD_ERR_LIMIT, "kv_memory does not hold it");
    *ret = seq;
    free(tokens);
    return s;
}

/* Prefill up to `upto` tokens, untimed. */
static td_status advance(struct td_engine *e, struct td_seq *seq, int32_t upto, struct td_err *err)
{
    td_status s = TD_OK;
    while (!s && seq->sched.n_computed < upto && seq->sched.phase == TD_SEQ_PREFILL) {
        int32_t left = upto - seq->sched.n_computed, most = td_engine_max_step_tokens(e);
        struct td_step_item it = {.seq = seq, .n_new = left < most ? left : most};
        s = td_engine_step(e, &it, 1, err);
    }
    return s;
}

static td_status timed_step(struct td_engine *e, struct td_step_item *items, int32_t n,
                            double *ret_s, struct td_err *err)
{
    uint64_t start = td_now_ns();
    td_status s = td_engine_step(e, items, n, err);
    *ret_s = (double)(td_now_ns() - start) / 1e9;
    return s;
}

static void drop(struct td_engine *e, struct td_seq *seq)
{
    if (!seq) return;
    td_engine_release(e, seq);
    td_engine_seq_put(e, seq);
}

/* Fills p's times. TD_ERR_LIMIT: it does not fit. */
static td_status measure(struct td_engine *e, struct point *p, int64_t repeat, bool least,
                         uint64_t *random, struct td_err *err)
{
    struct td_seq **seqs = calloc((size_t)p->batch + 1, sizeof(struct td_seq *)),
                  **preempted = calloc((size_t)p->batch + 1, sizeof(struct td_seq *));
    struct td_step_item *items = calloc((size_t)p->batch + 1, sizeof *items);
    double times[MAX_REPEATS + 1];
    int32_t n_preempted = 0;
    td_status s = seqs && preempted && items ? TD_OK : td_fail(err, TD_ERR_NOMEM, "out of memory");
    for (int32_t i = 0; !s && i < p->batch; i++) {
        s = add_sequence(e, p->context, random, (uint64_t)i, &seqs[i], err);
        if (!s) s = advance(e, seqs[i], p->context, err);
    }
    for (int64_t k = 0; !s && k <= repeat; k++) { /* the first is for caches and clocks */
        struct td_seq *prompt = NULL;
        int32_t n = 0;
        if (p->new_tokens) {
            s = add_sequence(e, p->prompt_context + p->new_tokens, random, (uint64_t)p->batch,
                             &prompt, err);
            if (!s) s = advance(e, prompt, p->prompt_context, err);
        }
        /* makes room for the tokens */
        if (!s && p->batch) n = td_engine_plan(e, seqs, p->batch, items, preempted, &n_preempted);
        if (!s && (n_preempted || n != p->batch))
            s = td_fail(err, TD_ERR_LIMIT, "kv_memory does not hold it");
        if (!s && prompt) items[n++] = (struct td_step_item){.seq = prompt, .n_new = p->new_tokens};
        if (!s) s = timed_step(e, items, n, &times[k], err);
        drop(e, prompt);
    }
    for (int32_t i = 0; seqs && i < p->batch; i++) drop(e, seqs[i]);
    td_kv_prefix_clear(td_engine_kv(e));
    if (!s) {
        td_stats_sort(times + 1, (size_t)repeat);
        p->median_s = td_stats_percentile(times + 1, (size_t)repeat, 50);
        p->least_s = times[1];
        p->s = least ? p->least_s : p->median_s;
        p->greatest_s = times[repeat];
        p->context += (int32_t)repeat / 2 + 1; /* it grew by a token a step: what the median step
                                                  had */
    }
    free(seqs);
    free(preempted);
    free(items);
    return s;
}

/* --- all points, and the fit ------------------------------------------------------------------ */

static size_t plan(const struct options *o, const struct td_engine *e, struct point *points,
                   struct td_err *err, td_status *ret_s)
{
    struct td_engine *engine = (struct td_engine *)(uintptr_t)e;
    int32_t chunk = td_engine_max_step_tokens(engine), length = td_engine_max_len(engine),
            batch = td_engine_max_batch(engine);
    struct grid u, h, b, c;
    size_t n = 0;
    td_status s = parse_grid("prefill-grid", o->prefill_grid, chunk, &u, err);
    if (!s) s = parse_grid("context-grid", o->context_grid, length, &h, err);
    if (!s) s = parse_grid("batch-grid", o->batch_grid, batch, &b, err);
    if (!s) s = parse_grid("chunk-grid", o->chunk_grid, chunk, &c, err);
    *ret_s = s;
    for (size_t i = 0; !s && i < u.n; i++)
        for (size_t k = 0; k < h.n && n < MAX_POINTS; k++)
            if (u.v[i] > 0 && u.v[i] + h.v[k] < length)
                points[n++] =
                    (struct point){.kind = PREFILL, .new_tokens = u.v[i], .prompt_context = h.v[k]};
    for (size_t i = 0; !s && i < b.n; i++)
        for (size_t k = 0; k < h.n && n < MAX_POINTS; k++) {
            int32_t context = h.v[k] > 0 ? h.v[k] : 16;
            if (b.v[i] > 0 && context + MAX_REPEATS + 8 < length)
                points[n++] = (struct point){.kind = DECODE, .batch = b.v[i], .context = context};
        }
    for (size_t i = 0; !s && i < b.n; i += 2) /* every other batch: the interplay is additive */
        for (size_t k = 0; k < c.n; k++)
            for (size_t j = 0; j < h.n && n < MAX_POINTS; j += 2)
                if (b.v[i] > 0 && c.v[k] > 0 && b.v[i] + c.v[k] <= chunk &&
                    h.v[j] + c.v[k] < length && 128 + MAX_REPEATS + 8 < length)
                    points[n++] = (struct point){.kind = MIXED,
                                                 .batch = b.v[i],
                                                 .context = 128,
                                                 .new_tokens = c.v[k],
                                                 .prompt_context = h.v[j]};
    return n;
}

static void sample_of(const struct point *p, struct fit_sample *f)
{
    double u = p->new_tokens, work = u * (p->prompt_context + u / 2);
    *f = p->kind == PREFILL
             ? (struct fit_sample){{1, u, work}, p->s}
             : (struct fit_sample){{1, p->batch, (double)p->batch * p->context, u, work}, p->s};
}

static td_status fit(const struct point *points, size_t n, bool prefill, double *theta,
                     struct td_err *err)
{
    static struct fit_sample samples[MAX_POINTS];
    size_t k = 0;
    for (size_t i = 0; i < n; i++)
        if (points[i].s > 0 && (points[i].kind == PREFILL) == prefill)
            sample_of(&points[i], &samples[k++]);
    td_status s = fit_non_negative(samples, k, prefill ? 3 : 5, theta, err);
    return s ? td_err_prefix(err, prefill ? "prefill" : "decode") : s;
}

static double error_of(const struct point *p, const double *a, const double *b)
{
    struct fit_sample f;
    sample_of(p, &f);
    return fit_predict(p->kind == PREFILL ? a : b, &f, p->kind == PREFILL ? 3 : 5) / p->s - 1;
}

static void errors(const struct point *points, size_t n, enum kind kind, const double *a,
                   const double *b, double *ret_median, double *ret_worst, size_t *ret_n)
{
    static double e[MAX_POINTS];
    *ret_n = 0;
    for (size_t i = 0; i < n; i++)
        if (points[i].s > 0 && points[i].kind == kind)
            e[(*ret_n)++] = fabs(error_of(&points[i], a, b));
    td_stats_sort(e, *ret_n);
    *ret_median = td_stats_percentile(e, *ret_n, 50);
    *ret_worst = *ret_n ? e[*ret_n - 1] : NAN;
}

static void print_points(const struct point *points, size_t n, const double *a, const double *b,
                         const char *separator, FILE *out)
{
    bool csv = separator[0] == ',';
    fprintf(out,
            csv ? "kind,batch,context,new_tokens,prompt_context,median_s,least_s,greatest_s,fitted_"
                  "s,error\n"
                : "%-8s %5s %8s %6s %7s %11s %11s %8s\n",
            "kind", "B", "context", "new", "over", "measured ms", "fitted ms", "error");
    for (size_t i = 0; i < n; i++) {
        const struct point *p = &points[i];
        if (!(p->s > 0)) continue;
        double e = error_of(p, a, b);
        if (csv)
            fprintf(out, "%s,%d,%d,%d,%d,%.9g,%.9g,%.9g,%.9g,%.4f\n", kind_names[p->kind], p->batch,
                    p->batch ? p->context : 0, p->new_tokens, p->prompt_context, p->median_s,
                    p->least_s, p->greatest_s, p->s * (1 + e), e);
        else
            fprintf(out, "%-8s %5d %8d %6d %7d %11.4f %11.4f %+7.1f%%\n", kind_names[p->kind],
                    p->batch, p->batch ? p->context : 0, p->new_tokens, p->prompt_context,
                    p->s * 1e3, p->s * (1 + e) * 1e3, 100 * e);
    }
}

/* How much slower than the quickest repeat the median one was, in the median of the points. */
static double disturbance(const struct point *points, size_t n)
{
    static double x[MAX_POINTS];
    size_t k = 0;
    for (size_t i = 0; i < n; i++)
        if (points[i].s > 0) x[k++] = points[i].median_s / points[i].least_s;
    td_stats_sort(x, k);
    return td_stats_percentile(x, k, 50);
}

static td_status write_table(const struct options *o, const struct td_engine *e,
                             const struct point *points, size_t n, const double *a, const double *b,
                             const double *link, struct td_err *err)
{
    const char *const both[] = {"prefill", "decode"}, *const one[] = {o->node_class};
    const char *const *names = o->node_class[0] ? one : both;
    FILE *f = fopen(o->out, "we");
    if (!f) return td_fail(err, TD_ERR_IO, "--out %s: %s", o->out, strerror(errno));
    fprintf(f,
            "# tandem bench calibrate: %s, %s, %lld threads, %s of %lld; version " TD_VERSION "\n",
            o->model[0] ? o->model : o->random_weights,
            td_dtype_name(td_model_dtype(td_engine_model((struct td_engine *)(uintptr_t)e))),
            (long long)o->threads, o->statistic, (long long)o->repeat);
    for (int k = PREFILL; k <= MIXED; k++) {
        double median, worst;
        size_t m;
        errors(points, n, (enum kind)k, a, b, &median, &worst, &m);
        if (m)
            fprintf(f,
                    "# %s: %zu points, error of the fit %.1f %% in the median, %.1f %% at most\n",
                    kind_names[k], m, 100 * median, 100 * worst);
    }
    for (size_t i = 0; i < (o->node_class[0] ? 1u : 2u); i++) {
        fprintf(f, "node_class=%s a0=%.9g a1=%.9g a2=%.9g b0=%.9g b1=%.9g b2=%.9g b3=%.9g b4=%.9g",
                names[i], a[0], a[1], a[2], b[0], b[1], b[2], b[3], b[4]);
        if (link[1] > 0) fprintf(f, " link_tau=%.9g link_bytes_per_s=%.9g", link[0], 1 / link[1]);
        const struct td_kv_layout *kv =
            td_kv_pool_layout(td_engine_kv((struct td_engine *)(uintptr_t)e));
        fprintf(f, " kv_bytes=%.9g", (double)kv->block_bytes / kv->block_size);
        fputc('\n', f);
    }
    bool failed = ferror(f);
    int saved = errno;
    if (fclose(f) && !failed) failed = true, saved = errno;
    return failed ? td_fail(err, TD_ERR_IO, "%s: %s", o->out, strerror(saved)) : TD_OK;
}

/* link[0] s and link[1] s for each byte; 0: not known. */
static td_status measure_link(const struct options *o, struct td_engine *e, double link[2],
                              struct td_err *err)
{
    struct link_point points[LINK_MAX_POINTS];
    struct fit_sample samples[LINK_MAX_POINTS];
    size_t n;
    bool least = !strcmp(o->statistic, "least");
    link[0] = o->link_tau_us / 1e6;
    link[1] = o->link_gb_s > 0 ? 1 / (o->link_gb_s * 1e9) : 0;
    if (!strcmp(o->link, "off")) return TD_OK;
    enum td_xfer_path path = !strcmp(o->link, "shm")   ? TD_XFER_PATH_SHM
                             : !strcmp(o->link, "tcp") ? TD_XFER_PATH_TCP
                                                       : TD_XFER_PATH_AUTO;
    td_status s = link_measure(path, td_kv_pool_layout(td_engine_kv(e))->block_bytes, LINK_BYTES,
                               o->repeat, points, &n, err);
    for (size_t i = 0; !s && i < n; i++)
        samples[i] = (struct fit_sample){{1, points[i].bytes},
                                         least ? points[i].least_s : points[i].median_s};
    if (!s) s = fit_non_negative(samples, n, 2, link, err);
    if (s) return td_err_prefix(err, "link"), s;
    td_say(stdout, 4, "\n%-8s %8s %12s %11s %11s %11s %11s %8s\n", "link", "blocks", "bytes",
           "median ms", "least ms", "greatest ms", "fitted ms", "error");
    for (size_t i = 0; i < n; i++) {
        double fitted = fit_predict(link, &samples[i], 2);
        td_say(stdout, 4, "%-8s %8d %12.0f %11.4f %11.4f %11.4f %11.4f %+7.1f%%\n", o->link,
               points[i].n_blocks, points[i].bytes, points[i].median_s * 1e3,
               points[i].least_s * 1e3, points[i].greatest_s * 1e3, fitted * 1e3,
               100 * (fitted / samples[i].y - 1));
    }
    td_say(stdout, 4, "link      %.4g us + %.4g GB/s\n", link[0] * 1e6,
           link[1] > 0 ? 1e-9 / link[1] : INFINITY);
    return TD_OK;
}

static td_status calibrate(const struct options *o, struct td_engine *e, struct td_err *err)
{
    static struct point points[MAX_POINTS];
    struct td_progress progress;
    double a[3] = {0}, b[5] = {0}, link[2] = {0};
    uint64_t random = 1;
    size_t n_left_out = 0;
    td_status s;
    size_t n = plan(o, e, points, err, &s);
    if (s) return s;
    td_progress_start(&progress, "calibrate", "points", n);
    for (size_t i = 0; i < n && !s; i++) {
        s = measure(e, &points[i], o->repeat, !strcmp(o->statistic, "least"), &random, err);
        if (s == TD_ERR_LIMIT) s = TD_OK, n_left_out++;
        td_progress_update(&progress, i + 1);
    }
    td_progress_end(&progress);
    if (!s) s = fit(points, n, true, a, err);
    if (!s) s = fit(points, n, false, b, err);
    if (!s) s = measure_link(o, e, link, err);
    if (s) return s;
    struct td_said said;
    print_points(points, n, a, b, "", td_said_open(&said, stdout, 4));
    td_said_close(&said);
    if (n_left_out) td_say(stdout, 4, "%zu points did not fit into --kv-memory\n", n_left_out);
    td_say(stdout, 4,
           "\nprefill   %.4g ms + %.4g us a token + %.4g ns a token and token of context\n",
           a[0] * 1e3, a[1] * 1e6, a[2] * 1e9);
    td_say(stdout, 4,
           "decode    %.4g ms + %.4g us a sequence + %.4g ns a token of context + %.4g us a "
           "prefill token + %.4g ns of its context\n",
           b[0] * 1e3, b[1] * 1e6, b[2] * 1e9, b[3] * 1e6, b[4] * 1e9);
    for (int k = PREFILL; k <= MIXED; k++) {
        double median, worst;
        size_t m;
        errors(points, n, (enum kind)k, a, b, &median, &worst, &m);
        if (m)
            td_say(stdout, 4,
                   "%-9s error of the fit: %.1f %% in the median of %zu points, %.1f %% at most\n",
                   kind_names[k], 100 * median, m, 100 * worst);
    }
    double disturbed = disturbance(points, n);
    if (disturbed > 1.25)
        td_say(stdout, 4,
               "warning: the median repeat took %.2f times the quickest: other work ran on these "
               "CPUs. Repeat it in quiet, or use --statistic least\n",
               disturbed);
    s = write_table(o, e, points, n, a, b, link, err);
    if (!s) td_say(stdout, 4, "table: %s (tandem-router --latency-table %s)\n", o->out, o->out);
    FILE *f = !s && o->csv[0] ? fopen(o->csv, "we") : NULL;
    if (!s && o->csv[0] && !f) s = td_fail(err, TD_ERR_IO, "--csv %s: %s", o->csv, strerror(errno));
    if (f) {
        print_points(points, n, a, b, ",", f);
        if (fclose(f)) s = td_fail(err, TD_ERR_IO, "--csv %s: %s", o->csv, strerror(errno));
    }
    return s;
}

int td_bench_calibrate(int argc, char **argv)
{
    struct options o = {0};
    struct td_err err = {0};
    struct td_engine *e = NULL;
    td_status s =
        td_options_load(table, &o, "tandem bench calibrate",
                        "Measures this machine's steps and writes the router's latency table.",
                        argc, argv, NULL, 0, NULL, &err);
    if (!s && !o.model[0] == !o.random_weights[0])
        s = td_fail(&err, TD_ERR_INVALID,
                    "give either --model DIR or --random-weights CONFIG.json");
    if (!s) {
        struct td_engine_config c = {.model_dir = o.model[0] ? o.model : NULL,
                                     .random_config = o.random_weights[0] ? o.random_weights : NULL,
                                     .dtype = o.dtype,
                                     .kv_dtype = o.kv_dtype,
                                     .ops = o.ops,
                                     .cpus = o.cpus,
                                     .n_threads = (int32_t)o.threads,
                                     .kv_memory = o.kv_memory,
                                     .block_size = (int32_t)o.block_size,
                                     .max_seqs = (int32_t)o.max_batch + 1,
                                     .max_batch = (int32_t)o.max_batch + 1,
                                     .max_step_tokens = (int32_t)o.max_step_tokens,
                                     .prefix_cache = false,
                                     .quiet = true};
        s = td_engine_open(&c, &e, &err);
    }
    if (!s) s = calibrate(&o, e, &err);
    td_engine_close(e);
    return s ? td_die("tandem bench calibrate", &err) : 0;
}
