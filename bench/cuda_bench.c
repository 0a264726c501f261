/* cuda_bench.c - tandem-bench cuda: the device's entries beside the card's floors, both measured in
 * the same run.
 *
 * Floors: copying memory on the device (bytes read plus bytes written per second), and one large
 * bf16 product by cuBLASLt. Then products at the shapes of a model for each way
 * (kernels/cuda/gemm.cu) and number of rows, the row entries, and copies to and from the host. The
 * floor of a line is the larger of its bytes over the copy rate and its operations over the
 * product's rate; percent is floor time over measured time. Bytes are those that must cross memory
 * once: a weight, rows in and out.
 *
 * An entry is recorded several times into one graph, each time with other memory where the data
 * would fit the L2 cache, and the graph is timed by the wall from its launch to the end of a wait:
 * gaps between kernels count, launches by the host do not. Each figure is the median of --repeats
 * such runs beside half the distance of the quartiles in percent of it.
 *
 * On the emulated device every line runs too (--model tiny), so that the program is right on the
 * day there is a GPU; its times mean nothing there. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "bench/cuda_bench_common.h"
#include "common/base/options.h"
#include "common/base/random.h"

struct config {
    const char *library, *model, *rows, *ways, *only, *csv, *commit;
    int64_t repeats;
    uint64_t memory;
};

// clang-format off
static const struct td_option options[] = {
    {"library", TD_OPT_STR, "", 0, 0, NULL, offsetof(struct config, library),
     "The CUDA library; empty: TANDEM_CUDA_LIBRARY, or beside this program."},
    TD_OPTION_DECIDED("device_index", "the first of the GPUs that CUDA_VISIBLE_DEVICES shows"),
    {"model", TD_OPT_ENUM, "8b", 0, 0, "8b|70b-tp8|tiny", offsetof(struct config, model),
     "Shapes: of Llama 3.1, or small ones to see that all runs."},
    {"rows", TD_OPT_STR, "1,4,8,16,64,512,8192", 0, 0, NULL, offsetof(struct config, rows),
     "Rows of a step, up to 16 numbers."},
    {"ways", TD_OPT_STR, "own,cublas", 0, 0, NULL, offsetof(struct config, ways),
     "Of products: own, cublas, cublas-one (one algorithm for any number of rows), plain "
     "(emulated)."},
    {"only", TD_OPT_STR, "", 0, 0, NULL, offsetof(struct config, only),
     "Only lines whose name contains this text (floors always)."},
    {"repeats", TD_OPT_I64, "15", 3, TD_BENCH_REPEATS_MAX, NULL, offsetof(struct config, repeats),
     "Timed runs per line."},
    {"memory", TD_OPT_SIZE, "2GiB", 65536, 1e12, NULL, offsetof(struct config, memory),
     "Weights in turn, KV cache: much more than any cache of the card."},
    {"csv", TD_OPT_STR, "", 0, 0, NULL, offsetof(struct config, csv),
     "Append the lines to this file too; a head line when it is new."},
    {"commit", TD_OPT_STR, "unknown", 0, 0, NULL, offsetof(struct config, commit), "For the CSV."},
    {NULL, TD_OPT_BOOL, NULL, 0, 0, NULL, 0, NULL},
};
// clang-format on

struct shape {
    const char *name;
    /* large: edge of the floor's product */
    int32_t hidden, n_heads, n_kv_heads, head_dim, intermediate, vocab, large;
};

static const struct shape shapes[] = {
    {"8b", 4096, 32, 8, 128, 14336, 128256, 8192},
    {"70b-tp8", 8192, 8, 1, 128, 3584, 16032, 8192},
    {"tiny", 64, 4, 2, 16, 96, 100, 64},
};

static struct config cfg;
static const struct shape *model;
static const struct td_ops *ops;
static const struct td_device *dev;
static struct td_err err;
static const char *way = "-";
static char command[1024], driver[64];
static FILE *csv;
static uint64_t next_key = 1;
static double copy_rate, product_rate; /* bytes/s, operations/s */

static _Noreturn void die(void) { exit(td_die("tandem-bench cuda", &err)); }

static void *device_alloc(size_t bytes, const char *what)
{
    void *p = NULL;
    if (dev->alloc(bytes, what, &p, &err)) die();
    return p;
}

enum { BLOCK = 16 }; /* tokens */

