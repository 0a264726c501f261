/* jinja_parse.c - makes a tree of tokens: expressions by precedence, statements by their first
 * word. */
#include "common/text/jinja_internal.h"

#include <stdlib.h>
#include <string.h>

/* ---- expressions ----------------------------------------------------------------------------- */

static bool parse_expr(struct parser *p, struct expr **ret);
static bool parse_or(struct parser *p, struct expr **ret);
static bool parse_unary(struct parser *p, bool with_filters, struct expr **ret);

static struct expr *new_expr(struct parser *p, enum expr_kind kind, struct expr *a, struct expr *b)
{
    struct expr *e = jinja_parser_alloc(p, sizeof *e);
    if (e != NULL) *e = (struct expr){.kind = kind, .line = p->line, .a = a, .b = b};
    return e;
}

static struct expr *value_expr(struct parser *p, struct value v)
{
    struct expr *e = new_expr(p, E_VALUE, NULL, NULL);
    if (e != NULL) e->value = v;
    return e;
}

/* Parses "a, b)" or "name=a)" up to and including the closing bracket. */
static bool parse_args(struct parser *p, const char *close, bool names, struct arg **ret)
{
    struct arg **last = ret;
    while (!jinja_at_op(p, close)) {
        struct arg *arg = jinja_parser_alloc(p, sizeof *arg);
        if (arg == NULL) return false;
        if (jinja_at_op(p, "*") || jinja_at_op(p, "**"))
            return jinja_refuse(p, TD_ERR_UNSUPPORTED, "* before an argument");
        if (!parse_expr(p, &arg->value)) return false;
        if (names && jinja_at_op(p, "=")) {
            if (arg->value->kind != E_NAME)
                return jinja_refuse(p, TD_ERR_UNSUPPORTED, "an argument's name is no name");
            arg->name = arg->value->name;
            if (!jinja_next(p) || !parse_expr(p, &arg->value)) return false;
        }
        *last = arg;
        last = &arg->next;
        if (!jinja_at_op(p, close) && !jinja_expect_op(p, ",")) return false;
    }
    return jinja_next(p);
}

/* A constant or a variable. */
static bool parse_name(struct parser *p, struct expr **ret)
{
    struct token t = p->token;
    static const struct {
        const char *name;
        enum kind kind;
        int64_t i;
    } words[] = {{"true", BOOL, 1},  {"True", BOOL, 1}, {"false", BOOL, 0},
                 {"False", BOOL, 0}, {"none", NONE, 0}, {"None", NONE, 0}};

    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (str_is(t.text, words[i].name)) {
            *ret = value_expr(p, (struct value){.kind = words[i].kind, .u.i = words[i].i});
            return *ret != NULL && jinja_next(p);
        }
    }
    static const char *const reserved[] = {"and", "or", "not", "in", "is", "if", "else"};
    for (size_t i = 0; i < sizeof reserved / sizeof *reserved; i++)
        if (str_is(t.text, reserved[i]))
            return jinja_refuse(p, TD_ERR_UNSUPPORTED, "\"%s\" where a value must be", reserved[i]);
    *ret = new_expr(p, E_NAME, NULL, NULL);
    if (*ret == NULL) return false;
    (*ret)->name = t.text;
    return jinja_next(p);
}

/* "(": an expression in parentheses, or a tuple. */
static bool parse_parentheses(struct parser *p, struct expr **ret)
{
    if (!jinja_next(p)) return false;
    if (jinja_at_op(p, ")")) {
        *ret = new_expr(p, E_LIST, NULL, NULL);
        return *ret != NULL && jinja_next(p);
    }
    if (!parse_expr(p, ret)) return false;
    if (jinja_at_op(p, ",")) {
        struct expr *tuple = new_expr(p, E_LIST, NULL, NULL);
        struct arg *first = jinja_parser_alloc(p, sizeof *first);
        if (tuple == NULL || first == NULL) return false;
        first->value = *ret;
        tuple->args = first;
        *ret = tuple;
        return jinja_next(p) && parse_args(p, ")", false, &first->next);
    }
    return jinja_expect_op(p, ")");
}

