/* legs.c - one call to a worker for each leg of a request.
 *
 * A leg reports to the core (ticket, first token, tokens, end) with the attempt it was started
 * for, so what an old attempt says changes nothing. The call is one of the worker's stream
 * (multiplex.c), or, to an older worker, a call of its own. A cancelled leg of a stream is freed at
 * once; one with a call of its own is detached: its remaining events are ignored and it frees
 * itself at on_done. */
#include <stdlib.h>
#include <string.h>

#include "common/base/clock.h"
#include "common/base/fault.h"
#include "common/base/log.h"
#include "router/router.h"

/* Which attempt of which request the leg is of. */
static struct td_attempt attempt_of(const struct leg *l)
{
    return (struct td_attempt){.request_at = l->request_at, .attempt = l->attempt, .id = l->id};
}

static struct td_core_event decode_end(const struct leg *l, enum td_code code)
{
    return (struct td_core_event){
        .kind = TD_EV_DECODE_END,
        .decode_end = {.of = attempt_of(l), .code = code, .sender_finished = l->sender_finished}};
}

static struct td_core_event prefill_end(const struct leg *l, enum td_code code)
{
    return (struct td_core_event){
        .kind = TD_EV_PREFILL_END,
        .prefill_end = {
            .of = attempt_of(l), .code = code, .sent_bytes = l->sent_bytes, .sent_us = l->sent_us}};
}

/* The client has all of its output. */
static struct td_core_event output_stop(uint32_t request_at, uint64_t id)
{
    return (struct td_core_event){.kind = TD_EV_STOP, .stop = {.request_at = request_at, .id = id}};
}

static struct leg *leg_new(struct router *r, struct request_state *q,
                           const struct td_core_action *a, enum leg_kind kind)
{
    struct leg *l = calloc(1, sizeof *l);
    TD_ASSERT(l); /* small and bounded by 2 x max_requests */
    *l = (struct leg){.router = r,
                      .request = q,
                      .worker = &r->workers[a->start.worker],
                      .kind = kind,
                      .request_at = a->request_at,
                      .attempt = a->attempt,
                      .id = a->id,
                      .local = a->start.local};
    l->worker->n_legs++;
    return l;
}

static void leg_free(struct leg *l)
{
    if (l->request) {
        struct leg **at =
            l->kind == LEG_DECODE ? &l->request->decode.leg : &l->request->prefill.leg;
        TD_ASSERT(*at == l); /* a detached leg has no request */
        *at = NULL;
    }
    worker_conn_release(l->worker);
    free(l);
}

void leg_cancel(struct leg **leg)
{
    struct leg *l = *leg;
    if (!l) return;
    *leg = NULL;
    l->request = NULL;
    if (l->held_end) {
        leg_free(l);
        return;
    }
    if (l->call) {
        td_rpc_call_cancel(l->call);
        return;
    }
    multiplex_cancel(l);
    leg_free(l);
}

/* Cancels the leg and tells the core that it failed: the worker broke the protocol. */
static void leg_broken(struct leg *l, const char *why)
{
    if (l->request->output.differs) {
        request_refuse_resumed(l->router, l->request);
        return;
    }
    struct served_model *m = l->worker->model;
    struct td_core_event e =
        l->kind == LEG_DECODE ? decode_end(l, TD_CODE_INTERNAL) : prefill_end(l, TD_CODE_INTERNAL);
    snprintf(l->request->last_error, sizeof l->request->last_error, "%s: %s", l->worker->name, why);
    char q[600];
    td_warn_limited("leg_broken", "req=%s worker=%s why=%s action=fail_over",
                    l->request->logged_name, l->worker->logged_name,
                    td_log_quote(q, sizeof q, why));
    leg_cancel(l->kind == LEG_DECODE ? &l->request->decode.leg : &l->request->prefill.leg);
    served_model_event(m, e);
}

static Tandem__V1__Sequence sequence_of(struct request_state *q, const struct worker_conn *w)
{
    Tandem__V1__Sequence s = TANDEM__V1__SEQUENCE__INIT;
    s.request = q->number;
    s.session = w->session;
    s.clock_us = td_now_ns() / TD_NS_PER_US;
    s.order = q->id;
    s.attempt = q->attempt;
    s.n_tokens = q->n_tokens;
    s.tokens = q->tokens;
    s.n_prompt = q->n_prompt;
    s.sampling = &q->ask.spec;
    s.priority = q->key;
    if (q->ask.salt.lo || q->ask.salt.hi) {
        s.cache_salt.data = (uint8_t *)&q->ask.salt; /* little-endian words, as prefix_hash.h has
                                                        them */
        s.cache_salt.len = sizeof q->ask.salt;
    }
    if (q->trace.has_id) {
        s.trace_id.data = q->trace.at.trace_id;
        s.trace_id.len = sizeof q->trace.at.trace_id;
    }
    return s;
}

