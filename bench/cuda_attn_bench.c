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

/* One shape's inputs, on the host and on the device. */
struct inputs {
    const struct shape *h;
    int32_t n_rows, n_blocks, n_blocks_all; /* n_blocks: of one sequence */
    size_t kv_bytes;                        /* of K, or V, of a block */
    size_t layer_bytes, n_layers, row;      /* row: floats of a row of q */
    double seen, keys;                      /* (row, key) pairs; keys that some row sees */
    int32_t *pos, *seq, *ids;
    void **ptrs, *plan;
    size_t plan_bytes, scratch_bytes;
    struct {
        void *cache, *q, *out, *positions, *row_seq, *tables, *table_ptrs, *scratch, *plan;
    } device;
};

static struct inputs inputs_size(const struct shape *h)
{
    int32_t bs = (int32_t)cfg.block;
    struct inputs in = {.h = h,
                        .n_rows = h->batch * h->q,
                        .n_blocks = (h->context + bs - 1) / bs,
                        .kv_bytes = (size_t)h->kv_heads * (size_t)bs * (size_t)h->head_dim * 2,
                        .n_layers = 1,
                        .row = (size_t)h->heads * (size_t)h->head_dim};
    in.n_blocks_all = h->batch * in.n_blocks;
    in.layer_bytes = 2 * in.kv_bytes * (size_t)in.n_blocks_all;
    while (in.n_layers * in.layer_bytes < cfg.l2_bytes && (int64_t)in.n_layers < cfg.entries)
        in.n_layers++;
    in.plan_bytes = ops->attn_plan_bytes(in.n_rows, h->kv_heads);
    in.scratch_bytes = ops->attn_scratch_bytes(h->heads, h->kv_heads, h->head_dim, bs);
    return in;
}

/* Positions and sequences of the rows, and the block ids in random order. */
static td_status inputs_deal(struct inputs *in, struct td_err *err)
{
    const struct shape *h = in->h;
    in->pos = malloc((size_t)in->n_rows * 4);
    in->seq = malloc((size_t)in->n_rows * 4);
    in->ids = malloc((size_t)in->n_blocks_all * 4);
    in->ptrs = malloc((size_t)h->batch * sizeof *in->ptrs);
    in->plan = malloc(in->plan_bytes);
    if (!in->pos || !in->seq || !in->ids || !in->ptrs || !in->plan)
        return td_fail(err, TD_ERR_NOMEM, "no memory for %d rows", (int)in->n_rows);
    for (int32_t b = 0; b < h->batch; b++)
        for (int32_t i = 0; i < h->q; i++) {
            int32_t p = h->context - h->q + i,
                    n = h->window > 0 && p + 1 > h->window ? h->window : p + 1;
            in->pos[b * h->q + i] = p, in->seq[b * h->q + i] = b;
            in->seen += n;
            in->keys += i == 0 ? n : 1;
        }
    for (int32_t i = 0; i < in->n_blocks_all; i++) in->ids[i] = i;
    for (int32_t i = in->n_blocks_all - 1; i > 0; i--) {
        int32_t j = (int32_t)(td_bench_random() % (uint64_t)(i + 1)), x = in->ids[i];
        in->ids[i] = in->ids[j], in->ids[j] = x;
    }
    return TD_OK;
}

/* Every row of q is the same random row. */
static td_status upload_q(struct inputs *in, struct td_err *err)
{
    td_status s = d->alloc((size_t)in->n_rows * in->row * 4, "q", &in->device.q, err);
    if (s) return s;
    float *q_row = malloc(in->row * 4);
    if (!q_row) return td_fail(err, TD_ERR_NOMEM, "no memory for a row");
    for (size_t i = 0; i < in->row; i++) q_row[i] = (float)(td_bench_random() >> 40) * 0x1p-23f - 1;
    for (int32_t r = 0; !s && r < in->n_rows; r++)
        s = d->upload((float *)in->device.q + (size_t)r * in->row, q_row, in->row * 4, err);
    free(q_row);
    return s;
}

static td_status inputs_upload(struct inputs *in, const uint8_t *noise, struct td_err *err)
{
    size_t rows_bytes = (size_t)in->n_rows * 4, ids_bytes = (size_t)in->n_blocks_all * 4,
           ptrs_bytes = (size_t)in->h->batch * sizeof *in->ptrs;
    td_status s =
        filled(in->n_layers * in->layer_bytes, noise, CHUNK, "KV", &in->device.cache, err);
    if (!s) s = upload_q(in, err);
    if (!s) s = d->alloc((size_t)in->n_rows * in->row * 4, "out", &in->device.out, err);
    if (!s) s = d->alloc(in->scratch_bytes, "scratch", &in->device.scratch, err);
    if (!s) s = filled(rows_bytes, in->pos, rows_bytes, "positions", &in->device.positions, err);
    if (!s) s = filled(rows_bytes, in->seq, rows_bytes, "sequences", &in->device.row_seq, err);
    if (!s) s = filled(ids_bytes, in->ids, ids_bytes, "block tables", &in->device.tables, err);
    for (int32_t b = 0; !s && b < in->h->batch; b++)
        in->ptrs[b] = (int32_t *)in->device.tables + (size_t)b * (size_t)in->n_blocks;
    if (!s)
        s = filled(ptrs_bytes, in->ptrs, ptrs_bytes, "block tables", &in->device.table_ptrs, err);
    if (s) return s;
    uint64_t grid;
    ops->attn_plan(&(struct td_attn_plan_args){.positions = in->pos,
                                               .row_seq = in->seq,
                                               .n_rows = in->n_rows,
                                               .n_heads = in->h->heads,
                                               .n_kv_heads = in->h->kv_heads},
                   in->plan, &grid);
    return filled(in->plan_bytes, in->plan, in->plan_bytes, "plan", &in->device.plan, err);
}

