/* safetensors.h - the tensors of a model directory: model.safetensors, or the shards named by
 * model.safetensors.index.json.
 *
 * A file is a u64 little-endian header length, a JSON header, and tensor bytes. */
#ifndef TD_MODEL_SAFETENSORS_H
#define TD_MODEL_SAFETENSORS_H

#include "common/model/checkpoint.h"

/* Opens DIR/model.safetensors, else the shards of DIR/model.safetensors.index.json. */
td_status td_safetensors_open(const char *dir, struct td_checkpoint *ret_st, struct td_err *err);

/* One file's bytes (borrowed, must outlive ret_st); `what` names it in errors. */
td_status td_safetensors_parse(const uint8_t *bytes, size_t n_bytes, const char *what,
                               struct td_checkpoint *ret_st, struct td_err *err);

#endif
