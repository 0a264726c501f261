/* router_names.h - the routers that --router names: a list of host:port, in which a name that
 * stands for several addresses (a headless service of Kubernetes) is as many routers.
 *
 * Names are looked up on a thread of its own, again every 5 s, and every second while one is
 * unknown: a look-up may take seconds. A name that is unknown for a while keeps the addresses that
 * it had. Addresses need no look-up; targets of gRPC with a scheme (unix:, dns:) go through as they
 * are.
 *
 * Threads: open and close from one thread; get from any. */
#ifndef TD_WORKER_ROUTER_NAMES_H
#define TD_WORKER_ROUTER_NAMES_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_router_target {
    char target[320]; /* for td_rpc_channel_create */
    char host[256];   /* the name that was looked up, which its certificate must hold; "" = none */
};

struct td_router_names;

/* list is copied. TD_ERR_INVALID: it is empty or an item is not host:port; TD_ERR_LIMIT: more items
 * than max_targets. */
td_status td_router_names_open(const char *list, size_t max_targets,
                               struct td_router_names **ret_names, struct td_err *err);
/* Looks up no more; a look-up that is in progress ends by itself. NULL is allowed. */
void td_router_names_close(struct td_router_names *names);

/* Copies the targets when they are others than those of *version, and updates it (0 = none so far).
 * Returns how many there are now; max_targets bounds them. */
size_t td_router_names_get(struct td_router_names *names, uint64_t *version,
                           struct td_router_target *ret_targets);

#endif
