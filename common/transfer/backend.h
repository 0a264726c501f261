/* backend.h - a path of the KV transfer (tcp, shm, rdma, cuda-ipc, shm-staged) as a table of calls.
 *
 * endpoint.c, connect.c and protocol.c know connections, frames and transfers; they know no path.
 * What differs from path to path lies in the path's own folder: one static table of this type, and
 * one struct for what a connection needs beside the common part (conn_bytes of it, zeroed, at
 * c->own). backends.c lists the tables in order of preference. README.md, "Adding a path", says
 * what a new folder needs.
 *
 * Threads: every call runs on the progress thread and holds the endpoint's lock, but where it says
 * otherwise. A call that drops the lock says so. NULL: the path has nothing to do there. */
#ifndef TD_TRANSFER_BACKEND_H
#define TD_TRANSFER_BACKEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/transfer/protocol.h"

/* Where a peer is: the data port, and on the same host the name of its unix socket. */
struct td_xfer_address {
    const char *shm_name, *host;
    uint16_t port;
};

/* One endpoint's part of a path. open, mem_add, close and fits: the caller's thread. */
struct td_backend_side {
    /* Listens, opens devices. A path that the configuration does not allow opens nothing. */
    td_status (*open)(struct td_xfer *x, const struct td_xfer_config *config, struct td_err *err);
    /* The pool is known. A path that cannot use it fails if it is the only one allowed; else it
     * reports the reason (td_xfer_poll_path) and is not offered. */
    td_status (*mem_add)(struct td_xfer *x, const struct td_arena *arena, struct td_err *err);
    /* Connections are gone, the progress thread has ended. Half-opened is fine. */
    void (*close)(struct td_xfer *x);
    void (*advertise)(const struct td_xfer *x, struct td_xfer_grant_blob *grant); /* in grants */
    void (*stats)(const struct td_xfer *x, struct td_xfer_stats *stats);
    /* The op's source blocks may be read by who shows this handle; 0: by nobody. Any thread. */
    void (*op_handle)(struct td_xfer *x, uint32_t op, uint64_t handle);
};

/* Which path a transfer takes. */
struct td_backend_choice {
    /* One side names this path. Can it ever serve this grant? Else the error says why. */
    td_status (*fits)(const struct td_xfer *x, const struct td_xfer_grant_blob *g,
                      struct td_err *err);
    /* Initiator: can it be tried for this grant now? Else why[], if worth telling. Any thread. */
    bool (*offers)(const struct td_xfer *x, const struct td_xfer_grant_blob *g,
                   char why[TD_XFER_REASON_MAX]);
    /* Acceptor: can a HELLO that asks for it be let in? Else why[] says why not. */
    bool (*admits)(const struct td_xfer *x, char why[TD_XFER_REASON_MAX]);
};

/* One connection. All but init and close: it stands, or its set-up is under way. */
struct td_backend_conn {
    /* A socket to this address, connected or on its way; -1 with errno. */
    int (*dial)(struct td_xfer *x, const struct td_xfer_address *to, bool *ret_connected);
    /* A socket that was accepted for this path; false with errno: turn it away. */
    bool (*accepted)(const struct td_xfer *x, int fd);
    void (*init)(struct td_xfer_conn *c);
    /* HELLO let it in: the initiator's set-up frames go out; false: reason. May drop the lock. */
    bool (*open_conn)(struct td_xfer *x, struct td_xfer_conn *c, char reason[TD_XFER_REASON_MAX]);
    /* May a frame of this type come now? Asked for frames that only some paths have. */
    bool (*expects)(const struct td_xfer_conn *c, uint8_t type);
    /* Such a frame has come. May close c. */
    void (*on_frame)(struct td_xfer *x, struct td_xfer_conn *c);
    void (*ready)(struct td_xfer *x, struct td_xfer_conn *c); /* it stands now */
    /* Asked now and then of an initiator's connection that is READY: dial another one now, which
     * takes its place if is_better says so? */
    bool (*wants_better)(struct td_xfer *x, struct td_xfer_conn *c, uint64_t now_ns);
    bool (*is_better)(const struct td_xfer_conn *c, const struct td_xfer_conn *old);
    const char *(*late)(struct td_xfer *x, struct td_xfer_conn *c); /* SETUP took too long: why */
    bool (*may_pull)(const struct td_xfer_conn *c); /* may the receiver READ from this side? */
    void (*attached)(struct td_xfer *x, struct td_xfer_conn *c, uint32_t op); /* any thread */
    /* Receiver. Is what OPEN of this op needs here? False: refuse it. */
    bool (*may_open)(struct td_xfer_conn *c, uint32_t op);
    int32_t (*n_source_blocks)(const struct td_xfer *x, const struct td_xfer_conn *c); /* for REF */
    /* Called first when the connection ends: stops what reads or writes blocks without the socket
     * (rdma: its queue pairs are fenced). Drops the lock. */
    void (*fence)(struct td_xfer *x, struct td_xfer_conn *c);
    void (*close)(struct td_xfer *x, struct td_xfer_conn *c); /* before its socket is closed */
};

