/* verbs_real.c - the verbs table over libibverbs, which is loaded at run time and never linked.
 *
 * One program then runs with and without RDMA's packages. What the library exports is taken with
 * the version that carries the present structures (dlvsym: it also exports older ones); what its
 * header only has as inline functions (post, poll, arm, windows) is used from the header.
 *
 * Translations that are not one to one:
 * (1) A chain is translated on the stack, POST_BATCH requests a doorbell; td_vb_sge has ibv_sge's
 *     layout and is handed on as it lies.
 * (2) A WRITE_IMM completes at its sender as a WRITE: verbs know no other code.
 * (3) Inline sends are the caller's choice at qp_create: with inline_bytes asked, WRITEs up to what
 *     was given are copied by the CPU during the post. A caller whose source may be device memory
 *     asks for 0.
 * (4) Destroys that fail leave the object to the kernel, which drops it when the device is
 *     closed: nothing better could be done with the news. */
#include "common/base/symbols.h"
#include "common/transfer/rdma/verbs.h"

#include <errno.h>
#include <limits.h>

#ifdef TD_HAVE_VERBS
#include <arpa/inet.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <net/if.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define POST_BATCH 128 /* 16 KiB of stack */
#define POLL_BATCH 64

/* name, version that has today's structures, must it be there */
#define SYMBOLS(X)                                                                                 \
    X(ibv_get_device_list, "IBVERBS_1.1", true)                                                    \
    X(ibv_free_device_list, "IBVERBS_1.1", true)                                                   \
    X(ibv_get_device_name, "IBVERBS_1.1", true)                                                    \
    X(ibv_open_device, "IBVERBS_1.1", true)                                                        \
    X(ibv_close_device, "IBVERBS_1.1", true)                                                       \
    X(ibv_query_device, "IBVERBS_1.1", true)                                                       \
    X(ibv_query_port, "IBVERBS_1.1", true)                                                         \
    X(ibv_query_gid, "IBVERBS_1.1", true)                                                          \
    X(ibv_get_async_event, "IBVERBS_1.1", true)                                                    \
    X(ibv_ack_async_event, "IBVERBS_1.1", true)                                                    \
    X(ibv_alloc_pd, "IBVERBS_1.1", true)                                                           \
    X(ibv_dealloc_pd, "IBVERBS_1.1", true)                                                         \
    X(ibv_reg_mr, "IBVERBS_1.1", true)                                                             \
    X(ibv_dereg_mr, "IBVERBS_1.1", true)                                                           \
    X(ibv_create_comp_channel, "IBVERBS_1.0", true)                                                \
    X(ibv_destroy_comp_channel, "IBVERBS_1.0", true)                                               \
    X(ibv_create_cq, "IBVERBS_1.1", true)                                                          \
    X(ibv_destroy_cq, "IBVERBS_1.1", true)                                                         \
    X(ibv_get_cq_event, "IBVERBS_1.1", true)                                                       \
    X(ibv_ack_cq_events, "IBVERBS_1.1", true)                                                      \
    X(ibv_create_srq, "IBVERBS_1.1", true)                                                         \
    X(ibv_destroy_srq, "IBVERBS_1.1", true)                                                        \
    X(ibv_create_qp, "IBVERBS_1.1", true)                                                          \
    X(ibv_destroy_qp, "IBVERBS_1.1", true)                                                         \
    X(ibv_modify_qp, "IBVERBS_1.1", true)                                                          \
    X(ibv_fork_init, "IBVERBS_1.1", true)                                                          \
    X(ibv_reg_mr_iova2, "IBVERBS_1.8", false)                                                      \
    X(_ibv_query_gid_ex, "IBVERBS_1.11", false)                                                    \
    X(ibv_reg_dmabuf_mr, "IBVERBS_1.12", false)

/* Called as lib.p_NAME(...), which keeps the header's macros (ibv_reg_mr, ...) away. */
static struct {
    SYMBOLS(TD_SYMBOL_MEMBER)
    td_status status;
    struct td_err err;
    struct td_verbs verbs;
} lib;

struct td_vb_device {
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    char name[TD_VB_NAME_MAX];
};

struct td_vb_cq {
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
};

struct td_vb_srq {
    struct ibv_srq *srq;
};

struct real_mr {
    struct td_vb_mr mr;
    struct ibv_mr *ibv;
};

struct real_mw {
    struct td_vb_mw mw;
    struct ibv_mw *ibv;
};

struct real_qp {
    struct td_vb_qp qp;
    struct ibv_qp *ibv;
    uint32_t inline_bytes; /* WRITEs up to this go inline; 0 unless asked for */
};

#define SAME_PLACE(ours, theirs)                                                                   \
    (offsetof(struct td_vb_sge, ours) == offsetof(struct ibv_sge, theirs))
