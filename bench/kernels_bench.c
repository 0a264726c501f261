/* kernels_bench.c - tandem-bench kernels: how much of this machine the kernels use, floors measured
 * in the same run.
 *
 * Floors (per number of threads): f32 multiply-add peak; bf16 -> f32 widening + multiply-add, a
 * register tile from L1; the dot product of bf16 pairs; that of tiles; that of bytes; reading
 * memory. Then GEMM at
 * the shapes of two Llamas (1.1 B and 110 M parameters) and attention. The floor of a product is
 * the larger of its bytes over read bandwidth and its operations over the faster of the two bf16
 * peaks (f32, int4, nf4 and fp8 weights: the plain peak; blocks and w8a8: the integer peak, without
 * what the scales cost); attention's operations count over the plain peak; `share` is floor time
 * over measured time. Weights are copied until they fill --memory and taken in turn, so that no
 * cache holds what a model would read from memory. Each figure is the median of --repeats calls of
 * the whole entry on the real thread pool (prepare, barrier, product), beside the spread (half the
 * distance of the quartiles, in % of the median). Foreign load: CPU time that others took during
 * the run; above a few percent, run again. */
#include <immintrin.h>
#include <math.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bench/bench.h"
#include "common/base/clock.h"
#include "common/base/mem.h"
#include "common/base/options.h"
#include "common/base/random.h"
#include "common/base/thread_pool.h"
#include "kernels/cpu/tile_amx.h"
#include "kernels/ops.h"
#include "kernels/scaled.h"

struct bench_config {
    const char *isa, *only, *dtype, *kv_dtype;
    int64_t repeats, max_threads;
    uint64_t memory;
    bool json, best, cpu_time;
};

// clang-format off
static const struct td_option options[] = {
    {"isa", TD_OPT_ENUM, "best", 0, 0, "best|amx|avx512bf16|avx512|avxvnni|avx2|ref",
     offsetof(struct bench_config, isa), "Table to measure."},
    {"only", TD_OPT_STR, "", 0, 0, NULL, offsetof(struct bench_config, only),
     "Only lines whose name contains this text (floors always)."},
    {"dtype", TD_OPT_ENUM, "bf16", 0, 0,
     "bf16|f32|q8_0|q4_0|q4_1|q5_0|q5_1|q2_k|q3_k|q4_k|q5_k|q6_k|iq4_nl|iq4_xs|mxfp4|int4|nf4|fp8|"
     "w8a8",
     offsetof(struct bench_config, dtype),
     "Weights; KV cache too if bf16 or f32, else that is bf16. int4: 128 a group, with zeros, as "
     "GPTQ and AWQ; nf4: 64 a group; fp8, w8a8: a scale for each row."},
    {"kv_dtype", TD_OPT_ENUM, "auto", 0, 0, "auto|f32|bf16|int8|fp8",
     offsetof(struct bench_config, kv_dtype), "KV cache; auto: by dtype."},
    {"repeats", TD_OPT_I64, "15", 3, 1000, NULL, offsetof(struct bench_config, repeats),
     "Timed calls per line."},
    {"max_threads", TD_OPT_I64, "2", 1, 256, NULL, offsetof(struct bench_config, max_threads),
     "Measure 1, 2, 4, ... threads up to this."},
    {"memory", TD_OPT_SIZE, "1GiB", 64.0 * 1048576, 1e12, NULL,
     offsetof(struct bench_config, memory),
     "Weights in turn; more than any cache."},
    {"best", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(struct bench_config, best),
     "Fastest call instead of the median, floors too: for a machine that others use."},
    {"cpu_time", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(struct bench_config, cpu_time),
     "The calling thread's CPU time instead of the wall's: one thread only, for a machine that "
     "others use."},
    {"json", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(struct bench_config, json),
     "One JSON object per line instead of a table."},
    {NULL, TD_OPT_BOOL, NULL, 0, 0, NULL, 0, NULL},
};
// clang-format on

static struct bench_config cfg;
static const struct td_ops *ops;
static struct td_thread_pool *pool;
static int n_threads;
static struct td_arena arena; /* weights in turn, KV cache */

/* --- timing ----------------------------------------------------------------------------------- */

