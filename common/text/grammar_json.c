/* grammar_json.c - JSON, and the part of JSON Schema that an automaton can keep to.
 *
 * Every output is valid by the schema; not every valid instance can be an output:
 *   - properties come in the schema's order, extra ones after them; where `properties` is there
 *     and `additionalProperties` is not, there are none, nor where properties are named beside
 *     `patternProperties` or `propertyNames`, which are then tried on these names alone;
 *   - between two marks stands one space, or a line's end and at most 20 spaces, or nothing;
 *   - integers have at most 16 digits, fractions 16 digits, exponents 2; where a number has bounds
 *     or multipleOf, it has no exponent (grammar_number.c);
 *   - names of extra properties are written without escapes, names and values of the schema itself
 *     as JSON writes them shortest.
 * oneOf is read as anyOf. Keywords that restrict and are not here are refused by name; what only
 * describes is ignored, and so is a format without a row in `formats`. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_internal.h"
#include "common/text/tokenizer_text.h"

#define MAX_SCHEMAS 16384 /* looked at, merged ones included: branches of branches multiply */
#define MAX_REFS 4096
#define MAX_KEY_BYTES 1024
#define MAX_UNIQUE 8      /* values of uniqueItems: each set of them is a rule */
#define MAX_CONTAINS 2048 /* rules of contains: counts of elements times counts of minContains */
#define MAX_TRIED_BYTES 65536   /* of names on schemas of names */
#define MAX_NAMES 16            /* schemas of names that are tried on names: a compilation each */
#define MAX_DEPENDENTS 5        /* names of dependentRequired: each doubles the alternatives */
#define MAX_MULTIPLE 1000000000 /* of schemas that hold together */

struct schema {
    struct td_builder *b;
    const json_t *root;
    int32_t n_seen;
    int32_t value, string, name_rest, comma; /* rules; 0: not made yet */
    struct {
        const json_t *target;
        int32_t rule;
    } * refs;
    int32_t n_refs;
    struct names {
        char *text; /* a schema of names */
        struct td_grammar *grammar;
        struct td_matcher *matcher;
    } names[MAX_NAMES];
    int32_t n_names;
    size_t n_tried_bytes; /* of names that were tried on these */
};

static int32_t schema_expr(struct schema *s, const json_t *schema, int depth);
static int32_t together(struct schema *s, const json_t *base, const json_t *part, int depth);
static int32_t this_value(struct schema *s, const json_t *v, int depth);
static const json_t *resolve(struct schema *s, const json_t *ref);
static bool restricts(const json_t *schema, const char *but);
static bool has_type(const json_t *types, const char *name);
static bool is_of_type(const json_t *v, const json_t *types);
static bool is_above(const json_t *a, const json_t *b);
static bool keeps(struct schema *s, const json_t *schema, const json_t *v);

/* ---- JSON as such ---------------------------------------------------------------------------- */

static int32_t space(struct td_builder *b)
{
    int32_t line =
        td_expr_cat(b, td_expr_text(b, "\n"), td_expr_rep(b, td_expr_text(b, " "), 0, 20));
    return td_expr_rep(b, td_expr_alt(b, td_expr_text(b, " "), line), 0, 1);
}

/* Characters that stand in a string as they are. */
static int32_t plain_char(struct td_builder *b)
{
    struct td_cps set = {0};
    td_cps_add(b, &set, 0, 0x1F);
    td_cps_add(b, &set, '"', '"');
    td_cps_add(b, &set, '\\', '\\');
    td_cps_invert(b, &set);
    int32_t e = td_expr_cps(b, &set);
    td_cps_free(&set);
    return e;
}

/* No half of a surrogate pair: a reader of JSON may refuse it. */
static int32_t string_char(struct td_builder *b)
{
    static const char escapes[] =
        "\\\\([\"\\\\/bfnrt]|u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))";
    int32_t escaped = td_expr_regex(b, escapes, sizeof escapes - 1, TD_REGEX_OUTPUT);
    return td_expr_alt(b, plain_char(b), escaped);
}

static int32_t quoted(struct td_builder *b, int32_t inside)
{
    int32_t e = td_expr_cat(b, td_expr_text(b, "\""), inside);
    td_expr_add(b, e, td_expr_text(b, "\""));
    return e;
}

static int32_t string_rule(struct schema *s)
{
    if (!s->string) {
        s->string = td_rule_new(s->b);
        int32_t e = quoted(s->b, td_expr_rep(s->b, string_char(s->b), 0, -1));
        if (!s->b->status) s->b->rules[s->string].expr = e;
    }
    return td_expr_call(s->b, s->string);
}

static int32_t number_expr(struct td_builder *b, bool integer)
{
    static const char whole[] = "-?(0|[1-9][0-9]{0,15})";
    static const char real[] = "-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?";
    return integer ? td_expr_regex(b, whole, sizeof whole - 1, TD_REGEX_OUTPUT)
                   : td_expr_regex(b, real, sizeof real - 1, TD_REGEX_OUTPUT);
}

static int32_t comma(struct td_builder *b)
{
    return td_expr_cat(b, td_expr_text(b, ","), space(b));
}

/* OPEN space (item (comma item)*)? space CLOSE; `item` is used once, `again` once more. */
static int32_t list_of(struct td_builder *b, const char *open, int32_t item, int32_t again,
                       const char *close)
{
    int32_t rest = td_expr_rep(b, td_expr_cat(b, comma(b), again), 0, -1);
    int32_t items = td_expr_rep(b, td_expr_cat(b, item, rest), 0, 1);
    int32_t e = td_expr_cat(b, td_expr_text(b, open), space(b));
    td_expr_add(b, e, items);
    td_expr_add(b, e, space(b));
    td_expr_add(b, e, td_expr_text(b, close));
    return e;
}

static int32_t member(struct td_builder *b, int32_t name, int32_t value)
{
    int32_t e = td_expr_cat(b, name, td_expr_text(b, ":"));
    td_expr_add(b, e, space(b));
    td_expr_add(b, e, value);
    return e;
}

static int32_t value_call(struct schema *s);

static int32_t any_object(struct schema *s)
{
    struct td_builder *b = s->b;
    int32_t one = td_rule_new(b);
    int32_t e = member(b, string_rule(s), value_call(s));
    if (!b->status) b->rules[one].expr = e;
    return list_of(b, "{", td_expr_call(b, one), td_expr_call(b, one), "}");
}

static int32_t value_call(struct schema *s)
{
    struct td_builder *b = s->b;
    if (s->value || b->status) return td_expr_call(b, s->value);
    s->value = td_rule_new(b);
    int32_t alt = td_expr_alt(b, string_rule(s), number_expr(b, false));
    td_expr_add(b, alt, td_expr_text(b, "true"));
    td_expr_add(b, alt, td_expr_text(b, "false"));
    td_expr_add(b, alt, td_expr_text(b, "null"));
    td_expr_add(b, alt, any_object(s));
    td_expr_add(b, alt, list_of(b, "[", value_call(s), value_call(s), "]"));
    if (!b->status) b->rules[s->value].expr = alt;
    return td_expr_call(b, s->value);
}

void td_grammar_read_json_object(struct td_builder *b)
{
    struct schema s = {.b = b};
    int32_t e = any_object(&s);
    if (!b->status) b->rules[0].expr = e;
}

/* ---- numbers --------------------------------------------------------------------------------- */

static int32_t numbers(struct schema *s, const json_t *schema, bool integer)
{
    static const char *const keys[] = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum",
                                       "multipleOf"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (json_object_get(schema, keys[i])) return td_expr_schema_number(s->b, schema, integer);
    return number_expr(s->b, integer);
}

/* ---- strings --------------------------------------------------------------------------------- */

/* Readers know no year 0. 29 February is there in years that 4 divides, of the hundreds those that
 * 400 divides. */
#define BY_4 "(0[48]|[2468][048]|[13579][26])"
#define YEAR "(\\d{3}[1-9]|\\d\\d[1-9]0|\\d[1-9]00|[1-9]000)"
#define LEAP_YEAR "(\\d\\d" BY_4 "|" BY_4 "00)"
#define DATE                                                                                       \
    "(" YEAR "-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|"          \
    "02-(0[1-9]|1\\d|2[0-8]))|" LEAP_YEAR "-02-29)"
#define TIME "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,6})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)"

static const struct {
    const char *name, *regex;
} formats[] = {
    {"date", DATE},
    {"time", TIME},
    {"date-time", DATE "T" TIME},
    {"uuid", "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"},
    {"ipv4", "((25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)\\.){3}(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"},
};

/* A count that a schema gives: -1 when absent or refused. */
static int32_t count(struct schema *s, const json_t *schema, const char *key)
{
    const json_t *v = json_object_get(schema, key);
    if (!v) return -1;
    double x = json_is_number(v) ? json_number_value(v) : -1;
    if (x >= 0 && x == floor(x) && x <= TD_GRAMMAR_MAX_REPEAT) return (int32_t)x;
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
    td_builder_fail(s->b, TD_ERR_LIMIT, "%s is %.40s, must be a whole number in 0..%d", key,
                    text ? text : "?", TD_GRAMMAR_MAX_REPEAT);
    free(text);
    return -1;
}

/* NULL: one that only describes. */
static const char *regex_of_format(const json_t *format)
{
    for (size_t i = 0; json_is_string(format) && i < sizeof formats / sizeof *formats; i++)
        if (!strcmp(json_string_value(format), formats[i].name)) return formats[i].regex;
    return NULL;
}

