/* late_test.c - what a client that is behind gets as one message: the same tokens and text as in
 * messages of their own, in order, whatever is behind when. */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/base/clock.h"
#include "common/base/random.h"
#include "router/late.h"

enum { MAX_TEXT = 1 << 20, MAX_TOKENS = 20000 };

/* A client that collects. */
struct client {
    bool is_behind, stays_behind;
    char text[MAX_TEXT], reasoning[MAX_TEXT], arguments[MAX_TEXT];
    size_t n_text, n_reasoning, n_arguments, n_messages, n_calls;
    int32_t ids[MAX_TOKENS];
    float logprobs[MAX_TOKENS];
    size_t n_ids, n_logprobs;
    size_t largest; /* message, in bytes */
    bool is_over;
    uint32_t n_prompt;
    char request_id[16];
};

static void add(char *to, size_t *n, const ProtobufCBinaryData *from)
{
    assert_true(*n + from->len <= MAX_TEXT);
    if (from->len) memcpy(to + *n, from->data, from->len);
    *n += from->len;
}

static void client_send(void *call, const ProtobufCMessage *message)
{
    struct client *c = call;
    const Tandem__V1__GenerateResponse *m = (const Tandem__V1__GenerateResponse *)message;
    size_t n_bytes = protobuf_c_message_get_packed_size(message);
    if (n_bytes > c->largest) c->largest = n_bytes;
    assert_false(c->is_over);
    c->n_messages++;
    add(c->text, &c->n_text, &m->text);
    add(c->reasoning, &c->n_reasoning, &m->reasoning);
    for (size_t i = 0; i < m->n_token_ids; i++) c->ids[c->n_ids++] = m->token_ids[i];
    for (size_t i = 0; i < m->n_logprobs; i++)
        c->logprobs[c->n_logprobs++] = m->logprobs[i]->logprob;
    for (size_t i = 0; i < m->n_tool_calls; i++, c->n_calls++)
        add(c->arguments, &c->n_arguments, &m->tool_calls[i]->arguments);
    if (m->request_id[0]) snprintf(c->request_id, sizeof c->request_id, "%s", m->request_id);
    if (m->prompt_tokens) c->n_prompt = m->prompt_tokens;
    if (m->finish_reason) {
        c->is_over = true;
        assert_int_equal(m->usage->output_tokens, c->n_ids);
    }
    if (c->stays_behind) c->is_behind = true;
}

static bool client_is_behind(void *call) { return ((struct client *)call)->is_behind; }

static const struct router_client_ops ops = {.send = client_send, .is_behind = client_is_behind};

/* Message i of an answer: a token, its text in one of three fields. */
static void send_token(struct late *l, struct router_client client, uint32_t i, bool is_last)
{
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    Tandem__V1__Logprobs logprob = TANDEM__V1__LOGPROBS__INIT, *logprobs[] = {&logprob};
    Tandem__V1__ToolCallDelta delta = TANDEM__V1__TOOL_CALL_DELTA__INIT, *deltas[] = {&delta};
    Tandem__V1__Usage usage = TANDEM__V1__USAGE__INIT;
    char text[32];
    int32_t id = (int32_t)i;
    ProtobufCBinaryData piece = {(size_t)snprintf(text, sizeof text, "<%u>", i), (uint8_t *)text};
    m.n_token_ids = 1;
    m.token_ids = &id;
    logprob.logprob = (float)i;
    m.n_logprobs = 1;
    m.logprobs = logprobs;
    if (i % 7 == 3) {
        m.reasoning = piece;
    } else if (i % 7 == 5) {
        delta.arguments = piece;
        m.n_tool_calls = 1;
        m.tool_calls = deltas;
    } else if (i % 7 != 6) {
        m.text = piece;
    }
    if (i == 0) {
        m.request_id = (char *)(uintptr_t) "mine";
        m.prompt_tokens = 9;
    }
    if (is_last) {
        m.finish_reason = TANDEM__V1__FINISH_REASON__FINISH_LENGTH;
        usage.output_tokens = i + 1;
        m.usage = &usage;
    }
    late_send(l, client, &m);
}

