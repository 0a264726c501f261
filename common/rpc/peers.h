/* peers.h - how many connections, or calls, each remote address has. Internal to common/rpc.
 *
 * A peer is an IPv4 address (mapped into IPv6 or not) or an IPv6 /64, which is what one customer
 * is given. Peers on a unix socket are this host: they have no key and are not counted. The
 * caller locks. */
#ifndef TD_RPC_PEERS_H
#define TD_RPC_PEERS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

enum { TD_RPC_PEER_BUCKETS = 1024 };

struct td_rpc_peer {
    struct td_rpc_peer *next;
    uint64_t key;
    uint32_t n;
    uint32_t n_handshakes; /* of the n: TLS handshakes in progress; kept by accept.c */
};

struct td_rpc_peers {
    uint64_t seed; /* set before the first use: chains must not be
                      chosen from outside */
    struct td_rpc_peer *buckets[TD_RPC_PEER_BUCKETS];
};

/* False: not an IP address. */
bool td_rpc_peer_key(const struct sockaddr_storage *address, uint64_t *ret_key);
/* The same from gRPC's words: "ipv4:10.0.0.7:4711", "ipv6:[::1]:4711" (brackets as they are, or
 * percent-encoded). */
bool td_rpc_peer_key_parse(const char *peer, uint64_t *ret_key);
/* NULL = none */
struct td_rpc_peer *td_rpc_peers_find(struct td_rpc_peers *peers, uint64_t key);
/* one more of it */
struct td_rpc_peer *td_rpc_peers_add(struct td_rpc_peers *peers, uint64_t key);
/* one less; NULL is fine */
void td_rpc_peers_drop(struct td_rpc_peers *peers, struct td_rpc_peer *peer);

#endif