static int32_t strings(struct schema *s, const json_t *schema)
{
    struct td_builder *b = s->b;
    int32_t min = count(s, schema, "minLength"), max = count(s, schema, "maxLength");
    const json_t *pattern = json_object_get(schema, "pattern"),
                 *format = json_object_get(schema, "format");
    const char *regex = regex_of_format(format);
    if ((pattern != NULL) + (regex != NULL) + (min > 0 || max >= 0) > 1) {
        td_builder_fail(b, TD_ERR_UNSUPPORTED,
                        "pattern, format and minLength/maxLength are supported one at a time");
        return 0;
    }
    if (pattern && !json_is_string(pattern)) {
        td_builder_fail(b, TD_ERR_INVALID, "pattern must be a string");
        return 0;
    }
    if (pattern)
        return quoted(b, td_expr_regex(b, json_string_value(pattern), json_string_length(pattern),
                                       TD_REGEX_JSON_SEARCH));
    if (regex) return quoted(b, td_expr_regex(b, regex, strlen(regex), TD_REGEX_JSON_WHOLE));
    if (min <= 0 && max < 0) return string_rule(s);
    if (min < 0) min = 0;
    if (max >= 0 && max < min) {
        td_builder_fail(b, TD_ERR_INVALID, "minLength is %d, above maxLength, %d", min, max);
        return 0;
    }
    return quoted(b, td_expr_rep(b, string_char(b), min, max));
}

/* ---- arrays ---------------------------------------------------------------------------------- */

/* An expression once more each time: the first use is the expression. */
static int32_t rule_of_schema(struct schema *s, const json_t *schema, int depth)
{
    int32_t rule = td_rule_new(s->b);
    int32_t e = schema_expr(s, schema, depth);
    if (!s->b->status) s->b->rules[rule].expr = e;
    return rule;
}

/* What a schema says of an array: its first k elements each by its own schema, the others alike. */
struct elements {
    const json_t *prefix, *items; /* NULL: absent */
    int32_t lo, hi, k;            /* how many elements: lo..hi, hi -1: any number */
    int32_t *rules;               /* [k] of the prefix. Owned */
    int32_t rest;                 /* the rule of the others; -1: there are none */
};

static bool read_elements(struct schema *s, const json_t *schema, struct elements *ret)
{
    struct td_builder *b = s->b;
    struct elements e = {.prefix = json_object_get(schema, "prefixItems"),
                         .items = json_object_get(schema, "items"),
                         .rest = -1};
    e.lo = count(s, schema, "minItems"), e.hi = count(s, schema, "maxItems");
    if (!e.items) e.items = json_object_get(schema, "unevaluatedItems");
    if (json_is_array(e.items)) {
        td_builder_fail(b, TD_ERR_UNSUPPORTED,
                        "items is an array: write prefixItems, the name since draft 2020-12");
        return false;
    }
    if (e.prefix && !json_is_array(e.prefix)) {
        td_builder_fail(b, TD_ERR_INVALID, "prefixItems must be an array");
        return false;
    }
    e.k = (int32_t)json_array_size(e.prefix);
    if (e.k > TD_GRAMMAR_MAX_PROPERTIES) {
        td_builder_fail(b, TD_ERR_LIMIT, "prefixItems has %d schemas, limit %d", e.k,
                        TD_GRAMMAR_MAX_PROPERTIES);
        return false;
    }
    if (e.lo < 0) e.lo = 0;
    if (json_is_false(e.items) && (e.hi < 0 || e.hi > e.k)) e.hi = e.k;
    for (int32_t i = e.k - 1; i >= 0; i--) /* the array ends before it */
        if (json_is_false(json_array_get(e.prefix, (size_t)i)) && (e.hi < 0 || e.hi > i)) e.hi = i;
    if (e.hi >= 0 && e.lo > e.hi) {
        td_builder_fail(b, TD_ERR_INVALID, "minItems is %d, above what may be there, %d", e.lo,
                        e.hi);
        return false;
    }
    if (e.hi >= 0 && e.k > e.hi) e.k = e.hi;
    *ret = e;
    return true;
}

static void element_rules(struct schema *s, struct elements *e, int depth)
{
    struct td_builder *b = s->b;
    e->rules = calloc((size_t)e->k + 1, sizeof *e->rules);
    if (!e->rules) td_builder_fail(b, TD_ERR_NOMEM, "no memory");
    for (int32_t i = 0; i < e->k && !b->status; i++)
        e->rules[i] = rule_of_schema(s, json_array_get(e->prefix, (size_t)i), depth + 1);
    if ((e->hi < 0 || e->hi > e->k) && !b->status) { /* without items: anything */
        e->rest = td_rule_new(b);
        int32_t x = e->items ? schema_expr(s, e->items, depth + 1) : value_call(s);
        if (!b->status) b->rules[e->rest].expr = x;
    }
}

/* What stands between the brackets. after[i] is what may follow i elements; it is a rule, so that
 * it is written once. */
static int32_t elements_expr(struct td_builder *b, const struct elements *l)
{
    int32_t tail = -1; /* the rule of after[i + 1] */
    int32_t from = l->k > 0 ? l->k : 1, body = td_expr_new(b, TD_EXPR_CAT, 0, 0);
    if (l->rest >= 0 && !b->status) {
        int32_t need = l->lo > from ? l->lo - from : 0;
        tail = td_rule_new(b);
        int32_t e = td_expr_rep(b, td_expr_cat(b, comma(b), td_expr_call(b, l->rest)), need,
                                l->hi < 0 ? -1 : l->hi - from);
        if (!b->status) b->rules[tail].expr = e;
    }
    for (int32_t i = l->k - 1; i >= 1 && !b->status; i--) { /* after[i]: element i, if any */
        int32_t e = td_expr_cat(b, comma(b), td_expr_call(b, l->rules[i]));
        if (tail >= 0) td_expr_add(b, e, td_expr_call(b, tail));
        tail = td_rule_new(b);
        if (!b->status) b->rules[tail].expr = i < l->lo ? e : td_expr_rep(b, e, 0, 1);
    }
    if (l->hi != 0 && (l->k > 0 || l->rest >= 0)) {
        int32_t e = td_expr_cat(b, td_expr_call(b, l->k > 0 ? l->rules[0] : l->rest),
                                td_expr_new(b, TD_EXPR_CAT, 0, 0));
        if (tail >= 0) td_expr_add(b, e, td_expr_call(b, tail));
        td_expr_add(b, body, l->lo > 0 ? e : td_expr_rep(b, e, 0, 1));
    }
    return body;
}

/* The rule, behind a comma unless it is the first. Commas are a rule too, so that thousands of them
 * take few nodes. */
static int32_t next_rule(struct schema *s, int32_t n_before, int32_t rule)
{
    struct td_builder *b = s->b;
    if (n_before == 0) return td_expr_call(b, rule);
    if (!s->comma) {
        s->comma = td_rule_new(b);
        int32_t e = comma(b);
        if (!b->status) b->rules[s->comma].expr = e;
    }
    return td_expr_cat(b, td_expr_call(b, s->comma), td_expr_call(b, rule));
}

static bool is_equal(const json_t *a, const json_t *b)
{
    return json_is_number(a) && json_is_number(b) ? !is_above(a, b) && !is_above(b, a)
                                                  : json_equal(a, b);
}

/* All values of a schema that has few: no two equal ones. A new reference, NULL: the builder has
 * failed. */
static json_t *few_values(struct schema *s, const json_t *items)
{
    const json_t *ref, *list, *v;
    for (int hops = 0; (ref = json_object_get(items, "$ref")) && !restricts(items, "$ref"); hops++)
        if (!(items = resolve(s, ref)) || hops > TD_GRAMMAR_MAX_DEPTH) break;
    json_t *all = json_pack("[b,b,n]", 1, 0), *few = json_array(), *one = NULL;
    const json_t *type = json_object_get(items, "type");
    bool few_types = type && !has_type(type, "string") && !has_type(type, "number") &&
                     !has_type(type, "integer") && !has_type(type, "object") &&
                     !has_type(type, "array");
    size_t i, k;
    list = few_types ? all : NULL;
    if (json_object_get(items, "const"))
        list = one = json_pack("[O]", json_object_get(items, "const"));
    if (json_object_get(items, "enum")) list = json_object_get(items, "enum");
    if (json_object_get(items, "anyOf") || json_object_get(items, "oneOf") ||
        json_object_get(items, "allOf") || ref)
        list = NULL;
    if (!list || json_array_size(list) > TD_GRAMMAR_MAX_CHOICES)
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "uniqueItems is supported where items is an enum, or maxItems 1");
    json_array_foreach(list, i, v)
    {
        if (s->b->status || !is_of_type(v, type) || !keeps(s, items, v)) continue;
        for (k = 0; k < json_array_size(few) && !is_equal(json_array_get(few, k), v);) k++;
        if (k == json_array_size(few)) json_array_append(few, (json_t *)v);
        if (json_is_object(v) || json_is_array(v) || k >= MAX_UNIQUE)
            td_builder_fail(s->b, TD_ERR_LIMIT,
                            "uniqueItems is supported for enums of at most %d strings, numbers, "
                            "booleans and null",
                            MAX_UNIQUE);
    }
    json_decref(all);
    json_decref(one);
    if (!s->b->status) return few;
    json_decref(few);
    return NULL;
}

