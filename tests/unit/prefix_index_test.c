/* prefix_index_test.c - the index against a table of booleans, over seeded random adds,
 * evictions of leaves and resets; its bounds; chain hashes. Includes prefix_index.c to reach the
 * bucket of a hash, so that hashes can be aimed at one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "common/base/prefix_hash.h"
#include "common/base/random.h"
#include "router/core/prefix_index.c"

static uint64_t rng;

static uint32_t below(uint32_t n) { return td_random_index(&rng, n); }

static struct td_prefix_index *make(uint32_t max_workers, uint64_t max_entries)
{
    struct td_prefix_index *x = NULL;
    struct td_err err = {0};
    assert_int_equal(td_prefix_index_create(max_workers, max_entries, &x, &err), TD_OK);
    return x;
}

static uint64_t entries(const struct td_prefix_index *x)
{
    struct td_prefix_stats s;
    td_prefix_index_stats(x, &s);
    return s.n_entries;
}

static uint64_t dropped(const struct td_prefix_index *x)
{
    struct td_prefix_stats s;
    td_prefix_index_stats(x, &s);
    return s.n_dropped;
}

/* --- a tree of prefixes and who truly holds what ---------------------------------------------- */

#define N_NODES 600
#define N_WORKERS 1000
#define MAX_DEPTH 120

static struct {
    int parent, depth;
    uint64_t hash;
} tree[N_NODES];
static bool truth[N_WORKERS][N_NODES];
static uint64_t n_true;

static void grow_tree(void)
{
    for (int i = 0; i < N_NODES; i++) {
        /* long chains that fork */
        tree[i].parent = i < 3                                           ? -1
                         : below(4) && tree[i - 1].depth + 1 < MAX_DEPTH ? i - 1
                                                                         : (int)below((uint32_t)i);
        if (tree[i].parent >= 0 && tree[tree[i].parent].depth + 1 >= MAX_DEPTH) tree[i].parent = -1;
        tree[i].depth = tree[i].parent < 0 ? 0 : tree[tree[i].parent].depth + 1;
        tree[i].hash = (uint64_t)below(1u << 31) << 32 | below(4) << 8; /* few low bits */
        for (int k = 0; k < i; k++) {
            if (tree[k].hash == tree[i].hash) tree[i--].hash = 0, k = i; /* once more */
        }
    }
    memset(truth, 0, sizeof truth);
    n_true = 0;
}

static size_t path_to(int node, int *ret_nodes, uint64_t *ret_hashes)
{
    size_t n = (size_t)tree[node].depth + 1;
    for (size_t i = n; i-- > 0; node = tree[node].parent)
        ret_nodes[i] = node, ret_hashes[i] = tree[node].hash;
    return n;
}

static void add_path(struct td_prefix_index *x, uint32_t worker, int node)
{
    int nodes[MAX_DEPTH];
    uint64_t hashes[MAX_DEPTH];
    size_t n = path_to(node, nodes, hashes);
    for (size_t i = 0; i < n; i++) {
        td_prefix_index_add(x, worker, hashes[i]);
        n_true += !truth[worker][nodes[i]];
        truth[worker][nodes[i]] = true;
    }
}

static void evict_leaf(struct td_prefix_index *x, uint32_t worker, int node)
{
    for (int i = N_NODES - 1; i > node; i--) { /* down to a leaf of what it holds */
        if (truth[worker][i] && tree[i].parent == node) {
            node = i;
            i = N_NODES;
        }
    }
    td_prefix_index_evict(x, worker, tree[node].hash); /* perhaps not there: no effect */
    n_true -= truth[worker][node];
    truth[worker][node] = false;
}

static void reset(struct td_prefix_index *x, uint32_t worker)
{
    td_prefix_index_reset(x, worker);
    for (int i = 0; i < N_NODES; i++) {
        n_true -= truth[worker][i];
        truth[worker][i] = false;
    }
}

