/* rpc_accept_test.c - the listener's guard on a kernel that gives sockets no cookies: Linux before
 * 4.12, or qemu's emulation of one. A filter of the test's own thread makes this kernel one. */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/rpc/accept.h"

/* What was seen. cmocka's assertions jump, which a thread of one's own cannot. */
struct seen {
    bool has_cookies; /* still: there is no filter here, and no emulation */
    int accepted, added, errno_after;
    uint32_t open_before, open_after;
};

/* From now on getsockopt(2) of this thread knows no SO_COOKIE. */
static void take_cookies_away(void)
{
    enum { ARG_OPTNAME = 2 };
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getsockopt, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[ARG_OPTNAME])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SO_COOKIE, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof code[0], code};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* A connection is accepted, core watches it, it is closed. */
static void *one_connection(void *arg)
{
    struct seen *seen = arg;
    take_cookies_away();
    struct sockaddr_in at = {.sin_family = AF_INET};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t n = sizeof at, n_cookie = sizeof(uint64_t);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), set = epoll_create1(EPOLL_CLOEXEC);
    uint64_t cookie;
    seen->has_cookies = getsockopt(client, SOL_SOCKET, SO_COOKIE, &cookie, &n_cookie) == 0;
    if (bind(listener, (struct sockaddr *)&at, sizeof at) == 0 && listen(listener, 1) == 0 &&
        getsockname(listener, (struct sockaddr *)&at, &n) == 0 &&
        connect(client, (struct sockaddr *)&at, sizeof at) == 0) {
        struct td_rpc_guard_config config = {.port = ntohs(at.sin_port)};
        struct td_rpc_guard *guard = td_rpc_guard_open(&config);
        struct td_rpc_guard_stats stats;
        seen->accepted = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        struct epoll_event event = {.events = EPOLLIN};
        errno = EINPROGRESS;
        seen->added = epoll_ctl(set, EPOLL_CTL_ADD, seen->accepted, &event);
        seen->errno_after = errno;
        td_rpc_guard_stats(guard, &stats);
        seen->open_before = stats.open;
        close(seen->accepted);
        td_rpc_guard_stats(guard, &stats);
        seen->open_after = stats.open;
        td_rpc_guard_close(guard);
    }
    close(set);
    close(client);
    close(listener);
    return NULL;
}

/* Core adds a socket to its epoll set between connect(2) and its look at connect's errno: an errno
 * that the guard left there made every connection of that descriptor fail. And a connection that is
 * over is not counted for ever. */
static void test_without_cookies(void **state)
{
    (void)state;
    struct seen seen = {.accepted = -1};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, one_connection, &seen), 0);
    pthread_join(thread, NULL);
    if (seen.has_cookies) {
        print_message("no seccomp here: not tested\n");
        skip();
    }
    assert_true(seen.accepted >= 0);
    assert_int_equal(seen.added, 0);
    assert_int_equal(seen.errno_after, EINPROGRESS);
    assert_int_equal(seen.open_before, 1);
    assert_int_equal(seen.open_after, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_without_cookies)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
