/* jinja.c - source to tree to text, for the part of Jinja that chat templates are written in.
 *
 *     source --(tags)--> text | {{ expression }} | {% statement %} --(parser)--> struct node, struct expr --(walk)--> text
 *
 * Tags. The template is cut at {{ {% {#. Around a tag, text loses what Jinja takes away: "-" eats all white space on its side; a block tag or
 * comment eats the newline after it (trim_blocks) and the blanks before it on its line (lstrip_blocks); the source's last newline is dropped.
 *
 * Values are small structs passed by value; strings are (pointer, length) into the source, the input or the render's arena, and never change.
 * Only namespaces change. Each render has an arena that dies with it, so nothing is freed on the way.
 *
 * Scopes. A loop iteration and a macro call open a scope; if and set do not. A name is looked up from the innermost scope outwards, so a set
 * inside a loop ends with the iteration, as in Jinja.
 *
 * Failing. The first failure is written to the context's td_err and everything unwinds on `false`. A value Jinja would print through Python's
 * repr (lists, dicts), floats, and letters beyond ASCII whose case would change are refused rather than approximated. */
#include "common/text/jinja.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_DEPTH 64            /* of nested expressions and blocks */
#define MAX_MACRO_DEPTH 12
#define MAX_RANGE 100000        /* Jinja's own, in its sandbox */
#define MAX_ARGS 16
#define STEPS_BASE 2000000u
#define STEPS_PER_MESSAGE 4000u
/* Memory of one rendering. Of 68 published templates the one that makes most of a long chat takes 56 times its bytes, a short one 140 kB. */
#define BYTES_BASE ((size_t)64 << 20)
#define BYTES_PER_INPUT_BYTE 64

/* ---- arena ------------------------------------------------------------------------------------------------------------------------------ */

struct chunk {
    struct chunk *next;
    size_t used, bytes;
    _Alignas(16) char data[];
};

struct arena {
    struct chunk *head;
    size_t total, limit;    /* of what malloc gave, headers included */
};

static void *arena_alloc(struct arena *a, size_t bytes)
{
    if (bytes > a->limit)
        return NULL;
    bytes = (bytes + 15) & ~(size_t)15;
    if (a->head == NULL || a->head->bytes - a->head->used < bytes) {
        size_t room = bytes > 16384 ? bytes : 16384;
        if (sizeof(struct chunk) + room > a->limit - a->total)
            return NULL;
        struct chunk *c = malloc(sizeof *c + room);
        if (c == NULL)
            return NULL;
        *c = (struct chunk){.next = a->head, .bytes = room};
        a->head = c;
        a->total += sizeof *c + room;
    }
    void *p = a->head->data + a->head->used;
    a->head->used += bytes;
    return memset(p, 0, bytes);
}

static void arena_free(struct arena *a)
{
    while (a->head != NULL) {
        struct chunk *next = a->head->next;
        free(a->head);
        a->head = next;
    }
}

/* ---- values, expressions, statements ------------------------------------------------------------------------------------------------------ */

struct str {
    const char *p;
    size_t n;
};

enum kind { UNDEFINED, NONE, BOOL, INT, STR, LIST, DICT, SPACE /* namespace() */, LOOP, MACRO, FUNCTION };

struct list;
struct dict;
struct loop;
struct node;

struct value {
    enum kind kind;
    bool lazy;     /* LIST: a Python iterator, always true and without a length */
    union {
        int64_t i;     /* BOOL, INT, FUNCTION */
        struct str s;
        struct list *list;
        struct dict *dict;     /* DICT, SPACE */
        struct loop *loop;
        const struct node *macro;
    } u;
};

struct list {
    size_t n;
    struct value *v;
};

struct pair {
    struct str key;
    struct value value;
};

struct dict {
    size_t n, room;
    struct pair *pair;
};

struct loop {
    size_t at;
    struct list *items;
};

enum expr_kind { E_VALUE, E_NAME, E_ATTR, E_ITEM, E_SLICE, E_CALL, E_FILTER, E_TEST, E_NOT, E_AND, E_OR, E_NEG, E_BINARY, E_COMPARE, E_COND,
                 E_LIST, E_DICT };

enum op { OP_ADD, OP_SUB, OP_MUL, OP_MOD, OP_FLOOR, OP_CONCAT, OP_EQ, OP_NE, OP_LT, OP_LE, OP_GT, OP_GE, OP_IN, OP_NOT_IN };

struct arg {
    struct arg *next;
    struct str name;        /* empty: positional */
    struct expr *value;
    struct expr *key;       /* E_DICT */
    enum op op;             /* E_COMPARE: the operator before value */
};

struct expr {
    enum expr_kind kind;
    enum op op;
    int line;
    struct value value;        /* E_VALUE */
    struct str name;           /* E_NAME, E_ATTR, E_FILTER, E_TEST */
    struct expr *a, *b, *c, *d;
    struct arg *args;
};

enum node_kind { N_TEXT, N_PRINT, N_IF, N_FOR, N_SET, N_SET_BLOCK, N_MACRO, N_BREAK, N_CONTINUE, N_GROUP };

struct target {        /* for a, b in; parameters of a macro */
    struct target *next;
    struct str name;
    struct expr *fallback;
};

struct node {
    enum node_kind kind;
    int line;
    struct node *next;
    struct str text;              /* N_TEXT; N_MACRO: its name; N_SET: the namespace's attribute, or empty */
    struct expr *e, *filter;      /* condition, iterable, value; N_FOR: "if" */
    struct target *targets;
    struct node *body, *otherwise;
};

struct td_jinja {
    struct arena arena;
    struct node *root;
};

static bool str_is(struct str s, const char *word)
{
    return s.n == strlen(word) && memcmp(s.p, word, s.n) == 0;
}

static bool str_same(struct str a, struct str b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

/* ---- tags and tokens ---------------------------------------------------------------------------------------------------------------------- */

enum token_kind { T_END /* of the tag */, T_NAME, T_INT, T_STRING, T_OP };

struct token {
    enum token_kind kind;
    struct str text;       /* decoded, for strings */
    int64_t i;
};

struct parser {
    struct arena *arena;
    const char *src;
    size_t n, at;
    int line, depth, loop_depth;
    bool in_block;         /* the open tag is {% %}, else {{ }} */
    int brackets;
    struct token token;
    struct td_err *err;
    td_status status;
};

static bool refuse(struct parser *p, td_status code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static bool refuse(struct parser *p, td_status code, const char *fmt, ...)
{
    char what[160];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    p->status = td_fail(p->err, code, "chat template, line %d: %s", p->line, what);
    return false;
}

static void *parser_alloc(struct parser *p, size_t bytes)
{
    void *m = arena_alloc(p->arena, bytes);
    if (m == NULL)
        refuse(p, TD_ERR_LIMIT, "the template is too large");
    return m;
}

static bool is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f);
}

static bool is_name_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c >= '0' && c <= '9');
}

static bool starts(const struct parser *p, size_t at, const char *what)
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
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Python's escapes; an unknown one stays as it is written. */
static bool lex_string(struct parser *p)
{
    char quote = p->src[p->at++];
    size_t start = p->at, n = 0;
    while (p->at < p->n && p->src[p->at] != quote)
        p->at += p->src[p->at] == '\\' && p->at + 1 < p->n ? 2 : 1;
    if (p->at >= p->n)
        return refuse(p, TD_ERR_UNSUPPORTED, "a string does not end");
    char *out = parser_alloc(p, p->at - start + 1);
    if (out == NULL)
        return false;
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
            if (*k == c)
                found = k + 1;
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
                    return refuse(p, TD_ERR_UNSUPPORTED, "a string has an escape \\%c without its %d hexadecimal digits", c, n_hex);
                code = code << 4 | (uint32_t)digit;
            }
            if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
                return refuse(p, TD_ERR_UNSUPPORTED, "a string has the escape of no character");
            n += put_utf8(out + n, code);
        } else if ((c >= '0' && c <= '7') || c == 'N') {
            return refuse(p, TD_ERR_UNSUPPORTED, "the string escape \\%c", c);
        } else {
            out[n++] = '\\';
            out[n++] = c;
        }
    }
    p->at++;
    p->token = (struct token){.kind = T_STRING, .text = {out, n}};
    return true;
}

