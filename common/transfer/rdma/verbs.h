/* verbs.h - the RDMA verbs that the transfer engine uses, as a table of function pointers.
 * verbs_real.c fills it from libibverbs, loaded at run time; verbs_fake.c fills it with a provider
 * in memory, for tests of orders and faults that no NIC produces on demand.
 *
 * Why a table of our own: most hot calls of libibverbs are inline functions over its context, so
 * the library cannot be interposed; and the engine must build where neither its headers nor its
 * library exist. The types here are plain, and only RC queue pairs are known.
 *
 * Errors: calls return 0 or a positive errno, as verbs do, and what they return is untouched then;
 * the caller knows what it wanted and says so. Objects are destroyed in reverse order of creation;
 * dereg and the destroys accept NULL. Threads: post and poll on one object from one thread at a
 * time; everything else from the thread that owns the device. Nothing here blocks except open, reg
 * and the destroys, which may take milliseconds.
 * Source: the InfiniBand architecture's verbs as libibverbs' manual pages state them. */
#ifndef TD_TRANSFER_RDMA_VERBS_H
#define TD_TRANSFER_RDMA_VERBS_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

#define TD_VB_NAME_MAX 64
#define TD_VB_DEVICES_MAX 32
#define TD_VB_SGE_MAX 16 /* pieces of one work request that this table carries */

struct td_verbs;
struct td_vb_device;
struct td_vb_cq;
struct td_vb_srq;

struct td_vb_limits {
    /* max_srq, max_mw 0: the device has none */
    uint32_t max_qp, max_qp_wr, max_sge, max_cqe, max_srq, max_srq_wr, max_mw;
    /* READs a QP answers at a time, and asks at a time */
    uint32_t max_rd_atomic_in, max_rd_atomic_out;
    uint64_t max_mr_bytes;
    bool mw_type2;         /* memory windows of type 2 can be bound by post_send */
    bool relaxed_ordering; /* registration may ask for it */
    uint8_t n_ports;
};

struct td_vb_port {
    bool active, ethernet; /* ethernet: RoCE; else InfiniBand, addressed by lid */
    uint32_t mtu_bytes;    /* active MTU */
    uint16_t lid;
    uint64_t bits_per_s; /* width x speed; 0 = not known */
    uint32_t n_gids;
};

enum td_vb_gid_type { TD_VB_GID_IB = 0, TD_VB_GID_ROCE_V1, TD_VB_GID_ROCE_V2 };

struct td_vb_gid {
    uint32_t index;
    enum td_vb_gid_type type;
    uint8_t raw[16];
    char netdev[32]; /* "" = none or not known */
    bool netdev_up;
};

enum td_vb_access {
    TD_VB_LOCAL_WRITE = 1,
    TD_VB_REMOTE_WRITE = 2,
    TD_VB_REMOTE_READ = 4,
    TD_VB_MW_BIND = 8,
    TD_VB_RELAXED_ORDERING = 16
};

struct td_vb_mr { /* read-only for the caller */
    uint64_t addr, bytes;
    uint32_t lkey, rkey;
    struct td_vb_device *device;
};

struct td_vb_mw { /* a type 2 memory window; every bind gives another rkey */
    uint32_t rkey;
    struct td_vb_device *device;
};

struct td_vb_qp_caps {
    uint32_t send_wr, recv_wr, send_sge, inline_bytes; /* asked, and what was given in return */
    struct td_vb_srq *srq;                             /* NULL: receives of its own */
};

struct td_vb_qp { /* read-only for the caller */
    uint32_t num;
    struct td_vb_device *device;
};

struct td_vb_route { /* what RTR and RTS need, settled by the caller */
    uint8_t port, sl, traffic_class, hop_limit;
    uint32_t gid_index; /* ours */
    uint8_t remote_gid[16];
    uint16_t remote_lid; /* InfiniBand */
    bool ethernet;
    uint32_t mtu_bytes, remote_qp, remote_psn, local_psn;
    uint8_t timeout, retry, rnr_retry, min_rnr_timer; /* codes: 4.096 us x 2^timeout */
    uint8_t rd_atomic_in, rd_atomic_out;
};

enum td_vb_op {
    TD_VB_WRITE = 1,
    TD_VB_WRITE_IMM,
    TD_VB_READ,
    TD_VB_BIND_MW,
    TD_VB_LOCAL_INV,
    TD_VB_RECV_IMM /* in completions only */
};

