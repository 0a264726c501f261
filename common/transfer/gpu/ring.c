/* ring.c - shm-staged: two processes on one host, the sender's pool in device memory that the
 * receiver's device cannot open (no peer access, containers without a shared IPC namespace, a
 * receiver without a device): through a ring of page-locked host memory that both map.
 *
 *   sender    as tcp staged (device_copy.c): frames from the core --one batch of copies--> a buffer
 *             of the ring. When the copies are complete, each frame is named instead of sent:
 *             LENT(place in the ring)
 *   receiver  copies the bytes from the ring to where tcp would have received them - its blocks, or
 *             its own staging buffer, which its device empties - and says TAKEN(place)
 *   sender    the buffer is free when each of its frames was TAKEN
 *
 * The unix socket of the grant shows that both sides share the host and the user, MEM brings the
 * ring and the control words, as on shm (shm.c).
 *
 * The fence. Source blocks are read by copies to the ring alone, which hold their op. The ring's
 * bytes are the receiver's until TAKEN; no clock takes them back. When the connection ends its
 * buffers are others': before that the control words of its ops are cleared, and the receiver
 * looks at the word before and after it copies, so that bytes which it read too late, however
 * long it was stopped, count for nothing. A receiver that stands still holds at most
 * LENT_CONN_MAX buffers for a peer time-out, and all receivers together leave some to the other
 * paths. */
#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "common/transfer/copy.h"
#include "common/transfer/gpu/device_copy.h"

/* --- sender ----------------------------------------------------------------------------------- */

bool xfer_ring_may_lend(const struct td_xfer *x)
{
    return x->device && x->device->ring_fd >= 0 && x->words;
}

void xfer_ring_mem(const struct td_xfer *x, struct td_xfer_mem *ret_mem, int *ret_fd)
{
    ret_mem->arena_bytes = (uint64_t)STAGE_BUFFERS * STAGE_BYTES;
    ret_mem->block_bytes = STAGE_BYTES;
    ret_mem->n_blocks = STAGE_BUFFERS;
    *ret_fd = x->device->ring_fd;
}

void xfer_ring_lend(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_device *d = x->device;
    int32_t b = c->staged.buffer;
    if (b == NO_BUFFER || c->staged.copying) return;
    d->lent[b].n = 0;
    for (uint32_t i = c->staged.at; i < c->staged.n; i++) {
        const struct td_xfer_frame *frame = &c->staged.frames[i].frame;
        uint32_t op = c->staged.frames[i].op;
        struct td_xfer_lent lent = {.place = (uint32_t)b * STAGE_BYTES + c->staged.frames[i].place,
                                    .n_bytes = frame->length};
        struct td_xfer_frame f = *frame;
        /* it ended, and its blocks may be another's */
        if (!td_xfer_core_read_begin(&x->core, op, frame->handle)) continue;
        td_xfer_core_read_end(&x->core, xfer_now(x), op, frame->length);
        f.type = TD_XFER_LENT;
        f.length = sizeof lent;
        xfer_conn_queue(x, c, &f, &lent);
        td_xfer_core_tx_done(&x->core, op, frame->handle);
        d->lent[b].n++;
    }
    c->staged.buffer = NO_BUFFER;
    c->staged.at = c->staged.n = c->staged.n_bytes = 0;
    if (!d->lent[b].n) {
        d->used[b] = false;
        return;
    }
    d->lent[b].conn = c->id;
    c->n_lent++;
    d->n_lent++;
}

static void buffer_back(struct xfer_device *d, struct td_xfer_conn *c, uint32_t b)
{
    d->lent[b].conn = 0;
    d->used[b] = false;
    d->n_lent--;
    c->n_lent--;
}

bool xfer_ring_taken(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_device *d = x->device;
    uint64_t b = c->rx_frame.offset / STAGE_BYTES;
    if (b >= STAGE_BUFFERS || d->lent[b].conn != c->id) return false;
    if (--d->lent[b].n == 0) buffer_back(d, c, (uint32_t)b);
    c->tx_ready = true;
    return true;
}

