/* emu.h - CUDA's keywords and built-in functions for device code, for the host's C++ compiler. Only
 * port.h includes it.
 *
 * What is missing here is not used in this project's kernels; when a kernel needs it, add it here
 * and nowhere else. block.h says what the emulation checks.
 *
 * Different from a GPU: __expf and similar functions are the host's exact ones, so a tolerance
 * needs a reason that holds on the GPU as well. */
#ifndef TD_KERNELS_CUDA_EMU_EMU_H
#define TD_KERNELS_CUDA_EMU_EMU_H

#ifndef __cplusplus
#error "emu.h is for .cu files compiled as C++"
#endif

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "tests/fake/cuda_emu/block.h"
#include "tests/fake/cuda_emu/runtime.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
/* Static, because one block runs at a time; block.c fills the section with NaN before each. gcc
 * leaves arrays of templates out of the section (they keep what the last block left; clang's build
 * does fill them), and requires functions with such arrays to be static ("section type conflict"
 * otherwise). used: their contents change where the compiler does not see it. */
#define __shared__ static __attribute__((section("td_shared"), used))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

#define threadIdx (td_emu_self->thread_idx)
#define blockIdx (td_emu_self->block->block_idx)
#define blockDim (td_emu_self->block->block_dim)
#define gridDim (td_emu_self->block->grid_dim)
static const int warpSize = 32;

/* ---- launches */

#define TD_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                  \
    td_emu_bind(#kernel, kernel, (grid), (block), (shared_bytes), (stream))(__VA_ARGS__)
#define TD_SHARED_BYTES(type, name) type *name = (type *)(void *)td_emu_self->block->shared

template <class Body> static void td_emu_call(const void *body) { (*(const Body *)body)(); }

template <class... P> struct td_emu_bound {
    const char *name;
    void (*kernel)(P...);
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;

    /* The arguments, converted to the kernel's types and copied, as CUDA does. */
    void operator()(P... args) const
    {
        void (*entry)(P...) = kernel;
        auto body = [entry, args...]() { entry(args...); };
        static_assert(__is_trivially_copyable(decltype(body)),
                      "arguments of a kernel are copied as bytes");
        struct td_emu_dims g = {grid.x, grid.y, grid.z}, b = {block.x, block.y, block.z};
        td_emu_launch(name, (const void *)kernel, g, b, shared_bytes, stream,
                      td_emu_call<decltype(body)>, &body, sizeof body);
    }
};

template <class... P>
static inline td_emu_bound<P...> td_emu_bind(const char *name, void (*kernel)(P...), dim3 grid,
                                             dim3 block, size_t shared_bytes, cudaStream_t stream)
{
    return td_emu_bound<P...>{name, kernel, grid, block, shared_bytes, stream};
}

template <class... P>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...),
                                               enum cudaFuncAttribute attribute, int value)
{
    return cudaFuncSetAttribute((const void *)kernel, attribute, value);
}

/* ---- vectors */

struct alignas(8) float2 {
    float x, y;
};
struct float3 {
    float x, y, z;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct uint3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(4) ushort2 {
    unsigned short x, y;
};
struct alignas(8) ushort4 {
    unsigned short x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

static inline float2 make_float2(float x, float y) { return float2{x, y}; }
static inline float3 make_float3(float x, float y, float z) { return float3{x, y, z}; }
static inline float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return int2{x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return int4{x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return uint4{x, y, z, w};
}
static inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return ushort2{x, y}; }
static inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z,
                                   unsigned short w)
{
    return ushort4{x, y, z, w};
}
static inline double2 make_double2(double x, double y) { return double2{x, y}; }
static inline ulonglong2 make_ulonglong2(unsigned long long x, unsigned long long y)
{
    return ulonglong2{x, y};
}

/* ---- meetings */

static inline void __syncthreads(void) { (void)td_emu_barrier(TD_EMU_SYNCTHREADS, false); }
static inline int __syncthreads_count(int vote)
{
    return (int)td_emu_barrier(TD_EMU_SYNCTHREADS_COUNT, vote != 0);
}
static inline int __syncthreads_or(int vote)
{
    return td_emu_barrier(TD_EMU_SYNCTHREADS_OR, vote != 0) != 0;
}
static inline int __syncthreads_and(int vote)
{
    return td_emu_barrier(TD_EMU_SYNCTHREADS_AND, vote != 0) == td_emu_self->block->n_threads;
}
static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    td_emu_warp_sync(TD_EMU_SYNCWARP, mask);
}

