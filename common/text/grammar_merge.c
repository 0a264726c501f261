/* grammar_merge.c - one JSON schema of two that hold together, and which keywords there are.
 *
 * The merged schema allows what both allow. Where the two differ in a keyword that cannot be
 * joined, or one speaks of its own side's other keywords, they are not merged, and the keyword is
 * named. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"

#define MAX_MULTIPLE 1000000000 /* of multipleOf of two schemas */
/* Steps of one grammar: entries of schemas that are read, and that are compared and copied when
 * schemas are merged, and bytes of references and of schemas of names, which are read again each
 * time. Lists of allOf in lists of allOf multiply. */
#define MAX_WORK (1 << 20)

static bool is_one_of(const char *key, const char *const *names)
{
    for (; *names; names++)
        if (!strcmp(key, *names)) return true;
    return false;
}

static const char *const refused[] = {"$dynamicRef", "$recursiveRef", NULL};
/* The other keywords that are read here; any further one describes, or is not of JSON Schema. */
static const char *const restricting[] = {"type",
                                          "enum",
                                          "const",
                                          "properties",
                                          "required",
                                          "additionalProperties",
                                          "items",
                                          "prefixItems",
                                          "additionalItems",
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
                                          "maxContains",
                                          "unevaluatedItems",
                                          "unevaluatedProperties",
                                          "patternProperties",
                                          "propertyNames",
                                          "minProperties",
                                          "maxProperties",
                                          "dependentRequired",
                                          "dependentSchemas",
                                          "dependencies",
                                          "not",
                                          "if",
                                          "then",
                                          "else",
                                          "anyOf",
                                          "oneOf",
                                          "allOf",
                                          "$ref",
                                          NULL};

/* Does it restrict beyond the keyword `but`? */
bool td_schema_restricts(const json_t *schema, const char *but)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)schema, key,
                        value) if (strcmp(key, but) && is_one_of(key, restricting)) return true;
    return false;
}

bool td_schema_is_keyword(const char *key)
{
    return is_one_of(key, restricting) || is_one_of(key, refused);
}

bool td_schema_has_type(const json_t *types, const char *name)
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
        bool in_a = td_schema_has_type(a, *t), in_b = td_schema_has_type(b, *t);
        if (!strcmp(*t, "integer")) { /* a number that is whole */
            bool num_a = td_schema_has_type(a, "number"), num_b = td_schema_has_type(b, "number");
            if (num_a && num_b) continue;
            in_a = in_a || num_a, in_b = in_b || num_b;
        }
        if (in_a && in_b) json_array_append_new(out, json_string(*t));
    }
    return out;
}

void td_schema_work(struct td_schema *s, size_t n)
{
    s->n_work += n;
    if (s->n_work > MAX_WORK)
        td_builder_fail(s->b, TD_ERR_LIMIT,
                        "to read its schemas as often as it has them read takes more than %d "
                        "steps, the limit",
                        MAX_WORK);
}

static size_t n_entries(const json_t *v)
{
    const char *key;
    json_t *inner;
    size_t i, n = 1;
    json_object_foreach((json_t *)v, key, inner) n += n_entries(inner);
    json_array_foreach(v, i, inner) n += n_entries(inner);
    return n;
}

/* A schema of both. One that was made here grows: lists in lists would be as deep as there are
 * schemas. */
json_t *td_schema_all_of(struct td_schema *s, json_t *a, json_t *b)
{
    json_t *list = json_object_get(a, "allOf");
    bool grows = json_object_size(a) == 1 && json_is_array(list);
    td_schema_work(s, json_array_size(list));
    list = grows ? json_copy(list) : json_pack("[O]", a);
    json_array_append(list, b);
    return json_pack("{s:o}", "allOf", list);
}

/* Of keywords alone that are always merged? */
static bool is_mergeable(const json_t *schema)
{
    static const char *const keys[] = {"type",
                                       "enum",
                                       "const",
                                       "minimum",
                                       "maximum",
                                       "exclusiveMinimum",
                                       "exclusiveMaximum",
                                       "minLength",
                                       "maxLength",
                                       "minItems",
                                       "maxItems",
                                       NULL};
    const char *key;
    json_t *value;
    if (!json_is_object(schema)) return false;
    json_object_foreach((json_t *)schema, key,
                        value) if (td_schema_is_keyword(key) && !is_one_of(key, keys)) return false;
    return true;
}

/* The properties of both; a name that both have must keep to both its schemas, which are one where
 * that can be: what is one can be seen to allow nothing. */
static json_t *merge_properties(struct td_schema *s, json_t *a, json_t *b)
{
    json_t *joined = json_copy(a), *schema;
    const char *name;
    json_object_foreach(b, name, schema)
    {
        json_t *other = json_object_get(a, name);
        if (!other || json_is_true(other) || json_is_false(schema) || json_equal(other, schema))
            json_object_set(joined, name, schema);
        else if (is_mergeable(other) && is_mergeable(schema))
            json_object_set_new(joined, name, td_schema_merge(s, other, schema));
        else if (!json_is_true(schema) && !json_is_false(other))
            json_object_set_new(joined, name, td_schema_all_of(s, other, schema));
    }
    return joined;
}

