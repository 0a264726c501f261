/* xfer_core_test.c - two protocol cores, a sender's and a receiver's, joined by a simulated network
 * under a simulated clock. First every order of events up to a depth, then long random walks. A
 * pool block is three cells of content here, so that frames split blocks.
 *
 * What is checked at every step: SLOT_READY only with exactly the submitted content; no cell is
 * written that no live slot owns; each slot and op has one terminal event, none of them while a
 * piece is under way; nothing outlives its deadline. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "common/base/hash.h"
#include "common/base/random.h"
#include "common/transfer/protocol.h"

#define CELL (512u << 10) /* half a full DATA frame */
#define CELLS 3           /* per block */
#define N_BLOCKS 12
#define MAX_TRANSFERS 3 /* alive at a time: slots and ops */
#define BLOCKS_EACH (N_BLOCKS / MAX_TRANSFERS)
#define MAX_FRAMES 64
#define GRACE_NS 100

struct frame_in_flight {
    struct td_xfer_frame f;
    uint8_t payload[64];
    uint32_t n_payload;
    int cells[2 * CELLS]; /* DATA: the content as it was when it left */
};

struct wire {
    struct frame_in_flight q[MAX_FRAMES];
    int n;
};

/* What the callers on both sides know about one transfer. Transfer t uses blocks [t *
 * BLOCKS_EACH, ...) in both pools. */
struct transfer {
    bool slot_live, op_live, granted, revoked, ready, slot_failed;
    uint32_t slot, op;
    int32_t n, n_sent;
    uint32_t cells[BLOCKS_EACH]; /* submitted, of each block */
    struct td_xfer_grant_blob grant;
    int content; /* base of what this use of the blocks carries; a cell of it is
                    there when it is submitted */
    uint64_t slot_deadline, op_deadline;
};

/* rdma: a request on its way. Data may land at any time before it completes; the word comes
 * after all that its queue pair carried before. */
struct request {
    struct td_xfer_wr wr;
    uint64_t conn;
    bool landed;
};

#define N_QPS 2
#define MAX_REQUESTS 64
#define QUARANTINE_NS 60

struct world {
    struct td_xfer_core p, d;
    enum td_xfer_path path;
    uint64_t now, conn, n_conns; /* conn 0: none stands */
    uint32_t clock_us;           /* what the receiver adds to the sender's clock */
    struct wire to_d, to_p;
    uint64_t handles[MAX_TRANSFERS];
    int src[N_BLOCKS * CELLS], dst[N_BLOCKS * CELLS];
    struct transfer t[MAX_TRANSFERS];
    struct td_xfer_turns tx_turns, copy_turns;
    int next_content;
    uint64_t rng;
    bool calm;       /* nothing happens inside a piece */
    bool parts;      /* submit_some: blocks go in two parts */
    int32_t fixed_n; /* blocks of each grant; 0: random */
    /* a copy under way, so that other events fall into it */
    bool copying;
    struct td_xfer_copy copy;
    bool copy_valid;
    /* cuda-ipc: copies that run by themselves. They read and land when they end, whatever has
       become of the slot by then. */
    struct {
        struct td_xfer_copy c;
        int32_t src[BLOCKS_EACH], dst[BLOCKS_EACH];
    } pull[2];
    int n_pulls, n_landed_lost;
    int n_ready, n_done, n_failed, n_started;
    struct request nic[N_QPS][MAX_REQUESTS]; /* rdma, the sender's */
    int n_nic[N_QPS];
    struct td_xfer_turns wr_turns;
    uint32_t targets_cursor;
    uint64_t old_conn; /* rdma: the sender has left it, the receiver has not noticed; 0:
                          none */
    /* what is still in its network */
    struct {
        int32_t block;
        uint64_t cell;
        int content;
    } late[N_BLOCKS * CELLS];
    int n_late, n_landed_late;
    /* What a fenced queue pair had accepted and the host has not placed yet: it may, until its
       quarantine is over. */
    struct {
        int32_t block;
        uint64_t cell;
        int content;
        uint64_t until;
    } dma[N_BLOCKS * CELLS];
    int n_dma, n_landed_dma;
};

static uint64_t next_random(uint64_t *state)
{
    td_random_step(state);
    return *state >> 17 ^ *state << 31;
}

static uint64_t random_hook(void *ctx) { return next_random(&((struct world *)ctx)->rng); }

static void put(struct wire *w, const struct td_xfer_frame *f, const void *payload)
{
    if (w->n == MAX_FRAMES) fail_msg("the core floods a connection");
    struct frame_in_flight *q = &w->q[w->n++];
    memset(q, 0, sizeof *q);
    q->f = *f;
    q->n_payload = f->type == TD_XFER_DATA         ? 0
                   : f->length < sizeof q->payload ? f->length
                                                   : sizeof q->payload;
    if (q->n_payload) memcpy(q->payload, payload, q->n_payload);
}

static void send_from_p(void *ctx, uint64_t conn, const struct td_xfer_frame *f,
                        const void *payload)
{
    struct world *w = ctx;
    if (conn == w->conn) put(&w->to_d, f, payload);
}

static void send_from_d(void *ctx, uint64_t conn, const struct td_xfer_frame *f,
                        const void *payload)
{
    struct world *w = ctx;
    if (conn == w->conn) put(&w->to_p, f, payload);
}

static void handle_hook(void *ctx, uint32_t op, uint64_t handle)
{
    ((struct world *)ctx)->handles[op] = handle;
}

static void no_handle(void *ctx, uint32_t op, uint64_t handle)
{
    (void)ctx, (void)op, (void)handle;
}

static void world_open(struct world *w, enum td_xfer_path path, uint64_t seed)
{
    memset(w, 0, sizeof *w);
    w->path = path;
    w->now = 1;
    w->rng = seed;
    struct td_xfer_core_hooks p = {
        .ctx = w, .random_u64 = random_hook, .send = send_from_p, .op_handle = handle_hook};
    struct td_xfer_core_hooks d = {
        .ctx = w, .random_u64 = random_hook, .send = send_from_d, .op_handle = no_handle};
    assert_int_equal(
        td_xfer_core_create(&w->p, MAX_TRANSFERS, MAX_TRANSFERS, GRACE_NS, 0, &p, NULL), TD_OK);
    assert_int_equal(
        td_xfer_core_create(&w->d, MAX_TRANSFERS, MAX_TRANSFERS, GRACE_NS, 0, &d, NULL), TD_OK);
    td_xfer_core_mem(&w->p, CELL * CELLS, N_BLOCKS);
    td_xfer_core_mem(&w->d, CELL * CELLS, N_BLOCKS);
}

static void world_close(struct world *w)
{
    td_xfer_core_destroy(&w->p);
    td_xfer_core_destroy(&w->d);
}

static int32_t dst_block(const struct world *w, const struct transfer *t, int32_t i)
{
    return (int32_t)(t - w->t) * BLOCKS_EACH + (i + 1) % BLOCKS_EACH;
}

static int32_t src_block(const struct world *w, const struct transfer *t, int32_t i)
{
    return (int32_t)(t - w->t) * BLOCKS_EACH + i;
}

/* A byte range lands: every cell must belong to a slot that is armed or filling, or the write is
 * one that nobody allowed. */
static void land(struct world *w, uint32_t slot, uint64_t offset, uint64_t n_bytes,
                 const int *cells)
{
    const struct transfer *t = NULL;
    for (int i = 0; i < MAX_TRANSFERS; i++)
        if (w->t[i].slot_live && w->t[i].slot == slot) t = &w->t[i];
    assert_non_null(t);
    assert_false(t->ready);
    for (uint64_t at = 0; at < n_bytes; at += CELL) {
        uint64_t cell = (offset + at) / CELL;
        w->dst[(uint64_t)dst_block(w, t, (int32_t)(cell / CELLS)) * CELLS + cell % CELLS] =
            cells[at / CELL];
    }
}

/* rdma: bytes land without the receiver's core being asked. The block must be a live slot's that
 * is not ready. */
static void land_raw(struct world *w, int32_t block, uint64_t cell, int content)
{
    const struct transfer *owner = &w->t[block / BLOCKS_EACH];
    assert_true(owner->slot_live && !owner->ready);
    w->dst[(uint64_t)block * CELLS + cell] = content;
}

/* --- the actions ------------------------------------------------------------------------------ */

static bool start(struct world *w, struct transfer *t, uint64_t life_ns)
{
    if (t->slot_live || t->op_live) return false;
    int32_t ids[BLOCKS_EACH];
    memset(t, 0, sizeof *t);
    t->n = w->fixed_n ? w->fixed_n : (int32_t)(next_random(&w->rng) % (BLOCKS_EACH + 1));
    for (int32_t i = 0; i < t->n; i++) ids[i] = dst_block(w, t, i);
    t->slot_deadline = w->now + life_ns;
    t->op_deadline = w->now + life_ns + 7;
    assert_int_equal(td_xfer_core_grant(&w->d, ids, t->n, t->slot_deadline, (uint64_t)(t - w->t),
                                        &t->slot, NULL),
                     TD_OK);
    const struct td_xfer_slot *s = &w->d.slots[t->slot];
    t->grant = (struct td_xfer_grant_blob){.slot = t->slot,
                                           .generation = s->generation,
                                           .n_blocks = t->n,
                                           .block_bytes = CELL * CELLS};
    memcpy(t->grant.key, s->key, sizeof t->grant.key);
    assert_int_equal(
        td_xfer_core_op_start(&w->p, &t->grant, t->op_deadline, (uint64_t)(t - w->t), &t->op, NULL),
        TD_OK);
    t->slot_live = t->op_live = t->granted = true;
    t->content = w->next_content += 1000;
    /* not computed yet */
    for (int32_t i = 0; i < t->n * CELLS; i++) w->src[src_block(w, t, 0) * CELLS + i] = -3;
    w->n_started++;
    return true;
}

/* Cells of blocks [first, first + n), of which `have` each were submitted before. */
static td_status submit_cells(struct world *w, struct transfer *t, int32_t first, int32_t n,
                              uint32_t have, uint32_t n_cells)
{
    int32_t ids[BLOCKS_EACH];
    for (int32_t i = 0; i < n; i++) {
        ids[i] = src_block(w, t, first + i);
        for (uint32_t k = have; k < have + n_cells; k++)
            w->src[(uint32_t)ids[i] * CELLS + k] = t->content + (first + i) * CELLS + (int)k;
    }
    td_status status = td_xfer_core_submit_part(&w->p, w->now, t->op, first, ids, n,
                                                (uint64_t)have * CELL, (uint64_t)n_cells * CELL);
    enum td_xfer_op_state state = w->p.ops[t->op].state;
    assert_int_equal(status == TD_OK, state != TD_OP_ENDED && state != TD_OP_STOPPING);
    for (int32_t i = 0; i < n; i++) t->cells[first + i] += n_cells;
    return status;
}

/* More of some blocks, wherever they are: neighbours of which as much has come. And what no
 * caller may do changes nothing. */
static bool submit_part(struct world *w, struct transfer *t)
{
    if (!t->op_live || t->n_sent >= t->n) return false;
    int32_t first = t->n_sent + (int32_t)(next_random(&w->rng) % (uint64_t)(t->n - t->n_sent)),
            n = 1, id = src_block(w, t, first);
    uint32_t have = t->cells[first];
    if (have == CELLS) return false;
    while (first + n < t->n && t->cells[first + n] == have && next_random(&w->rng) % 3) n++;
    const struct td_xfer_op *op = &w->p.ops[t->op];
    uint64_t ready = op->bytes_ready, at = (uint64_t)have * CELL;
    int32_t other = (id + 1) % N_BLOCKS;
    const struct {
        uint64_t offset, n_bytes;
        const int32_t *id;
    } wrong[] = {
        {at + CELL, CELL, &id},
        {at ? at - CELL : CELLS * CELL, CELL, &id},
        {at, (CELLS - have) * (uint64_t)CELL + 1, &id},
        {at, 0, &id},
        {at, UINT64_MAX, &id},
        {at, CELL, have ? &other : &(int32_t){N_BLOCKS}},
    };
    size_t k = next_random(&w->rng) % (sizeof wrong / sizeof wrong[0]);
    bool is_live = op->state != TD_OP_ENDED && op->state != TD_OP_STOPPING;
    if (is_live)
        assert_int_equal(td_xfer_core_submit_part(&w->p, w->now, t->op, first, wrong[k].id, 1,
                                                  wrong[k].offset, wrong[k].n_bytes),
                         TD_ERR_INVALID);
    /* not every byte is there */
    if (is_live)
        assert_int_equal(td_xfer_core_submit(&w->p, w->now, t->op, 0, NULL, 0, true, NULL, 0),
                         TD_ERR_INVALID);
    assert_true(op->bytes_ready == ready && !op->final);
    submit_cells(w, t, first, n, have, 1 + (uint32_t)(next_random(&w->rng) % (CELLS - have)));
    return true;
}

