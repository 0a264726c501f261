/* router/objectives: the class table and the latency table. Every refusal names the field, the
 * value and the limit; garbage is refused, never believed. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/base/random.h"
#include "router/objectives.h"

static struct td_core_config cfg;
static char names[TD_CORE_MAX_NODE_CLASSES][ROUTER_NODE_CLASS_NAME];
static struct td_err err;

static void expect_classes_error(const char *text, td_status want, const char *message)
{
    err = (struct td_err){0};
    td_status s = router_classes_parse(text, &cfg, &err);
    if (s != want || strcmp(err.msg, message) != 0)
        fail_msg("\"%.100s\" gave %d \"%s\", not %d \"%s\"", text, (int)s, err.msg, (int)want,
                 message);
}

static void test_classes(void **state)
{
    (void)state;
    assert_int_equal(
        router_classes_parse(
            "gold:ttft=450,tpot=40,weight=4 bulk:ttft=5000,weight=0.5,best_effort\n\tplain", &cfg,
            &err),
        TD_OK);
    assert_int_equal(cfg.n_classes, 3);
    assert_string_equal(cfg.classes[0].name, "gold");
    assert_true(cfg.classes[0].ttft_ms >= 450 && cfg.classes[0].ttft_ms <= 450 &&
                cfg.classes[0].tpot_ms >= 40 && cfg.classes[0].weight >= 4);
    assert_false(cfg.classes[0].best_effort);
    assert_true(cfg.classes[1].best_effort && cfg.classes[1].tpot_ms <= 0 &&
                cfg.classes[1].weight <= 0.5);
    assert_true(cfg.classes[2].ttft_ms <= 0 && cfg.classes[2].tpot_ms <= 0 &&
                cfg.classes[2].weight >= 1);
    /* the first is what unnamed requests get, unless one is called default */
    uint32_t at = 9;
    assert_int_equal(router_class_find(&cfg, "", &at, &err), TD_OK);
    assert_int_equal(at, 0);
    assert_int_equal(router_class_find(&cfg, "plain", &at, &err), TD_OK);
    assert_int_equal(at, 2);
    assert_int_equal(router_class_find(&cfg, "silver", &at, &err), TD_ERR_INVALID);
    assert_int_equal(at, 2); /* untouched */
    assert_string_equal(err.msg, "slo_class is \"silver\"; this router has: gold bulk plain");
    assert_int_equal(router_classes_parse("a:ttft=1 default:ttft=2", &cfg, &err), TD_OK);
    assert_string_equal(cfg.classes[0].name, "default");
    assert_string_equal(cfg.classes[1].name, "a");
    assert_int_equal(router_classes_parse(" ", &cfg, &err), TD_OK);
    assert_int_equal(cfg.n_classes, 1);
    assert_string_equal(cfg.classes[0].name, "default");
    /* what comes later counts */
    assert_int_equal(router_classes_parse("chat:preset=mlperf-llama2-70b,tpot=33", &cfg, &err),
                     TD_OK);
    assert_true(cfg.classes[0].ttft_ms > 0 && cfg.classes[0].tpot_ms >= 33 &&
                cfg.classes[0].tpot_ms <= 33);
}

