/* perf.c - see perf.h. */
#include "common/base/csv.h"
#include "sim/perf.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sim/gpu.h"
#include "sim/heap.h"
#include "router/objectives.h"

/* OPT on A100-80G: DistServe's fits (LLMServe/DistServe, simdistserve/estimators/profile_data,
 * Apache-2.0), in ms: prefill a + b*sum(n) + c*sum(n^2); decode a + b*context + c*batch, one set
 * below and one from 95 rows on. KV capacities: its max_num_tokens.csv. KV bytes: 2 * layers *
 * hidden * 2.
 *
 * llama-8b on H200: a roofline from measured kernels (ai-dynamo/aiconfigurator, vLLM 0.24,
 * bf16). 7.50e9 weights that are multiplied, read at 3.1 TB/s (GEMM at m = 1): 4.84 ms a step;
 * 831 TFLOP/s (GEMM at m = 4,096): 18.05 us a prefill row; a decode row adds 298 GEMMs' worth of
 * (22.1 - 16.0) us / 240 rows = 7.6 us; KV read at 32 * 270.9 us / (64 * 4,096) tokens = 33.1 ns
 * a token; attention of a prefill row over a token: 4 * 4,096 * 32 flops at 500 TFLOP/s = 1.05
 * ns. KV: 131,072 B a token, 141 GB * 0.9 less weights. */
static const struct {
    const char *name;
    double prefill[3], small[3], large[3]; /* ms; prefill[2] multiplies n^2 */
    int32_t split;
    uint64_t kv_tokens;
    double kv_bytes;
    uint32_t gpus;
} tables[] = {
    {"opt-13b",
     {18.10254647, 0.1019122573, 7.122264314e-06},
     {19.93470262, 0.0006269356524, 0.03850697741},
     {7.166188947, 0.0005798000403, 0.1583109619},
     95,
     66144,
     819200,
     1},
    {"opt-13b:tp2",
     {14.7429737, 0.0685772074, 2.44957274e-06},
     {13.29479635, 0.000341092197, 0.06296393225},
     {10.63874191, 0.0003118336964, 0.08562913604},
     95,
     163008,
     819200,
     2},
    {"opt-13b:tp4",
     {12.06229703, 0.03808140083, 5.226249732e-07},
     {10.25623168, 0.0001878670232, 0.03269273629},
     {10.48351494, 0.0001712088856, 0.04566648526},
     95,
     356736,
     819200,
     4},
    {"opt-13b-vllm",
     {22.05220479, 0.1405092387, 8.076584823e-06},
     {23.47504101, 0.0005929344661, 0.06072686126},
     {20.20635617, 0.0004907727036, 0.1200031386},
     95,
     66144,
     819200,
     1},
    {"opt-66b:tp2",
     {43.05881348, 0.274229287, 2.247804247e-05},
     {48.28801549, 0.0009424343536, 0.1275502009},
     {28.72769399, 0.0004744847546, 0.2961779236},
     95,
     11600,
     2359296,
     2},
    {"opt-66b:tp4",
     {29.44163604, 0.1513521806, 8.317450766e-06},
     {30.76028462, 0.0004519476038, 0.06328419575},
     {27.47082137, 0.0004046845542, 0.1248066774},
     95,
     78496,
     2359296,
     4},
    {"opt-66b:tp8",
     {25.49066238, 0.1065917766, 3.391050252e-06},
     {23.15511135, 0.000226914885, 0.04800638397},
     {21.71772782, 0.0003758089656, 0.08978614176},
     95,
     212304,
     2359296,
     8},
    {"llama-8b-h200",
     {4.84, 0.01805, 0.525e-6},
     {4.84, 3.31e-5, 0.0076},
     {0, 0, 0},
     0,
     846000,
     131072,
     1},
};
#define N_TABLES (sizeof tables / sizeof *tables)

const char *td_perf_name(uint32_t i) { return i < N_TABLES ? tables[i].name : NULL; }

