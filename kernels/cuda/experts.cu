/* experts.cu - a mixture of experts between its products: which experts each row goes to, the order
 * in which the products take the rows, and the sum of what they return. The products themselves are
 * in gemm.cu and gemm_mma.cu.
 *
 * Nothing here waits for the host. The number of thread blocks follows from the counts of rows and
 * experts alone, so a decode step is the same graph whoever is chosen; blocks without work leave at
 * once.
 *
 * choose: a block per row. An expert's rank is the number of experts before it, in an order that
 * has no ties (td_expert_is_before), so each thread finds it for its own experts without waiting.
 * Sums are taken by one thread in ascending order of ids: the bits of td_experts_choose.
 *
 * sort: a block per expert, one launch in all. Each block counts the pairs of every expert, which
 * tells it where its own begin, and then writes them in ascending order: warp w has the w-th run of
 * the pairs. Reading the ids once per expert is cheap beside the products: 32,768 of them are 128
 * KiB in L2, for each of 128 experts.
 *
 * To be measured on a card: the share of a decode step that choose, sort and prepare take. One
 * kernel could do all three for few rows. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/quads.h"
#include "kernels/experts_math.h"

#define CHOOSE_THREADS_MAX 256
#define SORT_THREADS 256
#define SORT_WARPS (SORT_THREADS / WARP)

/* ---- choose ---------------------------------------------------------------------------------- */

struct choose_params {
    const float *logits, *bias;
    const int32_t *positions;
    int32_t *ids;
    float *weights;
    int32_t n_experts, n_used;
    struct td_experts_rule rule;
};

/* A row's intermediate results, in shared memory. */
struct choice {
    float values[TD_EXPERTS_MAX], groups[TD_EXPERTS_MAX]; /* what is compared */
    double exps[TD_EXPERTS_MAX], scores[TD_EXPERTS_USED_MAX], divisor;
    float largest;
    bool is_chosen[TD_EXPERTS_MAX];
};

__device__ static inline int32_t rank_of(const float *values, int32_t n, int32_t e)
{
    int32_t rank = 0;
    for (int32_t k = 0; k < n; k++) rank += td_expert_is_before(values, k, e);
    return rank;
}

/* The largest score of a group's experts, or the sum of the two largest. */
__device__ static inline float group_score(const struct choose_params *p, const float *values)
{
    int32_t size = p->n_experts / p->rule.n_groups, best = 0, second = -1;
    for (int32_t e = 1; e < size; e++) {
        if (td_expert_is_before(values, e, best))
            second = best, best = e;
        else if (second < 0 || td_expert_is_before(values, e, second))
            second = e;
    }
    return p->rule.groups_by_two && second >= 0 ? values[best] + values[second] : values[best];
}

/* The values of experts in groups that are not chosen become NaN, which comes last. All threads. */
__device__ static inline void ban_groups(const struct choose_params *p, struct choice *c)
{
    int32_t n = p->rule.n_groups, size = p->n_experts / n;
    for (int32_t g = (int32_t)threadIdx.x; g < n; g += (int32_t)blockDim.x)
        c->groups[g] = group_score(p, c->values + g * size);
    __syncthreads();
    for (int32_t e = (int32_t)threadIdx.x; e < p->n_experts; e += (int32_t)blockDim.x)
        if (rank_of(c->groups, n, e / size) >= p->rule.n_groups_used)
            c->values[e] = __int_as_float(0x7fc00000);
    __syncthreads();
}

/* The largest logit of the row, a NaN aside: the first warp. */
__device__ static inline void find_largest(const struct choose_params *p, const float *logits,
                                           struct choice *c)
{
    if (threadIdx.x >= WARP) return;
    float largest = __int_as_float(-0x800000); /* -infinity */
    for (int32_t e = (int32_t)threadIdx.x; e < p->n_experts; e += WARP)
        largest = logits[e] > largest ? logits[e] : largest;
    for (int d = WARP / 2; d > 0; d /= 2) {
        float other = __shfl_xor_sync(0xffffffffu, largest, d);
        largest = other > largest ? other : largest;
    }
    if (threadIdx.x == 0) c->largest = largest;
}

/* Of an expert that is chosen: its place among them, by id. */
__device__ static inline int32_t place_of(const struct choice *c, int32_t e)
{
    int32_t place = 0;
    for (int32_t k = 0; k < e; k++) place += c->is_chosen[k];
    return place;
}

