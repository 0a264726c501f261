/* kernels_rows_test.c - norm, rotary embedding, storing K and V, SwiGLU, embedding: every table
 * against ref, any number of parts, gaps between rows untouched. */
#include "tests/unit/kernels_test.h"

static const int32_t dims[] = {1, 7, 8, 15, 16, 17, 31, 64, 65, 100, 128, 576, 1000, 2048};
enum { N_DIMS = 14 };

static void check_close(const char *what, const char *table, int64_t i, float v, float r,
                        double tolerance)
{
    bool both_nan = isnan(v) && isnan(r);
    if (!both_nan && !(fabs((double)v - (double)r) <= tolerance))
        fail_msg("%s %s: [%lld] = %.9g, ref %.9g, tolerance %.3g", table, what, (long long)i,
                 (double)v, (double)r, tolerance);
}

static void test_rmsnorm(void **state)
{
    (void)state;
    const struct td_ops *ref = td_ops_by_name("ref");
    for (int t = 1; t < N_TABLES; t++) {
        const struct td_ops *ops = plain_table_or_say(t);
        for (int c = 0; ops && c < 3 * N_DIMS; c++) {
            int32_t dim = dims[c % N_DIMS], rows = rng_int(1, 9);
            int64_t xs = dim + rng_int(0, 3), os = dim + rng_int(0, 3);
            float *x = alloc_poisoned((size_t)(rows * xs) * 4),
                  *w = alloc_poisoned((size_t)dim * 4),
                  *o0 = alloc_poisoned((size_t)(rows * os) * 4),
                  *o1 = alloc_poisoned((size_t)(rows * os) * 4);
            for (int32_t r = 0; r < rows; r++) rng_fill(x + r * xs, dim);
            rng_fill(w, dim);
            struct td_rmsnorm_args a = {.x = x,
                                        .w = w,
                                        .out = o0,
                                        .n_rows = rows,
                                        .dim = dim,
                                        .x_stride = xs,
                                        .out_stride = os,
                                        .eps = 1e-5f,
                                        .centre = c / N_DIMS == 2};
            ref->rmsnorm(&a, 0, 1);
            int parts = rng_int(1, 3);
            a.out = o1;
            for (int p = 0; p < parts; p++) ops->rmsnorm(&a, p, parts);
            for (int64_t i = 0; i < rows * os; i++) {
                if (i % os >= dim)
                    assert_memory_equal(&o0[i], &o1[i], 4);
                else /* the mean has sqrt(dim) random roundings of its positive terms, then half
                        an ulp each of five operations. Of a centred row, which has a variance near
                        1 but for one value alone, the mean's own error counts. */
                    check_close(
                        "rmsnorm", ops->name, i, o1[i], o0[i],
                        0x1p-24 * (6 + sqrt(dim)) *
                            (fabs((double)o0[i]) + (a.centre ? 16 * fabs((double)w[i % os]) : 0)));
            }
            /* a row alone and in place: the same bits */
            int32_t r = rows - 1;
            memmove(x, x + r * xs, (size_t)dim * 4);
            a.out = x, a.n_rows = 1;
            ops->rmsnorm(&a, 0, 1);
            assert_memory_equal(x, o1 + r * os, (size_t)dim * 4);
            free(x), free(w), free(o0), free(o1);
        }
    }
}

