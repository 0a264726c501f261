/* verbs_fault_test.c - what RC queue pairs survive and what they report: loss, delay,
 * duplicates, damage, a link that goes down for a second, addresses that come and go, ends that
 * disagree about the MTU. Changes the network of the machine it runs on, so only for
 * scripts/rdma-vm: it needs v0 and v1 as that sets them up, and root. */
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "tests/rdma/rdma_pair.h"

enum { BYTES = 65536, WINDOW = 16, N_PLACES = PAIR_BYTES / BYTES };

/* Code 16: 0.27 s before a retry, 2 s until it gives up; 18: 1 s, 8 s. */
static const struct rdma_pair_options patient = {.timeout = 16}, very_patient = {.timeout = 18};

struct stream {
    struct rdma_pair *p;
    uint64_t n_posted, n_done;
};

/* Keeps the window full and takes completions, for at least n more of them and until the time
 * that is given. */
static void stream_on(struct stream *s, uint64_t n, uint64_t until_ns)
{
    uint64_t want = s->n_done + n, deadline_ns = td_now_ns() + WAIT_MS * 1000000ull;
    while (s->n_done < want || td_now_ns() < until_ns) {
        while (s->n_posted - s->n_done < WINDOW) {
            struct td_vb_send wr =
                write_of(s->p, s->n_posted, (uint32_t)(s->n_posted % N_PLACES) * BYTES, BYTES);
            post(s->p->a.qp, &wr, 1);
            s->n_posted++;
        }
        struct td_vb_wc wc;
        int n_wc = vb->poll(s->p->a.cq, &wc, 1);
        assert_in_range(n_wc, 0, 1);
        if (n_wc == 1) {
            if (wc.status || wc.id != s->n_done)
                fail_msg("WRITE %llu of %llu: %s", (unsigned long long)wc.id,
                         (unsigned long long)s->n_done, td_vb_wc_status_name(wc.status));
            s->n_done++;
            deadline_ns = td_now_ns() + WAIT_MS * 1000000ull;
        } else {
            if (td_now_ns() > deadline_ns) fail_msg("no completion within %d ms", WAIT_MS);
            sched_yield();
        }
    }
}

static void stream_end(struct stream *s)
{
    while (s->n_done < s->n_posted) expect_wc(s->p->a.cq, s->n_done++, TD_VB_WC_SUCCESS);
    assert_memory_equal(s->p->a.mem, s->p->b.mem,
                        (s->n_posted < N_PLACES ? s->n_posted : N_PLACES) * BYTES);
}

/* Both directions. Queue pairs are connected before: the way to RTR asks for the peer's MAC
 * address, and one lost ARP packet is an ETIMEDOUT. */
static void netem_is(const char *const *w)
{
    for (int i = 0; i < 2; i++)
        run_program("tc", "qdisc", "replace", "dev", i ? "v1" : "v0", "root", "netem", w[0], w[1],
                    w[2], w[3], NULL);
}

static int netem_is_off(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++)
        run_program("tc", "qdisc", "replace", "dev", i ? "v1" : "v0", "root", "noqueue", NULL);
    return 0;
}

/* What the target met that a good network does not bring: packets out of order, missing ones
 * included, and packets seen before. */
static uint64_t n_odd_packets(void)
{
    static const char *const counters[] = {"out_of_seq_request", "duplicate_request"};
    uint64_t sum = 0;
    for (size_t i = 0; i < sizeof counters / sizeof *counters; i++) {
        char path[160];
        unsigned long long n = 0;
        snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/hw_counters/%s", name_b,
                 counters[i]);
        FILE *f = fopen(path, "re");
        assert_non_null(f);
        assert_int_equal(fscanf(f, "%llu", &n), 1);
        fclose(f);
        sum += n;
    }
    return sum;
}

static void bad_networks_are_survived(void **state)
{
    (void)state;
    /* No jitter: it reorders packets all the time, and a sender that goes back to the first one
       missing then hardly moves. */
    static const char *const netems[][5] = {{"loss", "1%"},
                                            {"delay", "2ms"},
                                            {"duplicate", "2%"},
                                            {"corrupt", "2%"},
                                            {"delay", "1ms", "reorder", "2%"}};
    for (size_t i = 0; i < sizeof netems / sizeof *netems; i++) {
        const char *const *w = netems[i];
        struct rdma_pair p;
        pair_open(&p, &patient);
        netem_is(w);
        fill(p.a.mem, PAIR_BYTES, 100 + (uint32_t)i);
        struct stream s = {.p = &p};
        uint64_t begin_ns = td_now_ns(), n_odd = n_odd_packets();
        stream_on(&s, 64, 0);
        stream_end(&s);
        n_odd = n_odd_packets() - n_odd;
        printf("%s %s %s %s: %llu WRITEs of 64 KiB in %.2f s, %llu packets out of order or twice\n",
               w[0], w[1], w[2] ? w[2] : "", w[3] ? w[3] : "", (unsigned long long)s.n_done,
               (double)(td_now_ns() - begin_ns) / 1e9, (unsigned long long)n_odd);
        if (i != 1) assert_true(n_odd > 0); /* netem did its part */
        netem_is_off(NULL);
        pair_close(&p);
    }
}

