/* protocol.h - the transfer protocol without I/O: slots (receiver) and ops (sender), their
 * generations, attempts, deadlines and terminal events.
 *
 * Nothing here reads a clock, a socket or a pool byte: time comes as now_ns, random numbers and
 * outgoing control frames go through hooks, and connections are numbers that are never used twice.
 * A backend moves bytes between the calls:
 *
 *   receiver  rx_open, then for each payload piece place_begin -> (bytes land, no lock held) ->
 *             place_end; shm: rx_ref, copy_next -> ... -> copy_end
 *   sender    op_attach, then tx_next for the next frame; read_begin -> (bytes leave, no lock held)
 *             -> read_end; tx_done at a frame's end
 *   rdma      receiver targets_of, rx_imm, conn_fenced; sender rx_targets, wr_next -> (the NIC
 *             reads and writes) -> wr_done
 *   device    receiver: rx_data and dma_begin (tcp), or rx_ref and copy_next (cuda-ipc) -> (the
 *             device copies) -> dma_end
 *   digests   sender digest_next -> (CRCs) -> digest_end; receiver verify_next -> (CRCs) ->
 *             verify_end
 *
 * In between the slot or op is held (td_xfer_hold): a revoke, cancel or failure that comes then
 * takes effect at the end of it, so no terminal event is issued while somebody touches blocks. Only
 * grant, revoke, submit, op_fail and poll may be called in between. A connection here is all that
 * stands between two peers: its sockets (lanes) and queue pairs are the backend's.
 *
 * Threads: none of its own; the owner's lock is held. Allocates only in create. */
#ifndef TD_TRANSFER_PROTOCOL_H
#define TD_TRANSFER_PROTOCOL_H

#include <sys/uio.h>

#include "common/transfer/transfer.h"
#include "common/transfer/wire.h"

#define TD_XFER_ATTEMPTS_MAX 3 /* connections that may break under one op */
#define TD_XFER_NO_LANE UINT8_MAX
/* an op whose slot has an older writer asks again after this, then twice as long, to 64 times */
#define TD_XFER_AGAIN_NS 5000000

/* How payload comes to the receiver's blocks. A path has one of these (backend.h). */
enum td_xfer_way {
    TD_XFER_WAY_NONE = 0,
    TD_XFER_BY_DATA,   /* the sender's DATA frames say what lies where, piece by piece */
    TD_XFER_BY_COPY,   /* REF names source blocks, and the receiver's CPU copies them */
    TD_XFER_BY_DEVICE, /* the same, and the receiver's device copies them */
    TD_XFER_BY_NIC,    /* the sender's NIC writes them, or the receiver's reads what REF names */
};

enum td_xfer_way td_xfer_path_way(enum td_xfer_path path); /* backends.c */

enum td_xfer_slot_state {
    TD_SLOT_FREE = 0,
    TD_SLOT_ARMED,     /* waits for a sender's OPEN */
    TD_SLOT_FILLING,   /* bound to one attempt of one op on one connection */
    TD_SLOT_VERIFYING, /* all bytes are in; waits for a quarantine, compares digests */
    TD_SLOT_READY,     /* complete; the caller owns the bytes until it revokes */
    TD_SLOT_FAILED,    /* will never be ready; waits for revoke */
    TD_SLOT_REVOKING,  /* revoked; FREE when nobody holds its blocks any more */
    TD_SLOT_RETIRED,   /* SLOT_FREE is queued; the number is reusable when the event was taken */
};

enum td_xfer_op_state {
    TD_OP_FREE = 0,
    TD_OP_WAIT_CONN,    /* needs a connection */
    TD_OP_STREAMING,    /* OPEN was sent; blocks go as they are submitted */
    TD_OP_WAIT_VERDICT, /* FINAL was sent */
    TD_OP_STOPPING,     /* terminal status is known, the backend still reads a piece */
    TD_OP_ENDED,        /* the terminal event is queued; FREE when it was taken */
};

