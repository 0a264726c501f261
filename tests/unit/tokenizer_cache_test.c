/* tokenizer_cache_test.c - a cache of tokens gives what the tokenizer gives, for tokenizers that
 * are cut in either way, and encodes what is new alone. */
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/random.h"
#include "common/text/tokenizer_cache.h"

#define MANY ((size_t)1 << 30)
#define LLAMA3                                                                                     \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"                       \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define QWEN2                                                                                      \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"                            \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static uint64_t state = 1;

static uint32_t below(uint32_t n) { return td_random_index(&state, n); }

/* ---- tokenizers: models/pocket's, with other ends -------------------------------------------- */

static json_t *split(const char *regex)
{
    return json_pack("{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b, s:b}]}", "type",
                     "Sequence", "pretokenizers", "type", "Split", "pattern", "Regex", regex,
                     "behavior", "Isolated", "invert", 0, "type", "ByteLevel", "add_prefix_space",
                     0, "trim_offsets", 1, "use_regex", 0);
}

static json_t *added(int id, const char *text, bool lstrip, bool rstrip, bool word, bool normalized)
{
    return json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", id, "content", text,
                     "single_word", word, "lstrip", lstrip, "rstrip", rstrip, "normalized",
                     normalized, "special", 1);
}

enum kind { GPT2, PREFIX_SPACE, LIKE_LLAMA3, LIKE_QWEN2, NFC, METASPACE, NORMALIZED, N_KINDS };

static struct td_tokenizer *make(enum kind kind)
{
    json_error_t e;
    json_t *root = json_load_file("models/pocket/tokenizer.json", 0, &e);
    assert_non_null(root);
    json_t *tokens = json_object_get(root, "added_tokens");
    json_array_append_new(tokens, added(9001, "<|turn|>", false, false, false, false));
    json_array_append_new(tokens, added(9002, "<|turn|>x", false, false, false, false));
    json_array_append_new(tokens, added(9003, "<pad>", true, true, false, false));
    json_array_append_new(tokens, added(9004, "word", false, false, true, false));
    if (kind == PREFIX_SPACE)
        json_object_set_new(json_object_get(root, "pre_tokenizer"), "add_prefix_space",
                            json_true());
    if (kind == LIKE_LLAMA3) json_object_set_new(root, "pre_tokenizer", split(LLAMA3));
    if (kind == LIKE_QWEN2 || kind == NFC) json_object_set_new(root, "pre_tokenizer", split(QWEN2));
    if (kind == NFC) json_object_set_new(root, "normalizer", json_pack("{s:s}", "type", "NFC"));
    if (kind == METASPACE)
        json_object_set_new(root, "pre_tokenizer",
                            json_pack("{s:s, s:s, s:s, s:b}", "type", "Metaspace", "replacement",
                                      "\u2581", "prepend_scheme", "first", "split", 1));
    if (kind == NORMALIZED) {
        json_array_append_new(tokens, added(9005, "tree of", false, false, false, true));
        json_object_set_new(root, "normalizer", json_pack("{s:s}", "type", "NFC"));
    }
    char *text = json_dumps(root, 0);
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    if (td_tokenizer_parse(text, strlen(text), &t, &err)) fail_msg("kind %d: %s", kind, err.msg);
    free(text);
    json_decref(root);
    return t;
}

/* ---- texts ----------------------------------------------------------------------------------- */

static const char *const bits[] = {
    "the",
    " tree",
    " of",
    " a",
    "b c",
    " don't",
    "'ll",
    "\n",
    "\n\n  ",
    "  ",
    " 12345",
    ".",
    " ...\n",
    "\u00e9",
    "e\u0301",
    " \u4e16\u754c",
    "<|turn|>",
    "<|turn|>x",
    " <pad> ",
    " word ",
    "word",
    "\t",
    "\U0001f600",
    " Once upon a time",
    " tree of tree of tree of",
    " I",
    "A",
    " (x)",
    "\u2581",
    " \u0301x",
    "'s",
    "\r\n",
    "<|tur",
};

/* Appends random bits until n bytes; half of the times no added tokens, so that long parts are
 * cut. */
static size_t grow(char *text, size_t from, size_t n)
{
    bool plain = below(2);
    while (from + 40 < n) {
        const char *bit = bits[below(sizeof bits / sizeof *bits)];
        if (plain && (strchr(bit, '<') || strstr(bit, "word"))) continue;
        if (!below(3)) bit = " fox jumps over lazy dogs";
        memcpy(text + from, bit, strlen(bit));
        from += strlen(bit);
    }
    return from;
}

static void check_same(struct td_token_cache *c, const struct td_tokenizer *t, uint64_t salt,
                       const char *text, size_t n, bool special, size_t max)
{
    struct td_token_list got = {0}, want = {0};
    struct td_err got_err = {0}, want_err = {0};
    td_status g = td_token_cache_encode(c, salt, text, n, special, max, &got, &got_err),
              w = td_tokenizer_encode(t, text, n, special, max, &want, &want_err);
    assert_int_equal(g, w);
    assert_string_equal(got_err.msg, want_err.msg);
    assert_int_equal(got.n, want.n);
    if (got.n && memcmp(got.ids, want.ids, got.n * sizeof *got.ids))
        fail_msg("other ids of %zu bytes: %.*s", n, (int)n, text);
    td_token_list_free(&got);
    td_token_list_free(&want);
}

