/* cluster.h - a local cluster for as long as a sweep needs it: `tandem up` of this very program as
 * a child, which owns the daemons.
 *
 * It has a process group of its own and ends with us, so that nothing stays behind. One thread
 * calls these functions; a second, of this file alone, reads the child's output to its end. */
#ifndef BENCH_SWEEP_CLUSTER_H
#define BENCH_SWEEP_CLUSTER_H

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/base/status.h"

struct sweep_cluster_config {
    const char *model, *mode;          /* a model directory; pd, colocated, hybrid */
    uint32_t prefill, decode, threads; /* threads: of each worker */
    const char *cpus;                  /* "0-3": dealt out to the workers, `threads` each; "" =
                                          not pinned */
    const char *log_dir;               /* exists; the daemons write NAME.log there. "" = on
                                          stderr */
    const char *more_args;             /* for `tandem up`, divided by blanks; "" = none */
    uint64_t start_timeout_ms;
    const volatile sig_atomic_t *stop; /* not 0: give up waiting. May be NULL */
};

struct sweep_cluster {
    pid_t pid; /* 0 = none */
    int output_fd; /* our end of its stdout; owned */
    pthread_t reader;
    bool has_reader;
    char address[64];
};

/* Returns when all workers have joined. TD_ERR_PEER: it ended instead (its own message stands on
 * stderr); TD_ERR_DEADLINE, TD_ERR_CANCELLED. */
td_status sweep_cluster_start(const struct sweep_cluster_config *config,
                              struct sweep_cluster *ret_cluster, struct td_err *err);
/* Drains and ends it; kills it when it overstays. Accepts zeroed. */
void sweep_cluster_stop(struct sweep_cluster *cluster);

#endif
