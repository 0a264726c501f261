/* The reports of the KV pool against a model of the router's set: after any sequence of
 * publishing, eviction, lookups, new routers and partial reports, once all is told the router's
 * set is exactly the chains that a lookup in the pool finds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/random.h"
#include "common/kv/kv_pool.h"
#include "common/base/prefix_hash.h"

/* All prompts are walks in a tree of this shape: every chain there can be is known by its
 * number. */
enum { BLOCK = 4, FANOUT = 3, DEPTH = 4, CHAINS = 3 + 9 + 27 + 81, BLOCKS = 24, REQUESTS = 8 };

static struct td_kv_pool *pool_of(bool prefix_cache)
{
    struct td_kv_pool_config c = {.layout = {.n_layers = 1,
                                             .n_kv_heads = 1,
                                             .head_dim = 8,
                                             .block_size = BLOCK,
                                             .dtype = TD_BF16},
                                  .n_blocks = BLOCKS,
                                  .prefix_cache = prefix_cache};
    struct td_err err = {0};
    struct td_kv_pool *pool = NULL;
    assert_int_equal(td_kv_layout_init(&c.layout, &err), TD_OK);
    if (td_kv_pool_create(&c, &pool, &err)) fail_msg("create: %s", err.msg);
    return pool;
}

#define NO_SALT ((struct td_prefix_salt){0, 0})

static uint64_t rng_state;
static uint32_t rnd(uint32_t n) { return td_random_index(&rng_state, n); }

/* Chain k: its depth, and its tokens; chains are numbered level by level. */
static int32_t chain_tokens(uint32_t k, int32_t tokens[DEPTH * BLOCK])
{
    uint32_t depth = 1, level = FANOUT;
    for (; k >= level; level *= FANOUT, depth++) k -= level;
    for (uint32_t d = depth; d > 0; d--, k /= FANOUT)
        /* the same blocks at every depth: only the chain tells them apart */
        for (uint32_t t = 0; t < BLOCK; t++)
            tokens[(d - 1) * BLOCK + t] = (int32_t)(100 * (k % FANOUT) + t);
    return (int32_t)depth;
}

/* ---- the router's side ----------------------------------------------------------------------- */

static uint64_t names[CHAINS]; /* under the seed in force */
static bool told[CHAINS];
static uint64_t seed;

static void new_router(struct td_kv_pool *pool)
{
    int32_t tokens[DEPTH * BLOCK];
    uint64_t hashes[DEPTH];
    seed = rng_state ^ 0x5851f42d4c957f2dull;
    for (uint32_t k = 0; k < CHAINS; k++) {
        size_t depth = (size_t)chain_tokens(k, tokens);
        assert_int_equal(td_prefix_hashes(tokens, depth * BLOCK, BLOCK, seed, hashes, DEPTH),
                         depth);
        names[k] = hashes[depth - 1];
        told[k] = false;
    }
    td_kv_report_begin(pool, 0, seed);
}

static uint32_t chain_of(uint64_t hash)
{
    for (uint32_t k = 0; k < CHAINS; k++)
        if (names[k] == hash) return k;
    fail_msg("%016llx is no chain's name", (unsigned long long)hash);
    return 0;
}

/* One report; how many entries it had. */
static size_t take(struct td_kv_pool *pool, size_t max)
{
    uint64_t added[2 * BLOCKS + 1], evicted[2 * BLOCKS + 1];
    size_t n_added = 99, n_evicted = 99;
    assert_true(max < 2 * BLOCKS);
    added[max] = evicted[max] = 0xfeed;
    td_kv_report_take(pool, 0, max, added, &n_added, evicted, &n_evicted);
    assert_true(n_added <= max && n_evicted <= max);
    assert_true(added[max] == 0xfeed && evicted[max] == 0xfeed);
    for (size_t i = 0; i < n_evicted; i++) told[chain_of(evicted[i])] = false;
    for (size_t i = 0; i < n_added; i++) told[chain_of(added[i])] = true;
    return n_added + n_evicted;
}

