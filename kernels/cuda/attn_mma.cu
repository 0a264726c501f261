/* attn_mma.cu - attention over a bf16 cache on tensor cores: mma.sync m16n8k16, cp.async, ldmatrix.
 * For sm_80 and later.
 *
 * Rows are packed: the query heads that share a kv head, times adjacent tokens, are the rows of one
 * matrix, so K and V cross the memory once per item. Two kernels do the same arithmetic on a row,
 * with the same functions, in the order of attn_tile.h. They differ in which warp does it:
 *
 *   attn_many  For prefill chunks. 128 packed rows; a warp computes 16 of them alone. With 64 rows
 *              the work would divide better, but L2 could not supply K and V fast enough.
 *   attn_few   For decode, where memory is the limit and a warp alone would wait for it. 16 packed
 *              rows for four warps: each warp scores a quarter of a tile's keys, the scores are
 *              exchanged, all warps do the softmax (it is cheap, and so nothing else need be
 *              exchanged), and each sums a quarter of V's columns.
 *
 * A score is one chain of mma over head_dim, a column of out is one chain over keys, and the
 * maximum is exact. The sum of a row is added up per lane over the keys that the fragment's layout
 * gives it, then over the four lanes of the row. All this is the same in both kernels.
 *
 * Probabilities are rounded to bf16 for the product with V, as FlashAttention does, and the sum is
 * that of the rounded ones. So out is a true weighted mean of V whose weights are off by 2^-8 each,
 * no more than the rounding of out itself for the next product may cost. Keeping a second term of
 * each probability (hi + lo) would take another 50 % of tensor-core time in prefill.
 *
 * Shared memory holds rows of K and V in 16-byte chunks, such that the 8 rows of an ldmatrix lie in
 * 8 different groups of banks: chunk ^ row % 8 where a row is a multiple of 128 bytes, else rows of
 * an odd number of chunks. There are two stages of 64 keys: while one is computed on, the other is
 * filled from the paged blocks. */
#include "kernels/cuda/attn_rows.h"

enum { WARPS_FEW = 4, WARPS_MANY = ATTN_ROWS_MANY / 16, SCORE_STRIDE = ATTN_TILE + 8 };

/* ---- shared memory */

template <int D> struct layout {
    enum {
        DIM = D,
        CHUNKS = D / 8,
        IS_SWIZZLED = D % 64 == 0,
        STRIDE = IS_SWIZZLED ? CHUNKS : CHUNKS | 1, /* chunks from row to row */
        TILE_BYTES = ATTN_TILE * STRIDE * 16,
        PAIRS = D / 16,                                  /* column pairs of n8 in out */
        FEW_PAIRS = (PAIRS + WARPS_FEW - 1) / WARPS_FEW, /* column pairs of one warp of attn_few */
        MANY_BYTES = ATTN_ROWS_MANY * STRIDE * 16 + 4 * TILE_BYTES,
        FEW_BYTES = ATTN_ROWS_FEW * (STRIDE * 16 + SCORE_STRIDE * 4) + 4 * TILE_BYTES
    };
    __device__ static int32_t at(int32_t row, int32_t chunk)
    {
        return (row * STRIDE + (IS_SWIZZLED ? chunk ^ (row & 7) : chunk)) * 16;
    }
    __device__ static int32_t at_q(int32_t row, int32_t chunk) { return at(row, chunk); }
    __device__ static void written(void) {}
};

/* ---- the arithmetic: a warp, 16 packed rows, one tile. A lane has rows g = lane / 4 and g + 8,
 * columns 2 (lane % 4) and the next of each n8. */