/* The memory of a run, from open to close. */
static struct {
    uint8_t *arena; /* cfg.memory bytes: weights in turn, the embedding table, or the KV cache */
    float *x, *y;   /* activations: max_rows x widest, each */
    void *scratch;
    int32_t *positions, *row_seq, *ids;
    float *cos_sin, *vector; /* vector: norms, biases */
    size_t activation_bytes;
    int32_t max_rows;
} mem;

static int32_t max_i32(int32_t a, int32_t b) { return a > b ? a : b; }

static int32_t widest(void)
{
    int32_t qkv = (model->n_heads + 2 * model->n_kv_heads) * model->head_dim;
    return max_i32(max_i32(2 * model->intermediate, qkv), model->hidden);
}

/* Random bf16 numbers (or f32 of the same bits twice) of both signs around 1: a card's power,
 * and so its clock, depends on them. */
static void fill(void *device, size_t bytes)
{
    enum { PIECE = 1 << 20 };
    static uint16_t piece[PIECE / 2];
    uint64_t s = 12345;
    for (size_t i = 0; i < PIECE / 2; i++) {
        td_random_step(&s);
        piece[i] = (uint16_t)(0x3f00u + (s >> 55 & 0xffu) + (s >> 63 << 15));
    }
    for (size_t at = 0; at < bytes; at += PIECE)
        if (dev->upload((uint8_t *)device + at, piece, bytes - at < PIECE ? bytes - at : PIECE,
                        &err))
            die();
}

static void open_device(const char *which)
{
    way = which;
    bool one = strcmp(which, "cublas-one") == 0;
    struct td_device_config config = {.library = cfg.library, .deterministic = one};
    if (setenv("TANDEM_CUDA_GEMM", one ? "cublas" : which, 1) ||
        td_device_open(&config, &ops, &err))
        die();
    dev = ops->device;
}

static void open_memory(int32_t max_rows)
{
    mem.max_rows = max_rows;
    mem.activation_bytes = (size_t)max_rows * (size_t)widest() * 4;
    mem.arena = device_alloc(cfg.memory, "--memory");
    mem.x = device_alloc(mem.activation_bytes, "rows (--rows)"),
    mem.y = device_alloc(mem.activation_bytes, "rows (--rows)");
    mem.scratch =
        device_alloc(ops->gemm_scratch_bytes(max_rows, widest()), "prepared rows (--rows)");
    mem.positions = device_alloc((size_t)max_rows * 4, "positions"),
    mem.row_seq = device_alloc((size_t)max_rows * 4, "rows");
    mem.ids = device_alloc((size_t)max_rows * 4, "ids");
    mem.cos_sin = device_alloc((size_t)BLOCK * (size_t)model->head_dim * 4, "cosines");
    mem.vector = device_alloc((size_t)max_i32(widest(), model->vocab) * 4, "a vector");
    fill(mem.arena, cfg.memory), fill(mem.x, mem.activation_bytes),
        fill(mem.y, mem.activation_bytes);
    fill(mem.cos_sin, (size_t)BLOCK * (size_t)model->head_dim * 4),
        fill(mem.vector, (size_t)max_i32(widest(), model->vocab) * 4);
    int32_t *ids = calloc((size_t)max_rows, sizeof *ids);
    if (!ids) exit(1);
    for (int32_t i = 0; i < max_rows; i++) ids[i] = (int32_t)((int64_t)i * 7919 % model->vocab);
    if (dev->upload(mem.ids, ids, (size_t)max_rows * 4, &err)) die();
    free(ids);
}

static void close_all(void)
{
    void *all[] = {mem.arena,   mem.x,   mem.y,       mem.scratch, mem.positions,
                   mem.row_seq, mem.ids, mem.cos_sin, mem.vector};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) dev->release(all[i]);
    td_device_close(ops);
}

/* ---- timing and lines ------------------------------------------------------------------------ */

typedef void issue_fn(void *ctx, int turn);