template <class T> static inline uint64_t td_emu_bits(T value)
{
    static_assert(sizeof value <= 8 && __is_trivially_copyable(T),
                  "a shuffle takes 8 bytes at most");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T> static inline T td_emu_value(uint64_t bits)
{
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* `width` cuts the warp into groups of a power of two lanes; for a lane outside the group the
 * result is one's own value. */
static inline unsigned td_emu_group(const char *word, int width)
{
    if (width < 1 || width > 32 || (width & (width - 1)))
        td_emu_die("%s with width %d, must be a power of two up to 32", word, width);
    return (unsigned)width;
}

template <class T> static inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32)
{
    unsigned n = td_emu_group("__shfl_sync", width), me = td_emu_self->lane;
    const uint64_t *all = td_emu_warp_exchange(TD_EMU_SHFL, mask, td_emu_bits(value));
    return td_emu_value<T>(all[(me & ~(n - 1)) | ((unsigned)lane & (n - 1))]);
}

template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    unsigned n = td_emu_group("__shfl_up_sync", width), me = td_emu_self->lane;
    const uint64_t *all = td_emu_warp_exchange(TD_EMU_SHFL_UP, mask, td_emu_bits(value));
    return td_emu_value<T>(all[delta <= (me & (n - 1)) ? me - delta : me]);
}

template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    unsigned n = td_emu_group("__shfl_down_sync", width), me = td_emu_self->lane;
    const uint64_t *all = td_emu_warp_exchange(TD_EMU_SHFL_DOWN, mask, td_emu_bits(value));
    return td_emu_value<T>(all[delta < n - (me & (n - 1)) ? me + delta : me]);
}

/* For a partner in a later group the result is one's own value; for one in an earlier group it is
 * the partner's, as in PTX (shfl.bfly reads lanes up to the group's end). */
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32)
{
    unsigned n = td_emu_group("__shfl_xor_sync", width), me = td_emu_self->lane,
             partner = me ^ (unsigned)lane_mask;
    const uint64_t *all = td_emu_warp_exchange(TD_EMU_SHFL_XOR, mask, td_emu_bits(value));
    return td_emu_value<T>(all[partner <= (me | (n - 1)) ? partner : me]);
}

static inline unsigned __ballot_sync(unsigned mask, int vote)
{
    return td_emu_warp_ballot(TD_EMU_BALLOT, mask, vote != 0);
}
static inline int __any_sync(unsigned mask, int vote)
{
    return td_emu_warp_ballot(TD_EMU_ANY, mask, vote != 0) != 0;
}
static inline int __all_sync(unsigned mask, int vote)
{
    return td_emu_warp_ballot(TD_EMU_ALL, mask, vote != 0) == 0xffffffffu;
}
/* Nothing promises which lanes run together. */
#define __activemask() static_assert(false, "__activemask: kernels here take full masks only")

template <class T> static inline T td_emu_reduce(unsigned mask, T value, T (*join)(T, T))
{
    const uint64_t *all = td_emu_warp_exchange(TD_EMU_REDUCE, mask, td_emu_bits(value));
    T sum = td_emu_value<T>(all[0]);
    for (int i = 1; i < 32; i++) sum = join(sum, td_emu_value<T>(all[i]));
    return sum;
}
static inline unsigned __reduce_add_sync(unsigned mask, unsigned v)
{
    return td_emu_reduce<unsigned>(mask, v, [](unsigned a, unsigned b) { return a + b; });
}
static inline unsigned __reduce_max_sync(unsigned mask, unsigned v)
{
    return td_emu_reduce<unsigned>(mask, v, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
static inline unsigned __reduce_min_sync(unsigned mask, unsigned v)
{
    return td_emu_reduce<unsigned>(mask, v, [](unsigned a, unsigned b) { return a < b ? a : b; });
}
static inline int __reduce_add_sync(unsigned mask, int v)
{
    return (int)__reduce_add_sync(mask, (unsigned)v);
}
static inline int __reduce_max_sync(unsigned mask, int v)
{
    return td_emu_reduce<int>(mask, v, [](int a, int b) { return a > b ? a : b; });
}
static inline int __reduce_min_sync(unsigned mask, int v)
{
    return td_emu_reduce<int>(mask, v, [](int a, int b) { return a < b ? a : b; });
}

static inline void __threadfence(void) { td_emu_fence(); }
static inline void __threadfence_block(void) { td_emu_fence(); }
static inline void __threadfence_system(void) { td_emu_fence(); }

/* ---- atomics: real ones, because kernels of two host threads may share memory */

template <class T, class F> static inline T td_emu_atomic(T *p, F next)
{
    T old = __atomic_load_n(p, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(p, &old, next(old), false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {
    }
    return old;
}

#define TD_EMU_ATOMICS(T)                                                                          \
    static inline T atomicAdd(T *p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }    \
    static inline T atomicExch(T *p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }  \
    static inline T atomicOr(T *p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }      \
    static inline T atomicAnd(T *p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_RELAXED); }    \
    static inline T atomicXor(T *p, T v) { return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED); }    \
    static inline T atomicMax(T *p, T v)                                                           \
    {                                                                                              \
        return td_emu_atomic(p, [v](T old) { return old > v ? old : v; });                         \
    }                                                                                              \
    static inline T atomicMin(T *p, T v)                                                           \
    {                                                                                              \
        return td_emu_atomic(p, [v](T old) { return old < v ? old : v; });                         \
    }                                                                                              \
    static inline T atomicCAS(T *p, T expected, T v)                                               \
    {                                                                                              \
        __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);   \
        return expected;                                                                           \
    }
TD_EMU_ATOMICS(int)
TD_EMU_ATOMICS(unsigned)
TD_EMU_ATOMICS(unsigned long long)
#undef TD_EMU_ATOMICS
static inline int atomicSub(int *p, int v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }
static inline unsigned atomicSub(unsigned *p, unsigned v)
{
    return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED);
}
/* 0 after `last`: the last block of a grid finds itself by it. */
static inline unsigned atomicInc(unsigned *p, unsigned last)
{
    return td_emu_atomic(p, [last](unsigned old) { return old >= last ? 0u : old + 1; });
}

