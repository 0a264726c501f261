/* accept.h - replaces the accept4 and the reads that gRPC core calls, so that no burst of
 * connections can disable a listener, a connection ends when its client floods, and a server that
 * goes away cancels no call. Internal to common/rpc.
 *
 * Why here: gRPC core 1.51 ends a listener for good at the first accept4 error other than EINTR,
 * EAGAIN and ECONNABORTED: once the process has no descriptor left (EMFILE), the port accepts
 * nothing until a restart. Core also has no bound on connections. So accept.c defines accept4, and
 * the dynamic linker resolves libgrpc's call to the program's definition. For descriptors that are
 * not a guarded listener nothing changes.
 *
 * On a guarded listener
 * - no error reaches core that it does not survive;
 * - one descriptor is kept in reserve. When there is no other, it is released for a moment to
 *   accept the next connection and close it, so that its client gets an answer at once and the
 *   backlog empties;
 * - connections above max_connections, or above max_peer_connections of one address (IPv6: of one
 *   /64), are closed;
 * - with TLS, connections above the bounds on handshakes, in progress at once and begun in a
 *   second, are closed. One address has the share of both bounds that it has of connections. When
 *   all handshakes are in progress and the oldest is older than TD_RPC_HANDSHAKE_PATIENCE_MS, the
 *   oldest is ended, so a client that does not finish keeps nobody out. Core ends a handshake that
 *   is not done in time (GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS).
 *
 * What core reads from an accepted connection passes through frames.h first: recvmsg without TLS,
 * SSL_read with it (ALPN agrees on HTTP/2). A connection that breaks a bound reads as closed by its
 * client. At most TD_RPC_LARGE_BLOCKS header blocks in the process may be large and incomplete, for
 * a second each: one more ends the oldest if it has had its second, and otherwise itself. Without
 * TLS, TD_RPC_LARGE_ENDED more may be ended and not yet freed by core. A byte of a block costs core
 * 72 bytes, so such blocks take at most 36 x 64 KiB x 72 = 170 MB, whoever sends them. */
#ifndef TD_RPC_ACCEPT_H
#define TD_RPC_ACCEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/rpc/frames.h"
#include "common/rpc/records.h"

enum {
    TD_RPC_LARGE_BLOCKS = 32,
    TD_RPC_LARGE_ENDED = 4,
    /* A client on a slow link needs three round trips; 1 s is ten times that across a continent. */
    TD_RPC_HANDSHAKE_PATIENCE_MS = 1000,
    /* This many seconds' worth of the bound on handshakes a second may come at once, when clients
     * all connect anew. */
    TD_RPC_HANDSHAKE_BURST_S = 4,
};

struct td_rpc_guard;

/* What a client has sent on one connection. Zeroed = new. */
struct td_rpc_reader {
    struct td_rpc_frames frames;
    uint64_t guard_id;    /* 0 = unknown (TLS) */
    int fd;               /* -1 = unknown (TLS) */
    bool over;            /* ended by us */
    uint64_t large_since; /* ns; 0 = not in a large block */
};
/* TLS: finds the reader's guard by the random of its client's ClientHello. It stays unknown if no
 * connection has that one. Looks at every open connection. [any] */
void td_rpc_reader_find_guard(struct td_rpc_reader *reader,
                              const uint8_t random[TD_RPC_RANDOM_BYTES]);
/* Checks bytes that core is about to read; false = core must read an end instead. [any] */
bool td_rpc_reader_take(struct td_rpc_reader *reader, void *bytes, size_t n_bytes);
/* 0 = built without OpenSSL's headers, so TLS connections are not checked [any] */
int td_rpc_tls_is_guarded(void);
/* call it when the connection is gone [any] */
void td_rpc_reader_forget(struct td_rpc_reader *reader);

struct td_rpc_guard_stats {
    uint32_t open;               /* connections now */
    uint64_t accepted;           /* given to core */
    uint64_t refused_total;      /* closed: above max_connections */
    uint64_t refused_peer;       /* closed: above max_peer_connections */
    uint64_t starved;            /* closed: the process had no descriptor left */
    uint32_t handshakes;         /* TLS: in progress now */
    uint64_t refused_handshakes; /* closed: too many in progress, or begun in a second */
    /* Ended because of what the client sent. With TLS also those whose port is unknown. */
    uint64_t ended;
};

struct td_rpc_guard_config {
    int port;              /* of a TCP listener */
    const char *unix_path; /* not NULL: a unix socket's listener, and port is ignored */
    bool use_tls;
    uint32_t max_connections, max_peer_connections;
    uint32_t max_unacked_streams;
    uint32_t max_handshakes; /* TLS: handshakes in progress at once; 0 = TD_RPC_MAX_HANDSHAKES */
    uint32_t max_handshakes_per_s; /* TLS: handshakes begun in a second; 0 = no bound */
};

/* Guards one listener. Limits that are 0 are derived: connections = the descriptors that this
 * process may open less TD_RPC_RESERVED_FDS, at most TD_RPC_MAX_CONNECTIONS; of one peer half of
 * that. Call it before the listener accepts. [any] */
struct td_rpc_guard *td_rpc_guard_open(const struct td_rpc_guard_config *config);
/* From now on core sees no new stream on the listener's connections, not on new ones either
 * (frames.h); with TLS also on those whose port is unknown. [any] */
void td_rpc_guard_hide_streams(struct td_rpc_guard *guard);
/* Streams that core has seen begin, all told; UINT64_MAX = with TLS some were not counted. [any] */
uint64_t td_rpc_guard_streams(struct td_rpc_guard *guard);
/* the listener must be closed before; NULL is allowed [any] */
void td_rpc_guard_close(struct td_rpc_guard *guard);
/* looks at every open connection [any] */
void td_rpc_guard_stats(struct td_rpc_guard *guard, struct td_rpc_guard_stats *ret_stats);
void td_rpc_guard_limits(const struct td_rpc_guard *guard, uint32_t *ret_connections,
                         uint32_t *ret_peer_connections);

#endif
