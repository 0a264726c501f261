/* kernels_test.h - what the kernel tests share: a seeded generator whose seed is printed (SEED=
 * repeats a run), memory with exact sizes, the tables this CPU runs, and running an entry in
 * parts. */
#ifndef TD_TESTS_KERNELS_TEST_H
#define TD_TESTS_KERNELS_TEST_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/random.h"
#include "kernels/ops.h"
#include "kernels/part.h"

static uint64_t rng_state;

static uint64_t rng_u64(void) { return td_keyed_step(&rng_state); }
static inline int32_t rng_int(int32_t lo, int32_t hi)
{
    return lo + (int32_t)(rng_u64() % (uint64_t)(hi - lo + 1));
} /* inclusive */
static inline float rng_normal(void)
{
    double u = ((double)(rng_u64() >> 11) + 1) * 0x1p-53, v = (double)(rng_u64() >> 11) * 0x1p-53;
    return (float)(sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
}
static inline void rng_fill(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = rng_normal();
}

static inline void rng_start(void)
{
    const char *text = getenv("SEED");
    rng_state = text ? strtoull(text, NULL, 0) : (uint64_t)time(NULL) * 1000003u;
    printf("SEED=%llu\n", (unsigned long long)rng_state);
    fflush(stdout);
}

enum { N_TABLES = TD_N_OPS }; /* the first one is ref */

/* 64-byte aligned, poisoned with 0xff (NaN in every float type). */
static inline void *alloc_poisoned(size_t bytes)
{
    size_t whole = (bytes + 63) / 64 * 64 + (bytes == 0 ? 64 : 0);
    void *p = aligned_alloc(64, whole);
    assert_non_null(p);
    memset(p, 0xff, whole);
    return p;
}

static inline const struct td_ops *table_or_say(int i)
{
    const struct td_ops *ops = td_ops_by_name(td_ops_names[i]);
    if (!ops) printf("  (%s not tested: %s)\n", td_ops_names[i], td_ops_lack(td_ops_names[i]));
    return ops;
}

/* The same for what is not a product of integers: "avxvnni" has those entries from "avx2". */
static inline const struct td_ops *plain_table_or_say(int i)
{
    return strcmp(td_ops_names[i], "avxvnni") == 0 ? NULL : table_or_say(i);
}

/* Those of this CPU but ref, to be given one case after another: what ref makes of a case is
 * computed once. is_plain: without avxvnni, as above. */
static inline int tables_or_say(bool is_plain, const struct td_ops *ret_tables[N_TABLES])
{
    static const struct td_ops *there[N_TABLES];
    static bool is_known; /* what is missing is said once */
    int n = 0;
    for (int t = 1; t < N_TABLES && !is_known; t++) there[t] = table_or_say(t);
    is_known = true;
    for (int t = 1; t < N_TABLES; t++)
        if (there[t] && !(is_plain && strcmp(td_ops_names[t], "avxvnni") == 0))
            ret_tables[n++] = there[t];
    return n;
}

static inline void run_gemm(const struct td_ops *ops, const struct td_gemm_args *a, int n_parts)
{
    for (int p = 0; p < n_parts; p++) ops->gemm_prepare(a, p, n_parts);
    for (int p = n_parts - 1; p >= 0; p--) ops->gemm(a, p, n_parts);
}

/* One number of a source array of any type. */
static inline void put(void *dst, enum td_dtype t, int64_t i, float v)
{
    if (t == TD_F32) {
        ((float *)dst)[i] = v;
    } else if (t == TD_BF16) {
        ((uint16_t *)dst)[i] = td_f32_to_bf16(v);
    } else { /* f16 by way of its bits: normal numbers only, truncated */
        uint32_t u;
        memcpy(&u, &v, sizeof u);
        int32_t e = (int32_t)(u >> 23 & 255) - 112;
        /* some subnormal */
        uint16_t h =
            (uint16_t)((u >> 16 & 0x8000u) | (e <= 0   ? (u >> 13 & 0x3ffu)
                                              : e > 30 ? 0x7bffu
                                                       : (uint32_t)e << 10 | (u >> 13 & 0x3ffu)));
        ((uint16_t *)dst)[i] = h;
    }
}

#endif
