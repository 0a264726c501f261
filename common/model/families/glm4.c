/* glm4.c - GLM-4-9B (glm) and GLM-4-0414 (glm4): half of each head is rotated, in pairs of
 * neighbours; biases on q, k and v; gate and up in one tensor. GLM-4-0414 also norms what attention
 * and MLP return. */
#include "common/model/families/families.h"

#include "common/base/json.h"

static const char *const fields[] = {"attention_bias", NULL};

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    c->qkv_bias = true; /* but none on o */
    c->rope_neighbours = true;
    return td_json_bool(obj, what, "attention_bias", &c->qkv_bias, NULL, err);
}

static const struct td_tensor_row out_norms[] = {
    {TD_INTO_ATTN_OUT_NORM, "post_self_attn_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE,
     TD_CUT_NONE, 0},
    {TD_INTO_MLP_OUT_NORM, "post_mlp_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0},
    {0},
};

static void glm_layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->tensors[1] = td_fused_mlp;
}

static void glm4_layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    glm_layer(c, i, ret);
    ret->tensors[2] = out_norms;
}

#define GLM                                                                                        \
    .fields = fields, .default_head_dim = 128, .default_bos = -1, .default_eos = 151329,           \
    .default_eps = 1.5625e-7f, .partial_rotary = 0.5, .read = read

const struct td_family td_family_glm = {.model_type = "glm",
                                        .models = "GLM-4-9B",
                                        .class_name = "GlmForCausalLM",
                                        GLM,
                                        .layer = glm_layer};
const struct td_family td_family_glm4 = {.model_type = "glm4",
                                         .models = "GLM-4-0414",
                                         .class_name = "Glm4ForCausalLM",
                                         GLM,
                                         .layer = glm4_layer};