/* "{": a mapping. */
static bool parse_dict(struct parser *p, struct expr **ret)
{
    *ret = new_expr(p, E_DICT, NULL, NULL);
    if (*ret == NULL || !jinja_next(p)) return false;
    struct arg **last = &(*ret)->args;
    while (!jinja_at_op(p, "}")) {
        struct arg *arg = jinja_parser_alloc(p, sizeof *arg);
        if (arg == NULL || !parse_expr(p, &arg->key) || !jinja_expect_op(p, ":") ||
            !parse_expr(p, &arg->value))
            return false;
        *last = arg;
        last = &arg->next;
        if (!jinja_at_op(p, "}") && !jinja_expect_op(p, ",")) return false;
    }
    return jinja_next(p);
}

static bool parse_primary(struct parser *p, struct expr **ret)
{
    struct token t = p->token;

    if (t.kind == T_INT) {
        *ret = value_expr(p, (struct value){.kind = INT, .u.i = t.i});
        return *ret != NULL && jinja_next(p);
    }
    if (t.kind == T_STRING) {
        if (!jinja_next(p)) return false;
        while (p->token.kind == T_STRING) { /* "a" "b" */
            char *both = jinja_parser_alloc(p, t.text.n + p->token.text.n + 1);
            if (both == NULL) return false;
            memcpy(both, t.text.p, t.text.n);
            memcpy(both + t.text.n, p->token.text.p, p->token.text.n);
            t.text = (struct str){both, t.text.n + p->token.text.n};
            if (!jinja_next(p)) return false;
        }
        *ret = value_expr(p, (struct value){.kind = STR, .u.s = t.text});
        return *ret != NULL;
    }
    if (t.kind == T_NAME) return parse_name(p, ret);
    if (jinja_at_op(p, "(")) return parse_parentheses(p, ret);
    if (jinja_at_op(p, "[")) {
        *ret = new_expr(p, E_LIST, NULL, NULL);
        return *ret != NULL && jinja_next(p) && parse_args(p, "]", false, &(*ret)->args);
    }
    if (jinja_at_op(p, "{")) return parse_dict(p, ret);
    return jinja_refuse(p, TD_ERR_UNSUPPORTED, "no value where one must be");
}

static bool parse_subscript(struct parser *p, struct expr **e)
{
    struct expr *part[3] = {NULL, NULL, NULL};
    int n = 0;
    bool slice = false;

    while (!jinja_at_op(p, "]")) {
        if (jinja_at_op(p, ":")) {
            slice = true;
            if (++n > 2)
                return jinja_refuse(p, TD_ERR_UNSUPPORTED, "a slice of more than three parts");
            if (!jinja_next(p)) return false;
        } else if (part[n] != NULL || !parse_expr(p, &part[n])) {
            return p->status != TD_OK
                       ? false
                       : jinja_refuse(p, TD_ERR_UNSUPPORTED, "a subscript of several parts");
        }
    }
    if (!slice && part[0] == NULL) return jinja_refuse(p, TD_ERR_UNSUPPORTED, "an empty subscript");
    struct expr *s = new_expr(p, slice ? E_SLICE : E_ITEM, *e, part[0]);
    if (s == NULL) return false;
    s->c = part[1];
    s->d = part[2];
    *e = s;
    return jinja_next(p);
}

static bool parse_call(struct parser *p, struct expr **e)
{
    struct expr *call = new_expr(p, E_CALL, *e, NULL);
    if (call == NULL || !jinja_next(p) || !parse_args(p, ")", true, &call->args)) return false;
    *e = call;
    return true;
}

static bool parse_postfix(struct parser *p, struct expr **e)
{
    for (;;) {
        if (jinja_at_op(p, ".")) {
            struct expr *attr = new_expr(p, E_ATTR, *e, NULL);
            if (attr == NULL || !jinja_next(p)) return false;
            if (p->token.kind == T_INT) { /* x.0 */
                attr->kind = E_ITEM;
                attr->b = value_expr(p, (struct value){.kind = INT, .u.i = p->token.i});
                if (attr->b == NULL || !jinja_next(p)) return false;
            } else if (!jinja_take_name(p, &attr->name)) {
                return false;
            }
            *e = attr;
        } else if (jinja_at_op(p, "[")) {
            if (!jinja_next(p) || !parse_subscript(p, e)) return false;
        } else if (jinja_at_op(p, "(")) {
            if (!parse_call(p, e)) return false;
        } else {
            return true;
        }
        if (++p->depth > 4 * JINJA_MAX_DEPTH) /* a.b.c... is a deep tree */
            return jinja_refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    }
}

