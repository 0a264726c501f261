/* nodes_test.c - ranks of several hosts find one another: in any order, with and without secret and
 * certificates, past strangers; who is not one of them gets no further than a nonce. Nodes are
 * threads, on loopback. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"
#include "common/base/log.h"
#include "common/worker/nodes.h"
#include "tests/unit/tls_files.h"

enum { WAIT_MS = 60000, SOON_MS = 300, N_NODES_MAX = 4 };

static char folder[] = "/tmp/td-nodes-XXXXXX";
static struct td_cluster_secret *secret_a, *secret_b;

static struct td_cluster_secret *secret_of(const char *text)
{
    char path[80];
    struct td_cluster_secret *s = NULL;
    struct td_err err = {0};
    snprintf(path, sizeof path, "%s/secret", folder);
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f) || chmod(path, 0600) ||
        td_cluster_secret_load(path, &s, &err))
        return NULL;
    unlink(path);
    return s;
}

static int open_files(void **state)
{
    (void)state;
    td_log_start("nodes_test", TD_LOG_ERROR);
    if (!mkdtemp(folder)) return -1;
    secret_a = secret_of("0123456789abcdef0123456789abcdef\n");
    secret_b = secret_of("fedcba9876543210fedcba9876543210\n");
    return secret_a && secret_b ? 0 : -1;
}

static int close_files(void **state)
{
    (void)state;
    td_cluster_secret_destroy(secret_a);
    td_cluster_secret_destroy(secret_b);
    return rmdir(folder);
}

/* A port that was free a moment ago. Below the range from which the kernel gives ports to
 * connections and to other tests' port 0. */
static void free_address(char ret_address[32])
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int e, port;
    do {
        port = 10000 + (int)(td_random_u64() % 20000);
        a.sin_port = htons((uint16_t)port);
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        assert_true(fd >= 0);
        e = bind(fd, (struct sockaddr *)&a, sizeof a);
        close(fd);
    } while (e);
    snprintf(ret_address, 32, "127.0.0.1:%d", port);
}

static int dial(const char *address)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                            .sin_port =
                                htons((uint16_t)strtol(strchr(address, ':') + 1, NULL, 10))};
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    while (connect(fd, (struct sockaddr *)&a, sizeof a)) { /* the leader does not listen yet */
        assert_true(td_now_ns() < until);
        struct timespec tick = {.tv_nsec = 1000000};
        clock_nanosleep(CLOCK_MONOTONIC, 0, &tick, NULL);
    }
    return fd;
}

struct node {
    struct td_nodes_config config;
    pthread_t thread;
    td_status status;
    struct td_err err;
    int wrong;
};

/* Joins, and adds what no other order of ranks gives. */
static void *run_node(void *arg)
{
    struct node *n = arg;
    struct td_comm *comm = NULL;
    n->status = n->config.node == 0 ? td_nodes_lead(&n->config, &comm, &n->err)
                                    : td_nodes_join(&n->config, &comm, &n->err);
    if (n->status) return NULL;
    float x[3] = {1e8f, -1e8f, 1.0f}, mine = x[n->config.node % 3], want = 0;
    for (int32_t r = 0; r < n->config.n_nodes; r++) want = r ? want + x[r % 3] : x[0];
    n->wrong = td_comm_all_reduce_sum(comm, NULL, &mine, 1) != TD_OK || mine != want ||
               td_comm_barrier(comm) != TD_OK;
    td_comm_close(comm);
    return NULL;
}

static void start(struct node *n, int32_t n_nodes, int32_t node, const char *address)
{
    *n = (struct node){.config = {.n_nodes = n_nodes,
                                  .node = node,
                                  .role = "decode",
                                  .listen = "127.0.0.1:0",
                                  .master_addr = address,
                                  .secret = secret_a,
                                  .join_ms = WAIT_MS}};
}

static void go(struct node *n)
{
    assert_int_equal(pthread_create(&n->thread, NULL, run_node, n), 0);
}

static void all_joined(struct node *nodes, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        pthread_join(nodes[i].thread, NULL);
        if (nodes[i].status) fail_msg("node %d: %s", i, nodes[i].err.msg);
        assert_int_equal(nodes[i].wrong, 0);
    }
}

static void nodes_join_in_any_order(void **state)
{
    (void)state;
    for (int k = 0; k < 3; k++) {
        static const int order[3][N_NODES_MAX] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 0, 3, 2}};
        struct node nodes[N_NODES_MAX];
        char address[32];
        free_address(address);
        for (int i = 0; i < N_NODES_MAX; i++) {
            int at = order[k][i];
            start(&nodes[at], N_NODES_MAX, at, address);
            if (k == 2) nodes[at].config.secret = NULL;
            go(&nodes[at]);
        }
        all_joined(nodes, N_NODES_MAX);
    }
}

