/* attn_wgmma.cu - attention over a bf16 cache on Hopper, with wgmma instead of mma.sync, for head
 * sizes 64 and 128.
 *
 * The order of a row's keys, the softmax and the merging are those of attn_mma.cu (attn_rows.h);
 * only the two products differ. mma.sync reads every fragment of K and V from shared memory once
 * per 16 rows, wgmma once per 64, and wgmma keeps the tensor cores busy while the other warpgroup
 * does its softmax.
 *
 *   attn_wide  For prefill chunks. 128 packed rows, two warpgroups of 64.
 *   attn_thin  For decode. Up to 16 packed rows, those of the first warp of one warpgroup. The
 *              other 48 rows of the product are unused (their q is whatever lies behind the real
 *              one). A decode step waits for memory long enough to pay for that, and three
 *              stages keep two tiles on their way.
 *
 * Whether a row of wgmma has the bits of the same row of mma.sync depends on the hardware, so a
 * process uses one of the two files for all rows (I1). Until both have been measured on a card,
 * attn_mma.cu is the default, and TANDEM_CUDA_ATTN=wgmma asks for this file.
 *
 * Tried and left out. (a) attn_wide asks for the scores of the next tile before the softmax of this
 * one: where one warpgroup sees a tile and the other does not, nvcc 13.0 finds the products in a
 * divergent path and serializes all of them (C7518), and attn_wide<128> spills. (b) K and V by bulk
 * copies: a bulk copy keeps the order of a row, wgmma wants its 16-byte chunks swizzled, and a
 * tensor map would have to know the places of the blocks. */
#include "kernels/cuda/attn_rows.h"
#include "kernels/cuda/wgmma.h"

enum {
    WARPS_WIDE = ATTN_ROWS_MANY / 16,
    WARPS_THIN = 4,
    PANEL_BYTES = ATTN_TILE * WGMMA_ROW_BYTES
};

/* q: panels of ROWS rows; K and V: panels of 64. */
template <int D, int ROWS> struct panels {
    enum {
        DIM = D,
        CHUNKS = D / 8,
        PANELS = D / WGMMA_COLUMNS,
        Q_PANEL_BYTES = ROWS * WGMMA_ROW_BYTES,
        TILE_BYTES = PANELS * PANEL_BYTES
    };
    __device__ static int32_t at(int32_t row, int32_t chunk)
    {
        return chunk / 8 * PANEL_BYTES + td_wgmma_place(row, chunk % 8);
    }
    __device__ static int32_t at_q(int32_t row, int32_t chunk)
    {
        return chunk / 8 * Q_PANEL_BYTES + td_wgmma_place(row, chunk % 8);
    }
    __device__ static void written(void) { td_fence_proxy_async(); }
};

template <int D, bool IS_WIDE> struct shape {
    enum {
        WARPS = IS_WIDE ? WARPS_WIDE : WARPS_THIN,
        ROWS = IS_WIDE ? ATTN_ROWS_MANY : ATTN_ROWS_FEW,
        STAGES = IS_WIDE ? 2 : 3,
        BYTES = WGMMA_ALIGN + ROWS * D * 2 + STAGES * 2 * ATTN_TILE * D * 2
    };
};

/* The first and the last key that the 64 packed rows from group_row0 on see. */
__device__ __forceinline__ static void group_keys(const struct attn_params *a,
                                                  const struct attn_item *item, int32_t group_row0,
                                                  int32_t *ret_lo, int32_t *ret_hi)
{
    int32_t n_packed = item->n_tokens * a->group,
            last = group_row0 + 63 < n_packed ? group_row0 + 63 : n_packed - 1;
    *ret_lo = attn_first(a, a->positions[item->row0 + group_row0 / a->group]);
    *ret_hi = a->positions[item->row0 + last / a->group];
}

/* The tiles of all stages but one; a tile that is not there is an empty group, because waits count
 * groups. */
template <typename L, int WARPS, int STAGES>
__device__ __forceinline__ static void load_first_tiles(uint8_t *tiles, const struct attn_params *a,
                                                        const int32_t *table, int32_t kv_head,
                                                        const struct block_keys *keys)
{
    for (int s = 0; s < STAGES - 1; s++) {
        int32_t next = keys->tile + s * ATTN_TILE;
        uint8_t *to = tiles + s * 2 * L::TILE_BYTES;
        if (next < keys->end)
            load_tile<L, WARPS>(to, to + L::TILE_BYTES, a,
                                look_up<WARPS>(a, table, kv_head, next, keys->lo, keys->hi), next,
                                keys->lo, keys->hi);
        else
            td_cp_async_commit();
    }
}

