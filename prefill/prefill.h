/* prefill.h - the prefill worker: computes prompts in chunks and pushes their KV into the decode
 * worker's granted blocks as it goes. */
#ifndef TD_PREFILL_H
#define TD_PREFILL_H

#include "common/base/options.h"
#include "common/worker/worker.h"

struct prefill_config {
    struct td_worker_config worker;
    uint64_t send_timeout_ms; /* op start -> delivered; else the request fails over */
    int64_t transfer_parts;   /* groups of layers that are handed over while the next are
                                 computed; 0: by their size */
};

struct prefill {
    struct td_worker worker; /* first: roles get a td_worker and cast back */
    struct prefill_config cfg;
};

extern const struct td_option prefill_options[];
extern const struct td_worker_role prefill_role;

#endif