static double interpolate(const double *x, const double *y, uint32_t n, double at)
{
    uint32_t i = 1;
    while (i + 1 < n && at > x[i]) i++; /* the segment that holds `at`, or the one at the end */
    return y[i - 1] + (y[i] - y[i - 1]) / (x[i] - x[i - 1]) * (at - x[i - 1]);
}

double td_perf_step_s(const struct td_perf *p, const struct td_perf_batch *b)
{
    if (b->prefill_rows + b->decode_rows == 0) return 0;
    if (p->n_prefill_points) {
        if (b->prefill_rows == 0)
            return interpolate(p->decode_x, p->decode_s, p->n_decode_points,
                               (double)b->decode_rows);
        double t = interpolate(p->prefill_x, p->prefill_s, p->n_prefill_points,
                               (double)(b->prefill_rows + b->decode_rows));
        return b->decode_rows ? t * p->mixed : t;
    }
    const double *d = p->split && b->decode_rows >= p->split ? p->b_large : p->b;
    double t = 0;
    if (b->prefill_rows && b->decode_rows && p->mixed_a[0] + p->mixed_a[1] > 0)
        return (d[0] + d[1] * (double)b->decode_rows + d[2] * b->context_tokens +
                p->mixed_a[0] * (double)b->prefill_rows + p->mixed_a[1] * b->attention_work) *
               p->pp_scale;
    if (b->prefill_rows) t = p->a[0];
    if (b->decode_rows)
        t = fmax(t, d[0]) + d[1] * (double)b->decode_rows + d[2] * b->context_tokens;
    t += p->a[1] * (double)b->prefill_rows + p->a[2] * b->attention_work;
    return t * p->pp_scale;
}

double td_perf_prefill_s(const struct td_perf *p, int64_t u, int64_t h, int64_t chunk)
{
    double t = 0;
    for (int64_t n; u > 0; u -= n, h += n) {
        n = u < chunk ? u : chunk;
        struct td_perf_batch b = {.prefill_rows = n,
                                  .attention_work = (double)n * ((double)h + (double)n / 2)};
        t += td_perf_step_s(p, &b);
    }
    return t;
}

/* ---- latency tables -------------------------------------------------------------------------- */

/* FILE or FILE:NODE_CLASS. */
static td_status load_table(const char *spec, struct td_perf *p, struct td_err *err)
{
    struct td_core_config c = {0};
    char path[512], whole[512], names[TD_CORE_MAX_NODE_CLASSES][ROUTER_NODE_CLASS_NAME];
    const char *want = NULL;
    struct router_node nodes[TD_CORE_MAX_NODE_CLASSES];
    uint32_t i = 0;
    snprintf(path, sizeof path, "%s", spec);
    snprintf(whole, sizeof whole, "%s", spec); /* as it was: path is cut at its colons */
    FILE *in = fopen(path, "r");
    for (char *colon;
         !in && (colon = strrchr(path, ':'));) { /* a file's name and a class may have colons */
        *colon = 0;
        want = whole + (colon + 1 - path);
        in = fopen(path, "r");
    }
    if (!in) return td_fail(err, TD_ERR_IO, "latency \"%s\": %s", spec, strerror(errno));
    td_status s = router_latency_table_read(in, path, &c, names, nodes, err);
    fclose(in);
    if (s) return s;
    while (want && i < c.n_thetas && strcmp(names[i], want)) i++;
    if (i >= c.n_thetas)
        return td_fail(err, TD_ERR_NOT_FOUND, "latency_table %s has no node_class%s%s", path,
                       want ? "=" : "", want ? want : "");
    const struct td_lat_theta *t = &c.thetas[i];
    if (nodes[i].gpus > 1e6 || (nodes[i].gpus > 0 && nodes[i].gpus < 1))
        return td_fail(err, TD_ERR_INVALID, "latency_table %s: gpus is %g, must be 1..1e6", path,
                       nodes[i].gpus);
    if (nodes[i].kv_tokens > 1e12)
        return td_fail(err, TD_ERR_INVALID, "latency_table %s: kv_tokens is %g, limit 1e12", path,
                       nodes[i].kv_tokens);
    memcpy(p->a, t->prefill, sizeof p->a);
    memcpy(p->b, t->decode, sizeof p->b);
    memcpy(p->mixed_a, t->decode + 3, sizeof p->mixed_a);
    p->kv_tokens = (uint64_t)nodes[i].kv_tokens;
    p->kv_bytes_per_token = nodes[i].kv_bytes;
    p->gpus = nodes[i].gpus > 0 ? (uint32_t)nodes[i].gpus : 1;
    snprintf(p->name, sizeof p->name, "%.90s", names[i]);
    return TD_OK;
}

