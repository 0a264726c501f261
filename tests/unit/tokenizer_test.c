/* tokenizer_test.c - the tokenizer against published vectors, against Hugging Face's own answers
 * for every component, against a plain BPE, and against bad files.
 *
 * Vectors come from TANDEM_DATA (skipped without it); tests/golden/tokenizer_components.json is
 * committed and always run. A vocabulary that exists only in other formats (GPT-2's two files) is
 * made into tokenizer.json here, by the rules that Hugging Face's converters use. */
#include <inttypes.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>

#include "common/base/json.h"
#include "common/base/mem.h"
#include "common/base/random.h"
#include "common/text/tokenizer.h"
#include "common/text/tokenizer_bpe.h"
#include "common/text/tokenizer_regex.h"
#include "common/text/tokenizer_sentencepiece.h"

#define NO_LIMIT ((size_t)1 << 40)
#define SEPARATOR "\n__ggml_vocab_test__\n"

/* ---- data ---- */

static const char *data_path(const char *name)
{
    static char path[4096];
    const char *data = getenv("TANDEM_DATA");
    snprintf(path, sizeof path, "%s/%s", data ? data : "../shared/data", name);
    return path;
}

static void need_data(void)
{
    FILE *f = fopen(data_path("README.md"), "r");
    if (!f) {
        print_message("no data: set TANDEM_DATA\n");
        skip();
    }
    fclose(f);
}

static char *read_data(const char *name, size_t *ret_n)
{
    char *text;
    struct td_err err = {0};
    if (td_file_read(data_path(name), (size_t)256 << 20, &text, ret_n, &err))
        fail_msg("%s", err.msg);
    return text;
}

static json_t *read_json(const char *path)
{
    json_t *root;
    struct td_err err = {0};
    if (td_json_load_file(path, (size_t)256 << 20, &root, &err)) fail_msg("%s", err.msg);
    return root;
}

static struct td_tokenizer *parse(const char *text, size_t n)
{
    struct td_tokenizer *t;
    struct td_err err = {0};
    if (td_tokenizer_parse(text, n, &t, &err)) fail_msg("%s", err.msg);
    return t;
}

static struct td_tokenizer *parse_json(const json_t *json)
{
    char *text = json_dumps(json, JSON_COMPACT);
    assert_non_null(text);
    struct td_tokenizer *t = parse(text, strlen(text));
    free(text);
    return t;
}

static struct td_tokenizer *load(const char *dir)
{
    struct td_tokenizer *t;
    struct td_err err = {0};
    if (td_tokenizer_load(data_path(dir), &t, &err)) fail_msg("%s", err.msg);
    return t;
}

static struct td_tokenizer *load_llama3(void)
{
    char command[4200];
    snprintf(command, sizeof command, "gzip -dc '%s'",
             data_path("tokenizers-derived/llama3/tokenizer.json.gz"));
    FILE *f = popen(command, "r");
    assert_non_null(f);
    size_t n = 0, capacity = (size_t)32 << 20, got;
    char *text = malloc(capacity);
    assert_non_null(text);
    while ((got = fread(text + n, 1, capacity - n, f)) > 0) n += got;
    assert_int_equal(pclose(f), 0);
    struct td_tokenizer *t = parse(text, n);
    free(text);
    return t;
}

/* vocab.json and merges.txt as a tokenizer.json. */
static struct td_tokenizer *load_gpt2(void)
{
    json_t *vocab = read_json(data_path("tokenizers-hf/gpt2/vocab.json")), *merges = json_array();
    size_t n;
    char *text = read_data("tokenizers-hf/gpt2/merges.txt", &n), *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        json_array_append_new(merges, json_string(line));
    free(text);
    json_t *root =
        json_pack("{s:{s:s, s:o, s:o}, s:{s:s, s:b}, s:{s:s}, s:[{s:i, s:s, s:b}]}", "model",
                  "type", "BPE", "vocab", vocab, "merges", merges, "pre_tokenizer", "type",
                  "ByteLevel", "add_prefix_space", 0, "decoder", "type", "ByteLevel",
                  "added_tokens", "id", 50256, "content", "<|endoftext|>", "special", 1);
    assert_non_null(root);
    struct td_tokenizer *t = parse_json(root);
    json_decref(root);
    return t;
}

/* ---- checks ---- */

static struct td_token_list encode(const struct td_tokenizer *t, const char *text, size_t n,
                                   bool add_special)
{
    struct td_token_list list = {0};
    struct td_err err = {0};
    if (td_tokenizer_encode(t, text, n, add_special, NO_LIMIT, &list, &err))
        fail_msg("%s", err.msg);
    return list;
}

static char *decode(const struct td_tokenizer *t, const int32_t *ids, size_t n, bool skip_special,
                    size_t *ret_n)
{
    char *text;
    struct td_err err = {0};
    if (td_tokenizer_decode(t, ids, n, skip_special, &text, ret_n, &err)) fail_msg("%s", err.msg);
    assert_int_equal(text[*ret_n], 0);
    return text;
}

static void print_ids(const char *name, const int32_t *ids, size_t n)
{
    print_error("%s:", name);
    for (size_t i = 0; i < n && i < 60; i++) print_error(" %d", ids[i]);
    print_error("\n");
}

static void check_ids(const struct td_token_list *got, const int32_t *want, size_t n,
                      const char *what)
{
    if (got->n == n && (!n || !memcmp(got->ids, want, n * sizeof *want))) return;
    print_ids("got ", got->ids, got->n);
    print_ids("want", want, n);
    fail_msg("%s: other ids", what);
}

static struct td_token_list ids_of(const json_t *array)
{
    struct td_token_list list = {0};
    for (size_t i = 0; i < json_array_size(array); i++)
        assert_int_equal(
            td_token_list_add(&list, (int32_t)json_integer_value(json_array_get(array, i))), TD_OK);
    return list;
}

/* The stream of ids[n_prefix..n) after the prefix; every piece must be valid UTF-8. */
static char *stream(const struct td_tokenizer *t, const int32_t *ids, size_t n_prefix, size_t n,
                    bool skip_special, size_t *ret_n)
{
    struct td_detokenizer *d;
    struct td_tok_buf all = {0};
    assert_int_equal(td_detokenizer_create(t, ids, n_prefix, skip_special, &d), TD_OK);
    for (size_t i = n_prefix; i <= n; i++) {
        const char *piece;
        size_t n_piece, bad;
        assert_int_equal(i < n ? td_detokenizer_push(d, ids[i], &piece, &n_piece)
                               : td_detokenizer_finish(d, &piece, &n_piece),
                         TD_OK);
        if (!td_utf8_valid(piece, n_piece, &bad))
            fail_msg("piece %zu is not valid UTF-8 at byte %zu", i, bad);
        assert_int_equal(td_tok_buf_append(&all, piece, n_piece), TD_OK);
    }
    td_detokenizer_free(d);
    assert_int_equal(td_tok_buf_append(&all, "", 1), TD_OK);
    *ret_n = all.n - 1;
    return all.bytes;
}

/* The stream, with the prefix cut at `n_prefix`, gives what the whole decode does. When
 * decode(prefix) is no beginning of decode(all) (the prefix ends within a character), the stream
 * must still end as decode(all) does. */
static void check_stream(const struct td_tokenizer *t, const int32_t *ids, size_t n_prefix,
                         size_t n, bool skip_special)
{
    size_t n_whole, n_before, n_streamed;
    char *whole = decode(t, ids, n, skip_special, &n_whole),
         *before = decode(t, ids, n_prefix, skip_special, &n_before);
    char *streamed = stream(t, ids, n_prefix, n, skip_special, &n_streamed);
    bool begins = n_before <= n_whole && !memcmp(before, whole, n_before);
    if (begins
            ? n_streamed != n_whole - n_before || memcmp(streamed, whole + n_before, n_streamed)
            : n_streamed > n_whole || memcmp(streamed, whole + n_whole - n_streamed, n_streamed)) {
        print_ids("ids", ids, n);
        fail_msg("prefix %zu of %zu: whole \"%s\", before \"%s\", streamed \"%s\"", n_prefix, n,
                 whole, before, streamed);
    }
    free(whole);
    free(before);
    free(streamed);
}

static uint64_t random_state;

static uint32_t random_below(uint32_t n) { return (uint32_t)(td_keyed_step(&random_state) % n); }

/* ---- published vectors ---- */

/* NAME.inp: texts; NAME.out: a line of ids each. `first` is put before each expectation (-1:
 * nothing). */
