/* kernels_scaled_test.c - scaled formats and the product with them: every table gives the bits of
 * ref on odd shapes, whatever company a row has, and ref is what scaled.h says, in double. */
#include "tests/unit/kernels_formats.h"

#include "kernels/format.h"
#include "kernels/scaled.h"

struct case_of {
    struct td_format f;
    int32_t m, n, k;
    int64_t xs, ys;
    uint8_t *rows;
    uint16_t *group_of;
    float *x, *y0, *bias;
};

static struct case_of case_make(const struct scaled_kind *t, int32_t m, int32_t n, int32_t k)
{
    struct case_of c = {.m = m, .n = n, .k = k};
    c.xs = k + rng_int(0, 5), c.ys = n + rng_int(0, 5);
    c.group_of = alloc_poisoned((size_t)k * 2);
    c.f = random_scaled_format(t, k, c.group_of);
    c.rows = random_scaled(&c.f, n);
    c.x = alloc_poisoned((size_t)(m * c.xs) * 4);
    c.y0 = alloc_poisoned((size_t)(m * c.ys) * 4);
    c.bias = alloc_poisoned((size_t)n * 4);
    rng_fill(c.bias, n);
    for (int32_t i = 0; i < m; i++) {
        rng_fill(c.x + i * c.xs, k), rng_fill(c.y0 + i * c.ys, n);
        for (int32_t o = rng_int(0, 3); o > 0; o--) c.x[i * c.xs + rng_int(0, k - 1)] *= 20;
    }
    return c;
}

static void case_free(struct case_of *c)
{
    free(c->rows), free(c->x), free(c->y0), free(c->bias), free(c->group_of);
}

/* Rows [first, first + n) of the case; the caller frees. Bias with odd `flags`, the residual with
 * bit 1. */
static float *product(const struct td_ops *ops, const struct case_of *c, int32_t first, int32_t n,
                      int flags, int n_parts)
{
    const struct td_block_ops *b = ops->scaled;
    void *packed = alloc_poisoned(b->packed_bytes(c->n, c->k, &c->f));
    for (int32_t row = (c->n - 1) / 64 * 64; row >= 0; row -= 64)
        assert_true(b->pack(packed, c->n, c->k, &c->f,
                            c->rows + (size_t)row * (size_t)c->f.block_bytes, row,
                            c->n - row < 64 ? c->n - row : 64));
    struct td_weight w = {.data = packed, .n_out = c->n, .n_in = c->k, .format = &c->f};
    float *y = alloc_poisoned((size_t)(n * c->ys) * 4);
    memcpy(y, c->y0 + first * c->ys, (size_t)(n * c->ys) * 4);
    struct td_gemm_args a = {.w = &w,
                             .x = c->x + first * c->xs,
                             .y = y,
                             .bias = flags & 1 ? c->bias : NULL,
                             .scratch = alloc_poisoned(b->gemm_scratch_bytes(n, c->k)),
                             .n_rows = n,
                             .x_stride = c->xs,
                             .y_stride = c->ys,
                             .accumulate = (flags & 2) != 0};
    for (int p = 0; p < n_parts; p++) b->gemm_prepare(&a, p, n_parts);
    for (int p = n_parts - 1; p >= 0; p--) b->gemm(&a, p, n_parts);
    free(a.scratch), free(packed);
    return y;
}

static void check_same(const struct td_ops *ops, const struct case_of *c, const float *want,
                       const float *got, int32_t n_rows, int n_parts)
{
    for (int64_t i = 0; i < n_rows * c->ys; i++)
        if (memcmp(&want[i], &got[i], 4) != 0)
            fail_msg("%s %s m=%d n=%d k=%d parts=%d: y[%d,%d] is %a, must be %a", ops->name,
                     c->f.name, c->m, c->n, c->k, n_parts, (int)(i / c->ys), (int)(i % c->ys),
                     (double)got[i], (double)want[i]);
}

