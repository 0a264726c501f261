/* openai_answer_test.c - answers as OpenAI's JSON: whatever the pieces, it parses, and a stream's
 * pieces together are what the body says; JSON strings; errors and the fields they name. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>

#include "common/base/random.h"
#include "router/http/openai_answer.h"

enum { MAX_PIECES = 12, MAX_TOKENS = 4, MAX_TEXT = 24, MAX_TOP = 3 };

static uint64_t seed;

static uint32_t draw(uint32_t n) { return td_random_index(&seed, n); }

static json_t *load(const char *bytes, size_t n)
{
    json_error_t e;
    json_t *v = json_loadb(bytes, n, JSON_DECODE_ANY | JSON_ALLOW_NUL, &e);
    if (!v) fail_msg("%s: %.*s", e.text, (int)n, bytes);
    return v;
}

/* Whole characters, of each length, and those that JSON escapes. */
static size_t draw_text(char *to)
{
    static const char *const characters[] = {"a",
                                             "\"",
                                             "\\",
                                             "\n",
                                             "\x01",
                                             "\x7f",
                                             "\xc3\xa9",
                                             "/",
                                             " ",
                                             "\t",
                                             "\r",
                                             "\xe2\x82\xac",
                                             "<",
                                             "\xf0\x9f\x98\x80",
                                             "\xef\xbf\xbd",
                                             "\xed\x9f\xbf"};
    size_t n = 0;
    for (uint32_t i = draw(5); i > 0; i--) {
        const char *c = characters[draw(sizeof characters / sizeof *characters)];
        memcpy(to + n, c, strlen(c));
        n += strlen(c);
    }
    if (draw(8) == 0) to[n++] = 0;
    return n;
}

/* Whether some bytes behind these n make a character of them, which jansson says. */
static bool begins_a_character(const char *text, size_t n)
{
    static const char next[] = {(char)0x80, (char)0x90, (char)0xa0};
    for (size_t i = 0; i < sizeof next; i++)
        for (size_t len = n + 1; len <= 4; len++) {
            char whole[4] = {[1] = (char)0x80, [2] = (char)0x80, [3] = (char)0x80};
            memcpy(whole, text, n);
            whole[n] = next[i];
            json_t *v = json_stringn(whole, len);
            json_decref(v);
            if (v) return true;
        }
    return false;
}

static void test_strings_are_json(void **state)
{
    (void)state;
    for (uint64_t turn = 1; turn <= 2000; turn++) {
        seed = turn * 7919;
        char text[64];
        size_t n = draw_text(text);
        struct text_buffer b = {0};
        text_add_json(&b, text, n);
        json_t *v = load(b.bytes, b.n);
        assert_int_equal(json_string_length(v), n);
        assert_memory_equal(json_string_value(v), text, n);
        char *dump = json_dumps(v, JSON_ENCODE_ANY);
        json_t *again = load(dump, strlen(dump));
        assert_true(json_equal(v, again));
        json_decref(again);
        free(dump);
        json_decref(v);
        text_free(&b);

        for (size_t i = 0; i < 32; i++) text[i] = (char)(draw(3) ? draw(256) : 0x80 + draw(128));
        text_add_json(&b, text, 32); /* any bytes: characters stay, the rest becomes U+FFFD */
        v = load(b.bytes, b.n);
        const char *got = json_string_value(v);
        size_t left = json_string_length(v);
        for (size_t i = 0; i < 32;) {
            assert_true(left > 0);
            size_t len = 1;
            while (len < left && ((uint8_t)got[len] & 0xc0) == 0x80) len++;
            bool same = len <= 32 - i && !memcmp(got, text + i, len);
            assert_true(same || !memcmp(got, "\xef\xbf\xbd", 3));
            size_t taken = 1; /* by one U+FFFD: the longest beginning of a character */
            if (!same) {      /* jansson, too, refuses what begins here */
                for (size_t k = 1; k <= 4 && k <= 32 - i; k++)
                    assert_null(json_stringn(text + i, k));
                while (taken < 3 && taken < 32 - i && begins_a_character(text + i, taken + 1))
                    taken++;
            }
            i += same ? len : taken;
            got += len;
            left -= len;
        }
        assert_int_equal(left, 0);
        json_decref(v);
        text_free(&b);
    }
}

