/* flush.c - rdma with a pool in device memory: how NICs come to it (GPUDirect), and when what they
 * wrote may be used.
 *
 * Registration: a dma-buf of the pool, exported once and imported by every rail, with the offset's
 * place in its page kept (iova); where there is none the plain call, which an nvidia_peermem that
 * is loaded answers. Neither: refused, with both reasons and what to install.
 *
 * Visibility. A completion proves that the NIC has handed its writes to PCIe, not that work which
 * the device starts afterwards sees them. The driver says for its device (rdma_order) whether it
 * does; with several rails the writes come by ways of their own. Where it is not sure, each rail
 * READs 64 bytes of the same memory through a queue pair to itself: PCIe lets no read pass the
 * writes before it. Slots stay VERIFYING meanwhile. One round is under way at a time and takes
 * everything that had completed when it began:
 *
 *   slots DUE --xfer_rdma_flush: a READ on every rail--> RUNNING --every READ complete--> READY (or
 *       digests), or free --a READ failed or takes a peer time-out, a rail that brought data
 *       died--> FAILED, or free
 *
 * Writes that end without a last word (an op that failed, a peer that was fenced) are flushed, too,
 * before their blocks are free. A rail that is dead brings nothing any more when its quarantine is
 * over. The 64 bytes lie behind the pool where its allocation has room, and are all of it that
 * these queue pairs' key can read. Source: NVIDIA's guide "GPUDirect RDMA". */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/device_memory.h"
#include "common/transfer/rdma/rdma.h"

void xfer_flush_mem_add(struct td_xfer *x, size_t arena_bytes)
{
    struct xfer_rdma *r = x->rdma;
    const struct td_device_memory *m = x->pool.memory;
    uint64_t pool_bytes = (uint64_t)x->pool.block_bytes * (uint64_t)x->pool.n_blocks;
    struct td_err err = {.msg = ""};
    int fd = -1;
    if (!m->dmabuf)
        xfer_say(r->flush.dmabuf_why, "no dma-buf of this device");
    else if (m->dmabuf(m->ctx, x->pool.base, arena_bytes, &fd, &r->flush.dmabuf_offset, &err))
        xfer_say(r->flush.dmabuf_why, "%.150s", err.msg);
    else
        r->flush.dmabuf_fd = fd;
    r->flush.at = arena_bytes - pool_bytes >= CELL ? pool_bytes : 0;
    enum td_xfer_gpu_flush flush = r->config.gpu_flush;
    x->core.flush_writes =
        flush == TD_XFER_GPU_FLUSH_ON || (flush == TD_XFER_GPU_FLUSH_AUTO &&
                                          (m->rdma_order < TD_RDMA_ORDER_OWNER || r->n_rails > 1));
    r->flush.cells = aligned_alloc(4096, 4096);
}

td_status xfer_flush_reg(const struct td_xfer *x, struct td_vb_device *device, const char *name,
                         uint64_t at, uint64_t n_bytes, unsigned access, struct td_vb_mr **ret_mr,
                         struct td_err *err)
{
    const struct xfer_rdma *r = x->rdma;
    char why[TD_XFER_REASON_MAX];
    int e = r->flush.dmabuf_fd < 0 ? EOPNOTSUPP
                                   : r->vb->reg_dmabuf(device, r->flush.dmabuf_offset + at, n_bytes,
                                                       (uint64_t)(uintptr_t)x->pool.base + at,
                                                       r->flush.dmabuf_fd, access, ret_mr);
    if (!e) return TD_OK;
    if (r->flush.dmabuf_fd < 0)
        memcpy(why, r->flush.dmabuf_why, sizeof why);
    else
        xfer_say(why, "the NIC takes it not: %s", strerror(e));
    e = r->vb->reg(device, x->pool.base + at, n_bytes, access, ret_mr);
    if (!e) return TD_OK;
    return td_fail(err, TD_ERR_UNSUPPORTED,
                   "rdma: %s cannot reach the memory of %.40s. dma-buf: %.100s. nvidia_peermem: "
                   "%s. It takes the open GPU kernel modules, "
                   "Linux 5.12 and rdma-core 34, or a loaded nvidia_peermem",
                   name, x->pool.memory->name, why, strerror(e));
}

