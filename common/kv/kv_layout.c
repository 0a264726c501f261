/* kv_layout.c - derives the sizes of a block, and hashes everything that two workers must have in
 * common. */
#include "common/kv/kv_layout.h"

#include <stdio.h>

#include "common/base/hash.h"

#define COUNT_MAX 65536
#define BLOCK_BYTES_MAX ((uint64_t)1 << 30)

static td_status check_count(const char *name, int32_t value, struct td_err *err)
{
    if (value >= 1 && value <= COUNT_MAX) return TD_OK;
    return td_fail(err, TD_ERR_INVALID, "KV layout: %s is %d, must be in 1..%d", name, value,
                   COUNT_MAX);
}

static td_status check_v_dim(const struct td_kv_layout *layout, struct td_err *err)
{
    int32_t v = layout->v_dim;
    if (v == 0) return TD_OK;
    if (v != TD_KV_V_IN_K && (v < 1 || v > layout->head_dim))
        return td_fail(err, TD_ERR_INVALID, "KV layout: v_dim is %d, must be in 1..%d (head_dim)",
                       v, layout->head_dim);
    if (v == TD_KV_V_IN_K && layout->n_kv_heads != 1)
        return td_fail(err, TD_ERR_INVALID,
                       "KV layout: n_kv_heads is %d, must be 1 where V lies in the rows of K",
                       layout->n_kv_heads);
    if (td_dtype_is_coded(layout->dtype) && v != TD_KV_V_IN_K)
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "KV layout: dtype is %s, must be f32 or bf16 where V has rows of its own size",
            td_dtype_name(layout->dtype));
    return TD_OK;
}

td_status td_kv_layout_init(struct td_kv_layout *layout, struct td_err *err)
{
    td_status s;
    if ((s = check_count("n_layers", layout->n_layers, err))) return s;
    if ((s = check_count("n_kv_heads", layout->n_kv_heads, err))) return s;
    if ((s = check_count("head_dim", layout->head_dim, err))) return s;
    if ((s = check_count("block_size", layout->block_size, err))) return s;
    if ((s = check_v_dim(layout, err))) return s;
    if (layout->dtype != TD_F32 && layout->dtype != TD_BF16 && !td_dtype_is_coded(layout->dtype))
        return td_fail(err, TD_ERR_INVALID,
                       "KV layout: dtype is %d, must be f32 (%d), bf16 (%d), int8 (%d) or fp8 (%d)",
                       (int)layout->dtype, TD_F32, TD_BF16, TD_INT8, TD_FP8);
    if (td_dtype_is_coded(layout->dtype) &&
        (int64_t)layout->head_dim * (int64_t)layout->block_size % 4)
        return td_fail(
            err, TD_ERR_INVALID,
            "KV layout: head_dim %d x block_size %d must be a multiple of 4 in %s, whose "
            "scales lie behind so many codes",
            layout->head_dim, layout->block_size, td_dtype_name(layout->dtype));

    /* Four counts of at most 2^16 and an element of at most 8 bytes with its scale can exceed 64
     * bits, so each step is bounded. */
    int32_t rows[TD_KV_PLANES_MAX] = {layout->head_dim,
                                      layout->v_dim ? layout->v_dim : layout->head_dim};
    uint64_t layer_bytes = 0; /* <= 2^51 */
    layout->n_planes = layout->v_dim == TD_KV_V_IN_K ? 1 : 2;
    for (int32_t i = 0; i < layout->n_planes; i++) {
        struct td_kv_plane *p = &layout->planes[i];
        p->at = (size_t)layer_bytes;
        p->row_bytes = (size_t)rows[i] * td_dtype_bytes(layout->dtype);
        p->head_bytes = td_kv_head_bytes(layout->dtype, layout->block_size, rows[i]);
        layer_bytes += (uint64_t)p->head_bytes * (uint64_t)layout->n_kv_heads;
    }
    if (layer_bytes >= BLOCK_BYTES_MAX ||
        layer_bytes * (uint64_t)layout->n_layers >= BLOCK_BYTES_MAX)
        return td_fail(err, TD_ERR_LIMIT,
                       "KV layout: a block of %d tokens, %d layers, %d KV heads of %d %s values is "
                       "too large, must be below %llu bytes",
                       layout->block_size, layout->n_layers, layout->n_kv_heads, layout->head_dim,
                       td_dtype_name(layout->dtype), (unsigned long long)BLOCK_BYTES_MAX);
    layout->row_bytes = layout->planes[0].row_bytes;
    layout->head_bytes = layout->planes[0].head_bytes;
    layout->layer_bytes = (size_t)layer_bytes;
    layout->block_bytes = (size_t)(layer_bytes * (uint64_t)layout->n_layers);
    return TD_OK;
}

uint64_t td_kv_layout_hash(const struct td_kv_layout *layout, uint64_t model_hash)
{
    /* The hash is of text, so that neither padding nor byte order can differ between machines. */
    char text[240], codes[48] = "", v_rows[32] = "";
    if (td_dtype_is_coded(layout->dtype))
        snprintf(codes, sizeof codes, " coded v%d", TD_KV_LAYOUT_CODED_VERSION);
    if (layout->v_dim == TD_KV_V_IN_K)
        snprintf(v_rows, sizeof v_rows, " v in k");
    else if (layout->v_dim && layout->v_dim != layout->head_dim)
        snprintf(v_rows, sizeof v_rows, " v %d", layout->v_dim);
    int n = snprintf(text, sizeof text,
                     "kv v%d layers %d heads %d dim %d block %d %s%s%s model %016llx",
                     TD_KV_LAYOUT_VERSION, layout->n_layers, layout->n_kv_heads, layout->head_dim,
                     layout->block_size, td_dtype_name(layout->dtype), codes, v_rows,
                     (unsigned long long)model_hash);
    return td_hash64(text, (size_t)n, 0);
}
