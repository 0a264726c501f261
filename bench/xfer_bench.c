/* xfer_bench.c - tandem-xfer-bench: KV transfer between two processes of this host, beside what the same bytes cost without it.
 *
 * For each size, interleaved and repeated: a whole transfer (op_start to OP_DONE: every byte applied at the receiver and acknowledged) over tcp and
 * over shm; memcpy of as many bytes between two buffers as large as the pools; and a bare loop of send and recv over loopback into such a
 * buffer, with one byte of acknowledgement. Prints CSV: medians in GB/s (10^9), with the smallest and largest. Connections are warm, grants are made
 * before the clock starts. The receiver is this program again (--node). */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "tests/unit/xfer_node.h"

#define BLOCK_BYTES (64u << 10)
#define N_BLOCKS 2048
#define POOL_BYTES ((size_t)BLOCK_BYTES * N_BLOCKS)
#define REPEATS 15

enum way { TCP, SHM, MEMCPY, BARE, N_WAYS };
static const char *const way_names[] = {"tcp", "shm", "memcpy", "bare_tcp"};

struct link { /* one pair of endpoints */
    struct node *p, *d;
};

static struct node_reply ask(struct node *n, const struct node_command *c)
{
    static struct node_reply r;
    node_do(n, c, &r);
    if (r.status) {
        fprintf(stderr, "tandem-xfer-bench: error: %s\n", r.msg[0] ? r.msg : td_status_name(r.status));
        exit(1);
    }
    return r;
}

static void link_open(struct link *l, enum td_xfer_path path, const char *program)
{
    struct node_command c = {.verb = NODE_OPEN, .path = path, .shareable = true, .max_slots = 8, .max_ops = 8, .timeout_ms = 20000,
                             .block_bytes = BLOCK_BYTES, .layout_hash = 1, .n_blocks = N_BLOCKS};
    l->p = node_local();
    l->d = node_spawn(program);
    ask(l->d, &c);
    ask(l->p, &c);
    struct node_command fill = {.verb = NODE_FILL, .n = 1};
    for (int32_t i = 0; i < N_BLOCKS; i++) {
        fill.ids[0] = i;
        fill.seed = (uint64_t)i;
        ask(l->p, &fill);
    }
}

static struct td_xfer_event event(struct node *n)
{
    struct node_command c = {.verb = NODE_EVENT, .deadline_ms = 20000};
    struct node_reply r = ask(n, &c);
    if (!r.ok || r.event.kind == TD_XFER_OP_FAILED || r.event.kind == TD_XFER_SLOT_FAILED) {
        fprintf(stderr, "tandem-xfer-bench: error: %s\n", r.ok ? r.event.reason : "no event within 20 s");
        exit(1);
    }
    return r.event;
}

/* Seconds of one transfer of n blocks; `round` moves it through the pools, so that caches see new memory. */
static double transfer(struct link *l, int32_t n, int round)
{
    static struct node_command c, start, submit;
    c = (struct node_command){.verb = NODE_GRANT, .n = n};
    for (int32_t i = 0; i < n; i++) c.ids[i] = (int32_t)(((int64_t)round * n + i) % N_BLOCKS);
    struct node_reply grant = ask(l->d, &c);
    start = (struct node_command){.verb = NODE_OP, .blob_bytes = grant.blob_bytes};
    memcpy(start.blob, grant.blob, grant.blob_bytes);
    submit = (struct node_command){.verb = NODE_SUBMIT, .n = n, .final = true};
    memcpy(submit.ids, c.ids, sizeof c.ids);
    uint64_t t0 = td_now_ns();
    submit.id = ask(l->p, &start).id;
    ask(l->p, &submit);
    event(l->p);
    double seconds = (double)(td_now_ns() - t0) / 1e9;
    event(l->d);
    struct node_command check = {.verb = NODE_CHECK, .n = 1, .ids = {c.ids[n - 1]}, .seed = (uint64_t)c.ids[n - 1]};
    if (!ask(l->d, &check).ok) {
        fprintf(stderr, "tandem-xfer-bench: error: block %d arrived wrong\n", c.ids[n - 1]);
        exit(1);
    }
    struct node_command revoke = {.verb = NODE_REVOKE, .id = grant.id};
    ask(l->d, &revoke);
    event(l->d);
    return seconds;
}