_Static_assert(sizeof(struct td_vb_sge) == sizeof(struct ibv_sge) && SAME_PLACE(addr, addr) &&
                   SAME_PLACE(bytes, length) && SAME_PLACE(lkey, lkey),
               "td_vb_sge is handed on as ibv_sge");

/* Calls that answer an error number; some drivers negate it, some return -1 with errno. */
static int errno_of(int rc)
{
    if (rc >= 0) return rc;
    return rc != -1 ? -rc : errno ? errno : EIO;
}

/* Calls that answer NULL. */
static int errno_now(void) { return errno ? errno : EIO; }

/* What a creating call answered: ours is freed when that is NULL. errno was 0 before the call. */
static int created(const void *theirs, void *ours)
{
    int rc = theirs ? 0 : errno_now();
    if (rc) free(ours);
    return rc;
}

static int make_nonblocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? errno : 0;
}

/* RC queue pairs of InfiniBand's kind: neither iWARP nor usNIC nor EFA. */
static bool is_usable(const struct ibv_device *d) { return d->transport_type == IBV_TRANSPORT_IB; }

static int real_list(const struct td_verbs *vb, char names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX],
                     uint32_t *ret_n)
{
    int n_all = 0;
    uint32_t n = 0;
    (void)vb;
    errno = 0;
    struct ibv_device **all = lib.p_ibv_get_device_list(&n_all);
    if (!all) return errno_now(); /* ENOSYS: this kernel has no RDMA */
    for (int i = 0; i < n_all && n < TD_VB_DEVICES_MAX; i++)
        if (is_usable(all[i]))
            snprintf(names[n++], TD_VB_NAME_MAX, "%s", lib.p_ibv_get_device_name(all[i]));
    lib.p_ibv_free_device_list(all);
    *ret_n = n;
    return 0;
}

/* Half-made, too. */
static void real_close(struct td_vb_device *d)
{
    if (!d) return;
    if (d->pd) lib.p_ibv_dealloc_pd(d->pd);
    if (d->ctx) lib.p_ibv_close_device(d->ctx);
    free(d);
}

static int real_open(const struct td_verbs *vb, const char *name, struct td_vb_device **ret_device)
{
    int n_all = 0, rc = 0;
    (void)vb;
    errno = 0;
    struct ibv_device **all = lib.p_ibv_get_device_list(&n_all), *found = NULL;
    if (!all) return errno_now();
    for (int i = 0; i < n_all && !found; i++)
        if (strcmp(lib.p_ibv_get_device_name(all[i]), name) == 0) found = all[i];
    struct td_vb_device *d = NULL;
    if (!found)
        rc = ENODEV;
    else if (!is_usable(found))
        rc = EOPNOTSUPP;
    else if (!(d = calloc(1, sizeof *d)))
        rc = ENOMEM;
    if (!rc) {
        snprintf(d->name, sizeof d->name, "%s", name);
        errno = 0;
        d->ctx = lib.p_ibv_open_device(found);
        rc = d->ctx ? make_nonblocking(d->ctx->async_fd) : errno_now();
    }
    lib.p_ibv_free_device_list(all);
    if (!rc) {
        errno = 0;
        d->pd = lib.p_ibv_alloc_pd(d->ctx);
        rc = d->pd ? 0 : errno_now();
    }
    if (rc)
        real_close(d);
    else
        *ret_device = d;
    return rc;
}

static uint32_t count_of(int n) { return n > 0 ? (uint32_t)n : 0; }

static int real_query(struct td_vb_device *d, struct td_vb_limits *ret_limits)
{
    struct ibv_device_attr a = {0};
    int rc = errno_of(lib.p_ibv_query_device(d->ctx, &a));
    if (rc) return rc;
    bool has_mw =
        a.max_mw > 0 && (a.device_cap_flags & IBV_DEVICE_MEM_WINDOW) && d->ctx->ops.alloc_mw;
    *ret_limits = (struct td_vb_limits){
        .max_qp = count_of(a.max_qp),
        .max_qp_wr = count_of(a.max_qp_wr),
        .max_sge = count_of(a.max_sge),
        .max_cqe = count_of(a.max_cqe),
        .max_srq = count_of(a.max_srq),
        .max_srq_wr = count_of(a.max_srq_wr),
        .max_mw = has_mw ? (uint32_t)a.max_mw : 0,
        .max_rd_atomic_in = count_of(a.max_qp_rd_atom),
        .max_rd_atomic_out = count_of(a.max_qp_init_rd_atom),
        .max_mr_bytes = a.max_mr_size,
        .mw_type2 = has_mw && (a.device_cap_flags &
                               (IBV_DEVICE_MEM_WINDOW_TYPE_2A | IBV_DEVICE_MEM_WINDOW_TYPE_2B)),
        .relaxed_ordering = lib.p_ibv_reg_mr_iova2 != NULL,
        .n_ports = a.phys_port_cnt,
    };
    return 0;
}