/* "| name(args)" and "is [not] name [arg]", both binding tighter than any operator */
static bool parse_filters(struct parser *p, struct expr **e)
{
    for (;;) {
        if (++p->depth > 4 * JINJA_MAX_DEPTH)
            return jinja_refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
        if (jinja_at_op(p, "|")) {
            struct expr *f = new_expr(p, E_FILTER, *e, NULL);
            if (f == NULL || !jinja_next(p) || !jinja_take_name(p, &f->name)) return false;
            if (jinja_at_op(p, "(") && (!jinja_next(p) || !parse_args(p, ")", true, &f->args)))
                return false;
            *e = f;
        } else if (jinja_at_name(p, "is")) {
            struct expr *t = new_expr(p, E_TEST, *e, NULL);
            if (t == NULL || !jinja_next(p)) return false;
            bool negated = jinja_at_name(p, "not");
            if ((negated && !jinja_next(p)) || !jinja_take_name(p, &t->name)) return false;
            bool word = p->token.kind == T_NAME && !jinja_at_name(p, "else") &&
                        !jinja_at_name(p, "or") && !jinja_at_name(p, "and") &&
                        !jinja_at_name(p, "if") && !jinja_at_name(p, "is");
            if (jinja_at_op(p, "(")) {
                if (!jinja_next(p) || !parse_args(p, ")", true, &t->args)) return false;
            } else if (word || p->token.kind == T_STRING || p->token.kind == T_INT ||
                       jinja_at_op(p, "[") || jinja_at_op(p, "{")) {
                struct arg *arg = jinja_parser_alloc(p, sizeof *arg);
                if (arg == NULL || !parse_primary(p, &arg->value) || !parse_postfix(p, &arg->value))
                    return false;
                t->args = arg;
            }
            *e = negated ? new_expr(p, E_NOT, t, NULL) : t;
            if (*e == NULL) return false;
        } else if (jinja_at_op(p, "(")) {
            if (!parse_call(p, e)) return false;
        } else {
            return true;
        }
    }
}

static bool parse_unary(struct parser *p, bool with_filters, struct expr **ret)
{
    int depth = p->depth;
    if (++p->depth > 4 * JINJA_MAX_DEPTH)
        return jinja_refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    if (jinja_at_op(p, "-")) {
        struct expr *inner;
        if (!jinja_next(p) || !parse_unary(p, false, &inner)) return false;
        *ret = new_expr(p, E_NEG, inner, NULL);
        if (*ret == NULL) return false;
    } else if (jinja_at_op(p, "+")) {
        return jinja_refuse(p, TD_ERR_UNSUPPORTED, "a sign +");
    } else if (!parse_primary(p, ret)) {
        return false;
    }
    if (!parse_postfix(p, ret) || (with_filters && !parse_filters(p, ret))) return false;
    if (jinja_at_op(p, "**")) return jinja_refuse(p, TD_ERR_UNSUPPORTED, "the operator **");
    p->depth = depth;
    return true;
}

/* Binary operators by level, loosest first: + -, then ~, then * // % */
static bool parse_binary(struct parser *p, int level, struct expr **ret)
{
    static const struct {
        const char *text;
        int level;
        enum op op;
    } ops[] = {{"+", 0, OP_ADD}, {"-", 0, OP_SUB},    {"~", 1, OP_CONCAT},
               {"*", 2, OP_MUL}, {"//", 2, OP_FLOOR}, {"%", 2, OP_MOD}};

    if (level == 3) return parse_unary(p, true, ret);
    int depth = p->depth;
    if (!parse_binary(p, level + 1, ret)) return false;
    for (;;) {
        enum op op = OP_EQ;
        for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
            if (ops[i].level == level && jinja_at_op(p, ops[i].text)) op = ops[i].op;
        if (jinja_at_op(p, "/")) return jinja_refuse(p, TD_ERR_UNSUPPORTED, "the operator /");
        if (op == OP_EQ) break;
        struct expr *e = new_expr(p, E_BINARY, *ret, NULL);
        if (e == NULL || !jinja_next(p) || !parse_binary(p, level + 1, &e->b)) return false;
        e->op = op;
        *ret = e;
        if (++p->depth > 4 * JINJA_MAX_DEPTH) /* a + b + c ... is a tree that is deep on its left */
            return jinja_refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    }
    p->depth = depth;
    return true;
}

