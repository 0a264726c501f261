/* cuda_experts_test.c - a mixture of experts on the device, through the table: choices, order, sums
 * and gates with the bits of kernels/experts.c; each pair's product with the bits of its row alone
 * and near ref's; the same graph whoever is chosen. TANDEM_CUDA_LIBRARY names the library, emulated
 * or real. */
#include "kernels/experts.h"
#include "tests/unit/cuda_test.h"

static const struct td_device_experts *ex;

static float *floats_of(const struct both *b) { return (float *)(void *)b->device; }
static int32_t *ints_of(const struct both *b) { return (int32_t *)(void *)b->device; }

static bool same_float(float a, float b)
{
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0;
}

/* ---- choose ---------------------------------------------------------------------------------- */

/* The device's choices for logits [rows, n], of which row `pad` (-1: none) is padding. */
static void check_choose(const float *logits, int32_t rows, int32_t n, int32_t used,
                         const struct td_experts_rule *rule, const float *bias, int32_t pad)
{
    size_t n_chosen = (size_t)(rows * used);
    int32_t *positions = calloc((size_t)rows, 4), *want = alloc_poisoned(n_chosen * 4);
    float *weights = alloc_poisoned(n_chosen * 4);
    struct td_experts_choose_args a = {logits, rows, n, used, *rule, want, weights, bias};
    td_experts_choose(&a, 0, 1);
    for (int32_t i = 0; i < used && pad >= 0; i++)
        want[pad * used + i] = -1, weights[pad * used + i] = 0;
    if (pad >= 0) positions[pad] = -1;
    struct both dl = copy_of(logits, (size_t)(rows * n) * 4),
                dp = copy_of(positions, (size_t)rows * 4), ids = poisoned(n_chosen * 4),
                w = poisoned(n_chosen * 4), db = {0};
    if (bias) db = copy_of(bias, (size_t)n * 4);
    a.logits = floats_of(&dl), a.ids = ints_of(&ids), a.weights = floats_of(&w);
    a.bias = bias ? floats_of(&db) : NULL;
    ex->choose(&a, pad >= 0 ? ints_of(&dp) : NULL);
    down(&ids), down(&w);
    for (size_t i = 0; i < n_chosen; i++) {
        int32_t id = ((int32_t *)ids.host)[i];
        float weight = ((float *)w.host)[i];
        if (id != want[i] || !same_float(weight, weights[i]))
            fail_msg(
                "%d of %d experts, sigmoid %d, normalise %d, groups %d of %d: row %zu chose %d "
                "with %a, must be %d with %a",
                used, n, rule->sigmoid, rule->normalise, rule->n_groups_used, rule->n_groups,
                i / (size_t)used, id, (double)weight, want[i], (double)weights[i]);
    }
    both_free(&dl), both_free(&dp), both_free(&ids), both_free(&w);
    if (bias) both_free(&db);
    free(positions), free(want), free(weights);
}

