/* device_copy.c - pools in device memory: bytes that no instruction of this process may touch,
 * moved by copies that the device runs by itself.
 *
 * tcp, staged through a ring of STAGE_BUFFERS page-locked buffers (shm-staged is the same but for
 * the socket's part, which ring.c has):
 *
 *   sender    frames are taken from the core until about a MiB of payload is together --go: one
 *             batch of copies to a buffer, each op held--> copying --poll: complete, holds end-->
 *             sent frame by frame, as from the pool --last byte--> the buffer is free
 *   receiver  payload of one reading turn is received side by side into a buffer --flush: binding
 *             checked per frame, one batch of copies to the blocks--> copying --poll: complete:
 *             only now the bytes count (dma_end)--> the buffer is free
 *
 * A sender whose socket is full gives its buffer up when others need one: its blocks still hold the
 * bytes, and they are copied again when the socket has room. (An op that ended meanwhile owes the
 * stream zeros, as always.) A receiver that finds no buffer free reads again in the next turn; all
 * that it waits for are copies under way. So the ring is bounded and no peer can hold it.
 *
 * A device that fails is lost for good: what is under way ends with its reason, so does every op
 * and slot, and grants and ops that follow are refused. */
#include "common/transfer/gpu/device_copy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/base/hash.h"
#include "common/base/min.h"

static const char *device_lost(const struct td_xfer *x)
{
    return x->device && x->device->is_lost ? x->device->lost : NULL;
}

void xfer_device_say_lost(struct td_xfer *x, const char *why)
{
    struct xfer_device *d = x->device;
    if (d->is_lost) return;
    d->is_lost = true;
    xfer_say(d->lost, "device %.40s: %.100s", d->memory->name, why);
    for (uint32_t i = 0; i < x->core.max_ops; i++)
        td_xfer_core_op_fail(&x->core, i, TD_ERR_DEVICE, d->lost);
    for (uint32_t i = 0; i < x->core.max_slots; i++)
        td_xfer_core_slot_give_up(&x->core, i, TD_ERR_DEVICE, d->lost);
}

/* --- buffers and flights ---------------------------------------------------------------------- */

static uint8_t *buffer_bytes(const struct xfer_device *d, int32_t buffer)
{
    return d->pinned + (size_t)buffer * STAGE_BYTES;
}

static void buffer_free(struct xfer_device *d, int32_t *buffer)
{
    if (*buffer != NO_BUFFER) d->used[*buffer] = false;
    *buffer = NO_BUFFER;
}

/* NO_BUFFER when every one is in use by copies, or about to be sent. */
static int32_t buffer_take(struct td_xfer *x)
{
    struct xfer_device *d = x->device;
    for (int pass = 0; pass < 2; pass++) {
        for (int32_t i = 0; i < STAGE_BUFFERS; i++) {
            if (d->used[i]) continue;
            d->used[i] = true;
            return i;
        }
        for (uint32_t i = 0; i < x->n_conns && pass == 0; i++) {
            /* of who waits for its peer to read */
            struct td_xfer_conn *c = x->live[i];
            if (c->staged && c->tx.want_out && !c->staged->copying)
                buffer_free(d, &c->staged->buffer);
        }
    }
    return NO_BUFFER;
}

/* A buffer for what this connection has to send? */
static bool may_take(const struct td_xfer *x, const struct xfer_staged *s)
{
    return !s->lends || (s->n_lent < LENT_CONN_MAX && x->device->n_lent < LENT_MAX);
}

struct flight *xfer_flight_new(struct xfer_device *d, int32_t buffer)
{
    uint32_t i = 0;
    while (i < FLIGHTS && d->flight[i].used) i++;
    TD_ASSERT(i < FLIGHTS && (buffer != NO_BUFFER || d->n_pulls < PULLS));
    struct flight *f = &d->flight[i];
    f->used = true;
    f->to_host = false;
    f->buffer = buffer;
    f->conn = 0;
    f->n = 0;
    d->n_flights++;
    d->n_pulls += buffer == NO_BUFFER;
    d->n_runs = 0;
    return f;
}

