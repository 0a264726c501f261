/* openai_request_test.c - the body of an OpenAI request as a GenerateRequest: every field, every
 * refusal by the field's name, and limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "router/http/openai_request.h"

#define HI "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]"

static struct openai_request *parse_bytes(enum openai_kind kind, const char *body, size_t n)
{
    struct openai_request *q = NULL;
    struct td_err err = {0};
    char param[64];
    char *exact = malloc(n ? n : 1); /* no byte behind it, so that ASan sees a read too far */
    assert_non_null(exact);
    memcpy(exact, body, n);
    if (openai_request_parse(exact, n, kind, &q, param, &err)) fail_msg("%s: %s", body, err.msg);
    assert_string_equal(param, "");
    free(exact); /* the request keeps nothing of the body */
    return q;
}

static struct openai_request *parse(enum openai_kind kind, const char *body)
{
    return parse_bytes(kind, body, strlen(body));
}

static void refuses(enum openai_kind kind, const char *body, const char *param, const char *words)
{
    struct openai_request *q = NULL;
    struct td_err err = {0};
    char got[64];
    td_status s = openai_request_parse(body, strlen(body), kind, &q, got, &err);
    if (s != TD_ERR_INVALID || q || strcmp(got, param) || !strstr(err.msg, words))
        fail_msg("%.200s: status %d, param \"%s\", message \"%s\"; not \"%s\", \"%s\"", body, s,
                 got, err.msg, param, words);
}

#define assert_bytes(field, want)                                                                  \
    do {                                                                                           \
        assert_int_equal((field).len, sizeof(want) - 1);                                           \
        assert_memory_equal((field).data, want, sizeof(want) - 1);                                 \
    } while (0)

/* A request that says nothing has no field but those that OpenAI's defaults make. */
static void test_defaults(void **state)
{
    (void)state;
    struct openai_request *q = parse(OPENAI_COMPLETION, "{\"prompt\":\"a\"}");
    const Tandem__V1__GenerateRequest *in = openai_request_message(q);
    const struct openai_options *o = openai_request_options(q);
    assert_int_equal(in->input_case, TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT);
    assert_bytes(in->prompt, "a");
    assert_int_equal(in->stop->max_tokens, OPENAI_COMPLETION_TOKENS);
    assert_int_equal(in->sampling->has_temperature_case, 0);
    assert_int_equal(in->sampling->has_top_k_case, 0);
    assert_int_equal(in->sampling->has_top_p_case, 0);
    assert_int_equal(in->sampling->has_min_p_case, 0);
    assert_int_equal(in->sampling->has_repetition_penalty_case, 0);
    assert_int_equal(in->sampling->has_seed_case, 0);
    assert_int_equal(in->sampling->has_logprobs_case, 0);
    assert_int_equal(in->sampling->n_logit_bias + in->stop->n_stop + in->stop->n_stop_token_ids, 0);
    assert_false(in->no_special_tokens || in->skip_special_tokens_off || in->return_token_ids);
    assert_false(in->stop->ignore_eos || in->priority || in->objectives);
    assert_string_equal(in->model, "");
    assert_string_equal(in->request_id, "");
    assert_false(o->is_chat || o->stream || o->include_usage || o->logprobs);
    openai_request_free(q);

    q = parse(OPENAI_CHAT, "{" HI "}");
    in = openai_request_message(q);
    assert_true(openai_request_options(q)->is_chat);
    assert_int_equal(in->input_case, TANDEM__V1__GENERATE_REQUEST__INPUT_CHAT);
    assert_int_equal(in->stop->has_max_tokens_case, 0); /* up to the context's end */
    assert_false(in->chat->no_generation_prompt);
    openai_request_free(q);
    openai_request_free(NULL);
}

/* By vLLM's name, or as OpenAI's echo with logprobs, which streams. */
static void test_prompt_logprobs(void **state)
{
    (void)state;
    static const struct {
        const char *body;
        int n; /* -1: not asked for */
        bool by_name;
    } rows[] = {{"{\"prompt\":\"a\",\"logprobs\":3}", -1, false},
                {"{\"prompt\":\"a\",\"echo\":true}", -1, false},
                {"{\"prompt\":\"a\",\"prompt_logprobs\":null}", -1, false},
                {"{\"prompt\":\"a\",\"prompt_logprobs\":false}", -1, false},
                {"{\"prompt\":\"a\",\"echo\":true,\"logprobs\":3,\"stream\":true}", 3, false},
                {"{\"prompt\":\"a\",\"prompt_logprobs\":0}", 0, true},
                {"{\"prompt\":\"a\",\"prompt_logprobs\":-1}", -1, true}, /* refused later */
                {"{\"prompt\":\"a\",\"echo\":true,\"logprobs\":3,\"prompt_logprobs\":5}", 5, true}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct openai_request *q = parse(OPENAI_COMPLETION, rows[i].body);
        const Tandem__V1__Sampling *s = openai_request_message(q)->sampling;
        assert_int_equal(openai_request_options(q)->prompt_logprobs, rows[i].by_name);
        assert_int_equal(s->has_prompt_logprobs_case != 0, rows[i].n >= 0 || rows[i].by_name);
        if (s->has_prompt_logprobs_case) assert_int_equal(s->prompt_logprobs, rows[i].n);
        openai_request_free(q);
    }
}

