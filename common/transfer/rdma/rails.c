/* rails.c - the devices that rdma queue pairs are made of: which there are, what is taken of them,
 * the pool on each, and how one comes back.
 *
 * A port that becomes active is used again; a device that died, or had no active port at the start,
 * is opened and registered anew by a thread beside this one (a pool takes seconds), first after 1
 * s, then after twice as long, up to 30 s. The initiator of a set that lacks a rail which both
 * sides have dials a second connection with all that are up, at once when one came back here, else
 * at the same intervals, because the peer's may have; when more rails than the old one's have been
 * probed, ops start there, and the old one is closed when its last has ended. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "common/transfer/rdma/rdma.h"

#define AVOID_NS TD_NS_PER_S
#define AVOID_MAX_NS (300 * TD_NS_PER_S)

bool xfer_rail_is_usable(const struct rail *rail)
{
    return rail->mr && !rail->dead && rail->port.active;
}

bool xfer_rail_tells(const struct rail *rail) { return rail->cq && !rail->dead; }

bool xfer_rdma_usable(const struct td_xfer *x)
{
    for (uint32_t i = 0; x->rdma && i < x->rdma->n_rails; i++)
        if (xfer_rail_is_usable(&x->rdma->rail[i])) return true;
    return false;
}

td_status xfer_rail_pick_gid(const struct xfer_rdma *r, struct rail *rail, struct td_err *err)
{
    struct td_vb_gid gids[TD_RDMA_GIDS_MAX];
    struct td_rdma_gid_ask ask = {.device = rail->name,
                                  .ethernet = rail->port.ethernet,
                                  .gids = gids,
                                  .index = r->config.gid_index};
    uint32_t positions[TD_RDMA_GIDS_MAX], n = 0;
    for (uint32_t i = 0, misses = 0; i < rail->port.n_gids && ask.n_gids < TD_RDMA_GIDS_MAX; i++) {
        bool wanted = r->config.gid_index >= 0 && i == (uint32_t)r->config.gid_index;
        if (misses >= 16 && !wanted) continue; /* the table's used part is at its start */
        if (r->vb->query_gid(rail->device, r->config.port, i, &gids[ask.n_gids]))
            misses++;
        else
            ask.n_gids++;
    }
    td_status status = td_rdma_gid_rank(&ask, positions, &n, err);
    if (!status) rail->gid = gids[positions[0]];
    return status;
}

struct td_vb_route xfer_rail_route(const struct xfer_rdma *r, const struct rail *rail)
{
    return (struct td_vb_route){.port = r->config.port,
                                .sl = r->config.service_level,
                                .gid_index = rail->gid.index,
                                .timeout = r->config.timeout,
                                .retry = r->config.retry,
                                .rnr_retry = (uint8_t)(r->config.rnr_retry - 1)};
}

/* What it had is gone, or somebody else's. */
static void rail_forget(struct rail *rail)
{
    size_t kept = offsetof(struct rail, device);
    memset((char *)rail + kept, 0, sizeof *rail - kept);
}

static void rail_close(const struct xfer_rdma *r, struct rail *rail)
{
    const struct td_verbs *vb = r->vb;
    for (uint32_t i = 0; rail->mr && i < r->n_regions; i++) vb->dereg(rail->mr[i]);
    free(rail->mr);
    xfer_flush_rail_close(r, rail);
    vb->dereg(rail->probe_mr);
    vb->srq.destroy(rail->srq);
    vb->cq_destroy(rail->cq);
    if (rail->device) vb->close(rail->device);
    rail_forget(rail);
    rail->received = rail->flushing = false;
}

/* What queue pairs on this rail share: completion queue, probe cells, shared receive queue. */
static td_status rail_make(const struct xfer_rdma *r, struct rail *rail, struct td_err *err)
{
    const struct td_verbs *vb = r->vb;
    size_t bytes = (size_t)2 * MAX_QP_SETS * TD_XFER_QPS_MAX * CELL;
    uint32_t srq_wr = rail->plan.srq_depth;
    int e = vb->cq_create(rail->device, rail->plan.cq_depth, &rail->cq);
    if (e)
        return td_fail(err, TD_ERR_DEVICE, "rdma: device %s: completion queue of %u: %s",
                       rail->name, rail->plan.cq_depth, strerror(e));
    e = vb->reg(rail->device, r->cells, bytes, TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE,
                &rail->probe_mr);
    if (e)
        return td_fail(err, TD_ERR_DEVICE, "rdma: device %s: registering %zu bytes: %s", rail->name,
                       bytes, strerror(e));
    /* no SRQ is no error: every queue pair then has receives of its own */
    if (!srq_wr || vb->srq.create(rail->device, srq_wr, &rail->srq)) return TD_OK;
    if (vb->srq.post(rail->srq, RECV_ID, srq_wr) == 0) {
        rail->cq_used = srq_wr;
    } else {
        vb->srq.destroy(rail->srq);
        rail->srq = NULL;
    }
    return TD_OK;
}

