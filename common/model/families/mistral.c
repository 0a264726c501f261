/* mistral.c - Mistral: Llama with a sliding window in every layer. Its GGUF files are Llama's. */
#include "common/model/families/families.h"

static const char *const fields[] = {"sliding_window", NULL};

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    return td_read_window(obj, what, &c->sliding_window, err);
}

const struct td_family td_family_mistral = {.model_type = "mistral",
                                            .models = "Mistral",
                                            .class_name = "MistralForCausalLM",
                                            .gguf = "llama",
                                            .gguf_pairs = true,
                                            .fields = fields,
                                            .default_bos = 1,
                                            .default_eos = 2,
                                            .read = read,
                                            .layer = td_std_layer};