/* One message with room for what it points to. */
struct piece {
    Tandem__V1__GenerateResponse m;
    char text[MAX_TEXT + 8], reasoning[MAX_TEXT + 8], arguments[MAX_TEXT + 8];
    int32_t ids[MAX_TOKENS];
    Tandem__V1__Logprobs logprobs[MAX_TOKENS], *logprob_ptrs[MAX_TOKENS];
    Tandem__V1__TokenLogprob top[MAX_TOKENS][MAX_TOP], *top_ptrs[MAX_TOKENS][MAX_TOP];
    Tandem__V1__ToolCallDelta call, *call_ptr;
};

/* Not the token of the zero byte: jansson cannot read a key with one, though JSON has it. */
static int32_t draw_id(const struct td_tokenizer *t)
{
    for (;;) {
        int32_t id = (int32_t)draw((uint32_t)td_tokenizer_vocab(t));
        char *text = NULL;
        size_t n = 0;
        struct td_err err = {0};
        assert_int_equal(td_tokenizer_decode(t, &id, 1, false, &text, &n, &err), TD_OK);
        bool has_zero = n && memchr(text, 0, n);
        free(text);
        if (!has_zero) return id;
    }
}

static void draw_tokens(struct piece *p, const struct td_tokenizer *t)
{
    size_t n = draw(MAX_TOKENS + 1);
    p->m.token_ids = p->ids;
    p->m.logprobs = p->logprob_ptrs;
    p->m.n_token_ids = p->m.n_logprobs = n;
    for (size_t i = 0; i < n; i++) {
        Tandem__V1__Logprobs *l = p->logprob_ptrs[i] = &p->logprobs[i];
        tandem__v1__logprobs__init(l);
        p->ids[i] = draw_id(t);
        l->logprob = draw(9) ? -(float)draw(1000) / 64 : -(float)INFINITY;
        l->top = p->top_ptrs[i];
        l->n_top = draw(MAX_TOP + 1);
        for (size_t k = 0; k < l->n_top; k++) {
            l->top[k] = &p->top[i][k];
            tandem__v1__token_logprob__init(l->top[k]);
            l->top[k]->token = draw_id(t);
            l->top[k]->logprob = -(float)draw(1000) / 64;
        }
    }
}

static void draw_piece(struct piece *p, bool is_chat, const struct td_tokenizer *t,
                       uint32_t *n_calls)
{
    tandem__v1__generate_response__init(&p->m);
    p->m.text = (ProtobufCBinaryData){draw_text(p->text), (uint8_t *)p->text};
    if (t) draw_tokens(p, t);
    if (!is_chat) return;
    if (draw(3) == 0)
        p->m.reasoning = (ProtobufCBinaryData){draw_text(p->reasoning), (uint8_t *)p->reasoning};
    if (draw(3)) return;
    tandem__v1__tool_call_delta__init(&p->call);
    if (*n_calls == 0 || draw(3) == 0) {
        p->call.index = (*n_calls)++;
        p->call.id = (char *)(uintptr_t)(p->call.index % 2 ? "call_odd" : "call_even");
        p->call.name = (char *)(uintptr_t) "look\"up";
    } else {
        p->call.index = *n_calls - 1;
    }
    p->call.arguments = (ProtobufCBinaryData){draw_text(p->arguments), (uint8_t *)p->arguments};
    p->call_ptr = &p->call;
    p->m.tool_calls = &p->call_ptr;
    p->m.n_tool_calls = 1;
}

static void append(json_t *to, const char *key, const json_t *piece)
{
    if (!json_is_string(piece)) return;
    const json_t *had = json_object_get(to, key);
    size_t n = json_string_length(had), more = json_string_length(piece);
    char *joined = malloc(n + more + 1);
    assert_non_null(joined);
    if (n) memcpy(joined, json_string_value(had), n);
    memcpy(joined + n, json_string_value(piece), more);
    json_object_set_new(to, key, json_stringn(joined, n + more));
    free(joined);
}

