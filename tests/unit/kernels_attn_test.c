/* kernels_attn_test.c - paged attention: every table against ref over head ratios, head sizes,
 * windows and block tables, with NaN in every slot that no row of the call may read; and the
 * bits of a row alone, in chunks of any size, in decode and in company. */
#include "tests/unit/kernels_attn.h"

static bool is_short; /* TANDEM_TEST_SHORT: as the sanitizer stages run it */

/* Computes the rows into out [n][heads * head_dim], poisoned before. */
static void attend(struct world *w, const struct td_ops *ops, const struct rows *rows, int n_parts,
                   float *out)
{
    int64_t q_row = (int64_t)w->n_heads * w->kv.head_dim, q_stride = q_row + 3, row = world_out(w),
            stride = row + 3;
    float *q = alloc_poisoned((size_t)(rows->n * q_stride) * 4),
          *o = alloc_poisoned((size_t)(rows->n * stride) * 4);
    for (int32_t r = 0; r < rows->n; r++)
        memcpy(q + r * q_stride, w->q[rows->seq[r]] + rows->pos[r] * q_row, (size_t)q_row * 4);
    struct td_attn_args a = {.kv = w->kv,
                             .q = q,
                             .out = o,
                             .q_stride = q_stride,
                             .out_stride = stride,
                             .positions = rows->pos,
                             .row_seq = rows->seq,
                             .block_tables = w->table_ptrs,
                             .n_rows = rows->n,
                             .n_heads = w->n_heads,
                             .scale = w->scale,
                             .cap = w->cap,
                             .slopes = w->has_slopes ? w->slopes : NULL,
                             .sinks = w->has_sinks ? w->sinks : NULL,
                             .sliding_window = w->sliding_window};
    size_t need =
        ops->attn_scratch_bytes(w->n_heads, w->kv.n_kv_heads, w->kv.head_dim, w->kv.block_size);
    a.scratch_bytes_per_part = (need + 63) / 64 * 64;
    a.scratch = alloc_poisoned(a.scratch_bytes_per_part * (size_t)n_parts);
    for (int p = n_parts - 1; p >= 0; p--) ops->attn(&a, p, n_parts);
    for (int32_t r = 0; r < rows->n; r++) {
        memcpy(out + r * row, o + r * stride, (size_t)row * 4);
        for (int g = 0; g < 3; g++)
            assert_memory_equal(o + r * stride + row + g, "\xff\xff\xff\xff", 4);
    }
    free(q), free(o), free(a.scratch);
}

/* Rows of V that are shorter than those of K, or lie in them (latent attention). */
enum { N_V_SHAPES = 10 };
static const struct v_shape {
    int32_t head_dim, v_dim;
    bool in_k;
    enum td_dtype dtype;
} v_shapes[N_V_SHAPES] = {{576, 512, true, TD_BF16}, {40, 32, true, TD_F32},
                          {192, 128, false, TD_F32}, {70, 34, true, TD_BF16},
                          {48, 6, false, TD_BF16},   {576, 512, true, TD_F32},
                          {576, 512, true, TD_INT8}, {576, 512, true, TD_FP8},
                          {70, 34, true, TD_INT8},   {72, 64, true, TD_FP8}};

static void world_of(struct world *w, const struct v_shape *v, int32_t n_kv_heads, int32_t ratio,
                     int32_t head_dim, int32_t block_size, enum td_dtype dtype, const int32_t *len,
                     int32_t window)
{
    if (!v) {
        world_make(w, n_kv_heads, ratio, head_dim, block_size, dtype, len, window);
        return;
    }
    world_make_v(w, v->in_k ? 1 : n_kv_heads, ratio, v->head_dim, v->v_dim, v->in_k, block_size,
                 dtype, len, window);
    /* what is behind V has a scale of its own */
    for (int s = 0; s < N_SEQS && v->in_k && td_dtype_is_coded(dtype); s++)
        for (int64_t i = 0; i < (int64_t)len[s] * v->head_dim; i++)
            if (i % v->head_dim >= v->v_dim) w->k[s][i] *= 4;
}

