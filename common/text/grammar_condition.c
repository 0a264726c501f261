/* grammar_condition.c - `not` and `if` of a JSON schema, where they can be said without them.
 *
 * A `not` of values or types alone is plain: it stays in the schema until its type is known, and
 * takes values or types away. Any other is a condition, and so is an `if`: facts that all hold, of
 * the value or of a property, each of which has an opposite:
 *     {"type", "enum", "const", "minimum", "maxLength" ...: the value
 *      "properties": {name: {the same}}, "required": [name]}
 * {"if": c, "then": x, "else": y} is one of: the facts of c hold, and x; those before fact i hold,
 * fact i does not, and y. {"not": c} is {"if": c, "then": false}. No text is of two alternatives.
 * What is no condition of that kind is refused by name. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"

#define MAX_FACTS 16
#define MAX_TYPES 7    /* that there are: a list of more repeats itself */
#define MAX_NUMBERS 64 /* that are not among any others */
#define MAX_PLAIN 256  /* schemas of a plain not: each is tried on each value of enum */

static const char *const type_names[] = {"string", "number", "boolean", "null",
                                         "object", "array",  "integer", NULL};

/* ---- values ---------------------------------------------------------------------------------- */

bool td_json_is_same(const json_t *a, const json_t *b)
{
    const char *key;
    json_t *value;
    size_t i;
    if (json_is_real(a) && json_is_integer(b)) return td_json_is_same(b, a);
    if (json_is_integer(a) && json_is_real(b)) {
        double x = json_real_value(b);
        return x >= -0x1p63 && x < 0x1p63 && (double)(json_int_t)x == x &&
               (json_int_t)x == json_integer_value(a);
    }
    if (json_is_array(a) && json_is_array(b)) {
        if (json_array_size(a) != json_array_size(b)) return false;
        json_array_foreach(a, i,
                           value) if (!td_json_is_same(value, json_array_get(b, i))) return false;
        return true;
    }
    if (!json_is_object(a) || !json_is_object(b)) return json_equal(a, b);
    if (json_object_size(a) != json_object_size(b)) return false;
    json_object_foreach((json_t *)a, key, value)
    {
        const json_t *other = json_object_get(b, key);
        if (!other || !td_json_is_same(value, other)) return false;
    }
    return true;
}

static bool is_among(struct td_schema *s, const json_t *list, const json_t *v)
{
    size_t i, n = json_array_size(list);
    td_schema_work(s, 1 + n);
    for (i = 0; i < n && !s->b->status; i++)
        if (td_json_is_same(json_array_get(list, i), v)) return true;
    return false;
}

json_t *td_schema_common_values(struct td_schema *s, const json_t *a, const json_t *b)
{
    json_t *out = json_array(), *v;
    size_t i;
    json_array_foreach(a, i, v) if (is_among(s, b, v)) json_array_append(out, v);
    return out;
}

static bool is_type(const json_t *v)
{
    for (const char *const *t = type_names; *t && json_is_string(v); t++)
        if (!strcmp(json_string_value(v), *t)) return true;
    return false;
}

void td_schema_check_types(struct td_schema *s, const json_t *types)
{
    const json_t *type = types;
    size_t i = 0, n = json_is_array(types) ? json_array_size(types) : types ? 1 : 0;
    if (n > MAX_TYPES)
        td_builder_fail(s->b, TD_ERR_INVALID, "type has %zu names, of which there are %d", n,
                        MAX_TYPES);
    for (; i < n && !s->b->status; i++) {
        if (json_is_array(types)) type = json_array_get(types, i);
        if (!json_is_string(type))
            td_builder_fail(s->b, TD_ERR_INVALID, "type must be a name, or an array of names");
        else if (!is_type(type))
            td_builder_fail(s->b, TD_ERR_INVALID, "type is %.40s, which JSON Schema does not have",
                            json_string_value(type));
    }
}

