/* xfer_bench.h - what the files of the transfer bench share: a case (what one transfer is), a
 * sample (one timed run of it), the two ends.
 *
 *   xfer_bench.c         options, cases, the interleaved runs, main
 *   xfer_bench_ends.c    the sender (this process) and the receiver (a fork of it): endpoints,
 *                        pools, timed runs of the engine
 *   xfer_bench_floor.c   what the same bytes cost without the engine: memcpy, a bare send/recv
 *                        loop, iperf3, ib_write_bw
 *   xfer_bench_report.c  medians, ratios, table, JSON, CSV
 *
 * Both pools are shareable memory of the same size. The receiver is forked after the sender's
 * pool was made and so maps it, too: the memcpy floor copies between the very pages that the
 * engine copies between. With --device cuda both are in the GPU's memory; the receiver opens the
 * sender's by its handle, and the copy floor copies between the same places. */
#ifndef XFER_BENCH_H
#define XFER_BENCH_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "common/base/wakeup.h"
#include "common/base/mem.h"
#include "common/transfer/transfer.h"

#define BENCH_MAX_BATCH 512 /* transfers whose grants exist before the clock starts */
#define BENCH_MAX_STREAMS 8
#define BENCH_MAX_REPEATS 1000
#define BENCH_PINNED_BYTES ((size_t)8 << 20)
#define BENCH_WAIT_MS 60000 /* a transfer that takes longer has failed */

/* --- what is measured ------------------------------------------------------------------------- */

enum bench_way {
    BENCH_TCP,
    BENCH_SHM,
    BENCH_RDMA,
    BENCH_TCP_SAMPLED,
    BENCH_TCP_DIGESTS,
    BENCH_SHM_SAMPLED,
    BENCH_SHM_DIGESTS,
    BENCH_CUDA_IPC,
    BENCH_SHM_STAGED,
    BENCH_STAGED, /* pools in a GPU's memory */
    BENCH_MEMCPY,
    BENCH_BARE,
    BENCH_IPERF,
    BENCH_IB_WRITE,
    BENCH_DEVICE_COPY,
    BENCH_PINNED_COPY,
    BENCH_N_WAYS
};
#define BENCH_N_PATHS BENCH_MEMCPY /* the ways before it are paths of the engine */

struct bench_way_info {
    const char *name;
    int path;                 /* enum td_xfer_path; 0: a floor */
    enum bench_way floors[2]; /* paths: what they are held against; BENCH_N_WAYS: none */
    const char *floor_is;     /* floors: in words, for the report */
    uint32_t digest_every;    /* paths: of blocks; held against the same path without */
    bool on_gpu;              /* its pools are in a GPU's memory */
};
extern const struct bench_way_info bench_ways[BENCH_N_WAYS];

/* One row of the report. Transfer i of a batch has places of its own in both pools; see
 * bench_case_ids. */
struct bench_case {
    char name[48]; /* "64KiB", "llama-8b/2048" */
    uint64_t bytes, block_bytes;
    int32_t n_blocks;         /* of one transfer */
    int32_t n_pool_blocks;    /* of the footprint */
    int32_t tokens;           /* shapes; 0: a size */
    bool shuffled;            /* block ids in random order on both sides, anew for every batch;
                                 else one run of neighbours */
    int32_t depth, streams;   /* transfers in flight; tcp: lanes */
    uint64_t message;         /* tcp's floors: bytes of a write; 0: iperf3 the transfer's, up to
                                 1 MiB, the bare loop whole runs of blocks */
    int32_t batch, n_batches; /* one run = n_batches batches, with the clock stopped in between */
};

struct bench_sample { /* one run */
    double seconds;   /* 0: not measured */
    double n_bytes;
    int32_t n_transfers;
    double sender_cpu_s, receiver_cpu_s; /* both processes, all threads, while the clock ran */
    double post_s, post_cpu_s; /* op_start and submit of all transfers: until they return; CPU of a
                                  separate batch scaled to the run */
    uint64_t n_work_requests;  /* rdma: posted by the sender */
    double *latency_us;        /* engine: appended to when not NULL */
    int32_t n_latencies;
};

