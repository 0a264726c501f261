/* mixtral.c - Mixtral: the attention of Mistral, and in every layer experts in place of the MLP. */
#include "common/model/families/families.h"

#include "common/base/json.h"
#include "common/model/config_internal.h"
#include "kernels/experts.h"

static const char *const fields[] = {"num_local_experts", "num_experts_per_tok", "sliding_window",
                                     NULL};

/* An expert has the size of an MLP. The weights of a row's experts always add up to 1. */
static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    struct td_experts_config *e = &c->experts;
    e->step = 1;
    e->intermediate = c->intermediate;
    e->rule.normalise = true;
    td_status s = td_json_need_i32(obj, what, "num_local_experts", 1, TD_EXPERTS_MAX, &e->n, err);
    if (s) return s;
    int32_t most = e->n < TD_EXPERTS_USED_MAX ? e->n : TD_EXPERTS_USED_MAX;
    s = td_json_need_i32(obj, what, "num_experts_per_tok", 1, most, &e->n_used, err);
    return s ? s
             : td_config_i32(obj, what, "sliding_window", 1, INT32_MAX, &c->sliding_window,
                             err); /* absent: none */
}

static const struct td_tensor_row router[] = {
    {TD_INTO_MLP_NORM, "post_attention_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE,
     0},
    {TD_INTO_EXPERT_ROUTER, "block_sparse_moe.gate.weight", TD_DIM_EXPERTS, TD_DIM_HIDDEN,
     TD_CUT_NONE, 0},
    {0},
};
/* gate, up, down */
const struct td_tensor_row td_mixtral_expert[] = {
    {TD_INTO_EXPERT_GATE_UP, "w1.weight", TD_DIM_EXPERT_MLP, TD_DIM_HIDDEN, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_GATE_UP, "w3.weight", TD_DIM_EXPERT_MLP, TD_DIM_HIDDEN, TD_CUT_NONE, 0},
    {TD_INTO_EXPERT_DOWN, "w2.weight", TD_DIM_HIDDEN, TD_DIM_EXPERT_MLP, TD_CUT_NONE, 0},
    {0},
};

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->tensors[1] = router;
    ret->expert_tensors = td_mixtral_expert;
    ret->expert_prefix = "block_sparse_moe.experts.";
}

const struct td_family td_family_mixtral = {.model_type = "mixtral",
                                            .models = "Mixtral",
                                            .class_name = "MixtralForCausalLM",
                                            .gguf = "llama",
                                            .gguf_pairs = true,
                                            .gguf_experts = true,
                                            .fields = fields,
                                            .default_bos = 1,
                                            .default_eos = 2,
                                            .default_theta = 1e6,
                                            .default_eps = 1e-5f,
                                            .read = read,
                                            .layer = layer};
