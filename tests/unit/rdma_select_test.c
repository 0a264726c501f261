/* rdma_select_test.c - tables of GIDs, offers and times: what is chosen, what is refused and with which words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <arpa/inet.h>

#include "common/base/clock.h"
#include "common/xfer/rdma_select.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))
#define MIB (1u << 20)

/* "10.0.0.1" becomes a mapped address. */
static struct td_vb_gid gid(uint32_t index, enum td_vb_gid_type type, const char *address, const char *netdev, bool up)
{
    struct td_vb_gid g = {.index = index, .type = type, .netdev_up = up};
    snprintf(g.netdev, sizeof g.netdev, "%s", netdev);
    if (strchr(address, ':')) {
        assert_int_equal(inet_pton(AF_INET6, address, g.raw), 1);
    } else {
        g.raw[10] = g.raw[11] = 0xff;
        assert_int_equal(inet_pton(AF_INET, address, g.raw + 12), 1);
    }
    return g;
}

static void classes_of_gids(void **state)
{
    (void)state;
    static const struct {
        const char *address;
        enum td_rdma_gid_class class;
    } cases[] = {
        {"8.8.8.8", TD_RDMA_GID_V4_ROUTABLE},       {"172.15.0.1", TD_RDMA_GID_V4_ROUTABLE},   {"172.32.0.1", TD_RDMA_GID_V4_ROUTABLE},
        {"100.63.0.1", TD_RDMA_GID_V4_ROUTABLE},    {"192.169.0.1", TD_RDMA_GID_V4_ROUTABLE},  {"10.1.2.3", TD_RDMA_GID_V4_PRIVATE},
        {"172.16.0.1", TD_RDMA_GID_V4_PRIVATE},     {"172.31.9.9", TD_RDMA_GID_V4_PRIVATE},    {"192.168.1.1", TD_RDMA_GID_V4_PRIVATE},
        {"100.64.0.1", TD_RDMA_GID_V4_PRIVATE},     {"169.254.3.4", TD_RDMA_GID_V4_LINK_LOCAL}, {"127.0.0.1", TD_RDMA_GID_UNUSABLE},
        {"0.0.0.0", TD_RDMA_GID_UNUSABLE},          {"224.0.0.1", TD_RDMA_GID_UNUSABLE},       {"255.255.255.255", TD_RDMA_GID_UNUSABLE},
        {"2001:db8::1", TD_RDMA_GID_V6_GLOBAL},     {"fd00::1", TD_RDMA_GID_V6_UNIQUE_LOCAL},  {"fc00::1", TD_RDMA_GID_V6_UNIQUE_LOCAL},
        {"fe80::1", TD_RDMA_GID_V6_LINK_LOCAL},     {"febf::1", TD_RDMA_GID_V6_LINK_LOCAL},    {"::", TD_RDMA_GID_UNUSABLE},
        {"::1", TD_RDMA_GID_UNUSABLE},              {"ff02::1", TD_RDMA_GID_UNUSABLE},         {"::2", TD_RDMA_GID_V6_GLOBAL},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct td_vb_gid g = gid(0, TD_VB_GID_ROCE_V2, cases[i].address, "eth0", true);
        if (td_rdma_gid_class_of(&g, true) != cases[i].class) fail_msg("%s is class %d", cases[i].address, (int)td_rdma_gid_class_of(&g, true));
        g.type = TD_VB_GID_ROCE_V1;
        assert_int_equal(td_rdma_gid_class_of(&g, true), cases[i].class == TD_RDMA_GID_UNUSABLE ? TD_RDMA_GID_UNUSABLE : TD_RDMA_GID_ROCE_V1);
        g.type = TD_VB_GID_IB;
        assert_int_equal(td_rdma_gid_class_of(&g, true), TD_RDMA_GID_UNUSABLE);
    }
    struct td_vb_gid ib = gid(0, TD_VB_GID_IB, "fe80::1234", "", false);
    assert_int_equal(td_rdma_gid_class_of(&ib, false), TD_RDMA_GID_IB);
    ib.type = TD_VB_GID_ROCE_V2;
    assert_int_equal(td_rdma_gid_class_of(&ib, false), TD_RDMA_GID_UNUSABLE);
}

