/* xfer_bench.c - `tandem bench xfer`: KV transfer between two processes of this host, held against
 * what the same bytes cost without it.
 *
 * For every case (a size or a KV shape, with so many transfers in flight over so many
 * connections) and every repeat, in turn: one run of each path of the engine and of each floor.
 * So a slow minute of the machine falls on all of them, and ratios are taken run by run. A run
 * is a number of batches: grants are made before the clock starts, content is verified after it
 * has stopped (xfer_bench_ends.c). Connections are warm, and so are the page tables of both
 * pools; the memory is not: every batch takes other places of a footprint that should be larger
 * than the last cache. */
#include "bench/bench.h"
#include "bench/xfer_bench.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/options.h"
#include "common/base/progress.h"

#define PROGRAM "tandem bench xfer"
#define RUN_BYTES (128ull << 20) /* a run moves about so much, in at most --transfers */
#define MAX_CASES 256

/* A path is one line here (and its name in the help of --path). */
const struct bench_way_info bench_ways[BENCH_N_WAYS] = {
    [BENCH_TCP] = {"tcp", TD_XFER_PATH_TCP, {BENCH_BARE, BENCH_IPERF}, NULL, 0, false},
    [BENCH_SHM] = {"shm", TD_XFER_PATH_SHM, {BENCH_MEMCPY, BENCH_N_WAYS}, NULL, 0, false},
    [BENCH_RDMA] = {"rdma", TD_XFER_PATH_RDMA, {BENCH_IB_WRITE, BENCH_N_WAYS}, NULL, 0, false},
    [BENCH_TCP_SAMPLED] =
        {"tcp-digest-64", TD_XFER_PATH_TCP, {BENCH_TCP, BENCH_N_WAYS}, NULL, 64, false},
    [BENCH_TCP_DIGESTS] =
        {"tcp-digest-1", TD_XFER_PATH_TCP, {BENCH_TCP, BENCH_N_WAYS}, NULL, 1, false},
    [BENCH_SHM_SAMPLED] =
        {"shm-digest-64", TD_XFER_PATH_SHM, {BENCH_SHM, BENCH_N_WAYS}, NULL, 64, false},
    [BENCH_SHM_DIGESTS] =
        {"shm-digest-1", TD_XFER_PATH_SHM, {BENCH_SHM, BENCH_N_WAYS}, NULL, 1, false},
    [BENCH_CUDA_IPC] =
        {"cuda-ipc", TD_XFER_PATH_CUDA_IPC, {BENCH_DEVICE_COPY, BENCH_N_WAYS}, NULL, 0, true},
    [BENCH_STAGED] =
        {"tcp-staged", TD_XFER_PATH_TCP, {BENCH_PINNED_COPY, BENCH_N_WAYS}, NULL, 0, true},
    [BENCH_SHM_STAGED] =
        {"shm-staged", TD_XFER_PATH_SHM_STAGED, {BENCH_PINNED_COPY, BENCH_N_WAYS}, NULL, 0, true},
    [BENCH_DEVICE_COPY] =
        {"device_copy",
         0,
         {BENCH_N_WAYS, BENCH_N_WAYS},
         "one batch of device-to-device copies between the same places, by the receiver",
         0,
         true},
    [BENCH_PINNED_COPY] = {"pinned_copy",
                           0,
                           {BENCH_N_WAYS, BENCH_N_WAYS},
                           "copies from page-locked memory to the same places, by the receiver",
                           0,
                           true},
    [BENCH_MEMCPY] = {"memcpy",
                      0,
                      {BENCH_N_WAYS, BENCH_N_WAYS},
                      "memcpy between the same pages, in the receiver, one thread",
                      0,
                      false},
    [BENCH_BARE] =
        {"bare_tcp",
         0,
         {BENCH_N_WAYS, BENCH_N_WAYS},
         "send and recv over loopback between the same pages, one byte back per transfer",
         0,
         false},
    [BENCH_IPERF] = {"iperf3",
                     0,
                     {BENCH_N_WAYS, BENCH_N_WAYS},
                     "iperf3 over loopback, same streams, writes of the transfer's size up to 1 "
                     "MiB, one hot buffer",
                     0,
                     false},
    [BENCH_IB_WRITE] = {"ib_write_bw",
                        0,
                        {BENCH_N_WAYS, BENCH_N_WAYS},
                        "ib_write_bw between the same devices, two queue pairs",
                        0,
                        false},
};

