/* model_dir.h - recognizes directories that are no model, and says what they are.
 *
 * Why here: for a directory that holds a GGUF file and is given instead of that file, the error
 * would otherwise be about the first file that is missing. And a LoRA adapter beside the weights
 * would be ignored without a word. */
#ifndef TD_BASE_MODEL_DIR_H
#define TD_BASE_MODEL_DIR_H

#include "common/base/status.h"

/* TD_OK when `path` may be a model directory; whether its files exist and are correct is left to
 * their readers. wants: the suffix of the file that the caller reads (".safetensors",
 * "tokenizer.json"); GGUF files beside such a file are ignored. TD_ERR_UNSUPPORTED: a
 * directory of GGUF files, or one with an adapter_config.json. Blocks on the disk. */
td_status td_model_dir_check(const char *path, const char *wants, struct td_err *err);

#endif
