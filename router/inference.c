/* inference.c - the service clients use: checks every field, makes a request of it, and ends its
 * call exactly once. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/fault.h"
#include "common/base/entropy.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "common/base/prefix_hash.h"
#include "common/rpc/rpc_status.h"
#include "common/text/fim.h"
#include "router/router.h"

/* A prompt to be truncated, and ids that are to be text, are so many longest sequences at most. */
#define MAX_TRUNCATED 4
#define HANDED_OVER "this router is draining; the answer can go on at another one"

/* ---- input to tokens ------------------------------------------------------------------------- */

/* Text that is too long whatever its tokens are is refused before the tokenizer sees it. */
static td_status check_text_bytes(const struct served_model *m, size_t n_bytes, uint32_t max_tokens,
                                  struct td_err *err)
{
    size_t limit = m->longest_token_bytes * (size_t)max_tokens;
    if (n_bytes <= limit) return TD_OK;
    return td_fail(err, TD_ERR_INVALID,
                   "prompt has %zu bytes; %u tokens of context hold at most %zu", n_bytes,
                   max_tokens, limit);
}

/* salt: whose text it is; texts of others are not looked at (tokenizer_cache.h). */
static td_status encode(const struct served_model *m, uint64_t salt, const char *text,
                        size_t n_bytes, bool add_special, uint32_t max_tokens,
                        struct td_token_list *list, struct td_err *err)
{
    td_status s = check_text_bytes(m, n_bytes, max_tokens, err);
    if (s) return s;
    s = td_token_cache_encode(m->token_cache, salt, text, n_bytes, add_special, max_tokens, list,
                              err);
    if (s == TD_ERR_LIMIT && max_tokens > served_model_max_len(m))
        return td_fail(err, TD_ERR_INVALID,
                       "prompt has more than %u tokens, the most that are read to be truncated",
                       max_tokens);
    if (s == TD_ERR_LIMIT)
        return td_fail(err, TD_ERR_INVALID,
                       "prompt has more than %u tokens, the longest sequence this cluster can hold",
                       max_tokens);
    if (s) td_err_prefix(err, "prompt");
    return s;
}

static bool utf8(const ProtobufCBinaryData *text)
{
    return !text->len || td_rpc_utf8_valid(text->data, text->len);
}

static bool utf8_string(const char *text) { return td_rpc_utf8_valid(text, strlen(text)); }

/* Counts, JSON and what the template has are the renderer's to check; it takes text on trust. */
static td_status check_message(size_t i, const Tandem__V1__ChatMessage *m, struct td_err *err)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    bool known = false;
    for (size_t k = 0; k < sizeof roles / sizeof *roles; k++) known |= !strcmp(m->role, roles[k]);
    if (!known)
        return td_fail(err, TD_ERR_INVALID,
                       "chat.messages[%zu].role is \"%.40s\", must be system, developer, user, "
                       "assistant or tool",
                       i, m->role);
    const char *field = !utf8(&m->content)              ? "content"
                        : !utf8(&m->reasoning)          ? "reasoning"
                        : !utf8_string(m->name)         ? "name"
                        : !utf8_string(m->tool_call_id) ? "tool_call_id"
                                                        : NULL;
    for (size_t k = 0; !field && k < m->n_parts; k++)
        if (!utf8_string(m->parts[k]->type) || !utf8(&m->parts[k]->text)) field = "parts";
    for (size_t k = 0; !field && k < m->n_tool_calls; k++)
        if (!utf8_string(m->tool_calls[k]->id) || !utf8_string(m->tool_calls[k]->name))
            field = "tool_calls";
    if (!field) return TD_OK;
    return td_fail(err, TD_ERR_INVALID, "chat.messages[%zu].%s is not valid UTF-8", i, field);
}

/* Limits that hold before a message is unpacked: a million chat messages of four bytes would become
 * 200 MB. */
static struct td_rpc_field_limit input_limits[] = {
    /* Field 0 does not exist: these messages are only on the way to those below. */
    {&tandem__v1__generate_request__descriptor, 0, UINT32_MAX, ""},
    {&tandem__v1__tokenize_request__descriptor, 0, UINT32_MAX, ""},
    {&tandem__v1__chat__descriptor, 1, ROUTER_MAX_CHAT_MESSAGES, "chat.messages"},
    {&tandem__v1__chat__descriptor, 3, TD_CHAT_MAX_TOOLS, "chat.tools"},
    {&tandem__v1__chat_message__descriptor, 3, TD_CHAT_MAX_PARTS, "chat.messages.parts"},
    {&tandem__v1__chat_message__descriptor, 4, TD_CHAT_MAX_TOOL_CALLS, "chat.messages.tool_calls"},
    {&tandem__v1__sampling__descriptor, 9, TD_MAX_LOGIT_BIAS, "sampling.logit_bias"},
    {&tandem__v1__sampling__descriptor, 14, TD_MAX_ALLOWED_TOKENS, "sampling.allowed_token_ids"},
    {&tandem__v1__sampling__descriptor, 15, TD_MAX_BAD_WORDS / 2, "sampling.bad_words"},
    {&tandem__v1__stop_conditions__descriptor, 2, ROUTER_MAX_STOP_STRINGS, "stop.stop"},
    {&tandem__v1__stop_conditions__descriptor, 3, TD_MAX_STOP_TOKENS, "stop.stop_token_ids"},
    {&tandem__v1__resume_from__descriptor, 4, ROUTER_MAX_CHOICES, "resume_from.choices"},
    /* The last three rows: inference_update_limits sets them by the context's length. */
    {&tandem__v1__detokenize_request__descriptor, 2, UINT32_MAX, "ids"},
    {&tandem__v1__token_ids__descriptor, 1, UINT32_MAX, "token_ids"},
    {&tandem__v1__resume_choice__descriptor, 1, UINT32_MAX, "resume_from.choices.token_ids"},
    {0},
};

void inference_update_limits(const struct router *r)
{
    uint32_t longest = 0;
    for (uint32_t i = 0; i < r->n_models; i++)
        if (served_model_max_len(r->models[i]) > longest)
            longest = served_model_max_len(r->models[i]);
    size_t n = sizeof input_limits / sizeof *input_limits;
    input_limits[n - 2].max = longest;
    input_limits[n - 4].max = input_limits[n - 3].max = MAX_TRUNCATED * longest;
}

/* The wire's chat as the renderer takes it. Texts are borrowed from the call; the lists are
 * owned by this struct, and chat_view_free frees them. */
struct chat_view {
    struct td_chat chat;
    struct td_chat_message *messages;
    struct td_chat_part *parts;
    struct td_chat_tool_call *calls;
    struct td_chat_json *tools;
    size_t n_bytes; /* of all texts: no fewer come out */
};

static void chat_view_free(struct chat_view *v)
{
    free(v->messages);
    free(v->parts);
    free(v->calls);
    free(v->tools);
}

static const char *bytes_text(const ProtobufCBinaryData *b)
{
    return b->data ? (const char *)b->data : "";
}

static td_status chat_view_make(const Tandem__V1__Chat *in, struct chat_view *v, struct td_err *err)
{
    size_t n_parts = 0, n_calls = 0;
    for (size_t i = 0; i < in->n_messages; i++) {
        n_parts += in->messages[i]->n_parts;
        n_calls += in->messages[i]->n_tool_calls;
    }
    v->messages = calloc(in->n_messages, sizeof *v->messages);
    v->parts = calloc(n_parts + 1, sizeof *v->parts);
    v->calls = calloc(n_calls + 1, sizeof *v->calls);
    v->tools = calloc(in->n_tools + 1, sizeof *v->tools);
    if (!v->messages || !v->parts || !v->calls || !v->tools)
        return td_fail(err, TD_ERR_AGAIN, "no memory for %zu messages", in->n_messages);
    n_parts = n_calls = 0;
    for (size_t i = 0; i < in->n_messages; i++) {
        const Tandem__V1__ChatMessage *m = in->messages[i];
        td_status s = check_message(i, m, err);
        if (s) return s;
        v->messages[i] = (struct td_chat_message){.role = m->role,
                                                  .content = bytes_text(&m->content),
                                                  .content_bytes = m->content.len,
                                                  .parts = v->parts + n_parts,
                                                  .n_parts = m->n_parts,
                                                  .tool_calls = v->calls + n_calls,
                                                  .n_tool_calls = m->n_tool_calls,
                                                  .tool_call_id = m->tool_call_id,
                                                  .name = m->name,
                                                  .reasoning = bytes_text(&m->reasoning),
                                                  .reasoning_bytes = m->reasoning.len};
        v->n_bytes += m->content.len;
        for (size_t k = 0; k < m->n_parts; k++) {
            const ProtobufCBinaryData *text = &m->parts[k]->text;
            v->parts[n_parts++] =
                (struct td_chat_part){m->parts[k]->type, bytes_text(text), text->len};
            v->n_bytes += text->len;
        }
        for (size_t k = 0; k < m->n_tool_calls; k++) {
            const Tandem__V1__ToolCall *call = m->tool_calls[k];
            v->calls[n_calls++] = (struct td_chat_tool_call){
                call->id, call->name, {bytes_text(&call->arguments), call->arguments.len}};
        }
    }
    for (size_t i = 0; i < in->n_tools; i++)
        v->tools[i] = (struct td_chat_json){bytes_text(&in->tools[i]), in->tools[i].len};
    v->chat = (struct td_chat){
        .messages = v->messages,
        .n_messages = in->n_messages,
        .add_generation_prompt = !in->no_generation_prompt,
        .continue_final_message = in->continue_final_message,
        .tools = v->tools,
        .n_tools = in->n_tools,
        .template_kwargs = {bytes_text(&in->template_kwargs), in->template_kwargs.len}};
    return TD_OK;
}

