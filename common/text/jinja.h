/* jinja.h - evaluates the part of Jinja that chat templates are written in. Internal to the chat
 * templates.
 *
 * A template is a small program, and only running it gives its text for certain. So it is evaluated
 * as transformers does it (trim_blocks, lstrip_blocks, loop controls, no autoescape). What is not
 * understood is refused, never guessed: syntax when parsing, names and types when they are
 * evaluated (templates carry branches that a given chat never enters).
 *
 * A template comes with the weights and is not trusted: source, depth, steps and memory are
 * bounded. Immutable after parsing; thread-safe. */
#ifndef TD_TEXT_JINJA_H
#define TD_TEXT_JINJA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/chat_template.h"

struct td_jinja;

#define TD_JINJA_MAX_SOURCE (1u << 20)

/* Parses a template. TD_ERR_UNSUPPORTED names the construct and its line; TD_ERR_LIMIT: the source
 * is too long or too deep. */
td_status td_jinja_parse(const char *source, size_t n_bytes, struct td_jinja **ret_jinja,
                         struct td_err *err);
void td_jinja_free(struct td_jinja *jinja);

/* The variables of the template: messages, add_generation_prompt, bos_token and eos_token (NULL =
 * undefined), tools (none when there are none), documents (none), the chat's template_kwargs,
 * raise_exception, strftime_now (of now_unix_s, UTC), namespace, range, dict. A message has role
 * and content (its parts are not read here) and, where given, tool_calls, tool_call_id, name
 * and reasoning. */
struct td_jinja_input {
    const struct td_chat *chat;
    const char *bos_token, *eos_token;
    int64_t now_unix_s;
    /* the longest rendering; 0 = only the bound on all memory, 64 MiB + 64 times the chat's
     * bytes */
    size_t max_text_bytes;
};

/* Renders into *ret_text, malloc'd with a NUL after it. TD_ERR_INVALID: the template raised an
 * exception, whose text is in the message, or a JSON text of the chat is malformed.
 * TD_ERR_UNSUPPORTED: the template used something that this evaluator does not have, or that Jinja
 * itself would reject. TD_ERR_LIMIT: too many steps or bytes, or JSON beyond the bounds of
 * chat_template.h. */
td_status td_jinja_render(const struct td_jinja *jinja, const struct td_jinja_input *input,
                          char **ret_text, size_t *ret_bytes, struct td_err *err);

/* Strips UTF-8 text as Python's str.strip() does: Unicode's white space counts. */
void td_jinja_strip(const char **text, size_t *n_bytes);

#endif