struct timing {
    double median_s, spread;
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static struct timing timing_of(double *s, int n)
{
    qsort(s, (size_t)n, sizeof *s, by_value);
    return (struct timing){cfg.best ? s[0] : s[n / 2], (s[3 * n / 4] - s[n / 4]) / 2 / s[n / 2]};
}

static uint64_t now_ns(void)
{
    if (!cfg.cpu_time) return td_now_ns();
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * TD_NS_PER_S + (uint64_t)t.tv_nsec;
}

/* fn(ctx, part, n_parts) on the pool; `before` (may be NULL) runs outside the clock. */
static struct timing measure(td_part_fn fn, void (*before)(void *), void *ctx)
{
    static double s[1000];
    int n = (int)cfg.repeats;
    for (int i = -2; i < n; i++) {
        if (before) before(ctx);
        uint64_t t0 = now_ns();
        td_thread_pool_run(pool, fn, ctx);
        if (i >= 0) s[i] = (double)(now_ns() - t0) * 1e-9;
    }
    return timing_of(s, n);
}

/* CPU seconds of the machine that were not idle, and our own. */
static void cpu_seconds(double *busy, double *own)
{
    unsigned long long v[8] = {0};
    FILE *f = fopen("/proc/stat", "r");
    if (f) {
        if (fscanf(f, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &v[0], &v[1], &v[2], &v[3],
                   &v[4], &v[5], &v[6], &v[7]) != 8)
            v[0] = 0;
        fclose(f);
    }
    *busy = (double)(v[0] + v[1] + v[2] + v[5] + v[6] + v[7]) / (double)sysconf(_SC_CLK_TCK);
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    *own = (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* --- floors ----------------------------------------------------------------------------------- */

static struct {
    double fma, bf16, dot, read; /* FLOP/s, FLOP/s, OP/s, B/s */
} peak;

static _Thread_local volatile float sink;
static int64_t floor_reps;

#define ALL_12(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

__attribute__((target("avx512f"))) static void fma_512(void *ctx, int part, int n_parts)
{
    (void)ctx, (void)part, (void)n_parts;
    __m512 a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(0.5f);
#define DECLARE(i)                                                                                 \
    __m512 x##i = _mm512_set1_ps((float)i),                                                        \
           y##i = _mm512_set1_ps((float)i + 0.5f); /* alike, the compiler would merge them */
    ALL_12(DECLARE)
    for (int64_t n = 0; n < floor_reps; n++) {
#define STEP(i) x##i = _mm512_fmadd_ps(x##i, b, a), y##i = _mm512_fmadd_ps(y##i, b, a);
        ALL_12(STEP)
    }
#define SUM(i) a = _mm512_add_ps(a, _mm512_add_ps(x##i, y##i));
    ALL_12(SUM)
    sink = _mm512_reduce_add_ps(a);
#undef DECLARE
#undef STEP
#undef SUM
}

/* 12 x 32 outputs, k = 256: a 16 KiB panel of bf16 and 12 KiB of f32, both in L1 */
__attribute__((target("avx512f"))) static void widen_fma_512(void *ctx, int part, int n_parts)
{
    (void)ctx, (void)part, (void)n_parts;
    alignas(64) static _Thread_local uint16_t panel[256 * 32];
    alignas(64) static _Thread_local float x[256 * 12];
    const __m512i high = _mm512_set1_epi32((int)0xffff0000u);
#define DECLARE(i) __m512 x##i = _mm512_setzero_ps(), y##i = x##i;
    ALL_12(DECLARE)
    for (int64_t n = 0; n < floor_reps; n++)
        for (int k = 0; k < 256; k++) {
            __m512i line = _mm512_load_si512(panel + 32 * k);
            __m512 lo = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16)),
                   hi = _mm512_castsi512_ps(_mm512_and_si512(line, high));
            const float *xk = x + 12 * k;
#define STEP(i)                                                                                    \
    {                                                                                              \
        __m512 v = _mm512_set1_ps(xk[i]);                                                          \
        x##i = _mm512_fmadd_ps(v, lo, x##i);                                                       \
        y##i = _mm512_fmadd_ps(v, hi, y##i);                                                       \
    }
            ALL_12(STEP)
        }
    __m512 a = _mm512_setzero_ps();
#define SUM(i) a = _mm512_add_ps(a, _mm512_add_ps(x##i, y##i));
    ALL_12(SUM)
    sink = _mm512_reduce_add_ps(a);
#undef DECLARE
#undef STEP
#undef SUM
}

__attribute__((target("avx2,fma"))) static void fma_256(void *ctx, int part, int n_parts)
{
    (void)ctx, (void)part, (void)n_parts;
    __m256 a = _mm256_set1_ps(1.0f), b = _mm256_set1_ps(0.5f);
#define DECLARE(i) __m256 x##i = _mm256_set1_ps((float)i);
    ALL_12(DECLARE)
    for (int64_t n = 0; n < floor_reps; n++) {
#define STEP(i) x##i = _mm256_fmadd_ps(x##i, b, a);
        ALL_12(STEP)
    }
#define SUM(i) a = _mm256_add_ps(a, x##i);
    ALL_12(SUM)
    sink = _mm256_cvtss_f32(a);
#undef DECLARE
#undef STEP
#undef SUM
}

__attribute__((target("avx512f,avx512vnni"))) static void dot_512(void *ctx, int part, int n_parts)
{
    (void)ctx, (void)part, (void)n_parts;
    __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
#define DECLARE(i) __m512i x##i = _mm512_set1_epi32(i);
    ALL_12(DECLARE)
    for (int64_t n = 0; n < floor_reps; n++) {
#define STEP(i) x##i = _mm512_dpbusd_epi32(x##i, a, b);
        ALL_12(STEP)
    }
#define SUM(i) a = _mm512_add_epi32(a, x##i);
    ALL_12(SUM)
    sink = (float)_mm512_reduce_add_epi32(a);
#undef DECLARE
#undef STEP
#undef SUM
}

__attribute__((target("avx512f,avx512bf16"))) static void dot_bf16_512(void *ctx, int part,
                                                                       int n_parts)
{
    (void)ctx, (void)part, (void)n_parts;
    __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f00), b = (__m512bh)_mm512_set1_epi16(0x3e80);
#define DECLARE(i) __m512 x##i = _mm512_set1_ps((float)i);
    ALL_12(DECLARE)
    for (int64_t n = 0; n < floor_reps; n++) {
#define STEP(i) x##i = _mm512_dpbf16_ps(x##i, a, b);
        ALL_12(STEP)
    }
    __m512 sum = _mm512_setzero_ps();
#define SUM(i) sum = _mm512_add_ps(sum, x##i);
    ALL_12(SUM)
    sink = _mm512_reduce_add_ps(sum);
#undef DECLARE
#undef STEP
#undef SUM
}

