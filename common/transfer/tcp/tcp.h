/* tcp.h - sockets across hosts, and sends that the kernel reads from the pool itself. */
#ifndef TD_TRANSFER_TCP_TCP_H
#define TD_TRANSFER_TCP_TCP_H

#include "common/transfer/endpoint.h"
#include "common/transfer/gpu/staged.h"

#define XFER_ZC_MAX 64 /* sends without a copy whose notification has not come */

/* Sends [done, next) hold their ops; numbers as the kernel counts them. */
struct xfer_zc {
    bool on;
    uint32_t next, done;
    struct xfer_zc_send {
        uint32_t op;
        bool over;
    } sends[XFER_ZC_MAX];
};

struct xfer_tcp_conn {
    struct xfer_zc zc;
    struct xfer_staged staged;
};

/* fd, or -1 with errno */
int xfer_tcp_dial(struct td_xfer *x, const struct td_xfer_address *to, bool *ret_connected);
bool xfer_tcp_accepted(const struct td_xfer *x, int fd);

/* zerocopy.c */
/* a new tcp socket */
void xfer_zc_open(const struct td_xfer *x, struct td_xfer_conn *c);
bool xfer_zc_wanted(const struct td_xfer_conn *c, size_t n_bytes);
/* one send with MSG_ZEROCOPY was taken; the op is live */
void xfer_zc_sent(struct td_xfer *x, struct td_xfer_conn *c, uint32_t op);
/* takes notifications */
void xfer_zc_reap(struct td_xfer *x, struct td_xfer_conn *c);
/* before close: nothing of the pool is read by this socket after it */
void xfer_zc_end(struct td_xfer *x, struct td_xfer_conn *c);

#endif