static void add_calls(json_t *to, const json_t *deltas)
{
    size_t i;
    const json_t *d;
    json_array_foreach(deltas, i, d)
    {
        size_t index = (size_t)json_integer_value(json_object_get(d, "index"));
        const json_t *f = json_object_get(d, "function");
        if (index == json_array_size(to)) {
            assert_non_null(json_object_get(d, "id"));
            json_array_append_new(to,
                                  json_pack("{s:O,s:O,s:{s:O,s:s}}", "id", json_object_get(d, "id"),
                                            "type", json_object_get(d, "type"), "function", "name",
                                            json_object_get(f, "name"), "arguments", ""));
        } else {
            assert_null(json_object_get(d, "id")); /* only with the first of a call */
        }
        append(json_object_get(json_array_get(to, index), "function"), "arguments",
               json_object_get(f, "arguments"));
    }
}

/* {"text", "reasoning", "calls", "logprobs": {...}, "finish", "usage"} of a stream's events of one
 * choice. */
static json_t *join_stream(const char *s, size_t n, bool is_chat, int choice)
{
    json_t *all =
        json_pack("{s:s,s:s,s:[],s:{}}", "text", "", "reasoning", "", "calls", "logprobs");
    size_t n_events = 0;
    bool is_done = false;
    for (const char *at = s, *end; at < s + n; at = end + 2) {
        end = memmem(at, (size_t)(s + n - at), "\n\n", 2);
        assert_non_null(end);
        assert_memory_equal(at, "data: ", 6);
        assert_false(is_done);
        at += 6;
        is_done = end - at == 6 && !memcmp(at, "[DONE]", 6);
        if (is_done) continue;
        json_t *e = load(at, (size_t)(end - at)),
               *c = json_array_get(json_object_get(e, "choices"), 0);
        const json_t *d = is_chat ? json_object_get(c, "delta") : c;
        if (c && json_integer_value(json_object_get(c, "index")) != choice) {
            json_decref(e);
            continue;
        }
        assert_true(!c || !is_chat || (json_object_get(d, "role") != NULL) == (n_events == 0));
        append(all, "text", json_object_get(d, is_chat ? "content" : "text"));
        append(all, "reasoning", json_object_get(d, "reasoning_content"));
        add_calls(json_object_get(all, "calls"), json_object_get(d, "tool_calls"));
        const char *key;
        json_t *list;
        json_object_foreach(json_object_get(c, "logprobs"), key, list)
        {
            json_t *to = json_object_get(json_object_get(all, "logprobs"), key);
            if (to)
                json_array_extend(to, list);
            else
                json_object_set(json_object_get(all, "logprobs"), key, list);
        }
        if (json_is_string(json_object_get(c, "finish_reason")))
            json_object_set(all, "finish", json_object_get(c, "finish_reason"));
        if (json_is_object(json_object_get(e, "usage")))
            json_object_set(all, "usage", json_object_get(e, "usage"));
        json_decref(e);
        n_events++;
    }
    assert_true(is_done);
    return all;
}

static json_t *join_body(const char *s, size_t n, bool is_chat, int choice)
{
    json_t *e = load(s, n), *c = json_array_get(json_object_get(e, "choices"), (size_t)choice);
    assert_int_equal(json_integer_value(json_object_get(c, "index")), choice);
    const json_t *d = is_chat ? json_object_get(c, "message") : c;
    json_t *all =
        json_pack("{s:s,s:s,s:[],s:{}}", "text", "", "reasoning", "", "calls", "logprobs");
    append(all, "text", json_object_get(d, is_chat ? "content" : "text"));
    append(all, "reasoning", json_object_get(d, "reasoning_content"));
    json_array_extend(json_object_get(all, "calls"), json_object_get(d, "tool_calls"));
    json_object_update(json_object_get(all, "logprobs"), json_object_get(c, "logprobs"));
    json_object_set(all, "finish", json_object_get(c, "finish_reason"));
    json_object_set(all, "usage", json_object_get(e, "usage"));
    json_decref(e);
    return all;
}

