/* endpoint.h - one transfer endpoint and its connections, and what endpoint.c (life, frames,
 * timers) and connect.c (how connections come to stand) offer to the backends. Not for other
 * folders.
 *
 * One progress thread does all I/O. x->lock guards everything here and the core. The progress
 * thread drops the lock around system calls that move blocks (between the core's *_begin and *_end)
 * and around verbs that make or change queue pairs, which is whenever a connection begins its
 * set-up or ends. Slots and ops may change meanwhile: read them again afterwards. Only that thread
 * opens, closes, reads and writes connections. The one exception: a submitter may send small frames
 * itself, under the lock. */
#ifndef TD_TRANSFER_ENDPOINT_H
#define TD_TRANSFER_ENDPOINT_H

#include <pthread.h>
#include <stdatomic.h>

#include "common/base/clock.h"
#include "common/base/cluster_secret.h"
#include "common/base/wakeup.h"
#include "common/transfer/backend.h"
#include "common/transfer/protocol.h"
#include "common/transfer/tls.h"

/* Sockets: every lane of a connection is one. A bound on memory and descriptors: 128 peers with
 * lanes of the greatest number, TD_XFER_LANES_MAX. */
#define XFER_MAX_CONNS 1024
/* Accepted connections that have not shown a key yet: all that strangers can hold. For one more the
 * oldest is closed of the address that has most of them. */
#define XFER_MAX_UNPROVEN 64
/* Accepted connections leave these free, so that this side can still dial when many dial it. */
#define XFER_RESERVED_CONNS 256
/* A batch of the core's frames, the largest frame that may go over it, and 16 KiB of answers. A
 * peer that asks for more answers and does not read them is refused. */
#define XFER_OUT_BYTES 24576
/* The core's frames are gathered for one send while they take less than this; the rest of `out` is
 * for answers. */
#define XFER_OUT_BATCH 4096
/* Read at once where no payload follows: every small frame that is due costs one call together. */
#define XFER_IN_BYTES 16384
/* Read beyond the payload of a DATA frame: eight headers. What was read ahead is copied once more,
 * so it must not be much of the next payload. */
#define XFER_IN_DATA_BYTES 512
/* Pieces of the pool in one system call: a frame of 1 MiB in blocks of 16 KiB. */
#define XFER_MAX_IOV 64
/* Moved for one connection before the next has its turn: four frames of DATA. */
#define XFER_TURN_BYTES (4u << 20)
/* A connection without a transfer for this long is closed; the next transfer dials again. */
#define XFER_IDLE_NS (30 * TD_NS_PER_S)
/* The progress thread polls this long before it sleeps, while recent waits were shorter. Waking it
 * costs the waker 8 to 12 us in a virtual machine, and it runs 16 to 27 us later. */
#define XFER_LINGER_NS 100000
/* A poll, which yields the core once, that took longer than this means that others need the core:
 * no polling for XFER_CROWDED_FOR_NS. */
#define XFER_CROWDED_NS 300000
#define XFER_CROWDED_FOR_NS (100 * TD_NS_PER_MS)

/* TLS: the handshake, where there are certificates and the path is not local. SETUP: from HELLO_ACK
 * until the backend says that the connection stands. ENDING: rdma, while it is fenced. */
enum xfer_conn_state {
    XFER_CONN_FREE = 0,
    XFER_CONN_CONNECTING,
    XFER_CONN_TLS,
    XFER_CONN_HELLO,
    XFER_CONN_SETUP,
    XFER_CONN_READY,
    XFER_CONN_ENDING,
};

struct xfer_staged;

/* Cluster secret, in state HELLO: what both sides authenticate. */
struct xfer_proof {
    bool challenged; /* acceptor: CHALLENGE was sent; initiator: it was answered */
    uint8_t nonce[2][TD_CLUSTER_NONCE_BYTES]; /* [0] the initiator's, [1] the acceptor's */
    struct td_xfer_hello hello[2];            /* the same order */
    struct td_xfer_frame frame;               /* HELLO's */
};

/* Who is at the other end. The initiator knows it from the grant. */
struct xfer_peer {
    uint64_t incarnation;
    uint8_t proof[TD_XFER_KEY_BYTES];
    char instance[TD_XFER_NAME_MAX];
    char host[TD_XFER_HOST_MAX];
    uint16_t port;
    uint64_t came_from; /* acceptor: the address that it comes from (connect.c) */
};

/* Acceptor, lane 0: our clock less the peer's and the shortest flight of a frame, mod 2^32. */
struct xfer_clock {
    uint32_t behind_us;
    uint64_t as_of_ns; /* 0: not known yet */
};

