/* families.c - the list of families, and what several of them share. */
#include "common/model/families/families.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"
#include "kernels/experts.h"

const struct td_family *const td_families[TD_N_FAMILIES] = {
    [TD_ARCH_LLAMA] = &td_family_llama,
    [TD_ARCH_MISTRAL] = &td_family_mistral,
    [TD_ARCH_QWEN2] = &td_family_qwen2,
    [TD_ARCH_QWEN3] = &td_family_qwen3,
    [TD_ARCH_QWEN3_MOE] = &td_family_qwen3_moe,
    [TD_ARCH_MIXTRAL] = &td_family_mixtral,
    [TD_ARCH_QWEN2_MOE] = &td_family_qwen2_moe,
    [TD_ARCH_DEEPSEEK_V2] = &td_family_deepseek_v2,
    [TD_ARCH_DEEPSEEK_V3] = &td_family_deepseek_v3,
    [TD_ARCH_GLM4_MOE_LITE] = &td_family_glm4_moe_lite,
    [TD_ARCH_KIMI_K2] = &td_family_kimi_k2,
    [TD_ARCH_GEMMA] = &td_family_gemma,
    [TD_ARCH_GEMMA2] = &td_family_gemma2,
    [TD_ARCH_GEMMA3] = &td_family_gemma3,
    [TD_ARCH_PHI3] = &td_family_phi3,
    [TD_ARCH_GRANITE] = &td_family_granite,
    [TD_ARCH_SMOLLM3] = &td_family_smollm3,
    [TD_ARCH_OLMO2] = &td_family_olmo2,
    [TD_ARCH_GLM] = &td_family_glm,
    [TD_ARCH_GLM4] = &td_family_glm4,
    [TD_ARCH_COHERE] = &td_family_cohere,
    [TD_ARCH_COHERE2] = &td_family_cohere2,
    [TD_ARCH_GPT_OSS] = &td_family_gpt_oss,
    [TD_ARCH_GLM4_MOE] = &td_family_glm4_moe,
    [TD_ARCH_MINIMAX_M2] = &td_family_minimax_m2,
    [TD_ARCH_INTERNLM2] = &td_family_internlm2,
    [TD_ARCH_INTERNLM3] = &td_family_internlm3,
    [TD_ARCH_CHATGLM] = &td_family_chatglm,
    [TD_ARCH_BAICHUAN] = &td_family_baichuan,
};

void td_model_config_layer(const struct td_model_config *c, int32_t layer,
                           struct td_layer_spec *ret_spec)
{
    td_families[c->arch]->layer(c, layer, ret_spec);
}

/* ---- tensors --------------------------------------------------------------------------------- */

#define IF(field) offsetof(struct td_model_config, field)
_Static_assert(offsetof(struct td_model_config, arch) == 0,
               "no bool is at offset 0, which is none");

