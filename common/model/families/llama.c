/* llama.c - Llama 1, 2 and 3.x: LlamaForCausalLM. */
#include "common/model/families/families.h"

/* max_sequence_length: in the first conversions, in place of max_position_embeddings */
static const char *const fields[] = {"attention_bias", "mlp_bias", "max_sequence_length", NULL};

const struct td_family td_family_llama = {.model_type = "llama",
                                          .models = "Llama 1, 2, 3.x",
                                          .class_name = "LlamaForCausalLM",
                                          .gguf = "llama",
                                          .gguf_pairs = true,
                                          .fields = fields,
                                          .kv_heads_may_be_absent = true,
                                          .default_bos = 1,
                                          .default_eos = 2,
                                          .read = td_read_biases,
                                          .layer = td_std_layer};
