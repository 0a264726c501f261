/* grammar_object.c - objects of a JSON schema: properties, names and counts of others, and what
 * depends on a property.
 *
 * Named members come in the schema's order, others behind them. A place is a rule: what may stand
 * before member i where c members are there; c is counted as far as minProperties and maxProperties
 * need it, else it says only whether there is one. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"
#include "common/text/tokenizer_text.h"

#define MAX_TRIED_BYTES 65536 /* of names on schemas of names */
#define MAX_DEPENDENTS 5      /* names of dependentRequired: each doubles the alternatives */

static int compare_names(const void *x, const void *y)
{
    const struct td_grammar_text *a = x, *b = y;
    size_t n = a->n_bytes < b->n_bytes ? a->n_bytes : b->n_bytes;
    int c = n ? memcmp(a->bytes, b->bytes, n) : 0;
    return c ? c : (a->n_bytes > b->n_bytes) - (a->n_bytes < b->n_bytes);
}

/* The rest of a name, and its quote, that is none of names[0..n), which are sorted and agree in
 * their first `at` bytes. */
static int32_t other_name(struct td_schema *s, const struct td_grammar_text *names, size_t n,
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
        int32_t e =
            td_expr_cat(b, td_expr_rep(b, td_json_plain_char(b), 0, -1), td_expr_text(b, "\""));
        if (!b->status) b->rules[s->name_rest].expr = e;
    }
    td_expr_add(b, alt, td_expr_cat(b, td_expr_cps(b, &first), td_expr_call(b, s->name_rest)));
    td_cps_free(&first);
    return alt;
}

int32_t td_schema_other_text(struct td_schema *s, struct td_grammar_text *texts, size_t n)
{
    qsort(texts, n, sizeof *texts, compare_names);
    return td_expr_cat(s->b, td_expr_text(s->b, "\""), other_name(s, texts, n, 0));
}

struct members {
    struct {
        const char *name;
        const json_t *schema; /* NULL: anything */
        int32_t rule;
        bool declared, required, absent; /* absent: must not be there */
    } v[2 * TD_GRAMMAR_MAX_PROPERTIES];
    int32_t n;
    json_t *made;    /* schemas made of several. Owned */
    int32_t nothing; /* expression of no text; -1: an object may be there */
};

static void add_member(struct td_schema *s, struct members *m, const char *name,
                       const json_t *schema)
{
    if (m->n == TD_GRAMMAR_MAX_PROPERTIES)
        td_builder_fail(s->b, TD_ERR_LIMIT, "an object has more than %d properties, the limit",
                        TD_GRAMMAR_MAX_PROPERTIES);
    else if (strlen(name) > TD_SCHEMA_MAX_KEY_BYTES)
        td_builder_fail(s->b, TD_ERR_LIMIT, "the name of a property has %zu bytes, limit %d",
                        strlen(name), TD_SCHEMA_MAX_KEY_BYTES);
    if (s->b->status) return;
    m->v[m->n].name = name;
    m->v[m->n++].schema = schema;
}

static void read_members(struct td_schema *s, const json_t *schema, struct members *m)
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

bool td_schema_takes_text(struct td_schema *s, const char *key, json_t *of_texts, const char *name)
{
    struct td_schema_names *n = s->names;
    /* no text is null, and a schema of it alone is never refused for allowing nothing */
    json_t *or_null = json_pack("{s:[O,{s:s}]}", "anyOf", of_texts, "type", "null");
    char *text = or_null ? json_dumps(or_null, JSON_COMPACT) : NULL;
    json_t *value = json_string(name);
    char *quoted_name = value ? json_dumps(value, JSON_ENCODE_ANY) : NULL;
    struct td_err err = {0};
    int32_t state = TD_MATCHER_DEAD;
    bool is = false;
    if (!text || !quoted_name)
        td_builder_fail(s->b, TD_ERR_NOMEM, "no memory for %s", key);
    else if (strstr(quoted_name, "\\u") || strstr(text, "\"$ref\""))
        td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                        "%s beside a name or value with control characters, or with $ref, is not "
                        "supported",
                        key);
    if (quoted_name && (s->n_tried_bytes += 8 + strlen(quoted_name)) > MAX_TRIED_BYTES)
        td_builder_fail(
            s->b, TD_ERR_LIMIT,
            "%s: more than %d bytes of names and values are tried on schemas, the limit", key,
            MAX_TRIED_BYTES);
    if (text) td_schema_work(s, strlen(text) / 16);
    while (text && n < s->names + s->n_names && strcmp(n->text, text)) n++;
    if (!s->b->status && n == s->names + TD_SCHEMA_MAX_NAMES) {
        td_builder_fail(s->b, TD_ERR_LIMIT,
                        "%s: more than %d schemas are tried on names and values, the limit", key,
                        TD_SCHEMA_MAX_NAMES);
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
    json_decref(or_null);
    free(quoted_name);
    free(text);
    return is;
}

