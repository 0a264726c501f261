/* json.h - jansson with errors that name the file, the field, the value and what was expected.
 * Cold paths only. */
#ifndef TD_BASE_JSON_H
#define TD_BASE_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/base/status.h"

/* Parses at most max_bytes; depth is bounded by jansson (2048). `what` names the source in
 * errors. Caller json_decref()s. */
td_status td_json_load_file(const char *path, size_t max_bytes, json_t **ret_root,
                            struct td_err *err);
td_status td_json_load_text(const char *text, size_t n_bytes, const char *what, json_t **ret_root,
                            struct td_err *err);

/* Field of an object. When absent or null: *ret keeps its value and the answer is TD_OK,
 * *ret_present (may be NULL) is false. A wrong type or a number out of [min, max] is
 * TD_ERR_INVALID with "WHAT: KEY is VALUE, must be ...". */
td_status td_json_i64(const json_t *obj, const char *what, const char *key, int64_t min,
                      int64_t max, int64_t *ret, bool *ret_present, struct td_err *err);
td_status td_json_f64(const json_t *obj, const char *what, const char *key, double min, double max,
                      double *ret, bool *ret_present, struct td_err *err);
td_status td_json_bool(const json_t *obj, const char *what, const char *key, bool *ret,
                       bool *ret_present, struct td_err *err);
/* *ret_text is borrowed from obj. Strings with an embedded NUL are refused. */
td_status td_json_str(const json_t *obj, const char *what, const char *key, const char **ret_text,
                      bool *ret_present, struct td_err *err);

#endif
