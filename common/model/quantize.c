/* quantize.c - the tensors of a checkpoint, converted in a stream.
 *
 *   1. plan    each tensor of the checkpoint becomes one of the result; all that the model needs
 *              must be there, and nothing without a place.
 *   2. header  keys, and the list of tensors.
 *   3. stream  for each tensor, batches of rows: the threads read their rows as f32, round them to
 *              the result's format, and one thread appends the batch to the file. */
#include "common/model/quantize.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/progress.h"
#include "common/model/gguf_tensors.h"
#include "common/model/model_internal.h"
#include "kernels/quantize.h"

#define BATCH_BYTES ((int64_t)2 << 20) /* of f32, for each thread */

/* A tensor of the result. */
struct piece {
    const struct td_tensor *from; /* NULL: `values` */
    const float *values;
    char name[TD_GGUF_NAME_BYTES];
    const struct td_format *format;
    int64_t n_rows, n_cols;
    /* In every head of this many rows, row i and row i + half a head of the model stand at 2i and
     * 2i + 1 of the result. 0: rows in order */
    int32_t paired_head_rows;
};

struct plan {
    struct piece *pieces;
    int32_t n;
    float rope_factors[TD_ATTN_HEAD_DIM_MAX / 2];
};

/* ---- keys ------------------------------------------------------------------------------------ */

static const char *arch_name(const struct td_model_config *c)
{
    return c->arch == TD_ARCH_QWEN2 ? "qwen2" : c->arch == TD_ARCH_QWEN3 ? "qwen3" : "llama";
}

static td_status check_config(const struct td_quantize *q, struct td_err *err)
{
    const struct td_model_config *c = q->config;
    if (c->sliding_window && c->sliding_window < c->max_positions)
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "%s: sliding_window is %d, below max_position_embeddings %d: GGUF has no key "
            "for it in architecture %s, and readers would attend to everything",
            q->from, c->sliding_window, c->max_positions, arch_name(c));
    if (c->mlp_bias)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: mlp_bias is true: GGUF has no such tensors",
                       q->from);
    return TD_OK;
}

static void put_sizes(struct td_gguf_writer *w, const struct td_model_config *c, const char *arch)
{
    const struct {
        const char *key;
        int32_t value;
    } rows[] = {{"block_count", c->n_layers},          {"context_length", c->max_positions},
                {"embedding_length", c->hidden},       {"feed_forward_length", c->intermediate},
                {"attention.head_count", c->n_heads},  {"attention.head_count_kv", c->n_kv_heads},
                {"attention.key_length", c->head_dim}, {"attention.value_length", c->head_dim},
                {"rope.dimension_count", c->head_dim}, {"vocab_size", c->vocab}};
    char key[64];
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, rows[i].key);
        td_gguf_put_u32(w, key, (uint32_t)rows[i].value);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm_rms_epsilon", arch);
    td_gguf_put_f32(w, key, c->rms_eps);
    snprintf(key, sizeof key, "%s.rope.freq_base", arch);
    td_gguf_put_f32(w, key, (float)c->rope_theta);
    if (c->rope_scaling != TD_ROPE_LINEAR) return;
    snprintf(key, sizeof key, "%s.rope.scaling.type", arch);
    td_gguf_put_text(w, key, "linear", 6);
    snprintf(key, sizeof key, "%s.rope.scaling.factor", arch);
    td_gguf_put_f32(w, key, (float)c->rope_factor);
}

static bool begins(struct td_gguf_text key, const char *with)
{
    size_t n = strlen(with);
    return key.n >= n && memcmp(key.bytes, with, n) == 0;
}

