/* bench_openai_fuzz.c - an OpenAI server's stream from outside (first byte: where it is cut):
 * the events do not depend on the cuts, a chunk that is accepted has sensible numbers, one that
 * is refused says why, and what a body says can be written into JSON. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "bench/serve/openai.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

struct seen {
    uint64_t hash, n_events;
};

static td_status on_event(const char *data, size_t n_bytes, void *ctx, struct td_err *err)
{
    struct seen *seen = ctx;
    struct bench_chunk c;
    struct td_err why = {0};
    (void)err;
    seen->n_events++;
    for (size_t i = 0; i < n_bytes; i++)
        seen->hash = (seen->hash ^ (uint8_t)data[i]) * 1099511628211u;
    seen->hash = (seen->hash ^ 0x100) * 1099511628211u;
    td_status s = bench_chunk_parse(data, n_bytes, &c, &why);
    if (s)
        TD_ASSERT(why.code == s);
    else
        TD_ASSERT(c.prompt_tokens >= -1 && c.completion_tokens >= -1 && c.cached_tokens >= -1 &&
                  c.n_ids >= 0 && (!c.n_ids || c.has_tokens));
    return TD_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    struct bench_sse whole = {0}, cut = {0};
    struct seen a = {0}, b = {0};
    struct td_err err = {0};
    char message[201];
    if (n_bytes < 1) return 0;
    size_t step = data[0] % 16u + 1;
    const char *stream = (const char *)data + 1;
    n_bytes--;
    td_status s = bench_sse_feed(&whole, stream, n_bytes, on_event, &a, &err), t = TD_OK;
    for (size_t at = 0; at < n_bytes && !t; at += step)
        t = bench_sse_feed(&cut, stream + at, n_bytes - at < step ? n_bytes - at : step, on_event,
                           &b, &err);
    TD_ASSERT(s == t && a.hash == b.hash && a.n_events == b.n_events);
    bench_sse_free(&whole);
    bench_sse_free(&cut);
    bench_openai_error(stream, n_bytes, message);
    json_t *text = json_string(message);
    TD_ASSERT(text && strlen(message) <= 200);
    json_decref(text);
    return 0;
}