/* Seconds of one issue: `each` of them per graph, so that a graph takes some milliseconds. */
static struct td_bench_timing measure(issue_fn *issue, void *ctx)
{
    static double s[TD_BENCH_REPEATS_MAX];
    int each = 1, n = (int)cfg.repeats;
    for (int pass = 0; pass < 2; pass++) { /* first to see how long one takes, then for the
                                              record */
        uint64_t key = next_key++;
        for (int i = -2; i < (pass ? n : 3); i++) {
            uint64_t t0 = td_now_ns();
            if (dev->step_begin(key))
                for (int r = 0; r < each; r++) issue(ctx, r);
            if (dev->step_end(&err) || dev->wait(&err)) die();
            if (i >= 0) s[i] = (double)(td_now_ns() - t0) * 1e-9 / each;
        }
        if (pass == 0) {
            double guess = td_bench_timing_of(s, 3).median_s;
            each = dev->info.is_emulated ? 2
                   : guess > 5e-3        ? 1
                   : guess > 5e-3 / 64   ? (int)(5e-3 / guess)
                                         : 64;
        }
    }
    return td_bench_timing_of(s, n);
}

static void emit(const char *entry, const char *what, int64_t rows, struct td_bench_timing t,
                 double bytes, double operations)
{
    double by_bytes = copy_rate > 0 ? bytes / copy_rate : 0,
           by_operations = product_rate > 0 ? operations / product_rate : 0;
    const char *floor = by_bytes + by_operations == 0 ? ""
                        : by_bytes >= by_operations   ? "copy"
                                                      : "product";
    double percent = fmax(by_bytes, by_operations) / t.median_s * 100;
    printf("%-18s %-10s %-18s rows %6lld %12.2f us +-%4.1f %% %9.1f GB/s %9.2f TFLOP/s  %5.1f %% "
           "of %s\n",
           entry, way, what, (long long)rows, t.median_s * 1e6, t.spread * 100,
           bytes / t.median_s * 1e-9, operations / t.median_s * 1e-12, percent,
           *floor ? floor : "(is a floor)");
    fflush(stdout);
    if (!csv) return;
    fprintf(
        csv,
        "%s,\"%s\",\"%s\",%d,%s,%s,%s,%s,%lld,%lld,%.3f,%.2f,%.0f,%.2f,%.0f,%.3f,%s,%.2f,\"%s\"\n",
        cfg.commit, dev->info.name, driver, dev->info.is_emulated, model->name, entry, way, what,
        (long long)rows, (long long)cfg.repeats, t.median_s * 1e6, t.spread * 100, bytes,
        bytes / t.median_s * 1e-9, operations, operations / t.median_s * 1e-12, floor, percent,
        command);
}

static bool wanted(const char *entry) { return strstr(entry, cfg.only) != NULL; }

/* ---- products -------------------------------------------------------------------------------- */

struct product {
    struct td_weight w;
    struct td_gemm_args a;
    size_t weight_bytes;
    int n_copies;
};

static void issue_product(void *ctx, int turn)
{
    struct product *p = ctx;
    p->w.data = mem.arena + (size_t)(turn % p->n_copies) * p->weight_bytes;
    ops->gemm(&p->a, 0, 1);
}

static struct td_bench_timing product_time(int32_t n_out, int32_t n_in, int32_t rows,
                                           bool accumulate)
{
    struct product p = {.w = {.n_out = n_out, .n_in = n_in, .format = td_format_of_dtype(TD_BF16)},
                        .weight_bytes = ops->packed_bytes(n_out, n_in, TD_BF16)};
    if (p.weight_bytes > cfg.memory) {
        td_fail(&err, TD_ERR_LIMIT, "--memory %llu: a weight has %zu bytes",
                (unsigned long long)cfg.memory, p.weight_bytes);
        die();
    }
    p.n_copies = (int)(cfg.memory / p.weight_bytes);
    p.a = (struct td_gemm_args){.w = &p.w,
                                .x = mem.x,
                                .y = mem.y,
                                .scratch = mem.scratch,
                                .n_rows = rows,
                                .x_stride = n_in,
                                .y_stride = n_out,
                                .accumulate = accumulate};
    ops->gemm_prepare(&p.a, 0, 1);
    return measure(issue_product, &p);
}