static bool parse_compare(struct parser *p, struct expr **ret)
{
    static const struct {
        const char *text;
        enum op op;
    } ops[] = {{"==", OP_EQ}, {"!=", OP_NE}, {"<", OP_LT},
               {"<=", OP_LE}, {">", OP_GT},  {">=", OP_GE}};
    if (!parse_binary(p, 0, ret)) return false;
    struct arg **last = NULL;
    for (;;) {
        int op = -1;
        for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
            if (jinja_at_op(p, ops[i].text)) op = (int)ops[i].op;
        if (jinja_at_name(p, "in")) op = OP_IN;
        if (jinja_at_name(p, "not")) op = OP_NOT_IN;
        if (op < 0) return true;
        struct arg *arg = jinja_parser_alloc(p, sizeof *arg);
        if (arg == NULL || !jinja_next(p)) return false;
        if (op == OP_NOT_IN) {
            if (!jinja_at_name(p, "in"))
                return jinja_refuse(p, TD_ERR_UNSUPPORTED, "\"not\" after a value without \"in\"");
            if (!jinja_next(p)) return false;
        }
        if (last == NULL) {
            struct expr *e = new_expr(p, E_COMPARE, *ret, NULL);
            if (e == NULL) return false;
            *ret = e;
            last = &e->args;
        }
        arg->op = (enum op)op;
        if (!parse_binary(p, 0, &arg->value)) return false;
        *last = arg;
        last = &arg->next;
    }
}

static bool parse_not(struct parser *p, struct expr **ret)
{
    if (!jinja_at_name(p, "not")) return parse_compare(p, ret);
    int depth = p->depth;
    if (++p->depth > 4 * JINJA_MAX_DEPTH)
        return jinja_refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    struct expr *inner;
    if (!jinja_next(p) || !parse_not(p, &inner)) return false;
    p->depth = depth;
    *ret = new_expr(p, E_NOT, inner, NULL);
    return *ret != NULL;
}

static bool parse_logic(struct parser *p, bool is_or, struct expr **ret)
{
    int depth = p->depth;
    if (!(is_or ? parse_logic(p, false, ret) : parse_not(p, ret))) return false;
    while (jinja_at_name(p, is_or ? "or" : "and")) {
        struct expr *e = new_expr(p, is_or ? E_OR : E_AND, *ret, NULL);
        if (e == NULL || !jinja_next(p) ||
            !(is_or ? parse_logic(p, false, &e->b) : parse_not(p, &e->b)))
            return false;
        *ret = e;
        if (++p->depth > 4 * JINJA_MAX_DEPTH)
            return jinja_refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    }
    p->depth = depth;
    return true;
}

static bool parse_or(struct parser *p, struct expr **ret) { return parse_logic(p, true, ret); }

static bool parse_expr(struct parser *p, struct expr **ret)
{
    int depth = p->depth;
    p->depth += 4; /* a dozen C frames lie between two of these */
    if (p->depth > 4 * JINJA_MAX_DEPTH)
        return jinja_refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    if (!parse_or(p, ret)) return false;
    while (jinja_at_name(p, "if")) {
        struct expr *e = new_expr(p, E_COND, *ret, NULL);
        if (e == NULL || !jinja_next(p) || !parse_or(p, &e->b)) return false;
        if (jinja_at_name(p, "else") && (!jinja_next(p) || !parse_expr(p, &e->c))) return false;
        *ret = e;
        if (++p->depth > 4 * JINJA_MAX_DEPTH)
            return jinja_refuse(p, TD_ERR_LIMIT, "an expression nests too deep");
    }
    p->depth = depth;
    return true;
}

/* ---- statements ------------------------------------------------------------------------------ */

static bool parse_nodes(struct parser *p, struct node **ret, struct str *ret_closing);