/* The next token of the open tag into p->token. At the tag's end also eats what the end eats. */
static bool next(struct parser *p)
{
    while (p->at < p->n && is_space(p->src[p->at]))
        p->line += p->src[p->at++] == '\n';
    if (p->at >= p->n)
        return refuse(p, TD_ERR_UNSUPPORTED, "a tag does not end");
    if (p->brackets == 0) {
        const char *end = p->in_block ? "%}" : "}}";
        char sign = p->src[p->at];
        bool with_sign = (sign == '-' || (sign == '+' && p->in_block)) && starts(p, p->at + 1, end);
        if (with_sign || starts(p, p->at, end)) {
            p->at += with_sign ? 3 : 2;
            if (with_sign && sign == '-') {
                while (p->at < p->n && is_space(p->src[p->at]))
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
    if (c == '\'' || c == '"')
        return lex_string(p);
    size_t start = p->at;
    if (c >= '0' && c <= '9') {
        int64_t i = 0;
        for (; p->at < p->n && p->src[p->at] >= '0' && p->src[p->at] <= '9'; p->at++) {
            i = i * 10 + (p->src[p->at] - '0');
            if (i > INT32_MAX)
                return refuse(p, TD_ERR_UNSUPPORTED, "a number over %d", INT32_MAX);
        }
        if (p->at < p->n && (is_name_char(p->src[p->at]) || (p->src[p->at] == '.' && p->at + 1 < p->n && hex_digit(p->src[p->at + 1]) >= 0)))
            return refuse(p, TD_ERR_UNSUPPORTED, "a number that is no plain integer");
        p->token = (struct token){.kind = T_INT, .i = i};
        return true;
    }
    if (is_name_char(c)) {
        while (p->at < p->n && is_name_char(p->src[p->at]))
            p->at++;
        p->token = (struct token){.kind = T_NAME, .text = {p->src + start, p->at - start}};
        return true;
    }
    static const char *const two[] = {"==", "!=", "<=", ">=", "//", "**"};
    size_t len = 1;
    for (size_t k = 0; k < sizeof two / sizeof *two; k++)
        if (starts(p, p->at, two[k]))
            len = 2;
    if (len == 1 && strchr("+-*/%~<>=()[]{}.,:|", c) == NULL)
        return refuse(p, TD_ERR_UNSUPPORTED, "the character 0x%02x in a tag", (unsigned char)c);
    p->at += len;
    p->brackets += c == '(' || c == '[' || c == '{';
    p->brackets -= c == ')' || c == ']' || c == '}';
    if (p->brackets < 0)
        return refuse(p, TD_ERR_UNSUPPORTED, "a bracket closes that none opened");
    p->token = (struct token){.kind = T_OP, .text = {p->src + start, len}};
    return true;
}

static bool at_op(const struct parser *p, const char *op)
{
    return p->token.kind == T_OP && str_is(p->token.text, op);
}

static bool at_name(const struct parser *p, const char *name)
{
    return p->token.kind == T_NAME && str_is(p->token.text, name);
}

static bool expect_op(struct parser *p, const char *op)
{
    if (!at_op(p, op))
        return refuse(p, TD_ERR_UNSUPPORTED, "no \"%s\" where one must be", op);
    return next(p);
}

static bool expect_end(struct parser *p)
{
    if (p->token.kind != T_END)
        return refuse(p, TD_ERR_UNSUPPORTED, "a tag goes on with \"%.*s\"", (int)(p->token.text.n < 40 ? p->token.text.n : 40),
                      p->token.text.p == NULL ? "" : p->token.text.p);
    return true;
}

static bool take_name(struct parser *p, struct str *ret)
{
    if (p->token.kind != T_NAME)
        return refuse(p, TD_ERR_UNSUPPORTED, "no name where one must be");
    *ret = p->token.text;
    return next(p);
}

/* ---- expressions -------------------------------------------------------------------------------------------------------------------------- */

static bool parse_expr(struct parser *p, struct expr **ret);
static bool parse_or(struct parser *p, struct expr **ret);
static bool parse_unary(struct parser *p, bool with_filters, struct expr **ret);

static struct expr *new_expr(struct parser *p, enum expr_kind kind, struct expr *a, struct expr *b)
{
    struct expr *e = parser_alloc(p, sizeof *e);
    if (e != NULL)
        *e = (struct expr){.kind = kind, .line = p->line, .a = a, .b = b};
    return e;
}

static struct expr *value_expr(struct parser *p, struct value v)
{
    struct expr *e = new_expr(p, E_VALUE, NULL, NULL);
    if (e != NULL)
        e->value = v;
    return e;
}

/* "a, b)" or "name=a)" up to and with the closing bracket */
static bool parse_args(struct parser *p, const char *close, bool names, struct arg **ret)
{
    struct arg **last = ret;
    while (!at_op(p, close)) {
        struct arg *arg = parser_alloc(p, sizeof *arg);
        if (arg == NULL)
            return false;
        if (at_op(p, "*") || at_op(p, "**"))
            return refuse(p, TD_ERR_UNSUPPORTED, "* before an argument");
        if (!parse_expr(p, &arg->value))
            return false;
        if (names && at_op(p, "=")) {
            if (arg->value->kind != E_NAME)
                return refuse(p, TD_ERR_UNSUPPORTED, "an argument's name is no name");
            arg->name = arg->value->name;
            if (!next(p) || !parse_expr(p, &arg->value))
                return false;
        }
        *last = arg;
        last = &arg->next;
        if (!at_op(p, close) && !expect_op(p, ","))
            return false;
    }
    return next(p);
}

static bool parse_primary(struct parser *p, struct expr **ret)
{
    struct token t = p->token;
    static const struct { const char *name; enum kind kind; int64_t i; } words[] = {
        {"true", BOOL, 1}, {"True", BOOL, 1}, {"false", BOOL, 0}, {"False", BOOL, 0}, {"none", NONE, 0}, {"None", NONE, 0}};

    if (t.kind == T_INT) {
        *ret = value_expr(p, (struct value){.kind = INT, .u.i = t.i});
        return *ret != NULL && next(p);
    }
    if (t.kind == T_STRING) {
        if (!next(p))
            return false;
        while (p->token.kind == T_STRING) {     /* "a" "b" */
            char *both = parser_alloc(p, t.text.n + p->token.text.n + 1);
            if (both == NULL)
                return false;
            memcpy(both, t.text.p, t.text.n);
            memcpy(both + t.text.n, p->token.text.p, p->token.text.n);
            t.text = (struct str){both, t.text.n + p->token.text.n};
            if (!next(p))
                return false;
        }
        *ret = value_expr(p, (struct value){.kind = STR, .u.s = t.text});
        return *ret != NULL;
    }
    if (t.kind == T_NAME) {
        for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
            if (str_is(t.text, words[i].name)) {
                *ret = value_expr(p, (struct value){.kind = words[i].kind, .u.i = words[i].i});
                return *ret != NULL && next(p);
            }
        }
        static const char *const reserved[] = {"and", "or", "not", "in", "is", "if", "else"};
        for (size_t i = 0; i < sizeof reserved / sizeof *reserved; i++)
            if (str_is(t.text, reserved[i]))
                return refuse(p, TD_ERR_UNSUPPORTED, "\"%s\" where a value must be", reserved[i]);
        *ret = new_expr(p, E_NAME, NULL, NULL);
        if (*ret == NULL)
            return false;
        (*ret)->name = t.text;
        return next(p);
    }
    if (at_op(p, "(")) {
        if (!next(p))
            return false;
        if (at_op(p, ")")) {
            *ret = new_expr(p, E_LIST, NULL, NULL);
            return *ret != NULL && next(p);
        }
        if (!parse_expr(p, ret))
            return false;
        if (at_op(p, ",")) {
            struct expr *tuple = new_expr(p, E_LIST, NULL, NULL);
            struct arg *first = parser_alloc(p, sizeof *first);
            if (tuple == NULL || first == NULL)
                return false;
            first->value = *ret;
            tuple->args = first;
            *ret = tuple;
            return next(p) && parse_args(p, ")", false, &first->next);
        }
        return expect_op(p, ")");
    }
    if (at_op(p, "[")) {
        *ret = new_expr(p, E_LIST, NULL, NULL);
        return *ret != NULL && next(p) && parse_args(p, "]", false, &(*ret)->args);
    }
    if (at_op(p, "{")) {
        *ret = new_expr(p, E_DICT, NULL, NULL);
        if (*ret == NULL || !next(p))
            return false;
        struct arg **last = &(*ret)->args;
        while (!at_op(p, "}")) {
            struct arg *arg = parser_alloc(p, sizeof *arg);
            if (arg == NULL || !parse_expr(p, &arg->key) || !expect_op(p, ":") || !parse_expr(p, &arg->value))
                return false;
            *last = arg;
            last = &arg->next;
            if (!at_op(p, "}") && !expect_op(p, ","))
                return false;
        }
        return next(p);
    }
    return refuse(p, TD_ERR_UNSUPPORTED, "no value where one must be");
}

static bool parse_subscript(struct parser *p, struct expr **e)
{
    struct expr *part[3] = {NULL, NULL, NULL};
    int n = 0;
    bool slice = false;

    while (!at_op(p, "]")) {
        if (at_op(p, ":")) {
            slice = true;
            if (++n > 2)
                return refuse(p, TD_ERR_UNSUPPORTED, "a slice of more than three parts");
            if (!next(p))
                return false;
        } else if (part[n] != NULL || !parse_expr(p, &part[n])) {
            return p->status != TD_OK ? false : refuse(p, TD_ERR_UNSUPPORTED, "a subscript of several parts");
        }
    }
    if (!slice && part[0] == NULL)
        return refuse(p, TD_ERR_UNSUPPORTED, "an empty subscript");
    struct expr *s = new_expr(p, slice ? E_SLICE : E_ITEM, *e, part[0]);
    if (s == NULL)
        return false;
    s->c = part[1];
    s->d = part[2];
    *e = s;
    return next(p);
}

static bool parse_call(struct parser *p, struct expr **e)
{
    struct expr *call = new_expr(p, E_CALL, *e, NULL);
    if (call == NULL || !next(p) || !parse_args(p, ")", true, &call->args))
        return false;
    *e = call;
    return true;
}

static bool parse_postfix(struct parser *p, struct expr **e)
{
    for (;;) {
        if (at_op(p, ".")) {
            struct expr *attr = new_expr(p, E_ATTR, *e, NULL);
            if (attr == NULL || !next(p))
                return false;
            if (p->token.kind == T_INT) {     /* x.0 */
                attr->kind = E_ITEM;
                attr->b = value_expr(p, (struct value){.kind = INT, .u.i = p->token.i});
                if (attr->b == NULL || !next(p))
                    return false;
            } else if (!take_name(p, &attr->name)) {
                return false;
            }
            *e = attr;
        } else if (at_op(p, "[")) {
            if (!next(p) || !parse_subscript(p, e))
                return false;
        } else if (at_op(p, "(")) {
            if (!parse_call(p, e))
                return false;
        } else {
            return true;
        }
        if (++p->depth > 4 * MAX_DEPTH)     /* a.b.c...: deep as a tree */
            return refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    }
}

/* "| name(args)" and "is [not] name [arg]", both binding tighter than any operator */
static bool parse_filters(struct parser *p, struct expr **e)
{
    for (;;) {
        if (++p->depth > 4 * MAX_DEPTH)
            return refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
        if (at_op(p, "|")) {
            struct expr *f = new_expr(p, E_FILTER, *e, NULL);
            if (f == NULL || !next(p) || !take_name(p, &f->name))
                return false;
            if (at_op(p, "(") && (!next(p) || !parse_args(p, ")", true, &f->args)))
                return false;
            *e = f;
        } else if (at_name(p, "is")) {
            struct expr *t = new_expr(p, E_TEST, *e, NULL);
            if (t == NULL || !next(p))
                return false;
            bool negated = at_name(p, "not");
            if ((negated && !next(p)) || !take_name(p, &t->name))
                return false;
            bool word = p->token.kind == T_NAME && !at_name(p, "else") && !at_name(p, "or") && !at_name(p, "and") && !at_name(p, "if") &&
                        !at_name(p, "is");
            if (at_op(p, "(")) {
                if (!next(p) || !parse_args(p, ")", true, &t->args))
                    return false;
            } else if (word || p->token.kind == T_STRING || p->token.kind == T_INT || at_op(p, "[") || at_op(p, "{")) {
                struct arg *arg = parser_alloc(p, sizeof *arg);
                if (arg == NULL || !parse_primary(p, &arg->value) || !parse_postfix(p, &arg->value))
                    return false;
                t->args = arg;
            }
            *e = negated ? new_expr(p, E_NOT, t, NULL) : t;
            if (*e == NULL)
                return false;
        } else if (at_op(p, "(")) {
            if (!parse_call(p, e))
                return false;
        } else {
            return true;
        }
    }
}

static bool parse_unary(struct parser *p, bool with_filters, struct expr **ret)
{
    int depth = p->depth;
    if (++p->depth > 4 * MAX_DEPTH)
        return refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    if (at_op(p, "-")) {
        struct expr *inner;
        if (!next(p) || !parse_unary(p, false, &inner))
            return false;
        *ret = new_expr(p, E_NEG, inner, NULL);
        if (*ret == NULL)
            return false;
    } else if (at_op(p, "+")) {
        return refuse(p, TD_ERR_UNSUPPORTED, "a sign +");
    } else if (!parse_primary(p, ret)) {
        return false;
    }
    if (!parse_postfix(p, ret) || (with_filters && !parse_filters(p, ret)))
        return false;
    if (at_op(p, "**"))
        return refuse(p, TD_ERR_UNSUPPORTED, "the operator **");
    p->depth = depth;
    return true;
}

/* Binary operators by level, loosest first: + -, then ~, then * // % */
static bool parse_binary(struct parser *p, int level, struct expr **ret)
{
    static const struct { const char *text; int level; enum op op; } ops[] = {
        {"+", 0, OP_ADD}, {"-", 0, OP_SUB}, {"~", 1, OP_CONCAT}, {"*", 2, OP_MUL}, {"//", 2, OP_FLOOR}, {"%", 2, OP_MOD}};

    if (level == 3)
        return parse_unary(p, true, ret);
    int depth = p->depth;
    if (!parse_binary(p, level + 1, ret))
        return false;
    for (;;) {
        enum op op = OP_EQ;
        for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
            if (ops[i].level == level && at_op(p, ops[i].text))
                op = ops[i].op;
        if (at_op(p, "/"))
            return refuse(p, TD_ERR_UNSUPPORTED, "the operator /");
        if (op == OP_EQ)
            break;
        struct expr *e = new_expr(p, E_BINARY, *ret, NULL);
        if (e == NULL || !next(p) || !parse_binary(p, level + 1, &e->b))
            return false;
        e->op = op;
        *ret = e;
        if (++p->depth > 4 * MAX_DEPTH)     /* a + b + c ...: deep to the left */
            return refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    }
    p->depth = depth;
    return true;
}

static bool parse_compare(struct parser *p, struct expr **ret)
{
    static const struct { const char *text; enum op op; } ops[] = {{"==", OP_EQ}, {"!=", OP_NE}, {"<", OP_LT},
                                                                   {"<=", OP_LE}, {">", OP_GT},  {">=", OP_GE}};
    if (!parse_binary(p, 0, ret))
        return false;
    struct arg **last = NULL;
    for (;;) {
        int op = -1;
        for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
            if (at_op(p, ops[i].text))
                op = (int)ops[i].op;
        if (at_name(p, "in"))
            op = OP_IN;
        if (at_name(p, "not"))
            op = OP_NOT_IN;
        if (op < 0)
            return true;
        struct arg *arg = parser_alloc(p, sizeof *arg);
        if (arg == NULL || !next(p))
            return false;
        if (op == OP_NOT_IN) {
            if (!at_name(p, "in"))
                return refuse(p, TD_ERR_UNSUPPORTED, "\"not\" after a value without \"in\"");
            if (!next(p))
                return false;
        }
        if (last == NULL) {
            struct expr *e = new_expr(p, E_COMPARE, *ret, NULL);
            if (e == NULL)
                return false;
            *ret = e;
            last = &e->args;
        }
        arg->op = (enum op)op;
        if (!parse_binary(p, 0, &arg->value))
            return false;
        *last = arg;
        last = &arg->next;
    }
}

static bool parse_not(struct parser *p, struct expr **ret)
{
    if (!at_name(p, "not"))
        return parse_compare(p, ret);
    int depth = p->depth;
    if (++p->depth > 4 * MAX_DEPTH)
        return refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    struct expr *inner;
    if (!next(p) || !parse_not(p, &inner))
        return false;
    p->depth = depth;
    *ret = new_expr(p, E_NOT, inner, NULL);
    return *ret != NULL;
}

static bool parse_logic(struct parser *p, bool is_or, struct expr **ret)
{
    int depth = p->depth;
    if (!(is_or ? parse_logic(p, false, ret) : parse_not(p, ret)))
        return false;
    while (at_name(p, is_or ? "or" : "and")) {
        struct expr *e = new_expr(p, is_or ? E_OR : E_AND, *ret, NULL);
        if (e == NULL || !next(p) || !(is_or ? parse_logic(p, false, &e->b) : parse_not(p, &e->b)))
            return false;
        *ret = e;
        if (++p->depth > 4 * MAX_DEPTH)
            return refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    }
    p->depth = depth;
    return true;
}

static bool parse_or(struct parser *p, struct expr **ret)
{
    return parse_logic(p, true, ret);
}

static bool parse_expr(struct parser *p, struct expr **ret)
{
    int depth = p->depth;
    p->depth += 4;     /* a dozen C frames lie between two of these */
    if (p->depth > 4 * MAX_DEPTH)
        return refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    if (!parse_or(p, ret))
        return false;
    while (at_name(p, "if")) {
        struct expr *e = new_expr(p, E_COND, *ret, NULL);
        if (e == NULL || !next(p) || !parse_or(p, &e->b))
            return false;
        if (at_name(p, "else") && (!next(p) || !parse_expr(p, &e->c)))
            return false;
        *ret = e;
        if (++p->depth > 4 * MAX_DEPTH)
            return refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    }
    p->depth = depth;
    return true;
}

/* ---- statements --------------------------------------------------------------------------------------------------------------------------- */

static bool parse_nodes(struct parser *p, struct node **ret, struct str *ret_closing);

static struct node *new_node(struct parser *p, enum node_kind kind)
{
    struct node *n = parser_alloc(p, sizeof *n);
    if (n != NULL)
        *n = (struct node){.kind = kind, .line = p->line};
    return n;
}

/* Parses a body up to one of the closing words, whose tag stays open behind the word. */
static bool parse_body(struct parser *p, struct node **ret, struct str *ret_closing, const char *const *closing)
{
    int line = p->line;
    if (!expect_end(p) || !parse_nodes(p, ret, ret_closing))
        return false;
    for (; *closing != NULL; closing++)
        if (str_is(*ret_closing, *closing))
            return true;
    if (ret_closing->n == 0)
        return refuse(p, TD_ERR_UNSUPPORTED, "the block of line %d does not end", line);
    return refuse(p, TD_ERR_UNSUPPORTED, "\"%.*s\" inside the block of line %d", (int)(ret_closing->n < 40 ? ret_closing->n : 40),
                  ret_closing->p, line);
}

static bool parse_if(struct parser *p, struct node **ret)
{
    static const char *const closing[] = {"elif", "else", "endif", NULL};
    static const char *const last[] = {"endif", NULL};
    struct str word;
    struct node **at = ret;
    int depth = p->depth;

    do {     /* one N_IF per condition, each in the one before's `otherwise` */
        struct node *n = new_node(p, N_IF);
        if (n == NULL || !parse_expr(p, &n->e) || !parse_body(p, &n->body, &word, closing))
            return false;
        *at = n;
        at = &n->otherwise;
        if (str_is(word, "else") && !parse_body(p, &n->otherwise, &word, last))
            return false;
        if (++p->depth > 4 * MAX_DEPTH)
            return refuse(p, TD_ERR_LIMIT, "an \"if\" with too many branches");
    } while (str_is(word, "elif"));
    p->depth = depth;
    return expect_end(p);
}

static bool parse_targets(struct parser *p, struct target **ret)
{
    bool bracket = at_op(p, "(");
    if (bracket && !next(p))
        return false;
    for (;;) {
        struct target *t = parser_alloc(p, sizeof *t);
        if (t == NULL || !take_name(p, &t->name))
            return false;
        *ret = t;
        ret = &t->next;
        if (!at_op(p, ","))
            break;
        if (!next(p))
            return false;
    }
    return !bracket || expect_op(p, ")");
}

static bool parse_for(struct parser *p, struct node **ret)
{
    static const char *const closing[] = {"else", "endfor", NULL};
    static const char *const last[] = {"endfor", NULL};
    struct str word;
    struct node *n = *ret = new_node(p, N_FOR);

    if (n == NULL || !parse_targets(p, &n->targets))
        return false;
    if (!at_name(p, "in"))
        return refuse(p, TD_ERR_UNSUPPORTED, "\"for\" without \"in\"");
    if (!next(p) || !parse_or(p, &n->e))
        return false;
    if (at_name(p, "if") && (!next(p) || !parse_expr(p, &n->filter)))
        return false;
    p->loop_depth++;
    if (!parse_body(p, &n->body, &word, closing))
        return false;
    p->loop_depth--;
    if (str_is(word, "else") && !parse_body(p, &n->otherwise, &word, last))
        return false;
    return expect_end(p);
}

static bool parse_set(struct parser *p, struct node **ret)
{
    static const char *const last[] = {"endset", NULL};
    struct str word;
    struct node *n = *ret = new_node(p, N_SET);
    struct target *t = parser_alloc(p, sizeof *t);

    if (n == NULL || t == NULL || !take_name(p, &t->name))
        return false;
    n->targets = t;
    if (at_op(p, ".") && (!next(p) || !take_name(p, &n->text)))
        return false;
    if (at_op(p, "=")) {
        if (!next(p) || !parse_expr(p, &n->e))
            return false;
        return expect_end(p);
    }
    n->kind = N_SET_BLOCK;
    return parse_body(p, &n->body, &word, last) && expect_end(p);
}

static bool parse_macro(struct parser *p, struct node **ret)
{
    static const char *const last[] = {"endmacro", NULL};
    struct str word;
    struct node *n = *ret = new_node(p, N_MACRO);

    if (n == NULL || !take_name(p, &n->text) || !expect_op(p, "("))
        return false;
    struct target **at = &n->targets;
    while (!at_op(p, ")")) {
        struct target *t = parser_alloc(p, sizeof *t);
        if (t == NULL || !take_name(p, &t->name))
            return false;
        if (at_op(p, "=") && (!next(p) || !parse_expr(p, &t->fallback)))
            return false;
        *at = t;
        at = &t->next;
        if (!at_op(p, ")") && !expect_op(p, ","))
            return false;
    }
    if (!next(p))
        return false;
    int loop_depth = p->loop_depth;
    p->loop_depth = 0;
    if (!parse_body(p, &n->body, &word, last))
        return false;
    p->loop_depth = loop_depth;
    if (p->token.kind == T_NAME && !next(p))     /* endmacro may repeat the name */
        return false;
    return expect_end(p);
}

/* The statement after {%; *ret stays NULL when the word closes a block, which the caller of parse_nodes() judges. */
static bool parse_statement(struct parser *p, struct node **ret, struct str *ret_closing)
{
    static const char *const closers[] = {"elif", "else", "endif", "endfor", "endset", "endmacro", "endgeneration"};
    static const char *const end_generation[] = {"endgeneration", NULL};
    struct str word;

    *ret = NULL;
    if (!take_name(p, &word))
        return false;
    for (size_t i = 0; i < sizeof closers / sizeof *closers; i++) {
        if (str_is(word, closers[i])) {
            *ret_closing = word;
            return true;
        }
    }
    if (str_is(word, "if"))
        return parse_if(p, ret);
    if (str_is(word, "for"))
        return parse_for(p, ret);
    if (str_is(word, "set"))
        return parse_set(p, ret);
    if (str_is(word, "macro"))
        return parse_macro(p, ret);
    if (str_is(word, "generation")) {     /* transformers: marks the assistant's tokens, prints its body */
        *ret = new_node(p, N_GROUP);
        return *ret != NULL && parse_body(p, &(*ret)->body, &word, end_generation) && expect_end(p);
    }
    if (str_is(word, "break") || str_is(word, "continue")) {
        if (p->loop_depth == 0)
            return refuse(p, TD_ERR_UNSUPPORTED, "\"%.*s\" outside of a loop", (int)word.n, word.p);
        *ret = new_node(p, word.n == 5 ? N_BREAK : N_CONTINUE);
        return *ret != NULL && expect_end(p);
    }
    return refuse(p, TD_ERR_UNSUPPORTED, "the statement \"%.*s\"", (int)(word.n < 40 ? word.n : 40), word.p);
}

/* Text and tags until a closing word (in *ret_closing, its tag still open) or the end of the source (empty *ret_closing). */
static bool parse_nodes(struct parser *p, struct node **ret, struct str *ret_closing)
{
    struct node **last = ret;
    int depth = p->depth;

    p->depth += 4;
    if (p->depth > 4 * MAX_DEPTH)
        return refuse(p, TD_ERR_LIMIT, "blocks nest too deep");
    *ret_closing = (struct str){NULL, 0};
    while (p->at < p->n) {
        size_t start = p->at, end = start;
        while (end < p->n && !(p->src[end] == '{' && end + 1 < p->n && strchr("{%#", p->src[end + 1]) != NULL && p->src[end + 1] != 0))
            end++;
        char tag = end < p->n ? p->src[end + 1] : 0;
        size_t text_end = end, tag_at = end;
        bool eat = tag != 0 && starts(p, end + 2, "-"), keep = tag != 0 && tag != '{' && starts(p, end + 2, "+");
        if (eat) {
            while (text_end > start && is_space(p->src[text_end - 1]))
                text_end--;
        } else if (tag == '%' || tag == '#') {
            size_t line_start = end;
            while (line_start > start && p->src[line_start - 1] != '\n' && is_space(p->src[line_start - 1]))
                line_start--;
            bool whole_line = line_start == 0 || p->src[line_start - 1] == '\n';     /* at `start`, the tag before may have eaten it */
            if (whole_line && !keep)
                text_end = line_start;
        }
        if (text_end > start) {
            struct node *n = new_node(p, N_TEXT);
            if (n == NULL)
                return false;
            n->text = (struct str){p->src + start, text_end - start};
            *last = n;
            last = &n->next;
        }
        for (size_t i = start; i < end; i++)
            p->line += p->src[i] == '\n';
        p->at = end;
        if (tag == 0)
            break;
        p->at = tag_at + 2 + (eat || keep);
        if (tag == '#') {
            size_t close = p->at;
            while (close < p->n && !starts(p, close, "#}"))
                close++;
            if (close >= p->n)
                return refuse(p, TD_ERR_UNSUPPORTED, "a comment does not end");
            for (size_t i = p->at; i < close; i++)
                p->line += p->src[i] == '\n';
            char sign = close > p->at ? p->src[close - 1] : 0;
            p->at = close + 2;
            if (sign == '-') {
                while (p->at < p->n && is_space(p->src[p->at]))
                    p->line += p->src[p->at++] == '\n';
            } else if (sign != '+' && p->at < p->n && p->src[p->at] == '\n') {
                p->at++;
                p->line++;
            }
            continue;
        }
        p->in_block = tag == '%';
        p->brackets = 0;
        if (!next(p))
            return false;
        struct node *n = NULL;
        if (tag == '{') {
            n = new_node(p, N_PRINT);
            if (n == NULL || !parse_expr(p, &n->e) || !expect_end(p))
                return false;
        } else if (!parse_statement(p, &n, ret_closing)) {
            return false;
        } else if (n == NULL) {
            p->depth = depth;
            return true;
        }
        *last = n;
        last = &n->next;
    }
    p->depth = depth;
    return true;
}

td_status td_jinja_parse(const char *source, size_t n_bytes, struct td_jinja **ret_jinja, struct td_err *err)
{
    if (n_bytes > TD_JINJA_MAX_SOURCE)
        return td_fail(err, TD_ERR_LIMIT, "chat template: %zu bytes, must be <= %u", n_bytes, TD_JINJA_MAX_SOURCE);
    struct td_jinja *j = calloc(1, sizeof *j);
    if (j == NULL)
        return td_fail(err, TD_ERR_NOMEM, "chat template: no memory");
    j->arena.limit = (size_t)256 << 20;
    char *src = arena_alloc(&j->arena, n_bytes + 1);
    if (src == NULL) {
        td_jinja_free(j);
        return td_fail(err, TD_ERR_NOMEM, "chat template: no memory");
    }
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++) {     /* \r\n and \r count as \n */
        if (source[i] == '\r') {
            src[n++] = '\n';
            i += i + 1 < n_bytes && source[i + 1] == '\n';
        } else {
            src[n++] = source[i];
        }
    }
    if (n > 0 && src[n - 1] == '\n')
        n--;

    struct parser p = {.arena = &j->arena, .src = src, .n = n, .line = 1, .err = err};
    struct str closing;
    bool ok = parse_nodes(&p, &j->root, &closing);
    if (ok && closing.n > 0)
        ok = refuse(&p, TD_ERR_UNSUPPORTED, "\"%.*s\" closes no block", (int)closing.n, closing.p);
    if (!ok) {
        td_jinja_free(j);
        return p.status;
    }
    *ret_jinja = j;
    return TD_OK;
}

void td_jinja_free(struct td_jinja *jinja)
{
    if (jinja == NULL)
        return;
    arena_free(&jinja->arena);
    free(jinja);
}

/* ---- evaluation: context -------------------------------------------------------------------------------------------------------------------- */

struct var {
    struct var *next;
    struct str name;
    struct value value;
};

struct scope {
    struct scope *parent;
    struct var *vars;
};

struct text {     /* output being written; grows in the arena */
    char *p;
    size_t n, room;
};

enum flow { GO_ON, BREAK, CONTINUE };

struct ctx {
    struct arena arena;
    const struct td_jinja_input *input;
    struct scope *scope, *root;
    struct text *out;
    const struct text *final;       /* the rendering itself, where out may be a macro's or a block's */
    uint64_t steps_left;
    int macro_depth, line;
    enum flow flow;
    struct td_err *err;
    td_status status;
};

static bool fails(struct ctx *c, td_status code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static bool fails(struct ctx *c, td_status code, const char *fmt, ...)
{
    char what[300];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    c->status = td_fail(c->err, code, "chat template, line %d: %s", c->line, what);
    return false;
}

static bool step(struct ctx *c)
{
    return c->steps_left-- > 0 || fails(c, TD_ERR_LIMIT, "too many steps");
}

/* What allocates is bounded by the arena; what only looks at long values pays in steps. */
static void charge(struct ctx *c, struct value v)
{
    uint64_t cost = v.kind == STR ? v.u.s.n / 64 : v.kind == LIST ? v.u.list->n / 8 : 0;
    c->steps_left -= cost < c->steps_left ? cost : c->steps_left;
}

static void *ctx_alloc(struct ctx *c, size_t bytes)
{
    void *p = arena_alloc(&c->arena, bytes);
    if (p == NULL)
        fails(c, TD_ERR_LIMIT, "more than %zu bytes of text and values", c->arena.limit);
    return p;
}

static bool append(struct ctx *c, struct text *t, struct str s)
{
    size_t max = c->input->max_text_bytes;
    if (t == c->final && max > 0 && s.n > max - t->n)
        return fails(c, TD_ERR_LIMIT, "the prompt would have more than %zu bytes, the most that this model's context holds", max);
    if (s.n > t->room - t->n) {
        size_t room = 2 * t->room + s.n + 64;
        char *p = ctx_alloc(c, room);
        if (p == NULL)
            return false;
        if (t->n > 0)
            memcpy(p, t->p, t->n);
        t->p = p;
        t->room = room;
    }
    if (s.n > 0)
        memcpy(t->p + t->n, s.p, s.n);
    t->n += s.n;
    return true;
}

static struct value none_value(void)
{
    return (struct value){.kind = NONE};
}

static struct value bool_value(bool b)
{
    return (struct value){.kind = BOOL, .u.i = b};
}

static struct value int_value(int64_t i)
{
    return (struct value){.kind = INT, .u.i = i};
}

static struct value str_value(const char *p, size_t n)
{
    return (struct value){.kind = STR, .u.s = {p != NULL ? p : "", n}};     /* an empty text has no memory */
}

static struct value word_value(const char *word)
{
    return str_value(word, strlen(word));
}

static bool new_list(struct ctx *c, size_t n, struct value *ret)
{
    struct list *l = ctx_alloc(c, sizeof *l);
    if (l == NULL)
        return false;
    l->n = n;
    l->v = n > 0 ? ctx_alloc(c, n * sizeof *l->v) : NULL;
    *ret = (struct value){.kind = LIST, .u.list = l};
    return n == 0 || l->v != NULL;
}

static bool new_dict(struct ctx *c, enum kind kind, struct value *ret)
{
    struct dict *d = ctx_alloc(c, sizeof *d);
    *ret = (struct value){.kind = kind, .u.dict = d};
    return d != NULL;
}

/* A mapping's keys are kept as text; an integer as NUL, "i" and its digits. */
static bool to_key(struct ctx *c, struct value v, struct str *ret)
{
    if (v.kind == STR && (v.u.s.n == 0 || v.u.s.p[0] != 0)) {
        *ret = v.u.s;
        return true;
    }
    if (v.kind != INT && v.kind != BOOL)
        return fails(c, TD_ERR_UNSUPPORTED, "a mapping with a key that is neither text nor an integer");
    char *p = ctx_alloc(c, 24);
    if (p == NULL)
        return false;
    *ret = (struct str){p, 2 + (size_t)snprintf(p + 2, 22, "%lld", (long long)v.u.i)};
    p[1] = 'i';
    return true;
}

static struct value from_key(struct str key)
{
    return key.n > 2 && key.p[0] == 0 ? int_value(strtoll(key.p + 2, NULL, 10)) : str_value(key.p, key.n);
}

static struct value *dict_find(const struct dict *d, struct str key)
{
    for (size_t i = 0; i < d->n; i++)
        if (str_same(d->pair[i].key, key))
            return &d->pair[i].value;
    return NULL;
}

static bool dict_put(struct ctx *c, struct dict *d, struct str key, struct value v)
{
    struct value *old = dict_find(d, key);
    if (old != NULL) {
        *old = v;
        return true;
    }
    if (d->n == d->room) {
        size_t room = 2 * d->room + 4;
        struct pair *pair = ctx_alloc(c, room * sizeof *pair);
        if (pair == NULL)
            return false;
        if (d->n > 0)
            memcpy(pair, d->pair, d->n * sizeof *pair);
        d->pair = pair;
        d->room = room;
    }
    d->pair[d->n++] = (struct pair){key, v};
    return true;
}

static struct value *find_name(struct ctx *c, struct str name)
{
    uint64_t n_seen = 0;
    struct value *found = NULL;
    for (const struct scope *s = c->scope; s != NULL && found == NULL; s = s->parent)
        for (struct var *v = s->vars; v != NULL && found == NULL; v = v->next, n_seen++)
            found = str_same(v->name, name) ? &v->value : NULL;
    n_seen /= 32;
    c->steps_left -= n_seen < c->steps_left ? n_seen : c->steps_left;
    return found;
}

static bool bind(struct ctx *c, struct scope *s, struct str name, struct value value)
{
    for (struct var *v = s->vars; v != NULL; v = v->next) {
        if (str_same(v->name, name)) {
            v->value = value;
            return true;
        }
    }
    struct var *v = ctx_alloc(c, sizeof *v);
    if (v == NULL)
        return false;
    *v = (struct var){s->vars, name, value};
    s->vars = v;
    return true;
}

/* ---- evaluation: text as Python sees it ------------------------------------------------------------------------------------------------------ */

/* Bytes of the character at s.p[at]; a byte that begins no valid one counts alone. */
static size_t char_bytes(struct str s, size_t at)
{
    unsigned char c = (unsigned char)s.p[at];
    size_t n = c >= 0xf0 && c < 0xf8 ? 4 : c >= 0xe0 ? 3 : c >= 0xc2 ? 2 : 1;
    if (c >= 0xf8 || n > s.n - at)
        return 1;
    for (size_t i = 1; i < n; i++)
        if (((unsigned char)s.p[at + i] & 0xc0) != 0x80)
            return 1;
    return n;
}

static size_t char_count(struct str s)
{
    size_t n = 0;
    for (size_t at = 0; at < s.n; at += char_bytes(s, at))
        n++;
    return n;
}

/* Bytes of the character that ends before s.p[end]. */
static size_t char_bytes_before(struct str s, size_t end)
{
    for (size_t n = 2; n <= 4 && n <= end; n++)
        if (((unsigned char)s.p[end - n] & 0xc0) == 0xc0)
            return char_bytes((struct str){s.p, end}, end - n) == n ? n : 1;
    return 1;
}

/* str.isspace() */
static bool space_char(struct str s)
{
    static const char *const wide[] = {"\xc2\x85", "\xc2\xa0", "\xe1\x9a\x80", "\xe2\x80\xa8", "\xe2\x80\xa9", "\xe2\x80\xaf", "\xe2\x81\x9f",
                                       "\xe3\x80\x80"};
    if (s.n == 1)
        return is_space(s.p[0]);
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (str_is(s, wide[i]))
            return true;
    return s.n == 3 && memcmp(s.p, "\xe2\x80", 2) == 0 && (unsigned char)s.p[2] >= 0x80 && (unsigned char)s.p[2] <= 0x8a;
}

static bool contains(struct str s, struct str part)
{
    return part.n == 0 || memmem(s.p, s.n, part.p, part.n) != NULL;
}

/* strip(): white space, or the characters of *chars */
static struct str strip(struct str s, const struct str *chars, bool left, bool right)
{
    while (left && s.n > 0) {
        struct str ch = {s.p, char_bytes(s, 0)};
        if (!(chars != NULL ? contains(*chars, ch) : space_char(ch)))
            break;
        s.p += ch.n;
        s.n -= ch.n;
    }
    while (right && s.n > 0) {
        size_t n = char_bytes_before(s, s.n);
        struct str ch = {s.p + s.n - n, n};
        if (!(chars != NULL ? contains(*chars, ch) : space_char(ch)))
            break;
        s.n -= n;
    }
    return s;
}

void td_jinja_strip(const char **text, size_t *n_bytes)
{
    struct str s = strip((struct str){*text, *n_bytes}, NULL, true, true);
    *text = s.p;
    *n_bytes = s.n;
}

static bool truth(struct value v)
{
    switch (v.kind) {
    case UNDEFINED:
    case NONE: return false;
    case BOOL:
    case INT: return v.u.i != 0;
    case STR: return v.u.s.n > 0;
    case LIST: return v.lazy || v.u.list->n > 0;
    case DICT: return v.u.dict->n > 0;
    default: return true;
    }
}

/* str(v) */
static bool to_text(struct ctx *c, struct value v, struct str *ret)
{
    switch (v.kind) {
    case UNDEFINED: *ret = (struct str){"", 0}; return true;
    case NONE: *ret = (struct str){"None", 4}; return true;
    case BOOL: *ret = v.u.i ? (struct str){"True", 4} : (struct str){"False", 5}; return true;
    case STR: *ret = v.u.s; return true;
    case INT: {
        char *p = ctx_alloc(c, 24);
        if (p == NULL)
            return false;
        *ret = (struct str){p, (size_t)snprintf(p, 24, "%lld", (long long)v.u.i)};
        return true;
    }
    default: return fails(c, TD_ERR_UNSUPPORTED, "it writes a list, a mapping or an object as text");
    }
}

/* a == b; too deep or too long is c->status, which render looks at in the end */
static bool same(struct ctx *c, struct value a, struct value b, int depth)
{
    if (!step(c))
        return false;
    if (depth > MAX_DEPTH)
        return fails(c, TD_ERR_LIMIT, "it compares values that nest too deep");
    if ((a.kind == BOOL || a.kind == INT) && (b.kind == BOOL || b.kind == INT))
        return a.u.i == b.u.i;
    if (a.kind != b.kind)
        return false;
    switch (a.kind) {
    case UNDEFINED:
    case NONE: return true;
    case STR: return str_same(a.u.s, b.u.s);
    case LIST:
        if (a.u.list == b.u.list)
            return true;
        if (a.lazy || b.lazy || a.u.list->n != b.u.list->n)
            return false;
        for (size_t i = 0; i < a.u.list->n; i++)
            if (!same(c, a.u.list->v[i], b.u.list->v[i], depth + 1))
                return false;
        return true;
    case DICT:
        if (a.u.dict->n != b.u.dict->n)
            return false;
        for (size_t i = 0; i < a.u.dict->n; i++) {
            const struct value *other = dict_find(b.u.dict, a.u.dict->pair[i].key);
            if (other == NULL || !same(c, a.u.dict->pair[i].value, *other, depth + 1))
                return false;
        }
        return true;
    default: return a.u.dict == b.u.dict;
    }
}

static const char *kind_name(enum kind k)
{
    static const char *const names[] = {"undefined", "none", "a boolean", "an integer", "a string", "a list", "a mapping", "a namespace",
                                        "a loop", "a macro", "a function"};
    return names[k];
}

static bool is_in(struct ctx *c, struct value item, struct value in, bool *ret)
{
    *ret = false;
    if (in.kind == STR) {
        if (item.kind != STR)
            return fails(c, TD_ERR_UNSUPPORTED, "it looks for %s in a string", kind_name(item.kind));
        *ret = contains(in.u.s, item.u.s);
    } else if (in.kind == LIST) {
        for (size_t i = 0; i < in.u.list->n && !*ret; i++)
            *ret = same(c, in.u.list->v[i], item, 0);
    } else if (in.kind == DICT) {
        struct str key;
        if (!to_key(c, item, &key))
            return false;
        *ret = dict_find(in.u.dict, key) != NULL;
    } else if (in.kind != UNDEFINED) {
        return fails(c, TD_ERR_UNSUPPORTED, "it looks for something in %s", kind_name(in.kind));
    }
    return true;
}

/* ---- evaluation: arguments, tests, filters, methods, functions -------------------------------------------------------------------------------- */

static bool eval(struct ctx *c, const struct expr *e, struct value *ret);
static bool run_nodes(struct ctx *c, const struct node *n);
static bool compare(struct ctx *c, enum op op, struct value a, struct value b, bool *ret);

struct args {
    int n, n_named;
    struct value v[MAX_ARGS];          /* positional first, then named */
    struct str name[MAX_ARGS];         /* empty: positional */
};

static bool eval_args(struct ctx *c, const struct arg *list, struct args *ret)
{
    ret->n = ret->n_named = 0;
    for (const struct arg *a = list; a != NULL; a = a->next) {
        int at = ret->n + ret->n_named;
        if (at == MAX_ARGS)
            return fails(c, TD_ERR_UNSUPPORTED, "a call with more than %d arguments", MAX_ARGS);
        if (a->name.n == 0 && ret->n_named > 0)
            return fails(c, TD_ERR_UNSUPPORTED, "an argument without a name after one with a name");
        if (!eval(c, a->value, &ret->v[at]))
            return false;
        ret->name[at] = a->name;
        *(a->name.n == 0 ? &ret->n : &ret->n_named) += 1;
    }
    return true;
}

/* The argument at `position` or called `name` (may be NULL); NULL when it is not given. */
static const struct value *get_arg(const struct args *a, int position, const char *name)
{
    if (position < a->n)
        return &a->v[position];
    for (int i = a->n; name != NULL && i < a->n + a->n_named; i++)
        if (str_is(a->name[i], name))
            return &a->v[i];
    return NULL;
}

/* At most n_max arguments, and of the named ones only n1 and n2: what is not understood must not be ignored. */
static bool only_args(struct ctx *c, const struct args *a, int n_max, const char *n1, const char *n2, const char *what)
{
    if (a->n + a->n_named > n_max)
        return fails(c, TD_ERR_UNSUPPORTED, "%s with %d arguments", what, a->n + a->n_named);
    for (int i = a->n; i < a->n + a->n_named; i++)
        if (!(n1 != NULL && str_is(a->name[i], n1)) && !(n2 != NULL && str_is(a->name[i], n2)))
            return fails(c, TD_ERR_UNSUPPORTED, "%s with the argument %.*s", what, (int)(a->name[i].n < 40 ? a->name[i].n : 40), a->name[i].p);
    return true;
}

static bool run_test(struct ctx *c, struct str name, struct value v, const struct args *a, bool *ret)
{
    static const char *const two[] = {"equalto", "eq", "ne", "in"};
    bool binary = false;

    charge(c, v);
    for (size_t i = 0; i < sizeof two / sizeof *two; i++)
        binary |= str_is(name, two[i]);
    if (a->n_named > 0 || a->n != binary)
        return fails(c, TD_ERR_UNSUPPORTED, "the test \"%.*s\" with %d arguments", (int)(name.n < 40 ? name.n : 40), name.p, a->n + a->n_named);

    if (str_is(name, "defined"))
        *ret = v.kind != UNDEFINED;
    else if (str_is(name, "undefined"))
        *ret = v.kind == UNDEFINED;
    else if (str_is(name, "none"))
        *ret = v.kind == NONE;
    else if (str_is(name, "string"))
        *ret = v.kind == STR;
    else if (str_is(name, "mapping"))
        *ret = v.kind == DICT;
    else if (str_is(name, "sequence"))     /* has a length and items by index: strings and mappings too */
        *ret = v.kind == STR || v.kind == DICT || (v.kind == LIST && !v.lazy) || v.kind == UNDEFINED;
    else if (str_is(name, "iterable"))
        *ret = v.kind == STR || v.kind == DICT || v.kind == LIST || v.kind == UNDEFINED || v.kind == LOOP;
    else if (str_is(name, "number"))
        *ret = v.kind == INT || v.kind == BOOL;
    else if (str_is(name, "integer"))
        *ret = v.kind == INT;
    else if (str_is(name, "boolean"))
        *ret = v.kind == BOOL;
    else if (str_is(name, "true"))
        *ret = v.kind == BOOL && v.u.i;
    else if (str_is(name, "false"))
        *ret = v.kind == BOOL && !v.u.i;
    else if (str_is(name, "odd") && v.kind == INT)
        *ret = v.u.i % 2 != 0;
    else if (str_is(name, "even") && v.kind == INT)
        *ret = v.u.i % 2 == 0;
    else if (str_is(name, "equalto") || str_is(name, "eq"))
        *ret = same(c, v, a->v[0], 0);
    else if (str_is(name, "ne"))
        *ret = !same(c, v, a->v[0], 0);
    else if (str_is(name, "in"))
        return is_in(c, v, a->v[0], ret);
    else
        return fails(c, TD_ERR_UNSUPPORTED, "the test \"%.*s\" of %s", (int)(name.n < 40 ? name.n : 40), name.p, kind_name(v.kind));
    return true;
}

/* Upper, lower or title case; beyond ASCII letters change in ways that are not known here. */
static bool change_case(struct ctx *c, struct str s, char how, struct value *ret)
{
    char *p = ctx_alloc(c, s.n + 1);
    if (p == NULL)
        return false;
    bool inside = false;
    for (size_t i = 0; i < s.n; i++) {
        char ch = s.p[i];
        if ((unsigned char)ch >= 0x80)
            return fails(c, TD_ERR_UNSUPPORTED, "it changes the case of text that is not ASCII");
        bool lower = ch >= 'a' && ch <= 'z', upper = ch >= 'A' && ch <= 'Z';
        bool to_upper = how == 'u' || (how == 't' && !inside) || (how == 'c' && i == 0);
        p[i] = (char)(lower && to_upper ? ch - 32 : upper && !to_upper ? ch + 32 : ch);
        inside = lower || upper;
    }
    *ret = str_value(p, s.n);
    return true;
}

static bool replace(struct ctx *c, struct str s, struct str from, struct str to, struct value *ret)
{
    struct text t = {0};
    if (from.n == 0)
        return fails(c, TD_ERR_UNSUPPORTED, "it replaces the empty string");
    size_t at = 0;
    while (at < s.n) {
        const char *hit = memmem(s.p + at, s.n - at, from.p, from.n);
        size_t end = hit == NULL ? s.n : (size_t)(hit - s.p);
        if (!append(c, &t, (struct str){s.p + at, end - at}) || (hit != NULL && !append(c, &t, to)))
            return false;
        at = hit == NULL ? s.n : end + from.n;
    }
    *ret = str_value(t.p, t.n);
    return true;
}

static bool split(struct ctx *c, struct str s, const struct str *sep, int64_t max, struct value *ret)
{
    size_t n = 0;
    for (int pass = 0; pass < 2; pass++) {     /* count, then fill */
        size_t at = 0, k = 0;
        if (pass == 1 && !new_list(c, n, ret))
            return false;
        for (;;) {
            if (sep == NULL) {
                struct str rest = strip((struct str){s.p + at, s.n - at}, NULL, true, false);
                at = s.n - rest.n;
                if (at == s.n)
                    break;
            }
            size_t end = at, skip = 0;
            if (max >= 0 && k >= (size_t)max) {
                struct str rest = {s.p + at, s.n - at};
                end = at + (sep == NULL ? strip(rest, NULL, false, true).n : rest.n);
                skip = s.n - end;
            } else if (sep != NULL) {
                const char *hit = memmem(s.p + at, s.n - at, sep->p, sep->n);
                end = hit == NULL ? s.n : (size_t)(hit - s.p);
                skip = hit == NULL ? 0 : sep->n;
            } else {
                while (end < s.n && !space_char((struct str){s.p + end, char_bytes(s, end)}))
                    end += char_bytes(s, end);
            }
            if (pass == 1)
                ret->u.list->v[k] = str_value(s.p + at, end - at);
            k++;
            bool more = sep == NULL ? end < s.n : skip == sep->n && end + skip <= s.n && !(max >= 0 && k > (size_t)max);
            at = end + skip;
            if (!more)
                break;
        }
        n = k;
    }
    return true;
}

static bool json_text(struct ctx *c, struct value v, struct text *t, int depth)
{
    struct str s;
    if (depth > MAX_DEPTH)
        return fails(c, TD_ERR_LIMIT, "tojson of values that nest too deep");
    switch (v.kind) {
    case NONE: return append(c, t, (struct str){"null", 4});
    case BOOL: return append(c, t, v.u.i ? (struct str){"true", 4} : (struct str){"false", 5});
    case INT: return to_text(c, v, &s) && append(c, t, s);
    case STR: {
        if (!append(c, t, (struct str){"\"", 1}))
            return false;
        for (size_t i = 0; i < v.u.s.n; i++) {
            unsigned char ch = (unsigned char)v.u.s.p[i];
            static const char plain[] = "\"\"\\\\\nn\tt\rr\bb\ff";
            char out[8];
            int n = 0;
            for (const char *k = plain; *k != 0; k += 2)
                if ((unsigned char)*k == ch)
                    n = snprintf(out, sizeof out, "\\%c", k[1]);
            if (n == 0)
                n = ch < 0x20 ? snprintf(out, sizeof out, "\\u%04x", ch) : snprintf(out, sizeof out, "%c", ch);
            if (!append(c, t, (struct str){out, (size_t)n}))
                return false;
        }
        return append(c, t, (struct str){"\"", 1});
    }
    case LIST:
        if (v.lazy)
            return fails(c, TD_ERR_UNSUPPORTED, "tojson of an iterator");
        for (size_t i = 0; i < v.u.list->n; i++)
            if (!append(c, t, i == 0 ? (struct str){"[", 1} : (struct str){", ", 2}) || !json_text(c, v.u.list->v[i], t, depth + 1))
                return false;
        return append(c, t, v.u.list->n == 0 ? (struct str){"[]", 2} : (struct str){"]", 1});
    case DICT:
        for (size_t i = 0; i < v.u.dict->n; i++) {
            const struct pair *pair = &v.u.dict->pair[i];
            if (!append(c, t, i == 0 ? (struct str){"{", 1} : (struct str){", ", 2}) ||
                (from_key(pair->key).kind != STR && !fails(c, TD_ERR_UNSUPPORTED, "tojson of a mapping with integers as keys")) ||
                !json_text(c, from_key(pair->key), t, depth + 1) || !append(c, t, (struct str){": ", 2}) ||
                !json_text(c, pair->value, t, depth + 1))
                return false;
        }
        return append(c, t, v.u.dict->n == 0 ? (struct str){"{}", 2} : (struct str){"}", 1});
    default: return fails(c, TD_ERR_UNSUPPORTED, "tojson of %s", kind_name(v.kind));
    }
}

/* What "for" walks over. */
static bool to_items(struct ctx *c, struct value v, struct value *ret)
{
    if (v.kind == LIST) {
        *ret = v;
        return true;
    }
    if (v.kind == UNDEFINED)
        return new_list(c, 0, ret);
    if (v.kind == DICT) {
        if (!new_list(c, v.u.dict->n, ret))
            return false;
        for (size_t i = 0; i < v.u.dict->n; i++)
            ret->u.list->v[i] = from_key(v.u.dict->pair[i].key);
        return true;
    }
    if (v.kind == STR) {
        size_t at = 0;
        if (!new_list(c, char_count(v.u.s), ret))
            return false;
        for (size_t i = 0; i < ret->u.list->n; i++) {
            size_t n = char_bytes(v.u.s, at);
            ret->u.list->v[i] = str_value(v.u.s.p + at, n);
            at += n;
        }
        return true;
    }
    return fails(c, TD_ERR_UNSUPPORTED, "it iterates over %s", kind_name(v.kind));
}

/* which: 'k' keys, 'v' values, 'i' pairs */
static bool dict_list(struct ctx *c, const struct dict *d, char which, struct value *ret)
{
    if (!new_list(c, d->n, ret))
        return false;
    for (size_t i = 0; i < d->n; i++) {
        struct value key = from_key(d->pair[i].key);
        struct value *out = &ret->u.list->v[i];
        if (which == 'i') {
            if (!new_list(c, 2, out))
                return false;
            out->u.list->v[0] = key;
            out->u.list->v[1] = d->pair[i].value;
        } else {
            *out = which == 'k' ? key : d->pair[i].value;
        }
    }
    return true;
}

static bool get_item(struct ctx *c, struct value obj, struct value index, struct value *ret)
{
    *ret = (struct value){.kind = UNDEFINED};
    charge(c, obj);
    if (obj.kind == UNDEFINED)
        return fails(c, TD_ERR_UNSUPPORTED, "it looks into something undefined");
    if (obj.kind == DICT) {
        struct str key;
        if (!to_key(c, index, &key))
            return false;
        const struct value *v = dict_find(obj.u.dict, key);
        if (v != NULL)
            *ret = *v;
        return true;
    }
    if ((obj.kind == LIST || obj.kind == STR) && (index.kind == INT || index.kind == BOOL)) {
        if (obj.lazy)
            return fails(c, TD_ERR_UNSUPPORTED, "it takes an item of an iterator");
        int64_t n = obj.kind == LIST ? (int64_t)obj.u.list->n : (int64_t)char_count(obj.u.s), i = index.u.i < 0 ? index.u.i + n : index.u.i;
        if (i < 0 || i >= n)
            return true;
        if (obj.kind == LIST) {
            *ret = obj.u.list->v[i];
            return true;
        }
        size_t at = 0;
        while (i-- > 0)
            at += char_bytes(obj.u.s, at);
        *ret = str_value(obj.u.s.p + at, char_bytes(obj.u.s, at));
        return true;
    }
    return fails(c, TD_ERR_UNSUPPORTED, "it takes an item of %s by %s", kind_name(obj.kind), kind_name(index.kind));
}

static bool get_attr(struct ctx *c, struct value obj, struct str name, struct value *ret)
{
    *ret = (struct value){.kind = UNDEFINED};
    switch (obj.kind) {
    case DICT: {
        static const char *const methods[] = {"items", "keys", "values", "get", "copy", "pop", "update", "clear", "popitem", "setdefault"};
        for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
            if (str_is(name, methods[i]))
                return fails(c, TD_ERR_UNSUPPORTED, "it takes the method %s of a mapping without a call", methods[i]);
    }
        /* fallthrough */
    case SPACE: {
        const struct value *v = dict_find(obj.u.dict, name);
        if (v != NULL)
            *ret = *v;
        return true;
    }
    case LOOP: {
        size_t at = obj.u.loop->at, n = obj.u.loop->items->n;
        const struct value *v = obj.u.loop->items->v;
        if (str_is(name, "index"))
            *ret = int_value((int64_t)at + 1);
        else if (str_is(name, "index0"))
            *ret = int_value((int64_t)at);
        else if (str_is(name, "revindex"))
            *ret = int_value((int64_t)(n - at));
        else if (str_is(name, "revindex0"))
            *ret = int_value((int64_t)(n - at) - 1);
        else if (str_is(name, "first"))
            *ret = bool_value(at == 0);
        else if (str_is(name, "last"))
            *ret = bool_value(at + 1 == n);
        else if (str_is(name, "length"))
            *ret = int_value((int64_t)n);
        else if (str_is(name, "previtem"))
            *ret = at > 0 ? v[at - 1] : *ret;
        else if (str_is(name, "nextitem"))
            *ret = at + 1 < n ? v[at + 1] : *ret;
        else
            return fails(c, TD_ERR_UNSUPPORTED, "loop.%.*s", (int)(name.n < 40 ? name.n : 40), name.p);
        return true;
    }
    case STR:
    case LIST: {
        /* the methods of Python's str and list; what is none of them is undefined */
        static const char methods[] = " append clear copy count extend index insert pop remove reverse sort capitalize casefold center encode "
                                      "endswith expandtabs find format format_map isalnum isalpha isascii isdecimal isdigit isidentifier islower "
                                      "isnumeric isprintable isspace istitle isupper join ljust lower lstrip maketrans partition removeprefix "
                                      "removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip "
                                      "swapcase title translate upper zfill ";
        const char *hit = memmem(methods, sizeof methods - 1, name.p, name.n);
        if (name.p[0] == '_' || obj.lazy || (hit != NULL && hit[-1] == ' ' && hit[name.n] == ' '))
            return fails(c, TD_ERR_UNSUPPORTED, "it takes the method %.*s without a call", (int)(name.n < 40 ? name.n : 40), name.p);
        return true;
    }
    case NONE:
    case BOOL:
    case INT: return true;
    case UNDEFINED: return fails(c, TD_ERR_UNSUPPORTED, "it takes .%.*s of something undefined", (int)(name.n < 40 ? name.n : 40), name.p);
    default: return fails(c, TD_ERR_UNSUPPORTED, "it takes .%.*s of %s", (int)(name.n < 40 ? name.n : 40), name.p, kind_name(obj.kind));
    }
}

/* select, reject, selectattr, rejectattr, map(attribute=...) */
static bool filter_items(struct ctx *c, struct str name, struct value v, const struct args *a, struct value *ret)
{
    bool by_attr = str_is(name, "selectattr") || str_is(name, "rejectattr"), map = str_is(name, "map");
    bool keep_if = str_is(name, "select") || str_is(name, "selectattr");
    struct value items;
    const struct value *attr = map ? get_arg(a, MAX_ARGS, "attribute") : by_attr ? get_arg(a, 0, NULL) : NULL;

    if (!truth(v)) {     /* Jinja does not look into it: none is fine */
        if (!new_list(c, 0, ret))
            return false;
        ret->lazy = true;
        return true;
    }
    if (!to_items(c, v, &items))
        return false;
    if (((map || by_attr) && (attr == NULL || attr->kind != STR || memchr(attr->u.s.p, '.', attr->u.s.n) != NULL)) || a->n_named != map ||
        (map && a->n != 0))
        return fails(c, TD_ERR_UNSUPPORTED, "the filter \"%.*s\" with these arguments", (int)name.n, name.p);
    struct args rest = {0};
    const struct value *test = get_arg(a, by_attr, NULL);
    if (test != NULL && test->kind != STR)
        return fails(c, TD_ERR_UNSUPPORTED, "the filter \"%.*s\" with a test that is no string", (int)name.n, name.p);
    for (int i = by_attr + 1; i < a->n; i++)
        rest.v[rest.n++] = a->v[i];

    if (!new_list(c, items.u.list->n, ret))
        return false;
    size_t n = 0;
    for (size_t i = 0; i < items.u.list->n; i++) {
        struct value item = items.u.list->v[i], subject = item;
        bool pass;
        if (!step(c))
            return false;
        if (attr != NULL && !(item.kind == DICT ? get_item(c, item, *attr, &subject) : get_attr(c, item, attr->u.s, &subject)))
            return false;
        if (map) {
            ret->u.list->v[n++] = subject;
            continue;
        }
        pass = truth(subject);
        if (test != NULL && !run_test(c, test->u.s, subject, &rest, &pass))
            return false;
        if (pass == keep_if)
            ret->u.list->v[n++] = item;
    }
    ret->u.list->n = n;
    ret->lazy = true;
    return true;
}

/* dictsort: by key, letters without case */
static bool sort_pairs(struct ctx *c, struct list *pairs)
{
    for (size_t i = 0; i < pairs->n; i++) {
        struct value pair = pairs->v[i], key = pair.u.list->v[0];
        size_t at = i;
        if (key.kind == STR && !change_case(c, key.u.s, 'l', &key))
            return false;
        for (; at > 0; at--) {
            struct value other = pairs->v[at - 1].u.list->v[0];
            bool less = false;
            if (!step(c) || (other.kind == STR && !change_case(c, other.u.s, 'l', &other)) || !compare(c, OP_LT, key, other, &less))
                return false;
            if (!less)
                break;
            pairs->v[at] = pairs->v[at - 1];
        }
        pairs->v[at] = pair;
    }
    return true;
}

static bool run_filter(struct ctx *c, struct str name, struct value v, const struct args *a, struct value *ret)
{
    struct str s, other;
    const struct value *x;

    charge(c, v);
    if (str_is(name, "default") || str_is(name, "d")) {
        x = get_arg(a, 1, "boolean");
        bool use = v.kind == UNDEFINED || (x != NULL && truth(*x) && !truth(v));
        x = get_arg(a, 0, "default_value");
        *ret = !use ? v : x != NULL ? *x : str_value("", 0);
        return only_args(c, a, 2, "default_value", "boolean", "default");
    }
    if (str_is(name, "tojson")) {
        struct text t = {0};
        if (!only_args(c, a, 0, NULL, NULL, "tojson") || !json_text(c, v, &t, 0))
            return false;
        *ret = str_value(t.p, t.n);
        return true;
    }
    if (str_is(name, "join")) {
        struct text t = {0};
        struct value items;
        x = get_arg(a, 0, "d");
        if (!only_args(c, a, 1, "d", NULL, "join") || !to_items(c, v, &items) || !to_text(c, x != NULL ? *x : str_value("", 0), &other))
            return false;
        for (size_t i = 0; i < items.u.list->n; i++)
            if (!step(c) || (i > 0 && !append(c, &t, other)) || !to_text(c, items.u.list->v[i], &s) || !append(c, &t, s))
                return false;
        *ret = str_value(t.p, t.n);
        return true;
    }
    if (str_is(name, "select") || str_is(name, "reject") || str_is(name, "selectattr") || str_is(name, "rejectattr") || str_is(name, "map"))
        return filter_items(c, name, v, a, ret);
    if (str_is(name, "replace")) {
        if (!only_args(c, a, 2, NULL, NULL, "replace") || a->n != 2 || a->v[0].kind != STR || a->v[1].kind != STR)
            return c->status != TD_OK ? false : fails(c, TD_ERR_UNSUPPORTED, "replace of something else than two strings");
        return to_text(c, v, &s) && replace(c, s, a->v[0].u.s, a->v[1].u.s, ret);
    }
    if (str_is(name, "trim")) {
        x = get_arg(a, 0, "chars");
        if (!only_args(c, a, 1, "chars", NULL, "trim") || !to_text(c, v, &s))
            return false;
        if (x != NULL && x->kind != STR && x->kind != NONE)
            return fails(c, TD_ERR_UNSUPPORTED, "trim of %s", kind_name(x->kind));
        s = strip(s, x != NULL && x->kind == STR ? &x->u.s : NULL, true, true);
        *ret = str_value(s.p, s.n);
        return true;
    }

    /* the rest takes no arguments */
    static const struct { const char *name, *how; } cases[] = {{"upper", "u"}, {"lower", "l"}, {"capitalize", "c"}};
    bool known = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (str_is(name, cases[i].name))
            return only_args(c, a, 0, NULL, NULL, cases[i].name) && to_text(c, v, &s) && change_case(c, s, cases[i].how[0], ret);
    if (str_is(name, "string") || str_is(name, "safe")) {
        if (!to_text(c, v, &s))
            return false;
        *ret = str_value(s.p, s.n);
    } else if (str_is(name, "length") || str_is(name, "count")) {
        if (v.kind == STR)
            *ret = int_value((int64_t)char_count(v.u.s));
        else if (v.kind == LIST && !v.lazy)
            *ret = int_value((int64_t)v.u.list->n);
        else if (v.kind == DICT)
            *ret = int_value((int64_t)v.u.dict->n);
        else if (v.kind == UNDEFINED)
            *ret = int_value(0);
        else
            return fails(c, TD_ERR_UNSUPPORTED, "the length of %s", v.lazy ? "an iterator" : kind_name(v.kind));
    } else if (str_is(name, "first") || str_is(name, "last")) {
        struct value items;
        if (!to_items(c, v, &items))
            return false;
        if (v.lazy && name.p[0] == 'l')
            return fails(c, TD_ERR_UNSUPPORTED, "the last of an iterator");
        size_t n = items.u.list->n;
        *ret = n == 0 ? (struct value){.kind = UNDEFINED} : items.u.list->v[name.p[0] == 'f' ? 0 : n - 1];
    } else if (str_is(name, "list")) {
        if (!to_items(c, v, ret))
            return false;
        ret->lazy = false;
    } else if (str_is(name, "reverse") && v.kind == LIST && !v.lazy) {
        if (!new_list(c, v.u.list->n, ret))
            return false;
        for (size_t i = 0; i < v.u.list->n; i++)
            ret->u.list->v[i] = v.u.list->v[v.u.list->n - 1 - i];
        ret->lazy = true;
    } else if (str_is(name, "items") && (v.kind == DICT || v.kind == UNDEFINED)) {
        if (!(v.kind == DICT ? dict_list(c, v.u.dict, 'i', ret) : new_list(c, 0, ret)))
            return false;
        ret->lazy = true;
    } else if (str_is(name, "dictsort") && v.kind == DICT) {
        return only_args(c, a, 0, NULL, NULL, "dictsort") && dict_list(c, v.u.dict, 'i', ret) && sort_pairs(c, ret->u.list);
    } else if (str_is(name, "int") && v.kind == INT) {
        *ret = v;
    } else {
        known = false;
    }
    if (!known)
        return fails(c, TD_ERR_UNSUPPORTED, "the filter \"%.*s\" of %s", (int)(name.n < 40 ? name.n : 40), name.p, kind_name(v.kind));
    return only_args(c, a, 0, NULL, NULL, "a filter");
}

static bool str_method(struct ctx *c, struct str s, struct str name, const struct args *a, struct value *ret)
{
    const struct value *x = get_arg(a, 0, NULL);
    const struct str *arg = x != NULL && x->kind == STR ? &x->u.s : NULL;

    charge(c, str_value(s.p, s.n));
    if (a->n_named > 0)
        return fails(c, TD_ERR_UNSUPPORTED, "a string's method with a named argument");
    bool l = str_is(name, "lstrip"), r = str_is(name, "rstrip");
    if ((l || r || str_is(name, "strip")) && a->n <= 1 && (x == NULL || arg != NULL || x->kind == NONE)) {
        s = strip(s, arg, !r, !l);
        *ret = str_value(s.p, s.n);
        return true;
    }
    if ((str_is(name, "startswith") || str_is(name, "endswith")) && a->n == 1 && arg != NULL) {
        bool fits = s.n >= arg->n;
        *ret = bool_value(fits && (arg->n == 0 || memcmp(name.p[0] == 's' ? s.p : s.p + s.n - arg->n, arg->p, arg->n) == 0));
        return true;
    }
    if (str_is(name, "split") && a->n <= 2 && (x == NULL || x->kind == NONE || (arg != NULL && arg->n > 0)) &&
        (a->n < 2 || a->v[1].kind == INT))
        return split(c, s, arg, a->n == 2 ? a->v[1].u.i : -1, ret);
    if (str_is(name, "replace") && a->n == 2 && arg != NULL && a->v[1].kind == STR)
        return replace(c, s, *arg, a->v[1].u.s, ret);
    if (str_is(name, "join") && a->n == 1) {
        struct args sep = {.n = 1, .v = {str_value(s.p, s.n)}};
        struct value items;
        if (!to_items(c, *x, &items))
            return false;
        for (size_t i = 0; i < items.u.list->n; i++)
            if (items.u.list->v[i].kind != STR)
                return fails(c, TD_ERR_UNSUPPORTED, "it joins %s", kind_name(items.u.list->v[i].kind));
        return run_filter(c, (struct str){"join", 4}, items, &sep, ret);
    }
    static const struct { const char *name, *how; } cases[] = {{"upper", "u"}, {"lower", "l"}, {"capitalize", "c"}, {"title", "t"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (str_is(name, cases[i].name) && a->n == 0)
            return change_case(c, s, cases[i].how[0], ret);
    return fails(c, TD_ERR_UNSUPPORTED, "a string's method %.*s with %d arguments", (int)(name.n < 40 ? name.n : 40), name.p, a->n);
}

static bool dict_method(struct ctx *c, const struct dict *d, struct str name, const struct args *a, struct value *ret)
{
    static const char *const lists[] = {"keys", "values", "items"};
    for (size_t i = 0; i < 3; i++)
        if (str_is(name, lists[i]) && a->n + a->n_named == 0)
            return dict_list(c, d, lists[i][0], ret);
    struct str key;
    if (str_is(name, "get") && a->n_named == 0 && (a->n == 1 || a->n == 2)) {
        if (!to_key(c, a->v[0], &key))
            return false;
        const struct value *v = dict_find(d, key);
        *ret = v != NULL ? *v : a->n == 2 ? a->v[1] : none_value();
        return true;
    }
    return fails(c, TD_ERR_UNSUPPORTED, "a mapping's method %.*s with %d arguments", (int)(name.n < 40 ? name.n : 40), name.p,
                 a->n + a->n_named);
}

static const char *const functions[] = {"raise_exception", "strftime_now", "namespace", "range", "dict"};
enum { F_RAISE, F_STRFTIME, F_NAMESPACE, F_RANGE, F_DICT };

/* The C locale's names, whatever the process's locale is. */
static bool format_time(struct ctx *c, struct str fmt, struct value *ret)
{
    static const char *const months[] = {"January", "February", "March",     "April",   "May",      "June",
                                         "July",    "August",   "September", "October", "November", "December"};
    static const char *const days[] = {"Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"};
    struct text t = {0};
    time_t now = (time_t)c->input->now_unix_s;
    struct tm tm;

    if (gmtime_r(&now, &tm) == NULL)
        return fails(c, TD_ERR_UNSUPPORTED, "the date is out of range");
    for (size_t i = 0; i < fmt.n; i++) {
        char out[32] = {fmt.p[i], 0};
        int n = 1;
        if (fmt.p[i] == '%') {
            switch (++i < fmt.n ? fmt.p[i] : 0) {
            case 'd': n = snprintf(out, sizeof out, "%02d", tm.tm_mday); break;
            case 'm': n = snprintf(out, sizeof out, "%02d", tm.tm_mon + 1); break;
            case 'Y': n = snprintf(out, sizeof out, "%d", tm.tm_year + 1900); break;
            case 'y': n = snprintf(out, sizeof out, "%02d", tm.tm_year % 100); break;
            case 'H': n = snprintf(out, sizeof out, "%02d", tm.tm_hour); break;
            case 'M': n = snprintf(out, sizeof out, "%02d", tm.tm_min); break;
            case 'S': n = snprintf(out, sizeof out, "%02d", tm.tm_sec); break;
            case 'b': n = snprintf(out, sizeof out, "%.3s", months[tm.tm_mon]); break;
            case 'B': n = snprintf(out, sizeof out, "%s", months[tm.tm_mon]); break;
            case 'a': n = snprintf(out, sizeof out, "%.3s", days[tm.tm_wday]); break;
            case 'A': n = snprintf(out, sizeof out, "%s", days[tm.tm_wday]); break;
            case '%': break;
            default: return fails(c, TD_ERR_UNSUPPORTED, "strftime_now with this format");
            }
        }
        if (!append(c, &t, (struct str){out, (size_t)n}))
            return false;
    }
    *ret = str_value(t.p, t.n);
    return true;
}

static bool call_function(struct ctx *c, int64_t which, const struct args *a, struct value *ret)
{
    struct str s;
    switch (which) {
    case F_RAISE:
        if (a->n != 1 || a->n_named != 0 || !to_text(c, a->v[0], &s))
            return c->status != TD_OK ? false : fails(c, TD_ERR_UNSUPPORTED, "raise_exception with %d arguments", a->n);
        return fails(c, TD_ERR_INVALID, "%.*s", (int)(s.n < 250 ? s.n : 250), s.p);
    case F_STRFTIME:
        if (a->n != 1 || a->n_named != 0 || a->v[0].kind != STR)
            return fails(c, TD_ERR_UNSUPPORTED, "strftime_now with something else than one string");
        return format_time(c, a->v[0].u.s, ret);
    case F_NAMESPACE:
    case F_DICT:
        if (a->n != 0)
            return fails(c, TD_ERR_UNSUPPORTED, "%s with an argument without a name", functions[which]);
        if (!new_dict(c, which == F_DICT ? DICT : SPACE, ret))
            return false;
        for (int i = 0; i < a->n_named; i++)
            if (!dict_put(c, ret->u.dict, a->name[i], a->v[i]))
                return false;
        return true;
    default: {
        int64_t v[3] = {0, 0, 1};
        if (a->n < 1 || a->n > 3 || a->n_named != 0)
            return fails(c, TD_ERR_UNSUPPORTED, "range with %d arguments", a->n);
        for (int i = 0; i < a->n; i++) {
            if (a->v[i].kind != INT)
                return fails(c, TD_ERR_UNSUPPORTED, "range of %s", kind_name(a->v[i].kind));
            v[a->n == 1 ? 1 : i] = a->v[i].u.i;
        }
        if (v[2] == 0)
            return fails(c, TD_ERR_UNSUPPORTED, "range with a step of 0");
        int64_t n = v[2] > 0 ? (v[1] - v[0] + v[2] - 1) / v[2] : (v[0] - v[1] - v[2] - 1) / -v[2];
        if (n < 0)
            n = 0;
        if (n > MAX_RANGE)
            return fails(c, TD_ERR_LIMIT, "a range of more than %d", MAX_RANGE);
        if (!new_list(c, (size_t)n, ret))
            return false;
        for (int64_t i = 0; i < n; i++)
            ret->u.list->v[i] = int_value(v[0] + i * v[2]);
        return true;
    }
    }
}

static bool call_macro(struct ctx *c, const struct node *macro, const struct args *a, struct value *ret)
{
    struct scope scope = {.parent = c->root}, *outer = c->scope;
    struct text text = {0}, *out = c->out;
    int n_used = 0, position = 0, line = c->line;

    if (c->macro_depth == MAX_MACRO_DEPTH)
        return fails(c, TD_ERR_LIMIT, "macros nest too deep");
    for (const struct target *t = macro->targets; t != NULL; t = t->next, position++) {
        struct value v = {.kind = UNDEFINED};
        const struct value *given = position < a->n ? &a->v[position] : NULL;
        for (int i = a->n; i < a->n + a->n_named; i++)
            if (str_same(a->name[i], t->name))
                given = &a->v[i];
        if (given != NULL) {
            v = *given;
            n_used++;
        } else if (t->fallback != NULL && !eval(c, t->fallback, &v)) {
            return false;
        }
        if (!bind(c, &scope, t->name, v))
            return false;
    }
    if (n_used != a->n + a->n_named)
        return fails(c, TD_ERR_UNSUPPORTED, "the macro %.*s with arguments it does not take", (int)(macro->text.n < 40 ? macro->text.n : 40),
                     macro->text.p);
    c->macro_depth++;
    c->scope = &scope;
    c->out = &text;
    bool ok = run_nodes(c, macro->body);
    c->macro_depth--;
    c->scope = outer;
    c->out = out;
    c->line = line;
    *ret = str_value(text.p, text.n);
    return ok;
}

/* ---- evaluation: expressions --------------------------------------------------------------------------------------------------------------- */

static bool eval_call(struct ctx *c, const struct expr *e, struct value *ret)
{
    struct args *a = ctx_alloc(c, sizeof *a);     /* too large for a deep stack */
    struct value f;

    if (a == NULL)
        return false;
    if (e->a->kind == E_ATTR) {
        if (!eval(c, e->a->a, &f) || !eval_args(c, e->args, a))
            return false;
        c->line = e->line;
        if (f.kind == STR)
            return str_method(c, f.u.s, e->a->name, a, ret);
        if (f.kind == DICT)
            return dict_method(c, f.u.dict, e->a->name, a, ret);
        return fails(c, TD_ERR_UNSUPPORTED, "it calls .%.*s of %s", (int)(e->a->name.n < 40 ? e->a->name.n : 40), e->a->name.p,
                     kind_name(f.kind));
    }
    if (!eval(c, e->a, &f))
        return false;
    if (f.kind != MACRO && f.kind != FUNCTION)
        return fails(c, TD_ERR_UNSUPPORTED, "it calls \"%.*s\", which is %s", (int)(e->a->name.n < 40 ? e->a->name.n : 40),
                     e->a->name.p == NULL ? "" : e->a->name.p, kind_name(f.kind));
    if (!eval_args(c, e->args, a))
        return false;
    return f.kind == MACRO ? call_macro(c, f.u.macro, a, ret) : call_function(c, f.u.i, a, ret);
}

static bool eval_slice(struct ctx *c, const struct expr *e, struct value *ret)
{
    struct value obj, part[3];
    const struct expr *exprs[3] = {e->b, e->c, e->d};

    if (!eval(c, e->a, &obj))
        return false;
    for (int i = 0; i < 3; i++) {
        part[i] = none_value();
        if (exprs[i] != NULL && !eval(c, exprs[i], &part[i]))
            return false;
        if (part[i].kind != NONE && part[i].kind != INT)
            return fails(c, TD_ERR_UNSUPPORTED, "a slice bound that is %s", kind_name(part[i].kind));
    }
    if ((obj.kind != LIST || obj.lazy) && obj.kind != STR)
        return fails(c, TD_ERR_UNSUPPORTED, "a slice of %s", obj.lazy ? "an iterator" : kind_name(obj.kind));
    struct value items, out;
    if (!to_items(c, obj, &items))
        return false;
    int64_t n = (int64_t)items.u.list->n, by = part[2].kind == INT ? part[2].u.i : 1;
    if (by == 0)
        return fails(c, TD_ERR_UNSUPPORTED, "a slice with a step of 0");
    int64_t low = by > 0 ? 0 : -1, high = by > 0 ? n : n - 1, bound[2] = {by > 0 ? low : high, by > 0 ? high : low};
    for (int i = 0; i < 2; i++) {
        if (part[i].kind != INT)
            continue;
        int64_t v = part[i].u.i < 0 ? part[i].u.i + n : part[i].u.i;
        bound[i] = v < low ? low : v > high ? high : v;
    }
    if (!new_list(c, items.u.list->n, &out))
        return false;
    size_t k = 0;
    for (int64_t i = bound[0]; by > 0 ? i < bound[1] : i > bound[1]; i += by)
        out.u.list->v[k++] = items.u.list->v[i];
    out.u.list->n = k;
    *ret = out;
    if (obj.kind == LIST)
        return true;
    struct text t = {0};
    for (size_t i = 0; i < k; i++)
        if (!append(c, &t, out.u.list->v[i].u.s))
            return false;
    *ret = str_value(t.p, t.n);
    return true;
}

static bool eval_binary(struct ctx *c, const struct expr *e, struct value *ret)
{
    struct value a, b;
    struct str s, t;

    if (!eval(c, e->a, &a) || !eval(c, e->b, &b))
        return false;
    c->line = e->line;
    if (e->op == OP_CONCAT || (e->op == OP_ADD && a.kind == STR && b.kind == STR)) {
        if (!to_text(c, a, &s) || !to_text(c, b, &t))
            return false;
        char *p = ctx_alloc(c, s.n + t.n + 1);
        if (p == NULL)
            return false;
        if (s.n > 0)
            memcpy(p, s.p, s.n);
        if (t.n > 0)
            memcpy(p + s.n, t.p, t.n);
        *ret = str_value(p, s.n + t.n);
        return true;
    }
    if (e->op == OP_ADD && a.kind == LIST && b.kind == LIST && !a.lazy && !b.lazy) {
        if (!new_list(c, a.u.list->n + b.u.list->n, ret))
            return false;
        for (size_t i = 0; i < ret->u.list->n; i++)
            ret->u.list->v[i] = i < a.u.list->n ? a.u.list->v[i] : b.u.list->v[i - a.u.list->n];
        return true;
    }
    if ((a.kind != INT && a.kind != BOOL) || (b.kind != INT && b.kind != BOOL))
        return fails(c, TD_ERR_UNSUPPORTED, "arithmetic with %s and %s", kind_name(a.kind), kind_name(b.kind));
    int64_t r = 0;
    bool bad = false;
    switch (e->op) {
    case OP_ADD: bad = __builtin_add_overflow(a.u.i, b.u.i, &r); break;
    case OP_SUB: bad = __builtin_sub_overflow(a.u.i, b.u.i, &r); break;
    case OP_MUL: bad = __builtin_mul_overflow(a.u.i, b.u.i, &r); break;
    default:
        if (b.u.i == 0 || (a.u.i == INT64_MIN && b.u.i == -1))
            return fails(c, TD_ERR_UNSUPPORTED, "a division by zero");
        r = a.u.i % b.u.i;     /* Python: the sign of the divisor, and // rounds down */
        bool down = r != 0 && (r < 0) != (b.u.i < 0);
        r = e->op == OP_MOD ? r + (down ? b.u.i : 0) : a.u.i / b.u.i - down;
    }
    if (bad || r > (int64_t)1 << 53 || r < -((int64_t)1 << 53))
        return fails(c, TD_ERR_UNSUPPORTED, "a number beyond 2^53");
    *ret = int_value(r);
    return true;
}

static bool compare(struct ctx *c, enum op op, struct value a, struct value b, bool *ret)
{
    charge(c, b);
    if (op == OP_EQ || op == OP_NE) {
        *ret = same(c, a, b, 0) == (op == OP_EQ);
        return true;
    }
    if (op == OP_IN || op == OP_NOT_IN) {
        if (!is_in(c, a, b, ret))
            return false;
        *ret = *ret == (op == OP_IN);
        return true;
    }
    int order;
    if (a.kind == STR && b.kind == STR) {
        size_t n = a.u.s.n < b.u.s.n ? a.u.s.n : b.u.s.n;
        order = n > 0 ? memcmp(a.u.s.p, b.u.s.p, n) : 0;
        order = order != 0 ? order : (a.u.s.n > b.u.s.n) - (a.u.s.n < b.u.s.n);
    } else if ((a.kind == INT || a.kind == BOOL) && (b.kind == INT || b.kind == BOOL)) {
        order = (a.u.i > b.u.i) - (a.u.i < b.u.i);
    } else {
        return fails(c, TD_ERR_UNSUPPORTED, "the order of %s and %s", kind_name(a.kind), kind_name(b.kind));
    }
    *ret = op == OP_LT ? order < 0 : op == OP_LE ? order <= 0 : op == OP_GT ? order > 0 : order >= 0;
    return true;
}

static bool eval_collection(struct ctx *c, const struct expr *e, struct value *ret)
{
    size_t n = 0;
    struct value key, v;
    for (const struct arg *a = e->args; a != NULL; a = a->next)
        n++;
    if (e->kind == E_LIST) {
        if (!new_list(c, n, ret))
            return false;
        n = 0;
        for (const struct arg *a = e->args; a != NULL; a = a->next)
            if (!eval(c, a->value, &ret->u.list->v[n++]))
                return false;
        return true;
    }
    if (!new_dict(c, DICT, ret))
        return false;
    for (const struct arg *a = e->args; a != NULL; a = a->next) {
        struct str text;
        if (!eval(c, a->key, &key) || !eval(c, a->value, &v) || !to_key(c, key, &text) || !dict_put(c, ret->u.dict, text, v))
            return false;
    }
    return true;
}

static bool eval(struct ctx *c, const struct expr *e, struct value *ret)
{
    struct value a, b;
    bool yes;

    if (!step(c))
        return false;
    c->line = e->line;
    switch (e->kind) {
    case E_VALUE: *ret = e->value; return true;
    case E_NAME: {
        const struct value *v = find_name(c, e->name);
        *ret = v != NULL ? *v : (struct value){.kind = UNDEFINED};
        for (size_t i = 0; v == NULL && i < sizeof functions / sizeof *functions; i++)
            if (str_is(e->name, functions[i]))
                *ret = (struct value){.kind = FUNCTION, .u.i = (int64_t)i};
        return true;
    }
    case E_ATTR: return eval(c, e->a, &a) && get_attr(c, a, e->name, ret);
    case E_ITEM:
        if (!eval(c, e->a, &a) || !eval(c, e->b, &b))
            return false;
        if (b.kind == STR && a.kind != DICT && a.kind != LIST && a.kind != STR && a.kind != UNDEFINED)     /* loop['first'] */
            return get_attr(c, a, b.u.s, ret);
        return get_item(c, a, b, ret);
    case E_SLICE: return eval_slice(c, e, ret);
    case E_CALL: return eval_call(c, e, ret);
    case E_FILTER:
    case E_TEST: {
        struct args *args = ctx_alloc(c, sizeof *args);
        if (args == NULL || !eval(c, e->a, &a) || !eval_args(c, e->args, args))
            return false;
        c->line = e->line;
        if (e->kind == E_FILTER)
            return run_filter(c, e->name, a, args, ret);
        if (!run_test(c, e->name, a, args, &yes))
            return false;
        *ret = bool_value(yes);
        return true;
    }
    case E_NOT:
        if (!eval(c, e->a, &a))
            return false;
        *ret = bool_value(!truth(a));
        return true;
    case E_AND:
    case E_OR:
        if (!eval(c, e->a, ret))
            return false;
        return truth(*ret) == (e->kind == E_OR) || eval(c, e->b, ret);
    case E_NEG:
        if (!eval(c, e->a, &a))
            return false;
        if (a.kind != INT)
            return fails(c, TD_ERR_UNSUPPORTED, "minus %s", kind_name(a.kind));
        *ret = int_value(-a.u.i);
        return true;
    case E_BINARY: return eval_binary(c, e, ret);
    case E_COMPARE:
        yes = true;
        if (!eval(c, e->a, &a))
            return false;
        for (const struct arg *arg = e->args; arg != NULL && yes; arg = arg->next) {
            if (!eval(c, arg->value, &b) || !compare(c, arg->op, a, b, &yes))
                return false;
            a = b;
        }
        *ret = bool_value(yes);
        return true;
    case E_COND:
        if (!eval(c, e->b, &a))
            return false;
        if (truth(a))
            return eval(c, e->a, ret);
        *ret = (struct value){.kind = UNDEFINED};
        return e->c == NULL || eval(c, e->c, ret);
    default: return eval_collection(c, e, ret);
    }
}

/* ---- evaluation: statements ------------------------------------------------------------------------------------------------------------------ */

static bool bind_targets(struct ctx *c, struct scope *s, const struct target *targets, struct value v)
{
    if (targets->next == NULL)
        return bind(c, s, targets->name, v);
    size_t n = 0;
    for (const struct target *t = targets; t != NULL; t = t->next)
        n++;
    if (v.kind != LIST || v.u.list->n != n)
        return fails(c, TD_ERR_UNSUPPORTED, "a loop takes apart what is not %zu values", n);
    n = 0;
    for (const struct target *t = targets; t != NULL; t = t->next)
        if (!bind(c, s, t->name, v.u.list->v[n++]))
            return false;
    return true;
}

static bool run_for(struct ctx *c, const struct node *n)
{
    struct value v, items, keep;
    struct scope *outer = c->scope;
    bool ok = true;

    if (!eval(c, n->e, &v) || !to_items(c, v, &items))
        return false;
    if (n->filter != NULL) {
        if (!new_list(c, items.u.list->n, &keep))
            return false;
        size_t k = 0;
        for (size_t i = 0; ok && i < items.u.list->n; i++) {
            struct scope s = {.parent = outer};
            c->scope = &s;
            ok = bind_targets(c, &s, n->targets, items.u.list->v[i]) && eval(c, n->filter, &v);
            c->scope = outer;
            if (ok && truth(v))
                keep.u.list->v[k++] = items.u.list->v[i];
        }
        if (!ok)
            return false;
        keep.u.list->n = k;
        items = keep;
    }
    struct loop *loop = ctx_alloc(c, sizeof *loop);
    if (loop == NULL)
        return false;
    loop->items = items.u.list;
    for (size_t i = 0; ok && i < items.u.list->n && c->flow != BREAK; i++) {
        struct scope s = {.parent = outer};
        loop->at = i;
        c->scope = &s;
        ok = bind(c, &s, (struct str){"loop", 4}, (struct value){.kind = LOOP, .u.loop = loop}) &&
             bind_targets(c, &s, n->targets, items.u.list->v[i]) && run_nodes(c, n->body);
        c->scope = outer;
        if (c->flow == CONTINUE)
            c->flow = GO_ON;
    }
    c->flow = GO_ON;
    return ok && (items.u.list->n > 0 || run_nodes(c, n->otherwise));
}

static bool run_set(struct ctx *c, const struct node *n)
{
    struct value v;

    if (n->kind == N_SET_BLOCK) {
        struct text text = {0}, *out = c->out;
        struct scope s = {.parent = c->scope}, *outer = c->scope;
        c->out = &text;
        c->scope = &s;
        bool ok = run_nodes(c, n->body);
        c->out = out;
        c->scope = outer;
        if (!ok)
            return false;
        v = str_value(text.p, text.n);
    } else if (!eval(c, n->e, &v)) {
        return false;
    }
    if (n->text.n == 0)
        return bind(c, c->scope, n->targets->name, v);
    const struct value *space = find_name(c, n->targets->name);
    if (space == NULL || space->kind != SPACE)
        return fails(c, TD_ERR_UNSUPPORTED, "it sets an attribute of something that is no namespace");
    return dict_put(c, space->u.dict, n->text, v);
}

static bool run_nodes(struct ctx *c, const struct node *n)
{
    struct value v;
    struct str s;

    for (; n != NULL && c->flow == GO_ON; n = n->next) {
        c->line = n->line;
        if (!step(c))
            return false;
        switch (n->kind) {
        case N_TEXT:
            if (!append(c, c->out, n->text))
                return false;
            break;
        case N_PRINT:
            if (!eval(c, n->e, &v) || !to_text(c, v, &s) || !append(c, c->out, s))
                return false;
            break;
        case N_IF:
            if (!eval(c, n->e, &v) || !run_nodes(c, truth(v) ? n->body : n->otherwise))
                return false;
            break;
        case N_FOR:
            if (!run_for(c, n))
                return false;
            break;
        case N_SET:
        case N_SET_BLOCK:
            if (!run_set(c, n))
                return false;
            break;
        case N_MACRO:
            if (!bind(c, c->scope, n->text, (struct value){.kind = MACRO, .u.macro = n}))
                return false;
            break;
        case N_BREAK: c->flow = BREAK; break;
        case N_CONTINUE: c->flow = CONTINUE; break;
        case N_GROUP:
            if (!run_nodes(c, n->body))
                return false;
            break;
        }
    }
    return true;
}

static bool give_input(struct ctx *c)
{
    const struct td_jinja_input *in = c->input;
    struct value messages, v;

    if (!new_list(c, in->n_messages, &messages))
        return false;
    for (size_t i = 0; i < in->n_messages; i++) {
        const struct td_chat_message *m = &in->messages[i];
        if (!new_dict(c, DICT, &v) || !dict_put(c, v.u.dict, (struct str){"role", 4}, word_value(m->role)) ||
            !dict_put(c, v.u.dict, (struct str){"content", 7}, str_value(m->content, m->content_bytes)))
            return false;
        messages.u.list->v[i] = v;
    }
    const struct { const char *name; struct value value; bool given; } vars[] = {
        {"messages", messages, true},
        {"add_generation_prompt", bool_value(in->add_generation_prompt), true},
        {"tools", none_value(), true},
        {"documents", none_value(), true},
        {"bos_token", in->bos_token != NULL ? word_value(in->bos_token) : none_value(), in->bos_token != NULL},
        {"eos_token", in->eos_token != NULL ? word_value(in->eos_token) : none_value(), in->eos_token != NULL},
    };
    for (size_t i = 0; i < sizeof vars / sizeof *vars; i++)
        if (vars[i].given && !bind(c, c->root, (struct str){vars[i].name, strlen(vars[i].name)}, vars[i].value))
            return false;
    return true;
}

td_status td_jinja_render(const struct td_jinja *jinja, const struct td_jinja_input *input, char **ret_text, size_t *ret_bytes,
                          struct td_err *err)
{
    struct scope given = {0}, root = {.parent = &given};     /* a template's own names shadow what it was given */
    struct text out = {0};
    struct ctx c = {.input = input, .scope = &root, .root = &given, .out = &out, .final = &out, .err = err};
    size_t input_bytes = 0;

    for (size_t i = 0; i < input->n_messages; i++)
        input_bytes += input->messages[i].content_bytes + 256;
    c.arena.limit = input_bytes < SIZE_MAX / BYTES_PER_INPUT_BYTE / 2 ? BYTES_BASE + input_bytes * BYTES_PER_INPUT_BYTE : SIZE_MAX;
    c.steps_left = STEPS_BASE + (uint64_t)input->n_messages * STEPS_PER_MESSAGE;
    bool ok = give_input(&c);
    c.root = &root;
    if (ok && run_nodes(&c, jinja->root) && c.status == TD_OK) {
        char *text = malloc(out.n + 1);
        if (text != NULL) {
            if (out.n > 0)
                memcpy(text, out.p, out.n);
            text[out.n] = 0;
            *ret_text = text;
            *ret_bytes = out.n;
        } else {
            c.status = td_fail(err, TD_ERR_NOMEM, "chat template: no memory for %zu bytes", out.n);
        }
    }
    arena_free(&c.arena);
    return c.status;
}