static void test_class_errors(void **state)
{
    (void)state;
    char text[8192] = "";
    expect_classes_error("a:ttft=x", TD_ERR_INVALID,
                         "slo_class a: ttft is \"x\", must be a number from 0 to 1e9");
    expect_classes_error("a:ttft=", TD_ERR_INVALID,
                         "slo_class a: ttft is \"\", must be a number from 0 to 1e9");
    expect_classes_error("a:ttft=-1", TD_ERR_INVALID,
                         "slo_class a: ttft is \"-1\", must be a number from 0 to 1e9");
    expect_classes_error("a:tpot=nan", TD_ERR_INVALID,
                         "slo_class a: tpot is \"nan\", must be a number from 0 to 1e9");
    expect_classes_error("a:tpot=inf", TD_ERR_INVALID,
                         "slo_class a: tpot is \"inf\", must be a number from 0 to 1e9");
    expect_classes_error("a:tpot=1e10", TD_ERR_INVALID,
                         "slo_class a: tpot is \"1e10\", must be a number from 0 to 1e9");
    expect_classes_error("a:ttft=5ms", TD_ERR_INVALID,
                         "slo_class a: ttft is \"5ms\", must be a number from 0 to 1e9");
    expect_classes_error("a:weight=0", TD_ERR_INVALID,
                         "slo_class a: weight is \"0\", must be above 0 and up to 1e6");
    expect_classes_error("a:weight=2e6", TD_ERR_INVALID,
                         "slo_class a: weight is \"2e6\", must be above 0 and up to 1e6");
    expect_classes_error("a:fast", TD_ERR_INVALID,
                         "slo_class a: \"fast\" is not NAME=VALUE or best_effort");
    expect_classes_error(
        "a:ttfd=3", TD_ERR_INVALID,
        "slo_class a: \"ttfd\" is unknown; there are ttft, tpot, weight, preset, best_effort");
    expect_classes_error("b a:ttft=1 b:tpot=2", TD_ERR_INVALID, "slo_class: b is given twice");
    expect_classes_error(":ttft=1", TD_ERR_INVALID,
                         "slo_class: name \":ttft=1\" must have 1..31 bytes before the colon");
    expect_classes_error("abcdefghijklmnopqrstuvwxyz012345:ttft=1", TD_ERR_INVALID,
                         "slo_class: name \"abcdefghijklmnopqrstuvwxyz012345:ttft=1\" must have "
                         "1..31 bytes before the colon");
    expect_classes_error(
        "a\x01z", TD_ERR_INVALID,
        "slo_class: name \"a?z\" must have only letters, digits, '-', '_' and '.'");
    err = (struct td_err){0};
    assert_int_equal(router_classes_parse("a:preset=none", &cfg, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "none"));
    /* too long a word or field is refused as a whole, not cut to something that has a meaning */
    memset(text, 0, sizeof text);
    memcpy(text, "a:ttft=", 7);
    memset(text + 7, '1', 200);
    expect_classes_error(
        text, TD_ERR_INVALID,
        "slo_class a: \"ttft=11111111111111111111111111111111111\" has 205 bytes, limit 127");
    memcpy(text, "a:", 2);
    memset(text + 2, ',', 600);
    memcpy(text + 602, "ttft=1", 7);
    expect_classes_error(
        text, TD_ERR_INVALID,
        "slo_class: \"a:,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,,\" has 608 bytes, limit 511");
    text[0] = 0;
    for (int i = 0; i <= TD_CORE_MAX_CLASSES; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "c%d:ttft=1 ", i);
    expect_classes_error(text, TD_ERR_INVALID, "slo_class: more than 16 classes");
}

/* ---- latency table --------------------------------------------------------------------------- */

static char path[] = "/tmp/td_objectives_test_XXXXXX";

static void write_table(const char *text, size_t n_bytes)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n_bytes, f), n_bytes);
    assert_int_equal(fclose(f), 0);
}

static void expect_table_error(const char *text, td_status want, const char *message)
{
    char full[400];
    write_table(text, strlen(text));
    snprintf(full, sizeof full, message, path);
    err = (struct td_err){0};
    td_status s = router_latency_table_load(path, &cfg, names, NULL, &err);
    if (s != want || strcmp(err.msg, full) != 0)
        fail_msg("\"%.60s\" gave %d \"%s\", not %d \"%s\"", text, (int)s, err.msg, (int)want, full);
}

static void test_latency_table(void **state)
{
    (void)state;
    static const char text[] = "# measured\n\n  node_class=h100 a0=1e-3 a1=2e-5 a2=3e-10 b0=4e-3 "
                               "b1=5e-5 b2=6e-9 b3=7e-5 b4=8e-11 link_tau=9e-5 "
                               "link_bytes_per_s=5e10 # x\r\n"
                               "node_class=l40 b0=1";
    write_table(text, sizeof text - 1);
    assert_int_equal(router_latency_table_load(path, &cfg, names, NULL, &err), TD_OK);
    assert_int_equal(cfg.n_thetas, 2);
    assert_string_equal(names[0], "h100");
    assert_string_equal(names[1], "l40");
    const double got[] = {cfg.thetas[0].prefill[0], cfg.thetas[0].prefill[1],
                          cfg.thetas[0].prefill[2], cfg.thetas[0].decode[0],
                          cfg.thetas[0].decode[1],  cfg.thetas[0].decode[2],
                          cfg.thetas[0].decode[3],  cfg.thetas[0].decode[4],
                          cfg.thetas[0].link_tau,   cfg.thetas[0].link_bytes_per_s};
    const double want[] = {1e-3, 2e-5, 3e-10, 4e-3, 5e-5, 6e-9, 7e-5, 8e-11, 9e-5, 5e10};
    assert_memory_equal(got, want, sizeof want);
    assert_true(cfg.thetas[0].known && cfg.thetas[1].known);
    write_table("", 0);
    assert_int_equal(router_latency_table_load(path, &cfg, names, NULL, &err), TD_OK);
    assert_int_equal(cfg.n_thetas, 0);
}

