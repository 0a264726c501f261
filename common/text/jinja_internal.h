/* jinja_internal.h - what the six files of the template evaluator share. Internal to them.
 *
 *     source --jinja_lex.c--> tags and tokens --jinja_parse.c--> struct node, struct expr
 *            --jinja_eval.c--> text
 *
 * jinja_value.c has the arena, the values and the context of one rendering; jinja_filters.c has
 * what templates call: tests, filters, methods and functions; jinja_json.c turns JSON into values
 * and back. A function that returns false has written its reason to the parser's or the context's
 * td_err, and its caller returns at once. */
#ifndef TD_TEXT_JINJA_INTERNAL_H
#define TD_TEXT_JINJA_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "common/base/status.h"
#include "common/text/jinja.h"

#define JINJA_MAX_DEPTH 64 /* nested expressions and blocks */
#define JINJA_MAX_ARGS 16

struct chunk {
    struct chunk *next;
    size_t used, bytes;
    _Alignas(16) char data[];
};

struct arena {
    struct chunk *head;
    size_t total, limit; /* bytes that malloc gave, headers included */
};

struct str {
    const char *p;
    size_t n;
};

enum kind {
    UNDEFINED,
    NONE,
    BOOL,
    INT,
    REAL, /* only from JSON: templates compute with integers */
    STR,
    LIST,
    DICT,
    SPACE /* namespace() */,
    LOOP,
    MACRO,
    FUNCTION
};

struct list;
struct dict;
struct loop;
struct node;