static bool findable(struct td_kv_pool *pool, uint32_t k)
{
    int32_t tokens[DEPTH * BLOCK], ids[DEPTH], depth = chain_tokens(k, tokens);
    int32_t n = td_kv_prefix_lookup(pool, NO_SALT, tokens, depth * BLOCK, depth, ids);
    for (int32_t i = 0; i < n; i++) td_kv_pool_unref(pool, ids[i]);
    return n == depth;
}

static void expect_truth(struct td_kv_pool *pool, const char *when)
{
    for (uint32_t k = 0; k < CHAINS; k++) {
        bool there = findable(pool, k);
        if (there != told[k])
            fail_msg("%s: chain %u is %sin the pool, the router has it %s", when, k,
                     there ? "" : "not ", told[k] ? "all the same" : "not");
    }
}

static void drain(struct td_kv_pool *pool, size_t max)
{
    size_t n_reports = 0;
    /* a report is bounded by the pool */
    while (take(pool, max) > 0) assert_true(++n_reports <= 4 * BLOCKS);
}

/* ---- requests -------------------------------------------------------------------------------- */

struct held {
    int32_t ids[DEPTH], n;
};

/* A request as the engine makes one: looks its prompt up, takes blocks for the rest, publishes
 * what it computed. False: the pool is full. */
static bool open_request(struct td_kv_pool *pool, struct held *h, uint32_t k)
{
    int32_t tokens[DEPTH * BLOCK], depth = chain_tokens(k, tokens);
    int32_t hit = td_kv_prefix_lookup(pool, NO_SALT, tokens, depth * BLOCK, depth, h->ids);
    h->n = hit;
    if (td_kv_pool_alloc(pool, depth - hit, h->ids + hit) == TD_OK)
        h->n = depth;
    else
        return false;
    td_kv_prefix_publish(pool, NO_SALT, tokens, h->ids, hit, depth);
    return true;
}

static void close_request(struct td_kv_pool *pool, struct held *h)
{
    while (h->n > 0) { /* in any order: an engine may let go of the first blocks first */
        int32_t i = (int32_t)rnd((uint32_t)h->n);
        td_kv_pool_unref(pool, h->ids[i]);
        h->ids[i] = h->ids[--h->n];
    }
}

static void play(uint64_t s)
{
    rng_state = s;
    print_message("seed %llu\n", (unsigned long long)s);
    struct td_kv_pool *pool = pool_of(true);
    struct held requests[REQUESTS] = {{{0}, 0}};
    bool reporting = false;
    for (int i = 0; i < 20000; i++) {
        struct held *h = &requests[rnd(REQUESTS)];
        switch (rnd(12)) {
        case 0:
            if (rnd(100) == 0) td_kv_prefix_clear(pool);
            break;
        case 1:
            if (rnd(reporting ? 200 : 20)) break;
            new_router(pool);
            reporting = true;
            break;
        case 2:
        case 3:
            if (reporting) take(pool, 1 + rnd(6)); /* in parts */
            break;
        case 4:
            if (!reporting || rnd(3)) break;
            drain(pool, 1 + rnd(BLOCKS));
            expect_truth(pool, "all was told");
            break;
        case 5:
        case 6:
        case 7:
            close_request(pool, h);
            break;
        default:
            if (h->n == 0 && !open_request(pool, h, rnd(CHAINS))) close_request(pool, h);
        }
    }
    for (int r = 0; r < REQUESTS; r++) close_request(pool, &requests[r]);
    td_kv_prefix_clear(pool);
    if (!reporting) new_router(pool);
    drain(pool, BLOCKS);
    for (uint32_t k = 0; k < CHAINS; k++) assert_false(told[k]);
    td_kv_pool_destroy(pool);
}

static void test_random_play(void **state)
{
    (void)state;
    const char *env = getenv("SEED");
    uint64_t first = env ? strtoull(env, NULL, 10) : 1;
    for (uint64_t i = 0; i < 6; i++) play(first + i);
}

