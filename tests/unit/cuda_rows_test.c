/* cuda_rows_test.c - the device's row entries and products, through the table: against ref on fresh
 * input with odd sizes and strides, what must not be written unwritten, what must not be read NaN,
 * a row's bits the same in any company, and the fused pairs the bits of the two entries.
 *
 * Products are tested each way that the library has (TANDEM_CUDA_GEMM). TANDEM_CUDA_LIBRARY
 * names the library, emulated or real. */
#include "tests/unit/cuda_test.h"

static const int32_t dims[] = {1,  3,   4,   7,   8,    15,   16,   33,  64,
                               65, 128, 129, 576, 1000, 2048, 4096, 5003};
enum { N_DIMS = 17 };

static void check_close(const char *what, int64_t i, float got, float want, double tolerance)
{
    bool both_nan = isnan(got) && isnan(want);
    if (!both_nan && !(fabs((double)got - (double)want) <= tolerance))
        fail_msg("%s: [%lld] = %.9g, ref %.9g, tolerance %.3g", what, (long long)i, (double)got,
                 (double)want, tolerance);
}

static void check_finite(const char *what, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            fail_msg("%s: padding row's [%lld] = %g", what, (long long)i, (double)x[i]);
}

/* A weight with nothing in it, to prepare rows for. */
static struct td_weight shape_of(int32_t n_in, enum td_dtype dtype)
{
    return (struct td_weight){.n_out = 8, .n_in = n_in, .format = td_format_of_dtype(dtype)};
}

/* The prepared rows must be what gemm_prepare makes of `rows` [n, dim], bit for bit: compared
 * through a buffer of the whole scratch. */
static void check_prepared(const char *what, const struct both *scratch, const float *rows,
                           int32_t n, int32_t dim, int64_t stride, enum td_dtype dtype)
{
    struct td_weight w = shape_of(dim, dtype);
    struct both x = copy_of(rows, (size_t)(n * stride) * 4),
                want = poisoned(ops->gemm_scratch_bytes(n, dim));
    struct td_gemm_args a = {.w = &w,
                             .x = (const float *)(void *)x.device,
                             .scratch = want.device,
                             .n_rows = n,
                             .x_stride = stride};
    ops->gemm_prepare(&a, 0, 1);
    down(&want);
    if (memcmp(want.host, scratch->host, want.bytes) != 0)
        fail_msg("%s, %d rows of %d as %s: not the bits of the two entries", what, n, dim,
                 td_dtype_name(dtype));
    both_free(&x), both_free(&want);
}

/* ---- rows ------------------------------------------------------------------------------------ */

static void test_rmsnorm(void **state)
{
    (void)state;
    for (int c = 0; c < 3 * N_DIMS; c++) {
        int32_t dim = dims[c % N_DIMS], rows = rng_int(1, 6);
        int64_t xs = dim + rng_int(0, 5), os = dim + rng_int(0, 5);
        float *x = random_rows(rows, dim, xs), *w = random_rows(1, dim, dim),
              *want = alloc_poisoned((size_t)(rows * os) * 4);
        struct td_rmsnorm_args a = {.x = x,
                                    .w = w,
                                    .out = want,
                                    .n_rows = rows,
                                    .dim = dim,
                                    .x_stride = xs,
                                    .out_stride = os,
                                    .eps = 1e-5f};
        ref->rmsnorm(&a, 0, 1);
        struct both dx = copy_of(x, (size_t)(rows * xs) * 4), dw = copy_of(w, (size_t)dim * 4),
                    out = poisoned((size_t)(rows * os) * 4);
        a.x = (float *)(void *)dx.device, a.w = (float *)(void *)dw.device,
        a.out = (float *)(void *)out.device;
        ops->rmsnorm(&a, 0, 1);
        down(&out);
        const float *got = out.host;
        for (int64_t i = 0; i < rows * os; i++) {
            if (i % os >= dim)
                assert_memory_equal(&got[i], &want[i], 4);
            else /* as in kernels_rows_test: roundings of the mean's terms, then of five
                    operations */
                check_close("rmsnorm", i, got[i], want[i],
                            0x1p-24 * (6 + sqrt(dim)) * fabs((double)want[i]));
        }
        for (int d = 0; d < 2; d++) { /* fused with the rounding into a product's scratch */
            enum td_dtype dtype = d ? TD_BF16 : TD_F16;
            struct td_weight shape = shape_of(dim, dtype);
            struct both scratch = poisoned(ops->gemm_scratch_bytes(rows, dim));
            struct td_gemm_args next = {.w = &shape, .scratch = scratch.device, .n_rows = rows};
            ops->rmsnorm_prepare(&a, &next, 0, 1);
            down(&scratch);
            check_prepared("rmsnorm_prepare", &scratch, got, rows, dim, os, dtype);
            both_free(&scratch);
        }
        /* the last row alone, in place, at another alignment: the same bits */
        struct both alone = both_make((size_t)(dim + 3) * 4);
        memcpy((float *)alone.host + 3, x + (rows - 1) * xs, (size_t)dim * 4);
        up(&alone);
        a.x = a.out = (float *)(void *)alone.device + 3;
        a.n_rows = 1;
        ops->rmsnorm(&a, 0, 1);
        down(&alone);
        assert_memory_equal((float *)alone.host + 3, got + (rows - 1) * os, (size_t)dim * 4);
        both_free(&dx), both_free(&dw), both_free(&out), both_free(&alone);
        free(x), free(w), free(want);
    }
}