static struct node *new_node(struct parser *p, enum node_kind kind)
{
    struct node *n = jinja_parser_alloc(p, sizeof *n);
    if (n != NULL) *n = (struct node){.kind = kind, .line = p->line};
    return n;
}

/* Parses a body up to one of the closing words, whose tag stays open behind the word. */
static bool parse_body(struct parser *p, struct node **ret, struct str *ret_closing,
                       const char *const *closing)
{
    int line = p->line;
    if (!jinja_expect_end(p) || !parse_nodes(p, ret, ret_closing)) return false;
    for (; *closing != NULL; closing++)
        if (str_is(*ret_closing, *closing)) return true;
    if (ret_closing->n == 0)
        return jinja_refuse(p, TD_ERR_UNSUPPORTED, "the block of line %d does not end", line);
    return jinja_refuse(p, TD_ERR_UNSUPPORTED, "\"%.*s\" inside the block of line %d",
                        (int)(ret_closing->n < 40 ? ret_closing->n : 40), ret_closing->p, line);
}

static bool parse_if(struct parser *p, struct node **ret)
{
    static const char *const closing[] = {"elif", "else", "endif", NULL};
    static const char *const last[] = {"endif", NULL};
    struct str word;
    struct node **at = ret;
    int depth = p->depth;

    do { /* one N_IF per condition, each in `otherwise` of the one before */
        struct node *n = new_node(p, N_IF);
        if (n == NULL || !parse_expr(p, &n->e) || !parse_body(p, &n->body, &word, closing))
            return false;
        *at = n;
        at = &n->otherwise;
        if (str_is(word, "else") && !parse_body(p, &n->otherwise, &word, last)) return false;
        if (++p->depth > 4 * JINJA_MAX_DEPTH)
            return jinja_refuse(p, TD_ERR_LIMIT, "an \"if\" with too many branches");
    } while (str_is(word, "elif"));
    p->depth = depth;
    return jinja_expect_end(p);
}

static bool parse_targets(struct parser *p, struct target **ret)
{
    bool bracket = jinja_at_op(p, "(");
    if (bracket && !jinja_next(p)) return false;
    for (;;) {
        struct target *t = jinja_parser_alloc(p, sizeof *t);
        if (t == NULL || !jinja_take_name(p, &t->name)) return false;
        *ret = t;
        ret = &t->next;
        if (!jinja_at_op(p, ",")) break;
        if (!jinja_next(p)) return false;
    }
    return !bracket || jinja_expect_op(p, ")");
}

static bool parse_for(struct parser *p, struct node **ret)
{
    static const char *const closing[] = {"else", "endfor", NULL};
    static const char *const last[] = {"endfor", NULL};
    struct str word;
    struct node *n = *ret = new_node(p, N_FOR);

    if (n == NULL || !parse_targets(p, &n->targets)) return false;
    if (!jinja_at_name(p, "in"))
        return jinja_refuse(p, TD_ERR_UNSUPPORTED, "\"for\" without \"in\"");
    if (!jinja_next(p) || !parse_or(p, &n->e)) return false;
    if (jinja_at_name(p, "if") && (!jinja_next(p) || !parse_expr(p, &n->filter))) return false;
    p->loop_depth++;
    if (!parse_body(p, &n->body, &word, closing)) return false;
    p->loop_depth--;
    if (str_is(word, "else") && !parse_body(p, &n->otherwise, &word, last)) return false;
    return jinja_expect_end(p);
}

static bool parse_set(struct parser *p, struct node **ret)
{
    static const char *const last[] = {"endset", NULL};
    struct str word;
    struct node *n = *ret = new_node(p, N_SET);
    struct target *t = jinja_parser_alloc(p, sizeof *t);

    if (n == NULL || t == NULL || !jinja_take_name(p, &t->name)) return false;
    n->targets = t;
    if (jinja_at_op(p, ".") && (!jinja_next(p) || !jinja_take_name(p, &n->text))) return false;
    if (jinja_at_op(p, "=")) {
        if (!jinja_next(p) || !parse_expr(p, &n->e)) return false;
        return jinja_expect_end(p);
    }
    n->kind = N_SET_BLOCK;
    return parse_body(p, &n->body, &word, last) && jinja_expect_end(p);
}

