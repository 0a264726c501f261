/* attn_rows.h - what the tensor-core kernels of attention share: copying packed rows of q and tiles
 * of K and V into shared memory, the online softmax on fragments, the states of splits, and their
 * merging. Device code only. attn_tile.h defines the order.
 *
 * A layout L is a type that says where shared memory has what: DIM, CHUNKS (of 16 bytes in a row),
 * at(row, chunk) in a tile of K or V, at_q in q, and what threads do after they wrote there, before
 * the barrier. */
#ifndef TD_KERNELS_CUDA_ATTN_ROWS_H
#define TD_KERNELS_CUDA_ATTN_ROWS_H

#include "kernels/cuda/attn_tile.h"
#include "kernels/cuda/ptx.h"

enum { LANES = 32, N8 = ATTN_TILE / 8, K16 = ATTN_TILE / 16 };

/* Copies packed rows of q as bf16. Rows beyond the item's are zeros. */
template <class L>
__device__ static inline void load_q(uint8_t *shared, const struct attn_params *a,
                                     const struct attn_item *item, int32_t kv_head, int32_t n)
{
    int32_t n_packed = item->n_tokens * a->group;
    for (int32_t i = (int32_t)threadIdx.x; i < n * (L::DIM / 2); i += (int32_t)blockDim.x) {
        int32_t row = i / (L::DIM / 2), pair = i % (L::DIM / 2);
        uint32_t u = 0;
        if (row < n_packed) {
            const float *q = a->q + (item->row0 + row / a->group) * a->q_stride +
                             (int64_t)(kv_head * a->group + row % a->group) * L::DIM + 2 * pair;
            u = td_pack_bf16x2(q[0], q[1]);
        }
        memcpy(shared + L::at_q(row, pair / 4) + pair % 4 * 4, &u, 4);
    }
}

/* The warp's share of a tile's keys, dealt out lane by lane. */
template <int WARPS>
__device__ static inline int64_t look_up(const struct attn_params *a, const int32_t *table,
                                         int32_t kv_head, int32_t tile, int32_t lo, int32_t hi)
{
    int32_t key = tile + (int32_t)threadIdx.x / LANES * (ATTN_TILE / WARPS) +
                  (int32_t)threadIdx.x % (ATTN_TILE / WARPS);
    return key >= lo && key <= hi ? attn_key_offset(a, table, kv_head, key) : 0;
}

/* Starts copying K and V of a tile. Keys outside lo..hi may hold anything: they become zeros
 * without being read. */
template <class L, int WARPS>
__device__ static inline void load_tile(uint8_t *k, uint8_t *v, const struct attn_params *a,
                                        int64_t offset, int32_t tile, int32_t lo, int32_t hi)
{
    enum { KEYS = ATTN_TILE / WARPS, CHUNKS = L::CHUNKS };
    int32_t warp = (int32_t)threadIdx.x / LANES, lane = (int32_t)threadIdx.x % LANES;
    ATTN_UNROLL_BY_4 /* unrolling further costs registers that attn_many<128> lacks */
        for (int i = 0; i < KEYS * CHUNKS / LANES; i++)
    {
        int32_t row = (i * LANES + lane) / CHUNKS, chunk = (i * LANES + lane) % CHUNKS,
                key = warp * KEYS + row;
        const uint8_t *from = a->kv + __shfl_sync(0xffffffff, (long long)offset, row) + chunk * 16;
        bool is_seen = tile + key >= lo && tile + key <= hi;
        td_cp_async_16(k + L::at(key, chunk), from, is_seen);
        td_cp_async_16(v + L::at(key, chunk), from + a->v_offset, is_seen);
    }
    td_cp_async_commit();
}

/* What a lane keeps of its two rows: the positions that they see, and the state of the split. */
struct rows {
    /* the last position that each sees; -1: none. The first position is attn_first of it */
    int32_t last[2];
    float max[2], sum[2]; /* sum: this lane's share */
};

__device__ static inline void rows_start(struct rows *r)
{
    for (int i = 0; i < 2; i++) r->max[i] = -INFINITY, r->sum[i] = 0;
}