static bool submit_some(struct world *w, struct transfer *t, int32_t n)
{
    if (!t->op_live || t->n_sent > t->n) return false;
    if (n > t->n - t->n_sent) n = t->n - t->n_sent;
    bool final = t->n_sent + n == t->n, whole = true;
    int32_t ids[BLOCKS_EACH];
    for (int32_t i = 0; i < n; i++) whole = whole && !t->cells[t->n_sent + i];
    if (w->parts && whole && n > 0) { /* the next call brings the rest */
        submit_cells(w, t, t->n_sent, n, 0, 1);
        return true;
    }
    for (int32_t i = 0; i < n && !whole; i++) {
        uint32_t have = t->cells[t->n_sent];
        if (have < CELLS) submit_cells(w, t, t->n_sent, 1, have, CELLS - have);
        t->n_sent++;
    }
    if (!whole && !final) return true;
    if (!whole) n = 0;
    for (int32_t i = 0; i < n; i++) {
        ids[i] = src_block(w, t, t->n_sent + i);
        for (int k = 0; k < CELLS; k++)
            w->src[ids[i] * CELLS + k] = t->content + (t->n_sent + i) * CELLS + k;
    }
    td_status status = td_xfer_core_submit(&w->p, w->now, t->op, t->n_sent, ids, n, final,
                                           &t->content, final ? sizeof t->content : 0);
    enum td_xfer_op_state state = w->p.ops[t->op].state;
    assert_int_equal(status == TD_OK, state != TD_OP_ENDED && state != TD_OP_STOPPING);
    t->n_sent = final ? t->n + 1 : t->n_sent + n;
    return true;
}

static bool connect_ops(struct world *w)
{
    bool any = false;
    if (!w->conn) w->conn = ++w->n_conns;
    for (uint32_t i = 0; i < MAX_TRANSFERS; i++)
        if (w->p.ops[i].state == TD_OP_WAIT_CONN) {
            td_xfer_core_op_attach(&w->p, i, w->conn, w->path, false);
            any = true;
        }
    return any;
}

/* rdma: one request for one queue pair. */
static bool post_request(struct world *w)
{
    static const struct td_xfer_wr_limits limits = {
        .max_bytes = 2 * CELLS * CELL, .max_pieces = 2, .src_region = N_BLOCKS, .dst_region = 5};
    static const struct td_xfer_wr_limits small = {
        .max_bytes = 2 * CELL, .max_pieces = 1, .src_region = N_BLOCKS, .dst_region = N_BLOCKS};
    uint32_t first = (uint32_t)next_random(&w->rng) % N_QPS;
    for (uint32_t k = 0; w->conn && k < N_QPS; k++) {
        uint32_t qp = (first + k) % N_QPS;
        struct request r = {.conn = w->conn};
        if (w->n_nic[qp] == MAX_REQUESTS) continue;
        if (!td_xfer_core_wr_next(&w->p, w->conn, qp, 0, &w->wr_turns,
                                  next_random(&w->rng) % 2 ? &limits : &small, &r.wr))
            continue;
        w->nic[qp][w->n_nic[qp]++] = r;
        return true;
    }
    return false;
}

/* rdma: what a dead sender had sent lands, or the receiver notices and fences. */
static void old_conn_step(struct world *w, bool fence)
{
    if (w->n_late && !fence) {
        w->n_late--;
        w->n_landed_late++;
        land_raw(w, w->late[w->n_late].block, w->late[w->n_late].cell, w->late[w->n_late].content);
        return;
    }
    td_xfer_core_conn_fenced(&w->d, w->old_conn, w->now + QUARANTINE_NS);
    td_xfer_core_conn_lost(&w->d, w->now, w->old_conn, TD_ERR_PEER, "broken", TD_XFER_CUT);
    w->old_conn = 0;
    w->n_dma = 0;
    for (; w->n_late; w->n_late--, w->n_dma++) { /* its queue pairs are dead; what they had taken
                                                    in lands yet */
        w->dma[w->n_dma].block = w->late[w->n_late - 1].block;
        w->dma[w->n_dma].cell = w->late[w->n_late - 1].cell;
        w->dma[w->n_dma].content = w->late[w->n_late - 1].content;
        w->dma[w->n_dma].until = w->now + QUARANTINE_NS;
    }
}

/* rdma: the NIC reads the source now and the bytes land, or the word comes, or the oldest of a
 * queue pair completes. */
static bool nic_step(struct world *w)
{
    uint32_t first = (uint32_t)next_random(&w->rng) % N_QPS;
    if (w->old_conn && next_random(&w->rng) % 4 == 0) {
        old_conn_step(w, false);
        return true;
    }
    while (w->n_dma && w->now >= w->dma[w->n_dma - 1].until) w->n_dma--;
    if (w->n_dma && next_random(&w->rng) % 4 == 0) {
        w->n_dma--;
        w->n_landed_dma++;
        land_raw(w, w->dma[w->n_dma].block, w->dma[w->n_dma].cell, w->dma[w->n_dma].content);
        return true;
    }
    for (uint32_t k = 0; k < N_QPS; k++) {
        uint32_t qp = (first + k) % N_QPS;
        struct request *q = w->nic[qp];
        if (!w->n_nic[qp]) continue;
        int at = (int)(next_random(&w->rng) % (uint64_t)w->n_nic[qp]);
        bool ready = true;
        for (int i = 0; i < at; i++) ready = ready && q[i].landed;
        struct request *r = &q[at];
        if (!r->landed && (!r->wr.is_imm || ready)) {
            const struct td_xfer_op *op = &w->p.ops[r->wr.op];
            if (r->wr.is_imm) td_xfer_core_rx_imm(&w->d, w->now, r->conn, qp, r->wr.imm);
            for (uint64_t byte = 0; byte < r->wr.n_bytes; byte += CELL) {
                uint64_t cell = (r->wr.offset + byte) / CELL;
                int32_t to = r->wr.dst_block + (int32_t)(cell / CELLS),
                        from = op->src[op->order[r->wr.order_at + (int32_t)(cell / CELLS)]];
                land_raw(w, to, cell % CELLS, w->src[(uint64_t)from * CELLS + cell % CELLS]);
            }
            r->landed = true;
            return true;
        }
        if (!q[0].landed) continue;
        struct request done = q[0];
        memmove(q, q + 1, (size_t)--w->n_nic[qp] * sizeof *q);
        td_xfer_core_wr_done(&w->p, done.wr.op, done.wr.n_bytes, true);
        return true;
    }
    return false;
}

/* The connection is over: what is under way lands or not, and then both sides fence. */
static void nic_fence(struct world *w, uint64_t conn)
{
    if (w->old_conn) old_conn_step(w, true);
    for (uint64_t n = next_random(&w->rng) % 8; n; n--) nic_step(w);
    bool unnoticed = !w->calm && next_random(&w->rng) % 2;
    for (uint32_t qp = 0; qp < N_QPS && unnoticed; qp++)
        for (int i = 0; i < w->n_nic[qp]; i++) {
            const struct td_xfer_wr *wr = &w->nic[qp][i].wr;
            const struct td_xfer_op *op = &w->p.ops[wr->op];
            for (uint64_t byte = 0; byte < wr->n_bytes && !w->nic[qp][i].landed; byte += CELL) {
                /* as they were when they left */
                uint64_t cell = (wr->offset + byte) / CELL;
                int32_t from = op->src[op->order[wr->order_at + (int32_t)(cell / CELLS)]];
                w->late[w->n_late].block = wr->dst_block + (int32_t)(cell / CELLS);
                w->late[w->n_late].cell = cell % CELLS;
                w->late[w->n_late++].content = w->src[(uint64_t)from * CELLS + cell % CELLS];
            }
        }
    for (uint32_t qp = 0; qp < N_QPS; qp++) {
        int n = w->n_nic[qp];
        w->n_nic[qp] = 0;
        for (int i = 0; i < n; i++) td_xfer_core_wr_done(&w->p, w->nic[qp][i].wr.op, 0, false);
    }
    td_xfer_core_conn_fenced(&w->p, conn, w->now + QUARANTINE_NS);
    if (unnoticed)
        w->old_conn = conn;
    else
        td_xfer_core_conn_fenced(&w->d, conn, w->now + QUARANTINE_NS);
}

/* The sender's backend puts one frame on the wire, reading content now. */
static bool transmit(struct world *w)
{
    struct td_xfer_tx tx;
    if (w->path == TD_XFER_PATH_RDMA && post_request(w)) return true;
    if (!w->conn || w->to_d.n > MAX_FRAMES / 2 ||
        !td_xfer_core_tx_next(&w->p, w->conn, 0, &w->tx_turns, 4, &tx))
        return false;
    if (tx.frame.type != TD_XFER_DATA) {
        put(&w->to_d, &tx.frame, tx.payload);
        return true;
    }
    put(&w->to_d, &tx.frame, NULL);
    struct frame_in_flight *q = &w->to_d.q[w->to_d.n - 1];
    assert_true(td_xfer_core_read_begin(&w->p, tx.op, tx.frame.handle));
    if (!w->calm && next_random(&w->rng) % 64 == 0) { /* the caller cancels while the piece is
                                                         being read: no event before it is over */
        uint32_t n = w->p.n_events;
        td_xfer_core_op_fail(&w->p, tx.op, TD_ERR_CANCELLED, "meanwhile");
        assert_int_equal(w->p.n_events, n);
    }
    for (uint32_t at = 0; at < tx.frame.length; at += CELL) {
        uint64_t cell = (tx.frame.offset + at) / CELL;
        q->cells[at / CELL] =
            w->src[(uint64_t)w->p.ops[tx.op].src[cell / CELLS] * CELLS + cell % CELLS];
    }
    td_xfer_core_read_end(&w->p, tx.op, tx.frame.length);
    td_xfer_core_tx_done(&w->p, tx.op, tx.frame.handle);
    return true;
}

static struct frame_in_flight take(struct wire *q)
{
    struct frame_in_flight f = q->q[0];
    memmove(q->q, q->q + 1, (size_t)--q->n * sizeof q->q[0]);
    return f;
}

static bool deliver_to_d(struct world *w)
{
    if (!w->conn || !w->to_d.n || w->copying) return false;
    struct frame_in_flight q = take(&w->to_d);
    td_status status = TD_OK;
    switch (q.f.type) {
    case TD_XFER_OPEN:
        status = td_xfer_core_rx_open(&w->d, w->conn, w->path, &q.f, q.payload);
        break;
    case TD_XFER_DATA:
        status = td_xfer_core_rx_data(&w->d, w->conn, &q.f);
        for (uint32_t at = 0; status == TD_OK && at < q.f.length; at += CELL) {
            /* piece by piece, and the slot may go in between */
            if (!td_xfer_core_place_begin(&w->d, w->conn, &q.f)) break;
            bool revoked = !w->calm && next_random(&w->rng) % 64 == 0;
            if (revoked) {
                uint32_t n = w->d.n_events;
                td_xfer_core_revoke(&w->d, q.f.slot, "meanwhile");
                assert_int_equal(w->d.n_events, n); /* no SLOT_FREE while the piece lands */
                for (int i = 0; i < MAX_TRANSFERS; i++)
                    if (w->t[i].slot_live && w->t[i].slot == q.f.slot) w->t[i].revoked = true;
            }
            land(w, q.f.slot, q.f.offset + at, CELL, &q.cells[at / CELL]);
            td_xfer_core_place_end(&w->d, w->now, q.f.slot, CELL);
        }
        break;
    case TD_XFER_REF: {
        uint32_t first;
        int32_t ids[BLOCKS_EACH];
        memcpy(&first, q.payload, 4);
        memcpy(ids, q.payload + 4, q.f.length - 4);
        status = td_xfer_core_rx_ref(&w->d, w->conn, &q.f, first, ids,
                                     (int32_t)(q.f.length / 4 - 1), N_BLOCKS);
        break;
    }
    case TD_XFER_FINAL:
        status =
            td_xfer_core_rx_final(&w->d, w->now, w->clock_us + (uint32_t)(w->now / TD_NS_PER_US),
                                  w->conn, &q.f, q.payload);
        break;
    case TD_XFER_ABORT:
        td_xfer_core_rx_abort(&w->d, w->conn, &q.f, "aborted");
        break;
    default:
        fail_msg("frame type %d at the receiver", q.f.type);
    }
    if (status == TD_ERR_CORRUPT || status == TD_ERR_PEER)
        fail_msg("an honest sender's frame %d was called %d", q.f.type, status);
    return true;
}

static bool deliver_to_p(struct world *w)
{
    if (!w->conn || !w->to_p.n) return false;
    struct frame_in_flight q = take(&w->to_p);
    if (q.f.type == TD_XFER_TARGETS) {
        struct td_xfer_run runs[BLOCKS_EACH];
        assert_true(q.f.length <= sizeof runs);
        memcpy(runs, q.payload, q.f.length);
        assert_true(td_xfer_core_rx_targets(&w->p, w->conn, &q.f, runs,
                                            (int32_t)(q.f.length / sizeof runs[0]), N_BLOCKS,
                                            false) != TD_ERR_CORRUPT);
        return true;
    }
    if (q.f.type == TD_XFER_DONE)
        td_xfer_core_rx_done(&w->p, w->now, w->conn, &q.f);
    else if (q.f.type == TD_XFER_FAIL)
        td_xfer_core_rx_fail(&w->p, w->now, w->conn, &q.f, "failed");
    else
        fail_msg("frame type %d at the sender", q.f.type);
    return true;
}

