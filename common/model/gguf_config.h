/* gguf_config.h - what a GGUF file's keys say about the model, as td_model_config.
 *
 * The keys are brought into the form of a config.json and read like one, so both kinds of model
 * pass the same checks. A key of the architecture that this file does not know is an error unless
 * it is 0 or false; keys of other namespaces (general, tokenizer, a converter's own) change no
 * logit. */
#ifndef TD_MODEL_GGUF_CONFIG_H
#define TD_MODEL_GGUF_CONFIG_H

#include "common/base/gguf.h"
#include "common/model/config.h"

/* Tensors of a model whose rotation is longrope, which are part of its settings. */
#define TD_GGUF_LONG_FACTORS "rope_factors_long.weight"
#define TD_GGUF_SHORT_FACTORS "rope_factors_short.weight"

/* `what` names the file in errors. TD_ERR_UNSUPPORTED: another architecture, or a setting that this
 * version does not compute with, by name. */
td_status td_gguf_config(const struct td_gguf *g, const char *what,
                         struct td_model_config *ret_config, struct td_err *err);

#endif
