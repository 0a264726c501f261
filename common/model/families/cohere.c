/* cohere.c - Command-R and R+ (cohere) and Command-R7B (cohere2): LayerNorm without a bias, whose
 * row goes to attention and to the MLP alike; pairs of neighbours are rotated; logits are scaled.
 * R+ norms each head of q and of k with weights of its own. In Command-R7B three of four layers
 * have a window, and the others do not rotate. */
#include "common/model/families/families.h"

#include <stddef.h>
#include <string.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"

static const char *const fields_1[] = {"attention_bias", "layer_norm_eps", "logit_scale",
                                       "use_qk_norm", NULL};
static const char *const fields_2[] = {"attention_bias",
                                       "layer_norm_eps",
                                       "logit_scale",
                                       "use_qk_norm",
                                       "sliding_window",
                                       "layer_types",
                                       "sliding_window_pattern",
                                       "_sliding_window_pattern",
                                       "layer_switch",
                                       "position_embedding_type",
                                       "rotary_pct",
                                       "order_of_interleaved_layers",
                                       "use_embedding_sharing",
                                       "use_gated_activation",
                                       "use_parallel_block",
                                       "use_parallel_embedding",
                                       NULL};

static td_status read_1(const json_t *obj, const char *what, struct td_model_config *c,
                        struct td_err *err)
{
    td_status s;
    c->norm_centres = c->rope_neighbours = true;
    c->logit_scale = 0.0625f;
    c->rms_eps = 1e-5f;
    if ((s = td_read_biases(obj, what, c, err)) ||
        (s = td_config_float(obj, what, "layer_norm_eps", 0, 1, &c->rms_eps, err)) ||
        (s = td_config_float(obj, what, "logit_scale", 1e-6, 1e6, &c->logit_scale, err)))
        return s;
    return td_json_bool(obj, what, "use_qk_norm", &c->qk_norm, NULL, err);
}

/* Fields of files that can only say what the class does. */
static td_status check_2(const json_t *obj, const char *what, struct td_err *err)
{
    static const struct {
        const char *key;
        const char *text; /* NULL: true */
    } rows[] = {{"order_of_interleaved_layers", "local_attn_first"},
                {"position_embedding_type", "rope_gptj"},
                {"use_embedding_sharing", NULL},
                {"use_gated_activation", NULL},
                {"use_parallel_block", NULL}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const json_t *v = json_object_get(obj, rows[i].key);
        const char *text = json_string_value(v);
        if (!v || json_is_null(v)) continue;
        if (rows[i].text ? !text || strcmp(text, rows[i].text) != 0 : !json_is_true(v))
            return td_config_unsupported(what, rows[i].key, v, rows[i].text ? rows[i].text : "true",
                                         err);
    }
    double share = 1;
    td_status s = td_json_f64(obj, what, "rotary_pct", 0, 1, &share, NULL, err);
    if (s || share == 1) return s;
    return td_config_unsupported(what, "rotary_pct", json_object_get(obj, "rotary_pct"), "1", err);
}

/* The older name of the pattern, which a file may only repeat. */
static td_status check_switch(const json_t *obj, const char *what, int32_t pattern,
                              struct td_err *err)
{
    int32_t every = pattern;
    td_status s = td_config_i32(obj, what, "layer_switch", 1, TD_LAYERS_MAX, &every, err);
    if (s || every == pattern) return s;
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "%s: layer_switch is %d, not supported: must be sliding_window_pattern (%d)",
                   what, every, pattern);
}

static td_status read_2(const json_t *obj, const char *what, struct td_model_config *c,
                        struct td_err *err)
{
    int32_t pattern = 4;
    td_status s;
    if ((s = check_2(obj, what, err)) || (s = read_1(obj, what, c, err)) ||
        (s = td_config_i32(obj, what, "_sliding_window_pattern", 1, TD_LAYERS_MAX, &pattern,
                           err)) ||
        (s = td_config_i32(obj, what, "sliding_window_pattern", 1, TD_LAYERS_MAX, &pattern, err)) ||
        (s = td_read_window(obj, what, &c->sliding_window, err)) ||
        (s = check_switch(obj, what, pattern, err)) ||
        (s = td_read_windowed_layers(obj, what, c, pattern, err)))
        return s;
    memcpy(c->second_rope, c->full_layers, sizeof c->second_rope);
    c->rope[1].scaling = TD_ROPE_NONE;
    c->n_ropes = 2;
    /* its class has no such norms */
    return c->qk_norm ? td_config_unsupported(what, "use_qk_norm", json_true(), "false", err)
                      : TD_OK;
}

#define IF(field) offsetof(struct td_model_config, field)
static const struct td_tensor_row attention[] = {
    {TD_INTO_ATTN_NORM, "input_layernorm.weight", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, 0},
    TD_STD_QKV,
    {TD_INTO_Q_NORM, "self_attn.q_norm.weight", TD_DIM_Q, TD_DIM_NONE, TD_CUT_ROWS, IF(qk_norm)},
    {TD_INTO_K_NORM, "self_attn.k_norm.weight", TD_DIM_K, TD_DIM_NONE, TD_CUT_ROWS, IF(qk_norm)},
    {TD_INTO_O, "self_attn.o_proj.weight", TD_DIM_HIDDEN, TD_DIM_Q, TD_CUT_COLS, 0},
    {TD_INTO_O_BIAS, "self_attn.o_proj.bias", TD_DIM_HIDDEN, TD_DIM_NONE, TD_CUT_NONE, IF(o_bias)},
    {0},
};

static void layer(const struct td_model_config *c, int32_t i, struct td_layer_spec *ret)
{
    td_std_layer(c, i, ret);
    ret->parallel = true;
    if (c->qk_norm) ret->qk_norm = TD_QK_NORM_OWN;
    ret->tensors[0] = attention;
    ret->tensors[1] = TD_WITHOUT_NORM(td_std_mlp);
}

#define COHERE                                                                                     \
    .kv_heads_may_be_absent = true, .default_bos = 5, .default_eos = 255001, .default_tied = true, \
    .layer = layer

const struct td_family td_family_cohere = {.model_type = "cohere",
                                           .models = "Command-R and R+",
                                           .class_name = "CohereForCausalLM",
                                           COHERE,
                                           .fields = fields_1,
                                           .default_theta = 5e5,
                                           .read = read_1};
const struct td_family td_family_cohere2 = {.model_type = "cohere2",
                                            .models = "Command-R7B",
                                            .class_name = "Cohere2ForCausalLM",
                                            COHERE,
                                            .fields = fields_2,
                                            .read = read_2};
