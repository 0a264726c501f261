/* engine_bench.c - `tandem engine-bench`: prefill and decode tokens/s of one process with the
 * engine that the workers run, without a cluster. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/engine_bench.h"
#include "cli/engine_bench_counts.h"
#include "common/base/clock.h"
#include "common/base/random.h"
#include "common/engine/engine.h"
#include "common/engine/ranks.h"
#include "common/model/mix.h"

struct bench_config {
    const char *model, *random_weights, *dtype, *kv_dtype, *ops, *cpus, *kv_memory, *device;
    int64_t threads, batch, prompt_len, output_len, repeat, chunk, block_size;
    int64_t tp, ep, layers;
    const char *experts, *cases, *csv, *commit, *attn, *overlap;
    double floor_gb_s, floor_tflops;
    bool json, deterministic;
};

#define OFF(f) offsetof(struct bench_config, f)
// clang-format off
static const struct td_option options[] = {
    {"model", TD_OPT_STR, "", 0, 0, NULL, OFF(model), "Hugging Face model directory or GGUF file"},
    {"random_weights", TD_OPT_STR, "", 0, 0, NULL, OFF(random_weights),
     "config.json: measure this shape with random weights"},
    {"layers", TD_OPT_I64, "0", 0, 1024, NULL, OFF(layers),
     "random weights: the first so many layers of the shape, which may then fit; 0 = all"},
    {"dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|" TD_MIX_NAMES, OFF(dtype),
     "compute type; auto = the checkpoint's; q8_0 ... = bf16, weights rounded as they load"},
    {"kv_dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|int8|fp8", OFF(kv_dtype),
     "KV cache: auto = the compute type"},
    {"ops", TD_OPT_STR, "", 0, 0, NULL, OFF(ops),
     "kernel table: ref, avx2, avxvnni, avx512, avx512bf16, amx, neon, neonbf16; default the "
     "fastest"},
    {"device", TD_OPT_ENUM, "cpu", 0, 0, "cpu|cuda", OFF(device),
     "where model and KV live; cuda: a GPU, by libtandem_cuda.so"},
    TD_OPTION_DECIDED("device_index", "the first of the GPUs that CUDA_VISIBLE_DEVICES shows"),
    {"deterministic", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(deterministic),
     "GPU: the same tokens whatever the batch; false may be faster"},
    {"attn", TD_OPT_STR, "", 0, 0, NULL, OFF(attn),
     "cases, GPU: mma, wgmma or mma,wgmma: attention's kernels (TANDEM_CUDA_ATTN); a list is "
     "run one by one"},
    {"overlap", TD_OPT_STR, "", 0, 0, NULL, OFF(overlap),
     "cases, GPU: 0, 1 or 0,1: kernels begin while the one before ends (TANDEM_CUDA_OVERLAP)"},
    {"threads", TD_OPT_I64, "0", 0, 1024, NULL, OFF(threads), "0 = all CPUs"},
    {"tp", TD_OPT_I64, "1", 1, 16, NULL, OFF(tp),
     "processes that share the model; threads and cpus are of all together"},
    {"ep", TD_OPT_I64, "0", 0, 16, NULL, OFF(ep),
     "of a mixture of experts: into how many parts, of whole experts, they divide them; 0 = tp"},
    {"experts", TD_OPT_STR, "load", 0, 0, NULL, OFF(experts),
     "of a mixture: load, lazy or a size, as a worker's --experts"},
    {"cpus", TD_OPT_STR, "", 0, 0, NULL, OFF(cpus), "pin the threads to these CPUs"},
    {"batch", TD_OPT_I64, "1", 1, 4096, NULL, OFF(batch), "sequences decoded together"},
    {"prompt_len", TD_OPT_I64, "512", 1, 1 << 24, NULL, OFF(prompt_len),
     "prompt tokens of each sequence"},
    {"output_len", TD_OPT_I64, "32", 1, 1 << 24, NULL, OFF(output_len),
     "tokens decoded for each sequence"},
    {"repeat", TD_OPT_I64, "5", 1, 1000, NULL, OFF(repeat),
     "runs; the median, least and greatest are reported"},
    {"chunk", TD_OPT_I64, "512", 1, 1 << 20, NULL, OFF(chunk), "tokens per prefill step"},
    {"block_size", TD_OPT_I64, "16", 8, 256, NULL, OFF(block_size), "tokens per KV block"},
    {"kv_memory", TD_OPT_STR, "60%", 0, 0, NULL, OFF(kv_memory), "KV pool"},
    {"cases", TD_OPT_STR, "", 0, 0, NULL, OFF(cases),
     "BATCHxPROMPT_LEN,...: these one after another, decode steps timed one by one; instead of "
     "batch, prompt_len, repeat"},
    {"floor_gb_s", TD_OPT_F64, "0", 0, 1e6, NULL, OFF(floor_gb_s),
     "cases: measured copy rate, for percent of the floor; 0 = unknown (tandem-bench cuda "
     "measures it)"},
    {"floor_tflops", TD_OPT_F64, "0", 0, 1e6, NULL, OFF(floor_tflops),
     "cases: measured rate of a large product; 0 = unknown"},
    {"csv", TD_OPT_STR, "", 0, 0, NULL, OFF(csv),
     "cases: append rows to this file, with a head when it is new"},
    {"commit", TD_OPT_STR, "unknown", 0, 0, NULL, OFF(commit), "cases: for the CSV"},
    {"json", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(json), "one JSON object on stdout"},
    {0},
};
// clang-format on

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* One run: prefills all prompts, then decodes all. The prompts differ, so that the prefix cache
 * cannot help. *ret_active: experts that a decode step read. */