/* Why somebody may still touch the blocks of a slot or an op; each is counted. */
enum td_xfer_hold {
    TD_HOLD_IO = 0, /* this process: a piece is landing, leaving or being checked; at most one */
    TD_HOLD_DEVICE, /* slot: copies that the device was given */
    TD_HOLD_NIC,    /* slot: READs. Op: work requests, zero-copy sends, the device's copies */
    TD_HOLD_WRITER, /* slot: the sender's NIC, until it says that it has retired or is fenced */
    TD_HOLD_QUARANTINE, /* slot: writes of a fenced NIC that are on their way through this host */
    TD_HOLD_WINDOWS,    /* slot: memory windows that are open on its blocks, or being opened */
    TD_HOLD_FLUSH,  /* slot: writes of NICs that have completed and that the device may not see */
    TD_HOLD_READER, /* op: the receiver's NIC, until its DONE or FAIL or the connection's end */
    TD_N_HOLDS,
};
#define TD_HELD(hold) (1u << (hold))

/* SLOT_READY (but for WINDOWS), SLOT_FREE and an op's end need n to be 0. */
struct td_xfer_holds {
    uint32_t n;       /* all of them */
    uint32_t reasons; /* TD_HELD of those that are not 0 */
    uint32_t of[TD_N_HOLDS];
};

static inline bool td_xfer_held(const struct td_xfer_holds *h, enum td_xfer_hold why)
{
    return h->of[why] > 0;
}

/* By this side's clock: the sender's first submit and its last, and when all was here. */
struct td_xfer_times {
    uint64_t first_ns, last_ns, end_ns;
};

/* What FINAL carries. */
struct td_xfer_note {
    uint8_t bytes[TD_XFER_NOTE_MAX];
    size_t n_bytes;
};

/* Slot: what NICs and their queue pairs have to do with it. */
struct td_xfer_slot_nic {
    uint64_t writer_conn, writer_handle; /* hold WRITER: who it is */
    /* Of a slot that is REVOKING or FAILED. If a hold WRITER, WINDOWS or NIC still stands at this
     * time, tick names writer_conn to be closed (stuck_conn); 0: not set */
    uint64_t retire_ns;
    uint64_t quarantine_ns; /* hold QUARANTINE: its end, whoever writes now */
    /* hold WINDOWS. evict_ns: when a writer that was told to stop and is silent loses them */
    uint64_t windows_conn, evict_ns;
    /* a FAIL that waits for the last READ, and where it goes; owe_conn 0: none */
    struct td_xfer_frame owe;
    uint64_t owe_conn;
    /* queue pairs that carried data, as FINAL says; those whose last word has come */
    uint32_t qps_want, qps_got;
    /* hold FLUSH: asked for when nobody writes any more */
    enum { TD_FLUSH_NONE = 0, TD_FLUSH_DUE, TD_FLUSH_RUNNING } flush;
    int32_t n_targets; /* grant blocks whose place was told */
};

/* Slot: blocks that REF named, for this side to copy or to READ. */
struct td_xfer_fetch {
    int32_t *order; /* [n_blocks]: order of arrival */
    uint32_t *told; /* [n_blocks]: bytes from the block's start that may be copied */
    int32_t n_refs, at;
    uint32_t off;                     /* in order[at], of READs */
    int32_t n_told;                   /* order[0, n_told) may be copied to their ends */
    uint64_t bytes_told, bytes_begun; /* what may be copied; what is copied or under way */
    uint64_t behind_bytes;            /* as in td_xfer_event */
    bool parked;                      /* the sender withdrew: copy nothing more */
};

/* Slot: digests that came along. */
struct td_xfer_check {
    struct td_xfer_digest *digest; /* [n_blocks] */
    int32_t n, at;                 /* digest[0, at) were compared */
    uint8_t n_bad;
};

struct td_xfer_slot {
    enum td_xfer_slot_state state;
    struct td_xfer_holds holds;
    bool final_seen, completed; /* completed: this generation was READY once */
    uint32_t generation;
    uint16_t attempt; /* highest seen of this generation; 0 = none */
    uint8_t key[TD_XFER_KEY_BYTES];
    uint64_t user, priority, deadline_ns, orphan_ns;
    uint64_t conn, handle; /* FILLING: the writer's binding */
    uint32_t op;
    enum td_xfer_path path;
    enum td_xfer_way way;
    int32_t n_blocks;
    int32_t *dst, *src; /* [n_blocks]: destination; source block that REF named, or -1 */
    uint32_t *got;      /* [n_blocks]: bytes in or under way, from the block's start */
    uint64_t bytes_got;
    struct td_xfer_times times;
    struct td_xfer_slot_nic nic;
    struct td_xfer_fetch fetch;
    struct td_xfer_check check;
    td_status status;
    char reason[TD_XFER_REASON_MAX];
    struct td_xfer_note note;
};

