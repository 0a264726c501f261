/* openai_request.c - see openai_request.h. */
#include "router/http/openai_request.h"

#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/json.h"
#include "common/text/chat_template.h"
#include "common/text/grammar.h"
#include "router/client.h"

struct openai_request {
    json_t *root; /* strings of the message are its */
    struct openai_options options;
    Tandem__V1__GenerateRequest in;
    Tandem__V1__Sampling sampling;
    Tandem__V1__StopConditions stop;
    Tandem__V1__Chat chat;
    Tandem__V1__Objectives objectives;
    Tandem__V1__GuidedOutput guided;
    Tandem__V1__GuidedChoice choice;
    Tandem__V1__ChatMessage *messages; /* [n_messages] */
    Tandem__V1__LogitBias *bias;       /* [n_bias] */
    Tandem__V1__ResumeFrom resume;     /* these three: of Last-Event-ID */
    struct openai_event_id after;
    bool resumes;
    struct owned *owned;              /* what else the message points to */
    struct prompt *prompts;           /* [options.n_prompts], where there are several */
    Tandem__V1__GenerateRequest *all; /* the same */
    const Tandem__V1__GenerateRequest **all_ptrs;
};

/* A block of memory that is freed with the request. */
struct owned {
    struct owned *next;
    void *memory; /* malloc'd */
};

/* One prompt of a list: a text or token ids. */
struct prompt {
    ProtobufCBinaryData text;
    Tandem__V1__TokenIds ids;
    bool is_text;
};

struct reader {
    struct openai_request *q;
    const json_t *root;
    uint64_t names;    /* name_bit of each of root's */
    const char *field; /* being read: static storage */
    struct td_err *err;
};

/* Most of the fields that are asked for are not there, and one look at a bit says so. */
static uint64_t name_bit(const char *name)
{
    size_t n = strlen(name);
    return 1ull << ((n * 5 + (unsigned char)name[0] * 3 + (unsigned char)name[n / 2]) & 63);
}

static uint64_t bits_of_names(const json_t *root)
{
    uint64_t bits = 0;
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)root, name, value) bits |= name_bit(name);
    return bits;
}

static bool may_have(const struct reader *r, const char *key) { return r->names & name_bit(key); }

/* The request's value, or NULL. */
static json_t *value_of(const struct reader *r, const char *key)
{
    return may_have(r, key) ? json_object_get(r->root, key) : NULL;
}

/* Takes malloc'd memory over; NULL when it is NULL or there is no memory to note it. */
static void *own(struct reader *r, void *memory)
{
    struct owned *o = memory ? malloc(sizeof *o) : NULL;
    if (!o) {
        free(memory);
        td_fail(r->err, TD_ERR_AGAIN, "no memory for the request");
        return NULL;
    }
    *o = (struct owned){r->q->owned, memory};
    r->q->owned = o;
    return memory;
}

/* n zeroed elements, at least one. */
static void *own_array(struct reader *r, size_t n, size_t bytes)
{
    return own(r, calloc(n ? n : 1, bytes));
}

static td_status refuse(struct reader *r, const char *field, const char *why)
{
    r->field = field;
    return td_fail(r->err, TD_ERR_INVALID, why[0] == '[' ? "%s%s" : "%s %s", field, why);
}

__attribute__((format(printf, 3, 4))) static td_status refusef(struct reader *r, const char *field,
                                                               const char *why, ...)
{
    char text[128];
    va_list args;
    va_start(args, why);
    vsnprintf(text, sizeof text, why, args);
    va_end(args);
    return refuse(r, field, text);
}

/* Begins to read a field; false: it is not there. */
static bool see(struct reader *r, const char *key, bool *ret_present)
{
    r->field = key;
    if (may_have(r, key)) return true;
    if (ret_present) *ret_present = false;
    return false;
}

static td_status number(struct reader *r, const char *key, double *ret, bool *ret_present)
{
    if (!see(r, key, ret_present)) return TD_OK;
    return td_json_f64(r->root, "request", key, -1e30, 1e30, ret, ret_present, r->err);
}

static td_status integer(struct reader *r, const char *key, int64_t min, int64_t max, int64_t *ret,
                         bool *ret_present)
{
    if (!see(r, key, ret_present)) return TD_OK;
    return td_json_i64(r->root, "request", key, min, max, ret, ret_present, r->err);
}

static td_status boolean(struct reader *r, const char *key, bool *ret)
{
    if (!see(r, key, NULL)) return TD_OK;
    return td_json_bool(r->root, "request", key, ret, NULL, r->err);
}

static td_status text(struct reader *r, const char *key, char **ret)
{
    if (!see(r, key, NULL)) return TD_OK;
    const char *s = NULL;
    td_status st = td_json_str(r->root, "request", key, &s, NULL, r->err);
    if (!st && s) *ret = (char *)(uintptr_t)s;
    return st;
}

/* ---- what is not there ----------------------------------------------------------------------- */

static bool is_empty(const json_t *v)
{
    return json_is_null(v) || json_is_false(v) || (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0) ||
           (json_is_string(v) && json_string_length(v) == 0);
}

static bool is_one(const json_t *v) { return json_is_number(v) && json_number_value(v) == 1; }

static bool is_no_tool(const json_t *v)
{
    const char *s = json_string_value(v);
    return s && (!strcmp(s, "none") || !strcmp(s, "auto"));
}

static bool is_only_text(const json_t *v)
{
    const char *first = json_string_value(json_array_get(v, 0));
    return json_array_size(v) == 1 && first && !strcmp(first, "text");
}

static bool never(const json_t *v)
{
    (void)v;
    return false;
}

/* Fields that change the answer and that this server does not have, with the values that ask for
 * nothing. Empty values (null, false, "", [], {}) always pass. */
static const struct {
    const char *name;
    bool (*asks_for_nothing)(const json_t *v);
} not_there[] = {
    {"use_beam_search", never},    {"length_penalty", is_one},
    {"logits_processors", never},  {"guided_whitespace_pattern", never},
    {"structural_tag", never},     {"functions", never},
    {"function_call", is_no_tool}, {"chat_template", never},
    {"documents", never},          {"audio", never},
    {"modalities", is_only_text},  {"web_search_options", never},
};

