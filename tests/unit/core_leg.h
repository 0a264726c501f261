/* core_leg.h - events of legs for the router core's tests, which play many kinds through one
 * function: a and b are the first two numbers of the kind, as the decision log's columns a and b
 * have them (docs/wire.md). */
#ifndef TD_TESTS_CORE_LEG_H
#define TD_TESTS_CORE_LEG_H

#include "router/core/core.h"

static inline struct td_core_event leg_event(enum td_core_event_kind kind, uint64_t now_ns,
                                             struct td_attempt of, uint64_t a, uint64_t b)
{
    struct td_core_event e = {.kind = kind, .now_ns = now_ns};
    switch (kind) {
    case TD_EV_TICKET:
        e.ticket = (struct td_ev_ticket){.of = of, .cached_tokens = a};
        break;
    case TD_EV_FIRST_TOKEN:
        e.first_token = (struct td_ev_first_token){.of = of, .last = a != 0, .n_tokens = b};
        break;
    case TD_EV_TOKEN:
        e.token = (struct td_ev_token){.of = of, .n_tokens = a, .last = b != 0};
        break;
    case TD_EV_PREFILL_END:
        e.prefill_end =
            (struct td_ev_prefill_end){.of = of, .code = (enum td_code)a, .sent_bytes = b};
        break;
    case TD_EV_DECODE_END:
        e.decode_end =
            (struct td_ev_decode_end){.of = of, .code = (enum td_code)a, .sender_finished = b != 0};
        break;
    case TD_EV_STOP:
        e.stop = (struct td_ev_end){.request_at = of.request_at, .id = of.id};
        break;
    case TD_EV_CANCEL:
        e.cancel = (struct td_ev_end){.request_at = of.request_at, .id = of.id};
        break;
    default:
        TD_ASSERT(false); /* no event of a leg */
    }
    return e;
}

#endif