static td_status one_run(struct td_engine *e, const struct bench_config *c, uint64_t seed,
                         double *ret_prefill, double *ret_decode, double *ret_active,
                         struct td_err *err)
{
    int32_t n = (int32_t)c->batch, vocab = td_model_config(td_engine_model(e))->vocab;
    struct td_seq **seqs = calloc((size_t)n, sizeof(struct td_seq *)),
                  **preempted = calloc((size_t)n, sizeof(struct td_seq *));
    struct td_step_item *items = calloc((size_t)n, sizeof *items);
    int32_t *tokens = calloc((size_t)c->prompt_len, sizeof *tokens), n_preempted = 0;
    td_status s =
        seqs && preempted && items && tokens ? TD_OK : td_fail(err, TD_ERR_NOMEM, "out of memory");
    struct td_sampling greedy = {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1};
    for (int32_t i = 0; !s && i < n; i++) {
        for (int64_t j = 0; j < c->prompt_len; j++)
            tokens[j] = (int32_t)td_random_index(&seed, (uint32_t)vocab);
        seqs[i] = td_engine_seq_get(e);
        seqs[i]->sched.priority = (uint64_t)i;
        s = td_engine_seq_set(e, seqs[i], tokens, (int32_t)c->prompt_len, (int32_t)c->prompt_len,
                              &greedy, NULL, 0, c->output_len + 1, err);
        if (!s && td_engine_admit(e, seqs[i], false, 0))
            s = td_fail(err, TD_ERR_NOMEM, "kv_memory does not hold %d sequences; raise it", n);
    }
    uint64_t start = td_now_ns();
    for (bool prefilling = true; !s && prefilling;) {
        prefilling = false;
        struct td_step_item it = {0};
        for (int32_t i = 0; i < n && !it.seq; i++)
            if (seqs[i]->sched.phase == TD_SEQ_PREFILL) it.seq = seqs[i];
        if (!it.seq) break;
        prefilling = true;
        int32_t left = it.seq->sched.n_tokens - it.seq->sched.n_computed;
        it.n_new = left < c->chunk ? left : (int32_t)c->chunk;
        s = td_engine_step(e, &it, 1, err);
    }
    struct td_expert_counts before;
    td_engine_expert_counts(e, &before);
    uint64_t mid = td_now_ns();
    for (int64_t step = 0; !s && step < c->output_len; step++) {
        int32_t k = td_engine_plan(e, seqs, n, items, preempted, &n_preempted);
        if (n_preempted)
            s = td_fail(err, TD_ERR_NOMEM,
                        "kv_memory does not hold %d sequences of %lld tokens; raise it", n,
                        (long long)(c->prompt_len + c->output_len));
        else
            s = td_engine_step(e, items, k, err);
    }
    uint64_t end = td_now_ns();
    *ret_active = engine_bench_active_experts(e, &before, n, (int32_t)c->output_len);
    for (int32_t i = 0; seqs && i < n && seqs[i]; i++) {
        td_engine_release(e, seqs[i]);
        td_engine_seq_put(e, seqs[i]);
    }
    td_kv_prefix_clear(td_engine_kv(e));
    *ret_prefill = (double)(n * c->prompt_len) / ((double)(mid - start) / 1e9);
    *ret_decode = (double)(n * c->output_len) / ((double)(end - mid) / 1e9);
    free(seqs);
    free(preempted);
    free(items);
    free(tokens);
    return s;
}

