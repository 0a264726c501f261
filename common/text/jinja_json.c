/* jinja_json.c - JSON texts (tool definitions, arguments of calls, template_kwargs) to values, and
 * the filter tojson.
 *
 * tojson is transformers' own: json.dumps(value, ensure_ascii=False, indent=None, separators=None,
 * sort_keys=False), not Jinja's, which escapes for HTML. Keys keep the order of the JSON text, and
 * a real is written as Python's repr writes it, so that a schema comes out as the model saw it in
 * training. jansson parses one text at a time, so that what it takes is bounded by one. */
#include "common/text/jinja_internal.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- JSON to values -------------------------------------------------------------------------- */

static bool bad_json(struct ctx *c, td_status code, const char *what, const char *why)
{
    c->status = td_fail(c->err, code, "%s: %s", what, why);
    return false;
}

static bool copy_text(struct ctx *c, const char *p, size_t n, struct str *ret)
{
    char *copy = jinja_ctx_alloc(c, n + 1);
    if (copy == NULL) return false;
    if (n > 0) memcpy(copy, p, n);
    *ret = (struct str){copy, n};
    return true;
}

static bool from_jansson(struct ctx *c, json_t *json, int depth, const char *what,
                         struct value *ret)
{
    char why[80];
    struct str s;

    if (!jinja_step(c)) return false;
    if (depth > TD_CHAT_MAX_JSON_DEPTH) {
        snprintf(why, sizeof why, "nests deeper than %d", TD_CHAT_MAX_JSON_DEPTH);
        return bad_json(c, TD_ERR_LIMIT, what, why);
    }
    switch (json_typeof(json)) {
    case JSON_NULL:
        *ret = jinja_none_value();
        return true;
    case JSON_TRUE:
    case JSON_FALSE:
        *ret = jinja_bool_value(json_is_true(json));
        return true;
    case JSON_INTEGER:
        *ret = jinja_int_value(json_integer_value(json));
        return true;
    case JSON_REAL:
        *ret = (struct value){.kind = REAL, .u.real = json_real_value(json)};
        return true;
    case JSON_STRING:
        if (!copy_text(c, json_string_value(json), json_string_length(json), &s)) return false;
        *ret = jinja_str_value(s.p, s.n);
        return true;
    case JSON_ARRAY:
        if (!jinja_new_list(c, json_array_size(json), ret)) return false;
        for (size_t i = 0; i < json_array_size(json); i++)
            if (!from_jansson(c, json_array_get(json, i), depth + 1, what, &ret->u.list->v[i]))
                return false;
        return true;
    default: {
        size_t n = json_object_size(json);
        if (n > TD_CHAT_MAX_JSON_KEYS) {
            snprintf(why, sizeof why, "has an object of %zu keys, must be <= %d", n,
                     TD_CHAT_MAX_JSON_KEYS);
            return bad_json(c, TD_ERR_LIMIT, what, why);
        }
        if (!jinja_new_dict(c, DICT, ret)) return false;
        struct dict *d = ret->u.dict;
        d->pair = n > 0 ? jinja_ctx_alloc(c, n * sizeof *d->pair) : NULL;
        d->room = n;
        if (n > 0 && d->pair == NULL) return false;
        const char *key;
        json_t *item;
        json_object_foreach(json, key, item) /* in the order of the text, no key twice */
        {
            struct pair *pair = &d->pair[d->n++];
            if (!copy_text(c, key, strlen(key), &pair->key) ||
                !from_jansson(c, item, depth + 1, what, &pair->value))
                return false;
        }
        return true;
    }
    }
}

bool jinja_from_json(struct ctx *c, struct td_chat_json json, bool object, const char *what,
                     struct value *ret)
{
    json_error_t je;
    char why[240];

    if (json.bytes > TD_CHAT_MAX_JSON_BYTES) {
        snprintf(why, sizeof why, "has %zu bytes, must be <= %d", json.bytes,
                 TD_CHAT_MAX_JSON_BYTES);
        return bad_json(c, TD_ERR_LIMIT, what, why);
    }
    json_t *root = json_loadb(json.text, json.bytes, JSON_ALLOW_NUL | JSON_DECODE_ANY, &je);
    if (root == NULL && json_error_code(&je) == json_error_out_of_memory)
        return bad_json(c, TD_ERR_NOMEM, what, "no memory");
    if (root == NULL) {
        snprintf(why, sizeof why, "line %d, column %d: %s", je.line, je.column, je.text);
        return bad_json(c, TD_ERR_INVALID, what, why);
    }
    bool ok = !object || json_is_object(root);
    ok = ok ? from_jansson(c, root, 1, what, ret)
            : bad_json(c, TD_ERR_INVALID, what, "is no JSON object");
    json_decref(root);
    return ok;
}

