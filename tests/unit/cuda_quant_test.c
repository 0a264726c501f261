/* cuda_quant_test.c - quantised weights on a device, through the table: every block format and the
 * scaled ones.
 *
 * A product is that of the weights' numbers rounded to bf16 (quant.cu), so it is compared with the
 * table's own product with a BF16 weight of those numbers: in the way `own` bit for bit, however
 * few the rows, and with sums in double within the bound of f32. Rows that are read back are
 * td_format_read's bits. Where activations are rounded to 8 bits the product is ref's: its bits
 * with integers, and with 8-bit floats up to the order of f32 sums. Each way that the library has
 * (TANDEM_CUDA_GEMM) is tried. */
#include "kernels/cuda/quant.h"
#include "tests/unit/cuda_test.h"
#include "tests/unit/kernels_formats.h"

static bool is_short;

/* A weight in some format, its numbers, and those in bf16 as a weight of the device. */
struct weight {
    struct td_format f;
    int32_t n, k;
    uint16_t *group_of;
    uint8_t *rows;
    float *values; /* [n][k], rounded to bf16 by the end of weight_make */
    struct both packed, bf16;
    struct td_weight w, w_bf16;
};

static const struct td_block_ops *table_of(const struct weight *w)
{
    return td_ops_blocks(ops, &w->f);
}

/* Packs in pieces of 64 rows or 128, as the loader does for a device. */
static void pack_pieces(struct weight *w)
{
    const struct td_block_ops *b = table_of(w);
    size_t row_bytes = td_format_bytes(&w->f, w->k);
    w->packed = both_make(b->packed_bytes(w->n, w->k, &w->f));
    for (int32_t row = 0, n; row < w->n; row += n) {
        n = 64 * rng_int(1, 2);
        n = w->n - row < n ? w->n - row : n;
        size_t at = row ? b->packed_bytes(row, w->k, &w->f) : 0,
               bytes = b->packed_bytes(n, w->k, &w->f);
        uint8_t *piece = alloc_poisoned(bytes);
        assert_true(b->pack(piece, n, w->k, &w->f, w->rows + (size_t)row * row_bytes, 0, n));
        assert_true(at + bytes <= w->packed.bytes || row + n == w->n);
        memcpy((uint8_t *)w->packed.host + at, piece,
               bytes < w->packed.bytes - at ? bytes : w->packed.bytes - at);
        free(piece);
    }
    up(&w->packed);
    uint8_t *whole = alloc_poisoned(w->packed.bytes);
    assert_true(b->pack(whole, w->n, w->k, &w->f, w->rows, 0, w->n));
    assert_memory_equal(whole, w->packed.host, w->packed.bytes);
    free(whole);
}

static void weight_finish(struct weight *w)
{
    w->values = alloc_poisoned((size_t)w->n * (size_t)w->k * 4);
    for (int32_t i = 0; i < w->n; i++) {
        const uint8_t *row = w->rows + (size_t)i * td_format_bytes(&w->f, w->k);
        float *to = w->values + (int64_t)i * w->k;
        if (w->f.scaled.kind)
            td_scaled_read(&w->f, row, to);
        else
            td_format_read(&w->f, row, w->k, to);
    }
    pack_pieces(w);
    const struct td_format *bf16 = td_format_of_dtype(TD_BF16);
    w->bf16 = both_make(ops->packed_bytes(w->n, w->k, TD_BF16));
    ops->pack(w->bf16.host, w->n, w->k, TD_BF16, w->values, TD_F32, 0, w->n);
    up(&w->bf16);
    w->w = (struct td_weight){w->packed.device, w->n, w->k, &w->f};
    w->w_bf16 = (struct td_weight){w->bf16.device, w->n, w->k, bf16};
}

static void of_blocks(struct weight *ret_w, const struct td_format *f, int32_t n, int32_t k)
{
    *ret_w = (struct weight){.f = *f, .n = n, .k = k, .rows = random_blocks(f, n, k)};
    weight_finish(ret_w);
}

static void of_groups(struct weight *ret_w, const struct scaled_kind *t, int32_t n, int32_t k)
{
    *ret_w = (struct weight){.n = n, .k = k, .group_of = alloc_poisoned((size_t)k * 2)};
    ret_w->f = random_scaled_format(t, k, ret_w->group_of);
    ret_w->rows = random_scaled(&ret_w->f, n);
    weight_finish(ret_w);
}

static void weight_free(struct weight *w)
{
    both_free(&w->packed), both_free(&w->bf16);
    free(w->rows), free(w->values), free(w->group_of);
}

/* ---- products -------------------------------------------------------------------------------- */

