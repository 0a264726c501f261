/* base_options_test.c - precedence, spellings, bounds, messages, help. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "common/base/options.h"
#include "tests/unit/capture.h"

struct config {
    bool verbose;
    int64_t delta;
    uint64_t drain_timeout_ms, kv_memory;
    double ratio;
    const char *model, *dtype;
};

// clang-format off
static const struct td_option table[] = {
    {"verbose", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(struct config, verbose), "Say more."},
    {"delta", TD_OPT_I64, "-3", -10, 10, NULL, offsetof(struct config, delta), "A signed number."},
    {"drain_timeout_ms", TD_OPT_U64, "30000", 0, 600000, NULL,
     offsetof(struct config, drain_timeout_ms),
     "How long a drain\nmay take."},
    {"kv_memory", TD_OPT_SIZE, "1GiB", 1048576, 1e13, NULL, offsetof(struct config, kv_memory),
     "Memory for KV blocks."},
    {"ratio", TD_OPT_F64, "0.5", 0, 1, NULL, offsetof(struct config, ratio), "A share."},
    {"model", TD_OPT_STR, "models/pocket", 0, 0, NULL, offsetof(struct config, model),
     "Model folder."},
    {"dtype", TD_OPT_ENUM, "bf16", 0, 0, "f32|f16|bf16", offsetof(struct config, dtype),
     "Element type."},
    {"dtype", TD_OPT_ELSEWHERE, "", 0, 0, "f64|f8", 0, "`other` has that one"},
    TD_OPTION_ALIAS("precision", "dtype"),
    TD_OPTION_ALIAS("kv_bytes", "kv_memory"),
    TD_OPTION_ALIAS("kv_pool", "kv_memory"),
    TD_OPTION_ALIAS("chatty", "verbose"),
    {0},
};
// clang-format on

// clang-format off
static const struct td_option table_required[] = {
    {"model", TD_OPT_STR, NULL, 0, 0, NULL, offsetof(struct config, model), "Model folder."},
    {0},
};
// clang-format on

/* argv from a list that ends with NULL; the program's name is put before it. */
struct load {
    struct config config;
    const char *positional[4];
    size_t n_positional;
    struct td_err err;
    td_status status;
};

static struct load load_with(const struct td_option *t, const char *const *args)
{
    struct load l = {0};
    char *argv[16] = {(char *)(uintptr_t) "prog"};
    int argc = 1;
    for (; args[argc - 1]; argc++) argv[argc] = (char *)(uintptr_t)args[argc - 1];
    l.status = td_options_load(t, &l.config, "prog", "does things", argc, argv, l.positional, 2,
                               &l.n_positional, &l.err);
    return l;
}

static void clear_environment(void)
{
    unsetenv("TANDEM_VERBOSE");
    unsetenv("TANDEM_DELTA");
    unsetenv("TANDEM_DRAIN_TIMEOUT_MS");
    unsetenv("TANDEM_KV_MEMORY");
    unsetenv("TANDEM_RATIO");
    unsetenv("TANDEM_MODEL");
    unsetenv("TANDEM_DTYPE");
    unsetenv("TANDEM_LISTEN");
    unsetenv("TANDEM_DECODE_LISTEN");
    unsetenv("TANDEM_DECODE_DELTA");
    unsetenv("TANDEM_PREFILL_DELTA");
}

static int clean_environment(void **state)
{
    (void)state;
    clear_environment();
    return 0;
}

static void defaults_come_from_the_table(void **state)
{
    (void)state;
    struct load l = load_with(table, (const char *const[]){NULL});
    assert_int_equal(l.status, TD_OK);
    assert_false(l.config.verbose);
    assert_int_equal(l.config.delta, -3);
    assert_int_equal(l.config.drain_timeout_ms, 30000);
    assert_int_equal(l.config.kv_memory, 1u << 30);
    assert_true(l.config.ratio == 0.5);
    assert_string_equal(l.config.model, "models/pocket");
    assert_string_equal(l.config.dtype, "bf16");
    assert_int_equal(l.n_positional, 0);
}