static void copy_end(struct leg *l, enum td_code code, const char *details)
{
    if (code != TD_CODE_OK)
        snprintf(l->request->last_error, sizeof l->request->last_error, "%s: %s", l->worker->name,
                 details);
}

/* The time left to the client, for a call of a leg's own; 0 = no limit. A leg of a stream needs
 * none: the client's call ends at its deadline, and with it the request. */
static uint64_t deadline_ms(const struct request_state *q)
{
    uint64_t left = q->client.ops->remaining_ms(q->client.call);
    return left == UINT64_MAX ? 0 : left + 1;
}

/* ---- the prompt's log-probabilities ---------------------------------------------------------- *
 *
 * They come from the worker that computes the prompt and go to the client before any token. Tokens
 * of a decode worker may overtake them: those are held, packed, until all is there. */

#define UNSCORED "it gave a token without the log-probabilities of the prompt"

struct held_tokens {
    struct held_tokens *next;
    size_t n_bytes;
    uint8_t bytes[];
};

static void hold(struct request_state *q, const Tandem__V1__Tokens *t)
{
    struct held_tokens **at = &q->decode.held;
    size_t n = protobuf_c_message_get_packed_size(&t->base);
    struct held_tokens *h = malloc(sizeof *h + n);
    TD_ASSERT(h); /* bounded by the output's tokens */
    *h = (struct held_tokens){.n_bytes = n};
    protobuf_c_message_pack(&t->base, h->bytes);
    while (*at) at = &(*at)->next;
    *at = h;
}

void leg_drop_held(struct request_state *q)
{
    while (q->decode.held) {
        struct held_tokens *h = q->decode.held;
        q->decode.held = h->next;
        free(h);
    }
}

static void decode_tokens(struct leg *l, const Tandem__V1__Tokens *t);
static void end_decode(struct leg *l, enum td_code code, const char *details);

/* All log-probabilities are there: what was held comes now. May end the request. */
static void release(struct request_state *q)
{
    uint64_t id = q->id;
    while (q->decode.held && q->decode.leg) {
        struct held_tokens *h = q->decode.held;
        Tandem__V1__Tokens *t = tandem__v1__tokens__unpack(NULL, h->n_bytes, h->bytes);
        TD_ASSERT(t); /* it was packed here */
        q->decode.held = h->next;
        free(h);
        decode_tokens(q->decode.leg, t);
        tandem__v1__tokens__free_unpacked(t, NULL);
        if (!q->live || q->id != id) return;
    }
    struct leg *l = q->decode.leg;
    if (!l || !l->held_end) return;
    l->held_end = false;
    end_decode(l, TD_CODE_OK, "");
}

/* False: the leg is over. */
static bool take_scored(struct leg *l, const Tandem__V1__PromptLogprobs *p)
{
    struct request_state *q = l->request;
    bool waited = output_waits_for_prompt(q);
    if (output_take_prompt(q, p)) {
        leg_broken(l, "log-probabilities of the prompt contradict it");
        return false;
    }
    if (waited && !output_waits_for_prompt(q)) release(q);
    return true;
}

/* ---- decode leg ------------------------------------------------------------------------------ */

static void take_ticket(struct leg *l, const Tandem__V1__Ticket *t)
{
    struct request_state *q = l->request;
    if (l->local || t->grant.len == 0 || t->cached_tokens >= q->n_tokens) {
        leg_broken(l, "the ticket makes no sense");
        return;
    }
    uint8_t *copy = malloc(t->grant.len);
    TD_ASSERT(copy); /* bounded by the message limit */
    memcpy(copy, t->grant.data, t->grant.len);
    free(q->decode.grant);
    q->decode.grant = copy;
    q->decode.grant_bytes = t->grant.len;
    q->decode.cached_tokens = t->cached_tokens;
    q->decode.ticket_ns = td_now_ns();
    td_fault_point("router_ticket");
    served_model_event(
        l->worker->model,
        (struct td_core_event){.kind = TD_EV_TICKET,
                               .ticket = {.of = attempt_of(l), .cached_tokens = t->cached_tokens}});
}