/* Rows of an item see different keys of some tiles. There 0 * inf in a masked place is NaN, not
 * zero, so an infinite V at one position would reach the rows of earlier positions, whose bits
 * would then depend on later tokens of the chunk. In such a tile this sets V's infinities and NaNs
 * to zero; the rows that do see them get a sum of NaN. *ret_keys: bit j stands for key j of the
 * tile. Called by the whole block. */
template <class L> __device__ static inline void take_infinite(uint8_t *v, uint64_t *ret_keys)
{
    __shared__ unsigned long long keys;
    if (threadIdx.x == 0) keys = 0;
    __syncthreads();
    ATTN_UNROLL_BY_4
    for (int32_t i = (int32_t)threadIdx.x; i < ATTN_TILE * (L::DIM / 2); i += (int32_t)blockDim.x) {
        uint32_t u, finite;
        uint8_t *pair = v + L::at(i / (L::DIM / 2), i % (L::DIM / 2) / 4) + i % 4 * 4;
        memcpy(&u, pair, 4);
        finite = ((u & 0x7f80u) == 0x7f80u ? 0 : u & 0xffffu) |
                 ((u & 0x7f800000u) == 0x7f800000u ? 0 : u & 0xffff0000u);
        if (finite != u) {
            memcpy(pair, &finite, 4);
            atomicOr(&keys, 1ull << (i / (L::DIM / 2)));
        }
    }
    L::written();
    __syncthreads();
    *ret_keys = keys;
}

__device__ static inline void lose_rows(struct rows *r, const struct attn_params *a, int32_t tile,
                                        uint64_t keys)
{
    ATTN_UNROLL
    for (int i = 0; i < 2; i++)
        for (int32_t j = 0; j < ATTN_TILE; j++)
            if ((keys >> j & 1) && tile + j >= attn_first(a, r->last[i]) && tile + j <= r->last[i])
                r->sum[i] = NAN;
}

/* One step of the online softmax. s holds the scores and is destroyed; p receives the probabilities
 * as A fragments of 4 k16; alpha receives the factor for the older out. */
__device__ static inline void softmax(struct rows *r, const struct attn_params *a, float s[N8][4],
                                      uint32_t p[K16][4], float alpha[2], int32_t tile)
{
    float c = a->c;
    int32_t column = 2 * ((int32_t)threadIdx.x % 4);
    ATTN_UNROLL
    for (int i = 0; i < 2; i++) {
        int32_t first = attn_first(a, r->last[i]);
        if (first > tile || r->last[i] < tile + ATTN_TILE - 1) {
            ATTN_UNROLL
            for (int n = 0; n < N8; n++)
                for (int e = 0; e < 2; e++) {
                    int32_t key = tile + n * 8 + column + e;
                    if (key < first || key > r->last[i]) s[n][2 * i + e] = -INFINITY;
                }
        }
        float max = r->max[i], sum = 0;
        ATTN_UNROLL
        for (int n = 0; n < N8; n++) max = fmaxf(max, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
        max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, 1));
        max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, 2));
        alpha[i] = attn_rescale(r->max[i], max, c);
        float less = (max == -INFINITY ? 0.0f : max) * c;
        ATTN_UNROLL
        for (int n = 0; n < N8; n++) {
            uint32_t u = td_pack_bf16x2(td_exp2(fmaf(s[n][2 * i], c, -less)),
                                        td_exp2(fmaf(s[n][2 * i + 1], c, -less)));
            sum += td_cu_bf16_to_f32((uint16_t)u);
            sum += td_cu_bf16_to_f32((uint16_t)(u >> 16));
            p[n / 2][n % 2 * 2 + i] = u;
        }
        r->max[i] = max, r->sum[i] = fmaf(r->sum[i], alpha[i], sum);
    }
}

/* ---- states */

struct attn_scratch {
    float *max_sum; /* [ATTN_SLOTS][n_heads][2] */
    float *out;     /* [ATTN_SLOTS][n_heads][D] */
};

/* Max and sum of a lane's two rows; equal in the four lanes of a row. */
struct total {
    float max[2], sum[2];
};

__device__ static inline void total_clear(struct total *t)
{
    for (int i = 0; i < 2; i++) t->max[i] = -INFINITY, t->sum[i] = 0;
}

/* Called at the end of a split: adds up the row's sum and merges the split's state into the
 * stretch's. */
