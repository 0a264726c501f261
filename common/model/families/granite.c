/* granite.c - Granite 3: Llama with four scales, of embeddings, attention, what a layer adds, and
 * logits. */
#include "common/model/families/families.h"

#include "common/model/config_internal.h"

static const char *const fields[] = {"attention_bias",
                                     "mlp_bias",
                                     "embedding_multiplier",
                                     "attention_multiplier",
                                     "residual_multiplier",
                                     "logits_scaling",
                                     NULL};

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    float divisor = 1;
    td_status s;
    c->attn_scale = 1;
    if ((s = td_read_biases(obj, what, c, err)) ||
        (s = td_config_float(obj, what, "embedding_multiplier", 1e-6, 1e6, &c->embed_scale, err)) ||
        (s = td_config_float(obj, what, "attention_multiplier", 1e-6, 1e6, &c->attn_scale, err)) ||
        (s = td_config_float(obj, what, "residual_multiplier", 1e-6, 1e6, &c->residual_scale,
                             err)) ||
        (s = td_config_float(obj, what, "logits_scaling", 1e-6, 1e6, &divisor, err)))
        return s;
    c->logit_scale = 1 / divisor;
    return TD_OK;
}

const struct td_family td_family_granite = {.model_type = "granite",
                                            .models = "Granite 3",
                                            .class_name = "GraniteForCausalLM",
                                            .fields = fields,
                                            .kv_heads_may_be_absent = true,
                                            .default_bos = 1,
                                            .default_eos = 2,
                                            .read = read,
                                            .layer = td_std_layer};