static void test_rope(void **state)
{
    (void)state;
    static const int32_t head_dims[] = {2, 6, 16, 24, 64, 80, 96, 128, 256};
    enum { MAX_POS = 50 };
    for (int c = 0; c < 27; c++) {
        int32_t dim = head_dims[c % 9], heads = rng_int(1, 5), rows = rng_int(2, 7), pos[7];
        int64_t xs = (int64_t)heads * dim + rng_int(0, 4);
        float *cs = alloc_poisoned((size_t)(MAX_POS * dim) * 4),
              *want = random_rows(rows, heads * dim, xs);
        for (int p = 0; p < MAX_POS; p++)
            for (int i = 0; i < dim / 2; i++) {
                float angle = rng_normal() * 10;
                cs[p * dim + i] = cosf(angle), cs[p * dim + dim / 2 + i] = sinf(angle);
            }
        for (int r = 0; r < rows; r++) pos[r] = rng_int(0, MAX_POS - 1);
        int32_t pad = rng_int(0, rows - 1); /* untouched */
        pos[pad] = -1;
        struct both dx = copy_of(want, (size_t)(rows * xs) * 4),
                    dcs = copy_of(cs, (size_t)(MAX_POS * dim) * 4), dpos = copy_of(pos, sizeof pos);
        struct td_rope_args a = {.cos_sin = cs,
                                 .positions = pos,
                                 .n_rows = 1,
                                 .n_heads = heads,
                                 .head_dim = dim,
                                 .x_stride = xs};
        for (int r = 0; r < rows; r++)
            if (r != pad) a.x = want + r * xs, a.positions = pos + r, ref->rope(&a, 0, 1);
        a.x = (float *)(void *)dx.device, a.cos_sin = (float *)(void *)dcs.device,
        a.positions = (int32_t *)(void *)dpos.device, a.n_rows = rows;
        ops->rope(&a, 0, 1);
        down(&dx);
        const float *got = dx.host;
        for (int64_t i = 0; i < rows * xs; i++) {
            if (i % xs >= (int64_t)heads * dim || i / xs == pad)
                assert_memory_equal(&got[i], &want[i], 4);
            else /* two products, one sum; |x| < 6 */
                check_close("rope", i, got[i], want[i], 0x1p-24 * 3 * 6);
        }
        both_free(&dx), both_free(&dcs), both_free(&dpos);
        free(cs), free(want);
    }
}

/* Two rows may fall on one slot in small blocks: they get the same content then. */
static void equal_rows_of_one_slot(float *k, float *v, int64_t width, int64_t stride,
                                   const int32_t *pos, const int32_t *seq, int n_rows)
{
    for (int r = 0; r < n_rows; r++)
        for (int q = 0; q < r; q++)
            if (seq[q] == seq[r] && pos[q] == pos[r])
                memcpy(k + r * stride, k + q * stride, (size_t)width * 4),
                    memcpy(v + r * stride, v + q * stride, (size_t)width * 4);
}

static void same_bits(const struct both dx[2], const struct both cache[2], int32_t dim,
                      bool has_norm, enum td_dtype dtype)
{
    if (memcmp(dx[0].host, dx[1].host, dx[0].bytes) != 0)
        fail_msg("rope_store, head_dim %d, norm %d: the rows are not the bits of the entries", dim,
                 has_norm);
    if (memcmp(cache[0].host, cache[1].host, cache[0].bytes) != 0)
        fail_msg("rope_store, head_dim %d, norm %d, %s: the cache is not the bits of the entries",
                 dim, has_norm, td_dtype_name(dtype));
}

