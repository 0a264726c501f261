/* The emulated GPU itself: what kernels/cuda relies on, checked with kernels whose results are
 * known; and that wrong kernels and wrong calls are found out. The layouts of fragments are
 * written down here a second time, element by element, from the tables of the PTX ISA. */
#include "common/base/random.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/ptx.h"
#include "kernels/cuda/wgmma.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <pthread.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern "C" {
#include <cmocka.h>
}

#define OK(call) assert_int_equal((call), cudaSuccess)
enum { FULL = -1 };

static uint64_t random_state = 1;

static uint32_t random_u32(void)
{
    td_random_step(&random_state);
    return (uint32_t)(random_state >> 33);
}

static void set_env(const char *name, const char *value)
{
    int n;
    if (value)
        setenv(name, value, 1);
    else
        unsetenv(name);
    (void)cudaGetDeviceCount(&n); /* reads it */
    (void)cudaGetLastError();
}

static void set_seed(unsigned seed)
{
    char text[16];
    snprintf(text, sizeof text, "%u", seed);
    setenv("TD_CUDA_EMU_SEED", text, 1);
}

template <class T> static T *device_of(const T *host, size_t n)
{
    T *device = NULL;
    OK(cudaMalloc(&device, n * sizeof *device));
    if (host) OK(cudaMemcpy(device, host, n * sizeof *device, cudaMemcpyHostToDevice));
    return device;
}

template <class T> static void fetch(T *host, const T *device, size_t n)
{
    OK(cudaMemcpy(host, device, n * sizeof *host, cudaMemcpyDeviceToHost));
}

/* ---- blocks, barriers, warp words */

__global__ void fill(uint32_t *out, uint32_t n)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = i * 3 + 1;
}

static void test_every_thread_runs_once(void **state)
{
    (void)state;
    enum { N = 1000 };
    uint32_t host[N], *device = device_of<uint32_t>(NULL, N);
    TD_LAUNCH(fill, (N + 127) / 128, 128, 0, 0, device, N);
    OK(cudaGetLastError());
    fetch(host, device, N);
    for (uint32_t i = 0; i < N; i++) assert_int_equal(host[i], i * 3 + 1);
    OK(cudaFree(device));
}

__global__ void count_visits(uint32_t *visits)
{
    uint32_t block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    uint32_t thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    atomicAdd(&visits[block * blockDim.x * blockDim.y * blockDim.z + thread], 1u);
}

static void test_indices_in_three_dimensions(void **state)
{
    (void)state;
    enum { N = 3 * 2 * 4 * 5 * 3 * 2 };
    static const uint32_t zeros[N] = {0};
    uint32_t host[N], *device = device_of(zeros, N);
    TD_LAUNCH(count_visits, dim3(3, 2, 4), dim3(5, 3, 2), 0, 0, device);
    fetch(host, device, N);
    for (int i = 0; i < N; i++) assert_int_equal(host[i], 1);
    OK(cudaFree(device));
}

/* Sums n numbers per block: shared memory, barriers and shuffles as kernels use them. */
template <int THREADS, bool HAS_BARRIER> __global__ void sum_rows(float *out, const float *x, int n)
{
    TD_SHARED_BYTES(float, parts);
    float sum = 0;
    for (int i = (int)threadIdx.x; i < n; i += THREADS)
        sum += x[blockIdx.x * (unsigned)n + (unsigned)i];
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    if (HAS_BARRIER) __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0;
        for (int w = 0; w < THREADS / 32; w++) sum += parts[w];
        out[blockIdx.x] = sum;
    }
}

/* With the barrier every seed gives the sum; without it some seed must not. */
static void test_missing_barrier_is_found(void **state)
{
    (void)state;
    enum { ROWS = 5, N = 777, SEEDS = 8 };
    static float x[ROWS * N];
    for (int i = 0; i < ROWS * N; i++) x[i] = (float)(i % 7);
    float out[ROWS], *dx = device_of(x, ROWS * N), *dout = device_of<float>(NULL, ROWS);
    int n_wrong = 0;
    for (unsigned seed = 1; seed <= SEEDS; seed++) {
        set_seed(seed);
        for (int has_barrier = 0; has_barrier < 2; has_barrier++) {
            if (has_barrier)
                TD_LAUNCH((sum_rows<256, true>), ROWS, 256, 256 / 32 * sizeof(float), 0, dout, dx,
                          N);
            else
                TD_LAUNCH((sum_rows<256, false>), ROWS, 256, 256 / 32 * sizeof(float), 0, dout, dx,
                          N);
            fetch(out, dout, ROWS);
            for (int r = 0; r < ROWS; r++) {
                float want = 0;
                for (int i = 0; i < N; i++) want += x[r * N + i];
                if (has_barrier)
                    assert_true(out[r] == want);
                else
                    n_wrong += out[r] != want; /* NaN, where the poison of shared memory was
                                                  read */
            }
        }
    }
    unsetenv("TD_CUDA_EMU_SEED");
    assert_true(n_wrong > ROWS * SEEDS / 2);
    OK(cudaFree(dx));
    OK(cudaFree(dout));
}

/* The neighbour's value through shared memory within a warp: needs __syncwarp. */
template <bool HAS_SYNC> __global__ void rotate(uint32_t *out)
{
    TD_SHARED_BYTES(uint32_t, x);
    x[threadIdx.x] = threadIdx.x;
    if (HAS_SYNC) __syncwarp();
    out[threadIdx.x] = x[(threadIdx.x + 1) % 32];
}

static void test_missing_syncwarp_is_found(void **state)
{
    (void)state;
    uint32_t out[32], *device = device_of<uint32_t>(NULL, 32);
    TD_LAUNCH((rotate<true>), 1, 32, 32 * 4, 0, device);
    fetch(out, device, 32);
    for (uint32_t i = 0; i < 32; i++) assert_int_equal(out[i], (i + 1) % 32);
    TD_LAUNCH((rotate<false>), 1, 32, 32 * 4, 0, device);
    fetch(out, device, 32);
    int n_wrong = 0;
    for (uint32_t i = 0; i < 32; i++) n_wrong += out[i] != (i + 1) % 32;
    assert_true(n_wrong > 0);
    OK(cudaFree(device));
}

static __global__ void leave_behind(uint32_t *out)
{
    enum { N = 7 };
    __shared__ uint32_t fixed[N];
    TD_SHARED_BYTES(uint32_t, s);
    out[blockIdx.x * 2] = fixed[N - 1];
    out[blockIdx.x * 2 + 1] = s[3];
    fixed[N - 1] = s[3] = 1;
}

