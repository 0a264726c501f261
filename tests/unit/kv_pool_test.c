/* kv_pool_test.c - the block pool against a naive model that stores every block's whole prefix
 * and searches by comparing all of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/entropy.h"
#include "common/base/hash.h"
#include "common/base/random.h"
#include "common/kv/kv_pool.h"

#define BLOCK_SIZE 4
#define MAX_BLOCKS 48
#define MAX_DEPTH 6
#define MAX_REQUESTS 12

static struct td_kv_pool *pool_with(int32_t n_blocks, bool prefix_cache,
                                    struct td_hash128 (*hash)(const void *, size_t, uint64_t))
{
    struct td_kv_pool_config c = {
        .layout = {.n_layers = 2,
                   .n_kv_heads = 2,
                   .head_dim = 8,
                   .block_size = BLOCK_SIZE,
                   .dtype = TD_BF16},
        .n_blocks = n_blocks,
        .prefix_cache = prefix_cache,
        .hash = hash,
    };
    struct td_err err = {0};
    struct td_kv_pool *pool = NULL;
    assert_int_equal(td_kv_layout_init(&c.layout, &err), TD_OK);
    if (td_kv_pool_create(&c, &pool, &err)) fail_msg("create: %s", err.msg);
    return pool;
}

static struct td_kv_pool *pool_of(int32_t n_blocks, bool prefix_cache)
{
    return pool_with(n_blocks, prefix_cache, NULL);
}

#define NO_SALT ((struct td_prefix_salt){0, 0})

static uint64_t rng_state;
static uint32_t rnd(uint32_t n) { return td_random_index(&rng_state, n); }

/* --- the model -------------------------------------------------------------------------------- */

enum { M_FREE, M_HELD, M_CACHED };

struct model_block {
    int state, ref;
    bool published;
    int32_t prefix[MAX_DEPTH * BLOCK_SIZE]; /* every token up to and including this block */
    struct td_prefix_salt salt;
    int depth, parent; /* parent -1 at depth 0 */
    uint64_t name, parent_name;
};

struct model {
    int n;
    struct model_block b[MAX_BLOCKS];
    int lru[MAX_BLOCKS], n_lru; /* [0] goes first */
    uint64_t n_names;
};

struct request {
    int n;
    struct td_prefix_salt salt;
    int32_t tokens[MAX_DEPTH * BLOCK_SIZE];
    int32_t ids[MAX_DEPTH];
    int n_done; /* leading blocks published or found */
};

static bool model_parent_alive(const struct model *m, int id)
{
    const struct model_block *b = &m->b[id];
    return b->parent < 0 || (m->b[b->parent].published && m->b[b->parent].name == b->parent_name);
}

static bool model_reachable(const struct model *m, int id)
{
    while (id >= 0) {
        if (!m->b[id].published || !model_parent_alive(m, id)) return false;
        id = m->b[id].parent;
    }
    return true;
}