td_status td_quantize_keys(const struct td_quantize *q, struct td_gguf_writer *w,
                           struct td_err *err)
{
    td_status s = check_config(q, err);
    if (s) return s;
    const char *arch = arch_name(q->config);
    const struct td_gguf *g = q->checkpoint->gguf;
    for (size_t i = 0; g && i < g->n_values; i++) {
        const struct td_gguf_value *v = &g->values[i];
        if (!td_gguf_text_is(v->key, "general.file_type") &&
            !td_gguf_text_is(v->key, "general.quantization_version") &&
            !td_gguf_text_is(v->key, "general.alignment") && !begins(v->key, "split."))
            td_gguf_put_value(w, v);
    }
    if (!g) {
        td_gguf_put_text(w, "general.architecture", arch, strlen(arch));
        td_gguf_put_text(w, "general.type", "model", 5);
        put_sizes(w, q->config, arch);
    }
    td_gguf_put_u32(w, "general.quantization_version", 2);
    td_gguf_put_u32(w, "general.file_type", td_mix_file_type(q->mix));
    return TD_OK;
}

/* ---- plan ------------------------------------------------------------------------------------ */

/* Names behind "model.layers.N."; `when` tells whether the model has them. */
static td_status check_complete(const struct td_quantize *q, struct td_err *err)
{
    const struct td_model_config *c = q->config;
    const struct {
        const char *name;
        bool when;
    } rows[] = {{"input_layernorm.weight", true},        {"post_attention_layernorm.weight", true},
                {"self_attn.q_proj.weight", true},       {"self_attn.k_proj.weight", true},
                {"self_attn.v_proj.weight", true},       {"self_attn.o_proj.weight", true},
                {"self_attn.q_proj.bias", c->qkv_bias},  {"self_attn.k_proj.bias", c->qkv_bias},
                {"self_attn.v_proj.bias", c->qkv_bias},  {"self_attn.o_proj.bias", c->o_bias},
                {"self_attn.q_norm.weight", c->qk_norm}, {"self_attn.k_norm.weight", c->qk_norm},
                {"mlp.gate_proj.weight", true},          {"mlp.up_proj.weight", true},
                {"mlp.down_proj.weight", true}};
    char name[128], buf[TD_TENSOR_FILE_NAME_BYTES];
    bool has_embedding = td_checkpoint_find(q->checkpoint, "model.embed_tokens.weight"),
         has_head = td_checkpoint_find(q->checkpoint, "lm_head.weight");
    const char *missing =
        !td_checkpoint_find(q->checkpoint, "model.norm.weight") ? "model.norm.weight"
        : !has_embedding && !(has_head && c->tied_embeddings)   ? "model.embed_tokens.weight"
        : !has_head && !c->tied_embeddings                      ? "lm_head.weight"
                                                                : NULL;
    for (int32_t i = 0; !missing && i < c->n_layers; i++)
        for (size_t k = 0; !missing && k < sizeof rows / sizeof *rows; k++) {
            snprintf(name, sizeof name, "model.layers.%d.%s", i, rows[k].name);
            if (rows[k].when && !td_checkpoint_find(q->checkpoint, name)) missing = name;
        }
    if (!missing) return TD_OK;
    return td_fail(err, TD_ERR_CORRUPT, "%s: tensor %s is missing", q->from,
                   td_checkpoint_file_name(q->checkpoint, missing, buf));
}

/* Whether the tensor is another's double: the output matrix of a model that has it tied. */
static bool is_double(const struct td_quantize *q, const struct td_tensor *t)
{
    return q->config->tied_embeddings && strcmp(t->name, "lm_head.weight") == 0 &&
           td_checkpoint_find(q->checkpoint, "model.embed_tokens.weight");
}