/* Behind a chat's rendering, when a grammar describes the answer. */
static td_status add_guided_header(const struct served_model *m, const Tandem__V1__Chat *chat,
                                   char **text, size_t *n_bytes, struct td_err *err)
{
    struct td_output_format format = td_chat_template_output(m->chat, chat->n_tools > 0);
    const char *header = td_output_guided_header(format, *text, *n_bytes);
    size_t n = strlen(header);
    if (n == 0) return TD_OK;
    char *more = realloc(*text, *n_bytes + n);
    if (!more) return td_fail(err, TD_ERR_AGAIN, "no memory for %zu bytes of a chat", *n_bytes + n);
    memcpy(more + *n_bytes, header, n);
    *text = more;
    *n_bytes += n;
    return TD_OK;
}

/* guided: a grammar describes the answer. *ret_in_reasoning: the prompt ends inside the model's
 * reasoning. */
static td_status chat_tokens(const struct served_model *m, uint64_t salt,
                             const Tandem__V1__Chat *chat, bool guided, uint32_t max_tokens,
                             struct td_token_list *list, bool *ret_in_reasoning, struct td_err *err)
{
    if (chat->n_messages == 0) return td_fail(err, TD_ERR_INVALID, "chat.messages is empty");
    if (chat->n_messages > ROUTER_MAX_CHAT_MESSAGES)
        return td_fail(err, TD_ERR_INVALID, "chat.messages has %zu messages, limit %d",
                       chat->n_messages, ROUTER_MAX_CHAT_MESSAGES);
    struct chat_view v = {0};
    char *text = NULL;
    size_t n_bytes = 0;
    td_status s = chat_view_make(chat, &v, err);
    if (!s) s = check_text_bytes(m, v.n_bytes, max_tokens, err);
    if (!s) s = td_chat_template_render(m->chat, &v.chat, &text, &n_bytes, err);
    chat_view_free(&v);
    if (s) return s;
    *ret_in_reasoning = td_output_begins_in_reasoning(text, n_bytes);
    if (guided) s = add_guided_header(m, chat, &text, &n_bytes, err);
    if (!s) s = encode(m, salt, text, n_bytes, false, max_tokens, list, err);
    free(text);
    return s;
}

static td_status prompt_tokens(const struct served_model *m, uint64_t salt,
                               const ProtobufCBinaryData *prompt, bool add_special,
                               uint32_t max_tokens, struct td_token_list *list, struct td_err *err)
{
    if (prompt->len == 0) return td_fail(err, TD_ERR_INVALID, "prompt is empty");
    return encode(m, salt, (const char *)prompt->data, prompt->len, add_special, max_tokens, list,
                  err);
}

/* A prompt with a gap between it and its suffix. */
static td_status gap_tokens(const struct served_model *m, uint64_t salt,
                            const Tandem__V1__GenerateRequest *in, uint32_t max_tokens,
                            struct td_token_list *list, struct td_err *err)
{
    char *text = NULL;
    size_t n_bytes = 0;
    if (in->truncate_prompt_tokens)
        return td_fail(err, TD_ERR_INVALID, "suffix is not supported with truncate_prompt_tokens");
    td_status s = check_text_bytes(m, in->prompt.len + in->suffix.len, max_tokens, err);
    if (!s)
        s = td_fim_prompt(m->tokenizer, (const char *)in->prompt.data, in->prompt.len,
                          (const char *)in->suffix.data, in->suffix.len, &text, &n_bytes, err);
    if (s == TD_ERR_UNSUPPORTED) s = TD_ERR_INVALID;
    if (!s) s = encode(m, salt, text, n_bytes, !in->no_special_tokens, max_tokens, list, err);
    free(text);
    return s;
}

static td_status ids_tokens(const struct served_model *m, const Tandem__V1__TokenIds *in,
                            uint32_t max_tokens, struct td_token_list *list, struct td_err *err)
{
    if (in->n_ids == 0) return td_fail(err, TD_ERR_INVALID, "token_ids is empty");
    if (in->n_ids >= max_tokens)
        return td_fail(err, TD_ERR_INVALID,
                       "token_ids has %zu ids, must be below the longest sequence, %u", in->n_ids,
                       max_tokens);
    for (size_t i = 0; i < in->n_ids; i++)
        if (in->ids[i] < 0 || in->ids[i] >= m->config.vocab)
            return td_fail(err, TD_ERR_INVALID, "token_ids[%zu] is %d, must be 0..%d", i,
                           in->ids[i], m->config.vocab - 1);
    list->ids = malloc(in->n_ids * sizeof *list->ids);
    if (!list->ids) return td_fail(err, TD_ERR_AGAIN, "no memory for %zu tokens", in->n_ids);
    memcpy(list->ids, in->ids, in->n_ids * sizeof *list->ids);
    list->n = list->capacity = in->n_ids;
    return TD_OK;
}

/* Leaves the last tokens, as many as the request wants. */
static td_status truncate_prompt(const struct served_model *m,
                                 const Tandem__V1__GenerateRequest *in, struct td_token_list *list,
                                 struct td_err *err)
{
    int64_t want = in->truncate_prompt_tokens, max_len = served_model_max_len(m);
    if (want < -1 || want >= max_len)
        return td_fail(err, TD_ERR_INVALID,
                       "truncate_prompt_tokens is %lld, must be 1..%lld, or -1: what fits beside "
                       "max_tokens",
                       (long long)want, (long long)max_len - 1);
    if (want == -1) {
        int64_t output = in->stop && in->stop->has_max_tokens_case ? in->stop->max_tokens : 1;
        if (output < 1 || output >= max_len) return TD_OK; /* refused later, in its own words */
        want = max_len - output;
    }
    if (!want || list->n <= (size_t)want) return TD_OK;
    memmove(list->ids, list->ids + list->n - (size_t)want, (size_t)want * sizeof *list->ids);
    list->n = (size_t)want;
    return TD_OK;
}

td_status inference_prompt(const struct served_model *m, const Tandem__V1__GenerateRequest *in,
                           const struct router_tenant *who, struct router_prompt *prompt,
                           struct td_err *err)
{
    if (strlen(in->cache_salt) > ROUTER_MAX_CACHE_SALT_BYTES)
        return td_fail(err, TD_ERR_INVALID, "cache_salt has %zu bytes, limit %d",
                       strlen(in->cache_salt), ROUTER_MAX_CACHE_SALT_BYTES);
    struct td_prefix_salt whose = router_cache_salt(who ? who->name : in->tenant, in->cache_salt);
    uint64_t salt = whose.lo ^ whose.hi;
    struct td_token_list *list = &prompt->list;
    uint32_t max_tokens =
        served_model_max_len(m) * (in->truncate_prompt_tokens ? MAX_TRUNCATED : 1);
    td_status s;
    if (in->suffix.len && in->input_case != TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT)
        return td_fail(err, TD_ERR_INVALID, "suffix is not supported with chat or token_ids");
    switch (in->input_case) {
    case TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT:
        if (in->suffix.len) {
            s = gap_tokens(m, salt, in, max_tokens, list, err);
            break;
        }
        s = prompt_tokens(m, salt, &in->prompt, !in->no_special_tokens, max_tokens, list, err);
        break;
    case TANDEM__V1__GENERATE_REQUEST__INPUT_CHAT:
        s = chat_tokens(m, salt, in->chat, in->guided != NULL, max_tokens, list,
                        &prompt->in_reasoning, err);
        break;
    case TANDEM__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS:
        s = ids_tokens(m, in->token_ids, max_tokens, list, err);
        break;
    default:
        return td_fail(err, TD_ERR_INVALID, "input is missing: set prompt, chat or token_ids");
    }
    if (!s) s = truncate_prompt(m, in, list, err);
    if (s) return s;
    if (list->n == 0) return td_fail(err, TD_ERR_INVALID, "the prompt has no tokens");
    if (list->n >= served_model_max_len(m))
        return td_fail(err, TD_ERR_INVALID,
                       "the prompt has %zu tokens, must be below the longest sequence this cluster "
                       "can hold, %u",
                       list->n, served_model_max_len(m));
    return TD_OK;
}

/* ---- sampling and stop conditions ------------------------------------------------------------ */

static td_status fill_bias(struct request_state *q, const Tandem__V1__Sampling *in,
                           struct td_err *err)
{
    Tandem__V1__SamplingSpec *s = &q->ask.spec;
    if (in->n_logit_bias > TD_MAX_LOGIT_BIAS)
        return td_fail(err, TD_ERR_INVALID, "sampling.logit_bias has %zu entries, limit %d",
                       in->n_logit_bias, TD_MAX_LOGIT_BIAS);
    if (in->n_logit_bias) {
        s->logit_bias = calloc(in->n_logit_bias, sizeof *s->logit_bias);
        q->ask.bias_store = calloc(in->n_logit_bias, sizeof *q->ask.bias_store);
        if (!s->logit_bias || !q->ask.bias_store)
            return td_fail(err, TD_ERR_AGAIN, "no memory for logit_bias");
        for (size_t i = 0; i < in->n_logit_bias; i++) {
            tandem__v1__logit_bias__init(&q->ask.bias_store[i]);
            q->ask.bias_store[i].token = in->logit_bias[i]->token;
            q->ask.bias_store[i].bias = in->logit_bias[i]->bias;
            s->logit_bias[i] = &q->ask.bias_store[i];
        }
        s->n_logit_bias = in->n_logit_bias;
    }
    return TD_OK;
}

