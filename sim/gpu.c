/* gpu.c - see gpu.h. */
#include "sim/gpu.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define BF16_BYTES 2
#define GEMMS 4 /* launches in a layer */
#define PASSES 4
#define ALL_REDUCES 2

td_status td_gpu_find(const char *name, const struct td_gpu **ret_gpu, struct td_err *err)
{
    char names[128] = "";
    for (const struct td_gpu *g = td_gpus; g->name; g++) {
        size_t n = strlen(names);
        if (!strcmp(g->name, name)) {
            *ret_gpu = g;
            return TD_OK;
        }
        snprintf(names + n, sizeof names - n, "%s%s", n ? ", " : "", g->name);
    }
    return td_fail(err, TD_ERR_INVALID, "gpu is \"%.40s\", must be one of %s", name, names);
}

static td_status check_divides(const char *field, int32_t value, uint32_t tp, struct td_err *err)
{
    return value % (int32_t)tp
               ? td_fail(err, TD_ERR_INVALID, "tp is %u, must divide %s (%d)", tp, field, value)
               : TD_OK;
}

td_status td_gpu_kv_dtype(const char *name, enum td_dtype *ret_kv, struct td_err *err)
{
    static const enum td_dtype types[] = {TD_F32, TD_BF16, TD_INT8, TD_FP8};
    *ret_kv = TD_BF16;
    if (!name[0] || strcmp(name, "auto") == 0) return TD_OK;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (strcmp(name, td_dtype_name(types[i])) == 0) {
            *ret_kv = types[i];
            return TD_OK;
        }
    return td_fail(err, TD_ERR_INVALID, "kv_dtype is %.32s, must be auto, f32, bf16, int8 or fp8",
                   name);
}

/* Bytes of K, or V, of one head and token, in blocks of the workers' default size. */
static double kv_row_bytes(const struct td_model_config *m, enum td_dtype kv)
{
    enum { BLOCK_SIZE = 16 };
    return (double)td_kv_head_bytes(kv, BLOCK_SIZE, m->head_dim) / BLOCK_SIZE;
}

td_status td_gpu_shape(const struct td_model_config *m, uint32_t tp, enum td_dtype kv_dtype,
                       struct td_gpu_shape *ret, struct td_err *err)
{
    td_status s;
    if (tp < 1 || tp > TD_GPU_MAX_TP || (tp & (tp - 1)))
        return td_fail(err, TD_ERR_INVALID, "tp is %u, must be 1, 2, 4 or 8", tp);
    if ((s = check_divides("num_attention_heads", m->n_heads, tp, err))) return s;
    if ((s = check_divides("intermediate_size", m->intermediate, tp, err))) return s;
    if (m->n_kv_heads % (int32_t)tp && (int32_t)tp % m->n_kv_heads)
        return td_fail(err, TD_ERR_INVALID,
                       "tp is %u, must divide num_key_value_heads (%d) or be a multiple of it", tp,
                       m->n_kv_heads);
    int64_t ranks = tp, h = m->hidden, layers = m->n_layers, intermediate = m->intermediate / ranks;
    int64_t q = m->n_heads / ranks * m->head_dim;
    int64_t kv_heads = m->n_kv_heads > ranks ? m->n_kv_heads / ranks : 1,
            kv = kv_heads * m->head_dim;
    int64_t matrices = h * (q + 2 * kv) + q * h + 3 * h * intermediate;
    int64_t vectors =
        2 * h; /* norms; biases of what is split by rows are split, the others whole */
    if (m->qkv_bias) vectors += q + 2 * kv;
    if (m->o_bias) vectors += h;
    if (m->mlp_bias) vectors += 2 * intermediate + h;
    if (m->qk_norm) vectors += 2 * m->head_dim;
    int64_t head = (m->vocab + ranks - 1) / ranks * h;
    int64_t n = layers * (matrices + vectors) + h /* last norm */ +
                h * m->vocab /* embedding, whole */ + (m->tied_embeddings ? 0 : head);
    *ret = (struct td_gpu_shape){
        .weight_bytes = (uint64_t)n * BF16_BYTES,
        .kv_bytes_per_token =
            (uint64_t)((double)(layers * 2 * kv_heads) * kv_row_bytes(m, kv_dtype)),
        .matrix_elements = (double)matrices,
        .head_elements = (double)head,
        .query_elements = (double)q,
        .kv_elements = (double)kv,
        /* Each norm reads a sum and the residual and writes both; the rotary embedding reads and
         * writes q and k; the activation reads gate and up and writes one. */
        .pass_bytes = (double)(2 * 4 * h + 2 * (q + kv) + 3 * intermediate) * BF16_BYTES,
    };
    return TD_OK;
}

static uint32_t log2_of(uint32_t tp) { return tp == 2 ? 1 : tp == 4 ? 2 : tp == 8 ? 3 : 0; }

