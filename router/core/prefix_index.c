/* prefix_index.c - two chained hash tables over pools made at create.
 *
 *   nodes   hash -> the set of workers that hold it: up to INLINE_WORKERS of them in the node, more
 *           in a bitmap
 *   pairs   (node, worker) -> its place in the list of what the worker holds, so that a reset costs
 *           what it frees
 *
 * A lookup touches nodes alone. Workers evict leaves before roots, so along a chain the sets only
 * shrink: where two depths have equally many workers, they have the same, and nothing between them
 * needs a look. match() gallops from the root until nobody is left, then bisects only the stretches
 * on which the count changes, deepest first: about log2(n_hashes) probes for each different depth,
 * however many workers share it.
 *
 * Hashes are outside bytes. They are mixed by a fixed bijection (a secret would make two runs
 * differ), so a worker that lies can still aim at one bucket: a chain of nodes is at most MAX_CHAIN
 * long, what does not fit is dropped and counted. Chains of pairs need no bound: for one worker the
 * bucket is a bijection of the node's number, so a bucket holds at most one pair of each worker.
 *
 * Memory: 52 bytes for each of max_entries, 8 more at worst for sizes that are no power of two, and
 * bitmaps where they are used; pages of nodes, pairs and bitmaps are not touched before they are
 * needed.
 *
 * Invariants: (1) a node exists iff its set is not empty; (2) every member of a set has its pair
 * and the other way round; (3) a set has a bitmap if it has more than INLINE_WORKERS members,
 * never with fewer than MIN_BITMAP: each bitmap stands on that many pairs, so max_entries /
 * MIN_BITMAP + 1 are enough. */
#include "router/core/prefix_index.h"

#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX
#define MAX_CHAIN 64
#define INLINE_WORKERS 5
#define MIN_BITMAP 4
#define MAX_WORKERS 65535
#define MAX_ENTRIES (1u << 30)

struct node {
    uint64_t hash;
    uint32_t next; /* in its bucket, or in the free list */
    uint16_t n_workers;
    uint16_t workers[INLINE_WORKERS]; /* ascending; with a bitmap: its number, low half
                                         first, then IS_BITMAP in the last */
};
_Static_assert(sizeof(struct node) == 24, "nodes are what a lookup reads");
#define IS_BITMAP UINT16_MAX /* no worker's number: they are below MAX_WORKERS */

struct pair {
    uint32_t node, next;   /* next in its bucket, or in the free list */
    uint32_t older, newer; /* in the worker's list */
    uint16_t worker;
};

struct td_prefix_index {
    struct node *nodes;
    struct pair *pairs;
    uint32_t *node_heads, *pair_heads; /* mask + 1 of each */
    uint32_t *newest;                  /* of each worker: the pair its list starts with */
    uint64_t *bitmaps;
    uint64_t *left; /* match: the workers still without an answer */
    uint32_t *free_bitmaps;
    uint32_t max_workers, n_words, mask;
    uint32_t free_node, free_pair; /* lists of what was used before; then fresh ones in
                                      order, so that no page is touched before its time */
    uint32_t fresh_nodes, fresh_pairs, n_pairs_max;
    uint32_t n_free_bitmaps, fresh_bitmaps, n_bitmaps_max;
    uint64_t n_entries, n_dropped;
};

static uint32_t bucket_of(const struct td_prefix_index *x, uint64_t hash)
{
    hash = (hash ^ hash >> 32) * 0x9e3779b97f4a7c15ull; /* 2^64 / golden ratio */
    hash = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9ull;
    return (uint32_t)(hash >> 32) & x->mask;
}

static uint32_t pair_bucket(const struct td_prefix_index *x, uint32_t node, uint32_t worker)
{
    return (node + worker * 0x9e3779b1u) & x->mask;
}

/* --- sets of workers -------------------------------------------------------------------------- */

static bool has_bitmap(const struct node *n) { return n->workers[INLINE_WORKERS - 1] == IS_BITMAP; }
static uint32_t bitmap_number(const struct node *n)
{
    return n->workers[0] | (uint32_t)n->workers[1] << 16;
}
static uint64_t *bitmap_of(const struct td_prefix_index *x, const struct node *n)
{
    return x->bitmaps + (size_t)bitmap_number(n) * x->n_words;
}

