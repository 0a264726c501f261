/* minimax_m2.c - MiniMax-M2: norms of q and of k over all heads together, the first rotary_dim dims
 * of a head rotated, and in every layer experts chosen by sigmoid and a bias, without groups. */
#include "common/model/families/families.h"

#include <stddef.h>
#include <string.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"
#include "kernels/experts.h"

/* shared_moe_mode and mlp_intermediate_size are of shared experts, which no layer has. */
static const char *const fields[] = {"num_local_experts",
                                     "num_experts_per_tok",
                                     "rotary_dim",
                                     "use_qk_norm",
                                     "qk_norm_type",
                                     "scoring_func",
                                     "use_routing_bias",
                                     "attn_type_list",
                                     "shared_intermediate_size",
                                     "shared_moe_mode",
                                     "mlp_intermediate_size",
                                     "layernorm_full_attention_beta",
                                     "layernorm_linear_attention_beta",
                                     "layernorm_mlp_beta",
                                     "use_mtp",
                                     "num_mtp_modules",
                                     "mtp_transformer_layers",
                                     "auto_map",
                                     NULL};

/* Fields that must have one value, or be absent. */
static td_status check_fixed(const json_t *obj, const char *what, struct td_err *err)
{
    static const struct {
        const char *name, *text; /* NULL: a number, or true */
        double number;
    } fixed[] = {{"use_qk_norm", NULL, 1},
                 {"use_routing_bias", NULL, 1},
                 {"qk_norm_type", "per_layer", 0},
                 {"scoring_func", "sigmoid", 0},
                 {"shared_intermediate_size", NULL, 0},
                 {"layernorm_full_attention_beta", NULL, 1},
                 {"layernorm_linear_attention_beta", NULL, 1},
                 {"layernorm_mlp_beta", NULL, 1}};
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
        const json_t *v = json_object_get(obj, fixed[i].name);
        const char *text = json_string_value(v), *must = fixed[i].text;
        bool is_1 = json_is_true(v) || (json_is_number(v) && json_number_value(v) == 1),
             is_0 = json_is_number(v) && json_number_value(v) == 0;
        if (!v || (must ? text && strcmp(text, must) == 0 : fixed[i].number == 1 ? is_1 : is_0))
            continue;
        return td_config_unsupported(what, fixed[i].name, v,
                                     must                   ? must
                                     : fixed[i].number == 1 ? "1 or true"
                                                            : "0",
                                     err);
    }
    return TD_OK;
}

/* 1 is attention by softmax; earlier models had layers with another kind. */
static td_status check_kinds(const json_t *obj, const char *what, const struct td_model_config *c,
                             struct td_err *err)
{
    const json_t *list = json_object_get(obj, "attn_type_list");
    if (!list || json_is_null(list)) return TD_OK;
    if (!json_is_array(list) || json_array_size(list) != (size_t)c->n_layers)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: attn_type_list has %zu entries, must be num_hidden_layers (%d)", what,
                       json_is_array(list) ? json_array_size(list) : 0, c->n_layers);
    for (int32_t i = 0; i < c->n_layers; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        if (!json_is_integer(v) || json_integer_value(v) != 1)
            return td_config_unsupported(what, "attn_type_list", v, "a list of 1", err);
    }
    return TD_OK;
}

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    struct td_experts_config *e = &c->experts;
    td_status s = td_json_need_i32(obj, what, "num_local_experts", 1, TD_EXPERTS_MAX, &e->n, err);
    if (s) return s;
    int32_t most = e->n < TD_EXPERTS_USED_MAX ? e->n : TD_EXPERTS_USED_MAX, rotary = 0;
    if ((s = td_json_need_i32(obj, what, "num_experts_per_tok", 1, most, &e->n_used, err)) ||
        (s = td_config_i32(obj, what, "rotary_dim", 2, c->head_dim, &rotary, err)) ||
        (s = td_config_i32(obj, what, "num_mtp_modules", 0, TD_LAYERS_MAX, &c->n_skipped, err)))
        return s;
    if (rotary % 2)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s: rotary_dim is %d, must be even", what, rotary);
    c->rotary_dim = rotary; /* 0: partial_rotary_factor says it, or all of a head is rotated */
    e->step = 1;
    e->intermediate = c->intermediate;
    e->rule.sigmoid = e->rule.normalise = e->has_bias = true;
    if ((s = check_fixed(obj, what, err))) return s;
    return check_kinds(obj, what, c, err);
}

static const struct td_tensor_row mixture[] = {
    {TD_INTO_MLP_NORM, "post_attention_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE,
     0},
    {TD_INTO_EXPERT_ROUTER, "block_sparse_moe.gate.weight", TD_DIM_EXPERTS, TD_DIM_HIDDEN,
     TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_BIAS, "block_sparse_moe.e_score_correction_bias", TD_DIM_EXPERTS, TD_DIM_NONE,
     TD_CUT_NONE, 0},
    {0},
};

static const struct td_tensor_row norms[] = {
    {TD_INTO_Q_NORM, "self_attn.q_norm.weight", TD_DIM_Q, TD_DIM_NONE, TD_CUT_ROWS, 0},
    {TD_INTO_K_NORM, "self_attn.k_norm.weight", TD_DIM_K, TD_DIM_NONE, TD_CUT_ROWS, 0},
    {0},
};

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->qk_norm = TD_QK_NORM_ROWS;
    ret->tensors[1] = mixture;
    ret->tensors[2] = norms;
    ret->expert_tensors = td_mixtral_expert;
    ret->expert_prefix = "block_sparse_moe.experts.";
}

const struct td_family td_family_minimax_m2 = {.model_type = "minimax_m2",
                                               .models = "MiniMax-M2",
                                               .class_name = "MiniMaxM2ForCausalLM",
                                               .fields = fields,
                                               .default_head_dim = 128,
                                               .default_bos = 200034,
                                               .default_eos = 200020,
                                               .default_theta = 5e6,
                                               .partial_rotary = 1,
                                               .read = read,
                                               .layer = layer};
