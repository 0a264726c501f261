/* verbs_fake.c - nodes, rings, queue pairs and the NIC thread of verbs_fake.h.
 *
 * A node's queue pairs, completion queues and keys are its own memory, under one lock that its NIC
 * thread and its control calls share; only the rings between a posting or polling thread and the
 * NIC need no lock. Nodes communicate by messages, as NICs do by packets. Shared memory holds, for
 * each ordered pair of nodes, a ring with one writer and one reader, and a few values per node that
 * others only read. So nothing shared is ever locked, and a node may die between any two
 * instructions: what it had not published was not sent.
 *
 *   post_send -> SQ ring -> NIC: checks, REQUEST --ring--> NIC of the target: checks, takes the
 *                                                          payload, receive completion
 *   poll      <- CQ ring <- NIC: completion      <--ring-- REPLY: ok, lost, receiver not ready, or
 *                                                          the error
 *
 * Invariants: (1) No node writes another's memory. The target copies a WRITE into its own memory,
 * and the
 *     requester copies a READ into its own, by process_vm_readv when the other node is another
 *     process. Both hold their node's lock meanwhile, so dereg and qp_error are fences as soon as
 *     they return, even while the other process is stopped.
 * (2) Bytes that were read count only if their source cannot have been reused: `live` and
 * `key_live`
 *     of the source's node are read after the copy, and their owner clears them before a flush or
 *     dereg is visible. A copy that fails this check is a packet torn by its sender's end.
 * (3) Each request gets exactly one reply while both nodes live. A node has at most INFLIGHT_MAX
 *     requests without reply at another, so a ring of RING_CELLS never lacks room for replies.
 * (4) A LOST reply stands for silence of the hardware: the requester sends again until its time is
 *     over. Real silence is never taken for loss while the other node lives, because a stopped
 *     process is slow, not lost.
 * (5) A completion queue has one producer at a time (the lock's holder) and one consumer. */
#include "common/base/random.h"
#include "tests/fake/verbs_fake.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/sanitizers.h"

enum {
    RING_CELLS = 1024,
    INFLIGHT_MAX = 256,
    QPS_MAX = 4096,
    KEYS_MAX = 16384,
    RULES_MAX = 64,
    ASYNC_MAX = 64,
    STASH_MAX = 32,
    QP_WORDS = QPS_MAX / 64,
    TURN_REQUESTS = 32,
    TURN_CELLS = 64
};
#define TURN_BYTES (512u << 10) /* of payload under one hold of the lock */
#define MAGIC 0x31656b6166647674ull
#define VERSION 1u
#define MAX_MESSAGE (1ull << 31)
#define PSN_MASK 0xffffffu
/* the packet number expected after a request whose payload was gone with its sender: nothing behind
 * it is accepted */
#define PSN_NONE UINT32_MAX

/* ---- what nodes share ---- */

enum cell_kind { CELL_REQUEST = 1, CELL_REPLY };
enum reply { REPLY_OK = 0, REPLY_LOST = 100, REPLY_RNR = 101 }; /* others: a td_vb_wc_status */
enum {
    CELL_SIGNALED = 1,
    CELL_TAKEN = 2 /* reply to a READ of this same node: the bytes are there */
};

struct cell {
    /* incarnations of the nodes; messages for or from an earlier one are ignored */
    uint32_t src_inc, dst_inc;
    uint8_t kind, op, n_sge, flags;
    uint32_t status;
    uint32_t src_qp, dst_qp, psn, round;
    uint32_t src_gid, dst_gid;      /* gid codes */
    uint32_t imm, rkey, mtu, reads; /* a READ's reply: rkey is the key that was used */
    /* in a READ's reply remote_addr is the place to read from in the target's memory */
    uint64_t seq, remote_addr, bytes;
    struct {
        uint64_t addr, bytes;
    } sge[TD_VB_SGE_MAX];
};

struct ring {
    _Alignas(64) _Atomic uint64_t head; /* the reader's */
    _Alignas(64) _Atomic uint64_t tail; /* the writer's */
    _Alignas(64) struct cell cells[RING_CELLS];
};

struct counters {
    _Atomic uint64_t requests_sent, retransmits, writes_landed, bytes_landed, reads_served, late,
        dropped, rkeys, rnr, overruns, broken, held;
};

struct node {
    _Alignas(64) _Atomic uint32_t inc; /* incarnation; odd: taken */
    _Atomic uint32_t pid;
    _Atomic uint64_t start; /* with pid it names a process for good */
    _Alignas(64) _Atomic uint32_t sleeping, wake;
    _Atomic uint32_t control;                         /* counts changes of ports_down and hold */
    _Atomic uint32_t ports_down[TD_FAKE_DEVICES_MAX]; /* bit per port, from 0 */
    struct counters n;
    _Alignas(64) _Atomic uint32_t live[QPS_MAX]; /* the number of the queue pair that is in
                                                    RTR or RTS here */
    _Atomic uint32_t key_live[KEYS_MAX];         /* the rkey that is registered here */
};

struct shared {
    _Atomic uint64_t magic;
    uint32_t version, bytes;
    _Atomic uint32_t qp_next, hold, n_nodes; /* n_nodes: how many were ever used */
    struct node nodes[TD_FAKE_NODES_MAX];
    struct ring rings[TD_FAKE_NODES_MAX][TD_FAKE_NODES_MAX]; /* [from][to] */
};

/* ---- what is a node's own ---- */

struct fake_device {
    struct td_fake_fabric *f;
    uint32_t index;
    struct fake_device *next;
    uint32_t n_qps, n_cqs, n_keys, n_srqs;
    struct fake_srq *dead_srqs; /* completions may still point to them */
    int async_fd;
    struct td_vb_async events[ASYNC_MAX];
    uint32_t events_head;
    atomic_uint events_n; /* written under the lock */
};

struct late { /* bytes on their way to a dma-buf */
    struct late *next;
    const struct fake_device *device;
    uint8_t *to;
    uint64_t bytes;
    uint8_t payload[];
};

struct key { /* a memory region or a window */
    union {
        struct td_vb_mr mr;
        struct td_vb_mw mw;
    } pub;
    bool is_window;
    uint32_t index;
    struct fake_device *device;
    unsigned access;
    uint64_t base, bytes; /* as remote addresses */
    uint8_t *host;
    void *map; /* of a dma-buf */
    size_t map_bytes;
    uint32_t n_windows;            /* region: bound to it */
    uint32_t bound_rkey, bound_qp; /* window: 0 = free */
    struct key *region;
};

struct cqe {
    uint64_t id, free_to; /* free_to: sends before this position belong to the poster again */
    uint32_t qp_num, imm;
    uint8_t status, op;
    bool is_recv;
    struct fake_srq *srq;
};

struct fake_cq {
    struct fake_device *device;
    struct cqe *ring;
    uint64_t mask;
    uint64_t n_poisoned; /* of its entries, from the first on: the pusher's */
    uint32_t depth, n_qps;
    int fd;
    bool dead;         /* under the lock */
    atomic_bool blank; /* nothing is handed out any more */
    _Alignas(64) _Atomic uint64_t head;
    _Alignas(64) _Atomic uint64_t tail;
    atomic_bool armed;
};

struct receives {
    uint64_t *ids, mask;
    uint32_t depth;
    _Atomic uint64_t tail; /* the poster's */
    uint64_t taken;        /* the NIC's */
};

struct fake_srq {
    struct fake_device *device;
    struct fake_srq *next_dead;
    struct receives rq;
    _Atomic uint64_t freed;
    uint32_t n_qps;
};

enum state { RESET, INIT, RTR, RTS, ERR };
enum { WQE_SIGNALED = 1, WQE_FENCE = 2, WQE_SEEN = 4 };

struct wqe { /* struct td_vb_sge or struct bind follow */
    uint64_t id, remote_addr, bytes;
    uint32_t rkey, imm, psn;
    uint8_t op, flags, n_sge, fault, fault_status;
};

struct bind {
    struct key *window, *region;
    uint64_t addr, bytes;
};

struct qp_slot { /* outlives its queue pair: the poller writes here */
    _Alignas(64) _Atomic uint32_t num;
    _Atomic uint64_t sq_freed, rq_freed;
};

struct stashed {
    struct cell cell;
    uint32_t from;
};

struct fake_qp {
    struct td_vb_qp pub;
    struct td_fake_fabric *f;
    struct fake_device *device;
    struct fake_cq *cq;
    struct fake_srq *srq;
    struct qp_slot *slot;
    uint32_t index;
    atomic_int state;
    unsigned access;
    uint8_t port;
    struct td_vb_route route;
    uint32_t src_gid, dst_gid, dst_node;
    uint8_t *sq;
    size_t stride;
    uint64_t sq_mask;
    uint32_t sq_depth, sge_max;
    struct receives rq;
    _Alignas(64) _Atomic uint64_t sq_tail;   /* the poster's */
    _Alignas(64) uint64_t sq_sent, sq_acked; /* from here on under the lock */
    uint32_t tx_psn, round, reads_out, dst_inc;
    uint64_t first_loss_ns, wait_until_ns;
    uint32_t rnr_left;
    bool stalled;
    uint32_t rx_psn;
    struct stashed *stash;
    uint32_t n_stashed;
};

struct held {
    struct held *next;
    uint32_t from;
    uint64_t due_ns;
    uint8_t *payload; /* of a WRITE */
    struct cell cell;
};

struct rule {
    struct td_fake_rule given;
    uint64_t left;
};

struct td_fake_fabric {
    struct td_verbs vb;
    struct td_fake_options o;
    struct shared *shared;
    struct node *me;
    uint32_t node, inc;
    pthread_t nic;
    pthread_mutex_t lock;
    atomic_uint want; /* control calls that wait for the lock */
    atomic_bool stop;
    _Alignas(64) _Atomic uint64_t dirty_summary;
    _Atomic uint64_t dirty[QP_WORDS]; /* queue pairs with news from their poster */
    struct qp_slot slots[QPS_MAX];

    /* under the lock */
    _Alignas(64) struct fake_qp *qps[QPS_MAX];
    struct key *keys[KEYS_MAX];
    uint32_t key_next, key_variant;
    struct fake_device *devices;
    uint64_t random;
    /* to look at: now; from time to time; when idle */
    uint64_t run[QP_WORDS], pending[QP_WORDS], stashes[QP_WORDS];
    bool run_all_pending;
    uint64_t tick_ns;
    uint32_t inflight[TD_FAKE_NODES_MAX], inflight_inc[TD_FAKE_NODES_MAX];
    uint64_t alive_ns[TD_FAKE_NODES_MAX];
    struct held *held, **held_end;
    uint32_t held_of[QPS_MAX], held_stamp[QPS_MAX], held_pass;
    uint32_t control_seen, ports_down_seen[TD_FAKE_DEVICES_MAX];
    uint8_t gid_kind[TD_FAKE_DEVICES_MAX][TD_FAKE_PORTS_MAX][TD_FAKE_GIDS],
        gid_type[TD_FAKE_DEVICES_MAX][TD_FAKE_PORTS_MAX][TD_FAKE_GIDS];
    bool gid_down[TD_FAKE_DEVICES_MAX][TD_FAKE_PORTS_MAX][TD_FAKE_GIDS];
    struct rule rules[RULES_MAX];
    uint32_t n_rules;
    atomic_uint n_post_rules;
    uint8_t *bounce;
    size_t bounce_bytes;
    uint64_t turn_bytes;
    struct late *late, **late_end; /* option device_late: in the order in which they came */
};

static void qp_to_err(struct fake_qp *qp, bool event);
static void send_turn(struct fake_qp *qp);
static enum td_vb_wc_status read_take(struct fake_qp *qp, uint32_t from, const struct cell *c);

static void reply(struct td_fake_fabric *f, uint32_t to, const struct cell *c, uint32_t status);

#define COUNT(f, field, by) atomic_fetch_add_explicit(&(f)->me->n.field, (by), memory_order_relaxed)

static void fake_lock(struct td_fake_fabric *f)
{
    atomic_fetch_add(&f->want, 1);
    pthread_mutex_lock(&f->lock);
    atomic_fetch_sub(&f->want, 1);
}

static void fake_unlock(struct td_fake_fabric *f) { pthread_mutex_unlock(&f->lock); }

static uint64_t fake_random(struct td_fake_fabric *f) { return td_keyed_step(&f->random); }

static uint64_t pow2_from(uint64_t n)
{
    uint64_t p = 1;
    while (p < n) p <<= 1;
    return p;
}

static void bit_set(uint64_t *words, uint32_t i) { words[i / 64] |= 1ull << (i % 64); }
static void bit_clear(uint64_t *words, uint32_t i) { words[i / 64] &= ~(1ull << (i % 64)); }

/* ---- nodes ---- */

