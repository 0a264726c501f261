/* ipc.c - cuda-ipc: two processes of one host whose pools lie in device memory; the receiver's
 * device copies from the sender's pool.
 *
 * As on shm the unix socket of the grant shows that both sides share the host and the user, REF
 * names source blocks, and a control word per op tells the receiver whether they are still the op's
 * (here the second look is when the copy is complete). Before READY lies SETUP:
 *
 *   sender    DEVICE_OFFER: the handle of its allocation, where the pool lies in it, which device,
 *             64 random bytes that it has put behind the pool, and its control words as a
 *             descriptor
 *   receiver  opens the handle, reads those bytes through it, DEVICE_ACCEPT; or says why not, and
 *             the sender takes the next path
 *
 * So wrong handles, devices that cannot reach one another and containers that hide them show before
 * a block depends on it. A pool of several allocations (ranks with a device each) goes as a
 * description of them all, behind the offer. In one process a handle cannot be opened and need not
 * be: the address is good. The sender submits blocks when what computed them is known to be
 * complete (transfer.h), so no event travels between the processes. Many copies are under way at a
 * time, a batch of up to FLIGHT_BYTES each, neighbours joined. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/base/entropy.h"
#include "common/transfer/gpu/device_copy.h"

#define PROBE_BYTES ((size_t)TD_XFER_PROBE_BYTES)
_Static_assert(sizeof(((struct td_xfer_device_mem *)0)->probe) == TD_XFER_PROBE_BYTES,
               "the probe travels whole");

/* A number that no other process has, for as long as this one lives. */
static uint64_t this_process(void)
{
    static _Atomic uint64_t number;
    static _Atomic pid_t owner;
    if (atomic_load(&owner) != getpid()) { /* the first time, or after a fork */
        atomic_store(&number, td_random_u64() | 1);
        atomic_store(&owner, getpid());
    }
    return atomic_load(&number);
}

struct xfer_ipc_conn {
    struct xfer_local_conn local; /* receiver: source is the device's address of pool block 0 */
    void *peer_base; /* receiver: the sender's allocation, opened; NULL: it is this process's */
};

/* Makes the offer that peers will get. */
static td_status make_offer(struct td_xfer *x, const struct td_arena *arena, struct td_err *err)
{
    struct xfer_device *d = x->device;
    const struct td_device_memory *m = d->memory;
    struct td_xfer_device_mem *o = &d->offer.mem;
    uint64_t pool_bytes = (uint64_t)x->pool.block_bytes * (uint64_t)x->pool.n_blocks, ticket;
    if (!m->ipc_export && !m->pool_export)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "cuda-ipc: device %s hands no memory to other processes", m->name);
    if (arena->bytes - pool_bytes < PROBE_BYTES)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "cuda-ipc: the pool's allocation of %zu bytes has no room for a probe of "
                       "%zu behind its blocks",
                       arena->bytes, PROBE_BYTES);
    *o = (struct td_xfer_device_mem){.process = this_process(),
                                     .address = (uintptr_t)x->pool.base,
                                     .block_bytes = x->pool.block_bytes,
                                     .probe_offset = pool_bytes,
                                     .n_blocks = (uint32_t)x->pool.n_blocks,
                                     .n_words = x->core.max_ops};
    td_status status = m->pool_export
                           ? m->pool_export(m->ctx, d->offer.pool, &d->pool_bytes, err)
                           : m->ipc_export(m->ctx, x->pool.base, o->handle, &o->offset, err);
    if (status) return status;
    snprintf(o->uuid, sizeof o->uuid, "%s", m->uuid);
    snprintf(o->name, sizeof o->name, "%.63s", m->name);
    td_random_fill(o->probe, PROBE_BYTES);
    memcpy(d->digest, o->probe, PROBE_BYTES);
    struct td_device_run run = {
        .to = x->pool.base + pool_bytes, .from = d->digest, .bytes = PROBE_BYTES};
    status = m->copy(m->ctx, TD_COPY_TO_DEVICE, &run, 1, &ticket, err);
    if (!status) status = m->wait(m->ctx, ticket, err);
    d->offers = !status;
    return status;
}

