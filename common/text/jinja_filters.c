/* jinja_filters.c - what templates call: tests, filters, methods of strings and dicts, global
 * functions.
 *
 * Values that Jinja would print through Python's repr (lists, dicts), and letters beyond ASCII
 * whose case would change, are refused rather than approximated. */
#include "common/text/jinja_internal.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define MAX_MACRO_DEPTH 12
#define MAX_RANGE 100000 /* the limit that Jinja has in its sandbox */

bool jinja_eval_args(struct ctx *c, const struct arg *list, struct args *ret)
{
    ret->n = ret->n_named = 0;
    for (const struct arg *a = list; a != NULL; a = a->next) {
        int at = ret->n + ret->n_named;
        if (at == JINJA_MAX_ARGS)
            return jinja_fails(c, TD_ERR_UNSUPPORTED, "a call with more than %d arguments",
                               JINJA_MAX_ARGS);
        if (a->name.n == 0 && ret->n_named > 0)
            return jinja_fails(c, TD_ERR_UNSUPPORTED,
                               "an argument without a name after one with a name");
        if (!jinja_eval(c, a->value, &ret->v[at])) return false;
        ret->name[at] = a->name;
        *(a->name.n == 0 ? &ret->n : &ret->n_named) += 1;
    }
    return true;
}

/* The argument at `position` or named `name` (may be NULL); NULL when it is not given. */
static const struct value *get_arg(const struct args *a, int position, const char *name)
{
    if (position < a->n) return &a->v[position];
    for (int i = a->n; name != NULL && i < a->n + a->n_named; i++)
        if (str_is(a->name[i], name)) return &a->v[i];
    return NULL;
}

/* Checks that there are at most n_max arguments, and only n1 and n2 among the named ones: an
 * argument that is not understood must not be ignored. */
static bool only_args(struct ctx *c, const struct args *a, int n_max, const char *n1,
                      const char *n2, const char *what)
{
    if (a->n + a->n_named > n_max)
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "%s with %d arguments", what, a->n + a->n_named);
    for (int i = a->n; i < a->n + a->n_named; i++)
        if (!(n1 != NULL && str_is(a->name[i], n1)) && !(n2 != NULL && str_is(a->name[i], n2)))
            return jinja_fails(c, TD_ERR_UNSUPPORTED, "%s with the argument %.*s", what,
                               (int)(a->name[i].n < 40 ? a->name[i].n : 40), a->name[i].p);
    return true;
}

bool jinja_run_test(struct ctx *c, struct str name, struct value v, const struct args *a, bool *ret)
{
    static const char *const two[] = {"equalto", "eq", "ne", "in"};
    bool binary = false;

    jinja_charge(c, v);
    for (size_t i = 0; i < sizeof two / sizeof *two; i++) binary |= str_is(name, two[i]);
    if (a->n_named > 0 || a->n != binary)
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "the test \"%.*s\" with %d arguments",
                           (int)(name.n < 40 ? name.n : 40), name.p, a->n + a->n_named);

    if (str_is(name, "defined"))
        *ret = v.kind != UNDEFINED;
    else if (str_is(name, "undefined"))
        *ret = v.kind == UNDEFINED;
    else if (str_is(name, "none"))
        *ret = v.kind == NONE;
    else if (str_is(name, "string"))
        *ret = v.kind == STR;
    else if (str_is(name, "mapping"))
        *ret = v.kind == DICT;
    /* "sequence" means a length and items by index, so strings and mappings are sequences, too */
    else if (str_is(name, "sequence"))
        *ret =
            v.kind == STR || v.kind == DICT || (v.kind == LIST && !v.lazy) || v.kind == UNDEFINED;
    else if (str_is(name, "iterable"))
        *ret = v.kind == STR || v.kind == DICT || v.kind == LIST || v.kind == UNDEFINED ||
               v.kind == LOOP;
    else if (str_is(name, "number"))
        *ret = v.kind == INT || v.kind == BOOL || v.kind == REAL;
    else if (str_is(name, "integer"))
        *ret = v.kind == INT;
    else if (str_is(name, "float"))
        *ret = v.kind == REAL;
    else if (str_is(name, "boolean"))
        *ret = v.kind == BOOL;
    else if (str_is(name, "true"))
        *ret = v.kind == BOOL && v.u.i;
    else if (str_is(name, "false"))
        *ret = v.kind == BOOL && !v.u.i;
    else if (str_is(name, "odd") && v.kind == INT)
        *ret = v.u.i % 2 != 0;
    else if (str_is(name, "even") && v.kind == INT)
        *ret = v.u.i % 2 == 0;
    else if (str_is(name, "equalto") || str_is(name, "eq"))
        return jinja_compare(c, OP_EQ, v, a->v[0], ret);
    else if (str_is(name, "ne"))
        return jinja_compare(c, OP_NE, v, a->v[0], ret);
    else if (str_is(name, "in"))
        return jinja_compare(c, OP_IN, v, a->v[0], ret);
    else
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "the test \"%.*s\" of %s",
                           (int)(name.n < 40 ? name.n : 40), name.p, jinja_kind_name(v.kind));
    return true;
}