/* Start time of a process; 0: there is none, or it has ended and waits for its parent. */
static uint64_t process_start(uint32_t pid)
{
    char path[64], text[1024];
    /* of its first thread, which is as old: qemu shows a process another start of itself than
     * others see */
    snprintf(path, sizeof path, "/proc/%" PRIu32 "/task/%" PRIu32 "/stat", pid, pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    char *at = strrchr(text, ')'); /* the name may hold anything */
    if (!at || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X') return 0;
    at += 2;
    for (int field = 3; field < 22; field++) {
        at = strchr(at, ' ');
        if (!at) return 0;
        at++;
    }
    uint64_t start = strtoull(at, NULL, 10);
    return start ? start : 1;
}

/* Whether the incarnation `inc` of that node still exists; tells every node when it does not. */
static bool node_alive(struct node *n, uint32_t inc)
{
    if (atomic_load(&n->inc) != inc || !(inc & 1)) return false;
    if (process_start(atomic_load(&n->pid)) == atomic_load(&n->start)) return true;
    uint32_t expected = inc;
    atomic_compare_exchange_strong(&n->inc, &expected, inc + 1);
    return false;
}

static void node_wake(struct node *n)
{
    if (!atomic_load(&n->sleeping) || !atomic_exchange(&n->sleeping, 0)) return;
    atomic_fetch_add(&n->wake, 1);
    syscall(SYS_futex, &n->wake, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static struct ring *ring_to(struct td_fake_fabric *f, uint32_t to)
{
    return &f->shared->rings[f->node][to];
}

static struct cell *ring_reserve(struct ring *ring)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    if (tail - atomic_load_explicit(&ring->head, memory_order_acquire) >= RING_CELLS) return NULL;
    return &ring->cells[tail % RING_CELLS];
}

static void ring_publish(struct td_fake_fabric *f, uint32_t to)
{
    atomic_fetch_add(&ring_to(f, to)->tail, 1); /* one writer; sequentially consistent against
                                                   `sleeping` */
    node_wake(&f->shared->nodes[to]);
}

/* ---- addresses ---- */

/* A gid code is node | device | port | kind | type, one byte each except the last two, which have
 * four bits. The type is not part of the 16 bytes. */
enum { KIND_LID = 15 };

static uint32_t gid_code(uint32_t node, uint32_t device, uint32_t port, uint32_t kind,
                         uint32_t type)
{
    return node << 24 | device << 16 | port << 8 | kind << 4 | type;
}

static void gid_encode(uint32_t code, uint8_t raw[16])
{
    static const uint8_t prefix[][13] = {
        [TD_FAKE_GID_LINK_LOCAL] = {0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe},
        [TD_FAKE_GID_V4_PRIVATE] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10},
        [TD_FAKE_GID_V4] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 198},
        [TD_FAKE_GID_V6_LOCAL] = {0xfd, 0, 0, 0x7d},
        [TD_FAKE_GID_V6] = {0x20, 1, 0xd, 0xb8}};
    memcpy(raw, prefix[(code >> 4) & 15], 13);
    raw[13] = (uint8_t)(code >> 24);
    raw[14] = (uint8_t)(code >> 16);
    raw[15] = (uint8_t)(code >> 8);
}

/* False: no node of any fabric has this address. */
static bool gid_decode(const uint8_t raw[16], uint32_t type, uint32_t *ret_code)
{
    for (uint32_t kind = TD_FAKE_GID_LINK_LOCAL; kind <= TD_FAKE_GID_V6; kind++) {
        uint32_t code = gid_code(raw[13], raw[14], raw[15], kind, type);
        uint8_t back[16];
        gid_encode(code, back);
        if (memcmp(back, raw, 16) != 0 || raw[13] >= TD_FAKE_NODES_MAX) continue;
        *ret_code = code;
        return true;
    }
    return false;
}

static uint16_t lid_of(uint32_t node, uint32_t device, uint32_t port)
{
    return (uint16_t)(1 + node * 64 + device * 4 + port - 1);
}

static bool port_is_up(struct td_fake_fabric *f, uint32_t device, uint32_t port)
{
    return !(atomic_load_explicit(&f->me->ports_down[device], memory_order_relaxed) >> (port - 1) &
             1);
}

/* ---- events and completions ---- */

static void fd_raise(int fd)
{
    uint64_t one = 1;
    ssize_t k;
    do k = write(fd, &one, sizeof one);
    while (k < 0 && errno == EINTR);
}

static void fd_lower(int fd)
{
    uint64_t count;
    ssize_t k;
    do k = read(fd, &count, sizeof count);
    while (k < 0 && errno == EINTR);
}

static void async_raise(struct fake_device *d, struct td_vb_async event)
{
    if (d->events_n == ASYNC_MAX) return; /* hardware loses events too when nobody takes them */
    d->events[(d->events_head + d->events_n++) % ASYNC_MAX] = event;
    fd_raise(d->async_fd);
}

/* Raises an event; `index` TD_FAKE_ALL: on all devices. Every opening of a device gets its
 * events. */
static bool async_raise_all(struct td_fake_fabric *f, uint32_t index, struct td_vb_async event)
{
    bool any = false;
    for (struct fake_device *d = f->devices; d; d = d->next) {
        if (index != TD_FAKE_ALL && d->index != index) continue;
        async_raise(d, event);
        any = true;
    }
    return any;
}

static void cq_die(struct fake_cq *cq)
{
    struct td_fake_fabric *f = cq->device->f;
    if (cq->dead) return;
    cq->dead = true;
    async_raise(cq->device, (struct td_vb_async){.kind = TD_VB_ASYNC_CQ_ERR});
    for (uint32_t i = 0; i < QPS_MAX && cq->n_qps; i++) {
        if (f->qps[i] && f->qps[i]->cq == cq) qp_to_err(f->qps[i], true);
    }
}

/* Poison makes an entry that is read before it is written show. It is written just ahead of the
 * tail: filling all of a deep queue, which takes ten entries, would be most of the cost of a node's
 * start. */
#define CQ_POISON_STEP 256

static void cq_poison_to(struct fake_cq *cq, uint64_t end)
{
    if (end > cq->mask + 1) end = cq->mask + 1;
    if (end <= cq->n_poisoned) return;
    memset(cq->ring + cq->n_poisoned, 0xa5, (end - cq->n_poisoned) * sizeof *cq->ring);
    cq->n_poisoned = end;
}

static void cq_push(struct fake_cq *cq, const struct cqe *e)
{
    if (cq->dead) return;
    uint64_t tail = atomic_load_explicit(&cq->tail, memory_order_relaxed);
    if (tail - atomic_load_explicit(&cq->head, memory_order_acquire) >= cq->depth) {
        COUNT(cq->device->f, overruns, 1);
        cq_die(cq);
        return;
    }
    if (tail + CQ_POISON_STEP / 2 > cq->n_poisoned) cq_poison_to(cq, tail + CQ_POISON_STEP);
    cq->ring[tail & cq->mask] = *e;
    atomic_store(&cq->tail, tail + 1); /* sequentially consistent against cq_arm and the poll
                                          after it */
    if (atomic_load(&cq->armed) && atomic_exchange(&cq->armed, false)) fd_raise(cq->fd);
}

static struct wqe *wqe_at(const struct fake_qp *qp, uint64_t position)
{
    return (struct wqe *)(qp->sq + (position & qp->sq_mask) * qp->stride);
}

static void send_complete(struct fake_qp *qp, uint64_t position, enum td_vb_wc_status status)
{
    const struct wqe *w = wqe_at(qp, position);
    struct cqe e = {.id = w->id,
                    .free_to = position + 1,
                    .qp_num = qp->pub.num,
                    .status = (uint8_t)status,
                    .op = status ? 0 : w->op};
    cq_push(qp->cq, &e);
}

static bool receives_any(const struct receives *rq)
{
    return atomic_load_explicit(&rq->tail, memory_order_acquire) != rq->taken;
}

static void receive_complete(struct fake_qp *qp, enum td_vb_wc_status status, uint32_t imm)
{
    struct receives *rq = qp->srq ? &qp->srq->rq : &qp->rq;
    struct cqe e = {.id = rq->ids[rq->taken++ & rq->mask],
                    .qp_num = qp->pub.num,
                    .status = (uint8_t)status,
                    .op = status ? 0 : TD_VB_RECV_IMM,
                    .imm = imm,
                    .is_recv = true,
                    .srq = qp->srq};
    cq_push(qp->cq, &e);
}

/* Flushes everything outstanding, signalled or not, and what is posted to a queue pair in ERR. */
static void qp_flush(struct fake_qp *qp)
{
    uint64_t tail = atomic_load_explicit(&qp->sq_tail, memory_order_acquire);
    while (qp->sq_acked != tail) {
        uint64_t position = qp->sq_acked++;
        qp->sq_sent = qp->sq_acked;
        send_complete(qp, position, TD_VB_WC_WR_FLUSH);
    }
    while (!qp->srq && receives_any(&qp->rq)) receive_complete(qp, TD_VB_WC_WR_FLUSH, 0);
}

static void stash_drop(struct fake_qp *qp)
{
    if (qp->n_stashed) COUNT(qp->f, late, qp->n_stashed);
    /* invariant 3 */
    for (uint32_t i = 0; i < qp->n_stashed; i++)
        reply(qp->f, qp->stash[i].from, &qp->stash[i].cell, REPLY_LOST);
    qp->n_stashed = 0;
    bit_clear(qp->f->stashes, qp->index);
}

static void qp_to_err(struct fake_qp *qp, bool event)
{
    struct td_fake_fabric *f = qp->f;
    if (atomic_load(&qp->state) == ERR) return;
    atomic_store(&f->me->live[qp->index], 0); /* before anybody sees a flush: invariant 2 */
    atomic_store(&qp->state, ERR);
    qp->round++;
    stash_drop(qp);
    COUNT(f, broken, 1);
    if (event)
        async_raise(qp->device,
                    (struct td_vb_async){.kind = TD_VB_ASYNC_QP_FATAL, .qp_num = qp->pub.num});
    qp_flush(qp);
}

static struct fake_qp *qp_find(struct td_fake_fabric *f, uint32_t num)
{
    struct fake_qp *qp = f->qps[num % QPS_MAX];
    return qp && qp->pub.num == num ? qp : NULL;
}

/* ---- keys ---- */

static bool range_within(uint64_t addr, uint64_t bytes, uint64_t base, uint64_t limit)
{
    return addr >= base && bytes <= limit && addr - base <= limit - bytes;
}

static uint8_t *local_memory(struct td_fake_fabric *f, const struct fake_device *d,
                             const struct td_vb_sge *s, unsigned access)
{
    uint32_t index = s->lkey >> 8;
    struct key *k = index < KEYS_MAX ? f->keys[index] : NULL;
    if (!k || k->is_window || k->device != d || k->pub.mr.lkey != s->lkey ||
        (k->access & access) != access)
        return NULL;
    return range_within(s->addr, s->bytes, k->base, k->bytes) ? k->host + (s->addr - k->base)
                                                              : NULL;
}

static uint8_t *remote_memory(struct td_fake_fabric *f, const struct fake_qp *qp, uint32_t rkey,
                              uint64_t addr, uint64_t bytes, unsigned access)
{
    uint32_t index = rkey >> 8;
    struct key *k = index < KEYS_MAX ? f->keys[index] : NULL;
    if (!k || k->device != qp->device || (k->access & access) != access) return NULL;
    if (k->is_window ? !k->bound_rkey || k->bound_rkey != rkey || k->bound_qp != qp->pub.num
                     : k->pub.mr.rkey != rkey)
        return NULL;
    return range_within(addr, bytes, k->base, k->bytes) ? k->host + (addr - k->base) : NULL;
}

/* ---- payload ---- */

/* Whether the queue pair that sent this is still live where it came from. */
static bool sender_is_live(struct td_fake_fabric *f, uint32_t from, const struct cell *c)
{
    struct node *n = &f->shared->nodes[from];
    return atomic_load(&n->live[c->src_qp % QPS_MAX]) == c->src_qp &&
           atomic_load(&n->inc) == c->src_inc;
}

/* read_process where the system has no such call: qemu's emulation of a process. */
static bool read_process_file(uint32_t pid, uint8_t *to, const struct iovec *pieces, int n)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%u/mem", (unsigned)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    bool is_read = fd >= 0;
    for (int i = 0; i < n && is_read; to += pieces[i++].iov_len)
        is_read = pread(fd, to, pieces[i].iov_len, (off_t)(uintptr_t)pieces[i].iov_base) ==
                  (ssize_t)pieces[i].iov_len;
    if (fd >= 0) close(fd);
    return is_read;
}

/* Reads all `bytes` from a process; false when it is gone or has no such memory. The bare system
 * call, because the thread sanitizer, which does not see the order between processes, must not
 * watch these bytes, as it would not watch a NIC's. */
static bool read_process(uint32_t pid, uint8_t *to, uint64_t bytes, struct iovec *pieces, int n)
{
    struct iovec local = {.iov_base = to, .iov_len = bytes};
    long n_read = syscall(SYS_process_vm_readv, pid, &local, 1ul, pieces, (unsigned long)n, 0ul);
    if (n_read < 0 && errno == ENOSYS) return read_process_file(pid, to, pieces, n);
    return n_read == (long)bytes;
}

static bool read_other(struct td_fake_fabric *f, uint32_t from, uint8_t *to, uint64_t bytes,
                       struct iovec *pieces, int n)
{
    return read_process(atomic_load(&f->shared->nodes[from].pid), to, bytes, pieces, n);
}

static void place(uint8_t *to, const uint8_t *from, uint64_t bytes, bool is_foreign)
{
#ifdef TD_WITH_TSAN
    struct iovec piece = {.iov_base = (void *)(uintptr_t)from, .iov_len = bytes};
    if (is_foreign && read_process((uint32_t)getpid(), to, bytes, &piece, 1)) return;
#endif
    /* within this process the sanitizer does watch, and finds memory that is used before its
     * completion */
    (void)is_foreign;
    memcpy(to, from, bytes);
}

static bool gather(struct td_fake_fabric *f, uint32_t from, const struct cell *c, uint8_t *to)
{
    f->turn_bytes += c->bytes;
    if (from == f->node) {
        for (uint32_t i = 0; i < c->n_sge; i++) {
            memcpy(to, (const void *)(uintptr_t)c->sge[i].addr, c->sge[i].bytes);
            to += c->sge[i].bytes;
        }
        return true;
    }
    struct iovec pieces[TD_VB_SGE_MAX];
    for (uint32_t i = 0; i < c->n_sge; i++)
        pieces[i] = (struct iovec){.iov_base = (void *)(uintptr_t)c->sge[i].addr,
                                   .iov_len = c->sge[i].bytes};
    return read_other(f, from, to, c->bytes, pieces, c->n_sge);
}

/* Writes the target in lines of 64 bytes, in a random order. */
static void scatter_lines(struct td_fake_fabric *f, uint8_t *to, const uint8_t *payload,
                          uint64_t bytes, bool is_foreign)
{
    uint64_t first = 64 - ((uintptr_t)to & 63),
             n = bytes <= first ? 1 : 1 + (bytes - first + 63) / 64, space = pow2_from(n);
    uint64_t step = fake_random(f) | 1, at = fake_random(f);
    for (uint64_t i = 0; i < space; i++, at += step) { /* an odd step visits every value of a
                                                          power of two once */
        uint64_t line = at & (space - 1);
        if (line >= n) continue;
        uint64_t begin = line ? first + (line - 1) * 64 : 0, end = first + line * 64;
        if (end > bytes) end = bytes;
        place(to + begin, payload + begin, end - begin, is_foreign);
    }
}

static uint8_t *bounce_get(struct td_fake_fabric *f, uint64_t bytes)
{
    if (bytes <= f->bounce_bytes) return f->bounce;
    uint8_t *more = realloc(f->bounce, bytes);
    if (!more) return NULL;
    f->bounce = more;
    f->bounce_bytes = bytes;
    return more;
}

static bool is_dmabuf(const struct td_fake_fabric *f, const uint8_t *at)
{
    for (uint32_t i = 0; i < KEYS_MAX; i++) {
        const struct key *k = f->keys[i];
        if (k && k->map && (uintptr_t)at >= (uintptr_t)k->map &&
            (uintptr_t)at < (uintptr_t)k->map + k->map_bytes)
            return true;
    }
    return false;
}

/* False: no memory for it, so it lands at once. */
static bool late_add(struct td_fake_fabric *f, const struct fake_device *d, uint8_t *to,
                     const uint8_t *payload, uint64_t bytes)
{
    struct late *l = malloc(sizeof *l + bytes);
    if (!l) return false;
    l->next = NULL;
    l->device = d;
    l->to = to;
    l->bytes = bytes;
    memcpy(l->payload, payload, bytes);
    *f->late_end = l;
    f->late_end = &l->next;
    return true;
}

/* Ends the delay of the writes of one device (d NULL: of all): they arrive, or with `arrive` false
 * they are lost. */
