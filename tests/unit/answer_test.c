/* answer_test.c - a chat's answer in messages to the client: which fields, in which order, and the
 * same however the text is cut. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/router.h"

#define LEN(a) ((int)(sizeof(a) / sizeof *(a)))

struct seen {
    char text[4096], reasoning[4096], calls[4096];
    int n_messages;
};

static void add(char *to, size_t room, const ProtobufCBinaryData *b)
{
    size_t n = strlen(to);
    snprintf(to + n, room - n, "%.*s", (int)b->len, (const char *)b->data);
}

static void see(struct seen *s, const Tandem__V1__GenerateResponse *m)
{
    int n_fields = (m->text.len > 0) + (m->reasoning.len > 0) + (m->n_tool_calls > 0);
    assert_true(n_fields <= 1); /* one delta a message */
    s->n_messages += n_fields;
    add(s->text, sizeof s->text, &m->text);
    add(s->reasoning, sizeof s->reasoning, &m->reasoning);
    for (size_t i = 0; i < m->n_tool_calls; i++) {
        const Tandem__V1__ToolCallDelta *d = m->tool_calls[i];
        size_t n = strlen(s->calls);
        if (d->name[0]) { /* the first of its index, and it alone, has an id and a name */
            assert_true(d->id[0]);
            snprintf(s->calls + n, sizeof s->calls - n, "[%u %s]", d->index, d->name);
        } else {
            assert_false(d->id[0]);
        }
        add(s->calls, sizeof s->calls, &d->arguments);
    }
}

static void take_message(void *call, const ProtobufCMessage *message)
{
    see(call, (const Tandem__V1__GenerateResponse *)message);
}

static const struct router_client_ops ops = {.send = take_message};

static struct late late; /* empty: this client is never behind */

/* In pieces of so many bytes, of an answer that has calls. */
static void feed(struct td_output_format format, const char *output, size_t n_bytes, size_t piece,
                 struct seen *s)
{
    struct router_client client = {&ops, s};
    struct answer *a = answer_create(format, false, "r1");
    assert_non_null(a);
    for (size_t at = 0; at <= n_bytes; at += piece) {
        Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
        size_t n = n_bytes - at < piece ? n_bytes - at : piece;
        answer_take(a, &late, client, output + at, n, at + piece > n_bytes, &m);
        see(s, &m);
    }
    assert_true(answer_has_calls(a));
    answer_free(a);
}

static void fields(void **state)
{
    (void)state;
    static const char output[] =
        "<think>\nhm\n</think>\n\nHi\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, "
        "2]}}\n"
        "</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    const struct td_output_format format = {TD_CALLS_HERMES, true};
    for (size_t piece = 1; piece <= sizeof output; piece++) {
        struct seen s = {0};
        feed(format, output, sizeof output - 1, piece, &s);
        assert_string_equal(s.text, "Hi\n");
        assert_string_equal(s.reasoning, "hm");
        assert_string_equal(s.calls, "[0 f]{\"a\": [1, 2]}[1 g]{}");
        /* whole: reasoning, text, one message for each call */
        if (piece == sizeof output) assert_int_equal(s.n_messages, 4);
    }
}

/* The same of channels: what a client sees of gpt-oss. */
static void channels(void **state)
{
    (void)state;
    static const char output[] =
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Hi\n<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        "<|message|>{\"a\": [1, 2]}";
    const struct td_output_format format = {TD_CALLS_HARMONY, TD_REASONING_CHANNELS};
    for (size_t piece = 1; piece <= sizeof output; piece++) {
        struct seen s = {0};
        feed(format, output, sizeof output - 1, piece, &s);
        assert_string_equal(s.text, "Hi\n");
        assert_string_equal(s.reasoning, "hm");
        assert_string_equal(s.calls, "[0 f]{\"a\": [1, 2]}");
        if (piece == sizeof output) assert_int_equal(s.n_messages, 3);
    }
}

/* What was held back comes with the end; a delta longer than a message goes in several. */
static void ends(void **state)
{
    (void)state;
    const struct td_output_format format = {TD_CALLS_MISTRAL, false};
    static char text[9000];
    struct seen s = {0};
    struct router_client client = {&ops, &s};
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    struct answer *a = answer_create(format, false, "r1");
    answer_take(a, &late, client, "no [TOOL_CA", 11, false, &m);
    see(&s, &m);
    assert_string_equal(s.text, "no ");
    m = (Tandem__V1__GenerateResponse)TANDEM__V1__GENERATE_RESPONSE__INIT;
    answer_take(a, &late, client, "", 0, true, &m);
    see(&s, &m);
    assert_string_equal(s.text, "no [TOOL_CA");
    assert_false(answer_has_calls(a));
    answer_free(a);

    a = answer_create((struct td_output_format){TD_CALLS_NONE, true}, true, "r1");
    memset(text, 'x', sizeof text);
    memset(&s, 0, sizeof s);
    m = (Tandem__V1__GenerateResponse)TANDEM__V1__GENERATE_RESPONSE__INIT;
    answer_take(a, &late, client, text, sizeof text, false, &m);
    s.n_messages += m.reasoning.len > 0;
    assert_true(s.n_messages >= 3);
    answer_free(a);
    answer_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fields),
        cmocka_unit_test(channels),
        cmocka_unit_test(ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