/* "1 3 0": the positions chosen, in order. */
static void check_ranked(const struct td_rdma_gid_ask *ask, const char *expected)
{
    uint32_t positions[TD_RDMA_GIDS_MAX], n = 0;
    struct td_err err = {0};
    char got[256] = "";
    if (td_rdma_gid_rank(ask, positions, &n, &err)) fail_msg("wanted %s: %s", expected, err.msg);
    for (uint32_t i = 0, at = 0; i < n; i++) at += (uint32_t)snprintf(got + at, sizeof got - at, "%s%u", i ? " " : "", positions[i]);
    assert_string_equal(got, expected);
}

static void check_refused(const struct td_rdma_gid_ask *ask, td_status status, const char *says)
{
    uint32_t positions[TD_RDMA_GIDS_MAX] = {77}, n = 99;
    struct td_err err = {0};
    td_status s = td_rdma_gid_rank(ask, positions, &n, &err);
    if (s != status || !strstr(err.msg, says)) fail_msg("%s '%s', not '%s'", td_status_name(s), err.msg, says);
    assert_int_equal(positions[0], 77);
    assert_int_equal(n, 99);
}

static void gids_are_ranked(void **state)
{
    (void)state;
    struct td_vb_gid table[] = {
        gid(0, TD_VB_GID_ROCE_V1, "fe80::1", "eth0", true),     /* the usual start of a RoCE port's table */
        gid(1, TD_VB_GID_ROCE_V2, "fe80::1", "eth0", true),
        gid(2, TD_VB_GID_ROCE_V1, "10.0.0.1", "eth0", true),
        gid(3, TD_VB_GID_ROCE_V2, "10.0.0.1", "eth0", true),
        gid(4, TD_VB_GID_ROCE_V2, "2001:db8::1", "eth0", true),
        gid(5, TD_VB_GID_ROCE_V2, "8.8.4.4", "", false),        /* in no network device that we can see */
        gid(6, TD_VB_GID_ROCE_V2, "8.8.8.8", "eth1", false),    /* down */
        gid(7, TD_VB_GID_ROCE_V2, "192.168.0.1", "eth0.5", true),
        gid(8, TD_VB_GID_ROCE_V2, "fd00::1", "eth0", true),
        gid(9, TD_VB_GID_ROCE_V2, "169.254.0.9", "eth0", true),
        gid(10, TD_VB_GID_ROCE_V2, "127.0.0.1", "lo", true),
        gid(11, TD_VB_GID_ROCE_V2, "9.9.9.9", "eth0", true),
    };
    struct td_rdma_gid_ask ask = {.device = "mlx5_0", .ethernet = true, .gids = table, .n_gids = COUNT(table), .index = TD_RDMA_AUTO};
    check_ranked(&ask, "11 5 3 7 4 8 9 1 0 2");
    ask.peer = &table[3];
    check_ranked(&ask, "11 5 3 7 9");
    ask.peer = &table[4];
    check_ranked(&ask, "4 8 1");
    ask.peer = &table[2];
    check_ranked(&ask, "2");
    ask.peer = NULL;
    /* order of the table does not matter */
    struct td_vb_gid turned[COUNT(table)];
    for (size_t i = 0; i < COUNT(table); i++) turned[i] = table[COUNT(table) - 1 - i];
    ask.gids = turned;
    check_ranked(&ask, "0 6 8 4 7 3 2 10 11 9");
    ask.gids = table;
    ask.n_gids = 3;
    check_ranked(&ask, "1 0 2"); /* no address yet but the port's own: better than nothing */

    ask.n_gids = COUNT(table);
    ask.index = 4;
    check_ranked(&ask, "4");
    ask.index = 0;
    check_ranked(&ask, "0");
    ask.index = 6;
    check_refused(&ask, TD_ERR_INVALID, "mlx5_0: GID index 6 is set and its network device eth1 is down: bring it up");
    ask.index = 10;
    check_refused(&ask, TD_ERR_INVALID, "GID index 10 is set and holds no address to speak from");
    ask.index = 12;
    check_refused(&ask, TD_ERR_INVALID, "GID index 12 is set and the port has no such entry (12 in use)");
    ask.index = -2;
    check_refused(&ask, TD_ERR_INVALID, "GID index is -2, must be -1 (automatic) or more");
    ask.index = 4;
    ask.peer = &table[3];
    check_refused(&ask, TD_ERR_INVALID, "GID index 4 is set and is RoCE v2 over IPv6, and the peer's is RoCE v2 over IPv4");
    ask.index = TD_RDMA_AUTO;
    ask.n_gids = 2;
    check_refused(&ask, TD_ERR_UNSUPPORTED, "none of 2 GIDs can be used: 0 without an address, 0 on a network device that is down, 2 of another kind "
                                            "than the peer's (RoCE v2 over IPv4): give the network device an address");
    ask.peer = NULL;
    ask.gids = &table[6];
    ask.n_gids = 1;
    check_refused(&ask, TD_ERR_UNSUPPORTED, "none of 1 GIDs can be used: 0 without an address, 1 on a network device that is down");
    ask.n_gids = 0;
    check_refused(&ask, TD_ERR_UNSUPPORTED, "none of 0 GIDs");
    ask.n_gids = TD_RDMA_GIDS_MAX + 1;
    check_refused(&ask, TD_ERR_INVALID, "n_gids is 257, must be at most 256");
}

