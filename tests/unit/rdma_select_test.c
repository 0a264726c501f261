/* rdma_select_test.c - tables of GIDs, offers and times: what is chosen, what is refused and
 * with which words. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <ftw.h>
#include <sys/stat.h>

#include "common/base/clock.h"
#include "common/transfer/rdma/select.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))

/* "10.0.0.1" becomes a mapped address. */
static struct td_vb_gid gid(uint32_t index, enum td_vb_gid_type type, const char *address,
                            const char *netdev, bool up)
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
        {"8.8.8.8", TD_RDMA_GID_V4_ROUTABLE},
        {"172.15.0.1", TD_RDMA_GID_V4_ROUTABLE},
        {"172.32.0.1", TD_RDMA_GID_V4_ROUTABLE},
        {"100.63.0.1", TD_RDMA_GID_V4_ROUTABLE},
        {"192.169.0.1", TD_RDMA_GID_V4_ROUTABLE},
        {"10.1.2.3", TD_RDMA_GID_V4_PRIVATE},
        {"172.16.0.1", TD_RDMA_GID_V4_PRIVATE},
        {"172.31.9.9", TD_RDMA_GID_V4_PRIVATE},
        {"192.168.1.1", TD_RDMA_GID_V4_PRIVATE},
        {"100.64.0.1", TD_RDMA_GID_V4_PRIVATE},
        {"169.254.3.4", TD_RDMA_GID_V4_LINK_LOCAL},
        {"127.0.0.1", TD_RDMA_GID_UNUSABLE},
        {"0.0.0.0", TD_RDMA_GID_UNUSABLE},
        {"224.0.0.1", TD_RDMA_GID_UNUSABLE},
        {"255.255.255.255", TD_RDMA_GID_UNUSABLE},
        {"2001:db8::1", TD_RDMA_GID_V6_GLOBAL},
        {"fd00::1", TD_RDMA_GID_V6_UNIQUE_LOCAL},
        {"fc00::1", TD_RDMA_GID_V6_UNIQUE_LOCAL},
        {"fe80::1", TD_RDMA_GID_V6_LINK_LOCAL},
        {"febf::1", TD_RDMA_GID_V6_LINK_LOCAL},
        {"::", TD_RDMA_GID_UNUSABLE},
        {"::1", TD_RDMA_GID_UNUSABLE},
        {"ff02::1", TD_RDMA_GID_UNUSABLE},
        {"::2", TD_RDMA_GID_V6_GLOBAL},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct td_vb_gid g = gid(0, TD_VB_GID_ROCE_V2, cases[i].address, "eth0", true);
        if (td_rdma_gid_class_of(&g, true) != cases[i].class)
            fail_msg("%s is class %d", cases[i].address, (int)td_rdma_gid_class_of(&g, true));
        g.type = TD_VB_GID_ROCE_V1;
        assert_int_equal(td_rdma_gid_class_of(&g, true), cases[i].class == TD_RDMA_GID_UNUSABLE
                                                             ? TD_RDMA_GID_UNUSABLE
                                                             : TD_RDMA_GID_ROCE_V1);
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
    for (uint32_t i = 0, at = 0; i < n; i++)
        at += (uint32_t)snprintf(got + at, sizeof got - at, "%s%u", i ? " " : "", positions[i]);
    assert_string_equal(got, expected);
}

static void check_refused(const struct td_rdma_gid_ask *ask, td_status status, const char *says)
{
    uint32_t positions[TD_RDMA_GIDS_MAX] = {77}, n = 99;
    struct td_err err = {0};
    td_status s = td_rdma_gid_rank(ask, positions, &n, &err);
    if (s != status || !strstr(err.msg, says))
        fail_msg("%s '%s', not '%s'", td_status_name(s), err.msg, says);
    assert_int_equal(positions[0], 77);
    assert_int_equal(n, 99);
}

enum { N_GIDS = 12 };

