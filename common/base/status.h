/* status.h - the result of a call, td_status, and the message that explains an error.
 *
 * There is one td_status for the whole project, grouped by what is lost: nothing (0, 1), this try
 * (AGAIN), this request (-1..-19), this peer (-20..-39), this process (-40..). Cold paths (open,
 * parse, connect) also fill a td_err where the cause is known; hot paths return the status alone.
 * No includes beyond libc, because kernels/ includes this file. */
#ifndef TD_BASE_STATUS_H
#define TD_BASE_STATUS_H

#include <stddef.h>

typedef enum td_status {
    TD_OK = 0,
    TD_INPROGRESS = 1,

    TD_ERR_AGAIN = -1, /* back-pressure: queue the work, retry on the event that the callee names */
    TD_ERR_INVALID = -2, /* the caller's input is wrong; retrying cannot help            */
    TD_ERR_NOT_FOUND = -3,
    TD_ERR_LIMIT = -4,       /* a bound was exceeded (size, count, context)                  */
    TD_ERR_UNSUPPORTED = -5, /* understood, and refused by name                              */
    TD_ERR_CANCELLED = -6,
    TD_ERR_DEADLINE = -7,
    TD_ERR_CORRUPT = -8, /* outside bytes contradict themselves (file, frame)            */
    TD_ERR_STALE = -9,   /* generation, attempt or incarnation is an old one             */
    /* the request has ended well elsewhere, so this part of it is not needed */
    TD_ERR_FINISHED = -10,

    TD_ERR_PEER = -20, /* this peer is gone or broke the protocol                      */

    TD_ERR_IO = -40,
    TD_ERR_NOMEM = -41,
    TD_ERR_DEVICE = -42,
    TD_ERR_INTERNAL = -43,
} td_status;

/* How a call between processes ended: gRPC's status codes, with their numbers on the wire. The
 * router's core and the daemons use these names; td_rpc_code (common/rpc) maps a td_status to one
 * of them. */
enum td_code {
    TD_CODE_OK = 0,
    TD_CODE_CANCELLED = 1,
    TD_CODE_UNKNOWN = 2,
    TD_CODE_INVALID_ARGUMENT = 3,
    TD_CODE_DEADLINE_EXCEEDED = 4,
    TD_CODE_NOT_FOUND = 5,
    TD_CODE_ALREADY_EXISTS = 6,
    TD_CODE_PERMISSION_DENIED = 7,
    TD_CODE_RESOURCE_EXHAUSTED = 8, /* back-pressure: the caller may try again later */
    TD_CODE_FAILED_PRECONDITION = 9,
    TD_CODE_ABORTED = 10,
    TD_CODE_OUT_OF_RANGE = 11,
    TD_CODE_UNIMPLEMENTED = 12,
    TD_CODE_INTERNAL = 13,
    TD_CODE_UNAVAILABLE = 14, /* retrying may help, perhaps elsewhere */
    TD_CODE_DATA_LOSS = 15,
    TD_CODE_UNAUTHENTICATED = 16,
};

#define TD_ERR_MSG_MAX 512

/* An error message for a person: it names the thing, the value and the limit. Zeroed = no error. */
struct td_err {
    td_status code;
    char msg[TD_ERR_MSG_MAX];
};

/* Fills *err (when err is not NULL; truncates) and returns `code`, so that reporting a cause is one
 * line: return td_fail(err, TD_ERR_INVALID, "config.json: hidden_size is %d, must be > 0", h); */
td_status td_fail(struct td_err *err, td_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Puts "prefix: " before the message that is already there; returns err->code. */
td_status td_err_prefix(struct td_err *err, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

const char *td_status_name(td_status code); /* "again", "invalid", ...; static storage */

/* For our own bugs only; compiled into release builds too. Prints file, line, function and
 * expression, then aborts. */
#define TD_ASSERT(expr) ((expr) ? (void)0 : td_assert_failed(#expr, __FILE__, __LINE__, __func__))
_Noreturn void td_assert_failed(const char *expr, const char *file, int line, const char *func);

#endif
