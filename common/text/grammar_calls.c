/* grammar_calls.c - see grammar_calls.h.
 *
 *   hermes        <tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>, a newline between
 *   llama3        {"name": NAME, "parameters": {...}}: one, as the family's templates take one
 *   mistral       [TOOL_CALLS][{"name": NAME, "arguments": {...}}, ...]
 *   mistral_args  [TOOL_CALLS]NAME[ARGS]{...}, one after the other
 *   harmony       <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}: one
 *
 * Thoughts, where the model has them, are any text up to the first </think>, before the calls; of
 * harmony a message of the channel analysis, without <| in it.
 *
 * Models whose tag is a special token have learnt that token and not its letters. The grammar does
 * not know the vocabulary, so it takes either: the letters, or the token (TD_TOKEN_SPECIAL). */
#include "common/text/grammar_calls.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_internal.h"

#define MAX_NAME 128 /* bytes, as the parser reads them */

/* ---- the text -------------------------------------------------------------------------------- */

/* The family's syntax holds the name as it is, and the parser reads it back. */
static bool name_fits(enum td_call_format format, const char *name)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    size_t n = strlen(name);
    if (n == 0 || n > MAX_NAME) return false;
    if (format == TD_CALLS_MISTRAL_ARGS || format == TD_CALLS_HARMONY)
        return strspn(name, letters) == n;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == '"' || name[i] == '\\') return false;
    return true;
}

/* Appends {"name", "parameters"} of a definition to the list, unless another tool is wanted. */
static td_status add_tool(const struct td_calls_ask *ask, size_t i, json_t *list,
                          struct td_err *err)
{
    json_error_t why;
    json_t *tool = json_loadb(ask->tools[i].bytes, ask->tools[i].n_bytes, 0, &why);
    json_t *function = json_object_get(tool, "function");
    if (!function) function = tool;
    const char *name = json_string_value(json_object_get(function, "name"));
    json_t *parameters = json_object_get(function, "parameters");
    td_status s = TD_OK;
    bool wanted = name && (!ask->name || !ask->name[0] || !strcmp(name, ask->name));
    if (!tool)
        s = td_fail(err, TD_ERR_INVALID, "tools[%zu]: not JSON, at byte %d: %.100s", i,
                    why.position, why.text);
    else if (!name)
        s = td_fail(err, TD_ERR_INVALID, "tools[%zu] has no function.name, so it cannot be called",
                    i);
    else if (wanted && !name_fits(ask->format.calls, name))
        s = td_fail(err, TD_ERR_UNSUPPORTED,
                    "tools[%zu]: the name \"%.140s\" does not fit into a call as this model writes "
                    "it (%s)",
                    i, name, td_call_format_name(ask->format.calls));
    json_t *one = !s && wanted ? json_pack("{s:s}", "name", name) : NULL;
    if (one && parameters && !json_is_null(parameters))
        json_object_set(one, "parameters", parameters);
    if (one && json_array_append_new(list, one)) s = td_fail(err, TD_ERR_NOMEM, "no memory");
    json_decref(tool);
    return s;
}

td_status td_calls_text(const struct td_calls_ask *ask, char **ret_text, size_t *ret_n,
                        struct td_err *err)
{
    json_t *list = json_array();
    td_status s = list ? TD_OK : td_fail(err, TD_ERR_NOMEM, "no memory for tools");
    for (size_t i = 0; i < ask->n_tools && !s; i++) s = add_tool(ask, i, list, err);
    if (!s && json_array_size(list) == 0)
        s = ask->n_tools ? td_fail(err, TD_ERR_INVALID,
                                   "\"%.140s\" is the name of none of the tools", ask->name)
                         : td_fail(err, TD_ERR_INVALID, "there are no tools that could be called");
    if (s) {
        json_decref(list);
        return s;
    }
    json_t *doc =
        json_pack("{s:s,s:b,s:b,s:b,s:o}", "format", td_call_format_name(ask->format.calls),
                  "reasoning", ask->format.reasoning == TD_REASONING_THINK, "in_reasoning",
                  ask->in_reasoning, "one", ask->one, "tools", list);
    char *text = doc ? json_dumps(doc, JSON_COMPACT) : NULL;
    json_decref(doc);
    if (!text) return td_fail(err, TD_ERR_NOMEM, "no memory for tools");
    *ret_text = text;
    *ret_n = strlen(text);
    return TD_OK;
}

