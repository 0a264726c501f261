/* chat_template.h - chat messages to prompt text, for the template families we know.
 *
 * The model's own Jinja template (tokenizer_config.json "chat_template", or chat_template.jinja)
 * is recognised by its family's marks and must then be understood as a whole by our own
 * evaluator (jinja.h); anything else is refused with TD_ERR_UNSUPPORTED. Immutable after load;
 * thread-safe. */
#ifndef TD_TEXT_CHAT_TEMPLATE_H
#define TD_TEXT_CHAT_TEMPLATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_chat_template;

struct td_chat_message {
    const char *role;    /* "system", "user", "assistant" */
    const char *content; /* UTF-8, content_bytes long, may hold NUL */
    size_t content_bytes;
};

/* Reads DIR/tokenizer_config.json and DIR/chat_template.jinja (which wins). A directory without
 * any template loads fine and refuses to render. */
td_status td_chat_template_load(const char *dir, struct td_chat_template **ret_template,
                                struct td_err *err);
/* From the Jinja source (NULL: none) and the two special strings it may use (NULL: the tokenizer
 * has none). */
td_status td_chat_template_parse(const char *jinja, size_t n_bytes, const char *bos_token,
                                 const char *eos_token, struct td_chat_template **ret_template,
                                 struct td_err *err);
void td_chat_template_free(struct td_chat_template *t);
/* What strftime_now() tells the template; without it 26 July 2024, so that a prompt does not
 * depend on the day. Before the template is shared. */
void td_chat_template_set_date(struct td_chat_template *t, int64_t unix_s);
/* A rendering with more bytes is refused while it is written (TD_ERR_LIMIT): nothing that long
 * has room in the context. 0 = no such limit. Before the template is shared. */
void td_chat_template_set_max_bytes(struct td_chat_template *t, size_t n_bytes);
/* static storage: "chatml", "llama-3", ...; "none", "unknown" */
const char *td_chat_template_family(const struct td_chat_template *t);

/* *ret_text malloc'd, caller frees. The text contains BOS when the template writes it: encode
 * with add_special = false. Refuses by name: TD_ERR_INVALID: no messages; what the template
 * raises on (its own words, e.g. on the order of roles). TD_ERR_UNSUPPORTED: no or unknown
 * template; another role; a template that would leave out a system or user message.
 * TD_ERR_LIMIT: more than 65536 messages, or a template that computes too long, writes too much
 * or needs more than 64 MiB + 64 times the messages' bytes of memory. */
td_status td_chat_template_render(const struct td_chat_template *t,
                                  const struct td_chat_message *messages, size_t n_messages,
                                  bool add_generation_prompt, char **ret_text, size_t *ret_bytes,
                                  struct td_err *err);

#endif