/* What rope_store does in one pass, by the entries of each part. qn, kn: NULL without norms. */
static void rope_store_in_parts(const struct td_rmsnorm_args *qn, const struct td_rmsnorm_args *kn,
                                const struct td_rope_args *rope,
                                const struct td_kv_store_args *store, int32_t n_q,
                                const int32_t *pos)
{
    int32_t dim = rope->head_dim;
    int64_t stride = rope->x_stride;
    for (int32_t h = 0; qn && h < rope->n_heads; h++)
        for (int r = 0; r < rope->n_rows; r++) { /* a padding row is not normed by the one
                                            pass */
            struct td_rmsnorm_args n = {.x = rope->x + r * stride + h * dim,
                                        .w = h < n_q ? qn->w : kn->w,
                                        .n_rows = pos[r] >= 0,
                                        .dim = dim};
            n.out = rope->x + r * stride + h * dim, n.x_stride = stride, n.out_stride = stride,
            n.eps = h < n_q ? qn->eps : kn->eps;
            ops->rmsnorm(&n, 0, 1);
        }
    ops->rope(rope, 0, 1);
    ops->kv_store(store, 0, 1);
}

/* Block tables on the device: two rows of three ids at `blocks`. */
static struct both tables_of(const struct both *blocks)
{
    struct both dt = both_make(2 * sizeof(void *));
    for (int s = 0; s < 2; s++) {
        const uint8_t *at = blocks->device + (size_t)s * 3 * sizeof(int32_t);
        memcpy((char *)dt.host + (size_t)s * sizeof at, &at, sizeof at);
    }
    up(&dt);
    return dt;
}

/* Bytes must be equal: rounding to bf16 is one function, and nothing but the slots named is
 * written. */
static void test_kv_store(void **state)
{
    (void)state;
    static const uint32_t special[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001,
                                       0x00000001, 0x807fffff, 0x3f808000, 0x3f818000,
                                       0x7f7fffff, 0x80000000, 0x00808000, 0x3f80ffff};
    static const int32_t head_dims[] = {16, 64, 96, 128, 34, 2, 7};
    static const enum td_dtype types[] = {TD_F32, TD_BF16, TD_INT8, TD_FP8};
    for (int c = 0; c < 42; c++) {
        enum td_dtype dtype = types[c % 4];
        bool coded = td_dtype_is_coded(dtype);
        struct td_kv_view kv = {.n_kv_heads = rng_int(1, 4),
                                .block_size = rng_int(1, 20) * (coded ? 4 : 1),
                                .head_dim = head_dims[c % 7],
                                .dtype = dtype};
        int64_t kv_bytes = kv.n_kv_heads * td_kv_view_head_bytes(&kv);
        enum { N_BLOCKS = 6, ROWS = 9 };
        /* an element: slots of all alignments */
        kv.block_bytes = 2 * kv_bytes + (c % 3 || coded ? 64 : (int64_t)td_dtype_bytes(dtype));
        int32_t blocks[2][3] = {{4, 0, 2}, {5, 1, 3}}, pos[ROWS], seq[ROWS];
        const int32_t *tables[2] = {blocks[0], blocks[1]};
        int64_t width = (int64_t)kv.n_kv_heads * kv.head_dim, stride = width + rng_int(0, 4);
        float *k = random_rows(ROWS, (int32_t)width, stride),
              *v = random_rows(ROWS, (int32_t)width, stride);
        for (int i = 0; i < 12; i++)
            memcpy(&k[rng_int(0, (int32_t)(ROWS * stride) - 1)], &special[i], 4);
        for (int r = 0; r < ROWS; r++)
            seq[r] = r % 2, pos[r] = (r / 2 * 7 + r % 2) % (3 * kv.block_size);
        equal_rows_of_one_slot(k, v, width, stride, pos, seq, ROWS);
        size_t bytes = (size_t)(N_BLOCKS * kv.block_bytes);
        uint8_t *want = alloc_poisoned(bytes);
        struct td_kv_store_args a = {
            .kv = kv, .k_stride = stride, .v_stride = stride, .block_tables = tables, .n_rows = 1};
        int pad = rng_int(0, ROWS - 1), pad_pos = pos[pad];
        a.kv.base = want;
        for (int r = 0; r < ROWS; r++) {
            a.k = k + r * stride, a.v = v + r * stride, a.positions = pos + r, a.row_seq = seq + r;
            if (r != pad) ref->kv_store(&a, 0, 1);
        }
        for (int r = 0; r < ROWS; r++) /* another row of the same slot was stored: not what is
                                          asked here */
            if (r != pad && seq[r] == seq[pad] && pos[r] == pad_pos) pad_pos = -1;
        pos[pad] = -1;
        struct both dk = copy_of(k, (size_t)(ROWS * stride) * 4),
                    dv = copy_of(v, (size_t)(ROWS * stride) * 4), cache = poisoned(bytes);
        struct both dpos = copy_of(pos, sizeof pos), dseq = copy_of(seq, sizeof seq),
                    db = copy_of(blocks, sizeof blocks), dt = tables_of(&db);
        a.kv.base = cache.device, a.k = (float *)(void *)dk.device,
        a.v = (float *)(void *)dv.device, a.n_rows = ROWS;
        a.positions = (int32_t *)(void *)dpos.device, a.row_seq = (int32_t *)(void *)dseq.device;
        a.block_tables = (const int32_t *const *)(void *)dt.device;
        ops->kv_store(&a, 0, 1);
        down(&cache);
        assert_memory_equal(cache.host, want, bytes);
        both_free(&dk), both_free(&dv), both_free(&cache), both_free(&dpos), both_free(&dseq),
            both_free(&db), both_free(&dt);
        free(k), free(v), free(want);
    }
}

