/* guided.c - structured output as a client asks for it, into the texts that workers compile.
 * guides.c compiles them here once, so that what cannot be kept is refused before a worker sees
 * it. Loop thread. */
#include <stdlib.h>
#include <string.h>

#include "common/rpc/scan.h"
#include "common/text/grammar.h"
#include "common/text/grammar_calls.h"
#include "router/router.h"

/* *ret_texts: *ret_n texts of `in`. */
static td_status read_guide(const Tandem__V1__GuidedOutput *in, enum td_grammar_kind *ret_kind,
                            const ProtobufCBinaryData **ret_texts, size_t *ret_n,
                            struct td_err *err)
{
    *ret_n = 1;
    switch (in->guide_case) {
    case TANDEM__V1__GUIDED_OUTPUT__GUIDE_JSON_OBJECT:
        if (!in->json_object)
            return td_fail(err, TD_ERR_INVALID,
                           "guided.json_object is false, must be true: for any text leave guided "
                           "out");
        *ret_kind = TD_GRAMMAR_JSON_OBJECT;
        *ret_n = 0;
        return TD_OK;
    case TANDEM__V1__GUIDED_OUTPUT__GUIDE_JSON_SCHEMA:
        *ret_kind = TD_GRAMMAR_JSON_SCHEMA;
        *ret_texts = &in->json_schema;
        return TD_OK;
    case TANDEM__V1__GUIDED_OUTPUT__GUIDE_REGEX:
        *ret_kind = TD_GRAMMAR_REGEX;
        *ret_texts = &in->regex;
        return TD_OK;
    case TANDEM__V1__GUIDED_OUTPUT__GUIDE_CHOICE:
        *ret_kind = TD_GRAMMAR_CHOICE;
        *ret_texts = in->choice->texts;
        *ret_n = in->choice->n_texts;
        return TD_OK;
    case TANDEM__V1__GUIDED_OUTPUT__GUIDE_GRAMMAR:
        *ret_kind = TD_GRAMMAR_EBNF;
        *ret_texts = &in->grammar;
        return TD_OK;
    default:
        return td_fail(err, TD_ERR_INVALID,
                       "guided is empty: set json_object, json_schema, regex, choice or grammar");
    }
}

/* Whether a tool must be called, and the grammar of it: *ret_text is malloc'd. */
static td_status read_calls(const struct served_model *m, const Tandem__V1__GenerateRequest *in,
                            bool in_reasoning, char **ret_text, size_t *ret_n, struct td_err *err)
{
    const Tandem__V1__Chat *chat = in->chat;
    struct td_grammar_text *tools = calloc(chat->n_tools + 1, sizeof *tools);
    if (!tools) return td_fail(err, TD_ERR_AGAIN, "no memory for %zu tools", chat->n_tools);
    for (size_t i = 0; i < chat->n_tools; i++)
        tools[i] = (struct td_grammar_text){(const char *)chat->tools[i].data, chat->tools[i].len};
    struct td_calls_ask ask = {.format = td_chat_template_output(m->chat, chat->n_tools > 0),
                               .one = chat->single_tool_call || chat->tool_name[0],
                               .tools = tools,
                               .n_tools = chat->n_tools,
                               .name = chat->tool_name};
    ask.in_reasoning = in_reasoning && ask.format.reasoning == TD_REASONING_THINK;
    td_status s = td_calls_text(&ask, ret_text, ret_n, err);
    free(tools);
    if (!s) return TD_OK;
    td_err_prefix(err, "chat.tool_choice");
    return s == TD_ERR_NOMEM ? TD_ERR_AGAIN : s;
}

