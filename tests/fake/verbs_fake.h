/* verbs_fake.h - a provider of verbs in memory. To a program it behaves as the reliable queue pairs
 * of a NIC, and it fails on demand.
 *
 * A fabric is a piece of shared memory: a file that several processes open, or anonymous memory for
 * one process. Each opener is a node: it has devices of its own and one thread, its NIC. A node
 * that dies, at whatever instruction, leaves nothing locked: requests to it end in RETRY_EXC. Two
 * fabrics opened on one path in one process are two nodes. Linux; the nodes share a pid namespace
 * and a user.
 *
 * Checked as on hardware: states and attributes of queue pairs, both ends' numbers, addresses,
 * packet numbers and MTU, local and remote keys with their bounds and rights, protection domains,
 * depths of all queues, who may use a window. Not modelled: latency, congestion, more than one
 * path. Every random choice comes from `seed`; the timing between threads is the machine's.
 *
 * Threads: any thread may make the calls below, except open and close. They take the node's lock
 * and may wait for one copy of a payload. */
#ifndef TD_TESTS_FAKE_VERBS_FAKE_H
#define TD_TESTS_FAKE_VERBS_FAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/transfer/rdma/verbs.h"

#define TD_FAKE_NODES_MAX 16
#define TD_FAKE_DEVICES_MAX 16
#define TD_FAKE_PORTS_MAX 2
#define TD_FAKE_GIDS 8 /* entries of a port's GID table */
#define TD_FAKE_ALL UINT32_MAX

struct td_fake_fabric;

/* Zeroed fields take their defaults, which td_fake_options_default fills in. */
struct td_fake_options {
    const char *path; /* NULL: anonymous, this process alone; borrowed during open */
    uint64_t seed;
    uint32_t devices, ports, mtu_bytes;
    bool infiniband; /* addressed by lid; else RoCE */
    /* WRITEs to this node land in any order, up to the next request of their QP that makes a
     * completion */
    bool unordered;
    bool relaxed; /* the bytes of one WRITE land in 64-byte lines in any order */
    /* bytes written to a dma-buf are delayed until the same device has served a READ of one, as a
     * NIC's writes to a GPU may be: a completion does not mean that they have landed */
    bool device_late;
    bool no_copy;      /* no payload moves: to time everything else */
    uint32_t spin_us;  /* how long the NIC polls for work before it sleeps */
    uint32_t retry_ms; /* RETRY_EXC comes after at most this time, whatever a QP's time-out is */
    /* each request to this node stays in the network for up to this time, with its payload as it
     * was when sent */
    uint32_t delay_us;
    /* this many of a million requests fail: RETRY_EXC before or after landing, REM_OP, or the QP
     * breaks silently */
    uint32_t fault_ppm;
    /* the nth request of this node (0: none) fails with fail_status (a td_vb_wc_status), ... */
    uint64_t fail_nth;
    uint32_t fail_status;
    bool fail_after;            /* ... after it was carried out at the other end */
    struct td_vb_limits limits; /* n_ports is taken from `ports` */
};

void td_fake_options_default(struct td_fake_options *ret_options);
/* max_qp_wr 4, rd_atomic 1, max_mr_bytes 1 MiB, max_sge 1, no SRQ, no windows */
void td_fake_options_tiny(struct td_fake_options *options);

/* Opens a node. Errors: TD_ERR_INVALID (an option), TD_ERR_LIMIT (no node left), TD_ERR_IO,
 * TD_ERR_CORRUPT (the file is not a fabric of this build). Makes the file when it does not exist;
 * the owner of the path unlinks it. A memfd as /proc/PID/fd/N needs no unlinking. Sets
 * PR_SET_PTRACER_ANY: every process of this user may read this one's memory. */
td_status td_fake_fabric_open(const struct td_fake_options *options,
                              struct td_fake_fabric **ret_fabric, struct td_err *err);
/* all devices must be closed before; NULL is allowed */
void td_fake_fabric_close(struct td_fake_fabric *f);
const struct td_verbs *td_fake_verbs(struct td_fake_fabric *f); /* valid until close */
struct td_fake_fabric *td_fake_fabric_of(const struct td_verbs *vb);
uint32_t td_fake_node(const struct td_fake_fabric *f); /* this node's number */