void xfer_runs_add(struct xfer_device *d, void *to, const void *from, size_t bytes)
{
    struct td_device_run *last = d->n_runs ? &d->runs[d->n_runs - 1] : NULL;
    if (last && (uint8_t *)last->to + last->bytes == to &&
        (const uint8_t *)last->from + last->bytes == from) {
        last->bytes += bytes;
        return;
    }
    TD_ASSERT(d->n_runs < d->max_runs);
    d->runs[d->n_runs++] = (struct td_device_run){.to = to, .from = from, .bytes = bytes};
}

/* Bytes [at, at + n_bytes) of a grant whose i-th block is ids[i], to or from host memory. */
static void add_blocks(struct td_xfer *x, const int32_t *ids, uint64_t at, uint64_t n_bytes,
                       uint8_t *host, bool to_host)
{
    for (uint64_t end = at + n_bytes; at < end;) {
        uint64_t block = at / x->pool.block_bytes, in = at % x->pool.block_bytes;
        size_t n = td_min_u64(x->pool.block_bytes - in, end - at);
        uint8_t *pool = xfer_block(x, ids[block]) + in;
        xfer_runs_add(x->device, to_host ? host : pool, to_host ? pool : host, n);
        host += n;
        at += n;
    }
}

/* Its copies are complete, or can never be: everybody who waited for that is told. */
static void flight_over(struct td_xfer *x, struct flight *f, td_status status)
{
    struct xfer_device *d = x->device;
    uint64_t now = xfer_now(x);
    const char *reason = status ? d->lost : "";
    d->n_pulls -= f->buffer == NO_BUFFER;
    for (uint32_t i = 0; i < f->n; i++) {
        const struct piece *p = &f->piece[i];
        if (f->to_host)
            td_xfer_core_wr_done(&x->core, p->id, 0, true);
        else
            td_xfer_core_dma_end(&x->core, now, p->id, p->conn, p->handle, p->n_bytes,
                                 status ? status
                                 : !p->word || xfer_shm_word_shows(p->word, p->handle)
                                     ? TD_OK
                                     : TD_ERR_STALE,
                                 reason);
    }
    if (f->to_host) {
        struct td_xfer_conn *c = xfer_conn_by_id(x, f->conn);
        if (c && c->staged && c->staged->buffer == f->buffer && c->staged->copying) {
            c->staged->copying = false;
            c->tx.ready = true;
            f->buffer = NO_BUFFER; /* the connection's until it is sent */
        }
    }
    buffer_free(d, &f->buffer);
    f->used = false;
    d->n_flights--;
}

bool xfer_flight_go(struct td_xfer *x, struct flight *f, enum td_device_copy kind)
{
    struct xfer_device *d = x->device;
    struct td_err err = {.msg = ""};
    td_status status = d->is_lost ? TD_ERR_DEVICE : TD_OK;
    f->to_host = kind == TD_COPY_TO_HOST;
    if (!status && d->n_runs)
        status = d->memory->copy(d->memory->ctx, kind, d->runs, d->n_runs, &f->ticket, &err);
    if (!status && d->n_runs) return true;
    if (status) xfer_device_say_lost(x, err.msg);
    flight_over(x, f, status ? TD_ERR_DEVICE : TD_OK);
    return status == TD_OK;
}

/* Ends it, unless `ask` (the device's done or wait) says that it is under way. */
static void flight_ask(struct td_xfer *x, struct flight *f,
                       td_status (*ask)(void *ctx, uint64_t ticket, struct td_err *err))
{
    struct xfer_device *d = x->device;
    struct td_err err = {.msg = ""};
    td_status status = d->is_lost ? TD_ERR_DEVICE : ask(d->memory->ctx, f->ticket, &err);
    if (status == TD_INPROGRESS) return;
    if (status) xfer_device_say_lost(x, err.msg);
    flight_over(x, f, status ? TD_ERR_DEVICE : TD_OK);
}

static bool device_busy(const struct td_xfer *x) { return x->device->n_flights > 0; }

static bool device_poll(struct td_xfer *x)
{
    struct xfer_device *d = x->device;
    bool busy = d->n_flights > 0;
    for (uint32_t i = 0; i < FLIGHTS; i++) {
        struct flight *f = &d->flight[i];
        if (f->used) flight_ask(x, f, d->memory->done);
    }
    for (uint32_t i = 0; i < x->n_conns; i++) { /* who found no buffer */
        struct td_xfer_conn *c = x->live[i];
        const struct xfer_staged *s = c->staged;
        if (s && s->n && s->buffer == NO_BUFFER && !c->tx.want_out && may_take(x, s)) {
            c->tx.ready = true;
            busy = true;
        }
    }
    return busy;
}

