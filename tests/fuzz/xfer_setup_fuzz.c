/* xfer_setup_fuzz.c - a peer that says anything while a connection is being set up: HELLO, MEM, the
 * offers and answers of RDMA and of device memory, with descriptors that do or do not ride along,
 * on both roles, over tcp and the unix socket. xfer_frame_fuzz has the frames that come after it.
 *
 * The engines are whole: one with the host's memory and devices of the provider in memory, one with
 * a device's memory, one as the first that asks for a cluster secret, which this side knows; each
 * input is one connection. First byte: which engine, which role, which socket, which path. Then
 * frames: a byte of repairs, a header, its payload. Repairs put right what a real attacker would
 * (magic, version, crc; on demand the connection's tag, the type's length, sizes that both sides
 * know, the MAC of the secret), so that the fuzzer gets behind them.
 *
 * Oracle: the engine's assertions, and: a peer that has gone leaves no connection, no op and no
 * descriptor behind. */
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/cluster_secret.h"
#include "common/base/mem.h"
#include "tests/fake/verbs_fake.h"
#include "common/transfer/wire.h"
#include "tests/fake/fake_device.h"

#define BLOCK_BYTES 4096
#define N_BLOCKS 8
#define LAYOUT 11
#define WAIT_MS 8000

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static struct end {
    struct td_xfer *x;
    struct td_arena arena;
    struct td_xfer_grant_blob grant; /* of a slot that stays */
    uint32_t slot;
} ends[3];
static struct td_cluster_secret *secret; /* of the last */

/* What both sides of the connection under way have said so far, for the MACs. */
static struct talk {
    struct td_xfer_frame hello_frame;
    struct td_xfer_secret_hello hello;
    uint8_t challenge[TD_XFER_SECRET_BYTES];
    const char *host;
    uint16_t port;
} talk;

static void need(bool ok, const char *what)
{
    if (ok) return;
    fprintf(stderr, "xfer_setup_fuzz: %s (errno %d)\n", what, errno);
    abort();
}

/* From a file that has no name. */
static void load_secret(void)
{
    char path[64];
    struct td_err err = {0};
    int fd = memfd_create("secret", MFD_CLOEXEC);
    need(fd >= 0 && dprintf(fd, "0123456789abcdef0123456789abcdef") == 32 && fchmod(fd, 0600) == 0,
         "memfd");
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    need(td_cluster_secret_load(path, &secret, &err) == TD_OK, err.msg);
    close(fd);
}

static void make_mac(bool acceptor, const struct td_xfer_hello *own,
                     uint8_t ret_mac[TD_XFER_SECRET_BYTES])
{
    const struct td_xfer_frame *f = &talk.hello_frame;
    uint32_t numbers[5] = {f->slot, f->op, (uint32_t)f->conn, (uint32_t)(f->conn >> 32), talk.port};
    const struct td_secret_field fields[] = {{talk.hello.secret, 32},
                                             {talk.challenge, 32},
                                             {&talk.hello.hello, sizeof talk.hello.hello},
                                             {numbers, sizeof numbers},
                                             {talk.host, strlen(talk.host)},
                                             {own, sizeof *own}};
    const char *label = acceptor ? "tandem kv 1 acceptor" : "tandem kv 1 initiator";
    need(td_cluster_secret_prove(secret, label, fields, acceptor ? 6 : 5, ret_mac) == TD_OK,
         "no MAC");
}