static struct td_rdma_gid_ask ask_of(struct td_vb_gid table[N_GIDS])
{
    const struct td_vb_gid all[] = {
        /* the usual start of a RoCE port's table */
        gid(0, TD_VB_GID_ROCE_V1, "fe80::1", "eth0", true),
        gid(1, TD_VB_GID_ROCE_V2, "fe80::1", "eth0", true),
        gid(2, TD_VB_GID_ROCE_V1, "10.0.0.1", "eth0", true),
        gid(3, TD_VB_GID_ROCE_V2, "10.0.0.1", "eth0", true),
        gid(4, TD_VB_GID_ROCE_V2, "2001:db8::1", "eth0", true),
        /* in no network device that we can see */
        gid(5, TD_VB_GID_ROCE_V2, "8.8.4.4", "", false),
        gid(6, TD_VB_GID_ROCE_V2, "8.8.8.8", "eth1", false), /* down */
        gid(7, TD_VB_GID_ROCE_V2, "192.168.0.1", "eth0.5", true),
        gid(8, TD_VB_GID_ROCE_V2, "fd00::1", "eth0", true),
        gid(9, TD_VB_GID_ROCE_V2, "169.254.0.9", "eth0", true),
        gid(10, TD_VB_GID_ROCE_V2, "127.0.0.1", "lo", true),
        gid(11, TD_VB_GID_ROCE_V2, "9.9.9.9", "eth0", true),
    };
    _Static_assert(COUNT(all) == N_GIDS, "the table's rows");
    memcpy(table, all, sizeof all);
    return (struct td_rdma_gid_ask){.device = "mlx5_0",
                                    .ethernet = true,
                                    .gids = table,
                                    .n_gids = N_GIDS,
                                    .index = TD_RDMA_AUTO};
}

static void gids_are_ranked(void **state)
{
    (void)state;
    struct td_vb_gid table[N_GIDS];
    struct td_rdma_gid_ask ask = ask_of(table);
    check_ranked(&ask, "11 5 3 7 4 8 9 1 0 2");
    /* order of the table does not matter */
    struct td_vb_gid turned[COUNT(table)];
    for (size_t i = 0; i < COUNT(table); i++) turned[i] = table[COUNT(table) - 1 - i];
    ask.gids = turned;
    check_ranked(&ask, "0 6 8 4 7 3 2 10 11 9");
    ask.gids = table;
    ask.n_gids = 3;
    check_ranked(&ask, "1 0 2"); /* no address yet but the port's own: better than nothing */
}

static void a_gid_that_is_set_is_taken_or_refused(void **state)
{
    (void)state;
    struct td_vb_gid table[N_GIDS];
    struct td_rdma_gid_ask ask = ask_of(table);
    ask.index = 4;
    check_ranked(&ask, "4");
    ask.index = 0;
    check_ranked(&ask, "0");
    ask.index = 6;
    check_refused(&ask, TD_ERR_INVALID,
                  "mlx5_0: GID index 6 is set and its network device eth1 is down: bring it up");
    ask.index = 10;
    check_refused(&ask, TD_ERR_INVALID, "GID index 10 is set and holds no address to speak from");
    ask.index = 12;
    check_refused(&ask, TD_ERR_INVALID,
                  "GID index 12 is set and the port has no such entry (12 in use)");
    ask.index = -2;
    check_refused(&ask, TD_ERR_INVALID, "GID index is -2, must be -1 (automatic) or more");
    ask.index = TD_RDMA_AUTO;
    ask.gids = &table[6];
    ask.n_gids = 1;
    check_refused(
        &ask, TD_ERR_UNSUPPORTED,
        "none of 1 GIDs can be used: 0 without an address, 1 on a network device that is down");
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
    struct td_rdma_gid_ask ask = {
        .device = "mlx5_1", .gids = table, .n_gids = COUNT(table), .index = TD_RDMA_AUTO};
    check_ranked(&ask, "1");
    ask.index = 1;
    check_ranked(&ask, "0");
}

/* A NIC of today. */
static const struct td_vb_limits big = {.max_qp = 131072,
                                        .max_qp_wr = 32768,
                                        .max_sge = 30,
                                        .max_cqe = 4194303,
                                        .max_srq = 65536,
                                        .max_srq_wr = 32767,
                                        .max_rd_atomic_in = 16,
                                        .max_rd_atomic_out = 128};
