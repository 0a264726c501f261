/* received.c - see received.h. */
#include "common/rpc/received.h"

#include <stdio.h>
#include <stdlib.h>

#include "common/base/clock.h"
#include "common/base/entropy.h"

enum {
    MAX_CHOICES = 128,   /* Sampling.n's bound */
    FIRST_WAIT_MS = 100, /* doubled from round to round of all servers */
    MAX_WAIT_MS = 2000,
    REACHED_MS = 200, /* a call that nobody takes ends sooner on a network that is there */
};

struct received_choice {
    Tandem__V1__ResumeChoice m; /* its token_ids are owned */
    size_t capacity;
};

struct td_received {
    uint32_t n_choices;
    uint64_t n_messages;
    char request_id[256];
    Tandem__V1__ResumeFrom resume;
    Tandem__V1__ResumeChoice *list[MAX_CHOICES];
    struct received_choice choices[];
};

struct td_received *td_received_create(uint32_t n_choices)
{
    if (!n_choices) n_choices = 1;
    if (n_choices > MAX_CHOICES) n_choices = MAX_CHOICES; /* the router refuses the request */
    struct td_received *r = calloc(1, sizeof *r + n_choices * sizeof r->choices[0]);
    if (!r) return NULL;
    r->n_choices = n_choices;
    tandem__v1__resume_from__init(&r->resume);
    for (uint32_t i = 0; i < n_choices; i++) {
        tandem__v1__resume_choice__init(&r->choices[i].m);
        r->list[i] = &r->choices[i].m;
    }
    return r;
}

void td_received_free(struct td_received *r)
{
    if (!r) return;
    for (uint32_t i = 0; i < r->n_choices; i++) free(r->choices[i].m.token_ids);
    free(r);
}

static bool add_tokens(struct received_choice *c, const int32_t *ids, size_t n)
{
    if (c->m.n_token_ids + n > c->capacity) {
        size_t capacity = 2 * (c->m.n_token_ids + n);
        int32_t *grown = realloc(c->m.token_ids, capacity * sizeof *grown);
        if (!grown) return false;
        c->m.token_ids = grown;
        c->capacity = capacity;
    }
    for (size_t i = 0; i < n; i++) c->m.token_ids[c->m.n_token_ids++] = ids[i];
    return true;
}

bool td_received_take(struct td_received *r, const Tandem__V1__GenerateResponse *m)
{
    if (m->choice >= r->n_choices) return false;
    struct received_choice *c = &r->choices[m->choice];
    r->n_messages++;
    if (m->request_id[0]) snprintf(r->request_id, sizeof r->request_id, "%s", m->request_id);
    if (m->max_tokens) { /* a first message */
        r->resume.seed = m->seed - m->choice;
        r->resume.max_tokens = m->max_tokens;
        r->resume.prompt_hash = m->prompt_hash;
    }
    r->resume.prompt_logprobs += (uint32_t)m->n_prompt_logprobs;
    c->m.text_bytes += m->text.len;
    c->m.reasoning_bytes += m->reasoning.len;
    for (size_t i = 0; i < m->n_tool_calls; i++) {
        c->m.tool_calls += m->tool_calls[i]->name[0] != 0;
        c->m.argument_bytes += m->tool_calls[i]->arguments.len;
    }
    c->m.finished |= m->finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE;
    return add_tokens(c, m->token_ids, m->n_token_ids);
}

uint64_t td_received_n(const struct td_received *r) { return r->n_messages; }

uint32_t td_received_n_tokens(const struct td_received *r)
{
    size_t n = 0;
    for (uint32_t i = 0; i < r->n_choices; i++) n += r->choices[i].m.n_token_ids;
    return (uint32_t)n;
}

void td_received_resume(struct td_received *r, Tandem__V1__GenerateRequest *request)
{
    if (!r->resume.max_tokens)
        return; /* no first message: nothing came but the prompt's logprobs,
                                          which a request that begins anew would tell again */
    r->resume.n_choices = r->n_choices;
    r->resume.choices = r->list;
    request->request_id = r->request_id;
    request->resume_from = &r->resume;
}

bool td_retry_next(struct td_retry *t, uint64_t began_ns, uint64_t now_ns, uint64_t n_received,
                   uint32_t n_servers, uint64_t *ret_wait_ms)
{
    if (n_received != t->n_received || !t->since_ns) {
        t->n_received = n_received;
        t->since_ns = now_ns;
        t->n_tries = 0;
    }
    t->was_reached |= n_received || now_ns - began_ns >= REACHED_MS * TD_NS_PER_MS;
    uint64_t budget_ms = t->budget_ms;
    if (!t->was_reached && budget_ms > TD_RETRY_UNREACHED_MS) budget_ms = TD_RETRY_UNREACHED_MS;
    uint64_t spent_ms = (now_ns - t->since_ns) / TD_NS_PER_MS;
    if (++t->n_tries > TD_RETRY_MAX_TRIES || spent_ms >= budget_ms) return false;
    uint64_t wait_ms = 0;
    uint32_t round = t->n_tries / (n_servers ? n_servers : 1); /* all have been tried so often */
    if (round) {
        uint32_t doublings = round - 1 < 10 ? round - 1 : 10;
        wait_ms = (uint64_t)FIRST_WAIT_MS << doublings;
        if (wait_ms > MAX_WAIT_MS) wait_ms = MAX_WAIT_MS;
        /* of many clients that lost one router, not all come at once */
        wait_ms = wait_ms / 2 + td_random_u64() % (wait_ms / 2 + 1);
    }
    *ret_wait_ms = wait_ms;
    return true;
}