/* Tiles of AMX, full ones: 4 of sums, 2 of rows and 2 of weights, none loaded. */
__attribute__((target("avx512f,amx-tile,amx-bf16"))) static void tile_dot_bf16(void *ctx, int part,
                                                                               int n_parts)
{
    (void)ctx, (void)part, (void)n_parts;
    tiles_begin(16);
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    TILE_ZERO(4);
    TILE_ZERO(5);
    TILE_ZERO(6);
    TILE_ZERO(7);
    for (int64_t n = 0; n < floor_reps; n++) {
        TILE_DOT_BF16(0, 4, 6);
        TILE_DOT_BF16(1, 4, 7);
        TILE_DOT_BF16(2, 5, 6);
        TILE_DOT_BF16(3, 5, 7);
    }
    tiles_end();
}

/* vpmaddubsw, vpmaddwd and the addition of one line of bytes */
__attribute__((target("avx2"))) static void dot_256(void *ctx, int part, int n_parts)
{
    (void)ctx, (void)part, (void)n_parts;
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5), one = _mm256_set1_epi16(1);
#define DECLARE(i) __m256i x##i = _mm256_set1_epi32(i);
    ALL_12(DECLARE)
    for (int64_t n = 0; n < floor_reps; n++) {
#define STEP(i)                                                                                    \
    x##i = _mm256_add_epi32(                                                                       \
        x##i, _mm256_madd_epi16(_mm256_maddubs_epi16(a, _mm256_xor_si256(b, x##i)), one));
        ALL_12(STEP)
    }
#define SUM(i) a = _mm256_add_epi32(a, x##i);
    ALL_12(SUM)
    sink = (float)_mm256_extract_epi32(a, 0);
#undef DECLARE
#undef STEP
#undef SUM
}

