/* resume.h - a stream that goes on where it was cut: what its client has already is not sent again.
 *
 * Any router of the fleet can go on with any stream, because its tokens are a function of prompt,
 * parameters and seed (I1). It makes the whole answer again: from the tokens that the client gives
 * back, which cost a prefill, or, without them, by computing all of them once more. Either way
 * every message runs through the same detokenizer, stop strings and parser of calls as the first
 * time, and here loses what the client has. Nothing of a stream is kept between two calls.
 *
 * Zeroed = nothing is skipped. Owned by its stream. Threads: the router's loop thread alone. */
#ifndef TD_ROUTER_RESUME_H
#define TD_ROUTER_RESUME_H

#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"
#include "tandem/v1/inference.pb-c.h"

/* What is still to be left out of one choice's messages. */
struct resume_skip {
    uint64_t text_bytes, reasoning_bytes, argument_bytes;
    uint32_t n_tokens, n_calls;
    bool by_tokens;   /* only tokens were counted: text is left out as long as n_tokens is not 0 */
    bool is_finished; /* the client has the message with the finish_reason, too */
    Tandem__V1__ToolCallDelta rest, *rests[1]; /* of a delta of which the client has the begin */
};

/* The skip of a choice. has_ids: the request's messages carry token ids.
 * TD_ERR_INVALID: it gives tokens without counts, and has_ids is false. */
td_status resume_skip_fill(struct resume_skip *s, const Tandem__V1__ResumeChoice *c, bool has_ids,
                           struct td_err *err);
/* Takes out of *m what the client has. *m is the caller's shallow copy: its lists are borrowed, and
 * lists of *s are in it until the next call. False: nothing is left that must be sent. */
bool resume_skip_take(struct resume_skip *s, Tandem__V1__GenerateResponse *m);
/* Asked at the answer's end. False: the client has more than this answer holds, so what it has is
 * of another answer. */
bool resume_skip_is_over(const struct resume_skip *s);

#endif