static void test_latency_table_errors(void **state)
{
    (void)state;
    char text[4096];
    expect_table_error("node_class=a a0=x", TD_ERR_INVALID,
                       "latency_table %s line 1: a0 is \"x\", must be a number from 0 to 1e15");
    expect_table_error("\nnode_class=a b4=nan", TD_ERR_INVALID,
                       "latency_table %s line 2: b4 is \"nan\", must be a number from 0 to 1e15");
    expect_table_error("node_class=a a0=-1", TD_ERR_INVALID,
                       "latency_table %s line 1: a0 is \"-1\", must be a number from 0 to 1e15");
    expect_table_error(
        "node_class=a link_bytes_per_s=1e300", TD_ERR_INVALID,
        "latency_table %s line 1: link_bytes_per_s is \"1e300\", must be a number from 0 to 1e15");
    expect_table_error("node_class=a a3=1", TD_ERR_INVALID,
                       "latency_table %s line 1: \"a3\" is unknown; there are node_class, a0..a2, "
                       "b0..b4, link_tau, link_bytes_per_s, kv_tokens, kv_bytes, gpus");
    expect_table_error("node_class=a a0", TD_ERR_INVALID,
                       "latency_table %s line 1: \"a0\" is not NAME=VALUE");
    expect_table_error("a0=1", TD_ERR_INVALID, "latency_table %s line 1: node_class is missing");
    expect_table_error("node_class=a\n#\nnode_class=a", TD_ERR_INVALID,
                       "latency_table %s line 3: node_class a is given twice");
    expect_table_error(
        "node_class=0123456789012345678901234567890123456789012345678901234567890123",
        TD_ERR_INVALID, "latency_table %s line 1: node_class has 64 bytes, limit 63");
    text[0] = 0;
    for (int i = 0; i <= TD_CORE_MAX_NODE_CLASSES; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "node_class=c%d\n", i);
    expect_table_error(text, TD_ERR_LIMIT, "latency_table %s line 17: more than 16 node classes");
    memset(text, 'a', 2000);
    text[2000] = 0;
    expect_table_error(text, TD_ERR_INVALID, "latency_table %s line 1 has more than 1022 bytes");
    memcpy(text, "a0=", 3);
    text[300] = 0;
    expect_table_error(text, TD_ERR_INVALID,
                       "latency_table %s line 1: \"a0=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\" has "
                       "300 bytes, limit 159");
    err = (struct td_err){0};
    assert_int_equal(router_latency_table_load("/nowhere/at/all", &cfg, names, NULL, &err),
                     TD_ERR_IO);
    assert_string_equal(err.msg, "latency_table \"/nowhere/at/all\": No such file or directory");
    /* a folder */
    assert_int_equal(router_latency_table_load("/tmp", &cfg, names, NULL, &err), TD_ERR_IO);
    static const char nul[] = "node_class=a a0=1\0 b0=2\n";
    write_table(nul, sizeof nul - 1);
    /* not text */
    assert_int_equal(router_latency_table_load(path, &cfg, names, NULL, &err), TD_ERR_INVALID);
}

/* What is accepted can be used: the core starts with it. Anything else is refused with a
 * message. */
static void test_garbage(void **state)
{
    (void)state;
    static const char *const pieces[] = {
        "node_class=", "a",    "=",    ",",       ":",     " ",
        "\n",          "a0=",  "b3=",  "ttft=",   "tpot=", "weight=",
        "best_effort", "1e9",  "-1",   "0",       "nan",   "preset=",
        "#",           "\x01", "\xff", "default", "1e-3",  "link_tau="};
    uint64_t rng = 1;
    int accepted = 0, refused = 0;
    for (int i = 0; i < 20000; i++) {
        char text[256] = "";
        size_t used = 0;
        for (int k = 0; k < 8; k++) {
            td_random_step(&rng);
            used += (size_t)snprintf(text + used, sizeof text - used, "%s",
                                     pieces[(rng >> 33) % (sizeof pieces / sizeof *pieces)]);
        }
        td_status s;
        err = (struct td_err){0};
        cfg = (struct td_core_config){.policy = "goodput", .max_requests = 1};
        if (i % 8 == 0) {
            write_table(text, used);
            s = router_latency_table_load(path, &cfg, names, NULL, &err);
        } else {
            s = router_classes_parse(text, &cfg, &err);
        }
        if (s) {
            refused++;
            assert_true(err.msg[0] && err.code == s);
            continue;
        }
        accepted++;
        struct td_core *core = NULL;
        if (i % 4 == 0 && td_core_create(&cfg, &core, &err))
            fail_msg("\"%s\" was accepted, the core says: %s", text, err.msg);
        td_core_destroy(core);
    }
    assert_true(accepted > 100 && refused > 100);
}

int main(void)
{
    int fd = mkstemp(path);
    if (fd < 0) return 1;
    close(fd);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_classes),       cmocka_unit_test(test_class_errors),
        cmocka_unit_test(test_latency_table), cmocka_unit_test(test_latency_table_errors),
        cmocka_unit_test(test_garbage),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
