/* own_name_test.c - a worker waits for its own name to be known, and for no longer than the limit;
 * by a clock and a resolver that the test moves. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <string.h>

#include "common/base/clock.h"
#include "common/worker/own_name.h"

struct fake {
    uint64_t now_ns, look_ms;        /* how long a look takes */
    int n_looks, n_pauses, known_at; /* the look that finds the name; 0 = none does */
};

static td_status fake_look(void *ctx, const char *host, struct td_err *err)
{
    struct fake *f = ctx;
    assert_string_equal(host, "decode-0.workers");
    f->now_ns += f->look_ms * TD_NS_PER_MS;
    if (++f->n_looks == f->known_at) return TD_OK;
    return td_fail(err, TD_ERR_INVALID, "look %d failed", f->n_looks);
}

static uint64_t fake_now_ns(void *ctx) { return ((struct fake *)ctx)->now_ns; }

static void fake_pause(void *ctx, uint64_t ms)
{
    struct fake *f = ctx;
    f->now_ns += ms * TD_NS_PER_MS;
    f->n_pauses++;
}

static td_status wait_with(struct fake *f, struct td_err *err)
{
    f->now_ns = 77;
    const struct td_own_name_hooks hooks = {fake_look, fake_now_ns, fake_pause, f};
    return td_own_name_wait("decode-0.workers", &hooks, err);
}

static void waits(void **state)
{
    (void)state;
    for (int known_at = 1; known_at < 8; known_at++) {
        struct fake f = {.known_at = known_at, .look_ms = 3};
        assert_int_equal(wait_with(&f, NULL), TD_OK);
        assert_int_equal(f.n_looks, known_at);
        assert_int_equal(f.n_pauses, known_at - 1);
    }
}

/* Also with a name server that does not answer, for which a resolver waits 20 s. */
static void gives_up(void **state)
{
    (void)state;
    static const uint64_t look_ms[] = {0, 20000, TD_OWN_NAME_WAIT_MS};
    for (size_t i = 0; i < sizeof look_ms / sizeof *look_ms; i++) {
        struct fake f = {.look_ms = look_ms[i]};
        struct td_err err = {0};
        assert_int_equal(wait_with(&f, &err), TD_ERR_INVALID);
        uint64_t waited_ms = (f.now_ns - 77) / TD_NS_PER_MS;
        assert_true(waited_ms >= TD_OWN_NAME_WAIT_MS);
        assert_true(waited_ms <= TD_OWN_NAME_WAIT_MS + TD_OWN_NAME_AGAIN_MS + look_ms[i]);
        assert_non_null(strstr(err.msg, "limit 90 s"));
        assert_non_null(strstr(err.msg, "failed: asked for "));
    }
}

static void resolver(void **state)
{
    (void)state;
    assert_int_equal(td_own_name_wait("127.0.0.1", NULL, NULL), TD_OK);
    assert_int_equal(td_own_name_wait("::1", NULL, NULL), TD_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(waits),
        cmocka_unit_test(gives_up),
        cmocka_unit_test(resolver),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
