/* gemm_order.h - the one order of sums that all bf16 products on tensor cores have (gemm_mma.cu
 * says which and why), for the kernels that read bf16 weights and for those that widen codes on the
 * way (quant.cu): equal inputs then give equal bits. */
#ifndef TD_KERNELS_CUDA_GEMM_ORDER_H
#define TD_KERNELS_CUDA_GEMM_ORDER_H

#include "kernels/cuda/gemm.h"
#include "kernels/cuda/ptx.h"

#define CHUNK 32 /* elements of k: one 64-byte run of a row */
#define SLICES 8
#define THREADS 256
#define WARP 32

/* Chunks in a slice; the last slices may be empty. */
__host__ __device__ static inline int32_t chunks_of(int64_t k_stride)
{
    return (int32_t)((k_stride + CHUNK - 1) / CHUNK);
}

__host__ __device__ static inline int32_t slice_chunks(int64_t k_stride)
{
    return (chunks_of(k_stride) + SLICES - 1) / SLICES;
}

/* acc[16 outputs x 8 rows] += one chunk: lo, hi are the lane's 16 bytes of outputs g and g + 8,
 * x of row g. */
__device__ static inline void mma_chunk(float *acc, uint4 lo, uint4 hi, uint4 x)
{
    uint32_t a0[4] = {lo.x, hi.x, lo.y, hi.y}, b0[2] = {x.x, x.y};
    uint32_t a1[4] = {lo.z, hi.z, lo.w, hi.w}, b1[2] = {x.z, x.w};
    td_mma_m16n8k16_bf16(acc, a0, b0, acc);
    td_mma_m16n8k16_bf16(acc, a1, b1, acc);
}

#endif