/* shm: a copy in two actions, so that anything may happen between its begin and its end. */
static bool pull_step(struct world *w)
{
    struct td_xfer_copy c;
    if (w->n_pulls < 2 && td_xfer_core_copy_next(&w->d, &w->copy_turns, TD_XFER_BY_DEVICE,
                                                 CELLS * CELL, 2 * CELLS * CELL, 2, &c)) {
        const struct td_xfer_slot *s = &w->d.slots[c.slot];
        w->pull[w->n_pulls].c = c;
        for (int32_t i = 0; i < c.n_blocks; i++) {
            w->pull[w->n_pulls].src[i] = s->src[c.grant_block + i];
            w->pull[w->n_pulls].dst[i] = s->dst[c.grant_block + i];
        }
        w->n_pulls++;
        return true;
    }
    if (!w->n_pulls) return false;
    c = w->pull[0].c;
    uint64_t from = c.offset / CELL, end = c.n_blocks == 1 ? from + c.n_bytes / CELL : CELLS;
    for (int32_t i = 0; i < c.n_blocks; i++)
        for (uint64_t k = from; k < end; k++)
            land_raw(w, w->pull[0].dst[i], k, w->src[(uint64_t)w->pull[0].src[i] * CELLS + k]);
    const struct td_xfer_slot *s = &w->d.slots[c.slot];
    if (s->handle && s->handle != c.handle)
        fail_msg("a copy of one attempt lands on top of another's bytes");
    w->n_landed_lost += s->handle != c.handle;
    td_xfer_core_dma_end(&w->d, w->now, c.slot, c.conn, c.handle, c.n_bytes,
                         w->handles[c.op] == c.handle ? TD_OK : TD_ERR_STALE, "");
    w->pull[0] = w->pull[1];
    w->n_pulls--;
    return true;
}

static bool copy_step(struct world *w)
{
    if (w->path == TD_XFER_PATH_CUDA_IPC) return pull_step(w);
    if (w->path == TD_XFER_PATH_RDMA) {
        struct td_xfer_tx tx;
        bool any = false;
        for (uint32_t k = 0; w->conn && w->to_p.n < MAX_FRAMES / 2 && k < w->d.max_slots && !any;
             k++) {
            uint32_t id = (w->targets_cursor + k) % w->d.max_slots;
            any = w->d.slots[id].conn == w->conn &&
                  td_xfer_core_targets_of(&w->d, id, TD_XFER_RUNS_MAX, 0, &tx);
            if (any) w->targets_cursor = (id + 1) % w->d.max_slots;
        }
        if (any) put(&w->to_p, &tx.frame, tx.payload);
        return nic_step(w) || any;
    }
    if (w->path != TD_XFER_PATH_SHM) return false;
    if (!w->copying) {
        if (!td_xfer_core_copy_next(&w->d, &w->copy_turns, TD_XFER_BY_COPY, 2 * CELL, 2 * CELL, 4,
                                    &w->copy))
            return false;
        w->copying = true;
        w->copy_valid = w->handles[w->copy.op] == w->copy.handle;
        return true;
    }
    const struct td_xfer_slot *s = &w->d.slots[w->copy.slot];
    int cells[2 * CELLS];
    uint64_t offset = (uint64_t)w->copy.grant_block * CELLS * CELL + w->copy.offset;
    for (uint64_t at = 0; at < w->copy.n_bytes; at += CELL) {
        uint64_t cell = (offset + at) / CELL;
        cells[at / CELL] = w->src[(uint64_t)s->src[cell / CELLS] * CELLS + cell % CELLS];
    }
    land(w, w->copy.slot, offset, w->copy.n_bytes, cells);
    w->copying = false;
    td_xfer_core_copy_end(&w->d, w->now, &w->copy,
                          w->copy_valid && w->handles[w->copy.op] == w->copy.handle);
    return true;
}

static bool finish_copy(struct world *w) { return w->copying ? copy_step(w) : false; }

static bool break_conn(struct world *w, bool retry)
{
    if (!w->conn) return false;
    finish_copy(w);
    uint64_t conn = w->conn;
    w->conn = 0;
    w->to_d.n = w->to_p.n = 0;
    if (w->path == TD_XFER_PATH_RDMA) nic_fence(w, conn);
    td_xfer_core_conn_lost(&w->p, w->now, conn, TD_ERR_PEER, "broken",
                           retry ? TD_XFER_CUT : TD_XFER_LOST);
    if (w->old_conn != conn)
        td_xfer_core_conn_lost(&w->d, w->now, conn, TD_ERR_PEER, "broken",
                               retry ? TD_XFER_CUT : TD_XFER_LOST);
    return true;
}

static bool cancel_op(struct world *w, struct transfer *t)
{
    if (!t->op_live) return false;
    td_xfer_core_op_fail(&w->p, t->op, TD_ERR_CANCELLED, "cancelled");
    return true;
}

static bool revoke_slot(struct world *w, struct transfer *t)
{
    if (!t->slot_live || t->revoked) return false;
    td_xfer_core_revoke(&w->d, t->slot, "revoked");
    t->revoked = true;
    return true;
}

/* What a revoked slot may wait for past its deadline. */
#define WRITES (TD_HELD(TD_HOLD_WRITER) | TD_HELD(TD_HOLD_QUARANTINE) | TD_HELD(TD_HOLD_DEVICE))

static bool tick(struct world *w, uint64_t ns)
{
    w->now += ns;
    td_xfer_core_tick(&w->p, w->now);
    finish_copy(w); /* the progress thread ticks between pieces */
    td_xfer_core_tick(&w->d, w->now);
    bool stuck = w->conn && (w->p.stuck_conn == w->conn || w->d.stuck_conn == w->conn);
    if (w->old_conn && w->d.stuck_conn == w->old_conn) old_conn_step(w, true);
    w->p.stuck_conn = w->d.stuck_conn = 0;
    if (stuck) break_conn(w, true);
    for (int i = 0; i < MAX_TRANSFERS; i++) { /* nothing is live past its deadline */
        const struct transfer *t = &w->t[i];
        /* but for what the NIC still reads */
        if (t->op_live && w->now >= t->op_deadline && w->p.ops[t->op].state != TD_OP_ENDED)
            assert_true(w->p.ops[t->op].state == TD_OP_STOPPING &&
                        w->p.ops[t->op].holds.of[TD_HOLD_NIC]);
        if (t->slot_live && w->now >= t->slot_deadline) {
            enum td_xfer_slot_state s = w->d.slots[t->slot].state;
            bool waits = s == TD_SLOT_REVOKING && (w->d.slots[t->slot].holds.reasons & WRITES);
            assert_true(s == TD_SLOT_READY || s == TD_SLOT_FAILED || s == TD_SLOT_RETIRED || waits);
        }
    }
    return true;
}

static bool poll_events(struct world *w)
{
    struct td_xfer_event e;
    bool any = false;
    while (td_xfer_core_poll(&w->d, &e, 1)) {
        struct transfer *t = &w->t[e.user];
        any = true;
        assert_true(t->slot_live && t->slot == e.id);
        if (e.kind == TD_XFER_SLOT_READY) {
            assert_false(t->ready || t->slot_failed);
            t->ready = true;
            w->n_ready++;
            assert_int_equal(e.note_bytes, sizeof t->content);
            assert_memory_equal(e.note, &t->content, sizeof t->content);
            assert_int_equal(e.bytes, (uint64_t)t->n * CELLS * CELL);
            for (int32_t i = 0; i < t->n * CELLS; i++)
                if (w->dst[dst_block(w, t, i / CELLS) * CELLS + i % CELLS] != t->content + i)
                    fail_msg("ready with cell %d wrong", i);
        } else if (e.kind == TD_XFER_SLOT_FAILED) {
            assert_false(t->ready || t->slot_failed);
            t->slot_failed = true;
            assert_true(e.status < 0);
        } else {
            assert_int_equal(e.kind, TD_XFER_SLOT_FREE);
            assert_true(t->revoked);
            t->slot_live = false;
            for (int32_t i = 0; i < t->n * CELLS; i++)
                w->dst[dst_block(w, t, i / CELLS) * CELLS + i % CELLS] = -1;
        }
    }
    while (td_xfer_core_poll(&w->p, &e, 1)) {
        struct transfer *t = &w->t[e.user];
        any = true;
        assert_true(t->op_live && t->op == e.id);
        assert_int_equal(w->handles[e.id], 0); /* withdrawn before the event */
        t->op_live = false;
        if (e.kind == TD_XFER_OP_DONE) {
            w->n_done++;
            assert_true(t->n_sent > t->n);
        } else {
            assert_int_equal(e.kind, TD_XFER_OP_FAILED);
            assert_true(e.status < 0);
            w->n_failed++;
        }
        /* reused at once */
        for (int32_t i = 0; i < t->n * CELLS; i++) w->src[src_block(w, t, 0) * CELLS + i] = -2;
    }
    return any;
}

/* Whatever happened: when time passes and the caller revokes, everything comes back. */
static void settle(struct world *w)
{
    if (w->path == TD_XFER_PATH_RDMA) break_conn(w, false);
    if (w->old_conn) old_conn_step(w, true);
    while (w->n_pulls) pull_step(w);
    tick(w, 1000000);
    for (int round = 0; round < 3; round++) {
        poll_events(w);
        for (int i = 0; i < MAX_TRANSFERS; i++) revoke_slot(w, &w->t[i]);
        if (w->path == TD_XFER_PATH_RDMA) tick(w, QUARANTINE_NS);
    }
    poll_events(w);
    assert_int_equal(w->p.n_ops_used, 0);
    assert_int_equal(w->d.n_slots_used, 0);
    for (int i = 0; i < MAX_TRANSFERS; i++) assert_false(w->t[i].slot_live || w->t[i].op_live);
}

/* --- tests ------------------------------------------------------------------------------------ */

enum { N_ACTIONS = 11 };

static bool act(struct world *w, int action)
{
    struct transfer *t = &w->t[0];
    switch (action) {
    case 0:
        return submit_some(w, t, 2);
    case 1:
        return connect_ops(w);
    case 2:
        return transmit(w);
    case 3:
        return deliver_to_d(w);
    case 4:
        return deliver_to_p(w);
    case 5:
        return copy_step(w);
    case 6:
        return break_conn(w, true);
    case 7:
        return cancel_op(w, t);
    case 8:
        return revoke_slot(w, t);
    case 9:
        return poll_events(w);
    default:
        return tick(w, 60); /* once: nothing; twice: an orphan's grace; more: deadlines */
    }
}

/* Orders in which some action is not possible are cut there: the same order without it is
 * another leaf. */
static void orders(enum td_xfer_path path, bool parts)
{
    enum { PREFIX_MAX = 40, DEPTH = 7 };
    /* Starting points: nothing yet; bound; half way; the last pieces under way; all but the
       verdict. What a path cannot do it skips. */
    static const int prefixes[][PREFIX_MAX] = {
        {-1},
        {1, 3, -1},
        {1, 3, 0, 2, 3, 5, -1},
        {1, 3, 0, 0, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, -1},
        {1, 3, 0, 0, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3,
         3, 3, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, -1},
    };
    /* rdma: the receiver tells where its blocks are before anything can be posted. */
    static const int rdma_prefixes[][PREFIX_MAX] = {
        {-1},
        {1, 3, 5, 4, -1},
        {1, 3, 5, 4, 0, 2, 5, -1},
        {1, 3, 5, 4, 0, 0, 2, 2, 2, 2, 2, 2, 2, 3, 5, 5, -1},
        {1, 3, 5, 4, 0, 0, 2, 2, 2, 2, 2, 2, 2, 3, 5, 5, 5, 5, 5, 5, 5, 5, 5, -1},
    };
    _Static_assert(sizeof prefixes == sizeof rdma_prefixes, "as many of both");
    /* The last action multiplies the orders by five, and is make check-long's. Sanitizer builds of
       make check need it least: what one action does to memory it does at any depth. */
    int deepest = getenv("TANDEM_TEST_LONG") ? DEPTH : DEPTH - 1;
    uint64_t n_leaves = 0, n_ready = 0;
    for (size_t k = 0; k < sizeof prefixes / sizeof prefixes[0]; k++) {
        int order[DEPTH] = {0};
        struct world w;
        world_open(&w, path, 4 + k);
        w.calm = true;
        w.fixed_n = BLOCKS_EACH - 1;
        w.parts = parts;
        for (;;) {
            start(&w, &w.t[0], 150);
            const int *prefix = path == TD_XFER_PATH_RDMA ? rdma_prefixes[k] : prefixes[k];
            for (int i = 0; prefix[i] >= 0; i++) {
                act(&w, prefix[i]);
                if (parts && prefix[i] == 0) act(&w, 0); /* what a prefix submits is whole */
            }
            int depth = 0;
            while (depth < deepest && act(&w, order[depth])) depth++;
            break_conn(&w, false);
            settle(&w); /* all is free again: the next order starts as in a new world, but for
                           the generations */
            n_leaves++;
            /* next order: the last action done, or the impossible one, moves on */
            int at = depth < deepest ? depth : deepest - 1;
            for (int i = at + 1; i < deepest; i++) order[i] = 0;
            while (at >= 0 && ++order[at] == N_ACTIONS) order[at--] = 0;
            if (at < 0) break;
        }
        n_ready += (uint64_t)w.n_ready;
        world_close(&w);
    }
    print_message("%llu orders, %llu ended ready\n", (unsigned long long)n_leaves,
                  (unsigned long long)n_ready);
    assert_true(n_leaves > (deepest == DEPTH ? 100000 : 20000) && n_ready > 0);
}