/* Upper, lower or title case, of ASCII only: refuses letters beyond ASCII, whose case rules are not
 * implemented. */
static bool change_case(struct ctx *c, struct str s, char how, struct value *ret)
{
    char *p = jinja_ctx_alloc(c, s.n + 1);
    if (p == NULL) return false;
    bool inside = false;
    for (size_t i = 0; i < s.n; i++) {
        char ch = s.p[i];
        if ((unsigned char)ch >= 0x80)
            return jinja_fails(c, TD_ERR_UNSUPPORTED,
                               "it changes the case of text that is not ASCII");
        bool lower = ch >= 'a' && ch <= 'z', upper = ch >= 'A' && ch <= 'Z';
        bool to_upper = how == 'u' || (how == 't' && !inside) || (how == 'c' && i == 0);
        p[i] = (char)(lower && to_upper ? ch - 32 : upper && !to_upper ? ch + 32 : ch);
        inside = lower || upper;
    }
    *ret = jinja_str_value(p, s.n);
    return true;
}

static bool replace(struct ctx *c, struct str s, struct str from, struct str to, struct value *ret)
{
    struct text t = {0};
    if (from.n == 0) return jinja_fails(c, TD_ERR_UNSUPPORTED, "it replaces the empty string");
    size_t at = 0;
    while (at < s.n) {
        const char *hit = memmem(s.p + at, s.n - at, from.p, from.n);
        size_t end = hit == NULL ? s.n : (size_t)(hit - s.p);
        if (!jinja_append(c, &t, (struct str){s.p + at, end - at}) ||
            (hit != NULL && !jinja_append(c, &t, to)))
            return false;
        at = hit == NULL ? s.n : end + from.n;
    }
    *ret = jinja_str_value(t.p, t.n);
    return true;
}

static bool split(struct ctx *c, struct str s, const struct str *sep, int64_t max,
                  struct value *ret)
{
    size_t n = 0;
    for (int pass = 0; pass < 2; pass++) { /* count, then fill */
        size_t at = 0, k = 0;
        if (pass == 1 && !jinja_new_list(c, n, ret)) return false;
        for (;;) {
            if (sep == NULL) {
                struct str rest = jinja_strip((struct str){s.p + at, s.n - at}, NULL, true, false);
                at = s.n - rest.n;
                if (at == s.n) break;
            }
            size_t end = at, skip = 0;
            if (max >= 0 && k >= (size_t)max) {
                struct str rest = {s.p + at, s.n - at};
                end = at + (sep == NULL ? jinja_strip(rest, NULL, false, true).n : rest.n);
                skip = s.n - end;
            } else if (sep != NULL) {
                const char *hit = memmem(s.p + at, s.n - at, sep->p, sep->n);
                end = hit == NULL ? s.n : (size_t)(hit - s.p);
                skip = hit == NULL ? 0 : sep->n;
            } else {
                while (end < s.n &&
                       !jinja_space_char((struct str){s.p + end, jinja_char_bytes(s, end)}))
                    end += jinja_char_bytes(s, end);
            }
            if (pass == 1) ret->u.list->v[k] = jinja_str_value(s.p + at, end - at);
            k++;
            bool more = sep == NULL
                            ? end < s.n
                            : skip == sep->n && end + skip <= s.n && !(max >= 0 && k > (size_t)max);
            at = end + skip;
            if (!more) break;
        }
        n = k;
    }
    return true;
}

/* What "for" walks over. */
bool jinja_to_items(struct ctx *c, struct value v, struct value *ret)
{
    if (v.kind == LIST) {
        *ret = v;
        return true;
    }
    if (v.kind == UNDEFINED) return jinja_new_list(c, 0, ret);
    if (v.kind == DICT) {
        if (!jinja_new_list(c, v.u.dict->n, ret)) return false;
        for (size_t i = 0; i < v.u.dict->n; i++)
            ret->u.list->v[i] = jinja_from_key(v.u.dict->pair[i].key);
        return true;
    }
    if (v.kind == STR) {
        size_t at = 0;
        if (!jinja_new_list(c, jinja_char_count(v.u.s), ret)) return false;
        for (size_t i = 0; i < ret->u.list->n; i++) {
            size_t n = jinja_char_bytes(v.u.s, at);
            ret->u.list->v[i] = jinja_str_value(v.u.s.p + at, n);
            at += n;
        }
        return true;
    }
    return jinja_fails(c, TD_ERR_UNSUPPORTED, "it iterates over %s", jinja_kind_name(v.kind));
}