void xfer_ring_conn_end(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_device *d = x->device;
    if (!c->n_lent) return;
    for (uint32_t i = 0; i < x->core.max_ops; i++) /* before the buffers are anybody else's */
        if (x->core.ops[i].conn == c->link) xfer_shm_op_handle(x, i, 0);
    for (uint32_t b = 0; b < STAGE_BUFFERS; b++)
        if (d->lent[b].conn == c->id) buffer_back(d, c, b);
}

/* --- receiver --------------------------------------------------------------------------------- */

bool xfer_ring_lent(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_lent lent;
    (void)x;
    memcpy(&lent, c->rx_payload, sizeof lent);
    if (!c->source || lent.n_bytes < 1 || lent.n_bytes > TD_XFER_FRAME_DATA_MAX) return false;
    if (lent.place > c->ring_bytes || lent.n_bytes > c->ring_bytes - lent.place) return false;
    c->lent_at = lent.place;
    c->rx_frame.type = TD_XFER_DATA;
    c->rx_frame.length = lent.n_bytes;
    c->n_header = 64;
    c->n_payload = 0;
    return true;
}

/* n_bytes from the ring; false: the sender had given them up by the end of it. */
static bool copy_lent(const struct td_xfer_conn *c, uint32_t op, const struct iovec *iov, int n_iov)
{
    const struct xfer_control_word *word = &c->words[op];
    const uint8_t *from = c->source + c->lent_at + c->n_payload;
    if (!xfer_shm_word_shows(word, c->rx_frame.handle)) return false;
    XFER_FENCE(memory_order_acquire);
    for (int i = 0; i < n_iov; i++) {
        td_xfer_copy(iov[i].iov_base, from, iov[i].iov_len);
        from += iov[i].iov_len;
    }
    XFER_FENCE(memory_order_acquire); /* the copy's reads, then the word */
    return xfer_shm_word_shows(word, c->rx_frame.handle);
}

ssize_t xfer_ring_take(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct td_xfer_frame *f = &c->rx_frame;
    size_t left = f->length - c->n_payload, n_bytes = left;
    bool fits = !c->rx_drop && (x->device ? td_xfer_core_is_bound(&x->core, c->link, f)
                                          : td_xfer_core_place_begin(&x->core, c->link, f));
    if (fits) {
        /* OPEN has seen that there is a word of it */
        uint32_t slot = f->slot, op = x->core.slots[slot].op;
        struct iovec iov[XFER_MAX_IOV];
        int n_iov = 1;
        if (x->device) {
            iov[0].iov_base = xfer_staged_room(x, &n_bytes);
            iov[0].iov_len = n_bytes;
            if (!iov[0].iov_base) {
                c->rx_starved = true;
                errno = EAGAIN;
                return -1;
            }
        } else {
            n_iov = td_xfer_iov(x->base, x->block_bytes, x->core.slots[slot].dst,
                                f->offset + c->n_payload, left, iov, XFER_MAX_IOV, &n_bytes);
        }
        pthread_mutex_unlock(&x->lock);
        bool valid = copy_lent(c, op, iov, n_iov);
        pthread_mutex_lock(&x->lock);
        c->rx_drop = !valid; /* its ABORT, or the end of its connection, follows and says why */
        if (valid && x->device) xfer_staged_took(x, c, n_bytes);
        if (!x->device) td_xfer_core_place_end(&x->core, xfer_now(x), slot, valid ? n_bytes : 0);
        if (!valid) x->core.stats.n_stale_frames++;
    } else {
        c->rx_drop = true;
    }
    if (c->rx_drop) n_bytes = left;
    c->n_payload += (uint32_t)n_bytes;
    if (c->n_payload == f->length) {
        struct td_xfer_frame taken = {.type = TD_XFER_TAKEN, .offset = c->lent_at};
        xfer_conn_queue(x, c, &taken, NULL);
    }
    return (ssize_t)n_bytes;
}
