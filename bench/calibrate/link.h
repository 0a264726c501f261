/* link.h - how long the KV of a prompt is on its way between two workers of this host:
 * common/transfer with both ends in this process. */
#ifndef BENCH_CALIBRATE_LINK_H
#define BENCH_CALIBRATE_LINK_H

#include "common/transfer/transfer.h"

#define LINK_MAX_POINTS 8

struct link_point {
    int32_t n_blocks;
    double bytes, median_s, least_s, greatest_s; /* from submit to the sender's OP_DONE */
};

/* Transfers of 1, 2, 8 ... blocks, each `repeat` times (at most 100), none larger than
 * max_bytes. Blocking: seconds at most, each transfer has a deadline. TD_ERR_*: an end could not
 * be opened, or a transfer failed, with its reason. */
td_status link_measure(enum td_xfer_path path, size_t block_bytes, size_t max_bytes, int64_t repeat,
                       struct link_point ret_points[LINK_MAX_POINTS], size_t *ret_n,
                       struct td_err *err);

#endif
