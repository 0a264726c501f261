/* text_part.c - config.json of models that take images besides text: the object of their text
 * model, which alone is served here.
 *
 * The outer object has what both parts share (the type of the weights, special ids) and what
 * belongs to images. What it shares counts before the text object's own; what belongs to images is
 * listed by name, and a field in no list is refused. */
#include <string.h>

#include "common/base/json.h"
#include "common/model/config_internal.h"
#include "common/model/family.h"

struct part {
    const char *model_type, *class_name;
    const char *text_type;        /* model_type of its text_config */
    const char *const *of_images; /* fields of the outer object; the last is NULL */
    /* sizes that the text configuration's class has where the object leaves them out */
    struct {
        const char *key;
        int32_t value;
    } sizes[6];
};

static const char *const gemma_images[] = {
    "vision_config",     "mm_tokens_per_image", "boi_token_index",
    "eoi_token_index",   "boi_token_id",        "eoi_token_id",
    "image_token_index", "image_token_id",      NULL};
static const char *const mistral_images[] = {"vision_config",        "image_token_index",
                                             "image_token_id",       "projector_hidden_act",
                                             "vision_feature_layer", "multimodal_projector_bias",
                                             "spatial_merge_size",   NULL};

static const struct part parts[] = {
    {"gemma3",
     "Gemma3ForConditionalGeneration",
     "gemma3_text",
     gemma_images,
     {{"num_attention_heads", 8},
      {"num_key_value_heads", 4},
      {"vocab_size", 262208},
      {"max_position_embeddings", 131072},
      {"sliding_window", 4096},
      {0}}},
    {"mistral3", "Mistral3ForConditionalGeneration", "mistral", mistral_images, {{0}}},
};

static const char *const shared[] = {"torch_dtype",        "dtype",        "bos_token_id",
                                     "eos_token_id",       "pad_token_id", "quantization_config",
                                     "tie_word_embeddings"};

static bool is_one_of(const char *const *names, size_t n, const char *key)
{
    for (size_t i = 0; i < n && names[i]; i++)
        if (!strcmp(names[i], key)) return true;
    return false;
}

static const struct part *part_of(const json_t *obj)
{
    const char *type = json_string_value(json_object_get(obj, "model_type"));
    for (size_t i = 0; type && i < sizeof parts / sizeof *parts; i++)
        if (!strcmp(parts[i].model_type, type)) return &parts[i];
    return NULL;
}

static bool is_of_images(const struct part *p, const char *key)
{
    return is_one_of(p->of_images, SIZE_MAX, key);
}

/* The class is the one that we know, and no field of the outer object is unknown. */
static td_status check_outer(const struct part *p, const json_t *obj, const char *what,
                             struct td_err *err)
{
    const char *key;
    json_t *v;
    const json_t *list = json_object_get(obj, "architectures");
    const char *name = json_string_value(json_array_get(list, 0));
    if (list && !json_is_null(list) &&
        (!name || strcmp(name, p->class_name) != 0 || json_array_size(list) != 1)) {
        char must[96];
        snprintf(must, sizeof must, "[\"%s\"] for model_type %s", p->class_name, p->model_type);
        return td_config_unsupported(what, "architectures", list, must, err);
    }
    json_object_foreach((json_t *)(uintptr_t)obj, key, v)
    {
        bool known = !strcmp(key, "model_type") || !strcmp(key, "architectures") ||
                     !strcmp(key, "text_config") ||
                     is_one_of(shared, sizeof shared / sizeof *shared, key) || is_of_images(p, key);
        td_status s = known ? TD_OK : td_config_check_without_effect(what, key, v, err);
        if (s) return s;
    }
    return TD_OK;
}

/* The text object with what the outer one adds to it. */
static td_status merge(const struct part *p, const json_t *obj, json_t *text, const char *what,
                       struct td_err *err)
{
    const char *type = json_string_value(json_object_get(text, "model_type"));
    if (type && strcmp(type, p->text_type) != 0)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: text_config.model_type is %.64s, must be %s for model_type %s", what,
                       type, p->text_type, p->model_type);
    bool made = !json_object_set_new(text, "model_type", json_string(p->text_type));
    json_object_del(text, "architectures"); /* the outer object's says it */
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
        json_t *v = json_object_get(obj, shared[i]);
        if (v && !json_is_null(v)) made &= !json_object_set(text, shared[i], v);
    }
    /* one of two names for one thing; the other may stand in the text object */
    if (json_object_get(obj, "dtype")) json_object_del(text, "torch_dtype");
    if (json_object_get(obj, "torch_dtype")) json_object_del(text, "dtype");
    for (size_t i = 0; p->sizes[i].key; i++)
        if (!json_object_get(text, p->sizes[i].key))
            made &= !json_object_set_new(text, p->sizes[i].key, json_integer(p->sizes[i].value));
    return made ? TD_OK : td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
}

td_status td_config_text_part(const json_t *obj, const char *what, json_t **ret_text,
                              struct td_err *err)
{
    const struct part *p = part_of(obj);
    const json_t *text = json_object_get(obj, "text_config");
    *ret_text = NULL;
    if (!p) return TD_OK;
    if (!json_is_object(text))
        return td_fail(err, TD_ERR_INVALID, "%s: text_config is missing, must be an object", what);
    td_status s = check_outer(p, obj, what, err);
    if (s) return s;
    json_t *own = json_copy((json_t *)(uintptr_t)text);
    if (!own) return td_fail(err, TD_ERR_NOMEM, "%s: no memory", what);
    if ((s = merge(p, obj, own, what, err))) {
        json_decref(own);
        return s;
    }
    *ret_text = own;
    return TD_OK;
}

bool td_config_is_of_images(const json_t *obj, const char *key)
{
    const struct part *p = part_of(obj);
    return p && is_of_images(p, key);
}
