/* requests.c - the life of a request on a worker: from an accepted call to the end of both the call
 * and what the request holds.
 *
 * The rpc thread accepts calls and posts mail; the engine thread takes it and owns the request from
 * then on.
 *
 * States, and who moves a request (engine thread):
 *
 *     accept ------------------------------> SCHEDULED, waiting
 *     accept, its grammar is not compiled -> GRAMMAR
 *     GRAMMAR            --compiled--------> SCHEDULED, waiting    (or ends, refused)
 *     SCHEDULED, waiting --role.admit------> IMPORT                (decode, prefilled elsewhere)
 *     SCHEDULED, waiting --role.admit------> SCHEDULED, running    (prefill, or prefilled here)
 *     IMPORT             --SLOT_READY------> SCHEDULED, running
 *     SCHEDULED, running --preempted-------> SCHEDULED, waiting
 *     SCHEDULED, running --prefill done----> SENDING --OP_DONE--> OVER
 *     SCHEDULED, running --last token------> OVER
 *     any of these       --td_worker_end---> RETIRING --terminal event of its transfer--> OVER
 *     OVER               --the call's end--> FREE
 *
 * td_worker_end is called for a cancel, a deadline, an error and a hand-over. Without a live
 * transfer it goes to OVER at once. A request whose grammar is being compiled (r->guide) is not
 * freed before that has ended.
 *
 * Invariants: (1) a request in RETIRING or with xfer_live keeps its blocks; (2) only a SCHEDULED
 * request is on a list of the scheduler; (3) n_live counts requests from accept to free, so 0
 * means that every pool is back to empty. */
#include "common/worker/worker_parts.h"

#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/rpc/rpc_status.h"

/* ---- mail: rpc thread -> engine thread ------------------------------------------------------- */

void td_worker_post(struct td_worker *w, struct td_mail *m)
{
    pthread_mutex_lock(&w->inbox.lock);
    m->next = NULL;
    *w->inbox.tail = m;
    w->inbox.tail = &m->next;
    pthread_mutex_unlock(&w->inbox.lock);
    td_wakeup_signal(&w->wakeup);
}

static struct td_mail *mail_take_all(struct td_worker *w)
{
    pthread_mutex_lock(&w->inbox.lock);
    struct td_mail *m = w->inbox.head;
    w->inbox.head = NULL;
    w->inbox.tail = &w->inbox.head;
    pthread_mutex_unlock(&w->inbox.lock);
    return m;
}

/* ---- structured output ----------------------------------------------------------------------- */

static td_status guided_fill(struct td_worker *w, struct td_req *r,
                             const Tandem__V1__SamplingSpec *p, struct td_err *err)
{
    if (!p->guided_kind) return TD_OK;
    if (!w->guided) return td_fail(err, w->guided_why.code, "%s", w->guided_why.msg);
    if (p->n_guided_texts > TD_GRAMMAR_MAX_CHOICES)
        return td_fail(err, TD_ERR_INVALID, "sampling.guided_texts has %zu texts, limit %d",
                       p->n_guided_texts, TD_GRAMMAR_MAX_CHOICES);
    struct td_grammar_text *texts = calloc(p->n_guided_texts + 1, sizeof *texts);
    if (!texts) return td_fail(err, TD_ERR_NOMEM, "guided output: no memory");
    for (size_t i = 0; i < p->n_guided_texts; i++)
        texts[i] =
            (struct td_grammar_text){(const char *)p->guided_texts[i].data, p->guided_texts[i].len};
    enum td_grammar_kind kind =
        p->guided_kind <= TD_GRAMMAR_LAST ? (enum td_grammar_kind)p->guided_kind : TD_GRAMMAR_NONE;
    td_status s = td_guided_ask(w->guided, kind, texts, p->n_guided_texts, r, r->seq, &r->guided,
                                &r->guide, err);
    free(texts);
    return s == TD_INPROGRESS ? TD_OK : s;
}