static json_t *answer(struct piece *pieces, size_t n, const struct openai_options *options,
                      const struct td_tokenizer *t, int choice)
{
    struct openai_answer a = {.options = *options, .tokenizer = t, .id = "x\"", .model = "m\\"};
    struct text_buffer out = {0};
    for (size_t i = 0; i < n; i++) openai_answer_add(&a, &pieces[i].m, &out);
    assert_false(out.failed);
    json_t *all = options->stream ? join_stream(out.bytes, out.n, options->is_chat, choice)
                                  : join_body(out.bytes, out.n, options->is_chat, choice);
    text_free(&out);
    openai_answer_free(&a);
    return all;
}

static void test_a_stream_is_its_body_in_pieces(void **state)
{
    (void)state;
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    if (td_tokenizer_load("models/pocket", &t, &err)) fail_msg("%s", err.msg);
    static struct piece pieces[MAX_PIECES];
    for (uint64_t turn = 1; turn <= 400; turn++) {
        seed = turn * 7919;
        struct openai_options options = {
            .is_chat = draw(2), .logprobs = draw(2), .n = 1, .n_prompts = 1};
        size_t n = 1 + draw(MAX_PIECES);
        uint32_t n_calls = 0;
        memset(pieces, 0, sizeof pieces);
        for (size_t i = 0; i < n; i++)
            draw_piece(&pieces[i], options.is_chat, options.logprobs ? t : NULL, &n_calls);
        Tandem__V1__Usage usage = TANDEM__V1__USAGE__INIT;
        usage.prompt_tokens = draw(1000);
        usage.output_tokens = draw(1000);
        usage.cached_tokens = draw(10);
        pieces[n - 1].m.usage = &usage;
        pieces[n - 1].m.finish_reason =
            TANDEM__V1__FINISH_REASON__FINISH_STOP + (Tandem__V1__FinishReason)draw(3);
        json_t *whole = answer(pieces, n, &options, t, 0);
        options.stream = options.include_usage = true;
        options.continuous_usage = draw(2);
        json_t *joined = answer(pieces, n, &options, t, 0);
        if (!json_equal(whole, joined))
            fail_msg("turn %d: %s is not %s", (int)turn, json_dumps(joined, JSON_SORT_KEYS),
                     json_dumps(whole, JSON_SORT_KEYS));
        json_t *u = json_object_get(whole, "usage");
        assert_int_equal(json_integer_value(json_object_get(u, "total_tokens")),
                         usage.prompt_tokens + usage.output_tokens);
        json_decref(whole);
        json_decref(joined);
    }
    td_tokenizer_free(t);
}

/* Choices whose messages come in any order are each what they are alone; usage is their sum, with
 * the prompt counted once. */
static void test_choices_are_told_apart(void **state)
{
    (void)state;
    enum { N = 3 };
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    if (td_tokenizer_load("models/pocket", &t, &err)) fail_msg("%s", err.msg);
    static struct piece pieces[N][MAX_PIECES], mixed[N * MAX_PIECES];
    for (uint64_t turn = 1; turn <= 100; turn++) {
        seed = turn * 104729;
        struct openai_options one = {
            .is_chat = draw(2), .logprobs = draw(2), .n = 1, .n_prompts = 1};
        struct openai_options all = one;
        all.n = N;
        size_t n[N], at[N] = {0}, n_mixed = 0, n_left = N;
        Tandem__V1__Usage usage[N];
        memset(pieces, 0, sizeof pieces);
        for (uint32_t i = 0; i < N; i++) {
            uint32_t n_calls = 0;
            n[i] = 1 + draw(MAX_PIECES);
            for (size_t k = 0; k < n[i]; k++) {
                draw_piece(&pieces[i][k], one.is_chat, one.logprobs ? t : NULL, &n_calls);
                pieces[i][k].m.choice = i;
            }
            tandem__v1__usage__init(&usage[i]);
            usage[i].prompt_tokens = 7;
            usage[i].output_tokens = draw(1000);
            pieces[i][n[i] - 1].m.usage = &usage[i];
            pieces[i][n[i] - 1].m.finish_reason = TANDEM__V1__FINISH_REASON__FINISH_STOP;
        }
        while (n_left) { /* pointers of the copies still point into pieces, which is fine */
            uint32_t i = draw(N);
            if (at[i] == n[i]) continue;
            mixed[n_mixed++] = pieces[i][at[i]++];
            n_left -= at[i] == n[i];
        }
        for (int stream = 0; stream < 2; stream++)
            for (int i = 0; i < N; i++) {
                all.stream = all.include_usage = one.stream = one.include_usage = stream;
                for (size_t k = 0; k < n[i]; k++) pieces[i][k].m.choice = 0;
                json_t *alone = answer(pieces[i], n[i], &one, t, 0),
                       *among = answer(mixed, n_mixed, &all, t, i);
                json_t *u = json_object_get(among, "usage");
                assert_int_equal(json_integer_value(json_object_get(u, "prompt_tokens")), 7);
                assert_int_equal(json_integer_value(json_object_get(u, "completion_tokens")),
                                 usage[0].output_tokens + usage[1].output_tokens +
                                     usage[2].output_tokens);
                json_object_del(alone, "usage");
                json_object_del(among, "usage");
                if (!json_equal(alone, among))
                    fail_msg("turn %d: %s is not %s", (int)turn, json_dumps(among, JSON_SORT_KEYS),
                             json_dumps(alone, JSON_SORT_KEYS));
                json_decref(alone);
                json_decref(among);
            }
    }
    td_tokenizer_free(t);
}

