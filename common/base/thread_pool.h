/* thread_pool.h - a fixed team of threads that run one function together, with a barrier, for the
 * forward pass.
 *
 * Created at boot. A run never allocates, and takes no lock on the fast path: members spin briefly,
 * then sleep on a futex. The caller's thread is member 0, so a pool of 1 has no thread of its own.
 * One owning thread may call run. */
#ifndef TD_BASE_THREAD_POOL_H
#define TD_BASE_THREAD_POOL_H

#include "common/base/status.h"

struct td_thread_pool;

/* n_threads >= 1. `cpus` is NULL (no pinning), or n_threads CPU numbers to pin members to (member 0
 * = the calling thread). spin_us: how long a member without work spins before it sleeps (0 = sleep
 * at once; 50 is a good value when cores are free). */
td_status td_thread_pool_create(int n_threads, const int *cpus, unsigned spin_us,
                                struct td_thread_pool **ret_pool, struct td_err *err);
void td_thread_pool_destroy(struct td_thread_pool *pool); /* NULL is fine */

int td_thread_pool_size(const struct td_thread_pool *pool);

/* Runs fn(ctx, part, n_parts) on every member (part = 0..n_parts-1) and returns when all have
 * returned. The caller then sees all writes of all members. */
typedef void (*td_part_fn)(void *ctx, int part, int n_parts);
void td_thread_pool_run(struct td_thread_pool *pool, td_part_fn fn, void *ctx);

/* Called inside a run only, by every member the same number of times: waits for all. Writes before
 * it are visible after it. */
void td_thread_pool_barrier(struct td_thread_pool *pool);

/* Parses "0-3,8" into {0,1,2,3,8}. cpus[] has room for max numbers. */
td_status td_parse_cpu_list(const char *text, int *cpus, int max, int *ret_n, struct td_err *err);
/* TD_ERR_INVALID when the list names a CPU that this machine does not have. */
td_status td_check_cpu_list(const int *cpus, int n, struct td_err *err);

#endif
