/* openai_request.h - the body of POST /v1/completions and /v1/chat/completions as a
 * GenerateRequest.
 *
 * The fields are OpenAI's and vLLM's; the reference is their API pages. Three kinds: fields that a
 * GenerateRequest has; harmless ones, known or not, which pass unread (user, metadata, store ...);
 * and those that would change the answer and that are not there yet, which are refused by name
 * unless they ask for nothing (n 1, tools [], response_format text, null anywhere).
 *
 * Values are checked where they are used (inference.c), so both doors answer with the same words;
 * here only what JSON can get wrong is: types, and integers that do not fit.
 *
 * Threads: none of its own. Bounds: OPENAI_MAX_VALUES, OPENAI_MAX_NAMES, 2,048 levels (jansson);
 * lists have the caller's bound on the body, and the limits of a GenerateRequest. */
#ifndef TD_ROUTER_HTTP_OPENAI_REQUEST_H
#define TD_ROUTER_HTTP_OPENAI_REQUEST_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#include "common/base/status.h"
#include "router/http/event_id.h"
#include "tandem/v1/inference.pb-c.h"

enum { OPENAI_COMPLETION_TOKENS = 16 }; /* max_tokens of a completion that does not say */
/* Of a body: values, whatever they are, and names of objects' members. */
enum { OPENAI_MAX_VALUES = (1 << 20) + (1 << 16), OPENAI_MAX_NAMES = 1 << 16 };

struct openai_request;

/* EITHER: chat when there are messages (POST /tokenize). TOKENS: a model and tokens alone
 * (POST /detokenize). */
enum openai_kind { OPENAI_COMPLETION, OPENAI_CHAT, OPENAI_EITHER, OPENAI_TOKENS };

struct openai_options {
    bool is_chat, stream, include_usage, continuous_usage;
    bool include_ledger;   /* a stream's last chunk has the ledger */
    bool event_ids;        /* a stream's events have ids, behind which it can go on */
    bool token_ids;        /* each choice has the ids of its tokens */
    bool token_labels;     /* a token in logprobs is "token_id:N" in place of its text */
    bool token_texts;      /* POST /tokenize: each token as the vocabulary has it */
    bool hide_reasoning;   /* what a model thinks is not part of the answer */
    bool echo;             /* a completion's text begins with its prompt */
    bool logprobs;         /* asked for; how many alternatives is in the GenerateRequest */
    bool completion_limit; /* max_completion_tokens is what the client calls max_tokens */
    bool prompt_logprobs;  /* asked for by that name; echo with logprobs has them in its lists */
    const char *guide;     /* the field that structured output was asked by; NULL: none */
    uint32_t n, n_prompts; /* choices of each prompt: n * n_prompts in all */
};

/* What a body becomes in memory is told by its values and names, not by its bytes: 31 MiB of "[],"
 * are 1.4 GiB, and 30 MiB of names take 6 s. So they are counted before it is parsed, in one pass.
 * TD_ERR_INVALID: above the limits. */
td_status openai_check_body(const char *body, size_t n_bytes, struct td_err *err);

/* *ret_request is freed by openai_request_free. On an error ret_param (64 bytes) holds the field's
 * name, or "". */
td_status openai_request_parse(const char *body, size_t n_bytes, enum openai_kind kind,
                               struct openai_request **ret_request, char *ret_param,
                               struct td_err *err);
/* The same of a body that is JSON already; takes root over, also on an error. */
td_status openai_request_take(json_t *root, enum openai_kind kind,
                              struct openai_request **ret_request, char *ret_param,
                              struct td_err *err);
void openai_request_free(struct openai_request *q); /* NULL is fine */
const struct openai_options *openai_request_options(const struct openai_request *q);
/* The first prompt's. Borrowed, and valid while q is. The caller may set its strings. */
Tandem__V1__GenerateRequest *openai_request_message(struct openai_request *q);
/* One for each prompt, as the first is now; [options.n_prompts], borrowed and valid while q is.
 * NULL: no memory. */
const Tandem__V1__GenerateRequest *const *openai_request_messages(struct openai_request *q);
/* From the header Last-Event-ID: the stream goes on behind that event, with the body's
 * resume_token_ids. TD_ERR_INVALID: it is none of a stream of this request. */
td_status openai_request_resume(struct openai_request *q, const char *value, struct td_err *err);
/* That event; NULL: the answer begins. */
const struct openai_event_id *openai_request_resumed(const struct openai_request *q);
/* Header i that says what the body may say, too: x-slo-ttft-ms, x-slo-tpot-ms, x-slo-class,
 * x-tenant, x-priority; NULL above. */
const char *openai_header_name(size_t i);
/* What header i says takes the place of what the body said. TD_ERR_INVALID: not of its kind. */
td_status openai_request_header(struct openai_request *q, size_t i, const char *value,
                                struct td_err *err);

#endif
