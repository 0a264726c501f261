/* xfer_secret_test.c - the cluster secret on the KV port: who knows it is served on every path;
 * a stranger gets no further than the hello, whatever he knows besides (a grant's key, a
 * recording, another worker's connection), and keeps nobody else out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/cluster_secret.h"
#include "common/transfer/wire.h"
#include "tests/unit/xfer_ask.h"

#define BLOCK_BYTES 4096
#define N_BLOCKS 16
#define LAYOUT 0x5ec
#define WAIT_MS 20000
#define TIMEOUT_MS 20000 /* of silence: no machine is so busy that an honest end is late */
#define POISON 0xbad0ull
#define SECRET_A "0123456789abcdef0123456789abcdef"
#define SECRET_B "fedcba9876543210fedcba9876543210"

static char folder[] = "/tmp/td-xfer-secret-XXXXXX";
static char file_a[64], file_b[64], file_both[64], fabric_path[64];

static void write_file(char path[64], const char *name, const char *text)
{
    snprintf(path, 64, "%s/%s", folder, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
    assert_int_equal(chmod(path, 0600), 0);
}

static int make_files(void **state)
{
    (void)state;
    if (!mkdtemp(folder)) return -1;
    write_file(file_a, "a", SECRET_A "\n");
    write_file(file_b, "b", SECRET_B "\n");
    write_file(file_both, "both", SECRET_B "\n" SECRET_A "\n");
    snprintf(fabric_path, sizeof fabric_path, "/dev/shm/tandem-xfer-secret-%d", (int)getpid());
    return 0;
}

static int remove_files(void **state)
{
    (void)state;
    unlink(file_a);
    unlink(file_b);
    unlink(file_both);
    unlink(fabric_path);
    return rmdir(folder);
}

/* --- two ends ---------------------------------------------------------------------------- */

struct pair {
    struct node *p, *d; /* sender, receiver */
    enum td_xfer_path path;
    uint16_t port;
    uint64_t seed;
};

static struct node *open_end(const struct pair *t, const char *secret, uint16_t *ret_port)
{
    struct node *n = node_local();
    struct node_command c = {.verb = NODE_OPEN,
                             .path = t->path,
                             .shareable = true,
                             .max_slots = 4,
                             .max_ops = 4,
                             .timeout_ms = TIMEOUT_MS,
                             .lanes = 4,
                             .block_bytes = BLOCK_BYTES,
                             .layout_hash = LAYOUT,
                             .n_blocks = N_BLOCKS};
    bool on_device = t->path == TD_XFER_PATH_CUDA_IPC || t->path == TD_XFER_PATH_SHM_STAGED;
    snprintf(c.secret, sizeof c.secret, "%s", secret);
    if (on_device) snprintf(c.device, sizeof c.device, "device");
    if (t->path == TD_XFER_PATH_RDMA)
        snprintf(c.fabric, sizeof c.fabric, "path=%s,retry_ms=20", fabric_path);
    struct node_reply r = ask(n, &c);
    if (r.status) fail_msg("open: %s", r.msg);
    *ret_port = r.port;
    return n;
}

static void fill(struct node *n, uint64_t seed)
{
    struct node_command c = {.verb = NODE_FILL, .seed = seed, .n = N_BLOCKS};
    for (int32_t i = 0; i < N_BLOCKS; i++) c.ids[i] = i;
    ask(n, &c);
}

static void pair_open(struct pair *t, enum td_xfer_path path, const char *sender,
                      const char *receiver)
{
    uint16_t port;
    *t = (struct pair){.path = path, .seed = 7000};
    unlink(fabric_path);
    t->d = open_end(t, receiver, &t->port);
    t->p = open_end(t, sender, &port);
    fill(t->d, POISON);
}

static void pair_close(struct pair *t)
{
    node_free(t->p);
    node_free(t->d);
}

/* Every block of the receiver is as it was. */
static void check_untouched(struct pair *t)
{
    struct node_command c = {.verb = NODE_CHECK, .seed = POISON, .n = N_BLOCKS};
    for (int32_t i = 0; i < N_BLOCKS; i++) c.ids[i] = i;
    struct node_reply r = ask(t->d, &c);
    if (!r.ok) fail_msg("block %d was written", r.n);
}

static struct td_xfer_stats stats(struct node *n)
{
    struct node_command c = {.verb = NODE_STATS};
    return ask(n, &c).stats;
}

static void wait_conns(struct node *n, uint32_t want)
{
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    while (stats(n).n_conns != want) {
        if (td_now_ns() > until) fail_msg("%u connections, wanted %u", stats(n).n_conns, want);
        poll(NULL, 0, 1);
    }
}

static struct node_reply grant(struct pair *t)
{
    struct node_command c = {
        .verb = NODE_GRANT, .n = 4, .deadline_ms = WAIT_MS, .ids = {3, 1, 7, 5}};
    struct node_reply r = ask(t->d, &c);
    if (r.status) fail_msg("grant: %s", r.msg);
    return r;
}

static struct node_reply op_start(struct node *sender, const struct node_reply *g)
{
    struct node_command c = {.verb = NODE_OP, .deadline_ms = WAIT_MS, .blob_bytes = g->blob_bytes};
    memcpy(c.blob, g->blob, g->blob_bytes);
    return ask(sender, &c);
}

/* The sender sends all of it; its terminal event. */
static struct td_xfer_event send_all(struct pair *t, const struct node_reply *g)
{
    fill(t->p, t->seed += 100);
    struct node_reply op = op_start(t->p, g);
    if (op.status) fail_msg("op: %s", op.msg);
    struct node_command c = {
        .verb = NODE_SUBMIT, .id = op.id, .n = 4, .final = true, .ids = {0, 1, 2, 3}};
    ask(t->p, &c); /* whose op may have ended already: its event says how */
    return event(t->p);
}

static void give_back(struct pair *t, const struct node_reply *g)
{
    struct node_command c = {.verb = NODE_REVOKE, .id = g->id};
    ask(t->d, &c);
    assert_int_equal(event(t->d).kind, TD_XFER_SLOT_FREE);
}

/* One transfer, byte for byte. */
static void whole(struct pair *t)
{
    struct node_reply g = grant(t);
    struct td_xfer_event e = send_all(t, &g);
    if (e.kind != TD_XFER_OP_DONE) fail_msg("%s", e.reason);
    assert_int_equal(e.path, t->path);
    assert_int_equal(event(t->d).kind, TD_XFER_SLOT_READY);
    struct node_command c = {.verb = NODE_CHECK, .seed = t->seed, .n = 4, .ids = {3, 1, 7, 5}};
    assert_true(ask(t->d, &c).ok);
    give_back(t, &g);
    fill(t->d, POISON);
}

static const enum td_xfer_path paths[] = {TD_XFER_PATH_TCP, TD_XFER_PATH_SHM, TD_XFER_PATH_RDMA,
                                          TD_XFER_PATH_CUDA_IPC, TD_XFER_PATH_SHM_STAGED};
#define N_PATHS (sizeof paths / sizeof paths[0])

static void who_knows_it_is_served_on_every_path(void **state)
{
    (void)state;
    struct pair t;
    for (size_t i = 0; i < N_PATHS; i++) {
        pair_open(&t, paths[i], file_a, file_a);
        whole(&t);
        whole(&t);
        if (paths[i] == TD_XFER_PATH_TCP) { /* the other lanes prove it, too */
            uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
            while (stats(t.d).n_lanes != 3) {
                if (td_now_ns() > until)
                    fail_msg("%u lanes came to stand, wanted 3", stats(t.d).n_lanes);
                poll(NULL, 0, 1);
            }
            whole(&t);
        }
        assert_int_equal(stats(t.d).n_refused_peers, 0);
        pair_close(&t);
    }
    /* in the middle of a rotation: one has the new secret first, the other has the old one alone */
    pair_open(&t, TD_XFER_PATH_TCP, file_both, file_both);
    whole(&t);
    pair_close(&t);
    pair_open(&t, TD_XFER_PATH_TCP, file_a, file_both);
    struct node_reply g = grant(&t);
    struct td_xfer_event e = send_all(
        &t, &g); /* its proof is taken; the receiver's, by the first of its two, is not known to it
                    yet */
    assert_int_equal(e.kind, TD_XFER_OP_FAILED);
    assert_non_null(strstr(e.reason, "it did not prove the cluster secret"));
    check_untouched(&t);
    pair_close(&t);
}

static void another_secret_is_refused_on_every_path(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_PATHS; i++) {
        struct pair t;
        pair_open(&t, paths[i], file_b, file_a);
        struct node_reply g = grant(&t);
        struct td_xfer_event e = send_all(&t, &g);
        assert_int_equal(e.kind, TD_XFER_OP_FAILED);
        assert_non_null(strstr(e.reason, "the cluster secret was not proved"));
        assert_true(stats(t.d).n_refused_peers >= 1);
        check_untouched(&t);
        pair_close(&t);
    }
}