static void products(const int32_t *rows, int n_rows)
{
    int32_t q = model->n_heads * model->head_dim, qkv = q + 2 * model->n_kv_heads * model->head_dim;
    const struct {
        const char *what;
        int32_t n_out, n_in;
        bool accumulate;
    } all[] = {{"qkv", qkv, model->hidden, false},
               {"o", model->hidden, q, true},
               {"gate_up", 2 * model->intermediate, model->hidden, false},
               {"down", model->hidden, model->intermediate, true},
               {"lm_head", model->vocab, model->hidden, false}};
    if (!wanted("gemm")) return;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (int r = 0; r < n_rows; r++) {
            int32_t m = rows[r], n = all[i].n_out, k = all[i].n_in;
            /* nobody wants the logits of every row */
            if ((size_t)m * (size_t)n * 4 > mem.activation_bytes) continue;
            struct td_bench_timing t = product_time(n, k, m, all[i].accumulate);
            double bytes = 2.0 * n * k + 2.0 * m * k + 4.0 * m * n * (all[i].accumulate ? 2 : 1);
            emit("gemm", all[i].what, m, t, bytes, 2.0 * m * n * k);
        }
}

/* ---- floors ---------------------------------------------------------------------------------- */

static void floors(void)
{
    size_t half = cfg.memory / 2;
    struct td_bench_timing t;
    if (td_bench_copy_time(dev, mem.arena + half, mem.arena, half, cfg.repeats, &t, &err)) die();
    emit("floor", "copy", 0, t, 2.0 * (double)half, 0);
    double rate = 2.0 * (double)half / t.median_s;
    int32_t n = model->large;
    t = product_time(n, n, n, false);
    double operations = 2.0 * n * n * n;
    emit("floor", "product", n, t, 3 * 2.0 * n * n, operations);
    copy_rate = rate, product_rate = operations / t.median_s;
}

/* ---- rows ------------------------------------------------------------------------------------ */

struct row_case {
    struct td_weight w;
    struct td_gemm_args next;
    struct td_rmsnorm_args norm;
    struct td_rope_args rope;
    struct td_kv_store_args store;
    int32_t rows;
};

static void issue_norm(void *ctx, int turn)
{
    struct row_case *c = ctx;
    (void)turn;
    ops->rmsnorm_prepare(&c->norm, &c->next, 0, 1);
}

static void issue_prepare(void *ctx, int turn)
{
    struct row_case *c = ctx;
    (void)turn;
    ops->gemm_prepare(&c->next, 0, 1);
}

static void issue_silu(void *ctx, int turn)
{
    struct row_case *c = ctx;
    (void)turn;
    ops->silu_mul_prepare(mem.x, mem.x + model->intermediate, 2 * model->intermediate,
                          2 * model->intermediate, &c->next, 0, 1);
}

static void issue_rope_store(void *ctx, int turn)
{
    struct row_case *c = ctx;
    (void)turn;
    ops->rope_store(NULL, NULL, &c->rope, &c->store, 0, 1);
}

static void issue_embed(void *ctx, int turn)
{
    struct row_case *c = ctx;
    (void)turn;
    ops->embed(mem.y, mem.arena, TD_BF16, mem.ids, c->rows, model->hidden, 0, 1);
}

/* ---- sequences with their blocks all over the arena ------------------------------------------ */

struct sequences {
    struct td_kv_view kv;
    int32_t *ids;                 /* device: the tables */
    const int32_t *const *tables; /* device */
};

/* n sequences of one block, each with a row at its end; false: the arena is too small. */
static bool sequences_make(int32_t n, struct sequences *ret)
{
    struct sequences s = {.kv = {.base = mem.arena,
                                 .n_kv_heads = model->n_kv_heads,
                                 .block_size = BLOCK,
                                 .head_dim = model->head_dim,
                                 .dtype = TD_BF16}};
    s.kv.block_bytes = 2 * (int64_t)model->n_kv_heads * BLOCK * model->head_dim * 2;
    int64_t n_all = (int64_t)(cfg.memory / (uint64_t)s.kv.block_bytes);
    if (n > n_all) return false;
    int32_t *ids = calloc((size_t)n, sizeof *ids),
            *positions = calloc((size_t)n, sizeof *positions),
            *seq = calloc((size_t)n, sizeof *seq);
    const int32_t **tables = calloc((size_t)n, sizeof *tables);
    if (!ids || !tables || !positions || !seq) exit(1);
    s.ids = device_alloc((size_t)n * sizeof *ids, "block ids");
    void *device_tables = device_alloc((size_t)n * sizeof *tables, "block tables");
    for (int32_t i = 0; i < n; i++)
        ids[i] = (int32_t)(n_all * i / n), positions[i] = BLOCK - 1, seq[i] = i,
        tables[i] = s.ids + i;
    if (dev->upload(s.ids, ids, (size_t)n * 4, &err) ||
        dev->upload(device_tables, tables, (size_t)n * sizeof *tables, &err) ||
        dev->upload(mem.positions, positions, (size_t)n * 4, &err) ||
        dev->upload(mem.row_seq, seq, (size_t)n * 4, &err))
        die();
    s.tables = device_tables;
    free(ids), free(tables), free(positions), free(seq);
    *ret = s;
    return true;
}