static const struct {
    const char *name;
    uint64_t token_bytes;
} shapes[] = {
    {"llama-8b", 131072},  /* 32 layers, 8 KV heads of 128, K and V, bf16 */
    {"llama-70b", 327680}, /* 80 layers */
};

#define OFF(f) offsetof(struct bench_options, f)
// clang-format off
static const struct td_option options[] = {
    {"path", TD_OPT_STR, "all", 0, 0, NULL, OFF(path),
     "tcp, shm, rdma, several with commas, or all (rdma: with --device; with --device cuda: "
     "cuda-ipc, shm-staged, tcp-staged); with CRC32C of one of 64 blocks or of all: "
     "tcp-digest-64, tcp-digest-1, shm-..."},
    {"sizes", TD_OPT_STR, "", 0, 0, NULL, OFF(sizes),
     "bytes of a transfer: 4k,64k,1m; default 4k to 1g as memory allows, or none when --shape "
     "is given"},
    {"shape", TD_OPT_STR, "", 0, 0, NULL, OFF(shape),
     "KV of whole prompts in shuffled blocks: llama-8b, llama-70b"},
    {"tokens", TD_OPT_STR, "512,2048,8192,32768,131072", 0, 0, NULL, OFF(tokens),
     "prompt lengths for --shape; those that do not fit the memory are named"},
    {"block_tokens", TD_OPT_I64, "16", 1, 4096, NULL, OFF(block_tokens),
     "tokens of a block, for --shape"},
    {"block_bytes", TD_OPT_SIZE, "1MiB", 8, 1 << 29, NULL, OFF(block_bytes),
     "block size for --sizes; a smaller transfer is one block"},
    {"shuffled", TD_OPT_BOOL, "false", 0, 0, NULL, OFF(shuffled),
     "--sizes: blocks in random order, as in a worn pool: no two make one request, and "
     "ib_write_bw's messages are blocks"},
    {"message", TD_OPT_SIZE, "0", 0, 1 << 30, NULL, OFF(message),
     "bytes of a write of tcp's floors; 0 = the transfer's, iperf3's up to 1 MiB"},
    {"depth", TD_OPT_STR, "1,16", 0, 0, NULL, OFF(depth),
     "transfers in flight: 1 shows latency, more show bandwidth"},
    {"streams", TD_OPT_STR, "1,4", 0, 0, NULL, OFF(streams),
     "lanes of tcp; more than 1 with at least as much depth"},
    {"repeats", TD_OPT_I64, "9", 1, BENCH_MAX_REPEATS, NULL, OFF(repeats),
     "timed runs of each way; medians and extremes are of these"},
    {"transfers", TD_OPT_I64, "512", 1, 1 << 20, NULL, OFF(transfers),
     "at most so many transfers in a run; large ones are fewer"},
    {"batch", TD_OPT_I64, "64", 1, BENCH_MAX_BATCH, NULL, OFF(batch),
     "at most so many of them without a pause: filling and emptying the pipe counts once in a "
     "batch"},
    {"footprint", TD_OPT_SIZE, "512MiB", 1 << 16, 1e15, NULL, OFF(footprint),
     "the part of each pool that transfers go round in; larger than the last cache"},
    {"memory", TD_OPT_SIZE, "0", 0, 0, NULL, OFF(memory),
     "both pools together; 0 = half of what is available"},
    {"floors", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(floors),
     "measure what the same bytes cost without the engine"},
    {"iperf3", TD_OPT_BOOL, "true", 0, 0, NULL, OFF(iperf3),
     "with the floors: iperf3, when it is installed"},
    {"device", TD_OPT_STR, "", 0, 0, NULL, OFF(device),
     "cuda: pools in the GPU's memory, both processes on it; else rdma's: the sender's device"},
    {"peer_device", TD_OPT_STR, "", 0, 0, NULL, OFF(peer_device), "rdma: the receiver's device"},
    {"gid_index", TD_OPT_I64, "-1", -1, 255, NULL, OFF(gid_index),
     "rdma: ib_write_bw's GID index; -1 = its own choice"},
    {"machine", TD_OPT_STR, "", 0, 0, NULL, OFF(machine), "a name for this machine in the reports"},
    {"json", TD_OPT_STR, "", 0, 0, NULL, OFF(json),
     "also write everything to this file, each run included"},
    {"csv", TD_OPT_STR, "", 0, 0, NULL, OFF(csv),
     "also write a row per line of the table to this file"},
    {0},
};
// clang-format on

