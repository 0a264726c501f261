/* tool_calls_fuzz.c - any bytes as a chat answer, in any pieces. Nothing may crash; the deltas'
 * texts are the answer; the same answer in one piece and byte by byte gives the same deltas. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "common/base/status.h"
#include "common/text/tool_calls.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

/* FNV-1a over the deltas, texts of one kind that follow each other as one. */
struct sum {
    uint64_t hash;
    int last;
    bool open; /* a call is */
    uint32_t n_calls;
    const char *expect;
    size_t at, n;
};

static void mix(struct sum *s, const void *data, size_t n)
{
    const uint8_t *p = data;
    for (size_t i = 0; i < n; i++) s->hash = (s->hash ^ p[i]) * 0x100000001b3ull;
}

static void take(void *user, const struct td_output_delta *d)
{
    struct sum *s = user;
    int kind = (int)d->kind;
    bool goes_on = s->last == kind && kind != TD_OUTPUT_CALL_BEGIN;
    if (!goes_on) mix(s, &kind, sizeof kind);
    s->last = kind;
    mix(s, d->text, d->n_bytes);
    TD_ASSERT(d->n_bytes <= s->n - s->at);
    TD_ASSERT(memcmp(s->expect + s->at, d->text, d->n_bytes) == 0);
    s->at += d->n_bytes;
    if (d->kind == TD_OUTPUT_CALL_BEGIN) {
        TD_ASSERT(!s->open && d->index == s->n_calls && d->name[0] != 0 && d->id[0] != 0);
        s->open = true;
        s->n_calls++;
        mix(s, d->name, strlen(d->name));
        mix(s, d->id, strlen(d->id));
    } else if (d->kind == TD_OUTPUT_CALL_END) {
        TD_ASSERT(s->open && d->n_bytes == 0);
        s->open = false;
        mix(s, &d->complete, 1);
    } else {
        TD_ASSERT(d->n_bytes > 0 && s->open == (d->kind == TD_OUTPUT_CALL_ARGUMENTS));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes == 0) return 0;
    struct td_output_format f = {(enum td_call_format)(data[0] % 5), data[0] / 5 % 2};
    if (data[0] / 20 % 2) {
        f.calls = f.calls ? TD_CALLS_HARMONY : TD_CALLS_NONE;
        f.reasoning = TD_REASONING_CHANNELS;
    }
    const char *text = (const char *)data + 1;
    size_t n = n_bytes - 1;
    struct sum sums[2];
    for (int pass = 0; pass < 2; pass++) {
        struct td_output_parser *p = td_output_parser_create(f, data[0] / 10 % 2, "r");
        if (p == NULL) return 0;
        struct sum *s = &sums[pass];
        *s = (struct sum){.hash = 0xcbf29ce484222325ull, .last = -1, .expect = text, .n = n};
        for (size_t at = 0, piece; at < n; at += piece) {
            piece = pass == 0 ? n : 1;
            td_output_parser_feed(p, text + at, piece, take, s);
        }
        td_output_parser_end(p, take, s);
        TD_ASSERT(s->at == n && !s->open && td_output_parser_n_calls(p) == s->n_calls);
        td_output_parser_free(p);
    }
    TD_ASSERT(sums[0].hash == sums[1].hash);
    return 0;
}
