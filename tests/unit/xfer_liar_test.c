/* xfer_liar_test.c - peers that have set up real queue pairs, hold a real grant and lie. Each is
 * made by hand here: its own socket, device and queue pair, and no engine. The engine at the other
 * end must end that peer alone, say why, hand nothing on that was not proven, and keep nothing of
 * it; an honest transfer that is half way meanwhile arrives.
 *
 * Over the provider in memory; over libibverbs with TANDEM_XFER_REAL=RECEIVER,SENDER (device
 * names). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "common/transfer/rdma/select.h"
#include "common/transfer/rdma/verbs.h"
#include "common/transfer/wire.h"
#include "tests/unit/xfer_ask.h"

#define BLOCK_BYTES 8192
#define N_BLOCKS 64
#define TIMEOUT_MS 2000 /* what a peer that does not retire has */
#define WAIT_MS 20000
#define POISON 0xbad0ull
#define CELL 64

static char real_devices[2][64]; /* receiver, sender; "" = the fake */
static char fabric_path[96];

/* --- the honest ends -------------------------------------------------------------------------- */

static void honest_open(struct node *n, int sender, bool windows)
{
    struct node_command c = {.verb = NODE_OPEN,
                             .path = TD_XFER_PATH_RDMA,
                             .max_slots = 4,
                             .max_ops = 4,
                             .timeout_ms = TIMEOUT_MS,
                             .block_bytes = BLOCK_BYTES,
                             .n_blocks = N_BLOCKS,
                             .layout_hash = 5,
                             /* as in xfer_test.c, and why */
                             .ib_timeout = real_devices[0][0] ? 20 : 12,
                             .ib_retry = 3,
                             .windows = windows};
    if (real_devices[0][0])
        snprintf(c.fabric, sizeof c.fabric, "real:%s", real_devices[sender]);
    else
        snprintf(c.fabric, sizeof c.fabric, "path=%s,retry_ms=20", fabric_path);
    struct node_reply reply = ask(n, &c);
    if (reply.status) fail_msg("open: %s", reply.msg);
}

static struct td_xfer_stats stats(struct node *n)
{
    struct node_command c = {.verb = NODE_STATS};
    return ask(n, &c).stats;
}

static void fill(struct node *n, int32_t first, int32_t count, uint64_t seed)
{
    struct node_command c = {.verb = NODE_FILL, .n = count, .seed = seed};
    for (int32_t i = 0; i < count; i++) c.ids[i] = first + i;
    ask(n, &c);
}

static bool holds(struct node *n, int32_t first, int32_t count, uint64_t seed)
{
    struct node_command c = {.verb = NODE_CHECK, .n = count, .seed = seed};
    for (int32_t i = 0; i < count; i++) c.ids[i] = first + i;
    return ask(n, &c).ok;
}

/* A grant of blocks [first, first + count). */
static struct node_reply grant(struct node *n, int32_t first, int32_t count, uint64_t ms)
{
    struct node_command c = {
        .verb = NODE_GRANT, .n = count, .deadline_ms = ms, .user = (uint64_t)first};
    for (int32_t i = 0; i < count; i++) c.ids[i] = first + i;
    struct node_reply reply = ask(n, &c);
    if (reply.status) fail_msg("grant: %s", reply.msg);
    return reply;
}

static void take_back(struct node *n, uint32_t slot)
{
    struct node_command c = {.verb = NODE_REVOKE, .id = slot};
    ask(n, &c);
}

static uint32_t op_start(struct node *n, const struct node_reply *g)
{
    struct node_command c = {.verb = NODE_OP, .deadline_ms = WAIT_MS, .blob_bytes = g->blob_bytes};
    memcpy(c.blob, g->blob, g->blob_bytes);
    struct node_reply reply = ask(n, &c);
    if (reply.status) fail_msg("op: %s", reply.msg);
    return reply.id;
}

static void submit(struct node *n, uint32_t op, int32_t first_source, int32_t first, int32_t count,
                   bool final)
{
    struct node_command c = {
        .verb = NODE_SUBMIT, .id = op, .first = first, .n = count, .final = final};
    for (int32_t i = 0; i < count; i++) c.ids[i] = first_source + i;
    assert_int_equal(ask(n, &c).status, TD_OK);
}

