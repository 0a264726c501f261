/* json.c - jansson, plus two things that it lacks: messages that name everything, and whole numbers
 * of more than 63 bits.
 *
 * Why the second: Hugging Face files carry "model_max_length": 1000000000000000019884624838656 for
 * "no limit", which jansson refuses with "number too big". When it says so, and only then, the text
 * is parsed again with ".0" put after integers of 19 digits and more that stand outside strings:
 * these become reals, and all others stay integers. */
#include "common/base/json.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/mem.h"

#define BIG_DIGITS 19 /* every integer of up to 18 digits fits int64_t */

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* A copy of text with ".0" after each long integer, at most 2 bytes more per 19; NULL when memory
 * is out. */
static char *widen_integers(const char *text, size_t n_bytes, size_t *ret_bytes)
{
    char *out = malloc(n_bytes + n_bytes / BIG_DIGITS * 2 + 2);
    if (!out) return NULL;
    size_t n = 0;
    bool in_string = false;
    for (size_t i = 0; i < n_bytes;) {
        if (in_string) {
            if (text[i] == '\\' && i + 1 < n_bytes)
                out[n++] = text[i++];
            else if (text[i] == '"')
                in_string = false;
            out[n++] = text[i++];
        } else if (is_digit(text[i])) {
            bool is_fraction = i > 0 && strchr(".eE+", text[i - 1]) && text[i - 1] != '\0';
            size_t n_digits = 0;
            for (; i < n_bytes && is_digit(text[i]); n_digits++) out[n++] = text[i++];
            bool goes_on = i < n_bytes && (text[i] == '.' || text[i] == 'e' || text[i] == 'E');
            if (n_digits >= BIG_DIGITS && !is_fraction && !goes_on) out[n++] = '.', out[n++] = '0';
        } else {
            if (text[i] == '"') in_string = true;
            out[n++] = text[i++];
        }
    }
    *ret_bytes = n;
    return out;
}

td_status td_json_load_text(const char *text, size_t n_bytes, const char *what, json_t **ret_root,
                            struct td_err *err)
{
    json_error_t je;
    json_t *root = json_loadb(text, n_bytes, JSON_ALLOW_NUL, &je);
    if (!root && json_error_code(&je) == json_error_numeric_overflow) {
        size_t wide_bytes;
        char *wide = widen_integers(text, n_bytes, &wide_bytes);
        if (!wide)
            return td_fail(err, TD_ERR_NOMEM, "%s: no memory for %zu bytes of JSON", what, n_bytes);
        root = json_loadb(wide, wide_bytes, JSON_ALLOW_NUL, &je);
        free(wide);
    }
    if (!root && json_error_code(&je) == json_error_out_of_memory) {
        return td_fail(err, TD_ERR_NOMEM, "%s: no memory for %zu bytes of JSON", what, n_bytes);
    }
    if (!root)
        return td_fail(err, TD_ERR_INVALID, "%s: line %d, column %d: %s", what, je.line, je.column,
                       je.text);
    *ret_root = root;
    return TD_OK;
}

td_status td_json_load_file(const char *path, size_t max_bytes, json_t **ret_root,
                            struct td_err *err)
{
    char *text;
    size_t n_bytes;
    td_status s = td_file_read(path, max_bytes, &text, &n_bytes, err);
    if (s) return s;
    s = td_json_load_text(text, n_bytes, path, ret_root, err);
    free(text);
    return s;
}

/* The field, or NULL when absent or null. */
static const json_t *find(const json_t *obj, const char *key, bool *ret_present)
{
    const json_t *v = json_object_get(obj, key);
    if (json_is_null(v)) v = NULL;
    if (ret_present) *ret_present = v != NULL;
    return v;
}

const char *td_json_show(const json_t *v, char *buf, size_t buf_bytes)
{
    char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
    int n = snprintf(buf, buf_bytes, "%s", text ? text : "(unprintable)");
    if (n > 0 && (size_t)n >= buf_bytes) memcpy(buf + buf_bytes - 4, "...", 4);
    free(text);
    return buf;
}

td_status td_json_i64(const json_t *obj, const char *what, const char *key, int64_t min,
                      int64_t max, int64_t *ret, bool *ret_present, struct td_err *err)
{
    const json_t *v = find(obj, key, ret_present);
    if (!v) return TD_OK;
    bool ok = json_is_integer(v);
    int64_t value = ok ? json_integer_value(v) : 0;
    if (json_is_real(v)) { /* 32000.0 is a whole number; from 2^63 on int64_t cannot hold it */
        double d = json_real_value(v);
        ok = d >= -0x1p63 && d < 0x1p63 && d == floor(d);
        if (ok) value = (int64_t)d;
    }
    if (!ok || value < min || value > max) {
        char text[80];
        if (min == INT64_MIN && max == INT64_MAX) /* the caller has the limits, and its words */
            return td_fail(err, TD_ERR_INVALID, "%s: %s is %s, must be an integer", what, key,
                           td_json_show(v, text, sizeof text));
        return td_fail(err, TD_ERR_INVALID,
                       "%s: %s is %s, must be an integer in %" PRId64 "..%" PRId64, what, key,
                       td_json_show(v, text, sizeof text), min, max);
    }
    *ret = value;
    return TD_OK;
}

td_status td_json_need_i32(const json_t *obj, const char *what, const char *key, int32_t min,
                           int32_t max, int32_t *ret, struct td_err *err)
{
    int64_t v = 0;
    bool present;
    td_status s = td_json_i64(obj, what, key, min, max, &v, &present, err);
    if (s) return s;
    if (!present)
        return td_fail(err, TD_ERR_INVALID, "%s: %s is missing, must be an integer in %d..%d", what,
                       key, min, max);
    *ret = (int32_t)v;
    return TD_OK;
}

td_status td_json_f64(const json_t *obj, const char *what, const char *key, double min, double max,
                      double *ret, bool *ret_present, struct td_err *err)
{
    const json_t *v = find(obj, key, ret_present);
    if (!v) return TD_OK;
    double value = json_number_value(v);
    if (!json_is_number(v) || !(value >= min && value <= max)) {
        char text[80];
        return td_fail(err, TD_ERR_INVALID, "%s: %s is %s, must be a number in %g..%g", what, key,
                       td_json_show(v, text, sizeof text), min, max);
    }
    *ret = value;
    return TD_OK;
}

td_status td_json_bool(const json_t *obj, const char *what, const char *key, bool *ret,
                       bool *ret_present, struct td_err *err)
{
    const json_t *v = find(obj, key, ret_present);
    if (!v) return TD_OK;
    if (!json_is_boolean(v)) {
        char text[80];
        return td_fail(err, TD_ERR_INVALID, "%s: %s is %s, must be true or false", what, key,
                       td_json_show(v, text, sizeof text));
    }
    *ret = json_is_true(v);
    return TD_OK;
}

td_status td_json_str(const json_t *obj, const char *what, const char *key, const char **ret_text,
                      bool *ret_present, struct td_err *err)
{
    const json_t *v = find(obj, key, ret_present);
    if (!v) return TD_OK;
    if (!json_is_string(v) || strlen(json_string_value(v)) != json_string_length(v)) {
        char text[80];
        return td_fail(err, TD_ERR_INVALID, "%s: %s is %s, must be a string without NUL", what, key,
                       td_json_show(v, text, sizeof text));
    }
    *ret_text = json_string_value(v);
    return TD_OK;
}