/* which: 'k' keys, 'v' values, 'i' pairs */
static bool dict_list(struct ctx *c, const struct dict *d, char which, struct value *ret)
{
    if (!jinja_new_list(c, d->n, ret)) return false;
    for (size_t i = 0; i < d->n; i++) {
        struct value key = jinja_from_key(d->pair[i].key);
        struct value *out = &ret->u.list->v[i];
        if (which == 'i') {
            if (!jinja_new_list(c, 2, out)) return false;
            out->u.list->v[0] = key;
            out->u.list->v[1] = d->pair[i].value;
        } else {
            *out = which == 'k' ? key : d->pair[i].value;
        }
    }
    return true;
}

bool jinja_get_item(struct ctx *c, struct value obj, struct value index, struct value *ret)
{
    *ret = (struct value){.kind = UNDEFINED};
    jinja_charge(c, obj);
    if (obj.kind == UNDEFINED)
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "it looks into something undefined");
    if (obj.kind == DICT) {
        struct str key;
        if (!jinja_to_key(c, index, &key)) return false;
        const struct value *v = jinja_dict_find(obj.u.dict, key);
        if (v != NULL) *ret = *v;
        return true;
    }
    if ((obj.kind == LIST || obj.kind == STR) && (index.kind == INT || index.kind == BOOL)) {
        if (obj.lazy) return jinja_fails(c, TD_ERR_UNSUPPORTED, "it takes an item of an iterator");
        int64_t n = obj.kind == LIST ? (int64_t)obj.u.list->n : (int64_t)jinja_char_count(obj.u.s),
                i = index.u.i < 0 ? index.u.i + n : index.u.i;
        if (i < 0 || i >= n) return true;
        if (obj.kind == LIST) {
            *ret = obj.u.list->v[i];
            return true;
        }
        size_t at = 0;
        while (i-- > 0) at += jinja_char_bytes(obj.u.s, at);
        *ret = jinja_str_value(obj.u.s.p + at, jinja_char_bytes(obj.u.s, at));
        return true;
    }
    return jinja_fails(c, TD_ERR_UNSUPPORTED, "it takes an item of %s by %s",
                       jinja_kind_name(obj.kind), jinja_kind_name(index.kind));
}

/* loop.NAME; *ret is undefined on entry. */
static bool loop_attr(struct ctx *c, const struct loop *loop, struct str name, struct value *ret)
{
    size_t at = loop->at, n = loop->items->n;
    const struct value *v = loop->items->v;
    if (str_is(name, "index"))
        *ret = jinja_int_value((int64_t)at + 1);
    else if (str_is(name, "index0"))
        *ret = jinja_int_value((int64_t)at);
    else if (str_is(name, "revindex"))
        *ret = jinja_int_value((int64_t)(n - at));
    else if (str_is(name, "revindex0"))
        *ret = jinja_int_value((int64_t)(n - at) - 1);
    else if (str_is(name, "first"))
        *ret = jinja_bool_value(at == 0);
    else if (str_is(name, "last"))
        *ret = jinja_bool_value(at + 1 == n);
    else if (str_is(name, "length"))
        *ret = jinja_int_value((int64_t)n);
    else if (str_is(name, "previtem"))
        *ret = at > 0 ? v[at - 1] : *ret;
    else if (str_is(name, "nextitem"))
        *ret = at + 1 < n ? v[at + 1] : *ret;
    else
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "loop.%.*s", (int)(name.n < 40 ? name.n : 40),
                           name.p);
    return true;
}

