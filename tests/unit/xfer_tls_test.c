/* xfer_tls_test.c - TLS channels over loopback TCP, both ends in this thread, stepped by poll;
 * certificates are made here.
 *
 * `xfer_tls_test bench` prints GB/s of one stream, plain and TLS, with a thread at each end;
 * `xfer_tls_test NAME*` runs the tests of that name. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/random.h"
#include "common/transfer/tls.h"
#include "tests/unit/tls_files.h"

#ifdef TD_HAVE_OPENSSL

#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

enum { WAIT_MS = 20000, PATTERN_BYTES = (1 << 20) + 7 };

/* --- certificates ----------------------------------------------------------------------------- */

static void write_file(const char *name, const char *text)
{
    FILE *f = fopen(tls_files_in(name), "we");
    assert_non_null(f);
    assert_int_equal(fputs(text, f) >= 0, 1);
    fclose(f);
}

static void copy_file(const char *from, const char *to)
{
    char text[16384];
    FILE *f = fopen(tls_files_in(from), "re");
    assert_non_null(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = '\0';
    char temporary[64];
    snprintf(temporary, sizeof temporary, "%s.new", to);
    write_file(temporary, text);
    /* another inode, as those who rotate do it */
    assert_int_equal(rename(tls_files_in(temporary), tls_files_in(to)), 0);
}

static uint8_t *pattern;

static int make_all(void **state)
{
    (void)state;
    tls_files_open();
    struct tls_files_id ca =
        tls_files_make(NULL, &(struct tls_files_make){.name = "ca", .ca = true});
    struct tls_files_id other =
        tls_files_make(NULL, &(struct tls_files_make){.name = "other", .ca = true});
    static const struct tls_files_make mine[] = {
        {.name = "a", .alt = "DNS:worker.tandem,IP:127.0.0.1"},
        {.name = "b", .alt = "DNS:worker.tandem"},
        {.name = "client", .alt = "DNS:client.tandem"},
        {.name = "w1", .alt = "DNS:other.example,DNS:w1.kv.tandem"},
        {.name = "deep", .alt = "DNS:x.w1.kv.tandem"},
        {.name = "suffix", .alt = "DNS:kv.tandem,DNS:w1kv.tandem,DNS:w1.kv.tandem.example"},
        {.name = "star", .alt = "DNS:*.kv.tandem"},
        {.name = "w2.kv.tandem"}, /* its subject only */
        {.name = "expired", .from_s = -7200, .to_s = -3600},
        {.name = "future", .from_s = 3600, .to_s = 7200},
        {.name = "server_only", .usage = "serverAuth"},
        {.name = "client_only", .usage = "clientAuth"},
        {.name = "both_uses", .usage = "serverAuth,clientAuth"},
        {.name = "spiffe", .alt = "URI:spiffe://prod/sa/worker,IP:10.9.8.7,DNS:nobody.example"},
    };
    for (size_t i = 0; i < sizeof mine / sizeof mine[0]; i++) {
        struct tls_files_id id = tls_files_make(&ca, &mine[i]);
        tls_files_free(&id);
    }
    struct tls_files_id foreign =
        tls_files_make(&other, &(struct tls_files_make){.name = "foreign"});
    struct tls_files_id alone = tls_files_make(NULL, &(struct tls_files_make){.name = "alone"});
    FILE *f = fopen(tls_files_in("locked.key"), "we");
    assert_int_equal(PEM_write_PrivateKey(f, alone.key, EVP_aes_128_cbc(),
                                          (const unsigned char *)"secret", 6, NULL, NULL),
                     1);
    fclose(f);
    tls_files_free(&foreign);
    tls_files_free(&alone);
    tls_files_free(&ca);
    tls_files_free(&other);
    write_file("text", "no certificate\n");
    write_file("half.crt",
               "-----BEGIN "
               "CERTIFICATE-----\nMIIBejCCASGgAwIBAgIBAjAKBggqhkjOPQQDAjANMQswCQYDVQQD\n-----END "
               "CERTIFICATE-----\n");
    pattern = malloc(PATTERN_BYTES);
    uint64_t r = 1;
    for (size_t i = 0; i < PATTERN_BYTES; i++) pattern[i] = (uint8_t)(td_random_step(&r) >> 32);
    return 0;
}

static int remove_all(void **state)
{
    (void)state;
    static const char *const names[] = {
        "ca",          "other",   "a",     "b",      "client", "expired", "future",
        "server_only", "foreign", "alone", "locked", "half",   "live",    "client_only",
        "both_uses",   "spiffe",  "w1",    "deep",   "suffix", "star",    "w2.kv.tandem"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s.crt", names[i]);
        unlink(tls_files_in(name));
        snprintf(name, sizeof name, "%s.key", names[i]);
        unlink(tls_files_in(name));
    }
    unlink(tls_files_in("text"));
    free(pattern);
    return tls_files_close();
}

/* id NULL = shows no certificate; ca NULL = believes anybody. */
static struct td_xfer_tls *tls_for(const char *id, const char *ca, struct td_xfer_tls_config config)
{
    char cert[64], key[64], ca_file[64];
    snprintf(cert, sizeof cert, "%s.crt", id ? id : "");
    snprintf(key, sizeof key, "%s.key", id ? id : "");
    snprintf(ca_file, sizeof ca_file, "%s.crt", ca ? ca : "");
    if (id) config.cert_file = tls_files_in(cert), config.key_file = tls_files_in(key);
    if (ca) config.ca_file = tls_files_in(ca_file);
    struct td_xfer_tls *tls = NULL;
    struct td_err err = {0};
    if (td_xfer_tls_open(&config, &tls, &err)) fail_msg("%s", err.msg);
    return tls;
}

/* --- two ends --------------------------------------------------------------------------------- */

/* fds[0] dialled fds[1]; both non-blocking. buffer_bytes 0 = the system's. */
static void tcp_pair(int fds[2], int buffer_bytes)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof at;
    int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (buffer_bytes) {
        setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes);
        setsockopt(listener, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
        setsockopt(fds[0], SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes);
        setsockopt(fds[0], SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
    }
    assert_int_equal(bind(listener, (struct sockaddr *)&at, sizeof at), 0);
    assert_int_equal(listen(listener, 1), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&at, &n), 0);
    assert_int_equal(connect(fds[0], (struct sockaddr *)&at, sizeof at), 0);
    fds[1] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    assert_true(fds[1] >= 0);
    close(listener);
    for (int i = 0; i < 2; i++) {
        setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        fcntl(fds[i], F_SETFL, O_NONBLOCK);
    }
}

struct pair {
    int fds[2]; /* of the channels: [0] dialled */
    struct td_xfer_tls_conn *c[2];
    td_status status[2]; /* of the handshake */
    struct td_err err[2];
    bool relayed;
    int middle[2];              /* relay: middle[i] faces fds[i] */
    size_t chunk;               /* relay: bytes in one go */
    long cut_at[2], flip_at[2]; /* of the bytes that come from side i, -1 = never */
    size_t n_relayed[2];
};