/* A stream goes on behind the tokens that its client has. But behind tokens the prompt is not
 * scored, and each choice's first event has the scores. */
static void test_scores_of_choices_that_have_not_begun(void **state)
{
    (void)state;
#define ASKED                                                                                      \
    "{\"prompt\":\"a\",\"n\":2,\"stream\":true,\"return_token_ids\":true,"                         \
    "\"stream_options\":{\"include_event_ids\":true},\"resume_token_ids\":[[5,6],[]]"
    static const struct {
        const char *body, *events;
        size_t n_choices;
    } rows[] = {{ASKED "}", "1:7,0:0", 2},
                {ASKED ",\"logprobs\":1}", "1:7,0:0", 2},
                {ASKED ",\"echo\":true}", "1:7,0:0", 2},
                {ASKED ",\"echo\":true,\"logprobs\":1}", "1:7,0:0", 0},
                {ASKED ",\"echo\":true,\"logprobs\":1}", "0:0,3:7", 0},
                {ASKED ",\"echo\":true,\"logprobs\":1}", "1:7,1:8", 2}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct td_err err = {0};
        char id[64];
        struct openai_request *q = parse(OPENAI_COMPLETION, rows[i].body);
        snprintf(id, sizeof id, "1.9.1.10.0.%s.x", rows[i].events);
        assert_int_equal(openai_request_resume(q, id, &err), TD_OK);
        assert_int_equal(openai_request_message(q)->resume_from->seed, 9);
        assert_int_equal(openai_request_message(q)->resume_from->n_choices, rows[i].n_choices);
        openai_request_free(q);
    }
#undef ASKED
}

static void test_every_field(void **state)
{
    (void)state;
    struct openai_request *q = parse(
        OPENAI_COMPLETION,
        "{\"prompt\":\"a\\u0000b\",\"model\":\"m\",\"request_id\":\"r\",\"slo_class\":\"gold\","
        "\"tenant\":\"t\",\"cache_salt\":\"s\",\"priority\":-7,\"temperature\":0.5,\"top_p\":0.25,"
        "\"min_p\":0.125,\"top_k\":40,\"repetition_penalty\":1.5,\"presence_penalty\":-1.5,"
        "\"frequency_penalty\":2,\"seed\":-1,\"logit_bias\":{\"7\":-100,\"2147483647\":0.5},"
        "\"logprobs\":3,\"max_tokens\":9223372036854775807,\"ignore_eos\":true,"
        "\"stop\":[\"x\\u0000y\",\"z\"],\"stop_token_ids\":[1,-2147483648,2147483647],"
        "\"stream\":true,\"stream_options\":{\"include_usage\":true,\"include_ledger\":true,"
        "\"continuous_usage_stats\":true},\"add_special_tokens\":false,"
        "\"skip_special_tokens\":false,\"objectives\":{\"ttft_ms\":250,\"tpot_ms\":0.5},"
        "\"allowed_token_ids\":[5,0],\"bad_words\":[\"x\\u0000y\",\"\"],"
        "\"return_tokens_as_token_ids\":true,\"include_reasoning\":false}");
    const Tandem__V1__GenerateRequest *in = openai_request_message(q);
    const Tandem__V1__Sampling *s = in->sampling;
    const Tandem__V1__StopConditions *stop = in->stop;
    const struct openai_options *o = openai_request_options(q);
    assert_bytes(in->prompt, "a\0b");
    assert_string_equal(in->model, "m");
    assert_string_equal(in->request_id, "r");
    assert_string_equal(in->slo_class, "gold");
    assert_string_equal(in->tenant, "t");
    assert_string_equal(in->cache_salt, "s");
    assert_int_equal(in->priority, -7);
    assert_true(s->has_temperature_case && s->has_top_p_case && s->has_min_p_case);
    assert_true(s->has_top_k_case && s->has_repetition_penalty_case && s->has_seed_case);
    assert_true(s->temperature == 0.5f && s->top_p == 0.25f && s->min_p == 0.125f);
    assert_true(s->top_k == 40 && s->repetition_penalty == 1.5f && s->presence_penalty == -1.5f);
    assert_true(s->frequency_penalty == 2.0f && s->seed == UINT64_MAX);
    assert_int_equal(s->n_logit_bias, 2);
    for (int i = 0; i < 2; i++)
        assert_true((s->logit_bias[i]->token == 7 && s->logit_bias[i]->bias == -100.0f) ||
                    (s->logit_bias[i]->token == INT32_MAX && s->logit_bias[i]->bias == 0.5f));
    assert_int_not_equal(s->logit_bias[0]->token, s->logit_bias[1]->token);
    assert_true(s->has_logprobs_case && s->logprobs == 3 && o->logprobs);
    assert_true(in->return_token_ids); /* logprobs are told by their tokens */
    assert_true(stop->has_max_tokens_case && stop->max_tokens == INT64_MAX && stop->ignore_eos);
    assert_int_equal(stop->n_stop, 2);
    assert_bytes(stop->stop[0], "x\0y");
    assert_bytes(stop->stop[1], "z");
    assert_int_equal(stop->n_stop_token_ids, 3);
    assert_int_equal(stop->stop_token_ids[1], INT32_MIN);
    assert_int_equal(stop->stop_token_ids[2], INT32_MAX);
    assert_true(o->stream && o->include_usage && o->continuous_usage && !o->is_chat);
    assert_true(o->include_ledger && o->token_labels && o->hide_reasoning);
    assert_int_equal(s->n_allowed_token_ids, 2);
    assert_true(s->allowed_token_ids[0] == 5 && s->allowed_token_ids[1] == 0);
    assert_int_equal(s->n_bad_words, 2);
    assert_bytes(s->bad_words[0], "x\0y");
    assert_bytes(s->bad_words[1], "");
    assert_true(in->no_special_tokens && in->skip_special_tokens_off);
    assert_true(in->objectives && in->objectives->has_ttft_ms_case);
    assert_true(in->objectives->ttft_ms == 250.0 && in->objectives->has_tpot_ms_case);
    assert_true(in->objectives->tpot_ms == 0.5);
    openai_request_free(q);
}

