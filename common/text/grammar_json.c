/* grammar_json.c - the part of JSON Schema that an automaton can keep to.
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
 * oneOf is read as anyOf, and dependencies are kept to, though drafts since 2019-09 have none: what
 * keeps to them is valid by every draft. Keywords that restrict and are not here are refused by
 * name; what only describes is ignored, and so is a format without a row in `formats`. */
#include <ctype.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"

#define MAX_SCHEMAS 16384 /* looked at, merged ones included: branches of branches multiply */
#define MAX_REFS 4096

void td_grammar_read_json_object(struct td_builder *b)
{
    struct td_schema s = {.b = b};
    int32_t e = td_json_object(&s);
    if (!b->status) b->rules[0].expr = e;
}

/* ---- numbers --------------------------------------------------------------------------------- */

static int32_t numbers(struct td_schema *s, const json_t *schema, bool integer)
{
    static const char *const keys[] = {"minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum",
                                       "multipleOf"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (json_object_get(schema, keys[i])) return td_expr_schema_number(s->b, schema, integer);
    return td_json_number(s->b, integer);
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
int32_t td_schema_count(struct td_schema *s, const json_t *schema, const char *key)
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

static int32_t strings(struct td_schema *s, const json_t *schema)
{
    struct td_builder *b = s->b;
    int32_t min = td_schema_count(s, schema, "minLength"),
            max = td_schema_count(s, schema, "maxLength");
    const json_t *pattern = json_object_get(schema, "pattern"),
                 *format = json_object_get(schema, "format");
    const char *regex = regex_of_format(format);
    if (pattern && !json_is_string(pattern)) {
        td_builder_fail(b, TD_ERR_INVALID, "pattern must be a string");
        return 0;
    }
    if (pattern && regex) {
        td_builder_fail(b, TD_ERR_UNSUPPORTED, "pattern beside format is not supported");
        return 0;
    }
    if (pattern || regex) {
        struct td_lengths l;
        const char *text = pattern ? json_string_value(pattern) : regex;
        int32_t e = td_expr_regex_lengths(b, text, strlen(text),
                                          pattern ? TD_REGEX_JSON_SEARCH : TD_REGEX_JSON_WHOLE, &l);
        if (l.min < min || (max >= 0 && (l.max < 0 || l.max > max)))
            td_builder_fail(b, TD_ERR_UNSUPPORTED,
                            "minLength and maxLength beside a %s that allows other lengths are not "
                            "supported: say them in the pattern, as ^(...){m,n}$",
                            pattern ? "pattern" : "format");
        return td_json_quoted(b, e);
    }
    if (min <= 0 && max < 0) return td_json_string(s);
    if (min < 0) min = 0;
    if (max >= 0 && max < min)
        return td_expr_nothing(b, "minLength is %d, above maxLength, %d", min, max);
    return td_json_quoted(b, td_expr_rep(b, td_json_string_char(b), min, max));
}

/* The part that *at names, which is moved behind it, of a JSON pointer: its text in part, or NULL
 * when it is longer than any name here. */
static const char *pointer_part(const char **at, char part[TD_SCHEMA_MAX_KEY_BYTES + 1])
{
    const char *from = *at;
    size_t n = 0;
    for (; *from && *from != '/' && n < TD_SCHEMA_MAX_KEY_BYTES; from++) {
        if (from[0] == '~' && (from[1] == '0' || from[1] == '1'))
            part[n++] = *++from == '0' ? '~' : '/';
        else
            part[n++] = *from;
    }
    part[n] = 0;
    *at = from;
    return *from && *from != '/' ? NULL : part;
}

/* A fragment of a URI: %XX is a byte. In place. */
static void unescape(char *text)
{
    char *to = text;
    for (const char *from = text; *from; from++) {
        char digits[3] = {0}, *end = digits;
        if (from[0] == '%' && isxdigit((unsigned char)from[1])) memcpy(digits, from + 1, 2);
        long byte = strtol(digits, &end, 16);
        if (end == digits + 2 && byte)
            *to++ = (char)byte, from += 2;
        else
            *to++ = *from;
    }
    *to = 0;
}

const json_t *td_schema_resolve(struct td_schema *s, const json_t *ref)
{
    const char *text = json_string_value(ref);
    const json_t *to = s->root;
    if (!text || text[0] != '#' || (text[1] && text[1] != '/')) {
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "$ref is %.100s, must be # or #/...: a part of the same schema",
                        text ? text : "no string");
        return NULL;
    }
    td_schema_work(s, 1 + strlen(text) / 8);
    if (s->b->status) return NULL;
    char *pointer = strdup(text + 1);
    if (!pointer) td_builder_fail(s->b, TD_ERR_NOMEM, "no memory for $ref");
    if (pointer) unescape(pointer);
    for (const char *at = pointer; at && *at == '/' && to;) {
        char buffer[TD_SCHEMA_MAX_KEY_BYTES + 1];
        at++;
        const char *part = pointer_part(&at, buffer);
        if (part && json_is_array(to))
            to = *part && strspn(part, "0123456789") == strlen(part) && strlen(part) < 6
                     ? json_array_get(to, strtoul(part, NULL, 10))
                     : NULL;
        else
            to = part ? json_object_get(to, part) : NULL;
    }
    free(pointer);
    if (!to)
        td_builder_fail(s->b, TD_ERR_INVALID, "$ref is %.100s, which is not in the schema", text);
    return to;
}

static int32_t ref_call(struct td_schema *s, const json_t *target, int depth)
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
    int32_t e = td_schema_expr(s, target, depth + 1);
    if (!b->status) b->rules[rule].expr = e;
    return td_expr_call(b, rule);
}

