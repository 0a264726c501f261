/* origins.h - the list of --http-cors-origins: whose pages may read answers in a browser. */
#ifndef TD_ROUTER_HTTP_ORIGINS_H
#define TD_ROUTER_HTTP_ORIGINS_H

#include <stdbool.h>

#include "common/base/status.h"

/* list: origins between commas or spaces, or "*" alone. An origin is as a browser sends it (RFC
 * 6454): scheme://host or scheme://host:port without a path, or "null". TD_ERR_INVALID names one
 * that no browser would send, and which would therefore never be found. */
td_status http_origins_check(const char *list, struct td_err *err);

bool http_origins_have(const char *list, const char *origin);

#endif