static bool set_has(const struct td_prefix_index *x, const struct node *n, uint32_t worker)
{
    if (has_bitmap(n)) return bitmap_of(x, n)[worker / 64] >> worker % 64 & 1;
    for (uint32_t i = 0; i < n->n_workers; i++) {
        if (n->workers[i] == worker) return true;
    }
    return false;
}

static void set_add(struct td_prefix_index *x, struct node *n, uint32_t worker)
{
    if (!has_bitmap(n) && n->n_workers < INLINE_WORKERS) {
        uint32_t at = n->n_workers++;
        for (; at > 0 && n->workers[at - 1] > worker; at--) n->workers[at] = n->workers[at - 1];
        n->workers[at] = (uint16_t)worker;
        return;
    }
    if (!has_bitmap(n)) {
        uint32_t number =
            x->n_free_bitmaps > 0 ? x->free_bitmaps[--x->n_free_bitmaps] : x->fresh_bitmaps++;
        TD_ASSERT(number < x->n_bitmaps_max); /* (3) */
        uint64_t *bits = x->bitmaps + (size_t)number * x->n_words;
        memset(bits, 0, x->n_words * sizeof *bits);
        for (uint32_t i = 0; i < INLINE_WORKERS; i++)
            bits[n->workers[i] / 64] |= 1ull << n->workers[i] % 64;
        n->workers[0] = (uint16_t)number, n->workers[1] = (uint16_t)(number >> 16);
        n->workers[INLINE_WORKERS - 1] = IS_BITMAP;
    }
    bitmap_of(x, n)[worker / 64] |= 1ull << worker % 64;
    n->n_workers++;
}

static void set_remove(struct td_prefix_index *x, struct node *n, uint32_t worker)
{
    if (!has_bitmap(n)) {
        uint32_t at = 0;
        while (n->workers[at] != worker) at++;
        n->n_workers--;
        for (; at < n->n_workers; at++) n->workers[at] = n->workers[at + 1];
        n->workers[n->n_workers] = 0;
        return;
    }
    uint32_t number = bitmap_number(n);
    uint64_t *bits = bitmap_of(x, n);
    bits[worker / 64] &= ~(1ull << worker % 64);
    if (--n->n_workers >= MIN_BITMAP) return;
    memset(n->workers, 0, sizeof n->workers);
    for (uint32_t word = 0, at = 0; word < x->n_words; word++) {
        for (uint64_t b = bits[word]; b; b &= b - 1)
            n->workers[at++] = (uint16_t)(word * 64 + (uint32_t)__builtin_ctzll(b));
    }
    x->free_bitmaps[x->n_free_bitmaps++] = number;
}

/* --- tables ----------------------------------------------------------------------------------- */

static const struct node *find(const struct td_prefix_index *x, uint64_t hash)
{
    for (uint32_t at = x->node_heads[bucket_of(x, hash)]; at != NONE; at = x->nodes[at].next) {
        if (x->nodes[at].hash == hash) return &x->nodes[at];
    }
    return NULL;
}

/* find() of a chain's block at `depth`; `near` is the one at `near_depth`. Blocks added one
 * after the other mostly lie one after the other (in reused places too: leaves are freed before
 * roots), which spares the bucket and stays in one page: half the time where no cache helps. */
static const struct node *find_along(const struct td_prefix_index *x, const uint64_t *hashes,
                                     size_t depth, const struct node *near, size_t near_depth)
{
    uint64_t guess = (uint64_t)(near - x->nodes) + (depth - near_depth);
    if (guess < x->fresh_nodes && x->nodes[guess].hash == hashes[depth] &&
        x->nodes[guess].n_workers > 0)
        return &x->nodes[guess];
    return find(x, hashes[depth]);
}

