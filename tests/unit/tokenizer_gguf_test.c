/* tokenizer_gguf_test.c - tokenizers from GGUF files: llama.cpp's vectors for its vocabularies, and
 * files that are refused by name. */
#include "tests/unit/gguf_file.h"

#include <unistd.h>

#include "common/base/mem.h"
#include "common/text/chat_template.h"
#include "common/text/tokenizer.h"
#include "common/text/tokenizer_gguf.h"

#define SEPARATOR "\n__ggml_vocab_test__\n"
#define MARK "\xe2\x96\x81"

static char *data_path(char buf[512], const char *name, const char *end)
{
    const char *root = getenv("TANDEM_DATA");
    snprintf(buf, 512, "%s/llama-cpp-vocabs/ggml-vocab-%s.gguf%s",
             root && *root ? root : "../shared/data", name, end);
    return buf;
}

/* The texts of NAME.gguf.inp give the ids of NAME.gguf.out. */
static void check_vectors(const char *name)
{
    char path[512], *in = NULL, *out = NULL;
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    size_t n_in, n_out, n_cases = 0;
    if (td_tokenizer_load(data_path(path, name, ""), &t, &err)) fail_msg("%s", err.msg);
    if (td_file_read(data_path(path, name, ".inp"), (size_t)1 << 20, &in, &n_in, &err) ||
        td_file_read(data_path(path, name, ".out"), (size_t)1 << 20, &out, &n_out, &err))
        fail_msg("%s", err.msg);
    char *line = out;
    for (char *text = in; text; n_cases++) {
        char *separator = strstr(text, SEPARATOR), *newline = strchr(line, '\n'), *number = line;
        size_t n = separator ? (size_t)(separator - text) : strlen(text), at = 0;
        struct td_token_list got = {0};
        if (newline) *newline = '\0';
        if (td_tokenizer_encode(t, text, n, false, 1 << 20, &got, &err)) fail_msg("%s", err.msg);
        for (char *end; (void)strtol(number, &end, 10), end != number; number = end, at++)
            if (at >= got.n || got.ids[at] != (int32_t)strtol(number, NULL, 10))
                fail_msg("%s: text %zu: id %zu differs", name, n_cases, at);
        assert_int_equal(at, got.n);
        td_token_list_free(&got);
        text = separator ? separator + strlen(SEPARATOR) : NULL;
        line = newline ? newline + 1 : line + strlen(line);
    }
    assert_int_equal(n_cases, 47);
    free(in), free(out);
    td_tokenizer_free(t);
}

static void vectors_of_llama_cpp(void **state)
{
    (void)state;
    char path[512];
    if (access(data_path(path, "gpt-2", ""), R_OK) != 0) {
        print_message("skipped: %s is absent\n", path);
        skip();
    }
    check_vectors("llama-spm");
    check_vectors("phi-3");
    check_vectors("gpt-2");
}

/* A SentencePiece vocabulary of a few tokens; scores as given. */
static void sentencepiece(struct gf *f, const float *scores)
{
    static const char *const tokens[] = {"<unk>", "<s>", "</s>",   "a",      "b",      "c",  "ab",
                                         "bc",    MARK,  MARK "a", "<0xC3>", "<0xA9>", "<x>"};
    const int32_t types[] = {2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 6, 6, 4};
    gf_str(f, "tokenizer.ggml.model", "llama");
    gf_strs(f, "tokenizer.ggml.tokens", tokens, 13);
    gf_array(f, "tokenizer.ggml.token_type", TD_GGUF_I32, 13, types, sizeof types);
    gf_array(f, "tokenizer.ggml.scores", TD_GGUF_F32, 13, scores, 13 * 4);
}

static struct td_tokenizer *load(struct gf *f, td_status want, const char *part)
{
    struct td_gguf *g = NULL;
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    size_t n;
    uint8_t *bytes = gf_finish(f, &n);
    if (td_gguf_parse(bytes, n, "file", &g, &err)) fail_msg("%s", err.msg);
    td_status s = td_tokenizer_from_gguf(g, "file", &t, &err);
    if (s != want || !strstr(err.msg, part))
        fail_msg("%s (%s), must be %s with \"%s\"", td_status_name(s), err.msg,
                 td_status_name(want), part);
    td_gguf_close(g);
    free(bytes); /* nothing of the file is needed any more */
    return t;
}

static void check_ids(struct td_tokenizer *t, const char *text, bool special, const char *want)
{
    struct td_token_list got = {0};
    char ids[200] = "";
    size_t at = 0;
    struct td_err err = {0};
    if (td_tokenizer_encode(t, text, strlen(text), special, 100, &got, &err))
        fail_msg("%s", err.msg);
    for (size_t i = 0; i < got.n; i++)
        at += (size_t)snprintf(ids + at, sizeof ids - at, "%s%d", i ? " " : "", got.ids[i]);
    assert_string_equal(ids, want);
    td_token_list_free(&got);
}