// clang-format off
static const struct td_option table_list[] = {
    {"model", TD_OPT_LIST, "", 0, 0, NULL, offsetof(struct config, model), "Model folders."},
    {0},
};
// clang-format on

/* One value a line: of the flags if there is any, else of the variable. */
static void a_list_takes_every_flag(void **state)
{
    (void)state;
    struct load l = load_with(table_list, (const char *const[]){NULL});
    assert_int_equal(l.status, TD_OK);
    assert_string_equal(l.config.model, "");
    setenv("TANDEM_MODEL", "x\ny", 1);
    l = load_with(table_list, (const char *const[]){NULL});
    assert_string_equal(l.config.model, "x\ny");
    l = load_with(table_list, (const char *const[]){"--model", "a b", NULL});
    assert_string_equal(l.config.model, "a b");
    l = load_with(table_list,
                  (const char *const[]){"--model", "a", "--model=n,m=b", "--model", "c", NULL});
    assert_string_equal(l.config.model, "a\nn,m=b\nc");
    char text[256];
    FILE *out = fmemopen(text, sizeof text, "w");
    assert_non_null(out);
    td_options_print(table_list, &l.config, out);
    fclose(out);
    assert_string_equal(text, "model=a\nmodel=n,m=b\nmodel=c\n");
}

static void environment_beats_default_and_flag_beats_both(void **state)
{
    (void)state;
    setenv("TANDEM_DRAIN_TIMEOUT_MS", "111", 1);
    setenv("TANDEM_KV_MEMORY", "2MiB", 1);
    setenv("TANDEM_VERBOSE", "true", 1);
    setenv("TANDEM_MODEL", "", 1); /* empty is not set */
    struct load l = load_with(table, (const char *const[]){"--kv-memory=4MiB", NULL});
    assert_int_equal(l.status, TD_OK);
    assert_int_equal(l.config.drain_timeout_ms, 111);
    assert_int_equal(l.config.kv_memory, 4 << 20);
    assert_true(l.config.verbose);
    assert_string_equal(l.config.model, "models/pocket");
    l = load_with(table, (const char *const[]){"--no-verbose", NULL});
    assert_false(l.config.verbose);
}

static void spellings(void **state)
{
    (void)state;
    static const char *const drain[][3] = {{"--drain-timeout-ms", "5", NULL},
                                           {"--drain_timeout_ms", "5", NULL},
                                           {"--drain-timeout-ms=5", NULL},
                                           {"--drain_timeout-ms=5", NULL}};
    for (size_t i = 0; i < sizeof drain / sizeof *drain; i++) {
        struct load l = load_with(table, drain[i]);
        assert_int_equal(l.status, TD_OK);
        assert_int_equal(l.config.drain_timeout_ms, 5);
    }
    assert_true(load_with(table, (const char *const[]){"--verbose", NULL}).config.verbose);
    assert_true(load_with(table, (const char *const[]){"--verbose=true", NULL}).config.verbose);
    assert_false(load_with(table, (const char *const[]){"--verbose", "--verbose=false", NULL})
                     .config.verbose);
    assert_int_equal(load_with(table, (const char *const[]){"--delta", "-7", NULL}).config.delta,
                     -7);
    assert_string_equal(load_with(table, (const char *const[]){"--model=--odd", NULL}).config.model,
                        "--odd");
    assert_string_equal(load_with(table, (const char *const[]){"--model=", NULL}).config.model, "");
    assert_string_equal(
        load_with(table, (const char *const[]){"--dtype", "f32", NULL}).config.dtype, "f32");
}

static void positional_arguments_keep_their_order(void **state)
{
    (void)state;
    struct load l =
        load_with(table, (const char *const[]){"one", "--delta", "4", "--", "--model", NULL});
    assert_int_equal(l.status, TD_OK);
    assert_int_equal(l.n_positional, 2);
    assert_string_equal(l.positional[0], "one");
    assert_string_equal(l.positional[1], "--model");
    assert_int_equal(l.config.delta, 4);
    l = load_with(table, (const char *const[]){"-", NULL});
    assert_int_equal(l.n_positional, 1);
    l = load_with(table, (const char *const[]){"1", "2", "3", NULL});
    assert_int_equal(l.status, TD_ERR_INVALID);
    assert_non_null(strstr(l.err.msg, "'3'"));
}

