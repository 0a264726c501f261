/* tokenizer_ranks_test.c - lists of tiktoken's ranks against the library that they are made for
 * (tests/golden/tiktoken.json, made by make_tiktoken.py), against published vectors (TANDEM_DATA;
 * skipped without), and bad lists and configs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/json.h"
#include "common/base/mem.h"
#include "common/text/tokenizer.h"
#include "common/text/tokenizer_sentencepiece.h"

#define NO_LIMIT ((size_t)1 << 40)

/* the library's answers, with a small list of ranks */
static json_t *root;
static const char *ranks;
static size_t n_ranks;

static json_t *load_answers(const char *path)
{
    struct td_err err = {0};
    json_t *json = NULL;
    if (td_json_load_file(path, (size_t)256 << 20, &json, &err)) print_message("%s\n", err.msg);
    return json;
}

static int setup(void **state)
{
    (void)state;
    root = load_answers("tests/golden/tiktoken.json");
    ranks = json_string_value(json_object_get(root, "ranks"));
    n_ranks = json_string_length(json_object_get(root, "ranks"));
    return ranks ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    json_decref(root);
    return 0;
}

static struct td_tokenizer *make(const char *text, size_t n, const json_t *config)
{
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    if (td_tokenizer_from_ranks(text, n, config, "tiktoken.model", &t, &err))
        fail_msg("%s", err.msg);
    return t;
}

static struct td_token_list encode(const struct td_tokenizer *t, const char *text, size_t n,
                                   bool add_special)
{
    struct td_token_list list = {0};
    struct td_err err = {0};
    if (td_tokenizer_encode(t, text, n, add_special, NO_LIMIT, &list, &err))
        fail_msg("\"%s\": %s", text, err.msg);
    return list;
}

/* skip: ids in front of those that are wanted */
static void check_ids(const struct td_token_list *got, size_t skip, const json_t *want,
                      const char *what)
{
    size_t n = json_array_size(want);
    for (size_t i = 0; i < n || i + skip < got->n; i++) {
        json_int_t id = i < n ? json_integer_value(json_array_get(want, i)) : -1;
        if (i < n && i + skip < got->n && got->ids[i + skip] == id) continue;
        fail_msg("\"%s\": id %zu is %d, want %lld (%zu ids, want %zu)", what, i,
                 i + skip < got->n ? got->ids[i + skip] : -1, (long long)id, got->n - skip, n);
    }
}

static void check_text(const struct td_tokenizer *t, const json_t *row, const json_t *front,
                       bool composes)
{
    const json_t *text = json_array_get(row, 0);
    const char *bytes = json_string_value(text);
    struct td_token_list got = encode(t, bytes, json_string_length(text), false);
    check_ids(&got, 0, json_array_get(row, 1), bytes);
    if (!composes) {
        char *back;
        size_t n;
        struct td_err err = {0};
        if (td_tokenizer_decode(t, got.ids, got.n, false, &back, &n, &err))
            fail_msg("\"%s\": %s", bytes, err.msg);
        if (n != json_string_length(text) || memcmp(back, bytes, n) != 0)
            fail_msg("\"%s\" came back as \"%s\"", bytes, back);
        free(back);
    }
    td_token_list_free(&got);
    got = encode(t, bytes, json_string_length(text), true);
    for (size_t i = 0; i < json_array_size(front); i++)
        assert_true(i < got.n && got.ids[i] == json_integer_value(json_array_get(front, i)));
    check_ids(&got, json_array_size(front), json_array_get(row, 1), bytes);
    td_token_list_free(&got);
}