/* Sanitizer builds walk half of them: what they look for is in the code that both kinds share. */
static bool is_walked(enum td_xfer_path path, bool parts)
{
    return !getenv("TANDEM_TEST_SHORT") ||
           parts == (path == TD_XFER_PATH_SHM || path == TD_XFER_PATH_RDMA);
}

static void every_order_of_events(void **state)
{
    if (!is_walked(*(enum td_xfer_path *)*state, false)) skip();
    orders(*(enum td_xfer_path *)*state, false);
}

static void every_order_with_parts(void **state)
{
    if (!is_walked(*(enum td_xfer_path *)*state, true)) skip();
    orders(*(enum td_xfer_path *)*state, true);
}

static void random_walks(void **state)
{
    enum td_xfer_path path = *(enum td_xfer_path *)*state;
    const char *seed_text = getenv("SEED");
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 0) : td_random_u64() >> 32;
    int n_ready = 0, n_done = 0, n_failed = 0, n_started = 0, n_late = 0, n_dma = 0, n_lost = 0;
    print_message("SEED=%llu\n", (unsigned long long)seed);
    for (int walk = 0; walk < 200; walk++) {
        struct world w;
        world_open(&w, path, seed + (uint64_t)walk);
        for (int step = 0; step < 3000; step++) {
            struct transfer *t = &w.t[next_random(&w.rng) % MAX_TRANSFERS];
            uint64_t dice = next_random(&w.rng) % 1000;
            if (dice < 80)
                start(&w, t, next_random(&w.rng) % 10 ? 20000 : 50);
            else if (dice < 150 && walk % 2)
                submit_part(&w, t);
            else if (dice < 200)
                submit_some(&w, t, (int32_t)(next_random(&w.rng) % 3));
            else if (dice < 260)
                connect_ops(&w);
            else if (dice < 440)
                transmit(&w);
            else if (dice < 620)
                deliver_to_d(&w);
            else if (dice < 720)
                deliver_to_p(&w);
            else if (dice < 850)
                copy_step(&w);
            else if (dice < 860)
                break_conn(&w, next_random(&w.rng) % 4);
            else if (dice < 865)
                cancel_op(&w, t);
            else if (dice < 870)
                revoke_slot(&w, t);
            else if (dice < 890)
                tick(&w, next_random(&w.rng) % 40);
            else {
                poll_events(&w);
                if (t->ready || t->slot_failed) revoke_slot(&w, t);
            }
        }
        settle(&w);
        n_ready += w.n_ready;
        n_done += w.n_done;
        n_failed += w.n_failed;
        n_started += w.n_started;
        n_late += w.n_landed_late;
        n_dma += w.n_landed_dma;
        n_lost += w.n_landed_lost;
        assert_int_equal(w.n_done + w.n_failed, w.n_started);
        world_close(&w);
    }
    print_message(
        "%d transfers: %d ready, %d done, %d failed; %d cells landed late, %d after a fence\n",
        n_started, n_ready, n_done, n_failed, n_late, n_dma);
    assert_true(path != TD_XFER_PATH_RDMA || (n_late > 0 && n_dma > 0));
    /* copies of slots that were revoked, or bound no more */
    assert_true(path != TD_XFER_PATH_CUDA_IPC || n_lost > 0);
    assert_true(n_ready > n_started / 4 && n_failed > n_started / 20 && n_done <= n_ready);
}

/* tcp: the parts of a block go by its lane, whichever lanes are free, because what one socket
 * carries overtakes what another does: the receiver must see each block's bytes in order. Each
 * lane is a wire of its own here. */
static void parts_of_a_block_stay_on_its_lane(void **state)
{
    (void)state;
    enum { LANES = 3 };
    const char *seed_text = getenv("SEED");
    uint64_t seed = seed_text ? strtoull(seed_text, NULL, 0) : td_random_u64() >> 32;
    print_message("SEED=%llu\n", (unsigned long long)seed);
    for (uint64_t run = 0; run < 300; run++) {
        struct world w;
        static struct wire lane[LANES];
        struct td_xfer_turns turns[LANES] = {{0}};
        world_open(&w, TD_XFER_PATH_TCP, seed + run);
        memset(lane, 0, sizeof lane);
        w.calm = true;
        w.fixed_n = BLOCKS_EACH;
        start(&w, &w.t[0], 100000);
        connect_ops(&w);
        while (deliver_to_d(&w)) {
        }
        for (int step = 0; step < 10000 && !w.n_ready; step++) {
            uint32_t k = (uint32_t)(next_random(&w.rng) % LANES);
            uint64_t dice = next_random(&w.rng) % 4;
            if (dice == 0 && (next_random(&w.rng) % 8 || !submit_some(&w, &w.t[0], 1)))
                submit_part(&w, &w.t[0]);
            struct td_xfer_tx tx;
            if (dice == 1 && lane[k].n < MAX_FRAMES &&
                td_xfer_core_tx_next(&w.p, w.conn, k, &turns[k], 4, &tx)) {
                put(&lane[k], &tx.frame, tx.payload);
                for (uint32_t at = 0; tx.frame.type == TD_XFER_DATA && at < tx.frame.length;
                     at += CELL) {
                    uint64_t cell = (tx.frame.offset + at) / CELL;
                    lane[k].q[lane[k].n - 1].cells[at / CELL] =
                        w.src[(uint64_t)w.p.ops[tx.op].src[cell / CELLS] * CELLS + cell % CELLS];
                }
                if (tx.frame.type == TD_XFER_DATA)
                    td_xfer_core_tx_done(&w.p, tx.op, tx.frame.handle);
            }
            if (dice >= 2 && lane[k].n) { /* fails the test when the receiver calls it corrupt */
                w.to_d.q[0] = take(&lane[k]);
                w.to_d.n = 1;
                deliver_to_d(&w);
            }
            poll_events(&w);
        }
        assert_int_equal(w.n_ready, 1);
        settle(&w);
        world_close(&w);
    }
}

/* A REF names more of a block that was named before: the same source block, and more of it. */
static void refs_that_are_wrong_are_refused(void **state)
{
    enum td_xfer_path path = *(enum td_xfer_path *)*state;
    static const struct {
        const char *what;
        uint64_t offset;
        int32_t id;
        td_status shm, rdma;
    } cases[] = {
        {"nothing of it", 0, 1, TD_ERR_CORRUPT, TD_ERR_CORRUPT},
        {"more than a block", CELLS * CELL + 1, 1, TD_ERR_CORRUPT, TD_ERR_CORRUPT},
        {"two cells", 2 * CELL, 1, TD_OK, TD_ERR_CORRUPT},
        {"the same again", 2 * CELL, 1, TD_ERR_CORRUPT, TD_ERR_CORRUPT},
        {"less than before", CELL, 1, TD_ERR_CORRUPT, TD_ERR_CORRUPT},
        {"another source", CELLS * CELL, 2, TD_ERR_CORRUPT, TD_OK},
        {"the rest", CELLS * CELL, 1, TD_OK, TD_ERR_CORRUPT},
        {"after the rest", CELLS * CELL, 1, TD_ERR_CORRUPT, TD_ERR_CORRUPT},
    };
    struct world w;
    uint32_t slot;
    int32_t block = 3;
    world_open(&w, path, 5);
    w.conn = 7;
    assert_int_equal(td_xfer_core_grant(&w.d, &block, 1, TD_NEVER_NS, 0, &slot, NULL), TD_OK);
    struct td_xfer_frame f = {.type = TD_XFER_OPEN,
                              .slot = slot,
                              .generation = w.d.slots[slot].generation,
                              .op = 0,
                              .attempt = 1,
                              .handle = 99};
    assert_int_equal(td_xfer_core_rx_open(&w.d, 7, path, &f, w.d.slots[slot].key), TD_OK);
    f.type = TD_XFER_REF;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        f.offset = cases[i].offset;
        td_status want = path == TD_XFER_PATH_RDMA ? cases[i].rdma : cases[i].shm,
                  got = td_xfer_core_rx_ref(&w.d, 7, &f, 0, &cases[i].id, 1, N_BLOCKS);
        if (got != want) fail_msg("%s: %d, want %d", cases[i].what, (int)got, (int)want);
    }
    f.type = TD_XFER_FINAL;
    f.offset = CELLS * CELL;
    uint8_t note[1] = {0};
    /* it was told all */
    assert_int_equal(td_xfer_core_rx_final(&w.d, w.now, 0, 7, &f, note), TD_OK);
    world_close(&w);
}

/* FINAL on shm says that all was told; a sender that left a part out is a liar. */
static void final_before_the_last_part_is_refused(void **state)
{
    struct world w;
    uint32_t slot;
    int32_t block = 3, id = 1;
    uint8_t note[1] = {0};
    (void)state;
    world_open(&w, TD_XFER_PATH_SHM, 5);
    w.conn = 7;
    assert_int_equal(td_xfer_core_grant(&w.d, &block, 1, TD_NEVER_NS, 0, &slot, NULL), TD_OK);
    struct td_xfer_frame f = {.type = TD_XFER_OPEN,
                              .slot = slot,
                              .generation = w.d.slots[slot].generation,
                              .op = 0,
                              .attempt = 1,
                              .handle = 99};
    assert_int_equal(td_xfer_core_rx_open(&w.d, 7, TD_XFER_PATH_SHM, &f, w.d.slots[slot].key),
                     TD_OK);
    f.offset = 2 * CELL;
    assert_int_equal(td_xfer_core_rx_ref(&w.d, 7, &f, 0, &id, 1, N_BLOCKS), TD_OK);
    f.offset = CELLS * CELL;
    assert_int_equal(td_xfer_core_rx_final(&w.d, w.now, 0, 7, &f, note), TD_ERR_CORRUPT);
    world_close(&w);
}

/* DATA says where its bytes belong. It may fill the slot to its last byte and not go one beyond,
 * however the two numbers are put together. */
static void data_beyond_the_grant_is_refused(void **state)
{
    struct world w;
    uint32_t slot;
    int32_t blocks[2] = {3, 5};
    const uint32_t block = CELLS * CELL;
    (void)state;
    static const struct {
        const char *what;
        uint64_t offset;
        uint32_t length;
        td_status want;
    } cases[] = {{"one byte beyond", CELLS * CELL, CELLS * CELL + 1, TD_ERR_CORRUPT},
                 {"a block beyond", CELLS * CELL, 2 * CELLS * CELL, TD_ERR_CORRUPT},
                 {"all and one byte", 0, 2 * CELLS * CELL + 1, TD_ERR_CORRUPT},
                 {"behind the end", 2 * CELLS * CELL, 1, TD_ERR_CORRUPT},
                 {"far behind it", 1000 * CELLS * CELL, CELL, TD_ERR_CORRUPT},
                 {"a sum that wraps", UINT64_MAX - CELL + 1, CELL, TD_ERR_CORRUPT},
                 {"to the last byte", CELLS * CELL, CELLS * CELL, TD_OK}};
    for (int path = TD_XFER_PATH_TCP; path <= TD_XFER_PATH_SHM_STAGED;
         path += TD_XFER_PATH_SHM_STAGED - TD_XFER_PATH_TCP) {
        world_open(&w, (enum td_xfer_path)path, 5);
        w.conn = 7;
        assert_int_equal(block, w.d.block_bytes);
        assert_int_equal(td_xfer_core_grant(&w.d, blocks, 2, TD_NEVER_NS, 0, &slot, NULL), TD_OK);
        struct td_xfer_frame f = {.type = TD_XFER_OPEN,
                                  .slot = slot,
                                  .generation = w.d.slots[slot].generation,
                                  .op = 0,
                                  .attempt = 1,
                                  .handle = 99};
        assert_int_equal(
            td_xfer_core_rx_open(&w.d, 7, (enum td_xfer_path)path, &f, w.d.slots[slot].key), TD_OK);
        f.type = TD_XFER_DATA;
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            f.offset = cases[i].offset;
            f.length = cases[i].length;
            td_status got = td_xfer_core_rx_data(&w.d, 7, &f);
            if (got != cases[i].want)
                fail_msg("%s: %d, want %d", cases[i].what, (int)got, (int)cases[i].want);
        }
        td_xfer_core_conn_lost(&w.d, w.now, 7, TD_ERR_PEER, "over", TD_XFER_LOST);
        world_close(&w);
    }
}

/* A frame is taken only from the binding it names: one number of another slot, grant, attempt,
 * connection or handle, and it is dropped as stale, nothing is counted and no byte of it lands. */