static void the_highest_score_joins_first(void **state)
{
    (void)state;
    const float bc_first[] = {0, 0, 0, -9, -9, -9, -2, -1, -9, -3, 0, 0, 0},
                equal[] = {0, 0, 0, -9, -9, -9, -1, -1, -9, -1, 0, 0, 0};
    struct gf f = {0};
    sentencepiece(&f, bc_first);
    struct td_tokenizer *t = load(&f, TD_OK, "");
    check_ids(t, "abc", false, "9 7");  /* _a bc */
    check_ids(t, "abc", true, "1 9 7"); /* BOS by default */
    check_ids(t, "ab", false, "8 6");   /* ab before _a */
    check_ids(t, "\xc3\xa9", false, "8 10 11");
    check_ids(t, "z", false, "8 0");
    check_ids(t, "a<x>a", false, "9 12 9"); /* every text between added tokens gets its space */
    check_ids(t, "a</s>", false, "9 2");
    check_ids(t, "", false, "");
    char *text;
    size_t n;
    const int32_t ids[] = {1, 9, 7, 12};
    assert_int_equal(td_tokenizer_decode(t, ids, 4, true, &text, &n, NULL), TD_OK);
    assert_string_equal(text, "abc<x>");
    free(text);
    td_tokenizer_free(t);
    sentencepiece(&f, equal);
    t = load(&f, TD_OK, "");
    check_ids(t, "abc", false, "9 7"); /* of equal scores the leftmost: _a, then bc */
    td_tokenizer_free(t);
    sentencepiece(&f, equal);
    gf_bool(&f, "tokenizer.ggml.add_space_prefix", 0);
    gf_bool(&f, "tokenizer.ggml.add_bos_token", 0);
    gf_bool(&f, "tokenizer.ggml.add_eos_token", 1);
    t = load(&f, TD_OK, "");
    check_ids(t, "abc", true, "6 5 2");
    td_tokenizer_free(t);
}

static void byte_level(struct gf *f, const char *pre)
{
    /* U+0120 stands for a space; its last byte and "a" in octal, or they were one number */
    static const char *const tokens[] = {"a", "1", "11", "111", "\xc4\240", "\xc4\240a", "<e>"};
    static const char *const merges[] = {"1 1", "11 1", "\xc4\xa0 a"};
    const int32_t types[] = {1, 1, 1, 1, 1, 1, 3};
    gf_str(f, "tokenizer.ggml.model", "gpt2");
    if (pre) gf_str(f, "tokenizer.ggml.pre", pre);
    gf_strs(f, "tokenizer.ggml.tokens", tokens, 7);
    gf_strs(f, "tokenizer.ggml.merges", merges, 3);
    gf_array(f, "tokenizer.ggml.token_type", TD_GGUF_I32, 7, types, sizeof types);
    gf_u32(f, "tokenizer.ggml.bos_token_id", 6);
}

static void splitters_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *pre, *ids;
    } rows[] = {
        {"llama-bpe", "6 3 1 5"}, {"llama3", "6 3 1 5"},     {"llama-v3", "6 3 1 5"},
        {"qwen2", "1 1 1 1 5"},   {"qwen35", "1 1 1 1 5"},   {"deepseek-r1-qwen", "1 1 1 1 5"},
        {"gpt-4o", "3 1 5"},      {"tekken", "6 1 1 1 1 5"}, {"dbrx", "3 1 5"},
        {"smaug-bpe", "3 1 5"},   {"gpt-2", "2 2 5"},        {"phi-2", "2 2 5"}};
    struct gf f = {0};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        byte_level(&f, rows[i].pre);
        struct td_tokenizer *t = load(&f, TD_OK, "");
        check_ids(t, "1111 a", true, rows[i].ids);
        td_tokenizer_free(t);
    }
    byte_level(&f, NULL);
    load(&f, TD_ERR_UNSUPPORTED, "tokenizer.ggml.pre is absent, which this version does not split");
    byte_level(&f, "default");
    load(&f, TD_ERR_UNSUPPORTED, "tokenizer.ggml.pre is default");
    byte_level(&f, "smollm");
    load(&f, TD_ERR_UNSUPPORTED, "tokenizer.ggml.pre is smollm");
    byte_level(&f, "deepseek-v3");
    load(&f, TD_ERR_UNSUPPORTED, "tokenizer.ggml.pre is deepseek-v3");
}

