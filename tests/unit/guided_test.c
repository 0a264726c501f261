/* guided_test.c - grammars that a worker compiles on a thread: asked for, submitted, dropped,
 * taken, and what is left of them when the thread stops. A gate, which is a file, holds the thread
 * up. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <pthread.h>

#include "common/worker/guided.h"

/* What `done` was told. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int n_done;
static void *last_done;

static void on_done(void *ctx, void *user)
{
    assert_ptr_equal(ctx, &n_done);
    pthread_mutex_lock(&lock);
    n_done++;
    last_done = user;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
}

static void wait_done(int n)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 120;
    pthread_mutex_lock(&lock);
    while (n_done < n) assert_int_equal(pthread_cond_timedwait(&changed, &lock, &until), 0);
    pthread_mutex_unlock(&lock);
}

static char gate[64];

static void set_gate(bool open)
{
    if (open)
        fclose(fopen(gate, "w"));
    else
        unlink(gate);
}

static struct td_guided *open_guided(void)
{
    static const int32_t eos = 0;
    struct td_guided *g = NULL;
    struct td_err err = {0};
    n_done = 0;
    set_gate(false);
    if (td_guided_open("models/pocket", 2048, &eos, 1, &g, &err) ||
        td_guided_start(g, on_done, &n_done, gate, &err))
        fail_msg("%s", err.msg);
    return g;
}

static struct td_seq seq;

static td_status ask(struct td_guided *g, const char *regex, void *user, struct td_guided_seq *ret,
                     struct td_guided_job **ret_job, struct td_err *err)
{
    struct td_grammar_text text = {regex, strlen(regex)};
    return td_guided_ask(g, TD_GRAMMAR_REGEX, &text, 1, user, &seq, ret, ret_job, err);
}

static void test_compiled_once(void **state)
{
    (void)state;
    struct td_guided *g = open_guided();
    struct td_guided_job *job[3];
    struct td_guided_seq s[3] = {{0}}, known = {0};
    struct td_err err = {0};
    int user[3];
    const char *const regex[] = {"[ab]{3}", "[ab]{3}", "(a"};
    for (int i = 0; i < 3; i++) {
        assert_int_equal(ask(g, regex[i], &user[i], &s[i], &job[i], &err), TD_INPROGRESS);
        td_guided_submit(job[i]);
    }
    set_gate(true);
    wait_done(3);
    assert_ptr_equal(last_done, &user[2]); /* in the order in which they came */
    assert_int_equal(td_guided_take(job[0], &seq, &s[0], &err), TD_OK);
    assert_int_equal(td_guided_take(job[1], &seq, &s[1], &err), TD_OK);
    assert_ptr_equal(s[0].entry, s[1].entry);
    assert_int_equal(td_guided_take(job[2], &seq, &s[2], &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "regex"));
    assert_int_equal(ask(g, "[ab]{3}", NULL, &known, &job[0], &err), TD_OK);
    assert_ptr_equal(known.entry, s[0].entry);
    assert_ptr_equal(seq.guide.ctx, &known);
    td_guided_end(&known);
    td_guided_end(&s[0]);
    td_guided_end(&s[1]);
    td_guided_stop(g);
    td_guided_close(g);
}

static void test_too_many_and_dropped(void **state)
{
    (void)state;
    struct td_guided *g = open_guided();
    struct td_guided_job *job[TD_GUIDED_MAX_JOBS], *more;
    struct td_guided_seq s = {0};
    struct td_err err = {0};
    char regex[32];
    for (int i = 0; i < TD_GUIDED_MAX_JOBS; i++) {
        snprintf(regex, sizeof regex, "a{%d}", i + 1);
        assert_int_equal(ask(g, regex, job, &s, &job[i], &err), TD_INPROGRESS);
        if (i) td_guided_submit(job[i]);
    }
    assert_int_equal(ask(g, "b", job, &s, &more, &err), TD_ERR_AGAIN);
    assert_string_equal(err.msg,
                        "guided: 64 grammars wait to be compiled on this worker, the limit");
    assert_true(td_guided_drop(job[0])); /* never submitted */
    assert_int_equal(ask(g, "b", job, &s, &job[0], &err), TD_INPROGRESS);
    td_guided_submit(job[0]);
    /* whoever waits can leave: the gate is shut, so the thread has begun none */
    for (int i = TD_GUIDED_MAX_JOBS - 1; i > 1; i--) assert_true(td_guided_drop(job[i]));
    set_gate(true);
    wait_done(2);
    for (int i = 0; i < 2; i++) { /* done is done: these are taken */
        assert_false(td_guided_drop(job[i]));
        assert_int_equal(td_guided_take(job[i], &seq, &s, &err), TD_OK);
        td_guided_end(&s);
    }
    td_guided_stop(g);
    td_guided_close(g);
}

static void test_stopped(void **state)
{
    (void)state;
    struct td_guided *g = open_guided();
    struct td_guided_job *job[3];
    struct td_guided_seq s = {0};
    struct td_err err = {0};
    const char *const regex[] = {"a", "b", "c"};
    for (int i = 0; i < 3; i++)
        assert_int_equal(ask(g, regex[i], job, &s, &job[i], &err), TD_INPROGRESS);
    td_guided_submit(job[0]);
    td_guided_submit(job[1]);
    td_guided_stop(g);
    assert_int_equal(n_done, 2);
    td_guided_submit(job[2]); /* too late for the thread: told at once */
    assert_int_equal(n_done, 3);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(td_guided_take(job[i], &seq, &s, &err), TD_ERR_CANCELLED);
        assert_string_equal(err.msg, "this worker is stopping");
    }
    td_guided_close(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_compiled_once),
        cmocka_unit_test(test_too_many_and_dropped),
        cmocka_unit_test(test_stopped),
    };
    snprintf(gate, sizeof gate, "/tmp/guided_test.%d", (int)getpid());
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(gate);
    return failed;
}
