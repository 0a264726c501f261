/* xfer_core.h - the transfer protocol without I/O: slots (receiver) and ops (sender), their generations, attempts, deadlines and terminal events.
 *
 * Nothing here reads a clock, a socket or a pool byte: time comes as now_ns, random numbers and outgoing control frames go through hooks, and
 * connections are numbers that are never used twice. A backend moves bytes between the calls:
 *
 *   receiver  rx_open, then for each payload piece place_begin -> (bytes land, no lock held) -> place_end; shm: rx_ref, copy_next -> ... -> copy_end
 *   sender    op_attach, then tx_next for the next frame; read_begin -> (bytes leave, no lock held) -> read_end
 *
 * Between *_begin and *_end the slot or op is `io`: a revoke, cancel or failure that comes then takes effect at the end of it, so no terminal
 * event is ever issued while the backend touches blocks. Only grant, revoke, submit, cancel and poll may be called in between. Source: reference design "transfer", 7.3.
 *
 * Threads: none of its own; the owner's lock is held around every call. Allocates only in create. */
#ifndef TD_XFER_CORE_H
#define TD_XFER_CORE_H

#include <sys/uio.h>

#include "common/xfer/xfer.h"
#include "common/xfer/xfer_wire.h"

#define TD_XFER_ATTEMPTS_MAX 3

enum td_xfer_slot_state {
    TD_SLOT_FREE = 0,
    TD_SLOT_ARMED,        /* waits for a sender's OPEN */
    TD_SLOT_FILLING,      /* bound to one attempt of one op on one connection */
    TD_SLOT_READY,        /* complete; the caller owns the bytes until it revokes */
    TD_SLOT_FAILED,       /* will never be ready; waits for revoke */
    TD_SLOT_REVOKING,     /* revoked while a piece was landing; FREE when it has landed */
    TD_SLOT_RETIRED,      /* SLOT_FREE is queued; the number is reusable when the event was taken */
};

enum td_xfer_op_state {
    TD_OP_FREE = 0,
    TD_OP_WAIT_CONN,      /* needs a connection */
    TD_OP_STREAMING,      /* OPEN was sent; blocks go as they are submitted */
    TD_OP_WAIT_VERDICT,   /* FINAL was sent */
    TD_OP_STOPPING,       /* terminal status is known, the backend still reads a piece */
    TD_OP_ENDED,          /* the terminal event is queued; the number is reusable when the event was taken */
};

struct td_xfer_slot {
    enum td_xfer_slot_state state;
    bool io, final_seen, completed, parked; /* completed: this generation was READY once; parked: the sender withdrew, copy nothing more */
    uint32_t generation;
    uint16_t attempt;         /* highest seen of this generation; 0 = none */
    uint8_t key[TD_XFER_KEY_BYTES];
    uint64_t user, deadline_ns, orphan_ns, first_ns, elapsed_ns;
    uint64_t conn, handle;    /* FILLING: the writer's binding */
    uint32_t op;
    enum td_xfer_path path;
    int32_t n_blocks, n_refs, copy_at;
    uint32_t copy_off;
    uint64_t bytes_got;
    int32_t *dst, *src, *order; /* [n_blocks]: destination; shm: source block or -1; order of arrival of refs */
    uint32_t *got;              /* [n_blocks]: bytes in, from the block's start */
    td_status status;
    char reason[TD_XFER_REASON_MAX];
    uint8_t note[TD_XFER_NOTE_MAX];
    size_t note_bytes;
};

struct td_xfer_op {
    enum td_xfer_op_state state;
    bool io, final, final_sent, failed;
    uint16_t attempt;
    uint64_t user, deadline_ns, first_ns, elapsed_ns, bytes_sent;
    uint64_t conn, handle;
    enum td_xfer_path path;
    struct td_xfer_grant_blob grant;
    int32_t *src, *order;     /* [n_blocks]: source block or -1; grant blocks in order of submission */
    int32_t n_queued, at;     /* order[at] is sent next, from byte `off` */
    uint32_t off;
    td_status status;
    char reason[TD_XFER_REASON_MAX];
    uint8_t note[TD_XFER_NOTE_MAX];
    size_t note_bytes;
};