static void check_llama_cpp(const struct td_tokenizer *t, const char *name, bool add_special,
                            int32_t first, size_t n_want)
{
    char file[200];
    size_t n_in, n_out, n_cases = 0;
    snprintf(file, sizeof file, "llama-cpp-vocabs/%s.inp", name);
    char *in = read_data(file, &n_in);
    snprintf(file, sizeof file, "llama-cpp-vocabs/%s.out", name);
    char *out = read_data(file, &n_out), *line = out;
    for (char *text = in; text;) {
        char *separator = strstr(text, SEPARATOR), *newline = strchr(line, '\n');
        size_t n = separator ? (size_t)(separator - text) : strlen(text);
        struct td_token_list want = {0};
        if (first >= 0) td_token_list_add(&want, first);
        if (newline) *newline = '\0';
        char *save = NULL;
        for (char *number = strtok_r(line, " ", &save); number;
             number = strtok_r(NULL, " ", &save)) {
            td_token_list_add(&want, (int32_t)strtol(number, NULL, 10));
        }
        struct td_token_list got = encode(t, text, n, add_special);
        char what[80];
        snprintf(what, sizeof what, "%s[%zu]", name, n_cases);
        check_ids(&got, want.ids, want.n, what);
        check_stream(t, got.ids, 0, got.n, false);
        check_stream(t, got.ids, got.n / 2, got.n, true);
        td_token_list_free(&got);
        td_token_list_free(&want);
        n_cases++;
        text = separator ? separator + strlen(SEPARATOR) : NULL;
        line = newline ? newline + 1 : line + strlen(line);
    }
    assert_int_equal(n_cases, n_want);
    free(in);
    free(out);
}

/* What transformers' clean_up_tokenization_spaces does: two of the published decodings were made
 * with it. */
static void clean_up(char *text)
{
    static const char *const pairs[][2] = {
        {" .", "."},     {" ?", "?"},   {" !", "!"},   {" ,", ","},     {" ' ", "'"},
        {" n't", "n't"}, {" 'm", "'m"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        size_t n_from = strlen(pairs[i][0]), n_to = strlen(pairs[i][1]);
        for (char *at = text; (at = strstr(at, pairs[i][0])); at += n_to) {
            memcpy(at, pairs[i][1], n_to);
            memmove(at + n_to, at + n_from, strlen(at + n_from) + 1);
        }
    }
}

/* 18 texts with the ids and both decodings that Hugging Face published; add_bos: the vectors
 * begin with a BOS that the file does not add. */
static void check_hf(const struct td_tokenizer *t, const char *name, int32_t add_bos, bool cleaned)
{
    json_t *root = read_json(data_path("tokenizer-vectors-hf/tokenizer_tests.json")),
           *cases = json_object_get(root, name);
    assert_int_equal(json_array_size(cases), 18);
    for (size_t i = 0; i < 18; i++) {
        json_t *c = json_array_get(cases, i), *input = json_object_get(c, "input");
        struct td_token_list want =
            ids_of(json_object_get(json_object_get(c, "encoded"), "input_ids"));
        struct td_token_list got = {0}, text_ids = encode(t, json_string_value(input),
                                                          json_string_length(input), true);
        if (add_bos >= 0) td_token_list_add(&got, add_bos);
        for (size_t k = 0; k < text_ids.n; k++) td_token_list_add(&got, text_ids.ids[k]);
        check_ids(&got, want.ids, want.n, json_string_value(input));
        for (int skip_special = 0; skip_special < 2; skip_special++) {
            size_t n;
            char *text = decode(t, want.ids, want.n, skip_special, &n);
            if (cleaned) clean_up(text);
            assert_string_equal(
                text, json_string_value(json_object_get(c, skip_special ? "decoded_without_special"
                                                                        : "decoded_with_special")));
            free(text);
            for (size_t k = 0; k <= want.n; k++) check_stream(t, want.ids, k, want.n, skip_special);
        }
        td_token_list_free(&want);
        td_token_list_free(&got);
        td_token_list_free(&text_ids);
    }
    json_decref(root);
}

static void check_french(const struct td_tokenizer *t, const char *name, int32_t add_bos)
{
    char file[100];
    snprintf(file, sizeof file, "tokenizer-vectors-hf/%s.json", name);
    json_t *root = read_json(data_path(file)), *text = json_object_get(root, "text");
    struct td_token_list want = ids_of(json_object_get(root, "token_ids"));
    struct td_token_list got = encode(t, json_string_value(text), json_string_length(text), true);
    size_t skip_bos = add_bos >= 0, n;
    if (skip_bos) assert_int_equal(want.ids[0], add_bos);
    check_ids(&got, want.ids + skip_bos, want.n - skip_bos, name);
    char *decoded = decode(t, want.ids, want.n, false, &n);
    assert_string_equal(decoded, json_string_value(json_object_get(root, "decoded_text")));
    check_stream(t, want.ids, 7, want.n, false);
    free(decoded);
    td_token_list_free(&want);
    td_token_list_free(&got);
    json_decref(root);
}

static void test_llama2_vectors(void **state)
{
    (void)state;
    need_data();
    struct td_tokenizer *t = load("tokenizers-hf/phi-3-mini");
    assert_int_equal(td_tokenizer_vocab(t), 32011);
    check_llama_cpp(t, "ggml-vocab-llama-spm.gguf", false, -1, 47);
    check_llama_cpp(t, "ggml-vocab-phi-3.gguf", true, -1, 47);
    check_hf(t, "coreml-projects/Llama-2-7b-chat-coreml", 1, false);
    check_french(t, "llama_encoded", 1);
    td_tokenizer_free(t);
}

static void test_gpt2_vectors(void **state)
{
    (void)state;
    need_data();
    struct td_tokenizer *t = load_gpt2();
    check_llama_cpp(t, "ggml-vocab-gpt-2.gguf", true, -1, 47);
    check_hf(t, "distilgpt2", -1, true);
    check_french(t, "gpt2_encoded_tokens", -1);
    td_tokenizer_free(t);
}

static void test_llama3_vectors(void **state)
{
    (void)state;
    need_data();
    struct td_tokenizer *t = load_llama3();
    check_llama_cpp(t, "ggml-vocab-llama-bpe.gguf", false, -1, 47);
    check_llama_cpp(t, "ggml-vocab-llama-bpe.gguf", true, 128000, 47);
    check_hf(t, "pcuenq/Llama-3.2-1B-Instruct-tokenizer", -1, true);
    check_french(t, "llama_3.2_encoded", -1);
    struct td_token_list ids =
        encode(t, "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>", 54, true);
    const int32_t want[] = {128000, 128006, 882, 128007, 271, 6151, 128009};
    check_ids(&ids, want, 7, "special tokens in text");
    td_token_list_free(&ids);
    assert_true(td_tokenizer_is_special(t, 128009));
    assert_false(td_tokenizer_is_special(t, 882));
    assert_int_equal(td_tokenizer_token_id(t, "<|eot_id|>"), 128009);
    assert_string_equal(td_tokenizer_token_text(t, 882, NULL), "user");
    td_tokenizer_free(t);
}

/* phi-2 adds 39 tokens that are runs of white space: the longest must win, wherever it starts. */
static void test_phi2_spaces(void **state)
{
    (void)state;
    need_data();
    struct td_tokenizer *t = load("tokenizers-hf/phi-2");
    char spaces[80];
    memset(spaces, ' ', sizeof spaces);
    for (size_t n = 2; n <= 80; n++) {
        struct td_token_list got = encode(t, spaces, n, true);
        size_t n_got = 0;
        for (size_t i = 0; i < got.n; i++)
            n_got += got.ids[i] >= 50257 ? (size_t)(50288 - got.ids[i]) : 1;
        assert_int_equal(n_got, n);
        assert_int_equal(got.n, (n + 30) / 31);
        td_token_list_free(&got);
    }
    td_tokenizer_free(t);
}

static void test_tinystories(void **state)
{
    (void)state;
    need_data();
    struct td_tokenizer *t = load("tinystories-656k");
    json_t *root = read_json(data_path("tinystories-656k/reference_greedy.json")),
           *cases = json_object_get(root, "cases");
    assert_true(json_array_size(cases) > 0);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *c = json_array_get(cases, i), *prompt = json_object_get(c, "prompt");
        struct td_token_list want = ids_of(json_object_get(c, "prompt_ids")),
                             greedy = ids_of(json_object_get(c, "greedy_ids"));
        struct td_token_list got =
            encode(t, json_string_value(prompt), json_string_length(prompt), true);
        check_ids(&got, want.ids, want.n, json_string_value(prompt));
        for (size_t k = 0; k < greedy.n; k++) td_token_list_add(&want, greedy.ids[k]);
        size_t n;
        char *text = stream(t, want.ids, got.n, want.n, true, &n);
        const char *published = json_string_value(json_object_get(c, "text"));
        if (published)
            assert_memory_equal(text, published, n < strlen(published) ? n : strlen(published));
        assert_true(n > 10);
        free(text);
        td_token_list_free(&want);
        td_token_list_free(&greedy);
        td_token_list_free(&got);
    }
    json_decref(root);
    td_tokenizer_free(t);
}

/* ---- Mistral: SentencePiece models ---- */

static void replace_all(char *text, const char *from, const char *to) /* to is not longer */
{
    size_t n_from = strlen(from), n_to = strlen(to);
    char *out = text;
    for (const char *in = text; *in;) {
        if (!strncmp(in, from, n_from)) {
            memcpy(out, to, n_to);
            out += n_to;
            in += n_from;
        } else {
            *out++ = *in++;
        }
    }
    *out = '\0';
}

