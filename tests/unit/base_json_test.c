/* base_json_test.c - fields, bounds, messages, and numbers too big for an integer. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"

static json_t *parse(const char *text)
{
    json_t *root = NULL;
    struct td_err err;
    if (td_json_load_text(text, strlen(text), "test.json", &root, &err)) fail_msg("%s", err.msg);
    return root;
}

static void fields_are_read(void **state)
{
    (void)state;
    json_t *o =
        parse("{\"i\": -5, \"f\": 2.5, \"w\": 32000.0, \"b\": true, \"s\": \"text\", \"z\": null}");
    int64_t i = 0;
    double f = 0;
    bool b = false, present = false;
    const char *s = NULL;
    assert_int_equal(td_json_i64(o, "t", "i", -10, 10, &i, &present, NULL), TD_OK);
    assert_true(present && i == -5);
    assert_int_equal(td_json_i64(o, "t", "w", 0, 100000, &i, NULL, NULL), TD_OK);
    assert_int_equal(i, 32000);
    assert_int_equal(td_json_f64(o, "t", "f", 0, 10, &f, &present, NULL), TD_OK);
    assert_true(present && f == 2.5);
    assert_int_equal(td_json_f64(o, "t", "i", -10, 10, &f, NULL, NULL), TD_OK);
    assert_true(f == -5);
    assert_int_equal(td_json_bool(o, "t", "b", &b, &present, NULL), TD_OK);
    assert_true(present && b);
    assert_int_equal(td_json_str(o, "t", "s", &s, &present, NULL), TD_OK);
    assert_true(present);
    assert_string_equal(s, "text");

    static const char *const absent[] = {"z", "nowhere"}; /* null counts as absent: values stay */
    for (size_t k = 0; k < 2; k++) {
        i = 77, f = 7.5, b = true, s = "kept", present = true;
        assert_int_equal(td_json_i64(o, "t", absent[k], 0, 1, &i, &present, NULL), TD_OK);
        assert_true(!present && i == 77);
        assert_int_equal(td_json_f64(o, "t", absent[k], 0, 1, &f, &present, NULL), TD_OK);
        assert_true(!present && f == 7.5);
        assert_int_equal(td_json_bool(o, "t", absent[k], &b, &present, NULL), TD_OK);
        assert_true(!present && b);
        assert_int_equal(td_json_str(o, "t", absent[k], &s, &present, NULL), TD_OK);
        assert_true(!present);
        assert_string_equal(s, "kept");
    }
    json_decref(o);
}

