/* openai_answer.h - GenerateResponses as OpenAI's JSON: one body, or server-sent events.
 *
 * A stream is `data: {chunk}` and a blank line for each piece, `data: [DONE]` at its end; with
 * include_usage the last chunk has no choices and the usage; with include_ledger it has the first
 * choice's ledger, without the names of workers. A body collects the pieces.
 *
 * Threads: one at a time; the caller's lock. */
#ifndef TD_ROUTER_HTTP_OPENAI_ANSWER_H
#define TD_ROUTER_HTTP_OPENAI_ANSWER_H

#include "common/rpc/rpc_status.h"
#include "common/text/tokenizer.h"
#include "router/http/openai_request.h"
#include "router/http/text_buffer.h"

/* A tool call of a whole answer. */
struct openai_call {
    char id[64], name[192];
    struct text_buffer arguments;
};

/* What came of one prompt's log-probabilities: the lists of a completion's logprobs (echo), and the
 * elements of prompt_logprobs, each where it was asked for. */
struct openai_scores {
    struct text_buffer lists[4], elements;
    struct td_detokenizer *detok; /* of the prompt's text, for text_offset */
    size_t n_text;                /* characters of it so far */
    bool has_begun;               /* a token came that is not special */
    size_t n_leading;             /* bytes of the text that the special ones before it are */
};

/* A prompt that its completions begin with. */
struct openai_echo {
    struct text_buffer text;
    bool is_text; /* as the client has it: the tokenizer may put special tokens before it. Else of
                   * token ids, and the text of them all */
};

/* One choice so far. */
struct openai_choice {
    bool echoed;                  /* its prompt is part of the text */
    bool begun;                   /* stream: its first chunk is out */
    uint32_t n_prompt, n_output;  /* tokens counted so far */
    size_t n_before;              /* characters of the prompt that the text begins with */
    struct text_buffer text;      /* body: the text */
    struct text_buffer reasoning; /* body: what comes before it, where the template has that */
    struct openai_call *calls;    /* body: [n_calls] */
    size_t n_calls;
    struct text_buffer logprobs[4]; /* body: lists of logprobs (chat uses the first alone) */
    struct text_buffer finish;      /* body: finish_reason and stop_reason */
    struct text_buffer ids;         /* body: token ids */
};

struct openai_answer {
    struct openai_options options;
    const struct td_tokenizer *tokenizer; /* for the texts of logprobs; borrowed */
    char id[160], model[256];
    int64_t created_s;
    /* With event ids. at: the id of the event that is being made. after: the Last-Event-ID of a
     * stream that goes on: events up to it are made and not sent. differs: those events are not the
     * ones that the client has. */
    struct openai_event_id at, after;
    bool differs;
    struct text_buffer ledger;     /* include_ledger: the member of the last chunk, choice 0's */
    struct text_buffer event_head; /* stream: what each event begins with */
    uint32_t n_prompt, n_output, n_cached; /* tokens so far: of each prompt once, of all choices */
    struct openai_echo *prompts;           /* echo: [options.n_prompts]; owned */
    struct openai_scores *scores;          /* [options.n_prompts]; NULL: nothing came */
    struct openai_choice *choices;         /* [n_choices] that have begun */
    uint32_t n_choices, n_ended;
    size_t n_collected; /* body: bytes that it will have of what came, but for JSON's escapes */
};

/* Adds a message to the answer; *out gets what can be sent now (a stream's chunks; the whole body
 * with the finish_reason of the last choice). */
void openai_answer_add(struct openai_answer *a, const Tandem__V1__GenerateResponse *m,
                       struct text_buffer *out);
void openai_answer_free(struct openai_answer *a);

/* {"error": {"message", "type", "param", "code"}}; param may be "". */
void openai_error(struct text_buffer *out, unsigned http_status, const char *message,
                  const char *param);
/* HTTP's status for ours. */
unsigned openai_http_status(enum td_code code);
/* The field that an error of inference.c begins with, as the client calls it: "stop.max_tokens is
 * 0, must be ..." gives "max_tokens"; "" when it begins with no field. 64 bytes. */
void openai_error_param(const struct openai_options *o, const char *message, char *ret_param);

#endif