static td_status fill_prompt_logprobs(Tandem__V1__SamplingSpec *s, const Tandem__V1__Sampling *in,
                                      size_t n_prompt, struct td_err *err)
{
    int32_t n = in->prompt_logprobs;
    if (!in->has_prompt_logprobs_case) return TD_OK;
    if (n < 0 || n > TD_MAX_TOP_LOGPROBS)
        return td_fail(err, TD_ERR_INVALID, "sampling.prompt_logprobs is %d, must be 0..%d", n,
                       TD_MAX_TOP_LOGPROBS);
    size_t n_all = n_prompt * ((size_t)n + 1);
    if (n_all > ROUTER_MAX_PROMPT_LOGPROBS)
        return td_fail(err, TD_ERR_INVALID,
                       "sampling.prompt_logprobs is %d: of %zu prompt tokens, each with its "
                       "alternatives, these are %zu log-probabilities, limit %d",
                       n, n_prompt, n_all, ROUTER_MAX_PROMPT_LOGPROBS);
    s->prompt_logprobs = (uint32_t)n + 1;
    return TD_OK;
}

/* resume: of a stream that goes on, else NULL. */
static td_status fill_sampling(const struct served_model *m, struct request_state *q,
                               const Tandem__V1__Sampling *in, const Tandem__V1__ResumeFrom *resume,
                               size_t n_prompt, struct td_err *err)
{
    static const Tandem__V1__Sampling none = TANDEM__V1__SAMPLING__INIT;
    if (!in) in = &none;
    Tandem__V1__SamplingSpec *s = &q->ask.spec;
    tandem__v1__sampling_spec__init(s);
    s->temperature = in->has_temperature_case ? in->temperature : m->config.temperature;
    s->top_k = in->has_top_k_case ? in->top_k : m->config.top_k;
    s->top_p = in->has_top_p_case ? in->top_p : m->config.top_p;
    s->min_p = in->has_min_p_case ? in->min_p : m->config.min_p;
    s->repetition_penalty =
        in->has_repetition_penalty_case ? in->repetition_penalty : m->config.repetition_penalty;
    s->presence_penalty = in->presence_penalty;
    s->frequency_penalty = in->frequency_penalty;
    s->seed = resume ? resume->seed : in->has_seed_case ? in->seed : td_random_u64();
    if (in->has_seed_case && s->seed != in->seed)
        return td_fail(err, TD_ERR_INVALID, "resume_from.seed is %llu, beside sampling.seed %llu",
                       (unsigned long long)s->seed, (unsigned long long)in->seed);
    s->n_logprobs = in->has_logprobs_case ? in->logprobs : -1;
    if (in->has_logprobs_case && in->logprobs < 0)
        return td_fail(err, TD_ERR_INVALID, "sampling.logprobs is %d, must be 0..%d", in->logprobs,
                       TD_MAX_TOP_LOGPROBS);
    q->ask.want_logprobs = s->n_logprobs >= 0;
    if (fill_prompt_logprobs(s, in, n_prompt, err)) return TD_ERR_INVALID;
    td_status st = fill_bias(q, in, err);
    if (st) return st;
    struct td_logit_bias bias[TD_MAX_LOGIT_BIAS];
    for (size_t i = 0; i < s->n_logit_bias; i++)
        bias[i] = (struct td_logit_bias){s->logit_bias[i]->token, s->logit_bias[i]->bias};
    struct td_sampling check = {.temperature = s->temperature,
                                .top_k = s->top_k,
                                .top_p = s->top_p,
                                .min_p = s->min_p,
                                .repetition_penalty = s->repetition_penalty,
                                .presence_penalty = s->presence_penalty,
                                .frequency_penalty = s->frequency_penalty,
                                .seed = s->seed,
                                .n_logprobs = s->n_logprobs,
                                .logit_bias = bias,
                                .n_logit_bias = (int32_t)s->n_logit_bias};
    st = td_sampling_check(&check, m->config.vocab, err);
    return st ? td_err_prefix(err, "sampling") : TD_OK;
}

static td_status fill_stop(const struct served_model *m, struct request_state *q,
                           const Tandem__V1__StopConditions *in,
                           const Tandem__V1__ResumeFrom *resume, size_t n_prompt,
                           struct td_err *err)
{
    static const Tandem__V1__StopConditions none = TANDEM__V1__STOP_CONDITIONS__INIT;
    if (!in) in = &none;
    int64_t room = (int64_t)served_model_max_len(m) - (int64_t)n_prompt;
    int64_t before = resume && resume->max_tokens ? resume->max_tokens : room;
    int64_t max_tokens = in->has_max_tokens_case ? in->max_tokens : before;
    bool no_output = max_tokens == 0 && room > 0 && q->ask.spec.prompt_logprobs;
    if ((max_tokens < 1 && !no_output) || max_tokens > room)
        return td_fail(
            err, TD_ERR_INVALID,
            "stop.max_tokens is %lld, must be 1..%lld (longest sequence %u - prompt %zu tokens), "
            "or 0 to have log-probabilities of the prompt alone",
            (long long)max_tokens, (long long)room, served_model_max_len(m), n_prompt);
    /* workers know no request without a token: one is made with the prompt, and dropped here */
    q->ask.no_output = no_output;
    q->ask.max_tokens = no_output ? 1 : (uint64_t)max_tokens;
    q->ask.spec.max_tokens = (uint32_t)q->ask.max_tokens;
    if (no_output) {
        q->ask.want_logprobs = false;
        q->ask.spec.n_logprobs = -1;
    }
    if (in->min_tokens < 0 || in->min_tokens > max_tokens)
        return td_fail(err, TD_ERR_INVALID,
                       "stop.min_tokens is %lld, must be 0..%lld, which is max_tokens",
                       (long long)in->min_tokens, (long long)max_tokens);
    q->ask.spec.min_tokens = (uint32_t)in->min_tokens;
    q->output.stop.gives_match = in->include_stop;
    size_t n_eos = in->ignore_eos ? 0 : (size_t)m->config.n_eos;
    if (in->n_stop_token_ids + n_eos > TD_MAX_STOP_TOKENS)
        return td_fail(err, TD_ERR_INVALID, "stop.stop_token_ids has %zu ids, limit %zu",
                       in->n_stop_token_ids, TD_MAX_STOP_TOKENS - n_eos);
    q->ask.spec.stop_token_ids = calloc(in->n_stop_token_ids + n_eos + 1, sizeof(int32_t));
    if (!q->ask.spec.stop_token_ids)
        return td_fail(err, TD_ERR_AGAIN, "no memory for stop_token_ids");
    for (size_t i = 0; i < in->n_stop_token_ids; i++) {
        int32_t id = in->stop_token_ids[i];
        if (id < 0 || id >= m->config.vocab)
            return td_fail(err, TD_ERR_INVALID, "stop.stop_token_ids[%zu] is %d, must be 0..%d", i,
                           id, m->config.vocab - 1);
        q->ask.spec.stop_token_ids[q->ask.spec.n_stop_token_ids++] = id;
    }
    q->ask.n_stops = in->n_stop_token_ids;
    if (in->min_tokens &&
        in->n_stop_token_ids + n_eos + q->ask.spec.n_logit_bias > TD_MAX_LOGIT_BIAS)
        return td_fail(err, TD_ERR_INVALID,
                       "stop.min_tokens is set: sampling.logit_bias and stop tokens may have %d "
                       "entries together",
                       TD_MAX_LOGIT_BIAS);
    for (size_t i = 0; i < n_eos; i++)
        q->ask.spec.stop_token_ids[q->ask.spec.n_stop_token_ids++] = m->config.eos_ids[i];
    for (size_t i = 0; i < in->n_stop; i++) {
        if (!td_rpc_utf8_valid(in->stop[i].data, in->stop[i].len))
            return td_fail(err, TD_ERR_INVALID, "stop.stop[%zu] is not valid UTF-8", i);
        td_status s = stop_matcher_add(&q->output.stop, in->stop[i].data, in->stop[i].len, err);
        if (s) return td_err_prefix(err, "stop");
    }
    return TD_OK;
}

/* ---- life of a request_state ----------------------------------------------------------------- */

static void request_free(struct router *r, struct request_state *q)
{
    router_guide_forget(r, q);
    leg_drop_held(q);
    leg_cancel(&q->prefill.leg);
    leg_cancel(&q->decode.leg);
    free(q->tokens);
    free(q->ask.bias_store);
    free(q->ask.spec.logit_bias);
    free(q->ask.spec.stop_token_ids);
    free(q->ask.spec.guided_texts);
    free(q->ask.guided_bytes);
    router_token_filter_free(&q->ask);
    free(q->decode.grant);
    td_detokenizer_free(q->output.detok);
    answer_free(q->output.answer);
    stop_matcher_free(&q->output.stop);
    late_free(&q->output.late);
    uint32_t request_at = q->request_at;
    struct router_client client = q->client;
    r->pool.shares.of[q->model->index].n_live--;
    memset(q, 0, sizeof *q);
    q->request_at = request_at;
    r->pool.free[r->pool.n_free++] = request_at;
    atomic_fetch_sub(&r->n_live, 1);
    if (client.ops) client.ops->attach(client.call, NULL);
}