static void wrong_fields_are_named(void **state)
{
    (void)state;
    json_t *o = parse("{\"i\": 11, \"h\": 2.5, \"t\": \"x\", \"n\": \"a\\u0000b\", \"l\": [1,2], "
                      "\"m\": 1e300, \"e\": 9223372036854775808.0}");
    int64_t i = 77;
    double f = 7.5;
    bool b = true;
    const char *s = "kept";
    struct td_err err;
    assert_int_equal(td_json_i64(o, "config.json", "i", 0, 10, &i, NULL, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "config.json: i is 11, must be an integer in 0..10");
    assert_int_equal(td_json_i64(o, "config.json", "h", 0, 10, &i, NULL, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "config.json: h is 2.5, must be an integer in 0..10");
    assert_int_equal(td_json_i64(o, "config.json", "t", 0, 10, &i, NULL, &err), TD_ERR_INVALID);
    assert_int_equal(td_json_i64(o, "config.json", "m", INT64_MIN, INT64_MAX, &i, NULL, &err),
                     TD_ERR_INVALID);
    /* 2^63 */
    assert_int_equal(td_json_i64(o, "config.json", "e", INT64_MIN, INT64_MAX, &i, NULL, &err),
                     TD_ERR_INVALID);
    assert_int_equal(td_json_f64(o, "config.json", "i", 0, 10.5, &f, NULL, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "config.json: i is 11, must be a number in 0..10.5");
    assert_int_equal(td_json_f64(o, "config.json", "t", 0, 10, &f, NULL, &err), TD_ERR_INVALID);
    assert_int_equal(td_json_bool(o, "config.json", "i", &b, NULL, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "config.json: i is 11, must be true or false");
    assert_int_equal(td_json_str(o, "config.json", "l", &s, NULL, &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "config.json: l is [1,2], must be a string without NUL");
    assert_int_equal(td_json_str(o, "config.json", "n", &s, NULL, &err), TD_ERR_INVALID);
    assert_true(i == 77 && f == 7.5 && b);
    assert_string_equal(s, "kept");
    json_decref(o);
}

static void long_values_are_cut_in_messages(void **state)
{
    (void)state;
    char text[400];
    memset(text, 'q', sizeof text);
    memcpy(text, "{\"k\": \"", 7);
    memcpy(text + 300, "\"}", 3);
    json_t *o = parse(text);
    bool b;
    struct td_err err;
    assert_int_equal(td_json_bool(o, "f", "k", &b, NULL, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "qqq..., must be true or false"));
    json_decref(o);
}

static void syntax_errors_name_the_line(void **state)
{
    (void)state;
    static const char *const bad[] = {"",
                                      "{",
                                      "{\"a\": }",
                                      "[1,\n2,\n,]",
                                      "{\"a\": 1} x",
                                      "\"text\"",
                                      "{\"a\": 1e999}",
                                      "{\"a\": \"\xff\"}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_t *root = NULL;
        struct td_err err;
        if (td_json_load_text(bad[i], strlen(bad[i]), "bad.json", &root, &err) != TD_ERR_INVALID)
            fail_msg("'%s' was taken", bad[i]);
        assert_null(root);
        assert_non_null(strstr(err.msg, "bad.json: line "));
    }
}

static void big_integers_become_reals_and_others_stay(void **state)
{
    (void)state;
    json_t *o = parse("{\"model_max_length\": 1000000000000000019884624838656, \"n\": 7, \"neg\": "
                      "-99999999999999999999,\n"
                      "\"s\": \"1000000000000000019884624838656 \\\" 99999999999999999999\", "
                      "\"max\": 999999999999999999,\n"
                      "\"r\": 0.33333333333333333333333, \"e\": 12345678901234567890e2}");
    assert_true(json_is_real(json_object_get(o, "model_max_length")));
    assert_true(json_real_value(json_object_get(o, "model_max_length")) == 1e30);
    assert_true(json_is_integer(json_object_get(o, "n")));
    assert_true(json_real_value(json_object_get(o, "neg")) == -1e20);
    assert_string_equal(json_string_value(json_object_get(o, "s")),
                        "1000000000000000019884624838656 \" 99999999999999999999");
    assert_true(json_integer_value(json_object_get(o, "max")) == 999999999999999999);
    assert_true(json_real_value(json_object_get(o, "r")) == 1.0 / 3.0);
    assert_true(json_real_value(json_object_get(o, "e")) == 12345678901234567890e2);
    json_decref(o);
}

static void files_are_bounded(void **state)
{
    (void)state;
    json_t *root = NULL;
    struct td_err err;
    assert_int_equal(td_json_load_file("no/such/file.json", 100, &root, &err), TD_ERR_NOT_FOUND);
    assert_non_null(strstr(err.msg, "no/such/file.json"));
    char path[] = "/tmp/td_json_test_XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    FILE *f = fdopen(fd, "w");
    fputs("{\"a\": [1, 2, 3]}", f);
    fclose(f);
    assert_int_equal(td_json_load_file(path, 15, &root, &err), TD_ERR_LIMIT);
    assert_null(root);
    assert_int_equal(td_json_load_file(path, 16, &root, &err), TD_OK);
    assert_int_equal(json_array_size(json_object_get(root, "a")), 3);
    json_decref(root);
    remove(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fields_are_read),
        cmocka_unit_test(wrong_fields_are_named),
        cmocka_unit_test(long_values_are_cut_in_messages),
        cmocka_unit_test(syntax_errors_name_the_line),
        cmocka_unit_test(big_integers_become_reals_and_others_stay),
        cmocka_unit_test(files_are_bounded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