static void a_side_without_one_is_told_what_to_configure(void **state)
{
    (void)state;
    struct pair t;
    pair_open(&t, TD_XFER_PATH_TCP, "", file_a);
    struct node_reply g = grant(&t), r = op_start(t.p, &g);
    assert_int_equal(r.status, TD_ERR_UNSUPPORTED);
    assert_non_null(
        strstr(r.msg, "its KV port asks for the cluster secret and this side has none"));
    assert_non_null(strstr(r.msg, "--cluster-secret-file"));
    pair_close(&t);
    pair_open(&t, TD_XFER_PATH_SHM, file_a, "");
    g = grant(&t);
    r = op_start(t.p, &g);
    assert_int_equal(r.status, TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(r.msg, "its KV port proves no cluster secret"));
    pair_close(&t);
}

/* --- a peer by hand ---------------------------------------------------------------------- */

static int dial_from(uint16_t port, const char *from)
{
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons(port),
                            .sin_addr = {htonl(INADDR_LOOPBACK)}},
                       mine = {.sin_family = AF_INET};
    struct timeval limit = {.tv_sec = WAIT_MS / 1000};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_true(fd >= 0);
    assert_int_equal(inet_pton(AF_INET, from, &mine.sin_addr), 1);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    assert_int_equal(bind(fd, (struct sockaddr *)&mine, sizeof mine), 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static bool is_closed(int fd)
{
    uint8_t bytes[4096];
    for (ssize_t k; (k = recv(fd, bytes, sizeof bytes, 0)) != 0;)
        if (k < 0) return errno == ECONNRESET;
    return true;
}

static void say(int fd, struct td_xfer_frame f, const void *payload)
{
    uint8_t bytes[64 + TD_XFER_PAYLOAD_MAX];
    td_xfer_frame_encode(&f, bytes);
    memcpy(bytes + 64, payload, f.length);
    assert_int_equal(send(fd, bytes, 64 + f.length, MSG_NOSIGNAL), 64 + f.length);
}

/* The next frame, which must be of this type. */
static struct td_xfer_frame hear(int fd, uint8_t type, uint8_t payload[TD_XFER_PAYLOAD_MAX])
{
    uint8_t header[64];
    struct td_xfer_frame f;
    assert_int_equal(recv(fd, header, 64, MSG_WAITALL), 64);
    assert_int_equal(td_xfer_frame_decode(header, &f, NULL), TD_OK);
    assert_int_equal(f.type, type);
    assert_int_equal(recv(fd, payload, f.length, MSG_WAITALL), f.length);
    return f;
}

/* What a peer of the cluster says, and what it needs to know for it: written down here once
 * more, by docs/wire.md. */
struct by_hand {
    struct td_xfer_grant_blob g;
    struct td_xfer_frame hello_frame;
    struct td_xfer_secret_hello hello;
    uint8_t challenge[TD_XFER_SECRET_BYTES], mac[TD_XFER_SECRET_BYTES];
};

static void by_hand_init(struct by_hand *h, const struct node_reply *g)
{
    *h = (struct by_hand){.hello = {.hello = {.incarnation = 1,
                                              .layout_hash = LAYOUT,
                                              .block_bytes = BLOCK_BYTES,
                                              .nonce = 42,
                                              .instance = "hand"}}};
    assert_int_equal(td_xfer_grant_decode(g->blob, g->blob_bytes, &h->g, NULL), TD_OK);
    h->hello_frame = (struct td_xfer_frame){
        .type = TD_XFER_HELLO, .slot = TD_XFER_PATH_TCP, .length = sizeof h->hello};
    td_cluster_nonce(h->hello.secret);
}

static void by_hand_prove(struct by_hand *h, const char *secret_file, const char *role,
                          const struct td_xfer_hello *acceptor)
{
    struct td_cluster_secret *secret;
    uint32_t numbers[5] = {h->hello_frame.slot, h->hello_frame.op, (uint32_t)h->hello_frame.conn,
                           (uint32_t)(h->hello_frame.conn >> 32), h->g.port};
    struct td_secret_field fields[] = {{h->hello.secret, 32},
                                       {h->challenge, 32},
                                       {&h->hello.hello, sizeof h->hello.hello},
                                       {numbers, sizeof numbers},
                                       {h->g.host, strlen(h->g.host)},
                                       {acceptor, sizeof *acceptor}};
    assert_int_equal(td_cluster_secret_load(secret_file, &secret, NULL), TD_OK);
    assert_int_equal(td_cluster_secret_prove(secret, role, fields, acceptor ? 6 : 5, h->mac),
                     TD_OK);
    td_cluster_secret_destroy(secret);
}

/* HELLO, and what comes back for it. */
static void by_hand_hello(struct by_hand *h, int fd)
{
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
    say(fd, h->hello_frame, &h->hello);
    struct td_xfer_frame f = hear(fd, TD_XFER_CHALLENGE, payload);
    assert_int_equal(f.length, TD_XFER_SECRET_BYTES);
    assert_int_equal(f.conn, 0);
    memcpy(h->challenge, payload, sizeof h->challenge);
}

static const struct td_xfer_frame proof_frame = {.type = TD_XFER_PROOF,
                                                 .length = TD_XFER_SECRET_BYTES};

/* How far a stranger goes before it says what opens the slot. */
enum stolen_point {
    AT_ONCE,
    AFTER_OLD_HELLO, /* one as of old, which asks for no secret */
    AFTER_HELLO,
    PROVES_ZEROS, /* from here on it answers the challenge */
    PROVES_CHALLENGE,
    PROVES_OTHER_SECRET, /* of another cluster */
    PROVES_AS_ACCEPTOR,  /* what an acceptor might be made to say */
    N_STOLEN_POINTS
};

/* The connection's first words, up to the point: the answers say why, and how to be let in. */
static void speak_up_to(struct by_hand *h, int fd, enum stolen_point point)
{
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
    if (point == AFTER_OLD_HELLO) {
        h->hello_frame.length = sizeof h->hello.hello;
        say(fd, h->hello_frame, &h->hello);
        struct td_xfer_frame f = hear(fd, TD_XFER_HELLO_ACK, payload);
        assert_int_equal(f.status, TD_ERR_UNSUPPORTED);
        payload[f.length] = 0;
        assert_string_equal(
            (char *)payload,
            "this side asks for the cluster secret: give yours the same --cluster-secret-file");
    }
    if (point >= AFTER_HELLO) by_hand_hello(h, fd);
    if (point == PROVES_ZEROS) memset(h->mac, 0, sizeof h->mac);
    if (point == PROVES_CHALLENGE) memcpy(h->mac, h->challenge, sizeof h->mac);
    if (point == PROVES_OTHER_SECRET) by_hand_prove(h, file_b, "tandem kv 1 initiator", NULL);
    if (point == PROVES_AS_ACCEPTOR) by_hand_prove(h, file_a, "tandem kv 1 acceptor", NULL);
    if (point < PROVES_ZEROS) return;
    say(fd, proof_frame, h->mac);
    struct td_xfer_frame f = hear(fd, TD_XFER_HELLO_ACK, payload);
    assert_int_equal(f.status, TD_ERR_PEER);
    payload[f.length] = 0;
    assert_string_equal(
        (char *)payload,
        "the cluster secret was not proved: the two sides' --cluster-secret-file differ");
}

/* OPEN with the grant's key, and data of it, as if the connection stood. */
static void say_what_opens(const struct by_hand *h, int fd, uint64_t conn)
{
    struct td_xfer_frame f = {.type = TD_XFER_OPEN,
                              .slot = h->g.slot,
                              .generation = h->g.generation,
                              .attempt = 1,
                              .handle = 9,
                              .length = 16,
                              .conn = conn};
    uint8_t rest[3 * 64 + 16 + 256], block[256] = {1};
    td_xfer_frame_encode(&f, rest);
    memcpy(rest + 64, h->g.key, 16);
    f.type = TD_XFER_DATA;
    f.length = 256;
    td_xfer_frame_encode(&f, rest + 80);
    memcpy(rest + 144, block, 256);
    send(fd, rest, 400, MSG_NOSIGNAL); /* it may have closed already */
}

/* A stranger who has stolen a grant, key and all, says what opens its slot in every place where
 * he can. */
static void a_stolen_grant_opens_nothing(void **state)
{
    (void)state;
    struct pair t;
    struct by_hand h;
    pair_open(&t, TD_XFER_PATH_TCP, file_a, file_a);
    struct node_reply g = grant(&t);
    for (enum stolen_point point = AT_ONCE; point < N_STOLEN_POINTS; point++) {
        int fd = dial_from(t.port, "127.0.0.1");
        by_hand_init(&h, &g);
        speak_up_to(&h, fd, point);
        say_what_opens(&h, fd, point == AFTER_HELLO ? 0 : 42);
        assert_true(is_closed(fd));
        close(fd);
    }
    wait_conns(t.d, 0);
    assert_true(stats(t.d).n_refused_peers >= 7);
    assert_int_equal(stats(t.d).bytes_received, 0);
    check_untouched(&t);
    struct td_xfer_event e =
        send_all(&t, &g); /* the same grant is as good as new to whom it was given */
    if (e.kind != TD_XFER_OP_DONE) fail_msg("%s", e.reason);
    assert_int_equal(event(t.d).kind, TD_XFER_SLOT_READY);
    pair_close(&t);
}

static void a_recorded_hello_opens_nothing(void **state)
{
    (void)state;
    struct pair t;
    struct by_hand h;
    struct td_xfer_secret_hello told;
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
    pair_open(&t, TD_XFER_PATH_TCP, file_a, file_a);
    struct node_reply g = grant(&t);
    by_hand_init(&h, &g);
    int fd = dial_from(t.port, "127.0.0.1");
    by_hand_hello(&h, fd);
    by_hand_prove(&h, file_a, "tandem kv 1 initiator", NULL);
    uint8_t recorded[TD_XFER_SECRET_BYTES];
    memcpy(recorded, h.mac, sizeof recorded);
    say(fd, proof_frame, recorded);
    struct td_xfer_frame f = hear(fd, TD_XFER_HELLO_ACK, payload);
    assert_int_equal(f.status, 0);
    assert_int_equal(f.length, sizeof told);
    memcpy(&told, payload, sizeof told);
    by_hand_prove(&h, file_a, "tandem kv 1 acceptor",
                  &told.hello); /* the other side is who it says, too */
    assert_memory_equal(told.secret, h.mac, sizeof h.mac);
    assert_int_equal(told.hello.incarnation, h.g.incarnation);
    close(fd);
    wait_conns(t.d, 0);

    fd = dial_from(t.port, "127.0.0.1"); /* the same bytes again: the challenge is another */
    uint8_t before[TD_XFER_SECRET_BYTES];
    memcpy(before, h.challenge, sizeof before);
    by_hand_hello(&h, fd);
    assert_memory_not_equal(h.challenge, before, sizeof before);
    say(fd, proof_frame, recorded);
    assert_int_equal(hear(fd, TD_XFER_HELLO_ACK, payload).status, TD_ERR_PEER);
    assert_true(is_closed(fd));
    close(fd);

    /* the proof of one wish is none of another: a lane of some connection, another path, another
       instance */
    for (int other = 0; other < 4; other++) {
        fd = dial_from(t.port, "127.0.0.1");
        by_hand_init(&h, &g);
        struct by_hand said = h;
        if (other == 0) said.hello_frame.op = 1, said.hello_frame.conn = 77;
        if (other == 1) said.hello_frame.slot = TD_XFER_PATH_RDMA;
        if (other == 2) said.hello.hello.instance[0] = 'x';
        if (other == 3)
            h.g.port ^= 1; /* meant for another worker, and passed on by whoever was dialled */
        by_hand_hello(&said, fd);
        memcpy(h.challenge, said.challenge, sizeof h.challenge);
        by_hand_prove(&h, file_a, "tandem kv 1 initiator", NULL);
        say(fd, proof_frame, h.mac);
        assert_int_equal(hear(fd, TD_XFER_HELLO_ACK, payload).status, TD_ERR_PEER);
        close(fd);
    }
    check_untouched(&t);
    pair_close(&t);
}

/* What somebody who does not know the secret does with a worker that dials him. */
enum impostor {
    ANSWERS_AS_OF_OLD,
    ANSWERS,
    ASKS_FOR_PROOF, /* as one who belongs would */
    RETURNS_PROOF,  /* and sends it back as his own */
    N_IMPOSTORS
};

/* An op on a grant that says the impostor's port, up to its connection. The listener stays, for
 * whoever might dial again. */
static int lure(struct pair *t, const struct node_reply *g, int *ret_listener,
                uint64_t *ret_incarnation)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof a;
    struct td_xfer_grant_blob blob;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(listener, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(listener, 4), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&a, &n), 0);
    assert_int_equal(td_xfer_grant_decode(g->blob, g->blob_bytes, &blob, NULL), TD_OK);
    blob.port = ntohs(a.sin_port);
    struct node_reply diverted = *g;
    td_xfer_grant_encode(&blob, diverted.blob);
    struct node_reply op = op_start(t->p, &diverted);
    if (op.status) fail_msg("op: %s", op.msg);
    struct node_command c = {
        .verb = NODE_SUBMIT, .id = op.id, .n = 4, .final = true, .ids = {0, 1, 2, 3}};
    assert_int_equal(ask(t->p, &c).status, TD_OK);
    int fd = accept(listener, NULL, NULL);
    assert_true(fd >= 0);
    struct timeval limit = {.tv_sec = WAIT_MS / 1000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    *ret_listener = listener;
    *ret_incarnation = blob.incarnation;
    return fd;
}