const json_t *td_schema_follow(struct td_schema *s, const json_t *schema)
{
    const json_t *ref = json_object_get(schema, "$ref");
    for (int hops = 0; ref && !td_schema_restricts(schema, "$ref") && !s->b->status; hops++) {
        schema = td_schema_resolve(s, ref);
        ref = json_object_get(schema, "$ref");
        if (hops > TD_GRAMMAR_MAX_DEPTH)
            td_builder_fail(s->b, TD_ERR_LIMIT, "$ref leads on more than %d times, the limit",
                            TD_GRAMMAR_MAX_DEPTH);
    }
    return s->b->status ? NULL : schema;
}

/* Of `base` and `part` together. */
int32_t td_schema_together(struct td_schema *s, const json_t *base, const json_t *part, int depth)
{
    if (json_is_true(part)) return td_schema_expr(s, base, depth + 1);
    if (json_is_false(part)) return td_expr_nothing(s->b, "the schema false allows nothing");
    if (!json_is_object(part)) {
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED, "a schema in allOf, anyOf or oneOf is no object");
        return 0;
    }
    json_t *merged = td_schema_join(s, base, part);
    int32_t e = merged ? td_schema_expr(s, merged, depth + 1) : 0;
    json_decref(merged);
    return e;
}

static int32_t any_of(struct td_schema *s, const json_t *schema, const char *key, int depth)
{
    const json_t *parts = json_object_get(schema, key);
    json_t *base = td_json_without(schema, key);
    bool alone = !td_schema_restricts(schema, key);
    int32_t alt = td_expr_new(s->b, TD_EXPR_ALT, 0, 0);
    size_t n = json_array_size(parts), n_used = 0;
    if (!n)
        td_builder_fail(s->b, TD_ERR_INVALID, "%s must be an array of at least one schema", key);
    if (n > TD_GRAMMAR_MAX_CHOICES)
        td_builder_fail(s->b, TD_ERR_LIMIT, "%s has %zu schemas, limit %d", key, n,
                        TD_GRAMMAR_MAX_CHOICES);
    for (size_t i = 0; i < n && !s->b->status; i++) {
        const json_t *part = json_array_get(parts, i);
        if (json_is_false(part)) continue;
        json_t *both = !alone && json_is_object(part) ? td_schema_join(s, base, part) : NULL;
        bool nothing = both && td_schema_allows_nothing(s, both);
        n_used += !nothing;
        if (!nothing && !s->b->status)
            td_expr_add(s->b, alt,
                        both    ? td_schema_expr(s, both, depth + 1)
                        : alone ? td_schema_expr(s, part, depth + 1)
                                : td_schema_together(s, base, part, depth));
        json_decref(both);
    }
    if (!n_used) alt = td_expr_nothing(s->b, "%s has no schema that allows something", key);
    json_decref(base);
    return alt;
}

