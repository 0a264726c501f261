/* linger.c - see linger.h. Sockets that wait are in one list, guarded by a mutex; nobody waits with
 * it held. accept.c overrides close, shutdown and epoll_ctl, and calls td_rpc_linger_take with
 * its lock held, so these are called by their numbers here. */
#include "common/rpc/linger.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/base/clock.h"

/* TURN_BYTES: of one socket, before the others are looked at. */
enum { PIECE_BYTES = 64 << 10, TURN_BYTES = 256 << 10, LOOK_MS = 10 };

static pthread_mutex_t g_mu = PTHREAD_MUTEX_INITIALIZER;
static struct lingering {
    int fd;
    uint64_t until_ns;
} g_list[TD_RPC_MAX_LINGERING];
static int g_n;

bool td_rpc_linger_take(int fd, int epoll_fd)
{
    bool takes = false;
    pthread_mutex_lock(&g_mu);
    if (g_n < TD_RPC_MAX_LINGERING && syscall(SYS_shutdown, fd, SHUT_WR) == 0) {
        /* Its owner frees what the set's entry points to; only a real close would end the entry. */
        if (epoll_fd >= 0) syscall(SYS_epoll_ctl, epoll_fd, EPOLL_CTL_DEL, fd, NULL);
        g_list[g_n++] = (struct lingering){fd, td_deadline_after_ms(td_now_ns(), TD_RPC_LINGER_MS)};
        takes = true;
    }
    pthread_mutex_unlock(&g_mu);
    return takes;
}

/* Whether the client has closed. */
static bool throw_away(int fd)
{
    char piece[PIECE_BYTES];
    for (size_t n_bytes = 0; n_bytes < TURN_BYTES;) {
        ssize_t n = recv(fd, piece, sizeof piece, MSG_DONTWAIT);
        if (n <= 0) return n == 0 || (errno != EAGAIN && errno != EINTR);
        n_bytes += (size_t)n;
    }
    return false;
}

void td_rpc_linger_look(void)
{
    uint64_t now_ns = td_now_ns();
    pthread_mutex_lock(&g_mu);
    for (int i = g_n; i-- > 0;) {
        if (!throw_away(g_list[i].fd) && now_ns < g_list[i].until_ns) continue;
        syscall(SYS_close, g_list[i].fd);
        g_list[i] = g_list[--g_n];
    }
    pthread_mutex_unlock(&g_mu);
}

void td_rpc_linger_wait(void)
{
    struct pollfd fds[TD_RPC_MAX_LINGERING];
    for (;;) {
        td_rpc_linger_look();
        pthread_mutex_lock(&g_mu);
        int n = g_n;
        for (int i = 0; i < n; i++) fds[i] = (struct pollfd){.fd = g_list[i].fd, .events = POLLIN};
        pthread_mutex_unlock(&g_mu);
        if (!n) return;
        poll(fds, (nfds_t)n, LOOK_MS);
    }
}