static __global__ void __launch_bounds__(CHOOSE_THREADS_MAX) choose_kernel(struct choose_params p)
{
    td_wait_for_previous();
    __shared__ struct choice c;
    int32_t row = (int32_t)blockIdx.x, tid = (int32_t)threadIdx.x, n = (int32_t)blockDim.x;
    const float *logits = p.logits + (int64_t)row * p.n_experts;
    int32_t *ids = p.ids + (int64_t)row * p.n_used;
    float *weights = p.weights + (int64_t)row * p.n_used;
    if (p.positions && p.positions[row] < 0) { /* the whole block */
        for (int32_t i = tid; i < p.n_used; i += n) ids[i] = -1, weights[i] = 0.0f;
        return;
    }
    for (int32_t e = tid; e < p.n_experts; e += n)
        c.values[e] = p.rule.sigmoid ? (float)td_expert_sigmoid((double)logits[e]) +
                                           (p.bias ? p.bias[e] : 0.0f)
                                     : logits[e];
    if (!p.rule.sigmoid) find_largest(&p, logits, &c);
    __syncthreads();
    if (p.rule.n_groups > 1) ban_groups(&p, &c);
    for (int32_t e = tid; e < p.n_experts; e += n) {
        c.is_chosen[e] = rank_of(c.values, p.n_experts, e) < p.n_used;
        if (!p.rule.sigmoid) c.exps[e] = td_sample_exp((double)logits[e] - (double)c.largest);
    }
    __syncthreads();
    for (int32_t e = tid; e < p.n_experts; e += n)
        if (c.is_chosen[e]) {
            int32_t i = place_of(&c, e);
            ids[i] = e;
            c.scores[i] = p.rule.sigmoid ? td_expert_sigmoid((double)logits[e]) : c.exps[e];
        }
    __syncthreads();
    bool is_share = !p.rule.sigmoid && !p.rule.normalise; /* of the softmax of all experts */
    if (tid == 0) {
        double sum = 0;
        if (is_share)
            for (int32_t e = 0; e < p.n_experts; e++) sum += c.exps[e];
        else
            for (int32_t i = 0; i < p.n_used; i++) sum += c.scores[i];
        c.divisor = is_share ? sum : td_expert_divisor(p.rule.normalise, p.rule.sigmoid, sum);
    }
    __syncthreads();
    double scale = p.rule.scale != 0 ? (double)p.rule.scale : 1;
    for (int32_t i = tid; i < p.n_used; i += n)
        weights[i] = (float)(c.scores[i] / c.divisor * scale);
}

/* ---- sort ------------------------------------------------------------------------------------ */

struct sort_params {
    const int32_t *ids;
    int32_t *row_of, *at, *tiles;
    int32_t n_pairs, n_used, n_experts, n_tiles, tile_rows;
};

__device__ static inline int32_t tiles_of(const struct sort_params *p, int32_t n_pairs)
{
    return (n_pairs + p->tile_rows - 1) / p->tile_rows;
}

/* The pairs of expert e among those of this warp; write: each to its place, the first of which is
 * `to`. Returns their number. All lanes. */
template <bool write>
__device__ static inline int32_t take_pairs(const struct sort_params *p, int32_t e, int32_t to)
{
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    int32_t run = (p->n_pairs + SORT_THREADS - 1) / SORT_THREADS * WARP, from = warp * run,
            end = min_i32(from + run, p->n_pairs), n = 0;
    for (int32_t i = from; i < end; i += WARP) {
        int32_t id = i + lane < end ? p->ids[i + lane] : TD_EXPERTS_MAX;
        unsigned all = __ballot_sync(0xffffffffu, id == e);
        if (write && id == e) {
            int32_t place = to + n + __popc(all & ((1u << lane) - 1));
            p->row_of[place] = (i + lane) / p->n_used;
            p->at[i + lane] = place;
        }
        if (write && id < 0 && e == 0) p->at[i + lane] = -1;
        n += __popc(all);
    }
    return n;
}