static void decode_tokens(struct leg *l, const Tandem__V1__Tokens *t)
{
    struct request_state *q = l->request;
    if (output_waits_for_prompt(q)) {
        if (l->local)
            leg_broken(l, UNSCORED);
        else
            hold(q, t);
        return;
    }
    bool done_before = q->output.done;
    for (size_t i = 0; i < t->n_out; i++)
        if (t->out[i]->finish) l->finished_seen = true;
    if (output_take(q, t->out, t->n_out)) {
        leg_broken(l, "a token contradicts the stream");
        return;
    }
    td_fault_point("router_token");
    bool stopped_here = q->output.done && !done_before && !l->finished_seen;
    struct served_model *m = l->worker->model;
    uint32_t request_at = l->request_at;
    uint64_t id = l->id;
    struct td_core_event e = {
        .kind = TD_EV_TOKEN,
        .token = {.of = attempt_of(l), .n_tokens = q->n_tokens, .last = q->output.done}};
    served_model_event(m, e); /* may end the request and free this leg */
    if (stopped_here) served_model_event(m, output_stop(request_at, id));
}

static void take_decode_times(struct request_state *q, const Tandem__V1__DecodeTimes *t)
{
    q->ledger.transfer_us = t->transfer_us;
    q->ledger.transfer_exposed_us = t->transfer_exposed_us;
    q->ledger.decode_queue_us = t->decode_queue_us;
    q->ledger.first_step_us = t->first_step_us;
    q->ledger.transfer_bytes = t->transfer_bytes;
    q->ledger.preemptions += t->preemptions;
    bool known = !strcmp(t->transfer_path, "shm") || !strcmp(t->transfer_path, "tcp") ||
                 !strcmp(t->transfer_path, "rdma") || !strcmp(t->transfer_path, "cuda-ipc") ||
                 !strcmp(t->transfer_path, "shm-staged") || !strcmp(t->transfer_path, "local");
    /* The path goes into metadata, so it is one of the names known here. */
    snprintf(q->decode.path, sizeof q->decode.path, "%s", known ? t->transfer_path : "other");
}

static void take_prefill_times(struct request_state *q, const Tandem__V1__PrefillTimes *t)
{
    /* The ledger is that of the attempt that made the first token. */
    if (q->output.first_sent && q->attempt != q->output.first_attempt) return;
    q->ledger.prefill_queue_us = t->queue_us;
    q->ledger.prefill_us = t->prefill_us;
    q->prefill.cached_tokens = t->cached_tokens;
}

static void decode_event(struct leg *l, const Tandem__V1__DecodeEvent *ev)
{
    switch (ev->event_case) {
    case TANDEM__V1__DECODE_EVENT__EVENT_TICKET:
        take_ticket(l, ev->ticket);
        break;
    case TANDEM__V1__DECODE_EVENT__EVENT_TOKENS:
        decode_tokens(l, ev->tokens);
        break;
    case TANDEM__V1__DECODE_EVENT__EVENT_TIMES:
        take_decode_times(l->request, ev->times);
        break;
    case TANDEM__V1__DECODE_EVENT__EVENT_PREFILL_TIMES:
        take_prefill_times(l->request, ev->prefill_times);
        break;
    case TANDEM__V1__DECODE_EVENT__EVENT_SENDER_FINISHED:
        l->sender_finished = true;
        break;
    case TANDEM__V1__DECODE_EVENT__EVENT_PROMPT_LOGPROBS:
        take_scored(l, ev->prompt_logprobs);
        break;
    default:
        break; /* a newer worker's event: tolerated */
    }
}

static void decode_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    struct leg *l = user;
    if (l->request) decode_event(l, (const Tandem__V1__DecodeEvent *)msg);
}

static void end_decode(struct leg *l, enum td_code code, const char *details)
{
    struct served_model *m = l->worker->model;
    struct request_state *q = l->request;
    bool tell = q != NULL, done = q && q->output.done;
    if (q && code == TD_CODE_OK && q->decode.held) { /* it goes on in release() */
        l->held_end = true;
        l->call = NULL;
        return;
    }
    if (q) {
        copy_end(l, code, details);
        if (code == TD_CODE_OK && !done) {
            code = TD_CODE_INTERNAL;
            snprintf(q->last_error, sizeof q->last_error,
                     "%s: the decode stream ended without a last token", l->worker->name);
        }
    }
    bool all_sent = done && code != TD_CODE_OK; /* the client has everything, however the call
                                                   ended */
    struct td_core_event e = all_sent ? output_stop(l->request_at, l->id) : decode_end(l, code);
    leg_free(l);
    if (tell) served_model_event(m, e);
}

