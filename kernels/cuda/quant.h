/* quant.h - how weights in block and scaled formats (format.h) lie in a device's memory: one packed
 * form for all of them, made on the host from what the table of formats says.
 *
 * A matrix is cut into panels of 16 outputs, and a panel into chunks of 32 values of k: one step of
 * the order of sums (gemm_order.h) of a warp, whose lane 4 g + t has values 8 t .. 8 t + 7 of
 * outputs g and g + 8. So a lane's codes lie together and are one load, a warp's are one run:
 *
 *   panel    block after block along k; scaled formats: then scales, then zeros
 *   block    its chunks (1 or 8), then d: what they share
 *   chunk    low     the codes' lowest 2, 4 or 8 bits [lane][output g, g + 8][8 codes, the first
 *                    lowest]: 128, 256 or 512 bytes
 *            high    what is left of codes of 3, 5 and 6 bits, likewise: 64 or 128 bytes
 *            sub     scales (and minima) of the chunk in formats that have them beside d
 *   d, sub, scales, zeros   for each g the fields of outputs g and g + 8 beside each other, as
 *                    load_scales of quant.cu reads them
 *
 * Every part begins at a multiple of 16 bytes, and so does every panel. Codes of columns from n_in
 * up to the next multiple of 32, and of outputs beyond the last, are those of 0. The bytes are
 * those of the file (or of its scales in the type that the file has), up to 4 % more for formats
 * with scales of 6 bits, in whole panels.
 *
 * Codes of 8 bits that are multiplied by rounded activations (td_quant_is_rows) are rows as
 * matrices of bytes are: codes, up to a multiple of 16 with zeros, then the row's scale (f32), then
 * nothing up to a multiple of 32 bytes; as many rows as whole panels have. cuBLASLt reads them
 * where they lie.
 *
 * With act order (td_scaled.group_of) the group of each column is stored after every 4 panels, as
 * u16 [columns]: 2 bytes for a column of 64 outputs. */
#ifndef TD_KERNELS_CUDA_QUANT_H
#define TD_KERNELS_CUDA_QUANT_H

#include "kernels/format.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TD_QUANT_PANEL 16
#define TD_QUANT_CHUNK 32

struct td_quant_form {
    int32_t n_in, n_chunks;
    int32_t high_at, sub_at, chunk_bytes; /* in a chunk, whose low bits come first */
    int32_t block_shift;                  /* log2 of the chunks of a block */
    int32_t d_at, block_bytes;
    int32_t scales_at, zeros_at;    /* in a panel; zeros_at 0: none */
    int64_t panel_bytes, set_bytes; /* of 4 panels and the groups of their columns */
    int32_t group8, n_groups;       /* eighths of a group */
    bool has_order, scale_is_f32, scale_is_bf16;
    float offset; /* a code of `offset` is the value 0, unless a table or zeros say otherwise */
    float table[16];
};

/* n_in: columns of the matrix. */
struct td_quant_form td_quant_form_of(const struct td_format *f, int32_t n_in);

/* Whether the format's packed form is rows: its codes meet activations of 8 bits, and a row has one
 * scale. */
static inline bool td_quant_is_rows(const struct td_format *f)
{
    return (f->scaled.kind == TD_SCALED_I8 && f->scaled.x != TD_SCALED_X_F32) ||
           (f->scaled.kind == TD_SCALED_E4M3 && f->scaled.n_groups == 1 &&
            (f->scaled.x == TD_SCALED_X_ROW || f->scaled.x == TD_SCALED_X_STATIC));
}

/* Columns of such a row with zeros behind them, where its scale lies; and its bytes. */
static inline int64_t td_quant_row_scale_at(int32_t n_in) { return ((int64_t)n_in + 15) / 16 * 16; }
static inline int64_t td_quant_row_bytes(int32_t n_in)
{
    return (td_quant_row_scale_at(n_in) + 4 + 31) / 32 * 32;
}

/* td_block_ops.packed_bytes and pack (ops.h), for both kinds of formats. */
size_t td_cuda_quant_packed_bytes(int32_t n_out, int32_t n_in, const struct td_format *format);
bool td_cuda_quant_pack(void *packed, int32_t n_out, int32_t n_in, const struct td_format *format,
                        const void *src, int32_t row0, int32_t n_rows);

/* Bits of a code in the first plane, and in the second. */
#define TD_QUANT_LOW(bits) ((bits) == 8 ? 8 : (bits) >= 4 ? 4 : 2)
#define TD_QUANT_HIGH(bits) ((bits)-TD_QUANT_LOW(bits))

#ifdef __cplusplus
}
#endif

#endif
