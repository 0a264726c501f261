/* tokenizer_bpe.h - the vocabulary, and byte-pair encoding of one word. Internal to
 * common/text/tokenizer*.c and its tests.
 *
 * Source: Sennrich et al. 2016 (merge the adjacent pair of lowest rank, leftmost first, until none
 * is left); details as in Hugging Face's BPE. */
#ifndef TD_TEXT_TOKENIZER_BPE_H
#define TD_TEXT_TOKENIZER_BPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"
#include "common/text/tokenizer.h"
#include "common/text/tokenizer_text.h"

#define TD_VOCAB_MAX (1 << 21) /* every id is below this */

/* n < 0: no token has this id */
struct td_vocab_token {
    uint32_t start;
    int32_t n;
    bool special;
};
/* open addressing; a cell is id + 1, 0 = empty */
struct td_vocab_index {
    uint32_t *cells;
    size_t mask;
    size_t n;
};
/* Tokens by id, and two indices from text to id: `model` (BPE looks only there) and `added`.
 * Immutable once built. */
struct td_vocab {
    struct td_tok_buf arena; /* the texts, each with a NUL after it */
    struct td_vocab_token *tokens;
    int32_t n_ids; /* largest id + 1 */
    int32_t ids_capacity;
    struct td_vocab_index model, added;
    /* seed of the hash, random per vocabulary, so that no file can choose its collisions */
    uint64_t seed;
};

void td_vocab_init(struct td_vocab *v);
void td_vocab_free(struct td_vocab *v);
/* Gives the token `id` the text `text` and enters it in `index` (&v->model or &v->added).
 * TD_ERR_CORRUPT when the id has another text, or the text another id in this index. */
td_status td_vocab_add(struct td_vocab *v, struct td_vocab_index *index, const char *text, size_t n,
                       int32_t id, const char *what, struct td_err *err);
/* -1 when absent */
int32_t td_vocab_find(const struct td_vocab *v, const struct td_vocab_index *index,
                      const char *text, size_t n);
/* NULL when absent */
const char *td_vocab_text(const struct td_vocab *v, int32_t id, size_t *ret_n);

#define TD_BPE_JOINT_BITS (1 << 18)

/* key: left id << 32 | right id; new_id < 0: empty */
struct td_bpe_merge {
    uint64_t key;
    uint32_t rank;
    int32_t new_id;
};
struct td_bpe {
    struct td_vocab vocab;
    struct td_bpe_merge *merges; /* open addressing, at most half full */
    size_t merges_mask, n_merges;
    /* bit set of hashed pairs of initial symbols that some merge can join; false positives are
     * harmless */
    uint64_t joints[TD_BPE_JOINT_BITS / 64];
    /* ids of one-character tokens below U+0180, which includes all characters of byte-level text */
    int32_t cp_ids[0x180];
    int32_t byte_ids[256]; /* <0x00>..<0xFF>; -1 absent */
    int32_t unk_id;        /* -1: none */
    bool byte_fallback, fuse_unk, ignore_merges;
};

td_status td_bpe_reserve_merges(struct td_bpe *b, size_t n_merges);
/* A later merge of the same pair replaces the earlier one. */
void td_bpe_add_merge(struct td_bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t new_id);
const struct td_bpe_merge *td_bpe_find_merge(const struct td_bpe *b, int32_t left, int32_t right);
/* Fills cp_ids, byte_ids and joints; call it when vocabulary, merges and unk_id are set. */
void td_bpe_index(struct td_bpe *b);
void td_bpe_free(struct td_bpe *b);

/* One thread's working memory; zeroed = ready. n_steps counts heap operations and initial symbols,
 * the cost, for tests. */
struct td_bpe_symbol {
    int32_t id, prev, next;
};
struct td_bpe_candidate {
    uint64_t order;
    int32_t new_id;
}; /* order: rank << 32 | position */
struct td_bpe_scratch {
    struct td_bpe_symbol *symbols;
    size_t n_symbols, symbols_capacity;
    struct td_bpe_candidate *heap;
    size_t n_heap, heap_capacity;
    uint64_t n_steps;
    struct td_tok_budget *budget;
};
void td_bpe_scratch_free(struct td_bpe_scratch *s);

td_status td_token_list_add(struct td_token_list *list, int32_t id);
/* The same with n ids; TD_ERR_LIMIT: the list would pass max_tokens. */
td_status td_token_list_add_all(struct td_token_list *list, const int32_t *ids, size_t n,
                                size_t max_tokens);

/* Appends the tokens of one word of valid UTF-8. TD_ERR_LIMIT: the list would pass max_tokens,
 * or the scratch its budget. TD_ERR_NOMEM. */
td_status td_bpe_encode_word(const struct td_bpe *b, struct td_bpe_scratch *s, const char *word,
                             size_t n, size_t max_tokens, struct td_token_list *list);

#endif
