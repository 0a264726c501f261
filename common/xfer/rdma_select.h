/* rdma_select.h - the decisions of the verbs backend that need no device: which GID to speak from, and which queue pair
 * attributes two sides share (doctor asks for those). Pure functions over the types of verbs.h; nothing is allocated.
 *
 * Why apart: each of them fails on real fabrics as "retries exceeded" and nothing else, so they are tables that a test can read, and errors say
 * what to set. Source: the transfer design, sections 1.1, 1.3, 1.6 and 7.4. */
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

#endif
