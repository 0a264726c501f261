/* protocol.c - design.
 *
 * Slot (receiver), with the function that performs each transition:
 *
 *                 grant          rx_open                  place_end/rx_final: all bytes and FINAL
 *   FREE(g) ------------> ARMED(g+1) --------> FILLING ------------------------------------> READY
 *     ^                    |   ^  conn_lost(retry)|                                             |
 *     |                    |   +------------------+ (orphaned: waits a grace for attempt+1)    |
 *     |                    |                      |                                             |
 *     |                    +--- tick, rx_abort, conn_lost ---> FAILED                           |
 *     |                                                          |                              |
 *     |   poll takes SLOT_FREE                revoke             v           revoke             |
 *   RETIRED <------------------- REVOKING (while io) <--- from any of them <--------------------+
 *
 * Op (sender):
 *
 *          op_start         op_attach: OPEN        tx_next: FINAL             rx_done
 *   FREE ----------> WAIT_CONN ---------> STREAMING -----------> WAIT_VERDICT -----> ENDED(DONE)
 *     ^                  ^                    |                        |                 |
 *     |                  +-- conn_lost(retry): attempt + 1 ------------+                 |
 *     |                                                                                  |
 *     |   cancel, tick, rx_fail, conn_lost: from any, by way of STOPPING -> ENDED(FAILED) |
 *     |                                                                         |        |
 *     +-------------------- poll takes the terminal event ----------------------+--------+
 *
 * Holds (td_xfer_hold in protocol.h) say who may still touch the blocks of a slot or an op. READY,
 * RETIRED, ENDED and another attempt wait for them. What ends those that no *_end call does:
 *
 *   WRITER      FINAL and the last word of every queue pair, ABORT (which an op that is STOPPING
 *               says after its last completion), or the fence of this side's queue pairs
 *   QUARANTINE  begins with that fence. Between all bytes and READY lies VERIFYING meanwhile
 *   WINDOWS     the writer has retired; a writer that was told FAIL and says nothing for
 *               orphan_grace_ns loses them, and that is its retirement. Only RETIRED and another
 *               attempt wait for it
 *   FLUSH       a flush that began when nobody wrote into the slot any more
 *   READER      the op's DONE or FAIL, or the connection's end
 *
 * No hold of a connection is waited for without end: what is left of WRITER, WINDOWS and NIC some
 * RETIRE_GRACE after its slot was given up, and of NIC and READER after its op was, costs the
 * connection, whose end drops them all.
 *
 * Invariants, asserted: (1) a byte is counted only while slot, generation, attempt, handle and
 * connection are the bound ones; (2) READY needs n_blocks * block_bytes counted bytes and FINAL
 * of the bound attempt; (3) no READY, no SLOT_FREE and no op's end while a hold is left
 * (assert_unheld); (4) an op's handle is withdrawn before its terminal event; (5) events cannot
 * overflow: two per slot, one per op, and numbers return to FREE by poll only; (6) no READY, and
 * no digest is compared, before the quarantine of every earlier attempt's writer is over: its
 * last bytes could land in what the caller writes on into. */
#include "common/transfer/protocol.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/fault.h"
#include "common/base/min.h"
#include "common/base/table.h"

#define TURN_NONE UINT32_MAX
#define N_LISTS 7 /* of TD_XFER_MAX_BLOCKS entries, for each slot and each op */
/* orphan graces: a peer that is known to live dials again, but its machine may be busy */
#define PARTED_GRACE 2
/* orphan graces: a peer that lives and does not retire for so long is cut off */
#define RETIRE_GRACE 8

/* --- sets ------------------------------------------------------------------------------------- */

static void set_add(struct td_xfer_set *s, uint32_t id) { s->bits[id / 64] |= 1ull << id % 64; }

static void set_drop(struct td_xfer_set *s, uint32_t id) { s->bits[id / 64] &= ~(1ull << id % 64); }

/* The least member that is `from` or more; n: there is none. */
static uint32_t set_at(const struct td_xfer_set *s, uint32_t from)
{
    for (uint32_t i = from / 64; from < s->n; from = ++i * 64) {
        uint64_t bits = s->bits[i] >> from % 64;
        if (bits) return from + (uint32_t)__builtin_ctzll(bits);
    }
    return s->n;
}

/* All members once, those from `from` on first. Start with {.at = from}. */
struct round {
    uint32_t at;
    bool wrapped;
};

static bool round_next(const struct td_xfer_set *s, uint32_t from, struct round *r,
                       uint32_t *ret_id)
{
    uint32_t id = set_at(s, r->at);
    if (id == s->n && !r->wrapped) {
        r->wrapped = true;
        id = set_at(s, 0);
    }
    if (id >= (r->wrapped ? from : s->n)) return false;
    r->at = id + 1;
    *ret_id = id;
    return true;
}

static bool set_create(struct td_xfer_set *s, uint32_t n)
{
    *s = (struct td_xfer_set){.bits = calloc(n / 64 + 1, sizeof *s->bits), .n = n};
    return s->bits != NULL;
}

/* --- holds ---------------------------------------------------------------------------------- */

static void hold(struct td_xfer_holds *h, enum td_xfer_hold why)
{
    h->n++;
    h->of[why]++;
    h->reasons |= TD_HELD(why);
}

static void release(struct td_xfer_holds *h, enum td_xfer_hold why)
{
    TD_ASSERT(h->n && h->of[why]);
    h->n--;
    if (--h->of[why] == 0) h->reasons &= ~TD_HELD(why);
}

/* A hold that is there or not. */
static void hold_once(struct td_xfer_holds *h, enum td_xfer_hold why)
{
    if (!td_xfer_held(h, why)) hold(h, why);
}

/* Invariant 3, before an event that gives blocks to their owner. */
static void assert_unheld(const struct td_xfer_holds *h, uint32_t but)
{
    uint32_t n = 0;
    for (int why = 0; why < TD_N_HOLDS; why++) n += but & TD_HELD(why) ? h->of[why] : 0;
    TD_ASSERT(h->n == n);
}

/* --- events ----------------------------------------------------------------------------------- */

static void emit(struct td_xfer_core *c, enum td_xfer_event_kind kind, uint32_t id)
{
    TD_ASSERT(c->n_events < c->max_events); /* invariant 5 */
    uint32_t at = (c->event_head + c->n_events++) % c->max_events;
    c->events[at].kind = (uint32_t)kind;
    c->events[at].id = id;
    c->n_emitted++;
}

static void set_reason(char *to, const char *reason)
{
    snprintf(to, TD_XFER_REASON_MAX, "%s", reason ? reason : "");
}

static void due_by(struct td_xfer_core *c, uint64_t deadline_ns)
{
    if (deadline_ns < c->next_tick_ns) c->next_tick_ns = deadline_ns;
}

static void set_times(struct td_xfer_event *e, uint64_t first_ns, uint64_t last_ns, uint64_t at_ns)
{
    /* the caller's clock may be that of its turn's start */
    e->elapsed_ns = at_ns > first_ns ? at_ns - first_ns : 0;
    e->tail_ns = at_ns > last_ns ? at_ns - last_ns : 0;
    e->at_ns = at_ns;
}

size_t td_xfer_core_poll(struct td_xfer_core *c, struct td_xfer_event *events, size_t max)
{
    size_t n = 0;
    for (; n < max && c->n_events; n++) {
        struct td_xfer_event *e = &events[n];
        uint32_t id = c->events[c->event_head].id;
        *e = (struct td_xfer_event){.kind = (enum td_xfer_event_kind)c->events[c->event_head].kind,
                                    .id = id};
        c->event_head = (c->event_head + 1) % c->max_events;
        c->n_events--;
        if (e->kind == TD_XFER_OP_DONE || e->kind == TD_XFER_OP_FAILED) {
            struct td_xfer_op *op = &c->ops[id];
            TD_ASSERT(op->state == TD_OP_ENDED);
            e->user = op->user;
            e->path = op->path;
            e->status = op->status;
            e->bytes = (uint64_t)op->grant.n_blocks * c->block_bytes;
            if (e->kind == TD_XFER_OP_DONE) {
                set_times(e, op->times.first_ns, op->times.last_ns, op->times.end_ns);
                e->behind_bytes = op->sent.behind_bytes;
            }
            memcpy(e->reason, op->reason, sizeof e->reason);
            memset(op->grant.key, 0, sizeof op->grant.key);
            op->state = TD_OP_FREE;
            c->n_ops_used--;
            continue;
        }
        struct td_xfer_slot *slot = &c->slots[id];
        e->user = slot->user;
        e->path = slot->path;
        if (e->kind == TD_XFER_SLOT_READY) {
            e->bytes = slot->bytes_got;
            set_times(e, slot->times.first_ns, slot->times.last_ns, slot->times.end_ns);
            e->behind_bytes = slot->fetch.behind_bytes;
            e->note_bytes = slot->note.n_bytes;
            memcpy(e->note, slot->note.bytes, slot->note.n_bytes);
        } else {
            e->status = slot->status;
            memcpy(e->reason, slot->reason, sizeof e->reason);
        }
        if (e->kind == TD_XFER_SLOT_FREE) {
            TD_ASSERT(slot->state == TD_SLOT_RETIRED);
            slot->state = TD_SLOT_FREE;
            c->n_slots_used--;
        }
    }
    return n;
}

/* --- receiver --------------------------------------------------------------------------------- */

static struct td_xfer_frame frame_of(uint32_t type, uint32_t slot, uint32_t generation, uint32_t op,
                                     uint16_t attempt, uint64_t handle)
{
    return (struct td_xfer_frame){.type = (uint8_t)type,
                                  .slot = slot,
                                  .generation = generation,
                                  .op = op,
                                  .attempt = attempt,
                                  .handle = handle};
}

static void answer(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *to,
                   enum td_xfer_frame_type type, td_status status, const char *reason)
{
    struct td_xfer_frame f =
        frame_of(type, to->slot, to->generation, to->op, to->attempt, to->handle);
    f.status = (int16_t)status;
    f.length = reason ? (uint32_t)strlen(reason) : 0;
    c->hooks.send(c->hooks.ctx, conn, &f, reason);
}

/* A frame of the slot's bound attempt, to its sender. */
static struct td_xfer_frame slot_frame(const struct td_xfer_core *c, uint32_t id,
                                       enum td_xfer_frame_type type)
{
    const struct td_xfer_slot *s = &c->slots[id];
    return frame_of(type, id, s->generation, s->op, s->attempt, s->handle);
}

/* Tells the bound writer how its attempt ended; not before the last READ is over. */
static void slot_answer(struct td_xfer_core *c, uint32_t id, enum td_xfer_frame_type type,
                        td_status status, const char *reason)
{
    struct td_xfer_slot *s = &c->slots[id];
    struct td_xfer_frame to = slot_frame(c, id, type);
    to.status = (int16_t)status;
    if (s->conn && td_xfer_held(&s->holds, TD_HOLD_NIC)) {
        s->nic.owe_conn = s->conn;
        s->nic.owe = to;
    } else if (s->conn) {
        answer(c, s->conn, &to, type, status, reason);
    }
}

static void slot_unbind(struct td_xfer_slot *s)
{
    s->conn = 0;
    s->handle = 0;
}

/* It has not ended yet: it is READY, FAILED or revoked later. */
static bool slot_is_live(const struct td_xfer_slot *s)
{
    return s->state == TD_SLOT_ARMED || s->state == TD_SLOT_FILLING ||
           s->state == TD_SLOT_VERIFYING;
}

static bool is_written(const struct td_xfer_slot *s) /* by a NIC, or may be yet */
{
    return td_xfer_held(&s->holds, TD_HOLD_WRITER) || td_xfer_held(&s->holds, TD_HOLD_QUARANTINE);
}

