/* attn_tile.h - what the attention kernels share: the order in which a row's keys are walked, and
 * how two parts of a row are merged.
 *
 * Why here: the bits of a row must be the same in a prefill chunk of any size, in a decode step and
 * beside any other rows (I1). Yet decode has to spread one row over the whole card. So absolute
 * positions fix the order, and every kernel follows it:
 *
 *   keys   0 .. 63 | 64 .. 127 | ... | 512 ..     | 4096 ..
 *          tile 0  | tile 1    |     | next split | next stretch
 *
 * A tile is 64 keys: one step of the online softmax. A split is 8 tiles (512 keys); its softmax
 * starts from nothing. A stretch is 8 splits (4096 keys).
 *
 *   (1) Inside a split: the online softmax of FlashAttention over its tiles in ascending order,
 *       with the state (max, sum, out).
 *   (2) Inside a stretch: attn_merge merges the states of its splits in ascending order,
 *       whoever computed them (FlashDecoding's parts, of a fixed size). The states of the stretches
 *       are merged into the total in the same way.
 *   (3) A tile, split or stretch of which a row sees nothing changes no bit of the row's state, so
 *       rows with different ends and windows may share a thread block.
 *
 * Two levels, because the few rows of a decode step may have to be cut at every split, while the
 * many rows of a chunk behind an equally long prefix are cut at stretches: an eighth of the states
 * to keep and to move through memory.
 *
 * (3) holds because max is exact, exp2(0) is 1, a masked probability is +0, and x * 1 + 0 is x. A
 * key that no row of the block may see is read as zeros.
 *
 * Sources: Dao et al. 2022, Dao 2023 (FlashAttention, -2); Dao et al. 2023 (Flash-Decoding); Kwon
 * et al. 2023 (PagedAttention). */
#ifndef TD_KERNELS_CUDA_ATTN_TILE_H
#define TD_KERNELS_CUDA_ATTN_TILE_H

#include <math.h>

#include "kernels/cuda/cuda.h"

#ifdef __CUDACC__
#define ATTN_UNROLL _Pragma("unroll")
#define ATTN_UNROLL_BY_4 _Pragma("unroll 4")
#define ATTN_NO_UNROLL _Pragma("unroll 1")
#else
#define ATTN_UNROLL
#define ATTN_UNROLL_BY_4
#define ATTN_NO_UNROLL
#endif

enum { ATTN_TILE = 64, ATTN_SPLIT = 512, ATTN_STRETCH = 8 /* splits */ };

/* struct td_attn_args in the form that the kernels take. */
struct attn_params {
    const uint8_t *kv;
    int64_t block_bytes, v_offset; /* V of a key lies v_offset bytes behind its K */
    const float *q;
    float *out;
    int64_t q_stride, out_stride;
    const int32_t *positions, *row_seq;
    const int32_t *const *block_tables;
    int32_t n_rows, n_heads, n_kv_heads, group, head_dim, row_bytes;
    int32_t block_size, block_shift; /* block_shift: -1 if block_size is no power of two */
    int32_t sliding_window;
    float c; /* scale * log2(e) > 0: exp(scale * x) is exp2(c * x) */
};

/* A work item of the plan: n_tokens adjacent rows of one sequence with the query heads of one kv
 * head, packed into the rows of one matrix (packed row i is head i % group of token i / group), and
 * the splits [split_begin, split_end) of their keys. Items of the same rows are pieces of one. A
 * single piece writes the rows' out. Each of several pieces stores the state of each of its units;
 * a unit is a split, or a stretch where no piece ends inside one. When all are there they are
 * merged, in the order in which one piece would have computed them. */
struct attn_item {
    int32_t row0, n_tokens; /* padding: positions -1 */
    int32_t split_begin, split_end;
    int32_t n_pieces, unit; /* unit: 1 or ATTN_STRETCH splits; n_pieces > 1 */
    int32_t counter; /* counts the pieces that are done; used by attn_few when n_pieces > 1 */
    int32_t slot0;   /* the state of token t and unit u is at slot0 + u * n_tokens
                               + t */
};

enum {
    /* packed rows of an item of attn_few: one m16 tile, which four warps share */
    ATTN_ROWS_FEW = 16,
    ATTN_ROWS_MANY = 128,  /* packed rows of an item of attn_many: one m16 tile per warp */
    ATTN_ROWS_MERGED = 4,  /* packed rows merged at a time, and by one block of attn_merge_many */
    ATTN_SLOTS = 4096,     /* states in scratch, each of all heads */
    ATTN_PIECES = 1024,    /* pieces of a plan for attn_few, beyond one per item */
    ATTN_PIECES_MANY = 512 /* pieces of a plan for attn_many, and items for attn_merge_many */
};

/* The plan in memory: this header, then counters [ATTN_PIECES][n_kv_heads] (all zero between
 * entries), the items for attn_few, the items for attn_many, and the items for attn_merge_many,
 * which are those that attn_many has in pieces, once each. */
struct attn_plan {
    int32_t n_few, n_many, n_merged;
    int32_t n_few_grid, n_many_grid, n_merged_grid;          /* rounded up: what decides grids */
    int32_t counters_at, few_at, many_at, merged_at, pad[6]; /* offsets in bytes */
};
_Static_assert(sizeof(struct attn_plan) == 64 && sizeof(struct attn_item) == 32,
               "the host writes them, the device reads them");

struct attn_params td_cuda_attn_params(const struct td_attn_args *a);              /* attn.cu */
void td_cuda_attn_plain(const struct attn_params *a, const struct td_kv_view *kv); /* attn_f32.cu */
bool td_cuda_attn_mma_has(int32_t head_dim, int32_t group);                        /* attn_mma.cu */
void td_cuda_attn_mma(const struct attn_params *a, const struct attn_plan *plan, void *device_plan,
                      float *scratch);
bool td_cuda_attn_wgmma_has(int32_t head_dim, int32_t group); /* attn_wgmma.cu */
void td_cuda_attn_wgmma(const struct attn_params *a, const struct attn_plan *plan,
                        void *device_plan, float *scratch);

/* The first position that a row at position p sees. */
__device__ static inline int32_t attn_first(const struct attn_params *a, int32_t p)
{
    return a->sliding_window > 0 && p - a->sliding_window + 1 > 0 ? p - a->sliding_window + 1 : 0;
}

/* Where K of (kv head, position) starts, in bytes from a->kv. */
__device__ static inline int64_t attn_key_offset(const struct attn_params *a, const int32_t *table,
                                                 int32_t kv_head, int32_t position)
{
    int32_t block = a->block_shift >= 0 ? position >> a->block_shift : position / a->block_size,
            slot = position - block * a->block_size;
    return table[block] * a->block_bytes + ((int64_t)kv_head * a->block_size + slot) * a->row_bytes;
}

/* The factor for an old state, of largest score `from`, once the largest score is `to` >= from:
 * exactly 1 if nothing changed, 0 if there was no state. */
__device__ static inline float attn_rescale(float from, float to, float c)
{
    return exp2f((from - (to == -INFINITY ? 0.0f : to)) * c);
}

/* (2): the two factors of total = total * keep + state * take, for sum and every element of out. */
__device__ static inline void attn_merge_scales(float *total_max, float max, float c,
                                                float *ret_keep, float *ret_take)
{
    float both = fmaxf(*total_max, max);
    *ret_keep = attn_rescale(*total_max, both, c);
    *ret_take = attn_rescale(max, both, c);
    *total_max = both;
}

__device__ static inline float attn_merge(float total, float state, float keep, float take)
{
    return fmaf(total, keep, state * take);
}

#endif