/* What each table makes of all of the case's rows, and then of some of them, beside ref. */
static void check_case(const struct case_of *c, int flags)
{
    const struct td_ops *tables[N_TABLES];
    int n_tables = tables_or_say(false, tables);
    float *want = product(td_ops_by_name("ref"), c, 0, c->m, flags, 1);
    for (int t = 0; t < n_tables; t++) {
        int n_parts = rng_int(1, 5);
        float *got = product(tables[t], c, 0, c->m, flags, n_parts);
        check_same(tables[t], c, want, got, c->m, n_parts);
        free(got);
        int32_t first = rng_int(0, c->m - 1), n = rng_int(1, c->m - first);
        got = product(tables[t], c, first, n, flags, n_parts);
        check_same(tables[t], c, want + first * c->ys, got, n, n_parts);
        free(got);
    }
    free(want);
}

/* Every M to 13, some to 65, on odd shapes, against ref; then some of the rows alone. */
static void tables_give_the_bits_of_ref(void **state)
{
    (void)state;
    static const int32_t ns[] = {1, 5, 31, 32, 33, 63, 64, 65, 130};
    static const int32_t ks[] = {1, 3, 8, 31, 64, 127, 128, 129, 200, 260};
    for (int i = 0; i < N_KINDS; i++)
        for (int32_t m = 1; m <= 65; m += m < 13 ? 1 : 1 + rng_int(4, 12)) {
            struct case_of c = case_make(&kinds[i], m, ns[rng_int(0, 8)], ks[rng_int(0, 9)]);
            check_case(&c, rng_int(0, 3));
            case_free(&c);
        }
    /* more rows than one widening serves, and than one pass of the integer products */
    for (int i = 0; i < N_KINDS; i += kinds[i].kind == TD_SCALED_E4M3 ? 3
                                      : kinds[i].kind == TD_SCALED_I8 ? 1
                                                                      : 2) {
        /* and, of integers, more k than a block of tiles has, with some behind the last tile */
        int32_t k = kinds[i].kind == TD_SCALED_I8 ? 1164 : 136;
        struct case_of large = case_make(&kinds[i], 300, 33, k);
        check_case(&large, 3);
        case_free(&large);
    }
    /* groups that are longer than what is widened at a time */
    static const struct scaled_kind long_groups = {.name = "int4 long groups bf16",
                                                   .kind = TD_SCALED_INT,
                                                   .x = TD_SCALED_X_BF16,
                                                   .scale_type = TD_F16,
                                                   .bits = 4,
                                                   .group = 296,
                                                   .has_zeros = true};
    struct case_of c = case_make(&long_groups, 30, 33, 840);
    check_case(&c, 3);
    case_free(&c);
}

/* Packed rows read back to the bits of the file's, whatever the panel. */
static void packed_rows_read_back(void **state)
{
    (void)state;
    for (int t = 0; t < N_TABLES; t++) {
        const struct td_ops *ops = table_or_say(t);
        for (int i = 0; i < N_KINDS && ops; i++) {
            struct case_of c = case_make(&kinds[i], 1, 71, 133);
            void *packed = alloc_poisoned(ops->scaled->packed_bytes(c.n, c.k, &c.f));
            struct td_weight w = {.data = packed, .n_out = c.n, .n_in = c.k, .format = &c.f};
            size_t row_bytes = (size_t)c.f.block_bytes;
            ops->scaled->pack(packed, c.n, c.k, &c.f, c.rows + 64 * row_bytes, 64, c.n - 64);
            ops->scaled->pack(packed, c.n, c.k, &c.f, c.rows, 0, 64);
            float *want = alloc_poisoned((size_t)c.k * 4), *got = alloc_poisoned((size_t)c.k * 4);
            for (int32_t r = 0; r < c.n; r++) {
                td_scaled_read(&c.f, c.rows + (size_t)r * row_bytes, want);
                ops->scaled->read_row(&w, r, got);
                if (memcmp(want, got, (size_t)c.k * 4) != 0)
                    fail_msg("%s %s: row %d reads back as other values", ops->name, c.f.name, r);
            }
            free(want), free(got), free(packed), case_free(&c);
        }
    }
}