struct inputs {
    int32_t m;
    int64_t xs, ys;
    struct both x, bias;
    float *y0;
    bool with_bias, accumulate;
};

static struct inputs inputs_make(const struct weight *w, int32_t m)
{
    struct inputs in = {.m = m, .xs = w->k + rng_int(0, 5), .ys = w->n + rng_int(0, 5)};
    in.with_bias = rng_int(0, 1), in.accumulate = rng_int(0, 1);
    float *x = random_rows(m, w->k, in.xs), *bias = random_rows(1, w->n, w->n);
    in.x = copy_of(x, (size_t)(m * in.xs) * 4), in.bias = copy_of(bias, (size_t)w->n * 4);
    in.y0 = random_rows(m, w->n, in.ys);
    free(x), free(bias);
    return in;
}

static void inputs_free(struct inputs *in)
{
    both_free(&in->x), both_free(&in->bias), free(in->y0);
}

/* Rows [first, first + n) of the inputs through `w`; the caller frees. */
static float *product(const struct weight *of, const struct td_weight *w, const struct inputs *in,
                      int32_t first, int32_t n)
{
    const struct td_block_ops *b = w->format->dtype ? NULL : table_of(of);
    size_t bytes = (b ? b->gemm_scratch_bytes : ops->gemm_scratch_bytes)(n, w->n_in);
    struct both y = copy_of(in->y0 + first * in->ys, (size_t)(n * in->ys) * 4);
    void *scratch = NULL;
    if (dev->alloc(bytes, "a test", &scratch, &err)) fail_msg("%s", err.msg);
    struct td_gemm_args a = {.w = w,
                             .x = (float *)(void *)in->x.device + first * in->xs,
                             .y = (float *)(void *)y.device,
                             .bias = in->with_bias ? (float *)(void *)in->bias.device : NULL,
                             .scratch = scratch,
                             .n_rows = n,
                             .x_stride = in->xs,
                             .y_stride = in->ys,
                             .accumulate = in->accumulate};
    (b ? b->gemm_prepare : ops->gemm_prepare)(&a, 0, 1);
    (b ? b->gemm : ops->gemm)(&a, 0, 1);
    down(&y);
    float *ret = alloc_poisoned(y.bytes);
    memcpy(ret, y.host, y.bytes);
    dev->release(scratch), both_free(&y);
    return ret;
}

/* Against sums in double of the numbers that enter. */
static void check_numbers(const struct weight *w, const struct inputs *in, const float *y)
{
    const float *x = in->x.host, *bias = in->bias.host;
    for (int32_t m = 0; m < in->m; m++)
        for (int64_t n = 0; n < in->ys; n++) {
            int64_t at = m * in->ys + n;
            if (n >= w->n) { /* the gap between rows stays as it was */
                assert_memory_equal(&y[at], &in->y0[at], 4);
                continue;
            }
            double want = in->with_bias ? (double)bias[n] : 0, size = 1;
            if (in->accumulate) want += (double)in->y0[at];
            for (int32_t k = 0; k < w->k; k++) {
                double v = (double)td_bf16_to_f32(td_f32_to_bf16(w->values[n * w->k + k])) *
                           (double)td_bf16_to_f32(td_f32_to_bf16(x[m * in->xs + k]));
                want += v, size += fabs(v);
            }
            if (!(fabs((double)y[at] - want) <= 0x1p-23 * (4 + 4 * sqrt(w->k)) * (size + 4)))
                fail_msg("%s m=%d n=%d k=%d: y[%d,%d] is %.9g, must be %.9g", w->f.name, in->m,
                         w->n, w->k, m, (int)n, (double)y[at], want);
        }
}

static void check_same(const struct weight *w, const char *what, const float *want,
                       const float *got, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (memcmp(&want[i], &got[i], 4) != 0)
            fail_msg("%s n=%d k=%d: %s: [%lld] is %a, must be %a", w->f.name, w->n, w->k, what,
                     (long long)i, (double)got[i], (double)want[i]);
}

