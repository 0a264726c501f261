/* qwen3.c - Qwen3, dense: a norm of each head of q and of k in place of Qwen2's biases. */
#include "common/model/families/families.h"

static const char *const fields[] = {"attention_bias",    "sliding_window", "use_sliding_window",
                                     "max_window_layers", "layer_types",    NULL};

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    td_status s = td_read_biases(obj, what, c, err);
    c->qk_norm = true;
    return s ? s : td_read_qwen_window(obj, what, c, err);
}

const struct td_family td_family_qwen3 = {.model_type = "qwen3",
                                          .models = "Qwen3",
                                          .class_name = "Qwen3ForCausalLM",
                                          .gguf = "qwen3",
                                          .fields = fields,
                                          .default_head_dim = 128,
                                          .default_bos = -1,
                                          .default_eos = -1,
                                          .read = read,
                                          .layer = td_std_layer};