/* tolerance[rows, heads] */
static void check_close(const struct world *w, const struct rows *rows, const struct td_ops *ops,
                        const float *want, const float *got, const double *tolerance)
{
    int64_t row = world_out(w);
    int32_t v_dim = td_kv_view_v_dim(&w->kv);
    for (int32_t r = 0; r < rows->n; r++)
        for (int32_t h = 0; h < w->n_heads; h++) {
            double most = tolerance[r * w->n_heads + h];
            for (int32_t i = 0; i < v_dim; i++) {
                int64_t at = r * row + (int64_t)h * v_dim + i;
                if (!(fabs((double)got[at] - (double)want[at]) <= most))
                    fail_msg("%s %s heads %d/%d dim %d block %d window %d: seq %d pos %d head %d "
                             "[%d] = %.9g, ref %.9g, tolerance %.3g",
                             ops->name, td_dtype_name(w->kv.dtype), w->n_heads, w->kv.n_kv_heads,
                             w->kv.head_dim, w->kv.block_size, w->sliding_window, rows->seq[r],
                             rows->pos[r], h, i, (double)got[at], (double)want[at], most);
            }
        }
}

/* Case c of the next test: every table beside ref. v: NULL, or the shape of its V. */
static void check_case(int c, const struct v_shape *v)
{
    static const enum td_dtype types[] = {TD_F32, TD_BF16, TD_INT8, TD_FP8};
    static const int32_t ratios[] = {1, 4, 8}, head_dims[] = {16, 64, 96, 128, 34},
                         block_sizes[] = {16, 7, 32, 1, 64}, windows[] = {0, 0, 1, 5, 64, 100};
    enum td_dtype dtype = v ? v->dtype : types[(c + c / 4) % 4];
    int32_t bs = block_sizes[rng_int(0, 4)], dim = v ? v->head_dim : head_dims[c / 3 % 5];
    if (td_dtype_is_coded(dtype) && bs * dim % 4) bs = 16;
    int32_t len[N_SEQS] = {rng_int(60, 140), rng_int(60, 140), rng_int(1, 3), rng_int(1, 200)};
    if (c % 4 == 1) len[0] = bs + 1, len[1] = bs > 1 ? bs - 1 : 1, len[3] = bs;
    if (c % 4 == 2) len[0] = 65, len[1] = 64, len[3] = 63;
    struct world *w = malloc(sizeof *w);
    struct rows *rows = calloc(1, sizeof *rows);
    assert_true(w && rows);
    world_of(w, v, v && !v->in_k ? 2 : rng_int(1, 3), ratios[c % 3], dim, bs, dtype, len,
             windows[rng_int(0, 5)]);
    if (c % 4 == 3 && w->n_heads <= 24) world_cap_and_sink(w);
    if (c % 5 >= 3 && w->n_heads <= 24) world_slopes(w);
    int32_t chunk = rng_int(1, len[0]);
    rows_add(rows, 2, len[2] - 1, 1);         /* decode */
    rows_add(rows, 0, len[0] - chunk, chunk); /* a chunk that ends the prompt */
    rows_add(rows, 1, 0, rng_int(1, len[1])); /* a chunk that begins one */
    rows_add(rows, 3, len[3] - 1, 1);
    world_expose(w, rows);
    size_t bytes = (size_t)(rows->n * world_out(w)) * 4;
    float *want = alloc_poisoned(bytes), *got = alloc_poisoned(bytes);
    attend(w, td_ops_by_name("ref"), rows, 1, want);
    double *tolerance = alloc_poisoned((size_t)(rows->n * w->n_heads) * sizeof *tolerance);
    for (int32_t r = 0; r < rows->n; r++)
        for (int32_t h = 0; h < w->n_heads; h++)
            tolerance[r * w->n_heads + h] = attn_tolerance(w, rows->seq[r], rows->pos[r], h);
    const struct td_ops *tables[N_TABLES];
    int n_tables = tables_or_say(true, tables);
    for (int t = 0; t < n_tables; t++) {
        memset(got, 0xff, bytes);
        attend(w, tables[t], rows, rng_int(1, 3), got);
        check_close(w, rows, tables[t], want, got, tolerance);
    }
    free(want), free(got), free(tolerance), free(rows);
    world_free(w), free(w);
}

static void test_against_ref(void **state)
{
    (void)state;
    int n_plain = is_short ? 15 : 60; /* 15: each ratio with each head size */
    for (int c = 0; c < n_plain; c++) check_case(c, NULL);
    for (int i = 0; i < N_V_SHAPES; i++) check_case(n_plain + i, &v_shapes[i]);
}

enum { CASES = 9, PLAIN_CASES = 6 }; /* of the next test; those with a plane of V */
static const struct v_shape narrow[CASES - PLAIN_CASES] = {
    {296, 256, true, TD_BF16}, {72, 64, true, TD_INT8}, {70, 34, true, TD_FP8}};
