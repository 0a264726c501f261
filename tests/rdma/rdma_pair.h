/* rdma_pair.h - two devices and a connected queue pair between them, for tests of the verbs
 * table on real devices. Both ends belong to the one thread that runs the tests; every wait is
 * bounded by WAIT_MS and fails the test when it is over. */
#ifndef TD_TESTS_RDMA_PAIR_H
#define TD_TESTS_RDMA_PAIR_H

#include "common/transfer/rdma/verbs.h"

enum { WAIT_MS = 30000, PAIR_BYTES = 4 << 20, GID_INDEX = 1 };

struct rdma_end {
    struct td_vb_device *device;
    struct td_vb_cq *cq;
    struct td_vb_srq *srq; /* when asked */
    struct td_vb_qp *qp;
    struct td_vb_qp_caps caps; /* as given */
    struct td_vb_mr *mr;       /* over mem, with every access but relaxed ordering */
    uint8_t *mem;              /* PAIR_BYTES */
};

struct rdma_pair {
    struct rdma_end a, b;
};

struct rdma_pair_options {
    uint32_t send_wr, recv_wr, send_sge, inline_bytes; /* 0: 64, 64, 1, 0 */
    uint32_t mtu_a, mtu_b;                             /* 0: 4096 */
    uint8_t timeout, retry;                            /* 0: 14, 7 */
    bool use_srq, same_device;                         /* both ends on a's device; srq on b's
                                                          side */
};

extern const struct td_verbs *vb;
extern struct td_vb_device *device_a, *device_b;
extern const char *name_a, *name_b;

/* main() of such a program: opens the devices that argv names (rxe0 and rxe1 unless it does),
 * runs the tests, closes them. Without RDMA it prints why and answers 77, which ctest counts as
 * skipped. */
int rdma_main(int argc, char **argv, int (*all_tests)(void));

void pair_open(struct rdma_pair *p, const struct rdma_pair_options *options);
void pair_close(struct rdma_pair *p);
void end_connect(struct rdma_end *e, const struct rdma_end *peer, uint32_t mtu_bytes,
                 const struct rdma_pair_options *options);

/* One WRITE of bytes at offset, from a's memory to the same place in b's. */
struct td_vb_send write_of(const struct rdma_pair *p, uint64_t id, uint32_t offset, uint32_t bytes);
/* all of them, or the test fails */
void post(struct td_vb_qp *qp, struct td_vb_send *wrs, uint32_t n);
struct td_vb_wc wait_wc(struct td_vb_cq *cq); /* the next completion */
void expect_wc(struct td_vb_cq *cq, uint64_t id, enum td_vb_wc_status status);
void expect_none(struct td_vb_cq *cq);
void fill(uint8_t *mem, uint32_t bytes, uint32_t seed);

/* Runs a program of the system (ip, tc); its failure fails the test. Arguments end with NULL. */
void run_program(const char *name, ...);

#endif