/* Are bytes of NICs still on their way to the device? Then they are flushed: ask again. */
static bool slot_is_dirty(struct td_xfer_core *c, struct td_xfer_slot *s)
{
    bool dirty = td_xfer_held(&s->holds, TD_HOLD_FLUSH);
    if (dirty && s->nic.flush == TD_FLUSH_NONE) {
        s->nic.flush = TD_FLUSH_DUE;
        c->flush_due = true;
    }
    return dirty;
}

/* The slot is free when it was revoked and nobody touches its blocks any more. */
static void slot_check_retired(struct td_xfer_core *c, uint32_t id)
{
    struct td_xfer_slot *s = &c->slots[id];
    if (s->state != TD_SLOT_REVOKING || s->holds.reasons & ~TD_HELD(TD_HOLD_FLUSH)) return;
    if (slot_is_dirty(c, s)) return;
    assert_unheld(&s->holds, 0);
    s->state = TD_SLOT_RETIRED;
    emit(c, TD_XFER_SLOT_FREE, id);
}

/* The live writer has retired. One that was fenced before it may still be in its quarantine. */
static void slot_writer_retired(struct td_xfer_core *c, struct td_xfer_slot *s)
{
    release(&s->holds, TD_HOLD_WRITER);
    if (is_written(s)) due_by(c, s->nic.quarantine_ns);
}

static void slot_fail(struct td_xfer_core *c, uint32_t id, td_status status, const char *reason)
{
    struct td_xfer_slot *s = &c->slots[id];
    TD_ASSERT(slot_is_live(s));
    s->state = TD_SLOT_FAILED;
    if (td_xfer_held(&s->holds, TD_HOLD_WINDOWS))
        due_by(c, 1); /* the tick gives a writer that still lives its time to answer */
    s->status = status;
    set_reason(s->reason, reason);
    slot_unbind(s);
    c->stats.n_failed++;
    emit(c, TD_XFER_SLOT_FAILED, id);
}

/* This attempt is over; the next one must have come by until_ns, or the slot fails for `reason`. */
static void slot_orphaned(struct td_xfer_core *c, struct td_xfer_slot *s, uint64_t until_ns,
                          td_status status, const char *reason)
{
    s->state = TD_SLOT_ARMED;
    slot_unbind(s);
    s->status = status;
    set_reason(s->reason, reason);
    s->orphan_ns = until_ns;
    due_by(c, until_ns);
}

td_status td_xfer_core_grant(struct td_xfer_core *c, const int32_t *block_ids, int32_t n_blocks,
                             uint64_t deadline_ns, uint64_t user, uint32_t *ret_slot,
                             struct td_err *err)
{
    if (!c->block_bytes) return td_fail(err, TD_ERR_INVALID, "grant: no memory was added");
    if (n_blocks < 0 || n_blocks > TD_XFER_MAX_BLOCKS)
        return td_fail(err, TD_ERR_INVALID, "grant: n_blocks is %d, must be 0..%d", n_blocks,
                       TD_XFER_MAX_BLOCKS);
    for (int32_t i = 0; i < n_blocks; i++)
        if (block_ids[i] < 0 || block_ids[i] >= c->n_pool_blocks)
            return td_fail(err, TD_ERR_INVALID, "grant: block_ids[%d] is %d, must be 0..%d", i,
                           block_ids[i], c->n_pool_blocks - 1);
    if (c->n_slots_used == c->max_slots)
        return td_fail(err, TD_ERR_AGAIN, "grant: all %u slots are in use", c->max_slots);

    uint32_t id = c->slot_hint;
    while (c->slots[id].state != TD_SLOT_FREE) id = (id + 1) % c->max_slots;
    c->slot_hint = (id + 1) % c->max_slots;
    struct td_xfer_slot *s = &c->slots[id];
    struct td_xfer_slot fresh = {
        .state = TD_SLOT_ARMED,
        .generation = s->generation + 1,
        .user = user,
        .deadline_ns = deadline_ns,
        .orphan_ns = TD_NEVER_NS,
        .n_blocks = n_blocks,
        .dst = s->dst,
        .src = s->src,
        .got = s->got,
        .fetch = {.order = s->fetch.order, .told = s->fetch.told},
        .check = {.digest = s->check.digest},
    };
    uint64_t key[2] = {c->hooks.random_u64(c->hooks.ctx), c->hooks.random_u64(c->hooks.ctx)};
    memcpy(fresh.key, key, sizeof fresh.key);
    *s = fresh;
    if (n_blocks) memcpy(s->dst, block_ids, (size_t)n_blocks * sizeof *s->dst);
    c->n_slots_used++;
    due_by(c, deadline_ns);
    *ret_slot = id;
    return TD_OK;
}

void td_xfer_core_revoke(struct td_xfer_core *c, uint32_t id, const char *reason)
{
    if (id >= c->max_slots) return;
    struct td_xfer_slot *s = &c->slots[id];
    if (!slot_is_live(s) && s->state != TD_SLOT_READY && s->state != TD_SLOT_FAILED) return;
    if (slot_is_live(s)) { /* one that has failed keeps its own reason */
        s->status = TD_ERR_CANCELLED;
        set_reason(s->reason, reason);
        slot_answer(c, id, TD_XFER_FAIL, TD_ERR_CANCELLED, s->reason);
    }
    slot_unbind(s);
    s->state = TD_SLOT_REVOKING;
    td_fault_point("xfer_revoking");
    due_by(c, 1); /* the writer's time to retire is counted from the next tick */
    slot_check_retired(c, id);
}

/* NULL, or what another attempt of this slot has to wait for. */
static const char *why_not_yet(struct td_xfer_core *c, struct td_xfer_slot *s)
{
    /* its connection went after the last byte: the verdict is near */
    if (s->state == TD_SLOT_VERIFYING) return "the bytes are being verified";
    TD_ASSERT(!td_xfer_held(&s->holds, TD_HOLD_IO));
    if (td_xfer_held(&s->holds, TD_HOLD_DEVICE)) /* on top of what the next one brings */
        return "copies of an earlier attempt are under way";
    if (!is_written(s) && slot_is_dirty(c, s))
        return "writes of an earlier attempt are on their way";
    /* its connection is not known to be dead yet, or its windows are just ending */
    if (td_xfer_held(&s->holds, TD_HOLD_WRITER) || td_xfer_held(&s->holds, TD_HOLD_WINDOWS))
        return "an earlier attempt may still write";
    return NULL;
}

/* The slot is this attempt's, from its first byte on. */
static void slot_bind(struct td_xfer_core *c, struct td_xfer_slot *s, uint64_t conn,
                      enum td_xfer_path path, const struct td_xfer_frame *f)
{
    s->state = TD_SLOT_FILLING;
    s->attempt = f->attempt;
    s->conn = conn;
    s->handle = f->handle;
    s->op = f->op;
    s->path = path;
    s->way = td_xfer_path_way(path);
    s->orphan_ns = TD_NEVER_NS;
    s->bytes_got = 0;
    s->nic.qps_want = s->nic.qps_got = 0;
    s->nic.n_targets = s->check.n = s->check.at = 0;
    if (s->way == TD_XFER_BY_NIC) {
        hold(&s->holds, TD_HOLD_WRITER);
        if (c->flush_writes) hold_once(&s->holds, TD_HOLD_FLUSH);
        s->nic.writer_conn = conn;
        s->nic.retire_ns = 0;
        s->nic.writer_handle = f->handle;
    }
    s->fetch = (struct td_xfer_fetch){.order = s->fetch.order, .told = s->fetch.told};
    s->final_seen = false;
    s->status = TD_OK; /* an earlier attempt's */
    s->reason[0] = 0;
    for (int32_t i = 0; i < s->n_blocks; i++) {
        s->got[i] = s->fetch.told[i] = 0;
        s->src[i] = -1;
    }
}

td_status td_xfer_core_rx_open(struct td_xfer_core *c, uint64_t conn, enum td_xfer_path path,
                               const struct td_xfer_frame *f, const uint8_t *key)
{
    if (f->slot >= c->max_slots || f->handle == 0 || f->attempt == 0) return TD_ERR_PEER;
    struct td_xfer_slot *s = &c->slots[f->slot];
    bool key_right = td_xfer_key_equal(key, s->key);
    if (f->generation != s->generation) {
        c->stats.n_stale_frames++;
        answer(c, conn, f, TD_XFER_FAIL, TD_ERR_STALE, "the grant is an old one");
        return TD_ERR_STALE;
    }
    if (!key_right) return TD_ERR_PEER;
    if (s->completed) {
        answer(c, conn, f, TD_XFER_DONE, TD_OK, NULL);
        return TD_OK;
    }
    /* from another lane, and perhaps when the others have brought all of it */
    bool is_bound = s->state == TD_SLOT_FILLING || s->state == TD_SLOT_VERIFYING;
    if (is_bound && s->conn == conn && s->handle == f->handle && s->attempt == f->attempt)
        return TD_OK;
    if (f->attempt <= s->attempt) {
        c->stats.n_stale_frames++;
        answer(c, conn, f, TD_XFER_FAIL, TD_ERR_STALE, "a later attempt has the slot");
        return TD_OK;
    }
    if (!slot_is_live(s)) {
        answer(c, conn, f, TD_XFER_FAIL, s->status ? s->status : TD_ERR_STALE,
               s->reason[0] ? s->reason : "the slot was given back");
        return TD_OK;
    }
    const char *wait = why_not_yet(c, s);
    if (wait)
        answer(c, conn, f, TD_XFER_FAIL, TD_ERR_AGAIN, wait);
    else
        slot_bind(c, s, conn, path, f);
    return TD_OK;
}

bool td_xfer_core_is_bound(const struct td_xfer_core *c, uint64_t conn,
                           const struct td_xfer_frame *f)
{
    if (f->slot >= c->max_slots) return false;
    const struct td_xfer_slot *s = &c->slots[f->slot];
    return s->state == TD_SLOT_FILLING && s->conn == conn && s->generation == f->generation &&
           s->attempt == f->attempt && s->handle == f->handle;
}

/* The slot that this frame is for; NULL, and counted: its attempt is not the bound one any more. */
static struct td_xfer_slot *bound_slot(struct td_xfer_core *c, uint64_t conn,
                                       const struct td_xfer_frame *f)
{
    if (td_xfer_core_is_bound(c, conn, f)) return &c->slots[f->slot];
    c->stats.n_stale_frames++;
    return NULL;
}

td_status td_xfer_core_rx_data(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f)
{
    struct td_xfer_slot *s = bound_slot(c, conn, f);
    if (!s) return TD_ERR_STALE;
    uint64_t total = (uint64_t)s->n_blocks * c->block_bytes;
    if (s->way != TD_XFER_BY_DATA || f->offset > total || f->length > total - f->offset)
        return TD_ERR_CORRUPT;
    /* Each byte once, each block from its start: a repeated or reordered frame within an attempt
     * would count bytes twice. The frame has its bytes to itself from here on. */
    uint64_t end = f->offset + f->length, each = c->block_bytes;
    for (uint64_t at = f->offset; at < end; at = (at / each + 1) * each)
        if (s->got[at / each] != at % each) return TD_ERR_CORRUPT;
    for (uint64_t at = f->offset; at < end; at = (at / each + 1) * each)
        s->got[at / each] = (uint32_t)td_min_u64(each, end - at / each * each);
    return TD_OK;
}

bool td_xfer_core_place_begin(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f)
{
    if (!td_xfer_core_is_bound(c, conn, f)) return false;
    TD_ASSERT(!td_xfer_held(&c->slots[f->slot].holds, TD_HOLD_IO));
    hold(&c->slots[f->slot].holds, TD_HOLD_IO);
    return true;
}

bool td_xfer_core_dma_begin(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f)
{
    if (!td_xfer_core_is_bound(c, conn, f)) return false;
    hold(&c->slots[f->slot].holds, TD_HOLD_DEVICE);
    return true;
}

