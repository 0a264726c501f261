/* xfer_node.c - see xfer_node.h. */
#include "common/base/random.h"
#include "tests/unit/xfer_node.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/cluster_secret.h"
#include "common/base/wakeup.h"
#include "common/base/fault.h"
#include "common/base/entropy.h"
#include "common/transfer/rdma/verbs.h"
#include "common/transfer/tls.h"
#include "tests/fake/fake_device.h"

struct node {
    pid_t pid; /* child, or 0 */
    int fd;
    struct td_xfer *x;
    struct td_arena arena;
    struct fake_device *device;
    uint8_t *pool; /* the pool's bytes for this program: the arena, or what stands
                      behind the device's addresses */
    struct td_wakeup wakeup;
    uint64_t block_bytes;
    struct td_xfer_event path, refusal; /* the last PATH_CHOSEN, the last PEER_REFUSED */
    uint32_t n_refusals;
    struct td_cluster_secret *secret;
    struct td_fake_fabric *fabric;
    struct td_verbs verbs; /* the fabric's, with a look at device memory in front */
};

static uint64_t mix(uint64_t v) { return td_keyed_step(&v); }

void node_fill_bytes(uint8_t *to, uint64_t n_bytes, uint64_t seed)
{
    uint64_t i = 0, v = mix(seed);
    for (; i + 8 <= n_bytes; i += 8) {
        memcpy(to + i, &v, 8);
        td_random_step(&v);
    }
    for (; i < n_bytes; i++) to[i] = (uint8_t)(seed + i);
}

bool node_check_bytes(const uint8_t *from, uint64_t n_bytes, uint64_t seed)
{
    uint64_t i = 0, v = mix(seed), w;
    for (; i + 8 <= n_bytes; i += 8) {
        memcpy(&w, from + i, 8);
        if (w != v) return false;
        td_random_step(&v);
    }
    for (; i < n_bytes; i++)
        if (from[i] != (uint8_t)(seed + i)) return false;
    return true;
}

static void ring(void *ctx) { td_wakeup_signal(ctx); }

static uint64_t deadline_of(uint64_t ms)
{
    return ms ? td_deadline_after_ms(td_now_ns(), ms) : TD_NEVER_NS;
}

/* A NIC whose kernel has nvidia_peermem: the plain call registers addresses of a device, too.
 * What the fake provider's own do is the same for all nodes. */
static int (*plain_reg)(struct td_vb_device *d, void *addr, uint64_t bytes, unsigned access,
                        struct td_vb_mr **ret_mr);
static int (*dmabuf_reg)(struct td_vb_device *d, uint64_t offset, uint64_t bytes, uint64_t iova,
                         int fd, unsigned access, struct td_vb_mr **ret_mr);

static int peermem_reg(struct td_vb_device *d, void *addr, uint64_t bytes, unsigned access,
                       struct td_vb_mr **ret_mr)
{
    uint64_t offset;
    int fd;
    if (!fake_device_peermem(addr, bytes, &fd, &offset))
        return plain_reg(d, addr, bytes, access, ret_mr);
    return dmabuf_reg(d, offset, bytes, (uint64_t)(uintptr_t)addr, fd, access, ret_mr);
}

/* The provider that the command names; the fabric is the node's until it closes. */
static td_status open_verbs(struct node *n, const char *text, struct td_xfer_rdma_config *rdma,
                            struct td_err *err)
{
    struct td_fake_options options;
    char path[256];
    if (!strncmp(text, "real:", 5)) {
        rdma->devices = text + 5;
        return td_verbs_load(&rdma->verbs, err);
    }
    td_status status = td_fake_options_parse(text, &options, path, err);
    if (!status) options.path = path;
    if (!status) status = td_fake_fabric_open(&options, &n->fabric, err);
    if (status) return status;
    n->verbs = *td_fake_verbs(n->fabric);
    if (!plain_reg) { /* once: threads of nodes that stand read them */
        plain_reg = n->verbs.reg;
        dmabuf_reg = n->verbs.reg_dmabuf;
    }
    n->verbs.reg = peermem_reg;
    rdma->verbs = &n->verbs;
    return TD_OK;
}