#define WAIT_FOR(what)                                                                             \
    do {                                                                                           \
        uint64_t until_ = td_deadline_after_ms(td_now_ns(), WAIT_MS);                              \
        while (!(what)) {                                                                          \
            if (td_now_ns() > until_)                                                              \
                fail_msg("%s:%d: not within %d ms: %s", __FILE__, __LINE__, WAIT_MS, #what);       \
            poll(NULL, 0, 1);                                                                      \
        }                                                                                          \
    } while (0)

/* --- a peer by hand --------------------------------------------------------------------------- */

struct liar {
    struct td_fake_fabric *fabric; /* NULL: libibverbs */
    const struct td_verbs *vb;
    struct td_vb_device *device;
    struct td_vb_cq *cq;
    struct td_vb_mr *mr;
    struct td_vb_qp *qp;
    struct td_rdma_plan plan;
    struct td_vb_port port;
    struct td_vb_gid gid;
    uint8_t *memory; /* 16 probe cells, then N_BLOCKS blocks */
    uint32_t psn;
    int fd;
    uint64_t tag, n_posted;
    struct td_xfer_rdma_setup theirs;
    struct td_xfer_grant_blob g;
    struct td_xfer_run run; /* the first that TARGETS told, */
    uint32_t key;           /* and where its bytes may go */
};

static void liar_device(struct liar *l, int sender)
{
    struct td_err err = {0};
    const char *name = "fake0";
    memset(l, 0, sizeof *l);
    l->fd = -1;
    if (real_devices[0][0]) {
        if (td_verbs_load(&l->vb, &err)) fail_msg("%s", err.msg);
        name = real_devices[sender];
    } else {
        struct td_fake_options o;
        char text[160], path[256];
        snprintf(text, sizeof text, "path=%s,retry_ms=20", fabric_path);
        assert_int_equal(td_fake_options_parse(text, &o, path, &err), TD_OK);
        o.path = path;
        if (td_fake_fabric_open(&o, &l->fabric, &err)) fail_msg("%s", err.msg);
        l->vb = td_fake_verbs(l->fabric);
    }
    static struct td_vb_gid gids[TD_RDMA_GIDS_MAX];
    static uint32_t order[TD_RDMA_GIDS_MAX];
    uint32_t n = 0;
    struct td_vb_limits limits;
    assert_int_equal(l->vb->open(l->vb, name, &l->device), 0);
    assert_int_equal(l->vb->query(l->device, &limits), 0);
    assert_int_equal(l->vb->query_port(l->device, 1, &l->port), 0);
    if (td_rdma_plan(name, &limits, &l->port, &l->plan, &err)) fail_msg("%s", err.msg);
    struct td_rdma_gid_ask ask_gid = {
        .device = name, .ethernet = l->port.ethernet, .gids = gids, .index = TD_RDMA_AUTO};
    for (uint32_t i = 0; i < l->port.n_gids && ask_gid.n_gids < 32; i++)
        if (l->vb->query_gid(l->device, 1, i, &gids[ask_gid.n_gids]) == 0) ask_gid.n_gids++;
    if (td_rdma_gid_rank(&ask_gid, order, &n, &err)) fail_msg("%s", err.msg);
    l->gid = gids[order[0]];
    size_t bytes = TD_XFER_QPS_MAX * CELL + (size_t)N_BLOCKS * BLOCK_BYTES;
    l->memory = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
    memset(l->memory, 0x66, bytes);
    struct td_vb_qp_caps caps = {.send_wr = 64, .recv_wr = 64, .send_sge = 1};
    assert_int_equal(l->vb->cq_create(l->device, 256, &l->cq), 0);
    assert_int_equal(
        l->vb->reg(l->device, l->memory, bytes, TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE, &l->mr), 0);
    assert_int_equal(l->vb->qp_create(l->device, l->cq, &caps, &l->qp), 0);
    assert_int_equal(l->vb->qp_init(l->qp, 1, 0, TD_VB_REMOTE_WRITE), 0);
    assert_int_equal(l->vb->post_recv(l->qp, UINT64_MAX, 64), 0);
    l->psn = (uint32_t)td_random_u64() & 0xffffff;
}

static void liar_close(struct liar *l)
{
    if (l->fd >= 0) close(l->fd);
    l->vb->qp_destroy(l->qp);
    l->vb->dereg(l->mr);
    l->vb->cq_destroy(l->cq);
    l->vb->close(l->device);
    td_fake_fabric_close(l->fabric);
    free(l->memory);
}

static void say(struct liar *l, struct td_xfer_frame f, const void *payload)
{
    uint8_t bytes[64 + TD_XFER_PAYLOAD_MAX];
    f.conn = f.type == TD_XFER_HELLO || f.type == TD_XFER_HELLO_ACK ? 0 : l->tag;
    td_xfer_frame_encode(&f, bytes);
    if (f.length) memcpy(bytes + 64, payload, f.length);
    send(l->fd, bytes, 64 + f.length, MSG_NOSIGNAL);
}

/* The next frame that is no PING; false: the other end has closed. */
static bool hear(struct liar *l, struct td_xfer_frame *f, uint8_t payload[TD_XFER_PAYLOAD_MAX + 1])
{
    uint8_t header[64];
    do {
        if (recv(l->fd, header, sizeof header, MSG_WAITALL) != sizeof header) return false;
        assert_int_equal(td_xfer_frame_decode(header, f, NULL), TD_OK);
        if (f->length && recv(l->fd, payload, f->length, MSG_WAITALL) != (ssize_t)f->length)
            return false;
        payload[f->length] = 0;
    } while (f->type == TD_XFER_PING);
    return true;
}

static struct td_xfer_frame expect_frame(struct liar *l, enum td_xfer_frame_type type,
                                         uint8_t payload[TD_XFER_PAYLOAD_MAX + 1])
{
    struct td_xfer_frame f = {0};
    if (!hear(l, &f, payload)) fail_msg("closed, and not frame type %d", (int)type);
    if (f.type != type || f.status)
        fail_msg("frame type %d, status %d: %.160s", f.type, f.status,
                 f.length ? (char *)payload : "");
    return f;
}

/* Posts one request and waits for its completion. */
static enum td_vb_wc_status post(struct liar *l, struct td_vb_send *w)
{
    uint32_t n;
    struct td_vb_wc wc;
    w->id = ++l->n_posted;
    w->signaled = true;
    assert_int_equal(l->vb->post_send(l->qp, w, 1, &n), 0);
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS); td_now_ns() < until;) {
        int k = l->vb->poll(l->cq, &wc, 1);
        assert_true(k >= 0);
        if (k && wc.id == l->n_posted) return wc.status;
        if (!k) poll(NULL, 0, 1);
    }
    fail_msg("request %llu does not complete", (unsigned long long)l->n_posted);
    return TD_VB_WC_GENERAL;
}