/* Are `keys` all that it says? */
static bool has_only(const json_t *schema, const char *const *keys)
{
    const char *key;
    json_t *value;
    if (!json_is_object(schema)) return false;
    json_object_foreach((json_t *)schema, key, value)
    {
        const char *const *k = keys;
        while (*k && strcmp(*k, key)) k++;
        if (!*k && td_schema_is_keyword(key)) return false;
    }
    return true;
}

/* Of enum, const and type alone. */
static bool is_of_values(const json_t *x)
{
    static const char *const keys[] = {"enum", "const", "type", NULL};
    const json_t *type = json_object_get(x, "type"), *list = json_object_get(x, "enum"), *t;
    size_t i;
    if (!has_only(x, keys) || (list && !json_is_array(list)) || json_array_size(type) > MAX_TYPES)
        return false;
    json_array_foreach(type, i, t) if (!is_type(t)) return false;
    return type ? json_is_array(type) || is_type(type) : list || json_object_get(x, "const");
}

static bool is_plain(const json_t *x, int *left)
{
    static const char *const keys[] = {"anyOf", NULL};
    const json_t *parts = json_object_get(x, "anyOf"), *part;
    size_t i;
    if (--*left < 0) return false;
    if (!parts) return is_of_values(x);
    if (!json_is_array(parts) || !has_only(x, keys)) return false;
    json_array_foreach(parts, i, part) if (!is_plain(part, left)) return false;
    return true;
}

bool td_schema_is_plain(const json_t *x)
{
    int left = MAX_PLAIN;
    return is_plain(x, &left);
}

/* Is the value valid by a plain schema? */
static bool takes_value(struct td_schema *s, const json_t *x, const json_t *v)
{
    const json_t *parts = json_object_get(x, "anyOf"), *list = json_object_get(x, "enum"),
                 *only = json_object_get(x, "const"), *part;
    size_t i;
    json_array_foreach(parts, i, part) if (takes_value(s, part, v)) return true;
    return !parts && td_schema_is_of_type(v, json_object_get(x, "type")) &&
           (!list || is_among(s, list, v)) && (!only || td_json_is_same(only, v));
}

bool td_schema_excludes(struct td_schema *s, const json_t *schema, const json_t *v)
{
    const json_t *only = json_object_get(schema, "const"), *x = json_object_get(schema, "not");
    const char *key = json_object_get(schema, "if") ? "if" : NULL;
    if (x && !td_schema_is_plain(x)) key = "not";
    if (key) td_builder_fail(s->b, TD_ERR_UNSUPPORTED, "%s beside enum is not supported here", key);
    return (only && !td_json_is_same(only, v)) || (x && takes_value(s, x, v));
}

/* ---- a plain not ----------------------------------------------------------------------------- */

/* What a plain schema takes of a type: all of it, values, and of numbers those that are whole. */
struct taken {
    bool all, whole;
    json_t *values;
};

static void taken_of(struct td_schema *s, const json_t *x, const json_t *type, struct taken *t)
{
    const json_t *parts = json_object_get(x, "anyOf"), *types = json_object_get(x, "type"),
                 *only = json_object_get(x, "const"), *list = json_object_get(x, "enum"), *v;
    const char *name = json_string_value(type);
    json_t *one = only && !list ? json_pack("[O]", only) : NULL;
    size_t i;
    td_schema_work(s, 1 + json_array_size(list));
    if (s->b->status) list = NULL;
    json_array_foreach(parts, i, v) taken_of(s, v, type, t);
    if (!parts && !list && !only) {
        bool number = td_schema_has_type(types, "number");
        t->all = t->all || td_schema_has_type(types, name) || (number && !strcmp(name, "integer"));
        t->whole = t->whole ||
                   (!number && !strcmp(name, "number") && td_schema_has_type(types, "integer"));
    }
    json_array_foreach(list ? list : one, i, v)
    {
        if (td_schema_is_of_type(v, type) && td_schema_is_of_type(v, types) &&
            (!only || td_json_is_same(only, v)))
            json_array_append(t->values, (json_t *)v);
    }
    json_decref(one);
}