/* 6 x 16 outputs, k = 256 */
__attribute__((target("avx2,fma"))) static void widen_fma_256(void *ctx, int part, int n_parts)
{
    (void)ctx, (void)part, (void)n_parts;
    alignas(64) static _Thread_local uint16_t panel[256 * 16];
    alignas(64) static _Thread_local float x[256 * 6];
    const __m256i high = _mm256_set1_epi32((int)0xffff0000u);
#define ALL_6(X) X(0) X(1) X(2) X(3) X(4) X(5)
#define DECLARE(i) __m256 x##i = _mm256_setzero_ps(), y##i = x##i;
    ALL_6(DECLARE)
    for (int64_t n = 0; n < floor_reps; n++)
        for (int k = 0; k < 256; k++) {
            __m256i line = _mm256_load_si256((const __m256i *)(panel + 16 * k));
            __m256 lo = _mm256_castsi256_ps(_mm256_slli_epi32(line, 16)),
                   hi = _mm256_castsi256_ps(_mm256_and_si256(line, high));
            const float *xk = x + 6 * k;
#define STEP(i)                                                                                    \
    {                                                                                              \
        __m256 v = _mm256_set1_ps(xk[i]);                                                          \
        x##i = _mm256_fmadd_ps(v, lo, x##i);                                                       \
        y##i = _mm256_fmadd_ps(v, hi, y##i);                                                       \
    }
            ALL_6(STEP)
        }
    __m256 a = _mm256_setzero_ps();
#define SUM(i) a = _mm256_add_ps(a, _mm256_add_ps(x##i, y##i));
    ALL_6(SUM)
    sink = _mm256_cvtss_f32(a);
#undef DECLARE
#undef STEP
#undef SUM
}

/* Each part reads its contiguous share of the arena, as four streams: one leaves a tenth of the
 * bandwidth unused. */
__attribute__((target("avx2"))) static void read_all(void *ctx, int part, int n_parts)
{
    (void)ctx;
    size_t stream = arena.bytes / 4096 / (size_t)n_parts / 4 * 4096;
    __m256i s[8];
    for (int i = 0; i < 8; i++) s[i] = _mm256_setzero_si256();
    const char *p = (const char *)arena.base + 4 * stream * (size_t)part;
    for (size_t at = 0; at < stream; at += 64)
        for (int i = 0; i < 4; i++) {
            const char *line = p + (size_t)i * stream + at;
            _mm_prefetch(line + 4096, _MM_HINT_T0);
            s[2 * i] = _mm256_xor_si256(s[2 * i], _mm256_load_si256((const __m256i *)line));
            s[2 * i + 1] =
                _mm256_xor_si256(s[2 * i + 1], _mm256_load_si256((const __m256i *)line + 1));
        }
    for (int i = 1; i < 8; i++) s[0] = _mm256_xor_si256(s[0], s[i]);
    sink = (float)_mm256_extract_epi32(s[0], 0);
}

static void emit(const char *name, const char *what, struct timing t, double value,
                 const char *unit, double share)
{
    if (cfg.json)
        printf("{\"threads\": %d, \"name\": \"%s\", \"what\": \"%s\", \"median_us\": %.2f, "
               "\"spread\": %.4f, \"value\": %.3f, "
               "\"unit\": \"%s\", "
               "\"share\": %.4f}\n",
               n_threads, name, what, t.median_s * 1e6, t.spread, value, unit, share);
    else if (share > 0)
        printf("%2d  %-26s %-18s %11.1f us  +-%4.1f %%  %8.1f %-8s %5.1f %% of floor\n", n_threads,
               name, what, t.median_s * 1e6, t.spread * 100, value, unit, share * 100);
    else
        printf("%2d  %-26s %-18s %11.1f us  +-%4.1f %%  %8.1f %-8s\n", n_threads, name, what,
               t.median_s * 1e6, t.spread * 100, value, unit);
    fflush(stdout);
}

static void floors(void)
{
    bool has_tiles = strcmp(ops->name, "amx") == 0,
         wide = has_tiles || strncmp(ops->name, "avx512", 6) == 0;
    double flop = wide ? 24 * 16 * 2 : 12 * 8 * 2;
    floor_reps = 4000000;
    struct timing t = measure(wide ? fma_512 : fma_256, NULL, NULL);
    peak.fma = flop * (double)floor_reps * n_threads / t.median_s;
    emit("floor", "f32 fma", t, peak.fma * 1e-9, "GFLOP/s", 0);
    floor_reps = 16000;
    t = measure(wide ? widen_fma_512 : widen_fma_256, NULL, NULL);
    peak.bf16 = flop * 256 * (double)floor_reps * n_threads / t.median_s;
    emit("floor", "bf16 widen + fma", t, peak.bf16 * 1e-9, "GFLOP/s", 0);
    if (wide && __builtin_cpu_supports("avx512bf16")) {
        floor_reps = 4000000;
        t = measure(dot_bf16_512, NULL, NULL);
        double dot = 12 * 64 * (double)floor_reps * n_threads / t.median_s;
        emit("floor", "bf16 dot", t, dot * 1e-9, "GFLOP/s", 0);
        if (dot > peak.bf16) peak.bf16 = dot;
    }
    if (has_tiles) {
        floor_reps = 400000;
        t = measure(tile_dot_bf16, NULL, NULL);
        peak.bf16 = 4 * 16 * 16 * 64 * (double)floor_reps * n_threads / t.median_s;
        emit("floor", "bf16 tile dot", t, peak.bf16 * 1e-9, "GFLOP/s", 0);
    }
    bool vnni = strcmp(ops->name, "avx2") != 0 && __builtin_cpu_supports("avx512vnni");
    floor_reps = 4000000;
    t = measure(vnni ? dot_512 : dot_256, NULL, NULL);
    peak.dot = (vnni ? 12 * 64 * 2 : 12 * 32 * 2) * (double)floor_reps * n_threads / t.median_s;
    emit("floor", "int8 dot", t, peak.dot * 1e-9, "GOP/s", 0);
    t = measure(read_all, NULL, NULL);
    peak.read = (double)arena.bytes / t.median_s;
    emit("floor", "read memory", t, peak.read * 1e-9, "GB/s", 0);
}