static void test_shared_memory_starts_as_nan(void **state)
{
    (void)state;
    uint32_t out[6], *device = device_of<uint32_t>(NULL, 6);
    TD_LAUNCH(leave_behind, 3, 1, 16, 0, device);
    fetch(out, device, 6);
    for (int i = 0; i < 6; i++) assert_int_equal(out[i], 0xffffffffu);
    OK(cudaFree(device));
}

enum { WORDS = 16 };

__global__ void all_words(uint64_t *out)
{
    unsigned l = threadIdx.x % 32, i = threadIdx.x;
    uint64_t *o = out + (size_t)i * WORDS;
    o[0] = (uint64_t)__shfl_sync(FULL, (int)i, 5);
    o[1] = (uint64_t)(int64_t)__shfl_up_sync(FULL, -(int)i, 3);
    o[2] = __shfl_down_sync(FULL, i * 10ull, 7);
    o[3] = (uint64_t)__shfl_xor_sync(FULL, (float)i, 9);
    o[4] = __shfl_xor_sync(FULL, (uint64_t)i << 40, 16) >> 40;
    o[5] = (uint64_t)__shfl_sync(FULL, (double)i, 2, 8);
    o[6] = __shfl_down_sync(FULL, i, 3, 4);
    o[7] = __ballot_sync(FULL, l % 3 == 0);
    o[8] = (uint64_t)__any_sync(FULL, i == 40) * 2 + (uint64_t)__all_sync(FULL, i < 32);
    o[9] = __reduce_add_sync(FULL, i);
    o[10] = (uint64_t)__reduce_max_sync(FULL, (int)i - 100) + 1000;
    o[11] = (uint64_t)__syncthreads_count(i % 5 == 0);
    o[12] = (uint64_t)__syncthreads_or(i == 63) * 2 + (uint64_t)__syncthreads_and(i < 63);
    o[13] = __shfl_up_sync(FULL, i, 1u, 16);
    o[14] = (uint64_t)(__popc(0xf0f0u) + 100 * __clz(1) + 10000 * __ffs(8));
    o[15] = __umulhi(0xd2511f53u, 0x12345678u);
}

static void test_words_of_a_warp(void **state)
{
    (void)state;
    enum { N = 64 };
    static uint64_t out[N * WORDS];
    for (unsigned seed = 1; seed < 4; seed++) {
        set_seed(seed);
        uint64_t *device = device_of<uint64_t>(NULL, N * WORDS);
        TD_LAUNCH(all_words, 1, N, 0, 0, device);
        fetch(out, device, N * WORDS);
        for (unsigned i = 0; i < N; i++) {
            const uint64_t *o = out + i * WORDS;
            unsigned l = i % 32, base = i - l;
            assert_int_equal(o[0], base + 5);
            assert_int_equal((int64_t)o[1], -(int)(l >= 3 ? i - 3 : i));
            assert_int_equal(o[2], 10 * (l + 7 < 32 ? i + 7 : i));
            assert_int_equal(o[3], i ^ 9);
            assert_int_equal(o[4], i ^ 16);
            assert_int_equal(o[5], (i & ~7u) + 2);
            assert_int_equal(o[6], l % 4 == 0 ? i + 3 : i);
            assert_int_equal(o[7], 0x49249249u);
            assert_int_equal(o[8], base ? 2 : 1);
            assert_int_equal(o[9], 32 * base + 496);
            assert_int_equal(o[10], 1000 + base + 31 - 100);
            assert_int_equal(o[11], 13);
            assert_int_equal(o[12], 2);
            assert_int_equal(o[13], l % 16 ? i - 1 : i);
            assert_int_equal(o[14], 8 + 3100 + 40000);
            assert_int_equal(o[15], (uint64_t)0xd2511f53u * 0x12345678u >> 32);
        }
        OK(cudaFree(device));
    }
    unsetenv("TD_CUDA_EMU_SEED");
}

__global__ void atomics(uint32_t *u, float *f, int *least, unsigned long long *most,
                        uint32_t *order)
{
    atomicAdd(f, 1.0f);
    atomicMin(least, (int)threadIdx.x - 7);
    atomicMax(most, (1ull << 40) + blockIdx.x);
    atomicOr(&u[1], 1u << (threadIdx.x % 32));
    if (atomicCAS(&u[2], 0u, 1u) == 0) atomicExch(&u[3], 77u);
    __threadfence();
    if (threadIdx.x == 0) order[atomicInc(&u[0], gridDim.x - 1)] = blockIdx.x;
}

static void test_atomics_and_block_order(void **state)
{
    (void)state;
    uint32_t u0[4] = {0}, u[4], order[10], seen = 0;
    float f0 = 0, f;
    int least0 = 100, least;
    unsigned long long most0 = 0, most;
    uint32_t *du = device_of(u0, 4), *dorder = device_of<uint32_t>(NULL, 10);
    float *df = device_of(&f0, 1);
    int *dleast = device_of(&least0, 1);
    unsigned long long *dmost = device_of(&most0, 1);
    TD_LAUNCH(atomics, 10, 48, 0, 0, du, df, dleast, dmost, dorder);
    fetch(u, du, 4);
    fetch(&f, df, 1);
    fetch(&least, dleast, 1);
    fetch(&most, dmost, 1);
    fetch(order, dorder, 10);
    assert_true(f == 480);
    assert_int_equal(least, -7);
    assert_true(most == (1ull << 40) + 9);
    assert_int_equal(u[0], 0); /* the last block turned it over */
    assert_int_equal(u[1], 0xffffffffu);
    assert_int_equal(u[3], 77);
    bool is_ascending = true;
    for (uint32_t i = 0; i < 10; i++) {
        seen |= 1u << order[i];
        is_ascending = is_ascending && order[i] == i;
    }
    assert_int_equal(seen, 0x3ff);
    assert_false(is_ascending);
    OK(cudaFree(du));
    OK(cudaFree(df));
    OK(cudaFree(dleast));
    OK(cudaFree(dmost));
    OK(cudaFree(dorder));
}

/* ---- instructions */

static float bf16_random(uint16_t *ret)
{
    *ret = td_cu_f32_to_bf16((float)((int)(random_u32() % 4001) - 2000) / 777);
    return td_cu_bf16_to_f32(*ret);
}

/* Fragments as memory: lane-major registers. */
__global__ void mma_tile(float *d, const uint32_t *a, const uint32_t *b, const float *c)
{
    unsigned l = threadIdx.x;
    td_mma_m16n8k16_bf16(d + 4 * l, a + 4 * l, b + 2 * l, c + 4 * l);
}

