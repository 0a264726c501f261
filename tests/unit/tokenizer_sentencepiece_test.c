/* tokenizer_sentencepiece_test.c - tokenizer.model files against the library that they are made by
 * and for (tests/golden/sentencepiece.json, made by make_sentencepiece.py), against published
 * vectors (TANDEM_DATA; skipped without), beside what tokenizer_config.json may say, and bad
 * ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/json.h"
#include "common/base/mem.h"
#include "common/text/sentencepiece_file.h"
#include "common/text/tokenizer.h"
#include "common/text/tokenizer_sentencepiece.h"

#define NO_LIMIT ((size_t)1 << 40)
#define MARK "\xe2\x96\x81"

/* ---- models made here ---- */

struct model {
    uint8_t bytes[1 << 16];
    size_t n;
};

static void put(struct model *m, const void *bytes, size_t n)
{
    assert_true(m->n + n <= sizeof m->bytes);
    memcpy(m->bytes + m->n, bytes, n);
    m->n += n;
}

static void put_varint(struct model *m, uint64_t value)
{
    for (; value > 127; value >>= 7) put(m, &(uint8_t){(uint8_t)(value | 128)}, 1);
    put(m, &(uint8_t){(uint8_t)value}, 1);
}

static void put_number(struct model *m, int field, uint64_t value)
{
    put_varint(m, (uint64_t)field << 3);
    put_varint(m, value);
}

static void put_bytes(struct model *m, int field, const void *bytes, size_t n)
{
    put_varint(m, (uint64_t)field << 3 | 2);
    put_varint(m, n);
    put(m, bytes, n);
}

static void put_piece(struct model *m, const char *text, float score, int kind)
{
    struct model piece = {.n = 0};
    put_bytes(&piece, 1, text, strlen(text));
    put_varint(&piece, 2 << 3 | 5);
    put(&piece, &score, 4);
    if (kind != TD_SP_NORMAL) put_number(&piece, 3, (uint64_t)kind);
    put_bytes(m, 1, piece.bytes, piece.n);
}

/* type and what follows of trainer_spec */
static void put_trainer(struct model *m, int type, int field, uint64_t value)
{
    struct model spec = {.n = 0};
    put_number(&spec, 3, (uint64_t)type);
    if (field) put_number(&spec, field, value);
    put_bytes(m, 2, spec.bytes, spec.n);
}

/* prefix: a mark before texts; no white space is removed */
static void put_normalizer(struct model *m, bool prefix)
{
    struct model spec = {.n = 0};
    put_number(&spec, 3, prefix);
    put_number(&spec, 4, 0);
    put_bytes(m, 3, spec.bytes, spec.n);
}

/* <unk> <s> </s>, then marks and letters: ids 3 MARK, 4 a, 5 b, 6 c, 7 ab, 8 bc, 9 MARK a, 10 s,
 * 11 o, 12 p, 13 so, 14 sop */
static struct model small_model(void)
{
    struct model m = {.n = 0};
    put_piece(&m, "<unk>", 0, TD_SP_UNKNOWN);
    put_piece(&m, "<s>", 0, TD_SP_CONTROL);
    put_piece(&m, "</s>", 0, TD_SP_CONTROL);
    static const struct {
        const char *text;
        float score;
    } pieces[] = {{MARK, -10},    {"a", -11}, {"b", -12}, {"c", -13}, {"ab", -2}, {"bc", -1},
                  {MARK "a", -3}, {"s", -14}, {"o", -15}, {"p", -16}, {"so", -4}, {"sop", -5}};
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
        put_piece(&m, pieces[i].text, pieces[i].score, TD_SP_NORMAL);
    put_trainer(&m, TD_SP_BPE, 0, 0);
    put_normalizer(&m, true);
    return m;
}

static struct td_tokenizer *load_with(const struct model *m, const char *config)
{
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    json_t *json = config ? json_loads(config, 0, NULL) : NULL;
    assert_true(!config || json);
    if (td_tokenizer_from_sentencepiece(m->bytes, m->n, json, NULL, &t, &err))
        fail_msg("%s: %s", config ? config : "no config", err.msg);
    json_decref(json);
    return t;
}