/* How the answer is split into fields: not at all unless the chat asks for it. */
static td_status answer_format(const struct served_model *m, const Tandem__V1__GenerateRequest *in,
                               struct td_output_format *ret, struct td_err *err)
{
    if (in->input_case != TANDEM__V1__GENERATE_REQUEST__INPUT_CHAT) return TD_OK;
    const Tandem__V1__Chat *chat = in->chat;
    bool none = !strcmp(chat->tool_choice, "none");
    bool must = router_must_call(in), required = !strcmp(chat->tool_choice, "required");
    if (chat->tool_choice[0] && !none && !required && strcmp(chat->tool_choice, "auto"))
        return td_fail(err, TD_ERR_INVALID,
                       "chat.tool_choice is \"%.40s\", must be auto, none or required",
                       chat->tool_choice);
    if (chat->tool_name[0] && chat->tool_choice[0] && !required)
        return td_fail(err, TD_ERR_INVALID,
                       "chat.tool_name is set beside chat.tool_choice \"%s\", must be with none or "
                       "required",
                       chat->tool_choice);
    struct td_output_format f = td_chat_template_output(m->chat, chat->n_tools > 0);
    bool calls = chat->n_tools > 0 && !none;
    if (must && f.calls == TD_CALLS_NONE)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "chat.tool_choice wants a tool to be called: how models of this chat "
                       "template (%s) write tool calls is not known here",
                       td_chat_template_family(m->chat));
    if (!chat->split_answer) return TD_OK;
    if (calls && f.calls == TD_CALLS_NONE)
        return td_fail(err, TD_ERR_UNSUPPORTED,
                       "chat.tools: how models of this chat template (%s) write tool calls is not "
                       "known here; set chat.tool_choice to none, or leave chat.split_answer out",
                       td_chat_template_family(m->chat));
    if (!calls) f.calls = TD_CALLS_NONE;
    *ret = f;
    return TD_OK;
}

/* What the client of a stream that goes on has of it: into q's tokens, whose room the limit on
 * output tokens gives, and, unless its door takes all messages, into what is not sent again. */
static td_status fill_resumed(struct request_state *q, const Tandem__V1__ResumeFrom *resume,
                              bool has_ids, bool takes_all, struct td_err *err)
{
    uint64_t hash = td_hash64(q->tokens, q->n_prompt * sizeof *q->tokens, 0);
    if (resume->prompt_hash && resume->prompt_hash != hash)
        return td_fail(
            err, TD_ERR_STALE,
            "resume_from.prompt_hash is %llx: the prompt has other tokens here than where "
            "the stream began, %llx; the request can only be begun anew",
            (unsigned long long)resume->prompt_hash, (unsigned long long)hash);
    if (q->ask.spec.prompt_logprobs && resume->prompt_logprobs <= q->n_prompt)
        q->output.n_scored = resume->prompt_logprobs;
    if (q->output.n_scored == q->n_prompt) q->ask.spec.prompt_logprobs = 0;
    if (!resume->n_choices) return TD_OK;
    const Tandem__V1__ResumeChoice *c = resume->choices[0];
    if (c->n_token_ids > q->ask.max_tokens)
        return td_fail(err, TD_ERR_INVALID,
                       "resume_from.choices has %zu token_ids, limit %llu, which is max_tokens",
                       c->n_token_ids, (unsigned long long)q->ask.max_tokens);
    for (size_t i = 0; i < c->n_token_ids; i++) {
        q->tokens[q->n_prompt + i] = c->token_ids[i];
        if (c->token_ids[i] < 0 || c->token_ids[i] >= q->model->config.vocab)
            return td_fail(err, TD_ERR_INVALID,
                           "resume_from.choices.token_ids[%zu] is %d, must be 0..%d", i,
                           c->token_ids[i], q->model->config.vocab - 1);
    }
    q->output.n_resumed = (uint32_t)c->n_token_ids;
    /* tokens come when all of the prompt's log-probabilities have come */
    if (c->n_token_ids) q->ask.spec.prompt_logprobs = 0;
    return takes_all ? TD_OK : resume_skip_fill(&q->output.late.skip, c, has_ids, err);
}

/* The parser of an answer that has parts. Its calls' ids are a function of the request, so that a
 * stream that goes on has them again; of the prompt and the choice, too, because a gateway may give
 * all turns of a talk one request id. */
static td_status make_answer(struct request_state *q, const Tandem__V1__GenerateRequest *in,
                             const struct router_prompt *prompt, struct td_output_format format,
                             struct td_err *err)
{
    char id[ROUTER_REQUEST_ID_BYTES + 40];
    snprintf(id, sizeof id, "%s/%llx/%u", q->name,
             (unsigned long long)td_hash64(q->tokens, q->n_prompt * sizeof *q->tokens, 0),
             prompt->choice);
    /* a guide begins with the answer, so there are no thoughts before it */
    q->output.answer = answer_create(format, prompt->in_reasoning && !in->guided, id);
    if (!q->output.answer) return td_fail(err, TD_ERR_AGAIN, "no memory for the answer's parser");
    if (in->chat->single_tool_call) answer_keep_one_call(q->output.answer);
    return TD_OK;
}

static td_status request_fill(struct request_state *q, const Tandem__V1__GenerateRequest *in,
                              const struct router_prompt *prompt, bool takes_all,
                              struct td_err *err)
{
    const struct served_model *m = q->model;
    const struct td_token_list list = prompt->list;
    td_status s = TD_OK;
    if (strlen(in->request_id) >= sizeof q->name)
        s = td_fail(err, TD_ERR_INVALID, "request_id has %zu bytes, limit %zu",
                    strlen(in->request_id), sizeof q->name - 1);
    struct td_output_format format = {0};
    if (!s) s = answer_format(m, in, &format, err);
    if (!s) s = fill_sampling(m, q, in->sampling, in->resume_from, list.n, err);
    if (!s) s = fill_stop(m, q, in->stop, in->resume_from, list.n, err);
    if (!s) s = router_guided_fill(m, &q->ask, in, prompt->in_reasoning, err);
    if (!s) s = router_token_filter_fill(m, &q->ask, in, err);
    if (!s) {
        q->tokens = malloc((list.n + q->ask.max_tokens) * sizeof *q->tokens);
        if (!q->tokens)
            s = td_fail(err, TD_ERR_AGAIN, "no memory for %zu tokens",
                        list.n + (size_t)q->ask.max_tokens);
    }
    if (!s) {
        memcpy(q->tokens, list.ids, list.n * sizeof *list.ids);
        q->n_tokens = q->n_prompt = (uint32_t)list.n;
        if (in->resume_from)
            s = fill_resumed(q, in->resume_from, in->return_token_ids || q->ask.want_logprobs,
                             takes_all, err);
    }
    if (!s) {
        size_t n_prefix = list.n < 16 ? list.n : 16; /* enough context for the rules about
                                                        leading spaces */
        s = td_detokenizer_create(
            m->tokenizer, q->tokens + list.n - n_prefix, n_prefix,
            !in->skip_special_tokens_off && !td_output_marks_are_special(format), &q->output.detok);
        if (s == TD_ERR_LIMIT)
            td_fail(
                err, s,
                "the prompt's last tokens: tokenizer.json's decoder makes too much text of them");
        else if (s)
            td_fail(err, s, "no memory for the detokenizer");
    }
    if (!s && (format.calls != TD_CALLS_NONE || format.reasoning))
        s = make_answer(q, in, prompt, format, err);
    return s;
}

/* ---- objectives and prefixes ----------------------------------------------------------------- */

static td_status objective_us(const char *name, bool given, double ms, uint64_t *ret_us,
                              struct td_err *err)
{
    *ret_us = 0;
    if (!given) return TD_OK;
    if (!(ms > 0 && ms <= 1e9))
        return td_fail(err, TD_ERR_INVALID, "objectives.%s is %g, must be above 0 and up to 1e9 ms",
                       name, ms);
    *ret_us = ms * 1000 < 1 ? 1 : (uint64_t)(ms * 1000);
    return TD_OK;
}

/* Class, tenant, objectives and priority into the event, and into the ledger as they were
 * understood. who: the caller by the table of tenants, or NULL. */
static td_status fill_objectives(struct router *r, struct request_state *q,
                                 const Tandem__V1__GenerateRequest *in,
                                 const struct router_tenant *who, struct td_ev_request *e,
                                 struct td_err *err)
{
    uint32_t slo_class = 0;
    const char *tenant = who ? who->name : in->tenant;
    td_status s = router_class_find(&r->core_cfg, in->slo_class, &slo_class, err);
    if (who && !in->slo_class[0]) slo_class = who->first_class;
    if (!s && (in->priority < -100 || in->priority > 100))
        s = td_fail(err, TD_ERR_INVALID, "priority is %d, must be -100..100", in->priority);
    const Tandem__V1__Objectives *o = in->objectives;
    if (!s && o) s = objective_us("ttft_ms", o->has_ttft_ms_case, o->ttft_ms, &e->ttft_us, err);
    if (!s && o) s = objective_us("tpot_ms", o->has_tpot_ms_case, o->tpot_ms, &e->tpot_us, err);
    if (s) return s;
    const struct td_core_class *k = &r->core_cfg.classes[slo_class];
    e->slo_class = slo_class;
    e->tenant = tenant[0] ? td_hash64(tenant, strlen(tenant), r->prefixes.seed) | 1 : 0;
    e->tenant_weight = who ? (uint32_t)lround(who->weight * 1000) : 0;
    e->priority = in->priority;
    q->ask.salt = router_cache_salt(tenant, in->cache_salt);
    q->ledger.slo_class = (char *)(uintptr_t)k->name;
    q->ledger.slo_ttft_us = e->ttft_us ? e->ttft_us : (uint64_t)(k->ttft_ms * 1000);
    q->ledger.slo_tpot_us = e->tpot_us ? e->tpot_us : (uint64_t)(k->tpot_ms * 1000);
    return TD_OK;
}