static void pair_open(struct pair *p, struct td_xfer_tls *dials, struct td_xfer_tls *accepts,
                      int buffer_bytes, bool relayed)
{
    memset(p, 0, sizeof *p);
    p->middle[0] = p->middle[1] = -1;
    p->chunk = 65536;
    for (int i = 0; i < 2; i++) p->cut_at[i] = p->flip_at[i] = -1;
    if (relayed) {
        int near[2], far[2];
        tcp_pair(near, buffer_bytes);
        tcp_pair(far, buffer_bytes);
        p->fds[0] = near[0], p->middle[0] = near[1], p->middle[1] = far[0], p->fds[1] = far[1];
        p->relayed = true;
    } else {
        tcp_pair(p->fds, buffer_bytes);
    }
    struct td_xfer_tls *tls[2] = {dials, accepts};
    for (int i = 0; i < 2; i++) {
        p->status[i] = TD_INPROGRESS;
        if (tls[i])
            assert_int_equal(td_tls_conn_open(tls[i], p->fds[i], i == 0, &p->c[i], &p->err[i]),
                             TD_OK);
    }
}

static void pair_close(struct pair *p)
{
    for (int i = 0; i < 2; i++) {
        td_tls_conn_close(p->c[i]);
        if (p->fds[i] >= 0) close(p->fds[i]);
        if (p->middle[i] >= 0) close(p->middle[i]);
    }
}