/* Asks the device, which is open, what it is. */
static td_status rail_query(const struct xfer_rdma *r, struct rail *rail, struct td_err *err)
{
    int e = r->vb->query(rail->device, &rail->limits);
    if (!e) e = r->vb->query_port(rail->device, r->config.port, &rail->port);
    if (e)
        return td_fail(err, TD_ERR_DEVICE, "rdma: device %s port %u: query: %s", rail->name,
                       r->config.port, strerror(e));
    if (r->config.windows && (!rail->limits.mw_type2 || !rail->limits.max_mw))
        return td_fail(
            err, TD_ERR_UNSUPPORTED,
            "rdma: device %s has no memory windows of type 2, and rdma_windows asks for them",
            rail->name);
    if (!rail->port.active)
        return td_fail(
            err, TD_ERR_NOT_FOUND,
            "rdma: device %s port %u is not active: check the cable, the switch and `ip link`",
            rail->name, r->config.port);
    td_status status = xfer_rail_pick_gid(r, rail, err);
    if (status) return status == TD_ERR_UNSUPPORTED ? TD_ERR_NOT_FOUND : status;
    return td_rdma_plan(rail->name, &rail->limits, &rail->port, &rail->plan, err);
}

/* Opens rail->name. TD_ERR_NOT_FOUND: its port is not active or has no address. Any thread. */
static td_status rail_open(const struct xfer_rdma *r, struct rail *rail, struct td_err *err)
{
    int e = r->vb->open(r->vb, rail->name, &rail->device);
    if (e) return td_fail(err, TD_ERR_DEVICE, "rdma: device %s: open: %s", rail->name, strerror(e));
    td_status status = rail_query(r, rail, err);
    if (!status) status = rail_make(r, rail, err);
    if (status) rail_close(r, rail);
    return status;
}

/* The progress thread hears of it from now on. */
static td_status rail_watch(struct td_xfer *x, struct rail *rail, struct td_err *err)
{
    const struct td_verbs *vb = x->rdma->vb;
    uint64_t key = XFER_KEY_BACKEND + 2 * (uint64_t)(rail - x->rdma->rail);
    if (!xfer_watch_fd(x, vb->cq_fd(rail->cq), key) ||
        !xfer_watch_fd(x, vb->async_fd(rail->device), key + 1))
        return td_fail(err, TD_ERR_DEVICE, "rdma: device %s: epoll: %s", rail->name,
                       strerror(errno));
    vb->cq_arm(rail->cq);
    return TD_OK;
}

/* It is not there: tried again after a while, unless for_good. */
static void rail_absent(struct td_xfer *x, struct rail *rail, bool for_good)
{
    rail->refused = for_good;
    rail->reopen_wait_ns = xfer_next_wait(rail->reopen_wait_ns, REOPEN_NS, REOPEN_MAX_NS);
    rail->reopen_ns = xfer_now(x) + rail->reopen_wait_ns;
}

/* AUTO goes on without this device, and says why. What no time mends is not tried again. */
static void rail_lost(struct td_xfer *x, struct rail *rail, td_status status, const char *why)
{
    rail_absent(x, rail, status == TD_ERR_UNSUPPORTED || status == TD_ERR_INVALID);
    xfer_path_tell(x, TD_XFER_PATH_RDMA, status, why);
}

_Static_assert(XFER_KEY_BACKEND + 2 * TD_XFER_RAILS_MAX <= XFER_KEY_END, "keys of epoll");

static td_status settle_config(struct xfer_rdma *r, struct td_err *err)
{
    struct td_xfer_rdma_config *c = &r->config;
    if (!c->port) c->port = 1;
    if (!c->timeout) c->timeout = TD_RDMA_TIMEOUT;
    if (!c->retry) c->retry = TD_RDMA_RETRY;
    if (!c->rnr_retry) c->rnr_retry = TD_RDMA_RNR_RETRY + 1;
    if (!c->srq_peers) c->srq_peers = 64;
    if (!c->bytes_in_flight) c->bytes_in_flight = 8u << 20;
    if (c->qps_per_rail > TD_XFER_RAIL_QPS_MAX || c->timeout > 31 || c->retry > 7 ||
        c->rnr_retry > 8 || c->service_level > 15)
        return td_fail(err, TD_ERR_INVALID,
                       "rdma: qps_per_rail %u (1..%d), timeout %u (1..31), retry %u (1..7) or "
                       "service_level %u (0..15) is out of range",
                       c->qps_per_rail, TD_XFER_RAIL_QPS_MAX, c->timeout, c->retry,
                       c->service_level);
    r->quarantine_ns = 4 * (UINT64_C(4096) << c->timeout);
    return TD_OK;
}

