/* kernels_gemm_test.c - packing and the matrix product: every table against ref on odd shapes,
 * and the bits of a row alone against its bits in company. */
#include <errno.h>

#include "kernels/choice.h"
#include "kernels/cpu/amx.h"
#include "kernels/ref/amx_chain.h"
#include "kernels/ref/bf16_chain.h"
#include "tests/unit/kernels_test.h"

struct shape {
    int32_t m, n, k;
};

struct weights {
    struct td_weight w;
    void *packed;
};

static struct weights weights_make(const struct td_ops *ops, const void *src,
                                   enum td_dtype src_dtype, enum td_dtype dtype, int32_t n,
                                   int32_t k)
{
    struct weights r = {.packed = alloc_poisoned(ops->packed_bytes(n, k, dtype))};
    r.w = (struct td_weight){
        .data = r.packed, .n_out = n, .n_in = k, .format = td_format_of_dtype(dtype)};
    /* backwards: ranges must not depend on one another */
    for (int32_t row = (n - 1) / 64 * 64; row >= 0; row -= 64)
        ops->pack(r.packed, n, k, dtype,
                  (const char *)src + (size_t)row * (size_t)k * td_dtype_bytes(src_dtype),
                  src_dtype, row, n - row < 64 ? n - row : 64);
    return r;
}

/* An output is one chain of k fused multiply-adds in f32, each rounding the partial sum by at most
 * 2^-24 of it: errors of random
 * sign grow as sqrt(k), the partial sums are at most sum |x w|. 4 for the tail of the
 *     distribution, 4 for bias and residual. */
static double gemm_tolerance(int32_t k, double sum_abs)
{
    return 0x1p-24 * (4 + 4 * sqrt(k)) * sum_abs;
}

/* tolerance[M, N], and beside it the bits of what must stay as it was: the gap between rows. */
static void check_close(const struct td_ops *ops, struct shape s, int64_t ys, const float *want,
                        const float *got, const double *tolerance, const char *how)
{
    for (int32_t m = 0; m < s.m; m++)
        for (int64_t n = 0; n < ys; n++) {
            if (n >= s.n) {
                assert_memory_equal(&want[m * ys + n], &got[m * ys + n], 4);
                continue;
            }
            double r = (double)want[m * ys + n], v = (double)got[m * ys + n];
            if (!(fabs(v - r) <= tolerance[m * s.n + n]))
                fail_msg("%s m=%d n=%d k=%d %s: y[%d,%d] = %.9g, ref %.9g", ops->name, s.m, s.n,
                         s.k, how, m, (int)n, v, r);
        }
}