void xfer_flights_wait(struct td_xfer *x, uint64_t conn)
{
    struct xfer_device *d = x->device;
    for (uint32_t i = 0; i < FLIGHTS; i++) {
        struct flight *f = &d->flight[i];
        bool of_it = false;
        for (uint32_t k = 0; f->used && f->buffer == NO_BUFFER && k < f->n; k++)
            of_it |= f->piece[k].conn == conn;
        if (of_it) flight_ask(x, f, d->memory->wait);
    }
}

void xfer_staged_init(struct td_xfer_conn *c, struct xfer_staged *s)
{
    c->staged = s;
    s->buffer = NO_BUFFER;
}

void xfer_staged_end(struct td_xfer *x, struct td_xfer_conn *c)
{
    /* else its flight gives it back */
    if (x->device && !c->staged->copying) buffer_free(x->device, &c->staged->buffer);
}

/* --- tcp, sender ------------------------------------------------------------------------------ */

bool xfer_staged_want(const struct td_xfer_conn *c)
{
    const struct xfer_staged *s = c->staged;
    return s->buffer == NO_BUFFER && !s->loaded && s->at == 0 && s->n < XFER_STAGED_FRAMES &&
           s->n_bytes <= STAGE_BYTES - TD_XFER_FRAME_DATA_MAX;
}

bool xfer_staged_add(struct td_xfer *x, struct td_xfer_conn *c, struct td_xfer_tx *tx)
{
    struct xfer_staged *s = c->staged;
    (void)x;
    s->frames[s->n].frame = tx->frame;
    s->frames[s->n++].op = tx->op;
    s->n_bytes += tx->frame.length;
    return xfer_staged_want(c);
}

static bool op_is_at(const struct td_xfer *x, uint32_t op, uint64_t handle)
{
    const struct td_xfer_op *o = &x->core.ops[op];
    return o->handle == handle && (o->state == TD_OP_STREAMING || o->state == TD_OP_WAIT_VERDICT);
}

bool xfer_staged_go(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_staged *s = c->staged;
    struct xfer_device *d = x->device;
    if (!s->n || s->buffer != NO_BUFFER) return s->n > 0;
    int32_t buffer = may_take(x, s) ? buffer_take(x) : NO_BUFFER;
    if (buffer == NO_BUFFER) return true; /* poll looks after it */
    struct flight *f = xfer_flight_new(d, buffer);
    uint32_t place = 0;
    for (uint32_t i = s->at; i < s->n; i++) {
        struct xfer_staged_frame *staged = &s->frames[i];
        const struct td_xfer_frame *frame = &staged->frame;
        uint32_t op = staged->op;
        uint32_t from = i == s->at && s->loaded ? frame->length - c->tx.left : 0;
        staged->place = place;
        staged->from = from;
        if (!op_is_at(x, op, frame->handle)) continue; /* it ended: zeros go out */
        add_blocks(x, x->core.ops[op].src, frame->offset + from, frame->length - from,
                   buffer_bytes(d, buffer) + place, true);
        place += frame->length - from;
        f->piece[f->n++] = (struct piece){.id = op, .handle = frame->handle};
        td_xfer_core_hold(&x->core, op);
    }
    s->buffer = buffer;
    s->copying = true;
    f->conn = c->id;
    xfer_flight_go(x, f, TD_COPY_TO_HOST);
    if (!s->loaded && !s->lends) xfer_staged_load(c); /* zeros alone */
    return true;
}

bool xfer_staged_load(struct td_xfer_conn *c)
{
    struct xfer_staged *s = c->staged;
    if (s->loaded || s->at == s->n || s->buffer == NO_BUFFER || s->copying) return false;
    struct xfer_staged_frame *next = &s->frames[s->at];
    xfer_conn_load(c, &next->frame, next->op);
    s->loaded = true;
    return true;
}

bool xfer_staged_here(struct td_xfer *x, struct td_xfer_conn *c)
{
    const struct xfer_staged *s = c->staged;
    if (!s->loaded) return true;
    if (s->copying) return false;
    if (s->buffer != NO_BUFFER || !op_is_at(x, c->tx.op, c->tx.handle)) return true;
    xfer_staged_go(x, c);
    /* all the others had ended, too */
    return s->buffer != NO_BUFFER && !s->copying;
}

