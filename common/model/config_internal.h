/* config_internal.h - what config.c does for the other readers of models' settings. Inside
 * common/model only. */
#ifndef TD_MODEL_CONFIG_INTERNAL_H
#define TD_MODEL_CONFIG_INTERNAL_H

#include <jansson.h>

#include "common/model/config.h"

/* Reads the object of a config.json; `what` names it in errors. */
td_status td_model_config_read(const json_t *obj, const char *what,
                               struct td_model_config *ret_config, struct td_err *err);

#endif