static void late_over(struct td_fake_fabric *f, const struct fake_device *d, bool arrive)
{
    struct late **at = &f->late;
    while (*at) {
        struct late *l = *at;
        if (d && l->device != d) {
            at = &l->next;
            continue;
        }
        if (arrive) place(l->to, l->payload, l->bytes, true);
        *at = l->next;
        free(l);
    }
    f->late_end = at;
}

/* Copies a payload to its place. False: the sender or its memory is gone, and nothing counts as
 * landed. */
static bool land(struct td_fake_fabric *f, const struct fake_device *d, uint32_t from,
                 const struct cell *c, uint8_t *to, const uint8_t *payload)
{
    if (f->o.no_copy || !c->bytes) return payload || sender_is_live(f, from, c);
    bool late = f->o.device_late && is_dmabuf(f, to);
    if (!payload) {
        if (!sender_is_live(f, from, c)) return false;
        uint8_t *into = f->o.relaxed || late ? bounce_get(f, c->bytes) : to;
        if (!into || !gather(f, from, c, into) || !sender_is_live(f, from, c)) return false;
        payload = into;
    }
    if (payload == to || (late && late_add(f, d, to, payload, c->bytes))) return true;
    if (f->o.relaxed)
        scatter_lines(f, to, payload, c->bytes, from != f->node);
    else
        place(to, payload, c->bytes, from != f->node);
    return true;
}

/* ---- the target's side ---- */

static struct cell *reply_begin(struct td_fake_fabric *f, uint32_t to, const struct cell *c,
                                uint32_t status)
{
    struct node *n = &f->shared->nodes[to];
    struct cell *answer = atomic_load(&n->inc) == c->src_inc ? ring_reserve(ring_to(f, to)) : NULL;
    if (!answer)
        return NULL; /* that incarnation is gone and reads nothing from its ring any more */
    answer->src_inc = f->inc;
    answer->dst_inc = c->src_inc;
    answer->kind = CELL_REPLY;
    answer->op = c->op;
    answer->n_sge = answer->flags = 0;
    answer->status = status;
    answer->src_qp = c->dst_qp;
    answer->dst_qp = c->src_qp;
    answer->round = c->round;
    answer->seq = c->seq;
    answer->bytes = c->bytes;
    return answer;
}

static void reply(struct td_fake_fabric *f, uint32_t to, const struct cell *c, uint32_t status)
{
    if (reply_begin(f, to, c, status)) ring_publish(f, to);
}

static uint32_t psn_after(uint32_t psn, uint64_t bytes, uint32_t mtu)
{
    uint64_t packets = bytes ? (bytes + mtu - 1) / mtu : 1;
    return (uint32_t)(psn + packets) & PSN_MASK;
}

static void refuse(struct fake_qp *qp, uint32_t from, const struct cell *c,
                   enum td_vb_wc_status status)
{
    struct td_fake_fabric *f = qp->f;
    reply(f, from, c, status);
    qp_to_err(qp, true);
}

/* Carries out a WRITE or WRITE_IMM that was accepted. */
static bool write_finish(struct fake_qp *qp, uint32_t from, const struct cell *c,
                         const uint8_t *payload)
{
    struct td_fake_fabric *f = qp->f;
    uint8_t *to = NULL;
    if (c->bytes &&
        !(to = remote_memory(f, qp, c->rkey, c->remote_addr, c->bytes, TD_VB_REMOTE_WRITE))) {
        COUNT(f, rkeys, 1);
        if (payload) COUNT(f, late, 1);
        refuse(qp, from, c, TD_VB_WC_REM_ACCESS);
        return false;
    }
    if (!land(f, qp->device, from, c, to, payload)) {
        COUNT(f, dropped, 1);
        qp->rx_psn = PSN_NONE;
        /* live, so its memory is what is gone */
        reply(f, from, c, sender_is_live(f, from, c) ? TD_VB_WC_LOC_PROT : REPLY_LOST);
        return true;
    }
    COUNT(f, writes_landed, 1);
    COUNT(f, bytes_landed, c->bytes);
    if (c->op == TD_VB_WRITE_IMM) receive_complete(qp, TD_VB_WC_SUCCESS, c->imm);
    reply(f, from, c, REPLY_OK);
    return true;
}

/* Lands the stashed WRITEs in any order; receive completions and replies keep theirs. */
static void stash_land(struct fake_qp *qp)
{
    struct td_fake_fabric *f = qp->f;
    uint32_t n = qp->n_stashed, order[STASH_MAX], bad = n;
    bool gone[STASH_MAX] = {0};
    bit_clear(f->stashes, qp->index);
    qp->n_stashed = 0;
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = (uint32_t)(fake_random(f) % i), keep = order[i - 1];
        order[i - 1] = order[j];
        order[j] = keep;
    }
    for (uint32_t i = 0; i < n; i++) {
        struct stashed *s = &qp->stash[order[i]];
        uint8_t *to = s->cell.bytes ? remote_memory(f, qp, s->cell.rkey, s->cell.remote_addr,
                                                    s->cell.bytes, TD_VB_REMOTE_WRITE)
                                    : NULL;
        if (s->cell.bytes && !to) {
            COUNT(f, rkeys, 1);
            if (order[i] < bad) bad = order[i];
        } else if (!land(f, qp->device, s->from, &s->cell, to, NULL)) {
            gone[order[i]] = true;
            COUNT(f, dropped, 1);
        } else {
            COUNT(f, writes_landed, 1);
            COUNT(f, bytes_landed, s->cell.bytes);
        }
    }
    for (uint32_t i = 0; i < n; i++) {
        struct stashed *s = &qp->stash[i];
        if (i == bad) {
            refuse(qp, s->from, &s->cell, TD_VB_WC_REM_ACCESS);
            continue;
        }
        if (gone[i]) {
            qp->rx_psn = PSN_NONE;
            reply(f, s->from, &s->cell,
                  sender_is_live(f, s->from, &s->cell) ? TD_VB_WC_LOC_PROT : REPLY_LOST);
            continue;
        }
        if (atomic_load(&qp->state) == ERR || qp->rx_psn == PSN_NONE) {
            /* this one was refused, or the CQ overran, or one before it was lost */
            reply(f, s->from, &s->cell, REPLY_LOST);
            continue;
        }
        if (s->cell.op == TD_VB_WRITE_IMM) receive_complete(qp, TD_VB_WC_SUCCESS, s->cell.imm);
        reply(f, s->from, &s->cell, REPLY_OK);
    }
}

static bool qp_takes(struct td_fake_fabric *f, const struct fake_qp *qp, const struct cell *c)
{
    if (!qp) return false;
    int state = atomic_load(&qp->state);
    return (state == RTR || state == RTS) && qp->route.remote_qp == c->src_qp &&
           qp->src_gid == c->dst_gid && qp->dst_gid == c->src_gid &&
           port_is_up(f, qp->device->index, qp->port) && qp->rx_psn == c->psn;
}

/* A request that the queue pair does not take is lost on the way. */
static void lose_request(struct td_fake_fabric *f, uint32_t from, const struct cell *c,
                         bool was_held)
{
    bool is_write = c->op != TD_VB_READ;
    if (is_write && was_held)
        COUNT(f, late, 1);
    else if (is_write)
        COUNT(f, dropped, 1);
    reply(f, from, c, REPLY_LOST);
}

static void reply_not_ready(struct td_fake_fabric *f, uint32_t from, const struct cell *c,
                            const struct fake_qp *qp)
{
    COUNT(f, rnr, 1);
    struct cell *answer = reply_begin(f, from, c, REPLY_RNR);
    if (!answer) return;
    answer->imm = qp->route.min_rnr_timer;
    ring_publish(f, from);
}

/* A write that may land after later ones waits until something must be told of it. */
static void stash_write(struct td_fake_fabric *f, struct fake_qp *qp, uint32_t from,
                        const struct cell *c)
{
    if (!qp->stash && !(qp->stash = malloc(STASH_MAX * sizeof *qp->stash))) {
        /* in order, then */
        write_finish(qp, from, c, NULL);
        return;
    }
    qp->stash[qp->n_stashed].cell = *c;
    qp->stash[qp->n_stashed++].from = from;
    bit_set(f->stashes, qp->index);
    if (c->op == TD_VB_WRITE_IMM || (c->flags & CELL_SIGNALED) || qp->n_stashed == STASH_MAX)
        stash_land(qp);
}

static void serve_read(struct td_fake_fabric *f, struct fake_qp *qp, uint32_t from,
                       const struct cell *c, const uint8_t *memory)
{
    struct cell *answer = reply_begin(f, from, c, REPLY_OK);
    if (!answer) return;
    COUNT(f, reads_served, 1);
    /* what it reads lies behind them */
    if (f->late && is_dmabuf(f, memory)) late_over(f, qp->device, true);
    answer->remote_addr = (uint64_t)(uintptr_t)memory;
    answer->rkey = c->rkey;
    struct fake_qp *asker = from == f->node ? qp_find(f, c->src_qp) : NULL;
    /* at once, because a response carries the bytes; another process fetches them when it gets the
     * reply */
    if (asker && asker->round == c->round) {
        answer->status = read_take(asker, from, answer);
        answer->flags = CELL_TAKEN;
    }
    ring_publish(f, from);
}

/* The queue pair and its memory allow what the request asks; else it is refused. */
static bool check_request(struct td_fake_fabric *f, struct fake_qp *qp, uint32_t from,
                          const struct cell *c, bool was_held, const uint8_t **ret_memory)
{
    bool is_write = c->op != TD_VB_READ;
    uint32_t small = c->mtu < qp->route.mtu_bytes ? c->mtu : qp->route.mtu_bytes;
    uint64_t needed = is_write ? TD_VB_REMOTE_WRITE : TD_VB_REMOTE_READ;
    if (!(qp->access & needed) || (c->mtu != qp->route.mtu_bytes && c->bytes > small) ||
        (!is_write && c->reads > qp->route.rd_atomic_in)) {
        if (qp->n_stashed) stash_land(qp);
        refuse(qp, from, c, TD_VB_WC_REM_INV_REQ);
        return false;
    }
    *ret_memory =
        c->bytes ? remote_memory(f, qp, c->rkey, c->remote_addr, c->bytes, (unsigned)needed) : NULL;
    if (!c->bytes || *ret_memory) return true;
    if (qp->n_stashed) stash_land(qp);
    COUNT(f, rkeys, 1);
    if (is_write && was_held) COUNT(f, late, 1);
    refuse(qp, from, c, TD_VB_WC_REM_ACCESS);
    return false;
}

static void on_request(struct td_fake_fabric *f, uint32_t from, const struct cell *c,
                       const uint8_t *payload, bool was_held)
{
    struct fake_qp *qp = qp_find(f, c->dst_qp);
    const uint8_t *memory;
    bool is_write = c->op != TD_VB_READ, takes = qp_takes(f, qp, c);
    bool lacks_receive =
        takes && c->op == TD_VB_WRITE_IMM && !receives_any(qp->srq ? &qp->srq->rq : &qp->rq);
    if (qp && qp->n_stashed && (!takes || lacks_receive)) { /* replies go in order */
        stash_land(qp);
        takes = takes && atomic_load(&qp->state) != ERR;
    }
    if (!takes) {
        lose_request(f, from, c, was_held);
        return;
    }
    if (lacks_receive) {
        reply_not_ready(f, from, c, qp);
        return;
    }
    bool may_wait = f->o.unordered && is_write && !payload;
    if (!may_wait && qp->n_stashed) stash_land(qp);
    if (atomic_load(&qp->state) == ERR) { /* by what has just landed */
        reply(f, from, c, REPLY_LOST);
        return;
    }
    if (!check_request(f, qp, from, c, was_held, &memory)) return;
    qp->rx_psn = psn_after(c->psn, c->bytes, c->mtu);
    if (may_wait)
        stash_write(f, qp, from, c);
    else if (is_write)
        write_finish(qp, from, c, payload);
    else
        serve_read(f, qp, from, c, memory);
}

/* ---- the network: requests that are held ---- */

static bool hold_matches(uint32_t hold, const struct cell *c)
{
    return hold && (hold == TD_FAKE_ALL || hold == c->src_qp || hold == c->dst_qp);
}

/* False: it goes on at once. */
static bool hold_take(struct td_fake_fabric *f, uint32_t from, const struct cell *c)
{
    uint32_t index = c->dst_qp % QPS_MAX;
    if (!f->o.delay_us && !f->held_of[index] && !hold_matches(atomic_load(&f->shared->hold), c))
        return false;
    struct held *h = malloc(sizeof *h);
    if (!h) return false;
    *h = (struct held){.from = from, .cell = *c};
    if (f->o.delay_us) h->due_ns = td_now_ns() + fake_random(f) % (f->o.delay_us * TD_NS_PER_US);
    if (c->op != TD_VB_READ) {
        h->payload = malloc(c->bytes ? c->bytes : 1);
        bool ok = h->payload && sender_is_live(f, from, c) &&
                  (f->o.no_copy || !c->bytes || gather(f, from, c, h->payload)) &&
                  sender_is_live(f, from, c);
        if (!ok) { /* it never left its sender */
            free(h->payload);
            free(h);
            reply(f, from, c, REPLY_LOST);
            return true;
        }
    }
    *f->held_end = h;
    f->held_end = &h->next;
    f->held_of[index]++;
    COUNT(f, held, 1);
    return true;
}

static bool holds_release(struct td_fake_fabric *f)
{
    if (!f->held) return false;
    uint32_t hold = atomic_load(&f->shared->hold), pass = ++f->held_pass;
    uint64_t now_ns = f->o.delay_us ? td_now_ns() : 0;
    bool any = false;
    struct held **at = &f->held;
    while (*at) {
        struct held *h = *at;
        uint32_t index = h->cell.dst_qp % QPS_MAX;
        if (f->held_stamp[index] == pass || hold_matches(hold, &h->cell) || h->due_ns > now_ns) {
            f->held_stamp[index] = pass; /* what comes after it on this queue pair waits too */
            at = &h->next;
            continue;
        }
        *at = h->next;
        if (!h->next) f->held_end = at;
        f->held_of[index]--;
        COUNT(f, held, (uint64_t)-1);
        on_request(f, h->from, &h->cell, h->payload, true);
        free(h->payload);
        free(h);
        any = true;
    }
    return any;
}

/* ---- the requester's side ---- */

/* The oldest unfinished request ends with an error, and the queue pair with it. */
static void send_fail(struct fake_qp *qp, enum td_vb_wc_status status)
{
    uint64_t position = qp->sq_acked++;
    if (qp->sq_sent < qp->sq_acked) qp->sq_sent = qp->sq_acked;
    atomic_store(&qp->f->me->live[qp->index], 0);
    send_complete(qp, position, status);
    qp_to_err(qp, false);
}