/* Chain hashes of the prompt's blocks, thinned to what an event holds. */
static void fill_hashes(struct router *r, const struct request_state *q, struct td_ev_request *e)
{
    uint32_t block = r->cfg.core.prefix_entries ? fleet_block_size(q->model) : 0;
    if (!block || e->n_prompt < block) return;
    size_t n = e->n_prompt / block;
    if (n > r->prefixes.max_all) {
        /* grows to the longest prompt seen, which the context bounds */
        uint64_t *more = realloc(r->prefixes.all, n * sizeof *more);
        if (!more) return;
        r->prefixes.all = more;
        r->prefixes.max_all = n;
    }
    n = td_prefix_hashes(q->tokens, (size_t)e->n_prompt, block,
                         td_prefix_seed(r->prefixes.seed, q->ask.salt), r->prefixes.all, n);
    size_t stride = (n + TD_CORE_MAX_HASHES - 1) / TD_CORE_MAX_HASHES;
    for (size_t i = stride; i <= n; i += stride)
        r->prefixes.hashes[e->n_hashes++] = r->prefixes.all[i - 1];
    e->hashes = r->prefixes.hashes;
    e->hash_tokens = block * (uint32_t)stride;
}

/* ---- who asks -------------------------------------------------------------------------------- */

static enum router_tenant_verdict ask_tenants(const struct router *r, struct router_client client,
                                              const char *claimed,
                                              const struct router_tenant **ret_tenant,
                                              struct td_err *err)
{
    struct router_caller caller = {.authorization =
                                       client.ops->metadata(client.call, "authorization"),
                                   .claimed = claimed,
                                   .arg = client.call,
                                   .certificate_is = client.ops->certificate_is};
    return router_tenant_of(r->tenancy.known, &caller, ret_tenant, err);
}

/* Counts and logs a refusal; what the caller is told. [any thread] */
static enum td_code note_refusal(struct router *r, struct router_client client,
                                 enum router_tenant_verdict v, const struct td_err *err)
{
    bool is_unknown = v == ROUTER_TENANT_UNKNOWN;
    uint32_t n_dropped = 0;
    td_metric_add(is_unknown ? r->metrics.tenants_unknown : r->metrics.tenants_denied, 1);
    pthread_mutex_lock(&r->tenancy.lock);
    bool is_due = td_log_pace_due(&r->tenancy.pace, &n_dropped);
    pthread_mutex_unlock(&r->tenancy.lock);
    if (is_due) {
        char q[1100];
        td_warn("tenant_refused", "peer=%s dropped=%u msg=%s", client.ops->peer(client.call),
                n_dropped, td_log_quote(q, sizeof q, err->msg));
    }
    return is_unknown ? TD_CODE_UNAUTHENTICATED : TD_CODE_PERMISSION_DENIED;
}

enum td_code inference_refuse_early(struct router *r, struct router_client client, bool is_limited,
                                    uint32_t *ret_wait_ms, struct td_err *err)
{
    enum router_tenant_verdict v = ROUTER_TENANT_OK;
    const struct router_tenant *who = NULL;
    td_status s = TD_OK;
    *ret_wait_ms = 0;
    pthread_mutex_lock(&r->tenancy.lock);
    if (r->tenancy.known) v = ask_tenants(r, client, "", &who, err);
    if (v == ROUTER_TENANT_OK && who && is_limited)
        s = tenant_use_look(who->use, td_now_ns(), ret_wait_ms, err);
    pthread_mutex_unlock(&r->tenancy.lock);
    if (v == ROUTER_TENANT_OK && !s) return TD_CODE_OK;
    td_metric_add(r->metrics.failed, 1);
    return s ? TD_CODE_RESOURCE_EXHAUSTED : note_refusal(r, client, v, err);
}

/* Finds the caller in the table of tenants. False: he is none, and the call is finished. Without a
 * table every caller is who he claims to be, and *ret_tenant is NULL. Only a GenerateRequest has a
 * field to claim a tenant in; other calls pass "". */
static bool know_caller(struct router *r, struct router_client client, const char *claimed,
                        const char *slo_class, const struct router_tenant **ret_tenant)
{
    struct td_err err = {0};
    enum router_tenant_verdict v = ROUTER_TENANT_OK;
    *ret_tenant = NULL;
    if (strlen(claimed) > ROUTER_MAX_TENANT_BYTES) {
        td_fail(&err, TD_ERR_INVALID, "tenant has %zu bytes, limit %d", strlen(claimed),
                ROUTER_MAX_TENANT_BYTES);
        client.ops->finish(client.call, TD_CODE_INVALID_ARGUMENT, err.msg, NULL, 0);
        return false;
    }
    if (!r->tenancy.known) return true;
    v = ask_tenants(r, client, claimed, ret_tenant, &err);
    uint32_t slo_index = 0;
    if (v == ROUTER_TENANT_OK && slo_class[0] &&
        !router_class_find(&r->core_cfg, slo_class, &slo_index, NULL) &&
        !((*ret_tenant)->classes >> slo_index & 1)) {
        td_fail(&err, TD_ERR_INVALID, "slo_class is \"%.40s\", which tenant \"%s\" may not use",
                slo_class, (*ret_tenant)->name);
        v = ROUTER_TENANT_DENIED;
    }
    if (v == ROUTER_TENANT_OK) return true;
    client.ops->finish(client.call, note_refusal(r, client, v, &err), err.msg, NULL, 0);
    return false;
}

static void request_cancel(struct router *r, struct client_work *w)
{
    struct request_state *q = (struct request_state *)w;
    td_info_limited("request_cancelled", "req=%s prompt=%u output=%u", q->logged_name, q->n_prompt,
                    request_n_output(q));
    td_metric_add(q->model->metrics.cancelled, 1);
    trace_end(r, q, TD_CODE_CANCELLED);
    struct td_core_event e = {.kind = TD_EV_CANCEL,
                              .cancel = {.request_at = q->request_at, .id = q->id}};
    if (q->started) served_model_event(q->model, e);
    request_free(r, q);
}

static void request_caught_up(struct router *r, struct client_work *w)
{
    struct request_state *q = (struct request_state *)w;
    (void)r;
    late_flush(&q->output.late, q->client);
}

td_status inference_take(struct router *r, struct served_model *m, struct router_client client,
                         const Tandem__V1__GenerateRequest *in, const struct router_tenant *who,
                         const struct router_prompt *prompt, uint64_t arrived_ns,
                         struct request_state **ret_request, struct td_err *err)
{
    struct request_state *q = &r->pool.at[r->pool.free[--r->pool.n_free]];
    atomic_fetch_add(&r->n_live, 1);
    q->live = true;
    q->work.cancel = request_cancel;
    q->work.caught_up = request_caught_up;
    q->model = m;
    r->pool.shares.of[m->index].n_live++;
    q->arrived_ns = arrived_ns;
    q->output.stop_token = -1;
    q->output.stop.matched = -1;
    tandem__v1__ledger__init(&q->ledger);
    q->number = td_random_u64();
    if (in->request_id[0])
        router_copy_text(q->name, sizeof q->name, in->request_id);
    else
        snprintf(q->name, sizeof q->name, "%llx", (unsigned long long)q->number);
    q->event.request_at = q->request_at;
    td_status s = request_fill(q, in, prompt, client.ops->takes_all, err);
    if (!s) s = fill_objectives(r, q, in, who, &q->event, err);
    if (!s) s = router_guide_ask(r, q, err);
    if (s) {
        request_free(r, q);
        return s;
    }
    q->use = who ? who->use : NULL;
    tenant_use_pay(q->use, q->n_prompt + output_n_replayed(q));
    q->id = ++r->pool.next_id;
    q->ask.return_token_ids = in->return_token_ids && !q->ask.no_output;
    td_log_quote(q->logged_name, sizeof q->logged_name, q->name);
    td_metric_add(m->metrics.prompt_tokens, q->n_prompt);
    if (in->resume_from) td_metric_add(m->metrics.resumed, 1);
    q->client = client;
    client.ops->attach(client.call, &q->work);
    trace_begin(r, q);
    q->event.id = q->id;
    /* to the core what the client gives back is a part of the prompt */
    q->event.n_prompt = q->n_prompt + output_n_replayed(q);
    q->event.max_tokens = q->ask.max_tokens - output_n_replayed(q);
    *ret_request = q;
    return TD_OK;
}

void inference_start(struct router *r, struct request_state *q)
{
    q->starts_with_guide = q->guide != NULL;
    if (q->guide) return;
    q->started = true;
    td_fault_point("router_request");
    struct td_ev_request e = q->event;
    /* a prompt that is scored is computed whole, wherever its prefix is cached */
    if (!q->ask.spec.prompt_logprobs) fill_hashes(r, q, &e);
    output_begin_prompt(q);
    if (output_replay(q)) {
        q->started = false;
        inference_refuse(r, q, TD_CODE_INVALID_ARGUMENT,
                         "resume_from.choices has token_ids behind a stop string, which ends the "
                         "output");
        return;
    }
    served_model_event(q->model, (struct td_core_event){.kind = TD_EV_REQUEST, .request = e});
}

void request_give_back(struct request_state *q)
{
    uint32_t n_replayed = output_n_replayed(q);
    if (request_n_output(q) > n_replayed) return;
    tenant_use_give_back(q->use, 0, q->n_prompt + n_replayed);
    q->use = NULL;
}

void inference_refuse(struct router *r, struct request_state *q, enum td_code code, const char *why)
{
    TD_ASSERT(!q->started);
    request_give_back(q);
    q->client.ops->finish(q->client.call, code, why, NULL, 0);
    td_metric_add(q->model->metrics.failed, 1);
    trace_end(r, q, code);
    request_free(r, q);
}

