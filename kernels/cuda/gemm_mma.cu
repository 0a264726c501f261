/* gemm_mma.cu - bf16 products on tensor cores whose bits do not depend on the number of rows.
 *
 * All kernels of this file use one order of sums. k is cut into chunks of 32, and the chunks into
 * at most 8 slices of equal length, at places that depend on n_in alone. Within a slice one
 * accumulator takes m16n8k16 after m16n8k16 in ascending order. The sums of the slices are added to
 * 0 in ascending order, then bias, then y. The weight is always the A operand (16 outputs) and the
 * rows are the B operand (8 rows), and an element of k has the same place inside its mma. So an
 * output passes through the same tensor-core operations whichever kernel computes it. That the
 * hardware rounds alike at every place of a fragment is for the invariance test on a card to
 * confirm (cuda_rows_test runs there too).
 *
 * The order inside a chunk is chosen for loads: lane t of a quad holds k = 8t .. 8t+7 of its row,
 * 16 bytes, by one load. The first half of them feeds the chunk's first mma, the second half the
 * second. A and B permute k alike, so the sum is over the same products. No ldmatrix and no
 * transposition is needed, and in shared memory rows of 64 bytes have no bank conflicts as they lie
 * (a quarter of a warp reads 128 contiguous bytes).
 *
 * skinny: few rows. Bound by reading the weight once. Each warp takes one slice of 16 or 32
 * outputs, straight from memory into registers, with three to six chunks in flight; the block's 8
 * warps meet once, at the end. Estimate at 8B shapes: 4096 outputs are 256 blocks = 2048 warps with
 * 5 KiB in flight each, about 80 KiB per SM of an H100, more than twice what latency times
 * bandwidth asks for. Each block reads the rows once, through L1 and L2: per row 1/16 of the
 * weight's bytes for blocks of 16 outputs.
 *
 * tile: many rows. 128 x 128 outputs per block of 8 warps, six stages of cp.async. A second set of
 * accumulators takes the finished slices: 128 registers in all. The small tile (64 x 32) keeps more
 * SMs busy between 17 and 64 rows. mma.sync reaches perhaps two thirds of what wgmma does on sm_90,
 * so cuBLASLt serves many rows unless deterministic.
 *
 * Both load the weight before they wait for the kernel that makes their rows (port.h,
 * TD_LAUNCH_EARLY). With TANDEM_CUDA_OVERLAP=1 the gap between two kernels is thus spent reading
 * weights. It is off until a card has shown that it is right and pays.
 *
 * To be measured on a card before the default is settled (cuda_bench, rows gemm with way=own and
 * way=cublas): skinny against cuBLASLt at M = 1, 4, 8, 16 (OWN_ROWS_MAX); tile against cuBLASLt at
 * M = 64, 512, 8192 (the price of --deterministic). */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/gemm_order.h"

/* ---- skinny ---------------------------------------------------------------------------------- */

template <int MT, int NT> struct skinny_loads {
    uint4 lo[MT], hi[MT], x[NT];
};

/* The lane's 16 bytes of a chunk, k elements further on: zeros outside of the matrices. */
template <int MT, int NT>
__device__ static inline void load_weight(const struct td_gemm_params *p, const uint16_t *w,
                                          int32_t n, int64_t k, bool is_k,
                                          skinny_loads<MT, NT> *ret)
{
    uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < MT; i++) {
        ret->lo[i] = is_k && n + 16 * i < p->n_out
                         ? __ldcs((const uint4 *)(w + 16 * i * p->k_stride + k))
                         : zero;
        ret->hi[i] = is_k && n + 16 * i + 8 < p->n_out
                         ? __ldcs((const uint4 *)(w + (16 * i + 8) * p->k_stride + k))
                         : zero;
    }
}

template <int MT, int NT>
__device__ static inline void load_rows(const struct td_gemm_params *p, const uint16_t *x,
                                        int32_t m, int64_t k, bool is_k, skinny_loads<MT, NT> *ret)
{
    uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < NT; j++)
        ret->x[j] =
            is_k && m + 8 * j < p->n_rows ? *(const uint4 *)(x + 8 * j * p->k_stride + k) : zero;
}