/* Every table beside ref, in n_parts parts (0: as many as a random number says). */
static void check_shape(struct shape s, enum td_dtype src_dtype, enum td_dtype dtype,
                        bool with_bias, bool accumulate, int n_parts)
{
    const struct td_ops *ref = td_ops_by_name("ref"), *tables[N_TABLES];
    int64_t xs = s.k + rng_int(0, 5), ys = s.n + rng_int(0, 5);
    size_t y_bytes = (size_t)(s.m * ys) * 4;
    float *x = alloc_poisoned((size_t)(s.m * xs) * 4), *y0 = alloc_poisoned(y_bytes),
          *want = alloc_poisoned(y_bytes), *got = alloc_poisoned(y_bytes), *bias = NULL;
    double *tolerance = alloc_poisoned((size_t)s.m * (size_t)s.n * sizeof *tolerance);
    void *src = alloc_poisoned((size_t)s.n * (size_t)s.k * td_dtype_bytes(src_dtype));
    for (int64_t i = 0; i < (int64_t)s.n * s.k; i++) put(src, src_dtype, i, rng_normal());
    for (int32_t m = 0; m < s.m; m++) rng_fill(x + m * xs, s.k);
    for (int32_t m = 0; accumulate && m < s.m; m++) rng_fill(y0 + m * ys, s.n);
    if (with_bias) {
        bias = alloc_poisoned((size_t)s.n * 4);
        rng_fill(bias, s.n);
    }
    for (int32_t m = 0; m < s.m; m++)
        for (int32_t n = 0; n < s.n; n++) {
            double sum_abs = 2.0 + (bias ? fabs((double)bias[n]) : 0);
            for (int32_t k = 0; k < s.k; k++)
                sum_abs += fabs((double)x[m * xs + k] *
                                (double)td_widen(src, src_dtype, (int64_t)n * s.k + k));
            tolerance[(int64_t)m * s.n + n] = gemm_tolerance(s.k, sum_abs);
        }
    struct td_gemm_args a = {.x = x,
                             .bias = bias,
                             .n_rows = s.m,
                             .x_stride = xs,
                             .y_stride = ys,
                             .accumulate = accumulate};
    int n_tables = tables_or_say(true, tables);
    for (int t = -1; t < n_tables; t++) {
        const struct td_ops *ops = t < 0 ? ref : tables[t];
        int parts = t < 0 ? 1 : n_parts ? n_parts : rng_int(1, 3);
        struct weights w = weights_make(ops, src, src_dtype, dtype, s.n, s.k);
        a.w = &w.w, a.y = t < 0 ? want : got;
        memcpy(a.y, y0, y_bytes);
        a.scratch = alloc_poisoned(ops->gemm_scratch_bytes(s.m, s.k));
        run_gemm(ops, &a, parts);
        free(a.scratch), free(w.packed);
        char how[96];
        snprintf(how, sizeof how, "%s from %s parts=%d bias=%d acc=%d", td_dtype_name(dtype),
                 td_dtype_name(src_dtype), parts, with_bias, accumulate);
        if (t >= 0) check_close(ops, s, ys, want, got, tolerance, how);
    }
    free(x), free(y0), free(want), free(got), free(bias), free(src), free(tolerance);
}

static void test_against_ref(void **state)
{
    (void)state;
    static const int32_t ns[] = {1, 5, 31, 32, 33, 63, 64, 65, 130, 200},
                         ks[] = {1, 2, 3, 15, 16, 17, 40, 100, 255, 257, 300, 600};
    static const enum td_dtype types[][2] = {
        {TD_F32, TD_F32}, {TD_BF16, TD_BF16}, {TD_F16, TD_F16}, {TD_BF16, TD_F32},
        {TD_F16, TD_F32}, {TD_F32, TD_BF16},  {TD_F16, TD_BF16}};
    for (int32_t m = 1; m <= 40; m++)
        for (int d = 0; d < 7; d++)
            check_shape((struct shape){m, ns[rng_int(0, 9)], ks[rng_int(0, 11)]}, types[d][0],
                        types[d][1], rng_int(0, 1), rng_int(0, 1), 0);
    check_shape((struct shape){330, 161, 530}, TD_BF16, TD_BF16, true, true,
                1); /* several blocks of rows, k and panels */
    check_shape((struct shape){330, 33, 530}, TD_F32, TD_F32, true, false, 3);
    check_shape((struct shape){100, 70, 513}, TD_F16, TD_F16, false, true, 2);
}

/* Kinds of numbers to multiply: around 1; with products some of which are subnormal or near the
 * least normal number, so that sums pass through it; smaller still; all there are, also infinite
 * ones and NaN; as large as bf16 has them, so that sums are infinite; around 1, each followed by
 * its opposite. */
enum { AROUND_1, TINY, TINIEST, ALL, HUGE, OPPOSITES, N_KINDS };

static uint16_t rng_bf16(int32_t kind)
{
    static const int32_t exponents[N_KINDS][2] = {{117, 130}, {56, 70},   {0, 64},
                                                  {0, 255},   {185, 194}, {117, 130}};
    uint16_t u = (uint16_t)(rng_u64() & 0x807f);
    int32_t exponent = rng_int(exponents[kind][0], exponents[kind][1]);
    if (kind == ALL && exponent == 255 && rng_int(0, 3)) exponent = 127; /* not all are NaN */
    if (kind == ALL && exponent == 255 && rng_int(0, 1)) u &= 0x8000;
    return (uint16_t)(u | exponent << 7);
}

typedef float (*chain_fn)(const uint16_t *x, const uint16_t *w, int64_t n);

