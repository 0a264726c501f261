/* comm.h - communication between the ranks of one worker: reductions, gathers and broadcasts among
 * processes of one host, through shared memory, or of several hosts, through byte streams.
 *
 * Why here: tensor parallelism (Megatron-LM's column and row parallel layers) needs two sums over
 * ranks per layer and one gather per step. Between CPU ranks of one host these go through a segment
 * of shared memory that rank 0 makes and the others inherit; between hosts they go through one
 * stream from each rank to rank 0 (comm_channels.c). What ranks tell each other beside the
 * arithmetic (step descriptors, deaths) uses the same on every kind of device. Sources: Shoeybi et
 * al. 2019 (Megatron-LM), section 3; reduce-scatter + all-gather: Rabenseifner 2004.
 *
 * Promises:
 *   (1) A sum is taken in the order of ranks, 0 first, element by element, whatever the timing: the
 *       same inputs give the same bits on every rank (I1), on one host or on several.
 *   (2) Every wait ends: with what was waited for, when a rank is known to be dead (within 0.1 s of
 *       its death; of a host that vanishes while it owes an answer, some 20 s) or has given up, or
 *       at a deadline. From then on every call of every rank returns TD_ERR_PEER, and
 *       td_comm_reason says why.
 *   (3) All ranks make the same calls in the same order with the same sizes. Whoever notices that
 *       one does not gets TD_ERR_INTERNAL, and the others get TD_ERR_PEER.
 *
 * Threads: one thread of each rank at a time, except for the calls that a team makes. All calls
 * block; only open allocates, and on channels a call that is larger than all before it. comm NULL
 * is a group of one rank: every call then does nothing, or copies. */
#ifndef TD_MODEL_COMM_H
#define TD_MODEL_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "common/base/status.h"

#define TD_COMM_MAX_RANKS 16
#define TD_COMM_REASON_MAX 256

/* What the ranks share: memory, and a socket from rank 0 to each other rank for passing
 * descriptors. Rank 0 makes it before it starts the others (fork or exec). */
struct td_comm_segment {
    void *base;
    size_t bytes;
    int memfd;
    int32_t n_ranks;
    /* [r]: rank 0's end and rank r's end; -1 where there is none */
    int sockets[TD_COMM_MAX_RANKS][2];
};

/* Makes a segment. All descriptors are close-on-exec: the code that starts a rank passes memfd and
 * sockets[rank][1] on. buffer_bytes: the bytes that one round of a call moves; 0 = 1 MiB. */
td_status td_comm_segment_create(int32_t n_ranks, size_t buffer_bytes,
                                 struct td_comm_segment *ret_segment, struct td_err *err);
/* Called in a program that was started as rank `rank`: takes over both descriptors. */
td_status td_comm_segment_join(int memfd, int socket, int32_t rank,
                               struct td_comm_segment *ret_segment, struct td_err *err);
/* Called by rank 0 after it has started a rank: that rank's death counts from now on, even if it
 * never opens. */
void td_comm_segment_expect(struct td_comm_segment *segment, int32_t rank, int pid);
void td_comm_segment_close(struct td_comm_segment *segment); /* a zeroed segment is allowed */

struct td_comm;

struct td_comm_config {
    uint32_t timeout_ms; /* a call fails when a rank has not joined it after this time: 0 = 60 s */
    uint32_t spin_us;    /* how long a wait spins before it sleeps; 0 where ranks share CPUs */
};

/* The segment is borrowed until close. Does not wait for the other ranks; the first call does. */
td_status td_comm_open(struct td_comm_segment *segment, int32_t rank,
                       const struct td_comm_config *config, struct td_comm **ret_comm,
                       struct td_err *err);

/* A byte stream to another rank that has been let in already: a connected socket, or TLS over
 * one. The functions are as recv(2) and writev(2) on a non-blocking socket; NULL: the socket
 * itself. */
struct td_comm_channel {
    int fd;        /* non-blocking; what to poll */
    char name[64]; /* the other end's address, for messages */
    void *ctx;
    ssize_t (*recv)(void *ctx, void *buf, size_t n);
    ssize_t (*sendv)(void *ctx, const struct iovec *iov, int n_iov);
    bool (*pending)(void *ctx); /* bytes are there that poll does not announce */
    size_t (*unsent)(void *ctx);
    int (*flush)(void *ctx); /* sends what is unsent; 0, or -1 with errno */
    void (*close)(void *ctx);
};

/* Ranks that share no memory. Rank 0 gives channels[r] for every other rank r, the others
 * channels[0], to rank 0. The channels are the communicator's from success on: td_comm_close
 * closes them, and tells the other ends by that. */
