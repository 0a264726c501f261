/* openai_answer.c - see openai_answer.h. */
#include "router/http/openai_answer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "router/client.h"

/* ---- errors ---------------------------------------------------------------------------------- */

unsigned openai_http_status(enum td_code code)
{
    switch (code) {
    case TD_CODE_OK:
        return 200;
    case TD_CODE_INVALID_ARGUMENT:
    case TD_CODE_OUT_OF_RANGE:
    case TD_CODE_UNIMPLEMENTED:
        return 400;
    case TD_CODE_UNAUTHENTICATED:
        return 401;
    case TD_CODE_PERMISSION_DENIED:
        return 403;
    case TD_CODE_NOT_FOUND:
        return 404;
    case TD_CODE_ABORTED:
        return 409;
    case TD_CODE_RESOURCE_EXHAUSTED:
        return 429;
    case TD_CODE_CANCELLED:
        return 499; /* nobody is there to read it */
    case TD_CODE_UNAVAILABLE:
        return 503;
    case TD_CODE_DEADLINE_EXCEEDED:
        return 504;
    default:
        return 500;
    }
}

static const char *error_type(unsigned http_status)
{
    switch (http_status) {
    case 401:
        return "authentication_error";
    case 403:
        return "permission_error";
    case 404:
        return "not_found_error";
    case 429:
        return "rate_limit_error";
    default:
        return http_status < 500 ? "invalid_request_error" : "server_error";
    }
}

void openai_error(struct text_buffer *out, unsigned http_status, const char *message,
                  const char *param)
{
    text_adds(out, "{\"error\":{\"message\":");
    text_add_json(out, message, strlen(message));
    text_addf(out, ",\"type\":\"%s\",\"param\":", error_type(http_status));
    if (param[0])
        text_add_json(out, param, strlen(param));
    else
        text_adds(out, "null");
    text_addf(out, ",\"code\":%u}}", http_status);
}

/* Where an error's first words are not the name that the client's field has. */
static const char *field_of(const struct openai_options *o, const char *message)
{
    static const struct {
        const char *begins, *field;
    } rows[] = {{"chat.messages", "messages"}, {"messages[", "messages"},
                {"chat.tools", "tools"},       {"tools", "tools"},
                {"chat.tool_", "tool_choice"}, {"template_kwargs", "chat_template_kwargs"},
                {"token_ids", "prompt"},       {"resume_from.choices", "resume_token_ids"}};
    static const char limit[] = "stop.max_tokens ";
    if (o->completion_limit && !strncmp(message, limit, sizeof limit - 1))
        return "max_completion_tokens";
    if (!strncmp(message, "guided", 6)) return o->guide;
    if (o->is_chat && !strncmp(message, "prompt has ", 11)) return "messages";
    if (!strncmp(message, "n_logprobs ", 11)) return o->is_chat ? "top_logprobs" : "logprobs";
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (!strncmp(message, rows[i].begins, strlen(rows[i].begins))) return rows[i].field;
    return NULL;
}

void openai_error_param(const struct openai_options *o, const char *message, char *ret_param)
{
    size_t n = strcspn(message, " ");
    const char *field = field_of(o, message);
    ret_param[0] = 0;
    if (n > 0 && message[n] && message[n - 1] == ':') { /* "sampling: temperature is ..." */
        if (!field) field = field_of(o, message + n + 1);
        message += n + 1;
        n = strcspn(message, " ");
    }
    if (field) {
        snprintf(ret_param, 64, "%s", field);
        return;
    }
    if (message[n] != ' ' || strspn(message, "abcdefghijklmnopqrstuvwxyz_.0123456789[]") != n ||
        n == 0)
        return;
    if (strncmp(message + n, " is ", 4) && strncmp(message + n, " has ", 5)) return;
    n = strcspn(message, "[ "); /* of an element's member the list's name counts */
    const char *from = message;
    for (size_t i = 0; i < n; i++)
        if (message[i] == '.') from = message + i + 1;
    n -= (size_t)(from - message);
    snprintf(ret_param, 64, "%.*s", (int)n, from);
}

/* ---- logprobs -------------------------------------------------------------------------------- */

