/* checkpoint.h - the tensors of a model on disk: a Hugging Face directory with safetensors, or a
 * GGUF file, mapped read-only.
 *
 * Tensors have Hugging Face's names whatever the file calls them, and shapes with the columns last.
 * Nothing in the files is trusted: lengths, offsets, shapes and names are checked before any is
 * used, and a contradiction is TD_ERR_CORRUPT with the tensor's name.
 *
 * Threads: one thread opens and closes; any number may read. */
#ifndef TD_MODEL_CHECKPOINT_H
#define TD_MODEL_CHECKPOINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/mem.h"
#include "common/base/status.h"
#include "kernels/format.h"

#define TD_TENSOR_DIMS_MAX 8

struct td_tensor {
    char *name;
    const uint8_t *data; /* row-major, any alignment; borrowed from the mapped file */
    uint64_t n_bytes;
    char dtype_name[16]; /* as in the file: "BF16"; cut to fit */
    /* NULL: not one that we compute with, and only its bytes are known */
    const struct td_format *format;
    /* In every head of this many rows, row i of the model is row 2i of the file, and row i + half a
     * head row 2i + 1 (rotary pairs side by side). 0: rows in order */
    int32_t paired_head_rows;
    bool turned; /* the file has the columns of this matrix as its rows */
    /* a quantised matrix of several tensors (quant_tensors.h), which has no bytes of its own */
    const struct td_quant_tensor *quant;
    int32_t n_dims;
    int64_t shape[TD_TENSOR_DIMS_MAX];
};

struct td_family;
struct td_gguf;
struct td_quant_tensor;
struct td_text_names; /* checkpoint.c */

struct td_checkpoint {
    struct td_tensor *tensors; /* sorted by name */
    int32_t n_tensors;
    struct td_file_map *files; /* safetensors */
    int32_t n_files;
    struct td_gguf *gguf; /* GGUF */
    /* of a GGUF file, or of a directory that calls tensors otherwise */
    const struct td_family *family;
    const struct td_text_names *text_names; /* of a directory with images; NULL: of text alone */
    struct td_quant_tensor *quant;          /* safetensors; NULL: not quantised */
};

/* Opens DIR/model.safetensors, else the shards of DIR/model.safetensors.index.json; or a GGUF
 * file. Of a model that takes images, too, the tensors of its text model alone are there. */
td_status td_checkpoint_open(const char *path, struct td_checkpoint *ret_checkpoint,
                             struct td_err *err);
void td_checkpoint_close(struct td_checkpoint *c); /* a zeroed struct is allowed */

/* Gives the tensors of a directory the names that others have, where the family's file_names say
 * others; a GGUF file stays as it is. TD_ERR_CORRUPT: two tensors get one name. */
td_status td_checkpoint_rename(const struct td_family *family, const char *what,
                               struct td_checkpoint *c, struct td_err *err);

/* NULL when absent. */
const struct td_tensor *td_checkpoint_find(const struct td_checkpoint *c, const char *name);

/* What the file calls the tensor that Hugging Face calls `name`, for errors; written to buf when it
 * has to be made. */
#define TD_TENSOR_FILE_NAME_BYTES 160
const char *td_checkpoint_file_name(const struct td_checkpoint *c, const char *name,
                                    char buf[TD_TENSOR_FILE_NAME_BYTES]);

/* Buffers that old exports saved although they follow from the config. */
bool td_tensor_is_redundant(const char *name);

/* for qsort and bsearch: tensors by name */
int td_tensor_by_name(const void *a, const void *b);

#endif
