/* kv_pool.c - the states of a block, free runs, the prefix index and its reports.
 *
 *     FREE   --alloc-------------------------------------------------> HELD
 *     HELD   --unref to 0------------------------------------------> FREE
 *     HELD   --unref to 0, published, and its parent still is------> CACHED
 *     CACHED --prefix_lookup---------------------------------------> HELD
 *     CACHED --alloc evicts, prefix_clear--------------------------> FREE
 *
 * Free blocks form maximal runs of adjacent ids with boundary tags (the length stands at the first
 * and the last block), on one list per power of two of length. Taking and returning a block are
 * O(1), and neighbouring runs merge again. alloc takes one run that is long enough when there is
 * one, else the longest runs first: few runs per request make long transfers.
 *
 * The prefix index is a chained hash table of published blocks. A published block stores its tokens
 * and names its parent: the parent's block id and publication number. Publication numbers are never
 * used twice, so this name identifies one content for ever. Comparing tokens and the parent's name
 * on a hit therefore compares, by induction, every token of the prefix (1), and the salt, which the
 * first block of a chain stores in place of a parent. The hash only finds candidates.
 *
 * The LRU list holds exactly the CACHED blocks, next victim first. A block joins at the young end,
 * except that a block whose parent is already CACHED joins just before its parent (2): a child is
 * never younger than its parent, so a chain is evicted leaf first, in whatever order its owner
 * drops it. A HELD block can outlive its parent, when its owner's own copy of the parent was not
 * the published one. Then neither that block nor its descendants can be found any more: they are no
 * longer `reachable`, and become FREE instead of CACHED.
 *
 * Reports, for each router on its own: a name that the router was told and that is no longer valid
 * goes into the ring `gone` at once. Additions wait in the ring `changed` and are reported when
 * `gone` is empty, so that a content which has moved from one block to another is never retracted
 * after it was reported. gone + told blocks <= n_blocks.
 *
 * Invariants (asserted): (3) ref > 0 iff HELD; (4) n_free + n_cached + n_held = n_blocks.
 * Everything is allocated at create, but for a router's reports: those when it is first known. */
#include "common/kv/kv_pool.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/entropy.h"
#include "common/base/hash.h"

#define NONE (-1)
#define N_CLASSES 31

enum block_state { FREE = 0, HELD, CACHED };

struct block {
    int32_t ref;
    enum block_state state;
    int32_t run;        /* FREE: the length of the run, valid at its first and last block */
    int32_t prev, next; /* FREE and first of a run: its class list; CACHED: LRU list  */
    /* published (HELD or CACHED) iff publication != 0 */
    uint64_t publication;
    uint64_t parent_publication; /* 0: this block begins a prompt */
    struct td_prefix_salt salt;  /* the salt, in a block that begins a prompt; else zero */
    int32_t parent;
    int32_t chain; /* next in the hash bucket */
    int32_t depth; /* position in the chain: block i of the prompt */
    struct td_hash128 hash;
    int32_t n_children; /* published blocks that name this publication as their parent */
    bool reachable;     /* this block is published, and so is every block before it */
};

/* What one router knows of a block. */
struct block_report {
    /* what it was told (0 = nothing), and the block's name under its seed while it is published */
    uint64_t told_hash, name;
    bool changed; /* queued for a report */
};

struct reports { /* to one router */
    bool on;
    uint64_t seed;
    struct block_report *blocks; /* [n_blocks]; NULL = there never was such a router */
    int32_t *changed;            /* [n_blocks], ring of block ids */
    int32_t first_changed, n_changed;
    uint64_t *gone; /* [n_blocks], ring of names */
    int32_t first_gone, n_gone;
};

struct td_kv_pool {
    struct td_kv_layout layout;
    struct td_arena arena;
    int32_t n_blocks;
    bool prefix_cache, is_borrowed;
    struct block *blocks;
    int32_t *tokens;  /* [n_blocks][block_size], of published blocks; NULL without
                         prefix cache */
    int32_t *buckets; /* [n_buckets], first block or NONE */
    uint32_t bucket_mask;
    struct td_hash128 (*hash)(const void *data, size_t n_bytes, uint64_t seed);
    uint64_t seed, n_publications;
    int32_t class_head[N_CLASSES];
    uint32_t class_bits; /* bit c: class_head[c] != NONE */
    int32_t lru_head, lru_tail;
    struct reports reports[TD_KV_MAX_REPORTS]; /* by router */
    int32_t *scratch;                          /* [n_blocks + 1] */
    struct td_kv_pool_stats stats;
};