/* Op: its attempts. */
struct td_xfer_tries {
    bool again;                            /* STOPPING: WAIT_CONN follows */
    uint8_t n_lost, n_mismatches, n_again; /* broken connections; digests; AGAINs */
    uint64_t retry_ns;                     /* WAIT_CONN: not before */
};

/* Op: what this attempt has begun to send. */
struct td_xfer_sent {
    uint32_t *begun;       /* [n_blocks]: bytes from the block's start */
    uint64_t bytes_begun;  /* their sum */
    uint64_t behind_bytes; /* as in td_xfer_event */
    int32_t digest_at;
};

/* Op: sockets of a connection (DATA). */
struct td_xfer_op_lanes {
    uint32_t n_frames; /* DATA frames that are not wholly with the kernel */
    uint8_t *of; /* [n_blocks]: the lane that began the block and sends all of it, or NO_LANE */
    /* nothing of order[0, at) is left for this lane; other ways: lane 0 */
    struct {
        int32_t at;
        bool open;
    } lane[TD_XFER_LANES_MAX];
};

/* Op: work requests of this side's NIC. */
struct td_xfer_op_nic {
    uint64_t wr_conn;                /* hold NIC: where they are */
    uint64_t tell_conn, tell_handle; /* who is told ABORT when they have completed */
    /* bits of queue pairs: may carry data (0: all), have carried some, had the last word */
    uint32_t qps_allowed, qps_used, qps_said;
    int32_t n_targets;  /* blocks whose place the receiver has told */
    int32_t n_runs;     /* runs that TARGETS told, when each has keys of its own; else 0 */
    int32_t *dst, *run; /* [n_blocks]: the receiver's block; its run */
};

/* Op: blocks that the receiver READs. */
struct td_xfer_pull {
    int32_t n, ref_at;                   /* order[0, n) may be READ; so many of them were named */
    bool may;                            /* this attempt's connection allows it */
    uint64_t reader_conn, reader_handle; /* hold READER: who it is */
};

struct td_xfer_op {
    enum td_xfer_op_state state;
    struct td_xfer_holds holds;
    bool final, failed;
    uint16_t attempt;
    uint64_t user, priority, deadline_ns;
    /* STOPPING: the peer must have answered, and the NIC, by then; 0: not set yet */
    uint64_t stop_ns;
    uint64_t conn, handle;
    enum td_xfer_path path;
    enum td_xfer_way way;
    struct td_xfer_grant_blob grant;
    int32_t *src, *order;      /* [n_blocks]: source block or -1; in order of first submission */
    uint32_t *ready;           /* [n_blocks]: bytes from the block's start that were submitted */
    uint64_t bytes_ready;      /* their sum */
    int32_t n_queued, n_whole; /* blocks in order; order[0, n_whole) were submitted to their ends */
    struct td_xfer_times times;
    struct td_xfer_tries tries;
    struct td_xfer_sent sent;
    struct td_xfer_op_lanes lanes;
    struct td_xfer_op_nic nic;
    struct td_xfer_pull pull;
    td_status status;
    char reason[TD_XFER_REASON_MAX];
    struct td_xfer_note note;
};

/* Whose turn it is among ops or slots that have something to move. Every other turn is that of the
 * smallest ordering key, the turns between go round: so an urgent request gets at least half of the
 * connection, and any of n others waits for at most 2n turns. Zero it at first. */
struct td_xfer_turns {
    uint32_t next; /* where the round is */
    bool by_key;   /* the coming turn */
};

/* A set of slots or ops that has all those in one state, and may have others: a walk over it drops
 * the members that have left the state. */
struct td_xfer_set {
    uint64_t *bits;
    uint32_t n; /* members are below it */
};