static void bad_input_is_refused_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *args[3], *parts[3];
    } cases[] = {
        {{"--drain-timout-ms=5"},
         {"unknown option --drain-timout-ms", "did you mean --drain-timeout-ms"}},
        {{"--modle", "x"}, {"unknown option --modle", "--model"}},
        {{"--hlep"}, {"--help"}},
        {{"-v"}, {"unknown option -v"}},
        {{"--no-model"}, {"unknown option --no-model"}},
        {{"--no-verbose=true"}, {"unknown option --no-verbose"}},
        {{"--drain-timeout-ms=600001"}, {"--drain-timeout-ms", "600001", "0..600000"}},
        {{"--drain-timeout-ms=-1"}, {"--drain-timeout-ms", "'-1'"}},
        {{"--drain-timeout-ms=99999999999999999999999"}, {"--drain-timeout-ms", "integer"}},
        {{"--drain-timeout-ms=5x"}, {"'5x'"}},
        {{"--drain-timeout-ms="}, {"''"}},
        {{"--drain-timeout-ms"}, {"--drain-timeout-ms needs a value"}},
        {{"--drain-timeout-ms", "--verbose"}, {"--drain-timeout-ms needs a value"}},
        {{"--delta=11"}, {"--delta", "-10..10"}},
        {{"--delta=-11"}, {"--delta", "-10..10"}},
        {{"--delta= 1"}, {"--delta"}},
        {{"--ratio=1.5"}, {"--ratio", "0..1"}},
        {{"--ratio=nan"}, {"--ratio", "number"}},
        {{"--kv-memory=1KiB"}, {"--kv-memory", "1KiB"}},
        {{"--kv-memory=1XiB"}, {"--kv-memory", "'1XiB'"}},
        {{"--verbose=maybe"}, {"--verbose", "'maybe'"}},
        {{"--dtype=int8"}, {"--dtype", "'int8'", "f32|f16|bf16"}},
        {{"--dtype=f"}, {"'f'"}},
        {{"--dtype="}, {"''"}},
        {{"--dtype=f32|f16"}, {"'f32|f16'"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct load l = load_with(table, cases[i].args);
        if (l.status != TD_ERR_INVALID) fail_msg("%s: status %d", cases[i].args[0], l.status);
        for (size_t k = 0; k < 3 && cases[i].parts[k]; k++) {
            if (!strstr(l.err.msg, cases[i].parts[k]))
                fail_msg("%s: '%s' lacks '%s'", cases[i].args[0], l.err.msg, cases[i].parts[k]);
        }
    }
}

// clang-format off
static const struct td_option table_fewer[] = {
    {"delta", TD_OPT_I64, "-3", -10, 10, NULL, offsetof(struct config, delta), "A signed number."},
    {"test_verbose", TD_OPT_BOOL, "false", 0, 0, NULL, offsetof(struct config, verbose), "A hook."},
    TD_OPTION_DECIDED("lanes", "a peer has 4"),
    {0},
};
// clang-format on

/* However it is given, its name is in the answer, and what decides; it takes no value. */
static void an_option_that_is_decided_says_by_what(void **state)
{
    (void)state;
    static const char *const cases[][3] = {
        {"--lanes", "4"}, {"--lanes=4"}, {"--lanes"}, {"--no-lanes"}, {"--delta=1", "--lanes=4"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct load l = load_with(table_fewer, cases[i]);
        if (l.status != TD_ERR_INVALID ||
            strcmp(l.err.msg, "--lanes is no longer an option: a peer has 4"))
            fail_msg("case %zu: status %d, \"%s\"", i, l.status, l.err.msg);
    }
    setenv("TANDEM_LANES", "4", 1);
    struct load l = load_with(table_fewer, (const char *const[]){NULL});
    assert_int_equal(l.status, TD_ERR_INVALID);
    assert_string_equal(l.err.msg, "TANDEM_LANES is no longer an option: a peer has 4");
    setenv("TANDEM_LANES", "", 1); /* manifests often pass empty variables */
    l = load_with(table_fewer, (const char *const[]){NULL});
    assert_int_equal(l.status, TD_OK);
    unsetenv("TANDEM_LANES");
}

/* Hooks work, and nobody is told of them, nor of what is decided. */
static void hooks_of_tests_are_not_told(void **state)
{
    (void)state;
    struct load l = load_with(table_fewer, (const char *const[]){"--test-verbose", NULL});
    assert_true(l.status == TD_OK && l.config.verbose);
    setenv("TANDEM_TEST_VERBOSE", "true", 1);
    l = load_with(table_fewer, (const char *const[]){NULL});
    assert_true(l.status == TD_OK && l.config.verbose);
    unsetenv("TANDEM_TEST_VERBOSE");
    for (size_t i = 0; i < 2; i++) {
        l = load_with(table_fewer, (const char *const[]){i ? "--test-verbos" : "--lane", NULL});
        assert_int_equal(l.status, TD_ERR_INVALID);
        assert_non_null(strstr(l.err.msg, "unknown option"));
        assert_null(strstr(l.err.msg, "did you mean --lanes"));
        assert_null(strstr(l.err.msg, "did you mean --test"));
    }
    char text[2048] = {0};
    FILE *f = fmemopen(text, sizeof text - 1, "w");
    td_options_help(table_fewer, "prog", "does things", f);
    td_options_print(table_fewer, &l.config, f);
    fclose(f);
    assert_non_null(strstr(text, "--delta N\n"));
    assert_non_null(strstr(text, "delta="));
    assert_null(strstr(text, "verbose"));
    assert_null(strstr(text, "lanes"));
}

static void environment_errors_name_the_variable(void **state)
{
    (void)state;
    setenv("TANDEM_RATIO", "2", 1);
    struct load l = load_with(table, (const char *const[]){NULL});
    assert_int_equal(l.status, TD_ERR_INVALID);
    assert_memory_equal(l.err.msg, "TANDEM_RATIO: is 2, must be in 0..1", 35);
    char *argv[] = {(char *)(uintptr_t) "prog", NULL};
    struct config config;
    assert_int_equal(td_options_load(table, &config, "p", "s", 1, argv, NULL, 0, NULL, NULL),
                     TD_ERR_INVALID);
}

// clang-format off
static const struct td_option table_own[] = {
    {"listen", TD_OPT_OWN_STR, "here:0", 0, 0, NULL, offsetof(struct config, model), "Address."},
    {"delta", TD_OPT_I64, "1", -10, 10, NULL, offsetof(struct config, delta), "A signed number."},
    {0},
};
// clang-format on

static void a_role_has_variables_of_its_own(void **state)
{
    (void)state;
    static const struct {
        const char *program, *listen;
        int64_t delta;
    } cases[] = {
        {"tandem-decode", "decode:1", 3}, /* its own win */
        {"tandem-prefill", "here:0", 2},  /* a shared number counts, a shared address does not */
        {"tandem up", "router:1", 2},     /* no daemon: the shared ones are its own */
    };
    setenv("TANDEM_LISTEN", "router:1", 1);
    setenv("TANDEM_DECODE_LISTEN", "decode:1", 1);
    setenv("TANDEM_DELTA", "2", 1);
    setenv("TANDEM_DECODE_DELTA", "3", 1);
    setenv("TANDEM_PREFILL_DELTA", "", 1); /* empty: not set */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct config config = {0};
        struct td_err err = {0};
        char *argv[] = {(char *)(uintptr_t)cases[i].program, NULL};
        assert_int_equal(
            td_options_load(table_own, &config, cases[i].program, "", 1, argv, NULL, 0, NULL, &err),
            TD_OK);
        assert_string_equal(config.model, cases[i].listen);
        assert_int_equal(config.delta, cases[i].delta);
    }
    setenv("TANDEM_DECODE_DELTA", "99", 1);
    struct config config = {0};
    struct td_err err = {0};
    char *argv[] = {(char *)(uintptr_t) "tandem-decode", NULL};
    assert_int_equal(
        td_options_load(table_own, &config, "tandem-decode", "", 1, argv, NULL, 0, NULL, &err),
        TD_ERR_INVALID);
    assert_string_equal(err.msg, "TANDEM_DECODE_DELTA: is 99, must be in -10..10");
}

static void required_options_are_asked_for(void **state)
{
    (void)state;
    struct load l = load_with(table_required, (const char *const[]){NULL});
    assert_int_equal(l.status, TD_ERR_INVALID);
    assert_non_null(strstr(l.err.msg, "--model"));
    assert_non_null(strstr(l.err.msg, "TANDEM_MODEL"));
    assert_int_equal(load_with(table_required, (const char *const[]){"--model=x", NULL}).status,
                     TD_OK);
    setenv("TANDEM_MODEL", "y", 1);
    assert_string_equal(load_with(table_required, (const char *const[]){NULL}).config.model, "y");
}

static void load_in_child(void *arg) { load_with(table, arg); }

/* An alias sets the row it names, whatever its type; messages speak of that row, and no variable
 * belongs to the alias. */
static void aliases(void **state)
{
    (void)state;
    struct load l = load_with(
        table, (const char *const[]){"--precision=f16", "--kv-bytes", "2MiB", "--chatty", NULL});
    assert_int_equal(l.status, TD_OK);
    assert_string_equal(l.config.dtype, "f16");
    assert_int_equal(l.config.kv_memory, 2 << 20);
    assert_true(l.config.verbose);
    l = load_with(table, (const char *const[]){"--kv_pool=4MiB", "--no-chatty", NULL});
    assert_int_equal(l.config.kv_memory, 4 << 20);
    assert_false(l.config.verbose);
    l = load_with(table, (const char *const[]){"--precision=int8", NULL});
    assert_int_equal(l.status, TD_ERR_INVALID);
    assert_non_null(strstr(l.err.msg, "--dtype: is 'int8'"));
    l = load_with(table, (const char *const[]){"--dtype=f8", NULL}); /* it was a choice once */
    assert_int_equal(l.status, TD_ERR_INVALID);
    assert_string_equal(l.err.msg,
                        "--dtype: is 'f8', must be one of f32|f16|bf16; `other` has that one");
    l = load_with(table, (const char *const[]){"--precision=f8", NULL});
    assert_string_equal(l.err.msg,
                        "--dtype: is 'f8', must be one of f32|f16|bf16; `other` has that one");
    setenv("TANDEM_PRECISION", "f32", 1);
    l = load_with(table, (const char *const[]){NULL});
    unsetenv("TANDEM_PRECISION");
    assert_string_equal(l.config.dtype, "bf16");
}

static void help_version_and_print_config(void **state)
{
    (void)state;
    struct capture c;
    capture_run(&c, load_in_child, (void *)(uintptr_t)(const char *const[]){"--help", NULL});
    assert_int_equal(capture_exit(&c), 0);
    static const char *const parts[] = {"prog: does things",
                                        "--drain-timeout-ms N\n",
                                        "      How long a drain\n      may take.\n",
                                        "TANDEM_KV_MEMORY",
                                        "--dtype f32|f16|bf16",
                                        "      also --kv-bytes, --kv-pool\n",
                                        "default 1GiB",
                                        "0..600000",
                                        "--print-config",
                                        "--version"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (!strstr(c.text, parts[i])) fail_msg("help lacks '%s':\n%s", parts[i], c.text);
    }
    capture_run(&c, load_in_child, (void *)(uintptr_t)(const char *const[]){"--version", NULL});
    assert_string_equal(c.text, "prog " TD_VERSION "\n");
    capture_run(&c, load_in_child,
                (void *)(uintptr_t)(const char *const[]){"--print-config", "--delta=9",
                                                         "--kv_memory=2MB", NULL});
    assert_string_equal(c.text, "verbose=false\ndelta=9\ndrain_timeout_ms=30000\nkv_memory="
                                "2000000\nratio=0.5\nmodel=models/pocket\ndtype=bf16\n");
}

static void sizes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        {"0", 0},
        {"512", 512},
        {"1K", 1024},
        {"64KiB", 65536},
        {"3M", 3u << 20},
        {"2GiB", 2ull << 30},
        {"3Ki", 3072},
        {"256Mi", 256u << 20},
        {"40Gi", 40ull << 30},
        {"2Ti", 2ull << 40},
        {"1T", 1ull << 40},
        {"1TiB", 1ull << 40},
        {"1KB", 1000},
        {"5MB", 5000000},
        {"1GB", 1000000000},
        {"2TB", 2000000000000ull},
        {"7B", 7},
        {"16777215TiB", 16777215ull << 40},
        {"18446744073709551615", UINT64_MAX},
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        uint64_t bytes = 0;
        assert_int_equal(td_parse_size(good[i].text, &bytes, NULL), TD_OK);
        assert_true(bytes == good[i].bytes);
    }
    static const char *const bad[] = {"",      "KiB",   "-1",          "+1",
                                      " 1",    "1 KiB", "1.5GiB",      "1kb",
                                      "1KiBs", "0x10",  "16777216TiB", "18446744073709551616"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint64_t bytes = 77;
        struct td_err err;
        if (td_parse_size(bad[i], &bytes, &err) != TD_ERR_INVALID)
            fail_msg("'%s' was taken", bad[i]);
        assert_true(bytes == 77); /* outputs stay as they were */
        assert_non_null(strstr(err.msg, bad[i]));
    }
}

