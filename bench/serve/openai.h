/* openai.h - the answer of a server with the OpenAI completions API, from bytes to what a benchmark
 * counts. Pure: no clock, no network.
 *
 * A stream is server-sent events (WHATWG HTML, 9.2.6): lines end with LF, CR LF or CR; "data"
 * lines up to an empty line are one event; comments and other fields are left out; an event that
 * the stream breaks off before its empty line is none. Bytes come cut anywhere. All of it is
 * outside input: sizes are bounded, errors name field, value and limit. One thread. */
#ifndef BENCH_SERVE_OPENAI_H
#define BENCH_SERVE_OPENAI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/base/status.h"

/* bytes of one event's data: a chunk with a token's text is some hundred */
#define BENCH_SSE_MAX_EVENT ((size_t)1 << 20)

struct bench_sse { /* zeroed = at the start of a stream */
    char *data;    /* of the event so far. Owned */
    size_t n, capacity;
    char name[6];    /* of the line's field, as far as it can be "data" */
    uint32_t n_name; /* how much of it is kept */
    uint32_t at;     /* where in a line: openai.c */
    bool has_data, is_data, after_cr;
};

/* An event's data without a NUL behind it. Not TD_OK: bench_sse_feed stops and returns it. */
typedef td_status (*bench_sse_fn)(const char *data, size_t n_bytes, void *ctx, struct td_err *err);

/* Calls fn for each event that these bytes complete. TD_ERR_INVALID: an event of more than
 * BENCH_SSE_MAX_EVENT bytes; TD_ERR_NOMEM; what fn said. After an error the stream cannot go on. */
td_status bench_sse_feed(struct bench_sse *s, const char *bytes, size_t n_bytes, bench_sse_fn fn,
                         void *ctx, struct td_err *err);
void bench_sse_free(struct bench_sse *s);

/* One event of a stream of completions. */
struct bench_chunk {
    bool is_done;    /* [DONE]: the stream is complete, and nothing else is set */
    bool has_choice; /* choices[0] is there: a last event that carries the usage alone has
                        none */
    bool has_tokens; /* with text or token ids */
    int32_t n_ids;   /* token ids in it; 0 = the server does not send them */
    bool has_finish; /* finish_reason is no longer null */
    bool has_usage, has_cached;
    int32_t prompt_tokens, completion_tokens, cached_tokens; /* of usage; -1 = not said */
};

/* TD_ERR_INVALID: no JSON, a field of another type or out of its range; TD_ERR_PEER: the event
 * is an error, told in err. */
td_status bench_chunk_parse(const char *data, size_t n_bytes, struct bench_chunk *ret,
                            struct td_err *err);

/* What a body says about a failure: the message in it when it is the JSON of an error, else its
 * first line; printable, at most 200 bytes. */
void bench_openai_error(const char *body, size_t n_bytes, char ret_message[201]);

#endif