/* The text of one message's answer; the caller frees it. */
static char *text_of(const struct openai_options *options, const struct td_tokenizer *t,
                     const Tandem__V1__GenerateResponse *m)
{
    struct openai_answer a = {.options = *options, .tokenizer = t, .id = "id", .model = "m"};
    struct text_buffer out = {0};
    openai_answer_add(&a, m, &out);
    text_add(&out, "", 1);
    openai_answer_free(&a);
    return out.bytes;
}

static void test_reasoning_left_out_and_tokens_by_id(void **state)
{
    (void)state;
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    if (td_tokenizer_load("models/pocket", &t, &err)) fail_msg("%s", err.msg);
    int32_t id = 300;
    Tandem__V1__TokenLogprob other = TANDEM__V1__TOKEN_LOGPROB__INIT, *top = &other;
    Tandem__V1__Logprobs logprobs = TANDEM__V1__LOGPROBS__INIT, *list = &logprobs;
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    other.token = 301;
    logprobs.n_top = 1;
    logprobs.top = &top;
    m.text = (ProtobufCBinaryData){1, (uint8_t *)(uintptr_t) "x"};
    m.reasoning = (ProtobufCBinaryData){5, (uint8_t *)(uintptr_t) "think"};
    m.n_token_ids = m.n_logprobs = 1;
    m.token_ids = &id;
    m.logprobs = &list;
    m.finish_reason = TANDEM__V1__FINISH_REASON__FINISH_STOP;
    for (int i = 0; i < 8; i++) {
        struct openai_options o = {
            .is_chat = i & 1, .stream = i & 2, .logprobs = true, .n = 1, .n_prompts = 1};
        o.hide_reasoning = o.token_labels = i & 4;
        char *text = text_of(&o, t, &m);
        assert_int_equal(strstr(text, "think") != NULL, o.is_chat && !o.hide_reasoning);
        assert_int_equal(strstr(text, "\"token_id:300\"") != NULL, o.token_labels);
        assert_int_equal(strstr(text, "\"token_id:301\"") != NULL, o.token_labels);
        free(text);
    }
    td_tokenizer_free(t);
}

static void set_text(Tandem__V1__GenerateResponse *m, const char *text)
{
    m->text = (ProtobufCBinaryData){strlen(text), (uint8_t *)(uintptr_t)text};
}