static const struct td_vb_port port_400g = {
    .active = true, .ethernet = true, .mtu_bytes = 4096, .bits_per_s = 400000000000ull};

static struct td_rdma_plan planned(const struct td_vb_limits *l, const struct td_vb_port *port)
{
    struct td_rdma_plan p;
    struct td_err err = {0};
    if (td_rdma_plan("mlx5_0", l, port, &p, &err)) fail_msg("%s", err.msg);
    return p;
}

static void a_device_is_planned(void **state)
{
    (void)state;
    struct td_rdma_plan p = planned(&big, &port_400g);
    assert_int_equal(p.n_qps, 2);
    assert_int_equal(p.send_depth, 256);
    assert_int_equal(p.recv_depth, 64);
    assert_int_equal(p.words, 32);
    assert_int_equal(p.n_sge, 16);
    assert_int_equal(p.cq_depth, 131072);
    assert_int_equal(p.srq_depth, 4096);
    assert_int_equal(p.n_peers, (131072 - 4096) / (2 * 320));
    assert_int_equal(p.mtu_bytes, 4096);
    assert_int_equal(p.rd_atomic_in, 16);
    assert_int_equal(p.rd_atomic_out, 16);
    assert_true(p.ethernet);

    struct td_vb_port port = port_400g;
    port.bits_per_s = 800000000000ull;
    assert_int_equal(planned(&big, &port).n_qps, 4);

    struct td_vb_limits l = big;
    l.max_qp = 5; /* queue pairs bound the peers */
    assert_int_equal(planned(&l, &port_400g).n_peers, 2);
    l.max_qp = 1;
    p = planned(&l, &port_400g);
    assert_int_equal(p.n_qps, 1);
    assert_int_equal(p.n_peers, 1);
    l = big;
    l.max_srq = 0;
    assert_int_equal(planned(&l, &port_400g).srq_depth, 0);
    l = big;
    l.max_cqe = 8192; /* a shared receive queue's flush would take half of it */
    assert_int_equal(planned(&l, &port_400g).srq_depth, 0);
    l.max_cqe = 8193;
    assert_int_equal(planned(&l, &port_400g).srq_depth, 4096);
    /* tiny, and it works */
    l = (struct td_vb_limits){
        .max_qp = 2, .max_qp_wr = 4, .max_sge = 1, .max_cqe = 8, .max_rd_atomic_in = 1};
    p = planned(&l, &port_400g);
    assert_int_equal(p.send_depth, 4);
    assert_int_equal(p.recv_depth, 4);
    assert_int_equal(p.words, 2);
    assert_int_equal(p.n_sge, 1);
    assert_int_equal(p.rd_atomic_in, 1);
    assert_int_equal(p.rd_atomic_out, 0);
    assert_int_equal(p.n_peers, 0); /* its completion queue holds one queue pair of the two */
}

/* Whatever a device allows: nothing beyond it is asked, and the flush of all its peers fits. */
static void no_plan_is_beyond_its_device(void **state)
{
    (void)state;
    uint64_t n = 0, n_refused = 0;
    for (uint32_t wr = 0; wr < 400; wr = wr * 2 + 1)
        for (uint32_t cqe = 0; cqe < 200000; cqe = cqe * 3 + 1)
            for (uint32_t qps = 0; qps < 600; qps = qps * 4 + 1)
                for (uint32_t srq = 0; srq < 9000; srq = srq * 8 + 7) {
                    struct td_vb_limits l = {.max_qp = qps,
                                             .max_qp_wr = wr,
                                             .max_sge = qps,
                                             .max_cqe = cqe,
                                             .max_srq = srq & 1,
                                             .max_srq_wr = srq};
                    struct td_rdma_plan p, untouched;
                    memset(&p, 0x5a, sizeof p);
                    memset(&untouched, 0x5a, sizeof untouched);
                    if (td_rdma_plan("x", &l, &port_400g, &p, NULL)) {
                        assert_true(qps == 0 || wr < 2 ||
                                    cqe < (wr < 256 ? wr : 256) + (wr < 64 ? wr : 64));
                        assert_memory_equal(&p, &untouched, sizeof p);
                        n_refused++;
                        continue;
                    }
                    n++;
                    assert_in_range(p.n_qps, 1, qps);
                    assert_in_range(p.send_depth, 2, wr);
                    assert_in_range(p.recv_depth, 2, wr);
                    assert_in_range(p.words, 1, p.recv_depth - 1);
                    assert_in_range(p.n_sge, 1, qps);
                    assert_in_range(p.srq_depth, 0, srq);
                    assert_in_range((uint64_t)p.n_peers * p.n_qps, 0, qps);
                    assert_in_range((uint64_t)p.n_peers * p.n_qps * (p.send_depth + p.recv_depth) +
                                        p.srq_depth,
                                    0, cqe);
                }
    assert_true(n > 500 && n_refused > 200);
}