/* Any string but these. */
static int32_t other_string(struct td_schema *s, const json_t *schema, const json_t *values)
{
    static const char *const keys[] = {"minLength", "maxLength", "pattern", "format", NULL};
    struct td_grammar_text *names = calloc(json_array_size(values) + 1, sizeof *names);
    const json_t *v;
    size_t i, n = 0;
    int32_t e = 0;
    for (const char *const *k = keys; *k; k++)
        if (json_object_get(schema, *k))
            td_builder_fail(s->b, TD_ERR_UNSUPPORTED, "not of strings beside %s is not supported",
                            *k);
    if (!names) td_builder_fail(s->b, TD_ERR_NOMEM, "no memory for not");
    json_array_foreach(values, i, v)
    {
        char *text = json_dumps(v, JSON_ENCODE_ANY);
        if (!text) td_builder_fail(s->b, TD_ERR_NOMEM, "no memory for not");
        if (json_string_length(v) > TD_SCHEMA_MAX_KEY_BYTES)
            td_builder_fail(s->b, TD_ERR_LIMIT, "a string of not has %zu bytes, limit %d",
                            json_string_length(v), TD_SCHEMA_MAX_KEY_BYTES);
        if (text && names && !strchr(text, '\\')) /* others are not written without an escape */
            names[n++] = (struct td_grammar_text){json_string_value(v), json_string_length(v)};
        free(text);
    }
    if (!s->b->status) e = td_schema_other_text(s, names, n);
    free(names);
    return e;
}

/* Numbers but these: those between each two of them. */
static int32_t other_number(struct td_schema *s, const json_t *schema, const char *type,
                            const json_t *values)
{
    const json_t *v[MAX_NUMBERS], *x;
    int32_t alt = td_expr_new(s->b, TD_EXPR_ALT, 0, 0);
    size_t i, k, n = 0;
    if (json_array_size(values) > MAX_NUMBERS)
        td_builder_fail(s->b, TD_ERR_LIMIT, "not of %zu numbers beside any others, limit %d",
                        json_array_size(values), MAX_NUMBERS);
    if (s->b->status) return 0;
    json_array_foreach(values, i, x)
    {
        for (k = n++; k > 0 && td_json_is_above(v[k - 1], x); k--) v[k] = v[k - 1];
        v[k] = x;
    }
    for (i = 0; i <= n && !s->b->status; i++) {
        json_t *part = json_object(), *both;
        if (i > 0) json_object_set(part, "exclusiveMinimum", (json_t *)v[i - 1]);
        if (i < n) json_object_set(part, "exclusiveMaximum", (json_t *)v[i]);
        both = td_schema_merge(s, schema, part);
        if (both)
            td_expr_add(s->b, alt, td_expr_schema_number(s->b, both, !strcmp(type, "integer")));
        json_decref(both);
        json_decref(part);
    }
    return alt;
}

/* Numbers that are not whole, so few digits that no double rounds them to one. */
static int32_t broken_number(struct td_schema *s, const json_t *schema)
{
    static const char regex[] = "-?(0|[1-9][0-9]{0,8})\\.[0-9]{0,5}[1-9]";
    static const char *const keys[] = {"minimum",          "maximum",    "exclusiveMinimum",
                                       "exclusiveMaximum", "multipleOf", NULL};
    for (const char *const *k = keys; *k; k++)
        if (json_object_get(schema, *k))
            td_builder_fail(s->b, TD_ERR_UNSUPPORTED, "not of integers beside %s is not supported",
                            *k);
    return td_expr_regex(s->b, regex, sizeof regex - 1, TD_REGEX_OUTPUT);
}