/* --- free runs -------------------------------------------------------------------------------- */

/* Runs of length [2^c, 2^(c+1)) are of class c. */
static int class_of(int32_t length) { return 31 - __builtin_clz((unsigned)length); }

static void run_insert(struct td_kv_pool *p, int32_t first, int32_t length)
{
    int c = class_of(length);
    struct block *b = &p->blocks[first];
    b->run = length;
    p->blocks[first + length - 1].run = length;
    b->prev = NONE;
    b->next = p->class_head[c];
    if (b->next != NONE) p->blocks[b->next].prev = first;
    p->class_head[c] = first;
    p->class_bits |= 1u << c;
}

static void run_remove(struct td_kv_pool *p, int32_t first)
{
    struct block *b = &p->blocks[first];
    int c = class_of(b->run);
    if (b->prev != NONE)
        p->blocks[b->prev].next = b->next;
    else
        p->class_head[c] = b->next;
    if (b->next != NONE) p->blocks[b->next].prev = b->prev;
    if (p->class_head[c] == NONE) p->class_bits &= ~(1u << c);
}

static void free_block(struct td_kv_pool *p, int32_t id)
{
    int32_t first = id, length = 1;
    p->blocks[id].state = FREE;
    if (id > 0 && p->blocks[id - 1].state == FREE) {
        int32_t left = p->blocks[id - 1].run;
        run_remove(p, id - left);
        first -= left;
        length += left;
    }
    if (id + 1 < p->n_blocks && p->blocks[id + 1].state == FREE) {
        int32_t right = p->blocks[id + 1].run;
        run_remove(p, id + 1);
        length += right;
    }
    run_insert(p, first, length);
    p->stats.n_free++;
}

/* The first block of the best run for n: the head of the smallest class whose runs all hold n, else
 * the head of the largest class, some of whose runs may still be long enough. */
static int32_t run_pick(const struct td_kv_pool *p, int32_t n)
{
    int need = n > 1 ? class_of(n - 1) + 1 : 0;
    uint32_t fit = need < 32 ? p->class_bits >> need << need : 0;
    int c = fit ? __builtin_ctz(fit) : 31 - __builtin_clz(p->class_bits);
    return p->class_head[c];
}

/* --- LRU -------------------------------------------------------------------------------------- */

static void lru_insert_before(struct td_kv_pool *p, int32_t id, int32_t before)
{
    struct block *b = &p->blocks[id];
    b->next = before;
    b->prev = before == NONE ? p->lru_tail : p->blocks[before].prev;
    if (b->prev == NONE)
        p->lru_head = id;
    else
        p->blocks[b->prev].next = id;
    if (before == NONE)
        p->lru_tail = id;
    else
        p->blocks[before].prev = id;
}

static void lru_remove(struct td_kv_pool *p, int32_t id)
{
    struct block *b = &p->blocks[id];
    if (b->prev == NONE)
        p->lru_head = b->next;
    else
        p->blocks[b->prev].next = b->next;
    if (b->next == NONE)
        p->lru_tail = b->prev;
    else
        p->blocks[b->next].prev = b->prev;
}

/* --- prefix index ----------------------------------------------------------------------------- */

/* The chain hash of a block: its parent's hash (for the first block: the salt) and its tokens. The
 * seed is this process's secret, so that nobody outside can aim at one bucket. */
static struct td_hash128 chain_hash(const struct td_kv_pool *p, struct td_hash128 parent,
                                    const int32_t *tokens)
{
    struct td_hash128 own = p->hash(tokens, (size_t)p->layout.block_size * sizeof *tokens, p->seed);
    uint64_t both[4] = {parent.lo, parent.hi, own.lo, own.hi};
    return p->hash(both, sizeof both, p->seed);
}

static int32_t *tokens_of(const struct td_kv_pool *p, int32_t id)
{
    return p->tokens + (size_t)id * (size_t)p->layout.block_size;
}

/* The block published for exactly these tokens after exactly this parent (invariant 1), or NONE.
 * salt: of a block without a parent, else zero. */