static void open_node(struct node *n, const struct node_command *c, struct node_reply *r,
                      struct td_err *err)
{
    struct td_xfer_rdma_config rdma = {.gid_index = -1,
                                       .timeout = c->ib_timeout,
                                       .retry = c->ib_retry,
                                       .rnr_retry = c->rnr_never_waits ? 1 : 0,
                                       .qps_per_rail = c->qps_per_rail,
                                       .srq_peers = c->srq_peers,
                                       .pull = c->pull,
                                       .windows = c->windows,
                                       .gpu_flush = c->gpu_flush};
    char cert[160], key[160];
    struct td_xfer_tls_config tls = {.cert_file = cert, .key_file = key, .ca_file = c->tls_ca};
    snprintf(cert, sizeof cert, "%s.crt", c->tls);
    snprintf(key, sizeof key, "%s.key", c->tls);
    struct td_xfer_config config = {
        .instance = "node",
        .incarnation = td_random_u64(),
        .layout_hash = c->layout_hash,
        .listen_host = "127.0.0.1",
        .listen_port = c->port,
        .path = c->path,
        .max_slots = c->max_slots,
        .max_ops = c->max_ops,
        .peer_timeout_ms = c->timeout_ms,
        .tcp_lanes = c->lanes,
        .tcp_zerocopy = c->zerocopy,
        .digest_every = c->digest_every,
        .rdma = c->fabric[0] ? &rdma : NULL,
        .tls = c->tls[0] ? &tls : NULL,
        .hooks = {.wake = ring, .ctx = &n->wakeup},
    };
    r->status = td_wakeup_open(&n->wakeup, err);
    if (!r->status && c->fabric[0]) r->status = open_verbs(n, c->fabric, &rdma, err);
    if (!r->status && c->device[0]) {
        n->device = fake_device_open(c->device);
        config.memory = fake_device_memory(n->device);
        n->arena =
            (struct td_arena){.bytes = c->block_bytes * (uint64_t)c->n_blocks + 64, .memfd = -1};
        n->arena.base = fake_device_alloc(n->device, n->arena.bytes);
        n->pool = fake_device_bytes(n->device, n->arena.base);
    } else if (!r->status) {
        r->status = td_arena_create(c->block_bytes * (uint64_t)c->n_blocks, c->shareable,
                                    "xfer-test", &n->arena, err);
        n->pool = n->arena.base;
    }
    if (!r->status && c->secret[0]) r->status = td_cluster_secret_load(c->secret, &n->secret, err);
    config.secret = n->secret;
    if (!r->status) r->status = td_xfer_open(&config, &n->x, err);
    if (!r->status) r->status = td_xfer_mem_add(n->x, &n->arena, c->block_bytes, c->n_blocks, err);
    for (int fd = 3, bytes = 32768, on = 0; c->small_sockets && fd < 1024; fd++) {
        socklen_t size = sizeof on;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &on, &size) == 0 && on)
            setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
    }
    n->block_bytes = c->block_bytes;
    if (n->x) r->port = td_xfer_port(n->x);
}

static void close_node(struct node *n)
{
    td_xfer_close(n->x);
    n->x = NULL;
    td_cluster_secret_destroy(n->secret);
    n->secret = NULL;
    if (n->arena.base && !n->device) td_arena_destroy(&n->arena);
    n->arena.base = NULL;
    fake_device_close(n->device);
    n->device = NULL;
    td_fake_fabric_close(n->fabric);
    n->fabric = NULL;
    td_wakeup_close(&n->wakeup);
}