/* The values of a type that a plain not leaves; -1: none. */
static int32_t rest_of_type(struct td_schema *s, const json_t *schema, const json_t *type,
                            int depth)
{
    const char *name = json_string_value(type);
    struct taken t = {.values = json_array()};
    int32_t e = -1;
    taken_of(s, json_object_get(schema, "not"), type, &t);
    size_t n = json_array_size(t.values);
    bool number = !strcmp(name, "number") || !strcmp(name, "integer");
    if (!t.all && n && (t.whole || !strcmp(name, "object") || !strcmp(name, "array")))
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "not of %s is supported beside an enum alone, here the type is %s",
                        t.whole ? "integers and of other numbers" : "objects or arrays", name);
    if (t.all || s->b->status || (n && !strcmp(name, "null"))) {
        e = -1;
    } else if (n && !strcmp(name, "boolean")) {
        bool yes = !is_among(s, t.values, json_true()), no = !is_among(s, t.values, json_false());
        if (yes || no) e = td_expr_text(s->b, yes ? "true" : "false");
    } else if (t.whole) {
        e = broken_number(s, schema);
    } else if (n && number) {
        e = other_number(s, schema, name, t.values);
    } else if (n) {
        e = other_string(s, schema, t.values);
    } else {
        e = td_schema_typed(s, schema, name, depth);
    }
    json_decref(t.values);
    return e;
}

int32_t td_schema_without_not(struct td_schema *s, const json_t *schema, int depth)
{
    json_t *types = json_object_get(schema, "type"), *names = json_array(), *type;
    const char *of_keywords = types ? NULL : td_schema_type_of_keywords(schema);
    int32_t alt = td_expr_new(s->b, TD_EXPR_ALT, 0, 0), e;
    size_t i;
    if (json_is_array(types))
        json_array_extend(names, types);
    else if (types)
        json_array_append(names, types);
    else if (of_keywords)
        json_array_append_new(names, json_string(of_keywords));
    for (const char *const *t = type_names; !types && !of_keywords && *t; t++)
        if (strcmp(*t, "integer")) json_array_append_new(names, json_string(*t));
    json_array_foreach(names, i, type)
    {
        if (!is_type(type)) td_builder_fail(s->b, TD_ERR_INVALID, "type must hold names of types");
        if (s->b->status) break;
        e = rest_of_type(s, schema, type, depth);
        if (e >= 0 && !s->b->status) td_expr_add(s->b, alt, e);
    }
    if (!s->b->status && s->b->exprs[alt].last < 0)
        alt = td_expr_nothing(s->b, "not leaves nothing of the type");
    json_decref(names);
    return alt;
}

/* Do the bounds of its one type cross? */
static bool crosses(const json_t *schema, const char *type)
{
    static const char *const counts[][3] = {{"string", "minLength", "maxLength"},
                                            {"array", "minItems", "maxItems"},
                                            {"object", "minProperties", "maxProperties"}};
    if (!strcmp(type, "number") || !strcmp(type, "integer")) return td_schema_bounds_cross(schema);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        const json_t *min = td_schema_bound(schema, counts[i][1]),
                     *max = td_schema_bound(schema, counts[i][2]);
        if (!strcmp(type, counts[i][0])) return min && max && td_json_is_above(min, max);
    }
    return false;
}

/* Of a schema without values: do bounds or not leave nothing of each of its types? */
static bool leaves_no_type(struct td_schema *s, const json_t *schema, const json_t * not )
{
    const json_t *types = json_object_get(schema, "type"), *type;
    json_t *one = json_is_string(types) ? json_pack("[O]", types) : NULL;
    const json_t *names = one ? one : types;
    bool left = !json_is_array(names);
    size_t i;
    json_array_foreach(names, i, type)
    {
        struct taken t = {.values = json_array()};
        left = left || !is_type(type);
        if (!left && not ) taken_of(s, not, type, &t);
        left = left || !(t.all || crosses(schema, json_string_value(type)));
        json_decref(t.values);
    }
    json_decref(one);
    return !left;
}

