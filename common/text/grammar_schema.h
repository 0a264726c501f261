/* grammar_schema.h - what the files of the JSON Schema compiler share. grammar_json.c turns a
 * schema into rules; grammar_array.c, grammar_object.c and grammar_number.c do it for these types;
 * grammar_merge.c makes one schema of two that both hold; grammar_condition.c resolves `not` and
 * `if`; grammar_value.c has the rules for any JSON value and for one. Private to these files. */
#ifndef TD_TEXT_GRAMMAR_SCHEMA_H
#define TD_TEXT_GRAMMAR_SCHEMA_H

#include <jansson.h>

#include "common/text/grammar_internal.h"

#define TD_SCHEMA_MAX_KEY_BYTES 1024
#define TD_SCHEMA_MAX_NAMES 16 /* schemas of names that are tried on names: a compilation each */

struct td_schema {
    struct td_builder *b;
    const json_t *root;
    int32_t n_seen;
    int32_t value, string, name_rest, comma; /* rules; 0: not made yet */
    struct {
        const json_t *target;
        int32_t rule;
    } * refs;
    int32_t n_refs;
    struct td_schema_names {
        char *text; /* a schema of names */
        struct td_grammar *grammar;
        struct td_matcher *matcher;
    } names[TD_SCHEMA_MAX_NAMES];
    int32_t n_names;
    size_t n_tried_bytes; /* of names that were tried on these */
    size_t n_work;        /* td_schema_work */
};

/* ---- grammar_json.c -------------------------------------------------------------------------- */

int32_t td_schema_expr(struct td_schema *s, const json_t *schema, int depth);
/* By the keywords of one type, which must be one of JSON Schema. */
int32_t td_schema_typed(struct td_schema *s, const json_t *schema, const char *type, int depth);
/* Without `type`: the type that its keywords speak of; NULL: of none. */
const char *td_schema_type_of_keywords(const json_t *schema);
/* Of `base` and `part` together. */
int32_t td_schema_together(struct td_schema *s, const json_t *base, const json_t *part, int depth);
/* "#", "#/..." : a part of this schema; NULL with the builder failed. */
const json_t *td_schema_resolve(struct td_schema *s, const json_t *ref);
/* Where the schema is a $ref and no more, what that leads to; NULL with the builder failed. */
const json_t *td_schema_follow(struct td_schema *s, const json_t *schema);
/* A count that a schema gives: -1 when absent or refused. */
int32_t td_schema_count(struct td_schema *s, const json_t *schema, const char *key);
bool td_schema_is_of_type(const json_t *v, const json_t *types);
/* Does a value of enum keep to lengths, pattern and bounds? Fails for keywords of its type that
 * would have to be tried on it. */
bool td_schema_keeps(struct td_schema *s, const json_t *schema, const json_t *v);
/* A number's minimum, maximum and exclusive ones, and a string's lengths. */
bool td_schema_in_bounds(const json_t *schema, const json_t *v);
/* NULL: there is none, or it is no number. */
const json_t *td_schema_bound(const json_t *schema, const char *key);
/* Is no number between minimum, maximum and exclusive ones? */
bool td_schema_bounds_cross(const json_t *schema);

/* ---- grammar_array.c, grammar_object.c ------------------------------------------------------- */

int32_t td_schema_array(struct td_schema *s, const json_t *schema, int depth);
/* The rule, behind a comma unless it is the first. */
int32_t td_schema_next_rule(struct td_schema *s, int32_t n_before, int32_t rule);
int32_t td_schema_object(struct td_schema *s, const json_t *schema, int depth);
/* Any string but texts[0..n), with its quotes; the texts are sorted in place, and none of them is
 * written with an escape. */
int32_t td_schema_other_text(struct td_schema *s, struct td_grammar_text *texts, size_t n);
/* Does it require a property that it does not allow? */
bool td_schema_is_contradiction(struct td_schema *s, const json_t *schema);
/* dependentRequired, dependentSchemas or dependencies (key), and the rest of the schema. */
int32_t td_schema_dependent(struct td_schema *s, const json_t *schema, const char *key, int depth);
/* Is the text valid by a schema of strings? key: whose schema it is, for what is said. What was
 * compiled for one text is kept for the others. */