/* What is told about paths and about who was refused: the last of each. */
static void take_news(struct node *n)
{
    struct td_xfer_event news;
    while (td_xfer_poll_path(n->x, &news)) {
        if (news.kind == TD_XFER_PATH_CHOSEN) {
            n->path = news;
        } else {
            n->n_refusals++;
            n->refusal = news;
        }
    }
}

/* The next event of a slot or op. */
static bool next_event(struct node *n, struct td_xfer_event *ret_event)
{
    take_news(n);
    return td_xfer_poll(n->x, ret_event, 1) == 1;
}

static void grant_blocks(struct node *n, const struct node_command *c, struct node_reply *r,
                         struct td_err *err)
{
    static uint8_t blob[TD_XFER_BLOB_MAX];
    size_t bytes = 0;
    r->status = td_xfer_grant(n->x, c->ids, c->n, deadline_of(c->deadline_ms), c->user, &r->id,
                              blob, &bytes, err);
    if (r->status) return;
    TD_ASSERT(bytes <= sizeof r->blob);
    memcpy(r->blob, blob, bytes);
    r->blob_bytes = (uint32_t)bytes;
}

static td_status submit_blocks(struct node *n, const struct node_command *c)
{
    td_status status =
        td_xfer_submit(n->x, c->id, c->first, c->ids, c->n, c->final, c->note, c->note_bytes);
    if (c->n_behind && !status)
        status = td_xfer_submit(n->x, c->behind_id, 0, c->ids + c->n, c->n_behind, true, c->note,
                                c->note_bytes);
    return status;
}

static void wait_event(struct node *n, const struct node_command *c, struct node_reply *r)
{
    uint64_t until = td_deadline_after_ms(td_now_ns(), c->deadline_ms);
    do r->ok = next_event(n, &r->event);
    while (!r->ok && td_wakeup_wait(&n->wakeup, until));
    if (!r->ok) r->ok = next_event(n, &r->event);
}

static uint8_t *block_of(const struct node *n, const struct node_command *c, int32_t i)
{
    return n->pool + (uint64_t)c->ids[i] * n->block_bytes;
}

static uint64_t seed_of(const struct node_command *c, int32_t i)
{
    return c->seed + (uint64_t)(c->by_id ? c->ids[i] : i);
}

static void check_blocks(const struct node *n, const struct node_command *c, struct node_reply *r)
{
    r->ok = true;
    for (int32_t i = 0; i < c->n && r->ok; i++) {
        r->ok = node_check_bytes(block_of(n, c, i), n->block_bytes, seed_of(c, i));
        r->n = i;
    }
}

static void tell_stats(struct node *n, struct node_reply *r)
{
    td_xfer_stats(n->x, &r->stats);
    take_news(n);
    r->event = n->path;
    r->n_refusals = n->n_refusals;
    memcpy(r->refusal, n->refusal.reason, sizeof r->refusal);
}

static void execute(struct node *n, const struct node_command *c, struct node_reply *r)
{
    struct td_err err = {0};
    memset(r, 0, sizeof *r);
    switch (c->verb) {
    case NODE_OPEN:
        open_node(n, c, r, &err);
        break;
    case NODE_CLOSE:
        close_node(n);
        break;
    case NODE_GRANT:
        grant_blocks(n, c, r, &err);
        break;
    case NODE_REVOKE:
        td_xfer_revoke(n->x, c->id, "revoked by the test");
        break;
    case NODE_OP:
        r->status = td_xfer_op_start(n->x, c->blob, c->blob_bytes, deadline_of(c->deadline_ms),
                                     c->user, &r->id, &r->n, &err);
        break;
    case NODE_SUBMIT:
        r->status = submit_blocks(n, c);
        break;
    case NODE_SUBMIT_PART:
        r->status = td_xfer_submit_part(n->x, c->id, c->first, c->ids, c->n, c->offset, c->n_bytes);
        break;
    case NODE_SUBMIT_PULL:
        r->status = td_xfer_submit_pull(n->x, c->id, c->first, c->ids, c->n);
        break;
    case NODE_CANCEL:
        td_xfer_cancel(n->x, c->id, "cancelled by the test");
        break;
    case NODE_FINISHED:
        td_xfer_finished(n->x, c->id);
        break;
    case NODE_EVENT:
        wait_event(n, c, r);
        break;
    case NODE_FILL:
        for (int32_t i = 0; i < c->n; i++)
            node_fill_bytes(block_of(n, c, i), n->block_bytes, seed_of(c, i));
        break;
    case NODE_CHECK:
        check_blocks(n, c, r);
        break;
    case NODE_STATS:
        tell_stats(n, r);
        break;
    case NODE_EXIT:
        break;
    }
    snprintf(r->msg, sizeof r->msg, "%.255s", err.msg);
}