/* Moves what is there, one chunk for each side; true when bytes moved. */
static bool relay(struct pair *p)
{
    bool moved = false;
    for (int i = 0; i < 2; i++) {
        uint8_t buf[65536];
        if (!p->relayed || p->middle[i] < 0 || p->middle[!i] < 0) continue;
        ssize_t k = recv(p->middle[i], buf, p->chunk < sizeof buf ? p->chunk : sizeof buf,
                         MSG_PEEK | MSG_DONTWAIT);
        if (k <= 0) continue;
        long at = (long)p->n_relayed[i];
        if (p->flip_at[i] >= at && p->flip_at[i] < at + k) buf[p->flip_at[i] - at] ^= 1;
        if (p->cut_at[i] >= 0 && p->cut_at[i] < at + k) k = p->cut_at[i] - at;
        if (k > 0) {
            k = send(p->middle[!i], buf, (size_t)k, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (k <= 0) continue;
            assert_int_equal(recv(p->middle[i], buf, (size_t)k, MSG_DONTWAIT), k);
            p->n_relayed[i] += (size_t)k;
            moved = true;
        }
        if (p->cut_at[i] == (long)p->n_relayed[i]) {
            shutdown(p->middle[!i], SHUT_WR);
            p->cut_at[i] = -1;
            close(p->middle[i]);
            p->middle[i] = -1;
        }
    }
    return moved;
}

/* Until neither side is under way; a side that failed is not stepped again. */
static void pair_handshake(struct pair *p)
{
    uint64_t until_ns = td_now_ns() + WAIT_MS * TD_NS_PER_MS;
    while (p->status[0] == TD_INPROGRESS || p->status[1] == TD_INPROGRESS) {
        assert_true(td_now_ns() < until_ns);
        struct pollfd polled[4] = {{.fd = -1},
                                   {.fd = -1},
                                   {.fd = p->middle[0], .events = POLLIN},
                                   {.fd = p->middle[1], .events = POLLIN}};
        for (int i = 0; i < 2; i++) {
            if (p->status[i] != TD_INPROGRESS) continue;
            bool reads = false, writes = false;
            p->status[i] = td_tls_handshake(p->c[i], &reads, &writes, &p->err[i]);
            if (p->status[i] != TD_INPROGRESS) {
                /* the other side learns of it */
                if (p->status[i] != TD_OK) shutdown(p->fds[i], SHUT_WR);
                continue;
            }
            assert_true(reads || writes);
            polled[i] = (struct pollfd){
                .fd = p->fds[i], .events = (short)((reads ? POLLIN : 0) | (writes ? POLLOUT : 0))};
        }
        if (relay(p)) continue;
        if (p->status[0] == TD_INPROGRESS && p->status[1] == TD_INPROGRESS && !p->relayed)
            assert_true(poll(polled, 4, WAIT_MS) > 0);
        else
            poll(polled, 4, 1);
    }
}

static void pair_ready(struct pair *p)
{
    pair_handshake(p);
    for (int i = 0; i < 2; i++)
        if (p->status[i]) fail_msg("side %d: %s", i, p->err[i].msg);
}

/* What a recv answers in the end: waits while it says EAGAIN. */
static ssize_t recv_wait(struct pair *p, int side, void *buf, size_t n)
{
    uint64_t until_ns = td_now_ns() + WAIT_MS * TD_NS_PER_MS;
    for (;;) {
        ssize_t k = td_tls_recv(p->c[side], buf, n);
        if (k >= 0 || errno != EAGAIN) return k;
        assert_false(td_tls_pending(p->c[side]));
        assert_true(td_now_ns() < until_ns);
        if (p->c[!side] && p->status[!side] == TD_OK) td_tls_flush(p->c[!side]);
        if (relay(p)) continue;
        poll(&(struct pollfd){.fd = p->fds[side], .events = POLLIN}, 1, 10);
    }
}

static void recv_exactly(struct pair *p, int side, void *buf, size_t n)
{
    for (size_t got = 0; got < n;) {
        ssize_t k = recv_wait(p, side, (uint8_t *)buf + got, n - got);
        if (k <= 0)
            fail_msg("side %d, byte %zu of %zu: %zd, %s", side, got, n, k,
                     td_tls_reason(p->c[side]));
        got += (size_t)k;
    }
}

/* --- a stream whose bytes are known ----------------------------------------------------------- */

/* One direction. The byte at position p is pattern[p % PATTERN_BYTES] ^ the mask in force when
 * the channel took it: at every EAGAIN the sender changes its mind about all that was not taken
 * yet, as a caller does that replaces the rest of a cancelled frame. */
struct stream {
    uint64_t n_bytes, n_sent, n_received;
    struct {
        uint64_t from;
        uint8_t mask;
    } turns[1 << 16];
    uint32_t n_turns, turn_read, n_blocked, n_partial;
    uint64_t seed;
};

static uint32_t stream_random(struct stream *s, uint32_t limit)
{
    return td_random_index(&s->seed, limit);
}

/* Masks and moves: bytewise loops are slow under sanitizers. */
static void fill(uint8_t *to, uint64_t at, size_t n, uint8_t mask)
{
    uint64_t m = mask * 0x0101010101010101ull;
    for (size_t done = 0; done < n;) {
        size_t from = (size_t)((at + done) % PATTERN_BYTES),
               k = PATTERN_BYTES - from < n - done ? PATTERN_BYTES - from : n - done;
        memcpy(to + done, pattern + from, k);
        done += k;
    }
    size_t i = 0;
    for (uint64_t w; mask && i + 8 <= n; i += 8) {
        memcpy(&w, to + i, 8);
        w ^= m;
        memcpy(to + i, &w, 8);
    }
    for (; mask && i < n; i++) to[i] ^= mask;
}

/* One call; false on EAGAIN or when all is sent. */
static bool stream_send(struct stream *s, struct td_xfer_tls_conn *c)
{
    static uint8_t buf[300000];
    struct iovec iov[8];
    if (s->n_sent == s->n_bytes) return false;
    uint64_t left = s->n_bytes - s->n_sent;
    size_t n = stream_random(s, 4) ? stream_random(s, sizeof buf) + 1 : stream_random(s, 200) + 1,
           at = 0;
    if (n > left) n = (size_t)left;
    uint8_t mask = s->n_turns ? s->turns[s->n_turns - 1].mask : 0;
    fill(buf, s->n_sent, n, mask);
    int n_iov = 0;
    while (n_iov < 7 && at < n) { /* pieces of all sizes, empty ones too */
        size_t k = stream_random(s, 3) ? stream_random(s, 40000) : stream_random(s, 100);
        if (k > n - at) k = n - at;
        iov[n_iov++] = (struct iovec){.iov_base = buf + at, .iov_len = k};
        at += k;
    }
    iov[n_iov++] = (struct iovec){.iov_base = buf + at, .iov_len = n - at};
    ssize_t k = td_tls_sendv(c, iov, n_iov);
    if (k < 0 && errno == EAGAIN) {
        s->n_blocked++;
        assert_true(s->n_turns < sizeof s->turns / sizeof s->turns[0]);
        if (s->n_turns && s->turns[s->n_turns - 1].from == s->n_sent)
            s->turns[s->n_turns - 1].mask++;
        else
            s->turns[s->n_turns].from = s->n_sent,
            s->turns[s->n_turns++].mask = (uint8_t)(mask + 1);
        return false;
    }
    if (k <= 0)
        fail_msg("send at %llu: %zd, %s", (unsigned long long)s->n_sent, k, td_tls_reason(c));
    memset(buf, 0xee, n); /* what was taken was sealed */
    if ((size_t)k < n) s->n_partial++;
    s->n_sent += (uint64_t)k;
    return true;
}

static bool stream_recv(struct stream *s, struct td_xfer_tls_conn *c)
{
    static uint8_t buf[200000], want[200000];
    if (s->n_received == s->n_bytes) return false;
    size_t n = stream_random(s, 4) ? stream_random(s, sizeof buf) + 1 : stream_random(s, 100) + 1,
           half = n / 2;
    struct iovec iov[2] = {{buf, half}, {buf + half, n - half}};
    ssize_t k = td_tls_recvv(c, iov, 2);
    if (k < 0 && errno == EAGAIN) {
        assert_false(td_tls_pending(c));
        return false;
    }
    if (k <= 0)
        fail_msg("recv at %llu: %zd, %s", (unsigned long long)s->n_received, k, td_tls_reason(c));
    for (size_t i = 0; i < (size_t)k;) {
        while (s->turn_read < s->n_turns && s->turns[s->turn_read].from <= s->n_received + i)
            s->turn_read++;
        uint64_t next = s->turn_read < s->n_turns ? s->turns[s->turn_read].from : UINT64_MAX;
        size_t run = next - (s->n_received + i) < (size_t)k - i
                         ? (size_t)(next - (s->n_received + i))
                         : (size_t)k - i;
        fill(want + i, s->n_received + i, run, s->turn_read ? s->turns[s->turn_read - 1].mask : 0);
        i += run;
    }
    if (memcmp(buf, want, (size_t)k) != 0)
        fail_msg("bytes differ after %llu", (unsigned long long)s->n_received);
    s->n_received += (uint64_t)k;
    return true;
}

/* Both directions at once: streams[i] leaves side i. */
static void streams_run(struct pair *p, struct stream *streams[2])
{
    uint64_t until_ns = td_now_ns() + 3 * WAIT_MS * TD_NS_PER_MS;
    while (streams[0]->n_received < streams[0]->n_bytes ||
           streams[1]->n_received < streams[1]->n_bytes) {
        assert_true(td_now_ns() < until_ns);
        struct pollfd polled[4] = {{.fd = -1},
                                   {.fd = -1},
                                   {.fd = p->middle[0], .events = POLLIN},
                                   {.fd = p->middle[1], .events = POLLIN}};
        bool stopped_early = false;
        for (int i = 0; i < 2; i++) {
            int n = 0;
            while (n < 4 && stream_send(streams[i], p->c[i])) n++;
            if (n == 4) stopped_early = true;
            for (n = 0; n < 8 && stream_recv(streams[!i], p->c[i]);) n++;
            if (n == 8 && td_tls_pending(p->c[i])) stopped_early = true;
            if (td_tls_unsent(p->c[i])) assert_true(td_tls_flush(p->c[i]) == 0 || errno == EAGAIN);
            bool writes = td_tls_unsent(p->c[i]) || streams[i]->n_sent < streams[i]->n_bytes;
            polled[i] = (struct pollfd){.fd = p->fds[i],
                                        .events = (short)(POLLIN | (writes ? POLLOUT : 0))};
        }
        bool over = streams[0]->n_received == streams[0]->n_bytes &&
                    streams[1]->n_received == streams[1]->n_bytes;
        if (relay(p) || stopped_early || over) continue;
        if (poll(polled, 4, WAIT_MS) <= 0)
            fail_msg("stuck: sent %llu and %llu, received %llu and %llu, unsent %zu and %zu",
                     (unsigned long long)streams[0]->n_sent, (unsigned long long)streams[1]->n_sent,
                     (unsigned long long)streams[0]->n_received,
                     (unsigned long long)streams[1]->n_received, td_tls_unsent(p->c[0]),
                     td_tls_unsent(p->c[1]));
    }
}

static void exchange(struct pair *p, uint64_t n_bytes)
{
    struct stream *s[2] = {calloc(1, sizeof **s), calloc(1, sizeof **s)};
    for (uint32_t i = 0; i < 2; i++) {
        s[i]->n_bytes = n_bytes;
        s[i]->seed = 17 + i;
    }
    streams_run(p, s);
    for (int i = 0; i < 2; i++) {
        if (n_bytes > 1 << 20)
            print_message("          side %d: %llu MiB, %u calls blocked, %u partial\n", i,
                          (unsigned long long)n_bytes >> 20, s[i]->n_blocked, s[i]->n_partial);
        free(s[i]);
    }
}

/* --- tests: a good pair ----------------------------------------------------------------------- */

static void bytes_arrive_as_taken_through_small_buffers(void **state)
{
    (void)state;
    struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){0}),
                       *b = tls_for("b", "ca", (struct td_xfer_tls_config){0});
    struct pair p;
    pair_open(&p, a, b, 32768, false);
    td_xfer_tls_close(a); /* a channel outlives it */
    pair_ready(&p);
    char subject[64];
    td_tls_peer(p.c[0], subject, sizeof subject);
    assert_string_equal(subject, "/CN=b");
    td_tls_peer(p.c[1], subject, sizeof subject);
    assert_string_equal(subject, "/CN=a");
    assert_string_equal(td_tls_cipher(p.c[0]), "TLS_AES_128_GCM_SHA256");
    exchange(&p, 64 << 20);
    pair_close(&p);
    td_xfer_tls_close(b);
}

static void keys_change_under_way(void **state)
{
    (void)state;
    struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){.rekey_records = 1}),
                       *b = tls_for("b", "ca", (struct td_xfer_tls_config){.rekey_records = 7});
    struct pair p;
    pair_open(&p, a, b, 32768, true);
    p.chunk = 9999;
    pair_ready(&p);
    exchange(&p, 4 << 20);
    pair_close(&p);
    td_xfer_tls_close(a);
    td_xfer_tls_close(b);
}