/* Random texts that have beginnings in common, through a cache that holds all and one that forgets.
 * Returns how many bytes of them were found. */
static uint64_t walk(const struct td_tokenizer *t, int n_texts)
{
    enum { LONGEST = 6000, SMALL = 5000 };
    static char text[LONGEST];
    struct td_token_cache *c[2];
    struct td_token_cache_stats st;
    assert_int_equal(td_token_cache_create(t, 4 << 20, &c[0]), TD_OK);
    assert_int_equal(td_token_cache_create(t, SMALL, &c[1]), TD_OK);
    size_t n = 0;
    for (int i = 0; i < n_texts; i++) {
        /* a new text, another turn of the last one, or a part of it and another end */
        uint32_t how = below(4);
        n = how == 0 || n + 100 > LONGEST ? 0 : how == 1 ? below((uint32_t)n + 1) : n;
        while (n && (text[n] & 0xc0) == 0x80) n--;
        size_t end = n + below(below(8) ? 400 : LONGEST - (uint32_t)n);
        n = grow(text, n, end < LONGEST ? end : LONGEST);
        text[n] = 0;
        size_t max = below(10) ? MANY : below(200);
        for (int k = 0; k < 2; k++) check_same(c[k], t, below(2), text, n, below(2), max);
        td_token_cache_stats(c[1], &st);
        assert_true(st.used_bytes <= SMALL);
    }
    check_same(c[0], t, 0, "a\xff", 2, true, MANY);
    check_same(c[0], t, 0, "", 0, true, MANY);
    td_token_cache_stats(c[0], &st);
    td_token_cache_free(c[0]);
    td_token_cache_free(c[1]);
    return st.hit_bytes;
}

static void test_the_same_ids(void **unused)
{
    (void)unused;
    for (int kind = 0; kind < N_KINDS; kind++) {
        struct td_tokenizer *t = make((enum kind)kind);
        assert_true(walk(t, 400) > 1000);
        td_tokenizer_free(t);
    }
}

/* Those of TANDEM_DATA: byte-level, and SentencePiece's. */
static void test_other_peoples_tokenizers(void **unused)
{
    (void)unused;
    static const char *const names[] = {"tokenizers-hf/phi-2", "tokenizers-hf/phi-3-mini",
                                        "tinystories-656k"};
    const char *data = getenv("TANDEM_DATA");
    char path[4096];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        struct td_tokenizer *t = NULL;
        struct td_err err = {0};
        snprintf(path, sizeof path, "%s/%s", data ? data : "../shared/data", names[i]);
        if (td_tokenizer_load(path, &t, &err)) {
            print_message("no data: %s\n", err.msg);
            skip();
        }
        walk(t, 100);
        td_tokenizer_free(t);
    }
}

static uint64_t encoded_bytes(struct td_token_cache *c, const struct td_tokenizer *t, uint64_t salt,
                              const char *text)
{
    struct td_token_cache_stats before, after;
    td_token_cache_stats(c, &before);
    check_same(c, t, salt, text, strlen(text), true, MANY);
    td_token_cache_stats(c, &after);
    return after.encoded_bytes - before.encoded_bytes;
}

static void test_what_is_new_alone(void **unused)
{
    (void)unused;
    static char text[9000];
    for (int kind = 0; kind < N_KINDS; kind++) {
        struct td_tokenizer *t = make((enum kind)kind);
        struct td_token_cache *c;
        assert_int_equal(td_token_cache_create(t, 1 << 20, &c), TD_OK);
        bool cuts = kind != METASPACE && kind != NORMALIZED;
        /* turns of a chat, between added tokens: any tokenizer */
        text[0] = 0;
        for (int turn = 0; turn < 10; turn++) {
            size_t n = strlen(text);
            int m =
                snprintf(text + n, sizeof text - n, "<|turn|>turn number %d is about trees", turn);
            assert_int_equal(encoded_bytes(c, t, 7, text), m - 8);
            assert_int_equal(encoded_bytes(c, t, 7, text), 0);
        }
        /* other people's texts are not looked at */
        assert_int_equal(encoded_bytes(c, t, 8, text), strlen(text) - 80);
        /* one long text that grows */
        text[0] = 0;
        for (int i = 0; i < 300; i++) {
            size_t n = strlen(text);
            snprintf(text + n, sizeof text - n, " line %d has words", i);
        }
        assert_int_equal(encoded_bytes(c, t, 7, text), strlen(text));
        size_t n = strlen(text);
        snprintf(text + n, sizeof text - n, " and a few more");
        uint64_t again = encoded_bytes(c, t, 7, text);
        if (cuts)
            assert_true(again < 600);
        else
            assert_int_equal(again, strlen(text));
        td_token_cache_free(c);
        td_tokenizer_free(t);
    }
}

int main(void)
{
    const char *seed = getenv("SEED");
    state = seed ? strtoull(seed, NULL, 10) * 2 + 1 : 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_same_ids),
        cmocka_unit_test(test_other_peoples_tokenizers),
        cmocka_unit_test(test_what_is_new_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
