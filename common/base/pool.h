/* pool.h - a pool of objects of one size, all allocated at boot: get and put never call malloc. Not
 * thread-safe: one owning thread. */
#ifndef TD_BASE_POOL_H
#define TD_BASE_POOL_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_pool;

td_status td_pool_create(size_t object_bytes, uint32_t n_objects, struct td_pool **ret_pool,
                         struct td_err *err);
/* asserts that every object has been put back; NULL is allowed */
void td_pool_destroy(struct td_pool *pool);
/* a zeroed object; NULL when none is left: the caller answers TD_ERR_AGAIN */
void *td_pool_get(struct td_pool *pool);
/* asserts on a double put and on a pointer that is not of this pool */
void td_pool_put(struct td_pool *pool, void *object);
/* the object's number, 0..n-1, which never changes */
uint32_t td_pool_index(const struct td_pool *pool, const void *object);
uint32_t td_pool_n_used(const struct td_pool *pool);

#endif
