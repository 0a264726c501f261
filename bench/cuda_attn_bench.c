/* cuda_attn_bench.c - tandem-bench cuda-attn: the device's attention beside its floors.
 *
 * A line is `batch` sequences that all have `context` keys, of which the last `q` are this step's
 * rows: q = 1 is decode, q = context a whole prompt, anything between a chunk behind a prefix. The
 * cache is bf16, in blocks of `block` tokens dealt at random. The floor is the larger of two: every
 * byte of K and V that is seen read once (and q read and out written) at the rate of a large copy
 * on the device measured in the same run, bytes read and written; and four operations per seen
 * (row, key, head, dimension) at --peak-tflops, the rate of a large product on the device
 * (tandem-bench cuda; 0: that floor is left out).
 *
 * One recorded graph holds `entries` calls, each on another layer of the cache as long as that
 * makes the layers larger than L2 together; the median of `repeats` graphs, and half the
 * distance of the quartiles in % of it. tests/gpu/attn_compare.py puts the CSV beside other
 * kernels' times. Values are not checked here: cuda_attn_test does. On the emulated device the
 * times mean nothing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "bench/cuda_bench_common.h"
#include "common/base/options.h"

#define LEN(a) ((int)(sizeof(a) / sizeof *(a)))
enum { CHUNK = 1 << 22 };

struct bench_config {
    const char *library;
    int64_t index, batch, q, context, heads, kv_heads, head_dim, window, block, entries, repeats;
    uint64_t copy_bytes, l2_bytes, max_bytes;
    double copy_gbs, peak_tflops;
};

// clang-format off
static const struct td_option options[] = {
    {"library", TD_OPT_STR, "", 0, 0, NULL, offsetof(struct bench_config, library),
     "The device's library; empty: as for --device cuda."},
    {"index", TD_OPT_I64, "0", 0, 64, NULL, offsetof(struct bench_config, index),
     "Device, of the visible ones."},
    {"batch", TD_OPT_I64, "0", 0, 4096, NULL, offsetof(struct bench_config, batch),
     "Sequences, for one line of one's own; 0: the list."},
    {"q", TD_OPT_I64, "1", 1, 65536, NULL, offsetof(struct bench_config, q),
     "Rows of each sequence."},
    {"context", TD_OPT_I64, "4096", 1, 1 << 20, NULL, offsetof(struct bench_config, context),
     "Keys of each sequence, with its rows'."},
    {"heads", TD_OPT_I64, "32", 1, 256, NULL, offsetof(struct bench_config, heads), "Query heads."},
    {"kv_heads", TD_OPT_I64, "8", 1, 256, NULL, offsetof(struct bench_config, kv_heads),
     "KV heads."},
    {"head_dim", TD_OPT_I64, "128", 2, 256, NULL, offsetof(struct bench_config, head_dim),
     "Head size."},
    {"window", TD_OPT_I64, "0", 0, 1 << 20, NULL, offsetof(struct bench_config, window),
     "Sliding window; 0: none."},
    {"block", TD_OPT_I64, "16", 1, 256, NULL, offsetof(struct bench_config, block),
     "Tokens of a KV block."},
    {"entries", TD_OPT_I64, "32", 1, 1000, NULL, offsetof(struct bench_config, entries),
     "Calls of one graph."},
    {"repeats", TD_OPT_I64, "15", 3, TD_BENCH_REPEATS_MAX, NULL,
     offsetof(struct bench_config, repeats),
     "Graphs per line."},
    {"copy_bytes", TD_OPT_SIZE, "1GiB", 4096, 1e12, NULL, offsetof(struct bench_config, copy_bytes),
     "Size of the copy that gives the floor."},
    {"l2_bytes", TD_OPT_SIZE, "128MiB", 0, 1e12, NULL, offsetof(struct bench_config, l2_bytes),
     "Layers are added until together they are this large."},
    {"max_bytes", TD_OPT_SIZE, "48GiB", 1, 1e12, NULL, offsetof(struct bench_config, max_bytes),
     "Lines whose cache is larger are left out."},
    {"copy_gbs", TD_OPT_F64, "0", 0, 1e6, NULL, offsetof(struct bench_config, copy_gbs),
     "The floor's GB/s (1e9), read and written, of another run; 0: measure."},
    {"peak_tflops", TD_OPT_F64, "0", 0, 1e6, NULL, offsetof(struct bench_config, peak_tflops),
     "The other floor's 1e12 operations/s."},
    {NULL, TD_OPT_BOOL, NULL, 0, 0, NULL, 0, NULL},
};
// clang-format on

static struct bench_config cfg;
static const struct td_ops *ops;
static const struct td_device *d;
static double samples[TD_BENCH_REPEATS_MAX];

struct shape {
    int32_t batch, q, context, heads, kv_heads, head_dim, window;
};

/* Llama-3.1 8B and its rank of two, Qwen2.5-7B's ratio 7, heads of 64, all heads their own,
 * windows. */
