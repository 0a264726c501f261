/* gpt_oss.c - gpt-oss (OpenAI 2025, model card): a window in every second layer, attention sinks,
 * biases everywhere, experts with a clamped gate whose matrices are bf16 or MXFP4 in the file. */
#include "common/model/families/families.h"

#include <stdio.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"
#include "kernels/experts.h"

/* initial_context_length repeats what the rotation's object says, experts_per_token what
 * num_experts_per_tok does. */
static const char *const fields[] = {"attention_bias",
                                     "num_local_experts",
                                     "num_experts_per_tok",
                                     "experts_per_token",
                                     "sliding_window",
                                     "layer_types",
                                     "swiglu_alpha",
                                     "swiglu_limit",
                                     "initial_context_length",
                                     "original_max_position_embeddings",
                                     NULL};

/* A number of TD_ACT_SWIGLU_7, which a file may only repeat. */
static td_status need_number(const json_t *obj, const char *what, const char *key, double must,
                             struct td_err *err)
{
    char text[32];
    double v = must;
    td_status s = td_json_f64(obj, what, key, 0, 1e6, &v, NULL, err);
    if (s || v == must) return s;
    snprintf(text, sizeof text, "%g", must);
    return td_config_unsupported(what, key, json_object_get(obj, key), text, err);
}

/* The class stretches a rotation that the file does not describe. */
static td_status need_rope(const json_t *obj, const char *what, struct td_err *err)
{
    if (json_is_object(json_object_get(obj, "rope_scaling")) ||
        json_is_object(json_object_get(obj, "rope_parameters")))
        return TD_OK;
    return td_fail(err, TD_ERR_INVALID,
                   "%s: rope_scaling and rope_parameters are missing, one must be an object", what);
}

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    struct td_experts_config *e = &c->experts;
    td_status s = td_json_need_i32(obj, what, "num_local_experts", 1, TD_EXPERTS_MAX, &e->n, err);
    if (s) return s;
    int32_t most = e->n < TD_EXPERTS_USED_MAX ? e->n : TD_EXPERTS_USED_MAX, again;
    c->qkv_bias = true;
    c->sliding_window = 128;
    if ((s = td_json_need_i32(obj, what, "num_experts_per_tok", 1, most, &e->n_used, err)) ||
        (s = td_json_bool(obj, what, "attention_bias", &c->qkv_bias, NULL, err)) ||
        (s = td_config_i32(obj, what, "sliding_window", 1, INT32_MAX, &c->sliding_window, err)) ||
        (s = td_read_windowed_layers(obj, what, c, 2, err)) ||
        (s = need_number(obj, what, "swiglu_alpha", 1.702, err)) ||
        (s = need_number(obj, what, "swiglu_limit", 7, err)))
        return s;
    again = e->n_used;
    if ((s = td_config_i32(obj, what, "experts_per_token", 1, most, &again, err))) return s;
    if (again != e->n_used)
        return td_fail(
            err, TD_ERR_INVALID,
            "%s: num_experts_per_tok is %d and experts_per_token is %d, must be the same", what,
            e->n_used, again);
    c->o_bias = c->qkv_bias;
    e->step = 1;
    e->intermediate = c->intermediate;
    e->rule.normalise = true; /* softmax of the chosen ones' logits */
    return need_rope(obj, what, err);
}

static const struct td_tensor_row mixture[] = {
    {TD_INTO_MLP_NORM, "post_attention_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE,
     0},
    {TD_INTO_EXPERT_ROUTER, "mlp.router.weight", TD_DIM_EXPERTS, TD_DIM_HIDDEN, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_ROUTER_BIAS, "mlp.router.bias", TD_DIM_EXPERTS, TD_DIM_NONE, TD_CUT_NONE, 0},
    {0},
};
static const struct td_tensor_row sinks[] = {
    {TD_INTO_SINKS, "self_attn.sinks", TD_DIM_HEADS, TD_DIM_NONE, TD_CUT_ROWS, 0},
    {0},
};
/* The file has gate_up_proj, gate_up_proj_bias, ... of all experts (expert_stacks.h). */
static const struct td_tensor_row expert[] = {
    {TD_INTO_EXPERT_GATE_UP, "gate_up_proj.weight", TD_DIM_EXPERT_PAIRS, TD_DIM_HIDDEN, TD_CUT_NONE,
     0},
    {TD_INTO_EXPERT_GATE_UP_BIAS, "gate_up_proj.bias", TD_DIM_EXPERT_PAIRS, TD_DIM_NONE,
     TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_DOWN, "down_proj.weight", TD_DIM_HIDDEN, TD_DIM_EXPERT_MLP, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_DOWN_BIAS, "down_proj.bias", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0},
    {0},
};
/* The same in a GGUF file. */
static const struct td_tensor_row expert_apart[] = {
    {TD_INTO_EXPERT_GATE_UP, "gate_proj.weight", TD_DIM_EXPERT_MLP, TD_DIM_HIDDEN, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_GATE_UP, "up_proj.weight", TD_DIM_EXPERT_MLP, TD_DIM_HIDDEN, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_GATE_UP_BIAS, "gate_proj.bias", TD_DIM_EXPERT_MLP, TD_DIM_NONE, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_GATE_UP_BIAS, "up_proj.bias", TD_DIM_EXPERT_MLP, TD_DIM_NONE, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_DOWN, "down_proj.weight", TD_DIM_HIDDEN, TD_DIM_EXPERT_MLP, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_DOWN_BIAS, "down_proj.bias", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0},
    {0},
};

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->tensors[1] = mixture;
    ret->tensors[2] = sinks;
    ret->expert_tensors = c->experts.gate_up_apart ? expert_apart : expert;
    ret->expert_prefix = "mlp.experts.";
    ret->expert_stacks = !c->experts.gate_up_apart;
}

static const struct td_gguf_name gguf_names[] = {
    {"post_attention_norm.weight", "post_attention_layernorm.weight"},
    {"attn_sinks.weight", "self_attn.sinks"},
    {0},
};
static const char *const gguf_keys[] = {"attention.sliding_window", NULL};

/* GGUF has no key for "truncate", which published models switch off. */
static bool gguf_fields(json_t *obj)
{
    json_t *rope = json_object_get(obj, "rope_scaling");
    return !rope || json_object_set_new(rope, "truncate", json_false()) == 0;
}

const struct td_family td_family_gpt_oss = {.model_type = "gpt_oss",
                                            .models = "gpt-oss",
                                            .class_name = "GptOssForCausalLM",
                                            .gguf = "gpt-oss",
                                            .gguf_experts = true,
                                            .gguf_names = gguf_names,
                                            .gguf_keys = gguf_keys,
                                            .gguf_fields = gguf_fields,
                                            .fields = fields,
                                            .default_head_dim = 64,
                                            .default_bos = -1,
                                            .default_eos = 200002,
                                            .default_theta = 150000,
                                            .default_eps = 1e-5f,
                                            .act = TD_ACT_SWIGLU_7,
                                            .read = read,
                                            .layer = layer};