static __global__ void __launch_bounds__(SORT_THREADS) sort_kernel(struct sort_params p)
{
    td_wait_for_previous();
    __shared__ int32_t counts[TD_EXPERTS_MAX], of_warp[SORT_WARPS], before[2];
    int32_t e = (int32_t)blockIdx.x, tid = (int32_t)threadIdx.x;
    for (int32_t i = tid; i < p.n_experts; i += SORT_THREADS) counts[i] = 0;
    if (tid < 2) before[tid] = 0;
    __syncthreads();
    for (int32_t i = tid; i < p.n_pairs; i += SORT_THREADS)
        if (p.ids[i] >= 0) atomicAdd(&counts[p.ids[i]], 1);
    int32_t mine = take_pairs<false>(&p, e, 0);
    if (tid % WARP == 0) of_warp[tid / WARP] = mine;
    __syncthreads();
    int32_t pairs = 0, tiles = 0;
    for (int32_t i = tid; i < e; i += SORT_THREADS)
        pairs += counts[i], tiles += tiles_of(&p, counts[i]);
    if (pairs) atomicAdd(&before[0], pairs), atomicAdd(&before[1], tiles);
    __syncthreads();
    int32_t first = before[0], first_tile = before[1], n = counts[e], to = first;
    for (int w = 0; w < tid / WARP; w++) to += of_warp[w];
    (void)take_pairs<true>(&p, e, to);
    for (int32_t i = tid; i < tiles_of(&p, n); i += SORT_THREADS) {
        int32_t *tile = p.tiles + TD_GEMM_TILE_INTS * (first_tile + i), at = i * p.tile_rows;
        tile[0] = e, tile[1] = first + at, tile[2] = min_i32(n - at, p.tile_rows);
    }
    if (e != p.n_experts - 1) return;
    for (int32_t i = first_tile + tiles_of(&p, n) + tid; i < p.n_tiles; i += SORT_THREADS)
        p.tiles[TD_GEMM_TILE_INTS * i] = -1;
    for (int32_t i = first + n + tid; i < p.n_pairs; i += SORT_THREADS) p.row_of[i] = -1;
}

/* ---- rows into the order of the experts, and their sum --------------------------------------- */

struct gather_params {
    const float *x;
    const int32_t *row_of;
    void *out;
    int64_t x_stride, k_stride, n_quads;
    int32_t n_in, row_quads;
    bool x_vector, is_bf16;
};