/* What a body will have is known before it is written, but for names of members. */
static void test_what_is_collected_is_counted(void **state)
{
    (void)state;
    enum { N = 3, N_PIECES = 50, N_SCORED = 40 };
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    if (td_tokenizer_load("models/pocket", &t, &err)) fail_msg("%s", err.msg);
    int32_t ids[] = {300, 301, 302};
    Tandem__V1__TokenLogprob other = TANDEM__V1__TOKEN_LOGPROB__INIT, *top = &other;
    Tandem__V1__Logprobs logprobs = TANDEM__V1__LOGPROBS__INIT, *list[] = {&logprobs, &logprobs};
    Tandem__V1__PromptLogprob scored = TANDEM__V1__PROMPT_LOGPROB__INIT, *all[N_SCORED];
    other.token = scored.token = 303;
    scored.rank = 2;
    scored.n_top = logprobs.n_top = 1;
    scored.top = logprobs.top = &top;
    for (int i = 0; i < N_SCORED; i++) all[i] = &scored;
    for (int is_chat = 0; is_chat < 2; is_chat++) {
        struct openai_answer a = {.options = {.is_chat = is_chat,
                                              .logprobs = true,
                                              .token_ids = true,
                                              .prompt_logprobs = true,
                                              .n = N,
                                              .n_prompts = 1},
                                  .tokenizer = t,
                                  .id = "id",
                                  .model = "m"};
        struct text_buffer out = {0};
        Tandem__V1__GenerateResponse scores = TANDEM__V1__GENERATE_RESPONSE__INIT;
        scores.n_prompt_logprobs = N_SCORED;
        scores.prompt_logprobs = all;
        openai_answer_add(&a, &scores, &out);
        assert_true(a.n_collected > (is_chat ? 1 : N) * N_SCORED * sizeof "{\"303\":{\"rank\":}");
        for (int i = 0; i < N * N_PIECES; i++) {
            size_t n_before = a.n_collected;
            Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
            m.choice = (uint32_t)(i % N);
            set_text(&m, "some text of it");
            if (is_chat) m.reasoning = m.text;
            m.token_ids = ids;
            m.n_token_ids = 3;
            m.logprobs = list;
            m.n_logprobs = 2;
            if (i >= N * (N_PIECES - 1)) m.finish_reason = TANDEM__V1__FINISH_REASON__FINISH_STOP;
            openai_answer_add(&a, &m, &out);
            assert_true(a.n_collected > n_before + m.text.len + m.reasoning.len + sizeof "300,301");
        }
        assert_false(out.failed);
        assert_in_range(out.n, a.n_collected, a.n_collected + 300 + N * 200);
        text_free(&out);
        openai_answer_free(&a);
    }
    td_tokenizer_free(t);
}

static void test_arguments_of_calls_are_counted(void **state)
{
    (void)state;
    struct openai_answer a = {.options = {.is_chat = true, .n = 1, .n_prompts = 1}};
    struct text_buffer out = {0};
    static char arguments[10000];
    Tandem__V1__ToolCallDelta call = TANDEM__V1__TOOL_CALL_DELTA__INIT, *calls = &call;
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    call.arguments = (ProtobufCBinaryData){sizeof arguments, (uint8_t *)arguments};
    m.n_tool_calls = 1;
    m.tool_calls = &calls;
    for (size_t i = 1; i <= 4; i++) {
        call.index = i > 2;
        openai_answer_add(&a, &m, &out);
        assert_true(a.n_collected >= i * sizeof arguments);
    }
    text_free(&out);
    openai_answer_free(&a);
}

/* The offsets of a prompt's tokens in the echoed text, as the answer has them. */
static json_t *offsets_of(const struct td_tokenizer *t, const char *text, bool is_text,
                          const struct td_token_list *list)
{
    struct openai_answer a = {.options = {.echo = true, .logprobs = true, .n = 1, .n_prompts = 1},
                              .tokenizer = t,
                              .id = "id",
                              .model = "m"};
    struct text_buffer out = {0};
    a.prompts = calloc(1, sizeof *a.prompts);
    assert_non_null(a.prompts);
    text_add(&a.prompts[0].text, text, strlen(text));
    a.prompts[0].is_text = is_text;
    for (size_t i = 0; i < list->n; i++) {
        Tandem__V1__PromptLogprob scored = TANDEM__V1__PROMPT_LOGPROB__INIT, *one = &scored;
        Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
        scored.token = list->ids[i];
        m.n_prompt_logprobs = 1;
        m.prompt_logprobs = &one;
        openai_answer_add(&a, &m, &out);
    }
    Tandem__V1__GenerateResponse end = TANDEM__V1__GENERATE_RESPONSE__INIT;
    end.finish_reason = TANDEM__V1__FINISH_REASON__FINISH_STOP;
    openai_answer_add(&a, &end, &out);
    assert_false(out.failed);
    json_t *body = load(out.bytes, out.n),
           *choice = json_array_get(json_object_get(body, "choices"), 0);
    assert_string_equal(json_string_value(json_object_get(choice, "text")), text);
    json_t *offsets =
        json_incref(json_object_get(json_object_get(choice, "logprobs"), "text_offset"));
    json_decref(body);
    text_free(&out);
    openai_answer_free(&a);
    return offsets;
}