struct td_xfer_core_hooks {
    void *ctx;
    uint64_t (*random_u64)(void *ctx);
    /* Queues a control frame on a connection (which may be gone). Fields slot.. length are set; conn, magic and crc are the backend's. */
    void (*send)(void *ctx, uint64_t conn, const struct td_xfer_frame *frame, const void *payload);
    /* The op's current handle is valid from now on (handle != 0) or never again (0): shm's control word. Before any terminal event. */
    void (*op_handle)(void *ctx, uint32_t op, uint64_t handle);
};

struct td_xfer_core {
    struct td_xfer_core_hooks hooks;
    uint32_t max_slots, max_ops, n_slots_used, n_ops_used;
    uint64_t orphan_grace_ns;     /* how long a slot whose connection broke waits for the next attempt */
    uint64_t block_bytes;         /* 0 until core_mem */
    int32_t n_pool_blocks;
    struct td_xfer_slot *slots;
    struct td_xfer_op *ops;
    int32_t *lists;               /* backing of all block lists */
    uint64_t next_tick_ns;        /* no deadline is due before */
    struct { uint32_t kind, id; } *events;
    uint32_t event_head, n_events, max_events;
    uint64_t n_emitted;           /* events ever queued */
    struct td_xfer_stats stats;   /* the core's part */
    uint32_t slot_hint, op_hint;
};

td_status td_xfer_core_create(struct td_xfer_core *core, uint32_t max_slots, uint32_t max_ops, uint64_t orphan_grace_ns,
                              const struct td_xfer_core_hooks *hooks, struct td_err *err);
void td_xfer_core_destroy(struct td_xfer_core *core);
void td_xfer_core_mem(struct td_xfer_core *core, uint64_t block_bytes, int32_t n_blocks);

/* --- receiver --- */
td_status td_xfer_core_grant(struct td_xfer_core *core, const int32_t *block_ids, int32_t n_blocks, uint64_t deadline_ns, uint64_t user,
                             uint32_t *ret_slot, struct td_err *err);
void td_xfer_core_revoke(struct td_xfer_core *core, uint32_t slot, const char *reason);
/* TD_OK: the key was right (answers go out by hooks.send). TD_ERR_STALE: an old grant, answered by FAIL. TD_ERR_PEER: a stranger, close it. */
td_status td_xfer_core_rx_open(struct td_xfer_core *core, uint64_t conn, enum td_xfer_path path, const struct td_xfer_frame *frame,
                               const uint8_t *key);
/* TD_OK: place the payload piece by piece. TD_ERR_STALE: read it and drop it. TD_ERR_CORRUPT: the peer broke the protocol, close it. */
td_status td_xfer_core_rx_data(struct td_xfer_core *core, uint64_t conn, const struct td_xfer_frame *frame);
bool td_xfer_core_place_begin(struct td_xfer_core *core, uint64_t conn, const struct td_xfer_frame *frame);
void td_xfer_core_place_end(struct td_xfer_core *core, uint64_t now_ns, uint32_t slot, uint64_t offset, size_t n_bytes);
td_status td_xfer_core_rx_ref(struct td_xfer_core *core, uint64_t conn, const struct td_xfer_frame *frame, uint32_t first, const int32_t *ids,
                              int32_t n, int32_t n_source_blocks);
td_status td_xfer_core_rx_final(struct td_xfer_core *core, uint64_t now_ns, uint64_t conn, const struct td_xfer_frame *frame, const uint8_t *note);
void td_xfer_core_rx_abort(struct td_xfer_core *core, uint64_t conn, const struct td_xfer_frame *frame, const char *reason);

