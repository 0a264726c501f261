/* tokenizer_internal.h - the form of a tokenizer.json in memory. Internal to
 * common/text/tokenizer*.c.
 *
 * Sequences are flattened at load: each kind of component is an array of operations, applied in
 * order. */
#ifndef TD_TEXT_TOKENIZER_INTERNAL_H
#define TD_TEXT_TOKENIZER_INTERNAL_H

#include <jansson.h>

#include "common/text/tokenizer.h"
#include "common/text/tokenizer_bpe.h"
#include "common/text/tokenizer_regex.h"
#include "common/text/tokenizer_text.h"

#define TD_TOK_OPS_MAX 64 /* operations of one kind, and special tokens around a text */

struct td_tok_added {
    int32_t id;
    bool special, single_word, lstrip, rstrip, normalized;
    bool named; /* SentencePiece: tokenizer_config.json has it as bos_token, eos_token, unk_token,
                 * another of these keys, or among additional_special_tokens */
    /* id + 1 of the token that must stand directly before it in the text; 0: any text may */
    int32_t behind;
};

/* -1: none; added: index into td_tokenizer.added */
struct td_tok_trie_node {
    int32_t child, sibling, added;
    uint8_t byte;
};
/* The patterns of one matching round as a trie over bytes: leftmost match, longest first. */
struct td_tok_trie {
    struct td_tok_trie_node *nodes; /* node 0 is the root */
    size_t n, capacity;
    int32_t first[256]; /* the root's children by byte; 0: none */
};

enum td_tok_normalizer {
    TD_NORM_PREPEND,
    TD_NORM_REPLACE,
    TD_NORM_UNICODE,
    TD_NORM_STRIP,
    TD_NORM_LOWERCASE,
    TD_NORM_BYTE_LEVEL,
    TD_NORM_SENTENCEPIECE
};
struct td_sp_rules;
struct td_tok_norm_op {
    enum td_tok_normalizer kind;
    struct td_tok_pattern pattern; /* REPLACE */
    char *content;                 /* PREPEND, REPLACE */
    size_t n_content;
    bool compose, compat;      /* UNICODE: NFC, NFD, NFKC, NFKD */
    bool left, right;          /* STRIP */
    struct td_sp_rules *rules; /* SENTENCEPIECE */
};

/* RUNS: between added tokens every 400,000th character begins a piece, and in a run of characters
 * that all are white space, or all are none, so does every 25,000th: before other pre-tokenizers
 * see the text, Kimi-K2's code cuts it so. */
enum td_tok_pre { TD_PRE_BYTE_LEVEL, TD_PRE_SPLIT, TD_PRE_METASPACE, TD_PRE_RUNS };
#define TD_TOK_SLICE_CHARS 400000
#define TD_TOK_RUN_CHARS 25000
enum td_tok_behavior {
    TD_SPLIT_REMOVED,
    TD_SPLIT_ISOLATED,
    TD_SPLIT_PREVIOUS,
    TD_SPLIT_NEXT,
    TD_SPLIT_CONTIGUOUS
};
enum td_tok_prepend { TD_PREPEND_ALWAYS, TD_PREPEND_FIRST, TD_PREPEND_NEVER };
struct td_tok_pre_op {
    enum td_tok_pre kind;
    bool add_prefix_space; /* BYTE_LEVEL */
    bool split;            /* BYTE_LEVEL (use_regex), METASPACE: `pattern` is used */
    struct td_tok_pattern pattern;
    enum td_tok_behavior behavior; /* SPLIT; BYTE_LEVEL: isolated; METASPACE: merged with next */
    bool invert;                   /* SPLIT */
    enum td_tok_prepend prepend;   /* METASPACE */
    char replacement[4];
    int n_replacement;
};

enum td_tok_decoder {
    TD_DEC_BYTE_LEVEL,
    TD_DEC_BYTE_FALLBACK,
    TD_DEC_FUSE,
    TD_DEC_REPLACE,
    TD_DEC_STRIP,
    TD_DEC_METASPACE,
    TD_DEC_JOIN, /* no decoder in the file: tokens joined by spaces */
};
struct td_tok_dec_op {
    enum td_tok_decoder kind;
    struct td_tok_pattern pattern; /* REPLACE */
    char *content;                 /* REPLACE */
    size_t n_content;
    uint32_t cp;          /* STRIP content, METASPACE replacement */
    uint32_t start, stop; /* STRIP */
    bool drop_first;      /* METASPACE: prepend_scheme is not never */
};

/* The normalizer of a SentencePiece model (tokenizer_sentencepiece.c). */
struct td_sp_rules {
    /* Darts' double array: beginnings of texts that are replaced, each with an offset into texts,
     * where NULs end the replacements. Nothing of it is trusted. */
    uint32_t *units;
    size_t n_units;
    char *texts;
    size_t n_texts;           /* with a NUL at its end */
    struct td_tok_trie kept;  /* texts that are not replaced */
    enum td_tok_prepend mark; /* a space before the text */
    bool remove_extra, escape;
};