static void infiniband_speaks_from_its_first_gid(void **state)
{
    (void)state;
    struct td_vb_gid table[] = {
        gid(1, TD_VB_GID_IB, "fe80::2", "ib0", true),
        gid(0, TD_VB_GID_IB, "fe80::1", "", false),
    };
    struct td_vb_gid roce = gid(0, TD_VB_GID_ROCE_V2, "10.0.0.1", "eth0", true);
    struct td_rdma_gid_ask ask = {.device = "mlx5_1", .gids = table, .n_gids = COUNT(table), .index = TD_RDMA_AUTO};
    check_ranked(&ask, "1");
    ask.peer = &table[0];
    check_ranked(&ask, "1");
    ask.index = 1;
    check_ranked(&ask, "0");
    ask.index = TD_RDMA_AUTO;
    ask.peer = &roce;
    check_refused(&ask, TD_ERR_UNSUPPORTED, "2 of another kind than the peer's (RoCE v2 over IPv4)");
}

/* A NIC of today and the software one, as offers. */
static const struct td_vb_limits big = {.max_qp = 131072, .max_qp_wr = 32768, .max_sge = 30, .max_cqe = 4194303, .max_srq = 65536,
                                        .max_srq_wr = 32767, .max_rd_atomic_in = 16, .max_rd_atomic_out = 16};
static const struct td_vb_port port_400g = {.active = true, .ethernet = true, .mtu_bytes = 4096, .bits_per_s = 400000000000ull};

static struct td_rdma_offer offer_of(uint32_t n_peers)
{
    struct td_rdma_offer o;
    td_rdma_offer_init(&o, &big, &port_400g, n_peers);
    return o;
}

static struct td_rdma_attrs settled(const struct td_rdma_offer *ours, const struct td_rdma_offer *theirs)
{
    struct td_rdma_attrs a;
    struct td_err err = {0};
    if (td_rdma_settle(ours, theirs, &a, &err)) fail_msg("%s", err.msg);
    return a;
}

/* What must hold between any two sides that came to terms. */
static void check_settled(const struct td_rdma_offer *a, const struct td_rdma_offer *b)
{
    struct td_rdma_attrs x = settled(a, b), y = settled(b, a);
    assert_int_equal(x.mtu_bytes, y.mtu_bytes);
    assert_int_equal(x.n_qps, y.n_qps);
    assert_int_equal(x.timeout, y.timeout);
    assert_int_equal(x.retry, y.retry);
    assert_int_equal(x.rnr_retry, y.rnr_retry);
    assert_int_equal(x.min_rnr_timer, y.min_rnr_timer);
    assert_int_equal(x.rd_atomic_in, y.rd_atomic_out);
    assert_int_equal(x.rd_atomic_out, y.rd_atomic_in);
    assert_int_equal(x.class_differs, y.class_differs);
    const struct td_rdma_offer *offers[] = {a, b};
    const struct td_rdma_attrs *attrs[] = {&x, &y};
    for (int i = 0; i < 2; i++) {
        const struct td_rdma_offer *o = offers[i];
        const struct td_rdma_attrs *mine = attrs[i], *other = attrs[1 - i];
        uint64_t n_qps = (uint64_t)o->n_peers * mine->n_qps;
        assert_in_range(mine->n_qps, 1, o->n_qps);
        assert_in_range(n_qps, 1, o->max_qp);
        assert_in_range(mine->send_depth, 2, o->max_qp_wr);
        assert_in_range(mine->recv_depth, 1, mine->srq ? o->max_srq_wr : o->max_qp_wr);
        assert_in_range(mine->max_sge, 1, o->max_sge < TD_VB_SGE_MAX ? o->max_sge : TD_VB_SGE_MAX);
        assert_in_range(mine->cq_depth, n_qps * mine->send_depth + (mine->srq ? 1 : n_qps) * mine->recv_depth, o->max_cqe);
        assert_in_range(mine->chain, 1, mine->send_depth);
        assert_in_range(mine->signal_every, 1, mine->send_depth);
        assert_in_range(mine->mtu_bytes, 256, o->mtu_bytes);
        assert_in_range(mine->rd_atomic_in, 0, o->rd_atomic_in < 16 ? o->rd_atomic_in : 16);
        assert_in_range(mine->rd_atomic_out, 0, o->rd_atomic_out < 16 ? o->rd_atomic_out : 16);
        /* what the peer may send us always meets a receive: nobody relies on RNR */
        assert_true(other->imm_credit >= 1);
        assert_true((uint64_t)other->imm_credit * (mine->srq ? n_qps : 1) <= mine->recv_depth);
    }
}

