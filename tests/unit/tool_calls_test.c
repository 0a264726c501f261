/* tool_calls_test.c - chat answers to content, reasoning and tool calls: by hand, against a plain
 * parser of the whole text on random answers, and cut into pieces at random. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/base/mem.h"
#include "common/base/random.h"
#include "common/text/tool_calls.h"

#define LEN(a) ((int)(sizeof(a) / sizeof *(a)))

/* ---- what came out, as text ------------------------------------------------------------------ */

/* Each run of one kind is [KIND text]; B names the call, E says whether it is complete. */
struct result {
    char log[65536], raw[65536];
    size_t n_log, n_raw;
    int last; /* kind of the open run; -1: none */
    int n_calls;
    char ids[16][32];
    bool whole; /* each text so far is valid UTF-8 */
};

static void add_log(struct result *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void add_log(struct result *r, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(r->log + r->n_log, sizeof r->log - r->n_log, fmt, args);
    va_end(args);
    r->n_log += (size_t)n;
    assert_true(r->n_log < sizeof r->log);
}

static void close_run(struct result *r)
{
    if (r->last >= 0) add_log(r, "]");
    r->last = -1;
}

static void add(struct result *r, enum td_output_kind kind, const char *text, size_t n,
                const char *name, uint32_t index, bool complete)
{
    static const char letters[] = "CRMBAE";
    if (kind == TD_OUTPUT_CALL_END) {
        close_run(r);
        add_log(r, "[E %s]", complete ? "complete" : "cut");
        return;
    }
    if (n == 0 && kind != TD_OUTPUT_CALL_BEGIN) return;
    if (kind == TD_OUTPUT_CALL_BEGIN || r->last != (int)kind) {
        close_run(r);
        add_log(r, "[%c ", letters[kind]);
        if (kind == TD_OUTPUT_CALL_BEGIN) add_log(r, "%u %s: ", index, name);
        r->last = (int)kind;
    }
    add_log(r, "%.*s", (int)n, text);
    assert_true(r->n_raw + n < sizeof r->raw);
    memcpy(r->raw + r->n_raw, text, n);
    r->n_raw += n;
}

static void take(void *user, const struct td_output_delta *d)
{
    struct result *r = user;
    if (d->kind == TD_OUTPUT_CALL_BEGIN) {
        assert_int_equal(d->index, r->n_calls);
        snprintf(r->ids[r->n_calls++ % 16], 32, "%s", d->id);
    }
    if (d->n_bytes > 0)
        r->whole &= ((unsigned char)d->text[0] & 0xc0) != 0x80 &&
                    (unsigned char)d->text[d->n_bytes - 1] < 0xc0;
    add(r, d->kind, d->text, d->n_bytes, d->name, d->index, d->complete);
}

static uint64_t rng_state;

static int below(int n) { return (int)(td_keyed_step(&rng_state) % (uint64_t)n); }

/* max_piece 0: in one piece. Pieces end where characters do. */
static void parse(struct td_output_format format, bool inside, const char *text, size_t n,
                  int max_piece, struct result *r)
{
    struct td_output_parser *p = td_output_parser_create(format, inside, "req-1");
    assert_non_null(p);
    r->n_log = r->n_raw = 0;
    r->n_calls = 0;
    r->last = -1;
    r->whole = true;
    for (size_t at = 0; at < n;) {
        size_t piece = max_piece == 0 ? n : 1 + (size_t)below(max_piece);
        if (piece > n - at) piece = n - at;
        while (at + piece < n && ((unsigned char)text[at + piece] & 0xc0) == 0x80) piece++;
        td_output_parser_feed(p, text + at, piece, take, r);
        at += piece;
    }
    td_output_parser_end(p, take, r);
    close_run(r);
    r->log[r->n_log] = 0;
    assert_int_equal(td_output_parser_n_calls(p), r->n_calls);
    td_output_parser_free(p);
}

/* ---- by hand --------------------------------------------------------------------------------- */

static const struct row {
    enum td_call_format calls;
    int think; /* 0 no, 1 the template has it, 2 the prompt opens it, 3 channels */
    const char *text, *want;
} rows[] = {
    {TD_CALLS_NONE, 0, "<think>a</think>{\"name\": \"f\"}",
     "[C <think>a</think>{\"name\": \"f\"}]"},
    {TD_CALLS_NONE, 1, "<think>\nwhy\n</think>\n\nbecause",
     "[M <think>\n][R why][M \n</think>\n\n][C because]"},
    {TD_CALLS_NONE, 1, "so <think>a</think>", "[C so <think>a</think>]"},
    {TD_CALLS_NONE, 1, "<think>a\n\nb </thin</think>c",
     "[M <think>][R a\n\nb </thin][M </think>][C c]"},
    {TD_CALLS_NONE, 1, "<think>cut \n", "[M <think>][R cut \n]"},
    {TD_CALLS_NONE, 2, "why\n</think>\nx", "[R why][M \n</think>\n][C x]"},
    {TD_CALLS_NONE, 2, "\n</think>x", "[M \n</think>][C x]"},
    {TD_CALLS_HERMES, 0, "Hi <b>&</b> \xe6\x97\xa5", "[C Hi <b>&</b> \xe6\x97\xa5]"},
    {TD_CALLS_HERMES, 0,
     "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}\\\"\", \"b\": [1, "
     "{}]}}\n"
     "</tool_call>",
     "[C Let me see.\n][B 0 f: <tool_call>\n{\"name\": \"f\", \"arguments\": ]"
     "[A {\"a\": \"}\\\"\", \"b\": [1, {}]}][E complete][M }\n</tool_call>]"},
    {TD_CALLS_HERMES, 1,
     "<think>\nhm\n</think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n"
     "<tool_call>\n{\"arguments\": {\"x\": 1 }, \"name\": \"g\"}\n</tool_call>\n",
     "[M <think>\n][R hm][M \n</think>\n\n][B 0 f: <tool_call>\n{\"name\": \"f\", \"arguments\": ]"
     "[A {}][E complete][M }\n</tool_call>\n][B 1 g: <tool_call>\n{\"arguments\": ][A {\"x\": 1 }]"
     "[E complete][M , \"name\": \"g\"}\n</tool_call>\n]"},
    /* no call: content up to the byte that breaks it */
    {TD_CALLS_HERMES, 0, "<tool_call>f(1)</tool_call>", "[C <tool_call>f(1)</tool_call>]"},
    {TD_CALLS_HERMES, 0,
     "<tool_call> <tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call> ok",
     "[C <tool_call> ][B 0 f: <tool_call>{\"name\": \"f\", \"arguments\": ][A {}][E complete]"
     "[M }</tool_call>][C  ok]"},
    {TD_CALLS_HERMES, 0, "<tool_call>{\"name\": \"f\"}", "[C <tool_call>{\"name\": \"f\"}]"},
    {TD_CALLS_HERMES, 0, "<tool_call>{\"name\": \"\", \"arguments\": {}}",
     "[C <tool_call>{\"name\": \"\", \"arguments\": {}}]"},
    {TD_CALLS_HERMES, 0, "<tool_call>{\"name\": \"f\", \"arguments\": \"{}\"}",
     "[C <tool_call>{\"name\": \"f\", \"arguments\": \"{}\"}]"},
    {TD_CALLS_HERMES, 0, "<tool_call>{\"name\": \"f\", \"x\": 1, \"arguments\": {}}",
     "[C <tool_call>{\"name\": \"f\", \"x\": 1, \"arguments\": {}}]"},
    {TD_CALLS_HERMES, 0, "<tool_call>{\"name\": \"f\", \"argum",
     "[C <tool_call>{\"name\": \"f\", \"argum]"},
    {TD_CALLS_HERMES, 0, "a <tool_ca", "[C a <tool_ca]"},
    /* a call that breaks off */
    {TD_CALLS_HERMES, 0, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b",
     "[B 0 f: <tool_call>{\"name\": \"f\", \"arguments\": ][A {\"a\": \"b][E cut]"},
    {TD_CALLS_HERMES, 0, "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 01}}</tool_call>",
     "[B 0 f: <tool_call>{\"name\": \"f\", \"arguments\": ][A {\"a\": 0][E cut][C "
     "1}}</tool_call>]"},
    {TD_CALLS_HERMES, 0,
     "<tool_call>{\"name\": \"f\", \"arguments\": {}}<tool_call>{\"name\": \"g\", "
     "\"arguments\": {}}</tool",
     "[B 0 f: <tool_call>{\"name\": \"f\", \"arguments\": ][A {}][E complete][M }]"
     "[B 1 g: <tool_call>{\"name\": \"g\", \"arguments\": ][A {}][E complete][M }</tool]"},
    {TD_CALLS_LLAMA3, 0, "{\"name\": \"f\", \"parameters\": {\"a\": null}}",
     "[B 0 f: {\"name\": \"f\", \"parameters\": ][A {\"a\": null}][E complete][M }]"},
    {TD_CALLS_LLAMA3, 0,
     "<|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}; "
     "{\"name\": \"g\", \"parameters\": {}}\n",
     "[B 0 f: <|python_tag|>{\"type\": \"function\", \"name\": \"f\", \"parameters\": ][A {}][E "
     "complete]"
     "[M }][B 1 g: ; {\"name\": \"g\", \"parameters\": ][A {}][E complete][M }\n]"},
    {TD_CALLS_LLAMA3, 0, "{\"a\": 1}", "[C {\"a\": 1}]"},
    {TD_CALLS_LLAMA3, 0, "{\"name\": \"Bob\", \"age\": 3}", "[C {\"name\": \"Bob\", \"age\": 3}]"},
    {TD_CALLS_LLAMA3, 0, "Yes: {\"name\": \"f\", \"parameters\": {}}",
     "[C Yes: {\"name\": \"f\", \"parameters\": {}}]"},
    {TD_CALLS_LLAMA3, 0, "<|python_tag|>print(1)", "[C <|python_tag|>print(1)]"},
    {TD_CALLS_LLAMA3, 0, "{\"name\": \"f\", \"parameters\": {}} so",
     "[B 0 f: {\"name\": \"f\", \"parameters\": ][A {}][E complete][M }][C  so]"},
    {TD_CALLS_MISTRAL, 0,
     "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {\"x\": "
     "-1.5e3}, "
     "\"id\": \"123456789\"}]",
     "[B 0 f: [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": ][A {}][E complete][M }]"
     "[B 1 g: , {\"name\": \"g\", \"arguments\": ][A {\"x\": -1.5e3}][E complete]"
     "[M , \"id\": \"123456789\"}]]"},
    {TD_CALLS_MISTRAL, 0, "x[TOOL_CALLS]f{}", "[C x[TOOL_CALLS]f{}]"},
    {TD_CALLS_MISTRAL, 0, "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}} and",
     "[B 0 f: [TOOL_CALLS][{\"name\": \"f\", \"arguments\": ][A {}][E complete][M }][C  and]"},
    {TD_CALLS_MISTRAL_ARGS, 0, "ok[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{\"a\": 1}[TOOL_CALLS]g{}",
     "[C ok][B 0 f: [TOOL_CALLS]f[CALL_ID]123456789[ARGS]][A {\"a\": 1}][E complete]"
     "[B 1 g: [TOOL_CALLS]g][A {}][E complete]"},
    {TD_CALLS_MISTRAL_ARGS, 0, "[TOOL_CALLS]f(x)", "[C [TOOL_CALLS]f(x)]"},
    {TD_CALLS_MISTRAL_ARGS, 0, "[TOOL_CALLS]f[ARGS]{\"a\"",
     "[B 0 f: [TOOL_CALLS]f[ARGS]][A {\"a\"][E cut]"},
    {TD_CALLS_NONE, 3,
     "<|channel|>analysis<|message|>why < not<|end|><|start|>assistant<|channel|>final<|message|>"
     "because <|en",
     "[M <|channel|>analysis<|message|>][R why < not][M "
     "<|end|><|start|>assistant<|channel|>final<|message|>][C because <|en]"},
    {TD_CALLS_HARMONY, 3,
     "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
     "I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get_x "
     "<|constrain|>json<|message|>{\"a\": \"<|end|>}\"}<|call|>",
     "[M <|channel|>analysis<|message|>][R hm]"
     "[M <|end|><|start|>assistant<|channel|>commentary<|message|>][C I look.][M <|end|>]"
     "[B 0 get_x: <|start|>assistant<|channel|>commentary to=functions.get_x "
     "<|constrain|>json<|message|>][A {\"a\": \"<|end|>}\"}][E complete][M <|call|>]"},
    {TD_CALLS_HARMONY, 3,
     " to=functions.f<|channel|>commentary json<|message|>\n{} <|call|><|start|>assistant"
     "<|channel|>commentary to=functions.g<|message|>{\"b\"",
     "[B 0 f:  to=functions.f<|channel|>commentary json<|message|>\n][A {}][E complete]"
     "[M  <|call|>][B 1 g: <|start|>assistant<|channel|>commentary to=functions.g<|message|>]"
     "[A {\"b\"][E cut]"},
    /* without tools a message to one is text; what goes to other ears is a thought */
    {TD_CALLS_NONE, 3, "<|channel|>commentary to=functions.f<|message|>{}",
     "[M <|channel|>commentary to=functions.f<|message|>][C {}]"},
    {TD_CALLS_HARMONY, 3, "<|channel|>analysis to=python code<|message|>1+1<|call|>",
     "[M <|channel|>analysis to=python code<|message|>][R 1+1][M <|call|>]"},
    {TD_CALLS_HARMONY, 3,
     "<|start|>functions.f to=assistant<|channel|>commentary<|message|>\"4\"<|end|>",
     "[M <|start|>functions.f to=assistant<|channel|>commentary<|message|>][R \"4\"][M <|end|>]"},
    /* no channel, no header, no object, headers that are none */
    {TD_CALLS_HARMONY, 3, "<|message|>a<|return|>", "[M <|message|>][C a][M <|return|>]"},
    {TD_CALLS_HARMONY, 3, " {\"a\": 1}", "[C  {\"a\": 1}]"},
    {TD_CALLS_HARMONY, 3, "to=functions.f", "[C to=functions.f]"},
    {TD_CALLS_HARMONY, 3, "<|channel|>commentary to=functions.f<|message|>[1]<|end|>\n\nx",
     "[M <|channel|>commentary to=functions.f<|message|>][C [1]][M <|end|>\n\n][C x]"},
    {TD_CALLS_HARMONY, 3, "<|channel|>commentary to=functions.f<|message|>{1}<|end|>",
     "[B 0 f: <|channel|>commentary to=functions.f<|message|>][A {][E cut][C 1}][M <|end|>]"},
    {TD_CALLS_HARMONY, 3, "<|channel|>commentary to=functions.f(<|message|>{}",
     "[M <|channel|>commentary to=functions.f(<|message|>][C {}]"},
    {TD_CALLS_HARMONY, 3, "<|channel|>fin\nal<|message|>a", "[C <|channel|>fin\nal<|message|>a]"},
    {TD_CALLS_HARMONY, 3, "<|channel|>analysis<|mess", "[M <|channel|>analysis<|mess]"},
    {TD_CALLS_HARMONY, 3, "<|channel|>final<|message|>a<|start|>assistant",
     "[M <|channel|>final<|message|>][C a][M <|start|>assistant]"},
};

