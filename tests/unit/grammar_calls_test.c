/* grammar_calls_test.c - answers that must be tool calls: random outputs of the grammar are read
 * back by the parser as calls of the tools and nothing else, each whole; masks allow a family's tag
 * as a special token; what cannot be a call is refused by name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/random.h"
#include "common/text/grammar_calls.h"

#define MAX_OUTPUT 6000
#define LEN(a) (sizeof(a) / sizeof *(a))

static uint64_t seed = 1, rng;

static uint32_t rnd(uint32_t n) { return td_random_index(&rng, n); }

static const char *const tools[] = {
    "{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", \"parameters\": {"
    "\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\", \"maxLength\": 9}, "
    "\"unit\": {\"enum\": [\"C\", \"F\", \"</tool_call>\", \"[ARGS]\"]}}, \"required\": "
    "[\"city\"]}}}",
    "{\"type\": \"function\", \"function\": {\"name\": \"now\"}}",
    "{\"name\": \"tree\", \"parameters\": {\"$defs\": {\"n\": {\"anyOf\": [{\"type\": \"null\"}, "
    "{\"$ref\": \"#\"}]}}, \"properties\": {\"left\": {\"$ref\": \"#/$defs/n\"}, \"v\": "
    "{\"type\": \"integer\", \"minimum\": -5}}, \"required\": [\"left\", \"v\"]}}",
    "{\"type\": \"function\", \"function\": {\"name\": \"get\", \"parameters\": {}}}",
};
static const char *const names[] = {"get_weather", "now", "tree", "get"};

static td_status make(struct td_calls_ask ask, const char *const *defs, size_t n,
                      struct td_grammar **ret, struct td_err *err)
{
    struct td_grammar_text texts[200], t = {0};
    char *text = NULL;
    for (size_t i = 0; i < n; i++) texts[i] = (struct td_grammar_text){defs[i], strlen(defs[i])};
    ask.tools = texts;
    ask.n_tools = n;
    td_status s = td_calls_text(&ask, &text, &t.n_bytes, err);
    t.bytes = text;
    if (!s) s = td_grammar_compile(TD_GRAMMAR_TOOL_CALLS, &t, 1, ret, err);
    free(text);
    return s;
}

/* ---- a random output ------------------------------------------------------------------------- */

/* Bytes that may come, ends liked better the longer the text is; the mark of special tokens is no
 * byte of the text. False: it has become too long. */
static bool walk(struct td_matcher *m, char *text, size_t *ret_n)
{
    static const char *const closing[] = {"\"", "]", "}", "</think>", "<|end|>", "<"};
    int32_t state = td_matcher_start(m), next = 0;
    size_t n = 0;
    while (n < MAX_OUTPUT) {
        bool found = false;
        if (td_matcher_accepts(m, state) && rnd(4) == 0) break;
        for (size_t i = 0; i < LEN(closing) && !found; i++) {
            size_t len = strlen(closing[i]);
            if (rnd(1 + (uint32_t)(400 / (n + 8)))) continue;
            if (td_matcher_advance(m, state, closing[i], len, &next) || next == TD_MATCHER_DEAD)
                continue;
            memcpy(text + n, closing[i], len);
            n += len, state = next, found = true;
        }
        for (uint32_t at = rnd(256), ascii = rnd(8), i = 0; i < 512 && !found; i++) {
            char c = (char)((at + i) & (ascii && i < 256 ? 127 : 255));
            if (td_matcher_advance(m, state, &c, 1, &next) || next == TD_MATCHER_DEAD) continue;
            state = next, found = true;
            if (c != TD_TOKEN_SPECIAL) text[n++] = c;
        }
        if (!found) break;
    }
    if (n < MAX_OUTPUT) assert_true(td_matcher_accepts(m, state));
    *ret_n = n;
    return n < MAX_OUTPUT;
}

struct seen {
    uint32_t n_begun, n_whole;
    size_t n_content;
    char name[160], arguments[MAX_OUTPUT + 1];
    size_t n_arguments;
    const char *only;
};