bool td_schema_takes_text(struct td_schema *s, const char *key, json_t *of_texts, const char *text);
void td_schema_names_free(struct td_schema *s);

/* ---- grammar_merge.c ------------------------------------------------------------------------- */

/* Counts n steps, and fails when there are too many. */
void td_schema_work(struct td_schema *s, size_t n);
/* Does the word restrict, or is it refused? Others describe. */
bool td_schema_is_keyword(const char *key);
/* The first keyword that is not supported, or NULL. */
const char *td_schema_refused(const json_t *schema);
/* Does it restrict beyond the keyword `but`? */
bool td_schema_restricts(const json_t *schema, const char *but);
/* Fails where `type` has what JSON Schema does not: nothing would be of it. */
void td_schema_check_types(struct td_schema *s, const json_t *types);
bool td_schema_has_type(const json_t *types, const char *name);
bool td_json_is_above(const json_t *a, const json_t *b);
/* With arrays written as by draft 2020-12: prefixItems for a list of items, and items for
 * additionalItems beside it. A new reference, NULL without memory. */
json_t *td_schema_tuple(const json_t *schema);
/* What keeps to both: a new object. NULL with the builder failed. */
json_t *td_schema_merge(struct td_schema *s, const json_t *a, const json_t *b);
/* The same, but where a has an `if` or `not` that must be resolved before that of b can be, b
 * stands in its allOf. */
json_t *td_schema_join(struct td_schema *s, const json_t *a, const json_t *b);
/* Has a an `if` or `not` to resolve before that of b? */
bool td_schema_waits(const json_t *a, const json_t *b);
/* Has it an `if` or `not` to resolve before allOf? Then allOf has nothing else. */
bool td_schema_condition_first(struct td_schema *s, const json_t *schema);
/* A schema of both, unmerged: a new reference. */
json_t *td_schema_all_of(struct td_schema *s, json_t *a, json_t *b);
/* A new reference. */
json_t *td_json_without(const json_t *object, const char *key);

/* ---- grammar_condition.c --------------------------------------------------------------------- */

/* As JSON Schema compares: 1 and 1.0 are equal. */
bool td_json_is_same(const json_t *a, const json_t *b);
/* What both arrays have: a new reference. */
json_t *td_schema_common_values(struct td_schema *s, const json_t *a, const json_t *b);
/* Is it of enum, const and type alone, or anyOf of such? */
bool td_schema_is_plain(const json_t *x);
/* Do const or not, which must be plain, exclude a value of the enum beside them? */
bool td_schema_excludes(struct td_schema *s, const json_t *schema, const json_t *v);
/* Is it plain to see? */
bool td_schema_allows_nothing(struct td_schema *s, const json_t *schema);
/* With a plain not, and neither enum nor const. */
int32_t td_schema_without_not(struct td_schema *s, const json_t *schema, int depth);
/* With a not that is not plain; with an if. */
int32_t td_schema_not(struct td_schema *s, const json_t *schema, int depth);
int32_t td_schema_if(struct td_schema *s, const json_t *schema, int depth);

/* ---- grammar_value.c ------------------------------------------------------------------------- */

int32_t td_json_space(struct td_builder *b);
int32_t td_json_comma(struct td_builder *b);
int32_t td_json_quoted(struct td_builder *b, int32_t inside);
int32_t td_json_member(struct td_builder *b, int32_t name, int32_t value);
int32_t td_json_plain_char(struct td_builder *b);  /* stands in a string as it is */
int32_t td_json_string_char(struct td_builder *b); /* that, or escaped */
int32_t td_json_string(struct td_schema *s);
int32_t td_json_number(struct td_builder *b, bool integer);
int32_t td_json_object(struct td_schema *s); /* any */
int32_t td_json_value(struct td_schema *s);  /* any */
/* As JSON writes it shortest: malloc'd, NULL without memory. */
char *td_json_scalar(const json_t *v);
/* This value, spaces as everywhere. depth: 0 */
int32_t td_json_this_value(struct td_schema *s, const json_t *v, int depth);

#endif