uint8_t *xfer_staged_bytes(const struct td_xfer *x, const struct td_xfer_conn *c)
{
    const struct xfer_staged *s = c->staged;
    const struct xfer_staged_frame *f = &s->frames[s->at];
    TD_ASSERT(s->loaded && s->buffer != NO_BUFFER && !s->copying);
    return buffer_bytes(x->device, s->buffer) + f->place + (f->frame.length - c->tx.left - f->from);
}

void xfer_staged_sent(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_staged *s = c->staged;
    s->loaded = false;
    if (++s->at < s->n) return;
    buffer_free(x->device, &s->buffer);
    s->at = s->n = s->n_bytes = 0;
}

/* --- tcp, receiver ---------------------------------------------------------------------------- */

static void staged_landed(struct td_xfer *x);

uint8_t *xfer_staged_room(struct td_xfer *x, struct td_xfer_conn *c, size_t *n)
{
    struct xfer_device *d = x->device;
    if (d->rx.buffer != NO_BUFFER && (d->rx.n_bytes == STAGE_BYTES || d->rx.n == FLIGHT_PIECES))
        staged_landed(x);
    if (d->rx.buffer == NO_BUFFER) d->rx.buffer = buffer_take(x);
    if (d->rx.buffer == NO_BUFFER) {
        c->rx.starved = true;
        errno = EAGAIN;
        return NULL;
    }
    *n = td_min_u64(*n, STAGE_BYTES - d->rx.n_bytes);
    return buffer_bytes(d, d->rx.buffer) + d->rx.n_bytes;
}

void xfer_staged_took(struct td_xfer *x, const struct td_xfer_conn *c, size_t n)
{
    struct xfer_device *d = x->device;
    const struct td_xfer_frame *f = &c->rx.frame;
    struct arrived *last = d->rx.n ? &d->rx.at[d->rx.n - 1] : NULL;
    uint64_t offset = f->offset + c->rx.n_payload;
    if (!n) return;
    if (last && last->conn_id == c->conn_id && last->frame.handle == f->handle &&
        last->frame.slot == f->slot && last->offset + last->n_bytes == offset) {
        last->n_bytes += (uint32_t)n;
    } else {
        TD_ASSERT(d->rx.n < FLIGHT_PIECES);
        d->rx.at[d->rx.n++] = (struct arrived){.frame = *f,
                                               .conn_id = c->conn_id,
                                               .offset = offset,
                                               .place = d->rx.n_bytes,
                                               .n_bytes = (uint32_t)n};
    }
    d->rx.n_bytes += (uint32_t)n;
}

static void staged_landed(struct td_xfer *x)
{
    struct xfer_device *d = x->device;
    if (d->rx.buffer == NO_BUFFER) return;
    struct flight *f = xfer_flight_new(d, d->rx.buffer);
    for (uint32_t i = 0; i < d->rx.n; i++) {
        const struct arrived *a = &d->rx.at[i];
        /* revoked, or another attempt's, since it came */
        if (!td_xfer_core_dma_begin(&x->core, a->conn_id, &a->frame)) continue;
        const struct td_xfer_slot *s = &x->core.slots[a->frame.slot];
        add_blocks(x, s->dst, a->offset, a->n_bytes, buffer_bytes(d, d->rx.buffer) + a->place,
                   false);
        f->piece[f->n++] = (struct piece){.id = a->frame.slot,
                                          .conn = a->conn_id,
                                          .handle = a->frame.handle,
                                          .n_bytes = a->n_bytes};
    }
    d->rx.buffer = NO_BUFFER;
    d->rx.n = d->rx.n_bytes = 0;
    xfer_flight_go(x, f, TD_COPY_TO_DEVICE);
}

/* --- digests ---------------------------------------------------------------------------------- */

td_status xfer_device_read(const struct xfer_device *d, const void *from, size_t n_bytes,
                           struct td_err *err)
{
    struct td_device_run run = {.to = d->digest, .from = from, .bytes = n_bytes};
    uint64_t ticket;
    td_status status = d->memory->copy(d->memory->ctx, TD_COPY_TO_HOST, &run, 1, &ticket, err);
    return status ? status : d->memory->wait(d->memory->ctx, ticket, err);
}