static void test_mistral_vectors(void **state)
{
    (void)state;
    need_data();
    static const char *const models[] = {"tokenizer.model.v1",
                                         "mistral_instruct_tokenizer_240216.model.v2",
                                         "mistral_instruct_tokenizer_240323.model.v3"};
    static const char *const samples[] = {"no_tools",
                                          "get_weather_full",
                                          "get_weather_no_history",
                                          "get_weather_no_system_prompt",
                                          "parallel_calls",
                                          "several_calls"};
    for (size_t v = 0; v < 3; v++) {
        char file[200];
        size_t n_file, n_seen = 0;
        snprintf(file, sizeof file, "tokenizer-models/mistral/%s", models[v]);
        char *model = read_data(file, &n_file);
        struct td_tokenizer *t = NULL;
        struct td_err err = {0};
        if (td_tokenizer_from_sentencepiece(model, n_file, NULL, NULL, &t, &err))
            fail_msg("%s", err.msg);
        free(model);
        for (size_t k = 0; k < (v ? 6 : 1); k++, n_seen++) { /* tools came with v2 */
            snprintf(file, sizeof file, "mistral-chat-vectors/%s/text_v%zu.txt", samples[k], v + 1);
            size_t n_text;
            char *text = read_data(file, &n_text);
            snprintf(file, sizeof file, "mistral-chat-vectors/%s/tokens_v%zu.json", samples[k],
                     v + 1);
            json_t *root = read_json(data_path(file));
            struct td_token_list want = ids_of(json_object_get(root, "tokens"));
            /* The text shows pieces: "\u2581" for the space that each stretch after a control
               token begins with, too. */
            replace_all(text, "\u2581", " ");
            replace_all(text, "<0x0A>", "\n");
            for (int32_t id = 0; id < td_tokenizer_vocab(t); id++) {
                char spaced[64];
                const char *name = td_tokenizer_token_text(t, id, NULL);
                if (!td_tokenizer_is_special(t, id) || strstr(name, "<SPECIAL")) continue;
                snprintf(spaced, sizeof spaced, "%.60s ", name);
                replace_all(text, spaced, name);
            }
            struct td_token_list got = encode(t, text, strlen(text), false);
            check_ids(&got, want.ids, want.n, file);
            td_token_list_free(&got);
            td_token_list_free(&want);
            json_decref(root);
            free(text);
        }
        print_message("mistral v%zu: %zu of %d samples\n", v + 1, n_seen, v ? 6 : 1);
        td_tokenizer_free(t);
    }
}

/* ---- Hugging Face's answers for every component (committed) ---- */

static void test_components(void **state)
{
    (void)state;
    json_t *root = read_json("tests/golden/tokenizer_components.json"),
           *cases = json_object_get(root, "cases");
    size_t n_texts = 0;
    assert_true(json_array_size(cases) >= 100);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        json_t *c = json_array_get(cases, i), *file = json_deep_copy(json_object_get(c, "file"));
        json_t *model = json_copy(json_object_get(json_object_get(root, "models"),
                                                  json_string_value(json_object_get(c, "model"))));
        json_object_update(model, json_object_get(c, "switches"));
        json_object_set_new(file, "model", model);
        struct td_tokenizer *t = parse_json(file);
        json_t *texts = json_object_get(c, "texts");
        for (size_t k = 0; k < json_array_size(texts); k++, n_texts++) {
            json_t *row = json_array_get(texts, k), *text = json_array_get(row, 0);
            struct td_token_list want = ids_of(json_array_get(row, 1)),
                                 again = ids_of(json_array_get(row, 2));
            struct td_token_list got =
                encode(t, json_string_value(text), json_string_length(text), true);
            char what[64];
            snprintf(what, sizeof what, "cases[%zu].texts[%zu]", i, k);
            check_ids(&got, want.ids, want.n, what);
            for (size_t special = 0; special < 2; special++) {
                const json_t *decoded = json_array_get(row, 3 + special);
                size_t n;
                char *back = decode(t, again.ids, again.n, special, &n);
                if (n != json_string_length(decoded) ||
                    memcmp(back, json_string_value(decoded), n)) {
                    fail_msg("%s: decoded \"%s\", want \"%s\"", what, back,
                             json_string_value(decoded));
                }
                free(back);
                for (size_t prefix = 0; prefix <= again.n; prefix++)
                    check_stream(t, again.ids, prefix, again.n, special);
            }
            td_token_list_free(&want);
            td_token_list_free(&again);
            td_token_list_free(&got);
        }
        td_tokenizer_free(t);
        json_decref(file);
    }
    print_message("%zu cases, %zu texts, %s\n", json_array_size(cases), n_texts,
                  json_string_value(json_object_get(root, "made_by")));
    json_decref(root);
}

/* ---- a Qwen-style file made here: NFC, Split by regex, ByteLevel ---- */

#define QWEN_REGEX                                                                                 \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| "                          \
    "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

/* All 256 byte characters, ids 0..255, and the merges given as "left right" lines, whose results
 * take the ids that follow. */
static json_t *byte_level_model(const char *const *merge_lines, size_t n)
{
    json_t *vocab = json_object(), *merges = json_array();
    for (int byte = 0; byte < 256; byte++) {
        char utf8[5] = {0};
        td_utf8_put(td_byte_to_cp((uint8_t)byte), utf8);
        json_object_set_new(vocab, utf8, json_integer(byte));
    }
    for (size_t i = 0; i < n; i++) {
        char joined[200];
        const char *space = strchr(merge_lines[i], ' ');
        snprintf(joined, sizeof joined, "%.*s%s", (int)(space - merge_lines[i]), merge_lines[i],
                 space + 1);
        if (!json_object_get(vocab, joined))
            json_object_set_new(vocab, joined, json_integer((json_int_t)json_object_size(vocab)));
        json_array_append_new(merges, json_string(merge_lines[i]));
    }
    return json_pack("{s:s, s:o, s:o}", "type", "BPE", "vocab", vocab, "merges", merges);
}

static struct td_tokenizer *qwen(void)
{
    static const char *const merges[] = {"h e", "l l",   "he ll", "hell o",   "Ġ w",
                                         "o r", "Ġw or", "l d",   "Ġwor ld",  "Ã ©",
                                         "Ċ Ċ", "a a",   "aa aa", "aaaa aaaa"};
    json_t *root =
        json_pack("{s:o, s:{s:s}, s:{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b}]}, s:{s:s}, "
                  "s:[{s:i, s:s, s:b}, {s:i, s:s, s:b}]}",
                  "model", byte_level_model(merges, sizeof merges / sizeof *merges), "normalizer",
                  "type", "NFC", "pre_tokenizer", "type", "Sequence", "pretokenizers", "type",
                  "Split", "pattern", "Regex", QWEN_REGEX, "behavior", "Isolated", "invert", 0,
                  "type", "ByteLevel", "add_prefix_space", 0, "use_regex", 0, "decoder", "type",
                  "ByteLevel", "added_tokens", "id", 300, "content", "<|im_start|>", "special", 1,
                  "id", 301, "content", "<|im_end|>", "special", 1);
    assert_non_null(root);
    struct td_tokenizer *t = parse_json(root);
    json_decref(root);
    return t;
}

static void test_qwen_style(void **state)
{
    (void)state;
    struct td_tokenizer *t = qwen();
    const char *text = "<|im_start|>hello world\n\n42 cafe\u0301<|im_end|>";
    struct td_token_list got = encode(t, text, strlen(text), true);
    /* e + U+0301 is one character after NFC */
    const int32_t want[] = {300, 259, 264, 266, '4', '2', ' ', 'c', 'a', 'f', 265, 301};
    check_ids(&got, want, sizeof want / sizeof *want, text);
    size_t n;
    char *back = decode(t, got.ids, got.n, true, &n);
    assert_string_equal(back, "hello world\n\n42 caf\u00e9");
    free(back);
    for (size_t i = 0; i <= got.n; i++) check_stream(t, got.ids, i, got.n, false);
    td_token_list_free(&got);
    assert_int_equal(td_tokenizer_vocab(t), 302);
    assert_null(td_tokenizer_token_text(t, 299, NULL));
    assert_null(td_tokenizer_token_text(t, -1, NULL));
    assert_null(td_tokenizer_token_text(t, 302, NULL));
    assert_int_equal(td_tokenizer_token_id(t, "no such"), -1);
    td_tokenizer_free(t);
}

/* Any scalar value, ASCII and white space often. */
static size_t random_text(char *out, size_t max_chars)
{
    static const char *const often[] = {" ",  "  ",     "\n",     "\t",     "a",
                                        "aa", "he",     "hello",  " world", "'s",
                                        "12", "\u2581", "\u00a0", "\u3000", "."};
    size_t n = 0, n_chars = random_below((uint32_t)max_chars + 1);
    for (size_t i = 0; i < n_chars; i++) {
        uint32_t kind = random_below(4), cp = kind == 0   ? random_below(0x110000)
                                              : kind == 1 ? random_below(0x800)
                                                          : 0;
        if (kind > 1) {
            const char *s = often[random_below(sizeof often / sizeof *often)];
            memcpy(out + n, s, strlen(s));
            n += strlen(s);
        } else if (cp < 0xD800 || cp > 0xDFFF) {
            n += (size_t)td_utf8_put(cp, out + n);
        }
    }
    return n;
}

