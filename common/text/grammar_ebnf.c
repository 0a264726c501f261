/* grammar_ebnf.c - rules in the notation that llama.cpp calls GBNF:
 *
 *     root  ::= "yes" | "no" reason?      # the rule "root" is the whole output
 *     reason ::= ", because " [a-z ]{1,40}
 *
 * Has: literals with \n \r \t \\ \" \xHH \uHHHH \UHHHHHHHH, classes with ranges and ^, ".", groups,
 * "|", * + ? {m} {m,} {m,n}, comments. A rule ends where the next one's name and ::= stand. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_internal.h"
#include "common/text/tokenizer_text.h"

struct name {
    const char *text;
    size_t n;
    int32_t rule;
};

struct ebnf {
    struct td_builder *b;
    const char *text;
    size_t n, at;
    int depth;
    struct name *names; /* room for TD_GRAMMAR_MAX_RULES */
    int32_t n_names;
};

static bool more(const struct ebnf *p) { return p->at < p->n && !p->b->status; }
static char peek(const struct ebnf *p) { return more(p) ? p->text[p->at] : 0; }

static int32_t fail(struct ebnf *p, td_status code, const char *why)
{
    int line = 1;
    for (size_t i = 0; i < p->at && i < p->n; i++) line += p->text[i] == '\n';
    td_builder_fail(p->b, code, "line %d: %s", line, why);
    return 0;
}

static void skip_space(struct ebnf *p)
{
    for (; p->at < p->n; p->at++) {
        if (p->text[p->at] == '#')
            while (p->at < p->n && p->text[p->at] != '\n') p->at++;
        if (p->at == p->n || !p->text[p->at] || !strchr(" \t\r\n", p->text[p->at])) return;
    }
}

static bool is_name(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_';
}

static size_t name_bytes(const struct ebnf *p)
{
    size_t n = 0;
    while (p->at + n < p->n && is_name(p->text[p->at + n])) n++;
    return n;
}

static bool at_rule(struct ebnf *p)
{
    size_t from = p->at, n = name_bytes(p);
    p->at += n;
    skip_space(p);
    bool yes = n > 0 && p->n - p->at >= 3 && !memcmp(p->text + p->at, "::=", 3);
    p->at = from;
    return yes;
}

static int32_t rule_of(struct ebnf *p)
{
    size_t n = name_bytes(p);
    const char *text = p->text + p->at;
    p->at += n;
    for (int32_t i = 0; i < p->n_names; i++)
        if (p->names[i].n == n && !memcmp(p->names[i].text, text, n)) return p->names[i].rule;
    bool root = n == 4 && !memcmp(text, "root", 4);
    int32_t rule = root ? 0 : td_rule_new(p->b);
    if (p->n_names < TD_GRAMMAR_MAX_RULES)
        p->names[p->n_names++] = (struct name){.text = text, .n = n, .rule = rule};
    return rule;
}

static uint32_t character(struct ebnf *p)
{
    uint32_t cp = 0;
    if (peek(p) != '\\') {
        int len = td_utf8_next(p->text + p->at, p->n - p->at, &cp);
        if (len <= 0) return (uint32_t)fail(p, TD_ERR_INVALID, "not valid UTF-8");
        p->at += (size_t)len;
        return cp;
    }
    p->at++;
    char c = peek(p);
    int n_digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
    p->at++;
    if (!n_digits) {
        static const char from[] = "nrt\\\"[]^-", to[] = "\n\r\t\\\"[]^-";
        const char *known = c ? strchr(from, c) : NULL;
        if (!known) return (uint32_t)fail(p, TD_ERR_INVALID, "an unknown escape after a backslash");
        return (uint32_t)(uint8_t)to[known - from];
    }
    for (int i = 0; i < n_digits; i++, p->at++) {
        c = peek(p);
        int d = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
        if (d < 0) return (uint32_t)fail(p, TD_ERR_INVALID, "a hexadecimal digit is missing");
        cp = cp * 16 + (uint32_t)d;
    }
    if (cp > TD_CP_MAX || (cp >= 0xD800 && cp <= 0xDFFF))
        return (uint32_t)fail(p, TD_ERR_INVALID, "an escape is no character");
    return cp;
}

static int32_t literal(struct ebnf *p)
{
    int32_t cat = td_expr_new(p->b, TD_EXPR_CAT, 0, 0);
    p->at++;
    while (more(p) && peek(p) != '"') {
        char utf8[4];
        uint32_t cp = character(p);
        int n = td_utf8_put(cp, utf8);
        for (int i = 0; i < n && !p->b->status; i++)
            td_expr_add(p->b, cat, td_expr_new(p->b, TD_EXPR_BYTES, (uint8_t)utf8[i], 0));
    }
    if (!more(p)) return fail(p, TD_ERR_INVALID, "a literal has no closing quote");
    p->at++;
    return cat;
}