static void add_float(struct text_buffer *b, float x)
{
    if (isfinite(x))
        text_addf(b, "%.9g", (double)x);
    else
        text_adds(b, "-9999.0"); /* as OpenAI writes minus infinity, which JSON has not */
}

/* The token's bytes as they would stand in the text. */
static void token_bytes(const struct openai_answer *a, int32_t id, char **ret, size_t *ret_n)
{
    *ret = NULL;
    *ret_n = 0;
    struct td_err err = {0};
    if (td_tokenizer_decode(a->tokenizer, &id, 1, false, ret, ret_n, &err)) *ret_n = 0;
}

/* A token in lists of logprobs: its text, or its id if that was asked for. */
static void add_label(const struct openai_answer *a, int32_t id, const char *bytes, size_t n,
                      struct text_buffer *b)
{
    if (a->options.token_labels)
        text_addf(b, "\"token_id:%d\"", id);
    else
        text_add_json(b, bytes, n);
}

static void add_token(const struct openai_answer *a, int32_t id, float logprob,
                      struct text_buffer *b)
{
    char *bytes;
    size_t n;
    token_bytes(a, id, &bytes, &n);
    text_adds(b, "{\"token\":");
    add_label(a, id, bytes, n, b);
    text_adds(b, ",\"logprob\":");
    add_float(b, logprob);
    text_adds(b, ",\"bytes\":[");
    for (size_t i = 0; i < n; i++) text_addf(b, i ? ",%u" : "%u", (unsigned char)bytes[i]);
    text_adds(b, "]");
    free(bytes);
}

static void chat_logprob(const struct openai_answer *a, int32_t id, const Tandem__V1__Logprobs *l,
                         struct text_buffer *b)
{
    add_token(a, id, l->logprob, b);
    text_adds(b, ",\"top_logprobs\":[");
    for (size_t i = 0; i < l->n_top; i++) {
        if (i) text_adds(b, ",");
        add_token(a, l->top[i]->token, l->top[i]->logprob, b);
        text_adds(b, "}");
    }
    text_adds(b, "]}");
}

static void add_pair(const struct openai_answer *a, int32_t id, float logprob,
                     struct text_buffer *b)
{
    char *bytes;
    size_t n;
    token_bytes(a, id, &bytes, &n);
    add_label(a, id, bytes, n, b);
    text_addf(b, ":");
    add_float(b, logprob);
    free(bytes);
}

/* Four lists: tokens, token_logprobs, top_logprobs (the best, and the token itself where it is none
 * of them), text_offset. l NULL: nothing is known of it. */
static void completion_logprob(const struct openai_answer *a, int32_t id, size_t offset,
                               const Tandem__V1__Logprobs *l, struct text_buffer lists[4])
{
    char *bytes;
    size_t n;
    for (int i = 0; i < 4; i++)
        if (lists[i].n) text_addf(&lists[i], ",");
    token_bytes(a, id, &bytes, &n);
    add_label(a, id, bytes, n, &lists[0]);
    free(bytes);
    text_addf(&lists[3], "%zu", offset);
    if (!l) {
        text_adds(&lists[1], "null");
        text_adds(&lists[2], "null");
        return;
    }
    add_float(&lists[1], l->logprob);
    text_addf(&lists[2], "{");
    bool has_own = false;
    for (size_t i = 0; i < l->n_top; i++) {
        if (i) text_addf(&lists[2], ",");
        add_pair(a, l->top[i]->token, l->top[i]->logprob, &lists[2]);
        has_own |= l->top[i]->token == id;
    }
    if (!has_own && l->n_top) text_addf(&lists[2], ",");
    if (!has_own) add_pair(a, id, l->logprob, &lists[2]);
    text_addf(&lists[2], "}");
}

/* vLLM's shape: {"ID": {"logprob", "rank", "decoded_token"}, ...}, the token and the best. */
static void add_scored(const struct openai_answer *a, int32_t id, float logprob, uint32_t rank,
                       struct text_buffer *b)
{
    char *bytes;
    size_t n;
    text_addf(b, "\"%d\":{\"logprob\":", id);
    add_float(b, logprob);
    text_addf(b, ",\"rank\":%u,\"decoded_token\":", rank);
    token_bytes(a, id, &bytes, &n);
    text_add_json(b, bytes, n);
    text_adds(b, "}");
    free(bytes);
}

