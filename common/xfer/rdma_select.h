/* rdma_select.h - the decisions of the verbs backend that need no device: which GID to speak from, which queue pair attributes two sides share,
 * and which rail takes the next piece. Pure functions over the types of verbs.h; time comes in as an argument; nothing is allocated.
 *
 * Why apart: each of them fails on real fabrics as "retries exceeded" and nothing else, so they are tables that a test can read, and errors say
 * what to set. Source: the transfer design, sections 1.1, 1.3, 1.5, 1.6 and 7.4; rail scores and pauses after Mooncake's TENT engine. */
#ifndef TD_XFER_RDMA_SELECT_H
#define TD_XFER_RDMA_SELECT_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/xfer/verbs.h"

/* --- GIDs ------------------------------------------------------------------------------------------------------------------------- */

#define TD_RDMA_GIDS_MAX 256
#define TD_RDMA_AUTO (-1)

/* Best first. Loopback and empty entries, and those whose network device is down, are never candidates. */
enum td_rdma_gid_class {
    TD_RDMA_GID_IB = 0,        /* InfiniBand: entry 0, the port's own */
    TD_RDMA_GID_V4_ROUTABLE,   /* RoCE v2 from here to the last but one */
    TD_RDMA_GID_V4_PRIVATE,    /* RFC 1918 and 100.64/10 */
    TD_RDMA_GID_V6_GLOBAL,
    TD_RDMA_GID_V6_UNIQUE_LOCAL,
    TD_RDMA_GID_V4_LINK_LOCAL,
    TD_RDMA_GID_V6_LINK_LOCAL,
    TD_RDMA_GID_ROCE_V1,       /* cannot be routed, and must meet its like */
    TD_RDMA_GID_UNUSABLE,
};

struct td_rdma_gid_ask {
    const char *device;                /* for messages */
    bool ethernet;
    const struct td_vb_gid *gids;      /* the port's entries that are not empty, in any order */
    uint32_t n_gids;                   /* at most TD_RDMA_GIDS_MAX */
    int32_t index;                     /* the operator's choice, or TD_RDMA_AUTO */
    const struct td_vb_gid *peer;      /* what the peer speaks from, NULL while unknown: type and address family must match */
};

enum td_rdma_gid_class td_rdma_gid_class_of(const struct td_vb_gid *gid, bool ethernet);

/* Positions in ask->gids, best first: by class, of equal class those whose network device is known to be up, then by index. The caller tries them in
 * turn. TD_ERR_INVALID: the chosen index is not there or cannot serve. TD_ERR_UNSUPPORTED: no entry serves; the message says why
 * each kind was left out. Outputs are untouched then. */
td_status td_rdma_gid_rank(const struct td_rdma_gid_ask *ask, uint32_t ret_positions[TD_RDMA_GIDS_MAX], uint32_t *ret_n, struct td_err *err);

/* --- attributes ------------------------------------------------------------------------------------------------------------------- */

#define TD_RDMA_MAX_QPS 16             /* per rail and peer */
#define TD_RDMA_SEND_DEPTH 256
#define TD_RDMA_RECV_DEPTH 64          /* receives without memory, for WRITE_WITH_IMM */
#define TD_RDMA_SRQ_PEERS 64           /* more share one SRQ, where the device has any */
#define TD_RDMA_SRQ_DEPTH 4096
#define TD_RDMA_CHAIN 32               /* work requests per doorbell, and per completion */
#define TD_RDMA_RD_ATOMIC 16

/* What one side brings to one rail. It travels in the handshake: td_rdma_settle trusts none of it. */
struct td_rdma_offer {
    bool ethernet;
    uint32_t mtu_bytes;                /* the port's active one: 256, 512, 1024, 2048 or 4096 */
    uint32_t max_qp, max_qp_wr, max_sge, max_cqe, max_srq_wr; /* the device's; max_srq_wr 0: no SRQ */
    uint32_t rd_atomic_in, rd_atomic_out; /* the device's; 0: no READ that way */
    uint32_t n_peers;                  /* share a completion queue with this one, itself included */
    uint32_t n_qps;                    /* wanted */
    uint8_t timeout, retry, rnr_retry, min_rnr_timer;
    uint8_t traffic_class, service_level, hop_limit;
};

/* Limits as the device states them and the defaults of section 7.4: 2 queue pairs (4 from 800 Gb/s), timeout 16, retry 7, RNR retry 7,
 * minimal RNR timer 12, traffic class 106 on RoCE (DSCP 26, ECN), hop limit 64. The caller overwrites what its options say. */
void td_rdma_offer_init(struct td_rdma_offer *ret_offer, const struct td_vb_limits *limits, const struct td_vb_port *port, uint32_t n_peers);

struct td_rdma_attrs {
    uint32_t mtu_bytes, n_qps;         /* the same on both sides */
    uint32_t send_depth, recv_depth;   /* ours, per queue pair; recv_depth is of the SRQ when srq is set */
    uint32_t cq_depth;                 /* ours: holds the flush of everything that n_peers can have posted */
    uint32_t max_sge, chain, signal_every;
    bool srq;
    uint32_t imm_credit;               /* WRITE_WITH_IMMs that may be on their way to the peer per queue pair */
    uint8_t rd_atomic_in, rd_atomic_out; /* of our queue pair; the peer's are the same crosswise. out 0: READs towards the peer cannot be asked */
    uint8_t timeout, retry, rnr_retry, min_rnr_timer; /* the more patient of both, the same on both sides */
    uint8_t traffic_class, service_level, hop_limit;  /* ours: they mark the packets that we send */
    bool class_differs;                /* worth a warning: the sides mark their packets differently */
};