/* What x counts as: the rule of scaled.h written another way. x / s is f32's, as the rule says. */
static double x_counts_as(const struct td_format *f, const float *x, int32_t n, int32_t k)
{
    const struct td_scaled *s = &f->scaled;
    int32_t lo = 0, hi = n;
    float max = 0, scale;
    if (s->x == TD_SCALED_X_F32) return (double)x[k];
    if (s->x == TD_SCALED_X_BF16) { /* 8 bits of fraction, the first of them implied */
        double unit = exp2(floor(log2(fabs((double)x[k]) + 1e-300)) - 7);
        return nearbyint((double)x[k] / unit) * unit;
    }
    if (s->x == TD_SCALED_X_GROUP) lo = k / s->group * s->group, hi = lo + s->group;
    bool skips = s->x == TD_SCALED_X_OUTLIER;
    if (skips && fabsf(x[k]) >= 6) return (double)x[k];
    for (int32_t i = lo; i < hi && i < n; i++)
        if (!skips || fabsf(x[i]) < 6) max = fmaxf(max, fabsf(x[i]));
    scale = s->kind == TD_SCALED_I8 ? max / 127 : max / 448;
    if (s->x == TD_SCALED_X_STATIC) scale = s->x_scale;
    if (s->x_powers) scale = (float)exp2(ceil(log2((double)scale)));
    double v = (double)(x[k] / scale), out = (double)scale;
    if (s->kind == TD_SCALED_I8) return nearbyint(v) * out;
    double step = fmax(exp2(floor(log2(fabs(v) + 1e-30)) - 3), 0x1p-9);
    return fmax(-448, fmin(448, nearbyint(v / step) * step)) * out;
}

/* ref against the values that read gives, in double: the difference is that of chains in f32. */
static void ref_multiplies_what_read_gives(void **state)
{
    (void)state;
    const struct td_ops *ref = td_ops_by_name("ref");
    for (int i = 0; i < N_KINDS; i++) {
        struct case_of c = case_make(&kinds[i], 3, 7, 264);
        float *y = product(ref, &c, 0, 3, 0, 1), *w = alloc_poisoned((size_t)c.k * 4);
        for (int32_t n = 0; n < c.n; n++) {
            td_scaled_read(&c.f, c.rows + (size_t)n * (size_t)c.f.block_bytes, w);
            for (int32_t m = 0; m < c.m; m++) {
                double dot = 0, sum_abs = 0;
                for (int32_t k = 0; k < c.k; k++) {
                    double v = x_counts_as(&c.f, c.x + m * c.xs, c.k, k) * (double)w[k];
                    dot += v, sum_abs += fabs(v);
                }
                double got = (double)y[m * c.ys + n];
                if (!(fabs(got - dot) <= 0x1p-20 * sum_abs))
                    fail_msg("%s: y[%d,%d] = %.9g, in double %.9g", c.f.name, m, n, got, dot);
            }
        }
        free(y), free(w), case_free(&c);
    }
}