static void a_frame_is_of_one_binding(void **state)
{
    struct world w;
    uint32_t slot;
    int32_t block = 3;
    uint8_t note[1] = {0};
    (void)state;
    world_open(&w, TD_XFER_PATH_TCP, 5);
    w.conn = 7;
    assert_int_equal(td_xfer_core_grant(&w.d, &block, 1, TD_NEVER_NS, 0, &slot, NULL), TD_OK);
    struct td_xfer_frame open = {.type = TD_XFER_OPEN,
                                 .slot = slot,
                                 .generation = w.d.slots[slot].generation,
                                 .op = 0,
                                 .attempt = 1,
                                 .handle = 99};
    struct td_xfer_frame old = open;
    old.generation--;
    /* even with the key of today */
    assert_int_equal(td_xfer_core_rx_open(&w.d, 7, TD_XFER_PATH_TCP, &old, w.d.slots[slot].key),
                     TD_ERR_STALE);
    assert_int_equal(td_xfer_core_rx_open(&w.d, 7, TD_XFER_PATH_TCP, &open, w.d.slots[slot].key),
                     TD_OK);
    struct td_xfer_frame right = open;
    right.type = TD_XFER_DATA;
    right.length = CELLS * CELL;
    for (int i = 0; i < 6; i++) {
        struct td_xfer_frame f = right;
        uint64_t conn = 7;
        if (i == 0) f.slot ^= 1;
        if (i == 1) f.generation--;
        if (i == 2) f.generation += 256; /* the same in immediate data, which has 8 bits of it */
        if (i == 3) f.attempt++;
        if (i == 4) f.handle ^= 1ull << 40;
        if (i == 5) conn = 8;
        uint64_t before = w.d.stats.n_stale_frames;
        if (td_xfer_core_rx_data(&w.d, conn, &f) != TD_ERR_STALE) fail_msg("DATA, case %d", i);
        if (td_xfer_core_place_begin(&w.d, conn, &f)) fail_msg("a piece of DATA, case %d", i);
        f.type = TD_XFER_FINAL;
        f.offset = CELLS * CELL;
        if (td_xfer_core_rx_final(&w.d, w.now, 0, conn, &f, note) != TD_ERR_STALE)
            fail_msg("FINAL, case %d", i);
        f.type = TD_XFER_ABORT;
        td_xfer_core_rx_abort(&w.d, conn, &f, "of another");
        if (w.d.slots[slot].state != TD_SLOT_FILLING) fail_msg("ABORT, case %d", i);
        assert_int_equal(w.d.stats.n_stale_frames, before + 3);
    }
    assert_int_equal(td_xfer_core_rx_data(&w.d, 7, &right), TD_OK);
    td_xfer_core_conn_lost(&w.d, w.now, 7, TD_ERR_PEER, "over", TD_XFER_LOST);
    world_close(&w);
}

/* One block in N carries a digest: not none, not all, and not the same ones each time. */
static void digests_are_a_sample(void **state)
{
    (void)state;
    static const uint32_t every[] = {1, 2, 4, 16};
    for (size_t k = 0; k < sizeof every / sizeof *every; k++) {
        struct world w;
        struct td_xfer_digest_work work;
        uint32_t n_all = 0, n_digests = 0, n_with = 0, by_block[BLOCKS_EACH] = {0};
        for (uint64_t seed = 1; seed <= 400; seed++) {
            world_open(&w, TD_XFER_PATH_TCP, seed);
            w.calm = true;
            w.fixed_n = BLOCKS_EACH;
            w.p.digest_every = every[k];
            start(&w, &w.t[0], 100000);
            connect_ops(&w);
            submit_cells(&w, &w.t[0], 0, BLOCKS_EACH, 0, CELLS);
            n_all += BLOCKS_EACH;
            uint32_t before = n_digests;
            while (td_xfer_core_digest_next(&w.p, w.conn, UINT64_MAX, &work)) {
                for (int32_t i = 0; i < work.n; i++) by_block[work.digest[i].block]++;
                n_digests += (uint32_t)work.n;
                td_xfer_core_digest_end(&w.p, &work);
            }
            n_with += n_digests > before;
            settle(&w);
            world_close(&w);
        }
        /* 1600 blocks: 3 standard deviations of the rarest sample are 29 of 100 */
        if (n_digests < n_all / every[k] * 7 / 10 || n_digests > n_all / every[k] * 13 / 10)
            fail_msg("1/%u: %u digests of %u blocks", every[k], n_digests, n_all);
        for (int i = 0; i < BLOCKS_EACH; i++)
            if (!by_block[i]) fail_msg("1/%u: block %d never carries one", every[k], i);
        assert_true(n_with >= 50);
    }
}

/* A digest is of the whole block, so it is due when the last part is there. */
static void a_digest_waits_for_the_last_part(void **state)
{
    struct world w;
    struct td_xfer_digest_work work;
    (void)state;
    world_open(&w, TD_XFER_PATH_TCP, 12);
    w.calm = true;
    w.fixed_n = 2;
    w.p.digest_every = 1;
    start(&w, &w.t[0], 100000);
    connect_ops(&w);
    submit_cells(&w, &w.t[0], 1, 1, 0, 2);
    submit_cells(&w, &w.t[0], 0, 1, 0, CELLS);
    /* in the order of first parts */
    assert_false(td_xfer_core_digest_next(&w.p, w.conn, UINT64_MAX, &work));
    submit_cells(&w, &w.t[0], 1, 1, 2, 1);
    assert_true(td_xfer_core_digest_next(&w.p, w.conn, UINT64_MAX, &work));
    assert_int_equal(work.n, 2);
    td_xfer_core_digest_end(&w.p, &work);
    assert_false(td_xfer_core_digest_next(&w.p, w.conn, UINT64_MAX, &work));
    settle(&w);
    world_close(&w);
}

static void a_lost_verdict_is_asked_for_again(void **state)
{
    enum td_xfer_path path = *(enum td_xfer_path *)*state;
    struct world w;
    world_open(&w, path, 1);
    w.calm = true;
    start(&w, &w.t[0], 100000);
    connect_ops(&w);
    while (submit_some(&w, &w.t[0], 4)) {
    }
    while (transmit(&w)) {
    }
    while (deliver_to_d(&w) || copy_step(&w)) {
    }
    poll_events(&w);
    assert_true(w.t[0].ready);
    revoke_slot(&w, &w.t[0]); /* decoded already, even */
    poll_events(&w);
    assert_false(w.t[0].slot_live);
    break_conn(&w, true); /* DONE is lost with it */
    connect_ops(&w);
    while (transmit(&w)) {
    }
    memset(w.dst, 0x55, sizeof w.dst);
    while (deliver_to_d(&w) || copy_step(&w)) {
    } /* land() fails the test if a byte of the second
         attempt is placed */
    while (deliver_to_p(&w)) {
    }
    poll_events(&w);
    assert_int_equal(w.n_done, 1);
    world_close(&w);
}

/* The sender's clock passes 2^32 us; it lies: before the receiver's clock began, or not yet. */
static const struct {
    uint32_t now_us, first_us, last_us;
    uint64_t elapsed_us, tail_us;
} clocks[] = {
    {5, UINT32_MAX - 4, 3, 10, 2},
    {77, 77, 77, 0, 0},
    {0, 0x80000002, 0x80000000, 1000, 0},
    {0, 0x90000000, 0x90000000, 1000, 1000},
    {0, 1, 2, 0, 0},
};

/* What the receiver says a transfer took: from the sender's first submit on, wherever bytes are
 * seen. */
static void times_are_of_both_sides(void **state)
{
    enum td_xfer_path path = *(enum td_xfer_path *)*state;
    struct world w;
    struct td_xfer_event e;
    world_open(&w, path, 1);
    w.calm = true;
    w.fixed_n = 4;
    w.now = 1000 * TD_NS_PER_US;
    start(&w, &w.t[0], TD_NS_PER_S);
    connect_ops(&w);
    w.now += 100 * TD_NS_PER_US; /* computing */
    submit_some(&w, &w.t[0], 2);
    while (transmit(&w) || deliver_to_d(&w) || copy_step(&w) || deliver_to_p(&w)) {
    }
    w.now += 300 * TD_NS_PER_US; /* computing the rest */
    submit_some(&w, &w.t[0], 2);
    w.now += 20 * TD_NS_PER_US;
    while (transmit(&w)) {
    }
    w.now += 7 * TD_NS_PER_US; /* the flight */
    while (deliver_to_d(&w)) {
    }
    bool all_seen = path == TD_XFER_PATH_TCP; /* its bytes came before FINAL; others are fetched,
                                                 or land, after it */
    assert_int_equal(td_xfer_core_poll(&w.d, &e, 1), all_seen);
    w.now += 40 * TD_NS_PER_US;
    while (copy_step(&w)) {
    }
    assert_int_equal(all_seen ? 1 : td_xfer_core_poll(&w.d, &e, 1), 1);
    assert_int_equal(e.kind, TD_XFER_SLOT_READY);
    assert_int_equal(e.elapsed_ns, (all_seen ? 327 : 367) * TD_NS_PER_US);
    assert_int_equal(e.tail_ns, (all_seen ? 27 : 67) * TD_NS_PER_US);
    assert_int_equal(e.at_ns, (1000 + 100 + 300 + 20 + 7 + (all_seen ? 0 : 40)) * TD_NS_PER_US);
    w.now += 9 * TD_NS_PER_US;
    while (deliver_to_p(&w)) {
    }
    assert_int_equal(td_xfer_core_poll(&w.p, &e, 1), 1);
    assert_int_equal(e.kind, TD_XFER_OP_DONE);
    assert_int_equal(e.elapsed_ns, (300 + 20 + 7 + 40 + 9) * TD_NS_PER_US);
    assert_int_equal(e.tail_ns, (20 + 7 + 40 + 9) * TD_NS_PER_US);
    world_close(&w);
}

static void times_bear_any_clock(void **state)
{
    (void)state;
    struct world w;
    struct td_xfer_event e;
    for (size_t i = 0; i < sizeof clocks / sizeof clocks[0]; i++) {
        world_open(&w, TD_XFER_PATH_TCP, 1);
        w.fixed_n = 1;
        w.now = 1000 * TD_NS_PER_US;
        w.clock_us = clocks[i].now_us - 1000;
        start(&w, &w.t[0], TD_NS_PER_S);
        connect_ops(&w);
        submit_some(&w, &w.t[0], 1);
        while (transmit(&w)) {
        }
        for (int k = 0; k < w.to_d.n; k++)
            if (w.to_d.q[k].f.type == TD_XFER_FINAL)
                w.to_d.q[k].f.clock_us = clocks[i].first_us,
                w.to_d.q[k].f.last_us = clocks[i].last_us;
        while (deliver_to_d(&w)) {
        }
        assert_int_equal(td_xfer_core_poll(&w.d, &e, 1), 1);
        assert_int_equal(e.kind, TD_XFER_SLOT_READY);
        assert_int_equal(e.elapsed_ns, clocks[i].elapsed_us * TD_NS_PER_US);
        assert_int_equal(e.tail_ns, clocks[i].tail_us * TD_NS_PER_US);
        world_close(&w);
    }
}

static void attempts_are_bounded_and_old_ones_are_refused(void **state)
{
    enum td_xfer_path path = *(enum td_xfer_path *)*state;
    struct world w;
    world_open(&w, path, 2);
    start(&w, &w.t[0], 100000);
    struct frame_in_flight first = {0};
    for (int attempt = 1; attempt <= TD_XFER_ATTEMPTS_MAX; attempt++) {
        connect_ops(&w);
        assert_int_equal(w.p.ops[w.t[0].op].attempt, attempt);
        if (attempt == 1) first = w.to_d.q[0];
        deliver_to_d(&w);
        assert_int_equal(w.d.slots[w.t[0].slot].attempt, attempt);
        if (attempt == 2) { /* the first OPEN comes late, over another connection: the slot stays
                               with the second */
            assert_int_equal(td_xfer_core_rx_open(&w.d, 99, path, &first.f, first.payload), TD_OK);
            assert_int_equal(w.d.slots[w.t[0].slot].conn, w.conn);
            assert_int_equal(w.d.stats.n_stale_frames, 1);
        }
        break_conn(&w, true);
    }
    poll_events(&w);
    assert_int_equal(w.n_failed, 1);
    tick(&w, GRACE_NS);
    poll_events(&w);
    assert_true(w.t[0].slot_failed);
    settle(&w);
    world_close(&w);
}

/* Where one side said that it goes on, its slot waits for the other twice as long as where the
 * connection was cut without a word. */
static void slots_wait_longer_for_a_peer_that_lives(void **state)
{
    (void)state;
    for (int parted = 0; parted < 2; parted++) {
        struct world w;
        world_open(&w, TD_XFER_PATH_TCP, 3);
        start(&w, &w.t[0], 100000);
        connect_ops(&w);
        deliver_to_d(&w);
        uint64_t conn = w.conn, grace = parted ? 2 * GRACE_NS : GRACE_NS;
        w.conn = 0;
        w.to_d.n = w.to_p.n = 0;
        td_xfer_core_conn_lost(&w.p, w.now, conn, TD_ERR_PEER, "broken", TD_XFER_LOST);
        td_xfer_core_conn_lost(&w.d, w.now, conn, TD_ERR_PEER, "broken",
                               parted ? TD_XFER_PARTED : TD_XFER_CUT);
        tick(&w, grace - 1);
        poll_events(&w);
        assert_false(w.t[0].slot_failed);
        tick(&w, 1);
        poll_events(&w);
        assert_true(w.t[0].slot_failed);
        settle(&w);
        world_close(&w);
    }
}

/* Two ops on one grant over one connection: the slot belongs to the first, and nothing of the
 * second counts. */