static int32_t all_of(struct td_schema *s, const json_t *schema, int depth)
{
    const json_t *parts = json_object_get(schema, "allOf"), *part;
    json_t *base = td_json_without(schema, "allOf"), *waiting = json_array();
    bool nothing = false;
    size_t i;
    if (!json_is_array(parts)) td_builder_fail(s->b, TD_ERR_INVALID, "allOf must be an array");
    json_array_foreach(parts, i, part)
    {
        if (s->b->status || json_is_true(part)) continue;
        part = td_schema_follow(s, part);
        if (json_is_false(part)) nothing = true;
        if (s->b->status || nothing) break;
        if (!json_is_object(part)) {
            td_builder_fail(s->b, TD_ERR_UNSUPPORTED, "a schema in allOf is no object");
            break;
        }
        if (td_schema_waits(base, part)) {
            json_array_append(waiting, (json_t *)part);
            continue;
        }
        json_t *merged = td_schema_join(s, base, part);
        json_decref(base);
        base = merged;
    }
    if (json_array_size(waiting)) {
        json_array_extend(waiting, json_object_get(base, "allOf"));
        json_object_set(base, "allOf", waiting);
    }
    json_decref(waiting);
    bool later = td_schema_condition_first(s, base); /* is a level of its own */
    int32_t e = s->b->status ? 0
                : nothing    ? td_expr_nothing(s->b, "a schema in allOf is false")
                             : td_schema_expr(s, base, later ? depth : depth + 1);
    json_decref(base);
    return e;
}

bool td_schema_is_of_type(const json_t *v, const json_t *types)
{
    bool whole =
        json_is_integer(v) || (json_is_real(v) && json_real_value(v) == floor(json_real_value(v)));
    return (json_is_string(v) && td_schema_has_type(types, "string")) ||
           (json_is_boolean(v) && td_schema_has_type(types, "boolean")) ||
           (json_is_null(v) && td_schema_has_type(types, "null")) ||
           (json_is_object(v) && td_schema_has_type(types, "object")) ||
           (json_is_array(v) && td_schema_has_type(types, "array")) ||
           (json_is_number(v) && td_schema_has_type(types, "number")) ||
           (whole && td_schema_has_type(types, "integer"));
}

static int32_t n_characters(const json_t *v)
{
    const char *text = json_string_value(v);
    int32_t n = 0;
    for (; *text; text++) n += (*text & 0xC0) != 0x80;
    return n;
}

bool td_schema_in_bounds(const json_t *schema, const json_t *v)
{
    bool text = json_is_string(v);
    const json_t *min = td_schema_bound(schema, text ? "minLength" : "minimum"),
                 *max = td_schema_bound(schema, text ? "maxLength" : "maximum"),
                 *above = text ? NULL : td_schema_bound(schema, "exclusiveMinimum"),
                 *below = text ? NULL : td_schema_bound(schema, "exclusiveMaximum");
    if (!text && !json_is_number(v)) return true;
    json_t *x = text ? json_integer(n_characters(v)) : json_incref((json_t *)v);
    bool is = !(min && td_json_is_above(min, x)) && !(max && td_json_is_above(x, max)) &&
              (!above || td_json_is_above(x, above)) && (!below || td_json_is_above(below, x));
    json_decref(x);
    return is;
}

/* Does a value of enum keep to lengths, pattern and bounds? Fails for keywords of its type that
 * would have to be tried on it. */
