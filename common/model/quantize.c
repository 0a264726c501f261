/* quantize.c - the tensors of a checkpoint, converted in a stream.
 *
 *   1. plan    each tensor of the checkpoint becomes one of the result; all that the model needs
 *              must be there, and nothing without a place.
 *   2. header  keys, and the list of tensors.
 *   3. stream  the tensors one behind the other (quantize_stream.c). */
#include "common/model/quantize.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/model/gguf_tensors.h"
#include "common/model/model_internal.h"
#include "common/model/quantize_internal.h"

struct plan {
    struct td_piece *pieces;
    int32_t n;
    float rope_factors[TD_ATTN_HEAD_DIM_MAX / 2];
};

/* ---- keys ------------------------------------------------------------------------------------ */

static const char *arch_name(const struct td_model_config *c) { return td_families[c->arch]->gguf; }

td_status td_quantize_gguf_takes(const struct td_quantize *q, struct td_err *err)
{
    const struct td_model_config *c = q->config;
    const struct td_family *family = td_families[c->arch];
    if (!family->gguf || family->gguf_experts || family->gguf_names || family->norms_less_1)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: model_type is %s: no GGUF files of this family are written", q->from,
                       family->model_type);
    if (c->sliding_window && c->sliding_window < c->max_positions)
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "%s: sliding_window is %d, below max_position_embeddings %d: GGUF has no key "
            "for it in architecture %s, and readers would attend to everything",
            q->from, c->sliding_window, c->max_positions, arch_name(c));
    if (c->mlp_bias)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: mlp_bias is true: GGUF has no such tensors",
                       q->from);
    if (c->rope[0].scaling > TD_ROPE_LLAMA3)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: rope_type is yarn or longrope: no GGUF files with it are written",
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
    td_gguf_put_f32(w, key, (float)c->rope[0].theta);
    if (c->rope[0].scaling != TD_ROPE_LINEAR) return;
    snprintf(key, sizeof key, "%s.rope.scaling.type", arch);
    td_gguf_put_text(w, key, "linear", 6);
    snprintf(key, sizeof key, "%s.rope.scaling.factor", arch);
    td_gguf_put_f32(w, key, (float)c->rope[0].factor);
}

static bool begins(struct td_gguf_text key, const char *with)
{
    size_t n = strlen(with);
    return key.n >= n && memcmp(key.bytes, with, n) == 0;
}