static void answer_as_impostor(int fd, enum impostor how, uint64_t incarnation)
{
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
    struct td_xfer_secret_hello hello;
    struct td_xfer_frame f = hear(fd, TD_XFER_HELLO, payload);
    assert_int_equal(f.length, sizeof hello);
    memcpy(&hello, payload, sizeof hello);
    uint8_t his_mac[TD_XFER_SECRET_BYTES] = {0};
    if (how >= ASKS_FOR_PROOF) {
        say(fd, (struct td_xfer_frame){.type = TD_XFER_CHALLENGE, .length = TD_XFER_SECRET_BYTES},
            hello.secret);
        hear(fd, TD_XFER_PROOF, payload);
        memcpy(his_mac, payload, sizeof his_mac);
    }
    struct td_xfer_secret_hello answer = {.hello = {.incarnation = incarnation,
                                                    .layout_hash = LAYOUT,
                                                    .block_bytes = BLOCK_BYTES,
                                                    .nonce = 9}};
    if (how == RETURNS_PROOF) memcpy(answer.secret, his_mac, sizeof his_mac);
    f = (struct td_xfer_frame){.type = TD_XFER_HELLO_ACK,
                               .length =
                                   how == ANSWERS_AS_OF_OLD ? sizeof answer.hello : sizeof answer};
    say(fd, f, &answer);
}