static td_status check_not_there(struct reader *r)
{
    for (size_t i = 0; i < sizeof not_there / sizeof *not_there; i++) {
        const json_t *v = value_of(r, not_there[i].name);
        if (v && !is_empty(v) && !not_there[i].asks_for_nothing(v))
            return refuse(r, not_there[i].name, "is not supported by this server");
    }
    return TD_OK;
}

/* ---- sampling and stop conditions ------------------------------------------------------------ */

#define READ_FLOAT(key, FIELD, TAG)                                                                \
    do {                                                                                           \
        double value;                                                                              \
        bool there = false;                                                                        \
        td_status st = number(r, key, &value, &there);                                             \
        if (st) return st;                                                                         \
        if (there) {                                                                               \
            s->has_##FIELD##_case = TANDEM__V1__SAMPLING__HAS_##TAG##_##TAG;                       \
            s->FIELD = (float)value;                                                               \
        }                                                                                          \
    } while (0)

static td_status read_logit_bias(struct reader *r)
{
    const json_t *v = value_of(r, "logit_bias");
    if (!v || json_is_null(v)) return TD_OK;
    if (!json_is_object(v)) return refuse(r, "logit_bias", "must be an object of token ids");
    Tandem__V1__Sampling *s = &r->q->sampling;
    size_t n = json_object_size(v);
    r->q->bias = own_array(r, n, sizeof *r->q->bias);
    s->logit_bias = own_array(r, n, sizeof *s->logit_bias);
    if (!r->q->bias || !s->logit_bias) return TD_ERR_AGAIN;
    const char *key;
    json_t *bias;
    json_object_foreach((json_t *)(uintptr_t)v, key, bias)
    {
        char *end;
        long id = strtol(key, &end, 10);
        bool is_id = key[0] >= '0' && key[0] <= '9' && !*end && id <= INT32_MAX;
        if (!is_id || !json_is_number(bias))
            return refuse(r, "logit_bias", "must map token ids to numbers");
        Tandem__V1__LogitBias *b = &r->q->bias[s->n_logit_bias];
        tandem__v1__logit_bias__init(b);
        b->token = (int32_t)id;
        b->bias = (float)json_number_value(bias);
        s->logit_bias[s->n_logit_bias++] = b;
    }
    return TD_OK;
}

/* Chat: logprobs is a bool and top_logprobs how many; completions: logprobs is how many. */
static td_status read_logprobs(struct reader *r)
{
    const json_t *v = value_of(r, "logprobs");
    int64_t n = 0;
    bool there = false;
    if (r->q->options.is_chat) {
        td_status st = boolean(r, "logprobs", &r->q->options.logprobs);
        if (!st) st = integer(r, "top_logprobs", 0, INT32_MAX, &n, &there);
        if (st) return st;
        if (there && n && !r->q->options.logprobs)
            return refuse(r, "top_logprobs", "needs logprobs to be true");
    } else if (v && !json_is_null(v) && !json_is_false(v)) {
        td_status st = integer(r, "logprobs", 0, INT32_MAX, &n, &there);
        if (st) return st;
        r->q->options.logprobs = there;
    }
    if (r->q->options.logprobs) {
        r->q->sampling.has_logprobs_case = TANDEM__V1__SAMPLING__HAS_LOGPROBS_LOGPROBS;
        r->q->sampling.logprobs = (int32_t)n;
    }
    return TD_OK;
}

/* Of the prompt's tokens: vLLM's field, or OpenAI's echo with logprobs. */
static td_status read_prompt_logprobs(struct reader *r)
{
    struct openai_options *o = &r->q->options;
    Tandem__V1__Sampling *s = &r->q->sampling;
    const json_t *v = value_of(r, "prompt_logprobs");
    int64_t n = s->logprobs;
    if (v && !json_is_false(v)) {
        td_status st = integer(r, "prompt_logprobs", INT32_MIN, INT32_MAX, &n, &o->prompt_logprobs);
        if (st) return st;
    }
    if (o->prompt_logprobs && o->stream)
        return refuse(r, "prompt_logprobs", "cannot be streamed: leave stream out");
    /* echo of a prompt and no more: scored like one whose log-probabilities are told */
    bool prompt_alone = o->echo && json_is_integer(value_of(r, "max_tokens")) &&
                        !json_integer_value(value_of(r, "max_tokens"));
    if (!o->prompt_logprobs && !prompt_alone && !(o->echo && o->logprobs)) return TD_OK;
    s->has_prompt_logprobs_case = TANDEM__V1__SAMPLING__HAS_PROMPT_LOGPROBS_PROMPT_LOGPROBS;
    s->prompt_logprobs = (int32_t)n;
    return TD_OK;
}

/* A string, or a list of strings. Absent: none. */
static td_status read_texts(struct reader *r, const char *key, ProtobufCBinaryData **ret,
                            size_t *ret_n)
{
    char why[] = "must be a string or a list of strings";
    const json_t *v = value_of(r, key);
    if (!v || json_is_null(v)) return TD_OK;
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    ProtobufCBinaryData *texts = *ret = own_array(r, n, sizeof *texts);
    if (!texts) return TD_ERR_AGAIN;
    for (size_t i = 0; i < n; i++) {
        const json_t *x = json_is_array(v) ? json_array_get(v, i) : v;
        if (!json_is_string(x)) return refuse(r, key, why);
        texts[i].data = (uint8_t *)(uintptr_t)json_string_value(x);
        texts[i].len = json_string_length(x);
    }
    *ret_n = n;
    return TD_OK;
}

/* A list of token ids. */
static td_status read_ids(struct reader *r, const char *key, const json_t *v, int32_t **ret,
                          size_t *ret_n)
{
    size_t n = json_array_size(v);
    int32_t *ids = own_array(r, n, sizeof *ids);
    if (!ids) return TD_ERR_AGAIN;
    *ret = ids;
    for (size_t i = 0; i < n; i++) {
        const json_t *x = json_array_get(v, i);
        json_int_t id = json_integer_value(x);
        if (!json_is_integer(x) || id < INT32_MIN || id > INT32_MAX)
            return refuse(r, key, "must be a list of token ids");
        ids[i] = (int32_t)id;
    }
    *ret_n = n;
    return TD_OK;
}

/* The list of token ids in a field; absent: none. */
static td_status read_id_list(struct reader *r, const char *key, int32_t **ret, size_t *ret_n)
{
    const json_t *v = value_of(r, key);
    if (!v || json_is_null(v)) return TD_OK;
    if (!json_is_array(v)) return refuse(r, key, "must be a list of token ids");
    return read_ids(r, key, v, ret, ret_n);
}