static const struct shape shapes[] = {
    {1, 1, 1024, 32, 8, 128, 0},      {1, 1, 4096, 32, 8, 128, 0},
    {1, 1, 32768, 32, 8, 128, 0},     {8, 1, 4096, 32, 8, 128, 0},
    {16, 1, 2048, 32, 8, 128, 0},     {64, 1, 1024, 32, 8, 128, 0},
    {64, 1, 4096, 32, 8, 128, 0},     {64, 1, 8192, 32, 8, 128, 0},
    {64, 1, 4096, 16, 4, 128, 0},     {64, 1, 4096, 28, 4, 128, 0},
    {64, 1, 4096, 32, 8, 64, 0},      {16, 1, 4096, 32, 32, 128, 0},
    {64, 1, 8192, 32, 8, 128, 4096},  {1, 512, 512, 32, 8, 128, 0},
    {1, 1024, 1024, 32, 8, 128, 0},   {1, 2048, 2048, 32, 8, 128, 0},
    {1, 4096, 4096, 32, 8, 128, 0},   {1, 8192, 8192, 32, 8, 128, 0},
    {1, 16384, 16384, 32, 8, 128, 0}, {8, 1024, 1024, 32, 8, 128, 0},
    {1, 8192, 8192, 28, 4, 128, 0},   {1, 8192, 8192, 32, 8, 64, 0},
    {1, 8192, 8192, 32, 32, 128, 0},  {1, 8192, 8192, 32, 8, 128, 4096},
    {1, 512, 8192, 32, 8, 128, 0},    {1, 2048, 32768, 32, 8, 128, 0},
};

/* Device memory of `bytes`, filled by repeating `from`. */
static td_status filled(size_t bytes, const void *from, size_t from_bytes, const char *what,
                        void **ret_memory, struct td_err *err)
{
    td_status s = d->alloc(bytes, what, ret_memory, err);
    for (size_t at = 0; !s && at < bytes; at += from_bytes)
        s = d->upload((uint8_t *)*ret_memory + at, from,
                      bytes - at < from_bytes ? bytes - at : from_bytes, err);
    return s;
}