/* Nothing gets through for good: the retries end, and everything comes back. */
static void silence_is_reported(void **state)
{
    (void)state;
    struct rdma_pair p;
    pair_open(&p, &(struct rdma_pair_options){.timeout = 12, .retry = 3});
    struct stream s = {.p = &p};
    stream_on(&s, 20, 0);
    netem_is((const char *const[4]){"loss", "100%"});
    for (int i = 0; i < 8; i++) { /* these cannot get through; what stood before them may have */
        struct td_vb_send wr = write_of(&p, s.n_posted++, 0, BYTES);
        post(p.a.qp, &wr, 1);
    }
    enum td_vb_wc_status status = TD_VB_WC_SUCCESS;
    for (; s.n_done < s.n_posted; s.n_done++) {
        struct td_vb_wc wc = wait_wc(p.a.cq);
        assert_int_equal(wc.id, s.n_done);
        if (status == TD_VB_WC_SUCCESS)
            status = wc.status; /* the first that did not get through */
        else
            assert_int_equal(wc.status, TD_VB_WC_WR_FLUSH);
        if (status) assert_true(wc.status == TD_VB_WC_RETRY_EXC || wc.status == TD_VB_WC_WR_FLUSH);
    }
    assert_int_equal(status, TD_VB_WC_RETRY_EXC);
    netem_is_off(NULL);
    pair_close(&p);
}

/* Takes events of the device until one of the wanted kind. */
static void wait_event(struct td_vb_device *d, enum td_vb_async_kind kind)
{
    struct td_vb_async e;
    for (uint64_t deadline_ns = td_now_ns() + WAIT_MS * 1000000ull;;) {
        if (vb->async_get(d, &e)) {
            if (e.kind == kind) {
                assert_int_equal(e.port, 1);
                return;
            }
            continue;
        }
        if (td_now_ns() > deadline_ns) fail_msg("no event %d within %d ms", kind, WAIT_MS);
        struct pollfd f = {.fd = vb->async_fd(d), .events = POLLIN};
        (void)poll(&f, 1, 100);
    }
}

static void drain_events(struct td_vb_device *d)
{
    struct td_vb_async e;
    while (vb->async_get(d, &e)) {
    }
    struct pollfd f = {.fd = vb->async_fd(d), .events = POLLIN};
    assert_int_equal(poll(&f, 1, 0), 0);
}

/* The receiver's link goes down in the middle of a stream and comes back a second later. */
static void link_goes_down_and_up(void **state)
{
    (void)state;
    struct rdma_pair p;
    struct td_vb_port port;
    pair_open(&p, &very_patient);
    fill(p.a.mem, PAIR_BYTES, 200);
    struct stream s = {.p = &p};
    drain_events(device_b);
    stream_on(&s, 50, 0);
    run_program("ip", "link", "set", "v1", "down", NULL);
    uint64_t n_before = s.n_done;
    wait_event(device_b, TD_VB_ASYNC_PORT_ERR);
    assert_int_equal(vb->query_port(device_b, 1, &port), 0);
    assert_false(port.active);
    struct td_vb_gid g;
    if (vb->query_gid(device_b, 1, GID_INDEX, &g) == 0) assert_false(g.netdev_up);
    stream_on(&s, 0, td_now_ns() + 1000000000ull);
    uint64_t n_through = s.n_done - n_before;
    assert_true(n_through <= WINDOW); /* what had arrived may still complete; no more */
    run_program("ip", "link", "set", "v1", "up", NULL);
    /* went with the link */
    run_program("ip", "route", "replace", "10.9.1.1/32", "dev", "v1", "table", "102", NULL);
    wait_event(device_b, TD_VB_ASYNC_PORT_ACTIVE);
    stream_on(&s, 50, 0);
    stream_end(&s);
    printf("%llu WRITEs, %llu completed while the link was down\n", (unsigned long long)s.n_done,
           (unsigned long long)n_through);
    assert_int_equal(vb->query_port(device_b, 1, &port), 0);
    assert_true(port.active);
    drain_events(device_a);
    drain_events(device_b);
    pair_close(&p);
}