bool td_schema_keeps(struct td_schema *s, const json_t *schema, const json_t *v)
{
    static const char *const of_numbers[] = {"multipleOf", NULL};
    static const char *const of_arrays[] = {
        "items",    "prefixItems", "minItems",    "maxItems",         "uniqueItems",
        "contains", "minContains", "maxContains", "unevaluatedItems", NULL};
    static const char *const of_objects[] = {
        "properties",        "required",         "additionalProperties", "patternProperties",
        "propertyNames",     "minProperties",    "maxProperties",        "unevaluatedProperties",
        "dependentRequired", "dependentSchemas", "dependencies",         NULL};
    static const char *const none[] = {NULL};
    const char *const *keys = json_is_number(v)   ? of_numbers
                              : json_is_array(v)  ? of_arrays
                              : json_is_object(v) ? of_objects
                                                  : none;
    if (td_schema_excludes(s, schema, v)) return false;
    for (; *keys; keys++)
        if (json_object_get(schema, *keys))
            td_builder_fail(s->b, TD_ERR_UNSUPPORTED, "%s beside enum or const is not supported",
                            *keys);
    if (json_is_string(v)) {
        if (regex_of_format(json_object_get(schema, "format")))
            td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                            "format beside enum or const is not supported");
        json_t *pattern = json_object_get(schema, "pattern");
        if (pattern) {
            json_t *texts = json_pack("{s:s,s:O}", "type", "string", "pattern", pattern);
            bool is = td_schema_takes_text(s, "pattern", texts, json_string_value(v));
            json_decref(texts);
            if (!is) return false;
        }
        td_schema_count(s, schema, "minLength"); /* fails where it is no count */
        td_schema_count(s, schema, "maxLength");
    }
    return td_schema_in_bounds(schema, v);
}

static int32_t values(struct td_schema *s, const json_t *schema, const json_t *list)
{
    struct td_builder *b = s->b;
    const json_t *types = json_object_get(schema, "type");
    size_t n = json_array_size(list), n_texts = 0;
    struct td_grammar_text *texts = NULL;
    char **owned = NULL; /* td_expr_choice moves and drops texts */
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0), n_composed = 0;
    if (!json_is_array(list)) td_builder_fail(b, TD_ERR_INVALID, "enum must be an array");
    if (n > TD_GRAMMAR_MAX_CHOICES)
        td_builder_fail(b, TD_ERR_LIMIT, "enum has %zu values, limit %d", n,
                        TD_GRAMMAR_MAX_CHOICES);
    if (n && !b->status) {
        texts = calloc(n, sizeof *texts);
        owned = calloc(n, sizeof *owned);
        if (!texts || !owned) td_builder_fail(b, TD_ERR_NOMEM, "no memory for enum");
    }
    for (size_t i = 0; i < n && !b->status; i++) {
        const json_t *v = json_array_get(list, i);
        if (!td_schema_is_of_type(v, types) || !td_schema_keeps(s, schema, v)) continue;
        if (json_is_object(v) || json_is_array(v)) {
            td_expr_add(b, alt, td_json_this_value(s, v, 0));
            n_composed++;
            continue;
        }
        char *text = td_json_scalar(v);
        if (!text) td_builder_fail(b, TD_ERR_NOMEM, "no memory for enum");
        if (!text) break;
        owned[n_texts] = text;
        texts[n_texts++] = (struct td_grammar_text){text, strlen(text)};
    }
    if (!n)
        alt = td_expr_nothing(b, "enum has no values, or schemas that hold together have no value "
                                 "of enum or const in common");
    else if (!n_texts && !n_composed)
        alt = td_expr_nothing(b, "enum has no value that type, bounds, const and not allow");
    if (n_texts && !b->status) td_expr_add(b, alt, td_expr_choice(b, texts, n_texts));
    for (size_t i = 0; owned && i < n_texts; i++) free(owned[i]);
    free(owned);
    free(texts);
    return alt;
}