static void open_ends(void)
{
    load_secret();
    for (int i = 0; i < 3; i++) {
        struct end *e = &ends[i];
        struct td_err err = {0};
        struct td_fake_options options;
        struct td_fake_fabric *fabric;
        struct td_xfer_rdma_config rdma = {.gid_index = -1, .pull = true};
        struct td_xfer_config config = {.instance = "end",
                                        .incarnation = 5,
                                        .layout_hash = LAYOUT,
                                        .listen_host = "127.0.0.1",
                                        .max_slots = 4,
                                        .max_ops = 4,
                                        .peer_timeout_ms = 60000,
                                        .tcp_lanes = 1};
        uint8_t blob[TD_XFER_BLOB_MAX];
        size_t n;
        int32_t ids[2] = {0, 1};
        if (i == 2) config.secret = secret;
        if (i != 1) {
            td_fake_options_default(&options);
            options.devices = 2;
            options.retry_ms = 1;
            need(td_fake_fabric_open(&options, &fabric, &err) == TD_OK, err.msg);
            rdma.verbs = td_fake_verbs(fabric);
            config.rdma = &rdma;
            need(td_arena_create(BLOCK_BYTES * N_BLOCKS, true, "fuzz", &e->arena, &err) == TD_OK,
                 err.msg);
        } else {
            struct fake_device *d = fake_device_open("eager");
            config.memory = fake_device_memory(d);
            e->arena = (struct td_arena){.bytes = BLOCK_BYTES * N_BLOCKS + TD_XFER_PROBE_BYTES,
                                         .memfd = -1};
            e->arena.base = fake_device_alloc(d, e->arena.bytes);
        }
        need(td_xfer_open(&config, &e->x, &err) == TD_OK, err.msg);
        need(td_xfer_mem_add(e->x, &e->arena, BLOCK_BYTES, N_BLOCKS, &err) == TD_OK, err.msg);
        need(td_xfer_grant(e->x, ids, 2, TD_NEVER_NS, 0, &e->slot, blob, &n, &err) == TD_OK,
             err.msg);
        need(td_xfer_grant_decode(blob, n, &e->grant, &err) == TD_OK, err.msg);
    }
}

/* --- a connection ----------------------------------------------------------------------------- */

static socklen_t unix_address(const char *name, struct sockaddr_un *a)
{
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(a->sun_path + 1, name, strlen(name));
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

static int limited(int fd)
{
    struct timeval limit = {.tv_sec = WAIT_MS / 1000};
    need(fd >= 0, "socket");
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    return fd;
}

static int dial(const struct end *e, bool local)
{
    int fd = limited(socket(local ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    struct sockaddr_un u;
    struct sockaddr_in in = {.sin_family = AF_INET,
                             .sin_port = htons(e->grant.port),
                             .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = unix_address(e->grant.shm_name, &u);
    need(connect(fd, local ? (struct sockaddr *)&u : (struct sockaddr *)&in,
                 local ? n : sizeof in) == 0,
         "connect");
    return fd;
}

/* All n bytes; false: the other side has closed. Silence is an error: it answers a HELLO, and
 * closes when this side has. */
static bool take(int fd, void *to, size_t n)
{
    for (uint8_t *p = to; n;) {
        ssize_t k = recv(fd, p, n, 0);
        if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) need(false, "no answer and no end");
        if (k <= 0) return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

/* The other side's HELLO or HELLO_ACK: its nonce, or false. */
static bool take_hello(int fd, uint64_t *ret_nonce)
{
    uint8_t header[64], payload[TD_XFER_PAYLOAD_MAX];
    struct td_xfer_frame f;
    struct td_xfer_hello hello;
    if (!take(fd, header, sizeof header)) return false;
    need(td_xfer_frame_decode(header, &f, NULL) == TD_OK && f.length <= sizeof payload,
         "the engine sent a malformed frame");
    if (!take(fd, payload, f.length) || f.status ||
        (f.length != sizeof hello && f.length != sizeof talk.hello))
        return false;
    memcpy(&hello, payload, sizeof hello);
    *ret_nonce = hello.nonce;
    if (f.type == TD_XFER_HELLO && f.length == sizeof talk.hello) {
        talk.hello_frame = f;
        memcpy(&talk.hello, payload, sizeof talk.hello);
    }
    return true;
}

/* What answers a HELLO of this side's that asks for the secret; false: it was refused. */
static bool take_challenge(int fd)
{
    uint8_t header[64], payload[TD_XFER_PAYLOAD_MAX];
    struct td_xfer_frame f;
    if (!take(fd, header, sizeof header)) return false;
    need(td_xfer_frame_decode(header, &f, NULL) == TD_OK && f.length <= sizeof payload,
         "the engine sent a malformed frame");
    if (!take(fd, payload, f.length) || f.type != TD_XFER_CHALLENGE) return false;
    memcpy(talk.challenge, payload, sizeof talk.challenge);
    return true;
}

static int small_memfd(bool sealed)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    need(fd >= 0 && ftruncate(fd, BLOCK_BYTES * N_BLOCKS) == 0, "memfd");
    if (sealed) fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK);
    return fd;
}

static void put(int fd, bool local, const uint8_t *header, const uint8_t *payload, size_t n,
                int n_fds, bool sealed)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(3 * sizeof(int))];
    } control = {0};
    struct iovec iov[2] = {{(void *)(uintptr_t)header, 64}, {(void *)(uintptr_t)payload, n}};
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 2};
    int fds[3];
    if (!local) n_fds = 0;
    for (int i = 0; i < n_fds; i++) fds[i] = small_memfd(sealed);
    if (n_fds) {
        msg.msg_control = &control;
        msg.msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof(int));
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN((size_t)n_fds * sizeof(int));
        memcpy(CMSG_DATA(&control.header), fds, (size_t)n_fds * sizeof(int));
    }
    ssize_t k = sendmsg(fd, &msg, MSG_NOSIGNAL); /* refused: it has closed already */
    for (int i = 0; i < n_fds; i++) close(fds[i]);
    (void)k;
}

