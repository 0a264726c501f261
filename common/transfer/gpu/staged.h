/* staged.h - DATA frames of a pool in device memory on their way through staging buffers. */
#ifndef TD_TRANSFER_GPU_STAGED_H
#define TD_TRANSFER_GPU_STAGED_H

#include "common/transfer/endpoint.h"

#define XFER_STAGED_FRAMES 16 /* DATA frames that share a staging buffer */

/* Sender, of one connection (c->staged). Frames [at, n) have been taken from the core, and what
 * is left of them is copied to `buffer` (-1: to none yet, or it was taken away for others).
 * loaded: frame `at` is the one under way. */
struct xfer_staged {
    int32_t buffer;
    bool copying, loaded;
    bool lends;      /* shm-staged: the receiver reads the buffer, and nothing is sent from it */
    uint32_t n_lent; /* shm-staged: buffers that the receiver has not read yet */
    uint32_t at, n, n_bytes;
    struct xfer_staged_frame {
        struct td_xfer_frame frame;
        uint32_t op, place, from; /* place: in the buffer, of payload byte `from` */
    } frames[XFER_STAGED_FRAMES];
};

void xfer_staged_init(struct td_xfer_conn *c, struct xfer_staged *s);
void xfer_staged_end(struct td_xfer *x, struct td_xfer_conn *c); /* its buffer goes */
/* Sender. want: may another frame be taken from the core? add: it was; true: another may be. go:
 * what was added is copied, as soon as there is a buffer; false: nothing was. load: the next frame
 * becomes the one under way; false: none is here yet. here: its bytes are (else it asks for them
 * again). bytes: its next payload byte. sent: its last byte is gone. */
bool xfer_staged_want(const struct td_xfer_conn *c);
bool xfer_staged_add(struct td_xfer *x, struct td_xfer_conn *c, struct td_xfer_tx *tx);
bool xfer_staged_go(struct td_xfer *x, struct td_xfer_conn *c);
bool xfer_staged_load(struct td_xfer_conn *c);
bool xfer_staged_here(struct td_xfer *x, struct td_xfer_conn *c);
uint8_t *xfer_staged_bytes(const struct td_xfer *x, const struct td_xfer_conn *c);
void xfer_staged_sent(struct td_xfer *x, struct td_xfer_conn *c);
/* Receiver. room: for up to *n bytes of the frame under way; NULL: none. took: n of them came. */
uint8_t *xfer_staged_room(struct td_xfer *x, size_t *n);
void xfer_staged_took(struct td_xfer *x, const struct td_xfer_conn *c, size_t n);

#endif