/* s[n] = scores of keys [8 (n0 + n), + 8), N even. */
template <int D, int N>
__device__ static inline void scores(float s[N][4], const uint8_t *q, const uint8_t *k, int32_t n0)
{
    int32_t lane = (int32_t)threadIdx.x % LANES;
    ATTN_UNROLL
    for (int n = 0; n < N; n++)
        for (int e = 0; e < 4; e++) s[n][e] = 0;
    ATTN_UNROLL
    for (int d = 0; d < D / 16; d++) {
        uint32_t qf[4], kf[4];
        td_ldmatrix_x4(qf, q + layout<D>::at(lane % 16, 2 * d + lane / 16));
        ATTN_UNROLL
        for (int n = 0; n < N; n += 2) {
            td_ldmatrix_x4(kf, k + layout<D>::at((n0 + n) * 8 + lane % 8 + lane / 16 * 8,
                                                 2 * d + lane / 8 % 2));
            td_mma_m16n8k16_bf16(s[n], qf, kf, s[n]);
            td_mma_m16n8k16_bf16(s[n + 1], qf, kf + 2, s[n + 1]);
        }
    }
}

/* out columns [16 pair, + 16) of V: o = o + p . V */
template <int D>
__device__ static inline void values(float o[2][4], const uint32_t p[K16][4], const uint8_t *v,
                                     int32_t pair)
{
    int32_t lane = (int32_t)threadIdx.x % LANES;
    ATTN_UNROLL
    for (int j = 0; j < K16; j++) {
        uint32_t vf[4];
        td_ldmatrix_x4_trans(vf, v + layout<D>::at(j * 16 + lane % 16, 2 * pair + lane / 16));
        td_mma_m16n8k16_bf16(o[0], p[j], vf, o[0]);
        td_mma_m16n8k16_bf16(o[1], p[j], vf + 2, o[1]);
    }
}

/* ---- kernels */

/* The scores of the few rows: each warp has 16 of the keys, and all get the scores of all by way of
 * `board` in shared memory. */
template <int D>
__device__ __forceinline__ static void few_scores(float s[N8][4], const uint8_t *q,
                                                  const uint8_t *k, float *board)
{
    int32_t warp = (int32_t)threadIdx.x / LANES, lane = (int32_t)threadIdx.x % LANES;
    float mine[2][4];
    board += lane / 4 * SCORE_STRIDE + 2 * (lane % 4);
    scores<D, 2>(mine, q, k, 2 * warp);
    ATTN_UNROLL
    for (int n = 0; n < 2; n++)
        for (int e = 0; e < 4; e++)
            board[(2 * warp + n) * 8 + e / 2 * 8 * SCORE_STRIDE + e % 2] = mine[n][e];
    __syncthreads();
    ATTN_UNROLL
    for (int n = 0; n < N8; n++)
        for (int e = 0; e < 4; e++) s[n][e] = board[n * 8 + e / 2 * 8 * SCORE_STRIDE + e % 2];
}

/* The last keys of the lane's two rows, and the keys that any row of the warp sees: lo..hi. */
__device__ __forceinline__ static void warp_rows(const struct attn_params *a,
                                                 const struct attn_item *item, int32_t row0,
                                                 struct rows *r, int32_t *ret_lo, int32_t *ret_hi)
{
    int32_t lane = (int32_t)threadIdx.x % LANES, warp_lo = INT32_MAX, warp_hi = -1;
    for (int i = 0; i < 2; i++) {
        int32_t row = row0 + lane / 4 + 8 * i;
        r->last[i] = -1;
        if (row >= item->n_tokens * a->group) continue;
        r->last[i] = a->positions[item->row0 + row / a->group];
        int32_t first = attn_first(a, r->last[i]);
        warp_lo = first < warp_lo ? first : warp_lo,
        warp_hi = r->last[i] > warp_hi ? r->last[i] : warp_hi;
    }
    for (int m = 4; m < LANES; m *= 2) {
        int32_t other_lo = __shfl_xor_sync(0xffffffff, warp_lo, m),
                other_hi = __shfl_xor_sync(0xffffffff, warp_hi, m);
        warp_lo = other_lo < warp_lo ? other_lo : warp_lo,
        warp_hi = other_hi > warp_hi ? other_hi : warp_hi;
    }
    *ret_lo = warp_lo, *ret_hi = warp_hi;
}

/* One tile of K and V: the online softmax of its scores, and o = o * alpha + p . V. q: the warp's
 * rows; bad: keys whose V is not finite. */