/* A WRITE of grant block content `seed` to pool block `block` of the receiver. */
static enum td_vb_wc_status write_block(struct liar *l, int32_t block, uint64_t seed)
{
    uint8_t *from = l->memory + TD_XFER_QPS_MAX * CELL;
    node_fill_bytes(from, BLOCK_BYTES, seed);
    struct td_vb_send w = {.op = TD_VB_WRITE,
                           .n_sge = 1,
                           .remote_addr = l->theirs.base + (uint64_t)block * BLOCK_BYTES,
                           .rkey = l->key};
    w.sge[0] = (struct td_vb_sge){
        .addr = (uint64_t)(uintptr_t)from, .bytes = BLOCK_BYTES, .lkey = l->mr->lkey};
    return post(l, &w);
}

static enum td_vb_wc_status word(struct liar *l, uint32_t imm)
{
    struct td_vb_send w = {.op = TD_VB_WRITE_IMM,
                           .imm = imm,
                           .remote_addr = l->theirs.base,
                           .rkey = l->theirs.rkey[0]};
    return post(l, &w);
}

static void wait_probe(struct liar *l)
{
    struct td_vb_wc wc;
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS); td_now_ns() < until;) {
        int k = l->vb->poll(l->cq, &wc, 1);
        assert_true(k >= 0);
        if (k && wc.id == UINT64_MAX) {
            assert_int_equal(wc.status, TD_VB_WC_SUCCESS);
            assert_int_equal(wc.imm & 0xf, TD_XFER_IMM_PROBE);
            return;
        }
        if (!k) poll(NULL, 0, 1);
    }
    fail_msg("no probe came");
}

static struct td_xfer_rdma_setup my_setup(const struct liar *l)
{
    struct td_xfer_rdma_setup s = {.n_rails = 1,
                                   .n_qps = 1,
                                   .rd_atomic_in = 1,
                                   .rd_atomic_out = 1,
                                   .recv_wr = 16,
                                   .probe = (uint64_t)(uintptr_t)l->memory,
                                   .probe_rkey = {l->mr->rkey},
                                   .base = (uint64_t)(uintptr_t)l->memory + TD_XFER_QPS_MAX * CELL};
    s.rail[0] = (struct td_xfer_rail){.ethernet = l->port.ethernet,
                                      .lid = l->port.lid,
                                      .mtu_bytes = l->port.mtu_bytes,
                                      .qpn = {l->qp->num},
                                      .psn = {l->psn}};
    memcpy(s.rail[0].gid, l->gid.raw, sizeof l->gid.raw);
    return s;
}