bool jinja_get_attr(struct ctx *c, struct value obj, struct str name, struct value *ret)
{
    *ret = (struct value){.kind = UNDEFINED};
    switch (obj.kind) {
    case DICT: {
        static const char *const methods[] = {"items", "keys",   "values", "get",     "copy",
                                              "pop",   "update", "clear",  "popitem", "setdefault"};
        for (size_t i = 0; i < sizeof methods / sizeof *methods; i++)
            if (str_is(name, methods[i]))
                return jinja_fails(c, TD_ERR_UNSUPPORTED,
                                   "it takes the method %s of a mapping without a call",
                                   methods[i]);
    }
        /* fallthrough */
    case SPACE: {
        jinja_charge(c, obj);
        const struct value *v = jinja_dict_find(obj.u.dict, name);
        if (v != NULL) *ret = *v;
        return true;
    }
    case LOOP:
        return loop_attr(c, obj.u.loop, name, ret);
    case STR:
    case LIST: {
        /* the methods of Python's str and list; any other name is undefined */
        static const char methods[] = " append clear copy count extend index insert pop remove "
                                      "reverse sort capitalize casefold center encode "
                                      "endswith expandtabs find format format_map isalnum isalpha "
                                      "isascii isdecimal isdigit isidentifier islower "
                                      "isnumeric isprintable isspace istitle isupper join ljust "
                                      "lower lstrip maketrans partition removeprefix "
                                      "removesuffix replace rfind rindex rjust rpartition rsplit "
                                      "rstrip split splitlines startswith strip "
                                      "swapcase title translate upper zfill ";
        const char *hit = memmem(methods, sizeof methods - 1, name.p, name.n);
        if (name.p[0] == '_' || obj.lazy || (hit != NULL && hit[-1] == ' ' && hit[name.n] == ' '))
            return jinja_fails(c, TD_ERR_UNSUPPORTED, "it takes the method %.*s without a call",
                               (int)(name.n < 40 ? name.n : 40), name.p);
        return true;
    }
    case NONE:
    case BOOL:
    case INT:
    case REAL:
        return true;
    case UNDEFINED:
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "it takes .%.*s of something undefined",
                           (int)(name.n < 40 ? name.n : 40), name.p);
    default:
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "it takes .%.*s of %s",
                           (int)(name.n < 40 ? name.n : 40), name.p, jinja_kind_name(obj.kind));
    }
}

/* select, reject, selectattr, rejectattr, map(attribute=...) */
static bool filter_items(struct ctx *c, struct str name, struct value v, const struct args *a,
                         struct value *ret)
{
    bool by_attr = str_is(name, "selectattr") || str_is(name, "rejectattr"),
         map = str_is(name, "map");
    bool keep_if = str_is(name, "select") || str_is(name, "selectattr");
    struct value items;
    const struct value *attr = map       ? get_arg(a, JINJA_MAX_ARGS, "attribute")
                               : by_attr ? get_arg(a, 0, NULL)
                                         : NULL;

    if (!jinja_truth(v)) { /* Jinja does not look into an empty value, so none is allowed */
        if (!jinja_new_list(c, 0, ret)) return false;
        ret->lazy = true;
        return true;
    }
    if (!jinja_to_items(c, v, &items)) return false;
    if (((map || by_attr) &&
         (attr == NULL || attr->kind != STR || memchr(attr->u.s.p, '.', attr->u.s.n) != NULL)) ||
        a->n_named != map || (map && a->n != 0))
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "the filter \"%.*s\" with these arguments",
                           (int)name.n, name.p);
    struct args rest = {0};
    const struct value *test = get_arg(a, by_attr, NULL);
    if (test != NULL && test->kind != STR)
        return jinja_fails(c, TD_ERR_UNSUPPORTED,
                           "the filter \"%.*s\" with a test that is no string", (int)name.n,
                           name.p);
    for (int i = by_attr + 1; i < a->n; i++) rest.v[rest.n++] = a->v[i];

    if (!jinja_new_list(c, items.u.list->n, ret)) return false;
    size_t n = 0;
    for (size_t i = 0; i < items.u.list->n; i++) {
        struct value item = items.u.list->v[i], subject = item;
        bool pass;
        if (!jinja_step(c)) return false;
        if (attr != NULL && !(item.kind == DICT ? jinja_get_item(c, item, *attr, &subject)
                                                : jinja_get_attr(c, item, attr->u.s, &subject)))
            return false;
        if (map) {
            ret->u.list->v[n++] = subject;
            continue;
        }
        pass = jinja_truth(subject);
        if (test != NULL && !jinja_run_test(c, test->u.s, subject, &rest, &pass)) return false;
        if (pass == keep_if) ret->u.list->v[n++] = item;
    }
    ret->u.list->n = n;
    ret->lazy = true;
    return true;
}

/* dictsort: by key, letters without case */
static bool sort_pairs(struct ctx *c, struct list *pairs)
{
    for (size_t i = 0; i < pairs->n; i++) {
        struct value pair = pairs->v[i], key = pair.u.list->v[0];
        size_t at = i;
        if (key.kind == STR && !change_case(c, key.u.s, 'l', &key)) return false;
        for (; at > 0; at--) {
            struct value other = pairs->v[at - 1].u.list->v[0];
            bool less = false;
            if (!jinja_step(c) || (other.kind == STR && !change_case(c, other.u.s, 'l', &other)) ||
                !jinja_compare(c, OP_LT, key, other, &less))
                return false;
            if (!less) break;
            pairs->v[at] = pairs->v[at - 1];
        }
        pairs->v[at] = pair;
    }
    return true;
}