static void test_mma_fragments(void **state)
{
    (void)state;
    for (int round = 0; round < 4; round++) {
        float a[16][16], b[16][8], c[16][8], fragment_c[32][4], fragment_d[32][4];
        uint16_t fragment_a[32][8], fragment_b[32][4];
        /* PTX ISA, mma.m16n8k16, .bf16: A's element i of a lane is at row (groupID for i in
         * {0,1,4,5}, else groupID + 8) and column (2 * threadID_in_group + (i & 1), and 8 more
         * for i >= 4); B's at row (2 * threadID_in_group + (i & 1), and 8 more for i >= 2) and
         * column groupID; C's at row (groupID for i < 2, else groupID + 8) and column (2 *
         * threadID_in_group + (i & 1)). */
        for (int lane = 0; lane < 32; lane++) {
            int group = lane >> 2, in_group = lane % 4;
            for (int i = 0; i < 8; i++) {
                int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
                int column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
                a[row][column] = bf16_random(&fragment_a[lane][i]);
            }
            for (int i = 0; i < 4; i++) {
                int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
                b[row][group] = bf16_random(&fragment_b[lane][i]);
                fragment_c[lane][i] = c[i < 2 ? group : group + 8][in_group * 2 + (i & 1)] =
                    (float)(int)(random_u32() % 100) - 50;
            }
        }
        uint32_t *da = device_of((const uint32_t *)(const void *)fragment_a, 32 * 4),
                 *db = device_of((const uint32_t *)(const void *)fragment_b, 32 * 2);
        float *dc = device_of(&fragment_c[0][0], 32 * 4), *dd = device_of<float>(NULL, 32 * 4);
        TD_LAUNCH(mma_tile, 1, 32, 0, 0, dd, da, db, dc);
        fetch(&fragment_d[0][0], dd, 32 * 4);
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 4; i++) {
                int row = (lane >> 2) + (i < 2 ? 0 : 8), column = lane % 4 * 2 + (i & 1);
                double want = c[row][column], size = fabs(want);
                for (int k = 0; k < 16; k++) {
                    want += (double)a[row][k] * (double)b[k][column];
                    size += fabs((double)a[row][k] * (double)b[k][column]);
                }
                if (fabs(fragment_d[lane][i] - want) > 17 * 0x1p-24 * size)
                    fail_msg("lane %d, d[%d]: %g, not %g", lane, i, (double)fragment_d[lane][i],
                             want);
            }
        }
        OK(cudaFree(da));
        OK(cudaFree(db));
        OK(cudaFree(dc));
        OK(cudaFree(dd));
    }
}

/* Matrices at odd places, so that only the addresses that were given can be right. kind: 0 x4, 1
 * x4.trans, 2 x2, 3 x2.trans */
__global__ void ldmatrix_tile(uint32_t *out, const uint16_t *in, int kind)
{
    TD_SHARED_BYTES(uint16_t, tile);
    for (unsigned i = threadIdx.x; i < 32 * 24; i += 32) tile[i] = in[i];
    __syncwarp();
    unsigned l = threadIdx.x, n = kind < 2 ? 32 : 16;
    const uint16_t *row = tile + l * 7 % n * 24 + 8; /* rows of 48 bytes, shuffled; the eight in
                                                        the middle */
    if (l >= n) row = NULL;
    uint32_t r[4] = {0, 0, 0, 0};
    if (kind == 0) td_ldmatrix_x4(r, row);
    if (kind == 1) td_ldmatrix_x4_trans(r, row);
    if (kind == 2) td_ldmatrix_x2(r, row);
    if (kind == 3) td_ldmatrix_x2_trans(r, row);
    for (int i = 0; i < 4; i++) out[4 * l + (unsigned)i] = r[i];
}

static void test_ldmatrix_fragments(void **state)
{
    (void)state;
    static uint16_t tile[32 * 24];
    for (int i = 0; i < 32 * 24; i++) tile[i] = (uint16_t)(i + 1000);
    uint16_t *din = device_of(tile, 32 * 24);
    uint32_t *dout = device_of<uint32_t>(NULL, 128), out[128];
    for (int kind = 0; kind < 4; kind++) {
        unsigned n = kind < 2 ? 4 : 2;
        TD_LAUNCH(ldmatrix_tile, 1, 32, sizeof tile, 0, dout, din, kind);
        fetch(out, dout, 128);
        for (unsigned lane = 0; lane < 32; lane++) {
            for (unsigned i = 0; i < n; i++) {
                for (unsigned half = 0; half < 2; half++) {
                    /* Thread l holds row l / 4, elements 2 (l % 4) and the next; transposed: of
                       the transposed matrix. */
                    unsigned row = lane / 4, column = 2 * (lane % 4) + half;
                    if (kind & 1) {
                        unsigned swap = row;
                        row = column;
                        column = swap;
                    }
                    uint32_t want = tile[(8 * i + row) * 7 % (8 * n) * 24 + 8 + column];
                    uint32_t is = out[4 * lane + i] >> (16 * half) & 0xffff;
                    if (is != want)
                        fail_msg("kind %d, lane %u, r[%u] half %u: %u, not %u", kind, lane, i, half,
                                 is, want);
                }
            }
        }
    }
    OK(cudaFree(din));
    OK(cudaFree(dout));
}

__global__ void pack_and_exp2(uint32_t *out)
{
    out[0] = td_pack_bf16x2(1.0f, -2.0f);
    /* halves: to even */
    out[1] = td_pack_bf16x2(__uint_as_float(0x3f808000u), __uint_as_float(0x3f818000u));
    out[2] = td_pack_bf16x2(__uint_as_float(0x7f800001u), __uint_as_float(0x7f7fffffu));
    out[3] = __float_as_uint(td_exp2(-3.0f));
    out[4] = __float_as_uint(td_exp2(-140.0f));
    out[5] = __float_as_uint(td_exp2(-__builtin_inff()));
}

static void test_pack_and_exp2(void **state)
{
    (void)state;
    uint32_t out[6], *device = device_of<uint32_t>(NULL, 6);
    TD_LAUNCH(pack_and_exp2, 1, 1, 0, 0, device);
    fetch(out, device, 6);
    assert_int_equal(out[0], 0xc0003f80u);
    assert_int_equal(out[1], 0x3f823f80u);
    assert_int_equal(out[2], 0x7f807fffu);
    assert_int_equal(out[3], 0x3e000000u);
    assert_int_equal(out[4], 0);
    assert_int_equal(out[5], 0);
    OK(cudaFree(device));
}

/* out: what shared memory held right after the issue, after a wait that leaves one group, after
 * a wait for all. */