static void a_second_op_on_a_grant_is_dropped(void **state)
{
    struct world w;
    (void)state;
    world_open(&w, TD_XFER_PATH_TCP, 6);
    w.calm = true;
    w.fixed_n = 2;
    start(&w, &w.t[0], 100000);
    connect_ops(&w);
    deliver_to_d(&w);
    uint32_t second;
    assert_int_equal(td_xfer_core_op_start(&w.p, &w.t[0].grant, TD_NEVER_NS, 1, &second, NULL),
                     TD_OK);
    connect_ops(&w);
    int32_t ids[2] = {4, 5};
    assert_int_equal(td_xfer_core_submit(&w.p, 1, second, 0, ids, 2, true, NULL, 0), TD_OK);
    while (transmit(&w)) {
    }
    while (deliver_to_d(&w)) {
    } /* OPEN, four DATA, FINAL: each is stale */
    assert_int_equal(w.d.stats.n_stale_frames, 6);
    assert_int_equal(w.d.stats.bytes_received, 0);
    while (submit_some(&w, &w.t[0], 2)) {
    }
    while (transmit(&w)) {
    }
    while (deliver_to_d(&w)) {
    }
    w.t[1] = (struct transfer){.op_live = true, .op = second};
    while (deliver_to_p(&w)) {
    }
    poll_events(&w);
    assert_int_equal(w.n_ready, 1);
    assert_int_equal(w.n_done, 1);
    assert_int_equal(w.n_failed, 1);
    settle(&w);
    world_close(&w);
}

/* The slot is complete and says so to whoever opens it: an op that had sent nothing yet fails
 * alone, and its connection, with all its other ops, stays. */
static void a_grant_that_was_used_before_fails_its_op(void **state)
{
    struct world w;
    struct td_xfer_event e;
    uint32_t second;
    (void)state;
    world_open(&w, TD_XFER_PATH_TCP, 7);
    w.calm = true;
    w.fixed_n = 2;
    start(&w, &w.t[0], 100000);
    connect_ops(&w);
    while (submit_some(&w, &w.t[0], 2)) {
    }
    while (transmit(&w) || deliver_to_d(&w) || deliver_to_p(&w)) {
    }
    poll_events(&w);
    assert_int_equal(w.n_ready, 1);
    assert_int_equal(w.n_done, 1);
    assert_int_equal(td_xfer_core_op_start(&w.p, &w.t[0].grant, TD_NEVER_NS, 1, &second, NULL),
                     TD_OK);
    connect_ops(&w);
    while (deliver_to_d(&w)) {
    }
    assert_true(deliver_to_p(&w)); /* DONE, and it is no breach of the protocol */
    assert_int_equal(td_xfer_core_poll(&w.p, &e, 1), 1);
    assert_int_equal(e.kind, TD_XFER_OP_FAILED);
    assert_int_equal(e.id, second);
    assert_int_equal(e.status, TD_ERR_STALE);
    settle(&w);
    world_close(&w);
}

/* rdma: all of the second attempt is there while the first attempt's writer is in its
 * quarantine. READY now would let the caller write on into the last, partly filled block, and
 * the first attempt's last bytes undo that: READY comes when it is over, whatever path the
 * second attempt took, and not later. */
static void ready_waits_for_an_earlier_quarantine(void **state)
{
    enum td_xfer_path second = *(enum td_xfer_path *)*state;
    struct world w;
    world_open(&w, TD_XFER_PATH_RDMA, 8);
    w.calm = true;
    w.fixed_n = 2;
    start(&w, &w.t[0], 100000);
    connect_ops(&w);
    while (submit_some(&w, &w.t[0], 2)) {
    }
    while (deliver_to_d(&w)) {
    }
    copy_step(&w); /* TARGETS */
    while (deliver_to_p(&w)) {
    }
    assert_true(post_request(&w));
    uint64_t over = w.now + QUARANTINE_NS;
    break_conn(&w, true);
    assert_int_equal(w.d.slots[w.t[0].slot].holds.reasons, TD_HELD(TD_HOLD_QUARANTINE));
    w.path = second;
    connect_ops(&w);
    for (int step = 0; step < 1000; step++) /* the NIC's next step is by chance, or none */
        if (!transmit(&w) && !deliver_to_d(&w) && !deliver_to_p(&w)) copy_step(&w);
    assert_int_equal(w.d.slots[w.t[0].slot].state, TD_SLOT_VERIFYING);
    assert_true(w.d.next_tick_ns <= over);
    tick(&w, QUARANTINE_NS - 1);
    poll_events(&w);
    assert_int_equal(w.n_ready + w.n_done, 0);
    int32_t last = dst_block(&w, &w.t[0], 1);
    /* allowed, and seen to be before READY */
    land_raw(&w, last, 0, w.src[src_block(&w, &w.t[0], 1) * CELLS]);
    tick(&w, 1);
    assert_int_equal(w.now, over);
    while (deliver_to_p(&w)) {
    }
    poll_events(&w);
    assert_int_equal(w.n_ready, 1);
    assert_int_equal(w.n_done, 1);
    settle(&w);
    world_close(&w);
}

/* tcp without copies: the kernel does not let go of an op that is over. Its connection is named
 * to be closed, within the time that any peer has to retire. */
static void what_the_kernel_holds_is_bounded(void **state)
{
    struct world w;
    struct td_xfer_tx tx;
    (void)state;
    world_open(&w, TD_XFER_PATH_TCP, 9);
    w.calm = true;
    w.fixed_n = 2;
    start(&w, &w.t[0], 100000);
    connect_ops(&w);
    while (submit_some(&w, &w.t[0], 2)) {
    }
    deliver_to_d(&w);
    assert_true(td_xfer_core_tx_next(&w.p, w.conn, 0, &w.tx_turns, 4, &tx));
    assert_true(td_xfer_core_read_begin(&w.p, tx.op, tx.frame.handle));
    td_xfer_core_hold(&w.p, tx.op);
    td_xfer_core_read_end(&w.p, tx.op, tx.frame.length);
    td_xfer_core_op_fail(&w.p, w.t[0].op, TD_ERR_CANCELLED, "cancelled");
    td_xfer_core_tick(&w.p, w.now);
    uint64_t due = w.now + 8 * GRACE_NS; /* a peer time-out */
    assert_int_equal(w.p.next_tick_ns, due);
    td_xfer_core_tick(&w.p, due - 1);
    assert_int_equal(w.p.stuck_conn, 0);
    assert_int_equal(w.p.n_events, 0);
    td_xfer_core_tick(&w.p, due);
    assert_int_equal(w.p.stuck_conn, w.conn);
    td_xfer_core_wr_done(&w.p, w.t[0].op, 0, true); /* as the socket's end does */
    poll_events(&w);
    assert_int_equal(w.n_failed, 1);
    w.p.stuck_conn = 0;
    settle(&w);
    world_close(&w);
}

/* tcp: a lane whose OPEN is the last of an attempt to come, when the others have brought all of it
 * and its digests are being compared. It is of that attempt, and the sender hears DONE and no
 * more. */
static void a_late_open_does_not_disturb_digests(void **state)
{
    struct world w;
    uint32_t slot, cursor = 0;
    int32_t block = 3;
    uint8_t note[1] = {0};
    struct td_xfer_digest digest = {.block = 0, .crc = 17};
    struct td_xfer_verify v;
    (void)state;
    world_open(&w, TD_XFER_PATH_TCP, 5);
    w.conn = 7;
    assert_int_equal(td_xfer_core_grant(&w.d, &block, 1, TD_NEVER_NS, 0, &slot, NULL), TD_OK);
    const uint8_t *key = w.d.slots[slot].key;
    struct td_xfer_frame open = {.type = TD_XFER_OPEN,
                                 .slot = slot,
                                 .generation = w.d.slots[slot].generation,
                                 .op = 0,
                                 .attempt = 1,
                                 .handle = 99},
                         f = open;
    assert_int_equal(td_xfer_core_rx_open(&w.d, 7, TD_XFER_PATH_TCP, &open, key), TD_OK);
    f.type = TD_XFER_DATA;
    f.length = CELLS * CELL;
    assert_int_equal(td_xfer_core_rx_data(&w.d, 7, &f), TD_OK);
    assert_true(td_xfer_core_place_begin(&w.d, 7, &f));
    td_xfer_core_place_end(&w.d, w.now, slot, f.length);
    f.type = TD_XFER_DIGEST;
    assert_int_equal(td_xfer_core_rx_digest(&w.d, 7, &f, &digest, 1), TD_OK);
    f.type = TD_XFER_FINAL;
    f.offset = CELLS * CELL;
    f.length = 0;
    assert_int_equal(td_xfer_core_rx_final(&w.d, w.now, 0, 7, &f, note), TD_OK);
    assert_int_equal(w.d.slots[slot].state, TD_SLOT_VERIFYING);
    assert_true(td_xfer_core_verify_next(&w.d, &cursor, UINT64_MAX, &v));
    assert_int_equal(td_xfer_core_rx_open(&w.d, 7, TD_XFER_PATH_TCP, &open, key), TD_OK);
    assert_int_equal(w.to_p.n, 0);
    /* of another attempt it is refused, as ever */
    open.handle++;
    assert_int_equal(td_xfer_core_rx_open(&w.d, 7, TD_XFER_PATH_TCP, &open, key), TD_OK);
    assert_int_equal(take(&w.to_p).f.type, TD_XFER_FAIL);
    td_xfer_core_verify_end(&w.d, w.now, &v, -1);
    assert_int_equal(w.d.slots[slot].state, TD_SLOT_READY);
    assert_int_equal(take(&w.to_p).f.type, TD_XFER_DONE);
    world_close(&w);
}

/* tcp: the lane that carried the last block also says FINAL, and no lane that had no OPEN; with
 * digests it is said behind them, on lane 0. */
static void final_goes_by_the_lane_of_its_data(void **state)
{
    (void)state;
    for (uint32_t digest_every = 0; digest_every < 2; digest_every++) {
        struct world w;
        struct td_xfer_tx tx;
        struct td_xfer_turns turns = {0};
        world_open(&w, TD_XFER_PATH_TCP, 11);
        w.calm = true;
        w.fixed_n = 2;
        w.p.digest_every = digest_every;
        start(&w, &w.t[0], 100000);
        connect_ops(&w);
        while (submit_some(&w, &w.t[0], 2)) {
        }
        assert_true(td_xfer_core_tx_next(&w.p, w.conn, 2, &turns, 4, &tx));
        assert_int_equal(tx.frame.type, TD_XFER_OPEN);
        assert_true(td_xfer_core_tx_next(&w.p, w.conn, 2, &turns, 4, &tx));
        assert_int_equal(tx.frame.type, TD_XFER_DATA);
        while (td_xfer_core_tx_next(&w.p, w.conn, 2, &turns, 4, &tx)) {
            /* blocks that are no neighbours */
            assert_int_equal(tx.frame.type, TD_XFER_DATA);
            td_xfer_core_tx_done(&w.p, tx.op, tx.frame.handle);
        }
        /* a frame is not out yet */
        for (uint32_t lane = 0; lane < 4; lane++)
            assert_false(td_xfer_core_tx_next(&w.p, w.conn, lane, &turns, 4, &tx));
        td_xfer_core_tx_done(&w.p, w.t[0].op, w.p.ops[w.t[0].op].handle);
        if (digest_every) {
            struct td_xfer_digest_work work;
            assert_true(td_xfer_core_digest_next(&w.p, w.conn, UINT64_MAX, &work));
            td_xfer_core_digest_end(&w.p, &work);
        }
        uint32_t last = digest_every ? 0 : 2;
        for (uint32_t lane = 1; lane < 4; lane++)
            if (lane != last)
                assert_false(td_xfer_core_tx_next(&w.p, w.conn, lane, &turns, 4, &tx));
        assert_true(td_xfer_core_tx_next(&w.p, w.conn, last, &turns, 4, &tx));
        assert_int_equal(tx.frame.type, TD_XFER_FINAL);
        td_xfer_core_op_fail(&w.p, w.t[0].op, TD_ERR_CANCELLED, "the receiver is not part of this");
        settle(&w);
        world_close(&w);
    }
}

/* of one transfer when each takes two cells and none crosses a block */
#define PIECES (BLOCKS_EACH * CELLS * 2 / 3)

/* The next piece that moves, whoever moves it on this path: which transfer's? */
static int piece(struct world *w)
{
    static const struct td_xfer_wr_limits limits = {
        .max_bytes = 2 * CELL, .max_pieces = 1, .src_region = N_BLOCKS, .dst_region = N_BLOCKS};
    uint32_t op = UINT32_MAX;
    struct request r = {.conn = w->conn};
    if (w->path == TD_XFER_PATH_SHM && copy_step(w)) {
        op = w->copy.op;
        copy_step(w);
    }
    while (w->path == TD_XFER_PATH_TCP && op == UINT32_MAX && transmit(w)) {
        if (w->to_d.q[0].f.type == TD_XFER_DATA) op = w->to_d.q[0].f.op; /* else FINAL */
        deliver_to_d(w);
    }
    while (w->path == TD_XFER_PATH_RDMA && op == UINT32_MAX &&
           td_xfer_core_wr_next(&w->p, w->conn, 0, 0, &w->wr_turns, &limits, &r.wr)) {
        if (!r.wr.is_imm) op = r.wr.op;
        w->nic[0][w->n_nic[0]++] = r;
    }
    for (int i = 0; i < MAX_TRANSFERS; i++)
        if (w->t[i].op == op) return i;
    fail_msg("path %d: nothing moved", w->path);
    return -1;
}

/* Every other turn is the smallest ordering key's; the others go round meanwhile, and nobody
 * waits for more than two rounds. With equal keys all go round. */