/* The digest is of the texts by id: other merges alone do not change it, two ids that swap do. */
static void test_digest(void **state)
{
    (void)state;
    static const char *const merges[] = {"h e", "l l"};
    uint64_t digests[3];
    for (int i = 0; i < 3; i++) {
        json_t *model = byte_level_model(merges, 2), *vocab = json_object_get(model, "vocab");
        if (i == 1) json_object_set_new(model, "merges", json_array());
        if (i == 2) {
            json_int_t he = json_integer_value(json_object_get(vocab, "he"));
            json_object_set(vocab, "he", json_object_get(vocab, "ll"));
            json_object_set_new(vocab, "ll", json_integer(he));
        }
        json_t *root = json_pack("{s:o}", "model", model);
        struct td_tokenizer *t = parse_json(root);
        json_decref(root);
        digests[i] = td_tokenizer_digest(t);
        td_tokenizer_free(t);
    }
    assert_true(digests[0] == digests[1]);
    assert_true(digests[0] != digests[2]);
}

static void test_byte_level_round_trip(void **state)
{
    (void)state;
    static const char *const merges[] = {"h e",   "l l", "he ll", "Ġ w", "Ġ Ġ",
                                         "ĠĠ ĠĠ", "a a", "Ã ©",   "ð Ł", "ðŁ ĺ"};
    json_t *root = json_pack("{s:o, s:{s:s, s:b}, s:{s:s}}", "model", byte_level_model(merges, 10),
                             "pre_tokenizer", "type", "ByteLevel", "add_prefix_space", 0, "decoder",
                             "type", "ByteLevel");
    struct td_tokenizer *t = parse_json(root);
    json_decref(root);
    random_state = 1;
    for (int round = 0; round < 3000; round++) {
        char text[64 * 8];
        size_t n = random_text(text, 60), n_back;
        struct td_token_list ids = encode(t, text, n, false);
        char *back = decode(t, ids.ids, ids.n, false, &n_back);
        if (n != n_back || memcmp(text, back, n))
            fail_msg("round %d: \"%.*s\" came back as \"%s\"", round, (int)n, text, back);
        free(back);
        check_stream(t, ids.ids, random_below((uint32_t)ids.n + 1), ids.n, false);
        td_token_list_free(&ids);
    }
    td_tokenizer_free(t);
}

/* Random ids, so that characters are cut anywhere: what is shown is always valid, and in the end
 * what the whole decode says. */
static void test_stream_of_random_ids(void **state)
{
    (void)state;
    struct td_tokenizer *t[2] = {qwen(), NULL};
    json_t *vocab = json_object();
    for (int i = 0; i < 256; i++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)i);
        json_object_set_new(vocab, name, json_integer(i));
    }
    const char *const more[] = {"\u2581", "\u2581the", "a", "\u00e9", "\u2581\u2581", "<unk>"};
    for (size_t i = 0; i < 6; i++)
        json_object_set_new(vocab, more[i], json_integer((json_int_t)(256 + i)));
    json_t *root = json_pack("{s:{s:o, s:[], s:b}, s:{s:s, s:[{s:s, s:{s:s}, s:s}, {s:s}, {s:s}, "
                             "{s:s, s:s, s:i, s:i}]}, s:[{s:i, s:s, s:b}]}",
                             "model", "vocab", vocab, "merges", "byte_fallback", 1, "decoder",
                             "type", "Sequence", "decoders", "type", "Replace", "pattern", "String",
                             "\u2581", "content", " ", "type", "ByteFallback", "type", "Fuse",
                             "type", "Strip", "content", " ", "start", 1, "stop", 0, "added_tokens",
                             "id", 261, "content", "<unk>", "special", 1);
    assert_non_null(root);
    t[1] = parse_json(root);
    json_decref(root);
    random_state = 2;
    for (int round = 0; round < 4000; round++) {
        const struct td_tokenizer *which = t[round & 1];
        int32_t ids[12];
        size_t n = random_below(13);
        for (size_t i = 0; i < n; i++) {
            do ids[i] = (int32_t)random_below((uint32_t)td_tokenizer_vocab(which));
            while (!td_tokenizer_token_text(which, ids[i], NULL));
            if (random_below(3))
                ids[i] =
                    round & 1
                        ? (int32_t[]){0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80, 10, 256}[random_below(8)]
                        : ids[i];
        }
        check_stream(which, ids, random_below((uint32_t)n + 1), n, random_below(2));
    }
    td_tokenizer_free(t[0]);
    td_tokenizer_free(t[1]);
}

/* Decoders in any order, with the prefix cut anywhere: what its end would give is found by a second
 * pipeline only where a stage holds something back. */
static void test_stream_of_random_decoders(void **state)
{
    (void)state;
    static const char *const kinds[] = {
        "{\"type\":\"ByteLevel\"}",
        "{\"type\":\"ByteFallback\"}",
        "{\"type\":\"Fuse\"}",
        "{\"type\":\"Metaspace\",\"replacement\":\"a\",\"prepend_scheme\":\"always\"}",
        "{\"type\":\"Replace\",\"pattern\":{\"String\":\"ab\"},\"content\":\"b\"}",
        "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"b*\"},\"content\":\"-\"}",
        "{\"type\":\"Strip\",\"content\":\"a\",\"start\":1,\"stop\":2}"};
    static const char vocab[] = "{\"a\":0,\"b\":1,\"ab\":2,\"ba\":3,\"aa\":4,\"<0xC3>\":5,"
                                "\"<0xA9>\":6,\"<0x61>\":7,\"\u00c3\":8,\"\u00a9\":9,\"-\":10}";
    random_state = 4;
    for (int round = 0; round < 600; round++) {
        char file[2048];
        size_t n_kinds = random_below(5), at = 0;
        at += (size_t)snprintf(file, sizeof file,
                               "{\"model\":{\"type\":\"BPE\",\"vocab\":%s,\"merges\":[]}", vocab);
        for (size_t i = 0; i < n_kinds; i++)
            at += (size_t)snprintf(file + at, sizeof file - at, "%s%s",
                                   i ? "," : ",\"decoder\":{\"type\":\"Sequence\",\"decoders\":[",
                                   kinds[random_below(sizeof kinds / sizeof *kinds)]);
        at += (size_t)snprintf(file + at, sizeof file - at, n_kinds ? "]}}" : "}");
        struct td_tokenizer *t = parse(file, at);
        for (int i = 0; i < 4; i++) {
            int32_t ids[8];
            size_t n = random_below(9);
            for (size_t k = 0; k < n; k++) ids[k] = (int32_t)random_below(11);
            for (size_t k = 0; k <= n; k++) check_stream(t, ids, k, n, false);
        }
        td_tokenizer_free(t);
    }
}

/* The moment matters too: text must not wait for the next token when nothing can change it, and
 * must wait when something can. */
static void test_stream_is_prompt(void **state)
{
    (void)state;
    struct td_tokenizer *t = qwen();
    struct td_detokenizer *d;
    const char *text;
    size_t n;
    assert_int_equal(td_detokenizer_create(t, NULL, 0, true, &d), TD_OK);
    const struct {
        int32_t id;
        const char *shown;
    } steps[] = {
        {259, "hello"},
        {0xF0, ""},
        {0x9F, ""},
        {0x98, ""},
        {0x80, "\U0001f600"},
        {264, " world"},
        {300, ""},
        {265, "\u00e9"},
        {0xE2, ""},
        {'a', "\uFFFD"
              "a"},
        {0xC3, ""},
    };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        assert_int_equal(td_detokenizer_push(d, steps[i].id, &text, &n), TD_OK);
        if (n != strlen(steps[i].shown) || memcmp(text, steps[i].shown, n))
            fail_msg("step %zu: \"%.*s\", want \"%s\"", i, (int)n, text, steps[i].shown);
    }
    /* an id of the model's that the tokenizer lacks */
    assert_int_equal(td_detokenizer_push(d, 299, &text, &n), TD_OK);
    assert_int_equal(n, 0);
    assert_int_equal(td_detokenizer_finish(d, &text, &n), TD_OK);
    assert_int_equal(n, 3);
    assert_memory_equal(text, "\uFFFD", 3);
    td_detokenizer_free(d);
    td_detokenizer_free(NULL);
    td_tokenizer_free(t);
}

/* ---- BPE against the plain algorithm ---- */

/* Rescans all pairs for the lowest rank, leftmost, each time. */
static size_t plain_bpe(const struct td_bpe *b, int32_t *ids, size_t n)
{
    for (;;) {
        const struct td_bpe_merge *best = NULL;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            const struct td_bpe_merge *m = td_bpe_find_merge(b, ids[i], ids[i + 1]);
            if (m && (!best || m->rank < best->rank)) best = m, at = i;
        }
        if (!best) return n;
        ids[at] = best->new_id;
        memmove(ids + at + 1, ids + at + 2, (n - at - 2) * sizeof *ids);
        n--;
    }
}

static int32_t add_token(struct td_bpe *b, const char *text, size_t n)
{
    struct td_err err = {0};
    int32_t id = td_vocab_find(&b->vocab, &b->vocab.model, text, n);
    if (id >= 0) return id;
    id = b->vocab.n_ids;
    assert_int_equal(td_vocab_add(&b->vocab, &b->vocab.model, text, n, id, "test", &err), TD_OK);
    return id;
}

/* A vocabulary of three letters with `n_merges` random merges in random order of rank: most
 * orders occur that real files never have. */
