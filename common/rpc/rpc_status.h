/* rpc_status.h - maps a td_status to the gRPC code with which the call ends. */
#ifndef TD_RPC_STATUS_H
#define TD_RPC_STATUS_H

#include "common/base/status.h"

static inline enum td_code td_rpc_code(td_status s)
{
    switch (s) {
    case TD_OK:
    case TD_INPROGRESS:
        return TD_CODE_OK;
    case TD_ERR_AGAIN:
        return TD_CODE_RESOURCE_EXHAUSTED;
    case TD_ERR_INVALID:
    case TD_ERR_LIMIT:
    case TD_ERR_CORRUPT:
        return TD_CODE_INVALID_ARGUMENT;
    case TD_ERR_NOT_FOUND:
        return TD_CODE_NOT_FOUND;
    case TD_ERR_UNSUPPORTED:
        return TD_CODE_UNIMPLEMENTED;
    case TD_ERR_CANCELLED:
        return TD_CODE_CANCELLED;
    case TD_ERR_DEADLINE:
        return TD_CODE_DEADLINE_EXCEEDED;
    case TD_ERR_STALE:
        return TD_CODE_ABORTED;
    case TD_ERR_FINISHED:
    case TD_ERR_PEER:
        return TD_CODE_UNAVAILABLE;
    case TD_ERR_IO:
    case TD_ERR_NOMEM:
    case TD_ERR_DEVICE:
    case TD_ERR_INTERNAL:
        break;
    }
    return TD_CODE_INTERNAL;
}

#endif
