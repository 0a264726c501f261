/* cuda_attn_test.c - attention of the device table: against ref over head ratios, head sizes,
 * lengths at every boundary, windows and block tables, with NaN in every slot that no row may
 * read; and the bits of a row alone, in chunks of any size, in decode, cut into pieces or not,
 * in company, beside padding and in any packing of heads. On the emulated device unless
 * TANDEM_CUDA_LIBRARY names a real one's library. */
#include "kernels/device.h"
#include "tests/unit/kernels_attn.h"

static const struct td_ops *ops;
static const struct td_device *device;

static bool is_short;  /* TANDEM_TEST_SHORT: as the sanitizer stages run it */
static bool is_wgmma;  /* the second run of all tests, with Hopper's kernels: of head sizes 64 and
                          128 only */
enum { PADDING = -1 }; /* rows->seq of a padding row is 0 */

/* The plan is made as for a model of plan_times as many heads, for which the same rows fill more
 * of the card and are cut less: any plan serves any model. */
static int32_t plan_times = 1, n_layers = 2;
static uint64_t plan_shape; /* of the last plan */

static void must(td_status status, const struct td_err *err)
{
    if (status != TD_OK) fail_msg("%s", err->msg);
}

static void *device_copy(const void *from, size_t bytes)
{
    struct td_err err;
    void *to;
    must(device->alloc(bytes ? bytes : 1, "test", &to, &err), &err);
    must(device->upload(to, from, bytes, &err), &err);
    return to;
}

/* What of a world lies on the device. */
struct on_device {
    void *cache, *tables[N_SEQS], *table_ptrs, *scratch;
};

static void on_device_make(struct on_device *d, const struct world *w)
{
    struct td_err err;
    size_t scratch =
        ops->attn_scratch_bytes(w->n_heads, w->kv.n_kv_heads, w->kv.head_dim, w->kv.block_size);
    must(device->alloc(w->cache_bytes, "cache", &d->cache, &err), &err);
    must(device->alloc(scratch, "scratch", &d->scratch, &err), &err); /* holds NaN */
    for (int s = 0; s < N_SEQS; s++)
        d->tables[s] = device_copy(
            w->tables[s], (size_t)((w->len[s] + w->kv.block_size - 1) / w->kv.block_size) * 4);
    d->table_ptrs = device_copy(d->tables, sizeof d->tables);
}

static void on_device_free(struct on_device *d)
{
    device->release(d->cache), device->release(d->scratch), device->release(d->table_ptrs);
    for (int s = 0; s < N_SEQS; s++) device->release(d->tables[s]);
}

/* One step of all layers. */
static void run_layers(const struct td_attn_args *a)
{
    struct td_err err;
    assert_true(device->step_begin(0));
    /* the second finds the plan as the first did */
    for (int layer = 0; layer < n_layers; layer++) ops->attn(a, 0, 1);
    must(device->step_end(&err), &err);
    must(device->wait(&err), &err);
}

/* The rows through the device, out [n][heads * head_dim]. Only query heads [head0, head0 +
 * n_heads) with kv head head0 / (ratio) if n_heads is not all of them. */