/* Incoming bytes: the frame under way, and what was read ahead of it. */
struct xfer_rx {
    uint8_t header[64];
    uint32_t n_header, n_payload; /* bytes of it so far; n_header == 64: frame is valid */
    struct td_xfer_frame frame;
    bool drop; /* DATA that has no place */
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
    uint8_t ahead[XFER_IN_BYTES]; /* ahead[at, at + used); empty between turns: epoll sees none */
    uint32_t at, used;
    bool drained; /* the last read of this turn was short: asking again would find nothing */
    bool more;    /* the TLS channel holds bytes that epoll does not see: read in the next turn */
    bool starved; /* device memory: no staging buffer was free; read again in the next turn */
};

/* Outgoing bytes: a DATA frame under way, else control frames. */
struct xfer_tx {
    uint8_t header[64];
    uint32_t header_left, left;
    uint32_t op;
    uint64_t handle, offset;
    uint32_t at, used; /* out[at, at + used) */
    uint8_t out[XFER_OUT_BYTES];
    bool ready;    /* there may be something to send and the socket may take it */
    bool want_out; /* EPOLLOUT is armed */
    bool overflow; /* `out` did not hold an answer: close */
    bool ops_wait; /* ops that are not attached yet wait until `out` takes less than a batch */
    struct td_xfer_turns turns;
};

struct td_xfer_conn {
    enum xfer_conn_state state;
    const struct td_transfer_backend *backend; /* acceptor, before HELLO: the listener's */
    void *own;                                 /* the backend's struct for this connection */
    uint64_t id;                               /* serial << 16 | index; never used twice */
    uint64_t conn_id;       /* lane 0: id; else lane 0's id. The core knows no lanes */
    uint32_t lane, live_at; /* live_at: place in x->live */
    int fd;
    struct td_xfer_tls_conn *tls; /* over fd; NULL: in the clear. Progress thread only */
    bool initiator, proven;       /* proven: the cluster secret, or the key of a grant */
    bool is_cut;                  /* its socket ended without a word: the peer's fate is unknown */
    bool retiring;                /* no op starts here any more; closed when the last has ended */
    uint64_t replaces;            /* whose place it takes if it is better; 0: nobody's */
    uint64_t nonce, tag;          /* tag: both nonces, in every frame after HELLO */
    uint64_t born_ns, setup_ns, last_rx_ns, last_tx_ns, last_use_ns;
    struct xfer_clock clock;
    struct xfer_peer peer;
    struct xfer_proof proof;
    struct xfer_rx rx;
    struct xfer_tx tx;
    struct xfer_staged *staged; /* sender of a pool in device memory (gpu/staged.h), or NULL */
};

/* What this side says of itself. */
struct xfer_self {
    char instance[TD_XFER_NAME_MAX];
    uint64_t incarnation, layout_hash;
    enum td_xfer_path path;      /* the only one that it allows; AUTO: all */
    char host[TD_XFER_HOST_MAX]; /* what peers dial, numeric */
    uint16_t port;
    char shm_name[TD_XFER_NAME_MAX];
    uint8_t proof[TD_XFER_KEY_BYTES];
};

/* The KV pool. block_bytes 0: it was not added yet. */
struct xfer_pool {
    uint8_t *base; /* with device memory no address of this process's CPU */
    size_t block_bytes;
    int32_t n_blocks;
    const struct td_device_memory *memory; /* NULL: the pool is the host's */
};

/* A pool in device memory: what the device does by itself (gpu/device_copy.c). */
struct xfer_staging {
    bool (*poll)(struct td_xfer *x); /* ends copies that are complete. True: some are under way */
    bool (*busy)(const struct td_xfer *x);
    void (*landed)(struct td_xfer *x); /* what was received in this turn goes to its blocks */
    const char *(*lost)(const struct td_xfer *x); /* NULL, or why nothing can be copied any more */
    /* CRC32C of a block; false: it could not be read. The lock is not held. */
    bool (*crc)(struct td_xfer *x, int32_t block, uint32_t *ret_crc);
};

/* The progress thread. */
struct xfer_loop {
    pthread_t thread;
    bool stop, runs;
    struct td_wakeup wakeup;  /* rung by xfer_ring alone */
    atomic_bool rung, sleeps; /* rung: a turn is due. sleeps: only the wakeup wakes it */
    atomic_bool idle;         /* it looks for something to do, or sleeps */
    atomic_uint n_callers;    /* threads that want the lock for a public call */
    int epoll_fd;
    bool attach_due; /* an op may need a connection */
    uint32_t verify_cursor;
    uint64_t next_check_ns, linger_ns, crowded_until_ns;
    uint64_t n_woken; /* events that hooks.wake has announced */
};

struct xfer_listeners {
    int tcp_fd, shm_fd;
    bool paused;
};