/* --- what the input says ---------------------------------------------------------------------- */

enum repair {
    FIX_TAG = 1,
    FIX_LENGTH = 2,
    FIX_SIZES = 4,
    SEALED = 8,
    ONE_FD = 16,
    TWO_FDS = 32,
    FIX_PATH = 64,
    RAW = 128
};

static uint32_t natural_length(uint8_t type, const struct end *e)
{
    switch (type) {
    case TD_XFER_HELLO:
    case TD_XFER_HELLO_ACK:
        return e == &ends[2] ? sizeof(struct td_xfer_secret_hello) : sizeof(struct td_xfer_hello);
    case TD_XFER_CHALLENGE:
    case TD_XFER_PROOF:
        return TD_XFER_SECRET_BYTES;
    case TD_XFER_MEM:
        return sizeof(struct td_xfer_mem);
    case TD_XFER_RDMA_OFFER:
        return TD_XFER_RDMA_SETUP_BYTES;
    case TD_XFER_RDMA_ACCEPT:
        return TD_XFER_RDMA_SETUP_BYTES + 2 * 4;
    case TD_XFER_DEVICE_OFFER:
        return sizeof(struct td_xfer_device_mem);
    default:
        return 0;
    }
}

static void fix_sizes(uint8_t type, uint8_t *payload, const struct end *e)
{
    if (type == TD_XFER_HELLO || type == TD_XFER_HELLO_ACK) {
        struct td_xfer_hello h;
        memcpy(&h, payload, sizeof h);
        h.incarnation = 77;
        h.layout_hash = LAYOUT;
        h.block_bytes = BLOCK_BYTES;
        h.nonce |= 1;
        memcpy(h.proof, e->grant.proof, sizeof h.proof);
        h.instance[sizeof h.instance - 1] = 0;
        memcpy(payload, &h, sizeof h);
        if (type == TD_XFER_HELLO_ACK && e == &ends[2]) make_mac(true, &h, payload + sizeof h);
    } else if (type == TD_XFER_PROOF && e == &ends[2]) {
        make_mac(false, NULL, payload);
    } else if (type == TD_XFER_MEM) {
        struct td_xfer_mem m;
        memcpy(&m, payload, sizeof m);
        m.block_bytes = BLOCK_BYTES;
        m.n_blocks %= 2 * N_BLOCKS;
        m.arena_bytes = (uint64_t)m.n_blocks * BLOCK_BYTES;
        m.n_words %= 1024;
        memcpy(payload, &m, sizeof m);
    } else if (type == TD_XFER_DEVICE_OFFER) {
        struct td_xfer_device_mem m;
        memcpy(&m, payload, sizeof m);
        m.block_bytes = BLOCK_BYTES;
        m.n_blocks %= 2 * N_BLOCKS;
        m.n_words %= 1024;
        m.probe_offset = m.block_bytes * m.n_blocks + m.probe_offset % 256;
        m.offset %= 1 << 20;
        m.uuid[sizeof m.uuid - 1] = m.name[sizeof m.name - 1] = 0;
        memcpy(payload, &m, sizeof m);
    } else if (type == TD_XFER_RDMA_OFFER || type == TD_XFER_RDMA_ACCEPT) {
        struct td_xfer_rdma_setup s = {0};
        memcpy(&s, payload, TD_XFER_RDMA_SETUP_BYTES + 8);
        s.n_rails = 2;
        s.n_qps = 1 + s.n_qps % TD_XFER_RAIL_QPS_MAX;
        s.recv_wr = 1 + s.recv_wr % 256;
        s.n_regions = type == TD_XFER_RDMA_ACCEPT;
        s.region_bytes = BLOCK_BYTES * N_BLOCKS;
        s.base %= 1ull << 47;
        s.windows &= 1;
        if (type == TD_XFER_RDMA_OFFER) s.windows = s.rails = 0;
        for (uint8_t i = 0; i < 2; i++) {
            s.rail[i].index = i;
            s.rail[i].ethernet &= 1;
            s.rail[i].mtu_bytes = 256u << s.rail[i].mtu_bytes % 5;
            for (int q = 0; q < TD_XFER_RAIL_QPS_MAX; q++)
                s.rail[i].qpn[q] &= 0xffffff, s.rail[i].psn[q] &= 0xffffff;
        }
        memcpy(payload, &s, TD_XFER_RDMA_SETUP_BYTES + 8);
    }
}

