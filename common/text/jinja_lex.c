/* jinja_lex.c - cuts the template into text and tags, and tags into tokens.
 *
 * The template is cut at {{ {% {#. Around a tag, text loses the white space that Jinja removes: "-"
 * removes all on its side; a block tag or comment removes the newline after it (trim_blocks) and
 * the blanks before it on its line (lstrip_blocks); the source's last newline is dropped. */
#include "common/text/jinja_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool jinja_refuse(struct parser *p, td_status code, const char *fmt, ...)
{
    char what[160];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    p->status = td_fail(p->err, code, "chat template, line %d: %s", p->line, what);
    return false;
}

void *jinja_parser_alloc(struct parser *p, size_t bytes)
{
    void *m = jinja_arena_alloc(p->arena, bytes);
    if (m == NULL) jinja_refuse(p, TD_ERR_LIMIT, "the template is too large");
    return m;
}

bool jinja_is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f);
}

static bool is_name_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c >= '0' && c <= '9');
}

bool jinja_starts(const struct parser *p, size_t at, const char *what)
{
    size_t n = strlen(what);
    return p->n - at >= n && memcmp(p->src + at, what, n) == 0;
}

static size_t put_utf8(char *out, uint32_t c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (char)(0xc0 | c >> 6);
        out[1] = (char)(0x80 | (c & 63));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (char)(0xe0 | c >> 12);
        out[1] = (char)(0x80 | (c >> 6 & 63));
        out[2] = (char)(0x80 | (c & 63));
        return 3;
    }
    out[0] = (char)(0xf0 | c >> 18);
    out[1] = (char)(0x80 | (c >> 12 & 63));
    out[2] = (char)(0x80 | (c >> 6 & 63));
    out[3] = (char)(0x80 | (c & 63));
    return 4;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* Reads a string with Python's escapes; an unknown escape stays as it is written. */
static bool lex_string(struct parser *p)
{
    char quote = p->src[p->at++];
    size_t start = p->at, n = 0;
    while (p->at < p->n && p->src[p->at] != quote)
        p->at += p->src[p->at] == '\\' && p->at + 1 < p->n ? 2 : 1;
    if (p->at >= p->n) return jinja_refuse(p, TD_ERR_UNSUPPORTED, "a string does not end");
    char *out = jinja_parser_alloc(p, p->at - start + 1);
    if (out == NULL) return false;
    for (size_t i = start; i < p->at; i++) {
        char c = p->src[i];
        p->line += c == '\n';
        if (c != '\\') {
            out[n++] = c;
            continue;
        }
        c = p->src[++i];
        static const char plain[] = "n\nt\tr\rb\bf\fv\va\a\\\\''\"\"";
        const char *found = NULL;
        for (const char *k = plain; *k != 0; k += 2)
            if (*k == c) found = k + 1;
        int n_hex = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
        if (found != NULL) {
            out[n++] = *found;
        } else if (c == '\n') {
            p->line++;
        } else if (n_hex > 0) {
            uint32_t code = 0;
            for (int k = 0; k < n_hex; k++) {
                int digit = ++i < p->at ? hex_digit(p->src[i]) : -1;
                if (digit < 0)
                    return jinja_refuse(
                        p, TD_ERR_UNSUPPORTED,
                        "a string has an escape \\%c without its %d hexadecimal digits", c, n_hex);
                code = code << 4 | (uint32_t)digit;
            }
            if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
                return jinja_refuse(p, TD_ERR_UNSUPPORTED,
                                    "a string has the escape of no character");
            n += put_utf8(out + n, code);
        } else if ((c >= '0' && c <= '7') || c == 'N') {
            return jinja_refuse(p, TD_ERR_UNSUPPORTED, "the string escape \\%c", c);
        } else {
            out[n++] = '\\';
            out[n++] = c;
        }
    }
    p->at++;
    p->token = (struct token){.kind = T_STRING, .text = {out, n}};
    return true;
}

/* Reads the next token of the open tag into p->token. At the tag's end it also removes the white
 * space that the tag removes. */