static void test_every_field_of_chat(void **state)
{
    (void)state;
    struct openai_request *q =
        parse(OPENAI_CHAT, "{" HI ",\"logprobs\":true,\"top_logprobs\":20,\"max_tokens\":5,"
                           "\"max_completion_tokens\":6,\"stop\":\"x\",\"return_token_ids\":true,"
                           "\"add_generation_prompt\":false,\"top_k\":-1,\"logit_bias\":{},"
                           "\"stream\":false}");
    const Tandem__V1__GenerateRequest *in = openai_request_message(q);
    assert_true(openai_request_options(q)->logprobs && in->sampling->logprobs == 20);
    assert_int_equal(in->stop->max_tokens, 6); /* the newer name wins */
    assert_true(in->stop->n_stop == 1 && in->return_token_ids && in->chat->no_generation_prompt);
    assert_true(in->sampling->has_top_k_case && in->sampling->top_k == 0); /* vLLM's -1 is off */
    assert_int_equal(in->sampling->n_logit_bias, 0);
    openai_request_free(q);
}

static void test_what_a_template_is_told(void **state)
{
    (void)state;
    static const struct {
        const char *fields, *kwargs;
        bool no_prompt, goes_on;
    } rows[] = {
        {"", "", false, false},
        {",\"reasoning_effort\":null,\"chat_template_kwargs\":{}", "", false, false},
        {",\"reasoning_effort\":\"high\"", "{\"reasoning_effort\":\"high\"}", false, false},
        {",\"reasoning_effort\":\"low\",\"chat_template_kwargs\":{\"a\":1}",
         "{\"a\":1,\"reasoning_effort\":\"low\"}", false, false},
        {",\"reasoning_effort\":\"low\",\"chat_template_kwargs\":{\"reasoning_effort\":1}",
         "{\"reasoning_effort\":1}", false, false},
        {",\"add_generation_prompt\":false", "", true, false},
        {",\"continue_final_message\":true", "", true, true},
        {",\"continue_final_message\":true,\"add_generation_prompt\":true", "", false, true},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char body[300];
        snprintf(body, sizeof body, "{" HI "%s}", rows[i].fields);
        struct openai_request *q = parse(OPENAI_CHAT, body);
        const Tandem__V1__Chat *chat = openai_request_message(q)->chat;
        assert_int_equal(chat->template_kwargs.len, strlen(rows[i].kwargs));
        assert_memory_equal(rows[i].kwargs,
                            chat->template_kwargs.len ? (const char *)chat->template_kwargs.data
                                                      : "",
                            chat->template_kwargs.len);
        assert_int_equal(chat->no_generation_prompt, rows[i].no_prompt);
        assert_int_equal(chat->continue_final_message, rows[i].goes_on);
        openai_request_free(q);
    }
    refuses(OPENAI_CHAT, "{" HI ",\"reasoning_effort\":3}", "reasoning_effort", "must be a string");
    refuses(OPENAI_CHAT, "{" HI ",\"chat_template_kwargs\":[1]}", "chat_template_kwargs",
            "must be an object");
    refuses(OPENAI_CHAT, "{" HI ",\"add_special_tokens\":true}", "add_special_tokens",
            "is not supported for chats");
}