/* One pass against norm, rope and kv_store one after the other: every byte of the rows and of
 * the cache. */
static void test_rope_store(void **state)
{
    (void)state;
    static const int32_t head_dims[] = {64, 128, 256, 96, 80, 18, 2, 132, 6};
    enum { ROWS = 5, MAX_POS = 40, N_BLOCKS = 6 };
    static const enum td_dtype types[] = {TD_F32, TD_BF16, TD_INT8, TD_FP8};
    for (int c = 0; c < 36; c++) {
        enum td_dtype dtype = types[(c + c / 4) % 4];
        bool has_norm = c % 3 != 0;
        int32_t dim = head_dims[c % 9], n_kv = rng_int(1, 3), n_q = n_kv * rng_int(1, 4),
                blocks[2][3] = {{4, 0, 2}, {5, 1, 3}}, pos[ROWS], seq[ROWS];
        struct td_kv_view kv = {
            .n_kv_heads = n_kv, .block_size = 16, .head_dim = dim, .dtype = dtype};
        kv.block_bytes = 2 * n_kv * td_kv_view_head_bytes(&kv) + (c % 4 ? 64 : 4);
        int32_t width = (n_q + 2 * n_kv) * dim;
        int64_t stride = width + (c % 5 ? 0 : 3);
        for (int r = 0; r < ROWS; r++) seq[r] = r % 2, pos[r] = 7 * r + rng_int(0, 6);
        pos[rng_int(0, ROWS - 1)] = -1;
        float *x = random_rows(ROWS, width, stride), *cs = random_rows(MAX_POS, dim, dim),
              *qw = random_rows(1, dim, dim), *kw = random_rows(1, dim, dim);
        struct both dcs = copy_of(cs, (size_t)(MAX_POS * dim) * 4),
                    dqw = copy_of(qw, (size_t)dim * 4), dkw = copy_of(kw, (size_t)dim * 4);
        struct both dpos = copy_of(pos, sizeof pos), dseq = copy_of(seq, sizeof seq),
                    db = copy_of(blocks, sizeof blocks), dt = tables_of(&db);
        struct both dx[2], cache[2];
        for (int fused = 0; fused < 2; fused++) {
            dx[fused] = copy_of(x, (size_t)(ROWS * stride) * 4),
            cache[fused] = poisoned((size_t)(N_BLOCKS * kv.block_bytes));
            float *px = (float *)(void *)dx[fused].device;
            const int32_t *ppos = (int32_t *)(void *)dpos.device;
            struct td_rmsnorm_args qn = {.w = (float *)(void *)dqw.device, .eps = 1e-6f},
                                   kn = {.w = (float *)(void *)dkw.device, .eps = 1e-5f};
            struct td_rope_args rope = {.x = px,
                                        .cos_sin = (float *)(void *)dcs.device,
                                        .positions = ppos,
                                        .n_rows = ROWS,
                                        .n_heads = n_q + n_kv};
            rope.head_dim = dim, rope.x_stride = stride;
            struct td_kv_store_args store = {.kv = kv,
                                             .k = px + n_q * dim,
                                             .v = px + (n_q + n_kv) * dim,
                                             .k_stride = stride,
                                             .v_stride = stride};
            store.kv.base = cache[fused].device, store.positions = ppos,
            store.row_seq = (int32_t *)(void *)dseq.device, store.n_rows = ROWS;
            store.block_tables = (const int32_t *const *)(void *)dt.device;
            if (fused) {
                ops->rope_store(has_norm ? &qn : NULL, has_norm ? &kn : NULL, &rope, &store, 0, 1);
            } else {
                rope_store_in_parts(has_norm ? &qn : NULL, has_norm ? &kn : NULL, &rope, &store,
                                    n_q, pos);
            }
            down(&dx[fused]), down(&cache[fused]);
        }
        same_bits(dx, cache, dim, has_norm, dtype);
        for (int i = 0; i < 2; i++) both_free(&dx[i]), both_free(&cache[i]);
        both_free(&dcs), both_free(&dqw), both_free(&dkw), both_free(&dpos), both_free(&dseq),
            both_free(&db), both_free(&dt);
        free(x), free(cs), free(qw), free(kw);
    }
}

