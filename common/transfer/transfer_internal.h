/* transfer_internal.h - what endpoint.c (life, frames, timers), connect.c (how connections come to
 * stand), tcp.c, shm.c and rdma.c (how bytes move) share. Not for other folders.
 *
 * One progress thread does all I/O; x->lock guards everything here and the core. The progress
 * thread drops the lock around system calls that move blocks (between the core's *_begin and
 * *_end) and around verbs that make or change queue pairs, so whenever a connection begins its
 * rdma set-up or ends: slots and ops may be others after it. Only that thread opens, closes,
 * reads and writes connections; but a submitter may send frames on shm, under the lock. */
#ifndef TD_TRANSFER_TRANSFER_INTERNAL_H
#define TD_TRANSFER_TRANSFER_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "common/base/clock.h"
#include "common/base/cluster_secret.h"
#include "common/base/doorbell.h"
#include "common/transfer/protocol.h"
#include "common/transfer/tls.h"

/* Between blocks and control words in shared memory. The thread sanitizer does not know fences;
 * what it watches there is ordered by the mutex and the system calls anyway. */
#if defined(__SANITIZE_THREAD__)
#define XFER_FENCE(order) ((void)0)
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define XFER_FENCE(order) ((void)0)
#endif
#endif
#ifndef XFER_FENCE
#define XFER_FENCE(order) atomic_thread_fence(order)
#endif

#define XFER_MAX_CONNS 1024     /* sockets: every lane of a connection is one */
#define XFER_MAX_UNPROVEN 64    /* accepted connections that have not shown a key yet */
#define XFER_RESERVED_CONNS 256 /* kept from accepted connections, for those this side opens */
#define XFER_OUT_BYTES 24576
/* so much of the core's frames goes into `out` for one send; the rest is for answers */
#define XFER_OUT_BATCH 4096
#define XFER_IN_BYTES 16384
/* where payload may follow a header: what was read ahead of it is copied once more, so little of
   it */
#define XFER_IN_DATA_BYTES 512
#define XFER_MAX_IOV 64
#define XFER_MAX_FDS 2
#define XFER_TURN_BYTES (4u << 20) /* moved for one connection before the next has its turn */
#define XFER_IDLE_NS (30 * TD_NS_PER_S)
/* the progress thread looks for events so long before it sleeps, if what it waited for last came
   within that; */
#define XFER_LINGER_NS 100000
#define XFER_CROWDED_NS 300000 /* a look that took longer: others want the core, */
#define XFER_CROWDED_FOR_NS (100 * TD_NS_PER_MS) /* and for so long it is not done */

/* TLS: with certificates, not on shm: the handshake. SETUP: rdma, from HELLO_ACK until every
 * queue pair has been probed in both directions. ENDING: rdma, while it is fenced; it comes from
 * SETUP or READY. */
enum xfer_conn_state {
    XFER_CONN_FREE = 0,
    XFER_CONN_CONNECTING,
    XFER_CONN_TLS,
    XFER_CONN_HELLO,
    XFER_CONN_SETUP,
    XFER_CONN_READY,
    XFER_CONN_ENDING
};

struct xfer_rdma;
struct xfer_rdma_link;

struct xfer_device;

#define XFER_STAGED_FRAMES 16 /* DATA frames that share a staging buffer */
#define XFER_ZC_MAX 64        /* sends without a copy whose notification has not come */

/* An op's handle while its source blocks may be copied, else 0. One cache line each; written by
 * the sender, mapped read-only by receivers. */
struct xfer_control_word {
    _Atomic uint64_t handle;
    uint8_t pad[56];
};
_Static_assert(sizeof(struct xfer_control_word) == 64, "shared layout");