/* A child that receives `size` bytes at a time into a pool-sized buffer and answers each with one byte. The size comes first, as 8 bytes. */
static int bare_open(pid_t *ret_pid)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    if (bind(listener, (struct sockaddr *)&a, sizeof a) || listen(listener, 1) || getsockname(listener, (struct sockaddr *)&a, &n)) exit(1);
    *ret_pid = fork();
    if (*ret_pid == 0) {
        int fd = accept(listener, NULL, NULL);
        uint8_t *buffer = malloc(POOL_BYTES);
        memset(buffer, 1, POOL_BYTES);
        uint64_t size, at = 0;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        while (recv(fd, &size, sizeof size, MSG_WAITALL) == sizeof size) {
            if (at + size > POOL_BYTES) at = 0;
            for (uint64_t got = 0; got < size;) {
                ssize_t k = recv(fd, buffer + at + got, size - got, 0);
                if (k <= 0) _exit(0);
                got += (uint64_t)k;
            }
            at += size;
            send(fd, "", 1, MSG_NOSIGNAL);
        }
        _exit(0);
    }
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&a, sizeof a)) exit(1);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    close(listener);
    return fd;
}

static double bare(int fd, const uint8_t *from, uint64_t size)
{
    char ack;
    uint64_t t0 = td_now_ns();
    send(fd, &size, sizeof size, MSG_NOSIGNAL | MSG_MORE);
    for (uint64_t sent = 0; sent < size;) {
        ssize_t k = send(fd, from + sent, size - sent, MSG_NOSIGNAL);
        if (k <= 0) exit(1);
        sent += (uint64_t)k;
    }
    if (recv(fd, &ack, 1, MSG_WAITALL) != 1) exit(1);
    return (double)(td_now_ns() - t0) / 1e9;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--node") == 0) return node_child_main((int)strtol(argv[2], NULL, 10));
    if (argc != 1) {
        fprintf(stderr, "usage: %s\nKV transfer between two processes of this host, as CSV: GB/s beside memcpy and a bare send/recv loop.\n", argv[0]);
        return argc == 2 && strcmp(argv[1], "--help") == 0 ? 0 : 2;
    }
    pid_t bare_pid;
    int bare_fd = bare_open(&bare_pid);
    struct link tcp, shm;
    link_open(&tcp, TD_XFER_PATH_TCP, argv[0]);
    link_open(&shm, TD_XFER_PATH_SHM, argv[0]);
    uint8_t *from = malloc(POOL_BYTES), *to = malloc(POOL_BYTES);
    if (!from || !to) return 1;
    memset(from, 2, POOL_BYTES);
    memset(to, 3, POOL_BYTES);
    printf("bytes,way,median_gbps,min_gbps,max_gbps,median_us,of_reference\n");
    for (uint64_t size = BLOCK_BYTES; size <= 64u << 20; size *= 4) {
        static double s[N_WAYS][REPEATS];
        double gbps[N_WAYS];
        int32_t n = (int32_t)(size / BLOCK_BYTES);
        for (int r = -2; r < REPEATS; r++) { /* two rounds to warm up */
            int round = r + 2;
            uint64_t at = (uint64_t)round * size % (POOL_BYTES - size + 1);
            double one[N_WAYS];
            one[TCP] = transfer(&tcp, n, round);
            one[SHM] = transfer(&shm, n, round);
            uint64_t t0 = td_now_ns();
            memcpy(to + at, from + at, size);
            one[MEMCPY] = (double)(td_now_ns() - t0) / 1e9;
            one[BARE] = bare(bare_fd, from + at, size);
            for (int w = 0; w < N_WAYS && r >= 0; w++) s[w][r] = one[w];
        }
        for (int w = 0; w < N_WAYS; w++) {
            qsort(s[w], REPEATS, sizeof s[w][0], by_value);
            gbps[w] = (double)size / s[w][REPEATS / 2] / 1e9;
        }
        for (int w = 0; w < N_WAYS; w++)
            printf("%llu,%s,%.2f,%.2f,%.2f,%.1f,%.2f\n", (unsigned long long)size, way_names[w], gbps[w], (double)size / s[w][REPEATS - 1] / 1e9,
                   (double)size / s[w][0] / 1e9, s[w][REPEATS / 2] * 1e6, gbps[w] / (w == SHM || w == MEMCPY ? gbps[MEMCPY] : gbps[BARE]));
        fflush(stdout);
    }
    close(bare_fd);
    waitpid(bare_pid, NULL, 0);
    node_free(tcp.p);
    node_free(tcp.d);
    node_free(shm.p);
    node_free(shm.d);
    free(from);
    free(to);
    return 0;
}