static void generate_one(struct router *r, struct served_model *m, struct router_client client,
                         const Tandem__V1__GenerateRequest *in, const struct router_tenant *who,
                         uint64_t now_ns)
{
    struct router_prompt prompt = {0};
    struct request_state *q = NULL;
    struct td_err err = {0};
    td_status s = inference_prompt(m, in, who, &prompt, &err);
    if (!s) s = inference_take(r, m, client, in, who, &prompt, now_ns, &q, &err);
    td_token_list_free(&prompt.list);
    if (!s) {
        inference_start(r, q);
        return;
    }
    client.ops->finish(client.call, td_rpc_code(s), err.msg, NULL, 0);
    td_metric_add(m->metrics.failed, 1);
}

static const char RETRY_DELAY[] = "retry-delay-ms"; /* of a call's trailing metadata */

/* Not now, but after wait_ms perhaps. */
static void refuse_for(struct td_metric *failed, struct router_client client, const char *why,
                       uint32_t wait_ms)
{
    char text[16];
    snprintf(text, sizeof text, "%u", wait_ms);
    struct td_rpc_metadata retry = {RETRY_DELAY, text};
    client.ops->finish(client.call, TD_CODE_RESOURCE_EXHAUSTED, why, &retry, 1);
    td_metric_add(failed, 1);
}

enum { FULL_RETRY_MS = 1000 };

/* There is no room for n more requests of the model. */
static void refuse_full(const struct router *r, const struct served_model *m,
                        struct router_client client, size_t n)
{
    struct td_err err = {0};
    if (r->n_models == 1)
        td_fail(&err, TD_ERR_AGAIN, "max_requests requests are live on this router");
    else
        td_fail(&err, TD_ERR_AGAIN,
                "model \"%.100s\" has %u live requests and cannot have %zu more now: of "
                "max_requests, %lld, %u are live, and what is left is kept for other models",
                served_model_name(m), r->pool.shares.of[m->index].n_live, n,
                (long long)r->cfg.core.max_requests,
                (uint32_t)r->cfg.core.max_requests - r->pool.n_free);
    refuse_for(m->metrics.failed, client, err.msg, FULL_RETRY_MS);
}

void inference_generate(struct router *r, struct router_client client,
                        const Tandem__V1__GenerateRequest *const *in, size_t n_in)
{
    uint64_t now = td_now_ns();
    if (r->handed_over) {
        client.ops->finish(client.call, TD_CODE_UNAVAILABLE, HANDED_OVER, NULL, 0);
        return;
    }
    const struct router_tenant *who;
    if (!know_caller(r, client, in[0]->tenant, in[0]->slo_class, &who)) {
        td_metric_add(r->metrics.failed, 1);
        return;
    }
    size_t n = 0;
    struct td_err err = {0};
    struct served_model *m;
    td_status s = router_find_model(r, in[0]->model, &m, &err);
    if (!s) s = choices_count(r, in, n_in, &n, &err);
    if (s) {
        client.ops->finish(client.call, td_rpc_code(s), err.msg, NULL, 0);
        td_metric_add(r->metrics.failed, 1);
        return;
    }
    uint32_t wait_ms = 0;
    if (who && who->use && tenant_use_take(who->use, (uint32_t)n, now, &wait_ms, &err)) {
        refuse_for(r->metrics.failed, client, err.msg, wait_ms);
        return;
    }
    if (!router_share_may_take(&r->pool.shares, m->index, (uint32_t)n, now)) {
        if (who) tenant_use_give_back(who->use, (uint32_t)n, 0);
        refuse_full(r, m, client, n);
    } else if (n == 1) {
        generate_one(r, m, client, in[0], who, now);
    } else if ((s = choices_generate(r, m, client, in, n_in, who, now, &err))) {
        client.ops->finish(client.call, td_rpc_code(s), err.msg, NULL, 0);
        td_metric_add(m->metrics.failed, 1);
    }
}

void inference_cancel(struct router *r, struct client_work *w) { w->cancel(r, w); }

void inference_caught_up(struct router *r, struct client_work *w) { w->caught_up(r, w); }

/* ---- the end --------------------------------------------------------------------------------- */

static uint64_t us_between(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns && to_ns > from_ns ? (to_ns - from_ns) / TD_NS_PER_US : 0;
}

/* Makes the first five stages add up to ttft_us exactly: what neither worker measured is rpc_us
 * (I6). */
static void close_ledger(struct request_state *q)
{
    Tandem__V1__Ledger *l = &q->ledger;
    l->ttft_us = us_between(q->arrived_ns, q->output.first_ns);
    l->e2e_us = us_between(q->arrived_ns, td_now_ns());
    l->router_queue_us = us_between(q->arrived_ns, q->output.decode_sent_ns);
    l->reserve_us = us_between(q->output.decode_sent_ns, q->output.ticket_ns);
    uint64_t known = l->router_queue_us + l->reserve_us + l->prefill_queue_us + l->prefill_us;
    if (known > l->ttft_us) { /* microsecond rounding of four stages: take it off the longest */
        uint64_t over = known - l->ttft_us;
        uint64_t *longest =
            l->prefill_us >= l->prefill_queue_us ? &l->prefill_us : &l->prefill_queue_us;
        *longest -= over < *longest ? over : *longest;
        known = l->router_queue_us + l->reserve_us + l->prefill_queue_us + l->prefill_us;
        if (known > l->ttft_us) { /* stages of different attempts: nothing finer than the total
                                     can be said */
            l->router_queue_us = l->ttft_us;
            l->reserve_us = l->prefill_queue_us = l->prefill_us = 0;
            known = l->ttft_us;
        }
    }
    l->rpc_us = l->ttft_us - known;
    l->failovers = td_core_failovers(q->model->core, q->request_at);
    l->transfer_path = q->decode.path[0] ? q->decode.path : (char *)"local";
    l->prefill_worker = q->prefill.name;
    l->decode_worker = q->decode.name;
    l->mode = (char *)(strcmp(q->prefill.name, q->decode.name) ? "pd" : "colocated");
}

static void observe(const struct request_state *q)
{
    const Tandem__V1__Ledger *l = &q->ledger;
    const struct served_model_metrics *m = &q->model->metrics;
    uint32_t n_out = request_n_output(q) - output_n_replayed(q);
    td_metric_observe(m->ttft, (double)l->ttft_us / 1e6);
    td_metric_observe(m->e2e, (double)l->e2e_us / 1e6);
    if (n_out > 1)
        td_metric_observe(m->tpot, (double)us_between(q->output.first_ns, q->output.last_ns) / 1e6 /
                                       (n_out - 1));
    td_metric_observe(m->queue, (double)l->router_queue_us / 1e6);
    td_metric_observe(m->reserve, (double)l->reserve_us / 1e6);
    td_metric_observe(m->prefill_queue, (double)l->prefill_queue_us / 1e6);
    td_metric_observe(m->prefill, (double)l->prefill_us / 1e6);
    td_metric_observe(m->rpc, (double)l->rpc_us / 1e6);
    td_metric_observe(m->transfer, (double)l->transfer_us / 1e6);
    td_metric_observe(m->queue_by_class[q->event.slo_class],
                      (double)(l->router_queue_us + l->prefill_queue_us) / 1e6);
    td_metric_observe(m->prompt_sizes, q->n_prompt);
    td_metric_observe(m->output_sizes, n_out);
    td_metric_add(m->finished, 1);
}

enum { LEDGER_BYTES = 1024 };

/* The stages as the trailing metadata has them. */
static void format_ledger(const Tandem__V1__Ledger *l, char text[LEDGER_BYTES])
{
    snprintf(text, LEDGER_BYTES,
             "router_queue_us=%llu;reserve_us=%llu;prefill_queue_us=%llu;prefill_us=%llu;rpc_us=%"
             "llu;ttft_us=%llu;transfer_us=%llu;"
             "transfer_exposed_us=%llu;decode_queue_us=%llu;first_step_us=%llu;e2e_us=%llu;"
             "transfer_bytes=%llu;preemptions=%u;failovers=%u;"
             "predicted_ttft_us=%llu;predicted_tpot_us=%llu;slo_ttft_us=%llu;slo_tpot_us=%llu;slo_"
             "class=%s;transfer_path=%s;mode=%s",
             (unsigned long long)l->router_queue_us, (unsigned long long)l->reserve_us,
             (unsigned long long)l->prefill_queue_us, (unsigned long long)l->prefill_us,
             (unsigned long long)l->rpc_us, (unsigned long long)l->ttft_us,
             (unsigned long long)l->transfer_us, (unsigned long long)l->transfer_exposed_us,
             (unsigned long long)l->decode_queue_us, (unsigned long long)l->first_step_us,
             (unsigned long long)l->e2e_us, (unsigned long long)l->transfer_bytes, l->preemptions,
             l->failovers, (unsigned long long)l->predicted_ttft_us,
             (unsigned long long)l->predicted_tpot_us, (unsigned long long)l->slo_ttft_us,
             (unsigned long long)l->slo_tpot_us, l->slo_class, l->transfer_path, l->mode);
}

#define RESUMED_DIFFERS                                                                            \
    "resume_from has another output than this cluster computes (another model or dtype?); the "    \
    "request can only be begun anew"

/* The core knows of it, or is told next. */
static void end_failed(struct router *r, struct request_state *q, enum td_code code,
                       const char *why)
{
    late_flush(&q->output.late, q->client);
    q->client.ops->finish(q->client.call, code, why, NULL, 0);
    td_warn_limited("request_failed", "req=%s code=%u msg=\"%s\" prompt=%u output=%u",
                    q->logged_name, code, why, q->n_prompt, request_n_output(q));
    td_metric_add(q->model->metrics.failed, 1);
    trace_end(r, q, code);
    request_free(r, q);
}