static void test_prompts(void **state)
{
    (void)state;
    struct openai_request *q = parse(OPENAI_COMPLETION, "{\"prompt\":[5,0,-1,2147483647]}");
    const Tandem__V1__GenerateRequest *in = openai_request_message(q);
    assert_int_equal(in->input_case, TANDEM__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS);
    assert_int_equal(in->token_ids->n_ids, 4);
    assert_int_equal(in->token_ids->ids[2], -1);
    assert_int_equal(in->token_ids->ids[3], INT32_MAX);
    openai_request_free(q);
    q = parse(OPENAI_COMPLETION, "{\"prompt\":[[1,2]]}"); /* a list of one prompt is that prompt */
    assert_int_equal(openai_request_message(q)->token_ids->n_ids, 2);
    openai_request_free(q);
    q = parse(OPENAI_COMPLETION, "{\"prompt\":[\"one\"]}");
    assert_bytes(openai_request_message(q)->prompt, "one");
    openai_request_free(q);
    q = parse(OPENAI_COMPLETION, "{\"prompt\":\"\"}"); /* inference.c refuses it, in its words */
    assert_int_equal(openai_request_message(q)->prompt.len, 0);
    openai_request_free(q);
    q = parse(OPENAI_COMPLETION,
              "{\"prompt\":[\"one\",[7,8],\"\"],\"n\":3,\"best_of\":5,\"seed\":9}");
    openai_request_message(q)->request_id = (char *)(uintptr_t) "id";
    const Tandem__V1__GenerateRequest *const *all = openai_request_messages(q);
    assert_int_equal(openai_request_options(q)->n_prompts, 3);
    assert_int_equal(openai_request_options(q)->n, 3);
    assert_int_equal(all[2]->sampling->best_of, 5);
    assert_bytes(all[0]->prompt, "one");
    assert_int_equal(all[1]->input_case, TANDEM__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS);
    assert_int_equal(all[1]->token_ids->n_ids, 2);
    assert_int_equal(all[1]->token_ids->ids[1], 8);
    assert_int_equal(all[2]->input_case, TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT);
    assert_int_equal(all[2]->prompt.len, 0);
    for (int i = 0; i < 3; i++) assert_string_equal(all[i]->request_id, "id");
    openai_request_free(q);
    q = parse(OPENAI_EITHER, "{\"prompt\":\"a\"}");
    assert_false(openai_request_options(q)->is_chat);
    openai_request_free(q);
    q = parse(OPENAI_EITHER, "{\"prompt\":\"a\"," HI "}");
    assert_true(openai_request_options(q)->is_chat);
    openai_request_free(q);
}

static void test_messages(void **state)
{
    (void)state;
    struct openai_request *q = parse(
        OPENAI_CHAT, "{\"messages\":[{\"role\":\"system\",\"content\":\"\"},"
                     "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\\u0000\"},"
                     "{\"type\":\"text\",\"text\":\"\"},{\"type\":\"text\",\"text\":\"\\u00e9\"}]},"
                     "{\"role\":\"assistant\",\"content\":\"b\\u0000c\",\"tool_calls\":[]}]}");
    const Tandem__V1__Chat *chat = openai_request_message(q)->chat;
    assert_int_equal(chat->n_messages, 3);
    assert_string_equal(chat->messages[0]->role, "system");
    assert_string_equal(chat->messages[1]->role, "user");
    assert_string_equal(chat->messages[2]->role, "assistant");
    assert_int_equal(chat->messages[0]->content.len, 0);
    assert_bytes(chat->messages[2]->content, "b\0c");
    openai_request_free(q);
}

/* null, and the values that ask for nothing, are as if the field were not there. */
static void test_what_asks_for_nothing(void **state)
{
    (void)state;
    static const char *const fields[] = {
        "model",      "stop",           "seed",       "top_k",    "logit_bias",     "temperature",
        "stream",     "stream_options", "objectives", "logprobs", "stop_token_ids", "priority",
        "ignore_eos", "max_tokens",     "n",          "echo",     "suffix",         "best_of"};
    char body[256];
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        snprintf(body, sizeof body, "{\"prompt\":\"a\",\"%s\":null}", fields[i]);
        struct openai_request *q = parse(OPENAI_COMPLETION, body);
        const Tandem__V1__GenerateRequest *in = openai_request_message(q);
        assert_int_equal(in->stop->max_tokens, OPENAI_COMPLETION_TOKENS);
        assert_false(in->sampling->has_seed_case || in->sampling->has_top_k_case ||
                     in->sampling->has_logprobs_case || in->objectives || in->stop->n_stop);
        openai_request_free(q);
    }
    openai_request_free(parse(
        OPENAI_COMPLETION,
        "{\"prompt\":\"a\",\"n\":1,\"best_of\":1,\"echo\":false,\"suffix\":\"\",\"min_tokens\":0,"
        "\"length_penalty\":1.0,\"use_beam_search\":false,\"bad_words\":[],\"user\":\"me\","
        "\"allowed_token_ids\":null,\"prediction\":{\"type\":\"content\",\"content\":\"x\"},"
        "\"structured_outputs\":{\"json_object\":null,\"structural_tag\":null},"
        "\"metadata\":{\"n\":2},\"store\":true,\"invented\":[[{}]]}"));
}

