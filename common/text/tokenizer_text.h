/* tokenizer_text.h - the data that all parts of the tokenizer work on: growing buffers, text cut
 * into pieces, UTF-8, byte-level characters. Internal to common/text/tokenizer*.c and its tests. */
#ifndef TD_TEXT_TOKENIZER_TEXT_H
#define TD_TEXT_TOKENIZER_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

/* the longest text at any stage, because offsets are 32 bits */
#define TD_TOK_TEXT_MAX_BYTES ((size_t)1 << 30)

/* The memory that one call may hold at once, shared by everything that grows in it. Why: a
 * tokenizer.json is not trusted, and a chain of replacements multiplies: nine that make four
 * letters of one turn 900 bytes into 236 MB, at every stage. The factors leave room for what real
 * files do: NFKC makes 33 bytes of the 3 of U+FDFA, and the characters for bytes double that; a
 * word of BPE costs 60 bytes for each of its own, a cut text 28. In pointers below NULL means no
 * budget, only TD_TOK_TEXT_MAX_BYTES: for reading a file. One thread. */
#define TD_TOK_TEXT_BASE_BYTES ((size_t)64 << 10)
#define TD_TOK_TEXT_TIMES 32
#define TD_TOK_HEAP_BASE_BYTES ((size_t)8 << 20)
#define TD_TOK_HEAP_TIMES 320
struct td_tok_budget {
    /* the bounds of a text at any stage, and of everything together */
    size_t max_text_bytes, max_heap_bytes;
    size_t heap_bytes, peak_bytes;
    bool text_over, heap_over; /* which of the two a TD_ERR_LIMIT reports */
};
/* The budget of a call whose input has n_bytes. */
struct td_tok_budget td_tok_budget_of(size_t n_bytes);
/* realloc within the budget. When it returns NULL, *ret_status is TD_ERR_LIMIT or TD_ERR_NOMEM, and
 * p is unchanged. */
void *td_tok_grow(struct td_tok_budget *budget, void *p, size_t old_bytes, size_t new_bytes,
                  td_status *ret_status);
void td_tok_release(struct td_tok_budget *budget, void *p, size_t bytes);

/* A growing array of bytes; zeroed = empty and without a budget. The owner frees it while the
 * budget exists. */
struct td_tok_buf {
    char *bytes;
    size_t n, capacity;
    struct td_tok_budget *budget;
};
/* TD_ERR_NOMEM, or TD_ERR_LIMIT past the budget or TD_TOK_TEXT_MAX_BYTES. `bytes` may not point
 * into b. */
td_status td_tok_buf_append(struct td_tok_buf *b, const void *bytes, size_t n);
td_status td_tok_buf_append_cp(struct td_tok_buf *b, uint32_t cp);
void td_tok_buf_free(struct td_tok_buf *b);

/* A range of buf: a known token (id >= 0), or text still to be cut. `first`: its original text
 * begins the input (Metaspace "first"). */
struct td_tok_piece {
    uint32_t start, n;
    int32_t id;
    bool first;
};
/* the pieces use the buffer's budget */
struct td_tok_text {
    struct td_tok_buf buf;
    struct td_tok_piece *pieces;
    size_t n, capacity;
};
/* Adds a piece. Empty pieces that are not tokens are dropped, as Hugging Face does after each
 * step. */
td_status td_tok_text_add_piece(struct td_tok_text *t, size_t start, size_t n, int32_t id,
                                bool first);
void td_tok_text_clear(struct td_tok_text *t);
void td_tok_text_free(struct td_tok_text *t);

/* Reads one character of s[0..n), n >= 1. Result > 0: its length, and *ret_cp is set. 0: a valid
 * beginning that needs more bytes. < 0: minus the length of the longest beginning that could have
 * become a character (at least 1), which a decoder replaces by one U+FFFD (Unicode 15, 3.9, U+FFFD
 * Substitution of Maximal Subparts). */
int td_utf8_next(const char *s, size_t n, uint32_t *ret_cp);
/* The start of the character before s[at], for valid text and at > 0. */
size_t td_utf8_before(const char *s, size_t at, uint32_t *ret_cp);
int td_utf8_put(uint32_t cp, char out[4]);
/* True when valid; else *ret_at is the offset of the first bad byte. */
bool td_utf8_valid(const char *s, size_t n, size_t *ret_at);

/* GPT-2's printable characters for bytes: byte -> character (< 0x144), character -> byte or -1. */
uint32_t td_byte_to_cp(uint8_t byte);
int td_cp_to_byte(uint32_t cp);

/* The Unicode properties of Rust's char::is_whitespace and of the regex \w. */
bool td_cp_is_space(uint32_t cp);
bool td_cp_is_word(uint32_t cp);

#endif