__global__ void cp_async_steps(uint32_t *out, const uint32_t *in)
{
    TD_SHARED_BYTES(uint32_t, s);
    unsigned l = threadIdx.x;
    for (int i = 0; i < 12; i++) s[l * 12 + (unsigned)i] = 5;
    td_cp_async_16(s + l * 12, in + l * 8, true);
    td_cp_async_commit();
    td_cp_async_16(s + l * 12 + 4, in + l * 8 + 4, true);
    td_cp_async_16(s + l * 12 + 8, NULL, false);
    td_cp_async_commit();
    for (int i = 0; i < 12; i++) out[l * 36 + (unsigned)i] = s[l * 12 + (unsigned)i];
    td_cp_async_wait<1>();
    for (int i = 0; i < 12; i++) out[l * 36 + 12 + (unsigned)i] = s[l * 12 + (unsigned)i];
    td_cp_async_wait<0>();
    for (int i = 0; i < 12; i++) out[l * 36 + 24 + (unsigned)i] = s[l * 12 + (unsigned)i];
}

static void test_cp_async_lands_at_the_wait(void **state)
{
    (void)state;
    static uint32_t in[32 * 8], out[32 * 36];
    for (uint32_t i = 0; i < 32 * 8; i++) in[i] = i + 100;
    uint32_t *din = device_of(in, 32 * 8), *dout = device_of<uint32_t>(NULL, 32 * 36);
    TD_LAUNCH(cp_async_steps, 1, 32, 32 * 48, 0, dout, din);
    fetch(out, dout, 32 * 36);
    for (unsigned l = 0; l < 32; l++) {
        for (unsigned i = 0; i < 12; i++) {
            uint32_t landed = i < 8 ? in[l * 8 + i] : 0;
            assert_int_equal(out[l * 36 + i], 0xffffffffu);
            assert_int_equal(out[l * 36 + 12 + i], i < 4 ? landed : 0xffffffffu);
            assert_int_equal(out[l * 36 + 24 + i], landed);
        }
    }
    OK(cudaFree(din));
    OK(cudaFree(dout));
}

/* One thread brings a tile, then another over it; the others wait by parity and say when they
 * have read. */
__global__ void bulk_tiles(uint32_t *out, const uint32_t *in, int n_tiles)
{
    TD_SHARED_BYTES(uint32_t, tile);
    __shared__ uint64_t full, empty;
    unsigned i = threadIdx.x;
    if (i == 0) {
        td_mbarrier_init(&full, 1);
        td_mbarrier_init(&empty, blockDim.x - 32);
        td_mbarrier_init_fence();
    }
    __syncthreads();
    for (int n = 0; n < n_tiles; n++) {
        unsigned parity = (unsigned)n & 1;
        if (i == 0) {
            if (n) td_mbarrier_wait_parity(&empty, parity ^ 1);
            td_mbarrier_arrive_expect_tx(&full, 256 * 4);
            td_bulk_copy_g2s(tile, in + n * 256, 128 * 4, &full);
            td_bulk_copy_g2s(tile + 128, in + n * 256 + 128, 128 * 4, &full);
        } else if (i >= 32) {
            td_mbarrier_wait_parity(&full, parity);
            for (unsigned k = i - 32; k < 256; k += blockDim.x - 32)
                out[(unsigned)n * 256 + k] = tile[k] + 1;
            td_mbarrier_arrive(&empty);
        }
    }
}

static void test_bulk_copies_and_mbarriers(void **state)
{
    (void)state;
    enum { TILES = 5 };
    static uint32_t in[TILES * 256], out[TILES * 256];
    for (uint32_t i = 0; i < TILES * 256; i++) in[i] = i * 7;
    uint32_t *din = device_of(in, TILES * 256), *dout = device_of<uint32_t>(NULL, TILES * 256);
    for (unsigned seed = 1; seed < 6; seed++) {
        set_seed(seed);
        TD_LAUNCH(bulk_tiles, 2, 128, 1024, 0, dout, din, (int)TILES);
        fetch(out, dout, TILES * 256);
        for (uint32_t i = 0; i < TILES * 256; i++) assert_int_equal(out[i], i * 7 + 1);
    }
    unsetenv("TD_CUDA_EMU_SEED");
    OK(cudaFree(din));
    OK(cudaFree(dout));
}

/* d of one wgmma, and what it held before the wait. a: a panel for A from shared memory; r:
 * fragments for A from registers. */
static __global__ void wgmma_tile(float *d, float *before, const uint8_t *a, const uint32_t *r,
                                  const uint8_t *b, int column)
{
    TD_SHARED_BYTES(uint8_t, panels); /* its room is a multiple of 1024, and so is where it
                                         begins here: not a promise of the hardware's */
    unsigned i = threadIdx.x;
    float x[32];
    for (unsigned k = i; k < 8192; k += 128) {
        panels[k] = a[k];
        panels[8192 + k] = b[k];
    }
    for (int e = 0; e < 32; e++) x[e] = 1;
    td_fence_proxy_async();
    __syncthreads();
    TD_WGMMA_GROUP(group);
    td_wgmma_hold(x);
    td_wgmma_fence();
    if (column >= 0)
        td_wgmma_m64n64k16_ss(group, x, panels, panels + 8192, column, true);
    else
        td_wgmma_m64n64k16_rs(group, x, r + i * 4, panels + 8192);
    td_wgmma_commit();
    before[i] = x[i % 32];
    td_wgmma_wait(group);
    td_wgmma_hold(x);
    for (int e = 0; e < 32; e++) d[i * 32 + (unsigned)e] = x[e];
}

/* PTX ISA: the 128-byte swizzle puts the 16-byte chunk c of row r of a group of eight rows (1024
 * bytes) at chunk c xor r. */
static uint16_t *panel_element(uint8_t *panel, int row, int column)
{
    return (uint16_t *)(void *)(panel + row / 8 * 1024 + row % 8 * 128 +
                                ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2);
}