template <int PAIRS>
__device__ static inline void end_split(struct rows *r, struct total *stretch, float o[PAIRS][2][4],
                                        float stretch_o[PAIRS][2][4], float c)
{
    ATTN_UNROLL
    for (int i = 0; i < 2; i++) {
        float keep, take;
        r->sum[i] += __shfl_xor_sync(0xffffffff, r->sum[i], 1);
        r->sum[i] += __shfl_xor_sync(0xffffffff, r->sum[i], 2);
        attn_merge_scales(&stretch->max[i], r->max[i], c, &keep, &take);
        stretch->sum[i] = attn_merge(stretch->sum[i], r->sum[i], keep, take);
        ATTN_UNROLL
        for (int j = 0; j < PAIRS; j++)
            for (int n = 0; n < 2; n++)
                for (int e = 0; e < 2; e++)
                    stretch_o[j][n][2 * i + e] =
                        attn_merge(stretch_o[j][n][2 * i + e], o[j][n][2 * i + e], keep, take);
    }
}

template <int PAIRS> __device__ static inline void clear(float o[PAIRS][2][4])
{
    ATTN_UNROLL
    for (int j = 0; j < PAIRS; j++)
        for (int n = 0; n < 2; n++)
            for (int e = 0; e < 4; e++) o[j][n][e] = 0;
}

/* Stores the state of a unit of this warp's rows, which start at packed row row0, for the merging
 * piece. Column pairs pair0 + j * step. */
template <int D, int PAIRS>
__device__ static inline void hand_on(const struct attn_params *a, const struct attn_item *item,
                                      int32_t kv_head, int32_t row0, const struct total *state,
                                      float o[PAIRS][2][4], int32_t pair0, int32_t step,
                                      int32_t unit, struct attn_scratch scratch)
{
    int32_t lane = (int32_t)threadIdx.x % LANES;
    ATTN_UNROLL
    for (int i = 0; i < 2; i++) {
        int32_t row = row0 + lane / 4 + 8 * i, token = row / a->group,
                head = kv_head * a->group + row % a->group;
        if (row >= item->n_tokens * a->group) continue;
        int64_t at = (int64_t)(item->slot0 + unit * item->n_tokens + token) * a->n_heads + head;
        if (lane % 4 == 0 && pair0 == 0)
            scratch.max_sum[2 * at] = state->max[i], scratch.max_sum[2 * at + 1] = state->sum[i];
        ATTN_UNROLL
        for (int j = 0; j < PAIRS; j++) {
            if ((pair0 + j * step) * 16 >= D) continue;
            for (int n = 0; n < 2; n++)
                for (int e = 0; e < 2; e++)
                    scratch.out[at * D + (pair0 + j * step) * 16 + n * 8 + 2 * (lane % 4) + e] =
                        o[j][n][2 * i + e];
        }
    }
}

/* Merges a stretch into the total. The total's out is kept at its final place in memory, because
 * registers hold no third set and a stretch ends seldom. Only this lane touches these elements.
 * With is_last it is divided by the sum. */
template <int D, int PAIRS>
__device__ static inline void
end_stretch(const struct attn_params *a, const struct attn_item *item, int32_t kv_head,
            int32_t row0, const struct total *stretch, float stretch_o[PAIRS][2][4],
            struct total *total, int32_t pair0, int32_t step, bool is_first, bool is_last)
{
    int32_t lane = (int32_t)threadIdx.x % LANES;
    ATTN_UNROLL
    for (int i = 0; i < 2; i++) {
        int32_t row = row0 + lane / 4 + 8 * i;
        float keep, take,
            *to = a->out + (item->row0 + row / a->group) * a->out_stride +
                  (int64_t)(kv_head * a->group + row % a->group) * D + 2 * (lane % 4);
        attn_merge_scales(&total->max[i], stretch->max[i], a->c, &keep, &take);
        total->sum[i] = attn_merge(total->sum[i], stretch->sum[i], keep, take);
        if (row >= item->n_tokens * a->group) continue;
        /* 0: padding */
        float factor = is_last ? 1.0f / (total->sum[i] == 0 ? 1.0f : total->sum[i]) : 1.0f;
        ATTN_UNROLL
        for (int j = 0; j < PAIRS; j++) {
            if ((pair0 + j * step) * 16 >= D) continue;
            for (int n = 0; n < 2; n++)
                for (int e = 0; e < 2; e++) {
                    float *x = to + (pair0 + j * step) * 16 + n * 8 + e;
                    *x = attn_merge(is_first ? 0.0f : *x, stretch_o[j][n][2 * i + e], keep, take) *
                         factor;
                }
        }
    }
}

