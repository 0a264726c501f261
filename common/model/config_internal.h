/* config_internal.h - functions of config.c that readers of other settings call: of a GGUF file's
 * fields, of rope, of quantisation. Inside common/model only. */
#ifndef TD_MODEL_CONFIG_INTERNAL_H
#define TD_MODEL_CONFIG_INTERNAL_H

#include <jansson.h>

#include "common/model/config.h"

/* Bounds that keep products of sizes within 64 bits. */
#define TD_INTERMEDIATE_MAX 1048576
#define TD_POSITIONS_MAX 4194304

/* Of yarn's mscale and mscale_all_dim; published models have 0.707 and 1. With a factor of 1e6 this
 * scales scores by 2e4, the square of 0.1 * 100 * ln(1e6) + 1, which f32 holds with room. */
#define TD_MSCALE_MAX 100

/* Reads the object of a config.json; `what` names it in errors. */
td_status td_model_config_read(const json_t *obj, const char *what,
                               struct td_model_config *ret_config, struct td_err *err);

/* A field that may be absent or null: *ret then keeps its value. */
td_status td_config_i32(const json_t *obj, const char *what, const char *key, int32_t min,
                        int32_t max, int32_t *ret, struct td_err *err);

td_status td_config_float(const json_t *obj, const char *what, const char *key, double min,
                          double max, float *ret, struct td_err *err);

/* The MLP's activation: the family decides it, and a file that names another is refused. */
td_status td_config_read_act(const json_t *obj, const char *what, const char *key,
                             const struct td_model_config *c, struct td_err *err);

/* rope_config.c: rope[0], and rope[1] where the family has two; head_dim is set. */
td_status td_config_read_rope(const json_t *obj, const char *what, struct td_model_config *c,
                              struct td_err *err);

/* A field outside every family's: TD_OK where it cannot change a logit or is switched off. */
td_status td_config_check_without_effect(const char *what, const char *key, const json_t *v,
                                         struct td_err *err);

/* text_part.c: the text model's object in the config.json of a model that takes images, too, with
 * what the outer object says of it; a new reference. NULL: obj is not of such a model. */
td_status td_config_text_part(const json_t *obj, const char *what, json_t **ret_text,
                              struct td_err *err);
/* Whether a field of that outer object is about images alone. */
bool td_config_is_of_images(const json_t *obj, const char *key);

/* TD_ERR_UNSUPPORTED: "WHAT: KEY is VALUE, not supported: must be MUST". */
td_status td_config_unsupported(const char *what, const char *key, const json_t *v,
                                const char *must, struct td_err *err);

#endif