static void test_choose(void **state)
{
    (void)state;
    static const int32_t sizes[][4] = {
        {1, 1, 0, 0},  {2, 2, 0, 0},    {8, 2, 0, 0},    {60, 4, 0, 0}, {64, 8, 8, 4},
        {67, 8, 0, 0}, {128, 8, 0, 0},  {9, 3, 3, 1},    {6, 2, 1, 1},  {60, 6, 30, 20},
        {8, 4, 8, 5},  {300, 10, 4, 2}, {1024, 64, 0, 0}};
    enum { ROWS = 3 };
    static float logits[ROWS * TD_EXPERTS_MAX], bias[TD_EXPERTS_MAX];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int k = 0; k < 16; k++) {
            int32_t n = sizes[i][0];
            if (n > 128 && k % 5) continue;
            for (int32_t e = 0; e < n; e++) bias[e] = rng_normal() - 1;
            for (int32_t e = 0; e < ROWS * n; e++)
                logits[e] = k & 2 ? (float)rng_int(0, 3) : rng_normal() * 5;
            struct td_experts_rule rule = {.sigmoid = (k & 1) != 0,
                                           .normalise = (k & 4) != 0,
                                           .n_groups = sizes[i][2],
                                           .n_groups_used = sizes[i][3],
                                           .groups_by_two = (k & 8) != 0,
                                           .scale = k & 8 ? 2.5f : 0};
            check_choose(logits, ROWS, n, sizes[i][1], &rule, rule.sigmoid && k & 4 ? bias : NULL,
                         rng_int(-1, ROWS - 1));
        }
    /* nothing that a broken row holds chooses an expert twice, or one that is not there */
    const float odd[4][5] = {{NAN, NAN, NAN, NAN, NAN},
                             {INFINITY, 1, INFINITY, NAN, 2},
                             {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY},
                             {NAN, -INFINITY, 3, NAN, 3}};
    for (int k = 0; k < 4; k++) {
        struct td_experts_rule rule = {.sigmoid = (k & 1) != 0, .normalise = (k & 2) != 0};
        check_choose(odd[0], 4, 5, 3, &rule, NULL, -1);
    }
}

/* ---- order ----------------------------------------------------------------------------------- */

struct order {
    struct td_device_experts_order o;
    struct both row_of, at, tiles;
};

static struct order order_make(int32_t rows, int32_t used, int32_t n)
{
    size_t bytes = (size_t)(rows * used) * 4;
    struct order order = {.row_of = poisoned(bytes),
                          .at = poisoned(bytes),
                          .tiles = poisoned(ex->tile_ints(rows, used, n) * 4)};
    order.o = (struct td_device_experts_order){.n_rows = rows, .n_used = used, .n_experts = n};
    order.o.row_of = ints_of(&order.row_of), order.o.at = ints_of(&order.at),
    order.o.tiles = ints_of(&order.tiles);
    return order;
}

static void order_free(struct order *order)
{
    both_free(&order->row_of), both_free(&order->at), both_free(&order->tiles);
}

/* Random choices, ascending in a row. How they are spread: 0 evenly; 1 all rows to the first ones;
 * 2 few experts; and one row of padding where there are several. */
static int32_t *random_ids(int32_t rows, int32_t used, int32_t n, int how)
{
    int32_t *ids = alloc_poisoned((size_t)(rows * used) * 4),
            pad = rows > 1 ? rng_int(0, rows) : -1;
    int32_t among = how == 2 && n > used ? used + 1 : n;
    for (int32_t r = 0; r < rows; r++) {
        int32_t left = used, first = how == 2 ? (n - among) / 2 : 0;
        for (int32_t e = 0; e < among && left > 0; e++) {
            bool takes = how == 1 || among - e == left || rng_int(0, among - e - 1) < left;
            if (takes) ids[r * used + used - left--] = first + e;
        }
        for (int32_t i = 0; i < used && r == pad; i++) ids[r * used + i] = -1;
    }
    return ids;
}

static void check_order(int32_t rows, int32_t used, int32_t n, int how)
{
    int32_t *ids = random_ids(rows, used, n, how), n_pairs = rows * used, to = 0, tile = 0;
    struct both di = copy_of(ids, (size_t)n_pairs * 4);
    struct order order = order_make(rows, used, n);
    ex->sort(ints_of(&di), &order.o);
    down(&order.row_of), down(&order.at), down(&order.tiles);
    const int32_t *row_of = order.row_of.host, *at = order.at.host, *tiles = order.tiles.host;
    for (int32_t e = 0; e < n; e++) {
        int32_t first = to;
        for (int32_t i = 0; i < n_pairs; i++) {
            if (ids[i] != e) continue;
            if (at[i] != to || row_of[to] != i / used)
                fail_msg("%d rows, %d of %d, %d: pair %d of expert %d is at %d, must be %d", rows,
                         used, n, how, i, e, at[i], to);
            to++;
        }
        while (first < to) {
            const int32_t *t = tiles + 3 * tile++;
            if (t[0] != e || t[1] != first || t[2] < 1 || t[2] > to - first)
                fail_msg("%d rows, %d of %d, %d: tile %d is {%d, %d, %d}, must be of %d from %d",
                         rows, used, n, how, tile - 1, t[0], t[1], t[2], e, first);
            first += t[2];
        }
    }
    for (int32_t i = 0; i < n_pairs; i++)
        if (ids[i] < 0) assert_int_equal(at[i], -1);
    for (int32_t i = to; i < n_pairs; i++) assert_int_equal(row_of[i], -1);
    both_free(&di), order_free(&order);
    free(ids);
}