/* The item of this block, NULL when the grid is larger than the plan. blockIdx.x: item * n_kv_heads
 * + kv head. */
__device__ __forceinline__ static const struct attn_item *
block_item(const struct attn_params *a, const uint8_t *plan, bool is_many, int32_t *ret_kv_head)
{
    const struct attn_plan *head = (const struct attn_plan *)(const void *)plan;
    int32_t index = (int32_t)blockIdx.x / a->n_kv_heads;
    *ret_kv_head = (int32_t)blockIdx.x % a->n_kv_heads;
    if (index >= (is_many ? head->n_many : head->n_few)) return NULL;
    return (const struct attn_item *)(const void *)(plan +
                                                    (is_many ? head->many_at : head->few_at)) +
           index;
}

/* How many pieces of the item have arrived, of this kv head. */
__device__ __forceinline__ static uint32_t *counter_of(const struct attn_params *a, uint8_t *plan,
                                                       const struct attn_item *item,
                                                       int32_t kv_head)
{
    const struct attn_plan *head = (const struct attn_plan *)(const void *)plan;
    return (uint32_t *)(void *)(plan + head->counters_at) + item->counter * a->n_kv_heads + kv_head;
}

/* What the rows of a block see: lo..hi, in tiles from `tile` to before `end`. Keys before last_lo
 * or behind first_hi are not seen by all of its rows. */
struct block_keys {
    int32_t lo, hi, last_lo, first_hi, tile, end;
};

__device__ __forceinline__ static struct block_keys block_keys_of(const struct attn_params *a,
                                                                  const struct attn_item *item)
{
    struct block_keys k;
    k.first_hi = a->positions[item->row0];
    k.lo = attn_first(a, k.first_hi);
    k.hi = a->positions[item->row0 + item->n_tokens - 1];
    k.last_lo = item->n_tokens == 1 ? 0 : attn_first(a, k.hi);
    /* keys that the block's rows do not see are zeros */
    if (item->n_tokens == 1) k.first_hi = INT32_MAX;
    k.tile = k.lo / ATTN_TILE * ATTN_TILE, k.end = item->split_end * ATTN_SPLIT;
    if (k.tile < item->split_begin * ATTN_SPLIT) k.tile = item->split_begin * ATTN_SPLIT;
    if (k.end > k.hi + 1) k.end = k.hi + 1;
    return k;
}

/* o = o * alpha; seldom needed after the first tiles of a split. */
template <int PAIRS>
__device__ __forceinline__ static void rescale(float o[PAIRS][2][4], const float alpha[2])
{
    if (__any_sync(0xffffffff, alpha[0] != 1 || alpha[1] != 1)) {
        ATTN_UNROLL
        for (int j = 0; j < PAIRS; j++)
            for (int e = 0; e < 8; e++) o[j][e / 4][e % 4] *= alpha[e / 2 % 2];
    }
}

/* What a warp's rows have added up. total's out is kept at its final place in memory. */
struct sums_so_far {
    struct rows r;
    struct total stretch, total;
    bool is_cut, is_first; /* is_cut: the item's rows are merged from pieces */
};

__device__ __forceinline__ static void sums_begin(struct sums_so_far *s,
                                                  const struct attn_item *item)
{
    s->is_cut = item->n_pieces > 1, s->is_first = true;
    total_clear(&s->stretch), total_clear(&s->total);
    rows_start(&s->r);
}

/* After the last tile of a split: merges it into the stretch, and a complete stretch into the
 * total, or, of a cut item, a complete unit into scratch. Column pairs as in hand_on. */