static void check_equal(const struct client *a, const struct client *b, size_t n)
{
    assert_true(a->is_over && b->is_over);
    assert_int_equal(a->n_ids, n);
    assert_int_equal(b->n_ids, n);
    assert_memory_equal(a->ids, b->ids, n * sizeof *a->ids);
    assert_int_equal(a->n_logprobs, b->n_logprobs);
    assert_memory_equal(a->logprobs, b->logprobs, n * sizeof *a->logprobs);
    assert_int_equal(a->n_text, b->n_text);
    assert_memory_equal(a->text, b->text, a->n_text);
    assert_int_equal(a->n_reasoning, b->n_reasoning);
    assert_memory_equal(a->reasoning, b->reasoning, a->n_reasoning);
    assert_int_equal(a->n_calls, b->n_calls);
    assert_memory_equal(a->arguments, b->arguments, a->n_arguments);
    assert_string_equal(a->request_id, b->request_id);
    assert_int_equal(a->n_prompt, b->n_prompt);
}

static void everything_comes_in_order(void **unused)
{
    (void)unused;
    const char *text = getenv("SEED");
    uint64_t seed = text ? strtoull(text, NULL, 10) : td_now_ns();
    struct client *plain = calloc(1, sizeof *plain), *slow = calloc(1, sizeof *slow);
    print_message("SEED=%" PRIu64 "\n", seed);
    for (int run = 0; run < 20; run++) {
        uint32_t n = 1 + td_random_index(&seed, 500);
        struct late a = {0}, b = {0};
        memset(plain, 0, sizeof *plain);
        memset(slow, 0, sizeof *slow);
        struct router_client to_plain = {&ops, plain}, to_slow = {&ops, slow};
        for (uint32_t i = 0; i < n; i++) {
            send_token(&a, to_plain, i, i == n - 1);
            slow->is_behind = td_random_index(&seed, 4) != 0;
            if (!slow->is_behind) late_flush(&b, to_slow); /* the door: it has caught up */
            send_token(&b, to_slow, i, i == n - 1);
        }
        check_equal(plain, slow, n);
        assert_int_equal(plain->n_messages, n);
        assert_true(slow->n_messages <= n);
        late_free(&a);
        late_free(&b);
    }
    free(plain);
    free(slow);
}

/* One message for a client that takes none after the first, until 64 KiB are there. */
static void a_client_that_is_behind_gets_few(void **unused)
{
    (void)unused;
    struct client *slow = calloc(1, sizeof *slow);
    struct late l = {0};
    struct router_client to = {&ops, slow};
    slow->stays_behind = true;
    for (uint32_t i = 0; i < 1000; i++) send_token(&l, to, i, false);
    assert_int_equal(slow->n_messages, 1);
    send_token(&l, to, 1000, true);
    assert_int_equal(slow->n_messages, 2);
    assert_int_equal(slow->n_ids, 1001);
    memset(slow, 0, sizeof *slow);
    slow->stays_behind = true;
    for (uint32_t i = 0; i < MAX_TOKENS; i++) {
        send_token(&l, to, i, i == MAX_TOKENS - 1);
        assert_true(l.n_bytes <= 66 << 10 && l.capacity <= 128 << 10);
    }
    assert_int_equal(slow->n_ids, MAX_TOKENS);
    assert_true(slow->n_messages > 4 && slow->n_messages < 20 && slow->largest < 66 << 10);
    late_free(&l);
    free(slow);
}

/* A door that is never behind costs no copy. */
static void a_door_without_the_question_keeps_nothing(void **unused)
{
    (void)unused;
    static const struct router_client_ops plain_ops = {.send = client_send};
    struct client *c = calloc(1, sizeof *c);
    struct late l = {0};
    for (uint32_t i = 0; i < 10; i++)
        send_token(&l, (struct router_client){&plain_ops, c}, i, i == 9);
    assert_int_equal(c->n_messages, 10);
    assert_null(l.bytes);
    free(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(everything_comes_in_order),
        cmocka_unit_test(a_client_that_is_behind_gets_few),
        cmocka_unit_test(a_door_without_the_question_keeps_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