/* A worker dials somebody who does not know the secret and lets everybody in: it sends him
 * nothing. */
static void an_impostor_is_sent_nothing(void **state)
{
    (void)state;
    struct pair t;
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
    pair_open(&t, TD_XFER_PATH_TCP, file_a, file_a);
    struct node_reply g = grant(&t);
    for (enum impostor how = 0; how < N_IMPOSTORS; how++) {
        uint64_t incarnation;
        int listener, fd = lure(&t, &g, &listener, &incarnation);
        answer_as_impostor(fd, how, incarnation);
        for (ssize_t k; (k = recv(fd, payload, sizeof payload, 0)) != 0;) /* nothing but an end */
            if (k > 0)
                fail_msg("case %d: the impostor was sent %zd bytes", (int)how, k);
            else if (errno == ECONNRESET)
                break;
            else
                fail_msg("case %d: errno %d", (int)how, errno);
        struct td_xfer_event e = event(t.p);
        assert_int_equal(e.kind, TD_XFER_OP_FAILED);
        assert_non_null(strstr(e.reason, "it did not prove the cluster secret"));
        close(fd);
        close(listener);
    }
    pair_close(&t);
}

/* Cut at each boundary that a parser might forget, on both frames: nothing is kept, nobody else
 * waits. */
static void a_truncated_hello_leaves_nothing(void **state)
{
    (void)state;
    static const size_t hello_bytes[] = {0, 1, 63, 64, 65, 64 + 111, 64 + 112, 64 + 143},
                        proof_bytes[] = {0, 1, 63, 64, 95};
    struct pair t;
    struct by_hand h;
    pair_open(&t, TD_XFER_PATH_TCP, file_a, file_a);
    struct node_reply g = grant(&t);
    by_hand_init(&h, &g);
    for (size_t i = 0; i < sizeof hello_bytes / sizeof hello_bytes[0]; i++) {
        uint8_t bytes[64 + sizeof h.hello];
        int fd = dial_from(t.port, "127.0.0.1");
        td_xfer_frame_encode(&h.hello_frame, bytes);
        memcpy(bytes + 64, &h.hello, sizeof h.hello);
        assert_int_equal(send(fd, bytes, hello_bytes[i], MSG_NOSIGNAL), hello_bytes[i]);
        close(fd);
    }
    for (size_t i = 0; i < sizeof proof_bytes / sizeof proof_bytes[0]; i++) {
        uint8_t bytes[64 + TD_XFER_SECRET_BYTES];
        struct td_xfer_frame f = proof_frame;
        int fd = dial_from(t.port, "127.0.0.1");
        by_hand_hello(&h, fd);
        by_hand_prove(&h, file_a, "tandem kv 1 initiator", NULL);
        td_xfer_frame_encode(&f, bytes);
        memcpy(bytes + 64, h.mac, sizeof h.mac);
        assert_int_equal(send(fd, bytes, proof_bytes[i], MSG_NOSIGNAL), proof_bytes[i]);
        close(fd);
    }
    give_back(&t, &g);
    whole(&t);
    wait_conns(t.d, 1); /* the honest one's */
    pair_close(&t);
}