static void send_rewind(struct fake_qp *qp)
{
    if (qp->sq_sent != qp->sq_acked) {
        COUNT(qp->f, retransmits, 1);
        qp->tx_psn = wqe_at(qp, qp->sq_acked)->psn;
    }
    qp->sq_sent = qp->sq_acked;
    qp->round++;
    qp->reads_out = 0;
    bit_set(qp->f->pending, qp->index);
}

static uint64_t retry_ns(const struct fake_qp *qp)
{
    if (!qp->route.timeout) return UINT64_MAX;
    uint64_t by_code = (4096ull << qp->route.timeout) * (qp->route.retry + 1u),
             bound = qp->f->o.retry_ms * TD_NS_PER_MS;
    return by_code < bound ? by_code : bound;
}

static void on_lost(struct fake_qp *qp)
{
    uint64_t now_ns = td_now_ns(), limit_ns = retry_ns(qp);
    if (!qp->first_loss_ns) qp->first_loss_ns = now_ns;
    if (now_ns - qp->first_loss_ns >= limit_ns) {
        send_fail(qp, TD_VB_WC_RETRY_EXC);
        return;
    }
    send_rewind(qp);
    uint64_t pause_ns = limit_ns / 4 < TD_NS_PER_MS ? limit_ns / 4 : TD_NS_PER_MS;
    qp->wait_until_ns = now_ns + pause_ns;
}

static void on_rnr(struct fake_qp *qp, uint32_t code)
{
    /* In steps of 10 us, as the InfiniBand specification counts them. */
    static const uint32_t wait[32] = {65536, 1,    2,    3,     4,     6,     8,     12,
                                      16,    24,   32,   48,    64,    96,    128,   192,
                                      256,   384,  512,  768,   1024,  1536,  2048,  3072,
                                      4096,  6144, 8192, 12288, 16384, 24576, 32768, 49152};
    if (qp->route.rnr_retry != 7 && qp->rnr_left-- == 0) {
        send_fail(qp, TD_VB_WC_RNR_RETRY_EXC);
        return;
    }
    send_rewind(qp);
    qp->wait_until_ns = td_now_ns() + wait[code & 31] * 10 * TD_NS_PER_US;
}

/* Completes all requests before `end`. False: the queue pair is in ERR now. */
static bool send_done(struct fake_qp *qp, uint64_t end)
{
    if (qp->sq_acked < end) { /* progress: patience begins anew */
        qp->first_loss_ns = 0;
        qp->rnr_left = qp->route.rnr_retry;
    }
    while (qp->sq_acked < end) {
        struct wqe *w = wqe_at(qp, qp->sq_acked);
        if (w->fault) {
            send_fail(qp, w->fault_status);
            return false;
        }
        uint64_t position = qp->sq_acked++;
        if (w->flags & WQE_SIGNALED) send_complete(qp, position, TD_VB_WC_SUCCESS);
        if (atomic_load(&qp->state) == ERR) return false;
    }
    return true;
}

static enum td_vb_wc_status read_take(struct fake_qp *qp, uint32_t from, const struct cell *c)
{
    struct td_fake_fabric *f = qp->f;
    struct node *n = &f->shared->nodes[from];
    const struct wqe *w = wqe_at(qp, c->seq);
    const struct td_vb_sge *sge = (const struct td_vb_sge *)(w + 1);
    _Atomic uint32_t *key_live = &n->key_live[c->rkey >> 8 & (KEYS_MAX - 1)];
    uint64_t at = c->remote_addr;
    bool ok = true;
    if (!c->bytes) return TD_VB_WC_SUCCESS; /* no key was looked at either */
    for (uint32_t i = 0; i < w->n_sge && ok; i++) {
        uint8_t *to = local_memory(f, qp->device, &sge[i], TD_VB_LOCAL_WRITE);
        if (!to) return TD_VB_WC_LOC_PROT;
        if (atomic_load(key_live) != c->rkey ||
            atomic_load(&n->live[c->src_qp % QPS_MAX]) != c->src_qp)
            return TD_VB_WC_RETRY_EXC;
        struct iovec piece = {.iov_base = (void *)(uintptr_t)at, .iov_len = sge[i].bytes};
        if (f->o.no_copy) continue;
        uint8_t *into = f->o.device_late && is_dmabuf(f, to) ? bounce_get(f, sge[i].bytes) : to;
        if (!into) into = to;
        if (from == f->node)
            memcpy(into, piece.iov_base, piece.iov_len);
        else
            ok = !piece.iov_len || read_other(f, from, into, piece.iov_len, &piece, 1);
        if (ok && into != to && !late_add(f, qp->device, to, into, sge[i].bytes))
            memcpy(to, into, sge[i].bytes);
        at += sge[i].bytes;
        f->turn_bytes += sge[i].bytes;
    }
    ok = ok && atomic_load(key_live) == c->rkey &&
         atomic_load(&n->live[c->src_qp % QPS_MAX]) == c->src_qp &&
         atomic_load(&n->inc) == c->src_inc;
    return ok ? TD_VB_WC_SUCCESS : TD_VB_WC_RETRY_EXC;
}

static void on_reply(struct td_fake_fabric *f, uint32_t from, const struct cell *c)
{
    if (f->inflight_inc[from] == c->src_inc && f->inflight[from]) {
        if (f->inflight[from]-- == INFLIGHT_MAX) f->run_all_pending = true;
    }
    struct fake_qp *qp = qp_find(f, c->dst_qp);
    if (!qp || atomic_load(&qp->state) != RTS || qp->round != c->round) return;
    TD_ASSERT(c->seq >= qp->sq_acked && c->seq < qp->sq_sent);
    bit_set(f->run, qp->index);
    if (c->status != REPLY_OK) {
        if (!send_done(qp, c->seq)) return;
        if (c->status == REPLY_LOST)
            on_lost(qp);
        else if (c->status == REPLY_RNR)
            on_rnr(qp, c->imm);
        else
            send_fail(qp, c->status);
        return;
    }
    if (c->op == TD_VB_READ) {
        if (!send_done(qp, c->seq)) return;
        enum td_vb_wc_status status =
            c->flags & CELL_TAKEN ? TD_VB_WC_SUCCESS : read_take(qp, from, c);
        if (status) {
            send_fail(qp, status);
            return;
        }
        qp->reads_out--;
    }
    send_done(qp, c->seq + 1);
}

static bool rule_strikes(struct td_fake_fabric *f, const struct fake_qp *qp, bool at_post,
                         struct td_fake_rule *ret_rule)
{
    bool strikes = false;
    for (uint32_t i = 0; i < f->n_rules; i++) {
        struct rule *rule = &f->rules[i];
        if ((rule->given.fault == TD_FAKE_POST_PARTIAL) != at_post ||
            (rule->given.device != TD_FAKE_ALL && rule->given.device != qp->device->index) ||
            (rule->given.qp_num && rule->given.qp_num != qp->pub.num) || strikes || --rule->left)
            continue;
        strikes = true;
        *ret_rule = rule->given;
        if (at_post) atomic_fetch_sub(&f->n_post_rules, 1);
        f->rules[i--] = f->rules[--f->n_rules];
    }
    return strikes;
}

/* Called once for each request; may mark it as one that fails. False: it is not sent for now. */
static void faults_choose(struct fake_qp *qp, struct wqe *w)
{
    struct td_fake_fabric *f = qp->f;
    struct td_fake_rule rule;
    w->flags |= WQE_SEEN;
    if (f->n_rules && rule_strikes(f, qp, false, &rule)) {
        w->fault = (uint8_t)rule.fault;
        w->fault_status = (uint8_t)rule.status;
    } else if (f->o.fault_ppm && fake_random(f) % 1000000 < f->o.fault_ppm) {
        static const uint8_t status[4] = {TD_VB_WC_RETRY_EXC, TD_VB_WC_RETRY_EXC, TD_VB_WC_REM_OP,
                                          TD_VB_WC_WR_FLUSH};
        uint32_t which = (uint32_t)(fake_random(f) % 4);
        w->fault = which == 0 ? TD_FAKE_FAIL_BEFORE : TD_FAKE_FAIL_AFTER;
        /* flushed, the first of its queue pair: this is how a silent break looks */
        w->fault_status = status[which];
    }
}

/* BIND_MW and LOCAL_INV, which never leave this node. */
static enum td_vb_wc_status local_operation(struct fake_qp *qp, const struct wqe *w)
{
    struct td_fake_fabric *f = qp->f;
    if (w->op == TD_VB_LOCAL_INV) {
        struct key *k = w->rkey >> 8 < KEYS_MAX ? f->keys[w->rkey >> 8] : NULL;
        if (!k || !k->is_window || k->device != qp->device || !k->bound_rkey ||
            k->bound_rkey != w->rkey || k->bound_qp != qp->pub.num)
            return TD_VB_WC_LOC_QP_OP;
        k->bound_rkey = 0;
        k->region->n_windows--;
        k->region = NULL;
        return TD_VB_WC_SUCCESS;
    }
    const struct bind *b = (const struct bind *)(w + 1);
    struct key *k = b->window, *region = b->region;
    /* The window must be free: one of type 2 is invalidated before it is bound again. */
    unsigned needed = TD_VB_MW_BIND | TD_VB_LOCAL_WRITE;
    if (k->device != qp->device || region->device != qp->device || k->bound_rkey ||
        (region->access & needed) != needed || !b->bytes ||
        !range_within(b->addr, b->bytes, region->base, region->bytes))
        return TD_VB_WC_MW_BIND;
    k->bound_rkey = w->rkey;
    k->bound_qp = qp->pub.num;
    k->region = region;
    k->base = b->addr;
    k->bytes = b->bytes;
    k->host = region->host + (b->addr - region->base);
    k->access = TD_VB_REMOTE_WRITE;
    region->n_windows++;
    return TD_VB_WC_SUCCESS;
}

/* Fills pieces with this process's addresses. */
static enum td_vb_wc_status send_check(struct fake_qp *qp, struct wqe *w, struct cell *c)
{
    const struct td_vb_sge *sge = (const struct td_vb_sge *)(w + 1);
    uint64_t bytes = 0;
    uint8_t n = 0;
    for (uint32_t i = 0; i < w->n_sge; i++) {
        if (!sge[i].bytes) continue;
        uint8_t *memory =
            local_memory(qp->f, qp->device, &sge[i], w->op == TD_VB_READ ? TD_VB_LOCAL_WRITE : 0);
        if (!memory) return TD_VB_WC_LOC_PROT;
        c->sge[n].addr = (uint64_t)(uintptr_t)memory;
        c->sge[n++].bytes = sge[i].bytes;
        bytes += sge[i].bytes;
    }
    if (bytes > MAX_MESSAGE) return TD_VB_WC_LOC_LEN;
    if (w->op == TD_VB_READ && !qp->route.rd_atomic_out) return TD_VB_WC_LOC_QP_OP;
    c->n_sge = w->op == TD_VB_READ ? 0 : n;
    w->bytes = bytes;
    return TD_VB_WC_SUCCESS;
}

/* A bind or an invalidation, which is done here; false when the queue stops at it. */
static bool do_locally(struct fake_qp *qp, struct wqe *w, bool is_first)
{
    if (!is_first) return false;
    enum td_vb_wc_status status = local_operation(qp, w);
    if (status) {
        send_fail(qp, status);
        return false;
    }
    w->psn = qp->tx_psn;
    qp->sq_sent++;
    return send_done(qp, qp->sq_sent);
}

/* The request's cell, whose bytes and pieces send_check has written. */
static void fill_cell(struct fake_qp *qp, struct wqe *w, uint32_t inc, struct cell *c)
{
    struct td_fake_fabric *f = qp->f;
    w->psn = qp->tx_psn;
    qp->tx_psn = psn_after(w->psn, w->bytes, qp->route.mtu_bytes);
    qp->dst_inc = inc;
    if (w->op == TD_VB_READ) qp->reads_out++;
    f->inflight[qp->dst_node]++;
    c->src_inc = f->inc;
    c->dst_inc = inc;
    c->kind = CELL_REQUEST;
    c->op = w->op;
    c->flags = w->flags & WQE_SIGNALED ? CELL_SIGNALED : 0;
    c->src_qp = qp->pub.num;
    c->dst_qp = qp->route.remote_qp;
    c->psn = w->psn;
    c->round = qp->round;
    c->src_gid = qp->src_gid;
    c->dst_gid = qp->dst_gid;
    c->imm = w->imm;
    c->rkey = w->rkey;
    c->mtu = qp->route.mtu_bytes;
    c->reads = qp->reads_out;
    c->seq = qp->sq_sent++;
    c->remote_addr = w->remote_addr;
    c->bytes = w->bytes;
}

/* Puts a request onto its node's ring; false when the queue stops at it. */
static bool put_request(struct fake_qp *qp, struct wqe *w, bool is_first)
{
    struct td_fake_fabric *f = qp->f;
    struct ring *ring = ring_to(f, qp->dst_node);
    struct cell *c = ring_reserve(ring), unused;
    enum td_vb_wc_status status = send_check(qp, w, c ? c : &unused);
    if (status) {
        if (is_first) send_fail(qp, status);
        return false;
    }
    if (w->op == TD_VB_READ && qp->reads_out >= qp->route.rd_atomic_out) return false;
    uint32_t inc = atomic_load(&f->shared->nodes[qp->dst_node].inc);
    if (!(inc & 1) || !port_is_up(f, qp->device->index, qp->port)) {
        if (is_first) on_lost(qp);
        return false;
    }
    if (f->inflight_inc[qp->dst_node] != inc) {
        f->inflight_inc[qp->dst_node] = inc;
        f->inflight[qp->dst_node] = 0;
    }
    if (!c || f->inflight[qp->dst_node] >= INFLIGHT_MAX) return false;
    fill_cell(qp, w, inc, c);
    atomic_fetch_add_explicit(&ring->tail, 1, memory_order_release);
    COUNT(f, requests_sent, 1);
    return true;
}

/* Sends what can be sent now. Whatever stops it (credit, a fence, a pause, an earlier request) ends
 * in a reply or the tick, which call this again. */
static void send_turn(struct fake_qp *qp)
{
    struct td_fake_fabric *f = qp->f;
    if (atomic_load(&qp->state) == ERR) {
        qp_flush(qp);
        return;
    }
    if (atomic_load(&qp->state) != RTS || qp->wait_until_ns || qp->stalled) return;
    uint64_t tail = atomic_load_explicit(&qp->sq_tail, memory_order_acquire);
    bool sent_any = false;
    for (uint32_t turn = 0; qp->sq_sent != tail; turn++) {
        bit_set(f->pending, qp->index);
        if (turn == TURN_REQUESTS) {
            bit_set(f->run, qp->index);
            break;
        }
        struct wqe *w = wqe_at(qp, qp->sq_sent);
        if (!(w->flags & WQE_SEEN)) faults_choose(qp, w);
        if (w->fault == TD_FAKE_STALL) {
            qp->stalled = true;
            break;
        }
        bool is_first = qp->sq_acked == qp->sq_sent; /* errors found here are told after all that
                                                        is earlier */
        if (w->fault == TD_FAKE_FAIL_BEFORE) {
            if (is_first) send_fail(qp, w->fault_status);
            break;
        }
        if ((w->flags & WQE_FENCE) && qp->reads_out) break;
        if (w->op == TD_VB_BIND_MW || w->op == TD_VB_LOCAL_INV) {
            if (!do_locally(qp, w, is_first)) break;
            continue;
        }
        if (!put_request(qp, w, is_first)) break;
        sent_any = true;
    }
    if (sent_any && qp->dst_node != f->node) {
        /* orders the publications against `sleeping` */
        atomic_fetch_add(&ring_to(f, qp->dst_node)->tail, 0);
        node_wake(&f->shared->nodes[qp->dst_node]);
    }
}