static void check_query(const struct td_prefix_index *x, uint32_t n_workers, int node)
{
    int nodes[MAX_DEPTH];
    uint64_t hashes[MAX_DEPTH + 40];
    static struct td_prefix_match got[N_WORKERS], some[N_WORKERS];
    static uint32_t expected[N_WORKERS];
    size_t n = path_to(node, nodes, hashes), n_hashes = n, n_expected = 0;
    /* blocks that nobody has */
    for (uint32_t extra = below(40); extra > 0; extra--)
        hashes[n_hashes++] = 0x5000000000000001ull + extra;
    for (uint32_t w = 0; w < n_workers; w++) {
        expected[w] = 0;
        while (expected[w] < n && truth[w][nodes[expected[w]]]) expected[w]++;
        n_expected += expected[w] > 0;
    }
    size_t n_got = td_prefix_index_match(x, hashes, n_hashes, got, N_WORKERS);
    assert_int_equal(n_got, n_expected);
    for (size_t i = 0; i < n_got; i++) {
        assert_true(got[i].worker < n_workers);
        assert_int_equal(got[i].n_blocks, expected[got[i].worker]);
        assert_true(i == 0 || got[i - 1].n_blocks >= got[i].n_blocks);
        for (size_t k = 0; k < i && n_got < 50; k++)
            assert_int_not_equal(got[k].worker, got[i].worker);
    }
    size_t max = below((uint32_t)n_got + 2),
           n_some = td_prefix_index_match(x, hashes, n_hashes, some, max);
    assert_int_equal(n_some, max < n_got ? max : n_got);
    assert_memory_equal(some, got, n_some * sizeof *some); /* the longest ones */
    uint32_t w = below(n_workers);
    assert_int_equal(td_prefix_index_depth(x, w, hashes, n_hashes), expected[w]);
}

static void fuzz(uint64_t seed, uint32_t n_workers, int n_ops)
{
    rng = seed;
    grow_tree();
    struct td_prefix_index *x = make(n_workers, (uint64_t)n_workers * N_NODES);
    for (int op = 0; op < n_ops; op++) {
        uint32_t worker = below(n_workers), kind = below(100);
        int node = (int)below(N_NODES);
        if (kind < 45)
            add_path(x, worker, node);
        else if (kind < 98)
            evict_leaf(x, worker, node);
        else
            reset(x, worker);
        assert_true(entries(x) == n_true && dropped(x) == 0);
        if (op % 4 == 0) check_query(x, n_workers, (int)below(N_NODES));
    }
    for (uint32_t w = 0; w < n_workers; w++) reset(x, w);
    assert_true(entries(x) == 0 && n_true == 0);
    check_query(x, n_workers, N_NODES - 1);
    td_prefix_index_destroy(x);
}

static void few_workers_equal_the_reference(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 8; seed++) fuzz(seed, seed % 2 ? 4 : 9, 3000);
}

static void a_thousand_workers_equal_the_reference(void **state)
{
    (void)state;
    fuzz(11, N_WORKERS, 6000);
    fuzz(12, 65, 4000); /* one worker in the second word of a bitmap */
}

static void everybody_holds_the_system_prompt(void **state)
{
    (void)state;
    struct td_prefix_index *x = make(N_WORKERS, N_WORKERS * 40);
    uint64_t hashes[40];
    static struct td_prefix_match m[N_WORKERS];
    for (uint32_t i = 0; i < 40; i++) hashes[i] = i * 0x100000001ull;
    for (uint32_t w = 0; w < N_WORKERS; w++) {
        for (uint32_t i = 0; i < 20 + (w == 700 ? 9 : w % 3); i++)
            td_prefix_index_add(x, w, hashes[i]);
    }
    assert_int_equal(td_prefix_index_match(x, hashes, 40, m, N_WORKERS), N_WORKERS);
    assert_true(m[0].worker == 700 && m[0].n_blocks == 29);
    assert_true(m[1].worker == 2 && m[1].n_blocks == 22 && m[N_WORKERS - 1].n_blocks == 20);
    assert_int_equal(td_prefix_index_match(x, hashes, 40, m, 1), 1);
    assert_true(m[0].worker == 700);
    assert_int_equal(td_prefix_index_match(x, hashes, 0, m, N_WORKERS), 0);
    assert_int_equal(td_prefix_index_match(x, hashes, 40, m, 0), 0);
    assert_int_equal(td_prefix_index_match(x, hashes + 39, 1, m, N_WORKERS), 0);
    assert_int_equal(td_prefix_index_depth(x, 700, hashes, 0), 0);
    td_prefix_index_destroy(x);
}