/* TIKTOKEN_JSON: another file of this form. */
static void as_the_library_does(void **state)
{
    (void)state;
    const char *other = getenv("TIKTOKEN_JSON");
    json_t *answers = other ? load_answers(other) : json_incref(root);
    const json_t *cases = json_object_get(answers, "cases"),
                 *list = json_object_get(answers, "ranks");
    size_t n_texts = 0;
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *c = json_array_get(cases, i), *config = json_object_get(c, "config"),
                     *texts = json_object_get(c, "texts");
        const char *name = json_string_value(json_object_get(config, "tokenizer_class"));
        struct td_tokenizer *t = make(json_string_value(list), json_string_length(list), config);
        for (size_t k = 0; k < json_array_size(texts); k++, n_texts++)
            check_text(t, json_array_get(texts, k), json_object_get(c, "front"),
                       strcmp(name, "QWenTokenizer") == 0);
        td_tokenizer_free(t);
    }
    print_message("%zu texts\n", n_texts);
    assert_true(json_array_size(cases) == 3 && n_texts >= 180);
    json_decref(answers);
}

/* The configs of the file by class. */
static const json_t *config_of(const char *name)
{
    const json_t *cases = json_object_get(root, "cases");
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *config = json_object_get(json_array_get(cases, i), "config");
        if (!strcmp(json_string_value(json_object_get(config, "tokenizer_class")), name))
            return config;
    }
    fail_msg("no config of %s", name);
    return NULL;
}

static void special_tokens(void **state)
{
    (void)state;
    struct td_tokenizer *t = make(ranks, n_ranks, config_of("TikTokenTokenizer"));
    int32_t n = td_tokenizer_vocab(t) - 256;
    char name[64];
    assert_int_equal(td_tokenizer_token_id(t, "[BOS]"), n);
    assert_int_equal(td_tokenizer_token_id(t, "<|call|>"), n + 9);
    snprintf(name, sizeof name, "<|reserved_token_%d|>", n + 3);
    assert_int_equal(td_tokenizer_token_id(t, name), n + 3);
    assert_true(td_tokenizer_is_special(t, n) && td_tokenizer_is_special(t, n + 3));
    assert_false(td_tokenizer_is_special(t, n + 9));
    td_tokenizer_free(t);
    t = make(ranks, n_ranks, config_of("QWenTokenizer"));
    assert_int_equal(td_tokenizer_token_id(t, "<|im_end|>"), n + 2);
    assert_int_equal(td_tokenizer_token_id(t, "<|extra_204|>"), n + 207);
    assert_int_equal(td_tokenizer_vocab(t), n + 208);
    td_tokenizer_free(t);
}

/* ---- long texts of Kimi-K2 ------------------------------------------------------------------- */

static void add_ids(const struct td_tokenizer *t, const char *text, size_t n,
                    struct td_token_list *list)
{
    struct td_token_list more = encode(t, text, n, false);
    for (size_t i = 0; i < more.n; i++)
        assert_int_equal(td_token_list_add(list, more.ids[i]), TD_OK);
    td_token_list_free(&more);
}

/* The ids of each piece alone, of a text whose white space is ASCII's, as Kimi-K2's code cuts it:
 * slices of 400,000 characters, and in each of them runs of at most 25,000. */
static void add_cut(const struct td_tokenizer *t, const char *text, size_t n,
                    struct td_token_list *list)
{
    int n_slice = 0, n_run = 0;
    bool in_space = false;
    size_t piece = 0;
    for (size_t at = 0; at < n; at++) {
        unsigned char c = (unsigned char)text[at];
        bool is_space = (c >= 9 && c <= 13) || (c >= 0x1c && c <= 0x20);
        if ((c & 0xc0) == 0x80) continue; /* inside a character */
        if (n_slice == 400000) {
            add_ids(t, text + piece, at - piece, list);
            piece = at, n_slice = 0;
        }
        n_run = n_slice > 0 && is_space == in_space ? n_run + 1 : 1;
        if (n_run > 25000) {
            add_ids(t, text + piece, at - piece, list);
            piece = at, n_run = 1;
        }
        in_space = is_space;
        n_slice++;
    }
    add_ids(t, text + piece, n - piece, list);
}

