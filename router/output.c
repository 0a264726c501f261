/* output.c - tokens to text, in order, none twice; stop strings; messages to the client. */
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/hash.h"
#include "common/base/log.h"
#include "common/base/metrics.h"
#include "router/router.h"

/* ---- stop strings ---------------------------------------------------------------------------- */

td_status stop_matcher_add(struct stop_matcher *m, const void *text, size_t n_bytes,
                           struct td_err *err)
{
    if (n_bytes == 0) return td_fail(err, TD_ERR_INVALID, "stop[%zu] is empty", m->n);
    if (n_bytes > ROUTER_MAX_STOP_BYTES)
        return td_fail(err, TD_ERR_INVALID, "stop[%zu] has %zu bytes, limit %d", m->n, n_bytes,
                       ROUTER_MAX_STOP_BYTES);
    if (m->n == ROUTER_MAX_STOP_STRINGS)
        return td_fail(err, TD_ERR_INVALID, "stop has more than %d strings",
                       ROUTER_MAX_STOP_STRINGS);
    char *copy = malloc(n_bytes + 1);
    if (!copy) return td_fail(err, TD_ERR_AGAIN, "no memory");
    memcpy(copy, text, n_bytes);
    copy[n_bytes] = 0;
    m->strings[m->n] = copy;
    m->bytes[m->n++] = n_bytes;
    return TD_OK;
}

/* The longest tail of held text that could still grow into a stop string. */
static size_t tail_to_hold(const struct stop_matcher *m)
{
    size_t hold = 0;
    for (size_t s = 0; s < m->n; s++)
        for (size_t k = m->bytes[s] - 1; k > hold; k--)
            if (k <= m->n_held && !memcmp(m->held + m->n_held - k, m->strings[s], k)) {
                hold = k;
                break;
            }
    return hold;
}

bool stop_matcher_push(struct stop_matcher *m, const char *text, size_t n_bytes,
                       const char **ret_text, size_t *ret_bytes)
{
    *ret_text = text;
    *ret_bytes = n_bytes;
    if (m->n == 0) return false;
    if (m->n_held + n_bytes + 1 > m->capacity) {
        size_t capacity = (m->n_held + n_bytes + 1) * 2;
        char *grown = realloc(m->held, capacity);
        TD_ASSERT(grown);
        m->held = grown;
        m->capacity = capacity;
    }
    memcpy(m->held + m->n_held, text, n_bytes);
    m->n_held += n_bytes;
    size_t best_at = SIZE_MAX, best = 0;
    for (size_t s = 0; s < m->n; s++) {
        const char *at = memmem(m->held, m->n_held, m->strings[s], m->bytes[s]);
        if (at && (size_t)(at - m->held) < best_at) {
            best_at = (size_t)(at - m->held);
            best = s;
        }
    }
    *ret_text = m->held;
    if (best_at != SIZE_MAX) {
        m->matched = (int)best;
        *ret_bytes = best_at + (m->gives_match ? m->bytes[best] : 0);
        m->n_held = 0;
        return true;
    }
    *ret_bytes = m->n_held - tail_to_hold(m);
    return false;
}

/* Drops what the last push gave out. */
static void stop_matcher_given(struct stop_matcher *m, size_t n_bytes)
{
    if (m->n == 0 || n_bytes == 0 || m->n_held < n_bytes) return;
    memmove(m->held, m->held + n_bytes, m->n_held - n_bytes);
    m->n_held -= n_bytes;
}

void stop_matcher_flush(struct stop_matcher *m, const char **ret_text, size_t *ret_bytes)
{
    *ret_text = m->held ? m->held : "";
    *ret_bytes = m->n_held;
    m->n_held = 0;
}

void stop_matcher_free(struct stop_matcher *m)
{
    for (size_t i = 0; i < m->n; i++) free(m->strings[i]);
    free(m->held);
    memset(m, 0, sizeof *m);
}

/* ---- output ---------------------------------------------------------------------------------- */

/* What a client needs to go on elsewhere. */
static void greet(struct request_state *q, Tandem__V1__GenerateResponse *m)
{
    m->request_id = q->name;
    m->seed = q->ask.spec.seed;
    m->max_tokens = (int64_t)q->ask.max_tokens;
    m->prompt_hash = td_hash64(q->tokens, q->n_prompt * sizeof *q->tokens, 0);
}