static void attributes_are_settled(void **state)
{
    (void)state;
    struct td_rdma_offer a = offer_of(8), b = offer_of(8);
    struct td_rdma_attrs x = settled(&a, &b);
    assert_int_equal(x.mtu_bytes, 4096);
    assert_int_equal(x.n_qps, 2);
    assert_int_equal(x.send_depth, 256);
    assert_int_equal(x.recv_depth, 64);
    assert_int_equal(x.cq_depth, 8 * 2 * (256 + 64));
    assert_int_equal(x.max_sge, 16);
    assert_int_equal(x.chain, 32);
    assert_int_equal(x.signal_every, 32);
    assert_false(x.srq);
    assert_int_equal(x.imm_credit, 64);
    assert_int_equal(x.rd_atomic_in, 16);
    assert_int_equal(x.timeout, 16);
    assert_int_equal(x.retry, 7);
    assert_int_equal(x.rnr_retry, 7);
    assert_int_equal(x.min_rnr_timer, 12);
    assert_int_equal(x.traffic_class, 106);
    assert_int_equal(x.hop_limit, 64);
    assert_false(x.class_differs);
    assert_int_equal(td_rdma_retry_ns(&x), 4ull * 4096 * 65536 * 8); /* 8.6 s */
    check_settled(&a, &b);

    /* the smaller MTU, the fewer queue pairs, the smaller READ depth of each direction, the more patient timers */
    b.mtu_bytes = 1024;
    b.n_qps = 1;
    b.rd_atomic_in = 4;
    b.rd_atomic_out = 128;
    b.timeout = 14;
    a.retry = 3;
    a.rnr_retry = b.rnr_retry = 0; /* as tests ask, so that a credit that is missing is loud */
    b.min_rnr_timer = 0;           /* the longest of all */
    b.traffic_class = 0;
    b.hop_limit = 255;
    x = settled(&a, &b);
    assert_int_equal(x.mtu_bytes, 1024);
    assert_int_equal(x.n_qps, 1);
    assert_int_equal(x.rd_atomic_out, 4);
    assert_int_equal(x.rd_atomic_in, 16);
    assert_int_equal(x.timeout, 16);
    assert_int_equal(x.retry, 7);
    assert_int_equal(x.rnr_retry, 0);
    assert_int_equal(x.min_rnr_timer, 0);
    assert_int_equal(x.traffic_class, 106);
    assert_int_equal(x.hop_limit, 64);
    assert_true(x.class_differs);
    check_settled(&a, &b);
    struct td_vb_route route = {.remote_qp = 7, .gid_index = 3};
    td_rdma_attrs_route(&x, &route);
    assert_int_equal(route.mtu_bytes, 1024);
    assert_int_equal(route.rd_atomic_in, 16);
    assert_int_equal(route.rd_atomic_out, 4);
    assert_int_equal(route.timeout, 16);
    assert_int_equal(route.traffic_class, 106);
    assert_int_equal(route.hop_limit, 64);
    assert_int_equal(route.remote_qp, 7);
    assert_int_equal(route.gid_index, 3);

    /* one READ at a time, or none */
    a = b = offer_of(1);
    a.rd_atomic_out = 1;
    b.rd_atomic_out = 0;
    x = settled(&a, &b);
    assert_int_equal(x.rd_atomic_out, 1);
    assert_int_equal(x.rd_atomic_in, 0);

    /* port speed and fabric */
    struct td_vb_port port = port_400g;
    port.bits_per_s = 800000000000ull;
    td_rdma_offer_init(&a, &big, &port, 1);
    assert_int_equal(a.n_qps, 4);
    port.ethernet = false;
    td_rdma_offer_init(&a, &big, &port, 1);
    assert_int_equal(a.traffic_class, 0);
}