/* --- products --------------------------------------------------------------------------------- */

static void *alloc(size_t bytes)
{
    struct td_arena a;
    struct td_err err;
    if (td_arena_create(bytes, 0, "bench", &a, &err)) exit(td_die("tandem-bench kernels", &err));
    return a.base; /* for the life of the process */
}

static void fill(float *x, size_t n)
{
    struct td_random random = {1};
    for (size_t i = 0; i < n; i++) x[i] = (float)(td_random_uniform(&random) - 0.5);
}

struct gemm_bench {
    struct td_gemm_args a;
    struct td_weight w;
    size_t weight_bytes;
    int n_copies, turn;
};

static void gemm_next(void *ctx)
{
    struct gemm_bench *b = ctx;
    b->turn = (b->turn + 1) % b->n_copies;
    b->w.data = (const char *)arena.base + (size_t)b->turn * b->weight_bytes;
}

static void gemm_run(void *ctx, int part, int n_parts)
{
    struct gemm_bench *b = ctx;
    const struct td_block_ops *coded = td_ops_blocks(ops, b->w.format);
    bool is_plain = b->w.format->dtype != 0;
    (is_plain ? ops->gemm_prepare : coded->gemm_prepare)(&b->a, part, n_parts);
    td_thread_pool_barrier(pool);
    (is_plain ? ops->gemm : coded->gemm)(&b->a, part, n_parts);
}

/* One of the scaled formats, of rows of n_in values; NULL for another name. Lives until the next
 * call. */
static const struct td_format *scaled_format(const char *name, int32_t n_in)
{
    static const struct {
        const char *name;
        struct td_scaled s;
        int32_t bits;
    } rows[] = {
        {"int4", {.kind = TD_SCALED_INT, .scale_type = TD_F16, .group = 128, .has_zeros = true}, 4},
        {"nf4", {.kind = TD_SCALED_TABLE, .scale_type = TD_F32, .group = 64, .table = {1, 2}}, 4},
        {"fp8", {.kind = TD_SCALED_E4M3, .x = TD_SCALED_X_ROW, .scale_type = TD_F32}, 8},
        {"w8a8", {.kind = TD_SCALED_I8, .x = TD_SCALED_X_ROW, .scale_type = TD_F32}, 8},
    };
    static struct td_format f;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (strcmp(rows[i].name, name) != 0) continue;
        f = (struct td_format){.name = rows[i].name, .block = n_in, .bits = rows[i].bits};
        f.scaled = rows[i].s;
        if (!f.scaled.group) f.scaled.group = n_in;
        f.scaled.n_groups = (n_in + f.scaled.group - 1) / f.scaled.group;
        f.block_bytes = (int32_t)td_scaled_row_bytes(&f.scaled, n_in);
        td_scaled_use_bf16(&f); /* as the loader does where a model computes in bf16 */
        return &f;
    }
    return NULL;
}

/* The format that --dtype names, for rows of n_in values. */
static const struct td_format *weight_format(int32_t n_in)
{
    for (uint32_t i = 0; i < 64; i++) {
        const struct td_format *f = td_format_of_gguf(i);
        if (f && strcasecmp(f->name, cfg.dtype) == 0) return f;
    }
    return scaled_format(cfg.dtype, n_in);
}

/* A matrix of blocks, for packing: the same 64 rows again and again. */
struct pack_bench {
    const struct td_format *format;
    const uint8_t *rows;
    int32_t n_out, n_in;
};