/* Signalling rate; codes of PortInfo's LinkWidthActive and LinkSpeedActive, powers of two. */
static uint64_t bits_per_s(uint8_t width, uint8_t speed)
{
    static const uint8_t lanes[] = {1, 4, 8, 12, 2};
    /* SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR */
    static const uint32_t mbit[] = {2500, 5000, 10000, 10000, 14062, 25781, 53125, 106250};
    int w = ffs(width) - 1, s = ffs(speed) - 1;
    bool is_known = w >= 0 && w < (int)sizeof lanes && 1 << w == width && s >= 0 && 1 << s == speed;
    return is_known ? (uint64_t)lanes[w] * mbit[s] * 1000000 : 0;
}

static int real_query_port(struct td_vb_device *d, uint8_t port, struct td_vb_port *ret_port)
{
    struct ibv_port_attr a;
    memset(&a, 0, sizeof a);
    /* The header's inline ibv_query_port, but for the loaded symbol. */
    struct verbs_context *v = verbs_get_ctx_op(d->ctx, query_port);
    int rc = v ? v->query_port(d->ctx, port, &a, sizeof a)
               : lib.p_ibv_query_port(d->ctx, port, (struct _compat_ibv_port_attr *)&a);
    if (rc) return errno_of(rc);
    *ret_port = (struct td_vb_port){
        .active = a.state == IBV_PORT_ACTIVE,
        .ethernet = a.link_layer == IBV_LINK_LAYER_ETHERNET,
        .mtu_bytes =
            a.active_mtu >= IBV_MTU_256 && a.active_mtu <= IBV_MTU_4096 ? 128u << a.active_mtu : 0,
        .lid = a.lid,
        .bits_per_s = bits_per_s(a.active_width, a.active_speed),
        .n_gids = count_of(a.gid_tbl_len),
    };
    return 0;
}

/* Up and with a carrier, in this network namespace: the kernel's own reading of operstate. */
static bool netdev_is_up(const char *name)
{
    struct ifreq ask = {0};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    memcpy(ask.ifr_name, name, strnlen(name, IFNAMSIZ - 1));
    bool up = ioctl(fd, SIOCGIFFLAGS, &ask) == 0 &&
              (ask.ifr_flags & (IFF_UP | IFF_RUNNING)) == (IFF_UP | IFF_RUNNING);
    close(fd);
    return up;
}

/* One line of a sysfs file; false when there is none (an empty GID entry answers EINVAL). */
static bool read_gid_attr(const char *device, uint8_t port, const char *what, uint32_t index,
                          char *ret_text, size_t bytes)
{
    char path[192];
    snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/%u/gid_attrs/%s/%u", device, port,
             what, index);
    FILE *f = fopen(path, "re");
    if (!f) return false;
    bool ok = fgets(ret_text, (int)bytes, f) != NULL;
    fclose(f);
    if (ok) ret_text[strcspn(ret_text, "\n")] = 0;
    return ok;
}

static int real_query_gid(struct td_vb_device *d, uint8_t port, uint32_t index,
                          struct td_vb_gid *ret_gid)
{
    static const uint8_t empty[16];
    struct td_vb_gid g = {.index = index};
    char name[IFNAMSIZ] = "";
    if (lib.p__ibv_query_gid_ex) {
        struct ibv_gid_entry e = {0};
        int rc = errno_of(lib.p__ibv_query_gid_ex(d->ctx, port, index, &e, 0, sizeof e));
        if (rc) return rc;
        memcpy(g.raw, e.gid.raw, sizeof g.raw);
        g.type = e.gid_type == IBV_GID_TYPE_ROCE_V2   ? TD_VB_GID_ROCE_V2
                 : e.gid_type == IBV_GID_TYPE_ROCE_V1 ? TD_VB_GID_ROCE_V1
                                                      : TD_VB_GID_IB;
        if (e.ndev_ifindex && !if_indextoname(e.ndev_ifindex, name)) name[0] = 0;
    } else { /* rdma-core before 32 */
        union ibv_gid gid;
        char type[32] = "";
        errno = 0;
        if (index > INT_MAX || lib.p_ibv_query_gid(d->ctx, port, (int)index, &gid))
            return errno_now();
        memcpy(g.raw, gid.raw, sizeof g.raw);
        if (memcmp(g.raw, empty, sizeof empty) != 0 &&
            read_gid_attr(d->name, port, "types", index, type, sizeof type)) {
            struct td_vb_port p;
            int rc = real_query_port(d, port, &p);
            if (rc) return rc;
            g.type = strcmp(type, "RoCE v2") == 0 ? TD_VB_GID_ROCE_V2
                     : p.ethernet                 ? TD_VB_GID_ROCE_V1
                                                  : TD_VB_GID_IB;
            if (!read_gid_attr(d->name, port, "ndevs", index, name, sizeof name)) name[0] = 0;
        }
    }
    if (memcmp(g.raw, empty, sizeof empty) == 0) return ENODATA;
    snprintf(g.netdev, sizeof g.netdev, "%s", name);
    g.netdev_up = name[0] && netdev_is_up(name);
    *ret_gid = g;
    return 0;
}

