/* accept.h - the accept4 that gRPC core calls is ours: a listener that no burst of connections can deafen. Internal to common/rpc.
 *
 * gRPC core 1.51 ends a listener for good at the first accept4 error other than EINTR, EAGAIN and ECONNABORTED: once
 * the process has no descriptor left (EMFILE), the port is deaf until a restart. Core also has no bound on connections.
 * Both are decided here, in front of core: accept.c defines accept4, and the dynamic linker resolves libgrpc's call to
 * the program's definition. It changes nothing for descriptors that are not a guarded listener.
 *
 * On a guarded listener
 *   - no error reaches core that it does not survive;
 *   - a descriptor is kept in reserve: when there is no other, it is given up for a moment to take the next connection
 *     and close it, so that its client hears of it at once, and the backlog is emptied;
 *   - connections above max_connections, or above max_peer_connections of one address (IPv6: of one /64), are closed. */
#ifndef TD_RPC_ACCEPT_H
#define TD_RPC_ACCEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_rpc_door;

struct td_rpc_door_stats {
    uint32_t open;             /* connections now */
    uint64_t accepted;         /* given to core */
    uint64_t refused_total;    /* closed: above max_connections */
    uint64_t refused_peer;     /* closed: above max_peer_connections */
    uint64_t starved;          /* closed: the process had no descriptor left */
};

/* Guards the listener of a TCP port, or of a unix path (then port is ignored). Zero limits are derived: connections =
 * the descriptors this process may open less TD_RPC_RESERVED_FDS, at most TD_RPC_MAX_CONNECTIONS; of one peer half of
 * them. Called before the listener accepts. [any] */
struct td_rpc_door *td_rpc_door_open(int port, const char *unix_path, uint32_t max_connections,
                                     uint32_t max_peer_connections);
void td_rpc_door_close(struct td_rpc_door *door);        /* the listener must be gone; NULL is fine [any] */
void td_rpc_door_stats(struct td_rpc_door *door, struct td_rpc_door_stats *ret_stats);     /* counts what is open [any] */
void td_rpc_door_limits(const struct td_rpc_door *door, uint32_t *ret_connections, uint32_t *ret_peer_connections);

#endif