/* y of one row: as the chain has it, then bias, then the residual. */
static float chain_output(chain_fn chain, const uint16_t *x, const uint16_t *w, int32_t k,
                          float bias, float y)
{
    float v = td_flush(td_flush(chain(x, w, k)) + td_flush(bias));
    return td_flush(td_flush(y) + v);
}

struct chain {
    chain_fn sum;
    const char *tables[4]; /* that have its bits */
};

static void check_chain(const struct chain *c, struct shape s, int32_t kind)
{
    bool is_tiny = kind == TINY || kind == TINIEST;
    size_t n_x = (size_t)s.m * (size_t)s.k, n_w = (size_t)s.n * (size_t)s.k,
           n_y = (size_t)s.m * (size_t)s.n;
    uint16_t *x16 = alloc_poisoned(2 * n_x), *w16 = alloc_poisoned(2 * n_w);
    float *x = alloc_poisoned(4 * n_x), *y = alloc_poisoned(4 * n_y), *y0 = alloc_poisoned(4 * n_y),
          *must = alloc_poisoned(4 * n_y), *bias = alloc_poisoned(4 * (size_t)s.n);
    for (size_t i = 0; i < n_x; i++) {
        x16[i] = kind == OPPOSITES && i % 2 ? x16[i - 1] : rng_bf16(kind);
        x[i] = td_bf16_to_f32(x16[i]);
    }
    for (size_t i = 0; i < n_w; i++)
        w16[i] = kind == OPPOSITES && i % 2 ? w16[i - 1] ^ 0x8000 : rng_bf16(kind);
    rng_fill(y0, (int64_t)n_y), rng_fill(bias, s.n);
    for (size_t i = 0; is_tiny && i < n_y; i++) y0[i] *= 0x1p-125f;
    for (int32_t i = 0; is_tiny && i < s.n; i++) bias[i] *= 0x1p-125f;
    for (int32_t m = 0; m < s.m; m++)
        for (int32_t n = 0; n < s.n; n++)
            must[m * s.n + n] = chain_output(c->sum, x16 + (int64_t)m * s.k, w16 + (int64_t)n * s.k,
                                             s.k, bias[n], y0[m * s.n + n]);
    for (const char *const *name = c->tables; *name; name++) {
        const struct td_ops *ops = td_ops_by_name(*name);
        if (!ops) continue; /* test_against_ref says that this CPU lacks it */
        struct weights w = weights_make(ops, w16, TD_BF16, TD_BF16, s.n, s.k);
        struct td_gemm_args a = {.w = &w.w,
                                 .x = x,
                                 .y = y,
                                 .bias = bias,
                                 .n_rows = s.m,
                                 .x_stride = s.k,
                                 .y_stride = s.n,
                                 .accumulate = true};
        memcpy(y, y0, 4 * n_y);
        a.scratch = alloc_poisoned(ops->gemm_scratch_bytes(s.m, s.k));
        run_gemm(ops, &a, 2);
        for (size_t i = 0; i < n_y; i++) {
            if (isnan(must[i]) && isnan(y[i])) continue; /* one of them */
            if (memcmp(&must[i], &y[i], 4) != 0)
                fail_msg("%s m=%d n=%d k=%d kind %d: y[%d,%d] is %a, must be %a", ops->name, s.m,
                         s.n, s.k, kind, (int)i / s.n, (int)i % s.n, (double)y[i], (double)must[i]);
        }
        free(a.scratch), free(w.packed);
    }
    free(x16), free(w16), free(x), free(y), free(y0), free(must), free(bias);
}

/* The tables for x86 give the bits of a plain chain, and all but amx those of the same. */
static void test_bf16_is_one_chain(void **state)
{
    (void)state;
    static const int32_t ms[] = {1, 2, 3, 4, 5, 6, 12, 13, 16, 17, 24, 33, 40, 70, 120};
    static const struct chain chains[] = {
        {td_bf16_chain, {"avx2", "avx512", "avx512bf16"}}, /* avxvnni has avx2's */
        {td_amx_chain, {"amx"}}};
    for (size_t c = 0; c < sizeof chains / sizeof *chains; c++) {
        if (!td_ops_by_name(chains[c].tables[0])) continue;
        for (size_t i = 0; i < sizeof ms / sizeof *ms; i++)
            for (int32_t kind = 0; kind < N_KINDS; kind++)
                check_chain(&chains[c], (struct shape){ms[i], rng_int(1, 70), rng_int(1, 90)},
                            kind);
        for (int32_t kind = 0; kind < N_KINDS; kind++) /* several blocks of k */
            check_chain(&chains[c], (struct shape){130, 33, 601}, kind);
        check_chain(&chains[c], (struct shape){300, 161, 301}, AROUND_1); /* and rows */
    }
}

