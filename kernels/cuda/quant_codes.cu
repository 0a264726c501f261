/* quant_codes.cu - weights in codes of 8 bits that meet activations of 8 bits (W8A8, LLM.int8(),
 * FP8): what is beside quant.cu's widening. Their packed form is rows (quant.h).
 *
 *   rounding   each row of x to codes with a scale, by the formulas of scaled.h, bit for bit. 8-bit
 *              floats are also written as bf16, which has all of them
 *   I8         int32 sums are exact, so every way gives the same bits, and the end is scaled.h's
 *              formula: the CPU's bits. cuBLASLt where it is in use; else dp4a, a warp for each
 *              two outputs, which reads weights in runs of 512 bytes: bound by memory up to 8 rows,
 *              and far from a tensor core with many
 *   E4M3       cuBLASLt (sm_89) where it is in use and more rows than a few are asked for; else
 *              quant.cu's kernels, which widen both sides exactly to bf16: the scales of row and
 *              output multiply the sum at the end, either way
 *
 * cuBLASLt gives sums without scales, into scratch, so that one kernel of ours ends both kinds on
 * every card (its own vectors of scales are for sm_90 alone). */
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/gemm.h"
#include "kernels/cuda/quant.h"
#include "kernels/cuda/quant_codes.h"
#include "kernels/kv_codes.h"

#define THREADS 256
#define WARP 32
#define OUTS 2            /* outputs of a warp */
#define ROWS 8            /* rows of a block */
#define CUBLAS_ROWS_MIN 8 /* more rows than these are cuBLASLt's, where it is in use */
#define OUTLIER 6.0f

/* ---- rounding -------------------------------------------------------------------------------- */

struct round_params {
    const float *x;
    struct td_quant_x to;
    int64_t x_stride;
    int32_t n_in;
    bool is_i8, skips; /* skips: values of 6.0 and above are not rounded, and do not count */
    bool powers;       /* scales are powers of two: td_scaled_power_above */
    float x_scale;     /* E4M3: 0, or the scale of every row */
};

/* The bits of the largest size of a row, NaN above infinity; a block reads it. */
__device__ static inline uint32_t largest(const float *x, int32_t n, bool skips, uint32_t *of_warps)
{
    uint32_t top = 0;
    for (int32_t k = (int32_t)threadIdx.x; k < n; k += THREADS) {
        uint32_t u = td_kv_bits(x[k]) & 0x7fffffffu;
        bool is_outlier = skips && u >= td_kv_bits(OUTLIER) && u < 0x7f800000u;
        top = !is_outlier && u > top ? u : top;
    }
    top = __reduce_max_sync(0xffffffffu, top);
    if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = top;
    __syncthreads();
    for (int i = 0; i < THREADS / WARP; i++) top = of_warps[i] > top ? of_warps[i] : top;
    return top;
}

/* td_scaled_x_scale_of: NaN where a number is none, 0 where all are next to nothing. */
__device__ static inline float scale_of(uint32_t top, float most)
{
    if (top >= 0x7f800000u) return td_kv_from_bits(0x7fc00000u);
    return top < (127u - 100u) << 23 ? 0.0f : td_kv_from_bits(top) / most;
}

static __global__ void __launch_bounds__(THREADS) round_kernel(struct round_params p)
{
    __shared__ uint32_t of_warps[THREADS / WARP];
    td_wait_for_previous();
    int32_t row = (int32_t)blockIdx.x;
    const float *x = p.x + row * p.x_stride;
    uint8_t *codes = p.to.codes + row * p.to.stride;
    uint16_t *bf16 = p.to.bf16 + row * p.to.stride;
    uint32_t top = largest(x, p.n_in, p.skips, of_warps);
    float scale = scale_of(top, p.is_i8 ? 127.0f : 448.0f);
    if (p.x_scale > 0 && top < 0x7f800000u) scale = p.x_scale;
    if (p.powers && scale > 0)
        scale = td_kv_from_bits((td_kv_bits(scale) + 0x7fffffu) & ~0x7fffffu);
    bool is_zero = !(scale > 0);
    for (int32_t k = (int32_t)threadIdx.x; k < p.to.stride; k += THREADS) {
        bool is_there = k < p.n_in && !is_zero && !(p.skips && fabsf(x[k]) >= OUTLIER);
        float v = is_there ? x[k] / scale : 0.0f;
        uint8_t code = p.is_i8 ? (uint8_t)(int8_t)rintf(v) : td_f32_to_fp8(v);
        codes[k] = code;
        if (!p.is_i8) bf16[k] = td_cu_f32_to_bf16(td_fp8_to_f32(code));
    }
    if (threadIdx.x == 0) p.to.scales[row] = scale;
}

