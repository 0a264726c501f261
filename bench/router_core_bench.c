/* tandem-bench router-core: what one call of the router's latency model and of its prefix index
 * costs, and what a request costs the whole core.
 *
 * tandem-bench router-core [--repeats 301] [--only model|index|core] [--policy NAME]: one CSV row
 * per call and shape; medians (least..greatest) of the repeats, in batches.
 *
 * core: 500 prefill and 500 decode workers, 10,000 active requests of 1,600 tokens; one goes and
 * one comes. "place": TD_EV_REQUEST alone, which scans, predicts, decides and books; "life": that
 * and all other events of one request to its completion, of 8 tokens. CPU time of the thread, so
 * that a busy machine matters less.
 *
 * "hot": the same prompt again and again. "cold": a prompt drawn from 20,000 of 100 blocks, so
 * that hardly a line of it is in a cache. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <time.h>

#include "bench/bench.h"
#include "common/base/clock.h"
#include "common/base/options.h"
#include "common/base/prefix_hash.h"
#include "common/base/random.h"
#include "router/core/core.h"
#include "router/core/latency.h"
#include "router/core/prefix_index.h"
#include "sim/baselines.h"

#define MAX_REPEATS 1001
#define BATCH 200
#define N_WORKERS 1000
#define N_PROMPTS 20000
#define N_BLOCKS 100
#define N_HOLDERS 5

static long repeats;
static uint64_t rng = 1;
static double sink;

static void need(bool ok, const char *what)
{
    if (ok) return;
    fprintf(stderr, "tandem-bench router-core: %s failed\n", what);
    exit(1);
}

static uint32_t below(uint32_t n) { return td_random_index(&rng, n); }

static uint64_t block_hash(uint32_t prompt, uint32_t block)
{
    uint64_t x = ((uint64_t)prompt << 32 | block) * 0x9e3779b97f4a7c15ull;
    return (x ^ x >> 31) * 0xbf58476d1ce4e5b9ull;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* The prompts of a batch, made before it is timed: a caller has just made them too. */
static struct {
    uint32_t prompt;
    uint64_t hashes[N_BLOCKS];
} drawn[BATCH];

static uint32_t n_prompts = N_PROMPTS;

static void draw_batch(void)
{
    for (uint32_t i = 0; i < BATCH; i++) {
        drawn[i].prompt = below(n_prompts);
        for (uint32_t k = 0; k < N_BLOCKS; k++) drawn[i].hashes[k] = block_hash(drawn[i].prompt, k);
    }
}

/* One row: the median over `repeats` batches of the time of `call(ctx, i)`. */
static void row(const char *what, const char *shape, void (*call)(void *ctx, uint32_t i), void *ctx)
{
    static double ns[MAX_REPEATS];
    for (uint32_t i = 0; i < BATCH; i++) call(ctx, i);
    for (long r = 0; r < repeats; r++) {
        draw_batch();
        uint64_t start = td_now_ns();
        for (uint32_t i = 0; i < BATCH; i++) call(ctx, (uint32_t)r * BATCH + i);
        ns[r] = (double)(td_now_ns() - start) / BATCH;
    }
    qsort(ns, (size_t)repeats, sizeof ns[0], by_value);
    printf("%s,%s,%.1f,%.1f,%.1f,%ld\n", what, shape, ns[repeats / 2], ns[0], ns[repeats - 1],
           repeats);
    fflush(stdout);
}

/* --- latency model ---------------------------------------------------------------------------- */

static struct td_latency *model;

static void prefill_short(void *ctx, uint32_t i)
{
    (void)ctx, sink += td_latency_prefill(model, i % N_WORKERS, 500 + i % 512, 128, 2048);
}
static void prefill_long(void *ctx, uint32_t i)
{
    (void)ctx, sink += td_latency_prefill(model, i % N_WORKERS, 32000 + i % 512, 128, 2048);
}
static void decode_step(void *ctx, uint32_t i)
{
    (void)ctx, sink += td_latency_step(model, i % N_WORKERS, 1 + i % 64, i % 64 * 1000, 0, 0);
}
static void mixed_step(void *ctx, uint32_t i)
{
    (void)ctx, sink += td_latency_step(model, i % N_WORKERS, 1 + i % 64, i % 64 * 1000, 512, 1e5);
}
static void one_node_step(void *ctx, uint32_t i)
{
    (void)ctx, sink += td_latency_step(model, 7, 1 + i % 64, i % 64 * 1000, 0, 0);
}
static void transfer(void *ctx, uint32_t i)
{
    (void)ctx, sink += td_latency_transfer(model, 0, i, 1e8);
}
static void margin(void *ctx, uint32_t i)
{
    (void)ctx, sink += td_latency_margin(model, TD_LAT_TTFT, i % 4, i % 8);
}

