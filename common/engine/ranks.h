/* ranks.h - the processes of a worker whose model is split over several (option tp): rank 0 is the
 * program that was asked for, and starts the others as copies of itself, with its own arguments
 * after one internal argument (--tp-rank=...), which users never give.
 *
 *   main: td_ranks_take -> rank 0: ... td_ranks_start -> td_engine_open (comm) ... td_engine_close
 *       -> td_ranks_stop
 *                       -> others: td_ranks_join -> td_engine_follow -> td_ranks_stop
 *
 * A rank lives no longer than rank 0: the kernel kills it with rank 0's main thread, and it ends
 * by itself when any rank is dead (common/model/comm.h). */
#ifndef TD_ENGINE_RANKS_H
#define TD_ENGINE_RANKS_H

#include <stdbool.h>
#include <stdint.h>

#include "common/model/comm.h"
#include "common/base/status.h"

struct td_ranks_place { /* what that argument says; rank 0: zero */
    int32_t rank;
    int memfd, socket;
    uint32_t spin_us;
};

/* First in main: takes the internal argument, if it is there, out of argv. TD_ERR_INVALID: it is
 * malformed. */
td_status td_ranks_take(int *argc, char **argv, struct td_ranks_place *ret_place,
                        struct td_err *err);

struct td_ranks { /* stays where it is while in use */
    struct td_comm_segment segment;
    struct td_comm *comm;
    int32_t n_ranks;
    int pids[TD_COMM_MAX_RANKS];
};

/* Rank 0, in the main thread: starts ranks 1..n_ranks-1. n_threads: of all ranks together, 0 =
 * all CPUs; ranks that do not share CPUs look before they sleep. */
td_status td_ranks_start(int32_t n_ranks, int32_t n_threads, struct td_ranks *ranks,
                         struct td_err *err);
td_status td_ranks_join(const struct td_ranks_place *place, struct td_ranks *ranks,
                        struct td_err *err);
/* Rank 0: after the engine is closed; waits for the others, and kills those that do not come to
 * their end. Zeroed is fine. */
void td_ranks_stop(struct td_ranks *ranks);

#endif