/* Each value at most once: at[set] is what may follow the values of the set. */
static int32_t unique_expr(struct schema *s, const struct elements *l)
{
    struct td_builder *b = s->b;
    int32_t rules[MAX_UNIQUE], at[1 << MAX_UNIQUE];
    json_t *few = few_values(s, l->items);
    int32_t n = (int32_t)json_array_size(few), hi = l->hi < 0 || l->hi > n ? n : l->hi;
    if (l->k)
        td_builder_fail(b, TD_ERR_UNSUPPORTED, "uniqueItems beside prefixItems is not supported");
    if (l->lo > n)
        td_builder_fail(b, TD_ERR_INVALID, "uniqueItems: minItems is %d, and items has %d values",
                        l->lo, n);
    for (int32_t i = 0; i < n && !b->status; i++) {
        rules[i] = td_rule_new(b);
        int32_t e = this_value(s, json_array_get(few, (size_t)i), 0);
        if (!b->status) b->rules[rules[i]].expr = e;
    }
    json_decref(few);
    for (int32_t set = (1 << n) - 1; set >= 0 && !b->status; set--) {
        int32_t used = __builtin_popcount((unsigned)set);
        if (used > hi) continue;
        int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
        if (used >= l->lo) td_expr_add(b, alt, td_expr_new(b, TD_EXPR_CAT, 0, 0));
        for (int32_t i = 0; i < n && used < hi; i++)
            if (!(set >> i & 1))
                td_expr_add(b, alt,
                            td_expr_cat(b, next_rule(s, used, rules[i]),
                                        td_expr_call(b, at[set | 1 << i])));
        at[set] = td_rule_new(b);
        if (!b->status) b->rules[at[set]].expr = alt;
    }
    return b->status ? 0 : td_expr_call(b, at[0]);
}

/* What keeps to both schemas of an element. */
static int32_t contained(struct schema *s, const json_t *items, const json_t *contains, int depth)
{
    return json_is_object(items) ? together(s, items, contains, depth)
                                 : schema_expr(s, contains, depth + 1);
}

/* At least `need` elements keep to `contains`. at[t * (need + 1) + c]: what may follow t elements,
 * c of which have been chosen to. Without maxItems t stays at `last`. */
static int32_t contains_expr(struct schema *s, const json_t *schema, const struct elements *l,
                             int32_t need, int depth)
{
    struct td_builder *b = s->b;
    int32_t last = l->hi >= 0 ? l->hi : l->lo > need ? l->lo : need, width = need + 1;
    int64_t n_states = ((int64_t)last + 1) * width;
    if (l->k || json_is_true(json_object_get(schema, "uniqueItems")))
        td_builder_fail(b, TD_ERR_UNSUPPORTED,
                        "contains beside prefixItems or uniqueItems is not supported");
    if (l->hi >= 0 && need > l->hi)
        td_builder_fail(b, TD_ERR_INVALID, "minContains is %d, above what may be there, %d", need,
                        l->hi);
    if (n_states > MAX_CONTAINS)
        td_builder_fail(b, TD_ERR_LIMIT, "contains: %lld counts of items and minContains, limit %d",
                        (long long)n_states, MAX_CONTAINS);
    int32_t *at = b->status ? NULL : calloc((size_t)n_states, sizeof *at), result = 0;
    if (!at) td_builder_fail(b, TD_ERR_NOMEM, "no memory for contains");
    if (!b->status) {
        int32_t chosen = td_rule_new(b);
        int32_t e = contained(s, l->items, json_object_get(schema, "contains"), depth);
        if (!b->status) b->rules[chosen].expr = e;
        for (int32_t i = 0; i < n_states; i++) at[i] = td_rule_new(b);
        for (int32_t i = 0; i < n_states && !b->status; i++) {
            int32_t t = i / width, c = i % width, to = t < last ? i + width : i;
            int32_t left = l->hi < 0 ? need : l->hi - t; /* elements that may come */
            int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
            if ((t >= l->lo && c == need) || need - c > left) /* the latter is never reached */
                td_expr_add(b, alt, td_expr_new(b, TD_EXPR_CAT, 0, 0));
            if (left > 0 && c < need)
                td_expr_add(b, alt,
                            td_expr_cat(b, next_rule(s, t, chosen), td_expr_call(b, at[to + 1])));
            if (left > need - c || (l->hi < 0))
                td_expr_add(b, alt,
                            td_expr_cat(b, next_rule(s, t, l->rest), td_expr_call(b, at[to])));
            if (!b->status) b->rules[at[i]].expr = alt;
        }
        result = td_expr_call(b, at[0]);
    }
    free(at);
    return result;
}

static int32_t arrays(struct schema *s, const json_t *schema, int depth)
{
    struct td_builder *b = s->b;
    const json_t *unique = json_object_get(schema, "uniqueItems");
    struct elements l;
    if (unique && !json_is_boolean(unique))
        td_builder_fail(b, TD_ERR_INVALID, "uniqueItems must be true or false");
    if (!read_elements(s, schema, &l)) return 0;
    int32_t need = count(s, schema, "minContains");
    if (need < 0) need = 1;
    if (!json_object_get(schema, "contains")) need = 0;
    element_rules(s, &l, depth);
    int32_t body = 0;
    if (need > 0)
        body = contains_expr(s, schema, &l, need, depth);
    else if (json_is_true(unique) && (l.hi < 0 || l.hi > 1))
        body = unique_expr(s, &l);
    else
        body = elements_expr(b, &l);
    free(l.rules);
    int32_t e = td_expr_cat(b, td_expr_text(b, "["), space(b));
    td_expr_add(b, e, body);
    td_expr_add(b, e, space(b));
    td_expr_add(b, e, td_expr_text(b, "]"));
    return e;
}

/* ---- objects --------------------------------------------------------------------------------- */

static int compare_names(const void *x, const void *y)
{
    const struct td_grammar_text *a = x, *b = y;
    size_t n = a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes;
    int c = n ? memcmp(a->bytes, b->bytes, n) : 0;
    return c ? c : (a->n_bytes > b->n_bytes) - (a->n_bytes < b->n_bytes);
}

/* The rest of a name, and its quote, that is none of names[0..n), which are sorted and agree in
 * their first `at` bytes. */
static int32_t other_name(struct schema *s, const struct td_grammar_text *names, size_t n,
                          size_t at)
{
    struct td_builder *b = s->b;
    struct td_cps first = {0};
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
    size_t i = 0;
    while (i < n && names[i].n_bytes == at) i++;
    if (i == 0) td_expr_add(b, alt, td_expr_text(b, "\""));
    td_cps_add(b, &first, 0, 0x1F);
    td_cps_add(b, &first, '"', '"');
    td_cps_add(b, &first, '\\', '\\');
    for (size_t k; i < n && !b->status; i = k) {
        uint32_t cp = 0;
        int len = td_utf8_next(names[i].bytes + at, names[i].n_bytes - at, &cp);
        TD_ASSERT(len > 0);
        for (k = i + 1; k < n && names[k].n_bytes >= at + (size_t)len &&
                        !memcmp(names[k].bytes + at, names[i].bytes + at, (size_t)len);)
            k++;
        td_cps_add(b, &first, cp, cp);
        td_expr_add(b, alt,
                    td_expr_cat(b, td_expr_literal(b, names[i].bytes + at, (size_t)len),
                                other_name(s, names + i, k - i, at + (size_t)len)));
    }
    td_cps_invert(b, &first);
    if (!s->name_rest && !b->status) {
        s->name_rest = td_rule_new(b);
        int32_t e = td_expr_cat(b, td_expr_rep(b, plain_char(b), 0, -1), td_expr_text(b, "\""));
        if (!b->status) b->rules[s->name_rest].expr = e;
    }
    td_expr_add(b, alt, td_expr_cat(b, td_expr_cps(b, &first), td_expr_call(b, s->name_rest)));
    td_cps_free(&first);
    return alt;
}

struct members {
    struct {
        const char *name;
        const json_t *schema; /* NULL: anything */
        int32_t rule;
        bool declared, required, absent; /* absent: must not be there */
    } v[2 * TD_GRAMMAR_MAX_PROPERTIES];
    int32_t n;
    json_t *made; /* schemas made of several. Owned */
};

static void add_member(struct schema *s, struct members *m, const char *name, const json_t *schema)
{
    if (m->n == TD_GRAMMAR_MAX_PROPERTIES)
        td_builder_fail(s->b, TD_ERR_LIMIT, "an object has more than %d properties, the limit",
                        TD_GRAMMAR_MAX_PROPERTIES);
    else if (strlen(name) > MAX_KEY_BYTES)
        td_builder_fail(s->b, TD_ERR_LIMIT, "the name of a property has %zu bytes, limit %d",
                        strlen(name), MAX_KEY_BYTES);
    if (s->b->status) return;
    m->v[m->n].name = name;
    m->v[m->n++].schema = schema;
}

static void read_members(struct schema *s, const json_t *schema, struct members *m)
{
    const json_t *properties = json_object_get(schema, "properties"),
                 *required = json_object_get(schema, "required");
    const char *key;
    json_t *value;
    size_t i;
    if (properties && !json_is_object(properties))
        td_builder_fail(s->b, TD_ERR_INVALID, "properties must be an object");
    if (required && !json_is_array(required))
        td_builder_fail(s->b, TD_ERR_INVALID, "required must be an array of names");
    json_object_foreach((json_t *)properties, key, value)
    {
        add_member(s, m, key, value);
        if (!s->b->status) m->v[m->n - 1].declared = true;
    }
    json_array_foreach(required, i, value)
    {
        const char *name = json_string_value(value);
        int32_t k = 0;
        if (!name) td_builder_fail(s->b, TD_ERR_INVALID, "required must be an array of names");
        if (s->b->status) return;
        while (k < m->n && strcmp(m->v[k].name, name)) k++;
        if (k == m->n) add_member(s, m, name, NULL);
        if (!s->b->status) m->v[k].required = true;
    }
}