void td_schema_names_free(struct td_schema *s)
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
static void member_schemas(struct td_schema *s, const json_t *schema, struct members *m,
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
            if (td_schema_takes_text(s, "patternProperties", names, m->v[i].name)) {
                m->v[i].schema = both_schemas(m, m->v[i].schema, value);
                known = true;
            }
            json_decref(names);
        }
        if (!known) m->v[i].schema = extra;
        if (json_is_object(of_names)) {
            json_t *names = json_pack("{s:[{s:s},O]}", "allOf", "type", "string", of_names);
            if (!td_schema_takes_text(s, "propertyNames", names, m->v[i].name))
                m->v[i].schema = json_false();
            json_decref(names);
        }
        m->v[i].absent = json_is_false(m->v[i].schema) || json_is_false(of_names) ||
                         (!m->v[i].required && td_schema_allows_nothing(s, m->v[i].schema));
        if (m->v[i].absent && m->v[i].required)
            m->nothing = td_expr_nothing(s->b,
                                         known ? "property %.64s is required and false"
                                               : "required has %.64s, which properties and "
                                                 "additionalProperties do not allow",
                                         m->v[i].name);
    }
}

/* A rule for each member; the names that are written without an escape go to names. Returns how
 * many these are. */
static int32_t member_rules(struct td_schema *s, struct members *m, struct td_grammar_text *names,
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
                m->v[i].schema ? td_schema_expr(s, m->v[i].schema, depth + 1) : td_json_value(s);
            int32_t e = b->status ? 0 : td_json_member(b, td_expr_text(b, text), value);
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
static int32_t restricted_name(struct td_schema *s, const json_t *schema, const struct members *m,
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
        int32_t e = td_schema_expr(s, names, depth + 1);
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
        td_expr_add(
            b, alt,
            td_json_quoted(b, td_expr_regex(b, pattern, strlen(pattern), TD_REGEX_JSON_SEARCH)));
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
static int32_t extra_rule(struct td_schema *s, const json_t *schema, const json_t *extra,
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
        name = td_schema_other_text(s, names, (size_t)n_names);
    }
    int32_t rule = td_rule_new(b);
    int32_t value = extra ? td_schema_expr(s, extra, depth + 1) : td_json_value(s);
    int32_t e = td_json_member(b, name, value);
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

static bool read_places(struct td_schema *s, const json_t *schema, struct places *p)
{
    p->min = td_schema_count(s, schema, "minProperties"),
    p->max = td_schema_count(s, schema, "maxProperties");
    p->cap = p->max >= 0 ? p->max : p->min > 1 ? p->min : 1;
    if (!s->b->status) p->at = calloc((size_t)p->cap + 1, sizeof *p->at);
    if (!s->b->status && !p->at) td_builder_fail(s->b, TD_ERR_NOMEM, "no memory for places");
    return p->at != NULL;
}

/* A member behind c others; where they are not counted, its comma is written out. */
static int32_t next_place(struct td_schema *s, const struct places *p, int32_t c, int32_t rule)
{
    if (c == 0 || p->cap > 1) return td_schema_next_rule(s, c, rule);
    return td_expr_cat(s->b, td_json_comma(s->b), td_expr_call(s->b, rule));
}

/* Behind all named members. A name may come twice, and is one member to most readers: for
 * minProperties one extra member counts, whatever follows it. */
static void extra_places(struct td_schema *s, int32_t extra, struct places *p)
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
static void chain_members(struct td_schema *s, const struct members *m, struct places *p)
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

/* No object of ours has as many members as minProperties and maxProperties want. */
static int32_t too_few(struct td_schema *s, const json_t *schema, const json_t *extra,
                       const struct members *m, const struct places *p)
{
    int32_t n_required = 0;
    bool closed = json_is_false(json_object_get(schema, "propertyNames")) ||
                  (json_is_false(extra) && !json_object_get(schema, "patternProperties"));
    for (int32_t i = 0; i < m->n; i++) n_required += m->v[i].required;
    if (closed || (p->max >= 0 && (p->min > p->max || n_required > p->max)))
        return td_expr_nothing(s->b,
                               "minProperties, maxProperties, required and the names that may be "
                               "there leave no object");
    td_builder_fail(s->b, TD_ERR_UNSUPPORTED,
                    "minProperties is %d, more than the names that can be told apart", p->min);
    return 0;
}

static int32_t object_of(struct td_schema *s, const json_t *schema, const json_t *extra,
                         struct members *m, struct td_grammar_text *names, int depth)
{
    struct td_builder *b = s->b;
    struct places p = {0};
    read_members(s, schema, m);
    member_schemas(s, schema, m, extra);
    if (m->nothing >= 0) return m->nothing;
    if (b->status || !read_places(s, schema, &p)) return 0;
    int32_t n_names = member_rules(s, m, names, depth);
    int32_t rule = b->status ? 0 : extra_rule(s, schema, extra, m, names, n_names, depth);
    if (!b->status) extra_places(s, rule, &p);
    if (!b->status) chain_members(s, m, &p);
    int32_t e = td_expr_cat(b, td_expr_text(b, "{"), td_json_space(b));
    if (!b->status)
        td_expr_add(b, e,
                    p.at[0] < 0 ? too_few(s, schema, extra, m, &p) : td_expr_call(b, p.at[0]));
    td_expr_add(b, e, td_json_space(b));
    td_expr_add(b, e, td_expr_text(b, "}"));
    free(p.at);
    return e;
}

int32_t td_schema_object(struct td_schema *s, const json_t *schema, int depth)
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
    if (any) return td_json_object(s);
    /* All that evaluates properties has been merged into this schema. */
    if (!extra) extra = json_object_get(schema, "unevaluatedProperties");
    struct members *m = calloc(1, sizeof *m);
    struct td_grammar_text *names = calloc(2 * TD_GRAMMAR_MAX_PROPERTIES, sizeof *names);
    int32_t e = 0;
    if (m) m->made = json_array(), m->nothing = -1;
    if (!m || !names || !m->made)
        td_builder_fail(s->b, TD_ERR_NOMEM, "no memory for an object's properties");
    else
        e = object_of(s, schema, extra, m, names, depth);
    if (m) json_decref(m->made);
    free(m);
    free(names);
    return e;
}

/* ---- what depends on a property ------------------------------------------------------------ */

bool td_schema_is_contradiction(struct td_schema *s, const json_t *schema)
{
    const json_t *properties = json_object_get(schema, "properties"), *name,
                 *type = json_object_get(schema, "type");
    bool closed = json_is_false(json_object_get(schema, "additionalProperties")) &&
                  !json_object_get(schema, "patternProperties");
    size_t i;
    if (json_is_array(type) && json_array_size(type) == 1) type = json_array_get(type, 0);
    if (type && !(json_is_string(type) && !strcmp(json_string_value(type), "object"))) return false;
    td_schema_work(s, json_array_size(json_object_get(schema, "required")));
    json_array_foreach(json_object_get(schema, "required"), i, name)
    {
        const json_t *p = json_object_get(properties, json_string_value(name));
        if (td_schema_allows_nothing(s, p) || (closed && !p)) return true;
    }
    return false;
}

/* Where `name` is there, `then` holds, too: an array of names, or a schema. Adds the alternative
 * with the property to alt. */
static void with_property(struct td_schema *s, const json_t *base, const char *name,
                          const json_t *then, int depth, int32_t alt)
{
    json_t *here = json_pack("{s:[s]}", "required", name);
    json_t *both = here ? td_schema_merge(s, base, here) : NULL;
    if (both && json_is_array(then)) {
        json_t *names = json_pack("{s:O}", "required", then);
        json_t *more = td_schema_merge(s, both, names);
        json_decref(both);
        json_decref(names);
        both = more;
    }
    bool is_schema = json_is_object(then);
    if (both && !json_is_false(then) && !td_schema_is_contradiction(s, both))
        td_expr_add(s->b, alt,
                    is_schema ? td_schema_together(s, both, then, depth)
                              : td_schema_expr(s, both, depth + 1));
    json_decref(here);
    json_decref(both);
}

/* Two alternatives for the first name of dependentRequired, dependentSchemas or dependencies, as
 * both were one until draft 7: it is not there, or what it asks for holds, too. */
int32_t td_schema_dependent(struct td_schema *s, const json_t *schema, const char *key, int depth)
{
    struct td_builder *b = s->b;
    json_t *rules = json_object_get(schema, key), *base = td_json_without(schema, key);
    const char *name = json_object_iter_key(json_object_iter(rules));
    const json_t *then = json_object_get(rules, name ? name : "");
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
    if (!json_is_object(rules) ||
        (name && !json_is_array(then) && !json_is_object(then) && !json_is_boolean(then)))
        td_builder_fail(b, TD_ERR_INVALID, "%s must be an object of %s", key,
                        !strcmp(key, "dependencies")       ? "arrays of names or schemas"
                        : !strcmp(key, "dependentSchemas") ? "schemas"
                                                           : "arrays of names");
    if (json_object_size(rules) > MAX_DEPENDENTS)
        td_builder_fail(b, TD_ERR_LIMIT, "%s has %zu names, limit %d", key, json_object_size(rules),
                        MAX_DEPENDENTS);
    if (json_object_size(rules) > 1 && base) {
        json_t *others = td_json_without(rules, name);
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
        if (!td_schema_is_contradiction(s, apart))
            td_expr_add(b, alt, td_schema_expr(s, apart, depth + 1));
        with_property(s, base, name, then, depth, alt);
        json_decref(apart);
        if (!b->status && b->exprs[alt].last < 0)
            alt = td_expr_nothing(b, "%s of %.64s leaves nothing", key, name);
    } else if (base && !b->status) {
        td_expr_add(b, alt, td_schema_expr(s, base, depth + 1));
    }
    json_decref(base);
    return alt;
}
