/* kv_layout.h - the canonical, versioned layout of one KV block, and the hash by which workers
 * agree on it.
 *
 *   F32, BF16    [block][layer][K,V][kv head][token][head_dim]
 *   INT8, FP8    [block][layer][K,V][kv head] { [token][head_dim] codes, [token] scales, padding }
 *   latent       [block][layer] { [token][head_dim]; INT8, FP8: then scales, padding }, one KV head
 *
 * A layer of a block is a list of planes: K's, then V's, each [head][token][row]. V's rows may be
 * shorter than K's. In latent attention (DeepSeek-AI 2024, DeepSeek-V2, 2.1) a token has one row
 * for all heads, whose first elements are V: one plane, and no second copy.
 *
 * Why: one block of one request is one contiguous run of block_bytes, so it is one RDMA write, and
 * a head slice for unequal tensor parallelism is a fixed stride. Codes (kernels/kv_codes.h) have
 * the f32 scales of their rows beside them, so that this stays true: a head's codes and scales are
 * one run, a multiple of 64 bytes. 16 tokens of 128: 2,048 + 64 bytes, 0.516 of bf16. */
#ifndef TD_KV_LAYOUT_H
#define TD_KV_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/dtype.h"
#include "common/base/status.h"

#define TD_KV_LAYOUT_VERSION 1       /* of F32 and BF16 */
#define TD_KV_LAYOUT_CODED_VERSION 1 /* of INT8 and FP8: order, scales, rounding */
#define TD_KV_PLANES_MAX 2

/* v_dim of a layout whose V lies in the rows of K */
#define TD_KV_V_IN_K (-1)

/* One plane of a layer: K, or V. */
struct td_kv_plane {
    size_t at;         /* from the layer's first byte */
    size_t row_bytes;  /* one head of one token, without scale */
    size_t head_bytes; /* one head in one block, with scales and padding */
};

struct td_kv_layout {
    int32_t n_layers, n_kv_heads, head_dim;
    int32_t v_dim;       /* elements of a row of V; 0: head_dim; or TD_KV_V_IN_K */
    int32_t block_size;  /* in tokens */
    enum td_dtype dtype; /* F32, BF16, INT8 or FP8 */
    /* derived by td_kv_layout_init */
    int32_t n_planes;
    struct td_kv_plane planes[TD_KV_PLANES_MAX];
    size_t row_bytes;   /* of planes[0] */
    size_t head_bytes;  /* of planes[0] */
    size_t layer_bytes; /* all planes of one layer of one block     */
    size_t block_bytes; /* all layers of one block                  */
};

/* Whether every plane is as K's: what ranks can share out by heads. */
static inline bool td_kv_layout_is_even(const struct td_kv_layout *layout)
{
    return layout->n_planes == 2 && layout->planes[0].head_bytes == layout->planes[1].head_bytes;
}

/* Checks bounds (each count 1..65536, block_bytes < 1 GiB) and fills the derived fields. V in the
 * rows of K: one KV head. Rows of V of another size than K's: F32 and BF16 alone. */
td_status td_kv_layout_init(struct td_kv_layout *layout, struct td_err *err);

/* Two workers may exchange blocks exactly when these are equal: the hash covers the version, all
 * counts, dtype and the model's identity (a hash of config and weights that the model loader
 * makes). */
uint64_t td_kv_layout_hash(const struct td_kv_layout *layout, uint64_t model_hash);

#endif
