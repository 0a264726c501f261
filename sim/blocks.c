/* blocks.c - the KV blocks of a simulated worker: a pool of counts and a prefix cache of chain
 * hashes, as the scheduler asks for them (td_sched_blocks).
 *
 * A block that has a hash is held by reference and evicted from the oldest end; the others are only
 * counted. */
#include "sim/cluster_parts.h"

#include "common/base/prefix_hash.h"

static int32_t available(const struct worker *w) { return w->n_blocks - w->n_anon - w->n_ref; }

static void note(uint64_t **list, uint32_t *n, uint32_t *capacity, uint64_t hash)
{
    if (*n == *capacity)
        *list = td_sim_grow(*list, *capacity = *capacity ? *capacity * 2 : 64, sizeof **list);
    (*list)[(*n)++] = hash;
}

/* Leading prompt blocks of a request that have a hash. */
int32_t sim_n_hashed(const struct cluster *c, uint32_t req)
{
    const struct td_sim_request *r = &c->trace->requests[req];
    if (!c->cfg->prefix_cache || r->n_hashes == 0) return 0;
    int64_t by_hash = (int64_t)r->n_hashes * c->trace->hash_tokens / c->cfg->block_size,
            full = r->n_prompt / c->cfg->block_size;
    return (int32_t)(by_hash < full ? by_hash : full);
}

/* A named tenant's chains are its own, as the router's salt makes them (router/tenants.h). */
uint64_t sim_block_hash(const struct cluster *c, uint32_t req, int32_t block)
{
    const struct td_sim_request *r = &c->trace->requests[req];
    uint32_t at = (uint32_t)block * (uint32_t)c->cfg->block_size;
    uint64_t hash = c->trace->hashes[r->hash_at + at / c->trace->hash_tokens] * 4096 +
                    at % c->trace->hash_tokens / (uint32_t)c->cfg->block_size + 1;
    return r->tenant ? td_prefix_seed(hash, (struct td_prefix_salt){.lo = r->tenant}) : hash;
}

static void hold(struct worker *w, uint32_t e)
{
    if (w->cache.entries[e].refs++ == 0) {
        td_sim_cache_unlink(&w->cache, e);
        w->n_ref++;
    }
}

static void let_go(struct worker *w, uint32_t e)
{
    if (--w->cache.entries[e].refs == 0) {
        td_sim_cache_link_fresh(&w->cache, e);
        w->n_ref--;
    }
}

/* Of the blocks that a leg holds, the first so many are held by their hash. */
int32_t sim_n_shared(const struct cluster *c, const struct leg *g)
{
    int32_t hashed = sim_n_hashed(c, g->req);
    return g->sched.n_published < hashed ? g->sched.n_published : hashed;
}

static void blocks_room(void *ctx, struct td_schedule_room *ret_room)
{
    const struct worker *w = ctx;
    *ret_room = (struct td_schedule_room){
        .n_blocks = w->n_blocks, .n_held = w->n_anon + w->n_ref, .n_available = available(w)};
}

static int32_t blocks_lookup(void *ctx, struct td_sched_seq *sched, int32_t max_blocks)
{
    struct worker *w = ctx;
    const struct cluster *c = w->cluster;
    uint32_t req = sim_leg_of(sched)->req, e;
    int32_t hashed = sim_n_hashed(c, req), hit = 0;
    for (; hit < max_blocks && hit < hashed; hit++) {
        if ((e = td_sim_cache_find(&w->cache, sim_block_hash(c, req, hit))) == NONE) break;
        hold(w, e);
    }
    return hit;
}

static bool blocks_alloc(void *ctx, struct td_sched_seq *sched, int32_t n)
{
    (void)sched;
    struct worker *w = ctx;
    if (available(w) < n) return false;
    while (available(w) - (int32_t)w->cache.n_linked < n) {
        uint32_t e = w->cache.oldest;
        if (w->cluster->wants_blocks)
            note(&w->told.evicted, &w->told.n_evicted, &w->told.evicted_capacity,
                 w->cache.entries[e].hash);
        td_sim_cache_remove(&w->cache, e);
    }
    w->n_anon += n;
    return true;
}

static void blocks_publish(void *ctx, struct td_sched_seq *sched, int32_t n_full)
{
    struct worker *w = ctx;
    const struct cluster *c = w->cluster;
    uint32_t req = sim_leg_of(sched)->req;
    int32_t hashed = sim_n_hashed(c, req), n = n_full < hashed ? n_full : hashed;
    for (int32_t i = sched->n_published; i < n; i++) {
        uint64_t hash = sim_block_hash(c, req, i);
        uint32_t e = td_sim_cache_find(&w->cache, hash);
        if (e == NONE) {
            e = td_sim_cache_insert(&w->cache, hash);
            w->cache.entries[e].refs = 1;
            w->n_ref++;
            if (c->wants_blocks)
                note(&w->told.added, &w->told.n_added, &w->told.added_capacity, hash);
        } else {
            hold(w, e); /* somebody published it meanwhile: one copy is enough */
        }
        w->n_anon--;
    }
}

static void blocks_release(void *ctx, struct td_sched_seq *sched)
{
    struct worker *w = ctx;
    const struct cluster *c = w->cluster;
    const struct leg *g = sim_leg_of(sched);
    int32_t shared = sim_n_shared(c, g);
    w->n_anon -= sched->n_blocks - shared;
    for (int32_t i = shared; i-- > 0;) /* the leaf first: it is evicted first */
        let_go(w, td_sim_cache_find(&w->cache, sim_block_hash(c, g->req, i)));
}

const struct td_sched_blocks sim_worker_blocks = {.room = blocks_room,
                                                  .lookup = blocks_lookup,
                                                  .alloc = blocks_alloc,
                                                  .publish = blocks_publish,
                                                  .release = blocks_release};
