/* xfer_core.c - design.
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
 *           op_start            op_attach: OPEN            tx_next: FINAL                rx_done
 *   FREE ------------> WAIT_CONN ------------> STREAMING ------------------> WAIT_VERDICT --------> ENDED(DONE)
 *     ^                    ^    conn_lost(retry), attempt+1 |                     |                   |
 *     |                    +--------------------------------+---------------------+                   |
 *     |                              cancel, tick, rx_fail, conn_lost: from any ----> ENDED(FAILED)   |
 *     |                                              (by way of STOPPING while io)                    |
 *     +---------------------------------------- poll takes the terminal event -----------------------+
 *
 * Invariants, asserted: (1) a byte is counted only while slot, generation, attempt, handle and connection are the bound ones; (2) READY needs
 * n_blocks * block_bytes counted bytes and FINAL of the bound attempt; (3) no SLOT_FREE and no op's end while io; (4) an op's handle is
 * withdrawn before its terminal event; (5) events cannot overflow: two per slot, one per op, and numbers return to FREE by poll only. */
#include "common/xfer/xfer_core.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"

/* --- events --------------------------------------------------------------------------------------------------------------------- */

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

size_t td_xfer_core_poll(struct td_xfer_core *c, struct td_xfer_event *events, size_t max)
{
    size_t n = 0;
    for (; n < max && c->n_events; n++) {
        struct td_xfer_event *e = &events[n];
        uint32_t id = c->events[c->event_head].id;
        e->kind = (enum td_xfer_event_kind)c->events[c->event_head].kind;
        e->id = id;
        e->status = TD_OK;
        e->bytes = e->elapsed_ns = 0;
        e->note_bytes = 0;
        e->reason[0] = 0;
        c->event_head = (c->event_head + 1) % c->max_events;
        c->n_events--;
        if (e->kind == TD_XFER_OP_DONE || e->kind == TD_XFER_OP_FAILED) {
            struct td_xfer_op *op = &c->ops[id];
            TD_ASSERT(op->state == TD_OP_ENDED);
            e->user = op->user;
            e->path = op->path;
            e->status = op->status;
            e->bytes = (uint64_t)op->grant.n_blocks * c->block_bytes;
            e->elapsed_ns = op->elapsed_ns;
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
            e->elapsed_ns = slot->elapsed_ns;
            e->note_bytes = slot->note_bytes;
            memcpy(e->note, slot->note, slot->note_bytes);
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

/* --- receiver ------------------------------------------------------------------------------------------------------------------- */

static void answer(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *to, enum td_xfer_frame_type type, td_status status,
                   const char *reason)
{
    struct td_xfer_frame f = {.type = (uint8_t)type, .slot = to->slot, .generation = to->generation, .op = to->op, .attempt = to->attempt,
                              .handle = to->handle, .status = (int16_t)status, .length = reason ? (uint32_t)strlen(reason) : 0};
    c->hooks.send(c->hooks.ctx, conn, &f, reason);
}

/* Tells the bound writer how its attempt ended. */
static void slot_answer(struct td_xfer_core *c, uint32_t id, enum td_xfer_frame_type type, td_status status, const char *reason)
{
    const struct td_xfer_slot *s = &c->slots[id];
    struct td_xfer_frame to = {.slot = id, .generation = s->generation, .op = s->op, .attempt = s->attempt, .handle = s->handle};
    if (s->conn) answer(c, s->conn, &to, type, status, reason);
}

static void slot_unbind(struct td_xfer_slot *s)
{
    s->conn = 0;
    s->handle = 0;
}

static void slot_retire(struct td_xfer_core *c, uint32_t id)
{
    TD_ASSERT(!c->slots[id].io); /* invariant 3 */
    c->slots[id].state = TD_SLOT_RETIRED;
    emit(c, TD_XFER_SLOT_FREE, id);
}

static void slot_fail(struct td_xfer_core *c, uint32_t id, td_status status, const char *reason)
{
    struct td_xfer_slot *s = &c->slots[id];
    TD_ASSERT(s->state == TD_SLOT_ARMED || s->state == TD_SLOT_FILLING);
    s->state = TD_SLOT_FAILED;
    s->status = status;
    set_reason(s->reason, reason);
    slot_unbind(s);
    c->stats.n_failed++;
    emit(c, TD_XFER_SLOT_FAILED, id);
}

td_status td_xfer_core_grant(struct td_xfer_core *c, const int32_t *block_ids, int32_t n_blocks, uint64_t deadline_ns, uint64_t user,
                             uint32_t *ret_slot, struct td_err *err)
{
    if (!c->block_bytes) return td_fail(err, TD_ERR_INVALID, "grant: no memory was added");
    if (n_blocks < 0 || n_blocks > TD_XFER_MAX_BLOCKS)
        return td_fail(err, TD_ERR_INVALID, "grant: n_blocks is %d, must be 0..%d", n_blocks, TD_XFER_MAX_BLOCKS);
    for (int32_t i = 0; i < n_blocks; i++)
        if (block_ids[i] < 0 || block_ids[i] >= c->n_pool_blocks)
            return td_fail(err, TD_ERR_INVALID, "grant: block_ids[%d] is %d, must be 0..%d", i, block_ids[i], c->n_pool_blocks - 1);
    if (c->n_slots_used == c->max_slots) return td_fail(err, TD_ERR_AGAIN, "grant: all %u slots are in use", c->max_slots);

    uint32_t id = c->slot_hint;
    while (c->slots[id].state != TD_SLOT_FREE) id = (id + 1) % c->max_slots;
    c->slot_hint = (id + 1) % c->max_slots;
    struct td_xfer_slot *s = &c->slots[id];
    struct td_xfer_slot fresh = {.state = TD_SLOT_ARMED, .generation = s->generation + 1, .user = user, .deadline_ns = deadline_ns,
                                 .orphan_ns = TD_NEVER_NS, .n_blocks = n_blocks, .dst = s->dst, .src = s->src, .order = s->order, .got = s->got};
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
    switch (s->state) {
    case TD_SLOT_FREE:
    case TD_SLOT_REVOKING:
    case TD_SLOT_RETIRED: return;
    case TD_SLOT_READY: break;
    case TD_SLOT_FAILED: break; /* keeps its own reason */
    case TD_SLOT_ARMED:
    case TD_SLOT_FILLING:
        s->status = TD_ERR_CANCELLED;
        set_reason(s->reason, reason);
        slot_answer(c, id, TD_XFER_FAIL, TD_ERR_CANCELLED, s->reason);
        break;
    }
    slot_unbind(s);
    if (s->io) s->state = TD_SLOT_REVOKING;
    else slot_retire(c, id);
}

td_status td_xfer_core_rx_open(struct td_xfer_core *c, uint64_t conn, enum td_xfer_path path, const struct td_xfer_frame *f, const uint8_t *key)
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
    if (f->attempt <= s->attempt) {
        c->stats.n_stale_frames++;
        answer(c, conn, f, TD_XFER_FAIL, TD_ERR_STALE, "a later attempt has the slot");
        return TD_OK;
    }
    switch (s->state) {
    case TD_SLOT_ARMED:
    case TD_SLOT_FILLING: break;
    case TD_SLOT_FREE:
    case TD_SLOT_READY:
    case TD_SLOT_FAILED:
    case TD_SLOT_REVOKING:
    case TD_SLOT_RETIRED:
        answer(c, conn, f, TD_XFER_FAIL, s->status ? s->status : TD_ERR_STALE, s->reason[0] ? s->reason : "the slot was given back");
        return TD_OK;
    }
    TD_ASSERT(!s->io);
    s->state = TD_SLOT_FILLING;
    s->attempt = f->attempt;
    s->conn = conn;
    s->handle = f->handle;
    s->op = f->op;
    s->path = path;
    s->orphan_ns = TD_NEVER_NS;
    s->bytes_got = 0;
    s->n_refs = s->copy_at = 0;
    s->copy_off = 0;
    s->final_seen = s->parked = false;
    s->status = TD_OK; /* an earlier attempt's */
    s->reason[0] = 0;
    for (int32_t i = 0; i < s->n_blocks; i++) {
        s->got[i] = 0;
        s->src[i] = -1;
    }
    return TD_OK;
}

static bool slot_is_bound(const struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f)
{
    if (f->slot >= c->max_slots) return false;
    const struct td_xfer_slot *s = &c->slots[f->slot];
    return s->state == TD_SLOT_FILLING && s->conn == conn && s->generation == f->generation && s->attempt == f->attempt && s->handle == f->handle;
}

td_status td_xfer_core_rx_data(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f)
{
    if (!slot_is_bound(c, conn, f)) {
        c->stats.n_stale_frames++;
        return TD_ERR_STALE;
    }
    struct td_xfer_slot *s = &c->slots[f->slot];
    uint64_t total = (uint64_t)s->n_blocks * c->block_bytes;
    if (s->path != TD_XFER_PATH_TCP || s->final_seen || f->offset > total || f->length > total - f->offset) return TD_ERR_CORRUPT;
    /* Each byte once, each block from its start: a repeated or reordered frame within an attempt would count bytes twice. */
    for (uint64_t at = f->offset; at < f->offset + f->length; at = (at / c->block_bytes + 1) * c->block_bytes)
        if (s->got[at / c->block_bytes] != at % c->block_bytes) return TD_ERR_CORRUPT;
    return TD_OK;
}

bool td_xfer_core_place_begin(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f)
{
    if (!slot_is_bound(c, conn, f)) return false;
    TD_ASSERT(!c->slots[f->slot].io);
    c->slots[f->slot].io = true;
    return true;
}

static void slot_check_ready(struct td_xfer_core *c, uint64_t now_ns, uint32_t id)
{
    struct td_xfer_slot *s = &c->slots[id];
    if (s->state != TD_SLOT_FILLING || !s->final_seen || s->bytes_got != (uint64_t)s->n_blocks * c->block_bytes) return;
    s->state = TD_SLOT_READY;
    s->completed = true;
    s->elapsed_ns = s->first_ns ? now_ns - s->first_ns : 0;
    slot_answer(c, id, TD_XFER_DONE, TD_OK, NULL);
    slot_unbind(s);
    c->stats.n_done++;
    emit(c, TD_XFER_SLOT_READY, id);
}

/* Ends a piece: false when the slot was taken away meanwhile, so that the bytes count for nothing. */
static bool slot_io_end(struct td_xfer_core *c, uint32_t id)
{
    struct td_xfer_slot *s = &c->slots[id];
    TD_ASSERT(s->io);
    s->io = false;
    if (s->state == TD_SLOT_REVOKING) slot_retire(c, id);
    return s->state == TD_SLOT_FILLING;
}

static void count_bytes(struct td_xfer_core *c, uint64_t now_ns, struct td_xfer_slot *s, uint64_t offset, size_t n_bytes)
{
    if (!s->first_ns) s->first_ns = now_ns;
    s->bytes_got += n_bytes;
    c->stats.bytes_received += n_bytes;
    c->stats.bytes_by_path[s->path] += n_bytes;
    while (n_bytes) {
        uint64_t block = offset / c->block_bytes, in = offset % c->block_bytes;
        size_t n = c->block_bytes - in < n_bytes ? (size_t)(c->block_bytes - in) : n_bytes;
        TD_ASSERT(s->got[block] == in);
        s->got[block] += (uint32_t)n;
        offset += n;
        n_bytes -= n;
    }
}

void td_xfer_core_place_end(struct td_xfer_core *c, uint64_t now_ns, uint32_t id, uint64_t offset, size_t n_bytes)
{
    if (!slot_io_end(c, id) || !n_bytes) return;
    count_bytes(c, now_ns, &c->slots[id], offset, n_bytes);
    slot_check_ready(c, now_ns, id);
}

td_status td_xfer_core_rx_ref(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f, uint32_t first, const int32_t *ids, int32_t n,
                              int32_t n_source_blocks)
{
    if (!slot_is_bound(c, conn, f)) {
        c->stats.n_stale_frames++;
        return TD_ERR_STALE;
    }
    struct td_xfer_slot *s = &c->slots[f->slot];
    if (s->path != TD_XFER_PATH_SHM || s->final_seen || n < 1 || first > (uint32_t)s->n_blocks || n > s->n_blocks - (int32_t)first)
        return TD_ERR_CORRUPT;
    for (int32_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= n_source_blocks || s->src[first + (uint32_t)i] >= 0) return TD_ERR_CORRUPT;
    for (int32_t i = 0; i < n; i++) {
        s->src[first + (uint32_t)i] = ids[i];
        s->order[s->n_refs++] = (int32_t)first + i;
    }
    return TD_OK;
}

bool td_xfer_core_copy_next(struct td_xfer_core *c, uint32_t *cursor, size_t max_bytes, int32_t max_blocks, struct td_xfer_copy *ret_copy)
{
    for (uint32_t k = 0; k < c->max_slots; k++) {
        uint32_t id = (*cursor + k) % c->max_slots;
        struct td_xfer_slot *s = &c->slots[id];
        if (s->state != TD_SLOT_FILLING || s->path != TD_XFER_PATH_SHM || s->parked || s->copy_at == s->n_refs) continue;
        TD_ASSERT(!s->io);
        s->io = true;
        *cursor = (id + 1) % c->max_slots;
        struct td_xfer_copy copy = {.slot = id, .op = s->op, .conn = s->conn, .handle = s->handle, .grant_block = s->order[s->copy_at],
                                    .n_blocks = 1, .offset = s->copy_off};
        uint64_t left = c->block_bytes - s->copy_off;
        copy.n_bytes = left < max_bytes ? (size_t)left : max_bytes;
        /* Whole neighbours ride along. */
        while (s->copy_off == 0 && copy.n_bytes == copy.n_blocks * c->block_bytes && copy.n_blocks < max_blocks &&
               s->copy_at + copy.n_blocks < s->n_refs && s->order[s->copy_at + copy.n_blocks] == copy.grant_block + copy.n_blocks &&
               copy.n_bytes + c->block_bytes <= max_bytes) {
            copy.n_blocks++;
            copy.n_bytes += c->block_bytes;
        }
        *ret_copy = copy;
        return true;
    }
    return false;
}

void td_xfer_core_copy_end(struct td_xfer_core *c, uint64_t now_ns, const struct td_xfer_copy *copy, bool valid)
{
    struct td_xfer_slot *s = &c->slots[copy->slot];
    if (!slot_io_end(c, copy->slot)) return;
    TD_ASSERT(s->handle == copy->handle && s->conn == copy->conn);
    if (!valid) { /* the sender's ABORT, or the end of its connection, follows and says why */
        s->parked = true;
        c->stats.n_stale_frames++;
        return;
    }
    count_bytes(c, now_ns, s, (uint64_t)copy->grant_block * c->block_bytes + copy->offset, copy->n_bytes);
    s->copy_off += (uint32_t)copy->n_bytes;
    while (s->copy_off >= c->block_bytes) {
        s->copy_off -= (uint32_t)c->block_bytes;
        s->copy_at++;
    }
    slot_check_ready(c, now_ns, copy->slot);
}

td_status td_xfer_core_rx_final(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn, const struct td_xfer_frame *f, const uint8_t *note)
{
    if (!slot_is_bound(c, conn, f)) {
        c->stats.n_stale_frames++;
        return TD_ERR_STALE;
    }
    struct td_xfer_slot *s = &c->slots[f->slot];
    uint64_t total = (uint64_t)s->n_blocks * c->block_bytes;
    bool complete = s->path == TD_XFER_PATH_SHM ? s->n_refs == s->n_blocks : s->bytes_got == total;
    if (s->final_seen || f->offset != total || !complete) return TD_ERR_CORRUPT; /* FINAL comes last on an ordered connection */
    s->final_seen = true;
    s->note_bytes = f->length;
    memcpy(s->note, note, f->length);
    slot_check_ready(c, now_ns, f->slot);
    return TD_OK;
}

void td_xfer_core_rx_abort(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f, const char *reason)
{
    if (!slot_is_bound(c, conn, f)) {
        c->stats.n_stale_frames++;
        return;
    }
    char text[TD_XFER_REASON_MAX];
    snprintf(text, sizeof text, "sender: %.140s", reason);
    slot_fail(c, f->slot, f->status ? (td_status)f->status : TD_ERR_CANCELLED, text);
}

/* --- sender --------------------------------------------------------------------------------------------------------------------- */

static void op_ended(struct td_xfer_core *c, uint32_t id)
{
    struct td_xfer_op *op = &c->ops[id];
    TD_ASSERT(!op->io); /* invariant 3 */
    op->state = TD_OP_ENDED;
    if (op->failed) c->stats.n_failed++;
    else c->stats.n_done++;
    emit(c, op->failed ? TD_XFER_OP_FAILED : TD_XFER_OP_DONE, id);
}

static void op_end(struct td_xfer_core *c, uint32_t id, bool failed, td_status status, const char *reason)
{
    struct td_xfer_op *op = &c->ops[id];
    op->failed = failed;
    op->status = status;
    set_reason(op->reason, reason);
    c->hooks.op_handle(c->hooks.ctx, id, 0); /* invariant 4 */
    op->conn = 0;
    op->handle = 0;
    if (op->io) op->state = TD_OP_STOPPING;
    else op_ended(c, id);
}

/* Ends the op and tells the receiver, when there is one, that no byte of this attempt follows. */
static void op_abort(struct td_xfer_core *c, uint32_t id, td_status status, const char *reason)
{
    struct td_xfer_op *op = &c->ops[id];
    if (op->conn) {
        struct td_xfer_frame f = {.type = TD_XFER_ABORT, .slot = op->grant.slot, .generation = op->grant.generation, .op = id,
                                  .attempt = op->attempt, .handle = op->handle, .status = (int16_t)status, .length = (uint32_t)strlen(reason)};
        c->hooks.send(c->hooks.ctx, op->conn, &f, reason);
    }
    op_end(c, id, true, status, reason);
}

static bool op_is_live(const struct td_xfer_op *op)
{
    return op->state == TD_OP_WAIT_CONN || op->state == TD_OP_STREAMING || op->state == TD_OP_WAIT_VERDICT;
}

td_status td_xfer_core_op_start(struct td_xfer_core *c, const struct td_xfer_grant_blob *grant, uint64_t deadline_ns, uint64_t user, uint32_t *ret_op,
                                struct td_err *err)
{
    if (!c->block_bytes) return td_fail(err, TD_ERR_INVALID, "op: no memory was added");
    if (grant->block_bytes != c->block_bytes)
        return td_fail(err, TD_ERR_UNSUPPORTED, "grant: blocks of %" PRIu64 " bytes, ours have %" PRIu64, grant->block_bytes, c->block_bytes);
    if (c->n_ops_used == c->max_ops) return td_fail(err, TD_ERR_AGAIN, "op: all %u ops are in use", c->max_ops);

    uint32_t id = c->op_hint;
    while (c->ops[id].state != TD_OP_FREE) id = (id + 1) % c->max_ops;
    c->op_hint = (id + 1) % c->max_ops;
    struct td_xfer_op *op = &c->ops[id];
    struct td_xfer_op fresh = {.state = TD_OP_WAIT_CONN, .user = user, .deadline_ns = deadline_ns, .grant = *grant, .src = op->src,
                               .order = op->order};
    *op = fresh;
    for (int32_t i = 0; i < grant->n_blocks; i++) op->src[i] = -1;
    c->n_ops_used++;
    due_by(c, deadline_ns);
    *ret_op = id;
    return TD_OK;
}

td_status td_xfer_core_submit(struct td_xfer_core *c, uint64_t now_ns, uint32_t id, int32_t first, const int32_t *block_ids, int32_t n, bool final,
                              const void *note, size_t note_bytes)
{
    if (id >= c->max_ops || c->ops[id].state == TD_OP_FREE) return TD_ERR_NOT_FOUND;
    struct td_xfer_op *op = &c->ops[id];
    if (!op_is_live(op)) return op->status ? op->status : TD_ERR_INVALID; /* failed already; the event says why */
    if (op->final || n < 0 || first < 0 || first > op->grant.n_blocks || n > op->grant.n_blocks - first) return TD_ERR_INVALID;
    if (note_bytes > TD_XFER_NOTE_MAX || (note_bytes && !final)) return TD_ERR_INVALID;
    if (final && op->n_queued + n != op->grant.n_blocks) return TD_ERR_INVALID; /* the slot could never be ready */
    for (int32_t i = 0; i < n; i++)
        if (block_ids[i] < 0 || block_ids[i] >= c->n_pool_blocks || op->src[first + i] >= 0) return TD_ERR_INVALID;
    for (int32_t i = 0; i < n; i++) {
        op->src[first + i] = block_ids[i];
        op->order[op->n_queued++] = first + i;
    }
    if (!op->first_ns) op->first_ns = now_ns;
    op->final = final;
    if (final && note_bytes) memcpy(op->note, note, note_bytes);
    op->note_bytes = final ? note_bytes : 0;
    return TD_OK;
}

void td_xfer_core_cancel(struct td_xfer_core *c, uint32_t id, const char *reason)
{
    if (id >= c->max_ops || !op_is_live(&c->ops[id])) return;
    char text[TD_XFER_REASON_MAX];
    set_reason(text, reason);
    op_abort(c, id, TD_ERR_CANCELLED, text);
}

void td_xfer_core_op_fail(struct td_xfer_core *c, uint64_t now_ns, uint32_t id, td_status status, const char *reason)
{
    (void)now_ns;
    if (op_is_live(&c->ops[id])) op_end(c, id, true, status, reason);
}

void td_xfer_core_op_attach(struct td_xfer_core *c, uint32_t id, uint64_t conn, enum td_xfer_path path)
{
    struct td_xfer_op *op = &c->ops[id];
    TD_ASSERT(op->state == TD_OP_WAIT_CONN && !op->io);
    op->state = TD_OP_STREAMING;
    op->conn = conn;
    op->path = path;
    op->attempt++;
    op->at = 0;
    op->off = 0;
    op->final_sent = false;
    do op->handle = c->hooks.random_u64(c->hooks.ctx);
    while (op->handle == 0);
    c->hooks.op_handle(c->hooks.ctx, id, op->handle);
    struct td_xfer_frame f = {.type = TD_XFER_OPEN, .slot = op->grant.slot, .generation = op->grant.generation, .op = id, .attempt = op->attempt,
                              .handle = op->handle, .length = TD_XFER_KEY_BYTES};
    c->hooks.send(c->hooks.ctx, conn, &f, op->grant.key);
}

bool td_xfer_core_tx_next(struct td_xfer_core *c, uint64_t conn, uint32_t *cursor, int32_t max_blocks, struct td_xfer_tx *tx)
{
    for (uint32_t k = 0; k < c->max_ops; k++) {
        uint32_t id = (*cursor + k) % c->max_ops;
        struct td_xfer_op *op = &c->ops[id];
        if (op->state != TD_OP_STREAMING || op->conn != conn) continue;
        bool data = op->at < op->n_queued, final = op->final && !op->final_sent;
        if (!data && !final) continue;
        *cursor = (id + 1) % c->max_ops;
        tx->op = id;
        tx->frame = (struct td_xfer_frame){.slot = op->grant.slot, .generation = op->grant.generation, .op = id, .attempt = op->attempt,
                                           .handle = op->handle};
        if (data && op->path == TD_XFER_PATH_SHM) {
            int32_t n = 0;
            uint32_t first = (uint32_t)op->order[op->at];
            memcpy(tx->payload, &first, 4);
            do memcpy(tx->payload + 4 + 4 * n, &op->src[first + (uint32_t)n], 4), n++;
            while (n < TD_XFER_REF_MAX && op->at + n < op->n_queued && op->order[op->at + n] == (int32_t)first + n);
            op->at += n;
            tx->frame.type = TD_XFER_REF;
            tx->frame.length = 4 + 4 * (uint32_t)n;
            op->bytes_sent += (uint64_t)n * c->block_bytes;
            c->stats.bytes_sent += (uint64_t)n * c->block_bytes;
            c->stats.bytes_by_path[TD_XFER_PATH_SHM] += (uint64_t)n * c->block_bytes;
        } else if (data) {
            int32_t n = 1;
            uint64_t left = c->block_bytes - op->off;
            tx->frame.type = TD_XFER_DATA;
            tx->frame.offset = (uint64_t)op->order[op->at] * c->block_bytes + op->off;
            tx->frame.length = left < TD_XFER_FRAME_DATA_MAX ? (uint32_t)left : TD_XFER_FRAME_DATA_MAX;
            if (tx->frame.length < left) {
                op->off += tx->frame.length;
                return true;
            }
            while (n < max_blocks && op->at + n < op->n_queued && op->order[op->at + n] == op->order[op->at] + n &&
                   tx->frame.length + c->block_bytes <= TD_XFER_FRAME_DATA_MAX) {
                tx->frame.length += (uint32_t)c->block_bytes;
                n++;
            }
            op->at += n;
            op->off = 0;
        } else {
            tx->frame.type = TD_XFER_FINAL;
            tx->frame.offset = (uint64_t)op->grant.n_blocks * c->block_bytes;
            tx->frame.length = (uint32_t)op->note_bytes;
            memcpy(tx->payload, op->note, op->note_bytes);
            op->final_sent = true;
            op->state = TD_OP_WAIT_VERDICT;
        }
        return true;
    }
    return false;
}

bool td_xfer_core_read_begin(struct td_xfer_core *c, uint32_t id, uint64_t handle)
{
    struct td_xfer_op *op = &c->ops[id];
    if (!op_is_live(op) || op->handle != handle) return false;
    TD_ASSERT(!op->io);
    op->io = true;
    return true;
}

void td_xfer_core_read_end(struct td_xfer_core *c, uint64_t now_ns, uint32_t id, size_t n_bytes)
{
    (void)now_ns;
    struct td_xfer_op *op = &c->ops[id];
    TD_ASSERT(op->io);
    op->io = false;
    op->bytes_sent += n_bytes;
    c->stats.bytes_sent += n_bytes;
    c->stats.bytes_by_path[op->path] += n_bytes;
    if (op->state == TD_OP_STOPPING) op_ended(c, id);
}

static bool op_is_bound(const struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f)
{
    if (f->op >= c->max_ops) return false;
    const struct td_xfer_op *op = &c->ops[f->op];
    return op_is_live(op) && op->conn == conn && conn && op->handle == f->handle && op->attempt == f->attempt && op->grant.slot == f->slot &&
           op->grant.generation == f->generation;
}

td_status td_xfer_core_rx_done(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn, const struct td_xfer_frame *f)
{
    if (!op_is_bound(c, conn, f)) {
        c->stats.n_stale_frames++;
        return TD_ERR_STALE;
    }
    struct td_xfer_op *op = &c->ops[f->op];
    if (!op->final) return TD_ERR_CORRUPT; /* nobody can have every byte before FINAL was said, in this attempt or an earlier one */
    op->elapsed_ns = now_ns - op->first_ns;
    op_end(c, f->op, false, TD_OK, "");
    return TD_OK;
}

void td_xfer_core_rx_fail(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn, const struct td_xfer_frame *f, const char *reason)
{
    (void)now_ns;
    if (!op_is_bound(c, conn, f)) {
        c->stats.n_stale_frames++;
        return;
    }
    char text[TD_XFER_REASON_MAX];
    snprintf(text, sizeof text, "receiver: %.140s", reason);
    op_end(c, f->op, true, f->status ? (td_status)f->status : TD_ERR_PEER, text);
}

/* --- both ----------------------------------------------------------------------------------------------------------------------- */

void td_xfer_core_conn_lost(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn, td_status status, const char *reason, bool retry)
{
    for (uint32_t i = 0; i < c->max_slots; i++) {
        struct td_xfer_slot *s = &c->slots[i];
        if (s->conn != conn || s->state != TD_SLOT_FILLING) continue;
        if (!retry) {
            slot_fail(c, i, status, reason);
            continue;
        }
        s->state = TD_SLOT_ARMED;
        slot_unbind(s);
        s->status = status;
        set_reason(s->reason, reason);
        s->orphan_ns = now_ns + c->orphan_grace_ns;
        due_by(c, s->orphan_ns);
    }
    for (uint32_t i = 0; i < c->max_ops; i++) {
        struct td_xfer_op *op = &c->ops[i];
        if (op->conn != conn || !op_is_live(op)) continue;
        if (!retry || op->attempt >= TD_XFER_ATTEMPTS_MAX) {
            op_end(c, i, true, status, reason);
            continue;
        }
        c->hooks.op_handle(c->hooks.ctx, i, 0);
        op->state = TD_OP_WAIT_CONN;
        op->conn = 0;
        op->handle = 0;
    }
}

uint64_t td_xfer_core_tick(struct td_xfer_core *c, uint64_t now_ns)
{
    if (now_ns < c->next_tick_ns) return c->next_tick_ns;
    c->next_tick_ns = TD_NEVER_NS;
    for (uint32_t i = 0; i < c->max_slots; i++) {
        struct td_xfer_slot *s = &c->slots[i];
        if (s->state != TD_SLOT_ARMED && s->state != TD_SLOT_FILLING) continue;
        if (now_ns >= s->deadline_ns) {
            slot_answer(c, i, TD_XFER_FAIL, TD_ERR_DEADLINE, "the slot's deadline passed");
            slot_fail(c, i, TD_ERR_DEADLINE, s->state == TD_SLOT_ARMED ? "deadline: the sender did not come" : "deadline: the transfer was not complete");
        } else if (now_ns >= s->orphan_ns) {
            char reason[TD_XFER_REASON_MAX];
            memcpy(reason, s->reason, sizeof reason);
            slot_fail(c, i, s->status, reason);
        } else {
            due_by(c, s->deadline_ns);
            due_by(c, s->orphan_ns);
        }
    }
    for (uint32_t i = 0; i < c->max_ops; i++) {
        struct td_xfer_op *op = &c->ops[i];
        if (!op_is_live(op)) continue;
        if (now_ns >= op->deadline_ns) op_abort(c, i, TD_ERR_DEADLINE, "the op's deadline passed");
        else due_by(c, op->deadline_ns);
    }
    return c->next_tick_ns;
}

int td_xfer_iov(uint8_t *base, uint64_t block_bytes, const int32_t *ids, uint64_t offset, size_t n_bytes, struct iovec *iov, int max,
                size_t *ret_n_bytes)
{
    int n = 0;
    size_t covered = 0;
    while (covered < n_bytes && n < max) {
        uint64_t block = (offset + covered) / block_bytes, in = (offset + covered) % block_bytes;
        size_t k = block_bytes - in < n_bytes - covered ? (size_t)(block_bytes - in) : n_bytes - covered;
        uint8_t *at = base + (uint64_t)ids[block] * block_bytes + in;
        if (n && (uint8_t *)iov[n - 1].iov_base + iov[n - 1].iov_len == at) iov[n - 1].iov_len += k;
        else iov[n++] = (struct iovec){.iov_base = at, .iov_len = k};
        covered += k;
    }
    *ret_n_bytes = covered;
    return n;
}

td_status td_xfer_core_create(struct td_xfer_core *c, uint32_t max_slots, uint32_t max_ops, uint64_t orphan_grace_ns,
                              const struct td_xfer_core_hooks *hooks, struct td_err *err)
{
    if (max_slots < 1 || max_slots > 65536 || max_ops < 1 || max_ops > 65536)
        return td_fail(err, TD_ERR_INVALID, "xfer: max_slots is %u and max_ops %u, each must be 1..65536", max_slots, max_ops);
    *c = (struct td_xfer_core){.hooks = *hooks, .max_slots = max_slots, .max_ops = max_ops, .orphan_grace_ns = orphan_grace_ns,
                               .next_tick_ns = TD_NEVER_NS, .max_events = 2 * max_slots + max_ops};
    c->slots = calloc(max_slots, sizeof *c->slots);
    c->ops = calloc(max_ops, sizeof *c->ops);
    c->events = calloc(c->max_events, sizeof *c->events);
    /* The kernel backs these pages when a list is first used to its length. */
    c->lists = calloc(((size_t)max_slots * 4 + (size_t)max_ops * 2) * TD_XFER_MAX_BLOCKS, sizeof *c->lists);
    if (!c->slots || !c->ops || !c->events || !c->lists) {
        td_xfer_core_destroy(c);
        return td_fail(err, TD_ERR_NOMEM, "xfer: out of memory for %u slots and %u ops", max_slots, max_ops);
    }
    int32_t *list = c->lists;
    for (uint32_t i = 0; i < max_slots; i++) {
        struct td_xfer_slot *s = &c->slots[i];
        uint64_t key[2] = {hooks->random_u64(hooks->ctx), hooks->random_u64(hooks->ctx)}; /* no slot ever opens to a key of zeros */
        memcpy(s->key, key, sizeof s->key);
        s->generation = (uint32_t)hooks->random_u64(hooks->ctx) >> 1;
        s->dst = list;
        s->src = list + TD_XFER_MAX_BLOCKS;
        s->order = list + 2 * TD_XFER_MAX_BLOCKS;
        s->got = (uint32_t *)(list + 3 * TD_XFER_MAX_BLOCKS);
        list += 4 * TD_XFER_MAX_BLOCKS;
    }
    for (uint32_t i = 0; i < max_ops; i++) {
        c->ops[i].src = list;
        c->ops[i].order = list + TD_XFER_MAX_BLOCKS;
        list += 2 * TD_XFER_MAX_BLOCKS;
    }
    return TD_OK;
}

void td_xfer_core_destroy(struct td_xfer_core *c)
{
    free(c->slots);
    free(c->ops);
    free(c->events);
    free(c->lists);
    memset(c, 0, sizeof *c);
}

void td_xfer_core_mem(struct td_xfer_core *c, uint64_t block_bytes, int32_t n_blocks)
{
    c->block_bytes = block_bytes;
    c->n_pool_blocks = n_blocks;
}