static void call_done(struct td_rpc_call *call, const struct td_rpc_result *res, void *user)
{
    (void)call;
    leg_end(user, res->code, res->details);
}

static const struct td_rpc_client_method decode_method = {
    "/tandem.v1.Worker/Decode", &tandem__v1__decode_event__descriptor, false};
static const struct td_rpc_handler decode_handler = {decode_message, call_done};

/* Notes what was predicted for the attempt; called with the leg that it begins with. */
static void begin_attempt(struct request_state *q, const struct td_core_action *a)
{
    q->attempt = a->attempt;
    if (q->output.first_sent) return;
    q->ledger.predicted_ttft_us = a->start.ttft_us;
    q->ledger.predicted_tpot_us = a->start.tpot_us;
}

void leg_start_decode(struct router *r, struct request_state *q, const struct td_core_action *a)
{
    begin_attempt(q, a);
    q->key = a->start.key;
    leg_drop_held(q);
    struct leg *l = leg_new(r, q, a, LEG_DECODE);
    q->decode.leg = l;
    q->decode.sent_ns = td_now_ns();
    q->decode.ticket_ns = 0;
    router_copy_text(q->decode.name, sizeof q->decode.name, l->worker->name);
    if (a->start.local) router_copy_text(q->prefill.name, sizeof q->prefill.name, l->worker->name);
    Tandem__V1__Sequence s = sequence_of(q, l->worker);
    Tandem__V1__DecodeRequest m = TANDEM__V1__DECODE_REQUEST__INIT;
    m.seq = &s;
    m.local_prefill = a->start.local;
    m.no_wait = l->worker->n_routers > 1;
    Tandem__V1__MultiplexCall in_stream = TANDEM__V1__MULTIPLEX_CALL__INIT;
    in_stream.call_case = TANDEM__V1__MULTIPLEX_CALL__CALL_DECODE;
    in_stream.decode = &m;
    if (multiplex_call(l, &in_stream)) return;
    char proof[TD_CALL_PROOF_MAX];
    struct td_rpc_metadata metadata;
    size_t n = worker_proof(l->worker, decode_method.path, s.request, s.attempt, proof, &metadata);
    l->call = td_rpc_call_start(l->worker->channel, &decode_method, &m.base, deadline_ms(q), false,
                                &metadata, n, &decode_handler, l);
}

/* ---- prefill leg ----------------------------------------------------------------------------- */

static void take_first(struct leg *l, Tandem__V1__FirstToken *f)
{
    struct request_state *q = l->request;
    if (!f->out) {
        leg_broken(l, "the first-token event is empty");
        return;
    }
    if (output_waits_for_prompt(q)) {
        leg_broken(l, UNSCORED);
        return;
    }
    td_fault_point("router_first_token");
    if (f->times) take_prefill_times(q, f->times);
    bool done_before = q->output.done;
    if (output_take(q, &f->out, 1)) {
        leg_broken(l, "the first token contradicts the stream");
        return;
    }
    bool finished = f->out->finish != TANDEM__V1__FINISH_REASON__FINISH_NONE;
    bool stopped_here = q->output.done && !done_before && !finished;
    struct td_core_event e = {
        .kind = TD_EV_FIRST_TOKEN,
        .first_token = {.of = attempt_of(l),
                        .last = finished,
                        .n_tokens = q->n_tokens,
                        .cached_tokens = f->times ? f->times->cached_tokens : 0}};
    uint32_t request_at = l->request_at;
    uint64_t id = l->id;
    struct served_model *m = l->worker->model;
    served_model_event(m, e); /* may end the request and free this leg */
    if (stopped_here) served_model_event(m, output_stop(request_at, id));
}

static void prefill_event(struct leg *l, const Tandem__V1__PrefillEvent *ev)
{
    if (ev->event_case == TANDEM__V1__PREFILL_EVENT__EVENT_DONE) {
        l->finished_seen = l->first_seen;
        l->sent_bytes = ev->done->bytes;
        l->sent_us = ev->done->transfer_us;
    }
    if (ev->event_case == TANDEM__V1__PREFILL_EVENT__EVENT_PROMPT_LOGPROBS && l->request)
        take_scored(l, ev->prompt_logprobs);
    if (ev->event_case != TANDEM__V1__PREFILL_EVENT__EVENT_FIRST || !l->request) return;
    l->first_seen = true;
    take_first(l, ev->first);
}