/* Is the name valid by a schema of names? What was compiled for one is kept for the others. */
static bool is_name(struct schema *s, const char *key, json_t *of_names, const char *name)
{
    struct names *n = s->names;
    char *text = json_dumps(of_names, JSON_COMPACT);
    json_t *value = json_string(name);
    char *quoted_name = value ? json_dumps(value, JSON_ENCODE_ANY) : NULL;
    struct td_err err = {0};
    int32_t state = TD_MATCHER_DEAD;
    bool is = false;
    if (!text || !quoted_name)
        td_builder_fail(s->b, TD_ERR_NOMEM, "no memory for %s", key);
    else if (strstr(quoted_name, "\\u") || strstr(text, "\"$ref\""))
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "%s beside a property whose name has control characters, or with $ref, is "
                        "not supported",
                        key);
    if (quoted_name && (s->n_tried_bytes += 8 + strlen(quoted_name)) > MAX_TRIED_BYTES)
        td_builder_fail(s->b, TD_ERR_LIMIT,
                        "names of properties are tried on patternProperties and propertyNames for "
                        "more than %d bytes, the limit",
                        MAX_TRIED_BYTES);
    while (text && n < s->names + s->n_names && strcmp(n->text, text)) n++;
    if (!s->b->status && n == s->names + MAX_NAMES) {
        td_builder_fail(s->b, TD_ERR_LIMIT,
                        "more than %d patternProperties and propertyNames beside properties, the "
                        "limit",
                        MAX_NAMES);
    } else if (!s->b->status && n == s->names + s->n_names) {
        struct td_grammar_text t = {text, strlen(text)};
        td_status status = td_grammar_compile(TD_GRAMMAR_JSON_SCHEMA, &t, 1, &n->grammar, &err);
        if (!status) status = td_matcher_create(n->grammar, NULL, NULL, 0, &n->matcher, &err);
        if (status) td_builder_fail(s->b, status, "%s: %.180s", key, err.msg);
        n->text = text, text = NULL;
        s->n_names++;
    }
    if (!s->b->status) {
        td_status status = td_matcher_advance(n->matcher, td_matcher_start(n->matcher), quoted_name,
                                              strlen(quoted_name), &state);
        if (status) td_builder_fail(s->b, status, "%s is too ambiguous for %.64s", key, name);
        is = !status && td_matcher_accepts(n->matcher, state);
        td_matcher_trim(n->matcher);
    }
    json_decref(value);
    free(quoted_name);
    free(text);
    return is;
}

static void names_free(struct schema *s)
{
    for (int32_t i = 0; i < s->n_names; i++) {
        td_matcher_free(s->names[i].matcher);
        td_grammar_free(s->names[i].grammar);
        free(s->names[i].text);
    }
}

/* What keeps to both, borrowed: one of the two, or a schema in m->made. NULL: anything. */
static const json_t *both_schemas(struct members *m, const json_t *a, const json_t *b)
{
    if (!a || json_is_true(a) || json_is_false(b)) return b;
    if (json_is_true(b) || json_is_false(a)) return a;
    json_t *made = json_pack("{s:[O,O]}", "allOf", a, b);
    if (made) json_array_append_new(m->made, made);
    return made;
}

/* The schema of each member from all keywords that speak of its name. */
static void member_schemas(struct schema *s, const json_t *schema, struct members *m,
                           const json_t *extra)
{
    json_t *patterns = json_object_get(schema, "patternProperties"),
           *of_names = json_object_get(schema, "propertyNames"), *value;
    const char *pattern;
    if (patterns && !json_is_object(patterns))
        td_builder_fail(s->b, TD_ERR_INVALID, "patternProperties must be an object");
    if (of_names && !json_is_object(of_names) && !json_is_boolean(of_names))
        td_builder_fail(s->b, TD_ERR_INVALID, "propertyNames must be a schema");
    for (int32_t i = 0; i < m->n && !s->b->status; i++) {
        bool known = m->v[i].declared;
        json_object_foreach(patterns, pattern, value)
        {
            json_t *names = json_pack("{s:s,s:s}", "type", "string", "pattern", pattern);
            if (is_name(s, "patternProperties", names, m->v[i].name)) {
                m->v[i].schema = both_schemas(m, m->v[i].schema, value);
                known = true;
            }
            json_decref(names);
        }
        if (!known) m->v[i].schema = extra;
        if (json_is_object(of_names)) {
            json_t *names = json_pack("{s:[{s:s},O]}", "allOf", "type", "string", of_names);
            if (!is_name(s, "propertyNames", names, m->v[i].name)) m->v[i].schema = json_false();
            json_decref(names);
        }
        m->v[i].absent = json_is_false(m->v[i].schema) || json_is_false(of_names);
        if (m->v[i].absent && m->v[i].required)
            td_builder_fail(s->b, TD_ERR_INVALID,
                            known ? "property %.64s is required and false"
                                  : "required has %.64s, which properties and "
                                    "additionalProperties do not allow",
                            m->v[i].name);
    }
}

/* A rule for each member; the names that are written without an escape go to names. Returns how
 * many these are. */
static int32_t member_rules(struct schema *s, struct members *m, struct td_grammar_text *names,
                            int depth)
{
    struct td_builder *b = s->b;
    int32_t n_names = 0;
    for (int32_t i = 0; !b->status && i < m->n; i++) {
        json_t *name = json_string(m->v[i].name);
        char *text = name ? json_dumps(name, JSON_ENCODE_ANY) : NULL;
        if (!text) td_builder_fail(b, TD_ERR_NOMEM, "no memory for a property's name");
        if (!b->status && !m->v[i].absent) {
            int32_t rule = m->v[i].rule = td_rule_new(b);
            int32_t value =
                m->v[i].schema ? schema_expr(s, m->v[i].schema, depth + 1) : value_call(s);
            int32_t e = b->status ? 0 : member(b, td_expr_text(b, text), value);
            if (!b->status) b->rules[rule].expr = e;
        }
        if (text && !strchr(text, '\\'))
            names[n_names++] = (struct td_grammar_text){m->v[i].name, strlen(m->v[i].name)};
        free(text);
        json_decref(name);
    }
    return n_names;
}

/* The names that patternProperties or propertyNames allow, and their schema; -1: none. Declared
 * names cannot be told apart from them, so that beside these there are none. */
static int32_t restricted_name(struct schema *s, const json_t *schema, const struct members *m,
                               const json_t **ret_value, int depth)
{
    struct td_builder *b = s->b;
    json_t *patterns = json_object_get(schema, "patternProperties"),
           *of_names = json_object_get(schema, "propertyNames"), *value;
    const json_t *first = NULL;
    const char *pattern;
    if (m->n || json_is_false(of_names)) return -1;
    if (!patterns) {
        json_t *names = json_pack("{s:[{s:s},O]}", "allOf", "type", "string", of_names);
        int32_t e = schema_expr(s, names, depth + 1);
        json_decref(names);
        return e;
    }
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
    json_object_foreach(patterns, pattern, value)
    {
        if (first && !json_equal(first, value))
            td_builder_fail(b, TD_ERR_UNSUPPORTED,
                            "patternProperties of several schemas are not supported");
        first = value;
        td_expr_add(b, alt,
                    quoted(b, td_expr_regex(b, pattern, strlen(pattern), TD_REGEX_JSON_SEARCH)));
    }
    if (of_names)
        td_builder_fail(b, TD_ERR_UNSUPPORTED,
                        "patternProperties beside propertyNames is not supported");
    if (json_is_false(first))
        td_builder_fail(b, TD_ERR_UNSUPPORTED, "patternProperties with false is not supported");
    *ret_value = first;
    return alt;
}

/* The rule of a member of another name; -1: there are none. */
static int32_t extra_rule(struct schema *s, const json_t *schema, const json_t *extra,
                          const struct members *m, struct td_grammar_text *names, int32_t n_names,
                          int depth)
{
    struct td_builder *b = s->b;
    const json_t *of_names = json_object_get(schema, "propertyNames");
    bool has_patterns = json_object_size(json_object_get(schema, "patternProperties")) > 0;
    bool closed = extra ? json_is_false(extra) : json_object_get(schema, "properties") != NULL;
    int32_t name;
    if (closed && !has_patterns) return -1;
    if (has_patterns || (of_names && !json_is_true(of_names))) {
        name = restricted_name(s, schema, m, &extra, depth);
        if (name < 0) return -1;
    } else {
        qsort(names, (size_t)n_names, sizeof *names, compare_names);
        name = td_expr_cat(b, td_expr_text(b, "\""), other_name(s, names, (size_t)n_names, 0));
    }
    int32_t rule = td_rule_new(b);
    int32_t value = extra ? schema_expr(s, extra, depth + 1) : value_call(s);
    int32_t e = member(b, name, value);
    if (!b->status) b->rules[rule].expr = e;
    return rule;
}