static td_status plan_tensor(const struct td_quantize *q, const struct td_tensor *t,
                             struct piece *ret, struct td_err *err)
{
    const struct td_model_config *c = q->config;
    bool rotated;
    char buf[TD_TENSOR_FILE_NAME_BYTES];
    const char *name = t->name;
    if (c->tied_embeddings && strcmp(name, "lm_head.weight") == 0)
        name = "model.embed_tokens.weight";
    struct piece p = {.from = t, .n_rows = t->n_dims == 2 ? t->shape[0] : 1};
    bool is_rope = q->checkpoint->gguf && strcmp(name, "rope_freqs.weight") == 0;
    if (is_rope) snprintf(p.name, sizeof p.name, "%s", name);
    if (!td_gguf_tensor_name(name, p.name, &rotated) && !is_rope)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %.128s has no place in a GGUF file of this architecture",
                       q->from, t->name);
    if (!t->format || t->n_dims < 1 || t->n_dims > 2)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %s is %s with %d dimensions: not one that this version rounds",
                       q->from, td_checkpoint_file_name(q->checkpoint, t->name, buf), t->dtype_name,
                       t->n_dims);
    p.n_cols = t->shape[t->n_dims - 1];
    p.format = t->n_dims == 1 ? td_format_of_dtype(TD_F32)
                              : td_mix_format(q->mix, c, name, p.n_cols, t->format);
    bool paired = rotated && (c->arch == TD_ARCH_LLAMA || c->arch == TD_ARCH_MISTRAL);
    if (paired && t->n_dims == 1) { /* a bias is a column */
        p.n_rows = p.n_cols;
        p.n_cols = 1;
    }
    if (paired) p.paired_head_rows = c->head_dim;
    if (paired && p.n_rows % c->head_dim)
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: tensor %s has %" PRId64 " rows, no multiple of head_dim %d", q->from,
                       td_checkpoint_file_name(q->checkpoint, t->name, buf), p.n_rows, c->head_dim);
    *ret = p;
    return TD_OK;
}

/* Llama 3's scaling of the rotary frequencies is a tensor of factors in GGUF. */
static void plan_rope(const struct td_quantize *q, struct plan *plan)
{
    if (q->config->rope_scaling != TD_ROPE_LLAMA3) return;
    td_model_rope_factors(q->config, plan->rope_factors);
    struct piece *p = &plan->pieces[plan->n++];
    *p = (struct piece){.values = plan->rope_factors,
                        .format = td_format_of_dtype(TD_F32),
                        .n_rows = 1,
                        .n_cols = q->config->head_dim / 2};
    snprintf(p->name, sizeof p->name, "rope_freqs.weight");
}

static td_status make_plan(const struct td_quantize *q, struct plan *plan, struct td_err *err)
{
    td_status s = check_complete(q, err);
    plan->pieces = calloc((size_t)q->checkpoint->n_tensors + 1, sizeof *plan->pieces);
    if (!plan->pieces) return td_fail(err, TD_ERR_NOMEM, "%s: no memory", q->from);
    if (!s) plan_rope(q, plan);
    for (int32_t i = 0; i < q->checkpoint->n_tensors && !s; i++) {
        const struct td_tensor *t = &q->checkpoint->tensors[i];
        if (is_double(q, t) || td_tensor_is_redundant(t->name)) continue;
        s = plan_tensor(q, t, &plan->pieces[plan->n], err);
        if (!s) plan->n++;
    }
    return s;
}

/* ---- stream ---------------------------------------------------------------------------------- */

struct stream {
    const struct piece *piece;
    int64_t first_row, n_rows; /* of this batch */
    uint8_t *out;              /* [n_rows] rows of the result */
    float *values;             /* [threads][n_cols] */
    _Atomic int64_t bad_row;   /* -1: none */
};

/* Row r of the model at row `row` of a result with paired rows. */
static int64_t row_of_pair(int64_t row, int32_t head)
{
    if (!head) return row;
    int64_t i = row % head;
    return row - i + i / 2 + i % 2 * (head / 2);
}

/* Row r of the model as it stands in a tensor. */
static const uint8_t *row_at(const struct piece *p, int64_t row)
{
    const struct td_tensor *t = p->from;
    int64_t r = row_of_pair(row, p->paired_head_rows), head = t->paired_head_rows;
    if (head) {
        int64_t i = r % head, half = head / 2;
        r = r - i + (i < half ? 2 * i : 2 * (i - half) + 1);
    }
    return t->data + td_format_bytes(t->format, r * p->n_cols);
}

static bool convert_row(const struct piece *p, int64_t row, float *values, uint8_t *out)
{
    if (!p->from) return td_format_write(p->format, p->values, p->n_cols, out);
    const uint8_t *src = row_at(p, row);
    if (p->from->format == p->format && !p->format->dtype) {
        memcpy(out, src, td_format_bytes(p->format, p->n_cols));
        return true;
    }
    td_format_read(p->from->format, src, p->n_cols, values);
    return td_format_write(p->format, values, p->n_cols, out);
}