static void add_element(const struct openai_answer *a, const Tandem__V1__PromptLogprob *p,
                        struct text_buffer *b)
{
    if (b->n) text_adds(b, ",");
    if (!p->rank) {
        text_adds(b, "null");
        return;
    }
    text_adds(b, "{");
    add_scored(a, p->token, p->logprob, p->rank, b);
    for (size_t i = 0; i < p->n_top; i++) {
        if (p->top[i]->token == p->token) continue;
        text_adds(b, ",");
        add_scored(a, p->top[i]->token, p->top[i]->logprob, (uint32_t)i + 1, b);
    }
    text_adds(b, "}");
}

/* Whether the text of prompt `at` has its next token: not the special ones that the tokenizer put
 * before it. */
static bool is_in_text(const struct openai_answer *a, uint32_t at, int32_t id)
{
    const struct openai_echo *prompt = &a->prompts[at];
    struct openai_scores *s = &a->scores[at];
    char *bytes;
    size_t n;
    s->has_begun |= !prompt->is_text || !td_tokenizer_is_special(a->tokenizer, id);
    if (s->has_begun) return true;
    token_bytes(a, id, &bytes, &n);
    bool is_in = n > 0 && n <= prompt->text.n - s->n_leading &&
                 !memcmp(prompt->text.bytes + s->n_leading, bytes, n);
    if (is_in) s->n_leading += n;
    free(bytes);
    return is_in;
}

/* A token of prompt `at` in the lists of its completions. */
static void add_echoed(const struct openai_answer *a, uint32_t at,
                       const Tandem__V1__PromptLogprob *p)
{
    struct openai_scores *s = &a->scores[at];
    Tandem__V1__Logprobs l = TANDEM__V1__LOGPROBS__INIT;
    const char *text = "";
    size_t n = 0;
    l.logprob = p->logprob;
    l.n_top = p->n_top;
    l.top = p->top;
    completion_logprob(a, p->token, s->n_text, p->rank ? &l : NULL, s->lists);
    if (!is_in_text(a, at, p->token)) return;
    if (!s->detok && td_detokenizer_create(a->tokenizer, NULL, 0, false, &s->detok))
        s->lists[0].failed = true;
    if (s->detok && !td_detokenizer_push(s->detok, p->token, &text, &n))
        s->n_text += router_count_characters(text, n);
}

static size_t lists_bytes(const struct text_buffer lists[4])
{
    return lists[0].n + lists[1].n + lists[2].n + lists[3].n;
}

static void take_scores(struct openai_answer *a, const Tandem__V1__GenerateResponse *m,
                        struct text_buffer *out)
{
    if (!a->scores) a->scores = calloc(a->options.n_prompts, sizeof *a->scores);
    if (!a->scores) {
        out->failed = true;
        return;
    }
    uint32_t at = m->choice / a->options.n;
    struct openai_scores *s = &a->scores[at];
    size_t n_before = s->elements.n + lists_bytes(s->lists);
    for (size_t i = 0; i < m->n_prompt_logprobs; i++) {
        if (a->options.prompt_logprobs) add_element(a, m->prompt_logprobs[i], &s->elements);
        if (a->prompts && a->options.logprobs) add_echoed(a, at, m->prompt_logprobs[i]);
    }
    /* each choice of a completion has them */
    size_t n_copies = a->options.is_chat ? 1 : a->options.n;
    a->n_collected += (s->elements.n + lists_bytes(s->lists) - n_before) * n_copies;
    out->failed |= s->elements.failed;
    for (int i = 0; i < 4; i++) out->failed |= s->lists[i].failed;
}

/* The element of the answer, of prompt i. */
static void write_scores(const struct openai_answer *a, uint32_t i, struct text_buffer *out)
{
    if (!a->options.prompt_logprobs) return;
    text_adds(out, ",\"prompt_logprobs\":[");
    if (a->scores) text_add(out, a->scores[i].elements.bytes, a->scores[i].elements.n);
    text_adds(out, "]");
}

/* The prompt's part of a choice's logprobs; NULL: it has none. */
static const struct text_buffer *echoed_lists(const struct openai_answer *a, uint32_t choice)
{
    if (!a->scores || !a->options.echo || !a->options.logprobs) return NULL;
    return a->scores[choice / a->options.n].lists;
}