static bool device_crc(struct td_xfer *x, int32_t block, uint32_t *ret_crc)
{
    const uint8_t *from = xfer_block(x, block);
    uint32_t crc = 0;
    for (uint64_t at = 0; at < x->pool.block_bytes;) { /* as the device holds it */
        size_t n = td_min_u64(x->pool.block_bytes - at, STAGE_BYTES);
        if (xfer_device_read(x->device, from + at, n, NULL)) return false;
        crc = td_crc32c(crc, x->device->digest, n);
        at += n;
    }
    *ret_crc = crc;
    return true;
}

/* --- life ------------------------------------------------------------------------------------- */

#define RING_BYTES ((size_t)(STAGE_BUFFERS + 1) * STAGE_BYTES)

/* The ring in memory that processes of this host can be given. */
static td_status open_shared_ring(struct xfer_device *d, struct td_err *err)
{
    const struct td_device_memory *m = d->memory;
    if (!m->pin)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "shm-staged: device %s page-locks no memory that processes share", m->name);
    int fd, ro = -1;
    void *map = xfer_shm_memory("tandem-xfer-ring", RING_BYTES, &fd);
    if (map) ro = xfer_shm_read_only(fd);
    td_status status =
        ro >= 0 ? m->pin(m->ctx, map, RING_BYTES, err)
                : td_fail(err, TD_ERR_UNSUPPORTED,
                          "shm-staged: cannot share staging buffers of %zu bytes with this host: "
                          "%s",
                          RING_BYTES, strerror(errno));
    if (map) close(fd);
    if (!status) {
        d->pinned = map;
        d->ring_fd = ro;
        return TD_OK;
    }
    if (map) munmap(map, RING_BYTES);
    if (ro >= 0) close(ro);
    return status;
}

static const struct xfer_staging staging = {.poll = device_poll,
                                            .busy = device_busy,
                                            .landed = staged_landed,
                                            .lost = device_lost,
                                            .crc = device_crc};

td_status xfer_device_open(struct td_xfer *x, struct td_err *err)
{
    enum td_xfer_path named = x->self.path;
    bool only_ring = xfer_path_allows(named, TD_XFER_PATH_SHM_STAGED) && named != TD_XFER_PATH_AUTO;
    struct xfer_device *d = calloc(1, sizeof *d);
    if (!d) return td_fail(err, TD_ERR_NOMEM, "xfer: out of memory");
    x->device = d;
    x->staging = &staging;
    d->memory = x->pool.memory;
    d->rx.buffer = NO_BUFFER;
    d->max_runs = STAGE_BYTES / x->pool.block_bytes + 2 * FLIGHT_PIECES;
    if (d->max_runs < 4096) d->max_runs = 4096;
    d->runs = calloc(d->max_runs, sizeof *d->runs);
    if (!d->runs) return td_fail(err, TD_ERR_NOMEM, "xfer: out of memory");
    d->ring_fd = -1;
    td_status status = TD_OK;
    struct td_err why = {.msg = ""};
    if (xfer_path_allows(named, TD_XFER_PATH_SHM_STAGED)) status = open_shared_ring(d, &why);
    if (status && only_ring) return td_fail(err, status, "%s", why.msg);
    /* auto: it is not offered */
    if (status) xfer_path_tell(x, TD_XFER_PATH_SHM_STAGED, status, why.msg);
    if (!d->pinned) {
        void *pinned;
        status = d->memory->alloc_pinned(d->memory->ctx, RING_BYTES, &pinned, err);
        if (status) return status;
        d->pinned = pinned;
    }
    d->digest = d->pinned + (size_t)STAGE_BUFFERS * STAGE_BYTES;
    return TD_OK;
}

void xfer_device_close(struct td_xfer *x)
{
    struct xfer_device *d = x->device;
    if (!d) return;
    for (uint32_t i = 0; i < FLIGHTS; i++)
        if (d->flight[i].used && !d->is_lost)
            d->memory->wait(d->memory->ctx, d->flight[i].ticket, NULL);
    if (d->pinned && d->ring_fd >= 0) {
        d->memory->unpin(d->memory->ctx, d->pinned);
        munmap(d->pinned, RING_BYTES);
        close(d->ring_fd);
    } else if (d->pinned) {
        d->memory->release_pinned(d->memory->ctx, d->pinned);
    }
    free(d->runs);
    free(d);
    x->device = NULL;
    x->staging = NULL;
}