static td_status ipc_open_side(struct td_xfer *x, const struct td_xfer_config *config,
                               struct td_err *err)
{
    if (config->memory || x->self.path != TD_XFER_PATH_CUDA_IPC) return TD_OK;
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "xfer: path cuda-ipc was asked for, and the pool is in the host's memory");
}

/* A pool in device memory: what copies of it go through, whatever the path, and the offer. */
static td_status ipc_mem_add(struct td_xfer *x, const struct td_arena *arena, struct td_err *err)
{
    struct td_err why = {.msg = ""};
    if (!x->pool.memory) return TD_OK;
    td_status status = xfer_device_open(x, err);
    if (status || x->listen.shm_fd < 0) return status;
    status = xfer_shm_make_words(x, &why);
    if (!xfer_path_allows(x->self.path, TD_XFER_PATH_CUDA_IPC))
        return status ? td_fail(err, status, "%s", why.msg) : TD_OK;
    if (!status) status = make_offer(x, arena, &why);
    if (status && x->self.path == TD_XFER_PATH_CUDA_IPC) return td_fail(err, status, "%s", why.msg);
    /* auto: it is not offered */
    if (status) xfer_path_tell(x, TD_XFER_PATH_CUDA_IPC, status, why.msg);
    return TD_OK;
}

static bool was_refused(const struct td_xfer *x, uint64_t incarnation)
{
    for (uint64_t i = 0; i < x->device->n_refused && i < REFUSED_PEERS; i++)
        if (x->device->refused[i] == incarnation) return true;
    return false;
}

static td_status ipc_fits(const struct td_xfer *x, const struct td_xfer_grant_blob *g,
                          struct td_err *err)
{
    if (g->device && x->device) return TD_OK;
    return td_fail(
        err, TD_ERR_UNSUPPORTED,
        "grant of %s: only cuda-ipc is allowed, and the pool of %s is in the host's memory",
        g->instance, x->device ? "it" : "this side");
}

static bool ipc_offers(const struct td_xfer *x, const struct td_xfer_grant_blob *g,
                       char why[TD_XFER_REASON_MAX])
{
    (void)why;
    return g->shm_name[0] && g->device && x->device && x->device->offers && x->shm &&
           !was_refused(x, g->incarnation);
}

static bool ipc_admits(const struct td_xfer *x, char why[TD_XFER_REASON_MAX])
{
    if (!x->device) xfer_say(why, "path cuda-ipc: its pool is in the host's memory");
    return x->device != NULL;
}

static bool ipc_open_conn(struct td_xfer *x, struct td_xfer_conn *c,
                          char reason[TD_XFER_REASON_MAX])
{
    struct td_xfer_frame f = {.type = TD_XFER_DEVICE_OFFER};
    xfer_say(reason, "could not hand over the pool");
    return xfer_shm_send_fds(c, &f, &x->device->offer,
                             sizeof x->device->offer.mem + x->device->pool_bytes, &x->shm->words_fd,
                             1);
}

/* The sender's pool, as this side's device reaches it. */
static td_status open_pool(struct td_xfer *x, struct xfer_ipc_conn *i,
                           const struct td_xfer_device_mem *mem, const uint8_t *pool,
                           size_t pool_bytes, char reason[TD_XFER_REASON_MAX])
{
    const struct td_device_memory *m = x->device->memory;
    struct td_err err = {.msg = ""};
    if (mem->process == this_process() && !pool_bytes) {
        /* it shares this process's address space: it could not lie to better effect */
        i->local.source = (const uint8_t *)(uintptr_t)mem->address;
        return TD_OK;
    }
    if (pool_bytes ? !m->pool_open : !m->ipc_open) {
        xfer_say(reason, "device %.60s opens no %s of other processes", m->name,
                 pool_bytes ? "pool of several devices" : "memory");
        return TD_ERR_UNSUPPORTED;
    }
    void *base = NULL;
    pthread_mutex_unlock(&x->lock); /* the driver takes its time */
    td_status status = pool_bytes ? m->pool_open(m->ctx, pool, pool_bytes, x->pool.block_bytes,
                                                 (int32_t)mem->n_blocks, &base, &err)
                                  : m->ipc_open(m->ctx, mem->handle, &base, &err);
    pthread_mutex_lock(&x->lock);
    if (status == TD_ERR_DEVICE) xfer_device_say_lost(x, err.msg);
    if (status) {
        xfer_say(reason, "%.90s: %.40s opens the memory of %.40s", err.msg, m->uuid, mem->uuid);
        return status == TD_ERR_DEVICE || status == TD_ERR_CORRUPT ? status : TD_ERR_UNSUPPORTED;
    }
    i->peer_base = base;
    i->local.source = (const uint8_t *)base + mem->offset;
    return TD_OK;
}