static void feed_prefill(void *ctx, uint32_t i)
{
    uint32_t u = 16 + below(2032);
    (void)ctx;
    td_latency_observe_step(model, i % N_WORKERS,
                            &(struct td_lat_step){.prefill_tokens = u,
                                                  .attention_work = (uint64_t)u * (u / 2),
                                                  .wall_us = 4000 + 40 * u + below(4000)});
}

static void feed_decode(void *ctx, uint32_t i)
{
    uint32_t b = 1 + below(64), k = b * (100 + below(2000));
    (void)ctx;
    td_latency_observe_step(model, i % N_WORKERS,
                            &(struct td_lat_step){.decode_seqs = b,
                                                  .context_tokens = k,
                                                  .wall_us = 9000 + 30 * b + k / 40 + below(2000)});
}

static void ratio(void *ctx, uint32_t i)
{
    (void)ctx,
        td_latency_observe_ratio(model, TD_LAT_TPOT, i % 4, i % 8, 1, 0.8 + 0.001 * below(400));
}

static void bench_model(void)
{
    struct td_lat_config config = {.attainment = 0.9, .eta = 0.02, .forgetting = 0.999};
    need(td_latency_create(&config, &model, NULL) == TD_OK, "td_latency_create");
    row("observe_step", "prefill on 1000 nodes", feed_prefill, NULL);
    row("observe_step", "decode on 1000 nodes", feed_decode, NULL);
    row("observe_ratio", "4 classes 8 buckets", ratio, NULL);
    row("prefill", "1 chunk on 1000 nodes", prefill_short, NULL);
    row("prefill", "16 chunks on 1000 nodes", prefill_long, NULL);
    row("step", "decode on 1000 nodes", decode_step, NULL);
    row("step", "decode on 1 node", one_node_step, NULL);
    row("step", "mixed on 1000 nodes", mixed_step, NULL);
    row("transfer", "", transfer, NULL);
    row("margin", "", margin, NULL);
    td_latency_destroy(model);
}

/* --- prefix index ----------------------------------------------------------------------------- */

static struct td_prefix_index *prefixes;
static struct td_prefix_match matches[N_WORKERS];
static uint64_t hashes[N_BLOCKS];

static void match_hot(void *ctx, uint32_t i)
{
    (void)ctx, (void)i;
    sink += (double)td_prefix_index_match(prefixes, drawn[0].hashes, N_BLOCKS, matches, 16);
}
static void match_cold(void *ctx, uint32_t i)
{
    (void)ctx;
    sink += (double)td_prefix_index_match(prefixes, drawn[i % BATCH].hashes, N_BLOCKS, matches, 16);
}
static void match_none(void *ctx, uint32_t i)
{
    (void)ctx, (void)i;
    hashes[0] = block_hash(below(1u << 30), 1u << 20);
    sink += (double)td_prefix_index_match(prefixes, hashes, N_BLOCKS, matches, 16);
}
static void match_shared(void *ctx, uint32_t i)
{
    (void)i;
    sink += (double)td_prefix_index_match(prefixes, hashes, N_BLOCKS, matches, *(size_t *)ctx);
}
static void depth_cold(void *ctx, uint32_t i)
{
    (void)ctx;
    sink += td_prefix_index_depth(prefixes, drawn[i % BATCH].prompt * 7 % N_WORKERS,
                                  drawn[i % BATCH].hashes, N_BLOCKS);
}
/* A block of an unknown chain comes to a worker and goes. */
static void add_evict(void *ctx, uint32_t i)
{
    uint64_t h = block_hash(below(1u << 31), 1u << 21);
    (void)ctx;
    td_prefix_index_add(prefixes, i % N_WORKERS, h);
    td_prefix_index_evict(prefixes, i % N_WORKERS, h);
}
static void hash_blocks(void *ctx, uint32_t i)
{
    static uint64_t out[N_BLOCKS];
    sink += (double)td_prefix_hashes(ctx, N_BLOCKS * 16, 16, i, out, N_BLOCKS);
}

