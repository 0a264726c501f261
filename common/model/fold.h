/* fold.h - per-channel scales of a matrix's input that cost nothing at run time: the weights of the
 * norm before it are divided by them and the matrix's columns are multiplied by them. The product
 * changes only by rounding.
 *
 * Two ways to choose them, each from what the model saw of a calibration text:
 *   SmoothQuant (Xiao et al. 2022): s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), so that channels
 *   of large activations become small enough for 8 bits. Rounded to powers of two: then every type
 *   of float holds the folded norm exactly, and the model in f32 keeps its bits.
 *   AWQ (Lin et al. 2023): s_j = mean|X_j|^a, with that a of 0 to 1 for which the rounded matrices
 *   give the output nearest to the original's, on rows of X.
 * Folded are the two norms of a layer: before q, k and v, and before gate and up. */
#ifndef TD_MODEL_FOLD_H
#define TD_MODEL_FOLD_H

#include <stdint.h>

#include "common/model/config.h"

struct td_quantize;

/* Inputs are numbered: 2 * layer that of q, k and v, 2 * layer + 1 that of gate and up. */
struct td_fold {
    int32_t n_inputs, hidden;
    float *scales; /* [n_inputs][hidden] */
};

#define TD_CALIBRATION_ROWS 32 /* of each input, kept for AWQ's search */

struct td_calibration {
    int32_t n_inputs, hidden;
    float *max;         /* [n_inputs][hidden] of |x| */
    double *sum;        /* [n_inputs][hidden] of |x| */
    float *rows;        /* [n_inputs][TD_CALIBRATION_ROWS][hidden], drawn evenly */
    int64_t *n_seen;    /* [n_inputs] */
    uint64_t rng_state; /* of the drawing */
};

td_status td_calibration_create(const struct td_model_config *c, struct td_calibration *ret,
                                struct td_err *err);
void td_calibration_free(struct td_calibration *c); /* a zeroed struct is allowed */
/* For td_forward_inputs.observe; ctx is the td_calibration. */
void td_calibration_observe(void *ctx, int32_t input, const float *x, int32_t n_rows, int32_t dim);

/* Scales for q's tensors; free with td_fold_free. TD_ERR_CORRUPT: a matrix holds NaN or
 * infinity. */
td_status td_fold_smooth(const struct td_quantize *q, const struct td_calibration *c, float alpha,
                         struct td_fold *ret, struct td_err *err);
td_status td_fold_search(const struct td_quantize *q, const struct td_calibration *c,
                         struct td_fold *ret, struct td_err *err);
void td_fold_free(struct td_fold *f); /* a zeroed struct is allowed */

#endif
