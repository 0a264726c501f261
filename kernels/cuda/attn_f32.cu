/* attn_f32.cu - attention without tensor cores, for f32 caches (golden tests), for caches of codes
 * with scales (int8, fp8), and for the head sizes of bf16 caches that attn_mma.cu has no kernel
 * for.
 *
 * A warp computes one (row, head) from its first key to its last, in the order of attn_tile.h. For
 * the scores each lane takes two keys of a tile and reads their rows of K by itself, through L1;
 * for the sum of V the dimensions are spread over the lanes. Warps share nothing, so the bits can
 * depend on nothing else. */
#include "kernels/cuda/attn_tile.h"
#include "kernels/kv_codes.h"

enum { WARPS = 4, LANES = 32, OUT_PER_LANE = TD_ATTN_HEAD_DIM_MAX / LANES };

/* TYPE: of the cache, an enum td_dtype. */
template <int TYPE> __device__ static inline float widen(const uint8_t *row, int32_t i)
{
    if (TYPE == TD_BF16) return td_cu_bf16_to_f32(((const uint16_t *)(const void *)row)[i]);
    if (TYPE == TD_INT8) return (float)(int8_t)row[i];
    if (TYPE == TD_FP8) return td_fp8_to_f32(row[i]);
    return ((const float *)(const void *)row)[i];
}

/* Of a cache of codes: from a head of a block to the next, and from its first code to its scales.
 * They are no fields of attn_params: two more there cost attn_mma.cu three spilled registers. */
struct code_places {
    int64_t head_bytes, scales_at;
};

/* Where the K row of a key starts, and its scale: 1 unless the cache holds codes. V lies v_offset
 * bytes behind both. */
struct plain_row {
    const uint8_t *values;
    float scale;
};

template <int TYPE>
__device__ static inline plain_row row_of(const struct attn_params *a, const code_places *codes,
                                          const int32_t *table, int32_t kv_head, int32_t position,
                                          int64_t offset)
{
    struct plain_row row = {a->kv + offset, 1.0f};
    if (TYPE != TD_INT8 && TYPE != TD_FP8) {
        row.values += attn_key_offset(a, table, kv_head, position);
        return row;
    }
    int32_t block = a->block_shift >= 0 ? position >> a->block_shift : position / a->block_size,
            slot = position - block * a->block_size;
    const uint8_t *head = row.values + table[block] * a->block_bytes + kv_head * codes->head_bytes;
    row.values = head + slot * a->row_bytes;
    row.scale = ((const float *)(const void *)(head + codes->scales_at))[slot];
    return row;
}

/* q . k of one key if `is_seen`, else -inf. */
template <int TYPE>
__device__ static inline float score(const struct attn_params *a, const code_places *codes,
                                     const int32_t *table, int32_t kv_head, int32_t position,
                                     bool is_seen, const float *q)
{
    if (!is_seen) return -INFINITY;
    struct plain_row key = row_of<TYPE>(a, codes, table, kv_head, position, 0);
    float dot = 0;
    for (int32_t i = 0; i < a->head_dim; i++) dot = fmaf(q[i], widen<TYPE>(key.values, i), dot);
    return TYPE == TD_INT8 || TYPE == TD_FP8 ? dot * key.scale : dot;
}

/* The keys lo..hi of a tile: o = o * alpha + p . V, and the same for the sum. */
template <int TYPE>
__device__ __forceinline__ static void
add_tile(const struct attn_params &a, const code_places &codes, const int32_t *table,
         int32_t kv_head, int32_t tile, int32_t lo, int32_t hi, const float *q, float *max,
         float *sum, float o[OUT_PER_LANE])
{
    int32_t lane = (int32_t)threadIdx.x % LANES, k0 = tile + lane, k1 = k0 + LANES;
    float s0 = score<TYPE>(&a, &codes, table, kv_head, k0, k0 >= lo && k0 <= hi, q),
          s1 = score<TYPE>(&a, &codes, table, kv_head, k1, k1 >= lo && k1 <= hi, q);
    float tile_max = fmaxf(s0, s1);
    for (int m = LANES / 2; m > 0; m /= 2)
        tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffff, tile_max, m));
    float new_max = fmaxf(*max, tile_max), alpha = attn_rescale(*max, new_max, a.c);
    s0 = exp2f((s0 - new_max) * a.c), s1 = exp2f((s1 - new_max) * a.c);
    *max = new_max, *sum = fmaf(*sum, alpha, s0 + s1);
    for (int i = 0; i < OUT_PER_LANE; i++) o[i] *= alpha;
    for (int32_t k = lo; k <= hi; k++) {
        float e = __shfl_sync(0xffffffff, k - tile < LANES ? s0 : s1, (k - tile) % LANES);
        struct plain_row value = row_of<TYPE>(&a, &codes, table, kv_head, k, a.v_offset);
        if (TYPE == TD_INT8 || TYPE == TD_FP8) e *= value.scale;
        for (int i = 0; i < OUT_PER_LANE; i++) {
            if (i * LANES >= a.head_dim) break;
            /* Past head_dim a lane sums up the last dimension and does not store the sum: this
             * saves a predicate per element. */
            int32_t d = lane + i * LANES;
            o[i] = fmaf(e, widen<TYPE>(value.values, d < a.head_dim ? d : a.head_dim - 1), o[i]);
        }
    }
}