static const struct {
    const char *field, *value, *words;
} refusals[] = {
    {"n", "0", "n is 0"},
    {"n", "-1", "n is -1"},
    {"n", "1.5", "n is"},
    {"n", "2147483648", "n is 2147483648"},
    {"best_of", "0", "best_of is 0"},
    {"best_of", "\"2\"", "best_of is"},
    {"echo", "1", "echo is"},
    {"echo", "true,\"truncate_prompt_tokens\":5", "echo with truncate_prompt_tokens"},
    {"echo", "true,\"suffix\":\"x\"", "echo with suffix"},
    {"suffix", "1", "suffix is"},
    {"min_tokens", "1.5", "min_tokens is"},
    {"truncate_prompt_tokens", "\"5\"", "truncate_prompt_tokens is"},
    {"include_stop_str_in_output", "1", "include_stop_str_in_output is"},
    {"prompt_logprobs", "0,\"stream\":true", "prompt_logprobs cannot be streamed"},
    {"prompt_logprobs", "1.5", "prompt_logprobs is"},
    {"prompt_logprobs", "true", "prompt_logprobs is"},
    {"length_penalty", "2", "length_penalty is not supported"},
    {"bad_words", "[1]", "bad_words must be a string or a list of strings"},
    {"bad_words", "{}", "bad_words must be a string or a list of strings"},
    {"allowed_token_ids", "5", "allowed_token_ids must be a list of token ids"},
    {"allowed_token_ids", "[1,\"2\"]", "allowed_token_ids must be a list of token ids"},
    {"allowed_token_ids", "[2147483648]", "allowed_token_ids must be a list of token ids"},
    {"logits_processors", "[\"x\"]", "logits_processors is not supported"},
    {"return_tokens_as_token_ids", "1", "return_tokens_as_token_ids is"},
    {"include_reasoning", "0", "include_reasoning is"},
    {"guided_whitespace_pattern", "\" \"", "guided_whitespace_pattern is not supported"},
    {"structured_outputs", "[1]", "structured_outputs must be an object"},
    {"structured_outputs", "{\"structural_tag\":\"x\"}", "has structural_tag, which is not"},
    {"structured_outputs", "{\"whitespace_pattern\":\" \"}", "has whitespace_pattern"},
    {"structured_outputs", "{\"json_object\":true,\"regex\":\"x\"}", "is the second guide"},
    {"use_beam_search", "true", "use_beam_search is not supported"},
    {"modalities", "[\"text\",\"audio\"]", "modalities is not supported"},
    {"temperature", "\"hot\"", "temperature is"},
    {"temperature", "true", "temperature is"},
    {"temperature", "1e31", "temperature is"},
    {"top_p", "[]", "top_p is"},
    {"min_p", "{}", "min_p is"},
    {"repetition_penalty", "\"1\"", "repetition_penalty is"},
    {"presence_penalty", "\"1\"", "presence_penalty is"},
    {"frequency_penalty", "false", "frequency_penalty is"},
    {"top_k", "-2", "top_k is -2"},
    {"top_k", "2147483648", "top_k is 2147483648"},
    {"top_k", "1.5", "top_k is"},
    {"seed", "9223372036854775808", "seed is"},
    {"seed", "1.5", "seed is"},
    {"seed", "\"7\"", "seed is"},
    {"max_tokens", "18446744073709551616", "max_tokens is"},
    {"max_tokens", "16.5", "max_tokens is"},
    {"max_completion_tokens", "\"9\"", "max_completion_tokens is"},
    {"ignore_eos", "1", "ignore_eos is"},
    {"stop", "7", "must be a string or a list of strings"},
    {"stop", "[\"a\",null]", "must be a string or a list of strings"},
    {"stop", "{}", "must be a string or a list of strings"},
    {"stop_token_ids", "5", "must be a list of token ids"},
    {"stop_token_ids", "[1,2147483648]", "must be a list of token ids"},
    {"stop_token_ids", "[1,-2147483649]", "must be a list of token ids"},
    {"stop_token_ids", "[99999999999999999999]", "must be a list of token ids"},
    {"stop_token_ids", "[1,\"2\"]", "must be a list of token ids"},
    {"logit_bias", "[]", "must be an object"},
    {"logit_bias", "{\"a\":1}", "must map token ids"},
    {"logit_bias", "{\"\":1}", "must map token ids"},
    {"logit_bias", "{\"1x\":1}", "must map token ids"},
    {"logit_bias", "{\"-1\":1}", "must map token ids"},
    {"logit_bias", "{\" 5\":1}", "must map token ids"},
    {"logit_bias", "{\"+5\":1}", "must map token ids"},
    {"logit_bias", "{\"\\t5\":1}", "must map token ids"},
    {"logit_bias", "{\"5 \":1}", "must map token ids"},
    {"logit_bias", "{\"2147483648\":1}", "must map token ids"},
    {"logit_bias", "{\"99999999999999999999\":1}", "must map token ids"},
    {"logit_bias", "{\"1\":1,\"2\":\"3\"}", "must map token ids"},
    {"logprobs", "-1", "logprobs is -1"},
    {"logprobs", "2147483648", "logprobs is 2147483648"},
    {"logprobs", "true", "logprobs is"},
    {"stream", "\"yes\"", "stream is"},
    {"stream_options", "{}", "needs stream to be true"},
    {"stream_options", "[]", "must be an object"},
    {"model", "7", "model is"},
    {"model", "\"a\\u0000b\"", "model"},
    {"request_id", "\"\\u0000\"", "request_id"},
    {"tenant", "[\"a\"]", "tenant is"},
    {"cache_salt", "1", "cache_salt is"},
    {"slo_class", "{}", "slo_class is"},
    {"priority", "2147483648", "priority is"},
    {"priority", "-2147483649", "priority is"},
    {"skip_special_tokens", "0", "skip_special_tokens is"},
    {"add_special_tokens", "\"\"", "add_special_tokens is"},
    {"return_token_ids", "[]", "return_token_ids is"},
    {"objectives", "5", "must be {"},
    {"objectives", "{\"ttft_ms\":\"1\"}", "ttft_ms is"},
    {"objectives", "{\"ttft_ms\":1,\"tpot_ms\":[]}", "tpot_ms is"},
};

