/* json.h - reads JSON with jansson; an error names the file, the field, the value and what was
 * expected. Cold paths only. */
#ifndef TD_BASE_JSON_H
#define TD_BASE_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

/* Parses at most max_bytes; jansson bounds the depth at 2048. `what` names the source in errors.
 * The caller calls json_decref() on the result. */
td_status td_json_load_file(const char *path, size_t max_bytes, json_t **ret_root,
                            struct td_err *err);
td_status td_json_load_text(const char *text, size_t n_bytes, const char *what, json_t **ret_root,
                            struct td_err *err);

/* Writes the value as JSON text into buf of at least 4 bytes, for a message: cut to fit, with "..."
 * as its end. A value that cannot be printed (NULL, for one) is "(unprintable)". Returns buf. */
const char *td_json_show(const json_t *v, char *buf, size_t buf_bytes);

/* Reads a field of an object. When it is absent or null, *ret keeps its value, *ret_present (may be
 * NULL) is false and the result is TD_OK. A wrong type, or a number outside [min, max], is
 * TD_ERR_INVALID with the message "WHAT: KEY is VALUE, must be ...". */
td_status td_json_i64(const json_t *obj, const char *what, const char *key, int64_t min,
                      int64_t max, int64_t *ret, bool *ret_present, struct td_err *err);
/* The same of a field that must be there, or it is TD_ERR_INVALID: "WHAT: KEY is missing, ...". */
td_status td_json_need_i32(const json_t *obj, const char *what, const char *key, int32_t min,
                           int32_t max, int32_t *ret, struct td_err *err);
td_status td_json_f64(const json_t *obj, const char *what, const char *key, double min, double max,
                      double *ret, bool *ret_present, struct td_err *err);
td_status td_json_bool(const json_t *obj, const char *what, const char *key, bool *ret,
                       bool *ret_present, struct td_err *err);
/* Reads a string, which is borrowed from obj. A string with an embedded NUL is refused. */
td_status td_json_str(const json_t *obj, const char *what, const char *key, const char **ret_text,
                      bool *ret_present, struct td_err *err);

#endif