/* Of ids each special token is in the text; of a text, those that are not the tokenizer's own. The
 * pocket model's puts <|endoftext|> first. */
static void test_offsets_count_special_tokens(void **state)
{
    (void)state;
    static const char *const texts[] = {
        "Once upon",
        "<|im_start|>user\nOnce upon a time<|im_end|>",
        "One<|endoftext|>Two<|im_start|>three<|im_end|> it",
        "<|endoftext|>Once upon",
        "<|endoftext|><|im_start|>x",
    };
    struct td_tokenizer *t = NULL;
    struct td_err err = {0};
    if (td_tokenizer_load("models/pocket", &t, &err)) fail_msg("%s", err.msg);
    for (size_t i = 0; i < 2 * (sizeof texts / sizeof *texts); i++) {
        bool is_text = i % 2;
        struct td_token_list list = {0};
        char *text = NULL;
        size_t n = 0, at = 0;
        assert_int_equal(
            td_tokenizer_encode(t, texts[i / 2], strlen(texts[i / 2]), true, 1000, &list, &err),
            TD_OK);
        assert_int_equal(td_tokenizer_decode(t, list.ids, list.n, false, &text, &n, &err), TD_OK);
        size_t n_own = strlen("<|endoftext|>");
        assert_string_equal(text + n_own, texts[i / 2]);
        json_t *offsets = offsets_of(t, is_text ? texts[i / 2] : text, is_text, &list);
        assert_int_equal(json_array_size(offsets), list.n);
        for (size_t k = 0; k < list.n; k++) {
            size_t want = at; /* where it is, among them all */
            char *piece = NULL;
            size_t n_piece = 0;
            assert_int_equal(td_tokenizer_decode(t, &list.ids[k], 1, false, &piece, &n_piece, &err),
                             TD_OK);
            at += n_piece;
            free(piece);
            /* of two that are the same, the text has the first */
            if (is_text && k > 0 && !(k == 1 && list.ids[1] == 0)) want -= n_own;
            assert_int_equal(json_integer_value(json_array_get(offsets, k)), want);
        }
        json_decref(offsets);
        free(text);
        td_token_list_free(&list);
    }
    td_tokenizer_free(t);
}