int32_t td_schema_typed(struct td_schema *s, const json_t *schema, const char *type, int depth)
{
    struct td_builder *b = s->b;
    if (!strcmp(type, "string")) return strings(s, schema);
    if (!strcmp(type, "integer")) return numbers(s, schema, true);
    if (!strcmp(type, "number")) return numbers(s, schema, false);
    if (!strcmp(type, "boolean"))
        return td_expr_alt(b, td_expr_text(b, "true"), td_expr_text(b, "false"));
    if (!strcmp(type, "null")) return td_expr_text(b, "null");
    if (!strcmp(type, "array")) return td_schema_array(s, schema, depth);
    if (!strcmp(type, "object")) return td_schema_object(s, schema, depth);
    td_builder_fail(b, TD_ERR_INVALID, "type is %.40s, which JSON Schema does not have", type);
    return 0;
}

const char *td_schema_type_of_keywords(const json_t *schema)
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

/* Counts the schema, and refuses one that has what is not supported. */
static bool is_readable(struct td_schema *s, const json_t *schema, int depth)
{
    struct td_builder *b = s->b;
    const char *key;
    json_t *value;
    size_t n = json_object_size(schema); /* and names, values and schemas that are gone through */
    json_object_foreach((json_t *)schema, key, value)
    {
        n += json_array_size(value) + json_object_size(value);
    }
    td_schema_work(s, n);
    if (depth > TD_GRAMMAR_MAX_DEPTH)
        td_builder_fail(b, TD_ERR_LIMIT, "schemas are nested more than %d deep, the limit",
                        TD_GRAMMAR_MAX_DEPTH);
    else if (++s->n_seen > MAX_SCHEMAS)
        td_builder_fail(b, TD_ERR_LIMIT, "more than %d schemas once they are merged, the limit",
                        MAX_SCHEMAS);
    else if (!json_is_object(schema) && !json_is_boolean(schema))
        td_builder_fail(b, TD_ERR_INVALID, "a schema is neither an object nor a boolean");
    td_schema_check_types(s, json_object_get(schema, "type"));
    const char *refused = td_schema_refused(schema);
    if (refused) td_builder_fail(b, TD_ERR_UNSUPPORTED, "the keyword %s is not supported", refused);
    return !b->status;
}

/* Of a schema whose other keywords are those of its types. */
static int32_t by_type(struct td_schema *s, const json_t *schema, int depth)
{
    static const char *const dependent[] = {"dependentRequired", "dependentSchemas", "dependencies",
                                            NULL};
    struct td_builder *b = s->b;
    const json_t *v = json_object_get(schema, "type"), *t;
    for (const char *const *key = dependent; *key && td_schema_has_type(v, "object"); key++)
        if (json_object_get(schema, *key)) return td_schema_dependent(s, schema, *key, depth);
    if (json_object_get(schema, "not")) return td_schema_without_not(s, schema, depth);
    if (!v) {
        const char *type = td_schema_type_of_keywords(schema);
        return type ? td_schema_typed(s, schema, type, depth) : td_json_value(s);
    }
    if (json_is_string(v)) return td_schema_typed(s, schema, json_string_value(v), depth);
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
    size_t i, n = json_array_size(v);
    if (!n)
        return td_expr_nothing(b, "type has no names, or schemas that hold together have no "
                                  "type in common");
    json_array_foreach(v, i, t)
    {
        if (!json_is_string(t)) td_builder_fail(b, TD_ERR_INVALID, "type must hold strings");
        if (b->status) return 0;
        td_expr_add(b, alt, td_schema_typed(s, schema, json_string_value(t), depth));
    }
    return alt;
}

