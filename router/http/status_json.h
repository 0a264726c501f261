/* status_json.h - a StatusResponse as JSON: what `tandem status --json` prints and GET /v1/status
 * answers. Pure; any thread. */
#ifndef TD_ROUTER_HTTP_STATUS_JSON_H
#define TD_ROUTER_HTTP_STATUS_JSON_H

#include <jansson.h>

#include "tandem/v1/inference.pb-c.h"

/* NULL: no memory. The caller calls json_decref. */
json_t *status_json(const Tandem__V1__StatusResponse *s);

#endif
