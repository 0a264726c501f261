/* glm4_moe.c - GLM-4.5, 4.6 and 4.7: half of each head is rotated, by halves and not by neighbours;
 * MLPs in the first layers, in all others DeepSeek-V3's mixture. The layer behind the last one,
 * which predicts a second token, is skipped. */
#include "common/model/families/families.h"

#include "common/base/json.h"

static const char *const fields[] = {"attention_bias",
                                     "use_qk_norm",
                                     "n_routed_experts",
                                     "num_experts_per_tok",
                                     "n_shared_experts",
                                     "moe_intermediate_size",
                                     "n_group",
                                     "topk_group",
                                     "norm_topk_prob",
                                     "routed_scaling_factor",
                                     "first_k_dense_replace",
                                     "num_nextn_predict_layers",
                                     "num_mtp_layers",
                                     "topk_method",
                                     "scoring_func",
                                     NULL};

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    td_status s;
    if ((s = td_json_bool(obj, what, "attention_bias", &c->qkv_bias, NULL, err)) ||
        (s = td_json_bool(obj, what, "use_qk_norm", &c->qk_norm, NULL, err)))
        return s;
    return td_read_sigmoid_experts(obj, what, 1, 1, c, err); /* no bias on o */
}

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    if (ret->expert_tensors) ret->tensors[1] = td_shared_mixture;
}

const struct td_family td_family_glm4_moe = {.model_type = "glm4_moe",
                                             .models = "GLM-4.5 to 4.7",
                                             .class_name = "Glm4MoeForCausalLM",
                                             .fields = fields,
                                             .default_bos = -1,
                                             .default_eos = -1,
                                             .default_eps = 1e-5f,
                                             .partial_rotary = 0.5,
                                             .read = read,
                                             .layer = layer};
