/* quantize.h - values rounded to the blocks of a format: the write side of format.h.
 *
 * Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 and MXFP4 are rounded as ggml's reference and its Python package
 * gguf do, to the same bytes. Formats whose layout leaves the choice of scales open (IQ4_NL and the
 * K-quants) search the scale, or scale and minimum, with the least squared error (formats/fit.h).
 *
 * A block depends on its own values alone, and the bits on no instruction set: a file made here and
 * a model rounded while it is loaded agree, wherever and in whatever pieces that happens. */
#ifndef TD_KERNELS_QUANTIZE_H
#define TD_KERNELS_QUANTIZE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/format.h"

/* Whether td_format_write knows the format. */
bool td_format_is_written(const struct td_format *f);

/* Rounds n_values values, a multiple of the format's block, to ret_bytes
 * (td_format_bytes(f, n_values), any alignment). False: a value is infinite or NaN, or too large
 * for the format; ret_bytes is then undefined. Threads: any, on distinct outputs. Never
 * allocates. */
bool td_format_write(const struct td_format *f, const float *values, int64_t n_values,
                     void *ret_bytes);

/* Whether n values of a plain type are finite, and stay so as `to`, another plain type that `from`
 * is stored in or rounded to. src may have any alignment. */
bool td_plain_is_finite(enum td_dtype from, enum td_dtype to, const void *src, int64_t n);

/* Codes of one byte with a scale, as checkpoints of compressed-tensors hold them: value = code *
 * scale. int8: codes in -127..127, half to even; is_fp8: E4M3, half to even, at most 448 in
 * size. */
float td_values_max(const float *values, int64_t n); /* of the sizes */
/* The scale for values of at most `max` in size, as `stored` (plain) holds it; 1 when max is 0. */
float td_codes_scale(bool is_fp8, float max, const struct td_format *stored);
void td_codes_write(bool is_fp8, const float *values, int64_t n, float scale, uint8_t *ret_codes);

/* A row of n values as compressed-tensors packs codes of 4 bits: value = scale * (code - 8), a
 * scale above 0 for each `group` values, by least squares, as `stored` holds it; code k in the bits
 * from 4 k on. ret_bytes has (n + 7) / 8 * 4 bytes. False: a scale is too large for `stored`. */
bool td_int4_write(const float *values, int32_t n, int32_t group, const struct td_format *stored,
                   float *ret_scales, uint8_t *ret_bytes);

#endif