/* A stranger opens hundreds of connections and holds them; one who has a right to be here, and
 * is half way through his hello, goes on. That none of them is kept for ever is xfer_test's
 * (silent_connections_are_bounded). */
static void half_open_connections_keep_nobody_out(void **state)
{
    (void)state;
    enum { N_HELD = 300 };
    static int held[N_HELD];
    struct pair t;
    struct by_hand h;
    uint8_t payload[TD_XFER_PAYLOAD_MAX];
    bool with_secret = *(const char *)*state == 's';
    pair_open(&t, TD_XFER_PATH_TCP, with_secret ? file_a : "", with_secret ? file_a : "");
    struct node_reply g = grant(&t);
    by_hand_init(&h, &g);
    int fd = dial_from(t.port, "127.0.0.1");
    if (with_secret)
        by_hand_hello(&h, fd); /* challenged, and slow to answer */
    else
        wait_conns(t.d, 1);
    for (int i = 0; i < N_HELD; i++) {
        held[i] = dial_from(t.port, "127.0.0.66");
        if (with_secret && i % 2) say(held[i], h.hello_frame, &h.hello);
    }
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    while (stats(t.d).n_refused_peers < N_HELD - 64) {
        if (td_now_ns() > until)
            fail_msg("%llu strangers were pushed out",
                     (unsigned long long)stats(t.d).n_refused_peers);
        poll(NULL, 0, 1);
    }
    assert_true(stats(t.d).n_conns <= 64);
    if (with_secret) {
        by_hand_prove(&h, file_a, "tandem kv 1 initiator", NULL);
        say(fd, proof_frame, h.mac);
    } else {
        h.hello_frame.length = sizeof h.hello.hello;
        say(fd, h.hello_frame, &h.hello);
    }
    assert_int_equal(hear(fd, TD_XFER_HELLO_ACK, payload).status, 0);
    close(fd);
    give_back(&t, &g);
    whole(&t); /* and a whole transfer, on new connections */
    for (int i = 0; i < N_HELD; i++) close(held[i]);
    pair_close(&t);
}

int main(void)
{
    uint8_t mac[TD_CLUSTER_MAC_BYTES];
    if (td_hmac_sha256("", 0, "", 0, mac) == TD_ERR_UNSUPPORTED) {
        puts("skipped: built without OpenSSL");
        return 77;
    }
    static char with[] = "secret", without[] = "none";
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(who_knows_it_is_served_on_every_path),
        cmocka_unit_test(another_secret_is_refused_on_every_path),
        cmocka_unit_test(a_side_without_one_is_told_what_to_configure),
        cmocka_unit_test(a_stolen_grant_opens_nothing),
        cmocka_unit_test(a_recorded_hello_opens_nothing),
        cmocka_unit_test(an_impostor_is_sent_nothing),
        cmocka_unit_test(a_truncated_hello_leaves_nothing),
        cmocka_unit_test_prestate(half_open_connections_keep_nobody_out, with),
        cmocka_unit_test_prestate(half_open_connections_keep_nobody_out, without),
    };
    return cmocka_run_group_tests_name("xfer_secret", tests, make_files, remove_files);
}
