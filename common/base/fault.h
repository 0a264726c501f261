/* fault.h - named points of the request protocol at which a test can kill or stop the process, so
 * that tests try every step of the protocol and not only the ones that chance hits. Without
 * TANDEM_FAULT a point costs one predictable branch.
 *
 *     TANDEM_FAULT=ticket_sent:kill       SIGKILL when the point is first reached
 *     TANDEM_FAULT=decode_token:stop:5    SIGSTOP when it is reached for the fifth time
 *
 * Points in use:
 *   both workers  step_begun
 *   decode        decode_accepted decode_armed ticket_sent slot_ready slot_taken decode_token
 *                 decode_last
 *   prefill       prefill_accepted prefill_started layers_submitted chunk_submitted
 *                 first_token_sent final_submitted push_done
 *   router        router_request router_ticket router_first_token router_token
 *   transfer      xfer_tls xfer_hello xfer_offer xfer_rtr xfer_rts xfer_probe xfer_verifying
 *                 xfer_revoking xfer_stopping xfer_fencing */
#ifndef TD_BASE_FAULT_H
#define TD_BASE_FAULT_H

#include "common/base/status.h"

/* Reads TANDEM_FAULT; TD_ERR_INVALID when it is malformed. Prints a line on stderr when a point is
 * armed. Boot only, before threads. */
td_status td_fault_init(struct td_err *err);

extern const char *td_fault_armed; /* NULL = off */
void td_fault_hit(const char *point);

/* Any thread. */
static inline void td_fault_point(const char *point)
{
    if (__builtin_expect(td_fault_armed != NULL, 0)) td_fault_hit(point);
}

#endif
