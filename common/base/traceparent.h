/* traceparent.h - the header by which a caller names the trace that a request belongs to.
 *
 * Source: W3C Trace Context, Recommendation of 2021-11-23, section 3.2: 00-TRACE-PARENT-FLAGS, in
 * lower-case hexadecimal digits, 32, 16 and 2 of them. */
#ifndef TD_BASE_TRACEPARENT_H
#define TD_BASE_TRACEPARENT_H

#include <stdbool.h>
#include <stdint.h>

struct td_traceparent {
    uint8_t trace_id[16], parent_id[8]; /* neither is all zeros */
    bool is_sampled;                    /* the caller records the trace */
};

/* False: text is none, and *ret is as it was. A caller's mistake in it is no reason to refuse a
 * request. A version after 00 may have more fields behind a further '-'; they are not read. */
bool td_traceparent_parse(const char *text, struct td_traceparent *ret);

#endif