static int real_async_fd(struct td_vb_device *d) { return d->ctx->async_fd; }

static bool real_async_get(struct td_vb_device *d, struct td_vb_async *ret_event)
{
    struct ibv_async_event e;
    int rc;
    do rc = lib.p_ibv_get_async_event(d->ctx, &e);
    while (rc && errno == EINTR);
    if (rc) return false;
    static const enum td_vb_async_kind kinds[] = {
        [IBV_EVENT_QP_FATAL] = TD_VB_ASYNC_QP_FATAL,
        [IBV_EVENT_QP_REQ_ERR] = TD_VB_ASYNC_QP_FATAL,
        [IBV_EVENT_QP_ACCESS_ERR] = TD_VB_ASYNC_QP_FATAL,
        [IBV_EVENT_CQ_ERR] = TD_VB_ASYNC_CQ_ERR,
        [IBV_EVENT_SRQ_ERR] = TD_VB_ASYNC_SRQ_ERR,
        [IBV_EVENT_DEVICE_FATAL] = TD_VB_ASYNC_DEVICE_FATAL,
        [IBV_EVENT_PORT_ERR] = TD_VB_ASYNC_PORT_ERR,
        [IBV_EVENT_PORT_ACTIVE] = TD_VB_ASYNC_PORT_ACTIVE,
        [IBV_EVENT_GID_CHANGE] = TD_VB_ASYNC_GID_CHANGE,
        /* InfiniBand: a subnet manager gave the port another address */
        [IBV_EVENT_LID_CHANGE] = TD_VB_ASYNC_LID_CHANGE,
    };
    bool is_known = (unsigned)e.event_type < sizeof kinds / sizeof kinds[0];
    struct td_vb_async a = {.kind = is_known ? kinds[e.event_type] : TD_VB_ASYNC_OTHER};
    if (a.kind == TD_VB_ASYNC_QP_FATAL) a.qp_num = e.element.qp->qp_num;
    if (a.kind == TD_VB_ASYNC_PORT_ERR || a.kind == TD_VB_ASYNC_PORT_ACTIVE ||
        a.kind == TD_VB_ASYNC_GID_CHANGE || a.kind == TD_VB_ASYNC_LID_CHANGE)
        a.port = (uint8_t)e.element.port_num;
    lib.p_ibv_ack_async_event(&e); /* at once: a destroy waits for the acknowledgement */
    *ret_event = a;
    return true;
}

static unsigned access_of(unsigned access)
{
    return (access & TD_VB_LOCAL_WRITE ? IBV_ACCESS_LOCAL_WRITE : 0u) |
           (access & TD_VB_REMOTE_WRITE ? IBV_ACCESS_REMOTE_WRITE : 0u) |
           (access & TD_VB_REMOTE_READ ? IBV_ACCESS_REMOTE_READ : 0u) |
           (access & TD_VB_MW_BIND ? IBV_ACCESS_MW_BIND : 0u) |
           (access & TD_VB_RELAXED_ORDERING ? IBV_ACCESS_RELAXED_ORDERING : 0u);
}

static int keep_mr(struct td_vb_device *d, struct ibv_mr *ibv, uint64_t addr, uint64_t bytes,
                   struct real_mr *mr, struct td_vb_mr **ret_mr)
{
    int rc = created(ibv, mr);
    if (rc) return rc;
    mr->ibv = ibv;
    mr->mr = (struct td_vb_mr){
        .addr = addr, .bytes = bytes, .lkey = ibv->lkey, .rkey = ibv->rkey, .device = d};
    *ret_mr = &mr->mr;
    return 0;
}

static int real_reg(struct td_vb_device *d, void *addr, uint64_t bytes, unsigned access,
                    struct td_vb_mr **ret_mr)
{
    unsigned a = access_of(access);
    if ((a & IBV_ACCESS_RELAXED_ORDERING) && !lib.p_ibv_reg_mr_iova2) return EOPNOTSUPP;
    if (bytes > SIZE_MAX) return EINVAL;
    struct real_mr *mr = calloc(1, sizeof *mr);
    if (!mr) return ENOMEM;
    errno = 0;
    struct ibv_mr *ibv =
        a & IBV_ACCESS_RELAXED_ORDERING
            ? lib.p_ibv_reg_mr_iova2(d->pd, addr, (size_t)bytes, (uintptr_t)addr, a)
            : lib.p_ibv_reg_mr(d->pd, addr, (size_t)bytes, (int)a);
    return keep_mr(d, ibv, (uintptr_t)addr, bytes, mr, ret_mr);
}

