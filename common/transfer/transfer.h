/* transfer.h - KV transfer: moving the blocks of one request from a prefill worker's pool into
 * blocks a decode worker has granted.
 *
 * The receiver (D) arms a slot with td_xfer_grant: it names its own destination blocks and gets an
 * opaque grant blob, which travels through the router to the sender (P). P submits blocks as it
 * computes them (chunk by chunk); the last submit carries FINAL and a small note (the first token).
 * D sees SLOT_READY only when every granted byte is counted and the final message of the current
 * attempt was seen (I2).
 *
 * Retirement, not time-outs: a revoked slot becomes SLOT_FREE only when no write to it can land any
 * more (README.md, "When are blocks free?"). Until then its blocks must not be reused. Source
 * blocks must not be reused until the op's terminal event (DONE or FAILED).
 *
 * Device memory (config.memory): the pool lies where no instruction of this process can reach, and
 * the device copies by itself. A block may be submitted when what computed it is known to be
 * complete (its step was waited for, or an event after it was seen): copies are ordered with
 * nothing else. SLOT_READY comes when the copies to the granted blocks are complete, so what is
 * launched afterwards reads them; SLOT_FREE and an op's terminal event wait for copies that were
 * issued.
 *
 * One progress thread per td_xfer does all I/O; the public functions are thread-safe and never
 * block on the network; events are queued and `hooks.wake` (any thread, must not call back) rings.
 * Path choice is explicit, logged in events and stats. */
#ifndef TD_TRANSFER_TRANSFER_H
#define TD_TRANSFER_TRANSFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/mem.h"
#include "common/base/status.h"

struct td_xfer;
struct td_xfer_conn;
struct td_verbs;
struct td_device_memory;
struct td_xfer_rdma_config;
struct td_xfer_tls_config;
struct td_cluster_secret;

#define TD_XFER_PROBE_BYTES 64  /* of a pool in device memory, behind its blocks */
#define TD_XFER_NOTE_MAX 1024   /* bytes of the note that FINAL carries */
#define TD_XFER_BLOB_MAX 65536  /* a grant blob is never larger */
#define TD_XFER_MAX_BLOCKS 8192 /* blocks per grant */

/* SHM_STAGED: on one host, a sender's pool in device memory through a ring of page-locked memory
 * that both map. Who names SHM allows it, too. */
enum td_xfer_path {
    TD_XFER_PATH_AUTO = 0,
    TD_XFER_PATH_TCP = 1,
    TD_XFER_PATH_SHM = 2,
    TD_XFER_PATH_RDMA = 3,
    TD_XFER_PATH_CUDA_IPC = 4,
    TD_XFER_PATH_SHM_STAGED = 5,
    TD_XFER_N_PATHS
};

/* Over the unix socket of this host, to this user's processes alone: in the clear, whatever the
 * configuration says of TLS. */
bool td_xfer_path_is_local(enum td_xfer_path path);
const char *td_xfer_path_name(enum td_xfer_path path); /* as options have it */
/* With this path configured: uses_verbs: a provider of verbs (config.rdma) may be of use (rdma,
 * auto); needs_verbs: nothing can be sent without one (rdma). */
bool td_xfer_path_uses_verbs(enum td_xfer_path path);
bool td_xfer_path_needs_verbs(enum td_xfer_path path);
bool td_xfer_path_needs_device(enum td_xfer_path path); /* not between two pools of hosts */

enum td_xfer_zerocopy { TD_XFER_ZEROCOPY_AUTO = 0, TD_XFER_ZEROCOPY_ON, TD_XFER_ZEROCOPY_OFF };

struct td_xfer_hooks {
    void (*wake)(void *ctx); /* an event is queued; any thread, must only ring */
    void *ctx;
    uint64_t (*now_ns)(void *ctx); /* NULL = td_now_ns; tests inject */
    uint64_t (*random_u64)(void *ctx);
};

