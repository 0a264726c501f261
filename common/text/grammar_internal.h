/* grammar_internal.h - the expressions that front ends build, and the automaton that they become.
 * Private to common/text/grammar*.c. */
#ifndef TD_TEXT_GRAMMAR_INTERNAL_H
#define TD_TEXT_GRAMMAR_INTERNAL_H

#include "common/text/grammar.h"

/* ---- expressions ----------------------------------------------------------------------------- */

enum td_expr_kind {
    TD_EXPR_CAT,   /* children in order; without children: the empty text */
    TD_EXPR_ALT,   /* one of the children */
    TD_EXPR_BYTES, /* one byte of a class: min */
    TD_EXPR_REP,   /* the child min..max times; max -1: without end */
    TD_EXPR_CALL,  /* the rule min */
};
struct td_expr {
    uint8_t kind;
    int32_t last, prev; /* last child; sibling before this one; -1: none */
    int32_t min, max;
};
struct td_byte_class {
    uint64_t bits[4];
};
struct td_rule {
    int32_t expr, start; /* start: node */
    bool called, ends, nullable;
    bool nothing; /* td_builder_prune: no text is of it, and nothing that has one calls it */
};

/* A grammar being built. The first error stays in `err`, and what is built after it is not used:
 * builders need no check of their own. */
struct td_builder {
    const char *what; /* kind, before every message */
    struct td_err *err;
    td_status status;
    struct td_expr *exprs;
    int32_t n_exprs, exprs_capacity;
    struct td_byte_class *classes; /* 0..255: that byte alone */
    int32_t n_classes, classes_capacity;
    struct td_rule *rules; /* 0: the whole output */
    int32_t n_rules, rules_capacity;
    char **reasons; /* of td_expr_nothing. Owned */
    int32_t n_reasons;
};

td_status td_builder_fail(struct td_builder *b, td_status code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
int32_t td_expr_new(struct td_builder *b, enum td_expr_kind kind, int32_t min, int32_t max);
void td_expr_add(struct td_builder *b, int32_t parent, int32_t child); /* as its last child */
int32_t td_expr_literal(struct td_builder *b, const char *bytes, size_t n);
int32_t td_expr_text(struct td_builder *b, const char *text); /* NUL-terminated */
int32_t td_expr_class(struct td_builder *b, const struct td_byte_class *c);
int32_t td_expr_rep(struct td_builder *b, int32_t child, int32_t min, int32_t max);
int32_t td_expr_cat(struct td_builder *b, int32_t first, int32_t second);
int32_t td_expr_alt(struct td_builder *b, int32_t first, int32_t second);
int32_t td_expr_call(struct td_builder *b, int32_t rule);
int32_t td_rule_new(struct td_builder *b); /* its expression is set later */
/* One of the texts. They are sorted in place, and equal beginnings are read once. */
int32_t td_expr_choice(struct td_builder *b, struct td_grammar_text *texts, size_t n);

/* A set of code points: ranges, sorted and apart after td_cps_normalize. */
struct td_cps {
    uint32_t (*v)[2];
    int32_t n, capacity;
};
#define TD_CP_MAX 0x10FFFFu
void td_cps_add(struct td_builder *b, struct td_cps *c, uint32_t lo, uint32_t hi);
void td_cps_normalize(struct td_cps *c);
void td_cps_invert(struct td_builder *b, struct td_cps *c);
bool td_cps_has(const struct td_cps *c, uint32_t cp);
void td_cps_free(struct td_cps *c);
/* UTF-8 of one code point of the set (surrogates are none). An empty set fails the builder. */
int32_t td_expr_cps(struct td_builder *b, struct td_cps *c);

/* ---- grammar_prune.c ------------------------------------------------------------------------- */

/* No text, and why: said where nothing is left of a rule that is asked for. */
int32_t td_expr_nothing(struct td_builder *b, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
void td_builder_free_reasons(struct td_builder *b);
/* Takes what has no text out of all expressions. Rules without an expression yet are left. */
void td_builder_prune(struct td_builder *b);
/* Fails where the rule has no text, after td_builder_prune. */
void td_rule_check(struct td_builder *b, int32_t rule);

/* ---- front ends: each fills rule 0 and those that it calls ----------------------------------- */

enum td_regex_use {
    TD_REGEX_OUTPUT,      /* the whole output */
    TD_REGEX_JSON_SEARCH, /* inside a JSON string, whose text it matches somewhere (pattern) */
    TD_REGEX_JSON_WHOLE,  /* inside a JSON string, all of its text */
};
int32_t td_expr_regex(struct td_builder *b, const char *text, size_t n, enum td_regex_use use);
/* And how many characters such a text has. */
struct td_lengths {
    int32_t min, max; /* max -1: any number, or more than a million */
};
int32_t td_expr_regex_lengths(struct td_builder *b, const char *text, size_t n,
                              enum td_regex_use use, struct td_lengths *ret_lengths);
/* Numbers by minimum, maximum, exclusiveMinimum, exclusiveMaximum and multipleOf of a schema. */
struct json_t;
int32_t td_expr_schema_number(struct td_builder *b, const struct json_t *schema, bool integer);
void td_grammar_read_ebnf(struct td_builder *b, const char *text, size_t n);
void td_grammar_read_schema(struct td_builder *b, const char *text, size_t n);
void td_grammar_read_json_object(struct td_builder *b);
void td_grammar_read_calls(struct td_builder *b, const char *text, size_t n);
/* ret_rules[i]: what the arguments of tools[i] may be, an object by its "parameters" (a JSON
 * schema; absent: the object without members). tools: [{"name", "parameters"}, ...]. */
void td_grammar_read_arguments(struct td_builder *b, const struct json_t *tools,
                               int32_t *ret_rules);

/* ---- the automaton --------------------------------------------------------------------------- */

enum td_node_kind {
    TD_NODE_END,   /* the rule ends */
    TD_NODE_BYTES, /* a byte of class a, then node b */
    TD_NODE_SPLIT, /* node a or node b */
    TD_NODE_CALL,  /* rule a, then node b */
};
struct td_node {
    uint8_t kind;
    int32_t a, b;
};

struct td_grammar {
    struct td_node *nodes; /* 0: the end of every rule */
    int32_t n_nodes, nodes_capacity;
    int32_t *rule_starts; /* [n_rules] */
    int32_t n_rules;
    /* Bytes that no class of the grammar tells apart are one column: tables have n_columns of
     * them. */
    uint8_t column_of[256];
    int32_t n_columns;
    uint64_t (*class_columns)[4]; /* [n_classes]: columns of a class */
    int32_t n_classes;
};

#endif
