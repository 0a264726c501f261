/* records.h - tells from the types of a client's TLS records whether the client has finished its
 * part of the handshake. Pure: no I/O, no clock, no lock. Internal to common/rpc and its tests.
 *
 * Why here: core does not report how far a handshake is, and its OpenSSL sees no sockets. But
 * before its part is done a client sends only records of the types handshake, change_cipher_spec
 * and alert. Its first record of the type application_data is the first message of HTTP/2 in TLS
 * 1.2 (RFC 5246, 6.2.1) and its Finished in TLS 1.3 (RFC 8446, 5.2). A client may send one that
 * OpenSSL does not accept. Core then ends the connection, unless the record counts as early data,
 * which OpenSSL skips up to a bound: such a client leaves the count of handshakes early, and its
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

/* Takes the next bytes of a connection, which is new when the struct is zeroed. True = an
 * application_data record has begun, and the struct is not to be used again. */
bool td_rpc_records_take(struct td_rpc_records *records, const uint8_t *bytes, size_t n_bytes);

#endif
