/* rows.cu - the operations on single rows between the products: embedding, norm, rotary embedding,
 * storing K and V, SwiGLU, and rounding for a product.
 *
 * All of them are bound by memory and by the number of launches. So accesses are 16 bytes where the
 * addresses allow it, a row that needs a sum has a whole block, and the fused pairs (norm or gate,
 * then rounding into the product's scratch) save a write and a read of the row and one launch each.
 *
 * Bits (I1). A thread's elements and the order of every sum follow from the row's length alone,
 * never from the number of rows or from alignment: the arithmetic is the same whether four
 * neighbours come by one load or by four. The fused pairs run the same device functions as the
 * single entries. */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/quads.h"
#include "kernels/kv_codes.h"

#define ROW_THREADS_MAX 1024

/* ---- rmsnorm --------------------------------------------------------------------------------- */

/* The sum over the block of one number per thread, returned to every thread: butterflies inside the
 * warps, then the warps' sums in ascending order. */
__device__ static inline float block_sum(float v, float *warp_sums)
{
    for (int d = WARP / 2; d > 0; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
    int n_warps = (int)blockDim.x / WARP;
    if (n_warps == 1) return v;
    if (threadIdx.x % WARP == 0) warp_sums[threadIdx.x / WARP] = v;
    __syncthreads();
    float sum = 0;
    for (int w = 0; w < n_warps; w++) sum += warp_sums[w];
    return sum;
}

/* One block per row. out: f32 rows, or (prepared) rows of a product's scratch with zeros behind
 * them. */
struct norm_params {
    const float *x, *w;
    void *out;
    int64_t x_stride, out_stride;
    int32_t dim, n_out_quads; /* n_out_quads: quads to write, of the row or of the prepared row */
    float eps;
    bool x_vector, w_vector, out_vector, is_prepared, is_bf16;
};

static __global__ void __launch_bounds__(ROW_THREADS_MAX) norm_kernel(struct norm_params p)
{
    td_wait_for_previous();
    __shared__ float warp_sums[ROW_THREADS_MAX / WARP];
    int32_t row = (int32_t)blockIdx.x, n_quads = (p.dim + 3) / 4;
    const float *x = p.x + row * p.x_stride;
    float v[4], w[4], sum = 0;
    for (int32_t q = (int32_t)threadIdx.x; q < n_quads; q += (int32_t)blockDim.x) {
        load4(x + 4 * q, p.x_vector, p.dim - 4 * q, v);
        for (int i = 0; i < 4; i++) sum = fmaf(v[i], v[i], sum);
    }
    sum = block_sum(sum, warp_sums);
    float inv = 1.0f / sqrtf(sum / (float)p.dim + p.eps);
    for (int32_t q = (int32_t)threadIdx.x; q < p.n_out_quads; q += (int32_t)blockDim.x) {
        /* reads the elements of this thread again: they are near, and this is safe when out is x */
        load4(x + 4 * q, p.x_vector, p.dim - 4 * q, v);
        load4(p.w + 4 * q, p.w_vector, p.dim - 4 * q, w);
        for (int i = 0; i < 4; i++) v[i] = v[i] * inv * w[i];
        if (p.is_prepared)
            prepare4(prepared_row(p.out, p.is_bf16, row, p.out_stride), p.is_bf16, q, v);
        else
            store4((float *)p.out + row * p.out_stride + 4 * q, p.out_vector, p.dim - 4 * q, v);
    }
}

static void norm_launch(const struct td_rmsnorm_args *a, struct norm_params *p, const char *label)
{
    if (a->n_rows <= 0) return;
    p->x = a->x, p->w = a->w, p->x_stride = a->x_stride, p->dim = a->dim, p->eps = a->eps;
    p->x_vector = aligned_to(a->x, a->x_stride * 4, 16), p->w_vector = aligned_to(a->w, 0, 16);
    int32_t threads = min_i32(round_up((a->dim + 3) / 4, WARP), ROW_THREADS_MAX);
    TD_LAUNCH_EARLY(td_cuda_is_early(), norm_kernel, dim3((unsigned)a->n_rows),
                    dim3((unsigned)threads), 0, td_cuda.compute, *p);
    TD_LAUNCHED(label);
}

void td_cuda_rmsnorm(const struct td_rmsnorm_args *a, int part, int n_parts)
{
    (void)part, (void)n_parts;
    struct norm_params p = {};
    p.out = a->out, p.out_stride = a->out_stride, p.n_out_quads = (a->dim + 3) / 4,
    p.out_vector = aligned_to(a->out, a->out_stride * 4, 16);
    norm_launch(a, &p, "rmsnorm");
}

void td_cuda_rmsnorm_prepare(const struct td_rmsnorm_args *a, const struct td_gemm_args *next,
                             int part, int n_parts)
{
    (void)part, (void)n_parts;
    TD_ASSERT(next->w->n_in == a->dim && next->n_rows == a->n_rows);
    struct norm_params p = {};
    p.out = next->scratch, p.out_stride = td_cuda_x_stride(next->w),
    p.n_out_quads = (int32_t)(p.out_stride / 4), p.is_prepared = true;
    p.is_bf16 = td_cuda_x_is_bf16(next->w);
    norm_launch(a, &p, "rmsnorm_prepare");
}

/* ---- gemm_prepare and SwiGLU: no sums, so any thread may do any quad ------------------------- */

struct flat_params {
    const float *x, *up; /* up: NULL when x is only prepared */
    void *out;
    int64_t x_stride, up_stride, out_stride, n_quads; /* n_quads: quads of all rows */
    int32_t dim, row_quads;                           /* row_quads: quads to write per row */
    bool x_vector, up_vector, out_vector, is_prepared, is_bf16;
};

__device__ static inline float silu(float g) { return g / (1.0f + expf(-g)); }

static __global__ void __launch_bounds__(FLAT_THREADS) flat_kernel(struct flat_params p)
{
    td_wait_for_previous();
    int64_t at = (int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x;
    if (at >= p.n_quads) return;
    int32_t row = (int32_t)(at / p.row_quads), q = (int32_t)(at % p.row_quads),
            n_valid = p.dim - 4 * q;
    float v[4], up[4];
    load4(p.x + row * p.x_stride + 4 * q, p.x_vector, n_valid, v);
    if (p.up) {
        load4(p.up + row * p.up_stride + 4 * q, p.up_vector, n_valid, up);
        for (int i = 0; i < 4; i++) v[i] = silu(v[i]) * up[i];
    }
    if (p.is_prepared)
        prepare4(prepared_row(p.out, p.is_bf16, row, p.out_stride), p.is_bf16, q, v);
    else
        store4((float *)p.out + row * p.out_stride + 4 * q, p.out_vector, n_valid, v);
}

static void flat_launch(struct flat_params *p, int32_t n_rows, const char *label)
{
    p->n_quads = (int64_t)n_rows * p->row_quads;
    if (p->n_quads <= 0) return;
    p->x_vector = aligned_to(p->x, p->x_stride * 4, 16),
    p->up_vector = aligned_to(p->up, p->up_stride * 4, 16);
    TD_LAUNCH_EARLY(td_cuda_is_early(), flat_kernel, dim3(n_blocks(p->n_quads, FLAT_THREADS)),
                    dim3(FLAT_THREADS), 0, td_cuda.compute, *p);
    TD_LAUNCHED(label);
}

static void into_scratch(struct flat_params *p, const struct td_gemm_args *next)
{
    p->out = next->scratch, p->out_stride = td_cuda_x_stride(next->w),
    p->row_quads = (int32_t)(p->out_stride / 4), p->dim = next->w->n_in;
    p->is_prepared = true, p->is_bf16 = td_cuda_x_is_bf16(next->w);
}

void td_cuda_gemm_prepare(const struct td_gemm_args *a, int part, int n_parts)
{
    (void)part, (void)n_parts;
    struct flat_params p = {};
    p.x = a->x, p.x_stride = a->x_stride;
    into_scratch(&p, a);
    flat_launch(&p, a->n_rows, "gemm_prepare");
}

void td_cuda_silu_mul_prepare(const float *gate, const float *up, int64_t gate_stride,
                              int64_t up_stride, const struct td_gemm_args *next, int part,
                              int n_parts)
{
    (void)part, (void)n_parts;
    struct flat_params p = {};
    p.x = gate, p.x_stride = gate_stride, p.up = up, p.up_stride = up_stride;
    into_scratch(&p, next);
    flat_launch(&p, next->n_rows, "silu_mul_prepare");
}

void td_cuda_silu_mul(float *out, const float *gate, const float *up, int32_t n_rows, int32_t dim,
                      int64_t out_stride, int64_t gate_stride, int64_t up_stride, int part,
                      int n_parts)
{
    (void)part, (void)n_parts;
    struct flat_params p = {};
    p.x = gate, p.x_stride = gate_stride, p.up = up, p.up_stride = up_stride;
    p.out = out, p.out_stride = out_stride, p.dim = dim, p.row_quads = (dim + 3) / 4,
    p.out_vector = aligned_to(out, out_stride * 4, 16);
    flat_launch(&p, n_rows, "silu_mul");
}

/* ---- embedding ------------------------------------------------------------------------------- */

struct embed_params {
    float *out;
    const void *table;
    const int32_t *ids;
    int64_t n_quads;
    int32_t dim, row_quads;
    enum td_dtype dtype;
    bool vector; /* rows of the table and of out allow whole quads */
};

static __global__ void __launch_bounds__(FLAT_THREADS) embed_kernel(struct embed_params p)
{
    td_wait_for_previous();
    int64_t at = (int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x;
    if (at >= p.n_quads) return;
    int32_t row = (int32_t)(at / p.row_quads), q = (int32_t)(at % p.row_quads),
            n_valid = p.dim - 4 * q, id = p.ids[row];
    float v[4] = {0, 0, 0, 0};
    int64_t from = (int64_t)id * p.dim + 4 * q;
    if (id < 0) { /* a padding row: its outputs must be finite */
    } else if (p.dtype == TD_F32) {
        load4((const float *)p.table + from, p.vector, n_valid, v);
    } else if (p.vector) {
        uint2 h = *(const uint2 *)((const uint16_t *)p.table + from);
        bool is_bf16 = p.dtype == TD_BF16;
        v[0] = td_cuda_widen16((uint16_t)h.x, is_bf16),
        v[1] = td_cuda_widen16((uint16_t)(h.x >> 16), is_bf16);
        v[2] = td_cuda_widen16((uint16_t)h.y, is_bf16),
        v[3] = td_cuda_widen16((uint16_t)(h.y >> 16), is_bf16);
    } else {
        for (int i = 0; i < 4; i++)
            if (i < n_valid)
                v[i] = td_cuda_widen16(((const uint16_t *)p.table)[from + i], p.dtype == TD_BF16);
    }
    store4(p.out + (int64_t)row * p.dim + 4 * q, p.vector, n_valid, v);
}

void td_cuda_embed(float *out, const void *table, enum td_dtype dtype, const int32_t *ids,
                   int32_t n_rows, int32_t dim, int part, int n_parts)
{
    (void)part, (void)n_parts;
    struct embed_params p = {};
    p.out = out, p.table = table, p.ids = ids, p.dim = dim, p.row_quads = (dim + 3) / 4,
    p.dtype = dtype;
    p.n_quads = (int64_t)n_rows * p.row_quads;
    p.vector =
        aligned_to(out, (int64_t)dim * 4, 16) &&
        aligned_to(table, (int64_t)dim * (int64_t)td_dtype_bytes(dtype), dtype == TD_F32 ? 16 : 8);
    if (p.n_quads <= 0) return;
    TD_LAUNCH_EARLY(td_cuda_is_early(), embed_kernel, dim3(n_blocks(p.n_quads, FLAT_THREADS)),
                    dim3(FLAT_THREADS), 0, td_cuda.compute, p);
    TD_LAUNCHED("embed");
}

/* ---- rotary embedding ------------------------------------------------------------------------ */

/* Rotates four pairs in place. c: their cosines; the sines lie half a head further. */
__device__ static inline void turn4(const float *c, int32_t half, bool vector, int32_t n_valid,
                                    float *x0, float *x1)
{
    float cosine[4], sine[4];
    load4(c, vector, n_valid, cosine), load4(c + half, vector, n_valid, sine);
    for (int i = 0; i < 4; i++) {
        float y = fmaf(x0[i], cosine[i], -(x1[i] * sine[i]));
        x1[i] = fmaf(x1[i], cosine[i], x0[i] * sine[i]);
        x0[i] = y;
    }
}

/* A thread rotates four pairs (i .. i+3, i + half .. i + half + 3) of one head of one row. */
struct rope_params {
    float *x;
    const float *cos_sin;
    const int32_t *positions;
    int64_t x_stride, n_items;
    int32_t n_heads, head_dim, half_quads;
    bool vector;
};

static __global__ void __launch_bounds__(FLAT_THREADS) rope_kernel(struct rope_params p)
{
    td_wait_for_previous();
    int64_t at = (int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x;
    if (at >= p.n_items) return;
    int32_t q = (int32_t)(at % p.half_quads), half = p.head_dim / 2, n_valid = half - 4 * q;
    int64_t row_head = at / p.half_quads;
    int32_t head = (int32_t)(row_head % p.n_heads);
    int64_t row = row_head / p.n_heads;
    int32_t position = p.positions[row];
    if (position < 0) return;
    float *lo = p.x + row * p.x_stride + (int64_t)head * p.head_dim + 4 * q, *hi = lo + half;
    const float *c = p.cos_sin + (int64_t)position * p.head_dim + 4 * q;
    float x0[4], x1[4];
    load4(lo, p.vector, n_valid, x0), load4(hi, p.vector, n_valid, x1);
    turn4(c, half, p.vector, n_valid, x0, x1);
    store4(lo, p.vector, n_valid, x0), store4(hi, p.vector, n_valid, x1);
}

void td_cuda_rope(const struct td_rope_args *a, int part, int n_parts)
{
    (void)part, (void)n_parts;
    struct rope_params p = {};
    p.x = a->x, p.cos_sin = a->cos_sin, p.positions = a->positions, p.x_stride = a->x_stride,
    p.n_heads = a->n_heads, p.head_dim = a->head_dim;
    p.half_quads = (a->head_dim / 2 + 3) / 4;
    p.n_items = (int64_t)a->n_rows * a->n_heads * p.half_quads;
    p.vector = a->head_dim % 8 == 0 && aligned_to(a->x, a->x_stride * 4, 16) &&
               aligned_to(a->cos_sin, 0, 16);
    if (p.n_items <= 0) return;
    TD_LAUNCH_EARLY(td_cuda_is_early(), rope_kernel, dim3(n_blocks(p.n_items, FLAT_THREADS)),
                    dim3(FLAT_THREADS), 0, td_cuda.compute, p);
    TD_LAUNCHED("rope");
}

/* ---- storing K and V ------------------------------------------------------------------------- */

/* Where quad `q` of a head of K is stored; that of V lies kv_bytes further. position >= 0. */
__device__ static inline uint8_t *slot_of(const struct td_kv_view *kv, const int32_t *table,
                                          int32_t head, int32_t position, int32_t q)
{
    int64_t element =
        ((int64_t)head * kv->block_size + position % kv->block_size) * kv->head_dim + 4 * q;
    return kv->base + table[position / kv->block_size] * kv->block_bytes +
           element * (kv->dtype == TD_F32 ? 4 : 2);
}

__device__ static inline void store_slot(uint8_t *to, enum td_dtype dtype, bool vector,
                                         int32_t n_valid, const float *v)
{
    if (dtype == TD_F32)
        store4((float *)(void *)to, vector, n_valid, v);
    else
        store4_bf16((uint16_t *)(void *)to, vector, n_valid, v);
}

/* A warp turns a row, in shared or device memory, into codes and a scale: kv_codes.h's formula,
 * where the order of a maximum does not matter. head: of the row's block, K or V. */
__device__ static inline void store_codes(enum td_dtype dtype, uint8_t *head, int64_t scales_at,
                                          int32_t slot, const float *row, int32_t dim)
{
    int32_t lane = (int32_t)threadIdx.x % WARP;
    uint32_t top = 0;
    for (int32_t i = lane; i < dim; i += WARP) {
        uint32_t u = td_kv_bits(row[i]) & 0x7fffffffu;
        top = u > top ? u : top;
    }
    for (int d = WARP / 2; d > 0; d /= 2) {
        uint32_t other = __shfl_xor_sync(0xffffffffu, top, d);
        top = other > top ? other : top;
    }
    struct td_kv_scale s = td_kv_scale_of(dtype, top);
    uint8_t *codes = head + (int64_t)slot * dim;
    for (int32_t i = lane; i < dim; i += WARP) codes[i] = td_kv_code(dtype, row[i], s.factor);
    if (lane == 0) ((float *)(void *)(head + scales_at))[slot] = s.scale;
}

/* A thread stores a quad of K and the same quad of V; of codes a warp stores a row. */
struct store_params {
    struct td_kv_view kv;
    const float *k, *v;
    const int32_t *positions, *row_seq;
    const int32_t *const *block_tables;
    int64_t k_stride, v_stride, kv_bytes, n_items, head_bytes, scales_at;
    int32_t head_quads;
    bool k_vector, v_vector, cache_vector, is_coded;
};

static __global__ void __launch_bounds__(FLAT_THREADS) kv_store_kernel(struct store_params p)
{
    td_wait_for_previous();
    int64_t at = (int64_t)blockIdx.x * FLAT_THREADS + threadIdx.x;
    if (at >= p.n_items) return;
    int32_t q = (int32_t)(at % p.head_quads), n_valid = p.kv.head_dim - 4 * q;
    int64_t row_head = at / p.head_quads;
    int32_t head = (int32_t)(row_head % p.kv.n_kv_heads);
    int64_t row = row_head / p.kv.n_kv_heads;
    int32_t position = p.positions[row];
    if (position < 0) return;
    uint8_t *to = slot_of(&p.kv, p.block_tables[p.row_seq[row]], head, position, q);
    float v[4];
    for (int is_v = 0; is_v < 2; is_v++, to += p.kv_bytes) {
        const float *from = (is_v ? p.v + row * p.v_stride : p.k + row * p.k_stride) +
                            (int64_t)head * p.kv.head_dim + 4 * q;
        load4(from, is_v ? p.v_vector : p.k_vector, n_valid, v);
        store_slot(to, p.kv.dtype, p.cache_vector, n_valid, v);
    }
}

/* A warp for K, and one for V, of each head of a row. */
static __global__ void __launch_bounds__(FLAT_THREADS) kv_store_codes_kernel(struct store_params p)
{
    td_wait_for_previous();
    int64_t item = (int64_t)blockIdx.x * (FLAT_THREADS / WARP) + threadIdx.x / WARP;
    if (item >= p.n_items) return; /* the whole warp */
    int32_t head = (int32_t)(item % (2 * p.kv.n_kv_heads)), n_kv = p.kv.n_kv_heads;
    int64_t row = item / (2 * n_kv);
    int32_t position = p.positions[row], block = position / p.kv.block_size;
    if (position < 0) return;
    const float *from = head >= n_kv
                            ? p.v + row * p.v_stride + (int64_t)(head - n_kv) * p.kv.head_dim
                            : p.k + row * p.k_stride + (int64_t)head * p.kv.head_dim;
    /* the heads of V follow those of K */
    store_codes(p.kv.dtype,
                p.kv.base + p.block_tables[p.row_seq[row]][block] * p.kv.block_bytes +
                    head * p.head_bytes,
                p.scales_at, position - block * p.kv.block_size, from, p.kv.head_dim);
}

static struct store_params store_params_of(const struct td_kv_store_args *a)
{
    struct store_params p = {};
    int64_t elem = (int64_t)td_dtype_bytes(a->kv.dtype);
    bool is_whole = a->kv.head_dim % 4 == 0; /* else heads start anywhere */
    p.kv = a->kv, p.k = a->k, p.v = a->v, p.positions = a->positions, p.row_seq = a->row_seq,
    p.block_tables = a->block_tables;
    p.k_stride = a->k_stride, p.v_stride = a->v_stride, p.head_quads = (a->kv.head_dim + 3) / 4;
    p.is_coded = td_dtype_is_coded(a->kv.dtype);
    p.head_bytes = td_kv_view_head_bytes(&a->kv);
    p.scales_at = (int64_t)td_kv_scales_at(a->kv.dtype, a->kv.block_size, a->kv.head_dim);
    p.kv_bytes = a->kv.n_kv_heads * p.head_bytes;
    p.n_items = (int64_t)a->n_rows * a->kv.n_kv_heads * p.head_quads;
    p.k_vector = is_whole && aligned_to(a->k, a->k_stride * 4, 16),
    p.v_vector = is_whole && aligned_to(a->v, a->v_stride * 4, 16);
    p.cache_vector = is_whole && aligned_to(a->kv.base, a->kv.block_bytes, 4 * elem);
    return p;
}

void td_cuda_kv_store(const struct td_kv_store_args *a, int part, int n_parts)
{
    (void)part, (void)n_parts;
    struct store_params p = store_params_of(a);
    if (p.n_items <= 0) return;
    if (p.is_coded) {
        p.n_items = (int64_t)a->n_rows * a->kv.n_kv_heads * 2;
        TD_LAUNCH_EARLY(td_cuda_is_early(), kv_store_codes_kernel,
                        dim3(n_blocks(p.n_items, FLAT_THREADS / WARP)), dim3(FLAT_THREADS), 0,
                        td_cuda.compute, p);
        TD_LAUNCHED("kv_store_codes");
        return;
    }
    TD_LAUNCH_EARLY(td_cuda_is_early(), kv_store_kernel, dim3(n_blocks(p.n_items, FLAT_THREADS)),
                    dim3(FLAT_THREADS), 0, td_cuda.compute, p);
    TD_LAUNCHED("kv_store");
}

/* ---- norm of heads, rotary embedding and storing in one pass: a warp per head of a row ------- */

/* quads of a lane: lane, lane + 32 and so on, as for the threads of norm_kernel */
#define HEAD_GROUPS (TD_ATTN_HEAD_DIM_MAX / 4 / WARP)

struct head_params {
    struct store_params store;
    float *x;
    const float *cos_sin, *q_norm, *k_norm; /* q_norm, k_norm: NULL = no norm */
    int64_t x_stride, n_items;
    int32_t n_q_heads, n_heads; /* n_heads: heads of q, k and v together */
    float q_eps, k_eps;
    bool x_vector, turn_vector, norm_vector;
};

/* The same sum as norm_kernel's, which has a warp for each group. */
__device__ static inline float head_inverse(const float (*v)[4], int32_t dim, float eps)
{
    int n_groups = ((dim + 3) / 4 + WARP - 1) / WARP;
    float total = 0;
    for (int group = 0; group < HEAD_GROUPS; group++) {
        float sum = 0;
        for (int i = 0; i < 4; i++) sum = fmaf(v[group][i], v[group][i], sum);
        for (int d = WARP / 2; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        if (group < n_groups) total += sum;
    }
    return 1.0f / sqrtf(total / (float)dim + eps);
}

/* A warp stores a head that lies in shared memory: K of head kv_head, or V when that is n_kv_heads
 * and more. */
__device__ static inline void store_head(const struct store_params *p, const int32_t *table,
                                         int32_t kv_head, int32_t position, const float *head)
{
    int32_t dim = p->kv.head_dim, block = position / p->kv.block_size;
    float w[4];
    if (p->is_coded) {
        store_codes(p->kv.dtype,
                    p->kv.base + table[block] * p->kv.block_bytes + kv_head * p->head_bytes,
                    p->scales_at, position - block * p->kv.block_size, head, dim);
        return;
    }
    bool is_v = kv_head >= p->kv.n_kv_heads;
    for (int32_t q = (int32_t)threadIdx.x % WARP; 4 * q < dim; q += WARP) {
        load4(head + 4 * q, true, 4, w);
        store_slot(slot_of(&p->kv, table, is_v ? kv_head - p->kv.n_kv_heads : kv_head, position,
                           q) +
                       (is_v ? p->kv_bytes : 0),
                   p->kv.dtype, p->cache_vector, dim - 4 * q, w);
    }
}

static __global__ void __launch_bounds__(FLAT_THREADS) rope_store_kernel(struct head_params p)
{
    td_wait_for_previous();
    __shared__ __align__(16) float heads[FLAT_THREADS / WARP][TD_ATTN_HEAD_DIM_MAX];
    int lane = (int)threadIdx.x % WARP;
    int64_t item = (int64_t)blockIdx.x * (FLAT_THREADS / WARP) + threadIdx.x / WARP;
    bool is_there = item < p.n_items; /* the whole warp's */
    int64_t row = is_there ? item / p.n_heads : 0;
    int32_t head = (int32_t)(item % p.n_heads), dim = p.store.kv.head_dim, half = dim / 2,
            position = is_there ? p.store.positions[row] : -1;
    is_there = position >= 0;
    int32_t kv_head = head - p.n_q_heads, n_kv = p.store.kv.n_kv_heads;
    bool is_v = kv_head >= n_kv;
    const float *norm = is_v ? NULL : kv_head < 0 ? p.q_norm : p.k_norm;
    const float *x = is_v ? p.store.v + row * p.store.v_stride + (int64_t)(kv_head - n_kv) * dim
                          : p.x + row * p.x_stride + (int64_t)head * dim;
    float *mine = heads[threadIdx.x / WARP], v[HEAD_GROUPS][4], w[4];

    for (int group = 0; group < HEAD_GROUPS; group++) {
        int32_t q = lane + WARP * group;
        load4(x + 4 * q, is_v ? p.store.v_vector : p.x_vector, is_there ? dim - 4 * q : 0,
              v[group]);
    }
    if (norm) { /* the same in all lanes of a warp, also for a warp without work */
        float inv = head_inverse(v, dim, kv_head < 0 ? p.q_eps : p.k_eps);
        for (int group = 0; group < HEAD_GROUPS; group++) {
            int32_t q = lane + WARP * group;
            load4(norm + 4 * q, p.norm_vector, dim - 4 * q, w);
            for (int i = 0; i < 4; i++) v[group][i] = v[group][i] * inv * w[i];
        }
    }
    for (int group = 0; group < HEAD_GROUPS; group++)
        store4(mine + 4 * (lane + WARP * group), true, 4, v[group]);
    __syncwarp();
    if (is_there && !is_v) {
        float *out = p.x + row * p.x_stride + (int64_t)head * dim;
        for (int32_t q = lane; 4 * q < half; q += WARP) {
            float x0[4], x1[4];
            int32_t n_valid = half - 4 * q;
            load4(mine + 4 * q, true, n_valid, x0),
                load4(mine + half + 4 * q, half % 4 == 0, n_valid, x1);
            turn4(p.cos_sin + (int64_t)position * dim + 4 * q, half, p.turn_vector, n_valid, x0,
                  x1);
            store4(out + 4 * q, p.x_vector && half % 4 == 0, n_valid, x0),
                store4(out + half + 4 * q, p.x_vector && half % 4 == 0, n_valid, x1);
            store4(mine + 4 * q, true, n_valid, x0),
                store4(mine + half + 4 * q, half % 4 == 0, n_valid, x1);
        }
    }
    __syncwarp();
    if (is_there && kv_head >= 0)
        store_head(&p.store, p.store.block_tables[p.store.row_seq[row]], kv_head, position, mine);
}

void td_cuda_rope_store(const struct td_rmsnorm_args *q_norm, const struct td_rmsnorm_args *k_norm,
                        const struct td_rope_args *rope, const struct td_kv_store_args *store,
                        int part, int n_parts)
{
    (void)part, (void)n_parts;
    struct head_params p = {};
    p.store = store_params_of(store);
    p.x = rope->x, p.cos_sin = rope->cos_sin, p.x_stride = rope->x_stride,
    p.n_q_heads = rope->n_heads - store->kv.n_kv_heads;
    p.n_heads = rope->n_heads + store->kv.n_kv_heads, p.n_items = (int64_t)rope->n_rows * p.n_heads;
    TD_ASSERT(store->k == rope->x + (int64_t)p.n_q_heads * rope->head_dim &&
              store->k_stride == rope->x_stride && rope->positions == store->positions);
    TD_ASSERT(rope->head_dim == store->kv.head_dim && rope->head_dim <= TD_ATTN_HEAD_DIM_MAX &&
              rope->n_rows == store->n_rows);
    if (q_norm) p.q_norm = q_norm->w, p.q_eps = q_norm->eps;
    if (k_norm) p.k_norm = k_norm->w, p.k_eps = k_norm->eps;
    p.x_vector = rope->head_dim % 4 == 0 && aligned_to(rope->x, rope->x_stride * 4, 16);
    p.turn_vector = rope->head_dim % 8 == 0 && aligned_to(rope->cos_sin, 0, 16);
    p.norm_vector =
        (!q_norm || aligned_to(q_norm->w, 0, 16)) && (!k_norm || aligned_to(k_norm->w, 0, 16));
    if (p.n_items <= 0) return;
    TD_LAUNCH_EARLY(td_cuda_is_early(), rope_store_kernel,
                    dim3(n_blocks(p.n_items, FLAT_THREADS / WARP)), dim3(FLAT_THREADS), 0,
                    td_cuda.compute, p);
    TD_LAUNCHED("rope_store");
}