static void take(void *user, const struct td_output_delta *d)
{
    struct seen *s = user;
    if (d->kind == TD_OUTPUT_CONTENT) s->n_content += d->n_bytes;
    if (d->kind == TD_OUTPUT_CALL_BEGIN) {
        bool known = false;
        for (size_t i = 0; i < LEN(names); i++) known |= !strcmp(d->name, names[i]);
        assert_true(known && (!s->only || !strcmp(s->only, d->name)));
        s->n_begun++;
        s->n_arguments = 0;
        snprintf(s->name, sizeof s->name, "%s", d->name);
    }
    if (d->kind == TD_OUTPUT_CALL_ARGUMENTS) {
        memcpy(s->arguments + s->n_arguments, d->text, d->n_bytes);
        s->n_arguments += d->n_bytes;
    }
    if (d->kind != TD_OUTPUT_CALL_END) return;
    json_t *v = json_loadb(s->arguments, s->n_arguments, 0, NULL);
    s->n_whole += d->complete && json_is_object(v);
    if (!strcmp(s->name, "now")) assert_int_equal(json_object_size(v), 0);
    if (!strcmp(s->name, "get_weather")) assert_true(json_is_string(json_object_get(v, "city")));
    if (!strcmp(s->name, "tree")) assert_true(json_is_integer(json_object_get(v, "v")));
    json_decref(v);
}

static void parse_back(void **state)
{
    (void)state;
    int n_rounds = getenv("TANDEM_TEST_SHORT") ? 10 : 100;
    for (int f = TD_CALLS_HERMES; f <= TD_CALLS_HARMONY; f++)
        for (int how = 0; how < 12; how++) {
            struct td_calls_ask ask = {.format = {(enum td_call_format)f, how % 3 > 0},
                                       .in_reasoning = how % 3 == 2,
                                       .one = how / 3 % 2,
                                       .name = how / 6 ? names[how % 4] : NULL};
            if (f == TD_CALLS_HARMONY) ask.format.reasoning = TD_REASONING_CHANNELS;
            struct td_grammar *g;
            struct td_matcher *m;
            struct td_err err = {0};
            static char text[MAX_OUTPUT + 16];
            size_t n = 0;
            uint32_t most = 0;
            if (make(ask, tools, LEN(tools), &g, &err)) fail_msg("%s", err.msg);
            assert_int_equal(td_matcher_create(g, NULL, NULL, 0, &m, &err), TD_OK);
            for (int i = 0; i < n_rounds; i++) {
                static struct seen s;
                s = (struct seen){.only = ask.name};
                if (!walk(m, text, &n)) continue;
                struct td_output_parser *p =
                    td_output_parser_create(ask.format, ask.in_reasoning, "r");
                td_output_parser_feed(p, text, n, take, &s);
                td_output_parser_end(p, take, &s);
                td_output_parser_free(p);
                if (s.n_content || s.n_begun < 1 || s.n_whole != s.n_begun ||
                    (ask.one && s.n_begun != 1))
                    fail_msg("SEED=%llu format %d how %d: %u calls, %u whole, %zu of content: %.*s",
                             (unsigned long long)seed, f, how, s.n_begun, s.n_whole, s.n_content,
                             (int)n, text);
                if (s.n_begun > most) most = s.n_begun;
            }
            assert_true(most >= 1);
            td_matcher_free(m);
            td_grammar_free(g);
        }
}

/* ---- masks ----------------------------------------------------------------------------------- */

static bool allows(struct td_matcher *m, int32_t state, int32_t token)
{
    const uint64_t *mask;
    assert_int_equal(td_matcher_mask(m, state, &mask), TD_OK);
    return mask[0] >> token & 1;
}

