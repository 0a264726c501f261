/* gemma.c - Gemma 1, 2 and 3 (text): norms whose weights the file has less 1, embeddings times
 * sqrt(hidden), a gate of GELU. Gemma 2 norms what attention and MLP return, too, caps scores and
 * logits, and gives every second layer a window. Gemma 3 norms the heads of q and k in place of the
 * caps, and its windowed layers, 5 of 6, have a rotation of their own. */
#include "common/model/families/families.h"

#include <math.h>
#include <string.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"

#define SCALES "attention_bias", "hidden_activation"
static const char *const fields_1[] = {SCALES, NULL};
static const char *const fields_2[] = {SCALES,
                                       "query_pre_attn_scalar",
                                       "attn_logit_softcapping",
                                       "final_logit_softcapping",
                                       "sliding_window",
                                       "layer_types",
                                       NULL};
static const char *const fields_3[] = {
    SCALES,        "query_pre_attn_scalar",  "final_logit_softcapping", "sliding_window",
    "layer_types", "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq",
    NULL};

static td_status read_1(const json_t *obj, const char *what, struct td_model_config *c,
                        struct td_err *err)
{
    c->embed_root = true;
    /* the name that counts where a file has both */
    td_status s = td_config_read_act(obj, what, "hidden_activation", c, err);
    return s ? s : td_read_biases(obj, what, c, err);
}

/* What Gemma 2 and 3 add, with the windowed layers of a file that does not list them: all but every
 * `pattern`-th. */
static td_status read_scales(const json_t *obj, const char *what, struct td_model_config *c,
                             int32_t pattern, struct td_err *err)
{
    float scalar = 256;
    td_status s;
    if ((s = read_1(obj, what, c, err)) ||
        (s = td_config_float(obj, what, "query_pre_attn_scalar", 1e-3, 1e6, &scalar, err)) ||
        (s = td_config_float(obj, what, "attn_logit_softcapping", 1e-3, 1e6, &c->attn_cap, err)) ||
        (s = td_config_float(obj, what, "final_logit_softcapping", 1e-3, 1e6, &c->logit_cap,
                             err)) ||
        (s = td_read_window(obj, what, &c->sliding_window, err)))
        return s;
    c->attn_scale = 1.0f / sqrtf(scalar);
    return td_read_windowed_layers(obj, what, c, pattern, err);
}

static td_status read_2(const json_t *obj, const char *what, struct td_model_config *c,
                        struct td_err *err)
{
    const json_t *v = json_object_get(obj, "attn_logit_softcapping");
    c->attn_cap = v && json_is_null(v) ? 0 : 50;
    v = json_object_get(obj, "final_logit_softcapping");
    c->logit_cap = v && json_is_null(v) ? 0 : 30;
    return read_scales(obj, what, c, 2, err);
}

static td_status read_3(const json_t *obj, const char *what, struct td_model_config *c,
                        struct td_err *err)
{
    int32_t pattern = 6;
    td_status s;
    if ((s = td_config_i32(obj, what, "_sliding_window_pattern", 1, TD_LAYERS_MAX, &pattern,
                           err)) ||
        (s = td_config_i32(obj, what, "sliding_window_pattern", 1, TD_LAYERS_MAX, &pattern, err)))
        return s;
    c->qk_norm = true;
    s = read_scales(obj, what, c, pattern, err);
    for (int32_t i = 0; i < c->n_layers; i++)
        if (!td_layer_bit(c->full_layers, i)) c->second_rope[i / 8] |= (uint8_t)(1 << i % 8);
    return s;
}

static const struct td_tensor_row sandwich[] = {
    {TD_INTO_ATTN_NORM, "input_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0},
    {TD_INTO_ATTN_OUT_NORM, "post_attention_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE,
     TD_CUT_NONE, 0},
    {TD_INTO_MLP_NORM, "pre_feedforward_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE,
     0},
    {TD_INTO_MLP_OUT_NORM, "post_feedforward_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE,
     TD_CUT_NONE, 0},
    {0},
};

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->tensors[0] = TD_WITHOUT_NORM(td_std_attention);
    ret->tensors[1] = TD_WITHOUT_NORM(td_std_mlp);
    ret->tensors[2] = sandwich;
}

static const struct td_gguf_name gguf_names[] = {
    {"ffn_norm.weight", "pre_feedforward_layernorm.weight"},
    {"post_attention_norm.weight", "post_attention_layernorm.weight"},
    {"post_ffw_norm.weight", "post_feedforward_layernorm.weight"},
    {0},
};
static const char *const gguf_keys_2[] = {"attention.sliding_window", "attn_logit_softcapping",
                                          "final_logit_softcapping", NULL};
static const char *const gguf_keys_3[] = {"attention.sliding_window",
                                          "attention.sliding_window_pattern",
                                          "final_logit_softcapping", "rope.freq_base_swa", NULL};

/* GGUF has no key for query_pre_attn_scalar: readers know the one published model, by its number of
 * layers, in which it is not head_dim but hidden_size / num_attention_heads. */
static bool set_scalar(json_t *obj, json_int_t odd_layers)
{
    json_int_t heads = json_integer_value(json_object_get(obj, "num_attention_heads")),
               hidden = json_integer_value(json_object_get(obj, "hidden_size")),
               scalar = json_integer_value(json_object_get(obj, "head_dim"));
    if (heads > 0 && json_integer_value(json_object_get(obj, "num_hidden_layers")) == odd_layers)
        scalar = hidden / heads;
    return json_object_set_new(obj, "query_pre_attn_scalar", json_integer(scalar)) == 0;
}
static bool gguf_fields_2(json_t *obj) { return set_scalar(obj, 46); }

/* A file without a window has only full layers. */
static bool gguf_fields_3(json_t *obj)
{
    return set_scalar(obj, 62) &&
           (json_is_integer(json_object_get(obj, "sliding_window")) ||
            json_object_set_new(obj, "sliding_window_pattern", json_integer(1)) == 0);
}

#define GEMMA                                                                                      \
    .default_head_dim = 256, .default_bos = 2, .default_eos = 1, .default_tied = true,             \
    .act = TD_ACT_GELU, .norms_less_1 = true

const struct td_family td_family_gemma = {.model_type = "gemma",
                                          .models = "Gemma 1",
                                          .class_name = "GemmaForCausalLM",
                                          GEMMA,
                                          .gguf = "gemma",
                                          .fields = fields_1,
                                          .read = read_1,
                                          .layer = td_std_layer};
const struct td_family td_family_gemma2 = {.model_type = "gemma2",
                                           .models = "Gemma 2",
                                           .class_name = "Gemma2ForCausalLM",
                                           GEMMA,
                                           .gguf = "gemma2",
                                           .gguf_names = gguf_names,
                                           .gguf_keys = gguf_keys_2,
                                           .gguf_fields = gguf_fields_2,
                                           .fields = fields_2,
                                           .read = read_2,
                                           .layer = layer};
const struct td_family td_family_gemma3 = {.model_type = "gemma3_text",
                                           .models = "Gemma 3 (text)",
                                           .class_name = "Gemma3ForCausalLM",
                                           GEMMA,
                                           .gguf = "gemma3",
                                           .gguf_names = gguf_names,
                                           .gguf_keys = gguf_keys_3,
                                           .gguf_fields = gguf_fields_3,
                                           .fields = fields_3,
                                           .default_theta = 1e6,
                                           .local_theta = 1e4,
                                           .read = read_3,
                                           .layer = layer};