static void test_sort(void **state)
{
    (void)state;
    static const int32_t cases[][3] = {{1, 1, 1},   {1, 8, 128}, {2, 2, 2},   {3, 3, 7},
                                       {17, 8, 67}, {40, 2, 3},  {70, 4, 4},  {300, 1, 2},
                                       {33, 8, 9},  {257, 2, 8}, {5, 64, 300}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int how = 0; how < 3; how++) check_order(cases[i][0], cases[i][1], cases[i][2], how);
}

/* ---- products -------------------------------------------------------------------------------- */

/* Experts of [n_out, n_in], a gap of NaN behind each. */
struct experts {
    struct td_weight w;
    void *src; /* [n, n_out, n_in] */
    struct both packed;
    int64_t stride;
};

static struct experts experts_make(int32_t n, int32_t n_out, int32_t n_in, enum td_dtype dtype)
{
    size_t elem = td_dtype_bytes(dtype), each = (size_t)n_out * (size_t)n_in * elem;
    struct experts made = {.src = alloc_poisoned((size_t)n * each)};
    made.stride = (int64_t)ops->packed_bytes(n_out, n_in, dtype) + 64 * rng_int(0, 2);
    made.packed = both_make((size_t)(made.stride * n));
    for (int64_t i = 0; i < (int64_t)n * n_out * n_in; i++) put(made.src, dtype, i, rng_normal());
    for (int32_t e = 0; e < n; e++)
        ops->pack((uint8_t *)made.packed.host + e * made.stride, n_out, n_in, dtype,
                  (uint8_t *)made.src + (size_t)e * each, dtype, 0, n_out);
    up(&made.packed);
    made.w = (struct td_weight){.data = made.packed.device,
                                .n_out = n_out,
                                .n_in = n_in,
                                .format = td_format_of_dtype(dtype)};
    return made;
}

/* The row alone through the dense product of its expert, to `to`. */
static void alone(const struct experts *x, int32_t e, const float *row, float *to)
{
    struct td_weight w = x->w;
    struct both dx = copy_of(row, (size_t)w.n_in * 4), dy = poisoned((size_t)w.n_out * 4),
                scratch = poisoned(ops->gemm_scratch_bytes(1, w.n_in));
    w.data = x->packed.device + e * x->stride;
    struct td_gemm_args a = {.w = &w, .scratch = scratch.device, .n_rows = 1};
    a.x = floats_of(&dx), a.y = floats_of(&dy), a.x_stride = w.n_in, a.y_stride = w.n_out;
    ops->gemm_prepare(&a, 0, 1);
    ops->gemm(&a, 0, 1);
    down(&dy);
    memcpy(to, dy.host, dy.bytes);
    both_free(&dx), both_free(&dy), both_free(&scratch);
}