static void random_bpe(struct td_bpe *b, size_t n_merges)
{
    *b = (struct td_bpe){.unk_id = -1};
    td_vocab_init(&b->vocab);
    for (char c = 'a'; c <= 'c'; c++) add_token(b, &c, 1);
    assert_int_equal(td_bpe_reserve_merges(b, n_merges), TD_OK);
    for (size_t i = 0; i < n_merges; i++) {
        int32_t left = (int32_t)random_below((uint32_t)b->vocab.n_ids),
                right = (int32_t)random_below((uint32_t)b->vocab.n_ids);
        char joined[64];
        size_t n_left, n_right;
        const char *l = td_vocab_text(&b->vocab, left, &n_left),
                   *r = td_vocab_text(&b->vocab, right, &n_right);
        if (n_left + n_right > 12) continue;
        memcpy(joined, l, n_left);
        memcpy(joined + n_left, r, n_right);
        td_bpe_add_merge(b, left, right, random_below(1000) * 64 + (uint32_t)i,
                         add_token(b, joined, n_left + n_right));
    }
    td_bpe_index(b);
}

static void test_bpe_is_plain_bpe(void **state)
{
    (void)state;
    struct td_bpe_scratch scratch = {0};
    size_t n_merged = 0;
    random_state = 3;
    for (int round = 0; round < 300; round++) {
        struct td_bpe b;
        random_bpe(&b, 2 + random_below(40));
        for (int k = 0; k < 30; k++) {
            char word[80];
            int32_t plain[80];
            size_t n = 1 + random_below(sizeof word);
            for (size_t i = 0; i < n; i++) {
                word[i] = (char)('a' + random_below(k % 3 + 1));
                plain[i] = word[i] - 'a';
            }
            struct td_token_list got = {0};
            assert_int_equal(td_bpe_encode_word(&b, &scratch, word, n, NO_LIMIT, &got), TD_OK);
            size_t n_plain = plain_bpe(&b, plain, n);
            check_ids(&got, plain, n_plain, "plain BPE");
            n_merged += n - n_plain;
            td_token_list_free(&got);
        }
        td_bpe_free(&b);
    }
    assert_true(n_merged > 10000); /* else the test says nothing */
    td_bpe_scratch_free(&scratch);
}

/* Steps for n letters in one word must grow as n log n: counted, not timed. */
static void test_long_words_are_cheap(void **state)
{
    (void)state;
    struct td_bpe_scratch scratch = {0};
    struct td_bpe b = {.unk_id = -1};
    char token[65];
    memset(token, 'a', sizeof token);
    td_vocab_init(&b.vocab);
    assert_int_equal(td_bpe_reserve_merges(&b, 6), TD_OK);
    add_token(&b, token, 1);
    for (uint32_t i = 0; i < 6; i++)
        td_bpe_add_merge(&b, (int32_t)i, (int32_t)i, i, add_token(&b, token, (size_t)2 << i));
    td_bpe_index(&b);
    size_t n = (size_t)1 << 20;
    char *word = malloc(n);
    memset(word, 'a', n);
    uint64_t steps[2];
    for (int i = 0; i < 2; i++) {
        struct td_token_list got = {0};
        scratch.n_steps = 0;
        assert_int_equal(td_bpe_encode_word(&b, &scratch, word, i ? n : n / 16, NO_LIMIT, &got),
                         TD_OK);
        assert_int_equal(got.n, (i ? n : n / 16) / 64);
        steps[i] = scratch.n_steps;
        td_token_list_free(&got);
    }
    print_message("%zu letters: %" PRIu64 " steps; %zu: %" PRIu64 "\n", n / 16, steps[0], n,
                  steps[1]);
    assert_true(steps[1] < 60 * n); /* 3 pushes and pops of at most log2(n) = 20 levels each */
    assert_true(steps[1] < steps[0] * 16 * 2);
    free(word);
    td_bpe_scratch_free(&scratch);
    td_bpe_free(&b);
}

/* A megabyte through the whole pipeline: one regex match may cost only a multiple of its text (a
 * match limit enforces it), so these pass only if nothing in the regex is worse than linear per
 * match. */
static void test_long_texts(void **state)
{
    (void)state;
    struct td_tokenizer *t = qwen();
    /* times are for a build without sanitizers to show */
    size_t n = (size_t)1 << (getenv("TANDEM_TEST_SHORT") ? 17 : 20);
    char *text = malloc(n);
    static const char *const units[] = {"a", " ", "\n", "' ", "1", "\u00e9", "e\u0301\u0323"};
    for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
        size_t n_unit = strlen(units[u]), n_text = n / n_unit * n_unit, n_back;
        for (size_t i = 0; i < n_text; i += n_unit) memcpy(text + i, units[u], n_unit);
        struct td_token_list ids = encode(t, text, n_text, false);
        if (u == 0) assert_int_equal(ids.n, n / 8);
        char *back = decode(t, ids.ids, ids.n, false, &n_back);
        if (u < 6) assert_true(n_back == n_text && !memcmp(back, text, n_text));
        free(back);
        td_token_list_free(&ids);
    }
    free(text);
    td_tokenizer_free(t);
}

/* Marks in the worst order: canonical ordering must not be quadratic (this would take minutes),
 * and must be right. */
static void test_marks_in_bad_order(void **state)
{
    (void)state;
    struct td_tokenizer *t = qwen();
    size_t n_marks = getenv("TANDEM_TEST_SHORT") ? 50000 : 400000, n = 1;
    char *text = malloc(1 + n_marks * 2);
    text[0] = 'x';
    /* classes 220 and 230 */
    for (size_t i = 0; i < n_marks; i++) n += (size_t)td_utf8_put(i % 2 ? 0x323 : 0x301, text + n);
    struct td_token_list ids = encode(t, text, n, false);
    size_t n_back;
    char *back = decode(t, ids.ids, ids.n, false, &n_back);
    assert_int_equal(n_back, n);
    assert_memory_equal(back + 1, "\u0323\u0323", 4);
    assert_memory_equal(back + n - 4, "\u0301\u0301", 4);
    free(back);
    free(text);
    td_token_list_free(&ids);
    td_tokenizer_free(t);
}

/* ---- regular expressions ---- */

static void test_regex_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *regex;
        td_status status;
        const char *says;
    } cases[] = {
        {"a&&b", TD_OK, ""},
        {"[a&&b]", TD_ERR_UNSUPPORTED, "&&"},
        {"[a[^b]]", TD_ERR_UNSUPPORTED, "[^]"},
        {"[[:alpha:]]", TD_ERR_UNSUPPORTED, "[:posix:]"},
        {"a{1,2}+", TD_ERR_UNSUPPORTED, "{}+"},
        {"\\K", TD_ERR_UNSUPPORTED, "\\K"},
        {"\\h", TD_ERR_UNSUPPORTED, "\\h"},
        {"\\1", TD_ERR_UNSUPPORTED, "\\1"},
        {"[\\W]", TD_ERR_UNSUPPORTED, "\\W in a set"},
        {"(*COMMIT)", TD_ERR_UNSUPPORTED, "(*"},
        {"(?R)", TD_ERR_UNSUPPORTED, "(?"},
        {"(?<n>a)", TD_ERR_UNSUPPORTED, "(?"},
        {"a(?i)b", TD_ERR_UNSUPPORTED, "(?i) in the middle"},
        {"(?i", TD_ERR_UNSUPPORTED, "(? without end"},
        {"\\xff", TD_ERR_UNSUPPORTED, "half a UTF-8"},
        {"\\p{Lu", TD_ERR_UNSUPPORTED, "\\p{"},
        {"\\p{NoSuchScript}", TD_ERR_INVALID, "invalid regex"},
        {"(a", TD_ERR_INVALID, "invalid regex"},
        {"a**", TD_ERR_INVALID, "invalid regex"},
        {"[a", TD_ERR_UNSUPPORTED, "[ without ]"},
        {"*a", TD_ERR_INVALID, "invalid regex"},
        {"\\", TD_ERR_UNSUPPORTED, "\\ at the end"},
        {"((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((((("
         "(((((((((((((((((((a",
         TD_ERR_INVALID, "nested"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct td_tok_pattern p = {0};
        struct td_err err = {0};
        td_status s =
            td_tok_pattern_regex(cases[i].regex, strlen(cases[i].regex), "here", &p, &err);
        if (s != cases[i].status || !strstr(err.msg, cases[i].says))
            fail_msg("%s: %s \"%s\"", cases[i].regex, td_status_name(s), err.msg);
        td_tok_pattern_free(&p);
    }
}

static void test_regex_backtracking_is_bounded(void **state)
{
    (void)state;
    struct td_tok_pattern p = {0};
    struct td_tok_matcher m = {0};
    struct td_tok_ranges ranges = {0};
    struct td_err err = {0};
    char text[4001];
    memset(text, 'a', sizeof text);
    const char *hostile = "(?:a|a|aa)+b|(?:a|a)+c";
    assert_int_equal(td_tok_pattern_regex(hostile, strlen(hostile), "here", &p, &err), TD_OK);
    text[4000] = 'x';
    assert_int_equal(td_tok_pattern_ranges(&p, &m, text, sizeof text, &ranges), TD_ERR_LIMIT);
    td_tok_pattern_free(&p);
    td_tok_ranges_free(&ranges);
    td_tok_matcher_free(&m);
}

