/* quads.h - pieces of rows, for kernels that work on one element after another (rows.cu,
 * experts.cu): n elements are handled in groups of 4 ("quads") or 8. The last group may be short;
 * `n_valid` says how many of its elements exist. */
#ifndef TD_KERNELS_CUDA_QUADS_H
#define TD_KERNELS_CUDA_QUADS_H

#include "kernels/cuda/gemm.h"

#define FLAT_THREADS 256 /* of a block whose threads each have a quad */
#define WARP 32

__host__ __device__ static inline bool aligned_to(const void *p, int64_t stride_bytes, int64_t unit)
{
    return ((uintptr_t)p % (uintptr_t)unit) == 0 && stride_bytes % unit == 0;
}

__host__ __device__ static inline int32_t min_i32(int32_t a, int32_t b) { return a < b ? a : b; }

/* Loads four neighbours; those past n_valid are 0. vector: p is 16-byte aligned. */
__device__ static inline void load4(const float *p, bool vector, int32_t n_valid, float *ret_v)
{
    if (vector && n_valid >= 4) {
        float4 q = *(const float4 *)p;
        ret_v[0] = q.x, ret_v[1] = q.y, ret_v[2] = q.z, ret_v[3] = q.w;
    } else {
        for (int i = 0; i < 4; i++) ret_v[i] = i < n_valid ? p[i] : 0.0f;
    }
}

__device__ static inline void store4(float *p, bool vector, int32_t n_valid, const float *v)
{
    if (vector && n_valid >= 4) {
        *(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
    } else {
        for (int i = 0; i < 4; i++)
            if (i < n_valid) p[i] = v[i];
    }
}

__device__ static inline uint32_t pack2(float lo, float hi)
{
    return (uint32_t)td_cu_f32_to_bf16(lo) | (uint32_t)td_cu_f32_to_bf16(hi) << 16;
}

/* Stores four neighbours rounded to bf16. vector: p is 8-byte aligned. */
__device__ static inline void store4_bf16(uint16_t *p, bool vector, int32_t n_valid, const float *v)
{
    if (vector && n_valid >= 4) {
        uint2 q;
        q.x = pack2(v[0], v[1]), q.y = pack2(v[2], v[3]);
        *(uint2 *)p = q;
    } else {
        for (int i = 0; i < 4; i++)
            if (i < n_valid) p[i] = td_cu_f32_to_bf16(v[i]);
    }
}

/* Stores quad `q` of a prepared row, with zeros from n_in up to the stride. The stride is a
 * multiple of 8 and the scratch is 64-byte aligned, so quads are whole and aligned. */
__device__ static inline void prepare4(void *row, bool is_bf16, int32_t q, const float *v)
{
    if (is_bf16)
        store4_bf16((uint16_t *)row + 4 * (int64_t)q, true, 4, v);
    else
        store4((float *)row + 4 * (int64_t)q, true, 4, v);
}

__device__ static inline void *prepared_row(void *scratch, bool is_bf16, int32_t row,
                                            int64_t k_stride)
{
    return (uint8_t *)scratch + (int64_t)row * k_stride * (is_bf16 ? 2 : 4);
}

static inline int32_t round_up(int32_t n, int32_t unit) { return (n + unit - 1) / unit * unit; }

static inline unsigned n_blocks(int64_t n_items, int64_t per_block)
{
    return (unsigned)((n_items + per_block - 1) / per_block);
}

#endif