static void attend_heads(const struct world *w, const struct on_device *d, const struct rows *rows,
                         int32_t head0, int32_t n_heads, float *out)
{
    struct td_err err;
    int64_t all = (int64_t)w->n_heads * w->kv.head_dim, row = (int64_t)n_heads * w->kv.head_dim,
            stride = row + 3;
    int32_t n = rows->n, n_kv_heads = n_heads == w->n_heads ? w->kv.n_kv_heads : 1;
    assert_true(n_heads == w->n_heads || w->kv.n_kv_heads == 1);
    float *q = alloc_poisoned((size_t)(n * stride) * 4),
          *o = alloc_poisoned((size_t)(n * stride) * 4);
    for (int32_t r = 0; r < n; r++)
        if (rows->pos[r] >= 0)
            memcpy(q + r * stride,
                   w->q[rows->seq[r]] + rows->pos[r] * all + (int64_t)head0 * w->kv.head_dim,
                   (size_t)row * 4);
    size_t plan_bytes = ops->attn_plan_bytes(n, n_kv_heads * plan_times);
    void *plan = alloc_poisoned(plan_bytes);
    struct td_attn_plan_args plan_args = {.positions = rows->pos,
                                          .row_seq = rows->seq,
                                          .n_rows = n,
                                          .n_heads = n_heads * plan_times,
                                          .n_kv_heads = n_kv_heads * plan_times};
    plan_shape = UINT64_MAX;
    ops->attn_plan(&plan_args, plan, &plan_shape);
    assert_true(plan_shape < (uint64_t)1 << 40);
    must(device->upload(d->cache, w->cache, w->cache_bytes, &err), &err);
    void *q_d = device_copy(q, (size_t)(n * stride) * 4),
         *o_d = device_copy(o, (size_t)(n * stride) * 4),
         *pos_d = device_copy(rows->pos, (size_t)n * 4),
         *seq_d = device_copy(rows->seq, (size_t)n * 4), *plan_d = device_copy(plan, plan_bytes);
    struct td_attn_args a = {.kv = w->kv,
                             .q = q_d,
                             .out = o_d,
                             .q_stride = stride,
                             .out_stride = stride,
                             .positions = pos_d,
                             .row_seq = seq_d,
                             .block_tables = d->table_ptrs,
                             .n_rows = n,
                             .n_heads = n_heads,
                             .scale = w->scale,
                             .sliding_window = w->sliding_window,
                             .scratch = d->scratch,
                             .scratch_bytes_per_part = ops->attn_scratch_bytes(
                                 n_heads, n_kv_heads, w->kv.head_dim, w->kv.block_size),
                             .plan = plan,
                             .device_plan = plan_d};
    a.kv.base = d->cache;
    run_layers(&a);
    must(device->download(o, o_d, (size_t)(n * stride) * 4, &err), &err);
    void *after = alloc_poisoned(plan_bytes);
    must(device->download(after, plan_d, plan_bytes, &err), &err);
    assert_memory_equal(after, plan, plan_bytes);
    for (int32_t r = 0; r < n; r++) {
        memcpy(out + r * row, o + r * stride, (size_t)row * 4);
        for (int g = 0; g < 3; g++)
            assert_memory_equal(o + r * stride + row + g, "\xff\xff\xff\xff", 4);
    }
    device->release(q_d), device->release(o_d), device->release(pos_d), device->release(seq_d),
        device->release(plan_d);
    free(q), free(o), free(plan), free(after);
}

static void attend(const struct world *w, const struct on_device *d, const struct rows *rows,
                   float *out)
{
    attend_heads(w, d, rows, 0, w->n_heads, out);
}

static void attend_ref(const struct world *w, const struct rows *rows, float *out)
{
    int64_t row = (int64_t)w->n_heads * w->kv.head_dim;
    for (int32_t r = 0; r < rows->n; r++) {
        if (rows->pos[r] < 0) continue;
        struct td_attn_args a = {.kv = w->kv,
                                 .q = w->q[rows->seq[r]] + rows->pos[r] * row,
                                 .out = out + r * row,
                                 .positions = &rows->pos[r],
                                 .row_seq = &rows->seq[r],
                                 .block_tables = w->table_ptrs,
                                 .n_rows = 1,
                                 .n_heads = w->n_heads,
                                 .scale = w->scale,
                                 .sliding_window = w->sliding_window};
        td_ops_by_name("ref")->attn(&a, 0, 1);
    }
}

/* Beside attn_tolerance: exp2 of a GPU is off by 2^-22. With a bf16 cache each probability p is
 *     rounded to p (1 + e), |e| <= 2^-8, and divided by the
 * sum of the
 * rounded ones: out is off by sum p e (v - out), at most 2^-8 times the mean distance of V from
 * out, and a little of second order. ret [head_dim]. */
