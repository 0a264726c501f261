/* log_json.h - one logfmt line as one JSON object.
 *
 * Each key=value becomes a member with the same key, in the same order; each value is a JSON
 * string, numbers too, so that a key has one type whatever it tells. A value in quotes is
 * unescaped as td_log_quote escapes it. A word without = belongs to the value before it, and at
 * the line's begin is the member "more"; bytes that are not UTF-8 become U+FFFD. [any thread; no
 * allocation] */
#ifndef TD_BASE_LOG_JSON_H
#define TD_BASE_LOG_JSON_H

#include <stddef.h>

/* line: n_bytes of text without its line's end. Writes an object of at most out_bytes into out,
 * without a NUL, and returns its size. What does not fit is cut, and the object's last member is
 * then "log_cut":"1". out_bytes >= 64. */
size_t td_log_to_json(const char *line, size_t n_bytes, char *out, size_t out_bytes);

#endif