/* Outputs from n0 and rows from m0 on. GROUP chunks are in flight. When one is multiplied, the
 * chunk GROUP further on takes its registers. */
template <int MT, int NT, int GROUP>
static __device__ __forceinline__ void skinny(const struct td_gemm_params &p, int32_t n0,
                                              int32_t m0)
{
    /* floats between the sums of two rows, chosen so that lanes fall on different banks */
    const int COLUMN = 16 * MT + 4;
    __shared__ float sums[SLICES][8 * NT][COLUMN];
    int lane = (int)threadIdx.x % WARP, slice = (int)threadIdx.x / WARP, g = lane / 4, t = lane % 4;
    int32_t per_slice = slice_chunks(p.k_stride), n_chunks = chunks_of(p.k_stride),
            first = slice * per_slice, end = first + per_slice;
    end = end < n_chunks ? end : n_chunks;
    const uint16_t *w = (const uint16_t *)p.w + (n0 + g) * p.k_stride + 8 * t,
                   *x = (const uint16_t *)p.x + (m0 + g) * p.k_stride + 8 * t;
    auto is_k = [&](int32_t chunk) {
        return chunk < end && (int64_t)chunk * CHUNK + 8 * t < p.k_stride;
    };
    float acc[MT][NT][4] = {};
    skinny_loads<MT, NT> loads[GROUP];
#pragma unroll
    for (int u = 0; u < GROUP; u++)
        load_weight(&p, w, n0 + g, (int64_t)(first + u) * CHUNK, is_k(first + u), &loads[u]);
    /* the weight's loads are issued; now wait for the kernel that makes the rows */
    td_wait_for_previous();
#pragma unroll
    for (int u = 0; u < GROUP; u++)
        load_rows(&p, x, m0 + g, (int64_t)(first + u) * CHUNK, is_k(first + u), &loads[u]);
    for (int32_t c = first; c < end; c += GROUP) {
#pragma unroll
        for (int u = 0; u < GROUP; u++) {
            int32_t later = c + GROUP + u;
            /* skip chunks past the end: a product with zeros could still turn -0 into +0 */
            if (c + u < end) {
#pragma unroll
                for (int i = 0; i < MT; i++)
#pragma unroll
                    for (int j = 0; j < NT; j++)
                        mma_chunk(acc[i][j], loads[u].lo[i], loads[u].hi[i], loads[u].x[j]);
            }
            load_weight(&p, w, n0 + g, (int64_t)later * CHUNK, is_k(later), &loads[u]);
            load_rows(&p, x, m0 + g, (int64_t)later * CHUNK, is_k(later), &loads[u]);
        }
    }
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[slice][8 * j + 2 * t + e % 2][16 * i + g + e / 2 * 8] = acc[i][j][e];
    __syncthreads();
    int n_slices = (n_chunks + per_slice - 1) / per_slice;
    for (int i = (int)threadIdx.x; i < 16 * MT * 8 * NT; i += THREADS) {
        int n = i % (16 * MT), m = i / (16 * MT);
        float dot = 0;
        for (int s = 0; s < n_slices; s++) dot = dot + sums[s][m][n];
        td_cuda_gemm_store(&p, m0 + m, n0 + n, dot);
    }
}

template <int MT, int NT, int GROUP>
static __global__ void __launch_bounds__(THREADS, 2) gemm_skinny_kernel(struct td_gemm_params p)
{
    skinny<MT, NT, GROUP>(p, (int32_t)blockIdx.x * 16 * MT, (int32_t)blockIdx.y * 8 * NT);
}

/* Tiles of 8 * NT rows. */
template <int MT, int NT, int GROUP>
static __global__ void __launch_bounds__(THREADS, 2)
    grouped_skinny_kernel(struct td_gemm_params p, struct td_gemm_groups groups)
{
    td_wait_for_previous(); /* for the kernel that makes the tiles */
    if (td_cuda_gemm_take_tile(&groups, (int32_t)blockIdx.y, &p)) /* the whole block */
        skinny<MT, NT, GROUP>(p, (int32_t)blockIdx.x * 16 * MT, 0);
}

