/* grammar_array.c - arrays of a JSON schema: items, prefixItems, counts, uniqueItems and contains.
 *
 * Places in an array are rules that call the next place last, so that each is written once. With
 * uniqueItems a place is the set of values that are there, with contains the counts of elements and
 * of those that were chosen to keep to it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"

#define MAX_UNIQUE 8      /* values of uniqueItems: each set of them is a rule */
#define MAX_CONTAINS 2048 /* rules of contains: counts of elements times counts of minContains */

/* An expression once more each time: the first use is the expression. */
static int32_t rule_of_schema(struct td_schema *s, const json_t *schema, int depth)
{
    int32_t rule = td_rule_new(s->b);
    int32_t e = td_schema_expr(s, schema, depth);
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

static bool read_elements(struct td_schema *s, const json_t *schema, struct elements *ret)
{
    struct td_builder *b = s->b;
    struct elements e = {.prefix = json_object_get(schema, "prefixItems"),
                         .items = json_object_get(schema, "items"),
                         .rest = -1};
    e.lo = td_schema_count(s, schema, "minItems"), e.hi = td_schema_count(s, schema, "maxItems");
    if (!e.items) e.items = json_object_get(schema, "unevaluatedItems");
    if (json_is_array(e.items)) {
        td_builder_fail(b, TD_ERR_INVALID,
                        "items is an array, which beside prefixItems no draft has");
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
    if (e.hi >= 0 && e.k > e.hi) e.k = e.hi;
    *ret = e;
    return true;
}

static void element_rules(struct td_schema *s, struct elements *e, int depth)
{
    struct td_builder *b = s->b;
    e->rules = calloc((size_t)e->k + 1, sizeof *e->rules);
    if (!e->rules) td_builder_fail(b, TD_ERR_NOMEM, "no memory");
    for (int32_t i = 0; i < e->k && !b->status; i++)
        e->rules[i] = rule_of_schema(s, json_array_get(e->prefix, (size_t)i), depth + 1);
    if ((e->hi < 0 || e->hi > e->k) && !b->status) { /* without items: anything */
        e->rest = td_rule_new(b);
        int32_t x = e->items ? td_schema_expr(s, e->items, depth + 1) : td_json_value(s);
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
        int32_t e = td_expr_rep(b, td_expr_cat(b, td_json_comma(b), td_expr_call(b, l->rest)), need,
                                l->hi < 0 ? -1 : l->hi - from);
        if (!b->status) b->rules[tail].expr = e;
    }
    for (int32_t i = l->k - 1; i >= 1 && !b->status; i--) { /* after[i]: element i, if any */
        int32_t e = td_expr_cat(b, td_json_comma(b), td_expr_call(b, l->rules[i]));
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
int32_t td_schema_next_rule(struct td_schema *s, int32_t n_before, int32_t rule)
{
    struct td_builder *b = s->b;
    if (n_before == 0) return td_expr_call(b, rule);
    if (!s->comma) {
        s->comma = td_rule_new(b);
        int32_t e = td_json_comma(b);
        if (!b->status) b->rules[s->comma].expr = e;
    }
    return td_expr_cat(b, td_expr_call(b, s->comma), td_expr_call(b, rule));
}

/* All values of a schema that has few: no two equal ones. A new reference, NULL: the builder has
 * failed. */
static json_t *few_values(struct td_schema *s, const json_t *items)
{
    const json_t *ref, *list, *v;
    for (int hops = 0;
         (ref = json_object_get(items, "$ref")) && !td_schema_restricts(items, "$ref"); hops++)
        if (!(items = td_schema_resolve(s, ref)) || hops > TD_GRAMMAR_MAX_DEPTH) break;
    json_t *all = json_pack("[b,b,n]", 1, 0), *few = json_array(), *one = NULL;
    const json_t *type = json_object_get(items, "type");
    bool few_types = type && !td_schema_has_type(type, "string") &&
                     !td_schema_has_type(type, "number") && !td_schema_has_type(type, "integer") &&
                     !td_schema_has_type(type, "object") && !td_schema_has_type(type, "array");
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
        if (s->b->status || !td_schema_is_of_type(v, type) || !td_schema_keeps(s, items, v))
            continue;
        for (k = 0; k < json_array_size(few) && !td_json_is_same(json_array_get(few, k), v);) k++;
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
static int32_t unique_expr(struct td_schema *s, const struct elements *l)
{
    struct td_builder *b = s->b;
    int32_t rules[MAX_UNIQUE], at[1 << MAX_UNIQUE];
    json_t *few = few_values(s, l->items);
    int32_t n = (int32_t)json_array_size(few), hi = l->hi < 0 || l->hi > n ? n : l->hi;
    if (l->k)
        td_builder_fail(b, TD_ERR_UNSUPPORTED, "uniqueItems beside prefixItems is not supported");
    for (int32_t i = 0; i < n && !b->status; i++) {
        rules[i] = td_rule_new(b);
        int32_t e = td_json_this_value(s, json_array_get(few, (size_t)i), 0);
        if (!b->status) b->rules[rules[i]].expr = e;
    }
    json_decref(few);
    if (l->lo > n)
        return td_expr_nothing(b, "uniqueItems: minItems is %d, and items has %d values", l->lo, n);
    for (int32_t set = (1 << n) - 1; set >= 0 && !b->status; set--) {
        int32_t used = __builtin_popcount((unsigned)set);
        if (used > hi) continue;
        int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
        if (used >= l->lo) td_expr_add(b, alt, td_expr_new(b, TD_EXPR_CAT, 0, 0));
        for (int32_t i = 0; i < n && used < hi; i++)
            if (!(set >> i & 1))
                td_expr_add(b, alt,
                            td_expr_cat(b, td_schema_next_rule(s, used, rules[i]),
                                        td_expr_call(b, at[set | 1 << i])));
        at[set] = td_rule_new(b);
        if (!b->status) b->rules[at[set]].expr = alt;
    }
    return b->status ? 0 : td_expr_call(b, at[0]);
}

/* What keeps to both schemas of an element. */
static int32_t contained(struct td_schema *s, const json_t *items, const json_t *contains,
                         int depth)
{
    return json_is_object(items) ? td_schema_together(s, items, contains, depth)
                                 : td_schema_expr(s, contains, depth + 1);
}

/* The elements that do not keep to `contains`. */
static int32_t not_contained(struct td_schema *s, const struct elements *l, const json_t *contains,
                             int depth)
{
    const char *what = s->b->what;
    char name[96];
    json_t *not = json_pack("{s:O}", "not", contains);
    snprintf(name, sizeof name, "%.64s: maxContains", what); /* said of what is not supported */
    s->b->what = name;
    int32_t e = contained(s, l->items, not, depth);
    s->b->what = what;
    json_decref(not );
    return e;
}

/* From `need` to `most` elements keep to `contains`; most -1: any number. Of those that may,
 * without maxContains, `need` are chosen to. at[t * width + c]: what may follow t elements, c of
 * which do. Without maxItems t stays at `last`. */
struct counts {
    int32_t need, most, last, width;
    int32_t chosen, other; /* rules */
    int32_t *at;           /* Owned */
};

static void contains_rules(struct td_schema *s, const json_t *schema, const struct elements *l,
                           struct counts *n, int depth)
{
    struct td_builder *b = s->b;
    const json_t *contains = json_object_get(schema, "contains");
    n->other = l->rest;
    n->chosen = td_rule_new(b);
    int32_t e = contained(s, l->items, contains, depth);
    if (!b->status) b->rules[n->chosen].expr = e;
    if (n->most >= 0) {
        n->other = td_rule_new(b);
        e = not_contained(s, l, contains, depth);
        if (!b->status) b->rules[n->other].expr = e;
    }
    for (int32_t i = 0; i < (n->last + 1) * n->width; i++) n->at[i] = td_rule_new(b);
}

/* What may follow t elements, c of which are counted. */
static int32_t after_counts(struct td_schema *s, const struct elements *l, const struct counts *n,
                            int32_t t, int32_t c)
{
    struct td_builder *b = s->b;
    int32_t i = t * n->width + c, to = t < n->last ? i + n->width : i;
    int32_t left = l->hi < 0 ? INT32_MAX : l->hi - t; /* elements that may come */
    int32_t missing = c < n->need ? n->need - c : 0;
    int32_t alt = td_expr_new(b, TD_EXPR_ALT, 0, 0);
    if (t >= l->lo && !missing) td_expr_add(b, alt, td_expr_new(b, TD_EXPR_CAT, 0, 0));
    if (left > 0 && c + 1 < n->width)
        td_expr_add(
            b, alt,
            td_expr_cat(b, td_schema_next_rule(s, t, n->chosen), td_expr_call(b, n->at[to + 1])));
    if (left > missing)
        td_expr_add(
            b, alt,
            td_expr_cat(b, td_schema_next_rule(s, t, n->other), td_expr_call(b, n->at[to])));
    return alt;
}

static int32_t contains_expr(struct td_schema *s, const json_t *schema, const struct elements *l,
                             int32_t need, int32_t most, int depth)
{
    struct td_builder *b = s->b;
    int32_t top = most >= 0 ? most : need, last = l->lo > top ? l->lo : top;
    struct counts n = {.need = need, .most = most, .width = top + 1};
    n.last = l->hi >= 0 ? l->hi : last > 0 ? last : 1;
    int64_t n_states = ((int64_t)n.last + 1) * n.width;
    if (l->k || json_is_true(json_object_get(schema, "uniqueItems")))
        td_builder_fail(b, TD_ERR_UNSUPPORTED,
                        "contains beside prefixItems or uniqueItems is not supported");
    if (!b->status && ((l->hi >= 0 && need > l->hi) || (most >= 0 && need > most)))
        return td_expr_nothing(b, "minContains is %d, above what may be there, %d", need,
                               most >= 0 && (l->hi < 0 || most < l->hi) ? most : l->hi);
    if (n_states > MAX_CONTAINS)
        td_builder_fail(b, TD_ERR_LIMIT, "contains: %lld counts of items and minContains, limit %d",
                        (long long)n_states, MAX_CONTAINS);
    n.at = b->status ? NULL : calloc((size_t)n_states, sizeof *n.at);
    if (!n.at) td_builder_fail(b, TD_ERR_NOMEM, "no memory for contains");
    if (!b->status) contains_rules(s, schema, l, &n, depth);
    for (int32_t i = 0; i < n_states && !b->status; i++) {
        int32_t e = after_counts(s, l, &n, i / n.width, i % n.width);
        if (!b->status) b->rules[n.at[i]].expr = e;
    }
    int32_t e = b->status ? 0 : td_expr_call(b, n.at[0]);
    free(n.at);
    return e;
}

static int32_t array_of(struct td_schema *s, const json_t *schema, int depth)
{
    struct td_builder *b = s->b;
    const json_t *unique = json_object_get(schema, "uniqueItems");
    struct elements l;
    if (unique && !json_is_boolean(unique))
        td_builder_fail(b, TD_ERR_INVALID, "uniqueItems must be true or false");
    if (!read_elements(s, schema, &l)) return 0;
    if (l.hi >= 0 && l.lo > l.hi)
        return td_expr_nothing(b, "minItems is %d, above what may be there, %d", l.lo, l.hi);
    int32_t need = td_schema_count(s, schema, "minContains");
    if (need < 0) need = 1;
    int32_t most = td_schema_count(s, schema, "maxContains");
    if (!json_object_get(schema, "contains")) need = 0, most = -1;
    element_rules(s, &l, depth);
    if (!l.rules) return 0; /* the builder has failed */
    int32_t body = 0;
    if (need > 0 || most >= 0)
        body = contains_expr(s, schema, &l, need, most, depth);
    else if (json_is_true(unique) && (l.hi < 0 || l.hi > 1))
        body = unique_expr(s, &l);
    else
        body = elements_expr(b, &l);
    free(l.rules);
    int32_t e = td_expr_cat(b, td_expr_text(b, "["), td_json_space(b));
    td_expr_add(b, e, body);
    td_expr_add(b, e, td_json_space(b));
    td_expr_add(b, e, td_expr_text(b, "]"));
    return e;
}

int32_t td_schema_array(struct td_schema *s, const json_t *schema, int depth)
{
    json_t *tuple = td_schema_tuple(schema);
    if (!tuple) td_builder_fail(s->b, TD_ERR_NOMEM, "no memory for items");
    int32_t e = tuple ? array_of(s, tuple, depth) : 0;
    json_decref(tuple);
    return e;
}