struct bench {
    struct bench_options o;
    bool on[BENCH_N_WAYS];
    struct bench_case cases[MAX_CASES];
    int32_t n_cases;
    size_t pool_bytes, pool_limit;
    struct bench_ends ends;
    struct bench_report *report;
    uint64_t serial;
    struct td_progress progress;
    uint64_t n_runs;
};

/* --- what to do ------------------------------------------------------------------------------- */

/* The next item of a list with commas; false at its end. */
static bool next_item(const char **at, char *item, size_t n)
{
    while (**at == ',') ++*at;
    if (!**at) return false;
    size_t length = strcspn(*at, ",");
    snprintf(item, n, "%.*s", (int)length, *at);
    *at += length;
    return true;
}

static td_status parse_amount(const char *what, const char *text, uint64_t max, uint64_t *ret,
                              struct td_err *err)
{
    char upper[32];
    snprintf(upper, sizeof upper, "%s", text);
    char *unit = upper + strspn(upper, "0123456789");
    if (unit[0] && strchr("kmgt", unit[0])) unit[0] = (char)(unit[0] - 'a' + 'A'); /* 4k is 4KiB */
    td_status s = td_parse_size(upper, ret, err);
    if (s) return td_err_prefix(err, "%s: ", what);
    return *ret >= 1 && *ret <= max ? TD_OK
                                    : td_fail(err, TD_ERR_INVALID, "%s: is %s, must be 1..%llu",
                                              what, text, (unsigned long long)max);
}

static void size_name(uint64_t bytes, char *to, size_t n)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
    int k = 0;
    for (; bytes % 1024 == 0 && bytes && k < 3; k++) bytes /= 1024;
    snprintf(to, n, "%llu%s", (unsigned long long)bytes, units[k]);
}

/* Adds a case with every depth and number of streams, or says why not. */
static td_status add_case(struct bench *b, struct bench_case c, struct td_err *err)
{
    uint64_t footprint = b->o.footprint > c.bytes ? b->o.footprint : c.bytes;
    char item[32], why[160];
    footprint -= footprint % c.block_bytes;
    if (footprint > b->pool_limit && c.bytes <= b->pool_limit)
        footprint = b->pool_limit - b->pool_limit % c.block_bytes;
    if (footprint > b->pool_limit || footprint < c.bytes) {
        snprintf(why, sizeof why, "needs two pools of %.1f GiB; --memory allows %.1f GiB each",
                 (double)c.bytes / (1ull << 30), (double)b->pool_limit / (1ull << 30));
        bench_report_skip(b->report, c.name, why);
        return TD_OK;
    }
    if (c.n_blocks > TD_XFER_MAX_BLOCKS) {
        snprintf(why, sizeof why, "is %d blocks, a grant holds %d; raise --block-bytes", c.n_blocks,
                 TD_XFER_MAX_BLOCKS);
        bench_report_skip(b->report, c.name, why);
        return TD_OK;
    }
    if (footprint > b->pool_bytes) b->pool_bytes = footprint;
    c.n_pool_blocks = (int32_t)(footprint / c.block_bytes);
    for (const char *depths = b->o.depth; next_item(&depths, item, sizeof item);) {
        uint64_t depth, streams, n = RUN_BYTES / c.bytes;
        td_status s = parse_amount("--depth", item, BENCH_MAX_BATCH, &depth, err);
        if (s) return s;
        uint64_t fit = (uint64_t)(c.n_pool_blocks / c.n_blocks);
        if (depth > fit) depth = fit;
        n = n < 1 ? 1 : n > (uint64_t)b->o.transfers ? (uint64_t)b->o.transfers : n;
        if (n < depth) n = depth;
        uint64_t batch = n < (uint64_t)b->o.batch       ? n
                         : depth > (uint64_t)b->o.batch ? depth
                                                        : (uint64_t)b->o.batch;
        if (batch > fit) batch = fit;
        bool seen = false; /* a size so large that its depths are all the same */
        for (int32_t i = 0; i < b->n_cases; i++)
            seen = seen ||
                   (strcmp(b->cases[i].name, c.name) == 0 && b->cases[i].depth == (int32_t)depth);
        for (const char *list = b->o.streams; !seen && next_item(&list, item, sizeof item);) {
            s = parse_amount("--streams", item, BENCH_MAX_STREAMS, &streams, err);
            if (s) return s;
            if (streams > 1 && ((!b->on[BENCH_TCP] && !b->on[BENCH_STAGED]) || streams > depth))
                continue;
            if (b->n_cases == MAX_CASES)
                return td_fail(err, TD_ERR_LIMIT,
                               "more than %d cases: give fewer sizes, depths or streams",
                               MAX_CASES);
            c.depth = (int32_t)depth;
            c.streams = (int32_t)streams;
            c.message = b->o.message;
            c.batch = (int32_t)batch;
            c.n_batches = (int32_t)(n / batch);
            b->cases[b->n_cases++] = c;
        }
    }
    return TD_OK;
}