struct td_xfer_conn {
    enum xfer_conn_state state;
    uint64_t id;            /* serial << 16 | index; never used twice */
    uint64_t link;          /* lane 0: id; else lane 0's id. The core knows links only */
    uint32_t lane, live_at; /* live_at: place in x->live */
    int fd;
    struct td_xfer_tls_conn *tls; /* over fd; NULL: in the clear. Progress thread only */
    bool initiator, proven;       /* proven: has proved the cluster secret, or shown the key of
                                     a grant */
    bool is_cut;                  /* its socket came to an end without a word: nothing is known
                                     of the peer */
    bool tx_ready;                /* there may be something to send and the socket may take it */
    bool want_out;                /* EPOLLOUT is armed */
    bool overflow;                /* `out` did not hold an answer: close */
    bool rx_more;                 /* the channel holds bytes that epoll does not see: read in
                                     the next turn */
    enum td_xfer_path path;
    uint64_t came_from;  /* acceptor: the address that it comes from (connect.c) */
    uint64_t nonce, tag; /* tag: both nonces, in every frame after HELLO */
    uint64_t born_ns, setup_ns, last_rx_ns, last_tx_ns, last_use_ns;
    struct td_xfer_turns tx_turns;
    uint32_t clock_behind_us; /* acceptor, lane 0: our clock less the peer's and the
                                 shortest flight of a frame, mod 2^32; as of clock_ns (0:
                                 not known) */
    uint64_t clock_ns;
    /* who is at the other end; initiator: as the grant said */
    uint64_t peer_incarnation;
    uint8_t peer_proof[TD_XFER_KEY_BYTES];
    char peer_instance[TD_XFER_NAME_MAX];
    char host[TD_XFER_HOST_MAX];
    uint16_t port;
    struct xfer_proof {  /* cluster secret, in state HELLO: what both sides
                            authenticate */
        bool challenged; /* acceptor: CHALLENGE was sent; initiator: it was answered */
        uint8_t nonce[2][TD_CLUSTER_NONCE_BYTES]; /* [0] the initiator's, [1] the acceptor's;
                                                     hello, too */
        struct td_xfer_hello hello[2];
        struct td_xfer_frame frame; /* HELLO's */
    } proof;
    /* incoming frame */
    uint8_t rx_header[64];
    uint32_t n_header, n_payload; /* bytes of it so far; n_header == 64: rx_frame is valid */
    struct td_xfer_frame rx_frame;
    bool rx_drop; /* DATA that has no place */
    uint8_t rx_payload[TD_XFER_PAYLOAD_MAX];
    uint8_t in[XFER_IN_BYTES]; /* in[in_at, in_at + in_used): read ahead of the frame under
                                  way. Empty between turns: epoll knows nothing of it */
    uint32_t in_at, in_used;
    bool drained; /* the last read of this turn was short: asking again would
                     find nothing */
    /* outgoing: a DATA frame under way, else control frames */
    uint8_t tx_header[64];
    uint32_t tx_header_left, tx_left;
    uint32_t tx_op;
    uint64_t tx_handle, tx_offset;
    uint32_t out_at, out_used; /* out[out_at, out_at + out_used) */
    uint8_t out[XFER_OUT_BYTES];
    /* shm, receiver: the sender's memory */
    int fds[XFER_MAX_FDS], n_fds; /* came with the last header */
    const uint8_t *source;        /* its pool; shm-staged: its ring, of ring_bytes */
    size_t source_bytes, ring_bytes;
    uint32_t lent_at; /* shm-staged: where in the ring the frame under way lies */
    const struct xfer_control_word *words;
    uint32_t n_words;
    int32_t n_source_blocks;
    /* tcp, sender, device memory: frames [at, n) have been taken from the core, and what is left
     * of them is copied to `buffer` (-1: to none yet, or it was taken away for others). loaded:
     * frame `at` is the one under way */
    struct {
        int32_t buffer;
        bool copying, loaded;
        uint32_t at, n, n_bytes;
        /* place: in the buffer, of payload byte `from` */
        struct {
            struct td_xfer_frame frame;
            uint32_t op, place, from;
        } frames[XFER_STAGED_FRAMES];
    } staged;
    uint32_t n_lent;          /* shm-staged, sender: buffers that its receiver has not read
                                 yet */
    bool rx_starved;          /* tcp and shm-staged, receiver, device memory: no buffer was
                                 free; read again in the next turn */
    void *peer_base;          /* cuda-ipc, receiver: the sender's allocation, as opened here */
    const uint8_t *peer_pool; /* its pool's block 0: the device's address */
    struct {                  /* sends [done, next) hold their ops; numbers as the kernel
                                 counts them */
        bool on;
        uint32_t next, done;
        struct xfer_zc_send {
            uint32_t op;
            bool over;
        } sends[XFER_ZC_MAX];
    } zc;
    struct xfer_rdma_link *rdma; /* path rdma, from SETUP on */
    uint64_t instead_of;         /* rdma: the connection that this one replaces if it has more
                                    rails; 0: none */
    bool retiring;               /* rdma: no op starts here any more; closed when the last has
                                    ended */
};