static void device_tolerance(const struct world *w, int32_t seq, int32_t pos, int32_t head,
                             double *ret)
{
    int32_t d = w->kv.head_dim,
            first = w->sliding_window > 0 && pos - w->sliding_window + 1 > 0
                        ? pos - w->sliding_window + 1
                        : 0,
            kv_head = head / (w->n_heads / w->kv.n_kv_heads);
    const float *q = w->q[seq] + ((int64_t)pos * w->n_heads + head) * d;
    double *p = malloc((size_t)(pos - first + 1) * sizeof *p), max = -INFINITY, sum = 0, v_max = 0;
    assert_non_null(p);
    for (int32_t j = first; j <= pos; j++) {
        const float *k = w->k[seq] + ((int64_t)j * w->kv.n_kv_heads + kv_head) * d,
                    *v = w->v[seq] + ((int64_t)j * w->kv.n_kv_heads + kv_head) * d;
        double s = 0;
        for (int32_t i = 0; i < d; i++)
            s += (double)q[i] * (double)k[i], v_max = fmax(v_max, fabs((double)v[i]));
        p[j - first] = s * (double)w->scale;
        max = fmax(max, p[j - first]);
    }
    for (int32_t j = 0; j <= pos - first; j++) p[j] = exp(p[j] - max), sum += p[j];
    double least = attn_tolerance(w, seq, pos, head) + 0x1p-22 * v_max;
    for (int32_t i = 0; i < d; i++) {
        double mean = 0, distance = 0;
        for (int32_t j = 0; j <= pos - first; j++)
            mean += p[j] / sum *
                    (double)w->v[seq][((int64_t)(j + first) * w->kv.n_kv_heads + kv_head) * d + i];
        for (int32_t j = 0; j <= pos - first; j++)
            distance +=
                p[j] / sum *
                fabs(
                    (double)w->v[seq][((int64_t)(j + first) * w->kv.n_kv_heads + kv_head) * d + i] -
                    mean);
        ret[i] = least;
        /* 1.1: mean and distance here are those of q, k and v before they were rounded to bf16 */
        /* codes stay as they are, p is not rounded */
        if (w->kv.dtype == TD_BF16) ret[i] += 0x1p-8 * 1.1 * distance + 0x1p-14 * v_max;
    }
    free(p);
}

/* o1: what the device made of the rows. */
static void near_ref(const struct world *w, const struct rows *rows, const float *o1)
{
    int64_t row = (int64_t)w->n_heads * w->kv.head_dim;
    double tolerance[TD_ATTN_HEAD_DIM_MAX];
    float *o0 = alloc_poisoned((size_t)(rows->n * row) * 4);
    attend_ref(w, rows, o0);
    for (int32_t r = 0; r < rows->n; r++)
        for (int32_t h = 0; h < w->n_heads; h++) {
            if (rows->pos[r] >= 0) device_tolerance(w, rows->seq[r], rows->pos[r], h, tolerance);
            for (int32_t i = 0; i < w->kv.head_dim; i++) {
                int64_t at = r * row + (int64_t)h * w->kv.head_dim + i;
                if (rows->pos[r] < 0 ? !isfinite(o1[at])
                                     : !(fabs((double)o1[at] - (double)o0[at]) <= tolerance[i]))
                    fail_msg("%s heads %d/%d dim %d block %d window %d: row %d seq %d pos %d head "
                             "%d [%d] = %.9g, ref %.9g, tolerance %.3g",
                             td_dtype_name(w->kv.dtype), w->n_heads, w->kv.n_kv_heads,
                             w->kv.head_dim, w->kv.block_size, w->sliding_window, r, rows->seq[r],
                             rows->pos[r], h, i, (double)o1[at], (double)o0[at], tolerance[i]);
            }
        }
    free(o0);
}

static void check_against_ref(struct world *w, const struct rows *rows)
{
    struct on_device d;
    world_expose(w, rows);
    on_device_make(&d, w);
    float *out = alloc_poisoned((size_t)(rows->n * w->n_heads * w->kv.head_dim) * 4);
    attend(w, &d, rows, out);
    near_ref(w, rows, out);
    free(out);
    on_device_free(&d);
}