static void test_rope(void **state)
{
    (void)state;
    static const int32_t head_dims[] = {2, 16, 24, 64, 80, 96, 128, 256};
    enum { MAX_POS = 50 };
    const struct td_ops *ref = td_ops_by_name("ref");
    for (int t = 1; t < N_TABLES; t++) {
        const struct td_ops *ops = plain_table_or_say(t);
        for (int c = 0; ops && c < 24; c++) {
            int32_t dim = head_dims[c % 8], heads = rng_int(1, 5), rows = rng_int(1, 7), pos[7];
            int64_t xs = (int64_t)heads * dim + rng_int(0, 3);
            float *cs = alloc_poisoned((size_t)(MAX_POS * dim) * 4),
                  *x0 = alloc_poisoned((size_t)(rows * xs) * 4),
                  *x1 = alloc_poisoned((size_t)(rows * xs) * 4);
            for (int p = 0; p < MAX_POS; p++)
                for (int i = 0; i < dim / 2; i++) {
                    float angle = rng_normal() * 10;
                    cs[p * dim + i] = cosf(angle), cs[p * dim + dim / 2 + i] = sinf(angle);
                }
            for (int r = 0; r < rows; r++)
                pos[r] = rng_int(0, MAX_POS - 1), rng_fill(x0 + r * xs, heads * dim);
            memcpy(x1, x0, (size_t)(rows * xs) * 4);
            struct td_rope_args a = {.x = x0,
                                     .cos_sin = cs,
                                     .positions = pos,
                                     .n_rows = rows,
                                     .n_heads = heads,
                                     .head_dim = dim,
                                     .x_stride = xs};
            ref->rope(&a, 0, 1);
            a.x = x1;
            int parts = rng_int(1, 3);
            for (int p = 0; p < parts; p++) ops->rope(&a, p, parts);
            for (int64_t i = 0; i < rows * xs; i++) {
                if (i % xs >= (int64_t)heads * dim)
                    assert_memory_equal(&x0[i], &x1[i], 4);
                else /* two products, one sum; |x| < 6 */
                    check_close("rope", ops->name, i, x1[i], x0[i], 0x1p-24 * 3 * 6);
            }
            free(cs), free(x0), free(x1);
        }
    }
}

/* Bytes must be equal: rounding to bf16 is one function, and nothing but the slots named is
 * written. */
static void test_kv_store(void **state)
{
    (void)state;
    const uint32_t special[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001,
                                0x00000001, 0x807fffff, 0x3f808000, 0x3f818000,
                                0x7f7fffff, 0x80000000, 0x00808000, 0x3f80ffff};
    const struct td_ops *ref = td_ops_by_name("ref");
    for (int t = 1; t < N_TABLES; t++) {
        const struct td_ops *ops = plain_table_or_say(t);
        for (int c = 0; ops && c < 40; c++) {
            static const int32_t head_dims[] = {16, 64, 96, 128, 34};
            static const enum td_dtype types[] = {TD_F32, TD_BF16, TD_INT8, TD_FP8};
            enum td_dtype dtype = types[c % 4];
            int32_t coded = td_dtype_is_coded(dtype);
            bool in_k = c % 5 == 4; /* a latent cache, whose rows of codes have two scales */
            struct td_kv_view kv = {.n_kv_heads = in_k ? 1 : rng_int(1, 4),
                                    .block_size = rng_int(1, 20) << coded,
                                    .head_dim = head_dims[c % 5],
                                    .v_dim = in_k ? 22 : 0,
                                    .v_in_k = in_k,
                                    .dtype = dtype};
            int64_t kv_bytes = kv.n_kv_heads * td_kv_view_head_bytes(&kv);
            enum { N_BLOCKS = 6, ROWS = 9 };
            kv.block_bytes = 2 * kv_bytes + 64;
            int32_t blocks[2][3] = {{4, 0, 2}, {5, 1, 3}}, pos[ROWS], seq[ROWS];
            const int32_t *tables[2] = {blocks[0], blocks[1]};
            int64_t stride = (int64_t)kv.n_kv_heads * kv.head_dim + 3;
            float *k = alloc_poisoned((size_t)(ROWS * stride) * 4),
                  *v = alloc_poisoned((size_t)(ROWS * stride) * 4);
            rng_fill(k, ROWS * stride), rng_fill(v, ROWS * stride);
            for (int i = 0; i < 12; i++)
                memcpy(&k[rng_int(0, (int32_t)(ROWS * stride) - 1)], &special[i], 4);
            for (int r = 0; r < ROWS; r++)
                seq[r] = r % 2, pos[r] = (r / 2 * 7 + r % 2) % (3 * kv.block_size);
            for (int r = 0; r < ROWS; r++) /* two rows may fall on one slot in small blocks: the
                                              same content then */
                for (int q = 0; q < r; q++)
                    if (seq[q] == seq[r] && pos[q] == pos[r])
                        memcpy(k + r * stride, k + q * stride, (size_t)stride * 4),
                            memcpy(v + r * stride, v + q * stride, (size_t)stride * 4);
            size_t bytes = (size_t)(N_BLOCKS * kv.block_bytes);
            uint8_t *c0 = alloc_poisoned(bytes), *c1 = alloc_poisoned(bytes);
            struct td_kv_store_args a = {.kv = kv,
                                         .k = k,
                                         .v = in_k ? NULL : v,
                                         .k_stride = stride,
                                         .v_stride = stride,
                                         .positions = pos,
                                         .row_seq = seq,
                                         .block_tables = tables,
                                         .n_rows = ROWS};
            a.kv.base = c0;
            ref->kv_store(&a, 0, 1);
            a.kv.base = c1;
            for (int p = 0; p < 3; p++) ops->kv_store(&a, p, 3);
            assert_memory_equal(c0, c1, bytes);
            free(k), free(v), free(c0), free(c1);
        }
    }
}