struct td_xfer {
    pthread_mutex_t lock;
    pthread_t thread;
    bool stop, thread_runs;
    struct td_xfer_hooks hooks;
    char instance[TD_XFER_NAME_MAX];
    uint64_t incarnation, layout_hash;
    enum td_xfer_path path;
    uint64_t peer_timeout_ns;
    struct td_doorbell bell;  /* rung by xfer_ring alone */
    atomic_bool rung, sleeps; /* rung: a turn is due. sleeps: only the bell's descriptor
                                 wakes the progress thread */
    atomic_bool idle;         /* it looks for something to do, or sleeps */
    atomic_uint n_callers;    /* threads that want the lock for a public call: nobody looks
                                 for completions meanwhile */
    int epoll_fd, tcp_fd, shm_fd;
    struct td_xfer_tls *tls;          /* NULL: none; has its own lock */
    struct td_cluster_secret *secret; /* NULL: none is asked for; borrowed, has its own lock */
    bool accept_paused;
    char host[TD_XFER_HOST_MAX]; /* what peers dial, numeric */
    uint16_t port;
    char shm_name[TD_XFER_NAME_MAX];
    uint8_t proof[TD_XFER_KEY_BYTES];
    uint8_t *base; /* the pool; with device memory no address of this process's
                      CPU */
    size_t block_bytes;
    int32_t n_blocks;
    int arena_ro_fd, words_fd; /* handed to receivers on this host; -1 = no shm as sender */
    struct xfer_control_word *words;
    struct td_xfer_core core;
    struct td_xfer_conn *conns; /* [XFER_MAX_CONNS] */
    struct td_xfer_conn **live; /* [n_conns] of them, those that are not free */
    uint64_t n_conn_serials;
    uint32_t n_conns, n_unproven;
    /* [max_ops]: the connection it waits for; paths (bits) that were tried in vain; rdma: queue
       pairs (bits) of link that owe a word */
    struct xfer_op_aux {
        uint64_t waits_for, link;
        uint32_t tried, words, n_setups;
    } * op_aux;
    struct xfer_rdma *rdma;                /* NULL: none */
    const struct td_device_memory *memory; /* NULL: the pool is the host's */
    struct xfer_device *device;            /* from mem_add on, with memory */
    uint32_t n_lanes, verify_cursor;
    enum td_xfer_zerocopy zerocopy;
    uint64_t n_zerocopy;
    uint64_t n_fallbacks;
    uint32_t conns_by_path[TD_XFER_N_PATHS];
    struct xfer_news {
        enum td_xfer_event_kind kind;
        enum td_xfer_path path;
        td_status status;
        uint32_t n_others;
        char text[TD_XFER_REASON_MAX];
    } news[16];
    uint32_t n_news;          /* path choices and refusals that were not polled yet */
    uint64_t told_refusal_ns; /* when one was told last; n_untold: how many were not told
                                 since */
    uint32_t n_untold;
    bool attach_due; /* an op may need a connection */
    uint64_t next_check_ns, loop_ns, linger_ns, crowded_until_ns;
    uint64_t n_woken; /* events that hooks.wake has announced */
    struct td_xfer_turns copy_turns;
    uint64_t n_bad_frames, n_refused_peers;
    uint64_t random[32]; /* random[0, n_random) are not used yet: a handle must not
                            cost a system call */
    uint32_t n_random;
    uint8_t scrap[65536], zeros[65536];
};

/* below every connection id */
enum {
    XFER_KEY_BELL = 1,
    XFER_KEY_TCP,
    XFER_KEY_SHM,
    XFER_KEY_RDMA /* + 2 * rail: its completions; + 1: its events */
};