/* at[c], of c = 0..cap: the rule of what may stand where c members are there, cap of them or more;
 * -1: no object has that. */
struct places {
    int32_t min, max; /* members; max -1: any number */
    int32_t cap;
    int32_t *at; /* [cap + 1]. Owned */
};

static bool read_places(struct schema *s, const json_t *schema, struct places *p)
{
    p->min = count(s, schema, "minProperties"), p->max = count(s, schema, "maxProperties");
    p->cap = p->max >= 0 ? p->max : p->min > 1 ? p->min : 1;
    if (!s->b->status) p->at = calloc((size_t)p->cap + 1, sizeof *p->at);
    if (!s->b->status && !p->at) td_builder_fail(s->b, TD_ERR_NOMEM, "no memory for places");
    return p->at != NULL;
}

/* A member behind c others; where they are not counted, its comma is written out. */
static int32_t next_place(struct schema *s, const struct places *p, int32_t c, int32_t rule)
{
    if (c == 0 || p->cap > 1) return next_rule(s, c, rule);
    return td_expr_cat(s->b, comma(s->b), td_expr_call(s->b, rule));
}

/* Behind all named members. A name may come twice, and is one member to most readers: for
 * minProperties one extra member counts, whatever follows it. */
static void extra_places(struct schema *s, int32_t extra, struct places *p)
{
    struct td_builder *b = s->b;
    for (int32_t c = p->cap; c >= 0 && !b->status; c--) {
        bool may_end = c >= p->min, full = p->max >= 0 && c >= p->max;
        bool more = extra >= 0 && !full && c + 1 >= p->min;
        p->at[c] = -1;
        if (!may_end && !more) continue;
        int32_t rule = td_rule_new(b), e;
        if (!more) {
            e = td_expr_new(b, TD_EXPR_CAT, 0, 0);
        } else if (c == p->cap) {
            e = td_expr_rep(b, next_place(s, p, c, extra), 0, -1);
        } else {
            e = td_expr_cat(b, next_place(s, p, c, extra), td_expr_call(b, p->at[c + 1]));
            if (may_end) e = td_expr_rep(b, e, 0, 1);
        }
        if (!b->status) b->rules[p->at[c] = rule].expr = e;
    }
}

/* Puts the named members before what *p allows, from the last to the first. */
static void chain_members(struct schema *s, const struct members *m, struct places *p)
{
    struct td_builder *b = s->b;
    for (int32_t i = m->n - 1; i >= 0; i--) {
        for (int32_t c = 0; c <= p->cap && !b->status && !m->v[i].absent; c++) {
            int32_t next = p->at[c < p->cap ? c + 1 : c], skip = m->v[i].required ? -1 : p->at[c];
            if (c > i || (p->max >= 0 && c >= p->max)) next = -1; /* c > i: never so many */
            if (next < 0) {
                p->at[c] = skip;
                continue;
            }
            int32_t e = td_expr_cat(b, next_place(s, p, c, m->v[i].rule), td_expr_call(b, next));
            if (skip >= 0) e = td_expr_alt(b, e, td_expr_call(b, skip));
            p->at[c] = td_rule_new(b);
            if (!b->status) b->rules[p->at[c]].expr = e;
        }
    }
}

static int32_t object_of(struct schema *s, const json_t *schema, const json_t *extra,
                         struct members *m, struct td_grammar_text *names, int depth)
{
    struct td_builder *b = s->b;
    struct places p = {0};
    read_members(s, schema, m);
    member_schemas(s, schema, m, extra);
    if (b->status || !read_places(s, schema, &p)) return 0;
    int32_t n_names = member_rules(s, m, names, depth);
    int32_t rule = b->status ? 0 : extra_rule(s, schema, extra, m, names, n_names, depth);
    if (!b->status) extra_places(s, rule, &p);
    if (!b->status) chain_members(s, m, &p);
    if (!b->status && p.at[0] < 0)
        td_builder_fail(b, TD_ERR_INVALID,
                        "minProperties is %d, more than the names that can be told apart", p.min);
    int32_t e = td_expr_cat(b, td_expr_text(b, "{"), space(b));
    if (!b->status) td_expr_add(b, e, td_expr_call(b, p.at[0]));
    td_expr_add(b, e, space(b));
    td_expr_add(b, e, td_expr_text(b, "}"));
    free(p.at);
    return e;
}

static int32_t objects(struct schema *s, const json_t *schema, int depth)
{
    static const char *const keys[] = {"additionalProperties",
                                       "unevaluatedProperties",
                                       "properties",
                                       "required",
                                       "patternProperties",
                                       "propertyNames",
                                       "minProperties",
                                       "maxProperties",
                                       NULL};
    const json_t *extra = json_object_get(schema, "additionalProperties");
    bool any = true;
    for (const char *const *k = keys; *k; k++) any = any && !json_object_get(schema, *k);
    if (any) return any_object(s);
    /* All that evaluates properties has been merged into this schema. */
    if (!extra) extra = json_object_get(schema, "unevaluatedProperties");
    struct members *m = calloc(1, sizeof *m);
    struct td_grammar_text *names = calloc(2 * TD_GRAMMAR_MAX_PROPERTIES, sizeof *names);
    int32_t e = 0;
    if (m) m->made = json_array();
    if (!m || !names || !m->made)
        td_builder_fail(s->b, TD_ERR_NOMEM, "no memory for an object's properties");
    else
        e = object_of(s, schema, extra, m, names, depth);
    if (m) json_decref(m->made);
    free(m);
    free(names);
    return e;
}

/* ---- schemas --------------------------------------------------------------------------------- */

static bool is_one_of(const char *key, const char *const *names)
{
    for (; *names; names++)
        if (!strcmp(key, *names)) return true;
    return false;
}

static const char *const refused[] = {"not",
                                      "if",
                                      "then",
                                      "else",
                                      "dependencies",
                                      "maxContains",
                                      "additionalItems",
                                      "$dynamicRef",
                                      "$recursiveRef",
                                      NULL};
/* The other keywords that are read here; any further one describes, or is not of JSON Schema. */
static const char *const restricting[] = {"type",
                                          "enum",
                                          "const",
                                          "properties",
                                          "required",
                                          "additionalProperties",
                                          "items",
                                          "prefixItems",
                                          "minItems",
                                          "maxItems",
                                          "minLength",
                                          "maxLength",
                                          "pattern",
                                          "format",
                                          "minimum",
                                          "maximum",
                                          "exclusiveMinimum",
                                          "exclusiveMaximum",
                                          "multipleOf",
                                          "uniqueItems",
                                          "contains",
                                          "minContains",
                                          "unevaluatedItems",
                                          "unevaluatedProperties",
                                          "patternProperties",
                                          "propertyNames",
                                          "minProperties",
                                          "maxProperties",
                                          "dependentRequired",
                                          "dependentSchemas",
                                          "anyOf",
                                          "oneOf",
                                          "allOf",
                                          "$ref",
                                          NULL};

/* Does it restrict beyond the keyword `but`? */
static bool restricts(const json_t *schema, const char *but)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)schema, key,
                        value) if (strcmp(key, but) && is_one_of(key, restricting)) return true;
    return false;
}

static bool has_type(const json_t *types, const char *name)
{
    size_t i;
    const json_t *t;
    if (!types) return true;
    if (json_is_string(types)) return !strcmp(json_string_value(types), name);
    json_array_foreach(types, i,
                       t) if (json_is_string(t) && !strcmp(json_string_value(t), name)) return true;
    return false;
}

static json_t *common_types(const json_t *a, const json_t *b)
{
    static const char *const all[] = {"string", "integer", "number", "boolean",
                                      "null",   "object",  "array",  NULL};
    json_t *out = json_array();
    for (const char *const *t = all; *t && out; t++) {
        bool in_a = has_type(a, *t), in_b = has_type(b, *t);
        if (!strcmp(*t, "integer")) { /* a number that is whole */
            bool num_a = has_type(a, "number"), num_b = has_type(b, "number");
            if (num_a && num_b) continue;
            in_a = in_a || num_a, in_b = in_b || num_b;
        }
        if (in_a && in_b) json_array_append_new(out, json_string(*t));
    }
    return out;
}

/* The properties of both; a name that both have must keep to both its schemas. */
static json_t *merge_properties(json_t *a, json_t *b)
{
    json_t *joined = json_copy(a), *schema;
    const char *name;
    json_object_foreach(b, name, schema)
    {
        json_t *other = json_object_get(a, name);
        if (other && !json_equal(other, schema))
            json_object_set_new(joined, name, json_pack("{s:[O,O]}", "allOf", other, schema));
        else
            json_object_set(joined, name, schema);
    }
    return joined;
}

static json_t *merge_arrays(json_t *a, json_t *b)
{
    json_t *joined = json_copy(a);
    json_array_extend(joined, b);
    return joined;
}

static bool is_above(const json_t *a, const json_t *b)
{
    if (json_is_integer(a) && json_is_integer(b))
        return json_integer_value(a) > json_integer_value(b);
    return json_number_value(a) > json_number_value(b);
}

/* Of whole numbers; 0: they are none, or it is too large to be of use. */
static int64_t common_multiple(const json_t *a, const json_t *b)
{
    int64_t x = json_integer_value(a), y = json_integer_value(b), g = x, rest = y;
    if (x <= 0 || y <= 0) return 0;
    while (rest) {
        int64_t t = g % rest;
        g = rest, rest = t;
    }
    return x / g > MAX_MULTIPLE / y ? 0 : x / g * y;
}