template <int D, bool IS_MANY, int PAIRS>
__device__ __forceinline__ static void
use_tile(const struct attn_params *a, const uint8_t *q, const uint8_t *k, const uint8_t *v,
         uint8_t *exchange, int32_t tile, uint64_t bad, struct rows *r, float o[PAIRS][2][4])
{
    float s[N8][4], alpha[2];
    uint32_t p[K16][4];
    if (IS_MANY)
        scores<D, N8>(s, q, k, 0);
    else
        few_scores<D>(s, q, k, (float *)(void *)exchange);
    softmax(r, a, s, p, alpha, tile);
    if (bad != 0) lose_rows(r, a, tile, bad);
    rescale<PAIRS>(o, alpha);
    ATTN_UNROLL
    for (int j = 0; j < PAIRS; j++) {
        int32_t pair = IS_MANY ? j : (int32_t)threadIdx.x / LANES + j * WARPS_FEW;
        if (pair < layout<D>::PAIRS) values<D>(o[j], p, v, pair);
    }
}

/* IS_MANY: ATTN_ROWS_MANY packed rows, else ATTN_ROWS_FEW. blockIdx.x: item * n_kv_heads + kv
 * head. */
template <int D, bool IS_MANY>
__device__ static inline void attend(uint8_t *shared, const struct attn_params *a, uint8_t *plan,
                                     struct attn_scratch scratch)
{
    enum {
        WARPS = IS_MANY ? WARPS_MANY : WARPS_FEW,
        ROWS = IS_MANY ? ATTN_ROWS_MANY : ATTN_ROWS_FEW,
        PAIRS = IS_MANY ? layout<D>::PAIRS : layout<D>::FEW_PAIRS
    };
    int32_t kv_head;
    const struct attn_item *item = block_item(a, plan, IS_MANY, &kv_head);
    if (!item) return;
    int32_t warp = (int32_t)threadIdx.x / LANES;
    uint8_t *q = shared, *tiles = q + ROWS * layout<D>::STRIDE * 16,
            *exchange = tiles + 4 * layout<D>::TILE_BYTES;

    /* what the block, its first and last token, the warp, and the lane's two rows see */
    const struct block_keys keys = block_keys_of(a, item);
    int32_t row0 = IS_MANY ? warp * 16 : 0, tile = keys.tile, warp_lo, warp_hi;
    struct sums_so_far so_far;
    sums_begin(&so_far, item);
    warp_rows(a, item, row0, &so_far.r, &warp_lo, &warp_hi);

    float o[PAIRS][2][4], stretch_o[PAIRS][2][4];
    clear<PAIRS>(o), clear<PAIRS>(stretch_o);
    const int32_t *table = keys.hi >= 0 ? a->block_tables[a->row_seq[item->row0]] : NULL;
    int64_t offset = 0;
    load_q<layout<D>>(q, a, item, kv_head, ROWS);
    if (tile < keys.end) {
        load_tile<layout<D>, WARPS>(tiles, tiles + layout<D>::TILE_BYTES, a,
                                    look_up<WARPS>(a, table, kv_head, tile, keys.lo, keys.hi), tile,
                                    keys.lo, keys.hi);
        offset = look_up<WARPS>(a, table, kv_head, tile + ATTN_TILE, keys.lo, keys.hi);
    }
    for (int32_t stage = 0; tile < keys.end; tile += ATTN_TILE, stage ^= 1) {
        uint8_t *k = tiles + stage * 2 * layout<D>::TILE_BYTES, *v = k + layout<D>::TILE_BYTES;
        uint64_t bad = 0;
        td_cp_async_wait<0>();
        /* the tile has arrived for all threads, and all are done with the other stage */
        __syncthreads();
        if (tile + ATTN_TILE < keys.end) {
            uint8_t *next = tiles + (stage ^ 1) * 2 * layout<D>::TILE_BYTES;
            load_tile<layout<D>, WARPS>(next, next + layout<D>::TILE_BYTES, a, offset,
                                        tile + ATTN_TILE, keys.lo, keys.hi);
            offset = look_up<WARPS>(a, table, kv_head, tile + 2 * ATTN_TILE, keys.lo, keys.hi);
        }
        if (tile + ATTN_TILE - 1 > keys.first_hi || tile < keys.last_lo)
            take_infinite<layout<D>>(v, &bad);
        if (!IS_MANY || (tile <= warp_hi && tile + ATTN_TILE > warp_lo)) {
            use_tile<D, IS_MANY, PAIRS>(a, q + row0 * layout<D>::STRIDE * 16, k, v, exchange, tile,
                                        bad, &so_far.r, o);
        }
        if ((tile + ATTN_TILE) % ATTN_SPLIT == 0 || tile + ATTN_TILE >= keys.end)
            end_of_split<D, PAIRS>(a, item, kv_head, row0, &so_far, o, stretch_o,
                                   IS_MANY ? 0 : warp, IS_MANY ? 1 : WARPS, tile, keys.end,
                                   scratch);
    }
    if (!so_far.is_cut)
        end_stretch<D, PAIRS>(a, item, kv_head, row0, &so_far.stretch, stretch_o, &so_far.total,
                              IS_MANY ? 0 : warp, IS_MANY ? 1 : WARPS, so_far.is_first, true);
    else if (!IS_MANY && is_last_piece(item, counter_of(a, plan, item, kv_head)))
        merge_item<D>(a, item, kv_head, scratch, (float *)(void *)tiles);
}

