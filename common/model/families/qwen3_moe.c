/* qwen3_moe.c - Qwen3 with mixtures of experts: the attention of qwen3.c, and in most layers
 * experts in place of the MLP. */
#include "common/model/families/families.h"

static const char *const fields[] = {
    "attention_bias",        "num_experts",    "num_local_experts",   "num_experts_per_tok",
    "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
    "use_sliding_window",    "sliding_window", "max_window_layers",   NULL};

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    c->qk_norm = true;
    td_status s = td_read_biases(obj, what, c, err);
    if (!s) s = td_refuse_window(obj, what, err);
    return s ? s : td_read_qwen_experts(obj, what, c, err);
}

const struct td_family td_family_qwen3_moe = {.model_type = "qwen3_moe",
                                              .models = "Qwen3-MoE",
                                              .class_name = "Qwen3MoeForCausalLM",
                                              .gguf = "qwen3moe",
                                              .gguf_experts = true,
                                              .fields = fields,
                                              .default_bos = -1,
                                              .default_eos = -1,
                                              .read = read,
                                              .layer = td_std_layer};