static void one_byte_at_a_time(void **state)
{
    (void)state;
    struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){0}),
                       *b = tls_for("b", "ca", (struct td_xfer_tls_config){0});
    struct pair p;
    pair_open(&p, a, b, 0, true);
    p.chunk = 1;
    pair_ready(&p);
    exchange(&p, 3000);
    pair_close(&p);
    td_xfer_tls_close(a);
    td_xfer_tls_close(b);
}

static void bytes_inside_the_channel_are_pending(void **state)
{
    (void)state;
    struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){0}),
                       *b = tls_for("b", "ca", (struct td_xfer_tls_config){0});
    struct pair p;
    uint8_t buf[40000];
    pair_open(&p, a, b, 0, false);
    pair_ready(&p);
    assert_int_equal(td_tls_recv(p.c[1], buf, sizeof buf), -1);
    assert_int_equal(errno, EAGAIN);
    assert_false(td_tls_pending(p.c[1]));
    assert_int_equal(td_tls_send(p.c[0], pattern, 40000), 40000);
    assert_int_equal(td_tls_unsent(p.c[0]), 0);
    recv_exactly(&p, 1, buf, 1);
    struct pollfd polled = {.fd = p.fds[1], .events = POLLIN};
    assert_true(td_tls_pending(p.c[1]));
    recv_exactly(&p, 1, buf + 1, 39998);
    assert_int_equal(poll(&polled, 1, 0), 0);
    assert_true(td_tls_pending(p.c[1])); /* epoll would wait for ever */
    assert_int_equal(td_tls_recv(p.c[1], buf + 39999, 1), 1);
    assert_false(td_tls_pending(p.c[1]));
    assert_memory_equal(buf, pattern, 40000);
    pair_close(&p);
    td_xfer_tls_close(a);
    td_xfer_tls_close(b);
}

static void nothing_is_lost_when_the_reader_is_late(void **state)
{
    (void)state;
    struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){0}),
                       *b = tls_for("b", "ca", (struct td_xfer_tls_config){0});
    struct pair p;
    pair_open(&p, a, b, 16384, false);
    pair_ready(&p);
    uint64_t n = 0;
    ssize_t k;
    while ((k = td_tls_send(p.c[0], pattern + n % 4096, 4096)) > 0) n += (uint64_t)k;
    assert_int_equal(errno, EAGAIN);
    assert_true(td_tls_unsent(p.c[0]) > 0);
    assert_true(td_tls_unsent(p.c[0]) <= TD_TLS_OUT_BYTES);
    assert_int_equal(td_tls_flush(p.c[0]), -1);
    assert_int_equal(errno, EAGAIN);
    uint8_t buf[4096];
    for (uint64_t got = 0; got < n; got += sizeof buf) { /* recv_exactly flushes the other side */
        recv_exactly(&p, 1, buf, sizeof buf);
        assert_memory_equal(buf, pattern, sizeof buf);
    }
    assert_int_equal(td_tls_unsent(p.c[0]), 0);
    pair_close(&p);
    td_xfer_tls_close(a);
    td_xfer_tls_close(b);
}

static void one_side_may_say_goodbye(void **state)
{
    (void)state;
    struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){0}),
                       *b = tls_for("b", "ca", (struct td_xfer_tls_config){0});
    struct pair p;
    char buf[16];
    pair_open(&p, a, b, 0, false);
    assert_int_equal(td_tls_send(p.c[0], "x", 1), -1);
    assert_int_equal(errno, ENOTCONN);
    assert_int_equal(td_tls_recv(p.c[0], buf, 1), -1);
    assert_int_equal(errno, ENOTCONN);
    pair_ready(&p);
    assert_int_equal(td_tls_send(p.c[0], "last", 4), 4);
    assert_int_equal(td_tls_shutdown(p.c[0]), 0);
    assert_int_equal(td_tls_shutdown(p.c[0]), 0);
    assert_int_equal(td_tls_send(p.c[0], "x", 1), -1);
    assert_int_equal(errno, EPIPE);
    recv_exactly(&p, 1, buf, 4);
    assert_memory_equal(buf, "last", 4);
    assert_int_equal(recv_wait(&p, 1, buf, 1), 0);
    assert_true(td_tls_pending(p.c[1]));
    assert_int_equal(td_tls_recv(p.c[1], buf, 1), 0);
    assert_int_equal(td_tls_send(p.c[1], "answer", 6), 6); /* the other half lives */
    recv_exactly(&p, 0, buf, 6);
    assert_memory_equal(buf, "answer", 6);
    pair_close(&p);
    td_xfer_tls_close(a);
    td_xfer_tls_close(b);
}

/* --- tests: who is let in --------------------------------------------------------------------- */

/* "names:" and patterns: peer_names; else peer_name. */
static struct td_xfer_tls_config asks_for(const char *name, struct td_peer_names **ret_names)
{
    struct td_err err = {0};
    if (!name || strncmp(name, "names:", 6)) return (struct td_xfer_tls_config){.peer_name = name};
    if (td_peer_names_parse("tls_worker_names", name + 6, ret_names, &err)) fail_msg("%s", err.msg);
    return (struct td_xfer_tls_config){.peer_names = *ret_names};
}