/* The next frame of the input; false: it is over. */
static bool next_frame(const uint8_t **data, size_t *n_bytes, const struct end *e, uint64_t tag,
                       uint32_t path, uint8_t header[64], uint8_t payload[TD_XFER_PAYLOAD_MAX],
                       struct td_xfer_frame *f, uint8_t *repair)
{
    if (*n_bytes < 65) return false;
    *repair = (*data)[0];
    memcpy(header, *data + 1, 64);
    *data += 65;
    *n_bytes -= 65;
    memcpy(f, header, sizeof *f);
    f->type = (uint8_t)(f->type % TD_XFER_N_TYPES);
    if (f->type == 0) f->type = TD_XFER_HELLO;
    if (*repair & FIX_TAG) f->conn = tag;
    if (*repair & FIX_LENGTH) f->length = natural_length(f->type, e);
    if (*repair & FIX_PATH) f->slot = path, f->op = 0, f->status = 0;
    f->length %= TD_XFER_PAYLOAD_MAX + 1;
    memset(payload, 0, TD_XFER_PAYLOAD_MAX);
    size_t have = f->length < *n_bytes ? f->length : *n_bytes;
    memcpy(payload, *data, have);
    *data += have;
    *n_bytes -= have;
    if (*repair & FIX_SIZES) fix_sizes(f->type, payload, e);
    if (*repair & RAW) return true; /* as it came: magic, version and checksum, too */
    f->flags = 0;
    if (f->status > 0) f->status = (int16_t)-f->status;
    if (f->type != TD_XFER_FINAL) f->last_us = 0;
    if (f->type != TD_XFER_HELLO && f->type != TD_XFER_OPEN && f->type != TD_XFER_PING &&
        f->type != TD_XFER_FINAL)
        f->clock_us = 0;
    td_xfer_frame_encode(f, header);
    return true;
}