static inline float atomicAdd(float *p, float v)
{
    uint32_t old = td_emu_atomic((uint32_t *)(void *)p, [v](uint32_t bits) {
        float f;
        memcpy(&f, &bits, sizeof f);
        f += v;
        memcpy(&bits, &f, sizeof f);
        return bits;
    });
    float f;
    memcpy(&f, &old, sizeof f);
    return f;
}

/* ---- bits, loads, arithmetic */

template <class T> static inline T __ldg(const T *p) { return *p; }
template <class T> static inline T __ldcs(const T *p) { return *p; }
template <class T> static inline T __ldcg(const T *p) { return *p; }
template <class T> static inline void __stcs(T *p, T v) { *p = v; }
template <class T> static inline void __stcg(T *p, T v) { *p = v; }

static inline unsigned __float_as_uint(float f) { return td_emu_value<unsigned>(td_emu_bits(f)); }
static inline int __float_as_int(float f) { return td_emu_value<int>(td_emu_bits(f)); }
static inline float __uint_as_float(unsigned u) { return td_emu_value<float>(u); }
static inline float __int_as_float(int i) { return td_emu_value<float>(td_emu_bits(i)); }
static inline long long __double_as_longlong(double d)
{
    return td_emu_value<long long>(td_emu_bits(d));
}
static inline double __longlong_as_double(long long l)
{
    return td_emu_value<double>(td_emu_bits(l));
}

static inline int __dp4a(int a, int b, int sum) /* of signed bytes */
{
    for (int i = 0; i < 32; i += 8) sum += (int8_t)(a >> i) * (int8_t)(b >> i);
    return sum;
}
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll((unsigned long long)v) : 64; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __ffsll(long long v) { return __builtin_ffsll(v); }
static inline unsigned __brev(unsigned v)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (v >> i & 1u) << (31 - i);
    return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b)
{
    return (unsigned)((uint64_t)a * b >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n)
{
    return (unsigned)((((uint64_t)hi << 32 | lo) << (n & 31)) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n)
{
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (n & 31));
}

/* As fmaxf and fminf: of a number and a NaN they return the number. The C library's are calls,
 * which took a tenth of the emulated kernels' time. */
static inline float td_emu_fmaxf(float a, float b) { return a > b || b != b ? a : b; }
static inline float td_emu_fminf(float a, float b) { return a < b || b != b ? a : b; }
#define fmaxf td_emu_fmaxf
#define fminf td_emu_fminf
#define __expf expf /* macros: the C library has hidden names like these */
#define __logf logf
#define __log2f log2f
#define __sinf sinf
#define __cosf cosf
#define __powf powf
#define __exp10f exp10f
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __frsqrt_rn(float x) { return (float)(1.0 / sqrt((double)x)); }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
static inline int __float2int_rn(float x) { return (int)rintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }

#define TD_EMU_MIN_MAX(T)                                                                          \
    static inline T min(T a, T b) { return b < a ? b : a; }                                        \
    static inline T max(T a, T b) { return a < b ? b : a; }
TD_EMU_MIN_MAX(int)
TD_EMU_MIN_MAX(unsigned)
TD_EMU_MIN_MAX(long)
TD_EMU_MIN_MAX(unsigned long)
TD_EMU_MIN_MAX(long long)
TD_EMU_MIN_MAX(unsigned long long)
#undef TD_EMU_MIN_MAX
/* of a number and NaN: the number, as on the device */
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

#endif
