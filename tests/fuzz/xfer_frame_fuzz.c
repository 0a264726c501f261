/* xfer_frame_fuzz.c - a peer that says anything: the input is a stream of headers and payloads,
 * read the way a connection reads them, into the receiver's and the sender's core. Headers are
 * repaired as a real attacker would (magic, version, crc; sometimes the right slot, generation,
 * handle or key), so that the fuzzer gets behind them. The cores' own assertions are the oracle,
 * and: SLOT_READY only after the bytes of the whole grant were placed. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/transfer/protocol.h"

#define BLOCK_BYTES 96

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static uint64_t counter;

static uint64_t random_hook(void *ctx)
{
    (void)ctx;
    return ++counter * 0x9e3779b97f4a7c15ull;
}

static void send_hook(void *ctx, uint64_t conn, const struct td_xfer_frame *f, const void *payload)
{
    (void)ctx, (void)conn, (void)payload;
    TD_ASSERT(f->length <= TD_XFER_PAYLOAD_MAX);
}

static void handle_hook(void *ctx, uint32_t op, uint64_t handle)
{
    (void)ctx, (void)op, (void)handle;
}

static void check_events(struct td_xfer_core *c, const uint64_t *placed)
{
    struct td_xfer_event e;
    while (td_xfer_core_poll(c, &e, 1)) {
        TD_ASSERT(e.note_bytes <= TD_XFER_NOTE_MAX &&
                  strnlen(e.reason, sizeof e.reason) < sizeof e.reason);
        if (e.kind == TD_XFER_SLOT_READY)
            TD_ASSERT(placed[e.id] >= e.bytes &&
                      e.bytes == (uint64_t)c->slots[e.id].n_blocks * BLOCK_BYTES);
        if (e.kind == TD_XFER_SLOT_READY || e.kind == TD_XFER_SLOT_FAILED)
            td_xfer_core_revoke(c, e.id, "seen");
    }
}

/* The core of both sides, with an op of its own and three grants of five blocks or none. */
struct play {
    struct td_xfer_core c;
    struct td_xfer_turns turns;
    uint64_t placed[4], now;
    uint32_t op;
    int32_t n_targets; /* blocks of the op's grant */
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
};

static void begin(struct play *p, size_t n_bytes)
{
    struct td_xfer_core_hooks hooks = {
        .random_u64 = random_hook, .send = send_hook, .op_handle = handle_hook};
    uint32_t slot;
    int32_t ids[5] = {0, 1, 2, 3, 4};
    counter = 0;
    memset(p->placed, 0, sizeof p->placed);
    p->turns = (struct td_xfer_turns){0};
    p->now = 1;
    TD_ASSERT(td_xfer_core_create(&p->c, 4, 2, 100, 0, &hooks, NULL) == TD_OK);
    td_xfer_core_mem(&p->c, BLOCK_BYTES, 8);
    for (int32_t i = 0; i < 3; i++)
        TD_ASSERT(td_xfer_core_grant(&p->c, ids, 5 * (i > 0), i == 2 ? 50 : TD_NEVER_NS, 0, &slot,
                                     NULL) == TD_OK);
    struct td_xfer_grant_blob grant = {.n_blocks = 2, .block_bytes = BLOCK_BYTES, .slot = 1};
    p->n_targets = (int32_t)grant.n_blocks;
    TD_ASSERT(td_xfer_core_op_start(&p->c, &grant, TD_NEVER_NS, 0, &p->op, NULL) == TD_OK);
    td_xfer_core_op_attach(&p->c, p->op, 1, n_bytes % 4 == 3 ? TD_XFER_PATH_RDMA : TD_XFER_PATH_TCP,
                           false);
    TD_ASSERT(td_xfer_core_submit(&p->c, p->now, p->op, 0, ids, 2, n_bytes % 2, NULL, 0) == TD_OK);
}

/* A header as it came, or one made valid of it; and then, as the bits of `repair` say, of a slot
 * that there is. */
static bool decode(struct play *p, uint8_t header[64], uint8_t repair, struct td_xfer_frame *ret_f)
{
    struct td_xfer_frame f;
    if (td_xfer_frame_decode(header, &f, NULL) != TD_OK) {
        memcpy(&f, header, sizeof f);
        f.flags = 0;
        if (f.type != TD_XFER_FINAL) f.clock_us = f.last_us = 0;
        if (f.status > 0) f.status = (int16_t)-f.status;
        td_xfer_frame_encode(&f, header);
        if (td_xfer_frame_decode(header, &f, NULL) != TD_OK) return false;
    }
    if (repair & 1) f.slot %= 4;
    if ((repair & 2) && f.slot < 4) f.generation = p->c.slots[f.slot].generation;
    if ((repair & 4) && f.slot < 4)
        f.handle = p->c.slots[f.slot].handle, f.attempt = p->c.slots[f.slot].attempt;
    if (f.type >= TD_XFER_DONE && (repair & 4))
        f.op = p->op, f.slot = 1, f.generation = 0, f.handle = p->c.ops[p->op].handle,
        f.attempt = p->c.ops[p->op].attempt;
    *ret_f = f;
    return true;
}