static void take_logprobs(const struct openai_answer *a, const struct openai_choice *c,
                          const Tandem__V1__GenerateResponse *m, struct text_buffer lists[4])
{
    for (size_t i = 0; i < m->n_logprobs && i < m->n_token_ids; i++) {
        if (!a->options.is_chat) {
            completion_logprob(a, m->token_ids[i], c->n_before + m->logprobs[i]->text_offset,
                               m->logprobs[i], lists);
            continue;
        }
        if (lists[0].n) text_addf(&lists[0], ",");
        chat_logprob(a, m->token_ids[i], m->logprobs[i], &lists[0]);
    }
}

/* before: the prompt's lists, or NULL. */
static void write_logprobs(const struct openai_answer *a, const struct text_buffer *before,
                           const struct text_buffer lists[4], struct text_buffer *out)
{
    static const char *const names[] = {"tokens", "token_logprobs", "top_logprobs", "text_offset"};
    text_adds(out, ",\"logprobs\":");
    if (!a->options.logprobs || (!lists[0].n && !before)) {
        text_adds(out, "null");
        return;
    }
    if (a->options.is_chat) {
        text_adds(out, "{\"content\":[");
        text_add(out, lists[0].bytes, lists[0].n);
        text_adds(out, "]}");
        return;
    }
    for (int i = 0; i < 4; i++) {
        text_addf(out, "%s\"%s\":[", i ? "," : "{", names[i]);
        if (before) text_add(out, before[i].bytes, before[i].n);
        if (before && lists[i].n) text_adds(out, ",");
        text_add(out, lists[i].bytes, lists[i].n);
        text_adds(out, "]");
    }
    text_adds(out, "}");
}

/* ---- messages -------------------------------------------------------------------------------- */

static const char *finish_name(Tandem__V1__FinishReason finish)
{
    if (finish == TANDEM__V1__FINISH_REASON__FINISH_TOOL_CALLS) return "tool_calls";
    return finish == TANDEM__V1__FINISH_REASON__FINISH_LENGTH ? "length" : "stop";
}

/* finish_reason, and stop_reason as vLLM has it: the stop string, or the token of stop_token_ids;
 * null for the model's own end. */
static void write_finish(const Tandem__V1__GenerateResponse *m, struct text_buffer *out)
{
    if (m->finish_reason == TANDEM__V1__FINISH_REASON__FINISH_NONE) {
        text_adds(out, ",\"finish_reason\":null");
        return;
    }
    const char *name = finish_name(m->finish_reason);
    text_adds(out, ",\"finish_reason\":\"");
    text_add(out, name, strlen(name));
    text_adds(out, "\",\"stop_reason\":");
    if (m->has_stop_token_id_case && !m->own_end)
        text_addf(out, "%d", m->stop_token_id);
    else if (m->has_stop_token_id_case || !m->stop_reason.len)
        text_adds(out, "null");
    else
        text_add_json(out, (const char *)m->stop_reason.data, m->stop_reason.len);
}

/* So far; whole: of all choices. */
static void write_usage(const struct openai_answer *a, bool whole, struct text_buffer *out)
{
    text_adds(out, ",\"usage\":{\"prompt_tokens\":");
    text_add_u64(out, a->n_prompt);
    text_adds(out, ",\"completion_tokens\":");
    text_add_u64(out, a->n_output);
    text_adds(out, ",\"total_tokens\":");
    text_add_u64(out, (uint32_t)(a->n_prompt + a->n_output));
    if (whole) {
        text_adds(out, ",\"prompt_tokens_details\":{\"cached_tokens\":");
        text_add_u64(out, a->n_cached);
        text_adds(out, "}");
    }
    text_adds(out, "}");
}

static void write_head(const struct openai_answer *a, const char *object, struct text_buffer *out)
{
    text_adds(out, "{\"id\":");
    text_add_json(out, a->id, strlen(a->id));
    text_adds(out, ",\"object\":\"");
    text_add(out, object, strlen(object));
    text_adds(out, "\",\"created\":");
    if (a->created_s < 0) text_adds(out, "-"); /* a client's Last-Event-ID has it */
    text_add_u64(out, a->created_s < 0 ? 0 - (uint64_t)a->created_s : (uint64_t)a->created_s);
    text_adds(out, ",\"model\":");
    text_add_json(out, a->model, strlen(a->model));
}