static const int32_t windows[CASES] = {0, 70, 0, 9, 0, 33, 0, 0, 40};
static const int32_t dims[PLAIN_CASES] = {64, 128, 96, 16, 64, 34},
                     ratios[CASES] = {4, 1, 8, 3, 2, 5, 10, 10, 3},
                     block_sizes[CASES] = {16, 7, 32, 16, 7, 16, 16, 7, 16};
static const enum td_dtype types[PLAIN_CASES] = {TD_BF16, TD_F32, TD_BF16, TD_F32, TD_INT8, TD_FP8};

/* The first sequence of w, case c, in chunks, and then in the middle of a batch. */
static void check_chunks_and_company(struct world *w, const struct td_ops *ops, int c)
{
    const int32_t *len = w->len;
    bool is_ref = ops == td_ops_by_name("ref");
    struct rows *rows = calloc(1, sizeof *rows);
    assert_non_null(rows);
    int64_t row = world_out(w);
    float *whole = alloc_poisoned((size_t)(len[0] * row) * 4),
          *some = alloc_poisoned((size_t)((len[0] + len[1] + len[2] + len[3]) * row) * 4);
    rows_add(rows, 0, 0, len[0]);
    world_expose(w, rows);
    attend(w, ops, rows, 1, whole);
    const int32_t chunks[] = {1, 2, 7, 16, 64, 100, 299, len[0]};
    /* short: every other size, and the others in the next case of this table */
    for (int i = is_short ? c / 2 % 2 : 0; i < 8; i += is_short ? 2 : 1)
        for (int32_t p = 0; p < len[0]; p += chunks[i]) {
            /* chunk 1 from position 0 on: decode */
            int32_t n = len[0] - p < chunks[i] ? len[0] - p : chunks[i], parts = rng_int(1, 3);
            if (chunks[i] <= (is_short ? 2 : 1) && (is_ref || is_short) && p % 9) continue;
            rows->n = 0;
            rows_add(rows, 0, p, n);
            world_expose(w, rows); /* later positions are NaN now */
            attend(w, ops, rows, parts, some);
            if (memcmp(some, whole + p * row, (size_t)(n * row) * 4) != 0)
                fail_msg("%s case %d: rows %d..%d as a chunk in %d parts differ from the whole "
                         "prompt",
                         ops->name, c, p, p + n - 1, parts);
        }
    for (int i = 0; i < 5; i++) {
        int32_t n = rng_int(1, 40), p = rng_int(0, len[0] - n), before, parts = rng_int(1, 3);
        rows->n = 0;
        rows_add(rows, 3, len[3] - 1, 1);
        rows_add(rows, 2, rng_int(0, 100), rng_int(1, 30));
        before = rows->n;
        rows_add(rows, 0, p, n);
        rows_add(rows, 1, 0, rng_int(1, 77));
        world_expose(w, rows);
        attend(w, ops, rows, parts, some);
        if (memcmp(some + before * row, whole + p * row, (size_t)(n * row) * 4) != 0)
            fail_msg("%s case %d: rows %d..%d in company differ", ops->name, c, p, p + n - 1);
    }
    free(whole), free(some), free(rows);
}

static void test_chunks_and_company_leave_the_bits(void **state)
{
    (void)state;
    const struct td_ops *tables[N_TABLES];
    int n_tables = tables_or_say(true, tables);
    for (int c = 0; c < CASES; c++)
        for (int is_ref = 0; is_ref < 2; is_ref++) {
            int32_t len[N_SEQS] = {is_ref ? 90 : 300, 77, 130, 33};
            struct world *w = malloc(sizeof *w);
            assert_non_null(w);
            const struct v_shape *v = c < PLAIN_CASES ? NULL : &narrow[c - PLAIN_CASES];
            world_of(w, v, 2, ratios[c], v ? v->head_dim : dims[c], block_sizes[c],
                     v ? v->dtype : types[c], len, windows[c]);
            if (c % 3 == 1 && w->n_heads <= 24) world_cap_and_sink(w);
            if ((c % 2 == 0 || c == 3) && w->n_heads <= 24) world_slopes(w); /* each type */
            if (is_ref) check_chunks_and_company(w, td_ops_by_name("ref"), c);
            for (int t = 0; !is_ref && t < n_tables; t++)
                if (!is_short || (c + t) % 2 == 0) /* one source, compiled for each table */
                    check_chunks_and_company(w, tables[t], c);
            world_free(w), free(w);
        }
}

