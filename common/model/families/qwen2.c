/* qwen2.c - Qwen2 and 2.5: biases on q, k and v, and a window in the later layers. */
#include "common/model/families/families.h"

static const char *const fields[] = {"sliding_window", "use_sliding_window", "max_window_layers",
                                     "layer_types", NULL};

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    c->qkv_bias = true;
    return td_read_qwen_window(obj, what, c, err);
}

const struct td_family td_family_qwen2 = {.model_type = "qwen2",
                                          .models = "Qwen2 and 2.5",
                                          .class_name = "Qwen2ForCausalLM",
                                          .gguf = "qwen2",
                                          .fields = fields,
                                          .default_bos = -1,
                                          .default_eos = -1,
                                          .read = read,
                                          .layer = td_std_layer};