static int real_reg_dmabuf(struct td_vb_device *d, uint64_t offset, uint64_t bytes, uint64_t iova,
                           int fd, unsigned access, struct td_vb_mr **ret_mr)
{
    if (!lib.p_ibv_reg_dmabuf_mr) return EOPNOTSUPP;
    if (bytes > SIZE_MAX) return EINVAL;
    struct real_mr *mr = calloc(1, sizeof *mr);
    if (!mr) return ENOMEM;
    errno = 0;
    return keep_mr(
        d, lib.p_ibv_reg_dmabuf_mr(d->pd, offset, (size_t)bytes, iova, fd, (int)access_of(access)),
        iova, bytes, mr, ret_mr);
}

static int real_dereg(struct td_vb_mr *m)
{
    if (!m) return 0;
    struct real_mr *mr = (struct real_mr *)m;
    int rc = errno_of(lib.p_ibv_dereg_mr(mr->ibv)); /* EBUSY: windows are bound to it */
    if (rc == 0) free(mr);
    return rc;
}

static int real_mw_alloc(struct td_vb_device *d, struct td_vb_mw **ret_mw)
{
    struct real_mw *mw = calloc(1, sizeof *mw);
    if (!mw) return ENOMEM;
    errno = 0;
    mw->ibv = ibv_alloc_mw(d->pd, IBV_MW_TYPE_2);
    int rc = created(mw->ibv, mw);
    if (rc) return rc;
    mw->mw = (struct td_vb_mw){.rkey = mw->ibv->rkey, .device = d};
    *ret_mw = &mw->mw;
    return 0;
}

static int real_mw_free(struct td_vb_mw *m)
{
    if (!m) return 0;
    struct real_mw *mw = (struct real_mw *)m;
    int rc = errno_of(ibv_dealloc_mw(mw->ibv));
    if (rc == 0) free(mw);
    return rc;
}

static void real_cq_clear(struct td_vb_cq *cq)
{
    struct ibv_cq *which;
    void *context;
    unsigned n = 0;
    for (;;) {
        if (lib.p_ibv_get_cq_event(cq->channel, &which, &context) == 0)
            n++;
        else if (errno != EINTR)
            break; /* EAGAIN: no more */
    }
    if (n) lib.p_ibv_ack_cq_events(cq->cq, n);
}

/* Half-made, too. */
static void real_cq_destroy(struct td_vb_cq *cq)
{
    if (!cq) return;
    if (cq->cq) real_cq_clear(cq); /* a destroy waits for events that nobody acknowledged */
    if (cq->cq) lib.p_ibv_destroy_cq(cq->cq);
    if (cq->channel) lib.p_ibv_destroy_comp_channel(cq->channel);
    free(cq);
}

static int real_cq_create(struct td_vb_device *d, uint32_t depth, struct td_vb_cq **ret_cq)
{
    if (depth == 0 || depth > INT_MAX) return EINVAL;
    struct td_vb_cq *cq = calloc(1, sizeof *cq);
    if (!cq) return ENOMEM;
    errno = 0;
    cq->channel = lib.p_ibv_create_comp_channel(d->ctx);
    int rc = cq->channel ? make_nonblocking(cq->channel->fd) : errno_now();
    if (!rc) {
        errno = 0;
        cq->cq = lib.p_ibv_create_cq(d->ctx, (int)depth, cq, cq->channel, 0);
        rc = cq->cq ? 0 : errno_now();
    }
    if (rc)
        real_cq_destroy(cq);
    else
        *ret_cq = cq;
    return rc;
}

static int real_cq_fd(struct td_vb_cq *cq) { return cq->channel->fd; }

static int real_cq_arm(struct td_vb_cq *cq) { return errno_of(ibv_req_notify_cq(cq->cq, 0)); }

static enum td_vb_wc_status status_of(enum ibv_wc_status status)
{
#define STATUS(name, ibv, text) [IBV_WC_##ibv] = 1 + TD_VB_WC_##name,
    static const uint8_t known[] = {TD_VB_WC_STATUSES(STATUS)};
    bool is_known = (unsigned)status < sizeof known && known[status];
    return is_known ? (enum td_vb_wc_status)(known[status] - 1) : TD_VB_WC_GENERAL;
}

/* 0: an operation that this table does not know, as a receive that a SEND took. */
static enum td_vb_op op_of(enum ibv_wc_opcode opcode)
{
    return opcode == IBV_WC_RDMA_WRITE           ? TD_VB_WRITE
           : opcode == IBV_WC_RDMA_READ          ? TD_VB_READ
           : opcode == IBV_WC_BIND_MW            ? TD_VB_BIND_MW
           : opcode == IBV_WC_LOCAL_INV          ? TD_VB_LOCAL_INV
           : opcode == IBV_WC_RECV_RDMA_WITH_IMM ? TD_VB_RECV_IMM
                                                 : (enum td_vb_op)0;
}

