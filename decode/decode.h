/* decode.h - the decode worker: reserves blocks, takes KV in, streams tokens; prefills for
 * itself when asked (colocated). */
#ifndef TD_DECODE_H
#define TD_DECODE_H

#include "common/base/options.h"
#include "common/worker/worker.h"

struct decode_config {
    struct td_worker_config worker;
    uint64_t import_timeout_ms; /* reservation -> KV complete; else the slot is taken back */
};

struct decode {
    struct td_worker worker; /* first: roles get a td_worker and cast back */
    struct decode_config cfg;
};

extern const struct td_option decode_options[];
extern const struct td_worker_role decode_role;

#endif