/* The tag comes as the special token or by its letters; in other grammars the token never comes. */
static void special_tag(void **state)
{
    (void)state;
    static const struct td_grammar_text vocab[] = {
        {"", 0},    {"\xFF[TOOL_CALLS]", 13}, {"[", 1},  {"TOOL", 4},
        {"{\"", 2}, {"\xFF[ARGS]", 7},        {"now", 3}};
    struct td_calls_ask ask = {.format = {TD_CALLS_MISTRAL_ARGS, false}};
    struct td_grammar_text any = {"(.|\\n)*", 7};
    struct td_token_trie *trie;
    struct td_grammar *g;
    struct td_matcher *m;
    struct td_err err = {0};
    int32_t eos = 0, at;
    assert_int_equal(td_token_trie_build(vocab, LEN(vocab), &trie, &err), TD_OK);
    assert_int_equal(make(ask, tools, LEN(tools), &g, &err), TD_OK);
    assert_int_equal(td_matcher_create(g, trie, &eos, 1, &m, &err), TD_OK);
    int32_t start = td_matcher_start(m);
    assert_true(allows(m, start, 1) && allows(m, start, 2));
    assert_false(allows(m, start, 0) || allows(m, start, 3) || allows(m, start, 5));
    assert_int_equal(td_matcher_advance(m, start, vocab[1].bytes, vocab[1].n_bytes, &at), TD_OK);
    assert_true(allows(m, at, 6));
    assert_false(allows(m, at, 1) || allows(m, at, 5));
    assert_int_equal(td_matcher_advance(m, at, "now", 3, &at), TD_OK);
    assert_true(allows(m, at, 5) && allows(m, at, 2));
    assert_false(allows(m, at, 1) || allows(m, at, 4));
    td_matcher_free(m);
    td_grammar_free(g);
    assert_int_equal(td_grammar_compile(TD_GRAMMAR_REGEX, &any, 1, &g, &err), TD_OK);
    assert_int_equal(td_matcher_create(g, trie, &eos, 1, &m, &err), TD_OK);
    start = td_matcher_start(m);
    assert_true(allows(m, start, 0) && allows(m, start, 2) && allows(m, start, 3));
    assert_false(allows(m, start, 1) || allows(m, start, 5));
    td_matcher_free(m);
    td_grammar_free(g);
    td_token_trie_free(trie);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void refusals(void **state)
{
    (void)state;
    static const struct {
        enum td_call_format format;
        const char *tool, *name;
        td_status want;
        const char *says;
    } rows[] = {
        {TD_CALLS_HERMES, "{", NULL, TD_ERR_INVALID, "tools[0]: not JSON, at byte"},
        {TD_CALLS_HERMES, "{\"function\": {}}", NULL, TD_ERR_INVALID,
         "tools[0] has no function.name"},
        {TD_CALLS_HERMES, "{\"name\": \"f\"}", "g", TD_ERR_INVALID,
         "\"g\" is the name of none of the tools"},
        {TD_CALLS_HERMES, "{\"name\": \"a\\\"b\"}", NULL, TD_ERR_UNSUPPORTED,
         "the name \"a\"b\" does not fit into a call as this model writes it (hermes)"},
        {TD_CALLS_MISTRAL_ARGS, "{\"name\": \"a b\"}", NULL, TD_ERR_UNSUPPORTED, "(mistral_args)"},
        {TD_CALLS_HARMONY, "{\"name\": \"a b\"}", NULL, TD_ERR_UNSUPPORTED, "(harmony)"},
        {TD_CALLS_HERMES, "{\"name\": \"f\", \"parameters\": {\"type\": \"string\"}}", NULL,
         TD_ERR_INVALID, "tool \"f\": parameters must be the schema of an object"},
        {TD_CALLS_HERMES,
         "{\"name\": \"f\", \"parameters\": {\"properties\": {\"a\": {\"not\": "
         "{\"pattern\": \"a\"}}}}}",
         NULL, TD_ERR_UNSUPPORTED, "tool \"f\": the keyword not is supported for"},
    };
    struct td_grammar *g;
    for (size_t i = 0; i < LEN(rows); i++) {
        struct td_err err = {0};
        struct td_calls_ask ask = {.format = {rows[i].format, false}, .name = rows[i].name};
        td_status s = make(ask, &rows[i].tool, 1, &g, &err);
        if (s != rows[i].want || !strstr(err.msg, rows[i].says))
            fail_msg("row %zu: %d, %s", i, s, err.msg);
    }
    struct td_err err = {0};
    struct td_calls_ask ask = {.format = {TD_CALLS_HERMES, false}};
    assert_int_equal(make(ask, tools, 0, &g, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "there are no tools"));
    /* what a worker is sent is not trusted either */
    static const char *const docs[] = {"[]", "{\"format\": \"hermes\", \"tools\": []}",
                                       "{\"format\": \"x\", \"tools\": [{\"name\": \"f\"}]}",
                                       "{\"format\": \"hermes\", \"tools\": [{\"name\": 1}]}"};
    for (size_t i = 0; i < LEN(docs); i++) {
        struct td_grammar_text t = {docs[i], strlen(docs[i])};
        assert_int_equal(td_grammar_compile(TD_GRAMMAR_TOOL_CALLS, &t, 1, &g, &err),
                         TD_ERR_INVALID);
    }
}

int main(void)
{
    const struct CMUnitTest tests_[] = {cmocka_unit_test(parse_back), cmocka_unit_test(special_tag),
                                        cmocka_unit_test(refusals)};
    const char *text = getenv("SEED");
    if (text) seed = strtoull(text, NULL, 10);
    rng = td_random_stream(seed, 0).s;
    return cmocka_run_group_tests(tests_, NULL, NULL);
}