static void cancel_and_end(struct router *r, struct request_state *q, enum td_code code,
                           const char *why)
{
    struct td_core_event e = {.kind = TD_EV_CANCEL,
                              .cancel = {.request_at = q->request_at, .id = q->id}};
    if (q->started) served_model_event(q->model, e);
    end_failed(r, q, code, why);
}

void request_refuse_resumed(struct router *r, struct request_state *q)
{
    cancel_and_end(r, q, TD_CODE_ABORTED, RESUMED_DIFFERS);
}

void inference_hand_over(void *arg)
{
    struct router *r = arg;
    r->handed_over = true;
    for (int64_t i = 0; i < r->cfg.core.max_requests; i++)
        if (r->pool.at[i].live && r->pool.at[i].client.ops)
            cancel_and_end(r, &r->pool.at[i], TD_CODE_UNAVAILABLE, HANDED_OVER);
}

/* By what the output ended is known when held-back text has been looked at. */
static void tell_end(struct router *r, const struct request_state *q)
{
    const struct served_model_metrics *m = &q->model->metrics;
    bool by_length = q->output.finish == TANDEM__V1__FINISH_REASON__FINISH_LENGTH;
    td_metric_add(by_length ? m->ended_by_length : m->ended_by_stop, 1);
    trace_end(r, q, TD_CODE_OK);
}

/* Whether the model ends so by itself, and was not told to go on. */
static bool is_own_end(const struct request_state *q, int32_t token)
{
    for (size_t i = q->ask.n_stops; i < q->ask.spec.n_stop_token_ids; i++)
        if (q->ask.spec.stop_token_ids[i] == token) return true;
    return false;
}

enum { STOP_REASON_BYTES = 32 };

static void say_what_stopped(struct request_state *q, char reason[STOP_REASON_BYTES],
                             Tandem__V1__GenerateResponse *m)
{
    const struct request_output *o = &q->output;
    if (o->stop.matched >= 0) {
        m->stop_reason.data = (uint8_t *)o->stop.strings[o->stop.matched];
        m->stop_reason.len = o->stop.bytes[o->stop.matched];
    } else if (o->stop_token >= 0) {
        m->stop_reason.len = (size_t)snprintf(reason, STOP_REASON_BYTES, "token %d", o->stop_token);
        m->stop_reason.data = (uint8_t *)reason;
        m->has_stop_token_id_case = TANDEM__V1__GENERATE_RESPONSE__HAS_STOP_TOKEN_ID_STOP_TOKEN_ID;
        m->stop_token_id = o->stop_token;
        m->own_end = is_own_end(q, o->stop_token);
    }
}

void request_complete(struct router *r, struct request_state *q)
{
    close_ledger(q);
    observe(q);
    const char *text = "", *tail = "";
    size_t n_text = 0, n_tail = 0;
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    Tandem__V1__Usage usage = TANDEM__V1__USAGE__INIT;
    char reason[STOP_REASON_BYTES];
    if (q->output.stop.matched <
        0) { /* what was held back is output after all, unless it completes a
                stop string */
        td_detokenizer_finish(q->output.detok, &text, &n_text);
        if (stop_matcher_push(&q->output.stop, text, n_text, &tail, &n_tail)) {
            q->output.finish = TANDEM__V1__FINISH_REASON__FINISH_STOP;
        } else if (q->output.stop.n) {
            stop_matcher_flush(&q->output.stop, &tail, &n_tail);
        }
    }
    m.text.data = (uint8_t *)(uintptr_t)tail;
    m.text.len = n_tail;
    m.finish_reason = q->output.finish;
    if (q->output.answer) {
        m.text.len = 0;
        answer_take(q->output.answer, &q->output.late, q->client, tail, n_tail, true, &m);
        if (answer_has_calls(q->output.answer) &&
            m.finish_reason == TANDEM__V1__FINISH_REASON__FINISH_STOP)
            m.finish_reason = TANDEM__V1__FINISH_REASON__FINISH_TOOL_CALLS;
    }
    usage.prompt_tokens = q->n_prompt;
    usage.output_tokens = request_n_output(q);
    usage.cached_tokens = q->prefill.cached_tokens;
    m.usage = &usage;
    m.ledger = &q->ledger;
    m.seed = q->ask.spec.seed;
    m.request_id = q->name;
    say_what_stopped(q, reason, &m);
    bool must_send = resume_skip_take(&q->output.late.skip, &m);
    if (!resume_skip_is_over(&q->output.late.skip)) {
        end_failed(r, q, TD_CODE_ABORTED, RESUMED_DIFFERS);
        return;
    }
    if (must_send) late_send(&q->output.late, q->client, &m);
    const Tandem__V1__Ledger *l = &q->ledger;
    char ledger[LEDGER_BYTES];
    struct td_rpc_metadata md = {"tandem-ledger", ledger};
    bool is_told = !q->client.ops->drops_ledger;
    if (is_told) format_ledger(l, ledger);
    q->client.ops->finish(q->client.call, TD_CODE_OK, NULL, &md, is_told);
    tell_end(r, q);
    td_debug("request_done", "req=%s prompt=%u output=%u ttft_us=%llu e2e_us=%llu failovers=%u",
             q->logged_name, q->n_prompt, request_n_output(q), (unsigned long long)l->ttft_us,
             (unsigned long long)l->e2e_us, l->failovers);
    request_free(r, q);
}

void request_fail(struct router *r, struct request_state *q, const struct td_core_action *a)
{
    char details[1200], retry[32], quoted[600], of[128] = "";
    if (r->may_serve_several) /* each model has a queue and workers of its own */
        snprintf(of, sizeof of, "model \"%.100s\": ", served_model_name(q->model));
    if (q->last_error[0])
        snprintf(details, sizeof details, "%s%s (%s)", of, a->fail.reason, q->last_error);
    else
        snprintf(details, sizeof details, "%s%s", of, a->fail.reason);
    snprintf(retry, sizeof retry, "%u", a->fail.retry_ms);
    struct td_rpc_metadata md = {"retry-delay-ms", retry};
    if (a->fail.code == TD_CODE_RESOURCE_EXHAUSTED) request_give_back(q);
    late_flush(&q->output.late, q->client);
    q->client.ops->finish(q->client.call, a->fail.code, details, &md, a->fail.retry_ms ? 1 : 0);
    td_warn_limited("request_failed", "req=%s code=%u msg=%s prompt=%u output=%u", q->logged_name,
                    a->fail.code, td_log_quote(quoted, sizeof quoted, details), q->n_prompt,
                    request_n_output(q));
    td_metric_add(q->model->metrics.failed, 1);
    trace_end(r, q, a->fail.code);
    request_free(r, q);
}

/* ---- the gRPC door --------------------------------------------------------------------------- */

static void grpc_send(void *call, const ProtobufCMessage *message)
{
    td_rpc_call_send(call, message);
}

static bool grpc_is_behind(void *call) { return td_rpc_call_is_behind(call); }

static void grpc_finish(void *call, enum td_code code, const char *details,
                        const struct td_rpc_metadata *trailing, size_t n_trailing)
{
    td_rpc_call_finish(call, code, details, trailing, n_trailing);
}

static const char *grpc_metadata(void *call, const char *name)
{
    return td_rpc_call_metadata(call, name);
}

static const char *grpc_peer(void *call) { return td_rpc_call_peer(call); }

static bool grpc_certificate_is(void *call, const struct td_peer_names *names)
{
    return td_identity_peer_is(call, names);
}

static uint64_t grpc_remaining_ms(void *call) { return td_rpc_call_remaining_ms(call); }

static void grpc_attach(void *call, struct client_work *w)
{
    td_rpc_call_set_user(call, w);
    if (w)
        td_rpc_call_ref(call);
    else
        td_rpc_call_unref(call);
}

#define GRPC_OPS(certificate)                                                                      \
    {                                                                                              \
        .send = grpc_send, .is_behind = grpc_is_behind, .finish = grpc_finish,                     \
        .metadata = grpc_metadata, .peer = grpc_peer, .certificate_is = certificate,               \
        .remaining_ms = grpc_remaining_ms, .attach = grpc_attach,                                  \
    }
static const struct router_client_ops grpc_ops = GRPC_OPS(NULL),
                                      grpc_verified_ops = GRPC_OPS(grpc_certificate_is);

static struct router_client grpc_client(struct td_rpc_call *call)
{
    return (struct router_client){td_rpc_call_peer_verified(call) ? &grpc_verified_ops : &grpc_ops,
                                  call};
}

static void refuse_early(struct td_rpc_call *call, struct router *r, bool is_limited)
{
    struct td_err err = {0};
    uint32_t wait_ms;
    enum td_code code = inference_refuse_early(r, grpc_client(call), is_limited, &wait_ms, &err);
    if (code == TD_CODE_OK) return;
    char text[16];
    snprintf(text, sizeof text, "%u", wait_ms);
    struct td_rpc_metadata retry = {RETRY_DELAY, text};
    td_rpc_call_finish(call, code, err.msg, &retry, wait_ms ? 1 : 0);
}

void inference_on_open(struct td_rpc_call *call, void *router)
{
    refuse_early(call, router, false);
}

void inference_on_open_limited(struct td_rpc_call *call, void *router)
{
    refuse_early(call, router, true);
}

static void on_generate(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    const Tandem__V1__GenerateRequest *in = (const Tandem__V1__GenerateRequest *)msg;
    inference_generate(ctx, grpc_client(call), &in, 1);
}

static void on_generate_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)cancelled;
    struct client_work *w = td_rpc_call_user(call);
    if (w) inference_cancel(ctx, w);
}