/* ---- values to JSON -------------------------------------------------------------------------- */

/* repr(): the fewest digits that read back as the same number, with an exponent when the first
 * digit stands for less than 1e-4 or for 1e16 and more. */
bool jinja_real_text(struct ctx *c, double real, struct str *ret)
{
    char e[40], digits[24], out[64];
    int n = 0, n_out = 0;

    for (int precision = 0; precision < 17; precision++) {
        snprintf(e, sizeof e, "%.*e", precision, real);
        if (strtod(e, NULL) == real) break;
    }
    const char *p = e;
    if (*p == '-') out[n_out++] = *p++;
    for (; *p != 'e' && *p != 0; p++)
        if (*p >= '0' && *p <= '9') digits[n++] = *p; /* whatever the locale's point is */
    int exponent = *p == 'e' ? (int)strtol(p + 1, NULL, 10) : 0; /* snprintf's own digits */
    if (exponent >= -4 && exponent < 16) {
        if (exponent < 0) {
            n_out += snprintf(out + n_out, sizeof out - (size_t)n_out, "0.%.*s%.*s", -exponent - 1,
                              "000", n, digits);
        } else {
            for (int i = 0; i <= exponent; i++) out[n_out++] = i < n ? digits[i] : '0';
            out[n_out++] = '.';
            if (exponent + 1 >= n) out[n_out++] = '0';
            for (int i = exponent + 1; i < n; i++) out[n_out++] = digits[i];
        }
    } else {
        out[n_out++] = digits[0];
        if (n > 1)
            n_out += snprintf(out + n_out, sizeof out - (size_t)n_out, ".%.*s", n - 1, digits + 1);
        n_out += snprintf(out + n_out, sizeof out - (size_t)n_out, "e%c%02d",
                          exponent < 0 ? '-' : '+', abs(exponent));
    }
    return copy_text(c, out, (size_t)n_out, ret);
}

struct style {
    bool ascii, sorted;
    int64_t indent; /* -1: all on one line */
    struct str comma, colon;
};

static bool write_string(struct ctx *c, struct str s, const struct style *style, struct text *t)
{
    static const char plain[] = "\"\"\\\\\nn\tt\rr\bb\ff";

    if (!jinja_append(c, t, (struct str){"\"", 1})) return false;
    for (size_t i = 0; i < s.n;) {
        unsigned char ch = (unsigned char)s.p[i];
        size_t n_char = jinja_char_bytes(s, i);
        char out[16];
        int n = 0;
        for (const char *k = plain; *k != 0; k += 2)
            if ((unsigned char)*k == ch) n = snprintf(out, sizeof out, "\\%c", k[1]);
        if (n == 0 && (ch < 0x20 || (style->ascii && ch == 0x7f))) {
            n = snprintf(out, sizeof out, "\\u%04x", ch);
        } else if (n == 0 && style->ascii && ch >= 0x80) {
            if (n_char == 1)
                return jinja_fails(c, TD_ERR_UNSUPPORTED, "tojson of text that is not UTF-8");
            uint32_t cp = ch & (0xffu >> (n_char + 1));
            for (size_t k = 1; k < n_char; k++) cp = cp << 6 | ((unsigned char)s.p[i + k] & 0x3f);
            n = cp < 0x10000 ? snprintf(out, sizeof out, "\\u%04x", cp)
                             : snprintf(out, sizeof out, "\\u%04x\\u%04x",
                                        0xd800 + ((cp - 0x10000) >> 10), 0xdc00 + (cp & 0x3ff));
        }
        struct str piece = n > 0 ? (struct str){out, (size_t)n} : (struct str){s.p + i, n_char};
        if (!jinja_append(c, t, piece)) return false;
        i += n_char;
    }
    return jinja_append(c, t, (struct str){"\"", 1});
}

static bool new_line(struct ctx *c, const struct style *style, int depth, struct text *t)
{
    if (style->indent < 0) return true;
    if (!jinja_append(c, t, (struct str){"\n", 1})) return false;
    for (int64_t i = 0; i < style->indent * depth; i++)
        if (!jinja_append(c, t, (struct str){" ", 1})) return false;
    return true;
}

