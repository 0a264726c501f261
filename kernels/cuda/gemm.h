/* gemm.h - how prepared rows lie in a product's scratch (rows.cu writes them, gemm*.cu read them),
 * and what the ways to compute a product share.
 *
 * Row m of x starts at element m * td_cuda_k_stride(n_in). Its elements are bf16 for a BF16 weight,
 * else f32 (an F16 weight rounds no activation). Elements from n_in up to the stride are zero, as
 * they are in the rows of a packed weight. The stride is a multiple of 8, so that 16-byte loads
 * never straddle rows. Real models have n_in that are multiples of 8; a packed weight is then the
 * checkpoint's matrix, byte for byte. */
#ifndef TD_KERNELS_CUDA_GEMM_H
#define TD_KERNELS_CUDA_GEMM_H

#include "kernels/cuda/port.h"

__host__ __device__ static inline int64_t td_cuda_k_stride(int32_t n_in)
{
    return ((int64_t)n_in + 7) / 8 * 8;
}

/* Quantised weights are widened to bf16 in chunks of 32 (quant.h): their rows are whole chunks. */
__host__ __device__ static inline int64_t td_cuda_quant_k_stride(int32_t n_in)
{
    return ((int64_t)n_in + 31) / 32 * 32;
}

/* How rows are prepared for w: the elements from one to the next, and whether they are bf16. */
static inline int64_t td_cuda_x_stride(const struct td_weight *w)
{
    return w->format->dtype ? td_cuda_k_stride(w->n_in) : td_cuda_quant_k_stride(w->n_in);
}

static inline bool td_cuda_x_is_bf16(const struct td_weight *w)
{
    return w->format->dtype == TD_BF16 || !w->format->dtype;
}

struct td_gemm_params {
    const void *w, *x; /* packed weight; prepared rows */
    const float *bias; /* or NULL */
    float *y;
    int64_t y_stride, k_stride;
    int32_t n_out, n_in, n_rows;
    enum td_dtype w_dtype;
    bool accumulate;
    /* NULL; or the dot of row m and output n is still to be multiplied by x_scale[m] and the number
     * at w_scale + n * w_scale_stride bytes: rounded codes of both */
    const float *x_scale;
    const uint8_t *w_scale;
    int64_t w_scale_stride;
};

/* Products of groups of rows, each with a weight of its own (the rows of a mixture's experts). A
 * tile is {group, first row, rows}, at most tile_rows of one group; group -1: none, this one and
 * those behind it. The tiles are on the device: a launch has n_tiles of them, whatever the sizes of
 * the groups. */
#define TD_GEMM_TILE_INTS 3
struct td_gemm_groups {
    const int32_t *tiles;
    int64_t w_stride; /* bytes from a group's weight to the next one's */
    int32_t n_tiles, tile_rows;
};

/* Rows of a tile: what a group has on average, so that no tile is much wider than its rows. Any
 * choice gives the same bits. */
static inline int32_t td_cuda_tile_rows(int64_t n_rows, int32_t n_groups)
{
    int64_t mean = n_rows / n_groups;
    return mean <= 8 ? 8 : mean <= 16 ? 16 : mean <= 64 ? 32 : 128;
}

/* The tiles that n_rows make at most: one for each group with rows, and more for full ones. */
static inline int32_t td_cuda_n_tiles(int64_t n_rows, int32_t n_groups)
{
    int64_t busy = n_rows < n_groups ? n_rows : n_groups;
    return (int32_t)(busy + (n_rows - busy) / td_cuda_tile_rows(n_rows, n_groups));
}

/* The same for any number of rows up to n_rows. */
static inline int64_t td_cuda_tiles_max(int64_t n_rows, int32_t n_groups)
{
    int64_t busy = n_rows < n_groups ? n_rows : n_groups;
    return 3 * busy + n_rows / 128; /* 64 rows a group, in tiles of 32, are the most beside 128 */
}

static inline struct td_gemm_groups td_cuda_groups_of(const struct td_device_experts_order *o,
                                                      int64_t w_stride)
{
    int64_t n_pairs = (int64_t)o->n_rows * o->n_used;
    struct td_gemm_groups g = {};
    g.tiles = o->tiles, g.w_stride = w_stride;
    g.n_tiles = td_cuda_n_tiles(n_pairs, o->n_experts),
    g.tile_rows = td_cuda_tile_rows(n_pairs, o->n_experts);
    return g;
}