static void test_wgmma_fragments(void **state)
{
    (void)state;
    static float a[64][64], b[64][64], d[128][32], before[128];
    static uint8_t panel_a[8192], panel_b[8192];
    static uint16_t fragments[128][8];
    for (int row = 0; row < 64; row++) {
        for (int column = 0; column < 64; column++) {
            a[row][column] = bf16_random(panel_element(panel_a, row, column));
            b[row][column] = bf16_random(panel_element(panel_b, row, column));
        }
    }
    /* A in registers: thread i of the warpgroup, element e: row 16 (i / 32) + (lane / 4) + 8 for
     * e in {2, 3, 6, 7}, column 2 (lane % 4) + (e & 1) + 8 for e >= 4. */
    for (int i = 0; i < 128; i++) {
        for (int e = 0; e < 8; e++) {
            int row = i / 32 * 16 + i % 32 / 4 + (e & 2 ? 8 : 0),
                column = i % 4 * 2 + (e & 1) + (e < 4 ? 0 : 8);
            fragments[i][e] = *panel_element(panel_a, row, column);
        }
    }
    uint8_t *da = device_of(panel_a, 8192), *db = device_of(panel_b, 8192);
    uint32_t *dr = device_of((const uint32_t *)(const void *)fragments, 128 * 4);
    float *dd = device_of<float>(NULL, 128 * 32), *dbefore = device_of<float>(NULL, 128);
    for (int column = -16; column < 64; column += 16) { /* below 0: A in registers, and B[k][n]
                                                           instead of B[n][k] */
        TD_LAUNCH(wgmma_tile, 1, 128, 16384, 0, dd, dbefore, da, dr, db, column);
        OK(cudaGetLastError());
        fetch(&d[0][0], dd, 128 * 32);
        fetch(before, dbefore, 128);
        for (int i = 0; i < 128; i++) {
            assert_true(isnan(before[i]));
            for (int e = 0; e < 32; e++) {
                int row = i / 32 * 16 + i % 32 / 4 + (e & 2 ? 8 : 0),
                    n = e / 4 * 8 + i % 4 * 2 + (e & 1);
                double want = 1, size = 1;
                for (int k = 0; k < 16; k++) {
                    double product = column < 0
                                         ? (double)a[row][k] * (double)b[k][n]
                                         : (double)a[row][column + k] * (double)b[n][column + k];
                    want += product;
                    size += fabs(product);
                }
                if (fabs(d[i][e] - want) > 17 * 0x1p-24 * size)
                    fail_msg("column %d, thread %d, d[%d]: %g, not %g", column, i, e,
                             (double)d[i][e], want);
            }
        }
    }
    OK(cudaFree(da));
    OK(cudaFree(db));
    OK(cudaFree(dr));
    OK(cudaFree(dd));
    OK(cudaFree(dbefore));
}

/* ---- wrong kernels: each ends the program with a report */

__global__ void barrier_for_some(void)
{
    if (threadIdx.x < 40) __syncthreads();
}
__global__ void word_for_some(void)
{
    if (threadIdx.x % 32 < 30) (void)__shfl_sync(FULL, 1, 0);
}
__global__ void different_words(void)
{
    if (threadIdx.x < 16)
        __syncwarp();
    else
        (void)__ballot_sync(FULL, 1);
}
__global__ void word_and_barrier(void)
{
    if (threadIdx.x == 3)
        __syncwarp();
    else
        __syncthreads();
}
__global__ void part_mask(void) { (void)__shfl_sync(0xffffu, 1, 0); }
__global__ void bad_width(void) { (void)__shfl_sync(FULL, 1, 0, 12); }
__global__ void small_warp(void) { __syncwarp(); }
__global__ void shared_overrun(void)
{
    TD_SHARED_BYTES(volatile uint8_t, s);
    s[100] = 1;
}
__global__ void odd_row(void)
{
    TD_SHARED_BYTES(uint8_t, s);
    uint32_t r[4];
    td_ldmatrix_x4(r, s + 8 + 16 * threadIdx.x);
}
__global__ void nobody_arrives(void)
{
    __shared__ uint64_t bar;
    if (threadIdx.x == 0) td_mbarrier_init(&bar, 2);
    __syncthreads();
    td_mbarrier_wait_parity(&bar, 0);
}
__global__ void device_overrun(uint8_t *p) { p[100] = 1; }
__global__ void nothing(void) {}

enum wrong {
    BARRIER_FOR_SOME,
    WORD_FOR_SOME,
    DIFFERENT_WORDS,
    WORD_AND_BARRIER,
    PART_MASK,
    BAD_WIDTH,
    SMALL_WARP,
    SHARED_OVERRUN,
    ODD_ROW,
    NOBODY_ARRIVES,
    DEVICE_OVERRUN,
    N_WRONG
};

static void run_wrong(enum wrong what)
{
    uint8_t *p;
    switch (what) {
    case BARRIER_FOR_SOME:
        TD_LAUNCH(barrier_for_some, 1, 64, 0, 0);
        break;
    case WORD_FOR_SOME:
        TD_LAUNCH(word_for_some, 1, 64, 0, 0);
        break;
    case DIFFERENT_WORDS:
        TD_LAUNCH(different_words, 1, 64, 0, 0);
        break;
    case WORD_AND_BARRIER:
        TD_LAUNCH(word_and_barrier, 1, 32, 0, 0);
        break;
    case PART_MASK:
        TD_LAUNCH(part_mask, 1, 32, 0, 0);
        break;
    case BAD_WIDTH:
        TD_LAUNCH(bad_width, 1, 32, 0, 0);
        break;
    case SMALL_WARP:
        TD_LAUNCH(small_warp, 1, 48, 0, 0);
        break;
    case SHARED_OVERRUN:
        TD_LAUNCH(shared_overrun, 1, 1, 100, 0);
        break;
    case ODD_ROW:
        TD_LAUNCH(odd_row, 1, 32, 1024, 0);
        break;
    case NOBODY_ARRIVES:
        TD_LAUNCH(nobody_arrives, 1, 64, 0, 0);
        break;
    case DEVICE_OVERRUN:
        (void)cudaMalloc(&p, 100);
        TD_LAUNCH(device_overrun, 1, 1, 0, 0, p);
        (void)cudaFree(p);
        break;
    case N_WRONG:
        break;
    }
    (void)cudaDeviceSynchronize();
}

static const struct {
    enum wrong what;
    const char *says, *and_says; /* what stands in the report; ASan may be faster and speak for
                                    itself */
} wrongs[] = {
    {BARRIER_FOR_SOME, "kernel barrier_for_some, block (0,0,0), thread (", "__syncthreads"},
    {WORD_FOR_SOME, "kernel word_for_some", "__shfl_sync"},
    {DIFFERENT_WORDS, "kernel different_words", "__ballot_sync"},
    {WORD_AND_BARRIER, "kernel word_and_barrier", "__syncwarp"},
    {PART_MASK, "mask 0x0000ffff", "kernel part_mask"},
    {BAD_WIDTH, "width 12", "kernel bad_width"},
    {SMALL_WARP, "warp of 16 threads", "kernel small_warp"},
    {SHARED_OVERRUN, "byte 100 of 100 bytes of dynamic shared memory", "kernel shared_overrun"},
    {ODD_ROW, "is not aligned to 16 bytes", "kernel odd_row"},
    {NOBODY_ARRIVES, "waits for an mbarrier that nobody completes", "kernel nobody_arrives"},
    {DEVICE_OVERRUN, "byte 100 of an allocation of 100 bytes was written", ""},
};