/* ---- the grammar ----------------------------------------------------------------------------- */

struct calls {
    struct td_builder *b;
    enum td_call_format format;
    const json_t *tools;
    int32_t arguments[TD_CALLS_MAX]; /* rules */
};

/* A tag by its letters, or as a special token. */
static int32_t tag(struct td_builder *b, const char *text)
{
    char special[32];
    snprintf(special, sizeof special, "%c%s", TD_TOKEN_SPECIAL, text);
    return td_expr_alt(b, td_expr_text(b, text), td_expr_text(b, special));
}

/* What stands between a name and its arguments. */
static int32_t behind_name(const struct calls *c)
{
    struct td_builder *b = c->b;
    int32_t e;
    switch (c->format) {
    case TD_CALLS_MISTRAL_ARGS:
        return tag(b, "[ARGS]");
    case TD_CALLS_HARMONY:
        e = td_expr_cat(b, td_expr_text(b, " "), tag(b, "<|constrain|>"));
        td_expr_add(b, e, td_expr_text(b, "json"));
        td_expr_add(b, e, tag(b, "<|message|>"));
        return e;
    default:
        return td_expr_text(b, c->format == TD_CALLS_LLAMA3 ? "\", \"parameters\": "
                                                            : "\", \"arguments\": ");
    }
}

/* One of: name, what stands behind a name, arguments. */
static int32_t any_tool(const struct calls *c)
{
    struct td_builder *b = c->b;
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
    for (size_t i = 0; i < json_array_size(c->tools) && !b->status; i++) {
        const char *name = json_string_value(json_object_get(json_array_get(c->tools, i), "name"));
        int32_t e = td_expr_cat(b, td_expr_text(b, name), behind_name(c));
        td_expr_add(b, e, td_expr_call(b, c->arguments[i]));
        td_expr_add(b, alt, e);
    }
    return alt;
}

static int32_t object(const struct calls *c)
{
    int32_t e = td_expr_cat(c->b, td_expr_text(c->b, "{\"name\": \""), any_tool(c));
    td_expr_add(c->b, e, td_expr_text(c->b, "}"));
    return e;
}

/* One call of the rule; or up to TD_CALLS_MAX of them, parted by a text. */
static int32_t some(struct td_builder *b, int32_t rule, bool one, const char *between)
{
    int32_t first = td_expr_call(b, rule);
    if (one) return first;
    int32_t again = td_expr_cat(b, td_expr_text(b, between), td_expr_call(b, rule));
    return td_expr_cat(b, first, td_expr_rep(b, again, 0, TD_CALLS_MAX - 1));
}

static int32_t all_calls(const struct calls *c, bool one)
{
    struct td_builder *b = c->b;
    int32_t call = td_rule_new(b), e = -1, all = -1;
    switch (c->format) {
    case TD_CALLS_HERMES:
        e = td_expr_cat(b, td_expr_text(b, "<tool_call>\n"), object(c));
        td_expr_add(b, e, td_expr_text(b, "\n</tool_call>"));
        all = some(b, call, one, "\n");
        break;
    case TD_CALLS_LLAMA3:
        e = object(c);
        all = td_expr_call(b, call);
        break;
    case TD_CALLS_MISTRAL:
        e = object(c);
        all = td_expr_cat(b, tag(b, "[TOOL_CALLS]"), td_expr_rep(b, td_expr_text(b, " "), 0, 1));
        td_expr_add(b, all, td_expr_text(b, "["));
        td_expr_add(b, all, some(b, call, one, ", "));
        td_expr_add(b, all, td_expr_text(b, "]"));
        break;
    case TD_CALLS_HARMONY:
        e = td_expr_cat(b, tag(b, "<|channel|>"), td_expr_text(b, "commentary to=functions."));
        td_expr_add(b, e, any_tool(c));
        all = td_expr_call(b, call);
        break;
    default:
        e = td_expr_cat(b, tag(b, "[TOOL_CALLS]"), any_tool(c));
        all = some(b, call, one, "");
    }
    if (!b->status) b->rules[call].expr = e;
    return all;
}