/* A connection's bytes. */
struct td_backend_bytes {
    /* Up to n bytes of frames, like recv; NULL: from the socket or its TLS channel. */
    ssize_t (*read)(struct td_xfer_conn *c, void *to, size_t n);
    /* Payload of the DATA frame under way, like recv. Drops the lock. */
    ssize_t (*receive)(struct td_xfer *x, struct td_xfer_conn *c);
    /* Sender of DATA, in the order of their calls. May the core be asked for another frame? */
    bool (*room)(struct td_xfer *x, struct td_xfer_conn *c);
    /* Takes the frame that the core gave. True: there is room for another one. */
    bool (*add)(struct td_xfer *x, struct td_xfer_conn *c, struct td_xfer_tx *tx);
    /* The core has no more frames for now. True: frames that were added still wait for a copy. */
    bool (*go)(struct td_xfer *x, struct td_xfer_conn *c);
    /* Like send(2), of the frame under way. EINPROGRESS: its bytes are still being copied from the
     * device. Drops the lock. */
    ssize_t (*send)(struct td_xfer *x, struct td_xfer_conn *c);
    /* What goes without the socket: as much as there is room for. May close c. */
    void (*post)(struct td_xfer *x, struct td_xfer_conn *c);
    /* Receiver: the next frame that it owes its sender. */
    bool (*answer)(struct td_xfer *x, struct td_xfer_conn *c, struct td_xfer_tx *tx);
    void (*reap)(struct td_xfer *x, struct td_xfer_conn *c); /* the socket's error queue */
};

/* The progress thread's turn. */
struct td_backend_turn {
    bool (*poll)(struct td_xfer *x); /* completions, events; may close connections. True: any */
    bool (*work)(struct td_xfer *x, uint64_t now_ns); /* what it has to move. True: some */
    uint64_t (*due)(const struct td_xfer *x); /* when work is due whatever comes; TD_NEVER_NS */
    bool (*sleep)(struct td_xfer *x);         /* before it sleeps; false: something came, do not */
    void (*woke)(struct td_xfer *x, uint64_t slept_ns, bool by_channel);
};

struct td_transfer_backend {
    enum td_xfer_path path; /* its number: in HELLO and in grants, so it never changes */
    const char *name;       /* in options, metrics and messages */
    enum td_xfer_way way;   /* how the protocol core moves payload on it */
    enum td_xfer_path also; /* who names this path allows it, too; AUTO: nobody else */
    bool local;             /* over the unix socket of this host; else over the data port */
    bool lanes;             /* a connection has several sockets (config.tcp_lanes) */
    bool has_setup;         /* frames of its own lie between HELLO and READY (state SETUP) */
    bool needs_verbs;       /* it cannot be without the provider in config.rdma */
    bool needs_device;      /* it cannot be where both pools lie in host memory */
    size_t conn_bytes;      /* of its struct at c->own */
    struct td_backend_side side;
    struct td_backend_choice choice;
    struct td_backend_conn conn;
    struct td_backend_bytes bytes;
    struct td_backend_turn turn;
};

/* backends.c: all of them, best first, then NULL; and the one of a number, NULL: there is none. */
#define TD_TRANSFER_N_BACKENDS (TD_XFER_N_PATHS - 1)
extern const struct td_transfer_backend *const td_transfer_backends[TD_TRANSFER_N_BACKENDS + 1];
const struct td_transfer_backend *td_transfer_backend_of(enum td_xfer_path path);
#define TD_EACH_BACKEND(b)                                                                         \
    for (const struct td_transfer_backend *const *b##_at = td_transfer_backends, *b;               \
         (b = *b##_at); b##_at++)

#endif
