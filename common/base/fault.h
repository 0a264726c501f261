/* fault.h - named points of the request protocol at which a test can kill or stop the process, so
 * that every step of it is tried and not only the ones that chance finds. Off unless TANDEM_FAULT
 * is set: then one predictable branch.
 *
 *     TANDEM_FAULT=ticket_sent:kill        SIGKILL at the first passage
 *                                          TANDEM_FAULT=decode_token:stop:5    SIGSTOP at the fifth
 *
 * Points in use: step_begun | decode_accepted decode_armed ticket_sent slot_ready slot_taken
 *     decode_token decode_last |
 * prefill_accepted prefill_started layers_submitted chunk_submitted first_token_sent
 * final_submitted push_done | router_request router_ticket router_first_token router_token |
 * xfer_tls xfer_hello xfer_offer xfer_rtr xfer_rts xfer_probe xfer_verifying xfer_revoking
 * xfer_stopping xfer_fencing */
#ifndef TD_BASE_FAULT_H
#define TD_BASE_FAULT_H

#include "common/base/status.h"

/* Boot, before threads: reads TANDEM_FAULT; TD_ERR_INVALID when it is malformed. Says so on
 * stderr when armed. */
td_status td_fault_init(struct td_err *err);

extern const char *td_fault_armed; /* NULL = off */
void td_fault_hit(const char *point);

/* Any thread. */
static inline void td_fault_point(const char *point)
{
    if (__builtin_expect(td_fault_armed != NULL, 0)) td_fault_hit(point);
}

#endif