static void test_wrong_kernels_are_reported(void **state)
{
    (void)state;
    static_assert(sizeof wrongs / sizeof *wrongs == N_WRONG, "a row each");
    for (int w = 0; w < N_WRONG; w++) {
        int pipes[2];
        assert_int_equal(pipe(pipes), 0);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            if (dup2(pipes[1], 2) < 0) _exit(3);
            signal(SIGABRT, SIG_DFL); /* cmocka's handler would go on with other tests */
            run_wrong(wrongs[w].what);
            _exit(0);
        }
        close(pipes[1]);
        char text[4096];
        size_t n = 0;
        ssize_t got;
        while (n < sizeof text - 1 && (got = read(pipes[0], text + n, sizeof text - 1 - n)) > 0)
            n += (size_t)got;
        text[n] = 0;
        close(pipes[0]);
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        bool is_reported = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT &&
                           strstr(text, wrongs[w].says) && strstr(text, wrongs[w].and_says);
        bool is_asan = strstr(text, "AddressSanitizer: use-after-poison") &&
                       (WIFSIGNALED(status) || WEXITSTATUS(status) != 0);
        if (!is_reported && !is_asan)
            fail_msg("wrong kernel %d: status 0x%x, said: %s", w, (unsigned)status, text);
    }
}

/* With TD_CUDA_EMU_STRICT a host that follows a device pointer ends; copies and kernels do not
 * notice. */
static void test_host_may_not_follow_device_pointers(void **state)
{
    (void)state;
    for (int follows = 0; follows < 2; follows++) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            signal(SIGSEGV, SIG_DFL);
            set_env("TD_CUDA_EMU_STRICT", "1");
            uint32_t *p, host[8] = {0};
            if (cudaMalloc(&p, sizeof host)) _exit(1);
            TD_LAUNCH(fill, 1, 8, 0, 0, p, 8u);
            if (cudaMemcpy(host, p, sizeof host, cudaMemcpyDeviceToHost) || host[7] != 22) _exit(2);
            if (follows) host[0] = *(volatile uint32_t *)p;
            if (cudaFree(p)) _exit(3);
            _exit(0);
        }
        int status;
        assert_int_equal(waitpid(child, &status, 0), child);
        if (follows)
            assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
        else
            assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

/* ---- the runtime */

static void test_launch_limits(void **state)
{
    (void)state;
    static const struct {
        dim3 grid, block;
        size_t shared_bytes;
        cudaError_t error;
    } cases[] = {
        {dim3(1), dim3(1024), 48 * 1024, cudaSuccess},
        {dim3(1), dim3(1025), 0, cudaErrorInvalidConfiguration},
        {dim3(1), dim3(32, 32, 2), 0, cudaErrorInvalidConfiguration},
        {dim3(1), dim3(1, 1, 65), 0, cudaErrorInvalidConfiguration},
        {dim3(1), dim3(0), 0, cudaErrorInvalidConfiguration},
        {dim3(0), dim3(1), 0, cudaErrorInvalidConfiguration},
        {dim3(1, 65536), dim3(1), 0, cudaErrorInvalidConfiguration},
        {dim3(1, 1, 65536), dim3(1), 0, cudaErrorInvalidConfiguration},
        {dim3(1), dim3(1), 48 * 1024 + 1, cudaErrorInvalidValue},
    };
    for (const auto &c : cases) {
        TD_LAUNCH(nothing, c.grid, c.block, c.shared_bytes, 0);
        assert_int_equal(cudaPeekAtLastError(), c.error);
        assert_int_equal(cudaGetLastError(), c.error);
        assert_int_equal(cudaGetLastError(), cudaSuccess);
    }
    OK(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024));
    TD_LAUNCH(nothing, 1, 32, 227 * 1024, 0);
    /* no carve-out: a rule of the house */
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidConfiguration);
    assert_int_equal(
        cudaFuncSetAttribute(nothing, cudaFuncAttributePreferredSharedMemoryCarveout, 101),
        cudaErrorInvalidValue);
    OK(cudaFuncSetAttribute(nothing, cudaFuncAttributePreferredSharedMemoryCarveout,
                            cudaSharedmemCarveoutMaxShared));
    (void)cudaGetLastError();
    TD_LAUNCH(nothing, 1, 32, 227 * 1024, 0);
    OK(cudaGetLastError());
    assert_int_equal(
        cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 + 1),
        cudaErrorInvalidValue);
    OK(cudaDeviceSynchronize());
    (void)cudaGetLastError();
}

static void test_work_is_done_when_it_is_waited_for(void **state)
{
    (void)state;
    uint32_t *pinned, *device = device_of<uint32_t>(NULL, 4), zeros[4] = {0};
    cudaStream_t a, b;
    cudaEvent_t event;
    OK(cudaMallocHost(&pinned, 16));
    OK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    OK(cudaMemcpy(device, zeros, 16, cudaMemcpyHostToDevice));

    /* From pinned memory the bytes are those at the time of the copy, not of the call. */
    pinned[0] = 1;
    OK(cudaMemcpyAsync(device, pinned, 4, cudaMemcpyHostToDevice, a));
    pinned[0] = 2;
    uint32_t got[4];
    fetch(got, device, 1); /* another stream: does not wait */
    assert_int_equal(got[0], 0);
    assert_int_equal(cudaStreamQuery(a), cudaErrorNotReady);
    OK(cudaStreamSynchronize(a));
    OK(cudaStreamQuery(a));
    fetch(got, device, 1);
    assert_int_equal(got[0], 2);

    /* Pageable bytes are taken with the call. */
    uint32_t pageable = 7;
    OK(cudaMemcpyAsync(device, &pageable, 4, cudaMemcpyHostToDevice, a));
    pageable = 8;
    OK(cudaStreamSynchronize(a));
    fetch(got, device, 1);
    assert_int_equal(got[0], 7);

    /* b waits for a by an event; an event asked says "not ready" once. */
    pinned[0] = 0;
    TD_LAUNCH(fill, 1, 4, 0, a, device, 4u);
    OK(cudaEventRecord(event, a));
    OK(cudaStreamWaitEvent(b, event));
    OK(cudaMemcpyAsync(pinned, device, 16, cudaMemcpyDeviceToHost, b));
    assert_int_equal(pinned[0], 0);
    assert_int_equal(cudaEventQuery(event), cudaErrorNotReady);
    OK(cudaEventQuery(event));
    assert_int_equal(pinned[0], 0);
    OK(cudaStreamSynchronize(b));
    for (uint32_t i = 0; i < 4; i++) assert_int_equal(pinned[i], 3 * i + 1);

    /* Without the wait b reads what was there. */
    OK(cudaMemsetAsync(device, 0, 16, a));
    OK(cudaMemcpyAsync(pinned, device, 16, cudaMemcpyDeviceToHost, b));
    OK(cudaStreamSynchronize(b));
    assert_int_equal(pinned[3], 10);
    OK(cudaStreamSynchronize(a));

    OK(cudaEventDestroy(event));
    OK(cudaStreamDestroy(a));
    OK(cudaStreamDestroy(b));
    OK(cudaFree(device));
    OK(cudaFreeHost(pinned));
}

