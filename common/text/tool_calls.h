/* tool_calls.h - a chat answer's text, as it streams, to content, reasoning and tool calls.
 *
 * Models write calls and thoughts into their text, each family in its own way; clients want them as
 * fields. The parser reads the text once, byte by byte, holds back no more than it must to tell a
 * mark from text, and says what each byte belongs to:
 *
 *   hermes (Qwen, Hermes)
 *     <tool_call>{"name": NAME, "arguments": {...}}</tool_call> ...
 *   llama3 (Llama 3.1 to 3.3)
 *     an answer that is {"name": NAME, "parameters": {...}}, several parted by ';', perhaps behind
 *     <|python_tag|>
 *   mistral
 *     [TOOL_CALLS][{"name": NAME, "arguments": {...}}, ...]
 *   mistral_args
 *     [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...} ..., the tags after NAME optional
 *   reasoning
 *     <think> ... </think> before all else; a prompt may end with <think>
 *   channels (gpt-oss: harmony), behind a prompt that ends with <|start|>assistant
 *     HEADER<|message|>TEXT<|end|><|start|>HEADER<|message|>TEXT ..., a header is [ROLE] [to=WHOM]
 *     <|channel|>CHANNEL [to=WHOM] [<|constrain|>json], all of it optional. The channel analysis is
 *     reasoning, and so is what goes to anyone but a function; commentary and final are content.
 *   harmony
 *     a message to=functions.NAME whose text is {...}
 *
 * Invariants: (1) nothing is lost: the deltas' texts, one after the other, are the output;
 * (2) how the output is cut into pieces changes how deltas are cut, and nothing else; (3) the
 * arguments of a complete call are one JSON object, in the model's own words.
 *
 * Text that is not a call is content: a head with another shape (keys other than name, arguments,
 * parameters, id and type, a name that is empty, escaped or longer than 128 bytes, more than 4096
 * bytes before it is known whose arguments they are) up to the byte that breaks it. Once a call has
 * begun it stays one: arguments that break off (the length limit, a byte that is no JSON) end it
 * incomplete, and what follows is content. Of channels the headers are markup, also one that the
 * answer's end cuts off; a header longer than 512 bytes or with a control byte is content. */
#ifndef TD_TEXT_TOOL_CALLS_H
#define TD_TEXT_TOOL_CALLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum td_call_format {
    TD_CALLS_NONE,
    TD_CALLS_HERMES,
    TD_CALLS_LLAMA3,
    TD_CALLS_MISTRAL,
    TD_CALLS_MISTRAL_ARGS,
    TD_CALLS_HARMONY /* only with TD_REASONING_CHANNELS */
};

/* How thoughts are told from content. */
enum td_reasoning { TD_REASONING_NONE, TD_REASONING_THINK, TD_REASONING_CHANNELS };

struct td_output_format {
    enum td_call_format calls;
    enum td_reasoning reasoning;
};

/* How the models of a chat template write, by its source. TD_CALLS_NONE: a family whose calls are
 * not known here. */
struct td_output_format td_output_format_find(const char *jinja, size_t n_bytes);
const char *td_call_format_name(enum td_call_format f); /* static: "none", "hermes", ... */
/* The rendered prompt opens <think>, so the answer begins inside. */
bool td_output_begins_in_reasoning(const char *prompt, size_t n_bytes);
/* What a prompt gets behind its end when a grammar describes the whole answer, so that this is
 * content: of channels the header of the final one. "": nothing. */
const char *td_output_guided_header(struct td_output_format format, const char *prompt,
                                    size_t n_bytes);
/* The marks that the format looks for are special tokens of its models, so the text must have
 * those. */
bool td_output_marks_are_special(struct td_output_format format);

enum td_output_kind {
    TD_OUTPUT_CONTENT,
    TD_OUTPUT_REASONING,
    TD_OUTPUT_MARKUP,     /* tags, brackets, blanks between them: not for clients */
    TD_OUTPUT_CALL_BEGIN, /* id and name; its text is markup */
    TD_OUTPUT_CALL_ARGUMENTS,
    TD_OUTPUT_CALL_END /* without text */
};

/* Everything is borrowed until the callback returns. */
struct td_output_delta {
    enum td_output_kind kind;
    const char *text; /* whole characters when the pieces that came are */
    size_t n_bytes;
    uint32_t index;   /* of the call, from 0 */
    const char *id;   /* CALL_BEGIN: a function of request_id and index: nine letters and digits
                             for Mistral, whose templates want that, else call_ and 16 more */
    const char *name; /* CALL_BEGIN */
    bool complete;    /* CALL_END */
};
typedef void (*td_output_fn)(void *user, const struct td_output_delta *delta);

struct td_output_parser;

/* For one answer, owned by one thread; about 9 KiB, and nothing is allocated later. request_id is
 * not kept. NULL: no memory. */
struct td_output_parser *td_output_parser_create(struct td_output_format format,
                                                 bool begins_in_reasoning, const char *request_id);
void td_output_parser_free(struct td_output_parser *p);
void td_output_parser_feed(struct td_output_parser *p, const char *text, size_t n_bytes,
                           td_output_fn fn, void *user);
/* The output has ended: what was held back comes out. Nothing may be fed afterwards. */
void td_output_parser_end(struct td_output_parser *p, td_output_fn fn, void *user);
uint32_t td_output_parser_n_calls(const struct td_output_parser *p); /* begun so far */

#endif