static td_status take_offer(struct td_xfer *x, struct td_xfer_conn *c,
                            const struct td_xfer_device_mem *mem, const uint8_t *pool,
                            size_t pool_bytes, char reason[TD_XFER_REASON_MAX])
{
    struct xfer_device *d = x->device;
    struct xfer_ipc_conn *i = c->own;
    const struct td_device_memory *m = d->memory;
    struct td_err err = {.msg = ""};
    td_status status;
    xfer_say(reason, "device offer: a field or the descriptor does not hold what it says");
    if (i->local.source || i->local.n_fds != 1 || mem->uuid[sizeof mem->uuid - 1] ||
        mem->name[sizeof mem->name - 1] || mem->process == 0)
        return TD_ERR_CORRUPT;
    if (mem->block_bytes != x->pool.block_bytes || mem->n_blocks < 1 || mem->n_blocks > 1u << 28 ||
        mem->probe_offset < mem->block_bytes * mem->n_blocks ||
        mem->probe_offset > UINT64_MAX / 4 || mem->offset > UINT64_MAX / 4 ||
        (pool_bytes && (mem->offset || mem->probe_offset != mem->block_bytes * mem->n_blocks)))
        return TD_ERR_CORRUPT;
    if ((status = xfer_shm_take_words(&i->local, i->local.fds[0], mem->n_words))) return status;
    if (d->is_lost) {
        xfer_say(reason, "%s", d->lost);
        return TD_ERR_DEVICE;
    }
    if ((status = open_pool(x, i, mem, pool, pool_bytes, reason))) return status;
    i->local.n_source_blocks = (int32_t)mem->n_blocks;
    if (xfer_device_read(d, i->local.source + mem->probe_offset, PROBE_BYTES, &err)) {
        xfer_device_say_lost(x, err.msg); /* a read that faults takes the device with it */
        xfer_say(reason, "device %.30s: reading the probe: %.100s", m->name, err.msg);
        return TD_ERR_DEVICE;
    }
    if (memcmp(d->digest, mem->probe, PROBE_BYTES) != 0) {
        xfer_say(reason,
                 "%.40s reads other bytes than %.40s has put there: the handle is not its pool's",
                 m->uuid, mem->uuid);
        return TD_ERR_UNSUPPORTED;
    }
    return TD_OK;
}

static void on_offer(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct td_xfer_frame f = {.type = TD_XFER_DEVICE_ACCEPT};
    struct td_xfer_device_mem mem;
    char reason[TD_XFER_REASON_MAX];
    memcpy(&mem, c->rx.payload, sizeof mem);
    td_status status =
        take_offer(x, c, &mem, c->rx.payload + sizeof mem, c->rx.frame.length - sizeof mem, reason);
    if (status == TD_ERR_CORRUPT) {
        xfer_conn_refuse(x, c, reason);
    } else if (status) {
        xfer_path_refuse_offer(x, c, TD_XFER_DEVICE_ACCEPT, status, reason);
    } else {
        xfer_conn_queue(x, c, &f, NULL);
        xfer_path_ready(x, c);
    }
}

static bool ipc_expects(const struct td_xfer_conn *c, uint8_t type)
{
    return c->state == XFER_CONN_SETUP &&
           type == (c->initiator ? TD_XFER_DEVICE_ACCEPT : TD_XFER_DEVICE_OFFER);
}