static void receive_targets(struct play *p, uint64_t conn, const struct td_xfer_frame *f,
                            uint32_t n_keys) /* with keys, or without */
{
    struct td_xfer_run runs[TD_XFER_RUNS_MAX];
    uint32_t keys[TD_XFER_PAYLOAD_MAX / 4];
    int32_t n, before = p->c.ops[p->op].nic.n_runs;
    if (td_xfer_targets_decode(p->payload, f->length, n_keys, runs, keys, &n) != TD_OK ||
        td_xfer_core_rx_targets(&p->c, conn, f, runs, n, 8, n_keys) != TD_OK || !n_keys)
        return;
    TD_ASSERT(p->c.ops[p->op].nic.n_runs == before + n &&
              p->c.ops[p->op].nic.n_runs <= p->c.ops[p->op].nic.n_targets &&
              p->c.ops[p->op].nic.n_targets <= p->n_targets);
}

static void receive_data(struct play *p, uint64_t conn, const struct td_xfer_frame *f,
                         uint8_t repair)
{
    if (td_xfer_core_rx_data(&p->c, conn, f) != TD_OK || !td_xfer_core_place_begin(&p->c, conn, f))
        return;
    if (repair & 0x80) td_xfer_core_revoke(&p->c, f->slot, "meanwhile");
    p->placed[f->slot] += f->length;
    td_xfer_core_place_end(&p->c, p->now, f->slot, f->length);
}

static void receive_ref(struct play *p, uint64_t conn, const struct td_xfer_frame *f)
{
    uint32_t first;
    int32_t refs[TD_XFER_REF_MAX];
    memcpy(&first, p->payload, 4);
    memcpy(refs, p->payload + 4, f->length - 4);
    td_xfer_core_rx_ref(&p->c, conn, f, first, refs, (int32_t)(f->length / 4 - 1), 8);
}

static void receive(struct play *p, const struct td_xfer_frame *f, uint8_t repair)
{
    uint64_t conn = 1 + (repair >> 4) % 3;
    enum td_xfer_path path = conn == 3 ? TD_XFER_PATH_SHM : TD_XFER_PATH_TCP;
    switch (f->type) {
    case TD_XFER_OPEN:
        if (td_xfer_core_rx_open(&p->c, conn, path, f, p->payload) == TD_OK &&
            p->c.slots[f->slot].conn == conn && p->c.slots[f->slot].handle == f->handle &&
            p->c.slots[f->slot].bytes_got == 0)
            p->placed[f->slot] = 0;
        break;
    case TD_XFER_DATA:
        receive_data(p, conn, f, repair);
        break;
    case TD_XFER_REF:
        receive_ref(p, conn, f);
        break;
    case TD_XFER_FINAL:
        td_xfer_core_rx_final(&p->c, p->now, f->last_us + repair, conn, f, p->payload);
        break;
    case TD_XFER_TARGETS:
        receive_targets(p, conn, f, repair >> 6);
        break;
    case TD_XFER_ABORT:
        td_xfer_core_rx_abort(&p->c, conn, f, "abort");
        break;
    case TD_XFER_DONE:
        td_xfer_core_rx_done(&p->c, p->now, conn, f);
        break;
    case TD_XFER_FAIL:
        td_xfer_core_rx_fail(&p->c, p->now, conn, f, "fail");
        break;
    case TD_XFER_PING:
        td_xfer_core_tick(&p->c, p->now += 10);
        break;
    case TD_XFER_MEM:
        td_xfer_core_conn_lost(&p->c, p->now, conn, TD_ERR_PEER, "lost",
                               repair & 8 ? TD_XFER_CUT : TD_XFER_LOST);
        break;
    default:
        break;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static struct play p;
    begin(&p, n_bytes);
    while (n_bytes >= 65) {
        struct td_xfer_frame f;
        uint8_t header[64], repair = data[0];
        memcpy(header, data + 1, 64);
        data += 65;
        n_bytes -= 65;
        if (!decode(&p, header, repair, &f)) continue;
        size_t have = f.length < n_bytes ? f.length : n_bytes;
        if (have > sizeof p.payload) have = sizeof p.payload;
        memset(p.payload, 0, sizeof p.payload);
        memcpy(p.payload, data, have);
        data += have;
        n_bytes -= have;
        if (f.type == TD_XFER_OPEN && (repair & 8) && f.slot < 4)
            memcpy(p.payload, p.c.slots[f.slot].key, TD_XFER_KEY_BYTES);
        receive(&p, &f, repair);
        struct td_xfer_copy copy;
        if (td_xfer_core_copy_next(&p.c, &p.turns, TD_XFER_BY_COPY, 250, 250, 2, &copy)) {
            p.placed[copy.slot] += copy.n_bytes;
            td_xfer_core_copy_end(&p.c, p.now, &copy, !(repair & 0x40));
        }
        check_events(&p.c, p.placed);
    }
    td_xfer_core_destroy(&p.c);
    return 0;
}