static void check(const struct td_tokenizer *t, const char *text, bool add_special,
                  const char *want)
{
    struct td_token_list list = {0};
    struct td_err err = {0};
    char got[400] = "";
    if (td_tokenizer_encode(t, text, strlen(text), add_special, NO_LIMIT, &list, &err))
        fail_msg("\"%s\": %s", text, err.msg);
    for (size_t i = 0, n = 0; i < list.n && n < sizeof got; i++)
        n += (size_t)snprintf(got + n, sizeof got - n, "%s%d", i ? " " : "", list.ids[i]);
    if (strcmp(got, want)) fail_msg("\"%s\": %s, want %s", text, got, want);
    td_token_list_free(&list);
}

/* ---- the library's own answers ---- */

static size_t from_base64(const char *text, uint8_t *out)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    uint32_t bits = 0;
    size_t n = 0;
    int n_bits = 0;
    for (; *text && *text != '='; text++) {
        const char *at = strchr(digits, *text);
        assert_non_null(at);
        bits = bits << 6 | (uint32_t)(at - digits);
        n_bits += 6;
        if (n_bits < 8) continue;
        n_bits -= 8;
        out[n++] = (uint8_t)(bits >> n_bits);
    }
    return n;
}

/* One row [text, ids, decoded text or null]; what it differs in, or NULL. */
static void check_row(const struct td_tokenizer *t, const json_t *row, const char *what)
{
    const json_t *text = json_array_get(row, 0), *ids = json_array_get(row, 1),
                 *decoded = json_array_get(row, 2);
    struct td_token_list list = {0};
    struct td_err err = {0};
    if (td_tokenizer_encode(t, json_string_value(text), json_string_length(text), false, NO_LIMIT,
                            &list, &err))
        fail_msg("%s: %s", what, err.msg);
    for (size_t i = 0; i < list.n || i < json_array_size(ids); i++) {
        json_int_t want = json_integer_value(json_array_get(ids, i));
        if (i < list.n && i < json_array_size(ids) && list.ids[i] == want) continue;
        fail_msg("%s: \"%s\": id %zu is %d, want %lld (%zu ids, want %zu)", what,
                 json_string_value(text), i, i < list.n ? list.ids[i] : -1, (long long)want, list.n,
                 json_array_size(ids));
    }
    if (json_is_string(decoded)) {
        char *back;
        size_t n;
        if (td_tokenizer_decode(t, list.ids, list.n, false, &back, &n, &err))
            fail_msg("%s: %s", what, err.msg);
        if (n != json_string_length(decoded) || memcmp(back, json_string_value(decoded), n))
            fail_msg("%s: \"%s\" decoded to \"%s\", want \"%s\"", what, json_string_value(text),
                     back, json_string_value(decoded));
        free(back);
    }
    td_token_list_free(&list);
}

/* SENTENCEPIECE_JSON: another file of this form. */
static void as_the_library_does(void **state)
{
    (void)state;
    const char *other = getenv("SENTENCEPIECE_JSON");
    struct td_err err = {0};
    json_t *root, *cases;
    size_t n_texts = 0, n_slow = 0;
    if (td_json_load_file(other ? other : "tests/golden/sentencepiece.json", (size_t)256 << 20,
                          &root, &err))
        fail_msg("%s", err.msg);
    cases = json_object_get(root, "cases");
    assert_true(json_array_size(cases) > 0);
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *c = json_array_get(cases, i), *config = json_object_get(c, "config"),
                     *model = json_object_get(c, "model"), *texts = json_object_get(c, "texts");
        uint8_t *bytes = malloc(json_string_length(model) + 4);
        size_t n = from_base64(json_string_value(model), bytes);
        struct td_tokenizer *t = NULL;
        char *options = json_dumps(json_object_get(c, "options"), 0), what[1200];
        if (td_tokenizer_from_sentencepiece(bytes, n, json_is_null(config) ? NULL : config, NULL,
                                            &t, &err))
            fail_msg("cases[%zu]: %s", i, err.msg);
        n_slow += !json_is_null(config);
        for (size_t k = 0; k < json_array_size(texts); k++, n_texts++) {
            snprintf(what, sizeof what, "cases[%zu].texts[%zu] of %s", i, k, options);
            check_row(t, json_array_get(texts, k), what);
        }
        td_tokenizer_free(t);
        free(options);
        free(bytes);
    }
    print_message("%zu models (%zu with tokenizer_config.json), %zu texts, %s\n",
                  json_array_size(cases), n_slow, n_texts,
                  json_string_value(json_object_get(root, "made_by")));
    json_decref(root);
}

