/* pool.c - one slab of objects, a stack of free indices, and a byte per object that says whether it
 * is in use.
 *
 * Invariants: (1) n_free + objects in use = n_total; (2) an index is on the free stack exactly when
 * is_used[index] is 0. Objects start on cache lines of their own, so that neighbours which
 * different threads read do not share one. */
#include "common/base/pool.h"

#include <stdlib.h>
#include <string.h>

#define CACHE_LINE 64

struct td_pool {
    uint8_t *objects;
    uint32_t *free_stack;
    uint8_t *is_used;
    size_t object_bytes, stride;
    uint32_t n_total, n_free;
};

td_status td_pool_create(size_t object_bytes, uint32_t n_objects, struct td_pool **ret_pool,
                         struct td_err *err)
{
    if (object_bytes == 0 || n_objects == 0) {
        return td_fail(err, TD_ERR_INVALID, "pool of %u objects of %zu bytes: both must be > 0",
                       n_objects, object_bytes);
    }
    if (object_bytes > SIZE_MAX / 2 / n_objects - CACHE_LINE) {
        return td_fail(err, TD_ERR_LIMIT,
                       "pool of %u objects of %zu bytes does not fit the address space", n_objects,
                       object_bytes);
    }
    size_t stride = (object_bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    struct td_pool *pool = calloc(1, sizeof *pool);
    if (!pool) goto err_nomem;
    pool->objects = aligned_alloc(CACHE_LINE, stride * n_objects);
    pool->free_stack = malloc(n_objects * sizeof *pool->free_stack);
    pool->is_used = calloc(n_objects, 1);
    if (!pool->objects || !pool->free_stack || !pool->is_used) goto err_nomem;
    /* backs the pages now, so that lack of memory shows at boot */
    memset(pool->objects, 0, stride * n_objects);
    pool->object_bytes = object_bytes;
    pool->stride = stride;
    pool->n_total = pool->n_free = n_objects;
    /* index 0 is handed out first */
    for (uint32_t i = 0; i < n_objects; i++) pool->free_stack[i] = n_objects - 1 - i;
    *ret_pool = pool;
    return TD_OK;

err_nomem:
    if (pool) {
        free(pool->is_used);
        free(pool->free_stack);
        free(pool->objects);
        free(pool);
    }
    return td_fail(err, TD_ERR_NOMEM, "pool of %u objects of %zu bytes: out of memory", n_objects,
                   object_bytes);
}

void td_pool_destroy(struct td_pool *pool)
{
    if (!pool) return;
    TD_ASSERT(pool->n_free == pool->n_total);
    free(pool->is_used);
    free(pool->free_stack);
    free(pool->objects);
    free(pool);
}

void *td_pool_get(struct td_pool *pool)
{
    if (pool->n_free == 0) return NULL;
    uint32_t index = pool->free_stack[--pool->n_free];
    pool->is_used[index] = 1;
    return memset(pool->objects + index * pool->stride, 0, pool->object_bytes);
}

uint32_t td_pool_index(const struct td_pool *pool, const void *object)
{
    uintptr_t base = (uintptr_t)pool->objects, at = (uintptr_t)object;
    TD_ASSERT(at >= base && at < base + pool->stride * pool->n_total);
    TD_ASSERT((at - base) % pool->stride == 0);
    return (uint32_t)((at - base) / pool->stride);
}

void td_pool_put(struct td_pool *pool, void *object)
{
    uint32_t index = td_pool_index(pool, object);
    TD_ASSERT(pool->is_used[index]); /* otherwise it was put twice */
    pool->is_used[index] = 0;
    pool->free_stack[pool->n_free++] = index;
}

uint32_t td_pool_n_used(const struct td_pool *pool) { return pool->n_total - pool->n_free; }