static bool same_salt(struct td_prefix_salt a, struct td_prefix_salt b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

static int model_find(const struct model *m, struct td_prefix_salt salt, const int32_t *tokens,
                      int depth)
{
    int found = -1;
    for (int i = 0; i < m->n; i++) {
        if (!m->b[i].published || m->b[i].depth != depth || !same_salt(m->b[i].salt, salt) ||
            !model_reachable(m, i))
            continue;
        if (memcmp(m->b[i].prefix, tokens, (size_t)(depth + 1) * BLOCK_SIZE * sizeof *tokens) != 0)
            continue;
        assert_int_equal(found, -1); /* one name for one content */
        found = i;
    }
    return found;
}

static void model_lru_remove(struct model *m, int id)
{
    for (int i = 0; i < m->n_lru; i++)
        if (m->lru[i] == id) {
            memmove(&m->lru[i], &m->lru[i + 1], (size_t)(m->n_lru - i - 1) * sizeof m->lru[0]);
            m->n_lru--;
            return;
        }
    fail_msg("block %d is not in the model's LRU list", id);
}

static void model_evict(struct model *m)
{
    int id = m->lru[0];
    model_lru_remove(m, id);
    m->b[id].published = false;
    m->b[id].state = M_FREE;
}

static int model_count(const struct model *m, int state)
{
    int n = 0;
    for (int i = 0; i < m->n; i++) n += m->b[i].state == state;
    return n;
}

static void model_unref(struct model *m, int id)
{
    struct model_block *b = &m->b[id];
    if (--b->ref) return;
    if (!model_reachable(m, id)) { /* what cannot be found is not kept */
        b->state = M_FREE;
        b->published = false;
        return;
    }
    b->state = M_CACHED;
    int at = m->n_lru;
    for (int i = 0; i < m->n_lru; i++)
        if (b->parent >= 0 && m->lru[i] == b->parent) at = i;
    memmove(&m->lru[at + 1], &m->lru[at], (size_t)(m->n_lru - at) * sizeof m->lru[0]);
    m->lru[at] = id;
    m->n_lru++;
}

static void check(const struct model *m, struct td_kv_pool *pool)
{
    struct td_kv_pool_stats s;
    td_kv_pool_stats(pool, &s);
    assert_int_equal(s.n_blocks, m->n);
    assert_int_equal(s.n_held, model_count(m, M_HELD));
    assert_int_equal(s.n_cached, model_count(m, M_CACHED));
    assert_int_equal(s.n_free, model_count(m, M_FREE));
}

static void model_alloc(struct model *m, struct td_kv_pool *pool, int n, int32_t *ids)
{
    int available = model_count(m, M_FREE) + model_count(m, M_CACHED);
    td_status status = td_kv_pool_alloc(pool, n, ids);
    if (n > available) {
        assert_int_equal(status, TD_ERR_AGAIN);
        ids[0] = -1;
        return;
    }
    assert_int_equal(status, TD_OK);
    while (model_count(m, M_FREE) < n) model_evict(m);
    for (int i = 0; i < n; i++) {
        assert_in_range(ids[i], 0, m->n - 1);
        struct model_block *b = &m->b[ids[i]];
        if (b->state != M_FREE) fail_msg("block %d given out while in state %d", ids[i], b->state);
        *b = (struct model_block){.state = M_HELD, .ref = 1, .parent = -1};
    }
}

static void request_start(struct model *m, struct td_kv_pool *pool, struct request *r)
{
    int n = 1 + (int)rnd(MAX_DEPTH);
    /* two owners with a salt, and everybody else */
    r->salt = (struct td_prefix_salt[]){NO_SALT, NO_SALT, {1, 0}, {0, 1}}[rnd(4)];
    for (int i = 0; i < n * BLOCK_SIZE; i++) r->tokens[i] = i % BLOCK_SIZE ? 7 : (int32_t)rnd(2);
    int max = (int)rnd(MAX_DEPTH + 1), want = 0;
    int32_t hit[MAX_DEPTH], expect[MAX_DEPTH];
    for (; want < n && want < max; want++)
        if ((expect[want] = model_find(m, r->salt, r->tokens, want)) < 0) break;
    int got = td_kv_prefix_lookup(pool, r->salt, r->tokens, n * BLOCK_SIZE + (int)rnd(BLOCK_SIZE),
                                  max < n ? max : n, hit);
    assert_int_equal(got, want);
    for (int i = 0; i < got; i++) {
        struct model_block *b = &m->b[hit[i]];
        assert_int_equal(hit[i], expect[i]);
        if (b->state == M_CACHED) model_lru_remove(m, hit[i]);
        b->state = M_HELD;
        b->ref++;
        r->ids[i] = hit[i];
    }
    r->n_done = got;
    r->n = got;
    if (n > got) {
        int32_t fresh[MAX_DEPTH];
        model_alloc(m, pool, n - got, fresh);
        if (fresh[0] >= 0) {
            memcpy(&r->ids[got], fresh, (size_t)(n - got) * sizeof fresh[0]);
            r->n = n;
        }
    }
}

static void request_publish(struct model *m, struct td_kv_pool *pool, struct request *r)
{
    int to = r->n_done + (int)rnd((uint32_t)(r->n - r->n_done) + 1);
    /* Where the pool starts from the last block of the caller, one that can be found, the model
       does so too. */
    int parent = -1, i = 0;
    if (r->n_done > 0) {
        int last = r->ids[r->n_done - 1];
        if (m->b[last].published && m->b[last].depth == r->n_done - 1 && model_reachable(m, last))
            parent = last, i = r->n_done;
    }
    for (; i < to; i++) {
        int id = -1;
        for (int k = 0; k < m->n; k++) /* published with these tokens after this very parent */
            if (m->b[k].published && m->b[k].depth == i && m->b[k].parent == parent &&
                model_parent_alive(m, k) && same_salt(m->b[k].salt, r->salt) &&
                memcmp(m->b[k].prefix, r->tokens,
                       (size_t)(i + 1) * BLOCK_SIZE * sizeof r->tokens[0]) == 0)
                id = k;
        if (id < 0) {
            struct model_block *b = &m->b[r->ids[i]];
            if (i < r->n_done || b->published) break;
            id = r->ids[i];
            b->published = true;
            b->name = ++m->n_names;
            b->parent = parent;
            b->parent_name = parent >= 0 ? m->b[parent].name : 0;
            b->depth = i;
            b->salt = r->salt;
            memcpy(b->prefix, r->tokens, (size_t)(i + 1) * BLOCK_SIZE * sizeof r->tokens[0]);
        }
        parent = id;
    }
    td_kv_prefix_publish(pool, r->salt, r->tokens, r->ids, r->n_done, to);
    r->n_done = to;
}

static void request_drop(struct model *m, struct td_kv_pool *pool, struct request *r)
{
    bool forward = rnd(2);
    for (int i = 0; i < r->n; i++) {
        int32_t id = r->ids[forward ? i : r->n - 1 - i];
        td_kv_pool_unref(pool, id);
        model_unref(m, id);
    }
    r->n = 0;
}

static void random_operations_agree_with_the_model(void **state)
{
    (void)state;
    const char *seed_text = getenv("SEED");
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 0) : td_random_u64() >> 32;
    print_message("SEED=%llu\n", (unsigned long long)seed);
    uint64_t n_evictions = 0, n_hits = 0;
    for (int round = 0; round < 60; round++) {
        rng_state = seed + (uint64_t)round;
        struct model m = {.n = 6 + (int)rnd(MAX_BLOCKS - 6)};
        struct request r[MAX_REQUESTS] = {0};
        struct td_kv_pool *pool = pool_of(m.n, true);
        for (int step = 0; step < 400; step++) {
            struct request *q = &r[rnd(MAX_REQUESTS)];
            if (q->n == 0)
                request_start(&m, pool, q);
            else if (rnd(2))
                request_publish(&m, pool, q);
            else
                request_drop(&m, pool, q);
            if (rnd(200) == 0) {
                td_kv_prefix_clear(pool);
                while (m.n_lru) model_evict(&m);
            }
            check(&m, pool);
        }
        for (int i = 0; i < MAX_REQUESTS; i++) request_drop(&m, pool, &r[i]);
        td_kv_prefix_clear(pool);
        while (m.n_lru) model_evict(&m);
        check(&m, pool);
        /* Nothing is lost: all blocks can be had again, each once, as one run. */
        int32_t all[MAX_BLOCKS];
        model_alloc(&m, pool, m.n, all);
        for (int i = 0; i < m.n; i++) assert_int_equal(all[i], i);
        struct td_kv_pool_stats s;
        td_kv_pool_stats(pool, &s);
        n_evictions += s.n_evictions;
        n_hits += s.n_prefix_hit_tokens;
        td_kv_pool_destroy(pool);
    }
    assert_true(n_evictions > 1000 && n_hits > 1000); /* the walk did reach what it is meant to
                                                         test */
}

