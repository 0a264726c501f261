/* tokenizer_check.h - what holds for every tokenizer that was accepted, and every text: the ids of
 * a valid text exist; decoding them works; streaming them, cut at any place, gives the same text in
 * valid pieces. Neither way holds more bytes than its budget: a realloc has its old and new block
 * for a moment, so up to twice that, and PCRE2's own (its JIT stack, 8 MiB). Part of the fuzzers of
 * tokenizer files. */
#ifndef TESTS_FUZZ_TOKENIZER_CHECK_H
#define TESTS_FUZZ_TOKENIZER_CHECK_H

#include <stdlib.h>
#include <string.h>

#include "common/text/tokenizer.h"
#include "common/text/tokenizer_text.h"
#include "tests/fuzz/heap.h"

#define TOKENS_MAX 8192

static inline void check_heap(size_t n_bytes, size_t peak)
{
    TD_ASSERT(peak <= 2 * td_tok_budget_of(n_bytes).max_heap_bytes + ((size_t)8 << 20));
}

static inline void check(const struct td_tokenizer *t, const char *text, size_t n)
{
    struct td_token_list list = {0};
    heap_begin();
    td_status encoded = td_tokenizer_encode(t, text, n, true, TOKENS_MAX, &list, NULL);
    check_heap(n, heap_end());
    if (encoded == TD_OK && list.n) {
        size_t n_ids_bytes = 0, n_one;
        for (size_t i = 0; i < list.n; i++)
            n_ids_bytes += td_tokenizer_token_text(t, list.ids[i], &n_one) ? n_one : 0;
        for (int skip_special = 0; skip_special < 2; skip_special++) {
            char *whole;
            size_t n_whole, n_streamed = 0, bad, n_piece;
            struct td_detokenizer *d;
            const char *piece;
            heap_begin();
            td_status s =
                td_tokenizer_decode(t, list.ids, list.n, skip_special, &whole, &n_whole, NULL);
            check_heap(n_ids_bytes, heap_end());
            if (s == TD_ERR_LIMIT)
                continue; /* the decoder makes too much text, or needs too
                             many steps */
            TD_ASSERT(s == TD_OK && td_utf8_valid(whole, n_whole, &bad));
            TD_ASSERT(td_detokenizer_create(t, NULL, 0, skip_special, &d) == TD_OK);
            for (size_t i = 0; i <= list.n; i++) {
                s = i < list.n ? td_detokenizer_push(d, list.ids[i], &piece, &n_piece)
                               : td_detokenizer_finish(d, &piece, &n_piece);
                TD_ASSERT(s == TD_OK && td_utf8_valid(piece, n_piece, &bad));
                TD_ASSERT(n_piece <= n_whole - n_streamed &&
                          !memcmp(whole + n_streamed, piece, n_piece));
                n_streamed += n_piece;
            }
            TD_ASSERT(n_streamed == n_whole);
            td_detokenizer_free(d);
            if (td_detokenizer_create(t, list.ids, list.n / 2, skip_special, &d) == TD_OK) {
                for (size_t i = list.n / 2; i < list.n; i++) {
                    TD_ASSERT(td_detokenizer_push(d, list.ids[i], &piece, &n_piece) == TD_OK &&
                              td_utf8_valid(piece, n_piece, &bad));
                }
                td_detokenizer_free(d);
            }
            free(whole);
        }
    }
    td_token_list_free(&list);
}

#endif
