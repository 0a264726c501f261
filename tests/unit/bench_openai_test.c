/* bench_openai_test.c - server-sent events cut at every byte; what is in a chunk of a
 * completion; what a body says about a failure. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/serve/openai.h"

struct got { /* the events, each with a '|' behind it */
    char text[4096];
    size_t n, n_events, fail_at; /* fail_at: refuse the event of this number, from 1; 0 = none */
};

static td_status on_event(const char *data, size_t n_bytes, void *ctx, struct td_err *err)
{
    struct got *g = ctx;
    if (++g->n_events == g->fail_at) return td_fail(err, TD_ERR_PEER, "enough");
    assert_true(g->n + n_bytes + 2 < sizeof g->text);
    memcpy(g->text + g->n, data, n_bytes);
    g->n += n_bytes;
    g->text[g->n++] = '|';
    g->text[g->n] = 0;
    return TD_OK;
}

/* The stream in pieces that end at a and b. Each piece is memory of its own, so that reading
 * past it is seen. */
static void feed_cut(const char *stream, size_t n, size_t a, size_t b, struct got *g)
{
    struct bench_sse s = {0};
    struct td_err err = {0};
    const size_t ends[] = {a, b, n};
    for (size_t i = 0, from = 0; i < 3; from = ends[i++]) {
        char *piece = malloc(ends[i] - from + 1);
        assert_non_null(piece);
        memcpy(piece, stream + from, ends[i] - from);
        assert_int_equal(bench_sse_feed(&s, piece, ends[i] - from, on_event, g, &err), TD_OK);
        free(piece);
    }
    bench_sse_free(&s);
}

static void test_events_cut_anywhere(void **state)
{
    static const struct {
        const char *stream, *events;
    } cases[] = {
        {"data: one\n\ndata: two\n\n", "one|two|"},
        {"data: one\r\n\r\ndata: two\r\n\r\n", "one|two|"},
        {"data: one\r\rdata: two\r\r", "one|two|"},
        {"data: a\r\ndata: b\r\n\r\ndata: c\rdata: d\r\r", "a\nb|c\nd|"},
        {"data: one\n\r\ndata: two\r\n\n", "one|two|"},
        {"data:one\n\ndata:  two\n\n", "one| two|"},
        {": ping\n\ndata: a\n: between\ndata: b\n\n:\n\n", "a\nb|"},
        {"event: message\nid: 7\ndata: a\nretry: 10\n\n", "a|"},
        {"data\n\ndata:\n\ndata: \n\n", "|||"},
        {"data: a\ndata\ndata: b\n\n", "a\n\nb|"},
        {"dat: no\ndatas: no\n data: no\nDATA: no\nlongername: no\ndata: yes\n\n", "yes|"},
        {"\n\n\r\n\r\ndata: a: b\n\n", "a: b|"},
        {"data: \xc3\xa9\xe2\x82\xac\n\n", "\xc3\xa9\xe2\x82\xac|"},
        {"data: whole\n\ndata: broken off\n", "whole|"},
        {"data: broken off", ""},
        {"", ""},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t n = strlen(cases[i].stream);
        for (size_t a = 0; a <= n; a++)
            for (size_t b = a; b <= n; b++) {
                struct got g = {0};
                feed_cut(cases[i].stream, n, a, b, &g);
                if (strcmp(g.text, cases[i].events) != 0)
                    fail_msg("case %zu cut at %zu and %zu: %s", i, a, b, g.text);
            }
    }
}

static void test_an_event_is_bounded(void **state)
{
    struct bench_sse s = {0};
    struct td_err err = {0};
    struct got g = {0};
    char *much = malloc(BENCH_SSE_MAX_EVENT + 1);
    (void)state;
    assert_non_null(much);
    memset(much, 'x', BENCH_SSE_MAX_EVENT + 1);
    /* What is not kept may be as long as it likes. */
    assert_int_equal(bench_sse_feed(&s, ":", 1, on_event, &g, &err), TD_OK);
    assert_int_equal(bench_sse_feed(&s, much, BENCH_SSE_MAX_EVENT + 1, on_event, &g, &err), TD_OK);
    assert_int_equal(bench_sse_feed(&s, "\n\ndata:", 7, on_event, &g, &err), TD_OK);
    assert_int_equal(bench_sse_feed(&s, much, BENCH_SSE_MAX_EVENT, on_event, &g, &err), TD_OK);
    assert_int_equal(bench_sse_feed(&s, much, 1, on_event, &g, &err), TD_ERR_INVALID);
    assert_non_null(strstr(err.msg, "1048576"));
    assert_int_equal(g.n_events, 0);
    bench_sse_free(&s);
    free(much);
}

static void test_a_reader_that_refuses_ends_it(void **state)
{
    struct bench_sse s = {0};
    struct td_err err = {0};
    struct got g = {.fail_at = 2};
    static const char stream[] = "data: 1\n\ndata: 2\n\ndata: 3\n\n";
    (void)state;
    assert_int_equal(bench_sse_feed(&s, stream, sizeof stream - 1, on_event, &g, &err),
                     TD_ERR_PEER);
    assert_string_equal(g.text, "1|");
    assert_int_equal(g.n_events, 2);
    bench_sse_free(&s);
}

