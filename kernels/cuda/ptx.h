/* ptx.h - the GPU's special instructions, each under a td_ name, with a twin for the emulated GPU
 * that has the same layout and catches the same mistakes.
 *
 * Why here: CUDA C has no functions for tensor cores and asynchronous copies. A kernel calls
 * td_mma_m16n8k16_bf16; nvcc emits the instruction, and the host runs the twin
 * (tests/fake/cuda_emu/ptx.c), so that a fragment in the wrong lane is found on any machine. Source
 * of the layouts: NVIDIA's PTX ISA, the tables of each instruction; tests/unit/cuda_emu_test.cu
 * writes them down a second time.
 *
 * Fragments. lane = 4 * g + t, g in 0..7, t in 0..3. A register of two bf16 holds the lower column
 * (for B the lower row) in its lower half.
 *   A 16x16  a[0]: row g,   columns 2t, 2t+1      a[1]: row g+8, columns 2t, 2t+1
 *            a[2]: row g,   columns 2t+8, 2t+9    a[3]: row g+8, columns 2t+8, 2t+9
 *   B 16x8   b[0]: rows 2t, 2t+1 of column g      b[1]: rows 2t+8, 2t+9 of column g
 *   C 16x8   c[0], c[1]: row g,   columns 2t, 2t+1
 *            c[2], c[3]: row g+8, columns 2t, 2t+1
 *   8x8 of ldmatrix: r[i] is the two elements at columns 2t, 2t+1 of row g of matrix i (trans: rows
 *   2t, 2t+1 of column g); lane l gives the address of row l % 8 of matrix l / 8.
 * So ldmatrix_x4 with row addresses (row l % 16, column half l / 16) gives an A; plain ldmatrix of
 * W[n][k] gives B = W^T, and trans of V[k][n] gives B = V.
 *
 * Asynchronous copies. From the issue until the wait that covers it, the destination is undefined
 * on a GPU. In the emulation it holds NaN, so that a missing wait shows, and so does an issue
 * before the last reader is done. A wait for a thread's own copies says nothing about other
 * threads' copies: a barrier must follow. */
#ifndef TD_KERNELS_CUDA_PTX_H
#define TD_KERNELS_CUDA_PTX_H

#include "kernels/cuda/port.h"

#ifdef TD_CUDA_EMULATE
#include "tests/fake/cuda_emu/ptx.h"
#else

__device__ __forceinline__ uint32_t td_shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- tensor cores (sm_80) */

/* row: 16 bytes of one row, in shared memory, aligned to 16. */
__device__ __forceinline__ void td_ldmatrix_x4(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(td_shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void td_ldmatrix_x4_trans(uint32_t r[4], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(td_shared_address(row))
                 : "memory");
}

/* Uses the addresses of lanes 0..15; those of other lanes are ignored. */
__device__ __forceinline__ void td_ldmatrix_x2(uint32_t r[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(td_shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void td_ldmatrix_x2_trans(uint32_t r[2], const void *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(td_shared_address(row))
                 : "memory");
}

/* d = a b + c; d may be c. The order in which a tensor core adds is not documented: equal inputs
 * give equal bits, the same sum in another order may not. */
__device__ __forceinline__ void td_mma_m16n8k16_bf16(float d[4], const uint32_t a[4],
                                                     const uint32_t b[2], const float c[4])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %11, %12, %13};\n"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]),
          "f"(c[2]), "f"(c[3]));
}

/* Two floats rounded to nearest even, lo in the lower half. */
__device__ __forceinline__ uint32_t td_pack_bf16x2(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* 2^x with an error of about 2 ulp. Denormals are flushed to zero, in the input and in the
 * result. */
__device__ __forceinline__ float td_exp2(float x)
{
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(x));
    return r;
}

/* ---- copies of 16 bytes from global to shared memory (sm_80), both aligned to 16. If not
 * is_valid: writes zeros and does not read gmem. */

__device__ __forceinline__ void td_cp_async_16(void *smem, const void *gmem, bool is_valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(td_shared_address(smem)),
                 "l"(__cvta_generic_to_global(gmem)), "r"(is_valid ? 16 : 0)
                 : "memory");
}

/* Closes the group of this thread's copies since the last commit; an empty group counts. */
__device__ __forceinline__ void td_cp_async_commit(void)
{
    asm volatile("cp.async.commit_group;\n" ::: "memory");
}

/* Blocks until at most N of this thread's latest groups are still being copied. */
template <int N> __device__ __forceinline__ void td_cp_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
}

/* ---- mbarrier and bulk copies (sm_90): one thread starts a copy of kilobytes, and the barrier
 * counts threads and bytes. A phase ends when `count` arrivals and all expected bytes have come.
 * Wait for phase 0 with parity 0, for the next with 1, and so on. */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

/* Called by one thread, which then calls td_mbarrier_init_fence(); a __syncthreads must follow
 * before any use. */
__device__ __forceinline__ void td_mbarrier_init(uint64_t *bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(td_shared_address(bar)),
                 "r"(count)
                 : "memory");
}

__device__ __forceinline__ void td_mbarrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

__device__ __forceinline__ void td_mbarrier_arrive(uint64_t *bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(td_shared_address(bar))
                 : "memory");
}

/* One arrival, and `bytes` more bytes are expected. */
__device__ __forceinline__ void td_mbarrier_arrive_expect_tx(uint64_t *bar, uint32_t bytes)
{
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(td_shared_address(bar)),
        "r"(bytes)
        : "memory");
}

/* True: the phase of this parity is over. The call may block for a short time. */
__device__ __forceinline__ bool td_mbarrier_try_wait_parity(uint64_t *bar, uint32_t parity)
{
    uint32_t is_over;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], "
                 "%2;\nselp.u32 %0, 1, 0, p;\n}\n"
                 : "=r"(is_over)
                 : "r"(td_shared_address(bar)), "r"(parity)
                 : "memory");
    return is_over != 0;
}

/* bytes: a multiple of 16; both ends aligned to 16. The bytes are counted at `bar`. */
__device__ __forceinline__ void td_bulk_copy_g2s(void *smem, const void *gmem, uint32_t bytes,
                                                 uint64_t *bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], "
                 "%2, [%3];\n" ::"r"(td_shared_address(smem)),
                 "l"(__cvta_generic_to_global(gmem)), "r"(bytes), "r"(td_shared_address(bar))
                 : "memory");
}

/* Needed between threads' writes to shared memory and a bulk copy or wgmma that touches the same
 * bytes. */
__device__ __forceinline__ void td_fence_proxy_async(void)
{
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}

#else /* compiled for an older card, where no launch picks a kernel with these */
__device__ __forceinline__ void td_mbarrier_init(uint64_t *, uint32_t) { __trap(); }
__device__ __forceinline__ void td_mbarrier_init_fence(void) { __trap(); }
__device__ __forceinline__ void td_mbarrier_arrive(uint64_t *) { __trap(); }
__device__ __forceinline__ void td_mbarrier_arrive_expect_tx(uint64_t *, uint32_t) { __trap(); }
__device__ __forceinline__ bool td_mbarrier_try_wait_parity(uint64_t *, uint32_t)
{
    __trap();
    return true;
}
__device__ __forceinline__ void td_bulk_copy_g2s(void *, const void *, uint32_t, uint64_t *)
{
    __trap();
}
__device__ __forceinline__ void td_fence_proxy_async(void) { __trap(); }
#endif
#endif

__device__ static inline void td_mbarrier_wait_parity(uint64_t *bar, uint32_t parity)
{
    while (!td_mbarrier_try_wait_parity(bar, parity)) {
    }
}

#endif