static void test_refusals_name_the_field(void **state)
{
    (void)state;
    char body[256];
    for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
        snprintf(body, sizeof body, "{\"prompt\":\"a\",\"%s\":%s}", refusals[i].field,
                 refusals[i].value);
        refuses(OPENAI_COMPLETION, body, refusals[i].field, refusals[i].words);
    }
    refuses(OPENAI_COMPLETION,
            "{\"prompt\":\"a\",\"stream\":true,\"stream_options\":{"
            "\"include_usage\":1}}",
            "stream_options", "include_usage is 1");
    refuses(OPENAI_CHAT, "{" HI ",\"logprobs\":2}", "logprobs", "logprobs is 2");
    refuses(OPENAI_CHAT, "{" HI ",\"top_logprobs\":2}", "top_logprobs", "needs logprobs");
    refuses(OPENAI_CHAT, "{" HI ",\"add_generation_prompt\":\"\"}", "add_generation_prompt",
            "add_generation_prompt is");
}

static void test_refused_inputs(void **state)
{
    (void)state;
    static const char *const prompts[] = {"7",       "null",           "{}",        "[]",
                                          "[[]]",    "true",           "[null]",    "[1.5]",
                                          "[[[1]]]", "[1,\"a\"]",      "[1,2.0]",   "[{}]",
                                          "[1,[2]]", "[1,2147483648]", "[\"a\",5]", "[[1],2]"};
    char body[512];
    for (size_t i = 0; i < sizeof prompts / sizeof *prompts; i++) {
        snprintf(body, sizeof body, "{\"prompt\":%s}", prompts[i]);
        refuses(OPENAI_COMPLETION, body, "prompt", "prompt ");
    }
    refuses(OPENAI_COMPLETION, "{" HI "}", "prompt", "prompt ");
    static const struct {
        const char *messages, *words;
    } chats[] = {
        {"null", "must be a list"},
        {"{}", "must be a list"},
        {"\"hi\"", "must be a list"},
        {"[null]", "[0] must be"},
        {"[{}]", "[0] must be"},
        {"[{\"content\":\"x\"}]", "[0] must be"},
        {"[{\"role\":7,\"content\":\"x\"}]", "[0] must be"},
        {"[{\"role\":\"a\\u0000\",\"content\":\"x\"}]", "zero byte"},
        {"[{\"role\":\"user\",\"content\":7}]", "[0].content must be"},
        {"[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"user\",\"content\":{}}]",
         "[1].content must be"},
        {"[{\"role\":\"user\",\"content\":[7]}]", "[0].content[0]"},
        {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]", "[0].content[0]"},
        {"[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"\"},"
         "{\"type\":\"image_url\",\"text\":\"\"}]}]",
         "[0].content[1]"},
    };
    for (size_t i = 0; i < sizeof chats / sizeof *chats; i++) {
        snprintf(body, sizeof body, "{\"messages\":%s}", chats[i].messages);
        refuses(OPENAI_CHAT, body, "messages", chats[i].words);
    }
    static const char *const bodies[] = {
        "",   "{", "[]", "null", "7", "\"a\"", "{}x", "{\"prompt\":\"\xff\"}", "{\"a\\u0000b\":1}",
        "nan"};
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++)
        refuses(OPENAI_COMPLETION, bodies[i], "", "request body");
}