static void test_errors_name_their_field(void **state)
{
    (void)state;
    static const struct {
        const char *message, *param;
    } rows[] = {
        {"stop.max_tokens is 0, must be 1..8", "max_tokens"},
        {"sampling: temperature is -1, must be 0..2", "temperature"},
        {"temperature is -1", "temperature"},
        {"chat.messages is empty", "messages"},
        {"chat.messages[3].role is \"x\"", "messages"},
        {"logit_bias[3].token is 9999, must be in [0, 2048)", "logit_bias"},
        {"sampling: logit_bias[0].bias is 150, must be in [-100, 100]", "logit_bias"},
        {"sampling: n_logprobs is 21, must be in [-1, 20]", "logprobs"},
        {"token_ids[1] is -1, must be 0..2047", "prompt"},
        {"prompt[1]: token_ids[1] is -1, must be 0..2047", "prompt"},
        {"resume_from.choices.token_ids[0] is -1, must be 0..2047", "resume_token_ids"},
        {"guided: its expression has an open bracket", "guided_regex"},
        {"guided.choice has 5000 texts, limit 4096", "guided_regex"},
        {"chat.tools: the schema is no object", "tools"},
        {"tools[2] is not an object", "tools"},
        {"tools: the model's chat template (chatml) has no place for them", "tools"},
        {"chat.tool_choice: there are no tools that could be called", "tool_choice"},
        {"chat.tool_name is set beside chat.tool_choice \"auto\"", "tool_choice"},
        {"messages[1].tool_calls[0].arguments: line 1, column 1: no JSON", "messages"},
        {"template_kwargs sets \"messages\", which is not its to set", "chat_template_kwargs"},
        {"stop.stop[2] has 300 bytes, limit 256", "stop"},
        {"prompt is empty", "prompt"},
        {"prompt has 5 tokens", "prompt"},
        {"", ""},
        {":", ""},
        {": ", ""},
        {" is 5", ""},
        {"x: ", ""},
        {"the queue is full", ""},
        {"No worker is there", ""},
        {"prompt", ""},
        {"prompt was empty", ""},
        {"a_name_that_is_much_longer_than_the_64_bytes_there_are_for_it_to_go_into is 5",
         "a_name_that_is_much_longer_than_the_64_bytes_there_are_for_it_t"},
    };
    const struct openai_options o = {.guide = "guided_regex"}, chat = {.is_chat = true};
    char of_chat[64];
    openai_error_param(&chat, "n_logprobs is 21, must be in [-1, 20]", of_chat);
    assert_string_equal(of_chat, "top_logprobs");
    openai_error_param(&chat, "prompt has more than 2048 tokens", of_chat);
    assert_string_equal(of_chat, "messages");
    const struct openai_options renamed = {.completion_limit = true};
    openai_error_param(&renamed, "stop.max_tokens is 0, must be 1..5", of_chat);
    assert_string_equal(of_chat, "max_completion_tokens");
    openai_error_param(&chat, "stop.max_tokens is 0, must be 1..5", of_chat);
    assert_string_equal(of_chat, "max_tokens");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *exact = strdup(rows[i].message), param[64];
        openai_error_param(&o, exact, param);
        assert_string_equal(param, rows[i].param);
        free(exact);
    }
}

static void test_errors_have_a_status_and_a_type(void **state)
{
    (void)state;
    static const struct {
        enum td_code code;
        unsigned status;
        const char *type;
    } codes[] = {
        {TD_CODE_INVALID_ARGUMENT, 400, "invalid_request_error"},
        {TD_CODE_UNAUTHENTICATED, 401, "authentication_error"},
        {TD_CODE_PERMISSION_DENIED, 403, "permission_error"},
        {TD_CODE_NOT_FOUND, 404, "not_found_error"},
        {TD_CODE_RESOURCE_EXHAUSTED, 429, "rate_limit_error"},
        {TD_CODE_INTERNAL, 500, "server_error"},
        {TD_CODE_UNAVAILABLE, 503, "server_error"},
        {TD_CODE_DEADLINE_EXCEEDED, 504, "server_error"},
    };
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        struct text_buffer b = {0};
        assert_int_equal(openai_http_status(codes[i].code), codes[i].status);
        openai_error(&b, codes[i].status, "it \"broke\"\n\xff", i ? "seed" : "");
        json_t *v = load(b.bytes, b.n), *e = json_object_get(v, "error"), *param;
        assert_string_equal(json_string_value(json_object_get(e, "message")),
                            "it \"broke\"\n\xef\xbf\xbd");
        assert_string_equal(json_string_value(json_object_get(e, "type")), codes[i].type);
        assert_int_equal(json_integer_value(json_object_get(e, "code")), codes[i].status);
        param = json_object_get(e, "param");
        assert_true(i ? !strcmp(json_string_value(param), "seed") : json_is_null(param));
        json_decref(v);
        text_free(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_strings_are_json),
        cmocka_unit_test(test_a_stream_is_its_body_in_pieces),
        cmocka_unit_test(test_choices_are_told_apart),
        cmocka_unit_test(test_reasoning_left_out_and_tokens_by_id),
        cmocka_unit_test(test_what_is_collected_is_counted),
        cmocka_unit_test(test_arguments_of_calls_are_counted),
        cmocka_unit_test(test_offsets_count_special_tokens),
        cmocka_unit_test(test_errors_name_their_field),
        cmocka_unit_test(test_errors_have_a_status_and_a_type),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
