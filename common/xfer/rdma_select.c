/* rdma_select.c - tables and arithmetic; no state but the rails'.
 *
 * Settling is symmetric without a leader: fit() says what one side's device can carry for a number of queue pairs, from its offer alone, so each
 * side computes both fits and takes what both can. Only what is named "ours" differs between the two results. */
#include "common/xfer/rdma_select.h"

#include <string.h>

static uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
static uint32_t max_u32(uint32_t a, uint32_t b) { return a > b ? a : b; }

/* --- GIDs ------------------------------------------------------------------------------------------------------------------------- */

static const uint8_t v4_mapped[12] = {[10] = 0xff, [11] = 0xff};

static bool is_v4(const struct td_vb_gid *gid) { return memcmp(gid->raw, v4_mapped, sizeof v4_mapped) == 0; }

static enum td_rdma_gid_class class_v4(const uint8_t *a)
{
    if (a[0] == 0 || a[0] == 127 || a[0] >= 224) return TD_RDMA_GID_UNUSABLE; /* this network, loopback, multicast and above */
    if (a[0] == 169 && a[1] == 254) return TD_RDMA_GID_V4_LINK_LOCAL;
    bool is_private = a[0] == 10 || (a[0] == 172 && (a[1] & 0xf0) == 16) || (a[0] == 192 && a[1] == 168) || (a[0] == 100 && (a[1] & 0xc0) == 64);
    return is_private ? TD_RDMA_GID_V4_PRIVATE : TD_RDMA_GID_V4_ROUTABLE;
}

static enum td_rdma_gid_class class_v6(const uint8_t *a)
{
    static const uint8_t zeros[15];
    if (memcmp(a, zeros, sizeof zeros) == 0 && a[15] <= 1) return TD_RDMA_GID_UNUSABLE; /* :: and ::1 */
    if (a[0] == 0xff) return TD_RDMA_GID_UNUSABLE;
    if (a[0] == 0xfe && (a[1] & 0xc0) == 0x80) return TD_RDMA_GID_V6_LINK_LOCAL;
    return (a[0] & 0xfe) == 0xfc ? TD_RDMA_GID_V6_UNIQUE_LOCAL : TD_RDMA_GID_V6_GLOBAL;
}

enum td_rdma_gid_class td_rdma_gid_class_of(const struct td_vb_gid *gid, bool ethernet)
{
    static const uint8_t zeros[16];
    if (!ethernet) return gid->type == TD_VB_GID_IB && memcmp(gid->raw, zeros, sizeof zeros) ? TD_RDMA_GID_IB : TD_RDMA_GID_UNUSABLE;
    enum td_rdma_gid_class address = is_v4(gid) ? class_v4(gid->raw + sizeof v4_mapped) : class_v6(gid->raw);
    if (address == TD_RDMA_GID_UNUSABLE || gid->type == TD_VB_GID_ROCE_V2) return address;
    return gid->type == TD_VB_GID_ROCE_V1 ? TD_RDMA_GID_ROCE_V1 : TD_RDMA_GID_UNUSABLE;
}

enum refusal { TAKEN = 0, EMPTY, DOWN, FOREIGN, N_REFUSALS };

static bool is_down(const struct td_vb_gid *gid) { return gid->netdev[0] && !gid->netdev_up; }

static enum refusal refusal_of(const struct td_rdma_gid_ask *ask, const struct td_vb_gid *gid)
{
    if (td_rdma_gid_class_of(gid, ask->ethernet) == TD_RDMA_GID_UNUSABLE) return EMPTY;
    if (ask->ethernet && is_down(gid)) return DOWN;
    if (ask->peer && gid->type != ask->peer->type) return FOREIGN;
    return ask->peer && ask->ethernet && is_v4(gid) != is_v4(ask->peer) ? FOREIGN : TAKEN;
}

static const char *gid_kind(const struct td_vb_gid *gid)
{
    if (gid->type == TD_VB_GID_IB) return "InfiniBand";
    if (gid->type == TD_VB_GID_ROCE_V1) return is_v4(gid) ? "RoCE v1 over IPv4" : "RoCE v1 over IPv6";
    return is_v4(gid) ? "RoCE v2 over IPv4" : "RoCE v2 over IPv6";
}