/* ---- tile ------------------------------------------------------------------------------------ */

#define STAGES 6
#define GROUP_TILES 16 /* row tiles that share a sweep over the weight, so that both stay in L2 */

/* The first row and the first output of this block's tile. */
template <int BN, int BM>
static __device__ __forceinline__ void tile_place(const struct td_gemm_params &p, int32_t *ret_m0,
                                                  int32_t *ret_n0)
{
    int32_t tiles_n = (p.n_out + BN - 1) / BN, tiles_m = (p.n_rows + BM - 1) / BM,
            id = (int32_t)blockIdx.x, group = id / (GROUP_TILES * tiles_n);
    int32_t in_group =
        tiles_m - group * GROUP_TILES < GROUP_TILES ? tiles_m - group * GROUP_TILES : GROUP_TILES;
    id -= group * GROUP_TILES * tiles_n;
    *ret_m0 = (group * GROUP_TILES + id % in_group) * BM, *ret_n0 = id / in_group * BN;
}

#define AT_ONCE (THREADS / 4) /* rows that all threads copy together, 16 bytes each */

/* Copies this thread's 16 bytes of rows first + row0, + AT_ONCE ... of N. What is past the last of
 * n_rows, or without is_k past the end of k, becomes zeros. all: any valid address. */
template <int N>
static __device__ __forceinline__ void fetch_rows_of(uint16_t *to, const uint16_t *all,
                                                     const uint16_t *from, int64_t stride, int row0,
                                                     int32_t first, int32_t n_rows, bool is_k)
{
#pragma unroll
    for (int r = 0; r < N; r += AT_ONCE) {
        bool is_there = is_k && first + row0 + r < n_rows;
        if (r + AT_ONCE <= N || row0 + r < N)
            td_cp_async_16(to + r * CHUNK, is_there ? from + r * stride : all, is_there);
    }
}

/* A slice of k is complete: its sums go to the totals. */
template <int MT, int NT>
static __device__ __forceinline__ void end_slice(float acc[MT][NT][4], float total[MT][NT][4])
{
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                total[i][j][e] = total[i][j][e] + acc[i][j][e];
                acc[i][j][e] = 0.0f;
            }
}

/* One chunk: w and x are this lane's places in its warp's rows of the weight and of x. */
template <int MT, int NT>
static __device__ __forceinline__ void mma_stage(float acc[MT][NT][4], const uint16_t *w,
                                                 const uint16_t *x)
{
    uint4 rows[NT];
#pragma unroll
    for (int j = 0; j < NT; j++) rows[j] = *(const uint4 *)(x + 8 * j * CHUNK);
#pragma unroll
    for (int i = 0; i < MT; i++) {
        uint4 lo = *(const uint4 *)(w + 16 * i * CHUNK),
              hi = *(const uint4 *)(w + (16 * i + 8) * CHUNK);
#pragma unroll
        for (int j = 0; j < NT; j++) mma_chunk(acc[i][j], lo, hi, rows[j]);
    }
}

/* Writes the tile. sums: [BM][COLUMN], in the memory of the stages: from there whole lines of y are
 * written at once. */
template <int BN, int BM, int WN, int WM, int MT, int NT>
static __device__ __forceinline__ void store_tile(const struct td_gemm_params &p, int32_t m0,
                                                  int32_t n0, float *sums, float acc[MT][NT][4],
                                                  float total[MT][NT][4])
{
    const int COLUMN = BN + 4;
    int tid = (int)threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[(warp / WN * 8 * NT + 8 * j + 2 * t + e % 2) * COLUMN + warp % WN * 16 * MT +
                     16 * i + g + e / 2 * 8] = total[i][j][e] + acc[i][j][e];
    __syncthreads();
    for (int i = tid; i < BM * BN; i += THREADS)
        td_cuda_gemm_store(&p, m0 + i / BN, n0 + i % BN, sums[i / BN * COLUMN + i % BN]);
}