static void slot_check_ready(struct td_xfer_core *c, uint64_t now_ns, uint32_t id)
{
    struct td_xfer_slot *s = &c->slots[id];
    uint64_t total = (uint64_t)s->n_blocks * c->block_bytes;
    if (s->state == TD_SLOT_FILLING) {
        if (!s->final_seen) return;
        if (s->way == TD_XFER_BY_NIC) {
            if (s->nic.qps_got != s->nic.qps_want ||
                s->bytes_got != (uint64_t)s->fetch.n_refs * c->block_bytes)
                return;
            uint64_t written = total - s->bytes_got; /* RC order: the last words came after it */
            s->bytes_got = total;
            c->stats.bytes_received += written;
            c->stats.bytes_by_path[s->path] += written;
        }
        if (s->bytes_got != total) return;
        if (td_xfer_held(&s->holds, TD_HOLD_WRITER))
            slot_writer_retired(c, s); /* that was all it had */
        s->state = TD_SLOT_VERIFYING;
        td_fault_point("xfer_verifying");
        set_add(&c->verifying, id);
    }
    if (s->state != TD_SLOT_VERIFYING) return;
    if (s->holds.reasons & ~(TD_HELD(TD_HOLD_FLUSH) | TD_HELD(TD_HOLD_WINDOWS))) return;
    if (slot_is_dirty(c, s) || s->check.at < s->check.n) return; /* invariant 6 */
    assert_unheld(&s->holds, TD_HELD(TD_HOLD_WINDOWS));
    s->state = TD_SLOT_READY;
    s->completed = true;
    s->times.end_ns = now_ns;
    slot_answer(c, id, TD_XFER_DONE, TD_OK, NULL);
    slot_unbind(s);
    c->stats.n_done++;
    emit(c, TD_XFER_SLOT_READY, id);
}

/* Ends a piece; false: the slot was taken away meanwhile, the bytes count for nothing. */
static bool slot_io_end(struct td_xfer_core *c, uint32_t id)
{
    struct td_xfer_slot *s = &c->slots[id];
    release(&s->holds, TD_HOLD_IO);
    slot_check_retired(c, id);
    return s->state == TD_SLOT_FILLING;
}

static void count_bytes(struct td_xfer_core *c, struct td_xfer_slot *s, size_t n_bytes)
{
    s->bytes_got += n_bytes;
    c->stats.bytes_received += n_bytes;
    c->stats.bytes_by_path[s->path] += n_bytes;
}

void td_xfer_core_place_end(struct td_xfer_core *c, uint64_t now_ns, uint32_t id, size_t n_bytes)
{
    if (!slot_io_end(c, id) || !n_bytes) return;
    count_bytes(c, &c->slots[id], n_bytes);
    slot_check_ready(c, now_ns, id);
}

void td_xfer_core_dma_end(struct td_xfer_core *c, uint64_t now_ns, uint32_t id, uint64_t conn,
                          uint64_t handle, uint64_t n_bytes, td_status status, const char *reason)
{
    struct td_xfer_slot *s = &c->slots[id];
    release(&s->holds, TD_HOLD_DEVICE);
    if (s->state == TD_SLOT_FILLING && s->conn == conn && s->handle == handle) {
        if (!status) {
            count_bytes(c, s, n_bytes);
            slot_check_ready(c, now_ns, id);
        } else if (status == TD_ERR_STALE) { /* what follows from the sender says why */
            s->fetch.parked = true;
            c->stats.n_stale_frames++;
        } else {
            slot_answer(c, id, TD_XFER_FAIL, status, reason);
            slot_fail(c, id, status, reason);
        }
    }
    slot_check_retired(c, id);
}

static bool is_copied(enum td_xfer_way way) /* by the receiver, from the sender's pool */
{
    return way == TD_XFER_BY_COPY || way == TD_XFER_BY_DEVICE;
}

td_status td_xfer_core_rx_ref(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f,
                              uint32_t first, const int32_t *ids, int32_t n,
                              int32_t n_source_blocks)
{
    struct td_xfer_slot *s = bound_slot(c, conn, f);
    if (!s) return TD_ERR_STALE;
    if ((!is_copied(s->way) && s->way != TD_XFER_BY_NIC) || s->final_seen || n < 1 ||
        first > (uint32_t)s->n_blocks || n > s->n_blocks - (int32_t)first)
        return TD_ERR_CORRUPT;
    /* Each byte once, from the block's start: named again it is the same source, and more. */
    if (f->offset < 1 || f->offset > c->block_bytes ||
        (f->offset != c->block_bytes && !is_copied(s->way)))
        return TD_ERR_CORRUPT;
    for (int32_t i = 0; i < n; i++) {
        int32_t b = (int32_t)first + i;
        if (ids[i] < 0 || ids[i] >= n_source_blocks ||
            (s->src[b] >= 0 && (s->src[b] != ids[i] || s->fetch.told[b] >= f->offset)))
            return TD_ERR_CORRUPT;
    }
    for (int32_t i = 0; i < n; i++) {
        int32_t b = (int32_t)first + i;
        if (s->src[b] < 0)
            s->fetch.order[s->fetch.n_refs++] = b;
        else if (s->fetch.at > s->fetch.n_told)
            s->fetch.at = s->fetch.n_told; /* it was passed by */
        s->src[b] = ids[i];
        s->fetch.bytes_told += f->offset - s->fetch.told[b];
        s->fetch.told[b] = (uint32_t)f->offset;
    }
    while (s->fetch.n_told < s->fetch.n_refs &&
           s->fetch.told[s->fetch.order[s->fetch.n_told]] == c->block_bytes)
        s->fetch.n_told++;
    set_add(&c->fetching, f->slot);
    return TD_OK;
}

static bool slot_has(const struct td_xfer_slot *s)
{
    return is_copied(s->way) ? s->fetch.bytes_begun < s->fetch.bytes_told
                             : s->fetch.at < s->fetch.n_refs;
}

/* Blocks of the slot wait to be copied, on any connection, or READ on this one. */
static bool slot_wants(const struct td_xfer_core *c, uint32_t id, enum td_xfer_way way,
                       uint64_t conn)
{
    const struct td_xfer_slot *s = &c->slots[id];
    return s->state == TD_SLOT_FILLING && s->way == way && slot_has(s) &&
           (is_copied(way) ? !s->fetch.parked : s->conn == conn);
}

static uint64_t slot_waiting_bytes(const struct td_xfer_core *c, const struct td_xfer_slot *s)
{
    if (is_copied(s->way)) return s->fetch.bytes_told - s->fetch.bytes_begun;
    return (uint64_t)(s->fetch.n_refs - s->fetch.at) * c->block_bytes - s->fetch.off;
}

/* A piece of the slot is begun: after the last one, what others still wait for is counted. */
static void slot_begun(struct td_xfer_core *c, uint32_t id)
{
    struct td_xfer_slot *s = &c->slots[id];
    if (s->fetch.n_refs < s->n_blocks || slot_waiting_bytes(c, s)) return;
    if (is_copied(s->way) && s->fetch.bytes_told < (uint64_t)s->n_blocks * c->block_bytes) return;
    uint32_t other;
    s->fetch.behind_bytes = 0;
    for (struct round r = {.at = 0}; round_next(&c->fetching, 0, &r, &other);) {
        const struct td_xfer_slot *o = &c->slots[other];
        if (other != id && o->state == TD_SLOT_FILLING && slot_has(o))
            s->fetch.behind_bytes += slot_waiting_bytes(c, o);
    }
}

/* Where to look first; see struct td_xfer_turns. */
static uint32_t slot_turn(struct td_xfer_core *c, const struct td_xfer_turns *t,
                          enum td_xfer_way way, uint64_t conn)
{
    uint32_t first = TURN_NONE, best = TURN_NONE, id;
    for (struct round r = {.at = t->next};
         t->by_key && c->n_slots_used > 1 && round_next(&c->fetching, t->next, &r, &id);) {
        const struct td_xfer_slot *s = &c->slots[id];
        if (s->state != TD_SLOT_FILLING || !slot_has(s)) set_drop(&c->fetching, id);
        if (!slot_wants(c, id, way, conn)) continue;
        if (first == TURN_NONE)
            first = best = id;
        else if (c->slots[id].priority < c->slots[best].priority)
            best = id;
    }
    return best == first ? t->next : best;
}

/* `id`, looked for from `from` on, was served: a turn by key leaves the round where it is. */
static void turn_over(struct td_xfer_turns *t, uint32_t from, uint32_t id, uint32_t n)
{
    if (from == t->next) t->next = (id + 1) % n;
    t->by_key = !t->by_key;
}

/* The next piece of a slot that wants one: of one block up to max_bytes, or whole neighbours. */
static void copy_of(struct td_xfer_core *c, uint32_t id, uint64_t max_bytes, uint64_t max_sum,
                    int32_t max_blocks, struct td_xfer_copy *copy)
{
    struct td_xfer_slot *s = &c->slots[id];
    while (s->got[s->fetch.order[s->fetch.at]] == s->fetch.told[s->fetch.order[s->fetch.at]])
        s->fetch.at++;
    int32_t block = s->fetch.order[s->fetch.at];
    uint64_t left = s->fetch.told[block] - s->got[block];
    *copy = (struct td_xfer_copy){.slot = id,
                                  .op = s->op,
                                  .conn = s->conn,
                                  .handle = s->handle,
                                  .grant_block = block,
                                  .n_blocks = 1,
                                  .offset = s->got[block],
                                  .n_bytes = td_min_u64(left, max_bytes)};
    s->got[block] += (uint32_t)copy->n_bytes;
    for (; copy->n_bytes == (uint64_t)copy->n_blocks * c->block_bytes &&
           copy->n_blocks < max_blocks && s->fetch.at + copy->n_blocks < s->fetch.n_refs;
         copy->n_blocks++) {
        int32_t next = s->fetch.order[s->fetch.at + copy->n_blocks];
        if (next != block + copy->n_blocks || s->got[next] ||
            s->fetch.told[next] != c->block_bytes || copy->n_bytes + c->block_bytes > max_sum)
            break;
        s->got[next] = s->fetch.told[next];
        copy->n_bytes += c->block_bytes;
    }
    s->fetch.bytes_begun += copy->n_bytes;
    slot_begun(c, id);
    if (!slot_has(s)) set_drop(&c->fetching, id);
}

uint32_t td_xfer_core_n_fetching(const struct td_xfer_core *c)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i <= c->fetching.n / 64; i++)
        n += (uint32_t)__builtin_popcountll(c->fetching.bits[i]);
    return n;
}

bool td_xfer_core_copy_next(struct td_xfer_core *c, struct td_xfer_turns *turns,
                            enum td_xfer_way way, size_t max_piece, size_t max_bytes,
                            int32_t max_blocks, struct td_xfer_copy *ret_copy)
{
    uint32_t from = slot_turn(c, turns, way, 0), id;
    for (struct round r = {.at = from}; round_next(&c->fetching, from, &r, &id);) {
        struct td_xfer_holds *holds = &c->slots[id].holds;
        if (!slot_wants(c, id, way, 0)) continue;
        TD_ASSERT(way != TD_XFER_BY_COPY || !td_xfer_held(holds, TD_HOLD_IO));
        hold(holds, way == TD_XFER_BY_COPY ? TD_HOLD_IO : TD_HOLD_DEVICE);
        copy_of(c, id, max_piece, max_bytes, max_blocks, ret_copy);
        turn_over(turns, from, id, c->max_slots);
        return true;
    }
    return false;
}

