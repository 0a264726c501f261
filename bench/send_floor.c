/* send_floor.c - `tandem-bench send-floor`: the CPU time of sending one event of a stream, and
 * nothing else. One thread sends an event to each of many connections of loopback, again and again;
 * another process reads them all. Three ways:
 *
 *   send      a send for each event: what the router and http-mock do
 *   io_uring  the sends of one round given to the kernel in one system call
 *   two       one send for two events of a stream, told per event
 *
 * The kernel takes a segment through both ends of the connection before a send returns, so the
 * receiver's work and waking it are in these times, as they are in the router's on loopback. */
#include <errno.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "bench/bench.h"
#include "common/base/clock.h"
#include "common/base/options.h"

#define PROGRAM "tandem-bench send-floor"

enum { MAX_CONNECTIONS = 8192, MAX_BYTES = 65536, MAX_ROUNDS = 10000, RING = 4096 };

static struct floor {
    uint64_t connections, bytes, rounds, pause_ms;
    int fds[MAX_CONNECTIONS];
    char event[2 * MAX_BYTES];
} bench;

#define OFF(f) offsetof(struct floor, f)
static const struct td_option options[] = {
    {"connections", TD_OPT_U64, "2000", 1, MAX_CONNECTIONS, NULL, OFF(connections), "of loopback"},
    {"bytes", TD_OPT_U64, "181", 1, MAX_BYTES, NULL, OFF(bytes), "of an event with its framing"},
    {"rounds", TD_OPT_U64, "50", 2, MAX_ROUNDS, NULL, OFF(rounds), "an event to each connection"},
    {"pause_ms", TD_OPT_U64, "20", 0, 1000, NULL, OFF(pause_ms), "between two rounds"},
    {0},
};

/* ---- the other process ----------------------------------------------------------------------- */

static void read_all(struct sockaddr_in at)
{
    static char bytes[MAX_BYTES];
    int set = epoll_create1(0);
    size_t n_open = 0;
    for (; n_open < bench.connections; n_open++) {
        struct epoll_event e = {.events = EPOLLIN, .data.fd = socket(AF_INET, SOCK_STREAM, 0)};
        if (connect(e.data.fd, (struct sockaddr *)&at, sizeof at)) _exit(1);
        epoll_ctl(set, EPOLL_CTL_ADD, e.data.fd, &e);
    }
    while (n_open) {
        struct epoll_event events[256];
        int n = epoll_wait(set, events, 256, -1);
        for (int i = 0; i < n; i++) {
            if (recv(events[i].data.fd, bytes, sizeof bytes, 0) > 0) continue;
            close(events[i].data.fd);
            n_open--;
        }
    }
    _exit(0);
}