static td_status read_choices(struct reader *r)
{
    int64_t n = 1, best_of = 0;
    td_status st = integer(r, "n", 1, INT32_MAX, &n, NULL);
    if (!st) st = integer(r, "best_of", 1, INT32_MAX, &best_of, NULL);
    if (st) return st;
    if (best_of > n && r->q->options.stream)
        return refuse(r, "best_of", "is above n, which is known at the end: it cannot be streamed");
    r->q->sampling.n = r->q->options.n = (uint32_t)n;
    r->q->sampling.best_of = (uint32_t)best_of;
    return TD_OK;
}

static td_status read_sampling(struct reader *r)
{
    Tandem__V1__Sampling *s = &r->q->sampling;
    READ_FLOAT("temperature", temperature, TEMPERATURE);
    READ_FLOAT("top_p", top_p, TOP_P);
    READ_FLOAT("min_p", min_p, MIN_P);
    READ_FLOAT("repetition_penalty", repetition_penalty, REPETITION_PENALTY);
    double presence = 0, frequency = 0;
    int64_t top_k = 0, seed = 0;
    bool has_top_k = false, has_seed = false;
    td_status st = number(r, "presence_penalty", &presence, NULL);
    if (!st) st = number(r, "frequency_penalty", &frequency, NULL);
    if (!st) st = integer(r, "top_k", -1, INT32_MAX, &top_k, &has_top_k);
    if (!st) st = integer(r, "seed", INT64_MIN, INT64_MAX, &seed, &has_seed);
    if (st) return st;
    s->presence_penalty = (float)presence;
    s->frequency_penalty = (float)frequency;
    if (has_top_k) {
        s->has_top_k_case = TANDEM__V1__SAMPLING__HAS_TOP_K_TOP_K;
        s->top_k = top_k < 0 ? 0 : (int32_t)top_k; /* vLLM's -1 is off, as 0 is */
    }
    if (has_seed) {
        s->has_seed_case = TANDEM__V1__SAMPLING__HAS_SEED_SEED;
        s->seed = (uint64_t)seed;
    }
    st = read_logit_bias(r);
    if (!st) st = read_logprobs(r);
    if (!st) st = read_prompt_logprobs(r);
    if (!st)
        st = read_id_list(r, "allowed_token_ids", &s->allowed_token_ids, &s->n_allowed_token_ids);
    if (!st) st = read_texts(r, "bad_words", &s->bad_words, &s->n_bad_words);
    return st ? st : read_choices(r);
}

static td_status read_stop(struct reader *r)
{
    Tandem__V1__StopConditions *s = &r->q->stop;
    int64_t max_tokens = 0;
    bool there = false;
    td_status st = integer(r, "max_completion_tokens", INT64_MIN, INT64_MAX, &max_tokens, &there);
    r->q->options.completion_limit = there;
    if (!st && !there) st = integer(r, "max_tokens", INT64_MIN, INT64_MAX, &max_tokens, &there);
    if (!st && !there && !r->q->options.is_chat) {
        max_tokens = OPENAI_COMPLETION_TOKENS;
        there = true;
    }
    if (!st && there) {
        s->has_max_tokens_case = TANDEM__V1__STOP_CONDITIONS__HAS_MAX_TOKENS_MAX_TOKENS;
        s->max_tokens = max_tokens;
    }
    bool ignore_eos = false, include_stop = false;
    if (!st) st = boolean(r, "ignore_eos", &ignore_eos);
    if (!st) st = boolean(r, "include_stop_str_in_output", &include_stop);
    if (!st) st = integer(r, "min_tokens", INT64_MIN, INT64_MAX, &s->min_tokens, NULL);
    s->ignore_eos = ignore_eos;
    s->include_stop = include_stop;
    if (!st) st = read_texts(r, "stop", &s->stop, &s->n_stop);
    return st ? st : read_id_list(r, "stop_token_ids", &s->stop_token_ids, &s->n_stop_token_ids);
}

/* ---- input ----------------------------------------------------------------------------------- */

/* The value as JSON text, for fields of the message that are JSON themselves. */
static td_status dump(struct reader *r, const json_t *v, ProtobufCBinaryData *ret)
{
    char *json = own(r, json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY));
    if (!json) return TD_ERR_AGAIN;
    *ret = (ProtobufCBinaryData){strlen(json), (uint8_t *)json};
    return TD_OK;
}

/* A string without zero bytes; absent or null leaves *ret. */
static td_status member(struct reader *r, const json_t *v, size_t i, const char *key, char **ret)
{
    const json_t *s = json_object_get(v, key);
    if (!s || json_is_null(s)) return TD_OK;
    if (!json_is_string(s) || strlen(json_string_value(s)) != json_string_length(s))
        return refusef(r, "messages", "[%zu].%s must be a string without zero bytes", i, key);
    *ret = (char *)(uintptr_t)json_string_value(s);
    return TD_OK;
}

static td_status read_parts(struct reader *r, size_t i, const json_t *v, Tandem__V1__ChatMessage *m)
{
    size_t n = json_array_size(v);
    if (n > TD_CHAT_MAX_PARTS)
        return refusef(r, "messages", "[%zu].content has %zu parts, limit %d", i, n,
                       TD_CHAT_MAX_PARTS);
    Tandem__V1__ContentPart *parts = own_array(r, n, sizeof *parts);
    m->parts = own_array(r, n, sizeof *m->parts);
    if (!parts || !m->parts) return TD_ERR_AGAIN;
    for (size_t k = 0; k < n; k++) {
        const json_t *part = json_array_get(v, k), *words = json_object_get(part, "text");
        const char *type = json_string_value(json_object_get(part, "type"));
        if (!type || strcmp(type, "text") || !json_is_string(words))
            return refusef(r, "messages",
                           "[%zu].content[%zu] must be {\"type\":\"text\",\"text\":...}", i, k);
        tandem__v1__content_part__init(&parts[k]);
        parts[k].type = (char *)(uintptr_t) "text";
        parts[k].text.data = (uint8_t *)(uintptr_t)json_string_value(words);
        parts[k].text.len = json_string_length(words);
        m->parts[m->n_parts++] = &parts[k];
    }
    return TD_OK;
}