static void inputs_free(struct inputs *in)
{
    void *device[] = {in->device.plan,    in->device.table_ptrs, in->device.tables,
                      in->device.row_seq, in->device.positions,  in->device.scratch,
                      in->device.out,     in->device.q,          in->device.cache};
    for (int i = 0; i < LEN(device); i++) d->release(device[i]);
    free(in->pos), free(in->seq), free(in->ids), free(in->ptrs), free(in->plan);
}

static struct td_attn_args call_of(const struct inputs *in)
{
    const struct shape *h = in->h;
    return (struct td_attn_args){
        .kv = {.block_bytes = (int64_t)(2 * in->kv_bytes * in->n_layers),
               .n_kv_heads = h->kv_heads,
               .block_size = (int32_t)cfg.block,
               .head_dim = h->head_dim,
               .dtype = TD_BF16},
        .q = in->device.q,
        .out = in->device.out,
        .q_stride = (int64_t)in->row,
        .out_stride = (int64_t)in->row,
        .positions = in->device.positions,
        .row_seq = in->device.row_seq,
        .block_tables = in->device.table_ptrs,
        .n_rows = in->n_rows,
        .n_heads = h->heads,
        .scale = 0.088388347648f, /* 1 / sqrt(128): the time does not depend on the value */
        .sliding_window = h->window,
        .scratch = in->device.scratch,
        .scratch_bytes_per_part = in->scratch_bytes,
        .plan = in->plan,
        .device_plan = in->device.plan};
}

/* Seconds of one call in each of cfg.repeats graphs, into samples[]; two graphs before them are not
 * measured. */
static td_status measure(const struct inputs *in, uint64_t key, struct td_err *err)
{
    struct td_attn_args a = call_of(in);
    for (int64_t i = -2; i < cfg.repeats; i++) {
        uint64_t t0 = td_now_ns();
        if (d->step_begin(key))
            for (int64_t e = 0; e < cfg.entries; e++) {
                a.kv.base =
                    (uint8_t *)in->device.cache + 2 * in->kv_bytes * ((size_t)e % in->n_layers);
                ops->attn(&a, 0, 1);
            }
        td_status s = d->step_end(err);
        if (!s) s = d->wait(err);
        if (s) return s;
        if (i >= 0) samples[i] = (double)(td_now_ns() - t0) * 1e-9 / (double)cfg.entries;
    }
    return TD_OK;
}

static void print_line(const struct inputs *in, double rate)
{
    const struct shape *h = in->h;
    struct td_bench_timing timing = td_bench_timing_of(samples, cfg.repeats);
    double t = timing.median_s, bytes = in->keys * h->kv_heads * h->head_dim * 4 +
                                        (double)in->n_rows * (double)in->row * 8;
    double operations = 4 * in->seen * (double)in->row, memory_s = bytes / rate,
           tensor_s = cfg.peak_tflops > 0 ? operations / (cfg.peak_tflops * 1e12) : 0;
    double floor_s = memory_s > tensor_s ? memory_s : tensor_s;
    printf("%d,%d,%d,%d,%d,%d,%d,%d,%.2f,%.1f,%.3f,%.1f,%.2f,%.2f,%.3f\n", (int)h->batch, (int)h->q,
           (int)h->context, (int)h->heads, (int)h->kv_heads, (int)h->head_dim, (int)h->window,
           (int)cfg.block, t * 1e6, timing.spread * 100, bytes / t * 1e-12, operations / t * 1e-12,
           memory_s * 1e6, tensor_s * 1e6, floor_s / t);
    fflush(stdout);
}

/* A shape whose cache is larger than --max-bytes has no line. */
static td_status line(const struct shape *h, const uint8_t *noise, uint64_t key, double rate,
                      struct td_err *err)
{
    struct inputs in = inputs_size(h);
    if (in.n_layers * in.layer_bytes > cfg.max_bytes) return TD_OK;
    td_status s = inputs_deal(&in, err);
    if (!s) s = inputs_upload(&in, noise, err);
    if (!s) s = measure(&in, key, err);
    if (!s) print_line(&in, rate);
    inputs_free(&in);
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
