/* model_rig.h - a model with a KV arena of its own, for the tests of the forward pass:
 * sequences, shuffled block tables, chunks. */
#ifndef TD_TESTS_MODEL_RIG_H
#define TD_TESTS_MODEL_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"
#include "common/base/thread_pool.h"
#include "common/model/model.h"
#include "kernels/device.h"
#include "kernels/ops.h"

#define RIG_SEQS 8

struct rig {
    struct td_thread_pool *threads;
    struct td_model *model;
    struct td_workspace *ws;
    struct td_kv_layout kv;
    uint8_t *cache; /* the device's when the model is */
    size_t cache_bytes;
    int32_t *tables[RIG_SEQS]; /* blocks of a sequence are neither adjacent nor in order */
    int32_t max_rows, blocks_per_seq, vocab;
};

/* NaN in every slot. */
static inline void rig_cache_clear(const struct rig *g)
{
    const struct td_device *dev = td_model_device(g->model);
    struct td_err err = {0};
    uint8_t *nan = dev ? malloc(g->cache_bytes) : g->cache;
    assert_non_null(nan);
    memset(nan, 0xff, g->cache_bytes);
    if (!dev) return;
    if (dev->upload(g->cache, nan, g->cache_bytes, &err)) fail_msg("upload: %s", err.msg);
    free(nan);
}

/* A copy of the cache; the caller frees. */
static inline uint8_t *rig_cache_copy(const struct rig *g)
{
    const struct td_device *dev = td_model_device(g->model);
    struct td_err err = {0};
    uint8_t *copy = malloc(g->cache_bytes);
    assert_non_null(copy);
    if (!dev)
        memcpy(copy, g->cache, g->cache_bytes);
    else if (dev->download(copy, g->cache, g->cache_bytes, &err))
        fail_msg("download: %s", err.msg);
    return copy;
}

/* max_len: tokens per sequence. The cache starts as NaN: reading a slot that nobody wrote shows. */
static inline void rig_open(struct rig *g, const struct td_model_params *params, int n_threads,
                            int32_t block_size, int32_t max_rows, int32_t max_len)
{
    struct td_err err = {0};
    struct td_model_params p = *params;
    *g = (struct rig){.max_rows = max_rows};
    if (td_thread_pool_create(n_threads, NULL, 0, &g->threads, &err))
        fail_msg("threads: %s", err.msg);
    p.threads = g->threads;
    p.quiet = true;
    if (td_model_open(&p, &g->model, &err)) fail_msg("open: %s", err.msg);
    if (td_model_kv_layout(g->model, block_size, &g->kv, &err)) fail_msg("layout: %s", err.msg);
    if (td_workspace_create(g->model, max_rows, max_rows, &g->ws, &err))
        fail_msg("workspace: %s", err.msg);
    g->vocab = td_model_config(g->model)->vocab;
    g->blocks_per_seq = (max_len + block_size - 1) / block_size;
    int32_t n_blocks = g->blocks_per_seq * RIG_SEQS;
    g->cache_bytes = (size_t)n_blocks * g->kv.block_bytes;
    const struct td_device *dev = td_model_device(g->model);
    void *cache = NULL;
    if (dev && dev->alloc(g->cache_bytes, "kv", &cache, &err)) fail_msg("kv: %s", err.msg);
    g->cache = dev ? cache : malloc(g->cache_bytes);
    assert_non_null(g->cache);
    rig_cache_clear(g);
    for (int32_t s = 0; s < RIG_SEQS; s++) {
        g->tables[s] = calloc((size_t)g->blocks_per_seq, sizeof(int32_t));
        assert_non_null(g->tables[s]);
        for (int32_t i = 0; i < g->blocks_per_seq; i++)
            g->tables[s][i] = (g->blocks_per_seq - 1 - i) * RIG_SEQS + (s * 5 + 3) % RIG_SEQS;
    }
}

static inline void rig_close(struct rig *g)
{
    for (int32_t s = 0; s < RIG_SEQS; s++) free(g->tables[s]);
    const struct td_device *dev = td_model_device(g->model);
    if (dev)
        dev->release(g->cache);
    else
        free(g->cache);
    td_workspace_destroy(g->ws);
    td_model_close(g->model);
    td_thread_pool_destroy(g->threads);
}

/* Runs tokens [done, done + n) of sequence `seq` as one forward; logits of all n rows (or, with
 * last_only, of the last) to out. */
static inline void rig_chunk(struct rig *g, int32_t seq, const int32_t *tokens, int32_t done,
                             int32_t n, bool last_only, float *out)
{
    int32_t *positions = malloc((size_t)n * 4), *row_seq = malloc((size_t)n * 4),
            *wanted = malloc((size_t)n * 4);
    for (int32_t i = 0; i < n; i++) {
        positions[i] = done + i;
        row_seq[i] = 0;
        wanted[i] = last_only ? n - 1 : i;
    }
    const int32_t *table = g->tables[seq];
    struct td_forward_args a = {.tokens = tokens + done,
                                .positions = positions,
                                .row_seq = row_seq,
                                .block_tables = &table,
                                .n_rows = n,
                                .kv_base = g->cache,
                                .kv = &g->kv,
                                .logit_rows = wanted,
                                .n_logit_rows = last_only ? 1 : n};
    float *logits = NULL;
    assert_int_equal(td_model_forward(g->model, g->ws, &a, &logits), TD_OK);
    if (out) memcpy(out, logits, (size_t)a.n_logit_rows * (size_t)g->vocab * sizeof(float));
    free(positions);
    free(row_seq);
    free(wanted);
}

/* Logits of every position of a prompt, `chunk` tokens at a time, into malloc'd [n, vocab]. */
static inline float *rig_prompt(struct rig *g, int32_t seq, const int32_t *tokens, int32_t n,
                                int32_t chunk)
{
    float *out = malloc((size_t)n * (size_t)g->vocab * sizeof(float));
    assert_non_null(out);
    for (int32_t i = 0; i < n; i += chunk)
        rig_chunk(g, seq, tokens, i, n - i < chunk ? n - i : chunk, false,
                  out + (size_t)i * (size_t)g->vocab);
    return out;
}

static inline int32_t rig_argmax(const float *logits, int32_t n)
{
    int32_t best = 0;
    for (int32_t i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static inline double rig_log_sum_exp(const float *x, int32_t n)
{
    double max = (double)x[rig_argmax(x, n)], sum = 0;
    for (int32_t i = 0; i < n; i++) sum += exp((double)x[i] - max);
    return max + log(sum);
}

/* Kullback-Leibler divergence, in nats, of the distributions that logits p and q give. */
static inline double rig_kl(const float *p, const float *q, int32_t n)
{
    double lp = rig_log_sum_exp(p, n), lq = rig_log_sum_exp(q, n), sum = 0;
    for (int32_t i = 0; i < n; i++)
        sum += exp((double)p[i] - lp) * (((double)p[i] - lp) - ((double)q[i] - lq));
    return sum;
}

/* $TANDEM_DATA/NAME, or ../shared/data/NAME. */
static inline const char *rig_data_path(char *buf, size_t buf_bytes, const char *name)
{
    const char *root = getenv("TANDEM_DATA");
    snprintf(buf, buf_bytes, "%s/%s", root && *root ? root : "../shared/data", name);
    return buf;
}

/* A JSON array of integers as malloc'd int32. */
static inline int32_t *rig_ids(const json_t *list, int32_t *ret_n)
{
    int32_t n = (int32_t)json_array_size(list), *ids = malloc((size_t)n * 4 + 4);
    for (int32_t i = 0; i < n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    *ret_n = n;
    return ids;
}

#endif
