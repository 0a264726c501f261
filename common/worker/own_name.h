/* own_name.h - waits until a worker's own name (--advertise) is known to name servers.
 *
 * Why here: grants name the worker's KV port by a number, so the worker looks its name up once, at
 * start. Kubernetes publishes a pod's name only after the pod has begun, and name servers remember
 * for a while that a name was not there. */
#ifndef TD_WORKER_OWN_NAME_H
#define TD_WORKER_OWN_NAME_H

#include <stdint.h>

#include "common/base/status.h"

/* CoreDNS remembers for 30 s that a name was not there, and the kubelet may take as long to report
 * the pod's address. */
enum { TD_OWN_NAME_WAIT_MS = 90000, TD_OWN_NAME_AGAIN_MS = 500 };

struct td_own_name_hooks { /* tests' own; all are given, or none */
    td_status (*look)(void *ctx, const char *host, struct td_err *err);
    uint64_t (*now_ns)(void *ctx);
    void (*pause)(void *ctx, uint64_t ms);
    void *ctx;
};

/* host: a name or an address that td_address_host accepts. hooks NULL: the resolver and the clock.
 * Blocks. Logs own_name_unknown once, and own_name_known after a wait. TD_ERR_INVALID: not known
 * after TD_OWN_NAME_WAIT_MS, with the resolver's last reason. */
td_status td_own_name_wait(const char *host, const struct td_own_name_hooks *hooks,
                           struct td_err *err);

#endif