static int32_t bracket(struct ebnf *p)
{
    struct td_cps set = {0};
    p->at++;
    bool inverted = peek(p) == '^';
    if (inverted) p->at++;
    while (more(p) && peek(p) != ']') {
        uint32_t lo = character(p), hi = lo;
        if (peek(p) == '-' && p->at + 1 < p->n && p->text[p->at + 1] != ']') {
            p->at++;
            hi = character(p);
            if (hi < lo) fail(p, TD_ERR_INVALID, "a range ends before it begins");
        }
        td_cps_add(p->b, &set, lo, hi);
    }
    if (!more(p)) fail(p, TD_ERR_INVALID, "a class has no closing bracket");
    p->at++;
    if (inverted) td_cps_invert(p->b, &set);
    int32_t e = td_expr_cps(p->b, &set);
    td_cps_free(&set);
    return e;
}

static int32_t number(struct ebnf *p)
{
    int32_t v = -1;
    skip_space(p);
    for (; peek(p) >= '0' && peek(p) <= '9'; p->at++) {
        v = (v < 0 ? 0 : v) * 10 + (peek(p) - '0');
        if (v > TD_GRAMMAR_MAX_REPEAT) {
            td_builder_fail(p->b, TD_ERR_LIMIT, "a repetition of %d or more, limit %d", v,
                            TD_GRAMMAR_MAX_REPEAT);
            return -1;
        }
    }
    skip_space(p);
    return v;
}

static int32_t alternatives(struct ebnf *p);

static int32_t atom(struct ebnf *p)
{
    char c = peek(p);
    if (c == '"') return literal(p);
    if (c == '[') return bracket(p);
    if (c == '.') {
        struct td_cps all = {0};
        p->at++;
        td_cps_add(p->b, &all, 0, TD_CP_MAX);
        int32_t e = td_expr_cps(p->b, &all);
        td_cps_free(&all);
        return e;
    }
    if (c == '(') {
        p->at++;
        if (++p->depth > TD_GRAMMAR_MAX_DEPTH) {
            td_builder_fail(p->b, TD_ERR_LIMIT, "groups are nested more than %d deep, the limit",
                            TD_GRAMMAR_MAX_DEPTH);
            return 0;
        }
        int32_t e = alternatives(p);
        p->depth--;
        if (peek(p) != ')') return fail(p, TD_ERR_INVALID, "a group has no closing parenthesis");
        p->at++;
        return e;
    }
    if (is_name(c)) return td_expr_call(p->b, rule_of(p));
    return fail(p, TD_ERR_INVALID, "expected a literal, a class, a group or the name of a rule");
}

static int32_t alternatives(struct ebnf *p)
{
    int32_t alt = td_expr_new(p->b, TD_EXPR_ALT, 0, 0);
    for (;;) {
        int32_t cat = td_expr_new(p->b, TD_EXPR_CAT, 0, 0);
        for (skip_space(p); more(p) && peek(p) != '|' && peek(p) != ')'; skip_space(p)) {
            if (is_name(peek(p)) && at_rule(p)) break;
            int32_t e = atom(p), min = 1, max = 1;
            char c = peek(p);
            if (c == '*' || c == '+' || c == '?') {
                p->at++;
                min = c == '+';
                max = c == '?' ? 1 : -1;
            } else if (c == '{') {
                p->at++;
                min = max = number(p);
                if (peek(p) == ',') {
                    p->at++;
                    max = number(p);
                }
                if (min < 0 || peek(p) != '}' || (max >= 0 && max < min))
                    fail(p, TD_ERR_INVALID, "a repetition must be {m}, {m,} or {m,n} with m <= n");
                p->at++;
            }
            if (min != 1 || max != 1) e = td_expr_rep(p->b, e, min, max);
            td_expr_add(p->b, cat, e);
        }
        td_expr_add(p->b, alt, cat);
        if (peek(p) != '|') return alt;
        p->at++;
    }
}

void td_grammar_read_ebnf(struct td_builder *b, const char *text, size_t n)
{
    struct ebnf p = {.b = b, .text = text, .n = n};
    p.names = calloc(TD_GRAMMAR_MAX_RULES, sizeof *p.names);
    if (!p.names) td_builder_fail(b, TD_ERR_NOMEM, "no memory for the names of rules");
    if (memchr(text, 0, n)) fail(&p, TD_ERR_INVALID, "the text has a NUL byte: write \\x00");
    for (skip_space(&p); more(&p); skip_space(&p)) {
        if (!at_rule(&p)) {
            fail(&p, TD_ERR_INVALID, "expected NAME ::= ...");
            break;
        }
        int32_t rule = rule_of(&p);
        skip_space(&p);
        p.at += 3;
        if (!b->status && b->rules[rule].expr >= 0)
            fail(&p, TD_ERR_INVALID, "the rule on this line is there twice");
        int32_t e = alternatives(&p);
        if (!b->status) b->rules[rule].expr = e;
    }
    if (!b->status && b->rules[0].expr < 0)
        td_builder_fail(b, TD_ERR_INVALID, "there is no rule root: it is the whole output");
    for (int32_t i = 0; i < p.n_names && !b->status; i++)
        if (b->rules[p.names[i].rule].expr < 0)
            td_builder_fail(b, TD_ERR_INVALID, "the rule %.*s is used and not there",
                            (int)(p.names[i].n < 64 ? p.names[i].n : 64), p.names[i].text);
    free(p.names);
}
