/* ring.c - shm-staged: two processes on one host, the sender's pool in device memory that the
 * receiver's device cannot open (no peer access, containers without a shared IPC namespace, a
 * receiver without a device): through a ring of page-locked host memory that both map.
 *
 *   sender    as tcp staged (device_copy.c): frames from the core --one batch of copies--> a buffer
 *             of the ring; each is named instead of sent: LENT(place in the ring)
 *   receiver  copies the bytes to where tcp would have received them (its blocks, or its own
 *             staging buffer) and says TAKEN(place)
 *   sender    the buffer is free when each of its frames was TAKEN
 *
 * MEM brings the ring and the control words, as on shm. The ring's bytes are the receiver's until
 * TAKEN; no clock takes them back. When the connection ends its buffers are others': before that
 * the control words of its ops are cleared, and the receiver looks at the word before and after it
 * copies (shm.c has the argument). A receiver that stands still holds at most LENT_CONN_MAX buffers
 * for a peer time-out, and all receivers together leave some to the other paths. */
#include <string.h>
#include <sys/uio.h>

#include "common/transfer/copy.h"
#include "common/transfer/gpu/device_copy.h"

struct xfer_ring_conn {
    struct xfer_local_conn local; /* receiver: source is the ring */
    uint32_t lent_at;             /* receiver: where in the ring the frame under way lies */
    struct xfer_staged staged;
};

/* --- sender ----------------------------------------------------------------------------------- */

static bool ring_open_conn(struct td_xfer *x, struct td_xfer_conn *c,
                           char reason[TD_XFER_REASON_MAX])
{
    return xfer_shm_send_mem(x, c, STAGE_BYTES, STAGE_BUFFERS, x->device->ring_fd, reason);
}

/* What was copied to the buffer is named to the receiver. */
static void lend(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_staged *s = c->staged;
    struct xfer_device *d = x->device;
    int32_t b = s->buffer;
    if (b == NO_BUFFER || s->copying) return;
    d->lent[b].n = 0;
    for (uint32_t i = s->at; i < s->n; i++) {
        const struct td_xfer_frame *frame = &s->frames[i].frame;
        uint32_t op = s->frames[i].op;
        struct td_xfer_lent lent = {.place = (uint32_t)b * STAGE_BYTES + s->frames[i].place,
                                    .n_bytes = frame->length};
        struct td_xfer_frame f = *frame;
        /* it ended, and its blocks may be another's */
        if (!td_xfer_core_read_begin(&x->core, op, frame->handle)) continue;
        td_xfer_core_read_end(&x->core, op, frame->length);
        f.type = TD_XFER_LENT;
        f.length = sizeof lent;
        xfer_conn_queue(x, c, &f, &lent);
        td_xfer_core_tx_done(&x->core, op, frame->handle);
        d->lent[b].n++;
    }
    s->buffer = NO_BUFFER;
    s->at = s->n = s->n_bytes = 0;
    if (!d->lent[b].n) {
        d->used[b] = false;
        return;
    }
    d->lent[b].conn = c->id;
    s->n_lent++;
    d->n_lent++;
}

static void buffer_back(struct xfer_device *d, struct td_xfer_conn *c, uint32_t b)
{
    d->lent[b].conn = 0;
    d->used[b] = false;
    d->n_lent--;
    c->staged->n_lent--;
}

/* TAKEN came; false: of nothing that was lent. */
static bool on_taken(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_device *d = x->device;
    uint64_t b = c->rx.frame.offset / STAGE_BYTES;
    if (b >= STAGE_BUFFERS || d->lent[b].conn != c->id) return false;
    if (--d->lent[b].n == 0) buffer_back(d, c, (uint32_t)b);
    c->tx.ready = true;
    return true;
}

static bool ring_room(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (c->tx.used < XFER_OUT_BATCH) lend(x, c);
    return xfer_staged_want(c);
}

static void ring_close(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_device *d = x->device;
    xfer_staged_end(x, c);
    for (uint32_t i = 0; c->staged->n_lent && i < x->core.max_ops; i++)
        /* before the buffers are anybody else's */
        if (x->core.ops[i].conn == c->conn_id) xfer_shm_op_handle(x, i, 0);
    for (uint32_t b = 0; c->staged->n_lent && b < STAGE_BUFFERS; b++)
        if (d->lent[b].conn == c->id) buffer_back(d, c, b);
    xfer_shm_conn_close(x, c);
}

/* --- receiver --------------------------------------------------------------------------------- */

/* LENT came: its bytes are the DATA frame under way from here on; false: they lie nowhere. */
static bool on_lent(struct td_xfer_conn *c)
{
    struct xfer_ring_conn *r = c->own;
    struct td_xfer_lent lent;
    memcpy(&lent, c->rx.payload, sizeof lent);
    if (!r->local.source || lent.n_bytes < 1 || lent.n_bytes > TD_XFER_FRAME_DATA_MAX) return false;
    if (lent.place > r->local.source_bytes || lent.n_bytes > r->local.source_bytes - lent.place)
        return false;
    r->lent_at = lent.place;
    c->rx.frame.type = TD_XFER_DATA;
    c->rx.frame.length = lent.n_bytes;
    c->rx.n_header = 64;
    c->rx.n_payload = 0;
    return true;
}

