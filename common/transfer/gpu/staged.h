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
/* Sender, in the order of their calls. May the sender take another frame from the core? */
bool xfer_staged_want(const struct td_xfer_conn *c);
/* The core gave this frame. True: another one may be taken. */
bool xfer_staged_add(struct td_xfer *x, struct td_xfer_conn *c, struct td_xfer_tx *tx);
/* Begins to copy what was added; without a free buffer, as soon as there is one. False: nothing was
 * added. */
bool xfer_staged_go(struct td_xfer *x, struct td_xfer_conn *c);
/* Makes the next frame the one under way. False: one is under way already, the next one's copy is
 * not complete yet, or there is none. */
bool xfer_staged_load(struct td_xfer_conn *c);
/* Are the bytes of the frame under way in a buffer? If its buffer was taken away for others, this
 * begins to copy them again, and is false until they are there. */
bool xfer_staged_here(struct td_xfer *x, struct td_xfer_conn *c);
/* The next payload byte of the frame under way, which is here. */
uint8_t *xfer_staged_bytes(const struct td_xfer *x, const struct td_xfer_conn *c);
/* The last byte of the frame under way was sent; after the last frame the buffer is free. */
void xfer_staged_sent(struct td_xfer *x, struct td_xfer_conn *c);
/* Receiver. Room for up to *n bytes of the frame under way, with *n cut to what there is; NULL with
 * EAGAIN: no buffer is free now, and c is read again in the next turn. */
uint8_t *xfer_staged_room(struct td_xfer *x, struct td_xfer_conn *c, size_t *n);
/* n bytes were received there. */
void xfer_staged_took(struct td_xfer *x, const struct td_xfer_conn *c, size_t n);

#endif