const struct td_tensor_row td_std_attention[] = {
    {TD_INTO_ATTN_NORM, "input_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0},
    TD_STD_QKV,
    {TD_INTO_Q_NORM, "self_attn.q_norm.weight", TD_DIM_HEAD, TD_DIM_NONE, TD_CUT_NONE, IF(qk_norm)},
    {TD_INTO_K_NORM, "self_attn.k_norm.weight", TD_DIM_HEAD, TD_DIM_NONE, TD_CUT_NONE, IF(qk_norm)},
    {TD_INTO_O, "self_attn.o_proj.weight", TD_DIM_HIDDEN, TD_DIM_Q, TD_CUT_COLS, 0},
    {TD_INTO_O_BIAS, "self_attn.o_proj.bias", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, IF(o_bias)},
    {0},
};

const struct td_tensor_row td_std_mlp[] = {
    {TD_INTO_MLP_NORM, "post_attention_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE,
     0},
    {TD_INTO_GATE_UP, "mlp.gate_proj.weight", TD_DIM_MLP, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_GATE_UP, "mlp.up_proj.weight", TD_DIM_MLP, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_DOWN, "mlp.down_proj.weight", TD_DIM_HIDDEN, TD_DIM_MLP, TD_CUT_COLS, 0},
    {TD_INTO_GATE_UP_BIAS, "mlp.gate_proj.bias", TD_DIM_MLP, TD_DIM_NONE, TD_CUT_ROWS,
     IF(mlp_bias)},
    {TD_INTO_GATE_UP_BIAS, "mlp.up_proj.bias", TD_DIM_MLP, TD_DIM_NONE, TD_CUT_ROWS, IF(mlp_bias)},
    {TD_INTO_DOWN_BIAS, "mlp.down_proj.bias", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE,
     IF(mlp_bias)},
    {0},
};

const struct td_tensor_row td_fused_mlp[] = {
    {TD_INTO_MLP_NORM, "post_attention_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE,
     0},
    {TD_INTO_GATE_UP, "mlp.gate_up_proj.weight", TD_DIM_MLP, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_GATE_UP, "mlp.gate_up_proj.weight", TD_DIM_MLP, TD_DIM_HIDDEN, TD_CUT_ROWS, 0},
    {TD_INTO_DOWN, "mlp.down_proj.weight", TD_DIM_HIDDEN, TD_DIM_MLP, TD_CUT_COLS, 0},
    {0},
};

const struct td_tensor_row td_std_mixture[] = {
    {TD_INTO_MLP_NORM, "post_attention_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE,
     0},
    {TD_INTO_EXPERT_ROUTER, "mlp.gate.weight", TD_DIM_EXPERTS, TD_DIM_HIDDEN, TD_CUT_NONE, 0},
    {0},
};

const struct td_tensor_row td_std_expert[] = {
    {TD_INTO_EXPERT_GATE_UP, "gate_proj.weight", TD_DIM_EXPERT_MLP, TD_DIM_HIDDEN, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_GATE_UP, "up_proj.weight", TD_DIM_EXPERT_MLP, TD_DIM_HIDDEN, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_DOWN, "down_proj.weight", TD_DIM_HIDDEN, TD_DIM_EXPERT_MLP, TD_CUT_NONE, 0},
    {0},
};

struct td_dim_size td_dim_size(const struct td_model_config *c, enum td_dim dim)
{
    switch (dim) {
    case TD_DIM_HIDDEN:
        return (struct td_dim_size){1, c->hidden};
    case TD_DIM_Q:
        return (struct td_dim_size){c->n_heads, c->head_dim};
    case TD_DIM_HEADS:
        return (struct td_dim_size){c->n_heads, 1};
    case TD_DIM_K:
    case TD_DIM_KV:
        return (struct td_dim_size){c->n_kv_heads, c->head_dim};
    case TD_DIM_HEAD:
        return (struct td_dim_size){1, c->head_dim};
    case TD_DIM_MLP:
        return (struct td_dim_size){c->intermediate, 1};
    case TD_DIM_EXPERTS:
        return (struct td_dim_size){c->experts.n, 1};
    case TD_DIM_EXPERT_MLP:
        return (struct td_dim_size){c->experts.intermediate, 1};
    case TD_DIM_EXPERT_PAIRS:
        return (struct td_dim_size){c->experts.intermediate, 2};
    case TD_DIM_SHARED_MLP:
        return (struct td_dim_size){c->experts.shared, 1};
    case TD_DIM_LATENT_Q:
        return (struct td_dim_size){c->n_heads, c->latent.nope + c->latent.rope};
    case TD_DIM_LATENT_Q_RANK:
        return (struct td_dim_size){1, c->latent.q_rank};
    case TD_DIM_LATENT:
        return (struct td_dim_size){1, c->latent.kv_rank};
    case TD_DIM_LATENT_KV:
        return (struct td_dim_size){1, c->latent.kv_rank + c->latent.rope};
    case TD_DIM_LATENT_HEADS:
        return (struct td_dim_size){c->n_heads, c->latent.nope + c->latent.v};
    case TD_DIM_LATENT_OUT:
        return (struct td_dim_size){c->n_heads, c->latent.v};
    case TD_DIM_ONE:
    case TD_DIM_NONE:
        break;
    }
    return (struct td_dim_size){1, 1};
}

bool td_tensor_is_wanted(const struct td_model_config *c, const struct td_tensor_row *row)
{
    return row->if_set == 0 || *(const bool *)((const char *)c + row->if_set);
}

void td_tensor_name(const struct td_layer_spec *spec, const struct td_tensor_row *row,
                    int32_t layer, int32_t expert, char ret_name[TD_TENSOR_NAME_BYTES])
{
    if (expert < 0)
        snprintf(ret_name, TD_TENSOR_NAME_BYTES, "model.layers.%d.%s", layer, row->name);
    else
        snprintf(ret_name, TD_TENSOR_NAME_BYTES, "model.layers.%d.%s%d.%s", layer,
                 spec->expert_prefix, expert, row->name);
}

void td_std_layer(const struct td_model_config *c, int32_t layer, struct td_layer_spec *ret)
{
    bool windowed = layer >= c->sliding_from_layer && !td_layer_bit(c->full_layers, layer);
    *ret = (struct td_layer_spec){
        .window = windowed ? c->sliding_window : 0,
        .rope = td_layer_bit(c->second_rope, layer),
        .attn_scale = c->attn_scale > 0 ? c->attn_scale : 1.0f / sqrtf((float)c->head_dim),
        .attn_cap = c->attn_cap,
        .alibi = c->alibi,
        .qk_norm = c->qk_norm ? TD_QK_NORM_HEADS : TD_QK_NORM_NONE,
        .act = td_families[c->arch]->act,
        .residual_scale = c->residual_scale,
        .tensors = {td_std_attention, td_std_mlp},
    };
    if (!td_model_config_has_experts(c, layer)) return;
    ret->tensors[1] = td_std_mixture;
    ret->expert_tensors = td_std_expert;
    ret->expert_prefix = "mlp.experts.";
}

/* ---- fields ---------------------------------------------------------------------------------- */

td_status td_read_biases(const json_t *obj, const char *what, struct td_model_config *c,
                         struct td_err *err)
{
    td_status s = td_json_bool(obj, what, "attention_bias", &c->qkv_bias, NULL, err);
    c->o_bias = c->qkv_bias;
    return s ? s : td_json_bool(obj, what, "mlp_bias", &c->mlp_bias, NULL, err);
}

/* The layers that have an MLP whatever the step says. */
static td_status read_dense_layers(const json_t *obj, const char *what, struct td_model_config *c,
                                   struct td_err *err)
{
    const json_t *list = json_object_get(obj, "mlp_only_layers");
    char text[80];
    if (!list || json_is_null(list)) return TD_OK;
    if (!json_is_array(list))
        return td_fail(err, TD_ERR_INVALID, "%s: mlp_only_layers is %s, must be a list of layers",
                       what, td_json_show(list, text, sizeof text));
    if (json_array_size(list) > TD_LAYERS_MAX)
        return td_fail(err, TD_ERR_LIMIT, "%s: mlp_only_layers has %zu entries, limit %d", what,
                       json_array_size(list), TD_LAYERS_MAX);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t layer = json_is_integer(v) ? json_integer_value(v) : -1;
        if (layer < 0 || layer >= c->n_layers)
            return td_fail(err, TD_ERR_INVALID,
                           "%s: mlp_only_layers[%zu] is %s, must be an integer in 0..%d", what, i,
                           td_json_show(v, text, sizeof text), c->n_layers - 1);
        c->experts.dense[layer / 8] |= (uint8_t)(1 << layer % 8);
    }
    return TD_OK;
}

