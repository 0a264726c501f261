/* thread_pool.h - a fixed team of threads that run one function together, with a barrier, for the
 * forward pass.
 *
 * Created at boot; a run never allocates or takes a lock on the fast path: workers spin briefly,
 * then sleep on a futex. The caller's thread is member 0, so a pool of 1 has no thread of its
 * own. One owner thread may call run. */
#ifndef TD_BASE_THREAD_POOL_H
#define TD_BASE_THREAD_POOL_H

#include "common/base/status.h"

struct td_thread_pool;

/* n_threads >= 1. `cpus` is NULL (no pinning) or n_threads CPU numbers to pin members to (member
 * 0 = the calling thread). spin_us: how long an idle member spins before it sleeps (0 = sleep at
 * once; 50 is a good default when cores are free). */
td_status td_thread_pool_create(int n_threads, const int *cpus, unsigned spin_us,
                                struct td_thread_pool **ret_pool, struct td_err *err);
void td_thread_pool_destroy(struct td_thread_pool *pool); /* NULL is fine */

int td_thread_pool_size(const struct td_thread_pool *pool);

/* Runs fn(ctx, part, n_parts) on every member (part = 0..n_parts-1) and returns when all have
 * returned. All writes of all members are visible to the caller then. */
typedef void (*td_part_fn)(void *ctx, int part, int n_parts);
void td_thread_pool_run(struct td_thread_pool *pool, td_part_fn fn, void *ctx);

/* Inside a run only, called by every member the same number of times: waits for all; writes
 * before it are visible after it. */
void td_thread_pool_barrier(struct td_thread_pool *pool);

/* "0-3,8" -> {0,1,2,3,8}. cpus[] has room for max. */
td_status td_parse_cpu_list(const char *text, int *cpus, int max, int *ret_n, struct td_err *err);

#endif