static void test_against_ref(void **state)
{
    (void)state;
    static const int32_t ratios[] = {1, 4, 8, 2, 7}, head_dims[] = {64, 128, 32, 96, 34},
                         block_sizes[] = {16, 64, 8, 256, 7}, windows[] = {0, 0, 1, 5, 64, 100};
    static const enum td_dtype plain[] = {TD_F32, TD_INT8, TD_FP8}; /* without tensor cores */
    /* of every size and kind of length one */
    const uint32_t some =
        1u << 1 | 1u << 2 | 1u << 3 | 1u << 4 | 1u << 6 | 1u << 8 | 1u << 11 | 1u << 13 | 1u << 19;
    for (int c = 0; c < 20; c++) {
        if (is_short && !(some >> c & 1)) continue;
        if (is_wgmma && head_dims[c / 2 % 5] % 64 != 0) continue;
        int32_t bs = block_sizes[rng_int(0, 4)];
        int32_t len[N_SEQS] = {rng_int(60, 140), rng_int(60, 140), rng_int(1, 3), rng_int(1, 200)};
        if (c % 4 == 1) len[0] = bs + 1, len[1] = bs > 1 ? bs - 1 : 1, len[3] = bs;
        if (c % 4 == 2) len[0] = 65, len[1] = 64, len[3] = 63;
        if (c % 4 == 3) len[0] = 257, len[1] = 256, len[3] = 255;
        struct world *w = malloc(sizeof *w);
        struct rows *rows = calloc(1, sizeof *rows);
        assert_true(w && rows);
        enum td_dtype dtype = c % 3 ? TD_BF16 : plain[c / 3 % 3];
        if (td_dtype_is_coded(dtype) && bs * head_dims[c / 2 % 5] % 4) bs = 16;
        world_make(w, rng_int(1, 2), ratios[c % 5], head_dims[c / 2 % 5], bs, dtype, len,
                   windows[rng_int(0, 5)]);
        int32_t chunk = rng_int(1, len[0] < 40 ? len[0] : 40),
                begin = rng_int(1, len[1] < 20 ? len[1] : 20);
        rows_add(rows, 2, len[2] - 1, 1);         /* decode */
        rows_add(rows, 0, len[0] - chunk, chunk); /* a chunk that ends the prompt */
        rows_add(rows, 1, 0, begin);              /* a chunk that begins one */
        rows_add(rows, 0, PADDING, 1);
        rows_add(rows, 3, len[3] - 1, 1);
        rows_add(rows, 0, PADDING, 1), rows_add(rows, 0, PADDING, 1);
        check_against_ref(w, rows);
        world_free(w), free(w), free(rows);
    }
}

/* Rows of decode on both sides of every split, with pieces. */
static void test_decode_over_splits(void **state)
{
    (void)state;
    for (int c = is_short ? 3 : 0; c < (is_short ? 5 : 6); c++) {
        int32_t len[N_SEQS] = {513, 512, 511, 600};
        if (c == 5 && !is_wgmma)
            continue; /* test_cuts_leave_the_bits has such a row, with more
                         to find */
        /* the window leaves out whole splits */
        if (c == 4) len[0] = 1200, len[1] = 1025, len[2] = 1024, len[3] = 520;
        /* more pieces than a warp has lanes */
        if (c == 5) len[0] = 16900, len[1] = len[2] = len[3] = 1;
        struct world *w = malloc(sizeof *w);
        struct rows *rows = calloc(1, sizeof *rows);
        assert_true(w && rows);
        world_make(w, 1,
                   c == 5  ? 2
                   : c % 2 ? 4
                           : 7,
                   is_wgmma || (c % 2 && c < 5) ? 64 : 32, c == 5 ? 64 : 16,
                   c == 3 ? TD_F32 : TD_BF16, len,
                   c == 2   ? 300
                   : c == 4 ? 150
                            : 0);
        for (int s = 0; s < N_SEQS; s++) rows_add(rows, s, len[s] - 1, 1);
        check_against_ref(w, rows);
        world_free(w), free(w), free(rows);
    }
}

static void same_rows(const char *what, int c, const struct rows *rows, const float *some,
                      const float *whole, int64_t row)
{
    for (int32_t r = 0; r < rows->n; r++)
        if (!isfinite(some[r * row]) ||
            memcmp(some + r * row, whole + rows->pos[r] * row, (size_t)row * 4) != 0)
            fail_msg("case %d, %s: the row of position %d differs from the whole prompt's", c, what,
                     rows->pos[r]);
}

static void chunks_leave_the_bits(int c, struct world *w, const struct on_device *d,
                                  struct rows *rows, const int32_t *len, int32_t lo,
                                  const float *whole, float *some)
{
    int64_t row = (int64_t)w->n_heads * w->kv.head_dim;
    const int32_t chunks[] = {1, 7, 16, 64};
    for (int i = 0; i < 4; i++)
        for (int32_t p = lo; p < len[0]; p += chunks[i]) { /* chunk 1: decode */
            int32_t n = len[0] - p < chunks[i] ? len[0] - p : chunks[i];
            /* the first ones of a split, and some */
            if (chunks[i] == 1 && p % 256 > 1 && rng_int(0, 9)) continue;
            rows->n = 0;
            rows_add(rows, 0, p, n);
            world_expose(w, rows); /* later positions are NaN now */
            attend(w, d, rows, some);
            same_rows("as a chunk", c, rows, some, whole, row);
        }
}

