/* cuda_sample_bench.c - tandem-bench cuda-sample: steps of the device's sampler beside their floor.
 *
 * The floor of a step is its rows' logits, each read once, at the rate of a large copy on the
 * device measured in the same run (bytes read and written). A step is what an engine does: put
 * the rows, sample, get the results, all in one recorded graph; `burst` steps are issued between
 * two waits. Before it is timed, a line's results are compared with td_sample's. Rows beyond L2
 * (about 50 MB on Hopper: 97 rows of 128,256 logits) are read from memory three times and more,
 * the others once. One CSV line each: the median of `repeats` bursts, and half the distance of
 * the quartiles in % of it. On the emulated device only the comparison means anything. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "bench/cuda_bench_common.h"
#include "common/base/options.h"
#include "common/model/sampler.h"

#define LEN(a) ((int)(sizeof(a) / sizeof *(a)))

struct bench_config {
    const char *library, *only;
    int64_t index, vocab, max_rows, repeats, burst;
    uint64_t copy_bytes;
    double copy_gbs;
};

// clang-format off
static const struct td_option options[] = {
    {"library", TD_OPT_STR, "", 0, 0, NULL, offsetof(struct bench_config, library),
     "The device's library; empty: as for --device cuda."},
    {"index", TD_OPT_I64, "0", 0, 64, NULL, offsetof(struct bench_config, index),
     "Device, of the visible ones."},
    {"only", TD_OPT_STR, "", 0, 0, NULL, offsetof(struct bench_config, only),
     "Only lines whose name contains this text."},
    {"vocab", TD_OPT_I64, "128256", 1, TD_SAMPLE_MAX_VOCAB, NULL,
     offsetof(struct bench_config, vocab),
     "Logits of a row."},
    {"max_rows", TD_OPT_I64, "256", 1, 4096, NULL, offsetof(struct bench_config, max_rows),
     "Measure 1, 4, 16, ... rows up to this."},
    {"repeats", TD_OPT_I64, "15", 3, TD_BENCH_REPEATS_MAX, NULL,
     offsetof(struct bench_config, repeats),
     "Bursts per line."},
    {"burst", TD_OPT_I64, "20", 1, 1000, NULL, offsetof(struct bench_config, burst),
     "Steps between two waits."},
    {"copy_bytes", TD_OPT_SIZE, "1GiB", 4096, 1e12, NULL, offsetof(struct bench_config, copy_bytes),
     "Size of the copy that gives the floor."},
    {"copy_gbs", TD_OPT_F64, "0", 0, 1e6, NULL, offsetof(struct bench_config, copy_gbs),
     "The floor's GB/s (1e9), read and written, of another run; 0: measure."},
    {NULL, TD_OPT_BOOL, NULL, 0, 0, NULL, 0, NULL},
};
// clang-format on

static struct bench_config cfg;
static const struct td_device *d;

static const struct {
    const char *name;
    struct td_sampling s;
    int32_t n_tokens;
} lines[] = {
    {"greedy", {.top_p = 1, .repetition_penalty = 1, .n_logprobs = -1}, 100},
    {"greedy, 20 logprobs", {.top_p = 1, .repetition_penalty = 1, .n_logprobs = 20}, 100},
    {"temperature 1",
     {.temperature = 1, .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1},
     100},
    {"temperature 0.7",
     {.temperature = 0.7f, .top_p = 1, .repetition_penalty = 1, .n_logprobs = -1},
     100},
    {"top-p 0.9",
     {.temperature = 1, .top_p = 0.9f, .repetition_penalty = 1, .n_logprobs = -1},
     100},
    {"top-k 50, top-p 0.9",
     {.temperature = 0.7f, .top_p = 0.9f, .top_k = 50, .repetition_penalty = 1, .n_logprobs = -1},
     100},
    {"top-p 0.9, 5 logprobs",
     {.temperature = 1, .top_p = 0.9f, .repetition_penalty = 1, .n_logprobs = 5},
     100},
    {"repetition penalty, 4k tokens",
     {.temperature = 1, .top_p = 0.9f, .repetition_penalty = 1.1f, .n_logprobs = -1},
     4096},
    {"three penalties, 32k tokens",
     {.temperature = 1,
      .top_p = 0.9f,
      .repetition_penalty = 1.1f,
      .presence_penalty = 0.5f,
      .frequency_penalty = 0.1f,
      .n_logprobs = -1},
     32768},
};

static double samples[TD_BENCH_REPEATS_MAX];

struct bed {
    float *logits, *device_logits;
    struct td_sample_row *rows, *device_rows;
    struct td_sample_result *results, *device_results;
    struct td_sample_payload payload;
    void *scratch;
    int32_t *tokens;
    struct td_sampler *sampler;
    int32_t n_most_tokens;
};

static td_status bed_open(struct bed *b, struct td_err *err)
{
    size_t n = (size_t)cfg.max_rows, vocab = (size_t)cfg.vocab;
    int32_t max_rows = (int32_t)cfg.max_rows, v = (int32_t)cfg.vocab;
    td_status s;
    for (int i = 0; i < LEN(lines); i++)
        b->n_most_tokens =
            lines[i].n_tokens > b->n_most_tokens ? lines[i].n_tokens : b->n_most_tokens;
    b->payload.bytes = n * ((size_t)b->n_most_tokens * sizeof(int32_t) + 8);
    b->logits = malloc(n * vocab * sizeof *b->logits);
    b->tokens = malloc((size_t)b->n_most_tokens * sizeof *b->tokens);
    if (!b->logits || !b->tokens)
        return td_fail(err, TD_ERR_NOMEM, "no memory for %lld rows of logits",
                       (long long)cfg.max_rows);
    for (size_t i = 0; i < n * vocab; i++) { /* a sum of four: bell-shaped enough, sigma 3 */
        uint64_t r = td_bench_random();
        float sum = (float)(r & 0xffff) + (float)(r >> 16 & 0xffff) + (float)(r >> 32 & 0xffff) +
                    (float)(r >> 48);
        b->logits[i] = sum * (3 * 1.7320508f / 65536) - 10.392305f;
    }
    for (int32_t i = 0; i < b->n_most_tokens; i++)
        b->tokens[i] = (int32_t)(td_bench_random() % vocab);
    if ((s = td_sampler_create(v, &b->sampler, err))) return s;
    if ((s = d->alloc(n * vocab * sizeof *b->logits, "logits", (void **)&b->device_logits, err)))
        return s;
    if ((s = d->alloc(n * sizeof *b->rows, "rows", (void **)&b->device_rows, err))) return s;
    if ((s = d->alloc(n * sizeof *b->results, "results", (void **)&b->device_results, err)))
        return s;
    if ((s = d->alloc(d->sample_scratch_bytes(max_rows, v), "the sampler's scratch", &b->scratch,
                      err)))
        return s;
    if ((s = d->alloc_pinned(n * sizeof *b->rows, "rows", (void **)&b->rows, err))) return s;
    if ((s = d->alloc_pinned(n * sizeof *b->results, "results", (void **)&b->results, err)))
        return s;
    if ((s = d->alloc_pinned(b->payload.bytes, "tokens", (void **)&b->payload.base, err))) return s;
    if ((s = d->sample_clear(b->scratch, max_rows, v, err))) return s;
    return d->upload(b->device_logits, b->logits, n * vocab * sizeof *b->logits, err);
}

