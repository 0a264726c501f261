/* records.h - tells from a client's TLS records whether the client has finished its part of the
 * handshake, and which random its ClientHello holds. Pure: no I/O, no clock, no lock. Internal to
 * common/rpc and its tests.
 *
 * Why here: core does not report how far a handshake is, and its OpenSSL sees no sockets. But
 * before its part is done a client sends only records of the types handshake, change_cipher_spec
 * and alert. Its first record of the type application_data is the first message of HTTP/2 in TLS
 * 1.2 (RFC 5246, 6.2.1) and its Finished in TLS 1.3 (RFC 8446, 5.2). A client may send one that
 * OpenSSL does not accept. Core then ends the connection, unless the record counts as early data,
 * which OpenSSL skips up to a bound: such a client leaves the count of handshakes early, and its
 * handshake's deadline still ends it.
 *
 * The random (RFC 8446, 4.1.2) tells which of OpenSSL's objects belongs to the connection: the
 * object knows it, too. */
#ifndef TD_RPC_RECORDS_H
#define TD_RPC_RECORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    /* Before the random in a ClientHello: type, length (3 bytes), version (2 bytes). */
    TD_RPC_RANDOM_AT = 6,
    TD_RPC_RANDOM_BYTES = 32,
};

struct td_rpc_records {
    uint8_t n_head, head[5];
    uint32_t left; /* bytes of the record to come */
    /* the first handshake message, up to the end of its random */
    uint8_t n_hello, hello[TD_RPC_RANDOM_AT + TD_RPC_RANDOM_BYTES];
};

/* Takes the next bytes of a connection, which is new when the struct is zeroed. True = an
 * application_data record has begun, and the struct takes no more. */
bool td_rpc_records_take(struct td_rpc_records *records, const uint8_t *bytes, size_t n_bytes);

/* Whether this random is the one that has come. */
bool td_rpc_records_is_random(const struct td_rpc_records *records,
                              const uint8_t random[TD_RPC_RANDOM_BYTES]);

#endif