/* The same bytes begin every event of a stream, up to its choices: they are made once. */
static void write_event_head(struct openai_answer *a, struct text_buffer *out)
{
    struct text_buffer *head = &a->event_head;
    if (!head->n) {
        text_adds(head, "data: ");
        write_head(a, a->options.is_chat ? "chat.completion.chunk" : "text_completion", head);
        text_adds(head, ",\"choices\":[");
    }
    if (head->failed) out->failed = true;
    text_add(out, head->bytes, head->n);
}

static void write_call_delta(const Tandem__V1__ToolCallDelta *c, struct text_buffer *out)
{
    text_addf(out, "{\"index\":%u", c->index);
    if (c->id[0]) {
        text_adds(out, ",\"id\":");
        text_add_json(out, c->id, strlen(c->id));
        text_adds(out, ",\"type\":\"function\"");
    }
    text_adds(out, ",\"function\":{");
    if (c->name[0]) {
        text_adds(out, "\"name\":");
        text_add_json(out, c->name, strlen(c->name));
        text_adds(out, ",");
    }
    text_adds(out, "\"arguments\":");
    text_add_json(out, (const char *)c->arguments.data, c->arguments.len);
    text_adds(out, "}}");
}

/* The first delta has the role; then each has what the message has. */
static void write_delta(const struct openai_choice *c, const Tandem__V1__GenerateResponse *m,
                        struct text_buffer *out)
{
    const char *comma = "";
    bool other = m->reasoning.len || m->n_tool_calls;
    text_adds(out, "\"delta\":{");
    if (!c->begun) {
        text_adds(out, "\"role\":\"assistant\"");
        comma = ",";
    }
    if (m->text.len || (!other && !c->begun)) {
        if (comma[0]) text_adds(out, ",");
        text_adds(out, "\"content\":");
        text_add_json(out, (const char *)m->text.data, m->text.len);
        comma = ",";
    }
    if (m->reasoning.len) {
        text_addf(out, "%s\"reasoning_content\":", comma);
        text_add_json(out, (const char *)m->reasoning.data, m->reasoning.len);
        comma = ",";
    }
    for (size_t i = 0; i < m->n_tool_calls; i++) {
        text_addf(out, i ? "," : "%s\"tool_calls\":[", comma);
        write_call_delta(m->tool_calls[i], out);
    }
    text_addf(out, m->n_tool_calls ? "]}" : "}");
}

static void add_ids(const Tandem__V1__GenerateResponse *m, struct text_buffer *b)
{
    for (size_t i = 0; i < m->n_token_ids; i++) text_addf(b, b->n ? ",%d" : "%d", m->token_ids[i]);
}

static void write_ids(const struct openai_answer *a, const struct text_buffer *ids,
                      struct text_buffer *out)
{
    if (!a->options.token_ids) return;
    text_adds(out, ",\"token_ids\":[");
    text_add(out, ids->bytes, ids->n);
    text_adds(out, "]");
}

/* Counts the event that began at `begin`; the client has it already: takes it back. */
static void end_event(struct openai_answer *a, const Tandem__V1__GenerateResponse *m, size_t begin,
                      struct text_buffer *out)
{
    if (!a->options.event_ids || m->choice >= OPENAI_MAX_EVENT_CHOICES) {
        text_adds(out, "\n\n");
        return;
    }
    uint32_t check = a->at.events[m->choice].check, n = ++a->at.events[m->choice].n,
             n_had = a->after.events[m->choice].n;
    check = openai_event_check(check, m->text.data, m->text.len);
    check = openai_event_check(check, m->reasoning.data, m->reasoning.len);
    for (size_t i = 0; i < m->n_tool_calls; i++)
        check = openai_event_check(check, m->tool_calls[i]->arguments.data,
                                   m->tool_calls[i]->arguments.len);
    a->at.events[m->choice].check = check;
    a->differs |= n == n_had && check != a->after.events[m->choice].check;
    /* the answer ends before what the client has of it */
    a->differs |= n < n_had && m->finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE;
    if (n <= n_had) {
        out->n = begin;
        return;
    }
    text_adds(out, "\nid: ");
    openai_event_id_write(&a->at, out);
    text_adds(out, "\n\n");
}

