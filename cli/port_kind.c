/* port_kind.c - what listens at an address, for messages: after a call could not be made, three
 * short connections at most tell a port that speaks TLS from one that does not, and gRPC from HTTP.
 * Nothing is decided by it. */
#include <netdb.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "cli/cli.h"
#include "common/base/address.h"
#include "common/base/clock.h"

enum { WAIT_MS = 1000 }; /* for each connection, from its start to the first bytes back */

/* HTTP/2's preface and an empty SETTINGS frame. */
static const uint8_t preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0";

static const uint8_t get[] = "GET / HTTP/1.0\r\n\r\n";

/* A ClientHello for TLS 1.2 and 1.3 (RFC 8446, 4.1.2) that servers take: some close without a word
 * after one that they refuse. It has no key share, so a server of 1.3 asks for one, and of both
 * answers the first record says what is wanted here. */
static size_t client_hello(uint8_t to[128])
{
    static const uint8_t head[] = {0x16, 3, 1, 0, 108, 1, 0, 0, 104, 3, 3};
    static const uint8_t tail[] = {
        0,    0,    14,   0x13, 1,    0x13, 2,    0x13, 3,       /* no session; cipher suites */
        0xC0, 0x2B, 0xC0, 0x2F, 0xC0, 0x2C, 0xC0, 0x30, 1, 0,    /* no compression */
        0,    49,                                                /* extensions: */
        0,    0x0A, 0,    6,    0,    4,    0,    0x1D, 0, 0x17, /* groups */
        0,    0x0D, 0,    14,   0,    12,   4,    3,    8, 4,
        4,    1,    5,    3,    8,    5,    5,    1,       /* signatures */
        0,    0x2B, 0,    5,    4,    3,    4,    3,    3, /* versions */
        0,    0x33, 0,    2,    0,    0,                   /* key shares */
        0,    0x0B, 0,    2,    1,    0,                   /* point formats */
    };
    memcpy(to, head, sizeof head);
    memset(to + sizeof head, 0x5A, 32); /* "random": nothing is kept secret with it */
    memcpy(to + sizeof head + 32, tail, sizeof tail);
    return sizeof head + 32 + sizeof tail;
}

/* Until fd is ready, or the deadline is over. */
static bool wait_fd(int fd, short events, uint64_t deadline_ns)
{
    struct pollfd p = {.fd = fd, .events = events};
    uint64_t now_ns = td_now_ns();
    return now_ns < deadline_ns &&
           poll(&p, 1, (int)((deadline_ns - now_ns) / TD_NS_PER_MS) + 1) == 1;
}

/* Connects, says `bytes` and reads what comes first. Returns how many bytes came; 0: none. */
static size_t say(const struct addrinfo *ai, const void *bytes, size_t n_bytes, uint8_t *answer,
                  size_t answer_bytes)
{
    uint64_t deadline_ns = td_deadline_after_ms(td_now_ns(), WAIT_MS);
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    size_t n = 0;
    if (fd < 0) return 0;
    connect(fd, ai->ai_addr, ai->ai_addrlen); /* goes on; poll says how it ends */
    if (wait_fd(fd, POLLOUT, deadline_ns) &&
        send(fd, bytes, n_bytes, MSG_NOSIGNAL) == (ssize_t)n_bytes)
        while (n < answer_bytes && wait_fd(fd, POLLIN, deadline_ns)) {
            ssize_t got = recv(fd, answer + n, answer_bytes - n, 0);
            if (got <= 0) break;
            n += (size_t)got;
        }
    close(fd);
    return n;
}

enum cli_port_kind cli_port_kind(const char *address)
{
    struct addrinfo *ai = NULL;
    struct td_err err = {0};
    uint8_t hello[128], answer[9] = {0};
    enum cli_port_kind kind = CLI_PORT_UNKNOWN;
    if (!strncmp(address, "unix:", 5) || td_address_resolve("server", address, false, &ai, &err))
        return kind;
    size_t n = say(ai, preface, sizeof preface - 1, answer, sizeof answer);
    uint8_t stream = answer[5] | answer[6] | answer[7] | answer[8];
    if (n == 9 && answer[3] == 4 && !stream)
        kind = CLI_PORT_CLEAR; /* a SETTINGS frame of stream 0 */
    else if (say(ai, hello, client_hello(hello), answer, 3) == 3 && answer[1] == 3 &&
             (answer[0] == 0x16 || answer[0] == 0x15))
        kind = CLI_PORT_TLS; /* a handshake or an alert */
    else if (say(ai, get, sizeof get - 1, answer, 7) == 7 && !memcmp(answer, "HTTP/1.", 7))
        kind = CLI_PORT_HTTP;
    freeaddrinfo(ai);
    return kind;
}