static void test_silu_mul(void **state)
{
    (void)state;
    for (int c = 0; c < 3 * N_DIMS; c++) {
        int32_t dim = dims[c % N_DIMS], rows = rng_int(1, 4);
        int64_t gs = dim + rng_int(0, 3), us = dim + rng_int(0, 3), os = dim + rng_int(0, 3);
        float *g = random_rows(rows, dim, gs), *u = random_rows(rows, dim, us),
              *want = alloc_poisoned((size_t)(rows * os) * 4);
        for (int64_t i = 0; i < rows * gs; i++)
            g[i] *= (float)(c % 3 == 0 ? 1 : c % 3 == 1 ? 10 : 60);
        g[0] = c & 1 ? -200.0f : NAN;
        ref->silu_mul(want, g, u, rows, dim, os, gs, us, 0, 1);
        struct both dg = copy_of(g, (size_t)(rows * gs) * 4),
                    du = copy_of(u, (size_t)(rows * us) * 4),
                    out = poisoned((size_t)(rows * os) * 4);
        float *pg = (float *)(void *)dg.device, *pu = (float *)(void *)du.device;
        ops->silu_mul((float *)(void *)out.device, pg, pu, rows, dim, os, gs, us, 0, 1);
        down(&out);
        const float *got = out.host;
        for (int64_t i = 0; i < rows * os; i++) {
            if (i % os >= dim)
                assert_memory_equal(&got[i], &want[i], 4);
            else /* exp to 2 ulp, then three roundings; silu below -87 is under 1e-35 either way */
                check_close("silu_mul", i, got[i], want[i],
                            0x1p-24 * 8 * fabs((double)want[i]) + 1e-34);
        }
        for (int d = 0; d < 2; d++) {
            enum td_dtype dtype = d ? TD_BF16 : TD_F32;
            struct td_weight shape = shape_of(dim, dtype);
            struct both scratch = poisoned(ops->gemm_scratch_bytes(rows, dim));
            struct td_gemm_args next = {.w = &shape, .scratch = scratch.device, .n_rows = rows};
            ops->silu_mul_prepare(pg, pu, gs, us, &next, 0, 1);
            down(&scratch);
            check_prepared("silu_mul_prepare", &scratch, got, rows, dim, os, dtype);
            both_free(&scratch);
        }
        ops->silu_mul(pg, pg, pu, rows, dim, gs, gs, us, 0, 1); /* in place */
        down(&dg);
        for (int32_t r = 0; r < rows; r++)
            assert_memory_equal((float *)dg.host + r * gs, got + r * os, (size_t)dim * 4);
        both_free(&dg), both_free(&du), both_free(&out);
        free(g), free(u), free(want);
    }
}