static int32_t index_find(const struct td_kv_pool *p, struct td_hash128 hash,
                          struct td_prefix_salt salt, const int32_t *tokens,
                          uint64_t parent_publication)
{
    for (int32_t id = p->buckets[hash.lo & p->bucket_mask]; id != NONE; id = p->blocks[id].chain) {
        const struct block *b = &p->blocks[id];
        if (b->hash.lo == hash.lo && b->hash.hi == hash.hi &&
            b->parent_publication == parent_publication && b->salt.lo == salt.lo &&
            b->salt.hi == salt.hi &&
            memcmp(tokens_of(p, id), tokens, (size_t)p->layout.block_size * sizeof *tokens) == 0)
            return id;
    }
    return NONE;
}

static void name_block(const struct td_kv_pool *p, struct reports *r, int32_t id)
{
    const struct block *b = &p->blocks[id];
    uint64_t key =
        b->parent_publication ? r->blocks[b->parent].name : td_prefix_seed(r->seed, b->salt);
    td_prefix_hashes(tokens_of(p, id), (size_t)p->layout.block_size, (uint32_t)p->layout.block_size,
                     key, &r->blocks[id].name, 1);
}

static void report_published(struct td_kv_pool *p, int32_t id)
{
    for (int i = 0; i < TD_KV_MAX_REPORTS; i++) {
        struct reports *r = &p->reports[i];
        if (!r->on) continue;
        name_block(p, r, id);
        if (r->blocks[id].changed) continue;
        r->blocks[id].changed = true;
        r->changed[(r->first_changed + r->n_changed++) % p->n_blocks] = id;
    }
}

/* Retracts the block from those routers that were told of it. */
static void retract(struct td_kv_pool *p, int32_t id)
{
    for (int i = 0; i < TD_KV_MAX_REPORTS; i++) {
        struct reports *r = &p->reports[i];
        if (!r->on || !r->blocks[id].told_hash) continue;
        TD_ASSERT(r->n_gone < p->n_blocks);
        r->gone[(r->first_gone + r->n_gone++) % p->n_blocks] = r->blocks[id].told_hash;
        r->blocks[id].told_hash = 0;
    }
}

static bool follows_a_reachable(const struct td_kv_pool *p, const struct block *b)
{
    if (b->parent_publication == 0) return true;
    const struct block *parent = &p->blocks[b->parent];
    return parent->publication == b->parent_publication && parent->reachable;
}

/* A block with children has been evicted: its descendants are out of reach. Rare, because chains
 * are evicted leaf first. O(n_blocks) for each step down the chains. */
static void cut_off_children(struct td_kv_pool *p)
{
    for (bool again = true; again;) {
        again = false;
        for (int32_t id = 0; id < p->n_blocks; id++) {
            struct block *b = &p->blocks[id];
            if (!b->publication || !b->reachable || follows_a_reachable(p, b)) continue;
            b->reachable = false;
            retract(p, id);
            again = b->n_children > 0 || again;
        }
    }
}

static void unpublish(struct td_kv_pool *p, int32_t id)
{
    struct block *b = &p->blocks[id];
    int32_t *at = &p->buckets[b->hash.lo & p->bucket_mask];
    while (*at != id) {
        TD_ASSERT(*at != NONE);
        at = &p->blocks[*at].chain;
    }
    *at = b->chain;
    if (b->parent_publication && p->blocks[b->parent].publication == b->parent_publication)
        p->blocks[b->parent].n_children--;
    b->publication = 0;
    b->reachable = false;
    retract(p, id);
    if (b->n_children > 0) cut_off_children(p);
    b->n_children = 0;
}

static void evict(struct td_kv_pool *p, int32_t id)
{
    lru_remove(p, id);
    unpublish(p, id);
    p->stats.n_cached--;
    free_block(p, id);
}

int32_t td_kv_prefix_lookup(struct td_kv_pool *pool, struct td_prefix_salt salt,
                            const int32_t *tokens, int32_t n_tokens, int32_t max_blocks,
                            int32_t *ret_block_ids)
{
    if (!pool->prefix_cache || n_tokens <= 0) return 0;
    int32_t n_full = n_tokens / pool->layout.block_size, n = 0;
    struct td_hash128 hash = {salt.lo, salt.hi};
    uint64_t parent = 0;
    if (n_full > max_blocks) n_full = max_blocks;
    for (; n < n_full; n++) {
        const int32_t *own = tokens + (size_t)n * (size_t)pool->layout.block_size;
        hash = chain_hash(pool, hash, own);
        int32_t id =
            index_find(pool, hash, parent ? (struct td_prefix_salt){0} : salt, own, parent);
        if (id == NONE) break;
        td_kv_pool_ref(pool, id);
        parent = pool->blocks[id].publication;
        ret_block_ids[n] = id;
    }
    pool->stats.n_prefix_queries_tokens += (uint64_t)n_tokens;
    pool->stats.n_prefix_hit_tokens += (uint64_t)n * (uint64_t)pool->layout.block_size;
    return n;
}