static const struct {
    const char *what, *dials, *dials_ca, *accepts, *accepts_ca, *dials_name, *accepts_name;
    int judge;               /* who refuses; -1 = nobody */
    const char *why, *alert; /* in the judge's reason; in the other's */
} strangers[] = {
    {"both of the CA", "a", "ca", "b", "ca", NULL, NULL, -1, NULL, NULL},
    {"no certificate", NULL, "ca", "b", "ca", NULL, NULL, 1, "shows no certificate",
     "alert certificate required"},
    {"another CA dials", "foreign", "ca", "b", "ca", NULL, NULL, 1,
     "local issuer certificate (certificate of /CN=foreign", "alert unknown ca"},
    {"another CA accepts", "a", "ca", "foreign", "ca", NULL, NULL, 0,
     "local issuer certificate (certificate of /CN=foreign", "alert unknown ca"},
    {"self-signed dials", "alone", "ca", "b", "ca", NULL, NULL, 1,
     "self-signed certificate (certificate of /CN=alone", "alert unknown ca"},
    {"self-signed accepts", "a", "ca", "alone", "ca", NULL, NULL, 0,
     "self-signed certificate (certificate of /CN=alone", "alert unknown ca"},
    {"expired dials", "expired", "ca", "b", "ca", NULL, NULL, 1,
     "has expired (certificate of /CN=expired", "alert certificate expired"},
    {"expired accepts", "a", "ca", "expired", "ca", NULL, NULL, 0,
     "has expired (certificate of /CN=expired", "alert certificate expired"},
    {"not yet valid", "future", "ca", "b", "ca", NULL, NULL, 1, "certificate is not yet valid",
     "alert bad certificate"},
    {"a server's certificate dials", "server_only", "ca", "b", "ca", NULL, NULL, 1, "purpose",
     "alert unsupported certificate"},
    {"a server's certificate accepts", "a", "ca", "server_only", "ca", NULL, NULL, -1, NULL, NULL},
    {"a client's certificate dials", "client_only", "ca", "b", "ca", NULL, NULL, -1, NULL, NULL},
    {"a client's certificate accepts", "a", "ca", "client_only", "ca", NULL, NULL, 0, "purpose",
     "alert unsupported certificate"},
    {"one for both uses dials", "both_uses", "ca", "both_uses", "ca", NULL, NULL, -1, NULL, NULL},
    {"a pattern fits", "w1", "ca", "b", "ca", "names:worker.tandem", "names:x.y, *.kv.tandem", -1,
     NULL, NULL},
    {"a URI fits", "spiffe", "ca", "b", "ca", NULL, "names:URI:spiffe://prod/sa/*", -1, NULL, NULL},
    {"another URI", "spiffe", "ca", "b", "ca", NULL, "names:URI:spiffe://prod/sa/router", 1,
     "hostname mismatch", "alert bad certificate"},
    {"an address fits", "spiffe", "ca", "b", "ca", NULL, "names:10.9.8.7", -1, NULL, NULL},
    {"no pattern fits who dials", "client", "ca", "b", "ca", NULL,
     "names:*.kv.tandem,worker.tandem", 1, "hostname mismatch", "alert bad certificate"},
    {"no pattern fits who accepts", "a", "ca", "client", "ca", "names:*.kv.tandem,worker.tandem",
     NULL, 0, "hostname mismatch", "alert bad certificate"},
    {"a wildcard certificate is nobody", "star", "ca", "b", "ca", NULL, "names:*.kv.tandem", 1,
     "hostname mismatch", "alert bad certificate"},
    {"a subject is none of the patterns", "w2.kv.tandem", "ca", "b", "ca", NULL,
     "names:*.kv.tandem", 1, "hostname mismatch", "alert bad certificate"},
    {"names fit", "a", "ca", "b", "ca", "worker.tandem", "worker.tandem", -1, NULL, NULL},
    {"address fits", "b", "ca", "a", "ca", "127.0.0.1", NULL, -1, NULL, NULL},
    {"address does not", "a", "ca", "b", "ca", "127.0.0.1", NULL, 0, "IP address mismatch",
     "alert bad certificate"},
    {"a client's name dials", "client", "ca", "b", "ca", NULL, "worker.tandem", 1,
     "hostname mismatch", "alert bad certificate"},
    {"a client's name accepts", "a", "ca", "client", "ca", "worker.tandem", NULL, 0,
     "hostname mismatch", "alert bad certificate"},
    {"a name under the suffix", "w1", "ca", "w1", "ca", "*.kv.tandem", "*.kv.tandem", -1, NULL,
     NULL},
    {"in any case of letters", "w1", "ca", "b", "ca", NULL, "*.KV.Tandem", -1, NULL, NULL},
    {"two labels before the suffix dial", "deep", "ca", "b", "ca", NULL, "*.kv.tandem", 1,
     "hostname mismatch", "alert bad certificate"},
    {"two labels before the suffix accept", "a", "ca", "deep", "ca", "*.kv.tandem", NULL, 0,
     "hostname mismatch", "alert bad certificate"},
    {"the suffix itself, and names like it", "suffix", "ca", "b", "ca", NULL, "*.kv.tandem", 1,
     "hostname mismatch", "alert bad certificate"},
    {"a wildcard certificate and one name", "star", "ca", "b", "ca", NULL, "w7.kv.tandem", -1, NULL,
     NULL},
    {"a wildcard certificate and the suffix", "star", "ca", "b", "ca", NULL, "*.kv.tandem", -1,
     NULL, NULL},
    {"a wildcard certificate of a shorter suffix", "star", "ca", "b", "ca", NULL, "x.w7.kv.tandem",
     1, "hostname mismatch", "alert bad certificate"},
    {"a subject is no name", "w2.kv.tandem", "ca", "b", "ca", NULL, "w2.kv.tandem", 1,
     "hostname mismatch", "alert bad certificate"},
    {"nor under a suffix", "a", "ca", "w2.kv.tandem", "ca", "*.kv.tandem", NULL, 0,
     "hostname mismatch", "alert bad certificate"},
    {"an empty name asks for none", "client", "ca", "b", "ca", "", "", -1, NULL, NULL},
    {"the CA does not ask", NULL, "ca", "b", NULL, NULL, NULL, -1, NULL, NULL},
    {"nobody asks", NULL, NULL, "foreign", NULL, NULL, NULL, -1, NULL, NULL},
};

static void strangers_are_refused_by_reason(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof strangers / sizeof strangers[0]; i++) {
        struct td_peer_names *names[2] = {NULL, NULL};
        struct td_xfer_tls *dials = tls_for(strangers[i].dials, strangers[i].dials_ca,
                                            asks_for(strangers[i].dials_name, &names[0]));
        struct td_xfer_tls *accepts = tls_for(strangers[i].accepts, strangers[i].accepts_ca,
                                              asks_for(strangers[i].accepts_name, &names[1]));
        struct pair p;
        char byte;
        int judge = strangers[i].judge;
        pair_open(&p, dials, accepts, 0, false);
        pair_handshake(&p);
        if (judge < 0) {
            if (p.status[0] || p.status[1])
                fail_msg("%s: %s %s", strangers[i].what, p.err[0].msg, p.err[1].msg);
            exchange(&p, 100);
        } else {
            if (p.status[judge] != TD_ERR_PEER || !strstr(p.err[judge].msg, strangers[i].why))
                fail_msg("%s: status %d, \"%s\" and not \"%s\"", strangers[i].what, p.status[judge],
                         p.err[judge].msg, strangers[i].why);
            assert_string_equal(td_tls_reason(p.c[judge]), p.err[judge].msg);
            assert_int_equal(td_tls_recv(p.c[judge], &byte, 1), -1);
            assert_int_equal(errno, EPROTO);
            assert_int_equal(td_tls_send(p.c[judge], "x", 1), -1);
            assert_int_equal(errno, EPROTO);
            if (judge == 0) {
                assert_int_equal(p.status[1], TD_ERR_PEER);
            } else {
                assert_int_equal(p.status[0], TD_OK); /* it was done first; its first recv tells */
                assert_int_equal(recv_wait(&p, 0, &byte, 1), -1);
                assert_int_equal(errno, EPROTO);
            }
            if (!strstr(td_tls_reason(p.c[!judge]), strangers[i].alert))
                fail_msg("%s: the other side heard \"%s\" and not \"%s\"", strangers[i].what,
                         td_tls_reason(p.c[!judge]), strangers[i].alert);
            assert_true(td_tls_pending(p.c[!judge]));
        }
        pair_close(&p);
        td_xfer_tls_close(dials);
        td_xfer_tls_close(accepts);
        td_peer_names_destroy(names[0]);
        td_peer_names_destroy(names[1]);
    }
}