static void die(void *arg)
{
    /* the end is what another machine says: a title, a clear screen, a line, C1, no UTF-8 */
    struct td_err err = {.code = *(td_status *)arg,
                         .msg = "--x is 1\033]0;\a\033[2J\r\n\xc2\x9b\x9b\xc3\xa9"};
    exit(td_die("prog", &err));
}

static void die_tells_usage_errors_from_others(void **state)
{
    (void)state;
    struct capture c;
    td_status s = TD_ERR_INVALID;
    capture_run(&c, die, &s);
    assert_int_equal(capture_exit(&c), 2);
    assert_string_equal(c.text, "prog: error: --x is 1?]0;??[2J?????\xc3\xa9\n");
    s = TD_ERR_IO;
    capture_run(&c, die, &s);
    assert_int_equal(capture_exit(&c), 1);
}

static void load_table(void *arg) { (void)load_with(arg, (const char *const[]){NULL}); }

// clang-format off
static void a_name_has_one_row(void **state)
{
    (void)state;
    size_t at = offsetof(struct config, delta);
    struct td_option rows[] = {
        {"delta", TD_OPT_I64, "1", 0, 9, NULL, at, "One."},
        {"ratio", TD_OPT_F64, "0.5", 0, 1, NULL, offsetof(struct config, ratio), "Another."},
        {"", TD_OPT_I64, "2", 0, 9, NULL, at, "One more."},
        {0},
    };
    struct capture c;
    rows[2].name = "delta_2";
    capture_run(&c, load_table, rows);
    assert_int_equal(capture_exit(&c), 0);
    const char *const taken[] = {"ratio",   "delta",        "help",
                                 "version", "print_config", "print-config"};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        char want[64];
        rows[2].name = taken[i];
        capture_run(&c, load_table, rows);
        assert_true(capture_aborted(&c));
        snprintf(want, sizeof want, "option \"%s\" has two rows", taken[i]);
        assert_non_null(strstr(c.text, want));
    }
    struct td_option aliased[] = {rows[0], rows[1], TD_OPTION_ALIAS("ratio", "delta"), {0}};
    capture_run(&c, load_table, aliased);
    assert_true(capture_aborted(&c));
}
// clang-format on

#define TEST(f) cmocka_unit_test_setup_teardown(f, clean_environment, clean_environment)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(defaults_come_from_the_table),
        TEST(a_list_takes_every_flag),
        TEST(environment_beats_default_and_flag_beats_both),
        TEST(spellings),
        TEST(positional_arguments_keep_their_order),
        TEST(bad_input_is_refused_by_name),
        TEST(an_option_that_is_decided_says_by_what),
        TEST(hooks_of_tests_are_not_told),
        TEST(environment_errors_name_the_variable),
        TEST(a_role_has_variables_of_its_own),
        TEST(required_options_are_asked_for),
        TEST(aliases),
        TEST(a_name_has_one_row),
        TEST(help_version_and_print_config),
        TEST(sizes),
        TEST(die_tells_usage_errors_from_others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