/* Reports were lost, so that sets do not nest: every holder of the first block is told once,
 * with a run that ends at a block it holds. */
static void holes_lose_no_worker(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        rng = seed;
        enum { WORKERS = 40, BLOCKS = 60 };
        bool held[WORKERS][BLOCKS] = {0}, told[WORKERS] = {0};
        uint64_t hashes[BLOCKS];
        struct td_prefix_match m[WORKERS];
        struct td_prefix_index *x = make(WORKERS, WORKERS * BLOCKS);
        for (int i = 0; i < BLOCKS; i++) hashes[i] = below(1u << 30);
        size_t n_roots = 0;
        for (uint32_t w = 0; w < WORKERS; w++) {
            for (int i = 0; i < BLOCKS; i++) {
                held[w][i] = below(100) < 60;
                if (held[w][i]) td_prefix_index_add(x, w, hashes[i]);
            }
            n_roots += held[w][0];
        }
        size_t n = td_prefix_index_match(x, hashes, BLOCKS, m, WORKERS);
        assert_int_equal(n, n_roots);
        for (size_t i = 0; i < n; i++) {
            assert_true(held[m[i].worker][0] && !told[m[i].worker] && m[i].n_blocks >= 1 &&
                        held[m[i].worker][m[i].n_blocks - 1]);
            assert_true(i == 0 || m[i - 1].n_blocks >= m[i].n_blocks);
            told[m[i].worker] = true;
        }
        for (uint32_t w = 0; w < WORKERS; w++) {
            uint32_t depth = td_prefix_index_depth(x, w, hashes, BLOCKS);
            assert_true(depth == 0 ? !held[w][0] : held[w][depth - 1]);
        }
        td_prefix_index_destroy(x);
    }
}

static void a_full_index_drops_and_counts(void **state)
{
    (void)state;
    struct td_prefix_index *x = make(8, 1000);
    for (uint64_t i = 0; i < 1000; i++) td_prefix_index_add(x, i % 8, i / 8);
    assert_true(entries(x) == 1000 && dropped(x) == 0);
    td_prefix_index_add(x, 3, 5); /* there already: nothing is dropped */
    assert_true(entries(x) == 1000 && dropped(x) == 0);
    for (uint64_t i = 0; i < 10; i++) td_prefix_index_add(x, 3, 5000 + i);
    assert_true(entries(x) == 1000 && dropped(x) == 10);
    uint64_t new_hash = 5000;
    assert_int_equal(td_prefix_index_depth(x, 3, &new_hash, 1), 0);
    td_prefix_index_evict(x, 3, 777777); /* not there */
    td_prefix_index_evict(x, 3, 5);
    assert_int_equal(entries(x), 999);
    td_prefix_index_add(x, 3, new_hash);
    assert_true(entries(x) == 1000 && dropped(x) == 10);
    assert_int_equal(td_prefix_index_depth(x, 3, &new_hash, 1), 1);
    td_prefix_index_reset(x, 3);
    assert_int_equal(entries(x), 875);
    assert_int_equal(td_prefix_index_depth(x, 3, &new_hash, 1), 0);
    for (int round = 0; round < 50; round++) { /* every place is used again */
        for (uint64_t i = 0; i < 125; i++)
            td_prefix_index_add(x, 3, 100 + i + (uint64_t)round * 1000);
        assert_true(entries(x) == 1000 && dropped(x) == 10);
        td_prefix_index_reset(x, 3);
    }
    td_prefix_index_destroy(x);
}

