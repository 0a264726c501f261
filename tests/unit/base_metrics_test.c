/* base_metrics_test.c - registration, values, and the exact text of the exposition. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/base/metrics.h"
#include "common/base/process_metrics.h"
#include "tests/unit/capture.h"

static const double bounds[] = {0.001, 0.5, 2};

static const struct {
    double value;
    const char *line;
} special_values[] = {{NAN, "td_kv_usage NaN\n"},
                      {INFINITY, "td_kv_usage +Inf\n"},
                      {-INFINITY, "td_kv_usage -Inf\n"},
                      {1.0 / 3, "td_kv_usage 0.33333333333333331\n"},
                      {1e21, "td_kv_usage 1e+21\n"}};

static void rendering_is_exact(void **state)
{
    (void)state;
    struct td_metric *a =
        td_counter("td_requests_total", "stage=\"prefill\"", "Requests\nby \\ stage.");
    struct td_metric *g = td_gauge("td_kv_usage", "", "Share of KV blocks in use.");
    struct td_metric *b =
        td_counter("td_requests_total", "stage=\"decode\"", "Requests\nby \\ stage.");
    struct td_metric *h = td_histogram("td_ttft_seconds", "", "Time to first token.", bounds, 3);
    struct td_metric *l = td_histogram("td_step_seconds", "kind=\"d\"", "Step.", bounds, 3);
    assert_ptr_equal(td_counter("td_requests_total", "stage=\"prefill\"", "again"), a);
    td_metric_add(a, 2);
    td_metric_add(a, 3);
    td_metric_add(b, (uint64_t)1 << 60);
    td_metric_set(g, 0.1);
    td_metric_observe(h, 0.001); /* a bound is inclusive */
    td_metric_observe(h, 0.25);
    td_metric_observe(h, 9);
    td_metric_observe(l, 1);
    assert_true(td_metric_value(a) == 5);
    assert_true(td_metric_value(g) == 0.1);
    assert_true(td_metric_value(h) == 9.251);
    size_t n_bytes;
    char *text = td_metrics_render(&n_bytes);
    assert_int_equal(n_bytes, strlen(text));
    assert_string_equal(text, "# HELP td_requests_total Requests\\nby \\\\ stage.\n"
                              "# TYPE td_requests_total counter\n"
                              "td_requests_total{stage=\"prefill\"} 5\n"
                              "td_requests_total{stage=\"decode\"} 1152921504606846976\n"
                              "# HELP td_kv_usage Share of KV blocks in use.\n"
                              "# TYPE td_kv_usage gauge\n"
                              "td_kv_usage 0.1\n"
                              "# HELP td_ttft_seconds Time to first token.\n"
                              "# TYPE td_ttft_seconds histogram\n"
                              "td_ttft_seconds_bucket{le=\"0.001\"} 1\n"
                              "td_ttft_seconds_bucket{le=\"0.5\"} 2\n"
                              "td_ttft_seconds_bucket{le=\"2\"} 2\n"
                              "td_ttft_seconds_bucket{le=\"+Inf\"} 3\n"
                              "td_ttft_seconds_sum 9.251\n"
                              "td_ttft_seconds_count 3\n"
                              "# HELP td_step_seconds Step.\n"
                              "# TYPE td_step_seconds histogram\n"
                              "td_step_seconds_bucket{kind=\"d\",le=\"0.001\"} 0\n"
                              "td_step_seconds_bucket{kind=\"d\",le=\"0.5\"} 0\n"
                              "td_step_seconds_bucket{kind=\"d\",le=\"2\"} 1\n"
                              "td_step_seconds_bucket{kind=\"d\",le=\"+Inf\"} 1\n"
                              "td_step_seconds_sum{kind=\"d\"} 1\n"
                              "td_step_seconds_count{kind=\"d\"} 1\n");
    free(text);
    for (size_t i = 0; i < sizeof special_values / sizeof *special_values; i++) {
        td_metric_set(g, special_values[i].value);
        text = td_metrics_render(NULL);
        if (!strstr(text, special_values[i].line)) fail_msg("no '%s'", special_values[i].line);
        free(text);
    }
}

static void aliases_tell_the_same(void **state)
{
    (void)state;
    struct td_metric *c = td_counter("td_al_total", "model_name=\"m\"", "Told twice.");
    struct td_metric *h = td_histogram("td_al_seconds", "", "h", bounds, 3);
    td_metric_alias(c, "vllm:al_total", "r=\"stop\",model_name=\"m\"");
    td_metric_alias(c, "vllm:al_total", "r=\"again\"");
    td_metric_alias(h, "vllm:al_seconds", "model_name=\"m\"");
    td_metric_add(c, 3);
    td_metric_observe(h, 1);
    char *text = td_metrics_render(NULL);
    static const char *const parts[] = {
        "# HELP vllm:al_total Told twice.\n# TYPE vllm:al_total counter\n"
        "vllm:al_total{r=\"stop\",model_name=\"m\"} 3\nvllm:al_total{r=\"again\"} 3\n# HELP",
        "# TYPE vllm:al_seconds histogram\n",
        "vllm:al_seconds_bucket{model_name=\"m\",le=\"0.5\"} 0\n"
        "vllm:al_seconds_bucket{model_name=\"m\",le=\"2\"} 1\n",
        "vllm:al_seconds_sum{model_name=\"m\"} 1\nvllm:al_seconds_count{model_name=\"m\"} 1\n"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!strstr(text, parts[i])) fail_msg("no '%s' in %s", parts[i], text);
    free(text);
}