bool jinja_next(struct parser *p)
{
    while (p->at < p->n && jinja_is_space(p->src[p->at])) p->line += p->src[p->at++] == '\n';
    if (p->at >= p->n) return jinja_refuse(p, TD_ERR_UNSUPPORTED, "a tag does not end");
    if (p->brackets == 0) {
        const char *end = p->in_block ? "%}" : "}}";
        char sign = p->src[p->at];
        bool with_sign =
            (sign == '-' || (sign == '+' && p->in_block)) && jinja_starts(p, p->at + 1, end);
        if (with_sign || jinja_starts(p, p->at, end)) {
            p->at += with_sign ? 3 : 2;
            if (with_sign && sign == '-') {
                while (p->at < p->n && jinja_is_space(p->src[p->at]))
                    p->line += p->src[p->at++] == '\n';
            } else if (!with_sign && p->in_block && p->at < p->n && p->src[p->at] == '\n') {
                p->at++;
                p->line++;
            }
            p->token = (struct token){.kind = T_END};
            return true;
        }
    }
    char c = p->src[p->at];
    if (c == '\'' || c == '"') return lex_string(p);
    size_t start = p->at;
    if (c >= '0' && c <= '9') {
        int64_t i = 0;
        for (; p->at < p->n && p->src[p->at] >= '0' && p->src[p->at] <= '9'; p->at++) {
            i = i * 10 + (p->src[p->at] - '0');
            if (i > INT32_MAX)
                return jinja_refuse(p, TD_ERR_UNSUPPORTED, "a number over %d", INT32_MAX);
        }
        if (p->at < p->n &&
            (is_name_char(p->src[p->at]) ||
             (p->src[p->at] == '.' && p->at + 1 < p->n && hex_digit(p->src[p->at + 1]) >= 0)))
            return jinja_refuse(p, TD_ERR_UNSUPPORTED, "a number that is no plain integer");
        p->token = (struct token){.kind = T_INT, .i = i};
        return true;
    }
    if (is_name_char(c)) {
        while (p->at < p->n && is_name_char(p->src[p->at])) p->at++;
        p->token = (struct token){.kind = T_NAME, .text = {p->src + start, p->at - start}};
        return true;
    }
    static const char *const two[] = {"==", "!=", "<=", ">=", "//", "**"};
    size_t len = 1;
    for (size_t k = 0; k < sizeof two / sizeof *two; k++)
        if (jinja_starts(p, p->at, two[k])) len = 2;
    if (len == 1 && strchr("+-*/%~<>=()[]{}.,:|", c) == NULL)
        return jinja_refuse(p, TD_ERR_UNSUPPORTED, "the character 0x%02x in a tag",
                            (unsigned char)c);
    p->at += len;
    p->brackets += c == '(' || c == '[' || c == '{';
    p->brackets -= c == ')' || c == ']' || c == '}';
    if (p->brackets < 0)
        return jinja_refuse(p, TD_ERR_UNSUPPORTED, "a bracket closes that none opened");
    p->token = (struct token){.kind = T_OP, .text = {p->src + start, len}};
    return true;
}

bool jinja_at_op(const struct parser *p, const char *op)
{
    return p->token.kind == T_OP && str_is(p->token.text, op);
}

bool jinja_at_name(const struct parser *p, const char *name)
{
    return p->token.kind == T_NAME && str_is(p->token.text, name);
}

bool jinja_expect_op(struct parser *p, const char *op)
{
    if (!jinja_at_op(p, op))
        return jinja_refuse(p, TD_ERR_UNSUPPORTED, "no \"%s\" where one must be", op);
    return jinja_next(p);
}

bool jinja_expect_end(struct parser *p)
{
    if (p->token.kind != T_END)
        return jinja_refuse(p, TD_ERR_UNSUPPORTED, "a tag goes on with \"%.*s\"",
                            (int)(p->token.text.n < 40 ? p->token.text.n : 40),
                            p->token.text.p == NULL ? "" : p->token.text.p);
    return true;
}

bool jinja_take_name(struct parser *p, struct str *ret)
{
    if (p->token.kind != T_NAME)
        return jinja_refuse(p, TD_ERR_UNSUPPORTED, "no name where one must be");
    *ret = p->token.text;
    return jinja_next(p);
}