/* The filters that take arguments; *ret_is_known is false, and nothing done, for another name. */
static bool run_with_arguments(struct ctx *c, struct str name, struct value v, const struct args *a,
                               struct value *ret, bool *ret_is_known)
{
    struct str s, other;
    const struct value *x;

    *ret_is_known = true;
    if (str_is(name, "default") || str_is(name, "d")) {
        x = get_arg(a, 1, "boolean");
        bool use = v.kind == UNDEFINED || (x != NULL && jinja_truth(*x) && !jinja_truth(v));
        x = get_arg(a, 0, "default_value");
        *ret = !use ? v : x != NULL ? *x : jinja_str_value("", 0);
        return only_args(c, a, 2, "default_value", "boolean", "default");
    }
    if (str_is(name, "tojson")) return jinja_tojson(c, v, a, ret);
    if (v.markup && !str_is(name, "safe") && !str_is(name, "string") && !str_is(name, "length"))
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "the filter \"%.*s\" of safe text",
                           (int)(name.n < 40 ? name.n : 40), name.p);
    if (str_is(name, "join")) {
        struct text t = {0};
        struct value items;
        x = get_arg(a, 0, "d");
        if (!only_args(c, a, 1, "d", NULL, "join") || !jinja_to_items(c, v, &items) ||
            !jinja_to_text(c, x != NULL ? *x : jinja_str_value("", 0), &other))
            return false;
        for (size_t i = 0; i < items.u.list->n; i++)
            if (!jinja_step(c) || (i > 0 && !jinja_append(c, &t, other)) ||
                !jinja_to_text(c, items.u.list->v[i], &s) || !jinja_append(c, &t, s))
                return false;
        *ret = jinja_str_value(t.p, t.n);
        return true;
    }
    if (str_is(name, "select") || str_is(name, "reject") || str_is(name, "selectattr") ||
        str_is(name, "rejectattr") || str_is(name, "map"))
        return filter_items(c, name, v, a, ret);
    if (str_is(name, "replace")) {
        if (!only_args(c, a, 2, NULL, NULL, "replace") || a->n != 2 || a->v[0].kind != STR ||
            a->v[1].kind != STR)
            return c->status != TD_OK ? false
                                      : jinja_fails(c, TD_ERR_UNSUPPORTED,
                                                    "replace of something else than two strings");
        return jinja_to_text(c, v, &s) && replace(c, s, a->v[0].u.s, a->v[1].u.s, ret);
    }
    if (str_is(name, "trim")) {
        x = get_arg(a, 0, "chars");
        if (!only_args(c, a, 1, "chars", NULL, "trim") || !jinja_to_text(c, v, &s)) return false;
        if (x != NULL && x->kind != STR && x->kind != NONE)
            return jinja_fails(c, TD_ERR_UNSUPPORTED, "trim of %s", jinja_kind_name(x->kind));
        s = jinja_strip(s, x != NULL && x->kind == STR ? &x->u.s : NULL, true, true);
        *ret = jinja_str_value(s.p, s.n);
        return true;
    }
    *ret_is_known = false;
    return true;
}

static bool length_of(struct ctx *c, struct value v, struct value *ret)
{
    if (v.kind == STR)
        *ret = jinja_int_value((int64_t)jinja_char_count(v.u.s));
    else if (v.kind == LIST && !v.lazy)
        *ret = jinja_int_value((int64_t)v.u.list->n);
    else if (v.kind == DICT)
        *ret = jinja_int_value((int64_t)v.u.dict->n);
    else if (v.kind == UNDEFINED)
        *ret = jinja_int_value(0);
    else
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "the length of %s",
                           v.lazy ? "an iterator" : jinja_kind_name(v.kind));
    return true;
}

/* The first item or the last; undefined when there is none. */
static bool end_of(struct ctx *c, struct value v, bool first, struct value *ret)
{
    struct value items;
    if (!jinja_to_items(c, v, &items)) return false;
    if (v.lazy && !first) return jinja_fails(c, TD_ERR_UNSUPPORTED, "the last of an iterator");
    size_t n = items.u.list->n;
    *ret = n == 0 ? (struct value){.kind = UNDEFINED} : items.u.list->v[first ? 0 : n - 1];
    return true;
}