/* What is told about peers and no transfer: td_xfer_poll_path, td_xfer_stats. */
struct xfer_told {
    struct xfer_news {
        enum td_xfer_event_kind kind;
        enum td_xfer_path path;
        td_status status;
        uint32_t n_others;
        char text[TD_XFER_REASON_MAX];
    } news[16];
    uint32_t n_news;     /* path choices and refusals that were not polled yet */
    uint64_t refusal_ns; /* when one was told last */
    uint32_t n_untold;   /* refusals that were not told since */
    uint64_t n_fallbacks, n_bad_frames, n_refused_peers;
};

/* What the core's op does not know: [max_ops]. */
struct xfer_op_aux {
    uint64_t waits_for; /* the connection that it waits for; 0: none */
    uint64_t conn_id;   /* where it was attached last */
    uint32_t tried;     /* paths (bits) that were tried in vain */
    uint32_t words;     /* rdma: queue pairs (bits) of conn_id that owe a last word */
    uint32_t n_setups, n_cuts; /* connections that ended in SETUP, and before */
};

struct td_xfer {
    pthread_mutex_t lock;
    struct td_xfer_hooks hooks;
    struct td_xfer_core core;
    struct xfer_self self;
    struct xfer_pool pool;
    struct xfer_loop loop;
    struct xfer_listeners listen;
    struct xfer_told told;
    struct td_xfer_tls *tls;          /* NULL: none; has its own lock */
    struct td_cluster_secret *secret; /* NULL: none is asked for; borrowed, has its own lock */
    uint64_t peer_timeout_ns;
    struct td_xfer_conn *conns; /* [XFER_MAX_CONNS] */
    uint8_t *own;               /* [XFER_MAX_CONNS][own_bytes]: what their backends keep */
    size_t own_bytes;
    struct td_xfer_conn **live; /* [n_conns] of them, those that are not free */
    uint32_t n_conns, n_unproven;
    uint64_t n_conn_serials;
    uint32_t conns_by_path[TD_XFER_N_PATHS];
    struct xfer_op_aux *op_aux;
    const struct xfer_staging *staging; /* NULL: the pool is the host's */
    struct xfer_device *device;         /* gpu/; from mem_add on, with device memory */
    struct xfer_shm *shm;               /* shm/; NULL: this side hands nothing over on its host */
    struct xfer_rdma *rdma;             /* rdma/; NULL: none */
    struct td_xfer_turns copy_turns;    /* shm, receiver: among its slots */
    struct xfer_sockets {
        enum td_xfer_zerocopy zerocopy;
        uint64_t n_zerocopy;
        uint32_t n_lanes;
    } tcp;
    /* value[0, n) are not used yet: a handle must not cost a system call */
    struct xfer_random {
        uint64_t value[32];
        uint32_t n;
    } random;
    uint8_t scrap[65536], zeros[65536];
};

/* of epoll, below every connection id; [BACKEND, END): descriptors that a backend polls itself */
enum { XFER_KEY_BELL = 1, XFER_KEY_TCP, XFER_KEY_SHM, XFER_KEY_BACKEND, XFER_KEY_END = 256 };

static inline uint8_t *xfer_block(const struct td_xfer *x, int32_t block)
{
    return x->pool.base + (uint64_t)block * x->pool.block_bytes;
}