static void many_peers_share_receives(void **state)
{
    (void)state;
    struct td_rdma_offer a = offer_of(64), b = offer_of(1);
    assert_false(settled(&a, &b).srq);
    a.n_peers = 65;
    struct td_rdma_attrs x = settled(&a, &b), y = settled(&b, &a);
    assert_true(x.srq);
    assert_int_equal(x.recv_depth, 4096);
    assert_int_equal(x.cq_depth, 65 * 2 * 256 + 4096);
    assert_int_equal(x.imm_credit, 64); /* the peer's are its own */
    assert_false(y.srq);
    assert_int_equal(y.imm_credit, 4096 / 130);
    check_settled(&a, &b);
    a.max_srq_wr = 0; /* none: every queue pair has its own again */
    assert_false(settled(&a, &b).srq);
    a.max_srq_wr = 129; /* fewer than queue pairs */
    assert_false(settled(&a, &b).srq);
    a.max_srq_wr = 130;
    x = settled(&a, &b);
    assert_true(x.srq);
    assert_int_equal(settled(&b, &a).imm_credit, 1);
    check_settled(&a, &b);
}

static void tiny_devices_still_work(void **state)
{
    (void)state;
    struct td_rdma_offer tiny = offer_of(1), normal = offer_of(1);
    tiny.max_qp_wr = 4;
    tiny.max_sge = 1;
    tiny.rd_atomic_in = tiny.rd_atomic_out = 1;
    struct td_rdma_attrs x = settled(&tiny, &normal);
    assert_int_equal(x.send_depth, 4);
    assert_int_equal(x.recv_depth, 4);
    assert_int_equal(x.max_sge, 1);
    assert_int_equal(x.chain, 2);
    assert_int_equal(x.signal_every, 2);
    assert_int_equal(x.cq_depth, 2 * 8);
    assert_int_equal(x.rd_atomic_in, 1);
    x = settled(&normal, &tiny);
    assert_int_equal(x.send_depth, 256);
    assert_int_equal(x.imm_credit, 4);
    check_settled(&tiny, &normal);
    /* a small completion queue: depths shrink before queue pairs do, and both sides come to the same number of those */
    tiny.max_cqe = 10;
    x = settled(&tiny, &normal);
    assert_int_equal(x.n_qps, 2);
    assert_int_equal(x.send_depth, 2);
    assert_int_equal(x.cq_depth, 8);
    tiny.max_cqe = 5;
    assert_int_equal(settled(&tiny, &normal).n_qps, 1);
    assert_int_equal(settled(&normal, &tiny).n_qps, 1);
    tiny.max_cqe = 3;
    x = settled(&tiny, &normal);
    assert_int_equal(x.send_depth, 2);
    assert_int_equal(x.recv_depth, 1);
    check_settled(&tiny, &normal);
    tiny.max_qp = 1;
    assert_int_equal(settled(&tiny, &normal).n_qps, 1);

    /* every small device against every other */
    uint64_t n = 0;
    for (uint32_t wr = 2; wr < 9; wr++)
        for (uint32_t cqe = 3; cqe < 2000; cqe = cqe * 2 + 1)
            for (uint32_t qps = 1; qps < 6; qps++)
                for (uint32_t peers = 1; peers < 300; peers = peers * 4 + 1)
                    for (uint32_t srq = 0; srq < 5000; srq = srq * 8 + 7) {
                        struct td_rdma_offer a = offer_of(peers), b = offer_of(3);
                        a.max_qp_wr = wr;
                        a.max_cqe = cqe;
                        a.max_qp = qps * peers;
                        a.max_srq_wr = srq;
                        a.n_qps = 4;
                        b.max_cqe = cqe * 7 % 100 + 9;
                        if ((uint64_t)peers * 3 > cqe) {
                            struct td_rdma_attrs none;
                            assert_int_equal(td_rdma_settle(&a, &b, &none, NULL), TD_ERR_UNSUPPORTED);
                            continue;
                        }
                        check_settled(&a, &b);
                        n++;
                    }
    assert_in_range(n, 1000, 100000);
}