static void turns_follow_the_ordering_key(void **state)
{
    static const uint64_t keys[][MAX_TRANSFERS] = {{5, 9, 1}, {1, 2, 3}, {~0ull, 0, 7}, {4, 4, 4}};
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; k++) {
        struct world w;
        int urgent = 0, left[MAX_TRANSFERS], since[MAX_TRANSFERS] = {0};
        world_open(&w, *(enum td_xfer_path *)*state, 12);
        w.calm = true;
        w.fixed_n = BLOCKS_EACH;
        for (int i = 0; i < MAX_TRANSFERS; i++) {
            start(&w, &w.t[i], 100000);
            w.p.ops[w.t[i].op].priority = w.d.slots[w.t[i].slot].priority = keys[k][i];
            if (keys[k][i] < keys[k][urgent]) urgent = i;
            left[i] = PIECES;
        }
        connect_ops(&w);
        while (deliver_to_d(&w) || (w.path == TD_XFER_PATH_RDMA && copy_step(&w)) ||
               deliver_to_p(&w)) {
        }
        for (int i = 0; i < MAX_TRANSFERS; i++)
            while (submit_some(&w, &w.t[i], BLOCKS_EACH)) {
            }
        while (w.path == TD_XFER_PATH_SHM && (transmit(&w) || deliver_to_d(&w))) {
        }
        bool equal = keys[k][0] == keys[k][1] && keys[k][1] == keys[k][2];
        for (int turn = 1; turn <= MAX_TRANSFERS * PIECES; turn++) {
            int t = piece(&w);
            left[t]--;
            for (int i = 0; i < MAX_TRANSFERS; i++) {
                since[i] = i == t || !left[i] ? 0 : since[i] + 1;
                if (since[i] >= (equal ? MAX_TRANSFERS : 2 * MAX_TRANSFERS))
                    fail_msg("path %d, keys %zu: transfer %d waits for %d turns", w.path, k, i,
                             since[i]);
            }
            if (!equal && turn <= 2 * PIECES && PIECES - left[urgent] < turn / 2)
                fail_msg("path %d, keys %zu: the urgent one had %d of %d turns", w.path, k,
                         PIECES - left[urgent], turn);
        }
        for (int step = 0; step < 1000; step++)
            if (!transmit(&w) && !deliver_to_d(&w) && !deliver_to_p(&w)) copy_step(&w);
        poll_events(&w);
        assert_int_equal(w.n_done, MAX_TRANSFERS);
        settle(&w);
        world_close(&w);
    }
}

/* rdma: a request of one op failed for good. Its slot is told at once, and the word does not
 * retire its writer: only the fence and the quarantine do. */
static void giving_up_frees_nothing_early(void **state)
{
    struct world w;
    (void)state;
    world_open(&w, TD_XFER_PATH_RDMA, 10);
    w.calm = true;
    w.fixed_n = 2;
    start(&w, &w.t[0], 100000);
    start(&w, &w.t[1], 100000);
    connect_ops(&w);
    while (deliver_to_d(&w)) {
    }
    for (int i = 0; i < 4; i++) copy_step(&w); /* TARGETS */
    while (deliver_to_p(&w)) {
    }
    for (int i = 0; i < 2; i++)
        while (submit_some(&w, &w.t[i], 2)) {
        }
    while (post_request(&w)) {
    }
    assert_true(td_xfer_core_op_give_up(&w.p, w.t[0].op, TD_ERR_PEER, "remote access error"));
    assert_false(td_xfer_core_op_give_up(&w.p, w.t[0].op, TD_ERR_PEER, "twice"));
    assert_int_equal(w.p.n_events, 0); /* the NIC still reads for it */
    while (deliver_to_d(&w)) {
    }
    poll_events(&w);
    assert_true(w.t[0].slot_failed && !w.t[1].slot_failed);
    revoke_slot(&w, &w.t[0]);
    assert_int_equal(w.d.slots[w.t[0].slot].state, TD_SLOT_REVOKING);
    assert_true(td_xfer_held(&w.d.slots[w.t[0].slot].holds, TD_HOLD_WRITER));
    break_conn(&w, true);
    poll_events(&w);
    assert_int_equal(w.n_failed, 1);
    assert_true(w.t[0].slot_live);
    tick(&w, QUARANTINE_NS - 1);
    poll_events(&w);
    assert_true(w.t[0].slot_live);
    tick(&w, 1);
    poll_events(&w);
    assert_false(w.t[0].slot_live);
    connect_ops(&w); /* the other one has another attempt */
    for (int step = 0; step < 1000; step++)
        if (!transmit(&w) && !deliver_to_d(&w) && !deliver_to_p(&w)) copy_step(&w);
    poll_events(&w);
    assert_true(w.t[1].ready);
    settle(&w);
    world_close(&w);
}

static int sent_of(const struct wire *w, enum td_xfer_frame_type type)
{
    int n = 0;
    for (int i = 0; i < w->n; i++) n += w->q[i].f.type == type;
    return n;
}

enum writer_end { SAYS_ABORT, IS_FENCED, OTHER_ATTEMPT, N_WRITER_ENDS };

/* The writer of connection 7 ends; its slot fails. */
static void end_writer(struct world *w, enum writer_end how, const struct td_xfer_frame *open)
{
    if (how == SAYS_ABORT) {
        struct td_xfer_frame abort = *open;
        abort.type = TD_XFER_ABORT;
        td_xfer_core_rx_abort(&w->d, 7, &abort, "over");
    } else {
        td_xfer_core_conn_fenced(&w->d, 7, w->now + QUARANTINE_NS);
        if (how == IS_FENCED)
            td_xfer_core_conn_lost(&w->d, w->now, 7, TD_ERR_PEER, "dead", TD_XFER_LOST);
        else
            td_xfer_core_conn_lost(&w->d, w->now, 7, TD_ERR_PEER, "broken", TD_XFER_CUT);
    }
    struct td_xfer_event e;
    while (td_xfer_core_poll(&w->d, &e, 1)) assert_int_equal(e.kind, TD_XFER_SLOT_FAILED);
}

/* Another attempt of the writer, over a connection of tcp, is asked to come again until the flush
 * is over; then it is taken. */
static void take_other_attempt(struct world *w, uint32_t slot, struct td_xfer_frame open)
{
    w->conn = 8;
    tick(w, QUARANTINE_NS);
    if (w->d.slots[slot].state != TD_SLOT_ARMED) fail_msg("state %d", (int)w->d.slots[slot].state);
    open.attempt = 2;
    open.handle = 100;
    assert_int_equal(td_xfer_core_rx_open(&w->d, 8, TD_XFER_PATH_TCP, &open, w->d.slots[slot].key),
                     TD_OK);
    assert_int_equal(sent_of(&w->to_p, TD_XFER_FAIL), 1); /* AGAIN */
    assert_int_equal(w->d.slots[slot].state, TD_SLOT_ARMED);
    assert_int_equal(td_xfer_core_flush_begin(&w->d), 1);
    td_xfer_core_flush_end(&w->d, w->now, NULL);
    open.attempt = 3;
    open.handle = 101;
    assert_int_equal(td_xfer_core_rx_open(&w->d, 8, TD_XFER_PATH_TCP, &open, w->d.slots[slot].key),
                     TD_OK);
    assert_int_equal(w->d.slots[slot].state, TD_SLOT_FILLING);
    td_xfer_core_revoke(&w->d, slot, "enough");
}

/* A revoked slot is free when the flush is over, though nobody writes any more. */
static void free_after_flush(struct world *w, uint32_t slot, const char *why_unknown)
{
    struct td_xfer_event e;
    td_xfer_core_revoke(&w->d, slot, "enough");
    tick(w, QUARANTINE_NS);
    assert_false(td_xfer_core_poll(&w->d, &e, 1));
    assert_int_equal(td_xfer_core_flush_begin(&w->d), 1);
    assert_false(td_xfer_core_poll(&w->d, &e, 1));
    td_xfer_core_flush_end(&w->d, w->now, why_unknown);
}

/* rdma to device memory: whatever way a slot's writer has ended, its bytes may be on their way
 * until a flush that began after it. */
static void writes_of_nics_are_flushed_before_anything(void **state)
{
    (void)state;
    for (enum writer_end how = 0; how < N_WRITER_ENDS; how++) {
        struct world w;
        world_open(&w, TD_XFER_PATH_RDMA, 17);
        w.d.flush_writes = true;
        int32_t blocks[2] = {4, 5};
        uint32_t slot;
        assert_int_equal(td_xfer_core_grant(&w.d, blocks, 2, TD_NEVER_NS, 0, &slot, NULL), TD_OK);
        w.conn = 7;
        struct td_xfer_frame open = {.type = TD_XFER_OPEN,
                                     .slot = slot,
                                     .generation = w.d.slots[slot].generation,
                                     .op = 0,
                                     .attempt = 1,
                                     .handle = 99};
        assert_int_equal(
            td_xfer_core_rx_open(&w.d, 7, TD_XFER_PATH_RDMA, &open, w.d.slots[slot].key), TD_OK);
        assert_int_equal(td_xfer_core_flush_begin(&w.d), 0); /* it may still write */
        end_writer(&w, how, &open);
        if (how == OTHER_ATTEMPT)
            take_other_attempt(&w, slot, open);
        else /* the device that wrote it is dead: nothing more comes of it */
            free_after_flush(&w, slot, how == IS_FENCED ? "no way to know" : NULL);
        struct td_xfer_event e;
        assert_true(td_xfer_core_poll(&w.d, &e, 1));
        assert_int_equal(e.kind, TD_XFER_SLOT_FREE);
        world_close(&w);
    }
}

static void limits_are_back_pressure(void **state)
{
    (void)state;
    struct world w;
    struct td_err err;
    uint32_t id;
    int32_t out_of_range = N_BLOCKS;
    world_open(&w, TD_XFER_PATH_TCP, 3);
    for (int i = 0; i < MAX_TRANSFERS; i++) start(&w, &w.t[i], 1000);
    assert_int_equal(td_xfer_core_grant(&w.d, NULL, 0, TD_NEVER_NS, 0, &id, &err), TD_ERR_AGAIN);
    assert_int_equal(td_xfer_core_op_start(&w.p, &w.t[0].grant, TD_NEVER_NS, 0, &id, &err),
                     TD_ERR_AGAIN);
    revoke_slot(&w, &w.t[1]);
    /* SLOT_FREE was not taken yet */
    assert_int_equal(td_xfer_core_grant(&w.d, NULL, 0, TD_NEVER_NS, 0, &id, &err), TD_ERR_AGAIN);
    poll_events(&w);
    assert_int_equal(td_xfer_core_grant(&w.d, &out_of_range, 1, TD_NEVER_NS, 0, &id, &err),
                     TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "block_ids[0] is 12"));
    assert_int_equal(
        td_xfer_core_grant(&w.d, NULL, TD_XFER_MAX_BLOCKS + 1, TD_NEVER_NS, 0, &id, &err),
        TD_ERR_INVALID);
    assert_int_equal(td_xfer_core_submit(&w.p, 1, 77, 0, NULL, 0, true, NULL, 0), TD_ERR_NOT_FOUND);
    settle(&w);
    world_close(&w);
    struct td_xfer_core core;
    struct td_xfer_core_hooks hooks = {.random_u64 = random_hook};
    assert_int_equal(td_xfer_core_create(&core, 0, 1, 1, 0, &hooks, &err), TD_ERR_INVALID);
}

/* golden: version 4 of the header, byte for byte */
static const uint8_t golden_frame[60] = {
    'T',  'D',  'X',  '1',  4,    5,    0,    0,    4,    3,    2,    1,    8,    7,    6,
    5,    0xc,  0xb,  0xa,  9,    0xe,  0xd,  0,    0,    0x18, 0x17, 0x16, 0x15, 0x14, 0x13,
    0x12, 0x11, 0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21, 0,    0,    0x10, 0,    0,
    0,    0,    0,    0x38, 0x37, 0x36, 0x35, 0x34, 0x33, 0x32, 0x31, 0,    0,    0,    0};

static void frames_survive_the_wire(void **state)
{
    (void)state;
    uint8_t bytes[64];
    struct td_xfer_frame f = {.type = TD_XFER_DATA,
                              .slot = 0x01020304,
                              .generation = 0x05060708,
                              .op = 0x090a0b0c,
                              .attempt = 0x0d0e,
                              .handle = 0x1112131415161718,
                              .offset = 0x2122232425262728,
                              .length = 0x00100000,
                              .conn = 0x3132333435363738},
                         back;
    td_xfer_frame_encode(&f, bytes);
    assert_memory_equal(bytes, golden_frame, sizeof golden_frame);
    assert_int_equal(td_xfer_frame_decode(bytes, &back, NULL), TD_OK);
    assert_memory_equal(&back, &f, sizeof f);
    for (int i = 0; i < 64 * 8; i++) {
        bytes[i / 8] ^= (uint8_t)(1 << i % 8);
        assert_int_equal(td_xfer_frame_decode(bytes, &back, NULL), TD_ERR_CORRUPT);
        bytes[i / 8] ^= (uint8_t)(1 << i % 8);
    }
}