/* Whoever says something else than a rank is let go, having read at most a nonce, and keeps no rank
 * out. */
static void strangers_learn_a_nonce(void **state)
{
    (void)state;
    struct node nodes[2];
    char address[32], answer[400];
    uint8_t hello[72] = "tdranks", zeros[32] = {0}, noise[300];
    free_address(address);
    for (int i = 0; i < 2; i++) start(&nodes[i], 2, i, address);
    go(&nodes[0]);
    memcpy(hello + 8, (uint32_t[]){1, 1, 2, 0}, 16);
    memcpy(hello + 24, "decode", 6);
    int silent = dial(address), half = dial(address), gone = dial(address);
    assert_int_equal(send(half, hello, 40, 0), 40);
    close(gone);
    for (int k = 0; k < 12; k++) {
        int fd = dial(address);
        size_t n = 0;
        for (size_t i = 0; i < sizeof noise; i++)
            noise[i] = (uint8_t)((i * 131 + (size_t)k * 17) ^ (i >> 3));
        bool knows_form = k % 3 == 0;
        if (knows_form) {
            assert_int_equal(send(fd, hello, sizeof hello, 0), sizeof hello);
            assert_int_equal(send(fd, k ? noise : zeros, 32, 0), 32);
        } else {
            assert_int_equal(send(fd, k % 3 == 1 ? (const void *)"GET / HTTP/1.1\r\n\r\n" : noise,
                                  k % 3 == 1 ? 18 : sizeof noise, MSG_NOSIGNAL),
                             k % 3 == 1 ? 18 : sizeof noise);
            shutdown(fd, SHUT_WR);
        }
        struct timeval limit = {.tv_sec = WAIT_MS / 1000};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        for (ssize_t got; (got = recv(fd, answer + n, sizeof answer - n, 0)) > 0;) n += (size_t)got;
        assert_int_equal(n, knows_form ? 32 : 0);
        close(fd);
    }
    go(&nodes[1]);
    all_joined(nodes, 2);
    close(silent);
    close(half);
}

/* A pair that must not come together: the follower's reason (NULL: only that it did not join), and
 * the leader ends for want of ranks. */
static void must_not_join(struct node *nodes, const char *reason)
{
    nodes[0].config.join_ms = nodes[1].config.join_ms = SOON_MS;
    if (reason) nodes[0].config.join_ms = nodes[1].config.join_ms = 3000;
    go(&nodes[0]);
    go(&nodes[1]);
    for (int i = 0; i < 2; i++) pthread_join(nodes[i].thread, NULL);
    assert_int_equal(nodes[0].status, TD_ERR_DEADLINE);
    assert_non_null(strstr(nodes[0].err.msg, "nnodes is 2: nodes 1 have not joined within"));
    assert_true(nodes[1].status < 0);
    if (reason && !strstr(nodes[1].err.msg, reason)) fail_msg("%s", nodes[1].err.msg);
}

static void who_is_refused(void **state)
{
    (void)state;
    for (int k = 0; k < 4; k++) {
        struct node nodes[2];
        char address[32], other[48];
        free_address(address);
        for (int i = 0; i < 2; i++) start(&nodes[i], 2, i, address);
        snprintf(other, sizeof other, "localhost%s", strchr(address, ':'));
        if (k == 0) nodes[1].config.secret = secret_b;
        if (k == 1) nodes[1].config.secret = NULL;
        if (k == 2) nodes[0].config.secret = NULL;       /* the follower asks for a proof, too */
        if (k == 3) nodes[1].config.master_addr = other; /* a proof that is passed on */
        must_not_join(nodes, NULL);
    }
}

/* Who has not proved to know the secret cannot end a rank by a refusal for good. */
static void a_false_leader_is_not_believed(void **state)
{
    (void)state;
    struct node nodes[2];
    char address[32];
    int one = 1;
    uint8_t hello[72 + 32], nonce[32] = {1}, never[160] = {2};
    free_address(address);
    for (int i = 0; i < 2; i++) start(&nodes[i], 2, i, address);
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                            .sin_port =
                                htons((uint16_t)strtol(strchr(address, ':') + 1, NULL, 10))};
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    assert_int_equal(bind(listener, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(listener, 1), 0);
    go(&nodes[1]);
    struct pollfd p = {.fd = listener, .events = POLLIN};
    assert_int_equal(poll(&p, 1, WAIT_MS), 1);
    int fd = accept(listener, NULL, NULL);
    assert_true(fd >= 0);
    assert_int_equal(recv(fd, hello, 72, MSG_WAITALL), 72);
    assert_int_equal(send(fd, nonce, sizeof nonce, 0), sizeof nonce);
    assert_int_equal(recv(fd, hello + 72, 32, MSG_WAITALL), 32);
    assert_int_equal(send(fd, never, sizeof never, 0), sizeof never);
    close(listener);
    char scrap;
    assert_int_equal(recv(fd, &scrap, 1, 0), 0); /* the rank has left */
    close(fd);
    go(&nodes[0]);
    all_joined(nodes, 2);
}