/* The command line, without the file that it writes to. */
static void command_text(int argc, char **argv, char *text, size_t text_bytes)
{
    size_t n = (size_t)snprintf(text, text_bytes, "tandem engine-bench");
    for (int i = 1; i < argc && n < text_bytes; i++) {
        if (strncmp(argv[i], "--csv", 5) == 0) {
            i += argv[i][5] == 0;
            continue;
        }
        n += (size_t)snprintf(text + n, text_bytes - n, " %s", argv[i]);
    }
}

/* The name of what runs, without a comma of ours. */
static void model_text(const struct bench_config *c, char *text, size_t text_bytes)
{
    const char *path = c->model[0] ? c->model : c->random_weights, *slash = strrchr(path, '/');
    int n = snprintf(text, text_bytes, "%.200s", slash && slash[1] ? slash + 1 : path);
    if (c->layers)
        snprintf(text + n, text_bytes - (size_t)n, " (%lld layer%s)", (long long)c->layers,
                 c->layers > 1 ? "s" : "");
}

static td_status run_cases(const struct bench_config *c, struct td_engine *e,
                           const struct engine_bench_case *cases, int32_t n_cases, int argc,
                           char **argv, struct td_err *err)
{
    char command[1024], model[300];
    model_text(c, model, sizeof model);
    command_text(argc, argv, command, sizeof command);
    struct engine_bench_report r = {.model = model,
                                    .csv = c->csv,
                                    .commit = c->commit,
                                    .dtype = c->dtype,
                                    .command = command,
                                    .floor_gb_s = c->floor_gb_s,
                                    .floor_tflops = c->floor_tflops,
                                    .n_steps = (int32_t)c->output_len};
    return engine_bench_run_cases(e, cases, n_cases, &r, err);
}

/* An axis: an environment variable that the device library reads, and the values that it takes in
 * this run. */
struct axis {
    const char *option, *variable, *list, *items[2];
    const char *values[2]; /* those of the list */
    int n;
};

/* Parses an axis; one with an empty list leaves the environment unchanged: n 1, value NULL. */
static td_status parse_axis(struct axis *a, struct td_err *err)
{
    a->n = 0;
    a->values[0] = NULL;
    for (const char *p = a->list; *p;) {
        size_t n = strcspn(p, ",");
        const char *item = NULL;
        for (int i = 0; i < 2; i++)
            if (strlen(a->items[i]) == n && strncmp(p, a->items[i], n) == 0) item = a->items[i];
        if (!item || a->n == 2)
            return td_fail(err, TD_ERR_INVALID,
                           "%s is \"%.32s\", must be %s, %s or both with a comma", a->option,
                           a->list, a->items[0], a->items[1]);
        a->values[a->n++] = item;
        p += n + (p[n] == ',');
    }
    if (a->n == 0) a->n = 1;
    return TD_OK;
}

/* Runs the cases once for each pair of values. The engine is opened anew each time, because the
 * library reads its variables when the device opens. */