static td_status read_calls(struct reader *r, size_t i, const json_t *v, Tandem__V1__ChatMessage *m)
{
    size_t n = json_array_size(v);
    if (!json_is_array(v) || n > TD_CHAT_MAX_TOOL_CALLS)
        return refusef(r, "messages", "[%zu].tool_calls must be a list of at most %d calls", i,
                       TD_CHAT_MAX_TOOL_CALLS);
    Tandem__V1__ToolCall *calls = own_array(r, n, sizeof *calls);
    m->tool_calls = own_array(r, n, sizeof *m->tool_calls);
    if (!calls || !m->tool_calls) return TD_ERR_AGAIN;
    for (size_t k = 0; k < n; k++) {
        const json_t *call = json_array_get(v, k), *f = json_object_get(call, "function"),
                     *arguments = json_object_get(f, "arguments");
        if (!json_is_string(json_object_get(f, "name")))
            return refusef(r, "messages", "[%zu].tool_calls[%zu] must be a function with a name", i,
                           k);
        tandem__v1__tool_call__init(&calls[k]);
        td_status st = member(r, call, i, "id", &calls[k].id);
        if (!st) st = member(r, f, i, "name", &calls[k].name);
        if (!st && json_is_string(arguments)) {
            calls[k].arguments.data = (uint8_t *)(uintptr_t)json_string_value(arguments);
            calls[k].arguments.len = json_string_length(arguments);
        } else if (!st && json_is_object(arguments)) {
            st = dump(r, arguments, &calls[k].arguments);
        }
        if (st) return st;
        m->tool_calls[m->n_tool_calls++] = &calls[k];
    }
    return TD_OK;
}

/* The thoughts of an earlier answer, by the name that answers have here or by the other that
 * servers use. */
static td_status read_reasoning(struct reader *r, size_t i, const json_t *v,
                                Tandem__V1__ChatMessage *m)
{
    const json_t *thoughts = json_object_get(v, "reasoning_content");
    if (!thoughts || json_is_null(thoughts)) thoughts = json_object_get(v, "reasoning");
    if (!thoughts || json_is_null(thoughts) || strcmp(m->role, "assistant") != 0) return TD_OK;
    if (!json_is_string(thoughts))
        return refusef(r, "messages", "[%zu].reasoning_content must be a string", i);
    m->reasoning.data = (uint8_t *)(uintptr_t)json_string_value(thoughts);
    m->reasoning.len = json_string_length(thoughts);
    return TD_OK;
}

static td_status read_message(struct reader *r, size_t i, const json_t *v)
{
    const json_t *content = json_object_get(v, "content"),
                 *calls = json_object_get(v, "tool_calls");
    if (!json_is_string(json_object_get(v, "role")))
        return refusef(r, "messages",
                       "[%zu] must be {\"role\": string, \"content\": string or parts}", i);
    Tandem__V1__ChatMessage *m = &r->q->messages[i];
    tandem__v1__chat_message__init(m);
    r->q->chat.messages[r->q->chat.n_messages++] = m;
    td_status st = member(r, v, i, "role", &m->role);
    if (!st) st = member(r, v, i, "name", &m->name);
    if (!st) st = member(r, v, i, "tool_call_id", &m->tool_call_id);
    if (!st && calls && !is_empty(calls)) st = read_calls(r, i, calls, m);
    if (!st) st = read_reasoning(r, i, v, m);
    if (st) return st;
    if (json_is_array(content)) return read_parts(r, i, content, m);
    bool has_else = m->n_tool_calls || m->reasoning.len;
    if (has_else && (!content || json_is_null(content))) return TD_OK;
    if (!json_is_string(content))
        return refusef(r, "messages", "[%zu].content must be a string or a list of text parts", i);
    m->content.data = (uint8_t *)(uintptr_t)json_string_value(content);
    m->content.len = json_string_length(content);
    return TD_OK;
}

/* none, auto, required, or the function that must be called. */
static td_status read_tool_choice(struct reader *r, const json_t *v)
{
    Tandem__V1__Chat *chat = &r->q->chat;
    const char *name = json_string_value(v), *type = json_string_value(json_object_get(v, "type")),
               *function =
                   json_string_value(json_object_get(json_object_get(v, "function"), "name"));
    if (name && (is_no_tool(v) || !strcmp(name, "required"))) {
        chat->tool_choice = (char *)(uintptr_t)name;
        return TD_OK;
    }
    if (!type || strcmp(type, "function") || !function || !function[0])
        return refuse(r, "tool_choice",
                      "must be none, auto, required or {\"type\": \"function\", \"function\": "
                      "{\"name\": ...}}");
    chat->tool_name = (char *)(uintptr_t)function;
    return TD_OK;
}

static td_status read_parallel_calls(struct reader *r)
{
    bool parallel = true;
    td_status st = boolean(r, "parallel_tool_calls", &parallel);
    r->q->chat.single_tool_call = !parallel;
    return st;
}

/* And no tool of another kind, such as a search that the server would make. */
static bool is_function(const json_t *tool)
{
    const json_t *type = json_object_get(tool, "type");
    const char *kind = !type || json_is_null(type) ? "function" : json_string_value(type);
    const json_t *name = json_object_get(json_object_get(tool, "function"), "name");
    return kind && !strcmp(kind, "function") && json_string_length(name) > 0;
}

static td_status read_tools(struct reader *r)
{
    Tandem__V1__Chat *chat = &r->q->chat;
    const json_t *v = value_of(r, "tools"), *choice = value_of(r, "tool_choice");
    td_status read = choice && !is_empty(choice) ? read_tool_choice(r, choice) : TD_OK;
    if (!read) read = read_parallel_calls(r);
    if (read) return read;
    if (v && !is_empty(v)) {
        size_t n = json_array_size(v);
        if (!json_is_array(v) || n > TD_CHAT_MAX_TOOLS)
            return refusef(r, "tools", "must be a list of at most %d functions", TD_CHAT_MAX_TOOLS);
        chat->tools = own_array(r, n, sizeof *chat->tools);
        if (!chat->tools) return TD_ERR_AGAIN;
        for (size_t i = 0; i < n; i++) {
            const json_t *tool = json_array_get(v, i);
            if (!is_function(tool))
                return refusef(r, "tools", "[%zu] must be a function with a name", i);
            td_status st = dump(r, tool, &chat->tools[chat->n_tools++]);
            if (st) return st;
        }
    }
    return TD_OK;
}