struct value {
    enum kind kind;
    bool lazy;   /* LIST: a Python iterator, always true and without a length */
    bool markup; /* STR: of the filter safe; what is added to it would be escaped for HTML */
    union {
        int64_t i; /* BOOL, INT, FUNCTION */
        double real;
        struct str s;
        struct list *list;
        struct dict *dict; /* DICT, SPACE */
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

enum expr_kind {
    E_VALUE,
    E_NAME,
    E_ATTR,
    E_ITEM,
    E_SLICE,
    E_CALL,
    E_FILTER,
    E_TEST,
    E_NOT,
    E_AND,
    E_OR,
    E_NEG,
    E_BINARY,
    E_COMPARE,
    E_COND,
    E_LIST,
    E_DICT
};

enum op {
    OP_ADD,
    OP_SUB,
    OP_MUL,
    OP_MOD,
    OP_FLOOR,
    OP_CONCAT,
    OP_EQ,
    OP_NE,
    OP_LT,
    OP_LE,
    OP_GT,
    OP_GE,
    OP_IN,
    OP_NOT_IN
};

struct arg {
    struct arg *next;
    struct str name; /* empty: positional */
    struct expr *value;
    struct expr *key; /* E_DICT */
    enum op op;       /* E_COMPARE: the operator before value */
};

struct expr {
    enum expr_kind kind;
    enum op op;
    int line;
    struct value value; /* E_VALUE */
    struct str name;    /* E_NAME, E_ATTR, E_FILTER, E_TEST */
    struct expr *a, *b, *c, *d;
    struct arg *args;
};

enum node_kind {
    N_TEXT,
    N_PRINT,
    N_IF,
    N_FOR,
    N_SET,
    N_SET_BLOCK,
    N_MACRO,
    N_BREAK,
    N_CONTINUE,
    N_GROUP
};

struct target { /* for a, b in; parameters of a macro */
    struct target *next;
    struct str name;
    struct expr *fallback;
};

struct node {
    enum node_kind kind;
    int line;
    struct node *next;
    struct str text;         /* N_TEXT; N_MACRO: its name; N_SET: the namespace's attribute,
                                or empty */
    struct expr *e, *filter; /* condition, iterable, value; N_FOR: "if" */
    struct target *targets;
    struct node *body, *otherwise;
};

struct td_jinja {
    struct arena arena;
    struct node *root;
};

static inline bool str_is(struct str s, const char *word)
{
    return s.n == strlen(word) && memcmp(s.p, word, s.n) == 0;
}

static inline bool str_same(struct str a, struct str b)
{
    return a.n == b.n && (a.n == 0 || memcmp(a.p, b.p, a.n) == 0);
}

enum token_kind { T_END /* of the tag */, T_NAME, T_INT, T_STRING, T_OP };

struct token {
    enum token_kind kind;
    struct str text; /* decoded, for strings */
    int64_t i;
};

struct parser {
    struct arena *arena;
    const char *src;
    size_t n, at;
    int line, depth, loop_depth;
    bool in_block; /* the open tag is {% %}, else {{ }} */
    int brackets;
    struct token token;
    struct td_err *err;
    td_status status;
};

struct var {
    struct var *next;
    struct str name;
    struct value value;
};

struct scope {
    struct scope *parent;
    struct var *vars;
};

struct text { /* output being written; grows in the arena */
    char *p;
    size_t n, room;
};

enum flow { GO_ON, BREAK, CONTINUE };

struct ctx {
    struct arena arena;
    const struct td_jinja_input *input;
    struct scope *scope, *root;
    struct text *out;
    const struct text *final; /* the rendering itself, where out may be a macro's or a
                                 block's */
    uint64_t steps_left;
    int macro_depth, line;
    enum flow flow;
    struct td_err *err;
    td_status status;
};

struct args {
    int n, n_named;
    struct value v[JINJA_MAX_ARGS];  /* positional first, then named */
    struct str name[JINJA_MAX_ARGS]; /* empty: positional */
};

/* jinja_lex.c: tags and tokens. refuse writes the reason with its line and returns false. */
bool jinja_refuse(struct parser *p, td_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
void *jinja_parser_alloc(struct parser *p, size_t bytes);
bool jinja_is_space(char c);
bool jinja_starts(const struct parser *p, size_t at, const char *what);
bool jinja_next(struct parser *p);
bool jinja_at_op(const struct parser *p, const char *op);
bool jinja_at_name(const struct parser *p, const char *name);
bool jinja_expect_op(struct parser *p, const char *op);
bool jinja_expect_end(struct parser *p);
bool jinja_take_name(struct parser *p, struct str *ret);

/* jinja_value.c: the arena, values, the context of a rendering. fails writes the reason with its
 * line and returns false. step takes one of the remaining steps, and fails when there is none. */
void *jinja_arena_alloc(struct arena *a, size_t bytes);
void jinja_arena_free(struct arena *a);
bool jinja_fails(struct ctx *c, td_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
bool jinja_step(struct ctx *c);
void jinja_charge(struct ctx *c, struct value v);
void *jinja_ctx_alloc(struct ctx *c, size_t bytes);
bool jinja_append(struct ctx *c, struct text *t, struct str s);
struct value jinja_none_value(void);
struct value jinja_bool_value(bool b);
struct value jinja_int_value(int64_t i);
struct value jinja_str_value(const char *p, size_t n);
struct value jinja_word_value(const char *word);
bool jinja_new_list(struct ctx *c, size_t n, struct value *ret);
bool jinja_new_dict(struct ctx *c, enum kind kind, struct value *ret);
bool jinja_to_key(struct ctx *c, struct value v, struct str *ret);
struct value jinja_from_key(struct str key);
struct value *jinja_dict_find(const struct dict *d, struct str key);
bool jinja_dict_put(struct ctx *c, struct dict *d, struct str key, struct value v);
struct value *jinja_find_name(struct ctx *c, struct str name);
bool jinja_bind(struct ctx *c, struct scope *s, struct str name, struct value value);
size_t jinja_char_bytes(struct str s, size_t at);
size_t jinja_char_count(struct str s);
bool jinja_space_char(struct str s);
struct str jinja_strip(struct str s, const struct str *chars, bool left, bool right);
bool jinja_truth(struct value v);
bool jinja_to_text(struct ctx *c, struct value v, struct str *ret);
bool jinja_same(struct ctx *c, struct value a, struct value b, int depth);
const char *jinja_kind_name(enum kind k);
bool jinja_is_in(struct ctx *c, struct value item, struct value in, bool *ret);

/* jinja_filters.c: what templates call */
bool jinja_eval_args(struct ctx *c, const struct arg *list, struct args *ret);
bool jinja_run_test(struct ctx *c, struct str name, struct value v, const struct args *a,
                    bool *ret);
bool jinja_to_items(struct ctx *c, struct value v, struct value *ret);
bool jinja_get_item(struct ctx *c, struct value obj, struct value index, struct value *ret);
bool jinja_get_attr(struct ctx *c, struct value obj, struct str name, struct value *ret);
bool jinja_run_filter(struct ctx *c, struct str name, struct value v, const struct args *a,
                      struct value *ret);
bool jinja_str_method(struct ctx *c, struct str s, struct str name, const struct args *a,
                      struct value *ret);
bool jinja_dict_method(struct ctx *c, const struct dict *d, struct str name, const struct args *a,
                       struct value *ret);
/* The number of a global function, for FUNCTION values; -1 when none has that name. */
int jinja_function_find(struct str name);
bool jinja_call_function(struct ctx *c, int64_t which, const struct args *a, struct value *ret);
bool jinja_call_macro(struct ctx *c, const struct node *macro, const struct args *a,
                      struct value *ret);

/* jinja_json.c: the value of a JSON text, which errors call `what`; a JSON object when `object`.
 * tojson as transformers defines it; a real as Python writes it. */
bool jinja_from_json(struct ctx *c, struct td_chat_json json, bool object, const char *what,
                     struct value *ret);
bool jinja_tojson(struct ctx *c, struct value v, const struct args *a, struct value *ret);
bool jinja_real_text(struct ctx *c, double real, struct str *ret);

/* jinja_eval.c: the walk over the tree */
bool jinja_compare(struct ctx *c, enum op op, struct value a, struct value b, bool *ret);
bool jinja_eval(struct ctx *c, const struct expr *e, struct value *ret);
bool jinja_run_nodes(struct ctx *c, const struct node *n);

#endif
