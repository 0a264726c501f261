/* doctor_wire.c - sends, receives and checks the messages between two doctors. */
#include "cli/doctor_wire.h"

#include <errno.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/address.h"
#include "common/base/clock.h"
#include "common/transfer/transfer.h"

void doctor_msg_init(struct doctor_msg *m, enum doctor_msg_type type, int answer)
{
    memset(m, 0, sizeof *m);
    m->magic = DOCTOR_WIRE_MAGIC;
    m->version = DOCTOR_WIRE_VERSION;
    m->type = (uint8_t)type;
    m->answer = answer != 0;
}

td_status doctor_msg_check(const struct doctor_msg *m, uint32_t n_pool_blocks, struct td_err *err)
{
    if (m->magic != DOCTOR_WIRE_MAGIC)
        return td_fail(err, TD_ERR_CORRUPT, "not a doctor: magic is %08x", m->magic);
    if (m->version != DOCTOR_WIRE_VERSION)
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "the other doctor speaks version %u, this one %u: use one build on both sides",
            m->version, DOCTOR_WIRE_VERSION);
    if (m->type < DOCTOR_MSG_HELLO || m->type >= DOCTOR_MSG_N_TYPES)
        return td_fail(err, TD_ERR_CORRUPT, "type is %u", m->type);
    if (m->answer > 1) return td_fail(err, TD_ERR_CORRUPT, "answer is %u", m->answer);
    if (!memchr(m->text, 0, sizeof m->text))
        return td_fail(err, TD_ERR_CORRUPT, "text does not end");
    if (m->blob_bytes > DOCTOR_BLOB_MAX)
        return td_fail(err, TD_ERR_CORRUPT, "blob_bytes is %u, limit %u", m->blob_bytes,
                       DOCTOR_BLOB_MAX);
    if (m->status > 0) return td_fail(err, TD_ERR_CORRUPT, "status is %d", m->status);
    if (m->type == DOCTOR_MSG_OPEN && !m->answer) {
        if (m->path >= TD_XFER_N_PATHS)
            return td_fail(err, TD_ERR_CORRUPT, "path is %u, must be 0..%d", m->path,
                           TD_XFER_N_PATHS - 1);
        if (m->block_bytes < 4096 || m->block_bytes > 1u << 20 ||
            m->block_bytes & (m->block_bytes - 1))
            return td_fail(err, TD_ERR_CORRUPT,
                           "block_bytes is %llu, must be a power of two, 4096..1048576",
                           (unsigned long long)m->block_bytes);
        if (m->n_blocks < 1 || m->n_blocks > TD_XFER_MAX_BLOCKS ||
            m->block_bytes * m->n_blocks > DOCTOR_POOL_MAX)
            return td_fail(err, TD_ERR_CORRUPT, "n_blocks is %u, pools have at most %u bytes",
                           m->n_blocks, DOCTOR_POOL_MAX);
    }
    if (!m->answer && (m->type == DOCTOR_MSG_GRANT || m->type == DOCTOR_MSG_VERIFY)) {
        if (m->n < 1 || m->n > n_pool_blocks || m->first > n_pool_blocks - m->n)
            return td_fail(err, TD_ERR_CORRUPT, "blocks %u + %u are not in a pool of %u", m->first,
                           m->n, n_pool_blocks);
        if (m->type == DOCTOR_MSG_VERIFY && m->slot >= DOCTOR_SLOTS)
            return td_fail(err, TD_ERR_CORRUPT, "slot is %u, limit %u", m->slot, DOCTOR_SLOTS);
    }
    return TD_OK;
}

static td_status wait_fd(int fd, short events, uint64_t deadline_ns, struct td_err *err)
{
    for (;;) {
        uint64_t now = td_now_ns();
        if (now >= deadline_ns) return td_fail(err, TD_ERR_DEADLINE, "no answer in time");
        uint64_t ms = (deadline_ns - now) / TD_NS_PER_MS + 1;
        struct pollfd p = {.fd = fd, .events = events};
        int n = poll(&p, 1, ms > INT_MAX ? INT_MAX : (int)ms);
        if (n > 0) return TD_OK;
        if (n < 0 && errno != EINTR) return td_fail(err, TD_ERR_IO, "poll: %s", strerror(errno));
    }
}

td_status doctor_wait(int fd, uint64_t deadline_ns, struct td_err *err)
{
    return wait_fd(fd, POLLIN, deadline_ns, err);
}

