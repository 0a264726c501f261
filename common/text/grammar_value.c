/* grammar_value.c - JSON as such: any value, and one value. Between two marks stands one space,
 * or a line's end and at most 20 spaces, or nothing. */
#include <stdlib.h>
#include <string.h>

#include "common/text/grammar_schema.h"

int32_t td_json_space(struct td_builder *b)
{
    int32_t line =
        td_expr_cat(b, td_expr_text(b, "\n"), td_expr_rep(b, td_expr_text(b, " "), 0, 20));
    return td_expr_rep(b, td_expr_alt(b, td_expr_text(b, " "), line), 0, 1);
}

/* Characters that stand in a string as they are. */
int32_t td_json_plain_char(struct td_builder *b)
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
int32_t td_json_string_char(struct td_builder *b)
{
    static const char escapes[] =
        "\\\\([\"\\\\/bfnrt]|u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))";
    int32_t escaped = td_expr_regex(b, escapes, sizeof escapes - 1, TD_REGEX_OUTPUT);
    return td_expr_alt(b, td_json_plain_char(b), escaped);
}

int32_t td_json_quoted(struct td_builder *b, int32_t inside)
{
    int32_t e = td_expr_cat(b, td_expr_text(b, "\""), inside);
    td_expr_add(b, e, td_expr_text(b, "\""));
    return e;
}

int32_t td_json_string(struct td_schema *s)
{
    if (!s->string) {
        s->string = td_rule_new(s->b);
        int32_t e = td_json_quoted(s->b, td_expr_rep(s->b, td_json_string_char(s->b), 0, -1));
        if (!s->b->status) s->b->rules[s->string].expr = e;
    }
    return td_expr_call(s->b, s->string);
}

int32_t td_json_number(struct td_builder *b, bool integer)
{
    static const char whole[] = "-?(0|[1-9][0-9]{0,15})";
    static const char real[] = "-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?";
    return integer ? td_expr_regex(b, whole, sizeof whole - 1, TD_REGEX_OUTPUT)
                   : td_expr_regex(b, real, sizeof real - 1, TD_REGEX_OUTPUT);
}

int32_t td_json_comma(struct td_builder *b)
{
    return td_expr_cat(b, td_expr_text(b, ","), td_json_space(b));
}

/* OPEN space (item (comma item)*)? space CLOSE; `item` is used once, `again` once more. */
static int32_t list_of(struct td_builder *b, const char *open, int32_t item, int32_t again,
                       const char *close)
{
    int32_t rest = td_expr_rep(b, td_expr_cat(b, td_json_comma(b), again), 0, -1);
    int32_t items = td_expr_rep(b, td_expr_cat(b, item, rest), 0, 1);
    int32_t e = td_expr_cat(b, td_expr_text(b, open), td_json_space(b));
    td_expr_add(b, e, items);
    td_expr_add(b, e, td_json_space(b));
    td_expr_add(b, e, td_expr_text(b, close));
    return e;
}

int32_t td_json_member(struct td_builder *b, int32_t name, int32_t value)
{
    int32_t e = td_expr_cat(b, name, td_expr_text(b, ":"));
    td_expr_add(b, e, td_json_space(b));
    td_expr_add(b, e, value);
    return e;
}

int32_t td_json_object(struct td_schema *s)
{
    struct td_builder *b = s->b;
    int32_t one = td_rule_new(b);
    int32_t e = td_json_member(b, td_json_string(s), td_json_value(s));
    if (!b->status) b->rules[one].expr = e;
    return list_of(b, "{", td_expr_call(b, one), td_expr_call(b, one), "}");
}

int32_t td_json_value(struct td_schema *s)
{
    struct td_builder *b = s->b;
    if (s->value || b->status) return td_expr_call(b, s->value);
    s->value = td_rule_new(b);
    int32_t alt = td_expr_alt(b, td_json_string(s), td_json_number(b, false));
    td_expr_add(b, alt, td_expr_text(b, "true"));
    td_expr_add(b, alt, td_expr_text(b, "false"));
    td_expr_add(b, alt, td_expr_text(b, "null"));
    td_expr_add(b, alt, td_json_object(s));
    td_expr_add(b, alt, list_of(b, "[", td_json_value(s), td_json_value(s), "]"));
    if (!b->status) b->rules[s->value].expr = alt;
    return td_expr_call(b, s->value);
}

/* As JSON writes it shortest: malloc'd, NULL without memory. */
char *td_json_scalar(const json_t *v)
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
int32_t td_json_this_value(struct td_schema *s, const json_t *v, int depth)
{
    struct td_builder *b = s->b;
    bool is_object = json_is_object(v);
    if (depth > TD_GRAMMAR_MAX_DEPTH)
        td_builder_fail(b, TD_ERR_LIMIT, "a value of enum is nested more than %d deep, the limit",
                        TD_GRAMMAR_MAX_DEPTH);
    if (b->status) return 0;
    if (!is_object && !json_is_array(v)) {
        char *text = td_json_scalar(v);
        int32_t e = text ? td_expr_text(b, text) : 0;
        if (!text) td_builder_fail(b, TD_ERR_NOMEM, "no memory for enum");
        free(text);
        return e;
    }
    int32_t e = td_expr_cat(b, td_expr_text(b, is_object ? "{" : "["), td_json_space(b));
    void *at = json_object_iter((json_t *)v);
    size_t n = is_object ? json_object_size(v) : json_array_size(v);
    for (size_t i = 0; i < n && !b->status; i++) {
        if (i) td_expr_add(b, e, td_json_comma(b));
        if (is_object) {
            json_t *name = json_string(json_object_iter_key(at));
            int32_t key = td_json_this_value(s, name, depth + 1);
            td_expr_add(b, e,
                        td_json_member(
                            b, key, td_json_this_value(s, json_object_iter_value(at), depth + 1)));
            json_decref(name);
            at = json_object_iter_next((json_t *)v, at);
        } else {
            td_expr_add(b, e, td_json_this_value(s, json_array_get(v, i), depth + 1));
        }
    }
    if (n) td_expr_add(b, e, td_json_space(b));
    td_expr_add(b, e, td_expr_text(b, is_object ? "}" : "]"));
    return e;
}
