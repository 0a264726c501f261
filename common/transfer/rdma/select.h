/* select.h - the decisions of the verbs backend that need no device: which GID to speak from, what
 * to take of a device, and which queue pair attributes two sides share. The engine and doctor both
 * ask here, so doctor says what the engine does. Pure functions over the types of verbs.h, but for
 * td_rdma_traffic_class, which reads one file; nothing is allocated.
 *
 * Why apart: a wrong choice shows on a real fabric only as "retries exceeded". So the choices are
 * tables that a test can read, and errors say what to set. Sources: the InfiniBand Architecture
 * Specification, volume 1, with its annex 17 (RoCE v2); ibv_modify_qp(3); RFC 2474 (DSCP). */
#ifndef TD_TRANSFER_RDMA_SELECT_H
#define TD_TRANSFER_RDMA_SELECT_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/transfer/rdma/verbs.h"

/* --- GIDs ------------------------------------------------------------------------------------- */

#define TD_RDMA_GIDS_MAX 256
#define TD_RDMA_AUTO (-1)

/* Best first. Never loopback, empty, or on a network device that is down. */
enum td_rdma_gid_class {
    TD_RDMA_GID_IB = 0,      /* InfiniBand: entry 0, the port's own */
    TD_RDMA_GID_V4_ROUTABLE, /* RoCE v2 from here to the last but one */
    TD_RDMA_GID_V4_PRIVATE,  /* RFC 1918 and 100.64/10 */
    TD_RDMA_GID_V6_GLOBAL,
    TD_RDMA_GID_V6_UNIQUE_LOCAL,
    TD_RDMA_GID_V4_LINK_LOCAL,
    TD_RDMA_GID_V6_LINK_LOCAL,
    TD_RDMA_GID_ROCE_V1, /* cannot be routed, and must meet its like */
    TD_RDMA_GID_UNUSABLE,
};

struct td_rdma_gid_ask {
    const char *device; /* for messages */
    bool ethernet;
    const struct td_vb_gid *gids; /* the port's entries that are not empty, in any order */
    uint32_t n_gids;              /* at most TD_RDMA_GIDS_MAX */
    int32_t index;                /* the operator's choice, or TD_RDMA_AUTO */
};

enum td_rdma_gid_class td_rdma_gid_class_of(const struct td_vb_gid *gid, bool ethernet);

/* Positions in ask->gids, best first: by class, of equal class those whose network device is known
 * to be up, then by index. TD_ERR_INVALID: the chosen index is not there or cannot serve.
 * TD_ERR_UNSUPPORTED: no entry serves; the message says why. */
td_status td_rdma_gid_rank(const struct td_rdma_gid_ask *ask,
                           uint32_t ret_positions[TD_RDMA_GIDS_MAX], uint32_t *ret_n,
                           struct td_err *err);

/* The traffic class to send with. option: the operator's, > 0; -1: none (0); 0: what the
 * administrator gave the whole port (ROOT/sys/class/infiniband/DEVICE/tc/PORT/traffic_class, a line
 * "Global tclass=N", N 1..255), else TD_RDMA_DSCP_CLASS on RoCE v2, 0 elsewhere. root: "" but in
 * tests. */
uint8_t td_rdma_traffic_class(const char *root, const char *device, uint8_t port, int option,
                              enum td_vb_gid_type type);

/* --- attributes ------------------------------------------------------------------------------- */

#define TD_RDMA_CHAIN 32   /* work requests per doorbell, and per completion */
#define TD_RDMA_TIMEOUT 16 /* code: 4.096 us x 2^16 */
#define TD_RDMA_RETRY 7
#define TD_RDMA_RNR_RETRY 7 /* code: for ever */
#define TD_RDMA_MIN_RNR_TIMER 12
#define TD_RDMA_HOP_LIMIT 64
#define TD_RDMA_DSCP_CLASS 106 /* traffic class on RoCE v2: DSCP 26, ECN */

/* What the engine takes of one port, from what its device allows. */
struct td_rdma_plan {
    uint32_t n_qps;                  /* per peer: 2, from 800 Gb/s on 4; or what the device has */
    uint32_t send_depth, recv_depth; /* of a queue pair: at most 256 requests, 64 receives */
    uint32_t n_sge;                  /* pieces of a request, at most TD_VB_SGE_MAX */
    uint32_t cq_depth;               /* of the one completion queue: at most 131072 */
    uint32_t srq_depth;              /* of the shared receive queue, at most 4096; 0: none fits */
    uint32_t words;   /* last words that a queue pair takes unread: half of recv_depth */
    uint32_t n_peers; /* so many fit, each with n_qps and receives of its own */
    uint32_t mtu_bytes;
    bool ethernet;
    uint8_t rd_atomic_in, rd_atomic_out; /* READs at a time, at most 16 */
};

/* TD_ERR_UNSUPPORTED: too small for one queue pair; the message says which limit. */
td_status td_rdma_plan(const char *device, const struct td_vb_limits *limits,
                       const struct td_vb_port *port, struct td_rdma_plan *ret_plan,
                       struct td_err *err);

/* What one side brings to one rail; it travels in the handshake. */
struct td_rdma_side {
    bool ethernet;
    uint32_t mtu_bytes;
    uint8_t rd_atomic_in, rd_atomic_out; /* 0: no READ that way */
};

/* Both sides call it crosswise and come to what fits: the smaller MTU, and for each direction the
 * fewer READs. Fills these fields of the route, and the constant ones. TD_ERR_UNSUPPORTED: Ethernet
 * and InfiniBand. */
td_status td_rdma_settle(const struct td_rdma_side *ours, const struct td_rdma_side *theirs,
                         struct td_vb_route *route, struct td_err *err);

#endif
