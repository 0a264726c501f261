/* chat_template.h - chat messages to prompt text, for the template families we know.
 *
 * The model's own Jinja template (tokenizer_config.json "chat_template", or chat_template.jinja) is recognised, not interpreted: a recognised
 * family is rendered by our code, anything else is refused with TD_ERR_UNSUPPORTED. Immutable after load; thread-safe. */
#ifndef TD_MODEL_CHAT_TEMPLATE_H
#define TD_MODEL_CHAT_TEMPLATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_chat_template;

struct td_chat_message {
    const char *role;                 /* "system", "user", "assistant" */
    const char *content;              /* UTF-8, content_bytes long, may hold NUL */
    size_t content_bytes;
};

/* Reads DIR/tokenizer_config.json and DIR/chat_template.jinja (which wins). A directory without any template loads fine and refuses to render. */
td_status td_chat_template_load(const char *dir, struct td_chat_template **ret_template, struct td_err *err);
/* From the Jinja source and the two special strings it may use. */
td_status td_chat_template_parse(const char *jinja, size_t n_bytes, const char *bos_token, const char *eos_token,
                                 struct td_chat_template **ret_template, struct td_err *err);
void td_chat_template_free(struct td_chat_template *t);
const char *td_chat_template_family(const struct td_chat_template *t);     /* "chatml", "llama-3", ...; "none", "unknown" */

/* *ret_text malloc'd, caller frees. Refuses by name: roles or orders that the family's template raises on, and an unknown family. The text contains BOS
 * when the template writes it: encode with add_special = false. */
td_status td_chat_template_render(const struct td_chat_template *t, const struct td_chat_message *messages, size_t n_messages,
                                  bool add_generation_prompt, char **ret_text, size_t *ret_bytes, struct td_err *err);

#endif
