/* scan.h - counts the elements of a message's repeated fields in its bytes, before unpacking them
 * costs memory. Pure. Internal to common/rpc and its tests. */
#ifndef TD_RPC_SCAN_H
#define TD_RPC_SCAN_H

#include <protobuf-c/protobuf-c.h>
#include <stddef.h>
#include <stdint.h>

#include "common/rpc/rpc.h"

/* Counts the fields of `limits` (NULL = none; ends with type NULL) in the bytes of a message of
 * `type`, and in its members whose type appears in limits; a type on the way to such a member must
 * appear in limits, too. TD_ERR_INVALID names field, count and limit. Bytes that are not protobuf
 * end the count: unpacking reports what is wrong with them. */
td_status td_rpc_scan(const ProtobufCMessageDescriptor *type,
                      const struct td_rpc_field_limit *limits, const uint8_t *bytes, size_t n_bytes,
                      struct td_err *err);

#endif
