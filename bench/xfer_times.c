/* tandem-bench xfer-times: how long the engine needs to connect to a peer, and to notice that a
 * port or a peer is gone.
 *
 *   connect   a new peer whose memory is registered, and whose process, devices and path are known:
 *             the first transfer of one block to it, less the next one. On rdma with every rail:
 *             two queue pairs each, probed in both directions
 *   port      a port of this side, or of the peer, goes down in the middle of a transfer
 *             (asynchronous event) -> the link is closed; with another rail also -> the transfer is
 *             complete over that
 *   death     in the middle of a transfer, or between two, the peer is stopped (SIGSTOP), or the
 *             network loses everything (the loopback interface of a network namespace of this
 *             program's own goes down) -> the op or slot has failed, or the connection is closed
 *
 * tandem-bench xfer-times [--repeats 9] [--only connect|port|death]: CSV; medians (least, greatest)
 * of the repeats, with the defaults of the workers.
 *
 * The peer is a child process. rdma is the provider in memory. */
#include <inttypes.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench/bench.h"
#include "common/base/clock.h"
#include "common/base/options.h"
#include "tests/unit/xfer_node.h"

#define MAX_REPEATS 101
#define WAIT_MS 20000
#define BLOCK_BYTES 65536
#define N_BLOCKS 16
#define PEER_TIMEOUT_MS 2000 /* --peer-timeout-ms */

static char fabric_path[64];
static struct node *mine, *peer;
static bool own_network;

static void need(bool ok, const char *what, const char *why)
{
    if (ok) return;
    fprintf(stderr, "tandem-bench xfer-times: %s failed%s%s\n", what, why[0] ? ": " : "", why);
    if (peer && node_pid(peer)) kill(node_pid(peer), SIGKILL);
    if (fabric_path[0]) unlink(fabric_path);
    exit(1);
}

static struct node_reply ask(struct node *n, const struct node_command *c, const char *what)
{
    struct node_reply r;
    node_do(n, c, &r);
    need(!r.status, what, r.msg);
    return r;
}

/* --- the two ends ----------------------------------------------------------------------------- */

static void end_open(struct node *n, enum td_xfer_path path, uint32_t rails)
{
    struct node_command c = {.verb = NODE_OPEN,
                             .path = path,
                             .shareable = true,
                             .max_slots = 16,
                             .max_ops = 16,
                             .timeout_ms = PEER_TIMEOUT_MS,
                             .block_bytes = BLOCK_BYTES,
                             .layout_hash = 1,
                             .n_blocks = N_BLOCKS};
    if (path == TD_XFER_PATH_RDMA)
        snprintf(c.fabric, sizeof c.fabric, "path=%s,devices=%u", fabric_path, rails);
    ask(n, &c, "opening an endpoint");
}

static void end_close(struct node *n)
{
    struct node_command c = {.verb = NODE_CLOSE};
    ask(n, &c, "closing an endpoint");
}

static void both_open(enum td_xfer_path path, uint32_t rails)
{
    static int n_fabrics;
    snprintf(fabric_path, sizeof fabric_path, "/dev/shm/tandem-bench xfer-times-%d-%d",
             (int)getpid(), n_fabrics++);
    mine = node_local();
    peer = node_spawn("/proc/self/exe");
    end_open(peer, path, rails);
    end_open(mine, path, rails);
}

static void both_close(void)
{
    node_free(mine);
    node_free(peer);
    mine = peer = NULL;
    unlink(fabric_path);
}

static struct td_xfer_event event(struct node *n)
{
    struct node_command c = {.verb = NODE_EVENT, .deadline_ms = WAIT_MS};
    struct node_reply r = ask(n, &c, "an event");
    need(r.ok, "an event", "there is none");
    return r.event;
}

static void expect(struct node *n, enum td_xfer_event_kind kind)
{
    struct td_xfer_event e = event(n);
    need(e.kind == kind, "the event that is due", e.reason);
}

static struct td_xfer_stats stats(struct node *n)
{
    struct node_command c = {.verb = NODE_STATS};
    return ask(n, &c, "statistics").stats;
}

static uint32_t start(struct node *from, struct node *to, int32_t n, uint32_t *ret_slot)
{
    struct node_command c = {.verb = NODE_GRANT, .n = n};
    for (int32_t i = 0; i < n; i++) c.ids[i] = i;
    struct node_reply r = ask(to, &c, "a grant");
    *ret_slot = r.id;
    c.verb = NODE_OP;
    c.blob_bytes = r.blob_bytes;
    memcpy(c.blob, r.blob, sizeof c.blob);
    return ask(from, &c, "an op").id;
}