/* Against ref, which rounds activations by the same formulas. */
static void check_codes(const struct weight *w, const struct inputs *in, const float *y)
{
    const struct td_block_ops *b = ref->scaled;
    void *packed = alloc_poisoned(b->packed_bytes(w->n, w->k, &w->f));
    assert_true(b->pack(packed, w->n, w->k, &w->f, w->rows, 0, w->n));
    const struct td_weight rw = {packed, w->n, w->k, &w->f};
    float *want = alloc_poisoned((size_t)(in->m * in->ys) * 4);
    memcpy(want, in->y0, (size_t)(in->m * in->ys) * 4);
    struct td_gemm_args a = {.w = &rw,
                             .x = in->x.host,
                             .y = want,
                             .bias = in->with_bias ? in->bias.host : NULL,
                             .scratch = alloc_poisoned(b->gemm_scratch_bytes(in->m, w->k)),
                             .n_rows = in->m,
                             .x_stride = in->xs,
                             .y_stride = in->ys,
                             .accumulate = in->accumulate};
    b->gemm_prepare(&a, 0, 1);
    b->gemm(&a, 0, 1);
    if (w->f.scaled.kind == TD_SCALED_I8) check_same(w, "exact sums", want, y, in->m * in->ys);
    for (int64_t i = 0; i < in->m * in->ys; i++) {
        const float *x = (const float *)in->x.host + i / in->ys * in->xs;
        double size = 8;
        if (i % in->ys >= w->n) continue;
        for (int32_t k = 0; k < w->k; k++)
            size += fabs((double)x[k] * (double)w->values[i % in->ys * w->k + k]);
        if (!(fabs((double)y[i] - (double)want[i]) <= 0x1p-22 * (4 + 4 * sqrt(w->k)) * size))
            fail_msg("%s m=%d n=%d k=%d: y[%d,%d] is %.9g, must be %.9g", w->f.name, in->m, w->n,
                     w->k, (int)(i / in->ys), (int)(i % in->ys), (double)y[i], (double)want[i]);
    }
    free(packed), free(want), free(a.scratch);
}

/* m rows; then some of them alone. has_order: an output's bits are those of the BF16 weight, and of
 * any number of rows. */
static void check_product(const struct weight *w, int32_t m, bool has_order)
{
    struct inputs in = inputs_make(w, m);
    float *y = product(w, &w->w, &in, 0, m);
    bool is_rows = td_quant_is_rows(&w->f);
    (is_rows ? check_codes : check_numbers)(w, &in, y);
    if (has_order) {
        int32_t first = rng_int(0, m - 1), n = rng_int(1, m - first);
        float *bf16 = product(w, &w->w_bf16, &in, 0, m), *part = product(w, &w->w, &in, first, n);
        /* the order of sums is cut by the columns, which a packed BF16 weight has in eights */
        if (!is_rows && (w->k + 31) / 32 * 4 == (w->k + 7) / 8)
            check_same(w, "as widened to BF16", bf16, y, m * in.ys);
        check_same(w, "some rows alone", y + first * in.ys, part, n * in.ys);
        free(bf16), free(part);
    }
    inputs_free(&in), free(y);
}

static void check_rows(const struct weight *w)
{
    int32_t ids[9];
    struct both out = poisoned((size_t)9 * (size_t)w->k * 4);
    for (int i = 0; i < 9; i++) ids[i] = i == 4 ? -1 : rng_int(0, w->n - 1);
    struct both d = copy_of(ids, sizeof ids);
    table_of(w)->embed(&w->w, (int32_t *)(void *)d.device, 9, (float *)(void *)out.device);
    down(&out);
    const float *got = out.host;
    for (int i = 0; i < 9; i++)
        for (int32_t k = 0; k < w->k; k++) {
            float want = i == 4 ? 0 : w->values[(int64_t)ids[i] * w->k + k];
            if (got[i * w->k + k] != want)
                fail_msg("%s: row %d [%d] is %a, must be %a", w->f.name, ids[i], k,
                         (double)got[i * w->k + k], (double)want);
        }
    both_free(&d), both_free(&out);
}

static const int32_t ns[] = {1, 5, 15, 16, 17, 33, 64, 65, 130};

static void every_format(bool has_order)
{
    static const int32_t ks[] = {1, 3, 8, 31, 64, 127, 128, 200, 260};
    for (uint32_t type = 0; type < N_TYPES; type++) {
        const struct td_format *f = td_format_of_gguf(type);
        if (!f || f->dtype) continue;
        for (int i = 0; i < (is_short ? 1 : 6); i++) {
            int32_t blocks = rng_int(1, f->block > 32 ? 3 : 13);
            struct weight w;
            of_blocks(&w, f, ns[rng_int(0, 8)], f->block * blocks);
            check_rows(&w);
            check_product(&w, rng_int(1, 8), has_order);
            if (!is_short || type % 4 == 0) check_product(&w, rng_int(9, 40), has_order);
            weight_free(&w);
        }
    }
    for (int t = 0; t < N_KINDS; t++)
        for (int i = 0; i < (is_short ? 1 : 6); i++) {
            struct weight w;
            of_groups(&w, &kinds[t], ns[rng_int(0, 8)], ks[rng_int(0, 8)]);
            check_product(&w, rng_int(1, 8), has_order);
            if (!is_short || t % 4 == 0) check_product(&w, rng_int(9, 40), has_order);
            weight_free(&w);
        }
}