static td_status add_sizes(struct bench *b, struct td_err *err)
{
    const char *list = b->o.sizes[0]   ? b->o.sizes
                       : b->o.shape[0] ? ""
                                       : "4k,16k,64k,256k,1m,4m,16m,64m,256m,1g";
    char item[32];
    while (next_item(&list, item, sizeof item)) {
        struct bench_case c = {0};
        td_status s = parse_amount("--sizes", item, 1ull << 40, &c.bytes, err);
        if (s) return s;
        size_name(c.bytes, c.name, sizeof c.name);
        c.block_bytes = c.bytes < b->o.block_bytes ? c.bytes : b->o.block_bytes;
        if (c.bytes % c.block_bytes || c.block_bytes % 8)
            return td_fail(err, TD_ERR_INVALID,
                           "--sizes: %s is no multiple of --block-bytes %llu, or not of 8", item,
                           (unsigned long long)c.block_bytes);
        c.n_blocks = (int32_t)(c.bytes / c.block_bytes);
        c.shuffled = b->o.shuffled;
        size_t used = strlen(c.name);
        if (c.shuffled) snprintf(c.name + used, sizeof c.name - used, "/shuffled");
        s = add_case(b, c, err);
        if (s) return s;
    }
    return TD_OK;
}

static td_status add_shapes(struct bench *b, struct td_err *err)
{
    char shape[32], item[32];
    for (const char *names = b->o.shape; next_item(&names, shape, sizeof shape);) {
        size_t k = 0, n_shapes = sizeof shapes / sizeof *shapes;
        while (k < n_shapes && strcmp(shapes[k].name, shape) != 0) k++;
        if (k == n_shapes)
            return td_fail(err, TD_ERR_INVALID, "--shape: is '%s', must be llama-8b or llama-70b",
                           shape);
        for (const char *list = b->o.tokens; next_item(&list, item, sizeof item);) {
            uint64_t tokens;
            td_status s = parse_amount("--tokens", item, 1 << 24, &tokens, err);
            if (s) return s;
            struct bench_case c = {.tokens = (int32_t)tokens,
                                   .shuffled = true,
                                   .block_bytes =
                                       shapes[k].token_bytes * (uint64_t)b->o.block_tokens};
            c.n_blocks =
                (int32_t)((tokens + (uint64_t)b->o.block_tokens - 1) / (uint64_t)b->o.block_tokens);
            c.bytes = c.block_bytes * (uint64_t)c.n_blocks;
            snprintf(c.name, sizeof c.name, "%s/%llu", shape, (unsigned long long)tokens);
            s = add_case(b, c, err);
            if (s) return s;
        }
    }
    return TD_OK;
}

