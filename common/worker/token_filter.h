/* token_filter.h - the tokens that a request never gets: those that are not among its allowed ones,
 * and the last one of a bad word whose others have just come.
 *
 * What may come is a function of the sequence's output tokens alone, so another worker goes on with
 * the same ones after a hand-over or a fail-over (I1). Before min_tokens the stop tokens are left
 * out as well, so that an empty rest is seen here.
 *
 * Threads: create and forbid by whoever makes it, before the engine sees it; then the engine's. */
#ifndef TD_WORKER_TOKEN_FILTER_H
#define TD_WORKER_TOKEN_FILTER_H

#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

struct td_seq;
struct td_token_filter;

/* allowed[n_allowed] is copied; n_allowed 0 = all of the vocabulary. TD_ERR_INVALID: an id outside
 * of it. */
td_status td_token_filter_create(int32_t vocab, const int32_t *allowed, size_t n_allowed,
                                 struct td_token_filter **ret_filter, struct td_err *err);
/* One bad word, 1..TD_MAX_BAD_WORD_TOKENS tokens, copied; at most TD_MAX_BAD_WORDS. */
td_status td_token_filter_forbid(struct td_token_filter *f, const int32_t *word, size_t n,
                                 struct td_err *err);
void td_token_filter_free(struct td_token_filter *f); /* NULL is fine */
/* As td_seq_guide.allowed; ctx is the filter. TD_ERR_NOT_FOUND: no token is left. */
td_status td_token_filter_allowed(void *ctx, const struct td_seq *seq, const uint64_t **ret_words);

#endif