/* An infinite V at a later position of the same chunk must not reach the rows before it. In a coded
 * cache the whole row is NaN then. */
static void later_infinity_stays_later(const struct td_ops *ops, enum td_dtype dtype, bool in_k)
{
    enum { LEN = 80, BAD = 70 };
    int32_t len[N_SEQS] = {LEN, 1, 1, 1};
    struct world *w = malloc(sizeof *w);
    struct rows *rows = calloc(1, sizeof *rows);
    assert_true(w && rows);
    world_make_v(w, 1, 4, in_k ? 80 : 64, 64, in_k, 16, dtype, len, 0);
    int64_t row = world_out(w);
    float *clean = alloc_poisoned((size_t)(LEN * row) * 4),
          *dirty = alloc_poisoned((size_t)(LEN * row) * 4);
    rows_add(rows, 0, 0, LEN);
    world_expose(w, rows);
    attend(w, ops, rows, 1, clean);
    *(in_k ? &w->k[0][BAD * 80 + 5] : &w->v[0][BAD * 64 + 5]) = INFINITY;
    world_expose(w, rows);
    attend(w, ops, rows, 1, dirty);
    assert_memory_equal(clean, dirty, (size_t)(BAD * row) * 4);
    float bad = dirty[BAD * row + 5];
    assert_true(in_k || td_dtype_is_coded(dtype) ? isnan(bad) : isinf(bad));
    free(clean), free(dirty), free(rows);
    world_free(w), free(w);
}

static void test_later_infinity_stays_later(void **state)
{
    (void)state;
    for (int t = 0; t < N_TABLES; t++) {
        const struct td_ops *ops = plain_table_or_say(t);
        if (!ops) continue;
        for (int in_k = 0; in_k < 2; in_k++) {
            later_infinity_stays_later(ops, TD_BF16, in_k);
            later_infinity_stays_later(ops, TD_INT8, in_k);
            later_infinity_stays_later(ops, TD_FP8, in_k);
        }
    }
}

/* Tables of the same numerics give the same bits, also where products or V are subnormal. */
static void test_tables_of_one_class(void **state)
{
    (void)state;
    const struct td_ops *a = td_ops_by_name("avx512"), *b = td_ops_by_name("avx512bf16");
    if (!a || !b) skip(); /* this CPU has no dot of bf16 pairs */
    static const int32_t head_dims[] = {64, 34, 128, 16, 96, 64, 296};
    for (int c = 0; c < 7; c++) { /* the last one is of latent rows */
        int32_t len[N_SEQS] = {rng_int(100, 200), rng_int(1, 70), 3, 1}, dim = head_dims[c];
        struct world *w = malloc(sizeof *w);
        struct rows *rows = calloc(1, sizeof *rows);
        assert_true(w && rows);
        bool in_k = c == 6;
        world_make_v(w, 1 + c % 2, c % 3 ? 4 : 1, dim, in_k ? 250 : dim, in_k, 16, TD_BF16, len,
                     c % 2 ? 30 : 0);
        if (c % 4 == 2) world_slopes(w);
        int64_t row = world_out(w);
        for (int64_t i = 0; c % 3 == 0 && !in_k && i < (int64_t)len[0] * w->kv.n_kv_heads * dim;
             i++) {
            w->k[0][i] *= 0x1p-126f;
            w->v[0][i] *= 0x1p-124f;
        }
        rows_add(rows, 0, 0, len[0]);
        rows_add(rows, 1, len[1] - 1, 1);
        world_expose(w, rows);
        size_t bytes = (size_t)(rows->n * row) * 4;
        float *x = alloc_poisoned(bytes), *y = alloc_poisoned(bytes);
        attend(w, a, rows, 1, x);
        attend(w, b, rows, 2, y);
        for (int64_t i = 0; i < rows->n * row; i++)
            if (memcmp(&x[i], &y[i], 4) != 0)
                fail_msg("case %d, head_dim %d: %s has %a at %lld, %s %a", c, dim, a->name,
                         (double)x[i], (long long)i, b->name, (double)y[i]);
        free(x), free(y), free(rows);
        world_free(w), free(w);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_ref),
        cmocka_unit_test(test_chunks_and_company_leave_the_bits),
        cmocka_unit_test(test_later_infinity_stays_later),
        cmocka_unit_test(test_tables_of_one_class),
    };
    rng_start();
    is_short = getenv("TANDEM_TEST_SHORT") != NULL;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