static void bed_close(struct bed *b)
{
    d->release_pinned(b->payload.base);
    d->release_pinned(b->results);
    d->release_pinned(b->rows);
    d->release(b->scratch);
    d->release(b->device_results);
    d->release(b->device_rows);
    d->release(b->device_logits);
    td_sampler_destroy(b->sampler);
    free(b->tokens);
    free(b->logits);
}

static td_status steps(struct bed *b, int32_t n_rows, uint32_t features, uint64_t key,
                       int64_t n_steps, struct td_err *err)
{
    struct td_sample_args a = {.logits = b->device_logits,
                               .logits_stride = cfg.vocab,
                               .vocab = (int32_t)cfg.vocab,
                               .n_rows = n_rows,
                               .features = features,
                               .rows = b->device_rows,
                               .results = b->device_results,
                               .scratch = b->scratch};
    for (int64_t i = 0; i < n_steps; i++) {
        if (d->step_begin(key)) {
            d->put(b->device_rows, b->rows, (size_t)n_rows * sizeof *b->rows);
            d->sample(&a);
            d->get(b->results, b->device_results, (size_t)n_rows * sizeof *b->results);
        }
        td_status s = d->step_end(err);
        if (s) return s;
    }
    return d->wait(err);
}

static td_status line(struct bed *b, int which, int32_t n_rows, double rate, struct td_err *err)
{
    uint32_t features = 0;
    uint64_t key = ((uint64_t)n_rows << 8 | (uint64_t)which) + 1;
    struct td_sampling s = lines[which].s;
    td_status st;

    b->payload.used = 0;
    for (int32_t i = 0; i < n_rows; i++) {
        s.seed = (uint64_t)i;
        st = td_sample_pack(&s, b->tokens, lines[which].n_tokens, lines[which].n_tokens / 2, i,
                            &b->payload, &b->rows[i], &features);
        if (st) return td_fail(err, st, "%s: the payload is too small", lines[which].name);
    }
    if ((st = steps(b, n_rows, features, key, 2, err))) return st;
    for (int32_t i = 0; i < n_rows && i < 4; i++) {
        struct td_sampled want = {0}, got = {0};
        s.seed = (uint64_t)i;
        st = td_sample(b->sampler, &s, b->logits + (size_t)i * (size_t)cfg.vocab, b->tokens,
                       lines[which].n_tokens, lines[which].n_tokens / 2, &want);
        if (st || td_sample_unpack(&b->results[i], &got) || memcmp(&want, &got, sizeof want))
            return td_fail(err, TD_ERR_INTERNAL,
                           "%s, row %d: token %d logprob %.9g, td_sample says %d, %.9g",
                           lines[which].name, (int)i, (int)got.token, (double)got.logprob,
                           (int)want.token, (double)want.logprob);
    }
    for (int64_t i = 0; i < cfg.repeats; i++) {
        uint64_t t0 = td_now_ns();
        if ((st = steps(b, n_rows, features, key, cfg.burst, err))) return st;
        samples[i] = (double)(td_now_ns() - t0) * 1e-9 / (double)cfg.burst;
    }
    struct td_bench_timing t = td_bench_timing_of(samples, cfg.repeats);
    double step_s = t.median_s, bytes = (double)n_rows * (double)cfg.vocab * 4;
    printf("\"%s\",%d,%lld,%.2f,%.1f,%.0f,%.2f,%.3f\n", lines[which].name, (int)n_rows,
           (long long)cfg.vocab, step_s * 1e6, t.spread * 100, bytes, bytes / rate * 1e6,
           bytes / rate / step_s);
    return TD_OK;
}