static void connect_qp(struct liar *l)
{
    const struct td_xfer_rail *peer = &l->theirs.rail[0];
    struct td_vb_route route = {.port = 1,
                                .gid_index = l->gid.index,
                                .remote_lid = peer->lid,
                                .remote_qp = peer->qpn[0],
                                .remote_psn = peer->psn[0],
                                .local_psn = l->psn,
                                .timeout = 12,
                                .retry = 3,
                                .rnr_retry = 0};
    struct td_rdma_side ours = {.ethernet = l->port.ethernet,
                                .mtu_bytes = l->port.mtu_bytes,
                                .rd_atomic_in = 1,
                                .rd_atomic_out = 1};
    struct td_rdma_side theirs = {.ethernet = peer->ethernet,
                                  .mtu_bytes = peer->mtu_bytes,
                                  .rd_atomic_in = l->theirs.rd_atomic_in,
                                  .rd_atomic_out = l->theirs.rd_atomic_out};
    assert_int_equal(td_rdma_settle(&ours, &theirs, &route, NULL), TD_OK);
    memcpy(route.remote_gid, peer->gid, sizeof route.remote_gid);
    assert_int_equal(l->vb->qp_rtr(l->qp, &route), 0);
    assert_int_equal(l->vb->qp_rts(l->qp, &route), 0);
}