/* The template's variables. reasoning_effort is one, for the templates that know it. */
static td_status read_kwargs(struct reader *r)
{
    json_t *kwargs = value_of(r, "chat_template_kwargs"), *effort = value_of(r, "reasoning_effort");
    bool has_effort = effort && !is_empty(effort);
    if (has_effort && !json_is_string(effort))
        return refuse(r, "reasoning_effort", "must be a string");
    if (kwargs && !is_empty(kwargs) && !json_is_object(kwargs))
        return refuse(r, "chat_template_kwargs", "must be an object");
    if (!has_effort || json_object_get(kwargs, "reasoning_effort"))
        return kwargs && !is_empty(kwargs) ? dump(r, kwargs, &r->q->chat.template_kwargs) : TD_OK;
    json_t *all = kwargs && !is_empty(kwargs) ? json_copy(kwargs) : json_object();
    td_status st = json_object_set(all, "reasoning_effort", effort)
                       ? td_fail(r->err, TD_ERR_AGAIN, "no memory for the template's variables")
                       : dump(r, all, &r->q->chat.template_kwargs);
    json_decref(all);
    return st;
}

static td_status read_chat(struct reader *r)
{
    Tandem__V1__Chat *chat = &r->q->chat;
    const json_t *v = value_of(r, "messages");
    if (!json_is_array(v)) return refuse(r, "messages", "must be a list of messages");
    size_t n = json_array_size(v);
    if (n > ROUTER_MAX_CHAT_MESSAGES)
        return refusef(r, "messages", "has %zu messages, limit %d", n, ROUTER_MAX_CHAT_MESSAGES);
    r->q->messages = own_array(r, n, sizeof *r->q->messages);
    chat->messages = own_array(r, n, sizeof *chat->messages);
    if (!r->q->messages || !chat->messages) return TD_ERR_AGAIN;
    for (size_t i = 0; i < n; i++) {
        td_status st = read_message(r, i, json_array_get(v, i));
        if (st) return st;
    }
    bool goes_on = false;
    td_status st = boolean(r, "continue_final_message", &goes_on);
    bool prompt = !goes_on; /* unless it is said */
    if (!st) st = boolean(r, "add_generation_prompt", &prompt);
    if (!st) st = read_tools(r);
    if (!st) st = read_kwargs(r);
    chat->no_generation_prompt = !prompt;
    chat->continue_final_message = goes_on;
    chat->split_answer = true;
    r->q->in.input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_CHAT;
    r->q->in.chat = chat;
    return st;
}

static td_status read_one_prompt(struct reader *r, const json_t *v, struct prompt *p)
{
    tandem__v1__token_ids__init(&p->ids);
    p->is_text = json_is_string(v);
    if (p->is_text) {
        p->text.data = (uint8_t *)(uintptr_t)json_string_value(v);
        p->text.len = json_string_length(v);
        return TD_OK;
    }
    if (!json_is_array(v) || !json_is_integer(json_array_get(v, 0)))
        return refuse(r, "prompt", "must be a string, a list of token ids, or a list of these");
    return read_ids(r, "prompt", v, &p->ids.ids, &p->ids.n_ids);
}

static void set_prompt(Tandem__V1__GenerateRequest *in, struct prompt *p)
{
    if (p->is_text) {
        in->input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT;
        in->prompt = p->text;
    } else {
        in->input_case = TANDEM__V1__GENERATE_REQUEST__INPUT_TOKEN_IDS;
        in->token_ids = &p->ids;
    }
}

static td_status read_prompt(struct reader *r)
{
    const json_t *v = value_of(r, "prompt");
    bool is_list = json_array_size(v) > 0 && !json_is_integer(json_array_get(v, 0));
    size_t n = is_list ? json_array_size(v) : 1;
    if (n > ROUTER_MAX_ALL_CHOICES)
        return refusef(r, "prompt", "has %zu prompts, limit %d", n, ROUTER_MAX_ALL_CHOICES);
    r->q->prompts = own_array(r, n, sizeof *r->q->prompts);
    if (!r->q->prompts) return TD_ERR_AGAIN;
    for (size_t i = 0; i < n; i++) {
        td_status st = read_one_prompt(r, is_list ? json_array_get(v, i) : v, &r->q->prompts[i]);
        if (st) return st;
    }
    r->q->options.n_prompts = (uint32_t)n;
    td_status st = boolean(r, "echo", &r->q->options.echo);
    if (st) return st;
    set_prompt(&r->q->in, &r->q->prompts[0]);
    char *suffix = NULL;
    st = text(r, "suffix", &suffix);
    if (st) return st;
    if (suffix) {
        r->q->in.suffix.data = (uint8_t *)suffix;
        r->q->in.suffix.len = strlen(suffix);
    }
    bool special = true;
    st = boolean(r, "add_special_tokens", &special);
    r->q->in.no_special_tokens = !special;
    return st;
}

/* ---- the rest -------------------------------------------------------------------------------- */

static td_status read_stream(struct reader *r)
{
    struct openai_options *o = &r->q->options;
    td_status st = boolean(r, "stream", &o->stream);
    if (st) return st;
    const json_t *v = value_of(r, "stream_options");
    if (!v || json_is_null(v)) return TD_OK;
    if (!json_is_object(v)) return refuse(r, "stream_options", "must be an object");
    if (!o->stream) return refuse(r, "stream_options", "needs stream to be true");
    r->field = "stream_options";
    st = td_json_bool(v, "stream_options", "include_usage", &o->include_usage, NULL, r->err);
    if (!st)
        st = td_json_bool(v, "stream_options", "include_ledger", &o->include_ledger, NULL, r->err);
    if (!st)
        st = td_json_bool(v, "stream_options", "continuous_usage_stats", &o->continuous_usage, NULL,
                          r->err);
    if (!st)
        st = td_json_bool(v, "stream_options", "include_event_ids", &o->event_ids, NULL, r->err);
    return st;
}

