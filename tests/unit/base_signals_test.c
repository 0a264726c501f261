/* base_signals_test.c - stop signals that are blocked wait to be taken, one at a time, and no
 * other signal is taken for one. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/signals.h"

static void only_the_two(void **state)
{
    (void)state;
    sigset_t set;
    td_stop_signals(&set);
    for (int sig = 1; sig < SIGRTMIN; sig++)
        assert_int_equal(sigismember(&set, sig), sig == SIGTERM || sig == SIGINT);
}

static void what_is_pending_is_taken_once(void **state)
{
    (void)state;
    static const int sent[] = {SIGTERM, SIGINT};
    for (size_t i = 0; i < 2; i++) {
        assert_int_equal(td_stop_signal_wait(0), 0);
        assert_int_equal(kill(getpid(), sent[i]), 0);
        assert_int_equal(td_stop_signal_wait(i ? -1 : 60000), sent[i]);
        assert_int_equal(td_stop_signal_wait(0), 0);
    }
    kill(getpid(), SIGTERM);
    kill(getpid(), SIGINT);
    int first = td_stop_signal_wait(0), second = td_stop_signal_wait(0);
    assert_true((first == SIGTERM && second == SIGINT) || (first == SIGINT && second == SIGTERM));
    assert_int_equal(td_stop_signal_wait(0), 0);
}

static void a_time_out_ends(void **state)
{
    (void)state;
    uint64_t began = td_now_ns();
    assert_int_equal(td_stop_signal_wait(1050), 0); /* a second and a part of one: both halves of
                                                       the time are used */
    assert_true(td_now_ns() - began >= 1050 * TD_NS_PER_MS);
}

static int n_usr1;
static void count_usr1(int sig)
{
    (void)sig;
    n_usr1++;
}

static void *send_usr1(void *main_thread)
{
    pthread_kill(*(pthread_t *)main_thread, SIGUSR1);
    return NULL;
}

static void another_signal_is_none(void **state)
{
    (void)state;
    pthread_t self = pthread_self(), sender;
    struct sigaction action = {.sa_handler = count_usr1}, old;
    assert_int_equal(sigaction(SIGUSR1, &action, &old), 0);
    assert_int_equal(pthread_create(&sender, NULL, send_usr1, &self), 0);
    assert_int_equal(td_stop_signal_wait(200), 0); /* interrupted, or over */
    pthread_join(sender, NULL);
    assert_int_equal(n_usr1, 1);
    assert_int_equal(sigaction(SIGUSR1, &old, NULL), 0);
}

static int block(void **state)
{
    (void)state;
    sigset_t set;
    td_stop_signals(&set);
    return pthread_sigmask(SIG_BLOCK, &set, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(only_the_two), cmocka_unit_test(what_is_pending_is_taken_once),
        cmocka_unit_test(a_time_out_ends), cmocka_unit_test(another_signal_is_none)};
    return cmocka_run_group_tests(tests, block, NULL);
}
