/* kernels_attn.h - what the tests of attention share: a paged cache of four sequences whose
 * slots hold NaN unless a row of the call may read them, and how far an attention in f32 may be
 * from ref. */
#ifndef TD_TESTS_KERNELS_ATTN_H
#define TD_TESTS_KERNELS_ATTN_H

#include "tests/unit/kernels_test.h"

enum { N_SEQS = 4, MAX_BLOCKS = 700, LEN_MAX = 1300, ROWS_MAX = 17500 };

/* A cache with N_SEQS sequences. The true K and V of every position are kept in f32 (k, v);
 * `expose` writes some into the cache. */
struct world {
    struct td_kv_view kv;
    int64_t kv_bytes;
    size_t cache_bytes;
    uint8_t *cache;
    int32_t tables[N_SEQS][MAX_BLOCKS], len[N_SEQS], n_heads, n_shared;
    const int32_t *table_ptrs[N_SEQS];
    float *k[N_SEQS], *v[N_SEQS], *q[N_SEQS]; /* [len][heads][head_dim], v: [..][v_dim] */
    int32_t sliding_window;
    float scale, cap; /* 0: none */
    float sinks[24];  /* of the first heads, when has_sinks */
    float slopes[24]; /* the same, when has_slopes */
    bool has_sinks, has_slopes;
};

/* Both on: scores are capped near their size, and a sink takes as much as a few keys. */
static inline void world_cap_and_sink(struct world *w)
{
    w->cap = 2.5f;
    w->has_sinks = true;
    assert_true(w->n_heads <= 24);
    for (int i = 0; i < 24; i++) w->sinks[i] = 1.5f * rng_normal();
}

/* None, and from 2^-8, with which all keys of these tests count, to 1, which leaves the last few.
 */
static inline void world_slopes(struct world *w)
{
    w->has_slopes = true;
    assert_true(w->n_heads <= 24);
    for (int i = 0; i < 24; i++) w->slopes[i] = i % 5 == 2 ? 0 : exp2f(-(float)rng_int(0, 8));
}

/* Elements of a row of the output. */
static inline int64_t world_out(const struct world *w)
{
    return (int64_t)w->n_heads * td_kv_view_v_dim(&w->kv);
}

/* v_in_k: V is the first v_dim elements of the rows of K, whose head is one. */
static inline void world_make_v(struct world *w, int32_t n_kv_heads, int32_t ratio,
                                int32_t head_dim, int32_t v_dim, bool v_in_k, int32_t block_size,
                                enum td_dtype dtype, const int32_t *len, int32_t window)
{
    memset(w, 0, sizeof *w);
    w->kv = (struct td_kv_view){.n_kv_heads = n_kv_heads,
                                .block_size = block_size,
                                .head_dim = head_dim,
                                .v_dim = v_dim,
                                .v_in_k = v_in_k,
                                .dtype = dtype};
    w->kv_bytes = n_kv_heads * td_kv_view_head_bytes(&w->kv);
    w->kv.block_bytes = td_kv_view_v_at(&w->kv) + n_kv_heads * td_kv_view_v_head_bytes(&w->kv) +
                        64 * rng_int(0, 2); /* other layers lie between */
    w->n_heads = n_kv_heads * ratio;
    w->sliding_window = window;
    w->scale = 1.0f / sqrtf((float)head_dim);
    int32_t n_blocks = 0, ids[N_SEQS * MAX_BLOCKS];
    for (int s = 0; s < N_SEQS; s++) n_blocks += (len[s] + block_size - 1) / block_size;
    for (int32_t i = 0; i < n_blocks; i++) ids[i] = i;
    for (int32_t i = n_blocks - 1; i > 0; i--) { /* shuffled */
        int32_t j = rng_int(0, i), x = ids[i];
        ids[i] = ids[j], ids[j] = x;
    }
    for (int s = 0, at = 0; s < N_SEQS; s++) {
        size_t row = (size_t)n_kv_heads * (size_t)head_dim,
               v_row = (size_t)n_kv_heads * (size_t)v_dim;
        w->len[s] = len[s];
        w->table_ptrs[s] = w->tables[s];
        for (int32_t b = 0; b < (len[s] + block_size - 1) / block_size; b++)
            w->tables[s][b] = ids[at++];
        w->k[s] = alloc_poisoned((size_t)len[s] * row * 4),
        rng_fill(w->k[s], (int64_t)((size_t)len[s] * row));
        w->v[s] = alloc_poisoned((size_t)len[s] * v_row * 4),
        rng_fill(w->v[s], (int64_t)((size_t)len[s] * v_row));
        for (int32_t p = 0; p < len[s] && v_in_k; p++)
            memcpy(w->v[s] + (size_t)p * v_row, w->k[s] + (size_t)p * row, v_row * 4);
        w->q[s] = alloc_poisoned((size_t)len[s] * row * (size_t)ratio * 4),
        rng_fill(w->q[s], (int64_t)((size_t)len[s] * row) * ratio);
    }
    /* sequence 1 starts with blocks of sequence 0 */
    w->n_shared = (len[0] < len[1] ? len[0] : len[1]) / block_size / 2;
    for (int32_t b = 0; b < w->n_shared; b++) w->tables[1][b] = w->tables[0][b];
    size_t shared = (size_t)w->n_shared * (size_t)block_size * (size_t)n_kv_heads * 4;
    memcpy(w->k[1], w->k[0], shared * (size_t)head_dim);
    memcpy(w->v[1], w->v[0], shared * (size_t)v_dim);
    w->cache_bytes = (size_t)(n_blocks * w->kv.block_bytes);
    w->cache = alloc_poisoned(w->cache_bytes);
    w->kv.base = w->cache;
}