/* What the client of a stream that goes on has: for each choice a list of token ids. */
static td_status read_resumed(struct reader *r)
{
    static const char key[] = "resume_token_ids";
    Tandem__V1__ResumeFrom *to = &r->q->resume;
    const json_t *v = value_of(r, key);
    size_t n = json_array_size(v);
    const struct openai_options *o = &r->q->options;
    if (o->event_ids && o->n * o->n_prompts > OPENAI_MAX_EVENT_CHOICES)
        return refuse(r, "stream_options", "has include_event_ids: for at most 64 choices in all");
    if (!v || json_is_null(v)) return TD_OK;
    if (!json_is_array(v) || n > o->n)
        return refuse(r, key, "must be a list of lists of token ids, one for each choice at most");
    if (o->n_prompts > 1) return refuse(r, key, "is for a single prompt");
    Tandem__V1__ResumeChoice *store = own_array(r, n, sizeof *store);
    to->choices = own_array(r, n, sizeof *to->choices);
    if (!store || !to->choices) return TD_ERR_AGAIN;
    for (; to->n_choices < n; to->n_choices++) {
        Tandem__V1__ResumeChoice *c = to->choices[to->n_choices] = &store[to->n_choices];
        const json_t *ids = json_array_get(v, to->n_choices);
        tandem__v1__resume_choice__init(c);
        if (!json_is_array(ids)) return refuse(r, key, "must be a list of lists of token ids");
        td_status st = read_ids(r, key, ids, &c->token_ids, &c->n_token_ids);
        if (st) return st;
    }
    return TD_OK;
}

/* ---- structured output ----------------------------------------------------------------------- */

/* One guide: kind is "json" (a schema as an object or as text), "regex", "choice" or "grammar".
 * field is what the client calls it. */
static td_status read_guide(struct reader *r, const char *field, const char *kind, const json_t *v)
{
    Tandem__V1__GuidedOutput *g = &r->q->guided;
    if (!v || json_is_null(v)) return TD_OK;
    if (r->q->in.guided) return refuse(r, field, "is the second guide of one output");
    r->q->in.guided = g;
    r->q->options.guide = field;
    ProtobufCBinaryData text = {json_string_length(v), (uint8_t *)(uintptr_t)json_string_value(v)};
    if (!strcmp(kind, "choice")) {
        size_t n = json_array_size(v);
        if (!json_is_array(v) || n > TD_GRAMMAR_MAX_CHOICES)
            return refuse(r, field, "must be a list of texts");
        r->q->choice.texts = own_array(r, n, sizeof *r->q->choice.texts);
        if (!r->q->choice.texts) return TD_ERR_AGAIN;
        for (size_t i = 0; i < n; i++) {
            const json_t *x = json_array_get(v, i);
            if (!json_is_string(x)) return refuse(r, field, "must be a list of texts");
            r->q->choice.texts[r->q->choice.n_texts++] = (ProtobufCBinaryData){
                json_string_length(x), (uint8_t *)(uintptr_t)json_string_value(x)};
        }
        g->guide_case = TANDEM__V1__GUIDED_OUTPUT__GUIDE_CHOICE;
        g->choice = &r->q->choice;
        return TD_OK;
    }
    if (!strcmp(kind, "json")) {
        g->guide_case = TANDEM__V1__GUIDED_OUTPUT__GUIDE_JSON_SCHEMA;
        if (!json_is_string(v)) return dump(r, v, &g->json_schema);
        g->json_schema = text;
        return TD_OK;
    }
    if (!json_is_string(v)) return refuse(r, field, "must be a string");
    if (!strcmp(kind, "regex")) {
        g->guide_case = TANDEM__V1__GUIDED_OUTPUT__GUIDE_REGEX;
        g->regex = text;
    } else {
        g->guide_case = TANDEM__V1__GUIDED_OUTPUT__GUIDE_GRAMMAR;
        g->grammar = text;
    }
    return TD_OK;
}

static td_status set_json_object(struct reader *r, const char *field)
{
    if (r->q->in.guided) return refuse(r, field, "is the second guide of one output");
    r->q->guided.guide_case = TANDEM__V1__GUIDED_OUTPUT__GUIDE_JSON_OBJECT;
    r->q->guided.json_object = true;
    r->q->in.guided = &r->q->guided;
    r->q->options.guide = field;
    return TD_OK;
}

static td_status read_response_format(struct reader *r)
{
    const json_t *v = value_of(r, "response_format");
    if (!v || is_empty(v)) return TD_OK;
    const char *type = json_string_value(json_object_get(v, "type"));
    if (type && !strcmp(type, "text")) return TD_OK;
    if (type && !strcmp(type, "json_object")) return set_json_object(r, "response_format");
    const json_t *schema = json_object_get(json_object_get(v, "json_schema"), "schema");
    if (!type || strcmp(type, "json_schema") || !json_is_object(schema))
        return refuse(r, "response_format",
                      "must be of type text, json_object, or json_schema with "
                      "json_schema.schema");
    return read_guide(r, "response_format", "json", schema);
}

/* What structured_outputs has besides the guides of read_guided. */
static td_status read_outputs_group(struct reader *r, const json_t *group)
{
    static const char *const not_here[] = {"structural_tag", "whitespace_pattern"};
    if (group && !json_is_null(group) && !json_is_object(group))
        return refuse(r, "structured_outputs", "must be an object");
    for (size_t i = 0; i < sizeof not_here / sizeof *not_here; i++) {
        const json_t *v = json_object_get(group, not_here[i]);
        if (v && !is_empty(v))
            return refusef(r, "structured_outputs", "has %s, which is not supported by this server",
                           not_here[i]);
    }
    return json_is_true(json_object_get(group, "json_object"))
               ? set_json_object(r, "structured_outputs")
               : TD_OK;
}

static td_status read_guided(struct reader *r)
{
    static const struct {
        const char *field, *kind;
    } guides[] = {{"guided_json", "json"},
                  {"guided_regex", "regex"},
                  {"guided_choice", "choice"},
                  {"guided_grammar", "grammar"}};
    const json_t *group = value_of(r, "structured_outputs");
    for (size_t i = 0; i < sizeof guides / sizeof *guides; i++) {
        td_status st = read_guide(r, guides[i].field, guides[i].kind, value_of(r, guides[i].field));
        if (!st)
            st = read_guide(r, "structured_outputs", guides[i].kind,
                            json_object_get(group, guides[i].kind));
        if (st) return st;
    }
    td_status st = read_outputs_group(r, group);
    return st ? st : read_response_format(r);
}

/* ---- objectives, and all of it --------------------------------------------------------------- */