static void remove_pair(struct td_prefix_index *x, uint32_t at)
{
    struct pair *p = &x->pairs[at];
    struct node *n = &x->nodes[p->node];
    uint32_t *link = &x->pair_heads[pair_bucket(x, p->node, p->worker)];
    while (*link != at) link = &x->pairs[*link].next;
    *link = p->next;
    if (p->newer != NONE)
        x->pairs[p->newer].older = p->older;
    else
        x->newest[p->worker] = p->older;
    if (p->older != NONE) x->pairs[p->older].newer = p->newer;
    set_remove(x, n, p->worker);
    if (n->n_workers == 0) { /* (1) */
        link = &x->node_heads[bucket_of(x, n->hash)];
        while (*link != p->node) link = &x->nodes[*link].next;
        *link = n->next;
        n->next = x->free_node;
        x->free_node = p->node;
    }
    p->next = x->free_pair;
    x->free_pair = at;
    x->n_entries--;
}

void td_prefix_index_add(struct td_prefix_index *index, uint32_t worker, uint64_t hash)
{
    TD_ASSERT(worker < index->max_workers);
    uint32_t *head = &index->node_heads[bucket_of(index, hash)], at = *head, length = 0;
    while (at != NONE && index->nodes[at].hash != hash) at = index->nodes[at].next, length++;
    if (at != NONE && set_has(index, &index->nodes[at], worker)) return;
    if (index->n_entries == index->n_pairs_max || (at == NONE && length >= MAX_CHAIN)) {
        index->n_dropped++;
        return;
    }
    if (at == NONE) { /* there is one: nodes are never more than pairs (1) */
        at = index->free_node;
        if (at != NONE)
            index->free_node = index->nodes[at].next;
        else
            at = index->fresh_nodes++;
        index->nodes[at] = (struct node){.hash = hash, .next = *head};
        *head = at;
    }
    uint32_t own = index->free_pair;
    if (own != NONE)
        index->free_pair = index->pairs[own].next;
    else
        own = index->fresh_pairs++;
    uint32_t *pair_head = &index->pair_heads[pair_bucket(index, at, worker)];
    index->pairs[own] = (struct pair){.node = at,
                                      .next = *pair_head,
                                      .older = index->newest[worker],
                                      .newer = NONE,
                                      .worker = (uint16_t)worker};
    *pair_head = own;
    if (index->newest[worker] != NONE) index->pairs[index->newest[worker]].newer = own;
    index->newest[worker] = own;
    set_add(index, &index->nodes[at], worker);
    index->n_entries++;
}

void td_prefix_index_evict(struct td_prefix_index *index, uint32_t worker, uint64_t hash)
{
    TD_ASSERT(worker < index->max_workers);
    const struct node *n = find(index, hash);
    if (!n || !set_has(index, n, worker)) return;
    uint32_t node = (uint32_t)(n - index->nodes),
             at = index->pair_heads[pair_bucket(index, node, worker)];
    /* it is there (2) */
    while (index->pairs[at].node != node || index->pairs[at].worker != worker)
        at = index->pairs[at].next;
    remove_pair(index, at);
}

void td_prefix_index_reset(struct td_prefix_index *index, uint32_t worker)
{
    TD_ASSERT(worker < index->max_workers);
    while (index->newest[worker] != NONE) remove_pair(index, index->newest[worker]);
}

/* --- lookups ---------------------------------------------------------------------------------- */

uint32_t td_prefix_index_depth(const struct td_prefix_index *index, uint32_t worker,
                               const uint64_t *hashes, size_t n_hashes)
{
    TD_ASSERT(worker < index->max_workers);
    size_t held = 0, lacks = n_hashes, step = 1; /* hashes[held - 1] is held, by `last`;
                                                    hashes[lacks] is not or does not exist */
    const struct node *last = NULL;
    while (held < lacks) { /* gallop, as most requests share little; then bisect: step = 0 */
        size_t at = step == 0             ? held + (lacks - held) / 2
                    : step < lacks - held ? held + step - 1
                                          : lacks - 1;
        const struct node *n =
            last ? find_along(index, hashes, at, last, held - 1) : find(index, hashes[at]);
        if (n && set_has(index, n, worker)) {
            held = at + 1, last = n;
            step *= 2;
        } else {
            lacks = at, step = 0;
        }
    }
    return (uint32_t)held;
}