static void submit(struct node *from, uint32_t op, int32_t first, int32_t n, bool final)
{
    struct node_command c = {.verb = NODE_SUBMIT, .id = op, .first = first, .n = n, .final = final};
    for (int32_t i = 0; i < n; i++) c.ids[i] = first + i;
    ask(from, &c, "a submit");
}

/* A transfer of n blocks from this side; how long it took from op_start to its event. */
static double whole(int32_t n)
{
    uint32_t slot, op;
    struct node_command c = {.verb = NODE_GRANT, .n = n};
    for (int32_t i = 0; i < n; i++) c.ids[i] = i;
    struct node_reply r = ask(peer, &c, "a grant");
    slot = r.id;
    c.verb = NODE_OP;
    c.blob_bytes = r.blob_bytes;
    memcpy(c.blob, r.blob, sizeof c.blob);
    uint64_t t = td_now_ns();
    op = ask(mine, &c, "an op").id;
    submit(mine, op, 0, n, true);
    expect(mine, TD_XFER_OP_DONE);
    double ms = (double)(td_now_ns() - t) / 1e6;
    expect(peer, TD_XFER_SLOT_READY);
    struct node_command revoke = {.verb = NODE_REVOKE, .id = slot};
    ask(peer, &revoke, "giving a slot back");
    expect(peer, TD_XFER_SLOT_FREE);
    return ms;
}

/* A transfer of which half has been moved. */
static uint32_t half(struct node *from, struct node *to)
{
    uint32_t slot;
    uint64_t before = stats(from).bytes_sent, until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    uint32_t op = start(from, to, N_BLOCKS, &slot);
    submit(from, op, 0, N_BLOCKS / 2, false);
    while (stats(from).bytes_sent < before + N_BLOCKS / 2 * BLOCK_BYTES)
        need(td_now_ns() < until, "moving half a transfer", "time is over");
    return op;
}

static double until_closed(uint64_t t0, enum td_xfer_path path)
{
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    while (stats(mine).conns_by_path[path]) {
        need(td_now_ns() < until, "the end of the connection", "time is over");
        sched_yield();
    }
    return (double)(td_now_ns() - t0) / 1e6;
}

/* --- rows ------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void row(const char *what, enum td_xfer_path path, uint32_t rails, double *ms, long n,
                const char *governs)
{
    qsort(ms, (size_t)n, sizeof *ms, by_value);
    printf("%s,%s,%u,%.3f,%.3f,%.3f,%ld,%s\n", what, td_xfer_path_name(path), rails, ms[n / 2],
           ms[0], ms[n - 1], n, governs);
    fflush(stdout);
}

static void connect_row(enum td_xfer_path path, uint32_t rails, long repeats)
{
    static double ms[MAX_REPEATS], next[MAX_REPEATS];
    both_open(path, rails);
    whole(1); /* first touch of everything on this side */
    for (long i = 0; i < repeats; i++) {
        end_close(peer);
        end_open(peer, path, rails);
        double first = whole(1);
        next[i] = whole(1);
        ms[i] = first - next[i];
    }
    both_close();
    row("connect", path, rails, ms, repeats, "");
    row("next transfer of 64 KiB", path, rails, next, repeats, "");
}

static void port_row(uint32_t rails, bool of_peer, long repeats)
{
    static double closed[MAX_REPEATS], over[MAX_REPEATS];
    for (long i = 0; i < repeats; i++) {
        both_open(TD_XFER_PATH_RDMA, rails);
        whole(N_BLOCKS);
        uint32_t op = half(mine, peer), at = td_fake_node(node_fabric(mine));
        uint64_t t0 = td_now_ns();
        need(td_fake_port_set(node_fabric(mine), of_peer ? 1 - at : at, 0, 1, false),
             "taking the port down", "");
        closed[i] = until_closed(t0, TD_XFER_PATH_RDMA);
        if (rails > 1) submit(mine, op, N_BLOCKS / 2, N_BLOCKS / 2, true);
        expect(mine, rails > 1 ? TD_XFER_OP_DONE : TD_XFER_OP_FAILED);
        over[i] = (double)(td_now_ns() - t0) / 1e6;
        both_close();
    }
    row(of_peer ? "the peer's port down: link closed" : "port down: link closed", TD_XFER_PATH_RDMA,
        rails, closed, repeats, "asynchronous event");
    row(rails > 1 ? "... transfer complete over the other rail" : "... op failed",
        TD_XFER_PATH_RDMA, rails, over, repeats,
        rails > 1 ? "quarantine: four ACK time-outs (2^16 x 4.096 us)"
                  : "no other rail with --transfer rdma");
}