/* endpoint.c */
uint64_t xfer_now(const struct td_xfer *x);
uint64_t xfer_random(void *x);
/* any thread: a turn is due */
void xfer_ring(struct td_xfer *x);
/* NULL: no room; fd stays the caller's */
struct td_xfer_conn *xfer_conn_new(struct td_xfer *x, int fd, enum td_xfer_path path,
                                   bool initiator);
void xfer_conn_close(struct td_xfer *x, struct td_xfer_conn *c, td_status status,
                     const char *reason, bool retry);
struct td_xfer_conn *xfer_conn_by_id(struct td_xfer *x, uint64_t id);
/* false: overflow */
bool xfer_conn_queue(struct td_xfer *x, struct td_xfer_conn *c, struct td_xfer_frame *f,
                     const void *payload);
/* up to n bytes that were read ahead; to NULL: dropped */
ssize_t xfer_conn_in(struct td_xfer_conn *c, void *to, size_t n);
/* the first n bytes of `out` are gone */
void xfer_conn_sent(struct td_xfer_conn *c, size_t n);
bool xfer_conn_watch(struct td_xfer *x, struct td_xfer_conn *c, int op, bool out);
/* it broke the protocol: counted and closed */
void xfer_conn_refuse(struct td_xfer *x, struct td_xfer_conn *c, const char *reason);
/* the frame's payload, printable */
void xfer_conn_take_reason(char to[TD_XFER_REASON_MAX], const struct td_xfer_conn *c);
bool xfer_watch_fd(struct td_xfer *x, int fd, uint64_t key);
void xfer_say(char to[TD_XFER_REASON_MAX], const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* connect.c. Progress thread only, but attach_warm */
/* every op that waits: a connection, or one is dialled */
void xfer_path_attach(struct td_xfer *x, uint64_t now_ns);
/* any thread: a connection that stands already */
void xfer_path_attach_warm(struct td_xfer *x, uint32_t op);
/* connect() is over; may close c */
void xfer_path_connected(struct td_xfer *x, struct td_xfer_conn *c);
void xfer_path_accept(struct td_xfer *x, int listen_fd, enum td_xfer_path path);
void xfer_path_pause_accept(struct td_xfer *x, bool pause);
/* a side that names `named` */
bool xfer_path_allows(enum td_xfer_path named, enum td_xfer_path path);
/* for td_xfer_poll_path */
void xfer_path_tell(struct td_xfer *x, enum td_xfer_path path, td_status status, const char *text);
/* Somebody was turned away, for td_xfer_poll_path; the first of each second is told. c: NULL
 * while there is none. refused: counts it, too. */
void xfer_path_tell_refusal(struct td_xfer *x, int fd, enum td_xfer_path path,
                            const struct td_xfer_conn *c, const char *reason);
void xfer_path_refused(struct td_xfer *x, const struct td_xfer_conn *c, const char *reason);
/* dials one to take c's place */
void xfer_path_more_rails(struct td_xfer *x, struct td_xfer_conn *c);
void xfer_path_say_hello(struct td_xfer *x, struct td_xfer_conn *c, enum td_xfer_frame_type type);
/* a frame of state HELLO; may close c */
void xfer_path_on_hello(struct td_xfer *x, struct td_xfer_conn *c);
/* rdma's offer and its answer; may close c */
void xfer_path_on_setup(struct td_xfer *x, struct td_xfer_conn *c);
/* says why, closes c */
void xfer_path_refuse_offer(struct td_xfer *x, struct td_xfer_conn *c, td_status status,
                            const char *reason);
/* SETUP or HELLO is over: ops that wait may go */
void xfer_path_ready(struct td_xfer *x, struct td_xfer_conn *c);
/* A connection of ours did not come to stand: its ops take another path, or fail. */
void xfer_path_failed(struct td_xfer *x, uint64_t id, enum td_xfer_path path, td_status status,
                      const char *reason, bool in_setup);

/* connect_proof.c: the cluster secret in the hello. begin: the initiator's nonce, or the
 * acceptor's. */
void xfer_proof_begin(struct td_xfer_conn *c);
/* this side's MAC */
td_status xfer_proof_make(const struct td_xfer *x, const struct td_xfer_conn *c,
                          uint8_t ret_mac[TD_XFER_SECRET_BYTES]);
/* is it the peer's? */
bool xfer_proof_check(const struct td_xfer *x, const struct td_xfer_conn *c,
                      const uint8_t mac[TD_XFER_SECRET_BYTES]);

/* tcp.c. data_read and data_write drop the lock while they move bytes; they return recv's or
 * send's result (errno kept). */
td_status xfer_tcp_listen(struct td_xfer *x, const struct td_xfer_config *config,
                          struct td_err *err);
/* fd, or -1 with errno */
int xfer_tcp_dial(struct td_xfer *x, const char *host, uint16_t port, bool *ret_connected);
void xfer_tcp_tune(const struct td_xfer *x, int fd);
/* recv and send by the channel where there is one, else by the socket (shm's, too); never
 * blocking. xfer_tcp_why: what errno means after them. */
ssize_t xfer_tcp_recv(struct td_xfer_conn *c, void *to, size_t n);
ssize_t xfer_tcp_send(struct td_xfer_conn *c, const void *from, size_t n);
const char *xfer_tcp_why(const struct td_xfer_conn *c);
ssize_t xfer_tcp_data_read(struct td_xfer *x, struct td_xfer_conn *c);
ssize_t xfer_tcp_data_write(struct td_xfer *x, struct td_xfer_conn *c);

/* rdma.c and rails.c (open, mem_add, usable, revive, due). Progress thread only, but open,
 * mem_add and close. */
td_status xfer_rdma_open(struct td_xfer *x, const struct td_xfer_rdma_config *config,
                         struct td_err *err);
void xfer_rdma_close(struct td_xfer *x);
/* registers the pool on every rail */
td_status xfer_rdma_mem_add(struct td_xfer *x, size_t arena_bytes, struct td_err *err);
/* device memory: makes what completed visible. True: under way */
bool xfer_rdma_flush(struct td_xfer *x);
/* a rail is there whose port is active */
bool xfer_rdma_usable(const struct td_xfer *x);
/* Set-up: the initiator offers, the acceptor accepts; both go READY by probes. false: reason
 * says why there can be no link. Its queue pairs are connected by a thread, and what comes of
 * that is told by xfer_rdma_poll. They drop the lock. */
bool xfer_rdma_offer(struct td_xfer *x, struct td_xfer_conn *c, char reason[TD_XFER_REASON_MAX]);
td_status xfer_rdma_on_offer(struct td_xfer *x, struct td_xfer_conn *c,
                             char reason[TD_XFER_REASON_MAX]);
bool xfer_rdma_on_accept(struct td_xfer *x, struct td_xfer_conn *c,
                         char reason[TD_XFER_REASON_MAX]);
/* the peer has none of the offered rails: offer all next time */
void xfer_rdma_refused(struct td_xfer *x);
bool xfer_rdma_may_pull(const struct td_xfer_conn *c);
int32_t xfer_rdma_peer_blocks(const struct td_xfer *x, const struct td_xfer_conn *c);
/* Receiver with windows: opens, ends; may close connections. */
void xfer_rdma_windows(struct td_xfer *x);
/* The next TARGETS of this connection. */
bool xfer_rdma_targets_next(struct td_xfer *x, const struct td_xfer_conn *c, uint32_t *cursor,
                            struct td_xfer_tx *tx);
/* CORRUPT, NOMEM: close it */
td_status xfer_rdma_on_targets(struct td_xfer *x, struct td_xfer_conn *c);
/* as much as queue pairs and bounds allow; may close c */
void xfer_rdma_post(struct td_xfer *x, struct td_xfer_conn *c);
/* Takes completions and events; may close connections. True when there were any. */
bool xfer_rdma_poll(struct td_xfer *x);
/* arms the channels; false: something came meanwhile, do not sleep */
bool xfer_rdma_sleep(struct td_xfer *x);
void xfer_rdma_woke(struct td_xfer *x, uint64_t slept_ns, bool by_channel);
/* kills the link: after it nothing of it reads or lands. Drops the lock */
void xfer_rdma_fence(struct td_xfer *x, struct td_xfer_conn *c);
/* SETUP took too long: its silent rails are avoided for a while */
void xfer_rdma_late(struct td_xfer *x, const struct td_xfer_conn *c);
/* Rails that died or were never up: tries them again when their time has come. due: that time;
 * TD_NEVER_NS: all are there. */
void xfer_rdma_revive(struct td_xfer *x, uint64_t now);
uint64_t xfer_rdma_due(const struct td_xfer *x);
/* Both sides have a rail that the link of this READY connection lacks, and it is time to try one
 * with more; sets the next time. */
bool xfer_rdma_lacks(struct td_xfer *x, struct td_xfer_conn *c, uint64_t now);
/* bits of the queue pairs of an op of so many bytes; 0: all */
uint32_t xfer_rdma_home(struct td_xfer_conn *c, uint64_t n_bytes);
uint32_t xfer_rdma_n_rails(const struct td_xfer_conn *c);
/* its final words are taken */
void xfer_rdma_op_over(struct td_xfer *x, uint32_t op);
void xfer_rdma_stats(const struct td_xfer *x, struct td_xfer_stats *stats);

/* zerocopy.c */
/* a new tcp socket */
void xfer_zc_open(const struct td_xfer *x, struct td_xfer_conn *c);
bool xfer_zc_wanted(const struct td_xfer_conn *c, size_t n_bytes);
/* one send with MSG_ZEROCOPY was taken; the op is live */
void xfer_zc_sent(struct td_xfer *x, struct td_xfer_conn *c, uint32_t op);
/* takes notifications */
void xfer_zc_reap(struct td_xfer *x, struct td_xfer_conn *c);
/* before close: nothing of the pool is read by this socket after it */
void xfer_zc_end(struct td_xfer *x, struct td_xfer_conn *c);

/* device_copy.c: pools in device memory. Progress thread only, but open and close. */
td_status xfer_device_open(struct td_xfer *x, struct td_err *err);
/* waits for what is under way */
void xfer_device_close(struct td_xfer *x);
/* Takes copies that are complete, issues what cuda-ipc has to copy. True: something is under
 * way, or was. */
bool xfer_device_poll(struct td_xfer *x);
bool xfer_device_busy(const struct td_xfer *x);
/* cuda-ipc: copies from this connection's peer are waited for, and its memory is given back.
 * tcp: its buffer goes. */
void xfer_device_conn_end(struct td_xfer *x, struct td_xfer_conn *c);
/* NULL, or why nothing can be copied any more */
const char *xfer_device_lost(const struct td_xfer *x);
/* tcp, sender. want: may another frame be taken from the core? add: it was. go: what was added
 * is copied, as soon as there is a buffer; false: nothing was. load: the next frame becomes the
 * one under way; false: there is none, or its bytes are not here yet. here: those of the one
 * under way are (it asks for them again when their buffer was taken away). bytes: its next
 * payload byte. sent: its last byte is gone. */
bool xfer_staged_want(const struct td_xfer_conn *c);
void xfer_staged_add(struct td_xfer_conn *c, const struct td_xfer_frame *frame, uint32_t op);
bool xfer_staged_go(struct td_xfer *x, struct td_xfer_conn *c);
bool xfer_staged_load(struct td_xfer_conn *c);
bool xfer_staged_here(struct td_xfer *x, struct td_xfer_conn *c);
uint8_t *xfer_staged_bytes(const struct td_xfer *x, const struct td_xfer_conn *c);
void xfer_staged_sent(struct td_xfer *x, struct td_xfer_conn *c);
/* tcp, receiver. room: where up to *n payload bytes of the frame under way may be received;
 * NULL: no buffer is free. took: n of them were. flush: what was received since is on its way to
 * its blocks. */
uint8_t *xfer_staged_room(struct td_xfer *x, size_t *n);
void xfer_staged_took(struct td_xfer *x, const struct td_xfer_conn *c, size_t n);
void xfer_staged_flush(struct td_xfer *x);
/* Both: the CRC32C of a block of the pool, wherever it lies. The lock is not held. Device
 * memory: false when it could not be read. */
bool xfer_pool_crc(struct td_xfer *x, int32_t block, uint32_t *ret_crc);
/* cuda-ipc: set-up. send: false with the reason. take: TD_OK, or why it cannot be used; the lock
 * is dropped. */
/* the offer that peers will get */
td_status xfer_ipc_open(struct td_xfer *x, const struct td_arena *arena, struct td_err *err);
bool xfer_ipc_may_offer(const struct td_xfer *x);
bool xfer_ipc_send_offer(struct td_xfer *x, struct td_xfer_conn *c);
td_status xfer_ipc_take_offer(struct td_xfer *x, struct td_xfer_conn *c,
                              const struct td_xfer_device_mem *mem, const uint8_t *pool,
                              size_t pool_bytes, char reason[TD_XFER_REASON_MAX]);
/* this peer can not: not asked again */
void xfer_ipc_refused(struct td_xfer *x, uint64_t incarnation);
bool xfer_ipc_was_refused(const struct td_xfer *x, uint64_t incarnation);

/* On one host: over the unix socket. */
static inline bool xfer_path_is_local(enum td_xfer_path path)
{
    return path == TD_XFER_PATH_SHM || path == TD_XFER_PATH_CUDA_IPC ||
           path == TD_XFER_PATH_SHM_STAGED;
}

static inline bool xfer_path_is_shm(enum td_xfer_path path)
{
    return path == TD_XFER_PATH_SHM || path == TD_XFER_PATH_SHM_STAGED;
}

/* ring.c: shm-staged. */
/* what MEM says of it */
void xfer_ring_mem(const struct td_xfer *x, struct td_xfer_mem *ret_mem, int *ret_fd);
/* its staging ring can be shared with processes of this host */
bool xfer_ring_may_lend(const struct td_xfer *x);
/* sender: what was copied to the buffer is named to the receiver */
void xfer_ring_lend(struct td_xfer *x, struct td_xfer_conn *c);
/* sender: TAKEN came; false: of nothing that was lent */
bool xfer_ring_taken(struct td_xfer *x, struct td_xfer_conn *c);
/* Receiver. lent: LENT came: its bytes are the frame under way from here on, a DATA frame;
 * false: they lie nowhere. take: some of them; like data_read. */
bool xfer_ring_lent(struct td_xfer *x, struct td_xfer_conn *c);
ssize_t xfer_ring_take(struct td_xfer *x, struct td_xfer_conn *c);

/* shm.c */
/* the control words of this side's ops */
td_status xfer_shm_make_words(struct td_xfer *x, struct td_err *err);
/* the peer's */
td_status xfer_shm_take_words(struct td_xfer_conn *c, int fd, uint32_t n_words);
td_status xfer_shm_listen(struct td_xfer *x, struct td_err *err);
/* sender's half, at mem_add */
td_status xfer_shm_offer(struct td_xfer *x, const struct td_arena *arena, struct td_err *err);
/* fd, or -1 with errno */
int xfer_shm_dial(const char *name);
/* same user as this process */
bool xfer_shm_peer_allowed(int fd);
/* the pool, or the ring */
bool xfer_shm_send_mem(struct td_xfer *x, struct td_xfer_conn *c);
bool xfer_shm_word_shows(const struct xfer_control_word *word, uint64_t handle);
/* A frame of SETUP with descriptors (at most XFER_MAX_FDS); false: the socket did not take it. */
bool xfer_shm_send_fds(struct td_xfer_conn *c, struct td_xfer_frame *f, const void *payload,
                       size_t n_bytes, const int *fds, size_t n_fds);
/* keeps descriptors that came along */
ssize_t xfer_shm_recv(struct td_xfer_conn *c, void *to, size_t n);
td_status xfer_shm_take_mem(struct td_xfer *x, struct td_xfer_conn *c,
                            const struct td_xfer_mem *mem, char reason[TD_XFER_REASON_MAX]);
void xfer_shm_conn_clear(struct td_xfer_conn *c);
/* pieces up to 1 MiB; false: nothing to copy */
bool xfer_shm_copy(struct td_xfer *x);
void xfer_shm_op_handle(struct td_xfer *x, uint32_t op, uint64_t handle);

#endif