/* Which tokens may come, by their ids. Not beside a grammar. */
static td_status filter_fill(struct td_worker *w, struct td_req *r,
                             const Tandem__V1__SamplingSpec *p, struct td_err *err)
{
    if (!p->n_allowed_token_ids && !p->n_bad_words) return TD_OK;
    if (p->guided_kind)
        return td_fail(err, TD_ERR_INVALID,
                       "sampling.guided_kind is set beside allowed_token_ids or bad_words");
    td_status s =
        td_token_filter_create(td_model_config(td_engine_model(w->engine))->vocab,
                               p->allowed_token_ids, p->n_allowed_token_ids, &r->filter, err);
    for (size_t i = 0; !s && i < p->n_bad_words; i++)
        s = td_token_filter_forbid(r->filter, p->bad_words[i]->ids, p->bad_words[i]->n_ids, err);
    if (!s) r->seq->guide = (struct td_seq_guide){td_token_filter_allowed, r->filter};
    return s;
}

static void end_filters(struct td_req *r)
{
    td_guided_end(&r->guided);
    td_token_filter_free(r->filter);
    r->filter = NULL;
}

void td_worker_on_guided(void *worker, void *req)
{
    struct td_req *r = req;
    td_worker_post(worker, &r->mail_guided);
}

/* ---- accepting, on the rpc thread ------------------------------------------------------------ */

/* A key has its router's deadline, by that router's clock: among requests of several routers it
 * counts by ours. The difference is the session's first, so that one router's requests keep their
 * order; it is taken anew when the clocks have drifted apart. */
static uint64_t key_by_our_clock(struct td_worker *w, const Tandem__V1__Sequence *in)
{
    enum { DRIFT_US = 100000 };
    const uint64_t deadline = ((uint64_t)1 << 50) - 1; /* td_queue_wire_key */
    int at = td_worker_router_at(w, in->session);
    if (at < 0 || !in->clock_us || in->clock_us > deadline) return in->priority;
    struct td_worker_router *router = &w->routers[at];
    int64_t ahead_us = (int64_t)(td_now_ns() / TD_NS_PER_US) - (int64_t)in->clock_us,
            drift_us = ahead_us - router->clock_ahead_us;
    if (router->clock_session != in->session || drift_us > DRIFT_US || drift_us < -DRIFT_US)
        router->clock_ahead_us = ahead_us;
    router->clock_session = in->session;
    int64_t us = (int64_t)(in->priority & deadline) + router->clock_ahead_us;
    return (in->priority & ~deadline) | (us < 0                    ? 0
                                         : (uint64_t)us < deadline ? (uint64_t)us
                                                                   : deadline);
}

