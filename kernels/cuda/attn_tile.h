/* attn_tile.h - what the attention kernels share: the order in which a row's keys are walked, and
 * how two parts of a row are merged.
 *
 * Why here: the bits of a row must be the same in a prefill chunk of any size, in a decode step and
 * in any company (I1), yet decode has to spread one row over the whole card. So the order is fixed
 * by absolute positions, and every kernel follows it:
 *
 *   keys  0 ............ 63 | 64 ........ 127 | ... 511 | 512 ... 4095 | 4096 ...   tiles of 64
 *         keys, splits of 8 tiles, spans of 8 splits
 *         one step of the     its next step               a new split    a new span
 *         online softmax                                  starts from nothing
 *
 *   (1) inside a split: the online softmax of FlashAttention over its tiles in ascending order,
 *       state (max, sum, out);
 *   (2) inside a span: the states of its splits merged in ascending order by attn_merge, whoever
 *       computed them (FlashDecoding's parts, of a fixed size);
 *       over spans: theirs merged in the same way into the total. Two levels, because a long
 *       prompt's few rows may be cut at splits, as decode needs, while a chunk's many rows behind
 *       as long a prefix are cut at spans: an eighth of the states to keep and to bring across the
 *       memory;
 *   (3) a tile, split or span of which a row sees nothing changes no bit of its state, so rows with
 *       different ends and windows may share a thread block.
 *
 * (3) holds because max is exact, exp2(0) is 1, a masked probability is +0 and x * 1 + 0 is x; a
 *     key that no row of the block may see is read as zeros.
 *
 * Sources: Dao et al. 2022, Dao 2023 (FlashAttention, -2); Dao et al. 2023 (Flash-Decoding);
 * Kwon et al. 2023 (PagedAttention). */
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

enum { ATTN_TILE = 64, ATTN_SPLIT = 512, ATTN_SPAN = 8 /* splits */ };

/* td_attn_args as the kernels take it. */
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
    int32_t window;
    float c; /* scale * log2(e) > 0: exp(scale * x) is exp2(c * x) */
};

/* A work item of the plan: the packed rows of n_tokens adjacent rows of one sequence with one kv
 * head's query heads (row i is head i % group of token i / group), and the splits [split_begin,
 * split_end) of their keys. The items of the same rows are its pieces. One piece writes the
 * rows' out; of several, each hands on the state of each of its units - splits, or spans where
 * no piece ends inside one - and all are merged when they are there, so that the order is that
 * of one piece. */
struct attn_item {
    int32_t row0, n_tokens; /* padding: positions -1 */
    int32_t split_begin, split_end;
    int32_t n_pieces, unit; /* unit: 1 or ATTN_SPAN splits; n_pieces > 1 */
    int32_t counter;        /* of the pieces that are done; attn_few's, n_pieces > 1 */
    int32_t slot0;          /* the state of token t and unit u is at slot0 + u * n_tokens
                               + t */
};

enum {
    ATTN_ROWS_FEW = 16,    /* packed rows of an item of attn_few: one m16 tile that four
                              warps share */
    ATTN_ROWS_MANY = 128,  /* of attn_many: a tile per warp */
    ATTN_ROWS_MERGED = 4,  /* that are merged at a time, and by a block of
                              attn_merge_many */
    ATTN_SLOTS = 4096,     /* states in scratch, of all heads each */
    ATTN_PIECES = 1024,    /* of a plan's items for attn_few, beyond one per item */
    ATTN_PIECES_MANY = 512 /* of those for attn_many; and items for attn_merge */
};

/* The plan: this, then counters [ATTN_PIECES][n_kv_heads] (all zero between entries), then the
 * items for attn_few, those for attn_many, and those for attn_merge: attn_many's cut items, once
 * each. */
struct attn_plan {
    int32_t n_few, n_many, n_merged;
    int32_t n_few_grid, n_many_grid, n_merged_grid;          /* rounded up: what decides grids */
    int32_t counters_at, few_at, many_at, merged_at, pad[6]; /* offsets in bytes */
};
_Static_assert(sizeof(struct attn_plan) == 64 && sizeof(struct attn_item) == 32,
               "the host writes them, the device reads them");

struct attn_params td_cuda_attn_params(const struct td_attn_args *a); /* attn.cu */
void td_cuda_attn_plain(const struct attn_params *a, bool is_bf16);   /* attn_f32.cu */
bool td_cuda_attn_mma_has(int32_t head_dim, int32_t group);           /* attn_mma.cu */
void td_cuda_attn_mma(const struct attn_params *a, const struct attn_plan *plan, void *device_plan,
                      float *scratch);
bool td_cuda_attn_wgmma_has(int32_t head_dim, int32_t group); /* attn_wgmma.cu */
void td_cuda_attn_wgmma(const struct attn_params *a, const struct attn_plan *plan,
                        void *device_plan, float *scratch);

/* The first position that a row at position p sees. */
__device__ static inline int32_t attn_first(const struct attn_params *a, int32_t p)
{
    return a->window > 0 && p - a->window + 1 > 0 ? p - a->window + 1 : 0;
}

/* Where K of (kv head, position) starts, in bytes from a->kv. */
__device__ static inline int64_t attn_key_offset(const struct attn_params *a, const int32_t *table,
                                                 int32_t kv_head, int32_t position)
{
    int32_t block = a->block_shift >= 0 ? position >> a->block_shift : position / a->block_size,
            slot = position - block * a->block_size;
    return table[block] * a->block_bytes + ((int64_t)kv_head * a->block_size + slot) * a->row_bytes;
}

/* How much of the old state (of largest score `from`) is left once the largest score is `to` >=
 * from: exactly 1 if nothing changed, 0 if there was none. */
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
