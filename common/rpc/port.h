/* port.h - the bounds of a daemon's gRPC port against floods: the options that routers and workers
 * share, and metrics that show how close the port is to them. docs/security.md, "Floods", says what
 * each bound is against.
 *
 * Threads: the rpc loop's, except td_port_limits, which is called at boot. */
#ifndef TD_RPC_PORT_H
#define TD_RPC_PORT_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/options.h"
#include "common/rpc/rpc.h"

struct td_port_config {
    uint64_t max_connections, max_connections_per_peer, max_calls_per_peer;
    uint64_t max_handshakes, max_handshakes_per_s, handshake_timeout_ms;
};

/* DEFAULT_CONNECTIONS is a string. A router serves any client, so its default is what the limit of
 * open files allows; a worker is called by routers and operators only. */
// clang-format off
#define TD_PORT_OPTIONS(S, M, DEFAULT_CONNECTIONS)                                               \
    {"max_connections", TD_OPT_U64, DEFAULT_CONNECTIONS, 0, 1 << 20, NULL,                       \
     offsetof(S, M.max_connections),                                                             \
     "connections at once; more are closed; 0 = what the limit of open files allows, at most "   \
     "16384"},                                                                                   \
    {"max_connections_per_peer", TD_OPT_U64, "0", 0, 1 << 20, NULL,                              \
     offsetof(S, M.max_connections_per_peer),                                                    \
     "of one address (IPv6: /64); 0 = half of max_connections; behind one load balancer give "   \
     "it all of them"},                                                                          \
    {"max_calls_per_peer", TD_OPT_U64, "0", 0, 1 << 20, NULL, offsetof(S, M.max_calls_per_peer), \
     "calls of one address at once; more are refused; 0 = three quarters of all, which is "      \
     "more than the requests that the daemon holds"},                                            \
    {"max_handshakes", TD_OPT_U64, "256", 1, 1 << 20, NULL, offsetof(S, M.max_handshakes),       \
     "TLS handshakes in progress at once; when all have lasted a second, a new one ends the "    \
     "oldest; one address has the same share of them as of connections"},                        \
    {"max_handshakes_per_s", TD_OPT_U64, "256", 0, 1 << 20, NULL,                                \
     offsetof(S, M.max_handshakes_per_s),                                                        \
     "TLS handshakes that begin in a second, and four times as many at once; further "           \
     "connections are closed; of one address the same share as of connections; 0 = any number"}, \
    {"handshake_timeout_ms", TD_OPT_U64, "10000", 100, 600000, NULL,                             \
     offsetof(S, M.handshake_timeout_ms),                                                        \
     "a connection that has not ended its TLS handshake, and begun HTTP/2, by then is closed"}
// clang-format on

/* Sets these bounds in *limits, and registers the metrics. n_calls: the calls that the port accepts
 * in all. */
void td_port_limits(const struct td_port_config *config, uint32_t n_calls,
                    struct td_rpc_limits *limits);

/* What td_port_follow has exported of one server. Zeroed = nothing yet. */
struct td_port_seen {
    uint64_t counted_ns, refused, ended;
};
/* Updates the metrics of the server's connections, at most once a second, because counting looks at
 * each connection. True when it did. NULL server: does nothing. */
bool td_port_follow(struct td_port_seen *seen, const struct td_rpc_server *server, uint64_t now_ns);

#endif