template <int D, int PAIRS>
__device__ __forceinline__ static void
end_of_split(const struct attn_params *a, const struct attn_item *item, int32_t kv_head,
             int32_t row0, struct sums_so_far *s, float o[PAIRS][2][4],
             float stretch_o[PAIRS][2][4], int32_t pair0, int32_t step, int32_t tile, int32_t end,
             struct attn_scratch scratch)
{
    int32_t splits = tile / ATTN_SPLIT + 1; /* splits that are complete */
    end_split<PAIRS>(&s->r, &s->stretch, o, stretch_o, a->c);
    rows_start(&s->r), clear<PAIRS>(o);
    if (tile + ATTN_TILE >= end ? !s->is_cut
                                : splits % (s->is_cut ? item->unit : ATTN_STRETCH) != 0)
        return;
    if (s->is_cut)
        hand_on<D, PAIRS>(a, item, kv_head, row0, &s->stretch, stretch_o, pair0, step,
                          (splits - 1) / item->unit, scratch);
    else
        end_stretch<D, PAIRS>(a, item, kv_head, row0, &s->stretch, stretch_o, &s->total, pair0,
                              step, s->is_first, false);
    s->is_first = false, total_clear(&s->stretch), clear<PAIRS>(stretch_o);
}

/* True, for the whole block, in the last piece of an item to arrive: that one merges the states of
 * all pieces.
 *
 * Why this is ordered, by PTX's memory model (Memory Consistency Model: Causality Order, Release
 * and Acquire Patterns): what any thread of this block wrote precedes thread 0's fence, by program
 * order and the barrier's synchronization at block scope. Base causality order is transitive, so
 * one fence of thread 0 after the barrier and before its atomic is a release, at device scope, for
 * the writes of the whole block. A fence of each writer before the barrier would not be: the
 * pattern wants a fence and then a strong write by the same thread. Read-modify-writes carry the
 * observation on from piece to piece. The last one's atomic and the fence behind it are the
 * acquire, and the second barrier hands it to the block. */
__device__ static inline bool is_last_piece(const struct attn_item *item, uint32_t *counter)
{
    __shared__ uint32_t n_before;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        n_before = atomicAdd(counter, 1u);
        __threadfence();
        /* back to the value in the plan; a strong write, as the additions before it */
        if (n_before == (uint32_t)item->n_pieces - 1) atomicExch(counter, 0u);
    }
    __syncthreads();
    return n_before == (uint32_t)item->n_pieces - 1;
}

enum { MERGE_THREADS = 4 * LANES, MERGE_BOARD_BYTES = ATTN_ROWS_MERGED * (5 * LANES + 2) * 4 };

/* The shared memory of a merge: what each state counts for. */
struct merge_board {
    float *keeps, *takes, *sums;          /* [row][unit]: of a state into its stretch */
    float *stretch_keeps, *stretch_takes; /* [row][unit]: of its stretch into the total */
    float *most, *divide;                 /* [row]: the greatest maximum so far; 1 / the sum */
};

__device__ __forceinline__ static struct merge_board merge_board_at(float *board)
{
    enum { N = ATTN_ROWS_MERGED * LANES };
    struct merge_board b = {board,
                            board + N,
                            board + 2 * N,
                            board + 3 * N,
                            board + 4 * N,
                            board + 5 * N,
                            board + 5 * N + ATTN_ROWS_MERGED};
    return b;
}

/* The factors of 32 units of one row, a unit a lane, by scans of the maxima. max_sum: of this
 * lane's state, where there is one. */
__device__ __forceinline__ static void merge_factors(const struct merge_board *b, int32_t row,
                                                     bool is_there, const float *max_sum,
                                                     int32_t in_stretch, float c)
{
    int32_t lane = (int32_t)threadIdx.x % LANES;
    float max = is_there ? max_sum[0] : -INFINITY, before = b->most[row], upto = max, left, stretch,
          all, others;
    for (int m = 1; m < in_stretch; m *= 2) { /* the scan stays inside each stretch */
        float other = __shfl_up_sync(0xffffffff, upto, (unsigned)m);
        if (lane % in_stretch >= m) upto = fmaxf(upto, other);
    }
    left = __shfl_up_sync(0xffffffff, upto, 1u);
    if (lane % in_stretch == 0) left = -INFINITY;
    stretch = __shfl_sync(0xffffffff, upto, lane | (in_stretch - 1));
    all = fmaxf(before, stretch);
    for (int m = in_stretch; m < LANES; m *= 2) {
        float other = __shfl_up_sync(0xffffffff, all, (unsigned)m);
        if (lane >= m) all = fmaxf(all, other);
    }
    others = __shfl_up_sync(0xffffffff, all, (unsigned)in_stretch);
    if (lane < in_stretch) others = before;
    b->keeps[row * LANES + lane] = attn_rescale(left, upto, c);
    b->takes[row * LANES + lane] = attn_rescale(max, upto, c);
    b->stretch_keeps[row * LANES + lane] = attn_rescale(others, all, c);
    b->stretch_takes[row * LANES + lane] = attn_rescale(stretch, all, c);
    b->sums[row * LANES + lane] = is_there ? max_sum[1] : 0;
    __syncwarp(0xffffffff);
    if (lane == LANES - 1) b->most[row] = all;
}