struct td_quant_x td_cuda_quant_x_at(void *scratch, int32_t n_rows, int32_t n_in)
{
    struct td_quant_x x = {};
    size_t n = (size_t)n_rows, stride = (size_t)td_cuda_quant_k_stride(n_in), at = 0;
    uint8_t *base = (uint8_t *)scratch;
    x.stride = (int64_t)stride;
    x.bf16 = (uint16_t *)(void *)base, at += (n * stride * 2 + 255) / 256 * 256;
    x.codes = base + at, at += (n * stride + 255) / 256 * 256;
    x.scales = (float *)(void *)(base + at), at += (n * 4 + 255) / 256 * 256;
    x.rest = base + at, x.bytes = at;
    return x;
}

void td_cuda_quant_prepare(const struct td_gemm_args *a, int part, int n_parts)
{
    const struct td_scaled *s = &a->w->format->scaled;
    if (!td_quant_is_rows(a->w->format)) {
        td_cuda_gemm_prepare(a, part, n_parts);
        return;
    }
    if (a->n_rows <= 0) return;
    struct round_params p = {};
    p.x = a->x, p.x_stride = a->x_stride, p.n_in = a->w->n_in;
    p.to = td_cuda_quant_x_at(a->scratch, a->n_rows, a->w->n_in);
    p.is_i8 = s->kind == TD_SCALED_I8, p.skips = s->x == TD_SCALED_X_OUTLIER;
    p.x_scale = s->x == TD_SCALED_X_STATIC ? s->x_scale : 0.0f;
    p.powers = s->x_powers;
    TD_LAUNCH_EARLY(td_cuda_is_early(), round_kernel, dim3((unsigned)a->n_rows), dim3(THREADS), 0,
                    td_cuda.compute, p);
    TD_LAUNCHED("gemm_prepare (rounding to 8 bits)");
}

/* ---- the end of a sum ------------------------------------------------------------------------ */

struct codes_params {
    struct td_gemm_params g; /* its scales are set; w: rows of w_scale_stride bytes */
    struct td_quant_x x;
    const float *outliers; /* x as it was, where |x| >= 6.0; NULL: none */
    int64_t outliers_stride;
    const void *sums; /* end_kernel: [n_rows][n_out] from output n0 on */
    int32_t n0, n_sums;
    bool is_i8;
};

/* y of an exact sum: scaled.h's formula, then bias and residual. */
__device__ static inline void end_i8(const struct codes_params *p, int32_t m, int32_t n,
                                     int32_t sum)
{
    const struct td_gemm_params *g = &p->g;
    const uint8_t *row = (const uint8_t *)g->w + n * g->w_scale_stride;
    float s_w = *(const float *)(const void *)(g->w_scale + n * g->w_scale_stride),
          v = (float)sum * (g->x_scale[m] * s_w);
    const float *x = p->outliers ? p->outliers + m * p->outliers_stride : NULL;
    for (int32_t k = 0; x && k < g->n_in; k++)
        if (fabsf(x[k]) >= OUTLIER) v = fmaf(x[k], (float)(int8_t)row[k] * s_w, v);
    struct td_gemm_params plain = *g;
    plain.x_scale = NULL;
    td_cuda_gemm_store(&plain, m, n, v);
}

static __global__ void __launch_bounds__(THREADS)
    end_kernel(const __grid_constant__ struct codes_params p)
{
    td_wait_for_previous();
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= (int64_t)p.g.n_rows * p.n_sums) return;
    int32_t m = (int32_t)(i / p.n_sums), n = p.n0 + (int32_t)(i % p.n_sums);
    if (p.is_i8)
        end_i8(&p, m, n, ((const int32_t *)p.sums)[i]);
    else
        td_cuda_gemm_store(&p.g, m, n, ((const float *)p.sums)[i]);
}

/* ---- I8 without cuBLASLt --------------------------------------------------------------------- */

/* sum += the products of 16 codes of each. */
__device__ static inline int32_t dot16(uint4 a, uint4 b, int32_t sum)
{
    sum = __dp4a((int)a.x, (int)b.x, sum), sum = __dp4a((int)a.y, (int)b.y, sum);
    return __dp4a((int)a.w, (int)b.w, __dp4a((int)a.z, (int)b.z, sum));
}