/* As in cuda_rows_test: roundings of partial sums of random sign, against ref's doubles. */
static void near_ref(const struct experts *x, int32_t e, const float *row, const float *got)
{
    const struct td_format *f = x->w.format;
    int32_t n = x->w.n_out, k = x->w.n_in;
    const uint8_t *src =
        (uint8_t *)x->src + (size_t)e * (size_t)n * (size_t)k * td_dtype_bytes(f->dtype);
    struct td_weight w = {.n_out = n, .n_in = k, .format = f};
    void *packed = alloc_poisoned(ref->packed_bytes(n, k, f->dtype));
    float *want = alloc_poisoned((size_t)n * 4);
    ref->pack(packed, n, k, f->dtype, src, f->dtype, 0, n);
    w.data = packed;
    struct td_gemm_args a = {
        .w = &w, .x = row, .y = want, .n_rows = 1, .x_stride = k, .y_stride = n};
    a.scratch = alloc_poisoned(ref->gemm_scratch_bytes(1, k));
    run_gemm(ref, &a, 1);
    for (int32_t o = 0; o < n; o++) {
        double sum_abs = 2.0;
        for (int32_t i = 0; i < k; i++)
            sum_abs += fabs((double)row[i] * (double)td_widen(src, f->dtype, (int64_t)o * k + i));
        if (!(fabs((double)got[o] - (double)want[o]) <= 0x1p-24 * (4 + 4 * sqrt(k)) * sum_abs))
            fail_msg("%s, expert %d: y[%d] = %.9g, ref %.9g", td_dtype_name(f->dtype), e, o,
                     (double)got[o], (double)want[o]);
    }
    free(packed), free(want), free(a.scratch);
}

/* Of all pairs of an order, through their experts. */
static struct td_device_experts_gemm_args product_of(const struct order *order,
                                                     const struct experts *w, const struct both *x,
                                                     int64_t x_stride, const struct both *y,
                                                     int64_t y_stride, const struct both *scratch)
{
    return (struct td_device_experts_gemm_args){.order = &order->o,
                                                .w = &w->w,
                                                .w_stride = w->stride,
                                                .x = floats_of(x),
                                                .y = floats_of(y),
                                                .scratch = scratch->device,
                                                .x_stride = x_stride,
                                                .y_stride = y_stride};
}

struct mixture {
    int32_t rows, used, n, n_out, n_in;
    int how;
};

static void check_products(struct mixture m, enum td_dtype dtype)
{
    int32_t n_pairs = m.rows * m.used, last = 0;
    int64_t xs = m.n_in + rng_int(0, 5), ys = m.n_out + rng_int(0, 5);
    int32_t *ids = random_ids(m.rows, m.used, m.n, m.how);
    float *x = random_rows(m.rows, m.n_in, xs), *want = alloc_poisoned((size_t)m.n_out * 4);
    struct experts w = experts_make(m.n, m.n_out, m.n_in, dtype);
    struct both di = copy_of(ids, (size_t)n_pairs * 4), dx = copy_of(x, (size_t)(m.rows * xs) * 4),
                dy = poisoned((size_t)(n_pairs * ys) * 4),
                scratch = poisoned(ops->gemm_scratch_bytes(n_pairs, m.n_in));
    struct order order = order_make(m.rows, m.used, m.n);
    struct td_device_experts_gemm_args a = product_of(&order, &w, &dx, xs, &dy, ys, &scratch);
    ex->sort(ints_of(&di), &order.o);
    ex->prepare(&a);
    ex->gemm(&a);
    down(&order.at), down(&dy), down(&scratch);
    for (int32_t i = 0; i < n_pairs; i++) {
        int32_t at = ((int32_t *)order.at.host)[i];
        if (ids[i] < 0) continue;
        const float *row = x + i / m.used * xs, *got = (float *)dy.host + at * ys;
        last++;
        if (n_pairs > 80 && rng_int(0, n_pairs / 40)) continue;
        alone(&w, ids[i], row, want);
        if (memcmp(got, want, (size_t)m.n_out * 4) != 0)
            fail_msg("%d rows, %d of %d, [%d, %d] %s: pair %d of expert %d is not the bits of its "
                     "row alone",
                     m.rows, m.used, m.n, m.n_out, m.n_in, td_dtype_name(dtype), i, ids[i]);
        near_ref(&w, ids[i], row, got);
    }
    for (int64_t i = 0; i < n_pairs * ys; i++) /* what nobody asked for */
        if (i / ys >= last || i % ys >= m.n_out) assert_true(isnan(((float *)dy.host)[i]));
    both_free(&di), both_free(&dx), both_free(&dy), both_free(&scratch), both_free(&w.packed);
    order_free(&order);
    free(ids), free(x), free(want), free(w.src);
}