int td_bench_cuda_sample(int argc, char **argv)
{
    static const char program[] = "tandem-bench cuda-sample";
    struct td_err err = {0};
    struct bed b = {0};
    size_t n_positional = 0;
    const struct td_ops *ops = NULL;
    double rate = 0;
    if (td_options_load(options, &cfg, program,
                        "measures the device's sampler beside the time its logits take to read",
                        argc, argv, NULL, 0, &n_positional, &err))
        return td_die(program, &err);
    struct td_device_config device = {
        .index = (int32_t)cfg.index, .deterministic = true, .library = cfg.library};
    if (td_device_open(&device, &ops, &err)) return td_die(program, &err);
    d = ops->device;
    td_status s = td_bench_copy_rate(d, cfg.copy_bytes, cfg.repeats, cfg.copy_gbs, &rate, &err);
    if (!s) s = bed_open(&b, &err);
    if (!s)
        printf("# %s%s, copy %.1f GB/s, median of %lld bursts of %lld steps\n", d->info.name,
               d->info.is_emulated ? " (emulated: times mean nothing)" : "", rate * 1e-9,
               (long long)cfg.repeats, (long long)cfg.burst);
    if (!s) printf("case,rows,vocab,step_us,spread_percent,logit_bytes,floor_us,share\n");
    for (int i = 0; !s && i < LEN(lines); i++)
        for (int64_t n = 1; !s && n <= cfg.max_rows; n *= 4)
            if (strstr(lines[i].name, cfg.only)) s = line(&b, i, (int32_t)n, rate, &err);
    bed_close(&b);
    td_device_close(ops);
    return s ? td_die(program, &err) : 0;
}