/* Which devices are rails: those that the operator names, else all. n_listed: of this host. */
static td_status name_rails(struct xfer_rdma *r, uint32_t *ret_n_listed, bool *ret_named,
                            struct td_err *err)
{
    char names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX];
    uint32_t n_names = 0;
    int e = r->vb->list(r->vb, names, &n_names);
    if (e && e != ENOSYS)
        return td_fail(err, TD_ERR_DEVICE, "rdma: listing devices (%s): %s", r->vb->name,
                       strerror(e));
    if (e) n_names = 0; /* the kernel has no RDMA */
    for (const char *p = r->config.devices ? r->config.devices : ""; *p;) {
        size_t n = strcspn(p, ",");
        if (n == 0 || n >= TD_VB_NAME_MAX || r->n_rails == TD_XFER_RAILS_MAX)
            return td_fail(err, TD_ERR_INVALID,
                           "rdma: devices \"%s\" must be at most %d names, separated by commas",
                           r->config.devices, TD_XFER_RAILS_MAX);
        snprintf(r->rail[r->n_rails++].name, TD_VB_NAME_MAX, "%.*s", (int)n, p);
        p += n + (p[n] == ',');
    }
    *ret_named = r->n_rails > 0;
    for (uint32_t i = 0; i < n_names && !*ret_named && r->n_rails < TD_XFER_RAILS_MAX; i++)
        memcpy(r->rail[r->n_rails++].name, names[i], TD_VB_NAME_MAX);
    *ret_n_listed = n_names;
    return TD_OK;
}

td_status xfer_rdma_open(struct td_xfer *x, const struct td_xfer_config *side, struct td_err *err)
{
    const struct td_xfer_rdma_config *config = side->rdma;
    if (!config && x->self.path == TD_XFER_PATH_RDMA)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "xfer: path rdma was asked for, and there is no RDMA provider");
    if (!config || !xfer_path_allows(x->self.path, TD_XFER_PATH_RDMA)) return TD_OK;
    struct xfer_rdma *r = calloc(1, sizeof *r);
    uint32_t n_listed = 0, n_open = 0;
    bool named = false;
    struct td_err why = {.msg = ""};
    if (!r) return td_fail(err, TD_ERR_NOMEM, "rdma: out of memory");
    x->rdma = r;
    r->flush.dmabuf_fd = -1;
    r->vb = config->verbs;
    r->config = *config;
    td_status status = settle_config(r, err);
    if (status) return status;
    size_t cell_bytes = (size_t)2 * MAX_QP_SETS * TD_XFER_QPS_MAX * CELL;
    r->cells = aligned_alloc(4096, cell_bytes);
    r->op_keys = calloc(x->core.max_ops, sizeof(uint32_t *));
    if (config->windows) r->grant = calloc(x->core.max_slots, sizeof *r->grant);
    if (!r->cells || !r->op_keys || (config->windows && !r->grant))
        return td_fail(err, TD_ERR_NOMEM, "rdma: out of memory");
    memset(r->cells, 0, cell_bytes);
    status = name_rails(r, &n_listed, &named, err);
    for (uint32_t i = 0; i < r->n_rails && !status; i++) {
        struct rail *rail = &r->rail[i];
        rail->index = i;
        status = rail_open(r, rail, &why);
        if (!status && (status = rail_watch(x, rail, &why))) rail_close(r, rail);
        n_open += !status;
        if (status == TD_ERR_NOT_FOUND && !named) {
            rail_absent(x, rail, false); /* a cable, a switch: it may come yet */
        } else if (status) {
            if (status != TD_ERR_NOT_FOUND && (named || x->self.path == TD_XFER_PATH_RDMA ||
                                               (config->windows && status == TD_ERR_UNSUPPORTED)))
                return td_fail(err, status, "%s", why.msg);
            rail_lost(x, rail, status, why.msg);
        }
        status = TD_OK;
    }
    if (status || n_open || (r->n_rails && x->self.path == TD_XFER_PATH_AUTO)) return status;
    if (x->self.path == TD_XFER_PATH_RDMA)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "path rdma was asked for, and there is no usable RDMA device: %s",
                       n_listed ? why.msg : "none is listed");
    xfer_rdma_close(x); /* auto: none is fine */
    return TD_OK;
}

