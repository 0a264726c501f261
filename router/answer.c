/* answer.c - a chat's answer in fields, as it streams: text, reasoning, tool calls.
 *
 * The parser (common/text/tool_calls.h) gives deltas; one GenerateResponse carries one of them, or
 * the begin of a call with its first arguments. Most tokens are one delta, so the caller's message,
 * which also has the token's id and logprobs, takes the last one; those before it are sent at once.
 * Nothing is allocated while an answer streams. */
#include <stdlib.h>
#include <string.h>

#include "router/router.h"

#define MAX_TEXT 4096 /* of one delta; a longer one goes in several messages */

struct answer {
    struct td_output_parser *parser;
    struct router_client client; /* these two: of the last call of answer_take */
    struct late *late;
    bool waits; /* the fields below are a delta that was not sent yet */
    bool call;  /* it is a piece of one, else of the text or the reasoning */
    bool reasoning;
    bool single_call; /* calls after the first are left out */
    char text[MAX_TEXT];
    size_t n_text;
    char id[64], name[192];
    Tandem__V1__ToolCallDelta delta, *deltas[1];
};

struct answer *answer_create(struct td_output_format format, bool begins_in_reasoning,
                             const char *request_id)
{
    struct answer *a = calloc(1, sizeof *a);
    if (!a) return NULL;
    a->parser = td_output_parser_create(format, begins_in_reasoning, request_id);
    if (!a->parser) {
        free(a);
        return NULL;
    }
    return a;
}

void answer_keep_one_call(struct answer *a) { a->single_call = true; }

void answer_free(struct answer *a)
{
    if (!a) return;
    td_output_parser_free(a->parser);
    free(a);
}

bool answer_has_calls(const struct answer *a) { return td_output_parser_n_calls(a->parser) > 0; }

/* What waits goes into *m. */
static void give(struct answer *a, Tandem__V1__GenerateResponse *m)
{
    ProtobufCBinaryData text = {a->n_text, (uint8_t *)a->text};
    if (!a->waits) return;
    if (a->call) {
        a->delta.arguments = text;
        a->deltas[0] = &a->delta;
        m->n_tool_calls = 1;
        m->tool_calls = a->deltas;
    } else if (a->reasoning) {
        m->reasoning = text;
    } else {
        m->text = text;
    }
    a->waits = false;
}

static void send_waiting(struct answer *a)
{
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    if (!a->waits) return;
    give(a, &m);
    late_send(a->late, a->client, &m);
}

static void on_delta(void *user, const struct td_output_delta *d)
{
    struct answer *a = user;
    bool begin = d->kind == TD_OUTPUT_CALL_BEGIN,
         call = begin || d->kind == TD_OUTPUT_CALL_ARGUMENTS,
         reasoning = d->kind == TD_OUTPUT_REASONING;

    if (d->kind == TD_OUTPUT_MARKUP || d->kind == TD_OUTPUT_CALL_END) return;
    if (call && a->single_call && d->index > 0) return;
    const char *text = begin ? "" : d->text; /* the head of a call is markup */
    size_t n = begin ? 0 : d->n_bytes;
    bool same = a->waits && !begin && a->call == call && a->reasoning == reasoning &&
                (!call || a->delta.index == d->index) && a->n_text + n <= sizeof a->text;
    if (!same) {
        send_waiting(a);
        a->n_text = 0;
        tandem__v1__tool_call_delta__init(&a->delta);
        a->call = call;
        a->reasoning = reasoning;
        a->waits = true;
        if (call) a->delta.index = d->index;
        if (begin) {
            snprintf(a->id, sizeof a->id, "%s", d->id);
            snprintf(a->name, sizeof a->name, "%s", d->name);
            a->delta.id = a->id;
            a->delta.name = a->name;
        }
    }
    TD_ASSERT(n <= sizeof a->text - a->n_text); /* the parser's deltas are no longer */
    memcpy(a->text + a->n_text, text, n);
    a->n_text += n;
}

void answer_take(struct answer *a, struct late *late, struct router_client client, const char *text,
                 size_t n_bytes, bool end, Tandem__V1__GenerateResponse *m)
{
    a->late = late;
    a->client = client;
    td_output_parser_feed(a->parser, text, n_bytes, on_delta, a);
    if (end) td_output_parser_end(a->parser, on_delta, a);
    give(a, m);
}