/* --- single properties ------------------------------------------------------------------------ */

static void alloc_prefers_adjacent_blocks(void **state)
{
    (void)state;
    struct td_kv_pool *pool = pool_of(32, false);
    int32_t ids[32], more[8];
    assert_int_equal(td_kv_pool_alloc(pool, 32, ids), TD_OK);
    for (int i = 0; i < 32; i += 2) td_kv_pool_unref(pool, i);  /* holes of one */
    for (int i = 17; i < 24; i += 2) td_kv_pool_unref(pool, i); /* 16..24 is one run of 9 */
    assert_int_equal(td_kv_pool_alloc(pool, 8, more), TD_OK);
    for (int i = 0; i < 8; i++) assert_int_equal(more[i], 16 + i);
    /* 12 are left: all or nothing */
    assert_int_equal(td_kv_pool_alloc(pool, 13, ids), TD_ERR_AGAIN);
    struct td_kv_pool_stats s;
    td_kv_pool_stats(pool, &s);
    assert_int_equal(s.n_free, 12);
    assert_int_equal(td_kv_pool_alloc(pool, 0, ids), TD_OK);
    td_kv_pool_destroy(pool);
}

static void the_oldest_leaf_is_evicted_first(void **state)
{
    (void)state;
    struct td_kv_pool *pool = pool_of(6, true);
    int32_t a[3], b[2], ids[8], tokens_a[12], tokens_b[8];
    for (int i = 0; i < 12; i++) tokens_a[i] = i;
    for (int i = 0; i < 8; i++) tokens_b[i] = 100 + i;
    assert_int_equal(td_kv_pool_alloc(pool, 3, a), TD_OK);
    td_kv_prefix_publish(pool, NO_SALT, tokens_a, a, 0, 3);
    assert_int_equal(td_kv_pool_alloc(pool, 2, b), TD_OK);
    td_kv_prefix_publish(pool, NO_SALT, tokens_b, b, 0, 2);
    /* root first, and still the leaf goes first */
    for (int i = 0; i < 3; i++) td_kv_pool_unref(pool, a[i]);
    for (int i = 0; i < 2; i++) td_kv_pool_unref(pool, b[i]);
    assert_int_equal(td_kv_pool_alloc(pool, 2, ids), TD_OK); /* the free one, then a[2] */
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, tokens_a, 12, 8, ids + 2), 2);
    assert_int_equal(ids[2], a[0]);
    assert_int_equal(ids[3], a[1]);
    assert_int_equal(td_kv_pool_alloc(pool, 3, ids + 4), TD_ERR_AGAIN); /* what is held stays */
    assert_int_equal(td_kv_pool_alloc(pool, 2, ids + 4), TD_OK);
    for (int i = 4; i < 6; i++) assert_true(ids[i] != a[0] && ids[i] != a[1]);
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, tokens_b, 8, 8, ids + 6), 0);
    td_kv_pool_destroy(pool);
}