static void labels_are_escaped(void **state)
{
    (void)state;
    static const struct {
        const char *value;
        size_t room;
        const char *label;
    } cases[] = {{"plain", 6, "plain"},
                 {"a\"b\\c\nd", 64, "a\\\"b\\\\c\\nd"},
                 {"plain", 5, "plai"},
                 {"ab\"", 4, "ab"},                   /* an escape is not cut in two */
                 {"\xc3\xa4\xc3\xa4", 4, "\xc3\xa4"}, /* nor is a character */
                 {"\xe2\x82\xac", 3, ""},
                 {"", 1, ""},
                 {"x", 1, ""}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char *buf = malloc(cases[i].room); /* ASan sees a byte too many */
        assert_string_equal(td_metric_label(buf, cases[i].room, cases[i].value), cases[i].label);
        free(buf);
    }
}

static double sample_of(const char *text, const char *name)
{
    char line[128];
    snprintf(line, sizeof line, "\n%s ", name);
    const char *at = strstr(text, line);
    if (!at) fail_msg("no %s", name);
    return strtod(at + strlen(line), NULL);
}

static void the_process_tells_of_itself(void **state)
{
    (void)state;
    td_process_set_commit("0123456789ab");
    td_process_metrics_open("avx512 \"x\"");
    char *text = td_metrics_render(NULL);
    assert_non_null(strstr(text, "commit=\"0123456789ab\",kernels=\"avx512 \\\"x\\\"\"} 1\n"));
    assert_non_null(strstr(text, "# TYPE process_cpu_seconds_total counter\n"));
    double cpu = sample_of(text, "process_cpu_seconds_total"),
           fds = sample_of(text, "process_open_fds");
    assert_true(sample_of(text, "process_resident_memory_bytes") > 1 << 18);
    assert_true(sample_of(text, "process_virtual_memory_bytes") >=
                sample_of(text, "process_resident_memory_bytes"));
    double age_s = (double)time(NULL) - sample_of(text, "process_start_time_seconds");
    assert_true(age_s > -2 && age_s < 3600);
    assert_true(fds >= 3 && fds <= sample_of(text, "process_max_fds"));
    free(text);
    int fd = dup(0);
    while (clock() < (clock_t)((cpu + 0.05) * CLOCKS_PER_SEC)) continue;
    text = td_metrics_render(NULL);
    assert_true(sample_of(text, "process_open_fds") == fds + 1);
    assert_true(sample_of(text, "process_cpu_seconds_total") >= cpu + 0.04);
    free(text);
    close(fd);
}

enum { N_THREADS = 4, N_UPDATES = 5000 };

static void *update_many(void *arg)
{
    struct td_metric *const *m = arg;
    for (int i = 0; i < N_UPDATES; i++) {
        td_metric_add(m[0], 1);
        td_metric_observe(m[1], 0.5); /* exact in binary: the sum must come out to the bit */
    }
    return NULL;
}

static void updates_of_many_threads_add_up(void **state)
{
    (void)state;
    struct td_metric *m[] = {
        td_counter("td_t_total", "", "c"),
        td_histogram("td_t_seconds", "", "h", td_seconds_bounds, td_n_seconds_bounds)};
    pthread_t threads[N_THREADS];
    for (int i = 0; i < N_THREADS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, update_many, m), 0);
    for (int i = 0; i < 10; i++) free(td_metrics_render(NULL)); /* a scrape in the middle of it */
    for (int i = 0; i < N_THREADS; i++) pthread_join(threads[i], NULL);
    assert_true(td_metric_value(m[0]) == N_THREADS * N_UPDATES);
    assert_true(td_metric_value(m[1]) == N_THREADS * N_UPDATES / 2);
    char *text = td_metrics_render(NULL);
    assert_non_null(strstr(text, "td_t_seconds_bucket{le=\"0.25\"} 0\n"));
    assert_non_null(strstr(text, "td_t_seconds_bucket{le=\"0.5\"} 20000\n"));
    assert_non_null(strstr(text, "td_t_seconds_count 20000\n"));
    free(text);
    assert_true(td_n_seconds_bounds <= 32 && td_seconds_bounds[0] == 0.0001 &&
                td_seconds_bounds[td_n_seconds_bounds - 1] == 60);
}

static void add_to_gauge(void *arg) { td_metric_add(arg, 1); }
static void change_type(void *arg) { (void)arg, td_gauge("td_twice", "x=\"1\"", "h"); }
static void bad_name(void *arg) { (void)arg, td_gauge("td bad", "", "h"); }
static void unsorted_bounds(void *arg)
{
    (void)arg, td_histogram("td_h", "", "h", (double[]){2, 1}, 2);
}

static void misuse_aborts(void **state)
{
    (void)state;
    static void (*const wrongs[])(void *) = {add_to_gauge, change_type, bad_name, unsorted_bounds};
    struct td_metric *g = td_gauge("td_g", "", "g");
    td_counter("td_twice", "", "h");
    for (size_t i = 0; i < sizeof wrongs / sizeof *wrongs; i++) {
        struct capture c;
        capture_run(&c, wrongs[i], g);
        if (!capture_aborted(&c)) fail_msg("misuse %zu went through", i);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rendering_is_exact), /* first: it expects an empty registry */
        cmocka_unit_test(aliases_tell_the_same),
        cmocka_unit_test(labels_are_escaped),
        cmocka_unit_test(the_process_tells_of_itself),
        cmocka_unit_test(misuse_aborts), /* forks: before there are threads */
        cmocka_unit_test(updates_of_many_threads_add_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