#define BENCH_GPU "cuda" /* as --device */

struct bench_options {
    const char *path, *sizes, *shape, *tokens, *depth, *streams, *json, *csv, *machine, *device,
        *peer_device;
    uint64_t block_bytes, message, footprint, memory;
    int64_t repeats, transfers, batch, block_tokens, gid_index;
    bool floors, iperf3, shuffled;
};

/* --- the ends --------------------------------------------------------------------------------- */

enum bench_verb { BENCH_OPEN = 1, BENCH_CLOSE, BENCH_ARM, BENCH_FINISH, BENCH_COPY, BENCH_RECEIVE };

struct bench_ends {
    pid_t receiver;
    int control; /* socket to the receiver */
    int bare_fd; /* the bare loop's connection */
    size_t pool_bytes;
    struct td_arena pool; /* this side's; the receiver has its own */
    const uint8_t *from;  /* the sender's pool, in both processes */
    struct td_wakeup wakeup;
    struct td_xfer *x[BENCH_N_PATHS];
    const char *device, *peer_device;
    bool on_gpu;
    const struct td_ops *ops; /* on_gpu: the device; pool.base and from are addresses of its
                                 memory, good for copies alone */
    uint8_t *pinned;          /* page-locked, BENCH_PINNED_BYTES */
    void *opened;             /* receiver: the sender's allocation */
    uint64_t probe_at;        /* sender: where the endpoints of the last case have put theirs */
    uint64_t n_verified;      /* bytes whose content was checked */
};

/* Makes and fills the pool and forks the receiver. No thread may run yet. */
td_status bench_ends_open(struct bench_ends *e, size_t pool_bytes, const struct bench_options *o,
                          struct td_err *err);
void bench_ends_close(struct bench_ends *e);
/* Endpoints for a case, at both ends. */
td_status bench_link_open(struct bench_ends *e, enum bench_way way, const struct bench_case *c,
                          struct td_err *err);
td_status bench_link_close(struct bench_ends *e, enum bench_way way, struct td_err *err);
/* One batch of the engine; adds to *s. serial moves it through the pools. Content is verified
 * after the clock has stopped. */
td_status bench_engine_batch(struct bench_ends *e, enum bench_way way, const struct bench_case *c,
                             uint64_t serial, bool clock_posts, struct bench_sample *s,
                             struct td_err *err);
td_status bench_memcpy_batch(struct bench_ends *e, const struct bench_case *c, uint64_t serial,
                             struct bench_sample *s, struct td_err *err);
td_status bench_bare_batch(struct bench_ends *e, const struct bench_case *c, uint64_t serial,
                           struct bench_sample *s, struct td_err *err);

/* BENCH_DEVICE_COPY: between the pools, by the receiver's device; BENCH_PINNED_COPY: from
 * page-locked memory to the receiver's pool. */
td_status bench_gpu_batch(struct bench_ends *e, enum bench_way way, const struct bench_case *c,
                          uint64_t serial, struct bench_sample *s, struct td_err *err);

/* --- floors that are other programs ----------------------------------------------------------- */

bool bench_program_exists(const char *name);
td_status bench_iperf_run(const struct bench_case *c, struct bench_sample *s, struct td_err *err);
td_status bench_ib_write_run(const struct bench_case *c, const struct bench_options *o,
                             struct bench_sample *s, struct td_err *err);
/* Standard output of a short command, at most n - 1 bytes; the exit status, or -1. */
int bench_capture(const char *const argv[], char *out, size_t n);

/* --- report ----------------------------------------------------------------------------------- */

struct bench_report;
td_status bench_report_open(const struct bench_options *o, int argc, char **argv,
                            struct bench_report **ret_report, struct td_err *err);
/* samples[w] has n entries, in the order of the runs; entries without seconds were not measured. */
void bench_report_case(struct bench_report *r, const struct bench_case *c,
                       struct bench_sample *const samples[BENCH_N_WAYS], int32_t n);
void bench_report_skip(struct bench_report *r, const char *what, const char *why);
/* frees */
td_status bench_report_end(struct bench_report *r, uint64_t n_verified, struct td_err *err);

#endif
