/* port.h - the subset of CUDA that every .cu of this folder is written in, so that two compilers
 * take it.
 *
 * Why here: no ordinary machine has a GPU. So each .cu compiles with nvcc (libtandem_cuda.so) and,
 * as C++ with -DTD_CUDA_EMULATE, with the host's compiler (libtandem_cuda_emu.so). In the second,
 * tests/fake/cuda_emu supplies the rest: emu.h has blocks, warps, shared memory, barriers, shuffles
 * and atomics, runtime.h the runtime calls, and ptx.h's special instructions have twins with the
 * same layout of fragments. A .cu may use what stands here and in ptx.h, and nothing else.
 *
 * Rules for .cu files. C style, no STL; templates only over constants. Explicit fmaf() (nvcc runs
 * with -fmad=false, the host's compiler with -ffp-contract=off). Only TD_LAUNCH, never <<<>>>.
 * Shared memory: TD_SHARED_BYTES for the dynamic bytes of a launch, __shared__ for small fixed
 * arrays. Every warp operation takes the full mask (0xffffffff). A pointer in a kernel is device
 * memory. 16-bit floats are uint16_t, converted by td_cu_bf16_to_f32 and its companions. */
#ifndef TD_KERNELS_CUDA_PORT_H
#define TD_KERNELS_CUDA_PORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef TD_CUDA_EMULATE
/* __global__, threadIdx .., __syncthreads, __shfl_*_sync, atomics, TD_LAUNCH, TD_SHARED_BYTES */
#include "tests/fake/cuda_emu/emu.h"
/* cudaMalloc, streams, events, graphs, IPC: the calls we use, on the host */
#include "tests/fake/cuda_emu/runtime.h"

#define TD_LAUNCH_EARLY(is_early, kernel, grid, block, shared_bytes, stream, ...)                  \
    do {                                                                                           \
        td_emu_next_is_early(is_early);                                                            \
        TD_LAUNCH(kernel, grid, block, shared_bytes, stream, __VA_ARGS__);                         \
    } while (0)
static inline void td_wait_for_previous(void) {}
#else
#include <cuda_runtime.h>

#define TD_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                  \
    kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)

/* A launch that may begin while the kernel before it on the stream ends (is_early; sm_90). Every
 * thread of such a kernel calls td_wait_for_previous() before it touches anything that an earlier
 * kernel writes or reads; no kernel writes weights. A kernel launched otherwise waits for all
 * kernels before it, as usual. */
template <class... P, class... A>
static inline void td_launch_early(bool is_early, void (*kernel)(P...), dim3 grid, dim3 block,
                                   size_t shared_bytes, cudaStream_t stream, A... args)
{
    cudaLaunchAttribute attribute = {};
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared_bytes,
    config.stream = stream;
    config.attrs = &attribute, config.numAttrs = is_early ? 1 : 0;
    /* TD_LAUNCHED checks for the error */
    (void)cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}
#define TD_LAUNCH_EARLY(is_early, kernel, grid, block, shared_bytes, stream, ...)                  \
    td_launch_early((is_early), (kernel), (grid), (block), (shared_bytes), (stream), __VA_ARGS__)

/* Returns when everything before this kernel is done and visible. The next kernel may then begin,
 * up to its own call of this. */
__device__ static inline void td_wait_for_previous(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* `name`: this block's dynamic shared memory as an array of `type`, aligned to 128 bytes. */
#define TD_SHARED_BYTES(type, name)                                                                \
    extern __shared__ __align__(128) uint8_t td_shared_bytes_[];                                   \
    type *name = (type *)td_shared_bytes_
#endif

#ifdef __cplusplus
extern "C" {
#define _Noreturn
#define _Static_assert static_assert
#include "common/base/device_memory.h"
#include "common/base/dtype.h"
#include "common/base/status.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#undef _Noreturn
}
#endif

/* bf16 as in common/base/dtype.h, for nvcc and for the host's compiler. */
__device__ static inline float td_cu_bf16_to_f32(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

__device__ static inline uint16_t td_cu_f32_to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

#endif
