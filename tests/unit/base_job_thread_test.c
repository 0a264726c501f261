/* base_job_thread_test.c - jobs run once, in their order; those that are taken back never do; those
 * that are left when the thread stops are given back. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/base/job_thread.h"

enum { N = 8 };

/* What ran, in its order. */
struct record {
    pthread_mutex_t lock;
    pthread_cond_t grown;
    int n, which[N];
    bool stopping[N];
};

struct numbered {
    struct td_job job; /* first */
    int number;
};

static void run(void *ctx, struct td_job *job, bool stopping)
{
    struct record *r = ctx;
    pthread_mutex_lock(&r->lock);
    if (r->n == N) abort(); /* cmocka's assertions are for its own thread */
    r->which[r->n] = ((struct numbered *)job)->number;
    r->stopping[r->n++] = stopping;
    pthread_cond_signal(&r->grown);
    pthread_mutex_unlock(&r->lock);
}

static void wait_for(struct record *r, int n)
{
    pthread_mutex_lock(&r->lock);
    while (r->n < n) pthread_cond_wait(&r->grown, &r->lock);
    pthread_mutex_unlock(&r->lock);
}

static void jobs_run_in_their_order(void **state)
{
    (void)state;
    struct record r = {.lock = PTHREAD_MUTEX_INITIALIZER, .grown = PTHREAD_COND_INITIALIZER};
    struct numbered jobs[N];
    struct td_job_thread *t;
    struct td_err err = {0};
    assert_int_equal(td_job_thread_create("jobs", run, &r, "", &t, &err), TD_OK);
    for (int i = 0; i < N; i++) {
        jobs[i].number = i;
        assert_true(td_job_thread_put(t, &jobs[i].job));
        if (i == N / 2) wait_for(&r, i + 1); /* the queue was empty in between */
    }
    wait_for(&r, N);
    assert_false(td_job_thread_drop(t, &jobs[N - 1].job)); /* it has run */
    td_job_thread_destroy(t);
    for (int i = 0; i < N; i++) {
        assert_int_equal(r.which[i], i);
        assert_false(r.stopping[i]);
    }
}

static void what_is_dropped_does_not_run(void **state)
{
    (void)state;
    struct record r = {.lock = PTHREAD_MUTEX_INITIALIZER, .grown = PTHREAD_COND_INITIALIZER};
    struct numbered jobs[N];
    struct td_job_thread *t;
    struct td_err err = {0};
    char gate[] = "/tmp/tandem-gate-XXXXXX"; /* taken away again: nothing begins */
    int fd = mkstemp(gate);
    assert_true(fd >= 0);
    close(fd);
    unlink(gate);
    assert_int_equal(td_job_thread_create("jobs", run, &r, gate, &t, &err), TD_OK);
    for (int i = 0; i < N; i++) {
        jobs[i].number = i;
        assert_true(td_job_thread_put(t, &jobs[i].job));
    }
    /* the first, one inside, and the last, behind which one more is put */
    assert_true(td_job_thread_drop(t, &jobs[0].job));
    assert_true(td_job_thread_drop(t, &jobs[3].job));
    assert_true(td_job_thread_drop(t, &jobs[N - 1].job));
    assert_false(td_job_thread_drop(t, &jobs[3].job));
    assert_true(td_job_thread_put(t, &jobs[3].job));
    FILE *f = fopen(gate, "w");
    assert_non_null(f);
    fclose(f);
    wait_for(&r, N - 2);
    td_job_thread_destroy(t);
    unlink(gate);
    const int want[] = {1, 2, 4, 5, 6, 3};
    assert_int_equal(r.n, N - 2);
    assert_memory_equal(r.which, want, sizeof want);
}

static void what_is_left_is_given_back(void **state)
{
    (void)state;
    struct record r = {.lock = PTHREAD_MUTEX_INITIALIZER, .grown = PTHREAD_COND_INITIALIZER};
    struct numbered jobs[3] = {{.number = 0}, {.number = 1}, {.number = 2}};
    struct td_job_thread *t;
    struct td_err err = {0};
    assert_int_equal(td_job_thread_create("jobs", run, &r, "/nowhere/at/all", &t, &err), TD_OK);
    assert_true(td_job_thread_put(t, &jobs[0].job));
    assert_true(td_job_thread_put(t, &jobs[1].job));
    td_job_thread_stop(t);
    assert_int_equal(r.n, 2);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(r.which[i], i);
        assert_true(r.stopping[i]);
    }
    assert_false(td_job_thread_put(t, &jobs[2].job));
    td_job_thread_stop(t);
    td_job_thread_destroy(t);
    td_job_thread_destroy(NULL);
    assert_int_equal(r.n, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jobs_run_in_their_order),
        cmocka_unit_test(what_is_dropped_does_not_run),
        cmocka_unit_test(what_is_left_is_given_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