/* A sender that never reads: its send must name the refusal, not a broken pipe. */
static void sender_learns_why_it_was_refused(void **state)
{
    (void)state;
    struct td_xfer_tls *a = tls_for("foreign", "ca", (struct td_xfer_tls_config){0}),
                       *b = tls_for("b", "ca", (struct td_xfer_tls_config){0});
    struct pair p;
    pair_open(&p, a, b, 0, false);
    pair_handshake(&p);
    assert_int_equal(p.status[0], TD_OK);
    assert_int_equal(p.status[1], TD_ERR_PEER);
    close(p.fds[1]); /* before anything was sent: nothing unread, so no reset overtakes the alert */
    p.fds[1] = -1;
    uint64_t until_ns = td_now_ns() + WAIT_MS * TD_NS_PER_MS;
    ssize_t k;
    while ((k = td_tls_send(p.c[0], pattern, 65536)) > 0 || errno == EAGAIN) {
        assert_true(td_now_ns() < until_ns);
        poll(&(struct pollfd){.fd = p.fds[0], .events = POLLOUT}, 1, 10);
    }
    assert_int_equal(errno, EPROTO);
    assert_non_null(strstr(td_tls_reason(p.c[0]), "alert unknown ca"));
    pair_close(&p);
    td_xfer_tls_close(a);
    td_xfer_tls_close(b);
}

static void other_protocols_are_refused(void **state)
{
    (void)state;
    static const struct {
        int side; /* that speaks TLS */
        const char *bytes;
        size_t n;
        const char *why;
    } cases[] = {
        {1, "GET / HTTP/1.1\r\nHost: x\r\n\r\n", 27, "does not speak TLS (http request)"},
        {1, "TDX1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 32,
         "does not speak TLS"},
        {0, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, "does not speak TLS"},
        {0, "\x15\x03\x03\x00\x02\x02\x28", 7, "alert handshake failure"},
        {1, "\x16\x03\x01\xff\xff\x01\x00\xff\xfb\x03\x03", 11, "length"},
        {1, "\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03", 10, "length"},
    };
    struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){0});
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct pair p;
        pair_open(&p, cases[i].side == 0 ? a : NULL, cases[i].side == 1 ? a : NULL, 0, false);
        p.status[!cases[i].side] = TD_OK;
        assert_int_equal(send(p.fds[!cases[i].side], cases[i].bytes, cases[i].n, MSG_NOSIGNAL),
                         (ssize_t)cases[i].n);
        pair_handshake(&p);
        if (p.status[cases[i].side] != TD_ERR_PEER ||
            !strstr(p.err[cases[i].side].msg, cases[i].why))
            fail_msg("case %zu: %d \"%s\"", i, p.status[cases[i].side], p.err[cases[i].side].msg);
        pair_close(&p);
    }
    /* TLS 1.2, which scanners and old proxies still offer */
    SSL_CTX *old = SSL_CTX_new(TLS_client_method());
    SSL_CTX_set_max_proto_version(old, TLS1_2_VERSION);
    struct pair p;
    pair_open(&p, NULL, a, 0, false);
    p.status[0] = TD_OK;
    SSL *ssl = SSL_new(old);
    SSL_set_fd(ssl, p.fds[0]);
    assert_int_equal(SSL_connect(ssl), -1); /* ClientHello is out */
    pair_handshake(&p);
    assert_int_equal(p.status[1], TD_ERR_PEER);
    assert_non_null(strstr(p.err[1].msg, "unsupported protocol"));
    SSL_free(ssl);
    SSL_CTX_free(old);
    pair_close(&p);
    td_xfer_tls_close(a);
}

/* --- tests: what the path does to the bytes --------------------------------------------------- */

static void a_cut_stream_is_an_error(void **state)
{
    (void)state;
    /* negative: after the handshake */
    static const long cuts[] = {0, 1, 100, 700, -16000, -16406 * 2, -16406 * 3 + 1};
    struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){0}),
                       *b = tls_for("b", "ca", (struct td_xfer_tls_config){0});
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++) {
        struct pair p;
        static uint8_t buf[16384 * 3];
        pair_open(&p, a, b, 0, true);
        if (cuts[i] >= 0) {
            p.cut_at[0] = cuts[i];
            pair_handshake(&p);
            if (p.status[1] != TD_ERR_PEER || !strstr(p.err[1].msg, "ended without close_notify"))
                fail_msg("cut at %ld: status %d \"%s\"", cuts[i], p.status[1], p.err[1].msg);
        } else {
            pair_ready(&p);
            p.cut_at[0] = (long)p.n_relayed[0] - cuts[i];
            assert_int_equal(td_tls_send(p.c[0], pattern, sizeof buf), sizeof buf);
            assert_int_equal(td_tls_shutdown(p.c[0]), 0); /* the attacker drops this */
            size_t got = 0;
            ssize_t k;
            while ((k = recv_wait(&p, 1, buf, sizeof buf)) > 0) got += (size_t)k;
            assert_int_equal(k, -1);
            assert_int_equal(errno, ECONNRESET);
            assert_int_equal(got, (size_t)(-cuts[i] / 16406) * 16384); /* whole records only */
            assert_non_null(strstr(td_tls_reason(p.c[1]), "ended without close_notify"));
            assert_int_equal(td_tls_recv(p.c[1], buf, 1), -1);
            assert_int_equal(errno, ECONNRESET);
        }
        pair_close(&p);
    }
    td_xfer_tls_close(a);
    td_xfer_tls_close(b);
}

static void a_changed_bit_is_an_error(void **state)
{
    (void)state;
    /* body, tag, type, length of the second record */
    static const long flips[] = {16406 + 4000, 16406 + 16405, 16406, 16406 + 3};
    struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){0}),
                       *b = tls_for("b", "ca", (struct td_xfer_tls_config){0});
    for (size_t i = 0; i < sizeof flips / sizeof flips[0]; i++) {
        struct pair p;
        static uint8_t buf[16384 * 3];
        pair_open(&p, a, b, 0, true);
        pair_ready(&p);
        p.flip_at[0] = (long)p.n_relayed[0] + flips[i];
        assert_int_equal(td_tls_send(p.c[0], pattern, sizeof buf), sizeof buf);
        size_t got = 0;
        ssize_t k;
        while ((k = recv_wait(&p, 1, buf + got, sizeof buf - got)) > 0) got += (size_t)k;
        assert_int_equal(k, -1);
        assert_int_equal(errno, EPROTO);
        assert_int_equal(got, 16384); /* the first record was good */
        assert_memory_equal(buf, pattern, got);
        assert_true(td_tls_reason(p.c[1])[0]);
        char byte; /* the sender hears of it */
        assert_int_equal(recv_wait(&p, 0, &byte, 1), -1);
        assert_int_equal(errno, EPROTO);
        pair_close(&p);
    }
    td_xfer_tls_close(a);
    td_xfer_tls_close(b);
}

static void a_dead_peer_raises_no_signal(void **state)
{
    (void)state;
    assert_true(signal(SIGPIPE, SIG_DFL) != SIG_ERR);
    struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){0}),
                       *b = tls_for("b", "ca", (struct td_xfer_tls_config){0});
    struct pair p;
    pair_open(&p, a, b, 0, false);
    pair_ready(&p);
    td_tls_conn_close(p.c[1]);
    p.c[1] = NULL;
    close(p.fds[1]);
    p.fds[1] = -1;
    uint64_t until_ns = td_now_ns() + WAIT_MS * TD_NS_PER_MS;
    ssize_t n;
    while ((n = td_tls_send(p.c[0], pattern, 65536)) > 0 || errno == EAGAIN) {
        assert_true(td_now_ns() < until_ns);
        poll(&(struct pollfd){.fd = p.fds[0], .events = POLLOUT}, 1, 10);
    }
    assert_true(errno == EPIPE || errno == ECONNRESET);
    assert_true(td_tls_reason(p.c[0])[0]);
    assert_int_equal(td_tls_shutdown(p.c[0]), -1);
    assert_int_equal(td_tls_unsent(p.c[0]), 0);
    pair_close(&p);
    td_xfer_tls_close(a);
    td_xfer_tls_close(b);
}

