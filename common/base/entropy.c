/* entropy.c - getrandom(2), and a page of 32 numbers for those who take one at a time. */
#include "common/base/entropy.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "common/base/status.h"

void td_random_fill(void *data, size_t n_bytes)
{
    for (uint8_t *p = data; n_bytes;) {
        ssize_t k = getrandom(p, n_bytes, 0);
        if (k < 0 && errno == EINTR) continue;
        TD_ASSERT(k > 0);
        p += k;
        n_bytes -= (size_t)k;
    }
}

/* A router takes three a request, each by a system call. So 32 are asked of the kernel at once.
 * Each is as good as one asked for alone: it is given out once, and nothing of it stays here. They
 * lie in a page that the kernel clears in a child (fork) and leaves out of core dumps: a cleared
 * page has none left and is not taken. Who finds it taken, or without a page, asks the kernel. */
struct pool {
    atomic_bool is_taken; /* by a thread, for a moment */
    uint32_t n_left;
    uint64_t numbers[32]; /* 256 bytes: getrandom gives them whole, signals or not */
};
static struct pool *g_pool; /* NULL: the kernel has no such pages */
static pthread_once_t g_pool_once = PTHREAD_ONCE_INIT;

/* A kernel or an emulator may take MADV_WIPEONFORK and not do it: qemu's user mode does so. */
static void clear_in_child(void) { memset(g_pool, 0, sizeof *g_pool); }

static void open_pool(void)
{
    struct pool *p =
        mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return;
    bool is_kept = !madvise(p, sizeof *p, MADV_WIPEONFORK) && !madvise(p, sizeof *p, MADV_DONTDUMP);
    g_pool = is_kept ? p : NULL;
    if (is_kept && !pthread_atfork(NULL, NULL, clear_in_child)) return;
    g_pool = NULL;
    munmap(p, sizeof *p);
}

uint64_t td_random_u64(void)
{
    uint64_t value;
    pthread_once(&g_pool_once, open_pool);
    if (!g_pool || atomic_exchange_explicit(&g_pool->is_taken, true, memory_order_acquire)) {
        td_random_fill(&value, sizeof value);
        return value;
    }
    struct pool *p = g_pool;
    if (!p->n_left) {
        td_random_fill(p->numbers, sizeof p->numbers);
        p->n_left = sizeof p->numbers / sizeof *p->numbers;
    }
    value = p->numbers[--p->n_left];
    p->numbers[p->n_left] = 0;
    atomic_store_explicit(&p->is_taken, false, memory_order_release);
    return value;
}