/* Makes *p the product of tile `tile`. False: there is none. */
__device__ static inline bool td_cuda_gemm_take_tile(const struct td_gemm_groups *g, int32_t tile,
                                                     struct td_gemm_params *p)
{
    const int32_t *t = g->tiles + TD_GEMM_TILE_INTS * tile;
    if (t[0] < 0) return false;
    int64_t x_bytes = p->k_stride * (p->w_dtype == TD_BF16 ? 2 : 4);
    p->w = (const uint8_t *)p->w + t[0] * g->w_stride;
    p->x = (const uint8_t *)p->x + t[1] * x_bytes;
    p->y = p->y + t[1] * p->y_stride;
    p->n_rows = t[2];
    return true;
}

/* gemm.cu, gemm_mma.cu: p has no bias and adds nothing; each row has the bits that td_cuda_gemm_run
 * gives it by the way `own` (on an emulated device `plain`, where that is chosen). */
void td_cuda_gemm_grouped(const struct td_gemm_params *p, const struct td_gemm_groups *g);
void td_cuda_gemm_mma_grouped(const struct td_gemm_params *p, const struct td_gemm_groups *g);

void td_cuda_gemm_mma(const struct td_gemm_params *p); /* gemm_mma.cu: a BF16 weight, any number
                                                          of rows */
/* gemm.cu: what `a` asks for, a quantised weight as the BF16 one that it is widened to; the product
 * in the way that is chosen for it; and whether that is the tensor cores' own order of sums */
struct td_gemm_params td_cuda_gemm_params_of(const struct td_gemm_args *a);
void td_cuda_gemm_run(const struct td_gemm_params *p);
bool td_cuda_gemm_is_own(const struct td_gemm_params *p);
/* The sums of codes of 8 bits by cuBLASLt: w [n_out] rows of w_stride bytes, x [n_rows] rows of
 * x_stride, both with n_in columns, a multiple of 16; I8: int32 sums, else E4M3 and f32 ones, to
 * sums [n_rows, n_out]. False: this way is not the one that is chosen, or the library refuses. */
struct td_gemm_codes {
    const void *w, *x;
    void *sums;
    int64_t w_stride, x_stride;
    int32_t n_out, n_in, n_rows;
    bool is_i8;
};
bool td_cuda_gemm_uses_cublas(void);
bool td_cuda_gemm_codes(const struct td_gemm_codes *c);

/* y[m,n] = dot (+ bias) (+ y): the end of every product of our own kernels. Indices outside of y
 * write nothing. */
__device__ static inline void td_cuda_gemm_store(const struct td_gemm_params *p, int32_t m,
                                                 int32_t n, float dot)
{
    if (m >= p->n_rows || n >= p->n_out) return;
    float *y = p->y + m * p->y_stride + n;
    if (p->x_scale)
        dot = dot *
              (p->x_scale[m] * *(const float *)(const void *)(p->w_scale + n * p->w_scale_stride));
    if (p->bias) dot = dot + p->bias[n];
    *y = p->accumulate ? *y + dot : dot;
}

/* f16 to f32, exactly, as td_f16_to_f32 of kernels/part.h. */
__host__ __device__ static inline float td_cuda_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (uint32_t)(h >> 10) & 31u,
             mantissa = h & 0x3ffu, u;
    float f;
    if (exponent == 0) { /* zero and subnormals */
        f = (float)mantissa * 0x1p-24f;
        memcpy(&u, &f, sizeof u);
        u |= sign;
    } else {
        u = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112u) << 23) | mantissa << 13;
    }
    memcpy(&f, &u, sizeof f);
    return f;
}

__host__ __device__ static inline float td_cuda_widen16(uint16_t h, bool is_bf16)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return is_bf16 ? f : td_cuda_f16_to_f32(h);
}

/* Element i of an array of `dtype`, widened exactly. */
__host__ __device__ static inline float td_cuda_widen(const void *data, enum td_dtype dtype,
                                                      int64_t i)
{
    return dtype == TD_F32 ? ((const float *)data)[i]
                           : td_cuda_widen16(((const uint16_t *)data)[i], dtype == TD_BF16);
}

#endif