static void offers_that_cannot_be_met_are_named(void **state)
{
    (void)state;
    struct {
        struct td_rdma_offer ours, theirs;
        td_status status;
        const char *says;
    } cases[40];
    size_t n = 0;
#define BAD(side, field, value, code, text) \
    do { \
        TD_ASSERT(n < COUNT(cases)); \
        cases[n].ours = cases[n].theirs = offer_of(2); \
        cases[n].side.field = value; \
        cases[n].status = code; \
        cases[n++].says = text; \
    } while (0)
    BAD(theirs, n_qps, 0, TD_ERR_INVALID, "rdma: the peer's n_qps is 0, must be in 1..16");
    BAD(ours, n_qps, 17, TD_ERR_INVALID, "rdma: our n_qps is 17, must be in 1..16");
    BAD(theirs, n_qps, UINT32_MAX, TD_ERR_INVALID, "the peer's n_qps is 4294967295");
    BAD(theirs, n_peers, 0, TD_ERR_INVALID, "the peer's n_peers is 0, must be in 1..65536");
    BAD(theirs, n_peers, UINT32_MAX, TD_ERR_INVALID, "the peer's n_peers is 4294967295, must be in 1..65536");
    BAD(ours, timeout, 0, TD_ERR_INVALID, "our timeout is 0, must be in 1..31");
    BAD(theirs, timeout, 32, TD_ERR_INVALID, "the peer's timeout is 32, must be in 1..31");
    BAD(theirs, retry, 8, TD_ERR_INVALID, "the peer's retry is 8, must be in 0..7");
    BAD(theirs, rnr_retry, 255, TD_ERR_INVALID, "the peer's rnr_retry is 255, must be in 0..7");
    BAD(theirs, min_rnr_timer, 32, TD_ERR_INVALID, "the peer's min_rnr_timer is 32, must be in 0..31");
    BAD(ours, service_level, 16, TD_ERR_INVALID, "our service_level is 16, must be in 0..15");
    BAD(ours, hop_limit, 0, TD_ERR_INVALID, "our hop_limit is 0, must be in 1..255");
    BAD(theirs, mtu_bytes, 1500, TD_ERR_INVALID, "the peer's mtu_bytes is 1500, must be 256, 512, 1024, 2048 or 4096");
    BAD(theirs, mtu_bytes, 0, TD_ERR_INVALID, "the peer's mtu_bytes is 0");
    BAD(theirs, mtu_bytes, 8192, TD_ERR_INVALID, "the peer's mtu_bytes is 8192");
    BAD(theirs, ethernet, false, TD_ERR_UNSUPPORTED, "rdma: our port is RoCE and the peer's is InfiniBand: name devices of one fabric");
    BAD(ours, ethernet, false, TD_ERR_UNSUPPORTED, "rdma: our port is InfiniBand and the peer's is RoCE");
    BAD(ours, max_qp_wr, 1, TD_ERR_UNSUPPORTED, "rdma: our device takes max_qp_wr 1 work requests per queue pair, needs at least 2");
    BAD(theirs, max_sge, 0, TD_ERR_UNSUPPORTED, "rdma: the peer's device takes max_sge 0 pieces per work request, needs at least 1");
    BAD(ours, max_qp, 1, TD_ERR_UNSUPPORTED, "rdma: our device has max_qp 1 queue pairs, fewer than its n_peers 2: lower the number of peers");
    BAD(theirs, max_cqe, 5, TD_ERR_UNSUPPORTED, "rdma: the peer's device has max_cqe 5 completions, and n_peers 2 with one queue pair of 2 sends "
                                                "and 1 receive each need 6: lower the number of peers");
#undef BAD
    for (size_t i = 0; i < n; i++) {
        struct td_rdma_attrs before, after;
        memset(&before, 0x5a, sizeof before);
        memset(&after, 0x5a, sizeof after);
        struct td_err err = {0};
        td_status s = td_rdma_settle(&cases[i].ours, &cases[i].theirs, &after, &err);
        if (s != cases[i].status || !strstr(err.msg, cases[i].says))
            fail_msg("case %zu answered %s '%s', not '%s'", i, td_status_name(s), err.msg, cases[i].says);
        assert_memory_equal(&before, &after, sizeof before);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(classes_of_gids),
        cmocka_unit_test(gids_are_ranked),
        cmocka_unit_test(infiniband_speaks_from_its_first_gid),
        cmocka_unit_test(attributes_are_settled),
        cmocka_unit_test(many_peers_share_receives),
        cmocka_unit_test(tiny_devices_still_work),
        cmocka_unit_test(offers_that_cannot_be_met_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