/* The worst that somebody who can aim at hashes could do: all blocks have the same. Whose KV is
 * served is still decided by every token, by what stands before, and by the salt. */
static struct td_hash128 same_hash(const void *data, size_t n_bytes, uint64_t seed)
{
    (void)data;
    (void)n_bytes;
    (void)seed;
    return (struct td_hash128){7, 7};
}

static void equal_hashes_are_told_apart_by_their_tokens(void **state)
{
    (void)state;
    struct td_kv_pool *pool = pool_with(12, true, same_hash);
    const int32_t a_tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8},
                  b_tokens[8] = {11, 12, 13, 14, 15, 16, 17, 18},
                  mixed[8] = {1, 2, 3, 4, 15, 16, 17, 18}, late[8] = {1, 2, 3, 4, 5, 6, 7, 9};
    int32_t a[2], b[2], c[2], hit[2];
    assert_int_equal(td_kv_pool_alloc(pool, 2, a), TD_OK);
    assert_int_equal(td_kv_pool_alloc(pool, 2, b), TD_OK);
    assert_int_equal(td_kv_pool_alloc(pool, 2, c), TD_OK);
    td_kv_prefix_publish(pool, NO_SALT, a_tokens, a, 0, 2);
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, b_tokens, 8, 2, hit), 0);
    /* the last token of the second block differs */
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, late, 8, 2, hit), 1);
    assert_int_equal(hit[0], a[0]);
    assert_int_equal(td_kv_prefix_lookup(pool, (struct td_prefix_salt){1, 0}, a_tokens, 8, 2, hit),
                     0);
    /* has a name of its own, and both are found */
    td_kv_prefix_publish(pool, NO_SALT, b_tokens, b, 0, 2);
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, b_tokens, 8, 2, hit), 2);
    assert_memory_equal(hit, b, sizeof hit);
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, a_tokens, 8, 2, hit), 2);
    assert_memory_equal(hit, a, sizeof hit);
    /* b's second block is known, but not after a's first */
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, mixed, 8, 2, hit), 1);
    assert_int_equal(hit[0], a[0]);
    /* Publishing goes on from the caller's own block before: not from one that holds other
       tokens than the caller says. */
    const int32_t going_on[8] = {11, 12, 13, 14, 21, 22, 23, 24},
                  not_after_a[8] = {1, 2, 3, 4, 21, 22, 23, 24};
    td_kv_prefix_publish(pool, NO_SALT, going_on, (int32_t[2]){a[0], c[0]}, 1, 2);
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, not_after_a, 8, 2, hit), 1);
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, going_on, 8, 2, hit), 2);
    assert_int_equal(hit[1], c[0]);
    td_kv_pool_destroy(pool);
}