/* ---- the NIC's thread ---- */

static void tick(struct td_fake_fabric *f, uint64_t now_ns)
{
    for (uint32_t w = 0; w < QP_WORDS; w++) {
        for (uint64_t bits = f->pending[w]; bits; bits &= bits - 1) {
            uint32_t i = w * 64 + (uint32_t)__builtin_ctzll(bits);
            struct fake_qp *qp = f->qps[i];
            if (!qp || atomic_load(&qp->state) != RTS ||
                (qp->sq_sent == qp->sq_acked && qp->sq_sent == atomic_load(&qp->sq_tail))) {
                bit_clear(f->pending, i);
                continue;
            }
            if (qp->wait_until_ns && now_ns >= qp->wait_until_ns) qp->wait_until_ns = 0;
            if (qp->sq_sent != qp->sq_acked && !qp->stalled) {
                /* invariant 4: only death is silence */
                struct node *n = &f->shared->nodes[qp->dst_node];
                bool look = now_ns - f->alive_ns[qp->dst_node] > 5 * TD_NS_PER_MS;
                if (look) f->alive_ns[qp->dst_node] = now_ns;
                if (atomic_load(&n->inc) != qp->dst_inc || (look && !node_alive(n, qp->dst_inc))) {
                    on_lost(qp);
                    continue;
                }
            }
            bit_set(f->run, i);
        }
    }
}

static void control_apply(struct td_fake_fabric *f)
{
    for (uint32_t d = 0; d < f->o.devices; d++) {
        uint32_t down = atomic_load(&f->me->ports_down[d]), changed = down ^ f->ports_down_seen[d];
        f->ports_down_seen[d] = down;
        for (uint32_t port = 1; port <= f->o.ports; port++) {
            if (!(changed >> (port - 1) & 1)) continue;
            bool is_down = down >> (port - 1) & 1;
            async_raise_all(f, d,
                            (struct td_vb_async){.kind = is_down ? TD_VB_ASYNC_PORT_ERR
                                                                 : TD_VB_ASYNC_PORT_ACTIVE,
                                                 .port = (uint8_t)port});
        }
    }
}

static bool rings_take(struct td_fake_fabric *f)
{
    bool any = false;
    uint32_t n_nodes = atomic_load_explicit(&f->shared->n_nodes, memory_order_relaxed);
    for (uint32_t from = 0; from < n_nodes; from++) {
        struct ring *ring = &f->shared->rings[from][f->node];
        uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed),
                 tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
        for (int n = 0; head != tail && n < TURN_CELLS && f->turn_bytes < TURN_BYTES; n++) {
            const struct cell *c = &ring->cells[head % RING_CELLS];
            if (c->dst_inc == f->inc) {
                if (c->kind == CELL_REPLY)
                    on_reply(f, from, c);
                else if (!hold_take(f, from, c))
                    on_request(f, from, c, NULL, false);
            }
            atomic_store_explicit(&ring->head, ++head, memory_order_release);
            any = true;
        }
    }
    return any;
}

static bool queues_run(struct td_fake_fabric *f)
{
    bool any = false;
    uint64_t summary = atomic_load(&f->dirty_summary) ? atomic_exchange(&f->dirty_summary, 0) : 0;
    for (; summary; summary &= summary - 1) {
        uint32_t w = (uint32_t)__builtin_ctzll(summary);
        f->run[w] |= atomic_exchange(&f->dirty[w], 0);
    }
    for (uint32_t w = 0; w < QP_WORDS; w++) {
        if (f->run_all_pending) f->run[w] |= f->pending[w];
        uint64_t bits = f->run[w];
        f->run[w] = 0;
        for (; bits; bits &= bits - 1) {
            struct fake_qp *qp = f->qps[w * 64 + (uint32_t)__builtin_ctzll(bits)];
            if (qp) send_turn(qp);
            any = true;
        }
    }
    f->run_all_pending = false;
    return any;
}

static bool stashes_land(struct td_fake_fabric *f)
{
    bool any = false;
    for (uint32_t w = 0; w < QP_WORDS; w++) {
        for (uint64_t bits = f->stashes[w]; bits; bits &= bits - 1) {
            stash_land(f->qps[w * 64 + (uint32_t)__builtin_ctzll(bits)]);
            any = true;
        }
    }
    return any;
}

static bool nic_has_news(struct td_fake_fabric *f)
{
    uint32_t n_nodes = atomic_load(&f->shared->n_nodes);
    for (uint32_t from = 0; from < n_nodes; from++) {
        struct ring *ring = &f->shared->rings[from][f->node];
        if (atomic_load(&ring->tail) != atomic_load_explicit(&ring->head, memory_order_relaxed))
            return true;
    }
    return atomic_load(&f->dirty_summary) || atomic_load(&f->me->control) != f->control_seen ||
           atomic_load(&f->stop);
}

static bool nic_waits_for_time(const struct td_fake_fabric *f)
{
    if (f->held) return true;
    for (uint32_t w = 0; w < QP_WORDS; w++) {
        if (f->pending[w]) return true;
    }
    return false;
}

static void *nic_main(void *arg)
{
    struct td_fake_fabric *f = arg;
    uint64_t idle_since_ns = 0;
    while (!atomic_load(&f->stop)) {
        pthread_mutex_lock(&f->lock);
        f->turn_bytes = 0;
        uint32_t control = atomic_load(&f->me->control);
        if (control != f->control_seen) {
            f->control_seen = control;
            control_apply(f);
        }
        uint64_t now_ns = td_now_ns();
        if (now_ns - f->tick_ns >= TD_NS_PER_MS / 2) {
            f->tick_ns = now_ns;
            tick(f, now_ns);
        }
        bool did = holds_release(f);
        did = rings_take(f) || did;
        did = queues_run(f) || did;
        if (!did) did = stashes_land(f);
        bool timed = nic_waits_for_time(f);
        pthread_mutex_unlock(&f->lock);
        while (atomic_load(&f->want)) sched_yield(); /* glibc's mutexes are not fair */
        if (did) {
            idle_since_ns = 0;
            continue;
        }
        if (!idle_since_ns) idle_since_ns = now_ns;
        if (f->o.spin_us && now_ns - idle_since_ns < f->o.spin_us * TD_NS_PER_US) continue;
        uint32_t wake = atomic_load(&f->me->wake);
        atomic_store(&f->me->sleeping, 1);
        if (!nic_has_news(f)) {
            /* Always with a time-out: a node may die between lowering `sleeping` and the wake. */
            struct timespec timeout = {.tv_nsec = !timed          ? 20000000
                                                  : f->o.delay_us ? 50000
                                                                  : 500000};
            syscall(SYS_futex, &f->me->wake, FUTEX_WAIT, wake, &timeout, NULL, 0);
        }
        atomic_store(&f->me->sleeping, 0);
    }
    return NULL;
}

/* ---- the table: devices ---- */

static struct td_fake_fabric *fabric_of(struct td_vb_device *d)
{
    return ((struct fake_device *)d)->f;
}

static int fake_list(const struct td_verbs *vb, char names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX],
                     uint32_t *ret_n)
{
    struct td_fake_fabric *f = vb->ctx;
    for (uint32_t i = 0; i < f->o.devices; i++)
        snprintf(names[i], TD_VB_NAME_MAX, "fake%" PRIu32, i);
    *ret_n = f->o.devices;
    return 0;
}

static int fake_open(const struct td_verbs *vb, const char *name, struct td_vb_device **ret_device)
{
    struct td_fake_fabric *f = vb->ctx;
    char names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX];
    uint32_t n, i = 0;
    fake_list(vb, names, &n);
    while (i < n && strcmp(names[i], name) != 0) i++;
    if (i == n) return ENODEV;
    struct fake_device *d = calloc(1, sizeof *d);
    if (!d) return ENOMEM;
    d->f = f;
    d->index = i;
    d->async_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (d->async_fd < 0) {
        int e = errno;
        free(d);
        return e;
    }
    fake_lock(f);
    d->next = f->devices;
    f->devices = d;
    fake_unlock(f);
    *ret_device = (struct td_vb_device *)d;
    return 0;
}

static void srq_free(struct fake_srq *srq)
{
    free(srq->rq.ids);
    free(srq);
}

static void fake_close(struct td_vb_device *device)
{
    struct fake_device *d = (struct fake_device *)device;
    if (!d) return;
    struct td_fake_fabric *f = d->f;
    fake_lock(f);
    /* the caller's bug: what it made it destroys first */
    TD_ASSERT(!d->n_qps && !d->n_cqs && !d->n_keys && !d->n_srqs);
    for (struct fake_device **at = &f->devices; *at; at = &(*at)->next) {
        if (*at != d) continue;
        *at = d->next;
        break;
    }
    fake_unlock(f);
    while (d->dead_srqs) {
        struct fake_srq *srq = d->dead_srqs;
        d->dead_srqs = srq->next_dead;
        srq_free(srq);
    }
    close(d->async_fd);
    free(d);
}

static int fake_query(struct td_vb_device *d, struct td_vb_limits *ret_limits)
{
    *ret_limits = fabric_of(d)->o.limits;
    return 0;
}

static bool port_exists(const struct td_fake_fabric *f, uint32_t port)
{
    return port >= 1 && port <= f->o.ports;
}

static int fake_query_port(struct td_vb_device *device, uint8_t port, struct td_vb_port *ret_port)
{
    struct fake_device *d = (struct fake_device *)device;
    struct td_fake_fabric *f = d->f;
    if (!port_exists(f, port)) return EINVAL;
    *ret_port = (struct td_vb_port){.active = port_is_up(f, d->index, port),
                                    .ethernet = !f->o.infiniband,
                                    .mtu_bytes = f->o.mtu_bytes,
                                    .lid = f->o.infiniband ? lid_of(f->node, d->index, port) : 0,
                                    .bits_per_s = 100000000000ull,
                                    .n_gids = TD_FAKE_GIDS};
    return 0;
}

static int fake_query_gid(struct td_vb_device *device, uint8_t port, uint32_t index,
                          struct td_vb_gid *ret_gid)
{
    struct fake_device *d = (struct fake_device *)device;
    struct td_fake_fabric *f = d->f;
    if (!port_exists(f, port) || index >= TD_FAKE_GIDS) return EINVAL;
    fake_lock(f);
    uint32_t kind = f->gid_kind[d->index][port - 1][index],
             type = f->gid_type[d->index][port - 1][index];
    bool is_down = f->gid_down[d->index][port - 1][index];
    fake_unlock(f);
    if (kind == TD_FAKE_GID_EMPTY) return ENODATA;
    struct td_vb_gid gid = {.index = index,
                            .type = (enum td_vb_gid_type)type,
                            .netdev_up = !is_down && !f->o.infiniband};
    gid_encode(gid_code(f->node, d->index, port, kind, type), gid.raw);
    if (!f->o.infiniband)
        snprintf(gid.netdev, sizeof gid.netdev, "fake%" PRIu32 "p%u", d->index, (unsigned)port);
    *ret_gid = gid;
    return 0;
}

static int fake_async_fd(struct td_vb_device *d) { return ((struct fake_device *)d)->async_fd; }

static bool fake_async_get(struct td_vb_device *device, struct td_vb_async *ret_event)
{
    struct fake_device *d = (struct fake_device *)device;
    if (!atomic_load(&d->events_n)) return false; /* asked often */
    fake_lock(d->f);
    bool any = d->events_n;
    if (any) {
        *ret_event = d->events[d->events_head];
        d->events_head = (d->events_head + 1) % ASYNC_MAX;
        if (!--d->events_n) fd_lower(d->async_fd);
    }
    fake_unlock(d->f);
    return any;
}

/* ---- the table: memory ---- */

/* A place for a key, under the lock: the lowest free index from the last one on, because keys of
 * hardware are reused only after a while. */
static int key_place(struct td_fake_fabric *f, struct key *k)
{
    for (uint32_t n = 0; n < KEYS_MAX; n++) {
        uint32_t i = (f->key_next + n) % KEYS_MAX;
        if (!i || f->keys[i]) continue;
        f->key_next = i + 1;
        k->index = i;
        f->keys[i] = k;
        k->device->n_keys++;
        return 0;
    }
    return ENOMEM;
}

/* This process can read the byte: the kernel takes it into a pipe. Unlike process_vm_readv a pipe
 * is there under every emulator, and unlike /proc/PID/mem it does not read what is PROT_NONE. */
static bool memory_is_there(uint64_t addr)
{
    int fds[2];
    TD_ASSERT(pipe2(fds, O_CLOEXEC) == 0);
    bool is_there = syscall(SYS_write, fds[1], addr, 1ul) == 1;
    close(fds[0]);
    close(fds[1]);
    return is_there;
}

static int region_make(struct fake_device *d, uint8_t *host, uint64_t base, uint64_t bytes,
                       unsigned access, void *map, size_t map_bytes, struct td_vb_mr **ret_mr)
{
    struct td_fake_fabric *f = d->f;
    const struct td_vb_limits *l = &f->o.limits;
    unsigned known = TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE | TD_VB_REMOTE_READ | TD_VB_MW_BIND |
                     TD_VB_RELAXED_ORDERING;
    if (!bytes || bytes > l->max_mr_bytes || base + bytes < base || access & ~known ||
        ((access & TD_VB_REMOTE_WRITE) && !(access & TD_VB_LOCAL_WRITE)) ||
        ((access & TD_VB_MW_BIND) && !l->max_mw))
        return EINVAL;
    struct key *k = calloc(1, sizeof *k);
    if (!k) return ENOMEM;
    *k = (struct key){.device = d,
                      .access = access,
                      .base = base,
                      .bytes = bytes,
                      .host = host,
                      .map = map,
                      .map_bytes = map_bytes};
    fake_lock(f);
    int e = key_place(f, k);
    if (!e) {
        uint32_t variant = (f->key_variant += 2) & 0xfe; /* so that mixing up the two keys shows */
        k->pub.mr = (struct td_vb_mr){.addr = base,
                                      .bytes = bytes,
                                      .lkey = k->index << 8 | variant,
                                      .rkey = k->index << 8 | variant | 1,
                                      .device = (struct td_vb_device *)d};
        atomic_store(&f->me->key_live[k->index], k->pub.mr.rkey);
    }
    fake_unlock(f);
    if (e)
        free(k);
    else
        *ret_mr = &k->pub.mr;
    return e;
}