static void pack_run(void *ctx, int part, int n_parts)
{
    const struct pack_bench *b = ctx;
    for (int32_t r = part * 64; r < b->n_out; r += n_parts * 64)
        td_ops_blocks(ops, b->format)
            ->pack(arena.base, b->n_out, b->n_in, b->format, b->rows, r,
                   b->n_out - r < 64 ? b->n_out - r : 64);
}

/* Packs random blocks whose scales are small numbers, and says how fast. */
static void pack_blocks(const char *name, const struct td_format *f, int32_t n_out, int32_t n_in)
{
    static uint8_t *rows;
    size_t bytes = td_format_bytes(f, 64 * (int64_t)n_in);
    if (!rows) rows = alloc(64u * 5632 * 5);
    uint64_t s = 1;
    for (size_t i = 0; i < bytes; i++) rows[i] = (uint8_t)(td_random_step(&s) >> 57);
    for (size_t i = 0; i < 64 && f->scaled.kind; i++) {
        struct td_scaled_row r = td_scaled_row_at(f, rows + i * (size_t)f->block_bytes);
        for (int32_t g = 0; g < f->scaled.n_groups; g++) r.scales[g] = 0.001f;
    }
    struct pack_bench b = {f, rows, n_out, n_in};
    struct timing t = measure(pack_run, NULL, &b);
    emit(name, "pack", t, (double)td_format_bytes(f, (int64_t)n_out * n_in) / t.median_s * 1e-9,
         "GB/s", 0);
}

static void pack_plain(enum td_dtype dtype, int32_t n_out, int32_t n_in)
{
    static float *row;
    if (!row) row = alloc(64u * 5632 * 4);
    fill(row, 64u * (size_t)n_in);
    for (int32_t r = 0; r < n_out; r += 64)
        ops->pack(arena.base, n_out, n_in, dtype, row, TD_F32, r, n_out - r < 64 ? n_out - r : 64);
}

static void gemm_shape(const char *model, const char *layer, int32_t n_out, int32_t n_in)
{
    static const int32_t ms[] = {1, 2, 4, 16, 64, 512};
    static void *x, *y, *scratch;
    if (!x)
        x = alloc(512u * 5632 * 4), y = alloc(512u * 32000 * 4), scratch = alloc(640u * 5632 * 4);
    const struct td_format *f = weight_format(n_in);
    char name[64];
    snprintf(name, sizeof name, "%s %s", model, layer);
    if (!strstr(name, cfg.only)) return;
    struct gemm_bench b = {.w = {.n_out = n_out, .n_in = n_in, .format = f},
                           .weight_bytes =
                               f->dtype ? ops->packed_bytes(n_out, n_in, f->dtype)
                                        : td_ops_blocks(ops, f)->packed_bytes(n_out, n_in, f)};
    fill(x, 512u * (size_t)n_in);
    if (f->dtype)
        pack_plain(f->dtype, n_out, n_in);
    else
        pack_blocks(name, f, n_out, n_in);
    b.n_copies = (int)(arena.bytes / b.weight_bytes);
    for (int i = 1; i < b.n_copies; i++)
        memcpy((char *)arena.base + (size_t)i * b.weight_bytes, arena.base, b.weight_bytes);
    b.a = (struct td_gemm_args){
        .w = &b.w, .x = x, .y = y, .scratch = scratch, .x_stride = n_in, .y_stride = n_out};
    for (size_t i = 0; i < sizeof ms / sizeof *ms; i++) {
        b.a.n_rows = ms[i];
        struct timing t = measure(gemm_run, gemm_next, &b);
        double flop = 2.0 * ms[i] * n_out * n_in,
               compute = flop / (f->dtype == TD_BF16 ? peak.bf16
                                 : f->dtype || (f->scaled.kind && f->scaled.kind != TD_SCALED_I8)
                                     ? peak.fma
                                     : peak.dot);
        double memory = (double)b.weight_bytes / peak.read;
        char what[32];
        snprintf(what, sizeof what, "m=%d", ms[i]);
        if (memory > compute)
            emit(name, what, t, (double)b.weight_bytes / t.median_s * 1e-9, "GB/s",
                 memory / t.median_s);
        else
            emit(name, what, t, flop / t.median_s * 1e-9, f->dtype ? "GFLOP/s" : "GOP/s",
                 compute / t.median_s);
    }
}

/* --- attention -------------------------------------------------------------------------------- */