void td_kv_prefix_publish(struct td_kv_pool *pool, struct td_prefix_salt salt,
                          const int32_t *tokens, const int32_t *block_ids, int32_t first,
                          int32_t n_full)
{
    if (!pool->prefix_cache) return;
    size_t block_size = (size_t)pool->layout.block_size;
    struct td_hash128 hash = {salt.lo, salt.hi};
    uint64_t parent_publication = 0;
    int32_t parent = NONE, i = 0;
    /* When the caller's own block before `first` is published there, the chain continues from it;
     * else walk it from the prompt's start. */
    if (first > 0) {
        const struct block *last = &pool->blocks[block_ids[first - 1]];
        if (last->publication && last->depth == first - 1 && last->reachable &&
            memcmp(tokens_of(pool, block_ids[first - 1]), tokens + (size_t)(first - 1) * block_size,
                   block_size * sizeof *tokens) == 0) {
            parent = block_ids[first - 1];
            parent_publication = last->publication;
            hash = last->hash;
            i = first;
        }
    }
    for (; i < n_full; i++) {
        const int32_t *own = tokens + (size_t)i * block_size;
        hash = chain_hash(pool, hash, own);
        struct td_prefix_salt own_salt = parent_publication ? (struct td_prefix_salt){0} : salt;
        int32_t id = index_find(pool, hash, own_salt, own, parent_publication);
        if (id == NONE) {
            struct block *b = &pool->blocks[block_ids[i]];
            /* An evicted predecessor that the caller does not declare breaks the chain, and nothing
             * after it could be found. A block that is published already keeps its first name. */
            if (i < first || b->publication) return;
            TD_ASSERT(b->state == HELD);
            id = block_ids[i];
            b->publication = ++pool->n_publications;
            b->parent_publication = parent_publication;
            b->salt = own_salt;
            b->parent = parent;
            /* the walk arrived here from the prompt's start, or from a reachable block */
            b->reachable = true;
            if (parent_publication) pool->blocks[parent].n_children++;
            b->depth = i;
            b->hash = hash;
            b->chain = pool->buckets[hash.lo & pool->bucket_mask];
            pool->buckets[hash.lo & pool->bucket_mask] = id;
            memcpy(tokens_of(pool, id), own, block_size * sizeof *tokens);
            report_published(pool, id);
        }
        parent = id;
        parent_publication = pool->blocks[id].publication;
    }
}

void td_kv_prefix_clear(struct td_kv_pool *pool)
{
    while (pool->lru_head != NONE) evict(pool, pool->lru_head);
}

/* --- reports ---------------------------------------------------------------------------------- */

static void reports_free(struct reports *r)
{
    free(r->blocks);
    free(r->changed);
    free(r->gone);
    *r = (struct reports){.on = false};
}

static bool reports_alloc(const struct td_kv_pool *p, struct reports *r)
{
    size_t n = (size_t)p->n_blocks;
    if (r->blocks) return true;
    r->blocks = calloc(n, sizeof *r->blocks);
    r->changed = malloc(n * sizeof *r->changed);
    r->gone = malloc(n * sizeof *r->gone);
    if (r->blocks && r->changed && r->gone) return true;
    reports_free(r);
    return false;
}

td_status td_kv_report_begin(struct td_kv_pool *p, int router, uint64_t seed)
{
    TD_ASSERT(router >= 0 && router < TD_KV_MAX_REPORTS);
    struct reports *r = &p->reports[router];
    if (!p->prefix_cache) return TD_OK;
    r->on = reports_alloc(p, r);
    if (!r->on) return TD_ERR_NOMEM;
    r->seed = seed;
    r->first_changed = r->n_changed = r->first_gone = r->n_gone = 0;
    /* sort blocks by depth, so that a parent is reported before its children */
    int32_t *count = p->scratch;
    memset(count, 0, ((size_t)p->n_blocks + 1) * sizeof *count);
    for (int32_t id = 0; id < p->n_blocks; id++) {
        r->blocks[id] = (struct block_report){0};
        if (p->blocks[id].reachable) count[p->blocks[id].depth + 1]++;
    }
    for (int32_t d = 0; d < p->n_blocks; d++) count[d + 1] += count[d];
    int32_t n = count[p->n_blocks];
    for (int32_t id = 0; id < p->n_blocks; id++)
        if (p->blocks[id].reachable) r->changed[count[p->blocks[id].depth]++] = id;
    for (int32_t i = 0; i < n; i++) {
        name_block(p, r, r->changed[i]);
        r->blocks[r->changed[i]].changed = true;
    }
    r->n_changed = n;
    return TD_OK;
}

