/* metrics_http.h - serves GET /metrics (Prometheus text), GET /healthz and GET /readyz with
 * libmicrohttpd, on a port of its own.
 *
 * One thread serves. A client that connects and asks nothing, or asks slowly, must not keep others
 * out: a connection that is silent for 10 s is closed, and while 192 are open each new one closes
 * the oldest. At 1,000 slow connections a second the oldest is 0.2 s old, and a request takes about
 * 1 ms. */
#ifndef TD_BASE_METRICS_HTTP_H
#define TD_BASE_METRICS_HTTP_H

#include <stdbool.h>

#include "common/base/status.h"

struct td_metrics_http;

/* address: "127.0.0.1:9100"; port 0 = any free port. healthy(ctx) is called on the server's thread
 * for each GET /healthz: true answers 200, false 503; NULL = always healthy. */
td_status td_metrics_http_start(const char *address, bool (*healthy)(void *ctx), void *ctx,
                                struct td_metrics_http **ret_http, struct td_err *err);
/* ready(ctx) is called likewise for each GET /readyz: true answers 200, false 503. Without it
 * /readyz answers as /healthz. [any] */
void td_metrics_http_set_ready(struct td_metrics_http *http, bool (*ready)(void *ctx));
void td_metrics_http_stop(struct td_metrics_http *http); /* NULL is fine */

#endif