td_status doctor_msg_send(int fd, const struct doctor_msg *m, uint64_t deadline_ns,
                          struct td_err *err)
{
    for (size_t at = 0; at < sizeof *m;) {
        ssize_t k = send(fd, (const uint8_t *)m + at, sizeof *m - at, MSG_NOSIGNAL);
        if (k > 0) {
            at += (size_t)k;
            continue;
        }
        if (k < 0 && errno == EINTR) continue;
        if (k < 0 && errno != EAGAIN)
            return td_fail(err, TD_ERR_PEER, "the other doctor is gone: %s", strerror(errno));
        td_status s = wait_fd(fd, POLLOUT, deadline_ns, err);
        if (s) return s;
    }
    return TD_OK;
}

td_status doctor_msg_recv(int fd, struct doctor_msg *m, uint64_t deadline_ns, struct td_err *err)
{
    for (size_t at = 0; at < sizeof *m;) {
        ssize_t k = recv(fd, (uint8_t *)m + at, sizeof *m - at, 0);
        if (k > 0) {
            at += (size_t)k;
            continue;
        }
        if (k == 0) return td_fail(err, TD_ERR_PEER, "the other doctor closed the connection");
        if (errno == EINTR) continue;
        if (errno != EAGAIN)
            return td_fail(err, TD_ERR_PEER, "the other doctor is gone: %s", strerror(errno));
        td_status s = wait_fd(fd, POLLIN, deadline_ns, err);
        if (s) return s;
    }
    return TD_OK;
}

static td_status connect_by(int fd, const struct addrinfo *a, uint64_t deadline_ns,
                            const char *address, struct td_err *err)
{
    if (connect(fd, a->ai_addr, a->ai_addrlen) == 0) return TD_OK;
    int e = errno;
    socklen_t n = sizeof e;
    if (e == EINPROGRESS) {
        td_status s = wait_fd(fd, POLLOUT, deadline_ns, err);
        if (s) return td_err_prefix(err, "connect to %s", address);
        if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &n)) e = errno;
    }
    return e ? td_fail(err, TD_ERR_PEER, "connect to %s: %s", address, strerror(e)) : TD_OK;
}

td_status doctor_socket(const char *address, int listening, uint64_t deadline_ns, int *ret_fd,
                        struct td_err *err)
{
    struct addrinfo *list = NULL;
    int on = 1;
    td_status s = td_address_resolve("address", address, listening, &list, err);
    if (s) return s;
    s = TD_ERR_IO;
    int fd = -1;
    for (const struct addrinfo *a = list; a && s; a = a->ai_next) {
        /* a name may have several addresses: use the first that works */
        if (fd >= 0) close(fd);
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        if (fd < 0) {
            s = td_fail(err, TD_ERR_IO, "socket: %s", strerror(errno));
        } else if (!listening) {
            s = connect_by(fd, a, deadline_ns, address, err);
        } else {
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
            bool bound = bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, 4) == 0;
            s = bound ? TD_OK
                      : td_fail(err, TD_ERR_IO, "listen on %s: %s", address, strerror(errno));
        }
    }
    freeaddrinfo(list);
    if (s) {
        if (fd >= 0) close(fd);
        return s;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    *ret_fd = fd;
    return TD_OK;
}

td_status doctor_socket_name(int fd, int peer, char host[64], uint16_t *ret_port,
                             struct td_err *err)
{
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    if ((peer ? getpeername : getsockname)(fd, (struct sockaddr *)&a, &n))
        return td_fail(err, TD_ERR_PEER, "the other doctor is gone: %s", strerror(errno));
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)&a;
    *ret_port =
        ntohs(a.ss_family == AF_INET6 ? six->sin6_port : ((struct sockaddr_in *)&a)->sin_port);
    if (a.ss_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&six->sin6_addr)) {
        /* an IPv4 peer at an IPv6 listener: data uses IPv4 */
        const uint8_t *b = six->sin6_addr.s6_addr + 12;
        snprintf(host, 64, "%u.%u.%u.%u", b[0], b[1], b[2], b[3]);
        return TD_OK;
    }
    int e = getnameinfo((struct sockaddr *)&a, n, host, 64, NULL, 0, NI_NUMERICHOST);
    return e ? td_fail(err, TD_ERR_IO, "getnameinfo: %s", gai_strerror(e)) : TD_OK;
}