int32_t td_schema_expr(struct td_schema *s, const json_t *schema, int depth)
{
    struct td_builder *b = s->b;
    const json_t *v;
    if (b->status || !is_readable(s, schema, depth)) return 0;
    if (json_is_false(schema)) return td_expr_nothing(b, "the schema false allows nothing");
    if ((v = json_object_get(schema, "$ref"))) {
        const json_t *target = td_schema_resolve(s, v);
        if (!target) return 0;
        if (!td_schema_restricts(schema, "$ref")) return ref_call(s, target, depth);
        json_t *base = td_json_without(schema, "$ref");
        int32_t e = td_schema_together(s, base, target, depth);
        json_decref(base);
        return e;
    }
    if (json_object_get(schema, "allOf") && !td_schema_condition_first(s, schema))
        return all_of(s, schema, depth);
    if (json_object_get(schema, "anyOf")) return any_of(s, schema, "anyOf", depth);
    if (json_object_get(schema, "oneOf")) return any_of(s, schema, "oneOf", depth);
    const json_t *without = json_object_get(schema, "not");
    if (without && !td_schema_is_plain(without)) return td_schema_not(s, schema, depth);
    if (json_object_get(schema, "if")) return td_schema_if(s, schema, depth);
    if ((v = json_object_get(schema, "enum"))) return values(s, schema, v);
    if ((v = json_object_get(schema, "const"))) {
        json_t *one = json_pack("[O]", v);
        int32_t e = values(s, schema, one);
        json_decref(one);
        return e;
    }
    return by_type(s, schema, depth);
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
static int32_t root_expr(struct td_schema *s, const json_t *root, int32_t rule)
{
    s->root = s->refs[0].target = root;
    s->refs[0].rule = rule;
    s->n_refs = 1;
    if (has_inner_reference(root, true, false))
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "$ref below an $id that is not the root's is not supported");
    return td_schema_expr(s, root, 0);
}

void td_grammar_read_schema(struct td_builder *b, const char *text, size_t n)
{
    json_error_t why;
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &why);
    if (!root) {
        td_builder_fail(b, TD_ERR_INVALID, "not JSON, at byte %d: %.150s", why.position, why.text);
        return;
    }
    struct td_schema s = {.b = b};
    s.refs = calloc(MAX_REFS, sizeof *s.refs);
    if (!s.refs) {
        td_builder_fail(b, TD_ERR_NOMEM, "no memory for $ref");
    } else { /* the root is rule 0, for those who refer to it */
        int32_t e = root_expr(&s, root, 0);
        if (!b->status) b->rules[0].expr = e;
        if (!b->status) td_builder_prune(b);
        td_rule_check(b, 0);
    }
    td_schema_names_free(&s);
    free(s.refs);
    json_decref(root);
}

/* ---- arguments of tools ---------------------------------------------------------------------- */

/* The schema, of objects alone: a new reference. NULL: it has none, and the builder has failed. */
static json_t *object_schema(struct td_builder *b, json_t *parameters)
{
    bool may = json_is_true(parameters) ||
               (json_is_object(parameters) &&
                td_schema_has_type(json_object_get(parameters, "type"), "object"));
    if (!may) {
        td_builder_fail(b, TD_ERR_INVALID, "parameters must be the schema of an object");
        return NULL;
    }
    json_t *root = json_is_true(parameters) ? json_object() : json_copy(parameters);
    if (!root || json_object_set_new(root, "type", json_string("object")))
        td_builder_fail(b, TD_ERR_NOMEM, "no memory for parameters");
    return root;
}

static void name_tool(char *out, size_t room, const json_t *tool)
{
    snprintf(out, room, "tool \"%.64s\"", json_string_value(json_object_get(tool, "name")));
}

void td_grammar_read_arguments(struct td_builder *b, const json_t *tools, int32_t *ret_rules)
{
    struct td_schema s = {.b = b};
    const char *what = b->what;
    char name[96];
    s.refs = calloc(MAX_REFS, sizeof *s.refs);
    if (!s.refs) td_builder_fail(b, TD_ERR_NOMEM, "no memory for $ref");
    b->what = name; /* what is wrong is said of the tool */
    for (size_t i = 0; i < json_array_size(tools) && !b->status; i++) {
        const json_t *tool = json_array_get(tools, i);
        json_t *parameters = json_object_get(tool, "parameters");
        name_tool(name, sizeof name, tool);
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
    if (!b->status) td_builder_prune(b);
    for (size_t i = 0; i < json_array_size(tools) && !b->status; i++) {
        name_tool(name, sizeof name, json_array_get(tools, i));
        td_rule_check(b, ret_rules[i]);
    }
    b->what = what;
    td_schema_names_free(&s);
    free(s.refs);
}