static td_status seq_fill(struct td_worker *w, struct td_seq *seq, const Tandem__V1__Sequence *in,
                          struct td_err *err)
{
    const Tandem__V1__SamplingSpec *p = in->sampling;
    if (!p) return td_fail(err, TD_ERR_INVALID, "seq.sampling is missing");
    if (in->n_tokens > INT32_MAX)
        return td_fail(err, TD_ERR_INVALID, "seq.tokens has %zu ids, limit %d", in->n_tokens,
                       INT32_MAX);
    if (in->n_tokens > 0 && in->n_prompt > in->n_tokens)
        return td_fail(err, TD_ERR_INVALID, "n_prompt is %u, must be 1..%zu", in->n_prompt,
                       in->n_tokens);
    if (p->n_logit_bias > TD_MAX_LOGIT_BIAS)
        return td_fail(err, TD_ERR_INVALID, "sampling.logit_bias has %zu entries, limit %d",
                       p->n_logit_bias, TD_MAX_LOGIT_BIAS);
    if (p->n_stop_token_ids > TD_MAX_STOP_TOKENS)
        return td_fail(err, TD_ERR_INVALID, "sampling.stop_token_ids has %zu ids, limit %d",
                       p->n_stop_token_ids, TD_MAX_STOP_TOKENS);
    struct td_logit_bias bias[TD_MAX_LOGIT_BIAS];
    for (size_t i = 0; i < p->n_logit_bias; i++)
        bias[i] = (struct td_logit_bias){p->logit_bias[i]->token, p->logit_bias[i]->bias};
    struct td_sampling s = {.temperature = p->temperature,
                            .top_k = p->top_k,
                            .top_p = p->top_p,
                            .min_p = p->min_p,
                            .repetition_penalty = p->repetition_penalty,
                            .presence_penalty = p->presence_penalty,
                            .frequency_penalty = p->frequency_penalty,
                            .seed = p->seed,
                            .n_logprobs = p->n_logprobs,
                            .logit_bias = bias,
                            .n_logit_bias = (int32_t)p->n_logit_bias};
    seq->request = in->request;
    seq->sched.order = in->order ? in->order : in->request;
    seq->attempt = in->attempt;
    seq->sched.priority = key_by_our_clock(w, in);
    if (in->cache_salt.len && in->cache_salt.len != TD_PREFIX_SALT_BYTES)
        return td_fail(err, TD_ERR_INVALID, "seq.cache_salt has %zu bytes, must have 0 or %d",
                       in->cache_salt.len, TD_PREFIX_SALT_BYTES);
    if (in->cache_salt.len) {
        const uint8_t *b = in->cache_salt.data;
        for (int i = 0; i < 8; i++) {
            seq->salt.lo |= (uint64_t)b[i] << 8 * i;
            seq->salt.hi |= (uint64_t)b[8 + i] << 8 * i;
        }
    }
    td_status st =
        td_engine_seq_set(w->engine, seq, in->tokens, (int32_t)in->n_tokens, (int32_t)in->n_prompt,
                          &s, p->stop_token_ids, (int32_t)p->n_stop_token_ids, p->max_tokens, err);
    if (!st) st = td_engine_seq_set_min_tokens(seq, p->min_tokens, err);
    return st ? st : td_engine_seq_set_prompt_logprobs(seq, (int64_t)p->prompt_logprobs - 1, err);
}

/* Fills r->logged_name. */
static td_status name_fill(struct td_req *r, const Tandem__V1__Sequence *in, struct td_err *err)
{
    enum { TRACE_ID_BYTES = 16 };
    size_t size = sizeof r->logged_name;
    size_t n = (size_t)snprintf(r->logged_name, size, "%llx", (unsigned long long)in->request);
    if (!in->trace_id.len) return TD_OK;
    if (in->trace_id.len != TRACE_ID_BYTES)
        return td_fail(err, TD_ERR_INVALID, "seq.trace_id has %zu bytes, must have 0 or %d",
                       in->trace_id.len, TRACE_ID_BYTES);
    n += (size_t)snprintf(r->logged_name + n, size - n, " trace_id=");
    for (size_t i = 0; i < TRACE_ID_BYTES; i++)
        n += (size_t)snprintf(r->logged_name + n, size - n, "%02x", in->trace_id.data[i]);
    return TD_OK;
}

void td_worker_turn_away(const struct td_caller *caller, enum td_code code, const char *details)
{
    if (caller->call)
        td_rpc_call_finish(caller->call, code, details, NULL, 0);
    else
        td_multiplex_turn_away(caller, code, details);
}

static void refuse(struct td_worker *w, const struct td_caller *caller, uint64_t session,
                   enum td_code code, const char *details)
{
    int router = td_worker_router_at(w, session);
    if (router >= 0) {
        pthread_mutex_lock(&w->told.lock);
        w->told.reports[router].calls_refused++;
        pthread_mutex_unlock(&w->told.lock);
    }
    td_worker_turn_away(caller, code, details);
}

