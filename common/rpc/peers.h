/* peers.h - counts connections, or calls, per remote address. Internal to common/rpc.
 *
 * A peer is an IPv4 address (mapped into IPv6 or not) or an IPv6 /64, which is what one customer is
 * given. Peers on a unix socket are on this host: they have no key and are not counted. The caller
 * locks. */
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
    uint32_t n_handshakes; /* how many of the n are TLS handshakes in progress; kept by accept.c */
};

struct td_rpc_peers {
    /* set before the first use, so that nobody outside can aim addresses at one bucket */
    uint64_t seed;
    struct td_rpc_peer *buckets[TD_RPC_PEER_BUCKETS];
};

/* The key of an address; false: not an IP address. */
bool td_rpc_peer_key(const struct sockaddr_storage *address, uint64_t *ret_key);
/* The same from gRPC's text: "ipv4:10.0.0.7:4711", "ipv6:[::1]:4711" (brackets plain or
 * percent-encoded). */
bool td_rpc_peer_key_parse(const char *peer, uint64_t *ret_key);
/* NULL = none */
struct td_rpc_peer *td_rpc_peers_find(struct td_rpc_peers *peers, uint64_t key);
/* counts one more */
struct td_rpc_peer *td_rpc_peers_add(struct td_rpc_peers *peers, uint64_t key);
/* counts one less; NULL is allowed */
void td_rpc_peers_drop(struct td_rpc_peers *peers, struct td_rpc_peer *peer);

#endif