static void limit_waits(int fd)
{
    struct timeval limit = {.tv_sec = WAIT_MS / 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

/* The tcp connection of a sender, and its hello. */
static void liar_greets(struct liar *l)
{
    uint8_t payload[TD_XFER_PAYLOAD_MAX + 1];
    struct sockaddr_in a = {
        .sin_family = AF_INET, .sin_port = htons(l->g.port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    l->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    limit_waits(l->fd);
    assert_int_equal(connect(l->fd, (struct sockaddr *)&a, sizeof a), 0);
    struct td_xfer_hello hello = {.incarnation = 1,
                                  .layout_hash = 5,
                                  .block_bytes = BLOCK_BYTES,
                                  .nonce = td_random_u64() | 1,
                                  .instance = "liar"};
    uint64_t nonce = hello.nonce;
    say(l,
        (struct td_xfer_frame){
            .type = TD_XFER_HELLO, .length = sizeof hello, .slot = TD_XFER_PATH_RDMA},
        &hello);
    expect_frame(l, TD_XFER_HELLO_ACK, payload);
    memcpy(&hello, payload, sizeof hello);
    l->tag = hello.nonce ^ nonce;
}

/* Writes what only who knows the tag can say, for queue pair 0, and waits for the other side's. */
static void liar_probes(struct liar *l)
{
    uint64_t v = l->tag ^ 0x9e3779b97f4a7c15ull;
    for (int i = 0; i < CELL; i += 8) {
        v = (v ^ v >> 29) * 0xbf58476d1ce4e5b9ull;
        memcpy(l->memory + i, &v, 8);
    }
    struct td_vb_send w = {.op = TD_VB_WRITE,
                           .n_sge = 1,
                           .remote_addr = l->theirs.probe,
                           .rkey = l->theirs.probe_rkey[0]};
    w.sge[0] = (struct td_vb_sge){
        .addr = (uint64_t)(uintptr_t)l->memory, .bytes = CELL, .lkey = l->mr->lkey};
    assert_int_equal(post(l, &w), TD_VB_WC_SUCCESS);
    uint32_t n;
    w = (struct td_vb_send){.op = TD_VB_WRITE_IMM,
                            .imm = td_xfer_imm(0, 0, 0, TD_XFER_IMM_PROBE),
                            .id = ++l->n_posted,
                            .signaled = true};
    assert_int_equal(l->vb->post_send(l->qp, &w, 1, &n), 0);
    wait_probe(l);
}

/* A sender up to the point where it may write: it has shown the grant's key and was told where
 * the blocks are. */
static void liar_sends(struct liar *l, const struct node_reply *granted)
{
    struct td_xfer_frame f;
    uint8_t payload[TD_XFER_PAYLOAD_MAX + 1];
    liar_device(l, 1);
    assert_int_equal(td_xfer_grant_decode(granted->blob, granted->blob_bytes, &l->g, NULL), TD_OK);
    liar_greets(l);
    struct td_xfer_rdma_setup mine = my_setup(l);
    /* alive, and nothing more: it is no answer, and there is no queue pair yet */
    say(l, (struct td_xfer_frame){.type = TD_XFER_PING}, NULL);
    say(l, (struct td_xfer_frame){.type = TD_XFER_RDMA_OFFER, .length = TD_XFER_RDMA_SETUP_BYTES},
        &mine);
    f = expect_frame(l, TD_XFER_RDMA_ACCEPT, payload);
    assert_int_equal(td_xfer_rdma_setup_decode(payload, f.length, true, &l->theirs, NULL), TD_OK);
    connect_qp(l);
    liar_probes(l);
    say(l,
        (struct td_xfer_frame){.type = TD_XFER_OPEN,
                               .length = sizeof l->g.key,
                               .slot = l->g.slot,
                               .generation = l->g.generation,
                               .attempt = 1,
                               .handle = 77},
        l->g.key);
    f = expect_frame(l, TD_XFER_TARGETS, payload);
    memcpy(&l->run, payload, sizeof l->run);
    l->key = l->theirs.rkey[0];
    if (l->theirs.windows) memcpy(&l->key, payload + sizeof l->run, 4);
}

static void say_final(struct liar *l, uint16_t queue_pairs)
{
    say(l,
        (struct td_xfer_frame){.type = TD_XFER_FINAL,
                               .flags = queue_pairs,
                               .slot = l->g.slot,
                               .generation = l->g.generation,
                               .attempt = 1,
                               .handle = 77,
                               .offset = (uint64_t)l->g.n_blocks * BLOCK_BYTES},
        NULL);
}

/* Returns when all that was said on the socket so far has been heard: an OPEN of another op on
 * the slot is always answered. */
static void barrier(struct liar *l)
{
    struct td_xfer_frame f = {0};
    uint8_t payload[TD_XFER_PAYLOAD_MAX + 1];
    say(l,
        (struct td_xfer_frame){.type = TD_XFER_OPEN,
                               .length = sizeof l->g.key,
                               .slot = l->g.slot,
                               .generation = l->g.generation,
                               .attempt = 1,
                               .handle = 78},
        l->g.key);
    if (!hear(l, &f, payload)) fail_msg("closed");
    assert_int_equal(f.type, TD_XFER_FAIL);
    assert_int_equal(f.status, TD_ERR_STALE);
    assert_int_equal(f.handle, 78);
}

/* --- lying senders ---------------------------------------------------------------------------- */

enum lie {
    NO_WORD,
    ANOTHERS_WORD,
    OLD_WORD,
    FREED_WORD,
    WORD_OF_ANOTHER_PAIR,
    FINAL_OF_ANOTHER_PAIR,
    WRITE_BESIDE,
    READ_IT,
    N_LIES
};

static const char *const lies[N_LIES] = {
    [NO_WORD] = "FINAL without the words",
    [ANOTHERS_WORD] = "another slot's word",
    [OLD_WORD] = "a word of the generation before",
    [FREED_WORD] = "a word of a slot that is free",
    [WORD_OF_ANOTHER_PAIR] = "FINAL names a queue pair that there is not",
    [FINAL_OF_ANOTHER_PAIR] = "the word came on a queue pair that FINAL does not name",
    [WRITE_BESIDE] = "a write beside the grant",
    [READ_IT] = "a READ of the pool",
};

/* The honest two and one round of the game: an honest transfer stands in its middle, a liar has a
 * grant of its own, and there is one slot that is free again. */
struct round {
    enum lie lie;
    struct node *d, *p;
    struct node_reply honest, g, freed;
    uint32_t op;
    struct liar l;
    uint64_t n_stale; /* before the lie */
};

static bool is_tried(enum lie lie, bool windows)
{
    if (lie == WRITE_BESIDE && !windows)
        return false; /* README.md: who has the pool's keys can; digests find what they cover */
    if (lie == WRITE_BESIDE && !strncmp(real_devices[0], "rxe", 3)) {
        /* seen on Linux 6.1: the bounds that it checks are the registration's */
        print_message("%s: Soft-RoCE does not check the bounds of a window\n", lies[lie]);
        return false;
    }
    return true;
}

/* Blocks 0..3 are the liar's grant, 16..19 the honest sender's, everything else is nobody's. */
static void round_open(struct round *r)
{
    fill(r->d, 0, N_BLOCKS, POISON);
    fill(r->p, 0, 8, 1000 + r->lie);
    r->honest = grant(r->d, 16, 4, WAIT_MS);
    r->g = grant(r->d, 0, 4, WAIT_MS);
    r->freed = grant(r->d, 32, 1, WAIT_MS);
    take_back(r->d, r->freed.id);
    assert_int_equal(event(r->d).kind, TD_XFER_SLOT_FREE);
    r->op = op_start(r->p, &r->honest);
    uint64_t sent = stats(r->p).bytes_sent;
    submit(r->p, r->op, 0, 0, 2, false);
    WAIT_FOR(stats(r->p).bytes_sent == sent + 2 * BLOCK_BYTES);
    liar_sends(&r->l, &r->g);
    assert_int_equal(r->l.run.block, 0);
    assert_int_equal(r->l.run.n, 4);
    for (int32_t i = 0; i < 4 && r->lie != NO_WORD; i++)
        assert_int_equal(write_block(&r->l, i, 7000 + (uint64_t)i), TD_VB_WC_SUCCESS);
    r->n_stale = stats(r->d).n_stale_frames;
}

static void say_word(struct round *r, uint32_t slot, uint32_t generation)
{
    assert_int_equal(word(&r->l, td_xfer_imm(slot, generation, 1, TD_XFER_IMM_FINAL)),
                     TD_VB_WC_SUCCESS);
}

static void say_word_of(struct round *r, const struct node_reply *granted)
{
    struct td_xfer_grant_blob g;
    assert_int_equal(td_xfer_grant_decode(granted->blob, granted->blob_bytes, &g, NULL), TD_OK);
    say_word(r, g.slot, g.generation);
}

static void read_the_pool(struct liar *l)
{
    struct td_vb_send w = {
        .op = TD_VB_READ, .n_sge = 1, .remote_addr = l->theirs.base, .rkey = l->key};
    w.sge[0] = (struct td_vb_sge){
        .addr = (uint64_t)(uintptr_t)l->memory, .bytes = CELL, .lkey = l->mr->lkey};
    assert_true(post(l, &w) != TD_VB_WC_SUCCESS);
}

/* Tells the lie; whether it cuts the liar's connection. A word that belongs to nothing is counted
 * as stale. */
static bool tell(struct round *r)
{
    uint32_t slot = r->l.g.slot, generation = r->l.g.generation;
    bool stale = true;
    switch (r->lie) {
    case NO_WORD:
        say_final(&r->l, 1);
        stale = false;
        break;
    case ANOTHERS_WORD:
        say_word_of(r, &r->honest);
        say_final(&r->l, 1);
        break;
    case OLD_WORD:
        say_word(r, slot, generation - 1);
        say_final(&r->l, 1);
        break;
    case FREED_WORD:
        say_word_of(r, &r->freed);
        say_final(&r->l, 1);
        break;
    case WORD_OF_ANOTHER_PAIR: /* both words are counted before anything is ready */
        say_word(r, slot, generation);
        say_word(r, slot, generation); /* a stale one */
        say_final(&r->l, 3);
        break;
    case FINAL_OF_ANOTHER_PAIR:
        say_word(r, slot, generation);
        /* the second is a stale one, so the first is taken when it is */
        say_word(r, slot, generation);
        WAIT_FOR(stats(r->d).n_stale_frames > r->n_stale);
        say_final(&r->l, 2);
        return true;
    case WRITE_BESIDE:
        assert_int_equal(write_block(&r->l, 5, 9), TD_VB_WC_REM_ACCESS);
        return true;
    case READ_IT:
        read_the_pool(&r->l);
        return true;
    case N_LIES:
        break;
    }
    if (stale) WAIT_FOR(stats(r->d).n_stale_frames > r->n_stale);
    return false;
}

/* The liar's slot is never READY: it fails by a breach of the protocol, or by a connection that
 * ended and nobody who comes again. */
static void check_liar_fails(struct round *r, bool cut)
{
    const char *lie = lies[r->lie];
    if (!cut) { /* it has been heard, and the slot is where it was; then its connection ends */
        barrier(&r->l);
        struct node_command now = {.verb = NODE_EVENT, .deadline_ms = 0};
        struct node_reply told = ask(r->d, &now);
        if (told.ok)
            fail_msg("%s: event %d of slot %u: %s", lie, (int)told.event.kind, told.event.id,
                     told.event.reason);
        close(r->l.fd);
        r->l.fd = -1;
    }
    struct td_xfer_event e = event(r->d);
    if (e.kind != TD_XFER_SLOT_FAILED || e.id != r->g.id)
        fail_msg("%s: event %d of slot %u", lie, (int)e.kind, e.id);
    if (!e.reason[0]) fail_msg("%s: no reason", lie);
    assert_int_equal(e.status, TD_ERR_PEER);
    if (r->lie == FINAL_OF_ANOTHER_PAIR)
        assert_non_null(strstr(e.reason, "final before the last byte"));
    take_back(r->d, r->g.id);
}

/* The honest one was in the middle of it, and arrives. */
static void check_honest_arrives(struct round *r)
{
    submit(r->p, r->op, 2, 2, 2, true);
    bool is_free = false, ready = false;
    while (!is_free || !ready) {
        struct td_xfer_event e = event(r->d);
        if (e.kind == TD_XFER_SLOT_FREE && e.id == r->g.id)
            is_free = true;
        else if (e.kind == TD_XFER_SLOT_READY && e.id == r->honest.id)
            ready = true;
        else
            fail_msg("%s: event %d of slot %u: %s", lies[r->lie], (int)e.kind, e.id, e.reason);
    }
    assert_true(holds(r->d, 16, 4, 1000 + r->lie));
    assert_true(holds(r->d, 4, 12, POISON + 4)); /* no byte beside the grants */
    assert_true(holds(r->d, 20, N_BLOCKS - 20, POISON + 20));
    assert_int_equal(event(r->p).kind, TD_XFER_OP_DONE);
    take_back(r->d, r->honest.id);
    assert_int_equal(event(r->d).kind, TD_XFER_SLOT_FREE);
    liar_close(&r->l);
    WAIT_FOR(stats(r->d).n_conns == 1); /* the honest sender's */
    assert_int_equal(stats(r->d).n_slots_used, 0);
    assert_int_equal(stats(r->p).conns_by_path[TD_XFER_PATH_RDMA], 1);
}

static void lying_senders(bool windows)
{
    struct round r = {.d = node_local(), .p = node_local()};
    honest_open(r.d, 0, windows);
    honest_open(r.p, 1, false);
    for (r.lie = 0; r.lie < N_LIES; r.lie++) {
        if (!is_tried(r.lie, windows)) continue;
        round_open(&r);
        bool cut = tell(&r);
        check_liar_fails(&r, cut);
        check_honest_arrives(&r);
        print_message("%s: ended\n", lies[r.lie]);
    }
    node_free(r.p);
    node_free(r.d);
}

static void senders_that_lie_end_alone(void **state)
{
    (void)state;
    lying_senders(false);
}

static void windows_hold_senders_that_lie(void **state)
{
    (void)state;
    lying_senders(true);
}

/* --- lying receivers -------------------------------------------------------------------------- */

static const struct lying_targets {
    const char *what;
    int32_t block, n;
    uint64_t offset;
} lying_targets[] = {
    {"a block beyond the pool", N_BLOCKS, 1, 0},
    {"a run over its end", N_BLOCKS - 2, 4, 0},
    {"a negative block", -1, 2, 0},
    {"more blocks than were granted", 0, 5, 0},
    {"an empty run", 0, 0, 0},
    {"a gap", 0, 2, 1},
    {"a run of 2^31 blocks", 1, INT32_MAX, 0},
};

static int listen_somewhere(uint16_t *ret_port)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n_a = sizeof a;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    limit_waits(listener);
    assert_int_equal(bind(listener, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(listener, 8), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&a, &n_a), 0);
    *ret_port = ntohs(a.sin_port);
    return listener;
}

/* Starts an op on a grant that says the liar's port; the op's id. */
static uint32_t lure(struct liar *l, struct node *p, const struct node_reply *honest, uint16_t port)
{
    struct node_reply lying = *honest;
    assert_int_equal(td_xfer_grant_decode(honest->blob, honest->blob_bytes, &l->g, NULL), TD_OK);
    l->g.port = port;
    l->g.slot = 3;
    l->g.incarnation++;
    td_xfer_grant_encode(&l->g, lying.blob);
    uint32_t op = op_start(p, &lying);
    submit(p, op, 4, 0, 4, true);
    return op;
}

/* The sender that was lured shakes hands and connects its queue pair; its OPEN is returned. */
static struct td_xfer_frame liar_receives(struct liar *l, int listener)
{
    struct td_xfer_hello hello;
    uint8_t payload[TD_XFER_PAYLOAD_MAX + 1];
    l->fd = accept(listener, NULL, NULL);
    assert_true(l->fd >= 0);
    limit_waits(l->fd);
    expect_frame(l, TD_XFER_HELLO, payload);
    memcpy(&hello, payload, sizeof hello);
    l->tag = hello.nonce ^ 99;
    hello.incarnation = l->g.incarnation;
    hello.nonce = 99;
    say(l, (struct td_xfer_frame){.type = TD_XFER_HELLO_ACK, .length = sizeof hello}, &hello);
    struct td_xfer_frame f = expect_frame(l, TD_XFER_RDMA_OFFER, payload);
    assert_int_equal(td_xfer_rdma_setup_decode(payload, f.length, false, &l->theirs, NULL), TD_OK);
    connect_qp(l);
    struct td_xfer_rdma_setup mine = my_setup(l);
    mine.region_bytes = (uint64_t)N_BLOCKS * BLOCK_BYTES;
    mine.n_regions = 1;
    mine.rkey[0] = l->mr->rkey;
    mine.rails = 1;
    /* alive: no answer to an offer */
    say(l, (struct td_xfer_frame){.type = TD_XFER_PING}, NULL);
    say(l,
        (struct td_xfer_frame){.type = TD_XFER_RDMA_ACCEPT, .length = TD_XFER_RDMA_SETUP_BYTES + 4},
        &mine);
    wait_probe(l);
    uint32_t n;
    struct td_vb_send w = {.op = TD_VB_WRITE_IMM,
                           .imm = td_xfer_imm(0, 0, 0, TD_XFER_IMM_PROBE),
                           .id = ++l->n_posted,
                           .signaled = true};
    assert_int_equal(l->vb->post_send(l->qp, &w, 1, &n), 0);
    return expect_frame(l, TD_XFER_OPEN, payload);
}

/* Its op fails, for what it was told, and not a byte was written to the liar. */
static void check_lured(struct liar *l, struct node *p, uint32_t op, const char *what)
{
    struct td_xfer_event e = event(p);
    if (e.kind != TD_XFER_OP_FAILED || e.id != op)
        fail_msg("%s: event %d of op %u: %s", what, (int)e.kind, e.id, e.reason);
    assert_int_equal(e.status, TD_ERR_PEER);
    if (!strstr(e.reason, "targets outside the pool or the grant"))
        fail_msg("%s: %s", what, e.reason);
    const uint8_t *pool = l->memory + TD_XFER_QPS_MAX * CELL;
    for (size_t at = 0; at < (size_t)N_BLOCKS * BLOCK_BYTES; at++)
        if (pool[at] != 0x66) fail_msg("%s: byte %zu was written", what, at);
}

static void receivers_that_lie_end_alone(void **state)
{
    (void)state;
    struct node *d = node_local(), *p = node_local();
    honest_open(d, 0, false);
    honest_open(p, 1, false);
    fill(p, 0, 8, 1);
    uint16_t port;
    int listener = listen_somewhere(&port);
    for (size_t i = 0; i < sizeof lying_targets / sizeof lying_targets[0]; i++) {
        const struct lying_targets *lie = &lying_targets[i];
        struct liar l;
        struct node_reply honest = grant(d, 16, 4, WAIT_MS);
        uint32_t op = op_start(p, &honest);
        submit(p, op, 0, 0, 2, false);
        liar_device(&l, 0);
        uint64_t n_bad = stats(p).n_bad_frames;
        uint32_t bad_op = lure(&l, p, &honest, port);
        struct td_xfer_frame f = liar_receives(&l, listener);
        struct td_xfer_run run = {lie->block, lie->n};
        say(&l,
            (struct td_xfer_frame){.type = TD_XFER_TARGETS,
                                   .slot = f.slot,
                                   .generation = f.generation,
                                   .op = f.op,
                                   .attempt = f.attempt,
                                   .handle = f.handle,
                                   .offset = lie->offset,
                                   .length = sizeof run},
            &run);
        check_lured(&l, p, bad_op, lie->what);
        assert_int_equal(stats(p).n_bad_frames, n_bad + 1);
        submit(p, op, 2, 2, 2, true);
        assert_int_equal(event(d).kind, TD_XFER_SLOT_READY);
        assert_true(holds(d, 16, 4, 1));
        assert_int_equal(event(p).kind, TD_XFER_OP_DONE);
        take_back(d, honest.id);
        assert_int_equal(event(d).kind, TD_XFER_SLOT_FREE);
        liar_close(&l);
        assert_int_equal(stats(p).n_ops_used, 0);
        WAIT_FOR(stats(p).n_conns == 1);
    }
    close(listener);
    node_free(p);
    node_free(d);
}

int main(int argc, char **argv)
{
    if (argc == 2) cmocka_set_test_filter(argv[1]);
    const char *real = getenv("TANDEM_XFER_REAL");
    if (real && sscanf(real, "%63[^,],%63s", real_devices[0], real_devices[1]) != 2) return 2;
    snprintf(fabric_path, sizeof fabric_path, "/dev/shm/tandem-xfer-liar-%d", (int)getpid());
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(senders_that_lie_end_alone),
        cmocka_unit_test(windows_hold_senders_that_lie),
        cmocka_unit_test(receivers_that_lie_end_alone),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(fabric_path);
    return failed;
}