/* ---- by hand ---- */

static void highest_score_joins_first(void **state)
{
    (void)state;
    struct model m = small_model();
    struct td_tokenizer *t = load_with(&m, NULL);
    check(t, "abc", true, "1 9 8"); /* bc before ab; a mark in front */
    check(t, "a<s>ab", false, "9 1 3 7");
    check(t, "xyzab", false, "3 0 7"); /* no byte pieces: one unknown for all three */
    check(t, "", true, "1");
    td_tokenizer_free(t);
}

/* What stands around the model: ends, marks, added tokens. */
static void what_the_config_says(void **state)
{
    (void)state;
    struct model m = small_model();
    static const struct {
        const char *config, *text, *want;
    } rows[] = {
        {"{}", "a", "1 9"},
        {"{\"tokenizer_class\": \"BaichuanTokenizer\", \"add_bos_token\": false}", "a", "9"},
        {"{\"add_eos_token\": true}", "a", "1 9 2"},
        {"{\"add_eos_token\": true, \"eos_token\": {\"content\": \"<s>\"}}", "a", "1 9 1"},
        {"{\"bos_token\": \"</s>\"}", "a", "2 9"},
        {"{\"legacy\": false}", "a<s>a", "1 9 1 4"},
        {"{\"legacy\": false}", "<s>a", "1 1 4"},
        {"{\"legacy\": true}", "<s>a", "1 1 9"},
        {"{\"legacy\": false, \"add_prefix_space\": false}", "a", "1 4"},
        {"{\"tokenizer_class\": \"InternLM2Tokenizer\", \"legacy\": false}", "<s>a", "1 1 9"},
        {"{\"added_tokens_decoder\": {\"15\": {\"content\": \"<x>\", \"lstrip\": true, \"rstrip\": "
         "false, \"special\": true}}}",
         "a <x> a", "1 9 15 3 9"},
        /* a name that another id had */
        {"{\"added_tokens_decoder\": {\"2\": {\"content\": \"<|im_end|>\", \"special\": true}}}",
         "a<|im_end|>", "1 9 2"},
        /* a token that no id has stays text */
        {"{\"pad_token\": \"ca\"}", "ca", "1 3 6 4"},
        {"{\"additional_special_tokens\": [\"c\"]}", "bc", "1 3 5 6"},
        {"{\"tokenizer_class\": \"ChatGLMTokenizer\"}", "a", "16 18 9"},
        {"{\"tokenizer_class\": \"ChatGLMTokenizer\"}", "[gMASK]sop<|user|>a", "16 18 16 18 21 9"},
        {"{\"tokenizer_class\": \"ChatGLMTokenizer\"}", "asop eop", "16 18 9 14 3 0 11 12"},
        {"{\"tokenizer_class\": \"ChatGLMTokenizer\"}", "[gMASK]asop", "16 18 16 9 14"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct td_tokenizer *t = load_with(&m, rows[i].config);
        print_message("%s\n", rows[i].config);
        check(t, rows[i].text, true, rows[i].want);
        td_tokenizer_free(t);
    }
}

static void bad_configs(void **state)
{
    (void)state;
    struct model m = small_model();
    static const struct {
        const char *config, *wants;
    } rows[] = {
        {"[]", "no object"},
        {"{\"tokenizer_class\": \"T5Tokenizer\"}", "tokenizer_class \"T5Tokenizer\""},
        {"{\"tokenizer_class\": 5}", "tokenizer_class"},
        {"{\"do_lower_case\": true}", "do_lower_case"},
        {"{\"split_special_tokens\": true}", "split_special_tokens"},
        {"{\"sp_model_kwargs\": {\"enable_sampling\": true}}", "sp_model_kwargs"},
        {"{\"bos_token\": \"<nowhere>\"}", "bos_token \"<nowhere>\""},
        {"{\"added_tokens_decoder\": []}", "added_tokens_decoder must be an object"},
        {"{\"added_tokens_decoder\": {\"x\": {}}}", "\"x\" is no id"},
        {"{\"added_tokens_decoder\": {\"-1\": {}}}", "\"-1\" is no id"},
        {"{\"added_tokens_decoder\": {\"99999999999999999999\": {}}}", "is no id"},
        {"{\"added_tokens_decoder\": {\"15\": 4}}", "15 must be an object"},
        {"{\"added_tokens_decoder\": {\"15\": {\"content\": \"\"}}}", "has 0 bytes"},
        {"{\"added_tokens_decoder\": {\"15\": {\"content\": \"x\", \"odd\": 1}}}", "odd"},
        {"{\"added_tokens_decoder\": {\"15\": {\"content\": \"x\"}, \"16\": {\"content\": \"x\"}}}",
         "two ids"},
        {"{\"added_tokens_decoder\": {\"7\": {\"content\": \"<x>\"}}}", "makes \"ab\" of it"},
        {"{\"tokenizer_class\": \"ChatGLMTokenizer\", \"added_tokens_decoder\": {\"30\": "
         "{\"content\": \"[gMASK]\"}}}",
         "\"[gMASK]\" has the id 30"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct td_tokenizer *t = NULL;
        struct td_err err = {0};
        json_t *json = json_loads(rows[i].config, 0, NULL);
        assert_non_null(json);
        td_status s = td_tokenizer_from_sentencepiece(m.bytes, m.n, json, NULL, &t, &err);
        json_decref(json);
        if (!s || !strstr(err.msg, rows[i].wants))
            fail_msg("%s: %s, must speak of %s", rows[i].config, s ? err.msg : "accepted",
                     rows[i].wants);
    }
}

static void refuses(const struct model *m, const char *wants)
{
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    td_status s = td_tokenizer_from_sentencepiece(m->bytes, m->n, NULL, NULL, &t, &err);
    if (!s || !strstr(err.msg, wants))
        fail_msg("%s, must speak of %s", s ? err.msg : "accepted", wants);
    assert_int_equal(strncmp(err.msg, "tokenizer.model: ", 17), 0);
}

/* A model with one piece more. */
static void bad_pieces(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        float score;
        int kind;
        const char *wants;
    } pieces[] = {
        {"", 0, TD_SP_NORMAL, "piece 15 has 0 bytes"},
        {"\xff", 0, TD_SP_NORMAL, "not valid UTF-8"},
        {"a", 0, TD_SP_NORMAL, "two ids"},
        {"x", 0.0f / 0.0f, TD_SP_NORMAL, "no number"},
        {"x", 1.0f / 0.0f, TD_SP_NORMAL, "no number"},
        {"x", 0, 7, "type 7"},
        {"xa", 0, TD_SP_NORMAL, "the character U+0078"},
        {"x", 0, TD_SP_UNUSED, "unused"},
        {"x", 0, TD_SP_UNKNOWN, "both the unknown"},
        {"<0x41>", 0, TD_SP_BYTE, "byte_fallback is false"},
    };
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
        struct model m = small_model();
        put_piece(&m, pieces[i].text, pieces[i].score, pieces[i].kind);
        refuses(&m, pieces[i].wants);
    }
}