td_status td_quantize_keys(const struct td_quantize *q, struct td_gguf_writer *w,
                           struct td_err *err)
{
    td_status s = td_quantize_gguf_takes(q, err);
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

/* The first tensor of layer i that the checkpoint lacks, written to name; NULL: none. */
static const char *missing_of_layer(const struct td_quantize *q, int32_t i,
                                    char name[TD_TENSOR_NAME_BYTES])
{
    struct td_layer_spec spec;
    td_model_config_layer(q->config, i, &spec);
    for (int k = 0; k < TD_LAYER_TABLES; k++)
        for (const struct td_tensor_row *t = spec.tensors[k]; t && t->name; t++) {
            td_tensor_name(&spec, t, i, -1, name);
            if (td_tensor_is_wanted(q->config, t) && !td_checkpoint_find(q->checkpoint, name))
                return name;
        }
    return NULL;
}

static td_status check_complete(const struct td_quantize *q, struct td_err *err)
{
    const struct td_model_config *c = q->config;
    char name[TD_TENSOR_NAME_BYTES], buf[TD_TENSOR_FILE_NAME_BYTES];
    bool has_embedding = td_checkpoint_find(q->checkpoint, "model.embed_tokens.weight"),
         has_head = td_checkpoint_find(q->checkpoint, "lm_head.weight");
    const char *missing =
        !td_checkpoint_find(q->checkpoint, "model.norm.weight") ? "model.norm.weight"
        : !has_embedding && !(has_head && c->tied_embeddings)   ? "model.embed_tokens.weight"
        : !has_head && !c->tied_embeddings                      ? "lm_head.weight"
                                                                : NULL;
    for (int32_t i = 0; !missing && i < c->n_layers; i++) missing = missing_of_layer(q, i, name);
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

td_status td_quantize_check_size(const struct td_quantize *q, const struct td_tensor *t,
                                 struct td_err *err)
{
    char buf[TD_TENSOR_FILE_NAME_BYTES];
    bool has_values = true;
    for (int32_t i = 0; i < t->n_dims; i++) has_values &= t->shape[i] > 0;
    return has_values
               ? TD_OK
               : td_fail(err, TD_ERR_CORRUPT, "%s: tensor %s has no values: a dimension is 0",
                         q->from, td_checkpoint_file_name(q->checkpoint, t->name, buf));
}

static td_status plan_tensor(const struct td_quantize *q, const struct td_tensor *t,
                             struct td_piece *ret, struct td_err *err)
{
    const struct td_model_config *c = q->config;
    bool rotated;
    char buf[TD_TENSOR_FILE_NAME_BYTES];
    const char *name = t->name;
    if (c->tied_embeddings && strcmp(name, "lm_head.weight") == 0)
        name = "model.embed_tokens.weight";
    struct td_piece p = {.from = t, .n_rows = t->n_dims == 2 ? t->shape[0] : 1};
    bool is_rope = q->checkpoint->gguf && strcmp(name, "rope_freqs.weight") == 0;
    if (is_rope) snprintf(p.name, sizeof p.name, "%s", name);
    if (!td_gguf_tensor_name(td_families[c->arch], name, p.name, &rotated) && !is_rope)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %.128s has no place in a GGUF file of this architecture",
                       q->from, t->name);
    if (!t->format || t->n_dims < 1 || t->n_dims > 2 || (t->n_dims == 1 && !t->format->dtype))
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: tensor %s is %s with %d dimensions: not one that this version rounds",
                       q->from, td_checkpoint_file_name(q->checkpoint, t->name, buf), t->dtype_name,
                       t->n_dims);
    td_status s = td_quantize_check_size(q, t, err);
    if (s) return s;
    p.n_cols = t->shape[t->n_dims - 1];
    p.format = t->n_dims == 1 ? td_format_of_dtype(TD_F32)
                              : td_mix_format(q->mix, c, name, p.n_cols, t->format);
    bool paired = rotated && td_families[c->arch]->gguf_pairs;
    if (paired && t->n_dims == 1) { /* a bias is a column */
        p.n_rows = p.n_cols;
        p.n_cols = 1;
    }
    if (paired) p.paired_head_rows = c->head_dim;
    if (paired && p.n_rows % c->head_dim)
        return td_fail(err, TD_ERR_CORRUPT,
                       "%s: tensor %s has %" PRId64 " rows, no multiple of head_dim %d", q->from,
                       td_checkpoint_file_name(q->checkpoint, t->name, buf), p.n_rows, c->head_dim);
    td_fold_piece(q->fold, name, &p);
    *ret = p;
    return TD_OK;
}

/* Llama 3's scaling of the rotary frequencies is a tensor of factors in GGUF. */
static void plan_rope(const struct td_quantize *q, struct plan *plan)
{
    if (q->config->rope[0].scaling != TD_ROPE_LLAMA3) return;
    td_model_rope_factors(q->config, plan->rope_factors);
    struct td_piece *p = &plan->pieces[plan->n++];
    *p = (struct td_piece){.values = plan->rope_factors,
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

/* ---- the file -------------------------------------------------------------------------------- */

static void list_pieces(const struct plan *plan, struct td_gguf_writer *w)
{
    for (int32_t i = 0; i < plan->n; i++) {
        const struct td_piece *p = &plan->pieces[i];
        bool is_matrix = p->from && p->from->n_dims == 2;
        int64_t ne[2] = {is_matrix ? p->n_cols : p->n_rows * p->n_cols, p->n_rows};
        td_gguf_put_tensor(w, p->name, p->format->gguf_type, is_matrix ? 2 : 1, ne);
    }
}

static td_status append(void *ctx, const void *bytes, size_t n_bytes, struct td_err *err)
{
    return td_gguf_writer_append(ctx, bytes, n_bytes, err);
}

td_status td_quantize_gguf(struct td_quantize *q, struct td_gguf_writer *w, const char *path,
                           bool may_replace, struct td_err *err)
{
    struct plan plan = {0};
    td_status s = make_plan(q, &plan, err);
    q->ret_from_bytes = 0;
    for (int32_t i = 0; i < plan.n && !s; i++)
        q->ret_from_bytes += plan.pieces[i].from ? plan.pieces[i].from->n_bytes : 0;
    if (!s) {
        list_pieces(&plan, w);
        td_gguf_writer_bytes(w, &q->ret_to_bytes);
        s = td_gguf_writer_open(w, path, may_replace, err);
    }
    if (!s) s = td_quantize_stream(q, plan.pieces, plan.n, append, w, err);
    if (!s) s = td_gguf_writer_finish(w, err);
    free(plan.pieces);
    return s;
}
