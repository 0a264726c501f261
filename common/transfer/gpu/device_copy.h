/* device_copy.h - what device_copy.c, ring.c and ipc.c share, guarded by the endpoint's lock. */
#ifndef TD_TRANSFER_GPU_DEVICE_COPY_H
#define TD_TRANSFER_GPU_DEVICE_COPY_H

#include "common/base/device_memory.h"
#include "common/transfer/gpu/staged.h"
#include "common/transfer/shm/shm.h"

/* Buffers of one endpoint, for sending and receiving on all its connections: 32 MiB of page-locked
 * memory, whatever the number of peers. */
#define STAGE_BUFFERS 16
/* Bytes of a buffer: two full frames. A sender takes another frame into it while a full frame still
 * fits. */
#define STAGE_BYTES (2u << 20)
/* cuda-ipc: batches under way at a time, of at most FLIGHT_BYTES each. A revoked slot may have to
 * wait for all of them. */
#define PULLS 4
#define FLIGHT_BYTES (16u << 20)
#define FLIGHTS (STAGE_BUFFERS + PULLS) /* one for every buffer, and the pulls, which need none */
/* Transfers in one batch of copies: more than a sender's frames (XFER_STAGED_FRAMES), since pieces
 * of small transfers from many senders share a receiver's buffer. A full batch goes, and another
 * begins. */
#define FLIGHT_PIECES 64
/* cuda-ipc: peers that cannot open this side's memory, so that transfers to them do not offer it
 * again. The oldest is forgotten first, which costs one more offer. */
#define REFUSED_PEERS 64
#define NO_BUFFER (-1)
/* shm-staged: at most 12 buffers are lent to receivers, 4 of them to one connection, so one stopped
 * receiver leaves 8 to the others, and staged tcp always has 4. */
#define LENT_MAX 12
#define LENT_CONN_MAX 4

struct piece { /* of a flight: bytes of one slot, or (tx) a hold on one op */
    uint32_t id;
    uint64_t conn, handle, n_bytes;
    const struct xfer_control_word *word; /* cuda-ipc: shows the handle while the source is its */
};

struct flight { /* copies that were issued together and may not be complete */
    bool used, to_host;
    int32_t buffer;        /* NO_BUFFER: cuda-ipc */
    uint64_t ticket, conn; /* conn: whose staged frames these are (to_host) */
    uint32_t n;
    struct piece piece[FLIGHT_PIECES];
};

struct arrived { /* tcp, receiver: payload in the buffer that is being filled */
    struct td_xfer_frame frame;
    uint64_t conn_id, offset; /* offset: in the grant */
    uint32_t place, n_bytes;
};

struct xfer_device {
    const struct td_device_memory *memory;
    uint8_t *pinned, *digest; /* the ring; one more buffer, for digests and probes */
    int ring_fd;              /* the ring, read-only, for this host; -1: not shared */
    /* shm-staged: frames of the buffer that this connection's peer may still read */
    struct {
        uint64_t conn;
        uint32_t n;
    } lent[STAGE_BUFFERS];
    uint32_t n_lent; /* buffers */
    bool used[STAGE_BUFFERS];
    struct flight flight[FLIGHTS];
    uint32_t n_flights, n_pulls;
    struct td_device_run *runs; /* [max_runs], of the batch that is being put together */
    size_t n_runs, max_runs;
    struct {
        int32_t buffer;
        uint32_t n_bytes, n;
        struct arrived at[FLIGHT_PIECES];
    } rx;
    struct td_xfer_turns pull_turns;
    bool is_lost;
    char lost[TD_XFER_REASON_MAX];
    /* cuda-ipc. offers: the handle is good */
    bool offers;
    struct {
        struct td_xfer_device_mem mem;
        uint8_t pool[TD_DEVICE_POOL_BYTES];
    } offer;
    size_t pool_bytes; /* of offer.pool; 0: the pool is one allocation */
    uint64_t refused[REFUSED_PEERS], n_refused;
};

/* Never fails: FLIGHTS has one for every buffer, and PULLS for NO_BUFFER. */
struct flight *xfer_flight_new(struct xfer_device *d, int32_t buffer);
/* Appends a run to d->runs, or lengthens the last one when this one continues it. */
void xfer_runs_add(struct xfer_device *d, void *to, const void *from, size_t bytes);
/* issues d->runs; false: the device is lost, f's pieces are over */
bool xfer_flight_go(struct td_xfer *x, struct flight *f, enum td_device_copy kind);
void xfer_device_say_lost(struct td_xfer *x, const char *why);
/* Copies at most STAGE_BYTES from the device to d->digest and waits. No lock is needed. */
td_status xfer_device_read(const struct xfer_device *d, const void *from, size_t n_bytes,
                           struct td_err *err);
/* cuda-ipc: every batch of this connection's that is under way is waited for. */
void xfer_flights_wait(struct td_xfer *x, uint64_t conn);
td_status xfer_device_open(struct td_xfer *x, struct td_err *err); /* x->device, x->staging */
void xfer_device_close(struct td_xfer *x);                         /* waits for what is under way */

#endif