struct search {
    const struct td_prefix_index *x;
    const uint64_t *hashes;
    struct td_prefix_match *out;
    size_t n_out, max;
    uint32_t n_left; /* bits in x->left */
};

static void emit(struct search *s, uint32_t worker, size_t n_blocks)
{
    uint64_t bit = 1ull << worker % 64;
    if (!(s->x->left[worker / 64] & bit) || s->n_out == s->max) return;
    s->x->left[worker / 64] &= ~bit;
    s->n_left--;
    s->out[s->n_out++] = (struct td_prefix_match){.worker = worker, .n_blocks = (uint32_t)n_blocks};
}

static void emit_set(struct search *s, const struct node *n, size_t n_blocks)
{
    if (!has_bitmap(n)) {
        for (uint32_t i = 0; i < n->n_workers; i++) emit(s, n->workers[i], n_blocks);
        return;
    }
    const uint64_t *bits = bitmap_of(s->x, n);
    for (uint32_t word = 0; word < s->x->n_words && s->n_out < s->max; word++) {
        for (uint64_t b = bits[word] & s->x->left[word]; b; b &= b - 1)
            emit(s, word * 64 + (uint32_t)__builtin_ctzll(b), n_blocks);
    }
}

/* All of `at` (depth lo) that have no answer yet and are not at depth hi, which n_hi workers
 * hold; the deepest first. */
static void bisect(struct search *s, size_t lo, const struct node *at, size_t hi, uint32_t n_hi)
{
    if (s->n_out == s->max || s->n_left == 0 || at->n_workers <= n_hi) return;
    if (hi - lo == 1) {
        emit_set(s, at, lo + 1);
        return;
    }
    size_t mid = lo + (hi - lo) / 2;
    const struct node *n = find_along(s->x, s->hashes, mid, at, lo);
    if (n) bisect(s, mid, n, hi, n_hi);
    bisect(s, lo, at, mid, n ? n->n_workers : 0);
}

size_t td_prefix_index_match(const struct td_prefix_index *index, const uint64_t *hashes,
                             size_t n_hashes, struct td_prefix_match *ret_matches,
                             size_t max_matches)
{
    /* the gallop doubles: no more than bits in a size_t, and the end */
    struct {
        size_t at;
        const struct node *node;
    } seen[66];
    const struct node *root = n_hashes > 0 && max_matches > 0 ? find(index, hashes[0]) : NULL;
    if (!root) return 0;
    struct search s = {.x = index,
                       .hashes = hashes,
                       .out = ret_matches,
                       .max = max_matches,
                       .n_left = root->n_workers};
    if (has_bitmap(root)) {
        memcpy(index->left, bitmap_of(index, root), index->n_words * sizeof *index->left);
    } else {
        memset(index->left, 0, index->n_words * sizeof *index->left);
        for (uint32_t i = 0; i < root->n_workers; i++)
            index->left[root->workers[i] / 64] |= 1ull << root->workers[i] % 64;
    }
    size_t n_seen = 0, end = n_hashes;
    seen[n_seen].at = 0, seen[n_seen++].node = root;
    for (size_t step = 1; seen[n_seen - 1].at + 1 < n_hashes; step *= 2) {
        size_t last = seen[n_seen - 1].at, at = step < n_hashes - last ? last + step : n_hashes - 1;
        const struct node *n = find_along(index, hashes, at, seen[n_seen - 1].node, last);
        if (!n) {
            end = at;
            break;
        }
        seen[n_seen].at = at, seen[n_seen++].node = n;
    }
    for (uint32_t n_deeper = 0; n_seen > 0; n_seen--) {
        const struct node *n = seen[n_seen - 1].node;
        bisect(&s, seen[n_seen - 1].at, n, end, n_deeper);
        end = seen[n_seen - 1].at, n_deeper = n->n_workers;
    }
    if (s.n_left == 0 || s.n_out == max_matches) return s.n_out;
    /* Chains with holes (lost reports) hid some behind equal counts: each is searched alone. */
    for (uint32_t word = 0; word < index->n_words && s.n_out < max_matches; word++) {
        for (uint64_t b = index->left[word]; b && s.n_out < max_matches; b &= b - 1) {
            uint32_t worker = word * 64 + (uint32_t)__builtin_ctzll(b);
            emit(&s, worker, td_prefix_index_depth(index, worker, hashes, n_hashes));
        }
    }
    for (size_t i = 1; i < s.n_out; i++) { /* longest first, as before */
        struct td_prefix_match m = ret_matches[i];
        size_t at = i;
        for (; at > 0 && ret_matches[at - 1].n_blocks < m.n_blocks; at--)
            ret_matches[at] = ret_matches[at - 1];
        ret_matches[at] = m;
    }
    return s.n_out;
}

