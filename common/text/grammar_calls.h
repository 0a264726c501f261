/* grammar_calls.h - required tool calls: a grammar of answers that are calls of the given tools, in
 * the syntax of the model's family; tool_calls.h parses them.
 *
 * The router writes the tools and the syntax as one text, the text of a grammar of the kind
 * TD_GRAMMAR_TOOL_CALLS: workers compile it as they compile a schema. */
#ifndef TD_TEXT_GRAMMAR_CALLS_H
#define TD_TEXT_GRAMMAR_CALLS_H

#include "common/text/grammar.h"
#include "common/text/tool_calls.h"

struct td_calls_ask {
    struct td_output_format
        format;        /* calls: not TD_CALLS_NONE. reasoning: thoughts may come first */
    bool in_reasoning; /* the prompt opens <think>: the thoughts have begun */
    bool one;          /* exactly one call, else one or more where the family has them */
    const struct td_grammar_text *tools; /* definitions, as chats have them (chat_template.h) */
    size_t n_tools;
    const char *name; /* of the only tool that may be called; NULL or "": any */
};

/* TD_ERR_INVALID names the tool that is missing or wrong; TD_ERR_UNSUPPORTED a name that the
 * family's syntax cannot hold. *ret_text is malloc'd, JSON. */
td_status td_calls_text(const struct td_calls_ask *ask, char **ret_text, size_t *ret_n,
                        struct td_err *err);

/* At most so many calls are in one answer: as many as a message of a chat may have. */
#define TD_CALLS_MAX 128

#endif