static void test_copies_are_checked(void **state)
{
    (void)state;
    uint8_t host[100] = {0}, *p, *q;
    OK(cudaMalloc(&p, 100));
    OK(cudaMalloc(&q, 100));
    OK(cudaMemcpy(p, host, 100, cudaMemcpyHostToDevice));
    assert_int_equal(cudaMemcpy(p + 1, host, 100, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(host, p - 1, 2, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    assert_int_equal(cudaMemcpy(p, host, 100, cudaMemcpyDeviceToHost),
                     cudaErrorInvalidMemcpyDirection);
    assert_int_equal(cudaMemcpy(host, p, 100, cudaMemcpyHostToDevice),
                     cudaErrorInvalidMemcpyDirection);
    assert_int_equal(cudaMemset(host, 0, 100), cudaErrorInvalidValue);
    assert_int_equal(cudaMemset(p, 0, 101), cudaErrorInvalidValue);
    OK(cudaMemcpy(q, p, 100, cudaMemcpyDeviceToDevice));
    OK(cudaMemcpy(host, q, 100, cudaMemcpyDefault));
    assert_int_equal(cudaFree(p + 1), cudaErrorInvalidValue);
    OK(cudaFree(p));
    assert_int_equal(cudaMemcpy(host, p, 1, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    assert_int_equal(cudaFree(p), cudaErrorInvalidValue);
    OK(cudaFree(q));
    OK(cudaMalloc(&p, 100));
    OK(cudaMemcpy(host, p, 100, cudaMemcpyDeviceToHost));
    for (int i = 0; i < 100; i++) assert_int_equal(host[i], 0xff); /* new memory holds NaN */
    OK(cudaFree(p));
    (void)cudaGetLastError();
}

/* What a recording forbids invalidates it. */
static void recording_is_invalidated(uint32_t *device, cudaStream_t stream, cudaStream_t side,
                                     cudaEvent_t fork_event)
{
    cudaGraph_t graph;
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    assert_int_equal(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    void *unused;
    assert_int_equal(cudaMalloc(&unused, 16), cudaErrorStreamCaptureUnsupported);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    OK(cudaEventRecord(fork_event, stream));
    OK(cudaStreamWaitEvent(side, fork_event));
    OK(cudaMemsetAsync(device, 0, 4, side));
    assert_int_equal(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureUnjoined);
}

static void test_graph_keeps_arguments(void **state)
{
    (void)state;
    uint32_t *device = device_of<uint32_t>(NULL, 64), *pinned, out[64], n = 10;
    cudaStream_t stream, side;
    cudaEvent_t fork_event, join_event;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    size_t n_nodes = 0;
    OK(cudaMallocHost(&pinned, 64 * 4));
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    OK(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    OK(cudaEventCreateWithFlags(&fork_event, cudaEventDisableTiming));
    OK(cudaEventCreateWithFlags(&join_event, cudaEventDisableTiming));
    OK(cudaMemset(device, 0, 64 * 4));

    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    TD_LAUNCH(fill, 1, 32, 0, stream, device, n);
    n = 20; /* the launch above has its 10 */
    OK(cudaEventRecord(fork_event, stream));
    OK(cudaStreamWaitEvent(side, fork_event));
    OK(cudaMemcpyAsync(device + 32, pinned, 4, cudaMemcpyHostToDevice, side));
    OK(cudaEventRecord(join_event, side));
    OK(cudaStreamWaitEvent(stream, join_event));
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphGetNodes(graph, NULL, &n_nodes));
    assert_int_equal(n_nodes, 2);
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    fetch(out, device, 64);
    assert_int_equal(out[1], 0); /* recorded, not run */
    for (uint32_t round = 1; round < 4; round++) {
        pinned[0] = 1000 * round;
        OK(cudaGraphLaunch(exec, stream));
        OK(cudaStreamSynchronize(stream));
        fetch(out, device, 64);
        for (uint32_t i = 0; i < 32; i++) assert_int_equal(out[i], i < 10 ? 3 * i + 1 : 0);
        assert_int_equal(out[32], 1000 * round);
    }
    OK(cudaGraphExecDestroy(exec));

    recording_is_invalidated(device, stream, side, fork_event);
    (void)cudaGetLastError();
    OK(cudaStreamDestroy(stream));
    OK(cudaStreamDestroy(side));
    OK(cudaEventDestroy(fork_event));
    OK(cudaEventDestroy(join_event));
    OK(cudaFree(device));
    OK(cudaFreeHost(pinned));
}

static void test_another_process_sees_the_bytes(void **state)
{
    (void)state;
    uint32_t host[1000];
    for (uint32_t i = 0; i < 1000; i++) host[i] = i * 5;
    uint32_t *device = device_of(host, 1000);
    cudaIpcMemHandle_t handle;
    cudaIpcEventHandle_t event_handle;
    cudaEvent_t event;
    void *again;
    OK(cudaIpcGetMemHandle(&handle, device));
    assert_int_equal(cudaIpcGetMemHandle(&handle, device + 1), cudaErrorInvalidValue);
    assert_int_equal(cudaIpcOpenMemHandle(&again, handle, cudaIpcMemLazyEnablePeerAccess),
                     cudaErrorDeviceUninitialized);
    OK(cudaEventCreateWithFlags(&event, cudaEventInterprocess | cudaEventDisableTiming));
    OK(cudaIpcGetEventHandle(&event_handle, event));
    OK(cudaEventRecord(event));
    fflush(stdout);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        uint32_t *theirs, copy[1000];
        cudaEvent_t their_event;
        int wrong = 0;
        wrong |= cudaIpcOpenMemHandle((void **)&theirs, handle, cudaIpcMemLazyEnablePeerAccess) !=
                 cudaSuccess;
        wrong |= (cudaIpcOpenEventHandle(&their_event, event_handle) != cudaSuccess) << 1;
        if (!wrong) {
            wrong |= (cudaEventSynchronize(their_event) != cudaSuccess) << 2;
            wrong |= (cudaMemcpy(copy, theirs, sizeof copy, cudaMemcpyDeviceToHost) != cudaSuccess)
                     << 3;
            wrong |= (memcmp(copy, host, sizeof copy) != 0) << 4;
            wrong |= (cudaMemcpy(copy, theirs, sizeof copy + 1, cudaMemcpyDeviceToHost) !=
                      cudaErrorInvalidValue)
                     << 5;
            copy[999] = 4711;
            wrong |=
                (cudaMemcpy(theirs + 999, copy + 999, 4, cudaMemcpyHostToDevice) != cudaSuccess)
                << 6;
            wrong |= (cudaIpcCloseMemHandle(theirs) != cudaSuccess ||
                      cudaIpcCloseMemHandle(theirs) == cudaSuccess)
                     << 7;
        }
        _exit(wrong);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    fetch(host, device, 1000);
    assert_int_equal(host[999], 4711);
    memset(&handle, 0, sizeof handle);
    assert_int_equal(cudaIpcOpenMemHandle(&again, handle, cudaIpcMemLazyEnablePeerAccess),
                     cudaErrorInvalidValue);
    OK(cudaEventDestroy(event));
    OK(cudaFree(device));
    (void)cudaGetLastError();
}

static void test_memory_runs_out(void **state)
{
    (void)state;
    void *p, *q;
    size_t free_bytes, total;
    set_env("TD_CUDA_EMU_MEMORY", "1M");
    OK(cudaMemGetInfo(&free_bytes, &total));
    assert_int_equal(total, 1 << 20);
    OK(cudaMalloc(&p, 1000 * 1024));
    OK(cudaMemGetInfo(&free_bytes, &total));
    assert_int_equal(free_bytes, 24 * 1024);
    assert_int_equal(cudaMalloc(&q, 24 * 1024 + 1), cudaErrorMemoryAllocation);
    assert_string_equal(cudaGetErrorString(cudaGetLastError()), "out of memory");
    OK(cudaMalloc(&q, 24 * 1024));
    OK(cudaFree(p));
    OK(cudaFree(q));
    set_env("TD_CUDA_EMU_MEMORY", NULL);
}

static void test_faults(void **state)
{
    (void)state;
    int n;
    struct cudaDeviceProp properties;
    void *p;
    static const struct {
        const char *fault;
        cudaError_t error;
    } losses[] = {{"launch:2", cudaErrorLaunchFailure}, {"ecc:2", cudaErrorECCUncorrectable}};
    for (const auto &loss : losses) {
        set_env("TD_CUDA_EMU_FAULT", loss.fault);
        TD_LAUNCH(nothing, 1, 1, 0, 0);
        OK(cudaDeviceSynchronize());
        TD_LAUNCH(nothing, 1, 1, 0, 0);
        OK(cudaGetLastError()); /* not known yet */
        assert_int_equal(cudaDeviceSynchronize(), loss.error);
        assert_int_equal(cudaGetLastError(), loss.error); /* and it stays */
        assert_int_equal(cudaGetLastError(), loss.error);
        assert_int_equal(cudaMalloc(&p, 1), loss.error);
        set_env("TD_CUDA_EMU_FAULT", NULL);
        OK(cudaDeviceSynchronize());
    }
    set_env("TD_CUDA_EMU_FAULT", "malloc:2,cc:75");
    OK(cudaGetDeviceProperties(&properties, 0));
    assert_int_equal(properties.major * 10 + properties.minor, 75);
    OK(cudaMalloc(&p, 1));
    OK(cudaFree(p));
    assert_int_equal(cudaMalloc(&p, 1), cudaErrorMemoryAllocation);
    OK(cudaMalloc(&p, 1));
    OK(cudaFree(p));
    set_env("TD_CUDA_EMU_FAULT", "nodevice");
    assert_int_equal(cudaGetDeviceCount(&n), cudaErrorNoDevice);
    set_env("TD_CUDA_EMU_FAULT", "nodriver");
    assert_int_equal(cudaGetDeviceCount(&n), cudaErrorInsufficientDriver);
    set_env("TD_CUDA_EMU_FAULT", NULL);
    OK(cudaGetDeviceCount(&n));
    assert_int_equal(n, 1);
    assert_int_equal(cudaSetDevice(1), cudaErrorInvalidDevice);
    (void)cudaGetLastError();
}

/* ---- several threads of the host */

enum { THREADS = 4, ROUNDS = 20 };

__global__ void shared_of_one_launch(uint32_t *out, uint32_t value)
{
    __shared__ uint32_t s[64];
    s[threadIdx.x] = value + threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = s[63 - threadIdx.x];
}

static void *launch_many(void *argument)
{
    uint32_t value = *(const uint32_t *)argument, *device, out[64];
    cudaStream_t stream;
    uintptr_t n_wrong = 0;
    if (cudaMalloc(&device, sizeof out) ||
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking))
        return (void *)1;
    for (uint32_t r = 0; r < ROUNDS; r++) {
        TD_LAUNCH(shared_of_one_launch, 3, 64, 64, stream, device, value + r);
        n_wrong +=
            cudaMemcpyAsync(out, device, sizeof out, cudaMemcpyDeviceToHost, stream) != cudaSuccess;
        n_wrong += cudaStreamSynchronize(stream) != cudaSuccess;
        for (uint32_t i = 0; i < 64; i++) n_wrong += out[i] != value + r + 63 - i;
    }
    n_wrong += cudaStreamDestroy(stream) != cudaSuccess;
    n_wrong += cudaFree(device) != cudaSuccess;
    return (void *)n_wrong;
}

static void test_threads_launch_beside_each_other(void **state)
{
    (void)state;
    pthread_t threads[THREADS];
    uint32_t values[THREADS];
    for (uint32_t i = 0; i < THREADS; i++) {
        values[i] = i * 1000;
        assert_int_equal(pthread_create(&threads[i], NULL, launch_many, &values[i]), 0);
    }
    for (int i = 0; i < THREADS; i++) {
        void *n_wrong;
        assert_int_equal(pthread_join(threads[i], &n_wrong), 0);
        assert_null(n_wrong);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_thread_runs_once),
        cmocka_unit_test(test_indices_in_three_dimensions),
        cmocka_unit_test(test_missing_barrier_is_found),
        cmocka_unit_test(test_missing_syncwarp_is_found),
        cmocka_unit_test(test_shared_memory_starts_as_nan),
        cmocka_unit_test(test_words_of_a_warp),
        cmocka_unit_test(test_atomics_and_block_order),
        cmocka_unit_test(test_mma_fragments),
        cmocka_unit_test(test_ldmatrix_fragments),
        cmocka_unit_test(test_pack_and_exp2),
        cmocka_unit_test(test_cp_async_lands_at_the_wait),
        cmocka_unit_test(test_bulk_copies_and_mbarriers),
        cmocka_unit_test(test_wgmma_fragments),
        cmocka_unit_test(test_wrong_kernels_are_reported),
        cmocka_unit_test(test_host_may_not_follow_device_pointers),
        cmocka_unit_test(test_launch_limits),
        cmocka_unit_test(test_work_is_done_when_it_is_waited_for),
        cmocka_unit_test(test_copies_are_checked),
        cmocka_unit_test(test_graph_keeps_arguments),
        cmocka_unit_test(test_another_process_sees_the_bytes),
        cmocka_unit_test(test_memory_runs_out),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_threads_launch_beside_each_other),
    };
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    unsetenv("TD_CUDA_EMU_SEED");
    unsetenv("TD_CUDA_EMU_EAGER");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