/* --- tests: files ----------------------------------------------------------------------------- */

static const struct {
    const char *cert, *key, *ca, *name;
    td_status status;
    const char *says[2];
} bad_files[] = {
    {"none.crt", "a.key", NULL, NULL, TD_ERR_NOT_FOUND, {"cert_file: ", "none.crt"}},
    {"a.crt", "none.key", NULL, NULL, TD_ERR_NOT_FOUND, {"key_file: ", "none.key"}},
    {"a.crt", "a.key", "none.crt", NULL, TD_ERR_NOT_FOUND, {"ca_file: ", "none.crt"}},
    {"text",
     "a.key",
     NULL,
     NULL,
     TD_ERR_INVALID,
     {"cert_file: ", "text: holds no certificate in PEM"}},
    {"half.crt", "a.key", NULL, NULL, TD_ERR_INVALID, {"cert_file: ", "half.crt: certificate 1"}},
    {"a.crt",
     "text",
     NULL,
     NULL,
     TD_ERR_INVALID,
     {"key_file: ", "text: holds no private key in PEM"}},
    {"a.crt", "b.key", NULL, NULL, TD_ERR_INVALID, {"b.key: does not fit cert_file", "a.crt"}},
    {"alone.crt",
     "locked.key",
     NULL,
     NULL,
     TD_ERR_INVALID,
     {"key_file: ", "locked.key: is encrypted"}},
    {"a.crt",
     "a.key",
     "text",
     NULL,
     TD_ERR_INVALID,
     {"ca_file: ", "text: holds no certificate in PEM"}},
    {"a.crt", NULL, NULL, NULL, TD_ERR_INVALID, {"go together", "key_file is not set"}},
    {"a.crt", "a.key", NULL, "worker", TD_ERR_INVALID, {"peer_name", "ca_file is not set"}},
    {"a.crt", "a.key", "ca.crt", "*", TD_ERR_INVALID, {"peer_name is \"*\"", "must be a DNS name"}},
    {"a.crt",
     "a.key",
     "ca.crt",
     "*.",
     TD_ERR_INVALID,
     {"peer_name is \"*.\"", "must be a DNS name"}},
    {"a.crt",
     "a.key",
     "ca.crt",
     ".kv.tandem",
     TD_ERR_INVALID,
     {"peer_name is \".kv.tandem\"", "must be a DNS name"}},
    {"a.crt",
     "a.key",
     "ca.crt",
     "*..tandem",
     TD_ERR_INVALID,
     {"peer_name is \"*..tandem\"", "must be a DNS name"}},
    {"a.crt",
     "a.key",
     "ca.crt",
     "*.*.tandem",
     TD_ERR_INVALID,
     {"peer_name is \"*.*.tandem\"", "must be a DNS name"}},
    {"a.crt",
     "a.key",
     "ca.crt",
     "w*.tandem",
     TD_ERR_INVALID,
     {"peer_name is \"w*.tandem\"", "must be a DNS name"}},
    {"a.crt",
     "a.key",
     "ca.crt",
     "a.tandem,b.tandem",
     TD_ERR_INVALID,
     {"peer_name is \"a.tandem,b.tandem\"", "must be a DNS name"}},
    {"a.crt",
     "a.key",
     "ca.crt",
     "kv.tandem.",
     TD_ERR_INVALID,
     {"peer_name is \"kv.tandem.\"", "must be a DNS name"}},
};

static void bad_files_are_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_files / sizeof bad_files[0]; i++) {
        struct td_xfer_tls_config config = {
            .cert_file = bad_files[i].cert ? tls_files_in(bad_files[i].cert) : NULL,
            .key_file = bad_files[i].key ? tls_files_in(bad_files[i].key) : "",
            .ca_file = bad_files[i].ca ? tls_files_in(bad_files[i].ca) : NULL,
            .peer_name = bad_files[i].name};
        struct td_xfer_tls *tls = NULL;
        struct td_err err = {0};
        td_status status = td_xfer_tls_open(&config, &tls, &err);
        if (status != bad_files[i].status || !strstr(err.msg, bad_files[i].says[0]) ||
            !strstr(err.msg, bad_files[i].says[1]))
            fail_msg("case %zu: status %d \"%s\"", i, status, err.msg);
        assert_null(tls);
    }
    struct td_xfer_tls *tls = tls_for(NULL, "ca", (struct td_xfer_tls_config){0});
    struct td_xfer_tls_conn *c = NULL;
    struct td_err err = {0};
    assert_int_equal(td_tls_conn_open(tls, 0, false, &c, &err), TD_ERR_INVALID);
    assert_null(c);
    td_xfer_tls_close(tls);
    td_xfer_tls_close(NULL);
    td_tls_conn_close(NULL);
    assert_int_equal(
        td_xfer_tls_open(&(struct td_xfer_tls_config){.rekey_records = 1ull << 25}, &tls, &err),
        TD_ERR_INVALID);
}

static void assert_peer_of(struct td_xfer_tls *dials, struct td_xfer_tls *accepts,
                           const char *subject)
{
    struct pair p;
    char found[64];
    pair_open(&p, dials, accepts, 0, false);
    pair_ready(&p);
    td_tls_peer(p.c[0], found, sizeof found);
    assert_string_equal(found, subject);
    pair_close(&p);
}

static void files_are_rotated(void **state)
{
    (void)state;
    copy_file("a.crt", "live.crt");
    copy_file("a.key", "live.key");
    struct td_xfer_tls *live = tls_for("live", "ca", (struct td_xfer_tls_config){0}),
                       *b = tls_for("b", "ca", (struct td_xfer_tls_config){0});
    struct td_err err = {0};
    bool loaded = true;
    assert_peer_of(b, live, "/CN=a");
    assert_int_equal(td_xfer_tls_reload(live, true, &loaded, &err), TD_OK);
    assert_false(loaded);
    /* Kubernetes sets the owner of a mounted secret again and again. */
    assert_int_equal(chmod(tls_files_in("live.crt"), 0640), 0);
    assert_int_equal(td_xfer_tls_reload(live, true, &loaded, &err), TD_OK);
    assert_false(loaded);
    assert_int_equal(td_xfer_tls_reload(live, false, &loaded, &err), TD_OK);
    assert_true(loaded);

    struct pair open_before;
    pair_open(&open_before, b, live, 0, false);
    pair_ready(&open_before);
    copy_file("client.crt", "live.crt"); /* half way through a rotation */
    assert_int_equal(td_xfer_tls_reload(live, true, &loaded, &err), TD_ERR_INVALID);
    assert_false(loaded);
    assert_non_null(strstr(err.msg, "does not fit"));
    assert_peer_of(b, live, "/CN=a");
    assert_int_equal(td_xfer_tls_reload(live, true, &loaded, &err), TD_OK); /* said once */
    assert_false(loaded);
    copy_file("client.key", "live.key");
    assert_int_equal(td_xfer_tls_reload(live, true, &loaded, &err), TD_OK);
    assert_true(loaded);
    assert_peer_of(b, live, "/CN=client");
    exchange(&open_before, 100000);
    pair_close(&open_before);
    unlink(tls_files_in("live.crt"));
    assert_int_equal(td_xfer_tls_reload(live, true, &loaded, &err), TD_ERR_NOT_FOUND);
    assert_peer_of(b, live, "/CN=client");
    td_xfer_tls_close(live);
    td_xfer_tls_close(b);
}

