/* cuda_bench_common.h - what the benches of a device's table share: random numbers, a median with
 * its spread, the rate of a large copy.
 *
 * Header only; each bench is one file and one thread. */
#ifndef TD_BENCH_CUDA_BENCH_COMMON_H
#define TD_BENCH_CUDA_BENCH_COMMON_H

#include <stdint.h>
#include <stdlib.h>

#include "common/base/clock.h"
#include "common/base/random.h"
#include "common/base/status.h"
#include "kernels/device.h"

enum { TD_BENCH_REPEATS_MAX = 1000 };

/* The same numbers in every run. */
static inline uint64_t td_bench_random(void)
{
    static uint64_t state = 1;
    return td_keyed_step(&state);
}

/* The median of some runs, and half the distance of the quartiles as a part of it. */
struct td_bench_timing {
    double median_s, spread;
};

static inline int td_bench_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* seconds: [n], sorted afterwards. */
static inline struct td_bench_timing td_bench_timing_of(double *seconds, int64_t n)
{
    qsort(seconds, (size_t)n, sizeof *seconds, td_bench_by_value);
    return (struct td_bench_timing){seconds[n / 2],
                                    (seconds[3 * n / 4] - seconds[n / 4]) / 2 / seconds[n / 2]};
}

/* A copy on the device, both ends given, `repeats` times after two that do not count. */
static inline td_status td_bench_copy_time(const struct td_device *d, void *to, const void *from,
                                           uint64_t bytes, int64_t repeats,
                                           struct td_bench_timing *ret_timing, struct td_err *err)
{
    double seconds[TD_BENCH_REPEATS_MAX];
    if (!d->memory)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s copies nothing beside steps", d->info.name);
    for (int64_t i = -2; i < repeats; i++) {
        struct td_device_run run = {.to = to, .from = from, .bytes = bytes};
        uint64_t ticket, t0 = td_now_ns();
        td_status s = d->memory->copy(d->memory->ctx, TD_COPY_ON_DEVICE, &run, 1, &ticket, err);
        if (!s) s = d->memory->wait(d->memory->ctx, ticket, err);
        if (s) return s;
        if (i >= 0) seconds[i] = (double)(td_now_ns() - t0) * 1e-9;
    }
    *ret_timing = td_bench_timing_of(seconds, repeats);
    return TD_OK;
}

/* Bytes per second that a copy of `bytes` on the device reads and writes; given_gbs (1e9), if
 * not 0, is taken instead. */
static inline td_status td_bench_copy_rate(const struct td_device *d, uint64_t bytes,
                                           int64_t repeats, double given_gbs, double *ret_rate,
                                           struct td_err *err)
{
    void *from = NULL, *to = NULL;
    struct td_bench_timing t = {0};
    if (given_gbs > 0) {
        *ret_rate = given_gbs * 1e9;
        return TD_OK;
    }
    if (!d->memory)
        return td_fail(err, TD_ERR_UNSUPPORTED, "%s copies nothing beside steps: give --copy-gbs",
                       d->info.name);
    td_status s = d->alloc(bytes, "a copy's source", &from, err);
    if (!s) s = d->alloc(bytes, "a copy's target", &to, err);
    if (!s) s = td_bench_copy_time(d, to, from, bytes, repeats, &t, err);
    if (!s) *ret_rate = 2 * (double)bytes / t.median_s;
    d->release(to);
    d->release(from);
    return s;
}

#endif
