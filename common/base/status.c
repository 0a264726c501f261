/* status.c - names of the codes and the text of errors. No state, so every function is
 * thread-safe. */
#include "common/base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

td_status td_fail(struct td_err *err, td_status code, const char *fmt, ...)
{
    if (!err) return code;
    /* Formats into a buffer first, because the arguments may point into err->msg (when a cause is
     * rewritten). */
    char msg[TD_ERR_MSG_MAX];
    va_list args;
    va_start(args, fmt);
    vsnprintf(msg, sizeof msg, fmt, args);
    va_end(args);
    err->code = code;
    memcpy(err->msg, msg, strlen(msg) + 1);
    return code;
}

td_status td_err_prefix(struct td_err *err, const char *fmt, ...)
{
    if (!err)
        return TD_ERR_INTERNAL; /* the cause was not recorded: the caller keeps the status
                                   it has */
    char msg[TD_ERR_MSG_MAX];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(msg, sizeof msg, fmt, args);
    va_end(args);
    if (n < 0) n = 0;
    if ((size_t)n < sizeof msg) snprintf(msg + n, sizeof msg - (size_t)n, ": %s", err->msg);
    memcpy(err->msg, msg, strlen(msg) + 1);
    return err->code;
}

const char *td_status_name(td_status code)
{
    switch (code) {
    case TD_OK:
        return "ok";
    case TD_INPROGRESS:
        return "in_progress";
    case TD_ERR_AGAIN:
        return "again";
    case TD_ERR_INVALID:
        return "invalid";
    case TD_ERR_NOT_FOUND:
        return "not_found";
    case TD_ERR_LIMIT:
        return "limit";
    case TD_ERR_UNSUPPORTED:
        return "unsupported";
    case TD_ERR_CANCELLED:
        return "cancelled";
    case TD_ERR_DEADLINE:
        return "deadline";
    case TD_ERR_CORRUPT:
        return "corrupt";
    case TD_ERR_STALE:
        return "stale";
    case TD_ERR_FINISHED:
        return "finished";
    case TD_ERR_PEER:
        return "peer";
    case TD_ERR_IO:
        return "io";
    case TD_ERR_NOMEM:
        return "nomem";
    case TD_ERR_DEVICE:
        return "device";
    case TD_ERR_INTERNAL:
        return "internal";
    }
    return "unknown";
}

void td_assert_failed(const char *expr, const char *file, int line, const char *func)
{
    fprintf(stderr, "%s:%d: %s: assertion failed: %s\n", file, line, func, expr);
    fflush(stderr);
    abort();
}