static td_status choose_ways(struct bench *b, struct td_err *err)
{
    char item[32];
    bool is_all = strcmp(b->o.path, "all") == 0, on_gpu = strcmp(b->o.device, BENCH_GPU) == 0;
    for (int w = 0; w < BENCH_N_PATHS; w++)
        b->on[w] = is_all && bench_ways[w].on_gpu == on_gpu && !bench_ways[w].digest_every &&
                   (w != BENCH_RDMA || b->o.device[0]);
    for (const char *list = is_all ? "" : b->o.path; next_item(&list, item, sizeof item);) {
        int w = 0;
        while (w < BENCH_N_PATHS && strcmp(bench_ways[w].name, item) != 0) w++;
        if (w == BENCH_N_PATHS)
            return td_fail(err, TD_ERR_INVALID,
                           "--path: is '%s', must be tcp, shm, rdma, {tcp,shm}-digest-{64,1}, "
                           "cuda-ipc, shm-staged, tcp-staged or all",
                           item);
        if (bench_ways[w].on_gpu != on_gpu)
            return td_fail(
                err, TD_ERR_INVALID, "--path: %s moves pools in %s memory: %s --device cuda", item,
                bench_ways[w].on_gpu ? "a GPU's" : "the host's", on_gpu ? "leave out" : "add");
        b->on[w] = true;
    }
    for (int w = 0; w < BENCH_N_PATHS; w++)
        for (int k = 0; k < 2; k++)
            if (b->on[w] && b->o.floors && bench_ways[w].floors[k] < BENCH_N_WAYS)
                b->on[bench_ways[w].floors[k]] = true;
    const char *why = !b->o.iperf3                     ? "turned off"
                      : bench_program_exists("iperf3") ? NULL
                                                       : "is not installed";
    if (b->on[BENCH_IPERF] && why) bench_report_skip(b->report, "iperf3", why);
    if (why) b->on[BENCH_IPERF] = false;
    why = bench_program_exists("ib_write_bw") ? NULL : "is not installed";
    if (b->on[BENCH_IB_WRITE] && why) bench_report_skip(b->report, "ib_write_bw", why);
    if (why) b->on[BENCH_IB_WRITE] = false;
    return TD_OK;
}

/* Which ways a case has. */
static bool runs(const struct bench *b, enum bench_way w, const struct bench_case *c)
{
    if (!b->on[w]) return false;
    if (w == BENCH_IPERF) return c->depth > 1; /* it always has a socket buffer full in flight */
    return c->streams == 1 || bench_ways[w].path == TD_XFER_PATH_TCP;
}

/* --- doing it --------------------------------------------------------------------------------- */

static td_status run_once(struct bench *b, enum bench_way w, const struct bench_case *c,
                          struct bench_sample *s, struct td_err *err)
{
    td_status status = TD_OK;
    if (w == BENCH_IPERF) {
        status = bench_iperf_run(c, s, err);
    } else if (w == BENCH_IB_WRITE) {
        status = bench_ib_write_run(c, &b->o, s, err);
    } else {
        for (int32_t i = 0; !status && i < c->n_batches; i++) {
            uint64_t serial = b->serial++;
            if (w == BENCH_MEMCPY)
                status = bench_memcpy_batch(&b->ends, c, serial, s, err);
            else if (w == BENCH_DEVICE_COPY || w == BENCH_PINNED_COPY)
                status = bench_gpu_batch(&b->ends, w, c, serial, s, err);
            else if (w == BENCH_BARE)
                status = bench_bare_batch(&b->ends, c, serial, s, err);
            else
                status = bench_engine_batch(&b->ends, w, c, serial, false, s, err);
        }
        if (!status && w < BENCH_N_PATHS) { /* asking for a thread's CPU time costs as much as
                                               posting: not in the timed batches */
            struct bench_sample posts = {0};
            status = bench_engine_batch(&b->ends, w, c, b->serial++, true, &posts, err);
            s->post_cpu_s =
                posts.post_cpu_s * s->n_transfers / (posts.n_transfers ? posts.n_transfers : 1);
        }
    }
    td_progress_update(&b->progress, ++b->n_runs);
    if (status)
        td_err_prefix(err, "%s, %s, depth %d, streams %d: ", bench_ways[w].name, c->name, c->depth,
                      c->streams);
    return status;
}

/* Connections, and the page tables of the whole footprint: the receiver maps the sender's pool
 * page by page on first touch. */