/* Both sides call it with the offers crosswise and come to attributes that fit. TD_ERR_INVALID: a field of an offer is out of range;
 * TD_ERR_UNSUPPORTED: the two cannot talk, or a device is too small even for one queue pair. The message says whose field, its value, the limit. */
td_status td_rdma_settle(const struct td_rdma_offer *ours, const struct td_rdma_offer *theirs, struct td_rdma_attrs *ret_attrs, struct td_err *err);

/* The attributes as qp_rtr and qp_rts take them; addresses, numbers and keys are the caller's to fill. */
void td_rdma_attrs_route(const struct td_rdma_attrs *attrs, struct td_vb_route *route);

/* The longest that a lost packet may go unreported: 4 x 4.096 us x 2^timeout per try (the specification allows the factor of 4). */
uint64_t td_rdma_retry_ns(const struct td_rdma_attrs *attrs);

/* --- rails ------------------------------------------------------------------------------------------------------------------------ */

#define TD_RAILS_MAX 16
#define TD_RAIL_ERRORS 3               /* within the window: a pause */
#define TD_RAIL_WINDOW_NS 10000000000ull
#define TD_RAIL_PAUSE_NS 30000000000ull
#define TD_RAIL_PAUSE_MAX_NS 300000000000ull
#define TD_RAIL_REPROBE_NS 1000000000ull
#define TD_RAIL_EXPLORE 100            /* one pick in so many goes to the healthy rail that was used longest ago */

/*                       3 errors in 10 s                    pause over: td_rails_take_probe
 *           HEALTHY ------------------------> PAUSED ------------------------------------------> PROBING
 *              ^  ^                              ^   30 s, doubling to 300 s                       |   |
 *              |  |                              +------------------- error ----------------------+   |
 *              |  +---------------------------------------------------- done -------------------------+
 *              |
 *              |          link down (from any)                link up: pause over at once
 *              +- - - - - - - - - - - - - - -> DOWN ----------------------------------------> PAUSED
 */
enum td_rail_state { TD_RAIL_HEALTHY = 0, TD_RAIL_PAUSED, TD_RAIL_PROBING, TD_RAIL_DOWN };

enum td_rail_distance { TD_RAIL_NEAR = 0, TD_RAIL_SAME_SOCKET = 1, TD_RAIL_FAR = 2 }; /* cost 1, 5, 10 */

struct td_rail {
    enum td_rail_state state;
    enum td_rail_distance distance;
    double bytes_per_s;                /* exponential average of what it achieves while busy */
    double link_bytes_per_s;
    uint64_t bytes_in_flight;
    uint64_t busy_since_ns, busy_bytes; /* the measurement under way */
    uint64_t last_pick;                /* number of the pick */
    uint64_t errors_ns[TD_RAIL_ERRORS]; /* the latest ones, as a ring */
    uint32_t n_errors;                 /* since the last pause */
    uint64_t pause_ns;                 /* of the next pause */
    uint64_t resume_ns;                /* end of this pause */
    uint64_t trouble_ns;               /* last error or end of a pause: when long ago, pauses begin at 30 s again */
};

struct td_rails {                      /* owned by the thread that posts */
    uint32_t n;
    uint64_t n_picks;
    struct td_rail rail[TD_RAILS_MAX];
};

/* bits_per_s 0: not known, taken as the fastest known one. n in 1..TD_RAILS_MAX, else TD_ERR_INVALID. */
td_status td_rails_init(struct td_rails *rails, uint32_t n, const uint64_t *bits_per_s, const enum td_rail_distance *distance, struct td_err *err);

/* Seconds until what is in flight and `bytes` more are through, times the cost of distance: smaller is better. */
double td_rail_score(const struct td_rail *rail, uint64_t bytes);

/* The rail for the next `bytes`, -1 when none is healthy. `allowed`: bit per rail (those with a queue pair to this peer that is not being retried).
 * The caller then says what became of them: posted at once, and later for the same bytes exactly one of done, failed, dropped. */
int td_rails_pick(struct td_rails *rails, uint64_t bytes, uint32_t allowed);
void td_rails_posted(struct td_rails *rails, uint32_t i, uint64_t bytes, uint64_t now_ns);
void td_rails_done(struct td_rails *rails, uint32_t i, uint64_t bytes, uint64_t now_ns);
/* One error of the path. All that one queue pair's end flushes is one failure: the bytes of the rest are dropped. */
void td_rails_failed(struct td_rails *rails, uint32_t i, uint64_t bytes, uint64_t now_ns);
/* Cancelled or flushed: says nothing of the rail. A probe that is dropped is due again after TD_RAIL_REPROBE_NS. */
void td_rails_dropped(struct td_rails *rails, uint32_t i, uint64_t bytes, uint64_t now_ns);

/* A rail whose pause is over: the caller sends a small transfer on it and reports it like any other (bytes may be 0). -1: none. */
int td_rails_take_probe(struct td_rails *rails, uint64_t now_ns);
/* When td_rails_take_probe may next answer; UINT64_MAX: not by time alone. */
uint64_t td_rails_next_ns(const struct td_rails *rails);
/* The port's own word (async events). */
void td_rails_link(struct td_rails *rails, uint32_t i, bool up, uint64_t now_ns);

#endif
