/* quantize_internal.h - the tensors of a result and how they are streamed; shared by the writers of
 * GGUF files and of directories. Inside common/model only. */
#ifndef TD_MODEL_QUANTIZE_INTERNAL_H
#define TD_MODEL_QUANTIZE_INTERNAL_H

#include "common/model/quantize.h"

enum td_codes {
    TD_CODES_NONE,
    TD_CODES_INT8,
    TD_CODES_FP8,
    TD_CODES_INT4, /* packed in words, scales of groups */
    TD_CODES_SHAPE /* no codes: the numbers of rows and columns of a packed matrix, as int64 */
};

/* A tensor of the result. */
struct td_piece {
    const struct td_tensor *from; /* NULL: `values` */
    const float *values;
    char name[160];
    const struct td_format *format; /* of the result; with codes, of its scales */
    int64_t n_rows, n_cols;
    /* In every head of this many rows, row i and row i + half a head of the model stand at 2i and
     * 2i + 1 of the result. 0: rows in order */
    int32_t paired_head_rows;
    /* The folding of an input's scales (fold.h): columns are multiplied by `times`, a norm is
     * divided by `over`; [n_cols], NULL: neither */
    const float *times, *over;
    /* Codes of one byte: value = code * scale. The scales of the rows go to row_scales[n_rows], as
     * `format` holds them, unless tensor_scale is not 0: then that is the scale of all rows. With
     * INT4 those of the groups of `group` values, row by row. */
    enum td_codes codes;
    float *row_scales;
    float tensor_scale;
    int32_t group;
    int64_t shape[2]; /* SHAPE */
};

/* Bytes of a row of the result. */
static inline size_t td_piece_row_bytes(const struct td_piece *p)
{
    switch (p->codes) {
    case TD_CODES_NONE:
        return td_format_bytes(p->format, p->n_cols);
    case TD_CODES_INT4:
        return ((size_t)p->n_cols + 7) / 8 * 4;
    case TD_CODES_SHAPE:
        return sizeof p->shape;
    default:
        return (size_t)p->n_cols;
    }
}

/* Refuses a tensor without values: safetensors allows dimensions of 0. */
td_status td_quantize_check_size(const struct td_quantize *q, const struct td_tensor *t,
                                 struct td_err *err);

/* Sets times or over of the matrix or norm that Hugging Face calls `name`; fold NULL: nothing. */
void td_fold_piece(const struct td_fold *fold, const char *name, struct td_piece *p);

/* Row `row` of a piece as f32, folded: values[n_cols]. False: it is infinite or no number. */
bool td_piece_read_row(const struct td_piece *p, int64_t row, float *ret_values);

/* Converts all pieces and hands their bytes to `append` in order. Draws the progress of
 * q->ret_to_bytes unless q->quiet. */
td_status td_quantize_stream(const struct td_quantize *q, const struct td_piece *pieces, int32_t n,
                             td_status (*append)(void *ctx, const void *bytes, size_t n_bytes,
                                                 struct td_err *err),
                             void *ctx, struct td_err *err);

#endif
