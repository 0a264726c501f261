/* smollm3.c - SmolLM3: Llama in which some layers, every fourth unless the file lists them, do not
 * rotate q and k. */
#include "common/model/families/families.h"

#include <stdio.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"

static const char *const fields[] = {"attention_bias",
                                     "mlp_bias",
                                     "no_rope_layers",
                                     "no_rope_layer_interval",
                                     "use_sliding_window",
                                     "sliding_window",
                                     "layer_types",
                                     "max_window_layers",
                                     NULL};

/* An entry of no_rope_layers is 1 where the layer rotates. */
static td_status read_layers(const json_t *obj, const char *what, struct td_model_config *c,
                             struct td_err *err)
{
    const json_t *list = json_object_get(obj, "no_rope_layers");
    int32_t interval = 4;
    td_status s =
        td_config_i32(obj, what, "no_rope_layer_interval", 1, TD_LAYERS_MAX, &interval, err);
    if (s) return s;
    if (json_is_null(list)) list = NULL;
    if (list && (!json_is_array(list) || json_array_size(list) != (size_t)c->n_layers))
        return td_fail(err, TD_ERR_INVALID,
                       "%s: no_rope_layers has %zu entries, must be num_hidden_layers (%d)", what,
                       json_is_array(list) ? json_array_size(list) : 0, c->n_layers);
    for (int32_t i = 0; i < c->n_layers; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        bool rotates = (i + 1) % interval != 0;
        char name[40];
        snprintf(name, sizeof name, "no_rope_layers[%d]", i);
        if (list &&
            !(json_is_integer(v) && json_integer_value(v) >= 0 && json_integer_value(v) <= 1))
            return td_config_unsupported(what, name, v, "0 or 1", err);
        if (list) rotates = json_integer_value(v) == 1;
        if (!rotates) c->second_rope[i / 8] |= (uint8_t)(1 << i % 8);
    }
    c->rope[1].scaling = TD_ROPE_NONE;
    c->n_ropes = 2;
    return TD_OK;
}

static td_status read(const json_t *obj, const char *what, struct td_model_config *c,
                      struct td_err *err)
{
    bool use = false;
    td_status s = td_json_bool(obj, what, "use_sliding_window", &use, NULL, err);
    if (s) return s;
    if (use) /* no published model has one */
        return td_config_unsupported(what, "use_sliding_window",
                                     json_object_get(obj, "use_sliding_window"), "false", err);
    if ((s = td_read_biases(obj, what, c, err)) || (s = read_layers(obj, what, c, err))) return s;
    return td_read_windowed_layers(obj, what, c, 1, err);
}

const struct td_family td_family_smollm3 = {.model_type = "smollm3",
                                            .models = "SmolLM3",
                                            .class_name = "SmolLM3ForCausalLM",
                                            .fields = fields,
                                            .default_bos = 128000,
                                            .default_eos = 128001,
                                            .default_theta = 2e6,
                                            .default_tied = true,
                                            .read = read,
                                            .layer = td_std_layer};
