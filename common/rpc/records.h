/* records.h - whether a client has finished its part of a TLS handshake, seen from outside: by the
 * types of its records. Pure: no I/O, no clock, no lock. Internal to common/rpc and its tests.
 *
 * Core tells nobody how far a handshake is, and its OpenSSL sees no sockets. But what a client
 * sends before its part is done are records of the types handshake, change_cipher_spec and
 * alert; its first record of the type application_data is the first message of HTTP/2 in TLS 1.2
 * (RFC 5246, 6.2.1) and its Finished in TLS 1.3 (RFC 8446, 5.2). A client may send one that
 * OpenSSL does not accept: then core ends the connection, unless it counts as early data, which
 * OpenSSL skips up to a bound. Such a client leaves the count of handshakes early; its
 * handshake's deadline still ends it. */
#ifndef TD_RPC_RECORDS_H
#define TD_RPC_RECORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct td_rpc_records {
    uint8_t n_head, head[5];
    uint32_t left; /* bytes of the record to come */
};

/* Zeroed is a new connection. Takes its next bytes; true = an application_data record has begun,
 * and there is nothing more to learn: the state is not to be used again. */
bool td_rpc_records_take(struct td_rpc_records *records, const uint8_t *bytes, size_t n_bytes);

#endif