static bool parse_macro(struct parser *p, struct node **ret)
{
    static const char *const last[] = {"endmacro", NULL};
    struct str word;
    struct node *n = *ret = new_node(p, N_MACRO);

    if (n == NULL || !jinja_take_name(p, &n->text) || !jinja_expect_op(p, "(")) return false;
    struct target **at = &n->targets;
    while (!jinja_at_op(p, ")")) {
        struct target *t = jinja_parser_alloc(p, sizeof *t);
        if (t == NULL || !jinja_take_name(p, &t->name)) return false;
        if (jinja_at_op(p, "=") && (!jinja_next(p) || !parse_expr(p, &t->fallback))) return false;
        *at = t;
        at = &t->next;
        if (!jinja_at_op(p, ")") && !jinja_expect_op(p, ",")) return false;
    }
    if (!jinja_next(p)) return false;
    int loop_depth = p->loop_depth;
    p->loop_depth = 0;
    if (!parse_body(p, &n->body, &word, last)) return false;
    p->loop_depth = loop_depth;
    if (p->token.kind == T_NAME && !jinja_next(p)) /* endmacro may repeat the name */
        return false;
    return jinja_expect_end(p);
}

/* Parses the statement after {%. *ret stays NULL when the word closes a block, which the caller of
 * parse_nodes() checks. */
static bool parse_statement(struct parser *p, struct node **ret, struct str *ret_closing)
{
    static const char *const closers[] = {"elif",   "else",     "endif",        "endfor",
                                          "endset", "endmacro", "endgeneration"};
    static const char *const end_generation[] = {"endgeneration", NULL};
    struct str word;

    *ret = NULL;
    if (!jinja_take_name(p, &word)) return false;
    for (size_t i = 0; i < sizeof closers / sizeof *closers; i++) {
        if (str_is(word, closers[i])) {
            *ret_closing = word;
            return true;
        }
    }
    if (str_is(word, "if")) return parse_if(p, ret);
    if (str_is(word, "for")) return parse_for(p, ret);
    if (str_is(word, "set")) return parse_set(p, ret);
    if (str_is(word, "macro")) return parse_macro(p, ret);
    /* an extension of transformers: marks the assistant's tokens and prints its body */
    if (str_is(word, "generation")) {
        *ret = new_node(p, N_GROUP);
        return *ret != NULL && parse_body(p, &(*ret)->body, &word, end_generation) &&
               jinja_expect_end(p);
    }
    if (str_is(word, "break") || str_is(word, "continue")) {
        if (p->loop_depth == 0)
            return jinja_refuse(p, TD_ERR_UNSUPPORTED, "\"%.*s\" outside of a loop", (int)word.n,
                                word.p);
        *ret = new_node(p, word.n == 5 ? N_BREAK : N_CONTINUE);
        return *ret != NULL && jinja_expect_end(p);
    }
    return jinja_refuse(p, TD_ERR_UNSUPPORTED, "the statement \"%.*s\"",
                        (int)(word.n < 40 ? word.n : 40), word.p);
}

/* Where the text [start, end) before a tag ends once the white space that the tag removes is gone.
 * tag: its second character, 0 for the end of the source; eat, keep: "-" or "+" follows it. */
static size_t end_of_text(const struct parser *p, size_t start, size_t end, char tag, bool eat,
                          bool keep)
{
    size_t text_end = end;
    if (eat) {
        while (text_end > start && jinja_is_space(p->src[text_end - 1])) text_end--;
    } else if (tag == '%' || tag == '#') {
        size_t line_start = end;
        while (line_start > start && p->src[line_start - 1] != '\n' &&
               jinja_is_space(p->src[line_start - 1]))
            line_start--;
        /* at `start`, the tag before may have eaten it */
        bool whole_line = line_start == 0 || p->src[line_start - 1] == '\n';
        if (whole_line && !keep) text_end = line_start;
    }
    return text_end;
}

