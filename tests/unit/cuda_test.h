/* cuda_test.h - what the tests of a device's entries share: opening the table in a way to compute
 * products, and buffers on both sides. TANDEM_CUDA_LIBRARY names the library, emulated or real. */
#ifndef TD_TESTS_CUDA_TEST_H
#define TD_TESTS_CUDA_TEST_H

#include "kernels/device.h"
#include "tests/unit/kernels_test.h"

static const struct td_ops *ref, *ops;
static const struct td_device *dev;
static struct td_err err;

enum { GUARD = 64 };

static inline td_status open_way(const char *way, bool deterministic)
{
    struct td_device_config config = {.deterministic = deterministic};
    if (way) assert_int_equal(setenv("TANDEM_CUDA_GEMM", way, 1), 0);
    td_status s = td_device_open(&config, &ops, &err);
    assert_int_equal(unsetenv("TANDEM_CUDA_GEMM"), 0);
    dev = s ? NULL : ops->device;
    return s;
}

static inline void close_device(void)
{
    td_device_close(ops);
    ops = NULL, dev = NULL;
}

/* Opens the device for a test program: 0, or the exit status of one that cannot run. */
static inline int open_or_say(void)
{
    const char *named = getenv("TANDEM_CUDA_LIBRARY");
    rng_start();
    ref = td_ops_by_name("ref");
    if (!named || !*named) {
        printf("TANDEM_CUDA_LIBRARY names no library: nothing to test\n");
        return 77;
    }
    if (open_way(NULL, false) == TD_OK) return 0;
    printf("%s\n", err.msg);
    return strstr(named, "_emu") ? 1 : 77; /* an emulated device needs nothing that could be
                                              missing */
}

/* ---- a buffer on both sides: the host's bytes go up, with a poisoned guard behind them, and
 * come down into `host` again --- */

struct both {
    uint8_t *device;
    void *host;
    size_t bytes;
};

static inline void up(const struct both *b)
{
    if (dev->upload(b->device, b->host, b->bytes + GUARD, &err)) fail_msg("%s", err.msg);
}

static inline void down(const struct both *b)
{
    if (dev->wait(&err)) fail_msg("%s", err.msg);
    if (dev->download(b->host, b->device, b->bytes + GUARD, &err)) fail_msg("%s", err.msg);
    const uint8_t *guard = (const uint8_t *)b->host + b->bytes;
    for (int i = 0; i < GUARD; i++)
        if (guard[i] != 0xff) fail_msg("byte %d behind a buffer of %zu was written", i, b->bytes);
}

static inline struct both both_make(size_t bytes)
{
    void *p = NULL;
    struct both b = {.host = alloc_poisoned(bytes + GUARD), .bytes = bytes};
    if (dev->alloc(bytes + GUARD, "a test", &p, &err)) fail_msg("%s", err.msg);
    b.device = p;
    return b;
}

static inline void both_free(struct both *b)
{
    dev->release(b->device);
    free(b->host);
}

static inline struct both copy_of(const void *host, size_t bytes)
{
    struct both b = both_make(bytes);
    memcpy(b.host, host, bytes);
    up(&b);
    return b;
}

static inline struct both poisoned(size_t bytes)
{
    struct both b = both_make(bytes);
    up(&b);
    return b;
}

/* Random rows of dim at stride; the gaps stay NaN. */
static inline float *random_rows(int32_t rows, int32_t dim, int64_t stride)
{
    float *x = alloc_poisoned((size_t)(rows * stride) * 4);
    for (int32_t r = 0; r < rows; r++) rng_fill(x + r * stride, dim);
    return x;
}

#endif
