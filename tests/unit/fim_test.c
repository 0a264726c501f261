/* The prompt of a text with a gap: words of each family as their cards have them, each one token;
 * a tokenizer that has not all three is refused. */
#include <jansson.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/text/fim.h"

/* models/pocket's tokenizer with three more added tokens, from id 9001; NULL: fewer. */
static struct td_tokenizer *make(const char *const words[3])
{
    json_error_t e;
    json_t *root = json_load_file("models/pocket/tokenizer.json", 0, &e);
    assert_non_null(root);
    for (int i = 0; i < 3; i++)
        if (words[i])
            json_array_append_new(json_object_get(root, "added_tokens"),
                                  json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", 9001 + i,
                                            "content", words[i], "single_word", 0, "lstrip", 0,
                                            "rstrip", 0, "normalized", 0, "special", 1));
    char *text = json_dumps(root, 0);
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    if (td_tokenizer_parse(text, strlen(text), &t, &err)) fail_msg("%s", err.msg);
    free(text);
    json_decref(root);
    return t;
}

static const char *const families[][3] = {
    {"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"},
    {"<fim_prefix>", "<fim_suffix>", "<fim_middle>"},
    {"<fim-prefix>", "<fim-suffix>", "<fim-middle>"},
    {"<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"},
};

static void test_prompt(void **state)
{
    (void)state;
    static const char before[] = "def once(upon):\n    ", after[] = "\n    return a_time";
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        struct td_tokenizer *t = make(families[i]);
        struct td_token_list list = {0}, alone = {0};
        struct td_err err = {0};
        char *text = NULL, want[256];
        size_t n = 0;
        assert_int_equal(
            td_fim_prompt(t, before, sizeof before - 1, after, sizeof after - 1, &text, &n, &err),
            TD_OK);
        snprintf(want, sizeof want, "%s%s%s%s%s", families[i][0], before, families[i][1], after,
                 families[i][2]);
        assert_int_equal(n, strlen(want));
        assert_memory_equal(text, want, n);
        assert_int_equal(td_tokenizer_encode(t, text, n, false, 4096, &list, &err), TD_OK);
        assert_int_equal(
            td_tokenizer_encode(t, before, sizeof before - 1, false, 4096, &alone, &err), TD_OK);
        assert_int_equal(list.ids[0], 9001);
        assert_memory_equal(list.ids + 1, alone.ids, alone.n * sizeof *alone.ids);
        assert_int_equal(list.ids[1 + alone.n], 9002);
        assert_int_equal(list.ids[list.n - 1], 9003);
        td_token_list_free(&list);
        td_token_list_free(&alone);
        free(text);
        td_tokenizer_free(t);
    }
}

static void test_refused(void **state)
{
    (void)state;
    static const char *const missing[][3] = {
        {NULL, NULL, NULL},
        {"<|fim_prefix|>", "<|fim_suffix|>", NULL},
        {"<|fim_prefix|>", "<fim_suffix>", "<fim-middle>"},
    };
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) {
        struct td_tokenizer *t = make(missing[i]);
        struct td_err err = {0};
        char *text = NULL;
        size_t n = 0;
        assert_int_equal(td_fim_prompt(t, "a", 1, "b", 1, &text, &n, &err), TD_ERR_UNSUPPORTED);
        assert_non_null(strstr(err.msg, "suffix is not supported"));
        assert_null(text);
        td_tokenizer_free(t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prompt),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