static void all_gone(struct end *e)
{
    struct td_xfer_stats s;
    uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    do {
        need(td_now_ns() < until, "a peer has gone and its connection has not");
        td_xfer_stats(e->x, &s);
        if (s.n_conns + s.n_lanes) poll(NULL, 0, 1);
    } while (s.n_conns + s.n_lanes);
    need(s.n_ops_used == 0, "an op is left");
}

/* This side speaks until its words are over, and then listens to the end. */
static void speak(int fd, bool local, const struct end *e, uint32_t path, uint64_t their_nonce,
                  const uint8_t *data, size_t n_bytes)
{
    uint8_t header[64], payload[TD_XFER_PAYLOAD_MAX], repair;
    struct td_xfer_frame f;
    uint64_t tag = 0;
    bool greeted = false;
    while (next_frame(&data, &n_bytes, e, tag, path, header, payload, &f, &repair)) {
        int n_fds = (repair & ONE_FD ? 1 : 0) + (repair & TWO_FDS ? 2 : 0);
        put(fd, local, header, payload, f.length, n_fds, repair & SEALED);
        struct td_xfer_hello h;
        memcpy(&h, payload, sizeof h);
        if (f.type == TD_XFER_CHALLENGE) memcpy(talk.challenge, payload, sizeof talk.challenge);
        if (!greeted && f.type == TD_XFER_HELLO && !their_nonce && f.length == sizeof talk.hello &&
            e == &ends[2] && !(repair & RAW)) {
            talk.hello_frame = f;
            memcpy(&talk.hello, payload, sizeof talk.hello);
            if (!take_challenge(fd)) return;
        }
        if (f.type == TD_XFER_HELLO_ACK && e == &ends[2]) tag = their_nonce ^ h.nonce;
        if (f.type == TD_XFER_PROOF && e == &ends[2] && !their_nonce &&
            f.length == TD_XFER_SECRET_BYTES && !(repair & RAW)) {
            uint64_t nonce;
            if (!take_hello(fd, &nonce)) return; /* refused */
            tag = nonce ^ talk.hello.hello.nonce;
        }
        if (!greeted && f.type == TD_XFER_HELLO_ACK) tag = their_nonce ^ h.nonce;
        if (!greeted && f.type == TD_XFER_HELLO && !their_nonce && f.length == sizeof h &&
            !(repair & RAW)) {
            /* else it waits for more */
            uint64_t nonce;
            if (!take_hello(fd, &nonce)) return;
            tag = nonce ^ h.nonce;
        }
        greeted = true;
    }
    shutdown(fd, SHUT_WR);
    while (take(fd, payload, 1)) {
    }
}

static void as_initiator(struct end *e, bool local, uint32_t path, const uint8_t *data,
                         size_t n_bytes)
{
    int fd = dial(e, local);
    talk = (struct talk){.host = e->grant.host, .port = e->grant.port};
    speak(fd, local, e, path, 0, data, n_bytes);
    close(fd);
}

/* The connection that the engine dials; -1 when its op has failed first, as at once by a path that
 * this side lacks. */
static int accept_op(struct end *e, int listener, struct td_xfer_event *ret_event)
{
    int fd = -1;
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS); fd < 0 && !ret_event->kind;) {
        struct pollfd p = {.fd = listener, .events = POLLIN};
        need(td_now_ns() < until, "it neither dials nor fails");
        if (poll(&p, 1, 1) > 0)
            fd = limited(accept(listener, NULL, NULL));
        else
            td_xfer_poll(e->x, ret_event, 1);
    }
    return fd;
}