struct td_xfer_config {
    const char *instance;        /* worker's name, for messages */
    uint64_t incarnation;        /* random per process start */
    uint64_t layout_hash;        /* td_kv_layout_hash; grants of another are refused by name */
    const char *listen_host;     /* address to bind the data port to: "127.0.0.1", "0.0.0.0" */
    uint16_t listen_port;        /* 0 = any */
    const char *advertise_host;  /* address peers dial; NULL = listen_host */
    enum td_xfer_path path;      /* AUTO: shm when both sides share a host, else rdma when
                                    both have it, else tcp, each proved by a probe; a device
                                    that cannot serve is told (td_xfer_poll_path) and left
                                    out. Naming one refuses to fall back */
    uint32_t max_slots, max_ops; /* pools sized at boot */
    uint32_t peer_timeout_ms;    /* a peer that is silent for so long is dead; 0 = 2000 */
    uint32_t tcp_lanes;          /* sockets per peer on tcp, 1..8; 0 = 4 */
    enum td_xfer_zerocopy tcp_zerocopy; /* AUTO: to other hosts, while it saves a copy */
    uint32_t digest_every;              /* one of so many blocks carries a CRC32C; 0 none, 1 all */
    /* What moves bytes of the pool when it lies in device memory; NULL: it is the host's. Must
     * outlive the endpoint. Then paths are cuda-ipc (both pools in device memory, one host),
     * rdma (where the device's memory can be registered) and, staged through page-locked memory,
     * shm and tcp */
    const struct td_device_memory *memory;
    const struct td_xfer_rdma_config *rdma; /* NULL: no RDMA; borrowed until open returns */
    /* tls.h. NULL: the data port is in the clear. Else every socket but shm's speaks TLS from
     * its first byte, and grants of sides that do not are refused, as theirs refuse ours. rdma:
     * the socket is encrypted, blocks go from memory to memory in the clear. Borrowed until open
     * returns */
    const struct td_xfer_tls_config *tls;
    /* cluster_secret.h. NULL: none. Else every connection, on one host, too, begins with both
     * sides' proof that they know the secret: who does not prove it gets no further than HELLO,
     * and grants of sides that ask for none are refused, as theirs refuse ours. Borrowed until
     * close; may be reloaded */
    struct td_cluster_secret *secret;
    struct td_xfer_hooks hooks;
};

/* May what a NIC wrote to device memory be used when its completion has come? AUTO: as the
 * driver says (OWNER: yes, for one rail), else each rail that brought data READs a piece of that
 * memory through itself first, which goes behind its writes. ON, OFF: whatever the driver says. */
enum td_xfer_gpu_flush { TD_XFER_GPU_FLUSH_AUTO = 0, TD_XFER_GPU_FLUSH_ON, TD_XFER_GPU_FLUSH_OFF };

/* Queue pairs and devices. Zero means the default. Codes of time-outs and retries are those of the
 * InfiniBand Architecture Specification, volume 1 (ibv_modify_qp(3) lists them). */
struct td_xfer_rdma_config {
    const struct td_verbs *verbs; /* the provider; must outlive the endpoint */
    const char *devices;    /* "mlx5_0,mlx5_1": rails in this order; NULL or "": all active ones */
    int32_t gid_index;      /* -1: ranked choice */
    uint8_t port;           /* 1 */
    uint8_t qps_per_rail;   /* 2; 4 where a port has 800 Gb/s or more */
    uint8_t timeout, retry; /* codes: 16 (4.096 us x 2^16), 7 */
    uint8_t rnr_retry;      /* code + 1; 0 is 8 (for ever), 1 makes a credit bug loud */
    int16_t traffic_class;  /* 0: the port's own, else 106 on RoCE v2 (DSCP 26); -1: 0 */
    uint8_t service_level;
    uint32_t srq_peers;       /* a shared receive queue from so many peers on: 64; 1: always */
    uint64_t bytes_in_flight; /* per queue pair, 8 MiB */
    bool pull;                /* sender: the receiver may READ blocks of td_xfer_submit_pull */
    enum td_xfer_gpu_flush gpu_flush; /* pool in device memory */
    bool windows;                     /* blocks are written through memory windows of type 2,
                                         which end with the slot (rdma.c); every device must have
                                         them, or open fails */
};

td_status td_xfer_open(const struct td_xfer_config *config, struct td_xfer **ret_x,
                       struct td_err *err);
/* Aborts everything, joins the thread, frees. Undelivered events are dropped. */
void td_xfer_close(struct td_xfer *x);
uint16_t td_xfer_port(const struct td_xfer *x);
/* Reads the TLS files again if they changed, for the connections to come (td_xfer_tls_reload).
 * Cheap, any thread; TD_OK without TLS. */
