/* rpc_status.h - our statuses as gRPC's. */
#ifndef TD_RPC_STATUS_H
#define TD_RPC_STATUS_H

#include <grpc/status.h>

#include "common/base/status.h"

static inline grpc_status_code td_rpc_code(td_status s)
{
    switch (s) {
    case TD_OK:
    case TD_INPROGRESS:
        return GRPC_STATUS_OK;
    case TD_ERR_AGAIN:
        return GRPC_STATUS_RESOURCE_EXHAUSTED;
    case TD_ERR_INVALID:
    case TD_ERR_LIMIT:
    case TD_ERR_CORRUPT:
        return GRPC_STATUS_INVALID_ARGUMENT;
    case TD_ERR_NOT_FOUND:
        return GRPC_STATUS_NOT_FOUND;
    case TD_ERR_UNSUPPORTED:
        return GRPC_STATUS_UNIMPLEMENTED;
    case TD_ERR_CANCELLED:
        return GRPC_STATUS_CANCELLED;
    case TD_ERR_DEADLINE:
        return GRPC_STATUS_DEADLINE_EXCEEDED;
    case TD_ERR_STALE:
        return GRPC_STATUS_ABORTED;
    case TD_ERR_FINISHED:
    case TD_ERR_PEER:
        return GRPC_STATUS_UNAVAILABLE;
    case TD_ERR_IO:
    case TD_ERR_NOMEM:
    case TD_ERR_DEVICE:
    case TD_ERR_INTERNAL:
        break;
    }
    return GRPC_STATUS_INTERNAL;
}

#endif