/* ---- budgets in bytes ---- */

static size_t peak_rss_bytes(void)
{
    struct rusage u;
    assert_int_equal(getrusage(RUSAGE_SELF, &u), 0);
    return (size_t)u.ru_maxrss * 1024;
}

/* `n` times one operation, as a Sequence of `list`. */
static json_t *chain(const char *list, size_t n, const char *op)
{
    json_t *a = json_array();
    for (size_t i = 0; i < n; i++) json_array_append_new(a, json_loads(op, 0, NULL));
    return json_pack("{s:s, s:o}", "type", "Sequence", list, a);
}

#define REPLACE_BY_FOUR                                                                            \
    "{\"type\": \"Replace\", \"pattern\": {\"String\": \"a\"}, \"content\": \"aaaa\"}"

static const struct bomb {
    const char *part, *list, *op; /* op NULL: Prepend of a kilobyte */
    size_t n;
    const char *text, *says;
} bombs[] = {
    {"normalizer", "normalizers", REPLACE_BY_FOUR, 9, "a",
     "normalizer 4 of 9 Replace makes more than 94336 bytes"},
    {"normalizer", "normalizers",
     "{\"type\": \"Replace\", \"pattern\": {\"Regex\": \"a|\"}, \"content\": \"aaa\"}", 60, "a",
     " Replace makes more than"},
    {"normalizer", "normalizers", "{\"type\": \"ByteLevel\"}", 60, "\xc3\xa9",
     " of 60 ByteLevel makes more than"},
    {"normalizer", "normalizers", NULL, 1, "<x>", "normalizer 1 of 1 Prepend makes more than"},
    {"pre_tokenizer", "pretokenizers",
     "{\"type\": \"ByteLevel\", \"add_prefix_space\": true, \"use_regex\": false}", 60, "\xc3\xa9",
     "pre_tokenizer 7 of 60 makes more than"},
    {"pre_tokenizer", "pretokenizers",
     "{\"type\": \"Metaspace\", \"replacement\": \"\xe2\x96\x81\", \"prepend_scheme\": "
     "\"always\", \"split\": false}",
     60, "\xc3\xa9", NULL}, /* adds one mark, once */
};

/* A prompt of 900 bytes is refused with the operation's name, or takes no memory to speak of. */
static void prompt_meets_bomb(const struct bomb *b)
{
    char kilobyte[1100], text[901];
    snprintf(kilobyte, sizeof kilobyte, "{\"type\": \"Prepend\", \"prepend\": \"%01000d\"}", 0);
    size_t n_unit = strlen(b->text), n = 0;
    for (; n + n_unit <= 900 - (b->text[0] == '<'); n += n_unit) {
        memcpy(text + n, b->text, n_unit);
        if (b->text[0] == '<' && n + n_unit < 899) text[n + n_unit] = 'b', n++;
    }
    json_t *root =
        json_pack("{s:o, s:o, s:[{s:i, s:s, s:b, s:b}]}", "model", byte_level_model(NULL, 0),
                  b->part, chain(b->list, b->n, b->op ? b->op : kilobyte), "added_tokens", "id",
                  300, "content", "<x>", "special", 1, "normalized", 0);
    assert_non_null(root);
    struct td_tokenizer *t = parse_json(root);
    json_decref(root);
    struct td_token_list list = {0};
    struct td_err err = {0};
    td_status s = td_tokenizer_encode(t, text, n, true, 4096, &list, &err);
    if (!b->says)
        assert_int_not_equal(s, TD_ERR_NOMEM);
    else if (s != TD_ERR_INVALID || !strstr(err.msg, b->says))
        fail_msg("bomb %td: %s \"%s\"", b - bombs, td_status_name(s), err.msg);
    td_token_list_free(&list);
    td_tokenizer_free(t);
}

/* In the file itself: an added token that the normalizers see. */
static void added_token_meets_bomb(void)
{
    json_t *root =
        json_pack("{s:o, s:o, s:[{s:i, s:s, s:b, s:b}]}", "model", byte_level_model(NULL, 0),
                  "normalizer", chain("normalizers", 30, REPLACE_BY_FOUR), "added_tokens", "id",
                  300, "content", "aaaa", "special", 0, "normalized", 1);
    char *json = json_dumps(root, 0);
    json_decref(root);
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    assert_int_equal(td_tokenizer_parse(json, strlen(json), &t, &err), TD_ERR_LIMIT);
    assert_non_null(strstr(err.msg, "added_tokens: \"aaaa\": normalizer 8 of 30 (Replace) makes "
                                    "more than 65664 bytes of its 4"));
    free(json);
}

static void decoder_is_a_bomb(void)
{
    json_t *root = json_pack("{s:o, s:o}", "model", byte_level_model(NULL, 0), "decoder",
                             chain("decoders", 30, REPLACE_BY_FOUR));
    struct td_tokenizer *t = parse_json(root);
    json_decref(root);
    char *back;
    size_t n_back;
    struct td_err err = {0};
    assert_int_equal(td_tokenizer_decode(t, (int32_t[]){'a', 'a'}, 2, false, &back, &n_back, &err),
                     TD_ERR_LIMIT);
    assert_non_null(
        strstr(err.msg, "token 0 of 2: tokenizer.json's decoder makes more than 65568 bytes"));
    struct td_detokenizer *d;
    const char *shown;
    assert_int_equal(td_detokenizer_create(t, NULL, 0, false, &d), TD_OK);
    assert_int_equal(td_detokenizer_push(d, 'b', &shown, &n_back), TD_OK);
    assert_int_equal(td_detokenizer_push(d, 'a', &shown, &n_back), TD_ERR_LIMIT);
    td_detokenizer_free(d);
    td_tokenizer_free(t);
}

/* Files whose operations multiply the text: 4^9, 2^60, a kilobyte before each of 300 pieces ...
 * Each is refused with the operation's name while it holds little; before there were budgets the
 * first of them took 4.5 GB and 42 s for these 900 bytes. */
static void test_growth_is_bounded(void **state)
{
    (void)state;
    size_t before = peak_rss_bytes();
    for (size_t i = 0; i < sizeof bombs / sizeof *bombs; i++) prompt_meets_bomb(&bombs[i]);
    added_token_meets_bomb();
    decoder_is_a_bomb();
    size_t grown = peak_rss_bytes() - before;
    if (grown > (size_t)64 << 20) fail_msg("%zu bytes for prompts of 900", grown);
}

/* What ordinary files make of hostile texts has room: these are the texts that grow most. */
static void test_ordinary_growth_has_room(void **state)
{
    (void)state;
    static const char *const units[] = {" ",
                                        "a",
                                        "a.",
                                        "\xef\xb7\xba",
                                        "\xcd\x84",
                                        "\xf0\x9f\x98\x80",
                                        "\n",
                                        "<|im_start|>.",
                                        "a\xcc\x81 \n.1"};
    static const char *const forms[] = {"NFC", "NFD", "NFKC", "NFKD"};
    size_t n = 64 << 10;
    char *text = malloc(n);
    for (size_t f = 0; f < 5; f++) {
        json_t *root = json_pack("{s:o, s:{s:s, s:b, s:b}, s:[{s:i, s:s, s:b}]}", "model",
                                 byte_level_model(NULL, 0), "pre_tokenizer", "type", "ByteLevel",
                                 "add_prefix_space", 1, "use_regex", 1, "added_tokens", "id", 300,
                                 "content", "<|im_start|>", "special", 1);
        if (f < 4) json_object_set_new(root, "normalizer", json_pack("{s:s}", "type", forms[f]));
        struct td_tokenizer *t = parse_json(root);
        json_decref(root);
        for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
            size_t n_unit = strlen(units[i]), at = 0;
            for (; at + n_unit <= n; at += n_unit) memcpy(text + at, units[i], n_unit);
            struct td_token_list list = {0};
            struct td_err err = {0};
            if (td_tokenizer_encode(t, text, at, true, NO_LIMIT, &list, &err))
                fail_msg("%s, text %zu: %s", f < 4 ? forms[f] : "plain", i, err.msg);
            assert_true(list.n > 0);
            td_token_list_free(&list);
        }
        td_tokenizer_free(t);
    }
    free(text);
}

/* ---- bad files and bad calls ---- */

#define MODEL(more)                                                                                \
    "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}" more \
    "}"

