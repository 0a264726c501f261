/* event_id.h - the id of a server-sent event: what a client sends back as Last-Event-ID, so that
 * its stream goes on behind that event at any router.
 *
 *   1.SEED.CREATED.MAX_TOKENS.PROMPT_HASH.EVENTS:CHECK,EVENTS:CHECK.REQUEST_ID     hexadecimal
 *
 * EVENTS are counted for each choice; CHECK is a hash of what they said. An id holds no secret and
 * no right: it says how much of the answer to its own request a client has. A forged id removes
 * text from the forger's own stream only. Its length is bounded.
 *
 * Pure. Threads: any. */
#ifndef TD_ROUTER_HTTP_EVENT_ID_H
#define TD_ROUTER_HTTP_EVENT_ID_H

#include <stdint.h>

#include "common/base/status.h"
#include "router/http/text_buffer.h"

/* A stream of more choices has no ids: each would be longer than what it stands at. */
enum { OPENAI_MAX_EVENT_CHOICES = 64 };

struct openai_event_id {
    uint64_t seed, prompt_hash; /* of choice 0; hash 0 = is not compared */
    int64_t created_s, max_tokens;
    uint32_t n_choices;
    struct {
        uint32_t n, check;
    } events[OPENAI_MAX_EVENT_CHOICES];
    char request_id[160];
};

void openai_event_id_write(const struct openai_event_id *id, struct text_buffer *out);
/* TD_ERR_INVALID: it is none that openai_event_id_write makes; *ret is then undefined. */
td_status openai_event_id_parse(const char *text, struct openai_event_id *ret, struct td_err *err);
/* One more event of the choice, that said this. */
uint32_t openai_event_check(uint32_t check, const void *said, size_t n_bytes);

#endif
