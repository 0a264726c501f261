/* model_dir.h - recognizes model files that tandem does not read, and names them.
 *
 * Why here: for a GGUF file given instead of a directory, or a directory that holds only one, the
 * error would otherwise be about the first file that is missing. And a LoRA adapter beside the
 * weights would be ignored without a word. */
#ifndef TD_BASE_MODEL_DIR_H
#define TD_BASE_MODEL_DIR_H

#include "common/base/status.h"

/* TD_OK when `path` may be a model directory; whether its files exist and are correct is left to
 * their readers. wants: the suffix of the file that the caller reads (".safetensors",
 * "tokenizer.json"); GGUF files beside such a file are ignored. TD_ERR_UNSUPPORTED: a GGUF file, a
 * directory of GGUF files, or one with an adapter_config.json. Blocks on the disk. */
td_status td_model_dir_check(const char *path, const char *wants, struct td_err *err);

#endif