static td_status read_objectives(struct reader *r)
{
    const json_t *v = value_of(r, "objectives");
    if (!v || json_is_null(v)) return TD_OK;
    if (!json_is_object(v)) return refuse(r, "objectives", "must be {\"ttft_ms\":, \"tpot_ms\":}");
    Tandem__V1__Objectives *o = &r->q->objectives;
    bool ttft = false, tpot = false;
    r->field = "objectives";
    td_status st = td_json_f64(v, "objectives", "ttft_ms", -1e30, 1e30, &o->ttft_ms, &ttft, r->err);
    if (!st) st = td_json_f64(v, "objectives", "tpot_ms", -1e30, 1e30, &o->tpot_ms, &tpot, r->err);
    if (ttft) o->has_ttft_ms_case = TANDEM__V1__OBJECTIVES__HAS_TTFT_MS_TTFT_MS;
    if (tpot) o->has_tpot_ms_case = TANDEM__V1__OBJECTIVES__HAS_TPOT_MS_TPOT_MS;
    r->q->in.objectives = o;
    return st;
}

/* What cannot be had together, or of a chat. */
static td_status check_echo(struct reader *r)
{
    const json_t *v = value_of(r, "echo");
    if (r->q->options.is_chat && v && !is_empty(v))
        return refuse(r, "echo", "is not supported for chats by this server");
    v = value_of(r, "add_special_tokens");
    if (r->q->options.is_chat && json_is_true(v))
        return refuse(r, "add_special_tokens",
                      "is not supported for chats by this server: the template writes them");
    v = value_of(r, "suffix");
    if (r->q->options.is_chat && v && !is_empty(v))
        return refuse(r, "suffix", "is not supported for chats by this server");
    if (!r->q->options.echo) return TD_OK;
    if (r->q->in.suffix.len)
        return refuse(r, "echo", "with suffix is not supported by this server");
    if (r->q->in.truncate_prompt_tokens)
        return refuse(r, "echo", "with truncate_prompt_tokens is not supported by this server");
    return TD_OK;
}

static td_status read_all(struct reader *r)
{
    Tandem__V1__GenerateRequest *in = &r->q->in;
    int64_t priority = 0;
    bool skip = true, return_ids = false, reasoning = true;
    td_status st = check_not_there(r);
    if (!st) st = r->q->options.is_chat ? read_chat(r) : read_prompt(r);
    if (!st) st = read_stream(r);
    if (!st) st = read_sampling(r);
    if (!st) st = read_stop(r);
    if (!st) st = text(r, "model", &in->model);
    if (!st) st = text(r, "request_id", &in->request_id);
    if (!st) st = text(r, "slo_class", &in->slo_class);
    if (!st) st = text(r, "tenant", &in->tenant);
    if (!st) st = text(r, "cache_salt", &in->cache_salt);
    if (!st) st = integer(r, "priority", INT32_MIN, INT32_MAX, &priority, NULL);
    if (!st)
        st = integer(r, "truncate_prompt_tokens", INT64_MIN, INT64_MAX, &in->truncate_prompt_tokens,
                     NULL);
    if (!st) st = boolean(r, "skip_special_tokens", &skip);
    if (!st) st = boolean(r, "return_token_ids", &return_ids);
    if (!st) st = boolean(r, "return_tokens_as_token_ids", &r->q->options.token_labels);
    if (!st) st = boolean(r, "return_token_strs", &r->q->options.token_texts);
    if (!st) st = boolean(r, "include_reasoning", &reasoning);
    if (!st) st = read_resumed(r);
    if (!st) st = read_objectives(r);
    if (!st) st = read_guided(r);
    if (!st) st = check_echo(r);
    r->q->options.token_ids = return_ids;
    r->q->options.hide_reasoning = !reasoning;
    in->priority = (int32_t)priority;
    in->skip_special_tokens_off = !skip;
    /* usage of every chunk is counted by the ids */
    in->return_token_ids = return_ids || r->q->options.logprobs || r->q->options.continuous_usage;
    return st;
}

/* POST /detokenize. */
static td_status read_detokenize(struct reader *r)
{
    const json_t *v = value_of(r, "tokens");
    Tandem__V1__GenerateRequest *in = &r->q->in;
    if (!json_is_array(v)) return refuse(r, "tokens", "must be a list of token ids");
    struct prompt *p = r->q->prompts = own_array(r, 1, sizeof *p);
    if (!p) return TD_ERR_AGAIN;
    tandem__v1__token_ids__init(&p->ids);
    td_status st = read_ids(r, "tokens", v, &p->ids.ids, &p->ids.n_ids);
    set_prompt(in, p);
    return st ? st : text(r, "model", &in->model);
}

td_status openai_check_body(const char *body, size_t n_bytes, struct td_err *err)
{
    size_t n_values = 1, n_names = 0;
    bool in_string = false;
    for (size_t i = 0; i < n_bytes; i++) {
        char c = body[i];
        if (in_string && c == '\\') i++;
        if (c == '"') in_string = !in_string;
        if (in_string) continue;
        n_values += c == ',' || c == '[' || c == '{';
        n_names += c == ':';
    }
    if (n_values > OPENAI_MAX_VALUES)
        return td_fail(err, TD_ERR_INVALID, "request body has %zu values, limit %d", n_values,
                       OPENAI_MAX_VALUES);
    if (n_names > OPENAI_MAX_NAMES)
        return td_fail(err, TD_ERR_INVALID, "request body has %zu names, limit %d", n_names,
                       OPENAI_MAX_NAMES);
    return TD_OK;
}

td_status openai_request_parse(const char *body, size_t n_bytes, enum openai_kind kind,
                               struct openai_request **ret_request, char *ret_param,
                               struct td_err *err)
{
    ret_param[0] = 0;
    json_t *root = NULL;
    td_status st = openai_check_body(body, n_bytes, err);
    if (!st) st = td_json_load_text(body, n_bytes, "request body", &root, err);
    return st ? st : openai_request_take(root, kind, ret_request, ret_param, err);
}