void td_worker_accept(struct td_worker *w, const struct td_caller *caller,
                      const ProtobufCMessage *msg, const Tandem__V1__Sequence *in)
{
    struct td_err err = {0};
    if (in && caller->call && !td_worker_is_proved(w, caller->call, in->request, in->attempt))
        return;
    if (atomic_load(&w->draining)) {
        refuse(w, caller, in ? in->session : 0, TD_CODE_UNAVAILABLE,
               "this worker is draining; send the request to another");
        return;
    }
    if (!in) {
        refuse(w, caller, 0, TD_CODE_INVALID_ARGUMENT, "seq is missing");
        return;
    }
    struct td_seq *seq = td_engine_seq_get(w->engine);
    if (!seq) {
        refuse(w, caller, in->session, TD_CODE_RESOURCE_EXHAUSTED,
               "max_seqs requests are live on this worker");
        return;
    }
    struct td_req *r = &w->reqs[seq->index];
    *r = (struct td_req){.seq = seq,
                         .caller = *caller,
                         .state = TD_REQ_SCHEDULED,
                         .arrived_ns = td_now_ns(),
                         .session = in->session};
    td_status s = name_fill(r, in, &err);
    if (!s) s = seq_fill(w, seq, in, &err);
    if (!s) s = guided_fill(w, r, in->sampling, &err);
    if (!s) s = filter_fill(w, r, in->sampling, &err);
    if (!s) s = w->role->accept(w, r, msg, &err);
    if (s) {
        if (r->guide) td_guided_drop(r->guide);
        end_filters(r);
        td_engine_seq_put(w->engine, seq);
        refuse(w, caller, in->session, td_rpc_code(s), err.msg);
        return;
    }
    seq->owner = r;
    if (caller->call) {
        td_rpc_call_ref(caller->call);
        td_rpc_call_set_user(caller->call, r);
    }
    r->mail_new = (struct td_mail){.kind = TD_MAIL_NEW, .req = r};
    r->mail_guided = (struct td_mail){.kind = TD_MAIL_GUIDED, .req = r};
    r->mail_ended = (struct td_mail){.kind = TD_MAIL_ENDED, .req = r};
    atomic_fetch_add(&w->n_live, 1);
    td_worker_post(w, &r->mail_new);
}

static void on_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)cancelled;
    struct td_req *r = td_rpc_call_user(call);
    if (!r) return; /* refused at accept */
    td_rpc_call_set_user(call, NULL);
    td_worker_post(ctx, &r->mail_ended);
}

static void on_abort(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    const Tandem__V1__AbortRequest *in = (const Tandem__V1__AbortRequest *)msg;
    if (!td_worker_is_proved(ctx, call, in->request, in->attempt)) return;
    struct td_mail *m = malloc(sizeof *m);
    if (!m) {
        td_rpc_call_finish(call, TD_CODE_RESOURCE_EXHAUSTED, "no memory", NULL, 0);
        return;
    }
    const struct td_worker_router *router = td_worker_router_of(ctx, call);
    *m = (struct td_mail){.kind = TD_MAIL_ABORT,
                          .request = in->request,
                          .attempt = in->attempt,
                          .session = router ? atomic_load(&router->session) : 0};
    td_worker_post(ctx, m);
    Tandem__V1__AbortResponse out = TANDEM__V1__ABORT_RESPONSE__INIT;
    td_rpc_call_send(call, &out.base);
    td_rpc_call_finish(call, TD_CODE_OK, NULL, NULL, 0);
}

static void on_nothing_end(struct td_rpc_call *call, bool cancelled, void *ctx)
{
    (void)call;
    (void)cancelled;
    (void)ctx;
}

void td_worker_take_decode(struct td_worker *w, const struct td_caller *caller,
                           const Tandem__V1__DecodeRequest *in)
{
    if (w->role->decode)
        w->role->decode(w, caller, in);
    else
        td_worker_turn_away(caller, TD_CODE_FAILED_PRECONDITION,
                            "this is a prefill worker: send Decode to a decode worker");
}