static int fake_reg(struct td_vb_device *device, void *addr, uint64_t bytes, unsigned access,
                    struct td_vb_mr **ret_mr)
{
    uint64_t base = (uint64_t)(uintptr_t)addr;
    if (bytes && base + bytes > base &&
        (!memory_is_there(base) || !memory_is_there(base + bytes - 1)))
        return EFAULT;
    return region_make((struct fake_device *)device, addr, base, bytes, access, NULL, 0, ret_mr);
}

/* Anything that can be mapped is accepted as a dma-buf, for example a memfd. */
static int fake_reg_dmabuf(struct td_vb_device *device, uint64_t offset, uint64_t bytes,
                           uint64_t iova, int fd, unsigned access, struct td_vb_mr **ret_mr)
{
    uint64_t page = 4096, before = offset % page;
    struct stat st;
    if (fstat(fd, &st)) return errno;
    if (!bytes || offset + bytes < offset || (uint64_t)st.st_size < offset + bytes ||
        iova % page != before)
        return EINVAL;
    size_t map_bytes = bytes + before;
    uint8_t *map =
        mmap(NULL, map_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(offset - before));
    if (map == MAP_FAILED) return EOPNOTSUPP;
    int e = region_make((struct fake_device *)device, map + before, iova, bytes, access, map,
                        map_bytes, ret_mr);
    if (e) munmap(map, map_bytes);
    return e;
}

static int key_remove(struct key *k)
{
    struct td_fake_fabric *f = k->device->f;
    fake_lock(f);
    bool is_busy = k->n_windows;
    if (!is_busy) {
        if (k->map) late_over(f, NULL, true);
        if (k->is_window && k->bound_rkey) k->region->n_windows--;
        atomic_store(&f->me->key_live[k->index], 0);
        f->keys[k->index] = NULL;
        k->device->n_keys--;
    }
    fake_unlock(f);
    if (is_busy) return EBUSY;
    if (k->map) munmap(k->map, k->map_bytes);
    free(k);
    return 0;
}

static int fake_dereg(struct td_vb_mr *mr) { return mr ? key_remove((struct key *)mr) : 0; }

static int fake_mw_alloc(struct td_vb_device *device, struct td_vb_mw **ret_mw)
{
    struct fake_device *d = (struct fake_device *)device;
    struct td_fake_fabric *f = d->f;
    if (!f->o.limits.max_mw || !f->o.limits.mw_type2) return EOPNOTSUPP;
    struct key *k = calloc(1, sizeof *k);
    if (!k) return ENOMEM;
    k->is_window = true;
    k->device = d;
    fake_lock(f);
    uint32_t n = 0;
    for (uint32_t i = 0; i < KEYS_MAX; i++)
        n += f->keys[i] && f->keys[i]->is_window && f->keys[i]->device == d;
    int e = n >= f->o.limits.max_mw ? ENOMEM : key_place(f, k);
    fake_unlock(f);
    if (e) {
        free(k);
        return e;
    }
    k->pub.mw = (struct td_vb_mw){.rkey = k->index << 8, .device = device};
    *ret_mw = &k->pub.mw;
    return 0;
}

static int fake_mw_free(struct td_vb_mw *mw) { return mw ? key_remove((struct key *)mw) : 0; }

/* ---- the table: completion queues and shared receives ---- */

static int fake_cq_create(struct td_vb_device *device, uint32_t depth, struct td_vb_cq **ret_cq)
{
    struct fake_device *d = (struct fake_device *)device;
    if (!depth || depth > d->f->o.limits.max_cqe) return EINVAL;
    struct fake_cq *cq = aligned_alloc(64, (sizeof *cq + 63) / 64 * 64);
    struct cqe *ring = malloc(pow2_from(depth) * sizeof *ring);
    int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (!cq || !ring || fd < 0) {
        int e = fd < 0 ? errno : ENOMEM;
        if (fd >= 0) close(fd);
        free(ring);
        free(cq);
        return e;
    }
    *cq = (struct fake_cq){
        .device = d, .ring = ring, .mask = pow2_from(depth) - 1, .depth = depth, .fd = fd};
    cq_poison_to(cq, CQ_POISON_STEP);
    fake_lock(d->f);
    d->n_cqs++;
    fake_unlock(d->f);
    *ret_cq = (struct td_vb_cq *)cq;
    return 0;
}

static void fake_cq_destroy(struct td_vb_cq *c)
{
    struct fake_cq *cq = (struct fake_cq *)c;
    if (!cq) return;
    fake_lock(cq->device->f);
    TD_ASSERT(!cq->n_qps);
    cq->device->n_cqs--;
    fake_unlock(cq->device->f);
    close(cq->fd);
    free(cq->ring);
    free(cq);
}

static int fake_cq_fd(struct td_vb_cq *cq) { return ((struct fake_cq *)cq)->fd; }

static int fake_cq_arm(struct td_vb_cq *cq)
{
    atomic_store(&((struct fake_cq *)cq)->armed, true);
    return 0;
}

static void fake_cq_clear(struct td_vb_cq *cq) { fd_lower(((struct fake_cq *)cq)->fd); }

static int fake_poll(struct td_vb_cq *c, struct td_vb_wc *wcs, int max)
{
    struct fake_cq *cq = (struct fake_cq *)c;
    struct td_fake_fabric *f = cq->device->f;
    uint64_t head = atomic_load_explicit(&cq->head, memory_order_relaxed),
             tail = atomic_load(&cq->tail), from = head;
    int n = 0;
    if (atomic_load_explicit(&cq->blank, memory_order_relaxed)) return 0;
    while (n < max && head != tail) {
        const struct cqe *e = &cq->ring[head++ & cq->mask];
        struct qp_slot *slot = &f->slots[e->qp_num % QPS_MAX];
        bool has_qp = atomic_load_explicit(&slot->num, memory_order_acquire) == e->qp_num;
        if (e->is_recv && e->srq)
            atomic_fetch_add_explicit(&e->srq->freed, 1, memory_order_release);
        else if (has_qp && e->is_recv)
            atomic_fetch_add_explicit(&slot->rq_freed, 1, memory_order_release);
        else if (has_qp)
            atomic_store_explicit(&slot->sq_freed, e->free_to, memory_order_release);
        if (!has_qp) continue; /* completions go with their queue pair */
        wcs[n++] = (struct td_vb_wc){.id = e->id,
                                     .status = (enum td_vb_wc_status)e->status,
                                     .op = (enum td_vb_op)e->op,
                                     .imm = e->imm,
                                     .qp_num = e->qp_num};
    }
    if (head != from) atomic_store_explicit(&cq->head, head, memory_order_release);
    return n;
}

static int receives_init(struct receives *rq, uint32_t depth)
{
    uint64_t room = pow2_from(depth ? depth : 1);
    rq->ids = calloc(room, sizeof *rq->ids);
    rq->mask = room - 1;
    rq->depth = depth;
    return rq->ids ? 0 : ENOMEM;
}

static int receives_post(struct receives *rq, uint64_t freed, uint64_t id, uint32_t n)
{
    uint64_t tail = atomic_load_explicit(&rq->tail, memory_order_relaxed);
    if (tail - freed + n > rq->depth) return ENOMEM;
    for (uint32_t i = 0; i < n; i++) rq->ids[(tail + i) & rq->mask] = id;
    atomic_store(&rq->tail, tail + n); /* sequentially consistent against the state that post_recv
                                         looks at next */
    return 0;
}

static int fake_srq_create(struct td_vb_device *device, uint32_t max_wr, struct td_vb_srq **ret_srq)
{
    struct fake_device *d = (struct fake_device *)device;
    const struct td_vb_limits *l = &d->f->o.limits;
    if (!l->max_srq) return EOPNOTSUPP;
    if (!max_wr || max_wr > l->max_srq_wr) return EINVAL;
    struct fake_srq *srq = calloc(1, sizeof *srq);
    if (!srq || receives_init(&srq->rq, max_wr)) {
        free(srq);
        return ENOMEM;
    }
    srq->device = d;
    fake_lock(d->f);
    bool is_full = d->n_srqs >= l->max_srq;
    if (!is_full) d->n_srqs++;
    fake_unlock(d->f);
    if (is_full) {
        srq_free(srq);
        return ENOMEM;
    }
    *ret_srq = (struct td_vb_srq *)srq;
    return 0;
}

static void fake_srq_destroy(struct td_vb_srq *s)
{
    struct fake_srq *srq = (struct fake_srq *)s;
    if (!srq) return;
    fake_lock(srq->device->f);
    TD_ASSERT(!srq->n_qps);
    srq->device->n_srqs--;
    srq->next_dead = srq->device->dead_srqs;
    srq->device->dead_srqs = srq;
    fake_unlock(srq->device->f);
}

static int fake_srq_post(struct td_vb_srq *s, uint64_t id, uint32_t n)
{
    struct fake_srq *srq = (struct fake_srq *)s;
    return receives_post(&srq->rq, atomic_load_explicit(&srq->freed, memory_order_acquire), id, n);
}

/* ---- the table: queue pairs ---- */

static int fake_qp_create(struct td_vb_device *device, struct td_vb_cq *c,
                          struct td_vb_qp_caps *caps, struct td_vb_qp **ret_qp)
{
    struct fake_device *d = (struct fake_device *)device;
    struct fake_cq *cq = (struct fake_cq *)c;
    struct fake_srq *srq = (struct fake_srq *)caps->srq;
    struct td_fake_fabric *f = d->f;
    const struct td_vb_limits *l = &f->o.limits;
    if (!cq || cq->device != d || (srq && srq->device != d) || !caps->send_wr ||
        caps->send_wr > l->max_qp_wr || (!srq && caps->recv_wr > l->max_qp_wr) ||
        caps->send_sge > l->max_sge || caps->send_sge > TD_VB_SGE_MAX)
        return EINVAL;
    struct fake_qp *qp = aligned_alloc(64, (sizeof *qp + 63) / 64 * 64);
    if (!qp) return ENOMEM;
    *qp = (struct fake_qp){.pub = {.device = device},
                           .f = f,
                           .device = d,
                           .cq = cq,
                           .srq = srq,
                           .sq_depth = caps->send_wr,
                           .sge_max = caps->send_sge};
    size_t tail_bytes = caps->send_sge * sizeof(struct td_vb_sge);
    if (tail_bytes < sizeof(struct bind)) tail_bytes = sizeof(struct bind);
    qp->stride = (sizeof(struct wqe) + tail_bytes + 15) / 16 * 16;
    qp->sq_mask = pow2_from(caps->send_wr) - 1;
    qp->sq = calloc(qp->sq_mask + 1, qp->stride);
    int e = !qp->sq || receives_init(&qp->rq, srq ? 0 : caps->recv_wr) ? ENOMEM : 0;
    fake_lock(f);
    if (!e && d->n_qps >= l->max_qp) e = ENOMEM;
    for (uint32_t tries = 0; !e; tries++) {
        if (tries == 2 * QPS_MAX) e = ENOMEM;
        uint32_t num = atomic_fetch_add(&f->shared->qp_next, 1) & PSN_MASK;
        if (num < 2 || f->qps[num % QPS_MAX])
            continue; /* 0 and 1 are the management queue pairs
                         of every port */
        qp->pub.num = num;
        qp->index = num % QPS_MAX;
        qp->slot = &f->slots[qp->index];
        break;
    }
    if (!e) {
        atomic_store(&qp->slot->sq_freed, 0);
        atomic_store(&qp->slot->rq_freed, 0);
        atomic_store(&qp->slot->num, qp->pub.num);
        f->qps[qp->index] = qp;
        d->n_qps++;
        cq->n_qps++;
        if (srq) srq->n_qps++;
    }
    fake_unlock(f);
    if (e) {
        free(qp->rq.ids);
        free(qp->sq);
        free(qp);
        return e;
    }
    caps->inline_bytes = caps->inline_bytes > 64 ? 64 : caps->inline_bytes;
    if (srq) caps->recv_wr = 0;
    *ret_qp = &qp->pub;
    return 0;
}

static void fake_qp_destroy(struct td_vb_qp *q)
{
    struct fake_qp *qp = (struct fake_qp *)q;
    if (!qp) return;
    struct td_fake_fabric *f = qp->f;
    fake_lock(f);
    atomic_store(&f->me->live[qp->index], 0);
    stash_drop(qp);
    f->qps[qp->index] = NULL;
    atomic_store(&qp->slot->num, 0);
    bit_clear(f->run, qp->index);
    bit_clear(f->pending, qp->index);
    qp->device->n_qps--;
    qp->cq->n_qps--;
    if (qp->srq) qp->srq->n_qps--;
    fake_unlock(f);
    free(qp->stash);
    free(qp->rq.ids);
    free(qp->sq);
    free(qp);
}

static int fake_qp_init(struct td_vb_qp *q, uint8_t port, uint16_t pkey_index, unsigned access)
{
    struct fake_qp *qp = (struct fake_qp *)q;
    int state = atomic_load(&qp->state);
    if ((state != RESET && state != INIT) || !port_exists(qp->f, port) || pkey_index != 0 ||
        access & ~(unsigned)(TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE | TD_VB_REMOTE_READ))
        return EINVAL;
    fake_lock(qp->f);
    qp->port = port;
    qp->access = access;
    atomic_store(&qp->state, INIT);
    fake_unlock(qp->f);
    return 0;
}

static int fake_qp_rtr(struct td_vb_qp *q, const struct td_vb_route *route)
{
    struct fake_qp *qp = (struct fake_qp *)q;
    struct td_fake_fabric *f = qp->f;
    uint32_t d = qp->device->index, mtu = route->mtu_bytes;
    bool good_mtu = (mtu == 256 || mtu == 512 || mtu == 1024 || mtu == 2048 || mtu == 4096) &&
                    mtu <= f->o.mtu_bytes;
    if (atomic_load(&qp->state) != INIT || route->port != qp->port || !good_mtu ||
        route->remote_qp < 2 || route->remote_qp > PSN_MASK || route->remote_psn > PSN_MASK ||
        route->rd_atomic_in > f->o.limits.max_rd_atomic_in || route->min_rnr_timer > 31 ||
        route->sl > 15 || route->ethernet == f->o.infiniband)
        return EINVAL;
    uint32_t src, dst;
    fake_lock(f);
    uint32_t kind = route->gid_index < TD_FAKE_GIDS
                        ? f->gid_kind[d][route->port - 1][route->gid_index]
                        : TD_FAKE_GID_EMPTY;
    uint32_t type = kind ? f->gid_type[d][route->port - 1][route->gid_index] : 0;
    fake_unlock(f);
    if (f->o.infiniband) {
        uint32_t lid = route->remote_lid - 1u;
        if (!route->remote_lid || lid >= 64 * TD_FAKE_NODES_MAX) return EINVAL;
        src = gid_code(f->node, d, route->port, KIND_LID, TD_VB_GID_IB);
        dst = gid_code(lid / 64, lid % 64 / 4, lid % 4 + 1, KIND_LID, TD_VB_GID_IB);
    } else {
        static const uint8_t zero[16];
        if (!kind || memcmp(route->remote_gid, zero, 16) == 0) return EINVAL;
        src = gid_code(f->node, d, route->port, kind, type);
        if (!gid_decode(route->remote_gid, type, &dst)) return ETIMEDOUT; /* no neighbour answers */
    }
    fake_lock(f);
    qp->route = *route;
    qp->src_gid = src;
    qp->dst_gid = dst;
    qp->dst_node = dst >> 24;
    qp->rx_psn = route->remote_psn;
    atomic_store(&f->me->live[qp->index], qp->pub.num);
    atomic_store(&qp->state, RTR);
    fake_unlock(f);
    return 0;
}