bool td_schema_allows_nothing(struct td_schema *s, const json_t *schema)
{
    const json_t *list = json_object_get(schema, "enum"), *only = json_object_get(schema, "const"),
                 *type = json_object_get(schema, "type"), *x = json_object_get(schema, "not"), *v;
    size_t i;
    if (json_is_false(schema)) return true;
    if (json_is_array(type) && !json_array_size(type)) return true;
    if (x && !td_schema_is_plain(x)) x = NULL;
    if (!list && !only) return leaves_no_type(s, schema, x);
    if (list && !json_is_array(list)) return false;
    td_schema_work(s, json_string_length(only) / 16);
    if (!list)
        return !td_schema_is_of_type(only, type) || !td_schema_in_bounds(schema, only) ||
               (x && takes_value(s, x, only));
    json_array_foreach(list, i, v)
    {
        td_schema_work(s, 1 + json_string_length(v) / 16);
        if (s->b->status) return false;
        if (td_schema_is_of_type(v, type) && (!only || td_json_is_same(only, v)) &&
            td_schema_in_bounds(schema, v) && !(x && takes_value(s, x, v)))
            return false;
    }
    return true;
}

/* ---- conditions ------------------------------------------------------------------------------ */

/* The value, or a property of it, keeps to the schema `is`, or else to `is_not`, which have no
 * value in common; or the property is there; or both. */
struct fact {
    const char *name;    /* NULL: of the value itself */
    json_t *is, *is_not; /* NULL: nothing is said of the property's value. Owned */
    bool required;
};
struct facts {
    struct fact v[MAX_FACTS];
    int n;
};

/* Takes both schemas. False: there are too many. */
static bool add_fact(struct facts *f, const char *name, json_t *is, json_t *is_not, bool required)
{
    if (f->n == MAX_FACTS) {
        json_decref(is);
        json_decref(is_not);
        return false;
    }
    f->v[f->n++] = (struct fact){name, is, is_not, required};
    return true;
}

static void free_facts(struct facts *f)
{
    for (int i = 0; i < f->n; i++) json_decref(f->v[i].is), json_decref(f->v[i].is_not);
}

/* A bound, and what a value of its type is that does not keep to it. */
static const struct bound {
    const char *key, *type, *opposite;
    int step; /* of counts: to the opposite one */
} bounds[] = {
    {"minimum", "number", "exclusiveMaximum", 0},
    {"exclusiveMinimum", "number", "maximum", 0},
    {"maximum", "number", "exclusiveMinimum", 0},
    {"exclusiveMaximum", "number", "minimum", 0},
    {"minLength", "string", "maxLength", -1},
    {"maxLength", "string", "minLength", 1},
    {"minItems", "array", "maxItems", -1},
    {"maxItems", "array", "minItems", 1},
    {"minProperties", "object", "maxProperties", -1},
    {"maxProperties", "object", "minProperties", 1},
};

static bool read_bound(struct td_schema *s, const json_t *x, const struct bound *b,
                       const char *name, struct facts *f)
{
    json_t *v = json_object_get(x, b->key);
    if (!v || s->b->status) return !s->b->status;
    if (!b->step)
        return json_is_number(v) &&
               add_fact(f, name, json_pack("{s:O}", b->key, v),
                        json_pack("{s:s,s:O}", "type", b->type, b->opposite, v), false);
    int32_t n = td_schema_count(s, x, b->key);
    if (n < 0) return false;
    if (n + b->step < 0) return true; /* any keeps to it */
    return add_fact(f, name, json_pack("{s:i}", b->key, n),
                    json_pack("{s:s,s:i}", "type", b->type, b->opposite, n + b->step), false);
}

/* What x says of a value but `properties` and `required`. */
static bool read_value(struct td_schema *s, const json_t *x, const char *name, struct facts *f)
{
    static const char *const of_values[] = {"enum", "const", "type", NULL};
    json_t *values = json_object();
    bool ok = true;
    for (const char *const *k = of_values; *k; k++)
        if (json_object_get(x, *k)) json_object_set(values, *k, json_object_get(x, *k));
    if (json_object_size(values))
        ok = is_of_values(values) &&
             add_fact(f, name, json_incref(values), json_pack("{s:O}", "not", values), false);
    json_decref(values);
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds && ok; i++)
        ok = read_bound(s, x, &bounds[i], name, f);
    return ok;
}