/* A warp: OUTS outputs and up to ROWS rows. */
static __global__ void __launch_bounds__(THREADS)
    i8_kernel(const __grid_constant__ struct codes_params p)
{
    int lane = (int)threadIdx.x % WARP;
    int32_t n0 = ((int32_t)blockIdx.x * (THREADS / WARP) + (int32_t)threadIdx.x / WARP) * OUTS,
            m0 = (int32_t)blockIdx.y * ROWS, n_in = (p.g.n_in + 15) / 16 * 16;
    const uint8_t *w = (const uint8_t *)p.g.w;
    int32_t sums[OUTS][ROWS] = {};
    td_wait_for_previous();
    for (int32_t k = 16 * lane; k < n_in; k += 16 * WARP) {
        uint4 codes[OUTS];
#pragma unroll
        for (int i = 0; i < OUTS; i++)
            codes[i] =
                n0 + i < p.g.n_out
                    ? __ldcs((const uint4 *)(const void *)(w + (n0 + i) * p.g.w_scale_stride + k))
                    : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            if (m0 + j >= p.g.n_rows) continue;
            uint4 x = *(const uint4 *)(const void *)(p.x.codes + (m0 + j) * p.x.stride + k);
#pragma unroll
            for (int i = 0; i < OUTS; i++) sums[i][j] = dot16(codes[i], x, sums[i][j]);
        }
    }
#pragma unroll
    for (int i = 0; i < OUTS; i++)
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            int32_t sum = __reduce_add_sync(0xffffffffu, sums[i][j]);
            if (lane == (i * ROWS + j) % WARP && m0 + j < p.g.n_rows && n0 + i < p.g.n_out)
                end_i8(&p, m0 + j, n0 + i, sum);
        }
}

/* ---- the entry ------------------------------------------------------------------------------- */

/* Through cuBLASLt, some outputs at a time; returns how many are done, from the first on. */
static int32_t through_cublas(struct codes_params *p, size_t rest_bytes)
{
    int64_t at_once = (int64_t)(rest_bytes / 4) / p->g.n_rows / 16 * 16;
    if (at_once < 16) return 0;
    p->sums = p->x.rest;
    int32_t n = 0;
    for (; n < p->g.n_out; n += p->n_sums) {
        struct td_gemm_codes c = {};
        c.w = (const uint8_t *)p->g.w + n * p->g.w_scale_stride, c.x = p->x.codes;
        c.sums = p->x.rest, c.w_stride = p->g.w_scale_stride, c.x_stride = p->x.stride;
        c.n_out = p->g.n_out - n < at_once ? p->g.n_out - n : (int32_t)at_once;
        c.n_in = (p->g.n_in + 15) / 16 * 16, c.n_rows = p->g.n_rows, c.is_i8 = p->is_i8;
        if (!td_cuda_gemm_codes(&c)) break;
        p->n0 = n, p->n_sums = c.n_out;
        int64_t n_ends = (int64_t)p->g.n_rows * c.n_out;
        TD_LAUNCH(end_kernel, dim3((unsigned)((n_ends + THREADS - 1) / THREADS)), dim3(THREADS), 0,
                  td_cuda.compute, *p);
        TD_LAUNCHED("gemm: the scales of sums of codes");
    }
    return n;
}

struct td_gemm_params td_cuda_gemm_outputs_from(const struct td_gemm_params *p, int32_t n)
{
    struct td_gemm_params rest = *p;
    rest.n_out -= n, rest.y += n;
    if (rest.bias) rest.bias += n;
    if (rest.w_scale) rest.w_scale += n * rest.w_scale_stride;
    return rest;
}

int32_t td_cuda_quant_codes(const struct td_gemm_args *a, struct td_gemm_params *g,
                            size_t rest_bytes)
{
    const struct td_scaled *s = &a->w->format->scaled;
    struct codes_params p = {};
    p.x = td_cuda_quant_x_at(a->scratch, a->n_rows, a->w->n_in);
    g->x_scale = p.x.scales, g->w_scale_stride = td_quant_row_bytes(a->w->n_in);
    g->w_scale = (const uint8_t *)a->w->data + td_quant_row_scale_at(a->w->n_in);
    p.g = *g, p.is_i8 = s->kind == TD_SCALED_I8;
    if (s->x == TD_SCALED_X_OUTLIER) p.outliers = a->x, p.outliers_stride = a->x_stride;
    int32_t done = a->n_rows > CUBLAS_ROWS_MIN ? through_cublas(&p, rest_bytes) : 0;
    if (!p.is_i8 || done == g->n_out) return done;
    p.g = td_cuda_gemm_outputs_from(g, done);
    p.g.w = (const uint8_t *)g->w + done * g->w_scale_stride;
    dim3 grid((unsigned)((p.g.n_out + THREADS / WARP * OUTS - 1) / (THREADS / WARP * OUTS)),
              (unsigned)((g->n_rows + ROWS - 1) / ROWS));
    TD_LAUNCH_EARLY(td_cuda_is_early(), i8_kernel, grid, dim3(THREADS), 0, td_cuda.compute, p);
    TD_LAUNCHED("gemm (int8)");
    return g->n_out;
}