static int fake_qp_rts(struct td_vb_qp *q, const struct td_vb_route *route)
{
    struct fake_qp *qp = (struct fake_qp *)q;
    struct td_fake_fabric *f = qp->f;
    if (atomic_load(&qp->state) != RTR || route->local_psn > PSN_MASK || route->timeout > 31 ||
        route->retry > 7 || route->rnr_retry > 7 ||
        route->rd_atomic_out > f->o.limits.max_rd_atomic_out)
        return EINVAL;
    fake_lock(f);
    qp->route.timeout = route->timeout;
    qp->route.retry = route->retry;
    qp->route.rnr_retry = route->rnr_retry;
    qp->route.rd_atomic_out = route->rd_atomic_out;
    qp->rnr_left = route->rnr_retry;
    qp->tx_psn = route->local_psn;
    atomic_store(&qp->state, RTS);
    fake_unlock(f);
    return 0;
}

static int fake_qp_error(struct td_vb_qp *q)
{
    struct fake_qp *qp = (struct fake_qp *)q;
    if (atomic_load(&qp->state) == RESET) return EINVAL;
    fake_lock(qp->f);
    qp_to_err(qp, false);
    fake_unlock(qp->f);
    return 0;
}

static void qp_ring_doorbell(struct fake_qp *qp)
{
    struct td_fake_fabric *f = qp->f;
    uint32_t word = qp->index / 64;
    atomic_fetch_or(&f->dirty[word], 1ull << (qp->index % 64));
    atomic_fetch_or(&f->dirty_summary, 1ull << word);
    node_wake(f->me);
}

static int fake_post_recv(struct td_vb_qp *q, uint64_t id, uint32_t n)
{
    struct fake_qp *qp = (struct fake_qp *)q;
    int state = atomic_load_explicit(&qp->state, memory_order_relaxed);
    if (qp->srq || state == RESET) return EINVAL;
    int e = receives_post(&qp->rq, atomic_load_explicit(&qp->slot->rq_freed, memory_order_acquire),
                          id, n);
    /* Reads the state again after the receives are visible: a queue pair that broke in between
     * flushes them. */
    if (!e && atomic_load(&qp->state) == ERR) qp_ring_doorbell(qp);
    return e;
}

static uint32_t post_faults(struct fake_qp *qp, uint32_t n, int *ret_error)
{
    struct td_fake_rule rule;
    uint32_t taken = n;
    fake_lock(qp->f);
    for (uint32_t i = 0; i < n && taken == n; i++) {
        if (!rule_strikes(qp->f, qp, true, &rule)) continue;
        taken = i;
        *ret_error = rule.error;
    }
    fake_unlock(qp->f);
    return taken;
}

static int fake_post_send(struct td_vb_qp *q, struct td_vb_send *wrs, uint32_t n,
                          uint32_t *ret_n_posted)
{
    struct fake_qp *qp = (struct fake_qp *)q;
    struct td_fake_fabric *f = qp->f;
    int state = atomic_load_explicit(&qp->state, memory_order_relaxed), error = 0, fault = 0;
    uint32_t i = 0, limit = n;
    *ret_n_posted = 0;
    if (state != RTS && state != ERR) return EINVAL;
    if (atomic_load_explicit(&f->n_post_rules, memory_order_relaxed))
        limit = post_faults(qp, n, &fault);
    uint64_t tail = atomic_load_explicit(&qp->sq_tail, memory_order_relaxed),
             freed = atomic_load_explicit(&qp->slot->sq_freed, memory_order_acquire);
    for (; i < limit; i++) {
        struct td_vb_send *s = &wrs[i];
        if (tail + i - freed >= qp->sq_depth) {
            error = ENOMEM;
            break;
        }
        if (s->n_sge > qp->sge_max) {
            error = EINVAL;
            break;
        }
        struct wqe *w = wqe_at(qp, tail + i);
        uint8_t flags = (uint8_t)((s->signaled ? WQE_SIGNALED : 0) | (s->fence ? WQE_FENCE : 0));
        *w = (struct wqe){.id = s->id,
                          .remote_addr = s->remote_addr,
                          .rkey = s->rkey,
                          .imm = s->imm,
                          .op = (uint8_t)s->op,
                          .flags = flags,
                          .n_sge = (uint8_t)s->n_sge};
        if (s->op == TD_VB_BIND_MW) {
            if (!s->mw || !s->bind_mr || !f->o.limits.mw_type2) {
                error = EINVAL;
                break;
            }
            w->rkey = s->mw->rkey = (s->mw->rkey & ~0xffu) | ((s->mw->rkey + 1) & 0xff);
            w->n_sge = 0;
            *(struct bind *)(w + 1) = (struct bind){.window = (struct key *)s->mw,
                                                    .region = (struct key *)s->bind_mr,
                                                    .addr = s->bind_addr,
                                                    .bytes = s->bind_bytes};
        } else if (s->op == TD_VB_LOCAL_INV) {
            w->n_sge = 0;
        } else if (s->op == TD_VB_WRITE || s->op == TD_VB_WRITE_IMM || s->op == TD_VB_READ) {
            struct td_vb_sge *to = (struct td_vb_sge *)(w + 1);
            for (uint32_t k = 0; k < s->n_sge; k++) to[k] = s->sge[k];
        } else {
            error = EINVAL;
            break;
        }
    }
    *ret_n_posted = i;
    if (i) {
        atomic_store_explicit(&qp->sq_tail, tail + i, memory_order_release);
        qp_ring_doorbell(qp);
    }
    return error ? error : limit < n && i == limit ? fault : 0;
}

/* ---- options ---- */

void td_fake_options_default(struct td_fake_options *ret_options)
{
    *ret_options = (struct td_fake_options){.devices = 1,
                                            .ports = 1,
                                            .mtu_bytes = 4096,
                                            .spin_us = 5,
                                            .retry_ms = 50,
                                            .limits = {.max_qp = 1024,
                                                       .max_qp_wr = 16384,
                                                       .max_sge = TD_VB_SGE_MAX,
                                                       .max_cqe = 1u << 20,
                                                       .max_srq = 64,
                                                       .max_srq_wr = 32768,
                                                       .max_mw = 4096,
                                                       .max_rd_atomic_in = 16,
                                                       .max_rd_atomic_out = 16,
                                                       .max_mr_bytes = 1ull << 40,
                                                       .mw_type2 = true,
                                                       .relaxed_ordering = true,
                                                       .n_ports = 1}};
}

void td_fake_options_tiny(struct td_fake_options *o)
{
    struct td_vb_limits *l = &o->limits;
    l->max_qp_wr = 4;
    l->max_rd_atomic_in = l->max_rd_atomic_out = 1;
    l->max_mr_bytes = 1u << 20;
    l->max_sge = 1;
    l->max_srq = l->max_srq_wr = l->max_mw = 0;
    l->mw_type2 = l->relaxed_ordering = false;
}

static void options_complete(struct td_fake_options *o)
{
    struct td_fake_options def;
    td_fake_options_default(&def);
    struct td_vb_limits *l = &o->limits;
    if (!l->max_qp && !l->max_qp_wr)
        *l = def.limits; /* a struct that was not filled in: zero means none for some of them */
    if (!o->devices) o->devices = def.devices;
    if (!o->ports) o->ports = def.ports;
    if (!o->mtu_bytes) o->mtu_bytes = def.mtu_bytes;
    if (!o->retry_ms) o->retry_ms = def.retry_ms;
    l->n_ports = (uint8_t)o->ports;
}

static td_status options_check(const struct td_fake_options *o, struct td_err *err)
{
    uint32_t m = o->mtu_bytes;
    if (o->fail_nth && (!o->fail_status || o->fail_status >= TD_VB_WC_N_STATUSES))
        return td_fail(err, TD_ERR_INVALID,
                       "fake verbs: fail_status is %" PRIu32 ", must be 1 to %d", o->fail_status,
                       TD_VB_WC_N_STATUSES - 1);
    if (o->devices > TD_FAKE_DEVICES_MAX)
        return td_fail(err, TD_ERR_INVALID, "fake verbs: devices is %" PRIu32 ", must be 1 to %d",
                       o->devices, TD_FAKE_DEVICES_MAX);
    if (o->ports > TD_FAKE_PORTS_MAX)
        return td_fail(err, TD_ERR_INVALID, "fake verbs: ports is %" PRIu32 ", must be 1 or %d",
                       o->ports, TD_FAKE_PORTS_MAX);
    if (m != 256 && m != 512 && m != 1024 && m != 2048 && m != 4096)
        return td_fail(err, TD_ERR_INVALID,
                       "fake verbs: mtu is %" PRIu32 ", must be 256, 512, 1024, 2048 or 4096", m);
    if (!o->limits.max_qp_wr || !o->limits.max_cqe || o->limits.max_sge > TD_VB_SGE_MAX ||
        o->limits.max_qp > QPS_MAX / 2 || o->limits.max_rd_atomic_in > 255 ||
        o->limits.max_rd_atomic_out > 255)
        return td_fail(err, TD_ERR_INVALID,
                       "fake verbs: max_qp_wr %" PRIu32 " and max_cqe %" PRIu32
                       " must not be 0, max_sge %" PRIu32 " at most %d, max_qp %" PRIu32
                       " at most %d, rd_atomic at most 255",
                       o->limits.max_qp_wr, o->limits.max_cqe, o->limits.max_sge, TD_VB_SGE_MAX,
                       o->limits.max_qp, QPS_MAX / 2);
    return TD_OK;
}

enum option_type { U32, U64, BOOL, TINY, PATH, RD_ATOMIC };

static const struct option_row {
    const char *name;
    enum option_type type;
    size_t offset;
} option_rows[] = {
#define ROW(name, type, field)                                                                     \
    {                                                                                              \
        name, type, offsetof(struct td_fake_options, field)                                        \
    }
    {"path", PATH, 0},
    {"tiny", TINY, 0},
    {"rd_atomic", RD_ATOMIC, 0},
    ROW("seed", U64, seed),
    ROW("devices", U32, devices),
    ROW("ports", U32, ports),
    ROW("mtu", U32, mtu_bytes),
    ROW("infiniband", BOOL, infiniband),
    ROW("unordered", BOOL, unordered),
    ROW("relaxed", BOOL, relaxed),
    ROW("device_late", BOOL, device_late),
    ROW("no_copy", BOOL, no_copy),
    ROW("spin_us", U32, spin_us),
    ROW("retry_ms", U32, retry_ms),
    ROW("delay_us", U32, delay_us),
    ROW("fault_ppm", U32, fault_ppm),
    ROW("fail_nth", U64, fail_nth),
    ROW("fail_status", U32, fail_status),
    ROW("fail_after", BOOL, fail_after),
    ROW("max_qp", U32, limits.max_qp),
    ROW("max_qp_wr", U32, limits.max_qp_wr),
    ROW("max_sge", U32, limits.max_sge),
    ROW("max_cqe", U32, limits.max_cqe),
    ROW("max_srq", U32, limits.max_srq),
    ROW("max_srq_wr", U32, limits.max_srq_wr),
    ROW("max_mw", U32, limits.max_mw),
    ROW("max_mr_bytes", U64, limits.max_mr_bytes),
    ROW("mw_type2", BOOL, limits.mw_type2),
#undef ROW
};

static td_status option_set(struct td_fake_options *o, char path[256], const char *key,
                            size_t key_bytes, const char *value, struct td_err *err)
{
    for (size_t i = 0; i < sizeof option_rows / sizeof *option_rows; i++) {
        const struct option_row *row = &option_rows[i];
        if (strlen(row->name) != key_bytes || memcmp(row->name, key, key_bytes) != 0) continue;
        if (row->type == PATH) {
            if ((size_t)snprintf(path, 256, "%s", value) >= 256)
                return td_fail(err, TD_ERR_INVALID,
                               "fake verbs: path has %zu characters, at most 255", strlen(value));
            return TD_OK;
        }
        char *end;
        errno = 0;
        uint64_t number = strtoull(value, &end, 10);
        uint64_t max = row->type == U64         ? UINT64_MAX
                       : row->type == U32       ? UINT32_MAX
                       : row->type == RD_ATOMIC ? 255
                                                : 1;
        if (value[0] < '0' || value[0] > '9' || *end || errno || number > max)
            return td_fail(err, TD_ERR_INVALID,
                           "fake verbs: %s is \"%s\", must be a number of 0 to %" PRIu64, row->name,
                           value, max);
        void *at = (char *)o + row->offset;
        if (row->type == U64)
            *(uint64_t *)at = number;
        else if (row->type == U32)
            *(uint32_t *)at = (uint32_t)number;
        else if (row->type == BOOL)
            *(bool *)at = number;
        else if (row->type == RD_ATOMIC)
            o->limits.max_rd_atomic_in = o->limits.max_rd_atomic_out = (uint32_t)number;
        else if (number)
            td_fake_options_tiny(o);
        return TD_OK;
    }
    return td_fail(err, TD_ERR_INVALID, "fake verbs: unknown option \"%.*s\"", (int)key_bytes, key);
}

td_status td_fake_options_parse(const char *text, struct td_fake_options *ret_options,
                                char path[256], struct td_err *err)
{
    struct td_fake_options o;
    char copy[1024], *at = copy, *word;
    td_fake_options_default(&o);
    path[0] = 0;
    if ((size_t)snprintf(copy, sizeof copy, "%s", text) >= sizeof copy)
        return td_fail(err, TD_ERR_INVALID,
                       "fake verbs: the options have %zu characters, at most %zu", strlen(text),
                       sizeof copy - 1);
    while ((word = strsep(&at, ","))) {
        if (!*word) continue;
        char *value = strchr(word, '=');
        td_status status = option_set(&o, path, word, value ? (size_t)(value - word) : strlen(word),
                                      value ? value + 1 : "1", err);
        if (status) return status;
    }
    o.path = path[0] ? path : NULL;
    td_status status = options_check(&o, err);
    if (!status) *ret_options = o;
    return status;
}