/* False: it is no condition of this kind, or the builder has failed. */
static bool read_facts(struct td_schema *s, const json_t *x, struct facts *f)
{
    static const char *const nothing[] = {NULL};
    static const char *const keys[] = {"enum",
                                       "const",
                                       "type",
                                       "minimum",
                                       "exclusiveMinimum",
                                       "maximum",
                                       "exclusiveMaximum",
                                       "minLength",
                                       "maxLength",
                                       "minItems",
                                       "maxItems",
                                       "minProperties",
                                       "maxProperties",
                                       "properties",
                                       "required",
                                       NULL};
    const json_t *required = json_object_get(x, "required");
    json_t *properties = json_object_get(x, "properties"), *p, *v;
    const char *name;
    size_t i;
    if (!has_only(x, keys) || (required && !json_is_array(required)) ||
        (properties && !json_is_object(properties)) || !read_value(s, x, NULL, f))
        return false;
    json_object_foreach(properties, name, p)
    {
        if (json_is_true(p) || has_only(p, nothing)) continue;
        bool ok = json_is_false(p)
                      ? add_fact(f, name, json_false(), json_true(), false)
                      : has_only(p, keys) && !json_object_get(p, "properties") &&
                            !json_object_get(p, "required") && read_value(s, p, name, f);
        if (!ok) return false;
    }
    json_array_foreach(required, i, v)
    {
        int k = 0;
        if (!json_is_string(v)) return false;
        name = json_string_value(v);
        while (k < f->n && !(f->v[k].name && !strcmp(f->v[k].name, name))) k++;
        if (k == f->n && !add_fact(f, name, NULL, NULL, true)) return false;
        f->v[k].required = true;
    }
    return true;
}

/* The schema of a property, where what is said of it besides is to stand in `properties`. Borrowed;
 * NULL: the builder has failed. */
static const json_t *declared(struct td_schema *s, const json_t *base, const char *name)
{
    const json_t *p = json_object_get(json_object_get(base, "properties"), name),
                 *extra = json_object_get(base, "additionalProperties");
    if (p) return td_schema_follow(s, p);
    const char *beside = NULL;
    if (!extra && json_object_get(base, "unevaluatedProperties")) beside = "unevaluatedProperties";
    if (extra && json_object_get(base, "patternProperties")) beside = "patternProperties";
    if (beside)
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "if and not beside %s are supported for declared properties, and %.64s is "
                        "none",
                        beside, name);
    return beside ? NULL : extra ? td_schema_follow(s, extra) : json_true();
}

/* Takes from an enum the values that a plain not beside it takes, so that many are not tried again
 * each time. */
static void settle(struct td_schema *s, json_t *schema)
{
    json_t *list = json_object_get(schema, "enum"), *left, *v;
    const json_t *x = json_object_get(schema, "not");
    size_t i;
    if (!json_is_array(list) || !x || !td_schema_is_plain(x)) return;
    left = json_array();
    json_array_foreach(list, i, v) if (!takes_value(s, x, v)) json_array_append(left, v);
    json_object_set_new(schema, "enum", left);
    json_object_del(schema, "not");
}

/* Of the schema, what keeps to `part`, too, a schema of a fact: a new reference. */
static json_t *narrowed(struct td_schema *s, const json_t *schema, json_t *part)
{
    json_t *out;
    if (!schema || json_is_true(schema) || json_is_false(part))
        out = json_incref(part);
    else if (!json_is_object(schema) || json_is_true(part))
        out = json_incref((json_t *)schema);
    else if ((out = td_schema_join(s, schema, part)))
        settle(s, out);
    if (!out || !td_schema_allows_nothing(s, out)) return out;
    json_decref(out);
    return json_false();
}