static void sequences_free(struct sequences *s)
{
    dev->release(s->ids), dev->release((void *)(uintptr_t)s->tables);
}

static void row_entries(const int32_t *rows, int n_rows)
{
    for (int i = 0; i < n_rows; i++) {
        int32_t m = rows[i], hidden = model->hidden, wide = model->intermediate;
        double heads = (double)(model->n_heads + model->n_kv_heads) * model->head_dim,
               kv_width = (double)model->n_kv_heads * model->head_dim;
        struct row_case c = {
            .w = {.n_out = 8, .n_in = hidden, .format = td_format_of_dtype(TD_BF16)}, .rows = m};
        c.next = (struct td_gemm_args){
            .w = &c.w, .x = mem.x, .scratch = mem.scratch, .n_rows = m, .x_stride = hidden};
        c.norm = (struct td_rmsnorm_args){.x = mem.x,
                                          .w = mem.vector,
                                          .n_rows = m,
                                          .dim = hidden,
                                          .x_stride = hidden,
                                          .out_stride = hidden,
                                          .eps = 1e-5f};
        if (wanted("rmsnorm_prepare"))
            emit("rmsnorm_prepare", "hidden", m, measure(issue_norm, &c), 6.0 * m * hidden, 0);
        if (wanted("gemm_prepare"))
            emit("gemm_prepare", "hidden", m, measure(issue_prepare, &c), 6.0 * m * hidden, 0);
        if (wanted("embed") && (uint64_t)model->vocab * (uint64_t)hidden * 2 <= cfg.memory)
            emit("embed", "hidden", m, measure(issue_embed, &c), 6.0 * m * hidden, 0);
        c.w.n_in = wide;
        if (wanted("silu_mul_prepare"))
            emit("silu_mul_prepare", "intermediate", m, measure(issue_silu, &c), 10.0 * m * wide,
                 0);
        struct sequences s;
        if (!wanted("rope_store") || !sequences_make(m, &s)) continue;
        int64_t stride = (int64_t)(model->n_heads + 2 * model->n_kv_heads) * model->head_dim;
        c.rope = (struct td_rope_args){.x = mem.x,
                                       .cos_sin = mem.cos_sin,
                                       .positions = mem.positions,
                                       .n_rows = m,
                                       .n_heads = model->n_heads + model->n_kv_heads};
        c.rope.head_dim = model->head_dim, c.rope.x_stride = stride;
        c.store = (struct td_kv_store_args){.kv = s.kv,
                                            .k_stride = stride,
                                            .v_stride = stride,
                                            .positions = mem.positions,
                                            .row_seq = mem.row_seq,
                                            .n_rows = m};
        c.store.k = mem.x + model->n_heads * model->head_dim,
        c.store.v = c.store.k + model->n_kv_heads * model->head_dim,
        c.store.block_tables = s.tables;
        emit("rope_store", "q,k,v", m, measure(issue_rope_store, &c),
             (8.0 * heads + 4.0 * kv_width + 4.0 * kv_width) * m, 0);
        sequences_free(&s);
    }
}

/* ---- copies with the host -------------------------------------------------------------------- */

static void host_copies(void)
{
    static double s[2][TD_BENCH_REPEATS_MAX];
    size_t bytes = cfg.memory < ((size_t)256 << 20) ? cfg.memory : (size_t)256 << 20;
    void *host = malloc(bytes);
    if (!host) exit(1);
    memset(host, 1, bytes);
    for (int i = -1; i < (int)cfg.repeats; i++)
        for (int down = 0; down < 2; down++) {
            uint64_t t0 = td_now_ns();
            if (down ? dev->download(host, mem.arena, bytes, &err)
                     : dev->upload(mem.arena, host, bytes, &err))
                die();
            if (i >= 0) s[down][i] = (double)(td_now_ns() - t0) * 1e-9;
        }
    if (wanted("upload"))
        emit("upload", "pageable", 0, td_bench_timing_of(s[0], cfg.repeats), (double)bytes, 0);
    if (wanted("download"))
        emit("download", "pageable", 0, td_bench_timing_of(s[1], cfg.repeats), (double)bytes, 0);
    free(host);
}

