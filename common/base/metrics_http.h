/* metrics_http.h - GET /metrics (Prometheus text) and GET /healthz over libmicrohttpd, on a port of
 * its own.
 *
 * One thread. Whoever connects and asks nothing, or slowly, must not hide the page: a connection
 * that is silent for 10 s is closed, and when 192 are open each new one closes the oldest. At
 * 1,000 slow connections a second the oldest is 0.2 s old, and a request takes about a
 * millisecond. */
#ifndef TD_BASE_METRICS_HTTP_H
#define TD_BASE_METRICS_HTTP_H

#include <stdbool.h>

#include "common/base/status.h"

struct td_metrics_http;

/* address "127.0.0.1:9100"; port 0 = any. healthy(ctx) is asked, on the server's thread, for
 * each GET /healthz: 200, or 503; NULL = always healthy. */
td_status td_metrics_http_start(const char *address, bool (*healthy)(void *ctx), void *ctx,
                                struct td_metrics_http **ret_http, struct td_err *err);
void td_metrics_http_stop(struct td_metrics_http *http); /* NULL is fine */

#endif