static void test_plain(void **state)
{
    (void)state;
    struct td_kv_pool *pool = pool_of(true);
    struct held h;
    uint64_t added[8], evicted[8];
    size_t n_added = 9, n_evicted = 9;
    rng_state = 1;
    assert_true(open_request(pool, &h, CHAINS - 1)); /* four blocks, before anybody asks */
    td_kv_report_take(pool, 0, 8, added, &n_added, evicted, &n_evicted);
    assert_int_equal(n_added + n_evicted, 0);
    new_router(pool);
    /* the beginning of a chain before its end */
    td_kv_report_take(pool, 0, 3, added, &n_added, evicted, &n_evicted);
    assert_int_equal(n_added, 3);
    assert_int_equal(n_evicted, 0);
    assert_int_equal(chain_of(added[0]), 2);
    assert_int_equal(chain_of(added[1]), 3 + 8);
    td_kv_report_take(pool, 0, 3, added, &n_added, evicted, &n_evicted);
    assert_int_equal(n_added, 1);
    assert_int_equal(chain_of(added[0]), CHAINS - 1);
    td_kv_report_take(pool, 0, 3, added, &n_added, evicted, &n_evicted);
    assert_int_equal(n_added + n_evicted, 0);
    close_request(pool, &h); /* cached: still there, nothing to say */
    td_kv_report_take(pool, 0, 8, added, &n_added, evicted, &n_evicted);
    assert_int_equal(n_added + n_evicted, 0);
    new_router(pool); /* another seed: all of it again, under other names */
    drain(pool, 8);
    expect_truth(pool, "a new router");
    /* what came and went between two reports is not told */
    assert_true(open_request(pool, &h, 0));
    close_request(pool, &h);
    td_kv_prefix_clear(pool);
    td_kv_report_take(pool, 0, 8, added, &n_added, evicted, &n_evicted);
    assert_int_equal(n_added, 0);
    assert_int_equal(n_evicted, 4);
    td_kv_pool_destroy(pool);
}

/* Each router is told under its own seed and in its own time; one that has left is told nothing. */
static void test_two_routers(void **state)
{
    (void)state;
    struct td_kv_pool *pool = pool_of(true);
    struct held h;
    uint64_t added[8], evicted[8], other[8];
    size_t n_added = 9, n_evicted = 9;
    rng_state = 1;
    new_router(pool);
    assert_true(open_request(pool, &h, CHAINS - 1));
    drain(pool, 8);
    expect_truth(pool, "the first router");
    assert_int_equal(td_kv_report_begin(pool, 3, seed + 1), TD_OK);
    td_kv_report_take(pool, 3, 8, other, &n_added, evicted, &n_evicted);
    assert_int_equal(n_added, DEPTH);
    for (uint32_t k = 0; k < CHAINS; k++)
        for (size_t i = 0; i < n_added; i++) assert_true(other[i] != names[k]);
    assert_int_equal(take(pool, 8), 0); /* the first has been told */
    close_request(pool, &h);
    td_kv_prefix_clear(pool);
    td_kv_report_take(pool, 3, 8, added, &n_added, evicted, &n_evicted);
    assert_int_equal(n_added, 0);
    assert_int_equal(n_evicted, DEPTH);
    for (size_t i = 0; i < DEPTH; i++) {
        bool known = false;
        for (size_t k = 0; k < DEPTH; k++) known |= evicted[i] == other[k];
        assert_true(known);
    }
    drain(pool, 8);
    expect_truth(pool, "the first router, after the second");
    td_kv_report_end(pool, 3);
    assert_true(open_request(pool, &h, CHAINS - 1));
    td_kv_report_take(pool, 3, 8, added, &n_added, evicted, &n_evicted);
    assert_int_equal(n_added + n_evicted, 0);
    close_request(pool, &h);
    drain(pool, 8);
    expect_truth(pool, "the first router, alone");
    td_kv_pool_destroy(pool);
}

/* A worker without a prefix cache has nothing to tell, and says so. */
static void test_without_a_cache(void **state)
{
    (void)state;
    struct td_kv_pool *pool = pool_of(false);
    struct held h = {{0}, 0};
    rng_state = 1;
    new_router(pool);
    assert_true(open_request(pool, &h, 50));
    assert_int_equal(take(pool, 8), 0);
    close_request(pool, &h);
    assert_int_equal(take(pool, 8), 0);
    td_kv_pool_destroy(pool);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_two_routers),
        cmocka_unit_test(test_without_a_cache),
        cmocka_unit_test(test_random_play),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
