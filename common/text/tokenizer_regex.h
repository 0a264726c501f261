/* tokenizer_regex.h - patterns of tokenizer.json: literal strings, and Oniguruma regular
 * expressions run by PCRE2.
 *
 * A pattern is immutable and shared; a matcher is one thread's scratch. One match may take a number
 * of backtracking steps proportional to its text (TD_ERR_LIMIT beyond that), so no pattern can
 * block a thread. Internal to common/text/tokenizer*.c and its tests. */
#ifndef TD_TEXT_TOKENIZER_REGEX_H
#define TD_TEXT_TOKENIZER_REGEX_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/tokenizer_text.h"

/* GPT-2's words: what byte-level files mean that name no pattern. */
#define TD_TOK_REGEX_GPT2                                                                          \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* Either code (a regular expression) or literal is set. */
struct td_tok_pattern {
    pcre2_code *code;
    char *literal;
    size_t n_literal;
    bool parts_at_spaces; /* a known pattern: where one space stands between two ASCII letters, a
                             match ends before the space, and those from the space on are the same
                             whatever the text before it is. tokenizer_cache.c relies on that */
};

/* Zeroed = ready. Grows to the needs of the patterns that it is used with. */
struct td_tok_matcher {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

/* Appends to `out` the PCRE2 pattern with the same meaning. TD_ERR_UNSUPPORTED names a construct
 * that PCRE2 reads differently and that is not rewritten. */
td_status td_tok_regex_translate(const char *onig, size_t n, struct td_tok_buf *out,
                                 const char *what, struct td_err *err);

td_status td_tok_pattern_regex(const char *onig, size_t n, const char *what,
                               struct td_tok_pattern *ret_pattern, struct td_err *err);
td_status td_tok_pattern_literal(const char *text, size_t n, const char *what,
                                 struct td_tok_pattern *ret_pattern, struct td_err *err);
void td_tok_pattern_free(struct td_tok_pattern *p);
void td_tok_matcher_free(struct td_tok_matcher *m);

/* Finds all matches, left to right, not overlapping, with the text between them: ranges that cover
 * text[0..n) in order. They are appended to *ranges, which grows. `text` is valid UTF-8.
 * TD_ERR_LIMIT: too much backtracking, or the budget is used up. */
struct td_tok_range {
    uint32_t start, end;
    bool is_match;
};
struct td_tok_ranges {
    struct td_tok_range *v;
    size_t n, capacity;
    struct td_tok_budget *budget;
};
void td_tok_ranges_free(struct td_tok_ranges *ranges);
td_status td_tok_pattern_ranges(const struct td_tok_pattern *p, struct td_tok_matcher *m,
                                const char *text, size_t n, struct td_tok_ranges *ranges);
td_status td_tok_ranges_add(struct td_tok_ranges *ranges, size_t start, size_t end, bool is_match);

#endif