/* The first item that is `op` all others: OP_LT the least, OP_GT the greatest. */
static bool extreme_of(struct ctx *c, const struct list *list, enum op op, struct value *ret)
{
    *ret = (struct value){.kind = UNDEFINED};
    for (size_t i = 0; i < list->n; i++) {
        bool better = i == 0;
        if (!jinja_step(c) || (i > 0 && !jinja_compare(c, op, list->v[i], *ret, &better)))
            return false;
        if (better) *ret = list->v[i];
    }
    return true;
}

bool jinja_run_filter(struct ctx *c, struct str name, struct value v, const struct args *a,
                      struct value *ret)
{
    struct str s;

    jinja_charge(c, v);
    bool is_known = true, ok = run_with_arguments(c, name, v, a, ret, &is_known);
    if (is_known) return ok;

    /* the other filters take no arguments */
    static const struct {
        const char *name, *how;
    } cases[] = {{"upper", "u"}, {"lower", "l"}, {"capitalize", "c"}};
    bool known = true;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (str_is(name, cases[i].name))
            return only_args(c, a, 0, NULL, NULL, cases[i].name) && jinja_to_text(c, v, &s) &&
                   change_case(c, s, cases[i].how[0], ret);
    if (str_is(name, "string") || str_is(name, "safe")) {
        if (!jinja_to_text(c, v, &s)) return false;
        *ret = jinja_str_value(s.p, s.n);
        ret->markup = v.markup || str_is(name, "safe");
    } else if (str_is(name, "length") || str_is(name, "count")) {
        if (!length_of(c, v, ret)) return false;
    } else if (str_is(name, "first") || str_is(name, "last")) {
        if (!end_of(c, v, name.p[0] == 'f', ret)) return false;
    } else if ((str_is(name, "min") || str_is(name, "max")) && v.kind == LIST) {
        if (!extreme_of(c, v.u.list, name.p[1] == 'i' ? OP_LT : OP_GT, ret)) return false;
    } else if (str_is(name, "list")) {
        if (!jinja_to_items(c, v, ret)) return false;
        ret->lazy = false;
    } else if (str_is(name, "reverse") && v.kind == LIST && !v.lazy) {
        if (!jinja_new_list(c, v.u.list->n, ret)) return false;
        for (size_t i = 0; i < v.u.list->n; i++)
            ret->u.list->v[i] = v.u.list->v[v.u.list->n - 1 - i];
        ret->lazy = true;
    } else if (str_is(name, "items") && (v.kind == DICT || v.kind == UNDEFINED)) {
        if (!(v.kind == DICT ? dict_list(c, v.u.dict, 'i', ret) : jinja_new_list(c, 0, ret)))
            return false;
        ret->lazy = true;
    } else if (str_is(name, "dictsort") && v.kind == DICT) {
        return only_args(c, a, 0, NULL, NULL, "dictsort") && dict_list(c, v.u.dict, 'i', ret) &&
               sort_pairs(c, ret->u.list);
    } else if (str_is(name, "int") && v.kind == INT) {
        *ret = v;
    } else {
        known = false;
    }
    if (!known)
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "the filter \"%.*s\" of %s",
                           (int)(name.n < 40 ? name.n : 40), name.p, jinja_kind_name(v.kind));
    return only_args(c, a, 0, NULL, NULL, "a filter");
}

bool jinja_str_method(struct ctx *c, struct str s, struct str name, const struct args *a,
                      struct value *ret)
{
    const struct value *x = get_arg(a, 0, NULL);
    const struct str *arg = x != NULL && x->kind == STR ? &x->u.s : NULL;