/* Puts what keeps to both values of a keyword into out; false: the two are not merged. */
static bool merge_keyword(json_t *out, const char *key, json_t *old, json_t *value)
{
    static const char *const by_name[] = {"properties", "patternProperties", "dependentSchemas",
                                          NULL};
    if (!old || json_equal(old, value)) {
        json_object_set(out, key, value);
    } else if (is_one_of(key, by_name) && json_is_object(old) && json_is_object(value)) {
        json_object_set_new(out, key, merge_properties(old, value));
    } else if (!strcmp(key, "uniqueItems") && json_is_boolean(old) && json_is_boolean(value)) {
        json_object_set(out, key, json_true());
    } else if ((!strcmp(key, "required") || !strcmp(key, "allOf")) && json_is_array(old) &&
               json_is_array(value)) {
        json_object_set_new(out, key, merge_arrays(old, value));
    } else if (!strcmp(key, "type")) {
        json_object_set_new(out, key, common_types(old, value));
    } else if (!strcmp(key, "multipleOf")) {
        int64_t both = common_multiple(old, value);
        if (!both) return false;
        json_object_set_new(out, key, json_integer(both));
    } else if (json_is_number(old) && json_is_number(value)) {
        bool low = !strncmp(key, "min", 3) || !strcmp(key, "exclusiveMinimum");
        if (low == is_above(value, old)) json_object_set(out, key, value);
    } else {
        return false;
    }
    return true;
}

/* Has the schema one of the keywords? */
static bool has_any(const json_t *schema, const char *const *keys)
{
    for (; *keys; keys++)
        if (json_object_get(schema, *keys)) return true;
    return false;
}

/* The keyword that speaks of its own side's other keywords, and would mean something else once a
 * and b are one; NULL: none does. What a leaves unevaluated is what b, which stands in it, does not
 * evaluate either. */
static const char *scope_clash(const json_t *a, const json_t *b)
{
    static const char *const names[] = {"properties", "patternProperties", "additionalProperties",
                                        NULL};
    static const char *const contains[] = {"contains", "minContains", NULL};
    bool closed =
        json_object_get(a, "additionalProperties") || json_object_get(b, "additionalProperties");
    if ((json_object_get(a, "items") && json_object_get(b, "prefixItems")) ||
        (json_object_get(b, "items") && json_object_get(a, "prefixItems")))
        return "items";
    if (closed && has_any(a, names) && has_any(b, names)) return "additionalProperties";
    if (has_any(a, contains) && has_any(b, contains)) return "contains";
    if (json_object_get(b, "unevaluatedProperties")) return "unevaluatedProperties";
    return json_object_get(b, "unevaluatedItems") ? "unevaluatedItems" : NULL;
}

/* What keeps to both: a new object. NULL with the builder failed. */
static json_t *merge(struct schema *s, const json_t *a, const json_t *b)
{
    json_t *out = json_copy((json_t *)a);
    const char *key, *clash = scope_clash(a, b);
    json_t *value;
    json_object_foreach((json_t *)b, key, value)
    {
        if (!out || clash || (!is_one_of(key, restricting) && !is_one_of(key, refused))) continue;
        if (!merge_keyword(out, key, json_object_get(a, key), value)) clash = key;
    }
    if (clash && out) {
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "schemas that hold together (allOf, or keywords beside $ref, anyOf or "
                        "oneOf) differ in %.64s, and are not merged",
                        clash);
        json_decref(out);
        return NULL;
    }
    if (!out) td_builder_fail(s->b, TD_ERR_NOMEM, "no memory to merge schemas");
    return out;
}

/* "#", "#/..." : a part of this schema. */
static const json_t *resolve(struct schema *s, const json_t *ref)
{
    const char *text = json_string_value(ref), *at = text;
    const json_t *to = s->root;
    if (!text || text[0] != '#' || (text[1] && text[1] != '/')) {
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "$ref is %.100s, must be # or #/...: a part of the same schema",
                        text ? text : "no string");
        return NULL;
    }
    for (at++; *at == '/' && to;) {
        char part[MAX_KEY_BYTES + 1];
        size_t n = 0;
        for (at++; *at && *at != '/' && n < MAX_KEY_BYTES; at++) {
            unsigned byte = 0; /* a fragment of a URI: %XX is a byte */
            if (at[0] == '%' && strspn(at + 1, "0123456789abcdefABCDEF") >= 2 &&
                sscanf(at + 1, "%2x", &byte) == 1)
                part[n++] = (char)byte, at += 2;
            else if (at[0] == '~' && (at[1] == '0' || at[1] == '1'))
                part[n++] = *++at == '0' ? '~' : '/';
            else
                part[n++] = *at;
        }
        part[n] = 0;
        if (json_is_array(to))
            to = n && strspn(part, "0123456789") == n && n < 6
                     ? json_array_get(to, strtoul(part, NULL, 10))
                     : NULL;
        else
            to = json_object_get(to, part);
    }
    if (!to)
        td_builder_fail(s->b, TD_ERR_INVALID, "$ref is %.100s, which is not in the schema", text);
    return to;
}

static int32_t ref_call(struct schema *s, const json_t *target, int depth)
{
    struct td_builder *b = s->b;
    for (int32_t i = 0; i < s->n_refs; i++)
        if (s->refs[i].target == target) return td_expr_call(b, s->refs[i].rule);
    if (s->n_refs == MAX_REFS)
        td_builder_fail(b, TD_ERR_LIMIT, "$ref names more than %d places, the limit", MAX_REFS);
    int32_t rule = target == s->root ? 0 : td_rule_new(b);
    if (b->status) return 0;
    s->refs[s->n_refs].target = target;
    s->refs[s->n_refs++].rule = rule;
    int32_t e = schema_expr(s, target, depth + 1);
    if (!b->status) b->rules[rule].expr = e;
    return td_expr_call(b, rule);
}

static json_t *without(const json_t *schema, const char *key)
{
    json_t *out = json_copy((json_t *)schema);
    if (out) json_object_del(out, key);
    return out;
}

/* Of `base` and `part` together. */
static int32_t together(struct schema *s, const json_t *base, const json_t *part, int depth)
{
    if (json_is_true(part)) return schema_expr(s, base, depth + 1);
    if (!json_is_object(part)) {
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED, "a schema in allOf, anyOf or oneOf is no object");
        return 0;
    }
    json_t *merged = merge(s, base, part);
    int32_t e = merged ? schema_expr(s, merged, depth + 1) : 0;
    json_decref(merged);
    return e;
}

static int32_t any_of(struct schema *s, const json_t *schema, const char *key, int depth)
{
    const json_t *parts = json_object_get(schema, key);
    json_t *base = without(schema, key);
    bool alone = !restricts(schema, key);
    int32_t alt = td_expr_new(s->b, TD_EXPR_ALT, 0, 0);
    size_t n = json_array_size(parts), n_used = 0;
    if (n > TD_GRAMMAR_MAX_CHOICES)
        td_builder_fail(s->b, TD_ERR_LIMIT, "%s has %zu schemas, limit %d", key, n,
                        TD_GRAMMAR_MAX_CHOICES);
    for (size_t i = 0; i < n && !s->b->status; i++) {
        const json_t *part = json_array_get(parts, i);
        if (json_is_false(part)) continue;
        n_used++;
        td_expr_add(s->b, alt,
                    alone ? schema_expr(s, part, depth + 1) : together(s, base, part, depth));
    }
    if (!n_used)
        td_builder_fail(s->b, TD_ERR_INVALID,
                        "%s must be an array with a schema that allows "
                        "something",
                        key);
    json_decref(base);
    return alt;
}

static int32_t all_of(struct schema *s, const json_t *schema, int depth)
{
    const json_t *parts = json_object_get(schema, "allOf"), *part;
    json_t *base = without(schema, "allOf");
    size_t i;
    if (!json_is_array(parts)) td_builder_fail(s->b, TD_ERR_INVALID, "allOf must be an array");
    json_array_foreach(parts, i, part)
    {
        if (s->b->status || json_is_true(part)) continue;
        const json_t *ref = json_object_get(part, "$ref");
        for (int hops = 0; ref && !restricts(part, "$ref") && !s->b->status; hops++) {
            part = resolve(s, ref);
            ref = json_object_get(part, "$ref");
            if (hops > TD_GRAMMAR_MAX_DEPTH)
                td_builder_fail(s->b, TD_ERR_LIMIT, "$ref leads on more than %d times, the limit",
                                TD_GRAMMAR_MAX_DEPTH);
        }
        if (s->b->status) break;
        if (!json_is_object(part)) {
            td_builder_fail(s->b, TD_ERR_UNSUPPORTED, "a schema in allOf is no object");
            break;
        }
        json_t *merged = merge(s, base, part);
        json_decref(base);
        base = merged;
    }
    int32_t e = s->b->status ? 0 : schema_expr(s, base, depth + 1);
    json_decref(base);
    return e;
}

/* As JSON writes it shortest: malloc'd, NULL without memory. */
static char *scalar_text(const json_t *v)
{
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15));
    for (size_t digits = 16; text && json_is_real(v) && digits <= 17; digits++) {
        if (strtod(text, NULL) == json_real_value(v)) break;
        free(text);
        text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(digits));
    }
    return text;
}