/* BN outputs from n0 on x BM rows from m0 on, by WN x WM warps. */
template <int BN, int BM, int WN, int WM>
static __device__ __forceinline__ void tile(const struct td_gemm_params &p, int32_t n0, int32_t m0)
{
    const int MT = BN / (16 * WN), NT = BM / (8 * WM), ROWS = BN + BM;
    TD_SHARED_BYTES(uint16_t, shared); /* [STAGES][ROWS][CHUNK]: outputs' rows, then x's */
    int tid = (int)threadIdx.x, lane = tid % WARP, warp = tid / WARP, g = lane / 4, t = lane % 4;

    int32_t n_chunks = chunks_of(p.k_stride), per_slice = slice_chunks(p.k_stride);
    float acc[MT][NT][4] = {}, total[MT][NT][4] = {};

    /* This thread copies its 16 bytes of every 64th row. */
    int row0 = tid / 4, k0 = tid % 4 * 8;
    const uint16_t *w_from = (const uint16_t *)p.w + (n0 + row0) * p.k_stride + k0,
                   *x_from = (const uint16_t *)p.x + (m0 + row0) * p.k_stride + k0;
    auto fetch_weight = [&](int32_t chunk) {
        if (chunk < n_chunks)
            fetch_rows_of<BN>(shared + chunk % STAGES * ROWS * CHUNK + tid * 8,
                              (const uint16_t *)p.w, w_from + chunk * CHUNK, p.k_stride, row0, n0,
                              p.n_out, chunk * CHUNK + k0 < p.k_stride);
    };
    auto fetch_rows = [&](int32_t chunk) {
        if (chunk < n_chunks)
            fetch_rows_of<BM>(shared + chunk % STAGES * ROWS * CHUNK + tid * 8 + BN * CHUNK,
                              (const uint16_t *)p.x, x_from + chunk * CHUNK, p.k_stride, row0, m0,
                              p.n_rows, chunk * CHUNK + k0 < p.k_stride);
        td_cp_async_commit(); /* commit even an empty group, because waits count groups */
    };

    /* all of these are in the first group */
    for (int32_t c = 0; c < STAGES - 1; c++) fetch_weight(c);
    td_wait_for_previous(); /* wait for the kernel that makes the rows */
    for (int32_t c = 0; c < STAGES - 1; c++) fetch_rows(c);
#pragma unroll 1
    for (int32_t c = 0; c < n_chunks; c++) {
        if (c > 0 && c % per_slice == 0) end_slice<MT, NT>(acc, total);
        td_cp_async_wait<STAGES - 2>();
        /* chunk c has arrived for all threads, and all are done with chunk c - 1, whose stage the
         * next fetch fills */
        __syncthreads();
        fetch_weight(c + STAGES - 1), fetch_rows(c + STAGES - 1);
        const uint16_t *stage = shared + c % STAGES * ROWS * CHUNK + 8 * t;
        mma_stage<MT, NT>(acc, stage + (warp % WN * 16 * MT + g) * CHUNK,
                          stage + (BN + warp / WN * 8 * NT + g) * CHUNK);
    }
    td_cp_async_wait<0>();
    __syncthreads();
    store_tile<BN, BM, WN, WM, MT, NT>(p, m0, n0, (float *)(void *)shared, acc, total);
}

template <int BN, int BM, int WN, int WM>
static __global__ void __launch_bounds__(THREADS, 1) gemm_tile_kernel(struct td_gemm_params p)
{
    int32_t m0, n0;
    tile_place<BN, BM>(p, &m0, &n0);
    tile<BN, BM, WN, WM>(p, n0, m0);
}

/* Tiles of BM rows. */
template <int BN, int BM, int WN, int WM>
static __global__ void __launch_bounds__(THREADS, 1)
    grouped_tile_kernel(struct td_gemm_params p, struct td_gemm_groups groups)
{
    td_wait_for_previous(); /* for the kernel that makes the tiles */
    if (td_cuda_gemm_take_tile(&groups, (int32_t)blockIdx.y, &p)) /* the whole block */
        tile<BN, BM, WN, WM>(p, (int32_t)blockIdx.x * BN, 0);
}

/* ---- launchers ------------------------------------------------------------------------------- */