static int real_poll(struct td_vb_cq *cq, struct td_vb_wc *wcs, int max)
{
    struct ibv_wc got[POLL_BATCH];
    int n = 0;
    while (n < max) {
        int want = max - n < POLL_BATCH ? max - n : POLL_BATCH;
        int m = ibv_poll_cq(cq->cq, want, got);
        if (m < 0)
            return n ? n : -EIO; /* drivers have codes of their own; the next poll fails, too */
        for (int i = 0; i < m; i++)
            wcs[n + i] = (struct td_vb_wc){
                .id = got[i].wr_id,
                .status = status_of(got[i].status),
                .op = got[i].status == IBV_WC_SUCCESS ? op_of(got[i].opcode) : (enum td_vb_op)0,
                .imm = got[i].status == IBV_WC_SUCCESS && (got[i].wc_flags & IBV_WC_WITH_IMM)
                           ? ntohl(got[i].imm_data)
                           : 0,
                .qp_num = got[i].qp_num,
                .vendor_error = got[i].vendor_err,
            };
        n += m;
        if (m < want) break;
    }
    return n;
}

static int real_srq_create(struct td_vb_device *d, uint32_t max_wr, struct td_vb_srq **ret_srq)
{
    struct ibv_srq_init_attr init = {.attr = {.max_wr = max_wr, .max_sge = 1}};
    struct td_vb_srq *srq = calloc(1, sizeof *srq);
    if (!srq) return ENOMEM;
    errno = 0;
    srq->srq = lib.p_ibv_create_srq(d->pd, &init);
    int rc = created(srq->srq, srq);
    if (!rc) *ret_srq = srq;
    return rc;
}

static void real_srq_destroy(struct td_vb_srq *srq)
{
    if (!srq) return;
    lib.p_ibv_destroy_srq(srq->srq);
    free(srq);
}

/* n receives without memory, to a queue pair or a shared queue. */
static int post_empty(struct ibv_qp *qp, struct ibv_srq *srq, uint64_t id, uint32_t n)
{
    struct ibv_recv_wr wrs[POST_BATCH], *bad;
    uint32_t batch = n < POST_BATCH ? n : POST_BATCH;
    for (uint32_t i = 0; i < batch; i++)
        wrs[i] = (struct ibv_recv_wr){.wr_id = id, .next = i + 1 < batch ? &wrs[i + 1] : NULL};
    while (n > 0) {
        uint32_t m = n < batch ? n : batch;
        wrs[m - 1].next = NULL;
        bad = NULL;
        int rc = errno_of(srq ? ibv_post_srq_recv(srq, wrs, &bad) : ibv_post_recv(qp, wrs, &bad));
        if (rc) return rc;
        n -= m;
    }
    return 0;
}

static int real_srq_post(struct td_vb_srq *srq, uint64_t id, uint32_t n)
{
    return post_empty(NULL, srq->srq, id, n);
}

static int real_post_recv(struct td_vb_qp *qp, uint64_t id, uint32_t n)
{
    return post_empty(((struct real_qp *)qp)->ibv, NULL, id, n);
}

static int real_qp_create(struct td_vb_device *d, struct td_vb_cq *cq, struct td_vb_qp_caps *caps,
                          struct td_vb_qp **ret_qp)
{
    if (caps->send_sge > TD_VB_SGE_MAX) return EINVAL;
    struct ibv_qp_init_attr init = {
        .send_cq = cq->cq,
        .recv_cq = cq->cq,
        .srq = caps->srq ? caps->srq->srq : NULL,
        .cap = {.max_send_wr = caps->send_wr,
                .max_recv_wr = caps->srq ? 0 : caps->recv_wr,
                .max_send_sge = caps->send_sge,
                .max_recv_sge = 1,
                .max_inline_data = caps->inline_bytes},
        .qp_type = IBV_QPT_RC,
        .sq_sig_all = 0,
    };
    struct real_qp *qp = calloc(1, sizeof *qp);
    if (!qp) return ENOMEM;
    errno = 0;
    qp->ibv = lib.p_ibv_create_qp(d->pd, &init);
    int rc = created(qp->ibv, qp);
    if (rc) return rc;
    qp->inline_bytes = caps->inline_bytes ? init.cap.max_inline_data : 0;
    caps->send_wr = init.cap.max_send_wr;
    caps->recv_wr = caps->srq ? 0 : init.cap.max_recv_wr;
    caps->send_sge = init.cap.max_send_sge < TD_VB_SGE_MAX ? init.cap.max_send_sge : TD_VB_SGE_MAX;
    caps->inline_bytes = qp->inline_bytes;
    qp->qp = (struct td_vb_qp){.num = qp->ibv->qp_num, .device = d};
    *ret_qp = &qp->qp;
    return 0;
}

