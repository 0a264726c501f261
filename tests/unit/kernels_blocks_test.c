/* kernels_blocks_test.c - formats of blocks, and the product with them: every table gives the bits
 * of ref on odd shapes, whatever company a row has, and ref is what blocks.h says, in double. */
#include "tests/unit/kernels_formats.h"

#include "common/base/gguf.h"
#include "common/base/mem.h"
#include "kernels/blocks.h"
#include "kernels/format.h"

struct case_of {
    const struct td_format *f;
    int32_t m, n, k;
    int64_t xs, ys;
    uint8_t *rows;
    float *x, *y0, *bias;
};

static struct case_of case_make(const struct td_format *f, int32_t m, int32_t n, int32_t k)
{
    struct case_of c = {.f = f, .m = m, .n = n, .k = k};
    c.xs = k + rng_int(0, 5), c.ys = n + rng_int(0, 5);
    c.rows = random_blocks(f, n, k);
    c.x = alloc_poisoned((size_t)(m * c.xs) * 4);
    c.y0 = alloc_poisoned((size_t)(m * c.ys) * 4);
    c.bias = alloc_poisoned((size_t)n * 4);
    rng_fill(c.bias, n);
    for (int32_t i = 0; i < m; i++) rng_fill(c.x + i * c.xs, k), rng_fill(c.y0 + i * c.ys, n);
    return c;
}

static void case_free(struct case_of *c) { free(c->rows), free(c->x), free(c->y0), free(c->bias); }

/* Rows [first, first + n) of the case; the caller frees. Bias with odd `flags`, the residual with
 * bit 1. */
