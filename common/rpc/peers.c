/* peers.c - a hash table with chained buckets; a peer whose counts are all 0 is freed. */
#include "common/rpc/peers.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/hash.h"
#include "common/rpc/rpc_internal.h"

static uint64_t ipv6_key(const struct in6_addr *address)
{
    uint64_t key;
    uint32_t v4;
    if (IN6_IS_ADDR_LOOPBACK(address)) return UINT64_MAX;
    if (IN6_IS_ADDR_V4MAPPED(address)) {
        memcpy(&v4, &address->s6_addr[12], sizeof v4);
        return v4;
    }
    memcpy(&key, address->s6_addr, sizeof key);
    return key;
}

bool td_rpc_peer_key(const struct sockaddr_storage *address, uint64_t *ret_key)
{
    if (address->ss_family == AF_INET)
        *ret_key = ((const struct sockaddr_in *)(const void *)address)->sin_addr.s_addr;
    else if (address->ss_family == AF_INET6)
        *ret_key = ipv6_key(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
    else
        return false;
    return true;
}

bool td_rpc_peer_key_parse(const char *peer, uint64_t *ret_key)
{
    char host[INET6_ADDRSTRLEN + 8];
    const char *end = strrchr(peer, ':');
    bool is_v6 = strncmp(peer, "ipv6:", 5) == 0;
    if ((!is_v6 && strncmp(peer, "ipv4:", 5) != 0) || end < peer + 5) return false;
    const char *at = peer + 5;
    if (is_v6 && strncmp(at, "%5B", 3) == 0)
        at += 3;
    else if (is_v6 && *at == '[')
        at++;
    size_t n = strcspn(at, is_v6 ? "%]" : ":");
    if (n >= sizeof host) return false;
    memcpy(host, at, n);
    host[n] = 0;
    struct in_addr v4;
    struct in6_addr v6;
    if (is_v6) {
        if (inet_pton(AF_INET6, host, &v6) != 1) return false;
        *ret_key = ipv6_key(&v6);
        return true;
    }
    if (inet_pton(AF_INET, host, &v4) != 1) return false;
    *ret_key = v4.s_addr;
    return true;
}

static struct td_rpc_peer **bucket_of(struct td_rpc_peers *peers, uint64_t key)
{
    return &peers->buckets[td_hash64(&key, sizeof key, peers->seed) % TD_RPC_PEER_BUCKETS];
}

struct td_rpc_peer *td_rpc_peers_find(struct td_rpc_peers *peers, uint64_t key)
{
    struct td_rpc_peer *p = *bucket_of(peers, key);
    while (p && p->key != key) p = p->next;
    return p;
}

struct td_rpc_peer *td_rpc_peers_add(struct td_rpc_peers *peers, uint64_t key)
{
    struct td_rpc_peer *p = td_rpc_peers_find(peers, key);
    if (!p) {
        struct td_rpc_peer **bucket = bucket_of(peers, key);
        p = td_rpc_alloc(sizeof *p);
        p->key = key;
        p->next = *bucket;
        *bucket = p;
    }
    p->n++;
    return p;
}

void td_rpc_peers_drop(struct td_rpc_peers *peers, struct td_rpc_peer *peer)
{
    if (!peer || --peer->n) return;
    struct td_rpc_peer **at = bucket_of(peers, peer->key);
    while (*at != peer) at = &(*at)->next;
    *at = peer->next;
    free(peer);
}