td_status td_xfer_tls_reload_files(struct td_xfer *x, bool *ret_loaded, struct td_err *err);

/* The KV pool's arena (borrowed until close): once, before grants and submits. arena->memfd >= 0
 * makes shm possible. Device memory: an allocation of the device, memfd -1; with
 * TD_XFER_PROBE_BYTES behind the blocks cuda-ipc is possible. */
td_status td_xfer_mem_add(struct td_xfer *x, const struct td_arena *arena, size_t block_bytes,
                          int32_t n_blocks, struct td_err *err);

/* --- receiver --------------------------------------------------------------------------------- */

/* Arms a slot for these destination blocks (the sender's i-th block lands in block_ids[i]).
 * Writes the grant blob (at most TD_XFER_BLOB_MAX). The slot is armed before this returns. user
 * is echoed in events. TD_ERR_AGAIN: all slots are in use (retry after a SLOT_FREE). */
td_status td_xfer_grant(struct td_xfer *x, const int32_t *block_ids, int32_t n_blocks,
                        uint64_t deadline_ns, uint64_t user, uint32_t *ret_slot, uint8_t *blob,
                        size_t *ret_blob_bytes, struct td_err *err);
/* Starts retirement; idempotent; SLOT_FREE follows always, soon (it may already be queued).
 * After SLOT_READY this is how the slot is given back: then SLOT_FREE is immediate (memory
 * windows: after they have ended), and the blocks stay the caller's. */
void td_xfer_revoke(struct td_xfer *x, uint32_t slot, const char *reason);

/* --- sender ----------------------------------------------------------------------------------- */

/* Starts an op on a grant blob (outside bytes: validated). Connects when needed, does not wait
 * for it. n_blocks of the grant is returned. TD_ERR_INVALID / CORRUPT / UNSUPPORTED with the
 * reason; TD_ERR_AGAIN when max_ops are live. */
td_status td_xfer_op_start(struct td_xfer *x, const uint8_t *blob, size_t blob_bytes,
                           uint64_t deadline_ns, uint64_t user, uint32_t *ret_op,
                           int32_t *ret_n_blocks, struct td_err *err);
/* The ordering key of the request that a live op or slot is for: smaller goes first, 0 (as they
 * begin) before all others. Every other turn of the connection is the smallest key's, the turns
 * between go round, so nobody starves and a small transfer never waits for a large one to end.
 * Returns the key that they have then; 0: the index is out of range. */
uint64_t td_xfer_op_priority(struct td_xfer *x, uint32_t op, uint64_t priority);
uint64_t td_xfer_slot_priority(struct td_xfer *x, uint32_t slot, uint64_t priority);
/* Sends source blocks block_ids[0..n) as grant blocks [first, first + n). May be called many
 * times, each grant block once, any order. final: nothing follows; note (at most
 * TD_XFER_NOTE_MAX bytes, copied) is delivered with SLOT_READY. n may be 0 then. */
td_status td_xfer_submit(struct td_xfer *x, uint32_t op, int32_t first, const int32_t *block_ids,
                         int32_t n, bool final, const void *note, size_t note_bytes);
/* The same for bytes [offset, offset + n_bytes) of each of these blocks: layers that are
 * computed while later ones are not. A block's bytes come in order, each once, always from the
 * same source block (else TD_ERR_INVALID, and nothing has changed); td_xfer_submit is all of it
 * at once. Never final: that comes with n 0, after every byte. Sent as it comes, like whole
 * blocks; SLOT_READY still means every byte of every block. */
td_status td_xfer_submit_part(struct td_xfer *x, uint32_t op, int32_t first,
                              const int32_t *block_ids, int32_t n, uint64_t offset,
                              uint64_t n_bytes);
/* td_xfer_submit for blocks that were there before anything was computed (prefix hits), before
 * any other submit: on rdma, when this side's configuration and the receiver's devices allow,
 * the receiver READs them itself; else they are sent like all others. */
td_status td_xfer_submit_pull(struct td_xfer *x, uint32_t op, int32_t first,
                              const int32_t *block_ids, int32_t n);
/* Stops posting; OP_FAILED(TD_ERR_CANCELLED) follows when the source blocks are no longer read
 * by anybody. Idempotent. */