static void company_leaves_the_bits(int c, struct world *w, const struct on_device *d,
                                    struct rows *rows, const int32_t *len, const float *whole,
                                    float *some)
{
    int64_t row = (int64_t)w->n_heads * w->kv.head_dim;
    for (int i = 0; i < 3; i++) { /* in company, in the middle of a batch; decode rows have
                                     less of the card each, so are cut otherwise */
        int32_t n = i ? rng_int(1, 40) : 1, p = rng_int(len[0] - 90, len[0] - n), before;
        rows->n = 0;
        rows_add(rows, 3, len[3] - 1, 1);
        rows_add(rows, 2, rng_int(0, 100), rng_int(1, 30));
        before = rows->n;
        rows_add(rows, 0, p, n);
        rows_add(rows, 0, PADDING, 1);
        rows_add(rows, 1, 0, rng_int(1, 77));
        world_expose(w, rows);
        attend(w, d, rows, some);
        if (memcmp(some + before * row, whole + p * row, (size_t)(n * row) * 4) != 0)
            fail_msg("case %d: rows %d..%d in company differ", c, p, p + n - 1);
    }
}

/* A head alone: as many rows of the tile are another token's. */
static void heads_alone_have_the_bits(struct world *w, const struct on_device *d, struct rows *rows,
                                      const int32_t *len, const float *whole, float *some)
{
    int64_t row = (int64_t)w->n_heads * w->kv.head_dim;
    for (int32_t h = 0; h < w->n_heads; h++) { /* a head alone: as many rows of the tile
                                                      are another token's */
        rows->n = 0;
        rows_add(rows, 0, len[0] - 5, 5);
        world_expose(w, rows);
        attend_heads(w, d, rows, h, 1, some);
        for (int i = 0; i < 5; i++)
            assert_memory_equal(some + i * w->kv.head_dim,
                                whole + (len[0] - 5 + i) * row + (int64_t)h * w->kv.head_dim,
                                (size_t)w->kv.head_dim * 4);
    }
}

static void test_chunks_and_company_leave_the_bits(void **state)
{
    (void)state;
    static const int32_t windows[] = {0, 70, 0, 290}, dims[] = {64, 34, 128, 32},
                         ratios[] = {4, 3, 2, 7}, block_sizes[] = {16, 7, 64, 8};
    for (int c = 0; c < (is_short ? 2 : 4); c++) {
        if (is_wgmma && dims[c] % 64 != 0) continue;
        int32_t len[N_SEQS] = {c == 1 ? 90 : 530, 77, 130, 33}, lo = c == 1 ? 0 : rng_int(440, 505);
        struct world *w = malloc(sizeof *w);
        struct rows *rows = calloc(1, sizeof *rows);
        struct on_device d;
        assert_true(w && rows);
        world_make(w, c == 3 ? 2 : 1, ratios[c], dims[c], block_sizes[c], c == 1 ? TD_F32 : TD_BF16,
                   len, windows[c]);
        on_device_make(&d, w);
        int64_t row = (int64_t)w->n_heads * w->kv.head_dim;
        float *whole = alloc_poisoned((size_t)(len[0] * row) * 4),
              *some = alloc_poisoned((size_t)(N_SEQS * LEN_MAX * row) * 4);
        rows_add(rows, 0, 0, len[0]);
        world_expose(w, rows);
        attend(w, &d, rows, whole);
        chunks_leave_the_bits(c, w, &d, rows, len, lo, whole, some);
        company_leaves_the_bits(c, w, &d, rows, len, whole, some);
        if (w->kv.n_kv_heads == 1) heads_alone_have_the_bits(w, &d, rows, len, whole, some);
        free(whole), free(some), free(rows);
        on_device_free(&d), world_free(w), free(w);
    }
}

static const struct {
    int32_t kv_heads, ratio, dim, block, len, window, chunk;
} cuts[] = {
    {1, 1, 32, 64, 17300, 0, 64},    /* 34 splits: more than a warp has lanes */
    {1, 8, 64, 16, 6300, 4700, 17},  /* the window begins inside a stretch */
    {2, 2, 32, 7, 4500, 0, 64},      /* a split of the second stretch */
    {1, 7, 128, 16, 6200, 2500, 16}, /* the window begins in the first stretch, the chunk ends
                                        in the second */
};

/* Rows behind thousands of keys, in every cut of the same keys: uncut, at stretches, at splits.
 * Scores are large, and the largest of a row stand now in its first split, now in its last, so
 * that a state which is scaled by another maximum than its own shows. */
