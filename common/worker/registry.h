/* registry.h - the worker's end of the Registry streams, one to each router that --router names:
 * hello, snapshots, drain; reconnects for ever with bounded back-off. All on the rpc loop thread
 * but create/destroy (main thread). */
#ifndef TD_WORKER_REGISTRY_H
#define TD_WORKER_REGISTRY_H

#include "common/base/status.h"

struct td_worker;
struct td_registry;

td_status td_registry_create(struct td_worker *w, struct td_registry **ret_registry,
                             struct td_err *err);
void td_registry_drain(struct td_registry *r);   /* any thread: tells the router to send
                                                    nothing new */
void td_registry_destroy(struct td_registry *r); /* any thread but the loop's; waits until the
                                                    stream is gone */

#endif