static void small_devices_are_named(void **state)
{
    static const struct {
        struct td_vb_limits l;
        const char *says;
    } cases[] = {
        {{.max_qp = 0, .max_qp_wr = 64, .max_sge = 4, .max_cqe = 4096},
         "device mlx5_0 allows 0 queue pairs (max_qp)"},
        {{.max_qp = 8, .max_qp_wr = 1, .max_sge = 4, .max_cqe = 4096},
         "1 work requests (max_qp_wr)"},
        {{.max_qp = 8, .max_qp_wr = 64, .max_sge = 0, .max_cqe = 4096}, "0 pieces (max_sge)"},
        {{.max_qp = 8, .max_qp_wr = 64, .max_sge = 4, .max_cqe = 127},
         "127 completions (max_cqe): too few"},
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        struct td_rdma_plan p;
        struct td_err err = {0};
        assert_int_equal(td_rdma_plan("mlx5_0", &cases[i].l, &port_400g, &p, &err),
                         TD_ERR_UNSUPPORTED);
        if (!strstr(err.msg, cases[i].says)) fail_msg("case %zu: %s", i, err.msg);
    }
}

static void both_sides_settle_on_the_same(void **state)
{
    static const uint32_t mtus[] = {256, 1024, 4096};
    static const uint8_t reads[] = {0, 1, 4, 16};
    (void)state;
    for (int i = 0; i < 3 * 3 * 4 * 4 * 4 * 4; i++) {
        struct td_rdma_side a = {.ethernet = true,
                                 .mtu_bytes = mtus[i % 3],
                                 .rd_atomic_in = reads[i / 9 % 4],
                                 .rd_atomic_out = reads[i / 36 % 4]};
        struct td_rdma_side b = {.ethernet = true,
                                 .mtu_bytes = mtus[i / 3 % 3],
                                 .rd_atomic_in = reads[i / 144 % 4],
                                 .rd_atomic_out = reads[i / 576 % 4]};
        struct td_vb_route x = {.remote_qp = 7, .gid_index = 3, .timeout = 5, .traffic_class = 9},
                           y = {0};
        assert_int_equal(td_rdma_settle(&a, &b, &x, NULL), TD_OK);
        assert_int_equal(td_rdma_settle(&b, &a, &y, NULL), TD_OK);
        assert_int_equal(x.mtu_bytes, a.mtu_bytes < b.mtu_bytes ? a.mtu_bytes : b.mtu_bytes);
        assert_int_equal(x.mtu_bytes, y.mtu_bytes);
        assert_int_equal(x.rd_atomic_in,
                         a.rd_atomic_in < b.rd_atomic_out ? a.rd_atomic_in : b.rd_atomic_out);
        assert_int_equal(x.rd_atomic_in, y.rd_atomic_out);
        assert_int_equal(x.rd_atomic_out, y.rd_atomic_in);
        assert_int_equal(x.hop_limit, 64);
        assert_int_equal(x.min_rnr_timer, 12);
        assert_true(x.ethernet);
        /* the caller's */
        assert_true(x.remote_qp == 7 && x.gid_index == 3 && x.timeout == 5 && x.traffic_class == 9);
    }
    struct td_rdma_side roce = {.ethernet = true, .mtu_bytes = 1024}, ib = {.mtu_bytes = 1024};
    struct td_vb_route before = {.mtu_bytes = 77}, route = before;
    struct td_err err = {0};
    assert_int_equal(td_rdma_settle(&roce, &ib, &route, &err), TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "our port is Ethernet and the peer's InfiniBand"));
    assert_memory_equal(&before, &route, sizeof route);
}

