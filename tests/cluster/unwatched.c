/* unwatched.c - preloaded into a daemon: an epoll set that was taken out of another one does not
 * get in again for a second after the first time, as when the kernel has no memory or the user no
 * watches left. */
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static atomic_llong refused_until_ms;
static atomic_int n_taken_out;

static long long now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000ll + t.tv_nsec / 1000000;
}

static bool is_epoll_set(int fd)
{
    char path[64], target[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n < 0) return false;
    target[n] = '\0';
    return strcmp(target, "anon_inode:[eventpoll]") == 0;
}

/* The daemon has an epoll_ctl of its own (common/rpc/accept.c), which calls this. */
__attribute__((visibility("default"))) long syscall(long number, ...)
{
    long (*real)(long, ...);
    void *found = dlsym(RTLD_NEXT, "syscall");
    memcpy(&real, &found, sizeof real);
    long x[6];
    va_list args;
    va_start(args, number);
    for (int i = 0; i < 6; i++) x[i] = va_arg(args, long);
    va_end(args);
    bool is_watch = number == SYS_epoll_ctl && x[1] == EPOLL_CTL_ADD && is_epoll_set((int)x[2]);
    if (is_watch && now_ms() < atomic_load(&refused_until_ms)) {
        errno = ENOMEM;
        return -1;
    }
    bool is_end = number == SYS_epoll_ctl && x[1] == EPOLL_CTL_DEL && is_epoll_set((int)x[2]);
    long rc = real(number, x[0], x[1], x[2], x[3], x[4], x[5]);
    if (is_end && rc == 0 && atomic_fetch_add(&n_taken_out, 1) == 0)
        atomic_store(&refused_until_ms, now_ms() + 1000);
    return rc;
}