void td_kv_report_end(struct td_kv_pool *p, int router)
{
    TD_ASSERT(router >= 0 && router < TD_KV_MAX_REPORTS);
    p->reports[router].on = false;
}

void td_kv_report_take(struct td_kv_pool *p, int router, size_t max, uint64_t *ret_added,
                       size_t *ret_n_added, uint64_t *ret_evicted, size_t *ret_n_evicted)
{
    TD_ASSERT(router >= 0 && router < TD_KV_MAX_REPORTS);
    struct reports *r = &p->reports[router];
    size_t n_added = 0, n_evicted = 0;
    for (; r->on && r->n_gone > 0 && n_evicted < max; r->n_gone--) {
        ret_evicted[n_evicted++] = r->gone[r->first_gone];
        r->first_gone = (r->first_gone + 1) % p->n_blocks;
    }
    for (; r->on && r->n_changed > 0 && r->n_gone == 0 && n_added < max; r->n_changed--) {
        int32_t id = r->changed[r->first_changed];
        struct block_report *b = &r->blocks[id];
        if (p->blocks[id].reachable && !b->told_hash) ret_added[n_added++] = b->told_hash = b->name;
        b->changed = false;
        r->first_changed = (r->first_changed + 1) % p->n_blocks;
    }
    *ret_n_added = n_added;
    *ret_n_evicted = n_evicted;
}

/* --- blocks ----------------------------------------------------------------------------------- */

td_status td_kv_pool_alloc(struct td_kv_pool *pool, int32_t n, int32_t *ret_block_ids)
{
    if (n < 0 || n > pool->stats.n_free + pool->stats.n_cached) return TD_ERR_AGAIN;
    while (pool->stats.n_free < n) {
        evict(pool, pool->lru_head);
        pool->stats.n_evictions++;
    }
    for (int32_t done = 0; done < n;) {
        int32_t first = run_pick(pool, n - done), length = pool->blocks[first].run;
        int32_t take = length < n - done ? length : n - done;
        run_remove(pool, first);
        if (take < length) run_insert(pool, first + take, length - take);
        for (int32_t i = 0; i < take; i++) {
            struct block *b = &pool->blocks[first + i];
            b->state = HELD;
            b->ref = 1;
            ret_block_ids[done++] = first + i;
        }
    }
    pool->stats.n_free -= n;
    pool->stats.n_held += n;
    pool->stats.n_allocs += (uint64_t)n;
    return TD_OK;
}

void td_kv_pool_ref(struct td_kv_pool *pool, int32_t block_id)
{
    TD_ASSERT(block_id >= 0 && block_id < pool->n_blocks);
    struct block *b = &pool->blocks[block_id];
    TD_ASSERT(b->state != FREE);
    if (b->state == CACHED) {
        lru_remove(pool, block_id);
        b->state = HELD;
        pool->stats.n_cached--;
        pool->stats.n_held++;
    }
    b->ref++;
}

void td_kv_pool_unref(struct td_kv_pool *pool, int32_t block_id)
{
    TD_ASSERT(block_id >= 0 && block_id < pool->n_blocks);
    struct block *b = &pool->blocks[block_id];
    TD_ASSERT(b->state == HELD && b->ref > 0);
    if (--b->ref > 0) return;
    pool->stats.n_held--;
    if (b->reachable) {
        b->state = CACHED;
        bool parent_cached = b->parent_publication && pool->blocks[b->parent].state == CACHED;
        lru_insert_before(pool, block_id, parent_cached ? b->parent : NONE);
        pool->stats.n_cached++;
        return;
    }
    if (b->publication) unpublish(pool, block_id);
    free_block(pool, block_id);
}