/* What cannot hold beside a grammar, which ends its output itself. */
static td_status check_stop(const struct served_model *m, const Tandem__V1__GenerateRequest *in,
                            const char *what, struct td_err *err)
{
    if (in->stop && in->stop->ignore_eos)
        return td_fail(err, TD_ERR_INVALID,
                       "stop.ignore_eos is true beside %s: a guided output ends by an "
                       "end-of-sequence token",
                       what);
    if (in->stop && in->stop->min_tokens)
        return td_fail(err, TD_ERR_INVALID,
                       "stop.min_tokens is %lld beside %s: a guided output ends where its "
                       "grammar does",
                       (long long)in->stop->min_tokens, what);
    if (!m->config.n_eos)
        return td_fail(err, TD_ERR_INVALID,
                       "%s: the model has no end-of-sequence token, by which a guided output "
                       "ends",
                       what);
    return TD_OK;
}

/* The texts into the request, which owns them: request_free frees both. */
static td_status take_texts(struct request_ask *ask, enum td_grammar_kind kind,
                            const ProtobufCBinaryData *from, size_t n, struct td_err *err)
{
    Tandem__V1__SamplingSpec *spec = &ask->spec;
    size_t n_bytes = 0;
    if (n > TD_GRAMMAR_MAX_CHOICES)
        return td_fail(err, TD_ERR_INVALID, "guided.choice has %zu texts, limit %d", n,
                       TD_GRAMMAR_MAX_CHOICES);
    for (size_t i = 0; i < n; i++) {
        if (!td_rpc_utf8_valid(from[i].data, from[i].len))
            return td_fail(err, TD_ERR_INVALID, "guided: text %zu is not valid UTF-8", i);
        n_bytes += from[i].len;
    }
    if (n_bytes > TD_GRAMMAR_MAX_TEXT_BYTES)
        return td_fail(err, TD_ERR_INVALID, "%s has %zu bytes, limit %d",
                       kind == TD_GRAMMAR_TOOL_CALLS ? "chat.tools" : "guided", n_bytes,
                       TD_GRAMMAR_MAX_TEXT_BYTES);
    spec->guided_texts = calloc(n + 1, sizeof *spec->guided_texts);
    ask->guided_bytes = malloc(n_bytes + 1);
    if (!spec->guided_texts || !ask->guided_bytes)
        return td_fail(err, TD_ERR_AGAIN, "no memory for %zu bytes of guided", n_bytes);
    n_bytes = 0;
    for (size_t i = 0; i < n; i++) {
        uint8_t *to = ask->guided_bytes + n_bytes;
        if (from[i].len) memcpy(to, from[i].data, from[i].len);
        spec->guided_texts[i] = (ProtobufCBinaryData){from[i].len, to};
        n_bytes += from[i].len;
    }
    spec->n_guided_texts = n;
    spec->guided_kind = kind;
    return TD_OK;
}

bool router_must_call(const Tandem__V1__GenerateRequest *in)
{
    return in->input_case == TANDEM__V1__GENERATE_REQUEST__INPUT_CHAT &&
           (in->chat->tool_name[0] || !strcmp(in->chat->tool_choice, "required"));
}

td_status router_guided_fill(const struct served_model *m, struct request_ask *ask,
                             const Tandem__V1__GenerateRequest *in, bool in_reasoning,
                             struct td_err *err)
{
    bool calls = router_must_call(in);
    enum td_grammar_kind kind = TD_GRAMMAR_TOOL_CALLS;
    const ProtobufCBinaryData *from = NULL;
    ProtobufCBinaryData calls_text = {0};
    char *text = NULL;
    size_t n = 1;
    if (!in->guided && !calls) return TD_OK;
    if (in->guided && calls)
        return td_fail(err, TD_ERR_INVALID,
                       "guided is set beside a tool that must be called: an answer has one "
                       "grammar");
    td_status s = calls ? read_calls(m, in, in_reasoning, &text, &calls_text.len, err)
                        : read_guide(in->guided, &kind, &from, &n, err);
    if (s) return s;
    calls_text.data = (uint8_t *)text;
    s = check_stop(m, in, calls ? "a tool that must be called" : "guided", err);
    if (!s) s = take_texts(ask, kind, calls ? &calls_text : from, n, err);
    free(text);
    return s;
}
