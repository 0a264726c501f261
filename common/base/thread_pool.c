/* thread_pool.c - a team of threads that starts, meets and ends without locks.
 *
 *      caller                              member
 *   fn, ctx, n_running = n-1
 *   job_seq++  ------------------------>  sees a new job_seq, runs fn(ctx, part, n)
 *   runs part 0                           n_running--; the member that makes it 0 wakes a
 *   waits for n_running == 0  <---------  sleeping caller
 *
 * Barrier: the last member to arrive resets n_arrived and increments barrier_phase (the "sense");
 * the others wait for the phase to change. A member reads the phase before it arrives, and the
 * phase cannot change before it has arrived, so no member can be lapped.
 *
 * Waiting (wait_change): spin with pause for spin_ns, then sleep on a futex on the 32-bit value
 * that will change. The waiter raises n_sleepers before it looks at the value for the last time,
 * and the changer looks at n_sleepers after it has changed the value. Both are sequentially
 * consistent, so at least one of them sees the other and no wake-up is lost. When nobody sleeps, no
 * system call is made.
 *
 * A spinning thread yields between looks at the clock: when the scheduler has put it on the CPU of
 * the very member that it waits for, a pure spin wastes all of spin_ns each time. Measured with 2
 * members on 2 CPUs that other work kept busy, spin 50 and 100 us, 4 runs each: with pauses only,
 * 1.2 to 208 us for an empty run and 0.6 to 52 us for a barrier; with yields, 1.6 to 5.6 us and 0.6
 * to 2.9 us.
 *
 * When there are more members than CPUs, a spinning thread keeps the member that it waits for from
 * running, so such a team sleeps at once. */
#include "common/base/thread_pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

#include "common/base/cgroup.h"
#include "common/base/clock.h"

#define MAX_THREADS 1024
#define PAUSES_PER_LOOK 32 /* pauses between looks at the clock: 32 take 1 to 2 us */

/* A 32-bit value that threads wait on, alone on its cache line. */
struct wait_word {
    alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t n_sleepers;
};

struct member {
    struct td_thread_pool *pool;
    pthread_t thread;
    int part;
};

struct td_thread_pool {
    struct wait_word job_seq;       /* the caller increments it; members wait */
    struct wait_word n_running;     /* members count it down; caller waits for 0 */
    struct wait_word barrier_phase; /* the last to arrive increments it; the others wait */
    alignas(64) _Atomic uint32_t n_arrived;
    alignas(64) td_part_fn fn; /* written by the caller before job_seq moves */
    void *ctx;
    bool is_closing;
    int n_threads, n_started;
    uint64_t spin_ns;
    struct member *members; /* [n_threads]; member 0 is the caller and has no thread */
};

static inline void cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}
static void futex_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Waits until the value is not `seen`; returns the new one (acquire). */
static uint32_t wait_change(struct wait_word *w, uint32_t seen, uint64_t spin_ns)
{
    uint32_t now = atomic_load_explicit(&w->value, memory_order_acquire);
    if (now != seen) return now;
    if (spin_ns > 0) {
        uint64_t end_ns = td_now_ns() + spin_ns;
        do {
            for (int i = 0; i < PAUSES_PER_LOOK; i++) {
                cpu_pause();
                now = atomic_load_explicit(&w->value, memory_order_acquire);
                if (now != seen) return now;
            }
            sched_yield();
        } while (td_now_ns() < end_ns);
    }
    atomic_fetch_add(&w->n_sleepers, 1);
    while ((now = atomic_load(&w->value)) == seen) futex_wait(&w->value, seen);
    atomic_fetch_sub(&w->n_sleepers, 1);
    return now;
}

/* Called after the value was changed with sequential consistency. */
static void wake_sleepers(struct wait_word *w)
{
    if (atomic_load(&w->n_sleepers) > 0) futex_wake_all(&w->value);
}

static void *member_main(void *arg)
{
    struct member *me = arg;
    struct td_thread_pool *pool = me->pool;
    uint32_t seq = 0; /* the pool starts with job_seq 0, so the first job is never missed */
    for (;;) {
        seq = wait_change(&pool->job_seq, seq, pool->spin_ns);
        if (pool->is_closing) return NULL;
        pool->fn(pool->ctx, me->part, pool->n_threads);
        if (atomic_fetch_sub(&pool->n_running.value, 1) == 1) wake_sleepers(&pool->n_running);
    }
}

static td_status pin_thread(pthread_t thread, int cpu, int part, struct td_err *err)
{
    if (cpu < 0 || cpu >= CPU_SETSIZE) {
        return td_fail(err, TD_ERR_INVALID, "thread %d: CPU %d is out of range, must be 0..%d",
                       part, cpu, CPU_SETSIZE - 1);
    }
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    int e = pthread_setaffinity_np(thread, sizeof set, &set);
    if (e)
        return td_fail(err, TD_ERR_INVALID, "thread %d cannot run on CPU %d: %s", part, cpu,
                       strerror(e));
    return TD_OK;
}

td_status td_thread_pool_create(int n_threads, const int *cpus, unsigned spin_us,
                                struct td_thread_pool **ret_pool, struct td_err *err)
{
    if (n_threads < 1 || n_threads > MAX_THREADS) {
        return td_fail(err, TD_ERR_INVALID, "thread pool: n_threads is %d, must be 1..%d",
                       n_threads, MAX_THREADS);
    }
    struct td_thread_pool *pool = aligned_alloc(alignof(struct td_thread_pool), sizeof *pool);
    if (!pool) return td_fail(err, TD_ERR_NOMEM, "thread pool: out of memory");
    memset(pool, 0, sizeof *pool);
    pool->n_threads = n_threads;
    pool->n_started = 1;
    pool->spin_ns = n_threads > td_cpus_usable("") ? 0 : spin_us * TD_NS_PER_US;