static void write_chunk(struct openai_answer *a, struct openai_choice *c,
                        const Tandem__V1__GenerateResponse *m, const struct text_buffer lists[4],
                        struct text_buffer *out)
{
    size_t begin = out->n;
    write_event_head(a, out);
    text_adds(out, "{\"index\":");
    text_add_u64(out, m->choice);
    text_adds(out, ",");
    if (a->options.is_chat) {
        write_delta(c, m, out);
    } else {
        text_adds(out, "\"text\":");
        text_add_json(out, (const char *)m->text.data, m->text.len);
    }
    write_logprobs(a, c->begun ? NULL : echoed_lists(a, m->choice), lists, out);
    if (a->options.token_ids) {
        struct text_buffer ids = {0};
        add_ids(m, &ids);
        write_ids(a, &ids, out);
        text_free(&ids);
    }
    write_finish(m, out);
    text_adds(out, "}]");
    if (a->options.continuous_usage)
        write_usage(a, m->usage != NULL, out);
    else if (a->options.include_usage)
        text_adds(out, ",\"usage\":null");
    text_adds(out, "}");
    end_event(a, m, begin, out);
    c->begun = true;
}

/* Members as the trailing metadata of gRPC has them; who the workers are is for operators. */
static void take_ledger(struct openai_answer *a, const Tandem__V1__Ledger *l)
{
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {{"router_queue_us", l->router_queue_us},
                   {"reserve_us", l->reserve_us},
                   {"prefill_queue_us", l->prefill_queue_us},
                   {"prefill_us", l->prefill_us},
                   {"rpc_us", l->rpc_us},
                   {"ttft_us", l->ttft_us},
                   {"transfer_us", l->transfer_us},
                   {"transfer_exposed_us", l->transfer_exposed_us},
                   {"decode_queue_us", l->decode_queue_us},
                   {"first_step_us", l->first_step_us},
                   {"e2e_us", l->e2e_us},
                   {"transfer_bytes", l->transfer_bytes},
                   {"preemptions", l->preemptions},
                   {"failovers", l->failovers},
                   {"predicted_ttft_us", l->predicted_ttft_us},
                   {"predicted_tpot_us", l->predicted_tpot_us},
                   {"slo_ttft_us", l->slo_ttft_us},
                   {"slo_tpot_us", l->slo_tpot_us}};
    const struct {
        const char *name, *value;
    } words[] = {
        {"slo_class", l->slo_class}, {"transfer_path", l->transfer_path}, {"mode", l->mode}};
    struct text_buffer *out = &a->ledger;
    text_adds(out, ",\"ledger\":{");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        text_addf(out, i ? ",\"%s\":%llu" : "\"%s\":%llu", numbers[i].name,
                  (unsigned long long)numbers[i].value);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        text_addf(out, ",\"%s\":", words[i].name);
        text_add_json(out, words[i].value, strlen(words[i].value));
    }
    text_adds(out, "}");
}

static void end_stream(struct openai_answer *a, struct text_buffer *out)
{
    if (a->options.include_usage || a->ledger.n) {
        write_event_head(a, out);
        text_adds(out, "]");
        if (a->options.include_usage) write_usage(a, true, out);
        if (a->ledger.failed) out->failed = true;
        text_add(out, a->ledger.bytes, a->ledger.n);
        text_adds(out, "}\n\n");
    }
    text_adds(out, "data: [DONE]\n\n");
}

static void write_message(const struct openai_choice *c, struct text_buffer *out)
{
    text_adds(out, "\"message\":{\"role\":\"assistant\",\"content\":");
    if (c->n_calls && !c->text.n)
        text_adds(out, "null");
    else
        text_add_json(out, c->text.bytes, c->text.n);
    if (c->reasoning.n) {
        text_adds(out, ",\"reasoning_content\":");
        text_add_json(out, c->reasoning.bytes, c->reasoning.n);
    }
    for (size_t i = 0; i < c->n_calls; i++) {
        const struct openai_call *k = &c->calls[i];
        text_addf(out, i ? ",{\"id\":" : ",\"tool_calls\":[{\"id\":");
        text_add_json(out, k->id, strlen(k->id));
        text_adds(out, ",\"type\":\"function\",\"function\":{\"name\":");
        text_add_json(out, k->name, strlen(k->name));
        text_adds(out, ",\"arguments\":");
        text_add_json(out, k->arguments.bytes, k->arguments.n);
        text_adds(out, "}}");
    }
    if (c->n_calls) text_adds(out, "]");
    text_adds(out, "}");
}