/* Registers the pool on one rail. Any thread. */
static td_status rail_register(const struct td_xfer *x, struct rail *rail, struct td_err *err)
{
    const struct xfer_rdma *r = x->rdma;
    uint64_t total = (uint64_t)x->pool.block_bytes * (uint64_t)x->pool.n_blocks;
    /* it came later than the others, which had decided */
    if (rail->limits.max_mr_bytes && rail->limits.max_mr_bytes < r->region_bytes)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "rdma: device %s registers at most %" PRIu64
                       " bytes at a time, and the pool is split by %" PRIu64,
                       rail->name, rail->limits.max_mr_bytes, r->region_bytes);
    /* A window needs no right of the registration below it but that it may be bound there. */
    unsigned access = TD_VB_LOCAL_WRITE | (r->config.windows ? TD_VB_MW_BIND : TD_VB_REMOTE_WRITE) |
                      (r->config.pull ? TD_VB_REMOTE_READ : 0) |
                      (rail->limits.relaxed_ordering ? TD_VB_RELAXED_ORDERING : 0);
    rail->mr = calloc(r->n_regions, sizeof(struct td_vb_mr *));
    if (!rail->mr) return td_fail(err, TD_ERR_NOMEM, "rdma: out of memory");
    for (uint64_t k = 0; k < r->n_regions; k++) {
        uint64_t at = k * r->region_bytes, n = td_min_u64(total - at, r->region_bytes);
        if (x->device) {
            td_status status =
                xfer_flush_reg(x, rail->device, rail->name, at, n, access, &rail->mr[k], err);
            if (status) return status;
            continue;
        }
        int e = r->vb->reg(rail->device, x->pool.base + at, n, access, &rail->mr[k]);
        if (!e) continue;
        struct rlimit lock = {0};
        char limit[32] = "unlimited";
        getrlimit(RLIMIT_MEMLOCK, &lock);
        if (lock.rlim_cur != RLIM_INFINITY)
            snprintf(limit, sizeof limit, "%" PRIu64 " KiB", (uint64_t)lock.rlim_cur >> 10);
        return td_fail(err, TD_ERR_DEVICE,
                       "rdma: device %s: registering %" PRIu64
                       " MiB of the KV pool: %s (the locked-memory limit is %s%s)",
                       rail->name, n >> 20, strerror(e), limit,
                       lock.rlim_cur != RLIM_INFINITY
                           ? "; raise it: ulimit -l unlimited, LimitMEMLOCK=infinity, or the "
                             "capability IPC_LOCK in a pod"
                           : "");
    }
    return x->device ? xfer_flush_rail_open(x, rail, err) : TD_OK;
}

/* How the pool is split into registrations, the same on every rail. */
static td_status choose_regions(struct td_xfer *x, struct td_err *err)
{
    struct xfer_rdma *r = x->rdma;
    uint64_t max = UINT64_MAX, total = (uint64_t)x->pool.block_bytes * (uint64_t)x->pool.n_blocks;
    for (uint32_t i = 0; i < r->n_rails; i++)
        if (r->rail[i].device && r->rail[i].limits.max_mr_bytes &&
            r->rail[i].limits.max_mr_bytes < max)
            max = r->rail[i].limits.max_mr_bytes;
    if (max < x->pool.block_bytes)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "rdma: a block has %zu bytes and the device registers at most %" PRIu64
                       " at a time",
                       x->pool.block_bytes, max);
    r->region_bytes = max < total ? max / x->pool.block_bytes * x->pool.block_bytes : total;
    uint64_t n_regions = (total + r->region_bytes - 1) / r->region_bytes;
    if (n_regions * r->n_rails > TD_XFER_RKEYS_MAX)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "rdma: a pool of %" PRIu64 " MiB needs %" PRIu64
                       " registrations on each of %u devices, more than %d in all",
                       total >> 20, n_regions, r->n_rails, TD_XFER_RKEYS_MAX);
    r->n_regions = (uint32_t)n_regions;
    return TD_OK;
}