/* transformers 5 writes num_local_experts where 4 wrote num_experts. */
static td_status read_n_experts(const json_t *obj, const char *what, struct td_model_config *c,
                                struct td_err *err)
{
    const char *names[] = {"num_experts", "num_local_experts"};
    int32_t n[2] = {0};
    for (int i = 0; i < 2; i++) {
        td_status s = td_config_i32(obj, what, names[i], 1, TD_EXPERTS_MAX, &n[i], err);
        if (s) return s;
    }
    if (!n[0] && !n[1])
        return td_fail(err, TD_ERR_INVALID,
                       "%s: num_experts is missing, must be an integer in 1..%d", what,
                       TD_EXPERTS_MAX);
    if (n[0] && n[1] && n[0] != n[1])
        return td_fail(err, TD_ERR_INVALID,
                       "%s: num_experts is %d and num_local_experts is %d, must be the same", what,
                       n[0], n[1]);
    c->experts.n = n[0] ? n[0] : n[1];
    return TD_OK;
}

td_status td_read_qwen_experts(const json_t *obj, const char *what, struct td_model_config *c,
                               struct td_err *err)
{
    struct td_experts_config *e = &c->experts;
    td_status s = read_n_experts(obj, what, c, err);
    if (s) return s;
    int32_t most = e->n < TD_EXPERTS_USED_MAX ? e->n : TD_EXPERTS_USED_MAX;
    e->step = 1;
    if ((s = td_json_need_i32(obj, what, "num_experts_per_tok", 1, most, &e->n_used, err)) ||
        (s = td_json_need_i32(obj, what, "moe_intermediate_size", 1, TD_INTERMEDIATE_MAX,
                              &e->intermediate, err)) ||
        (s = td_json_bool(obj, what, "norm_topk_prob", &e->rule.normalise, NULL, err)) ||
        (s = td_config_i32(obj, what, "decoder_sparse_step", 1, TD_LAYERS_MAX, &e->step, err)))
        return s;
    return read_dense_layers(obj, what, c, err);
}

/* The class gives every layer the window, other readers follow max_window_layers; no published
 * model sets one. */
