/* resume.c - see resume.h. */
#include "router/resume.h"

td_status resume_skip_fill(struct resume_skip *s, const Tandem__V1__ResumeChoice *c, bool has_ids,
                           struct td_err *err)
{
    *s = (struct resume_skip){.text_bytes = c->text_bytes,
                              .reasoning_bytes = c->reasoning_bytes,
                              .argument_bytes = c->argument_bytes,
                              .n_calls = c->tool_calls,
                              .is_finished = c->finished};
    size_t n_tokens = c->n_token_ids ? c->n_token_ids : c->n_tokens;
    bool counts = c->text_bytes || c->reasoning_bytes || c->argument_bytes || c->tool_calls;
    if (!counts && n_tokens && !has_ids)
        return td_fail(err, TD_ERR_INVALID,
                       "resume_from.choices has %zu tokens and no counts of bytes, which must be "
                       "there where neither return_token_ids nor logprobs is asked for",
                       n_tokens);
    if (!has_ids) return TD_OK;
    s->n_tokens = (uint32_t)n_tokens;
    s->by_tokens = !counts;
    return TD_OK;
}

static void skip_bytes(ProtobufCBinaryData *text, uint64_t *n_bytes)
{
    size_t n = text->len < *n_bytes ? text->len : (size_t)*n_bytes;
    if (!n) return;
    text->data += n;
    text->len -= n;
    *n_bytes -= n;
}

/* A message has a delta at most (answer.c). */
static void skip_call(struct resume_skip *s, Tandem__V1__GenerateResponse *m)
{
    if (!m->n_tool_calls || (!s->n_calls && !s->argument_bytes)) return;
    TD_ASSERT(m->n_tool_calls == 1);
    s->rest = *m->tool_calls[0];
    if (s->rest.name[0] && s->n_calls) {
        s->n_calls--;
        s->rest.id = s->rest.name = (char *)"";
    }
    skip_bytes(&s->rest.arguments, &s->argument_bytes);
    s->rests[0] = &s->rest;
    m->tool_calls = s->rests;
    if (!s->rest.name[0] && !s->rest.arguments.len) m->n_tool_calls = 0;
}

static void skip_tokens(struct resume_skip *s, Tandem__V1__GenerateResponse *m)
{
    size_t n = m->n_token_ids < s->n_tokens ? m->n_token_ids : s->n_tokens;
    size_t n_logprobs = m->n_logprobs < n ? m->n_logprobs : n;
    if (!n) return;
    m->token_ids += n;
    m->n_token_ids -= n;
    if (n_logprobs) m->logprobs += n_logprobs;
    m->n_logprobs -= n_logprobs;
    s->n_tokens -= (uint32_t)n;
}

bool resume_skip_take(struct resume_skip *s, Tandem__V1__GenerateResponse *m)
{
    bool is_last = m->finish_reason != TANDEM__V1__FINISH_REASON__FINISH_NONE;
    if (resume_skip_is_over(s) && !s->is_finished) return true;
    if (s->by_tokens && s->n_tokens) {
        m->text.len = m->reasoning.len = m->n_tool_calls = 0;
    } else {
        skip_bytes(&m->text, &s->text_bytes);
        skip_bytes(&m->reasoning, &s->reasoning_bytes);
        skip_call(s, m);
    }
    if (s->n_tokens) skip_tokens(s, m);
    if (is_last) return !s->is_finished;
    return m->text.len || m->reasoning.len || m->n_tool_calls || m->n_token_ids;
}

bool resume_skip_is_over(const struct resume_skip *s)
{
    return !s->text_bytes && !s->reasoning_bytes && !s->argument_bytes && !s->n_tokens &&
           !s->n_calls;
}
