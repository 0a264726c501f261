/* linger.c - see linger.h. Sockets that wait are in one list, guarded by a mutex. A look takes the
 * list out, so that it alone owns these sockets, reads them without the mutex, and puts back what
 * is not over. Nobody waits or reads with the mutex held: td_rpc_linger_take is called with
 * accept.c's lock held, behind which each accept and each read of the process would wait. accept.c
 * overrides close, shutdown and epoll_ctl, so these are called by their numbers here. */
#include "common/rpc/linger.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/base/clock.h"

/* TURN_BYTES: of one socket, before the others are looked at. */
enum { PIECE_BYTES = 64 << 10, TURN_BYTES = 256 << 10 };

static pthread_mutex_t g_mu = PTHREAD_MUTEX_INITIALIZER;
static struct lingering {
    int fd;
    uint64_t until_ns;
} g_list[TD_RPC_MAX_LINGERING];
static int g_n;
static int g_n_out; /* of those that wait: taken out by looks, which put them back or close them */

bool td_rpc_linger_take(int fd, int epoll_fd)
{
    bool takes = false;
    pthread_mutex_lock(&g_mu);
    if (g_n + g_n_out < TD_RPC_MAX_LINGERING && syscall(SYS_shutdown, fd, SHUT_WR) == 0) {
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
    struct lingering mine[TD_RPC_MAX_LINGERING];
    pthread_mutex_lock(&g_mu);
    int n = g_n, n_left = 0;
    memcpy(mine, g_list, (size_t)n * sizeof *mine);
    g_n = 0;
    g_n_out += n;
    pthread_mutex_unlock(&g_mu);
    if (!n) return;
    for (int i = 0; i < n; i++) {
        if (!throw_away(mine[i].fd) && td_now_ns() < mine[i].until_ns)
            mine[n_left++] = mine[i];
        else
            syscall(SYS_close, mine[i].fd);
    }
    pthread_mutex_lock(&g_mu);
    memcpy(g_list + g_n, mine, (size_t)n_left * sizeof *mine);
    g_n += n_left;
    g_n_out -= n;
    pthread_mutex_unlock(&g_mu);
}

void td_rpc_linger_wait(void)
{
    struct pollfd fds[TD_RPC_MAX_LINGERING];
    for (;;) {
        td_rpc_linger_look();
        pthread_mutex_lock(&g_mu);
        /* Another look may close one of these meanwhile: then poll returns early, or late. */
        int n = g_n, n_all = g_n + g_n_out;
        for (int i = 0; i < n; i++) fds[i] = (struct pollfd){.fd = g_list[i].fd, .events = POLLIN};
        pthread_mutex_unlock(&g_mu);
        if (!n_all) return;
        poll(fds, (nfds_t)n, TD_RPC_LINGER_LOOK_MS);
    }
}