static td_status line(const struct shape *h, const uint8_t *noise, uint64_t key, double rate,
                      struct td_err *err)
{
    int32_t bs = (int32_t)cfg.block, n_rows = h->batch * h->q,
            n_blocks = (h->context + bs - 1) / bs, all = h->batch * n_blocks;
    size_t kv_bytes = (size_t)h->kv_heads * (size_t)bs * (size_t)h->head_dim * 2,
           layer = 2 * kv_bytes * (size_t)all, n_layers = 1,
           row = (size_t)h->heads * (size_t)h->head_dim;
    while (n_layers * layer < cfg.l2_bytes && (int64_t)n_layers < cfg.entries) n_layers++;
    void *cache = NULL, *q = NULL, *out = NULL, *positions = NULL, *row_seq = NULL, *tables = NULL,
         *table_ptrs = NULL, *scratch = NULL, *device_plan = NULL;
    if (n_layers * layer > cfg.max_bytes) return TD_OK;
    int32_t *pos = malloc((size_t)n_rows * 4), *seq = malloc((size_t)n_rows * 4),
            *ids = malloc((size_t)all * 4);
    void **ptrs = malloc((size_t)h->batch * sizeof *ptrs);
    size_t plan_bytes = ops->attn_plan_bytes(n_rows, h->kv_heads),
           scratch_bytes = ops->attn_scratch_bytes(h->heads, h->kv_heads, h->head_dim, bs);
    void *plan = malloc(plan_bytes);
    td_status s = pos && seq && ids && ptrs && plan
                      ? TD_OK
                      : td_fail(err, TD_ERR_NOMEM, "no memory for %d rows", (int)n_rows);
    if (s) goto out;
    double seen = 0, keys = 0; /* (row, key) pairs; keys that somebody sees */
    for (int32_t b = 0; b < h->batch; b++)
        for (int32_t i = 0; i < h->q; i++) {
            int32_t p = h->context - h->q + i,
                    n = h->window > 0 && p + 1 > h->window ? h->window : p + 1;
            pos[b * h->q + i] = p, seq[b * h->q + i] = b;
            seen += n;
            keys += i == 0 ? n : 1;
        }
    for (int32_t i = 0; i < all; i++) ids[i] = i;
    for (int32_t i = all - 1; i > 0; i--) {
        int32_t j = (int32_t)(td_bench_random() % (uint64_t)(i + 1)), x = ids[i];
        ids[i] = ids[j], ids[j] = x;
    }
    if ((s = filled(n_layers * layer, noise, CHUNK, "KV", &cache, err))) goto out;
    if ((s = d->alloc((size_t)n_rows * row * 4, "q", &q, err))) goto out;
    float *q_row = malloc(row * 4);
    if (!q_row) {
        s = td_fail(err, TD_ERR_NOMEM, "no memory for a row");
        goto out;
    }
    for (size_t i = 0; i < row; i++) q_row[i] = (float)(td_bench_random() >> 40) * 0x1p-23f - 1;
    for (int32_t r = 0; !s && r < n_rows; r++)
        s = d->upload((float *)q + (size_t)r * row, q_row, row * 4, err);
    free(q_row);
    if (s || (s = d->alloc((size_t)n_rows * row * 4, "out", &out, err)) ||
        (s = d->alloc(scratch_bytes, "scratch", &scratch, err)))
        goto out;
    if ((s = filled((size_t)n_rows * 4, pos, (size_t)n_rows * 4, "positions", &positions, err)))
        goto out;
    if ((s = filled((size_t)n_rows * 4, seq, (size_t)n_rows * 4, "sequences", &row_seq, err)))
        goto out;
    if ((s = filled((size_t)all * 4, ids, (size_t)all * 4, "block tables", &tables, err))) goto out;
    for (int32_t b = 0; b < h->batch; b++)
        ptrs[b] = (int32_t *)tables + (size_t)b * (size_t)n_blocks;
    if ((s = filled((size_t)h->batch * sizeof *ptrs, ptrs, (size_t)h->batch * sizeof *ptrs,
                    "block tables", &table_ptrs, err)))
        goto out;
    uint64_t grid;
    ops->attn_plan(&(struct td_attn_plan_args){.positions = pos,
                                               .row_seq = seq,
                                               .n_rows = n_rows,
                                               .n_heads = h->heads,
                                               .n_kv_heads = h->kv_heads},
                   plan, &grid);
    if ((s = filled(plan_bytes, plan, plan_bytes, "plan", &device_plan, err))) goto out;
    struct td_attn_args a = {.kv = {.block_bytes = (int64_t)(2 * kv_bytes * n_layers),
                                    .n_kv_heads = h->kv_heads,
                                    .block_size = bs,
                                    .head_dim = h->head_dim,
                                    .dtype = TD_BF16},
                             .q = q,
                             .out = out,
                             .q_stride = (int64_t)row,
                             .out_stride = (int64_t)row,
                             .positions = positions,
                             .row_seq = row_seq,
                             .block_tables = table_ptrs,
                             .n_rows = n_rows,
                             .n_heads = h->heads,
                             .scale = 0.088388347648f,
                             .sliding_window = h->window,
                             .scratch = scratch,
                             .scratch_bytes_per_part = scratch_bytes,
                             .plan = plan,
                             .device_plan = device_plan};
    for (int64_t i = -2; i < cfg.repeats; i++) {
        uint64_t t0 = td_now_ns();
        if (d->step_begin(key))
            for (int64_t e = 0; e < cfg.entries; e++) {
                a.kv.base = (uint8_t *)cache + 2 * kv_bytes * ((size_t)e % n_layers);
                ops->attn(&a, 0, 1);
            }
        if ((s = d->step_end(err)) || (s = d->wait(err))) goto out;
        if (i >= 0) samples[i] = (double)(td_now_ns() - t0) * 1e-9 / (double)cfg.entries;
    }
    struct td_bench_timing timing = td_bench_timing_of(samples, cfg.repeats);
    double t = timing.median_s,
           bytes = keys * h->kv_heads * h->head_dim * 4 + (double)n_rows * (double)row * 8;
    double operations = 4 * seen * (double)row, memory_s = bytes / rate,
           tensor_s = cfg.peak_tflops > 0 ? operations / (cfg.peak_tflops * 1e12) : 0;
    double floor_s = memory_s > tensor_s ? memory_s : tensor_s;
    printf("%d,%d,%d,%d,%d,%d,%d,%d,%.2f,%.1f,%.3f,%.1f,%.2f,%.2f,%.3f\n", (int)h->batch, (int)h->q,
           (int)h->context, (int)h->heads, (int)h->kv_heads, (int)h->head_dim, (int)h->window,
           (int)bs, t * 1e6, timing.spread * 100, bytes / t * 1e-12, operations / t * 1e-12,
           memory_s * 1e6, tensor_s * 1e6, floor_s / t);
    fflush(stdout);
out:
    d->release(device_plan), d->release(table_ptrs), d->release(tables), d->release(row_seq),
        d->release(positions);
    d->release(scratch), d->release(out), d->release(q), d->release(cache);
    free(pos), free(seq), free(ids), free(ptrs), free(plan);
    return s;
}