/* e4m3 by its definition. */
static double fp8_value(int code)
{
    int exponent = code >> 3 & 15, fraction = code & 7;
    double value = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
    return code & 0x80 ? -value : value;
}

static void test_fp8(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++) {
        float f = td_fp8_to_f32((uint8_t)code);
        if ((code & 0x7f) == 0x7f) {
            assert_true(isnan(f));
            continue;
        }
        if ((double)f != fp8_value(code)) fail_msg("code %d reads as %g", code, (double)f);
        assert_int_equal(td_f32_to_fp8(f), code);
    }
    for (int i = 0; i < 20000; i++) { /* the nearest code, the even one of two */
        float f = ldexpf(rng_normal(), rng_int(-14, 9));
        int best = 0, code = td_f32_to_fp8(f);
        for (int c = 1; c < 0x7f; c++) {
            double d = fabs(fp8_value(c) - fabs((double)f)),
                   least = fabs(fp8_value(best) - fabs((double)f));
            if (d < least || (d == least && c % 2 == 0)) best = c;
        }
        if ((code & 0x7f) != best || code >> 7 != (signbit(f) != 0))
            fail_msg("%a becomes code %d, nearest is %d", (double)f, code, best);
    }
}

/* Rows of every size of number come back within half a step, whatever stands beside them. */
static void test_coded_rows(void **state)
{
    (void)state;
    uint8_t codes[300];
    float x[300];
    for (int c = 0; c < 2000; c++) {
        enum td_dtype dtype = c % 2 ? TD_FP8 : TD_INT8;
        int32_t n = rng_int(1, 300);
        int e = rng_int(-99, 120);
        float top = 0;
        for (int32_t i = 0; i < n; i++) {
            x[i] = ldexpf(rng_normal(), e);
            top = fmaxf(top, fabsf(x[i]));
        }
        float scale = td_kv_encode(dtype, codes, x, n);
        if (top < 0x1p-100f) { /* less than counts */
            assert_true(scale == 0);
            continue;
        }
        for (int32_t i = 0; i < n; i++) {
            double back = (double)td_widen(codes, dtype, i) * (double)scale,
                   step = dtype == TD_INT8 ? (double)top / 127
                                           : fmax(fabs((double)x[i]) / 8, (double)top / 448 / 512);
            /* a code of 127 is a product rounded by 2^-17 */
            if (!(fabs(back - (double)x[i]) <= step * (0.5 + 0x1p-16)))
                fail_msg("%s: %a comes back as %a, scale %a", td_dtype_name(dtype), (double)x[i],
                         back, (double)scale);
        }
    }
    /* nothing, less than counts, and what is no number */
    static const struct {
        float x[4], scale;
    } rows[] = {{{0, -0.0f, 0, 0}, 0},
                {{0x1p-101f, -0x1p-149f, 0, 0}, 0},
                {{1, INFINITY, -2, 3}, NAN},
                {{1, -INFINITY, -2, 3}, NAN},
                {{1, NAN, INFINITY, 3}, NAN}};
    for (size_t i = 0; i < 2 * sizeof rows / sizeof *rows; i++) {
        memset(codes, 0xff, 4);
        float scale = td_kv_encode(i % 2 ? TD_FP8 : TD_INT8, codes, rows[i / 2].x, 4);
        assert_memory_equal(codes, "\0\0\0\0", 4);
        assert_true(isnan(rows[i / 2].scale) ? isnan(scale) : scale == 0);
    }
}