td_status xfer_rdma_mem_add(struct td_xfer *x, const struct td_arena *arena, struct td_err *err)
{
    struct xfer_rdma *r = x->rdma;
    struct td_err why = {.msg = ""};
    if (!r) return TD_OK;
    td_status layout = choose_regions(x, &why);
    if (layout && x->self.path == TD_XFER_PATH_RDMA) return td_fail(err, layout, "%s", why.msg);
    r->has_pool = !layout;
    if (layout) xfer_path_tell(x, TD_XFER_PATH_RDMA, layout, why.msg);
    if (!layout && x->device) xfer_flush_mem_add(x, arena->bytes);
    for (uint32_t i = 0; i < r->n_rails; i++) {
        struct rail *rail = &r->rail[i];
        if (layout) rail->refused = true;
        if (!rail->device) continue;
        td_status status = layout ? layout : rail_register(x, rail, &why);
        if (!status) continue;
        if (x->self.path == TD_XFER_PATH_RDMA) return td_fail(err, status, "%s", why.msg);
        rail_close(r, rail);
        if (!layout) rail_lost(x, rail, status, why.msg);
    }
    return TD_OK;
}

/* --- rails that come back --------------------------------------------------------------------- */

static void *revive(void *ctx)
{
    struct revival *v = ctx;
    const struct xfer_rdma *r = v->x->rdma;
    rail_close(r, &v->old);
    memcpy(v->fresh.name, v->old.name, sizeof v->fresh.name);
    v->fresh.index = v->at;
    v->status = rail_open(r, &v->fresh, &v->err);
    if (!v->status && (v->status = rail_register(v->x, &v->fresh, &v->err)))
        rail_close(r, &v->fresh);
    atomic_store(&v->done, true);
    xfer_ring(v->x);
    return NULL;
}

static void revival_over(struct td_xfer *x)
{
    struct xfer_rdma *r = x->rdma;
    struct revival *v = &r->revival;
    struct rail *rail = &r->rail[v->at];
    pthread_join(v->thread, NULL);
    v->runs = false;
    if (!v->status) {
        /* one that fails again at once is avoided for longer */
        uint64_t avoid_ns = rail->avoid_ns, last = rail->last_error_ns;
        *rail = v->fresh;
        rail->avoid_ns = avoid_ns;
        rail->last_error_ns = last;
        if (rail_watch(x, rail, NULL) == TD_OK) {
            r->n_ups++;
            return;
        }
        rail_close(r, rail);
    }
    rail_absent(x, rail, v->status == TD_ERR_UNSUPPORTED);
}

void xfer_rdma_revive(struct td_xfer *x, uint64_t now)
{
    struct xfer_rdma *r = x->rdma;
    if (r->revival.runs && atomic_load(&r->revival.done)) revival_over(x);
    for (uint32_t i = 0; i < r->n_rails && r->has_pool && !r->revival.runs; i++) {
        struct rail *rail = &r->rail[i];
        if (rail->refused || (rail->device && !rail->dead)) continue;
        if (rail->dead && !rail->reopen_ns) rail_absent(x, rail, false);
        bool used = false;
        EACH_QP_SET (r, set) used |= xfer_qp_set_uses(set, i);
        if (used || now < rail->reopen_ns) continue;
        r->revival = (struct revival){.x = x, .at = i, .old = *rail};
        rail_forget(rail); /* it is the thread's */
        r->revival.runs = pthread_create(&r->revival.thread, NULL, revive, &r->revival) == 0;
        if (!r->revival.runs) *rail = r->revival.old;
    }
}

uint64_t xfer_rdma_due(const struct td_xfer *x)
{
    uint64_t due = TD_NEVER_NS;
    if (!x->rdma) return due;
    for (uint32_t i = 0; i < x->rdma->n_rails && x->rdma->has_pool; i++) {
        const struct rail *rail = &x->rdma->rail[i];
        if (!rail->refused && (!rail->device || rail->dead) && rail->reopen_ns < due)
            due = rail->reopen_ns;
    }
    EACH_QP_SET (x->rdma, set)
        if (set->end.state == QP_SET_DOOMED && set->end.at_ns < due) due = set->end.at_ns;
    return due;
}

void xfer_rail_erred(struct td_xfer *x, uint32_t i)
{
    struct rail *rail = &x->rdma->rail[i];
    uint64_t now = xfer_now(x);
    bool again = now - rail->last_error_ns < 2 * rail->avoid_ns;
    rail->avoid_ns = xfer_next_wait(again ? rail->avoid_ns : 0, AVOID_NS, AVOID_MAX_NS);
    rail->last_error_ns = now;
    rail->avoid_until_ns = now + rail->avoid_ns;
    x->rdma->n_rail_errors++;
}

void xfer_rails_close(struct xfer_rdma *r)
{
    if (r->revival.runs) {
        pthread_join(r->revival.thread, NULL);
        rail_close(r, &r->revival.fresh);
    }
    for (uint32_t i = 0; i < TD_XFER_RAILS_MAX; i++)
        if (r->rail[i].device) rail_close(r, &r->rail[i]);
}