static void frames_of_the_secret_have_their_lengths(void **state)
{
    (void)state;
    struct td_xfer_frame back;
    /* golden: the frames of the cluster secret, their numbers and their lengths, and no others */
    static const uint8_t secret_frames[][2] = {{1, 112}, {1, 144}, {2, 112},
                                               {2, 144}, {21, 32}, {22, 32}};
    for (int type = 1; type < 23; type++)
        for (int length = 0; type != 5 && length < 200; length++) {
            bool good = false, is_one = type == 1 || type == 2 || type > 20;
            for (size_t i = 0; i < sizeof secret_frames / sizeof secret_frames[0]; i++)
                good |= secret_frames[i][0] == type && secret_frames[i][1] == length;
            struct td_xfer_frame s = {.type = (uint8_t)type, .length = (uint32_t)length};
            uint8_t encoded[64];
            td_xfer_frame_encode(&s, encoded);
            if (is_one)
                assert_int_equal(td_xfer_frame_decode(encoded, &back, NULL),
                                 good ? TD_OK : TD_ERR_CORRUPT);
        }
}

/* A blob whose bytes have changed says so by its CRC, unless that is made anew. */
static void seal_grant(uint8_t *blob, size_t n)
{
    memset(blob + 8, 0, 4);
    uint32_t crc = td_crc32c(0, blob, n);
    memcpy(blob + 8, &crc, 4);
}

/* Another build's version, all else right: said in a sentence that names both, because it is what
 * an operator meets in a half-done upgrade. */
static void check_other_version(int version)
{
    uint8_t bytes[64], blob[sizeof(struct td_xfer_grant_blob)];
    char frame_says[80], grant_says[80];
    struct td_err err = {0};
    struct td_xfer_frame back;
    memcpy(bytes, golden_frame, sizeof golden_frame);
    bytes[4] = (uint8_t)version;
    uint32_t crc = td_crc32c(0, bytes, 60);
    memcpy(bytes + 60, &crc, 4);
    snprintf(frame_says, sizeof frame_says, "frame: version is %d, this side speaks 4", version);
    assert_int_equal(td_xfer_frame_decode(bytes, &back, &err), TD_ERR_CORRUPT);
    assert_string_equal(err.msg, frame_says);
    struct td_xfer_grant_blob g = {.n_blocks = 3,
                                   .block_bytes = 4096,
                                   .port = 7,
                                   .host = "127.0.0.1",
                                   .instance = "decode-0"},
                              none;
    td_xfer_grant_encode(&g, blob);
    blob[4] = (uint8_t)version; /* a u16 */
    seal_grant(blob, sizeof blob);
    snprintf(grant_says, sizeof grant_says, "grant: version is %d, this side speaks 4", version);
    assert_int_equal(td_xfer_grant_decode(blob, sizeof blob, &none, &err), TD_ERR_UNSUPPORTED);
    assert_string_equal(err.msg, grant_says);
    blob[4] = 4; /* and nothing but the version was wrong */
    seal_grant(blob, sizeof blob);
    assert_int_equal(td_xfer_grant_decode(blob, sizeof blob, &none, &err), TD_OK);
}

static void other_versions_are_named(void **state)
{
    (void)state;
    check_other_version(3);
    check_other_version(5);
}

static void lengths_of_frames_are_checked(void **state)
{
    (void)state;
    uint8_t bytes[64];
    struct td_xfer_frame back;
    static const struct {
        uint8_t type;
        int16_t status;
        uint32_t length;
        bool ok;
    } lengths[] = {
        {TD_XFER_HELLO, 0, 112, true},
        {TD_XFER_HELLO, 0, 111, false},
        {TD_XFER_HELLO_ACK, -5, 20, true},
        {TD_XFER_HELLO_ACK, 0, 20, false},
        {TD_XFER_OPEN, 0, 16, true},
        {TD_XFER_OPEN, 0, 15, false},
        {TD_XFER_DATA, 0, 0, false},
        {TD_XFER_DATA, 0, 1u << 20, true},
        {TD_XFER_DATA, 0, (1u << 20) + 1, false},
        {TD_XFER_REF, 0, 4, false},
        {TD_XFER_REF, 0, 10, false},
        {TD_XFER_REF, 0, 4004, true},
        {TD_XFER_REF, 0, 4008, false},
        {TD_XFER_FINAL, 0, 1024, true},
        {TD_XFER_FINAL, 0, 1025, false},
        {TD_XFER_ABORT, -6, 161, false},
        {TD_XFER_PING, 0, 1, false},
        {TD_XFER_DONE, 0, 1, false},
        {TD_XFER_DEVICE_OFFER, 0, 288, true},
        {TD_XFER_DEVICE_OFFER, 0, 287, false},
        {TD_XFER_DEVICE_OFFER, 0, 2336, true},
        {TD_XFER_DEVICE_OFFER, 0, 2337, false},
        {TD_XFER_DEVICE_ACCEPT, 0, 0, true},
        {TD_XFER_DEVICE_ACCEPT, 0, 5, false},
        {TD_XFER_DEVICE_ACCEPT, -5, 20, true},
        {TD_XFER_LENT, 0, 8, true},
        {TD_XFER_LENT, 0, 7, false},
        {TD_XFER_TAKEN, 0, 0, true},
        {TD_XFER_TAKEN, 0, 1, false},
        {0, 0, 0, false},
        {TD_XFER_N_TYPES, 0, 0, false},
        {TD_XFER_PING, 1, 0, false},
    };
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        struct td_xfer_frame g = {
            .type = lengths[i].type, .status = lengths[i].status, .length = lengths[i].length};
        td_xfer_frame_encode(&g, bytes);
        if ((td_xfer_frame_decode(bytes, &back, NULL) == TD_OK) != lengths[i].ok)
            fail_msg("case %zu", i);
    }
}

static void stamps_of_frames_are_checked(void **state)
{
    (void)state;
    uint8_t bytes[64];
    struct td_xfer_frame back;
    static const struct {
        uint8_t type;
        uint32_t clock_us, last_us;
        bool ok;
    } stamps[] = {
        {TD_XFER_FINAL, 9, 9, true}, {TD_XFER_FINAL, UINT32_MAX, 0, true},
        {TD_XFER_PING, 1, 0, true},  {TD_XFER_PING, 1, 1, false},
        {TD_XFER_DONE, 1, 0, false},
    };
    for (size_t i = 0; i < sizeof stamps / sizeof stamps[0]; i++) {
        struct td_xfer_frame g = {
            .type = stamps[i].type, .clock_us = stamps[i].clock_us, .last_us = stamps[i].last_us};
        td_xfer_frame_encode(&g, bytes);
        if ((td_xfer_frame_decode(bytes, &back, NULL) == TD_OK) != stamps[i].ok)
            fail_msg("stamps %zu", i);
    }
}

static void flags_of_frames_are_checked(void **state)
{
    (void)state;
    uint8_t bytes[64];
    struct td_xfer_frame back;
    static const struct {
        uint8_t type;
        uint16_t flags;
        bool ok;
    } flags[] = {
        {TD_XFER_ABORT, TD_XFER_ABORT_UNRETIRED, true},
        {TD_XFER_ABORT, 2, false},
        {TD_XFER_ABORT, 3, false},
        {TD_XFER_FINAL, 0xffff, true},
        {TD_XFER_PING, 1, false},
        {TD_XFER_BYE, 1, false},
    };
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++) {
        struct td_xfer_frame g = {.type = flags[i].type, .flags = flags[i].flags};
        td_xfer_frame_encode(&g, bytes);
        if ((td_xfer_frame_decode(bytes, &back, NULL) == TD_OK) != flags[i].ok)
            fail_msg("flags %zu", i);
    }
}

static void grants_survive_the_wire(void **state)
{
    (void)state;
    uint8_t blob[sizeof(struct td_xfer_grant_blob)];
    struct td_xfer_grant_blob grant = {.n_blocks = 3,
                                       .block_bytes = 4096,
                                       .port = 7,
                                       .host = "127.0.0.1",
                                       .instance = "decode-0"},
                              other;
    td_xfer_grant_encode(&grant, blob);
    assert_int_equal(td_xfer_grant_decode(blob, sizeof blob, &other, NULL), TD_OK);
    assert_string_equal(other.instance, "decode-0");
    static const struct {
        const char *what;
        size_t offset;
        uint64_t value;
        size_t n;
    } bad[] = {
        {"n_blocks", offsetof(struct td_xfer_grant_blob, n_blocks), 8193, 4},
        {"n_blocks", offsetof(struct td_xfer_grant_blob, n_blocks), 0xffffffff, 4},
        {"block_bytes", offsetof(struct td_xfer_grant_blob, block_bytes), 0, 8},
        {"block_bytes", offsetof(struct td_xfer_grant_blob, block_bytes), 1ull << 30, 8},
        {"path", offsetof(struct td_xfer_grant_blob, path), TD_XFER_N_PATHS, 1},
        {"device", offsetof(struct td_xfer_grant_blob, device), 2, 1},
        {"reserved", offsetof(struct td_xfer_grant_blob, reserved), 1, 1},
        {"host", offsetof(struct td_xfer_grant_blob, host), '\n', 1},
        {"no way", offsetof(struct td_xfer_grant_blob, port), 0, 2},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct td_xfer_grant_blob g = grant;
        memcpy((uint8_t *)&g + bad[i].offset, &bad[i].value, bad[i].n);
        td_xfer_grant_encode(&g, blob);
        struct td_err err = {0};
        if (td_xfer_grant_decode(blob, sizeof blob, &other, &err) == TD_OK)
            fail_msg("%s was taken", bad[i].what);
        if (!strstr(err.msg, bad[i].what)) fail_msg("%s: %s", bad[i].what, err.msg);
    }
}

int main(void)
{
    static enum td_xfer_path tcp = TD_XFER_PATH_TCP, shm = TD_XFER_PATH_SHM,
                             rdma = TD_XFER_PATH_RDMA, ipc = TD_XFER_PATH_CUDA_IPC;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frames_survive_the_wire),
        cmocka_unit_test(frames_of_the_secret_have_their_lengths),
        cmocka_unit_test(other_versions_are_named),
        cmocka_unit_test(lengths_of_frames_are_checked),
        cmocka_unit_test(stamps_of_frames_are_checked),
        cmocka_unit_test(flags_of_frames_are_checked),
        cmocka_unit_test(grants_survive_the_wire),
        cmocka_unit_test(limits_are_back_pressure),
        cmocka_unit_test_prestate(ready_waits_for_an_earlier_quarantine, &rdma),
        cmocka_unit_test_prestate(ready_waits_for_an_earlier_quarantine, &tcp),
        cmocka_unit_test_prestate(ready_waits_for_an_earlier_quarantine, &shm),
        cmocka_unit_test(what_the_kernel_holds_is_bounded),
        cmocka_unit_test(a_late_open_does_not_disturb_digests),
        cmocka_unit_test(final_goes_by_the_lane_of_its_data),
        cmocka_unit_test_prestate(turns_follow_the_ordering_key, &tcp),
        cmocka_unit_test_prestate(turns_follow_the_ordering_key, &shm),
        cmocka_unit_test_prestate(turns_follow_the_ordering_key, &rdma),
        cmocka_unit_test(giving_up_frees_nothing_early),
        cmocka_unit_test(parts_of_a_block_stay_on_its_lane),
        cmocka_unit_test(data_beyond_the_grant_is_refused),
        cmocka_unit_test(a_frame_is_of_one_binding),
        cmocka_unit_test(digests_are_a_sample),
        cmocka_unit_test(a_digest_waits_for_the_last_part),
        cmocka_unit_test_prestate(refs_that_are_wrong_are_refused, &shm),
        cmocka_unit_test_prestate(refs_that_are_wrong_are_refused, &rdma),
        cmocka_unit_test_prestate(refs_that_are_wrong_are_refused, &ipc),
        cmocka_unit_test(final_before_the_last_part_is_refused),
        cmocka_unit_test(a_second_op_on_a_grant_is_dropped),
        cmocka_unit_test(a_grant_that_was_used_before_fails_its_op),
        cmocka_unit_test_prestate(a_lost_verdict_is_asked_for_again, &tcp),
        cmocka_unit_test_prestate(a_lost_verdict_is_asked_for_again, &shm),
        cmocka_unit_test_prestate(times_are_of_both_sides, &tcp),
        cmocka_unit_test_prestate(times_are_of_both_sides, &shm),
        cmocka_unit_test_prestate(times_are_of_both_sides, &rdma),
        cmocka_unit_test(times_bear_any_clock),
        cmocka_unit_test_prestate(attempts_are_bounded_and_old_ones_are_refused, &tcp),
        cmocka_unit_test_prestate(attempts_are_bounded_and_old_ones_are_refused, &shm),
        cmocka_unit_test(slots_wait_longer_for_a_peer_that_lives),
        cmocka_unit_test_prestate(random_walks, &tcp),
        cmocka_unit_test_prestate(random_walks, &shm),
        cmocka_unit_test_prestate(random_walks, &rdma),
        cmocka_unit_test_prestate(random_walks, &ipc),
        cmocka_unit_test_prestate(every_order_of_events, &tcp),
        cmocka_unit_test_prestate(every_order_of_events, &shm),
        cmocka_unit_test_prestate(every_order_of_events, &rdma),
        cmocka_unit_test_prestate(every_order_of_events, &ipc),
        cmocka_unit_test_prestate(every_order_with_parts, &tcp),
        cmocka_unit_test_prestate(every_order_with_parts, &shm),
        cmocka_unit_test_prestate(every_order_with_parts, &rdma),
        cmocka_unit_test_prestate(every_order_with_parts, &ipc),
        cmocka_unit_test(writes_of_nics_are_flushed_before_anything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