/* Both parts of a latent row come back within half a step, whatever the size of the other. */
static void test_latent_rows(void **state)
{
    (void)state;
    uint8_t codes[120];
    float x[120];
    for (int c = 0; c < 2000; c++) {
        enum td_dtype dtype = c % 2 ? TD_FP8 : TD_INT8;
        int32_t n_first = rng_int(1, 100), n = n_first + rng_int(1, 20);
        int e[2] = {rng_int(-40, 40), rng_int(-40, 40)};
        float top[2] = {0, 0};
        for (int32_t i = 0; i < n; i++) {
            x[i] = ldexpf(rng_normal(), e[i >= n_first]);
            top[i >= n_first] = fmaxf(top[i >= n_first], fabsf(x[i]));
        }
        float both = td_kv_encode_latent(dtype, codes, x, n_first, n);
        for (int32_t i = 0; i < n; i++) {
            float scale = i < n_first ? td_kv_scale_first(both) : td_kv_scale_rest(both);
            double back = (double)td_widen(codes, dtype, i) * (double)scale,
                   step = dtype == TD_INT8 ? (double)scale
                                           : fmax(fabs((double)x[i]) / 8, (double)scale / 512);
            /* rounding a scale up to bf16 adds less than 2^-7 of it; a code of 127 is a product
               rounded by 2^-17 */
            assert_true((double)scale <=
                        (double)top[i >= n_first] / (dtype == TD_INT8 ? 127 : 448) * (1 + 0x1p-7));
            if (!(fabs(back - (double)x[i]) <= step * (0.5 + 0x1p-16)))
                fail_msg("%s: %a comes back as %a, scale %a", td_dtype_name(dtype), (double)x[i],
                         back, (double)scale);
        }
    }
    x[0] = 1, x[1] = NAN, x[2] = INFINITY, x[3] = 0;
    float nan_first = td_kv_encode_latent(TD_INT8, codes, x + 1, 1, 3);
    assert_true(isnan(td_kv_scale_first(nan_first)) && isnan(td_kv_scale_rest(nan_first)));
    float nan_rest = td_kv_encode_latent(TD_FP8, codes, x, 1, 2);
    assert_false(isnan(td_kv_scale_first(nan_rest)));
    assert_true(isnan(td_kv_scale_rest(nan_rest)));
    float zero = td_kv_encode_latent(TD_INT8, codes, x + 3, 1, 1);
    assert_true(td_kv_bits(zero) == 0);
}

/* What workers of other builds have stored and sent: another formula needs a new
 * TD_KV_LAYOUT_CODED_VERSION. */
static void test_coded_bytes(void **state)
{
    (void)state;
    static const float x[8] = {1, -2, 0.5f, 0.00390625f, -0.01f, 1.9921875f, 0, 0.7f};
    uint8_t codes[8];
    float scale = td_kv_encode(TD_INT8, codes, x, 8);
    assert_true(td_kv_bits(scale) == 0x3c810204); /* 2 / 127 */
    static const uint8_t as_int8[8] = {64, 0x81, 32, 0, 0xff, 127, 0, 44};
    assert_memory_equal(codes, as_int8, 8);
    scale = td_kv_encode(TD_FP8, codes, x, 8);
    assert_true(td_kv_bits(scale) == 0x3b924925); /* 2 / 448 */
    static const uint8_t as_fp8[8] = {0x76, 0xfe, 0x6e, 0x36, 0xc1, 0x7e, 0, 0x72};
    assert_memory_equal(codes, as_fp8, 8);
}