/* ---- splitwise-sim's measurements ------------------------------------------------------------ */

struct sample {
    double x, prefill, decode;
};

static int by_x(const void *a, const void *b)
{
    double x = ((const struct sample *)a)->x, y = ((const struct sample *)b)->x;
    return x < y ? -1 : x > y;
}

static int by_number(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *v, uint32_t n)
{
    qsort(v, n, sizeof *v, by_number);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* The parts of splitwise:FILE:MODEL:HARDWARE:TP. */
struct splitwise {
    const char *file, *model, *hardware, *tensor_parallel;
};

/* The file's rows of this model, hardware and degree; *ret_samples is the caller's to free even
 * after an error. */
static td_status splitwise_read(const struct splitwise *w, struct sample **ret_samples,
                                uint32_t *ret_n, struct td_err *err)
{
    static const char *const want[7] = {"model",       "hardware",   "tensor_parallel",
                                        "prompt_size", "batch_size", "prompt_time",
                                        "token_time"};
    struct td_csv csv;
    td_status s = td_csv_open(w->file, &csv, err);
    int col[7];
    for (int i = 0; i < 7 && !s; i++) s = td_csv_column(&csv, want[i], &col[i], err);
    struct sample *samples = NULL;
    uint32_t n = 0;
    while (!s && td_csv_next(&csv, &s, err)) {
        if (strcmp(csv.field[col[0]], w->model) || strcmp(csv.field[col[1]], w->hardware) ||
            strcmp(csv.field[col[2]], w->tensor_parallel))
            continue;
        double v[4];
        for (int i = 0; i < 4 && !s; i++) s = td_csv_f64(&csv, col[3 + i], 0, 1e12, &v[i], err);
        samples = td_sim_grow(samples, n + 1, sizeof *samples);
        samples[n++] = (struct sample){v[0] * v[1], v[2] / 1e3, v[3] / 1e3};
    }
    td_csv_close(&csv);
    *ret_samples = samples;
    *ret_n = n;
    if (!s && n == 0)
        s = td_fail(err, TD_ERR_NOT_FOUND, "%s has no row of %s on %s with tensor parallel %s",
                    w->file, w->model, w->hardware, w->tensor_parallel);
    return s;
}

/* A point for each batch size: the median of its samples, which are sorted by x. */
static td_status splitwise_points(const struct splitwise *w, const struct sample *samples,
                                  uint32_t n_samples, struct td_perf *p, struct td_err *err)
{
    for (uint32_t i = 0, k; i < n_samples; i = k) {
        double pre[256], dec[256];
        for (k = i; k < n_samples && k - i < 256 && samples[k].x == samples[i].x; k++) {
            pre[k - i] = samples[k].prefill;
            dec[k - i] = samples[k].decode;
        }
        if (p->n_prefill_points == TD_PERF_MAX_POINTS)
            return td_fail(err, TD_ERR_LIMIT, "%s has more than %d batch sizes of %s", w->file,
                           TD_PERF_MAX_POINTS, w->model);
        p->prefill_x[p->n_prefill_points] = p->decode_x[p->n_prefill_points] = samples[i].x;
        p->prefill_s[p->n_prefill_points] = median(pre, k - i);
        p->decode_s[p->n_prefill_points++] = median(dec, k - i);
    }
    if (p->n_prefill_points < 2)
        return td_fail(err, TD_ERR_INVALID, "%s has %u batch sizes of %s, need 2", w->file,
                       p->n_prefill_points, w->model);
    return TD_OK;
}

/* splitwise:FILE:MODEL:HARDWARE:TP */
static td_status load_splitwise(const char *spec, struct td_perf *p, struct td_err *err)
{
    char text[512], *part[5], *save = NULL;
    int n = 0;
    snprintf(text, sizeof text, "%s", spec);
    for (char *t = strtok_r(text, ":", &save); t && n < 5; t = strtok_r(NULL, ":", &save))
        part[n++] = t;
    if (n != 5)
        return td_fail(err, TD_ERR_INVALID,
                       "latency is \"%s\", must be splitwise:FILE:MODEL:HARDWARE:TP", spec);
    struct splitwise w = {part[1], part[2], part[3], part[4]};
    struct sample *samples = NULL;
    uint32_t n_samples = 0;
    td_status s = splitwise_read(&w, &samples, &n_samples, err);
    if (!s) {
        qsort(samples, n_samples, sizeof *samples, by_x);
        s = splitwise_points(&w, samples, n_samples, p, err);
    }
    free(samples);
    p->n_decode_points = p->n_prefill_points;
    p->mixed = 1.1;
    p->pp_scale = 1;
    p->gpus = (uint32_t)strtoul(w.tensor_parallel, NULL, 10);
    if (p->gpus < 1) p->gpus = 1;
    /* fp16 KV of the two models, without grouped-query sharing for bloom: 2 * hidden * layers *
       2; llama2-70b has 8 KV heads of 128 */
    p->kv_bytes_per_token =
        strcmp(w.model, "bloom-176b") ? 2.0 * 8 * 128 * 80 * 2 : 2.0 * 14336 * 70 * 2;
    snprintf(p->name, sizeof p->name, "%s %s tp%s", w.model, w.hardware, w.tensor_parallel);
    return s;
}

td_status td_perf_load(const char *spec, struct td_perf *ret_perf, struct td_err *err)
{
    struct td_perf p = {.pp_scale = 1, .gpus = 1};
    td_status s = TD_OK;
    for (size_t i = 0; i < N_TABLES; i++) {
        if (strcmp(spec, tables[i].name)) continue;
        snprintf(p.name, sizeof p.name, "%s", spec);
        for (int k = 0; k < 3; k++) p.a[k] = tables[i].prefill[k] / 1e3;
        p.a[2] *= 2; /* n^2 = 2 * n * (0 + n/2) */
        p.b[0] = tables[i].small[0] / 1e3;
        p.b[1] = tables[i].small[2] / 1e3;
        p.b[2] = tables[i].small[1] / 1e3;
        p.b_large[0] = tables[i].large[0] / 1e3;
        p.b_large[1] = tables[i].large[2] / 1e3;
        p.b_large[2] = tables[i].large[1] / 1e3;
        p.split = tables[i].split;
        p.kv_tokens = tables[i].kv_tokens;
        p.kv_bytes_per_token = tables[i].kv_bytes;
        p.gpus = tables[i].gpus;
        *ret_perf = p;
        return TD_OK;
    }
    if (!strncmp(spec, "gpu:", 4))
        s = td_gpu_load(spec + 4, &p, err);
    else if (!strncmp(spec, "splitwise:", 10))
        s = load_splitwise(spec, &p, err);
    else if (strchr(spec, '/') || strchr(spec, '.'))
        s = load_table(spec, &p, err);
    else {
        char names[256] = "";
        for (size_t i = 0, n = 0; i < N_TABLES && n < sizeof names; i++)
            n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", i ? ", " : "",
                                  tables[i].name);
        s = td_fail(err, TD_ERR_INVALID,
                    "latency \"%s\" is no table (%s), no gpu:GPU:tpN:MODEL, no "
                    "splitwise:FILE:MODEL:HARDWARE:TP and no file",
                    spec, names);
    }
    if (!s) *ret_perf = p;
    return s;
}