static const struct {
    const char *json;
    td_status status;
    const char *says;
} bad_files[] = {
    {MODEL(""), TD_OK, ""},
    {"", TD_ERR_INVALID, "tokenizer.json"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0", TD_ERR_INVALID, "tokenizer.json"},
    {"[]", TD_ERR_INVALID, "not an object"},
    {"{}", TD_ERR_INVALID, "model must be an object"},
    {"{\"model\":{\"type\":\"WordPiece\",\"vocab\":{}}}", TD_ERR_UNSUPPORTED, "\"WordPiece\""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":[],\"merges\":[]}}", TD_ERR_INVALID, "vocab"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{},\"merges\":[]}}", TD_ERR_INVALID, "vocab"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":-1},\"merges\":[]}}", TD_ERR_LIMIT, "-1"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":2097152},\"merges\":[]}}", TD_ERR_LIMIT,
     "2097152"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":4611686018427387904},\"merges\":[]}}",
     TD_ERR_LIMIT, "4611686018427387904"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":2147483648},\"merges\":[]}}", TD_ERR_LIMIT,
     "2147483648"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":\"0\"},\"merges\":[]}}", TD_ERR_INVALID,
     "not an integer"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":0},\"merges\":[]}}", TD_ERR_CORRUPT,
     "both \"a\" and \"b\""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0}}}", TD_ERR_INVALID, "merges must be"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a z\"]}}", TD_ERR_CORRUPT,
     "\"z\" is not in the vocabulary"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1},\"merges\":[\"a b\"]}}",
     TD_ERR_CORRUPT, "merges[0]: \"ab\""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a\"]}}", TD_ERR_INVALID,
     "merges[0]"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[\"a a a\"]}}", TD_ERR_INVALID,
     "merges[0]"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[[\"a\"]]}}", TD_ERR_INVALID,
     "merges[0]"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[7]}}", TD_ERR_INVALID,
     "merges[0]"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[[\"a\",7]]}}", TD_ERR_INVALID,
     "merges[0]"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"dropout\":0.1}}",
     TD_ERR_UNSUPPORTED, "dropout"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"dropout\":0.0}}", TD_OK, ""},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"unk_token\":\"u\"}}",
     TD_ERR_CORRUPT, "unk_token"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"end_of_word_suffix\":\"<"
     "/w>\"}}",
     TD_ERR_UNSUPPORTED, "</w>"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"continuing_subword_"
     "prefix\":\"##\"}}",
     TD_ERR_UNSUPPORTED, "##"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"byte_fallback\":1}}",
     TD_ERR_INVALID, "byte_fallback"},
    {"{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[],\"new_thing\":1}}",
     TD_ERR_UNSUPPORTED, "\"new_thing\""},
    {MODEL(",\"other\":1"), TD_ERR_UNSUPPORTED, "\"other\""},
    {MODEL(",\"version\":\"2.0\""), TD_ERR_UNSUPPORTED, "2.0"},
    {MODEL(",\"padding\":{\"strategy\":\"BatchLongest\",\"pad_to_multiple_of\":null}"), TD_OK, ""},
    {MODEL(",\"padding\":{\"strategy\":{\"Fixed\":8}}"), TD_ERR_UNSUPPORTED, "padding"},
    {MODEL(",\"padding\":{\"strategy\":\"BatchLongest\",\"pad_to_multiple_of\":8}"),
     TD_ERR_UNSUPPORTED, "padding"},
    {MODEL(",\"truncation\":{\"max_length\":1}"), TD_OK, ""},
    {MODEL(",\"added_tokens\":7"), TD_ERR_INVALID, "added_tokens"},
    {MODEL(",\"added_tokens\":[7]"), TD_ERR_INVALID, "added_tokens[0]"},
    {MODEL(",\"added_tokens\":[{\"id\":5}]"), TD_ERR_INVALID, "content"},
    {MODEL(",\"added_tokens\":[{\"id\":5,\"content\":\"\"}]"), TD_ERR_INVALID, "content"},
    {MODEL(",\"added_tokens\":[{\"content\":\"x\"}]"), TD_ERR_INVALID, "id of \"x\""},
    {MODEL(",\"added_tokens\":[{\"id\":1,\"content\":\"x\"}]"), TD_ERR_CORRUPT, "id 1"},
    {MODEL(",\"added_tokens\":[{\"id\":5,\"content\":\"a\"}]"), TD_ERR_CORRUPT, "\"a\" has id 5"},
    {MODEL(",\"added_tokens\":[{\"id\":5,\"content\":\"x\"},{\"id\":5,\"content\":\"y\"}]"),
     TD_ERR_CORRUPT, "id 5"},
    {MODEL(",\"added_tokens\":[{\"id\":5,\"content\":\"x\"},{\"id\":6,\"content\":\"x\"}]"),
     TD_ERR_CORRUPT, "twice"},
    {MODEL(",\"added_tokens\":[{\"id\":2097152,\"content\":\"x\"}]"), TD_ERR_LIMIT, "2097152"},
    {MODEL(",\"added_tokens\":[{\"id\":5,\"content\":\"x\",\"special\":\"yes\"}]"), TD_ERR_INVALID,
     "special"},
    {MODEL(",\"added_tokens\":[{\"id\":5,\"content\":\"x\",\"color\":1}]"), TD_ERR_UNSUPPORTED,
     "\"color\""},
    {MODEL(",\"added_tokens\":[{\"id\":5,\"content\":\" "
           "\"}],\"normalizer\":{\"type\":\"Strip\"}"),
     TD_ERR_UNSUPPORTED, "leaves nothing"},
    {MODEL(",\"normalizer\":7"), TD_ERR_INVALID, "normalizer"},
    {MODEL(",\"normalizer\":{}"), TD_ERR_INVALID, "type is missing"},
    {MODEL(",\"normalizer\":{\"type\":\"Precompiled\"}"), TD_ERR_UNSUPPORTED, "\"Precompiled\""},
    {MODEL(",\"normalizer\":{\"type\":\"Prepend\"}"), TD_ERR_INVALID, "prepend is missing"},
    {MODEL(",\"normalizer\":{\"type\":\"NFC\",\"x\":1}"), TD_ERR_UNSUPPORTED, "\"x\""},
    {MODEL(",\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":"
           "\"\"}"),
     TD_ERR_INVALID, "empty"},
    {MODEL(",\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"(\"},\"content\":"
           "\"\"}"),
     TD_ERR_INVALID, "invalid regex"},
    {MODEL(",\"normalizer\":{\"type\":\"Replace\",\"pattern\":{},\"content\":\"\"}"),
     TD_ERR_INVALID, "pattern"},
    {MODEL(",\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":7}"), TD_ERR_INVALID, "array"},
    {MODEL(",\"pre_tokenizer\":{\"type\":\"BertPreTokenizer\"}"), TD_ERR_UNSUPPORTED,
     "\"BertPreTokenizer\""},
    {MODEL(",\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"String\":\"x\"},\"behavior\":"
           "\"Odd\"}"),
     TD_ERR_UNSUPPORTED, "\"Odd\""},
    {MODEL(",\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"xy\"}"), TD_ERR_INVALID,
     "one character"},
    {MODEL(",\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_"
           "scheme\":\"odd\"}"),
     TD_ERR_UNSUPPORTED, "odd"},
    {MODEL(",\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"_\",\"prepend_"
           "scheme\":\"first\",\"add_prefix_space\":false}"),
     TD_ERR_INVALID, "contradicts"},
    {MODEL(",\"post_processor\":{\"type\":\"BertProcessing\"}"), TD_ERR_UNSUPPORTED,
     "\"BertProcessing\""},
    {MODEL(",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[],\"pair\":[],"
           "\"special_tokens\":{}}"),
     TD_ERR_INVALID, "sequence A"},
    {MODEL(",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":"
           "{\"id\":\"s\"}},{\"Sequence\":{\"id\":\"A\"}}],"
           "\"special_tokens\":{\"s\":{\"ids\":[9]}}}"),
     TD_ERR_CORRUPT, "id 9"},
    {MODEL(",\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":"
           "{\"id\":\"s\"}},{\"Sequence\":{\"id\":\"A\"}}],"
           "\"special_tokens\":{}}"),
     TD_ERR_INVALID, "no ids for \"s\""},
    {MODEL(",\"decoder\":{\"type\":\"WordPiece\"}"), TD_ERR_UNSUPPORTED, "\"WordPiece\""},
    {MODEL(",\"decoder\":{\"type\":\"Strip\",\"content\":\" \",\"start\":-1,\"stop\":0}"),
     TD_ERR_INVALID, "start"},
};

static void test_bad_files(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_files / sizeof *bad_files; i++) {
        struct td_tokenizer *t = NULL;
        struct td_err err = {0};
        td_status s = td_tokenizer_parse(bad_files[i].json, strlen(bad_files[i].json), &t, &err);
        if (s != bad_files[i].status || !strstr(err.msg, bad_files[i].says))
            fail_msg("%s: %s \"%s\"", bad_files[i].json, td_status_name(s), err.msg);
        if (s) assert_null(t);
        td_tokenizer_free(t);
    }
}

/* {"type":"Sequence","normalizers":[...]} n deep, and a sequence of n Lowercase side by side. */
static void test_deep_and_wide_files(void **state)
{
    (void)state;
    for (int shape = 0; shape < 2; shape++) {
        for (size_t n = 5; n < 200000; n *= 20) {
            struct td_tok_buf b = {0};
            const char *const head =
                                  "{\"model\":{\"vocab\":{\"a\":0},\"merges\":[]},\"normalizer\":",
                              *const open = "{\"type\":\"Sequence\",\"normalizers\":[";
            const char *const leaf = "{\"type\":\"Lowercase\"}";
            td_tok_buf_append(&b, head, strlen(head));
            for (size_t i = 0; i < (shape ? 1 : n); i++) td_tok_buf_append(&b, open, strlen(open));
            for (size_t i = 0; i < (shape ? n : 1); i++)
                td_tok_buf_append(&b, i ? "," : "", i ? 1 : 0),
                    td_tok_buf_append(&b, leaf, strlen(leaf));
            for (size_t i = 0; i < (shape ? 1 : n); i++) td_tok_buf_append(&b, "]}", 2);
            td_tok_buf_append(&b, "}", 1);
            struct td_tokenizer *t = NULL;
            struct td_err err = {0};
            td_status s = td_tokenizer_parse(b.bytes, b.n, &t, &err);
            if (n == 5)
                assert_int_equal(s, TD_OK);
            else
                assert_true(s == TD_ERR_LIMIT || (s == TD_ERR_INVALID && strstr(err.msg, "depth")));
            td_tokenizer_free(t);
            td_tok_buf_free(&b);
        }
    }
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    /* refused before it is read */
    assert_int_equal(td_tokenizer_parse("", (size_t)65 << 20, &t, &err), TD_ERR_LIMIT);
    assert_int_not_equal(td_tokenizer_load("/nonexistent", &t, &err), TD_OK);
    assert_non_null(strstr(err.msg, "/nonexistent/tokenizer.json"));
    assert_null(t);
    td_tokenizer_free(NULL);
}

static void test_truncated_at_every_byte(void **state)
{
    (void)state;
    static const char json[] =
        MODEL(",\"added_tokens\":[{\"id\":5,\"content\":\"x\"}],\"pre_tokenizer\":{\"type\":"
              "\"ByteLevel\"},\"decoder\":{\"type\":\"Fuse\"}");
    for (size_t n = 0; n < sizeof json - 1; n++) {
        struct td_tokenizer *t = NULL;
        struct td_err err = {0};
        assert_int_equal(td_tokenizer_parse(json, n, &t, &err), TD_ERR_INVALID);
        assert_non_null(strstr(err.msg, "tokenizer.json: line"));
    }
}

static void test_bad_calls(void **state)
{
    (void)state;
    struct td_tokenizer *t = qwen();
    struct td_token_list list = {0};
    struct td_err err = {0};
    static const struct {
        const char *text;
        const char *at;
    } bad[] = {
        {"ab\xff", "byte 2"},           {"\xc3", "byte 0"},
        {"a\xed\xa0\x80", "byte 1"},    {"\xc0\x80", "byte 0"},
        {"\xf4\x90\x80\x80", "byte 0"}, {"ok\xe2\x82", "byte 2"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(
            td_tokenizer_encode(t, bad[i].text, strlen(bad[i].text), true, NO_LIMIT, &list, &err),
            TD_ERR_INVALID);
        assert_non_null(strstr(err.msg, bad[i].at));
        assert_int_equal(list.n, 0);
    }
    assert_int_equal(td_tokenizer_encode(t, "xyz", 3, true, 3, &list, &err), TD_OK);
    assert_int_equal(list.n, 3);
    /* 3 are there: 6 in all */
    assert_int_equal(td_tokenizer_encode(t, "xyz", 3, true, 5, &list, &err), TD_ERR_LIMIT);
    assert_non_null(strstr(err.msg, "more than 5 tokens"));
    assert_int_equal(list.n, 3); /* as it was */
    assert_int_equal(td_tokenizer_encode(t, "xyz", 3, true, 6, &list, &err), TD_OK);
    assert_int_equal(list.n, 6);
    assert_int_equal(td_tokenizer_encode(t, "", 0, true, 6, &list, &err), TD_OK);
    assert_int_equal(list.n, 6);
    const char nul[] = {'a', 0, 'b'};
    assert_int_equal(td_tokenizer_encode(t, nul, 3, true, 9, &list, &err), TD_OK);
    assert_int_equal(list.ids[7], 0);
    td_token_list_free(&list);

    char *text;
    size_t n;
    assert_int_equal(td_tokenizer_decode(t, (int32_t[]){'a', 299}, 2, false, &text, &n, &err),
                     TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "id 299"));
    assert_int_equal(td_tokenizer_decode(t, (int32_t[]){-5}, 1, false, &text, &n, &err),
                     TD_ERR_INVALID);
    assert_int_equal(td_tokenizer_decode(t, (int32_t[]){INT32_MAX}, 1, false, &text, &n, &err),
                     TD_ERR_INVALID);
    assert_int_equal(td_tokenizer_decode(t, NULL, 0, false, &text, &n, &err), TD_OK);
    assert_int_equal(n, 0);
    assert_string_equal(text, "");
    free(text);
    struct td_detokenizer *d;
    const char *shown;
    assert_int_equal(td_detokenizer_create(t, (int32_t[]){'a', 299, -5, INT32_MAX}, 4, false, &d),
                     TD_OK);
    assert_int_equal(td_detokenizer_push(d, 'b', &shown, &n), TD_OK);
    assert_int_equal(n, 1);
    assert_memory_equal(shown, "b", 1);
    td_detokenizer_free(d);
    td_tokenizer_free(t);
}

/* ---- threads ---- */

static void *encode_many(void *arg)
{
    const struct td_tokenizer *t = arg;
    const char *text = "<|im_start|>hello world, e\u0301t\u0301 12 'S\n\n  x<|im_end|>";
    intptr_t n = 0;
    for (int i = 0; i < 200; i++) {
        struct td_token_list list = {0};
        struct td_err err;
        size_t n_text;
        if (td_tokenizer_encode(t, text, strlen(text), true, NO_LIMIT, &list, &err)) return NULL;
        char *back = NULL;
        if (td_tokenizer_decode(t, list.ids, list.n, true, &back, &n_text, &err)) return NULL;
        n += (intptr_t)(list.n * 1000 + n_text);
        free(back);
        td_token_list_free(&list);
    }
    return (void *)n;
}

static void test_threads_share_a_tokenizer(void **state)
{
    (void)state;
    struct td_tokenizer *t = qwen();
    pthread_t threads[4];
    void *alone = encode_many(t);
    assert_non_null(alone);
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, encode_many, t), 0);
    for (int i = 0; i < 4; i++) {
        void *result;
        pthread_join(threads[i], &result);
        assert_ptr_equal(result, alone);
    }
    td_tokenizer_free(t);
}

