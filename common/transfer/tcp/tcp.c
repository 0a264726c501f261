/* tcp.c - sockets across hosts: listen, dial, and the two calls that move payload.
 *
 * Receiving: the payload goes by recvmsg straight into the destination blocks, in pieces, and
 * before every piece the core is asked again whether slot, generation, attempt and handle still
 * stand; when not, the rest of the frame is read into a scrap buffer. So a revoked slot is fenced
 * the moment no piece is under way.
 *
 * Sending: sendmsg from the source blocks. An op that ended in the middle of a frame still owes the
 * stream the frame's length: the rest is zeros, so its source blocks are free at once; ABORT
 * follows. With TLS a byte counts as sent when it has been sealed into the channel's own memory. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/base/min.h"
#include "common/transfer/tcp/tcp.h"

static td_status resolve(const char *host, uint16_t port, int flags, struct addrinfo **ret_list,
                         struct td_err *err)
{
    char service[8];
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags | AI_NUMERICSERV};
    snprintf(service, sizeof service, "%u", port);
    int e = getaddrinfo(host, service, &hints, ret_list);
    if (e) return td_fail(err, TD_ERR_INVALID, "xfer: address \"%s\": %s", host, gai_strerror(e));
    return TD_OK;
}

/* rdma's socket, too: who names only a path of this host listens to no other host. */
static td_status tcp_open_side(struct td_xfer *x, const struct td_xfer_config *config,
                               struct td_err *err)
{
    if (td_xfer_path_is_local(x->self.path)) return TD_OK;
    struct addrinfo *list = NULL;
    const char *host =
        config->listen_host && config->listen_host[0] ? config->listen_host : "127.0.0.1";
    td_status status = resolve(host, config->listen_port, AI_PASSIVE, &list, err);
    if (status) return status;
    int fd = socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    if (fd < 0) {
        freeaddrinfo(list);
        return td_fail(err, TD_ERR_IO, "xfer: socket: %s", strerror(errno));
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    struct sockaddr_storage bound;
    socklen_t bound_bytes = sizeof bound;
    if (bind(fd, list->ai_addr, list->ai_addrlen) || listen(fd, 128) ||
        getsockname(fd, (struct sockaddr *)&bound, &bound_bytes)) {
        status = td_fail(err, TD_ERR_IO, "xfer: listen on %s port %u: %s", host,
                         config->listen_port, strerror(errno));
        goto err_close;
    }
    freeaddrinfo(list);
    list = NULL;
    x->self.port = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                     : ((struct sockaddr_in *)&bound)->sin_port);

    /* Grants carry a number, so that no sender ever waits for a name server. */
    if (config->advertise_host && config->advertise_host[0]) host = config->advertise_host;
    status = resolve(host, x->self.port, 0, &list, err);
    if (status) goto err_close;
    if (getnameinfo(list->ai_addr, list->ai_addrlen, x->self.host, sizeof x->self.host, NULL, 0,
                    NI_NUMERICHOST)) {
        status = td_fail(err, TD_ERR_INVALID, "xfer: advertise_host \"%s\" is too long", host);
        goto err_close;
    }
    if (strcmp(x->self.host, "0.0.0.0") == 0 || strcmp(x->self.host, "::") == 0) {
        status =
            td_fail(err, TD_ERR_INVALID,
                    "xfer: advertise_host must name an address that peers can dial, %s is none",
                    x->self.host);
        goto err_close;
    }
    freeaddrinfo(list);
    x->listen.tcp_fd = fd;
    return TD_OK;

err_close:
    if (list) freeaddrinfo(list);
    close(fd);
    return status;
}

bool xfer_tcp_accepted(const struct td_xfer *x, int fd)
{
    int on = 1;
    unsigned timeout_ms = (unsigned)(2 * x->peer_timeout_ns / TD_NS_PER_MS);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    return true;
}

int xfer_tcp_dial(struct td_xfer *x, const struct td_xfer_address *to, bool *ret_connected)
{
    struct addrinfo *list = NULL;
    if (resolve(to->host, to->port, AI_NUMERICHOST, &list, NULL)) {
        errno = EINVAL;
        return -1;
    }
    int fd = socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), e = 0;
    if (fd >= 0) {
        xfer_tcp_accepted(x, fd);
        *ret_connected = connect(fd, list->ai_addr, list->ai_addrlen) == 0;
        if (!*ret_connected && errno != EINPROGRESS) {
            e = errno;
            close(fd);
            fd = -1;
        }
    } else {
        e = errno;
    }
    freeaddrinfo(list);
    errno = e;
    return fd;
}