/* Adds the units [skip, n) of the 32 from base on to this thread's elements, and, in the first
 * n_packed threads, to the sum of a row. A stretch's merge is complete at its last unit. */
template <int D, int MINE>
__device__ __forceinline__ static void
merge_units(const struct merge_board *b, const float *const from[MINE], int32_t base, int32_t skip,
            int32_t n, int32_t in_stretch, int64_t step, int32_t n_packed, float o[MINE],
            float stretch_o[MINE], float *sum, float *stretch_sum)
{
    int32_t thread = (int32_t)threadIdx.x;
    ATTN_UNROLL_BY_4
    for (int32_t s = skip; s < n; s++) {
        /* splits of a stretch that are handled at a time */
        bool is_end = (s + 1) % in_stretch == 0 || s + 1 == n;
        int64_t at = (base + s) * step * D;
        ATTN_UNROLL
        for (int e = 0; e < MINE; e++) {
            int32_t row = (e * MERGE_THREADS + thread) / D;
            if (row >= n_packed) continue;
            stretch_o[e] = attn_merge(stretch_o[e], from[e][at], b->keeps[row * LANES + s],
                                      b->takes[row * LANES + s]);
            if (is_end)
                o[e] = attn_merge(o[e], stretch_o[e], b->stretch_keeps[row * LANES + s],
                                  b->stretch_takes[row * LANES + s]),
                stretch_o[e] = 0;
        }
        if (thread < n_packed) {
            *stretch_sum = attn_merge(*stretch_sum, b->sums[thread * LANES + s],
                                      b->keeps[thread * LANES + s], b->takes[thread * LANES + s]);
            if (is_end)
                *sum = attn_merge(*sum, *stretch_sum, b->stretch_keeps[thread * LANES + s],
                                  b->stretch_takes[thread * LANES + s]),
                *stretch_sum = 0;
        }
    }
}

/* Merges the states of packed rows [first, first + ATTN_ROWS_MERGED) of a cut item, 32 units at a
 * time. First one warp per row finds the factor of each state and of each stretch; the maxima so
 * far are scans, max being exact. Then each thread adds up a few elements, with loads that do not
 * wait for one another. There is one row for each of the 4 warps: sixteen rows at a time took four
 * times the code, 190 KB of it for D = 128. board: MERGE_BOARD_BYTES of shared memory that is no
 * longer in use. */