/* ---- the whole ------------------------------------------------------------------------------- */

static int parse_rows(int32_t *ret_rows, int max)
{
    int n = 0;
    for (const char *p = cfg.rows; *p && n < max; n++) {
        char *end;
        long v = strtol(p, &end, 10);
        if (end == p || (*end && *end != ',') || v < 1 || v > 1 << 20) {
            td_fail(&err, TD_ERR_INVALID,
                    "--rows %s: numbers from 1 to 1048576 with commas between them", cfg.rows);
            die();
        }
        ret_rows[n] = (int32_t)v;
        p = *end ? end + 1 : end;
    }
    return n;
}

static void describe(int argc, char **argv)
{
    const char *overlap = getenv("TANDEM_CUDA_OVERLAP"); /* changes what is measured */
    size_t at = overlap && *overlap ? (size_t)snprintf(command, sizeof command,
                                                       "TANDEM_CUDA_OVERLAP=%.8s ", overlap)
                                    : 0;
    for (int i = 0; i < argc && at + 2 < sizeof command; i++) {
        const char *name = i ? argv[i] : "tandem-bench cuda";
        if (i && strncmp(name, "--csv", 5) == 0) { /* where the lines go is no part of what was
                                                      measured */
            i += strchr(name, '=') ? 0 : 1;
            continue;
        }
        at += (size_t)snprintf(command + at, sizeof command - at, "%s%s", i ? " " : "", name);
        if (at >= sizeof command) at = sizeof command - 1;
    }
    snprintf(driver, sizeof driver, "none");
    FILE *f = fopen("/sys/module/nvidia/version", "r");
    if (f) {
        if (fgets(driver, sizeof driver, f)) driver[strcspn(driver, "\n")] = 0;
        fclose(f);
    }
    if (!*cfg.csv) return;
    csv = fopen(cfg.csv, "a");
    if (!csv) {
        td_fail(&err, TD_ERR_IO, "--csv %s: %s", cfg.csv, strerror(errno));
        die();
    }
    if (fseek(csv, 0, SEEK_END) == 0 && ftell(csv) == 0)
        fprintf(csv, "commit,card,driver,is_emulated,model,entry,way,shape,rows,repeats,median_us,"
                     "spread_percent,bytes,gb_s,operations,tflop_s,floor,"
                     "percent_of_floor,"
                     "command\n");
}

int td_bench_cuda(int argc, char **argv)
{
    size_t n_positional = 0;
    int32_t rows[16];
    if (td_options_load(options, &cfg, "tandem-bench cuda",
                        "measures the device's entries beside the card's floors", argc, argv, NULL,
                        0, &n_positional, &err))
        die();
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        if (strcmp(shapes[i].name, cfg.model) == 0) model = &shapes[i];
    int n_rows = parse_rows(rows, 16), max_rows = model->large;
    for (int i = 0; i < n_rows; i++) max_rows = max_i32(max_rows, rows[i]);
    describe(argc, argv);

    bool is_emulated = strstr(cfg.ways, "plain") != NULL;
    open_device(is_emulated ? "plain" : "cublas");
    open_memory(max_rows);
    printf("%s (%s), sm_%d%d, %d SMs, driver %s, library in ways %s; model %s; median of %lld\n",
           dev->info.name, dev->info.is_emulated ? "EMULATED: times mean nothing" : dev->info.pci,
           dev->info.cc_major, dev->info.cc_minor, dev->info.n_sms, driver, cfg.ways, model->name,
           (long long)cfg.repeats);
    floors();
    close_all();

    char ways[256], *rest = ways, *name;
    snprintf(ways, sizeof ways, "%s", cfg.ways);
    bool is_first = true;
    while ((name = strsep(&rest, ","))) {
        open_device(name);
        open_memory(max_rows);
        products(rows, n_rows);
        if (is_first) { /* nothing of a product in these */
            way = "-";
            row_entries(rows, n_rows);
            host_copies();
        }
        is_first = false;
        close_all();
    }
    if (csv && fclose(csv) != 0) {
        td_fail(&err, TD_ERR_IO, "--csv %s: %s", cfg.csv, strerror(errno));
        die();
    }
    return 0;
}