/* n times piece with commas between, in frame, which has one %s. */
static char *repeat(const char *frame, const char *piece, size_t n)
{
    size_t each = strlen(piece) + 1, size = strlen(frame) + n * each + 1;
    char *list = calloc(1, n * each + 1), *body = malloc(size);
    assert_true(list && body);
    for (size_t i = 0; i < n; i++) {
        memcpy(list + i * each, piece, each - 1);
        if (i + 1 < n) list[i * each + each - 1] = ',';
    }
    const char *at = strstr(frame, "%s");
    assert_non_null(at);
    snprintf(body, size, "%.*s%s%s", (int)(at - frame), frame, list, at + 2);
    free(list);
    return body;
}

static void test_tools_are_functions(void **state)
{
    (void)state;
    static const char *const good[] = {"{\"type\":\"function\",\"function\":{\"name\":\"f\"}}",
                                       "{\"function\":{\"name\":\"f\"}}",
                                       "{\"type\":null,\"function\":{\"name\":\"f\"}}"};
    static const char *const bad[] = {
        "\"f\"",
        "null",
        "{}",
        "{\"type\":\"web_search\"}",
        "{\"type\":\"custom\",\"function\":{\"name\":\"f\"}}",
        "{\"type\":\"function\",\"function\":{}}",
        "{\"type\":\"function\",\"function\":{\"name\":\"\"}}",
        "{\"type\":\"function\",\"function\":{\"name\":5}}",
        "{\"type\":\"function\",\"name\":\"f\"}",
    };
    char body[300];
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        snprintf(body, sizeof body, "{" HI ",\"tools\":[%s,%s]}", good[0], good[i]);
        struct openai_request *q = parse(OPENAI_CHAT, body);
        assert_int_equal(openai_request_message(q)->chat->n_tools, 2);
        openai_request_free(q);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(body, sizeof body, "{" HI ",\"tools\":[%s,%s]}", good[0], bad[i]);
        refuses(OPENAI_CHAT, body, "tools", "tools[1] must be a function with a name");
    }
}

static void test_which_name_the_limit_has(void **state)
{
    (void)state;
    static const struct {
        const char *fields;
        bool is_completion;
    } rows[] = {{",\"max_tokens\":3", false},
                {",\"max_completion_tokens\":3", true},
                {",\"max_completion_tokens\":3,\"max_tokens\":4", true},
                {",\"max_completion_tokens\":null,\"max_tokens\":3", false}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char body[200];
        snprintf(body, sizeof body, "{" HI "%s}", rows[i].fields);
        struct openai_request *q = parse(OPENAI_CHAT, body);
        assert_int_equal(openai_request_message(q)->stop->max_tokens, 3);
        assert_int_equal(openai_request_options(q)->completion_limit, rows[i].is_completion);
        openai_request_free(q);
    }
}

static void test_limits(void **state)
{
    (void)state;
    static const struct {
        const char *frame, *piece, *words;
        size_t limit;
    } rows[] = {
        {"{\"messages\":[%s]}", "{\"role\":\"user\",\"content\":\"x\"}",
         "messages has 4097 messages, limit 4096", 4096},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[%s]}]}",
         "{\"type\":\"text\",\"text\":\"x\"}", "[0].content has 1025 parts, limit 1024", 1024},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *body = repeat(rows[i].frame, rows[i].piece, rows[i].limit);
        openai_request_free(parse(OPENAI_CHAT, body));
        free(body);
        body = repeat(rows[i].frame, rows[i].piece, rows[i].limit + 1);
        refuses(OPENAI_CHAT, body, "messages", rows[i].words);
        free(body);
    }
    char *deep = malloc(100001); /* no recursion of ours follows this */
    assert_non_null(deep);
    memset(deep, '[', 100000);
    deep[100000] = 0;
    refuses(OPENAI_COMPLETION, deep, "", "depth");
    free(deep);
}

/* JSON leaves open which of two equal keys counts: here the last, as in Python's json. */
static void test_the_last_of_equal_keys_counts(void **state)
{
    (void)state;
    struct openai_request *q =
        parse(OPENAI_COMPLETION, "{\"prompt\":\"a\",\"prompt\":\"b\",\"seed\":\"x\",\"seed\":5}");
    assert_bytes(openai_request_message(q)->prompt, "b");
    assert_int_equal(openai_request_message(q)->sampling->seed, 5);
    openai_request_free(q);
}