struct td_xfer_core_hooks {
    void *ctx;
    uint64_t (*random_u64)(void *ctx);
    /* Queues a control frame on a connection, which may be gone; sets conn, magic, crc. */
    void (*send)(void *ctx, uint64_t conn, const struct td_xfer_frame *frame, const void *payload);
    /* The op's handle is valid from now on, or (0) never again, before any terminal event. */
    void (*op_handle)(void *ctx, uint32_t op, uint64_t handle);
};

struct td_xfer_core {
    struct td_xfer_core_hooks hooks;
    uint32_t max_slots, max_ops, n_slots_used, n_ops_used;
    bool flush_writes;        /* rdma: a completion does not say that the device sees the bytes */
    bool flush_due;           /* flush_begin has something to do */
    uint32_t digest_every;    /* of sent blocks; 0 none */
    bool retry_due;           /* tick found an op whose retry_ns has come */
    uint64_t stuck_conn;      /* tick: its peer does not retire, close it; 0: none */
    uint64_t orphan_grace_ns; /* how long a slot that was cut waits for the next attempt */
    uint64_t block_bytes;     /* 0 until core_mem */
    int32_t n_pool_blocks;
    struct td_xfer_slot *slots;
    struct td_xfer_op *ops;
    int32_t *lists;        /* backing of all block lists */
    uint64_t next_tick_ns; /* no deadline is due before */
    struct {
        uint32_t kind, id;
    } * events;
    uint32_t event_head, n_events, max_events;
    uint64_t n_emitted;         /* events ever queued */
    struct td_xfer_stats stats; /* the core's part */
    uint32_t slot_hint, op_hint;
    struct td_xfer_set fetching, verifying; /* slots: with blocks to fetch; VERIFYING */
    struct td_xfer_set streaming;           /* ops: STREAMING */
};

td_status td_xfer_core_create(struct td_xfer_core *c, uint32_t max_slots, uint32_t max_ops,
                              uint64_t orphan_grace_ns, uint32_t digest_every,
                              const struct td_xfer_core_hooks *hooks, struct td_err *err);
void td_xfer_core_destroy(struct td_xfer_core *c);
void td_xfer_core_mem(struct td_xfer_core *c, uint64_t block_bytes, int32_t n_blocks);

/* A frame that the core gives to be sent. */
struct td_xfer_tx {
    struct td_xfer_frame frame;
    uint32_t op;
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
};

/* rdma: of one work request. */
struct td_xfer_wr_limits {
    uint64_t max_bytes;
    int32_t max_pieces, src_region, dst_region;
};

/* --- receiver --- */
td_status td_xfer_core_grant(struct td_xfer_core *c, const int32_t *block_ids, int32_t n_blocks,
                             uint64_t deadline_ns, uint64_t user, uint32_t *ret_slot,
                             struct td_err *err);
void td_xfer_core_revoke(struct td_xfer_core *c, uint32_t slot, const char *reason);
/* TD_OK: the key was right. TD_ERR_STALE: an old grant, answered. TD_ERR_PEER: close it. */
td_status td_xfer_core_rx_open(struct td_xfer_core *c, uint64_t conn, enum td_xfer_path path,
                               const struct td_xfer_frame *f, const uint8_t *key);
/* TD_OK: place the payload piece by piece. TD_ERR_STALE: drop it. TD_ERR_CORRUPT: close it. */
td_status td_xfer_core_rx_data(struct td_xfer_core *c, uint64_t conn,
                               const struct td_xfer_frame *f);
bool td_xfer_core_place_begin(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f);
void td_xfer_core_place_end(struct td_xfer_core *c, uint64_t now_ns, uint32_t slot, size_t n_bytes);
/* Device memory: bytes of this frame are about to be copied into the slot's blocks; false: it is
 * not theirs any more, issue nothing. Holds it (DEVICE) until dma_end. */
bool td_xfer_core_dma_begin(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f);
/* Is this frame of the slot's bound attempt? */
bool td_xfer_core_is_bound(const struct td_xfer_core *c, uint64_t conn,
                           const struct td_xfer_frame *f);
/* It is complete, or can never be. TD_OK: the bytes count, if the slot is still of that binding.
 * TD_ERR_STALE: the source was not the op's any more, nothing more is copied for this attempt.
 * Else: the device failed, and so does the slot, for `reason`. */