struct reloader {
    struct td_xfer_tls *tls;
    atomic_bool stop;
    int n;
};

static void *reload_often(void *arg)
{
    struct reloader *r = arg;
    for (r->n = 0; !r->stop || r->n < 3; r->n++)
        if (td_xfer_tls_reload(r->tls, false, NULL, NULL)) return "failed";
    return NULL;
}

static void rotation_does_not_disturb_handshakes(void **state)
{
    (void)state;
    struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){0});
    struct reloader r = {.tls = a};
    pthread_t thread;
    void *failed;
    assert_int_equal(pthread_create(&thread, NULL, reload_often, &r), 0);
    for (int i = 0; i < 50; i++) assert_peer_of(a, a, "/CN=a");
    r.stop = true;
    pthread_join(thread, &failed);
    assert_null(failed);
    assert_true(r.n >= 3);
    td_xfer_tls_close(a);
}

/* --- bench ------------------------------------------------------------------------------------ */

enum { FRAME_BYTES = 1 << 20, BLOCK_BYTES = 128 << 10 };

struct bench_end {
    int fd;
    struct td_xfer_tls_conn *c; /* NULL = plain */
    uint64_t n_bytes;
    double cpu_s;
};

static void bench_wait(int fd, short events)
{
    poll(&(struct pollfd){.fd = fd, .events = events}, 1, WAIT_MS);
}

static const uint64_t bench_bytes = 1ull << 30;

static double thread_cpu_s(void)
{
    struct rusage u;
    getrusage(RUSAGE_THREAD, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static void *bench_recv(void *arg)
{
    struct bench_end *e = arg;
    uint8_t *to = malloc(64 << 20);
    memset(to, 1, 64 << 20);
    double cpu_s = thread_cpu_s();
    for (uint64_t got = 0; got < e->n_bytes;) {
        uint8_t *at = to + got % (64 << 20);
        size_t n = FRAME_BYTES - (size_t)(got % FRAME_BYTES);
        ssize_t k = e->c ? td_tls_recv(e->c, at, n) : recv(e->fd, at, n, MSG_DONTWAIT);
        if (k > 0)
            got += (uint64_t)k;
        else if (k < 0 && errno == EAGAIN)
            bench_wait(e->fd, POLLIN);
        else
            abort();
    }
    e->cpu_s = thread_cpu_s() - cpu_s;
    free(to);
    return NULL;
}

/* Frames of 1 MiB: 64 bytes of header, and 8 blocks scattered over 64 MiB. */
static double bench_send(struct bench_end *e, uint8_t *from)
{
    uint8_t header[64] = {0};
    double cpu_s = thread_cpu_s();
    for (uint64_t sent = 0; sent < e->n_bytes;) {
        struct iovec iov[9];
        size_t in_frame = (size_t)(sent % FRAME_BYTES), at = 0;
        uint64_t frame = sent / FRAME_BYTES;
        int n = 0;
        for (int b = -1; b < 8; b++) { /* the header lies inside the frame's MiB here */
            uint8_t *p =
                b < 0 ? header : from + ((frame * 8 + (unsigned)b) * 37 % 512) * BLOCK_BYTES;
            size_t bytes = b < 0    ? 64
                           : b == 7 ? BLOCK_BYTES - 64
                                    : BLOCK_BYTES,
                   skip = in_frame > at ? in_frame - at : 0;
            if (skip < bytes) iov[n++] = (struct iovec){p + skip, bytes - skip};
            at += bytes;
        }
        struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)n};
        ssize_t k =
            e->c ? td_tls_sendv(e->c, iov, n) : sendmsg(e->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (k > 0)
            sent += (uint64_t)k;
        else if (k < 0 && errno == EAGAIN)
            bench_wait(e->fd, POLLOUT);
        else
            abort();
    }
    while (e->c && td_tls_flush(e->c)) bench_wait(e->fd, POLLOUT);
    return thread_cpu_s() - cpu_s;
}

static int bench(void)
{
    make_all(NULL);
    uint8_t *from = malloc(64 << 20);
    memset(from, 3, 64 << 20);
    printf("run,path,GB_per_s,send_cpu_s_per_GB,recv_cpu_s_per_GB\n");
    for (int run = 0; run < 14; run++) {
        bool way = run % 2; /* plain, TLS */
        struct td_xfer_tls *a = tls_for("a", "ca", (struct td_xfer_tls_config){0});
        struct pair p;
        pair_open(&p, way ? a : NULL, way ? a : NULL, 0, false);
        if (way) pair_ready(&p);
        struct bench_end sender = {p.fds[0], p.c[0], bench_bytes, 0},
                         receiver = {p.fds[1], p.c[1], bench_bytes, 0};
        pthread_t thread;
        uint64_t from_ns = td_now_ns();
        if (pthread_create(&thread, NULL, bench_recv, &receiver)) abort();
        double cpu_s = bench_send(&sender, from);
        pthread_join(thread, NULL);
        double s = (double)(td_now_ns() - from_ns) / 1e9, gb = (double)sender.n_bytes / 1e9;
        printf("%d,%s,%.2f,%.3f,%.3f\n", run / 2, way ? "tls" : "plain", gb / s, cpu_s / gb,
               receiver.cpu_s / gb);
        fflush(stdout);
        pair_close(&p);
        td_xfer_tls_close(a);
    }
    free(from);
    return remove_all(NULL);
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "bench") == 0) return bench();
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bytes_arrive_as_taken_through_small_buffers),
        cmocka_unit_test(keys_change_under_way),
        cmocka_unit_test(one_byte_at_a_time),
        cmocka_unit_test(bytes_inside_the_channel_are_pending),
        cmocka_unit_test(nothing_is_lost_when_the_reader_is_late),
        cmocka_unit_test(one_side_may_say_goodbye),
        cmocka_unit_test(strangers_are_refused_by_reason),
        cmocka_unit_test(sender_learns_why_it_was_refused),
        cmocka_unit_test(other_protocols_are_refused),
        cmocka_unit_test(a_cut_stream_is_an_error),
        cmocka_unit_test(a_changed_bit_is_an_error),
        cmocka_unit_test(a_dead_peer_raises_no_signal),
        cmocka_unit_test(bad_files_are_named),
        cmocka_unit_test(files_are_rotated),
        cmocka_unit_test(rotation_does_not_disturb_handshakes),
    };
    return cmocka_run_group_tests(tests, make_all, remove_all);
}

#else /* built without OpenSSL */

static void without_openssl_it_says_so(void **state)
{
    (void)state;
    struct td_xfer_tls *tls = NULL;
    struct td_err err = {0};
    assert_int_equal(td_xfer_tls_open(&(struct td_xfer_tls_config){0}, &tls, &err),
                     TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "built without OpenSSL"));
    assert_null(tls);
    td_xfer_tls_close(NULL);
    td_tls_conn_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(without_openssl_it_says_so)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}

#endif