struct td_unigram;
struct td_tokenizer {
    const char *file; /* for messages; static storage */
    struct td_bpe bpe;
    struct td_unigram *unigram; /* encodes in place of bpe, which has its vocabulary; NULL: bpe */
    struct td_tok_added *added;
    size_t n_added;
    struct td_tok_trie raw_trie, normalized_trie;
    struct td_tok_norm_op norm[TD_TOK_OPS_MAX];
    struct td_tok_pre_op pre[TD_TOK_OPS_MAX];
    struct td_tok_dec_op dec[TD_TOK_OPS_MAX];
    size_t n_norm, n_pre, n_dec;
    int32_t before[TD_TOK_OPS_MAX], after[TD_TOK_OPS_MAX]; /* the post-processor's special tokens */
    size_t n_before, n_after;
    /* SentencePiece, marked at the text's beginning alone: the mark's id. A text that begins with
     * the mark and then a named token begins with that token; else -1. */
    int32_t lone_mark;
};

/* tokenizer_parts.c: the components of tokenizer.json. `json` may be NULL (absent or null). */
td_status td_tok_parse_normalizer(struct td_tokenizer *t, const json_t *json, struct td_err *err);
td_status td_tok_parse_pre_tokenizer(struct td_tokenizer *t, const json_t *json,
                                     struct td_err *err);
td_status td_tok_parse_post_processor(struct td_tokenizer *t, const json_t *json,
                                      struct td_err *err);
td_status td_tok_parse_decoder(struct td_tokenizer *t, const json_t *json, struct td_err *err);
/* Refuses keys of obj that are not in `known`, a space-separated list. */
td_status td_tok_only_keys(const json_t *obj, const char *what, const char *known,
                           struct td_err *err);

/* tokenizer.c: a tokenizer without anything in it; NULL: no memory. */
struct td_tokenizer *td_tok_create(const char *file);
/* tokenizer.c: enters the added tokens in the tries, when the normalizer is known. */
td_status td_tok_build_tries(struct td_tokenizer *t, struct td_err *err);

/* tokenizer_normalize.c: out = the operations applied to text[0..n); tmp is scratch. first: the
 * text begins the input. Buffers are cleared first; allocations count in out's budget.
 * *ret_front_lost: the first remaining character does not come from the first of the text. *ret_at:
 * the operation that failed. */
td_status td_tok_normalize(const struct td_tokenizer *t, struct td_tok_matcher *m, const char *text,
                           size_t n, bool first, struct td_tok_buf *out, struct td_tok_buf *tmp,
                           bool *ret_front_lost, size_t *ret_at);

/* tokenizer_sp_normalize.c: reads the model's replacements; its own step, appended to out. */
td_status td_sp_rules_set(struct td_sp_rules *r, const uint8_t *charsmap, size_t n_bytes,
                          struct td_err *err);
td_status td_sp_normalize(const struct td_sp_rules *r, const char *text, size_t n, bool first,
                          struct td_tok_buf *out);
void td_sp_rules_free(struct td_sp_rules *r); /* and r itself; NULL is fine */

/* as in tokenizer.json; static storage */
const char *td_tok_normalizer_name(const struct td_tokenizer *t, size_t at);

/* tokenizer_added.c: added tokens in text. */
td_status td_tok_trie_add(struct td_tok_trie *trie, const char *text, size_t n, int32_t added);
void td_tok_trie_free(struct td_tok_trie *trie);
/* The node that a byte leads to from a node (0: the root); -1: none. */
int32_t td_tok_trie_child(const struct td_tok_trie *trie, int32_t node, uint8_t byte);
/* The longest token that text begins with; -1: none. */
int32_t td_tok_trie_longest(const struct td_tok_trie *trie, const char *text, size_t n,
                            size_t *ret_n);
/* Adds an added token to those of a text, which begin at `start` of the list. */
td_status td_tok_add_added(const struct td_tokenizer *t, int32_t id, size_t start,
                           size_t max_tokens, struct td_token_list *list);

/* Cuts buf[start..start+n) of `out` into pieces at the trie's tokens. first: as in
 * td_tok_text_add_piece, for the piece at `start`. */
td_status td_tok_split_added(const struct td_tokenizer *t, const struct td_tok_trie *trie,
                             struct td_tok_text *out, size_t start, size_t n, bool first);

/* tokenizer_encode.c: appends the ids of a text between added tokens. first: it begins the input.
 * On failure the list may have grown, and err is not always filled. */
td_status td_tok_encode_piece(const struct td_tokenizer *t, const char *text, size_t n, bool first,
                              size_t max_tokens, struct td_token_list *list, struct td_err *err);

/* tokenizer_split.c: one pre-tokenizer; `out` is cleared first. */
td_status td_tok_pre_tokenize(const struct td_tok_pre_op *op, struct td_tok_matcher *m,
                              const struct td_tok_text *in, struct td_tok_text *out);

#endif