/* A text of parts, each repeated; the caller frees. */
struct part {
    const char *text;
    int n;
};
static char *join(const struct part *parts, size_t n_parts, int n_times, size_t *ret_n)
{
    size_t n = 0, at = 0;
    for (size_t i = 0; i < n_parts; i++) n += (size_t)parts[i].n * strlen(parts[i].text);
    char *text = malloc(n * (size_t)n_times + 1);
    assert_non_null(text);
    for (size_t i = 0; i < n_parts * (size_t)n_times; i++)
        for (int k = 0; k < parts[i % n_parts].n; k++, at += strlen(parts[i % n_parts].text))
            memcpy(text + at, parts[i % n_parts].text, strlen(parts[i % n_parts].text));
    *ret_n = at;
    return text;
}

/* same: the ids are those of the pieces. The list has one more token: a space and a tab. */
static void check_long(const char *config, const struct part *parts, size_t n_parts, int n_times,
                       bool same)
{
    char *list = malloc(n_ranks + 32);
    int n_lines = 0;
    assert_non_null(list);
    for (size_t i = 0; i < n_ranks; i++) n_lines += ranks[i] == '\n';
    snprintf(list, n_ranks + 32, "%sIAk= %d\n", ranks, n_lines);
    json_t *json = json_loads(config, 0, NULL);
    struct td_tokenizer *t = make(list, strlen(list), json);
    json_decref(json);
    free(list);
    struct td_token_list want = {0};
    size_t n;
    char *text = join(parts, n_parts, n_times, &n);
    struct td_token_list got = encode(t, text, n, false);
    add_cut(t, text, n, &want);
    bool is = got.n == want.n && memcmp(got.ids, want.ids, got.n * sizeof *got.ids) == 0;
    if (is != same)
        fail_msg("%.40s: %zu bytes that begin with \"%.8s\": %zu ids, of its pieces %zu", config, n,
                 text, got.n, want.n);
    td_token_list_free(&got), td_token_list_free(&want);
    td_tokenizer_free(t);
    free(text);
}

#define KIMI                                                                                       \
    "{\"tokenizer_class\":\"TikTokenTokenizer\","                                                  \
    "\"auto_map\":{\"AutoTokenizer\":[\"tokenization_kimi.TikTokenTokenizer\",null]}}"
#define GLM "{\"tokenizer_class\":\"ChatGLM4Tokenizer\""

/* The 25,001st character of a run, and the 400,001st of all, is inside a token: the library alone
 * cuts nothing there, and gives other ids. */
static void long_texts_are_cut(void **state)
{
    (void)state;
    static const struct part letters[] = {{"the", 8332}, {"x", 1}, {"quick", 1}},
                             wide[] = {{"\u65e5\u672cx", 8333}, {"\u65e5\u672c", 1}},
                             spaces[] = {{"a", 1}, {"\x1c", 1}, {" ", 24999}, {"\t", 1}, {" b", 1}},
                             words[] = {
                                 {"fox", 1}, {" quick", 1}, {"  ", 1}, {"jumps", 1}, {" ", 1}};
    for (int is_kimi = 0; is_kimi < 2; is_kimi++) {
        const char *config = is_kimi ? KIMI : GLM "}";
        check_long(config, letters, 3, 1, is_kimi);
        check_long(config, spaces, 5, 1, is_kimi);
        check_long(config, words, 5, 25001, is_kimi);
        check_long(config, wide, 2, 3, is_kimi);
    }
}

/* text NULL: the file's ranks. config: JSON, in which $ stands for the first id behind them. */
static void refuses(const char *text, const char *config, const char *says)
{
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    json_t *json = config ? json_loads(config, 0, NULL) : NULL;
    assert_true(!config || json);
    td_status s = td_tokenizer_from_ranks(text ? text : ranks, text ? strlen(text) : n_ranks, json,
                                          "tiktoken.model", &t, &err);
    json_decref(json);
    if (s == TD_OK) fail_msg("%s was taken, must say %s", config ? config : "no config", says);
    if (!strstr(err.msg, says)) fail_msg("says %s, must say %s", err.msg, says);
}