void td_xfer_core_dma_end(struct td_xfer_core *c, uint64_t now_ns, uint32_t slot, uint64_t conn,
                          uint64_t handle, uint64_t n_bytes, td_status status, const char *reason);
td_status td_xfer_core_rx_ref(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f,
                              uint32_t first, const int32_t *ids, int32_t n,
                              int32_t n_source_blocks);
/* clock_us: what the sender's clock shows now, for the times in the frame. */
td_status td_xfer_core_rx_final(struct td_xfer_core *c, uint64_t now_ns, uint32_t clock_us,
                                uint64_t conn, const struct td_xfer_frame *f, const uint8_t *note);
void td_xfer_core_rx_abort(struct td_xfer_core *c, uint64_t conn, const struct td_xfer_frame *f,
                           const char *reason);

td_status td_xfer_core_rx_digest(struct td_xfer_core *c, uint64_t conn,
                                 const struct td_xfer_frame *f,
                                 const struct td_xfer_digest *digests, int32_t n);

/* rdma: where the slot's granted blocks are, for the writer; false when it has told, or does not
 * ask. The payload is td_xfer_run[], at most max_runs of them, none of which crosses a multiple of
 * `region` pool blocks (0: no matter). */
bool td_xfer_core_targets_of(struct td_xfer_core *c, uint32_t slot, int32_t max_runs,
                             int32_t region, struct td_xfer_tx *ret_tx);
/* Blocks of the run that begins at grant block `at`. */
int32_t td_xfer_run_length(const int32_t *dst, int32_t n_blocks, int32_t at, int32_t region);

/* rdma: windows are opened for the bound attempt: holds the slot until windows_ended. */
void td_xfer_core_windows_open(struct td_xfer_core *c, uint32_t slot);
/* They must be ended: the writer has retired, or was told to stop and did not for a grace. */
bool td_xfer_core_windows_due(const struct td_xfer_core *c, uint64_t now_ns, uint32_t slot);
/* None of them lets a byte through any more: whoever had the keys has retired. */
void td_xfer_core_windows_ended(struct td_xfer_core *c, uint32_t slot);
/* rdma: a last word completed on queue pair qp: all that it carried before is in. */
void td_xfer_core_rx_imm(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn, uint32_t qp,
                         uint32_t imm);
/* rdma: what queue pair qp of the connection may READ next; false: nothing. n_blocks source blocks
 * that lie side by side at the sender from src_block on, to slot->dst[slot->order[order_at + i]];
 * at most max_pieces of them lie apart here. Holds the slot (NIC). */
struct td_xfer_rd {
    uint32_t slot;
    int32_t order_at, n_blocks, src_block;
    uint64_t offset, n_bytes;
};
bool td_xfer_core_rd_next(struct td_xfer_core *c, uint64_t conn, struct td_xfer_turns *turns,
                          const struct td_xfer_wr_limits *l, struct td_xfer_rd *ret_rd);
void td_xfer_core_rd_done(struct td_xfer_core *c, uint64_t now_ns, uint32_t slot, uint64_t n_bytes,
                          bool ok);
/* rdma: this side's queue pairs of the connection are dead and drained, so nothing that was not
 * placed already can land; until_ns: quarantine. */
void td_xfer_core_conn_fenced(struct td_xfer_core *c, uint64_t conn, uint64_t until_ns);

/* With flush_writes. begin: marks the slots whose bytes from NICs are to be made visible to the
 * device now, and into which nobody writes any more; returns how many. end: that is over. reason
 * not NULL: nobody knows whether the device sees them, so those that are VERIFYING fail. */
uint32_t td_xfer_core_flush_begin(struct td_xfer_core *c);
void td_xfer_core_flush_end(struct td_xfer_core *c, uint64_t now_ns, const char *reason);

/* Compare digest[first, first + n) of the slot. bad: one that differs, or -1. Holds it (IO). */
struct td_xfer_verify {
    uint32_t slot;
    int32_t first, n;
};
bool td_xfer_core_verify_next(struct td_xfer_core *c, uint32_t *cursor, uint64_t max_bytes,
                              struct td_xfer_verify *ret_verify);
void td_xfer_core_verify_end(struct td_xfer_core *c, uint64_t now_ns,
                             const struct td_xfer_verify *verify, int32_t bad);