static void attn_run(void *ctx, int part, int n_parts) { ops->attn(ctx, part, n_parts); }

/* Random K and V in each of these blocks. */
static void fill_blocks(const struct td_kv_view *kv, const int32_t *ids, int32_t n)
{
    static float *k;
    if (!k) k = alloc(4096u * 4);
    fill(k, 4096);
    for (int32_t i = 0; i < n; i++)
        for (int32_t t = 0; t < kv->block_size; t++) {
            int32_t pos = t, seq = 0;
            const int32_t *one = &ids[i];
            struct td_kv_store_args st = {.kv = *kv,
                                          .k = k,
                                          .v = k + 64,
                                          .positions = &pos,
                                          .row_seq = &seq,
                                          .block_tables = &one,
                                          .n_rows = 1};
            ops->kv_store(&st, 0, 1);
        }
}

/* The cache that the options name, in the arena; v_in_k as in attn_shape. */
static struct td_kv_view attn_cache(int32_t n_kv_heads, int32_t head_dim, int32_t v_in_k,
                                    int32_t block_size)
{
    static const enum td_dtype types[] = {TD_F32, TD_BF16, TD_INT8, TD_FP8};
    enum td_dtype dtype = strcmp(cfg.dtype, "f32") == 0 ? TD_F32 : TD_BF16;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(cfg.kv_dtype, td_dtype_name(types[i])) == 0) dtype = types[i];
    struct td_kv_view kv = {.base = arena.base,
                            .n_kv_heads = n_kv_heads,
                            .block_size = block_size,
                            .head_dim = head_dim,
                            .v_dim = v_in_k,
                            .v_in_k = v_in_k > 0,
                            .dtype = dtype};
    kv.block_bytes = (v_in_k ? 1 : 2) * n_kv_heads * td_kv_view_head_bytes(&kv);
    return kv;
}

/* n_seqs sequences of n_keys; each with n_new rows at its end. The blocks lie shuffled all over
 * the arena. v_in_k: V is so many first elements of K's rows (latent attention); 0: of its own. */
static void attn_shape(const char *model, int32_t n_heads, int32_t n_kv_heads, int32_t head_dim,
                       int32_t v_in_k, int32_t n_seqs, int32_t n_keys, int32_t n_new)
{
    enum { BLOCK = 16 };
    static int32_t positions[4096], row_seq[4096];
    static const int32_t *tables[64];
    char name[64], what[48];
    snprintf(name, sizeof name, "%s %s", model,
             n_new == 1 ? "attention decode" : "attention prefill");
    snprintf(what, sizeof what, "%dx%d of %d", n_seqs, n_new, n_keys);
    if (!strstr(name, cfg.only)) return;
    struct td_kv_view kv = attn_cache(n_kv_heads, head_dim, v_in_k, BLOCK);
    int32_t n_blocks = n_keys / BLOCK, n_all = (int32_t)(arena.bytes / (size_t)kv.block_bytes);
    int32_t *ids = calloc((size_t)(n_blocks * n_seqs), sizeof *ids);
    if (!ids) exit(1);
    for (int32_t i = 0; i < n_blocks * n_seqs; i++) ids[i] = (int32_t)((int64_t)i * 7919 % n_all);
    for (int32_t s = 0; s < n_seqs; s++) {
        tables[s] = ids + s * n_blocks;
        for (int32_t r = 0; r < n_new; r++)
            positions[s * n_new + r] = n_keys - n_new + r, row_seq[s * n_new + r] = s;
    }
    int32_t n_rows = n_seqs * n_new;
    size_t row = (size_t)n_heads * (size_t)head_dim;
    static float *q, *out;
    if (!q) q = alloc(512u * 16 * 576 * 4), out = alloc(512u * 16 * 576 * 4);
    fill(q, (size_t)n_rows * row);
    fill_blocks(&kv, ids, n_blocks * n_seqs);
    size_t per_part =
        (ops->attn_scratch_bytes(n_heads, n_kv_heads, head_dim, BLOCK) + 63) / 64 * 64;
    struct td_attn_args a = {.kv = kv,
                             .q = q,
                             .out = out,
                             .q_stride = (int64_t)row,
                             .out_stride = (int64_t)row,
                             .positions = positions,
                             .row_seq = row_seq,
                             .block_tables = tables,
                             .n_rows = n_rows,
                             .n_heads = n_heads,
                             .scale = 1.0f / sqrtf((float)head_dim),
                             .scratch = alloc(per_part * (size_t)n_threads),
                             .scratch_bytes_per_part = per_part};
    struct timing t = measure(attn_run, NULL, &a);
    double pairs =
        (double)n_seqs * ((double)n_new * (n_keys - n_new) + (double)n_new * (n_new + 1) / 2);
    double flop = 2 * pairs * n_heads * (head_dim + td_kv_view_v_dim(&kv)),
           bytes = (double)n_seqs * (double)(n_blocks * kv.block_bytes);
    if (flop / peak.fma > bytes / peak.read)
        emit(name, what, t, flop / t.median_s * 1e-9, "GFLOP/s", flop / peak.fma / t.median_s);
    else
        emit(name, what, t, bytes / t.median_s * 1e-9, "GB/s", bytes / peak.read / t.median_s);
    free(ids);
}