void td_xfer_core_copy_end(struct td_xfer_core *c, uint64_t now_ns, const struct td_xfer_copy *copy,
                           bool valid)
{
    struct td_xfer_slot *s = &c->slots[copy->slot];
    if (!slot_io_end(c, copy->slot)) return;
    TD_ASSERT(s->handle == copy->handle && s->conn == copy->conn);
    if (!valid) { /* the sender's ABORT, or the end of its connection, follows and says why */
        s->fetch.parked = true;
        c->stats.n_stale_frames++;
        return;
    }
    count_bytes(c, s, copy->n_bytes);
    slot_check_ready(c, now_ns, copy->slot);
}

/* A time by the sender's clock, by ours; neither in the future nor before this clock began. */
static uint64_t local_time(uint64_t now_ns, uint32_t clock_us, uint32_t then_us)
{
    uint32_t us = clock_us - then_us;
    uint64_t ns = us <= INT32_MAX ? us * TD_NS_PER_US : 0;
    return now_ns > ns ? now_ns - ns : 0;
}

td_status td_xfer_core_rx_final(struct td_xfer_core *c, uint64_t now_ns, uint32_t clock_us,
                                uint64_t conn, const struct td_xfer_frame *f, const uint8_t *note)
{
    struct td_xfer_slot *s = bound_slot(c, conn, f);
    if (!s) return TD_ERR_STALE;
    uint64_t total = (uint64_t)s->n_blocks * c->block_bytes;
    /* On tcp other lanes, and on rdma the queue pairs, may still be at work. */
    if (s->final_seen || f->offset != total || (is_copied(s->way) && s->fetch.bytes_told != total))
        return TD_ERR_CORRUPT;
    /* what is not READ was written by queue pairs */
    bool writes = s->way == TD_XFER_BY_NIC && s->fetch.n_refs < s->n_blocks;
    if ((f->flags != 0) != writes) return TD_ERR_CORRUPT;
    /* it cannot know where to write */
    if (writes && s->nic.n_targets != s->n_blocks) return TD_ERR_CORRUPT;
    if (s->nic.qps_got & ~(uint32_t)f->flags) return TD_ERR_CORRUPT;
    s->nic.qps_want = f->flags;
    s->final_seen = true;
    s->times.first_ns = local_time(now_ns, clock_us, f->clock_us);
    s->times.last_ns = local_time(now_ns, clock_us, f->last_us);
    s->note.n_bytes = f->length;
    memcpy(s->note.bytes, note, f->length);
    slot_check_ready(c, now_ns, f->slot);
    return TD_OK;
}

void td_xfer_core_rx_abort(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f,
                           const char *reason)
{
    struct td_xfer_slot *s = f->slot < c->max_slots ? &c->slots[f->slot] : NULL;
    bool retired = !(f->flags & TD_XFER_ABORT_UNRETIRED);
    if (s && retired && td_xfer_held(&s->holds, TD_HOLD_WRITER) && s->nic.writer_conn == conn &&
        s->generation == f->generation && s->nic.writer_handle == f->handle) {
        slot_writer_retired(c, s); /* all its work requests have completed: that is the proof */
        slot_check_retired(c, f->slot);
    }
    s = bound_slot(c, conn, f);
    if (!s) return;
    char text[TD_XFER_REASON_MAX];
    snprintf(text, sizeof text, "sender: %.140s", reason);
    /* it waits for that */
    if (s->way == TD_XFER_BY_NIC && s->fetch.n_refs)
        slot_answer(c, f->slot, TD_XFER_FAIL, TD_ERR_CANCELLED, "the sender aborted");
    slot_fail(c, f->slot, f->status ? (td_status)f->status : TD_ERR_CANCELLED, text);
}

bool td_xfer_core_rd_next(struct td_xfer_core *c, uint64_t conn, struct td_xfer_turns *turns,
                          const struct td_xfer_wr_limits *l, struct td_xfer_rd *rd)
{
    uint32_t from = slot_turn(c, turns, TD_XFER_BY_NIC, conn), id;
    for (struct round r = {.at = from}; round_next(&c->fetching, from, &r, &id);) {
        struct td_xfer_slot *s = &c->slots[id];
        if (!slot_wants(c, id, TD_XFER_BY_NIC, conn)) continue;
        int32_t block = s->fetch.order[s->fetch.at], n_pieces = 1;
        uint64_t left = c->block_bytes - s->fetch.off;
        *rd = (struct td_xfer_rd){.slot = id,
                                  .order_at = s->fetch.at,
                                  .n_blocks = 1,
                                  .src_block = s->src[block],
                                  .offset = s->fetch.off};
        rd->n_bytes = td_min_u64(left, l->max_bytes);
        for (; s->fetch.off == 0 && rd->n_bytes == (uint64_t)rd->n_blocks * c->block_bytes &&
               s->fetch.at + rd->n_blocks < s->fetch.n_refs;
             rd->n_blocks++) {
            int32_t next = s->fetch.order[s->fetch.at + rd->n_blocks],
                    before = s->fetch.order[s->fetch.at + rd->n_blocks - 1];
            bool apart = s->dst[next] != s->dst[before] + 1 || s->dst[next] % l->dst_region == 0;
            if (s->src[next] != s->src[before] + 1 || s->src[next] % l->src_region == 0 ||
                n_pieces + apart > l->max_pieces || rd->n_bytes + c->block_bytes > l->max_bytes)
                break;
            n_pieces += apart;
            rd->n_bytes += c->block_bytes;
        }
        if (rd->n_bytes == left || rd->n_blocks > 1) {
            s->fetch.at += rd->n_blocks;
            s->fetch.off = 0;
        } else {
            s->fetch.off += (uint32_t)rd->n_bytes;
        }
        hold(&s->holds, TD_HOLD_NIC);
        slot_begun(c, id);
        turn_over(turns, from, id, c->max_slots);
        return true;
    }
    return false;
}

void td_xfer_core_rd_done(struct td_xfer_core *c, uint64_t now_ns, uint32_t id, uint64_t n_bytes,
                          bool ok)
{
    struct td_xfer_slot *s = &c->slots[id];
    release(&s->holds, TD_HOLD_NIC);
    /* Reads of one attempt only are ever under way: another one is bound when they are over. */
    if (ok && s->state == TD_SLOT_FILLING) {
        count_bytes(c, s, n_bytes);
        c->stats.bytes_pulled += n_bytes;
        slot_check_ready(c, now_ns, id);
    }
    if (td_xfer_held(&s->holds, TD_HOLD_NIC)) return;
    if (s->nic.owe_conn)
        answer(c, s->nic.owe_conn, &s->nic.owe, TD_XFER_FAIL, s->nic.owe.status, s->reason);
    s->nic.owe_conn = 0;
    slot_check_retired(c, id);
}

bool td_xfer_core_slot_give_up(struct td_xfer_core *c, uint32_t id, td_status status,
                               const char *reason)
{
    struct td_xfer_slot *s = &c->slots[id];
    if (s->state != TD_SLOT_FILLING) return false;
    slot_answer(c, id, TD_XFER_FAIL, status, reason); /* owed until its READs are over */
    slot_fail(c, id, status, reason);
    return true;
}

td_status td_xfer_core_rx_digest(struct td_xfer_core *c, uint64_t conn,
                                 const struct td_xfer_frame *f,
                                 const struct td_xfer_digest *digests, int32_t n)
{
    struct td_xfer_slot *s = bound_slot(c, conn, f);
    if (!s) return TD_ERR_STALE;
    if (s->final_seen || n > s->n_blocks - s->check.n) return TD_ERR_CORRUPT;
    for (int32_t i = 0; i < n; i++)
        if (digests[i].block >= (uint32_t)s->n_blocks) return TD_ERR_CORRUPT;
    memcpy(s->check.digest + s->check.n, digests, (size_t)n * sizeof *digests);
    s->check.n += n;
    return TD_OK;
}

int32_t td_xfer_run_length(const int32_t *dst, int32_t n_blocks, int32_t at, int32_t region)
{
    int32_t n = 1;
    while (at + n < n_blocks && dst[at + n] == dst[at] + n && (!region || dst[at + n] % region))
        n++;
    return n;
}

bool td_xfer_core_targets_of(struct td_xfer_core *c, uint32_t id, int32_t max_runs, int32_t region,
                             struct td_xfer_tx *tx)
{
    struct td_xfer_slot *s = &c->slots[id];
    if (s->state != TD_SLOT_FILLING || s->way != TD_XFER_BY_NIC || s->nic.n_targets == s->n_blocks)
        return false;
    struct td_xfer_run run[TD_XFER_RUNS_MAX];
    int32_t n = 0, at = s->nic.n_targets;
    for (; n < max_runs && n < TD_XFER_RUNS_MAX && at < s->n_blocks; at += run[n++].n)
        run[n] = (struct td_xfer_run){.block = s->dst[at],
                                      .n = td_xfer_run_length(s->dst, s->n_blocks, at, region)};
    tx->frame = slot_frame(c, id, TD_XFER_TARGETS);
    tx->frame.offset = (uint64_t)s->nic.n_targets;
    tx->frame.length = (uint32_t)n * (uint32_t)sizeof run[0];
    memcpy(tx->payload, run, tx->frame.length);
    s->nic.n_targets = at;
    return true;
}

void td_xfer_core_windows_open(struct td_xfer_core *c, uint32_t id)
{
    struct td_xfer_slot *s = &c->slots[id];
    TD_ASSERT(s->state == TD_SLOT_FILLING && td_xfer_held(&s->holds, TD_HOLD_WRITER) &&
              !td_xfer_held(&s->holds, TD_HOLD_WINDOWS));
    hold(&s->holds, TD_HOLD_WINDOWS);
    s->nic.windows_conn = s->nic.writer_conn;
    s->nic.evict_ns = 0;
}

bool td_xfer_core_windows_due(const struct td_xfer_core *c, uint64_t now_ns, uint32_t id)
{
    const struct td_xfer_slot *s = &c->slots[id];
    return td_xfer_held(&s->holds, TD_HOLD_WINDOWS) &&
           (!td_xfer_held(&s->holds, TD_HOLD_WRITER) ||
            (s->nic.evict_ns && now_ns >= s->nic.evict_ns));
}

void td_xfer_core_windows_ended(struct td_xfer_core *c, uint32_t id)
{
    struct td_xfer_slot *s = &c->slots[id];
    release(&s->holds, TD_HOLD_WINDOWS);
    s->nic.evict_ns = 0;
    if (td_xfer_held(&s->holds, TD_HOLD_WRITER)) { /* it did not say so, but it has */
        slot_writer_retired(c, s);
        c->stats.n_evicted++;
    }
    slot_check_retired(c, id);
}

void td_xfer_core_rx_imm(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn, uint32_t qp,
                         uint32_t imm)
{
    uint32_t id = imm >> 16;
    struct td_xfer_slot *s = id < c->max_slots ? &c->slots[id] : NULL;
    if (!s || s->state != TD_SLOT_FILLING || s->conn != conn || s->way != TD_XFER_BY_NIC ||
        qp >= TD_XFER_QPS_MAX || (s->nic.qps_got & 1u << qp) ||
        (s->final_seen && !(s->nic.qps_want & 1u << qp)) ||
        td_xfer_imm(id, s->generation, s->attempt, TD_XFER_IMM_FINAL) != imm) {
        c->stats.n_stale_frames++;
        return;
    }
    s->nic.qps_got |= 1u << qp;
    slot_check_ready(c, now_ns, id);
}

void td_xfer_core_conn_fenced(struct td_xfer_core *c, uint64_t conn, uint64_t until_ns)
{
    for (uint32_t i = 0; i < c->max_slots; i++) {
        struct td_xfer_slot *s = &c->slots[i];
        if (td_xfer_held(&s->holds, TD_HOLD_WINDOWS) && s->nic.windows_conn == conn) {
            release(&s->holds, TD_HOLD_WINDOWS); /* they went with their queue pairs */
            slot_check_retired(c, i);
        }
        if (!td_xfer_held(&s->holds, TD_HOLD_WRITER) || s->nic.writer_conn != conn) continue;
        hold_once(&s->holds, TD_HOLD_QUARANTINE);
        release(&s->holds, TD_HOLD_WRITER);
        s->nic.quarantine_ns = until_ns;
        c->stats.n_fenced++;
        due_by(c, until_ns);
    }
}