td_status td_comm_open_channels(const struct td_comm_channel *channels, int32_t n_ranks,
                                int32_t rank, const struct td_comm_config *config,
                                struct td_comm **ret_comm, struct td_err *err);
/* Lets the kernel end the connection fd when its host has answered nothing for some 20 s.
 * td_comm_open_channels does it; before, whoever holds a connection that waits. */
void td_comm_watch_host(int fd);
/* True for channels: no descriptor and no memory can be shared. */
bool td_comm_is_remote(const struct td_comm *comm);
/* The deadline of the calls from here on, as in td_comm_config. */
void td_comm_set_timeout(struct td_comm *comm, uint32_t timeout_ms);

/* Makes another handle of the same rank, for another thread that only calls td_comm_check and
 * td_comm_reason. TD_ERR_UNSUPPORTED on channels. */
td_status td_comm_again(const struct td_comm *comm, struct td_comm **ret_comm, struct td_err *err);
/* Does not notify the others: to them this rank is alive as long as its process is. */
void td_comm_close(struct td_comm *comm);

int32_t td_comm_rank(const struct td_comm *comm);
int32_t td_comm_n_ranks(const struct td_comm *comm);

/* The threads of a rank that make one call together: all of them call with the same arguments
 * except `part`, get the same status, and meet at least once between two calls. meet: their
 * barrier. */
struct td_comm_team {
    int part, n_parts;
    void (*meet)(void *ctx);
    void *ctx;
};

/* x[i] = sum over ranks of their x[i], on every rank. team NULL: one thread. Part 0 alone does
 * small sums. */
td_status td_comm_all_reduce_sum(struct td_comm *comm, const struct td_comm_team *team, float *x,
                                 size_t n);
/* all[r * bytes ..] = `mine` of rank r. */
td_status td_comm_all_gather(struct td_comm *comm, const void *mine, size_t bytes, void *all);
/* Fills all [first[n_ranks]]: elements [first[r], first[r + 1]) are rank r's, in place there before
 * the call and on every rank behind it. first: the same on all ranks, ascending from 0. team as for
 * a sum. */
td_status td_comm_gather_parts(struct td_comm *comm, const struct td_comm_team *team, float *all,
                               const size_t *first);
/* Copies columns [first[r], first[r + 1]) of each of n_rows rows, which lie dense in `mine` of rank
 * r, to their places in out [n_rows, first[n_ranks]] on rank 0. `out` of other ranks is not
 * touched. mine may be NULL on rank 0 when its columns are in out already. first: the same on all
 * ranks. */
td_status td_comm_gather_columns(struct td_comm *comm, const float *mine, int32_t n_rows,
                                 const int32_t *first, float *out);
/* Sends rank 0's bytes to all ranks. *bytes is, on rank 0, how many; on the others, the room on
 * entry and the number received on return. idle: ranks other than 0 wait for as long as rank 0
 * lives. */
td_status td_comm_broadcast(struct td_comm *comm, void *data, size_t *bytes, bool idle);
td_status td_comm_barrier(struct td_comm *comm);

/* On channels alone. collect: rank 0 receives the bytes[r] bytes at `mine` of each other rank r to
 * at[r]. deal: rank 0 sends bytes[r] bytes from at[r] to rank r, which gets them in `mine`. bytes:
 * the same on all ranks; bytes[0] is not looked at, nor is at on ranks other than 0. */
td_status td_comm_collect(struct td_comm *comm, const void *mine, const size_t *bytes,
                          uint8_t *const *at);
td_status td_comm_deal(struct td_comm *comm, const uint8_t *const *at, const size_t *bytes,
                       void *mine);

/* Rank 0 sends a descriptor to every rank; each of the others receives its own copy and closes it.
 * Collective. TD_ERR_UNSUPPORTED on channels. */
td_status td_comm_share_fd(struct td_comm *comm, int fd, int *ret_fd);

/* TD_ERR_PEER when a rank is dead or has given up. Does not wait. For rank 0 while it has no step
 * to run. */
td_status td_comm_check(struct td_comm *comm);
/* Called when this rank cannot continue: the calls of the others then fail with this reason. The
 * first reason stays. */
void td_comm_abort(struct td_comm *comm, const char *reason);
/* The reason why calls fail, e.g. "rank 2 (pid 4711) is dead"; "" while they do not fail. buf:
 * TD_COMM_REASON_MAX bytes. */
const char *td_comm_reason(struct td_comm *comm, char *buf);

#endif