int td_bench_kernels(int argc, char **argv)
{
    struct td_err err = {0};
    size_t n_positional = 0;
    if (td_options_load(options, &cfg, "tandem-bench kernels",
                        "measures the kernels beside the machine's floors", argc, argv, NULL, 0,
                        &n_positional, &err))
        return td_die("tandem-bench kernels", &err);
    if (cfg.cpu_time) cfg.max_threads = 1;
    ops = strcmp(cfg.isa, "best") == 0 ? td_ops_best() : td_ops_by_name(cfg.isa);
    if (!ops || !td_ops_by_name("avx2")) {
        td_fail(&err, TD_ERR_UNSUPPORTED,
                "--isa %s: this CPU lacks it (the floors need at least avx2)", cfg.isa);
        return td_die("tandem-bench kernels", &err);
    }
    if (td_arena_create(cfg.memory, 0, "bench", &arena, &err))
        return td_die("tandem-bench kernels", &err);
    memset(arena.base, 1, arena.bytes);
    double busy0, own0, busy1, own1;
    uint64_t t0 = td_now_ns();
    cpu_seconds(&busy0, &own0);
    if (!cfg.json)
        printf("table %s, weights %s, %s of %lld calls\n", ops->name, cfg.dtype,
               cfg.best ? "best" : "median", (long long)cfg.repeats);
    for (n_threads = 1; n_threads <= cfg.max_threads; n_threads *= 2) {
        if (td_thread_pool_create(n_threads, NULL, 50, &pool, &err))
            return td_die("tandem-bench kernels", &err);
        floors();
        gemm_shape("1.1b", "qkv 2560x2048", 2560, 2048);
        gemm_shape("1.1b", "o 2048x2048", 2048, 2048);
        gemm_shape("1.1b", "gate,up 11264x2048", 11264, 2048);
        gemm_shape("1.1b", "down 2048x5632", 2048, 5632);
        gemm_shape("1.1b", "head 32000x2048", 32000, 2048);
        gemm_shape("110m", "qkv 2304x768", 2304, 768);
        gemm_shape("110m", "o 768x768", 768, 768);
        gemm_shape("110m", "gate,up 4096x768", 4096, 768);
        gemm_shape("110m", "down 768x2048", 768, 2048);
        gemm_shape("110m", "head 32000x768", 32000, 768);
        attn_shape("1.1b", 32, 4, 64, 0, 1, 512, 512);
        attn_shape("1.1b", 32, 4, 64, 0, 1, 2048, 2048);
        attn_shape("1.1b", 32, 4, 64, 0, 1, 2048, 1);
        attn_shape("1.1b", 32, 4, 64, 0, 16, 2048, 1);
        attn_shape("110m", 12, 12, 64, 0, 1, 512, 512);
        attn_shape("110m", 12, 12, 64, 0, 1, 2048, 1);
        attn_shape("110m", 12, 12, 64, 0, 16, 2048, 1);
        attn_shape("v2-lite", 16, 1, 576, 512, 1, 512, 512);
        attn_shape("v2-lite", 16, 1, 576, 512, 1, 2048, 1);
        attn_shape("v2-lite", 16, 1, 576, 512, 16, 2048, 1);
        td_thread_pool_destroy(pool);
    }
    cpu_seconds(&busy1, &own1);
    double wall = (double)(td_now_ns() - t0) * 1e-9, foreign = busy1 - busy0 - (own1 - own0);
    double share = foreign / (wall * (double)sysconf(_SC_NPROCESSORS_ONLN));
    printf(cfg.json ? "{\"name\": \"foreign load\", \"share\": %.4f}\n"
                    : "foreign load %.3f of the machine\n",
           share > 0 ? share : 0);
    td_arena_destroy(&arena);
    return 0;
}
