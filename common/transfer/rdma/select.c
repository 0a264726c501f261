/* select.c - tables and arithmetic; no state. */
#include "common/transfer/rdma/select.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "common/base/min.h"

/* --- GIDs ------------------------------------------------------------------------------------- */

static const uint8_t v4_mapped[12] = {[10] = 0xff, [11] = 0xff};

static bool is_v4(const struct td_vb_gid *gid)
{
    return memcmp(gid->raw, v4_mapped, sizeof v4_mapped) == 0;
}

static enum td_rdma_gid_class class_v4(const uint8_t *a)
{
    /* this network, loopback, multicast and above */
    if (a[0] == 0 || a[0] == 127 || a[0] >= 224) return TD_RDMA_GID_UNUSABLE;
    if (a[0] == 169 && a[1] == 254) return TD_RDMA_GID_V4_LINK_LOCAL;
    bool is_private = a[0] == 10 || (a[0] == 172 && (a[1] & 0xf0) == 16) ||
                      (a[0] == 192 && a[1] == 168) || (a[0] == 100 && (a[1] & 0xc0) == 64);
    return is_private ? TD_RDMA_GID_V4_PRIVATE : TD_RDMA_GID_V4_ROUTABLE;
}

static enum td_rdma_gid_class class_v6(const uint8_t *a)
{
    static const uint8_t zeros[15];
    /* :: and ::1 */
    if (memcmp(a, zeros, sizeof zeros) == 0 && a[15] <= 1) return TD_RDMA_GID_UNUSABLE;
    if (a[0] == 0xff) return TD_RDMA_GID_UNUSABLE;
    if (a[0] == 0xfe && (a[1] & 0xc0) == 0x80) return TD_RDMA_GID_V6_LINK_LOCAL;
    return (a[0] & 0xfe) == 0xfc ? TD_RDMA_GID_V6_UNIQUE_LOCAL : TD_RDMA_GID_V6_GLOBAL;
}

enum td_rdma_gid_class td_rdma_gid_class_of(const struct td_vb_gid *gid, bool ethernet)
{
    static const uint8_t zeros[16];
    if (!ethernet)
        return gid->type == TD_VB_GID_IB && memcmp(gid->raw, zeros, sizeof zeros)
                   ? TD_RDMA_GID_IB
                   : TD_RDMA_GID_UNUSABLE;
    enum td_rdma_gid_class address =
        is_v4(gid) ? class_v4(gid->raw + sizeof v4_mapped) : class_v6(gid->raw);
    if (address == TD_RDMA_GID_UNUSABLE || gid->type == TD_VB_GID_ROCE_V2) return address;
    return gid->type == TD_VB_GID_ROCE_V1 ? TD_RDMA_GID_ROCE_V1 : TD_RDMA_GID_UNUSABLE;
}

enum refusal { TAKEN = 0, EMPTY, DOWN, N_REFUSALS };

static bool is_down(const struct td_vb_gid *gid) { return gid->netdev[0] && !gid->netdev_up; }

static enum refusal refusal_of(const struct td_rdma_gid_ask *ask, const struct td_vb_gid *gid)
{
    if (td_rdma_gid_class_of(gid, ask->ethernet) == TD_RDMA_GID_UNUSABLE) return EMPTY;
    return ask->ethernet && is_down(gid) ? DOWN : TAKEN;
}

static td_status check_chosen(const struct td_rdma_gid_ask *ask, uint32_t *ret_position,
                              struct td_err *err)
{
    for (uint32_t i = 0; i < ask->n_gids; i++) {
        const struct td_vb_gid *gid = &ask->gids[i];
        if (gid->index != (uint32_t)ask->index) continue;
        enum refusal why = refusal_of(ask, gid);
        if (why == EMPTY)
            return td_fail(err, TD_ERR_INVALID,
                           "%s: GID index %d is set and holds no address to speak from (zero, "
                           "loopback or multicast)",
                           ask->device, ask->index);
        if (why == DOWN)
            return td_fail(
                err, TD_ERR_INVALID,
                "%s: GID index %d is set and its network device %.31s is down: bring it up",
                ask->device, ask->index, gid->netdev);
        *ret_position = i;
        return TD_OK;
    }
    return td_fail(err, TD_ERR_INVALID,
                   "%s: GID index %d is set and the port has no such entry (%u in use)",
                   ask->device, ask->index, ask->n_gids);
}

/* Does a come before b? */
static bool is_better(const struct td_rdma_gid_ask *ask, const struct td_vb_gid *a,
                      const struct td_vb_gid *b)
{
    enum td_rdma_gid_class class_a = td_rdma_gid_class_of(a, ask->ethernet),
                           class_b = td_rdma_gid_class_of(b, ask->ethernet);
    if (class_a != class_b) return class_a < class_b;
    if (ask->ethernet && a->netdev_up != b->netdev_up) return a->netdev_up;
    return a->index < b->index;
}