static void test_silu_mul(void **state)
{
    (void)state;
    const struct td_ops *ref = td_ops_by_name("ref");
    for (int t = 1; t < N_TABLES; t++) {
        const struct td_ops *ops = plain_table_or_say(t);
        for (int c = 0; ops && c < 3 * N_DIMS; c++) {
            int32_t dim = dims[c % N_DIMS], rows = rng_int(1, 4);
            int64_t gs = dim + rng_int(0, 3), us = dim + rng_int(0, 3), os = dim + rng_int(0, 3);
            float *g = alloc_poisoned((size_t)(rows * gs) * 4),
                  *u = alloc_poisoned((size_t)(rows * us) * 4),
                  *o0 = alloc_poisoned((size_t)(rows * os) * 4),
                  *o1 = alloc_poisoned((size_t)(rows * os) * 4);
            for (int64_t i = 0; i < rows * gs; i++)
                g[i] = rng_normal() * (float)(c % 3 == 0 ? 1 : c % 3 == 1 ? 10 : 60);
            rng_fill(u, rows * us);
            g[0] = c & 1 ? -200.0f : NAN;
            ref->silu_mul(o0, g, u, rows, dim, os, gs, us, 0, 1);
            int parts = rng_int(1, 3);
            for (int p = 0; p < parts; p++)
                ops->silu_mul(o1, g, u, rows, dim, os, gs, us, p, parts);
            for (int64_t i = 0; i < rows * os; i++) {
                if (i % os >= dim)
                    assert_memory_equal(&o0[i], &o1[i], 4);
                else /* exp to 2 ulp, then three roundings; silu below -87 is under 1e-35 either
                        way */
                    check_close("silu_mul", ops->name, i, o1[i], o0[i],
                                0x1p-24 * 8 * fabs((double)o0[i]) + 1e-34);
            }
            if (gs == dim) { /* in place, and each row alone: the same bits */
                for (int32_t r = 0; r < rows; r++) {
                    ops->silu_mul(g + r * gs, g + r * gs, u + r * us, 1, dim, gs, gs, us, 0, 1);
                    assert_memory_equal(g + r * gs, o1 + r * os, (size_t)dim * 4);
                }
            }
            free(g), free(u), free(o0), free(o1);
        }
    }
}