static void convert_part(void *ctx, int part, int n_parts)
{
    struct stream *s = ctx;
    const struct piece *p = s->piece;
    int64_t lo = s->n_rows * part / n_parts, hi = s->n_rows * (part + 1) / n_parts;
    size_t row_bytes = td_format_bytes(p->format, p->n_cols);
    for (int64_t i = lo; i < hi; i++)
        if (!convert_row(p, s->first_row + i, s->values + part * p->n_cols,
                         s->out + (size_t)i * row_bytes)) {
            int64_t none = -1;
            atomic_compare_exchange_strong(&s->bad_row, &none, s->first_row + i);
            return;
        }
}

static td_status stream_piece(struct td_quantize *q, const struct piece *p,
                              struct td_gguf_writer *w, struct td_progress *progress,
                              uint64_t *done, struct td_err *err)
{
    int n_threads = td_thread_pool_size(q->threads);
    int64_t batch = BATCH_BYTES / (p->n_cols * 4) * n_threads;
    if (batch < n_threads) batch = n_threads;
    if (batch > p->n_rows) batch = p->n_rows;
    size_t row_bytes = td_format_bytes(p->format, p->n_cols);
    struct stream st = {.piece = p, .bad_row = -1};
    st.out = malloc((size_t)batch * row_bytes);
    st.values = malloc((size_t)n_threads * (size_t)p->n_cols * sizeof(float));
    td_status s = st.out && st.values
                      ? TD_OK
                      : td_fail(err, TD_ERR_NOMEM, "tensor %s: no memory for %zu bytes", p->name,
                                (size_t)batch * row_bytes);
    for (; st.first_row < p->n_rows && !s; st.first_row += batch) {
        st.n_rows = p->n_rows - st.first_row < batch ? p->n_rows - st.first_row : batch;
        td_thread_pool_run(q->threads, convert_part, &st);
        if (st.bad_row >= 0)
            s = td_fail(err, TD_ERR_CORRUPT,
                        "%s: tensor %s, row %" PRId64 ": a value is infinite, no number, or too "
                        "large for %s",
                        q->from, p->name, (int64_t)st.bad_row, p->format->name);
        else
            s = td_gguf_writer_append(w, st.out, (size_t)st.n_rows * row_bytes, err);
        *done += (uint64_t)st.n_rows * row_bytes;
        if (progress) td_progress_update(progress, *done);
    }
    free(st.out);
    free(st.values);
    return s;
}

static void list_pieces(const struct plan *plan, struct td_gguf_writer *w)
{
    for (int32_t i = 0; i < plan->n; i++) {
        const struct piece *p = &plan->pieces[i];
        bool is_matrix = p->from && p->from->n_dims == 2;
        int64_t ne[2] = {is_matrix ? p->n_cols : p->n_rows * p->n_cols, p->n_rows};
        td_gguf_put_tensor(w, p->name, p->format->gguf_type, is_matrix ? 2 : 1, ne);
    }
}

td_status td_quantize_gguf(struct td_quantize *q, struct td_gguf_writer *w, const char *path,
                           bool may_replace, struct td_err *err)
{
    struct plan plan = {0};
    struct td_progress progress;
    uint64_t done = 0;
    td_status s = make_plan(q, &plan, err);
    q->ret_from_bytes = 0;
    for (int32_t i = 0; i < plan.n && !s; i++)
        q->ret_from_bytes += plan.pieces[i].from ? plan.pieces[i].from->n_bytes : 0;
    if (!s) {
        list_pieces(&plan, w);
        td_gguf_writer_bytes(w, &q->ret_to_bytes);
        s = td_gguf_writer_open(w, path, may_replace, err);
    }
    if (!s && !q->quiet) td_progress_start(&progress, "writing", "B", q->ret_to_bytes);
    for (int32_t i = 0; i < plan.n && !s; i++)
        s = stream_piece(q, &plan.pieces[i], w, q->quiet ? NULL : &progress, &done, err);
    if (!s) s = td_gguf_writer_finish(w, err);
    if (!s && !q->quiet) td_progress_end(&progress);
    free(plan.pieces);
    return s;
}
