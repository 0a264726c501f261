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

template <int D, bool IS_WIDE>
__device__ static inline void attend(uint8_t *shared, const struct attn_params *a, uint8_t *plan,
                                     struct attn_scratch scratch)
{
    using S = shape<D, IS_WIDE>;
    using L = panels<D, S::ROWS>;
    enum { WARPS = S::WARPS, STAGES = S::STAGES, PAIRS = D / 16 };
    const struct attn_plan *head = (const struct attn_plan *)(const void *)plan;
    int32_t index = (int32_t)blockIdx.x / a->n_kv_heads,
            kv_head = (int32_t)blockIdx.x % a->n_kv_heads;
    int32_t warp = (int32_t)threadIdx.x / LANES, lane = (int32_t)threadIdx.x % LANES,
            row0 = warp * 16, group_row0 = warp / 4 * 64;
    if (index >= (IS_WIDE ? head->n_many : head->n_few)) return;
    const struct attn_item *item =
        (const struct attn_item *)(const void *)(plan + (IS_WIDE ? head->many_at : head->few_at)) +
        index;
    bool is_cut = item->n_pieces > 1, is_first = true;
    uint8_t *q = shared + (WGMMA_ALIGN - (uintptr_t)shared % WGMMA_ALIGN) % WGMMA_ALIGN,
            *tiles = q + S::ROWS * D * 2;

    /* what the block, its first and last token, the warpgroup, and the lane's two rows see */
    int32_t first_hi = a->positions[item->row0], lo = attn_first(a, first_hi),
            n_packed = item->n_tokens * a->group;
    int32_t hi = a->positions[item->row0 + item->n_tokens - 1],
            last_lo = item->n_tokens == 1 ? 0 : attn_first(a, hi), group_lo = INT32_MAX,
            group_hi = -1;
    /* keys that the block's rows do not see are zeros */
    if (item->n_tokens == 1) first_hi = INT32_MAX;
    if (group_row0 < n_packed) {
        group_lo = attn_first(a, a->positions[item->row0 + group_row0 / a->group]);
        group_hi =
            a->positions[item->row0 +
                         (group_row0 + 63 < n_packed ? group_row0 + 63 : n_packed - 1) / a->group];
    }
    int32_t tile = lo / ATTN_TILE * ATTN_TILE, end = item->split_end * ATTN_SPLIT;
    if (tile < item->split_begin * ATTN_SPLIT) tile = item->split_begin * ATTN_SPLIT;
    if (end > hi + 1) end = hi + 1;
    struct rows r;
    for (int i = 0; i < 2; i++) {
        int32_t row = row0 + lane / 4 + 8 * i;
        r.last[i] = row < n_packed ? a->positions[item->row0 + row / a->group] : -1;
    }

    struct total span, total; /* total's out is kept at its final place in memory */
    float o[PAIRS][2][4], span_o[PAIRS][2][4];
    total_clear(&span), total_clear(&total);
    clear<PAIRS>(o), clear<PAIRS>(span_o);
    rows_start(&r);
    const int32_t *table = hi >= 0 ? a->block_tables[a->row_seq[item->row0]] : NULL;
    load_q<L>(q, a, item, kv_head, S::ROWS);
    for (int s = 0; s < STAGES - 1; s++) {
        int32_t next = tile + s * ATTN_TILE;
        uint8_t *to = tiles + s * 2 * L::TILE_BYTES;
        if (next < end)
            load_tile<L, WARPS>(to, to + L::TILE_BYTES, a,
                                look_up<WARPS>(a, table, kv_head, next, lo, hi), next, lo, hi);
        else
            td_cp_async_commit();
    }
    int64_t offset = look_up<WARPS>(a, table, kv_head, tile + (STAGES - 1) * ATTN_TILE, lo, hi);
    for (int32_t stage = 0; tile < end;
         tile += ATTN_TILE, stage = stage + 1 < STAGES ? stage + 1 : 0) {
        uint8_t *k = tiles + stage * 2 * L::TILE_BYTES, *v = k + L::TILE_BYTES;
        int32_t next = tile + (STAGES - 1) * ATTN_TILE;
        uint64_t bad = 0;
        td_cp_async_wait<STAGES - 2>();
        td_fence_proxy_async();
        /* the tile has arrived for all threads, and all are done with the stage before it */
        __syncthreads();
        if (next < end) {
            uint8_t *to = tiles + (stage > 0 ? stage - 1 : STAGES - 1) * 2 * L::TILE_BYTES;
            load_tile<L, WARPS>(to, to + L::TILE_BYTES, a, offset, next, lo, hi);
            offset = look_up<WARPS>(a, table, kv_head, next + ATTN_TILE, lo, hi);
        } else {
            td_cp_async_commit();
        }
        if (tile + ATTN_TILE - 1 > first_hi || tile < last_lo) take_infinite<L>(v, &bad);
        if (tile <= group_hi && tile + ATTN_TILE > group_lo) {
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
            for (int d = 0; d < D / 16; d++)
                td_wgmma_m64n64k16_ss(scores, &s[0][0],
                                      q + d / 4 * L::Q_PANEL_BYTES + group_row0 * WGMMA_ROW_BYTES,
                                      k + d / 4 * PANEL_BYTES, d % 4 * 16, d > 0);
            td_wgmma_commit();
            td_wgmma_wait(scores);
            td_wgmma_hold(&s[0][0]);
            softmax(&r, a, s, p, alpha, tile);
            if (bad != 0) lose_rows(&r, a, tile, bad);
            if (__any_sync(0xffffffff, alpha[0] != 1 || alpha[1] != 1)) {
                /* rarely true after the first tiles of a split */
                ATTN_UNROLL
                for (int j = 0; j < PAIRS; j++)
                    for (int e = 0; e < 8; e++) o[j][e / 4][e % 4] *= alpha[e / 2 % 2];
            }
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
        if ((tile + ATTN_TILE) % ATTN_SPLIT == 0 || tile + ATTN_TILE >= end) {
            int32_t splits = tile / ATTN_SPLIT + 1; /* splits that are complete */
            end_split<PAIRS>(&r, &span, o, span_o, a->c);
            rows_start(&r), clear<PAIRS>(o);
            if (tile + ATTN_TILE >= end ? is_cut
                                        : splits % (is_cut ? item->unit : ATTN_SPAN) == 0) {
                if (is_cut)
                    hand_on<D, PAIRS>(a, item, kv_head, row0, &span, span_o, 0, 1,
                                      (splits - 1) / item->unit, scratch);
                else
                    end_span<D, PAIRS>(a, item, kv_head, row0, &span, span_o, &total, 0, 1,
                                       is_first, false);
                is_first = false, total_clear(&span), clear<PAIRS>(span_o);
            }
        }
    }
    if (!is_cut)
        end_span<D, PAIRS>(a, item, kv_head, row0, &span, span_o, &total, 0, 1, is_first, true);
    else if (!IS_WIDE && is_last_piece(item, (uint32_t *)(void *)(plan + head->counters_at) +
                                                 item->counter * a->n_kv_heads + kv_head))
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