static void of_way(const char *way, bool deterministic)
{
    close_device();
    td_status s = open_way(way, deterministic);
    if (s)
        print_message("  (no way %s here: %s)\n", way, err.msg);
    else
        every_format(strcmp(way, "own") == 0);
    if (s != TD_OK && s != TD_ERR_INVALID) fail_msg("%s", err.msg);
    if (s == TD_OK) close_device();
    assert_int_equal(open_way(NULL, false), TD_OK);
}

static void test_plain(void **state) { (void)state, of_way("plain", false); }
static void test_own(void **state) { (void)state, of_way("own", true); }
static void test_cublas(void **state) { (void)state, of_way("cublas", false); }

/* A row's bits with 8-bit floats do not depend on its company where that is promised: the library
 * is not asked. */
static void test_deterministic_codes(void **state)
{
    (void)state;
    close_device();
    td_status s = open_way("cublas", true);
    for (int t = 0; t < N_KINDS && !s; t++) {
        struct weight w;
        of_groups(&w, &kinds[t], 48, 96);
        for (int i = 0; i < 3 && td_quant_is_rows(&w.f); i++)
            check_product(&w, rng_int(9, 30), true);
        weight_free(&w);
    }
    if (!s) close_device();
    assert_int_equal(open_way(NULL, false), TD_OK);
}

/* Outputs enough for the wide form of few rows, slices of many chunks, and more outputs than are
 * widened at a time. */
static void test_large(void **state)
{
    (void)state;
    close_device();
    assert_int_equal(open_way("own", true), TD_OK);
    const struct td_format *q4_k = td_format_of_gguf(12), *q8_0 = td_format_of_gguf(8);
    struct weight wide, many, slices;
    of_blocks(&wide, q4_k, 64 * dev->info.n_sms + 5, 256);
    of_blocks(&many, q8_0, 4100, 32), of_blocks(&slices, q4_k, 20, 2560);
    check_product(&wide, 3, true);
    check_product(&many, 20, true);
    for (int32_t m = 1; m < (is_short ? 10 : 140); m = m * 3 + 1) check_product(&slices, m, true);
    weight_free(&wide), weight_free(&many), weight_free(&slices);
    close_device();
    assert_int_equal(open_way(NULL, false), TD_OK);
}

static void rounded_kinds(int32_t m)
{
    for (int t = 0; t < N_KINDS; t++)
        for (int i = 0; i < 3; i++) { /* what cuBLASLt takes, and what it does not */
            struct weight w;
            of_groups(&w, &kinds[t], i < 2 ? 16 * rng_int(1, 5) : 37,
                      16 * rng_int(1, 9) - 5 * (i > 0));
            if (td_quant_is_rows(&w.f)) check_product(&w, m + i, false);
            weight_free(&w);
        }
}

/* Codes through cuBLASLt, in pieces of the outputs when there are many rows; and what it refuses
 * for want of an algorithm, or only when it is asked. */
static void test_codes_through_the_library(void **state)
{
    (void)state;
    static const char *const faults[] = {"", "ltnone", "ltrefuse"};
    const char *old = getenv("TD_CUDA_EMU_FAULT");
    if (!dev->info.is_emulated || old) return;
    for (int i = 0; i < 3; i++) {
        close_device();
        assert_int_equal(setenv("TD_CUDA_EMU_FAULT", faults[i], 1), 0);
        assert_int_equal(open_way("cublas", i == 1), TD_OK);
        rounded_kinds(i ? 17 : rng_int(9, 40));
        close_device();
        assert_int_equal(unsetenv("TD_CUDA_EMU_FAULT"), 0);
        assert_int_equal(open_way(NULL, false), TD_OK);
    }
}

/* The bytes of a packed matrix are those of the file, and at most 4 % more. */
static void test_bytes(void **state)
{
    (void)state;
    for (uint32_t type = 0; type < N_TYPES; type++) {
        const struct td_format *f = td_format_of_gguf(type);
        if (!f || f->dtype) continue;
        size_t file = 2048 * td_format_bytes(f, 2048),
               packed = ops->blocks->packed_bytes(2048, 2048, f);
        if (packed < file || packed > file + file / 25)
            fail_msg("%s: %zu bytes packed, %zu in a file", f->name, packed, file);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_own),
        cmocka_unit_test(test_large),
        cmocka_unit_test(test_cublas),
        cmocka_unit_test(test_codes_through_the_library),
        cmocka_unit_test(test_deterministic_codes),
    };
    is_short = getenv("TANDEM_TEST_SHORT") != NULL;
    int skipped = open_or_say();
    if (skipped) return skipped;
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    close_device();
    return n_failed;
}
