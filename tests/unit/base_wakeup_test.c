/* base_wakeup_test.c - no signal is lost, and two signals before a wake-up cost one. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <poll.h>
#include <pthread.h>
#include <unistd.h>

#include "common/base/clock.h"
#include "common/base/wakeup.h"

static bool is_readable(const struct td_wakeup *wakeup)
{
    struct pollfd p = {.fd = wakeup->fd, .events = POLLIN};
    return poll(&p, 1, 0) == 1;
}

static void rings_are_seen_once(void **state)
{
    (void)state;
    struct td_wakeup wakeup;
    assert_int_equal(td_wakeup_open(&wakeup, NULL), TD_OK);
    assert_false(td_wakeup_wait(&wakeup, 0));
    td_wakeup_signal(&wakeup);
    td_wakeup_signal(&wakeup);
    assert_true(is_readable(&wakeup)); /* an epoll loop may wait on it too */
    uint64_t count = 0;
    assert_int_equal(read(wakeup.fd, &count, sizeof count), sizeof count);
    assert_int_equal(count, 1); /* the second signal made no write */
    td_wakeup_clear(&wakeup);
    td_wakeup_signal(&wakeup);
    assert_true(td_wakeup_wait(&wakeup, TD_NEVER_NS));
    assert_false(is_readable(&wakeup));
    assert_false(td_wakeup_wait(&wakeup, 0));
    td_wakeup_close(&wakeup);
    td_wakeup_close(&wakeup); /* twice is fine, and so is one that was never opened */
    td_wakeup_close(&(struct td_wakeup){0});
}

static void a_deadline_ends_the_wait(void **state)
{
    (void)state;
    struct td_wakeup wakeup;
    assert_int_equal(td_wakeup_open(&wakeup, NULL), TD_OK);
    uint64_t deadline_ns = td_now_ns() + 5 * TD_NS_PER_MS;
    assert_false(td_wakeup_wait(&wakeup, deadline_ns));
    assert_true(td_now_ns() >= deadline_ns);
    assert_false(td_wakeup_wait(&wakeup, 1)); /* long past */
    td_wakeup_close(&wakeup);
}

enum { N_RINGERS = 3, N_ITEMS = 3000 };

struct traffic {
    struct td_wakeup wakeup;
    atomic_uint items;
};

static void *ring_many(void *arg)
{
    struct traffic *t = arg;
    for (int i = 0; i < N_ITEMS; i++) {
        atomic_fetch_add_explicit(&t->items, 1, memory_order_relaxed);
        td_wakeup_signal(&t->wakeup);
    }
    return NULL;
}

/* The owner counts items only after a signal. A lost signal would leave items uncounted and the
 * wait would reach its deadline. */
static void no_ring_of_many_threads_is_lost(void **state)
{
    (void)state;
    struct traffic t;
    atomic_init(&t.items, 0);
    assert_int_equal(td_wakeup_open(&t.wakeup, NULL), TD_OK);
    pthread_t threads[N_RINGERS];
    for (int i = 0; i < N_RINGERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, ring_many, &t), 0);
    unsigned n_seen = 0;
    while (n_seen < N_RINGERS * N_ITEMS) {
        assert_true(td_wakeup_wait(&t.wakeup, td_now_ns() + 30 * TD_NS_PER_S));
        n_seen += atomic_exchange_explicit(&t.items, 0, memory_order_relaxed);
    }
    for (int i = 0; i < N_RINGERS; i++) pthread_join(threads[i], NULL);
    assert_int_equal(n_seen, N_RINGERS * N_ITEMS);
    td_wakeup_close(&t.wakeup);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rings_are_seen_once),
        cmocka_unit_test(a_deadline_ends_the_wait),
        cmocka_unit_test(no_ring_of_many_threads_is_lost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
