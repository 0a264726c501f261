/* received_test.c - when a lost call is tried again, by an injected clock; and what a client has of
 * an answer, however its messages part it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/rpc/received.h"

#define MS TD_NS_PER_MS

/* Tries that each last 1 ms, until it gives up; returns how many, and when. */
static uint32_t give_up(struct td_retry *t, uint32_t n_servers, uint64_t n_received,
                        uint64_t lasts_ms, uint64_t *ret_ms)
{
    uint64_t now_ns = 1000 * MS, wait_ms = 0, began_ns = now_ns;
    for (uint32_t n = 1;; n++) {
        uint64_t try_ns = now_ns;
        now_ns += lasts_ms * MS;
        if (!td_retry_next(t, try_ns, now_ns, n_received, n_servers, &wait_ms)) {
            *ret_ms = (now_ns - began_ns) / MS;
            return n;
        }
        assert_true(wait_ms <= 2000);
        if (n < n_servers) assert_int_equal(wait_ms, 0); /* the others are tried at once */
        if (n >= n_servers) assert_true(wait_ms >= 50);
        now_ns += wait_ms * MS;
    }
}

static void test_bounds(void **unused)
{
    (void)unused;
    uint64_t ms;
    struct td_retry never = {0};
    assert_int_equal(give_up(&never, 2, 5, 1, &ms), 1);
    struct td_retry unreached = {.budget_ms = 30000};
    give_up(&unreached, 1, 0, 1, &ms);
    assert_true(ms >= 2000 && ms < 4200); /* a wrong address */
    struct td_retry lost = {.budget_ms = 30000};
    give_up(&lost, 2, 5, 1, &ms);
    assert_true(ms >= 30000 && ms < 32100);
    struct td_retry waited = {.budget_ms = 30000}; /* nothing came, but somebody kept the call */
    give_up(&waited, 1, 0, 300, &ms);
    assert_true(ms >= 30000 && ms < 33000);
    struct td_retry many = {.budget_ms = 86400000};
    assert_int_equal(give_up(&many, 1, 5, 1, &ms), TD_RETRY_MAX_TRIES + 1);
}

static void test_progress_starts_anew(void **unused)
{
    (void)unused;
    struct td_retry t = {.budget_ms = 1000};
    uint64_t now_ns = 5000 * MS, wait_ms;
    for (uint64_t n = 1; n <= 200; n++) { /* each try brings a message */
        assert_true(td_retry_next(&t, now_ns, now_ns + 900 * MS, n, 2, &wait_ms));
        assert_int_equal(wait_ms, 0);
        now_ns += 900 * MS;
    }
    assert_true(td_retry_next(&t, now_ns, now_ns + 900 * MS, 200, 2, &wait_ms));
    assert_false(td_retry_next(&t, now_ns, now_ns + 1900 * MS, 200, 2, &wait_ms));
}

static void test_what_came(void **unused)
{
    (void)unused;
    struct td_received *r = td_received_create(3);
    Tandem__V1__GenerateRequest request = TANDEM__V1__GENERATE_REQUEST__INIT;
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    Tandem__V1__ToolCallDelta d = TANDEM__V1__TOOL_CALL_DELTA__INIT, *deltas[] = {&d};
    int32_t ids[] = {7, 8, 9};
    assert_non_null(r);
    td_received_resume(r, &request);
    assert_null(request.resume_from); /* nothing came: it begins anew */
    m.choice = 2;
    m.seed = 1; /* of choice 2: choice 0's is 2 less, modulo 2^64 */
    m.max_tokens = 40;
    m.prompt_hash = 99;
    m.request_id = (char *)(uintptr_t) "mine";
    m.token_ids = ids;
    m.n_token_ids = 2;
    m.text = (ProtobufCBinaryData){3, (uint8_t *)(uintptr_t) "abc"};
    assert_true(td_received_take(r, &m));
    tandem__v1__generate_response__init(&m);
    m.choice = 2;
    m.token_ids = ids + 2;
    m.n_token_ids = 1;
    d.name = (char *)(uintptr_t) "get";
    d.arguments = (ProtobufCBinaryData){2, (uint8_t *)(uintptr_t) "{}"};
    m.n_tool_calls = 1;
    m.tool_calls = deltas;
    m.finish_reason = TANDEM__V1__FINISH_REASON__FINISH_STOP;
    assert_true(td_received_take(r, &m));
    td_received_resume(r, &request);
    const Tandem__V1__ResumeFrom *f = request.resume_from;
    assert_string_equal(request.request_id, "mine");
    assert_true(f->seed == UINT64_MAX && f->max_tokens == 40 && f->prompt_hash == 99);
    assert_int_equal(f->n_choices, 3);
    assert_int_equal(f->choices[0]->n_token_ids, 0);
    const Tandem__V1__ResumeChoice *c = f->choices[2];
    assert_int_equal(c->n_token_ids, 3);
    assert_memory_equal(c->token_ids, ids, sizeof ids);
    assert_true(c->text_bytes == 3 && c->tool_calls == 1 && c->argument_bytes == 2 && c->finished);
    assert_int_equal(td_received_n_tokens(r), 3);
    m.choice = 3;
    assert_false(td_received_take(r, &m)); /* a choice that was not asked for */
    td_received_free(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bounds),
                                       cmocka_unit_test(test_progress_starts_anew),
                                       cmocka_unit_test(test_what_came)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