static void ipc_on_frame(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_device *d = x->device;
    if (c->rx.frame.type == TD_XFER_DEVICE_OFFER) {
        on_offer(x, c);
    } else if (c->rx.frame.status) {
        uint64_t peer = c->peer.incarnation; /* it can not: it is not asked again */
        if (c->rx.frame.status == TD_ERR_UNSUPPORTED && !was_refused(x, peer))
            d->refused[d->n_refused++ % REFUSED_PEERS] = peer;
        xfer_path_offer_refused(x, c);
    } else {
        xfer_path_ready(x, c);
    }
}

static const char *ipc_late(struct td_xfer *x, struct td_xfer_conn *c)
{
    (void)x, (void)c;
    return "cuda-ipc: the set-up was not over in time";
}

/* Copies from this connection's peer are waited for: what they read must not go away under them. */
static void ipc_close(struct td_xfer *x, struct td_xfer_conn *c)
{
    struct xfer_ipc_conn *i = c->own;
    if (i->local.source) xfer_flights_wait(x, c->id);
    if (i->peer_base) x->device->memory->ipc_close(x->device->memory->ctx, i->peer_base);
    i->peer_base = NULL;
    xfer_shm_conn_close(x, c);
}

/* Issues a batch of copies, one in a turn: others may have come. */
static bool ipc_work(struct td_xfer *x, uint64_t now_ns)
{
    struct xfer_device *d = x->device;
    (void)now_ns;
    if (!d) return false;
    struct td_xfer_copy copy;
    struct flight *f = NULL;
    size_t n_bytes = 0;
    while (n_bytes < FLIGHT_BYTES &&
           (f ? f->n < FLIGHT_PIECES && d->n_runs < d->max_runs : d->n_pulls < PULLS)) {
        size_t room = d->max_runs - (f ? d->n_runs : 0);
        if (!td_xfer_core_copy_next(&x->core, &d->pull_turns, TD_XFER_BY_DEVICE,
                                    x->pool.block_bytes, FLIGHT_BYTES - n_bytes, (int32_t)room,
                                    &copy))
            break;
        if (!f) f = xfer_flight_new(d, NO_BUFFER);
        struct td_xfer_conn *c = xfer_conn_by_id(x, copy.conn);
        const struct xfer_ipc_conn *i = c ? c->own : NULL;
        TD_ASSERT(i && i->local.source); /* OPEN came after SETUP */
        const struct td_xfer_slot *s = &x->core.slots[copy.slot];
        f->piece[f->n++] = (struct piece){.id = copy.slot,
                                          .conn = copy.conn,
                                          .handle = copy.handle,
                                          .n_bytes = copy.n_bytes,
                                          .word = &i->local.words[copy.op]};
        n_bytes += copy.n_bytes;
        c->last_use_ns = xfer_now(x);
        for (int32_t b = copy.grant_block; b < copy.grant_block + copy.n_blocks; b++)
            xfer_runs_add(d, xfer_block(x, s->dst[b]) + copy.offset,
                          i->local.source + (uint64_t)s->src[b] * x->pool.block_bytes + copy.offset,
                          copy.n_blocks == 1 ? copy.n_bytes : x->pool.block_bytes);
    }
    if (f) xfer_flight_go(x, f, TD_COPY_ON_DEVICE);
    return f != NULL;
}

const struct td_transfer_backend td_transfer_ipc = {
    .path = TD_XFER_PATH_CUDA_IPC,
    .name = "cuda-ipc",
    .way = TD_XFER_BY_DEVICE,
    .local = true,
    .has_setup = true,
    .needs_device = true,
    .conn_bytes = sizeof(struct xfer_ipc_conn),
    .side = {.open = ipc_open_side, .mem_add = ipc_mem_add, .close = xfer_device_close},
    .choice = {.fits = ipc_fits, .offers = ipc_offers, .admits = ipc_admits},
    .conn = {.dial = xfer_shm_dial,
             .open_conn = ipc_open_conn,
             .expects = ipc_expects,
             .on_frame = ipc_on_frame,
             .late = ipc_late,
             .may_open = xfer_shm_may_open,
             .n_source_blocks = xfer_shm_n_source_blocks,
             .close = ipc_close},
    .bytes = {.read = xfer_shm_recv},
    .turn = {.work = ipc_work},
};