static td_status check_chosen(const struct td_rdma_gid_ask *ask, uint32_t *ret_position, struct td_err *err)
{
    for (uint32_t i = 0; i < ask->n_gids; i++) {
        const struct td_vb_gid *gid = &ask->gids[i];
        if (gid->index != (uint32_t)ask->index) continue;
        switch (refusal_of(ask, gid)) {
        case EMPTY:
            return td_fail(err, TD_ERR_INVALID, "%s: GID index %d is set and holds no address to speak from (zero, loopback or multicast)",
                           ask->device, ask->index);
        case DOWN:
            return td_fail(err, TD_ERR_INVALID, "%s: GID index %d is set and its network device %.31s is down: bring it up", ask->device,
                           ask->index, gid->netdev);
        case FOREIGN:
            return td_fail(err, TD_ERR_INVALID, "%s: GID index %d is set and is %s, and the peer's is %s: both sides must agree", ask->device,
                           ask->index, gid_kind(gid), gid_kind(ask->peer));
        default:
            *ret_position = i;
            return TD_OK;
        }
    }
    return td_fail(err, TD_ERR_INVALID, "%s: GID index %d is set and the port has no such entry (%u in use)", ask->device, ask->index, ask->n_gids);
}

/* Does a come before b? */
static bool is_better(const struct td_rdma_gid_ask *ask, const struct td_vb_gid *a, const struct td_vb_gid *b)
{
    enum td_rdma_gid_class class_a = td_rdma_gid_class_of(a, ask->ethernet), class_b = td_rdma_gid_class_of(b, ask->ethernet);
    if (class_a != class_b) return class_a < class_b;
    if (ask->ethernet && a->netdev_up != b->netdev_up) return a->netdev_up;
    return a->index < b->index;
}

td_status td_rdma_gid_rank(const struct td_rdma_gid_ask *ask, uint32_t ret_positions[TD_RDMA_GIDS_MAX], uint32_t *ret_n, struct td_err *err)
{
    if (ask->n_gids > TD_RDMA_GIDS_MAX)
        return td_fail(err, TD_ERR_INVALID, "%s: n_gids is %u, must be at most %d", ask->device, ask->n_gids, TD_RDMA_GIDS_MAX);
    if (ask->index < TD_RDMA_AUTO)
        return td_fail(err, TD_ERR_INVALID, "%s: GID index is %d, must be %d (automatic) or more", ask->device, ask->index, TD_RDMA_AUTO);
    if (ask->index != TD_RDMA_AUTO) {
        uint32_t position = 0;
        td_status s = check_chosen(ask, &position, err);
        if (s) return s;
        ret_positions[0] = position;
        *ret_n = 1;
        return TD_OK;
    }
    uint32_t n = 0, n_refused[N_REFUSALS] = {0};
    for (uint32_t i = 0; i < ask->n_gids; i++) n_refused[refusal_of(ask, &ask->gids[i])]++;
    if (!n_refused[TAKEN])
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "%s: none of %u GIDs can be used: %u without an address, %u on a network device that is down, %u of another kind than the "
                       "peer's%s%s%s: give the network device an address of the right family and bring it up",
                       ask->device, ask->n_gids, n_refused[EMPTY], n_refused[DOWN], n_refused[FOREIGN], ask->peer ? " (" : "",
                       ask->peer ? gid_kind(ask->peer) : "", ask->peer ? ")" : "");
    for (uint32_t i = 0; i < ask->n_gids; i++) {
        if (refusal_of(ask, &ask->gids[i]) != TAKEN) continue;
        uint32_t k = n++;
        for (; k > 0 && is_better(ask, &ask->gids[i], &ask->gids[ret_positions[k - 1]]); k--) ret_positions[k] = ret_positions[k - 1];
        ret_positions[k] = i;
    }
    *ret_n = ask->ethernet ? n : 1; /* InfiniBand: the other entries are aliases of one port */
    return TD_OK;
}

/* --- attributes ------------------------------------------------------------------------------------------------------------------- */

#define FAST_PORT_BITS_PER_S 800000000000ull
#define SEND_DEPTH_MIN 2 /* a WRITE and the WRITE_WITH_IMM that ends it */

void td_rdma_offer_init(struct td_rdma_offer *ret_offer, const struct td_vb_limits *limits, const struct td_vb_port *port, uint32_t n_peers)
{
    *ret_offer = (struct td_rdma_offer){
        .ethernet = port->ethernet,
        .mtu_bytes = port->mtu_bytes,
        .max_qp = limits->max_qp,
        .max_qp_wr = limits->max_qp_wr,
        .max_sge = limits->max_sge,
        .max_cqe = limits->max_cqe,
        .max_srq_wr = limits->max_srq ? limits->max_srq_wr : 0,
        .rd_atomic_in = limits->max_rd_atomic_in,
        .rd_atomic_out = limits->max_rd_atomic_out,
        .n_peers = n_peers,
        .n_qps = port->bits_per_s >= FAST_PORT_BITS_PER_S ? 4 : 2,
        .timeout = 16,
        .retry = 7,
        .rnr_retry = 7,
        .min_rnr_timer = 12,
        .traffic_class = port->ethernet ? 106 : 0,
        .hop_limit = 64,
    };
}