static void a_hit_shares_the_block_and_survives_its_first_owner(void **state)
{
    (void)state;
    struct td_kv_pool *pool = pool_of(4, true);
    int32_t tokens[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, other[8] = {1, 2, 3, 4, 5, 6, 7, 0}, ids[2],
            hit[4];
    assert_int_equal(td_kv_pool_alloc(pool, 2, ids), TD_OK);
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, tokens, 9, 4, hit), 0);
    td_kv_prefix_publish(pool, NO_SALT, tokens, ids, 0, 1);
    td_kv_prefix_publish(pool, NO_SALT, tokens, ids, 1, 2);
    /* a partial block is no block */
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, tokens, 7, 4, hit), 1);
    td_kv_pool_unref(pool, hit[0]);
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, other, 8, 4, hit), 1);
    td_kv_pool_unref(pool, hit[0]);
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, tokens, 9, 4, hit), 2);
    memset(td_kv_pool_block(pool, ids[1]), 0x5a, td_kv_pool_layout(pool)->block_bytes);
    td_kv_pool_unref(pool, ids[0]);
    td_kv_pool_unref(pool, ids[1]);
    struct td_kv_pool_stats s;
    td_kv_pool_stats(pool, &s);
    assert_int_equal(s.n_held, 2);
    assert_int_equal(td_kv_pool_block(pool, hit[1])[17], 0x5a);
    td_kv_pool_unref(pool, hit[0]);
    td_kv_pool_unref(pool, hit[1]);
    td_kv_pool_stats(pool, &s);
    assert_int_equal(s.n_cached, 2);
    assert_int_equal(s.n_prefix_hit_tokens, 4 + 4 + 8);
    td_kv_pool_destroy(pool);
}

/* The salt is compared, not only hashed into the chain: a chain of the same tokens under another
 * salt is not found, at no depth and by no name. */
