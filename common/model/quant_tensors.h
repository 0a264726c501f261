/* quant_tensors.h - quantised matrices of a Hugging Face checkpoint, each of which is several
 * tensors there (codes, scales, zeros ...), as one tensor "NAME.weight" of the checkpoint.
 *
 * Shapes, types, group numbers and zeros are checked when the checkpoint is opened; rows come out
 * in the form that kernels/scaled.h describes. A scheme is a file quant_*.c with a row in
 * quant_tensors.c. Threads: any number may read. */
#ifndef TD_MODEL_QUANT_TENSORS_H
#define TD_MODEL_QUANT_TENSORS_H

#include "common/model/checkpoint.h"
#include "common/model/quant_config.h"
#include "kernels/format.h"

struct td_quant_tensor {
    struct td_format format; /* of the whole matrix; group_of NULL whatever the order */
    int32_t n_out, n_in, bits;
    /* borrowed from the mapped files, any alignment; NULL where the scheme has none */
    const uint8_t *codes, *scales, *zeros;
    const uint8_t *order; /* i32 [n_in]: the group of each column; NULL: in order */
    enum td_dtype scales_type;
    bool scales_are_e8m0; /* bytes e for 2^(e - 127), which scales_type holds exactly */
    int32_t zero_add;     /* added to the file's zero points (GPTQ v1 stores them less 1) */
    /* schemes with one scale for scale_rows rows; 0: one for the matrix */
    int32_t scale_rows;
    float scale_divisor; /* of what the file has */
    /* scales that are quantised, too: nested_map[scales[i]] * nested_scales[i / nested_block] +
     * nested_offset */
    const uint8_t *nested_map, *nested_scales;
    int32_t nested_block;
    float nested_offset;
    /* Columns of rows [row0, row0 + n_rows), from col0 on, as rows of `cut`, one behind the other;
     * cut comes from td_quant_cut with the same col0. */
    void (*read_rows)(const struct td_quant_tensor *t, const struct td_format *cut, int32_t col0,
                      int32_t row0, int32_t n_rows, uint8_t *ret_rows);
};

/* Replaces the parts of every quantised matrix in `c` by that matrix, which has the scheme that its
 * tensors show. The tensors of a checkpoint that is not quantised stay as they are, and so do those
 * of MXFP4, which are stacks of experts (expert_stacks.h). what: names the model in errors. */
td_status td_quant_tensors(const struct td_quant_config configs[TD_QUANT_SCHEMES_MAX],
                           const char *what, struct td_checkpoint *c, struct td_err *err);

/* The format of columns [col0, col0 + n_cols). group_of: [n_cols], borrowed by the format when it
 * is needed. use_bf16: activations that the scheme does not round are rounded to bf16, where the
 * groups allow it (td_scaled_use_bf16). A value is the same number in every cut. */
void td_quant_cut(const struct td_quant_tensor *t, int32_t col0, int32_t n_cols, bool use_bf16,
                  uint16_t *group_of, struct td_format *ret_format);

#endif
