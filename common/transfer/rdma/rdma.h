/* rdma.h - what rails.c (devices), rdma.c (queue pairs over them) and flush.c (pools in device
 * memory) share. Not for others.
 *
 * Threads: the endpoint's lock guards all of it. Devices and queue pairs belong to the progress
 * thread, except while a thread of their own has them, until it sets `done` or `over`: a rail that
 * is opened again (struct revival), queue pairs that are being connected (struct joining). */
#ifndef TD_TRANSFER_RDMA_RDMA_H
#define TD_TRANSFER_RDMA_RDMA_H

#include "common/base/min.h"
#include "common/transfer/endpoint.h"
#include "common/transfer/rdma/select.h"
#include "common/transfer/rdma/verbs.h"

/* rdma connections that one endpoint has at a time; another one is refused. Bounds the cells that
 * every rail registers for probes, 2 x 256 x 16 x CELL = 512 KiB. */
#define MAX_QP_SETS 256
#define CELL 64 /* bytes of a probe: a cache line, so that no two probes share one */
/* Memory windows of each queue pair of an accepted set, made at its set-up, when requests do not
 * wait. A grant takes at most half of those that are free, so the first has up to 64 runs of blocks
 * with a window of their own. */
#define WINDOWS 128
/* A rail that is gone is tried again after 1 s, then after twice as long, up to 30 s: opening it
 * registers the whole pool, which takes seconds. */
#define REOPEN_NS TD_NS_PER_S
#define REOPEN_MAX_NS (30 * TD_NS_PER_S)

struct rail {
    char name[TD_VB_NAME_MAX];
    uint32_t index; /* in rdma->rail */
    bool refused;   /* it can not serve: never tried again */
    uint64_t avoid_until_ns, avoid_ns, last_error_ns;
    uint64_t reopen_ns, reopen_wait_ns; /* it has no device, or is dead: when it is tried again */
    bool received, flushing;     /* received: completions of data came since the last flush */
    struct td_vb_device *device; /* from here on all goes with the device */
    bool dead;                   /* the device is gone or delivers no completions */
    struct td_vb_limits limits;
    struct td_vb_port port;
    struct td_vb_gid gid;
    struct td_vb_cq *cq;
    struct td_vb_srq *srq;
    uint32_t srq_spent;
    struct td_vb_mr **mr; /* [n_regions] */
    struct td_vb_mr *probe_mr;
    struct td_rdma_plan plan;
    uint32_t cq_used; /* a flush of every queue pair fits plan.cq_depth */
    /* pool in device memory, where it is to be flushed: a queue pair from this rail to itself,
       its queue, 64 bytes of the device's and 64 of ours */
    struct td_vb_cq *flush_cq;
    struct td_vb_qp *flush_qp;
    struct td_vb_mr *flush_from, *flush_to;
};

/* A rail comes back: a thread closes what is left of it, opens the device, registers the pool. */
struct revival {
    struct td_xfer *x;
    pthread_t thread;
    bool runs;
    _Atomic bool done;
    uint32_t at;
    struct rail old, fresh;
    td_status status;
    struct td_err err;
};

/* Pool in device memory (flush.c). */
struct flushing {
    int dmabuf_fd; /* of the pool, from byte dmabuf_offset on; -1: there is none, for dmabuf_why */
    uint64_t dmabuf_offset;
    char dmabuf_why[TD_XFER_REASON_MAX];
    uint64_t at; /* a byte of the device's allocation that the flush READs */
    bool runs, failed;
    uint64_t until_ns; /* runs: a READ that is not complete by then counts as failed */
    uint64_t n_flushes;
    uint8_t *cells; /* [TD_XFER_RAILS_MAX][CELL] */
};

struct xfer_rdma {
    const struct td_verbs *vb;
    struct td_xfer_rdma_config config;
    uint64_t quarantine_ns;
    uint32_t n_rails, n_qp_sets; /* rails keep their numbers: peers go by them */
    struct rail rail[TD_XFER_RAILS_MAX];
    struct revival revival;
    bool has_pool; /* mem_add was called */
    struct flushing flush;
    uint64_t region_bytes;
    uint32_t n_regions;
    uint8_t *cells; /* [peers probe, we send][MAX_QP_SETS][TD_XFER_QPS_MAX][CELL] */
    struct qp_set *qp_set[MAX_QP_SETS];
    uint64_t spin_ns;
    /* n_ups: rails that came back */
    uint64_t n_wr, n_doorbells, n_rail_errors, n_async, n_windows, n_wide, n_ups;
    struct grant_windows *grant; /* [max_slots]; NULL: config.windows is not set */
    uint32_t **op_keys; /* [max_ops][run * n_qps + queue pair]: the peer's windows' keys, or NULL */
};