/* One value, spaces as everywhere; no deeper than jansson reads. */
static int32_t this_value(struct schema *s, const json_t *v, int depth)
{
    struct td_builder *b = s->b;
    bool is_object = json_is_object(v);
    if (depth > TD_GRAMMAR_MAX_DEPTH)
        td_builder_fail(b, TD_ERR_LIMIT, "a value of enum is nested more than %d deep, the limit",
                        TD_GRAMMAR_MAX_DEPTH);
    if (b->status) return 0;
    if (!is_object && !json_is_array(v)) {
        char *text = scalar_text(v);
        int32_t e = text ? td_expr_text(b, text) : 0;
        if (!text) td_builder_fail(b, TD_ERR_NOMEM, "no memory for enum");
        free(text);
        return e;
    }
    int32_t e = td_expr_cat(b, td_expr_text(b, is_object ? "{" : "["), space(b));
    void *at = json_object_iter((json_t *)v);
    size_t n = is_object ? json_object_size(v) : json_array_size(v);
    for (size_t i = 0; i < n && !b->status; i++) {
        if (i) td_expr_add(b, e, comma(b));
        if (is_object) {
            json_t *name = json_string(json_object_iter_key(at));
            int32_t key = this_value(s, name, depth + 1);
            td_expr_add(b, e, member(b, key, this_value(s, json_object_iter_value(at), depth + 1)));
            json_decref(name);
            at = json_object_iter_next((json_t *)v, at);
        } else {
            td_expr_add(b, e, this_value(s, json_array_get(v, i), depth + 1));
        }
    }
    if (n) td_expr_add(b, e, space(b));
    td_expr_add(b, e, td_expr_text(b, is_object ? "}" : "]"));
    return e;
}

static bool is_of_type(const json_t *v, const json_t *types)
{
    bool whole =
        json_is_integer(v) || (json_is_real(v) && json_real_value(v) == floor(json_real_value(v)));
    return (json_is_string(v) && has_type(types, "string")) ||
           (json_is_boolean(v) && has_type(types, "boolean")) ||
           (json_is_null(v) && has_type(types, "null")) ||
           (json_is_object(v) && has_type(types, "object")) ||
           (json_is_array(v) && has_type(types, "array")) ||
           (json_is_number(v) && has_type(types, "number")) ||
           (whole && has_type(types, "integer"));
}

static int32_t n_characters(const json_t *v)
{
    const char *text = json_string_value(v);
    int32_t n = 0;
    for (; *text; text++) n += (*text & 0xC0) != 0x80;
    return n;
}

/* Does a value of enum keep to lengths and bounds? Fails for keywords of its type that would have
 * to be tried on it. */
static bool keeps(struct schema *s, const json_t *schema, const json_t *v)
{
    static const char *const of_strings[] = {"pattern", NULL};
    static const char *const of_numbers[] = {"multipleOf", NULL};
    static const char *const of_arrays[] = {"items",       "prefixItems",      "minItems",
                                            "maxItems",    "uniqueItems",      "contains",
                                            "minContains", "unevaluatedItems", NULL};
    static const char *const of_objects[] = {"properties",
                                             "required",
                                             "additionalProperties",
                                             "patternProperties",
                                             "propertyNames",
                                             "minProperties",
                                             "maxProperties",
                                             "unevaluatedProperties",
                                             "dependentRequired",
                                             "dependentSchemas",
                                             NULL};
    static const char *const none[] = {NULL};
    const char *const *keys = json_is_string(v)   ? of_strings
                              : json_is_number(v) ? of_numbers
                              : json_is_array(v)  ? of_arrays
                              : json_is_object(v) ? of_objects
                                                  : none;
    for (; *keys; keys++)
        if (json_object_get(schema, *keys))
            td_builder_fail(s->b, TD_ERR_UNSUPPORTED, "%s beside enum or const is not supported",
                            *keys);
    if (json_is_string(v)) {
        if (regex_of_format(json_object_get(schema, "format")))
            td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                            "format beside enum or const is not supported");
        int32_t n = n_characters(v), min = count(s, schema, "minLength"),
                max = count(s, schema, "maxLength");
        return n >= min && (max < 0 || n <= max);
    }
    if (!json_is_number(v)) return true;
    const json_t *min = json_object_get(schema, "minimum"),
                 *max = json_object_get(schema, "maximum"),
                 *above = json_object_get(schema, "exclusiveMinimum"),
                 *below = json_object_get(schema, "exclusiveMaximum");
    return !(min && is_above(min, v)) && !(max && is_above(v, max)) &&
           (!above || is_above(v, above)) && (!below || is_above(below, v));
}

static int32_t values(struct schema *s, const json_t *schema, const json_t *list)
{
    struct td_builder *b = s->b;
    const json_t *types = json_object_get(schema, "type");
    size_t n = json_array_size(list), n_texts = 0;
    struct td_grammar_text *texts = NULL;
    char **owned = NULL; /* td_expr_choice moves and drops texts */
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0), n_composed = 0;
    if (json_object_get(schema, "enum") && json_object_get(schema, "const"))
        td_builder_fail(b, TD_ERR_UNSUPPORTED, "enum beside const is not supported");
    if (!n || n > TD_GRAMMAR_MAX_CHOICES)
        td_builder_fail(b, TD_ERR_LIMIT, "enum has %zu values, must have 1..%d", n,
                        TD_GRAMMAR_MAX_CHOICES);
    if (!b->status) {
        texts = calloc(n, sizeof *texts);
        owned = calloc(n, sizeof *owned);
        if (!texts || !owned) td_builder_fail(b, TD_ERR_NOMEM, "no memory for enum");
    }
    for (size_t i = 0; i < n && !b->status; i++) {
        const json_t *v = json_array_get(list, i);
        if (!is_of_type(v, types) || !keeps(s, schema, v)) continue;
        if (json_is_object(v) || json_is_array(v)) {
            td_expr_add(b, alt, this_value(s, v, 0));
            n_composed++;
            continue;
        }
        char *text = scalar_text(v);
        if (!text) td_builder_fail(b, TD_ERR_NOMEM, "no memory for enum");
        if (!text) break;
        owned[n_texts] = text;
        texts[n_texts++] = (struct td_grammar_text){text, strlen(text)};
    }
    if (!n_texts && !n_composed)
        td_builder_fail(b, TD_ERR_INVALID, "enum has no value that type and bounds allow");
    if (n_texts && !b->status) td_expr_add(b, alt, td_expr_choice(b, texts, n_texts));
    for (size_t i = 0; owned && i < n_texts; i++) free(owned[i]);
    free(owned);
    free(texts);
    return alt;
}

static int32_t typed(struct schema *s, const json_t *schema, const char *type, int depth)
{
    struct td_builder *b = s->b;
    if (!strcmp(type, "string")) return strings(s, schema);
    if (!strcmp(type, "integer")) return numbers(s, schema, true);
    if (!strcmp(type, "number")) return numbers(s, schema, false);
    if (!strcmp(type, "boolean"))
        return td_expr_alt(b, td_expr_text(b, "true"), td_expr_text(b, "false"));
    if (!strcmp(type, "null")) return td_expr_text(b, "null");
    if (!strcmp(type, "array")) return arrays(s, schema, depth);
    if (!strcmp(type, "object")) return objects(s, schema, depth);
    td_builder_fail(b, TD_ERR_INVALID, "type is %.40s, which JSON Schema does not have", type);
    return 0;
}

