/* safetensors.h - the tensors of a model directory: model.safetensors, or the shards named by
 * model.safetensors.index.json, mapped read-only.
 *
 * A file is a u64 little-endian header length, a JSON header, and tensor bytes. Nothing in it is
 * trusted: lengths, offsets, shapes and names are checked before any is used, and a contradiction
 * is TD_ERR_CORRUPT with the tensor's name.
 *
 * Threads: one thread opens and closes; any number may read. */
#ifndef TD_MODEL_SAFETENSORS_H
#define TD_MODEL_SAFETENSORS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/dtype.h"
#include "common/base/mem.h"
#include "common/base/status.h"

#define TD_TENSOR_DIMS_MAX 8

struct td_tensor {
    char *name;
    const uint8_t *data; /* row-major, any alignment; borrowed from the mapped file */
    uint64_t n_bytes;
    char dtype_name[16]; /* as in the file: "BF16"; cut to fit */
    bool is_float; /* dtype is a type that we compute with; otherwise only its bytes are known */
    enum td_dtype dtype;
    int32_t n_dims;
    int64_t shape[TD_TENSOR_DIMS_MAX];
};

struct td_safetensors {
    struct td_tensor *tensors; /* sorted by name */
    int32_t n_tensors;
    struct td_file_map *files;
    int32_t n_files;
};

/* Opens DIR/model.safetensors, else the shards of DIR/model.safetensors.index.json. */
td_status td_safetensors_open(const char *dir, struct td_safetensors *ret_st, struct td_err *err);

/* One file's bytes (borrowed, must outlive ret_st); `what` names it in errors. */
td_status td_safetensors_parse(const uint8_t *bytes, size_t n_bytes, const char *what,
                               struct td_safetensors *ret_st, struct td_err *err);

void td_safetensors_close(struct td_safetensors *st); /* a zeroed struct is allowed */

/* NULL when absent. */
const struct td_tensor *td_safetensors_find(const struct td_safetensors *st, const char *name);

#endif
