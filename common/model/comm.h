/* comm.h - the ranks of one worker: reductions, gathers and broadcasts among processes of one host,
 * through shared memory.
 *
 * Why here: tensor parallelism (Megatron-LM's column and row parallel layers) needs two sums over
 * ranks per layer and one gather per step. Between CPU ranks they go through a segment that rank 0
 * makes and the others inherit; what ranks tell each other beside the arithmetic (step descriptors,
 * deaths) goes this way whatever the device.                                Source: Shoeybi et al.
 *     2019 (Megatron-LM), section 3; reduce-scatter +
 * all-gather: Rabenseifner 2004.
 *
 * Promises:
 *  (1) A sum is taken in the order of ranks, 0 first, element by element, whatever the timing: the
 *      same inputs give the same bits on every rank (I1).
 *  (2) Every wait ends: with what was waited for, with the news that a rank is dead (seen within
 *      0.1 s of its death) or gave up, or at a deadline. From then on every call of every rank
 *      answers TD_ERR_PEER, and td_comm_reason says why.
 *  (3) All ranks make the same calls in the same order with the same sizes; a rank that does not is
 *      found out (TD_ERR_INTERNAL, the others TD_ERR_PEER).
 *
 * Threads: one thread of each rank at a time, but for a team's call. All calls block; none
 * allocates but open. comm NULL is a group of one: everything is a no-op or a copy. */
#ifndef TD_MODEL_COMM_H
#define TD_MODEL_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

#define TD_COMM_MAX_RANKS 16
#define TD_COMM_REASON_MAX 256

/* What the ranks share: memory, and a socket from rank 0 to each for passing descriptors. Made
 * by rank 0 before it starts the others (fork or exec). */
struct td_comm_segment {
    void *base;
    size_t bytes;
    int memfd;
    int32_t n_ranks;
    int sockets[TD_COMM_MAX_RANKS][2]; /* [r]: rank 0's end, rank r's end; -1 where there is none */
};

/* All descriptors are close-on-exec: who starts a rank passes memfd and sockets[rank][1] on.
 * buffer_bytes 0: the default, 1 MiB: what one round of a call moves. */
td_status td_comm_segment_create(int32_t n_ranks, size_t buffer_bytes,
                                 struct td_comm_segment *ret_segment, struct td_err *err);
/* In a program that was started as rank `rank`: takes both descriptors over. */
td_status td_comm_segment_join(int memfd, int socket, int32_t rank,
                               struct td_comm_segment *ret_segment, struct td_err *err);
/* Rank 0, after it has started a rank: its death counts from now on, even if it never opens. */
void td_comm_segment_expect(struct td_comm_segment *segment, int32_t rank, int pid);
void td_comm_segment_close(struct td_comm_segment *segment); /* zeroed is fine */

struct td_comm;

struct td_comm_config {
    uint32_t timeout_ms; /* a rank that does not come for so long is given up: 0 =
                            60 s */
    uint32_t spin_us;    /* how long a wait looks before it sleeps; 0 where ranks
                            share CPUs */
};

/* The segment is borrowed until close. Does not wait for the others: the first call does. */
td_status td_comm_open(struct td_comm_segment *segment, int32_t rank,
                       const struct td_comm_config *config, struct td_comm **ret_comm,
                       struct td_err *err);
/* Another handle of the same rank, for a thread of its own that only calls td_comm_check and
 * td_comm_reason. */
td_status td_comm_again(const struct td_comm *comm, struct td_comm **ret_comm, struct td_err *err);
/* Says nothing to the others: to them this rank is alive as long as its process is. */
void td_comm_close(struct td_comm *comm);

int32_t td_comm_rank(const struct td_comm *comm);
int32_t td_comm_n_ranks(const struct td_comm *comm);

/* The threads of a rank that make one call together: all of them call with the same arguments
 * but part, get the same status, and meet at least once between two calls. meet: a barrier of
 * theirs. */
struct td_comm_team {
    int part, n_parts;
    void (*meet)(void *ctx);
    void *ctx;
};

/* x[i] = sum over ranks of their x[i], on every rank. team NULL: one thread. Small sums are part
 * 0's alone. */
td_status td_comm_all_reduce_sum(struct td_comm *comm, const struct td_comm_team *team, float *x,
                                 size_t n);
/* all[r * bytes ..] = rank r's `mine`. */
td_status td_comm_all_gather(struct td_comm *comm, const void *mine, size_t bytes, void *all);
/* Columns [first[r], first[r + 1]) of each of n_rows rows, tight in rank r's `mine`, to their
 * places in out [n_rows, first[n_ranks]] on rank 0. Other ranks' out is not touched. mine may be
 * NULL on rank 0: its columns are in out already. first: the same on all ranks. */
td_status td_comm_gather_columns(struct td_comm *comm, const float *mine, int32_t n_rows,
                                 const int32_t *first, float *out);
/* Rank 0's bytes to all; *bytes: rank 0: how many; others: room in, how many out. idle: a rank
 * other than 0 waits for as long as rank 0 lives. */
td_status td_comm_broadcast(struct td_comm *comm, void *data, size_t *bytes, bool idle);
td_status td_comm_barrier(struct td_comm *comm);

/* Rank 0 sends a descriptor to every rank; the others get theirs (to be closed by them).
 * Collective. */
td_status td_comm_share_fd(struct td_comm *comm, int fd, int *ret_fd);

/* Does not wait: TD_ERR_PEER when a rank is dead or has given up. For rank 0 while there is
 * nothing to do. */
td_status td_comm_check(struct td_comm *comm);
/* This rank cannot go on: the others' calls fail with this reason. The first reason stays. */
void td_comm_abort(struct td_comm *comm, const char *reason);
/* Why calls fail, e.g. "rank 2 (pid 4711) is dead"; "" while they do not. buf:
 * TD_COMM_REASON_MAX. */
const char *td_comm_reason(struct td_comm *comm, char *buf);

#endif