uint32_t td_xfer_core_flush_begin(struct td_xfer_core *c)
{
    uint32_t n = 0;
    c->flush_due = false;
    for (uint32_t i = 0; i < c->max_slots; i++) {
        struct td_xfer_slot *s = &c->slots[i];
        if (s->nic.flush != TD_FLUSH_DUE) continue;
        s->nic.flush = TD_FLUSH_RUNNING;
        n++;
    }
    return n;
}

void td_xfer_core_flush_end(struct td_xfer_core *c, uint64_t now_ns, const char *reason)
{
    for (uint32_t i = 0; i < c->max_slots; i++) {
        struct td_xfer_slot *s = &c->slots[i];
        if (s->nic.flush != TD_FLUSH_RUNNING) continue;
        TD_ASSERT(!is_written(s)); /* no attempt is bound meanwhile */
        s->nic.flush = TD_FLUSH_NONE;
        release(&s->holds, TD_HOLD_FLUSH);
        if (s->state == TD_SLOT_VERIFYING && reason) {
            slot_answer(c, i, TD_XFER_FAIL, TD_ERR_PEER, reason);
            slot_fail(c, i, TD_ERR_PEER, reason);
        }
        slot_check_ready(c, now_ns, i);
        slot_check_retired(c, i);
    }
}

bool td_xfer_core_verify_next(struct td_xfer_core *c, uint32_t *cursor, uint64_t max_bytes,
                              struct td_xfer_verify *v)
{
    uint32_t id;
    for (struct round r = {.at = *cursor}; round_next(&c->verifying, *cursor, &r, &id);) {
        struct td_xfer_slot *s = &c->slots[id];
        if (s->state != TD_SLOT_VERIFYING) set_drop(&c->verifying, id);
        if (s->state != TD_SLOT_VERIFYING || s->check.at == s->check.n) continue;
        if (s->holds.reasons & ~TD_HELD(TD_HOLD_WINDOWS)) continue;
        uint64_t left = (uint64_t)(s->check.n - s->check.at), n = max_bytes / c->block_bytes;
        int32_t batch = n ? (int32_t)td_min_u64(n, left) : 1;
        *v = (struct td_xfer_verify){.slot = id, .first = s->check.at, .n = batch};
        *cursor = (id + 1) % c->max_slots;
        hold(&s->holds, TD_HOLD_IO);
        return true;
    }
    return false;
}

void td_xfer_core_verify_end(struct td_xfer_core *c, uint64_t now_ns,
                             const struct td_xfer_verify *v, int32_t bad)
{
    struct td_xfer_slot *s = &c->slots[v->slot];
    slot_io_end(c, v->slot);
    c->stats.n_digests += (uint64_t)v->n;
    if (bad >= 0) c->stats.n_digest_mismatches++;
    if (s->state != TD_SLOT_VERIFYING) return;
    if (bad < 0) {
        s->check.at += v->n;
        slot_check_ready(c, now_ns, v->slot);
        return;
    }
    char reason[TD_XFER_REASON_MAX];
    snprintf(reason, sizeof reason, "digest: grant block %u is not what the sender read",
             s->check.digest[bad].block);
    bool again = s->check.n_bad++ == 0 && s->conn;
    slot_answer(c, v->slot, TD_XFER_FAIL, TD_ERR_CORRUPT, reason);
    if (!again) {
        slot_fail(c, v->slot, TD_ERR_CORRUPT, reason);
        return;
    }
    slot_orphaned(c, s, now_ns + PARTED_GRACE * c->orphan_grace_ns, TD_ERR_CORRUPT, reason);
}

/* --- sender ----------------------------------------------------------------------------------- */

/* A frame of the op's attempt, to its receiver; type: set later where it is 0. */
static struct td_xfer_frame op_frame(const struct td_xfer_core *c, uint32_t id, uint8_t type,
                                     size_t length)
{
    const struct td_xfer_op *op = &c->ops[id];
    struct td_xfer_frame f =
        frame_of(type, op->grant.slot, op->grant.generation, id, op->attempt, op->handle);
    f.length = (uint32_t)length;
    return f;
}

static void op_say_abort(struct td_xfer_core *c, uint32_t id, uint64_t conn, uint64_t handle,
                         uint16_t flags)
{
    const struct td_xfer_op *op = &c->ops[id];
    struct td_xfer_frame f = op_frame(c, id, TD_XFER_ABORT, strlen(op->reason));
    f.flags = flags;
    f.handle = handle;
    f.status = (int16_t)op->status;
    c->hooks.send(c->hooks.ctx, conn, &f, op->reason);
}

static void op_ended(struct td_xfer_core *c, uint32_t id)
{
    struct td_xfer_op *op = &c->ops[id];
    assert_unheld(&op->holds, 0);
    op->state = TD_OP_ENDED;
    if (op->failed)
        c->stats.n_failed++;
    else
        c->stats.n_done++;
    emit(c, op->failed ? TD_XFER_OP_FAILED : TD_XFER_OP_DONE, id);
}

/* STOPPING ends when nothing reads for this op any more, here or from the other side. */
static void op_check_stopped(struct td_xfer_core *c, uint32_t id)
{
    struct td_xfer_op *op = &c->ops[id];
    if (op->state != TD_OP_STOPPING || td_xfer_held(&op->holds, TD_HOLD_IO)) return;
    if (td_xfer_held(&op->holds, TD_HOLD_NIC)) {
        due_by(c, 1); /* the time that this may take is counted from the next tick */
        return;
    }
    /* rdma: the writer has retired */
    if (op->nic.tell_conn) op_say_abort(c, id, op->nic.tell_conn, op->nic.tell_handle, 0);
    op->nic.tell_conn = 0;
    if (td_xfer_held(&op->holds, TD_HOLD_READER)) {
        due_by(c, 1);
        return;
    }
    if (!op->tries.again) {
        op_ended(c, id);
        return;
    }
    op->tries.again = false;
    op->state = TD_OP_WAIT_CONN;
    if (!op->tries.retry_ns) c->retry_due = true; /* at once */
    due_by(c, op->tries.retry_ns ? op->tries.retry_ns : 1);
}

/* again: back to WAIT_CONN for another attempt, when nobody reads for this one any more. */
static void op_stop(struct td_xfer_core *c, uint32_t id, bool again)
{
    struct td_xfer_op *op = &c->ops[id];
    c->hooks.op_handle(c->hooks.ctx, id, 0); /* invariant 4 */
    op->conn = 0;
    op->handle = 0;
    op->tries.again = again;
    op->state = TD_OP_STOPPING;
    td_fault_point("xfer_stopping");
    op_check_stopped(c, id);
}

/* tell: the receiver does not know yet that this attempt is over. On rdma it learns so when the
 * last work request has completed, which lets it free its blocks, even after its own FAIL. */
static void op_end(struct td_xfer_core *c, uint32_t id, bool failed, td_status status,
                   const char *reason, bool tell)
{
    struct td_xfer_op *op = &c->ops[id];
    op->failed = failed;
    op->status = status;
    set_reason(op->reason, reason);
    if (failed && op->conn && op->way == TD_XFER_BY_NIC) {
        op->nic.tell_conn = op->conn;
        op->nic.tell_handle = op->handle;
    } else if (tell && op->conn) {
        op_say_abort(c, id, op->conn, op->handle, 0);
    }
    op_stop(c, id, false);
}

static bool op_is_live(const struct td_xfer_op *op)
{
    return op->state == TD_OP_WAIT_CONN || op->state == TD_OP_STREAMING ||
           op->state == TD_OP_WAIT_VERDICT;
}

/* The op that this frame is for; NULL, and counted: of another attempt. */
static struct td_xfer_op *bound_op(struct td_xfer_core *c, uint64_t conn,
                                   const struct td_xfer_frame *f)
{
    struct td_xfer_op *op = f->op < c->max_ops ? &c->ops[f->op] : NULL;
    if (op && op_is_live(op) && op->conn == conn && conn && op->handle == f->handle &&
        op->attempt == f->attempt && op->grant.slot == f->slot &&
        op->grant.generation == f->generation)
        return op;
    c->stats.n_stale_frames++;
    return NULL;
}

td_status td_xfer_core_op_start(struct td_xfer_core *c, const struct td_xfer_grant_blob *grant,
                                uint64_t deadline_ns, uint64_t user, uint32_t *ret_op,
                                struct td_err *err)
{
    if (!c->block_bytes) return td_fail(err, TD_ERR_INVALID, "op: no memory was added");
    if (grant->block_bytes != c->block_bytes)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "grant: blocks of %" PRIu64 " bytes, ours have %" PRIu64, grant->block_bytes,
                       c->block_bytes);
    if (c->n_ops_used == c->max_ops)
        return td_fail(err, TD_ERR_AGAIN, "op: all %u ops are in use", c->max_ops);

    uint32_t id = c->op_hint;
    while (c->ops[id].state != TD_OP_FREE) id = (id + 1) % c->max_ops;
    c->op_hint = (id + 1) % c->max_ops;
    struct td_xfer_op *op = &c->ops[id];
    struct td_xfer_op fresh = {
        .state = TD_OP_WAIT_CONN,
        .user = user,
        .deadline_ns = deadline_ns,
        .grant = *grant,
        .src = op->src,
        .order = op->order,
        .ready = op->ready,
        .sent = {.begun = op->sent.begun},
        .lanes = {.of = op->lanes.of},
        .nic = {.dst = op->nic.dst, .run = op->nic.run},
    };
    *op = fresh;
    for (int32_t i = 0; i < grant->n_blocks; i++) {
        op->src[i] = -1;
        op->ready[i] = 0;
    }
    c->n_ops_used++;
    due_by(c, deadline_ns);
    *ret_op = id;
    return TD_OK;
}

/* Bytes [offset, +n_bytes) of grant blocks [first, +n), in order, each from one source block. */
static td_status submit(struct td_xfer_core *c, uint64_t now_ns, uint32_t id, int32_t first,
                        const int32_t *block_ids, int32_t n, uint64_t offset, uint64_t n_bytes,
                        bool final, size_t note_bytes)
{
    if (id >= c->max_ops || c->ops[id].state == TD_OP_FREE) return TD_ERR_NOT_FOUND;
    struct td_xfer_op *op = &c->ops[id];
    /* failed already; the event says why */
    if (!op_is_live(op)) return op->status ? op->status : TD_ERR_INVALID;
    if (op->final || n < 0 || first < 0 || first > op->grant.n_blocks ||
        n > op->grant.n_blocks - first)
        return TD_ERR_INVALID;
    if (note_bytes > TD_XFER_NOTE_MAX || (note_bytes && !final)) return TD_ERR_INVALID;
    if (n_bytes < 1 || offset >= c->block_bytes || n_bytes > c->block_bytes - offset)
        return TD_ERR_INVALID;
    uint64_t bytes_ready = op->bytes_ready + (uint64_t)n * n_bytes;
    /* the slot could never be ready */
    if (final && bytes_ready != (uint64_t)op->grant.n_blocks * c->block_bytes)
        return TD_ERR_INVALID;
    for (int32_t i = 0; i < n; i++) {
        int32_t b = first + i;
        if (block_ids[i] < 0 || block_ids[i] >= c->n_pool_blocks || op->ready[b] != offset ||
            (offset && op->src[b] != block_ids[i]))
            return TD_ERR_INVALID;
    }
    /* each has passed by these blocks, maybe */
    for (uint32_t lane = 0; lane < TD_XFER_LANES_MAX && offset && n; lane++)
        if (op->lanes.lane[lane].at > op->n_whole) op->lanes.lane[lane].at = op->n_whole;
    for (int32_t i = 0; i < n; i++) {
        op->src[first + i] = block_ids[i];
        op->ready[first + i] = (uint32_t)(offset + n_bytes);
        if (!offset) op->order[op->n_queued++] = first + i;
    }
    while (op->n_whole < op->n_queued && op->ready[op->order[op->n_whole]] == c->block_bytes)
        op->n_whole++;
    op->bytes_ready = bytes_ready;
    if (!op->times.first_ns) op->times.first_ns = now_ns;
    op->times.last_ns = now_ns;
    op->final = final;
    return TD_OK;
}