static void bad_configs(void **state)
{
    (void)state;
    refuses(NULL, NULL, "a list of tiktoken's ranks, which does not say how texts are split");
    refuses(NULL, "[]", "tokenizer_config.json is no object");
    refuses(NULL, "{\"tokenizer_class\":\"PreTrainedTokenizerFast\"}",
            "not known for tokenizer_class \"PreTrainedTokenizerFast\"");
    refuses(NULL, "{\"tokenizer_class\":\"TikTokenTokenizer\"}", "auto_map \"\"");
    refuses(NULL,
            "{\"tokenizer_class\":\"TikTokenTokenizer\",\"auto_map\":{\"AutoTokenizer\":"
            "[\"tokenization_mine.TikTokenTokenizer\",null]}}",
            "auto_map \"tokenization_mine.TikTokenTokenizer\"");
    refuses(NULL, GLM ",\"do_lower_case\":true}", "do_lower_case true is not supported");
    refuses(NULL, GLM ",\"extra_vocab_file\":\"more.tiktoken\"}", "extra_vocab_file");
    refuses(NULL, GLM ",\"added_tokens_decoder\":[]}", "must be an object");
    refuses(NULL, GLM ",\"added_tokens_decoder\":{\"5\":{\"content\":\"<x>\"}}}",
            "\"<x>\" has the id 5, a rank's");
    refuses(NULL, GLM ",\"added_tokens_decoder\":{\"9999\":{\"content\":\"\"}}}", "has no text");
    refuses(NULL, GLM ",\"added_tokens_decoder\":{\"9999\":{\"content\":\"<x>\",\"lstrip\":true}}}",
            "lstrip and rstrip are not supported");
    refuses(NULL, GLM ",\"added_tokens_decoder\":{\"9999\":{\"content\":\"[gMASK]\"}}}",
            "\"[gMASK]\" has two ids");
}

static void bad_lists(void **state)
{
    (void)state;
    static const struct {
        const char *line, *says;
    } lines[] = {
        {"QUI= 0\n", "belongs to both"},    {"IQ== 9999\n", "has two ids"},
        {"QUI 999\n", "must be a token"},   {"QU=C 999\n", "must be a token"},
        {"Q U= 999\n", "must be a token"},  {"QUI=\n", "must be a token"},
        {"QUI= 9x\n", "must be a token"},   {"QUI= -1\n", "must be a token"},
        {"QUI= 2097152\n", "a rank below"}, {"QUI= 99999999999\n", "a rank below"},
        {"==== 999\n", "must be a token"},  {" 999\n", "must be a token"},
        {"QUJDQUJD 99999\n", "is missing"},
    };
    char *text = malloc(n_ranks + 64);
    assert_non_null(text);
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        snprintf(text, n_ranks + 64, "%s%s", ranks, lines[i].line);
        refuses(text, GLM "}", lines[i].says);
    }
    char *longer = malloc(800);
    assert_non_null(longer);
    memset(longer, 'Q', 800);
    memcpy(longer + 700, " 0", 3); /* 525 bytes */
    refuses(longer, GLM "}", "1 to 512 bytes");
    refuses("QQ== 0\n", GLM "}", "no token is the byte 0x00");
    refuses("", GLM "}", "no token is the byte 0x00");
    free(text), free(longer);
}

/* Line ends of other systems, empty lines and none at the end change nothing. */
static void other_line_ends(void **state)
{
    (void)state;
    char *text = malloc(3 * n_ranks);
    size_t n = 0;
    assert_non_null(text);
    for (size_t i = 0; i < n_ranks; i++) {
        if (ranks[i] == '\n') text[n++] = '\r';
        text[n++] = ranks[i];
        if (ranks[i] == '\n' && i % 7 == 0) text[n++] = '\n';
    }
    json_t *config = json_loads(GLM "}", 0, NULL);
    struct td_tokenizer *a = make(ranks, n_ranks, config), *b = make(text, n - 2, config);
    assert_true(td_tokenizer_digest(a) == td_tokenizer_digest(b));
    td_tokenizer_free(a), td_tokenizer_free(b);
    json_decref(config);
    free(text);
}