static void write_body(struct openai_answer *a, struct text_buffer *out)
{
    write_head(a, a->options.is_chat ? "chat.completion" : "text_completion", out);
    text_adds(out, ",\"choices\":[");
    for (uint32_t i = 0; i < a->n_choices; i++) {
        const struct openai_choice *c = &a->choices[i];
        if (i) text_adds(out, ",");
        text_adds(out, "{\"index\":");
        text_add_u64(out, i);
        text_adds(out, ",");
        if (a->options.is_chat) {
            write_message(c, out);
        } else {
            text_adds(out, "\"text\":");
            text_add_json(out, c->text.bytes, c->text.n);
        }
        write_logprobs(a, echoed_lists(a, i), c->logprobs, out);
        write_ids(a, &c->ids, out);
        text_add(out, c->finish.bytes, c->finish.n);
        if (!a->options.is_chat) write_scores(a, i / a->options.n, out);
        text_adds(out, "}");
    }
    text_adds(out, "]");
    if (a->options.is_chat) write_scores(a, 0, out);
    write_usage(a, true, out);
    text_adds(out, "}");
}

/* A piece of a call into the whole answer; false: no memory. Calls come in the order of their
 * index, each begun before the next. */
static bool take_call(struct openai_answer *a, struct openai_choice *to,
                      const Tandem__V1__ToolCallDelta *d)
{
    if (d->index >= to->n_calls) {
        struct openai_call *calls = realloc(to->calls, (to->n_calls + 1) * sizeof *calls);
        if (!calls) return false;
        to->calls = calls;
        struct openai_call *c = &calls[to->n_calls++];
        *c = (struct openai_call){0};
        snprintf(c->id, sizeof c->id, "%s", d->id);
        snprintf(c->name, sizeof c->name, "%s", d->name);
        a->n_collected += sizeof *c;
    }
    a->n_collected += d->arguments.len;
    struct text_buffer *arguments = &to->calls[to->n_calls - 1].arguments;
    text_add(arguments, (const char *)d->arguments.data, d->arguments.len);
    return !arguments->failed;
}

static void collect(struct openai_answer *a, struct openai_choice *c,
                    const Tandem__V1__GenerateResponse *m, struct text_buffer *out)
{
    size_t n_before = c->ids.n + c->finish.n + lists_bytes(c->logprobs);
    if (a->options.logprobs) take_logprobs(a, c, m, c->logprobs);
    text_add(&c->text, (const char *)m->text.data, m->text.len);
    text_add(&c->reasoning, (const char *)m->reasoning.data, m->reasoning.len);
    if (a->options.token_ids) add_ids(m, &c->ids);
    bool ok = !c->text.failed && !c->reasoning.failed && !c->ids.failed;
    for (size_t i = 0; i < m->n_tool_calls; i++) ok = take_call(a, c, m->tool_calls[i]) && ok;
    if (m->finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE) write_finish(m, &c->finish);
    if (!ok || c->finish.failed) out->failed = true;
    a->n_collected += m->text.len + m->reasoning.len;
    a->n_collected += c->ids.n + c->finish.n + lists_bytes(c->logprobs) - n_before;
}

/* The choice of a message; NULL: no memory. There are as many as the request could have. */
static struct openai_choice *choice_of(struct openai_answer *a, uint32_t at)
{
    if (at < a->n_choices) return &a->choices[at];
    struct openai_choice *more = realloc(a->choices, (at + 1) * sizeof *more);
    if (!more) return NULL;
    memset(more + a->n_choices, 0, (at + 1 - a->n_choices) * sizeof *more);
    a->choices = more;
    a->n_choices = at + 1;
    return &more[at];
}

/* The last message of a choice has the exact counts; before it the ids are counted. A prompt counts
 * once, by whichever of its choices tells first. */