static td_status check_offer(const struct td_rdma_offer *o, const char *whose, struct td_err *err)
{
    const struct {
        const char *field;
        uint32_t value, low, high;
    } fields[] = {
        {"n_qps", o->n_qps, 1, TD_RDMA_MAX_QPS},
        {"n_peers", o->n_peers, 1, 65536},
        {"timeout", o->timeout, 1, 31}, /* 0 would wait for ever */
        {"retry", o->retry, 0, 7},
        {"rnr_retry", o->rnr_retry, 0, 7},
        {"min_rnr_timer", o->min_rnr_timer, 0, 31},
        {"service_level", o->service_level, 0, 15},
        {"hop_limit", o->hop_limit, 1, 255},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value < fields[i].low || fields[i].value > fields[i].high)
            return td_fail(err, TD_ERR_INVALID, "rdma: %s %s is %u, must be in %u..%u", whose, fields[i].field, fields[i].value, fields[i].low,
                           fields[i].high);
    if (o->mtu_bytes < 256 || o->mtu_bytes > 4096 || (o->mtu_bytes & (o->mtu_bytes - 1)))
        return td_fail(err, TD_ERR_INVALID, "rdma: %s mtu_bytes is %u, must be 256, 512, 1024, 2048 or 4096", whose, o->mtu_bytes);
    return TD_OK;
}

struct fit {
    uint32_t n_qps, send_depth, recv_depth, cq_depth;
    bool srq;
};

static uint64_t flush_of(const struct td_rdma_offer *o, const struct fit *f)
{
    uint64_t n_qps = (uint64_t)o->n_peers * f->n_qps;
    return n_qps * f->send_depth + (f->srq ? 1 : n_qps) * (uint64_t)f->recv_depth;
}

/* What o's device carries with at most n_qps queue pairs per peer: depths shrink first, then queue pairs. */
static td_status fit(const struct td_rdma_offer *o, uint32_t n_qps, const char *whose, struct fit *ret, struct td_err *err)
{
    if (o->max_qp_wr < SEND_DEPTH_MIN)
        return td_fail(err, TD_ERR_UNSUPPORTED, "rdma: %s device takes max_qp_wr %u work requests per queue pair, needs at least %d", whose,
                       o->max_qp_wr, SEND_DEPTH_MIN);
    if (o->max_sge < 1)
        return td_fail(err, TD_ERR_UNSUPPORTED, "rdma: %s device takes max_sge %u pieces per work request, needs at least 1", whose, o->max_sge);
    if (o->max_qp < o->n_peers)
        return td_fail(err, TD_ERR_UNSUPPORTED, "rdma: %s device has max_qp %u queue pairs, fewer than its n_peers %u: lower the number of peers",
                       whose, o->max_qp, o->n_peers);
    for (struct fit f = {.n_qps = min_u32(n_qps, o->max_qp / o->n_peers)}; f.n_qps >= 1; f.n_qps--) {
        f.srq = o->n_peers > TD_RDMA_SRQ_PEERS && o->max_srq_wr >= o->n_peers * f.n_qps; /* every queue pair can have its one */
        f.send_depth = min_u32(TD_RDMA_SEND_DEPTH, o->max_qp_wr);
        f.recv_depth = f.srq ? min_u32(max_u32(TD_RDMA_SRQ_DEPTH, o->n_peers * f.n_qps), o->max_srq_wr)
                             : min_u32(TD_RDMA_RECV_DEPTH, o->max_qp_wr);
        uint32_t recv_min = f.srq ? o->n_peers * f.n_qps : 1;
        while (flush_of(o, &f) > o->max_cqe && (f.send_depth > SEND_DEPTH_MIN || f.recv_depth > recv_min)) {
            f.send_depth = max_u32(f.send_depth / 2, SEND_DEPTH_MIN);
            f.recv_depth = max_u32(f.recv_depth / 2, recv_min);
        }
        if (flush_of(o, &f) > o->max_cqe) continue;
        f.cq_depth = (uint32_t)flush_of(o, &f);
        *ret = f;
        return TD_OK;
    }
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "rdma: %s device has max_cqe %u completions, and n_peers %u with one queue pair of %d sends and 1 receive each need %llu: "
                   "lower the number of peers",
                   whose, o->max_cqe, o->n_peers, SEND_DEPTH_MIN, (unsigned long long)o->n_peers * (SEND_DEPTH_MIN + 1));
}

