/* cache.c - see cache.h. `older` of an entry that is not linked is the entry itself. */
#include "sim/cache.h"

#include <stdlib.h>

#include "sim/heap.h"

static uint32_t bucket_of(const struct td_sim_cache *c, uint64_t hash)
{
    return (uint32_t)((hash * 0x9E3779B97F4A7C15ull) >> 32) & (c->n_buckets - 1);
}

uint32_t td_sim_cache_find(const struct td_sim_cache *c, uint64_t hash)
{
    if (c->n_buckets == 0) return TD_SIM_NONE;
    uint32_t e = c->buckets[bucket_of(c, hash)];
    while (e != TD_SIM_NONE && c->entries[e].hash != hash) e = c->entries[e].next;
    return e;
}

static void grow(struct td_sim_cache *c)
{
    uint32_t n = c->capacity ? c->capacity * 2 : 64;
    c->entries = td_sim_grow(c->entries, n, sizeof *c->entries);
    c->buckets = td_sim_grow(c->buckets, n, sizeof *c->buckets);
    for (uint32_t i = 0; i < n; i++) c->buckets[i] = TD_SIM_NONE;
    c->n_buckets = n;
    for (uint32_t i = 0; i < c->capacity; i++) { /* it is full: every entry is in use */
        uint32_t b = bucket_of(c, c->entries[i].hash);
        c->entries[i].next = c->buckets[b];
        c->buckets[b] = i;
    }
    for (uint32_t i = n; i-- > c->capacity;) {
        c->entries[i].next = c->free_head_1;
        c->free_head_1 = i + 1;
    }
    c->capacity = n;
}

uint32_t td_sim_cache_insert(struct td_sim_cache *c, uint64_t hash)
{
    if (!c->free_head_1) grow(c);
    uint32_t e = c->free_head_1 - 1, b = bucket_of(c, hash);
    c->free_head_1 = c->entries[e].next;
    c->entries[e] =
        (struct td_sim_cache_entry){.hash = hash, .next = c->buckets[b], .older = e, .fresher = e};
    c->buckets[b] = e;
    c->n_used++;
    return e;
}

void td_sim_cache_link_fresh(struct td_sim_cache *c, uint32_t e)
{
    struct td_sim_cache_entry *x = &c->entries[e];
    x->fresher = TD_SIM_NONE;
    x->older = c->n_linked ? c->freshest : TD_SIM_NONE;
    if (c->n_linked)
        c->entries[c->freshest].fresher = e;
    else
        c->oldest = e;
    c->freshest = e;
    c->n_linked++;
}

void td_sim_cache_unlink(struct td_sim_cache *c, uint32_t e)
{
    struct td_sim_cache_entry *x = &c->entries[e];
    if (x->older == e) return;
    if (x->older == TD_SIM_NONE)
        c->oldest = x->fresher;
    else
        c->entries[x->older].fresher = x->fresher;
    if (x->fresher == TD_SIM_NONE)
        c->freshest = x->older;
    else
        c->entries[x->fresher].older = x->older;
    x->older = x->fresher = e;
    c->n_linked--;
}

void td_sim_cache_remove(struct td_sim_cache *c, uint32_t e)
{
    td_sim_cache_unlink(c, e);
    uint32_t *at = &c->buckets[bucket_of(c, c->entries[e].hash)];
    while (*at != e) at = &c->entries[*at].next;
    *at = c->entries[e].next;
    c->entries[e].next = c->free_head_1;
    c->free_head_1 = e + 1;
    c->n_used--;
}

void td_sim_cache_free(struct td_sim_cache *c)
{
    free(c->entries);
    free(c->buckets);
    *c = (struct td_sim_cache){0};
}