static void test_cuts_leave_the_bits(void **state)
{
    (void)state;
    enum { UNCUT = 1024 };
    for (int c = 0; c < 4; c++) {
        if (is_wgmma ? c != 1 : is_short && c != 2) continue;
        int32_t len[N_SEQS] = {cuts[c].len + rng_int(0, 100), 1, 1, 1}, dim = cuts[c].dim,
                chunk = cuts[c].chunk;
        struct world *w = malloc(sizeof *w);
        struct rows *rows = calloc(1, sizeof *rows);
        struct on_device d;
        assert_true(w && rows);
        world_make(w, cuts[c].kv_heads, cuts[c].ratio, dim, cuts[c].block, TD_BF16, len,
                   cuts[c].window);
        int64_t row = (int64_t)w->n_heads * dim, kv_row = (int64_t)w->kv.n_kv_heads * dim;
        int32_t from = len[0] - chunk,
                first = w->sliding_window > 0 ? from - w->sliding_window + chunk : 0,
                large[] = {first + 3, first + 700, len[0] / 2, from - 1};
        for (int64_t i = from * row; i < len[0] * row; i++) w->q[0][i] *= 12;
        for (int i = 0; i < 4; i++)
            for (int64_t j = 0; j < kv_row; j++) w->k[0][large[i] * kv_row + j] *= 3;
        on_device_make(&d, w);
        float *whole = alloc_poisoned((size_t)(chunk * row) * 4),
              *some = alloc_poisoned((size_t)(chunk * row) * 4);
        rows_add(rows, 0, from, chunk);
        world_expose(w, rows);
        plan_times = UNCUT, n_layers = 1;
        attend(w, &d, rows, whole);
        struct rows *last = calloc(1, sizeof *last); /* all the others must be like it in bits */
        assert_non_null(last);
        rows_add(last, 0, len[0] - 1, 1);
        near_ref(w, last, whole + (chunk - 1) * row);
        free(last);
        uint64_t uncut = plan_shape;
        /* cut at splits or stretches, or not */
        const int32_t sizes[] = {chunk, 16, 7, 1}, times[] = {1, 4, UNCUT};
        for (int i = 0; i < 4; i++)
            for (int t = 0; t < (sizes[i] == 1 ? 3 : sizes[i] == 7 ? 1 : 2); t++) {
                int32_t n = sizes[i], at = i ? rng_int(0, chunk - n) : 0;
                rows->n = 0;
                rows_add(rows, 0, from + at, n);
                world_expose(w, rows);
                plan_times = times[t];
                attend(w, &d, rows, some);
                if (i == 0 && t == 0) assert_true(plan_shape > uncut);
                if (memcmp(some, whole + at * row, (size_t)(n * row) * 4) != 0)
                    fail_msg("case %d: %d rows from position %d, plan of %d times the heads: not "
                             "the uncut chunk's",
                             c, n, from + at, plan_times);
            }
        plan_times = 1, n_layers = 2;
        free(whole), free(some), free(rows);
        on_device_free(&d), world_free(w), free(w);
    }
}

/* Many decode rows: fewer pieces each than a row alone has, of several lengths. */
static void test_a_batch_of_decode_rows(void **state)
{
    (void)state;
    int32_t len[N_SEQS] = {600, 590, 520, 300}, n = is_wgmma || is_short ? 60 : 120;
    struct world *w = malloc(sizeof *w);
    struct rows *rows = calloc(1, sizeof *rows), *one = calloc(1, sizeof *rows);
    struct on_device d;
    assert_true(w && rows && one);
    world_make(w, is_wgmma ? 1 : 2, 4, is_wgmma ? 64 : 32, 16, TD_BF16, len, 0);
    on_device_make(&d, w);
    int64_t row = (int64_t)w->n_heads * w->kv.head_dim;
    for (int i = 0; i < n; i++) rows_add(rows, i % N_SEQS, rng_int(0, len[i % N_SEQS] - 1), 1);
    float *batch = alloc_poisoned((size_t)(rows->n * row) * 4),
          *alone = alloc_poisoned((size_t)row * 4);
    world_expose(w, rows);
    attend(w, &d, rows, batch);
    for (int i = 0; i < n; i += rng_int(1, 20)) {
        one->n = 0;
        rows_add(one, rows->seq[i], rows->pos[i], 1);
        attend(w, &d, one, alone);
        if (memcmp(batch + i * row, alone, (size_t)row * 4) != 0)
            fail_msg("row %d (seq %d pos %d) of a batch differs from itself alone", i, rows->seq[i],
                     rows->pos[i]);
    }
    free(batch), free(alone), free(rows), free(one);
    on_device_free(&d), world_free(w), free(w);
}