    jinja_charge(c, jinja_str_value(s.p, s.n));
    if (a->n_named > 0)
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "a string's method with a named argument");
    bool l = str_is(name, "lstrip"), r = str_is(name, "rstrip");
    if ((l || r || str_is(name, "strip")) && a->n <= 1 &&
        (x == NULL || arg != NULL || x->kind == NONE)) {
        s = jinja_strip(s, arg, !r, !l);
        *ret = jinja_str_value(s.p, s.n);
        return true;
    }
    if ((str_is(name, "startswith") || str_is(name, "endswith")) && a->n == 1 && arg != NULL) {
        bool fits = s.n >= arg->n;
        *ret = jinja_bool_value(
            fits && (arg->n == 0 ||
                     memcmp(name.p[0] == 's' ? s.p : s.p + s.n - arg->n, arg->p, arg->n) == 0));
        return true;
    }
    if (str_is(name, "split") && a->n <= 2 &&
        (x == NULL || x->kind == NONE || (arg != NULL && arg->n > 0)) &&
        (a->n < 2 || a->v[1].kind == INT))
        return split(c, s, arg, a->n == 2 ? a->v[1].u.i : -1, ret);
    if (str_is(name, "replace") && a->n == 2 && arg != NULL && a->v[1].kind == STR)
        return replace(c, s, *arg, a->v[1].u.s, ret);
    if (str_is(name, "join") && a->n == 1) {
        struct args sep = {.n = 1, .v = {jinja_str_value(s.p, s.n)}};
        struct value items;
        if (!jinja_to_items(c, *x, &items)) return false;
        for (size_t i = 0; i < items.u.list->n; i++)
            if (items.u.list->v[i].kind != STR)
                return jinja_fails(c, TD_ERR_UNSUPPORTED, "it joins %s",
                                   jinja_kind_name(items.u.list->v[i].kind));
        return jinja_run_filter(c, (struct str){"join", 4}, items, &sep, ret);
    }
    static const struct {
        const char *name, *how;
    } cases[] = {{"upper", "u"}, {"lower", "l"}, {"capitalize", "c"}, {"title", "t"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (str_is(name, cases[i].name) && a->n == 0)
            return change_case(c, s, cases[i].how[0], ret);
    return jinja_fails(c, TD_ERR_UNSUPPORTED, "a string's method %.*s with %d arguments",
                       (int)(name.n < 40 ? name.n : 40), name.p, a->n);
}

bool jinja_dict_method(struct ctx *c, const struct dict *d, struct str name, const struct args *a,
                       struct value *ret)
{
    static const char *const lists[] = {"keys", "values", "items"};
    for (size_t i = 0; i < 3; i++)
        if (str_is(name, lists[i]) && a->n + a->n_named == 0)
            return dict_list(c, d, lists[i][0], ret);
    struct str key;
    if (str_is(name, "get") && a->n_named == 0 && (a->n == 1 || a->n == 2)) {
        if (!jinja_to_key(c, a->v[0], &key)) return false;
        const struct value *v = jinja_dict_find(d, key);
        *ret = v != NULL ? *v : a->n == 2 ? a->v[1] : jinja_none_value();
        return true;
    }
    return jinja_fails(c, TD_ERR_UNSUPPORTED, "a mapping's method %.*s with %d arguments",
                       (int)(name.n < 40 ? name.n : 40), name.p, a->n + a->n_named);
}

static const char *const functions[] = {"raise_exception", "strftime_now", "namespace", "range",
                                        "dict"};

int jinja_function_find(struct str name)
{
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (str_is(name, functions[i])) return (int)i;
    return -1;
}
enum { F_RAISE, F_STRFTIME, F_NAMESPACE, F_RANGE, F_DICT };

/* One conversion of strftime with the C locale's names, whatever the process's locale is: its
 * length, -1 for one that is not known. */
static int format_time_part(const struct tm *tm, char conversion, char *out, size_t bytes)
{
    static const char *const months[] = {"January",   "February", "March",    "April",
                                         "May",       "June",     "July",     "August",
                                         "September", "October",  "November", "December"};
    static const char *const days[] = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                       "Thursday", "Friday", "Saturday"};
    switch (conversion) {
    case 'd':
        return snprintf(out, bytes, "%02d", tm->tm_mday);
    case 'm':
        return snprintf(out, bytes, "%02d", tm->tm_mon + 1);
    case 'Y':
        return snprintf(out, bytes, "%d", tm->tm_year + 1900);
    case 'y':
        return snprintf(out, bytes, "%02d", tm->tm_year % 100);
    case 'H':
        return snprintf(out, bytes, "%02d", tm->tm_hour);
    case 'M':
        return snprintf(out, bytes, "%02d", tm->tm_min);
    case 'S':
        return snprintf(out, bytes, "%02d", tm->tm_sec);
    case 'b':
        return snprintf(out, bytes, "%.3s", months[tm->tm_mon]);
    case 'B':
        return snprintf(out, bytes, "%s", months[tm->tm_mon]);
    case 'a':
        return snprintf(out, bytes, "%.3s", days[tm->tm_wday]);
    case 'A':
        return snprintf(out, bytes, "%s", days[tm->tm_wday]);
    case '%':
        return snprintf(out, bytes, "%%");
    default:
        return -1;
    }
}

static bool format_time(struct ctx *c, struct str fmt, struct value *ret)
{
    struct text t = {0};
    time_t now = (time_t)c->input->now_unix_s;
    struct tm tm;

    if (gmtime_r(&now, &tm) == NULL)
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "the date is out of range");
    for (size_t i = 0; i < fmt.n; i++) {
        char out[32] = {fmt.p[i], 0};
        int n = 1;
        if (fmt.p[i] == '%') n = format_time_part(&tm, ++i < fmt.n ? fmt.p[i] : 0, out, sizeof out);
        if (n < 0) return jinja_fails(c, TD_ERR_UNSUPPORTED, "strftime_now with this format");
        if (!jinja_append(c, &t, (struct str){out, (size_t)n})) return false;
    }
    *ret = jinja_str_value(t.p, t.n);
    return true;
}