/* Payload up to iov's n_bytes, and more ahead, to c->rx.ahead. The lock is not held. */
static ssize_t recv_payload(struct td_xfer_conn *c, struct iovec *iov, int n_iov, size_t n_bytes,
                            bool is_last)
{
    size_t ahead = is_last ? XFER_IN_DATA_BYTES : 0; /* after the payload comes a header */
    if (ahead) iov[n_iov++] = (struct iovec){.iov_base = c->rx.ahead, .iov_len = ahead};
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)n_iov};
    ssize_t k = c->tls ? td_tls_recvv(c->tls, iov, n_iov) : recvmsg(c->fd, &msg, MSG_DONTWAIT);
    if (k > 0) c->rx.drained = (size_t)k < n_bytes + ahead;
    if (k > (ssize_t)n_bytes) {
        c->rx.at = 0;
        c->rx.used = (uint32_t)(k - (ssize_t)n_bytes);
        k = (ssize_t)n_bytes;
    }
    return k;
}

/* Device memory: to a staging buffer, which the end of this turn sends on (device_copy.c). */
static ssize_t device_read(struct td_xfer *x, struct td_xfer_conn *c, size_t left)
{
    struct iovec iov[2];
    size_t n = c->rx.used && left > c->rx.used ? c->rx.used : left;
    uint8_t *to = xfer_staged_room(x, c, &n);
    ssize_t k;
    if (!to) return -1;
    if (c->rx.used) {
        k = xfer_conn_in(c, to, n);
    } else {
        iov[0] = (struct iovec){.iov_base = to, .iov_len = n};
        pthread_mutex_unlock(&x->lock);
        k = recv_payload(c, iov, 1, n, n == left);
        int e = errno;
        pthread_mutex_lock(&x->lock);
        errno = e;
    }
    if (k <= 0) return k;
    xfer_staged_took(x, c, (size_t)k);
    c->rx.n_payload += (uint32_t)k;
    return k;
}

static ssize_t tcp_receive(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct td_xfer_frame *f = &c->rx.frame;
    size_t left = f->length - c->rx.n_payload, n_bytes = 0;
    if (!c->rx.used && c->rx.drained) {
        errno = EAGAIN;
        return -1;
    }
    bool fits = !c->rx.drop && (x->device ? td_xfer_core_is_bound(&x->core, c->conn_id, f)
                                          : td_xfer_core_place_begin(&x->core, c->conn_id, f));
    if (!fits) {
        c->rx.drop = true;
        ssize_t k = c->rx.used ? xfer_conn_in(c, NULL, left)
                               : xfer_conn_recv(c, x->scrap, td_min_u64(left, sizeof x->scrap));
        if (k > 0) c->rx.n_payload += (uint32_t)k;
        return k;
    }
    if (x->device) return device_read(x, c, left);
    struct iovec iov[XFER_MAX_IOV + 1];
    uint64_t offset = f->offset + c->rx.n_payload;
    if (c->rx.used && left > c->rx.used) left = c->rx.used;
    int n_iov = td_xfer_iov(x->pool.base, x->pool.block_bytes, x->core.slots[f->slot].dst, offset,
                            left, iov, XFER_MAX_IOV, &n_bytes),
        e = 0;
    ssize_t k = 0;
    pthread_mutex_unlock(&x->lock);
    if (c->rx.used) { /* came along with the header */
        for (int i = 0; i < n_iov; i++) k += xfer_conn_in(c, iov[i].iov_base, iov[i].iov_len);
    } else {
        k = recv_payload(c, iov, n_iov, n_bytes, n_bytes == left);
        e = errno;
    }
    pthread_mutex_lock(&x->lock);
    if (k > 0) c->rx.n_payload += (uint32_t)k;
    td_xfer_core_place_end(&x->core, xfer_now(x), f->slot, k > 0 ? (size_t)k : 0);
    errno = e;
    return k;
}

/* What goes out by one call: frames that wait before one that has not begun, the header's rest, and
 * payload, or zeros for an op that has ended. */
static int gather(struct td_xfer *x, struct td_xfer_conn *c, uint32_t n_out, bool reads,
                  struct iovec *iov, size_t *ret_covered)
{
    int n = 0;
    size_t covered = c->tx.left;
    if (n_out) iov[n++] = (struct iovec){.iov_base = c->tx.out, .iov_len = n_out};
    if (c->tx.header_left)
        iov[n++] = (struct iovec){.iov_base = c->tx.header + 64 - c->tx.header_left,
                                  .iov_len = c->tx.header_left};
    if (reads && !x->device) {
        n += td_xfer_iov(x->pool.base, x->pool.block_bytes, x->core.ops[c->tx.op].src, c->tx.offset,
                         c->tx.left, iov + n, XFER_MAX_IOV, &covered);
    } else {
        if (!reads && covered > sizeof x->zeros) covered = sizeof x->zeros;
        iov[n++] = (struct iovec){.iov_base = reads ? xfer_staged_bytes(x, c) : x->zeros,
                                  .iov_len = covered};
    }
    *ret_covered = covered;
    return n;
}