static void bench_index(void)
{
    struct td_prefix_stats stats;
    char shape[80];
    static int32_t tokens[N_BLOCKS * 16];
    need(td_prefix_index_create(N_WORKERS, 8u << 20, &prefixes, NULL) == TD_OK,
         "td_prefix_index_create");
    for (uint32_t p = 0; p < N_PROMPTS; p++) {
        for (uint32_t w = 0; w < N_HOLDERS; w++) {
            for (uint32_t i = 0; i < N_BLOCKS - 17 * w; i++)
                td_prefix_index_add(prefixes, (p * 7 + w * 31) % N_WORKERS, block_hash(p, i));
        }
    }
    draw_batch();
    need(td_prefix_index_match(prefixes, drawn[0].hashes, N_BLOCKS, matches, 16) == N_HOLDERS,
         "the first match");
    need(matches[0].n_blocks == N_BLOCKS && matches[4].n_blocks == N_BLOCKS - 17 * 4, "its depths");
    td_prefix_index_stats(prefixes, &stats);
    need(stats.n_dropped == 0, "holding every block");
    snprintf(shape, sizeof shape, "100 blocks 5 holders of 5 depths; %.1f M entries; hot",
             (double)stats.n_entries * 1e-6);
    row("match", shape, match_hot, NULL);
    row("match", "the same; cold", match_cold, NULL);
    row("match", "nobody holds it; cold", match_none, NULL);
    row("depth", "one worker of the same; cold", depth_cold, NULL);
    /* a system prompt of 20 blocks that everybody holds */
    for (uint32_t i = 0; i < N_BLOCKS; i++) hashes[i] = block_hash(N_PROMPTS + 1, i);
    for (uint32_t w = 0; w < N_WORKERS; w++) {
        for (uint32_t i = 0; i < 20 + w % 3; i++) td_prefix_index_add(prefixes, w, hashes[i]);
    }
    for (size_t max = 8; max <= N_WORKERS; max *= 125) {
        snprintf(shape, sizeof shape, "1000 holders of 3 depths; the best %zu; hot", max);
        row("match", shape, match_shared, &max);
    }
    row("add+evict", "a new block; cold", add_evict, NULL);
    for (size_t i = 0; i < sizeof tokens / sizeof tokens[0]; i++)
        tokens[i] = (int32_t)below(128000);
    row("prefix_hashes", "100 blocks of 16 tokens", hash_blocks, tokens);

    static double ns[N_WORKERS]; /* a reset empties its worker: one try each */
    uint64_t before = stats.n_entries;
    for (uint32_t w = 0; w < N_WORKERS; w++) {
        uint64_t start = td_now_ns();
        td_prefix_index_reset(prefixes, w);
        ns[w] = (double)(td_now_ns() - start);
    }
    td_prefix_index_stats(prefixes, &stats);
    need(stats.n_entries == 0, "resetting everybody");
    qsort(ns, N_WORKERS, sizeof ns[0], by_value);
    printf("reset,one of 1000 workers: %.0f entries,%.1f,%.1f,%.1f,%d\n",
           (double)before / N_WORKERS, ns[N_WORKERS / 2], ns[0], ns[N_WORKERS - 1], N_WORKERS);
    td_prefix_index_destroy(prefixes);
}

/* --- the whole core --------------------------------------------------------------------------- */

#define CORE_ACTIVE 10000
#define CORE_REQUESTS 16384
#define CORE_PROMPTS 2000
#define CORE_TOKENS (N_BLOCKS * 16)

static struct td_core *core;
static struct td_core_action actions[TD_CORE_MAX_ACTIONS_PER_EVENT];
static uint64_t core_now, core_oldest, core_next;
static bool core_two_classes; /* every second request is of the lesser one, and each walk looks
                                 at how full the fleet is */

static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static size_t core_event(struct td_core_event e)
{
    e.now_ns = core_now;
    return td_core_step(core, &e, actions);
}

/* The next request comes and is placed. */
static void core_arrive(const uint64_t *prompt_hashes, bool objectives)
{
    uint64_t id = ++core_next;
    core_now += 500000;
    size_t n =
        core_event((struct td_core_event){.kind = TD_EV_REQUEST,
                                          .request = {.request_at = (uint32_t)(id % CORE_REQUESTS),
                                                      .id = id,
                                                      .n_prompt = CORE_TOKENS,
                                                      .max_tokens = 400,
                                                      .slo_class = core_two_classes ? id & 1 : 0,
                                                      .ttft_us = objectives ? 2000000 : 0,
                                                      .tpot_us = objectives ? 100000 : 0,
                                                      .hashes = prompt_hashes,
                                                      .n_hashes = prompt_hashes ? N_BLOCKS : 0,
                                                      .hash_tokens = 16}});
    need(n == 1 && actions[0].kind == TD_ACT_START_DECODE, "placing a request");
}