static uint8_t patient(uint8_t a, uint8_t b) { return a > b ? a : b; }

/* RNR timer codes run from 1 (0.01 ms) to 31 (491.52 ms); 0 is the longest, 655.36 ms. */
static uint8_t patient_rnr_timer(uint8_t a, uint8_t b) { return a == 0 || b == 0 ? 0 : patient(a, b); }

td_status td_rdma_settle(const struct td_rdma_offer *ours, const struct td_rdma_offer *theirs, struct td_rdma_attrs *ret_attrs, struct td_err *err)
{
    struct fit mine, other;
    td_status s;
    if ((s = check_offer(ours, "our", err)) || (s = check_offer(theirs, "the peer's", err))) return s;
    if (ours->ethernet != theirs->ethernet)
        return td_fail(err, TD_ERR_UNSUPPORTED, "rdma: our port is %s and the peer's is %s: name devices of one fabric on both sides",
                       ours->ethernet ? "RoCE" : "InfiniBand", theirs->ethernet ? "RoCE" : "InfiniBand");
    uint32_t n_qps = min_u32(ours->n_qps, theirs->n_qps);
    if ((s = fit(ours, n_qps, "our", &mine, err)) || (s = fit(theirs, n_qps, "the peer's", &other, err))) return s;
    n_qps = min_u32(mine.n_qps, other.n_qps); /* fewer fit whenever more did, perhaps deeper */
    if ((s = fit(ours, n_qps, "our", &mine, err)) || (s = fit(theirs, n_qps, "the peer's", &other, err))) return s;
    TD_ASSERT(mine.n_qps == n_qps && other.n_qps == n_qps);

    uint32_t chain = min_u32(TD_RDMA_CHAIN, mine.send_depth / 2); /* half: one chain is posted while another is on its way */
    *ret_attrs = (struct td_rdma_attrs){
        .mtu_bytes = min_u32(ours->mtu_bytes, theirs->mtu_bytes),
        .n_qps = n_qps,
        .send_depth = mine.send_depth,
        .recv_depth = mine.recv_depth,
        .cq_depth = mine.cq_depth,
        .max_sge = min_u32(ours->max_sge, TD_VB_SGE_MAX),
        .chain = chain,
        .signal_every = chain,
        .srq = mine.srq,
        .imm_credit = other.srq ? min_u32(other.recv_depth / (theirs->n_peers * n_qps), TD_RDMA_RECV_DEPTH) : other.recv_depth,
        .rd_atomic_in = (uint8_t)min_u32(TD_RDMA_RD_ATOMIC, min_u32(ours->rd_atomic_in, theirs->rd_atomic_out)),
        .rd_atomic_out = (uint8_t)min_u32(TD_RDMA_RD_ATOMIC, min_u32(ours->rd_atomic_out, theirs->rd_atomic_in)),
        .timeout = patient(ours->timeout, theirs->timeout),
        .retry = patient(ours->retry, theirs->retry),
        .rnr_retry = patient(ours->rnr_retry, theirs->rnr_retry),
        .min_rnr_timer = patient_rnr_timer(ours->min_rnr_timer, theirs->min_rnr_timer),
        .traffic_class = ours->traffic_class,
        .service_level = ours->service_level,
        .hop_limit = ours->hop_limit,
        .class_differs = ours->traffic_class != theirs->traffic_class || ours->service_level != theirs->service_level,
    };
    return TD_OK;
}

void td_rdma_attrs_route(const struct td_rdma_attrs *attrs, struct td_vb_route *route)
{
    route->sl = attrs->service_level;
    route->traffic_class = attrs->traffic_class;
    route->hop_limit = attrs->hop_limit;
    route->mtu_bytes = attrs->mtu_bytes;
    route->timeout = attrs->timeout;
    route->retry = attrs->retry;
    route->rnr_retry = attrs->rnr_retry;
    route->min_rnr_timer = attrs->min_rnr_timer;
    route->rd_atomic_in = attrs->rd_atomic_in;
    route->rd_atomic_out = attrs->rd_atomic_out;
}

uint64_t td_rdma_retry_ns(const struct td_rdma_attrs *attrs) { return (4ull * 4096 << attrs->timeout) * (attrs->retry + 1ull); }
