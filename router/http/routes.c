/* routes.c - what each path of the HTTP door does. The table is at the end. */
#include "router/http/call.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/base/clock.h"
#include "common/base/metrics.h"
#include "router/http/status_json.h"

enum { MAX_ECHO_BYTES = 8 << 20 }; /* of all choices */

/* ---- requests for text ----------------------------------------------------------------------- */

static td_status read_headers(struct http_call *c, struct td_err *err)
{
    const char *name;
    for (size_t i = 0; (name = openai_header_name(i)); i++) {
        const char *v = MHD_lookup_connection_value(c->mhd, MHD_HEADER_KIND, name);
        td_status s = v ? openai_request_header(c->parsed, i, v, err) : TD_OK;
        if (s) snprintf(c->param, sizeof c->param, "%s", name);
        if (s) return s;
    }
    return TD_OK;
}

static td_status parse(struct http_call *c, enum openai_kind kind, struct td_err *err)
{
    return openai_request_parse(c->body ? c->body : "", c->n_body, kind, &c->parsed, c->param, err);
}

static td_status read_generate(struct http_call *c, enum openai_kind kind, struct td_err *err)
{
    td_status s = parse(c, kind, err);
    if (!s) s = read_headers(c, err);
    if (!s) http_call_name(c, openai_request_message(c->parsed)->request_id);
    const char *after = MHD_lookup_connection_value(c->mhd, MHD_HEADER_KIND, "last-event-id");
    if (!s && after && after[0]) {
        s = openai_request_resume(c->parsed, after, err);
        snprintf(c->param, sizeof c->param, s ? "Last-Event-ID" : "");
        if (!s)
            snprintf(c->request_id, sizeof c->request_id, "%s",
                     openai_request_resumed(c->parsed)->request_id);
    }
    if (!s) c->is_stream = openai_request_options(c->parsed)->stream;
    return s;
}

static td_status read_completion(struct http_call *c, struct td_err *err)
{
    return read_generate(c, OPENAI_COMPLETION, err);
}

static td_status read_chat(struct http_call *c, struct td_err *err)
{
    return read_generate(c, OPENAI_CHAT, err);
}

/* The prompts, for echo. */
static td_status fill_prompts(struct openai_answer *a, const struct served_model *m,
                              const Tandem__V1__GenerateRequest *const *in, struct td_err *err)
{
    size_t n_bytes = 0;
    a->prompts = calloc(a->options.n_prompts, sizeof *a->prompts);
    bool ok = a->prompts != NULL;
    for (uint32_t i = 0; ok && i < a->options.n_prompts; i++) {
        struct openai_echo *prompt = &a->prompts[i];
        char *text = NULL;
        size_t n = 0;
        td_status s = TD_OK;
        prompt->is_text = in[i]->input_case == TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT;
        if (prompt->is_text)
            text_add(&prompt->text, (const char *)in[i]->prompt.data, in[i]->prompt.len);
        else
            s = inference_detokenize(m, in[i]->token_ids->ids, in[i]->token_ids->n_ids, &text, &n,
                                     err);
        if (s) return s;
        text_add(&prompt->text, text, n);
        free(text);
        n_bytes += prompt->text.n;
        ok = !prompt->text.failed;
        if (n_bytes > MAX_ECHO_BYTES / a->options.n)
            return td_fail(err, TD_ERR_INVALID,
                           "echo is of at least %zu bytes for each of %u choices, limit %d",
                           n_bytes, a->options.n, MAX_ECHO_BYTES);
    }
    return ok ? TD_OK : td_fail(err, TD_ERR_AGAIN, "no memory for the prompts");
}