struct td_vb_sge {
    uint64_t addr;
    uint32_t bytes, lkey;
};

struct td_vb_send {
    uint64_t id; /* comes back in the completion */
    enum td_vb_op op;
    bool signaled, fence; /* fence: waits for earlier READs of this QP */
    uint32_t n_sge;       /* 0 allowed for WRITE_IMM */
    struct td_vb_sge sge[TD_VB_SGE_MAX];
    uint64_t remote_addr; /* WRITE, WRITE_IMM, READ */
    uint32_t rkey;        /* the same; LOCAL_INV: the key that ends */
    uint32_t imm;         /* host order here; the provider swaps */
    /* BIND_MW: mw over [bind_addr, +bind_bytes) of bind_mr; its rkey is new on return */
    struct td_vb_mw *mw;
    struct td_vb_mr *bind_mr;
    uint64_t bind_addr, bind_bytes;
};

/* How a request ended: our name, the name in verbs (IBV_WC_...), what people read. */
#define TD_VB_WC_STATUSES(X)                                                                       \
    X(SUCCESS, SUCCESS, "success")                                                                 \
    X(LOC_LEN, LOC_LEN_ERR, "local length error")                                                  \
    X(LOC_QP_OP, LOC_QP_OP_ERR, "local QP operation error")                                        \
    X(LOC_PROT, LOC_PROT_ERR, "local protection error")                                            \
    X(WR_FLUSH, WR_FLUSH_ERR, "flushed")                                                           \
    X(MW_BIND, MW_BIND_ERR, "memory window bind error")                                            \
    X(BAD_RESP, BAD_RESP_ERR, "bad response")                                                      \
    X(LOC_ACCESS, LOC_ACCESS_ERR, "local access error")                                            \
    X(REM_INV_REQ, REM_INV_REQ_ERR, "remote invalid request")                                      \
    X(REM_ACCESS, REM_ACCESS_ERR, "remote access error")                                           \
    X(REM_OP, REM_OP_ERR, "remote operation error")                                                \
    X(RETRY_EXC, RETRY_EXC_ERR, "retry counter exceeded")                                          \
    X(RNR_RETRY_EXC, RNR_RETRY_EXC_ERR, "receiver-not-ready retry counter exceeded")               \
    X(REM_ABORT, REM_ABORT_ERR, "remote abort")                                                    \
    X(FATAL, FATAL_ERR, "fatal error")                                                             \
    X(RESP_TIMEOUT, RESP_TIMEOUT_ERR, "response timeout")                                          \
    X(GENERAL, GENERAL_ERR, "general error")

#define TD_VB_WC_ENUMERATOR(name, ibv, text) TD_VB_WC_##name,
enum td_vb_wc_status { TD_VB_WC_STATUSES(TD_VB_WC_ENUMERATOR) TD_VB_WC_N_STATUSES };

struct td_vb_wc {
    uint64_t id;
    enum td_vb_wc_status status;
    enum td_vb_op op; /* valid on success only, as in verbs */
    uint32_t imm;     /* RECV_IMM, host order */
    uint32_t qp_num, vendor_error;
};

enum td_vb_async_kind {
    TD_VB_ASYNC_OTHER = 0,
    TD_VB_ASYNC_QP_FATAL,
    TD_VB_ASYNC_CQ_ERR,
    TD_VB_ASYNC_DEVICE_FATAL,
    TD_VB_ASYNC_PORT_ERR,
    TD_VB_ASYNC_PORT_ACTIVE,
    TD_VB_ASYNC_GID_CHANGE,
    TD_VB_ASYNC_SRQ_ERR,
    TD_VB_ASYNC_LID_CHANGE,
    TD_VB_ASYNC_N_KINDS
};

struct td_vb_async {
    enum td_vb_async_kind kind;
    uint32_t qp_num; /* QP_FATAL */
    uint8_t port;    /* PORT_*, GID_CHANGE, LID_CHANGE */
};

struct td_verbs {
    const char *name; /* "libibverbs", "fake" */
    void *ctx;        /* the provider's */

