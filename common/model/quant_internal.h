/* quant_internal.h - what the schemes share (quant_*.c). Inside common/model only. */
#ifndef TD_MODEL_QUANT_INTERNAL_H
#define TD_MODEL_QUANT_INTERNAL_H

#include <string.h>

#include "common/model/quant_tensors.h"
#include "kernels/scaled.h"

/* One matrix while its parts are looked for. */
struct td_quant_open {
    const struct td_quant_config *config;
    const char *what; /* the model, in errors */
    const struct td_checkpoint *checkpoint;
    const char *base; /* "model.layers.0.mlp.up_proj" */
    bool *taken;      /* [n_tensors]: parts of some matrix; NULL: of a trial */
    struct td_err *err;
};

/* The part BASE.SUFFIX; NULL when there is none. */
const struct td_tensor *td_quant_find(const struct td_quant_open *o, const char *suffix);

/* The same, marked as taken. */
const struct td_tensor *td_quant_part(const struct td_quant_open *o, const char *suffix);

/* What the file calls the part BASE.SUFFIX, for errors, in buf. */
const char *td_quant_part_name(const struct td_quant_open *o, const char *suffix,
                               char buf[TD_TENSOR_FILE_NAME_BYTES]);

/* The same of a part that was found; buf is written only when the name has to be made. */
static inline const char *td_quant_name_of(const struct td_quant_open *o, const struct td_tensor *t,
                                           char buf[TD_TENSOR_FILE_NAME_BYTES])
{
    return td_checkpoint_file_name(o->checkpoint, t->name, buf);
}

/* The part BASE.SUFFIX, which must be there, of a type "I32" (or NULL: F16, BF16 or F32) and of
 * shape [rows, cols], or [rows] with cols 0. */
td_status td_quant_need(const struct td_quant_open *o, const char *suffix, const char *type,
                        int64_t rows, int64_t cols, const struct td_tensor **ret_part);

/* Sets the format of t: a scale, and maybe a zero, for each `group` values (0: whole rows). */
td_status td_quant_set_groups(const struct td_quant_open *o, struct td_quant_tensor *t,
                              int32_t group);

/* The order of the columns, from the part that has the group of each; without it, in order. */
td_status td_quant_order(const struct td_quant_open *o, const char *suffix,
                         struct td_quant_tensor *t);

/* Codes that are a byte each, [rows, columns]: sets t to its sizes and nothing else. */
td_status td_quant_check_bytes(const struct td_quant_open *o, const struct td_tensor *codes,
                               struct td_quant_tensor *t);

/* Scale i of t, any scales_type. */
float td_quant_scale(const struct td_quant_tensor *t, int64_t i);

static inline uint32_t td_quant_word(const uint8_t *words, int64_t i)
{
    const uint8_t *p = words + 4 * i;
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* The group of t that a cut from col0 on begins with. */
static inline int32_t td_quant_first_group(const struct td_quant_tensor *t, int32_t col0)
{
    return t->order ? 0 : col0 / t->format.scaled.group;
}

/* Clears row i of `rows`, which have the format `cut`; returns where its codes, scales and zeros
 * are. */
static inline struct td_scaled_row td_quant_clear_row(const struct td_format *cut, uint8_t *rows,
                                                      int32_t i)
{
    uint8_t *row = rows + (size_t)i * (size_t)cut->block_bytes;
    memset(row, 0, (size_t)cut->block_bytes);
    return td_scaled_row_at(cut, row);
}

td_status td_quant_open_gptq(const struct td_quant_open *o, struct td_quant_tensor *ret);
td_status td_quant_open_awq(const struct td_quant_open *o, struct td_quant_tensor *ret);
td_status td_quant_open_packed(const struct td_quant_open *o, struct td_quant_tensor *ret);
td_status td_quant_open_int8(const struct td_quant_open *o, struct td_quant_tensor *ret);
td_status td_quant_open_fp8(const struct td_quant_open *o, struct td_quant_tensor *ret);
td_status td_quant_open_bnb4(const struct td_quant_open *o, struct td_quant_tensor *ret);

#endif