td_status td_refuse_window(const json_t *obj, const char *what, struct td_err *err)
{
    bool use = false;
    td_status s = td_json_bool(obj, what, "use_sliding_window", &use, NULL, err);
    if (s || !use) return s;
    return td_config_unsupported(what, "use_sliding_window",
                                 json_object_get(obj, "use_sliding_window"), "false", err);
}

td_status td_read_window(const json_t *obj, const char *what, int32_t *ret_window,
                         struct td_err *err)
{
    const json_t *v = json_object_get(obj, "sliding_window");
    *ret_window = v && json_is_null(v) ? 0 : 4096;
    return td_config_i32(obj, what, "sliding_window", 1, INT32_MAX, ret_window, err);
}

/* Entry i of layer_types, which has one for each layer. */
static td_status read_layer_type(const json_t *list, int32_t i, const char *what,
                                 const struct td_model_config *c, bool *ret_sliding,
                                 struct td_err *err)
{
    const json_t *v = json_array_get(list, (size_t)i);
    const char *type = json_string_value(v);
    char name[32];
    snprintf(name, sizeof name, "layer_types[%d]", i);
    *ret_sliding = type && strcmp(type, "sliding_attention") == 0;
    if (!*ret_sliding && !(type && strcmp(type, "full_attention") == 0))
        return td_config_unsupported(what, name, v, "full_attention or sliding_attention", err);
    if (*ret_sliding && c->sliding_window == 0)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: %s is sliding_attention, but use_sliding_window and sliding_window "
                       "set no window",
                       what, name);
    return TD_OK;
}

/* *ret_list: NULL when it is absent. */
static td_status find_layer_types(const json_t *obj, const char *what,
                                  const struct td_model_config *c, const json_t **ret_list,
                                  struct td_err *err)
{
    const json_t *list = *ret_list = json_object_get(obj, "layer_types");
    if (!list || json_is_null(list)) {
        *ret_list = NULL;
        return TD_OK;
    }
    if (json_is_array(list) && json_array_size(list) == (size_t)c->n_layers) return TD_OK;
    return td_fail(err, TD_ERR_INVALID,
                   "%s: layer_types has %zu entries, must be num_hidden_layers (%d)", what,
                   json_is_array(list) ? json_array_size(list) : 0, c->n_layers);
}

td_status td_read_windowed_layers(const json_t *obj, const char *what, struct td_model_config *c,
                                  int32_t pattern, struct td_err *err)
{
    const json_t *list;
    td_status s = find_layer_types(obj, what, c, &list, err);
    for (int32_t i = 0; i < c->n_layers && !s; i++) {
        bool sliding = (i + 1) % pattern != 0;
        if (list) s = read_layer_type(list, i, what, c, &sliding, err);
        if (!sliding) c->full_layers[i / 8] |= (uint8_t)(1 << i % 8);
    }
    return s;
}

/* The explicit list of layer types. The window must start at one layer and hold to the last,
 * because sliding_from_layer can express nothing else. */
static td_status read_layer_types(const json_t *obj, const char *what, struct td_model_config *c,
                                  struct td_err *err)
{
    const json_t *list;
    td_status s = find_layer_types(obj, what, c, &list, err);
    if (s || !list) return s;
    int32_t first = c->n_layers;
    for (int32_t i = 0; i < c->n_layers; i++) {
        bool sliding;
        char name[32];
        if ((s = read_layer_type(list, i, what, c, &sliding, err))) return s;
        if (sliding && first == c->n_layers) first = i;
        snprintf(name, sizeof name, "layer_types[%d]", i);
        if (!sliding && first < i)
            return td_config_unsupported(what, name, json_array_get(list, (size_t)i),
                                         "sliding_attention, as an earlier layer is", err);
    }
    c->sliding_from_layer = first;
    if (first == c->n_layers) c->sliding_window = c->sliding_from_layer = 0;
    return TD_OK;
}

td_status td_read_qwen_window(const json_t *obj, const char *what, struct td_model_config *c,
                              struct td_err *err)
{
    td_status s;
    bool use = false;
    int32_t first = 28, window;
    if ((s = td_read_window(obj, what, &window, err)) ||
        (s = td_json_bool(obj, what, "use_sliding_window", &use, NULL, err)) ||
        (s = td_config_i32(obj, what, "max_window_layers", 0, TD_LAYERS_MAX, &first, err)))
        return s;
    if (use) {
        c->sliding_window = window;
        c->sliding_from_layer = window ? first : 0;
    }
    if ((s = read_layer_types(obj, what, c, err))) return s;
    if (c->sliding_from_layer >= c->n_layers) c->sliding_window = c->sliding_from_layer = 0;
    return TD_OK;
}