/* All 256 bytes of E4M3 against its definition, and rounding to the nearest of them. */
static void e4m3_is_its_definition(void **state)
{
    (void)state;
    double all[256];
    for (int i = 0; i < 256; i++) {
        int e = i >> 3 & 15, m = i & 7;
        double size = e ? ldexp(1 + m / 8.0, e - 7) : ldexp(m / 8.0, -6);
        all[i] = i & 128 ? -size : size;
        if ((i & 127) != 127) assert_true((double)td_e4m3_to_f32((uint8_t)i) == all[i]);
    }
    for (int i = 0; i < 20000; i++) {
        float v = rng_normal() * exp2f((float)rng_int(-12, 10)), got = td_round_e4m3(v);
        double best = 1e9;
        if (i < 126) /* halves between neighbours go to the even one */
            v = (float)((all[i] + all[i + 1]) / 2), got = td_round_e4m3(v),
            assert_true((double)got == all[i + (i & 1)]);
        for (int j = 0; j < 256; j++)
            if ((j & 127) != 127) best = fmin(best, fabs(all[j] - (double)v));
        if (fabs((double)got - (double)v) != best)
            fail_msg("%a rounds to %a, which is not the nearest", (double)v, (double)got);
    }
    assert_true(td_round_e4m3(1e9f) == 448 && td_round_e4m3(-464.0f) == -448);
}

/* Scales that are powers of two already stay, and others go up, however near they are. */
static void powers_of_two(void **state)
{
    (void)state;
    for (int e = -109; e <= 120; e++) {
        float power = ldexpf(1, e);
        assert_true(td_scaled_power_above(power) == power);
        assert_true(td_scaled_power_above(nextafterf(power, 0)) == power);
        assert_true(td_scaled_power_above(nextafterf(power, INFINITY)) == 2 * power);
    }
    assert_true(td_scaled_power_above(0) == 0 && isnan(td_scaled_power_above(NAN)));
    /* a largest of 448 times a power of two is met exactly, and saturates nothing */
    float x[128] = {[5] = -448 * 8.0f};
    assert_true(td_scaled_power_above(td_scaled_x_scale(x, 128, 448, false)) == 8);
    x[9] = 449 * 8.0f;
    assert_true(td_scaled_power_above(td_scaled_x_scale(x, 128, 448, false)) == 16);
}

/* A scale that is no number, and a NaN among codes of E4M3, are seen wherever they stand. */
static void what_is_no_number_is_seen(void **state)
{
    (void)state;
    static const float odd[] = {INFINITY, -INFINITY, NAN};
    for (int t = 0; t < N_TABLES; t++) {
        const struct td_ops *ops = table_or_say(t);
        for (int i = 0; i < N_KINDS && ops; i++) {
            struct case_of c = case_make(&kinds[i], 1, 5, 130);
            void *packed = alloc_poisoned(ops->scaled->packed_bytes(c.n, c.k, &c.f));
            struct td_scaled_row r =
                td_scaled_row_at(&c.f, c.rows + (size_t)(rng_int(0, c.n - 1) * c.f.block_bytes));
            float *scale = &r.scales[rng_int(0, c.f.scaled.n_groups - 1)], old = *scale;
            *scale = odd[rng_int(0, 2)];
            assert_false(ops->scaled->pack(packed, c.n, c.k, &c.f, c.rows, 0, c.n));
            *scale = old;
            assert_true(ops->scaled->pack(packed, c.n, c.k, &c.f, c.rows, 0, c.n));
            r.codes[rng_int(0, c.k - 1)] = 0xff;
            assert_int_equal(ops->scaled->pack(packed, c.n, c.k, &c.f, c.rows, 0, c.n),
                             c.f.scaled.kind != TD_SCALED_E4M3);
            free(packed), case_free(&c);
        }
    }
}