static void put_class(const char *root, const char *device, unsigned port, const char *text)
{
    char path[256];
    const char *const parts[] = {"/sys", "/class", "/infiniband", "/", device, "/tc", "/"};
    size_t at = (size_t)snprintf(path, sizeof path, "%s", root);
    for (size_t i = 0; i < COUNT(parts); i++) {
        at += (size_t)snprintf(path + at, sizeof path - at, "%s", parts[i]);
        if (parts[i][1] || i == 4) mkdir(path, 0700); /* it may be there */
    }
    at += (size_t)snprintf(path + at, sizeof path - at, "%u", port);
    mkdir(path, 0700);
    snprintf(path + at, sizeof path - at, "/traffic_class");
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static int remove_one(const char *path, const struct stat *s, int kind, struct FTW *ftw)
{
    (void)s, (void)kind, (void)ftw;
    return remove(path);
}

/* The option, then what the administrator gave the port, then 106 on RoCE v2. */
static void the_ports_traffic_class_is_kept(void **state)
{
    (void)state;
    char root[] = "/tmp/tandem-tc-XXXXXX";
    assert_non_null(mkdtemp(root));
    put_class(root, "mlx5_0", 1, "Global tclass=96\n");
    put_class(root, "mlx5_0", 2, "tclass=64 10.0.0.1/32\nGlobal tclass=255\n");
    put_class(root, "mlx5_1", 1, "\n");
    put_class(root, "mlx5_2", 1, "Global tclass=0\n");
    put_class(root, "mlx5_3", 1, "Global tclass=256\n");
    put_class(root, "mlx5_4", 1, "no such thing\n");
    static const struct {
        const char *device;
        uint8_t port;
        int option;
        enum td_vb_gid_type type;
        uint8_t class;
    } cases[] = {
        {"mlx5_0", 1, 0, TD_VB_GID_ROCE_V2, 96},  {"mlx5_0", 1, 0, TD_VB_GID_ROCE_V1, 96},
        {"mlx5_0", 1, 8, TD_VB_GID_ROCE_V2, 8},   {"mlx5_0", 1, -1, TD_VB_GID_ROCE_V2, 0},
        {"mlx5_0", 1, 0, TD_VB_GID_IB, 0},        {"mlx5_0", 1, 8, TD_VB_GID_IB, 8},
        {"mlx5_0", 2, 0, TD_VB_GID_ROCE_V2, 255}, {"mlx5_0", 3, 0, TD_VB_GID_ROCE_V2, 106},
        {"mlx5_1", 1, 0, TD_VB_GID_ROCE_V2, 106}, {"mlx5_1", 1, 0, TD_VB_GID_ROCE_V1, 0},
        {"mlx5_2", 1, 0, TD_VB_GID_ROCE_V2, 106}, {"mlx5_3", 1, 0, TD_VB_GID_ROCE_V2, 106},
        {"mlx5_4", 1, 0, TD_VB_GID_ROCE_V2, 106}, {"none", 1, 0, TD_VB_GID_ROCE_V2, 106},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        uint8_t class = td_rdma_traffic_class(root, cases[i].device, cases[i].port, cases[i].option,
                                              cases[i].type);
        if (class != cases[i].class)
            fail_msg("case %zu, %s: %u, not %u", i, cases[i].device, class, cases[i].class);
    }
    nftw(root, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(classes_of_gids),
        cmocka_unit_test(gids_are_ranked),
        cmocka_unit_test(a_gid_that_is_set_is_taken_or_refused),
        cmocka_unit_test(infiniband_speaks_from_its_first_gid),
        cmocka_unit_test(a_device_is_planned),
        cmocka_unit_test(no_plan_is_beyond_its_device),
        cmocka_unit_test(small_devices_are_named),
        cmocka_unit_test(both_sides_settle_on_the_same),
        cmocka_unit_test(the_ports_traffic_class_is_kept),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