/* ---- directories ----------------------------------------------------------------------------- */

static void write_file(const char *dir, const char *name, const char *bytes, size_t n)
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
    static const char *const files[] = {"tokenizer.model", "tiktoken.model", "qwen.tiktoken"},
                             *const names[] = {"ChatGLM4Tokenizer", "TikTokenTokenizer",
                                               "QWenTokenizer"};
    char dir[] = "/tmp/tandem_ranks_XXXXXX", path[300];
    assert_non_null(mkdtemp(dir));
    for (int i = 0; i < 3; i++) {
        struct td_tokenizer *t = NULL;
        struct td_err err = {0};
        char *config = json_dumps(config_of(names[i]), 0);
        write_file(dir, files[i], ranks, n_ranks);
        write_file(dir, "tokenizer_config.json", config, strlen(config));
        if (td_tokenizer_load(dir, &t, &err)) fail_msg("%s", err.msg);
        assert_string_equal(td_tokenizer_file(t), files[i]);
        td_tokenizer_free(t);
        write_file(dir, "tokenizer_config.json", "{}", 2);
        assert_int_equal(td_tokenizer_load(dir, &t, &err), TD_ERR_UNSUPPORTED);
        assert_true(strstr(err.msg, files[i]) && strstr(err.msg, "tiktoken's ranks"));
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        assert_int_equal(unlink(path), 0);
        free(config);
    }
    snprintf(path, sizeof path, "%s/tokenizer_config.json", dir);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(dir), 0);
}

/* ---- published files ------------------------------------------------------------------------- */

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

/* Llama 3's list with the class that splits as Llama 3 does: llama.cpp's texts and ids. */
static void llama_3_as_llama_cpp(void **state)
{
    (void)state;
    static const char separator[] = "\n__ggml_vocab_test__\n";
    size_t n_list, n_in, n_out, n_texts = 0;
    char *list = read_data("tokenizer-models/llama3/tokenizer.model", &n_list),
         *in = read_data("llama-cpp-vocabs/ggml-vocab-llama-bpe.gguf.inp", &n_in),
         *out = read_data("llama-cpp-vocabs/ggml-vocab-llama-bpe.gguf.out", &n_out);
    json_t *config = json_loads(GLM "}", 0, NULL);
    struct td_tokenizer *t = make(list, n_list, config);
    assert_int_equal(td_tokenizer_vocab(t), 128014);
    char *line = out, *stop;
    for (char *at = in, *next; at; at = next, n_texts++) {
        next = strstr(at, separator);
        size_t n = next ? (size_t)(next - at) : strlen(at);
        if (next) next += sizeof separator - 1;
        json_t *ids = json_array();
        for (; *line && *line != '\n'; line = stop) {
            long id = strtol(line, &stop, 10);
            if (stop == line) break;
            json_array_append_new(ids, json_integer(id));
            while (*stop == ' ') stop++;
        }
        line += *line == '\n';
        struct td_token_list got = encode(t, at, n, false);
        check_ids(&got, 0, ids, at);
        td_token_list_free(&got);
        json_decref(ids);
    }
    assert_int_equal(n_texts, 47);
    td_tokenizer_free(t);
    json_decref(config);
    free(list), free(in), free(out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_the_library_does), cmocka_unit_test(long_texts_are_cut),
        cmocka_unit_test(special_tokens),      cmocka_unit_test(bad_configs),
        cmocka_unit_test(bad_lists),           cmocka_unit_test(other_line_ends),
        cmocka_unit_test(directories),         cmocka_unit_test(llama_3_as_llama_cpp)};
    return cmocka_run_group_tests(tests, setup, teardown);
}