static void by_hand(void **state)
{
    (void)state;
    static struct result r;
    for (int i = 0; i < LEN(rows); i++) {
        struct td_output_format f = {rows[i].calls, rows[i].think == 3  ? TD_REASONING_CHANNELS
                                                    : rows[i].think > 0 ? TD_REASONING_THINK
                                                                        : TD_REASONING_NONE};
        for (int piece = 0; piece < 4; piece++) {
            parse(f, rows[i].think == 2, rows[i].text, strlen(rows[i].text), piece, &r);
            if (strcmp(r.log, rows[i].want) != 0)
                fail_msg("row %d, pieces of %d: %s\ngives\n%s\nmust be\n%s", i, piece, rows[i].text,
                         r.log, rows[i].want);
        }
    }
    /* ids: of the request and the index alone, and of the family's shape */
    static const char two[] =
        "{\"name\": \"f\", \"parameters\": {}};{\"name\": \"f\", \"parameters\": {}}";
    static struct result again;
    parse((struct td_output_format){TD_CALLS_LLAMA3, false}, false, two, strlen(two), 1, &r);
    parse((struct td_output_format){TD_CALLS_LLAMA3, false}, false, two, strlen(two), 0, &again);
    assert_int_equal(r.n_calls, 2);
    assert_string_equal(r.ids[0], again.ids[0]);
    assert_string_equal(r.ids[1], again.ids[1]);
    assert_string_not_equal(r.ids[0], r.ids[1]);
    assert_int_equal(strlen(r.ids[0]), 21);
    static const char one[] = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}]";
    parse((struct td_output_format){TD_CALLS_MISTRAL, false}, false, one, strlen(one), 1, &r);
    assert_int_equal(strlen(r.ids[0]), 9);
}