/* Any text up to the first </think>, that mark, and at most two line ends. */
static int32_t thoughts(struct td_builder *b)
{
    /* behind a '<': what leads to another one, what leads away from the mark, the mark's rest */
#define AGAIN "(<|/<|/t<|/th<|/thi<|/thin<|/think<)*"
#define AWAY "([^/<]|/[^t<]|/t[^h<]|/th[^i<]|/thi[^n<]|/thin[^k<]|/think[^><])"
    static const char regex[] = "[^<]*(<" AGAIN AWAY "[^<]*)*<" AGAIN "/think>\n{0,2}";
    return td_expr_regex(b, regex, sizeof regex - 1, TD_REGEX_OUTPUT);
}

/* A message of the channel analysis, and the next one's beginning. */
static int32_t analysis(struct td_builder *b)
{
    static const char regex[] = "([^<]|<+[^<|])*";
    int32_t e = td_expr_cat(b, tag(b, "<|channel|>"), td_expr_text(b, "analysis"));
    td_expr_add(b, e, tag(b, "<|message|>"));
    td_expr_add(b, e, td_expr_regex(b, regex, sizeof regex - 1, TD_REGEX_OUTPUT));
    td_expr_add(b, e, tag(b, "<|end|>"));
    td_expr_add(b, e, tag(b, "<|start|>"));
    td_expr_add(b, e, td_expr_text(b, "assistant"));
    return e;
}

static bool read_calls(struct calls *c, const json_t *doc)
{
    const char *name = json_string_value(json_object_get(doc, "format"));
    c->tools = json_object_get(doc, "tools");
    for (int f = TD_CALLS_HERMES; name && f <= TD_CALLS_HARMONY; f++)
        if (!strcmp(name, td_call_format_name((enum td_call_format)f)))
            c->format = (enum td_call_format)f;
    size_t n = json_array_size(c->tools);
    if (c->format == TD_CALLS_NONE || n < 1 || n > TD_CALLS_MAX) {
        td_builder_fail(c->b, TD_ERR_INVALID,
                        "format is %.40s with %zu tools, must be a family with 1..%d",
                        name ? name : "missing", n, TD_CALLS_MAX);
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        name = json_string_value(json_object_get(json_array_get(c->tools, i), "name"));
        if (name && name_fits(c->format, name)) continue;
        td_builder_fail(c->b, TD_ERR_INVALID, "tools[%zu] has no name that fits into a call", i);
        return false;
    }
    return true;
}

void td_grammar_read_calls(struct td_builder *b, const char *text, size_t n)
{
    json_error_t why;
    struct calls c = {.b = b};
    json_t *doc = json_loadb(text, n, 0, &why);
    if (!doc)
        td_builder_fail(b, TD_ERR_INVALID, "not JSON, at byte %d: %.150s", why.position, why.text);
    if (doc && read_calls(&c, doc)) {
        td_grammar_read_arguments(b, c.tools, c.arguments);
        int32_t e = all_calls(&c, json_is_true(json_object_get(doc, "one")));
        if (c.format == TD_CALLS_HARMONY) {
            e = td_expr_cat(b, td_expr_rep(b, analysis(b), 0, 1), e);
        } else if (json_is_true(json_object_get(doc, "in_reasoning"))) {
            e = td_expr_cat(b, thoughts(b), e);
        } else if (json_is_true(json_object_get(doc, "reasoning"))) {
            int32_t first = td_expr_cat(b, td_expr_text(b, "<think>"), thoughts(b));
            e = td_expr_cat(b, td_expr_rep(b, first, 0, 1), e);
        }
        if (!b->status) b->rules[0].expr = e;
    }
    json_decref(doc);
}