static void real_qp_destroy(struct td_vb_qp *q)
{
    if (!q) return;
    struct real_qp *qp = (struct real_qp *)q;
    lib.p_ibv_destroy_qp(qp->ibv);
    free(qp);
}

static int modify(struct td_vb_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    return errno_of(lib.p_ibv_modify_qp(((struct real_qp *)qp)->ibv, attr, mask));
}

static int real_qp_init(struct td_vb_qp *qp, uint8_t port, uint16_t pkey_index, unsigned access)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .pkey_index = pkey_index, .port_num = port};
    attr.qp_access_flags =
        access_of(access & (TD_VB_LOCAL_WRITE | TD_VB_REMOTE_WRITE | TD_VB_REMOTE_READ));
    return modify(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static int real_qp_rtr(struct td_vb_qp *qp, const struct td_vb_route *r)
{
    enum ibv_mtu mtu = IBV_MTU_256;
    while (mtu < IBV_MTU_4096 && (128u << mtu) < r->mtu_bytes) mtu++;
    if ((128u << mtu) != r->mtu_bytes || r->gid_index > UINT8_MAX) return EINVAL;
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = mtu,
        .rq_psn = r->remote_psn,
        .dest_qp_num = r->remote_qp,
        .ah_attr = {.dlid = r->remote_lid, .sl = r->sl, .port_num = r->port},
        .max_dest_rd_atomic = r->rd_atomic_in,
        .min_rnr_timer = r->min_rnr_timer,
    };
    if (r->ethernet || r->remote_lid == 0) { /* on an InfiniBand subnet the lid is enough */
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.sgid_index = (uint8_t)r->gid_index;
        attr.ah_attr.grh.hop_limit = r->hop_limit;
        attr.ah_attr.grh.traffic_class = r->traffic_class;
        memcpy(attr.ah_attr.grh.dgid.raw, r->remote_gid, sizeof r->remote_gid);
    }
    return modify(qp, &attr,
                  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
}

static int real_qp_rts(struct td_vb_qp *qp, const struct td_vb_route *r)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_RTS,
        .sq_psn = r->local_psn,
        .max_rd_atomic = r->rd_atomic_out,
        .timeout = r->timeout,
        .retry_cnt = r->retry,
        .rnr_retry = r->rnr_retry,
    };
    return modify(qp, &attr,
                  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

static int real_qp_error(struct td_vb_qp *qp)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    return modify(qp, &attr, IBV_QP_STATE);
}

static int translate_send(const struct real_qp *qp, struct td_vb_send *s, struct ibv_send_wr *w)
{
    uint64_t bytes = 0;
    if (s->n_sge > TD_VB_SGE_MAX) return EINVAL;
    *w = (struct ibv_send_wr){
        .wr_id = s->id, .sg_list = (struct ibv_sge *)s->sge, .num_sge = (int)s->n_sge};
    w->send_flags = (s->signaled ? IBV_SEND_SIGNALED : 0u) | (s->fence ? IBV_SEND_FENCE : 0u);
    switch (s->op) {
    case TD_VB_WRITE_IMM:
        w->imm_data = htonl(s->imm); /* fall through */
    case TD_VB_WRITE:
        for (uint32_t i = 0; i < s->n_sge; i++) bytes += s->sge[i].bytes;
        if (bytes > 0 && bytes <= qp->inline_bytes) w->send_flags |= IBV_SEND_INLINE;
        /* fall through */
    case TD_VB_READ:
        w->opcode = s->op == TD_VB_READ    ? IBV_WR_RDMA_READ
                    : s->op == TD_VB_WRITE ? IBV_WR_RDMA_WRITE
                                           : IBV_WR_RDMA_WRITE_WITH_IMM;
        w->wr.rdma.remote_addr = s->remote_addr;
        w->wr.rdma.rkey = s->rkey;
        return 0;
    case TD_VB_BIND_MW:
        if (!s->mw || !s->bind_mr) return EINVAL;
        w->opcode = IBV_WR_BIND_MW;
        w->num_sge = 0;
        w->bind_mw.mw = ((struct real_mw *)s->mw)->ibv;
        w->bind_mw.rkey = ibv_inc_rkey(s->mw->rkey);
        w->bind_mw.bind_info =
            (struct ibv_mw_bind_info){.mr = ((struct real_mr *)s->bind_mr)->ibv,
                                      .addr = s->bind_addr,
                                      .length = s->bind_bytes,
                                      .mw_access_flags = IBV_ACCESS_REMOTE_WRITE};
        s->mw->rkey = w->bind_mw.rkey; /* a second bind in the chain goes on from it */
        return 0;
    case TD_VB_LOCAL_INV:
        w->opcode = IBV_WR_LOCAL_INV;
        w->num_sge = 0;
        w->invalidate_rkey = s->rkey;
        return 0;
    default:
        return EINVAL;
    }
}