/* The next piece to copy on this way, of the slot whose turn it is: at most max_piece bytes of one
 * block, or whole neighbours; false when there is none. BY_COPY: holds the slot (IO) until
 * copy_end. BY_DEVICE: a copy that runs by itself, many may be under way; holds the slot (DEVICE)
 * until dma_end. */
struct td_xfer_copy {
    uint32_t slot, op;
    uint64_t conn, handle;
    int32_t grant_block, n_blocks; /* [grant_block, +n_blocks), from slot->src */
    uint32_t offset;               /* in the first; not 0: it is the only one */
    size_t n_bytes;
};
bool td_xfer_core_copy_next(struct td_xfer_core *c, struct td_xfer_turns *turns,
                            enum td_xfer_way way, size_t max_piece, size_t max_bytes,
                            int32_t max_blocks, struct td_xfer_copy *ret_copy);
/* slots with more of it; one that has just failed may count, too */
uint32_t td_xfer_core_n_fetching(const struct td_xfer_core *c);
/* valid: the source was still the op's after the copy; else nothing counts any more. */
void td_xfer_core_copy_end(struct td_xfer_core *c, uint64_t now_ns, const struct td_xfer_copy *copy,
                           bool valid);

/* --- sender --- */
td_status td_xfer_core_op_start(struct td_xfer_core *c, const struct td_xfer_grant_blob *grant,
                                uint64_t deadline_ns, uint64_t user, uint32_t *ret_op,
                                struct td_err *err);
td_status td_xfer_core_submit(struct td_xfer_core *c, uint64_t now_ns, uint32_t op, int32_t first,
                              const int32_t *block_ids, int32_t n, bool final, const void *note,
                              size_t note_bytes);
td_status td_xfer_core_submit_part(struct td_xfer_core *c, uint64_t now_ns, uint32_t op,
                                   int32_t first, const int32_t *block_ids, int32_t n,
                                   uint64_t offset, uint64_t n_bytes);
td_status td_xfer_core_submit_pull(struct td_xfer_core *c, uint64_t now_ns, uint32_t op,
                                   int32_t first, const int32_t *block_ids, int32_t n);
/* WAIT_CONN -> STREAMING. can_pull: rdma, and the receiver may READ from this side's pool. */
void td_xfer_core_op_attach(struct td_xfer_core *c, uint32_t op, uint64_t conn,
                            enum td_xfer_path path, bool can_pull);
/* rdma: a request of this op, or of this slot's READs, failed in a way that another try cannot
 * mend: it ends alone, its other end is told; conn_lost follows. False: ended already. */
bool td_xfer_core_op_give_up(struct td_xfer_core *c, uint32_t op, td_status status,
                             const char *reason);
bool td_xfer_core_slot_give_up(struct td_xfer_core *c, uint32_t slot, td_status status,
                               const char *reason);
/* rdma, after op_attach: data goes by these queue pairs alone (bits; 0: by all). */
void td_xfer_core_op_limit(struct td_xfer_core *c, uint32_t op, uint32_t qps);
/* WAIT_CONN: the op is not to be attached before then. */
void td_xfer_core_op_wait(struct td_xfer_core *c, uint32_t op, uint64_t until_ns);
/* Cancels it, or it cannot go on: ends it and tells its receiver, if it is attached to one. */
void td_xfer_core_op_fail(struct td_xfer_core *c, uint32_t op, td_status status,
                          const char *reason);
/* The op is on this connection, or something of it still is. */
bool td_xfer_core_op_is_on(const struct td_xfer_core *c, uint32_t op, uint64_t conn);

/* The next frame for this lane of the connection, of the op whose turn it is; false when nothing is
 * to be sent. Lanes other than 0 carry DATA and FINAL only, after an OPEN of their own, and each
 * block stays on one lane; with digests FINAL stays on lane 0, behind them. DATA: frame.length
 * bytes at frame.offset of the grant. REF, FINAL: with the payload. */
bool td_xfer_core_tx_next(struct td_xfer_core *c, uint64_t conn, uint32_t lane,
                          struct td_xfer_turns *turns, int32_t max_blocks,
                          struct td_xfer_tx *ret_tx);