/* Skips the comment whose text begins at p->at, and the white space that its end removes. */
static bool skip_comment(struct parser *p)
{
    size_t close = p->at;
    while (close < p->n && !jinja_starts(p, close, "#}")) close++;
    if (close >= p->n) return jinja_refuse(p, TD_ERR_UNSUPPORTED, "a comment does not end");
    for (size_t i = p->at; i < close; i++) p->line += p->src[i] == '\n';
    char sign = close > p->at ? p->src[close - 1] : 0;
    p->at = close + 2;
    if (sign == '-') {
        while (p->at < p->n && jinja_is_space(p->src[p->at])) p->line += p->src[p->at++] == '\n';
    } else if (sign != '+' && p->at < p->n && p->src[p->at] == '\n') {
        p->at++;
        p->line++;
    }
    return true;
}

/* Parses text and tags until a closing word (in *ret_closing, its tag still open) or the end of the
 * source (empty *ret_closing). */
static bool parse_nodes(struct parser *p, struct node **ret, struct str *ret_closing)
{
    struct node **last = ret;
    int depth = p->depth;

    p->depth += 4;
    if (p->depth > 4 * JINJA_MAX_DEPTH)
        return jinja_refuse(p, TD_ERR_LIMIT, "blocks nest too deep");
    *ret_closing = (struct str){NULL, 0};
    while (p->at < p->n) {
        size_t start = p->at, end = start;
        while (end < p->n && !(p->src[end] == '{' && end + 1 < p->n &&
                               strchr("{%#", p->src[end + 1]) != NULL && p->src[end + 1] != 0))
            end++;
        char tag = end < p->n ? p->src[end + 1] : 0;
        size_t text_end, tag_at = end;
        bool eat = tag != 0 && jinja_starts(p, end + 2, "-"),
             keep = tag != 0 && tag != '{' && jinja_starts(p, end + 2, "+");
        text_end = end_of_text(p, start, end, tag, eat, keep);
        if (text_end > start) {
            struct node *n = new_node(p, N_TEXT);
            if (n == NULL) return false;
            n->text = (struct str){p->src + start, text_end - start};
            *last = n;
            last = &n->next;
        }
        for (size_t i = start; i < end; i++) p->line += p->src[i] == '\n';
        p->at = end;
        if (tag == 0) break;
        p->at = tag_at + 2 + (eat || keep);
        if (tag == '#') {
            if (!skip_comment(p)) return false;
            continue;
        }
        p->in_block = tag == '%';
        p->brackets = 0;
        if (!jinja_next(p)) return false;
        struct node *n = NULL;
        if (tag == '{') {
            n = new_node(p, N_PRINT);
            if (n == NULL || !parse_expr(p, &n->e) || !jinja_expect_end(p)) return false;
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

td_status td_jinja_parse(const char *source, size_t n_bytes, struct td_jinja **ret_jinja,
                         struct td_err *err)
{
    if (n_bytes > TD_JINJA_MAX_SOURCE)
        return td_fail(err, TD_ERR_LIMIT, "chat template: %zu bytes, must be <= %u", n_bytes,
                       TD_JINJA_MAX_SOURCE);
    struct td_jinja *j = calloc(1, sizeof *j);
    if (j == NULL) return td_fail(err, TD_ERR_NOMEM, "chat template: no memory");
    j->arena.limit = (size_t)256 << 20;
    char *src = jinja_arena_alloc(&j->arena, n_bytes + 1);
    if (src == NULL) {
        td_jinja_free(j);
        return td_fail(err, TD_ERR_NOMEM, "chat template: no memory");
    }
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++) { /* \r\n and \r count as \n */
        if (source[i] == '\r') {
            src[n++] = '\n';
            i += i + 1 < n_bytes && source[i + 1] == '\n';
        } else {
            src[n++] = source[i];
        }
    }
    if (n > 0 && src[n - 1] == '\n') n--;

    struct parser p = {.arena = &j->arena, .src = src, .n = n, .line = 1, .err = err};
    struct str closing;
    bool ok = parse_nodes(&p, &j->root, &closing);
    if (ok && closing.n > 0)
        ok = jinja_refuse(&p, TD_ERR_UNSUPPORTED, "\"%.*s\" closes no block", (int)closing.n,
                          closing.p);
    if (!ok) {
        td_jinja_free(j);
        return p.status;
    }
    *ret_jinja = j;
    return TD_OK;
}

void td_jinja_free(struct td_jinja *jinja)
{
    if (jinja == NULL) return;
    jinja_arena_free(&jinja->arena);
    free(jinja);
}