static td_status warm_up(struct bench *b, enum bench_way w, const struct bench_case *c,
                         struct td_err *err)
{
    struct bench_case one_pass = *c;
    one_pass.shuffled = false;
    int32_t n = bench_ways[w].path == TD_XFER_PATH_SHM
                    ? c->n_pool_blocks / (c->batch * c->n_blocks) + 1
                    : 1;
    td_status s = TD_OK;
    for (int32_t i = 0; !s && i < n; i++) {
        struct bench_sample ignored = {0};
        s = bench_engine_batch(&b->ends, w, &one_pass, b->serial++, false, &ignored, err);
    }
    return s ? td_err_prefix(err, "%s, %s, warming up: ", bench_ways[w].name, c->name), s : TD_OK;
}

static td_status run_case(struct bench *b, const struct bench_case *c, struct td_err *err)
{
    struct bench_sample *samples[BENCH_N_WAYS] = {0};
    int32_t repeats = (int32_t)b->o.repeats, n_transfers = c->batch * c->n_batches;
    td_status s = TD_OK;
    for (enum bench_way w = 0; !s && w < BENCH_N_WAYS; w++) {
        samples[w] = calloc((size_t)repeats, sizeof *samples[w]);
        for (int32_t r = 0; samples[w] && w < BENCH_N_PATHS && runs(b, w, c) && r < repeats; r++) {
            samples[w][r].latency_us = calloc((size_t)n_transfers, sizeof(double));
            if (!samples[w][r].latency_us) s = TD_ERR_NOMEM;
        }
        if (!samples[w]) s = TD_ERR_NOMEM;
        if (s) td_fail(err, s, "out of memory");
        if (!s && w < BENCH_N_PATHS && runs(b, w, c)) s = bench_link_open(&b->ends, w, c, err);
        if (!s && w < BENCH_N_PATHS && runs(b, w, c)) s = warm_up(b, w, c, err);
    }
    for (int32_t r = 0; !s && r < repeats; r++)
        for (int k = 0; !s && k < BENCH_N_WAYS; k++) {
            /* nobody always follows the same one */
            enum bench_way w = (enum bench_way)((k + r) % BENCH_N_WAYS);
            if (runs(b, w, c)) s = run_once(b, w, c, &samples[w][r], err);
        }
    if (!s) bench_report_case(b->report, c, samples, repeats);
    for (enum bench_way w = 0; w < BENCH_N_WAYS; w++) {
        if (!s && w < BENCH_N_PATHS && runs(b, w, c)) s = bench_link_close(&b->ends, w, err);
        for (int32_t r = 0; samples[w] && r < repeats; r++) free(samples[w][r].latency_us);
        free(samples[w]);
    }
    return s;
}

int td_bench_xfer(int argc, char **argv)
{
    static struct bench b;
    struct td_err err = {0};
    b.ends.control = b.ends.bare_fd = b.ends.wakeup.fd = -1;
    td_status s =
        td_options_load(options, &b.o, PROGRAM,
                        "KV transfer between two processes of this host, beside its floors.", argc,
                        argv, NULL, 0, NULL, &err);
    if (!s) s = bench_report_open(&b.o, argc, argv, &b.report, &err);
    if (s) return td_die(PROGRAM, &err);
    b.pool_limit = (size_t)(b.o.memory ? b.o.memory / 2 : td_mem_available() / 4);
    s = choose_ways(&b, &err);
    if (!s) s = add_sizes(&b, &err);
    if (!s) s = add_shapes(&b, &err);
    if (!s && !b.n_cases)
        s = td_fail(&err, TD_ERR_INVALID, "nothing to measure: no size or shape fits --memory");
    if (!s) s = bench_ends_open(&b.ends, b.pool_bytes, &b.o, &err);
    uint64_t total = 0;
    for (int32_t i = 0; i < b.n_cases; i++)
        for (enum bench_way w = 0; w < BENCH_N_WAYS; w++)
            if (runs(&b, w, &b.cases[i])) total += (uint64_t)b.o.repeats;
    td_progress_start(&b.progress, "measuring", "runs", total);
    for (int32_t i = 0; !s && i < b.n_cases; i++) s = run_case(&b, &b.cases[i], &err);
    if (!s) td_progress_end(&b.progress);
    bench_ends_close(&b.ends);
    struct td_err report_err = {0};
    td_status r = bench_report_end(b.report, b.ends.n_verified, &report_err);
    if (s) return td_die(PROGRAM, &err);
    return r ? td_die(PROGRAM, &report_err) : 0;
}
