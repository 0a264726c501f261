/* grammar_json.c - JSON, and the part of JSON Schema that an automaton can keep to.
 *
 * Every output is valid by the schema; not every valid instance can be an output:
 *   - properties come in the schema's order, extra ones after them; where `properties` is there
 *     and `additionalProperties` is not, there are none;
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
#define MAX_MULTIPLE 1000000000 /* of schemas that hold together */

struct schema {
    struct td_builder *b;
    const json_t *root;
    int32_t n_seen;
    int32_t value, string, name_rest; /* rules; 0: not made yet */
    struct {
        const json_t *target;
        int32_t rule;
    } * refs;
    int32_t n_refs;
};

static int32_t schema_expr(struct schema *s, const json_t *schema, int depth);

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

static int32_t strings(struct schema *s, const json_t *schema)
{
    struct td_builder *b = s->b;
    int32_t min = count(s, schema, "minLength"), max = count(s, schema, "maxLength");
    const json_t *pattern = json_object_get(schema, "pattern"),
                 *format = json_object_get(schema, "format");
    const char *regex = NULL;
    for (size_t i = 0; json_is_string(format) && i < sizeof formats / sizeof *formats; i++)
        if (!strcmp(json_string_value(format), formats[i].name)) regex = formats[i].regex;
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

static int32_t arrays(struct schema *s, const json_t *schema, int depth)
{
    struct td_builder *b = s->b;
    struct elements l;
    if (!read_elements(s, schema, &l)) return 0;
    element_rules(s, &l, depth);
    int32_t body = elements_expr(b, &l);
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
        bool required, absent; /* absent: must not be there */
    } v[2 * TD_GRAMMAR_MAX_PROPERTIES];
    int32_t n;
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

static void read_members(struct schema *s, const json_t *schema, struct members *m,
                         const json_t *extra)
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
        if (!s->b->status) m->v[m->n - 1].absent = json_is_false(value);
    }
    json_array_foreach(required, i, value)
    {
        const char *name = json_string_value(value);
        int32_t k = 0;
        if (!name) td_builder_fail(s->b, TD_ERR_INVALID, "required must be an array of names");
        if (s->b->status) return;
        while (k < m->n && strcmp(m->v[k].name, name)) k++;
        if (k == m->n && json_is_false(extra))
            td_builder_fail(s->b, TD_ERR_INVALID,
                            "required has %.64s, which properties and additionalProperties do not "
                            "allow",
                            name);
        if (k == m->n) add_member(s, m, name, json_is_object(extra) ? extra : NULL);
        if (!s->b->status && m->v[k].absent)
            td_builder_fail(s->b, TD_ERR_INVALID, "property %.64s is required and false", name);
        if (!s->b->status) m->v[k].required = true;
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

/* Two rules (-1: nothing may stand there): what may stand when no property is there yet, and what
 * may stand behind one. */
struct places {
    int32_t first, tail;
};

/* Members of other names than these, by the schema `extra`. */
static struct places extra_members(struct schema *s, const json_t *extra,
                                   struct td_grammar_text *names, int32_t n_names, int depth)
{
    struct td_builder *b = s->b;
    qsort(names, (size_t)n_names, sizeof *names, compare_names);
    int32_t rule = td_rule_new(b);
    int32_t name = td_expr_cat(b, td_expr_text(b, "\""), other_name(s, names, (size_t)n_names, 0));
    int32_t value = json_is_object(extra) ? schema_expr(s, extra, depth + 1) : value_call(s);
    int32_t e = member(b, name, value);
    if (!b->status) b->rules[rule].expr = e;
    struct places p = {.tail = td_rule_new(b)};
    e = td_expr_rep(b, td_expr_cat(b, comma(b), td_expr_call(b, rule)), 0, -1);
    if (!b->status) b->rules[p.tail].expr = e;
    p.first = td_rule_new(b);
    e = td_expr_rep(b, td_expr_cat(b, td_expr_call(b, rule), td_expr_call(b, p.tail)), 0, 1);
    if (!b->status) b->rules[p.first].expr = e;
    return p;
}

/* Puts the named members before what *p allows, from the last to the first. */
static void chain_members(struct td_builder *b, const struct members *m, struct places *p)
{
    for (int32_t i = b->status ? 0 : m->n; i-- > 0 && !b->status;) {
        if (m->v[i].absent) continue;
        int32_t here = td_rule_new(b), behind = td_rule_new(b);
        int32_t e =
            td_expr_cat(b, td_expr_call(b, m->v[i].rule), td_expr_new(b, TD_EXPR_CAT, 0, 0));
        if (p->tail >= 0) td_expr_add(b, e, td_expr_call(b, p->tail));
        if (!m->v[i].required) {
            int32_t skip =
                p->first >= 0 ? td_expr_call(b, p->first) : td_expr_new(b, TD_EXPR_CAT, 0, 0);
            e = td_expr_alt(b, e, skip);
        }
        if (!b->status) b->rules[here].expr = e;
        e = td_expr_cat(b, comma(b), td_expr_call(b, m->v[i].rule));
        if (!m->v[i].required) e = td_expr_rep(b, e, 0, 1);
        e = td_expr_cat(b, e, td_expr_new(b, TD_EXPR_CAT, 0, 0));
        if (p->tail >= 0) td_expr_add(b, e, td_expr_call(b, p->tail));
        if (!b->status) b->rules[behind].expr = e;
        *p = (struct places){.first = here, .tail = behind};
    }
}

static int32_t objects(struct schema *s, const json_t *schema, int depth)
{
    struct td_builder *b = s->b;
    const json_t *extra = json_object_get(schema, "additionalProperties");
    if (!extra && !json_object_get(schema, "properties") && !json_object_get(schema, "required"))
        return any_object(s);
    struct members *m = calloc(1, sizeof *m);
    struct td_grammar_text *names = calloc(2 * TD_GRAMMAR_MAX_PROPERTIES, sizeof *names);
    struct places p = {.first = -1, .tail = -1};
    if (!m || !names)
        td_builder_fail(b, TD_ERR_NOMEM, "no memory for an object's properties");
    else
        read_members(s, schema, m, extra);
    int32_t n_names = b->status ? 0 : member_rules(s, m, names, depth);
    bool has_extra = extra ? !json_is_false(extra) : !json_object_get(schema, "properties");
    if (has_extra && !b->status) p = extra_members(s, extra, names, n_names, depth);
    if (!b->status) chain_members(b, m, &p);
    free(m);
    free(names);
    int32_t e = td_expr_cat(b, td_expr_text(b, "{"), space(b));
    if (p.first >= 0) td_expr_add(b, e, td_expr_call(b, p.first));
    td_expr_add(b, e, space(b));
    td_expr_add(b, e, td_expr_text(b, "}"));
    return e;
}

/* ---- schemas --------------------------------------------------------------------------------- */

static bool is_one_of(const char *key, const char *const *names)
{
    for (; *names; names++)
        if (!strcmp(key, *names)) return true;
    return false;
}

static const char *const described[] = {
    "$schema",     "$id",      "$comment",    "$anchor",         "$defs",
    "definitions", "title",    "description", "default",         "examples",
    "deprecated",  "readOnly", "writeOnly",   "contentEncoding", "contentMediaType",
    NULL};
static const char *const refused[] = {"not",
                                      "if",
                                      "then",
                                      "else",
                                      "patternProperties",
                                      "propertyNames",
                                      "minProperties",
                                      "maxProperties",
                                      "dependentRequired",
                                      "dependentSchemas",
                                      "dependencies",
                                      "contains",
                                      "minContains",
                                      "maxContains",
                                      "unevaluatedProperties",
                                      "unevaluatedItems",
                                      "additionalItems",
                                      "$dynamicRef",
                                      "$recursiveRef",
                                      NULL};
/* The other keywords that are read here; any further one is not of JSON Schema and is ignored. */
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
    if (!old || json_equal(old, value)) {
        json_object_set(out, key, value);
    } else if (!strcmp(key, "properties") && json_is_object(old) && json_is_object(value)) {
        json_object_set_new(out, key, merge_properties(old, value));
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

/* The keyword of a that would mean something else beside b's, or NULL. */
static const char *scope_clash(const json_t *a, const json_t *b)
{
    bool closed =
        json_object_get(a, "additionalProperties") || json_object_get(b, "additionalProperties");
    if ((json_object_get(a, "items") && json_object_get(b, "prefixItems")) ||
        (json_object_get(b, "items") && json_object_get(a, "prefixItems")))
        return "items";
    if (closed &&
        (json_object_get(a, "properties") || json_object_get(a, "additionalProperties")) &&
        (json_object_get(b, "properties") || json_object_get(b, "additionalProperties")))
        return "additionalProperties"; /* each side speaks of its own properties alone */
    return NULL;
}

/* What keeps to both: a new object. NULL with the builder failed. */
static json_t *merge(struct schema *s, const json_t *a, const json_t *b)
{
    json_t *out = json_copy((json_t *)a);
    const char *key, *clash = scope_clash(a, b);
    json_t *value;
    json_object_foreach((json_t *)b, key, value)
    {
        if (!out || clash || is_one_of(key, described)) continue;
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

static int32_t values(struct schema *s, const json_t *schema, const json_t *list)
{
    struct td_builder *b = s->b;
    const json_t *types = json_object_get(schema, "type");
    size_t n = json_array_size(list), n_texts = 0;
    struct td_grammar_text *texts = NULL;
    char **owned = NULL; /* td_expr_choice moves and drops texts */
    const char *key;
    json_t *value;
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0), n_composed = 0;
    json_object_foreach((json_t *)schema, key,
                        value) if (strcmp(key, "enum") && strcmp(key, "const") &&
                                   strcmp(key, "type") && is_one_of(key, restricting))
        td_builder_fail(b, TD_ERR_UNSUPPORTED, "%s beside enum or const is not supported", key);
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
        bool whole = json_is_integer(v) ||
                     (json_is_real(v) && json_real_value(v) == floor(json_real_value(v)));
        bool fits = (json_is_string(v) && has_type(types, "string")) ||
                    (json_is_boolean(v) && has_type(types, "boolean")) ||
                    (json_is_null(v) && has_type(types, "null")) ||
                    (json_is_object(v) && has_type(types, "object")) ||
                    (json_is_array(v) && has_type(types, "array")) ||
                    (json_is_number(v) && has_type(types, "number")) ||
                    (whole && has_type(types, "integer"));
        if (!fits) continue;
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
        td_builder_fail(b, TD_ERR_INVALID, "enum has no value of the type");
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
                {"items", "array"},
                {"prefixItems", "array"},
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

static int32_t schema_expr(struct schema *s, const json_t *schema, int depth)
{
    struct td_builder *b = s->b;
    const json_t *v;
    if (b->status) return 0;
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
    if (json_is_true(json_object_get(schema, "uniqueItems")))
        td_builder_fail(b, TD_ERR_UNSUPPORTED, "the keyword uniqueItems is not supported");
    if (b->status) return 0;
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
    free(s.refs);
}