void td_worker_take_prefill(struct td_worker *w, const struct td_caller *caller,
                            const Tandem__V1__PrefillRequest *in)
{
    if (w->role->prefill)
        w->role->prefill(w, caller, in);
    else
        td_worker_turn_away(caller, TD_CODE_FAILED_PRECONDITION,
                            "this is a decode worker: send Prefill to a prefill worker");
}

static void on_decode(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    const struct td_caller caller = {.call = call};
    td_worker_take_decode(ctx, &caller, (const Tandem__V1__DecodeRequest *)msg);
}

static void on_prefill(struct td_rpc_call *call, const ProtobufCMessage *msg, void *ctx)
{
    const struct td_caller caller = {.call = call};
    td_worker_take_prefill(ctx, &caller, (const Tandem__V1__PrefillRequest *)msg);
}

const struct td_rpc_method td_worker_methods[] = {
    {.path = "/tandem.v1.Worker/Decode",
     .request = &tandem__v1__decode_request__descriptor,
     .on_message = on_decode,
     .on_end = on_end,
     .on_open = td_worker_on_open},
    {.path = "/tandem.v1.Worker/Prefill",
     .request = &tandem__v1__prefill_request__descriptor,
     .on_message = on_prefill,
     .on_end = on_end,
     .on_open = td_worker_on_open},
    {.path = "/tandem.v1.Worker/Multiplex",
     .request = &tandem__v1__multiplex_up__descriptor,
     .client_streaming = true,
     .on_message = td_multiplex_on_message,
     .on_end = td_multiplex_on_end,
     .on_open = td_worker_on_open},
    {.path = "/tandem.v1.Worker/Abort",
     .request = &tandem__v1__abort_request__descriptor,
     .on_message = on_abort,
     .on_end = on_nothing_end,
     .on_open = td_worker_on_open},
    {.path = "/tandem.v1.Worker/Prove",
     .request = &tandem__v1__prove_request__descriptor,
     .on_message = td_worker_on_prove,
     .on_end = on_nothing_end,
     .on_open = td_worker_on_open},
    {0},
};

/* ---- lists ----------------------------------------------------------------------------------- */

static void set_waiting(struct td_worker *w, struct td_req *r)
{
    td_scheduler_wait(w->sched, &r->seq->sched);
    r->state = TD_REQ_SCHEDULED;
}

void td_worker_set_running(struct td_worker *w, struct td_req *r)
{
    td_scheduler_run(w->sched, &r->seq->sched);
    r->state = TD_REQ_SCHEDULED;
}

/* ---- the end of a request -------------------------------------------------------------------- */

static void maybe_free(struct td_worker *w, struct td_req *r)
{
    if (!r->call_ended || r->xfer_live || r->guide || r->state != TD_REQ_OVER) return;
    if (w->role->forget) w->role->forget(r);
    end_filters(r);
    if (r->caller.call)
        td_rpc_call_unref(r->caller.call);
    else
        td_multiplex_leave(r->caller.multiplex);
    r->caller = (struct td_caller){0};
    r->state = TD_REQ_FREE;
    if (r->live_prev)
        r->live_prev->live_next = r->live_next;
    else
        w->live = r->live_next;
    if (r->live_next) r->live_next->live_prev = r->live_prev;
    struct td_seq *seq = r->seq;
    td_engine_seq_put(w->engine, seq);
    w->n_freed++;
}

static void give_back(struct td_worker *w, struct td_req *r)
{
    td_engine_release(w->engine, r->seq);
    r->state = TD_REQ_OVER;
    maybe_free(w, r);
}

static void tell_end(struct td_req *r, enum td_code code, const char *details)
{
    r->is_refused |= !r->finished && code == TD_CODE_INVALID_ARGUMENT;
    if (!r->finished && r->caller.call) td_rpc_call_finish(r->caller.call, code, details, NULL, 0);
    if (!r->finished && !r->caller.call) {
        td_multiplex_finish(&r->caller, code, details);
        r->call_ended = true;
    }
    r->finished = true;
}