static void salts_never_meet(void **state)
{
    (void)state;
    struct td_kv_pool *pool = pool_of(8, true);
    int32_t tokens[9] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, a[2], b[2], hit[4];
    struct td_prefix_salt salt_a = {1, 2}, salt_b = {2, 1};
    assert_int_equal(td_kv_pool_alloc(pool, 2, a), TD_OK);
    td_kv_report_begin(pool, 0, 77);
    td_kv_prefix_publish(pool, salt_a, tokens, a, 0, 2);
    assert_int_equal(td_kv_prefix_lookup(pool, salt_b, tokens, 9, 4, hit), 0);
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, tokens, 9, 4, hit), 0);
    assert_int_equal(td_kv_pool_alloc(pool, 2, b), TD_OK);
    td_kv_prefix_publish(pool, salt_b, tokens, b, 0, 1);
    td_kv_prefix_publish(pool, salt_b, tokens, b, 1, 2); /* goes on from the owner's own block */
    assert_int_equal(td_kv_prefix_lookup(pool, salt_b, tokens, 9, 4, hit), 2);
    assert_true(hit[0] == b[0] && hit[1] == b[1]);
    assert_int_equal(td_kv_prefix_lookup(pool, salt_a, tokens, 9, 4, hit), 2);
    assert_true(hit[0] == a[0] && hit[1] == a[1]);
    /* The router's names: those of each owner's seed, and the seed itself without a salt. */
    uint64_t added[8], evicted[8], want_a[2], want_b[2];
    size_t n_added, n_evicted;
    assert_true(td_prefix_seed(77, NO_SALT) == 77 &&
                td_prefix_seed(77, salt_a) != td_prefix_seed(77, salt_b));
    td_prefix_hashes(tokens, 8, BLOCK_SIZE, td_prefix_seed(77, salt_a), want_a, 2);
    td_prefix_hashes(tokens, 8, BLOCK_SIZE, td_prefix_seed(77, salt_b), want_b, 2);
    td_kv_report_take(pool, 0, 8, added, &n_added, evicted, &n_evicted);
    assert_int_equal(n_added, 4);
    for (int i = 0; i < 2; i++)
        assert_true(added[i] == want_a[i] && added[2 + i] == want_b[i] && want_a[i] != want_b[i]);
    td_kv_report_begin(pool, 0, 78); /* another router: named anew, still each by its salt */
    td_prefix_hashes(tokens, 8, BLOCK_SIZE, td_prefix_seed(78, salt_a), want_a, 2);
    td_kv_report_take(pool, 0, 8, added, &n_added, evicted, &n_evicted);
    assert_int_equal(n_added, 4);
    int found = 0;
    for (int i = 0; i < 4; i++) found += added[i] == want_a[0] || added[i] == want_a[1];
    assert_int_equal(found, 2);
    td_kv_pool_destroy(pool);
}

static void without_prefix_cache_nothing_is_kept(void **state)
{
    (void)state;
    struct td_kv_pool *pool = pool_of(2, false);
    int32_t tokens[4] = {1, 2, 3, 4}, id, hit;
    assert_int_equal(td_kv_pool_alloc(pool, 1, &id), TD_OK);
    td_kv_prefix_publish(pool, NO_SALT, tokens, &id, 0, 1);
    assert_int_equal(td_kv_prefix_lookup(pool, NO_SALT, tokens, 4, 1, &hit), 0);
    td_kv_pool_unref(pool, id);
    struct td_kv_pool_stats s;
    td_kv_pool_stats(pool, &s);
    assert_int_equal(s.n_free, 2);
    td_kv_pool_destroy(pool);
}

static void absurd_configs_are_refused(void **state)
{
    (void)state;
    struct td_kv_pool_config c = {.n_blocks = 0};
    struct td_kv_pool *pool = NULL;
    struct td_err err = {0};
    assert_int_equal(td_kv_pool_create(&c, &pool, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "n_blocks is 0"));
    c.n_blocks = 4;
    assert_int_equal(td_kv_pool_create(&c, &pool, &err), TD_ERR_INVALID);
    assert_null(pool);
    td_kv_pool_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_operations_agree_with_the_model),
        cmocka_unit_test(alloc_prefers_adjacent_blocks),
        cmocka_unit_test(the_oldest_leaf_is_evicted_first),
        cmocka_unit_test(equal_hashes_are_told_apart_by_their_tokens),
        cmocka_unit_test(a_hit_shares_the_block_and_survives_its_first_owner),
        cmocka_unit_test(salts_never_meet),
        cmocka_unit_test(without_prefix_cache_nothing_is_kept),
        cmocka_unit_test(absurd_configs_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