static void core_decode(uint64_t id)
{
    uint32_t request_at = (uint32_t)(id % CORE_REQUESTS);
    need(core_event((struct td_core_event){
             .kind = TD_EV_TICKET, .ticket = {.of = {.request_at = request_at, .id = id}}}) == 1,
         "starting its prefill");
    core_event((struct td_core_event){
        .kind = TD_EV_FIRST_TOKEN,
        .first_token = {.of = {.request_at = request_at, .id = id}, .n_tokens = CORE_TOKENS + 1}});
    core_event((struct td_core_event){
        .kind = TD_EV_TOKEN,
        .token = {.of = {.request_at = request_at, .id = id}, .n_tokens = CORE_TOKENS + 2}});
    core_event((struct td_core_event){.kind = TD_EV_PREFILL_END,
                                      .prefill_end = {.of = {.request_at = request_at, .id = id}}});
}

static void core_finish(uint64_t id)
{
    uint32_t request_at = (uint32_t)(id % CORE_REQUESTS);
    for (uint64_t k = 3; k <= 8; k++)
        core_event((struct td_core_event){.kind = TD_EV_TOKEN,
                                          .token = {.of = {.request_at = request_at, .id = id},
                                                    .n_tokens = CORE_TOKENS + k,
                                                    .last = k == 8}});
    need(core_event((struct td_core_event){
             .kind = TD_EV_DECODE_END,
             .decode_end = {.of = {.request_at = request_at, .id = id}}}) == 1,
         "completing a request");
}

static void core_open(const char *policy, bool prefixes_too)
{
    struct td_core_config cfg = {.mode = TD_MODE_PD,
                                 .policy = policy,
                                 .policies = td_sim_policies,
                                 .max_requests = CORE_REQUESTS,
                                 .max_queued = 1000,
                                 .worker_timeout_ms = 1000000000,
                                 .queue_timeout_ms = 10000,
                                 .stall_ms = 1000000000,
                                 .max_failovers = 3,
                                 .max_prefix_entries = prefixes_too ? 2u << 20 : 0,
                                 .attainment = 0.9,
                                 .thetas = {{.prefill = {4e-3, 4e-5, 1e-10},
                                             .decode = {9e-3, 3e-5, 2.5e-8, 4e-5, 0},
                                             .link_tau = 1e-4,
                                             .link_bytes_per_s = 2e10,
                                             .known = true}},
                                 .n_thetas = 1,
                                 .seed = 1};
    if (core_two_classes) {
        cfg.classes[0] =
            (struct td_core_class){.name = "gold", .ttft_ms = 2000, .tpot_ms = 100, .weight = 4};
        cfg.classes[1] = (struct td_core_class){.name = "bulk", .ttft_ms = 20000, .weight = 1};
        cfg.n_classes = 2;
    }
    struct td_err err = {.msg = ""};
    if (td_core_create(&cfg, &core, &err)) fprintf(stderr, "%s\n", err.msg);
    need(core != NULL, "td_core_create");
    core_now = core_oldest = core_next = 0;
    for (uint32_t w = 0; w < N_WORKERS; w++)
        core_event((struct td_core_event){
            .kind = TD_EV_WORKER_JOIN,
            .join = {.worker = w,
                     .role = w < N_WORKERS / 2 ? TD_ROLE_PREFILL : TD_ROLE_DECODE,
                     .kv_tokens = 400000,
                     .max_seqs = 256,
                     .max_step_tokens = 2048,
                     .kv_bytes_per_token = 100000}});
    /* each prompt on one decode worker and on four prefill workers, to different depths */
    for (uint32_t p = 0; prefixes_too && p < CORE_PROMPTS; p++)
        for (uint32_t h = 0; h < N_HOLDERS; h++)
            for (uint32_t i = 0; i < N_BLOCKS - 17 * h; i++)
                core_event((struct td_core_event){
                    .kind = TD_EV_BLOCK_ADD,
                    .block_add = {.worker = (p * 7 + h * 31) % (N_WORKERS / 2) +
                                            (h == 2 ? N_WORKERS / 2 : 0),
                                  .hash = block_hash(p, i)}});
}