/* Means of up to 8, 16, 64 and more rows of an expert: each has a kernel of its own. */
static void products(void)
{
    static const struct mixture cases[] = {{1, 3, 7, 33, 40, 0},    {4, 2, 8, 70, 300, 1},
                                           {9, 3, 7, 17, 31, 0},    {5, 8, 20, 65, 72, 2},
                                           {30, 2, 5, 40, 100, 0},  {26, 2, 5, 130, 24, 1},
                                           {60, 2, 4, 70, 64, 0},   {90, 2, 3, 35, 530, 2},
                                           {140, 1, 2, 150, 72, 0}, {90, 3, 3, 20, 40, 1}};
    static const enum td_dtype dtypes[] = {TD_BF16, TD_F32, TD_F16};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int d = 0; d < 3; d++)
            if (d == 0 || i % 2 == 0) check_products(cases[i], dtypes[d]);
}

static void products_of_way(const char *way)
{
    close_device();
    td_status s = open_way(way, true);
    if (!s) ex = dev->experts;
    if (s)
        print_message("  (no way %s here: %s)\n", way, err.msg);
    else
        products();
    if (s != TD_OK && s != TD_ERR_INVALID) fail_msg("%s", err.msg);
    if (s == TD_OK) close_device();
    assert_int_equal(open_way(NULL, false), TD_OK);
    ex = dev->experts;
}

static void test_products_plain(void **state) { (void)state, products_of_way("plain"); }
static void test_products_own(void **state) { (void)state, products_of_way("own"); }

/* ---- sum, gate ------------------------------------------------------------------------------- */

static void test_sum(void **state)
{
    (void)state;
    static const int32_t dims[] = {1, 4, 7, 64, 131, 1000};
    for (int c = 0; c < 12; c++) {
        int32_t dim = dims[c % 6], rows = rng_int(1, 9), used = rng_int(1, 8), n = rows * used;
        int32_t *at = alloc_poisoned((size_t)n * 4), shift = rng_int(0, n - 1),
                pad = rng_int(-1, rows - 1);
        float *x = random_rows(rows, dim, dim), *w = random_rows(rows, used, used),
              *y = random_rows(n, dim, dim);
        for (int32_t i = 0; i < n; i++) at[i] = (i + shift) % n;
        struct both dx = copy_of(x, (size_t)(rows * dim) * 4), dw = copy_of(w, (size_t)n * 4), dy,
                    da;
        for (int32_t r = 0; r < rows; r++) { /* a padding row stays as it is */
            struct td_experts_sum_args one = {x + r * dim, w + r * used, y,  at + r * used,
                                              r != pad,    used,         dim};
            td_experts_sum(&one, 0, 1);
        }
        for (int32_t i = 0; i < used && pad >= 0; i++) {
            int32_t unread = at[pad * used + i];
            for (int32_t d = 0; d < dim; d++) y[unread * dim + d] = NAN;
            at[pad * used + i] = -1;
        }
        dy = copy_of(y, (size_t)(n * dim) * 4), da = copy_of(at, (size_t)n * 4);
        struct td_experts_sum_args a = {
            floats_of(&dx), floats_of(&dw), floats_of(&dy), ints_of(&da), rows, used, dim};
        ex->sum(&a);
        down(&dx);
        assert_memory_equal(dx.host, x, (size_t)(rows * dim) * 4);
        both_free(&dx), both_free(&dw), both_free(&dy), both_free(&da);
        free(at), free(x), free(w), free(y);
    }
}