/* base, with what a property must be: a new reference. */
static json_t *with_named(struct td_schema *s, const json_t *base, const struct fact *f, bool holds)
{
    json_t *out = json_copy((json_t *)base), *part = holds ? f->is : f->is_not, *is = NULL;
    bool required = holds ? f->required : f->is && !f->required;
    td_schema_work(s, 1 + json_object_size(json_object_get(base, "properties")) +
                          json_array_size(json_object_get(base, "required")));
    if (part) {
        const json_t *was = declared(s, base, f->name);
        if (was) is = narrowed(s, was, part);
    } else if (!holds) {
        is = json_false();
    }
    if (is) {
        json_t *properties = json_copy(json_object_get(base, "properties"));
        if (!properties) properties = json_object();
        json_object_set_new(properties, f->name, is);
        json_object_set_new(out, "properties", properties);
    }
    if (required) {
        json_t *names = json_copy(json_object_get(base, "required"));
        if (!names) names = json_array();
        json_array_append_new(names, json_string(f->name));
        json_object_set_new(out, "required", names);
    }
    if (!holds) json_object_set_new(out, "type", json_string("object"));
    return out;
}

/* base where the fact holds, or where it does not: a new reference. NULL: nothing is, or the
 * builder has failed. */
static json_t *with_fact(struct td_schema *s, const json_t *base, const struct fact *f, bool holds)
{
    json_t *out = NULL;
    if (!f->name)
        out = narrowed(s, base, holds ? f->is : f->is_not);
    else if (holds || td_schema_has_type(json_object_get(base, "type"), "object"))
        out = with_named(s, base, f, holds);
    if (json_is_object(out) && !s->b->status && !td_schema_is_contradiction(s, out)) return out;
    json_decref(out);
    return NULL;
}

/* base, where all facts before n hold and the one at `fails`, if any, does not; or NULL. */
static json_t *with_facts(struct td_schema *s, const json_t *base, const struct facts *f, int n,
                          int fails)
{
    json_t *out = json_copy((json_t *)base);
    for (int i = 0; i <= n && out; i++) {
        if (i == n && fails < 0) break;
        json_t *next = with_fact(s, out, &f->v[i], i != fails);
        json_decref(out);
        out = next;
    }
    return out;
}

/* Adds an alternative, unless it allows nothing. part: NULL, or what holds in it, too. */
static void add_branch(struct td_schema *s, const json_t *base, const json_t *part, bool open,
                       int depth, int32_t alt)
{
    json_t *both = NULL;
    if (!base || json_is_false(part) || s->b->status) return;
    if (part && !json_is_object(part) && !json_is_true(part))
        td_builder_fail(s->b, TD_ERR_INVALID, "then and else must be schemas");
    else
        both = json_is_object(part) ? td_schema_join(s, base, part) : json_copy((json_t *)base);
    if (both && open && json_object_get(both, "properties") &&
        !json_object_get(part, "properties") && !json_object_get(both, "additionalProperties"))
        json_object_set_new(both, "additionalProperties", json_true());
    if (both && !td_schema_allows_nothing(s, both) && !td_schema_is_contradiction(s, both))
        td_expr_add(s->b, alt, td_schema_expr(s, both, depth + 1));
    json_decref(both);
}

static int32_t branches(struct td_schema *s, const json_t *base, const struct facts *f,
                        const json_t *then, const json_t *other, const char *key, int depth)
{
    int32_t alt = td_expr_new(s->b, TD_EXPR_ALT, 0, 0);
    bool open = !json_object_get(base, "properties") &&
                !json_object_get(base, "additionalProperties") &&
                !json_object_get(base, "unevaluatedProperties");
    json_t *all = json_is_false(then) ? NULL : with_facts(s, base, f, f->n, -1);
    add_branch(s, all, then, open, depth, alt);
    json_decref(all);
    for (int i = 0; i < f->n && !json_is_false(other) && !s->b->status; i++) {
        json_t *base_else = with_facts(s, base, f, i, i);
        add_branch(s, base_else, other, open, depth, alt);
        json_decref(base_else);
    }
    if (!s->b->status && s->b->exprs[alt].last < 0)
        return td_expr_nothing(s->b, "%s leaves nothing", key);
    return alt;
}