static td_status run_axes(const struct bench_config *c, const struct td_engine_config *ec,
                          const struct engine_bench_case *cases, int32_t n_cases, int argc,
                          char **argv, struct td_err *err)
{
    struct axis axes[2] = {{.option = "attn",
                            .variable = "TANDEM_CUDA_ATTN",
                            .list = c->attn,
                            .items = {"mma", "wgmma"}},
                           {.option = "overlap",
                            .variable = "TANDEM_CUDA_OVERLAP",
                            .list = c->overlap,
                            .items = {"0", "1"}}};
    td_status s = TD_OK;
    for (int i = 0; i < 2 && !s; i++) s = parse_axis(&axes[i], err);
    if (!s && (c->attn[0] || c->overlap[0]) && strcmp(c->device, "cuda") != 0)
        s = td_fail(err, TD_ERR_INVALID,
                    "attn and overlap are of GPUs: device is \"%s\", must be cuda", c->device);
    int n = s ? 0 : axes[0].n * axes[1].n;
    if (!s && n > 1 && c->tp > 1)
        s = td_fail(err, TD_ERR_INVALID,
                    "attn and overlap: one value of each where tp is more than 1");
    for (int i = 0; i < n && !s; i++) {
        const char *values[2] = {axes[0].values[i / axes[1].n], axes[1].values[i % axes[1].n]};
        for (int k = 0; k < 2; k++)
            if (values[k] && setenv(axes[k].variable, values[k], 1))
                s = td_fail(err, TD_ERR_NOMEM, "environment: no memory");
        struct td_engine *e = NULL;
        if (!s) s = td_engine_open(ec, &e, err);
        if (!s) s = run_cases(c, e, cases, n_cases, argc, argv, err);
        td_engine_close(e);
    }
    return s;
}

/* Prints the medians of the c->repeat runs, as text or JSON. Sorts prefill and decode. */
static void print_result(struct td_engine *e, const struct bench_config *c, double *prefill,
                         double *decode, double active)
{
    const struct td_model_config *m = td_model_config(td_engine_model(e));
    double weights = engine_bench_step_weights(e, active) * (double)c->tp,
           params = (double)td_model_config_n_params(m),
           flops = engine_bench_prefill_ops(m, (double)c->prompt_len).products /
                   (double)c->prompt_len; /* of a token */
    char name[300];
    model_text(c, name, sizeof name);
    qsort(prefill, (size_t)c->repeat, sizeof *prefill, by_value);
    qsort(decode, (size_t)c->repeat, sizeof *decode, by_value);
    double p = prefill[c->repeat / 2], d = decode[c->repeat / 2], steps = d / (double)c->batch;
    const char *dtype = td_dtype_name(td_model_dtype(td_engine_model(e))),
               *kv_dtype = td_dtype_name(td_model_kv_dtype(td_engine_model(e)));
    if (c->json)
        printf("{\"dtype\":\"%s\",\"kv_dtype\":\"%s\",\"layers\":%d,\"threads\":%lld,\"tp\":%lld,"
               "\"batch\":%lld,"
               "\"prompt_len\":%"
               "lld,\"output_len\":%lld,\"repeat\":%lld,"
               "\"parameters\":%.0f,"
               "\"prefill_tok_s\":{\"median\":%.2f,\"min\":%.2f,\"max\":%.2f},\"decode_tok_s\":"
               "{\"median\":%.2f,\"min\":%.2f,\"max\":%.2f},"
               "\"prefill_weight_gflops\":%.2f,\"decode_weight_gb_s\":%.3f,"
               "\"decode_weight_bytes\":%.0f,\"decode_experts\":%.1f}\n",
               dtype, kv_dtype, m->n_layers, (long long)c->threads, (long long)c->tp,
               (long long)c->batch, (long long)c->prompt_len, (long long)c->output_len,
               (long long)c->repeat, params, p, prefill[0], prefill[c->repeat - 1], d, decode[0],
               decode[c->repeat - 1], p * flops / 1e9, steps * weights / 1e9, weights, active);
    else
        printf("%s, %.0f M parameters, %s, KV %s, threads %lld, tp %lld, batch %lld, prompt %lld, "
               "output %lld, median of %lld (least .. greatest)\n"
               "prefill %10.2f tok/s  (%.2f .. %.2f)   %.1f GFLOP/s in weights\n"
               "decode  %10.2f tok/s  (%.2f .. %.2f)   %.2f GB/s of weights\n",
               name, params / 1e6, dtype, kv_dtype, (long long)c->threads, (long long)c->tp,
               (long long)c->batch, (long long)c->prompt_len, (long long)c->output_len,
               (long long)c->repeat, p, prefill[0], prefill[c->repeat - 1], p * flops / 1e9, d,
               decode[0], decode[c->repeat - 1], steps * weights / 1e9);
}