template <int TYPE>
__global__ void __launch_bounds__(WARPS *LANES, 4)
    attn_plain(struct attn_params a, code_places codes)
{
    __shared__ float q_shared[WARPS][TD_ATTN_HEAD_DIM_MAX];
    int32_t warp = (int32_t)threadIdx.x / LANES, lane = (int32_t)threadIdx.x % LANES;
    int64_t row_head = (int64_t)blockIdx.x * WARPS + warp;
    if (row_head >= (int64_t)a.n_rows * a.n_heads) return;
    int32_t r = (int32_t)(row_head / a.n_heads), h = (int32_t)(row_head % a.n_heads),
            kv_head = h / a.group, p = a.positions[r];
    float *out = a.out + r * a.out_stride + (int64_t)h * a.head_dim, *q = q_shared[warp];
    const float *q_row = a.q + r * a.q_stride + (int64_t)h * a.head_dim;
    if (p < 0) {
        for (int32_t i = lane; i < a.head_dim; i += LANES) out[i] = 0;
        return;
    }
    for (int32_t i = lane; i < a.head_dim; i += LANES)
        q[i] = TYPE == TD_BF16 ? td_cu_bf16_to_f32(td_cu_f32_to_bf16(q_row[i])) : q_row[i];
    __syncwarp(0xffffffff);
    const int32_t *table = a.block_tables[a.row_seq[r]];
    int32_t first = attn_first(&a, p);
    float total_max = -INFINITY, total_sum = 0, total[OUT_PER_LANE], stretch_max = -INFINITY,
          stretch_sum = 0, stretch[OUT_PER_LANE];
    for (int i = 0; i < OUT_PER_LANE; i++) total[i] = stretch[i] = 0;
    for (int32_t split = first / ATTN_SPLIT; split <= p / ATTN_SPLIT; split++) {
        float max = -INFINITY, sum = 0, o[OUT_PER_LANE], keep, take;
        for (int i = 0; i < OUT_PER_LANE; i++) o[i] = 0;
        for (int32_t tile = split * ATTN_SPLIT; tile < (split + 1) * ATTN_SPLIT && tile <= p;
             tile += ATTN_TILE) {
            /* the keys of the tile that the row sees: lo..hi */
            int32_t lo = first > tile ? first : tile,
                    hi = p < tile + ATTN_TILE - 1 ? p : tile + ATTN_TILE - 1;
            if (lo > hi) continue;
            add_tile<TYPE>(a, codes, table, kv_head, tile, lo, hi, q, &max, &sum, o);
        }
        for (int m = LANES / 2; m > 0; m /= 2) sum += __shfl_xor_sync(0xffffffff, sum, m);
        attn_merge_scales(&stretch_max, max, a.c, &keep, &take);
        stretch_sum = attn_merge(stretch_sum, sum, keep, take);
        for (int i = 0; i < OUT_PER_LANE; i++)
            stretch[i] = attn_merge(stretch[i], o[i], keep, take);
        if ((split + 1) % ATTN_STRETCH != 0 && split < p / ATTN_SPLIT) continue;
        attn_merge_scales(&total_max, stretch_max, a.c, &keep, &take);
        total_sum = attn_merge(total_sum, stretch_sum, keep, take);
        for (int i = 0; i < OUT_PER_LANE; i++)
            total[i] = attn_merge(total[i], stretch[i], keep, take), stretch[i] = 0;
        stretch_max = -INFINITY, stretch_sum = 0;
    }
    for (int i = 0; i < OUT_PER_LANE; i++)
        if (lane + i * LANES < a.head_dim) out[lane + i * LANES] = total[i] / total_sum;
}

/* ---- launchers */

void td_cuda_attn_plain(const struct attn_params *a, const struct td_kv_view *kv)
{
    const code_places codes = {td_kv_view_head_bytes(kv),
                               (int64_t)td_kv_scales_at(kv->dtype, kv->block_size, kv->head_dim)};
    int64_t n = (int64_t)a->n_rows * a->n_heads;
    dim3 grid((unsigned)((n + WARPS - 1) / WARPS)), block(WARPS * LANES);
    if (kv->dtype == TD_BF16)
        TD_LAUNCH(attn_plain<TD_BF16>, grid, block, 0, td_cuda.compute, *a, codes);
    else if (kv->dtype == TD_INT8)
        TD_LAUNCH(attn_plain<TD_INT8>, grid, block, 0, td_cuda.compute, *a, codes);
    else if (kv->dtype == TD_FP8)
        TD_LAUNCH(attn_plain<TD_FP8>, grid, block, 0, td_cuda.compute, *a, codes);
    else
        TD_LAUNCH(attn_plain<TD_F32>, grid, block, 0, td_cuda.compute, *a, codes);
    TD_LAUNCHED("attn_plain");
}