static bool all(int fd, void *data, size_t n, bool out)
{
    for (uint8_t *p = data; n;) {
        ssize_t k = out ? send(fd, p, n, MSG_NOSIGNAL) : recv(fd, p, n, 0);
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

struct node *node_local(void)
{
    struct node *n = calloc(1, sizeof *n);
    TD_ASSERT(n);
    n->fd = -1;
    return n;
}

/* Not by fork(): that would copy the page tables of this program, and then every page that either
 * writes; under a sanitizer those are some hundred megabytes. */
struct node *node_spawn(const char *program)
{
    int pair[2];
    char fd_text[16];
    struct node *n = node_local();
    posix_spawn_file_actions_t actions;
    TD_ASSERT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    snprintf(fd_text, sizeof fd_text, "%d", pair[1]);
    char *args[] = {(char *)(uintptr_t)program, (char *)(uintptr_t) "--node", fd_text, NULL};
    /* onto itself: the child's copy stays open across exec */
    TD_ASSERT(posix_spawn_file_actions_init(&actions) == 0 &&
              posix_spawn_file_actions_adddup2(&actions, pair[1], pair[1]) == 0);
    int failed = posix_spawn(&n->pid, program, &actions, NULL, args, environ);
    posix_spawn_file_actions_destroy(&actions);
    TD_ASSERT(!failed);
    close(pair[1]);
    n->fd = pair[0];
    return n;
}

int node_child_main(int fd)
{
    static struct node_command c;
    static struct node_reply r;
    struct node n = {.fd = fd};
    if (td_fault_init(NULL)) return 2;
    while (all(fd, &c, sizeof c, false) && c.verb != NODE_EXIT) {
        /* the parent's end is closed when it dies */
        execute(&n, &c, &r);
        if (!all(fd, &r, sizeof r, true)) break;
    }
    close_node(&n);
    return 0;
}

void node_do(struct node *n, const struct node_command *c, struct node_reply *r)
{
    struct node_command copy = *c;
    if (!n->pid) {
        execute(n, c, r);
        return;
    }
    if (!all(n->fd, &copy, sizeof copy, true) || !all(n->fd, r, sizeof *r, false)) {
        memset(r, 0, sizeof *r);
        r->status = TD_ERR_PEER;
        snprintf(r->msg, sizeof r->msg, "the child is gone");
    }
}

pid_t node_pid(const struct node *n) { return n->pid; }

struct fake_device *node_device(struct node *n) { return n->device; }

struct td_fake_fabric *node_fabric(struct node *n) { return n->fabric; }

struct td_xfer *node_xfer(struct node *n) { return n->x; }

void node_kill(struct node *n)
{
    kill(n->pid, SIGKILL);
    waitpid(n->pid, NULL, 0);
    close(n->fd);
    n->fd = -1;
}

void node_free(struct node *n)
{
    if (!n) return;
    if (n->pid && n->fd >= 0) {
        close(n->fd); /* the child ends by itself */
        waitpid(n->pid, NULL, 0);
    } else if (!n->pid) {
        close_node(n);
    }
    free(n);
}