static void count(struct openai_answer *a, struct openai_choice *c,
                  const Tandem__V1__GenerateResponse *m)
{
    uint32_t first_at = m->choice - m->choice % a->options.n;
    struct openai_choice *first = &a->choices[first_at];
    uint32_t n_prompt = m->usage ? m->usage->prompt_tokens : m->prompt_tokens;
    if (n_prompt) a->n_prompt += n_prompt - first->n_prompt;
    if (n_prompt) first->n_prompt = n_prompt;
    c->n_output += (uint32_t)m->n_token_ids;
    a->n_output += (uint32_t)m->n_token_ids;
    if (m->usage) a->n_output += m->usage->output_tokens - c->n_output;
    if (m->usage && m->choice == first_at) a->n_cached += m->usage->cached_tokens;
}

static void add(struct openai_answer *a, const Tandem__V1__GenerateResponse *m,
                struct text_buffer *out)
{
    bool last = m->finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE;
    bool says = m->text.len || m->reasoning.len || m->n_tool_calls ||
                (a->options.token_ids && m->n_token_ids);
    struct openai_choice *c = choice_of(a, m->choice);
    if (!c) {
        out->failed = true;
        return;
    }
    struct text_buffer lists[4] = {0};
    count(a, c, m);
    if (m->max_tokens && a->options.event_ids) { /* a choice's first message */
        a->at.seed = m->seed - m->choice % a->options.n;
        a->at.max_tokens = m->max_tokens;
        if (a->options.n_prompts == 1) a->at.prompt_hash = m->prompt_hash;
    }
    a->n_ended += last;
    if (last && m->ledger && a->options.include_ledger && m->choice == 0) take_ledger(a, m->ledger);
    bool all = last && a->n_ended == a->options.n * a->options.n_prompts;
    if (a->options.stream) {
        if (a->options.logprobs) take_logprobs(a, c, m, lists);
        if (says || lists[0].n || last || !c->begun) write_chunk(a, c, m, lists, out);
        if (all) end_stream(a, out);
        for (int i = 0; i < 4; i++) text_free(&lists[i]);
    } else {
        collect(a, c, m, out);
        if (all) write_body(a, out);
    }
}

void openai_answer_add(struct openai_answer *a, const Tandem__V1__GenerateResponse *m,
                       struct text_buffer *out)
{
    Tandem__V1__GenerateResponse shown = *m;
    if (a->options.hide_reasoning) shown.reasoning.len = 0;
    m = &shown;
    if (m->n_prompt_logprobs) {
        take_scores(a, m, out);
        return;
    }
    struct openai_choice *c = a->prompts ? choice_of(a, m->choice) : NULL;
    if (!c || c->echoed) {
        add(a, m, out);
        return;
    }
    const struct text_buffer *prompt = &a->prompts[m->choice / a->options.n].text;
    struct text_buffer whole = {0};
    text_add(&whole, prompt->bytes, prompt->n);
    text_add(&whole, (const char *)m->text.data, m->text.len);
    Tandem__V1__GenerateResponse first = *m;
    first.text = (ProtobufCBinaryData){whole.n, (uint8_t *)whole.bytes};
    c->echoed = true;
    c->n_before = router_count_characters(prompt->bytes, prompt->n);
    add(a, &first, out);
    if (whole.failed) out->failed = true;
    text_free(&whole);
}

void openai_answer_free(struct openai_answer *a)
{
    for (uint32_t i = 0; a->prompts && i < a->options.n_prompts; i++)
        text_free(&a->prompts[i].text);
    free(a->prompts);
    for (uint32_t i = 0; a->scores && i < a->options.n_prompts; i++) {
        for (int k = 0; k < 4; k++) text_free(&a->scores[i].lists[k]);
        text_free(&a->scores[i].elements);
        td_detokenizer_free(a->scores[i].detok);
    }
    free(a->scores);
    text_free(&a->event_head);
    text_free(&a->ledger);
    for (uint32_t i = 0; i < a->n_choices; i++) {
        struct openai_choice *c = &a->choices[i];
        text_free(&c->text);
        text_free(&c->reasoning);
        text_free(&c->finish);
        text_free(&c->ids);
        for (size_t k = 0; k < c->n_calls; k++) text_free(&c->calls[k].arguments);
        free(c->calls);
        for (int k = 0; k < 4; k++) text_free(&c->logprobs[k]);
    }
    free(a->choices);
}