static size_t header_at(const char *name)
{
    size_t i = 0;
    while (openai_header_name(i) && strcmp(openai_header_name(i), name) != 0) i++;
    assert_non_null(openai_header_name(i));
    return i;
}

static td_status say(struct openai_request *q, const char *name, const char *value,
                     struct td_err *err)
{
    *err = (struct td_err){0};
    return openai_request_header(q, header_at(name), value, err);
}

static void test_headers_say_what_the_body_may(void **state)
{
    (void)state;
    struct openai_request *q =
        parse(OPENAI_COMPLETION, "{\"prompt\":\"a\",\"objectives\":{\"ttft_ms\":9},"
                                 "\"tenant\":\"b\",\"priority\":3}");
    struct td_err err;
    const Tandem__V1__GenerateRequest *in = openai_request_message(q);
    assert_int_equal(say(q, "x-slo-ttft-ms", "250.5", &err), TD_OK);
    assert_int_equal(say(q, "x-slo-tpot-ms", "30", &err), TD_OK);
    char name[] = "gold";
    assert_int_equal(say(q, "x-slo-class", name, &err), TD_OK);
    memset(name, 'x', 4); /* a header lives no longer than the connection */
    assert_string_equal(in->slo_class, "gold");
    assert_int_equal(say(q, "x-tenant", "c", &err), TD_OK);
    assert_string_equal(in->tenant, "c");
    assert_int_equal(say(q, "x-priority", "-7", &err), TD_OK);
    assert_int_equal(in->priority, -7);
    assert_true(in->objectives->ttft_ms == 250.5 && in->objectives->tpot_ms == 30.0);
    assert_true(in->objectives->has_ttft_ms_case && in->objectives->has_tpot_ms_case);
    static const char *const wrong[] = {"", "x", "5x", "5 ", "nan", "inf", "1e999", "--1"};
    static const char *const numbers[] = {"x-slo-ttft-ms", "x-slo-tpot-ms", "x-priority"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        for (size_t k = 0; k < sizeof numbers / sizeof *numbers; k++) {
            char begin[32];
            snprintf(begin, sizeof begin, "%s is \"", numbers[k]);
            assert_int_equal(say(q, numbers[k], wrong[i], &err), TD_ERR_INVALID);
            assert_ptr_equal(strstr(err.msg, begin), err.msg);
        }
    assert_int_equal(say(q, "x-priority", "1.5", &err), TD_ERR_INVALID);
    assert_int_equal(say(q, "x-tenant", "\xff", &err), TD_ERR_INVALID);
    assert_string_equal(err.msg, "x-tenant is not valid UTF-8");
    assert_true(in->objectives->ttft_ms == 250.5 && in->objectives->tpot_ms == 30.0);
    assert_int_equal(in->priority, -7);
    openai_request_free(q);
}

/* What a model thought in an earlier answer is given back to its template, by either name. */
static void test_thoughts_of_earlier_answers(void **state)
{
    (void)state;
    struct openai_request *q = parse(
        OPENAI_CHAT, "{\"messages\":["
                     "{\"role\":\"user\",\"content\":\"a\",\"reasoning\":\"ignored\"},"
                     "{\"role\":\"assistant\",\"content\":\"b\",\"reasoning_content\":\"hm\"},"
                     "{\"role\":\"assistant\",\"content\":null,\"reasoning\":\"m\\u0000m\"},"
                     "{\"role\":\"assistant\",\"content\":\"c\",\"reasoning_content\":null}]}");
    const Tandem__V1__Chat *chat = openai_request_message(q)->chat;
    assert_int_equal(chat->n_messages, 4);
    assert_int_equal(chat->messages[0]->reasoning.len, 0);
    assert_bytes(chat->messages[1]->reasoning, "hm");
    assert_int_equal(chat->messages[2]->reasoning.len, 3);
    assert_memory_equal(chat->messages[2]->reasoning.data, "m\0m", 3);
    assert_int_equal(chat->messages[3]->reasoning.len, 0);
    openai_request_free(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_every_field),
        cmocka_unit_test(test_prompt_logprobs),
        cmocka_unit_test(test_scores_of_choices_that_have_not_begun),
        cmocka_unit_test(test_every_field_of_chat),
        cmocka_unit_test(test_what_a_template_is_told),
        cmocka_unit_test(test_prompts),
        cmocka_unit_test(test_messages),
        cmocka_unit_test(test_what_asks_for_nothing),
        cmocka_unit_test(test_refusals_name_the_field),
        cmocka_unit_test(test_refused_inputs),
        cmocka_unit_test(test_tools_are_functions),
        cmocka_unit_test(test_which_name_the_limit_has),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_the_last_of_equal_keys_counts),
        cmocka_unit_test(test_headers_say_what_the_body_may),
        cmocka_unit_test(test_thoughts_of_earlier_answers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
