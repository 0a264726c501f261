/* tokenizer_sentencepiece.h - a tokenizer from SentencePiece's tokenizer.model, or from tiktoken's
 * list of ranks, and what tokenizer_config.json says around it. Internal to
 * common/text/tokenizer*.c and its tests. */
#ifndef TD_TEXT_TOKENIZER_SENTENCEPIECE_H
#define TD_TEXT_TOKENIZER_SENTENCEPIECE_H

#include <jansson.h>

#include "common/text/tokenizer.h"
#include "common/text/tokenizer_bpe.h"

/* config: the object of tokenizer_config.json; added: that of added_tokens.json, which older
 * directories have; NULL: none. */
td_status td_tokenizer_from_sentencepiece(const void *model, size_t n_bytes, const json_t *config,
                                          const json_t *added, struct td_tokenizer **ret_tokenizer,
                                          struct td_err *err);
/* tokenizer_ranks.c: from tiktoken's list of ranks; whether a file is one. file names it in errors
 * and in td_tokenizer_file: static storage. */
td_status td_tokenizer_from_ranks(const char *text, size_t n_bytes, const json_t *config,
                                  const char *file, struct td_tokenizer **ret_tokenizer,
                                  struct td_err *err);
bool td_tok_is_ranks(const char *text, size_t n_bytes);
/* One of the two from the files of a directory; file: "tokenizer.model", or the name of a list of
 * ranks (static storage). */
td_status td_tokenizer_load_sentencepiece(const char *dir, const char *file,
                                          struct td_tokenizer **ret_tokenizer, struct td_err *err);

/* Calls `add` for each entry of tokenizer_config.json's added_tokens_decoder, until it fails. */
struct td_tok_added;
typedef td_status (*td_tok_added_fn)(void *ctx, const char *text, const struct td_tok_added *added);
td_status td_tok_read_decoder(const json_t *decoder, td_tok_added_fn add, void *ctx,
                              struct td_err *err);

/* tokenizer_scores.c: a piece that two others can become, and how early. */
struct td_scored_piece {
    int32_t id;
    float score; /* a number */
};
/* Adds to b a merge for every way in which one of the pieces is two tokens of the model's index:
 * pieces of higher scores first, equal scores as equal ranks. Sorts pieces. TD_ERR_NOMEM. */
td_status td_bpe_merge_by_score(struct td_bpe *b, struct td_scored_piece *pieces, size_t n);
/* In how many ways a text is two tokens of the model's index. */
size_t td_bpe_n_cuts(const struct td_vocab *v, const char *text, size_t n);

/* The steps from tokens to text: marks to spaces, byte pieces to bytes; strips_front: without the
 * space that the text begins with. */
td_status td_tok_sp_decoder(struct td_tokenizer *t, bool strips_front, struct td_err *err);

#endif