/* Index of the GID that is this IPv4 address as RoCE v2, or -1. */
static int find_gid(struct td_vb_device *d, const char *address)
{
    uint8_t wanted[16] = {[10] = 0xff, [11] = 0xff};
    assert_int_equal(inet_pton(AF_INET, address, wanted + 12), 1);
    for (uint32_t i = 0; i < 16; i++) {
        struct td_vb_gid g;
        int rc = vb->query_gid(d, 1, i, &g);
        assert_true(rc == 0 || rc == ENODATA);
        if (rc == 0 && g.type == TD_VB_GID_ROCE_V2 && memcmp(g.raw, wanted, sizeof wanted) == 0)
            return (int)i;
    }
    return -1;
}

static void addresses_come_and_go(void **state)
{
    (void)state;
    struct rdma_pair p;
    pair_open(&p, &patient);
    fill(p.a.mem, PAIR_BYTES, 300);
    struct stream s = {.p = &p};
    stream_on(&s, 10, 0);
    drain_events(device_a);
    assert_int_equal(find_gid(device_a, "10.9.1.51"), -1);
    run_program("ip", "addr", "add", "10.9.1.51/24", "dev", "v0", NULL);
    wait_event(device_a, TD_VB_ASYNC_GID_CHANGE);
    int at = find_gid(device_a, "10.9.1.51");
    assert_true(at > GID_INDEX);
    stream_on(&s, 10, 0);
    run_program("ip", "addr", "del", "10.9.1.51/24", "dev", "v0", NULL);
    wait_event(device_a, TD_VB_ASYNC_GID_CHANGE);
    assert_int_equal(find_gid(device_a, "10.9.1.51"), -1);
    stream_on(&s, 10, 0);
    stream_end(&s);
    assert_int_equal(find_gid(device_a, "10.9.1.1"), GID_INDEX);
    pair_close(&p);
}

/* Both ends must use one MTU: with two a WRITE of several packets is refused, whichever end has
 * the larger one. */
static void mtus_must_agree(void **state)
{
    (void)state;
    static const uint32_t mtus[][2] = {
        {1024, 1024}, {2048, 2048}, {256, 256}, {4096, 1024}, {1024, 4096}};
    for (size_t i = 0; i < sizeof mtus / sizeof *mtus; i++) {
        struct rdma_pair p;
        pair_open(&p, &(struct rdma_pair_options){
                          .timeout = 16, .mtu_a = mtus[i][0], .mtu_b = mtus[i][1]});
        fill(p.a.mem, BYTES, 400);
        struct td_vb_send wr = write_of(&p, 1, 0, BYTES);
        post(p.a.qp, &wr, 1);
        struct td_vb_wc wc = wait_wc(p.a.cq);
        printf("mtu %u to %u: %s\n", mtus[i][0], mtus[i][1], td_vb_wc_status_name(wc.status));
        if (mtus[i][0] == mtus[i][1]) {
            assert_int_equal(wc.status, TD_VB_WC_SUCCESS);
            assert_memory_equal(p.a.mem, p.b.mem, BYTES);
        } else {
            assert_int_equal(wc.status, TD_VB_WC_REM_INV_REQ);
        }
        pair_close(&p);
    }
}

static void port_follows_the_netdev(void **state)
{
    (void)state;
    struct td_vb_port before, now;
    assert_int_equal(vb->query_port(device_a, 1, &before), 0);
    run_program("ip", "link", "set", "v0", "mtu", "1500", NULL);
    assert_int_equal(vb->query_port(device_a, 1, &now), 0);
    run_program("ip", "link", "set", "v0", "mtu", "9000", NULL);
    assert_int_equal(before.mtu_bytes, 4096);
    assert_int_equal(now.mtu_bytes, 1024);
    assert_int_equal(vb->query_port(device_a, 1, &now), 0);
    assert_int_equal(now.mtu_bytes, 4096);
}

static int all_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(bad_networks_are_survived, netem_is_off),
        cmocka_unit_test_teardown(silence_is_reported, netem_is_off),
        cmocka_unit_test(link_goes_down_and_up),
        cmocka_unit_test(addresses_come_and_go),
        cmocka_unit_test(mtus_must_agree),
        cmocka_unit_test(port_follows_the_netdev),
    };
    return cmocka_run_group_tests_name("verbs_fault_test", tests, NULL, NULL);
}

int main(int argc, char **argv) { return rdma_main(argc, argv, all_tests); }