/* An insertion sort by bytes, which is the order of code points. */
static bool sort_keys(struct ctx *c, const struct dict *d, struct pair **ret)
{
    struct pair *pair = jinja_ctx_alloc(c, d->n * sizeof *pair);
    if (pair == NULL) return false;
    for (size_t i = 0; i < d->n; i++) {
        size_t at = i;
        for (; at > 0; at--) {
            bool less = false;
            struct str a = d->pair[i].key, b = pair[at - 1].key;
            if (!jinja_step(c) || !jinja_compare(c, OP_LT, jinja_str_value(a.p, a.n),
                                                 jinja_str_value(b.p, b.n), &less))
                return false;
            if (!less) break;
            pair[at] = pair[at - 1];
        }
        pair[at] = d->pair[i];
    }
    *ret = pair;
    return true;
}

static bool write_value(struct ctx *c, struct value v, const struct style *style, int depth,
                        struct text *t)
{
    struct str s;

    if (depth > JINJA_MAX_DEPTH)
        return jinja_fails(c, TD_ERR_LIMIT, "tojson of values that nest too deep");
    switch (v.kind) {
    case NONE:
        return jinja_append(c, t, (struct str){"null", 4});
    case BOOL:
        return jinja_append(c, t, v.u.i ? (struct str){"true", 4} : (struct str){"false", 5});
    case INT:
    case REAL:
        return jinja_to_text(c, v, &s) && jinja_append(c, t, s);
    case STR:
        return write_string(c, v.u.s, style, t);
    case LIST:
        if (v.lazy) return jinja_fails(c, TD_ERR_UNSUPPORTED, "tojson of an iterator");
        if (v.u.list->n == 0) return jinja_append(c, t, (struct str){"[]", 2});
        for (size_t i = 0; i < v.u.list->n; i++)
            if (!jinja_append(c, t, i == 0 ? (struct str){"[", 1} : style->comma) ||
                !new_line(c, style, depth + 1, t) ||
                !write_value(c, v.u.list->v[i], style, depth + 1, t))
                return false;
        return new_line(c, style, depth, t) && jinja_append(c, t, (struct str){"]", 1});
    case DICT: {
        struct pair *pairs = v.u.dict->pair;
        if (v.u.dict->n == 0) return jinja_append(c, t, (struct str){"{}", 2});
        for (size_t i = 0; i < v.u.dict->n; i++)
            if (jinja_from_key(pairs[i].key).kind != STR)
                return jinja_fails(c, TD_ERR_UNSUPPORTED,
                                   "tojson of a mapping with integers as keys");
        if (style->sorted && !sort_keys(c, v.u.dict, &pairs)) return false;
        for (size_t i = 0; i < v.u.dict->n; i++)
            if (!jinja_append(c, t, i == 0 ? (struct str){"{", 1} : style->comma) ||
                !new_line(c, style, depth + 1, t) || !write_string(c, pairs[i].key, style, t) ||
                !jinja_append(c, t, style->colon) ||
                !write_value(c, pairs[i].value, style, depth + 1, t))
                return false;
        return new_line(c, style, depth, t) && jinja_append(c, t, (struct str){"}", 1});
    }
    default:
        return jinja_fails(c, TD_ERR_UNSUPPORTED, "tojson of %s", jinja_kind_name(v.kind));
    }
}

bool jinja_tojson(struct ctx *c, struct value v, const struct args *a, struct value *ret)
{
    struct style style = {.indent = -1, .comma = {", ", 2}, .colon = {": ", 2}};
    struct text t = {0};

    bool ok = a->n == 0, separators = false;
    for (int i = 0; ok && i < a->n_named; i++) {
        struct value x = a->v[i];
        if (str_is(a->name[i], "ensure_ascii") && x.kind == BOOL) {
            style.ascii = x.u.i != 0;
        } else if (str_is(a->name[i], "sort_keys") && x.kind == BOOL) {
            style.sorted = x.u.i != 0;
        } else if (str_is(a->name[i], "indent") &&
                   (x.kind == NONE || (x.kind == INT && x.u.i >= 0 && x.u.i <= 16))) {
            style.indent = x.kind == INT ? x.u.i : -1;
            if (x.kind == INT && !separators) style.comma.n = 1;
        } else if (str_is(a->name[i], "separators") && x.kind == LIST && !x.lazy &&
                   x.u.list->n == 2 && x.u.list->v[0].kind == STR && x.u.list->v[1].kind == STR) {
            style.comma = x.u.list->v[0].u.s;
            style.colon = x.u.list->v[1].u.s;
            separators = true;
        } else {
            ok = false;
        }
    }
    if (!ok) return jinja_fails(c, TD_ERR_UNSUPPORTED, "tojson with these arguments");
    if (!write_value(c, v, &style, 0, &t)) return false;
    *ret = jinja_str_value(t.p, t.n);
    return true;
}