/* On a CPU without AMX, too: the plain chain of the class is a sum of products. */
static void test_amx_chain_is_a_product(void **state)
{
    (void)state;
    for (int32_t i = 0; i < 2000; i++) {
        uint16_t x[200], w[200];
        int32_t n = rng_int(0, 200);
        double sum = 0, sum_abs = 0;
        for (int32_t k = 0; k < n; k++) {
            x[k] = rng_bf16(AROUND_1), w[k] = rng_bf16(AROUND_1);
            double product = (double)td_bf16_to_f32(x[k]) * (double)td_bf16_to_f32(w[k]);
            sum += product, sum_abs += fabs(product);
        }
        assert_true(fabs((double)td_amx_chain(x, w, n) - sum) <= gemm_tolerance(n, sum_abs));
    }
}

/* Each thing that can be missing has a text of its own. */
static void test_amx_says_what_is_missing(void **state)
{
    (void)state;
#ifdef __x86_64__
    static const struct td_amx_seen all = {true, true, 0xfu << 22, 0x600e7, {8u << 16 | 64, 16}, 0};
    struct td_amx_seen cases[14];
    const char *texts[14];
    int n = 0;
    assert_null(td_amx_lack_of(&all));
    cases[n] = all, cases[n++].is_built = false;
    cases[n] = all, cases[n++].has_avx512 = false;
    for (int bit = 22; bit <= 25; bit++)
        if (bit != 23) cases[n] = all, cases[n++].features &= ~(1u << bit);
    cases[n] = all, cases[n++].xcr0 &= ~(UINT64_C(1) << 18);
    cases[n] = all, cases[n++].palette[1] = 8;
    cases[n] = all, cases[n++].permission_errno = EINVAL;
    cases[n] = all, cases[n++].permission_errno = ENOSPC;
    cases[n] = all, cases[n++].permission_errno = EPERM;
    cases[n] = all, cases[n++].permission_errno = EIO;
    for (int i = 0; i < n; i++) {
        assert_non_null(texts[i] = td_amx_lack_of(&cases[i]));
        for (int j = 0; j < i; j++) assert_string_not_equal(texts[i], texts[j]);
    }
    cases[0] = all, cases[0].xcr0 &= ~(UINT64_C(1) << 17);
    assert_non_null(strstr(td_amx_lack_of(&cases[0]), "XCR0"));
    cases[0] = all, cases[0].palette[0] = 4u << 16 | 64;
    assert_non_null(strstr(td_amx_lack_of(&cases[0]), "sizes"));
    cases[0] = all, cases[0].permission_errno = ENOSYS;
    assert_non_null(strstr(td_amx_lack_of(&cases[0]), "5.16"));
#endif
    assert_null(td_ops_lack("ref"));
    assert_non_null(strstr(td_ops_lack("sse9"), "no table"));
    if (!td_ops_by_name("neon")) assert_non_null(strstr(td_ops_lack("neon"), "this CPU"));
}

/* Row i of x through the weights: in a batch of n rows starting at row `first`. */
static void product(const struct td_ops *ops, const struct td_weight *w, const float *x,
                    int32_t first, int32_t n, const float *bias, const float *residual, float *y,
                    int n_parts)
{
    struct td_gemm_args a = {.w = w,
                             .x = x + (int64_t)first * w->n_in,
                             .y = y,
                             .bias = bias,
                             .n_rows = n,
                             .x_stride = w->n_in,
                             .y_stride = w->n_out,
                             .accumulate = true};
    memcpy(y, residual + (int64_t)first * w->n_out, (size_t)n * (size_t)w->n_out * 4);
    a.scratch = alloc_poisoned(ops->gemm_scratch_bytes(n, w->n_in));
    run_gemm(ops, &a, n_parts);
    free(a.scratch);
}