static json_t *merge_arrays(json_t *a, json_t *b)
{
    json_t *joined = json_copy(a);
    json_array_extend(joined, b);
    return joined;
}

/* -1, 0 or 1: a whole number below, equal to or above a double, which has fewer digits. */
static int compare_whole(int64_t a, double b)
{
    if (b >= 0x1p63) return -1;
    if (b < -0x1p63) return 1;
    int64_t whole = (int64_t)b;
    double rest = b - (double)whole;
    return a != whole ? (a > whole) - (a < whole) : (rest < 0) - (rest > 0);
}

bool td_json_is_above(const json_t *a, const json_t *b)
{
    if (json_is_integer(a) && json_is_integer(b))
        return json_integer_value(a) > json_integer_value(b);
    if (json_is_integer(a)) return compare_whole(json_integer_value(a), json_real_value(b)) > 0;
    if (json_is_integer(b)) return compare_whole(json_integer_value(b), json_real_value(a)) < 0;
    return json_real_value(a) > json_real_value(b);
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

/* Of two plain ones, what is neither: one not of anyOf. NULL: they are not merged. */
static json_t *merge_not(json_t *a, json_t *b)
{
    if (!td_schema_is_plain(a)) return NULL;
    json_t *parts = json_copy(json_object_get(a, "anyOf"));
    if (!parts) parts = json_pack("[O]", a);
    json_array_append(parts, b);
    json_t *both = json_pack("{s:o}", "anyOf", parts);
    if (td_schema_is_plain(both)) return both;
    json_decref(both);
    return NULL;
}

/* Puts what keeps to both values of a keyword into out; false: the two are not merged. */
static bool merge_keyword(struct td_schema *s, json_t *out, const char *key, json_t *old,
                          json_t *value)
{
    static const char *const by_name[] = {"properties", "patternProperties", "dependentSchemas",
                                          NULL};
    if (old) td_schema_work(s, json_object_size(old) + json_array_size(old) + n_entries(value));
    if (s->b->status) return true;
    if (!old || json_equal(old, value)) {
        json_object_set(out, key, value);
    } else if (is_one_of(key, by_name) && json_is_object(old) && json_is_object(value)) {
        json_object_set_new(out, key, merge_properties(s, old, value));
    } else if (!strcmp(key, "uniqueItems") && json_is_boolean(old) && json_is_boolean(value)) {
        json_object_set(out, key, json_true());
    } else if ((!strcmp(key, "required") || !strcmp(key, "allOf")) && json_is_array(old) &&
               json_is_array(value)) {
        json_object_set_new(out, key, merge_arrays(old, value));
    } else if (!strcmp(key, "type")) {
        td_schema_check_types(s, old);
        td_schema_check_types(s, value);
        json_object_set_new(out, key, common_types(old, value));
    } else if (!strcmp(key, "enum") && json_is_array(old) && json_is_array(value)) {
        json_object_set_new(out, key, td_schema_common_values(s, old, value));
    } else if (!strcmp(key, "const")) {
        if (!td_json_is_same(old, value)) json_object_set_new(out, "enum", json_array());
    } else if (!strcmp(key, "not")) {
        json_t *neither = merge_not(old, value);
        if (!neither) return false;
        json_object_set_new(out, key, neither);
    } else if (!strcmp(key, "multipleOf")) {
        int64_t both = common_multiple(old, value);
        if (!both) return false;
        json_object_set_new(out, key, json_integer(both));
    } else if (json_is_number(old) && json_is_number(value)) {
        bool low = !strncmp(key, "min", 3) || !strcmp(key, "exclusiveMinimum");
        if (low == td_json_is_above(value, old)) json_object_set(out, key, value);
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

/* Does b name but properties that a names, too? */
static bool names_no_more(const json_t *a, const json_t *b)
{
    const json_t *properties = json_object_get(a, "properties");
    const char *name;
    json_t *schema;
    if (json_object_get(b, "patternProperties") || json_object_get(b, "additionalProperties"))
        return false;
    json_object_foreach(json_object_get(b, "properties"), name,
                        schema) if (!json_object_get(properties, name)) return false;
    return true;
}

/* Does additionalProperties of either side restrict what only the other names? */
static bool is_closed(const json_t *a, const json_t *b)
{
    static const char *const names[] = {"properties", "patternProperties", "additionalProperties",
                                        NULL};
    const json_t *of_a = json_object_get(a, "additionalProperties"),
                 *of_b = json_object_get(b, "additionalProperties");
    bool closed = (of_a && !json_is_true(of_a)) || (of_b && !json_is_true(of_b));
    return closed && has_any(a, names) && has_any(b, names) && !names_no_more(a, b) &&
           !names_no_more(b, a);
}

/* The keyword that speaks of its own side's other keywords, and would mean something else once a
 * and b are one; NULL: none does. What a leaves unevaluated is what b, which stands in it, does not
 * evaluate either. */
static const char *scope_clash(const json_t *a, const json_t *b)
{
    static const char *const contains[] = {"contains", "minContains", "maxContains", NULL};
    if ((json_object_get(a, "items") && json_object_get(b, "prefixItems")) ||
        (json_object_get(b, "items") && json_object_get(a, "prefixItems")))
        return "items";
    if (is_closed(a, b)) return "additionalProperties";
    if (has_any(a, contains) && has_any(b, contains)) return "contains";
    if (json_object_get(b, "unevaluatedProperties")) return "unevaluatedProperties";
    return json_object_get(b, "unevaluatedItems") ? "unevaluatedItems" : NULL;
}

/* then and else speak of the `if` beside them, and without it say nothing. */
static bool is_stray(const json_t *schema, const char *key)
{
    return (!strcmp(key, "then") || !strcmp(key, "else")) && !json_object_get(schema, "if");
}

json_t *td_schema_tuple(const json_t *schema)
{
    json_t *items = json_object_get(schema, "items"), *out = json_copy((json_t *)schema);
    json_t *others = json_object_get(schema, "additionalItems");
    if (others && out)
        json_object_del(out, "additionalItems"); /* beside a schema it says nothing */
    if (!json_is_array(items) || json_object_get(schema, "prefixItems") || !out) return out;
    json_object_set(out, "prefixItems", items);
    json_object_del(out, "items");
    if (others) json_object_set(out, "items", others);
    return out;
}

/* What keeps to both: a new object. NULL with the builder failed. */
json_t *td_schema_merge(struct td_schema *s, const json_t *a, const json_t *b)
{
    td_schema_work(s, 1 + json_object_size(a) + json_object_size(b));
    if (s->b->status) return NULL;
    json_t *out = td_schema_tuple(a), *part = td_schema_tuple(b);
    const char *key, *clash = scope_clash(out, part);
    json_t *value;
    if (out && is_stray(a, "then")) json_object_del(out, "then");
    if (out && is_stray(a, "else")) json_object_del(out, "else");
    json_object_foreach(part, key, value)
    {
        if (!out || clash || !td_schema_is_keyword(key)) continue;
        if (is_stray(b, key)) continue;
        if (!merge_keyword(s, out, key, json_object_get(out, key), value)) clash = key;
    }
    bool read = out && part;
    if (clash && out) {
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "schemas that hold together (allOf, or keywords beside $ref, anyOf or "
                        "oneOf) differ in %.64s, and are not merged",
                        clash);
    }
    json_decref(part);
    if (!read) td_builder_fail(s->b, TD_ERR_NOMEM, "no memory to merge schemas");
    if (!s->b->status) return out;
    json_decref(out);
    return NULL;
}

bool td_schema_waits(const json_t *a, const json_t *b)
{
    const json_t *x = json_object_get(a, "not");
    return (json_object_get(a, "if") && json_object_get(b, "if")) ||
           (json_object_get(b, "not") && x && !td_schema_is_plain(x));
}

json_t *td_schema_join(struct td_schema *s, const json_t *a, const json_t *b)
{
    json_t *of_a = json_object_get(a, "not"), *of_b = json_object_get(b, "not");
    bool swap = of_a && of_b && td_schema_is_plain(of_a) && !td_schema_is_plain(of_b);
    if (!swap && !td_schema_waits(a, b)) return td_schema_merge(s, a, b);
    json_t *out = json_copy((json_t *)a), *later = json_copy((json_t *)b);
    json_t *parts = json_copy(json_object_get(a, "allOf"));
    if (swap) { /* a plain one is never resolved */
        json_object_set(out, "not", of_b);
        json_object_set(later, "not", of_a);
    }
    td_schema_work(s, 1 + json_array_size(parts));
    if (!parts) parts = json_array();
    json_array_append_new(parts, later);
    json_object_set_new(out, "allOf", parts);
    return out;
}

bool td_schema_condition_first(struct td_schema *s, const json_t *schema)
{
    const json_t *part, *x = json_object_get(schema, "not");
    size_t i;
    if (!json_object_get(schema, "if") && !(x && !td_schema_is_plain(x))) return false;
    td_schema_work(s, json_array_size(json_object_get(schema, "allOf")));
    json_array_foreach(json_object_get(schema, "allOf"), i,
                       part) if (!td_schema_waits(schema, part)) return false;
    return json_is_array(json_object_get(schema, "allOf"));
}

json_t *td_json_without(const json_t *schema, const char *key)
{
    json_t *out = json_copy((json_t *)schema);
    if (out) json_object_del(out, key);
    return out;
}

const char *td_schema_refused(const json_t *schema)
{
    for (const char *const *k = refused; *k; k++)
        if (json_object_get(schema, *k)) return *k;
    return NULL;
}