/* One tile of K and V: the online softmax of its scores, and o = o * alpha + p . V. q: the
 * warpgroup's rows; bad: keys whose V is not finite. */
template <typename L, int PAIRS>
__device__ __forceinline__ static void use_tile(const struct attn_params *a, const uint8_t *q,
                                                const uint8_t *k, const uint8_t *v, int32_t tile,
                                                uint64_t bad, struct rows *r, float o[PAIRS][2][4])
{
    float s[N8][4], alpha[2];
    uint32_t p[K16][4];
    TD_WGMMA_GROUP(scores);
    TD_WGMMA_GROUP(sums);
    ATTN_UNROLL
    for (int n = 0; n < N8; n++)
        for (int e = 0; e < 4; e++) s[n][e] = 0;
    td_wgmma_hold(&s[0][0]);
    td_wgmma_fence();
    ATTN_UNROLL
    for (int d = 0; d < L::DIM / 16; d++)
        td_wgmma_m64n64k16_ss(scores, &s[0][0], q + d / 4 * L::Q_PANEL_BYTES,
                              k + d / 4 * PANEL_BYTES, d % 4 * 16, d > 0);
    td_wgmma_commit();
    td_wgmma_wait(scores);
    td_wgmma_hold(&s[0][0]);
    softmax(r, a, s, p, alpha, tile);
    if (bad != 0) lose_rows(r, a, tile, bad);
    rescale<PAIRS>(o, alpha);
    ATTN_UNROLL
    for (int i = 0; i < L::PANELS; i++) td_wgmma_hold(&o[4 * i][0][0]);
    td_wgmma_fence();
    ATTN_UNROLL
    for (int j = 0; j < K16; j++)
        for (int i = 0; i < L::PANELS; i++)
            td_wgmma_m64n64k16_rs(sums, &o[4 * i][0][0], p[j],
                                  v + i * PANEL_BYTES + j * 16 * WGMMA_ROW_BYTES);
    td_wgmma_commit();
    td_wgmma_wait(sums);
    ATTN_UNROLL
    for (int i = 0; i < L::PANELS; i++) td_wgmma_hold(&o[4 * i][0][0]);
}

template <int D, bool IS_WIDE>
__device__ static inline void attend(uint8_t *shared, const struct attn_params *a, uint8_t *plan,
                                     struct attn_scratch scratch)
{
    using S = shape<D, IS_WIDE>;
    using L = panels<D, S::ROWS>;
    enum { WARPS = S::WARPS, STAGES = S::STAGES, PAIRS = D / 16 };
    int32_t kv_head;
    const struct attn_item *item = block_item(a, plan, IS_WIDE, &kv_head);
    if (!item) return;
    int32_t lane = (int32_t)threadIdx.x % LANES, warp = (int32_t)threadIdx.x / LANES,
            row0 = warp * 16, group_row0 = warp / 4 * 64;
    uint8_t *q = shared + (WGMMA_ALIGN - (uintptr_t)shared % WGMMA_ALIGN) % WGMMA_ALIGN,
            *tiles = q + S::ROWS * D * 2;

    /* what the block, its first and last token, the warpgroup, and the lane's two rows see */
    const struct block_keys keys = block_keys_of(a, item);
    int32_t n_packed = item->n_tokens * a->group, tile = keys.tile, group_lo = INT32_MAX,
            group_hi = -1;
    if (group_row0 < n_packed) group_keys(a, item, group_row0, &group_lo, &group_hi);
    struct sums_so_far so_far;
    sums_begin(&so_far, item);
    for (int i = 0; i < 2; i++) {
        int32_t row = row0 + lane / 4 + 8 * i;
        so_far.r.last[i] = row < n_packed ? a->positions[item->row0 + row / a->group] : -1;
    }

