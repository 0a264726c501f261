/* gguf_tensors.h - a GGUF file's tensors under Hugging Face's names. */
#ifndef TD_MODEL_GGUF_TENSORS_H
#define TD_MODEL_GGUF_TENSORS_H

#include "common/model/checkpoint.h"

/* Opens a GGUF file, or the first of several. */
td_status td_gguf_tensors_open(const char *path, struct td_checkpoint *ret_checkpoint,
                               struct td_err *err);

#endif