/* A finite scale that makes an infinite value of one of its codes is seen, and only such a one. */
static void infinite_values_are_seen(void **state)
{
    (void)state;
    int n_infinite = 0, n_finite = 0;
    for (int i = 0; i < 8 * N_KINDS; i++) {
        const struct scaled_kind *kind = &kinds[i % N_KINDS];
        struct case_of c = case_make(kind, 1, 5, 130);
        int32_t row = rng_int(0, c.n - 1), g = rng_int(0, c.f.scaled.n_groups - 1);
        uint8_t *at = c.rows + (size_t)(row * c.f.block_bytes);
        struct td_scaled_row r = td_scaled_row_at(&c.f, at);
        float *values = alloc_poisoned((size_t)c.k * 4);
        r.scales[g] = 1;
        td_scaled_read(&c.f, at, values);
        r.scales[g] = ldexpf((float)rng_int(-1999, 1999), rng_int(108, 117));
        bool want = true;
        for (int32_t k = 0; k < c.k; k++)
            if (td_scaled_group_of(&c.f.scaled, k) == g)
                want &= isfinite((float)((double)values[k] * (double)r.scales[g])) != 0;
        assert_int_equal(td_scaled_is_finite(&c.f, at), want);
        for (int t = 0; t < N_TABLES; t++) {
            const struct td_ops *ops = td_ops_by_name(td_ops_names[t]);
            if (!ops) continue;
            void *packed = alloc_poisoned(ops->scaled->packed_bytes(c.n, c.k, &c.f));
            assert_int_equal(ops->scaled->pack(packed, c.n, c.k, &c.f, c.rows, 0, c.n), want);
            free(packed);
        }
        n_infinite += !want, n_finite += want;
        free(values), case_free(&c);
    }
    assert_true(n_infinite > 0 && n_finite > 0);
}

/* Rounded activations that are no numbers make outputs that are none; tiny ones count as zero. */
static void odd_activations(void **state)
{
    (void)state;
    static const float odd[] = {INFINITY, -INFINITY, NAN};
    for (int t = 0; t < N_TABLES; t++) {
        const struct td_ops *ops = table_or_say(t);
        for (int i = 0; i < N_KINDS && ops; i++) {
            struct case_of c = case_make(&kinds[i], 4, 5, 64);
            for (int o = 0; o < 3; o++) c.x[o * c.xs + 33 + o] = odd[o];
            for (int k = 0; k < c.k; k++) c.x[3 * c.xs + k] = k % 2 ? 0x1p-120f : -0x1p-149f;
            float *y = product(ops, &c, 0, 4, 0, 1);
            bool rounds = c.f.scaled.x != TD_SCALED_X_F32;
            for (int32_t n = 0; n < c.n && rounds; n++) {
                for (int32_t m = 0; m < 3; m++) assert_true(isnan(y[m * c.ys + n]));
                assert_true(y[3 * c.ys + n] == 0);
            }
            free(y), case_free(&c);
        }
    }
}

/* Memory: at most 7 % more than codes, scales of the file's type and zeros of as many bits. */
static void packed_bytes_are_those_of_the_file(void **state)
{
    (void)state;
    uint16_t *group_of = alloc_poisoned(2048 * 2);
    for (int t = 1; t < N_TABLES; t++) {
        const struct td_ops *ops = table_or_say(t);
        for (int i = 0; i < N_KINDS && ops; i++) {
            struct td_format f = random_scaled_format(&kinds[i], 2048, group_of);
            if (f.scaled.group < 32) continue;
            size_t groups = (size_t)f.scaled.n_groups,
                   row_bits = 2048u * (size_t)f.bits +
                              groups * 8 * td_dtype_bytes(f.scaled.scale_type) +
                              (f.scaled.has_zeros ? groups * (size_t)f.bits : 0),
                   file = 2048 * row_bits / 8, packed = ops->scaled->packed_bytes(2048, 2048, &f);
            if (packed > file + file * 7 / 100)
                fail_msg("%s %s: %zu bytes packed, %zu in the file", ops->name, f.name, packed,
                         file);
        }
    }
    free(group_of);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_give_the_bits_of_ref),
        cmocka_unit_test(packed_rows_read_back),
        cmocka_unit_test(ref_multiplies_what_read_gives),
        cmocka_unit_test(e4m3_is_its_definition),
        cmocka_unit_test(powers_of_two),
        cmocka_unit_test(what_is_no_number_is_seen),
        cmocka_unit_test(infinite_values_are_seen),
        cmocka_unit_test(odd_activations),
        cmocka_unit_test(packed_bytes_are_those_of_the_file),
    };
    rng_start();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