td_status td_xfer_core_submit(struct td_xfer_core *c, uint64_t now_ns, uint32_t id, int32_t first,
                              const int32_t *block_ids, int32_t n, bool final, const void *note,
                              size_t note_bytes)
{
    td_status status =
        submit(c, now_ns, id, first, block_ids, n, 0, c->block_bytes, final, note_bytes);
    if (status) return status;
    struct td_xfer_op *op = &c->ops[id];
    if (note_bytes) memcpy(op->note.bytes, note, note_bytes);
    op->note.n_bytes = note_bytes;
    return TD_OK;
}

td_status td_xfer_core_submit_part(struct td_xfer_core *c, uint64_t now_ns, uint32_t id,
                                   int32_t first, const int32_t *block_ids, int32_t n,
                                   uint64_t offset, uint64_t n_bytes)
{
    return submit(c, now_ns, id, first, block_ids, n, offset, n_bytes, false, 0);
}

/* What the receiver READs of an op is not sent. */
static void op_skip_pulled(const struct td_xfer_core *c, struct td_xfer_op *op)
{
    for (int32_t i = op->lanes.lane[0].at; op->pull.may && i < op->pull.n; i++) {
        int32_t b = op->order[i];
        op->sent.bytes_begun += c->block_bytes - op->sent.begun[b];
        op->sent.begun[b] = (uint32_t)c->block_bytes;
    }
}

td_status td_xfer_core_submit_pull(struct td_xfer_core *c, uint64_t now_ns, uint32_t id,
                                   int32_t first, const int32_t *block_ids, int32_t n)
{
    /* they come before all others */
    if (id < c->max_ops && c->ops[id].pull.n != c->ops[id].n_queued) return TD_ERR_INVALID;
    td_status status = td_xfer_core_submit(c, now_ns, id, first, block_ids, n, false, NULL, 0);
    if (status) return status;
    c->ops[id].pull.n = c->ops[id].n_queued;
    op_skip_pulled(c, &c->ops[id]);
    return TD_OK;
}

void td_xfer_core_op_wait(struct td_xfer_core *c, uint32_t id, uint64_t until_ns)
{
    if (id >= c->max_ops || c->ops[id].state != TD_OP_WAIT_CONN) return;
    c->ops[id].tries.retry_ns = until_ns;
    due_by(c, until_ns);
}

void td_xfer_core_op_fail(struct td_xfer_core *c, uint32_t id, td_status status, const char *reason)
{
    if (id < c->max_ops && op_is_live(&c->ops[id])) op_end(c, id, true, status, reason, true);
}

bool td_xfer_core_op_give_up(struct td_xfer_core *c, uint32_t id, td_status status,
                             const char *reason)
{
    struct td_xfer_op *op = &c->ops[id];
    uint64_t conn = op->conn, handle = op->handle;
    if (!op_is_live(op)) return false;
    op->status = status;
    set_reason(op->reason, reason);
    if (conn) op_say_abort(c, id, conn, handle, TD_XFER_ABORT_UNRETIRED);
    op_end(c, id, true, status, reason, false);
    op->nic.tell_conn = 0; /* it was told */
    return true;
}

void td_xfer_core_op_limit(struct td_xfer_core *c, uint32_t id, uint32_t qps)
{
    TD_ASSERT(c->ops[id].state == TD_OP_STREAMING && !c->ops[id].nic.qps_used);
    c->ops[id].nic.qps_allowed = qps;
}

bool td_xfer_core_op_is_on(const struct td_xfer_core *c, uint32_t id, uint64_t conn)
{
    const struct td_xfer_op *op = &c->ops[id];
    return op->conn == conn || op->nic.tell_conn == conn || op->pull.reader_conn == conn ||
           (td_xfer_held(&op->holds, TD_HOLD_NIC) && op->nic.wr_conn == conn);
}

void td_xfer_core_op_attach(struct td_xfer_core *c, uint32_t id, uint64_t conn,
                            enum td_xfer_path path, bool can_pull)
{
    struct td_xfer_op *op = &c->ops[id];
    TD_ASSERT(op->state == TD_OP_WAIT_CONN && !op->holds.n);
    op->state = TD_OP_STREAMING;
    set_add(&c->streaming, id);
    op->conn = conn;
    op->path = path;
    op->way = td_xfer_path_way(path);
    op->attempt++;
    op->sent.digest_at = op->nic.n_targets = op->nic.n_runs = op->pull.ref_at = 0;
    op->pull.may = can_pull && op->way == TD_XFER_BY_NIC;
    op->sent.bytes_begun = 0;
    for (int32_t i = 0; i < op->grant.n_blocks; i++) {
        op->sent.begun[i] = 0;
        op->lanes.of[i] = TD_XFER_NO_LANE;
    }
    op->nic.qps_allowed = op->nic.qps_used = op->nic.qps_said = op->lanes.n_frames = 0;
    op->tries.retry_ns = op->stop_ns = 0;
    for (int i = 0; i < TD_XFER_LANES_MAX; i++) {
        op->lanes.lane[i].at = 0;
        op->lanes.lane[i].open = i == 0;
    }
    op_skip_pulled(c, op);
    do op->handle = c->hooks.random_u64(c->hooks.ctx);
    while (op->handle == 0);
    c->hooks.op_handle(c->hooks.ctx, id, op->handle);
    struct td_xfer_frame f = op_frame(c, id, TD_XFER_OPEN, TD_XFER_KEY_BYTES);
    c->hooks.send(c->hooks.ctx, conn, &f, op->grant.key);
}

/* Where in `order` the next bytes for this lane are; -1: none. */
static int32_t op_next(struct td_xfer_op *op, uint32_t lane)
{
    for (; op->lanes.lane[lane].at < op->n_queued; op->lanes.lane[lane].at++) {
        int32_t b = op->order[op->lanes.lane[lane].at];
        if (op->sent.begun[b] < op->ready[b] &&
            (op->lanes.of[b] == lane || op->lanes.of[b] == TD_XFER_NO_LANE))
            return op->lanes.lane[lane].at;
    }
    return -1;
}

/* order[at] is there, whole, and nothing of it has begun. */
static bool op_has_whole(const struct td_xfer_core *c, const struct td_xfer_op *op, int32_t at)
{
    return at < op->n_queued && op->ready[op->order[at]] == c->block_bytes &&
           !op->sent.begun[op->order[at]];
}

static void op_begin(struct td_xfer_op *op, int32_t block, uint64_t n_bytes)
{
    op->sent.begun[block] += (uint32_t)n_bytes;
    op->sent.bytes_begun += n_bytes;
}

/* Every byte was submitted and begun. */
static bool all_begun(const struct td_xfer_core *c, const struct td_xfer_op *op)
{
    return op->sent.bytes_begun == (uint64_t)op->grant.n_blocks * c->block_bytes;
}

/* Something of the op is begun: after the last of it, what others still wait for is counted. */
static void op_begun(struct td_xfer_core *c, uint32_t id)
{
    struct td_xfer_op *op = &c->ops[id];
    if (!all_begun(c, op)) return;
    uint32_t other;
    op->sent.behind_bytes = 0;
    for (struct round r = {.at = 0}; round_next(&c->streaming, 0, &r, &other);) {
        const struct td_xfer_op *o = &c->ops[other];
        if (other != id && o->state == TD_OP_STREAMING)
            op->sent.behind_bytes += o->bytes_ready - o->sent.bytes_begun;
    }
}

/* The op's next DATA (or first OPEN) frame for this lane; false when there is none. */
static bool tx_data(struct td_xfer_core *c, struct td_xfer_op *op, uint32_t lane,
                    int32_t max_blocks, struct td_xfer_frame *f)
{
    int32_t at = op_next(op, lane), n = 0;
    if (at < 0) return false;
    if (!op->lanes.lane[lane].open) { /* or its data could overtake the binding that lane 0 made */
        op->lanes.lane[lane].open = true;
        f->type = TD_XFER_OPEN;
        f->length = TD_XFER_KEY_BYTES;
        return true;
    }
    int32_t block = op->order[at];
    uint64_t left = op->ready[block] - op->sent.begun[block];
    f->type = TD_XFER_DATA;
    f->offset = (uint64_t)block * c->block_bytes + op->sent.begun[block];
    f->length = (uint32_t)td_min_u64(left, TD_XFER_FRAME_DATA_MAX);
    op->lanes.n_frames++;
    op->lanes.of[block] = (uint8_t)lane;
    op_begin(op, block, f->length);
    if (op->sent.begun[block] < c->block_bytes) return true;
    while (++n < max_blocks && op_has_whole(c, op, at + n) && op->order[at + n] == block + n &&
           f->length + c->block_bytes <= TD_XFER_FRAME_DATA_MAX) {
        f->length += (uint32_t)c->block_bytes;
        op->lanes.of[block + n] = (uint8_t)lane;
        op_begin(op, block + n, c->block_bytes);
    }
    return true;
}

static void count_sent(struct td_xfer_core *c, struct td_xfer_op *op, uint64_t n_bytes)
{
    c->stats.bytes_sent += n_bytes;
    c->stats.bytes_by_path[op->path] += n_bytes;
}

/* Names source blocks of order[at, end) of which the same bytes have come, for the receiver to copy
 * or (pulled: whole ones, which count as begun) to READ. How many. */
static int32_t tx_ref(struct td_xfer_core *c, struct td_xfer_op *op, int32_t at, int32_t end,
                      bool pulled, struct td_xfer_tx *tx)
{
    int32_t n = 0, first = op->order[at];
    uint32_t begun = op->sent.begun[first], upto = op->ready[first], b = (uint32_t)first;
    memcpy(tx->payload, &b, 4);
    do {
        memcpy(tx->payload + 4 + 4 * n, &op->src[first + n], 4);
        op_begin(op, first + n, upto - begun);
        n++;
    } while (n < TD_XFER_REF_MAX && at + n < end && op->order[at + n] == first + n &&
             op->sent.begun[first + n] == begun && op->ready[first + n] == upto);
    tx->frame.type = TD_XFER_REF;
    tx->frame.offset = upto;
    tx->frame.length = 4 + 4 * (uint32_t)n;
    count_sent(c, op, (uint64_t)n * (pulled ? upto : upto - begun));
    return n;
}

/* May FINAL be said? Every block is wholly with the kernel or the NIC, every digest is sent. */
static bool final_due(const struct td_xfer_core *c, const struct td_xfer_op *op)
{
    if (!op->final || !all_begun(c, op) || op->lanes.n_frames) return false;
    if (c->digest_every && op->sent.digest_at < op->n_queued) return false;
    if (op->way != TD_XFER_BY_NIC) return true;
    bool writes = !op->pull.may || op->pull.n < op->n_queued;
    return (!writes || op->nic.n_targets == op->grant.n_blocks) &&
           (!op->pull.may || op->pull.ref_at == op->pull.n) && op->nic.qps_said == op->nic.qps_used;
}

/* Where to look first; see struct td_xfer_turns. Blocks count, wherever they would go; what is
 * small and said once (FINAL) goes by the round. */