static void send_text(struct request_state *q, const char *text, size_t n_bytes,
                      Tandem__V1__TokenOut *token)
{
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    m.text.data = (uint8_t *)(uintptr_t)text;
    m.text.len = n_bytes;
    if (q->output.answer) {
        m.text.len = 0;
        answer_take(q->output.answer, &q->output.late, q->client, text, n_bytes, false, &m);
    }
    int32_t id = token->token;
    if (q->ask.return_token_ids || q->ask.want_logprobs) {
        m.n_token_ids = 1;
        m.token_ids = &id;
    }
    if (q->ask.want_logprobs && token->logprobs) {
        m.n_logprobs = 1;
        m.logprobs = &token->logprobs;
    }
    bool empty = m.text.len == 0 && m.reasoning.len == 0 && m.n_tool_calls == 0;
    if (empty && m.n_token_ids == 0 && q->output.greeted) return; /* nothing to tell yet */
    if (!q->output.greeted) {
        greet(q, &m);
        m.prompt_tokens = q->n_prompt;
    }
    q->output.greeted = true;
    late_send(&q->output.late, q->client, &m);
}

static bool is_stop_token(const struct request_state *q, int32_t token)
{
    for (size_t i = 0; i < q->ask.spec.n_stop_token_ids; i++)
        if (q->ask.spec.stop_token_ids[i] == token) return true;
    return false;
}

/* The next token into the output's text, and to the client; true: a stop string ended it. */
static bool take_text(struct request_state *q, Tandem__V1__TokenOut *t, bool stop_token)
{
    q->tokens[q->n_tokens++] = t->token;
    const char *text = "", *out = "";
    size_t n_text = 0, n_out = 0;
    bool has_text = !stop_token || q->output.stop.gives_match,
         may_stop = q->n_tokens - q->n_prompt >= q->ask.spec.min_tokens;
    td_status s = has_text ? td_detokenizer_push(q->output.detok, t->token, &text, &n_text) : TD_OK;
    if (s && !q->output.text_lost) {
        q->output.text_lost = true;
        td_error("text_lost",
                 "req=%s token=%d reason=%s action=send_ids_only hint=\"tokenizer.json's decoder "
                 "makes too much text of a token\"",
                 q->logged_name, t->token, td_status_name(s));
    }
    if (q->ask.want_logprobs && t->logprobs) t->logprobs->text_offset = q->output.n_chars;
    if (q->ask.want_logprobs) q->output.n_chars += router_count_characters(text, n_text);
    bool stopped = may_stop && stop_matcher_push(&q->output.stop, text, n_text, &out, &n_out);
    if (!may_stop) {
        out = text;
        n_out = n_text;
    }
    send_text(q, out, n_out, t);
    if (!stopped) stop_matcher_given(&q->output.stop, n_out);
    return stopped;
}

/* The token that is made with a prompt of which no output was asked for. */
static void drop_token(struct request_state *q, Tandem__V1__TokenOut *t)
{
    q->tokens[q->n_tokens++] = t->token;
    t->finish = TANDEM__V1__FINISH_REASON__FINISH_LENGTH;
    send_text(q, "", 0, t);
}

static void take_one(struct request_state *q, Tandem__V1__TokenOut *t)
{
    uint32_t n_told = q->ask.no_output ? 0 : 1;
    td_metric_add(q->model->metrics.output_tokens, n_told);
    tenant_use_pay(q->use, n_told);
    uint64_t now = td_now_ns();
    bool stop_token =
        n_told && t->finish == TANDEM__V1__FINISH_REASON__FINISH_STOP && is_stop_token(q, t->token);
    bool stopped = n_told && take_text(q, t, stop_token);
    if (!n_told) drop_token(q, t);
    if (!q->output.first_sent) {
        q->output.first_sent = true;
        q->output.first_attempt = q->attempt;
        q->output.first_ns = now;
        q->output.decode_sent_ns = q->decode.sent_ns; /* a later attempt has its own times: the
                                                         ledger is of this one */
        q->output.ticket_ns = q->decode.ticket_ns;
    } else if (n_told) {
        td_metric_observe(q->model->metrics.itl, (double)(now - q->output.last_ns) / 1e9);
    }
    q->output.last_ns = now;
    if (stopped) {
        q->output.done = true;
        q->output.finish = TANDEM__V1__FINISH_REASON__FINISH_STOP;
    } else if (t->finish) {
        q->output.done = true;
        q->output.finish = t->finish;
        if (stop_token) q->output.stop_token = t->token;
    }
}