int32_t td_schema_if(struct td_schema *s, const json_t *schema, int depth)
{
    const json_t *x = td_schema_follow(s, json_object_get(schema, "if")),
                 *then = json_object_get(schema, "then"), *other = json_object_get(schema, "else");
    json_t *base = json_copy((json_t *)schema);
    static const char *const negated[] = {"not", NULL};
    struct facts f = {0};
    int32_t e = 0;
    json_object_del(base, "if");
    json_object_del(base, "then");
    json_object_del(base, "else");
    for (int i = 0; i < MAX_FACTS && json_object_get(x, "not") && has_only(x, negated); i++) {
        const json_t *swap = then;
        then = other, other = swap;
        x = td_schema_follow(s, json_object_get(x, "not"));
    }
    if (json_is_true(x) || json_is_false(x)) {
        e = td_expr_new(s->b, TD_EXPR_ALT, 0, 0);
        add_branch(s, base, json_is_true(x) ? then : other, false, depth, e);
        if (!s->b->status && s->b->exprs[e].last < 0)
            e = td_expr_nothing(s->b, "if leaves nothing");
    } else if (!s->b->status && read_facts(s, x, &f)) {
        e = branches(s, base, &f, then, other, "if", depth);
    } else {
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "the keyword if is supported for enum, const, type and bounds of the value "
                        "and of its properties, and for required, %d of these at most",
                        MAX_FACTS);
    }
    free_facts(&f);
    json_decref(base);
    return e;
}

/* not of each of the schemas, under `key` of base. */
static int32_t not_of_each(struct td_schema *s, json_t *base, const char *key, const json_t *parts,
                           int depth)
{
    json_t *list = json_copy(json_object_get(base, key)), *part;
    size_t i;
    td_schema_work(s, 1 + json_array_size(list) + json_array_size(parts));
    if (!list) list = json_array();
    json_array_foreach(parts, i, part) json_array_append_new(list, json_pack("{s:O}", "not", part));
    json_object_set_new(base, key, list);
    return td_schema_expr(s, base, depth + 1);
}

int32_t td_schema_not(struct td_schema *s, const json_t *schema, int depth)
{
    static const char *const any[] = {"anyOf", NULL}, *const all[] = {"allOf", NULL},
                             *const negated[] = {"not", NULL};
    const json_t *written = json_object_get(schema, "not"), *x = td_schema_follow(s, written),
                 *list;
    json_t *base = td_json_without(schema, "not");
    struct facts f = {0};
    int32_t e = 0;
    if (s->b->status) {
        e = 0;
    } else if (json_is_false(x)) {
        e = td_schema_expr(s, base, depth + 1);
    } else if (json_is_true(x)) {
        e = td_expr_nothing(s->b, "not leaves nothing");
    } else if (x != written && td_schema_is_plain(x)) {
        json_object_set(base, "not", (json_t *)x);
        e = td_schema_expr(s, base, depth + 1);
    } else if ((list = json_object_get(x, "anyOf")) && json_is_array(list) && has_only(x, any)) {
        e = not_of_each(s, base, "allOf", list, depth);
    } else if ((list = json_object_get(x, "allOf")) && json_is_array(list) && has_only(x, all)) {
        e = not_of_each(s, base, "anyOf", list, depth);
    } else if (json_object_get(x, "not") && has_only(x, negated)) {
        e = td_schema_together(s, base, json_object_get(x, "not"), depth);
    } else if (read_facts(s, x, &f)) {
        e = branches(s, base, &f, json_false(), NULL, "not", depth);
    } else {
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "the keyword not is supported for enum, const, type and bounds of the "
                        "value and of its properties, for required, and for anyOf, allOf and not "
                        "of these");
    }
    free_facts(&f);
    json_decref(base);
    return e;
}