static uint32_t op_turn(struct td_xfer_core *c, const struct td_xfer_turns *t, uint64_t conn,
                        uint32_t lane)
{
    uint32_t first = TURN_NONE, best = TURN_NONE, id;
    for (struct round r = {.at = t->next};
         t->by_key && c->n_ops_used > 1 && round_next(&c->streaming, t->next, &r, &id);) {
        struct td_xfer_op *op = &c->ops[id];
        if (op->state != TD_OP_STREAMING) set_drop(&c->streaming, id);
        if (op->state != TD_OP_STREAMING || op->conn != conn) continue;
        if (op->sent.bytes_begun == op->bytes_ready) continue;
        int32_t at = op_next(op, lane);
        if (at < 0 || (op->way == TD_XFER_BY_NIC && op->order[at] >= op->nic.n_targets)) continue;
        if (first == TURN_NONE)
            first = best = id;
        else if (op->priority < c->ops[best].priority)
            best = id;
    }
    return best == first ? t->next : best;
}

bool td_xfer_core_tx_next(struct td_xfer_core *c, uint64_t conn, uint32_t lane,
                          struct td_xfer_turns *turns, int32_t max_blocks, struct td_xfer_tx *tx)
{
    uint32_t from = op_turn(c, turns, conn, lane), id;
    for (struct round r = {.at = from}; round_next(&c->streaming, from, &r, &id);) {
        struct td_xfer_op *op = &c->ops[id];
        if (op->state != TD_OP_STREAMING || op->conn != conn) continue;
        int32_t at;
        tx->op = id;
        tx->frame = op_frame(c, id, 0, 0);
        if (op->way == TD_XFER_BY_DATA && tx_data(c, op, lane, max_blocks, &tx->frame)) {
            memcpy(tx->payload, op->grant.key, TD_XFER_KEY_BYTES); /* for OPEN */
            if (tx->frame.type == TD_XFER_DATA) op_begun(c, id);
        } else if (is_copied(op->way) && (at = op_next(op, 0)) >= 0) {
            tx_ref(c, op, at, op->n_queued, false, tx);
        } else if (op->pull.may && op->pull.ref_at < op->pull.n) {
            op->pull.ref_at += tx_ref(c, op, op->pull.ref_at, op->pull.n, true, tx);
            hold_once(&op->holds, TD_HOLD_READER);
            op->pull.reader_conn = conn;
            op->pull.reader_handle = op->handle;
        } else if ((lane == 0 || (op->lanes.lane[lane].open && !c->digest_every)) &&
                   final_due(c, op)) {
            /* digests go by lane 0, and before it */
            tx->frame.type = TD_XFER_FINAL;
            tx->frame.flags = (uint16_t)op->nic.qps_used;
            tx->frame.clock_us = (uint32_t)(op->times.first_ns / TD_NS_PER_US);
            tx->frame.last_us = (uint32_t)(op->times.last_ns / TD_NS_PER_US);
            tx->frame.offset = (uint64_t)op->grant.n_blocks * c->block_bytes;
            tx->frame.length = (uint32_t)op->note.n_bytes;
            memcpy(tx->payload, op->note.bytes, op->note.n_bytes);
            op->state = TD_OP_WAIT_VERDICT;
        } else {
            continue;
        }
        turn_over(turns, from, id, c->max_ops);
        return true;
    }
    return false;
}

void td_xfer_core_tx_done(struct td_xfer_core *c, uint32_t id, uint64_t handle)
{
    struct td_xfer_op *op = &c->ops[id];
    if (op->state != TD_OP_STREAMING || op->handle != handle) return;
    TD_ASSERT(op->lanes.n_frames);
    op->lanes.n_frames--;
}

td_status td_xfer_core_rx_targets(struct td_xfer_core *c, uint64_t conn,
                                  const struct td_xfer_frame *f, const struct td_xfer_run *runs,
                                  int32_t n, int32_t n_peer_blocks, bool own_keys)
{
    struct td_xfer_op *op = bound_op(c, conn, f);
    if (!op) return TD_ERR_STALE;
    if (op->way != TD_XFER_BY_NIC || f->offset != (uint64_t)op->nic.n_targets)
        return TD_ERR_CORRUPT;
    for (int32_t i = 0; i < n; i++) {
        struct td_xfer_run run = runs[i];
        if (run.n < 1 || run.n > op->grant.n_blocks - op->nic.n_targets || run.block < 0 ||
            run.block > n_peer_blocks - run.n)
            return TD_ERR_CORRUPT;
        for (int32_t k = 0; k < run.n; k++) {
            op->nic.run[op->nic.n_targets] = op->nic.n_runs;
            op->nic.dst[op->nic.n_targets++] = run.block + k;
        }
        op->nic.n_runs += own_keys;
    }
    return TD_OK;
}

bool td_xfer_core_wr_next(struct td_xfer_core *c, uint64_t conn, uint32_t qp, uint32_t no_words,
                          struct td_xfer_turns *turns, const struct td_xfer_wr_limits *l,
                          struct td_xfer_wr *wr)
{
    uint32_t from = op_turn(c, turns, conn, 0), id;
    for (struct round r = {.at = from}; round_next(&c->streaming, from, &r, &id);) {
        struct td_xfer_op *op = &c->ops[id];
        if (op->state != TD_OP_STREAMING || op->conn != conn || op->way != TD_XFER_BY_NIC) continue;
        int32_t at = op_next(op, 0);
        bool data = at >= 0 && op->order[at] < op->nic.n_targets;
        *wr = (struct td_xfer_wr){.op = id,
                                  .handle = op->handle,
                                  .order_at = at,
                                  .n_blocks = 1,
                                  .offset = data ? op->sent.begun[op->order[at]] : 0};
        if (data && op->nic.qps_allowed && !(op->nic.qps_allowed & 1u << qp)) continue;
        if (data) {
            int32_t block = op->order[at], n_pieces = 1;
            uint64_t left = op->ready[block] - op->sent.begun[block];
            wr->dst_block = op->nic.dst[block];
            wr->run = op->nic.run[block];
            wr->n_bytes = td_min_u64(left, l->max_bytes);
            /* Neighbours at the receiver ride along, gathered from where they lie here. */
            op_begin(op, block, wr->n_bytes);
            for (; wr->n_bytes == (uint64_t)wr->n_blocks * c->block_bytes &&
                   op_has_whole(c, op, at + wr->n_blocks);
                 wr->n_blocks++) {
                int32_t next = op->order[at + wr->n_blocks],
                        before = op->order[at + wr->n_blocks - 1];
                bool apart =
                    op->src[next] != op->src[before] + 1 || op->src[next] % l->src_region == 0;
                if (next >= op->nic.n_targets || op->nic.dst[next] != op->nic.dst[before] + 1 ||
                    op->nic.run[next] != op->nic.run[before] ||
                    op->nic.dst[next] % l->dst_region == 0 || n_pieces + apart > l->max_pieces ||
                    wr->n_bytes + c->block_bytes > l->max_bytes)
                    break;
                n_pieces += apart;
                wr->n_bytes += c->block_bytes;
                op_begin(op, next, c->block_bytes);
            }
            op->nic.qps_used |= 1u << qp;
            op_begun(c, id);
        } else if (op->final && all_begun(c, op) &&
                   (op->nic.qps_used & ~op->nic.qps_said & 1u << qp) &&
                   (op->nic.qps_said || !(op->nic.qps_used & no_words))) {
            wr->is_imm = true;
            wr->n_blocks = 0;
            wr->imm =
                td_xfer_imm(op->grant.slot, op->grant.generation, op->attempt, TD_XFER_IMM_FINAL);
            op->nic.qps_said |= 1u << qp;
        } else {
            continue;
        }
        hold(&op->holds, TD_HOLD_NIC);
        op->nic.wr_conn = conn;
        turn_over(turns, from, id, c->max_ops);
        return true;
    }
    return false;
}

void td_xfer_core_hold(struct td_xfer_core *c, uint32_t id)
{
    hold(&c->ops[id].holds, TD_HOLD_NIC);
    c->ops[id].nic.wr_conn = c->ops[id].conn; /* closing it ends what is held */
}

void td_xfer_core_wr_done(struct td_xfer_core *c, uint32_t id, uint64_t n_bytes, bool ok)
{
    struct td_xfer_op *op = &c->ops[id];
    release(&op->holds, TD_HOLD_NIC);
    /* It may have landed or not: the connection is about to go, and its other end fences. */
    if (!ok) op->nic.tell_conn = 0;
    count_sent(c, op, ok ? n_bytes : 0);
    op_check_stopped(c, id);
}

/* Which blocks carry a digest, is the sender's choice: another sample in each attempt. */
static bool is_sampled(uint32_t every, uint64_t handle, int32_t block)
{
    uint64_t v = (handle ^ (uint64_t)(uint32_t)block) * 0x9e3779b97f4a7c15ull;
    return every == 1 || (v >> 32) % every == 0;
}

bool td_xfer_core_digest_next(struct td_xfer_core *c, uint64_t conn, uint64_t max_bytes,
                              struct td_xfer_digest_work *w)
{
    if (!c->digest_every) return false;
    for (uint32_t id = 0; id < c->max_ops; id++) {
        struct td_xfer_op *op = &c->ops[id];
        if (op->state != TD_OP_STREAMING || op->conn != conn ||
            td_xfer_held(&op->holds, TD_HOLD_IO))
            continue;
        w->n = 0;
        while (op->sent.digest_at < op->n_whole && w->n < TD_XFER_DIGEST_BATCH &&
               (w->n == 0 || (uint64_t)(w->n + 1) * c->block_bytes <= max_bytes)) {
            int32_t block = op->order[op->sent.digest_at++];
            if (!is_sampled(c->digest_every, op->handle, block)) continue;
            w->src[w->n] = op->src[block];
            w->digest[w->n++] = (struct td_xfer_digest){.block = (uint32_t)block};
        }
        if (!w->n) continue;
        w->op = id;
        w->handle = op->handle;
        hold(&op->holds, TD_HOLD_IO);
        return true;
    }
    return false;
}

void td_xfer_core_digest_end(struct td_xfer_core *c, const struct td_xfer_digest_work *w)
{
    struct td_xfer_op *op = &c->ops[w->op];
    release(&op->holds, TD_HOLD_IO);
    if (op->state == TD_OP_STREAMING && op->handle == w->handle) {
        struct td_xfer_frame f =
            op_frame(c, w->op, TD_XFER_DIGEST, (size_t)w->n * sizeof w->digest[0]);
        c->hooks.send(c->hooks.ctx, op->conn, &f, w->digest);
    }
    op_check_stopped(c, w->op);
}

bool td_xfer_core_read_begin(struct td_xfer_core *c, uint32_t id, uint64_t handle)
{
    struct td_xfer_op *op = &c->ops[id];
    if (!op_is_live(op) || op->handle != handle) return false;
    TD_ASSERT(!td_xfer_held(&op->holds, TD_HOLD_IO));
    hold(&op->holds, TD_HOLD_IO);
    return true;
}

void td_xfer_core_read_end(struct td_xfer_core *c, uint32_t id, size_t n_bytes)
{
    release(&c->ops[id].holds, TD_HOLD_IO);
    count_sent(c, &c->ops[id], n_bytes);
    op_check_stopped(c, id);
}

/* The receiver has answered this attempt: it READs nothing of it any more. */
static void reader_over(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f)
{
    struct td_xfer_op *op = f->op < c->max_ops ? &c->ops[f->op] : NULL;
    if (!op || !op->pull.reader_conn || op->pull.reader_conn != conn ||
        op->pull.reader_handle != f->handle)
        return;
    release(&op->holds, TD_HOLD_READER);
    op->pull.reader_conn = 0;
    op_check_stopped(c, f->op);
}