/* endpoint.c */
uint64_t xfer_now(const struct td_xfer *x);
uint64_t xfer_random(void *x);
void xfer_ring(struct td_xfer *x); /* any thread: a turn is due */
bool xfer_watch_fd(struct td_xfer *x, int fd, uint64_t key);
void xfer_say(char to[TD_XFER_REASON_MAX], const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* NULL: no room; fd stays the caller's. */
struct td_xfer_conn *xfer_conn_new(struct td_xfer *x, int fd, const struct td_transfer_backend *b,
                                   bool initiator);
void xfer_conn_close(struct td_xfer *x, struct td_xfer_conn *c, td_status status,
                     const char *reason, bool retry);
void xfer_conn_be(struct td_xfer_conn *c, const struct td_transfer_backend *b); /* its path is b */
struct td_xfer_conn *xfer_conn_by_id(struct td_xfer *x, uint64_t id);
/* it is the peer's, a lane, or an op is on it */
bool xfer_conn_is_used(const struct td_xfer *x, const struct td_xfer_conn *c);
/* False: overflow. */
bool xfer_conn_queue(struct td_xfer *x, struct td_xfer_conn *c, struct td_xfer_frame *f,
                     const void *payload);
/* Up to n bytes that were read ahead; to NULL: dropped. */
ssize_t xfer_conn_in(struct td_xfer_conn *c, void *to, size_t n);
/* The DATA frame of this op is the one under way from here on. */
void xfer_conn_load(struct td_xfer_conn *c, struct td_xfer_frame *frame, uint32_t op);
/* The first n bytes of `out` are gone: ops that wait for room have their turn. */
void xfer_conn_sent(struct td_xfer *x, struct td_xfer_conn *c, size_t n);
bool xfer_conn_watch(struct td_xfer *x, struct td_xfer_conn *c, int op, bool out);
/* Says why to a peer that is about to be closed, as far as the socket takes it at once. */
void xfer_conn_say_last(struct td_xfer *x, struct td_xfer_conn *c, enum td_xfer_frame_type type,
                        td_status status, const char *reason);
/* It broke the protocol: counted and closed. */
void xfer_conn_refuse(struct td_xfer *x, struct td_xfer_conn *c, const char *reason);
/* The frame's payload, printable. */
void xfer_conn_take_reason(char to[TD_XFER_REASON_MAX], const struct td_xfer_conn *c);
/* The header of DATA, or what LENT made of its own. May close the connection. */
void xfer_conn_begin_data(struct td_xfer *x, struct td_xfer_conn *c);
/* recv and send, by the TLS channel or by the socket; never block. why: errno's meaning. */
ssize_t xfer_conn_recv(struct td_xfer_conn *c, void *to, size_t n);
ssize_t xfer_conn_send(struct td_xfer_conn *c, const void *from, size_t n);
const char *xfer_conn_why(const struct td_xfer_conn *c);

/* connect.c. Progress thread only, but attach_warm */
void xfer_path_attach(struct td_xfer *x, uint64_t now_ns);  /* every op that waits */
void xfer_path_attach_warm(struct td_xfer *x, uint32_t op); /* any thread: a conn that stands */
void xfer_path_connected(struct td_xfer *x, struct td_xfer_conn *c); /* connect() is over */
void xfer_path_accept(struct td_xfer *x, int listen_fd, enum td_xfer_path path);
void xfer_path_pause_accept(struct td_xfer *x, bool pause);
/* Does a side that names `named` allow `path`? */
bool xfer_path_allows(enum td_xfer_path named, enum td_xfer_path path);
/* For td_xfer_poll_path. */
void xfer_path_tell(struct td_xfer *x, enum td_xfer_path path, td_status status, const char *text);
/* Somebody was turned away: the first of each second is told. c: or NULL. refused: counts it. */
void xfer_path_tell_refusal(struct td_xfer *x, int fd, enum td_xfer_path path,
                            const struct td_xfer_conn *c, const char *reason);
void xfer_path_refused(struct td_xfer *x, const struct td_xfer_conn *c, const char *reason);
/* Closes it; an acceptor that has seen no proof of the peer tells that as a refusal. */
void xfer_path_turn_away(struct td_xfer *x, struct td_xfer_conn *c, const char *reason);
void xfer_path_replace(struct td_xfer *x, struct td_xfer_conn *c); /* dials one for c's place */
void xfer_path_say_hello(struct td_xfer *x, struct td_xfer_conn *c, enum td_xfer_frame_type type);
void xfer_path_on_hello(struct td_xfer *x, struct td_xfer_conn *c); /* state HELLO; may close c */
/* SETUP. refuse: says why, closes c. refused: the peer said so, closes c. ready: it is over. */
void xfer_path_refuse_offer(struct td_xfer *x, struct td_xfer_conn *c, enum td_xfer_frame_type type,
                            td_status status, const char *reason);
void xfer_path_offer_refused(struct td_xfer *x, struct td_xfer_conn *c);
void xfer_path_ready(struct td_xfer *x, struct td_xfer_conn *c);
/* How far a connection of ours had come that ended before it stood. */
enum xfer_path_stage {
    XFER_PATH_REFUSED, /* the peer said why, or nobody is there */
    XFER_PATH_CUT,     /* its socket ended before the peer had answered: it may be flooded */
    XFER_PATH_SETUP,   /* in SETUP */
};
/* A connection of ours did not come to stand: its ops try again, take another path, or fail. */
void xfer_path_failed(struct td_xfer *x, uint64_t id, enum td_xfer_path path, td_status status,
                      const char *reason, enum xfer_path_stage stage);

/* connect_proof.c: the cluster secret in the hello. begin: the initiator's nonce, or the
 * acceptor's. make: this side's MAC. check: is it the peer's? */
void xfer_proof_begin(struct td_xfer_conn *c);
td_status xfer_proof_make(const struct td_xfer *x, const struct td_xfer_conn *c,
                          uint8_t ret_mac[TD_XFER_SECRET_BYTES]);
bool xfer_proof_check(const struct td_xfer *x, const struct td_xfer_conn *c,
                      const uint8_t mac[TD_XFER_SECRET_BYTES]);

#endif
