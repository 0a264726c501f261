/* metrics_http.h - GET /metrics (Prometheus text) and GET /healthz over libmicrohttpd, on a port of its own. */
#ifndef TD_WORKER_METRICS_HTTP_H
#define TD_WORKER_METRICS_HTTP_H

#include "common/base/status.h"

struct td_metrics_http;

/* address "127.0.0.1:9100"; port 0 = any. */
td_status td_metrics_http_start(const char *address, struct td_metrics_http **ret_http, struct td_err *err);
void td_metrics_http_stop(struct td_metrics_http *http);      /* NULL is fine */

#endif