/* The loopback interface of this program's network namespace. */
static bool loopback(bool up)
{
    struct ifreq ask = {.ifr_name = "lo", .ifr_flags = up ? IFF_UP : 0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool ok = fd >= 0 && !ioctl(fd, SIOCSIFFLAGS, &ask);
    if (fd >= 0) close(fd);
    return ok;
}

enum role { SENDER, RECEIVER, IDLE, CUT };

static void death_row(enum td_xfer_path path, enum role role, long repeats)
{
    static const char *const names[] = {"peer stopped: op failed", "peer stopped: slot failed",
                                        "peer stopped: idle connection closed",
                                        "network lost: op failed"};
    static double ms[MAX_REPEATS];
    for (long i = 0; i < repeats; i++) {
        both_open(path, 1);
        if (role != RECEIVER) whole(N_BLOCKS);
        if (role != IDLE) half(role == RECEIVER ? peer : mine, role == RECEIVER ? mine : peer);
        uint64_t t0 = td_now_ns();
        int status;
        if (role == CUT)
            need(loopback(false), "taking the interface down", "");
        else
            need(!kill(node_pid(peer), SIGSTOP) &&
                     waitpid(node_pid(peer), &status, WUNTRACED) == node_pid(peer),
                 "stopping the peer", "");
        if (role == IDLE) {
            ms[i] = until_closed(t0, path);
        } else {
            expect(mine, role == RECEIVER ? TD_XFER_SLOT_FAILED : TD_XFER_OP_FAILED);
            ms[i] = (double)(td_now_ns() - t0) / 1e6;
        }
        if (role == CUT)
            need(loopback(true), "taking the interface up", "");
        else
            kill(node_pid(peer), SIGCONT);
        both_close();
    }
    row(names[role], path, 1, ms, repeats, "--peer-timeout-ms 2000");
}

struct config {
    int64_t repeats;
    const char *only;
};
static struct config cfg;

// clang-format off
static const struct td_option options[] = {
    {"repeats", TD_OPT_I64, "9", 1, MAX_REPEATS, NULL, offsetof(struct config, repeats),
     "runs of each row, whose median is told"},
    {"only", TD_OPT_ENUM, "all", 0, 0, "all|connect|port|death", offsetof(struct config, only),
     "one of the three parts"},
    {0},
};
// clang-format on

int td_bench_xfer_times(int argc, char **argv)
{
    struct td_err err = {0};
    if (td_options_load(options, &cfg, "tandem-bench xfer-times",
                        "how long connecting to a peer takes, and noticing that it is gone", argc,
                        argv, NULL, 0, NULL, &err))
        return td_die("tandem-bench xfer-times", &err);
    long repeats = (long)cfg.repeats;
    const char *only = strcmp(cfg.only, "all") ? cfg.only : "";
    own_network = !unshare(CLONE_NEWNET) && loopback(true);
    printf("what,path,rails,ms,ms_least,ms_greatest,repeats,governed_by\n");
    for (uint32_t rails = 1; !only[0] || !strcmp(only, "connect"); rails *= 2) {
        if (rails == 1) connect_row(TD_XFER_PATH_SHM, 0, repeats);
        if (rails == 1) connect_row(TD_XFER_PATH_TCP, 0, repeats);
        connect_row(TD_XFER_PATH_RDMA, rails, repeats);
        if (rails == 8) break;
    }
    if (!only[0] || !strcmp(only, "port")) {
        port_row(1, false, repeats);
        port_row(1, true, repeats);
        port_row(2, false, repeats);
    }
    if (!only[0] || !strcmp(only, "death")) {
        static const enum td_xfer_path paths[] = {TD_XFER_PATH_TCP, TD_XFER_PATH_SHM,
                                                  TD_XFER_PATH_RDMA};
        for (int i = 0; i < 3; i++)
            for (enum role role = SENDER; role <= IDLE; role++) death_row(paths[i], role, repeats);
        if (own_network) death_row(TD_XFER_PATH_TCP, CUT, repeats);
        if (own_network) death_row(TD_XFER_PATH_RDMA, CUT, repeats);
        if (!own_network)
            fprintf(stderr,
                    "tandem-bench xfer-times: no rows of a lost network: that takes a network "
                    "namespace (root, or unshare -rn)\n");
    }
    return 0;
}
