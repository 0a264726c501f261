/* shares_test.c - the parts of --max-requests: a flooded model leaves room to a quiet one, room
 * that nobody uses is for whoever asks, and who was refused gets its part as others' requests end.
 */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/random.h"
#include "router/shares.h"

enum { A, B, C };

static const uint64_t MS = TD_NS_PER_MS;

static uint32_t take_all(struct router_shares *s, uint32_t model, uint64_t now_ns)
{
    while (router_share_may_take(s, model, 1, now_ns)) s->of[model].n_live++;
    return s->of[model].n_live;
}

static void one_model_has_all(void **unused)
{
    (void)unused;
    struct router_shares s = {.n_requests = 7, .n_models = 1};
    assert_int_equal(take_all(&s, A, MS), 7);
    assert_false(router_share_may_take(&s, A, 1, 10000 * MS));
    s.of[A].n_live = 4;
    assert_true(router_share_may_take(&s, A, 3, 10000 * MS));
    assert_false(router_share_may_take(&s, A, 4, 10000 * MS));
}

static void unused_room_is_for_whoever_asks(void **unused)
{
    (void)unused;
    const struct {
        uint32_t n_requests, n_models, want;
    } cases[] = {
        /* requests, models, what one of them can hold: all but an eighth of the others' parts */
        {1024, 2, 960}, {1024, 32, 900}, {16, 2, 15}, {4, 2, 3},
        {3, 2, 3},      {1, 2, 1},       {1, 32, 1},  {64, 32, 33},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct router_shares s = {.n_requests = cases[i].n_requests, .n_models = cases[i].n_models};
        assert_int_equal(take_all(&s, cases[i].n_models - 1, MS), cases[i].want);
    }
}

static void a_quiet_model_finds_room(void **unused)
{
    (void)unused;
    struct router_shares s = {.n_requests = 1024, .n_models = 2};
    take_all(&s, A, MS);
    assert_int_equal(take_all(&s, B, 2 * MS), 64);
    /* choices of one call count each */
    s.of[B].n_live = 0;
    assert_true(router_share_may_take(&s, B, 64, 3 * MS));
    assert_false(router_share_may_take(&s, B, 65, 3 * MS));
}

/* A floods and asks again whenever anything ends; B has been refused and gets what ends. */
static void who_was_refused_gets_its_part(void **unused)
{
    (void)unused;
    struct router_shares s = {.n_requests = 1024, .n_models = 2};
    uint64_t now = MS;
    take_all(&s, A, now);
    for (int i = 0; i < 2000; i++) {
        now += MS;
        take_all(&s, B, now);
        if (s.of[A].n_live) s.of[A].n_live--; /* one of its requests ends, and it asks first */
        take_all(&s, A, now);
    }
    assert_int_equal(s.of[A].n_live, 512);
    assert_int_equal(s.of[B].n_live, 512);
    /* B has nothing more to ask: what it leaves is A's again, but for what is always kept. */
    now += (SHARE_SHORT_MS + 1) * MS;
    s.of[B].n_live = 0;
    assert_int_equal(take_all(&s, A, now), 960);
}

/* Random asks and ends: never more than there is, and nobody is refused but for live requests and
 * what is kept of others' parts. */
static void any_order_keeps_the_bounds(void **unused)
{
    (void)unused;
    const char *text = getenv("SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : td_now_ns();
    print_message("SEED=%" PRIu64 "\n", seed);
    for (int run = 0; run < 200; run++) {
        struct router_shares s = {.n_requests = 1 + td_random_index(&seed, 100),
                                  .n_models = 1 + td_random_index(&seed, ROUTER_MAX_MODELS)};
        uint64_t now = MS;
        for (int i = 0; i < 500; i++) {
            uint32_t m = td_random_index(&seed, s.n_models), total = 0;
            if (m % 3) m = 0; /* one is asked for more */
            now += td_random_index(&seed, 50) * MS;
            if (td_random_index(&seed, 3) == 0 && s.of[m].n_live) {
                s.of[m].n_live--;
                continue;
            }
            uint32_t n = 1 + td_random_index(&seed, 4);
            bool took = router_share_may_take(&s, m, n, now);
            if (took) s.of[m].n_live += n;
            for (uint32_t k = 0; k < s.n_models; k++) total += s.of[k].n_live;
            assert_true(total <= s.n_requests);
            /* Somebody can be refused only because of live requests and of what is kept. */
            if (!took && total + n <= s.n_requests) {
                uint64_t kept = 0;
                for (uint32_t k = 0; k < s.n_models; k++)
                    if (k != m && s.of[k].n_live < router_share_part(&s))
                        kept += router_share_part(&s) - s.of[k].n_live;
                assert_true(total + n + kept > s.n_requests);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_model_has_all),
        cmocka_unit_test(unused_room_is_for_whoever_asks),
        cmocka_unit_test(a_quiet_model_finds_room),
        cmocka_unit_test(who_was_refused_gets_its_part),
        cmocka_unit_test(any_order_keeps_the_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