template <int MT, int NT, int GROUP> static void skinny_launch(const struct td_gemm_params *p)
{
    dim3 grid((unsigned)((p->n_out + 16 * MT - 1) / (16 * MT)),
              (unsigned)((p->n_rows + 8 * NT - 1) / (8 * NT)));
    TD_LAUNCH_EARLY(td_cuda_is_early(), (gemm_skinny_kernel<MT, NT, GROUP>), grid, dim3(THREADS), 0,
                    td_cuda.compute, *p);
    TD_LAUNCHED("gemm (skinny)");
}

template <int BN, int BM, int WN, int WM> static void tile_launch(const struct td_gemm_params *p)
{
    static bool is_set; /* more than 48 KiB of shared memory must be asked for once */
    size_t shared_bytes = (size_t)STAGES * (BN + BM) * CHUNK * sizeof(uint16_t);
    if (!is_set)
        is_set = td_cuda_allow_shared((const void *)gemm_tile_kernel<BN, BM, WN, WM>, shared_bytes,
                                      "gemm (tile): shared memory");
    unsigned n_tiles = (unsigned)((p->n_out + BN - 1) / BN) * (unsigned)((p->n_rows + BM - 1) / BM);
    TD_LAUNCH_EARLY(td_cuda_is_early(), (gemm_tile_kernel<BN, BM, WN, WM>), dim3(n_tiles),
                    dim3(THREADS), shared_bytes, td_cuda.compute, *p);
    TD_LAUNCHED("gemm (tile)");
}

template <int MT, int NT, int GROUP>
static void grouped_skinny_launch(const struct td_gemm_params *p, const struct td_gemm_groups *g)
{
    dim3 grid((unsigned)((p->n_out + 16 * MT - 1) / (16 * MT)), (unsigned)g->n_tiles);
    TD_LAUNCH_EARLY(td_cuda_is_early(), (grouped_skinny_kernel<MT, NT, GROUP>), grid, dim3(THREADS),
                    0, td_cuda.compute, *p, *g);
    TD_LAUNCHED("grouped gemm (skinny)");
}

template <int BN, int BM, int WN, int WM>
static void grouped_tile_launch(const struct td_gemm_params *p, const struct td_gemm_groups *g)
{
    static bool is_set; /* more than 48 KiB of shared memory must be asked for once */
    size_t shared_bytes = (size_t)STAGES * (BN + BM) * CHUNK * sizeof(uint16_t);
    if (!is_set)
        is_set = td_cuda_allow_shared((const void *)grouped_tile_kernel<BN, BM, WN, WM>,
                                      shared_bytes, "grouped gemm (tile): shared memory");
    dim3 grid((unsigned)((p->n_out + BN - 1) / BN), (unsigned)g->n_tiles);
    TD_LAUNCH_EARLY(td_cuda_is_early(), (grouped_tile_kernel<BN, BM, WN, WM>), grid, dim3(THREADS),
                    shared_bytes, td_cuda.compute, *p, *g);
    TD_LAUNCHED("grouped gemm (tile)");
}

void td_cuda_gemm_mma_grouped(const struct td_gemm_params *p, const struct td_gemm_groups *g)
{
    if (g->tile_rows == 8)
        grouped_skinny_launch<1, 1, 6>(p, g);
    else if (g->tile_rows == 16)
        grouped_skinny_launch<1, 2, 4>(p, g);
    else if (g->tile_rows == 32)
        grouped_tile_launch<64, 32, 4, 2>(p, g);
    else
        grouped_tile_launch<128, 128, 2, 4>(p, g);
}

void td_cuda_gemm_mma(const struct td_gemm_params *p)
{
    /* blocks of 32 outputs still fill the device twice */
    bool is_wide = (p->n_out + 31) / 32 >= 2 * td_cuda.n_sms;
    if (p->n_rows <= 8)
        is_wide ? skinny_launch<2, 1, 4>(p) : skinny_launch<1, 1, 6>(p);
    else if (p->n_rows <= 16)
        is_wide ? skinny_launch<2, 2, 3>(p) : skinny_launch<1, 2, 4>(p);
    else if (p->n_rows <= 64)
        tile_launch<64, 32, 4, 2>(p);
    else
        tile_launch<128, 128, 2, 4>(p);
}