/* Every gate, and scales with and without a cap: near ref, in any parts, and a row alone. */
static void test_act_mul_and_scale_cap(void **state)
{
    (void)state;
    const struct td_ops *ref = td_ops_by_name("ref");
    static const enum td_act acts[] = {TD_ACT_SILU, TD_ACT_GELU, TD_ACT_SWIGLU_7};
    for (int t = 1; t < N_TABLES; t++) {
        const struct td_ops *ops = plain_table_or_say(t);
        for (int c = 0; ops && c < 3 * N_DIMS; c++) {
            int32_t dim = dims[c % N_DIMS], rows = rng_int(1, 4), parts = rng_int(1, 3);
            int64_t s = dim + rng_int(0, 3);
            size_t bytes = (size_t)(rows * s) * 4;
            float *g = alloc_poisoned(bytes), *u = alloc_poisoned(bytes), *x0 = malloc(bytes),
                  *x1 = malloc(bytes), *o0 = alloc_poisoned(bytes), *o1 = alloc_poisoned(bytes);
            assert_true(x0 && x1);
            rng_fill(u, rows * s);
            for (int64_t i = 0; i < rows * s; i++) g[i] = 9 * rng_normal(), u[i] *= 5;
            struct td_act_args a = {acts[c % 3], o0, g, u, rows, dim, s, s, s};
            ref->act_mul(&a, 0, 1);
            a.out = o1;
            for (int p = 0; p < parts; p++) ops->act_mul(&a, p, parts);
            struct td_scale_args y = {x0, rows, dim, s, 0.75f, c & 1 ? 5.5f : 0};
            memcpy(x0, g, bytes), memcpy(x1, g, bytes);
            ref->scale_cap(&y, 0, 1);
            y.x = x1;
            for (int p = 0; p < parts; p++) ops->scale_cap(&y, p, parts);
            for (int64_t i = 0; i < rows * s; i++) {
                if (i % s >= dim) {
                    assert_memory_equal(&o0[i], &o1[i], 4);
                    assert_memory_equal(&x0[i], &x1[i], 4);
                    continue;
                }
                /* the exponent is rounded, too; where it is large, what it makes is small */
                double room = fabs((double)o0[i]) * 64 + fabs((double)u[i]) + 1;
                check_close("act_mul", ops->name, i, o1[i], o0[i], 0x1p-24 * room);
                check_close("scale_cap", ops->name, i, x1[i], x0[i],
                            0x1p-24 * (4 * fabs((double)x0[i]) + 4 * (double)y.cap));
            }
            y.x = g + (rows - 1) * s, y.n_rows = a.n_rows = 1;
            a.gate = y.x, a.up = u + (rows - 1) * s, a.out = o0;
            ops->act_mul(&a, 0, 1);
            ops->scale_cap(&y, 0, 1);
            assert_memory_equal(o0, o1 + (rows - 1) * s, (size_t)dim * 4);
            assert_memory_equal(y.x, x1 + (rows - 1) * s, (size_t)dim * 4);
            free(g), free(u), free(x0), free(x1), free(o0), free(o1);
        }
    }
}

static void test_embed(void **state)
{
    (void)state;
    const struct td_ops *ref = td_ops_by_name("ref");
    static const enum td_dtype types[] = {TD_F32, TD_F16, TD_BF16};
    for (int t = 1; t < N_TABLES; t++) {
        const struct td_ops *ops = plain_table_or_say(t);
        for (int c = 0; ops && c < 3 * N_DIMS; c++) {
            enum { VOCAB = 11, ROWS = 7 };
            int32_t dim = dims[c % N_DIMS], ids[ROWS];
            enum td_dtype dtype = types[c % 3];
            size_t bytes = (size_t)VOCAB * (size_t)dim * td_dtype_bytes(dtype);
            uint8_t *table = malloc(bytes); /* exact size: reading past the end shows under a
                                               sanitizer */
            assert_non_null(table);
            for (size_t i = 0; i < bytes; i++) table[i] = (uint8_t)rng_u64();
            for (int64_t i = 0; i < VOCAB * dim; i++) /* signalling NaN of f16 may turn quiet:
                                                         not asked of anyone */
                if (isnan(td_widen(table, dtype, i))) put(table, dtype, i, 1.5f);
            for (int r = 0; r < ROWS; r++) ids[r] = rng_int(0, VOCAB - 1);
            ids[3] = VOCAB - 1;
            float *o0 = alloc_poisoned((size_t)(ROWS * dim) * 4),
                  *o1 = alloc_poisoned((size_t)(ROWS * dim) * 4);
            ref->embed(o0, table, dtype, ids, ROWS, dim, 0, 1);
            for (int p = 0; p < 2; p++) ops->embed(o1, table, dtype, ids, ROWS, dim, p, 2);
            assert_memory_equal(o0, o1, (size_t)(ROWS * dim) * 4);
            free(table), free(o0), free(o1);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_kv_store),
        cmocka_unit_test(test_silu_mul),
        cmocka_unit_test(test_embed),
        cmocka_unit_test(test_fp8),
        cmocka_unit_test(test_act_mul_and_scale_cap),
        cmocka_unit_test(test_coded_rows),
        cmocka_unit_test(test_latent_rows),
        cmocka_unit_test(test_coded_bytes),
    };
    rng_start();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