/* An infinite V at a later position of the same chunk must not reach the rows before it. */
static void test_later_infinity_stays_later(void **state)
{
    (void)state;
    enum { LEN = 80, BAD = 70 };
    static const enum td_dtype types[] = {TD_BF16, TD_F32, TD_INT8};
    for (int c = 0; c < 3; c++) {
        int32_t len[N_SEQS] = {LEN, 1, 1, 1};
        struct world *w = malloc(sizeof *w);
        struct rows *rows = calloc(1, sizeof *rows);
        struct on_device d;
        assert_true(w && rows);
        world_make(w, 1, 4, 64, 16, types[c], len, 0);
        on_device_make(&d, w);
        int64_t row = (int64_t)w->n_heads * 64;
        float *clean = alloc_poisoned((size_t)(LEN * row) * 4),
              *dirty = alloc_poisoned((size_t)(LEN * row) * 4);
        rows_add(rows, 0, 0, LEN);
        world_expose(w, rows);
        attend(w, &d, rows, clean);
        w->v[0][BAD * 64 + 5] = INFINITY;
        world_expose(w, rows);
        attend(w, &d, rows, dirty);
        assert_memory_equal(clean, dirty, (size_t)(BAD * row) * 4);
        for (int32_t i = 0; i < BAD * row; i++) assert_true(isfinite(clean[i]));
        assert_true(!isfinite(dirty[BAD * row + 5]));
        free(clean), free(dirty), free(rows);
        on_device_free(&d), world_free(w), free(w);
    }
}

/* The shape of a step of n short decode rows and a last one that sees n_long keys. */
static uint64_t shape_of(int32_t n, int32_t n_long)
{
    int32_t *pos = malloc((size_t)(n + 1) * 4), *seq = malloc((size_t)(n + 1) * 4);
    for (int32_t i = 0; i <= n; i++) pos[i] = i < n ? 99 : n_long - 1, seq[i] = i;
    struct td_attn_plan_args a = {
        .positions = pos, .row_seq = seq, .n_rows = n + 1, .n_heads = 4, .n_kv_heads = 1};
    void *plan = malloc(ops->attn_plan_bytes(n + 1, 1));
    uint64_t shape;
    ops->attn_plan(&a, plan, &shape);
    free(plan), free(pos), free(seq);
    return shape;
}

static void test_a_long_row_is_cut_among_many_short_ones(void **state)
{
    (void)state;
    int32_t n = 1; /* a power of two, so that one piece more is a larger grid; more blocks than a
                      card wants, before any row is cut */
    while (n < 16 * device->info.n_sms) n *= 2;
    assert_true(shape_of(n - 1, 200000) > shape_of(n - 1, 100));
    assert_true(shape_of(3, 200000) > shape_of(3, 100));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_long_row_is_cut_among_many_short_ones),
        cmocka_unit_test(test_against_ref),
        cmocka_unit_test(test_decode_over_splits),
        cmocka_unit_test(test_chunks_and_company_leave_the_bits),
        cmocka_unit_test(test_cuts_leave_the_bits),
        cmocka_unit_test(test_a_batch_of_decode_rows),
        cmocka_unit_test(test_later_infinity_stays_later),
    };
    struct td_device_config config = {0};
    struct td_err err;
    rng_start();
    is_short = getenv("TANDEM_TEST_SHORT") != NULL;
    if (td_device_open(&config, &ops, &err) != TD_OK) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    device = ops->device;
    setenv("TANDEM_CUDA_ATTN", "mma", 1);
    int rc = cmocka_run_group_tests_name("mma.sync and plain", tests, NULL, NULL);
    if (device->info.cc_major == 9 && device->info.cc_minor == 0) {
        is_wgmma = true;
        setenv("TANDEM_CUDA_ATTN", "wgmma", 1);
        rc += cmocka_run_group_tests_name("wgmma", tests, NULL, NULL);
    } else {
        printf("  (%s is no Hopper: wgmma is not tested)\n", device->info.name);
    }
    td_device_close(ops);
    return rc;
}
