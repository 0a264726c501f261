/* format.h - how the values of a weight matrix are stored: one table, a row for each format.
 *
 * A plain format is an array of elements (F32, F16, BF16). A block format stores a row as blocks of
 * `block` consecutive values, each with its own scales: the types of a GGUF file. Products with
 * them are integer products: the activations of a row are rounded to 8 bits in groups of 32 and
 * meet the integer codes of the weights; scales multiply the exact sum of a group (blocks.h).
 * A scaled format stores the codes of a row, and beside them a scale for each group of its values:
 * what quantised checkpoints of Hugging Face hold (scaled.h). Its description depends on the
 * matrix, so the loader of weights makes it, and no table lists it.
 *
 * Adding a format: a function that splits a block into groups (formats/), a row in
 * formats/formats.h, and the size of its blocks in common/base/gguf.c, which reads files and knows
 * no kernels. Nothing else outside kernels/ and the weights of common/model knows which formats
 * there are.
 *
 * Source of the layouts: the block structures of ggml, as files of GGUF version 3 hold them. */
#ifndef TD_KERNELS_FORMAT_H
#define TD_KERNELS_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Values that share one integer sum, and one scale of the activations. */
#define TD_GROUP 32
#define TD_BLOCK_VALUES_MAX 256

/* How a value is made of a code's value c and the fields of struct td_group. Halves are the first
 * and the last 16 values of a group; the other kinds use scale[0] and min[0]. */
enum td_scales {
    TD_SCALES_F16,           /* d * c                                          */
    TD_SCALES_F16_MIN,       /* d * c + m                                      */
    TD_SCALES_E8M0,          /* 2^(d - 128) * c, d not as f16 but as a number  */
    TD_SCALES_I8,            /* d * scale * c, scale an int8                   */
    TD_SCALES_I8_HALVES,     /* the same for each half                         */
    TD_SCALES_U8_MIN,        /* d * scale * c - m * min                        */
    TD_SCALES_U4_MIN_HALVES, /* the same for each half, scale and min below 16 */
};

/* 32 consecutive values of a row, as the kernels compute with them. A code's value: with 8 bits the
 * code as two's complement; values[code] where the format has them; else code - offset. */
struct td_group {
    uint8_t codes[TD_GROUP];
    uint16_t d, m; /* bits of f16 */
    uint8_t scale[2], min[2];
};

/* What the codes of a scaled format stand for; s is the scale of the value's group. */
enum td_scaled_kind {
    TD_SCALED_NONE,  /* not a scaled format */
    TD_SCALED_INT,   /* s * (code - zero), of 4 or 8 bits */
    TD_SCALED_TABLE, /* s * table[code], of 4 bits */
    TD_SCALED_E4M3,  /* s * the number that the byte is */
    TD_SCALED_I8,    /* s * the signed byte, in integer products */
};

/* How activations enter a product with a scaled format. */
enum td_scaled_x {
    TD_SCALED_X_F32,     /* as they are */
    TD_SCALED_X_STATIC,  /* rounded to E4M3 with the scale x_scale */
    TD_SCALED_X_ROW,     /* rounded to the kind of the weights, with a scale of each row */
    TD_SCALED_X_GROUP,   /* likewise, with a scale of each group of each row; E4M3 */
    TD_SCALED_X_OUTLIER, /* I8: as ROW of the values below 6.0; the others stay f32 */
    TD_SCALED_X_BF16,    /* not I8: rounded to bf16, as with plain weights of that type */
};

/* A scaled format's description, for one matrix or for the columns of one that a rank has. */
struct td_scaled {
    enum td_scaled_kind kind;
    enum td_scaled_x x;
    enum td_dtype scale_type; /* in packed memory; the file's, so nothing is lost */
    int32_t group, n_groups;  /* value k belongs to group k / group ... */
    const uint16_t *group_of; /* ... or to group_of[k] (act order), when not NULL; borrowed */
    bool has_zeros;           /* INT: each group has a zero; else it is td_format.offset */
    bool x_powers;            /* E4M3 with X_ROW or X_GROUP: scales of x are powers of two */
    float table[16];
    float x_scale;
    /* of all of the above: equal bytes with different descriptions are different weights */
    uint64_t digest;
};

struct td_format {
    const char *name;    /* "BF16", "Q8_0": as GGUF has it */
    enum td_dtype dtype; /* plain: the elements' type; 0: a block format or a scaled one */
    uint32_t gguf_type;
    int32_t block; /* values of one block; 1 when plain */
    int32_t block_bytes;

    /* Block formats only. `split` gives group g (from 0) of a block. */
    void (*split)(const uint8_t *block, int32_t g, struct td_group *ret_group);
    int32_t bits; /* of a code: 2 to 6, or 8 */
    int32_t offset;
    const int8_t *values; /* [16], or NULL */
    enum td_scales scales;
    int32_t index; /* among the block formats, for the kernels' tables */

    /* Scaled formats only: `block` is a whole row, block_bytes as td_scaled_row_bytes (scaled.h),
     * `bits` 4 or 8. */
    struct td_scaled scaled;
};

/* The row of an element type; static storage. */
const struct td_format *td_format_of_dtype(enum td_dtype dtype);
/* The row of a type number of GGUF; NULL when this version does not compute with it. */
const struct td_format *td_format_of_gguf(uint32_t gguf_type);

/* Bytes of n_values consecutive values, a multiple of the format's block. */
static inline size_t td_format_bytes(const struct td_format *f, int64_t n_values)
{
    return (size_t)(n_values / f->block) * (size_t)f->block_bytes;
}

/* Values [0, n_values) of src as f32; n_values is a multiple of the block, src may have any
 * alignment. Exact for plain formats. For block formats this is the reference: each operation of
 * enum td_scales rounded to f32, products from the left, as ggml does. */
void td_format_read(const struct td_format *f, const void *src, int64_t n_values,
                    float *ret_values);

/* The 32 values of a group, likewise. */
void td_group_read(const struct td_format *f, const struct td_group *group, float *ret_values);

/* Whether d, m and the values of the group are finite numbers. */
bool td_group_is_finite(const struct td_format *f, const struct td_group *group);

/* out[r,:] = the values of row ids[r] of table [.., dim], as td_ops.embed; for any format. Computes
 * its share `part` of n_parts of the rows. */
void td_format_embed(const struct td_format *f, const void *table, const int32_t *ids,
                     int32_t n_rows, int32_t dim, int part, int n_parts, float *ret_rows);

#ifdef __cplusplus
}
#endif

#endif