    td_status s;
    pool->members = calloc((size_t)n_threads, sizeof *pool->members);
    if (!pool->members) {
        s = td_fail(err, TD_ERR_NOMEM, "thread pool: out of memory");
        goto err_destroy;
    }
    /* Members start with all signals blocked, because the main thread handles them (SIGTERM starts
     * a drain). */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int e = 0;
    for (int i = 1; i < n_threads && e == 0; i++) {
        struct member *m = &pool->members[i];
        m->pool = pool;
        m->part = i;
        e = pthread_create(&m->thread, NULL, member_main, m);
        if (e) break;
        pool->n_started++;
        char name[16];
        snprintf(name, sizeof name, "td-part-%d", i);
        pthread_setname_np(m->thread, name);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (e) {
        s = td_fail(err, TD_ERR_NOMEM, "thread pool: cannot start thread %d of %d: %s",
                    pool->n_started, n_threads, strerror(e));
        goto err_destroy;
    }
    /* The caller's thread is pinned last, so that its affinity is unchanged when pinning another
     * one fails. */
    for (int i = n_threads - 1; cpus && i >= 0; i--) {
        s = pin_thread(i == 0 ? pthread_self() : pool->members[i].thread, cpus[i], i, err);
        if (s) goto err_destroy;
    }
    *ret_pool = pool;
    return TD_OK;

err_destroy:
    td_thread_pool_destroy(pool);
    return s;
}

void td_thread_pool_destroy(struct td_thread_pool *pool)
{
    if (!pool) return;
    pool->is_closing = true;
    atomic_fetch_add(&pool->job_seq.value, 1);
    wake_sleepers(&pool->job_seq);
    for (int i = 1; i < pool->n_started; i++) pthread_join(pool->members[i].thread, NULL);
    free(pool->members);
    free(pool);
}

int td_thread_pool_size(const struct td_thread_pool *pool) { return pool->n_threads; }

void td_thread_pool_run(struct td_thread_pool *pool, td_part_fn fn, void *ctx)
{
    if (pool->n_threads == 1) {
        fn(ctx, 0, 1);
        return;
    }
    pool->fn = fn;
    pool->ctx = ctx;
    atomic_store_explicit(&pool->n_running.value, (uint32_t)pool->n_threads - 1,
                          memory_order_relaxed);
    atomic_fetch_add(&pool->job_seq.value, 1);
    wake_sleepers(&pool->job_seq);
    fn(ctx, 0, pool->n_threads);
    uint32_t left = atomic_load_explicit(&pool->n_running.value, memory_order_acquire);
    while (left > 0) left = wait_change(&pool->n_running, left, pool->spin_ns);
}

void td_thread_pool_barrier(struct td_thread_pool *pool)
{
    if (pool->n_threads == 1) return;
    uint32_t phase = atomic_load_explicit(&pool->barrier_phase.value, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&pool->n_arrived, 1, memory_order_acq_rel) + 1 ==
        (uint32_t)pool->n_threads) {
        /* published by the change of phase below */
        atomic_store_explicit(&pool->n_arrived, 0, memory_order_relaxed);
        atomic_fetch_add(&pool->barrier_phase.value, 1);
        wake_sleepers(&pool->barrier_phase);
        return;
    }
    wait_change(&pool->barrier_phase, phase, pool->spin_ns);
}

/* One decimal number of at most 6 digits; moves *p past it. */
static bool parse_cpu(const char **p, int *ret_cpu)
{
    int value = 0, n_digits = 0;
    for (; **p >= '0' && **p <= '9' && n_digits < 6; (*p)++, n_digits++)
        value = value * 10 + (**p - '0');
    *ret_cpu = value;
    return n_digits > 0;
}

td_status td_parse_cpu_list(const char *text, int *cpus, int max, int *ret_n, struct td_err *err)
{
    int n = 0;
    for (const char *p = text;; p++) {
        int first, last;
        if (!parse_cpu(&p, &first)) goto err_syntax;
        last = first;
        if (*p == '-') {
            p++;
            if (!parse_cpu(&p, &last)) goto err_syntax;
        }
        if (last < first || last >= CPU_SETSIZE) goto err_syntax;
        for (int cpu = first; cpu <= last; cpu++) {
            if (n == max)
                return td_fail(err, TD_ERR_LIMIT, "CPU list '%s' names more than %d CPUs", text,
                               max);
            cpus[n++] = cpu;
        }
        if (*p == '\0') break;
        if (*p != ',') goto err_syntax;
    }
    *ret_n = n;
    return TD_OK;

err_syntax:
    return td_fail(err, TD_ERR_INVALID,
                   "CPU list is '%s', must look like 0-3,8 with CPUs of 0..%d in rising ranges",
                   text, CPU_SETSIZE - 1);
}

td_status td_check_cpu_list(const int *cpus, int n, struct td_err *err)
{
    long n_here = sysconf(_SC_NPROCESSORS_CONF);
    for (int i = 0; i < n; i++)
        if (cpus[i] >= n_here)
            return td_fail(err, TD_ERR_INVALID, "CPU %d is not there: this machine has CPUs 0..%ld",
                           cpus[i], n_here - 1);
    return TD_OK;
}