/* ---- fabrics ---- */

static td_status shared_map(const char *path, struct shared **ret_shared, int *ret_fd,
                            struct td_err *err)
{
    struct shared *s = NULL;
    int fd = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600)
                  : memfd_create("tandem-verbs-fake", MFD_CLOEXEC);
    /* The kernel drops this lock with its holder. */
    if (fd < 0 || flock(fd, LOCK_EX)) goto err_errno;
    struct stat st;
    if (fstat(fd, &st)) goto err_errno;
    if ((size_t)st.st_size < sizeof *s && ftruncate(fd, sizeof *s)) goto err_errno;
    s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (s == MAP_FAILED) goto err_errno;
    if (!atomic_load(&s->magic)) {
        s->version = VERSION;
        s->bytes = sizeof *s;
        atomic_store(&s->magic, MAGIC);
    }
    if (atomic_load(&s->magic) != MAGIC || s->version != VERSION || s->bytes != sizeof *s) {
        munmap(s, sizeof *s); /* the last reference: unlocks */
        close(fd);
        return td_fail(err, TD_ERR_CORRUPT, "fake verbs: %s is no fabric of this build", path);
    }
    *ret_shared = s;
    *ret_fd = fd;
    return TD_OK;
err_errno:;
    int e = errno;
    if (fd >= 0) close(fd);
    return td_fail(err, TD_ERR_IO, "fake verbs: fabric %s: %s", path ? path : "(anonymous)",
                   strerror(e));
}

/* With the file locked. */
static bool node_claim(struct td_fake_fabric *f)
{
    struct shared *s = f->shared;
    for (uint32_t i = 0; i < TD_FAKE_NODES_MAX; i++) {
        struct node *n = &s->nodes[i];
        if (node_alive(n, atomic_load(&n->inc))) continue;
        uint32_t inc = (atomic_load(&n->inc) & ~1u) + 2;
        atomic_store(&n->inc, inc);
        atomic_store(&n->pid, (uint32_t)getpid());
        atomic_store(&n->start, process_start((uint32_t)getpid()));
        atomic_store(&n->sleeping, 0);
        atomic_store(&n->control, 0);
        for (uint32_t k = 0; k < TD_FAKE_DEVICES_MAX; k++) atomic_store(&n->ports_down[k], 0);
        for (size_t k = 0; k < sizeof n->n / sizeof(uint64_t); k++)
            atomic_store((_Atomic uint64_t *)&n->n + k, 0);
        for (uint32_t k = 0; k < QPS_MAX; k++)
            atomic_store_explicit(&n->live[k], 0, memory_order_relaxed);
        for (uint32_t k = 0; k < KEYS_MAX; k++)
            atomic_store_explicit(&n->key_live[k], 0, memory_order_relaxed);
        /* What lies there was for an earlier incarnation. */
        for (uint32_t k = 0; k < TD_FAKE_NODES_MAX; k++)
            atomic_store(&s->rings[k][i].head, atomic_load(&s->rings[k][i].tail));
        f->node = i;
        f->me = n;
        f->inc = inc + 1;
        if (atomic_load(&s->n_nodes) <= i) atomic_store(&s->n_nodes, i + 1);
        atomic_store(&n->inc, f->inc);
        return true;
    }
    return false;
}

static const struct td_verbs fake_verbs = {.name = "fake",
                                           .list = fake_list,
                                           .open = fake_open,
                                           .close = fake_close,
                                           .query = fake_query,
                                           .query_port = fake_query_port,
                                           .query_gid = fake_query_gid,
                                           .async_fd = fake_async_fd,
                                           .async_get = fake_async_get,
                                           .reg = fake_reg,
                                           .reg_dmabuf = fake_reg_dmabuf,
                                           .dereg = fake_dereg,
                                           .mw.alloc = fake_mw_alloc,
                                           .mw.free = fake_mw_free,
                                           .cq_create = fake_cq_create,
                                           .cq_destroy = fake_cq_destroy,
                                           .cq_fd = fake_cq_fd,
                                           .cq_arm = fake_cq_arm,
                                           .cq_clear = fake_cq_clear,
                                           .poll = fake_poll,
                                           .srq.create = fake_srq_create,
                                           .srq.destroy = fake_srq_destroy,
                                           .srq.post = fake_srq_post,
                                           .qp_create = fake_qp_create,
                                           .qp_destroy = fake_qp_destroy,
                                           .qp_init = fake_qp_init,
                                           .qp_rtr = fake_qp_rtr,
                                           .qp_rts = fake_qp_rts,
                                           .qp_error = fake_qp_error,
                                           .post_recv = fake_post_recv,
                                           .post_send = fake_post_send};

static void gids_init(struct td_fake_fabric *f)
{
    /* In the order of real drivers: link-local, then the address of the netdev, each as version 1
     * and 2; with an empty one among them. */
    static const uint8_t kind[TD_FAKE_GIDS] = {TD_FAKE_GID_LINK_LOCAL, TD_FAKE_GID_LINK_LOCAL,
                                               TD_FAKE_GID_EMPTY, TD_FAKE_GID_V4_PRIVATE,
                                               TD_FAKE_GID_V4_PRIVATE};
    static const uint8_t type[TD_FAKE_GIDS] = {TD_VB_GID_ROCE_V1, TD_VB_GID_ROCE_V2, 0,
                                               TD_VB_GID_ROCE_V1, TD_VB_GID_ROCE_V2};
    for (uint32_t d = 0; d < f->o.devices; d++) {
        for (uint32_t p = 0; p < f->o.ports; p++) {
            memcpy(f->gid_kind[d][p], kind, sizeof kind);
            memcpy(f->gid_type[d][p], type, sizeof type);
            if (f->o.infiniband) memset(f->gid_kind[d][p] + 1, TD_FAKE_GID_EMPTY, TD_FAKE_GIDS - 1);
            if (f->o.infiniband) f->gid_type[d][p][0] = TD_VB_GID_IB;
        }
    }
}

td_status td_fake_fabric_open(const struct td_fake_options *options,
                              struct td_fake_fabric **ret_fabric, struct td_err *err)
{
    struct td_fake_options o = *options;
    options_complete(&o);
    td_status status = options_check(&o, err);
    if (status) return status;
    struct td_fake_fabric *f = aligned_alloc(64, (sizeof *f + 63) / 64 * 64);
    if (!f) return td_fail(err, TD_ERR_NOMEM, "fake verbs: no memory for a node");
    memset(f, 0, sizeof *f);
    f->o = o;
    f->o.path = NULL;
    f->late_end = &f->late;
    f->held_end = &f->held;
    int fd;
    status = shared_map(o.path, &f->shared, &fd, err);
    if (status) goto err_free;
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); /* EINVAL without Yama, which is fine */
    if (!node_claim(f)) {
        status = td_fail(err, TD_ERR_LIMIT, "fake verbs: all %d nodes of %s are taken",
                         TD_FAKE_NODES_MAX, o.path);
        goto err_unmap;
    }
    f->random = o.seed * 0x2545f4914f6cdd1dull + f->node + 1;
    if (!atomic_load(&f->shared->qp_next))
        atomic_store(&f->shared->qp_next, (uint32_t)fake_random(f) & PSN_MASK);
    f->key_next = 1 + (uint32_t)(fake_random(f) % 64);
    gids_init(f);
    if (o.fail_nth) {
        struct td_fake_rule rule = {.fault =
                                        o.fail_after ? TD_FAKE_FAIL_AFTER : TD_FAKE_FAIL_BEFORE,
                                    .device = TD_FAKE_ALL,
                                    .nth = o.fail_nth,
                                    .status = (enum td_vb_wc_status)o.fail_status};
        f->rules[f->n_rules++] = (struct rule){.given = rule, .left = rule.nth};
    }
    f->vb = fake_verbs;
    f->vb.ctx = f;
    pthread_mutex_init(&f->lock, NULL);
    int e = pthread_create(&f->nic, NULL, nic_main, f);
    if (e) {
        status = td_fail(err, TD_ERR_IO, "fake verbs: thread: %s", strerror(e));
        pthread_mutex_destroy(&f->lock);
        atomic_store(&f->me->inc, f->inc + 1);
        goto err_unmap;
    }
    flock(fd, LOCK_UN); /* the mapping keeps the open file, and so the lock, past close */
    close(fd);
    *ret_fabric = f;
    return TD_OK;
err_unmap:
    munmap(f->shared, sizeof *f->shared);
    close(fd);
err_free:
    free(f);
    return status;
}

void td_fake_fabric_close(struct td_fake_fabric *f)
{
    if (!f) return;
    TD_ASSERT(!f->devices);
    atomic_store(&f->stop, true);
    node_wake(f->me);
    pthread_join(f->nic, NULL);
    atomic_store(&f->me->inc, f->inc + 1);
    while (f->held) {
        struct held *h = f->held;
        f->held = h->next;
        free(h->payload);
        free(h);
    }
    pthread_mutex_destroy(&f->lock);
    munmap(f->shared, sizeof *f->shared);
    late_over(f, NULL, false);
    free(f->bounce);
    free(f);
}

const struct td_verbs *td_fake_verbs(struct td_fake_fabric *f) { return &f->vb; }
struct td_fake_fabric *td_fake_fabric_of(const struct td_verbs *vb) { return vb->ctx; }
uint32_t td_fake_node(const struct td_fake_fabric *f) { return f->node; }

td_status td_verbs_fake_from_env(const struct td_verbs **ret_verbs, struct td_err *err)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    static struct td_fake_fabric *fabric;
    const char *text = getenv("TANDEM_VERBS_FAKE");
    if (!text) return td_fail(err, TD_ERR_NOT_FOUND, "fake verbs: TANDEM_VERBS_FAKE is not set");
    pthread_mutex_lock(&once);
    td_status status = TD_OK;
    if (!fabric) {
        struct td_fake_options o;
        char path[256];
        status = td_fake_options_parse(text, &o, path, err);
        if (!status) status = td_fake_fabric_open(&o, &fabric, err);
    }
    if (!status) *ret_verbs = &fabric->vb;
    pthread_mutex_unlock(&once);
    return status;
}

/* ---- faults ---- */

bool td_fake_rule_add(struct td_fake_fabric *f, const struct td_fake_rule *rule)
{
    TD_ASSERT(rule->nth && rule->fault >= TD_FAKE_FAIL_BEFORE && rule->fault <= TD_FAKE_STALL);
    fake_lock(f);
    bool has_room = f->n_rules < RULES_MAX;
    if (has_room) {
        f->rules[f->n_rules++] = (struct rule){.given = *rule, .left = rule->nth};
        if (rule->fault == TD_FAKE_POST_PARTIAL) atomic_fetch_add(&f->n_post_rules, 1);
    }
    fake_unlock(f);
    return has_room;
}

void td_fake_rules_clear(struct td_fake_fabric *f)
{
    fake_lock(f);
    f->n_rules = 0;
    atomic_store(&f->n_post_rules, 0);
    fake_unlock(f);
}

bool td_fake_qp_break(struct td_fake_fabric *f, uint32_t qp_num, bool event)
{
    fake_lock(f);
    struct fake_qp *qp = qp_find(f, qp_num);
    if (qp) qp_to_err(qp, event);
    fake_unlock(f);
    return qp;
}

void td_fake_cq_break(struct td_fake_fabric *f, struct td_vb_cq *cq)
{
    fake_lock(f);
    atomic_store(&((struct fake_cq *)cq)->blank, true);
    cq_die((struct fake_cq *)cq);
    fake_unlock(f);
}

bool td_fake_async(struct td_fake_fabric *f, uint32_t device, const struct td_vb_async *event)
{
    fake_lock(f);
    bool any = async_raise_all(f, device, *event);
    fake_unlock(f);
    return any;
}

static void node_tell(struct node *n)
{
    atomic_fetch_add(&n->control, 1);
    node_wake(n);
}

bool td_fake_port_set(struct td_fake_fabric *f, uint32_t node, uint32_t device, uint8_t port,
                      bool up)
{
    if (node >= TD_FAKE_NODES_MAX || device >= TD_FAKE_DEVICES_MAX || port < 1 ||
        port > TD_FAKE_PORTS_MAX)
        return false;
    struct node *n = &f->shared->nodes[node];
    uint32_t inc = atomic_load(&n->inc), bit = 1u << (port - 1);
    if (!node_alive(n, inc)) return false;
    if (up)
        atomic_fetch_and(&n->ports_down[device], ~bit);
    else
        atomic_fetch_or(&n->ports_down[device], bit);
    node_tell(n);
    return true;
}

bool td_fake_gid_set(struct td_fake_fabric *f, uint32_t device, uint8_t port, uint32_t index,
                     enum td_fake_gid kind, enum td_vb_gid_type type, bool netdev_up)
{
    if (device >= f->o.devices || !port_exists(f, port) || index >= TD_FAKE_GIDS) return false;
    fake_lock(f);
    f->gid_kind[device][port - 1][index] = (uint8_t)kind;
    f->gid_type[device][port - 1][index] = (uint8_t)type;
    f->gid_down[device][port - 1][index] = !netdev_up;
    async_raise_all(f, device, (struct td_vb_async){.kind = TD_VB_ASYNC_GID_CHANGE, .port = port});
    fake_unlock(f);
    return true;
}

void td_fake_hold(struct td_fake_fabric *f, uint32_t qp_num)
{
    atomic_store(&f->shared->hold, qp_num);
    for (uint32_t i = 0; i < TD_FAKE_NODES_MAX; i++) node_tell(&f->shared->nodes[i]);
}

void td_fake_counters_get(const struct td_fake_fabric *f, uint32_t node,
                          struct td_fake_counters *ret_counters)
{
    struct td_fake_counters sum = {0};
    for (uint32_t i = 0; i < TD_FAKE_NODES_MAX; i++) {
        if (node != TD_FAKE_ALL && node != i) continue;
        const struct counters *n = &f->shared->nodes[i].n;
        sum.requests_sent += atomic_load(&n->requests_sent);
        sum.retransmits += atomic_load(&n->retransmits);
        sum.writes_landed += atomic_load(&n->writes_landed);
        sum.bytes_landed += atomic_load(&n->bytes_landed);
        sum.reads_served += atomic_load(&n->reads_served);
        sum.writes_dropped_late += atomic_load(&n->late);
        sum.writes_dropped += atomic_load(&n->dropped);
        sum.rkey_violations += atomic_load(&n->rkeys);
        sum.rnr += atomic_load(&n->rnr);
        sum.cq_overruns += atomic_load(&n->overruns);
        sum.qps_broken += atomic_load(&n->broken);
        /* the network of a node ends with it */
        if (atomic_load(&f->shared->nodes[i].inc) & 1) sum.held += atomic_load(&n->held);
    }
    *ret_counters = sum;
}