    float o[PAIRS][2][4], stretch_o[PAIRS][2][4];
    clear<PAIRS>(o), clear<PAIRS>(stretch_o);
    const int32_t *table = keys.hi >= 0 ? a->block_tables[a->row_seq[item->row0]] : NULL;
    load_q<L>(q, a, item, kv_head, S::ROWS);
    load_first_tiles<L, WARPS, STAGES>(tiles, a, table, kv_head, &keys);
    int64_t offset =
        look_up<WARPS>(a, table, kv_head, tile + (STAGES - 1) * ATTN_TILE, keys.lo, keys.hi);
    for (int32_t stage = 0; tile < keys.end;
         tile += ATTN_TILE, stage = stage + 1 < STAGES ? stage + 1 : 0) {
        uint8_t *k = tiles + stage * 2 * L::TILE_BYTES, *v = k + L::TILE_BYTES;
        int32_t next = tile + (STAGES - 1) * ATTN_TILE;
        uint64_t bad = 0;
        td_cp_async_wait<STAGES - 2>();
        td_fence_proxy_async();
        /* the tile has arrived for all threads, and all are done with the stage before it */
        __syncthreads();
        if (next < keys.end) {
            uint8_t *to = tiles + (stage > 0 ? stage - 1 : STAGES - 1) * 2 * L::TILE_BYTES;
            load_tile<L, WARPS>(to, to + L::TILE_BYTES, a, offset, next, keys.lo, keys.hi);
            offset = look_up<WARPS>(a, table, kv_head, next + ATTN_TILE, keys.lo, keys.hi);
        } else {
            td_cp_async_commit();
        }
        if (tile + ATTN_TILE - 1 > keys.first_hi || tile < keys.last_lo) take_infinite<L>(v, &bad);
        if (tile <= group_hi && tile + ATTN_TILE > group_lo)
            use_tile<L, PAIRS>(a, q + group_row0 * WGMMA_ROW_BYTES, k, v, tile, bad, &so_far.r, o);
        if ((tile + ATTN_TILE) % ATTN_SPLIT == 0 || tile + ATTN_TILE >= keys.end)
            end_of_split<D, PAIRS>(a, item, kv_head, row0, &so_far, o, stretch_o, 0, 1, tile,
                                   keys.end, scratch);
    }
    if (!so_far.is_cut)
        end_stretch<D, PAIRS>(a, item, kv_head, row0, &so_far.stretch, stretch_o, &so_far.total, 0,
                              1, so_far.is_first, true);
    else if (!IS_WIDE && is_last_piece(item, counter_of(a, plan, item, kv_head)))
        merge_item<D>(a, item, kv_head, scratch, (float *)(void *)tiles);
}

template <int D>
__global__ void __launch_bounds__(WARPS_WIDE *LANES, 1)
    attn_wide(struct attn_params a, uint8_t *plan, struct attn_scratch scratch)
{
    TD_SHARED_BYTES(uint8_t, shared);
#if TD_WGMMA_IS_HERE
    attend<D, true>(shared, &a, plan, scratch);
#else
    __trap();
#endif
}

template <int D>
__global__ void __launch_bounds__(WARPS_THIN *LANES, 2)
    attn_thin(struct attn_params a, uint8_t *plan, struct attn_scratch scratch)
{
    TD_SHARED_BYTES(uint8_t, shared);
#if TD_WGMMA_IS_HERE
    attend<D, false>(shared, &a, plan, scratch);
#else
    __trap();
#endif
}

/* ---- launchers */

template <int D>
static void launch(const struct attn_params *a, const struct attn_plan *plan, uint8_t *device_plan,
                   struct attn_scratch scratch)
{
    enum { WIDE_BYTES = shape<D, true>::BYTES, THIN_BYTES = shape<D, false>::BYTES };
    static bool is_allowed;
    if (!is_allowed)
        is_allowed = td_cuda_allow_shared((const void *)attn_wide<D>, WIDE_BYTES, "attn_wide") &&
                     td_cuda_allow_shared((const void *)attn_thin<D>, THIN_BYTES, "attn_thin");
    ATTN_LAUNCH(attn_wide<D>, "attn_wide", plan->n_many_grid, WARPS_WIDE * LANES, WIDE_BYTES);
    ATTN_LAUNCH(attn_merge_many<D>, "attn_merge_many", plan->n_merged_grid * MERGE_GROUPS,
                MERGE_THREADS, 0);
    ATTN_LAUNCH(attn_thin<D>, "attn_thin", plan->n_few_grid, WARPS_THIN * LANES, THIN_BYTES);
}

bool td_cuda_attn_wgmma_has(int32_t head_dim, int32_t group)
{
    return td_cuda.cc == 90 && group <= ATTN_ROWS_MANY && (head_dim == 64 || head_dim == 128);
}

void td_cuda_attn_wgmma(const struct attn_params *a, const struct attn_plan *plan,
                        void *device_plan, float *scratch)
{
    struct attn_scratch s = {scratch, scratch + (int64_t)2 * ATTN_SLOTS * a->n_heads};
    if (a->head_dim == 64)
        launch<64>(a, plan, (uint8_t *)device_plan, s);
    else
        launch<128>(a, plan, (uint8_t *)device_plan, s);
}