static void test_rows_do_not_know_each_other(void **state)
{
    (void)state;
    enum { M = 330 };
    static const int32_t ns[] = {33, 96, 200, 7}, ks[] = {600, 257, 64, 1030};
    static const enum td_dtype types[] = {TD_F32, TD_BF16, TD_F16};
    for (int t = 0; t < N_TABLES; t++) {
        const struct td_ops *ops = plain_table_or_say(t);
        if (!ops) continue;
        for (int c = 0; c < 4; c++) {
            int32_t n = ns[c], k = ks[c];
            enum td_dtype dtype = types[c % 3];
            float *x = alloc_poisoned((size_t)M * (size_t)k * 4),
                  *whole = alloc_poisoned((size_t)M * (size_t)n * 4),
                  *some = alloc_poisoned((size_t)M * (size_t)n * 4),
                  *bias = alloc_poisoned((size_t)n * 4),
                  *residual = alloc_poisoned((size_t)M * (size_t)n * 4);
            void *src = alloc_poisoned((size_t)n * (size_t)k * td_dtype_bytes(dtype));
            for (int64_t i = 0; i < (int64_t)n * k; i++) put(src, dtype, i, rng_normal());
            rng_fill(x, (int64_t)M * k), rng_fill(bias, n), rng_fill(residual, (int64_t)M * n);
            struct weights w = weights_make(ops, src, dtype, dtype, n, k);
            product(ops, &w.w, x, 0, M, bias, residual, whole, 1);
            for (int32_t m = 1; m <= M; m = m < 40 ? m + 1 : m + 97)
                for (int parts = 1; parts <= 3; parts++) {
                    if (getenv("TANDEM_TEST_SHORT") && parts != 1 + m % 3) continue;
                    int32_t first = rng_int(0, M - m);
                    product(ops, &w.w, x, first, m, bias, residual, some, parts);
                    if (memcmp(some, whole + (int64_t)first * n, (size_t)m * (size_t)n * 4) != 0)
                        fail_msg("%s %s n=%d k=%d: rows %d..%d computed as %d rows in %d parts "
                                 "differ from the same rows of %d",
                                 ops->name, td_dtype_name(dtype), n, k, first, first + m - 1, m,
                                 parts, M);
                }
            free(x), free(whole), free(some), free(bias), free(residual), free(src), free(w.packed);
        }
    }
}

/* More parts than there is work: nothing twice, nothing left out. */
static void test_more_parts_than_panels(void **state)
{
    (void)state;
    for (int parts = 4; parts <= 17; parts++) {
        check_shape((struct shape){1, 40, 70}, TD_BF16, TD_BF16, true, true, parts);
        check_shape((struct shape){50, 33, 70}, TD_BF16, TD_BF16, true, true, parts);
    }
}

/* bf16 is half of f32 where nothing has to be filled up, and at the sizes of a model never more
 * than 7 % larger than that. */
static void test_bf16_is_half(void **state)
{
    (void)state;
    for (int t = 0; t < N_TABLES; t++) {
        const struct td_ops *ops = plain_table_or_say(t);
        if (!ops) continue;
        assert_int_equal(2 * ops->packed_bytes(640, 96, TD_BF16),
                         ops->packed_bytes(640, 96, TD_F32));
        assert_true((double)ops->packed_bytes(1000, 1000, TD_BF16) <= 1.07 * 1000 * 1000 * 2);
        if (strcmp(ops->name, "amx") != 0) /* whose tiles are filled up to 32 columns and values */
            assert_true((double)ops->packed_bytes(777, 580, TD_BF16) <= 1.07 * 777 * 580 * 2);
    }
}