/* n_bytes from the ring; false: the sender had given them up by the end of it. */
static bool copy_lent(const struct td_xfer_conn *c, uint32_t op, const struct iovec *iov, int n_iov)
{
    const struct xfer_ring_conn *r = c->own;
    const struct xfer_control_word *word = &r->local.words[op];
    const uint8_t *from = r->local.source + r->lent_at + c->rx.n_payload;
    if (!xfer_shm_word_shows(word, c->rx.frame.handle)) return false;
    XFER_FENCE(memory_order_acquire);
    for (int i = 0; i < n_iov; i++) {
        td_xfer_copy(iov[i].iov_base, from, iov[i].iov_len);
        from += iov[i].iov_len;
    }
    XFER_FENCE(memory_order_acquire); /* the copy's reads, then the word */
    return xfer_shm_word_shows(word, c->rx.frame.handle);
}

/* Copies some of the frame under way; like recv. */
static ssize_t ring_receive(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct xfer_ring_conn *r = c->own;
    const struct td_xfer_frame *f = &c->rx.frame;
    size_t left = f->length - c->rx.n_payload, n_bytes = left;
    bool fits = !c->rx.drop && (x->device ? td_xfer_core_is_bound(&x->core, c->conn_id, f)
                                          : td_xfer_core_place_begin(&x->core, c->conn_id, f));
    c->rx.drop = !fits;
    if (fits) {
        /* OPEN has seen that there is a word of it */
        uint32_t slot = f->slot, op = x->core.slots[slot].op;
        struct iovec iov[XFER_MAX_IOV];
        int n_iov = 1;
        if (x->device) {
            iov[0].iov_base = xfer_staged_room(x, c, &n_bytes);
            iov[0].iov_len = n_bytes;
            if (!iov[0].iov_base) return -1;
        } else {
            n_iov = td_xfer_iov(x->pool.base, x->pool.block_bytes, x->core.slots[slot].dst,
                                f->offset + c->rx.n_payload, left, iov, XFER_MAX_IOV, &n_bytes);
        }
        pthread_mutex_unlock(&x->lock);
        bool valid = copy_lent(c, op, iov, n_iov);
        pthread_mutex_lock(&x->lock);
        c->rx.drop = !valid; /* its ABORT, or the end of its connection, follows and says why */
        if (valid && x->device) xfer_staged_took(x, c, n_bytes);
        if (!x->device) td_xfer_core_place_end(&x->core, xfer_now(x), slot, valid ? n_bytes : 0);
        if (!valid) x->core.stats.n_stale_frames++;
    }
    if (c->rx.drop) n_bytes = left;
    c->rx.n_payload += (uint32_t)n_bytes;
    if (c->rx.n_payload == f->length) {
        struct td_xfer_frame taken = {.type = TD_XFER_TAKEN, .offset = r->lent_at};
        xfer_conn_queue(x, c, &taken, NULL);
    }
    return (ssize_t)n_bytes;
}

/* --- the table -------------------------------------------------------------------------------- */

static bool ring_offers(const struct td_xfer *x, const struct td_xfer_grant_blob *g,
                        char why[TD_XFER_REASON_MAX])
{
    (void)why;
    return g->shm_name[0] && x->device && x->device->ring_fd >= 0 && x->shm;
}

static void ring_init(struct td_xfer_conn *c)
{
    struct xfer_ring_conn *r = c->own;
    xfer_staged_init(c, &r->staged);
    r->staged.lends = true;
}

static bool ring_expects(const struct td_xfer_conn *c, uint8_t type)
{
    return c->initiator ? type == TD_XFER_TAKEN : type == TD_XFER_LENT || type == TD_XFER_MEM;
}

static void ring_on_frame(struct td_xfer *x, struct td_xfer_conn *c)
{
    if (c->rx.frame.type == TD_XFER_MEM) {
        xfer_shm_on_mem(x, c, 0);
    } else if (c->rx.frame.type == TD_XFER_TAKEN) {
        if (!on_taken(x, c)) xfer_conn_refuse(x, c, "taken: bytes that were not lent");
    } else if (on_lent(c)) {
        xfer_conn_begin_data(x, c);
    } else {
        xfer_conn_refuse(x, c, "lent: bytes that are not in the ring");
    }
}

const struct td_transfer_backend td_transfer_ring = {
    .path = TD_XFER_PATH_SHM_STAGED,
    .name = "shm-staged",
    .way = TD_XFER_BY_DATA,
    .also = TD_XFER_PATH_SHM,
    .local = true,
    .needs_device = true,
    .conn_bytes = sizeof(struct xfer_ring_conn),
    .choice = {.fits = xfer_shm_fits, .offers = ring_offers},
    .conn = {.dial = xfer_shm_dial,
             .init = ring_init,
             .open_conn = ring_open_conn,
             .expects = ring_expects,
             .on_frame = ring_on_frame,
             .may_open = xfer_shm_may_open,
             .close = ring_close},
    .bytes = {.read = xfer_shm_recv,
              .receive = ring_receive,
              .room = ring_room,
              .add = xfer_staged_add,
              .go = xfer_staged_go},
};
