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

td_status td_kv_layout_init(struct td_kv_layout *layout, struct td_err *err)
{
    td_status s;
    if ((s = check_count("n_layers", layout->n_layers, err))) return s;
    if ((s = check_count("n_kv_heads", layout->n_kv_heads, err))) return s;
    if ((s = check_count("head_dim", layout->head_dim, err))) return s;
    if ((s = check_count("block_size", layout->block_size, err))) return s;
    if (layout->dtype != TD_F32 && layout->dtype != TD_BF16)
        return td_fail(err, TD_ERR_INVALID, "KV layout: dtype is %d, must be f32 (%d) or bf16 (%d)",
                       (int)layout->dtype, TD_F32, TD_BF16);

    /* Four counts of at most 2^16 and an element of at most 4 bytes can exceed 64 bits, so each
     * step is bounded. */
    uint64_t row_bytes = (uint64_t)layout->head_dim * td_dtype_bytes(layout->dtype);
    /* <= 2^51 */
    uint64_t layer_bytes =
        2 * row_bytes * (uint64_t)layout->n_kv_heads * (uint64_t)layout->block_size;
    if (layer_bytes >= BLOCK_BYTES_MAX ||
        layer_bytes * (uint64_t)layout->n_layers >= BLOCK_BYTES_MAX)
        return td_fail(err, TD_ERR_LIMIT,
                       "KV layout: a block of %d tokens, %d layers, %d KV heads of %d %s values is "
                       "too large, must be below %llu bytes",
                       layout->block_size, layout->n_layers, layout->n_kv_heads, layout->head_dim,
                       td_dtype_name(layout->dtype), (unsigned long long)BLOCK_BYTES_MAX);
    layout->row_bytes = (size_t)row_bytes;
    layout->layer_bytes = (size_t)layer_bytes;
    layout->block_bytes = (size_t)(layer_bytes * (uint64_t)layout->n_layers);
    return TD_OK;
}

uint64_t td_kv_layout_hash(const struct td_kv_layout *layout, uint64_t model_hash)
{
    /* The hash is of text, so that neither padding nor byte order can differ between machines. */
    char text[160];
    int n =
        snprintf(text, sizeof text, "kv v%d layers %d heads %d dim %d block %d %s model %016llx",
                 TD_KV_LAYOUT_VERSION, layout->n_layers, layout->n_kv_heads, layout->head_dim,
                 layout->block_size, td_dtype_name(layout->dtype), (unsigned long long)model_hash);
    return td_hash64(text, (size_t)n, 0);
}