static void generate(struct http_call *c)
{
    struct router *r = c->http->router;
    Tandem__V1__GenerateRequest *in = openai_request_message(c->parsed);
    struct openai_answer *a = &c->answer;
    a->options = *openai_request_options(c->parsed);
    struct served_model *m = NULL;
    if (!router_find_model(r, in->model, &m, NULL)) { /* else inference_generate refuses it */
        a->tokenizer = m->tokenizer;
        router_copy_text(a->model, sizeof a->model,
                         in->model[0] ? in->model : served_model_name(m));
    }
    const struct openai_event_id *after = openai_request_resumed(c->parsed);
    if (after) a->after = *after;
    a->created_s = after ? after->created_s : (int64_t)time(NULL);
    a->at.created_s = a->created_s;
    a->at.n_choices = a->options.event_ids ? a->options.n * a->options.n_prompts : 0;
    router_copy_text(a->at.request_id, sizeof a->at.request_id, c->request_id);
    size_t n_kind = a->options.is_chat ? sizeof "chatcmpl-" - 1 : sizeof "cmpl-" - 1;
    router_copy_text(a->id, sizeof a->id, a->options.is_chat ? "chatcmpl-" : "cmpl-");
    router_copy_text(a->id + n_kind, sizeof a->id - n_kind, c->request_id);
    if (!in->request_id[0]) in->request_id = c->request_id;
    const Tandem__V1__GenerateRequest *const *all = openai_request_messages(c->parsed);
    struct td_err err = {0};
    if (a->options.echo && !inference_may_call(r, http_call_client(c))) return;
    td_status s = all ? TD_OK : td_fail(&err, TD_ERR_AGAIN, "no memory for the prompts");
    if (!s && a->options.echo && m) s = fill_prompts(a, m, all, &err);
    if (s)
        http_ops.finish(c, td_rpc_code(s), err.msg, NULL, 0);
    else
        inference_generate(r, http_call_client(c), all, a->options.n_prompts);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static td_status read_tokenize(struct http_call *c, struct td_err *err)
{
    td_status s = parse(c, OPENAI_EITHER, err);
    if (s || openai_request_options(c->parsed)->n_prompts == 1) return s;
    snprintf(c->param, sizeof c->param, "prompt");
    return td_fail(err, TD_ERR_INVALID, "prompt is a list of %u prompts, must be one",
                   openai_request_options(c->parsed)->n_prompts);
}

/* As the vocabulary has them; vLLM's name. */
static void add_token_texts(const struct served_model *m, const struct td_token_list *list,
                            struct text_buffer *text)
{
    text_adds(text, ",\"token_strs\":[");
    for (size_t i = 0; i < list->n; i++) {
        size_t n = 0;
        const char *s = td_tokenizer_token_text(m->tokenizer, list->ids[i], &n);
        if (i) text_adds(text, ",");
        text_add_json(text, s ? s : "", s ? n : 0);
    }
    text_adds(text, "]");
}

static void tokenize(struct http_call *c)
{
    struct router *r = c->http->router;
    Tandem__V1__GenerateRequest *in = openai_request_message(c->parsed);
    Tandem__V1__TokenizeRequest ask = TANDEM__V1__TOKENIZE_REQUEST__INIT;
    if (!inference_may_call(r, http_call_client(c))) return;
    ask.model = in->model;
    ask.no_special_tokens = in->no_special_tokens;
    if (in->input_case == TANDEM__V1__GENERATE_REQUEST__INPUT_CHAT) {
        ask.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_CHAT;
        ask.chat = in->chat;
    } else if (in->input_case == TANDEM__V1__GENERATE_REQUEST__INPUT_PROMPT) {
        ask.input_case = TANDEM__V1__TOKENIZE_REQUEST__INPUT_PROMPT;
        ask.prompt = in->prompt;
    }
    struct td_token_list list = {0};
    struct td_err err = {0};
    struct text_buffer text = {0};
    struct served_model *m = NULL;
    td_status s = router_find_model(r, ask.model, &m, &err);
    if (!s) s = inference_tokenize(m, &ask, &list, &err);
    if (s) {
        http_ops.finish(c, td_rpc_code(s), err.msg, NULL, 0);
    } else {
        text_addf(&text, "{\"count\":%zu,\"max_model_len\":%u,\"tokens\":[", list.n,
                  served_model_max_len(m));
        for (size_t i = 0; i < list.n; i++) text_addf(&text, i ? ",%d" : "%d", list.ids[i]);
        text_addf(&text, "]");
        if (openai_request_options(c->parsed)->token_texts) add_token_texts(m, &list, &text);
        text_addf(&text, "}");
        http_call_finish_json(c, &text);
    }
    td_token_list_free(&list);
}

static td_status read_tokens(struct http_call *c, struct td_err *err)
{
    return parse(c, OPENAI_TOKENS, err);
}

static void detokenize(struct http_call *c)
{
    struct router *r = c->http->router;
    const Tandem__V1__GenerateRequest *in = openai_request_message(c->parsed);
    struct td_err err = {0};
    struct text_buffer json = {0};
    struct served_model *m;
    char *text = NULL;
    size_t n = 0;
    if (!inference_may_call(r, http_call_client(c))) return;
    td_status s = router_find_model(r, in->model, &m, &err);
    if (!s) s = inference_detokenize(m, in->token_ids->ids, in->token_ids->n_ids, &text, &n, &err);
    if (s) {
        http_ops.finish(c, td_rpc_code(s), err.msg, NULL, 0);
        return;
    }
    text_addf(&json, "{\"prompt\":");
    text_add_json(&json, text, n);
    text_addf(&json, "}");
    free(text);
    http_call_finish_json(c, &json);
}

/* ---- what is served, and how it is ----------------------------------------------------------- */

/* An alias is a model of its own to a client that looks for its name; its root is the name. */
static void add_model(struct text_buffer *text, bool is_first, const struct served_model *m,
                      uint32_t name_at, time_t created)
{
    const char *id = m->names.names[name_at], *root = served_model_name(m);
    text_addf(text, is_first ? "{\"id\":" : ",{\"id\":");
    text_add_json(text, id, strlen(id));
    text_addf(text, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"tandem\",\"root\":",
              (long long)created);
    if (name_at)
        text_add_json(text, root, strlen(root));
    else
        text_addf(text, "null");
    text_addf(text, ",\"parent\":null,\"max_model_len\":%u}", served_model_max_len(m));
}

static time_t started_at(const struct router *r)
{
    return time(NULL) - (time_t)((td_now_ns() - r->started_ns) / TD_NS_PER_S);
}

static void list_models(struct http_call *c)
{
    struct router *r = c->http->router;
    struct text_buffer text = {0};
    if (!inference_may_call(r, http_call_client(c))) return;
    time_t started = started_at(r);
    text_addf(&text, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; i < r->n_models; i++)
        for (uint32_t k = 0; k < r->models[i]->names.n; k++)
            add_model(&text, i + k == 0, r->models[i], k, started);
    text_addf(&text, "]}");
    http_call_finish_json(c, &text);
}

/* The one of its name, which is the path's end. */
static void tell_model(struct http_call *c)
{
    struct router *r = c->http->router;
    struct served_model *m = NULL;
    struct text_buffer text = {0};
    struct td_err err = {0};
    if (!inference_may_call(r, http_call_client(c))) return;
    td_status s = router_find_model(r, c->model, &m, &err);
    if (s) {
        http_ops.finish(c, td_rpc_code(s), err.msg, NULL, 0);
        return;
    }
    uint32_t k = 0;
    while (k + 1 < m->names.n && strcmp(m->names.names[k], c->model)) k++;
    add_model(&text, true, m, k, started_at(r));
    http_call_finish_json(c, &text);
}

static void take_status(void *ctx, const Tandem__V1__StatusResponse *status)
{
    struct text_buffer *text = ctx;
    json_t *root = status_json(status);
    char *json = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    if (json)
        text_add(text, json, strlen(json));
    else
        text->failed = true;
    free(json);
}

/* Of workers a client sees role and state, as over gRPC; an operator shows a certificate or key. */
static void tell_status(struct http_call *c)
{
    struct router *r = c->http->router;
    struct text_buffer text = {0};
    bool all;
    if (!inference_may_see_all(r, http_call_client(c), &all)) return;
    if (!inference_status(r, all, take_status, &text)) text.failed = true;
    http_call_finish_json(c, &text);
}

static enum MHD_Result tell_health(struct http_call *c)
{
    const struct router_http_config *g = &c->http->config;
    struct text_buffer text = {0};
    if (!g->healthy(g->ctx)) c->retry_s = 1;
    if (!g->healthy(g->ctx))
        return http_call_answer_error(c, MHD_HTTP_SERVICE_UNAVAILABLE,
                                      "the gRPC port does not answer", "");
    text_addf(&text, "{\"status\":\"ok\"}");
    return http_call_answer(c, &text, MHD_HTTP_OK, "application/json");
}

static enum MHD_Result tell_version(struct http_call *c)
{
    struct text_buffer text = {0};
    text_addf(&text, "{\"version\":\"" TD_VERSION "\"}");
    return http_call_answer(c, &text, MHD_HTTP_OK, "application/json");
}

static enum MHD_Result tell_metrics(struct http_call *c)
{
    struct text_buffer text = {0};
    text.bytes = td_metrics_render(&text.n);
    if (!text.bytes) return MHD_NO;
    return http_call_answer(c, &text, MHD_HTTP_OK, "text/plain; version=0.0.4");
}

/* ---- the table ------------------------------------------------------------------------------- */

static const struct http_route routes[] = {
    {"/v1/completions", "POST", .read = read_completion, .on_loop = generate, .is_limited = true},
    {"/v1/chat/completions", "POST", .read = read_chat, .on_loop = generate, .is_limited = true},
    {"/v1/models", "GET", .on_loop = list_models},
    {"/tokenize", "POST", .read = read_tokenize, .on_loop = tokenize},
    {"/detokenize", "POST", .read = read_tokens, .on_loop = detokenize},
    {"/v1/status", "GET", .on_loop = tell_status},
    {"/health", "GET", .answer_here = tell_health},
    {"/ping", "GET", .answer_here = tell_health},
    {"/", "GET", .answer_here = http_page_answer},
    {"/version", "GET", .answer_here = tell_version},
    {"/metrics", "GET", .answer_here = tell_metrics},
};

static const struct http_route one_model = {"", "GET", .on_loop = tell_model};

const struct http_route *http_route_find(const char *path, const char *method,
                                         char ret_model[HTTP_MODEL_BYTES], unsigned *ret_status,
                                         const char **ret_allowed)
{
    static const char models[] = "/v1/models/";
    const char *name = strncmp(path, models, sizeof models - 1) ? "" : path + sizeof models - 1;
    unsigned status = MHD_HTTP_NOT_FOUND;
    if (name[0] && strlen(name) < HTTP_MODEL_BYTES) {
        memcpy(ret_model, name, strlen(name) + 1);
        if (!strcmp(method, one_model.method)) return &one_model;
        *ret_allowed = one_model.method;
        status = MHD_HTTP_METHOD_NOT_ALLOWED;
    }
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        if (strcmp(path, routes[i].path)) continue;
        if (!strcmp(method, routes[i].method)) return &routes[i];
        *ret_allowed = routes[i].method;
        status = MHD_HTTP_METHOD_NOT_ALLOWED;
    }
    *ret_status = status;
    return NULL;
}