td_status td_rdma_gid_rank(const struct td_rdma_gid_ask *ask,
                           uint32_t ret_positions[TD_RDMA_GIDS_MAX], uint32_t *ret_n,
                           struct td_err *err)
{
    if (ask->n_gids > TD_RDMA_GIDS_MAX)
        return td_fail(err, TD_ERR_INVALID, "%s: n_gids is %u, must be at most %d", ask->device,
                       ask->n_gids, TD_RDMA_GIDS_MAX);
    if (ask->index < TD_RDMA_AUTO)
        return td_fail(err, TD_ERR_INVALID, "%s: GID index is %d, must be %d (automatic) or more",
                       ask->device, ask->index, TD_RDMA_AUTO);
    if (ask->index != TD_RDMA_AUTO) {
        td_status status = check_chosen(ask, &ret_positions[0], err);
        if (!status) *ret_n = 1;
        return status;
    }
    uint32_t n = 0, n_refused[N_REFUSALS] = {0};
    for (uint32_t i = 0; i < ask->n_gids; i++) n_refused[refusal_of(ask, &ask->gids[i])]++;
    if (!n_refused[TAKEN])
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "%s: none of %u GIDs can be used: %u without an address, %u on a network device that "
            "is down: give the network device an address of the right family and bring it up",
            ask->device, ask->n_gids, n_refused[EMPTY], n_refused[DOWN]);
    for (uint32_t i = 0; i < ask->n_gids; i++) {
        if (refusal_of(ask, &ask->gids[i]) != TAKEN) continue;
        uint32_t k = n++;
        for (; k > 0 && is_better(ask, &ask->gids[i], &ask->gids[ret_positions[k - 1]]); k--)
            ret_positions[k] = ret_positions[k - 1];
        ret_positions[k] = i;
    }
    *ret_n = ask->ethernet ? n : 1; /* InfiniBand: the other entries are aliases of one port */
    return TD_OK;
}

/* --- attributes ------------------------------------------------------------------------------- */

#define FAST_PORT_BITS_PER_S 800000000000ull
#define SEND_DEPTH 256
#define SEND_DEPTH_MIN 2 /* a WRITE and the WRITE_WITH_IMM that ends it */
#define RECV_DEPTH 64
#define SRQ_DEPTH 4096
#define CQ_DEPTH 131072 /* flushes of more than 200 peers of two queue pairs */
#define RD_ATOMIC 16

td_status td_rdma_plan(const char *device, const struct td_vb_limits *l,
                       const struct td_vb_port *port, struct td_rdma_plan *ret_plan,
                       struct td_err *err)
{
    struct td_rdma_plan p = {
        .send_depth = td_min_u32(l->max_qp_wr, SEND_DEPTH),
        .recv_depth = td_min_u32(l->max_qp_wr, RECV_DEPTH),
        .n_sge = td_min_u32(l->max_sge, TD_VB_SGE_MAX),
        .cq_depth = td_min_u32(l->max_cqe, CQ_DEPTH),
        .srq_depth = l->max_srq ? td_min_u32(l->max_srq_wr, SRQ_DEPTH) : 0,
        .n_qps = td_min_u32(port->bits_per_s >= FAST_PORT_BITS_PER_S ? 4 : 2, l->max_qp),
        .mtu_bytes = port->mtu_bytes,
        .ethernet = port->ethernet,
        .rd_atomic_in = (uint8_t)td_min_u32(l->max_rd_atomic_in, RD_ATOMIC),
        .rd_atomic_out = (uint8_t)td_min_u32(l->max_rd_atomic_out, RD_ATOMIC),
    };
    if (!p.n_qps || p.send_depth < SEND_DEPTH_MIN || p.n_sge < 1 ||
        p.cq_depth < p.send_depth + p.recv_depth)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "rdma: device %s allows %u queue pairs (max_qp), %u work requests "
                       "(max_qp_wr), %u pieces (max_sge) and %u "
                       "completions (max_cqe): too few",
                       device, l->max_qp, l->max_qp_wr, l->max_sge, l->max_cqe);
    if (p.cq_depth <= 2 * p.srq_depth) p.srq_depth = 0; /* its flush would fill the queue */
    p.words = (p.recv_depth + 1) / 2;
    uint32_t need =
        p.n_qps * (p.send_depth + p.recv_depth); /* of completions, when a set of them ends */
    p.n_peers = td_min_u32(l->max_qp / p.n_qps, (p.cq_depth - p.srq_depth) / need);
    *ret_plan = p;
    return TD_OK;
}

uint8_t td_rdma_traffic_class(const char *root, const char *device, uint8_t port, int option,
                              enum td_vb_gid_type type)
{
    char path[PATH_MAX], line[128];
    unsigned class = 0;
    if (option) return option < 0 || option > UINT8_MAX ? 0 : (uint8_t)option;
    if (type == TD_VB_GID_IB) return 0; /* a service level says it there */
    snprintf(path, sizeof path, "%s/sys/class/infiniband/%s/tc/%u/traffic_class", root, device,
             port);
    FILE *f = fopen(path, "re");             /* not every driver has it */
    while (f && fgets(line, sizeof line, f)) /* lines of single addresses may stand there, too */
        if (sscanf(line, "Global tclass=%u", &class) == 1) break;
    if (f) fclose(f);
    if (class >= 1 && class <= UINT8_MAX) return (uint8_t) class;
    return type == TD_VB_GID_ROCE_V2 ? TD_RDMA_DSCP_CLASS : 0;
}

td_status td_rdma_settle(const struct td_rdma_side *ours, const struct td_rdma_side *theirs,
                         struct td_vb_route *route, struct td_err *err)
{
    if (ours->ethernet != theirs->ethernet)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "our port is %s and the peer's %s: name devices of one fabric on both sides",
                       ours->ethernet ? "Ethernet" : "InfiniBand",
                       theirs->ethernet ? "Ethernet" : "InfiniBand");
    route->ethernet = ours->ethernet;
    route->mtu_bytes = td_min_u32(ours->mtu_bytes, theirs->mtu_bytes);
    route->rd_atomic_in = (uint8_t)td_min_u32(ours->rd_atomic_in, theirs->rd_atomic_out);
    route->rd_atomic_out = (uint8_t)td_min_u32(ours->rd_atomic_out, theirs->rd_atomic_in);
    route->hop_limit = TD_RDMA_HOP_LIMIT;
    route->min_rnr_timer = TD_RDMA_MIN_RNR_TIMER;
    return TD_OK;
}
