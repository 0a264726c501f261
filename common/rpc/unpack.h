/* unpack.h - unpacks protobuf bytes from outside into a struct, with bounded memory and checked
 * text. Internal to common/rpc and its tests.
 *
 * Why here: protobuf-c turns 1 MiB of hostile bytes into 50 MB of heap. So an unpacker takes memory
 * from one block and counts it against a budget. The message lives until td_rpc_unpack_reset, which
 * frees everything at once. One thread. Messages must not be recursive, because protobuf-c has no
 * depth limit (rpc_test checks our schemas). */
#ifndef TD_RPC_UNPACK_H
#define TD_RPC_UNPACK_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_rpc_unpacker {
    ProtobufCAllocator allocator;
    uint8_t *own; /* the first block, reused for every message */
    size_t own_bytes;
    uint8_t *block; /* own, or the last of the message's further blocks */
    size_t block_used, block_bytes;
    struct td_rpc_unpack_chunk *chunks; /* further blocks, and allocations too long for one */
    size_t used_bytes, max_bytes;
    bool exhausted;
};

void td_rpc_unpacker_init(struct td_rpc_unpacker *unpacker);
void td_rpc_unpacker_close(struct td_rpc_unpacker *unpacker);

/* Errors: TD_ERR_INVALID (not this message, or a string field that is not UTF-8, which the message
 * names), TD_ERR_LIMIT (more than max_bytes of heap). */
td_status td_rpc_unpack(struct td_rpc_unpacker *unpacker, const ProtobufCMessageDescriptor *type,
                        const uint8_t *bytes, size_t n_bytes, size_t max_bytes,
                        const ProtobufCMessage **ret_msg, struct td_err *err);
void td_rpc_unpack_reset(struct td_rpc_unpacker *unpacker);

#endif
