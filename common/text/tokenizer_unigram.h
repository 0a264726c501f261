/* tokenizer_unigram.h - encodes by the most probable cut of a text into pieces (Kudo 2018), each
 * of which has the logarithm of its probability as score. Internal to common/text/tokenizer*.c. */
#ifndef TD_TEXT_TOKENIZER_UNIGRAM_H
#define TD_TEXT_TOKENIZER_UNIGRAM_H

#include "common/text/sentencepiece_file.h"
#include "common/text/tokenizer_internal.h"

struct td_unigram;

/* The pieces of a model; NULL: no memory. */
struct td_unigram *td_unigram_create(const struct td_sp_file *file);
void td_unigram_free(struct td_unigram *u); /* NULL is fine */

/* Appends the tokens of n bytes of valid UTF-8. A character that no piece has is b's unknown token,
 * of several in a row one, or bytes where b falls back to them. TD_ERR_LIMIT: the list would pass
 * max_tokens, or the memory its budget. TD_ERR_NOMEM. */
td_status td_unigram_encode(const struct td_unigram *u, const struct td_bpe *b,
                            struct td_tok_budget *budget, const char *text, size_t n,
                            size_t max_tokens, struct td_token_list *list);

#endif