static td_status check_model(const struct bench_config *c, struct td_err *err)
{
    if (!c->model[0] && !c->random_weights[0])
        return td_fail(err, TD_ERR_INVALID, "give --model DIR or --random-weights CONFIG.json");
    if (c->layers && c->model[0])
        return td_fail(err, TD_ERR_INVALID, "layers goes with random-weights, not with model");
    return TD_OK;
}

int cli_engine_bench(int argc, char **argv)
{
    struct bench_config c = {0};
    struct td_err err = {0};
    struct td_engine *e = NULL;
    td_status s = td_options_load(options, &c, "tandem engine-bench",
                                  "Prefill and decode tokens/s of one process.", argc, argv, NULL,
                                  0, NULL, &err);
    if (!s) s = check_model(&c, &err);
    struct engine_bench_case cases[ENGINE_BENCH_CASES_MAX];
    int32_t n_cases = 0;
    if (!s && c.cases[0]) s = engine_bench_parse_cases(c.cases, cases, &n_cases, &err);
    for (int32_t i = 0; i < n_cases; i++)
        if (i == 0 || cases[i].batch > c.batch) c.batch = cases[i].batch;
    static struct td_ranks ranks;
    if (!s && cli_rank.rank > 0)
        s = td_ranks_join(&cli_rank, &ranks, &err);
    else if (!s && c.tp > 1)
        s = td_ranks_start((int32_t)c.tp, (int32_t)c.threads, &ranks, &err);
    if (!s) {
        struct td_engine_config ec = {.model_dir = c.model[0] ? c.model : NULL,
                                      .random_config =
                                          c.random_weights[0] ? c.random_weights : NULL,
                                      .random_layers = (int32_t)c.layers,
                                      .dtype = c.dtype,
                                      .kv_dtype = c.kv_dtype,
                                      .ops = c.ops,
                                      .cpus = c.cpus,
                                      .n_threads = (int32_t)c.threads,
                                      .kv_memory = c.kv_memory,
                                      .block_size = (int32_t)c.block_size,
                                      .max_seqs = (int32_t)c.batch,
                                      .max_batch = (int32_t)c.batch,
                                      .max_step_tokens = (int32_t)c.chunk,
                                      .prefix_cache = false,
                                      .quiet = c.json,
                                      .device = c.device,
                                      .device_index = cli_rank.rank,
                                      .deterministic = c.deterministic};
        ec.comm = ranks.comm;
        ec.expert_ranks = (int32_t)c.ep;
        ec.experts = c.experts;
        if (cli_rank.rank > 0) return td_engine_follow(&ec, &err) != TD_OK; /* rank 0 says why */
        if (n_cases) {
            s = run_axes(&c, &ec, cases, n_cases, argc, argv, &err);
            td_ranks_stop(&ranks);
            return s ? td_die("tandem engine-bench", &err) : 0;
        }
        s = c.attn[0] || c.overlap[0]
                ? td_fail(&err, TD_ERR_INVALID, "attn and overlap go with cases")
                : td_engine_open(&ec, &e, &err);
    }
    double prefill[1000], decode[1000], active = 0, ignored;
    if (!s) s = one_run(e, &c, 1, &ignored, &ignored, &active, &err); /* warm-up: pages, clocks */
    for (int64_t i = 0; !s && i < c.repeat; i++)
        s = one_run(e, &c, (uint32_t)i + 2, &prefill[i], &decode[i], &active, &err);
    if (!s) print_result(e, &c, prefill, decode, active);
    td_engine_close(e);
    td_ranks_stop(&ranks);
    return s ? td_die("tandem engine-bench", &err) : 0;
}