struct pending { /* a request under way: of an op (WRITE) or of a slot (READ) */
    uint32_t id, n_bytes;
    bool is_read;
};
#define NO_ID UINT32_MAX   /* of neither: a probe */
#define RECV_ID UINT64_MAX /* of every receive; a request has its set, queue pair and number */

struct queue_pair {
    struct td_vb_qp *qp;
    uint8_t rail;        /* ours */
    uint64_t head, tail; /* requests [tail, head) are pending */
    uint64_t flushed;    /* one past the highest request whose completion was seen */
    uint64_t in_flight;  /* bytes */
    uint32_t words;      /* last words under way at the peer */
    uint32_t recv_left, recv_spent, recv_posted; /* recv_left: receives that the device still has */
    bool probed;                                 /* by the peer */
    struct pending *ring;                        /* [plan.send_depth] */
    struct td_vb_mw *mw[WINDOWS];                /* acceptor with windows */
};

enum window_state { WINDOWS_NONE = 0, WINDOWS_BINDING, WINDOWS_OPEN, WINDOWS_ENDING };

struct grant_windows { /* of the slot's bound attempt; the same on every queue pair */
    enum window_state state;
    struct qp_set *set;
    uint32_t n;
    struct {
        uint32_t window;
        int32_t block, n_blocks;
    } at[WINDOWS];
    /* n_posted of this state's requests; until: tail when they have completed */
    struct {
        uint32_t n_bound, n_posted;
        uint64_t until;
    } qp[TD_XFER_QPS_MAX];
};

/* RTR and RTS of a set's queue pairs. The thread has them, and all of this, until `over`. */
struct joining {
    pthread_t thread;
    atomic_bool over, unwanted;
    const struct td_verbs *vb;
    struct td_xfer *x;
    uint32_t n, n_joined;
    int error; /* of queue pair n_joined */
    struct {
        struct td_vb_qp *qp;
        struct td_vb_route route;
    } at[TD_XFER_QPS_MAX];
    struct td_xfer_rdma_setup setup; /* acceptor: ours, to be said; initiator: the peer's */
};

/* How a set ends. Its state only ever goes forward. */
enum qp_set_state {
    QP_SET_STANDS = 0,
    QP_SET_DOOMED, /* its queue pairs have failed: it ends at at_ns, or when somebody says why */
    QP_SET_BROKEN, /* to be ended at the next look */
    QP_SET_FENCED, /* it has no connection any more; completions tell whose request was at fault */
};

/* What the first completion that failed says of another attempt. */
enum qp_set_verdict {
    VERDICT_OPEN = 0, /* none has come: one is worth it */
    VERDICT_RETRY,
    VERDICT_NEVER,
};

struct qp_set_end {
    enum qp_set_state state;
    enum qp_set_verdict verdict;
    uint64_t at_ns;       /* DOOMED */
    struct pending fault; /* the request whose failure no other try mends; id NO_ID: none */
    char reason[TD_XFER_REASON_MAX];
};

/* Initiator: when a rail that this set lacks is tried next. */
struct qp_set_more {
    uint32_t peer_rails; /* bits of those that the acceptor has at all */
    uint64_t n_ups, at_ns, wait_ns;
};

struct qp_set {
    uint32_t index; /* in rdma->qp_set */
    uint64_t conn;
    uint32_t n_qps, n_rails, per_rail, next_turn, next_home;
    struct td_xfer_turns op_turns, slot_turns;
    bool may_pull; /* initiator: the acceptor can READ from this side's pool */
    struct queue_pair qp[TD_XFER_QPS_MAX];
    struct joining *joining; /* NULL: its queue pairs are connected, or not yet to be */
    struct qp_set_end end;
    uint8_t offer[TD_XFER_RDMA_SETUP_BYTES]; /* initiator: ours, for the answer */
    /* what the peer said */
    uint32_t peer_recv_wr, n_regions;
    uint64_t base, region_bytes;
    uint32_t rkey[TD_XFER_RKEYS_MAX]; /* [region * n_keys + rail of the peer's setup] */
    uint8_t key_at[TD_XFER_QPS_MAX];  /* queue pair -> that rail */
    uint32_t n_keys;                  /* rails of the peer's setup; 0: it gave no keys */
    bool windows;                     /* the accepting side, whichever it is, has them */
    uint32_t n_free, free_window[WINDOWS];
    struct qp_set_more more;
};