static void on_generate_caught_up(struct td_rpc_call *call, void *ctx)
{
    struct client_work *w = td_rpc_call_user(call);
    if (w) inference_caught_up(ctx, w);
}

/* ---- the small methods ----------------------------------------------------------------------- */

static void on_nothing_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)call;
    (void)cancelled;
    (void)ctx;
}

bool inference_may_call(struct router *r, struct router_client client)
{
    const struct router_tenant *who;
    return know_caller(r, client, "", "", &who);
}

td_status inference_tokenize(const struct served_model *m, const Tandem__V1__TokenizeRequest *in,
                             struct td_token_list *list, struct td_err *err)
{
    static const uint64_t NOBODY = 1; /* a salt of these calls alone, of which no tenant is told */
    bool in_reasoning;
    if (in->input_case == TANDEM__V1__TOKENIZE_REQUEST__INPUT_PROMPT)
        return encode(m, NOBODY, in->prompt.data ? (const char *)in->prompt.data : "",
                      in->prompt.len, !in->no_special_tokens, served_model_max_len(m), list, err);
    if (in->input_case == TANDEM__V1__TOKENIZE_REQUEST__INPUT_CHAT)
        return chat_tokens(m, NOBODY, in->chat, false, served_model_max_len(m), list, &in_reasoning,
                           err);
    return td_fail(err, TD_ERR_INVALID, "input is missing: set prompt or chat");
}

td_status inference_detokenize(const struct served_model *m, const int32_t *ids, size_t n,
                               char **ret_text, size_t *ret_bytes, struct td_err *err)
{
    if (n >= MAX_TRUNCATED * (size_t)served_model_max_len(m))
        return td_fail(err, TD_ERR_INVALID, "tokens has %zu ids, must be below %u", n,
                       MAX_TRUNCATED * served_model_max_len(m));
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= m->config.vocab)
            return td_fail(err, TD_ERR_INVALID, "tokens[%zu] is %d, must be 0..%d", i, ids[i],
                           m->config.vocab - 1);
    return td_tokenizer_decode(m->tokenizer, ids, n, false, ret_text, ret_bytes, err);
}

static void on_tokenize(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    struct router *r = ctx;
    const Tandem__V1__TokenizeRequest *in = (const Tandem__V1__TokenizeRequest *)msg;
    if (!inference_may_call(r, grpc_client(call))) return;
    struct td_err err = {0};
    struct td_token_list list = {0};
    struct served_model *m = NULL;
    td_status s = router_find_model(r, in->model, &m, &err);
    if (!s) s = inference_tokenize(m, in, &list, &err);
    if (s) {
        td_rpc_call_finish(call, td_rpc_code(s), err.msg, NULL, 0);
    } else {
        Tandem__V1__TokenizeResponse out = TANDEM__V1__TOKENIZE_RESPONSE__INIT;
        out.n_ids = list.n;
        out.ids = list.ids;
        out.max_model_len = served_model_max_len(m);
        td_rpc_call_send(call, &out.base);
        td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
    }
    td_token_list_free(&list);
}

static void on_detokenize(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    struct router *r = ctx;
    const Tandem__V1__DetokenizeRequest *in = (const Tandem__V1__DetokenizeRequest *)msg;
    if (!inference_may_call(r, grpc_client(call))) return;
    struct td_err err = {0};
    struct served_model *m;
    Tandem__V1__DetokenizeResponse out = TANDEM__V1__DETOKENIZE_RESPONSE__INIT;
    char *text = NULL;
    td_status s = router_find_model(r, in->model, &m, &err);
    if (!s) s = inference_detokenize(m, in->ids, in->n_ids, &text, &out.text.len, &err);
    out.text.data = (uint8_t *)text;
    if (!s) td_rpc_call_send(call, &out.base);
    td_rpc_call_finish(call, td_rpc_code(s), s ? err.msg : NULL, NULL, 0);
    free(text);
}

static void on_models(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)msg;
    struct router *r = ctx;
    const struct router_tenant *who;
    if (!know_caller(r, grpc_client(call), "", "", &who)) return;
    Tandem__V1__ModelInfo infos[ROUTER_MAX_MODELS], *list[ROUTER_MAX_MODELS];
    char *aliases[ROUTER_MAX_MODELS][ROUTER_MAX_MODEL_NAMES];
    Tandem__V1__ModelsResponse out = TANDEM__V1__MODELS_RESPONSE__INIT;
    for (uint32_t i = 0; i < r->n_models; i++) {
        struct served_model *m = r->models[i];
        list[i] = &infos[i];
        tandem__v1__model_info__init(list[i]);
        list[i]->id = m->names.names[0];
        for (uint32_t k = 1; k < m->names.n; k++) aliases[i][k - 1] = m->names.names[k];
        list[i]->n_aliases = m->names.n - 1;
        list[i]->aliases = aliases[i];
        list[i]->max_model_len = served_model_max_len(m);
        list[i]->vocab = (uint32_t)m->config.vocab;
        list[i]->chat_template = (char *)(uintptr_t)td_chat_template_family(m->chat);
    }
    out.n_models = r->n_models;
    out.models = list;
    td_rpc_call_send(call, &out.base);
    td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
}

#define CHALLENGE_MS 10000 /* for the caller's next call, which answers the challenge */

/* Whether the caller is told everything about the workers: members of the cluster and operators
 * are, by certificate or by a proof of the cluster secret. Where nobody has an identity, callers
 * on this host are. */
static bool may_see_all(const struct router *r, struct td_rpc_call *call)
{
    const struct td_peer_names *const names[] = {r->operators, r->id.workers, r->id.routers};
    bool any_names = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (names[i] && td_identity_peer_is(call, names[i])) return true;
        any_names |= names[i] != NULL;
    }
    uint8_t challenge[TD_CLUSTER_NONCE_BYTES];
    const char *proof = td_rpc_call_metadata(call, TD_STATUS_PROOF_KEY);
    if (!r->id.secret) return !any_names && td_rpc_call_peer_is_local(call);
    return proof && td_status_proof_check(r->id.secret, proof, challenge) &&
           td_challenge_check(r->status_key, td_now_ns(), challenge);
}

bool inference_may_see_all(struct router *r, struct router_client client, bool *ret_all)
{
    const struct td_peer_names *const names[] = {r->operators, r->id.workers, r->id.routers};
    const struct router_tenant *who;
    if (!know_caller(r, client, "", "", &who)) return false;
    bool all = who && who->is_operator;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        all |= names[i] && client.ops->certificate_is &&
               client.ops->certificate_is(client.call, names[i]);
    *ret_all = all;
    return true;
}

/* Leaves each worker's role and state: a client needs to know whether it is served, and not by
 * whom. */
static void withhold(Tandem__V1__StatusResponse *out)
{
    for (size_t i = 0; i < out->n_workers; i++) {
        char *role = out->workers[i]->role, *state = out->workers[i]->state;
        tandem__v1__worker_status__init(out->workers[i]);
        out->workers[i]->role = role;
        out->workers[i]->state = state;
    }
    out->n_refused_workers = 0;
    out->withheld = true;
}

bool inference_status(struct router *r, bool all,
                      void (*take)(void *ctx, const Tandem__V1__StatusResponse *status), void *ctx)
{
    Tandem__V1__StatusResponse out = TANDEM__V1__STATUS_RESPONSE__INIT;
    struct fleet_status_store *store = calloc(1, sizeof *store);
    bool ok = store != NULL;
    uint8_t challenge[TD_CLUSTER_NONCE_BYTES];
    if (ok) {
        fleet_status(r, &out, store);
        if (!all) withhold(&out);
        if (!all && r->id.secret) {
            td_challenge_make(r->status_key, td_deadline_after_ms(td_now_ns(), CHALLENGE_MS),
                              challenge);
            out.challenge = (ProtobufCBinaryData){TD_CLUSTER_NONCE_BYTES, challenge};
        }
        take(ctx, &out);
    }
    free(store);
    return ok;
}

static void send_status(void *ctx, const Tandem__V1__StatusResponse *status)
{
    td_rpc_call_send(ctx, &status->base);
}

static void on_status(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    (void)msg;
    struct router *r = ctx;
    if (inference_status(r, may_see_all(r, call), send_status, call))
        td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
    else
        td_rpc_call_finish(call, TD_CODE_RESOURCE_EXHAUSTED, "no memory", NULL, 0);
}

const struct td_rpc_method inference_methods[] = {
    {.path = "/tandem.v1.Inference/Generate",
     .request = &tandem__v1__generate_request__descriptor,
     .on_open = inference_on_open_limited,
     .on_message = on_generate,
     .on_end = on_generate_end,
     .on_caught_up = on_generate_caught_up,
     .field_limits = input_limits},
    {.path = "/tandem.v1.Inference/Tokenize",
     .request = &tandem__v1__tokenize_request__descriptor,
     .on_open = inference_on_open,
     .on_message = on_tokenize,
     .on_end = on_nothing_end,
     .field_limits = input_limits},
    {.path = "/tandem.v1.Inference/Detokenize",
     .request = &tandem__v1__detokenize_request__descriptor,
     .on_open = inference_on_open,
     .on_message = on_detokenize,
     .on_end = on_nothing_end,
     .field_limits = input_limits},
    {.path = "/tandem.v1.Inference/Models",
     .request = &tandem__v1__models_request__descriptor,
     .on_message = on_models,
     .on_end = on_nothing_end},
    {.path = "/tandem.v1.Inference/Status",
     .request = &tandem__v1__status_request__descriptor,
     .on_message = on_status,
     .on_end = on_nothing_end},
    {0},
};