static void hashes_aimed_at_one_bucket_are_bounded(void **state)
{
    (void)state;
    struct td_prefix_index *x = make(4, 4096);
    uint64_t first = 0, n_aimed = 0;
    for (uint64_t h = 1; n_aimed < 200; h++) {
        if (bucket_of(x, h) != 7) continue;
        if (n_aimed++ == 0) first = h;
        td_prefix_index_add(x, 1, h);
    }
    assert_true(entries(x) == MAX_CHAIN && dropped(x) == 200 - MAX_CHAIN);
    assert_int_equal(td_prefix_index_depth(x, 1, &first, 1), 1);
    td_prefix_index_add(x, 2, first); /* a second holder needs no place in the bucket */
    assert_int_equal(td_prefix_index_depth(x, 2, &first, 1), 1);
    td_prefix_index_reset(x, 1);
    assert_int_equal(entries(x), 1);
    td_prefix_index_destroy(x);

    x = make(1, 1 << 16); /* values in a row, and rows of high bits alone, spread */
    for (uint64_t i = 0; i < 1 << 15; i++)
        td_prefix_index_add(x, 0, i), td_prefix_index_add(x, 0, (i + 1) << 48);
    assert_true(entries(x) == 1 << 16 && dropped(x) == 0);
    td_prefix_index_destroy(x);
}

static void create_names_what_is_wrong(void **state)
{
    (void)state;
    static const struct {
        uint32_t workers;
        uint64_t entries;
        const char *part;
    } cases[] = {
        {0, 10, "max_workers is 0"},
        {65536, 10, "max_workers is 65536"},
        {10, 0, "max_entries is 0"},
        {10, 1ull << 40, "max_entries is 1099511627776"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct td_prefix_index *x = NULL;
        struct td_err err = {0};
        assert_int_equal(td_prefix_index_create(cases[i].workers, cases[i].entries, &x, &err),
                         TD_ERR_INVALID);
        assert_null(x);
        assert_non_null(strstr(err.msg, cases[i].part));
    }
    td_prefix_index_destroy(NULL);
}

static void chain_hashes_name_whole_prefixes(void **state)
{
    (void)state;
    int32_t tokens[70];
    uint64_t h[8], other[8];
    for (int i = 0; i < 70; i++) tokens[i] = i;
    memset(h, 0, sizeof h);
    assert_int_equal(td_prefix_hashes(tokens, 70, 16, 1, h, 8), 4); /* 6 tokens make no block */
    /* what workers and routers of every version must agree on */
    assert_true(h[0] == 0xb091a3e938db53dcull && h[3] == 0xa369b922df36e3a8ull);
    assert_true(h[4] == 0);
    assert_int_equal(td_prefix_hashes(tokens, 70, 16, 1, other, 2), 2);
    assert_memory_equal(h, other, 2 * sizeof *h);
    assert_int_equal(td_prefix_hashes(tokens, 15, 16, 1, other, 8), 0);
    assert_int_equal(td_prefix_hashes(tokens, 64, 16, 2, other, 8), 4);
    for (int i = 0; i < 4; i++) assert_true(other[i] != h[i]); /* keyed */
    tokens[17]++;                                              /* block 1 */
    assert_int_equal(td_prefix_hashes(tokens, 64, 16, 1, other, 8), 4);
    assert_true(other[0] == h[0] && other[1] != h[1] && other[2] != h[2] && other[3] != h[3]);
    for (int i = 0; i < 64; i++)
        tokens[i] = i % 16; /* equal blocks at different places are
                               different prefixes */
    assert_int_equal(td_prefix_hashes(tokens, 64, 16, 1, other, 8), 4);
    assert_true(other[0] == h[0] && other[1] != other[0] && other[2] != other[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(few_workers_equal_the_reference),
        cmocka_unit_test(a_thousand_workers_equal_the_reference),
        cmocka_unit_test(everybody_holds_the_system_prompt),
        cmocka_unit_test(holes_lose_no_worker),
        cmocka_unit_test(a_full_index_drops_and_counts),
        cmocka_unit_test(hashes_aimed_at_one_bucket_are_bounded),
        cmocka_unit_test(create_names_what_is_wrong),
        cmocka_unit_test(chain_hashes_name_whole_prefixes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