static ssize_t tcp_send(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct iovec iov[XFER_MAX_IOV + 2];
    size_t covered;
    if (x->device && !xfer_staged_here(x, c)) {
        errno = EINPROGRESS;
        return -1;
    }
    uint32_t n_out = c->tx.header_left == 64 ? c->tx.used : 0;
    if (n_out) { /* xfer_conn_queue might move it while the lock is free */
        if (c->tx.at) memmove(c->tx.out, c->tx.out + c->tx.at, c->tx.used);
        c->tx.at = 0;
    }
    bool reads = td_xfer_core_read_begin(&x->core, c->tx.op, c->tx.handle);
    int n_iov = gather(x, c, n_out, reads, iov, &covered);
    bool whole = reads && xfer_zc_wanted(c, covered), zerocopy = whole && !c->tx.header_left;
    if (whole && !zerocopy) n_iov = n_out ? 2 : 1; /* what changes right away goes ahead, copied */
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = (size_t)n_iov};
    int flags = MSG_DONTWAIT | MSG_NOSIGNAL | (zerocopy ? MSG_ZEROCOPY : whole ? MSG_MORE : 0);
    pthread_mutex_unlock(&x->lock);
    ssize_t k = c->tls ? td_tls_sendv(c->tls, iov, n_iov) : sendmsg(c->fd, &msg, flags);
    if (k < 0 && errno == ENOBUFS && zerocopy) { /* no room to note it down: this one is copied */
        zerocopy = false;
        k = sendmsg(c->fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    int e = errno;
    pthread_mutex_lock(&x->lock);
    if (k > 0 && zerocopy) xfer_zc_sent(x, c, c->tx.op);
    size_t n_payload = 0;
    if (k > 0) {
        size_t n_queued = td_min_u64((size_t)k, n_out), rest = (size_t)k - n_queued;
        uint32_t n_header = (uint32_t)td_min_u64(rest, c->tx.header_left);
        xfer_conn_sent(x, c, n_queued);
        n_payload = rest - n_header;
        c->tx.header_left -= n_header;
        c->tx.left -= (uint32_t)n_payload;
        c->tx.offset += n_payload;
    }
    if (reads) td_xfer_core_read_end(&x->core, c->tx.op, n_payload);
    if (!c->tx.left && !c->tx.header_left) {
        td_xfer_core_tx_done(&x->core, c->tx.op, c->tx.handle);
        if (x->device) xfer_staged_sent(x, c);
    }
    errno = e;
    return k;
}

/* --- the table -------------------------------------------------------------------------------- */

static bool tcp_offers(const struct td_xfer *x, const struct td_xfer_grant_blob *g,
                       char why[TD_XFER_REASON_MAX])
{
    (void)x, (void)why;
    return g->port != 0;
}

static bool tcp_expects(const struct td_xfer_conn *c, uint8_t type)
{
    return !c->initiator && type == TD_XFER_DATA;
}

static void tcp_init(struct td_xfer_conn *c)
{
    struct xfer_tcp_conn *t = c->own;
    xfer_staged_init(c, &t->staged);
}

static void tcp_ready(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (c->initiator) xfer_zc_open(x, c);
}

static bool tcp_room(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (c->tx.header_left || c->tx.left) return false;
    return !x->device || (!xfer_staged_load(c) && xfer_staged_want(c));
}

static bool tcp_add(struct td_xfer *x, struct td_xfer_conn *c, struct td_xfer_tx *tx)
{
    if (x->device) return xfer_staged_add(x, c, tx);
    xfer_conn_load(c, &tx->frame, tx->op);
    return false;
}

static bool tcp_go(struct td_xfer *x, struct td_xfer_conn *c)
{
    return x->device && !c->staged->loaded && xfer_staged_go(x, c);
}

static void tcp_close(struct td_xfer *x, struct td_xfer_conn *c)
{
    xfer_zc_end(x, c);
    xfer_staged_end(x, c);
}

const struct td_transfer_backend td_transfer_tcp = {
    .path = TD_XFER_PATH_TCP,
    .name = "tcp",
    .way = TD_XFER_BY_DATA,
    .lanes = true,
    .conn_bytes = sizeof(struct xfer_tcp_conn),
    .side = {.open = tcp_open_side},
    .choice = {.offers = tcp_offers},
    .conn = {.dial = xfer_tcp_dial,
             .accepted = xfer_tcp_accepted,
             .init = tcp_init,
             .expects = tcp_expects,
             .ready = tcp_ready,
             .close = tcp_close},
    .bytes = {.receive = tcp_receive,
              .room = tcp_room,
              .add = tcp_add,
              .go = tcp_go,
              .send = tcp_send,
              .reap = xfer_zc_reap},
};