/* Without `type`: the type that its keywords speak of, else anything. */
static const char *type_of_keywords(const json_t *schema)
{
    static const struct {
        const char *key, *type;
    } rows[] = {{"properties", "object"},
                {"required", "object"},
                {"additionalProperties", "object"},
                {"patternProperties", "object"},
                {"propertyNames", "object"},
                {"minProperties", "object"},
                {"maxProperties", "object"},
                {"unevaluatedProperties", "object"},
                {"items", "array"},
                {"prefixItems", "array"},
                {"uniqueItems", "array"},
                {"contains", "array"},
                {"unevaluatedItems", "array"},
                {"minItems", "array"},
                {"maxItems", "array"},
                {"minLength", "string"},
                {"maxLength", "string"},
                {"pattern", "string"},
                {"format", "string"},
                {"minimum", "number"},
                {"maximum", "number"},
                {"exclusiveMinimum", "number"},
                {"exclusiveMaximum", "number"},
                {"multipleOf", "number"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (json_object_get(schema, rows[i].key)) return rows[i].type;
    return NULL;
}

/* Does it require a property that it does not allow? */
static bool is_contradiction(const json_t *schema)
{
    const json_t *properties = json_object_get(schema, "properties"), *name;
    bool closed = json_is_false(json_object_get(schema, "additionalProperties")) &&
                  !json_object_get(schema, "patternProperties");
    size_t i;
    json_array_foreach(json_object_get(schema, "required"), i, name)
    {
        const json_t *p = json_object_get(properties, json_string_value(name));
        if (json_is_false(p) || (closed && !p)) return true;
    }
    return false;
}

/* Where `name` is there, `then` holds, too: an array of names, or a schema. Adds the alternative
 * with the property to alt. */
static void with_property(struct schema *s, const json_t *base, const char *name,
                          const json_t *then, int depth, int32_t alt)
{
    json_t *here = json_pack("{s:[s]}", "required", name);
    json_t *both = here ? merge(s, base, here) : NULL;
    if (both && json_is_array(then)) {
        json_t *names = json_pack("{s:O}", "required", then);
        json_t *more = merge(s, both, names);
        json_decref(both);
        json_decref(names);
        both = more;
    }
    bool is_schema = json_is_object(then);
    if (both && !json_is_false(then) && !is_contradiction(both))
        td_expr_add(s->b, alt,
                    is_schema ? together(s, both, then, depth) : schema_expr(s, both, depth + 1));
    json_decref(here);
    json_decref(both);
}

/* Two alternatives for the first name of dependentRequired or dependentSchemas: it is not there, or
 * what it asks for holds, too. */
static int32_t dependent(struct schema *s, const json_t *schema, const char *key, int depth)
{
    struct td_builder *b = s->b;
    json_t *rules = json_object_get(schema, key), *base = without(schema, key);
    const char *name = json_object_iter_key(json_object_iter(rules));
    const json_t *then = json_object_get(rules, name ? name : "");
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
    if (!json_is_object(rules) ||
        (name && !json_is_array(then) && !json_is_object(then) && !json_is_boolean(then)))
        td_builder_fail(b, TD_ERR_INVALID, "%s must be an object of %s", key,
                        key[9] == 'R' ? "arrays of names" : "schemas");
    if (json_object_size(rules) > MAX_DEPENDENTS)
        td_builder_fail(b, TD_ERR_LIMIT, "%s has %zu names, limit %d", key, json_object_size(rules),
                        MAX_DEPENDENTS);
    if (json_object_size(rules) > 1 && base) {
        json_t *others = without(rules, name);
        json_object_set_new(base, key, others);
    }
    if (name && base && !b->status) {
        json_t *properties = json_copy(json_object_get(base, "properties"));
        json_t *apart = json_copy(base);
        bool open = !properties && !json_object_get(base, "additionalProperties") &&
                    !json_object_get(base, "unevaluatedProperties");
        if (!properties) properties = json_object();
        json_object_set_new(properties, name, json_false());
        json_object_set_new(apart, "properties", properties);
        if (open) json_object_set_new(apart, "additionalProperties", json_true());
        if (!is_contradiction(apart)) td_expr_add(b, alt, schema_expr(s, apart, depth + 1));
        with_property(s, base, name, then, depth, alt);
        json_decref(apart);
        if (!b->status && b->exprs[alt].last < 0)
            td_builder_fail(b, TD_ERR_INVALID, "%s of %.64s leaves nothing", key, name);
    } else if (base && !b->status) {
        td_expr_add(b, alt, schema_expr(s, base, depth + 1));
    }
    json_decref(base);
    return alt;
}

/* Counts the schema, and refuses one that has what is not supported. */
static bool is_readable(struct schema *s, const json_t *schema, int depth)
{
    struct td_builder *b = s->b;
    if (depth > TD_GRAMMAR_MAX_DEPTH)
        td_builder_fail(b, TD_ERR_LIMIT, "schemas are nested more than %d deep, the limit",
                        TD_GRAMMAR_MAX_DEPTH);
    else if (++s->n_seen > MAX_SCHEMAS)
        td_builder_fail(b, TD_ERR_LIMIT, "more than %d schemas once they are merged, the limit",
                        MAX_SCHEMAS);
    else if (json_is_false(schema))
        td_builder_fail(b, TD_ERR_INVALID, "the schema false allows nothing");
    else if (!json_is_object(schema) && !json_is_true(schema))
        td_builder_fail(b, TD_ERR_INVALID, "a schema is neither an object nor a boolean");
    for (const char *const *k = refused; *k; k++)
        if (json_object_get(schema, *k))
            td_builder_fail(b, TD_ERR_UNSUPPORTED, "the keyword %s is not supported", *k);
    return !b->status;
}

static int32_t schema_expr(struct schema *s, const json_t *schema, int depth)
{
    struct td_builder *b = s->b;
    const json_t *v;
    if (b->status || !is_readable(s, schema, depth)) return 0;
    if ((v = json_object_get(schema, "$ref"))) {
        const json_t *target = resolve(s, v);
        if (!target) return 0;
        if (!restricts(schema, "$ref")) return ref_call(s, target, depth);
        json_t *base = without(schema, "$ref");
        int32_t e = together(s, base, target, depth);
        json_decref(base);
        return e;
    }
    if (json_object_get(schema, "allOf")) return all_of(s, schema, depth);
    if (json_object_get(schema, "anyOf")) return any_of(s, schema, "anyOf", depth);
    if (json_object_get(schema, "oneOf")) return any_of(s, schema, "oneOf", depth);
    if ((v = json_object_get(schema, "enum"))) return values(s, schema, v);
    if ((v = json_object_get(schema, "const"))) {
        json_t *one = json_pack("[O]", v);
        int32_t e = values(s, schema, one);
        json_decref(one);
        return e;
    }
    if (has_type(json_object_get(schema, "type"), "object")) {
        if (json_object_get(schema, "dependentRequired"))
            return dependent(s, schema, "dependentRequired", depth);
        if (json_object_get(schema, "dependentSchemas"))
            return dependent(s, schema, "dependentSchemas", depth);
    }
    if (!(v = json_object_get(schema, "type"))) {
        const char *type = type_of_keywords(schema);
        return type ? typed(s, schema, type, depth) : value_call(s);
    }
    if (json_is_string(v)) return typed(s, schema, json_string_value(v), depth);
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
    size_t i, n = json_array_size(v);
    const json_t *t;
    if (!n || n > 7)
        td_builder_fail(b, TD_ERR_INVALID,
                        "type has %zu names (must be one, or 1..7 in an array), "
                        "or schemas that hold together have none in common",
                        n);
    json_array_foreach(v, i, t)
    {
        if (!json_is_string(t)) td_builder_fail(b, TD_ERR_INVALID, "type must hold strings");
        if (b->status) return 0;
        td_expr_add(b, alt, typed(s, schema, json_string_value(t), depth));
    }
    return alt;
}

/* A $ref below an $id that is not the root's speaks of the schema with that $id. */
static bool has_inner_reference(const json_t *v, bool is_root, bool is_inner)
{
    const char *key;
    json_t *value;
    size_t i;
    is_inner = is_inner || (!is_root && json_is_string(json_object_get(v, "$id")));
    if (is_inner && json_is_string(json_object_get(v, "$ref"))) return true;
    json_object_foreach((json_t *)v, key,
                        value) if (has_inner_reference(value, false, is_inner)) return true;
    json_array_foreach(v, i, value) if (has_inner_reference(value, false, is_inner)) return true;
    return false;
}

/* Of rule 0, or of a tool's; the root is refs[0]. */
static int32_t root_expr(struct schema *s, const json_t *root, int32_t rule)
{
    s->root = s->refs[0].target = root;
    s->refs[0].rule = rule;
    s->n_refs = 1;
    if (has_inner_reference(root, true, false))
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "$ref below an $id that is not the root's is not supported");
    return schema_expr(s, root, 0);
}

void td_grammar_read_schema(struct td_builder *b, const char *text, size_t n)
{
    json_error_t why;
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &why);
    if (!root) {
        td_builder_fail(b, TD_ERR_INVALID, "not JSON, at byte %d: %.150s", why.position, why.text);
        return;
    }
    struct schema s = {.b = b};
    s.refs = calloc(MAX_REFS, sizeof *s.refs);
    if (!s.refs) {
        td_builder_fail(b, TD_ERR_NOMEM, "no memory for $ref");
    } else { /* the root is rule 0, for those who refer to it */
        int32_t e = root_expr(&s, root, 0);
        if (!b->status) b->rules[0].expr = e;
    }
    names_free(&s);
    free(s.refs);
    json_decref(root);
}

/* ---- arguments of tools ---------------------------------------------------------------------- */

/* The schema, of objects alone: a new reference. NULL: it has none, and the builder has failed. */
static json_t *object_schema(struct td_builder *b, json_t *parameters)
{
    bool may =
        json_is_true(parameters) ||
        (json_is_object(parameters) && has_type(json_object_get(parameters, "type"), "object"));
    if (!may) {
        td_builder_fail(b, TD_ERR_INVALID, "parameters must be the schema of an object");
        return NULL;
    }
    json_t *root = json_is_true(parameters) ? json_object() : json_copy(parameters);
    if (!root || json_object_set_new(root, "type", json_string("object")))
        td_builder_fail(b, TD_ERR_NOMEM, "no memory for parameters");
    return root;
}

void td_grammar_read_arguments(struct td_builder *b, const json_t *tools, int32_t *ret_rules)
{
    struct schema s = {.b = b};
    const char *what = b->what;
    char name[96];
    s.refs = calloc(MAX_REFS, sizeof *s.refs);
    if (!s.refs) td_builder_fail(b, TD_ERR_NOMEM, "no memory for $ref");
    b->what = name; /* what is wrong is said of the tool */
    for (size_t i = 0; i < json_array_size(tools) && !b->status; i++) {
        const json_t *tool = json_array_get(tools, i);
        json_t *parameters = json_object_get(tool, "parameters");
        snprintf(name, sizeof name, "tool \"%.64s\"",
                 json_string_value(json_object_get(tool, "name")));
        int32_t rule = ret_rules[i] = td_rule_new(b), e = 0;
        json_t *root = parameters ? object_schema(b, parameters) : NULL;
        if (root && !b->status) {
            e = root_expr(&s, root, rule);
        } else if (!b->status) {
            e = td_expr_text(b, "{}");
        }
        if (!b->status) b->rules[rule].expr = e;
        json_decref(root);
    }
    b->what = what;
    names_free(&s);
    free(s.refs);
}