/* The engine dials: an op whose grant names this side. */
static void as_acceptor(struct end *e, bool local, uint32_t path, const uint8_t *data,
                        size_t n_bytes)
{
    struct sockaddr_un u;
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t n = sizeof in;
    struct td_xfer_grant_blob g = {.slot = 1,
                                   .generation = 1,
                                   .n_blocks = 1,
                                   .incarnation = 77,
                                   .layout_hash = LAYOUT,
                                   .block_bytes = BLOCK_BYTES,
                                   .path = (uint8_t)path,
                                   .has_rdma = true,
                                   .device = e == &ends[1],
                                   .secret = e == &ends[2],
                                   .host = "127.0.0.1",
                                   .instance = "liar"};
    uint8_t blob[TD_XFER_BLOB_MAX];
    int listener = limited(socket(local ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    memcpy(g.proof, e->grant.proof, sizeof g.proof);
    if (local) {
        snprintf(g.shm_name, sizeof g.shm_name, "tandem-fuzz-%d", (int)getpid());
        n = unix_address(g.shm_name, &u);
    }
    need(bind(listener, local ? (struct sockaddr *)&u : (struct sockaddr *)&in, n) == 0 &&
             listen(listener, 1) == 0,
         "listen");
    if (!local) {
        need(getsockname(listener, (struct sockaddr *)&in, &n) == 0, "getsockname");
        g.port = ntohs(in.sin_port);
    }
    td_xfer_grant_encode(&g, blob);
    talk = (struct talk){.host = "127.0.0.1", .port = g.port};
    uint32_t op;
    int32_t n_blocks, block = 0;
    struct td_err err;
    if (td_xfer_op_start(e->x, blob, sizeof g, TD_NEVER_NS, 0, &op, &n_blocks, &err) == TD_OK) {
        struct td_xfer_event event = {0};
        td_xfer_submit(e->x, op, 0, &block, 1, true, NULL, 0);
        int fd = accept_op(e, listener, &event);
        uint64_t nonce;
        if (fd >= 0) {
            if (take_hello(fd, &nonce)) speak(fd, local, e, path, nonce, data, n_bytes);
            close(fd);
        }
        close(listener);
        listener = -1;
        td_xfer_cancel(e->x, op, "over");
        for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS); !event.kind;) {
            need(td_now_ns() < until, "an op does not end");
            if (!td_xfer_poll(e->x, &event, 1)) poll(NULL, 0, 1);
        }
        need(event.kind == TD_XFER_OP_FAILED && event.id == op, "an op to a liar was not failed");
    }
    if (listener >= 0) close(listener);
}

/* Of the kinds that an engine has; libFuzzer opens files and pipes of its own. */
static int count_fds(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    need(d, "/proc/self/fd");
    for (struct dirent *entry; (entry = readdir(d));) {
        char what[16] = "";
        if (readlinkat(dirfd(d), entry->d_name, what, sizeof what - 1) < 0) continue;
        n += !strncmp(what, "socket:", 7) || !strncmp(what, "/memfd:", 7) ||
             !strncmp(what, "anon_inode:", 11);
    }
    closedir(d);
    return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    static int n_fds;
    static const uint8_t paths[] = {TD_XFER_PATH_TCP, TD_XFER_PATH_SHM, TD_XFER_PATH_RDMA,
                                    TD_XFER_PATH_CUDA_IPC};
    if (n_bytes < 1) return 0;
    bool first = !ends[0].x;
    if (first) open_ends();
    struct end *e = &ends[data[0] & 64 ? 2 : data[0] & 1];
    uint32_t path = paths[data[0] >> 2 & 3];
    bool local = path == TD_XFER_PATH_SHM || path == TD_XFER_PATH_CUDA_IPC;
    if (data[0] & 32 && path == TD_XFER_PATH_SHM) path = TD_XFER_PATH_SHM_STAGED;
    if (data[0] & 2)
        as_acceptor(e, local, path, data + 1, n_bytes - 1);
    else
        as_initiator(e, local != !!(data[0] & 16), path, data + 1,
                     n_bytes - 1); /* bit 4: the path that it names does not go by this socket */
    all_gone(&ends[0]);
    all_gone(&ends[1]);
    all_gone(&ends[2]);
    if (first) n_fds = count_fds();
    /* what it has yet to accept comes and goes */
    for (uint64_t until = td_deadline_after_ms(td_now_ns(), WAIT_MS); count_fds() > n_fds;
         poll(NULL, 0, 1))
        need(td_now_ns() < until, "descriptors were left open");
    return 0;
}