void td_xfer_core_rx_done(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn,
                          const struct td_xfer_frame *f)
{
    reader_over(c, conn, f);
    struct td_xfer_op *op = bound_op(c, conn, f);
    if (!op) return;
    op->times.end_ns = now_ns;
    if (op->final)
        op_end(c, f->op, false, TD_OK, "", false);
    else /* nobody has every byte before FINAL: another op used its grant */
        op_end(c, f->op, true, TD_ERR_STALE, "the grant was used before, and its slot is complete",
               false);
}

void td_xfer_core_rx_fail(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn,
                          const struct td_xfer_frame *f, const char *reason)
{
    reader_over(c, conn, f);
    struct td_xfer_op *op = bound_op(c, conn, f);
    if (!op) return;
    bool again =
        f->status == TD_ERR_AGAIN || (f->status == TD_ERR_CORRUPT && op->tries.n_mismatches++ == 0);
    if (again && op->attempt < 15) {
        op->tries.retry_ns =
            f->status == TD_ERR_AGAIN
                ? now_ns + (TD_XFER_AGAIN_NS << (op->tries.n_again < 6 ? op->tries.n_again++ : 6))
                : now_ns;
        op_stop(c, f->op, true);
        return;
    }
    char text[TD_XFER_REASON_MAX];
    snprintf(text, sizeof text, "receiver: %.140s", reason);
    op_end(c, f->op, true, f->status ? (td_status)f->status : TD_ERR_PEER, text, false);
}

/* --- both ------------------------------------------------------------------------------------- */

void td_xfer_core_conn_lost(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn,
                            td_status status, const char *reason, enum td_xfer_lost how)
{
    for (uint32_t i = 0; i < c->max_slots; i++) {
        struct td_xfer_slot *s = &c->slots[i];
        if (s->conn != conn) continue;
        /* the bytes are here: the verdict needs no connection */
        if (s->state == TD_SLOT_VERIFYING) slot_unbind(s);
        if (s->state != TD_SLOT_FILLING) continue;
        if (how == TD_XFER_LOST) {
            slot_fail(c, i, status, reason);
            continue;
        }
        uint64_t grace_ns = (how == TD_XFER_PARTED ? PARTED_GRACE : 1) * c->orphan_grace_ns;
        slot_orphaned(c, s, now_ns + grace_ns, status, reason);
    }
    for (uint32_t i = 0; i < c->max_ops; i++) {
        struct td_xfer_op *op = &c->ops[i];
        if (op->pull.reader_conn == conn) { /* its queue pairs here are dead: READs find nobody */
            release(&op->holds, TD_HOLD_READER);
            op->pull.reader_conn = 0;
            op_check_stopped(c, i);
        }
        if (op->conn != conn || !op_is_live(op)) continue;
        if (how == TD_XFER_LOST || ++op->tries.n_lost >= TD_XFER_ATTEMPTS_MAX ||
            op->attempt >= 15) {
            op->conn = 0; /* nobody is there to be told */
            op_end(c, i, true, status, reason, false);
        } else {
            op_stop(c, i, true);
        }
    }
}

/* What was given up is held by this connection. *until_ns: how long it may be; 0: begins now. The
 * owner closes one connection at a time; the next tick names the next. */
static void tick_grace(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn, uint64_t *until_ns)
{
    if (!*until_ns) *until_ns = now_ns + RETIRE_GRACE * c->orphan_grace_ns;
    if (now_ns < *until_ns)
        due_by(c, *until_ns);
    else if (c->stuck_conn && c->stuck_conn != conn)
        due_by(c, 1);
    else
        c->stuck_conn = conn;
}

/* Quarantines that are over, windows that a silent writer loses, and a slot that was given up whose
 * writer does not retire, or whose windows or READs this side's own queue pairs do not end. */
static void tick_nic(struct td_xfer_core *c, uint64_t now_ns, uint32_t id)
{
    struct td_xfer_slot *s = &c->slots[id];
    const uint32_t of_conn =
        TD_HELD(TD_HOLD_WRITER) | TD_HELD(TD_HOLD_WINDOWS) | TD_HELD(TD_HOLD_NIC);
    bool live = td_xfer_held(&s->holds, TD_HOLD_WRITER);
    bool given_up = s->state == TD_SLOT_REVOKING || s->state == TD_SLOT_FAILED;
    if (given_up && s->holds.reasons & of_conn)
        tick_grace(c, now_ns, s->nic.writer_conn, &s->nic.retire_ns);
    if (given_up && live && td_xfer_held(&s->holds, TD_HOLD_WINDOWS)) {
        if (!s->nic.evict_ns) s->nic.evict_ns = now_ns + c->orphan_grace_ns;
        if (now_ns < s->nic.evict_ns) due_by(c, s->nic.evict_ns);
    }
    if (live || !td_xfer_held(&s->holds, TD_HOLD_QUARANTINE)) return;
    if (now_ns < s->nic.quarantine_ns) {
        due_by(c, s->nic.quarantine_ns);
        return;
    }
    release(&s->holds, TD_HOLD_QUARANTINE);
    s->nic.quarantine_ns = 0;
    slot_check_retired(c, id);
    slot_check_ready(c, now_ns, id);
}

static void tick_slot(struct td_xfer_core *c, uint64_t now_ns, uint32_t id)
{
    struct td_xfer_slot *s = &c->slots[id];
    if (!slot_is_live(s)) return;
    if (now_ns >= s->deadline_ns) {
        slot_answer(c, id, TD_XFER_FAIL, TD_ERR_DEADLINE, "the slot's deadline passed");
        slot_fail(c, id, TD_ERR_DEADLINE,
                  s->state == TD_SLOT_ARMED ? "deadline: the sender did not come"
                                            : "deadline: the transfer was not complete");
    } else if (now_ns >= s->orphan_ns) {
        char reason[TD_XFER_REASON_MAX];
        memcpy(reason, s->reason, sizeof reason);
        slot_fail(c, id, s->status, reason);
    } else {
        due_by(c, s->deadline_ns);
        due_by(c, s->orphan_ns);
    }
}

static void tick_op(struct td_xfer_core *c, uint64_t now_ns, uint32_t id)
{
    struct td_xfer_op *op = &c->ops[id];
    if (op->state == TD_OP_STOPPING && op->holds.reasons & ~TD_HELD(TD_HOLD_IO))
        tick_grace(c, now_ns,
                   td_xfer_held(&op->holds, TD_HOLD_NIC) ? op->nic.wr_conn : op->pull.reader_conn,
                   &op->stop_ns);
    if (!op_is_live(op)) return;
    if (now_ns >= op->deadline_ns) {
        op_end(c, id, true, TD_ERR_DEADLINE, "the op's deadline passed", true);
        return;
    }
    due_by(c, op->deadline_ns);
    if (op->state != TD_OP_WAIT_CONN || !op->tries.retry_ns) return;
    if (now_ns >= op->tries.retry_ns)
        c->retry_due = true;
    else
        due_by(c, op->tries.retry_ns);
}

uint64_t td_xfer_core_tick(struct td_xfer_core *c, uint64_t now_ns)
{
    if (now_ns < c->next_tick_ns) return c->next_tick_ns;
    c->next_tick_ns = TD_NEVER_NS;
    for (uint32_t i = 0; i < c->max_slots; i++) {
        tick_nic(c, now_ns, i);
        tick_slot(c, now_ns, i);
    }
    for (uint32_t i = 0; i < c->max_ops; i++) tick_op(c, now_ns, i);
    return c->next_tick_ns;
}

int td_xfer_iov(uint8_t *base, uint64_t block_bytes, const int32_t *ids, uint64_t offset,
                size_t n_bytes, struct iovec *iov, int max, size_t *ret_n_bytes)
{
    int n = 0;
    size_t covered = 0;
    while (covered < n_bytes && n < max) {
        uint64_t block = (offset + covered) / block_bytes, in = (offset + covered) % block_bytes;
        size_t k = td_min_u64(block_bytes - in, n_bytes - covered);
        uint8_t *at = base + (uint64_t)ids[block] * block_bytes + in;
        if (n && (uint8_t *)iov[n - 1].iov_base + iov[n - 1].iov_len == at)
            iov[n - 1].iov_len += k;
        else
            iov[n++] = (struct iovec){.iov_base = at, .iov_len = k};
        covered += k;
    }
    *ret_n_bytes = covered;
    return n;
}

static size_t lists_bytes(const struct td_xfer_core *c)
{
    return ((size_t)c->max_slots + c->max_ops) * N_LISTS * TD_XFER_MAX_BLOCKS * sizeof *c->lists;
}

td_status td_xfer_core_create(struct td_xfer_core *c, uint32_t max_slots, uint32_t max_ops,
                              uint64_t orphan_grace_ns, uint32_t digest_every,
                              const struct td_xfer_core_hooks *hooks, struct td_err *err)
{
    if (max_slots < 1 || max_slots > 65536 || max_ops < 1 || max_ops > 65536)
        return td_fail(err, TD_ERR_INVALID,
                       "xfer: max_slots is %u and max_ops %u, each must be 1..65536", max_slots,
                       max_ops);
    *c = (struct td_xfer_core){.hooks = *hooks,
                               .max_slots = max_slots,
                               .max_ops = max_ops,
                               .digest_every = digest_every,
                               .orphan_grace_ns = orphan_grace_ns,
                               .next_tick_ns = TD_NEVER_NS,
                               .max_events = 2 * max_slots + max_ops};
    c->slots = calloc(max_slots, sizeof *c->slots);
    c->ops = calloc(max_ops, sizeof *c->ops);
    c->events = calloc(c->max_events, sizeof *c->events);
    /* The kernel backs these pages when a list is first used to its length. */
    c->lists = td_table_alloc(lists_bytes(c));
    bool sets = set_create(&c->fetching, max_slots) && set_create(&c->verifying, max_slots) &&
                set_create(&c->streaming, max_ops);
    if (!c->slots || !c->ops || !c->events || !c->lists || !sets) {
        td_xfer_core_destroy(c);
        return td_fail(err, TD_ERR_NOMEM, "xfer: out of memory for %u slots and %u ops", max_slots,
                       max_ops);
    }
    int32_t(*list)[TD_XFER_MAX_BLOCKS] = (int32_t(*)[TD_XFER_MAX_BLOCKS])c->lists;
    for (uint32_t i = 0; i < max_slots; i++, list += N_LISTS) {
        struct td_xfer_slot *s = &c->slots[i];
        /* no slot ever opens to a key of zeros */
        uint64_t key[2] = {hooks->random_u64(hooks->ctx), hooks->random_u64(hooks->ctx)};
        memcpy(s->key, key, sizeof s->key);
        s->generation = (uint32_t)hooks->random_u64(hooks->ctx) >> 1;
        s->dst = list[0];
        s->src = list[1];
        s->fetch.order = list[2];
        s->got = (uint32_t *)list[3];
        s->fetch.told = (uint32_t *)list[4];
        s->check.digest = (struct td_xfer_digest *)list[5]; /* and 6 */
    }
    for (uint32_t i = 0; i < max_ops; i++, list += N_LISTS) {
        c->ops[i].src = list[0];
        c->ops[i].order = list[1];
        c->ops[i].nic.dst = list[2];
        c->ops[i].nic.run = list[3];
        c->ops[i].ready = (uint32_t *)list[4];
        c->ops[i].sent.begun = (uint32_t *)list[5];
        c->ops[i].lanes.of = (uint8_t *)list[6];
    }
    return TD_OK;
}

void td_xfer_core_destroy(struct td_xfer_core *c)
{
    free(c->slots);
    free(c->ops);
    free(c->events);
    td_table_free(c->lists, lists_bytes(c));
    free(c->fetching.bits);
    free(c->verifying.bits);
    free(c->streaming.bits);
    memset(c, 0, sizeof *c);
}

void td_xfer_core_mem(struct td_xfer_core *c, uint64_t block_bytes, int32_t n_blocks)
{
    c->block_bytes = block_bytes;
    c->n_pool_blocks = n_blocks;
}