static __global__ void __launch_bounds__(FLAT_THREADS) gather_kernel(struct gather_params p)
{
    td_wait_for_previous();
    int64_t item = (int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x;
    if (item >= p.n_quads) return;
    int32_t pair = (int32_t)(item / p.row_quads), q = (int32_t)(item % p.row_quads),
            row = p.row_of[pair];
    float v[4] = {0, 0, 0, 0};
    if (row >= 0) load4(p.x + row * p.x_stride + 4 * q, p.x_vector, p.n_in - 4 * q, v);
    prepare4(prepared_row(p.out, p.is_bf16, pair, p.k_stride), p.is_bf16, q, v);
}

struct sum_params {
    float *x;
    const float *w, *y;
    const int32_t *at;
    int64_t n_quads;
    int32_t n_used, dim, row_quads;
    bool vector;
};

static __global__ void __launch_bounds__(FLAT_THREADS) sum_kernel(struct sum_params p)
{
    td_wait_for_previous();
    int64_t item = (int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x;
    if (item >= p.n_quads) return;
    int32_t row = (int32_t)(item / p.row_quads), q = (int32_t)(item % p.row_quads),
            n_valid = p.dim - 4 * q;
    float sum[4] = {0, 0, 0, 0}, v[4];
    bool any = false;
    for (int32_t k = 0; k < p.n_used; k++) {
        int32_t at = p.at[row * p.n_used + k];
        float w = p.w[row * p.n_used + k];
        if (at < 0) continue;
        load4(p.y + (int64_t)at * p.dim + 4 * q, p.vector, n_valid, v);
        for (int i = 0; i < 4; i++) sum[i] = any ? sum[i] + w * v[i] : w * v[i];
        any = true;
    }
    if (!any) return;
    float *x = p.x + (int64_t)row * p.dim + 4 * q;
    load4(x, p.vector, n_valid, v);
    for (int i = 0; i < 4; i++) v[i] = v[i] + sum[i];
    store4(x, p.vector, n_valid, v);
}

struct gate_params {
    float *x;
    const float *logits;
    int64_t stride, n_quads;
    int32_t dim, row_quads;
    bool vector;
};

static __global__ void __launch_bounds__(FLAT_THREADS) gate_kernel(struct gate_params p)
{
    td_wait_for_previous();
    int64_t item = (int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x;
    if (item >= p.n_quads) return;
    int32_t row = (int32_t)(item / p.row_quads), q = (int32_t)(item % p.row_quads);
    float gate = (float)td_expert_sigmoid((double)p.logits[row]), v[4],
          *x = p.x + row * p.stride + 4 * q;
    load4(x, p.vector, p.dim - 4 * q, v);
    for (int i = 0; i < 4; i++) v[i] = v[i] * gate;
    store4(x, p.vector, p.dim - 4 * q, v);
}

/* ---- launchers ------------------------------------------------------------------------------- */

static void choose(const struct td_experts_choose_args *a, const int32_t *positions)
{
    if (a->n_rows <= 0) return;
    TD_ASSERT(a->n_experts <= TD_EXPERTS_MAX && a->n_used <= TD_EXPERTS_USED_MAX);
    struct choose_params p = {};
    p.logits = a->logits, p.bias = a->bias, p.positions = positions, p.ids = a->ids,
    p.weights = a->weights, p.n_experts = a->n_experts, p.n_used = a->n_used, p.rule = a->rule;
    int32_t threads = min_i32(round_up(a->n_experts, WARP), CHOOSE_THREADS_MAX);
    TD_LAUNCH_EARLY(td_cuda_is_early(), choose_kernel, dim3((unsigned)a->n_rows),
                    dim3((unsigned)threads), 0, td_cuda.compute, p);
    TD_LAUNCHED("experts: choose");
}

static size_t tile_ints(int32_t n_rows, int32_t n_used, int32_t n_experts)
{
    return (size_t)TD_GEMM_TILE_INTS *
           (size_t)td_cuda_tiles_max((int64_t)n_rows * n_used, n_experts);
}

static void sort(const int32_t *ids, const struct td_device_experts_order *o)
{
    struct sort_params p = {};
    p.ids = ids, p.row_of = o->row_of, p.at = o->at, p.tiles = o->tiles;
    p.n_pairs = o->n_rows * o->n_used, p.n_used = o->n_used, p.n_experts = o->n_experts;
    if (p.n_pairs <= 0) return;
    struct td_gemm_groups g = td_cuda_groups_of(o, 0);
    p.n_tiles = g.n_tiles, p.tile_rows = g.tile_rows;
    TD_LAUNCH_EARLY(td_cuda_is_early(), sort_kernel, dim3((unsigned)o->n_experts),
                    dim3(SORT_THREADS), 0, td_cuda.compute, p);
    TD_LAUNCHED("experts: sort");
}

static void prepare(const struct td_device_experts_gemm_args *a)
{
    struct gather_params p = {};
    p.x = a->x, p.row_of = a->order->row_of, p.out = a->scratch, p.x_stride = a->x_stride,
    p.k_stride = td_cuda_x_stride(a->w), p.n_in = a->w->n_in;
    p.row_quads = (int32_t)(p.k_stride / 4), p.is_bf16 = td_cuda_x_is_bf16(a->w);
    p.n_quads = (int64_t)a->order->n_rows * a->order->n_used * p.row_quads;
    p.x_vector = aligned_to(a->x, a->x_stride * 4, 16);
    if (p.n_quads <= 0) return;
    TD_LAUNCH_EARLY(td_cuda_is_early(), gather_kernel, dim3(n_blocks(p.n_quads, FLAT_THREADS)),
                    dim3(FLAT_THREADS), 0, td_cuda.compute, p);
    TD_LAUNCHED("experts: prepare");
}

static void gemm(const struct td_device_experts_gemm_args *a)
{
    struct td_gemm_args dense = {};
    dense.w = a->w, dense.scratch = a->scratch, dense.y = a->y, dense.y_stride = a->y_stride;
    struct td_gemm_params p = td_cuda_gemm_params_of(&dense);
    struct td_gemm_groups g = td_cuda_groups_of(a->order, a->w_stride);
    if (a->order->n_rows > 0) td_cuda_gemm_grouped(&p, &g);
}

static void sum(const struct td_experts_sum_args *a)
{
    struct sum_params p = {};
    p.x = a->x, p.w = a->w, p.y = a->y, p.at = a->at, p.n_used = a->n_used, p.dim = a->dim,
    p.row_quads = (a->dim + 3) / 4;
    p.n_quads = (int64_t)a->n_rows * p.row_quads;
    p.vector =
        aligned_to(a->x, (int64_t)a->dim * 4, 16) && aligned_to(a->y, (int64_t)a->dim * 4, 16);
    if (p.n_quads <= 0) return;
    TD_LAUNCH_EARLY(td_cuda_is_early(), sum_kernel, dim3(n_blocks(p.n_quads, FLAT_THREADS)),
                    dim3(FLAT_THREADS), 0, td_cuda.compute, p);
    TD_LAUNCHED("experts: sum");
}

static void gate(float *x, const float *logits, int32_t n_rows, int32_t dim, int64_t stride)
{
    struct gate_params p = {};
    p.x = x, p.logits = logits, p.stride = stride, p.dim = dim, p.row_quads = (dim + 3) / 4;
    p.n_quads = (int64_t)n_rows * p.row_quads, p.vector = aligned_to(x, stride * 4, 16);
    if (p.n_quads <= 0) return;
    TD_LAUNCH_EARLY(td_cuda_is_early(), gate_kernel, dim3(n_blocks(p.n_quads, FLAT_THREADS)),
                    dim3(FLAT_THREADS), 0, td_cuda.compute, p);
    TD_LAUNCHED("experts: gate");
}

const struct td_device_experts *td_cuda_experts(void)
{
    static const struct td_device_experts experts = {choose, tile_ints, sort, prepare,
                                                     gemm,   sum,       gate};
    return &experts;
}