/* TANDEM_VERBS_FAKE="path=/dev/shm/x,devices=2,seed=7,unordered=1": the fabric of this process,
 * opened at the first call and never closed. Keys: path seed devices ports mtu infiniband
 * unordered relaxed device_late no_copy spin_us retry_ms delay_us fault_ppm fail_nth fail_status
 * fail_after tiny max_qp max_qp_wr max_sge max_cqe max_srq max_srq_wr max_mw rd_atomic
 * max_mr_bytes mw_type2. TD_ERR_NOT_FOUND: the variable is not set. */
td_status td_verbs_fake_from_env(const struct td_verbs **ret_verbs, struct td_err *err);
td_status td_fake_options_parse(const char *text, struct td_fake_options *ret_options,
                                char path[256], struct td_err *err);

/* ---- faults ---- */

enum td_fake_fault {
    /* nothing is sent. The request completes with `status` in its turn; the QP goes to ERR and
     * flushes the rest */
    TD_FAKE_FAIL_BEFORE = 1,
    /* the request is carried out at the other end, and its acknowledgement is lost: RETRY_EXC */
    TD_FAKE_FAIL_AFTER,
    TD_FAKE_POST_PARTIAL, /* post_send accepts the requests before the nth and returns `error` */
    /* from the nth request on the QP sends nothing and reports nothing, until it goes to ERR */
    TD_FAKE_STALL
};

struct td_fake_rule {
    enum td_fake_fault fault;
    uint32_t device; /* index, or TD_FAKE_ALL */
    uint32_t qp_num; /* 0: any QP of the device */
    /* the number of the matching request, counted from 1 from the time that the rule is added */
    uint64_t nth;
    enum td_vb_wc_status status;
    int error; /* errno */
};
/* Each rule applies once. At most 64 may be pending; false when there is no room. */
bool td_fake_rule_add(struct td_fake_fabric *f, const struct td_fake_rule *rule);
void td_fake_rules_clear(struct td_fake_fabric *f);

/* One end of a connection goes to ERR by itself; `event`: with QP_FATAL. False: no such QP here. */
bool td_fake_qp_break(struct td_fake_fabric *f, uint32_t qp_num, bool event);
/* Breaks the CQ: CQ_ERR, no completion any more, its QPs go to ERR, each with QP_FATAL. */
void td_fake_cq_break(struct td_fake_fabric *f, struct td_vb_cq *cq);
bool td_fake_async(struct td_fake_fabric *f, uint32_t device, const struct td_vb_async *event);
/* Sets a port of any living node up or down. Down: nothing passes in either direction and requests
 * end in RETRY_EXC. The node gets PORT_ERR or PORT_ACTIVE. */
bool td_fake_port_set(struct td_fake_fabric *f, uint32_t node, uint32_t device, uint8_t port,
                      bool up);

enum td_fake_gid {
    TD_FAKE_GID_EMPTY,
    TD_FAKE_GID_LINK_LOCAL,
    TD_FAKE_GID_V4_PRIVATE,
    TD_FAKE_GID_V4,
    TD_FAKE_GID_V6_LOCAL,
    TD_FAKE_GID_V6
};
/* Changes an entry of a port's table, with GID_CHANGE. */
bool td_fake_gid_set(struct td_fake_fabric *f, uint32_t device, uint8_t port, uint32_t index,
                     enum td_fake_gid kind, enum td_vb_gid_type type, bool netdev_up);

/* Holds requests: those of the whole fabric that are sent by or to qp_num (TD_FAKE_ALL: any) stay
 * in the network with their payload as it is now. A released request is carried out as if it had
 * just come: it may land although its sender has been flushed or destroyed since, and is dropped
 * when the target QP or its memory is gone. 0 ends the hold. At most 256 requests from one node to
 * another are in the network at a time. */
void td_fake_hold(struct td_fake_fabric *f, uint32_t qp_num);

struct td_fake_counters {
    uint64_t requests_sent, retransmits;                /* counted as requester */
    uint64_t writes_landed, bytes_landed, reads_served; /* counted as responder */
    uint64_t writes_dropped_late; /* came after a hold or delay and found its QP or memory gone */
    /* came directly and found no QP in a state to accept it; a retransmission counts again */
    uint64_t writes_dropped;
    uint64_t rkey_violations, rnr, cq_overruns, qps_broken;
    uint64_t held; /* now in the network */
};
/* The counters of one node, dead or alive, since it opened; TD_FAKE_ALL: the sum. Not all are read
 * at the same instant. */
void td_fake_counters_get(const struct td_fake_fabric *f, uint32_t node,
                          struct td_fake_counters *ret_counters);

#endif