/* A model with another part once more: what comes last counts. */
static void bad_models(void **state)
{
    (void)state;
    struct model m = small_model(), spec = {.n = 0};
    put_trainer(&m, TD_SP_WORD, 0, 0);
    refuses(&m, "model_type word");
    m = small_model();
    put_trainer(&m, TD_SP_BPE, 24, 1);
    refuses(&m, "treat_whitespace_as_suffix");
    m = small_model();
    put_trainer(&m, TD_SP_BPE, 35, 1);
    refuses(&m, "no piece is the byte <0x00>");
    put_piece(&m, "0x41", 0, TD_SP_BYTE);
    refuses(&m, "marked as a byte");
    m = small_model();
    char long_text[600] = "";
    memset(long_text, 'a', 513);
    put_piece(&m, long_text, 0, TD_SP_NORMAL);
    refuses(&m, "513 bytes");
    m = small_model();
    put_bytes(&spec, 2, "\x08\0\0\0\0\1\0\0abcdefgh", 16);
    put_bytes(&m, 3, spec.bytes, spec.n);
    refuses(&m, "unit 0 has no text");
    spec.n = 0;
    m = small_model();
    put_bytes(&spec, 2, "\xf0\0\0\0abcdefgh", 12);
    put_bytes(&m, 3, spec.bytes, spec.n);
    refuses(&m, "precompiled_charsmap has 12 bytes");
    m = small_model();
    put_bytes(&m, 5, spec.bytes, spec.n);
    refuses(&m, "denormalizer_spec");
    m = (struct model){.n = 0};
    put_trainer(&m, TD_SP_BPE, 0, 0);
    refuses(&m, "not one piece");
    put_piece(&m, "a", 0, TD_SP_NORMAL);
    refuses(&m, "no piece is the unknown one");
    m = small_model();
    put_number(&m, 1, 5);
    refuses(&m, "field 1 has type 0");
    m.n = 0;
    put(&m, "IQ== 0\nIg== 1\n", 14);
    refuses(&m, "tiktoken");
}