template <int D>
__global__ void __launch_bounds__(WARPS_MANY *LANES, 1)
    attn_many(struct attn_params a, uint8_t *plan, struct attn_scratch scratch)
{
    TD_SHARED_BYTES(uint8_t, shared);
    attend<D, true>(shared, &a, plan, scratch);
}

template <int D>
__global__ void __launch_bounds__(WARPS_FEW *LANES, 3)
    attn_few(struct attn_params a, uint8_t *plan, struct attn_scratch scratch)
{
    TD_SHARED_BYTES(uint8_t, shared);
    attend<D, false>(shared, &a, plan, scratch);
}

/* ---- launchers */

template <int D>
static void launch(const struct attn_params *a, const struct attn_plan *plan, uint8_t *device_plan,
                   struct attn_scratch scratch)
{
    enum { MANY_BYTES = layout<D>::MANY_BYTES, FEW_BYTES = layout<D>::FEW_BYTES };
    static bool is_allowed;
    if (!is_allowed)
        is_allowed = td_cuda_allow_shared((const void *)attn_many<D>, MANY_BYTES, "attn_many") &&
                     td_cuda_allow_shared((const void *)attn_few<D>, FEW_BYTES, "attn_few");
    ATTN_LAUNCH(attn_many<D>, "attn_many", plan->n_many_grid, WARPS_MANY * LANES, MANY_BYTES);
    ATTN_LAUNCH(attn_merge_many<D>, "attn_merge_many", plan->n_merged_grid * MERGE_GROUPS,
                MERGE_THREADS, 0);
    ATTN_LAUNCH(attn_few<D>, "attn_few", plan->n_few_grid, WARPS_FEW * LANES, FEW_BYTES);
}

bool td_cuda_attn_mma_has(int32_t head_dim, int32_t group)
{
    return group <= ATTN_ROWS_MANY &&
           (head_dim == 32 || head_dim == 64 || head_dim == 96 || head_dim == 128);
}

void td_cuda_attn_mma(const struct attn_params *a, const struct attn_plan *plan, void *device_plan,
                      float *scratch)
{
    struct attn_scratch s = {scratch, scratch + (int64_t)2 * ATTN_SLOTS * a->n_heads};
    uint8_t *to = (uint8_t *)device_plan;
    switch (a->head_dim) {
    case 32:
        launch<32>(a, plan, to, s);
        break;
    case 64:
        launch<64>(a, plan, to, s);
        break;
    case 96:
        launch<96>(a, plan, to, s);
        break;
    default:
        launch<128>(a, plan, to, s);
        break;
    }
}
