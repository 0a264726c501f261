/* model_dir.h - what somebody gave as a model and is none of ours, told by name.
 *
 * Why here: a GGUF file where the directory should be, or a directory with nothing but one,
 * would fail at the first file that is not there, with a message about that file; and a LoRA
 * adapter beside the weights would be left out in silence. */
#ifndef TD_BASE_MODEL_DIR_H
#define TD_BASE_MODEL_DIR_H

#include "common/base/status.h"

/* TD_OK when `path` may be a model directory; whether its files are there and right is for those
 * who read them. wants: the end of the name of what the caller reads (".safetensors",
 * "tokenizer.json"): GGUF files beside such a file are left alone. TD_ERR_UNSUPPORTED: a GGUF
 * file, a directory of GGUF files, or one with an adapter_config.json. Blocks on the disk. */
td_status td_model_dir_check(const char *path, const char *wants, struct td_err *err);

#endif