/* Every beginning of a model is refused, or is a smaller model. */
static void cut_models(void **state)
{
    (void)state;
    struct model m = small_model();
    size_t n_refused = 0;
    for (size_t n = 0; n < m.n; n++) {
        struct td_tokenizer *t = NULL;
        struct td_err err = {0};
        uint8_t *exact = malloc(n ? n : 1); /* so that ASan sees the end */
        memcpy(exact, m.bytes, n);
        if (td_tokenizer_from_sentencepiece(exact, n, NULL, NULL, &t, &err)) {
            assert_true(err.msg[0]);
            n_refused++;
        }
        td_tokenizer_free(t);
        free(exact);
    }
    assert_true(n_refused > m.n / 2);
}

/* ---- directories ---- */

static void write_file(const char *dir, const char *name, const void *bytes, size_t n)
{
    char path[300];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void directories(void **state)
{
    (void)state;
    char dir[] = "/tmp/tandem_sp_XXXXXX", path[300];
    struct model m = small_model();
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    assert_non_null(mkdtemp(dir));
    assert_int_not_equal(td_tokenizer_load(dir, &t, &err), TD_OK);
    assert_non_null(strstr(err.msg, "tokenizer.json"));
    write_file(dir, "tokenizer.model", m.bytes, m.n);
    write_file(dir, "added_tokens.json", "{\"<x>\": 15}", 11);
    write_file(dir, "tokenizer_config.json", "{\"add_bos_token\": false}", 24);
    if (td_tokenizer_load(dir, &t, &err)) fail_msg("%s", err.msg);
    check(t, "a<x>", true, "9 15");
    assert_string_equal(td_tokenizer_file(t), "tokenizer.model");
    td_tokenizer_free(t);
    assert_int_equal(td_tokenizer_put_gguf(dir, 16, -1, NULL, 0, NULL, &err), TD_ERR_UNSUPPORTED);
    assert_non_null(strstr(err.msg, "tokenizer.model"));
    write_file(dir, "tokenizer_config.json", "{", 1);
    assert_int_not_equal(td_tokenizer_load(dir, &t, &err), TD_OK);
    assert_non_null(strstr(err.msg, "tokenizer_config.json"));
    static const char *const names[] = {"tokenizer.model", "added_tokens.json",
                                        "tokenizer_config.json"};
    for (size_t i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        assert_int_equal(unlink(path), 0);
    }
    assert_int_equal(rmdir(dir), 0);
}

/* ---- published files ---- */

static char *read_data(const char *name, size_t *ret_n)
{
    char path[4096], *text;
    const char *data = getenv("TANDEM_DATA");
    struct td_err err = {0};
    snprintf(path, sizeof path, "%s/%s", data ? data : "../shared/data", name);
    if (td_file_read(path, (size_t)64 << 20, &text, ret_n, &err)) {
        print_message("%s: set TANDEM_DATA\n", err.msg);
        skip();
    }
    return text;
}

static void llama_2_as_llama_cpp(void **state)
{
    (void)state;
    static const char separator[] = "\n__ggml_vocab_test__\n";
    size_t n_model, n_in, n_out, n_texts = 0;
    char *model = read_data("tokenizer-models/llama2/tokenizer.model", &n_model),
         *in = read_data("llama-cpp-vocabs/ggml-vocab-llama-spm.gguf.inp", &n_in),
         *out = read_data("llama-cpp-vocabs/ggml-vocab-llama-spm.gguf.out", &n_out);
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    if (td_tokenizer_from_sentencepiece(model, n_model, NULL, NULL, &t, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(td_tokenizer_vocab(t), 32000);
    char *line = out;
    for (char *at = in, *next; at; at = next) {
        next = strstr(at, separator);
        if (next) *next = '\0', next += sizeof separator - 1;
        char *end = strchr(line, '\n');
        size_t n_line = end ? (size_t)(end - line) : strlen(line);
        json_t *row = json_array(), *ids = json_array();
        for (char *number = line, *stop; number < line + n_line; number = stop) {
            long id = strtol(number, &stop, 10);
            if (stop == number) break;
            json_array_append_new(ids, json_integer(id));
        }
        json_array_append_new(row, json_string(at));
        json_array_append_new(row, ids);
        check_row(t, row, at);
        json_decref(row);
        line += n_line + (end ? 1 : 0);
        n_texts++;
    }
    assert_true(n_texts >= 47);
    td_tokenizer_free(t);
    free(model);
    free(in);
    free(out);
}

/* Names what td_tokenizer_load would say of them. */
static void published_models_load(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int32_t vocab;
    } files[] = {{"mistral/tokenizer.model.v1", 32000},
                 {"mistral/mistral_instruct_tokenizer_240216.model.v2", 32768},
                 {"mistral/mistral_instruct_tokenizer_240323.model.v3", 32768},
                 {"llama3/tokenizer.model", 0}};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char name[200];
        size_t n;
        struct td_tokenizer *t = NULL;
        struct td_err err = {0};
        snprintf(name, sizeof name, "tokenizer-models/%s", files[i].name);
        char *model = read_data(name, &n);
        td_status s = td_tokenizer_from_sentencepiece(model, n, NULL, NULL, &t, &err);
        if (files[i].vocab) {
            if (s) fail_msg("%s: %s", name, err.msg);
            assert_int_equal(td_tokenizer_vocab(t), files[i].vocab);
        } else {
            assert_int_equal(s, TD_ERR_UNSUPPORTED);
            assert_non_null(strstr(err.msg, "tiktoken"));
        }
        td_tokenizer_free(t);
        free(model);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_the_library_does),  cmocka_unit_test(highest_score_joins_first),
        cmocka_unit_test(what_the_config_says), cmocka_unit_test(bad_configs),
        cmocka_unit_test(bad_pieces),           cmocka_unit_test(bad_models),
        cmocka_unit_test(cut_models),           cmocka_unit_test(directories),
        cmocka_unit_test(llama_2_as_llama_cpp), cmocka_unit_test(published_models_load),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