#define EACH_QP_SET(r, set)                                                                        \
    for (struct qp_set *const *set##_at = (r)->qp_set, *set; set##_at < (r)->qp_set + MAX_QP_SETS; \
         set##_at++)                                                                               \
        if ((set = *set##_at))

struct xfer_rdma_conn {
    struct qp_set *set; /* from SETUP on */
};

static inline struct qp_set *xfer_qp_set_of(const struct td_xfer_conn *c)
{
    return ((const struct xfer_rdma_conn *)c->own)->set;
}

/* Does it have a queue pair on this rail? */
static inline bool xfer_qp_set_uses(const struct qp_set *set, uint32_t rail)
{
    for (uint32_t q = 0; q < TD_XFER_QPS_MAX; q++)
        if (set->qp[q].qp && set->qp[q].rail == rail) return true;
    return false;
}

/* Waits that double: wait_ns is the one before; 0: none was. */
static inline uint64_t xfer_next_wait(uint64_t wait_ns, uint64_t first_ns, uint64_t max_ns)
{
    return wait_ns ? td_min_u64(2 * wait_ns, max_ns) : first_ns;
}

/* rails.c. open: the caller's thread, as mem_add. revive: rails that died or were never up are
 * tried again when their time has come (due; TD_NEVER_NS: all are there). */
td_status xfer_rdma_open(struct td_xfer *x, const struct td_xfer_config *config,
                         struct td_err *err);
/* registers the pool on every rail */
td_status xfer_rdma_mem_add(struct td_xfer *x, const struct td_arena *arena, struct td_err *err);
bool xfer_rdma_usable(const struct td_xfer *x); /* a rail is there whose port is active */
void xfer_rdma_revive(struct td_xfer *x, uint64_t now);
uint64_t xfer_rdma_due(const struct td_xfer *x);
void xfer_rdma_close(struct td_xfer *x); /* rdma.c */

/* flush.c. Registering: by dma-buf, else nvidia_peermem, else TD_ERR_UNSUPPORTED: both reasons. */
bool xfer_rdma_flush(struct td_xfer *x); /* makes what completed visible. True: under way */
/* before rails are registered: exports the pool, decides */
void xfer_flush_mem_add(struct td_xfer *x, size_t arena_bytes);
/* Registers bytes [at, at + n_bytes) of the arena. Any thread. */
td_status xfer_flush_reg(const struct td_xfer *x, struct td_vb_device *device, const char *name,
                         uint64_t at, uint64_t n_bytes, unsigned access, struct td_vb_mr **ret_mr,
                         struct td_err *err);
/* TD_OK where nothing is to be flushed. Any thread */
td_status xfer_flush_rail_open(const struct td_xfer *x, struct rail *rail, struct td_err *err);
void xfer_flush_rail_close(const struct xfer_rdma *r, struct rail *rail);

static inline uint8_t *xfer_rdma_cell(const struct xfer_rdma *r, int out, uint32_t set, uint32_t qp)
{
    return r->cells + (((size_t)out * MAX_QP_SETS + set) * TD_XFER_QPS_MAX + qp) * CELL;
}

/* what every queue pair's way from this rail has in common */
struct td_vb_route xfer_rail_route(const struct xfer_rdma *r, const struct rail *rail);
/* the pool is on it, and its port is active */
bool xfer_rail_is_usable(const struct rail *rail);
/* it delivers completions */
bool xfer_rail_tells(const struct rail *rail);
/* the best of the port's table, or the operator's */
td_status xfer_rail_pick_gid(const struct xfer_rdma *r, struct rail *rail, struct td_err *err);
/* it did something bad: new sets avoid it for a while */
void xfer_rail_erred(struct td_xfer *x, uint32_t rail);
/* no set is left */
void xfer_rails_close(struct xfer_rdma *r);

#endif