uint32_t output_n_replayed(const struct request_state *q)
{
    return q->output.n_resumed ? q->output.n_resumed - 1 : 0;
}

td_status output_replay(struct request_state *q)
{
    Tandem__V1__Logprobs unknown = TANDEM__V1__LOGPROBS__INIT; /* the client has them */
    Tandem__V1__TokenOut t = TANDEM__V1__TOKEN_OUT__INIT;
    uint32_t end = q->n_prompt + output_n_replayed(q);
    t.logprobs = &unknown;
    while (q->n_tokens < end) {
        t.index = q->n_tokens;
        t.token = q->tokens[q->n_tokens];
        if (take_text(q, &t, false)) return TD_ERR_INVALID;
    }
    return TD_OK;
}

td_status output_take(struct request_state *q, Tandem__V1__TokenOut *const *out, size_t n)
{
    for (size_t i = 0; i < n && !q->output.done; i++) {
        Tandem__V1__TokenOut *t = out[i];
        if (t->index < q->n_prompt || t->index > q->n_tokens || t->token < 0 ||
            t->token >= q->model->config.vocab)
            return TD_ERR_CORRUPT;
        if (t->index == q->n_tokens) {
            if (q->n_tokens >= q->n_prompt + q->ask.max_tokens) return TD_ERR_CORRUPT;
            if (q->n_tokens < q->n_prompt + q->output.n_resumed &&
                q->tokens[t->index] != t->token) {
                q->output.differs = true;
                return TD_ERR_CORRUPT;
            }
            take_one(q, t);
            continue;
        }
        if (q->tokens[t->index] == t->token) continue; /* the other leg was first */
        td_metric_add(q->model->metrics.mismatches, 1);
        td_error("token_mismatch", "req=%s index=%u sent=%d got=%d invariant=I1", q->logged_name,
                 t->index, q->tokens[t->index], t->token);
        return TD_ERR_CORRUPT;
    }
    return TD_OK;
}

/* ---- the prompt ------------------------------------------------------------------------------ */

bool output_waits_for_prompt(const struct request_state *q)
{
    return q->ask.spec.prompt_logprobs && q->output.n_scored < q->n_prompt;
}

static void send_prompt(struct request_state *q, Tandem__V1__PromptLogprob **tokens, size_t n)
{
    Tandem__V1__GenerateResponse m = TANDEM__V1__GENERATE_RESPONSE__INIT;
    m.n_prompt_logprobs = n;
    m.prompt_logprobs = tokens;
    if (!q->output.n_scored) greet(q, &m);
    q->output.n_scored += (uint32_t)n;
    /* a later attempt need not tell them again */
    if (q->output.n_scored == q->n_prompt) q->ask.spec.prompt_logprobs = 0;
    q->client.ops->send(q->client.call, &m.base);
}

void output_begin_prompt(struct request_state *q)
{
    Tandem__V1__PromptLogprob first = TANDEM__V1__PROMPT_LOGPROB__INIT, *list = &first;
    if (!q->ask.spec.prompt_logprobs || q->output.n_scored) return;
    first.token = q->tokens[0];
    send_prompt(q, &list, 1);
}

td_status output_take_prompt(struct request_state *q, const Tandem__V1__PromptLogprobs *p)
{
    uint32_t n_known = q->output.n_scored;
    if (!output_waits_for_prompt(q)) return TD_OK;
    if (p->first < 1 || p->first > n_known || p->n_tokens > q->n_prompt - p->first)
        return TD_ERR_CORRUPT;
    for (size_t i = 0; i < p->n_tokens; i++)
        if (p->tokens[i]->token != q->tokens[p->first + i] ||
            p->tokens[i]->n_top > TD_MAX_TOP_LOGPROBS)
            return TD_ERR_CORRUPT;
    size_t skip = n_known - p->first;
    if (skip < p->n_tokens) send_prompt(q, p->tokens + skip, p->n_tokens - skip);
    return TD_OK;
}
