/* base_metrics_test.c - registration, values, and the exact text of the exposition. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/metrics.h"
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
        cmocka_unit_test(misuse_aborts),      /* forks: before there are threads */
        cmocka_unit_test(updates_of_many_threads_add_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