/* Allocates the prefix index; false: no memory. */
static bool index_create(struct td_kv_pool *p)
{
    size_t n = (size_t)p->n_blocks, n_buckets = 64;
    while (n_buckets < n * 2) n_buckets *= 2;
    p->bucket_mask = (uint32_t)(n_buckets - 1);
    p->buckets = malloc(n_buckets * sizeof *p->buckets);
    p->tokens = calloc(n * (size_t)p->layout.block_size, sizeof *p->tokens);
    p->scratch = malloc((n + 1) * sizeof *p->scratch);
    if (!p->buckets || !p->tokens || !p->scratch) return false;
    memset(p->buckets, 0xff, n_buckets * sizeof *p->buckets);
    p->seed = td_random_u64();
    return true;
}

td_status td_kv_pool_create(const struct td_kv_pool_config *config, struct td_kv_pool **ret_pool,
                            struct td_err *err)
{
    if (config->n_blocks < 1 || config->n_blocks > 1 << 28)
        return td_fail(err, TD_ERR_INVALID, "kv pool: n_blocks is %d, must be 1..%d",
                       config->n_blocks, 1 << 28);
    if (config->layout.block_bytes == 0 || config->layout.block_size < 1)
        return td_fail(err, TD_ERR_INVALID, "kv pool: the layout was not initialised");
    if ((size_t)config->n_blocks > SIZE_MAX / config->layout.block_bytes)
        return td_fail(err, TD_ERR_LIMIT, "kv pool: %d blocks of %zu bytes do not fit an address",
                       config->n_blocks, config->layout.block_bytes);

    struct td_kv_pool *p = calloc(1, sizeof *p);
    if (!p) return td_fail(err, TD_ERR_NOMEM, "kv pool: out of memory");
    size_t n = (size_t)config->n_blocks;
    p->layout = config->layout;
    p->arena.memfd = -1;
    p->n_blocks = config->n_blocks;
    p->prefix_cache = config->prefix_cache;
    p->hash = config->hash ? config->hash : td_hash128;
    p->lru_head = p->lru_tail = NONE;
    for (int c = 0; c < N_CLASSES; c++) p->class_head[c] = NONE;
    p->blocks = calloc(n, sizeof *p->blocks);
    if (!p->blocks) goto err_nomem;
    if (p->prefix_cache && !index_create(p)) goto err_nomem;
    td_status status = TD_OK;
    int arena_flags =
        (config->shareable ? TD_ARENA_SHAREABLE : 0) | (config->show ? TD_ARENA_SHOW : 0);
    p->is_borrowed = config->borrowed != NULL;
    if (p->is_borrowed)
        p->arena = (struct td_arena){.base = config->borrowed,
                                     .bytes = config->borrowed_bytes ? config->borrowed_bytes
                                                                     : n * p->layout.block_bytes,
                                     .memfd = -1};
    else
        status =
            td_arena_create(n * p->layout.block_bytes, arena_flags, "tandem-kv", &p->arena, err);
    if (status) {
        p->arena = (struct td_arena){.memfd = -1};
        td_kv_pool_destroy(p);
        td_err_prefix(err, "kv pool of %d blocks of %zu bytes", config->n_blocks,
                      config->layout.block_bytes);
        return status;
    }
    run_insert(p, 0, p->n_blocks);
    p->stats.n_blocks = p->stats.n_free = p->n_blocks;
    *ret_pool = p;
    return TD_OK;

err_nomem:
    td_kv_pool_destroy(p);
    return td_fail(err, TD_ERR_NOMEM, "kv pool: out of memory for the table of %d blocks",
                   config->n_blocks);
}

void td_kv_pool_destroy(struct td_kv_pool *pool)
{
    if (!pool) return;
    if (pool->arena.base && !pool->is_borrowed) td_arena_destroy(&pool->arena);
    free(pool->blocks);
    free(pool->buckets);
    free(pool->tokens);
    for (int i = 0; i < TD_KV_MAX_REPORTS; i++) reports_free(&pool->reports[i]);
    free(pool->scratch);
    free(pool);
}

const struct td_kv_layout *td_kv_pool_layout(const struct td_kv_pool *pool)
{
    return &pool->layout;
}

const struct td_arena *td_kv_pool_arena(const struct td_kv_pool *pool) { return &pool->arena; }

uint8_t *td_kv_pool_block(const struct td_kv_pool *pool, int32_t block_id)
{
    TD_ASSERT(block_id >= 0 && block_id < pool->n_blocks);
    return (uint8_t *)pool->arena.base + (size_t)block_id * pool->layout.block_bytes;
}

void td_kv_pool_stats(const struct td_kv_pool *pool, struct td_kv_pool_stats *ret_stats)
{
    *ret_stats = pool->stats;
}
