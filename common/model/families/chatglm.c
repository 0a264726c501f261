/* chatglm.c - ChatGLM2 and 3: the layers of GLM-4-9B under other names, and a config.json with
 * other fields. */
#include "common/model/families/families.h"

#include <string.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"

/* What the class has besides, and switches in one way only. */
static const struct {
    const char *key;
    bool must;
} switches[] = {
    {"add_bias_linear", false}, {"apply_residual_connection_post_layernorm", false},
    {"interleaved_qkv", false}, {"original_rope", true},
    {"post_layer_norm", true},  {"prefix_projection", false},
    {"rmsnorm", true},
};
/* Fields that say in other words what those of every family do. */
static const struct {
    const char *from, *to;
} words[] = {
    {"num_layers", "num_hidden_layers"},
    {"padded_vocab_size", "vocab_size"},
    {"seq_length", "max_position_embeddings"},
    {"ffn_hidden_size", "intermediate_size"},
    {"kv_channels", "head_dim"},
    {"layernorm_epsilon", "rms_norm_eps"},
};

/* apply_query_key_layer_scaling divides by the layer's number and multiplies again; the others
 * without a row above are of training, or of the kernels that compute the same in another type. */
static const char *const fields[] = {"add_bias_linear",
                                     "add_qkv_bias",
                                     "apply_query_key_layer_scaling",
                                     "apply_residual_connection_post_layernorm",
                                     "attention_softmax_in_fp32",
                                     "auto_map",
                                     "bias_dropout_fusion",
                                     "classifier_dropout",
                                     "ffn_hidden_size",
                                     "fp32_residual_connection",
                                     "interleaved_qkv",
                                     "kv_channels",
                                     "layernorm_epsilon",
                                     "multi_query_attention",
                                     "multi_query_group_num",
                                     "num_layers",
                                     "original_rope",
                                     "padded_vocab_size",
                                     "post_layer_norm",
                                     "prefix_projection",
                                     "rmsnorm",
                                     "rope_ratio",
                                     "seq_length",
                                     NULL};

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    double ratio = 1;
    td_status s = td_json_bool(obj, what, "add_qkv_bias", &c->qkv_bias, NULL, err);
    c->rope_neighbours = true;
    for (size_t i = 0; i < sizeof switches / sizeof *switches && !s; i++) {
        bool is = switches[i].must;
        s = td_json_bool(obj, what, switches[i].key, &is, NULL, err);
        if (!s && is != switches[i].must)
            s = td_config_unsupported(what, switches[i].key, json_object_get(obj, switches[i].key),
                                      switches[i].must ? "true" : "false", err);
    }
    if (!s) s = td_json_f64(obj, what, "rope_ratio", 0, 1e6, &ratio, NULL, err);
    if (s || ratio == 1) return s;
    /* ChatGLM2-32k divides positions by it, ChatGLM3-32k multiplies the base */
    return td_config_unsupported(what, "rope_ratio", json_object_get(obj, "rope_ratio"), "1", err);
}

/* ChatGLM3 ends a turn by naming whose the next one is: <|user|> or <|observation|>. */
static bool add_ends(json_t *obj)
{
    const json_t *eos = json_object_get(obj, "eos_token_id");
    if (json_integer_value(json_object_get(obj, "vocab_size")) != 65024 || !json_is_integer(eos))
        return true;
    json_t *list = json_pack("[I, i, i]", json_integer_value(eos), 64795, 64797);
    return list && !json_object_set_new(obj, "eos_token_id", list);
}

static td_status translate(json_t *obj, const char *what, struct td_err *err)
{
    bool groups = false, made = true;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        json_t *v = json_object_get(obj, words[i].from), *old = json_object_get(obj, words[i].to);
        if (v && old && !json_equal(v, old))
            return td_fail(err, TD_ERR_INVALID, "%s: %s and %s differ, must be the same", what,
                           words[i].from, words[i].to);
        if (v) made &= !json_object_set(obj, words[i].to, v);
    }
    td_status s = td_json_bool(obj, what, "multi_query_attention", &groups, NULL, err);
    if (s) return s;
    json_t *n = json_object_get(obj, "multi_query_group_num");
    if (groups && !n)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: multi_query_group_num is missing, must be there with "
                       "multi_query_attention",
                       what);
    if (groups) made &= !json_object_set(obj, "num_key_value_heads", n);
    if (made && add_ends(obj)) return TD_OK;
    return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
}

#define IF(field) offsetof(struct td_model_config, field)
#define QKV "self_attention.query_key_value"
static const struct td_tensor_row attention[] = {
    {TD_INTO_ATTN_NORM, "input_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0},
    {TD_INTO_QKV, QKV ".weight", TD_DIM_Q, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_QKV, QKV ".weight", TD_DIM_K, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_QKV, QKV ".weight", TD_DIM_KV, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_QKV_BIAS, QKV ".bias", TD_DIM_Q, TD_DIM_NONE, TD_CUT_ROWS, IF(qkv_bias)},
    {TD_INTO_QKV_BIAS, QKV ".bias", TD_DIM_K, TD_DIM_NONE, TD_CUT_ROWS, IF(qkv_bias)},
    {TD_INTO_QKV_BIAS, QKV ".bias", TD_DIM_KV, TD_DIM_NONE, TD_CUT_ROWS, IF(qkv_bias)},
    {TD_INTO_O, "self_attention.dense.weight", TD_DIM_HIDDEN, TD_DIM_Q, TD_CUT_COLS, 0},
    {0},
};
static const struct td_tensor_row mlp[] = {
    {TD_INTO_MLP_NORM, "post_attention_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE,
     0},
    {TD_INTO_GATE_UP, "mlp.dense_h_to_4h.weight", TD_DIM_MLP, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_GATE_UP, "mlp.dense_h_to_4h.weight", TD_DIM_MLP, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_DOWN, "mlp.dense_4h_to_h.weight", TD_DIM_HIDDEN, TD_DIM_MLP, TD_CUT_COLS, 0},
    {0},
};

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->tensors[0] = attention;
    ret->tensors[1] = mlp;
}

static const struct td_file_names names = {.layers = "transformer.encoder.layers.",
                                           .embed = "transformer.embedding.word_embeddings.weight",
                                           .norm = "transformer.encoder.final_layernorm.weight",
                                           .head = "transformer.output_layer.weight",
                                           .redundant = "transformer.rotary_pos_emb.inv_freq"};

const struct td_family td_family_chatglm = {.model_type = "chatglm",
                                            .models = "ChatGLM2 and 3",
                                            .class_name = "ChatGLMModel",
                                            .old_class_name = "ChatGLMForConditionalGeneration",
                                            .fields = fields,
                                            .file_names = &names,
                                            .translate = translate,
                                            .kv_heads_may_be_absent = true,
                                            .default_bos = -1,
                                            .default_eos = 2,
                                            .default_eps = 1e-5f,
                                            .partial_rotary = 0.5,
                                            .read = read,
                                            .layer = layer};