void td_prefix_index_stats(const struct td_prefix_index *index, struct td_prefix_stats *ret_stats)
{
    *ret_stats =
        (struct td_prefix_stats){.n_entries = index->n_entries, .n_dropped = index->n_dropped};
}

/* --- life ------------------------------------------------------------------------------------- */

td_status td_prefix_index_create(uint32_t max_workers, uint64_t max_entries,
                                 struct td_prefix_index **ret_index, struct td_err *err)
{
    if (max_workers < 1 || max_workers > MAX_WORKERS) {
        return td_fail(err, TD_ERR_INVALID, "prefix index: max_workers is %u, must be 1..%u",
                       max_workers, MAX_WORKERS);
    }
    if (max_entries < 1 || max_entries > MAX_ENTRIES) {
        return td_fail(err, TD_ERR_INVALID, "prefix index: max_entries is %llu, must be 1..%u",
                       (unsigned long long)max_entries, MAX_ENTRIES);
    }
    struct td_prefix_index *x = calloc(1, sizeof *x);
    if (!x) goto no_memory;
    size_t n_buckets = 16;
    while (n_buckets < max_entries) n_buckets *= 2;
    x->max_workers = max_workers;
    x->n_words = (max_workers + 63) / 64;
    x->mask = (uint32_t)(n_buckets - 1);
    x->n_pairs_max = (uint32_t)max_entries;
    x->n_bitmaps_max = (uint32_t)(max_entries / MIN_BITMAP + 1);
    x->free_node = x->free_pair = NONE;
    x->nodes = malloc(max_entries * sizeof *x->nodes);
    x->pairs = malloc(max_entries * sizeof *x->pairs);
    x->node_heads = malloc(n_buckets * sizeof *x->node_heads);
    x->pair_heads = malloc(n_buckets * sizeof *x->pair_heads);
    x->newest = malloc(max_workers * sizeof *x->newest);
    x->bitmaps = malloc((size_t)x->n_bitmaps_max * x->n_words * sizeof *x->bitmaps);
    x->free_bitmaps = malloc(x->n_bitmaps_max * sizeof *x->free_bitmaps);
    x->left = malloc(x->n_words * sizeof *x->left);
    if (!x->nodes || !x->pairs || !x->node_heads || !x->pair_heads || !x->newest || !x->bitmaps ||
        !x->free_bitmaps || !x->left)
        goto no_memory;
    memset(x->node_heads, 0xff, n_buckets * sizeof *x->node_heads);
    memset(x->pair_heads, 0xff, n_buckets * sizeof *x->pair_heads);
    memset(x->newest, 0xff, max_workers * sizeof *x->newest);
    *ret_index = x;
    return TD_OK;
no_memory:
    td_prefix_index_destroy(x);
    return td_fail(err, TD_ERR_NOMEM, "prefix index: no memory for %llu entries",
                   (unsigned long long)max_entries);
}

void td_prefix_index_destroy(struct td_prefix_index *index)
{
    if (!index) return;
    free(index->nodes);
    free(index->pairs);
    free(index->node_heads);
    free(index->pair_heads);
    free(index->newest);
    free(index->bitmaps);
    free(index->free_bitmaps);
    free(index->left);
    free(index);
}