static void core_rows(const char *policy, bool prefixes_too)
{
    static double place_ns[MAX_REPEATS], life_ns[MAX_REPEATS];
    long n = repeats < 9 ? 9 : repeats > 101 ? 101 : repeats;
    core_open(policy, prefixes_too);
    bool objectives = !strcmp(policy, "goodput"); /* of the others only conductor looks at them,
                                                     and it lets links pile up until it refuses */
    for (uint32_t i = 0; i < CORE_ACTIVE; i++) {
        if (i % BATCH == 0) draw_batch();
        core_arrive(prefixes_too ? drawn[i % BATCH].hashes : NULL, objectives);
        core_decode(core_next);
    }
    /* the first ones make every request's memory a used one */
    for (long r = -CORE_REQUESTS / BATCH; r < n; r++) {
        draw_batch();
        uint64_t start = cpu_ns();
        for (uint32_t i = 0; i < BATCH; i++) core_finish(++core_oldest);
        uint64_t placing = cpu_ns();
        for (uint32_t i = 0; i < BATCH; i++)
            core_arrive(prefixes_too ? drawn[i].hashes : NULL, objectives);
        uint64_t placed = cpu_ns();
        for (uint32_t i = 0; i < BATCH; i++) core_decode(core_next - BATCH + 1 + i);
        if (r < 0) continue;
        life_ns[r] = (double)(cpu_ns() - start) / BATCH;
        place_ns[r] = (double)(placed - placing) / BATCH;
    }
    td_core_destroy(core);
    core = NULL;
    const char *shape = prefixes_too       ? "prompts of 100 blocks that 5 hold"
                        : core_two_classes ? "no prefixes; two classes"
                                           : "no prefixes";
    qsort(place_ns, (size_t)n, sizeof place_ns[0], by_value);
    qsort(life_ns, (size_t)n, sizeof life_ns[0], by_value);
    printf("place %s,%s,%.1f,%.1f,%.1f,%ld\n", policy, shape, place_ns[n / 2], place_ns[0],
           place_ns[n - 1], n);
    printf("life %s,%s,%.1f,%.1f,%.1f,%ld\n", policy, shape, life_ns[n / 2], life_ns[0],
           life_ns[n - 1], n);
    fflush(stdout);
}

static void bench_core(const char *only)
{
    n_prompts = CORE_PROMPTS;
    static const char *const policies[] = {"goodput",     "round_robin",  "least_request",
                                           "least_token", "power_of_two", "cache_aware",
                                           "lmetric",     "kv_cost",      "conductor"};
    for (int prefixes_too = 0; prefixes_too < 2; prefixes_too++)
        for (size_t i = 0; i < sizeof policies / sizeof *policies; i++)
            if (!*only || !strcmp(only, policies[i])) core_rows(policies[i], prefixes_too);
    core_two_classes = true;
    core_rows("goodput", false);
    core_two_classes = false;
    struct td_core_memory m = td_core_memory(0), with = td_core_memory(2u << 20);
    printf("memory,bytes for each request without prefixes,%zu,,,1\n", m.per_request);
    printf("memory,bytes for each request with prefixes,%zu,,,1\n", with.per_request);
    printf("memory,bytes besides: the table of workers,%zu,,,1\n", m.fixed);
}

struct config {
    int64_t repeats;
    const char *only, *policy;
};
static struct config cfg;

// clang-format off
static const struct td_option options[] = {
    {"repeats", TD_OPT_I64, "301", 1, MAX_REPEATS, NULL, offsetof(struct config, repeats),
     "batches of each row, whose median is told"},
    {"only", TD_OPT_ENUM, "all", 0, 0, "all|model|index|core", offsetof(struct config, only),
     "one of the three parts"},
    {"policy", TD_OPT_STR, "", 0, 0, NULL, offsetof(struct config, policy),
     "part core: this policy alone"},
    {0},
};
// clang-format on

int td_bench_router_core(int argc, char **argv)
{
    struct td_err err = {0};
    if (td_options_load(options, &cfg, "tandem-bench router-core",
                        "what a request costs the router's core", argc, argv, NULL, 0, NULL, &err))
        return td_die("tandem-bench router-core", &err);
    const char *only = strcmp(cfg.only, "all") ? cfg.only : "";
    repeats = (long)cfg.repeats;
    printf("what,shape,ns,ns_least,ns_greatest,repeats\n");
    if (!*only || !strcmp(only, "model")) bench_model();
    if (!*only || !strcmp(only, "index")) bench_index();
    if (!*only || !strcmp(only, "core")) bench_core(cfg.policy);
    return sink < 0; /* never: the calls are not for nothing */
}