td_status td_gpu_perf(const struct td_gpu *g, const struct td_model_config *m, uint32_t tp,
                      enum td_dtype kv, struct td_perf *ret_perf, struct td_err *err)
{
    struct td_gpu_shape z;
    td_status s = td_gpu_shape(m, tp, kv, &z, err);
    if (s) return s;
    double room = (double)g->memory_bytes * TD_GPU_MEMORY_SHARE - (double)z.weight_bytes;
    if (room < (double)z.kv_bytes_per_token * 1024) /* nothing can be served with less */
        return td_fail(
            err, TD_ERR_LIMIT,
            "the weights take %.1f GB of each %s with tp %u, limit %.1f GB (%g of its memory, less "
            "1,024 tokens of KV): a larger tp or card",
            (double)z.weight_bytes / 1e9, g->name, tp,
            ((double)g->memory_bytes * TD_GPU_MEMORY_SHARE - (double)z.kv_bytes_per_token * 1024) /
                1e9,
            TD_GPU_MEMORY_SHARE);
    double layers = m->n_layers, us = 1e-6, ps = 1e-12, fs = 1e-15;
    double message = (double)m->hidden * BF16_BYTES; /* of a token */
    double sum_launch_us = 0, sum_byte_ps = 0;
    if (tp > 1) {
        sum_launch_us = ALL_REDUCES * g->all_reduce[log2_of(tp) - 1].launch_us;
        sum_byte_ps = ALL_REDUCES * g->all_reduce[log2_of(tp) - 1].byte_ps;
    }
    double common_us = layers * (PASSES * g->elementwise.launch_us + sum_launch_us);
    double row_s = layers * (z.pass_bytes * g->elementwise.byte_ps + message * sum_byte_ps) * ps;
    double matrices = layers * z.matrix_elements, all = matrices + z.head_elements;
    /* lm_head multiplies one row of a prompt: its time is that of reading it. */
    double head_s =
        g->gemm_decode.launch_us * us + z.head_elements * BF16_BYTES * g->gemm_decode.byte_ps * ps;
    struct td_perf p = {.pp_scale = 1,
                        .gpus = tp,
                        .max_context = m->max_positions,
                        .estimated_from = g->estimated_from};
    p.a[0] =
        (common_us + layers * (GEMMS * g->gemm_prefill.launch_us + g->attn_prefill.launch_us)) *
            us +
        matrices * BF16_BYTES * g->gemm_prefill.byte_ps * ps + head_s;
    p.a[1] = row_s + matrices * 2 * g->gemm_prefill.flop_fs * fs +
             layers * z.query_elements * g->attn_prefill.element_ps * ps;
    p.a[2] = layers * 4 * z.query_elements * g->attn_prefill.flop_fs * fs;
    p.b[0] = (common_us + (layers * GEMMS + 1) * g->gemm_decode.launch_us +
              layers * g->attn_decode.launch_us) *
                 us +
             all * BF16_BYTES * g->gemm_decode.byte_ps * ps;
    p.b[1] = row_s + all * 2 * g->gemm_decode.flop_fs * fs +
             layers * z.kv_elements * g->attn_decode.element_ps * ps;
    p.b[2] = (double)z.kv_bytes_per_token * g->attn_decode.byte_ps * ps;
    p.kv_tokens = (uint64_t)(room / (double)z.kv_bytes_per_token);
    p.kv_bytes_per_token = layers * 2 * m->n_kv_heads * kv_row_bytes(m, kv);
    if (tp > 1)
        snprintf(p.name, sizeof p.name, "%s:tp%u", g->name, tp);
    else
        snprintf(p.name, sizeof p.name, "%s", g->name);
    *ret_perf = p;
    return TD_OK;
}

td_status td_gpu_model_load(const char *path, struct td_model_config *ret_model, struct td_err *err)
{
    struct stat st;
    char in_folder[4096];
    if (!stat(path, &st) && S_ISDIR(st.st_mode)) {
        int n = snprintf(in_folder, sizeof in_folder, "%s/config.json", path);
        if (n < 0 || (size_t)n >= sizeof in_folder)
            return td_fail(err, TD_ERR_LIMIT, "model: a path of %zu bytes, must be below %zu",
                           strlen(path), sizeof in_folder);
        path = in_folder;
    }
    td_status s = td_model_config_load_file(path, ret_model, err);
    if (!s && ret_model->quant[0].scheme) /* the constants are those of kernels for bf16 weights */
        s = td_fail(
            err, TD_ERR_UNSUPPORTED,
            "%s: quantization_config is %s, but step times are known for bf16 weights alone: "
            "must be absent",
            path, ret_model->quant[0].name);
    if (!s && ret_model->experts.n)
        s = td_fail(err, TD_ERR_UNSUPPORTED,
                    "%s: num_experts is %d, but step times are known for dense models alone: must "
                    "be absent",
                    path, ret_model->experts.n);
    return s;
}

td_status td_gpu_load(const char *spec, struct td_perf *ret_perf, struct td_err *err)
{
    const struct td_gpu *gpu;
    struct td_model_config model;
    char name[32];
    unsigned tp = 1;
    const char *path = strchr(spec, ':');
    if (!path || !path[1] || (size_t)(path - spec) >= sizeof name)
        return td_fail(err, TD_ERR_INVALID,
                       "latency is \"gpu:%s\", must be gpu:GPU:MODEL or gpu:GPU:tpN:MODEL", spec);
    snprintf(name, sizeof name, "%.*s", (int)(path - spec), spec);
    path++;
    int used = 0;
    if (sscanf(path, "tp%4u:%n", &tp, &used) == 1 && used && path[used])
        path += used;
    else
        tp = 1;
    td_status s = td_gpu_find(name, &gpu, err);
    if (!s) s = td_gpu_model_load(path, &model, err);
    if (!s) s = td_gpu_perf(gpu, &model, tp, TD_BF16, ret_perf, err);
    return s;
}