/* shm: the next piece to copy, round-robin over the slots from *cursor; false when there is none. Marks the slot io. */
struct td_xfer_copy {
    uint32_t slot, op;
    uint64_t conn, handle;
    int32_t grant_block, n_blocks;    /* grant blocks [grant_block, +n_blocks), whose sources are slot->src */
    uint32_t offset;                  /* in the first of them; n_blocks > 1 only when 0 */
    size_t n_bytes;
};
bool td_xfer_core_copy_next(struct td_xfer_core *core, uint32_t *cursor, size_t max_bytes, int32_t max_blocks, struct td_xfer_copy *ret_copy);
/* valid: the source still belonged to the op after the copy. Invalid bytes are not counted and nothing more is copied for this attempt. */
void td_xfer_core_copy_end(struct td_xfer_core *core, uint64_t now_ns, const struct td_xfer_copy *copy, bool valid);

/* --- sender --- */
td_status td_xfer_core_op_start(struct td_xfer_core *core, const struct td_xfer_grant_blob *grant, uint64_t deadline_ns, uint64_t user,
                                uint32_t *ret_op, struct td_err *err);
td_status td_xfer_core_submit(struct td_xfer_core *core, uint64_t now_ns, uint32_t op, int32_t first, const int32_t *block_ids, int32_t n,
                              bool final, const void *note, size_t note_bytes);
void td_xfer_core_cancel(struct td_xfer_core *core, uint32_t op, const char *reason);
void td_xfer_core_op_attach(struct td_xfer_core *core, uint32_t op, uint64_t conn, enum td_xfer_path path);  /* WAIT_CONN -> STREAMING */
void td_xfer_core_op_fail(struct td_xfer_core *core, uint64_t now_ns, uint32_t op, td_status status, const char *reason);

/* The next frame for this connection, round-robin over its ops from *cursor; false when nothing is to be sent. DATA: read ret_n_blocks grant blocks
 * from ret_grant_block, starting ret_offset bytes into the first. REF, FINAL: the payload is written to ret_payload (TD_XFER_PAYLOAD_MAX). */
struct td_xfer_tx {
    struct td_xfer_frame frame;
    uint32_t op;
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
};
bool td_xfer_core_tx_next(struct td_xfer_core *core, uint64_t conn, uint32_t *cursor, int32_t max_blocks, struct td_xfer_tx *ret_tx);
bool td_xfer_core_read_begin(struct td_xfer_core *core, uint32_t op, uint64_t handle);
void td_xfer_core_read_end(struct td_xfer_core *core, uint64_t now_ns, uint32_t op, size_t n_bytes);
td_status td_xfer_core_rx_done(struct td_xfer_core *core, uint64_t now_ns, uint64_t conn, const struct td_xfer_frame *frame);
void td_xfer_core_rx_fail(struct td_xfer_core *core, uint64_t now_ns, uint64_t conn, const struct td_xfer_frame *frame, const char *reason);

/* --- both --- */
/* The connection is gone for good. retry: it broke under way, so ops may try another one and slots wait a moment for that. */
void td_xfer_core_conn_lost(struct td_xfer_core *core, uint64_t now_ns, uint64_t conn, td_status status, const char *reason, bool retry);
/* Applies deadlines; returns when it must be called next (TD_NEVER_NS: no deadline stands). */
uint64_t td_xfer_core_tick(struct td_xfer_core *core, uint64_t now_ns);
/* Takes up to max queued events. */
size_t td_xfer_core_poll(struct td_xfer_core *core, struct td_xfer_event *events, size_t max);

/* iov over the bytes [offset, offset + n_bytes) of a grant whose i-th block is ids[i], at most max entries; returns the count and the bytes covered. */
int td_xfer_iov(uint8_t *base, uint64_t block_bytes, const int32_t *ids, uint64_t offset, size_t n_bytes, struct iovec *iov, int max,
                size_t *ret_n_bytes);

#endif