static void test_gate(void **state)
{
    (void)state;
    for (int c = 0; c < 8; c++) {
        int32_t rows = rng_int(1, 9), dim = rng_int(1, 70);
        int64_t stride = dim + rng_int(0, 5);
        float *x = random_rows(rows, dim, stride), *logits = random_rows(1, rows, rows);
        logits[0] = c ? logits[0] * 9 : -200;
        struct both dx = copy_of(x, (size_t)(rows * stride) * 4),
                    dl = copy_of(logits, (size_t)rows * 4);
        td_experts_gate(x, logits, rows, dim, stride, 0, 1);
        ex->gate(floats_of(&dx), floats_of(&dl), rows, dim, stride);
        down(&dx);
        assert_memory_equal(dx.host, x, (size_t)(rows * stride) * 4);
        both_free(&dx), both_free(&dl);
        free(x), free(logits);
    }
}

/* ---- graphs ---------------------------------------------------------------------------------- */

/* One recorded step, launched for other logits each time: the results of those logits. */
static void test_one_graph_for_all_choices(void **state)
{
    (void)state;
    enum { ROWS = 3, USED = 2, N = 9, OUT = 20, IN = 40, STEPS = 4 };
    struct experts w = experts_make(N, OUT, IN, TD_F32);
    float *x = random_rows(ROWS, IN, IN), want[OUT], *pinned;
    void *p;
    assert_int_equal(dev->alloc_pinned(ROWS * N * 4, "a test", &p, &err), TD_OK);
    pinned = p;
    struct both dx = copy_of(x, ROWS * IN * 4), dl = poisoned(ROWS * N * 4),
                ids = poisoned(ROWS * USED * 4), weights = poisoned(ROWS * USED * 4),
                dy = poisoned(ROWS * USED * OUT * 4),
                scratch = poisoned(ops->gemm_scratch_bytes(ROWS * USED, IN));
    struct order order = order_make(ROWS, USED, N);
    struct td_experts_choose_args choose = {.logits = floats_of(&dl),
                                            .n_rows = ROWS,
                                            .n_experts = N,
                                            .n_used = USED,
                                            .ids = ints_of(&ids),
                                            .weights = floats_of(&weights)};
    struct td_device_experts_gemm_args a = product_of(&order, &w, &dx, IN, &dy, OUT, &scratch);
    for (int step = 0; step < STEPS; step++) {
        rng_fill(pinned, ROWS * N);
        if (dev->step_begin(7)) {
            dev->put(dl.device, pinned, ROWS * N * 4);
            ex->choose(&choose, NULL);
            ex->sort(choose.ids, &order.o);
            ex->prepare(&a);
            ex->gemm(&a);
        } else {
            assert_true(step > 0);
        }
        assert_int_equal(dev->step_end(&err), TD_OK);
        down(&ids), down(&order.at), down(&dy);
        for (int i = 0; i < ROWS * USED; i++) {
            alone(&w, ((int32_t *)ids.host)[i], x + i / USED * IN, want);
            assert_memory_equal((float *)dy.host + ((int32_t *)order.at.host)[i] * OUT, want,
                                sizeof want);
        }
    }
    both_free(&dx), both_free(&dl), both_free(&ids), both_free(&weights), both_free(&dy),
        both_free(&scratch), both_free(&w.packed);
    order_free(&order);
    dev->release_pinned(p);
    free(x), free(w.src);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choose),
        cmocka_unit_test(test_sort),
        cmocka_unit_test(test_products_plain),
        cmocka_unit_test(test_products_own),
        cmocka_unit_test(test_sum),
        cmocka_unit_test(test_gate),
        cmocka_unit_test(test_one_graph_for_all_choices),
    };
    int skipped = open_or_say();
    if (skipped) return skipped;
    ex = dev->experts;
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    close_device();
    return n_failed;
}