void td_worker_send(struct td_req *r, const ProtobufCMessage *event)
{
    if (!r->caller.call) {
        if (!r->finished) td_multiplex_event(&r->caller, event);
        return;
    }
    td_status s = td_rpc_call_send(r->caller.call, event);
    if (s && s != TD_ERR_CANCELLED)
        td_warn_limited("stream_dropped", "req=%s status=%s", r->logged_name, td_status_name(s));
}

static void end_with(struct td_worker *w, struct td_req *r, enum td_code code, const char *details)
{
    if (r->state == TD_REQ_OVER || r->state == TD_REQ_RETIRING) return;
    tell_end(r, code, details);
    td_scheduler_detach(w->sched, &r->seq->sched);
    if (r->guide && td_guided_drop(r->guide)) r->guide = NULL;
    if (r->xfer_live) {
        r->state = TD_REQ_RETIRING;
        w->role->xfer_stop(w, r, details ? details : "finished");
        return;
    }
    give_back(w, r);
}

void td_worker_end(struct td_worker *w, struct td_req *r, td_status status, const char *details)
{
    end_with(w, r, td_rpc_code(status), details);
}

/* With a code that no other end has: a fail-over would be in vain. */
void td_worker_end_late(struct td_worker *w, struct td_req *r)
{
    end_with(w, r, TD_CODE_OUT_OF_RANGE, "it would be computed too late for its objective");
}

void td_worker_finish_ok(struct td_worker *w, struct td_req *r)
{
    end_with(w, r, TD_CODE_OK, NULL);
}

void td_worker_xfer_over(struct td_worker *w, struct td_req *r)
{
    r->xfer_live = false;
    if (r->state == TD_REQ_RETIRING) give_back(w, r);
}

/* There is nobody to tell any more. */
static void caller_gone(struct td_worker *w, struct td_req *r)
{
    r->call_ended = true;
    r->finished = true;
    if (r->state == TD_REQ_OVER || r->state == TD_REQ_RETIRING)
        maybe_free(w, r);
    else
        end_with(w, r, TD_CODE_CANCELLED, "call cancelled");
}

/* The calls of m, or the one whose id is *id. */
static void callers_gone(struct td_worker *w, const struct td_multiplex *m, const uint64_t *id)
{
    for (struct td_req *r = w->live, *next; r; r = next) {
        next = r->live_next;
        if (r->caller.multiplex == m && (!id || r->caller.id == *id)) caller_gone(w, r);
    }
}

/* For its router, whose snapshots say how many of its calls they have seen. */
static void count_call(struct td_worker *w, const struct td_req *r)
{
    int at = td_worker_router_at(w, r->session);
    if (at < 0) return;
    struct td_worker_router *router = &w->routers[at];
    uint64_t session = atomic_load(&router->session);
    if (router->counted_session != session) router->calls_taken = 0;
    router->counted_session = session;
    router->calls_taken++;
}

/* Only the router that asked for a request ends it. */
static void abort_request(struct td_worker *w, const struct td_mail *m)
{
    for (struct td_req *r = w->live, *next; r; r = next) {
        next = r->live_next;
        bool owns = !m->session || !r->session || m->session == r->session;
        if (owns && r->seq->request == m->request && r->seq->attempt <= m->attempt)
            td_worker_end(w, r, TD_ERR_CANCELLED, "aborted by the router");
    }
}

static void begin(struct td_worker *w, struct td_req *r)
{
    r->live_next = w->live;
    if (w->live) w->live->live_prev = r;
    w->live = r;
    count_call(w, r);
    if (r->caller.multiplex) td_multiplex_enter(r->caller.multiplex);
    td_debug("request_taken", "req=%s attempt=%u tokens=%d", r->logged_name, r->seq->attempt,
             r->seq->sched.n_tokens);
    if (r->guide) {
        r->state = TD_REQ_GRAMMAR;
        td_guided_submit(r->guide);
    } else {
        set_waiting(w, r);
    }
}