static inline void world_make(struct world *w, int32_t n_kv_heads, int32_t ratio, int32_t head_dim,
                              int32_t block_size, enum td_dtype dtype, const int32_t *len,
                              int32_t window)
{
    world_make_v(w, n_kv_heads, ratio, head_dim, head_dim, false, block_size, dtype, len, window);
}

static inline void world_free(struct world *w)
{
    for (int s = 0; s < N_SEQS; s++) free(w->k[s]), free(w->v[s]), free(w->q[s]);
    free(w->cache);
}

/* Rows of one call. */
struct rows {
    int32_t n, seq[ROWS_MAX], pos[ROWS_MAX];
};
static inline void rows_add(struct rows *r, int32_t seq, int32_t from, int32_t n)
{
    for (int32_t i = 0; i < n; i++) r->seq[r->n] = seq, r->pos[r->n++] = from + i;
}

/* Everything NaN, then what the rows of this call may read: for each sequence from the window of
 * its first row to its last row. */
static inline void world_expose(struct world *w, const struct rows *rows)
{
    static struct rows all; /* large; only what was added to it is read */
    memset(w->cache, 0xff, w->cache_bytes);
    for (int32_t s = 0; s < N_SEQS; s++) {
        int32_t lo = INT32_MAX, hi = -1;
        for (int32_t r = 0; r < rows->n; r++) {
            if (rows->seq[r] != s || rows->pos[r] < 0) continue;
            int32_t p = rows->pos[r], first = w->sliding_window > 0 && p - w->sliding_window + 1 > 0
                                                  ? p - w->sliding_window + 1
                                                  : 0;
            lo = first < lo ? first : lo, hi = p > hi ? p : hi;
        }
        if (hi < 0) continue;
        all.n = 0;
        rows_add(&all, s, lo, hi - lo + 1);
        int64_t stride = (int64_t)w->kv.n_kv_heads * w->kv.head_dim,
                v_stride = (int64_t)w->kv.n_kv_heads * td_kv_view_v_dim(&w->kv);
        struct td_kv_store_args a = {.kv = w->kv,
                                     .k = w->k[s] + lo * stride,
                                     .v = w->kv.v_in_k ? NULL : w->v[s] + lo * v_stride,
                                     .k_stride = stride,
                                     .v_stride = v_stride,
                                     .positions = all.pos,
                                     .row_seq = all.seq,
                                     .block_tables = w->table_ptrs,
                                     .n_rows = all.n};
        td_ops_by_name("ref")->kv_store(&a, 0, 1);
    }
}

/* The bound is of k and v as they were before they became codes, which may be larger by half a
 * step: 1/254 of the row's largest in int8, 1/16 of the value in fp8. A code's scale is one more
 * rounding of the score, and one of the probability. */
static inline double coded_slack(enum td_dtype dtype)
{
    return dtype == TD_FP8 ? 1.2 : dtype == TD_INT8 ? 1.1 : 1.01;
}

/* A score is a chain of head_dim multiply-adds: off by at most (4 + 4 sqrt(d)) 2^-24 sum |q k|
 *     scale, and scaling to powers of two
 * adds 4 ulp of it. A probability is off by that much relatively, the output by twice that times
 *     the largest |v|, plus the
 * roundings of its own chain over n keys. A cap adds 2e-7 of itself to a score, a slope 4 ulp of
 * what it takes away: of keys that count, because the best score is at least -`most`, and one 24
 * below it has a probability below 2^-34. */
static inline double attn_tolerance(const struct world *w, int32_t seq, int32_t pos, int32_t head)
{
    int32_t d = w->kv.head_dim, v_dim = td_kv_view_v_dim(&w->kv),
            first = w->sliding_window > 0 && pos - w->sliding_window + 1 > 0
                        ? pos - w->sliding_window + 1
                        : 0;
    int32_t kv_head = head / (w->n_heads / w->kv.n_kv_heads);
    const float *q = w->q[seq] + ((int64_t)pos * w->n_heads + head) * d;
    double most = 0, v_max = 0, slope = w->has_slopes ? (double)w->slopes[head] : 0;
    for (int32_t j = first; j <= pos; j++) {
        const float *k = w->k[seq] + ((int64_t)j * w->kv.n_kv_heads + kv_head) * d,
                    *v = w->v[seq] + ((int64_t)j * w->kv.n_kv_heads + kv_head) * v_dim;
        double sum = 0;
        for (int32_t i = 0; i < d; i++) sum += fabs((double)q[i] * (double)k[i]);
        for (int32_t i = 0; i < v_dim; i++) v_max = fmax(v_max, fabs((double)v[i]));
        most = fmax(most, sum * (double)w->scale);
    }
    double taken = fmin(slope * (pos - first), 2 * most + 24);
    double scales = td_dtype_is_coded(w->kv.dtype) ? 1 : 0;
    return 0x1p-24 *
           (2 * (8 + scales + 4 * sqrt(d)) * most + 8 * taken + 16 * (double)w->cap + 8 + scales +
            4 * sqrt(pos - first + 1)) *
           v_max * coded_slack(w->kv.dtype);
}

#endif