static float *product(const struct td_ops *ops, const struct case_of *c, int32_t first, int32_t n,
                      int flags, int n_parts)
{
    const struct td_block_ops *b = ops->blocks;
    void *packed = alloc_poisoned(b->packed_bytes(c->n, c->k, c->f));
    for (int32_t row = (c->n - 1) / 64 * 64; row >= 0; row -= 64)
        assert_true(b->pack(packed, c->n, c->k, c->f,
                            c->rows + (size_t)row * td_format_bytes(c->f, c->k), row,
                            c->n - row < 64 ? c->n - row : 64));
    struct td_weight w = {.data = packed, .n_out = c->n, .n_in = c->k, .format = c->f};
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
                     c->f->name, c->m, c->n, c->k, n_parts, (int)(i / c->ys), (int)(i % c->ys),
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

/* Every M to 12, every third to 65 (each in some format) and one beyond, against ref; then some of
 * the rows alone. In the short form every ninth, and the one beyond with two panels. */
static void tables_give_the_bits_of_ref(void **state)
{
    (void)state;
    bool is_short = getenv("TANDEM_TEST_SHORT") != NULL;
    int32_t step = is_short ? 9 : 3, n_large = is_short ? 33 : 70;
    static const int32_t ns[] = {1, 5, 31, 32, 33, 63, 64, 65, 130};
    for (uint32_t type = 0; type < N_TYPES; type++) {
        const struct td_format *f = td_format_of_gguf(type);
        if (!f || f->dtype) continue;
        for (int32_t m = 1; m <= 65; m += m < 12 ? 1 : m == 12 ? 1 + (int32_t)type % step : step) {
            struct case_of c =
                case_make(f, m, ns[rng_int(0, 8)], f->block * rng_int(1, f->block > 32 ? 3 : 9));
            check_case(&c, rng_int(0, 3));
            case_free(&c);
        }
        /* several passes over the panels */
        struct case_of large = case_make(f, 90, n_large, f->block == 32 ? 4096 : 3072);
        check_case(&large, 3);
        case_free(&large);
    }
}

/* Blocks with every field at its extremes, and random ones, read back to the bits of gguf-py. */
static void values_are_those_of_gguf_py(void **state)
{
    (void)state;
    int n_formats = 0;
    for (uint32_t type = 0; type < N_TYPES; type++) {
        const struct td_format *f = td_format_of_gguf(type);
        if (!f || f->dtype) continue;
        char path[80], *bytes;
        size_t n_bytes;
        struct td_err err = {0};
        snprintf(path, sizeof path, "tests/golden/formats/%s.bin", f->name);
        if (td_file_read(path, 1 << 20, &bytes, &n_bytes, &err)) fail_msg("%s", err.msg);
        size_t n = n_bytes / ((size_t)f->block_bytes + (size_t)f->block * 4);
        int64_t n_values = (int64_t)n * f->block;
        assert_true(n >= 6 && n * ((size_t)f->block_bytes + (size_t)f->block * 4) == n_bytes);
        float *got = alloc_poisoned((size_t)n_values * 4);
        td_format_read(f, bytes, n_values, got);
        const char *want = bytes + n * (size_t)f->block_bytes;
        for (int64_t i = 0; i < n_values; i++) {
            float w;
            memcpy(&w, want + 4 * i, 4);
            if (memcmp(&got[i], &w, 4) != 0)
                fail_msg("%s: value %d is %a, gguf-py has %a", f->name, (int)i, (double)got[i],
                         (double)w);
        }
        free(got), free(bytes);
        n_formats++;
    }
    assert_int_equal(n_formats, 13);
}

/* A scale that is no number is found wherever it stands; so is the parser's size of each format. */
static void scales_that_are_no_numbers(void **state)
{
    (void)state;
    static const uint16_t bad[] = {0x7c00, 0xfc00, 0x7e00};
    for (uint32_t type = 0; type < N_TYPES; type++) {
        const struct td_format *f = td_format_of_gguf(type);
        const char *name;
        int32_t block = 0, block_bytes = 0;
        bool known = td_gguf_type(type, &name, &block, &block_bytes);
        assert_int_equal(known, f != NULL);
        if (!f) continue;
        assert_string_equal(name, f->name);
        assert_true(block == f->block && block_bytes == f->block_bytes);
        if (f->dtype) continue;
        int at[2];
        factors_of(f, at);
        for (int i = 0; i < 6; i++) {
            struct case_of c = case_make(f, 1, 5, f->block * 3);
            uint8_t *b = c.rows + (size_t)(rng_int(0, 14) * f->block_bytes);
            if (at[0] < 0)
                b[0] = 255;
            else if (at[i % 2] >= 0)
                memcpy(b + at[i % 2], &bad[i / 2], 2);
            else
                memcpy(b + at[0], &bad[i / 2], 2);
            for (int t = 0; t < N_TABLES; t++) {
                const struct td_ops *ops = td_ops_by_name(td_ops_names[t]);
                if (!ops) continue;
                void *packed = alloc_poisoned(ops->blocks->packed_bytes(c.n, c.k, f));
                if (ops->blocks->pack(packed, c.n, c.k, f, c.rows, 0, c.n))
                    fail_msg("%s %s: a scale of %#x was not seen", ops->name, f->name, bad[i / 2]);
                free(packed);
            }
            case_free(&c);
        }
    }
}

/* A power of two that makes an infinite value of one of its codes is seen, and only such a one. */
static void infinite_values_are_seen(void **state)
{
    (void)state;
    const struct td_format *f = td_format_of_gguf(39);
    assert_string_equal(f->name, "MXFP4");
    for (int e = 250; e < 255; e++)
        for (int code = 0; code < 16; code++) {
            static const int8_t sizes[8] = {0, 1, 2, 3, 4, 6, 8, 12};
            bool want = isfinite(ldexpf(sizes[code & 7], e - 128)) != 0;
            struct case_of c = case_make(f, 1, 5, f->block * 3);
            uint8_t *b = c.rows + (size_t)(rng_int(0, 14) * f->block_bytes);
            int at = rng_int(0, TD_GROUP - 1);
            memset(b, 0, (size_t)f->block_bytes);
            b[0] = (uint8_t)e;
            b[1 + at % 16] = (uint8_t)(code << 4 * (at / 16));
            for (int t = 0; t < N_TABLES; t++) {
                const struct td_ops *ops = td_ops_by_name(td_ops_names[t]);
                if (!ops) continue;
                void *packed = alloc_poisoned(ops->blocks->packed_bytes(c.n, c.k, f));
                if (ops->blocks->pack(packed, c.n, c.k, f, c.rows, 0, c.n) != want)
                    fail_msg("%s: 2^(%d - 128) with the code %d: must%s be refused", ops->name, e,
                             code, want ? " not" : "");
                free(packed);
            }
            case_free(&c);
        }
}

/* Packed rows read back to the bits of the file's, whatever the panel. */
static void packed_rows_read_back(void **state)
{
    (void)state;
    for (int t = 0; t < N_TABLES; t++) {
        const struct td_ops *ops = table_or_say(t);
        for (uint32_t type = 0; type < N_TYPES && ops; type++) {
            const struct td_format *f = td_format_of_gguf(type);
            if (!f || f->dtype) continue;
            struct case_of c = case_make(f, 1, 71, f->block * 3);
            void *packed = alloc_poisoned(ops->blocks->packed_bytes(c.n, c.k, f));
            struct td_weight w = {.data = packed, .n_out = c.n, .n_in = c.k, .format = f};
            size_t row_bytes = td_format_bytes(f, c.k);
            ops->blocks->pack(packed, c.n, c.k, f, c.rows + 64 * row_bytes, 64, c.n - 64);
            ops->blocks->pack(packed, c.n, c.k, f, c.rows, 0, 64);
            float *want = alloc_poisoned((size_t)c.k * 4), *got = alloc_poisoned((size_t)c.k * 4);
            for (int32_t r = 0; r < c.n; r++) {
                td_format_read(f, c.rows + (size_t)r * row_bytes, c.k, want);
                ops->blocks->read_row(&w, r, got);
                if (memcmp(want, got, (size_t)c.k * 4) != 0)
                    fail_msg("%s %s: row %d reads back as other values", ops->name, f->name, r);
            }
            free(want), free(got), free(packed), case_free(&c);
        }
    }
}

/* ref against the values that `read` gives, in double: the difference is that of the activations,
 * whose codes are off by at most half a step, and of one chain in f32. */
static void ref_multiplies_what_read_gives(void **state)
{
    (void)state;
    const struct td_ops *ref = td_ops_by_name("ref");
    for (uint32_t type = 0; type < N_TYPES; type++) {
        const struct td_format *f = td_format_of_gguf(type);
        if (!f || f->dtype) continue;
        struct case_of c = case_make(f, 3, 7, f->block * 4);
        float *y = product(ref, &c, 0, 3, 0, 1), *w = alloc_poisoned((size_t)c.k * 4);
        for (int32_t n = 0; n < c.n; n++) {
            td_format_read(f, c.rows + (size_t)n * td_format_bytes(f, c.k), c.k, w);
            for (int32_t m = 0; m < c.m; m++) {
                double dot = 0, sum_abs = 0;
                for (int32_t g = 0; g < c.k; g += TD_GROUP) {
                    struct td_group_x x;
                    td_group_x_make(c.x + m * c.xs + g, &x);
                    for (int i = 0; i < TD_GROUP; i++) {
                        double a = (double)x.codes[i] * (double)x.s, v = (double)w[g + i];
                        assert_true(fabs(a - (double)c.x[m * c.xs + g + i]) <= 0.501 * (double)x.s);
                        dot += a * v;
                        sum_abs += fabs(a * v);
                    }
                }
                double got = (double)y[m * c.ys + n];
                if (!(fabs(got - dot) <= 0x1p-22 * sum_abs))
                    fail_msg("%s k=%d: y[%d,%d] = %.9g, in double %.9g", f->name, c.k, m, n, got,
                             dot);
            }
        }
        free(y), free(w), case_free(&c);
    }
}

/* Activations that are no numbers make outputs that are none; tiny ones count as zero. */
static void odd_activations(void **state)
{
    (void)state;
    static const float odd[] = {INFINITY, -INFINITY, NAN};
    for (int t = 0; t < N_TABLES; t++) {
        const struct td_ops *ops = table_or_say(t);
        if (!ops) continue;
        const struct td_format *f = td_format_of_gguf(8);
        struct case_of c = case_make(f, 4, 5, 64);
        for (int i = 0; i < 3; i++) c.x[i * c.xs + 33 + i] = odd[i];
        for (int k = 0; k < c.k; k++) c.x[3 * c.xs + k] = k % 2 ? 0x1p-120f : -0x1p-149f;
        float *y = product(ops, &c, 0, 4, 0, 1);
        for (int32_t n = 0; n < c.n; n++) {
            for (int32_t m = 0; m < 3; m++) assert_true(isnan(y[m * c.ys + n]));
            assert_true(y[3 * c.ys + n] == 0);
        }
        free(y), case_free(&c);
    }
}

/* Memory: the bytes of the file, and of what a last panel lacks. */
static void packed_bytes_are_those_of_the_file(void **state)
{
    (void)state;
    for (int t = 0; t < N_TABLES; t++) {
        const struct td_ops *ops = table_or_say(t);
        for (uint32_t type = 0; type < N_TYPES && ops; type++) {
            const struct td_format *f = td_format_of_gguf(type);
            if (!f || f->dtype) continue;
            size_t file = 2048 * td_format_bytes(f, 2048),
                   packed = ops->blocks->packed_bytes(2048, 2048, f);
            if (packed > file + file * 7 / 100)
                fail_msg("%s %s: %zu bytes packed, %zu in the file", ops->name, f->name, packed,
                         file);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_give_the_bits_of_ref),
        cmocka_unit_test(values_are_those_of_gguf_py),
        cmocka_unit_test(scales_that_are_no_numbers),
        cmocka_unit_test(infinite_values_are_seen),
        cmocka_unit_test(packed_rows_read_back),
        cmocka_unit_test(ref_multiplies_what_read_gives),
        cmocka_unit_test(odd_activations),
        cmocka_unit_test(packed_bytes_are_those_of_the_file),
    };
    rng_start();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
