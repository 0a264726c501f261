/* late.c - see late.h. */
#include "router/late.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/log.h"

/* As many bytes as a stream between daemons joins into one message, and as many messages as need
 * not more than some 100 KiB of pointers to be joined. */
enum { MAX_BYTES = 64 << 10, MAX_MESSAGES = 4096 };

/* False: no memory, nothing is changed. */
static bool keep(struct late *l, const Tandem__V1__GenerateResponse *m)
{
    uint32_t n = (uint32_t)protobuf_c_message_get_packed_size(&m->base);
    size_t need = l->n_bytes + sizeof n + n;
    if (need > l->capacity) {
        size_t capacity = l->capacity ? l->capacity : 1024;
        while (capacity < need) capacity *= 2;
        uint8_t *bytes = realloc(l->bytes, capacity);
        if (!bytes) return false;
        l->bytes = bytes;
        l->capacity = capacity;
    }
    memcpy(l->bytes + l->n_bytes, &n, sizeof n);
    protobuf_c_message_pack(&m->base, l->bytes + l->n_bytes + sizeof n);
    l->n_bytes = need;
    l->n_messages++;
    return true;
}

static void append(ProtobufCBinaryData *to, const ProtobufCBinaryData *from)
{
    if (from->len) memcpy(to->data + to->len, from->data, from->len);
    to->len += from->len;
}

/* Room for what n messages hold together. */
struct joined {
    Tandem__V1__GenerateResponse m;
    uint8_t *text, *reasoning;
    int32_t *ids;
    Tandem__V1__Logprobs **logprobs;
    Tandem__V1__ToolCallDelta **calls;
};

static void joined_free(struct joined *j)
{
    free(j->text);
    free(j->reasoning);
    free(j->ids);
    free(j->logprobs);
    free(j->calls);
}

static bool joined_make(struct joined *j, Tandem__V1__GenerateResponse *const *all, size_t n)
{
    size_t n_text = 1, n_reasoning = 1, n_ids = 1, n_logprobs = 1, n_calls = 1;
    for (size_t i = 0; i < n; i++) {
        n_text += all[i]->text.len;
        n_reasoning += all[i]->reasoning.len;
        n_ids += all[i]->n_token_ids;
        n_logprobs += all[i]->n_logprobs;
        n_calls += all[i]->n_tool_calls;
    }
    j->text = malloc(n_text);
    j->reasoning = malloc(n_reasoning);
    j->ids = malloc(n_ids * sizeof *j->ids);
    j->logprobs = malloc(n_logprobs * sizeof *j->logprobs);
    j->calls = malloc(n_calls * sizeof *j->calls);
    return j->text && j->reasoning && j->ids && j->logprobs && j->calls;
}

/* What is one in an answer (its end, its usage, its names) is the last message's, or of whichever
 * message has it. */
static void join(struct joined *j, Tandem__V1__GenerateResponse *const *all, size_t n)
{
    Tandem__V1__GenerateResponse *m = &j->m;
    *m = *all[n - 1];
    m->text = (ProtobufCBinaryData){0, j->text};
    m->reasoning = (ProtobufCBinaryData){0, j->reasoning};
    m->n_token_ids = m->n_logprobs = m->n_tool_calls = 0;
    m->token_ids = j->ids;
    m->logprobs = j->logprobs;
    m->tool_calls = j->calls;
    for (size_t i = 0; i < n; i++) {
        const Tandem__V1__GenerateResponse *from = all[i];
        append(&m->text, &from->text);
        append(&m->reasoning, &from->reasoning);
        for (size_t k = 0; k < from->n_token_ids; k++)
            j->ids[m->n_token_ids++] = from->token_ids[k];
        for (size_t k = 0; k < from->n_logprobs; k++)
            j->logprobs[m->n_logprobs++] = from->logprobs[k];
        for (size_t k = 0; k < from->n_tool_calls; k++)
            j->calls[m->n_tool_calls++] = from->tool_calls[k];
        if (!m->request_id[0]) m->request_id = from->request_id;
        if (!m->prompt_tokens) m->prompt_tokens = from->prompt_tokens;
        if (!m->seed) m->seed = from->seed;
        if (!m->max_tokens) m->max_tokens = from->max_tokens;
        if (!m->prompt_hash) m->prompt_hash = from->prompt_hash;
    }
}

/* Sends what is kept, and m behind it; NULL: nothing. */
static void send_all(struct late *l, struct router_client client,
                     const Tandem__V1__GenerateResponse *m)
{
    size_t n = 0;
    struct joined j = {0};
    Tandem__V1__GenerateResponse **all = calloc(l->n_messages + 1, sizeof *all);
    TD_ASSERT(all); /* some KiB: MAX_MESSAGES */
    for (size_t at = 0; at < l->n_bytes; n++) {
        uint32_t n_bytes;
        memcpy(&n_bytes, l->bytes + at, sizeof n_bytes);
        at += sizeof n_bytes;
        all[n] = tandem__v1__generate_response__unpack(NULL, n_bytes, l->bytes + at);
        TD_ASSERT(all[n]); /* it was packed here */
        at += n_bytes;
    }
    if (m) all[n] = (Tandem__V1__GenerateResponse *)(uintptr_t)m; /* is only read */
    size_t n_all = n + (m != NULL);
    if (n_all && joined_make(&j, all, n_all)) {
        join(&j, all, n_all);
        client.ops->send(client.call, &j.m.base);
    } else {
        for (size_t i = 0; i < n_all; i++) client.ops->send(client.call, &all[i]->base);
    }
    joined_free(&j);
    for (size_t i = 0; i < n; i++) tandem__v1__generate_response__free_unpacked(all[i], NULL);
    free(all);
    l->n_bytes = 0;
    l->n_messages = 0;
}

void late_send(struct late *l, struct router_client client, const Tandem__V1__GenerateResponse *all)
{
    Tandem__V1__GenerateResponse rest = *all;
    const Tandem__V1__GenerateResponse *m = &rest;
    if (!resume_skip_take(&l->skip, &rest)) return;
    bool is_last = m->finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE;
    if (!l->n_messages && (!client.ops->is_behind || !client.ops->is_behind(client.call))) {
        client.ops->send(client.call, &m->base);
        return;
    }
    if (is_last || !keep(l, m))
        send_all(l, client, m);
    else if (l->n_bytes > MAX_BYTES || l->n_messages == MAX_MESSAGES)
        send_all(l, client, NULL);
}

void late_flush(struct late *l, struct router_client client)
{
    if (l->n_messages) send_all(l, client, NULL);
}

void late_free(struct late *l)
{
    free(l->bytes);
    *l = (struct late){0};
}