td_status xfer_flush_rail_open(const struct td_xfer *x, struct rail *rail, struct td_err *err)
{
    const struct xfer_rdma *r = x->rdma;
    const struct td_verbs *vb = r->vb;
    uint8_t *cell = r->flush.cells + (size_t)(rail->index) * CELL;
    struct td_vb_qp_caps caps = {.send_wr = 1, .recv_wr = 1, .send_sge = 1};
    if (!x->core.flush_writes) return TD_OK;
    if (!r->flush.cells) return td_fail(err, TD_ERR_NOMEM, "rdma: out of memory");
    td_status status =
        xfer_flush_reg(x, rail->device, rail->name, r->flush.at, CELL,
                       TD_VB_LOCAL_WRITE | TD_VB_REMOTE_READ, &rail->flush_from, err);
    if (status) return status;
    struct td_vb_route route = xfer_rail_route(r, rail);
    struct td_rdma_side itself = {rail->port.ethernet, rail->plan.mtu_bytes, 1, 1};
    route.remote_lid = rail->port.lid;
    td_rdma_settle(&itself, &itself, &route, NULL);
    memcpy(route.remote_gid, rail->gid.raw, sizeof route.remote_gid);
    int e = vb->reg(rail->device, cell, CELL, TD_VB_LOCAL_WRITE, &rail->flush_to);
    if (!e) e = vb->cq_create(rail->device, 4, &rail->flush_cq);
    if (!e) e = vb->qp_create(rail->device, rail->flush_cq, &caps, &rail->flush_qp);
    if (!e) e = vb->qp_init(rail->flush_qp, r->config.port, 0, TD_VB_REMOTE_READ);
    if (!e) {
        route.remote_qp = rail->flush_qp->num;
        e = vb->qp_rtr(rail->flush_qp, &route);
    }
    if (!e) e = vb->qp_rts(rail->flush_qp, &route);
    return e ? td_fail(
                   err, TD_ERR_DEVICE,
                   "rdma: %s: a queue pair to itself, which makes writes to the GPU visible: %s",
                   rail->name, strerror(e))
             : TD_OK;
}

void xfer_flush_rail_close(const struct xfer_rdma *r, struct rail *rail)
{
    r->vb->qp_destroy(rail->flush_qp);
    r->vb->cq_destroy(rail->flush_cq);
    r->vb->dereg(rail->flush_to);
    r->vb->dereg(rail->flush_from);
    rail->flush_qp = NULL;
    rail->flush_cq = NULL;
    rail->flush_from = rail->flush_to = NULL;
}

static bool post(struct td_xfer *x, struct rail *rail)
{
    struct xfer_rdma *r = x->rdma;
    uint32_t n;
    if (!rail->flush_qp || rail->dead) return false;
    struct td_vb_send wr = {
        .id = 1,
        .op = TD_VB_READ,
        .signaled = true,
        .n_sge = 1,
        .sge = {{.addr = rail->flush_to->addr, .bytes = CELL, .lkey = rail->flush_to->lkey}},
        .remote_addr = rail->flush_from->addr,
        .rkey = rail->flush_from->rkey};
    return r->vb->post_send(rail->flush_qp, &wr, 1, &n) == 0;
}

bool xfer_rdma_flush(struct td_xfer *x)
{
    struct xfer_rdma *r = x->rdma;
    if (!r->flush.runs) {
        if (!td_xfer_core_flush_begin(&x->core)) return false;
        r->flush.runs = true;
        r->flush.failed = false;
        r->flush.until_ns = xfer_now(x) + x->peer_timeout_ns;
        for (uint32_t i = 0; i < r->n_rails; i++) {
            struct rail *rail = &r->rail[i];
            /* it failed in the last round */
            if (rail->mr && !rail->dead && !rail->flush_qp && xfer_flush_rail_open(x, rail, NULL))
                xfer_flush_rail_close(r, rail);
            rail->flushing = post(x, rail);
            /* what it brought may never be seen */
            if (rail->received && !rail->flushing) r->flush.failed = true;
            rail->received = false;
            r->flush.n_flushes += rail->flushing;
        }
    }
    bool under_way = false, late = xfer_now(x) >= r->flush.until_ns;
    for (uint32_t i = 0; i < r->n_rails; i++) {
        struct rail *rail = &r->rail[i];
        struct td_vb_wc wc;
        if (!rail->flushing) continue;
        int n = rail->flush_cq && !rail->dead ? r->vb->poll(rail->flush_cq, &wc, 1) : -EIO;
        if (n == 0 && !late) {
            under_way = true;
            continue;
        }
        rail->flushing = false;
        if (n > 0 && wc.status == TD_VB_WC_SUCCESS) continue;
        r->flush.failed = true;
        if (rail->flush_qp) xfer_flush_rail_close(r, rail);
    }
    if (under_way) return true;
    r->flush.runs = false;
    td_xfer_core_flush_end(&x->core, xfer_now(x),
                           r->flush.failed ? "rdma: the device that wrote it failed before its "
                                             "writes to the GPU were known to be visible"
                                           : NULL);
    return true;
}