static void test_by_name(void **state)
{
    (void)state;
    assert_null(td_ops_by_name("sse9"));
    assert_string_equal(td_ops_by_name("ref")->name, "ref");
    assert_int_equal(setenv("TANDEM_OPS", "ref", 1), 0);
    assert_string_equal(td_ops_best()->name, "ref");
    assert_int_equal(setenv("TANDEM_OPS", "nonsense", 1), 0);
    assert_null(td_ops_best());
    assert_int_equal(unsetenv("TANDEM_OPS"), 0);
    assert_non_null(td_ops_best());
    printf("  best: %s\n", td_ops_best()->name);
}

/* A clock by which each timed product takes the next of these, again and again. */
static uint64_t clock_ns, clock_steps[3], n_clock_calls;
static uint64_t fake_now_ns(void)
{
    uint64_t call = n_clock_calls++;
    /* calls 0 and 1 of a measurement are before and after it; the first call of all is the start */
    if (call > 0 && call % 2 == 0) clock_ns += clock_steps[(call / 2 - 1) % 3];
    return clock_ns;
}

static const struct td_ops *fastest_of(uint64_t a, uint64_t b, uint64_t c,
                                       struct td_ops_choice *ret_choice)
{
    static struct td_ops tables[3];
    const struct td_ops *list[3];
    static const char *const names[] = {"a", "b", "c"};
    for (int i = 0; i < 3; i++) {
        tables[i] = *td_ops_by_name("ref");
        tables[i].name = names[i];
        list[i] = &tables[i];
    }
    clock_ns = n_clock_calls = 0;
    clock_steps[0] = a, clock_steps[1] = b, clock_steps[2] = c;
    td_ops_time(list, 3, fake_now_ns, ret_choice);
    return ret_choice->ops;
}

static void test_the_fastest_is_chosen(void **state)
{
    (void)state;
    struct td_ops_choice c;
    char text[200];
    /* Steps of a millisecond: the rounds end at the bound, after the first 10. */
    assert_string_equal(fastest_of(2000000, 1000000, 3000000, &c)->name, "b");
    assert_string_equal(fastest_of(2000000, 3000000, 1000000, &c)->name, "c");
    assert_string_equal(fastest_of(1000000, 1000000, 1000000, &c)->name, "a"); /* the first */
    assert_string_equal(fastest_of(393216, 786432, 786433, &c)->name, "a");
    td_ops_choice_text(&c, text, sizeof text);
    assert_string_equal(text, "a (measured, GFLOP/s a thread: a 2, b 1, c 1)");
    for (size_t n = 1; n < 40; n++) { /* cut, and never past its end */
        memset(text, '#', sizeof text);
        td_ops_choice_text(&c, text, n);
        assert_true(strlen(text) < n && text[n] == '#');
    }
    td_ops_choose(&c);
    assert_true(c.n_timed == 0 || c.n_timed == 2 || c.n_timed == 3);
    const char *numerics = NULL; /* of all that were timed but amx */
    for (int i = 0; i < c.n_timed; i++) {
        const struct td_ops *ops = td_ops_by_name(c.timed[i].name);
        assert_non_null(ops);
        if (strcmp(ops->name, "amx") == 0)
            assert_string_equal(td_ops_numerics(ops), "amx");
        else if (numerics)
            assert_string_equal(td_ops_numerics(ops), numerics);
        else
            numerics = td_ops_numerics(ops);
        assert_true(c.timed[i].gflop_s > 0);
    }
}

/* Two tables whose products differ are told apart. */
static void test_same_bits_are_seen(void **state)
{
    (void)state;
    const struct td_ops *ref = td_ops_by_name("ref"), *avx2 = td_ops_by_name("avx2");
    assert_true(td_ops_same_bits(ref, ref));
    if (avx2) assert_false(td_ops_same_bits(ref, avx2));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_name),
        cmocka_unit_test(test_the_fastest_is_chosen),
        cmocka_unit_test(test_same_bits_are_seen),
        cmocka_unit_test(test_bf16_is_half),
        cmocka_unit_test(test_against_ref),
        cmocka_unit_test(test_more_parts_than_panels),
        cmocka_unit_test(test_bf16_is_one_chain),
        cmocka_unit_test(test_amx_chain_is_a_product),
        cmocka_unit_test(test_amx_says_what_is_missing),
        cmocka_unit_test(test_rows_do_not_know_each_other),
    };
    rng_start();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