/* tcp: every byte of a DATA frame has left. */
void td_xfer_core_tx_done(struct td_xfer_core *c, uint32_t op, uint64_t handle);

/* rdma: places of grant blocks [f->offset, ...), in order. own_keys: what lies in two runs is never
 * one request; they are numbered from op->n_runs on. TD_ERR_CORRUPT: close it. */
td_status td_xfer_core_rx_targets(struct td_xfer_core *c, uint64_t conn,
                                  const struct td_xfer_frame *f, const struct td_xfer_run *runs,
                                  int32_t n, int32_t n_peer_blocks, bool own_keys);
/* rdma: what queue pair qp of this connection may be given next; false: nothing. Data: n_blocks
 * grant blocks, side by side at the receiver from dst_block on (offset, n_bytes: in the first),
 * from op->src[op->order[order_at + i]]; at most max_pieces of them lie apart; none crosses a
 * multiple of a region. is_imm: the last word for this queue pair; an op begins to say them only
 * when none of its queue pairs is in no_words (bits), so that two ops never wait for each other's.
 * Holds the op (NIC). */
struct td_xfer_wr {
    uint32_t op;
    uint64_t handle;
    bool is_imm;
    uint32_t imm;
    int32_t order_at, n_blocks, dst_block, run;
    uint64_t offset, n_bytes;
};
bool td_xfer_core_wr_next(struct td_xfer_core *c, uint64_t conn, uint32_t qp, uint32_t no_words,
                          struct td_xfer_turns *turns, const struct td_xfer_wr_limits *l,
                          struct td_xfer_wr *ret_wr);
/* It completed, or was flushed (ok false; conn_lost follows). */
void td_xfer_core_wr_done(struct td_xfer_core *c, uint32_t op, uint64_t n_bytes, bool ok);
/* tcp without copies: the kernel reads source blocks until wr_done, which ends each hold. Between
 * read_begin and read_end; device memory: while the op is live. */
void td_xfer_core_hold(struct td_xfer_core *c, uint32_t op);

/* CRC32C of source block src[i] goes to digest[i].crc, digest_end sends them. Holds it (IO). */
#define TD_XFER_DIGEST_BATCH 64
struct td_xfer_digest_work {
    uint32_t op;
    uint64_t handle;
    int32_t n, src[TD_XFER_DIGEST_BATCH];
    struct td_xfer_digest digest[TD_XFER_DIGEST_BATCH];
};
bool td_xfer_core_digest_next(struct td_xfer_core *c, uint64_t conn, uint64_t max_bytes,
                              struct td_xfer_digest_work *ret_work);
void td_xfer_core_digest_end(struct td_xfer_core *c, const struct td_xfer_digest_work *work);

bool td_xfer_core_read_begin(struct td_xfer_core *c, uint32_t op, uint64_t handle);
void td_xfer_core_read_end(struct td_xfer_core *c, uint32_t op, size_t n_bytes);
void td_xfer_core_rx_done(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn,
                          const struct td_xfer_frame *f);
void td_xfer_core_rx_fail(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn,
                          const struct td_xfer_frame *f, const char *reason);

/* --- both --- */
/* The connection is gone for good, and what it carried ends with it or (CUT, PARTED) gets another
 * attempt: ops try another connection, slots wait for that, longer where (PARTED) the peer is known
 * to live. */
enum td_xfer_lost { TD_XFER_LOST = 0, TD_XFER_CUT, TD_XFER_PARTED };
void td_xfer_core_conn_lost(struct td_xfer_core *c, uint64_t now_ns, uint64_t conn,
                            td_status status, const char *reason, enum td_xfer_lost how);
/* Applies deadlines; returns when it must be called next (TD_NEVER_NS: no deadline stands). */
uint64_t td_xfer_core_tick(struct td_xfer_core *c, uint64_t now_ns);
/* Takes up to max queued events. */
size_t td_xfer_core_poll(struct td_xfer_core *c, struct td_xfer_event *events, size_t max);

/* iov over bytes [offset, +n_bytes) of blocks ids[]; returns the count and the bytes covered. */
int td_xfer_iov(uint8_t *base, uint64_t block_bytes, const int32_t *ids, uint64_t offset,
                size_t n_bytes, struct iovec *iov, int max, size_t *ret_n_bytes);

#endif
