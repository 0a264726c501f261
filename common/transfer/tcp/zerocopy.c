/* zerocopy.c - tcp sends that the NIC reads from the pool itself (MSG_ZEROCOPY).
 *
 * Worth it from some 10 KB on over a real NIC; over loopback the kernel copies after all, and says
 * so. So: only payload of at least MIN_BYTES, only without TLS, only towards other hosts, and no
 * longer on a socket whose notifications say "copied".
 *
 * The kernel may read the bytes until the peer's acknowledgement. Each such send holds its op until
 * its notification has come by the socket's error queue. Frame headers change at once and are
 * always copied. A connection that ends with sends under way would go on retransmitting blocks that
 * have another owner: xfer_zc_end disconnects the socket first, which purges what it holds and
 * resets the peer, and takes the notifications of all that. Source: the kernel's msg_zerocopy
 * documentation. */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/errqueue.h>
#include <netinet/in.h>
#include <sched.h>
#include <string.h>
#include <sys/socket.h>

#include "common/transfer/tcp/tcp.h"

#define MIN_BYTES (64u << 10)
#define END_NS (200 * TD_NS_PER_MS)

static struct xfer_zc *zc_of(const struct td_xfer_conn *c)
{
    return &((struct xfer_tcp_conn *)c->own)->zc;
}

static bool is_this_host(int fd)
{
    struct sockaddr_storage here = {0}, there = {0};
    socklen_t n = sizeof here, m = sizeof there;
    if (getsockname(fd, (struct sockaddr *)&here, &n) ||
        getpeername(fd, (struct sockaddr *)&there, &m))
        return true;
    if (here.ss_family == AF_INET)
        return ((struct sockaddr_in *)&here)->sin_addr.s_addr ==
               ((struct sockaddr_in *)&there)->sin_addr.s_addr;
    return memcmp(&((struct sockaddr_in6 *)&here)->sin6_addr,
                  &((struct sockaddr_in6 *)&there)->sin6_addr, 16) == 0;
}

void xfer_zc_open(const struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_zc *zc = zc_of(c);
    int on = 1;
    if (x->tcp.zerocopy == TD_XFER_ZEROCOPY_OFF || c->tls ||
        (x->tcp.zerocopy == TD_XFER_ZEROCOPY_AUTO && is_this_host(c->fd)))
        return;
    /* an older kernel: copies serve */
    zc->on = setsockopt(c->fd, SOL_SOCKET, SO_ZEROCOPY, &on, sizeof on) == 0;
}

bool xfer_zc_wanted(const struct td_xfer_conn *c, size_t n_bytes)
{
    const struct xfer_zc *zc = zc_of(c);
    return zc->on && n_bytes >= MIN_BYTES && zc->next - zc->done < XFER_ZC_MAX;
}

void xfer_zc_sent(struct td_xfer *x, struct td_xfer_conn *c, uint32_t op)
{
    struct xfer_zc *zc = zc_of(c);
    struct xfer_zc_send *s = &zc->sends[zc->next++ % XFER_ZC_MAX];
    s->op = op;
    s->over = false;
    td_xfer_core_hold(&x->core, op);
    x->tcp.n_zerocopy++;
}

static void sends_over(struct td_xfer *x, struct xfer_zc *zc, uint32_t first, uint32_t last)
{
    for (uint32_t id = first; id - zc->done < zc->next - zc->done && id - first <= last - first;
         id++)
        zc->sends[id % XFER_ZC_MAX].over = true;
    for (; zc->done != zc->next && zc->sends[zc->done % XFER_ZC_MAX].over; zc->done++)
        td_xfer_core_wr_done(&x->core, zc->sends[zc->done % XFER_ZC_MAX].op, 0, true);
}

void xfer_zc_reap(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_zc *zc = zc_of(c);
    while (zc->done != zc->next) {
        union {
            struct cmsghdr header;
            char room[CMSG_SPACE(sizeof(struct sock_extended_err) + sizeof(struct sockaddr_in6))];
        } control;
        struct msghdr msg = {.msg_control = &control, .msg_controllen = sizeof control};
        if (recvmsg(c->fd, &msg, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return;
        for (struct cmsghdr *m = CMSG_FIRSTHDR(&msg); m; m = CMSG_NXTHDR(&msg, m)) {
            struct sock_extended_err e;
            bool is_error = (m->cmsg_level == SOL_IP && m->cmsg_type == IP_RECVERR) ||
                            (m->cmsg_level == SOL_IPV6 && m->cmsg_type == IPV6_RECVERR);
            if (!is_error || m->cmsg_len < CMSG_LEN(sizeof e)) continue;
            memcpy(&e, CMSG_DATA(m), sizeof e);
            if (e.ee_origin != SO_EE_ORIGIN_ZEROCOPY || e.ee_errno) continue;
            if ((e.ee_code & SO_EE_CODE_ZEROCOPY_COPIED) &&
                x->tcp.zerocopy == TD_XFER_ZEROCOPY_AUTO)
                zc->on = false;
            sends_over(x, zc, e.ee_info, e.ee_data);
        }
    }
}

void xfer_zc_end(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_zc *zc = zc_of(c);
    if (zc->done == zc->next) return;
    struct sockaddr nobody = {.sa_family = AF_UNSPEC};
    struct linger at_once = {.l_onoff = 1};
    uint64_t until = td_now_ns() + END_NS;
    setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    int e = connect(c->fd, &nobody, sizeof nobody); /* purges the queue, resets the peer */
    (void)e;                                        /* it has ended already, then */
    do {
        xfer_zc_reap(x, c);
        if (zc->done != zc->next) sched_yield();
    } while (zc->done != zc->next && td_now_ns() < until);
    sends_over(x, zc, zc->done, zc->next - 1); /* longer than that: the device is broken */
}