/* Not taken, not bound: the window keeps its key. Backwards: one may be named twice. */
static void untake(struct td_vb_send *s, const struct ibv_send_wr *w, uint32_t from, uint32_t n)
{
    for (uint32_t i = n; i-- > from;)
        if (s[i].op == TD_VB_BIND_MW)
            s[i].mw->rkey = (w[i].bind_mw.rkey & ~0xffu) | ((w[i].bind_mw.rkey - 1) & 0xffu);
}

static int real_post_send(struct td_vb_qp *q, struct td_vb_send *wrs, uint32_t n,
                          uint32_t *ret_n_posted)
{
    struct real_qp *qp = (struct real_qp *)q;
    struct ibv_send_wr chain[POST_BATCH];
    uint32_t done = 0;
    int rc = 0;
    while (done < n && rc == 0) {
        struct td_vb_send *s = wrs + done;
        uint32_t want = n - done < POST_BATCH ? n - done : POST_BATCH, m = 0, taken;
        for (; m < want; m++) {
            rc = translate_send(qp, &s[m], &chain[m]);
            if (rc) break; /* as in verbs, what stands before the bad one is posted */
            if (m) chain[m - 1].next = &chain[m];
        }
        taken = m;
        if (m) {
            struct ibv_send_wr *bad = NULL;
            int posted = errno_of(ibv_post_send(qp->ibv, chain, &bad));
            if (posted) {
                rc = posted;
                taken = bad >= chain && bad < chain + m ? (uint32_t)(bad - chain) : 0;
                untake(s, chain, taken, m);
            }
            for (uint32_t i = 0; i < taken; i++)
                if (s[i].op == TD_VB_BIND_MW)
                    ((struct real_mw *)s[i].mw)->ibv->rkey = chain[i].bind_mw.rkey;
        }
        done += taken;
    }
    if (ret_n_posted) *ret_n_posted = done;
    return rc;
}

static void load(void)
{
    const char *missing = NULL;
    /* for good: its drivers start threads and keep state */
    void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        lib.status = td_fail(
            &lib.err, TD_ERR_UNSUPPORTED,
            "rdma: libibverbs.so.1 cannot be loaded (packages libibverbs1, ibverbs-providers): %s",
            dlerror());
        return;
    }
    SYMBOLS(TD_SYMBOL_FIND)
    if (missing) {
        lib.status = td_fail(&lib.err, TD_ERR_UNSUPPORTED,
                             "rdma: libibverbs.so.1 has no %s of the version it needs", missing);
        dlclose(library);
        return;
    }
    /* A child that writes to a registered page would move the parent away from the page the NIC
     * knows. Kernels since 5.13 copy such pages at fork; the daemons only fork to exec. */
    (void)lib.p_ibv_fork_init();
    lib.verbs = (struct td_verbs){
        .name = "libibverbs",
        .list = real_list,
        .open = real_open,
        .close = real_close,
        .query = real_query,
        .query_port = real_query_port,
        .query_gid = real_query_gid,
        .async_fd = real_async_fd,
        .async_get = real_async_get,
        .reg = real_reg,
        .reg_dmabuf = real_reg_dmabuf,
        .dereg = real_dereg,
        .mw.alloc = real_mw_alloc,
        .mw.free = real_mw_free,
        .cq_create = real_cq_create,
        .cq_destroy = real_cq_destroy,
        .cq_fd = real_cq_fd,
        .cq_arm = real_cq_arm,
        .cq_clear = real_cq_clear,
        .poll = real_poll,
        .srq.create = real_srq_create,
        .srq.destroy = real_srq_destroy,
        .srq.post = real_srq_post,
        .qp_create = real_qp_create,
        .qp_destroy = real_qp_destroy,
        .qp_init = real_qp_init,
        .qp_rtr = real_qp_rtr,
        .qp_rts = real_qp_rts,
        .qp_error = real_qp_error,
        .post_recv = real_post_recv,
        .post_send = real_post_send,
    };
}

td_status td_verbs_load_libibverbs(const struct td_verbs **ret_verbs, struct td_err *err)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    if (lib.status) return td_fail(err, lib.status, "%s", lib.err.msg);
    *ret_verbs = &lib.verbs;
    return TD_OK;
}

#else /* no <infiniband/verbs.h> */

td_status td_verbs_load_libibverbs(const struct td_verbs **ret_verbs, struct td_err *err)
{
    (void)ret_verbs;
    return td_fail(
        err, TD_ERR_UNSUPPORTED,
        "rdma: this build was made without <infiniband/verbs.h> (package libibverbs-dev)");
}

#endif