template <int D>
__device__ static void merge_states(const struct attn_params *a, const struct attn_item *item,
                                    int32_t kv_head, int32_t first, struct attn_scratch scratch,
                                    float *board)
{
    enum { ROWS = ATTN_ROWS_MERGED, MINE = (ROWS * D + MERGE_THREADS - 1) / MERGE_THREADS };
    struct merge_board m = merge_board_at(board);
    int32_t in_stretch = ATTN_STRETCH / item->unit,
            n_units = a->positions[item->row0 + item->n_tokens - 1] / ATTN_SPLIT / item->unit + 1;
    /* The first unit that any row sees; units before it have no stored state. */
    int32_t begin = attn_first(a, a->positions[item->row0]) / ATTN_SPLIT / item->unit;
    int32_t n_packed = item->n_tokens * a->group - first, thread = (int32_t)threadIdx.x,
            lane = thread % LANES;
    int64_t step = (int64_t)item->n_tokens * a->n_heads;
    float o[MINE], stretch_o[MINE], sum = 0, stretch_sum = 0;
    const float *from[MINE]; /* unit 0 of the thread's elements: i = e * MERGE_THREADS + thread
                                is column i % D of row i / D */
    if (n_packed > ROWS) n_packed = ROWS;
    ATTN_UNROLL
    for (int e = 0; e < MINE; e++) {
        int32_t i = e * MERGE_THREADS + thread, packed = first + (i / D < n_packed ? i / D : 0);
        from[e] = scratch.out +
                  ((int64_t)(item->slot0 + packed / a->group) * a->n_heads + kv_head * a->group +
                   packed % a->group) *
                      D +
                  i % D;
        o[e] = stretch_o[e] = 0;
    }
    if (thread < ROWS) m.most[thread] = -INFINITY;
    __syncthreads();
    for (int32_t base = begin / in_stretch * in_stretch; base < n_units; base += LANES) {
        int32_t skip = begin > base ? begin - base : 0,
                n = n_units - base < LANES ? n_units - base : LANES;
        for (int32_t row = thread / LANES; row < n_packed; row += MERGE_THREADS / LANES) {
            int32_t packed = first + row;
            int64_t state = (int64_t)(item->slot0 + packed / a->group) * a->n_heads +
                            kv_head * a->group + packed % a->group + (base + lane) * step;
            merge_factors(&m, row, lane >= skip && lane < n, scratch.max_sum + 2 * state,
                          in_stretch, a->c);
        }
        __syncthreads();
        merge_units<D, MINE>(&m, from, base, skip, n, in_stretch, step, n_packed, o, stretch_o,
                             &sum, &stretch_sum);
        __syncthreads();
    }
    if (thread < n_packed) m.divide[thread] = 1.0f / sum;
    __syncthreads();
    ATTN_UNROLL
    for (int e = 0; e < MINE; e++) {
        int32_t i = e * MERGE_THREADS + thread, row = i / D, packed = first + row;
        if (row < n_packed)
            a->out[(item->row0 + packed / a->group) * a->out_stride +
                   (int64_t)(kv_head * a->group + packed % a->group) * D + i % D] =
                o[e] * m.divide[row];
    }
}

/* All packed rows of a cut item, by one block. */
template <int D>
__device__ static inline void merge_item(const struct attn_params *a, const struct attn_item *item,
                                         int32_t kv_head, struct attn_scratch scratch, float *board)
{
    ATTN_NO_UNROLL
    for (int32_t first = 0; first < item->n_tokens * a->group; first += ATTN_ROWS_MERGED)
        merge_states<D>(a, item, kv_head, first, scratch, board);
}

/* Runs after attn_many and merges the items that attn_many had in pieces. blockIdx.x = (item *
 * MERGE_GROUPS + group of rows) * n_kv_heads + kv head. It is a kernel of its own because the last
 * block of an item, if it merged as in attn_few, would read megabytes of states alone. */
enum { MERGE_GROUPS = ATTN_ROWS_MANY / ATTN_ROWS_MERGED };

template <int D>
static __global__ void __launch_bounds__(MERGE_THREADS, 4)
    attn_merge_many(struct attn_params a, uint8_t *plan, struct attn_scratch scratch)
{
    __shared__ float board[MERGE_BOARD_BYTES / 4];
    const struct attn_plan *head = (const struct attn_plan *)(const void *)plan;
    int32_t index = (int32_t)blockIdx.x / a.n_kv_heads,
            kv_head = (int32_t)blockIdx.x % a.n_kv_heads,
            first = index % MERGE_GROUPS * ATTN_ROWS_MERGED;
    if (index / MERGE_GROUPS >= head->n_merged) return;
    const struct attn_item *item =
        (const struct attn_item *)(const void *)(plan + head->merged_at) + index / MERGE_GROUPS;
    if (first < item->n_tokens * a.group) merge_states<D>(&a, item, kv_head, first, scratch, board);
}

/* ---- launchers */

/* Launches n blocks for each kv head. Uses a, device_plan and scratch of the calling function. */
#define ATTN_LAUNCH(kernel, label, n, n_threads, bytes)                                            \
    if ((n) > 0) {                                                                                 \
        dim3 grid((unsigned)((n)*a->n_kv_heads));                                                  \
        TD_LAUNCH(kernel, grid, dim3(n_threads), bytes, td_cuda.compute, *a, device_plan,          \
                  scratch);                                                                        \
        TD_LAUNCHED(label);                                                                        \
    }

#endif