static void test_embed(void **state)
{
    (void)state;
    static const enum td_dtype types[] = {TD_F32, TD_F16, TD_BF16};
    for (int c = 0; c < 3 * N_DIMS; c++) {
        enum { VOCAB = 11, ROWS = 7 };
        int32_t dim = dims[c % N_DIMS], ids[ROWS];
        enum td_dtype dtype = types[c % 3];
        size_t bytes = (size_t)VOCAB * (size_t)dim * td_dtype_bytes(dtype);
        struct both table = both_make(bytes);
        for (size_t i = 0; i < bytes; i++) ((uint8_t *)table.host)[i] = (uint8_t)rng_u64();
        for (int64_t i = 0; i < VOCAB * dim; i++) /* signalling NaN of f16 may turn quiet: not
                                                     asked of anyone */
            if (isnan(td_widen(table.host, dtype, i))) put(table.host, dtype, i, 1.5f);
        up(&table);
        for (int r = 0; r < ROWS; r++) ids[r] = rng_int(0, VOCAB - 1);
        ids[3] = VOCAB - 1;
        float *want = alloc_poisoned((size_t)(ROWS * dim) * 4);
        ref->embed(want, table.host, dtype, ids, ROWS, dim, 0, 1);
        ids[5] = -1; /* padding */
        struct both dids = copy_of(ids, sizeof ids), out = poisoned((size_t)(ROWS * dim) * 4);
        ops->embed((float *)(void *)out.device, table.device, dtype, (int32_t *)(void *)dids.device,
                   ROWS, dim, 0, 1);
        down(&out);
        const float *got = out.host;
        check_finite("embed", got + 5 * dim, dim);
        memcpy(want + 5 * dim, got + 5 * dim, (size_t)dim * 4);
        assert_memory_equal(got, want, (size_t)(ROWS * dim) * 4);
        both_free(&table), both_free(&dids), both_free(&out);
        free(want);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

struct weights {
    struct td_weight w;
    struct both packed;
};

/* In pieces of up to 128 rows, as the loader does it. */
static struct weights weights_make(const void *src, enum td_dtype src_dtype, enum td_dtype dtype,
                                   int32_t n, int32_t k)
{
    struct weights made = {.packed = both_make(ops->packed_bytes(n, k, dtype))};
    for (int32_t row = (n - 1) / 128 * 128; row >= 0; row -= 128) {
        int32_t n_piece = n - row < 128 ? n - row : 128;
        size_t bytes = ops->packed_bytes(n_piece, k, dtype);
        uint8_t *piece = alloc_poisoned(bytes);
        ops->pack(piece, n_piece, k, dtype,
                  (const char *)src + (size_t)row * (size_t)k * td_dtype_bytes(src_dtype),
                  src_dtype, 0, n_piece);
        memcpy((uint8_t *)made.packed.host + (row ? ops->packed_bytes(row, k, dtype) : 0), piece,
               bytes);
        free(piece);
    }
    up(&made.packed);
    made.w = (struct td_weight){
        .data = made.packed.device, .n_out = n, .n_in = k, .format = td_format_of_dtype(dtype)};
    return made;
}

/* As in kernels_gemm_test: k roundings of partial sums, of random sign; 4 for the tail, 4 for
 * bias and residual. */
static double gemm_tolerance(int32_t k, double sum_abs)
{
    return 0x1p-24 * (4 + 4 * sqrt(k)) * sum_abs;
}

static void run_on_device(const struct td_gemm_args *a)
{
    ops->gemm_prepare(a, 0, 1);
    ops->gemm(a, 0, 1);
}

struct shape {
    int32_t m, n, k;
};

static int32_t y_gap = -1; /* between rows of y; -1: drawn */

static void check_shape(struct shape s, enum td_dtype src_dtype, enum td_dtype dtype,
                        bool with_bias, bool accumulate)
{
    int64_t xs = s.k + rng_int(0, 5), ys = s.n + (y_gap < 0 ? rng_int(0, 5) : y_gap);
    float *x = random_rows(s.m, s.k, xs),
          *want = accumulate ? random_rows(s.m, s.n, ys) : alloc_poisoned((size_t)(s.m * ys) * 4);
    float *bias = with_bias ? random_rows(1, s.n, s.n) : NULL;
    void *src = alloc_poisoned((size_t)s.n * (size_t)s.k * td_dtype_bytes(src_dtype));
    for (int64_t i = 0; i < (int64_t)s.n * s.k; i++) put(src, src_dtype, i, rng_normal());
    struct weights w = weights_make(src, src_dtype, dtype, s.n, s.k);
    struct both dx = copy_of(x, (size_t)(s.m * xs) * 4), dy = copy_of(want, (size_t)(s.m * ys) * 4),
                scratch = poisoned(ops->gemm_scratch_bytes(s.m, s.k)), db;
    struct td_gemm_args a = {.w = &w.w,
                             .x = (float *)(void *)dx.device,
                             .y = (float *)(void *)dy.device,
                             .scratch = scratch.device,
                             .n_rows = s.m};
    a.x_stride = xs, a.y_stride = ys, a.accumulate = accumulate;
    if (bias) db = copy_of(bias, (size_t)s.n * 4), a.bias = (float *)(void *)db.device;
    run_on_device(&a);
    down(&dy), down(&scratch), down(&w.packed);

    struct td_weight rw = {.data = alloc_poisoned(ref->packed_bytes(s.n, s.k, dtype)),
                           .n_out = s.n,
                           .n_in = s.k,
                           .format = td_format_of_dtype(dtype)};
    ref->pack((void *)(uintptr_t)rw.data, s.n, s.k, dtype, src, src_dtype, 0, s.n);
    struct td_gemm_args plain = {.w = &rw,
                                 .x = x,
                                 .y = want,
                                 .bias = bias,
                                 .n_rows = s.m,
                                 .x_stride = xs,
                                 .y_stride = ys,
                                 .accumulate = accumulate};
    plain.scratch = alloc_poisoned(ref->gemm_scratch_bytes(s.m, s.k));
    run_gemm(ref, &plain, 1);
    const float *got = dy.host;
    for (int32_t m = 0; m < s.m; m++)
        for (int64_t n = 0; n < ys; n++) {
            if (n >= s.n) { /* the gap between rows stays as it was */
                assert_memory_equal(&want[m * ys + n], &got[m * ys + n], 4);
                continue;
            }
            double sum_abs = 2.0 + (bias ? fabs((double)bias[n]) : 0);
            for (int32_t k = 0; k < s.k; k++)
                sum_abs +=
                    fabs((double)x[m * xs + k] * (double)td_widen(src, src_dtype, n * s.k + k));
            double want_y = (double)want[m * ys + n], got_y = (double)got[m * ys + n];
            if (!(fabs(got_y - want_y) <= gemm_tolerance(s.k, sum_abs)))
                fail_msg("m=%d n=%d k=%d %s from %s bias=%d acc=%d: y[%d,%d] = %.9g, ref %.9g", s.m,
                         s.n, s.k, td_dtype_name(dtype), td_dtype_name(src_dtype), with_bias,
                         accumulate, m, (int)n, got_y, want_y);
        }
    both_free(&dx), both_free(&dy), both_free(&scratch), both_free(&w.packed);
    if (bias) both_free(&db);
    free(x), free(want), free(bias), free(src), free((void *)(uintptr_t)rw.data),
        free(plain.scratch);
}

/* Rows of x through the weights in batches of many sizes: the bits of the whole batch's rows
 * each time. */
static void check_invariance(enum td_dtype dtype, int32_t max_rows, int32_t n, int32_t k,
                             const int32_t *sizes, int n_sizes)
{
    void *src = alloc_poisoned((size_t)n * (size_t)k * td_dtype_bytes(dtype));
    for (int64_t i = 0; i < (int64_t)n * k; i++) put(src, dtype, i, rng_normal());
    float *x = random_rows(max_rows, k, k), *bias = random_rows(1, n, n),
          *residual = random_rows(max_rows, n, n);
    struct weights w = weights_make(src, dtype, dtype, n, k);
    struct both dx = copy_of(x, (size_t)(max_rows * k) * 4), db = copy_of(bias, (size_t)n * 4),
                scratch = poisoned(ops->gemm_scratch_bytes(max_rows, k));
    float *whole = alloc_poisoned((size_t)(max_rows * n) * 4);
    for (int i = -1; i < n_sizes; i++) {
        int32_t m = i < 0 ? max_rows : sizes[i], first = i < 0 ? 0 : rng_int(0, max_rows - m);
        struct both dy = copy_of(residual + (int64_t)first * n, (size_t)(m * n) * 4);
        struct td_gemm_args a = {.w = &w.w,
                                 .scratch = scratch.device,
                                 .bias = (float *)(void *)db.device,
                                 .n_rows = m,
                                 .x_stride = k,
                                 .y_stride = n};
        a.x = (float *)(void *)dx.device + (int64_t)first * k, a.y = (float *)(void *)dy.device,
        a.accumulate = true;
        run_on_device(&a);
        down(&dy);
        if (i < 0)
            memcpy(whole, dy.host, dy.bytes);
        else if (memcmp(dy.host, whole + (int64_t)first * n, dy.bytes) != 0)
            fail_msg(
                "%s n=%d k=%d: rows %d..%d computed as %d rows differ from the same rows of %d",
                td_dtype_name(dtype), n, k, first, first + m - 1, m, max_rows);
        both_free(&dy);
    }
    both_free(&dx), both_free(&db), both_free(&scratch), both_free(&w.packed);
    free(src), free(x), free(bias), free(residual), free(whole);
}

static const enum td_dtype types[][2] = {{TD_F32, TD_F32},  {TD_BF16, TD_BF16}, {TD_F16, TD_F16},
                                         {TD_BF16, TD_F32}, {TD_F16, TD_F32},   {TD_F32, TD_BF16},
                                         {TD_F16, TD_BF16}};

static void products(bool is_invariant)
{
    static const int32_t ns[] = {1, 5, 16, 17, 33, 64, 65, 130, 200},
                         ks[] = {1, 3, 8, 16, 31, 32, 40, 100, 257, 300, 600};
    for (int32_t m = 1; m <= 40; m++)
        for (int d = 0; d < 7; d++) {
            struct shape s = {m, ns[rng_int(0, 8)], ks[rng_int(0, 10)]};
            check_shape(s, types[d][0], types[d][1], rng_int(0, 1), rng_int(0, 1));
        }
    int32_t wide = 64 * dev->info.n_sms + 5; /* outputs enough for the wide form of few rows */
    check_shape((struct shape){150, 161, 530}, TD_BF16, TD_BF16, true, true);
    /* eight slices of many chunks */
    for (int32_t m = 3; m < 100; m *= 3)
        check_shape((struct shape){m, 40, 2100}, TD_BF16, TD_BF16, false, m % 2);
    check_shape((struct shape){7, wide, 40}, TD_BF16, TD_BF16, true, false);
    check_shape((struct shape){13, wide, 72}, TD_BF16, TD_BF16, false, true);
    if (!is_invariant) return;
    static const int32_t sizes[] = {1,  2,  3,  7,  8,  9,  15,  16,  17,  31,
                                    32, 33, 63, 64, 65, 66, 100, 127, 128, 129};
    check_invariance(TD_BF16, 130, 33, 600, sizes, 20);
    check_invariance(TD_BF16, 130, 140, 72, sizes, 20);
    check_invariance(TD_BF16, 18, wide, 104, sizes, 9);
    check_invariance(TD_BF16, 130, 20, 2350, sizes, 20);
    check_invariance(TD_F32, 66, 33, 257, sizes, 15);
    check_invariance(TD_F16, 66, 7, 100, sizes, 15);
}

static void products_of_way(const char *way, bool deterministic)
{
    close_device();
    td_status s = open_way(way, deterministic);
    if (s)
        print_message("  (no way %s here: %s)\n", way, err.msg);
    else
        products(strcmp(way, "cublas") != 0);
    if (s != TD_OK && s != TD_ERR_INVALID) fail_msg("%s", err.msg);
    if (s == TD_OK) close_device();
    assert_int_equal(open_way(NULL, false), TD_OK);
}

static void test_products_plain(void **state) { (void)state, products_of_way("plain", false); }
static void test_products_own(void **state) { (void)state, products_of_way("own", false); }
static void test_products_cublas(void **state) { (void)state, products_of_way("cublas", false); }
static void test_products_deterministic(void **state)
{
    (void)state;
    /* the plain way again on an emulated device */
    if (!dev->info.is_emulated) products_of_way("auto", true);
}

/* What cuBLASLt refuses, the table's own kernels do, and the device goes on. */
static void test_refused_products(void **state)
{
    (void)state;
    static const char *const faults[] = {"ltnone", "ltrefuse"};
    if (!dev->info.is_emulated) skip(); /* a real library refuses what it likes */
    for (int i = 0; i < 2; i++) {
        close_device();
        assert_int_equal(setenv("TD_CUDA_EMU_FAULT", faults[i], 1), 0);
        if (open_way("cublas", false)) fail_msg("%s", err.msg);
        for (int how = 0; how < 8; how++)
            check_shape((struct shape){5 + how, 40, 72}, how & 4 ? TD_F32 : TD_BF16, TD_BF16,
                        how & 1, how & 2);
        assert_int_equal(dev->wait(&err), TD_OK);
        close_device();
        assert_int_equal(unsetenv("TD_CUDA_EMU_FAULT"), 0);
        assert_int_equal(open_way(NULL, false), TD_OK);
    }
}

/* Products of one shape that differ in what an algorithm depends on beside it: the distance of
 * rows, and how much workspace is left (a bias and a residual together take half). The emulated
 * library ends a process that mixes their algorithms up. */
static void test_algorithms_are_for_their_problem(void **state)
{
    (void)state;
    close_device();
    td_status s = open_way("cublas", false);
    for (y_gap = 0; y_gap < 3 && !s; y_gap++)
        for (int i = 0; i < 4; i++)
            check_shape((struct shape){33, 64, 128}, TD_BF16, TD_BF16, i < 3, i % 2);
    y_gap = -1;
    if (!s) close_device();
    assert_int_equal(open_way(NULL, false), TD_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_kv_store),
        cmocka_unit_test(test_rope_store),
        cmocka_unit_test(test_silu_mul),
        cmocka_unit_test(test_embed),
        cmocka_unit_test(test_products_plain),
        cmocka_unit_test(test_products_own),
        cmocka_unit_test(test_products_cublas),
        cmocka_unit_test(test_products_deterministic),
        cmocka_unit_test(test_refused_products),
        cmocka_unit_test(test_algorithms_are_for_their_problem),
    };
    int skipped = open_or_say();
    if (skipped) return skipped;
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    close_device();
    return n_failed;
}