bool jinja_call_function(struct ctx *c, int64_t which, const struct args *a, struct value *ret)
{
    struct str s;
    switch (which) {
    case F_RAISE:
        if (a->n != 1 || a->n_named != 0 || !jinja_to_text(c, a->v[0], &s))
            return c->status != TD_OK ? false
                                      : jinja_fails(c, TD_ERR_UNSUPPORTED,
                                                    "raise_exception with %d arguments", a->n);
        return jinja_fails(c, TD_ERR_INVALID, "%.*s", (int)(s.n < 250 ? s.n : 250), s.p);
    case F_STRFTIME:
        if (a->n != 1 || a->n_named != 0 || a->v[0].kind != STR)
            return jinja_fails(c, TD_ERR_UNSUPPORTED,
                               "strftime_now with something else than one string");
        return format_time(c, a->v[0].u.s, ret);
    case F_NAMESPACE:
    case F_DICT:
        if (a->n != 0)
            return jinja_fails(c, TD_ERR_UNSUPPORTED, "%s with an argument without a name",
                               functions[which]);
        if (!jinja_new_dict(c, which == F_DICT ? DICT : SPACE, ret)) return false;
        for (int i = 0; i < a->n_named; i++)
            if (!jinja_dict_put(c, ret->u.dict, a->name[i], a->v[i])) return false;
        return true;
    default: {
        int64_t v[3] = {0, 0, 1};
        if (a->n < 1 || a->n > 3 || a->n_named != 0)
            return jinja_fails(c, TD_ERR_UNSUPPORTED, "range with %d arguments", a->n);
        for (int i = 0; i < a->n; i++) {
            if (a->v[i].kind != INT)
                return jinja_fails(c, TD_ERR_UNSUPPORTED, "range of %s",
                                   jinja_kind_name(a->v[i].kind));
            if (a->v[i].u.i > (int64_t)1 << 53 || a->v[i].u.i < -((int64_t)1 << 53))
                return jinja_fails(c, TD_ERR_UNSUPPORTED, "a number beyond 2^53");
            v[a->n == 1 ? 1 : i] = a->v[i].u.i;
        }
        if (v[2] == 0) return jinja_fails(c, TD_ERR_UNSUPPORTED, "range with a step of 0");
        int64_t n = v[2] > 0 ? (v[1] - v[0] + v[2] - 1) / v[2] : (v[0] - v[1] - v[2] - 1) / -v[2];
        if (n < 0) n = 0;
        if (n > MAX_RANGE)
            return jinja_fails(c, TD_ERR_LIMIT, "a range of more than %d", MAX_RANGE);
        if (!jinja_new_list(c, (size_t)n, ret)) return false;
        for (int64_t i = 0; i < n; i++) ret->u.list->v[i] = jinja_int_value(v[0] + i * v[2]);
        return true;
    }
    }
}

bool jinja_call_macro(struct ctx *c, const struct node *macro, const struct args *a,
                      struct value *ret)
{
    struct scope scope = {.parent = c->root}, *outer = c->scope;
    struct text text = {0}, *out = c->out;
    int n_used = 0, position = 0, line = c->line;

    if (c->macro_depth == MAX_MACRO_DEPTH)
        return jinja_fails(c, TD_ERR_LIMIT, "macros nest too deep");
    for (const struct target *t = macro->targets; t != NULL; t = t->next, position++) {
        struct value v = {.kind = UNDEFINED};
        const struct value *given = position < a->n ? &a->v[position] : NULL;
        for (int i = a->n; i < a->n + a->n_named; i++)
            if (str_same(a->name[i], t->name)) given = &a->v[i];
        if (given != NULL) {
            v = *given;
            n_used++;
        } else if (t->fallback != NULL && !jinja_eval(c, t->fallback, &v)) {
            return false;
        }
        if (!jinja_bind(c, &scope, t->name, v)) return false;
    }
    if (n_used != a->n + a->n_named)
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "the macro %.*s with arguments it does not take",
                           (int)(macro->text.n < 40 ? macro->text.n : 40), macro->text.p);
    c->macro_depth++;
    c->scope = &scope;
    c->out = &text;
    bool ok = jinja_run_nodes(c, macro->body);
    c->macro_depth--;
    c->scope = outer;
    c->out = out;
    c->line = line;
    *ret = jinja_str_value(text.p, text.n);
    return ok;
}