static void vocabularies_that_lie(void **state)
{
    (void)state;
    static const float scores[13] = {0};
    static const char *const two[] = {"a", "b"}, *const same[] = {"a", "a"},
                             *const bad[] = {"a", "\xff"}, *const no_space[] = {"ab"},
                             *const no_token[] = {"a z"};
    struct gf f = {0};
    gf_str(&f, "tokenizer.ggml.model", "bert");
    load(&f, TD_ERR_UNSUPPORTED, "tokenizer.ggml.model is bert, must be llama");
    load(&f, TD_ERR_UNSUPPORTED, "tokenizer.ggml.model is absent");
    gf_str(&f, "tokenizer.ggml.model", "llama");
    load(&f, TD_ERR_CORRUPT, "tokenizer.ggml.tokens has 0 entries, must have 1 to");
    gf_str(&f, "tokenizer.ggml.model", "llama");
    gf_strs(&f, "tokenizer.ggml.tokens", two, 2);
    load(&f, TD_ERR_CORRUPT, "tokenizer.ggml.scores is missing");
    gf_str(&f, "tokenizer.ggml.model", "llama");
    gf_strs(&f, "tokenizer.ggml.tokens", two, 2);
    gf_array(&f, "tokenizer.ggml.scores", TD_GGUF_F32, 3, scores, 12);
    load(&f, TD_ERR_CORRUPT,
         "tokenizer.ggml.scores has 3 entries, must have one for each of the 2");
    gf_str(&f, "tokenizer.ggml.model", "llama");
    gf_strs(&f, "tokenizer.ggml.tokens", same, 2);
    gf_array(&f, "tokenizer.ggml.scores", TD_GGUF_F32, 2, scores, 8);
    load(&f, TD_ERR_CORRUPT, "tokenizer.ggml.tokens");
    gf_str(&f, "tokenizer.ggml.model", "llama");
    gf_strs(&f, "tokenizer.ggml.tokens", bad, 2);
    load(&f, TD_ERR_UNSUPPORTED, "tokenizer.ggml.tokens[1] is not valid UTF-8");
    gf_str(&f, "tokenizer.ggml.model", "llama");
    gf_strs(&f, "tokenizer.ggml.tokens", two, 2);
    gf_array(&f, "tokenizer.ggml.scores", TD_GGUF_F32, 2, "\x00\x00\xc0\x7f\x00\x00\xc0\x7f", 8);
    load(&f, TD_ERR_CORRUPT, "tokenizer.ggml.scores[0] is no number");
    gf_str(&f, "tokenizer.ggml.model", "llama");
    gf_strs(&f, "tokenizer.ggml.tokens", two, 2);
    gf_array(&f, "tokenizer.ggml.scores", TD_GGUF_F32, 2, scores, 8);
    gf_array(&f, "tokenizer.ggml.token_type", TD_GGUF_I32, 2, "\x07\x00\x00\x00\x01\x00\x00\x00",
             8);
    load(&f, TD_ERR_CORRUPT, "tokenizer.ggml.token_type[0] is 7, must be in 1..6");
    gf_str(&f, "tokenizer.ggml.model", "llama");
    gf_strs(&f, "tokenizer.ggml.tokens", two, 2);
    gf_array(&f, "tokenizer.ggml.scores", TD_GGUF_F32, 2, scores, 8);
    gf_u32(&f, "tokenizer.ggml.bos_token_id", 2);
    load(&f, TD_ERR_INVALID, "tokenizer.ggml.bos_token_id is 2, must be in -1..1");
    char long_text[514] = {0};
    memset(long_text, 'x', 513);
    const char *const too_long[] = {"a", long_text};
    gf_str(&f, "tokenizer.ggml.model", "llama");
    gf_strs(&f, "tokenizer.ggml.tokens", too_long, 2);
    gf_array(&f, "tokenizer.ggml.scores", TD_GGUF_F32, 2, scores, 8);
    load(&f, TD_ERR_LIMIT, "tokenizer.ggml.tokens[1] has 513 bytes, at most 512");
    for (int i = 0; i < 2; i++) {
        gf_str(&f, "tokenizer.ggml.model", "gpt2");
        gf_str(&f, "tokenizer.ggml.pre", "gpt-2");
        gf_strs(&f, "tokenizer.ggml.tokens", two, 2);
        gf_strs(&f, "tokenizer.ggml.merges", i ? no_token : no_space, 1);
        load(&f, TD_ERR_CORRUPT,
             i ? "tokenizer.ggml.merges[0]: \"a z\" or one of its parts is no token"
               : "tokenizer.ggml.merges[0] must be two texts with a space between");
    }
}

/* The template of the file, with the texts of its special tokens. */
static void chat_template(void **state)
{
    (void)state;
    char path[] = "/tmp/tandem-gguf-chat-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    struct gf f = {0};
    byte_level(&f, "gpt-2");
    gf_u32(&f, "tokenizer.ggml.eos_token_id", 0);
    gf_str(
        &f, "tokenizer.chat_template",
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{{ eos_token "
        "}}{% endfor %}");
    gf_write(&f, path);
    struct td_chat_template *t = NULL;
    struct td_err err = {0};
    if (td_chat_template_load(path, &t, &err)) fail_msg("%s", err.msg);
    struct td_chat_message m = {.role = "user", .content = "hi", .content_bytes = 2};
    char *text;
    size_t n;
    if (td_chat_template_render(t, &(struct td_chat){.messages = &m, .n_messages = 1}, &text, &n,
                                &err))
        fail_msg("%s", err.msg);
    assert_string_equal(text, "<e><|im_start|>hi<|im_end|>a");
    free(text);
    td_chat_template_free(t);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(vectors_of_llama_cpp), cmocka_unit_test(the_highest_score_joins_first),
        cmocka_unit_test(splitters_by_name),    cmocka_unit_test(vocabularies_that_lie),
        cmocka_unit_test(chat_template),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