td_status openai_request_take(json_t *root, enum openai_kind kind,
                              struct openai_request **ret_request, char *ret_param,
                              struct td_err *err)
{
    ret_param[0] = 0;
    struct openai_request *q = calloc(1, sizeof *q);
    if (!q || !json_is_object(root)) {
        json_decref(root);
        free(q);
        return q ? td_fail(err, TD_ERR_INVALID, "request body must be a JSON object")
                 : td_fail(err, TD_ERR_AGAIN, "no memory for a request");
    }
    q->root = root;
    q->options.n_prompts = q->options.n = 1;
    q->options.is_chat =
        kind == OPENAI_CHAT || (kind == OPENAI_EITHER && json_object_get(root, "messages"));
    tandem__v1__generate_request__init(&q->in);
    tandem__v1__sampling__init(&q->sampling);
    tandem__v1__stop_conditions__init(&q->stop);
    tandem__v1__chat__init(&q->chat);
    tandem__v1__objectives__init(&q->objectives);
    tandem__v1__guided_output__init(&q->guided);
    tandem__v1__guided_choice__init(&q->choice);
    tandem__v1__resume_from__init(&q->resume);
    q->in.sampling = &q->sampling;
    q->in.stop = &q->stop;
    struct reader r = {q, root, bits_of_names(root), "", err};
    td_status st = kind == OPENAI_TOKENS ? read_detokenize(&r) : read_all(&r);
    if (st) {
        snprintf(ret_param, 64, "%s", r.field);
        openai_request_free(q);
        return st;
    }
    *ret_request = q;
    return TD_OK;
}

void openai_request_free(struct openai_request *q)
{
    if (!q) return;
    while (q->owned) {
        struct owned *o = q->owned;
        q->owned = o->next;
        free(o->memory);
        free(o);
    }
    json_decref(q->root);
    free(q->all);
    free(q->all_ptrs);
    free(q);
}

const struct openai_options *openai_request_options(const struct openai_request *q)
{
    return &q->options;
}

Tandem__V1__GenerateRequest *openai_request_message(struct openai_request *q) { return &q->in; }

const Tandem__V1__GenerateRequest *const *openai_request_messages(struct openai_request *q)
{
    size_t n = q->options.n_prompts;
    if (!q->all) q->all = calloc(n, sizeof *q->all);
    if (!q->all_ptrs) q->all_ptrs = calloc(n, sizeof *q->all_ptrs);
    if (!q->all || !q->all_ptrs) return NULL;
    for (size_t i = 0; i < n; i++) {
        q->all[i] = q->in;
        if (q->prompts) set_prompt(&q->all[i], &q->prompts[i]);
        q->all_ptrs[i] = &q->all[i];
    }
    return q->all_ptrs;
}

/* A choice's first event has the prompt's log-probabilities. Behind tokens that the client has the
 * prompt is not scored, so for a choice without an event all is computed again, from the seed. */
static bool lacks_scores(const struct openai_request *q)
{
    bool lacks = false;
    for (uint32_t i = 0; i < q->after.n_choices; i++) lacks |= !q->after.events[i].n;
    return lacks && q->options.echo && q->options.logprobs;
}

td_status openai_request_resume(struct openai_request *q, const char *value, struct td_err *err)
{
    td_status s = openai_event_id_parse(value, &q->after, err);
    if (s) return s;
    if (!q->options.event_ids)
        return td_fail(err, TD_ERR_INVALID,
                       "Last-Event-ID is for requests with stream and "
                       "stream_options.include_event_ids");
    if (q->after.n_choices != q->options.n * q->options.n_prompts)
        return td_fail(err, TD_ERR_INVALID, "Last-Event-ID is of %u choices, the request has %u",
                       q->after.n_choices, q->options.n * q->options.n_prompts);
    q->resume.seed = q->after.seed;
    q->resume.max_tokens = q->after.max_tokens;
    q->resume.prompt_hash = q->after.prompt_hash;
    if (lacks_scores(q)) q->resume.n_choices = 0;
    q->in.resume_from = &q->resume;
    q->resumes = true;
    return TD_OK;
}

const struct openai_event_id *openai_request_resumed(const struct openai_request *q)
{
    return q->resumes ? &q->after : NULL;
}

/* Headers that say what the body may say, too. */
enum header_kind { TTFT_MS, TPOT_MS, SLO_CLASS, TENANT, PRIORITY };
static const char *const header_names[] = {[TTFT_MS] = "x-slo-ttft-ms",
                                           [TPOT_MS] = "x-slo-tpot-ms",
                                           [SLO_CLASS] = "x-slo-class",
                                           [TENANT] = "x-tenant",
                                           [PRIORITY] = "x-priority"};

const char *openai_header_name(size_t i)
{
    return i < sizeof header_names / sizeof *header_names ? header_names[i] : NULL;
}

static td_status header_number(size_t header, const char *value, const char *must, double *ret,
                               struct td_err *err)
{
    char *end;
    *ret = strtod(value, &end);
    if (end == value || *end || !isfinite(*ret) || (header == PRIORITY && *ret != rint(*ret)))
        return td_fail(err, TD_ERR_INVALID, "%s is \"%.40s\", must be %s", header_names[header],
                       value, must);
    return TD_OK;
}

static td_status header_text(struct openai_request *q, size_t header, const char *value, char **ret,
                             struct td_err *err)
{
    struct reader r = {.q = q, .err = err};
    json_t *utf8 = json_string(value); /* of such alone */
    json_decref(utf8);
    if (!utf8) return td_fail(err, TD_ERR_INVALID, "%s is not valid UTF-8", header_names[header]);
    char *copy = own(&r, strdup(value));
    if (copy) *ret = copy;
    return copy ? TD_OK : TD_ERR_AGAIN;
}

td_status openai_request_header(struct openai_request *q, size_t i, const char *value,
                                struct td_err *err)
{
    double x;
    td_status s;
    switch (i) {
    case SLO_CLASS:
        return header_text(q, i, value, &q->in.slo_class, err);
    case TENANT:
        return header_text(q, i, value, &q->in.tenant, err);
    case PRIORITY:
        if ((s = header_number(i, value, "an integer", &x, err))) return s;
        q->in.priority = (int32_t)fmax(-1e9, fmin(1e9, x)); /* its limits are inference.c's */
        return TD_OK;
    default:
        if ((s = header_number(i, value, "milliseconds", &x, err))) return s;
    }
    if (i == TTFT_MS) {
        q->objectives.has_ttft_ms_case = TANDEM__V1__OBJECTIVES__HAS_TTFT_MS_TTFT_MS;
        q->objectives.ttft_ms = x;
    } else {
        q->objectives.has_tpot_ms_case = TANDEM__V1__OBJECTIVES__HAS_TPOT_MS_TPOT_MS;
        q->objectives.tpot_ms = x;
    }
    q->in.objectives = &q->objectives;
    return TD_OK;
}