/* The byte characters and UTF-8 rules that all of the above stands on. */
static void test_utf8_and_bytes(void **state)
{
    (void)state;
    bool seen[0x144] = {false};
    for (int b = 0; b < 256; b++) {
        uint32_t cp = td_byte_to_cp((uint8_t)b);
        assert_true(cp < 0x144 && !seen[cp]);
        seen[cp] = true;
        assert_int_equal(td_cp_to_byte(cp), b);
    }
    assert_int_equal(td_byte_to_cp(' '), 0x120);
    assert_int_equal(td_byte_to_cp('\n'), 0x10A);
    assert_int_equal(td_byte_to_cp(0xAD), 0x143);
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        char utf8[4];
        uint32_t back = 0;
        if (cp >= 0xD800 && cp < 0xE000) continue;
        int n = td_utf8_put(cp, utf8);
        if (td_utf8_next(utf8, 4, &back) != n || back != cp) fail_msg("U+%04X", cp);
        for (int k = 1; k < n; k++) {
            if (td_utf8_next(utf8, (size_t)k, &back) != 0) fail_msg("U+%04X cut at %d", cp, k);
        }
    }
    uint32_t cp;
    assert_int_equal(td_utf8_next("\xe2\x82"
                                  "a",
                                  3, &cp),
                     -2);
    assert_int_equal(td_utf8_next("\xed\xa0\x80", 3, &cp), -1);
    assert_int_equal(td_utf8_next("\xf0\x9f\x98"
                                  "a",
                                  4, &cp),
                     -3);
    assert_int_equal(td_utf8_next("\x80", 1, &cp), -1);
}

int main(int argc, char **argv)
{
    if (argc == 2) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_utf8_and_bytes),
        cmocka_unit_test(test_components),
        cmocka_unit_test(test_qwen_style),
        cmocka_unit_test(test_digest),
        cmocka_unit_test(test_byte_level_round_trip),
        cmocka_unit_test(test_stream_of_random_ids),
        cmocka_unit_test(test_stream_of_random_decoders),
        cmocka_unit_test(test_stream_is_prompt),
        cmocka_unit_test(test_bpe_is_plain_bpe),
        cmocka_unit_test(test_long_words_are_cheap),
        cmocka_unit_test(test_long_texts),
        cmocka_unit_test(test_marks_in_bad_order),
        cmocka_unit_test(test_regex_refusals),
        cmocka_unit_test(test_regex_backtracking_is_bounded),
        cmocka_unit_test(test_growth_is_bounded),
        cmocka_unit_test(test_ordinary_growth_has_room),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_deep_and_wide_files),
        cmocka_unit_test(test_truncated_at_every_byte),
        cmocka_unit_test(test_bad_calls),
        cmocka_unit_test(test_threads_share_a_tokenizer),
        cmocka_unit_test(test_llama2_vectors),
        cmocka_unit_test(test_gpt2_vectors),
        cmocka_unit_test(test_llama3_vectors),
        cmocka_unit_test(test_phi2_spaces),
        cmocka_unit_test(test_tinystories),
        cmocka_unit_test(test_mistral_vectors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
