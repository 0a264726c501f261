/* comm_channels.h - the calls of comm.h among ranks that share no memory: one byte stream from each
 * rank to rank 0. comm.c alone includes it; comm.h says what each call does. */
#ifndef TD_MODEL_COMM_CHANNELS_H
#define TD_MODEL_COMM_CHANNELS_H

#include "common/model/comm.h"

struct comm_channels;

/* The channels are taken over on success. */
td_status comm_channels_open(const struct td_comm_channel *channels, int32_t n_ranks, int32_t rank,
                             struct comm_channels **ret, struct td_err *err);
void comm_channels_close(struct comm_channels *w); /* NULL is fine */
void comm_channels_set_timeout(struct comm_channels *w, uint64_t timeout_ns);

td_status comm_channels_sum(struct comm_channels *w, float *x, size_t n);
td_status comm_channels_all_gather(struct comm_channels *w, const void *mine, size_t bytes,
                                   void *all);
td_status comm_channels_parts(struct comm_channels *w, float *all, const size_t *first);
td_status comm_channels_columns(struct comm_channels *w, const float *mine, int32_t n_rows,
                                const int32_t *first, float *out);
td_status comm_channels_broadcast(struct comm_channels *w, void *data, size_t *bytes, bool idle);
td_status comm_channels_barrier(struct comm_channels *w);
td_status comm_channels_collect(struct comm_channels *w, const void *mine, const size_t *bytes,
                                uint8_t *const *at);
td_status comm_channels_deal(struct comm_channels *w, const uint8_t *const *at, const size_t *bytes,
                             void *mine);

td_status comm_channels_check(struct comm_channels *w);
void comm_channels_abort(struct comm_channels *w, const char *reason);
const char *comm_channels_reason(const struct comm_channels *w, char *buf);

/* Copies elements [at, at + n) of a dense [.., width] matrix to the columns from `column` on of a
 * matrix with rows of `stride`. (comm.c) */
void comm_place_columns(const float *from, size_t at, size_t n, size_t width, float *out,
                        size_t column, size_t stride);

#endif