int td_bench_cuda_attn(int argc, char **argv)
{
    static const char program[] = "tandem-bench cuda-attn";
    struct td_err err = {0};
    size_t n_positional = 0;
    double rate = 0;
    if (td_options_load(options, &cfg, program, "measures the device's attention beside its floors",
                        argc, argv, NULL, 0, &n_positional, &err))
        return td_die(program, &err);
    struct td_device_config device = {
        .index = (int32_t)cfg.index, .deterministic = true, .library = cfg.library};
    if (td_device_open(&device, &ops, &err)) return td_die(program, &err);
    d = ops->device;
    uint16_t *noise = malloc(CHUNK);
    td_status s =
        noise ? td_bench_copy_rate(d, cfg.copy_bytes, cfg.repeats, cfg.copy_gbs, &rate, &err)
              : td_fail(&err, TD_ERR_NOMEM, "no memory for %d bytes of noise", CHUNK);
    for (size_t i = 0; !s && i < CHUNK / 2; i++)
        noise[i] = td_f32_to_bf16((float)(td_bench_random() >> 40) * 0x1p-23f - 1);
    struct shape own = {(int32_t)cfg.batch, (int32_t)cfg.q,        (int32_t)cfg.context,
                        (int32_t)cfg.heads, (int32_t)cfg.kv_heads, (int32_t)cfg.head_dim,
                        (int32_t)cfg.window};
    if (!s && own.batch > 0 &&
        (own.heads % own.kv_heads || own.q > own.context || own.head_dim % 2))
        s = td_fail(
            &err, TD_ERR_INVALID,
            "heads %d must be a multiple of kv-heads %d, q %d at most context %d, head-dim %d even",
            (int)own.heads, (int)own.kv_heads, (int)own.q, (int)own.context, (int)own.head_dim);
    if (!s) {
        printf("# %s%s, copy %.1f GB/s, peak %.1f TFLOP/s, median of %lld graphs of %lld calls\n",
               d->info.name, d->info.is_emulated ? " (emulated: times mean nothing)" : "",
               rate * 1e-9, cfg.peak_tflops, (long long)cfg.repeats, (long long)cfg.entries);
        printf("batch,q,context,heads,kv_heads,head_dim,window,block,us,spread_percent,tb_per_s,"
               "tflop_per_s,memory_floor_us,tensor_floor_us,share\n");
    }
    for (int i = 0; !s && i < (own.batch > 0 ? 1 : LEN(shapes)); i++)
        s = line(own.batch > 0 ? &own : &shapes[i], (const uint8_t *)noise, (uint64_t)i + 1, rate,
                 &err);
    free(noise);
    td_device_close(ops);
    return s ? td_die(program, &err) : 0;
}