static void test_chunks(void **state)
{
    static const struct {
        const char *data;
        struct bench_chunk want;
    } cases[] = {
        {"[DONE]",
         {.is_done = true, .prompt_tokens = -1, .completion_tokens = -1, .cached_tokens = -1}},
        {"{\"choices\": [{\"index\": 0, \"text\": \" a\", \"finish_reason\": null}]}",
         {.has_choice = true,
          .has_tokens = true,
          .prompt_tokens = -1,
          .completion_tokens = -1,
          .cached_tokens = -1}},
        {"{\"choices\": [{\"text\": \"\", \"finish_reason\": null}], \"usage\": null}",
         {.has_choice = true, .prompt_tokens = -1, .completion_tokens = -1, .cached_tokens = -1}},
        {"{\"choices\": [{\"text\": \"\", \"token_ids\": [5, 6]}]}",
         {.has_choice = true,
          .has_tokens = true,
          .n_ids = 2,
          .prompt_tokens = -1,
          .completion_tokens = -1,
          .cached_tokens = -1}},
        {"{\"choices\": [{\"text\": \"x\", \"finish_reason\": \"length\"}]}",
         {.has_choice = true,
          .has_tokens = true,
          .has_finish = true,
          .prompt_tokens = -1,
          .completion_tokens = -1,
          .cached_tokens = -1}},
        {"{\"choices\": [], \"usage\": {\"prompt_tokens\": 7, \"completion_tokens\": 3, "
         "\"prompt_tokens_details\": {\"cached_tokens\": 4}}}",
         {.has_usage = true,
          .has_cached = true,
          .prompt_tokens = 7,
          .completion_tokens = 3,
          .cached_tokens = 4}},
        {"{\"usage\": {\"prompt_tokens\": 7, \"prompt_tokens_details\": null}}",
         {.has_usage = true, .prompt_tokens = 7, .completion_tokens = -1, .cached_tokens = -1}},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct bench_chunk got, want = cases[i].want;
        struct td_err err = {0};
        memset(&got, 0xee, sizeof got);
        if (bench_chunk_parse(cases[i].data, strlen(cases[i].data), &got, &err))
            fail_msg("case %zu: %s", i, err.msg);
        if (got.is_done != want.is_done || got.has_choice != want.has_choice ||
            got.has_tokens != want.has_tokens || got.n_ids != want.n_ids ||
            got.has_finish != want.has_finish || got.has_usage != want.has_usage ||
            got.has_cached != want.has_cached || got.prompt_tokens != want.prompt_tokens ||
            got.completion_tokens != want.completion_tokens ||
            got.cached_tokens != want.cached_tokens)
            fail_msg("case %zu: %s", i, cases[i].data);
    }
}

static void test_bad_chunks_are_named(void **state)
{
    static const struct {
        const char *data;
        td_status status;
        const char *says;
    } cases[] = {
        {"", TD_ERR_INVALID, "chunk"},
        {"{\"choices\": [", TD_ERR_INVALID, "chunk"},
        {"[1]", TD_ERR_INVALID, "object"},
        {"{\"choices\": {}}", TD_ERR_INVALID, "choices must be an array"},
        {"{\"choices\": [3]}", TD_ERR_INVALID, "choices[0]"},
        {"{\"choices\": [{\"text\": 3}]}", TD_ERR_INVALID, "text"},
        {"{\"choices\": [{\"text\": \"a\", \"token_ids\": 3}]}", TD_ERR_INVALID, "token_ids"},
        {"{\"choices\": [{\"text\": \"a\", \"finish_reason\": 3}]}", TD_ERR_INVALID,
         "finish_reason"},
        {"{\"choices\": [], \"usage\": 3}", TD_ERR_INVALID, "usage"},
        {"{\"choices\": [], \"usage\": {\"completion_tokens\": -1}}", TD_ERR_INVALID,
         "completion_tokens"},
        {"{\"choices\": [], \"usage\": {\"prompt_tokens\": 4294967296}}", TD_ERR_INVALID,
         "4294967296"},
        {"{\"error\": {\"message\": \"engine died\", \"code\": 500}}", TD_ERR_PEER, "engine died"},
        {"{\"object\": \"error\", \"message\": \"too long\"}", TD_ERR_PEER, "too long"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct bench_chunk c = {.n_ids = 77};
        struct td_err err = {0};
        td_status s = bench_chunk_parse(cases[i].data, strlen(cases[i].data), &c, &err);
        if (s != cases[i].status || !strstr(err.msg, cases[i].says))
            fail_msg("case %zu: %d: %s", i, (int)s, err.msg);
        assert_int_equal(c.n_ids, 77);
    }
}

static void test_failures_in_words(void **state)
{
    static const struct {
        const char *body, *says;
    } cases[] = {
        {"{\"error\": {\"message\": \"no\\nroom\"}}", "no room"},
        {"{\"error\": \"busy\"}", "busy"},
        {"{\"message\": \"old\"}", "old"},
        {"{\"detail\": \"Not Found\"}", "Not Found"},
        {"{\"detail\": [1]}", "{\"detail\": [1]}"},
        {"<html>\r\n<body>", "<html>"},
        {"bad \xff byte \xc3\xa9", "bad ? byte \xc3\xa9"},
        {"half \xe2\x82", "half ??"},
        {"", ""},
    };
    char message[201], longer[512], want[201];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        bench_openai_error(cases[i].body, strlen(cases[i].body), message);
        assert_string_equal(message, cases[i].says);
    }
    /* Cut where a character ends: 199 letters, then one of two bytes. */
    memset(longer, 'a', sizeof longer);
    memcpy(longer + 199, "\xc3\xa9", 2);
    memset(want, 'a', 199);
    want[199] = 0;
    bench_openai_error(longer, sizeof longer, message);
    assert_string_equal(message, want);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_events_cut_anywhere),
        cmocka_unit_test(test_an_event_is_bounded),
        cmocka_unit_test(test_a_reader_that_refuses_ends_it),
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_bad_chunks_are_named),
        cmocka_unit_test(test_failures_in_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