static void take_guide(struct td_worker *w, struct td_req *r)
{
    struct td_err err = {0};
    td_status s = td_guided_take(r->guide, r->seq, &r->guided, &err);
    r->guide = NULL;
    if (r->state == TD_REQ_OVER)
        maybe_free(w, r);
    else if (s)
        td_worker_end(w, r, s, err.msg);
    else
        set_waiting(w, r);
}

void td_worker_take_mail(struct td_worker *w)
{
    struct td_mail *next;
    for (struct td_mail *m = mail_take_all(w); m; m = next) {
        next = m->next;
        struct td_req *r = m->req;
        switch (m->kind) {
        case TD_MAIL_NEW:
            begin(w, r);
            break;
        case TD_MAIL_GUIDED:
            take_guide(w, r);
            break;
        case TD_MAIL_ENDED:
            caller_gone(w, r);
            break;
        case TD_MAIL_CANCEL:
            callers_gone(w, m->multiplex, &m->request);
            free(m);
            break;
        case TD_MAIL_STREAM_ENDED:
            callers_gone(w, m->multiplex, NULL);
            td_multiplex_over(m->multiplex);
            break;
        case TD_MAIL_ABORT:
            abort_request(w, m);
            free(m);
            break;
        }
    }
}

/* ---- tokens on the wire ---------------------------------------------------------------------- */

void td_token_out_fill(struct td_token_out *o, const struct td_seq *seq, const struct td_sampled *s)
{
    tandem__v1__token_out__init(&o->msg);
    o->msg.index = (uint32_t)seq->sched.n_tokens - 1;
    o->msg.token = s->token;
    o->msg.finish = (Tandem__V1__FinishReason)seq->finish;
    if (seq->sampling.n_logprobs < 0) return;
    tandem__v1__logprobs__init(&o->lp);
    o->lp.logprob = s->logprob;
    o->lp.n_top = (size_t)s->n_top;
    o->lp.top = o->top_ptrs;
    for (int32_t i = 0; i < s->n_top; i++) {
        tandem__v1__token_logprob__init(&o->tops[i]);
        o->tops[i].token = s->top_tokens[i];
        o->tops[i].logprob = s->top_logprobs[i];
        o->top_ptrs[i] = &o->tops[i];
    }
    o->msg.logprobs = &o->lp;
}

int32_t td_scored_out_fill(struct td_scored_out *o, const struct td_step_item *item, int32_t from)
{
    int32_t n = item->n_scored - from;
    if (n > TD_SCORED_OUT_MAX) n = TD_SCORED_OUT_MAX;
    tandem__v1__prompt_logprobs__init(&o->msg);
    o->msg.first = (uint32_t)(item->first_scored + from);
    o->msg.tokens = o->token_ptrs;
    o->msg.n_tokens = n > 0 ? (size_t)n : 0;
    for (int32_t i = 0; i < n; i++) {
        const struct td_scored *s = &item->scored[from + i];
        Tandem__V1__PromptLogprob *t = o->token_ptrs[i] = &o->tokens[i];
        tandem__v1__prompt_logprob__init(t);
        t->token = s->at.token;
        t->logprob = s->at.logprob;
        t->rank = (uint32_t)s->rank;
        t->n_top = (size_t)s->at.n_top;
        t->top = o->top_ptrs[i];
        for (int32_t k = 0; k < s->at.n_top; k++) {
            tandem__v1__token_logprob__init(&o->tops[i][k]);
            o->tops[i][k].token = s->at.top_tokens[k];
            o->tops[i][k].logprob = s->at.top_logprobs[k];
            o->top_ptrs[i][k] = &o->tops[i][k];
        }
    }
    return n;
}