    /* Names of the devices, at most TD_VB_DEVICES_MAX. */
    int (*list)(const struct td_verbs *vb, char names[TD_VB_DEVICES_MAX][TD_VB_NAME_MAX],
                uint32_t *ret_n);
    /* with one protection domain */
    int (*open)(const struct td_verbs *vb, const char *name, struct td_vb_device **ret_device);
    void (*close)(struct td_vb_device *d);
    int (*query)(struct td_vb_device *d, struct td_vb_limits *ret_limits);
    int (*query_port)(struct td_vb_device *d, uint8_t port, struct td_vb_port *ret_port);
    /* ENODATA: the entry is empty */
    int (*query_gid)(struct td_vb_device *d, uint8_t port, uint32_t index,
                     struct td_vb_gid *ret_gid);
    /* readable: async_get has something */
    int (*async_fd)(struct td_vb_device *d);
    /* false: nothing; never blocks */
    bool (*async_get)(struct td_vb_device *d, struct td_vb_async *ret_event);

    int (*reg)(struct td_vb_device *d, void *addr, uint64_t bytes, unsigned access,
               struct td_vb_mr **ret_mr);
    int (*reg_dmabuf)(struct td_vb_device *d, uint64_t offset, uint64_t bytes, uint64_t iova,
                      int fd, unsigned access, struct td_vb_mr **ret_mr);
    int (*dereg)(struct td_vb_mr *mr);
    struct {
        int (*alloc)(struct td_vb_device *d, struct td_vb_mw **ret_mw);
        int (*free)(struct td_vb_mw *mw);
    } mw;

    /* A completion queue with a channel of its own. cq_fd turns readable after a completion that
     * came since the last cq_arm; cq_clear takes the events that lie there. Arm, then poll once
     * more, then sleep. */
    int (*cq_create)(struct td_vb_device *d, uint32_t depth, struct td_vb_cq **ret_cq);
    void (*cq_destroy)(struct td_vb_cq *cq);
    int (*cq_fd)(struct td_vb_cq *cq);
    int (*cq_arm)(struct td_vb_cq *cq);
    void (*cq_clear)(struct td_vb_cq *cq);
    /* how many, or -errno */
    int (*poll)(struct td_vb_cq *cq, struct td_vb_wc *wcs, int max);

    struct {
        int (*create)(struct td_vb_device *d, uint32_t max_wr, struct td_vb_srq **ret_srq);
        void (*destroy)(struct td_vb_srq *srq);
        /* n receives without memory: for WRITE_IMM of length 0 */
        int (*post)(struct td_vb_srq *srq, uint64_t id, uint32_t n);
    } srq;

    /* RC; RESET */
    int (*qp_create)(struct td_vb_device *d, struct td_vb_cq *cq, struct td_vb_qp_caps *caps,
                     struct td_vb_qp **ret_qp);
    void (*qp_destroy)(struct td_vb_qp *qp);
    int (*qp_init)(struct td_vb_qp *qp, uint8_t port, uint16_t pkey_index, unsigned access);
    int (*qp_rtr)(struct td_vb_qp *qp, const struct td_vb_route *route);
    int (*qp_rts)(struct td_vb_qp *qp, const struct td_vb_route *route);
    /* everything posted comes back flushed */
    int (*qp_error)(struct td_vb_qp *qp);
    int (*post_recv)(struct td_vb_qp *qp, uint64_t id, uint32_t n); /* as srq.post */
    /* Hands over n requests under one doorbell, in order. On an error the first *ret_n_posted of
       them are the device's, the rest were not taken. */
    int (*post_send)(struct td_vb_qp *qp, struct td_vb_send *wrs, uint32_t n,
                     uint32_t *ret_n_posted);
};

/* The RDMA devices of this process, looked for once: libibverbs, or the library that the
 * environment variable TANDEM_VERBS_LIBRARY names. Such a library exports td_verbs_provider, which
 * fills *ret_verbs with a table that stays valid. TD_ERR_UNSUPPORTED: libibverbs is not installed,
 * this build has not its headers, or the named library cannot be loaded; or what td_verbs_provider
 * returns. */
td_status td_verbs_load(const struct td_verbs **ret_verbs, struct td_err *err);
typedef td_status td_verbs_provider_fn(const struct td_verbs **ret_verbs, struct td_err *err);

/* verbs_real.c: libibverbs itself. */
td_status td_verbs_load_libibverbs(const struct td_verbs **ret_verbs, struct td_err *err);

const char *td_vb_wc_status_name(enum td_vb_wc_status status);

#endif