static void prefill_message(struct td_rpc_call *call, const ProtobufCMessage *msg, void *user)
{
    (void)call;
    prefill_event(user, (const Tandem__V1__PrefillEvent *)msg);
}

static void end_prefill(struct leg *l, enum td_code code, const char *details)
{
    struct served_model *m = l->worker->model;
    bool tell = l->request != NULL;
    if (l->request) {
        copy_end(l, code, details);
        if (code == TD_CODE_OK && !l->finished_seen) {
            code = TD_CODE_INTERNAL;
            snprintf(l->request->last_error, sizeof l->request->last_error,
                     "%s: the prefill stream ended without a first token and done",
                     l->worker->name);
        }
    }
    struct td_core_event e = prefill_end(l, code);
    leg_free(l);
    if (tell) served_model_event(m, e);
}

static const struct td_rpc_client_method prefill_method = {
    "/tandem.v1.Worker/Prefill", &tandem__v1__prefill_event__descriptor, false};
static const struct td_rpc_handler prefill_handler = {prefill_message, call_done};

/* An attempt without a decode leg: notes what that leg would have. The reservation took no time. */
static void begin_alone(struct request_state *q, const struct td_core_action *a)
{
    begin_attempt(q, a);
    q->decode.sent_ns = q->decode.ticket_ns = td_now_ns();
    q->decode.name[0] = 0;
    free(q->decode.grant);
    q->decode.grant = NULL;
    q->decode.grant_bytes = q->decode.cached_tokens = 0;
}

void leg_start_prefill(struct router *r, struct request_state *q, const struct td_core_action *a)
{
    if (a->start.local) begin_alone(q, a);
    struct leg *l = leg_new(r, q, a, LEG_PREFILL);
    q->key = a->start.key;
    q->prefill.leg = l;
    router_copy_text(q->prefill.name, sizeof q->prefill.name, l->worker->name);
    Tandem__V1__Sequence s = sequence_of(q, l->worker);
    Tandem__V1__PrefillRequest m = TANDEM__V1__PREFILL_REQUEST__INIT;
    m.seq = &s;
    m.grant.data = q->decode.grant;
    m.grant.len = q->decode.grant_bytes;
    m.skip_tokens = q->decode.cached_tokens;
    m.work_us = a->start.work_us;
    m.finish_within_us = a->start.finish_within_us;
    Tandem__V1__MultiplexCall in_stream = TANDEM__V1__MULTIPLEX_CALL__INIT;
    in_stream.call_case = TANDEM__V1__MULTIPLEX_CALL__CALL_PREFILL;
    in_stream.prefill = &m;
    if (multiplex_call(l, &in_stream)) return;
    char proof[TD_CALL_PROOF_MAX];
    struct td_rpc_metadata metadata;
    size_t n = worker_proof(l->worker, prefill_method.path, s.request, s.attempt, proof, &metadata);
    l->call = td_rpc_call_start(l->worker->channel, &prefill_method, &m.base, deadline_ms(q), false,
                                &metadata, n, &prefill_handler, l);
}

/* ---- either leg ------------------------------------------------------------------------------ */

void leg_end(struct leg *l, enum td_code code, const char *details)
{
    if (l->kind == LEG_DECODE)
        end_decode(l, code, details);
    else
        end_prefill(l, code, details);
}

void leg_row(struct leg *l, const Tandem__V1__MultiplexRow *row)
{
    bool decodes = l->kind == LEG_DECODE;
    if (row->row_case == TANDEM__V1__MULTIPLEX_ROW__ROW_TOKEN && decodes) {
        Tandem__V1__Tokens t = TANDEM__V1__TOKENS__INIT;
        Tandem__V1__TokenOut *out = row->token;
        t.n_out = 1;
        t.out = &out;
        decode_tokens(l, &t);
    } else if (row->row_case == TANDEM__V1__MULTIPLEX_ROW__ROW_DECODE && decodes) {
        decode_event(l, row->decode);
    } else if (row->row_case == TANDEM__V1__MULTIPLEX_ROW__ROW_PREFILL && !decodes) {
        prefill_event(l, row->prefill);
    } /* else a newer worker's: tolerated */
}
