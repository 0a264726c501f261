/* gguf_tensors.h - a GGUF file's tensors under Hugging Face's names. */
#ifndef TD_MODEL_GGUF_TENSORS_H
#define TD_MODEL_GGUF_TENSORS_H

#include "common/model/checkpoint.h"

/* Opens a GGUF file, or the first of several. */
td_status td_gguf_tensors_open(const char *path, struct td_checkpoint *ret_checkpoint,
                               struct td_err *err);

struct td_family;

/* The name that the tensor which Hugging Face calls `name` has in GGUF files of `family`.
 * *ret_rotated: its rows are those of heads to rotate, which architecture llama stores in pairs.
 * False: it has none. */
bool td_gguf_tensor_name(const struct td_family *family, const char *name,
                         char ret_name[TD_TENSOR_FILE_NAME_BYTES], bool *ret_rotated);

#endif
