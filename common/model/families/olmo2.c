/* olmo2.c - OLMo-2: no norm before attention and MLP, one behind each; and norms of q and of k over
 * all heads together. */
#include "common/model/families/families.h"

static const char *const fields[] = {"attention_bias", NULL};

static const struct td_tensor_row norms[] = {
    {TD_INTO_Q_NORM, "self_attn.q_norm.weight", TD_DIM_Q, TD_DIM_NONE, TD_CUT_ROWS, 0},
    {TD_INTO_K_NORM, "self_attn.k_norm.weight", TD_DIM_K, TD_DIM_NONE, TD_CUT_ROWS, 0},
    {TD_INTO_ATTN_OUT_NORM, "post_attention_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE,
     TD_CUT_NONE, 0},
    {TD_INTO_MLP_OUT_NORM, "post_feedforward_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE,
     TD_CUT_NONE, 0},
    {0},
};

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->qk_norm = TD_QK_NORM_ROWS;
    ret->tensors[0] = TD_WITHOUT_NORM(td_std_attention);
    ret->tensors[1] = TD_WITHOUT_NORM(td_std_mlp);
    ret->tensors[2] = norms;
}

const struct td_family td_family_olmo2 = {.model_type = "olmo2",
                                          .models = "OLMo-2",
                                          .class_name = "Olmo2ForCausalLM",
                                          .fields = fields,
                                          .kv_heads_may_be_absent = true,
                                          .default_bos = -1,
                                          .default_eos = 50279,
                                          .default_eps = 1e-5f,
                                          .read = td_read_biases,
                                          .layer = layer};
