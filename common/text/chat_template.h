/* chat_template.h - turns chat messages into prompt text, for the known families of templates.
 *
 * A model brings its own Jinja template (tokenizer_config.json "chat_template", or
 * chat_template.jinja). It is recognised by the marks of its family, and then our own evaluator
 * (jinja.h) must understand all of it; any other template is refused with TD_ERR_UNSUPPORTED.
 * Immutable after load; thread-safe. */
#ifndef TD_TEXT_CHAT_TEMPLATE_H
#define TD_TEXT_CHAT_TEMPLATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/tool_calls.h"

struct td_chat_template;

/* One part of a message's content. The only type that is taken is "text". */
struct td_chat_part {
    const char *type;
    const char *text; /* UTF-8, text_bytes long, may hold NUL */
    size_t text_bytes;
};

struct td_chat_json {
    const char *text; /* UTF-8 JSON */
    size_t bytes;
};

/* A call that an earlier assistant message made. */
struct td_chat_tool_call {
    const char *id, *name;         /* id NULL or "": none */
    struct td_chat_json arguments; /* an object; no bytes: {} */
};

struct td_chat_message {
    const char *role;    /* "system", "developer", "user", "assistant", "tool" */
    const char *content; /* UTF-8, content_bytes long, may hold NUL */
    size_t content_bytes;
    const struct td_chat_part *parts; /* n_parts > 0: in place of content; the template sees them
                                         as one text, joined by newlines */
    size_t n_parts;
    const struct td_chat_tool_call *tool_calls; /* assistant only */
    size_t n_tool_calls;
    const char *tool_call_id; /* tool only: the call that it answers; NULL or "": none */
    const char *name;         /* of the speaker or the function; NULL or "": none */
    /* assistant only: the thoughts before content, reasoning_bytes long; templates read them as
     * reasoning_content, gpt-oss's as thinking */
    const char *reasoning;
    size_t reasoning_bytes;
};

struct td_chat {
    const struct td_chat_message *messages;
    size_t n_messages;
    bool add_generation_prompt;
    bool continue_final_message; /* the last one is the assistant's, and stays open: the text ends
                                    where its content does; not beside add_generation_prompt */
    const struct td_chat_json
        *tools; /* each a definition: {"type": "function", "function": {"name":
                                         ..., "description": ..., "parameters": JSON schema}} */
    size_t n_tools;
    struct td_chat_json template_kwargs; /* an object; its members become the template's variables,
                                            e.g. {"enable_thinking": false}; no bytes: none */
};

/* Bounds on what a chat brings besides text; errors name the field, the value and the bound. */
enum {
    TD_CHAT_MAX_MESSAGES = 65536,
    TD_CHAT_MAX_PARTS = 1024, /* of one message */
    TD_CHAT_MAX_TOOLS = 128,
    TD_CHAT_MAX_TOOL_CALLS = 128,      /* of one message */
    TD_CHAT_MAX_JSON_BYTES = 64 << 10, /* of one definition, one call's arguments, the kwargs */
    TD_CHAT_MAX_JSON_DEPTH = 32,
    TD_CHAT_MAX_JSON_KEYS = 1024 /* of one object */
};

/* Puts the templates of a directory into the keys of a GGUF file, unread: whoever loads the file
 * judges them. */
struct td_gguf_writer;
td_status td_chat_template_put_gguf(const char *dir, struct td_gguf_writer *w, struct td_err *err);

/* Reads DIR/tokenizer_config.json and DIR/chat_template.jinja, which takes precedence, or the
 * templates in a GGUF file. A directory without a template loads, and then refuses to render. When
 * the model brings a template of its own for chats with tools (the "tool_use" of a list of
 * templates), those chats are rendered with it. */
td_status td_chat_template_load(const char *dir, struct td_chat_template **ret_template,
                                struct td_err *err);
/* Makes a template from the Jinja source (NULL: none) and the two special strings that it may use
 * (NULL: the tokenizer has none). */
td_status td_chat_template_parse(const char *jinja, size_t n_bytes, const char *bos_token,
                                 const char *eos_token, struct td_chat_template **ret_template,
                                 struct td_err *err);
void td_chat_template_free(struct td_chat_template *t);
/* Sets the date that strftime_now() returns to the template. Without it that is 26 July 2024, so
 * that a prompt does not depend on the day. Call it before the template is shared. */
void td_chat_template_set_date(struct td_chat_template *t, int64_t unix_s);
/* A rendering with more bytes is refused while it is written (TD_ERR_LIMIT), because no context has
 * room for it. 0 = no such limit. Call it before the template is shared. */
void td_chat_template_set_max_bytes(struct td_chat_template *t, size_t n_bytes);
/* static storage: "chatml", "llama-3", ...; "none", "unknown" */
const char *td_chat_template_family(const struct td_chat_template *t);

/* How the model writes reasoning and calls, by the template that a chat with or without tools is
 * rendered with. */
struct td_output_format td_chat_template_output(const struct td_chat_template *t, bool with_tools);

/* Renders into *ret_text, which is malloc'd; the caller frees it. The text contains BOS when the
 * template writes it, so encode it with add_special = false. A template that does not know the role
 * developer sees it as system. Tools, calls and their arguments are JSON values to the template,
 * with their keys in the order of the text. Errors name their cause. TD_ERR_INVALID: no messages;
 * text that is not JSON or has another shape than described above; an exception that the template
 * raises, in its own words (e.g. on the order of roles); a last message that cannot be continued.
 * TD_ERR_UNSUPPORTED: no or an unknown
 * template; another role; a part that is not text; tools, calls or tool messages for which the
 * template has no place, or a result that leaves out a system, user or tool message or the name of
 * a tool. TD_ERR_LIMIT: more than the bounds above, or a template that computes too long, writes
 * too much, or needs more memory than 64 MiB + 64 times the chat's bytes. */
td_status td_chat_template_render(const struct td_chat_template *t, const struct td_chat *chat,
                                  char **ret_text, size_t *ret_bytes, struct td_err *err);

#endif