/* Members that are no rank of this group are told, and end at once. */
static void who_is_told(void **state)
{
    (void)state;
    struct node leader, followers[3], right;
    char address[32];
    static const char *const reasons[] = {"its nnodes is 4, node 0's is 2",
                                          "it is a prefill worker, this is a decode worker",
                                          "its node_rank is 3, must be 1..1"};
    free_address(address);
    start(&leader, 2, 0, address);
    go(&leader);
    for (int k = 0; k < 3; k++) {
        start(&followers[k], k == 0 ? 4 : 2, k == 2 ? 3 : 1, address);
        if (k == 1) followers[k].config.role = "prefill";
        go(&followers[k]);
        pthread_join(followers[k].thread, NULL);
        assert_int_equal(followers[k].status, TD_ERR_PEER);
        if (!strstr(followers[k].err.msg, reasons[k])) fail_msg("%s", followers[k].err.msg);
    }
    start(&right, 2, 1, address);
    go(&right);
    pthread_join(right.thread, NULL);
    pthread_join(leader.thread, NULL);
    assert_int_equal(leader.status, TD_OK);
    assert_int_equal(right.status, TD_OK);
}

#ifdef TD_HAVE_OPENSSL
static struct td_xfer_tls *tls_of(const char *name, const char *ca)
{
    struct td_xfer_tls *tls = NULL;
    struct td_err err = {0};
    char cert[200], key[200], ca_file[200], file[64];
    snprintf(file, sizeof file, "%s.crt", name);
    snprintf(cert, sizeof cert, "%s", tls_files_in(file));
    snprintf(file, sizeof file, "%s.key", name);
    snprintf(key, sizeof key, "%s", tls_files_in(file));
    snprintf(file, sizeof file, "%s.crt", ca);
    snprintf(ca_file, sizeof ca_file, "%s", tls_files_in(file));
    struct td_xfer_tls_config c = {
        .cert_file = cert, .key_file = key, .ca_file = ca_file, .peer_name = "worker.example"};
    if (td_xfer_tls_open(&c, &tls, &err)) fail_msg("%s", err.msg);
    return tls;
}

/* Certificates instead of a secret, both, and one that names no worker. */
static void certificates(void **state)
{
    (void)state;
    tls_files_open();
    struct tls_files_id ca =
        tls_files_make(NULL, &(struct tls_files_make){.name = "ca", .ca = true});
    struct tls_files_id w =
        tls_files_make(&ca, &(struct tls_files_make){.name = "w", .alt = "DNS:worker.example"});
    struct tls_files_id x =
        tls_files_make(&ca, &(struct tls_files_make){.name = "x", .alt = "DNS:client.example"});
    struct td_xfer_tls *worker = tls_of("w", "ca"), *client = tls_of("x", "ca");
    for (int k = 0; k < 3; k++) {
        struct node nodes[2];
        char address[32];
        free_address(address);
        for (int i = 0; i < 2; i++) {
            start(&nodes[i], 2, i, address);
            if (k == 0) nodes[i].config.secret = NULL;
            nodes[i].config.tls = k == 2 && i == 1 ? client : worker;
        }
        if (k == 2) {
            must_not_join(nodes, NULL);
            continue;
        }
        go(&nodes[0]);
        int stranger = dial(address); /* in the clear */
        assert_int_equal(send(stranger, "tdranks", 8, 0), 8);
        go(&nodes[1]);
        all_joined(nodes, 2);
        close(stranger);
    }
    td_xfer_tls_close(worker);
    td_xfer_tls_close(client);
    tls_files_free(&ca);
    tls_files_free(&w);
    tls_files_free(&x);
    static const char *const made[] = {"ca.crt", "ca.key", "w.crt", "w.key", "x.crt", "x.key"};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) unlink(tls_files_in(made[i]));
    assert_int_equal(tls_files_close(), 0);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nodes_join_in_any_order),
        cmocka_unit_test(strangers_learn_a_nonce),
        cmocka_unit_test(who_is_refused),
        cmocka_unit_test(a_false_leader_is_not_believed),
        cmocka_unit_test(who_is_told),
#ifdef TD_HAVE_OPENSSL
        cmocka_unit_test(certificates),
#endif
    };
    return cmocka_run_group_tests(tests, open_files, close_files);
}
