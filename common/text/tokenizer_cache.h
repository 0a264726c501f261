/* tokenizer_cache.h - encodes texts, and remembers the ids of their parts: a text that begins like
 * an earlier one (a chat's next turn, a shared system prompt, a shared document) is encoded for
 * what is new alone.
 *
 * Why it is exact: parts are cut where the tokenizer itself cuts, whatever stands on the other
 * side, so the ids of a part depend on its text alone (tokenizer_cache.c has the cuts). The memory
 * is keyed by the part's whole text, and a hit is compared byte by byte.
 *
 * Bounds: max_bytes of parts and their ids; what was not used for longest goes first. One thread at
 * a time. */
#ifndef TD_TEXT_TOKENIZER_CACHE_H
#define TD_TEXT_TOKENIZER_CACHE_H

#include "common/text/tokenizer.h"

struct td_token_cache;

/* The tokenizer is borrowed and must outlive the cache. TD_ERR_NOMEM. */
td_status td_token_cache_create(const struct td_tokenizer *t, size_t max_bytes,
                                struct td_token_cache **ret_cache);
void td_token_cache_free(struct td_token_cache *c); /* NULL is fine */
/* The same ids and errors as td_tokenizer_encode; but its bounds hold for each part here, so a text
 * that it would refuse as a whole may be encoded. Only texts of one salt share parts, so that the
 * time of an encoding does not tell a tenant what another one has sent. */
td_status td_token_cache_encode(struct td_token_cache *c, uint64_t salt, const char *text,
                                size_t n_bytes, bool add_special, size_t max_tokens,
                                struct td_token_list *list, struct td_err *err);

struct td_token_cache_stats {
    uint64_t hit_bytes, encoded_bytes; /* of text, since the beginning */
    size_t n_parts, used_bytes;        /* held now */
};
void td_token_cache_stats(const struct td_token_cache *c, struct td_token_cache_stats *ret_stats);

#endif