void td_xfer_cancel(struct td_xfer *x, uint32_t op, const char *reason);
/* The same for an op that nobody needs, because its request has ended without it, well or as one
 * that cannot be answered: both sides' failed events have TD_ERR_FINISHED. A receiver of an older
 * version takes it for a cancel. */
void td_xfer_finished(struct td_xfer *x, uint32_t op);

/* --- events ----------------------------------------------------------------------------------- */

enum td_xfer_event_kind {
    TD_XFER_SLOT_READY = 1, /* D: all blocks are in; note/note_bytes valid */
    TD_XFER_SLOT_FAILED,    /* D: will never be ready, for status and reason: revoke it */
    TD_XFER_SLOT_FREE,      /* D: terminal: the blocks and the slot number may be reused */
    TD_XFER_OP_DONE,        /* P: terminal: the receiver has every byte */
    TD_XFER_OP_FAILED,      /* P: terminal: status and reason; source blocks may be reused */
    TD_XFER_PATH_CHOSEN,    /* only from td_xfer_poll_path */
    TD_XFER_PEER_REFUSED,   /* likewise */
};

struct td_xfer_event {
    enum td_xfer_event_kind kind;
    uint32_t id; /* slot or op; PEER_REFUSED: how many more were turned away since the last one */
    uint64_t user;
    td_status status;
    enum td_xfer_path path;
    uint64_t bytes; /* READY, DONE: payload */
    /* READY, DONE: the sender's first submit to completion, and its final one to completion. The
     * sender measures to DONE; the receiver knows how far the sender's clock is from its own but
     * for the shortest flight of a frame, which is the only time left out. Up to 35 minutes. */
    uint64_t elapsed_ns, tail_ns;
    uint64_t at_ns; /* READY, DONE: when that was, on this side's clock */
    /* READY, DONE: bytes of other transfers that waited on this side when this one's last byte
     * was begun here, so that its turn came before theirs. 0 on the side that does not move the
     * bytes: tcp, shm-staged and rdma's WRITEs are the sender's, shm, cuda-ipc and rdma's READs
     * the receiver's. */
    uint64_t behind_bytes;
    char reason[160];
    uint8_t note[TD_XFER_NOTE_MAX];
    size_t note_bytes;
};

/* About a peer and no slot or op, for the log: status TD_OK: a connection to the peer that
 * `reason` names stands on `path`; else `path`, or one of its devices, could not be had, for
 * that reason, and another is taken. PEER_REFUSED: somebody broke the protocol or had no right
 * to be here and was turned away, `reason` says who and why; one each second at most. False:
 * nothing new. Wakes nobody; the oldest of 16 are dropped. Any thread. */
bool td_xfer_poll_path(struct td_xfer *x, struct td_xfer_event *ret_event);

/* Takes up to max events; never blocks. One consumer thread. */
size_t td_xfer_poll(struct td_xfer *x, struct td_xfer_event *events, size_t max);

struct td_xfer_stats {
    /* n_lanes: sockets beyond the first of each connection */
    uint32_t n_slots_used, n_ops_used, n_conns, n_lanes;
    uint64_t bytes_sent, bytes_received, n_done, n_failed, n_stale_frames, n_bad_frames,
        n_refused_peers;
    uint64_t bytes_by_path[TD_XFER_N_PATHS];
    uint32_t conns_by_path[TD_XFER_N_PATHS]; /* READY now */
    uint64_t bytes_pulled;                   /* received by READs of this side's */
    uint64_t n_fallbacks;                    /* connections that failed on a better path */
    uint64_t n_digests, n_digest_mismatches; /* blocks checked here */
    uint64_t n_fenced;                       /* slots whose writer was fenced: it did not retire */
    uint64_t n_zerocopy;                     /* tcp sends that were not copied */
    uint64_t n_work_requests, n_doorbells, n_rail_errors, n_async_events;
    uint64_t n_windows;      /* memory windows opened for grants, on every queue pair */
    uint64_t n_wide_windows; /* grants whose windows cover blocks of others, too */
    uint64_t n_gpu_flushes;  /* READs behind NICs' writes to device memory */
    uint64_t n_evicted;      /* slots whose silent writer lost its windows */
};
void td_xfer_stats(struct td_xfer *x, struct td_xfer_stats *ret_stats);

#endif
