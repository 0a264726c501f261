/* xfer_ask.h - what tests say to their nodes and hear from them. WAIT_MS, the test's own, is the
 * longest wait for an event. */
#ifndef XFER_ASK_H
#define XFER_ASK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/unit/xfer_node.h"

static inline struct node_reply ask(struct node *n, const struct node_command *c)
{
    struct node_reply r;
    node_do(n, c, &r);
    return r;
}

static inline struct td_xfer_event event_within(struct node *n, uint64_t ms, bool *ret_any)
{
    struct node_command c = {.verb = NODE_EVENT, .deadline_ms = ms};
    struct node_reply r = ask(n, &c);
    *ret_any = r.ok;
    return r.event;
}

static inline struct td_xfer_event event_by(struct node *n, uint64_t ms)
{
    bool any;
    struct td_xfer_event e = event_within(n, ms, &any);
    if (!any) fail_msg("no event within %llu ms", (unsigned long long)ms);
    return e;
}
#define event(node) event_by(node, WAIT_MS)

#define expect(node, kind_, status_)                                                               \
    do {                                                                                           \
        struct td_xfer_event e_ = event(node);                                                     \
        if (e_.kind != (kind_) || e_.status != (status_))                                          \
            fail_msg("%s:%d: event %d status %d (%s), wanted %d status %d", __FILE__, __LINE__,    \
                     (int)e_.kind, (int)e_.status, e_.reason, (int)(kind_), (int)(status_));       \
    } while (0)

#endif
