/* qwen2_moe.c - Qwen1.5 and Qwen2 with mixtures of experts: the attention of qwen2.c, and in most
 * layers experts in place of the MLP, with one MLP beside them that every row has, times the
 * sigmoid of a product of the row. */
#include "common/model/families/families.h"

#include <string.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"

static const char *const fields[] = {"qkv_bias",
                                     "num_experts",
                                     "num_local_experts",
                                     "num_experts_per_tok",
                                     "moe_intermediate_size",
                                     "shared_expert_intermediate_size",
                                     "norm_topk_prob",
                                     "decoder_sparse_step",
                                     "mlp_only_layers",
                                     "use_sliding_window",
                                     "sliding_window",
                                     "max_window_layers",
                                     "layer_types",
                                     NULL};

static td_status refuse_windowed_layers(const json_t *obj, const char *what, struct td_err *err)
{
    const json_t *list = json_object_get(obj, "layer_types");
    if (!list || json_is_null(list)) return TD_OK;
    if (!json_is_array(list))
        return td_fail(err, TD_ERR_INVALID, "%s: layer_types must be a list", what);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        if (!json_is_string(v) || strcmp(json_string_value(v), "full_attention") != 0)
            return td_config_unsupported(what, "layer_types", v, "full_attention in every layer",
                                         err);
    }
    return TD_OK;
}

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    c->qkv_bias = true;
    td_status s = td_json_bool(obj, what, "qkv_bias", &c->qkv_bias, NULL, err);
    if (!s) s = td_refuse_window(obj, what, err);
    if (!s) s = refuse_windowed_layers(obj, what, err);
    if (!s) s = td_read_qwen_experts(obj, what, c, err);
    return s ? s
             : td_json_need_i32(obj, what, "shared_expert_intermediate_size", 1,
                                TD_INTERMEDIATE_MAX, &c->experts.shared, err);
}

static const struct td_tensor_row mixture[] = {
    {TD_INTO_MLP_NORM, "post_attention_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE,
     0},
    {TD_INTO_EXPERT_ROUTER, "mlp.gate.weight", TD_DIM_EXPERTS, TD_DIM_HIDDEN, TD_CUT_NONE, 0},
    {TD_INTO_GATE_UP, "mlp.shared_expert.gate_proj.weight", TD_DIM_SHARED_MLP, TD_DIM_HIDDEN,
     TD_CUT_ROWS, 0},
    {TD_INTO_GATE_UP, "mlp.shared_expert.up_proj.weight", TD_DIM_SHARED_MLP, TD_DIM_HIDDEN,
     TD_CUT_ROWS, 0},
    {TD_INTO_DOWN, "mlp.shared_expert.down_proj.weight", TD_DIM_HIDDEN, TD_DIM_SHARED_MLP,
     TD_CUT_COLS, 0},
    {TD_INTO_SHARED_GATE, "mlp.shared_expert_gate.weight", TD_DIM_ONE, TD_DIM_HIDDEN, TD_CUT_NONE,
     0},
    {0},
};

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    if (ret->expert_tensors) ret->tensors[1] = mixture;
}

const struct td_family td_family_qwen2_moe = {.model_type = "qwen2_moe",
                                              .models = "Qwen2-MoE",
                                              .class_name = "Qwen2MoeForCausalLM",
                                              .fields = fields,
                                              .default_bos = -1,
                                              .default_eos = -1,
                                              .read = read,
                                              .layer = layer};
