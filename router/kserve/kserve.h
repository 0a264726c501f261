/* kserve.h - KServe's Open Inference Protocol v2 in front of the same requests that the other doors
 * make (inference.c): inference.GRPCInferenceService on the gRPC port, and its HTTP twin's paths.
 * The door only reads and writes; docs/kserve.md is what clients see.
 *
 * Threads: the router's loop thread. */
#ifndef TD_ROUTER_KSERVE_H
#define TD_ROUTER_KSERVE_H

#include "common/rpc/rpc.h"
#include "router/router.h"

enum { KSERVE_MAX_STREAM_REQUESTS = 256 }; /* live at once on one ModelStreamInfer */

extern const struct td_rpc_method kserve_methods[];

/* Whether requests for the model can be placed: workers of each role that it needs are ready. */
bool kserve_model_is_ready(const struct router *r, const struct served_model *m);
/* Of some model. */
bool kserve_server_is_ready(const struct router *r);

#endif