/* What is held is bounded: heads, blanks and names beyond it are content; arguments may be long. */
static void bounds(void **state)
{
    (void)state;
    static struct result r;
    static char text[40000];
    struct td_output_format f = {TD_CALLS_HERMES, true};
    size_t n;

    n = (size_t)snprintf(text, sizeof text,
                         "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"");
    memset(text + n, 'x', 20000);
    n += 20000;
    n += (size_t)snprintf(text + n, sizeof text - n, "\"}}</tool_call>");
    parse(f, false, text, n, 100, &r);
    assert_non_null(strstr(r.log, "[E complete][M }</tool_call>]"));

    for (int k = 0; k < 4; k++) {
        static const char *const heads[] = {
            "<tool_call>{\"arguments\": {\"a\": \"%s\"}, \"name\": \"f\"}",
            "<tool_call>%s{\"name\": 1}", "%s<think>",
            "<tool_call>{\"name\": \"%s\", \"arguments\": {}}"};
        static char fill[8000];
        memset(fill, k == 1 || k == 2 ? ' ' : 'x', sizeof fill - 1);
        if (k == 3) fill[129] = 0;
        n = (size_t)snprintf(text, sizeof text, heads[k], fill);
        fill[129] = 'x';
        parse(f, false, text, n, 7, &r);
        assert_int_equal(r.n_calls, 0);
        assert_int_equal(r.n_log, n + 4);
        assert_memory_equal(r.log + 3, text, n);
    }
}

/* ---- the plain parser ------------------------------------------------------------------------ */

/* Recursive descent over the whole text. On failure `at` is at the first byte that does not fit
 * (n: the text ends too early). */
struct plain {
    const char *s;
    size_t n, at;
    bool name, args; /* of the call: known; begun when both are */
    size_t name_at, n_name, args_at, args_end;
};

static char peek(const struct plain *p) { return p->at < p->n ? p->s[p->at] : 0; }

static void blanks(struct plain *p)
{
    while (p->at < p->n && strchr(" \n\r\t", p->s[p->at]) != NULL && p->s[p->at] != 0) p->at++;
}

static bool word(struct plain *p, const char *w)
{
    for (; *w != 0; w++, p->at++)
        if (p->at == p->n || p->s[p->at] != *w) return false;
    return true;
}

static bool string(struct plain *p)
{
    if (!word(p, "\"")) return false;
    for (;; p->at++) {
        unsigned char c = (unsigned char)peek(p);
        if (p->at == p->n || c < 0x20) return false;
        if (c == '"') break;
        if (c != '\\') continue;
        p->at++;
        if (peek(p) == 0 || strchr("\"\\/bfnrtu", peek(p)) == NULL) return false;
        for (int k = 0; p->s[p->at] == 'u' && k < 4; k++)
            if (p->at + 1 + (size_t)k >= p->n ||
                strchr("0123456789abcdefABCDEF", p->s[p->at + 1 + (size_t)k]) == NULL ||
                p->s[p->at + 1 + (size_t)k] == 0) {
                p->at += 1 + (size_t)k;
                return false;
            }
        if (p->s[p->at] == 'u') p->at += 4;
    }
    p->at++;
    return true;
}

static bool digits(struct plain *p)
{
    size_t from = p->at;
    while (peek(p) >= '0' && peek(p) <= '9') p->at++;
    return p->at > from;
}

static bool number(struct plain *p)
{
    if (peek(p) == '-') p->at++;
    if (peek(p) == '0')
        p->at++;
    else if (!digits(p))
        return false;
    if (peek(p) == '.') {
        p->at++;
        if (!digits(p)) return false;
    }
    if (peek(p) == 'e' || peek(p) == 'E') {
        p->at++;
        if (peek(p) == '+' || peek(p) == '-') p->at++;
        if (!digits(p)) return false;
    }
    return true;
}

static bool value(struct plain *p, int depth);

static bool list(struct plain *p, int depth)
{
    p->at++;
    blanks(p);
    if (peek(p) == ']') return word(p, "]");
    for (;;) {
        if (!value(p, depth)) return false;
        blanks(p);
        if (peek(p) == ']') return word(p, "]");
        if (!word(p, ",")) return false;
    }
}

static bool is_key(const char *key, size_t n, const char *name)
{
    return n == strlen(name) && memcmp(key, name, n) == 0;
}

/* At the first level, until the call has begun, with the rules for its members. */
static bool object(struct plain *p, int depth)
{
    p->at++;
    blanks(p);
    for (bool first = true;; first = false) {
        if (first && peek(p) == '}') break;
        blanks(p);
        size_t key_at = p->at + 1;
        if (!string(p)) return false;
        size_t n_key = p->at - 1 - key_at;
        const char *key = p->s + key_at;
        bool head = depth == 1 && !(p->name && p->args);
        bool name = is_key(key, n_key, "name"),
             args = is_key(key, n_key, "arguments") || is_key(key, n_key, "parameters");
        if (head && ((!name && !args && !is_key(key, n_key, "id") && !is_key(key, n_key, "type")) ||
                     (name && p->name) || (args && p->args))) {
            p->at--;
            return false;
        }
        blanks(p);
        if (!word(p, ":")) return false;
        blanks(p);
        if (head && ((name && peek(p) != '"') || (args && peek(p) != '{'))) return false;
        size_t at = p->at;
        if (head && args) {
            p->args = true;
            p->args_at = at;
            p->args_end = SIZE_MAX;
        }
        if (!value(p, depth)) return false;
        if (head && args) p->args_end = p->at;
        if (head && name) {
            p->name_at = at + 1;
            p->n_name = p->at - at - 2;
            if (p->n_name == 0 || p->n_name > 128 ||
                memchr(p->s + p->name_at, '\\', p->n_name) != NULL) {
                p->at--;
                return false;
            }
            p->name = true;
        }
        blanks(p);
        if (peek(p) == '}') break;
        if (!word(p, ",")) return false;
    }
    if (depth == 1 && !(p->name && p->args)) return false;
    return word(p, "}");
}

static bool value(struct plain *p, int depth)
{
    blanks(p);
    switch (peek(p)) {
    case '{':
        return depth < 64 && object(p, depth + 1);
    case '[':
        return depth < 64 && list(p, depth + 1);
    case '"':
        return string(p);
    case 't':
        return word(p, "true");
    case 'f':
        return word(p, "false");
    case 'n':
        return word(p, "null");
    default:
        return number(p);
    }
}

/* The call whose head begins at `from` and whose object at p->at. True: its object is whole. */
static bool plain_call(struct plain *p, size_t from, uint32_t *n_calls, struct result *r)
{
    char name[200];
    p->name = p->args = false;
    size_t object_at = p->at;
    bool whole = peek(p) == '{' && object(p, 1);
    if (!p->name || !p->args || p->at <= object_at) {
        add(r, TD_OUTPUT_CONTENT, p->s + from, p->at - from, NULL, 0, false);
        return false;
    }
    snprintf(name, sizeof name, "%.*s", (int)p->n_name, p->s + p->name_at);
    add(r, TD_OUTPUT_CALL_BEGIN, p->s + from, p->args_at - from, name, (*n_calls)++, false);
    bool complete = p->args_end != SIZE_MAX;
    size_t end = complete ? p->args_end : p->at;
    add(r, TD_OUTPUT_CALL_ARGUMENTS, p->s + p->args_at, end - p->args_at, NULL, 0, false);
    add(r, TD_OUTPUT_CALL_END, NULL, 0, NULL, 0, complete);
    add(r, TD_OUTPUT_MARKUP, p->s + end, p->at - end, NULL, 0, false);
    return whole;
}

/* [TOOL_CALLS]NAME...{ at p->at; true when it is one, p->at then at its {. */
static bool plain_name(struct plain *p, size_t *name_at, size_t *n_name)
{
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
    blanks(p);
    *name_at = p->at;
    while (p->at < p->n && p->at - *name_at < 128 && peek(p) != 0 && strchr(letters, peek(p)))
        p->at++;
    *n_name = p->at - *name_at;
    if (*n_name == 0 || peek(p) == '{') return *n_name > 0;
    for (;;) {
        if (!word(p, "[")) return false;
        if (peek(p) == 'A') {
            if (!word(p, "ARGS]")) return false;
            blanks(p);
            return peek(p) == '{';
        }
        if (!word(p, "CALL_ID]")) return false;
        while (peek(p) != 0 && strchr(letters, peek(p))) p->at++;
    }
}

/* <think> ... </think> before all else. */
static void plain_reasoning(struct plain *p, bool inside, struct result *r)
{
    const char *s = p->s;
    size_t n = p->n;
    if (!inside) {
        blanks(p);
        inside = word(p, "<think>");
        if (!inside) p->at = 0;
    }
    if (inside) {
        const char *hit = NULL;
        size_t end, from;
        add(r, TD_OUTPUT_MARKUP, s, p->at, NULL, 0, false);
        from = p->at;
        while (peek(p) == '\n') p->at++;
        add(r, TD_OUTPUT_MARKUP, s + from, p->at - from, NULL, 0, false);
        hit = memmem(s + p->at, n - p->at, "</think>", 8);
        if (hit == NULL) {
            add(r, TD_OUTPUT_REASONING, s + p->at, n - p->at, NULL, 0, false);
            p->at = n;
        } else {
            end = (size_t)(hit - s);
            while (end > p->at && s[end - 1] == '\n') end--;
            add(r, TD_OUTPUT_REASONING, s + p->at, end - p->at, NULL, 0, false);
            p->at = (size_t)(hit - s) + 8;
            while (peek(p) == '\n') p->at++;
            add(r, TD_OUTPUT_MARKUP, s + end, p->at - end, NULL, 0, false);
        }
    }
}

static void plain_llama3(struct plain *p, uint32_t *n_calls, struct result *r)
{
    const char *s = p->s;
    size_t n = p->n;
    size_t from = p->at;
    blanks(p);
    size_t at = p->at;
    if (!word(p, "<|python_tag|>")) p->at = at;
    blanks(p);
    while (peek(p) == '{' && plain_call(p, from, n_calls, r)) {
        from = p->at;
        blanks(p);
        if (p->at == n) {
            add(r, TD_OUTPUT_MARKUP, s + from, n - from, NULL, 0, false);
            from = n;
        }
        if (!word(p, ";")) break;
        blanks(p);
    }
    if (r->n_raw > from) from = r->n_raw; /* a broken call's bytes are there already */
    add(r, TD_OUTPUT_CONTENT, s + from, n - from, NULL, 0, false);
    p->at = n;
}

/* Behind a mark that stands at `from`: true when the call is whole, and only blanks may follow. */
static bool plain_hermes(struct plain *p, size_t from, uint32_t *n_calls, struct result *r)
{
    const char *s = p->s;
    size_t n = p->n;
    bool closed = false;
    blanks(p);
    if (!plain_call(p, from, n_calls, r)) return false;
    from = p->at;
    blanks(p);
    size_t close = p->at;
    if (word(p, "</tool_call>")) {
        closed = true;
    } else if (p->at < n) {
        p->at = close;
    }
    add(r, TD_OUTPUT_MARKUP, s + from, p->at - from, NULL, 0, false);
    return closed;
}

static bool plain_mistral(struct plain *p, size_t from, uint32_t *n_calls, struct result *r)
{
    const char *s = p->s;
    size_t n = p->n;
    bool closed = false;
    blanks(p);
    if (!word(p, "[")) {
        add(r, TD_OUTPUT_CONTENT, s + from, p->at - from, NULL, 0, false);
        return false;
    }
    blanks(p);
    while (plain_call(p, from, n_calls, r)) {
        from = p->at;
        blanks(p);
        if (p->at == n || peek(p) == ']') {
            closed = p->at < n;
            p->at += p->at < n;
            add(r, TD_OUTPUT_MARKUP, s + from, p->at - from, NULL, 0, false);
            break;
        }
        if (!word(p, ",")) {
            add(r, TD_OUTPUT_CONTENT, s + from, p->at - from, NULL, 0, false);
            break;
        }
        blanks(p);
    }
    return closed;
}

static bool plain_mistral_args(struct plain *p, size_t from, uint32_t *n_calls, struct result *r)
{
    const char *s = p->s;
    char name[200];
    size_t name_at, n_name, args_at;
    if (!plain_name(p, &name_at, &n_name)) {
        add(r, TD_OUTPUT_CONTENT, s + from, p->at - from, NULL, 0, false);
        return false;
    }
    args_at = p->at;
    snprintf(name, sizeof name, "%.*s", (int)n_name, s + name_at);
    add(r, TD_OUTPUT_CALL_BEGIN, s + from, args_at - from, name, (*n_calls)++, false);
    p->name = p->args = true;
    bool closed = object(p, 1);
    add(r, TD_OUTPUT_CALL_ARGUMENTS, s + args_at, p->at - args_at, NULL, 0, false);
    add(r, TD_OUTPUT_CALL_END, NULL, 0, NULL, 0, closed);
    return closed;
}

/* ---- channels, plainly ----------------------------------------------------------------------- */

static const char *const marks[] = {"<|start|>",   "<|end|>",     "<|call|>",     "<|return|>",
                                    "<|channel|>", "<|message|>", "to=functions."};

/* The first of the first k marks at or behind `at`: its place, or n. */
static size_t next_mark(const struct plain *p, size_t at, int k, int *ret_which)
{
    for (; at < p->n; at++)
        for (int i = 0; i < k; i++) {
            size_t n = strlen(marks[i]);
            if (n > p->n - at || memcmp(p->s + at, marks[i], n) != 0) continue;
            *ret_which = i;
            return at;
        }
    *ret_which = -1;
    return p->n;
}

static bool header_says(const char *header, const char *key, const char *what)
{
    const char *at = strstr(header, key);
    return at != NULL && strncmp(at + strlen(key), what, strlen(what)) == 0;
}

/* The text of a message from p->at to the mark that ends it. */
static void plain_message(struct plain *p, enum td_output_kind kind, struct result *r)
{
    int which;
    size_t end = next_mark(p, p->at, 4, &which);
    add(r, kind, p->s + p->at, end - p->at, NULL, 0, false);
    p->at = end;
}

static const char gaps[] = " \n\r\t";

/* From `from` on, p->at behind its first mark. True: its <|message|> was found, and p->at is behind
 * that. */
static bool plain_header(struct plain *p, size_t from, struct result *r)
{
    while (p->at - from < 11 || memcmp(p->s + p->at - 11, "<|message|>", 11) != 0) {
        if (p->at < p->n && p->at - from < 512 && (unsigned char)p->s[p->at] >= 0x20) {
            p->at++;
            continue;
        }
        bool cut = p->at == p->n && p->s[from + strspn(p->s + from, gaps)] == '<';
        add(r, cut ? TD_OUTPUT_MARKUP : TD_OUTPUT_CONTENT, p->s + from, p->at - from, NULL, 0,
            false);
        plain_message(p, TD_OUTPUT_CONTENT, r);
        return false;
    }
    return true;
}

/* The message whose header is from `from` to p->at. */
static void plain_addressed(struct plain *p, bool calls, size_t from, uint32_t *n_calls,
                            struct result *r)
{
    char header[600], name[129] = "";
    snprintf(header, sizeof header, "%.*s", (int)(p->at - from), p->s + from);
    const char *to = strstr(header, "to=");
    bool function = to != NULL && strncmp(to, "to=functions.", 13) == 0;
    bool thought = header_says(header, "<|channel|>", "analysis") ||
                   (to != NULL && !function && !header_says(header, "<|channel|>", "final"));
    size_t n_name = function ? strcspn(to + 13, " <") : 0;
    if (calls && n_name > 0 && n_name <= 128 &&
        strspn(to + 13, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") ==
            n_name)
        snprintf(name, sizeof name, "%.*s", (int)n_name, to + 13);
    if (name[0] != 0) p->at += strspn(p->s + p->at, gaps);
    if (name[0] == 0 || peek(p) != '{') {
        add(r, TD_OUTPUT_MARKUP, p->s + from, p->at - from, NULL, 0, false);
        plain_message(p, name[0] == 0 && thought ? TD_OUTPUT_REASONING : TD_OUTPUT_CONTENT, r);
        return;
    }
    size_t args_at = p->at;
    add(r, TD_OUTPUT_CALL_BEGIN, p->s + from, args_at - from, name, (*n_calls)++, false);
    p->name = p->args = true;
    bool whole = object(p, 1);
    add(r, TD_OUTPUT_CALL_ARGUMENTS, p->s + args_at, p->at - args_at, NULL, 0, false);
    add(r, TD_OUTPUT_CALL_END, NULL, 0, NULL, 0, whole);
    if (!whole) plain_message(p, TD_OUTPUT_CONTENT, r);
}

static void plain_channels(struct plain *p, bool calls, struct result *r)
{
    uint32_t n_calls = 0;
    for (bool first = true; p->at < p->n; first = false) {
        size_t from = p->at;
        int which;
        blanks(p);
        bool mark = next_mark(p, p->at, 7, &which) == p->at && which >= 0;
        if (!first) {
            add(r, TD_OUTPUT_MARKUP, p->s + from, p->at - from, NULL, 0, false);
            from = p->at;
        }
        if (!mark) {
            p->at = from; /* blanks before text are text at the beginning */
            plain_message(p, TD_OUTPUT_CONTENT, r);
            continue;
        }
        p->at += strlen(marks[which]);
        if (which >= 1 && which <= 3)
            add(r, TD_OUTPUT_MARKUP, p->s + from, p->at - from, NULL, 0, false);
        else if (plain_header(p, from, r))
            plain_addressed(p, calls, from, &n_calls, r);
    }
}

static void plain_parse(struct td_output_format f, bool inside, const char *s, size_t n,
                        struct result *r)
{
    struct plain p = {.s = s, .n = n};
    uint32_t n_calls = 0;
    r->n_log = r->n_raw = 0;
    r->last = -1;
    if (f.reasoning == TD_REASONING_THINK) plain_reasoning(&p, inside, r);
    if (f.reasoning == TD_REASONING_CHANNELS) plain_channels(&p, f.calls == TD_CALLS_HARMONY, r);
    if (f.calls == TD_CALLS_LLAMA3) plain_llama3(&p, &n_calls, r);
    const char *mark = f.calls == TD_CALLS_HERMES ? "<tool_call>" : "[TOOL_CALLS]";
    bool between = true; /* only blanks since the start or the last call */
    while (p.at < n) {
        const char *hit =
            f.calls != TD_CALLS_NONE ? memmem(s + p.at, n - p.at, mark, strlen(mark)) : NULL;
        size_t end = hit == NULL ? n : (size_t)(hit - s), from = p.at;
        blanks(&p);
        bool only = between && p.at >= end && (hit != NULL || n_calls > 0);
        add(r, only ? TD_OUTPUT_MARKUP : TD_OUTPUT_CONTENT, s + from, end - from, NULL, 0, false);
        p.at = end;
        if (hit == NULL) break;
        from = end;
        p.at = end + strlen(mark);
        between = f.calls == TD_CALLS_HERMES    ? plain_hermes(&p, from, &n_calls, r)
                  : f.calls == TD_CALLS_MISTRAL ? plain_mistral(&p, from, &n_calls, r)
                                                : plain_mistral_args(&p, from, &n_calls, r);
    }
    close_run(r);
    r->log[r->n_log] = 0;
}

static size_t random_answer(enum td_call_format calls, char *text, size_t room)
{
    static const char *const common[] = {"Hello",
                                         " ",
                                         "\n",
                                         "\n\n",
                                         "\xe6\x97\xa5\xe6\x9c\xac",
                                         "\xf0\x9f\x98\x80",
                                         "<",
                                         "[",
                                         "{",
                                         "}",
                                         "<think>",
                                         "</think>",
                                         "\n</think>\n\n",
                                         "</th",
                                         "\"",
                                         "\\"};
    static const char *const of[][14] = {
        {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n"},
        {"<tool_call>", "<tool_call>\n", "</tool_call>", "\n</tool_call>\n",
         "{\"name\": \"f\", \"arguments\": ",
         "{\"arguments\": {\"a\" : [1, 2.5e-1 ]} , \"name\":\"g\"}",
         "{\"a\": {\"b\": \"c\\u00e9\\n\"}}", "{}", "}", "<tool_",
         "{\"name\": \"\xc3\xa9\", \"id\": null, "
         "\"arguments\": {\"x\": true, \"y\": -0}}",
         "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"<tool_call>\"}}\n</tool_call>",
         "{\"name\": \"a\\\"b\", \"arguments\": {}}", "{\"x\": 1}"},
        {"{\"name\": \"f\", \"parameters\": {\"a\": 1}}", "<|python_tag|>", ";", "; ", "<|python",
         "{\"name\": \"f\", \"parameters\": ",
         "{\"type\":\"function\",\"name\":\"g\",\"parameters\":{}}", "{}", "}", "[1, 2]",
         "{\"a\": {\"b\": false}}", "{\"name\": 1}", " ; ", "\"f\""},
        {"[TOOL_CALLS]", "[TOOL_CALLS] [", "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}]",
         "{\"name\": \"f\", \"arguments\": {\"a\": [\"]\"]}}", ", ", ",", "]", "]\n",
         "{\"name\": \"f\", \"arguments\": ", "{\"a\": 1}", "}", "[TOOL", "f{}", "\"id\": 1"},
        {"[TOOL_CALLS]", "f", "get_weather", "[ARGS]", "[CALL_ID]abc", "{\"a\": [{}, null]}", "{}",
         "[TOOL_CALLS]f[ARGS]{\"x\": \"[TOOL_CALLS]\"}", "[TOOL_CALLS]g{}", "[AR", "(", "}",
         "{\"a\": 1,", "[TOOL_CALLS]f[CALL_ID]1[ARGS]"},
        {"<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|call|>",
         "<|end|><|start|>assistant", "<|start|>", "to=functions.f", " to=", "<|message|>",
         "<|channel|>commentary to=functions.get_x <|constrain|>json<|message|>",
         "{\"a\": [\"<|end|>\", {}]}", "{\"a\": 1",
         "<|start|>assistant to=functions.g<|channel|>commentary json<|message|> {} <|call|>",
         "<|chan"}};
    size_t n = 0;
    text[0] = 0;
    for (int i = 1 + below(9); i > 0; i--)
        n += (size_t)snprintf(text + n, room - n, "%s",
                              below(3) ? of[calls][below(14)] : common[below(LEN(common))]);
    if (below(4) == 0) { /* a byte of another kind, where JSON may not expect it */
        static const char bytes[] = "{}[]\",:\\ 01-.eEtn<x";
        size_t at = (size_t)below((int)n);
        if ((unsigned char)text[at] < 0x80) text[at] = bytes[below((int)sizeof bytes - 1)];
    }
    return n;
}

static void against_plain(void **state)
{
    (void)state;
    enum { ANSWERS = 60000 };
    static struct result want, got;
    static char text[8192];
    int n_calls[6] = {0}, n_cut = 0, n_reasoning = 0, n_thought = 0;
    FILE *f = fopen("/dev/urandom", "rb");
    uint64_t seed = 1;
    const char *given = getenv("SEED");
    if (f != NULL && fread(&seed, sizeof seed, 1, f) != 1) seed = 1;
    if (f != NULL) fclose(f);
    if (given != NULL) seed = strtoull(given, NULL, 10);
    printf("  SEED=%llu\n", (unsigned long long)seed);
    rng_state = seed;

    for (int i = 0; i < ANSWERS; i++) {
        enum td_call_format calls = (enum td_call_format)below(6);
        struct td_output_format format = {calls, below(2)};
        if (calls == TD_CALLS_HARMONY)
            format =
                (struct td_output_format){below(4) ? calls : TD_CALLS_NONE, TD_REASONING_CHANNELS};
        bool inside = format.reasoning && below(3) == 0;
        size_t n = random_answer(calls, text, sizeof text);
        plain_parse(format, inside, text, n, &want);
        for (int pass = 0; pass < 2; pass++) {
            parse(format, inside, text, n, pass == 0 ? 0 : 1 + below(12), &got);
            if (strcmp(want.log, got.log) != 0)
                fail_msg("SEED=%llu, answer %d, %s%s%s:\n%s\ngives\n%s\nplainly\n%s",
                         (unsigned long long)seed, i, td_call_format_name(format.calls),
                         format.reasoning == TD_REASONING_CHANNELS ? ", channels"
                         : format.reasoning                        ? ", reasoning"
                                                                   : "",
                         inside ? ", inside" : "", text, got.log, want.log);
            assert_int_equal(got.n_raw, n);
            assert_memory_equal(got.raw, text, n);
            assert_true(got.whole);
        }
        n_calls[format.calls] += got.n_calls;
        n_cut += strstr(got.log, "[E cut]") != NULL;
        n_reasoning += strstr(got.log, "[R ") != NULL;
        n_thought += calls == TD_CALLS_HARMONY && strstr(got.log, "[R ") != NULL;
    }
    printf("  %d answers; calls: hermes %d, llama3 %d, mistral %d, mistral_args %d, harmony %d; %d "
           "cut off; %d with reasoning, %d of them in a channel\n",
           ANSWERS, n_calls[1], n_calls[2], n_calls[3], n_calls[4], n_calls[5], n_cut, n_reasoning,
           n_thought);
    for (int k = 1; k < 6; k++) assert_true(n_calls[k] > ANSWERS / 1000);
    assert_true(n_cut > ANSWERS / 1000 && n_reasoning > ANSWERS / 1000);
    assert_true(n_thought > ANSWERS / 1000);
}

/* ---- families -------------------------------------------------------------------------------- */

static void families(void **state)
{
    (void)state;
    static const struct {
        const char *file;
        enum td_call_format calls;
        enum td_reasoning reasoning;
    } known[] = {
        {"Qwen-Qwen2.5-7B-Instruct", TD_CALLS_HERMES, TD_REASONING_NONE},
        {"Qwen-Qwen3-0.6B", TD_CALLS_HERMES, TD_REASONING_THINK},
        {"Qwen-QwQ-32B", TD_CALLS_HERMES, TD_REASONING_THINK},
        {"NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", TD_CALLS_HERMES, TD_REASONING_NONE},
        {"NousResearch-Hermes-3-Llama-3.1-8B-tool_use", TD_CALLS_HERMES, TD_REASONING_NONE},
        {"meta-llama-Llama-3.1-8B-Instruct", TD_CALLS_LLAMA3, TD_REASONING_NONE},
        {"meta-llama-Llama-3.2-3B-Instruct", TD_CALLS_LLAMA3, TD_REASONING_NONE},
        {"meta-llama-Llama-3.3-70B-Instruct", TD_CALLS_LLAMA3, TD_REASONING_NONE},
        {"mistralai-Mistral-Nemo-Instruct-2407", TD_CALLS_MISTRAL, TD_REASONING_NONE},
        {"Mistral-Small-3.2-24B-Instruct-2506", TD_CALLS_MISTRAL_ARGS, TD_REASONING_NONE},
        {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", TD_CALLS_NONE, TD_REASONING_THINK},
        {"google-gemma-2-2b-it", TD_CALLS_NONE, TD_REASONING_NONE},
        {"microsoft-Phi-3.5-mini-instruct", TD_CALLS_NONE, TD_REASONING_NONE},
        /* the same tag, written in other ways */
        {"Qwen3-Coder", TD_CALLS_NONE, TD_REASONING_NONE},
        {"GLM-4.6", TD_CALLS_NONE, TD_REASONING_THINK},
        {"meetkai-functionary-medium-v3.1", TD_CALLS_NONE, TD_REASONING_NONE},
        {"fireworks-ai-llama-3-firefunction-v2", TD_CALLS_NONE, TD_REASONING_NONE},
        {"openai-gpt-oss-120b", TD_CALLS_HARMONY, TD_REASONING_CHANNELS},
    };
    const char *data = getenv("TANDEM_DATA");
    for (int i = 0; i < LEN(known); i++) {
        char path[4096], *text = NULL;
        size_t n = 0;
        struct td_err err = {0};
        snprintf(path, sizeof path, "%s/chat-templates/%s.jinja",
                 data != NULL ? data : "../shared/data", known[i].file);
        if (access(path, R_OK) != 0) {
            printf("no %s\n", path);
            skip();
        }
        assert_int_equal(td_file_read(path, 1 << 20, &text, &n, &err), TD_OK);
        struct td_output_format f = td_output_format_find(text, n);
        if (f.calls != known[i].calls || f.reasoning != known[i].reasoning)
            fail_msg("%s: %s, reasoning %d", known[i].file, td_call_format_name(f.calls),
                     f.reasoning);
        free(text);
    }
}

static void prompts(void **state)
{
    (void)state;
    assert_true(td_output_begins_in_reasoning("x<think>", 8));
    assert_true(td_output_begins_in_reasoning("<think>\n", 8));
    assert_false(td_output_begins_in_reasoning("<think>\n\n</think>\n\n", 19));
    assert_false(td_output_begins_in_reasoning("think>", 6));
    assert_false(td_output_begins_in_reasoning("", 0));
    struct td_output_format f = {TD_CALLS_NONE, TD_REASONING_CHANNELS};
    assert_string_equal(td_output_guided_header(f, "x<|start|>assistant", 19),
                        "<|channel|>final<|message|>");
    assert_string_equal(td_output_guided_header(f, "x", 1), "");
    f.reasoning = TD_REASONING_THINK;
    assert_string_equal(td_output_guided_header(f, "<|start|>assistant", 18), "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(by_hand),  cmocka_unit_test(bounds),  cmocka_unit_test(against_plain),
        cmocka_unit_test(families), cmocka_unit_test(prompts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
