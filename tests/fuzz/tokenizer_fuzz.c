/* tokenizer_fuzz.c - a tokenizer.json and a text, both from outside.
 *
 * Input: JSON, a NUL, then the text. With no model in the JSON a small byte-level one is put in,
 * so that most inputs reach the components. Invariants, for every file that is accepted: the ids
 * of a valid text exist; decoding them works; streaming them, cut at any place, gives the same
 * text in valid pieces. Neither way holds more bytes than its budget: a realloc has its old and
 * new block for a moment, so up to twice that, and PCRE2's own (its JIT stack, 8 MiB). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"
#include "common/text/tokenizer.h"
#include "common/text/tokenizer_text.h"
#include "tests/fuzz/heap.h"

#define TEXT_MAX 2048
#define TOKENS_MAX 8192

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

/* `json` with the small model in it; NULL when it is no object or has a model. Caller frees. */
static char *with_model(const char *text, size_t n)
{
    json_t *root;
    if (td_json_load_text(text, n, "fuzz", &root, NULL)) return NULL;
    char *out = NULL;
    if (json_is_object(root) && !json_object_get(root, "model")) {
        json_t *vocab = json_object();
        for (int byte = 0; byte < 256; byte++) {
            char utf8[5] = {0};
            td_utf8_put(td_byte_to_cp((uint8_t)byte), utf8);
            json_object_set_new(vocab, utf8, json_integer(byte));
        }
        json_object_set_new(vocab, "aa", json_integer(256));
        json_object_set_new(vocab, "\xE2\x96\x81", json_integer(257));
        json_object_set_new(vocab, "<0xE2>", json_integer(258));
        json_object_set_new(root, "model",
                            json_pack("{s:o, s:[s], s:b, s:s}", "vocab", vocab, "merges", "a a",
                                      "byte_fallback", 1, "unk_token", "a"));
        out = json_dumps(root, 0);
    }
    json_decref(root);
    return out;
}

static void check_heap(size_t n_bytes, size_t peak)
{
    TD_ASSERT(peak <= 2 * td_tok_budget_of(n_bytes).max_heap_bytes + ((size_t)8 << 20));
}

static void check(const struct td_tokenizer *t, const char *text, size_t n)
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

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    const uint8_t *nul = n_bytes ? memchr(bytes, 0, n_bytes) : NULL;
    size_t n_json = nul ? (size_t)(nul - bytes) : n_bytes, n_text = nul ? n_bytes - n_json - 1 : 0;
    const char *text = nul ? (const char *)nul + 1 : "";
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    char *whole = with_model((const char *)bytes, n_json);
    td_status s = td_tokenizer_parse(whole ? whole : (const char *)bytes,
                                     whole ? strlen(whole) : n_json, &t, &err);
    TD_ASSERT(s == TD_OK || (t == NULL && err.msg[0] && err.code == s));
    if (!s) check(t, text, n_text < TEXT_MAX ? n_text : TEXT_MAX);
    td_tokenizer_free(t);
    free(whole);
    return 0;
}