static td_status connect_all(pid_t *ret_reader, struct td_err *err)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof at;
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct rlimit files = {2 * MAX_CONNECTIONS, 2 * MAX_CONNECTIONS};
    setrlimit(RLIMIT_NOFILE, &files); /* if it may; accept tells */
    if (bind(listener, (struct sockaddr *)&at, n) || listen(listener, 4096) ||
        getsockname(listener, (struct sockaddr *)&at, &n) || (*ret_reader = fork()) < 0)
        return td_fail(err, TD_ERR_IO, "loopback: %s", strerror(errno));
    if (!*ret_reader) read_all(at);
    for (uint64_t i = 0; i < bench.connections; i++) {
        bench.fds[i] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (bench.fds[i] < 0) return td_fail(err, TD_ERR_IO, "accept: %s", strerror(errno));
        setsockopt(bench.fds[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    close(listener);
    return TD_OK;
}

/* ---- the three ways -------------------------------------------------------------------------- */

static void send_round(size_t n_events)
{
    for (uint64_t i = 0; i < bench.connections; i++)
        if (send(bench.fds[i], bench.event, n_events * bench.bytes, MSG_DONTWAIT | MSG_NOSIGNAL) <
            0)
            fprintf(stderr, "%s: send: %s\n", PROGRAM, strerror(errno));
}

static struct ring {
    int fd;
    char *at;
    struct io_uring_params p;
    struct io_uring_sqe *sqes;
} ring;

#define RING_U32(half, field) ((uint32_t *)(void *)(ring.at + ring.p.half.field))

static bool ring_open(void)
{
    ring.fd = (int)syscall(SYS_io_uring_setup, RING, &ring.p);
    if (ring.fd < 0) return false;
    if (!(ring.p.features & IORING_FEAT_SINGLE_MMAP)) return false;
    size_t n = ring.p.cq_off.cqes + ring.p.cq_entries * sizeof(struct io_uring_cqe),
           n_sq = ring.p.sq_off.array + ring.p.sq_entries * sizeof(uint32_t);
    ring.at = mmap(NULL, n > n_sq ? n : n_sq, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                   ring.fd, IORING_OFF_SQ_RING);
    ring.sqes = mmap(NULL, ring.p.sq_entries * sizeof *ring.sqes, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_POPULATE, ring.fd, IORING_OFF_SQES);
    return ring.at != MAP_FAILED && ring.sqes != MAP_FAILED;
}

/* Sends to n connections from the first on, at most RING, and waits for all. */
static void ring_send(uint64_t first, uint32_t n)
{
    uint32_t tail = *RING_U32(sq_off, tail), mask = *RING_U32(sq_off, ring_mask);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = (tail + i) & mask;
        ring.sqes[at] = (struct io_uring_sqe){.opcode = IORING_OP_SEND,
                                              .fd = bench.fds[first + i],
                                              .addr = (uintptr_t)bench.event,
                                              .len = (uint32_t)bench.bytes,
                                              .msg_flags = MSG_DONTWAIT | MSG_NOSIGNAL};
        RING_U32(sq_off, array)[at] = at;
    }
    __atomic_store_n(RING_U32(sq_off, tail), tail + n, __ATOMIC_RELEASE);
    syscall(SYS_io_uring_enter, ring.fd, n, n, IORING_ENTER_GETEVENTS, NULL, 0);
    __atomic_store_n(RING_U32(cq_off, head),
                     __atomic_load_n(RING_U32(cq_off, tail), __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
}

static void ring_round(size_t n_events)
{
    (void)n_events;
    for (uint64_t i = 0; i < bench.connections; i += RING) {
        uint64_t left = bench.connections - i;
        ring_send(i, left < RING ? (uint32_t)left : RING);
    }
}

static void measure(const char *name, void (*round)(size_t n_events), size_t n_events)
{
    struct timespec pause = {.tv_nsec = (long)(bench.pause_ms % 1000) * 1000000};
    uint64_t ns = 0, n = bench.rounds * bench.connections;
    for (uint64_t i = 0; i < bench.rounds; i += n_events) {
        uint64_t begin = td_thread_cpu_ns();
        round(n_events);
        ns += td_thread_cpu_ns() - begin;
        clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, NULL);
    }
    printf("%s,%.2f\n", name, (double)ns / 1e3 / (double)n);
    fflush(stdout);
}

int td_bench_send_floor(int argc, char **argv)
{
    struct td_err err = {0};
    pid_t reader = -1;
    td_status s = td_options_load(options, &bench, PROGRAM, "What sending an event costs.", argc,
                                  argv, NULL, 0, NULL, &err);
    if (!s) s = connect_all(&reader, &err);
    if (!s) {
        bench.rounds += bench.rounds % 2;
        printf("way,cpu_us_an_event\n");
        measure("send", send_round, 1);
        if (ring_open())
            measure("io_uring", ring_round, 1);
        else
            printf("io_uring,not there\n");
        measure("two", send_round, 2);
    }
    for (uint64_t i = 0; i < bench.connections; i++) close(bench.fds[i]);
    if (s && reader > 0) kill(reader, SIGKILL);
    if (reader > 0) waitpid(reader, NULL, 0);
    return s ? td_die(PROGRAM, &err) : 0;
}
