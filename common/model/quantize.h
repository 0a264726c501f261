/* quantize.h - writes a model in another format: a GGUF file of one of the mixes of mix.h.
 *
 * Tensors are read, rounded and written one by one, in pieces of a few MiB for each thread: memory
 * does not grow with the model. Nothing exists under the target's name before all of it is
 * there. */
#ifndef TD_MODEL_QUANTIZE_H
#define TD_MODEL_QUANTIZE_H

#include <stdbool.h>

#include "common/base/gguf_write.h"
#include "common/base/thread_pool.h"
#include "common/model/checkpoint.h"
#include "common/model/fold.h"
#include "common/model/mix.h"

struct td_quantize {
    const char *from; /* names the source in errors */
    const struct td_checkpoint *checkpoint;
    const struct td_model_config *config;
    const struct td_mix *mix;
    struct td_thread_pool *threads;
    bool quiet;                            /* no progress line */
    const struct td_fold *fold;            /* scales to fold into norms and matrices; NULL: none */
    uint64_t ret_from_bytes, ret_to_bytes; /* of the tensors, before and behind */
};

/* Puts the keys that describe the model (general.*, ARCH.*) to w: from config, or, when the source
 * is a GGUF file, all of its keys that say nothing of formats or of splitting.
 * TD_ERR_UNSUPPORTED: GGUF has no words for this model. */
td_status td_quantize_keys(const struct td_quantize *q, struct td_gguf_writer *w,
                           struct td_err *err);
/* Writes the file; w has all keys. TD_ERR_CORRUPT: a tensor is missing, or holds infinity or
 * NaN. */
td_status td_quantize_gguf(struct td_quantize *q, struct td_gguf_writer *w, const char *path,
                           bool may_replace, struct td_err *err);

/* What a directory's matrices become: codes of one byte, multiplied by activations that are rounded
 * to the same kind for each token; or of 4 bits, for activations as they are. */
enum td_quantize_codes {
    TD_QUANTIZE_W8A8,       /* int8, a scale for each row                       */
    TD_QUANTIZE_FP8,        /* 8-bit floats (E4M3), a scale for each row        */
    TD_QUANTIZE_FP8_TENSOR, /* the same, one scale for the matrix               */
    /* weights alone: int4, a scale for each 128 values, or 64 or 32 where rows want it */
    TD_QUANTIZE_W4A16
};

/* Writes a directory as compressed-tensors has it: the matrices of the layers as codes with scales,
 * all else as it is, quantization_config in config.json, and the tokenizer's files. q->mix is not
 * used. `to` must not exist or be an empty directory; with may_replace files of the same names in
 * it are replaced. The directory has its config.json when it is complete. */
td_status td_quantize_directory(struct td_quantize *q, enum td_quantize_codes codes, const char *to,
                                bool may_replace, struct td_err *err);
/* Whether td_quantize_directory, or td_quantize_keys, has a form for this model: the same answer as
 * theirs, before the long work of a calibration. TD_ERR_UNSUPPORTED. */
td_status td_quantize_directory_takes(const struct td_quantize *q, struct td_err *err);
td_status td_quantize_gguf_takes(const struct td_quantize *q, struct td_err *err);

#endif
