/* model_names_test.c - names of models in options: what is a name, a path, neither. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "router/model_names.h"

#define LEN(a) ((int)(sizeof(a) / sizeof *(a)))

static struct router_model_spec specs[ROUTER_MAX_MODELS];

static uint32_t parse(const char *models, const char *served)
{
    uint32_t n = 99;
    struct td_err err = {0};
    if (router_model_specs_parse(models, served, specs, &n, &err)) fail_msg("refused: %s", err.msg);
    return n;
}

static void specs_are_read(void **state)
{
    (void)state;
    assert_int_equal(parse("", ""), 0);
    assert_int_equal(parse("/m/one", ""), 1);
    assert_string_equal(specs[0].dir, "/m/one");
    assert_int_equal(specs[0].names.n, 0);
    assert_int_equal(parse("/m/one\nb c,org/a=/m/two\n./x=y\n/m/z=1", "first,eins"), 4);
    assert_int_equal(specs[0].names.n, 2);
    assert_string_equal(specs[0].names.names[0], "first");
    assert_string_equal(specs[0].names.names[1], "eins");
    assert_int_equal(specs[1].names.n, 2);
    assert_string_equal(specs[1].names.names[1], "org/a");
    assert_string_equal(specs[1].dir, "/m/two");
    assert_string_equal(specs[2].dir, "./x=y");
    assert_int_equal(specs[2].names.n, 0);
    assert_string_equal(specs[3].dir, "/m/z=1");
}

/* A directory that is there keeps its name, whatever the name looks like. */
static void a_path_that_exists_is_a_path(void **state)
{
    (void)state;
    char dir[] = "model_names_test.XXXXXX";
    assert_non_null(mkdtemp(dir));
    assert_int_equal(chdir(dir), 0);
    assert_int_equal(mkdir("a=b", 0700), 0);
    assert_int_equal(parse("a=b\na=c", ""), 2);
    assert_string_equal(specs[0].dir, "a=b");
    assert_string_equal(specs[1].dir, "c");
    assert_int_equal(rmdir("a=b"), 0);
    assert_int_equal(chdir(".."), 0);
    assert_int_equal(rmdir(dir), 0);
}

static void what_is_wrong_is_named(void **state)
{
    (void)state;
    char many[2 * ROUTER_MAX_MODELS + 3] = "", long_name[300], aliases[3 * 20] = "";
    for (int i = 0; i <= ROUTER_MAX_MODELS; i++)
        snprintf(many + strlen(many), 3, "%sd", i ? "\n" : "");
    for (int i = 0; i <= ROUTER_MAX_MODEL_NAMES; i++)
        snprintf(aliases + strlen(aliases), 4, "%s%c", i ? "," : "", 'a' + i);
    memset(long_name, 'n', sizeof long_name - 1);
    memcpy(long_name + sizeof long_name - 3, "=d", 3);
    const struct {
        const char *models, *served, *says;
    } cases[] = {
        {"", "a", "model is empty"},           {"a=/m", "b", "give one of them"},
        {"a=", "", "has no directory"},        {"a\n\nb", "", "has no directory"},
        {"a,,b=/m", "", "must be 1..255"},     {"a,b,a=/m", "", "given twice"},
        {"/m", "a,", "must be 1..255"},        {"/m", "a\tb", "byte 9"},
        {"/m", aliases, "more than 16 names"}, {long_name, "", "must be 1..255"},
        {many, "", "more than 32 times"},
    };
    for (int i = 0; i < LEN(cases); i++) {
        uint32_t n = 99;
        struct td_err err = {0};
        td_status s = router_model_specs_parse(cases[i].models, cases[i].served, specs, &n, &err);
        if (s >= 0 || !strstr(err.msg, cases[i].says) || n != 99)
            fail_msg("case %d: status %d, n %u: %s", i, s, n, err.msg);
    }
}

static void options_of_one_model(void **state)
{
    (void)state;
    struct router_model_names names = {0};
    char value[16];
    struct td_err err = {0};
    const struct {
        const char *lines, *names, *value;
    } cases[] = {
        {"", "a", ""},          {"f", "a", "f"},        {"a=g\nf", "a", "g"},
        {"f\na=g", "a,b", "g"}, {"f\nb=h", "a,b", "h"}, {"f\nc=h", "a,b", "f"},
        {"c=h", "a,b", ""},     {"/x=y", "a", "/x=y"},
    };
    for (int i = 0; i < LEN(cases); i++) {
        assert_int_equal(
            router_model_names_parse(cases[i].names, strlen(cases[i].names), &names, &err), TD_OK);
        assert_int_equal(router_model_option(cases[i].lines, &names, value, sizeof value, &err),
                         TD_OK);
        if (strcmp(value, cases[i].value)) fail_msg("case %d: \"%s\"", i, value);
    }
    assert_int_equal(router_model_option("0123456789abcdef", &names, value, sizeof value, &err),
                     TD_ERR_LIMIT);
    const char *at = "f\na=g";
    char name[ROUTER_MAX_MODEL_PATH];
    assert_true(router_model_option_name(&at, name));
    assert_string_equal(name, "");
    assert_true(router_model_option_name(&at, name));
    assert_string_equal(name, "a");
    assert_false(router_model_option_name(&at, name));
}

/* A worker's word never leads out of model_dir. */
static void names_that_may_be_directories(void **state)
{
    (void)state;
    static const char *const plain[] = {"a", "Llama-3.1-8B", "7b_x", "a..b"},
                             *const refused[] = {"",    ".",   "..", ".x",      "-x",
                                                 "_x",  "a/b", "/a", "../a",    "a\\b",
                                                 "a b", "a\n", "a%", "\xc3\xa4"};
    char name[200];
    for (int i = 0; i < LEN(plain); i++) assert_true(router_model_name_is_plain(plain[i]));
    for (int i = 0; i < LEN(refused); i++) assert_false(router_model_name_is_plain(refused[i]));
    memset(name, 'a', sizeof name);
    name[127] = 0;
    assert_true(router_model_name_is_plain(name));
    name[127] = 'a';
    name[128] = 0;
    assert_false(router_model_name_is_plain(name));
}

static void log_paths(void **state)
{
    (void)state;
    char path[32];
    struct td_err err = {0};
    assert_int_equal(router_model_log_path("d/log", "a/b_c%", path, sizeof path, &err), TD_OK);
    assert_string_equal(path, "d/log.a%2Fb_c%25");
    assert_int_equal(
        router_model_log_path("d/log", "0123456789012345678901234567", path, sizeof path, &err),
        TD_ERR_LIMIT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(specs_are_read),
        cmocka_unit_test(a_path_that_exists_is_a_path),
        cmocka_unit_test(what_is_wrong_is_named),
        cmocka_unit_test(options_of_one_model),
        cmocka_unit_test(names_that_may_be_directories),
        cmocka_unit_test(log_paths),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
